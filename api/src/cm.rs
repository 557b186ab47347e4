//! Connections: endpoints of type `FI_EP_MSG`, and those that listen for them (fi_cm(3)).
//!
//! Under a connected endpoint lies the reliable one that every endpoint is, with an address vector
//! of one entry, so data calls ignore the address they are given. What connecting adds is four
//! kinds of messages between *connection sides*: a hidden endpoint of a domain, made when its first
//! connected endpoint or listener is. They are taken in the turn of the loop that brings them, and
//! what they say goes to event queues.
//!
//! ```text
//! connect ── REQUEST ──►  FI_CONNREQ
//!            ◄── ACCEPT ──  accept    both: FI_CONNECTED
//!            ◄── REJECT ──  reject    FI_ECONNREFUSED
//! shutdown ── SHUTDOWN ─► both: FI_SHUTDOWN, once
//! ```
//!
//! A request that cannot be delivered is `FI_ECONNREFUSED` as well. The death of a peer is found by
//! the operations on their way to it, as for every endpoint. A peer whose loop a thread turns says
//! so when it connects; to such a one ALIVE is said twice in the time after which a silent peer is
//! dead, so that something is on its way now and then. Another one may be busy with something else
//! for longer than that, and is left alone. Whoever has no such connection any more answers ALIVE
//! by SHUTDOWN.
//!
//! A station can lie about whatever its messages hold. So a message counts only if it came from the
//! connection side that it names and speaks of an endpoint of the same node, and a connection has a
//! number that nobody guesses who has not been told.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use barewire_dataplane::node::{
    AvId, CqId, EpAttr as NodeEpAttr, EpId, MsgKind, Node, RecvReq, SendReq,
};
use barewire_dataplane::poll::Engine;
use barewire_dataplane::types::{Cqe, EpAddr, FI_ADDR_UNSPEC, FiAddr, Instant as Tick};

use crate::av::{Av, AvAttr};
use crate::buf::{Buf, OpKind};
use crate::domain::Domain;
use crate::ep::EpCommon;
use crate::eq::{Eq, EqInner};
use crate::errno::{Error, OpenError, Result};
use crate::fabric::{Fabric, Taken, open_port};
use crate::flags::{BindFlags, Caps, OpFlags};
pub use crate::info::ConnRequest;
use crate::info::{EpType, Info};
use crate::inner::{Core, DomainRef, Shared};
use crate::settings::{Settings, Threading};

/// Event number of a connection request (`enum fi_eq_event`).
pub const FI_CONNREQ: u32 = 1;
/// Event number of a connection that stands.
pub const FI_CONNECTED: u32 = 2;
/// Event number of a connection that has ended.
pub const FI_SHUTDOWN: u32 = 3;

/// Bytes that travel with a request, an acceptance or a refusal at most (`FI_OPT_CM_DATA_SIZE`).
pub const CM_DATA_SIZE: usize = 192;

/// Head of a message: kind, version, bytes of data (2), the receiver's and the sender's number of
/// the connection (4 each), whether a thread turns the sender's loop (4, 0 or 1), the sender's
/// connection side and its endpoint (16 each).
const HEAD: usize = 48;
const VERSION: u8 = 1;

/// Receives that a connection side keeps posted.
const RECEIVES: usize = 32;
/// Messages of it in flight. More wait in [`Cm::waiting`].
const SENDS: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Request = 1,
    Accept = 2,
    Reject = 3,
    Shutdown = 4,
    Alive = 5,
}

impl Kind {
    /// Whether it is a last word: nothing changes for its sender if nobody hears it.
    fn is_last(self) -> bool {
        matches!(self, Self::Reject | Self::Shutdown)
    }
}

/// A message between connection sides.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Message {
    kind: Kind,
    /// The connection at the receiver; 0 in a request.
    to: u32,
    /// The connection at the sender; 0 in a refusal.
    from: u32,
    /// A thread turns the sender's loop, whatever its program does.
    driven: bool,
    side: EpAddr,
    ep: EpAddr,
    data: Vec<u8>,
}

