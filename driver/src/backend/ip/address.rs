//! The address of a port: its settings, its network and next hops, and the claim that keeps its IP
//! address and UDP port from other processes.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use super::super::inet::{DEFAULT_PORTS, PREFIX_LEN, Prefix, host_bits};
use super::super::lock::NotInChildren;
use super::super::netdev::reserve_name;
use super::super::udp::{ADVICE_UNUSED, reserve_port};
use super::neighbours::Host;
use crate::error::OpenError;

/// Settings of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpSettings {
    /// The port's IP address. The host's kernel may share it. Over IPv6 all peers have the same
    /// first 96 bits.
    pub address: IpAddr,
    /// Length of the segment's prefix, bits: 1 to 32, over IPv6 96 to 128. Hosts outside it are
    /// reached by the gateway.
    pub prefix_len: u8,
    /// The router of the segment. Default: none; only the segment is reachable.
    pub gateway: Option<IpAddr>,
    /// The UDP port, one of [`PORTS`](super::super::udp::PORTS). Default: the first free one of
    /// [`DEFAULT_PORTS`].
    pub port: Option<u16>,
    /// TTL or hop limit of datagrams. Default 64.
    pub ttl: u8,
    /// Differentiated services code point of the datagrams, 0 to 63. Default 0.
    pub dscp: u8,
    /// Whether datagrams are sent as ECN-capable. Default: yes.
    pub ecn: bool,
    /// Whether IPv4 datagrams have a UDP checksum, which is mandatory over IPv6. The packet inside
    /// has a better one, and a checksum costs a pass over every byte. Default: no; for networks
    /// that drop datagrams without.
    pub sums: bool,
    /// MTU of the frame inside, bytes after its Ethernet header: from 256 to the MTU of the port
    /// below less 42, over IPv6 less 62. Default: the maximum.
    pub mtu: Option<usize>,
}

impl IpSettings {
    /// The settings of a port at `address`.
    pub fn at(address: impl Into<IpAddr>, prefix_len: u8) -> Self {
        Self {
            address: address.into(),
            prefix_len,
            gateway: None,
            port: None,
            ttl: 64,
            dscp: 0,
            ecn: true,
            sums: false,
            mtu: None,
        }
    }

    /// Validates the settings.
    ///
    /// # Errors
    /// The first violation, and how to resolve it.
    pub fn check(&self) -> Result<(), OpenError> {
        let (ip, len) = (self.address, self.prefix_len);
        let net = Net::of(self);
        let refuse = |why: String, mend: &str| Err(self.refuse(libc::EINVAL, why, mend));
        if ip.is_ipv4() && !(1..=32).contains(&len) {
            let why = format!("a prefix of {len} bits");
            return refuse(why, "write 1 to 32, as in ip(10.1.1.7/24)");
        }
        if ip.is_ipv6() && !(PREFIX_LEN..=128).contains(&len) {
            let why = format!("a prefix of {len} bits, and the first 96 are those of all peers");
            return refuse(why, "write 96, or up to 128: ip([2001:db8::a01:107]/96)");
        }
        if !net.is_host(ip) {
            let why = format!("{ip} is no address of a host in its network of {len} bits");
            return refuse(why, "write the port's own address and the length of its prefix");
        }
        if let Some(gateway) = self.gateway {
            if ip.is_ipv6() && len == PREFIX_LEN {
                let why = "with /96 all that the port reaches is its own segment, without a router";
                let mend = "leave out gw=, or write the bits of the segment alone, 97 to 128";
                return refuse(why.into(), mend);
            }
            if gateway == ip || gateway.is_ipv6() != ip.is_ipv6() || !net.is_router(gateway) {
                let why = format!("the gateway {gateway} is no other host of the network");
                return refuse(why, "write the router's address there, see: ip route");
            }
        }
        if let Some(port) = self.port
            && net.prefix.mac_of(SocketAddr::new(ip, port)).is_none()
        {
            let why = format!("UDP port {port} has no address of the fabric");
            return refuse(why, "write 49152 to 65535: port=50000");
        }
        if self.dscp > 63 || self.ttl == 0 {
            return refuse("no such dscp= or ttl=".into(), "write dscp=0 to 63, ttl=1 to 255");
        }
        Ok(())
    }

