//! The port `vlan(...)`: tags of our own over every kind of port and inside of `ip(...)`. It meets
//! the kernel's own VLANs in a guest (`tests/vfio/kernel.rs`).

use std::net::SocketAddrV4;
use std::time::{Duration, Instant};

use barewire::errno::*;
use barewire_driver::backend::udp::mac_of;
use barewire_driver::frame::{ETHERTYPE, RxFrame, TxFrame, address};
use barewire_driver::open::open;
use barewire_driver::port::{Port, Station, Tx};
use barewire_tests::nodes::{FABRIC, Nodes, address as ip_of, or_skip};

use crate::environment::{outcome, refused};
use crate::lengths::{all_sizes, fewer_sizes};
use crate::messages::{AFPACKET, UDP, there_and_back};
use crate::raw::RawSocket;

const TAGGED: &str = "vlan(100,pcp=3):afpacket:fab0";

fn pair() -> Option<Nodes> {
    or_skip(Nodes::pair(1500))
}

#[test]
fn every_length_with_a_tag() {
    let Some(nodes) = pair() else { return };
    there_and_back(&nodes, [TAGGED, "vlan(100):afpacket:fab0"], |mtu| {
        assert_eq!(mtu, 1496);
        all_sizes(mtu)
    });
    // A priority without a VLAN.
    there_and_back(&nodes, ["vlan(0,pcp=5):afpacket:fab0"; 2], fewer_sizes);
    let lossy = format!("vlan(100):fault(loss=0.05,dup=0.02,corrupt=0.02,seed=57):{AFPACKET}");
    there_and_back(&nodes, [&lossy, &format!("fault(loss=0.05,seed=59):{TAGGED}")], fewer_sizes);
}

/// Opens a port. The one before may be held for a moment by a process that another test is
/// starting.
fn open_when_free(port: &str) -> Box<dyn Port> {
    let begun = Instant::now();
    loop {
        match open(port) {
            Err(e) if e.errno() == libc::EBUSY && begun.elapsed() < Duration::from_secs(5) => {
                std::thread::sleep(Duration::from_millis(10));
            }
            opened => return opened.unwrap(),
        }
    }
}

/// How many of ten frames from node 0 by a port arrive at node 1 by another.
fn arriving(nodes: &Nodes, ports: [&str; 2]) -> usize {
    let (tell, at) = std::sync::mpsc::channel();
    let (sent, done) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let receiver = scope.spawn(move || {
            nodes.enter(1).unwrap();
            let mut port = open_when_free(ports[1]);
            tell.send(port.caps().station).unwrap();
            done.recv().unwrap();
            let (mut count, start) = (0, Instant::now());
            let mut sink = |frame: &RxFrame<'_>| {
                count += usize::from(frame.chunk_at(12) == Some(ETHERTYPE.to_be_bytes()));
            };
            while start.elapsed() < Duration::from_millis(50) {
                port.rx_burst(32, &mut sink).unwrap();
            }
            count
        });
        scope.spawn(move || {
            nodes.enter(0).unwrap();
            let mut port = open_when_free(ports[0]);
            let mut frame = vec![0; 64];
            frame[12..14].copy_from_slice(&ETHERTYPE.to_be_bytes());
            address(&mut frame, at.recv().unwrap(), port.caps().station);
            for _ in 0..10 {
                assert_eq!(port.tx(&TxFrame::whole(&frame)), Ok(Tx::Sent));
            }
            port.flush().unwrap();
            sent.send(()).unwrap();
        });
        receiver.join().unwrap()
    })
}

/// Goal: the tag of a provider (802.1ad) with the number of the VLAN is not the VLAN's.
#[test]
fn a_providers_tag_is_another() {
    let Some(nodes) = pair() else { return };
    let (nodes, len) = (&nodes, 64);
    std::thread::scope(|scope| {
        let receiver = scope.spawn(move || {
            nodes.enter(1).unwrap();
            let mut port = open("vlan(100):afpacket:fab0").unwrap();
            let to = port.caps().station;
            let sender = scope.spawn(move || {
                nodes.enter(0).unwrap();
                let socket = RawSocket::open(FABRIC).unwrap();
                for (number, kind) in [(1, 0x88a8_u16), (2, 0x8100), (3, 0x88a8), (4, 0x8100)] {
                    let mut frame = vec![number; len];
                    frame[12..14].copy_from_slice(&ETHERTYPE.to_be_bytes());
                    frame[14..40].fill(0);
                    address(&mut frame, to, Station::at([2, 0, 0, 0, 0, 9]));
                    let tag = [kind.to_be_bytes(), 100_u16.to_be_bytes()].concat();
                    frame.splice(12..12, tag);
                    socket.send(&frame).unwrap();
                }
            });
            sender.join().unwrap();
            let (mut got, start) = (Vec::new(), Instant::now());
            let mut sink = |frame: &RxFrame<'_>| got.extend(frame.chunk_at::<1>(len - 1));
            while start.elapsed() < Duration::from_millis(300) {
                port.rx_burst(32, &mut sink).unwrap();
            }
            got
        });
        assert_eq!(receiver.join().unwrap(), [[2], [4]]);
    });
}

