//! One of the processes: works on random peers over a wire and over memory, rests at random, and
//! writes what became of everything to its ledger.
//!
//! It hears `BEGIN life seed ledger`, `PEER place life address address`, `QUIET`, `LAST`, `STOP`,
//! and answers `ADDR`, `DRAINED`, `TOLD`, `LEVELS`. Its ports are those of `BAREWIRE_E2E_PORT`, the
//! wire first.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use barewire::flags::{Access, Caps, OpFlags};
use barewire::*;
use barewire_dataplane::poll::Engine;
use barewire_tests::rng::Rng;

use super::{PLACES, T_DEAD};
use crate::worker::{Node, open_with, orders, pattern, say};

/// Key of the memory that peers work on.
const KEY: u64 = 7;

/// A word for every life, to be added to, and behind them blocks that lives share by turns.
const WORDS: u64 = 4096;
const BLOCKS: u64 = 64;
const BLOCK_LEN: u64 = 4096;

/// Contexts of receives. Others count from 1: an injected message that is lost has 0.
const RECEIVE: u64 = 1 << 40;

const RECEIVES: u64 = 16;
const LONGEST: u64 = 300_000;

/// Operations of a port under way.
const WINDOW: usize = 24;

/// What stands before a message's pattern: sender, number, receiver, length.
const HEAD_LEN: usize = 32;

/// Shortest pause between polls that the ledger has.
const GAP_NS: u64 = 5_000_000;

/// How often a thread looks whether it gets the processor, and the shortest delay that the ledger
/// has.
const LOOK: Duration = Duration::from_millis(10);
const DELAY_NS: u64 = 10_000_000;

/// What is posted. The letter is its name in the ledger.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Send,
    /// To be delivered, not only taken.
    Deliver,
    Inject,
    Write,
    Read,
    Add,
}

impl Kind {
    fn letter(self) -> char {
        match self {
            Self::Send => 's',
            Self::Deliver => 'd',
            Self::Inject => 'i',
            Self::Write => 'w',
            Self::Read => 'r',
            Self::Add => 'a',
        }
    }
}

/// An operation that has not ended.
struct Op {
    kind: Kind,
    place: usize,
    life: u64,
    posted_ns: u64,
    /// Number of a message, stamp of a block.
    seq: u64,
    len: u64,
}

/// A life of a peer.
struct Peer {
    life: u64,
    addr: FiAddr,
    /// The next message's number.
    seq: u64,
    /// Stamp and length of the block that was written last and not read back yet.
    block: Option<(u64, u64)>,
    block_busy: bool,
}

struct Side {
    node: Node,
    _region: Mr,
    peers: [Option<Peer>; PLACES],
    ops: HashMap<u64, Op>,
    next: u64,
    next_receive: u64,
}

struct Process {
    life: u64,
    rng: Rng,
    sides: Vec<Side>,
    ledger: File,
    delays: Receiver<[u64; 2]>,
    /// Lines that are not in the file yet.
    lines: String,
    polled_ns: u64,
    quiet: bool,
}

pub(crate) fn now_ns() -> u64 {
    Engine::now().0
}

pub(crate) fn run() {
    // Who fails ends at once: others are not to see its endpoints close.
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |why| {
        print(why);
        std::process::exit(1);
    }));
    let ports = std::env::var("BAREWIRE_E2E_PORT").unwrap();
    let orders = orders();
    let sides: Vec<Side> = ports.split(' ').map(Side::open).collect();
    let addrs: Vec<String> =
        sides.iter().map(|side| side.node.ep.getname().unwrap().to_string()).collect();
    say(&format!("ADDR {}", addrs.join(" ")));
    let order = orders.recv().unwrap();
    let words: Vec<&str> = order.split(' ').collect();
    let ["BEGIN", life, seed, ledger] = words[..] else { panic!("{order}") };
    let mut process = Process {
        life: life.parse().unwrap(),
        rng: Rng::new(seed.parse().unwrap(), 1),
        sides,
        ledger: File::options().append(true).create(true).open(ledger).unwrap(),
        delays: watch_the_machine(),
        lines: String::new(),
        polled_ns: now_ns(),
        quiet: false,
    };
    for side in 0..process.sides.len() {
        for _ in 0..RECEIVES {
            process.sides[side].post_receive(Buf::zeroed(LONGEST as usize));
        }
    }
    process.obey(&orders);
}

