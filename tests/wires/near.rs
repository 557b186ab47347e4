//! Processes of two nodes behind their NICs, of which those of one node reach each other through
//! memory: all to all, and under faults.

use barewire_tests::nodes::{FABRIC, Nodes, or_skip};

use crate::members::all_to_all;
use crate::rounds::kill_rounds;
use crate::supervisor::Worker;
use crate::{kills, lengths, one_sided, start};

/// Members on these nodes and ports.
pub(crate) fn on_nodes<'a>(
    nodes: &'a Nodes,
    places: &'a [(usize, &'a str)],
) -> impl Fn(usize) -> Worker + 'a {
    |i| start(nodes, places[i].0, "member", places[i].1)
}

/// Two nodes of two processes each: who is near is so for everybody, and all else goes by the wire.
pub(crate) fn two_by_two(nodes: &Nodes, port: &str, mtu: u64) {
    each_by_two(nodes, [port; 2], mtu);
}

/// The same where the processes of a node open ports of other names.
pub(crate) fn each_by_two(nodes: &Nodes, [port, other]: [&str; 2], mtu: u64) {
    let places = [(0, port), (0, other), (1, port), (1, other)];
    let told = all_to_all(4, on_nodes(nodes, &places), || {});
    for (i, (_, of)) in told.iter().enumerate() {
        assert_eq!(of.sessions.len(), 3, "{of:?}");
        for (j, (mac, _)) in told.iter().enumerate().filter(|(j, _)| *j != i) {
            let (frame, repeated) = of.sessions[mac];
            match places[i].0 == places[j].0 {
                true => assert_eq!((frame, repeated), (65_520, 0), "{i} to {j}: {of:?}"),
                false => assert!(frame <= mtu, "{i} to {j}: {of:?}"),
            }
        }
        assert!(of.near_frames > 100 && of.far_frames > 100, "{of:?}");
    }
    println!("{port} {other}: {told:?}");
}

const AFPACKET: &str = "afpacket:fab0,near=yes";

/// Goal: the processes of a node share its NIC, reach each other by memory and everybody else by
/// the wire, under one address: messages of all lengths received from anybody, in order of each
/// sender, and one-sided and atomic operations on the same memory from both sides. Method: two
/// network namespaces, whose segments have names of their own in one /dev/shm.
#[test]
fn two_nodes_of_two_processes_all_to_all() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    assert!(AFPACKET.contains(FABRIC));
    two_by_two(&nodes, AFPACKET, 1500);
}

#[test]
fn two_nodes_of_two_processes_inside_udp() {
    let Some(nodes) = or_skip(Nodes::unprivileged_pair(9000)) else { return };
    two_by_two(&nodes, "udp:fab0,near=yes", 9000);
}

/// Loss on the wire is none in memory.
#[test]
fn two_nodes_of_two_processes_over_a_bad_wire() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    two_by_two(&nodes, &format!("fault(loss=0.02,seed=11):{AFPACKET}"), 1500);
}

/// Goal: one without a near side is far for those that have one and share its node.
#[test]
fn a_process_without_a_near_side_is_far() {
    let Some(nodes) = or_skip(Nodes::new(1)) else { return };
    let [a, b, c] =
        ["afpacket:lo,near=yes", "afpacket:lo,near=yes", "afpacket:lo,near=shm:other-x"];
    let places = [(0, a), (0, b), (0, c)];
    let told = all_to_all(3, on_nodes(&nodes, &places), || {});
    let frame = |i: usize, j: usize| told[i].1.sessions[&told[j].0];
    assert_eq!((frame(0, 1).1, frame(1, 0).1), (0, 0));
    assert!(told[0].1.near_frames > 100 && told[1].1.near_frames > 100);
    assert_eq!((told[2].1.near_frames, told[2].1.sessions.len()), (0, 2));
}

/// Goal: every length passes between near processes as it does between far ones.
#[test]
fn every_length_between_near_processes() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let begin = |_place, role: &str| start(&nodes, 0, role, AFPACKET);
    lengths::there_and_back(begin, |mtu| {
        assert_eq!(mtu, 1500);
        let mut sizes = lengths::all_sizes(mtu);
        sizes.extend([65_472, 65_520, 65_521]);
        sizes
    });
}

#[test]
fn kills_of_near_processes() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let begin = |_place, _name: &str| start(&nodes, 0, "traffic", AFPACKET);
    kill_rounds("kills-near", begin, kills(12).into(), 13);
}

/// Ports of one process that are near to each other.
fn of_this_process(name: &str) -> [String; 2] {
    let name = format!("{name}-{}", std::process::id());
    [0, 1].map(|_| format!("udp:127.0.0.1,near=shm:{name}"))
}

#[test]
fn one_sided_operations_on_a_near_peer() {
    one_sided::many_both_ways(of_this_process("near-sided"));
}

#[test]
fn one_sided_operations_on_a_near_peer_that_goes() {
    one_sided::a_peer_that_goes(of_this_process("near-goes"));
}
