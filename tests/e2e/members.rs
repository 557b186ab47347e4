//! Processes that send all to all: messages received from anybody, and one-sided and atomic
//! operations on each other's memory. And a switch for them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use barewire::flags::{Access, Caps};
use barewire::*;
use barewire_driver::open::{SwitchAccess, open_switch};
use barewire_tests::rng::Rng;

use crate::supervisor::Worker;
use crate::worker::{Node, nap, open_with, orders, pattern, say, settings};

const KEY: u64 = 7;
/// A member's memory: a word that all count in, then a place of each member's.
const PLACES_AT: usize = 64;
const PLACE_LEN: usize = 200_000;
const MEMBERS_MAX: usize = 8;

/// To each peer.
const MESSAGES: u64 = 60;
const LONGEST: usize = 300_000;
/// Writes and reads of a place of a peer's, and additions to its word.
const CHANGES: u64 = 30;
const SUM: TypedOp = TypedOp::new(AtomicOp::Sum, Datatype::Uint64);

/// Receives, from anybody.
const POSTED: u64 = 8;
/// What a context is of, above its number.
const SEND: u64 = 1 << 48;
const RECEIVE: u64 = 2 << 48;
const CHANGE: u64 = 3 << 48;
const KIND: u64 = 0xffff << 48;

/// What a member does with a place of a peer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Write,
    Read,
    Add,
}

struct Peer {
    addr: FiAddr,
    sent: u64,
    underway: u64,
    changes: u64,
    step: Option<Step>,
    place: Vec<u8>,
    rng: Rng,
}

/// One process.
struct Member {
    node: Node,
    mr: Mr,
    me: usize,
    peers: Vec<Option<Peer>>,
    posted: u64,
    /// By the number of the receive that matched: who sent it, and which it was.
    received: BTreeMap<u64, (usize, u64)>,
}

/// Hears `PEERS me addr ...`, tells `DONE`, hears `TELL`, tells what the supervisor looks at, and
/// goes when it hears `END`.
pub(crate) fn run() {
    let orders = orders();
    let caps = Caps::TAGGED | Caps::SOURCE | Caps::RMA | Caps::ATOMIC;
    let patient = Settings { t_dead: Duration::from_secs(10), ..settings() };
    let node = open_with(&std::env::var("BAREWIRE_E2E_PORT").unwrap(), patient, caps);
    let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let attr = MrAttr { access, requested_key: Some(KEY), ..MrAttr::default() };
    let memory = Buf::zeroed(PLACES_AT + MEMBERS_MAX * PLACE_LEN);
    let mr = node.domain.mr_reg(memory, &attr).unwrap();
    say(&format!("ADDR {}", node.ep.getname().unwrap()));
    let order = orders.recv().unwrap();
    let mut words = order.strip_prefix("PEERS ").expect("an order").split_whitespace();
    let me: usize = words.next().unwrap().parse().unwrap();
    let peer = |(i, addr): (usize, &str)| {
        (i != me).then(|| Peer {
            addr: node.knows(addr),
            sent: 0,
            underway: 0,
            changes: 0,
            step: None,
            place: vec![0; PLACE_LEN],
            rng: Rng::new(me as u64, i as u64),
        })
    };
    let peers = words.enumerate().map(peer).collect();
    let mut member = Member { node, mr, me, peers, posted: 0, received: BTreeMap::new() };
    member.post_receives();
    while !member.is_done() {
        member.go_on();
        member.poll();
    }
    member.check_order();
    say("DONE");
    loop {
        match orders.try_recv() {
            Ok(order) if order == "TELL" => member.tell(),
            Ok(_) | Err(std::sync::mpsc::TryRecvError::Disconnected) => return,
            Err(_) => member.poll(),
        }
    }
}

impl Member {
    fn others(&self) -> u64 {
        self.peers.len() as u64 - 1
    }

    fn is_done(&self) -> bool {
        let idle =
            |p: &Peer| (p.sent, p.underway, p.changes, p.step) == (MESSAGES, 0, CHANGES, None);
        let all = self.received.len() as u64 == MESSAGES * self.others();
        all && self.peers.iter().flatten().all(idle)
    }

