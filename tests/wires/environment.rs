//! What an operator gets wrong with an interface or an address: one line each that names the
//! command that mends it.

use barewire::errno::*;
use barewire::flags::Caps;
use barewire::{FabricAttr, Info, fabric};
use barewire_tests::nodes::{Nodes, or_skip};

use crate::start;
use crate::worker::{say, settings};

/// The process that tries to open its port: says the code and the line, or `0`.
pub(crate) fn try_open() {
    let port = std::env::var("BAREWIRE_E2E_PORT").unwrap();
    let mut info = Info { caps: Caps::MSG, ..Info::default() };
    info.domain_attr.name = Some(port);
    let fabric = fabric(&FabricAttr::default()).unwrap();
    let opened = fabric.domain_with(&info, settings());
    match &opened {
        Ok(domain) => say(&format!("ADDR 0 {} mtu {}", domain.port().station, domain.port().mtu)),
        Err(e) => say(&format!("ADDR {} {e}", e.error.fi_errno())),
    }
    // Until the supervisor is done with us.
    let _ = std::io::stdin().read_line(&mut String::new());
    drop(opened);
}

/// What opening `port` in a node comes to: a code and the line.
pub(crate) fn outcome(nodes: &Nodes, role: &str, port: &str) -> (i32, String) {
    let mut opener = start(nodes, 0, role, port);
    opener.say("END");
    let said = opener.addr.clone();
    opener.finish();
    let (code, line) = said.split_once(' ').unwrap();
    (code.parse().unwrap(), line.to_owned())
}

pub(crate) fn refused(nodes: &Nodes, port: &str, code: i32, says: &[&str]) {
    let (got, line) = outcome(nodes, "opener", port);
    assert_eq!(got, code, "{port}: {line}");
    for part in says {
        assert!(line.contains(part), "{port}: {line}");
    }
}

#[test]
fn interfaces_that_are_not_fit_for_use() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let open = |port: &str| outcome(&nodes, "opener", port);
    assert_eq!(open("afpacket:fab0").0, 0);
    refused(&nodes, "afpacket:eth9", FI_ENODEV, &["no such interface", "fab0", "ip link"]);
    refused(&nodes, "afpacket:fab0,mtu=9000", FI_EINVAL, &["9000", "mtu=1500"]);
    refused(&nodes, "afpacket:fab0,mac=01:00:00:00:00:01", FI_EINVAL, &["first byte", "mac="]);
    nodes.ip(0, "link set fab0 down").unwrap();
    refused(&nodes, "afpacket:fab0", FI_ENETDOWN, &["is down", "ip link set fab0 up"]);
    nodes.ip(0, "link set fab0 mtu 100").unwrap();
    nodes.ip(0, "link set fab0 up").unwrap();
    refused(&nodes, "afpacket:fab0", FI_EINVAL, &["100", "ip link set fab0 mtu 1500"]);
    // A tunnel without Ethernet.
    if nodes.ip(0, "tuntap add tun9 mode tun").is_ok() {
        refused(&nodes, "afpacket:tun9", FI_ENODEV, &["no Ethernet", "udp:"]);
    }
}

#[test]
fn addresses_that_are_not_fit_for_use() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    assert_eq!(outcome(&nodes, "opener", "udp:10.78.0.1").0, 0);
    refused(&nodes, "udp:10.78.0.2", FI_ENODEV, &["10.78.0.1 (fab0)", "udp:ADDRESS"]);
    refused(&nodes, "udp:fab0:80", FI_EINVAL, &["49152 to 65535"]);
    refused(&nodes, "udp:fab0,mtu=1500", FI_EINVAL, &["mtu=1458"]);
    let mut first = start(&nodes, 0, "opener", "udp:fab0:50000");
    refused(&nodes, "udp:fab0:50000", FI_EADDRINUSE, &["in use", "ss -ulnp"]);
    first.say("END");
    first.finish();
}

/// The first process on an interface has its MAC, the second a number behind it, and a third cannot
/// have the address of either. When the first has gone, killed even, its address is free.
#[test]
fn two_processes_share_an_interface() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let station = |said: &str| said.split_whitespace().nth(1).unwrap().to_owned();
    let first = start(&nodes, 0, "opener", "afpacket:fab0");
    let second = start(&nodes, 0, "opener", "afpacket:fab0");
    let (own, other) = (station(&first.addr), station(&second.addr));
    assert_eq!(other, format!("{own}.1"));
    for taken in [&own, &other] {
        let port = format!("afpacket:fab0,mac={taken}");
        refused(&nodes, &port, FI_EADDRINUSE, &[taken, "in use"]);
    }
    first.kill();
    let again = start(&nodes, 0, "opener", "afpacket:fab0");
    assert_eq!(station(&again.addr), own);
    again.kill();
    second.kill();
}

/// Without CAP_NET_RAW: the process gives up its rights before it opens the port.
#[test]
fn a_raw_socket_without_permission() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let (code, line) = outcome(&nodes, "powerless", "afpacket:fab0");
    assert_eq!(code, FI_EACCES, "{line}");
    assert!(line.contains("CAP_NET_RAW") && line.contains("setcap cap_net_raw+ep"), "{line}");
    // The other port needs none, but for busy polling.
    assert_eq!(outcome(&nodes, "powerless", "udp:fab0").0, 0);
    let (code, line) = outcome(&nodes, "powerless", "udp:fab0,busypoll=yes");
    assert_eq!(code, FI_EACCES, "{line}");
    assert!(line.contains("CAP_NET_ADMIN") && line.contains("setcap cap_net_admin+ep"), "{line}");
}

/// Gives up every right of root.
pub(crate) fn without_power() {
    // Version 3 of the capability interface: two words each of effective, permitted, inheritable.
    let head = [0x2008_0522_u32, 0];
    let none = [0_u32; 6];
    // SAFETY: `capset` reads two words and six, which live across the call.
    let done = unsafe { libc::syscall(libc::SYS_capset, head.as_ptr(), none.as_ptr()) };
    assert_eq!(done, 0);
}
