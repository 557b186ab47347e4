//! Checks of what the ports on a wire need: interfaces, raw sockets, buffers of UDP.

use barewire_driver::backend::netdev::Egress;
use barewire_driver::backend::xdp::survey::XdpNic;

use super::machine::{Machine, SwitchedDevice};
use super::{AFPACKET, Check, SPEED, XDP};

/// Bits of a set of capabilities.
const NET_ADMIN: u32 = 12;
const NET_RAW: u32 = 13;

/// Memory for a burst of frames that arrives between polls, bytes.
const BUFFER_LEN: u64 = 4 << 20;

/// Most interfaces that are listed with their egress processing.
const EGRESS_MAX: usize = 3;

pub(super) fn interfaces(machine: &Machine) -> Check {
    let name = "interfaces";
    let wires = || machine.links.iter().filter(|link| link.is_ethernet && !link.is_loopback);
    let up: Vec<String> = wires()
        .filter(|link| link.is_up && link.has_carrier)
        .map(|link| format!("{} (mtu {})", link.name, link.mtu))
        .collect();
    if !up.is_empty() {
        return Check::ok(name, AFPACKET, up.join(", "));
    }
    if let Some(down) = wires().find(|link| !link.is_up) {
        let mend = format!("sudo ip link set {} up", down.name);
        return Check::missing(name, AFPACKET, format!("{} is down", down.name), mend);
    }
    match wires().next() {
        Some(idle) => {
            let found = format!("{} has no carrier: is its cable in?", idle.name);
            Check::missing(name, AFPACKET, found, format!("sudo ethtool {}", idle.name))
        }
        None => Check::missing(name, AFPACKET, "no Ethernet interface", "ip link"),
    }
}

pub(super) fn raw_socket(machine: &Machine) -> Check {
    let name = "raw-socket";
    if may(machine, NET_RAW) {
        return Check::ok(name, AFPACKET, "this program may open them (CAP_NET_RAW)");
    }
    let found = "this program may not open them (CAP_NET_RAW)";
    let served = |of: &&SwitchedDevice| of.serves.is_ok() && of.port.starts_with("afpacket:");
    if let Some(of) = machine.switched_devices.iter().find(served) {
        return Check::ok(name, AFPACKET, format!("{found}; {} has a switch for it", of.port));
    }
    Check::missing(name, AFPACKET, found, "sudo setcap cap_net_raw+ep \"$(command -v barewire)\"")
}

/// Whether a port `xdp` opens, and what each interface gives it.
pub(super) fn xdp(machine: &Machine) -> Check {
    let name = "xdp";
    if let Err((why, mend)) = &machine.xdp {
        return Check::missing(name, XDP, why, mend);
    }
    let of = |nic: &XdpNic| format!("{} ({})", nic.link.name, nic.what());
    let found: Vec<String> = machine.xdp_nics.iter().map(of).collect();
    let found = found.join(", ");
    // One that can be opened as it is does.
    let steering = machine.xdp_nics.iter().map(XdpNic::steering);
    match steering.reduce(Option::and) {
        None => Check::missing(name, XDP, "no Ethernet interface", "ip link"),
        Some(None) => Check::ok(name, XDP, found),
        Some(Some(mend)) => Check::warn(name, XDP, found, mend),
    }
}

/// Whether the kernel does anything to frames that leave, which those of `afpacket` and `xdp`
/// bypass.
pub(super) fn egress(machine: &Machine) -> Check {
    let name = "egress";
    let Some((first, _)) = machine.egress.first() else {
        let found = "no queueing discipline or tc filter that afpacket and xdp would bypass";
        return Check::ok(name, AFPACKET, found);
    };
    let of = |(name, egress): &(String, Egress)| {
        let filters = egress.is_filtered.then_some("tc filters");
        let what = egress.disciplines.iter().map(String::as_str).chain(filters);
        format!("{name} ({})", what.collect::<Vec<_>>().join(", "))
    };
    let shown = machine.egress.iter().take(EGRESS_MAX).map(of).collect::<Vec<_>>().join(", ");
    let more = match machine.egress.len().saturating_sub(EGRESS_MAX) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let found =
        format!("frames of afpacket and xdp bypass what is done at egress of {shown}{more}");
    Check::warn(name, AFPACKET, found, format!("afpacket:{first},qdisc=yes, or udp:{first}"))
}

pub(super) fn udp_buffers(machine: &Machine) -> Check {
    let name = "udp-buffers";
    let limit = machine.number("/proc/sys/net/core/rmem_max").unwrap_or(0);
    if may(machine, NET_ADMIN) {
        return Check::ok(name, SPEED, "this program may choose their size (CAP_NET_ADMIN)");
    }
    if limit >= BUFFER_LEN {
        return Check::ok(name, SPEED, format!("up to {limit} bytes"));
    }
    let mend = "sudo sysctl -w net.core.rmem_max=8388608 net.core.wmem_max=8388608";
    let found = format!("up to {limit} bytes: the port udp loses frames that come in bursts");
    Check::warn(name, SPEED, found, mend)
}

