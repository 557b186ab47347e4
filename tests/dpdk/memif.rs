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

/// One end is ours without DPDK, the server (0) or the client (1); the other the driver's.
fn mixed(test: &str, place: usize, ours: usize, options: [&str; 2]) -> String {
    if place != ours {
        return port(test, place, options[0]);
    }
    let role = ["server", "client"][place];
    let (socket, options) = (format!("barewire-test-{test}-{}", std::process::id()), options[1]);
    format!("memif:@{socket},role={role}{options}")
}

/// Every length between the two, each in both roles.
fn every_length_mixed(test: &str, options: [&str; 2]) {
    for ours in [0, 1] {
        let test = format!("{test}{ours}");
        let start =
            |place, role: &str| Worker::start(role, role, &mixed(&test, place, ours, options));
        there_and_back(start, all_sizes);
    }
}

#[test]
fn every_length_between_the_driver_and_our_own_memif() {
    every_length_mixed("mixed", ["", ""]);
}

#[test]
fn every_length_between_the_driver_and_our_own_memif_in_jumbo_frames() {
    every_length_mixed("mixedjumbo", ["(mtu=9000)", ",mtu=9000"]);
}

/// With a checksum on both sides, and loss on one.
#[test]
fn every_length_between_the_driver_and_our_own_memif_that_loses() {
    for ours in [0, 1] {
        let test = format!("mixedbad{ours}");
        let start = |place, role: &str| {
            let options = ["(crc=yes)", ",crc=yes,secret=open"];
            let port = mixed(&test, place, ours, options);
            let port = match place == ours {
                true => format!("fault(loss=0.05,seed=3):{port}"),
                false => format!("{port},secret=open"),
            };
            Worker::start(role, role, &port)
        };
        there_and_back(start, fewer_sizes);
    }
}

#[test]
fn kills_between_the_driver_and_our_own_memif() {
    for (ours, seed) in [(0, 11), (1, 12)] {
        let test = format!("mixedkills{ours}");
        let start = |place, name: &str| {
            Worker::start(name, "traffic", &mixed(&test, place, ours, ["", ""]))
        };
        kill_rounds("kills-mixed-memif", start, 8, seed);
    }
}
