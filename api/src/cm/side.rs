//! The connection side of a domain: its messages, and the state of its connections. See
//! [`cm`](super).

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::Weak;
use std::time::Duration;

use barewire_dataplane::node::{
    AvId, CqId, EpAttr as NodeEpAttr, EpId, MsgKind, Node, RecvReq, SendReq,
};
use barewire_dataplane::poll::Engine;
use barewire_dataplane::types::{Cqe, EpAddr, FI_ADDR_UNSPEC, FiAddr, Instant as Tick};
use barewire_driver::port::Station;

use crate::buf::{Buf, OpKind, OpTable};
use crate::eq::EqInner;
use crate::errno::{Error, Result};
use crate::flags::{BindFlags, Caps, OpFlags};
use crate::info::{ConnRequest, Rejecter};

/// Event number of a connection request (`enum fi_eq_event`).
pub const FI_CONNREQ: u32 = 1;
/// Event number of an established connection.
pub const FI_CONNECTED: u32 = 2;
/// Event number of an ended connection.
pub const FI_SHUTDOWN: u32 = 3;

/// Most bytes of data in a request, an acceptance or a rejection (`FI_OPT_CM_DATA_SIZE`).
pub const CM_DATA_SIZE: usize = 192;

/// Header of a message: kind, version, bytes of data (2), the receiver's and the sender's number of
/// the connection (4 each), whether the sender answers whatever its program does (4, 0 or 1), the
/// sender's connection side and its endpoint (16 each).
const HEAD: usize = 48;
const VERSION: u8 = 1;

/// Receives that a connection side keeps posted.
const RECEIVES: usize = 32;
/// Most messages in flight. More wait in [`Cm::waiting`].
const SENDS: usize = 512;
/// Most messages in flight to one station, so that a station that takes none does not block others.
/// More wait in [`Cm::held`].
const SENDS_TO_ONE: usize = 32;
/// Most waiting replies to peers without a connection: those held for one station, and all others.
const REPLIES_MAX: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Request = 1,
    Accept = 2,
    Reject = 3,
    Shutdown = 4,
    Alive = 5,
    Heard = 6,
}

impl Kind {
    /// Whether it ends a connection: its sender needs no delivery.
    fn is_final(self) -> bool {
        matches!(self, Self::Reject | Self::Shutdown)
    }
}

/// A message between connection sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    kind: Kind,
    /// Number of the connection at the receiver, or the receiver's [`Cm::life`]; 0 in a request.
    to: u32,
    /// Number of the connection at the sender, or the sender's [`Cm::life`]; 0 in a rejection.
    from: u32,
    /// The sender answers whatever its program does, so its silence means that it is dead.
    answers: bool,
    side: EpAddr,
    ep: EpAddr,
    data: Vec<u8>,
}

impl Message {
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![self.kind as u8, VERSION];
        bytes.extend((self.data.len() as u16).to_le_bytes());
        let answers = u32::from(self.answers);
        bytes.extend([self.to, self.from, answers].map(u32::to_le_bytes).concat());
        bytes.extend(self.side.to_bytes());
        bytes.extend(self.ep.to_bytes());
        bytes.extend(&self.data);
        bytes
    }

    /// `None` for a malformed message.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (head, data) = bytes.split_first_chunk::<HEAD>()?;
        let kind = match head[0] {
            1 => Kind::Request,
            2 => Kind::Accept,
            3 => Kind::Reject,
            4 => Kind::Shutdown,
            5 => Kind::Alive,
            6 => Kind::Heard,
            _ => return None,
        };
        let number = |at: usize| head[at..].first_chunk().map(|b| u32::from_le_bytes(*b));
        let addr = |at: usize| EpAddr::from_bytes(head[at..].first_chunk()?).ok();
        let len = usize::from(u16::from_le_bytes([head[2], head[3]]));
        let whole = head[1] == VERSION && data.len() == len && len <= CM_DATA_SIZE;
        let answers = number(12)?;
        if !whole || answers > 1 {
            return None;
        }
        let (to, from, answers) = (number(4)?, number(8)?, answers == 1);
        Some(Self { kind, to, from, answers, side: addr(16)?, ep: addr(32)?, data: data.to_vec() })
    }

    /// Whether its connection side is its sender, endpoint `from`, and its endpoint is of the same
    /// node.
    fn is_from(&self, from: EpAddr) -> bool {
        // The incarnation is 0 if the address was inserted without one.
        let of_its_node = |claimed: EpAddr| {
            claimed.station == from.station
                && (from.incarnation == 0 || claimed.incarnation == from.incarnation)
        };
        self.side.ep == from.ep && of_its_node(self.side) && of_its_node(self.ep)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Connecting,
    Connected,
    /// Ended. The event queue has the event.
    Ended,
}

