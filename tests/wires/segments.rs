//! Datagrams of `ip(...)` around a raw socket that leave as one, and are cut by the interface.

use std::time::{Duration, Instant};

use barewire::{Buf, Completion, Error, FI_ADDR_UNSPEC};
use barewire_driver::frame::{ETHERTYPE, RxFrame, TxFrame};
use barewire_driver::open::open as open_port;
use barewire_driver::port::{Port, Tx};
use barewire_tests::nodes::{FABRIC, Nodes, address, or_skip};

use crate::worker::{Node, open, settings};

/// Messages, and bytes of each: some thousand frames.
const COUNT: usize = 24;
const LEN: usize = 256 << 10;

/// What the kernel says that an interface of the calling thread's node has sent, packets.
fn packets(interface: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let line = text.lines().find_map(|line| line.trim().strip_prefix(&format!("{interface}:")));
    line.unwrap().split_whitespace().nth(9).unwrap().parse().unwrap()
}

/// Sends long messages from the first to the second, and compares their bytes.
fn send_all([from, to]: [&Node; 2]) {
    let dest = from.knows(&to.ep.getname().unwrap().to_string());
    to.knows(&from.ep.getname().unwrap().to_string());
    let bytes = |n: usize| (0..LEN).map(|at| (at / 7 + n * 31) as u8).collect::<Vec<u8>>();
    for n in 0..COUNT {
        to.ep.trecv(Buf::zeroed(LEN), FI_ADDR_UNSPEC, n as u64, 0, n as u64).unwrap();
        from.ep.tsend(Buf::from(bytes(n)), dest, n as u64, 0).unwrap();
    }
    let (begun, mut open, mut one) = (Instant::now(), 2 * COUNT, [Completion::default()]);
    while open > 0 {
        for node in [from, to] {
            match node.cq.read(&mut one) {
                Ok(_) => open -= 1,
                Err(Error::Again) => continue,
                Err(e) => panic!("{e}: {:?}", node.cq.readerr()),
            }
            if std::ptr::eq(node, to) {
                let (n, got) = (one[0].op_context as usize, one[0].bytes());
                assert!(*got == bytes(n)[..], "message {n}");
            }
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{open} of {COUNT} are open");
    }
}

/// Frames that the port of node 0 has sent for long messages, and packets of its kernel meanwhile.
fn counted(nodes: &Nodes, ports: [&str; 2]) -> (u64, u64) {
    let both = || {
        let open_in = |node: usize| {
            nodes.enter(node).unwrap();
            open(ports[node], settings())
        };
        let [to, from] = [1, 0].map(open_in);
        // The thread is in node 0 now.
        let frames = || from.domain.port_counters().unwrap().tx_frames;
        let before = (frames(), packets(FABRIC));
        send_all([&from, &to]);
        (frames() - before.0, packets(FABRIC) - before.1)
    };
    std::thread::scope(|scope| scope.spawn(both).join().unwrap())
}

/// Goal: long messages leave many frames at a time where the interface cuts them, over IPv4 and
/// IPv6, with a tag of VLAN and without; else frame by frame; and arrive in either case.
#[test]
fn datagrams_leave_together_where_they_are_cut() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let around = |ip: &str, below: &str| [1, 2].map(|n| format!("ip({ip}{n}{below}"));
    for ports in [
        around("10.78.0.", "/24):afpacket:fab0"),
        around("10.77.0.", "/24):vlan(5):afpacket:fab0"),
        around("[fd00:4e::", "]/96):afpacket:fab0"),
        around("10.78.0.", "/24):afpacket:fab0,qdisc=yes"),
    ] {
        let [a, b] = ports.each_ref().map(|port| &**port);
        for cuts in [true, false] {
            for node in [0, 1] {
                let is = if cuts { "on" } else { "off" };
                let set = format!("ethtool -K {FABRIC} tx-udp-segmentation {is}");
                nodes.run(node, &set).unwrap();
            }
            let (frames, packets) = counted(&nodes, [a, b]);
            assert!(frames > (COUNT * LEN / 1500) as u64, "{frames} frames");
            let together = packets < frames / 4;
            assert_eq!(together, cuts, "{a}: {frames} frames in {packets} packets, cuts {cuts}");
        }
    }
}

/// Goal: datagrams that nobody has cut arrive on an interface over one that does not cut.
#[test]
fn unsegmented_datagrams_arrive_over_a_tunnel() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    for node in [0, 1] {
        let [own, other] = [address(node), address(1 - node)];
        let link = format!("link add vx0 type vxlan id 5 dstport 4789 local {own} remote {other}");
        for args in [
            format!("{link} dev {FABRIC}"),
            format!("addr add 10.79.0.{}/24 dev vx0", node + 1),
            "link set vx0 up".to_owned(),
        ] {
            if let Err(why) = nodes.ip(node, &args) {
                println!("SKIPPED: {why}");
                return;
            }
        }
    }
    let both = || {
        let open_in = |node: usize| {
            nodes.enter(node).unwrap();
            open(&format!("ip(10.79.0.{}/24):afpacket:vx0", node + 1), settings())
        };
        let [to, from] = [1, 0].map(open_in);
        send_all([&from, &to]);
        to.domain.port_counters().unwrap().rx_dropped
    };
    let dropped = std::thread::scope(|scope| scope.spawn(both).join().unwrap());
    assert_eq!(dropped, 0);
}

/// Sends `count` frames of `len` bytes at once, and says which have come within a second.
fn passed([from, to]: [&mut dyn Port; 2], count: u8, len: usize) -> Vec<u8> {
    let (dst, src) = (to.caps().station.mac, from.caps().station.mac);
    for n in 0..count {
        let mut frame = [&dst.0[..], &src.0, &ETHERTYPE.to_be_bytes()].concat();
        frame.resize(len, n);
        assert_eq!(from.tx(&TxFrame::whole(&frame)), Ok(Tx::Sent));
    }
    from.flush().unwrap();
    let (begun, mut came) = (Instant::now(), Vec::new());
    while came.len() < usize::from(count) && begun.elapsed() < Duration::from_secs(1) {
        let mut sink = |frame: &RxFrame<'_>| {
            let rest: Vec<u8> =
                (14..frame.len()).map(|at| frame.chunk_at::<1>(at).unwrap()[0]).collect();
            assert!(
                rest.iter().all(|byte| *byte == rest[0]) && frame.len() == len,
                "{}",
                frame.len()
            );
            came.push(rest[0]);
        };
        to.rx_burst(32, &mut sink).unwrap();
    }
    came
}

/// Goal: frames that `udp:` sends as one datagram arrive each at `ip(...)` where nobody cuts it,
/// however short they are.
#[test]
fn frames_of_udp_that_nobody_cuts_arrive_each() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let [udp, ip] = ["udp:10.78.0.1", "ip(10.78.0.2/24):afpacket:fab0"];
    let both = || {
        let port = |node: usize, of: &str| {
            nodes.enter(node).unwrap();
            open_port(of).unwrap()
        };
        let (mut to, mut from) = (port(1, ip), port(0, udp));
        for (count, len) in [(2, 60), (10, 100), (40, 100), (2, 700), (3, 700), (40, 1472)] {
            let came = passed([&mut *from, &mut *to], count, len);
            assert_eq!(came, (0..count).collect::<Vec<u8>>(), "{len} bytes");
        }
    };
    std::thread::scope(|scope| scope.spawn(both).join().unwrap());
}
