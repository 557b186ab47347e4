//! Endpoints by host (name or IP address) and service, as IP programs name them.
//!
//! How a name is resolved depends on the port ([`Names`]). Names are resolved when an address is
//! requested or inserted, never on the path of a message.
//!
//! # `udp:` ports
//! The MAC of such a port encodes its IPv4 address, or the last 32 bits of an IPv6 address whose
//! other bits all peers share, and its UDP port. So host and service map to an address by
//! arithmetic and no station is queried. The endpoint has the number of the service, and its port
//! the UDP port with the same lower 14 bits ([`udp_port`]), which from 49152 on is the service
//! itself.
//!
//! # Segments
//! A *label* is the address of an endpoint that a program knows by a service only. On `shm:` the
//! domain that is opened with it takes the MAC `06:62:77:00:PP:PP`, which encodes the service. Only
//! this host has a name.
//!
//! # Other ports
//! A broadcast query finds the server (`who.rs`). An endpoint that asks for a service has that
//! number and answers for it at every IP address of its host and at its name: also at addresses of
//! other interfaces, since a name may resolve to any of them and a device without the kernel has
//! none. No other process of the host gets the service on that device. A label is used in its place
//! until the domain is open and the station is known.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, ToSocketAddrs, UdpSocket};

use barewire_dataplane::types::EpAddr;
use barewire_driver::backend::inet::{
    PORTS, PORTS_TRIED, Prefix, addr_of, host_bits, host_text, mac_of,
};
use barewire_driver::backend::lock::NotInChildren;
use barewire_driver::backend::netdev::{hold, ip_addresses};
use barewire_driver::open::{choose, kind_and_device, udp_place, with_udp_port};
use barewire_driver::port::{MacAddr, PortCaps, Station};

use crate::addr::resolve;
use crate::errno::{Error, Result as FiResult, refused_by_system};
use crate::hosts::{interface_of, ip_of, note, own_ips, own_name};
use crate::settings::Settings;
pub use crate::who::PATIENCE;
use crate::who::{Answers, PortWay, Wanted, Way};

/// What host and service mean on a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// The host is this one, and the service is a label.
    Labels,
    /// They are the place of a `udp:` or `ip(...)` port.
    Udp {
        /// The IP address of the port. One of IPv6 has the first 96 bits of all hosts that the port
        /// reaches.
        ip: IpAddr,
        /// Its UDP port, if that is settled.
        port: Option<u16>,
        /// The kernel's stack carries its datagrams, so its routes are the port's.
        by_kernel: bool,
    },
    /// Who serves a service at a host is asked for.
    Asked {
        /// An IPv4 address of this host, of the port's interface if that has one; else
        /// `127.0.0.1`.
        ip: Ipv4Addr,
    },
}

/// Kinds of ports on which services are asked for.
const ASKED: &[&str] = &["afpacket", "xdp", "memif", "vfio", "dpdk"];

/// Network of IPv6 addresses that are a station, number and MAC behind it: who writes the address
/// of an endpoint that has no other as a `sockaddr_in6` writes this. Its numbers are ours (RFC
/// 4193: "bar ew"), so that nobody else has them.
const MAC_NET: [u16; 4] = [0xfd62, 0x6172, 0x6577, 0];

/// Through what services are asked for, where they are.
pub struct Through<'a> {
    name: &'a str,
    chosen: Option<String>,
    near: bool,
}

impl<'a> Through<'a> {
    /// The port `name`: a domain of this process that is open on it, or else the port itself,
    /// opened for the question.
    pub fn port(name: &'a str, settings: &Settings) -> Self {
        Self { name, chosen: choose(name).ok(), near: settings.near }
    }

    pub(crate) fn way(&self) -> PortWay<'_> {
        PortWay { name: self.chosen.as_deref().unwrap_or(self.name), near: self.near }
    }
}

/// Whose address is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// That of an endpoint of the port itself (`FI_SOURCE`).
    Ours,
    /// That of a peer.
    Peers,
}

/// Why host and service were not resolved, and how it was tried.
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

/// The interface of this host that has an IP address.
pub fn interface_at(ip: IpAddr) -> Option<String> {
    let ip = ip.to_canonical();
    ip_addresses().into_iter().find(|(_, of)| *of == ip).map(|(name, _)| name)
}

/// Whether this host has an interface of that name with an IP address.
pub fn has_address(interface: &str) -> bool {
    ip_addresses().iter().any(|(name, _)| name == interface)
}

/// The UDP port of a service.
pub fn udp_port(service: u16) -> u16 {
    PORTS.start() | service
}

/// The address that a service has on a port that knows it by a label.
pub fn label(service: u16) -> EpAddr {
    let [high, low] = service.to_be_bytes();
    EpAddr {
        station: Station::at([0x06, 0x62, 0x77, 0x00, high, low]),
        ep: service,
        incarnation: 0,
    }
}

impl Names {
    /// What they mean on the port that `spec` names.
    pub fn of(spec: &str) -> Self {
        let Ok(port) = choose(spec) else { return Self::Labels };
        if let Some((ip, number)) = udp_place(&port) {
            let by_kernel = kind_and_device(&port).is_some_and(|(kind, _)| kind == "udp");
            return Self::Udp { ip, port: number, by_kernel };
        }
        match kind_and_device(&port) {
            Some((kind, device)) if ASKED.contains(&kind) => {
                let v4 = |ip: IpAddr| if let IpAddr::V4(ip) = ip { Some(ip) } else { None };
                let ip = own_ips(device).into_iter().find_map(v4);
                Self::Asked { ip: ip.unwrap_or(Ipv4Addr::LOCALHOST) }
            }
            _ => Self::Labels,
        }
    }

    /// The IP address of this host that its endpoints have.
    pub fn own_ip(self) -> IpAddr {
        match self {
            Self::Labels => Ipv4Addr::LOCALHOST.into(),
            Self::Udp { ip, .. } => ip,
            Self::Asked { ip } => ip.into(),
        }
    }