impl Message {
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![self.kind as u8, VERSION];
        bytes.extend((self.data.len() as u16).to_le_bytes());
        let driven = u32::from(self.driven);
        bytes.extend([self.to, self.from, driven].map(u32::to_le_bytes).concat());
        bytes.extend(self.side.to_bytes());
        bytes.extend(self.ep.to_bytes());
        bytes.extend(&self.data);
        bytes
    }

    /// `None` for what no connection side of ours sends.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (head, data) = bytes.split_first_chunk::<HEAD>()?;
        let kind = match head[0] {
            1 => Kind::Request,
            2 => Kind::Accept,
            3 => Kind::Reject,
            4 => Kind::Shutdown,
            5 => Kind::Alive,
            _ => return None,
        };
        let number = |at: usize| head[at..].first_chunk().map(|b| u32::from_le_bytes(*b));
        let addr = |at: usize| EpAddr::from_bytes(head[at..].first_chunk()?).ok();
        let len = usize::from(u16::from_le_bytes([head[2], head[3]]));
        let whole = head[1] == VERSION && data.len() == len && len <= CM_DATA_SIZE;
        let driven = number(12)?;
        if !whole || driven > 1 {
            return None;
        }
        let (to, from, driven) = (number(4)?, number(8)?, driven == 1);
        Some(Self { kind, to, from, driven, side: addr(16)?, ep: addr(32)?, data: data.to_vec() })
    }

    /// Whether it says the truth about where it came from, which is endpoint `from`.
    fn is_from(&self, from: EpAddr) -> bool {
        // 0 where the address was inserted without one.
        let of_its_node = |claimed: EpAddr| {
            claimed.mac == from.mac
                && (from.incarnation == 0 || claimed.incarnation == from.incarnation)
        };
        self.side.ep == from.ep && of_its_node(self.side) && of_its_node(self.ep)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Connecting,
    Connected,
    /// Ended, and its event queue has been told.
    Ended,
}

struct Conn {
    state: State,
    /// The event queue has been told that it stands.
    told: bool,
    /// A thread turns the loop at the other side: its silence means something.
    driven: bool,
    /// The vector of its endpoint, for the peer alone.
    av: AvId,
    /// The endpoint's own address.
    ep: EpAddr,
    eq: Weak<EqInner>,
    /// How events name the endpoint.
    fid: u64,
    /// The other connection side, in the hidden vector and as an address: the listener's until
    /// somebody has accepted.
    side: FiAddr,
    side_addr: EpAddr,
    /// The connection's number there, once that is known.
    there: u32,
    /// Whom data goes to; the listener until somebody has accepted.
    peer: EpAddr,
}

impl Conn {
    /// Tells the event queue, if it still exists.
    fn tell(&self, event: u32, data: &[u8]) {
        if let Some(eq) = self.eq.upgrade() {
            eq.push_cm(event, self.fid, data, None);
        }
    }

    /// Tells that it stands, once.
    fn stands(&mut self, data: &[u8]) {
        if !std::mem::replace(&mut self.told, true) {
            self.tell(FI_CONNECTED, data);
        }
    }

    fn end(&mut self) {
        if self.state == State::Connected {
            self.tell(FI_SHUTDOWN, &[]);
        }
        self.state = State::Ended;
    }

    fn refuse(&mut self, data: Vec<u8>) {
        self.state = State::Ended;
        if let Some(eq) = self.eq.upgrade() {
            eq.push_refused(self.fid, data);
        }
    }
}

/// A message that is on its way or waits for room.
struct Sent {
    side: FiAddr,
    bytes: Vec<u8>,
    kind: Kind,
    /// Whose it is.
    conn: u32,
    /// Nobody else uses the entry of the hidden vector.
    last: bool,
}