/// Times in which a thread that had slept enough was not woken: the machine did something else, or
/// the process was stopped.
fn watch_the_machine() -> Receiver<[u64; 2]> {
    let (found, delays) = channel();
    std::thread::spawn(move || {
        loop {
            let due_ns = now_ns() + LOOK.as_nanos() as u64;
            std::thread::sleep(LOOK);
            let woken_ns = now_ns();
            if woken_ns > due_ns + DELAY_NS && found.send([due_ns, woken_ns]).is_err() {
                return;
            }
        }
    });
    delays
}

impl Side {
    fn open(port: &str) -> Self {
        // Each port is one way.
        let near = false;
        let unexpected_bytes = Some(16 << 20);
        let settings = Settings { t_dead: T_DEAD, unexpected_bytes, near, ..Settings::default() };
        let caps = Caps::TAGGED | Caps::RMA | Caps::ATOMIC;
        let node = open_with(port, settings, caps);
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        let attr = MrAttr { access, requested_key: Some(KEY), ..MrAttr::default() };
        let len = 8 * WORDS + BLOCKS * BLOCK_LEN;
        let region = node.domain.mr_reg(Buf::zeroed(len as usize), &attr).unwrap();
        Self {
            node,
            _region: region,
            peers: [const { None }; PLACES],
            ops: HashMap::new(),
            next: 1,
            next_receive: 0,
        }
    }

    fn post_receive(&mut self, buf: Buf) {
        let context = RECEIVE | self.next_receive;
        self.node.ep.trecv(buf, FI_ADDR_UNSPEC, 0, u64::MAX, context).unwrap();
        self.next_receive += 1;
    }
}

/// A message: who sends it to whom as which one, and bytes that follow from that.
fn message(from: u64, seq: u64, to: u64, len: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len as usize);
    for word in [from, seq, to, len] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(pattern(len as usize - HEAD_LEN, stamp_of(from, seq)));
    bytes
}

fn stamp_of(life: u64, seq: u64) -> u64 {
    life << 40 | seq
}

fn block(life: u64, stamp: u64, len: u64) -> Vec<u8> {
    pattern(len as usize, stamp_of(life, stamp))
}

impl Process {
    fn obey(&mut self, orders: &Receiver<String>) {
        let mut drained = false;
        loop {
            let order = match orders.try_recv() {
                // The supervisor is gone.
                Err(TryRecvError::Disconnected) => return,
                other => other.ok(),
            };
            match order.as_deref() {
                None => {}
                Some("QUIET") => self.quiet = true,
                Some("LAST") => self.tell_last(),
                Some("STOP") => return self.stop(),
                Some(order) => self.meet(order),
            }
            if !self.quiet {
                self.work();
            }
            self.poll();
            if self.quiet && !drained && self.sides.iter().all(|side| side.ops.is_empty()) {
                drained = true;
                self.write_down();
                say("DRAINED");
            }
            std::thread::sleep(Duration::from_millis(1));
            if !self.quiet {
                self.rest();
            }
        }
    }

    fn meet(&mut self, order: &str) {
        let words: Vec<&str> = order.split(' ').collect();
        let ["PEER", place, life, addrs @ ..] = &words[..] else { panic!("{order}") };
        let (place, life): (usize, u64) = (place.parse().unwrap(), life.parse().unwrap());
        for (side, addr) in self.sides.iter_mut().zip(addrs) {
            let addr = side.node.knows(addr);
            let peer = Peer { life, addr, seq: 0, block: None, block_busy: false };
            side.peers[place] = Some(peer);
        }
    }

