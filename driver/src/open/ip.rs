//! Names of ports with IP and UDP encapsulation: `ip(10.1.1.7/24,gw=10.1.1.1):PORT`,
//! `ip([2001:db8::a01:107]/112,gw=fe80::1):PORT`.

use std::net::{IpAddr, SocketAddr};

use super::host_port::HostText;
use super::near::{kind_of, options};
use super::spec::{
    Encapsulation, PortInfo, bad_spec, no_option, parse, skip_wrappers, split_option,
    split_wrapper, yes_or_no,
};
use super::{nics, switch, wires};
use crate::backend::ip::{AddressClaim, Ip, IpSettings};
use crate::error::OpenError;
use crate::port::Port;

/// Kinds of ports that can be below, and whether the host's kernel receives the same frames.
pub(super) const BELOW: &[(&str, bool)] =
    &[("afpacket", true), ("xdp", true), ("vfio", false), ("dpdk", false), ("memif", false)];

/// Opens `ip(ADDRESS/PREFIX,...):PORT`; `below` opens `PORT`.
pub(super) fn open(
    spec: &str,
    below: impl Fn(&str, SocketAddr) -> Result<Box<dyn Port>, OpenError>,
) -> Result<Box<dyn Port>, OpenError> {
    let (settings, inner, beside_kernel) = parts(spec)?;
    let claim = AddressClaim::acquire(&settings, beside_kernel)?;
    let port = below(&inner, claim.addr())?;
    Ok(Box::new(Ip::open(&settings, claim, port)?))
}

/// Parses `spec`: the settings, the port below without options of a stand-alone port, and whether
/// the host's kernel receives its frames.
pub(super) fn parts(spec: &str) -> Result<(IpSettings, String, bool), OpenError> {
    let (wrapper, list, inner) = split_wrapper(spec)?;
    let settings = settings(wrapper, list)?;
    settings.check()?;
    let at = inner_device_offset(inner);
    let (before, device) = inner.split_at(at);
    let kind = kind_of(device);
    let Some((_, beside_kernel)) = BELOW.iter().find(|(below, _)| *below == kind) else {
        let why = "ip() stands around a port that writes Ethernet frames: afpacket:, xdp:, vfio:, \
                   dpdk: or memif:";
        return Err(bad_spec(spec, why));
    };
    let (device, through) = switch::split(device, false)?;
    if through == switch::SwitchOption::Yes {
        return Err(bad_spec(spec, "ip() takes the device itself; leave out switch=yes"));
    }
    refuse_options(spec, &device, &["stations", "promisc", "ethertype"])?;
    Ok((settings, format!("{before}{device}"), *beside_kernel))
}

/// Refuses options of `device` that apply only to frames without encapsulation.
pub(super) fn refuse_options(spec: &str, device: &str, names: &[&str]) -> Result<(), OpenError> {
    for name in names {
        if options(device).1.split(',').any(|part| part.split('=').next() == Some(name)) {
            let why = format!("{name}= is for frames of the fabric with nothing around them");
            return Err(bad_spec(spec, why));
        }
    }
    Ok(())
}

/// Offset of the device in `inner`, behind its wrappers.
pub(super) fn inner_device_offset(inner: &str) -> usize {
    skip_wrappers(inner, &["fault(", "pcap(", "vlan("]).unwrap_or(inner.len())
}

fn settings(spec: &str, list: &str) -> Result<IpSettings, OpenError> {
    let mut parts = list.split(',');
    let address = parts.next().unwrap_or("");
    let (ip, len) = address.split_once('/').ok_or_else(|| {
        let why = "which address? write ip(10.1.1.7/24):PORT, with the bits of its network, or \
                   ip([2001:db8::a01:107]/96):PORT";
        bad_spec(spec, why)
    })?;
    let mut settings = IpSettings::at(ip_in(spec, ip)?, parse(spec, len)?);
    for (key, value) in parts.map(split_option) {
        match key {
            "gw" => settings.gateway = Some(ip_in(spec, value)?),
            "port" => settings.port = Some(parse(spec, value)?),
            "ttl" => settings.ttl = parse(spec, value)?,
            "dscp" => settings.dscp = parse(spec, value)?,
            "ecn" => settings.ecn = yes_or_no(spec, key, value)?,
            "sum" => settings.sums = yes_or_no(spec, key, value)?,
            "mtu" => settings.mtu = Some(parse(spec, value)?),
            _ => {
                let known = "gw=, port=, ttl=, dscp=, ecn=, sum= and mtu=";
                return Err(no_option(spec, key, known));
            }
        }
    }
    Ok(settings)
}

/// An IPv4 or IPv6 address; IPv6 with or without brackets.
fn ip_in(spec: &str, text: &str) -> Result<IpAddr, OpenError> {
    match HostText::of(text) {
        HostText { host, in_brackets, bits: None } if in_brackets || host.contains(':') => {
            Ok(IpAddr::V6(parse(spec, host)?))
        }
        _ => Ok(IpAddr::V4(parse(spec, text)?)),
    }
}