/// The connection side of a domain.
pub(crate) struct Cm {
    ep: EpId,
    cq: CqId,
    av: AvId,
    /// Number of its owner in the table of operations.
    object: u32,
    addr: EpAddr,
    /// A thread turns our loop, as far as is known.
    driven: bool,
    conns: HashMap<u32, Conn>,
    /// Makes the numbers of connections, and how many it has made.
    secret: RandomState,
    numbers: u64,
    /// Who listens, and how events name him.
    listener: Option<(Weak<EqInner>, u64)>,
    /// Messages that have not been delivered, by names of ours.
    on_their_way: HashMap<u64, Sent>,
    names: u64,
    waiting: VecDeque<Sent>,
    /// Nanoseconds between two ALIVE of a connection, and when they are due.
    alive_ns: u64,
    alive_at: Tick,
}

/// The name of every posted receive.
const RECEIVE: u64 = u64::MAX;

impl Cm {
    /// Opens the connection side of a domain, unless it has one.
    fn open(core: &mut Core, shared: &Shared, number: Option<u16>) -> Result<()> {
        if core.cm.is_some() {
            return Ok(());
        }
        let node = core.node();
        let cq = node.cq_open((RECEIVES + SENDS).next_power_of_two())?;
        let av = node.av_open(16)?;
        let ep = node.ep_open(NodeEpAttr {
            number,
            caps: Caps::MSG | Caps::SEND | Caps::RECV | Caps::SOURCE | Caps::SOURCE_ERR,
            tx_size: SENDS,
            rx_size: RECEIVES,
            ..NodeEpAttr::default()
        })?;
        node.ep_bind_cq(ep, cq, BindFlags::TRANSMIT | BindFlags::RECV)?;
        node.ep_bind_av(ep, av)?;
        // It hears those who ask for a connection, whom nobody has inserted.
        node.ep_admit_all(ep)?;
        node.ep_enable(ep)?;
        let addr = node.addr_of(ep)?;
        let cm = Self {
            ep,
            cq,
            av,
            object: shared.ep_count.fetch_add(1, Ordering::Relaxed),
            addr,
            driven: false,
            conns: HashMap::new(),
            secret: RandomState::new(),
            numbers: 0,
            listener: None,
            on_their_way: HashMap::new(),
            names: 0,
            waiting: VecDeque::new(),
            alive_ns: u64::try_from(shared.settings.t_dead.as_nanos() / 2).unwrap_or(u64::MAX),
            alive_at: Tick(u64::MAX),
        };
        for _ in 0..RECEIVES {
            cm.receive(core)?;
        }
        core.cm = Some(Box::new(cm));
        // As long as the domain is there.
        core.watch.attend();
        Ok(())
    }

    /// Runs `f` on the connection side of the domain, if it has one.
    fn with<R>(core: &mut Core, f: impl FnOnce(&mut Self, &mut Core) -> R) -> Option<R> {
        let mut cm = core.cm.take()?;
        let result = f(&mut cm, core);
        core.cm = Some(cm);
        Some(result)
    }

    /// Whether [`look`](Self::look) would find anything.
    #[inline]
    pub(crate) fn is_due(&self, node: &Node, now: Tick) -> bool {
        node.cq_ready(self.cq) != Ok(0) || !self.waiting.is_empty() || now >= self.alive_at
    }

    /// When it wants to be looked at if nothing happens.
    pub(crate) fn next_deadline(&self) -> Tick {
        self.alive_at
    }

    /// Takes what has arrived and what has been sent.
    #[cold]
    pub(crate) fn look(core: &mut Core) {
        Self::with(core, |cm, core| {
            while cm.look_at_one(core) {}
            cm.send_waiting(core);
            let now = core.engine.last_now();
            if now >= cm.alive_at {
                cm.say_alive(core, now);
            }
        });
    }