pub(super) struct Conn {
    pub(super) state: State,
    /// The event queue has `FI_CONNECTED`.
    pub(super) reported: bool,
    /// The peer answers whatever its program does, so its silence means that it is dead.
    pub(super) answers: bool,
    /// Its endpoint.
    pub(super) id: EpId,
    /// The vector of its endpoint, for the peer alone.
    pub(super) av: AvId,
    /// The endpoint's own address.
    pub(super) ep: EpAddr,
    pub(super) eq: Weak<EqInner>,
    /// Fid of the endpoint in events.
    pub(super) fid: u64,
    /// The peer's connection side, in the hidden vector and as an address: the listener's until the
    /// request is accepted.
    pub(super) side: FiAddr,
    pub(super) side_addr: EpAddr,
    /// Number of the connection at the peer; before the acceptance, the [`Cm::life`] of the
    /// listener that answered HEARD.
    pub(super) peer_number: u32,
    /// Address of the peer's endpoint; the listener's until the request is accepted.
    pub(super) peer: EpAddr,
}

impl Conn {
    /// Writes an event, if the event queue still exists.
    fn push_event(&self, event: u32, data: &[u8]) {
        if let Some(eq) = self.eq.upgrade() {
            eq.push_cm(event, self.fid, data, None);
        }
    }

    /// Writes `FI_CONNECTED`, once.
    fn report_connected(&mut self, data: &[u8]) {
        if !std::mem::replace(&mut self.reported, true) {
            self.push_event(FI_CONNECTED, data);
        }
    }

    /// Ends the connection. Its receives complete before the event is written.
    pub(super) fn end(&mut self, io: &mut Transport<'_>) {
        io.node().objects().ep_disconnect(self.id);
        if self.state == State::Connected {
            self.push_event(FI_SHUTDOWN, &[]);
        }
        self.state = State::Ended;
    }

    fn refuse(&mut self, io: &mut Transport<'_>, data: Vec<u8>) {
        io.node().objects().ep_disconnect(self.id);
        self.state = State::Ended;
        if let Some(eq) = self.eq.upgrade() {
            eq.push_refused(self.fid, data);
        }
    }
}

/// A message that is in flight or waits for room.
struct OutMessage {
    side: FiAddr,
    /// Station of `side`.
    station: Station,
    bytes: Vec<u8>,
    kind: Kind,
    /// Number of the connection that it belongs to.
    conn: u32,
    /// The entry of the hidden vector is removed after this message.
    last: bool,
    /// It was lost with a session to an old incarnation of the peer, and is sent again.
    resent: bool,
}

/// The connection side of a domain.
pub(crate) struct Cm {
    ep: EpId,
    cq: CqId,
    av: AvId,
    /// Number of its owner in the table of operations.
    object: u32,
    pub(super) addr: EpAddr,
    /// This domain answers whatever its program does.
    pub(super) answers: bool,
    /// Random number of this connection side, which a later one at the same address does not have.
    life: u32,
    pub(super) conns: HashMap<u32, Conn>,
    /// Generator of connection numbers, and how many it has made.
    secret: RandomState,
    numbers: u64,
    pub(super) listener: Option<Listener>,
    /// Messages in flight, by the context of their send.
    in_flight: HashMap<u64, OutMessage>,
    next_key: u64,
    /// Number of messages in flight to each station.
    to_station: HashMap<Station, usize>,
    waiting: VecDeque<OutMessage>,
    /// Messages to stations with [`SENDS_TO_ONE`] messages in flight.
    held: HashMap<Station, VecDeque<OutMessage>>,
    /// Entries of the hidden vector whose connection is over.
    unused_sides: Vec<FiAddr>,
    /// Nanoseconds between two ALIVE of a connection, and when the next is due.
    alive_ns: u64,
    alive_at: Tick,
}

