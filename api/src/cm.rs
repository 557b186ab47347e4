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
//! the operations in flight to it, as for every endpoint. So that something is in flight regularly,
//! a peer is sent ALIVE twice per T_dead, from HEARD on, if its silence is its death: a thread
//! answers for it, or its port tells which processes live. It says so in its messages. Any other
//! peer may be busy for longer than T_dead and gets no ALIVE. A node without that connection or
//! listener answers ALIVE by SHUTDOWN.
//!
//! A station can forge the content of its messages. So a message counts only if it came from the
//! connection side that it names and concerns an endpoint of the same node, and connection numbers
//! are random.

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
use crate::fabric::{Fabric, Taken, open_port};
pub use crate::info::ConnRequest;
use crate::info::{EpType, Info, Refuses, check_limits};
use crate::inner::{Core, Shared};
use crate::names::Served;
use crate::settings::{Settings, Threading};

use connected::{Connected, linger};
use side::{Cm, Conn, Kind, Listener, State, Transport};

pub use side::{CM_DATA_SIZE, FI_CONNECTED, FI_CONNREQ, FI_SHUTDOWN};

/// Opens the connection side of a domain, unless it has one.
fn open(core: &mut Core, shared: &Shared, number: Option<u16>) -> Result<()> {
    if core.cm().is_some() {
        return Ok(());
    }
    let object = shared.ep_count.fetch_add(1, Ordering::Relaxed);
    let mut io = Transport { engine: &mut core.engine, ops: &mut core.ops };
    let cm = Cm::open(&mut io, object, shared.settings.t_dead, number)?;
    core.cm = Some(Box::new(cm));
    // As long as the domain is there.
    core.watch.attend();
    Ok(())
}

fn fits(data: &[u8]) -> Result<()> {
    if data.len() > CM_DATA_SIZE { Err(Error::Invalid("paramlen: above 192")) } else { Ok(()) }
}

impl EpCommon {
    fn connected(&self) -> Result<&Connected> {
        self.connected.as_ref().ok_or(Error::OpNotSupp("the endpoint is connectionless"))
    }

    /// How events name the endpoint from now on (`fi_eq_cm_entry.fid`); 0 before.
    pub fn set_fid(&self, fid: u64) {
        if let Some(it) = &self.connected {
            it.fid.store(fid, Ordering::Relaxed);
        }
    }

    /// Asks the listener at `to` for a connection and gives it `data`. Its answer is an event:
    /// [`FI_CONNECTED`] with what the other side has given, or the error `FI_ECONNREFUSED`.
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
        self.converse(Kind::Request, (0, false, to, to), data)
    }

    /// Accepts the request that the endpoint was opened with ([`Info::handle`]) and gives the peer
    /// `data`. [`FI_CONNECTED`] follows, when the peer's node has heard of it. Enables the
    /// endpoint.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); [`Error::OpBadState`] also if there was no request,
    /// [`Error::BadFd`] if it has been answered.
    #[doc(alias = "fi_accept")]
    pub fn accept(&self, data: &[u8]) -> Result<()> {
        let request = self.connected()?.request.as_ref().ok_or(Error::OpBadState)?;
        let ConnRequest { number, answers, side, ep, .. } = *request;
        request.answer_by(|| self.converse(Kind::Accept, (number, answers, side, ep), data))
    }

    /// Refuses the request that the endpoint was opened with, for a program that closes it and has
    /// not answered. False: there is none, it has been answered, or it cannot be now.
    pub fn refuse_request(&self) -> bool {
        let request = self.connected.as_ref().and_then(|it| it.request.as_ref());
        request.is_some_and(|request| request.refuse().is_ok())
    }

    fn converse(
        &self,
        kind: Kind,
        (there, answers, side_addr, peer): (u32, bool, EpAddr, EpAddr),
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
            // It was enabled before.
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
        let told = false;
        let id = self.id;
        let conn = Conn { state, told, answers, id, av, ep, eq, fid, side, side_addr, there, peer };
        let (cm, mut io) = core.cm().ok_or(Error::OpBadState)?;
        cm.answers = self.dom.answers();
        if accepts {
            cm.watch(Engine::now());
        }
        let number = cm.join(&mut io, kind, conn, data)?;
        it.number.store(number, Ordering::Relaxed);
        if accepts {
            of.accepting(fid);
        }
        core.posted(&self.dom);
        Ok(())
    }

    /// Ends the connection: both sides get [`FI_SHUTDOWN`]. What was sent before arrives.
    ///
    /// # Errors
    /// - [`Error::OpNotSupp`]: the type is not `FI_EP_MSG`.
    /// - [`Error::OpBadState`]: it is not connected.
    #[doc(alias = "fi_shutdown")]
    pub fn shutdown(&self) -> Result<()> {
        let number = self.connected()?.number.load(Ordering::Relaxed);
        let mut core = self.dom.enter_control()?;
        let (cm, mut io) = core.cm().ok_or(Error::OpBadState)?;
        let conn = cm.conns.get_mut(&number).ok_or(Error::OpBadState)?;
        let (state, side, there) = (conn.state, conn.side, conn.there);
        match state {
            State::Connecting => return Err(Error::OpBadState),
            State::Ended => return Ok(()),
            State::Connected => conn.end(&mut io),
        }
        cm.send(&mut io, side, &cm.message(Kind::Shutdown, there, number, &[]), false);
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

/// An endpoint that listens (`struct fid_pep`). It has a node and a port handle of its own, which
/// reading its event queue drives.
pub struct PassiveEndpoint {
    domain: Domain,
    /// What it answers for.
    _served: Option<Served>,
    eq: Mutex<Option<Arc<EqInner>>>,
    fid: AtomicU64,
}

/// A connection request that was looked at and not read before its listener was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The information that was [made](Eq::peek_cm) of it.
    pub info: u64,
    /// It had been answered.
    pub answered: bool,
}

