//! The port `ip(...)`: IPv4 and UDP of our own, by raw sockets and past the stack, with itself and
//! with `udp:`, which the kernel's stack carries, on one segment and through a router.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use barewire::errno::*;
use barewire_tests::nodes::{FABRIC, Nodes, address, or_skip};

use crate::environment::{outcome, refused};
use crate::lengths::{self, all_sizes, fewer_sizes};
use crate::messages::{UDP, there_and_back};
use crate::rounds::kill_rounds;
use crate::start;
use crate::supervisor::PATIENCE;

/// Two nodes whose kernels have the addresses too.
fn pair(mtu: usize) -> Option<Nodes> {
    or_skip(Nodes::pair(mtu))
}

/// The port of a node of a pair, over `below`.
fn over(below: &str, node: usize) -> String {
    format!("ip({}/24):{below}", address(node))
}

const BELOW: &str = "afpacket:fab0";

#[test]
fn every_length_inside_ip() {
    let Some(nodes) = pair(1500) else { return };
    let ports = [0, 1].map(|node| over(BELOW, node));
    there_and_back(&nodes, [&ports[0], &ports[1]], |mtu| {
        assert_eq!(mtu, 1500 - 42);
        all_sizes(mtu)
    });
}

/// Goal: the datagrams are those of the kernel's stack, whoever begins.
#[test]
fn every_length_between_ip_and_udp() {
    for mtu in [1500, 9000] {
        let Some(nodes) = pair(mtu) else { return };
        let ports = [0, 1].map(|node| over(BELOW, node));
        there_and_back(&nodes, [&ports[0], UDP], all_sizes);
        there_and_back(&nodes, [UDP, &ports[1]], all_sizes);
    }
}

/// With sums, with another mark and a certain UDP port.
#[test]
fn every_option_is_understood_by_the_kernel() {
    let Some(nodes) = pair(1500) else { return };
    let port = format!("ip({}/24,sum=yes,dscp=46,port=60000,mtu=1000):{BELOW}", address(0));
    there_and_back(&nodes, [&port, UDP], |mtu| {
        assert_eq!(mtu, 1000);
        fewer_sizes(mtu)
    });
}

/// Goal: addresses that no kernel has are asked for and answered by the ports alone.
#[test]
fn addresses_of_its_own() {
    let Some(nodes) = pair(1500) else { return };
    let port = |host: u8| format!("ip(10.78.0.{host}/24):{BELOW}");
    there_and_back(&nodes, [&port(101), &port(102)], fewer_sizes);
    there_and_back(&nodes, [&port(101), UDP], fewer_sizes);
}

#[test]
fn every_length_inside_ip_that_gets_lost() {
    let Some(nodes) = pair(1500) else { return };
    // Outside and inside of the datagrams, which takes ARP as well.
    let ports = [
        format!("fault(loss=0.05,reorder=0.05,seed=51):{}", over(BELOW, 0)),
        over(&format!("fault(loss=0.05,dup=0.02,corrupt=0.02,seed=53):{BELOW}"), 1),
    ];
    there_and_back(&nodes, [&ports[0], &ports[1]], fewer_sizes);
    there_and_back(&nodes, [&ports[0], UDP], fewer_sizes);
}

#[test]
fn kills_inside_ip() {
    let Some(nodes) = pair(1500) else { return };
    let begin = |place, _name: &str| start(&nodes, place, "traffic", &over(BELOW, place));
    kill_rounds("kills-ip", begin, 8, 55);
}

/// Two networks, and a router between them.
pub(crate) fn routed() -> Option<Nodes> {
    routed_of(1500)
}

/// The same, of links that carry `mtu` bytes.
pub(crate) fn routed_of(mtu: usize) -> Option<Nodes> {
    let made = Nodes::new(3).and_then(|nodes| {
        for node in [0, 1] {
            let port = format!("port{node}");
            nodes.veth([(node, FABRIC), (2, &port)], mtu)?;
            nodes.ip(node, &format!("addr add 10.78.{node}.7/24 dev {FABRIC}"))?;
            nodes.ip(2, &format!("addr add 10.78.{node}.1/24 dev {port}"))?;
            nodes.ip(node, &format!("route add default via 10.78.{node}.1"))?;
        }
        nodes.run(2, "sysctl -qw net.ipv4.ip_forward=1")?;
        Ok(nodes)
    });
    or_skip(made)
}