    /// Now and then computes for up to a second, and rarely for up to 3 T_dead.
    fn rest(&mut self) {
        if !self.rng.chance(0.002) {
            return;
        }
        let most = if self.rng.chance(0.1) { 3 * T_DEAD.as_millis() as u64 } else { 1000 };
        let time = Duration::from_millis(self.rng.below(most));
        // Who is killed in it writes no more.
        self.note(format_args!("S {}", now_ns()));
        self.write_down();
        std::thread::sleep(time);
    }

    fn work(&mut self) {
        for side in 0..self.sides.len() {
            let count = match self.rng.unit() {
                p if p < 0.002 => WINDOW,
                p if p < 0.06 => 1,
                _ => 0,
            };
            for _ in 0..count {
                if self.sides[side].ops.len() < WINDOW {
                    self.post(side);
                }
            }
        }
    }

    fn post(&mut self, at: usize) {
        let place = self.rng.index(PLACES);
        let side = &self.sides[at];
        let Some(peer) = &side.peers[place] else { return };
        let kind = match self.rng.below(100) {
            0..30 => Kind::Send,
            30..50 => Kind::Deliver,
            50..65 => Kind::Inject,
            65..80 => Kind::Add,
            _ if peer.block_busy => return,
            _ if peer.block.is_some() => Kind::Read,
            _ => Kind::Write,
        };
        let len = match (kind, self.rng.below(10)) {
            (Kind::Inject, _) => self.rng.range(HEAD_LEN as u64, 64),
            (Kind::Read, _) => peer.block.map_or(0, |(_, len)| len),
            (Kind::Write, _) => self.rng.range(8, BLOCK_LEN),
            (Kind::Add, _) => 8,
            (_, 0..6) => self.rng.range(HEAD_LEN as u64, 300),
            (_, 6..8) => self.rng.range(HEAD_LEN as u64, 20_000),
            (_, 8) => self.rng.range(HEAD_LEN as u64, 100_000),
            _ => self.rng.range(HEAD_LEN as u64, LONGEST),
        };
        self.post_as(at, place, kind, len);
    }

    /// Posts one operation; returns whether it was taken.
    fn post_as(&mut self, at: usize, place: usize, kind: Kind, len: u64) -> bool {
        let (own, side) = (self.life, &mut self.sides[at]);
        let Some(peer) = &mut side.peers[place] else { return false };
        let (life, posted_ns, context) = (peer.life, now_ns(), side.next);
        let words = 8 * own;
        let blocks = 8 * WORDS + own % BLOCKS * BLOCK_LEN;
        let to = |addr| Remote { dest: peer.addr, addr, key: KEY };
        let ep = &side.node.ep;
        let refused = |posted: PostResult| posted.map_err(|refused| refused.error);
        let seq = match (kind, peer.block) {
            (Kind::Read, Some((stamp, _))) => stamp,
            (Kind::Write, _) => context,
            _ => peer.seq,
        };
        let posted = match kind {
            Kind::Send | Kind::Deliver => {
                let bufs = Bufs::One(message(own, seq, life, len).into());
                let mut flags = OpFlags::empty();
                flags.set(OpFlags::DELIVERY_COMPLETE, kind == Kind::Deliver);
                let addr = peer.addr;
                let msg = TaggedMsg { bufs, addr, tag: own, ignore: 0, context, data: 0 };
                refused(ep.tsendmsg(msg, flags))
            }
            Kind::Inject => ep.tinject(&message(own, seq, life, len), peer.addr, own),
            Kind::Write => refused(ep.write(Buf::from(block(own, seq, len)), to(blocks), context)),
            Kind::Read => refused(ep.read(Buf::zeroed(len as usize), to(blocks), context)),
            Kind::Add => {
                let sum = TypedOp::new(AtomicOp::Sum, Datatype::Uint64);
                let one = 1_u64.to_le_bytes();
                refused(ep.fetch_atomic(sum, &one, Buf::zeroed(8), to(words), context))
            }
        };
        match posted {
            Ok(()) => {}
            Err(Error::Again) => return false,
            Err(Error::ConnReset) => {
                self.note(format_args!("C {at} {life} {posted_ns}"));
                return false;
            }
            Err(e) => panic!("life {own}: posting {} to life {life}: {e}", kind.letter()),
        }
        side.next += 1;
        match kind {
            Kind::Send | Kind::Deliver | Kind::Inject => peer.seq += 1,
            Kind::Write | Kind::Read => peer.block_busy = true,
            Kind::Add => {}
        }
        let op = Op { kind, place, life, posted_ns, seq, len };
        if kind == Kind::Inject {
            self.ended(at, &op, "ok", now_ns(), seq);
        } else {
            side.ops.insert(context, op);
        }
        true
    }

