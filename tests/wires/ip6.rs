//! IPv6: hosts whose addresses have their first 96 bits in common.

use barewire::errno::{FI_EACCES, FI_EADDRINUSE, FI_EINVAL, FI_ENODATA, FI_ENODEV};
use barewire::flags::InfoFlags;
use barewire::{API_VERSION, Info, getinfo};
use barewire_tests::nodes::{FABRIC, Nodes, or_skip};

use crate::environment::{outcome, refused};
use crate::lengths::{all_sizes, fewer_sizes};
use crate::messages::there_and_back;
use crate::rounds::kill_rounds;
use crate::start;

/// Headers of IPv6 and UDP, and the Ethernet header inside.
const OVERHEAD: u64 = 40 + 8 + 14;

/// What the addresses of all nodes begin with.
const NET: &str = "2001:db8:0:78::";

/// The host `number` of the network `net`, as text: the last 32 bits say both.
fn address(net: usize, number: usize) -> String {
    format!("{NET}a4e:{net:x}{number:02x}")
}

fn udp(net: usize, number: usize) -> String {
    format!("udp:[{}]/96", address(net, number))
}

/// Gives an interface an address at once: nobody else can have it.
fn give(nodes: &Nodes, (node, name): (usize, &str), ip: &str) -> Result<String, String> {
    nodes.ip(node, &format!("addr add {ip} dev {name} nodad"))
}

/// Two nodes of one segment.
fn pair(mtu: usize) -> Option<Nodes> {
    let made = Nodes::pair(mtu).and_then(|nodes| {
        for node in [0, 1] {
            give(&nodes, (node, FABRIC), &format!("{}/96", address(0, node + 1)))?;
        }
        Ok(nodes)
    });
    or_skip(made)
}

/// Two networks of one prefix, and a router between them; links carry `mtu` bytes.
fn routed(mtu: usize) -> Option<Nodes> {
    let made = Nodes::new(3).and_then(|nodes| {
        for node in [0, 1] {
            let port = format!("port{node}");
            nodes.veth([(node, FABRIC), (2, &port)], mtu)?;
            give(&nodes, (node, FABRIC), &format!("{}/120", address(node, 7)))?;
            give(&nodes, (2, &port), &format!("{}/120", address(node, 1)))?;
            nodes.ip(node, &format!("route add default via {}", address(node, 1)))?;
        }
        nodes.run(2, "sysctl -qw net.ipv6.conf.all.forwarding=1")?;
        Ok(nodes)
    });
    or_skip(made)
}

#[test]
fn every_length_inside_udp_over_ipv6() {
    for (mtu, ports) in [
        (1500, [udp(0, 1), udp(0, 2)]),
        (9000, [format!("udp:{FABRIC}/96"), format!("udp:[{NET}]/96")]),
    ] {
        let Some(nodes) = pair(mtu) else { return };
        // SLAAC is none of ours: an interface's first address is the one that was given.
        there_and_back(&nodes, [&ports[0], &ports[1]], |found| {
            assert_eq!(found as u64, mtu as u64 - OVERHEAD);
            all_sizes(found)
        });
    }
}

/// Loss by our port one way, by the kernel the other.
#[test]
fn every_length_inside_udp_over_ipv6_that_gets_lost() {
    let Some(nodes) = pair(9000) else { return };
    if or_skip(nodes.lose(0, FABRIC, 5)).is_some() {
        let port = format!("fault(loss=0.05,reorder=0.05,seed=5):{}", udp(0, 1));
        there_and_back(&nodes, [&port, &udp(0, 2)], fewer_sizes);
    }
}

#[test]
fn kills_inside_udp_over_ipv6() {
    let Some(nodes) = pair(1500) else { return };
    let begin = |place: usize, _name: &str| {
        start(&nodes, place, "traffic", &format!("{}:50000", udp(0, place + 1)))
    };
    kill_rounds("kills-udp6", begin, 8, 5);
}

