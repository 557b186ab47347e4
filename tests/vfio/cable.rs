//! A cable that is pulled while messages go over it: the port says so, and what was on its way
//! arrives when the cable is back.

use std::time::{Duration, Instant};

use barewire::*;
use tracing::Level;

use crate::machine::{Monitor, id, nic};
use crate::said::Said;
use crate::supervisor::PATIENCE;
use crate::worker::{Node, open, pattern, settings};

const LEN: usize = 64;

/// Two nodes that play a message to and fro, in one thread.
struct Game {
    nodes: [Node; 2],
    peers: [FiAddr; 2],
    /// Messages that arrived.
    moves: u64,
}

impl Game {
    fn new(ports: [String; 2]) -> Self {
        let mut settings = settings();
        // The cable is out for less, and logs are read by the thread that polls.
        (settings.t_dead, settings.rcvthread) = (Duration::from_secs(60), false);
        let nodes = ports.map(|port| open(&port, settings.clone()));
        let [a, b] = [0, 1].map(|n| nodes[n].ep.getname().unwrap().to_string());
        let peers = [nodes[0].knows(&b), nodes[1].knows(&a)];
        for (node, peer) in nodes.iter().zip(peers) {
            node.ep.trecv(Buf::zeroed(LEN), peer, 7, 0, 1).unwrap();
        }
        let game = Self { nodes, peers, moves: 0 };
        game.send(0);
        game
    }

    fn send(&self, from: usize) {
        let bytes = Buf::from(pattern(LEN, self.moves));
        self.nodes[from].ep.tsend(bytes, self.peers[from], 7, 2).unwrap();
    }

    fn poll(&mut self) {
        let mut one = [Completion::default()];
        for to in [0, 1] {
            match self.nodes[to].cq.read(&mut one) {
                Ok(_) if one[0].op_context == 2 => {}
                Ok(_) => {
                    assert!(one[0].bytes() == pattern(LEN, self.moves), "move {}", self.moves);
                    self.moves += 1;
                    let buf = one[0].take_buf().unwrap();
                    self.nodes[to].ep.trecv(buf, self.peers[to], 7, 0, 1).unwrap();
                    self.send(to);
                }
                Err(Error::Again) => {}
                Err(_) => panic!("{}", self.nodes[to].cq.readerr().unwrap()),
            }
        }
    }

    /// Polls for a while.
    fn polls_for(&mut self, time: Duration) {
        let start = Instant::now();
        while start.elapsed() < time {
            self.poll();
        }
    }

    /// Polls until something is so.
    fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !is_so(self) {
            assert!(start.elapsed() < PATIENCE, "no {what}");
            self.poll();
        }
    }
}

/// How long a port may take to tell of its cable, and the host to pull it: a look at what the guest
/// asks for every 20 ms. An emulated processor, of which others want some too, has more.
fn in_time() -> Duration {
    let is_emulated = std::env::var_os("VM_KVM").is_none();
    Duration::from_millis(100 + if is_emulated { 400 } else { 50 })
}

/// How long a NIC negotiates before it has a link again: half a second of QEMU's models of Intel's.
pub(crate) fn negotiates(nic: &str) -> Duration {
    Duration::from_millis(if id(nic).0 == 0x8086 { 500 } else { 0 })
}

/// Polls until `said` has more than `count` lines, and says how long that took. It must be told in
/// time by the clock, after what the card takes for `own`, but for what passed inside of polls:
/// there the guest stood still, and polls could not be in time.
pub(crate) fn told(said: &Said, count: usize, own: Duration, mut poll: impl FnMut()) -> Duration {
    let start = Instant::now();
    let (mut last, mut stood_still) = (start, Duration::ZERO);
    while said.count() <= count {
        assert!(start.elapsed() < PATIENCE, "nothing is said of the cable");
        poll();
        let now = Instant::now();
        stood_still += (now - last).saturating_sub(Duration::from_millis(10));
        last = now;
    }
    let took = last - start;
    assert!(
        took <= own + in_time() + stood_still,
        "told after {took:?}, stood still {stood_still:?}"
    );
    took
}

/// Goal: a cable that is pulled is told once and in time, no message passes, and when it is back,
/// which is told once and in time as well, the message that was on its way arrives and all others
/// after it. Method: the host takes the link of the first NIC away in the middle of a game.
#[test]
fn a_cable_is_pulled_and_put_back() {
    let (Some(a), Some(b), Some(mut host)) = (nic(0), nic(1), Monitor::open()) else { return };
    let said = Said::with("carrie");
    tracing::subscriber::with_default(said.clone(), || {
        let mut game = Game::new([format!("vfio:{a}"), format!("vfio:{b}")]);
        for round in 0..2 {
            game.until("game", |game| game.moves >= 40 * (round + 1));
            let count = 2 * round as usize;
            assert_eq!(said.count(), count, "{:?}", said.lines());
            let pulled = host.pull();
            let out = told(&said, count, Duration::ZERO, || game.poll());
            // What had passed the cable before is still on its way through the host.
            game.polls_for(Duration::from_millis(50));
            let moves = game.moves;
            game.polls_for(Duration::from_millis(200));
            assert_eq!(game.moves, moves, "messages pass without a cable");
            drop(pulled);
            let back = told(&said, count + 1, negotiates(&a), || game.poll());
            game.until("game", |game| game.moves >= moves + 20);
            println!("told after {out:?}, and after {back:?} that it is back; {moves} messages");
        }
    });
    let said = said.lines();
    let levels: Vec<Level> = said.iter().map(|line| line.0).collect();
    assert_eq!(levels, [Level::WARN, Level::INFO, Level::WARN, Level::INFO], "{said:?}");
    for (n, (_, line)) in said.iter().enumerate() {
        let words = ["has no carrier, frames are lost", "carries frames again"][n % 2];
        assert!(line.contains(words) && line.contains(&a), "{line}");
    }
}
