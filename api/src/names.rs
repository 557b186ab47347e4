//! Endpoints by the name or number of their host and a service, as programs of IP know them.
//!
//! What a name leads to depends on the port ([`Names`]). Names are looked up when an address is
//! asked for or inserted, never on the way of a message.
//!
//! # `udp:` ports
//! The MAC of such a port is its IPv4 address and its UDP port, so host and service are an address
//! by arithmetic and nobody is asked: the endpoint has the number of the service, and its port the
//! UDP port whose lower 14 bits are those of the service ([`udp_port`]), which from 49152 on is the
//! service itself.
//!
//! # Other ports
//! A *label* is the address of an endpoint that a program knows by a service only. The domain that
//! is opened with it takes the MAC `06:62:77:00:PP:PP`, which says it. Only the host itself is
//! known by name.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4, ToSocketAddrs, UdpSocket};

use barewire_dataplane::types::EpAddr;
use barewire_driver::backend::udp::{PORTS, PORTS_TRIED, addr_of, mac_of};
use barewire_driver::open::{choose, udp_place, with_udp_port};
use barewire_driver::port::MacAddr;

use crate::addr::resolve;
use crate::errno::Error;

/// What host and service mean on a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// The host is this one, and the service is a label.
    Labels,
    /// They are the place of a `udp:` port.
    Udp {
        /// The IPv4 address of the port.
        ip: Ipv4Addr,
        /// Its UDP port, if that is settled.
        port: Option<u16>,
    },
}

/// Whose address is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// That of an endpoint of the port itself (`FI_SOURCE`).
    Ours,
    /// That of a peer.
    Peers,
}

/// Why host and service lead to nobody, and who was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NoName(String);

impl From<NoName> for Error {
    /// [`Error::NoData`], and the reason in the log.
    fn from(why: NoName) -> Self {
        tracing::warn!("{why}");
        Self::NoData
    }
}

/// The service where none is named on a `udp:` port: that of the first process of a host.
const FIRST: u16 = *PORTS_TRIED.start();

/// The UDP port of a service.
pub fn udp_port(service: u16) -> u16 {
    PORTS.start() | service
}

/// The address that a service has on a port that knows it by a label.
pub fn label(service: u16) -> EpAddr {
    let [high, low] = service.to_be_bytes();
    EpAddr { mac: MacAddr([0x06, 0x62, 0x77, 0x00, high, low]), ep: service, incarnation: 0 }
}

impl Names {
    /// What they mean on the port that `spec` names.
    pub fn of(spec: &str) -> Self {
        let port = choose(spec).ok();
        let place = port.and_then(|port| udp_place(&port));
        place.map_or(Self::Labels, |(ip, port)| Self::Udp { ip, port })
    }

    /// The address of the service at `host`. The unspecified address is this host, and so is a
    /// loopback address but on a port that has one.
    pub fn at(self, host: Ipv4Addr, service: u16) -> EpAddr {
        let Self::Udp { ip, .. } = self else { return label(service) };
        let is_here = host.is_unspecified() || host.is_loopback() && !ip.is_loopback();
        let place = SocketAddrV4::new(if is_here { ip } else { host }, udp_port(service));
        let mac = mac_of(place).expect("the upper bits of such a port are set");
        EpAddr { mac, ep: service, incarnation: 0 }
    }

    /// Host and service of an address, and whether they name it: whether [`at`](Self::at) leads
    /// back to it.
    pub fn name(self, addr: EpAddr) -> (SocketAddrV4, bool) {
        let host = match self {
            Self::Udp { .. } => addr_of(addr.mac).map(|place| *place.ip()),
            Self::Labels => None,
        };
        let host = host.unwrap_or(Ipv4Addr::LOCALHOST);
        (SocketAddrV4::new(host, addr.ep), self.at(host, addr.ep).mac == addr.mac)
    }

