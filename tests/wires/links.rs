//! Interfaces that go down, come back, change or vanish while a port is open on them.

use std::time::{Duration, Instant};

use barewire::errno::{FI_EHOSTUNREACH, FI_ENETDOWN};
use barewire_tests::nodes::{FABRIC, Nodes, or_skip};

use crate::start;
use crate::supervisor::{PATIENCE, Worker};

const AFPACKET: &str = "afpacket:fab0";
const UDP: &str = "udp:fab0";

/// A sender in node 0 and a receiver in node 1 that talk.
struct Stream {
    nodes: Nodes,
    sender: Worker,
    receiver: Worker,
    arrived: u64,
}

/// What a sender says.
enum Said {
    Arrived(u64),
    /// An errno, and the milliseconds in which the sender did not run.
    Failed(i32, u64),
}

impl Stream {
    fn new(port: &str) -> Option<Self> {
        let nodes = or_skip(Nodes::pair(1500))?;
        let mut receiver = start(&nodes, 1, "traffic", port);
        let mut sender = start(&nodes, 0, "sender", port);
        sender.say(&format!("PEER {}", receiver.addr));
        receiver.say("QUIET");
        receiver.answer("DRAINED");
        let mut stream = Self { nodes, sender, receiver, arrived: 0 };
        stream.flows();
        Some(stream)
    }

    fn ip(&self, node: usize, args: &str) {
        self.nodes.ip(node, args).unwrap();
    }

    fn next(&mut self) -> Said {
        let line = self.sender.next_line("ARRIVED");
        if let Some(count) = line.strip_prefix("ARRIVED ") {
            return Said::Arrived(count.parse().unwrap());
        }
        let failed = line.strip_prefix("FAILED ").unwrap_or_else(|| panic!("{line}"));
        let (code, starved) = failed.split_once(' ').unwrap();
        Said::Failed(code.parse().unwrap(), starved.parse().unwrap())
    }

    /// Waits until more messages have arrived.
    fn flows(&mut self) {
        // What was said before may still be unread.
        let start = Instant::now();
        let mut more = 0;
        while more < 3 {
            match self.next() {
                Said::Arrived(count) => {
                    more += u64::from(count > self.arrived);
                    self.arrived = count;
                }
                Said::Failed(code, _) => panic!("error {code}"),
            }
            assert!(start.elapsed() < PATIENCE, "nothing arrives any more");
        }
    }

    /// Lets time pass, in which nothing may fail.
    fn pause(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            match self.next() {
                Said::Arrived(count) => self.arrived = count,
                Said::Failed(code, _) => panic!("error {code}"),
            }
        }
    }

    /// Waits for the error, and says how long that took. Time in which the sender did not run does
    /// not count (rule S10), and once more for the probes that it delays.
    fn fails(&mut self) -> (i32, Duration) {
        let start = Instant::now();
        loop {
            if let Said::Failed(code, starved) = self.next() {
                let starved = Duration::from_millis(starved);
                return (code, start.elapsed().saturating_sub(2 * starved));
            }
            assert!(start.elapsed() < PATIENCE, "no error");
        }
    }

    fn end(mut self) {
        self.sender.say("END");
        self.sender.finish();
        self.receiver.say("STOP");
        let levels = self.receiver.answer("LEVELS");
        assert!(levels.starts_with("0 "), "something did not come back: {levels}");
        self.receiver.finish();
    }
}

const FLAP: Duration = Duration::from_secs(1);

/// Longest that a sender with T_dead of two seconds may take, with what it takes us to hear of it.
const NOTICED: Duration = Duration::from_millis(2_200 + 300);

#[test]
fn a_link_that_flaps_for_a_second_is_no_error() {
    for port in [AFPACKET, UDP] {
        let Some(mut stream) = Stream::new(port) else { return };
        for node in [0, 1] {
            stream.ip(node, "link set fab0 down");
            stream.pause(FLAP);
            stream.ip(node, "link set fab0 up");
            stream.flows();
        }
        stream.end();
    }
}

#[test]
fn a_link_that_stays_down_ends_operations_with_an_error() {
    for (port, node) in [(AFPACKET, 0), (AFPACKET, 1), (UDP, 0)] {
        let Some(mut stream) = Stream::new(port) else { return };
        stream.ip(node, "link set fab0 down");
        let (code, took) = stream.fails();
        assert_eq!(code, FI_EHOSTUNREACH);
        assert!(took < NOTICED, "{took:?}");
        stream.sender.finish();
    }
}

#[test]
fn an_interface_that_is_renamed_goes_on() {
    let Some(mut stream) = Stream::new(AFPACKET) else { return };
    stream.ip(0, "link set fab0 down");
    stream.ip(0, "link set fab0 name other0");
    stream.ip(0, "link set other0 up");
    stream.flows();
    stream.end();
}

#[test]
fn an_interface_that_is_removed_is_an_error_at_once() {
    let Some(mut stream) = Stream::new(AFPACKET) else { return };
    stream.ip(0, "link del fab0");
    let (code, took) = stream.fails();
    assert_eq!(code, FI_ENETDOWN);
    assert!(took < Duration::from_secs(1), "{took:?}");
    stream.sender.finish();
}

#[test]
fn frames_longer_than_a_lowered_mtu_wait_for_a_while_and_then_fail() {
    let Some(mut stream) = Stream::new(AFPACKET) else { return };
    for node in [0, 1] {
        stream.ip(node, "link set fab0 mtu 600");
        stream.pause(FLAP);
        stream.ip(node, "link set fab0 mtu 1500");
        stream.flows();
    }
    stream.ip(0, "link set fab0 mtu 600");
    let (code, took) = stream.fails();
    assert!([FI_ENETDOWN, FI_EHOSTUNREACH].contains(&code), "{code}");
    assert!(took < NOTICED, "{took:?}");
    stream.sender.finish();
    assert_eq!(FABRIC, "fab0");
}
