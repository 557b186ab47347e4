//! Names of ports on kernel interfaces and sockets.

use super::host_port::split_host_port;
use super::spec::{
    Encapsulation, PortInfo, bad_spec, device_and_options, no_option, parse, yes_or_no,
};
use crate::backend::afpacket::{AfPacket, AfPacketSettings};
use crate::backend::inet::{addresses, host_text};
use crate::backend::netdev::{Accept, links};
use crate::backend::udp::{Udp, UdpSettings};
use crate::backend::xdp::{QUEUES_MAX, Queues, RING_COUNTS, Xdp, XdpMode, XdpSettings, survey};
use crate::error::OpenError;
use crate::port::Port;

/// Opens `afpacket:INTERFACE,...`, for frames with the encapsulation `encap`.
pub(super) fn afpacket(spec: &str, encap: Encapsulation) -> Result<Box<dyn Port>, OpenError> {
    let Encapsulation { vlan, udp_addr } = encap;
    let settings = AfPacketSettings { vlan, udp_addr, ..afpacket_settings(spec)? };
    Ok(Box::new(AfPacket::open(&settings)?))
}

/// Parses `promisc=` or `stations=`.
fn accept(spec: &str, key: &str, value: &str) -> Result<Accept, OpenError> {
    match (key, value) {
        ("stations", "all") => Ok(Accept::Node),
        ("stations", "own") => Ok(Accept::Own),
        ("stations", _) => Err(bad_spec(spec, "write stations=own or stations=all")),
        _ => Ok(if yes_or_no(spec, key, value)? { Accept::All } else { Accept::Own }),
    }
}

/// Whether [`afpacket`] would open it.
pub(super) fn check_afpacket(spec: &str) -> Result<(), OpenError> {
    afpacket_settings(spec)?.check()
}

fn afpacket_settings(spec: &str) -> Result<AfPacketSettings, OpenError> {
    let (interface, options) = device_and_options(spec, "afpacket").ok_or_else(|| {
        bad_spec(spec, "which interface? write afpacket:eth0; barewire info lists them")
    })?;
    let mut settings = AfPacketSettings::named(interface);
    for (key, value) in options {
        match key {
            "mac" => settings.station = Some(parse(spec, value)?),
            "mtu" => settings.mtu = Some(parse(spec, value)?),
            "ring" => settings.ring_count = Some(parse(spec, value)?),
            "qdisc" => settings.qdisc = yes_or_no(spec, key, value)?,
            "promisc" | "stations" => {
                settings.accept = settings.accept.max(accept(spec, key, value)?);
            }
            _ => {
                let known = "mac=, mtu=, ring=, qdisc=, promisc=, stations=, near= and switch=";
                return Err(no_option(spec, key, known));
            }
        }
    }
    if !matches!(settings.ring_count, None | Some(64..=65_536)) {
        return Err(bad_spec(spec, "ring= is 64 to 65536 frames"));
    }
    Ok(settings)
}

/// Opens `xdp:INTERFACE,...`, likewise.
pub(super) fn xdp(spec: &str, encap: Encapsulation) -> Result<Box<dyn Port>, OpenError> {
    let Encapsulation { vlan, udp_addr } = encap;
    let settings = XdpSettings { vlan, udp_addr, ..xdp_settings(spec)? };
    Ok(Box::new(Xdp::open(&settings)?))
}

/// Whether [`xdp()`] would open it.
pub(super) fn check_xdp(spec: &str) -> Result<(), OpenError> {
    xdp_settings(spec)?.check()
}

fn xdp_settings(spec: &str) -> Result<XdpSettings, OpenError> {
    let (interface, options) = device_and_options(spec, "xdp").ok_or_else(|| {
        bad_spec(spec, "which interface? write xdp:eth0; barewire info lists them")
    })?;
    let mut settings = XdpSettings::named(interface);
    for (key, value) in options {
        match key {
            "queue" => settings.queues = queues(spec, value)?,
            "mode" => {
                settings.mode = Some(match value {
                    "native" => XdpMode::Native,
                    "generic" => XdpMode::Generic,
                    _ => return Err(bad_spec(spec, "write mode=native or mode=generic")),
                });
            }
            "zerocopy" => settings.zero_copy = Some(yes_or_no(spec, key, value)?),
            "busypoll" => settings.busy_poll = yes_or_no(spec, key, value)?,
            "mac" => settings.station = Some(parse(spec, value)?),
            "mtu" => settings.mtu = Some(parse(spec, value)?),
            "ring" => settings.ring_count = Some(parse(spec, value)?),
            "promisc" | "stations" => {
                settings.accept = settings.accept.max(accept(spec, key, value)?);
            }
            "qdisc" => {
                let why = "its frames bypass the queueing discipline; afpacket: has qdisc=yes";
                return Err(bad_spec(spec, why));
            }
            _ => {
                let known = "queue=, mode=, zerocopy=, busypoll=, mac=, mtu=, ring=, promisc=, \
                             stations=, near= and switch=";
                return Err(no_option(spec, key, known));
            }
        }
    }
    let is_count = |count: usize| count.is_power_of_two() && RING_COUNTS.contains(&count);
    if settings.ring_count.is_some_and(|count| !is_count(count)) {
        return Err(bad_spec(spec, "ring= is a power of two from 64 to 16384"));
    }
    Ok(settings)
}