    /// The services by which an endpoint that asks for none can be found, best first: those of the
    /// UDP port, or of the UDP ports that are tried. None where a service has to be asked for.
    pub fn services(self) -> impl Iterator<Item = u16> {
        let (settled, tried) = match self {
            Self::Labels => (None, None),
            Self::Udp { port: Some(port), .. } => (Some(port), None),
            Self::Udp { port: None, .. } => (None, Some(PORTS_TRIED)),
        };
        let settled = settled.into_iter().flat_map(|port| (0..4).map(move |n| port ^ n << 14));
        settled.chain(tried.into_iter().flatten())
    }

    /// The name of the port `spec` that an endpoint with the address `source` is reached by, if
    /// `spec` leaves it open.
    pub(crate) fn port_for(self, spec: &str, source: EpAddr) -> Option<String> {
        match self {
            Self::Labels if source.mac != label(source.ep).mac || spec.contains("mac=") => None,
            Self::Labels => Some(format!("{spec},mac={}", source.mac)),
            Self::Udp { ip, .. } => {
                let place = addr_of(source.mac).filter(|place| *place.ip() == ip)?;
                with_udp_port(spec, place.port())
            }
        }
    }

    /// The address that `node` and `service` name: ours in text, or a host by name or number and a
    /// service by number. `None`: any service of this host is meant.
    ///
    /// `numeric` (`FI_NUMERICHOST`): the node is not looked up. Else it takes as long as the
    /// system's resolver takes for a name.
    ///
    /// # Errors
    /// [`NoName`]: nobody has it.
    pub fn find(
        self,
        node: Option<&str>,
        service: Option<&str>,
        whose: Whose,
        numeric: bool,
    ) -> Result<Option<EpAddr>, NoName> {
        if let Some(Ok(addr)) = node.map(|node| resolve(node, service.filter(|s| *s != "0"))) {
            return Ok(Some(addr));
        }
        let number = service.map_or(Ok(0), str::parse::<u16>);
        let number = number.map_err(|_| no_name(service, "a service is a number, 0 to 65535"))?;
        let hosts = node.map(|node| hosts(node, numeric)).transpose()?;
        match self {
            Self::Labels => {
                if hosts.is_some_and(|hosts| !hosts.into_iter().any(is_here)) {
                    let why = "not an address of this host, and on this port nobody else is known \
                               by name";
                    return Err(no_name(node, why));
                }
                Ok((number != 0).then(|| label(number)))
            }
            Self::Udp { ip, port } if whose == Whose::Ours => {
                let is_ours = |host: IpAddr| match host {
                    IpAddr::V4(host) => self.at(host, 0).mac == self.at(ip, 0).mac,
                    IpAddr::V6(host) => host.is_unspecified() || host.is_loopback(),
                };
                if hosts.is_some_and(|hosts| !hosts.into_iter().any(is_ours)) {
                    return Err(no_name(node, format!("not the address of the port, udp:{ip}")));
                }
                self.free(number, port)
            }
            Self::Udp { ip, .. } => {
                let host = match hosts {
                    Some(hosts) => reachable(ip, node, hosts)?,
                    None => ip,
                };
                Ok(Some(self.at(host, if number == 0 { FIRST } else { number })))
            }
        }
    }

    /// The addresses of `node_count` hosts, `node` and those that follow it, times `service_count`
    /// services, `service` and those that follow it, host by host. A MAC or an IPv4 address is
    /// followed by the next number, and so is a name by its last digits. Where only this host is
    /// known by name it stands for all of them.
    ///
    /// # Errors
    /// [`NoName`]: one has no address, or has no follower.
    pub(crate) fn symmetric(
        self,
        node: &str,
        service: Option<&str>,
        node_count: usize,
        service_count: usize,
    ) -> Result<Vec<EpAddr>, NoName> {
        let all = node_count.checked_mul(service_count);
        let mut found = Vec::with_capacity(all.unwrap_or(0).min(1 << 20));
        for n in 0..node_count {
            let end = || no_name(Some(node), "it has too few followers");
            let (first, is_mac) = match resolve(node, service) {
                Ok(first) => {
                    let mac = first.mac.to_u64().checked_add(n as u64).filter(|m| *m < 1 << 48);
                    (EpAddr { mac: MacAddr::from_u64(mac.ok_or_else(end)?), ..first }, true)
                }
                Err(_) => {
                    let own = self == Self::Labels;
                    let node = if own { Some(node.to_owned()) } else { following(node, n) };
                    let node = node.ok_or_else(end)?;
                    let first = self.find(Some(&node), service, Whose::Peers, false)?;
                    (first.ok_or_else(|| no_name(Some(&node), "a peer has a service"))?, false)
                }
            };
            for s in 0..service_count {
                let ep = u16::try_from(s).ok().and_then(|s| first.ep.checked_add(s));
                let ep = ep.ok_or_else(|| no_name(service, "it has too few followers"))?;
                let host = *self.name(first).0.ip();
                found.push(if is_mac { EpAddr { ep, ..first } } else { self.at(host, ep) });
            }
        }
        Ok(found)
    }

