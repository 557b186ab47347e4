//! The port `xdp` on interfaces with several receive queues.

use std::time::{Duration, Instant};

use barewire::errno::*;
use barewire_driver::backend::xdp::survey;
use barewire_driver::frame::{RxFrame, TxFrame, address};
use barewire_driver::open::open;
use barewire_driver::port::{Port, PortCounters};
use barewire_tests::nodes::{Nodes, or_skip};

use crate::environment::{outcome, refused};
use crate::lengths::{all_sizes, fewer_sizes};
use crate::messages::there_and_back;
use crate::near::{each_by_two, two_by_two};
use crate::rounds::kill_rounds;
use crate::start;
use crate::supervisor::Worker;
use crate::xdp::{GENERIC, NATIVE, fit, program};

/// Queues of the interfaces here.
const QUEUES: u32 = 4;
/// Frames that are sent by each.
const EACH: u64 = 100;
/// How long frames may take to arrive, and how long none may follow them.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
pub(crate) const QUIET: Duration = Duration::from_millis(100);

/// Two nodes joined by a switch that draws the queue by which a frame arrives.
fn scattered() -> Option<Nodes> {
    fit(or_skip(Nodes::scattered(1500, QUEUES))?)
}

/// Opens a port. A process that another test is about to start may have what the one before had,
/// for a moment.
fn opened(port: &str) -> Box<dyn Port> {
    let until = Instant::now() + Duration::from_secs(2);
    loop {
        match open(port) {
            Err(e) if e.errno() == libc::EBUSY && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(1));
            }
            done => return done.unwrap(),
        }
    }
}

/// What arrives at `port` in node 0 of [`EACH`] frames that node 1 sends by each queue, by queue,
/// until there are `want` and the port has counted `lost`, and what it counted.
fn heard(nodes: &Nodes, port: &str, want: u64, lost: u64) -> (Vec<u64>, PortCounters) {
    std::thread::scope(|scope| {
        let hear = move || {
            nodes.enter(0).unwrap();
            let mut port = opened(port);
            let own = port.caps().station;
            let send = move || {
                nodes.enter(1).unwrap();
                for queue in 0..QUEUES {
                    let mut port = opened(&format!("xdp:fab0,queue={queue}"));
                    let mut frame =
                        [&[0; 12][..], &[0x88, 0xb5], &[0; 46], &[queue as u8]].concat();
                    // With their numbers: a process that another test is about to start may have
                    // the first one's, for a moment.
                    address(&mut frame, own, port.caps().station);
                    for _ in 0..EACH {
                        port.tx(&TxFrame::whole(&frame)).unwrap();
                    }
                    port.flush().unwrap();
                }
            };
            scope.spawn(send).join().unwrap();
            let is_all =
                |count, port: &dyn Port| count >= want && port.counters().rx_dropped >= lost;
            (of_each_queue(&mut *port, is_all), port.counters())
        };
        scope.spawn(hear).join().unwrap()
    })
}

/// The frames that arrive, by their last byte: until that is all, and for a while after.
fn of_each_queue(port: &mut dyn Port, is_all: impl Fn(u64, &dyn Port) -> bool) -> Vec<u64> {
    let mut counts = vec![0; QUEUES as usize];
    let mut until = Instant::now() + PATIENCE;
    let mut is_quiet = false;
    while Instant::now() < until {
        let mut sink = |frame: &RxFrame<'_>| {
            let mut last = [0];
            assert!(frame.copy_to(60, &mut last));
            counts[usize::from(last[0])] += 1;
        };
        port.rx_burst(32, &mut sink).unwrap();
        if !is_quiet && is_all(counts.iter().sum(), port) {
            (is_quiet, until) = (true, Instant::now() + QUIET);
        }
    }
    counts
}

/// Goal: a port hears every queue of its interface, those that it has and all others, and counts
/// their frames together.
#[test]
fn every_queue_is_heard() {
    for mode in ["native", "generic"] {
        let Some(nodes) = or_skip(Nodes::pair_of_queues(1500, QUEUES)).and_then(fit) else {
            return;
        };
        for option in ["", ",queue=0-3", ",queue=1-2", ",queue=3", ",queue=free"] {
            let port = format!("xdp:fab0,mode={mode}{option}");
            let (counts, all) = heard(&nodes, &port, u64::from(QUEUES) * EACH, 0);
            assert_eq!(counts, [EACH; QUEUES as usize], "{mode}{option}");
            assert_eq!(all.rx_frames, counts.iter().sum::<u64>(), "{mode}{option}");
        }
    }
}