    /// Whether frames to a group reach the others.
    pub(crate) fn has_groups(self) -> bool {
        !matches!(self, Self::Udp { .. })
    }

    /// Whether its hosts have IPv6 addresses, and no others.
    pub fn is_v6(self) -> bool {
        matches!(self, Self::Udp { ip: IpAddr::V6(_), .. })
    }

    /// The address of the service at `host`. The unspecified address is this host, and so is a
    /// loopback address but on a port that has one. Of an IPv6 address the last 32 bits count:
    /// whether the first are the port's own was looked at before.
    pub fn at(self, host: IpAddr, service: u16) -> EpAddr {
        let Self::Udp { ip, .. } = self else { return label(service) };
        let is_here = host.is_unspecified() || host.is_loopback() && !ip.is_loopback();
        let host = host_bits(if is_here { ip } else { host });
        let place = SocketAddrV4::new(host, udp_port(service));
        let mac = mac_of(place).expect("the upper bits of such a port are set");
        EpAddr { station: mac.into(), ep: service, incarnation: 0 }
    }

    /// The address of the service at this host.
    pub fn here(self, service: u16) -> EpAddr {
        self.at(Ipv4Addr::UNSPECIFIED.into(), service)
    }

    /// Host and service of an address, and whether they name it: whether [`at`](Self::at) leads
    /// back to it.
    pub fn name(self, addr: EpAddr) -> (SocketAddr, bool) {
        let host: IpAddr = match self {
            Self::Udp { ip, .. } => match addr_of(addr.station.mac) {
                Some(place) => Prefix::of(ip).ip(*place.ip()),
                None => Ipv4Addr::LOCALHOST.into(),
            },
            Self::Labels => Ipv4Addr::LOCALHOST.into(),
            Self::Asked { ip } if addr.station == label(addr.ep).station => ip.into(),
            Self::Asked { .. } => match ip_of(addr.station) {
                Some(ip @ IpAddr::V4(_)) => ip,
                _ => Ipv4Addr::UNSPECIFIED.into(),
            },
        };
        (SocketAddr::new(host, addr.ep), self.at(host, addr.ep).station == addr.station)
    }

    /// The services by which an endpoint that asks for none can be found, best first: those of the
    /// UDP port, or of the UDP ports that are tried. None where a service has to be asked for.
    pub fn services(self) -> impl Iterator<Item = u16> {
        let (settled, tried) = match self {
            Self::Labels => (None, None),
            Self::Udp { port: Some(port), .. } => (Some(port), None),
            Self::Udp { port: None, .. } | Self::Asked { .. } => (None, Some(PORTS_TRIED)),
        };
        let settled = settled.into_iter().flat_map(|port| (0..4).map(move |n| port ^ n << 14));
        settled.chain(tried.into_iter().flatten())
    }

    /// The name of the port `spec` that an endpoint with the address `source` is reached by, if
    /// `spec` leaves it open.
    pub(crate) fn port_for(self, spec: &str, source: EpAddr) -> Option<String> {
        match self {
            Self::Labels if source.station != label(source.ep).station || spec.contains("mac=") => {
                None
            }
            Self::Labels => Some(format!("{spec},mac={}", source.station)),
            Self::Asked { .. } => None,
            Self::Udp { ip, .. } => {
                let place = addr_of(source.station.mac);
                let place = place.filter(|place| *place.ip() == host_bits(ip))?;
                with_udp_port(spec, place.port())
            }
        }
    }

    /// The address that `node` and `service` name: ours in text, or a host by name or number and a
    /// service by number. `None`: any service of this host is meant.
    ///
    /// `numeric` (`FI_NUMERICHOST`): the node is not looked up. Else it takes as long as the
    /// system's resolver takes for a name, and where services are asked for, through `through`,
    /// [`PATIENCE`] if nobody answers.
    ///
    /// # Errors
    /// [`NoName`]: nobody has it.
    pub fn find(
        self,
        node: Option<&str>,
        service: Option<&str>,
        whose: Whose,
        numeric: bool,
        through: &Through<'_>,
    ) -> Result<Option<EpAddr>, NoName> {
        self.find_by(node, service, whose, numeric, &through.way())
    }

    pub(crate) fn find_by(
        self,
        node: Option<&str>,
        service: Option<&str>,
        whose: Whose,
        numeric: bool,
        way: &dyn Way,
    ) -> Result<Option<EpAddr>, NoName> {
        if let Some(Ok(addr)) = node.map(|node| resolve(node, service.filter(|s| *s != "0"))) {
            return Ok(Some(addr));
        }
        let (node, service) = match node {
            Some(node) => parted(node, service)?,
            None => (None, service),
        };
        let number = number_of(service)?;
        let hosts = node.map(|node| hosts(node, numeric)).transpose();
        if let Self::Asked { ip } = self {
            return match whose {
                Whose::Ours => own(node, hosts?, number),
                // A name that the resolver does not know may be one that a host says of itself.
                Whose::Peers if numeric => ask(ip, node, Ok(hosts?), number, way).map(Some),
                Whose::Peers => ask(ip, node, hosts, number, way).map(Some),
            };
        }
        let hosts = hosts?;
        match self {
            Self::Asked { .. } | Self::Labels => {
                if hosts.is_some_and(|hosts| !hosts.into_iter().any(is_here)) {
                    let why = "not an address of this host, and this port resolves no other host";
                    return Err(no_name(node, why));
                }
                Ok((number != 0).then(|| label(number)))
            }
            Self::Udp { ip, port, .. } if whose == Whose::Ours => {
                let is_ours = |host: IpAddr| {
                    host == ip || host.is_unspecified() || host.is_loopback() && !ip.is_loopback()
                };
                if hosts.is_some_and(|hosts| !hosts.into_iter().any(is_ours)) {
                    return Err(no_name(
                        node,
                        format!("not the address of the port, udp:{}", host_text(ip)),
                    ));
                }
                self.free(number, port)
            }
            Self::Udp { ip, by_kernel, .. } => {
                let host = match hosts {
                    Some(hosts) => reachable(ip, by_kernel, node, hosts)?,
                    None => ip,
                };
                Ok(Some(self.at(host, if number == 0 { FIRST } else { number })))
            }
        }
    }

