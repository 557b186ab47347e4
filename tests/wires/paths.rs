//! Paths that carry less than the interfaces at both of their ends.

use std::time::Duration;

use barewire::errno::FI_EHOSTUNREACH;
use barewire_tests::nodes::{FABRIC, Nodes, or_skip};

use crate::ip::{by_router, routed_of};
use crate::messages::{AFPACKET, UDP, there_and_back};
use crate::stream::{NOTICED, Stream};

/// Lengths of one frame, several and many.
fn sizes() -> Vec<usize> {
    vec![0, 64, 1400, 1500, 4096, 8900, 64 << 10, 1 << 20]
}

/// Goal: the commonest mistake with jumbo frames costs frame length and no message. Method: a
/// switch one of whose ports carries 1,500 bytes between two interfaces of 9,000.
#[test]
fn a_switch_that_carries_less_is_found_before_data_is_lost() {
    for ports in [[9000, 1500], [1500, 9000]] {
        let Some(nodes) = or_skip(Nodes::switched(9000, ports)) else { return };
        there_and_back(&nodes, [AFPACKET; 2], |mtu| {
            assert_eq!(mtu, 9000);
            sizes()
        });
    }
}

/// The same inside datagrams, which a switch drops without a word.
#[test]
fn a_switch_that_carries_less_is_found_inside_udp() {
    let Some(nodes) = or_skip(Nodes::switched(9000, [9000, 2000])) else { return };
    there_and_back(&nodes, [UDP; 2], |_mtu| sizes());
}

/// Goal: a router whose other side carries less is found before data is lost. To a kernel it says
/// so (ICMP), which a port past the kernel does not hear; the other way the link drops without a
/// word.
#[test]
fn a_router_that_carries_less_is_found() {
    let ports = |node| [by_router(node), UDP.to_owned()];
    for (at, kind) in [(1, 0), (0, 0), (1, 1), (0, 1)] {
        let Some(nodes) = routed_of(9000) else { return };
        nodes.ip(2, &format!("link set port{at} mtu 1400")).unwrap();
        for other in [0, 1] {
            let ports = [&*ports(0)[kind], &*ports(1)[other]];
            // Less the headers of IPv4 and UDP, and the Ethernet header inside.
            let found = 1000..=1400 - 28 - 14;
            // Few messages may be over before the search is.
            let mut lengths = [1, 20, 200].into_iter().map(|times| {
                let counts = there_and_back(&nodes, ports, |_mtu| sizes().repeat(times));
                println!("{ports:?}, {times} times: {counts:?}");
                counts.frame_max
            });
            assert!(lengths.any(|len| found.contains(&len)), "{ports:?}");
        }
    }
}

/// A filter that drops long frames one way only.
#[test]
fn a_filter_by_length_is_found_in_either_direction() {
    for node in [0, 1] {
        let Some(nodes) = or_skip(Nodes::pair(9000)) else { return };
        if or_skip(nodes.drop_longer(node, FABRIC, 3000)).is_some() {
            there_and_back(&nodes, [AFPACKET; 2], |_mtu| sizes());
        }
    }
}

/// Goal: a path that comes to carry less under an open session ends what waits, although the peer
/// answers all the time. Method: a stream of messages, and a filter that only short frames pass.
#[test]
fn a_path_that_comes_to_carry_less_is_an_error_in_time() {
    let Some(stream) = Stream::new(AFPACKET) else { return };
    if or_skip(stream.nodes().drop_longer(1, FABRIC, 600)).is_some() {
        // The clock of progress begins with the first repetition that is looked at.
        stream.has_ended(&[FI_EHOSTUNREACH], NOTICED + Duration::from_millis(500));
    }
}
