//! The port `xdp` on both ends of a wire, with its program in the driver and in the stack: what
//! `afpacket` does it does, beside everything else that the interface carries.

use std::io::{Read, Write};
use std::net::{Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, TcpStream};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use barewire::errno::*;
use barewire_driver::open::open;
use barewire_tests::nodes::{FABRIC, Nodes, address, or_skip};

use crate::environment::{outcome, refused};
use crate::lengths::{all_sizes, fewer_sizes};
use crate::messages::{AFPACKET, there_and_back};
use crate::near::two_by_two;
use crate::raw::RawSocket;
use crate::rounds::kill_rounds;
use crate::stream::{DOWN, NOTICED, Stream, lowered_mtu, removed};
use crate::supervisor::PATIENCE;
use crate::{foreign, start};

pub(crate) const NATIVE: &str = "xdp:fab0,mode=native";
pub(crate) const GENERIC: &str = "xdp:fab0,mode=generic";

/// Two nodes, if AF_XDP works on a wire between such here.
pub(crate) fn pair(mtu: usize) -> Option<Nodes> {
    fit(or_skip(Nodes::pair(mtu))?)
}

/// The nodes, if AF_XDP works there: that takes rights of the machine's root.
pub(crate) fn fit(nodes: Nodes) -> Option<Nodes> {
    assert!(NATIVE.contains(FABRIC));
    let (code, line) = outcome(&nodes, "opener", "xdp:fab0");
    let is_lacking = code == FI_EACCES || line.contains("CONFIG_XDP_SOCKETS");
    or_skip(if is_lacking { Err(line) } else { Ok(nodes) })
}

#[test]
fn every_length_over_xdp() {
    for port in [NATIVE, GENERIC] {
        let Some(nodes) = pair(1500) else { return };
        there_and_back(&nodes, [port; 2], |mtu| {
            assert_eq!(mtu, 1500);
            all_sizes(mtu)
        });
    }
}

/// Goal: a port is on the wire what any other is there.
#[test]
fn every_length_between_xdp_and_a_raw_socket() {
    for port in [NATIVE, GENERIC] {
        let Some(nodes) = pair(1500) else { return };
        there_and_back(&nodes, [port, AFPACKET], all_sizes);
    }
}

/// Goal: an interface that carries more than a buffer holds keeps its MTU, and the port has the
/// longest that fits one.
#[test]
fn every_length_on_an_interface_of_jumbo_frames() {
    for port in [NATIVE, GENERIC] {
        let Some(nodes) = pair(9000) else { return };
        let mut seen = 0;
        there_and_back(&nodes, [port, AFPACKET], |mtu| {
            seen = mtu;
            all_sizes(mtu)
        });
        assert_eq!(seen, 3826);
        refused(&nodes, &format!("{port},mtu=9000"), FI_EINVAL, &["9000", "mtu=3826"]);
    }
}

#[test]
fn every_length_over_xdp_that_loses_frames() {
    for port in [NATIVE, GENERIC] {
        let Some(nodes) = pair(1500) else { return };
        let port = format!("fault(loss=0.05,seed=41):{port}");
        there_and_back(&nodes, [&port, &port], fewer_sizes);
    }
}

/// With buffers for a few frames, which are lost in every burst.
#[test]
fn every_length_over_xdp_with_few_buffers() {
    let Some(nodes) = pair(1500) else { return };
    let port = format!("{NATIVE},ring=64");
    there_and_back(&nodes, [&port, &port], fewer_sizes);
}

/// With a thread that does the driver's work.
#[test]
fn every_length_over_xdp_that_polls_busily() {
    let Some(nodes) = pair(1500) else { return };
    let port = format!("{NATIVE},busypoll=yes");
    there_and_back(&nodes, [&port, &port], fewer_sizes);
}

#[test]
fn kills_over_xdp() {
    for (port, seed) in [(NATIVE, 31), (GENERIC, 33)] {
        let Some(nodes) = pair(1500) else { return };
        let begin = |place, _name: &str| start(&nodes, place, "traffic", port);
        kill_rounds("kills-xdp", begin, 8, seed);
    }
}

#[test]
fn an_interface_under_xdp_changes() {
    if pair(1500).is_none() {
        return;
    }
    for port in [NATIVE, GENERIC] {
        let Some(mut stream) = Stream::patient(port) else { return };
        stream.outlives(DOWN[0], DOWN[1]);
        stream.end();
        let Some(stream) = Stream::new(port) else { return };
        stream.ends(0, DOWN[0], &[FI_EHOSTUNREACH], NOTICED);
        removed(port);
        lowered_mtu(port);
    }
}

/// What `ip` says of the program on an interface.
pub(crate) fn program(nodes: &Nodes) -> Option<String> {
    let seen = nodes.ip(0, "-d link show dev fab0").unwrap();
    seen.lines().find(|line| line.contains("prog/xdp")).map(str::to_owned)
}

