//! Datagrams of `ip(...)` around a raw socket that leave as one, and are cut by the interface.

use std::time::{Duration, Instant};

use barewire::{Buf, Completion, Error, FI_ADDR_UNSPEC};
use barewire_tests::nodes::{FABRIC, Nodes, or_skip};

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
