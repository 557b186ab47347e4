//! Resolution of host (name or IP address) and service to the address of an endpoint.
//!
//! How a name is resolved depends on the port ([`Names`]). Names are resolved when an address is
//! requested or inserted, never when a message is sent.
//!
//! # `udp:` ports
//! The MAC of such a port encodes its IPv4 address, or the last 32 bits of an IPv6 address whose
//! other bits all peers share, and its UDP port. So host and service map to an address by
//! arithmetic, without a query. The endpoint has the number of the service, and its port the UDP
//! port with the same lower 14 bits ([`udp_port`]), which from 49152 on is the service itself.
//!
//! # Segments
//! A *label* is the address of an endpoint that a program knows by a service only. On `shm:` the
//! domain that is opened with it takes the MAC `06:62:77:00:PP:PP`, which encodes the service. Only
//! this host has a name.
//!
//! # Other ports
//! A broadcast query finds the server (`who.rs`). An endpoint with a requested service has that
//! number and answers queries for it at every IP address of its host and at its hostname: also at
//! addresses of other interfaces, since a name may resolve to any of them and a device without the
//! kernel has none. No other process of the host gets the service on that device. A label is used
//! in its place until the domain is open and the station is known.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, ToSocketAddrs, UdpSocket};

use barewire_dataplane::types::EpAddr;
use barewire_driver::backend::inet::{
    DEFAULT_PORTS, PORTS, Prefix, addr_of, host_bits, host_text, mac_of,
};
use barewire_driver::backend::lock::NotInChildren;
use barewire_driver::backend::netdev::{ip_addresses, reserve_name};
use barewire_driver::open::{choose, kind_and_device, udp_host_port, with_udp_port};
use barewire_driver::port::{MacAddr, PortCaps, Station};

use crate::addr::resolve;
use crate::errno::{Error, Result as FiResult, refused_by_system};
use crate::hosts::{interface_of, ip_of, own_ips, own_name, remember_ip};
use crate::settings::Settings;
pub use crate::who::QUERY_TIMEOUT;
use crate::who::{Answers, PortResolver, Query, Resolver};

/// How a port resolves host and service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// The host is this host, and the service is a label.
    Labels,
    /// Host and service are the IP address and UDP port of a `udp:` or `ip(...)` port.
    Udp {
        /// The IP address of the port. The first 96 bits of an IPv6 address are those of all hosts
        /// that the port reaches.
        ip: IpAddr,
        /// Its UDP port, if the port's name gives one.
        port: Option<u16>,
        /// The kernel sends the datagrams, by its own routes.
        by_kernel: bool,
    },
    /// A broadcast query finds the station that serves the service of a host.
    Queried {
        /// An IPv4 address of this host, preferably of the port's interface; `127.0.0.1` if the
        /// host has no other.
        ip: Ipv4Addr,
    },
}

/// Kinds of ports on which services are queried.
const QUERIED_KINDS: &[&str] = &["afpacket", "xdp", "memif", "vfio", "dpdk"];

/// IPv6 prefix of addresses that encode a station: its number and MAC follow. The `sockaddr_in6` of
/// an endpoint without an IP address has this prefix. It is a unique local prefix (RFC 4193, "bar
/// ew"), so no other network uses it.
const MAC_NET: [u16; 4] = [0xfd62, 0x6172, 0x6577, 0];

/// The port on which services are queried.
pub struct QueryPort<'a> {
    name: &'a str,
    chosen: Option<String>,
    near: bool,
}

impl<'a> QueryPort<'a> {
    /// The port `name`. Queries go through a domain of this process that is open on it, or else
    /// through the port, opened for the query.
    pub fn new(name: &'a str, settings: &Settings) -> Self {
        Self { name, chosen: choose(name).ok(), near: settings.near }
    }

    pub(crate) fn resolver(&self) -> PortResolver<'_> {
        PortResolver { name: self.chosen.as_deref().unwrap_or(self.name), near: self.near }
    }
}

/// Whether a name is resolved to a local address or to a peer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddrRole {
    /// A local address: of an endpoint of the port itself (`FI_SOURCE`).
    Source,
    /// The address of a peer.
    Peer,
}