/// Goal: what finds no room in any queue is counted.
#[test]
fn frames_that_find_no_room_are_counted_of_every_queue() {
    let Some(nodes) = or_skip(Nodes::pair_of_queues(1500, QUEUES)).and_then(fit) else { return };
    let [room, lost] = [64, EACH - 64].map(|each| u64::from(QUEUES) * each);
    let (counts, all) = heard(&nodes, "xdp:fab0,ring=64", room, lost);
    assert_eq!(counts, [64; QUEUES as usize]);
    assert_eq!(all.rx_dropped, lost, "{all:?}");
}

/// Goal: an interface whose driver does not say how many queues it has, has those that it was made
/// with.
#[test]
fn queues_of_a_driver_that_does_not_say() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let made = format!("link add link fab0 name mute0 numrxqueues {QUEUES} type macvlan");
    if or_skip(nodes.ip(0, &made)).is_none() {
        return;
    }
    let look = || {
        nodes.enter(0).unwrap();
        survey::nics()
    };
    let nics = std::thread::scope(|scope| scope.spawn(look).join().unwrap());
    let mute = nics.iter().find(|nic| nic.link.name == "mute0").unwrap();
    assert_eq!(mute.rx_queues, QUEUES);
}

/// Goal: a port leaves by the first of its queues. Method: one inside of a VLAN hears its own queue
/// only.
#[test]
fn frames_leave_by_the_first_queue() {
    let Some(nodes) = or_skip(Nodes::pair_of_queues(1500, QUEUES)).and_then(fit) else { return };
    for (option, by) in [("", 0), (",queue=2-3", 2)] {
        let sender = format!("xdp:fab0{option}");
        let port = format!("vlan(5):xdp:fab0,mode=native,queue={by}");
        let count = std::thread::scope(|scope| {
            let (nodes, sender) = (&nodes, &sender);
            let hear = move || {
                nodes.enter(0).unwrap();
                let mut port = opened(&port);
                let own = port.caps().station;
                let send = move || {
                    nodes.enter(1).unwrap();
                    let mut port = opened(sender);
                    let tagged = [0x81, 0, 0, 5, 0x88, 0xb5];
                    let frame = [&own.mac.0[..], &[2; 6], &tagged, &[0; 47]].concat();
                    port.tx(&TxFrame::whole(&frame)).unwrap();
                    port.flush().unwrap();
                };
                scope.spawn(send).join().unwrap();
                of_each_queue(&mut *port, |count, _| count >= 1)[0]
            };
            scope.spawn(hear).join().unwrap()
        });
        assert_eq!(count, 1, "{sender}");
    }
}

/// Goal: messages of all lengths whose frames arrive by any queue, in any order of these.
#[test]
fn every_length_over_several_queues() {
    for port in [NATIVE, GENERIC] {
        let Some(nodes) = scattered() else { return };
        there_and_back(&nodes, [port; 2], all_sizes);
    }
}

/// With buffers for a few frames of each queue, a wire that loses some, and threads that do the
/// driver's work.
#[test]
fn every_length_over_several_queues_that_lose_frames() {
    for port in [NATIVE, GENERIC] {
        let Some(nodes) = scattered() else { return };
        let port = format!("fault(loss=0.05,seed=43):{port},ring=64,busypoll=yes");
        there_and_back(&nodes, [&port, &port], fewer_sizes);
    }
}

#[test]
fn kills_over_several_queues() {
    for (port, seed) in [(NATIVE, 45), (GENERIC, 47)] {
        let Some(nodes) = scattered() else { return };
        let begin = |place, _name: &str| start(&nodes, place, "traffic", port);
        kill_rounds("kills-queues", begin, 4, seed);
    }
}

#[test]
fn two_nodes_behind_switches_on_several_queues() {
    let Some(nodes) = scattered() else { return };
    let switches = [0, 1].map(|node| start(&nodes, node, "switch", NATIVE));
    two_by_two(&nodes, "xdp:fab0,switch=yes,near=yes", 1500);
    crate::switch::end(switches);
}