    /// The addresses of `node_count` hosts, `node` and those that follow it, times `service_count`
    /// services, `service` and those that follow it, host by host. A MAC or an IP address is
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
        way: &dyn Way,
    ) -> Result<Vec<EpAddr>, NoName> {
        let (host, service) = parted(node, service)?;
        let node = host.unwrap_or(node);
        if let (Self::Asked { ip }, Err(_)) = (self, resolve(node, service)) {
            let numbers = services(service, service_count)?;
            return symmetric_asked(ip, (node, node_count), &numbers, way);
        }
        let all = node_count.checked_mul(service_count);
        let mut found = Vec::with_capacity(all.unwrap_or(0).min(1 << 20));
        for n in 0..node_count {
            let end = || no_name(Some(node), "it has too few followers");
            let (first, is_mac) = match resolve(node, service) {
                Ok(first) => {
                    let mac =
                        first.station.mac.to_u64().checked_add(n as u64).filter(|m| *m < 1 << 48);
                    let mac = MacAddr::from_u64(mac.ok_or_else(end)?);
                    (EpAddr { station: Station { mac, ..first.station }, ..first }, true)
                }
                Err(_) => {
                    let own = self == Self::Labels;
                    let node = if own { Some(node.to_owned()) } else { following(node, n) };
                    let node = node.ok_or_else(end)?;
                    let first = self.find_by(Some(&node), service, Whose::Peers, false, way)?;
                    (first.ok_or_else(|| no_name(Some(&node), "a peer has a service"))?, false)
                }
            };
            for s in 0..service_count {
                let ep = u16::try_from(s).ok().and_then(|s| first.ep.checked_add(s));
                let ep = ep.ok_or_else(|| no_name(service, "it has too few followers"))?;
                let host = self.name(first).0.ip();
                found.push(if is_mac { EpAddr { ep, ..first } } else { self.at(host, ep) });
            }
        }
        Ok(found)
    }

    /// The addresses of services at hosts by their IP address, all asked for at once where they
    /// are.
    pub(crate) fn find_all(
        self,
        hosts: &[(IpAddr, u16)],
        way: &dyn Way,
    ) -> Vec<Result<EpAddr, NoName>> {
        let exact = |&(ip, service): &(IpAddr, u16)| self.exact(ip, service).map(Ok);
        let mut found: Vec<_> = hosts.iter().map(exact).collect();
        let open = || found.iter().enumerate().filter(|(_, exact)| exact.is_none());
        let open: Vec<usize> = open().map(|(i, _)| i).collect();
        if let Self::Asked { ip: own } = self
            && !open.is_empty()
        {
            let wanted = |&i: &usize| {
                let (ip, service) = hosts[i];
                wanted(own, None, &[ip], service)
            };
            let wanted: Vec<Wanted> = open.iter().map(wanted).collect();
            let answers = way.ask(&wanted);
            for (n, i) in open.into_iter().enumerate() {
                let (ip, service) = hosts[i];
                let (name, ips) = (format!("{ip}"), [ip]);
                found[i] = Some(match &answers {
                    Ok(answers) => heard(own, Some(&name), &ips, service, &answers[n]),
                    Err(why) => Err(no_name(Some(&name), why)),
                });
            }
        }
        let nobody = |i: usize| no_name(Some(&hosts[i].0.to_string()), self.carried());
        let each = found.into_iter().enumerate();
        each.map(|(i, found)| found.unwrap_or_else(|| Err(nobody(i)))).collect()
    }

    /// The address that an IP address and a service are on their own. `None`: somebody has to be
    /// asked, or the port carries no such addresses.
    pub fn exact(self, host: IpAddr, service: u16) -> Option<EpAddr> {
        match (self, host.to_canonical()) {
            (Self::Labels, _) => Some(label(service)),
            (Self::Udp { ip, .. }, host) if self.is_there(ip, host) => Some(self.at(host, service)),
            (_, IpAddr::V4(_)) => None,
            (_, IpAddr::V6(host)) => {
                station_in(host).map(|station| EpAddr { station, ep: service, incarnation: 0 })
            }
        }
    }

    /// Whether a port at `ip` knows `host`: it has an address of the same network, or is this host.
    fn is_there(self, ip: IpAddr, host: IpAddr) -> bool {
        let is_here = host.is_unspecified() || host.is_loopback() && !ip.is_loopback();
        is_here || Prefix::of(ip).holds(host)
    }

    /// Whom the port reaches, for who is told that somebody is not.
    pub fn carried(self) -> String {
        match self {
            Self::Udp { ip: ip @ IpAddr::V6(_), .. } => {
                let all = Prefix::of(ip).ip(Ipv4Addr::UNSPECIFIED);
                format!("the port reaches hosts of {all}/96, whose first 96 bits are its own")
            }
            _ => "the port carries IPv4; write udp:[ADDRESS]/96 for one that carries IPv6".into(),
        }
    }

    /// Remembers that an address is at `ip`, to write it so.
    pub fn found_at(self, addr: EpAddr, ip: IpAddr) {
        if matches!(self, Self::Asked { .. }) && !ip.is_unspecified() && !ip.is_loopback() {
            note(addr.station, ip.to_canonical());
        }
    }

    /// IPv6 address and service of an address. Where no IP address and service lead to it, the
    /// station is one.
    pub fn name6(self, addr: EpAddr) -> (Ipv6Addr, u16) {
        let ip = match self {
            Self::Asked { .. } if addr.station != label(addr.ep).station => {
                match ip_of(addr.station) {
                    Some(IpAddr::V6(ip)) => ip,
                    _ => station_as_ip(addr.station),
                }
            }
            _ => match self.name(addr) {
                (_, false) if matches!(self, Self::Udp { .. }) => station_as_ip(addr.station),
                (SocketAddr::V4(at), _) => at.ip().to_ipv6_mapped(),
                (SocketAddr::V6(at), _) => *at.ip(),
            },
        };
        (ip, addr.ep)
    }

    /// Whether `ip` is this host, at the port: what an own address may say.
    pub fn is_own(self, ip: IpAddr) -> bool {
        match (self, ip.to_canonical()) {
            (_, ip) if ip.is_unspecified() || ip.is_loopback() => true,
            (Self::Labels, IpAddr::V4(_)) => true,
            (Self::Udp { ip: ours, .. }, ip) => ip == ours,
            (Self::Asked { ip: ours }, IpAddr::V4(ip)) if ip == ours => true,
            (_, ip) => is_here(ip),
        }
    }

    /// The service that an endpoint with the address `source` answers for at `port`, if it does,
    /// and what keeps it from other processes of this host.
    ///
    /// # Errors
    /// [`Error::AddrInUse`]: another endpoint of the host has it.
    pub(crate) fn claim(port: &PortCaps, source: Option<EpAddr>) -> FiResult<Option<Served>> {
        let Some(source) = source.filter(|addr| is_placeholder(*addr) && addr.ep != 0) else {
            return Ok(None);
        };
        let Self::Asked { ip } = Self::of(&port.name) else { return Ok(None) };
        // The number first: the kernel's names have an end.
        let name = format!("barewire-service-{}-{}", source.ep, interface_of(&port.name));
        let claim = hold(&name).map_err(|e| match e.raw_os_error() {
            Some(libc::EADDRINUSE) => {
                tracing::warn!("service {}: another process of this host has it", source.ep);
                Error::AddrInUse
            }
            e => refused_by_system("the name of a service", e.unwrap_or(libc::EIO)),
        })?;
        note(port.station, ip.into());
        Ok(Some(Served { service: source.ep, _claim: claim }))
    }

    /// Our address with a service, if the UDP port is not settled otherwise.
    fn free(self, service: u16, port: Option<u16>) -> Result<Option<EpAddr>, NoName> {
        let need = udp_port(service);
        match port.filter(|port| service != 0 && *port != need) {
            None => Ok((service != 0).then(|| self.here(service))),
            Some(port) => {
                let why = format!("it takes UDP port {need}, and the port's is {port}; name none");
                Err(no_name(Some(&service.to_string()), &why))
            }
        }
    }
}