/// Why host and service were not resolved, and which queries were made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ResolveError(String);

impl From<ResolveError> for Error {
    /// [`Error::NoData`], and the reason in the log.
    fn from(why: ResolveError) -> Self {
        tracing::warn!("{why}");
        Self::NoData
    }
}

/// Default service on a `udp:` port: that of the first process of a host.
const DEFAULT_SERVICE: u16 = *DEFAULT_PORTS.start();

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

/// The label of a service: its address on ports of [`Names::Labels`].
pub fn label(service: u16) -> EpAddr {
    let [high, low] = service.to_be_bytes();
    EpAddr {
        station: Station::at([0x06, 0x62, 0x77, 0x00, high, low]),
        ep: service,
        incarnation: 0,
    }
}

impl Names {
    /// The scheme of the port that `spec` names.
    pub fn of(spec: &str) -> Self {
        let Ok(port) = choose(spec) else { return Self::Labels };
        if let Some((ip, number)) = udp_host_port(&port) {
            let by_kernel = kind_and_device(&port).is_some_and(|(kind, _)| kind == "udp");
            return Self::Udp { ip, port: number, by_kernel };
        }
        match kind_and_device(&port) {
            Some((kind, device)) if QUERIED_KINDS.contains(&kind) => {
                let v4 = |ip: IpAddr| if let IpAddr::V4(ip) = ip { Some(ip) } else { None };
                let ip = own_ips(device).into_iter().find_map(v4);
                Self::Queried { ip: ip.unwrap_or(Ipv4Addr::LOCALHOST) }
            }
            _ => Self::Labels,
        }
    }

    /// The IP address in names of this host's endpoints.
    pub fn own_ip(self) -> IpAddr {
        match self {
            Self::Labels => Ipv4Addr::LOCALHOST.into(),
            Self::Udp { ip, .. } => ip,
            Self::Queried { ip } => ip.into(),
        }
    }

    /// Whether the port has multicast groups.
    pub(crate) fn has_groups(self) -> bool {
        !matches!(self, Self::Udp { .. })
    }

    /// Whether hosts have IPv6 addresses only.
    pub fn is_v6(self) -> bool {
        matches!(self, Self::Udp { ip: IpAddr::V6(_), .. })
    }

    /// The address of the service at `host`. The unspecified address is this host, and so is a
    /// loopback address but on a port that has one. Only the last 32 bits of an IPv6 address are
    /// used: the caller has checked that the others are the port's.
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

    /// Host and service of an address, and whether [`at`](Self::at) maps them back to it.
    pub fn name(self, addr: EpAddr) -> (SocketAddr, bool) {
        let host: IpAddr = match self {
            Self::Udp { ip, .. } => match addr_of(addr.station.mac) {
                Some(place) => Prefix::of(ip).ip(*place.ip()),
                None => Ipv4Addr::LOCALHOST.into(),
            },
            Self::Labels => Ipv4Addr::LOCALHOST.into(),
            Self::Queried { ip } if addr.station == label(addr.ep).station => ip.into(),
            Self::Queried { .. } => match ip_of(addr.station) {
                Some(ip @ IpAddr::V4(_)) => ip,
                _ => Ipv4Addr::UNSPECIFIED.into(),
            },
        };
        (SocketAddr::new(host, addr.ep), self.at(host, addr.ep).station == addr.station)
    }

    /// The services by which an endpoint without a requested service can be found, best first:
    /// those of its UDP port, or of the UDP ports that are tried. Empty for labels.
    pub fn services(self) -> impl Iterator<Item = u16> {
        let (settled, tried) = match self {
            Self::Labels => (None, None),
            Self::Udp { port: Some(port), .. } => (Some(port), None),
            Self::Udp { port: None, .. } | Self::Queried { .. } => (None, Some(DEFAULT_PORTS)),
        };
        let settled = settled.into_iter().flat_map(|port| (0..4).map(move |n| port ^ n << 14));
        settled.chain(tried.into_iter().flatten())
    }