    /// The MTU of the port over one with MTU `below`, with `headers` bytes of headers.
    pub(super) fn mtu_over(&self, below: usize, headers: usize) -> Result<usize, OpenError> {
        let max = below.saturating_sub(headers);
        OpenError::check_mtu(self.mtu.unwrap_or(max), max)
    }

    pub(super) fn refuse(
        &self,
        errno: i32,
        why: impl Into<String>,
        mend: impl Into<String>,
    ) -> OpenError {
        OpenError::device(format!("ip({})", self.address_text()), errno, why, mend)
    }

    fn address_text(&self) -> String {
        match self.address {
            IpAddr::V4(ip) => format!("{ip}/{}", self.prefix_len),
            IpAddr::V6(ip) => format!("[{ip}]/{}", self.prefix_len),
        }
    }

    /// The settings as written in a port's name, with the UDP port `port`.
    pub(super) fn text(&self, port: u16) -> String {
        let Self { gateway, ttl, dscp, .. } = self;
        let mut text = format!("{},port={port}", self.address_text());
        if let Some(gateway) = gateway {
            text += &format!(",gw={gateway}");
        }
        if *ttl != 64 {
            text += &format!(",ttl={ttl}");
        }
        if *dscp != 0 {
            text += &format!(",dscp={dscp}");
        }
        if !self.ecn {
            text += ",ecn=no";
        }
        if self.sums {
            text += ",sum=yes";
        }
        if let Some(mtu) = self.mtu {
            text += &format!(",mtu={mtu}");
        }
        format!("ip({text})")
    }
}

/// A port's network: which hosts are on the link, and the gateway to all others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Net {
    /// The prefix that all reachable hosts share.
    pub(super) prefix: Prefix,
    own: u32,
    mask: u32,
    /// The router's key in the neighbour cache, and its address.
    gateway: Option<(Host, IpAddr)>,
}

/// Key of a router whose address has another prefix than the hosts. Not a host's: over IPv6 these
/// bits are reserved for anycast (RFC 2526).
const ROUTER: Host = Host::MAX;

impl Net {
    pub(super) fn of(settings: &IpSettings) -> Self {
        let IpSettings { address, prefix_len, gateway, .. } = *settings;
        let len =
            if address.is_ipv4() { prefix_len } else { prefix_len.saturating_sub(PREFIX_LEN) };
        let mask = u32::MAX.checked_shl(32 - u32::from(len.min(32))).unwrap_or(0);
        let (prefix, own) = (Prefix::of(address), host_bits(address).into());
        let key = |ip| prefix.host(ip).map_or(ROUTER, Host::from);
        let gateway = gateway.map(|ip| (key(ip), ip));
        Self { prefix, own, mask, gateway }
    }

    /// Whether the address of `host` is in the segment's prefix.
    #[inline]
    fn is_on_link(self, host: Host) -> bool {
        (host ^ self.own) & self.mask == 0
    }

    /// Whether `ip` can be a host's: not a network, multicast or broadcast address.
    fn is_host(self, ip: IpAddr) -> bool {
        self.prefix.host(ip).is_some_and(|host| self.is_host_number(host.into()))
    }

    fn is_host_number(self, number: Host) -> bool {
        let host = number & !self.mask;
        if let Prefix::V6(bytes) = self.prefix {
            // The subnet-router anycast address, RFC 4291.
            let is_special = self.is_on_link(number) && !self.mask > 1 && host == 0;
            return !(is_special || number == 0 || number == ROUTER || !is_unicast_prefix(bytes));
        }
        // Networks of one or two addresses have no network or broadcast address, RFC 3021.
        let is_special =
            self.is_on_link(number) && !self.mask > 1 && (host == 0 || host == !self.mask);
        let [first, ..] = number.to_be_bytes();
        !(is_special || first == 0 || first == 127 || first >= 224)
    }