/// The listener that gets connection requests.
pub(super) struct Listener {
    pub(super) eq: Weak<EqInner>,
    /// Its fid in events.
    pub(super) fid: u64,
    /// Rejects a request for a program that has it and not the listener.
    pub(super) rejecter: Weak<dyn Rejecter>,
}

/// Context of every posted receive.
const RECEIVE: u64 = u64::MAX;

/// The engine of a connection side's domain, and its table of lent buffers.
pub(crate) struct Transport<'a> {
    pub(crate) engine: &'a mut Engine,
    pub(crate) ops: &'a mut OpTable,
}

impl Transport<'_> {
    fn node(&mut self) -> &mut Node {
        self.engine.node_mut()
    }
}

impl Cm {
    /// Opens the connection side of a domain, with endpoint number `number` if given. `object` is
    /// its number in the table of operations; a silent peer is dead after `t_dead`.
    pub(super) fn open(
        io: &mut Transport<'_>,
        object: u32,
        t_dead: Duration,
        number: Option<u16>,
    ) -> Result<Self> {
        let node = io.node();
        let cq = node.cqs.open((RECEIVES + SENDS).next_power_of_two())?;
        let av = node.sessions().av_open(16)?;
        let ep = node.eps.open(NodeEpAttr {
            number,
            caps: Caps::MSG | Caps::SEND | Caps::RECV | Caps::SOURCE | Caps::SOURCE_ERR,
            tx_size: SENDS,
            rx_size: RECEIVES,
            ..NodeEpAttr::default()
        })?;
        node.objects().ep_bind_cq(ep, cq, BindFlags::TRANSMIT | BindFlags::RECV)?;
        node.objects().ep_bind_av(ep, av)?;
        // Peers that request a connection are in no address vector.
        node.eps.admit_all(ep)?;
        node.ep_enable(ep)?;
        let addr = node.addr_of(ep)?;
        let mut cm = Self {
            ep,
            cq,
            av,
            object,
            addr,
            answers: false,
            life: 0,
            conns: HashMap::new(),
            secret: RandomState::new(),
            numbers: 0,
            listener: None,
            in_flight: HashMap::new(),
            next_key: 0,
            to_station: HashMap::new(),
            waiting: VecDeque::new(),
            held: HashMap::new(),
            unused_sides: Vec::new(),
            alive_ns: u64::try_from(t_dead.as_nanos() / 2).unwrap_or(u64::MAX),
            alive_at: Tick(u64::MAX),
        };
        for _ in 0..RECEIVES {
            cm.receive(io)?;
        }
        cm.life = cm.fresh_number();
        Ok(cm)
    }

    /// Whether [`poll`](Self::poll) has something to do.
    #[inline]
    pub(crate) fn is_due(&self, node: &Node, now: Tick) -> bool {
        node.cqs.ready(self.cq) != Ok(0) || !self.waiting.is_empty() || now >= self.alive_at
    }

    /// When [`poll`](Self::poll) has to run at the latest.
    pub(crate) fn next_deadline(&self) -> Tick {
        self.alive_at
    }

    /// Handles received messages and completed sends.
    #[cold]
    pub(crate) fn poll(&mut self, io: &mut Transport<'_>) {
        while self.poll_one(io) {}
        // Not earlier: a message in the queue may be from the same side.
        for side in self.unused_sides.drain(..) {
            // Each entry was inserted for one connection and is removed once.
            let _ = io.node().objects().av_remove(self.av, side);
        }
        self.send_waiting(io);
        let now = io.engine.last_now();
        if now >= self.alive_at {
            self.send_alive(io, now);
        }
    }

