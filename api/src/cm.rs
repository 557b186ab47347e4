//! Connections: endpoints of type `FI_EP_MSG`, and those that listen for them (fi_cm(3)).
//!
//! A connected endpoint is a reliable datagram endpoint with an address vector of one entry, so
//! data calls ignore the address they are given. Connecting adds six kinds of messages between
//! *connection sides*: a hidden endpoint of a domain, made with its first connected endpoint or
//! listener. They are handled in the turn of the loop that receives them, and their content goes to
//! event queues.
//!
//! ```text
//! connect ── REQUEST ──►  FI_CONNREQ
//!            ◄── HEARD ───  the program will answer
//!            ◄── ACCEPT ──  accept    both: FI_CONNECTED
//!            ◄── REJECT ──  reject    FI_ECONNREFUSED
//! shutdown ── SHUTDOWN ─► both: FI_SHUTDOWN, once
//! ```
//!
//! A request that cannot be delivered is `FI_ECONNREFUSED` as well. The death of a peer is found by
//! the operations in flight to it, as for every endpoint. So that a message is in flight regularly,
//! a peer gets ALIVE twice per T_dead, from HEARD on, if it answers whatever its program does: a
//! thread answers for the program, or the port knows which processes live. A flag in the peer's
//! messages says so. Any other peer may be busy for longer than T_dead and gets no ALIVE. A node
//! without that connection or listener answers ALIVE by SHUTDOWN.
//!
//! A station can forge the content of its messages. So a message is accepted only if its sender is
//! the connection side that it names and its endpoint is of the same node. Connection numbers are
//! random.

pub(crate) mod connected;
pub(crate) mod side;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use barewire_dataplane::poll::Engine;
use barewire_dataplane::types::{EpAddr, FI_ADDR_UNSPEC};

use crate::domain::Domain;
use crate::ep::EpCommon;
use crate::eq::{Eq, EqInner};
use crate::errno::{Error, OpenError, Result};
use crate::fabric::{AddrInUsePolicy, Fabric, open_port};
pub use crate::info::ConnRequest;
use crate::info::{EpType, Info, Rejecter, check_limits};
use crate::inner::{Core, Shared};
use crate::names::ServiceClaim;
use crate::settings::{Settings, Threading};

use connected::{Connected, linger};
use side::{Cm, Conn, Kind, Listener, State, Transport};

pub use side::{CM_DATA_SIZE, FI_CONNECTED, FI_CONNREQ, FI_SHUTDOWN};

/// Opens the connection side of a domain, unless it is open.
fn open(core: &mut Core, shared: &Shared, number: Option<u16>) -> Result<()> {
    if core.cm().is_some() {
        return Ok(());
    }
    let object = shared.ep_count.fetch_add(1, Ordering::Relaxed);
    let mut io = Transport { engine: &mut core.engine, ops: &mut core.ops };
    let cm = Cm::open(&mut io, object, shared.settings.t_dead, number)?;
    core.cm = Some(Box::new(cm));
    // The connection side is polled as long as the domain is open.
    core.watch.add_watcher();
    Ok(())
}

fn fits(data: &[u8]) -> Result<()> {
    if data.len() > CM_DATA_SIZE { Err(Error::Invalid("paramlen: above 192")) } else { Ok(()) }
}

impl EpCommon {
    fn connected(&self) -> Result<&Connected> {
        self.connected.as_ref().ok_or(Error::OpNotSupp("the endpoint is connectionless"))
    }

    /// Sets the fid of the endpoint in events (`fi_eq_cm_entry.fid`). It is 0 before.
    pub fn set_fid(&self, fid: u64) {
        if let Some(it) = &self.connected {
            it.fid.store(fid, Ordering::Relaxed);
        }
    }

    /// Sends the listener at `to` a connection request with `data`. The outcome is an event:
    /// [`FI_CONNECTED`] with the data of the peer's `accept`, or the error `FI_ECONNREFUSED`.
    /// Enables the endpoint.
    ///
    /// # Errors
    /// - [`Error::OpNotSupp`]: the type is not `FI_EP_MSG`.
    /// - [`Error::NoEq`]: no event queue is bound.
    /// - [`Error::OpBadState`]: it was connected before.
    /// - [`Error::Invalid`]: `data` is longer than [`CM_DATA_SIZE`].
    /// - [`Error::NoMem`]: the domain has no room for one more peer.
    ///
    /// Source: fi_cm(3), "fi_connect".
    #[doc(alias = "fi_connect")]
    pub fn connect(&self, to: EpAddr, data: &[u8]) -> Result<()> {
        self.start_connection(Kind::Request, (0, false, to, to), data)
    }

    /// Accepts the request that the endpoint was opened with ([`Info::handle`]) and gives the peer
    /// `data`. The event [`FI_CONNECTED`] follows when the peer's node has the acceptance. Enables
    /// the endpoint.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); [`Error::OpBadState`] also if the endpoint has no request,
    /// [`Error::BadFd`] if the request was already accepted or rejected.
    #[doc(alias = "fi_accept")]
    pub fn accept(&self, data: &[u8]) -> Result<()> {
        let request = self.connected()?.request.as_ref().ok_or(Error::OpBadState)?;
        let ConnRequest { number, answers, side, ep, .. } = *request;
        request
            .reply_once(|| self.start_connection(Kind::Accept, (number, answers, side, ep), data))
    }