    /// Whether `ip` can be a router of the segment. With a /32 prefix, as in clouds, any address
    /// can; over IPv6 routers have link-local addresses.
    fn is_router(self, ip: IpAddr) -> bool {
        match ip {
            IpAddr::V6(ip) if Prefix::of(ip.into()) != self.prefix => ip.is_unicast_link_local(),
            _ => self.mask == u32::MAX || self.is_host(ip) && self.is_on_link(host_bits(ip).into()),
        }
    }

    /// Whether `host` is the port's own.
    #[inline]
    pub(super) fn is_own(self, host: Ipv4Addr) -> bool {
        Host::from(host) == self.own
    }

    /// Neighbour key of the next hop to a host. `None`: no route, since the host is off link and
    /// there is no gateway, or its address is not a host's.
    #[inline]
    pub(super) fn next_hop(self, to: Ipv4Addr) -> Option<Host> {
        let to = Host::from(to);
        if !self.is_host_number(to) {
            return None;
        }
        if self.is_on_link(to) { Some(to) } else { self.gateway.map(|(key, _)| key) }
    }

    /// Neighbour key of `ip` if it can be a next hop.
    pub(super) fn neighbour_key(self, ip: IpAddr) -> Option<Host> {
        if let Some((key, gateway)) = self.gateway
            && gateway == ip
        {
            return Some(key);
        }
        let host = Host::from(self.prefix.host(ip)?);
        (self.is_on_link(host) && self.is_host_number(host)).then_some(host)
    }

    /// The IP address of the neighbour with the key `host`.
    pub(super) fn ip_of(self, host: Host) -> IpAddr {
        match self.gateway {
            Some((key, gateway)) if key == host => gateway,
            _ => self.prefix.ip(host.into()),
        }
    }
}

/// Keeps an IP address and UDP port from other processes until dropped.
pub struct AddressClaim {
    pub(super) addr: SocketAddr,
    _name: Option<NotInChildren>,
    /// Reserves the UDP port in the kernel if that shares the address: it would reply "port
    /// unreachable" otherwise.
    socket: Option<NotInChildren>,
}

impl AddressClaim {
    /// An address that is not kept from other processes or from other ports of this one.
    pub(super) fn unclaimed(addr: SocketAddr) -> Self {
        Self { addr, _name: None, socket: None }
    }

    /// Whether the kernel shares the address.
    pub(super) fn is_shared_with_kernel(&self) -> bool {
        self.socket.is_some()
    }

    /// Claims the address of `settings`, and the first free UDP port if none is named.
    /// `beside_kernel`: the kernel receives the interface's frames too.
    ///
    /// # Errors
    /// [`OpenError`]: a process has claimed it, or the settings are invalid.
    pub fn acquire(settings: &IpSettings, beside_kernel: bool) -> Result<Self, OpenError> {
        settings.check()?;
        let is_taken = |e: &io::Error| e.raw_os_error() == Some(libc::EADDRINUSE);
        let os = |e: &io::Error| {
            let errno = e.raw_os_error().unwrap_or(libc::EIO);
            settings.refuse(errno, format!("cannot claim a UDP port: {e}"), "see: ss -uanp")
        };
        let ports = settings.port.map_or(DEFAULT_PORTS, |port| port..=port);
        for port in ports.clone() {
            match acquire(SocketAddr::new(settings.address, port), beside_kernel) {
                Ok(place) => return Ok(place),
                Err(e) if is_taken(&e) => {}
                Err(e) if e.raw_os_error() == Some(libc::EADDRNOTAVAIL) => {
                    let ip = settings.address;
                    let why = format!("the kernel does not use {ip} yet, or not any more");
                    return Err(settings.refuse(libc::EADDRNOTAVAIL, why, ADVICE_UNUSED));
                }
                Err(e) => return Err(os(&e)),
            }
        }
        let (first, last) = (ports.start(), ports.end());
        let why = match settings.port {
            Some(port) => format!("UDP port {port} is in use by another process"),
            None => format!("UDP ports {first} to {last} are all in use"),
        };
        let mend =
            format!("name another, 49152 to 65535: port=50000; see: ss -ulnp sport = :{first}");
        Err(settings.refuse(libc::EADDRINUSE, why, mend))
    }

