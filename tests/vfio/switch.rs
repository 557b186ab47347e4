//! Several processes behind each of two NICs, which switches own.

use std::time::{Duration, Instant};

use crate::machine::{deaf_time, nic};
use crate::members::{Told, all_to_all};
use crate::supervisor::Worker;

/// Two processes a NIC, as two nodes: those of one NIC share a segment.
fn members() -> Option<([Worker; 2], impl Fn(usize) -> Worker)> {
    let nics = [nic(0)?, nic(1)?];
    let start = |n: usize| Worker::start("switch", "switch", &format!("vfio:{}", nics[n]));
    let switches = [start(0), start(1)];
    let begin = move |i: usize| {
        let port = format!("vfio:{},switch=yes,near=shm:node-of-{}", nics[i / 2], i / 2);
        Worker::start(&format!("member {i}"), "member", &port)
    };
    Some((switches, begin))
}

/// Goal: a NIC that a driver of ours owns is shared by the processes of its node, who reach each
/// other by memory and everybody else through the switch.
#[test]
fn two_processes_behind_each_nic() {
    let Some((switches, begin)) = members() else { return };
    let told = all_to_all(4, begin, || {});
    for (i, (_, of)) in told.iter().enumerate() {
        let near = told[i ^ 1].0.as_str();
        let is_right = |(mac, &(len, _)): (&String, &(u64, u64))| (len > 60_000) == (mac == near);
        assert!(of.sessions.len() == 3 && of.sessions.iter().all(is_right), "{told:?}");
        assert!(of.near_frames > 100 && of.far_frames > 100, "{told:?}");
    }
    for mut switch in switches {
        switch.say("TELL");
        assert!(switch.answer("TOLD").starts_with("0 "));
        switch.say("END");
        switch.finish();
    }
}

/// Goal: the device that a killed switch left running is taken by the next one, and no operation is
/// lost.
#[test]
fn a_killed_switch_is_replaced() {
    let Some((switches, begin)) = members() else { return };
    let [first, second] = switches;
    let own = nic(0).unwrap();
    let serves = deaf_time(&own) + Duration::from_millis(400);
    let (mut first, mut next, mut kills) = (Some(first), Instant::now() + serves, 0);
    let told: Vec<(String, Told)> = all_to_all(4, begin, || {
        let now = Instant::now();
        if kills < 3 && now > next {
            first.take().unwrap().kill();
            first = Some(Worker::start("next switch", "switch", &format!("vfio:{own}")));
            // At least for as long as there was none: what is repeated waits longer each time.
            (kills, next) = (kills + 1, Instant::now() + serves + now.elapsed());
        }
    });
    println!("{kills} kills, {told:?}");
    assert!(kills > 0);
    // They have the NICs until they are gone, and the next test needs those.
    second.kill();
    first.unwrap().kill();
}