    /// Sends ALIVE for every connection and every request that was answered by HEARD, so that a
    /// dead peer is found.
    fn send_alive(&mut self, io: &mut Transport<'_>, now: Tick) {
        let asked: HashSet<u32> =
            self.pending().filter(|sent| sent.kind == Kind::Alive).map(|sent| sent.conn).collect();
        let lasts = |conn: &Conn| conn.state != State::Ended && conn.answers;
        let lasting = self.conns.iter().filter(|(_, conn)| lasts(conn));
        let lasting: Vec<_> =
            lasting.map(|(number, conn)| (*number, conn.side, conn.peer_number)).collect();
        self.alive_at = Tick(u64::MAX);
        if !lasting.is_empty() {
            self.alive_at = now + self.alive_ns;
        }
        for (number, side, peer_number) in lasting {
            if !asked.contains(&number) {
                self.send(io, side, &self.message(Kind::Alive, peer_number, number, &[]), false);
            }
        }
    }

    /// Schedules ALIVE for a new connection, or a request that was answered by HEARD.
    pub(super) fn schedule_alive(&mut self, now: Tick) {
        self.alive_at = self.alive_at.min(now + self.alive_ns);
    }

    /// Handles one completion. False if the queue is empty.
    fn poll_one(&mut self, io: &mut Transport<'_>) -> bool {
        let mut one = [Cqe::default()];
        let read = io.node().cq_read(self.cq, &mut one);
        let (failed, stranger) = match read {
            Ok(_) => (None, None),
            Err(Error::Avail) => match io.node().receiving().cq_readerr(self.cq) {
                Ok(e) => {
                    one[0] = e.cqe;
                    (Some(e.err), e.err_data)
                }
                Err(_) => return false,
            },
            Err(_) => return false,
        };
        let ended = io.ops.complete(&one[0], failed);
        if ended.context != RECEIVE {
            self.on_send_done(io, ended.context, failed);
            return true;
        }
        if let Err(e) = self.receive(io) {
            tracing::error!("a receive of connection requests was not posted again: {e}");
        }
        let bytes = ended.bufs.into_one().unwrap_or_default();
        let len = bytes.len().min(one[0].len as usize);
        let from = match failed {
            None => io.node().objects().av_lookup(self.av, one[0].src).ok(),
            // A whole message of a sender that is not in the vector.
            Some(Error::AddrNotAvail) => stranger,
            // Longer than any message of this protocol.
            Some(_) => None,
        };
        let message = Message::from_bytes(&bytes[..len]);
        match message.zip(from) {
            Some((message, from)) if message.is_from(from) => self.on_message(io, message),
            _ => tracing::debug!("not a message of a connection side: {len} bytes of {from:?}"),
        }
        true
    }

    /// Posts a receive.
    fn receive(&self, io: &mut Transport<'_>) -> Result<()> {
        let bufs = Buf::zeroed(HEAD + CM_DATA_SIZE).into();
        let lent = io.ops.lend(self.object, OpKind::Once, RECEIVE, bufs);
        let (key, buf) = lent.map_err(|refused| refused.error)?;
        let (kind, src, flags) = (MsgKind::Msg, FI_ADDR_UNSPEC, OpFlags::COMPLETION);
        let req = RecvReq { kind, buf, src, tag: 0, ignore: 0, context: key.0, flags };
        let posted = io.engine.post_recv(self.ep, req);
        posted.map_err(|error| io.ops.refuse(key, error).error)
    }

    /// Sends `message` as soon as there is room. With `last` the hidden vector drops `side`
    /// afterwards.
    pub(super) fn send(
        &mut self,
        io: &mut Transport<'_>,
        side: FiAddr,
        message: &Message,
        last: bool,
    ) {
        let (bytes, kind, conn) = (message.to_bytes(), message.kind, message.from);
        // If the vector has lost the side, the send fails.
        let station =
            io.node().objects().av_lookup(self.av, side).map(|at| at.station).unwrap_or_default();
        self.waiting.push_back(OutMessage {
            side,
            station,
            bytes,
            kind,
            conn,
            last,
            resent: false,
        });
        self.send_waiting(io);
    }

