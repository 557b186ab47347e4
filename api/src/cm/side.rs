//! The connection side of a domain: what it says and hears, and the state of its connections. See
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
use crate::info::{ConnRequest, Refuses};

/// Event number of a connection request (`enum fi_eq_event`).
pub const FI_CONNREQ: u32 = 1;
/// Event number of a connection that stands.
pub const FI_CONNECTED: u32 = 2;
/// Event number of a connection that has ended.
pub const FI_SHUTDOWN: u32 = 3;

/// Bytes that travel with a request, an acceptance or a refusal at most (`FI_OPT_CM_DATA_SIZE`).
pub const CM_DATA_SIZE: usize = 192;

/// Head of a message: kind, version, bytes of data (2), the receiver's and the sender's number of
/// the connection (4 each), whether the sender's silence is its death (4, 0 or 1), the sender's
/// connection side and its endpoint (16 each).
const HEAD: usize = 48;
const VERSION: u8 = 1;

/// Receives that a connection side keeps posted.
const RECEIVES: usize = 32;
/// Messages of it in flight. More wait in [`Cm::waiting`].
const SENDS: usize = 512;
/// Those to one station, which may take none: others do not wait for it. More are held.
const SENDS_TO_ONE: usize = 32;
/// Answers to strangers that wait at most: those that are held for one station, and all others.
const ANSWERS: usize = 1024;

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
    /// Whether it is a last word: nothing changes for its sender if nobody hears it.
    fn is_last(self) -> bool {
        matches!(self, Self::Reject | Self::Shutdown)
    }
}

/// A message between connection sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    kind: Kind,
    /// The connection at the receiver, or the receiver's [`Cm::life`]; 0 in a request.
    to: u32,
    /// The connection at the sender, or the sender's [`Cm::life`]; 0 in a refusal.
    from: u32,
    /// The sender's silence is its death.
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

    /// `None` for what no connection side of ours sends.
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

    /// Whether it says the truth about where it came from, which is endpoint `from`.
    fn is_from(&self, from: EpAddr) -> bool {
        // 0 where the address was inserted without one.
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
    /// Ended, and its event queue has been told.
    Ended,
}

pub(super) struct Conn {
    pub(super) state: State,
    /// The event queue has been told that it stands.
    pub(super) told: bool,
    /// The other side's silence is its death: something answers there whatever its program does.
    pub(super) answers: bool,
    /// Its endpoint.
    pub(super) id: EpId,
    /// The vector of its endpoint, for the peer alone.
    pub(super) av: AvId,
    /// The endpoint's own address.
    pub(super) ep: EpAddr,
    pub(super) eq: Weak<EqInner>,
    /// How events name the endpoint.
    pub(super) fid: u64,
    /// The other connection side, in the hidden vector and as an address: the listener's until
    /// somebody has accepted.
    pub(super) side: FiAddr,
    pub(super) side_addr: EpAddr,
    /// The connection's number there, once that is known; before, the [`Cm::life`] of the listener
    /// that has heard the request.
    pub(super) there: u32,
    /// Whom data goes to; the listener until somebody has accepted.
    pub(super) peer: EpAddr,
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

    /// Its receives are told of the end before the event queue is.
    pub(super) fn end(&mut self, io: &mut Transport<'_>) {
        io.node().objects().ep_disconnect(self.id);
        if self.state == State::Connected {
            self.tell(FI_SHUTDOWN, &[]);
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

/// A message that is on its way or waits for room.
struct Sent {
    side: FiAddr,
    /// Where that is.
    station: Station,
    bytes: Vec<u8>,
    kind: Kind,
    /// Number of the connection that it belongs to.
    conn: u32,
    /// Nobody else uses the entry of the hidden vector.
    last: bool,
    /// It was lost with a session to a life of the peer that was over, and is sent again.
    again: bool,
}

/// The connection side of a domain.
pub(crate) struct Cm {
    ep: EpId,
    cq: CqId,
    av: AvId,
    /// Number of its owner in the table of operations.
    object: u32,
    pub(super) addr: EpAddr,
    /// Our silence is our death, as far as is known.
    pub(super) answers: bool,
    /// Names this connection side and no other, not even a later one at the same address.
    life: u32,
    pub(super) conns: HashMap<u32, Conn>,
    /// Makes the numbers of connections, and how many it has made.
    secret: RandomState,
    numbers: u64,
    pub(super) listener: Option<Listener>,
    /// Messages that have not been delivered, by names of ours.
    on_their_way: HashMap<u64, Sent>,
    names: u64,
    /// How many of them are to each station.
    to_station: HashMap<Station, usize>,
    waiting: VecDeque<Sent>,
    /// Messages to stations that have as many on their way as may be.
    held: HashMap<Station, VecDeque<Sent>>,
    /// Sides that were inserted for a connection that is over.
    gone: Vec<FiAddr>,
    /// Nanoseconds between two ALIVE of a connection, and when they are due.
    alive_ns: u64,
    alive_at: Tick,
}

/// Who hears of requests.
pub(super) struct Listener {
    pub(super) eq: Weak<EqInner>,
    /// Its name in events.
    pub(super) fid: u64,
    /// Rejects a request for a program that has it and not the listener.
    pub(super) refuses: Weak<dyn Refuses>,
}

/// The name of every posted receive.
const RECEIVE: u64 = u64::MAX;

/// What a connection side sends and receives through: the engine of its domain, and the table of
/// the buffers that are lent to it.
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
    /// Opens the connection side of a domain, at the number of an endpoint that is asked for.
    /// `object` is its own in the table of operations; a silent peer is dead after `t_dead`.
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
        // It hears those who ask for a connection, whom nobody has inserted.
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
            on_their_way: HashMap::new(),
            names: 0,
            to_station: HashMap::new(),
            waiting: VecDeque::new(),
            held: HashMap::new(),
            gone: Vec::new(),
            alive_ns: u64::try_from(t_dead.as_nanos() / 2).unwrap_or(u64::MAX),
            alive_at: Tick(u64::MAX),
        };
        for _ in 0..RECEIVES {
            cm.receive(io)?;
        }
        cm.life = cm.fresh_number();
        Ok(cm)
    }

