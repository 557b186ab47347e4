//! Devices of DPDK on the interfaces of network namespaces: raw sockets and XDP on a wire, and taps
//! on bridges.

use barewire::errno::FI_EHOSTUNREACH;
use barewire_tests::nodes::{FABRIC, Nodes, or_skip};

use crate::lengths::{all_sizes, fewer_sizes, there_and_back};
use crate::rounds::kill_rounds;
use crate::start;
use crate::stream::{DOWN, NOTICED, Stream, lowered_mtu, removed};
use crate::supervisor::Worker;

fn af_packet() -> String {
    format!("dpdk:net_af_packet0,iface={FABRIC}")
}

#[test]
fn every_length_over_af_packet() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    there_and_back(|node, role| start(&nodes, node, role, &af_packet()), all_sizes);
}

/// The port takes the interface's MTU, and gives the driver room for it.
#[test]
fn every_length_over_af_packet_in_jumbo_frames_without_any_privilege() {
    let Some(nodes) = or_skip(Nodes::unprivileged_pair(9000)) else { return };
    there_and_back(
        |node, role| start(&nodes, node, role, &af_packet()),
        |mtu| {
            assert_eq!(mtu, 9000);
            all_sizes(mtu)
        },
    );
}

#[test]
fn every_length_over_a_bad_af_packet() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let port = format!("fault(loss=0.05,seed=3):{}", af_packet());
    there_and_back(|node, role| start(&nodes, node, role, &port), fewer_sizes);
}

/// A raw port of ours and one of DPDK understand each other.
#[test]
fn every_length_between_dpdk_and_afpacket() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let ports = [af_packet(), format!("afpacket:{FABRIC}")];
    there_and_back(|node, role| start(&nodes, node, role, &ports[node]), all_sizes);
}

#[test]
fn kills_over_af_packet() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let begin = |node, _name: &str| start(&nodes, node, "traffic", &af_packet());
    kill_rounds("kills-af-packet", begin, 8, 7);
}

#[test]
fn an_interface_that_flaps_is_no_error_and_one_that_stays_down_is() {
    let Some(mut stream) = Stream::new(&af_packet()) else { return };
    stream.outlives(DOWN[0], DOWN[1]);
    stream.end();
    let Some(stream) = Stream::new(&af_packet()) else { return };
    stream.ends(0, DOWN[0], &[FI_EHOSTUNREACH], NOTICED);
}

#[test]
fn an_interface_that_is_removed_is_an_error_at_once() {
    removed(&af_packet());
}

#[test]
fn frames_longer_than_a_lowered_mtu_wait_for_a_while_and_then_fail() {
    lowered_mtu(&af_packet());
}

/// Whether the kernel has AF_XDP at all; a test of it says nothing about a kernel without.
fn has_xdp() -> bool {
    // SAFETY: takes numbers; the descriptor is ours to close.
    unsafe {
        let socket = libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0);
        if socket >= 0 {
            libc::close(socket);
        }
        socket >= 0
    }
}

fn af_xdp() -> String {
    format!("dpdk:net_af_xdp0,iface={FABRIC}")
}

#[test]
fn every_length_over_af_xdp() {
    if !has_xdp() {
        println!("not applicable: this kernel has no AF_XDP");
        return;
    }
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    there_and_back(|node, role| start(&nodes, node, role, &af_xdp()), all_sizes);
}

#[test]
fn kills_over_af_xdp() {
    if !has_xdp() {
        println!("not applicable: this kernel has no AF_XDP");
        return;
    }
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let begin = |node, _name: &str| start(&nodes, node, "traffic", &af_xdp());
    kill_rounds("kills-af-xdp", begin, 6, 8);
}

/// Two nodes, each with a bridge that has the wire between them; a worker's tap joins the bridge of
/// its node when it is there.
fn bridged() -> Option<Nodes> {
    let nodes = or_skip(Nodes::pair(1500))?;
    for node in [0, 1] {
        nodes.bridge(node, "br0", 1500).and_then(|()| nodes.plug(node, FABRIC, "br0")).unwrap();
    }
    Some(nodes)
}

fn start_on_bridge(nodes: &Nodes, node: usize, role: &str, wrap: &str) -> Worker {
    let port = format!("{wrap}dpdk:net_tap0,iface=bw0");
    let worker = start(nodes, node, role, &port);
    nodes.plug(node, "bw0", "br0").unwrap();
    worker
}

#[test]
fn every_length_over_taps_on_bridges() {
    let Some(nodes) = bridged() else { return };
    there_and_back(|node, role| start_on_bridge(&nodes, node, role, ""), fewer_sizes);
}

#[test]
fn every_length_over_bad_taps_on_bridges() {
    let Some(nodes) = bridged() else { return };
    let wrap = "fault(loss=0.05,seed=3):";
    there_and_back(|node, role| start_on_bridge(&nodes, node, role, wrap), fewer_sizes);
}

#[test]
fn kills_over_taps_on_bridges() {
    let Some(nodes) = bridged() else { return };
    let begin = |node, _name: &str| start_on_bridge(&nodes, node, "traffic", "");
    kill_rounds("kills-taps", begin, 6, 9);
}

/// Goal: the datagrams of `ip(...)` by a device of DPDK, of both versions of IP, among themselves
/// and with the kernel's.
#[test]
fn every_length_inside_ip_over_taps_on_bridges() {
    let hosts = |node: usize| format!("ip(10.78.0.{}/24):", 101 + node);
    let hosts6 = |node: usize| format!("ip([2001:db8::a4e:{}]/96):", 65 + node);
    for (wraps, kernels, name) in [
        ([hosts(0), hosts(1)], "10.78.0.9/24", "10.78.0.9"),
        ([hosts6(0), hosts6(1)], "2001:db8::a4e:9/96", "[2001:db8::a4e:9]/96"),
    ] {
        let Some(nodes) = bridged() else { return };
        let begin = |node, role: &str| start_on_bridge(&nodes, node, role, &wraps[node]);
        there_and_back(begin, fewer_sizes);
        let nodad = if kernels.contains(':') { "nodad" } else { "" };
        // The wire is a port of the bridge, and its address would lead there past that.
        nodes.ip(1, &format!("addr flush dev {FABRIC}")).unwrap();
        nodes.ip(1, &format!("addr add {kernels} dev br0 {nodad}")).unwrap();
        let begin = |node, role: &str| match node {
            0 => start_on_bridge(&nodes, 0, role, &wraps[0]),
            _ => start(&nodes, 1, role, &format!("udp:{name}")),
        };
        there_and_back(begin, fewer_sizes);
    }
}
