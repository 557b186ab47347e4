//! Small messages that share packets unasked, on a port whose frames pass a kernel.

use std::time::{Duration, Instant};

use barewire::{Buf, Completion, Error, FI_ADDR_UNSPEC, FiAddr, Settings};
use barewire_tests::nodes::{Nodes, or_skip};

use crate::switch::{PORT, end, switches};
use crate::worker::{Node, open};

/// Messages of a stream on their way at once.
const WINDOW: usize = 64;

/// Messages of a burst after which the sender does not poll.
const BURST: usize = 24;

/// Messages to another peer of which the last is the first that is held.
const FEW: usize = 5;

/// Bytes of a message that shares no packet.
const LONG: usize = 5000;

/// Two nodes, and the address of the second at the first.
fn pair(nagle: bool) -> ([Node; 2], FiAddr) {
    let settings = || Settings { near: false, nagle, ..Settings::default() };
    met([0; 2].map(|_| open("udp:127.0.0.1", settings())))
}

fn met([a, b]: [Node; 2]) -> ([Node; 2], FiAddr) {
    let dest = a.knows(&b.ep.getname().unwrap().to_string());
    b.knows(&a.ep.getname().unwrap().to_string());
    ([a, b], dest)
}

/// Reads a completion, if there is one.
fn read(node: &Node) -> bool {
    let mut one = [Completion::default()];
    match node.cq.read(&mut one) {
        Ok(_) => true,
        Err(Error::Again) => false,
        Err(e) => panic!("{e}: {:?}", node.cq.readerr()),
    }
}

fn send(from: &Node, to: FiAddr) {
    from.ep.tsend(Buf::from(vec![7; 64]), to, 7, 0).unwrap();
}

fn recv(at: &Node) {
    at.ep.trecv(Buf::zeroed(64), FI_ADDR_UNSPEC, 7, 0, 0).unwrap();
}

/// Sends for that long with a window, by turns with the receiver. Returns the number of messages.
fn stream([from, to]: [&Node; 2], dest: FiAddr, long: Duration) -> u64 {
    let (begun, mut open, mut count) = (Instant::now(), 0, 0);
    while begun.elapsed() < long || open > 0 {
        while open < WINDOW && begun.elapsed() < long {
            recv(to);
            send(from, dest);
            (open, count) = (open + 1, count + 1);
        }
        while read(to) {}
        while read(from) {
            open -= 1;
        }
    }
    while read(to) {}
    count
}

/// Goal: a stream of small messages takes a fraction of its messages in packets, and what it leaves
/// unsent when the program stops to poll arrives soon, by the receive thread.
#[test]
fn streamed_messages_share_packets_and_none_is_left() {
    let ([a, b], dest) = pair(true);
    // The receive thread looks ten times a second whether it is wanted.
    stream([&a, &b], dest, Duration::from_millis(400));
    let before = a.domain.port_counters().unwrap().tx_frames;
    let sent = stream([&a, &b], dest, Duration::from_millis(200));
    let frames = a.domain.port_counters().unwrap().tx_frames - before;
    assert!(frames < sent / 3, "{sent} messages in {frames} packets");
    let late = (0..9).map(|_| {
        stream([&a, &b], dest, Duration::from_millis(150));
        (0..BURST).for_each(|_| recv(&b));
        (0..BURST).for_each(|_| send(&a, dest));
        let (begun, mut arrived) = (Instant::now(), 0);
        while arrived < BURST {
            arrived += usize::from(read(&b));
            assert!(begun.elapsed() < Duration::from_secs(5), "{arrived} of {BURST}");
        }
        let took = begun.elapsed();
        while arrived > 0 {
            arrived -= usize::from(read(&a));
        }
        took
    });
    // Without that thread it would be 10 ms and more.
    let soonest = late.min().unwrap();
    assert!(soonest < Duration::from_millis(2), "{soonest:?}");
}

/// Goal: of two packets to two peers, of which one lets the other go first, none is left either.
#[test]
fn held_packets_of_two_peers_both_leave() {
    let ([a, b], to_b) = pair(true);
    let c = open("udp:127.0.0.1", Settings { near: false, ..Settings::default() });
    let to_c = a.knows(&c.ep.getname().unwrap().to_string());
    c.knows(&a.ep.getname().unwrap().to_string());
    let late = (0..9).map(|_| {
        stream([&a, &c], to_c, Duration::from_millis(150));
        stream([&a, &b], to_b, Duration::from_millis(150));
        for (to, dest, count) in [(&b, to_b, BURST), (&c, to_c, FEW)] {
            (0..count).for_each(|_| recv(to));
            (0..count).for_each(|_| send(&a, dest));
        }
        // The transmit that lets the first one go.
        b.ep.trecv(Buf::zeroed(LONG), FI_ADDR_UNSPEC, 8, 0, 0).unwrap();
        a.ep.tsend(Buf::from(vec![7; LONG]), to_b, 8, 0).unwrap();
        let (begun, mut arrived) = (Instant::now(), 0);
        while arrived < BURST + FEW + 1 {
            arrived += usize::from(read(&b)) + usize::from(read(&c));
            assert!(begun.elapsed() < Duration::from_secs(5), "{arrived} of {}", BURST + FEW);
        }
        let took = begun.elapsed();
        while arrived > 0 {
            arrived -= usize::from(read(&a));
        }
        took
    });
    let mut late: Vec<Duration> = late.collect();
    late.sort_unstable();
    assert!(late[4] < Duration::from_millis(2), "{late:?}");
}

/// Goal: `BAREWIRE_NAGLE=0` gives each message its own packet.
#[test]
fn a_stream_that_is_not_to_wait_shares_nothing() {
    let ([a, b], dest) = pair(false);
    let sent = stream([&a, &b], dest, Duration::from_millis(400));
    let frames = a.domain.port_counters().unwrap().tx_frames;
    // A window that is still small lets some share one.
    assert!(frames > sent / 2, "{sent} messages in {frames} packets");
}

/// Goal: behind switches whose NICs pass a kernel, messages to a far peer share packets, and those
/// to a near one do not. Method: processes' ports in threads of this one, each in its node.
#[test]
fn messages_through_switches_share_packets() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let switches = switches(&nodes);
    let open_in = |node| {
        nodes.enter(node).unwrap();
        open(PORT, Settings::default())
    };
    let per_packet = |places: [usize; 2]| {
        let both = move || {
            let ([a, b], dest) = met(places.map(open_in));
            stream([&a, &b], dest, Duration::from_millis(400));
            let counted = || {
                let near = a.domain.near_counters().unwrap().unwrap().tx_frames;
                [a.domain.port_counters().unwrap().tx_frames - near, near]
            };
            let before = counted();
            let sent = stream([&a, &b], dest, Duration::from_millis(200));
            let after = counted();
            (sent, after[0] - before[0], after[1] - before[1])
        };
        std::thread::scope(|scope| scope.spawn(both).join().unwrap())
    };
    let (sent, far, near) = per_packet([0, 1]);
    assert!(far < sent / 3 && near == 0, "{sent} messages in {far} packets, {near} near");
    let (sent, far, near) = per_packet([0, 0]);
    assert!(near >= sent && far == 0, "{sent} messages in {near} near packets, {far} far");
    end(switches);
}
