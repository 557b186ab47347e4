//! Processes of two nodes whose NICs are owned by switches: all to all, while switches and
//! processes are killed.

use std::time::{Duration, Instant};

use barewire_tests::nodes::{FABRIC, Nodes, or_skip};
use barewire_tests::rng::Rng;

use crate::members::{Told, all_to_all};
use crate::near::{on_nodes, two_by_two};
use crate::rounds::{drained, introduce, kill_rounds};
use crate::supervisor::Worker;
use crate::worker::T_DEAD;
use crate::{kills, lengths, start};

pub(crate) const NIC: &str = "afpacket:fab0";
pub(crate) const PORT: &str = "afpacket:fab0,switch=yes,near=yes";
/// The same with every peer behind the switch.
const FAR: &str = "afpacket:fab0,switch=yes,near=no";

pub(crate) fn switches(nodes: &Nodes) -> [Worker; 2] {
    assert!(NIC.contains(FABRIC));
    [0, 1].map(|node| start(nodes, node, "switch", NIC))
}

/// Ends switches, which forwarded something and found nobody lying.
pub(crate) fn end(switches: [Worker; 2]) {
    for mut switch in switches {
        switch.say("TELL");
        let told = switch.answer("TOLD");
        let (wrong, to_nic) = told.split_once(' ').unwrap();
        assert!(wrong == "0" && to_nic.parse::<u64>().unwrap() > 100, "{told}");
        switch.say("END");
        switch.finish();
    }
}

/// Goal: processes that share a NIC which one process owns reach each other by memory and everybody
/// else through the switch, under one address, with every kind of operation.
#[test]
fn two_nodes_of_two_processes_behind_switches() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let switches = switches(&nodes);
    two_by_two(&nodes, PORT, 1500);
    end(switches);
}

/// Goal: without a near side the processes of a node reach each other through their switch.
#[test]
fn processes_of_a_node_through_their_switch() {
    let Some(nodes) = or_skip(Nodes::pair(9000)) else { return };
    let switches = switches(&nodes);
    let places = [(0, FAR), (0, FAR), (1, FAR)];
    let told = all_to_all(3, on_nodes(&nodes, &places), || {});
    let far = |of: &Told| of.sessions.len() == 2 && of.near_frames == 0 && of.far_frames > 100;
    assert!(told.iter().all(|(_, of)| far(of)), "{told:?}");
    end(switches);
}

/// Goal: one side with a switch and the other without are the same to both.
#[test]
fn a_process_with_its_own_port_meets_those_behind_a_switch() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let mut switch = start(&nodes, 0, "switch", NIC);
    let places = [(0, PORT), (0, PORT), (1, NIC)];
    all_to_all(3, on_nodes(&nodes, &places), || {});
    switch.say("END");
    switch.finish();
}

#[test]
fn every_length_through_switches() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let switches = switches(&nodes);
    let begin = |place, role: &str| start(&nodes, place, role, FAR);
    lengths::there_and_back(begin, |mtu| {
        assert_eq!(mtu, 1500);
        lengths::all_sizes(mtu)
    });
    end(switches);
}

#[test]
fn killed_switches_lose_no_operation() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    kill_switches(&nodes, NIC, PORT, kills(12), 29);
}

/// Goal: a switch that is killed and started again costs time and nothing else: every operation
/// ends well, every byte is right. Method: kill -9 of either at random times under traffic of all
/// to all, which is begun anew until there have been as many kills.
pub(crate) fn kill_switches(nodes: &Nodes, nic: &str, port: &str, kills: u32, seed: u64) {
    println!("seed {seed}");
    let mut rng = Rng::new(seed, 0);
    let mut owners = [0, 1].map(|node| Some(start(nodes, node, "switch", nic)));
    let (mut killed, mut next) = (0, Instant::now());
    while killed < kills {
        let places = [(0, port), (0, port), (1, port), (1, port)];
        all_to_all(4, on_nodes(nodes, &places), || {
            std::thread::sleep(Duration::from_millis(1));
            if Instant::now() < next || killed == kills {
                return;
            }
            let node = rng.index(2);
            owners[node].take().unwrap().kill();
            std::thread::sleep(Duration::from_millis(rng.index(100) as u64));
            owners[node] = Some(start(nodes, node, "switch", nic));
            killed += 1;
            next = Instant::now() + Duration::from_millis(rng.index(150) as u64);
        });
    }
}

/// Goal: a killed process is told of within the bound, through switches too, and the next one in
/// its place is reached.
#[test]
fn kills_of_processes_behind_switches() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let switches = switches(&nodes);
    let begin = |place, _name: &str| start(&nodes, place, "traffic", FAR);
    kill_rounds("kills-switched", begin, kills(8).into(), 17);
    end(switches);
}

/// Goal: with a switch gone for good every operation to far peers ends within 1.1 T_dead, at both
/// ends, and processes that reach each other by memory never notice. Method: two pairs that talk
/// without end, one from node to node, one within the node whose switch is killed.
#[test]
fn a_switch_that_does_not_come_back_ends_far_operations_alone() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let [switch, other] = switches(&nodes);
    let mut far = [0, 1].map(|node| start(&nodes, node, "traffic", PORT));
    let mut near = [0, 0].map(|node| start(&nodes, node, "traffic", PORT));
    for [a, b] in [&mut far, &mut near] {
        introduce(a, b);
    }
    std::thread::sleep(Duration::from_millis(300));
    switch.kill();
    far.iter_mut().for_each(|worker| worker.say("KILLED"));
    let bound = T_DEAD.as_millis() as u64 * 11 / 10;
    for worker in &mut far {
        let [ms, starved, done, failed, _] = drained(worker);
        println!("{}: {ms} ms, {starved} ms starved, {failed} failed", worker.name);
        assert!(ms <= bound + starved, "{ms} ms, not {bound}; {starved} ms starved");
        assert!(done > 0 && failed > 0, "{done} done, {failed} failed");
    }
    std::thread::sleep(2 * T_DEAD);
    near.iter_mut().for_each(|worker| worker.say("QUIET"));
    for worker in &mut near {
        let [ms, starved, done, failed, received] = drained(worker);
        assert!(ms <= bound / 2 + starved, "{ms} ms; {starved} ms starved");
        assert!(done > 100 && received > 100 && failed == 0, "{done}, {failed}, {received}");
    }
    far.into_iter().chain(near).for_each(Worker::kill);
    other.kill();
}
