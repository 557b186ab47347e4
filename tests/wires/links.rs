//! Interfaces that go down, come back, change or vanish while a port is open on them.

use std::time::Duration;

use barewire::errno::{FI_EHOSTUNREACH, FI_ENETDOWN};
use barewire_tests::nodes::FABRIC;

use crate::stream::{FLAP, NOTICED, Stream};

const AFPACKET: &str = "afpacket:fab0";
const UDP: &str = "udp:fab0";

#[test]
fn a_link_that_flaps_for_a_second_is_no_error() {
    for port in [AFPACKET, UDP] {
        let Some(mut stream) = Stream::new(port) else { return };
        for node in [0, 1] {
            stream.ip(node, "link set fab0 down");
            stream.pause(FLAP);
            stream.ip(node, "link set fab0 up");
            stream.flows();
        }
        stream.end();
    }
}

#[test]
fn a_link_that_stays_down_ends_operations_with_an_error() {
    for (port, node) in [(AFPACKET, 0), (AFPACKET, 1), (UDP, 0)] {
        let Some(mut stream) = Stream::new(port) else { return };
        stream.ip(node, "link set fab0 down");
        let (code, took) = stream.fails();
        assert_eq!(code, FI_EHOSTUNREACH);
        assert!(took < NOTICED, "{took:?}");
        stream.sender.finish();
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
    let Some(mut stream) = Stream::new(AFPACKET) else { return };
    stream.ip(0, "link del fab0");
    let (code, took) = stream.fails();
    assert_eq!(code, FI_ENETDOWN);
    assert!(took < Duration::from_secs(1), "{took:?}");
    stream.sender.finish();
}

#[test]
fn frames_longer_than_a_lowered_mtu_wait_for_a_while_and_then_fail() {
    let Some(mut stream) = Stream::new(AFPACKET) else { return };
    for node in [0, 1] {
        stream.ip(node, "link set fab0 mtu 600");
        stream.pause(FLAP);
        stream.ip(node, "link set fab0 mtu 1500");
        stream.flows();
    }
    stream.ip(0, "link set fab0 mtu 600");
    let (code, took) = stream.fails();
    assert!([FI_ENETDOWN, FI_EHOSTUNREACH].contains(&code), "{code}");
    assert!(took < NOTICED, "{took:?}");
    stream.sender.finish();
    assert_eq!(FABRIC, "fab0");
}
