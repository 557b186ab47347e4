//! Parts of a port's name: kind, device, and address of a port over UDP.

use std::net::IpAddr;

use super::spec::skip_wrappers;
use crate::backend::udp;

/// The device's part of `spec`, without wrappers; `None` if a wrapper is not closed.
pub(super) fn device_of(spec: &str) -> Option<&str> {
    Some(&spec[skip_wrappers(spec, &["fault(", "pcap(", "ip(", "vlan("])?..])
}

/// Kind and device of the port that `spec` names, without wrappers and options: `("afpacket",
/// "eth0")`. The device of a default segment is empty.
pub fn kind_and_device(spec: &str) -> Option<(&str, &str)> {
    let device = device_of(spec)?.split(',').next()?;
    Some(device.split_once(':').unwrap_or((device, "")))
}

/// A host as written before a UDP port: `10.1.1.7`, `eth0`, `[2001:db8::a01:107]/96`, `eth0/96`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostText<'a> {
    /// Without brackets.
    pub(super) host: &'a str,
    /// It is in brackets: an IPv6 address.
    pub(super) in_brackets: bool,
    /// The text behind a slash.
    pub(super) bits: Option<&'a str>,
}

/// Splits `host_port` into host and UDP port, at the colon outside of brackets.
pub(super) fn split_host_port(host_port: &str) -> (HostText<'_>, Option<&str>) {
    let closing = host_port.find(']').filter(|_| host_port.starts_with('['));
    let colon = host_port[closing.unwrap_or(0)..].find(':').map(|at| at + closing.unwrap_or(0));
    let (whole, port) = match colon {
        Some(at) => (&host_port[..at], Some(&host_port[at + 1..])),
        None => (host_port, None),
    };
    (HostText::of(whole), port)
}

impl<'a> HostText<'a> {
    pub(super) fn of(text: &'a str) -> Self {
        let (text, bits) = text.split_once('/').map_or((text, None), |(h, b)| (h, Some(b)));
        let inside = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
        Self { host: inside.unwrap_or(text), in_brackets: inside.is_some(), bits }
    }

    /// Whether it selects IPv6.
    pub(super) fn is_v6(&self) -> bool {
        self.in_brackets || self.bits.is_some()
    }
}

/// Host and UDP port of a `udp:` port, and the offset in `spec` where they end.
fn host_port_in(spec: &str) -> Option<(HostText<'_>, Option<&str>, usize)> {
    let device = device_of(spec)?;
    let host_port = device.strip_prefix("udp:")?.split(',').next()?;
    let end = spec.len() - device.len() + "udp:".len() + host_port.len();
    let (host, port) = split_host_port(host_port);
    Some((host, port, end))
}

/// The same of an `ip(...)` port; the offset is the end of its options.
fn ip_host_port_in(spec: &str) -> Option<(HostText<'_>, Option<&str>, usize)> {
    let at = skip_wrappers(spec, &["fault(", "pcap("])?;
    let from = spec[at..].starts_with("ip(").then_some(at + "ip(".len())?;
    let list = spec[from..].split_once("):")?.0;
    let host = HostText::of(list.split_once('/')?.0);
    let port = list.split(',').find_map(|part| part.strip_prefix("port="));
    Some((host, port, from + list.len()))
}

/// IP address of the `udp:` or `ip(...)` port that `spec` names, and its UDP port if specified.
/// `None`: another kind of port, or an interface without an address. Queries the kernel if an
/// interface is named.
pub fn udp_host_port(spec: &str) -> Option<(IpAddr, Option<u16>)> {
    let (host, port, _) = ip_host_port_in(spec).or_else(|| host_port_in(spec))?;
    let port = port.map(str::parse).transpose().ok()?;
    Some((udp::address_of(host.host, host.is_v6())?, port))
}

/// `spec` with a UDP port added; `None` if it is no such port or has one.
pub fn with_udp_port(spec: &str, port: u16) -> Option<String> {
    let (found, option) = match ip_host_port_in(spec) {
        Some(found) => (found, ",port="),
        None => (host_port_in(spec)?, ":"),
    };
    let (_, None, end) = found else { return None };
    Some(format!("{}{option}{port}{}", &spec[..end], &spec[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_a_port_is_found_behind_wrappers() {
        for (spec, is) in [
            ("fault(loss=0.1):afpacket:eth0,near=no", Some(("afpacket", "eth0"))),
            ("fault():ip(10.1.1.7/24):fault():xdp:eth0,queue=1", Some(("xdp", "eth0"))),
            ("vfio:0000:05:00.0,mtu=900", Some(("vfio", "0000:05:00.0"))),
            ("shm,mac=02:00:00:00:00:01", Some(("shm", ""))),
            ("fault(", None),
        ] {
            assert_eq!(kind_and_device(spec), is, "{spec}");
        }
    }

    #[test]
    fn the_place_of_a_udp_port_is_found_behind_wrappers() {
        let here = IpAddr::from([127, 0, 0, 1]);
        let v6: IpAddr = "2001:db8::a01:107".parse().unwrap();
        for (spec, host_port, with) in [
            ("udp:127.0.0.1", Some((here, None)), Some("udp:127.0.0.1:7")),
            ("udp:127.0.0.1:52001,mtu=900", Some((here, Some(52001))), None),
            ("udp:127.0.0.1,near=no", Some((here, None)), Some("udp:127.0.0.1:7,near=no")),
            ("udp:lo,mtu=900", Some((here, None)), Some("udp:lo:7,mtu=900")),
            ("fault(loss=0.1):udp:lo", Some((here, None)), Some("fault(loss=0.1):udp:lo:7")),
            (
                "pcap(file=a:b,c):fault():udp:lo,mtu=900",
                Some((here, None)),
                Some("pcap(file=a:b,c):fault():udp:lo:7,mtu=900"),
            ),
            (
                "fault():ip(127.0.0.1/8,gw=127.0.0.2):afpacket:lo,mtu=900",
                Some((here, None)),
                Some("fault():ip(127.0.0.1/8,gw=127.0.0.2,port=7):afpacket:lo,mtu=900"),
            ),
            ("ip(127.0.0.1/8,port=52001):xdp:lo", Some((here, Some(52001))), None),
            ("ip(127.0.0.1):xdp:lo", None, None),
            ("ip(127.0.0.1/8", None, None),
            (
                "udp:[2001:db8::a01:107]/96,near=no",
                Some((v6, None)),
                Some("udp:[2001:db8::a01:107]/96:7,near=no"),
            ),
            ("fault():udp:[2001:db8::a01:107]/96:52001", Some((v6, Some(52001))), None),
            (
                "ip([2001:db8::a01:107]/112,gw=fe80::1):afpacket:lo",
                Some((v6, None)),
                Some("ip([2001:db8::a01:107]/112,gw=fe80::1,port=7):afpacket:lo"),
            ),
            ("udp:[2001:db8::a01:107:7", None, None),
            ("udp:nothing0/96", None, Some("udp:nothing0/96:7")),
            ("udp:nothing0", None, Some("udp:nothing0:7")),
            ("udp:lo:x", None, None),
            ("shm:udp:127.0.0.1", None, None),
            ("afpacket:lo", None, None),
            ("fault(", None, None),
            ("udp", None, None),
            ("", None, None),
        ] {
            assert_eq!(udp_host_port(spec), host_port, "{spec}");
            assert_eq!(with_udp_port(spec, 7).as_deref(), with, "{spec}");
        }
    }
}