    /// As many as messages are to come, but not all at once.
    fn post_receives(&mut self) {
        let all = MESSAGES * self.others();
        while self.posted < all && self.posted < self.received.len() as u64 + POSTED {
            let context = RECEIVE | self.posted;
            self.node.ep.trecv(Buf::zeroed(LONGEST), FI_ADDR_UNSPEC, 0, u64::MAX, context).unwrap();
            self.posted += 1;
        }
    }

    /// Begins what may begin.
    fn go_on(&mut self) {
        let Self { node, peers, me, .. } = self;
        for (i, peer) in peers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            if peer.sent < MESSAGES && peer.underway < 6 {
                let most = peer.rng.pick(&[100, 100, 2_000, 20_000, 70_000, LONGEST]);
                let len = peer.rng.index(most + 1);
                let tag = (*me as u64) << 40 | peer.sent << 24 | len as u64;
                let sent =
                    node.ep.tsend(Buf::from(pattern(len, tag)), peer.addr, tag, SEND | i as u64);
                match sent {
                    Ok(()) => (peer.sent, peer.underway) = (peer.sent + 1, peer.underway + 1),
                    Err(refused) => assert_eq!(refused.error, Error::Again),
                }
            }
            if peer.step.is_none() && peer.changes < CHANGES {
                change(node, *me, i, peer);
            }
        }
    }

    fn poll(&mut self) {
        let mut one = [Completion::default()];
        match self.node.cq.read(&mut one) {
            Ok(_) => self.ended(&mut one[0]),
            Err(Error::Again) => nap(),
            Err(_) => panic!("{}", self.node.cq.readerr().unwrap()),
        }
    }

    fn ended(&mut self, c: &mut Completion) {
        let number = c.op_context & !KIND;
        match c.op_context & KIND {
            SEND => self.peer(number).underway -= 1,
            RECEIVE => {
                let (from, serial) = ((c.tag >> 40) as usize, c.tag >> 24 & 0xffff);
                assert_eq!((c.len as u64, c.src), (c.tag & 0xff_ffff, self.peer(from as u64).addr));
                assert!(
                    c.bytes() == &pattern(c.len, c.tag)[..],
                    "{} bytes of {from} changed",
                    c.len
                );
                assert!(self.received.insert(number, (from, serial)).is_none(), "told twice");
                self.post_receives();
            }
            _ => {
                let bytes = std::mem::take(&mut c.bufs).into_one();
                let peer = self.peer(number);
                if let Some(Step::Read) = peer.step.take() {
                    let bytes = bytes.unwrap();
                    assert!(bytes[..] == peer.place[..bytes.len()], "{} bytes read", bytes.len());
                    peer.step = None;
                }
                peer.changes += 1;
            }
        }
    }

    fn peer(&mut self, i: u64) -> &mut Peer {
        self.peers[i as usize].as_mut().expect("a peer")
    }

    /// Messages of one sender were matched in the order in which they were sent.
    fn check_order(&self) {
        let mut next = vec![0; self.peers.len()];
        for &(from, serial) in self.received.values() {
            assert_eq!(serial, next[from], "from {from}");
            next[from] += 1;
        }
    }

    /// Of every peer: its number, the frame length of the session, packets repeated; then the word,
    /// and frames sent near and far.
    fn tell(&mut self) {
        let (station, until) =
            (self.node.domain.port().station, Instant::now() + Duration::from_millis(50));
        while Instant::now() < until {
            self.poll();
        }
        let seen = stats::read_all().unwrap().into_iter().find(|s| s.station == station && s.alive);
        let seen = seen.expect("a domain publishes its statistics as long as it is open");
        let not_near = seen.node.iter().find(|(name, _)| *name == "rx_not_near").unwrap().1;
        let sessions: Vec<String> = seen
            .sessions
            .iter()
            .map(|s| format!("{} {} {}", s.station, s.frame_max, s.retransmits))
            .collect();
        let mut word = [0; 8];
        self.mr.load(0, &mut word).unwrap();
        let all = self.node.domain.port_counters().unwrap();
        let near = self.node.domain.near_counters().unwrap().unwrap_or_default();
        let (near, far) = (near.tx_frames, all.tx_frames - near.tx_frames);
        say(&format!(
            "TOLD {} {near} {far} {not_near} {}",
            u64::from_le_bytes(word),
            sessions.join(" ")
        ));
    }
}