#[test]
fn every_length_through_a_router() {
    let Some(nodes) = routed() else { return };
    let port = by_router;
    there_and_back(&nodes, [&port(0), &port(1)], all_sizes);
    there_and_back(&nodes, [&port(0), UDP], fewer_sizes);
    there_and_back(&nodes, [UDP, &port(1)], fewer_sizes);
    // As in a cloud, where a host is a network of its own.
    let alone = |node: usize| format!("ip(10.78.{node}.7/32,gw=10.78.{node}.1):{BELOW}");
    there_and_back(&nodes, [&alone(0), &alone(1)], fewer_sizes);
}

/// The port of a node of [`routed`].
pub(crate) fn by_router(node: usize) -> String {
    format!("ip(10.78.{node}.7/24,gw=10.78.{node}.1):{BELOW}")
}

/// Goal: processes of a host share an IP address, each with a UDP port of its own: an ARP request
/// is answered with the MAC of their NIC, and each process gets its own datagrams.
#[test]
fn processes_share_an_address() {
    let Some(nodes) = pair(1500) else { return };
    let port = |host: u8| format!("ip(10.78.0.{host}/24):{BELOW}");
    let mut first = start(&nodes, 1, "opener", &port(102));
    there_and_back(&nodes, [&port(101), &port(102)], fewer_sizes);
    there_and_back(&nodes, [UDP, &port(102)], fewer_sizes);
    first.say("END");
    first.finish();
}

/// Goal: datagrams through the memory between two processes, each with an address of its own.
#[test]
fn every_length_inside_ip_over_memif() {
    let Some(nodes) = or_skip(Nodes::new(1)) else { return };
    let port = |place: usize| {
        let role = ["client", "server"][place];
        format!("ip(10.79.0.{}/24):memif:@wires-ip,role={role}", place + 1)
    };
    lengths::there_and_back(|place, role| start(&nodes, 0, role, &port(place)), all_sizes);
}

/// What a node's kernel counts under a name of `/proc/net/snmp`.
fn counted(nodes: &Nodes, node: usize, of: &str, name: &str) -> u64 {
    let seen = nodes.run(node, "cat /proc/thread-self/net/snmp").unwrap();
    let mut lines = seen.lines().filter(|line| line.starts_with(of));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let at = names.split_whitespace().position(|word| word == name).unwrap();
    values.split_whitespace().nth(at).unwrap().parse().unwrap()
}

/// Two processes talk; while they do no kernel tells anybody that they are not there.
fn talk(nodes: &Nodes) {
    let refusals = || [0, 1].map(|node| counted(nodes, node, "Icmp:", "OutDestUnreachs"));
    let [mut caller, mut echo] = [(0, "caller"), (1, "echo")]
        .map(|(node, role)| start(nodes, node, role, &over(BELOW, node)));
    echo.say(&format!("PEER {}", caller.addr.split(' ').next().unwrap()));
    caller.say(&format!("PEER {}", echo.addr.clone()));
    let before = refusals();
    for len in [0, 1000, 1 << 20].repeat(20) {
        echo.say(&format!("SIZE {len}"));
        caller.say(&format!("CALL {len}"));
        caller.answer("BACK");
        echo.answer("ECHOED");
    }
    assert_eq!(refusals(), before);
    for mut worker in [echo, caller] {
        worker.say("END");
        worker.finish();
    }
}

