//! Messages of all lengths between two nodes, there and back, byte for byte; and kill -9.

use barewire_tests::nodes::{FABRIC, Nodes, or_skip};

use crate::lengths::{self, Counts, all_sizes, fewer_sizes};
use crate::rounds::kill_rounds;
use crate::start;

/// Every length there and back between node 0 and node 1.
pub(crate) fn there_and_back(
    nodes: &Nodes,
    ports: [&str; 2],
    sizes: impl FnMut(usize) -> Vec<usize>,
) -> Counts {
    lengths::there_and_back(|node, role| start(nodes, node, role, ports[node]), sizes)
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

/// With a thread that does the driver's work at one end.
#[test]
fn every_length_inside_udp_that_polls_busily() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let port = format!("{UDP},busypoll=yes");
    there_and_back(&nodes, [&port, UDP], fewer_sizes);
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
    let begin = |_place, role: &str| start(&nodes, 0, role, "afpacket:lo");
    lengths::there_and_back(begin, |mtu| {
        assert_eq!(mtu, 65_520);
        vec![0, 1, 65_472, 65_520, 65_521, 1 << 20]
    });
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
