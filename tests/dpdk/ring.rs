//! Two domains of one process on the two ends of a pair of rings.

use std::time::{Duration, Instant};

use barewire::*;

use crate::one_sided::{a_peer_that_goes, many_both_ways};
use crate::supervisor::PATIENCE;
use crate::worker::{Node, open, pattern, settings};

/// Two nodes on the ends of a pair of rings of their own.
fn pair(name: &str, wrap: &str, options: &str) -> [(Node, FiAddr); 2] {
    let [a, b] =
        ["a", "b"].map(|end| format!("{wrap}dpdk{options}:net_ring_{name}_{end},pair={name}"));
    join([&a, &b])
}

/// Two nodes that know each other, each with the other's address.
pub(crate) fn join(ports: [&str; 2]) -> [(Node, FiAddr); 2] {
    let quiet = Settings { t_dead: Duration::from_secs(10), ..settings() };
    let [a, b] = ports.map(|port| open(port, quiet.clone()));
    let at = |node: &Node| node.ep.getname().unwrap().to_string();
    let (to_b, to_a) = (a.knows(&at(&b)), b.knows(&at(&a)));
    [(a, to_b), (b, to_a)]
}

/// Polls both nodes until `a` has `want_a` completions and `b` has `want_b`.
fn complete(a: &Node, want_a: usize, b: &Node, want_b: usize) -> [Vec<Completion>; 2] {
    let begun = Instant::now();
    let mut got = [Vec::new(), Vec::new()];
    while got[0].len() < want_a || got[1].len() < want_b {
        for (node, got) in [a, b].into_iter().zip(&mut got) {
            let mut one = [Completion::default()];
            match node.cq.read(&mut one) {
                Ok(_) => got.push(std::mem::take(&mut one[0])),
                Err(Error::Again) => {}
                Err(_) => panic!("{}", node.cq.readerr().unwrap()),
            }
        }
        assert!(begun.elapsed() < PATIENCE, "no completion");
    }
    got
}

/// A message of every length goes there and comes back.
pub(crate) fn ping_pong(ends: &[(Node, FiAddr); 2], sizes: &[usize]) {
    let [(a, to_b), (b, to_a)] = ends;
    for &len in sizes {
        let sent = pattern(len, len as u64 + 1);
        b.ep.trecv(Buf::zeroed(len), *to_a, 7, 0, 1).unwrap();
        a.ep.trecv(Buf::zeroed(len), *to_b, 7, 0, 1).unwrap();
        a.ep.tsend(Buf::from(sent.clone()), *to_b, 7, 2).unwrap();
        let [_, mut there] = complete(a, 1, b, 1);
        assert!(there[0].bytes() == sent, "{len} bytes arrived changed");
        b.ep.tsend(there[0].take_buf().unwrap(), *to_a, 7, 2).unwrap();
        let [back, _] = complete(a, 1, b, 1);
        assert!(back[0].bytes() == sent, "{len} bytes came back changed");
    }
}

const SIZES: [usize; 12] = [0, 1, 8, 64, 256, 257, 1400, 1500, 1501, 16_385, 300_000, 4 << 20];

#[test]
fn messages_of_all_lengths_cross_a_pair_of_rings() {
    ping_pong(&pair("pp", "", ""), &SIZES);
}

#[test]
fn messages_of_all_lengths_cross_in_jumbo_frames() {
    let ends = pair("jumbo", "", "(mtu=9000)");
    assert_eq!(ends[0].0.domain.port().mtu, 9000);
    ping_pong(&ends, &SIZES);
}

#[test]
fn messages_of_all_lengths_survive_a_bad_link() {
    ping_pong(&pair("bad", "fault(loss=0.05,dup=0.01,seed=5):", ""), &SIZES);
}

/// Goal: a ring of 64 frames and a stream that fills it lose nothing.
#[test]
fn a_short_queue_holds_the_sender_back() {
    let ends = pair("short", "", "(ring=64)");
    let [(a, to_b), (b, to_a)] = &ends;
    for i in 0..32 {
        b.ep.trecv(Buf::zeroed(100_000), *to_a, i, 0, i).unwrap();
    }
    for i in 0..32 {
        a.ep.tsend(Buf::from(pattern(100_000, i + 1)), *to_b, i, i).unwrap();
    }
    let [_, got] = complete(a, 32, b, 32);
    for c in &got {
        assert!(c.bytes() == pattern(100_000, c.op_context + 1), "message {}", c.op_context);
    }
}

/// Goal: as with messages, where there is room for few frames and for many.
#[test]
fn memory_of_others_over_a_pair_of_rings() {
    for (name, options) in [("memory", ""), ("narrow", "(ring=64)"), ("large", "(mtu=9000)")] {
        many_both_ways(
            ["a", "b"].map(|end| format!("dpdk{options}:net_ring_{name}_{end},pair={name}")),
        );
    }
}

#[test]
fn memory_of_others_over_a_pair_of_rings_whose_other_end_goes() {
    a_peer_that_goes(["a", "b"].map(|end| format!("dpdk:net_ring_goes_{end},pair=goes")));
}

#[test]
fn a_wrong_device_is_not_offered_or_refused_in_one_line() {
    let mut hints = Info::default();
    let none = barewire::flags::InfoFlags::empty();
    for (port, says) in [
        ("dpdk:net_foo0", "DPDK has no driver called net_foo"),
        ("dpdk(mtu=9k):net_null9", "invalid digit"),
        ("dpdk:net_af_packet0,iface=nothing0", "no such interface as nothing0"),
    ] {
        hints.domain_attr.name = Some(port.into());
        let line = match getinfo_with(&settings(), API_VERSION, None, None, none, Some(&hints)) {
            // What opening would say can be asked without.
            Err(e) => {
                assert_eq!(e, Error::NoData, "{port}");
                check_port(port).expect_err(port).to_string()
            }
            Ok(infos) => {
                let fabric = fabric(&infos[0].fabric_attr).unwrap();
                fabric.domain_with(&infos[0], settings()).err().expect(port).to_string()
            }
        };
        assert!(line.contains(says) && !line.contains('\n'), "{line}");
    }
}
