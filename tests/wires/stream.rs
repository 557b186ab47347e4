//! A stream of messages between two nodes, to look at while something happens to the wire.

use std::time::{Duration, Instant};

use barewire::errno::{FI_EHOSTUNREACH, FI_ENETDOWN};
use barewire_tests::nodes::{Nodes, or_skip};

use crate::start;
use crate::supervisor::{PATIENCE, Worker};

/// A sender in node 0 and a receiver in node 1 that talk.
pub(crate) struct Stream {
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
    pub(crate) fn new(port: &str) -> Option<Self> {
        Self::by("sender", port)
    }

    /// With a sender that takes longer to give its peer up: [`PATIENT`].
    pub(crate) fn patient(port: &str) -> Option<Self> {
        Self::by("patient-sender", port)
    }

    fn by(role: &str, port: &str) -> Option<Self> {
        let nodes = or_skip(Nodes::pair(1500))?;
        let mut receiver = start(&nodes, 1, "traffic", port);
        let mut sender = start(&nodes, 0, role, port);
        sender.say(&format!("PEER {}", receiver.addr));
        receiver.say("QUIET");
        receiver.answer("DRAINED");
        let mut stream = Self { nodes, sender, receiver, arrived: 0 };
        stream.flows();
        Some(stream)
    }

    /// Something happens to the interface of each node for [`FLAP`], and nothing fails.
    pub(crate) fn outlives(&mut self, change: &str, back: &str) {
        for node in [0, 1] {
            self.ip(node, change);
            self.pause(FLAP);
            self.ip(node, back);
            self.flows();
        }
    }

    /// Something happens to the interface of `node`, and the sender is told so by one of `codes`
    /// within `limit`.
    pub(crate) fn ends(self, node: usize, change: &str, codes: &[i32], limit: Duration) {
        self.ip(node, change);
        self.has_ended(codes, limit);
    }

    /// As [`ends`](Self::ends), from now on.
    pub(crate) fn has_ended(mut self, codes: &[i32], limit: Duration) {
        let (code, took) = self.fails();
        assert!(codes.contains(&code), "{code}, not one of {codes:?}");
        assert!(took < limit, "{took:?}");
        self.sender.finish();
    }

    pub(crate) fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    pub(crate) fn ip(&self, node: usize, args: &str) {
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
    pub(crate) fn flows(&mut self) {
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

    pub(crate) fn end(mut self) {
        self.sender.say("END");
        self.sender.finish();
        self.receiver.say("STOP");
        let levels = self.receiver.answer("LEVELS");
        assert!(levels.starts_with("0 "), "something did not come back: {levels}");
        self.receiver.finish();
    }
}

/// T_dead of a sender, and of a patient one: over `udp` the kernel asks for the address of a peer
/// once a second, so it may ask again as late as a second after the link is back.
pub(crate) const T_DEAD: Duration = Duration::from_secs(2);
pub(crate) const PATIENT: Duration = Duration::from_secs(4);

/// How long a link is down that comes back.
const FLAP: Duration = Duration::from_secs(1);

/// Longest that a sender may take to say so, a tenth more than T_dead, with what it takes us to
/// hear of it.
pub(crate) const NOTICED: Duration = Duration::from_millis(2_200 + 300);

/// Links that are down for a while, and one that stays so.
pub(crate) const DOWN: [&str; 2] = ["link set fab0 down", "link set fab0 up"];

/// Frames that are longer than a lowered MTU wait for a while and then fail.
pub(crate) fn lowered_mtu(port: &str) {
    let Some(mut stream) = Stream::new(port) else { return };
    stream.outlives("link set fab0 mtu 600", "link set fab0 mtu 1500");
    stream.ends(0, "link set fab0 mtu 600", &[FI_ENETDOWN, FI_EHOSTUNREACH], NOTICED);
}

/// An interface that is gone is an error at once.
pub(crate) fn removed(port: &str) {
    let Some(stream) = Stream::new(port) else { return };
    stream.ends(0, "link del fab0", &[FI_ENETDOWN], Duration::from_secs(1));
}