    /// Gives every connection something to find a dead peer by.
    fn say_alive(&mut self, core: &mut Core, now: Tick) {
        let pending = self.on_their_way.values().chain(&self.waiting);
        let asked: HashSet<u32> =
            pending.filter(|sent| sent.kind == Kind::Alive).map(|sent| sent.conn).collect();
        let stands = |conn: &Conn| conn.state == State::Connected && conn.driven;
        let standing = self.conns.iter().filter(|(_, conn)| stands(conn));
        let standing: Vec<_> =
            standing.map(|(number, conn)| (*number, conn.side, conn.there)).collect();
        self.alive_at = Tick(u64::MAX);
        if !standing.is_empty() {
            self.alive_at = now + self.alive_ns;
        }
        for (number, side, there) in standing {
            if !asked.contains(&number) {
                self.send(core, side, &self.message(Kind::Alive, there, number, &[]), false);
            }
        }
    }

    /// A connection stands from now on.
    fn watch(&mut self, now: Tick) {
        self.alive_at = self.alive_at.min(now + self.alive_ns);
    }

    /// False if nothing is left.
    fn look_at_one(&mut self, core: &mut Core) -> bool {
        let mut one = [Cqe::default()];
        let read = core.node().cq_read(self.cq, &mut one);
        let (failed, stranger) = match read {
            Ok(_) => (None, None),
            Err(Error::Avail) => match core.node().cq_readerr(self.cq) {
                Ok(e) => {
                    one[0] = e.cqe;
                    (Some(e.err), e.err_data)
                }
                Err(_) => return false,
            },
            Err(_) => return false,
        };
        let ended = core.ops.complete(&one[0], failed);
        if ended.context != RECEIVE {
            self.was_sent(core, ended.context, failed.is_none());
            return true;
        }
        if let Err(e) = self.receive(core) {
            tracing::error!("a connection side receives less from now on: {e}");
        }
        let bytes = ended.bufs.into_one().unwrap_or_default();
        let len = bytes.len().min(one[0].len as usize);
        let from = match failed {
            None => core.node().av_lookup(self.av, one[0].src).ok(),
            // Of somebody who is not in the vector, but whole.
            Some(Error::AddrNotAvail) => stranger,
            // Too long for one of ours.
            Some(_) => None,
        };
        let message = Message::from_bytes(&bytes[..len]);
        match message.zip(from) {
            Some((message, from)) if message.is_from(from) => self.take(core, message),
            _ => tracing::debug!("not a message of a connection side: {len} bytes of {from:?}"),
        }
        true
    }

    /// Posts a receive.
    fn receive(&self, core: &mut Core) -> Result<()> {
        let bufs = Buf::zeroed(HEAD + CM_DATA_SIZE).into();
        let lent = core.ops.lend(self.object, OpKind::Once, RECEIVE, bufs);
        let (key, buf) = lent.map_err(|refused| refused.error)?;
        let (kind, src, flags) = (MsgKind::Msg, FI_ADDR_UNSPEC, OpFlags::COMPLETION);
        let req = RecvReq { kind, buf, src, tag: 0, ignore: 0, context: key.0, flags };
        let posted = core.engine.post_recv(self.ep, req);
        posted.map_err(|error| core.ops.refuse(key, error).error)
    }

    /// Sends `message` as soon as there is room. With `last` the hidden vector then forgets `side`.
    fn send(&mut self, core: &mut Core, side: FiAddr, message: &Message, last: bool) {
        let (bytes, kind, conn) = (message.to_bytes(), message.kind, message.from);
        self.waiting.push_back(Sent { side, bytes, kind, conn, last });
        self.send_waiting(core);
    }

    fn send_waiting(&mut self, core: &mut Core) {
        while let Some(sent) = self.waiting.pop_front() {
            match self.post(core, &sent) {
                Ok(()) => {
                    self.on_their_way.insert(self.names, sent);
                    self.names += 1;
                }
                Err(Error::Again) => return self.waiting.push_front(sent),
                Err(_) => self.failed(core, &sent),
            }
        }
    }