    /// The port name that gives an endpoint the address `source`, made of `spec`. `None` if `spec`
    /// already fixes the station.
    pub(crate) fn port_for(self, spec: &str, source: EpAddr) -> Option<String> {
        match self {
            Self::Labels if source.station != label(source.ep).station || spec.contains("mac=") => {
                None
            }
            Self::Labels => Some(format!("{spec},mac={}", source.station)),
            Self::Queried { .. } => None,
            Self::Udp { ip, .. } => {
                let place = addr_of(source.station.mac);
                let place = place.filter(|place| *place.ip() == host_bits(ip))?;
                with_udp_port(spec, place.port())
            }
        }
    }

    /// The address that `node` and `service` name: an address in barewire's text form, or a host by
    /// name or IP address and a service by number. `None` stands for any service of this host.
    ///
    /// With `numeric` (`FI_NUMERICHOST`) the system's resolver is not asked. Else the call blocks
    /// for the system's resolver, and for queries on `query_port`, up to [`QUERY_TIMEOUT`] if no
    /// station answers.
    ///
    /// # Errors
    /// [`ResolveError`]: no such host or service was found.
    pub fn find(
        self,
        node: Option<&str>,
        service: Option<&str>,
        role: AddrRole,
        numeric: bool,
        query_port: &QueryPort<'_>,
    ) -> Result<Option<EpAddr>, ResolveError> {
        self.find_by(node, service, role, numeric, &query_port.resolver())
    }

    pub(crate) fn find_by(
        self,
        node: Option<&str>,
        service: Option<&str>,
        role: AddrRole,
        numeric: bool,
        resolver: &dyn Resolver,
    ) -> Result<Option<EpAddr>, ResolveError> {
        if let Some(Ok(addr)) = node.map(|node| resolve(node, service.filter(|s| *s != "0"))) {
            return Ok(Some(addr));
        }
        let (node, service) = match node {
            Some(node) => split_fi_addr_str(node, service)?,
            None => (None, service),
        };
        let number = number_of(service)?;
        let hosts = node.map(|node| hosts(node, numeric)).transpose();
        if let Self::Queried { ip } = self {
            return match role {
                AddrRole::Source => own_label(node, hosts?, number),
                // A host answers to its own hostname, which the resolver may not know.
                AddrRole::Peer if numeric => {
                    query_service(ip, node, Ok(hosts?), number, resolver).map(Some)
                }
                AddrRole::Peer => query_service(ip, node, hosts, number, resolver).map(Some),
            };
        }
        let hosts = hosts?;
        match self {
            Self::Queried { .. } | Self::Labels => {
                if hosts.is_some_and(|hosts| !hosts.into_iter().any(is_here)) {
                    let why = "not an address of this host, and this port resolves no other host";
                    return Err(resolve_error(node, why));
                }
                Ok((number != 0).then(|| label(number)))
            }
            Self::Udp { ip, port, .. } if role == AddrRole::Source => {
                let is_ours = |host: IpAddr| {
                    host == ip || host.is_unspecified() || host.is_loopback() && !ip.is_loopback()
                };
                if hosts.is_some_and(|hosts| !hosts.into_iter().any(is_ours)) {
                    return Err(resolve_error(
                        node,
                        format!("not the address of the port, udp:{}", host_text(ip)),
                    ));
                }
                self.source_addr(number, port)
            }
            Self::Udp { ip, by_kernel, .. } => {
                let host = match hosts {
                    Some(hosts) => reachable(ip, by_kernel, node, hosts)?,
                    None => ip,
                };
                Ok(Some(self.at(host, if number == 0 { DEFAULT_SERVICE } else { number })))
            }
        }
    }

