//! Two processes on the two ends of a memif: one by DPDK's driver, the other by our own port.

use crate::lengths::{all_sizes, fewer_sizes, there_and_back};
use crate::rounds::kill_rounds;
use crate::supervisor::Worker;

/// Frames of 64 KiB: the largest that DPDK's packet buffers are made for.
pub(crate) const HUGE: &str = "mtu=60000";

/// Without loss, by short rings.
pub(crate) const NARROW: &str = "lossless=yes,ring=64,mtu=4000";

/// The port of the server (0) or the client (1) of a memif of its own for each test.
pub(crate) fn port(test: &str, place: usize, options: &str) -> String {
    let role = ["server", "client"][place];
    let socket = format!("barewire-test-{test}-{}", std::process::id());
    let options = if options.is_empty() { String::new() } else { format!("({options})") };
    format!("dpdk{options}:net_memif_{test}_{role},role={role},socket={socket}")
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
    every_length_mixed("mixedjumbo", ["mtu=9000", ",mtu=9000"]);
}

/// With a checksum on both sides, and loss on one.
#[test]
fn every_length_between_the_driver_and_our_own_memif_that_loses() {
    for ours in [0, 1] {
        let test = format!("mixedbad{ours}");
        let start = |place, role: &str| {
            let options = ["crc=yes", ",crc=yes,secret=open"];
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