    fn send_waiting(&mut self, io: &mut Transport<'_>) {
        while let Some(sent) = self.waiting.pop_front() {
            if self.is_full(sent.station) {
                self.held.entry(sent.station).or_default().push_back(sent);
                continue;
            }
            match self.post(io, &sent) {
                Ok(()) => {
                    *self.to_station.entry(sent.station).or_default() += 1;
                    self.in_flight.insert(self.next_key, sent);
                    self.next_key += 1;
                }
                Err(Error::Again) => return self.waiting.push_front(sent),
                Err(_) => {
                    self.release(sent.station);
                    self.on_send_failed(io, &sent);
                }
            }
        }
    }

    /// Notes that a message to a station is no longer in flight.
    fn message_done(&mut self, station: Station) {
        if let Entry::Occupied(mut count) = self.to_station.entry(station) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        self.release(station);
    }

    /// Releases the next held message to a station.
    fn release(&mut self, station: Station) {
        if let Entry::Occupied(mut held) = self.held.entry(station) {
            self.waiting.extend(held.get_mut().pop_front());
            if held.get().is_empty() {
                held.remove();
            }
        }
    }

    /// Whether a station has [`SENDS_TO_ONE`] messages in flight.
    fn is_full(&self, station: Station) -> bool {
        self.to_station.get(&station).is_some_and(|count| *count >= SENDS_TO_ONE)
    }

    fn post(&self, io: &mut Transport<'_>, sent: &OutMessage) -> Result<()> {
        let bufs = Buf::from(&sent.bytes[..]).into();
        let lent = io.ops.lend(self.object, OpKind::Once, self.next_key, bufs);
        let (key, buf) = lent.map_err(|refused| refused.error)?;
        let mut flags = OpFlags::COMPLETION;
        // The delivery of a final message must not keep a program from closing.
        flags.set(OpFlags::DELIVERY_COMPLETE, !sent.kind.is_final());
        let (kind, dest, no_completion) = (MsgKind::Msg, sent.side, false);
        let context = key.0;
        let req = SendReq { kind, buf, dest, tag: 0, data: 0, context, flags, no_completion };
        let posted = io.engine.post_send(self.ep, req);
        posted.map_err(|error| io.ops.refuse(key, error).error)
    }

    fn on_send_done(&mut self, io: &mut Transport<'_>, name: u64, failed: Option<Error>) {
        let Some(sent) = self.in_flight.remove(&name) else { return };
        self.message_done(sent.station);
        if let Some(error) = failed {
            return match self.may_resend(&sent, error) {
                true => self.waiting.push_back(OutMessage { resent: true, ..sent }),
                false => self.on_send_failed(io, &sent),
            };
        }
        if sent.last {
            self.unused_sides.push(sent.side);
        }
        if sent.kind == Kind::Accept
            && let Some(conn) = self.conns.get_mut(&sent.conn)
            && conn.state == State::Connected
        {
            // Not earlier: a program that has read the event may turn the loop no more.
            conn.report_connected(&[]);
        }
    }

    /// Whether an undelivered message is sent again: a request, to an address without incarnation,
    /// whose session was with an old process. The process that listens now has not received it.
    fn may_resend(&self, sent: &OutMessage, error: Error) -> bool {
        let waits =
            |conn: &Conn| conn.state == State::Connecting && conn.side_addr.incarnation == 0;
        let request = sent.kind == Kind::Request && !sent.resent && error == Error::ConnReset;
        request && self.conns.get(&sent.conn).is_some_and(waits)
    }

