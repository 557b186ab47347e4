//! The byte of DSCP and ECN: congestion that a router marks costs the sender's window, and no byte;
//! and the class that a program says of its traffic is in its datagrams.

use barewire::errno::{FI_EINVAL, FI_ENODATA};
use barewire::flags::{BindFlags, Caps, InfoFlags};
use barewire::{API_VERSION, AvAttr, Buf, CqAttr, FI_ADDR_UNSPEC, Info, fabric, getinfo, tclass};
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
fn ecn_marks_of_a_router_are_echoed() {
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

/// Hints for a port, with a class of the domain and one of its endpoints.
fn hints(port: &str, domain: u32, ep: u32) -> Info {
    let mut hints = Info { caps: Caps::TAGGED, ..Info::default() };
    hints.domain_attr.name = Some(port.to_owned());
    (hints.domain_attr.tclass, hints.tx_attr.tclass) = (domain, ep);
    hints
}

fn ask(hints: &Info) -> Result<Info, i32> {
    let all = getinfo(API_VERSION, None, None, InfoFlags::empty(), Some(hints));
    all.map(|mut all| all.remove(0)).map_err(|e| e.fi_errno())
}

/// Sends to a peer that is not there by a domain of these hints, in this node.
fn send_something(hints: &Info) {
    let info = ask(hints).unwrap();
    let domain = fabric(&info.fabric_attr).unwrap().domain(&info).unwrap();
    let (cq, av) =
        (domain.cq_open(CqAttr::default()).unwrap(), domain.av_open(AvAttr::default()).unwrap());
    let ep = domain.endpoint(&info).unwrap();
    ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV).unwrap();
    ep.bind_av(&av).unwrap();
    ep.enable().unwrap();
    let peer = barewire::names::Names::of("udp:10.78.0.1").at([10, 78, 0, 2].into(), 52_050);
    let mut to = [FI_ADDR_UNSPEC];
    av.insert(&[peer], &mut to).unwrap();
    ep.tsend(Buf::zeroed(8), to[0], 1, 1).unwrap();
    for _ in 0..100 {
        let _ = cq.read(&mut []);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // Another class than the domain's, after all.
    let mut other = info.clone();
    other.domain_attr.tclass = tclass::TC_SCAVENGER;
    other.tx_attr.tclass = tclass::TC_BULK_DATA;
    assert_eq!(domain.endpoint(&other).err().unwrap().fi_errno(), FI_EINVAL);
}

/// Goal: the class of a domain, or of its endpoints, is the DSCP of its datagrams; what the port's
/// name says goes before it, and classes that contradict each other are refused.
#[test]
fn a_traffic_class_is_in_the_datagrams() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let hook = "{ type filter hook output priority 0 ; }";
    let made = nodes
        .run(0, "nft add table ip seen")
        .and_then(|_| nodes.run(0, &format!("nft add chain ip seen out {hook}")));
    if or_skip(made).is_none() {
        return;
    }
    for (port, domain, ep, dscp) in [
        ("udp:fab0", tclass::TC_DEDICATED_ACCESS, 0, "ef"),
        ("udp:fab0", 0, tclass::TC_DSCP | 26, "af31"),
        ("udp:10.78.0.0/24,dscp=8", tclass::TC_LOW_LATENCY, 0, "cs1"),
    ] {
        nodes.run(0, "nft flush chain ip seen out").unwrap();
        nodes.run(0, &format!("nft add rule ip seen out ip dscp {dscp} counter")).unwrap();
        std::thread::scope(|scope| {
            let send = || {
                nodes.enter(0).unwrap();
                send_something(&hints(port, domain, ep));
                assert_eq!(ask(&hints(port, tclass::TC_SCAVENGER, 0x101)).err(), None);
                let contradiction = hints(port, tclass::TC_BULK_DATA, tclass::TC_SCAVENGER);
                assert_eq!(ask(&contradiction).err(), Some(FI_ENODATA));
                assert_eq!(ask(&hints(port, 7, 0)).err(), Some(FI_ENODATA));
            };
            scope.spawn(send).join().unwrap();
        });
        let seen = nodes.run(0, "nft list chain ip seen out").unwrap();
        let count = seen.split("packets ").nth(1).unwrap().split(' ').next().unwrap();
        assert!(count.parse::<u32>().unwrap() > 0, "{port} {domain:#x} {ep:#x}: {seen}");
    }
}