    fn post(&self, core: &mut Core, sent: &Sent) -> Result<()> {
        let bufs = Buf::from(&sent.bytes[..]).into();
        let lent = core.ops.lend(self.object, OpKind::Once, self.names, bufs);
        let (key, buf) = lent.map_err(|refused| refused.error)?;
        let mut flags = OpFlags::COMPLETION;
        // The way of a last word must not keep a program from closing.
        flags.set(OpFlags::DELIVERY_COMPLETE, !sent.kind.is_last());
        let (kind, dest, no_completion) = (MsgKind::Msg, sent.side, false);
        let context = key.0;
        let req = SendReq { kind, buf, dest, tag: 0, data: 0, context, flags, no_completion };
        let posted = core.engine.post_send(self.ep, req);
        posted.map_err(|error| core.ops.refuse(key, error).error)
    }

    fn was_sent(&mut self, core: &mut Core, name: u64, delivered: bool) {
        let Some(sent) = self.on_their_way.remove(&name) else { return };
        if !delivered {
            return self.failed(core, &sent);
        }
        if sent.last {
            self.forget(core, sent.side);
        }
        if sent.kind == Kind::Accept
            && let Some(conn) = self.conns.get_mut(&sent.conn)
            && conn.state == State::Connected
        {
            // Not before: who has read it may wait for something else, and turn the loop no more.
            conn.stands(&[]);
        }
    }

    /// A message has not come through: a request is as good as refused, and who was accepted is
    /// gone.
    fn failed(&mut self, core: &mut Core, sent: &Sent) {
        if sent.last {
            self.forget(core, sent.side);
        }
        match self.conns.get_mut(&sent.conn) {
            Some(conn) if conn.state == State::Connecting => conn.refuse(Vec::new()),
            Some(conn) if !sent.kind.is_last() => conn.end(),
            _ => {}
        }
    }

    fn forget(&self, core: &mut Core, side: FiAddr) {
        // It was inserted for one connection, so it is there.
        let _ = core.node().av_remove(self.av, side);
    }

    /// A message to somebody who has no connection here.
    fn send_to(&mut self, core: &mut Core, side: EpAddr, message: &Message) -> Result<()> {
        let at = core.engine.av_insert(self.av, side)?;
        self.send(core, at, message, true);
        Ok(())
    }

    fn message(&self, kind: Kind, to: u32, from: u32, data: &[u8]) -> Message {
        let driven = self.driven;
        Message { kind, to, from, driven, side: self.addr, ep: self.addr, data: data.to_vec() }
    }

    /// Makes a connection and says so to the other side.
    fn join(&mut self, core: &mut Core, kind: Kind, mut conn: Conn, data: &[u8]) -> Result<u32> {
        conn.side = core.engine.av_insert(self.av, conn.side_addr)?;
        let number = self.fresh_number();
        let message = Message { ep: conn.ep, ..self.message(kind, conn.there, number, data) };
        let side = conn.side;
        self.conns.insert(number, conn);
        self.send(core, side, &message, false);
        Ok(number)
    }

    /// A number that no connection has and that says nothing of the others.
    fn fresh_number(&mut self) -> u32 {
        loop {
            self.numbers += 1;
            let number = self.secret.hash_one(self.numbers) as u32;
            if number != 0 && !self.conns.contains_key(&number) {
                return number;
            }
        }
    }

    fn take(&mut self, core: &mut Core, message: Message) {
        let Message { kind, to, from, side, .. } = message;
        if kind == Kind::Request {
            return self.asked(core, message);
        }
        let its = |conn: &Conn| conn.there == from && conn.side_addr == side;
        let stands = |conn: &Conn| conn.state == State::Connected && its(conn);
        if kind == Kind::Alive && self.conns.get(&to).is_some_and(stands) {
            return;
        }
        let Some(conn) = self.conns.get_mut(&to).filter(|_| kind != Kind::Alive) else {
            if matches!(kind, Kind::Accept | Kind::Alive) {
                // Who asked has gone meanwhile. If this does not come through, so has the other.
                let _ = self.send_to(core, side, &self.message(Kind::Shutdown, from, to, &[]));
            }
            return;
        };
        match (kind, conn.state) {
            (Kind::Accept, State::Connecting) => self.accepted(core, message),
            (Kind::Reject, State::Connecting) if conn.side_addr.mac == side.mac => {
                conn.refuse(message.data);
            }
            (Kind::Shutdown, State::Connected) if its(conn) => {
                // Who hears of an end has heard of the beginning.
                conn.stands(&[]);
                conn.end();
            }
            _ => {}
        }
    }