    /// Handles an undelivered message: a request counts as rejected, and an accepted peer as dead.
    /// The death of a listener does not concern connections that another side has accepted.
    fn on_send_failed(&mut self, io: &mut Transport<'_>, sent: &OutMessage) {
        if sent.last {
            self.unused_sides.push(sent.side);
        }
        match self.conns.get_mut(&sent.conn).filter(|conn| conn.side == sent.side) {
            Some(conn) if conn.state == State::Connecting => conn.refuse(io, Vec::new()),
            Some(conn) if !sent.kind.is_final() => conn.end(io),
            _ => {}
        }
    }

    /// All messages that have not been delivered.
    fn pending(&self) -> impl Iterator<Item = &OutMessage> {
        self.in_flight.values().chain(&self.waiting).chain(self.held.values().flatten())
    }

    /// Replies to a peer without a connection. No reply is sent if [`REPLIES_MAX`] replies wait, or
    /// if there is no room.
    fn reply(&mut self, io: &mut Transport<'_>, side: EpAddr, message: &Message) {
        let held = self.held.get(&side.station).map_or(0, VecDeque::len);
        if held.max(self.waiting.len()) < REPLIES_MAX {
            let _ = self.send_to(io, side, message);
        }
    }

    /// Sends a message to a peer without a connection.
    pub(super) fn send_to(
        &mut self,
        io: &mut Transport<'_>,
        side: EpAddr,
        message: &Message,
    ) -> Result<()> {
        let at = io.engine.av_insert(self.av, side)?;
        self.send(io, at, message, true);
        Ok(())
    }

    pub(super) fn message(&self, kind: Kind, to: u32, from: u32, data: &[u8]) -> Message {
        let answers = self.answers;
        Message { kind, to, from, answers, side: self.addr, ep: self.addr, data: data.to_vec() }
    }

    /// Adds a connection and sends its first message to the peer.
    pub(super) fn join(
        &mut self,
        io: &mut Transport<'_>,
        kind: Kind,
        mut conn: Conn,
        data: &[u8],
    ) -> Result<u32> {
        conn.side = io.engine.av_insert(self.av, conn.side_addr)?;
        let number = self.fresh_number();
        let message = Message { ep: conn.ep, ..self.message(kind, conn.peer_number, number, data) };
        let side = conn.side;
        self.conns.insert(number, conn);
        self.send(io, side, &message, false);
        Ok(number)
    }

    /// A number that no connection has and that cannot be guessed from others.
    fn fresh_number(&mut self) -> u32 {
        loop {
            self.numbers += 1;
            let number = self.secret.hash_one(self.numbers) as u32;
            if ![0, self.life].contains(&number) && !self.conns.contains_key(&number) {
                return number;
            }
        }
    }

    fn on_message(&mut self, io: &mut Transport<'_>, message: Message) {
        let Message { kind, to, from, side, .. } = message;
        if kind == Kind::Request {
            return self.on_request(io, message);
        }
        let its = |conn: &Conn| conn.peer_number == from && conn.side_addr == side;
        let stands = |conn: &Conn| conn.state == State::Connected && its(conn);
        let is_listener = to == self.life && self.listener.is_some();
        if kind == Kind::Alive && (is_listener || self.conns.get(&to).is_some_and(stands)) {
            return;
        }
        let Some(conn) = self.conns.get_mut(&to).filter(|_| kind != Kind::Alive) else {
            if matches!(kind, Kind::Accept | Kind::Alive) {
                // The endpoint that requested the connection is closed. If this message is not
                // delivered the peer is dead.
                self.reply(io, side, &self.message(Kind::Shutdown, from, to, &[]));
            }
            return;
        };
        match (kind, conn.state) {
            (Kind::Accept, State::Connecting) => self.on_accept(io, message),
            (Kind::Reject, State::Connecting) if conn.side_addr.station == side.station => {
                conn.refuse(io, message.data);
            }
            (Kind::Heard, State::Connecting) if conn.side_addr.station == side.station => {
                (conn.peer_number, conn.answers) = (from, message.answers);
                self.schedule_alive(io.engine.last_now());
            }
            // Another process listens at that address now.
            (Kind::Shutdown, State::Connecting)
                if conn.peer_number == from && conn.side_addr.station == side.station =>
            {
                conn.refuse(io, Vec::new());
            }
            (Kind::Shutdown, State::Connected) if its(conn) => {
                // `FI_CONNECTED` always comes before `FI_SHUTDOWN`.
                conn.report_connected(&[]);
                conn.end(io);
            }
            _ => {}
        }
    }