/// Goal: whoever was killed leaves the interface as it was, and the next process has it at once;
/// two at a time have not, and are told of the switch.
#[test]
fn one_process_has_an_interface_and_leaves_nothing() {
    for port in [NATIVE, GENERIC] {
        let Some(nodes) = pair(1500) else { return };
        let mut opened = start(&nodes, 0, "opener", port);
        for _ in 0..10 {
            assert!(opened.addr.starts_with("0 "), "{}", opened.addr);
            assert!(program(&nodes).is_some());
            refused(
                &nodes,
                port,
                FI_EBUSY,
                &["has the interface already", "barewire switch --port xdp:fab0"],
            );
            opened.kill();
            opened = start(&nodes, 0, "opener", port);
        }
        opened.kill();
        let start_of = Instant::now();
        while program(&nodes).is_some() {
            assert!(start_of.elapsed() < Duration::from_secs(1), "{:?}", program(&nodes));
        }
    }
}

/// Goal: what an operator gets wrong is told with what mends it.
#[test]
fn interfaces_that_are_not_fit_for_xdp() {
    let Some(nodes) = pair(1500) else { return };
    refused(&nodes, "xdp:eth9", FI_ENODEV, &["no such interface", "fab0", "ip link"]);
    refused(&nodes, "xdp:fab0,queue=7", FI_EINVAL, &["one receive queue", "queue=0"]);
    let (code, line) = outcome(&nodes, "powerless", "xdp:fab0");
    assert_eq!(code, FI_EACCES, "{line}");
    let caps = "setcap cap_net_raw,cap_net_admin,cap_bpf+ep";
    assert!(line.contains(caps) && line.contains("barewire switch --port xdp:fab0"), "{line}");
}

/// Goal: the processes of two nodes share interfaces that switches have.
#[test]
fn two_nodes_of_two_processes_behind_switches_on_xdp() {
    for nic in [NATIVE, GENERIC] {
        let Some(nodes) = pair(1500) else { return };
        let switches = [0, 1].map(|node| start(&nodes, node, "switch", nic));
        two_by_two(&nodes, "xdp:fab0,switch=yes,near=yes", 1500);
        crate::switch::end(switches);
    }
}

/// Goal: the next switch has the interface that a killed one had, and no operation fails.
#[test]
fn killed_switches_on_xdp_lose_no_operation() {
    for (nic, seed) in [(NATIVE, 37), (GENERIC, 39)] {
        let Some(nodes) = pair(1500) else { return };
        crate::switch::kill_switches(&nodes, nic, "xdp:fab0,switch=yes,near=yes", 6, seed);
    }
}

/// Goal: what is no frame of ours, or not for us, passes; a frame that is too long for the port is
/// counted.
#[test]
fn foreign_frames_on_xdp_change_only_counters() {
    for mode in ["native", "generic"] {
        let Some(nodes) = pair(9000) else { return };
        let counts = foreign::beside(&nodes, &format!("xdp:fab0,mode={mode},mtu=1500"));
        println!("{mode}: {counts:?}");
    }
}

/// Goal: IPv4 with ARP, IPv6 with its neighbour discovery, and TCP over both go on as without a
/// program while it is attached, works, is killed and attached again. Method: connections between
/// the nodes in which every byte is looked at, beside ours.
#[test]
fn everything_else_on_the_interface_is_untouched() {
    for port in [NATIVE, GENERIC] {
        let Some(nodes) = pair(1500) else { return };
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (ready, at) = std::sync::mpsc::channel();
            let (nodes, is_over) = (&nodes, &is_over);
            let echo = scope.spawn(move || {
                nodes.enter(1).unwrap();
                let listen = TcpListener::bind("[::]:7000").unwrap();
                ready.send(()).unwrap();
                let [a, b] = [0, 1].map(|_| {
                    let stream = listen.accept().unwrap().0;
                    std::thread::spawn(|| echo(stream))
                });
                a.join().unwrap() + b.join().unwrap()
            });
            at.recv().unwrap();
            let v4: SocketAddr = format!("{}:7000", address(1)).parse().unwrap();
            let v6 = SocketAddr::V6(link_local(nodes));
            let calls = [v4, v6].map(|to| {
                scope.spawn(move || {
                    nodes.enter(0).unwrap();
                    call(to, is_over)
                })
            });
            let begin = |place, _name: &str| start(nodes, place, "traffic", port);
            kill_rounds("beside-xdp", begin, 4, 35);
            // Addresses are asked for anew.
            nodes.ip(0, "neigh flush dev fab0").unwrap();
            std::thread::sleep(Duration::from_millis(300));
            is_over.store(true, Relaxed);
            let counts = calls.map(|call| call.join().unwrap());
            assert!(counts.iter().all(|count| *count > 100), "{port}: {counts:?}");
            assert!(echo.join().unwrap() > 0);
            println!("{port}: {counts:?} exchanges over IPv4 and IPv6");
        });
    }
}