    /// The other side has accepted. It is not the listener, who has a node of his own.
    fn accepted(&mut self, core: &mut Core, message: Message) {
        let Some(conn) = self.conns.get_mut(&message.to) else { return };
        let peer = core.engine.av_insert(conn.av, message.ep);
        let side = core.engine.av_insert(self.av, message.side);
        let (Ok(_), Ok(side)) = (peer, side) else {
            tracing::error!("no room for a peer that has accepted");
            return conn.refuse(Vec::new());
        };
        let old = std::mem::replace(&mut conn.side, side);
        (conn.side_addr, conn.peer, conn.there) = (message.side, message.ep, message.from);
        (conn.state, conn.driven) = (State::Connected, message.driven);
        conn.stands(&message.data);
        self.watch(core.engine.last_now());
        self.forget(core, old);
    }

    fn asked(&mut self, core: &mut Core, message: Message) {
        let Message { from, driven, side, ep, data, .. } = message;
        let listener = self.listener.as_ref().and_then(|(eq, fid)| Some((eq.upgrade()?, *fid)));
        let told = listener.is_some_and(|(eq, fid)| {
            let request = ConnRequest { number: from, driven, side, ep };
            eq.push_cm(FI_CONNREQ, fid, &data, Some(request))
        });
        if !told {
            // If there is no room to say so, the request stays without an answer.
            let _ = self.send_to(core, side, &self.message(Kind::Reject, from, 0, &[]));
        }
    }

    /// Ends connection `number` for good.
    fn close(&mut self, core: &mut Core, number: u32) {
        let Some(conn) = self.conns.remove(&number) else { return };
        if let Some(eq) = conn.eq.upgrade() {
            eq.forget(conn.fid);
        }
        if conn.state == State::Connected {
            let message = self.message(Kind::Shutdown, conn.there, number, &[]);
            self.send(core, conn.side, &message, true);
        } else {
            self.forget(core, conn.side);
        }
    }

    /// Whether a last word has not left for good.
    fn is_busy(&self) -> bool {
        let last = |sent: &Sent| sent.kind.is_last();
        self.waiting.iter().any(last) || self.on_their_way.values().any(last)
    }
}

/// What a connected endpoint has besides.
pub(crate) struct Connected {
    /// For the peer alone.
    av: Av,
    request: Option<ConnRequest>,
    fid: AtomicU64,
    /// The number of its connection; 0 before there is one.
    number: AtomicU32,
}

impl Connected {
    /// That of an endpoint which is opened with `info`, if its type is `FI_EP_MSG`.
    pub(crate) fn of(dom: &DomainRef, info: &Info) -> Result<Option<Self>> {
        if info.ep_attr.ep_type != EpType::Msg {
            return Ok(None);
        }
        let av = Av::open(dom, AvAttr { count: 1, ..AvAttr::default() })?;
        let request = info.handle.clone();
        Ok(Some(Self { av, request, fid: AtomicU64::new(0), number: AtomicU32::new(0) }))
    }

    pub(crate) fn av(&self) -> &Av {
        &self.av
    }