    /// The peer has accepted. Its connection side is not the listener's, which has its own node.
    fn on_accept(&mut self, io: &mut Transport<'_>, message: Message) {
        let Some(conn) = self.conns.get_mut(&message.to) else { return };
        let peer = io.engine.av_insert(conn.av, message.ep);
        let side = io.engine.av_insert(self.av, message.side);
        let (Ok(_), Ok(side)) = (peer, side) else {
            tracing::error!("no room for a peer that has accepted");
            return conn.refuse(io, Vec::new());
        };
        let old = std::mem::replace(&mut conn.side, side);
        (conn.side_addr, conn.peer, conn.peer_number) = (message.side, message.ep, message.from);
        (conn.state, conn.answers) = (State::Connected, message.answers);
        conn.report_connected(&message.data);
        self.schedule_alive(io.engine.last_now());
        self.unused_sides.push(old);
    }

    fn on_request(&mut self, io: &mut Transport<'_>, message: Message) {
        let Message { from, answers, side, ep, data, .. } = message;
        let reported = self.listener.as_ref().is_some_and(|Listener { eq, fid, rejecter }| {
            let request = ConnRequest::new(from, answers, [side, ep], Weak::clone(rejecter));
            let eq = eq.upgrade();
            eq.is_some_and(|eq| eq.push_cm(FI_CONNREQ, *fid, &data, Some(request)))
        });
        let answer = match reported {
            true => self.message(Kind::Heard, from, self.life, &[]),
            false => self.message(Kind::Reject, from, 0, &[]),
        };
        self.reply(io, side, &answer);
    }

    /// Removes connection `number`.
    pub(super) fn close(&mut self, io: &mut Transport<'_>, number: u32) {
        let Some(conn) = self.conns.remove(&number) else { return };
        if let Some(eq) = conn.eq.upgrade() {
            eq.forget(conn.fid);
        }
        if conn.state == State::Connected {
            let message = self.message(Kind::Shutdown, conn.peer_number, number, &[]);
            self.send(io, conn.side, &message, true);
        } else {
            self.unused_sides.push(conn.side);
        }
    }

    /// Whether a final message is still pending.
    pub(super) fn is_busy(&self) -> bool {
        let last = |sent: &OutMessage| sent.kind.is_final();
        self.pending().any(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(ep: u16) -> EpAddr {
        EpAddr { station: "02:00:00:00:00:05".parse().unwrap(), ep, incarnation: 77 }
    }

    #[test]
    fn messages_come_back_and_others_are_none() {
        use Kind::*;
        for kind in [Request, Accept, Reject, Shutdown, Alive, Heard] {
            let (side, ep, data) = (addr(1), addr(2), b"hello".to_vec());
            let answers = kind == Kind::Accept;
            let message = Message { kind, to: 7, from: 8, answers, side, ep, data };
            let bytes = message.to_bytes();
            assert_eq!(Message::from_bytes(&bytes).as_ref(), Some(&message));
            for len in 0..bytes.len() {
                assert_eq!(Message::from_bytes(&bytes[..len]), None, "cut off at {len}");
            }
            for (at, value) in [(0, 0), (0, 7), (1, 2), (2, 4), (3, 1), (12, 2), (15, 1)] {
                let mut wrong = bytes.clone();
                wrong[at] = value;
                assert_eq!(Message::from_bytes(&wrong), None, "byte {at} is {value}");
            }
        }
        let (side, ep, data) = (addr(1), addr(2), vec![0; CM_DATA_SIZE + 1]);
        let answers = false;
        let long = Message { kind: Kind::Request, to: 0, from: 1, answers, side, ep, data };
        assert_eq!(Message::from_bytes(&long.to_bytes()), None);
    }
}
