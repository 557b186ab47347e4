//! Processes of several users of a node, none of them with a privilege, behind root's switch.

use std::time::{Duration, Instant};

use barewire_tests::nodes::{Nodes, or_skip};
use barewire_tests::rng::Rng;

use crate::capture::barewire;
use crate::members::{Told, all_to_all};
use crate::supervisor::Worker;
use crate::switch::{NIC, PORT, end, switches};
use crate::{kills, start};

pub(crate) const ALICE: u32 = 65_534;
pub(crate) const BOB: u32 = 47_111;

/// Two nodes with switches, if we can be several users here.
pub(crate) fn nodes() -> Option<Nodes> {
    let root = nix::unistd::geteuid().is_root().then_some(());
    let nodes = or_skip(root.ok_or("only root can be several users".to_owned()))
        .and_then(|()| or_skip(Nodes::pair(1500)))?;
    let this = std::env::current_exe().unwrap();
    let runs = nodes.run(0, &format!("{} test -x {}", as_user(ALICE), this.display()));
    or_skip(runs.map_err(|why| format!("another user cannot run this program: {why}")))?;
    Some(nodes)
}

/// What a command begins with that runs as a user.
pub(crate) fn as_user(uid: u32) -> String {
    format!("setpriv --reuid {uid} --regid {uid} --clear-groups")
}

pub(crate) fn start_as(nodes: &Nodes, node: usize, uid: u32, role: &str, port: &str) -> Worker {
    let mut command = nodes.command(node, "setpriv");
    command.args(as_user(uid).split_whitespace().skip(1));
    command.arg(std::env::current_exe().unwrap());
    Worker::start_by(command, &format!("{role} of {uid} in node {node}"), role, port)
}

fn members<'a>(nodes: &'a Nodes, places: &'a [(usize, u32)]) -> impl Fn(usize) -> Worker + 'a {
    |i| start_as(nodes, places[i].0, places[i].1, "member", PORT)
}

/// Goal: processes of several users share a NIC that none of them may open, by its name alone; two
/// of one user reach each other by memory, two users never do; every kind of operation is right.
#[test]
fn users_share_a_nic_that_none_may_open() {
    let Some(nodes) = nodes() else { return };
    let switches = switches(&nodes);
    let places = [(0, ALICE), (0, ALICE), (0, BOB), (1, BOB)];
    let told = all_to_all(4, members(&nodes, &places), || {});
    for (i, (_, of)) in told.iter().enumerate() {
        for (j, (mac, _)) in told.iter().enumerate().filter(|(j, _)| *j != i) {
            let (len, _) = of.sessions[mac];
            assert_eq!(len > 60_000, places[i] == places[j], "{i} to {j}: {of:?}");
        }
    }
    end(switches);
}

/// Goal: without a near side too, a port's name alone leads through the switch that owns the NIC.
#[test]
fn a_user_without_a_near_side_goes_through_the_switch() {
    let Some(nodes) = nodes() else { return };
    let Some(barewire) = or_skip(barewire()) else { return };
    let switches = switches(&nodes);
    let command = "pingpong --port afpacket:fab0 --spawn --iterations 10 --size 8";
    let command = format!("env BAREWIRE_NEAR=0 {} {command}", barewire.display());
    nodes.run(0, &format!("{} {command}", as_user(ALICE))).unwrap();
    switches.into_iter().for_each(Worker::kill);
}

/// Goal: nobody finds another's segment: it has no name, and the descriptors of a process are its
/// user's.
#[test]
fn a_segment_is_closed_to_other_users() {
    let Some(nodes) = nodes() else { return };
    let switches = switches(&nodes);
    let alice = start_as(&nodes, 0, ALICE, "opener", PORT);
    let fds = format!("/proc/{}/fd", alice.id());
    let seen = nodes.run(0, &format!("ls -l {fds}")).unwrap();
    assert!(seen.contains("/memfd:switch-afpacket.fab0"), "{seen}");
    let why = nodes.run(0, &format!("{} ls {fds}", as_user(BOB))).unwrap_err();
    assert!(why.contains("Permission denied"), "{why}");
    // Nor can the one that has it make a file of it that outlives the descriptor.
    let fd = seen.lines().find(|line| line.contains("/memfd:switch")).unwrap();
    let (fd, _) = fd.split_once(" -> ").unwrap();
    let fd = fd.split_whitespace().last().unwrap();
    let why = nodes.run(0, &format!("{} truncate -s 0 {fds}/{fd}", as_user(ALICE))).unwrap_err();
    assert!(why.contains("Permission denied"), "{why}");
    let why = nodes.run(0, &format!("truncate -s 0 {fds}/{fd}")).unwrap_err();
    assert!(why.contains("Operation not permitted"), "{why}");
    alice.kill();
    for mut switch in switches {
        switch.say("END");
        switch.finish();
    }
}

/// Goal: processes of other users go on with the switch that comes after one that was killed: no
/// operation fails, every byte is right. Method: as of those of its own user.
#[test]
fn killed_switches_lose_no_operation_of_other_users() {
    let Some(nodes) = nodes() else { return };
    let (kills, seed) = (kills(10), 2900);
    println!("seed {seed}");
    let mut rng = Rng::new(seed, 0);
    let mut owners: [Option<Worker>; 2] = switches(&nodes).map(Some);
    let (mut killed, mut next) = (0, Instant::now());
    let mut gaps: Vec<Duration> = Vec::new();
    while killed < kills {
        let places = [(0, ALICE), (0, BOB), (1, ALICE), (1, BOB)];
        let told: Vec<(String, Told)> = all_to_all(4, members(&nodes, &places), || {
            std::thread::sleep(Duration::from_millis(1));
            if Instant::now() < next || killed == kills {
                return;
            }
            let (node, start_of) = (rng.index(2), Instant::now());
            owners[node].take().unwrap().kill();
            std::thread::sleep(Duration::from_millis(rng.index(100) as u64));
            owners[node] = Some(start(&nodes, node, "switch", NIC));
            gaps.push(start_of.elapsed());
            killed += 1;
            next = Instant::now() + Duration::from_millis(rng.index(150) as u64);
        });
        assert!(told.iter().all(|(_, of)| of.sessions.len() == 3));
    }
    println!("{killed} kills; without a switch for {:?} at most", gaps.iter().max());
}