    /// Rejects the request that the endpoint was opened with, for a program that closes the
    /// endpoint without an answer. False: the endpoint has no request, the request was answered, or
    /// the rejection cannot be sent now.
    pub fn refuse_request(&self) -> bool {
        let request = self.connected.as_ref().and_then(|it| it.request.as_ref());
        request.is_some_and(|request| request.refuse().is_ok())
    }

    fn start_connection(
        &self,
        kind: Kind,
        (peer_number, answers, side_addr, peer): (u32, bool, EpAddr, EpAddr),
        data: &[u8],
    ) -> Result<()> {
        let it = self.connected()?;
        fits(data)?;
        let eq = self.eq().ok_or(Error::NoEq)?;
        let mut core = self.dom.enter_control()?;
        if it.number.load(Ordering::Relaxed) != 0 {
            return Err(Error::OpBadState);
        }
        match core.node().ep_enable(self.id) {
            // The endpoint was enabled before.
            Ok(()) | Err(Error::OpBadState) => {}
            Err(e) => return Err(e),
        }
        open(&mut core, &self.dom, None)?;
        let ep = core.node().addr_of(self.id)?;
        let accepts = kind == Kind::Accept;
        let av = it.av.0.id;
        if accepts {
            core.engine.av_insert(av, peer)?;
        }
        let state = if accepts { State::Connected } else { State::Connecting };
        let (fid, of) = (it.fid.load(Ordering::Relaxed), Arc::clone(&eq));
        let eq = Arc::downgrade(&eq);
        let side = FI_ADDR_UNSPEC;
        let reported = false;
        let id = self.id;
        let conn = Conn {
            state,
            reported,
            answers,
            id,
            av,
            ep,
            eq,
            fid,
            side,
            side_addr,
            peer_number,
            peer,
        };
        let (cm, mut io) = core.cm().ok_or(Error::OpBadState)?;
        cm.answers = self.dom.answers();
        if accepts {
            cm.schedule_alive(Engine::now());
        }
        let number = cm.join(&mut io, kind, conn, data)?;
        it.number.store(number, Ordering::Relaxed);
        if accepts {
            of.accept_pending(fid);
        }
        core.posted(&self.dom);
        Ok(())
    }

    /// Ends the connection: both sides get [`FI_SHUTDOWN`]. Messages sent before still arrive.
    ///
    /// # Errors
    /// - [`Error::OpNotSupp`]: the type is not `FI_EP_MSG`.
    /// - [`Error::OpBadState`]: the endpoint is not connected.
    #[doc(alias = "fi_shutdown")]
    pub fn shutdown(&self) -> Result<()> {
        let number = self.connected()?.number.load(Ordering::Relaxed);
        let mut core = self.dom.enter_control()?;
        let (cm, mut io) = core.cm().ok_or(Error::OpBadState)?;
        let conn = cm.conns.get_mut(&number).ok_or(Error::OpBadState)?;
        let (state, side, peer_number) = (conn.state, conn.side, conn.peer_number);
        match state {
            State::Connecting => return Err(Error::OpBadState),
            State::Ended => return Ok(()),
            State::Connected => conn.end(&mut io),
        }
        cm.send(&mut io, side, &cm.message(Kind::Shutdown, peer_number, number, &[]), false);
        core.posted(&self.dom);
        Ok(())
    }

    /// The address of the connected endpoint.
    ///
    /// # Errors
    /// As [`shutdown`](Self::shutdown).
    #[doc(alias = "fi_getpeer")]
    pub fn getpeer(&self) -> Result<EpAddr> {
        let number = self.connected()?.number.load(Ordering::Relaxed);
        let mut core = self.dom.enter_control()?;
        let conn = core.cm().and_then(|(cm, _)| cm.conns.get(&number));
        conn.map(|conn| conn.peer).ok_or(Error::OpBadState)
    }
}

/// A listening endpoint (`struct fid_pep`). It has its own port and node; reads of its event queue
/// drive their progress.
pub struct PassiveEndpoint {
    domain: Domain,
    /// The service that the listener serves.
    _service_claim: Option<ServiceClaim>,
    eq: Mutex<Option<Arc<EqInner>>>,
    fid: AtomicU64,
}

/// A connection request that was peeked at but not read before its listener was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeekedRequest {
    /// Address of the `fi_info` that [`Eq::peek_cm`] made.
    pub info: u64,
    /// The request had been accepted or rejected.
    pub answered: bool,
}

