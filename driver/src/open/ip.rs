//! Names of ports that put IP and UDP around frames: `ip(10.1.1.7/24,gw=10.1.1.1):PORT`,
//! `ip([2001:db8::a01:107]/112,gw=fe80::1):PORT`.

use std::net::{IpAddr, SocketAddr};

use super::near::{kind_of, options};
use super::place::HostText;
use super::spec::{Outer, PortInfo, bad, behind, no_option, pair, parse, wrapped, yes_or_no};
use super::{nics, switch, wires};
use crate::backend::ip::{AddressClaim, Ip, IpSettings};
use crate::error::OpenError;
use crate::port::Port;

/// Kinds of ports that can be below, and how the kernel of the host stands beside them: it hears
/// what they hear.
pub(super) const BELOW: &[(&str, bool)] =
    &[("afpacket", true), ("xdp", true), ("vfio", false), ("dpdk", false), ("memif", false)];

/// Opens `ip(ADDRESS/PREFIX,...):PORT`, in which `below` opens a port that wraps others or that no
/// kernel stands beside.
pub(super) fn open(
    spec: &str,
    below: impl Fn(&str, SocketAddr) -> Result<Box<dyn Port>, OpenError>,
) -> Result<Box<dyn Port>, OpenError> {
    let (settings, inner, beside_kernel) = parts(spec)?;
    let claim = AddressClaim::acquire(&settings, beside_kernel)?;
    let port = below(&inner, claim.addr())?;
    Ok(Box::new(Ip::open(&settings, claim, port)?))
}

/// What `spec` says: the port's settings, the port below, without the options of a port that
/// stands alone, and whether the kernel is beside that.
pub(super) fn parts(spec: &str) -> Result<(IpSettings, String, bool), OpenError> {
    let (wrapper, list, inner) = wrapped(spec)?;
    let settings = settings(wrapper, list)?;
    settings.check()?;
    let at = device_in(inner);
    let (before, device) = inner.split_at(at);
    let kind = kind_of(device);
    let Some((_, beside_kernel)) = BELOW.iter().find(|(below, _)| *below == kind) else {
        let why = "ip() stands around a port that writes Ethernet frames: afpacket:, xdp:, vfio:, \
                   dpdk: or memif:";
        return Err(bad(spec, why));
    };
    let (device, through) = switch::split(device, false)?;
    if through == switch::Choice::Yes {
        return Err(bad(spec, "ip() takes the device itself; leave out switch=yes"));
    }
    has_none_of(spec, &device, &["stations", "promisc", "ethertype"])?;
    Ok((settings, format!("{before}{device}"), *beside_kernel))
}

/// Refuses options of `device` that are for frames of the fabric as they are.
pub(super) fn has_none_of(spec: &str, device: &str, names: &[&str]) -> Result<(), OpenError> {
    for name in names {
        if options(device).1.split(',').any(|part| part.split('=').next() == Some(name)) {
            let why = format!("{name}= is for frames of the fabric with nothing around them");
            return Err(bad(spec, why));
        }
    }
    Ok(())
}

/// Where the device begins, behind what spoils, records or tags the frames below.
pub(super) fn device_in(inner: &str) -> usize {
    behind(inner, &["fault(", "pcap(", "vlan("]).unwrap_or(inner.len())
}

fn settings(spec: &str, list: &str) -> Result<IpSettings, OpenError> {
    let mut parts = list.split(',');
    let address = parts.next().unwrap_or("");
    let (ip, len) = address.split_once('/').ok_or_else(|| {
        let why = "which address? write ip(10.1.1.7/24):PORT, with the bits of its network, or \
                   ip([2001:db8::a01:107]/96):PORT";
        bad(spec, why)
    })?;
    let mut settings = IpSettings::at(ip_in(spec, ip)?, parse(spec, len)?);
    for (key, value) in parts.map(pair) {
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

/// An IP address, one of IPv6 in brackets or without.
fn ip_in(spec: &str, text: &str) -> Result<IpAddr, OpenError> {
    match HostText::of(text) {
        HostText { host, in_brackets, bits: None } if in_brackets || host.contains(':') => {
            Ok(IpAddr::V6(parse(spec, host)?))
        }
        _ => Ok(IpAddr::V4(parse(spec, text)?)),
    }
}

/// What the list of ports says.
pub(super) fn kind() -> PortInfo {
    let why_not = "name address, router and port: ip(10.1.1.7/24,gw=10.1.1.1):afpacket:eth0";
    PortInfo {
        spec: "ip".into(),
        what: "UDP datagrams without the kernel, over a port of Ethernet frames".into(),
        why_not: Some(why_not.into()),
    }
}

/// Opens a device that takes what `outer` says.
pub(super) fn device(spec: &str, outer: Outer) -> Result<Box<dyn Port>, OpenError> {
    match kind_of(spec) {
        "afpacket" => wires::afpacket(spec, outer),
        "xdp" => wires::xdp(spec, outer),
        "vfio" => nics::vfio(spec),
        "memif" => super::memif::open(spec),
        #[cfg(feature = "dpdk")]
        "dpdk" => super::dpdk(spec),
        kind => Err(super::unknown(spec, kind)),
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
