//! What the name of a port says: its kind, its device, and where one inside of UDP is.

use std::net::Ipv4Addr;

use super::spec::behind;
use crate::backend::udp;

/// The device's part of `spec`, behind whatever wraps it; `None` if a wrapper has no end.
pub(super) fn device_of(spec: &str) -> Option<&str> {
    Some(&spec[behind(spec, &["fault(", "pcap(", "ip(", "vlan("])?..])
}

/// The kind of the port that `spec` names, behind whatever wraps it, and its device, without
/// options: `("afpacket", "eth0")`. The device of a default segment is empty.
pub fn kind_and_device(spec: &str) -> Option<(&str, &str)> {
    let device = device_of(spec)?.split(',').next()?;
    Some(device.split_once(':').unwrap_or((device, "")))
}

/// The place of a `udp:` port: host and UDP port as `spec` says them, and where in it that ends.
fn place_in(spec: &str) -> Option<(&str, Option<&str>, usize)> {
    let device = device_of(spec)?;
    let place = device.strip_prefix("udp:")?.split(',').next()?;
    let end = spec.len() - device.len() + "udp:".len() + place.len();
    let (host, port) = place.split_once(':').map_or((place, None), |(h, p)| (h, Some(p)));
    Some((host, port, end))
}

/// The same of an `ip(...)` port: where its options end.
fn ip_place_in(spec: &str) -> Option<(&str, Option<&str>, usize)> {
    let at = behind(spec, &["fault(", "pcap("])?;
    let from = spec[at..].starts_with("ip(").then_some(at + "ip(".len())?;
    let list = spec[from..].split_once("):")?.0;
    let host = list.split_once('/')?.0;
    let port = list.split(',').find_map(|part| part.strip_prefix("port="));
    Some((host, port, from + list.len()))
}

/// The IPv4 address of the `udp:` or `ip(...)` port that `spec` names, and its UDP port if `spec`
/// says one. `None`: it names another kind of port, or an interface without an address. Asks the
/// kernel if an interface is named.
pub fn udp_place(spec: &str) -> Option<(Ipv4Addr, Option<u16>)> {
    let (host, port, _) = ip_place_in(spec).or_else(|| place_in(spec))?;
    let port = port.map(str::parse).transpose().ok()?;
    Some((udp::address_of(host)?, port))
}

/// `spec` with a UDP port, if it names such a port and says none.
pub fn with_udp_port(spec: &str, port: u16) -> Option<String> {
    let (found, option) = match ip_place_in(spec) {
        Some(found) => (found, ",port="),
        None => (place_in(spec)?, ":"),
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
        let here = Ipv4Addr::LOCALHOST;
        for (spec, place, with) in [
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
            ("udp:nothing0", None, Some("udp:nothing0:7")),
            ("udp:lo:x", None, None),
            ("shm:udp:127.0.0.1", None, None),
            ("afpacket:lo", None, None),
            ("fault(", None, None),
            ("udp", None, None),
            ("", None, None),
        ] {
            assert_eq!(udp_place(spec), place, "{spec}");
            assert_eq!(with_udp_port(spec, 7).as_deref(), with, "{spec}");
        }
    }
}
