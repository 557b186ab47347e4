//! What two processes on the ends of a memif have to stand, whoever drives it: the suites `wires`
//! and `dpdk` run it each over their own port, by the `port` of their module `memif`.

use crate::lengths::{all_sizes, fewer_sizes, there_and_back};
use crate::memif::{HUGE, NARROW, port};
use crate::one_sided::{a_peer_that_goes, many_both_ways};
use crate::rounds::kill_rounds;
use crate::supervisor::Worker;

/// As [`port`], inside a wrapper that loses frames.
fn bad(test: &str, place: usize, seed: u64) -> String {
    format!("fault(loss=0.05,seed={seed}):{}", port(test, place, ""))
}

/// The client comes first and finds no server yet.
#[test]
fn every_length_over_a_memif() {
    let start = |place, role: &str| Worker::start(role, role, &port("all", place, ""));
    there_and_back(start, all_sizes);
}

#[test]
fn every_length_over_a_memif_in_jumbo_frames() {
    let start = |place, role: &str| Worker::start(role, role, &port("jumbo", place, "mtu=9000"));
    there_and_back(start, |mtu| {
        assert_eq!(mtu, 9000);
        all_sizes(mtu)
    });
}

#[test]
fn every_length_over_a_memif_in_huge_frames() {
    let start = |place, role: &str| Worker::start(role, role, &port("huge", place, HUGE));
    there_and_back(start, all_sizes);
}

/// Goal: where nothing is kept to be sent again, nothing is lost either.
#[test]
fn every_length_over_a_memif_that_loses_nothing() {
    let options = "lossless=yes";
    let start = |place, role: &str| Worker::start(role, role, &port("bare", place, options));
    there_and_back(start, all_sizes);
}

#[test]
fn every_length_over_a_bad_memif() {
    let start = |place, role: &str| Worker::start(role, role, &bad("bad", place, 3));
    there_and_back(start, fewer_sizes);
}

#[test]
fn kills_over_a_memif() {
    let start = |place, name: &str| Worker::start(name, "traffic", &port("kills", place, ""));
    kill_rounds("kills-memif", start, 12, 5);
}

#[test]
fn kills_over_a_memif_that_loses_nothing() {
    let options = "lossless=yes";
    let start =
        |place, name: &str| Worker::start(name, "traffic", &port("killsbare", place, options));
    kill_rounds("kills-bare-memif", start, 12, 7);
}

#[test]
fn kills_over_a_bad_memif() {
    let start = |place, name: &str| Worker::start(name, "traffic", &bad("killsbad", place, 9));
    kill_rounds("kills-bad-memif", start, 6, 6);
}

/// Both ends in this process, over rings that are short for them.
#[test]
fn memory_of_others_over_a_memif_that_loses_nothing() {
    many_both_ways([0, 1].map(|place| port("memory", place, "lossless=yes")));
    many_both_ways([0, 1].map(|place| port("narrow", place, NARROW)));
}

#[test]
fn memory_of_others_over_a_memif_whose_other_end_goes() {
    a_peer_that_goes([0, 1].map(|place| port("goes", place, "lossless=yes")));
}