/// A service that an endpoint answers for, as long as this is there.
pub(crate) struct Served {
    pub(crate) service: u16,
    _claim: NotInChildren,
}

/// Whether an address is a label that stands for the port's own, whose MAC is not known yet.
pub(crate) fn is_placeholder(addr: EpAddr) -> bool {
    addr.station == label(addr.ep).station
}

/// The IPv6 address that is a station, as [`MAC_NET`] says.
fn station_as_ip(station: Station) -> Ipv6Addr {
    let [a, b, c, d, e, f] = station.mac.0.map(u16::from);
    let [n, o, p, q] = MAC_NET;
    Ipv6Addr::new(n, o, p, q, station.number, a << 8 | b, c << 8 | d, e << 8 | f)
}

fn station_in(ip: Ipv6Addr) -> Option<Station> {
    let mac = MacAddr(*ip.octets().last_chunk()?);
    let station = Station { mac, number: ip.segments()[4] };
    (station_as_ip(station) == ip && station.is_single()).then_some(station)
}

/// The address of an endpoint of this host that asks for `service`, if `node` is this host.
fn own(
    node: Option<&str>,
    hosts: Option<Vec<IpAddr>>,
    service: u16,
) -> Result<Option<EpAddr>, NoName> {
    let here = |ip: IpAddr| ip.is_unspecified() || is_here(ip);
    if hosts.is_some_and(|hosts| !hosts.into_iter().any(here)) {
        return Err(no_name(node, "not an address of this host"));
    }
    Ok((service != 0).then(|| label(service)))
}

/// Who is to be asked for: `own` is this host's IPv4 address, `name` what the host is called.
fn wanted(own: Ipv4Addr, name: Option<&str>, ips: &[IpAddr], service: u16) -> Wanted {
    let is_own = |ip: &IpAddr| ip.is_loopback() || ip.is_unspecified();
    match name.is_none() && ips.is_empty() || ips.iter().any(is_own) {
        false => Wanted::new(name, ips, service),
        // No other host answers to that.
        true if !own.is_loopback() => Wanted::new(None, &[own.into()], service),
        true => Wanted::new(Some(&own_name()), &[], service),
    }
}

/// A host, to be asked for a service.
struct Question<'a> {
    node: Option<&'a str>,
    /// Its addresses; or why the resolver knows none.
    hosts: Result<Vec<IpAddr>, NoName>,
    service: u16,
}

impl<'a> Question<'a> {
    fn new(
        node: Option<&'a str>,
        hosts: Result<Option<Vec<IpAddr>>, NoName>,
        service: u16,
    ) -> Self {
        Self { node, hosts: hosts.map(Option::unwrap_or_default), service }
    }

    fn ips(&self) -> &[IpAddr] {
        self.hosts.as_ref().map_or(&[], |ips| ips)
    }

    /// What the host is called.
    fn text(&self) -> &str {
        self.node.unwrap_or("this host")
    }

    fn wanted(&self, own: Ipv4Addr) -> Wanted {
        let name = self.node.filter(|node| node.parse::<IpAddr>().is_err());
        wanted(own, name, self.ips(), self.service)
    }

    /// What the answers come to.
    fn heard(&self, own: Ipv4Addr, answers: &Answers) -> Result<EpAddr, NoName> {
        let found = heard(own, self.node, self.ips(), self.service, answers);
        found.map_err(|why| match &self.hosts {
            Err(unresolved) => NoName(format!("{unresolved}; {why}")),
            Ok(_) => why,
        })
    }
}

