//! A cable that is pulled while messages go over it: the port says so, and what was on its way
//! arrives when the cable is back.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use barewire::*;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::machine::{Monitor, nic};
use crate::supervisor::PATIENCE;
use crate::worker::{Node, open, pattern, settings};

const LEN: usize = 64;

/// What a port says of its link.
#[derive(Clone, Default)]
struct Said(Arc<Mutex<Vec<(Level, String)>>>);

impl Said {
    fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

impl Subscriber for Said {
    fn enabled(&self, of: &Metadata<'_>) -> bool {
        of.target().starts_with("barewire_driver")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
                self.0.push_str(&format!("{}={value:?} ", field.name()));
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        if text.0.contains("carrie") {
            self.0.lock().unwrap().push((*event.metadata().level(), text.0));
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Two nodes that play a message to and fro, in one thread.
struct Game {
    nodes: [Node; 2],
    peers: [FiAddr; 2],
    /// Messages that arrived.
    moves: u64,
    polls: u64,
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
        let game = Self { nodes, peers, moves: 0, polls: 0 };
        game.send(0);
        game
    }

    fn send(&self, from: usize) {
        let bytes = Buf::from(pattern(LEN, self.moves));
        self.nodes[from].ep.tsend(bytes, self.peers[from], 7, 2).unwrap();
    }

    fn poll(&mut self) {
        self.polls += 1;
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

    /// Polls until something is so; says how many polls it took.
    fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) -> u64 {
        let (start, polls) = (Instant::now(), self.polls);
        while !is_so(self) {
            assert!(start.elapsed() < PATIENCE, "no {what} in {} polls", self.polls - polls);
            self.poll();
        }
        self.polls - polls
    }
}

/// Goal: a cable that is pulled is told once, no message passes, and when it is back, which is told
/// once as well, the message that was on its way arrives and all others after it. Method: the host
/// takes the link of the first NIC away in the middle of a game.
#[test]
fn a_cable_is_pulled_and_put_back() {
    let (Some(a), Some(b), Some(mut host)) = (nic(0), nic(1), Monitor::open()) else { return };
    let said = Said::default();
    tracing::subscriber::with_default(said.clone(), || {
        let mut game = Game::new([format!("vfio:{a}"), format!("vfio:{b}")]);
        for round in 0..2 {
            game.until("game", |game| game.moves >= 40 * (round + 1));
            assert_eq!(said.count() as u64, 2 * round, "{:?}", said.0.lock().unwrap());
            let pulled = host.pull();
            let out = game.until("word of the cable", |_| said.count() as u64 > 2 * round);
            let moves = game.moves;
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(200) {
                game.poll();
            }
            assert_eq!(game.moves, moves, "messages pass without a cable");
            drop(pulled);
            let back = game.until("word that it is back", |_| said.count() as u64 > 2 * round + 1);
            game.until("game", |game| game.moves >= moves + 20);
            println!("told after {out} polls, and after {back} that it is back; {moves} messages");
        }
    });
    let said = said.0.lock().unwrap();
    let levels: Vec<Level> = said.iter().map(|line| line.0).collect();
    assert_eq!(levels, [Level::WARN, Level::INFO, Level::WARN, Level::INFO], "{said:?}");
    for (n, (_, line)) in said.iter().enumerate() {
        let words = ["has no carrier, frames are lost", "carries frames again"][n % 2];
        assert!(line.contains(words) && line.contains(&a), "{line}");
    }
}