/// Writes to our place of a peer's memory, reads it, adds one to its word, by turns.
fn change(node: &Node, me: usize, i: usize, peer: &mut Peer) {
    let at = |addr: usize| Remote { dest: peer.addr, addr: addr as u64, key: KEY };
    let place = at(PLACES_AT + me * PLACE_LEN);
    let most = peer.rng.pick(&[8, 200, 5_000, PLACE_LEN]);
    let (len, context) = (1 + peer.rng.index(most), CHANGE | i as u64);
    let step = [Step::Write, Step::Read, Step::Add][(peer.changes % 3) as usize];
    let posted = match step {
        Step::Write => {
            let bytes = pattern(len, peer.changes);
            peer.place[..len].copy_from_slice(&bytes);
            node.ep.write(Buf::from(bytes), place, context)
        }
        Step::Read => node.ep.read(Buf::zeroed(len), place, context),
        Step::Add => {
            node.ep.fetch_atomic(SUM, &1_u64.to_le_bytes(), Buf::zeroed(8), at(0), context)
        }
    };
    match posted {
        Ok(()) => peer.step = Some(step),
        Err(refused) => assert_eq!(refused.error, Error::Again),
    }
}

/// Longest that members take.
const ALL_TO_ALL: Duration = Duration::from_secs(120);

/// What a member told.
#[derive(Debug)]
pub(crate) struct Told {
    /// Sessions by the peer's MAC: length of frames, packets repeated.
    pub(crate) sessions: BTreeMap<String, (u64, u64)>,
    pub(crate) near_frames: u64,
    pub(crate) far_frames: u64,
}

/// So many members, of which `begin` starts each, send all to all, while the caller does something
/// again and again; the address and what is told of each.
pub(crate) fn all_to_all(
    count: usize,
    begin: impl Fn(usize) -> Worker,
    mut meanwhile: impl FnMut(),
) -> Vec<(String, Told)> {
    let mut members: Vec<Worker> = (0..count).map(begin).collect();
    let addrs: Vec<String> = members.iter().map(|member| member.addr.clone()).collect();
    for (i, member) in members.iter_mut().enumerate() {
        member.say(&format!("PEERS {i} {}", addrs.join(" ")));
    }
    let mut at_work: Vec<&mut Worker> = members.iter_mut().collect();
    let start = Instant::now();
    while !at_work.is_empty() {
        meanwhile();
        at_work.retain_mut(|member| !member.try_answer("DONE"));
        assert!(start.elapsed() < ALL_TO_ALL, "{} of {count} hang", at_work.len());
        std::thread::sleep(Duration::from_millis(1));
    }
    let told = members.iter_mut().map(|member| {
        member.say("TELL");
        let answer = member.answer("TOLD");
        let words: Vec<&str> = answer.split_whitespace().collect();
        let number = |i: usize| words[i].parse::<u64>().unwrap();
        // Each of the others added one by every third change.
        assert_eq!(number(0), (addrs.len() as u64 - 1) * CHANGES / 3, "{answer}");
        assert_eq!(number(3), 0, "frames of near sessions came by the wire: {answer}");
        let session = |i: usize| (words[i].to_owned(), (number(i + 1), number(i + 2)));
        let sessions = (4..words.len()).step_by(3).map(session).collect();
        Told { sessions, near_frames: number(1), far_frames: number(2) }
    });
    let told: Vec<Told> = told.collect();
    members.iter_mut().for_each(|member| member.say("END"));
    members.into_iter().for_each(Worker::finish);
    // barewire://MAC/EP#INCARNATION
    let station = |addr: &String| addr["barewire://".len()..].split('/').next().unwrap().to_owned();
    addrs.iter().map(station).zip(told).collect()
}

/// A switch, until somebody ends it.
pub(crate) fn run_switch() {
    let orders = orders();
    let port = std::env::var("BAREWIRE_E2E_PORT").unwrap();
    let mut switch = open_switch(&port, &SwitchAccess::default()).unwrap();
    say("ADDR switch");
    let mut idle = 0;
    loop {
        idle = if switch.turn().unwrap() > 0 { 0 } else { idle + 1 };
        if idle < 100 {
            continue;
        }
        switch.sleep(Duration::from_millis(10));
        match orders.try_recv() {
            Ok(order) if order == "TELL" => {
                let counters = switch.counters();
                say(&format!("TOLD {} {}", counters.spoofed + counters.malformed, counters.to_nic));
            }
            Ok(_) | Err(std::sync::mpsc::TryRecvError::Disconnected) => return,
            Err(_) => {}
        }
    }
}