/// Goal: a router whose other side carries less is found before data is lost, and datagrams are not
/// fragmented.
#[test]
fn a_router_of_ipv6_that_carries_less_is_found() {
    for at in [0, 1] {
        let Some(nodes) = routed(9000) else { return };
        nodes.ip(2, &format!("link set port{at} mtu 1400")).unwrap();
        let sizes = [0, 64, 1400, 1500, 4096, 8900, 64 << 10, 1 << 20];
        // Few messages may be over before the search is.
        let mut lengths = [1, 20, 200].into_iter().map(|times| {
            let ports = [&*udp(0, 7), &*udp(1, 7)];
            there_and_back(&nodes, ports, |_mtu| sizes.repeat(times)).frame_max
        });
        assert!(lengths.any(|len| (1000..=1400 - OVERHEAD).contains(&len)));
        for node in [0, 1] {
            let seen = nodes.run(node, "cat /proc/thread-self/net/snmp6").unwrap();
            let made = seen.lines().find(|line| line.starts_with("Ip6FragCreates")).unwrap();
            assert_eq!(made.split_whitespace().nth(1), Some("0"), "{made}");
        }
    }
}

/// Goal: the byte of IPv6 says that datagrams may be marked, and marks are noticed and echoed.
#[test]
fn ecn_marks_of_an_ipv6_router_are_echoed() {
    let Some(nodes) = routed(1500) else { return };
    let hook = "{ type filter hook forward priority 0 ; }";
    let rule = format!("ip6 saddr {} ip6 ecn ect0 ip6 ecn set ce", address(0, 7));
    let made = nodes
        .run(2, "nft add table ip6 marks")
        .and_then(|_| nodes.run(2, &format!("nft add chain ip6 marks ce {hook}")))
        .and_then(|_| nodes.run(2, &format!("nft add rule ip6 marks ce {rule}")));
    if or_skip(made).is_none() {
        return;
    }
    let counts = there_and_back(&nodes, [&udp(0, 7), &udp(1, 7)], |mtu| {
        vec![0, 100, mtu - 38, mtu + 1, 1 << 20, 4 << 20]
    });
    assert_eq!((counts.marked, counts.refused), (0, 0), "{counts:?}");
    assert!(counts.echoes > 10, "{counts:?}");
}

/// Goal: a host by its IPv6 address is the peer by arithmetic, and one outside of the prefix is
/// nobody.
#[test]
fn hosts_of_the_prefix_are_known_by_their_addresses() {
    let Some(nodes) = pair(1500) else { return };
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| {
            nodes.enter(0)?;
            let mut hints = Info::default();
            hints.domain_attr.name = Some(udp(0, 1));
            let ask = |node: &str| {
                let none = InfoFlags::empty();
                getinfo(API_VERSION, Some(node), Some("52003"), none, Some(&hints))
            };
            let found = ask(&address(0, 2)).map(|all| all[0].dest_addr.clone().unwrap());
            let outside = ["2001:db8:0:79::a4e:2", "10.78.0.2"].map(|node| ask(node).err());
            Ok::<_, String>((found.unwrap(), outside))
        });
        let Some((found, outside)) = or_skip(asked.join().unwrap()) else { return };
        let peer = barewire::EpAddr::from_bytes(found[..].first_chunk().unwrap()).unwrap();
        let place = barewire_driver::backend::udp::addr_of(peer.station.mac).unwrap();
        assert_eq!((place.to_string().as_str(), peer.ep), ("10.78.0.2:52003", 52003));
        for e in outside {
            assert_eq!(e.unwrap().fi_errno(), FI_ENODATA);
        }
    });
}

/// Goal: processes of a node whose addresses are alike but for the prefix, or for the version of
/// IP, each have a near side of their own.
#[test]
fn hosts_of_two_prefixes_are_not_near() {
    let Some(nodes) = pair(1500) else { return };
    give(&nodes, (0, FABRIC), "2001:db8:0:79::a4e:1/96").unwrap();
    let ports = ["udp:10.78.0.1".into(), udp(0, 1), "udp:[2001:db8:0:79::a4e:1]/96".into()];
    let open = |port: &String| start(&nodes, 0, "opener", &format!("{port}:52000,near=yes"));
    let all: Vec<_> = ports.iter().map(open).collect();
    let addresses: Vec<_> = all.iter().map(|opener| opener.addr.clone()).collect();
    for mut opener in all {
        opener.say("END");
        opener.finish();
    }
    // The same station, opened three times.
    let station = |said: &String| said.split(' ').nth(1).map(str::to_owned);
    assert!(addresses.iter().all(|said| said.starts_with("0 ")), "{addresses:?}");
    assert!(addresses.iter().all(|said| station(said) == station(&addresses[0])));
}