/// Asks who serves `service` at `node`.
fn ask(
    own: Ipv4Addr,
    node: Option<&str>,
    hosts: Result<Option<Vec<IpAddr>>, NoName>,
    service: u16,
    way: &dyn Way,
) -> Result<EpAddr, NoName> {
    let question = Question::new(node, hosts, service);
    let answers = way.ask(&[question.wanted(own)]);
    let answers = answers.map_err(|why| no_name(Some(question.text()), why))?;
    question.heard(own, &answers[0])
}

/// Asks who serves each of `services` at each of `count` hosts, `node` and those that follow it,
/// all at once.
fn symmetric_asked(
    own: Ipv4Addr,
    (node, count): (&str, usize),
    services: &[u16],
    way: &dyn Way,
) -> Result<Vec<EpAddr>, NoName> {
    let end = || no_name(Some(node), "it has too few followers");
    let next = |n| following(node, n).ok_or_else(end);
    let nodes = (0..count).map(next).collect::<Result<Vec<String>, NoName>>()?;
    let mut questions = Vec::new();
    for node in &nodes {
        let known = Ok(Some(hosts(node, false))).and_then(Option::transpose);
        let each = services.iter().map(|n| Question::new(Some(node), known.clone(), *n));
        questions.extend(each);
    }
    let wanted: Vec<Wanted> = questions.iter().map(|one| one.wanted(own)).collect();
    let answers = way.ask(&wanted).map_err(|why| no_name(Some(node), why))?;
    questions.iter().zip(&answers).map(|(one, answers)| one.heard(own, answers)).collect()
}

/// `count` services from `first` on.
fn services(first: Option<&str>, count: usize) -> Result<Vec<u16>, NoName> {
    let number = number_of(first)?;
    let end = || no_name(first, "it has too few followers");
    let each = (0..count).map(|n| u16::try_from(n).ok().and_then(|n| number.checked_add(n)));
    each.map(|n| n.ok_or_else(end)).collect()
}

/// A service in text; 0 if none is named.
fn number_of(service: Option<&str>) -> Result<u16, NoName> {
    let number = service.map_or(Ok(0), str::parse::<u16>);
    number.map_err(|_| no_name(service, "a service is a number, 0 to 65535"))
}

/// Host and service, which may both be in `node`, as in `fi_sockaddr_in://10.1.1.1:7471`
/// (fi_getinfo(3), `FI_ADDR_STR`).
///
/// # Errors
/// [`NoName`]: they are, and wrong, or there is a service besides.
fn parted<'a>(
    node: &'a str,
    service: Option<&'a str>,
) -> Result<(Option<&'a str>, Option<&'a str>), NoName> {
    let kinds = ["fi_sockaddr://", "fi_sockaddr_in://", "fi_sockaddr_in6://"];
    let Some(place) = kinds.iter().find_map(|kind| node.strip_prefix(kind)) else {
        return Ok((Some(node), service));
    };
    if service.is_some() {
        return Err(no_name(Some(node), "it names a service already; give none besides"));
    }
    let wrong = || no_name(Some(node), "expected such as fi_sockaddr_in://10.1.1.1:7471");
    // What follows is no part of an address of IP.
    let place = place.split(['/', '?']).next().unwrap_or_default();
    let (host, rest) = match place.strip_prefix('[') {
        Some(place) => place.split_once(']').ok_or_else(wrong)?,
        None => place.split_at(place.find(':').unwrap_or(place.len())),
    };
    let service = match rest.strip_prefix(':') {
        Some(service) => Some(service),
        None if rest.is_empty() => None,
        None => return Err(wrong()),
    };
    let said = |text: &&str| !text.is_empty();
    Ok((Some(host).filter(said), service.filter(said)))
}

/// What the answers to a question come to.
fn heard(
    own: Ipv4Addr,
    node: Option<&str>,
    ips: &[IpAddr],
    service: u16,
    answers: &Answers,
) -> Result<EpAddr, NoName> {
    let text = node.unwrap_or("this host");
    let service_text = match service {
        0 => "a service".to_owned(),
        n => format!("service {n}"),
    };
    let Some(first) = answers.first() else {
        let asked: Vec<String> = ips.iter().map(IpAddr::to_string).collect();
        let at = match asked.join(", ") {
            ips if ips.is_empty() || ips == text => String::new(),
            ips => format!(" ({ips})"),
        };
        let ms = PATIENCE.as_millis();
        return Err(NoName(format!(
            "{text}{at}: every station on the segment was asked by a broadcast, and within {ms} \
             ms none answered that it serves {service_text} there; start the server first, on the \
             same segment (a program registers its service by FI_SOURCE)"
        )));
    };
    if service != 0
        && let Some(other) = answers.iter().find(|other| other.station != first.station)
    {
        tracing::warn!(
            "{text}: both {} and {} say that they serve {service_text} there; the first is used. \
             Give each host its own address",
            first.station,
            other.station
        );
    }
    let v4 = ips.iter().find(|ip| ip.is_ipv4()).or(ips.first());
    let is_own = |ip: &IpAddr| ip.is_loopback() || ip.is_unspecified();
    match v4.copied() {
        Some(ip) if !is_own(&ip) => note(first.station, ip),
        // Of a host that only its name is known of there is no address.
        None if node.is_some() => {}
        _ => note(first.station, own.into()),
    }
    Ok(EpAddr { station: first.station, ep: first.ep, incarnation: 0 })
}

fn no_name(what: Option<&str>, why: impl fmt::Display) -> NoName {
    NoName(format!("{}: {why}", what.unwrap_or_default()))
}