    /// Our address with a service, if the UDP port is not settled otherwise.
    fn free(self, service: u16, port: Option<u16>) -> Result<Option<EpAddr>, NoName> {
        let need = udp_port(service);
        match port.filter(|port| service != 0 && *port != need) {
            None => Ok((service != 0).then(|| self.at(Ipv4Addr::UNSPECIFIED, service))),
            Some(port) => {
                let why = format!("it takes UDP port {need}, and the port's is {port}; name none");
                Err(no_name(Some(&service.to_string()), &why))
            }
        }
    }
}

fn no_name(what: Option<&str>, why: impl fmt::Display) -> NoName {
    NoName(format!("{}: {why}", what.unwrap_or_default()))
}

/// The node `n` places behind `first`.
fn following(first: &str, n: usize) -> Option<String> {
    if let Ok(ip) = first.parse::<Ipv4Addr>() {
        let ip = u32::from(ip).checked_add(u32::try_from(n).ok()?)?;
        return Some(Ipv4Addr::from(ip).to_string());
    }
    let name = first.trim_end_matches(|c: char| c.is_ascii_digit());
    let digits = &first[name.len()..];
    if n == 0 {
        return Some(first.to_owned());
    }
    let number = digits.parse::<u64>().ok()?.checked_add(n as u64)?;
    Some(format!("{name}{number:0width$}", width = digits.len()))
}

/// The addresses of a host. Never empty.
fn hosts(node: &str, numeric: bool) -> Result<Vec<IpAddr>, NoName> {
    if let Ok(ip) = node.parse::<IpAddr>() {
        return Ok(vec![ip.to_canonical()]);
    }
    if numeric {
        return Err(no_name(
            Some(node),
            "not an address in numbers, which FI_NUMERICHOST asks for",
        ));
    }
    match (node, 0).to_socket_addrs() {
        Ok(found) if found.len() > 0 => Ok(found.map(|at| at.ip().to_canonical()).collect()),
        Ok(_) => Err(no_name(Some(node), "the system's resolver knows no address")),
        Err(e) => Err(no_name(Some(node), format!("the system's resolver says: {e}"))),
    }
}

