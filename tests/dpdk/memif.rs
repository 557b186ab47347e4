//! Two processes on the two ends of a memif.

use crate::lengths::{all_sizes, fewer_sizes, there_and_back};
use crate::rounds::kill_rounds;
use crate::supervisor::Worker;

/// The port of the server (0) or the client (1) of a memif of its own for each test.
fn port(test: &str, place: usize, options: &str) -> String {
    let role = ["server", "client"][place];
    let socket = format!("barewire-test-{test}-{}", std::process::id());
    format!("dpdk{options}:net_memif_{test},role={role},socket={socket}")
}

/// The client comes first and finds no server yet.
#[test]
fn every_length_over_memif() {
    let start = |place, role: &str| Worker::start(role, role, &port("all", place, ""));
    there_and_back(start, all_sizes);
}

#[test]
fn every_length_over_memif_in_jumbo_frames() {
    let start = |place, role: &str| Worker::start(role, role, &port("jumbo", place, "(mtu=9000)"));
    there_and_back(start, |mtu| {
        assert_eq!(mtu, 9000);
        all_sizes(mtu)
    });
}

/// Frames of 64 KiB: the largest that DPDK's packet buffers are made for.
#[test]
fn every_length_over_memif_in_huge_frames() {
    let start = |place, role: &str| Worker::start(role, role, &port("huge", place, "(mtu=60000)"));
    there_and_back(start, all_sizes);
}

/// Goal: where nothing is kept to be sent again, nothing is lost either.
#[test]
fn every_length_over_a_memif_that_loses_nothing() {
    let options = "(lossless=yes)";
    let start = |place, role: &str| Worker::start(role, role, &port("bare", place, options));
    there_and_back(start, all_sizes);
}

#[test]
fn every_length_over_a_bad_memif() {
    let start = |place, role: &str| {
        let port = format!("fault(loss=0.05,seed=3):{}", port("bad", place, ""));
        Worker::start(role, role, &port)
    };
    there_and_back(start, fewer_sizes);
}

#[test]
fn kills_over_memif() {
    let start = |place, name: &str| Worker::start(name, "traffic", &port("kills", place, ""));
    kill_rounds("kills-memif", start, 12, 5);
}

#[test]
fn kills_over_a_memif_that_loses_nothing() {
    let options = "(lossless=yes)";
    let start =
        |place, name: &str| Worker::start(name, "traffic", &port("killsbare", place, options));
    kill_rounds("kills-bare-memif", start, 6, 7);
}

#[test]
fn kills_over_a_bad_memif() {
    let start = |place, name: &str| {
        let port = format!("fault(loss=0.05,seed=9):{}", port("killsbad", place, ""));
        Worker::start(name, "traffic", &port)
    };
    kill_rounds("kills-bad-memif", start, 6, 6);
}
