//! Interfaces that go down, come back, change or vanish while a port is open on them.

use barewire::errno::FI_EHOSTUNREACH;

use crate::stream::{DOWN, NOTICED, Stream, lowered_mtu, removed};

const AFPACKET: &str = "afpacket:fab0";
const UDP: &str = "udp:fab0";

#[test]
fn a_link_that_flaps_for_a_second_is_no_error() {
    for stream in [Stream::new(AFPACKET), Stream::patient(UDP)] {
        let Some(mut stream) = stream else { return };
        stream.outlives(DOWN[0], DOWN[1]);
        stream.end();
    }
}

#[test]
fn a_link_that_stays_down_ends_operations_with_an_error() {
    for (port, node) in [(AFPACKET, 0), (AFPACKET, 1), (UDP, 0)] {
        let Some(stream) = Stream::new(port) else { return };
        stream.ends(node, DOWN[0], &[FI_EHOSTUNREACH], NOTICED);
    }
}

#[test]
fn an_interface_that_is_renamed_goes_on() {
    let Some(mut stream) = Stream::new(AFPACKET) else { return };
    stream.ip(0, "link set fab0 down");
    stream.ip(0, "link set fab0 name other0");
    stream.ip(0, "link set other0 up");
    stream.flows();
    stream.end();
}

#[test]
fn an_interface_that_is_removed_is_an_error_at_once() {
    removed(AFPACKET);
}

#[test]
fn frames_longer_than_a_lowered_mtu_wait_for_a_while_and_then_fail() {
    lowered_mtu(AFPACKET);
}
