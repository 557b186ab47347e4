//! Many processes behind one MAC: who gets which number, and which of them a frame reaches.

use std::process::Command;
use std::time::{Duration, Instant};

use barewire_driver::frame::{ETHERTYPE, RxFrame, address};
use barewire_driver::open::open;
use barewire_driver::port::{MacAddr, Port, Station};
use barewire_tests::nodes::{FABRIC, Nodes, or_skip};

use crate::raw::RawSocket;

/// How long a number that was given back may be held.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// Its number stands in its last byte.
fn frame(dst: Station, src: Station, number: u8) -> Vec<u8> {
    let mut frame = vec![0; 60];
    frame[12..14].copy_from_slice(&ETHERTYPE.to_be_bytes());
    frame[59] = number;
    address(&mut frame, dst, src);
    frame
}

/// Which frames each of the ports gets until those that are for it have come, and a while longer.
fn heard(ports: &mut [Box<dyn Port>]) -> Vec<Vec<u8>> {
    let mut got = vec![Vec::new(); ports.len()];
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        for (port, got) in ports.iter_mut().zip(&mut got) {
            let mut sink = |f: &RxFrame<'_>| got.extend(f.chunk_at::<1>(59).map(|[n]| n));
            port.rx_burst(64, &mut sink).unwrap();
        }
    }
    got
}

/// Whether the interface takes frames to every MAC.
fn is_promiscuous(interface: &str) -> bool {
    let ip = Command::new("ip").args(["-d", "link", "show", interface]).output().unwrap();
    let said = String::from_utf8(ip.stdout).unwrap();
    assert!(said.contains("promiscuity "), "{said}");
    !said.contains("promiscuity 0")
}

/// Goal: processes on an interface share its MAC, each has a number that is free again when it has
/// ended, and a frame reaches the one that it is for, or all if it is for a group; the interface
/// listens to its own MAC alone. A switch's port takes frames to every number.
#[test]
fn a_frame_reaches_the_process_that_it_is_for() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let nodes = &nodes;
    let port = format!("afpacket:{FABRIC},near=no");
    std::thread::scope(|scope| {
        let there = scope.spawn(move || {
            nodes.enter(0).unwrap();
            let mut ports: Vec<_> = (0..4).map(|_| open(&port).unwrap()).collect();
            let mac = ports[0].caps().station.mac;
            let stations = |ports: &[Box<dyn Port>]| {
                ports.iter().map(|port| port.caps().station).collect::<Vec<_>>()
            };
            let numbered = move |numbers: &[u16]| {
                numbers.iter().map(|&number| Station { mac, number }).collect::<Vec<_>>()
            };
            assert_eq!(stations(&ports), numbered(&[0, 1, 2, 3]));
            // The numbers of processes that have ended are given again.
            ports.truncate(2);
            drop(ports.remove(0));
            let all = format!("{port},stations=all");
            let begun = Instant::now();
            let more = loop {
                let more: Vec<_> = [&port, &port, &all].map(|port| open(port).unwrap()).into();
                // What was closed is held for a moment by a process that another test is starting.
                if stations(&more) == numbered(&[0, 2, 3]) || begun.elapsed() > WAIT_MAX {
                    break more;
                }
            };
            ports.extend(more);
            assert_eq!(stations(&ports), numbered(&[1, 0, 2, 3]));
            let taken = open(&format!("{port},mac={mac}.2")).err().unwrap();
            assert_eq!(taken.errno(), libc::EADDRINUSE, "{taken}");
            assert!(!is_promiscuous(FABRIC));
            let sent = scope.spawn(move || {
                nodes.enter(1).unwrap();
                let socket = RawSocket::open(FABRIC).unwrap();
                let src = Station::at([2, 0, 0, 0, 0, 9]);
                let all = Station::BROADCAST;
                let other = Station { mac: MacAddr([2, 7, 7, 7, 7, 7]), number: 1 };
                let to = [numbered(&[0, 1, 2, 3, 4, 0xffff]), vec![all, other]].concat();
                for (dst, number) in to.into_iter().zip(0..) {
                    socket.send(&frame(dst, src, number)).unwrap();
                }
            });
            sent.join().unwrap();
            let got = heard(&mut ports);
            // In the order of the ports: the group's is 6, the switch's hears all numbers.
            assert_eq!(got, [vec![1, 6], vec![0, 6], vec![2, 6], vec![0, 1, 2, 3, 4, 5, 6]]);
            let other = open(&format!("{port},mac=02:00:00:00:00:77.5")).unwrap();
            assert_eq!(other.caps().station.to_string(), "02:00:00:00:00:77.5");
        });
        there.join().unwrap();
    });
}
