//! Two live nodes, an adversary on the wire, and a caller who does anything: the bytes are the
//! program of all three.

use std::collections::VecDeque;

use barewire_dataplane::error::Error;
use barewire_dataplane::flags::{BindFlags, Caps, CqFlags, MrAccess, OpFlags};
use barewire_dataplane::node::{
    AtomicReq, AvId, CqId, CqReader, EpAttr, EpId, Levels, MrId, MrReq, MsgKind, Node,
    NodeCounters, NodeSettings, ReadReq, RecvReq, RmaList, SendReq, WriteReq,
};
use barewire_dataplane::proto::atomic::{AtomicKind, Sharing};
use barewire_dataplane::types::{Cqe, EpAddr, FI_ADDR_UNSPEC, FiAddr, Instant};
use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::port::{PortCaps, Station, Tx};

use crate::forge::{self, Overheard, REGION_KEY};
use crate::input::Input;
use crate::memory::{FILL, Memory};

/// A longer program says nothing that a shorter one does not.
const PROGRAM_MAX: usize = 600;

/// Silence after which a peer is dead.
const T_DEAD_NS: u64 = 100_000_000;

/// Endpoints of a node.
const EPS: usize = 2;

/// Frames under way to one node at most; what is more is lost.
const QUEUE_MAX: usize = 512;

/// Length of the region that peers may access.
const REGION_LEN: usize = 4096;

/// What sends hold.
const SENT: u8 = 0x5a;

/// Two nodes with small tables, a wire between them that does what the program says, and forged
/// frames as if from the other node or from a third station.
///
/// Whatever the program: no panic; every operation that was posted ends once, and at the end all
/// have; nothing outside the lent memory is written, nor lent memory after its operation has ended;
/// no counter falls; a node with nothing to do does not ask to be called again at once; and when
/// endpoints and sessions are gone, every pool is full again.
pub fn session(data: &[u8]) {
    run(data);
}

/// As [`session`]. The world at the end, if there was a program.
fn run(data: &[u8]) -> Option<World> {
    let (&[setup], program) = data.split_first_chunk()?;
    let mut input = Input::new(&program[..program.len().min(PROGRAM_MAX)]);
    let mut world = World::new(setup);
    while !input.is_empty() {
        world.step(&mut input);
    }
    world.end(setup & 0x80 != 0);
    Some(world)
}

struct World {
    now: Instant,
    sides: [Side; 2],
    ops: Vec<Op>,
    /// Memory of regions that were closed, as it was then.
    closed: Vec<(usize, Vec<u8>)>,
    /// Messages that left, and receives that were posted, by the entries that ask the fewest
    /// questions, and completions that never lay in a queue.
    sent_at_hand: u64,
    posted_at_hand: u64,
    read_alone: u64,
    /// Last, so that it outlives the nodes.
    memory: Memory,
}

struct Side {
    node: Node,
    cqs: [CqId; EPS],
    av: AvId,
    eps: [Option<EpId>; EPS],
    /// The other side's endpoints, one that does not exist, one of the third station.
    dests: [FiAddr; 4],
    /// Frames on their way here.
    inbox: VecDeque<Vec<u8>>,
    /// What an adversary knows of the sessions with the other side, and of its own.
    overheard: [Overheard; STATIONS],
    /// Announced messages.
    handles: Vec<u64>,
    /// The region that peers may access, and its memory.
    region: Option<(MrId, usize)>,
    /// Frames that the port will refuse before it takes one again.
    full: u8,
    counted: Vec<u64>,
}

/// An operation that was accepted. Its context is its index.
struct Op {
    side: usize,
    kind: Kind,
    /// Writes an entry when it succeeds.
    wanted: bool,
    ended: bool,
    memory: Option<usize>,
    /// The memory when the operation had ended.
    after: Option<Vec<u8>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Send,
    Recv,
    Multi,
    Special,
    /// A read, or an atomic operation that fetches.
    Read,
}

fn station_of(n: usize) -> Station {
    Station::at([2, 0, 0, 0, 0, n as u8 + 1])
}

/// The first station of the adversary.
const STRANGER: usize = 2;

/// Stations that a node is told to know: the other side, and more strangers than there is room for.
const STATIONS: usize = 5;