/// Entry of the list of ports.
pub(super) fn kind_info() -> PortInfo {
    let why_not = "name address, router and port: ip(10.1.1.7/24,gw=10.1.1.1):afpacket:eth0";
    PortInfo {
        spec: "ip".into(),
        what: "UDP datagrams without the kernel, over a port of Ethernet frames".into(),
        why_not: Some(why_not.into()),
    }
}

/// Opens a device for frames with the encapsulation `encap`.
pub(super) fn device(spec: &str, encap: Encapsulation) -> Result<Box<dyn Port>, OpenError> {
    match kind_of(spec) {
        "afpacket" => wires::afpacket(spec, encap),
        "xdp" => wires::xdp(spec, encap),
        "vfio" => nics::vfio(spec),
        "memif" => super::memif::open(spec),
        #[cfg(feature = "dpdk")]
        "dpdk" => super::dpdk(spec),
        kind => Err(super::unknown_kind(spec, kind)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_address_gateway_and_the_port_below() {
        let spec = "ip(10.1.1.7/24,gw=10.1.1.1,port=50000,dscp=46,ttl=8,sum=yes,ecn=no,mtu=900):\
                    fault(loss=0.1):afpacket:eth0,mtu=1500";
        let (settings, inner, beside_kernel) = parts(spec).unwrap();
        let want = IpSettings {
            gateway: Some(IpAddr::from([10, 1, 1, 1])),
            port: Some(50_000),
            ttl: 8,
            dscp: 46,
            sums: true,
            ecn: false,
            mtu: Some(900),
            ..IpSettings::at(IpAddr::from([10, 1, 1, 7]), 24)
        };
        assert_eq!((settings, beside_kernel), (want, true));
        assert_eq!(inner, "fault(loss=0.1):afpacket:eth0,mtu=1500");
        let (_, inner, beside_kernel) = parts("ip(10.1.1.7/24):vfio:05:00.0,switch=no").unwrap();
        assert_eq!((inner.as_str(), beside_kernel), ("vfio:05:00.0", false));
        parts("ip(10.1.1.7/24):dpdk(mtu=9000):net_tap0,iface=x").unwrap();
        parts("ip(10.1.1.7/24):pcap(file=/tmp/x):memif:@x").unwrap();
    }

    #[test]
    fn wrong_names_say_what_to_write() {
        for (spec, says) in [
            ("ip:afpacket:eth0", "ip(OPTION=VALUE,...):PORT"),
            ("ip([2001:db8::7]):afpacket:eth0", "ip([2001:db8::a01:107]/96):PORT"),
            ("ip([10.1.1.7]/24):afpacket:eth0", "invalid IPv6 address"),
            ("ip([2001:db8::7]/64):afpacket:eth0", "write 96, or up to 128"),
            ("ip([2001:db8::7]/112,gw=10.1.1.1):afpacket:eth0", "ip route"),
            ("ip():afpacket:eth0", "write ip(10.1.1.7/24):PORT"),
            ("ip(10.1.1.7):afpacket:eth0", "write ip(10.1.1.7/24):PORT"),
            ("ip(10.1.1/24):afpacket:eth0", "invalid IPv4 address"),
            ("ip(10.1.1.7/x):afpacket:eth0", "not a number; write digits"),
            ("ip(10.1.1.7/40):afpacket:eth0", "write 1 to 32"),
            ("ip(10.1.1.7/24,gw=10.1.2.1):afpacket:eth0", "ip route"),
            ("ip(10.1.1.7/24,mask=1):afpacket:eth0", "there are gw=, port="),
            ("ip(10.1.1.7/24,port=80):afpacket:eth0", "49152 to 65535"),
            ("ip(10.1.1.7/24):udp:lo", "afpacket:, xdp:, vfio:"),
            ("ip(10.1.1.7/24):shm", "afpacket:, xdp:, vfio:"),
            ("ip(10.1.1.7/24):ip(10.1.1.8/24):afpacket:eth0", "afpacket:, xdp:, vfio:"),
            ("ip(10.1.1.7/24):", "afpacket:, xdp:, vfio:"),
            ("ip(10.1.1.7/24):fault(", "afpacket:, xdp:, vfio:"),
            ("ip(10.1.1.7/24):afpacket:eth0,switch=yes", "leave out switch=yes"),
            ("ip(10.1.1.7/24):afpacket:eth0,stations=all", "stations= is for frames"),
            ("ip(10.1.1.7/24):dpdk(ethertype=0x88b5):net_tap0", "ethertype= is for frames"),
        ] {
            let said = parts(spec).unwrap_err().to_string();
            assert!(said.contains(says) && !said.contains('\n'), "{spec}: {said}");
        }
    }
}