/// Goal: processes share an interface, each with queues of its own, and who finds his taken is told
/// of free ones and of the switch. Whoever of them is killed, the one who attached the program too,
/// the others keep it; it goes with the last.
#[test]
fn processes_with_queues_of_their_own_share_an_interface() {
    for mode in ["native", "generic"] {
        let Some(nodes) = or_skip(Nodes::pair_of_queues(1500, QUEUES)).and_then(fit) else {
            return;
        };
        let port = |queue: &str| format!("xdp:fab0,mode={mode},queue={queue}");
        let open = |queue: &str| {
            let opened = start(&nodes, 0, "opener", &port(queue));
            assert!(opened.addr.starts_with("0 "), "{mode}: {}", opened.addr);
            opened
        };
        let says = ["queues of the interface already: 0, 1", "queue=2-3", "queue=free"];
        let switch = "barewire switch --port xdp:fab0";
        let mut first = open("0");
        let second = open("free");
        for _ in 0..5 {
            for taken in [port("0"), port("0-2"), format!("xdp:fab0,mode={mode}")] {
                refused(&nodes, &taken, FI_EBUSY, &[&says[..], &[switch]].concat());
            }
            let other = if mode == "native" { "generic" } else { "native" };
            let mended = format!("xdp:fab0,mode={other},queue=2");
            refused(&nodes, &mended, FI_EINVAL, &["other processes", "leave out mode="]);
            first.kill();
            assert!(program(&nodes).is_some(), "{mode}: the second has it");
            first = open("free");
        }
        let third = open("2-3");
        refused(&nodes, &port("free"), FI_EBUSY, &["all 4 queues", switch]);
        for opened in [second, third, first] {
            assert!(program(&nodes).is_some());
            opened.kill();
        }
        let begun = Instant::now();
        while program(&nodes).is_some() {
            assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", program(&nodes));
        }
    }
}

/// Ports that share an interface.
const SHARED: [&str; 2] = ["xdp:fab0,queue=0-1,near=yes", "xdp:fab0,queue=2-3,near=yes"];

/// Goal: frames that arrive by another process's queue are received, and a query to all stations
/// reaches each of them. Method: two nodes of two processes, and a switch between them that draws
/// the queue.
#[test]
fn two_nodes_of_two_processes_with_queues_of_their_own() {
    for mode in ["native", "generic"] {
        let Some(nodes) = scattered() else { return };
        let [a, b] = SHARED.map(|port| format!("{port},mode={mode}"));
        each_by_two(&nodes, [&a, &b], 1500);
    }
}

/// Goal: processes that share an interface are killed and come back while another one there stays,
/// and after it has gone.
#[test]
fn kills_beside_a_process_that_shares_the_interface() {
    for (mode, seed) in [("native", 51), ("generic", 53)] {
        let Some(nodes) = scattered() else { return };
        let [port, other] = SHARED.map(|port| format!("{port},mode={mode}"));
        let others = [0, 1].map(|node| start(&nodes, node, "opener", &other));
        let begin = |place, _name: &str| start(&nodes, place, "traffic", &port);
        kill_rounds("kills-beside", begin, 4, seed);
        others.into_iter().for_each(Worker::kill);
        kill_rounds("kills-after", begin, 1, seed);
    }
}

/// Goal: a process with an interface of more queues than a port hears is told what to do.
#[test]
fn interfaces_with_too_many_queues() {
    let Some(nodes) = or_skip(Nodes::pair(1500)).and_then(fit) else { return };
    nodes.veth_of_queues([(0, "many0"), (0, "many1")], 1500, 65).unwrap();
    let says = ["65 receive queues", "ethtool -L many0 combined 64", "proto 0x88b5 action 0"];
    refused(&nodes, "xdp:many0", FI_EINVAL, &says);
    refused(&nodes, "xdp:many0,queue=65", FI_EINVAL, &["65 receive queues, 0 to 64"]);
    for port in ["xdp:many0,queue=64", "xdp:many0,queue=1-64,ring=64"] {
        assert_eq!(outcome(&nodes, "opener", port).0, 0, "{port}");
    }
}