/// Whether an address is one of this host: only such can be bound.
fn is_here(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

/// The first of a host's addresses that the kernel knows a way to from `ours`. Nobody is asked
/// whether he is there.
fn reachable(ours: Ipv4Addr, node: Option<&str>, hosts: Vec<IpAddr>) -> Result<Ipv4Addr, NoName> {
    let mut why = "udp ports carry IPv4, and it has an IPv6 address only".to_owned();
    for host in hosts {
        let IpAddr::V4(host) = host else { continue };
        if host.is_loopback() || host.is_unspecified() {
            return Ok(host);
        }
        if host.is_multicast() {
            why = "an address of a group, and no host's".to_owned();
            continue;
        }
        let way = UdpSocket::bind((ours, 0)).and_then(|socket| socket.connect((host, FIRST)));
        match way {
            Ok(()) => return Ok(host),
            Err(e) => why = format!("the kernel has no way to {host} from {ours}: {e}"),
        }
    }
    Err(no_name(node, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 1);

    fn udp(port: Option<u16>) -> Names {
        Names::Udp { ip: OURS, port }
    }

    fn peer(names: Names, node: Option<&str>, service: Option<&str>) -> Result<EpAddr, NoName> {
        names.find(node, service, Whose::Peers, false).map(Option::unwrap)
    }

    fn source(names: Names, node: Option<&str>, service: &str) -> Result<Option<EpAddr>, NoName> {
        names.find(node, Some(service), Whose::Ours, false)
    }

    #[test]
    fn on_udp_host_and_service_are_the_address() {
        let addr = peer(udp(None), Some("127.0.0.1"), Some("7471")).unwrap();
        let place = SocketAddrV4::new(OURS, 49152 + 7471);
        assert_eq!((addr_of(addr.mac), addr.ep, addr.incarnation), (Some(place), 7471, 0));
        assert_eq!(udp(None).name(addr), (SocketAddrV4::new(OURS, 7471), true));
        let own = peer(udp(None), Some("localhost"), Some("52001")).unwrap();
        assert_eq!(addr_of(own.mac).map(|place| place.port()), Some(52001));
        // Without a service it is the first process of the host.
        let first = peer(udp(None), Some("127.0.0.1"), None).unwrap();
        assert_eq!((first.ep, addr_of(first.mac).unwrap().port()), (52000, 52000));
        assert_eq!(peer(udp(None), Some("::ffff:127.0.0.1"), None), Ok(first));
        // Ours in text stays what it says.
        let exact = peer(udp(None), Some("02:00:00:00:00:05"), Some("3")).unwrap();
        assert_eq!((exact.ep, exact.mac.to_string().as_str()), (3, "02:00:00:00:00:05"));
    }

    /// Goal: each service has one address, which says it, and what cannot be said is known.
    #[test]
    fn every_service_names_its_address_and_four_have_one_port() {
        let host = Ipv4Addr::new(10, 1, 2, 3);
        let mut ports = std::collections::HashMap::new();
        for service in 0..=u16::MAX {
            let addr = udp(None).at(host, service);
            assert_eq!(udp(None).name(addr), (SocketAddrV4::new(host, service), true));
            *ports.entry(addr.mac).or_insert(0) += 1;
        }
        assert!(ports.len() == 1 << 14 && ports.values().all(|n| *n == 4));
        let addr = udp(None).at(host, 52000);
        let numbers: Vec<u16> = udp(Some(52000)).services().collect();
        assert_eq!(numbers, [52000, 35616, 19232, 2848]);
        assert!(numbers.iter().all(|n| udp(None).at(host, *n).mac == addr.mac));
        assert!(!udp(None).name(EpAddr { ep: 1, ..addr }).1);
        assert!(udp(None).services().eq(PORTS_TRIED) && Names::Labels.services().count() == 0);
    }

    #[test]
    fn a_loopback_address_is_this_host_on_a_port_of_another() {
        let names = Names::Udp { ip: Ipv4Addr::new(10, 0, 0, 1), port: None };
        for host in [Ipv4Addr::LOCALHOST, Ipv4Addr::UNSPECIFIED, Ipv4Addr::new(10, 0, 0, 1)] {
            assert_eq!(*names.name(names.at(host, 7)).0.ip(), Ipv4Addr::new(10, 0, 0, 1));
        }
        let named = source(names, Some("localhost"), "7").unwrap().unwrap();
        assert_eq!(named, names.at(Ipv4Addr::UNSPECIFIED, 7));
    }

    #[test]
    fn a_source_on_udp_is_of_the_port_and_its_udp_port_follows() {
        let addr = source(udp(None), None, "7471").unwrap().unwrap();
        assert_eq!(addr, udp(None).at(OURS, 7471));
        let spec = "fault():udp:127.0.0.1,near=no";
        let named = udp(None).port_for(spec, addr);
        assert_eq!(named.as_deref(), Some("fault():udp:127.0.0.1:56623,near=no"));
        assert_eq!(udp(None).port_for("udp:127.0.0.1:56623", addr), None);
        assert_eq!(source(udp(Some(56623)), None, "7471"), Ok(Some(addr)));
        assert_eq!(source(udp(None), None, "0"), Ok(None));
        let e = source(udp(Some(52000)), None, "7471").unwrap_err().to_string();
        assert!(e.contains("it takes UDP port 56623, and the port's is 52000"), "{e}");
        let e = source(udp(None), Some("192.0.2.1"), "7").unwrap_err().to_string();
        assert!(e.contains("192.0.2.1: not the address of the port, udp:127.0.0.1"), "{e}");
    }

    #[test]
    fn on_other_ports_this_host_has_labels() {
        let names = Names::of("shm:x");
        assert_eq!(names, Names::Labels);
        for node in [Some("127.0.0.1"), Some("localhost"), None] {
            assert_eq!(peer(names, node, Some("7")), Ok(label(7)));
        }
        assert_eq!(names.find(None, Some("0"), Whose::Peers, false), Ok(None));
        assert_eq!(names.find(Some("127.0.0.1"), None, Whose::Peers, false), Ok(None));
        let mac = peer(names, Some("02:00:00:00:00:05"), Some("3")).unwrap();
        assert_eq!((mac.ep, mac.incarnation), (3, 0));
        let with = names.port_for("shm:x", label(7));
        assert_eq!(with.as_deref(), Some("shm:x,mac=06:62:77:00:00:07"));
        assert_eq!(names.port_for("shm:x,mac=02:00:00:00:00:05", label(7)), None);
        assert_eq!(names.port_for("shm:x", mac), None);
    }

    #[test]
    fn nodes_follow_each_other_by_number() {
        for (first, n, is) in [
            ("10.0.0.255", 1, Some("10.0.1.0")),
            ("255.255.255.255", 1, None),
            ("node09", 2, Some("node11")),
            ("node9", 2, Some("node11")),
            ("rack7.lan", 0, Some("rack7.lan")),
            ("rack7.lan", 1, None),
        ] {
            assert_eq!(following(first, n).as_deref(), is, "{first} {n}");
        }
        let of = |names: Names, node, service, nodes, services| {
            names.symmetric(node, Some(service), nodes, services).map(|all| {
                let name = |a: &EpAddr| names.name(*a).0.to_string();
                all.iter().map(name).collect::<Vec<_>>().join(" ")
            })
        };
        let all = of(udp(None), "127.0.0.2", "7", 2, 2).unwrap();
        assert_eq!(all, "127.0.0.2:7 127.0.0.2:8 127.0.0.3:7 127.0.0.3:8");
        let all = of(Names::Labels, "localhost", "7", 2, 2).unwrap();
        assert_eq!(all, "127.0.0.1:7 127.0.0.1:8 127.0.0.1:7 127.0.0.1:8");
        let all = udp(None).symmetric("02:00:00:00:00:05", Some("3"), 2, 2).unwrap();
        let all: Vec<String> = all.iter().map(EpAddr::to_string).collect();
        assert_eq!(all[3], "barewire://02:00:00:00:00:06/4");
        for (node, service) in [("127.0.0.1", "65535"), ("ff:ff:ff:ff:ff:fe", "1"), ("x y", "1")] {
            assert!(of(udp(None), node, service, 3, 2).is_err(), "{node} {service}");
        }
    }

    #[test]
    fn what_names_nobody_says_who_was_asked() {
        let names = Names::Labels;
        for (names, node, service, numeric, says) in [
            // TEST-NET-1: nobody's.
            (names, Some("192.0.2.1"), Some("7"), false, "192.0.2.1: not an address of this host"),
            (names, None, Some("http?"), false, "http?: a service is a number"),
            (names, None, Some("65536"), false, "65536: a service is a number"),
            (udp(None), Some("no-host.invalid"), Some("7"), false, "the system's resolver "),
            (udp(None), Some("localhost"), Some("7"), true, "FI_NUMERICHOST"),
            (udp(None), Some("224.0.0.7"), Some("7"), false, "an address of a group"),
            (udp(None), Some("2001:db8::1"), Some("7"), false, "udp ports carry IPv4"),
        ] {
            let e = names.find(node, service, Whose::Peers, numeric).unwrap_err().to_string();
            assert!(e.contains(says), "{e}");
        }
    }
}