/// Goal: a kernel that has the same address goes on with everything that is its own, and tells
/// nobody that the port is unreachable.
#[test]
fn the_kernel_beside_keeps_its_address() {
    let Some(nodes) = pair(1500) else { return };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (nodes, is_over) = (&nodes, &is_over);
        let (tell, at) = std::sync::mpsc::channel();
        scope.spawn(move || {
            if or_skip(nodes.enter(1)).is_none() {
                return;
            }
            let listen = TcpListener::bind("0.0.0.0:7000").unwrap();
            tell.send(()).unwrap();
            while let Ok((_stream, _)) = listen.accept() {
                if is_over.load(Relaxed) {
                    return;
                }
            }
        });
        if at.recv().is_err() {
            return;
        }
        let to: SocketAddr = format!("{}:7000", address(1)).parse().unwrap();
        let calls = scope.spawn(move || {
            nodes.enter(0).unwrap();
            let mut count = 0;
            while !is_over.load(Relaxed) {
                TcpStream::connect_timeout(&to, PATIENCE).unwrap();
                count += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
            // Ends the other, unless the one before has.
            let _ = TcpStream::connect_timeout(&to, PATIENCE);
            count
        });
        let talked = scope.spawn(|| talk(nodes)).join();
        is_over.store(true, Relaxed);
        let count = calls.join().unwrap();
        assert!(talked.is_ok());
        assert!(count > 50, "{count} connections");
    });
}

#[test]
fn every_length_inside_ip_over_xdp() {
    for mode in ["native", "generic"] {
        let Some(nodes) = pair(1500) else { return };
        for node in [0, 1] {
            // A program in the stack is given a train in one piece, which no buffer holds.
            nodes.ip(node, &format!("link set {FABRIC} gso_max_segs 1")).unwrap();
        }
        let below = format!("xdp:fab0,mode={mode}");
        let (code, line) = outcome(&nodes, "opener", &over(&below, 0));
        if code == FI_EACCES || line.contains("CONFIG_XDP_SOCKETS") {
            println!("SKIPPED: {line}");
            return;
        }
        let ports = [0, 1].map(|node| over(&below, node));
        there_and_back(&nodes, [&ports[0], &ports[1]], all_sizes);
        let raw = over(BELOW, 1);
        there_and_back(&nodes, [&ports[0], &raw], fewer_sizes);
        there_and_back(&nodes, [&ports[0], UDP], fewer_sizes);
        there_and_back(&nodes, [UDP, &ports[1]], fewer_sizes);
        // Addresses that the kernel does not answer for.
        let own = [101, 102].map(|host| format!("ip(10.78.0.{host}/24):{below}"));
        there_and_back(&nodes, [&own[0], &own[1]], fewer_sizes);
    }
}

#[test]
fn what_an_operator_gets_wrong() {
    let Some(nodes) = pair(1500) else { return };
    let port = |of: &str| format!("ip({of}):{BELOW}");
    assert_eq!(outcome(&nodes, "opener", &port("10.78.0.1/24")).0, 0);
    // The other kernel has it, and says so.
    refused(&nodes, &port("10.78.0.2/24"), FI_EADDRINUSE, &["has the address 10.78.0.2"]);
    refused(&nodes, &port("10.78.0.1"), FI_EINVAL, &["ip(10.1.1.7/24):PORT"]);
    refused(&nodes, &port("10.78.0.1/24,gw=10.79.0.1"), FI_EINVAL, &["ip route"]);
    refused(&nodes, &port("10.78.0.1/24,mtu=1500"), FI_EINVAL, &["mtu=1458"]);
    refused(&nodes, "ip(10.78.0.1/24):udp:fab0", FI_EINVAL, &["afpacket:"]);
    let mut first = start(&nodes, 0, "opener", &port("10.78.0.1/24,port=50000"));
    let says = ["in use by another process", "ss -ulnp"];
    refused(&nodes, &port("10.78.0.1/24,port=50000"), FI_EADDRINUSE, &says);
    // The kernel's socket keeps `udp:` from it as well.
    refused(&nodes, "udp:fab0:50000", FI_EADDRINUSE, &["in use"]);
    first.say("END");
    first.finish();
    assert_eq!(outcome(&nodes, "opener", &port("10.78.0.1/24,port=50000")).0, 0);
}