    /// The claimed IP address and UDP port.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

/// Whether a prefix is of global or unique local unicast: not multicast, loopback, link-local or
/// IPv4-mapped (RFC 4291, section 2).
fn is_unicast_prefix(prefix: [u8; 12]) -> bool {
    let is_of_link = prefix[0] == 0xfe && prefix[1] & 0xc0 == 0x80;
    let is_mapped = prefix == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
    !(prefix[0] == 0xff || is_of_link || is_mapped || prefix == [0; 12])
}

fn acquire(addr: SocketAddr, beside_kernel: bool) -> io::Result<AddressClaim> {
    let name = reserve_name(&format!("barewire-ip-{addr}"))?;
    let socket = if beside_kernel { reserve_port(addr)? } else { None };
    Ok(AddressClaim { addr, _name: Some(name), socket })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(len: u8, gateway: Option<[u8; 4]>) -> IpSettings {
        let at = IpSettings::at(Ipv4Addr::new(10, 1, 1, 7), len);
        IpSettings { gateway: gateway.map(IpAddr::from), ..at }
    }

    #[test]
    fn the_next_hop_is_the_host_itself_or_the_gateway() {
        let gateway = Host::from(Ipv4Addr::new(10, 1, 1, 1));
        let (alone, net) =
            (Net::of(&settings(24, None)), Net::of(&settings(24, Some([10, 1, 1, 1]))));
        let near = Ipv4Addr::new(10, 1, 1, 200);
        let far = Ipv4Addr::new(10, 1, 2, 200);
        assert_eq!((alone.next_hop(near), alone.next_hop(far)), (Some(near.into()), None));
        assert_eq!((net.next_hop(near), net.next_hop(far)), (Some(near.into()), Some(gateway)));
        for nobody in [[10, 1, 1, 0], [10, 1, 1, 255], [0, 0, 0, 0], [127, 0, 0, 1], [224, 0, 0, 1]]
        {
            assert_eq!(net.next_hop(nobody.into()), None, "{nobody:?}");
        }
        assert!(net.next_hop([255; 4].into()).is_none());
        let is_hop = |ip: Ipv4Addr| net.neighbour_key(ip.into()) == Some(ip.into());
        assert!(is_hop(near) && is_hop(gateway.into()) && !is_hop(far));
        // A cloud's /32: no host is on the link.
        let cloud = Net::of(&settings(32, Some([10, 1, 1, 1])));
        assert_eq!((cloud.next_hop(near), cloud.next_hop(far)), (Some(gateway), Some(gateway)));
        // A point-to-point link.
        let two = Net::of(&settings(31, None));
        assert_eq!(two.next_hop(Ipv4Addr::new(10, 1, 1, 6)), Some(0x0a01_0106));
    }

    #[test]
    fn invalid_settings_are_rejected_with_advice() {
        let good = settings(24, Some([10, 1, 1, 1]));
        good.check().unwrap();
        settings(32, Some([10, 9, 9, 9])).check().unwrap();
        for (bad, says) in [
            (settings(0, None), "write 1 to 32"),
            (settings(33, None), "write 1 to 32"),
            (settings(24, Some([10, 1, 2, 1])), "ip route"),
            (settings(24, Some([10, 1, 1, 7])), "ip route"),
            (settings(24, Some([10, 1, 1, 255])), "ip route"),
            (
                IpSettings { address: [10, 1, 1, 255].into(), ..good.clone() },
                "no address of a host",
            ),
            (IpSettings { address: [127, 0, 0, 1].into(), ..good.clone() }, "no address of a host"),
            (IpSettings { port: Some(80), ..good.clone() }, "49152 to 65535"),
            (IpSettings { dscp: 64, ..good.clone() }, "dscp=0 to 63"),
            (IpSettings { ttl: 0, ..good.clone() }, "ttl=1 to 255"),
            (settings6("::1", 96, None), "no address of a host"),
            (settings6("fe80::7", 96, None), "no address of a host"),
            (settings6("ff02::7", 96, None), "no address of a host"),
            (settings6("::ffff:10.1.1.7", 96, None), "no address of a host"),
        ] {
            let said = bad.check().unwrap_err().to_string();
            assert!(said.contains(says), "{said}");
        }
    }

    fn settings6(address: &str, len: u8, gateway: Option<&str>) -> IpSettings {
        let at = IpSettings::at(address.parse::<IpAddr>().unwrap(), len);
        IpSettings { gateway: gateway.map(|ip| ip.parse().unwrap()), ..at }
    }

    #[test]
    fn the_next_hop_of_ipv6_is_the_host_itself_or_the_gateway() {
        let here = "2001:db8::a01:107";
        let ip = |text: &str| -> IpAddr { text.parse().unwrap() };
        let (near, far) = (Ipv4Addr::new(10, 1, 1, 200), Ipv4Addr::new(10, 1, 2, 200));
        let all = Net::of(&settings6(here, 96, None));
        assert_eq!((all.next_hop(near), all.next_hop(far)), (Some(near.into()), Some(far.into())));
        for gateway in ["fe80::1", "2001:db8::a01:101"] {
            let with = settings6(here, 120, Some(gateway));
            with.check().unwrap();
            let net = Net::of(&with);
            let router = net.neighbour_key(ip(gateway)).unwrap();
            assert_eq!((net.next_hop(near), net.next_hop(far)), (Some(near.into()), Some(router)));
            assert_eq!(
                (net.ip_of(router), net.neighbour_key(ip("2001:db8::a01:2c8"))),
                (ip(gateway), None)
            );
            assert_eq!(net.ip_of(near.into()), ip("2001:db8::a01:1c8"));
            assert!(net.neighbour_key(ip("2001:db9::a01:1c8")).is_none());
            for nobody in [[10, 1, 1, 0], [0; 4], [255; 4]] {
                assert_eq!(net.next_hop(nobody.into()), None);
            }
            // IPv6 has no broadcast, and no multicast among these bits.
            assert!(
                net.next_hop([10, 1, 1, 255].into()).is_some()
                    && net.next_hop([224; 4].into()).is_some()
            );
        }
        for (bad, says) in [
            (settings6(here, 64, None), "write 96, or up to 128"),
            (settings6(here, 129, None), "write 96, or up to 128"),
            (settings6(here, 96, Some("fe80::1")), "leave out gw="),
            (settings6(here, 120, Some("10.1.1.1")), "ip route"),
            (settings6(here, 120, Some("2001:db8::a01:201")), "ip route"),
            (settings6(here, 120, Some("2001:db9::1")), "ip route"),
            (settings6(here, 120, Some(here)), "ip route"),
            (settings6("2001:db8::a01:100", 120, None), "no address of a host"),
            (settings6("ff02::a01:107", 120, None), "no address of a host"),
        ] {
            let said = bad.check().unwrap_err().to_string();
            assert!(said.contains(says) && !said.contains('\n'), "{said}");
        }
    }

    #[test]
    fn an_address_is_claimed_once() {
        let at = settings(24, None);
        let first = AddressClaim::acquire(&at, true).unwrap();
        let second = AddressClaim::acquire(&at, true).unwrap();
        assert_ne!(first.addr(), second.addr());
        let named = IpSettings { port: Some(first.addr().port()), ..at };
        let said = AddressClaim::acquire(&named, true).err().unwrap().to_string();
        assert!(said.contains("in use by another process") && said.contains("ss -ulnp"), "{said}");
        drop(first);
        AddressClaim::acquire(&named, true).unwrap();
    }
}