    /// Ends the connection, if there is one.
    pub(crate) fn close(&self, core: &mut Core) {
        let number = self.number.load(Ordering::Relaxed);
        Cm::with(core, |cm, core| cm.close(core, number));
    }
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
        self.join(Kind::Request, (0, false, to, to), data)
    }

    /// Accepts the request that the endpoint was opened with ([`Info::handle`]) and gives the peer
    /// `data`. [`FI_CONNECTED`] follows, when the peer's node has heard of it. Enables the
    /// endpoint.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); [`Error::OpBadState`] also if there was no request.
    #[doc(alias = "fi_accept")]
    pub fn accept(&self, data: &[u8]) -> Result<()> {
        let request = self.connected()?.request.as_ref().ok_or(Error::OpBadState)?;
        let ConnRequest { number, driven, side, ep } = *request;
        self.join(Kind::Accept, (number, driven, side, ep), data)
    }

    fn join(
        &self,
        kind: Kind,
        (there, driven, side_addr, peer): (u32, bool, EpAddr, EpAddr),
        data: &[u8],
    ) -> Result<()> {
        let it = self.connected()?;
        fits(data)?;
        let eq = self.eq().ok_or(Error::NoEq)?;
        let mut core = self.dom.enter()?;
        if it.number.load(Ordering::Relaxed) != 0 {
            return Err(Error::OpBadState);
        }
        match core.node().ep_enable(self.id) {
            // It was enabled before.
            Ok(()) | Err(Error::OpBadState) => {}
            Err(e) => return Err(e),
        }
        Cm::open(&mut core, &self.dom, None)?;
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
        let conn = Conn { state, told, driven, av, ep, eq, fid, side, side_addr, there, peer };
        let joined = Cm::with(&mut core, |cm, core| {
            cm.driven = !self.dom.manual.load(Ordering::Relaxed);
            if accepts {
                cm.watch(Engine::now());
            }
            cm.join(core, kind, conn, data)
        });
        let number = joined.ok_or(Error::OpBadState)??;
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
        let mut core = self.dom.enter()?;
        let ended = Cm::with(&mut core, |cm, core| {
            let conn = cm.conns.get_mut(&number).ok_or(Error::OpBadState)?;
            let (state, side, there) = (conn.state, conn.side, conn.there);
            match state {
                State::Connecting => return Err(Error::OpBadState),
                State::Ended => return Ok(()),
                State::Connected => conn.end(),
            }
            cm.send(core, side, &cm.message(Kind::Shutdown, there, number, &[]), false);
            Ok(())
        });
        core.posted(&self.dom);
        ended.unwrap_or(Err(Error::OpBadState))
    }

    /// The address of the connected endpoint.
    ///
    /// # Errors
    /// As [`shutdown`](Self::shutdown).
    #[doc(alias = "fi_getpeer")]
    pub fn getpeer(&self) -> Result<EpAddr> {
        let number = self.connected()?.number.load(Ordering::Relaxed);
        let mut core = self.dom.enter()?;
        let peer = Cm::with(&mut core, |cm, _| Some(cm.conns.get(&number)?.peer));
        peer.flatten().ok_or(Error::OpBadState)
    }
}

/// Turns the loop until connection sides have said what they have to, at most as long as a silent
/// peer is taken for alive.
pub(crate) fn linger(dom: &DomainRef) {
    let end = Instant::now() + dom.settings.t_dead;
    while Instant::now() < end {
        let Ok(mut core) = dom.enter() else { return };
        if !core.cm.as_ref().is_some_and(|cm| cm.is_busy()) {
            return;
        }
        core.turn_if_manual(dom);
        drop(core);
        std::thread::yield_now();
    }
}

/// An endpoint that listens (`struct fid_pep`). It has a node and a port handle of its own, which
/// reading its event queue drives.
pub struct PassiveEndpoint {
    domain: Domain,
    eq: Mutex<Option<Arc<EqInner>>>,
    fid: AtomicU64,
}