/// Whether this process has a capability.
fn may(machine: &Machine, bit: u32) -> bool {
    let status = machine.read("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.unwrap_or(0) >> bit & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use barewire_driver::backend::netdev::Link;

    use crate::doctor::Status;
    use crate::doctor::machine::fixture::{Fixture, link, xdp_nic};

    #[test]
    fn the_first_interface_that_can_be_mended_is_named() {
        let of = |links| interfaces(&Fixture::empty().links(links).machine());
        let lo = || Link { is_loopback: true, ..link("lo") };
        let check = of(vec![lo(), link("eth0"), link("eth1")]);
        assert_eq!((check.status, &*check.found), (Status::Ok, "eth0 (mtu 1500), eth1 (mtu 1500)"));
        let down = Link { is_up: false, has_carrier: false, ..link("eth0") };
        let check = of(vec![lo(), down.clone()]);
        assert_eq!(check.mend.unwrap(), "sudo ip link set eth0 up");
        let check = of(vec![down, link("eth1")]);
        assert_eq!((check.status, &*check.found), (Status::Ok, "eth1 (mtu 1500)"));
        let check = of(vec![Link { has_carrier: false, ..link("eth0") }]);
        assert!(check.found.contains("no carrier"), "{check:?}");
        assert_eq!(of(vec![lo()]).status, Status::Missing);
    }

    #[test]
    fn interfaces_for_xdp_are_told_with_what_their_drivers_can() {
        let of = |nics| xdp(&Fixture::full().xdp(Ok(()), nics).machine());
        let check = of(vec![xdp_nic("eth0", 128), xdp_nic("eth1", 1)]);
        let both = "eth0 (virtio_net: native, zero-copy, 128 receive queues), \
                    eth1 (virtio_net: native, zero-copy)";
        assert_eq!((check.status, &*check.found), (Status::Ok, both));
        let check = of(vec![xdp_nic("eth0", 64)]);
        assert_eq!((check.status, check.found.contains("64 receive queues")), (Status::Ok, true));
        let check = of(vec![xdp_nic("eth0", 65)]);
        assert_eq!(check.status, Status::Warn);
        assert!(check.mend.unwrap().starts_with("ethtool -L eth0 combined 64, or ethtool -N eth0"));
        assert_eq!(of(Vec::new()).status, Status::Missing);
        let plain = XdpNic { driver: None, features: None, ..xdp_nic("eth0", 1) };
        let found = of(vec![plain]).found;
        assert_eq!(found, "eth0 (its driver: the kernel does not say what it can)");
        let none = Fixture::full().xdp(Err(("no".to_owned(), "use x".to_owned())), Vec::new());
        let check = xdp(&none.machine());
        assert_eq!(
            (check.status, &*check.found, check.mend),
            (Status::Missing, "no", Some("use x".into()))
        );
    }

    #[test]
    fn a_bypassed_queueing_discipline_is_reported() {
        let mut machine = Fixture::full().machine();
        assert_eq!(egress(&machine).status, Status::Ok);
        let of = |disciplines: &[&str], is_filtered| Egress {
            disciplines: disciplines.iter().map(|&name| name.to_owned()).collect(),
            is_filtered,
        };
        machine.egress = vec![
            ("eth0".to_owned(), of(&["htb", "netem"], true)),
            ("eth1".to_owned(), of(&[], true)),
        ];
        let check = egress(&machine);
        assert_eq!(check.status, Status::Warn);
        assert!(check.found.ends_with("eth0 (htb, netem, tc filters), eth1 (tc filters)"));
        assert_eq!(check.mend.unwrap(), "afpacket:eth0,qdisc=yes, or udp:eth0");
        machine.egress.extend([2, 3, 4].map(|n| (format!("eth{n}"), of(&["tbf"], false))));
        let found = egress(&machine).found;
        assert!(found.ends_with("eth1 (tc filters), eth2 (tbf) and 2 more"), "{found}");
    }

    #[test]
    fn permissions_are_read_from_the_capabilities() {
        let of =
            |set: &str| Fixture::empty().with("/proc/self/status", &format!("CapEff:\t{set}\n"));
        let all = of("000001ffffffffff");
        let both = (raw_socket(&all.machine()).status, udp_buffers(&all.machine()).status);
        assert_eq!(both, (Status::Ok, Status::Ok));
        let raw = of("0000000000002000");
        assert_eq!(raw_socket(&raw.machine()).status, Status::Ok);
        assert_eq!(udp_buffers(&raw.machine()).status, Status::Warn);
        let wide = raw.with("/proc/sys/net/core/rmem_max", "8388608\n");
        assert_eq!(udp_buffers(&wide.machine()).status, Status::Ok);
        let none = of("0000000000001000");
        let mut machine = none.machine();
        let check = raw_socket(&machine);
        assert!(check.mend.unwrap().starts_with("sudo setcap cap_net_raw+ep"));
        let (port, socket) = ("afpacket:eth0".to_owned(), "x.sock".to_owned());
        let refusal = Err(("not you".to_owned(), "see: --user".to_owned()));
        for (serves, status) in [(Ok(()), Status::Ok), (refusal, Status::Missing)] {
            machine.switched_devices =
                vec![SwitchedDevice { port: port.clone(), socket: socket.clone(), serves }];
            assert_eq!(raw_socket(&machine).status, status);
        }
    }
}