impl Fabric {
    /// Opens an endpoint that listens at the number that `info.src_addr` says, on the port that
    /// `info` names.
    ///
    /// # Errors
    /// As [`domain`](Self::domain); [`Error::AddrInUse`] if the number is taken, [`Error::Invalid`]
    /// for another type of endpoint, or for more than [`getinfo`](crate::getinfo) offers.
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
        let port = open_port(&info, &settings, Taken::Refused)?;
        let domain = self.domain_on(&info, settings, port)?;
        let opened = info.source_number(&domain.dom.caps).and_then(|number| {
            let served = domain.dom.claim_service(&info)?;
            let mut core = domain.dom.enter_control()?;
            open(&mut core, &domain.dom, number)?;
            core.serve(served.as_ref());
            Ok(served)
        });
        let served = opened.map_err(|e| OpenError::new(e, format!("passive endpoint: {e}")))?;
        Ok(PassiveEndpoint {
            domain,
            _served: served,
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

    /// Binds the event queue that requests go to.
    ///
    /// # Errors
    /// [`Error::OpBadState`] as for every call.
    #[doc(alias = "fi_pep_bind")]
    pub fn bind_eq(&self, eq: &Eq) -> Result<()> {
        self.domain.bind_eq(eq)?;
        *self.eq.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&eq.0));
        Ok(())
    }

    /// Takes requests from now on; each is an event [`FI_CONNREQ`].
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
            let refuses = Arc::downgrade(self.domain.dom.arc()) as _;
            cm.listener = Some(Listener { eq, fid, refuses });
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

    /// Closes it and refuses the requests that nobody has read. Returns those that were looked at.
    #[doc(alias = "fi_close")]
    pub fn close(mut self) -> Vec<Seen> {
        self.end()
    }

    fn end(&mut self) -> Vec<Seen> {
        let eq = self.eq.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let mut seen = Vec::new();
        for unread in eq.iter().flat_map(|eq| eq.forget(self.fid.load(Ordering::Relaxed))) {
            // A peer that cannot be told waits until its own timeout.
            let answered = self.reject(&unread.request, &[]) == Err(Error::BadFd);
            seen.extend(unread.info.map(|info| Seen { info, answered }));
        }
        seen
    }

    /// Refuses a request and tells who asked `data`.
    ///
    /// # Errors
    /// [`Error::Invalid`]: `data` is longer than [`CM_DATA_SIZE`]. [`Error::BadFd`]: it has been
    /// answered.
    #[doc(alias = "fi_reject")]
    pub fn reject(&self, request: &ConnRequest, data: &[u8]) -> Result<()> {
        fits(data)?;
        request.answer_by(|| Refuses::refuse(&**self.domain.dom.arc(), request, data))
    }
}

impl Refuses for Shared {
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
