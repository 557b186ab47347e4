//! What a host does to frames that leave: a queueing discipline and filters of `tc` see those of
//! `afpacket` where it was asked for and no other, filters of `nft` at egress see them all.

use std::time::{Duration, Instant};

use barewire_driver::backend::netdev::{Egress, egress, links};
use barewire_driver::frame::{RxFrame, TxFrame, address};
use barewire_driver::open::open;
use barewire_driver::port::{PortCounters, Station};
use barewire_tests::nodes::{FABRIC, Nodes, or_skip};

use crate::lengths::fewer_sizes;
use crate::messages::{AFPACKET, there_and_back};
use crate::queues::{PATIENCE, QUIET};

const QDISC: &str = "afpacket:fab0,qdisc=yes";

/// Drops so many of a hundred of our frames that leave a node, by `nft`. `ether type` would read
/// the header, whose place is unknown in frames of a socket that is bound to an EtherType.
fn filter(nodes: &Nodes, node: usize, percent: u32) -> Result<(), String> {
    let run = |words: &str| nodes.run(node, words).map(drop);
    run("nft add table netdev out")?;
    run(&format!(
        "nft add chain netdev out leaving {{ type filter hook egress device {FABRIC} priority 0 ; \
         }}"
    ))?;
    run(&format!(
        "nft add rule netdev out leaving meta protocol 0x88b5 numgen random mod 100 <= {} counter \
         drop",
        percent - 1
    ))
}

/// Sends frames from `port` in node 0 and says how many arrive in node 1, where `want` of them are
/// waited for, what was counted, and how long the fastest was held.
fn arriving(
    nodes: &Nodes,
    port: &str,
    frames: usize,
    want: usize,
) -> (usize, PortCounters, Duration) {
    std::thread::scope(|scope| {
        let hear = move || {
            nodes.enter(1).unwrap();
            let mut there = open(AFPACKET).unwrap();
            // A child of another test may still hold the number of the port before.
            let dst = there.caps().station;
            let send = move || {
                nodes.enter(0).unwrap();
                let mut port = open(port).unwrap();
                let mut frame = [[0; 12].as_slice(), &[0x88, 0xb5], &[0; 46]].concat();
                address(&mut frame, dst, Station::at([2; 6]));
                let mut fastest = PATIENCE;
                for _ in 0..frames {
                    let begin = Instant::now();
                    port.tx(&TxFrame::whole(&frame)).unwrap();
                    while port.next_deadline_ns().is_some() {
                        port.flush().unwrap();
                        assert!(begin.elapsed() < PATIENCE, "it holds a frame for ever");
                    }
                    fastest = fastest.min(begin.elapsed());
                }
                (port.counters(), fastest)
            };
            let (counters, fastest) = scope.spawn(send).join().unwrap();
            let (mut count, mut until) = (0, Instant::now() + PATIENCE);
            let mut is_quiet = false;
            while Instant::now() < until {
                count += there.rx_burst(32, &mut |_: &RxFrame<'_>| {}).unwrap();
                if !is_quiet && count >= want {
                    (is_quiet, until) = (true, Instant::now() + QUIET);
                }
            }
            (count, counters, fastest)
        };
        scope.spawn(hear).join().unwrap()
    })
}

/// Frames that are sent to a filter, and how long the first that is dropped is held.
const FILTERED: usize = 100;
const HELD: Duration = Duration::from_millis(5);

/// What is counted of frames that leave through a filter, of which so many pass.
fn through_a_filter(nodes: &Nodes, port: &str, passing: usize) {
    let (count, counters, fastest) = arriving(nodes, port, FILTERED, passing);
    let dropped = (FILTERED - passing) as u64;
    assert_eq!((count, counters.tx_dropped), (passing, dropped), "{port}: {counters:?}");
    assert!(fastest < HELD, "{port}: each is held: {fastest:?}");
}

/// Goal: a filter of `tc` at egress sees frames with the option only, and each one that it drops is
/// lost and counted at once.
#[test]
fn a_filter_of_tc_has_the_frames_that_are_to_pass_it() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    through_a_filter(&nodes, QDISC, FILTERED);
    // A program that says TC_ACT_SHOT.
    let drop = ["filter", "add", "dev", FABRIC, "egress", "bpf", "da", "bytecode", "1,6 0 0 2"];
    let added = nodes.run(0, "tc qdisc add dev fab0 clsact").and_then(|_| {
        let done = nodes.command(0, "tc").args(drop).status().map_err(|e| e.to_string())?;
        if done.success() { Ok(()) } else { Err(format!("tc {drop:?}: {done}")) }
    });
    if or_skip(added).is_none() {
        return;
    }
    let ports = [(AFPACKET, FILTERED), ("afpacket:fab0,qdisc=no", FILTERED), (QDISC, 0)];
    for (port, passing) in ports {
        through_a_filter(&nodes, port, passing);
    }
}