/// The node `n` places behind `first`.
fn following(first: &str, n: usize) -> Option<String> {
    if let Ok(ip) = first.parse::<Ipv6Addr>() {
        return Some(Ipv6Addr::from(u128::from(ip).checked_add(n as u128)?).to_string());
    }
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

/// The first of a host's addresses that a port at `ours` reaches: of the same network, and if the
/// kernel carries its datagrams, one with a route. Whether the host is up is not tested.
fn reachable(
    ours: IpAddr,
    by_kernel: bool,
    node: Option<&str>,
    hosts: Vec<IpAddr>,
) -> Result<IpAddr, NoName> {
    let names = Names::Udp { ip: ours, port: None, by_kernel };
    let mut why = None;
    for host in hosts {
        if !names.is_there(ours, host) {
            continue;
        }
        if host.is_loopback() || host.is_unspecified() {
            return Ok(host);
        }
        if host.is_multicast() {
            why = Some("an address of a group, and no host's".to_owned());
            continue;
        }
        if !by_kernel {
            return Ok(host);
        }
        let way = UdpSocket::bind((ours, 0)).and_then(|socket| socket.connect((host, FIRST)));
        match way {
            Ok(()) => return Ok(host),
            Err(e) => why = Some(format!("the kernel has no way to {host} from {ours}: {e}")),
        }
    }
    let why = why
        .unwrap_or_else(|| format!("it has no address that can be reached: {}", names.carried()));
    Err(no_name(node, why))
}

#[cfg(test)]
mod tests {
    use barewire_dataplane::node::Here;
    use barewire_dataplane::wire::VERSIONS;

    use super::*;
    use crate::errno::OpenError;

    const OURS: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 1);

    fn v4(ip: Ipv4Addr, port: u16) -> SocketAddr {
        SocketAddr::new(ip.into(), port)
    }

    fn udp(port: Option<u16>) -> Names {
        Names::Udp { ip: OURS.into(), port, by_kernel: true }
    }

    /// A segment on which these answer, whoever is asked for.
    #[derive(Default)]
    struct Segment(Vec<Here>);

    impl Way for Segment {
        fn ask(&self, wanted: &[Wanted]) -> Result<Vec<Answers>, OpenError> {
            Ok(wanted.iter().map(|_| self.0.clone()).collect())
        }
    }

    fn find(
        names: Names,
        node: Option<&str>,
        service: Option<&str>,
        numeric: bool,
    ) -> Result<Option<EpAddr>, NoName> {
        names.find_by(node, service, Whose::Peers, numeric, &Segment::default())
    }

    fn peer(names: Names, node: Option<&str>, service: Option<&str>) -> Result<EpAddr, NoName> {
        find(names, node, service, false).map(Option::unwrap)
    }

    fn source(names: Names, node: Option<&str>, service: &str) -> Result<Option<EpAddr>, NoName> {
        names.find_by(node, Some(service), Whose::Ours, false, &Segment::default())
    }

    /// Goal: where services are asked for, the first answer is the address, whichever call asks and
    /// by whatever name; none says who was asked; and an own name is a service of this host.
    #[test]
    fn where_services_are_asked_for_the_first_answer_counts() {
        let names = Names::Asked { ip: Ipv4Addr::new(10, 1, 1, 1) };
        let here = |station, ep| Here {
            station: Station::at([2, 0, 0, 0, 0, station]),
            ep,
            versions: VERSIONS,
        };
        let two = Segment(vec![here(7, 9), here(8, 9)]);
        for (node, service) in [
            (Some("10.1.1.7"), Some("9")),
            (Some("2001:db8::7"), None),
            (Some("localhost"), Some("9")),
            (Some("no-host.invalid"), Some("9")),
            (None, Some("9")),
        ] {
            let found = names.find_by(node, service, Whose::Peers, false, &two).unwrap().unwrap();
            assert_eq!(
                (found.station.mac.0[5], found.ep, found.incarnation),
                (7, 9, 0),
                "{node:?}"
            );
            let why = find(names, node, service, false).unwrap_err().to_string();
            assert!(why.contains("every station on the segment was asked"), "{why}");
        }
        let hosts = [("10.1.1.7", 9), ("2001:db8::7", 9)].map(|(ip, n)| (ip.parse().unwrap(), n));
        assert!(names.find_all(&hosts, &two).iter().all(|found| found.as_ref().is_ok()));
        assert!(names.find_all(&hosts, &Segment::default()).iter().all(Result::is_err));
        // A name that the resolver does not know says no address, and least of all this host's.
        let other = Segment(vec![here(77, 9)]);
        let found = names.find_by(Some("no-host.invalid"), Some("9"), Whose::Peers, false, &other);
        assert_ne!(names.name(found.unwrap().unwrap()).0.ip(), IpAddr::from([10, 1, 1, 1]));
        let all = names.symmetric("10.1.1.7", Some("9"), 2, 2, &two).unwrap();
        assert_eq!(all.len(), 4);
        let e = names.symmetric("10.1.1.7", Some("65535"), 2, 2, &two).unwrap_err().to_string();
        assert!(e.contains("65535: it has too few followers"), "{e}");
        // With FI_NUMERICHOST nobody is asked for a name.
        let e = find(names, Some("no-host.invalid"), Some("9"), true).unwrap_err().to_string();
        assert!(e.contains("FI_NUMERICHOST") && !e.contains("broadcast"), "{e}");
        assert_eq!(source(names, Some("127.0.0.1"), "9"), Ok(Some(label(9))));
        assert_eq!(source(names, None, "0"), Ok(None));
        let e = source(names, Some("192.0.2.1"), "9").unwrap_err().to_string();
        assert!(e.contains("192.0.2.1: not an address of this host"), "{e}");
        assert_eq!(names.port_for("afpacket:lo", label(9)), None);
    }

    /// Goal: an address as `fi_av_straddr` writes it under the name `tcp` is one that is taken, for
    /// whatever a host and a service are.
    #[test]
    fn an_address_in_the_text_of_libfabric_is_taken() {
        let two = Segment(vec![Here {
            station: Station::at([2, 0, 0, 0, 0, 7]),
            ep: 9,
            versions: VERSIONS,
        }]);
        let asked = Names::Asked { ip: Ipv4Addr::new(10, 1, 1, 1) };
        for text in ["fi_sockaddr_in://10.1.1.7:9", "fi_sockaddr_in6://[2001:db8::7]:9"] {
            let found = asked.find_by(Some(text), None, Whose::Peers, true, &two);
            assert_eq!(found.unwrap().unwrap().ep, 9, "{text}");
        }
        for (text, host, service) in [
            ("fi_sockaddr_in://127.0.0.1:7471", Some("127.0.0.1"), Some("7471")),
            ("fi_sockaddr://127.0.0.1:7471?qos=3", Some("127.0.0.1"), Some("7471")),
            ("fi_sockaddr_in://127.0.0.1", Some("127.0.0.1"), None),
            ("fi_sockaddr_in://:7471", None, Some("7471")),
        ] {
            assert_eq!(peer(udp(None), Some(text), None), peer(udp(None), host, service), "{text}");
        }
        let text = "fi_sockaddr_in://127.0.0.1:7471";
        assert_eq!(
            udp(None).find_by(Some(text), None, Whose::Ours, false, &two),
            source(udp(None), Some("127.0.0.1"), "7471")
        );
        for (text, service) in [
            (text, Some("7471")),
            ("fi_sockaddr_in://127.0.0.1:x", None),
            ("fi_sockaddr_in6://[::1", None),
            ("fi_sockaddr_in6://[::1]7", None),
            ("fi_sockaddr_ib://[::1]:7", None),
        ] {
            assert!(find(udp(None), Some(text), service, false).is_err(), "{text}");
        }
    }

    /// Goal: who is asked for as this host is asked for by what no other host has.
    #[test]
    fn this_host_is_asked_for_by_what_it_has_alone() {
        let own = Ipv4Addr::new(10, 1, 1, 1);
        let ours = Wanted::new(None, &[own.into()], 7);
        for ips in [&[][..], &[Ipv4Addr::LOCALHOST.into()], &[Ipv4Addr::UNSPECIFIED.into()]] {
            assert_eq!(wanted(own, None, ips, 7), ours);
        }
        assert_eq!(wanted(own, Some("localhost"), &[Ipv4Addr::LOCALHOST.into()], 7), ours);
        let far: IpAddr = [10, 1, 1, 2].into();
        assert_eq!(wanted(own, Some("x"), &[far], 7), Wanted::new(Some("x"), &[far], 7));
        let named = Wanted::new(Some(&own_name()), &[], 7);
        assert_eq!(wanted(Ipv4Addr::LOCALHOST, None, &[], 7), named);
        for number in [0, 7, Station::NUMBER_MAX] {
            let station = Station { number, ..Station::at([2, 1, 2, 3, 4, 5]) };
            assert_eq!(station_in(station_as_ip(station)), Some(station));
        }
        assert_eq!(station_in(Ipv6Addr::LOCALHOST), None);
    }

    #[test]
    fn on_udp_host_and_service_are_the_address() {
        let addr = peer(udp(None), Some("127.0.0.1"), Some("7471")).unwrap();
        let place = SocketAddrV4::new(OURS, 49152 + 7471);
        assert_eq!((addr_of(addr.station.mac), addr.ep, addr.incarnation), (Some(place), 7471, 0));
        assert_eq!(udp(None).name(addr), (v4(OURS, 7471), true));
        let own = peer(udp(None), Some("localhost"), Some("52001")).unwrap();
        assert_eq!(addr_of(own.station.mac).map(|place| place.port()), Some(52001));
        // Without a service it is the first process of the host.
        let first = peer(udp(None), Some("127.0.0.1"), None).unwrap();
        assert_eq!((first.ep, addr_of(first.station.mac).unwrap().port()), (52000, 52000));
        assert_eq!(peer(udp(None), Some("::ffff:127.0.0.1"), None), Ok(first));
        // Ours in text stays what it says.
        let exact = peer(udp(None), Some("02:00:00:00:00:05"), Some("3")).unwrap();
        assert_eq!((exact.ep, exact.station.to_string().as_str()), (3, "02:00:00:00:00:05"));
    }

    /// Goal: each service has one address, which says it, and what cannot be said is known.
    #[test]
    fn every_service_names_its_address_and_four_have_one_port() {
        let host = Ipv4Addr::new(10, 1, 2, 3);
        let mut ports = std::collections::HashMap::new();
        for service in 0..=u16::MAX {
            let addr = udp(None).at(host.into(), service);
            assert_eq!(udp(None).name(addr), (v4(host, service), true));
            *ports.entry(addr.station).or_insert(0) += 1;
        }
        assert!(ports.len() == 1 << 14 && ports.values().all(|n| *n == 4));
        let addr = udp(None).at(host.into(), 52000);
        let numbers: Vec<u16> = udp(Some(52000)).services().collect();
        assert_eq!(numbers, [52000, 35616, 19232, 2848]);
        assert!(numbers.iter().all(|n| udp(None).at(host.into(), *n).station == addr.station));
        assert!(!udp(None).name(EpAddr { ep: 1, ..addr }).1);
        assert!(udp(None).services().eq(PORTS_TRIED) && Names::Labels.services().count() == 0);
    }

    /// Goal: on a port with an IPv6 address hosts of its 96 bits are addresses by arithmetic, both
    /// ways and by every form, and others are told of with the prefix.
    #[test]
    fn hosts_of_a_prefix_are_addresses() {
        let ip: IpAddr = "2001:db8::a01:107".parse().unwrap();
        // Past the kernel, which has no way there.
        let names = Names::Udp { ip, port: None, by_kernel: false };
        let host = |text: &str| -> IpAddr { text.parse().unwrap() };
        let far = peer(names, Some("2001:db8::a01:108"), Some("7471")).unwrap();
        assert_eq!(far.station, udp(None).at([10, 1, 1, 8].into(), 7471).station);
        assert_eq!(names.exact(host("2001:db8::a01:108"), 7471), Some(far));
        let (at, is_name) = names.name(far);
        assert_eq!((at.to_string().as_str(), is_name), ("[2001:db8::a01:108]:7471", true));
        assert_eq!(names.name6(far), ("2001:db8::a01:108".parse().unwrap(), 7471));
        for here in ["::", "::1", "127.0.0.1", "2001:db8::a01:107"] {
            assert_eq!(peer(names, Some(here), Some("7")), Ok(names.here(7)), "{here}");
            assert!(names.is_own(host(here)));
        }
        assert_eq!(source(names, Some("2001:db8::a01:107"), "7").unwrap(), Some(names.here(7)));
        let e = source(names, Some("2001:db8::a01:108"), "7").unwrap_err().to_string();
        assert!(e.contains("not the address of the port, udp:[2001:db8::a01:107]/96"), "{e}");
        for outside in ["2001:db8:1::a01:108", "10.1.1.8"] {
            let e = peer(names, Some(outside), Some("7")).unwrap_err().to_string();
            assert!(e.contains("hosts of 2001:db8::/96") && !e.contains('\n'), "{e}");
            assert_eq!(names.exact(host(outside), 7), None);
        }
        let all = names.symmetric("2001:db8::a01:1ff", Some("7"), 2, 1, &Segment::default());
        assert_eq!(names.name(all.unwrap()[1]).0.to_string(), "[2001:db8::a01:200]:7");
        // An endpoint that no service leads to is its station, on IPv4 too.
        for names in [names, udp(None)] {
            let other = EpAddr { ep: 3, ..names.here(52000) };
            let (ip, port) = names.name6(other);
            assert_eq!(names.exact(ip.into(), port), Some(other));
        }
        let spec = "udp:[2001:db8::a01:107]/96,near=no";
        let named = names.port_for(spec, names.here(7471));
        assert_eq!(named.as_deref(), Some("udp:[2001:db8::a01:107]/96:56623,near=no"));
        assert!(Names::of(spec).is_v6() && !Names::of("udp:127.0.0.1").is_v6());
    }

    #[test]
    fn a_loopback_address_is_this_host_on_a_port_of_another() {
        let names = Names::Udp { ip: [10, 0, 0, 1].into(), port: None, by_kernel: true };
        for host in [Ipv4Addr::LOCALHOST, Ipv4Addr::UNSPECIFIED, Ipv4Addr::new(10, 0, 0, 1)] {
            assert_eq!(names.name(names.at(host.into(), 7)).0.ip(), IpAddr::from([10, 0, 0, 1]));
        }
        let named = source(names, Some("localhost"), "7").unwrap().unwrap();
        assert_eq!(named, names.here(7));
    }

    /// Goal: a port past the kernel reaches hosts that the kernel knows no way to, by its gateway.
    #[test]
    fn a_port_past_the_kernel_asks_it_for_no_way() {
        let spec = "fault():ip(192.0.2.7/24,gw=192.0.2.1,port=52000):afpacket:eth0";
        let names = Names::of(spec);
        let want = Names::Udp { ip: [192, 0, 2, 7].into(), port: Some(52000), by_kernel: false };
        assert_eq!(names, want);
        let far = peer(names, Some("203.0.113.9"), Some("7471")).unwrap();
        assert_eq!(far, names.at([203, 0, 113, 9].into(), 7471));
        let by_kernel = Names::Udp { ip: [192, 0, 2, 7].into(), port: None, by_kernel: true };
        assert!(peer(by_kernel, Some("203.0.113.9"), Some("7471")).is_err());
    }

    #[test]
    fn a_source_on_udp_is_of_the_port_and_its_udp_port_follows() {
        let addr = source(udp(None), None, "7471").unwrap().unwrap();
        assert_eq!(addr, udp(None).at(OURS.into(), 7471));
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
        assert_eq!(find(names, None, Some("0"), false), Ok(None));
        assert_eq!(find(names, Some("127.0.0.1"), None, false), Ok(None));
        let station = peer(names, Some("02:00:00:00:00:05"), Some("3")).unwrap();
        assert_eq!((station.ep, station.incarnation), (3, 0));
        let with = names.port_for("shm:x", label(7));
        assert_eq!(with.as_deref(), Some("shm:x,mac=06:62:77:00:00:07"));
        assert_eq!(names.port_for("shm:x,mac=02:00:00:00:00:05", label(7)), None);
        assert_eq!(names.port_for("shm:x", station), None);
    }

    #[test]
    fn nodes_follow_each_other_by_number() {
        for (first, n, is) in [
            ("10.0.0.255", 1, Some("10.0.1.0")),
            ("2001:db8::a01:1ff", 1, Some("2001:db8::a01:200")),
            ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 1, None),
            ("255.255.255.255", 1, None),
            ("node09", 2, Some("node11")),
            ("node9", 2, Some("node11")),
            ("rack7.lan", 0, Some("rack7.lan")),
            ("rack7.lan", 1, None),
        ] {
            assert_eq!(following(first, n).as_deref(), is, "{first} {n}");
        }
        let of = |names: Names, node, service, nodes, services| {
            names.symmetric(node, Some(service), nodes, services, &Segment::default()).map(|all| {
                let name = |a: &EpAddr| names.name(*a).0.to_string();
                all.iter().map(name).collect::<Vec<_>>().join(" ")
            })
        };
        let all = of(udp(None), "127.0.0.2", "7", 2, 2).unwrap();
        assert_eq!(all, "127.0.0.2:7 127.0.0.2:8 127.0.0.3:7 127.0.0.3:8");
        let all = of(Names::Labels, "localhost", "7", 2, 2).unwrap();
        assert_eq!(all, "127.0.0.1:7 127.0.0.1:8 127.0.0.1:7 127.0.0.1:8");
        let all =
            udp(None).symmetric("02:00:00:00:00:05", Some("3"), 2, 2, &Segment::default()).unwrap();
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
            (udp(None), Some("2001:db8::1"), Some("7"), false, "the port carries IPv4"),
        ] {
            let e = find(names, node, service, numeric).unwrap_err().to_string();
            assert!(e.contains(says), "{e}");
        }
    }
}