    /// The addresses of `node_count` hosts, `node` and those that follow it, times `service_count`
    /// services, `service` and those that follow it, host by host. The successor of a MAC or an IP
    /// address is the next number, that of a name has its last digits incremented. On ports of
    /// [`Names::Labels`] this host stands for all hosts.
    ///
    /// # Errors
    /// [`ResolveError`]: a host or service was not found, or has no successor.
    pub(crate) fn symmetric(
        self,
        node: &str,
        service: Option<&str>,
        node_count: usize,
        service_count: usize,
        resolver: &dyn Resolver,
    ) -> Result<Vec<EpAddr>, ResolveError> {
        let (host, service) = split_fi_addr_str(node, service)?;
        let node = host.unwrap_or(node);
        if let (Self::Queried { ip }, Err(_)) = (self, resolve(node, service)) {
            let numbers = service_range(service, service_count)?;
            return query_symmetric(ip, (node, node_count), &numbers, resolver);
        }
        let all = node_count.checked_mul(service_count);
        let mut found = Vec::with_capacity(all.unwrap_or(0).min(1 << 20));
        for n in 0..node_count {
            let end = || resolve_error(Some(node), "it has too few followers");
            let (first, is_mac) = match resolve(node, service) {
                Ok(first) => {
                    let mac =
                        first.station.mac.to_u64().checked_add(n as u64).filter(|m| *m < 1 << 48);
                    let mac = MacAddr::from_u64(mac.ok_or_else(end)?);
                    (EpAddr { station: Station { mac, ..first.station }, ..first }, true)
                }
                Err(_) => {
                    let own = self == Self::Labels;
                    let node = if own { Some(node.to_owned()) } else { successor(node, n) };
                    let node = node.ok_or_else(end)?;
                    let first =
                        self.find_by(Some(&node), service, AddrRole::Peer, false, resolver)?;
                    (
                        first.ok_or_else(|| resolve_error(Some(&node), "a peer has a service"))?,
                        false,
                    )
                }
            };
            for s in 0..service_count {
                let ep = u16::try_from(s).ok().and_then(|s| first.ep.checked_add(s));
                let ep = ep.ok_or_else(|| resolve_error(service, "it has too few followers"))?;
                let host = self.name(first).0.ip();
                found.push(if is_mac { EpAddr { ep, ..first } } else { self.at(host, ep) });
            }
        }
        Ok(found)
    }

    /// The addresses of services at hosts by IP address. All queries are sent at once.
    pub(crate) fn find_all(
        self,
        hosts: &[(IpAddr, u16)],
        resolver: &dyn Resolver,
    ) -> Vec<Result<EpAddr, ResolveError>> {
        let exact = |&(ip, service): &(IpAddr, u16)| self.exact(ip, service).map(Ok);
        let mut found: Vec<_> = hosts.iter().map(exact).collect();
        let open = || found.iter().enumerate().filter(|(_, exact)| exact.is_none());
        let open: Vec<usize> = open().map(|(i, _)| i).collect();
        if let Self::Queried { ip: own } = self
            && !open.is_empty()
        {
            let query_of = |&i: &usize| {
                let (ip, service) = hosts[i];
                query_for(own, None, &[ip], service)
            };
            let queries: Vec<Query> = open.iter().map(query_of).collect();
            let answers = resolver.query(&queries);
            for (n, i) in open.into_iter().enumerate() {
                let (ip, service) = hosts[i];
                let (name, ips) = (format!("{ip}"), [ip]);
                found[i] = Some(match &answers {
                    Ok(answers) => choose_answer(own, Some(&name), &ips, service, &answers[n]),
                    Err(why) => Err(resolve_error(Some(&name), why)),
                });
            }
        }
        let nobody = |i: usize| resolve_error(Some(&hosts[i].0.to_string()), self.reach_text());
        let each = found.into_iter().enumerate();
        each.map(|(i, found)| found.unwrap_or_else(|| Err(nobody(i)))).collect()
    }

    /// The address of an IP address and a service, by arithmetic alone. `None`: a query is needed,
    /// or the port cannot reach such an IP address.
    pub fn exact(self, host: IpAddr, service: u16) -> Option<EpAddr> {
        match (self, host.to_canonical()) {
            (Self::Labels, _) => Some(label(service)),
            (Self::Udp { ip, .. }, host) if self.reaches(ip, host) => Some(self.at(host, service)),
            (_, IpAddr::V4(_)) => None,
            (_, IpAddr::V6(host)) => {
                station_in(host).map(|station| EpAddr { station, ep: service, incarnation: 0 })
            }
        }
    }