/// Parses `queue=`: a number, a range, or `free`.
fn queues(spec: &str, value: &str) -> Result<Queues, OpenError> {
    if value == "free" {
        return Ok(Queues::Free);
    }
    let (first, last) = value.split_once('-').unwrap_or((value, value));
    let queues = parse(spec, first)?..=parse(spec, last)?;
    if queues.is_empty() || queues.end() - queues.start() >= QUEUES_MAX {
        let why = format!("write queue=3, or queue=0-3 for several, at most {QUEUES_MAX}");
        return Err(bad_spec(spec, why));
    }
    Ok(Queues::These(queues))
}

/// Opens `udp:ADDRESS,...`.
pub(super) fn udp(spec: &str) -> Result<Box<dyn Port>, OpenError> {
    Ok(Box::new(Udp::open(&udp_settings(spec)?)?))
}

/// Whether [`udp`] would open it.
pub(super) fn check_udp(spec: &str) -> Result<(), OpenError> {
    udp_settings(spec)?.check()
}

fn udp_settings(spec: &str) -> Result<UdpSettings, OpenError> {
    let (host_port, options) = device_and_options(spec, "udp").ok_or_else(|| {
        bad_spec(
            spec,
            "which address of this host? write udp:10.0.0.1, or udp:eth0 for that of eth0",
        )
    })?;
    let (host, port) = split_host_port(host_port);
    let is_bare = !host.in_brackets && port.is_some_and(|port| port.contains(':'));
    if host.is_v6() && host.bits != Some("96") || is_bare {
        let why = "hosts of a fabric have the first 96 bits of their IPv6 addresses in common; \
                   write udp:[2001:db8::a01:107]/96, or udp:eth0/96 for that of eth0";
        return Err(bad_spec(spec, why));
    }
    if host.in_brackets {
        parse::<std::net::Ipv6Addr>(spec, host.host)?;
    }
    let mut settings = UdpSettings { is_v6: host.is_v6(), ..UdpSettings::at(host.host) };
    settings.port = port.map(|port| parse(spec, port)).transpose()?;
    for (key, value) in options {
        match key {
            "mtu" => settings.mtu = Some(parse(spec, value)?),
            "dscp" => settings.dscp = parse(spec, value)?,
            "ecn" => settings.ecn = yes_or_no(spec, key, value)?,
            "busypoll" => settings.busy_poll = yes_or_no(spec, key, value)?,
            _ => return Err(no_option(spec, key, "mtu=, dscp=, ecn=, busypoll= and near=")),
        }
    }
    Ok(settings)
}

/// The interfaces of this machine, and its addresses.
pub(super) fn list() -> Vec<PortInfo> {
    let mut ports: Vec<PortInfo> = links()
        .into_iter()
        .filter(|link| link.is_ethernet)
        .map(|link| {
            let name = &link.name;
            let cable = if link.has_carrier { "" } else { ", no carrier" };
            let what = format!("interface {name}, raw sockets, mtu {}{cable}", link.mtu);
            let why_not = AfPacketSettings::named(name).check().err();
            let why_not = why_not.map(|why| why.to_string());
            PortInfo { spec: format!("afpacket:{name}"), what, why_not }
        })
        .collect();
    if ports.is_empty() {
        let what = "any Linux network interface, raw sockets".into();
        let why_not = Some("no Ethernet interface here, see: ip link".into());
        ports.push(PortInfo { spec: "afpacket".into(), what, why_not });
    }
    ports.extend(survey::nics().iter().map(|nic| {
        let name = &nic.link.name;
        let what = format!("interface {name}, AF_XDP, {}", nic.what());
        let why_not = XdpSettings::named(name).check().err();
        PortInfo { spec: format!("xdp:{name}"), what, why_not: why_not.map(|why| why.to_string()) }
    }));
    for (name, ip) in addresses() {
        let what = format!("UDP datagrams, interface {name}");
        ports.push(PortInfo { spec: format!("udp:{}", host_text(ip)), what, why_not: None });
    }
    ports
}