    fn poll(&mut self) {
        for at in 0..self.sides.len() {
            let before = now_ns();
            if at == 0 {
                if before - self.polled_ns > GAP_NS {
                    let since = self.polled_ns;
                    self.note(format_args!("G {since} {before}"));
                }
                self.polled_ns = before;
            }
            loop {
                let mut out: [Completion; 8] = Default::default();
                let cq = &self.sides[at].node.cq;
                match cq.read(&mut out) {
                    Ok(n) => out.into_iter().take(n).for_each(|c| self.completed(at, c)),
                    Err(Error::Again) => break,
                    Err(Error::Avail) => {
                        let e = cq.readerr().unwrap();
                        self.broke(at, e);
                    }
                    Err(e) => panic!("life {}: reading the queue: {e}", self.life),
                }
            }
        }
        self.write_down();
    }

    fn op_of(&mut self, at: usize, context: u64) -> Op {
        let op = self.sides[at].ops.remove(&context);
        op.unwrap_or_else(|| panic!("life {}: {context} ended twice", self.life))
    }

    fn completed(&mut self, at: usize, mut c: Completion) {
        let now = now_ns();
        if c.op_context >= RECEIVE {
            return self.received(at, c, now);
        }
        let op = self.op_of(at, c.op_context);
        let mut value = op.seq;
        match op.kind {
            Kind::Add => {
                let old = c.take_buf().expect("what the result was lent");
                value = u64::from_le_bytes(old[..8].try_into().unwrap());
            }
            Kind::Read => {
                let got = c.take_buf().expect("what was read into");
                let wrote = block(self.life, op.seq, op.len);
                assert!(got[..] == wrote[..], "life {}: a block of {} changed", self.life, op.life);
            }
            _ => {}
        }
        self.free_block(at, &op, op.kind == Kind::Write);
        self.ended(at, &op, "ok", now, value);
    }

    /// What is known of the block of a peer when an operation on it has ended.
    fn free_block(&mut self, at: usize, op: &Op, written: bool) {
        let peer = self.sides[at].peers[op.place].as_mut();
        let Some(peer) = peer.filter(|peer| peer.life == op.life) else { return };
        if matches!(op.kind, Kind::Write | Kind::Read) {
            peer.block_busy = false;
            peer.block = written.then_some((op.seq, op.len));
        }
    }

    fn received(&mut self, at: usize, mut c: Completion, now: u64) {
        let word = |n: usize| u64::from_le_bytes(c.bytes()[8 * n..8 * n + 8].try_into().unwrap());
        assert!(c.len >= HEAD_LEN, "life {}: a message of {} bytes", self.life, c.len);
        let [from, seq, to, len] = [0, 1, 2, 3].map(word);
        assert_eq!((to, len, c.tag), (self.life, c.len as u64, from), "a message of another");
        let whole = c.bytes() == &message(from, seq, to, len)[..];
        assert!(whole, "life {}: message {seq} of {from} changed", self.life);
        self.note(format_args!("R {at} {} {from} {seq} {now}", c.op_context - RECEIVE));
        self.sides[at].post_receive(c.take_buf().unwrap());
    }

