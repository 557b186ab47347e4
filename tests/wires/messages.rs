//! Messages of all lengths between two nodes, there and back, byte for byte; and kill -9.

use barewire_tests::nodes::{FABRIC, Nodes, or_skip};

use crate::rounds::kill_rounds;
use crate::start;

/// What the caller counted.
#[derive(Debug)]
pub(crate) struct Counts {
    /// Frames that its port dropped.
    pub(crate) rx_dropped: u64,
    /// Frames that its node refused.
    pub(crate) refused: u64,
}

/// Every length there and back between a caller in node 0 and an echo in node 1.
pub(crate) fn there_and_back(
    nodes: &Nodes,
    ports: [&str; 2],
    mut sizes: impl FnMut(usize) -> Vec<usize>,
) -> Counts {
    let mut echo = start(nodes, 1, "echo", ports[1]);
    let mut caller = start(nodes, 0, "caller", ports[0]);
    let (addr, mtu) = caller.addr.split_once(" mtu ").unwrap();
    let mtu = mtu.parse().unwrap();
    echo.say(&format!("PEER {addr}"));
    let to = format!("PEER {}", echo.addr);
    caller.say(&to);
    for len in sizes(mtu) {
        echo.say(&format!("SIZE {len}"));
        caller.say(&format!("CALL {len}"));
        caller.answer("BACK");
        echo.answer("ECHOED");
    }
    echo.say("END");
    caller.say("COUNT");
    let counts = caller.answer("COUNTS");
    let mut counts = counts.split_whitespace().map(|n| n.parse().unwrap());
    let counts = Counts { rx_dropped: counts.next().unwrap(), refused: counts.next().unwrap() };
    caller.say("END");
    echo.finish();
    caller.finish();
    counts
}

/// Lengths around every limit of the port and the protocol.
fn all_sizes(mtu: usize) -> Vec<usize> {
    let mut sizes = vec![0, 1, 12, 13, 255, 256, 257, 16_383, 16_384, 16_385];
    sizes.extend([mtu - 48, mtu - 38, mtu - 1, mtu, mtu + 1, 1 << 20, 16 << 20]);
    sizes
}

fn fewer_sizes(mtu: usize) -> Vec<usize> {
    vec![0, 1, 256, 257, mtu - 38, mtu, mtu + 1, 16_385, 1 << 20]
}

pub(crate) const AFPACKET: &str = "afpacket:fab0";
pub(crate) const UDP: &str = "udp:fab0";

#[test]
fn every_length_over_a_wire() {
    assert_eq!(AFPACKET, format!("afpacket:{FABRIC}"));
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    there_and_back(&nodes, [AFPACKET; 2], all_sizes);
}

#[test]
fn every_length_in_jumbo_frames_without_any_privilege() {
    let Some(nodes) = or_skip(Nodes::unprivileged_pair(9000)) else { return };
    there_and_back(&nodes, [AFPACKET; 2], |mtu| {
        assert_eq!(mtu, 9000);
        all_sizes(mtu)
    });
}

#[test]
fn every_length_inside_udp() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    there_and_back(&nodes, [UDP; 2], |mtu| {
        assert_eq!(mtu, 1500 - 42);
        all_sizes(mtu)
    });
}

/// Loss by our port one way, by the kernel the other.
#[test]
fn every_length_inside_udp_that_gets_lost() {
    let Some(nodes) = or_skip(Nodes::pair(9000)) else { return };
    if or_skip(nodes.lose(0, FABRIC, 5)).is_some() {
        let port = format!("fault(loss=0.05,seed=5):{UDP}");
        there_and_back(&nodes, [&port, UDP], fewer_sizes);
    }
}

/// The two ends carry different sizes: the smaller one rules.
#[test]
fn every_length_between_unequal_ports() {
    let Some(nodes) = or_skip(Nodes::pair(9000)) else { return };
    there_and_back(&nodes, [AFPACKET, "afpacket:fab0,mtu=600"], fewer_sizes);
}

#[test]
fn every_length_over_a_bad_wire() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let port = format!("fault(loss=0.05,seed=3):{AFPACKET}");
    there_and_back(&nodes, [&port, &port], fewer_sizes);
}

/// The same loss, but drawn by the kernel on the way in.
#[test]
fn every_length_over_a_wire_that_the_kernel_spoils() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let lossy = nodes.lose(0, FABRIC, 5).and_then(|()| nodes.lose(1, FABRIC, 5));
    if or_skip(lossy).is_some() {
        there_and_back(&nodes, [AFPACKET; 2], fewer_sizes);
    }
}

/// Two processes on one `lo`, where everything that is sent comes back to everybody.
#[test]
fn every_length_over_the_loopback_interface() {
    let Some(nodes) = or_skip(Nodes::new(1)) else { return };
    let mut both = Vec::new();
    for role in ["echo", "caller"] {
        both.push(start(&nodes, 0, role, "afpacket:lo"));
    }
    let [mut echo, mut caller]: [_; 2] = both.try_into().ok().unwrap();
    let (addr, mtu) = caller.addr.split_once(" mtu ").unwrap();
    assert_eq!(mtu, "65520");
    echo.say(&format!("PEER {addr}"));
    let to = format!("PEER {}", echo.addr);
    caller.say(&to);
    for len in [0, 1, 65_472, 65_520, 65_521, 1 << 20] {
        echo.say(&format!("SIZE {len}"));
        caller.say(&format!("CALL {len}"));
        caller.answer("BACK");
        echo.answer("ECHOED");
    }
    echo.say("END");
    caller.say("END");
    echo.finish();
    caller.finish();
}

#[test]
fn kills_over_a_wire() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let begin = |place, _name: &str| start(&nodes, place, "traffic", AFPACKET);
    kill_rounds("kills-wire", begin, 12, 3);
}

#[test]
fn kills_inside_udp() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let begin = |place, _name: &str| start(&nodes, place, "traffic", "udp:fab0:50000");
    kill_rounds("kills-udp", begin, 12, 5);
}

#[test]
fn kills_over_a_bad_wire() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let port = format!("fault(loss=0.05,seed=9):{AFPACKET}");
    let begin = |place, _name: &str| start(&nodes, place, "traffic", &port);
    kill_rounds("kills-bad-wire", begin, 6, 4);
}