impl Side {
    fn new(i: usize, setup: u8) -> Self {
        let mtu = [256, 1500, 1500, 4096][usize::from(setup >> 1) % 4];
        let caps =
            PortCaps { lossless: setup & 1 != 0, ..PortCaps::new(station_of(i), mtu, "fuzz") };
        let settings = NodeSettings {
            incarnation: 101 + i as u64,
            seed: 7 + i as u64,
            t_dead_ns: T_DEAD_NS,
            eager_max: Some(2000),
            peer_max: 4,
            tx_wr_max: 12,
            rx_wr_max: 12,
            unexpected_bytes: 64 * 256,
            pull_window: if setup & 8 != 0 { 1 } else { 600 << 10 },
            mr_max: 8,
            crc: None,
            ..NodeSettings::default()
        };
        let mut node = Node::new(settings, &caps).expect("settings are good");
        let cqs = [16, 4].map(|size| node.cqs.open(size).expect("room for a queue"));
        let av = node.sessions().av_open(4).expect("room for a vector");
        let mut side = Self {
            node,
            cqs,
            av,
            eps: [None; EPS],
            dests: [0; 4],
            inbox: VecDeque::new(),
            overheard: Default::default(),
            handles: Vec::new(),
            region: None,
            full: 0,
            counted: Vec::new(),
        };
        let known = if setup & 16 != 0 { 102 - i as u64 } else { 0 };
        let to =
            [(station_of(1 - i), 0, known), (station_of(1 - i), 1, 0), (station_of(1 - i), 9, 0)];
        for (k, (station, ep, incarnation)) in to.into_iter().enumerate() {
            side.insert(k, EpAddr { station, ep, incarnation });
        }
        side.insert(3, EpAddr { station: station_of(STRANGER), ep: 0, incarnation: 0 });
        side.open(0);
        side.open(1);
        side
    }

    fn insert(&mut self, k: usize, addr: EpAddr) {
        self.dests[k] =
            self.node.sessions().av_insert(Instant(1), self.av, addr).expect("room for a peer");
    }

    /// Opens endpoint `n`: a plain one, or one with all that is unusual.
    fn open(&mut self, n: usize) {
        let caps = Caps::MSG | Caps::TAGGED | Caps::SOURCE | Caps::MULTI_RECV | Caps::FENCE;
        let caps = caps | Caps::RMA | Caps::ATOMIC;
        let more = Caps::SOURCE_ERR | Caps::DIRECTED_RECV | Caps::RMA_EVENT;
        let caps = caps | if n == 1 { more } else { caps };
        let number = Some(n as u16);
        let attr = EpAttr { number, caps, buffered_recv: n == 1, tx_size: 8, ..EpAttr::default() };
        let ep = self.node.eps.open(attr).expect("the number is free");
        let mut flags = BindFlags::TRANSMIT | BindFlags::RECV;
        if n == 1 {
            flags |= BindFlags::SELECTIVE_COMPLETION;
        }
        self.node.objects().ep_bind_cq(ep, self.cqs[n], flags).expect("nothing is bound");
        self.node.objects().ep_bind_av(ep, self.av).expect("nothing is bound");
        self.node.ep_enable(ep).expect("all is bound");
        self.eps[n] = Some(ep);
    }

    /// Lets the node send; what leaves is put into `to`'s queue.
    fn transmit(&mut self, i: usize, now: Instant, to: &mut VecDeque<Vec<u8>>) -> usize {
        let Self { node, overheard, full, .. } = self;
        node.transmit(now, &mut way_from(i, overheard, full, to))
    }

    /// Takes the next frame. What it makes due may leave at once, to a queue, if there is one; and
    /// then somebody reads a completion queue that is empty, and is given what comes for it.
    fn deliver(
        &mut self,
        i: usize,
        now: Instant,
        to: Option<&mut VecDeque<Vec<u8>>>,
    ) -> Option<Cqe> {
        let bytes = self.inbox.pop_front()?;
        self.overheard[0].hear(&bytes);
        let Self { node, overheard, full, cqs, .. } = self;
        let rx = RxFrame::new(&bytes);
        node.prefetch(&rx);
        let Some(to) = to else {
            node.on_frame(now, &rx);
            return None;
        };
        let empty = cqs.iter().find(|&&cq| node.cqs.is_empty(cq));
        let (out, mut read) = (way_from(i, overheard, full, to), None);
        match empty {
            Some(cq) => {
                let reader = CqReader { cq, put: |cqe: &Cqe| read = Some(*cqe) };
                node.on_frame_read(&now, &rx, out, reader);
            }
            None => node.on_frame_with(&now, &rx, out),
        }
        read
    }
}