/// Goal: a filter of `nft` at egress sees all frames, and one that it drops does not hold up for
/// long what is behind it.
#[test]
fn a_filter_of_nft_has_all_frames() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    if or_skip(filter(&nodes, 0, 100)).is_some() {
        for port in [AFPACKET, QDISC] {
            through_a_filter(&nodes, port, 0);
        }
    }
}

#[test]
fn every_length_through_a_filter_that_drops_frames() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    if or_skip(filter(&nodes, 0, 5).and_then(|()| filter(&nodes, 1, 5))).is_some() {
        there_and_back(&nodes, [QDISC; 2], fewer_sizes);
        for node in [0, 1] {
            let seen = nodes.run(node, "nft list table netdev out").unwrap();
            assert!(seen.contains("packets ") && !seen.contains("packets 0 "), "{seen}");
        }
    }
}

/// Bytes that the discipline at the interface of node 0 has let out.
fn let_out(nodes: &Nodes) -> u64 {
    let said = nodes.run(0, "tc -s qdisc show dev fab0 root").unwrap();
    let sent = said.split_once("Sent ").unwrap().1;
    sent.split(' ').next().unwrap().parse().unwrap()
}

/// Goal: a discipline shapes frames with the option, also those inside of IP, and no others; what
/// it has no room for is sent again. Method: a token bucket with little room.
#[test]
fn every_length_through_a_discipline_that_shapes() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let shape = "tc qdisc add dev fab0 root tbf rate 100mbit burst 16kb limit 32kb";
    if or_skip(nodes.run(0, shape)).is_none() {
        return;
    }
    let sizes = |_| vec![1, 100_000, 4 << 20];
    let ip = |node, below: &str| format!("ip(10.78.0.{}/24):{below}", node + 1);
    let cases = [
        ([AFPACKET.to_owned(), AFPACKET.to_owned()], 0..1 << 20),
        ([QDISC.to_owned(), QDISC.to_owned()], 4 << 20..u64::MAX),
        ([0, 1].map(|node| ip(node, QDISC)), 4 << 20..u64::MAX),
    ];
    for (ports, bytes) in cases {
        let before = let_out(&nodes);
        there_and_back(&nodes, ports.each_ref().map(String::as_str), sizes);
        let out = let_out(&nodes) - before;
        assert!(bytes.contains(&out), "{ports:?}: {out}");
    }
}

/// Goal: `doctor` hears of what is bypassed: a discipline, and filters at egress, and not of those
/// at ingress.
#[test]
fn doctor_sees_disciplines_and_filters_at_egress() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let seen = || {
        let look = || {
            nodes.enter(0).unwrap();
            let links = links();
            egress(&[links.iter().find(|link| link.name == FABRIC).unwrap().index]).remove(0)
        };
        std::thread::scope(|scope| scope.spawn(look).join().unwrap())
    };
    assert!(seen().is_plain(), "{:?}", seen());
    let shape = "tc qdisc add dev fab0 root tbf rate 100mbit burst 16kb limit 32kb";
    if or_skip(nodes.run(0, shape)).is_some() {
        assert_eq!(seen(), Egress { disciplines: vec!["tbf".to_owned()], is_filtered: false });
        nodes.run(0, "tc qdisc del dev fab0 root").unwrap();
    }
    let filter = "tc filter add dev fab0 ingress protocol all u32 match u32 0 0 classid 1:1";
    let added = nodes.run(0, "tc qdisc add dev fab0 ingress").and_then(|_| nodes.run(0, filter));
    if or_skip(added).is_some() {
        assert!(seen().is_plain(), "{:?}", seen());
        nodes.run(0, "tc qdisc del dev fab0 ingress").unwrap();
    }
    let filter = "tc filter add dev fab0 egress protocol all u32 match u32 0 0 classid 1:1";
    let added = nodes.run(0, "tc qdisc add dev fab0 clsact").and_then(|_| {
        assert!(seen().is_plain());
        nodes.run(0, filter)
    });
    if or_skip(added).is_some() {
        assert_eq!(seen(), Egress { disciplines: Vec::new(), is_filtered: true });
    }
}