/// A frame of the fabric in a datagram of IPv4 in an Ethernet frame with `tag`.
fn datagram(tag: Option<u16>, [from, to]: [SocketAddrV4; 2], payload: u8) -> Vec<u8> {
    let inside = [from, to].map(|at| Station::at(mac_of(at).unwrap().0));
    let mut frame = vec![payload; 64];
    frame[12..14].copy_from_slice(&ETHERTYPE.to_be_bytes());
    frame[14..40].fill(0);
    address(&mut frame, inside[1], inside[0]);
    let mut ip = vec![0x45, 0, 0, 28 + 64, 0, 0, 0x40, 0, 64, 17, 0, 0];
    ip.extend([from.ip().octets(), to.ip().octets()].concat());
    let words = ip.chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let sum: u32 = words.sum();
    ip[10..12].copy_from_slice(&(!(((sum & 0xffff) + (sum >> 16)) as u16)).to_be_bytes());
    let udp = [from.port(), to.port(), 8 + 64, 0].map(u16::to_be_bytes).concat();
    let tag = tag.map_or(vec![], |tag| [0x8100_u16, tag].map(u16::to_be_bytes).concat());
    [&[0xff; 6][..], &[2, 0, 0, 0, 0, 9], &tag, &[8, 0], &ip, &udp, &frame].concat()
}

/// Goal: around `afpacket` too, the kernel holds a datagram with a priority and no VLAN for one
/// without a tag, and no other tag for none.
#[test]
fn a_priority_alone_is_no_vlan_for_datagrams() {
    let Some(nodes) = pair() else { return };
    let nodes = &nodes;
    let places = [0, 1].map(|node| format!("{}:52000", ip_of(node)).parse().unwrap());
    std::thread::scope(|scope| {
        let receiver = scope.spawn(move || {
            nodes.enter(1).unwrap();
            let mut port = open(&format!("ip({}/24):afpacket:fab0", ip_of(1))).unwrap();
            let sender = scope.spawn(move || {
                nodes.enter(0).unwrap();
                let socket = RawSocket::open(FABRIC).unwrap();
                let tags = [None, Some(5 << 13), Some(5 << 13 | 100), Some(100), Some(0)];
                for (tag, number) in tags.into_iter().zip(1..) {
                    socket.send(&datagram(tag, places, number)).unwrap();
                }
            });
            sender.join().unwrap();
            let (mut got, start) = (Vec::new(), Instant::now());
            let mut sink = |frame: &RxFrame<'_>| got.extend(frame.chunk_at::<1>(63));
            while start.elapsed() < Duration::from_millis(300) {
                port.rx_burst(32, &mut sink).unwrap();
            }
            got
        });
        assert_eq!(receiver.join().unwrap(), [[1], [2], [5]]);
    });
}

/// Goal: a frame of another VLAN, or of none, is not taken, by ports whose tags the kernel takes
/// off as well as by those that bring them.
#[test]
fn vlans_are_apart() {
    let Some(nodes) = pair() else { return };
    let of = |tag: &str, kind: &str| match tag {
        "" => format!("{kind}:fab0"),
        tag => format!("vlan({tag}):{kind}:fab0"),
    };
    let mut kinds = vec!["afpacket"];
    if outcome(&nodes, "opener", "xdp:fab0").0 == 0 {
        kinds.push("xdp");
    }
    for kind in kinds {
        for from in ["", "100", "101,pcp=7", "0", "0,pcp=7"] {
            for to in ["", "100", "101", "0"] {
                // The kernel holds a priority alone for no tag.
                let is_taken = kind == "afpacket" && from.starts_with('0') && to.is_empty();
                let is_same = from.split(',').next() == Some(to);
                let want = if is_same || is_taken { 10 } else { 0 };
                let ports = [&of(from, "afpacket"), &*of(to, kind)];
                assert_eq!(arriving(&nodes, ports), want, "{ports:?}");
            }
        }
    }
}

#[test]
fn every_length_inside_ip_with_a_tag() {
    let Some(nodes) = pair() else { return };
    let port = |node: usize| format!("ip({}/24):{TAGGED}", ip_of(node));
    there_and_back(&nodes, [&port(0), &port(1)], |mtu| {
        assert_eq!(mtu, 1496 - 42);
        all_sizes(mtu)
    });
}

#[test]
fn every_length_over_xdp_with_a_tag() {
    for mode in ["native", "generic"] {
        let Some(nodes) = pair() else { return };
        let below = format!("vlan(100,pcp=3):xdp:fab0,mode={mode}");
        let (code, line) = outcome(&nodes, "opener", &below);
        if code == FI_EACCES || line.contains("CONFIG_XDP_SOCKETS") {
            println!("SKIPPED: {line}");
            return;
        }
        there_and_back(&nodes, [&below; 2], all_sizes);
        there_and_back(&nodes, [&below, TAGGED], fewer_sizes);
        let inside = |node: usize| format!("ip({}/24):{below}", ip_of(node));
        there_and_back(&nodes, [&inside(0), &inside(1)], fewer_sizes);
        let raw = format!("ip({}/24):{TAGGED}", ip_of(1));
        there_and_back(&nodes, [&inside(0), &raw], fewer_sizes);
    }
}

#[test]
fn what_an_operator_gets_wrong() {
    let Some(nodes) = pair() else { return };
    refused(&nodes, "vlan(4095):afpacket:fab0", FI_EINVAL, &["vlan(4094)"]);
    refused(&nodes, &format!("vlan(5):{UDP}"), FI_EINVAL, &["afpacket:"]);
    refused(&nodes, "vlan(5):afpacket:nothing0", FI_ENODEV, &["no such interface"]);
}
