//! Congestion that a router marks (ECN): it costs the sender's window, and no byte.

use barewire_tests::nodes::{Nodes, or_skip};

use crate::ip::{by_router, routed};
use crate::messages::{UDP, there_and_back};

/// A router that marks what says that it may be marked, of all that node 0 sends.
fn marking() -> Option<Nodes> {
    let nodes = routed()?;
    let hook = "{ type filter hook forward priority 0 ; }";
    let rule = "ip saddr 10.78.0.7 ip ecn ect0 ip ecn set ce";
    let made = nodes
        .run(2, "nft add table ip marks")
        .and_then(|_| nodes.run(2, &format!("nft add chain ip marks ce {hook}")))
        .and_then(|_| nodes.run(2, &format!("nft add rule ip marks ce {rule}")));
    or_skip(made)?;
    Some(nodes)
}

/// Goal: a port that is told so sends datagrams that nobody marks, and notices the marks of others.
#[test]
fn a_port_that_may_not_be_marked_still_notices() {
    let Some(nodes) = marking() else { return };
    let sizes = |mtu: usize| vec![0, 100, mtu - 38, mtu + 1, 1 << 20, 4 << 20];
    let without = ["ip(10.78.0.7/24,gw=10.78.0.1,ecn=no):afpacket:fab0", "udp:fab0,ecn=no"];
    for port in without {
        let counts = there_and_back(&nodes, [port, UDP], sizes);
        assert_eq!((counts.marked, counts.echoes), (0, 0), "{counts:?}");
    }
    let rule = "ip saddr 10.78.1.7 ip ecn ect0 ip ecn set ce";
    nodes.run(2, &format!("nft add rule ip marks ce {rule}")).unwrap();
    for port in without {
        let counts = there_and_back(&nodes, [port, UDP], sizes);
        assert!(counts.marked > 10 && counts.echoes == 0, "{counts:?}");
        println!("{port}: {counts:?}");
    }
}

/// Goal: datagrams say that they may be marked; marks are noticed and echoed by the kernel's stack
/// and past it, one frame at a time and in trains, and the messages arrive. Method: a router that
/// marks all, one way and then the other.
#[test]
fn what_a_router_marks_is_echoed() {
    let Some(nodes) = marking() else { return };
    let sizes = |mtu: usize| vec![0, 100, mtu - 38, mtu + 1, 1 << 20, 4 << 20];
    let ports = |node| [by_router(node), UDP.to_owned()];
    for (from, to) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let counts = there_and_back(&nodes, [&ports(0)[from], &ports(1)[to]], sizes);
        assert_eq!((counts.marked, counts.refused), (0, 0), "{counts:?}");
        assert!(counts.echoes > 10, "{from} {to}: {counts:?}");
    }
    let rule = "ip saddr 10.78.1.7 ip ecn ect0 ip ecn set ce";
    nodes.run(2, "nft flush chain ip marks ce").unwrap();
    nodes.run(2, &format!("nft add rule ip marks ce {rule}")).unwrap();
    for to in [0, 1] {
        let counts = there_and_back(&nodes, [&ports(0)[to], &ports(1)[to]], sizes);
        assert!(counts.marked > 1000 && counts.echoes == 0, "{counts:?}");
    }
}
