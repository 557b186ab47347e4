//! Routers that choose among equal paths (ECMP, as bundles of links do) by the UDP ports of a
//! datagram, or by its flow label: the processes of two hosts are spread over the paths, and each
//! pair of them stays on one.

use std::collections::{BTreeMap, BTreeSet};

use barewire_tests::nodes::{FABRIC, Nodes, or_skip};

use crate::lengths::there_and_back;
use crate::start;

/// Pairs of processes that talk at a time, and in all.
const AT_A_TIME: u16 = 4;
const PAIRS: u16 = 12;

/// Their first UDP port. Of a pair both have the same: the least that tells it from others.
const FIRST: u16 = 52_000;

/// The wires between the routers, by their interfaces.
const PATHS: [&str; 2] = ["left", "right"];

/// A version of IP, and what a router chooses a path by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ip {
    /// The UDP ports.
    V4,
    /// The flow label, as is the rule where nothing else is said.
    V6,
}

impl Ip {
    /// An address of the network beside the host `node`.
    fn at(self, node: usize, number: usize) -> String {
        match self {
            Self::V4 => format!("10.78.{node}.{number}"),
            Self::V6 => format!("2001:db8:0:78::a4e:{node:x}{number:02x}"),
        }
    }

    /// One of the network between the routers that `path` makes.
    fn between(self, path: usize, number: usize) -> String {
        match self {
            Self::V4 => format!("10.80.{path}.{number}"),
            Self::V6 => format!("2001:db8:80:{path}::{number}"),
        }
    }

    fn give(self, nodes: &Nodes, node: usize, dev: &str, address: &str) -> Result<String, String> {
        let len = [("/24", ""), ("/120", "nodad")];
        let (len, at_once) = len[usize::from(self == Self::V6)];
        nodes.ip(node, &format!("addr add {address}{len} dev {dev} {at_once}"))
    }

    /// The family of `nft` and of `ip`, and what lets a router be one.
    fn words(self) -> (&'static str, &'static str, &'static [&'static str]) {
        match self {
            Self::V4 => {
                ("ip", "-4", &["net.ipv4.ip_forward=1", "net.ipv4.fib_multipath_hash_policy=1"])
            }
            Self::V6 => (
                "ip6",
                "-6",
                &["net.ipv6.conf.all.forwarding=1", "net.ipv6.fib_multipath_hash_policy=0"],
            ),
        }
    }
}

/// Two hosts, number 7 of a network each, and a router beside each; between those two wires.
fn two_paths(of: Ip) -> Result<Nodes, String> {
    let nodes = Nodes::new(4)?;
    let (family, version, settings) = of.words();
    for (path, dev) in PATHS.into_iter().enumerate() {
        nodes.veth([(2, dev), (3, dev)], 1500)?;
        for (router, number) in [(2, 1), (3, 2)] {
            of.give(&nodes, router, dev, &of.between(path, number))?;
        }
    }
    for node in [0, 1] {
        let (router, far, next) = (node + 2, 1 - node, 2 - node);
        nodes.veth([(node, FABRIC), (router, "port")], 1500)?;
        of.give(&nodes, node, FABRIC, &of.at(node, 7))?;
        of.give(&nodes, router, "port", &of.at(node, 1))?;
        nodes.ip(node, &format!("{version} route add default via {}", of.at(node, 1)))?;
        let way = |path| format!("nexthop via {} dev {}", of.between(path, next), PATHS[path]);
        let far = of.at(far, 0) + if of == Ip::V4 { "/24" } else { "/120" };
        nodes.ip(router, &format!("{version} route add {far} {} {}", way(0), way(1)))?;
        for setting in settings {
            nodes.run(router, &format!("sysctl -qw {setting}"))?;
        }
        // Since Linux 6.11: what it hashes with, and so what comes of it.
        let _drawn = nodes.run(router, "sysctl -qw net.ipv4.fib_multipath_hash_seed=5");
        count_flows(&nodes, router, family)?;
    }
    Ok(nodes)
}

