//! The port `xdp` on cards that the kernel's driver keeps: where the program runs and who copies
//! depends on that driver.
//!
//! BAREWIRE_TEST_PORT names two such ports, on interfaces that are up and joined by a hub.

use std::time::{Duration, Instant};

use barewire_driver::frame::{ETHERTYPE, RxFrame, TxFrame, address};
use barewire_driver::port::{Port, Tx};

use crate::kernel::{stream, until};
use crate::machine::{port, sh};
use crate::processes::{kills, there_and_back};
use crate::said::Said;

/// The two ports; prints why there are none.
fn ports() -> Option<[String; 2]> {
    let names = std::env::var("BAREWIRE_TEST_PORT").unwrap_or_default();
    let found = names.split_once(' ').filter(|(first, _)| first.starts_with("xdp:"));
    let Some((a, b)) = found else {
        println!("SKIPPED: no ports xdp in BAREWIRE_TEST_PORT, see cargo xtask test vfio");
        return None;
    };
    for name in [a, b].map(interface) {
        let carrier = format!("/sys/class/net/{name}/carrier");
        until("carrier", || std::fs::read_to_string(&carrier).ok().filter(|c| c.trim() == "1"));
    }
    Some([a.to_owned(), b.to_owned()])
}

/// The interface of a port.
fn interface(port: &str) -> &str {
    let name = port.trim_start_matches("xdp:");
    name.split(',').next().unwrap_or(name)
}

/// The kernel's driver of an interface.
fn driver(name: &str) -> String {
    let link = std::fs::read_link(format!("/sys/class/net/{name}/device/driver")).unwrap();
    link.file_name().unwrap().to_string_lossy().into_owned()
}

/// Whether the drivers here are of a kernel in which they have zero-copy.
fn has_zero_copy() -> bool {
    std::env::var_os("VM_ZERO_COPY").is_some()
}

/// Goal: a port says where its program runs, and whether the kernel copies, as its driver can;
/// frames of many lengths arrive each way, and the next port opens. Method: numbered frames; of the
/// drivers here e1000 takes no program.
#[test]
fn frames_over_xdp() {
    let Some(names) = ports() else { return };
    let said = Said::with("the program runs in");
    let [mut a, mut b] =
        tracing::subscriber::with_default(said.clone(), || names.each_ref().map(|name| port(name)));
    let lines = said.lines();
    assert_eq!(lines.len(), 2, "{lines:?}");
    for ((_, line), name) in lines.iter().zip(&names) {
        let driver = driver(interface(name));
        println!("{driver}: {line}");
        let place = if driver == "e1000" { "the kernel's stack" } else { "the driver" };
        assert!(line.contains(&format!("runs in {place}")), "{line}");
        let copies = if has_zero_copy() { "not copied" } else { "copied by the kernel" };
        assert!(line.contains(&format!("frames are {copies}")), "{line}");
    }
    stream(&mut *a, &mut *b, 300);
    stream(&mut *b, &mut *a, 300);
    drop((a, b));
    // No program is left, or these would not open.
    let [mut a, mut b] = names.each_ref().map(|name| port(name));
    stream(&mut *a, &mut *b, 10);
}