    /// Whether [`look`](Self::look) would find anything.
    #[inline]
    pub(crate) fn is_due(&self, node: &Node, now: Tick) -> bool {
        node.cqs.ready(self.cq) != Ok(0) || !self.waiting.is_empty() || now >= self.alive_at
    }

    /// When it wants to be looked at if nothing happens.
    pub(crate) fn next_deadline(&self) -> Tick {
        self.alive_at
    }

    /// Takes what has arrived and what has been sent.
    #[cold]
    pub(crate) fn look(&mut self, io: &mut Transport<'_>) {
        while self.look_at_one(io) {}
        // Not before: a message that lies in the queue may be from the same side.
        for side in self.gone.drain(..) {
            // It was inserted for one connection, so it is there.
            let _ = io.node().objects().av_remove(self.av, side);
        }
        self.send_waiting(io);
        let now = io.engine.last_now();
        if now >= self.alive_at {
            self.say_alive(io, now);
        }
    }

    /// Gives every connection, and every request that was heard, something to find a dead peer by.
    fn say_alive(&mut self, io: &mut Transport<'_>, now: Tick) {
        let asked: HashSet<u32> =
            self.pending().filter(|sent| sent.kind == Kind::Alive).map(|sent| sent.conn).collect();
        let lasts = |conn: &Conn| conn.state != State::Ended && conn.answers;
        let lasting = self.conns.iter().filter(|(_, conn)| lasts(conn));
        let lasting: Vec<_> =
            lasting.map(|(number, conn)| (*number, conn.side, conn.there)).collect();
        self.alive_at = Tick(u64::MAX);
        if !lasting.is_empty() {
            self.alive_at = now + self.alive_ns;
        }
        for (number, side, there) in lasting {
            if !asked.contains(&number) {
                self.send(io, side, &self.message(Kind::Alive, there, number, &[]), false);
            }
        }
    }

    /// There is a connection, or a request that was heard, from now on.
    pub(super) fn watch(&mut self, now: Tick) {
        self.alive_at = self.alive_at.min(now + self.alive_ns);
    }