impl Fabric {
    /// Opens an endpoint that listens at the number that `info.src_addr` says, on the port that
    /// `info` names.
    ///
    /// # Errors
    /// As [`domain`](Self::domain); [`Error::AddrInUse`] if the number is taken, [`Error::Invalid`]
    /// for another type of endpoint.
    #[doc(alias = "fi_passive_ep")]
    pub fn passive_ep(
        &self,
        info: &Info,
        settings: Settings,
    ) -> std::result::Result<PassiveEndpoint, OpenError> {
        if info.ep_attr.ep_type != EpType::Msg {
            return Err(OpenError::new(Error::Invalid("type"), "a listener is FI_EP_MSG"));
        }
        let mut info = info.clone();
        info.domain_attr.threading = Threading::Safe;
        let port = open_port(&info, &settings, Taken::Refused)?;
        let domain = self.domain_on(&info, settings, port)?;
        let opened = info.source_number(&domain.dom.caps).and_then(|number| {
            let mut core = domain.dom.enter()?;
            Cm::open(&mut core, &domain.dom, number)
        });
        opened.map_err(|e| OpenError::new(e, format!("passive endpoint: {e}")))?;
        Ok(PassiveEndpoint { domain, eq: Mutex::default(), fid: AtomicU64::new(0) })
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
        let mut core = self.domain.dom.enter()?;
        Cm::with(&mut core, |cm, _| cm.listener = Some((eq, fid)));
        Ok(())
    }

    /// The address to connect to.
    ///
    /// # Errors
    /// [`Error::OpBadState`] as for every call.
    #[doc(alias = "fi_getname")]
    pub fn getname(&self) -> Result<EpAddr> {
        let core = self.domain.dom.enter()?;
        core.cm.as_ref().map(|cm| cm.addr).ok_or(Error::OpBadState)
    }

    /// Refuses a request and tells who asked `data`.
    ///
    /// # Errors
    /// [`Error::Invalid`]: `data` is longer than [`CM_DATA_SIZE`].
    #[doc(alias = "fi_reject")]
    pub fn reject(&self, request: &ConnRequest, data: &[u8]) -> Result<()> {
        fits(data)?;
        let mut core = self.domain.dom.enter()?;
        let sent = Cm::with(&mut core, |cm, core| {
            let message = cm.message(Kind::Reject, request.number, 0, data);
            cm.send_to(core, request.side, &message)
        });
        core.posted(&self.domain.dom);
        sent.unwrap_or(Err(Error::OpBadState))
    }
}

impl Drop for PassiveEndpoint {
    fn drop(&mut self) {
        let eq = self.eq.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        for request in eq.iter().flat_map(|eq| eq.forget(self.fid.load(Ordering::Relaxed))) {
            // Who cannot be told waits until he gives up.
            let _ = self.reject(&request, &[]);
        }
        linger(&self.domain.dom);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(ep: u16) -> EpAddr {
        EpAddr { mac: "02:00:00:00:00:05".parse().unwrap(), ep, incarnation: 77 }
    }

    #[test]
    fn messages_come_back_and_others_are_none() {
        for kind in [Kind::Request, Kind::Accept, Kind::Reject, Kind::Shutdown, Kind::Alive] {
            let (side, ep, data) = (addr(1), addr(2), b"hello".to_vec());
            let driven = kind == Kind::Accept;
            let message = Message { kind, to: 7, from: 8, driven, side, ep, data };
            let bytes = message.to_bytes();
            assert_eq!(Message::from_bytes(&bytes).as_ref(), Some(&message));
            for len in 0..bytes.len() {
                assert_eq!(Message::from_bytes(&bytes[..len]), None, "cut off at {len}");
            }
            for (at, value) in [(0, 0), (0, 6), (1, 2), (2, 4), (3, 1), (12, 2), (15, 1)] {
                let mut wrong = bytes.clone();
                wrong[at] = value;
                assert_eq!(Message::from_bytes(&wrong), None, "byte {at} is {value}");
            }
        }
        let (side, ep, data) = (addr(1), addr(2), vec![0; CM_DATA_SIZE + 1]);
        let driven = false;
        let long = Message { kind: Kind::Request, to: 0, from: 1, driven, side, ep, data };
        assert_eq!(Message::from_bytes(&long.to_bytes()), None);
    }
}