    fn broke(&mut self, at: usize, e: CompletionError) {
        let now = now_ns();
        let gone = matches!(e.err, Error::HostUnreach | Error::ConnReset);
        if e.entry.op_context >= RECEIVE {
            // A message that its sender could not finish, or has given up.
            assert!(gone || e.err == Error::Canceled, "life {}: a receive: {e}", self.life);
            self.note(format_args!("X {at} {} {:?} {now}", e.entry.op_context - RECEIVE, e.err));
            return self.sides[at].post_receive(e.entry.bufs.into_one().unwrap());
        }
        if e.entry.op_context == 0 {
            return self.note(format_args!("F {at} {:?} {now}", e.err));
        }
        let op = self.op_of(at, e.entry.op_context);
        assert!(gone, "life {}: {} to {}: {e}", self.life, op.kind.letter(), op.life);
        let outcome = format!("{:?}/{:?}", e.err, e.prov_errno);
        self.free_block(at, &op, false);
        self.ended(at, &op, &outcome, now, op.seq);
    }

    fn ended(&mut self, at: usize, op: &Op, outcome: &str, now: u64, value: u64) {
        let Op { kind, life, posted_ns, len, .. } = op;
        let kind = kind.letter();
        self.note(format_args!("E {at} {kind} {life} {posted_ns} {now} {outcome} {value} {len}"));
    }

    fn note(&mut self, line: std::fmt::Arguments<'_>) {
        std::fmt::Write::write_fmt(&mut self.lines, format_args!("{line}\n")).unwrap();
    }

    fn write_down(&mut self) {
        while let Ok([due_ns, woken_ns]) = self.delays.try_recv() {
            self.note(format_args!("P {due_ns} {woken_ns}"));
        }
        if !self.lines.is_empty() {
            self.ledger.write_all(self.lines.as_bytes()).unwrap();
            self.lines.clear();
        }
    }

    /// One more message to everybody: whoever has lost one is told by that call.
    fn tell_last(&mut self) {
        let start = Instant::now();
        for at in 0..self.sides.len() {
            for place in 0..PLACES {
                let known = self.sides[at].peers[place].is_some();
                while known && !self.post_as(at, place, Kind::Inject, HEAD_LEN as u64) {
                    self.poll();
                    assert!(start.elapsed() < Duration::from_secs(20), "nothing can be posted");
                }
            }
        }
        self.write_down();
        say("TOLD");
    }

    /// Cancels the receives and tells what is still in use.
    fn stop(&mut self) {
        for at in 0..self.sides.len() {
            let side = &self.sides[at];
            let posted = side.next_receive - RECEIVES..side.next_receive;
            for n in posted {
                let _ = side.node.ep.cancel(RECEIVE | n);
            }
        }
        let start = Instant::now();
        let levels = loop {
            for side in &self.sides {
                if side.node.cq.read(&mut [Completion::default()]) == Err(Error::Avail) {
                    side.node.cq.readerr().unwrap();
                }
            }
            let levels = self.sides.iter().map(|side| side.node.domain.levels().unwrap());
            let levels: Vec<Levels> = levels.collect();
            if start.elapsed() > Duration::from_secs(5) || levels.iter().all(|l| in_use(l) == 0) {
                break levels;
            }
            std::thread::sleep(Duration::from_micros(100));
        };
        self.write_down();
        let sum: u64 = levels.iter().map(in_use).sum();
        say(&format!("LEVELS {sum} {levels:?}"));
    }
}

/// Everything of a domain that has to come back.
fn in_use(levels: &Levels) -> u64 {
    let n = &levels.node;
    let counts =
        [n.tx, n.sent, n.posted, n.unexpected, n.blocks, n.pulls, n.reorder_buf, n.cq_reserved];
    counts.iter().map(|n| *n as u64).sum::<u64>() + n.pull_bytes
}