    /// Whether a port at `ip` reaches `host`: it is in the same network, or is this host.
    fn reaches(self, ip: IpAddr, host: IpAddr) -> bool {
        let is_here = host.is_unspecified() || host.is_loopback() && !ip.is_loopback();
        is_here || Prefix::of(ip).contains(host)
    }

    /// Which hosts the port reaches, for messages about a host that it does not.
    pub fn reach_text(self) -> String {
        match self {
            Self::Udp { ip: ip @ IpAddr::V6(_), .. } => {
                let all = Prefix::of(ip).ip(Ipv4Addr::UNSPECIFIED);
                format!("the port reaches hosts of {all}/96, whose first 96 bits are its own")
            }
            _ => "the port carries IPv4; write udp:[ADDRESS]/96 for one that carries IPv6".into(),
        }
    }

    /// Remembers the IP address of a station, to print its address with it.
    pub fn remember_ip(self, addr: EpAddr, ip: IpAddr) {
        if matches!(self, Self::Queried { .. }) && !ip.is_unspecified() && !ip.is_loopback() {
            remember_ip(addr.station, ip.to_canonical());
        }
    }

    /// IPv6 address and service of an address. If no host and service map to it, the IPv6 address
    /// encodes the station.
    pub fn name6(self, addr: EpAddr) -> (Ipv6Addr, u16) {
        let ip = match self {
            Self::Queried { .. } if addr.station != label(addr.ep).station => {
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

    /// Whether `ip` may be the IP address of a local address on this port.
    pub fn is_own(self, ip: IpAddr) -> bool {
        match (self, ip.to_canonical()) {
            (_, ip) if ip.is_unspecified() || ip.is_loopback() => true,
            (Self::Labels, IpAddr::V4(_)) => true,
            (Self::Udp { ip: ours, .. }, ip) => ip == ours,
            (Self::Queried { ip: ours }, IpAddr::V4(ip)) if ip == ours => true,
            (_, ip) => is_here(ip),
        }
    }

    /// Claims the service of an endpoint with the address `source` on `port`, which no other
    /// process of the host can claim then. `None`: the endpoint serves no name.
    ///
    /// # Errors
    /// [`Error::AddrInUse`]: another endpoint of the host has claimed the service.
    pub(crate) fn claim(port: &PortCaps, source: Option<EpAddr>) -> FiResult<Option<ServiceClaim>> {
        let Some(source) = source.filter(|addr| is_placeholder(*addr) && addr.ep != 0) else {
            return Ok(None);
        };
        let Self::Queried { ip } = Self::of(&port.name) else { return Ok(None) };
        // The number comes first: the kernel truncates long names.
        let name = format!("barewire-service-{}-{}", source.ep, interface_of(&port.name));
        let claim = reserve_name(&name).map_err(|e| match e.raw_os_error() {
            Some(libc::EADDRINUSE) => {
                tracing::warn!("service {}: another process of this host has it", source.ep);
                Error::AddrInUse
            }
            e => refused_by_system("the name of a service", e.unwrap_or(libc::EIO)),
        })?;
        remember_ip(port.station, ip.into());
        Ok(Some(ServiceClaim { service: source.ep, _claim: claim }))
    }

    /// The local address of a service, unless the port's name fixes another UDP port.
    fn source_addr(self, service: u16, port: Option<u16>) -> Result<Option<EpAddr>, ResolveError> {
        let need = udp_port(service);
        match port.filter(|port| service != 0 && *port != need) {
            None => Ok((service != 0).then(|| self.here(service))),
            Some(port) => {
                let why = format!("it takes UDP port {need}, and the port's is {port}; name none");
                Err(resolve_error(Some(&service.to_string()), &why))
            }
        }
    }
}

/// A service that an endpoint serves. Dropping it releases the service.
pub(crate) struct ServiceClaim {
    pub(crate) service: u16,
    _claim: NotInChildren,
}

/// Whether an address is a label, which stands for the port's own address until the MAC is known.
pub(crate) fn is_placeholder(addr: EpAddr) -> bool {
    addr.station == label(addr.ep).station
}

/// The IPv6 address that encodes a station: see [`MAC_NET`].
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

/// The label of `service` for a local endpoint, if `node` is this host.
fn own_label(
    node: Option<&str>,
    hosts: Option<Vec<IpAddr>>,
    service: u16,
) -> Result<Option<EpAddr>, ResolveError> {
    let here = |ip: IpAddr| ip.is_unspecified() || is_here(ip);
    if hosts.is_some_and(|hosts| !hosts.into_iter().any(here)) {
        return Err(resolve_error(node, "not an address of this host"));
    }
    Ok((service != 0).then(|| label(service)))
}

/// The query for a service of a host. `own` is this host's IPv4 address.
fn query_for(own: Ipv4Addr, name: Option<&str>, ips: &[IpAddr], service: u16) -> Query {
    let is_own = |ip: &IpAddr| ip.is_loopback() || ip.is_unspecified();
    match name.is_none() && ips.is_empty() || ips.iter().any(is_own) {
        false => Query::new(name, ips, service),
        // Only this host has this address.
        true if !own.is_loopback() => Query::new(None, &[own.into()], service),
        true => Query::new(Some(&own_name()), &[], service),
    }
}

/// A host and a service to be queried.
struct HostQuery<'a> {
    node: Option<&'a str>,
    /// Its IP addresses, or the error of the system's resolver.
    hosts: Result<Vec<IpAddr>, ResolveError>,
    service: u16,
}

impl<'a> HostQuery<'a> {
    fn new(
        node: Option<&'a str>,
        hosts: Result<Option<Vec<IpAddr>>, ResolveError>,
        service: u16,
    ) -> Self {
        Self { node, hosts: hosts.map(Option::unwrap_or_default), service }
    }

    fn ips(&self) -> &[IpAddr] {
        self.hosts.as_ref().map_or(&[], |ips| ips)
    }

    /// The host in messages.
    fn text(&self) -> &str {
        self.node.unwrap_or("this host")
    }

    fn query(&self, own: Ipv4Addr) -> Query {
        let name = self.node.filter(|node| node.parse::<IpAddr>().is_err());
        query_for(own, name, self.ips(), self.service)
    }

    /// The address in the answers.
    fn choose(&self, own: Ipv4Addr, answers: &Answers) -> Result<EpAddr, ResolveError> {
        let found = choose_answer(own, self.node, self.ips(), self.service, answers);
        found.map_err(|why| match &self.hosts {
            Err(unresolved) => ResolveError(format!("{unresolved}; {why}")),
            Ok(_) => why,
        })
    }
}

/// Queries the station that serves `service` at `node`.
fn query_service(
    own: Ipv4Addr,
    node: Option<&str>,
    hosts: Result<Option<Vec<IpAddr>>, ResolveError>,
    service: u16,
    resolver: &dyn Resolver,
) -> Result<EpAddr, ResolveError> {
    let host_query = HostQuery::new(node, hosts, service);
    let answers = resolver.query(&[host_query.query(own)]);
    let answers = answers.map_err(|why| resolve_error(Some(host_query.text()), why))?;
    host_query.choose(own, &answers[0])
}

/// Queries each of `services` at each of `count` hosts, `node` and its successors, all at once.
fn query_symmetric(
    own: Ipv4Addr,
    (node, count): (&str, usize),
    services: &[u16],
    resolver: &dyn Resolver,
) -> Result<Vec<EpAddr>, ResolveError> {
    let end = || resolve_error(Some(node), "it has too few followers");
    let next = |n| successor(node, n).ok_or_else(end);
    let nodes = (0..count).map(next).collect::<Result<Vec<String>, ResolveError>>()?;
    let mut host_queries = Vec::new();
    for node in &nodes {
        let known = Ok(Some(hosts(node, false))).and_then(Option::transpose);
        let each = services.iter().map(|n| HostQuery::new(Some(node), known.clone(), *n));
        host_queries.extend(each);
    }
    let queries: Vec<Query> = host_queries.iter().map(|one| one.query(own)).collect();
    let answers = resolver.query(&queries).map_err(|why| resolve_error(Some(node), why))?;
    host_queries.iter().zip(&answers).map(|(one, answers)| one.choose(own, answers)).collect()
}

/// `count` services from `first` on.
fn service_range(first: Option<&str>, count: usize) -> Result<Vec<u16>, ResolveError> {
    let number = number_of(first)?;
    let end = || resolve_error(first, "it has too few followers");
    let each = (0..count).map(|n| u16::try_from(n).ok().and_then(|n| number.checked_add(n)));
    each.map(|n| n.ok_or_else(end)).collect()
}

/// A service as a number; 0 if none is named.
fn number_of(service: Option<&str>) -> Result<u16, ResolveError> {
    let number = service.map_or(Ok(0), str::parse::<u16>);
    number.map_err(|_| resolve_error(service, "a service is a number, 0 to 65535"))
}

/// Splits host and service, which may both be in `node`, as in `fi_sockaddr_in://10.1.1.1:7471`
/// (fi_getinfo(3), `FI_ADDR_STR`).
///
/// # Errors
/// [`ResolveError`]: `node` is malformed, or names a service as `service` does.
fn split_fi_addr_str<'a>(
    node: &'a str,
    service: Option<&'a str>,
) -> Result<(Option<&'a str>, Option<&'a str>), ResolveError> {
    let kinds = ["fi_sockaddr://", "fi_sockaddr_in://", "fi_sockaddr_in6://"];
    let Some(place) = kinds.iter().find_map(|kind| node.strip_prefix(kind)) else {
        return Ok((Some(node), service));
    };
    if service.is_some() {
        return Err(resolve_error(Some(node), "it names a service already; give none besides"));
    }
    let wrong = || resolve_error(Some(node), "expected such as fi_sockaddr_in://10.1.1.1:7471");
    // A path or query is no part of an IP address.
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

/// The address in the answers to a query: that of the first station. Warns if two stations serve
/// the same service.
fn choose_answer(
    own: Ipv4Addr,
    node: Option<&str>,
    ips: &[IpAddr],
    service: u16,
    answers: &Answers,
) -> Result<EpAddr, ResolveError> {
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
        let ms = QUERY_TIMEOUT.as_millis();
        return Err(ResolveError(format!(
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
        Some(ip) if !is_own(&ip) => remember_ip(first.station, ip),
        // A host that is known by name only has no IP address to remember.
        None if node.is_some() => {}
        _ => remember_ip(first.station, own.into()),
    }
    Ok(EpAddr { station: first.station, ep: first.ep, incarnation: 0 })
}

fn resolve_error(what: Option<&str>, why: impl fmt::Display) -> ResolveError {
    ResolveError(format!("{}: {why}", what.unwrap_or_default()))
}

/// The `n`th successor of node `first`.
fn successor(first: &str, n: usize) -> Option<String> {
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

/// The IP addresses of a host. Never empty.
fn hosts(node: &str, numeric: bool) -> Result<Vec<IpAddr>, ResolveError> {
    if let Ok(ip) = node.parse::<IpAddr>() {
        return Ok(vec![ip.to_canonical()]);
    }
    if numeric {
        return Err(resolve_error(
            Some(node),
            "not an address in numbers, which FI_NUMERICHOST asks for",
        ));
    }
    match (node, 0).to_socket_addrs() {
        Ok(found) if found.len() > 0 => Ok(found.map(|at| at.ip().to_canonical()).collect()),
        Ok(_) => Err(resolve_error(Some(node), "the system's resolver knows no address")),
        Err(e) => Err(resolve_error(Some(node), format!("the system's resolver says: {e}"))),
    }
}

/// Whether an address is one of this host, by the attempt to bind a socket to it.
fn is_here(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

/// The first of a host's IP addresses that a port at `ours` reaches: one of the same network and,
/// if the kernel sends the datagrams, with a route. Whether the host is up is not tested.
fn reachable(
    ours: IpAddr,
    by_kernel: bool,
    node: Option<&str>,
    hosts: Vec<IpAddr>,
) -> Result<IpAddr, ResolveError> {
    let names = Names::Udp { ip: ours, port: None, by_kernel };
    let mut why = None;
    for host in hosts {
        if !names.reaches(ours, host) {
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
        let route =
            UdpSocket::bind((ours, 0)).and_then(|socket| socket.connect((host, DEFAULT_SERVICE)));
        match route {
            Ok(()) => return Ok(host),
            Err(e) => why = Some(format!("the kernel has no way to {host} from {ours}: {e}")),
        }
    }
    let why = why.unwrap_or_else(|| {
        format!("it has no address that can be reached: {}", names.reach_text())
    });
    Err(resolve_error(node, why))
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

    /// A segment on which these stations answer every query.
    #[derive(Default)]
    struct Segment(Vec<Here>);

    impl Resolver for Segment {
        fn query(&self, queries: &[Query]) -> Result<Vec<Answers>, OpenError> {
            Ok(queries.iter().map(|_| self.0.clone()).collect())
        }
    }

    fn find(
        names: Names,
        node: Option<&str>,
        service: Option<&str>,
        numeric: bool,
    ) -> Result<Option<EpAddr>, ResolveError> {
        names.find_by(node, service, AddrRole::Peer, numeric, &Segment::default())
    }

    fn peer(
        names: Names,
        node: Option<&str>,
        service: Option<&str>,
    ) -> Result<EpAddr, ResolveError> {
        find(names, node, service, false).map(Option::unwrap)
    }

    fn source(
        names: Names,
        node: Option<&str>,
        service: &str,
    ) -> Result<Option<EpAddr>, ResolveError> {
        names.find_by(node, Some(service), AddrRole::Source, false, &Segment::default())
    }

    /// Goal: on a port with queries the first answer is the address, for each call and each form of
    /// the name; without an answer the error says that all stations were asked; and an own name is
    /// a service of this host.
    #[test]
    fn the_first_answer_to_a_query_is_the_address() {
        let names = Names::Queried { ip: Ipv4Addr::new(10, 1, 1, 1) };
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
            let found = names.find_by(node, service, AddrRole::Peer, false, &two).unwrap().unwrap();
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
        let found =
            names.find_by(Some("no-host.invalid"), Some("9"), AddrRole::Peer, false, &other);
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
        let asked = Names::Queried { ip: Ipv4Addr::new(10, 1, 1, 1) };
        for text in ["fi_sockaddr_in://10.1.1.7:9", "fi_sockaddr_in6://[2001:db8::7]:9"] {
            let found = asked.find_by(Some(text), None, AddrRole::Peer, true, &two);
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
            udp(None).find_by(Some(text), None, AddrRole::Source, false, &two),
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

    /// Goal: a query for this host uses names that no other host has.
    #[test]
    fn this_host_is_queried_by_its_unique_names() {
        let own = Ipv4Addr::new(10, 1, 1, 1);
        let ours = Query::new(None, &[own.into()], 7);
        for ips in [&[][..], &[Ipv4Addr::LOCALHOST.into()], &[Ipv4Addr::UNSPECIFIED.into()]] {
            assert_eq!(query_for(own, None, ips, 7), ours);
        }
        assert_eq!(query_for(own, Some("localhost"), &[Ipv4Addr::LOCALHOST.into()], 7), ours);
        let far: IpAddr = [10, 1, 1, 2].into();
        assert_eq!(query_for(own, Some("x"), &[far], 7), Query::new(Some("x"), &[far], 7));
        let named = Query::new(Some(&own_name()), &[], 7);
        assert_eq!(query_for(Ipv4Addr::LOCALHOST, None, &[], 7), named);
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

    /// Goal: each service has one address, from which it is recovered; four services share a UDP
    /// port; and an address that no service has is recognized.
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
        assert!(udp(None).services().eq(DEFAULT_PORTS) && Names::Labels.services().count() == 0);
    }

    /// Goal: on a port with an IPv6 address, hosts of its 96-bit prefix map to addresses and back,
    /// in every form, and the error for other hosts names the prefix.
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
            assert_eq!(successor(first, n).as_deref(), is, "{first} {n}");
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
    fn the_error_of_an_unknown_host_says_what_was_queried() {
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