/// Has a router count datagrams by the interface that they came to and by their UDP ports.
fn count_flows(nodes: &Nodes, router: usize, family: &str) -> Result<(), String> {
    let key = "{ type ifname . inet_service . inet_service ; flags dynamic ; counter ; }";
    let hook = "{ type filter hook prerouting priority 0 ; }";
    nodes.run(router, &format!("nft add table {family} seen"))?;
    nodes.run(router, &format!("nft add set {family} seen flows {key}"))?;
    nodes.run(router, &format!("nft add chain {family} seen tally {hook}"))?;
    let rule = "update @flows { iifname . udp sport . udp dport }";
    nodes.run(router, &format!("nft add rule {family} seen tally {rule}")).map(drop)
}

/// Datagrams by path and ports that have come to a router from the other one.
fn flows(nodes: &Nodes, router: usize, family: &str) -> BTreeMap<[u16; 2], BTreeMap<String, u64>> {
    let listed = nodes.run(router, &format!("nft list set {family} seen flows")).unwrap();
    let mut all = BTreeMap::<_, BTreeMap<_, _>>::new();
    let parts: Vec<&str> = listed.split('"').skip(1).collect();
    for part in parts.chunks_exact(2).filter(|part| part[0] != "port") {
        let words: Vec<&str> = part[1].split_whitespace().collect();
        let [".", from, ".", to, "counter", "packets", count, ..] = words[..] else {
            panic!("{listed}");
        };
        let ports = [from, to].map(|port| port.parse().unwrap());
        all.entry(ports).or_default().insert(part[0].to_owned(), count.parse().unwrap());
    }
    all
}

/// Goal: over two equal paths all messages arrive, by the kernel's stack and past it; every session
/// is on one path each way, whatever it sends, and not all are on the same.
fn spread_and_stay(of: Ip) {
    let Some(nodes) = or_skip(two_paths(of)) else { return };
    let port = |node: usize, port: u16, past_the_kernel: bool| {
        let (own, router) = (of.at(node, 7), of.at(node, 1));
        match (of, past_the_kernel) {
            (Ip::V4, false) => format!("udp:{own}:{port}"),
            (Ip::V6, false) => format!("udp:[{own}]/96:{port}"),
            (Ip::V4, true) => format!("ip({own}/24,gw={router},port={port}):afpacket:{FABRIC}"),
            (Ip::V6, true) => {
                format!("ip([{own}]/120,gw=[{router}],port={port}):afpacket:{FABRIC}")
            }
        }
    };
    let talk = |number: u16| {
        let role_at = |node: usize, role: &str| {
            start(&nodes, node, role, &port(node, FIRST + number, is_past_the_kernel(number, node)))
        };
        there_and_back(role_at, |mtu| vec![0, 100, mtu - 38, mtu + 1, 16_385, 1 << 20]);
    };
    for first in (0..PAIRS).step_by(usize::from(AT_A_TIME)) {
        std::thread::scope(|scope| {
            let talk = &talk;
            (first..first + AT_A_TIME).for_each(|number| drop(scope.spawn(move || talk(number))));
        });
    }
    let mut used = BTreeSet::new();
    for (from, router) in [(0, 3), (1, 2)] {
        let flows = flows(&nodes, router, of.words().0);
        for number in 0..PAIRS {
            let [(path, count)] = Vec::from_iter(&flows[&[FIRST + number; 2]])[..] else {
                panic!("pair {number} at router {router}: {flows:?}");
            };
            // Trains count once.
            assert!(*count > 20, "pair {number} at router {router}: {flows:?}");
            used.insert((is_past_the_kernel(number, from), path.clone()));
        }
        assert_eq!(flows.len(), usize::from(PAIRS), "{flows:?}");
    }
    // Where the kernel draws what it hashes with, all twelve of a kind are on one path once in
    // 2,048 times.
    assert_eq!(used.len(), 4, "all of a kind took the same path: {used:?}");
}

/// How a pair's process at a node sends: all four ways of two are there.
fn is_past_the_kernel(number: u16, node: usize) -> bool {
    number >> node & 1 == 0
}

#[test]
fn processes_are_spread_over_equal_paths_and_each_stays_on_one() {
    spread_and_stay(Ip::V4);
}

#[test]
fn processes_are_spread_over_equal_paths_of_ipv6_by_label() {
    spread_and_stay(Ip::V6);
}
