//! The process that begins.
//!
//! `caller` sends messages to an echo and compares what comes back: it hears `PEER address`,
//! `CALL length` and answers `BACK`, until `END`. `sender` sends to its peer without a pause and
//! tells ten times a second how many messages have arrived there, or with which error one ended and
//! for how many milliseconds since the last arrival nobody let this process run.

use std::io::BufRead;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use barewire::*;

use crate::supervisor::PATIENCE;
use crate::worker::{Node, open, pattern, say, settings};

/// Lines from the supervisor.
fn orders() -> Receiver<String> {
    let (tell, orders) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(|line| line.ok()) {
            if tell.send(line).is_err() {
                return;
            }
        }
    });
    orders
}

fn port() -> String {
    std::env::var("BAREWIRE_E2E_PORT").unwrap()
}

pub(crate) fn run() {
    let orders = orders();
    let patient = Settings { t_dead: Duration::from_secs(10), ..settings() };
    let node = open(&port(), patient);
    say(&format!("ADDR {} mtu {}", node.ep.getname().unwrap(), node.domain.port().mtu));
    let peer = orders.recv().unwrap();
    let peer = node.knows(peer.strip_prefix("PEER ").unwrap());
    loop {
        // The echo's last message has to be acknowledged while we wait for orders.
        node.domain.progress().unwrap();
        match orders.try_recv() {
            Ok(order) if order == "COUNT" => say(&counts(&node)),
            Ok(order) => {
                let Some(len) = order.strip_prefix("CALL ") else { return };
                call(&node, peer, len.parse().unwrap());
                say("BACK");
            }
            Err(TryRecvError::Empty) => std::thread::yield_now(),
            Err(TryRecvError::Disconnected) => return,
        }
    }
}

/// What the port dropped and the node refused.
fn counts(node: &Node) -> String {
    let station = node.domain.port().station;
    // Published a hundred times a second while the loop turns.
    let until = Instant::now() + Duration::from_millis(50);
    while Instant::now() < until {
        node.domain.progress().unwrap();
    }
    // Nodes of another test may have the same addresses.
    let is_ours =
        |s: &stats::Snapshot| s.station == station && s.alive && s.pid == std::process::id();
    let seen = stats::read_all().unwrap().into_iter().find(is_ours);
    let seen = seen.expect("a domain publishes its statistics as long as it is open");
    let refused: u64 = seen.refused.iter().map(|(_cause, count)| count).sum();
    let of = |name: &str| seen.node.iter().find(|(of, _)| *of == name).unwrap().1;
    let frame_max = seen.sessions.iter().map(|session| session.frame_max).max().unwrap_or(0);
    let dropped = node.domain.port_counters().unwrap().rx_dropped;
    format!("COUNTS {dropped} {refused} {} {} {frame_max}", of("rx_marked"), of("rx_echoes"))
}

fn call(node: &Node, peer: FiAddr, len: usize) {
    node.ep.trecv(Buf::zeroed(len), peer, len as u64, 0, 1).unwrap();
    let sent = pattern(len, len as u64);
    node.ep.tsend(Buf::from(sent.clone()), peer, len as u64, 2).unwrap();
    let mut one = [Completion::default()];
    let start = Instant::now();
    let mut back = false;
    let mut gone = false;
    while !(back && gone) {
        match node.cq.read(&mut one) {
            Ok(_) if one[0].op_context == 1 => {
                assert_eq!((one[0].len, one[0].src), (len, peer));
                assert!(one[0].bytes() == sent, "{len} bytes came back changed");
                back = true;
            }
            Ok(_) => gone = true,
            Err(Error::Again) => {}
            Err(_) => panic!("{}", node.cq.readerr().unwrap()),
        }
        assert!(start.elapsed() < PATIENCE, "no completion of {len} bytes");
    }
}

/// One message in flight, sent again when it has arrived; silence of `t_dead` is an error.
pub(crate) fn send_on(t_dead: Duration) {
    let orders = orders();
    let node = open(&port(), Settings { t_dead, ..settings() });
    say(&format!("ADDR {}", node.ep.getname().unwrap()));
    let peer = orders.recv().unwrap();
    let peer = node.knows(peer.strip_prefix("PEER ").unwrap());
    let mut one = [Completion::default()];
    let (mut arrived, mut told) = (0_u64, Instant::now());
    let next = |n: u64| {
        // As the receiver, a worker of mixed traffic, expects them.
        let tag = n << 20 | LEN as u64;
        node.ep.tsend(Buf::from(pattern(LEN, tag)), peer, tag, 0).unwrap();
    };
    next(0);
    let (mut polled, mut starved) = (Instant::now(), Duration::ZERO);
    loop {
        let gap = polled.elapsed();
        polled = Instant::now();
        if gap > Duration::from_millis(1) {
            starved += gap;
        }
        match node.cq.read(&mut one) {
            Ok(_) => {
                arrived += 1;
                starved = Duration::ZERO;
                next(arrived);
            }
            Err(Error::Again) => {}
            Err(e) => {
                let e = node.cq.readerr().map_or(e, |entry| entry.err);
                say(&format!("FAILED {} {}", e.fi_errno(), starved.as_millis()));
                return;
            }
        }
        if told.elapsed() > Duration::from_millis(100) {
            told = Instant::now();
            say(&format!("ARRIVED {arrived}"));
        }
        if orders.try_recv().is_ok() {
            return;
        }
    }
}

/// Bytes of each message of [`send_on`].
const LEN: usize = 1000;