/// The way of frames out of side `i`: into the queue `to`, past who listens.
fn way_from<'a>(
    i: usize,
    overheard: &'a mut [Overheard; STATIONS],
    full: &'a mut u8,
    to: &'a mut VecDeque<Vec<u8>>,
) -> impl FnMut(&TxFrame<'_>) -> Tx + 'a {
    move |frame| {
        if *full > 0 {
            *full -= 1;
            return Tx::Full;
        }
        let mut bytes = vec![0; frame.len()];
        frame.copy_to(&mut bytes);
        let station = usize::from(bytes[5]).saturating_sub(1 + STRANGER) + 1;
        if bytes[..6] == station_of(1 - i).mac.0 {
            overheard[0].listen(&bytes);
            if to.len() < QUEUE_MAX {
                to.push_back(bytes);
            }
        } else if let Some(session) = overheard.get_mut(station) {
            session.listen(&bytes);
        }
        Tx::Sent
    }
}

impl World {
    fn new(setup: u8) -> Self {
        let sides = [Side::new(0, setup), Side::new(1, setup)];
        let mut world = Self {
            now: Instant(1),
            sides,
            ops: Vec::new(),
            closed: Vec::new(),
            sent_at_hand: 0,
            posted_at_hand: 0,
            read_alone: 0,
            memory: Memory::default(),
        };
        if setup & 0x20 == 0 {
            world.register(0);
            world.register(1);
        }
        if setup & 0x40 == 0 {
            // Most begin where a session is open.
            world.recv(1, &mut Input::new(&[0; 8]));
            world.send(0, &mut Input::new(&[0; 8]));
            world.turn(3);
        }
        world
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let b = input.byte();
        let i = usize::from(b & 1);
        match b >> 1 & 31 {
            0..=2 => self.deliver(i, b & 0x40 != 0),
            3 => drop(self.sides[i].inbox.pop_front()),
            4 => {
                let copy = self.sides[i].inbox.front().cloned();
                self.sides[i].inbox.extend(copy);
            }
            5 if self.sides[i].inbox.len() > 1 => {
                let at = usize::from(input.byte()) % self.sides[i].inbox.len();
                self.sides[i].inbox.swap(0, at);
            }
            6 => {
                if let Some(bytes) = self.sides[i].inbox.front_mut() {
                    forge::change(bytes, input);
                }
                self.deliver(i, false);
            }
            7 | 8 => self.transmit(i),
            9 => {
                self.sides[i].full = input.byte();
                self.transmit(i);
            }
            10 => self.now = self.now + (1 << (input.byte() % 28)),
            11 => self.pass(1 << (input.byte() % 24)),
            12 => self.turn(usize::from(input.byte() % 8)),
            13..=15 => self.send(i, input),
            16..=18 => self.recv(i, input),
            19 => self.special(i, input),
            20 => self.cancel(i, input),
            21 | 22 => self.read(i),
            23 => self.open_or_close(i, input),
            24 if input.chance(16) => {
                self.sides[i].node.sessions().drop_session(self.now, station_of(1 - i));
            }
            25 if input.chance(4) => self.restart_address(i, input),
            26 => self.one_sided(i, input),
            27 if input.chance(4) => self.register(i),
            _ => self.forge(i, input),
        }
    }

    fn deliver(&mut self, i: usize, with_way_back: bool) {
        let now = self.now;
        let (side, other) = self.pair(i);
        let read = side.deliver(i, now, with_way_back.then_some(&mut other.inbox));
        if let Some(cqe) = read {
            self.read_alone += 1;
            self.outcome(i, &cqe, None);
        }
    }

    fn transmit(&mut self, i: usize) {
        let now = self.now;
        let (side, other) = self.pair(i);
        side.transmit(i, now, &mut other.inbox);
    }

    /// Side `i` and the other.
    fn pair(&mut self, i: usize) -> (&mut Side, &mut Side) {
        let [a, b] = &mut self.sides;
        if i == 0 { (a, b) } else { (b, a) }
    }

    /// Everything that is under way arrives, `times` times.
    fn turn(&mut self, times: usize) {
        for _ in 0..times {
            for i in 0..2 {
                self.transmit(i);
            }
            for i in 0..2 {
                for _ in 0..self.sides[i].inbox.len() {
                    self.deliver(i, false);
                }
            }
            self.now = self.now + 1_000;
        }
    }

    /// Time passes, and both loops run in it; nothing arrives.
    fn pass(&mut self, ns: u64) {
        let until = self.now + ns;
        while self.now < until {
            let due = self.sides.iter().filter_map(|side| side.node.next_deadline()).min();
            let due = due.unwrap_or(until).max(self.now + 1_000);
            self.now = due.min(self.now + 900_000).min(until);
            self.transmit(0);
            self.transmit(1);
        }
        self.check_counters();
    }

    fn kind(input: &mut Input<'_>) -> MsgKind {
        if input.chance(2) { MsgKind::Msg } else { MsgKind::Tagged }
    }

    fn accept(&mut self, side: usize, kind: Kind, wanted: bool, memory: Option<usize>) {
        self.ops.push(Op { side, kind, wanted, ended: false, memory, after: None });
    }

    fn send(&mut self, i: usize, input: &mut Input<'_>) {
        let n = usize::from(input.byte() % EPS as u8);
        let Some(ep) = self.sides[i].eps[n] else { return };
        let len = input.pick(&[0, 1, 64, 256, 257, 600, 1400, 1999, 2001, 9000, 70_000]);
        let flags = input.pick(&[
            OpFlags::empty(),
            OpFlags::COMPLETION,
            OpFlags::DELIVERY_COMPLETE,
            OpFlags::MATCH_COMPLETE,
            OpFlags::INJECT,
            OpFlags::FENCE,
            OpFlags::MORE,
            OpFlags::INJECT_COMPLETE,
        ]);
        let extra = input.byte();
        let mut flags = flags;
        flags.set(OpFlags::REMOTE_CQ_DATA, extra & 3 == 1);
        flags.set(OpFlags::COMPLETION, flags.contains(OpFlags::COMPLETION) || extra & 12 == 4);
        let kind = Self::kind(input);
        let tag = if kind == MsgKind::Tagged { u64::from(extra >> 4 & 1) + 1 } else { 0 };
        let no_completion = extra & 0xe0 == 0x20;
        let (memory, buf) = self.memory.lend(len, SENT);
        let dest = self.sides[i].dests[usize::from(input.byte() & 7).saturating_sub(4)];
        let context = self.ops.len() as u64;
        let req = SendReq { kind, buf, dest, tag, data: 9, context, flags, no_completion };
        if self.send_by(i, ep, req) {
            let wanted = !no_completion && (n == 0 || flags.contains(OpFlags::COMPLETION));
            self.accept(i, Kind::Send, wanted, Some(memory));
        }
        if extra & 0x10 == 0 {
            self.transmit(i);
        }
    }

    /// Sends by the entries that may take it, the quickest first, or by all but some of them: the
    /// number of operations before says which.
    fn send_by(&mut self, i: usize, ep: EpId, mut req: SendReq) -> bool {
        let (now, way) = (self.now, self.ops.len() % 4);
        let (side, other) = self.pair(i);
        let Side { node, overheard, full, .. } = side;
        let mut out = way_from(i, overheard, full, &mut other.inbox);
        let at_hand = way > 0 && node.try_send_cached(ep, &req, &mut out);
        if at_hand || way > 1 && node.try_send_inline(ep, &req, &mut out, || now) {
            drop(out);
            self.sent_at_hand += 1;
            return true;
        }
        way > 0 && node.try_send(ep, &mut req, &mut out, || now)
            || node.post_send(now, ep, req).is_ok()
    }

    /// Posts a receive, likewise.
    fn recv_by(&mut self, i: usize, ep: EpId, req: RecvReq) -> bool {
        let (now, way) = (self.now, self.ops.len() % 4);
        let node = &mut self.sides[i].node;
        if way > 1 && node.objects().try_post_recv_reserved(ep, &req) {
            self.posted_at_hand += 1;
            return true;
        }
        way > 0 && node.objects().try_post_recv(ep, &req) || node.post_recv(now, ep, req).is_ok()
    }

    fn recv(&mut self, i: usize, input: &mut Input<'_>) {
        let n = usize::from(input.byte() % EPS as u8);
        let Some(ep) = self.sides[i].eps[n] else { return };
        let len = input.pick(&[0, 8, 256, 1400, 3000, 9000, 80_000]);
        let kind = Self::kind(input);
        let extra = input.byte();
        let multi = kind == MsgKind::Msg && extra & 3 == 1;
        let mut flags = OpFlags::empty();
        flags.set(OpFlags::MULTI_RECV, multi);
        flags.set(OpFlags::COMPLETION, extra & 4 != 0);
        let (memory, buf) = self.memory.lend(len, FILL);
        let src = if extra & 0x18 == 8 { self.sides[i].dests[3] } else { FI_ADDR_UNSPEC };
        let (tag, ignore) = (u64::from(extra >> 5 & 1) + 1, u64::from(extra >> 6 & 1) * 3);
        let context = self.ops.len() as u64;
        let req = RecvReq { kind, buf, src, tag, ignore, context, flags };
        if self.recv_by(i, ep, req) {
            let wanted = n == 0 || flags.contains(OpFlags::COMPLETION);
            let kind = if multi { Kind::Multi } else { Kind::Recv };
            self.accept(i, kind, wanted, Some(memory));
        }
    }

    /// Write, read and atomic operations.
    fn one_sided(&mut self, i: usize, input: &mut Input<'_>) {
        let n = usize::from(input.byte() % EPS as u8);
        let Some(ep) = self.sides[i].eps[n] else { return };
        let (how, extra) = (input.byte(), input.byte());
        let len = input.pick(&[0, 8, 8, 64, 256, 2000, 4096, 5000]);
        let addr = input.pick(&[0, 0, 8, 100, 4000, u64::MAX]);
        let key = if extra & 0x60 == 0x60 { 99 } else { REGION_KEY };
        let flags = input.pick(&[
            OpFlags::empty(),
            OpFlags::COMPLETION,
            OpFlags::INJECT,
            OpFlags::FENCE,
            OpFlags::DELIVERY_COMPLETE,
            OpFlags::REMOTE_CQ_DATA,
        ]);
        let no_completion = extra & 0x18 == 8;
        let dest = self.sides[i].dests[usize::from(extra & 7).saturating_sub(4)];
        let context = self.ops.len() as u64;
        let (memory, buf) = self.memory.lend(len, SENT);
        let (side, now) = (&mut self.sides[i], self.now);
        let (kind, posted) = match how % 4 {
            0 => {
                let rma = RmaList::one(addr, len as u64, key);
                let req = WriteReq { buf, dest, rma, data: 3, context, flags, no_completion };
                (Kind::Send, side.node.posting().post_write(now, ep, req))
            }
            1 => {
                let rma = RmaList::one(addr, len as u64, key);
                let req = ReadReq { buf, dest, rma, context, flags };
                (Kind::Read, side.node.posting().post_read(now, ep, req))
            }
            _ => {
                let kinds = [AtomicKind::Base, AtomicKind::Fetch, AtomicKind::Compare];
                let kind = kinds[usize::from(how >> 2) % 3];
                let rma = RmaList::one(addr, len as u64 / 8, key);
                let mut lend = |wanted: bool| {
                    let len = if wanted { len } else { 0 };
                    self.memory.lend(len, SENT).1
                };
                let operand = lend(true);
                let compare = lend(kind == AtomicKind::Compare);
                let result = if kind == AtomicKind::Base { lend(false) } else { buf };
                // 64-bit integers are type 7.
                let (op, ty) = (u32::from(how >> 4), 7);
                let req = AtomicReq {
                    kind,
                    op,
                    ty,
                    operand,
                    compare,
                    result,
                    dest,
                    rma,
                    data: 4,
                    context,
                    flags,
                    no_completion,
                };
                (Kind::Read, side.node.posting().post_atomic(now, ep, req))
            }
        };
        if posted.is_ok() {
            let quiet = no_completion && kind != Kind::Read;
            let wanted = !quiet && (n == 0 || flags.contains(OpFlags::COMPLETION));
            let wanted = wanted && (how % 4 < 2 || !no_completion);
            self.accept(i, kind, wanted, Some(memory));
        }
        self.transmit(i);
    }

    /// Registers the region, or closes it: from then on nobody writes to its memory.
    fn register(&mut self, i: usize) {
        let side = &mut self.sides[i];
        if let Some((mr, memory)) = side.region.take() {
            side.node.responder().mr_close(mr).expect("it is open");
            self.closed.push((memory, self.memory.bytes(memory).to_vec()));
            return;
        }
        let (memory, buf) = self.memory.lend(REGION_LEN, FILL);
        let req = MrReq {
            buf,
            access: MrAccess::REMOTE_READ | MrAccess::REMOTE_WRITE,
            requested_key: Some(REGION_KEY),
            virt_addr: false,
            ep: None,
            sharing: Sharing::Single,
        };
        let mr = side.node.responder().mr_reg(req).expect("the key is free");
        side.region = Some((mr, memory));
    }

    /// Peek, claim and discard.
    fn special(&mut self, i: usize, input: &mut Input<'_>) {
        let n = usize::from(input.byte() % EPS as u8);
        let Some(ep) = self.sides[i].eps[n] else { return };
        let flags = input.pick(&[
            OpFlags::PEEK,
            OpFlags::PEEK | OpFlags::CLAIM,
            OpFlags::PEEK | OpFlags::DISCARD,
            OpFlags::CLAIM,
            OpFlags::CLAIM,
            OpFlags::CLAIM | OpFlags::DISCARD,
            OpFlags::DISCARD,
        ]);
        let kind = Self::kind(input);
        let which = usize::from(input.byte());
        let peek = flags.contains(OpFlags::PEEK);
        // A claim names what was announced, or the context of the peek that claimed it.
        let handles = &self.sides[i].handles;
        let mut context = self.ops.len() as u64;
        if !peek && n == 1 && !handles.is_empty() {
            context = handles[which % handles.len()];
        } else if !peek {
            let claims = self.ops.iter().rposition(|op| op.side == i && op.kind == Kind::Special);
            context = claims.map_or(context, |at| at as u64);
        }
        let (memory, buf) = self.memory.lend(input.pick(&[0, 300, 3000]), FILL);
        let (tag, ignore) = (1, 3);
        let src = FI_ADDR_UNSPEC;
        let req = RecvReq { kind, buf, src, tag, ignore, context, flags };
        let posted = self.sides[i].node.post_recv(self.now, ep, req);
        if peek && posted.is_ok() {
            self.accept(i, Kind::Special, true, Some(memory));
        } else if posted.is_ok() && context < self.ops.len() as u64 {
            // The second operation of this context.
            self.read(i);
            self.ops[context as usize].after = None;
        } else if posted.is_ok() {
            self.sides[i].handles.retain(|&h| h != context);
        }
    }

    fn cancel(&mut self, i: usize, input: &mut Input<'_>) {
        let Some(ep) = self.sides[i].eps[usize::from(input.byte() % EPS as u8)] else { return };
        let context = self.ops.len().saturating_sub(usize::from(input.byte() % 16)) as u64;
        let cancelled = self.sides[i].node.operations().cancel(ep, context);
        assert!(matches!(cancelled, Ok(()) | Err(Error::NoData)), "{cancelled:?}");
    }

    fn read(&mut self, i: usize) {
        for n in 0..EPS {
            let mut out = [Cqe::default(); 8];
            loop {
                let side = &mut self.sides[i];
                match side.node.cq_read(side.cqs[n], &mut out) {
                    Ok(count) => {
                        assert!(count > 0);
                        out[..count].iter().for_each(|cqe| self.outcome(i, cqe, None));
                    }
                    Err(Error::Avail) => {
                        let err = side
                            .node
                            .receiving()
                            .cq_readerr(side.cqs[n])
                            .expect("an error is next");
                        self.outcome(i, &err.cqe, Some(err.err));
                    }
                    Err(err) => {
                        assert_eq!(err, Error::Again);
                        break;
                    }
                }
            }
        }
    }

    fn outcome(&mut self, i: usize, cqe: &Cqe, err: Option<Error>) {
        if cqe.flags.contains(CqFlags::BUFFERED_RECV) {
            self.sides[i].handles.push(cqe.op_context);
            return;
        }
        if cqe.flags.intersects(CqFlags::REMOTE_WRITE | CqFlags::REMOTE_READ) {
            return; // remote CQ data of a peer's operation
        }
        if cqe.op_context >> 32 != 0 {
            return; // a claim of an announced message, which has many operations of one context
        }
        let op = &mut self.ops[cqe.op_context as usize];
        assert_eq!(op.side, i);
        match op.kind {
            Kind::Special => {}
            Kind::Multi => {
                assert!(!op.ended, "a multi-receive that was released wrote {cqe:?} {err:?}");
                op.ended = cqe.flags.contains(CqFlags::MULTI_RECV);
            }
            Kind::Send | Kind::Recv | Kind::Read => {
                assert!(!op.ended, "a second outcome: {cqe:?} {err:?}");
                assert!(op.wanted || err.is_some(), "an outcome nobody wanted: {cqe:?}");
                op.ended = true;
            }
        }
        let Some(id) = op.memory.filter(|_| op.ended && op.kind != Kind::Send) else { return };
        let bytes = self.memory.bytes(id);
        if op.kind == Kind::Recv && err.is_none() {
            let behind = bytes[cqe.len as usize..].iter().position(|&b| b != FILL);
            assert_eq!(behind, None, "written behind a message: {cqe:?} of {} bytes", bytes.len());
        }
        op.after = Some(bytes.to_vec());
    }

    fn open_or_close(&mut self, i: usize, input: &mut Input<'_>) {
        let n = usize::from(input.byte() % EPS as u8);
        match self.sides[i].eps[n].take() {
            Some(ep) => self.close(i, n, ep),
            None => self.sides[i].open(n),
        }
    }

    /// Closes an endpoint: all that was posted to it has ended by then.
    fn close(&mut self, i: usize, n: usize, ep: EpId) {
        let side = &mut self.sides[i];
        side.node.ep_close(self.now, ep).expect("it is open");
        let closed = side.node.ep_close(self.now, ep);
        assert_eq!(closed, Err(Error::BadFd));
        if n == 1 {
            side.handles.clear();
        }
        self.read(i);
        if n == 1 {
            self.sides[i].handles.clear();
        }
    }

    /// An address is removed and comes back, perhaps with another incarnation.
    fn restart_address(&mut self, i: usize, input: &mut Input<'_>) {
        let side = &mut self.sides[i];
        let addr = side.node.objects().av_lookup(side.av, side.dests[0]).expect("it was inserted");
        side.node.objects().av_remove(side.av, side.dests[0]).expect("it was inserted");
        let incarnation = input.pick(&[0, 102 - i as u64, 103]);
        if let Ok(to) =
            side.node.sessions().av_insert(self.now, side.av, EpAddr { incarnation, ..addr })
        {
            side.dests[0] = to;
        }
    }

    fn forge(&mut self, i: usize, input: &mut Input<'_>) {
        let station = usize::from(input.byte() % 16).saturating_sub(16 - STATIONS);
        let from =
            if station == 0 { station_of(1 - i) } else { station_of(STRANGER + station - 1) };
        let side = &mut self.sides[i];
        let bytes = side.overheard[station].forge(input, station_of(i), from);
        side.node.on_frame(self.now, &RxFrame::new(&bytes));
        self.transmit(i);
    }

    fn check_counters(&mut self) {
        for side in &mut self.sides {
            let counted = values(&side.node.counters());
            let fell = side.counted.iter().zip(&counted).any(|(before, after)| before > after);
            assert!(!fell, "a counter fell: {:?} to {counted:?}", side.counted);
            side.counted = counted;
        }
    }

    /// Everything ends: by silence of the wire first, if `silence`, then by closing.
    fn end(&mut self, silence: bool) {
        if silence {
            self.fall_silent();
        }
        for i in 0..2 {
            for n in 0..EPS {
                if let Some(ep) = self.sides[i].eps[n].take() {
                    self.close(i, n, ep);
                }
            }
            self.read(i);
            if self.sides[i].region.is_some() {
                self.register(i);
            }
            self.idle(i);
            let node = &mut self.sides[i].node;
            let known: Vec<_> =
                node.statistics().session_infos().map(|session| session.station).collect();
            for station in known {
                node.sessions().drop_session(self.now, station);
            }

            let levels = node.statistics().levels();
            assert_eq!(levels, Levels { peers: levels.peers, ..Levels::default() }, "side {i}");
        }
        self.check_counters();
        self.check_outcomes();
    }

    /// Who is not heard is dead after a while, and no send waits for it.
    fn fall_silent(&mut self) {
        for side in &mut self.sides {
            side.inbox.clear();
            side.full = 0;
        }
        for _ in 0..400 {
            self.pass(T_DEAD_NS / 100);
            self.sides.iter_mut().for_each(|side| side.inbox.clear());
            // What waits in a queue may hold up others.
            self.read(0);
            self.read(1);
        }
        for (id, op) in self.ops.iter().enumerate() {
            let waits = matches!(op.kind, Kind::Send | Kind::Read) && op.wanted && !op.ended;
            assert!(!waits, "send {id} waits for a dead peer");
        }
    }

    /// With nothing arriving, a node soon wants to be called at a later time or not at all.
    fn idle(&mut self, i: usize) {
        self.sides[i].full = 0;
        for _ in 0..1000 {
            self.transmit(i);
            if self.sides[i].node.next_deadline().is_none_or(|at| at > self.now) {
                return;
            }
        }
        panic!("side {i} spins: {:?}", self.sides[i].node.statistics().levels());
    }

    fn check_outcomes(&self) {
        self.memory.check();
        for (memory, then) in &self.closed {
            assert!(self.memory.bytes(*memory) == then, "a closed region was written");
        }
        for (id, op) in self.ops.iter().enumerate() {
            let must = op.wanted && op.kind != Kind::Special || op.kind == Kind::Multi;
            assert!(op.ended || !must, "operation {id} has no outcome");
            let Some(memory) = op.memory else { continue };
            let bytes = self.memory.bytes(memory);
            if op.kind == Kind::Send {
                assert!(bytes.iter().all(|&b| b == SENT), "the source of send {id} was written");
            } else if let Some(after) = &op.after {
                assert!(bytes == after, "operation {id} wrote after it had ended");
            }
        }
    }
}

/// Everything that is counted.
fn values(c: &NodeCounters) -> Vec<u64> {
    let mut all = c.rx_wire.to_vec();
    all.extend([c.rx_frames, c.rx_not_ours, c.rx_no_crc, c.rx_no_session, c.rx_bad_ack]);
    all.extend([c.rx_duplicate, c.rx_out_of_window, c.rx_no_buffer, c.rx_refused]);
    all.extend([c.rx_no_endpoint, c.rx_stray, c.rx_bad_rst, c.rx_bad_open, c.tx_frames]);
    all.extend([c.tx_retransmits, c.tx_acks, c.tx_probes, c.tx_replies_limited, c.msgs_sent]);
    all.extend([c.msgs_received, c.msgs_unexpected, c.sessions_opened, c.sessions_dead]);
    all.extend([c.sessions_reset, c.timeouts, c.rma_done, c.rma_executed]);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: there is a seed that takes every entry. Method: what was taken by each, in a program
    /// that sends and receives short messages by turns on a port that loses nothing.
    #[test]
    fn a_seed_takes_the_quickest_entries() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/session/at-hand");
        let world = run(&std::fs::read(path).expect("at-hand")).expect("it is not empty");
        let taken = (world.sent_at_hand, world.posted_at_hand, world.read_alone);
        assert!(taken.0 > 0 && taken.1 > 0 && taken.2 > 0, "{taken:?}");
    }

    /// Goal: the seeds that forge requests still do, after a change of the language.
    /// Method: what their target executed and refused.
    #[test]
    fn seeds_forge_what_they_say() {
        let seeds = [
            ("forged", 3, 3),
            ("like-no-request", 1, 5),
            ("like-an-atomic", 10, 13),
            ("like-an-atomic-of-another-length", 8, 9),
            ("like-a-write", 11, 12),
            ("like-a-read", 14, 8),
        ];
        for (name, executed, refused) in seeds {
            let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/session");
            let program = std::fs::read(format!("{dir}/{name}")).expect(name);
            let world = run(&program).expect("it is not empty");
            let counters = world.sides[1].node.counters();
            assert_eq!((counters.rma_executed, counters.rx_refused), (executed, refused), "{name}");
        }
    }
}