#[test]
fn what_an_operator_gets_wrong_with_ipv6() {
    let Some(nodes) = pair(1500) else { return };
    assert_eq!(outcome(&nodes, "opener", &udp(0, 1)).0, 0);
    refused(&nodes, &udp(0, 2), FI_ENODEV, &["[2001:db8:0:78::a4e:1]/96", "udp:ADDRESS"]);
    refused(&nodes, &format!("udp:[{NET}a4e:1]"), FI_EINVAL, &["write udp:[2001:db8::a01:107]/96"]);
    refused(&nodes, &format!("{},mtu=1500", udp(0, 1)), FI_EINVAL, &["mtu=1438"]);
    refused(&nodes, &format!("{}:80", udp(0, 1)), FI_EINVAL, &["/96:50000"]);
    refused(&nodes, "udp:[2001:db8:7::]/96", FI_EINVAL, &["fits udp:[2001:db8:7::]/96"]);
    // One that the kernel still asks for.
    nodes.ip(0, &format!("addr add {}/96 dev {FABRIC}", address(0, 9))).unwrap();
    let (code, line) = outcome(&nodes, "opener", &udp(0, 9));
    assert!(code == 0 || code == FI_ENODEV && line.contains("ip -6 addr"), "{code} {line}");
    nodes.ip(0, &format!("addr flush dev {FABRIC}")).unwrap();
    refused(&nodes, &format!("udp:{FABRIC}/96"), FI_ENODEV, &["nor an interface with one"]);
}

const BELOW: &str = "afpacket:fab0";

/// The port past the kernel at a host of [`pair`], over `below`.
fn over(below: &str, number: usize) -> String {
    format!("ip([{}]/96):{below}", address(0, number))
}

/// The same at a node of [`routed`].
fn by_router(node: usize) -> String {
    format!("ip([{}]/120,gw=[{}]):{BELOW}", address(node, 7), address(node, 1))
}

/// Goal: the datagrams are those of the kernel's stack, whoever begins, and both take the other's
/// sums and trains.
#[test]
fn every_length_between_ip_and_udp_over_ipv6() {
    for mtu in [1500, 9000] {
        let Some(nodes) = pair(mtu) else { return };
        let ports = [over(BELOW, 1), over(BELOW, 2)];
        there_and_back(&nodes, [&ports[0], &ports[1]], |found| {
            assert_eq!(found as u64, mtu as u64 - OVERHEAD);
            all_sizes(found)
        });
        there_and_back(&nodes, [&ports[0], &udp(0, 2)], all_sizes);
        there_and_back(&nodes, [&udp(0, 1), &ports[1]], all_sizes);
    }
}

/// Goal: addresses that no kernel has are asked for and answered by the ports alone, whoever asks;
/// with loss, which takes questions and answers too.
#[test]
fn addresses_of_ipv6_of_its_own() {
    let Some(nodes) = pair(1500) else { return };
    there_and_back(&nodes, [&over(BELOW, 0x65), &over(BELOW, 0x66)], fewer_sizes);
    there_and_back(&nodes, [&over(BELOW, 0x65), &udp(0, 2)], fewer_sizes);
    let lossy = over(&format!("fault(loss=0.05,dup=0.02,corrupt=0.02,seed=53):{BELOW}"), 0x67);
    there_and_back(&nodes, [&lossy, &udp(0, 2)], fewer_sizes);
    let port = format!("ip([{}]/96,dscp=46,port=60000,mtu=1000):{BELOW}", address(0, 1));
    there_and_back(&nodes, [&port, &udp(0, 2)], |mtu| {
        assert_eq!(mtu, 1000);
        fewer_sizes(mtu)
    });
}