    /// False if nothing is left.
    fn look_at_one(&mut self, io: &mut Transport<'_>) -> bool {
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
            self.was_sent(io, ended.context, failed);
            return true;
        }
        if let Err(e) = self.receive(io) {
            tracing::error!("a receive of connection requests was not posted again: {e}");
        }
        let bytes = ended.bufs.into_one().unwrap_or_default();
        let len = bytes.len().min(one[0].len as usize);
        let from = match failed {
            None => io.node().av_lookup(self.av, one[0].src).ok(),
            // Of somebody who is not in the vector, but whole.
            Some(Error::AddrNotAvail) => stranger,
            // Too long for one of ours.
            Some(_) => None,
        };
        let message = Message::from_bytes(&bytes[..len]);
        match message.zip(from) {
            Some((message, from)) if message.is_from(from) => self.take(io, message),
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

    /// Sends `message` as soon as there is room. With `last` the hidden vector then forgets `side`.
    pub(super) fn send(
        &mut self,
        io: &mut Transport<'_>,
        side: FiAddr,
        message: &Message,
        last: bool,
    ) {
        let (bytes, kind, conn) = (message.to_bytes(), message.kind, message.from);
        // Of a side that the vector has lost, nothing can be sent to it.
        let station = io.node().av_lookup(self.av, side).map(|at| at.station).unwrap_or_default();
        self.waiting.push_back(Sent { side, station, bytes, kind, conn, last, again: false });
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
                    self.on_their_way.insert(self.names, sent);
                    self.names += 1;
                }
                Err(Error::Again) => return self.waiting.push_front(sent),
                Err(_) => {
                    self.release(sent.station);
                    self.failed(io, &sent);
                }
            }
        }
    }

    /// A message to a station is not on its way any more.
    fn makes_room(&mut self, station: Station) {
        if let Entry::Occupied(mut count) = self.to_station.entry(station) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        self.release(station);
    }

    /// The next message to a station may leave.
    fn release(&mut self, station: Station) {
        if let Entry::Occupied(mut held) = self.held.entry(station) {
            self.waiting.extend(held.get_mut().pop_front());
            if held.get().is_empty() {
                held.remove();
            }
        }
    }

    /// Whether as many messages are on their way to a station as may be.
    fn is_full(&self, station: Station) -> bool {
        self.to_station.get(&station).is_some_and(|count| *count >= SENDS_TO_ONE)
    }

    fn post(&self, io: &mut Transport<'_>, sent: &Sent) -> Result<()> {
        let bufs = Buf::from(&sent.bytes[..]).into();
        let lent = io.ops.lend(self.object, OpKind::Once, self.names, bufs);
        let (key, buf) = lent.map_err(|refused| refused.error)?;
        let mut flags = OpFlags::COMPLETION;
        // The way of a last word must not keep a program from closing.
        flags.set(OpFlags::DELIVERY_COMPLETE, !sent.kind.is_last());
        let (kind, dest, no_completion) = (MsgKind::Msg, sent.side, false);
        let context = key.0;
        let req = SendReq { kind, buf, dest, tag: 0, data: 0, context, flags, no_completion };
        let posted = io.engine.post_send(self.ep, req);
        posted.map_err(|error| io.ops.refuse(key, error).error)
    }

    fn was_sent(&mut self, io: &mut Transport<'_>, name: u64, failed: Option<Error>) {
        let Some(sent) = self.on_their_way.remove(&name) else { return };
        self.makes_room(sent.station);
        if let Some(error) = failed {
            return match self.may_repeat(&sent, error) {
                true => self.waiting.push_back(Sent { again: true, ..sent }),
                false => self.failed(io, &sent),
            };
        }
        if sent.last {
            self.gone.push(sent.side);
        }
        if sent.kind == Kind::Accept
            && let Some(conn) = self.conns.get_mut(&sent.conn)
            && conn.state == State::Connected
        {
            // Not before: who has read it may wait for something else, and turn the loop no more.
            conn.stands(&[]);
        }
    }

    /// Whether a message that has not come through is sent again: a request to whoever listens
    /// there, which left by a session with a process that is gone. Who listens now has not heard of
    /// it.
    fn may_repeat(&self, sent: &Sent, error: Error) -> bool {
        let waits =
            |conn: &Conn| conn.state == State::Connecting && conn.side_addr.incarnation == 0;
        let request = sent.kind == Kind::Request && !sent.again && error == Error::ConnReset;
        request && self.conns.get(&sent.conn).is_some_and(waits)
    }

    /// A message has not come through: a request is as good as refused, and who was accepted is
    /// gone. The death of the listener is nothing to whoever it has led to another side.
    fn failed(&mut self, io: &mut Transport<'_>, sent: &Sent) {
        if sent.last {
            self.gone.push(sent.side);
        }
        match self.conns.get_mut(&sent.conn).filter(|conn| conn.side == sent.side) {
            Some(conn) if conn.state == State::Connecting => conn.refuse(io, Vec::new()),
            Some(conn) if !sent.kind.is_last() => conn.end(io),
            _ => {}
        }
    }

    /// Messages that have not been delivered.
    fn pending(&self) -> impl Iterator<Item = &Sent> {
        self.on_their_way.values().chain(&self.waiting).chain(self.held.values().flatten())
    }

    /// Answers somebody who has no connection here, unless his station has left many answers or
    /// there is no room: then he gets none.
    fn answer(&mut self, io: &mut Transport<'_>, side: EpAddr, message: &Message) {
        let held = self.held.get(&side.station).map_or(0, VecDeque::len);
        if held.max(self.waiting.len()) < ANSWERS {
            let _ = self.send_to(io, side, message);
        }
    }

    /// A message to somebody who has no connection here.
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

    /// Makes a connection and says so to the other side.
    pub(super) fn join(
        &mut self,
        io: &mut Transport<'_>,
        kind: Kind,
        mut conn: Conn,
        data: &[u8],
    ) -> Result<u32> {
        conn.side = io.engine.av_insert(self.av, conn.side_addr)?;
        let number = self.fresh_number();
        let message = Message { ep: conn.ep, ..self.message(kind, conn.there, number, data) };
        let side = conn.side;
        self.conns.insert(number, conn);
        self.send(io, side, &message, false);
        Ok(number)
    }

    /// A number that no connection has and that says nothing of the others.
    fn fresh_number(&mut self) -> u32 {
        loop {
            self.numbers += 1;
            let number = self.secret.hash_one(self.numbers) as u32;
            if ![0, self.life].contains(&number) && !self.conns.contains_key(&number) {
                return number;
            }
        }
    }

    fn take(&mut self, io: &mut Transport<'_>, message: Message) {
        let Message { kind, to, from, side, .. } = message;
        if kind == Kind::Request {
            return self.asked(io, message);
        }
        let its = |conn: &Conn| conn.there == from && conn.side_addr == side;
        let stands = |conn: &Conn| conn.state == State::Connected && its(conn);
        let is_listener = to == self.life && self.listener.is_some();
        if kind == Kind::Alive && (is_listener || self.conns.get(&to).is_some_and(stands)) {
            return;
        }
        let Some(conn) = self.conns.get_mut(&to).filter(|_| kind != Kind::Alive) else {
            if matches!(kind, Kind::Accept | Kind::Alive) {
                // Who asked has gone meanwhile. If this does not come through, so has the other.
                self.answer(io, side, &self.message(Kind::Shutdown, from, to, &[]));
            }
            return;
        };
        match (kind, conn.state) {
            (Kind::Accept, State::Connecting) => self.accepted(io, message),
            (Kind::Reject, State::Connecting) if conn.side_addr.station == side.station => {
                conn.refuse(io, message.data);
            }
            (Kind::Heard, State::Connecting) if conn.side_addr.station == side.station => {
                (conn.there, conn.answers) = (from, message.answers);
                self.watch(io.engine.last_now());
            }
            // Another process listens there now.
            (Kind::Shutdown, State::Connecting)
                if conn.there == from && conn.side_addr.station == side.station =>
            {
                conn.refuse(io, Vec::new());
            }
            (Kind::Shutdown, State::Connected) if its(conn) => {
                // Who hears of an end has heard of the beginning.
                conn.stands(&[]);
                conn.end(io);
            }
            _ => {}
        }
    }

    /// The other side has accepted. It is not the listener, which has its own node.
    fn accepted(&mut self, io: &mut Transport<'_>, message: Message) {
        let Some(conn) = self.conns.get_mut(&message.to) else { return };
        let peer = io.engine.av_insert(conn.av, message.ep);
        let side = io.engine.av_insert(self.av, message.side);
        let (Ok(_), Ok(side)) = (peer, side) else {
            tracing::error!("no room for a peer that has accepted");
            return conn.refuse(io, Vec::new());
        };
        let old = std::mem::replace(&mut conn.side, side);
        (conn.side_addr, conn.peer, conn.there) = (message.side, message.ep, message.from);
        (conn.state, conn.answers) = (State::Connected, message.answers);
        conn.stands(&message.data);
        self.watch(io.engine.last_now());
        self.gone.push(old);
    }

    fn asked(&mut self, io: &mut Transport<'_>, message: Message) {
        let Message { from, answers, side, ep, data, .. } = message;
        let told = self.listener.as_ref().is_some_and(|Listener { eq, fid, refuses }| {
            let request = ConnRequest::new(from, answers, [side, ep], Weak::clone(refuses));
            let eq = eq.upgrade();
            eq.is_some_and(|eq| eq.push_cm(FI_CONNREQ, *fid, &data, Some(request)))
        });
        let answer = match told {
            true => self.message(Kind::Heard, from, self.life, &[]),
            false => self.message(Kind::Reject, from, 0, &[]),
        };
        self.answer(io, side, &answer);
    }

    /// Ends connection `number` for good.
    pub(super) fn close(&mut self, io: &mut Transport<'_>, number: u32) {
        let Some(conn) = self.conns.remove(&number) else { return };
        if let Some(eq) = conn.eq.upgrade() {
            eq.forget(conn.fid);
        }
        if conn.state == State::Connected {
            let message = self.message(Kind::Shutdown, conn.there, number, &[]);
            self.send(io, conn.side, &message, true);
        } else {
            self.gone.push(conn.side);
        }
    }

    /// Whether a last word has not left for good.
    pub(super) fn is_busy(&self) -> bool {
        let last = |sent: &Sent| sent.kind.is_last();
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