/// The IPv6 address of node 1, as node 0 writes it, once both may use theirs.
fn link_local(nodes: &Nodes) -> SocketAddrV6 {
    let start_of = Instant::now();
    let [_, ip] = [0, 1].map(|node| {
        loop {
            let seen = nodes.ip(node, "-6 -o addr show dev fab0 -tentative").unwrap();
            let mut words = seen.split_whitespace().skip_while(|word| *word != "inet6");
            if let Some(of) = words.nth(1) {
                return of.split('/').next().unwrap().parse::<Ipv6Addr>().unwrap();
            }
            assert!(start_of.elapsed() < PATIENCE, "no IPv6 address: {seen}");
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    let index = nodes.ip(0, "-o link show dev fab0").unwrap();
    SocketAddrV6::new(ip, 7000, 0, index.split(':').next().unwrap().parse().unwrap())
}

fn echo(mut stream: TcpStream) -> usize {
    let (mut bytes, mut all) = ([0; 4096], 0);
    loop {
        let len = stream.read(&mut bytes).unwrap();
        if len == 0 {
            return all;
        }
        all += len;
        stream.write_all(&bytes[..len]).unwrap();
    }
}

/// Sends to an echo until it is over, and says how often.
fn call(to: SocketAddr, is_over: &AtomicBool) -> u64 {
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut count = 0;
    while !is_over.load(Relaxed) {
        let sent = crate::worker::pattern(3000, count + 1);
        stream.write_all(&sent).unwrap();
        let mut back = vec![0; sent.len()];
        stream.read_exact(&mut back).unwrap();
        assert!(back == sent, "{to}: other bytes came back");
        count += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    count
}

/// Goal: a flood ends nothing: frames come or are counted, and the buffers all come back. Method: a
/// raw socket that sends without a pause to a port with the fewest buffers, which polls.
#[test]
fn a_flood_is_received_or_counted() {
    for mode in ["native", "generic"] {
        let Some(nodes) = pair(1500) else { return };
        let nodes = &nodes;
        let seen = std::thread::scope(|scope| {
            let poll = move || {
                nodes.enter(0).unwrap();
                let mut port = open(&format!("xdp:fab0,mode={mode},ring=64")).unwrap();
                let own = port.caps().station;
                let flood = scope.spawn(move || {
                    nodes.enter(1).unwrap();
                    let socket = RawSocket::open(FABRIC).unwrap();
                    let frame =
                        [&own.mac.0[..], &[2, 9, 9, 9, 9, 9, 0x88, 0xb5], &[0; 50]].concat();
                    let until = Instant::now() + Duration::from_secs(1);
                    while Instant::now() < until {
                        // Where the wire is full it says so.
                        let _ = socket.send(&frame);
                    }
                });
                let mut sink = |_: &barewire_driver::frame::RxFrame<'_>| {};
                while !flood.is_finished() {
                    port.rx_burst(32, &mut sink).unwrap();
                }
                for _ in 0..10_000 {
                    port.rx_burst(32, &mut sink).unwrap();
                }
                port.counters()
            };
            scope.spawn(poll).join().unwrap()
        });
        println!("{mode}: {seen:?}");
        // Many times as many as there are buffers, however little of a processor the poll had.
        assert!(seen.rx_frames > 64 * 10, "{seen:?}");
    }
}

/// Goal: frames for another station are not taken from the interface, and those for everybody are
/// only where it was asked for.
#[test]
fn frames_for_others_pass_the_program() {
    let Some(nodes) = pair(1500) else { return };
    for (port, taken) in [("xdp:fab0", 2), ("xdp:fab0,promisc=yes", 3)] {
        let count = std::thread::scope(|scope| {
            let nodes = &nodes;
            let count = move || {
                nodes.enter(0).unwrap();
                let mut port = open(port).unwrap();
                let own = port.caps().station;
                let there = scope.spawn(move || {
                    nodes.enter(1).unwrap();
                    let socket = RawSocket::open(FABRIC).unwrap();
                    let other = [2, 9, 9, 9, 9, 9];
                    for dst in [own.mac.0, other, [0xff; 6]] {
                        let frame = [&dst[..], &other, &[0x88, 0xb5], &[0; 50]].concat();
                        socket.send(&frame).unwrap();
                    }
                });
                there.join().unwrap();
                let (mut count, until) = (0, Instant::now() + Duration::from_millis(300));
                while Instant::now() < until {
                    let mut sink = |_: &barewire_driver::frame::RxFrame<'_>| {};
                    count += port.rx_burst(32, &mut sink).unwrap();
                }
                count
            };
            scope.spawn(count).join().unwrap()
        });
        assert_eq!(count, taken, "{port}");
    }
}