#[test]
fn every_length_through_a_router_of_ipv6() {
    let Some(nodes) = routed(1500) else { return };
    let port = by_router;
    there_and_back(&nodes, [&port(0), &port(1)], fewer_sizes);
    there_and_back(&nodes, [&port(0), &udp(1, 7)], fewer_sizes);
    there_and_back(&nodes, [&udp(0, 7), &port(1)], fewer_sizes);
    // By the router's address of the link, and where a host is a network of its own.
    nodes.ip(2, "addr add fe80::1/64 dev port0 nodad").unwrap();
    for len in [120, 128] {
        let port = format!("ip([{}]/{len},gw=fe80::1):{BELOW}", address(0, 7));
        there_and_back(&nodes, [&port, &udp(1, 7)], fewer_sizes);
    }
}

/// Past the kernel a path that carries less is found by the fabric's probes alone.
#[test]
fn a_router_of_ipv6_that_carries_less_is_found_past_the_kernel() {
    let Some(nodes) = routed(9000) else { return };
    nodes.ip(2, "link set port1 mtu 1400").unwrap();
    let sizes = [0, 64, 1400, 1500, 4096, 8900, 64 << 10, 1 << 20];
    let mut lengths = [1, 20, 200].into_iter().map(|times| {
        let ports = [&*by_router(0), &*udp(1, 7)];
        there_and_back(&nodes, ports, |_mtu| sizes.repeat(times)).frame_max
    });
    assert!(lengths.any(|len| (1000..=1400 - OVERHEAD).contains(&len)));
}

#[test]
fn kills_inside_ip_over_ipv6() {
    let Some(nodes) = pair(1500) else { return };
    let begin =
        |place: usize, _name: &str| start(&nodes, place, "traffic", &over(BELOW, place + 1));
    kill_rounds("kills-ip6", begin, 8, 55);
}

#[test]
fn every_length_inside_ip_over_xdp_and_ipv6() {
    for mode in ["native", "generic"] {
        let Some(nodes) = pair(1500) else { return };
        for node in [0, 1] {
            // A program in the stack is given a train in one piece, which no buffer holds.
            nodes.ip(node, &format!("link set {FABRIC} gso_max_segs 1")).unwrap();
        }
        let below = format!("xdp:fab0,mode={mode}");
        let (code, line) = outcome(&nodes, "opener", &over(&below, 1));
        if code == FI_EACCES || line.contains("CONFIG_XDP_SOCKETS") {
            println!("SKIPPED: {line}");
            return;
        }
        there_and_back(&nodes, [&over(&below, 1), &over(&below, 2)], fewer_sizes);
        there_and_back(&nodes, [&over(&below, 1), &udp(0, 2)], fewer_sizes);
        // Addresses that the kernel does not answer for.
        there_and_back(&nodes, [&over(&below, 0x65), &over(&below, 0x66)], fewer_sizes);
    }
}

#[test]
fn what_an_operator_gets_wrong_past_the_kernel() {
    let Some(nodes) = pair(1500) else { return };
    let port = |of: &str| format!("ip({of}):{BELOW}");
    assert_eq!(outcome(&nodes, "opener", &over(BELOW, 1)).0, 0);
    // The other kernel has it, and says so.
    let has = format!("has the address {NET}a4e:2");
    refused(&nodes, &over(BELOW, 2), FI_EADDRINUSE, &[&has]);
    refused(&nodes, &port("[2001:db8::a4e:1]"), FI_EINVAL, &["ip([2001:db8::a01:107]/96):PORT"]);
    refused(&nodes, &port("[2001:db8::a4e:1]/64"), FI_EINVAL, &["write 96, or up to 128"]);
    let routed = port("[2001:db8::a4e:1]/96,gw=fe80::1");
    refused(&nodes, &routed, FI_EINVAL, &["leave out gw=", "97 to 128"]);
    refused(&nodes, &port("[2001:db8::a4e:1]/96,mtu=1500"), FI_EINVAL, &["mtu=1438"]);
    let named = format!("ip([{}]/96,port=50000):{BELOW}", address(0, 1));
    let mut first = start(&nodes, 0, "opener", &named);
    refused(&nodes, &named, FI_EADDRINUSE, &["in use by another process"]);
    // The kernel's socket keeps `udp:` from it as well.
    refused(&nodes, &format!("{}:50000", udp(0, 1)), FI_EADDRINUSE, &["in use"]);
    first.say("END");
    first.finish();
}