impl Fabric {
    /// Opens a listening endpoint with the number of `info.src_addr`, on the port that `info`
    /// names.
    ///
    /// # Errors
    /// As [`domain`](Self::domain); [`Error::AddrInUse`] if the number is taken, [`Error::Invalid`]
    /// for another endpoint type, or for attributes beyond those that [`getinfo`](crate::getinfo)
    /// offers.
    #[doc(alias = "fi_passive_ep")]
    pub fn passive_ep(
        &self,
        info: &Info,
        settings: Settings,
    ) -> std::result::Result<PassiveEndpoint, OpenError> {
        if info.ep_attr.ep_type != EpType::Msg {
            return Err(OpenError::new(Error::Invalid("type"), "a listener is FI_EP_MSG"));
        }
        check_limits(info, &settings)
            .map_err(|e| OpenError::new(e, format!("passive endpoint: {e}")))?;
        let mut info = info.clone();
        info.domain_attr.threading = Threading::Safe;
        let port = open_port(&info, &settings, AddrInUsePolicy::Fail)?;
        let domain = self.domain_on(&info, settings, port)?;
        let opened = info.source_number(&domain.dom.caps).and_then(|number| {
            let service_claim = domain.dom.claim_service(&info)?;
            let mut core = domain.dom.enter_control()?;
            open(&mut core, &domain.dom, number)?;
            core.serve(service_claim.as_ref());
            Ok(service_claim)
        });
        let service_claim =
            opened.map_err(|e| OpenError::new(e, format!("passive endpoint: {e}")))?;
        Ok(PassiveEndpoint {
            domain,
            _service_claim: service_claim,
            eq: Mutex::default(),
            fid: AtomicU64::new(0),
        })
    }
}

impl PassiveEndpoint {
    /// As [`EpCommon::set_fid`].
    pub fn set_fid(&self, fid: u64) {
        self.fid.store(fid, Ordering::Relaxed);
    }

    /// Binds the event queue that gets the connection requests.
    ///
    /// # Errors
    /// [`Error::OpBadState`] as for every call.
    #[doc(alias = "fi_pep_bind")]
    pub fn bind_eq(&self, eq: &Eq) -> Result<()> {
        self.domain.bind_eq(eq)?;
        *self.eq.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&eq.0));
        Ok(())
    }

    /// Starts to accept connection requests; each is an event [`FI_CONNREQ`].
    ///
    /// # Errors
    /// [`Error::NoEq`]: no event queue is bound.
    #[doc(alias = "fi_listen")]
    pub fn listen(&self) -> Result<()> {
        let eq = self.eq.lock().unwrap_or_else(PoisonError::into_inner);
        let eq = Arc::downgrade(eq.as_ref().ok_or(Error::NoEq)?);
        let fid = self.fid.load(Ordering::Relaxed);
        let mut core = self.domain.dom.enter_control()?;
        if let Some((cm, _)) = core.cm() {
            let rejecter = Arc::downgrade(self.domain.dom.arc()) as _;
            cm.listener = Some(Listener { eq, fid, rejecter });
            cm.answers = self.domain.dom.answers();
        }
        Ok(())
    }

    /// The address to connect to.
    ///
    /// # Errors
    /// [`Error::OpBadState`] as for every call.
    #[doc(alias = "fi_getname")]
    pub fn getname(&self) -> Result<EpAddr> {
        let mut core = self.domain.dom.enter_control()?;
        core.cm().map(|(cm, _)| cm.addr).ok_or(Error::OpBadState)
    }

    /// Closes the listener and rejects its unread requests. Returns the requests that were peeked
    /// at.
    #[doc(alias = "fi_close")]
    pub fn close(mut self) -> Vec<PeekedRequest> {
        self.end()
    }

    fn end(&mut self) -> Vec<PeekedRequest> {
        let eq = self.eq.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let mut seen = Vec::new();
        for unread in eq.iter().flat_map(|eq| eq.forget(self.fid.load(Ordering::Relaxed))) {
            // A peer that cannot be sent a rejection waits until its own timeout.
            let answered = self.reject(&unread.request, &[]) == Err(Error::BadFd);
            seen.extend(unread.info.map(|info| PeekedRequest { info, answered }));
        }
        seen
    }

    /// Rejects a request and sends the peer `data`.
    ///
    /// # Errors
    /// [`Error::Invalid`]: `data` is longer than [`CM_DATA_SIZE`]. [`Error::BadFd`]: the request
    /// was already accepted or rejected.
    #[doc(alias = "fi_reject")]
    pub fn reject(&self, request: &ConnRequest, data: &[u8]) -> Result<()> {
        fits(data)?;
        request.reply_once(|| Rejecter::refuse(&**self.domain.dom.arc(), request, data))
    }
}

impl Rejecter for Shared {
    fn refuse(&self, request: &ConnRequest, data: &[u8]) -> Result<()> {
        let mut core = self.enter_control()?;
        let (cm, mut io) = core.cm().ok_or(Error::OpBadState)?;
        let message = cm.message(Kind::Reject, request.number, 0, data);
        let sent = cm.send_to(&mut io, request.side, &message);
        core.posted(self);
        sent
    }
}

impl Drop for PassiveEndpoint {
    fn drop(&mut self) {
        self.end();
        linger(&self.domain.dom);
    }
}