/// Goal: the kernel goes on with its own traffic of an interface that a port uses. With zero-copy
/// that arrives in the port's memory, and the kernel copies it out. Method: more echo requests than
/// the port has buffers.
#[test]
fn the_kernels_own_traffic_beside_xdp() {
    let Some([a, b]) = ports() else { return };
    let (name, count) = (interface(&a).to_owned(), 1_000);
    let [mut ours, mut plain] =
        [format!("{a},ring=256"), b.replace("xdp:", "afpacket:")].map(|name| port(&name));
    sh(&format!("ip addr add 10.99.0.1/24 dev {name}"));
    let macs = [ours.caps().station.mac.0, plain.caps().station.mac.0];
    let request = echo_request(macs, [[10, 99, 0, 1], [10, 99, 0, 2]]);
    let (before, start) = (echo_requests(), Instant::now());
    let mut sent = 0;
    while echo_requests() - before < count {
        assert!(start.elapsed() < Duration::from_secs(60), "{sent} sent, too few arrived");
        // The device drops what it has no buffer for.
        sent += send(&mut *plain, &request, 16);
        let moved = ours.rx_burst(32, &mut |_: &RxFrame<'_>| panic!("it is the kernel's")).unwrap();
        assert_eq!(moved, 0);
    }
    sh(&format!("ip addr del 10.99.0.1/24 dev {name}"));
    stream(&mut *ours, &mut *plain, 50);
    stream(&mut *plain, &mut *ours, 50);
}

/// Goal: a port that did not poll until every buffer was full hears again once it polls. (With
/// zero-copy the device has none left then, and waits to be told of new ones.)
#[test]
fn a_port_of_xdp_that_slept_hears_again() {
    let Some([a, b]) = ports() else { return };
    let [mut ours, mut plain] =
        [format!("{a},ring=256"), b.replace("xdp:", "afpacket:")].map(|name| port(&name));
    let mut frame = [&[0; 12][..], &ETHERTYPE.to_be_bytes(), &[0x5a; 46]].concat();
    address(&mut frame, ours.caps().station, plain.caps().station);
    // igb restarts the link of a port that has just opened.
    until("first frame", || {
        send(&mut *plain, &frame, 1);
        (ours.rx_burst(32, &mut |_: &RxFrame<'_>| {}).unwrap() > 0).then_some(())
    });
    for _ in 0..3 {
        let sent = send(&mut *plain, &frame, 4_000);
        let (mut heard, mut last) = (0, Instant::now());
        while last.elapsed() < Duration::from_millis(200) {
            // What its socket had no room for.
            plain.flush().unwrap();
            let moved = ours.rx_burst(32, &mut |_: &RxFrame<'_>| {}).unwrap();
            heard += moved as u64;
            if moved > 0 {
                last = Instant::now();
            }
        }
        println!("{heard} of {sent} heard");
        assert!((256..sent).contains(&heard), "{heard} of {sent} heard");
        stream(&mut *ours, &mut *plain, 50);
        stream(&mut *plain, &mut *ours, 50);
    }
}

/// Sends a frame `count` times. Returns how often the port took it.
fn send(from: &mut dyn Port, frame: &[u8], count: u64) -> u64 {
    let mut sent = 0;
    for n in 0..count {
        sent += u64::from(from.tx(&TxFrame::whole(frame)) == Ok(Tx::Sent));
        if n % 16 == 15 {
            from.flush().unwrap();
        }
    }
    from.flush().unwrap();
    sent
}

/// Echo requests that the kernel has taken (RFC 4293's icmpInEchos).
fn echo_requests() -> u64 {
    let text = std::fs::read_to_string("/proc/net/snmp").unwrap();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Icmp: "));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let at = names.split(' ').position(|name| name == "InEchos").unwrap();
    values.split(' ').nth(at).unwrap().parse().unwrap()
}

/// A frame with an ICMP echo request (RFC 792), to the first of the addresses.
fn echo_request(macs: [[u8; 6]; 2], [dst, src]: [[u8; 4]; 2]) -> Vec<u8> {
    let mut ip = [&[0x45, 0, 0, 60, 0, 0, 0, 0, 64, 1, 0, 0][..], &src, &dst].concat();
    let mut icmp = [&[8, 0, 0, 0, 0x62, 0x77, 0, 1][..], &[0x5a; 32]].concat();
    for (part, at) in [(&mut ip, 10), (&mut icmp, 2)] {
        let sum: u32 = part.chunks(2).map(|two| u32::from(two[0]) << 8 | u32::from(two[1])).sum();
        let folded = (sum & 0xffff) + (sum >> 16);
        let folded = (folded & 0xffff) + (folded >> 16);
        part[at..at + 2].copy_from_slice(&(!(folded as u16)).to_be_bytes());
    }
    [&macs.concat()[..], &[0x08, 0], &ip, &icmp].concat()
}

/// Lengths around every limit of a frame and the protocol.
const LENS: [usize; 8] = [0, 1, 256, 1400, 1500, 1501, 16_385, 300_000];

#[test]
fn messages_over_xdp() {
    let Some([a, b]) = ports() else { return };
    there_and_back(&a, &b, &LENS);
}

/// One frame in twenty is lost on the way out of either, some change their order or arrive twice.
#[test]
fn messages_over_xdp_that_loses_frames() {
    let Some(ports) = ports() else { return };
    let [a, b] = ports
        .map(|port| format!("fault(loss=0.05,dup=0.01,reorder=0.02,corrupt=0.01,seed=3):{port}"));
    there_and_back(&a, &b, &LENS);
}

/// Goal: kill -9 of either process leaves the interface fit for the next one, with no program of
/// the dead one's, and every operation of the survivor ends in time.
#[test]
fn kill_9_over_xdp() {
    let Some(names) = ports() else { return };
    let restarts = driver(interface(&names[0])) == "igb";
    let deaf = if restarts { RESTART } else { Duration::ZERO };
    kills(&names, deaf, if is_nightly() { 8 } else { 2 });
}

/// igb takes its link down when a program comes or goes, and sees it again after at most 2 s.
const RESTART: Duration = Duration::from_secs(3);

fn is_nightly() -> bool {
    std::env::var_os("BAREWIRE_NIGHTLY").is_some()
}
