//! Where a port is: an IP address and a UDP port that are this process's alone.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use super::super::inet::{PORTS_TRIED, PREFIX_LEN, Prefix, host_bits};
use super::super::lock::NotInChildren;
use super::super::netdev::hold;
use super::super::udp::{MEND_UNUSED, keep_port};
use super::neighbours::Host;
use crate::error::OpenError;

/// Where to be, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpSettings {
    /// The port's IP address. The kernel of the host may have the same one. Of IPv6 the first 96
    /// bits are those of all peers.
    pub address: IpAddr,
    /// Bits of it that the hosts of its segment have in common, 1 to 32, of IPv6 96 to 128. All
    /// others are reached by the gateway.
    pub prefix_len: u8,
    /// The router of the segment. Default: none, and only the segment is reached.
    pub gateway: Option<IpAddr>,
    /// The UDP port, one of [`PORTS`](super::super::udp::PORTS). Default: the first free one of
    /// [`PORTS_TRIED`].
    pub port: Option<u16>,
    /// Routers that a datagram may pass. Default 64.
    pub ttl: u8,
    /// Differentiated services code point of the datagrams, 0 to 63. Default 0.
    pub dscp: u8,
    /// Whether datagrams say that they may be marked for congestion. Default: yes.
    pub ecn: bool,
    /// Whether datagrams have a sum, as those of IPv6 have in any case. The packet inside has a
    /// better one, and a sum takes a look at every byte. Default: no; for networks that drop
    /// datagrams without.
    pub sums: bool,
    /// Largest number of bytes after the Ethernet header of a frame inside, 256 to what the port
    /// below carries less 42, of IPv6 62, which is the default.
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

    /// Whether they make sense.
    ///
    /// # Errors
    /// Why not.
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

    /// The MTU of a port over one with `below`.
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

    /// As it is written, for a port at `port`.
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

/// The network that a port is in, and the way out of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Net {
    /// What all hosts have in common that the port reaches.
    pub(super) prefix: Prefix,
    own: u32,
    mask: u32,
    /// The router, and what it is known by among the neighbours.
    gateway: Option<(Host, IpAddr)>,
}

/// Stands for a router whose address has another prefix than all hosts. No host has it: of IPv6
/// such bits are a network's own (RFC 2526).
const ROUTER: Host = Host::MAX;

impl Net {
    pub(super) fn of(settings: &IpSettings) -> Self {
        let IpSettings { address, prefix_len, gateway, .. } = *settings;
        let len =
            if address.is_ipv4() { prefix_len } else { prefix_len.saturating_sub(PREFIX_LEN) };
        let mask = u32::MAX.checked_shl(32 - u32::from(len.min(32))).unwrap_or(0);
        let (prefix, own) = (Prefix::of(address), host_bits(address).into());
        let known_by = |ip| prefix.host(ip).map_or(ROUTER, Host::from);
        let gateway = gateway.map(|ip| (known_by(ip), ip));
        Self { prefix, own, mask, gateway }
    }

    /// Whether `host` is on the segment, or would be.
    #[inline]
    fn is_near(self, host: Host) -> bool {
        (host ^ self.own) & self.mask == 0
    }

    /// Whether there can be such a host, seen from here: not a network's own address, a group's,
    /// everybody's.
    fn is_host(self, ip: IpAddr) -> bool {
        self.prefix.host(ip).is_some_and(|host| self.is_of_host(host.into()))
    }

    fn is_of_host(self, number: Host) -> bool {
        let host = number & !self.mask;
        if let Prefix::V6(bytes) = self.prefix {
            // The address of all routers of a network, RFC 4291.
            let is_special = self.is_near(number) && !self.mask > 1 && host == 0;
            return !(is_special || number == 0 || number == ROUTER || !may_send_v6(bytes));
        }
        // Networks of one or two hosts have no other addresses, RFC 3021.
        let is_special =
            self.is_near(number) && !self.mask > 1 && (host == 0 || host == !self.mask);
        let [first, ..] = number.to_be_bytes();
        !(is_special || first == 0 || first == 127 || first >= 224)
    }

    /// Whether `ip` can be a router of the segment. With no network of its own, a host of a cloud
    /// has one all the same; of IPv6 routers have addresses of one link.
    fn is_router(self, ip: IpAddr) -> bool {
        match ip {
            IpAddr::V6(ip) if Prefix::of(ip.into()) != self.prefix => ip.is_unicast_link_local(),
            _ => self.mask == u32::MAX || self.is_host(ip) && self.is_near(host_bits(ip).into()),
        }
    }

    /// Whether a host is the port's own.
    #[inline]
    pub(super) fn is_own(self, host: Ipv4Addr) -> bool {
        Host::from(host) == self.own
    }

    /// Who is next on the way to a host. `None`: it is outside, and there is no gateway, or nobody
    /// has such an address.
    #[inline]
    pub(super) fn hop(self, to: Ipv4Addr) -> Option<Host> {
        let to = Host::from(to);
        if !self.is_of_host(to) {
            return None;
        }
        if self.is_near(to) { Some(to) } else { self.gateway.map(|(known_by, _)| known_by) }
    }

    /// What `ip` is known by if it can be next on a way.
    pub(super) fn hop_at(self, ip: IpAddr) -> Option<Host> {
        if let Some((known_by, gateway)) = self.gateway
            && gateway == ip
        {
            return Some(known_by);
        }
        let host = Host::from(self.prefix.host(ip)?);
        (self.is_near(host) && self.is_of_host(host)).then_some(host)
    }

    /// The IP address of who is known by `host`.
    pub(super) fn ip_of(self, host: Host) -> IpAddr {
        match self.gateway {
            Some((known_by, gateway)) if known_by == host => gateway,
            _ => self.prefix.ip(host.into()),
        }
    }
}

/// Keeps an address and a UDP port for this process.
pub struct Place {
    pub(super) addr: SocketAddr,
    _name: Option<NotInChildren>,
    /// If the kernel has the address as well: else it would tell senders that nobody is there.
    socket: Option<NotInChildren>,
}

impl Place {
    /// One that nothing keeps from other processes, nor from other ports of this one.
    pub(super) fn unclaimed(addr: SocketAddr) -> Self {
        Self { addr, _name: None, socket: None }
    }

    /// Whether the kernel has the address as well.
    pub(super) fn is_kernels(&self) -> bool {
        self.socket.is_some()
    }

    /// Takes the place that `settings` name. `beside_kernel`: the kernel hears of what comes too.
    ///
    /// # Errors
    /// [`OpenError`]: a process has it.
    pub fn claim(settings: &IpSettings, beside_kernel: bool) -> Result<Self, OpenError> {
        settings.check()?;
        let is_taken = |e: &io::Error| e.raw_os_error() == Some(libc::EADDRINUSE);
        let os = |e: &io::Error| {
            let errno = e.raw_os_error().unwrap_or(libc::EIO);
            settings.refuse(errno, format!("cannot claim a UDP port: {e}"), "see: ss -uanp")
        };
        let ports = settings.port.map_or(PORTS_TRIED, |port| port..=port);
        for port in ports.clone() {
            match claim(SocketAddr::new(settings.address, port), beside_kernel) {
                Ok(place) => return Ok(place),
                Err(e) if is_taken(&e) => {}
                Err(e) if e.raw_os_error() == Some(libc::EADDRNOTAVAIL) => {
                    let ip = settings.address;
                    let why = format!("the kernel does not use {ip} yet, or not any more");
                    return Err(settings.refuse(libc::EADDRNOTAVAIL, why, MEND_UNUSED));
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

    /// Where that is.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

/// Whether hosts whose addresses begin so send beyond themselves: no group, not this host, none of
/// one link, and no IPv4 in other words (RFC 4291, section 2).
fn may_send_v6(prefix: [u8; 12]) -> bool {
    let is_of_link = prefix[0] == 0xfe && prefix[1] & 0xc0 == 0x80;
    let is_mapped = prefix == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
    !(prefix[0] == 0xff || is_of_link || is_mapped || prefix == [0; 12])
}

fn claim(addr: SocketAddr, beside_kernel: bool) -> io::Result<Place> {
    let name = hold(&format!("barewire-ip-{addr}"))?;
    let socket = if beside_kernel { keep_port(addr)? } else { None };
    Ok(Place { addr, _name: Some(name), socket })
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
        assert_eq!((alone.hop(near), alone.hop(far)), (Some(near.into()), None));
        assert_eq!((net.hop(near), net.hop(far)), (Some(near.into()), Some(gateway)));
        for nobody in [[10, 1, 1, 0], [10, 1, 1, 255], [0, 0, 0, 0], [127, 0, 0, 1], [224, 0, 0, 1]]
        {
            assert_eq!(net.hop(nobody.into()), None, "{nobody:?}");
        }
        assert!(net.hop([255; 4].into()).is_none());
        let is_hop = |ip: Ipv4Addr| net.hop_at(ip.into()) == Some(ip.into());
        assert!(is_hop(near) && is_hop(gateway.into()) && !is_hop(far));
        // A host of a cloud: nobody is near.
        let cloud = Net::of(&settings(32, Some([10, 1, 1, 1])));
        assert_eq!((cloud.hop(near), cloud.hop(far)), (Some(gateway), Some(gateway)));
        // A wire between two.
        let two = Net::of(&settings(31, None));
        assert_eq!(two.hop(Ipv4Addr::new(10, 1, 1, 6)), Some(0x0a01_0106));
    }

    #[test]
    fn settings_that_make_no_sense_say_so() {
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
        assert_eq!((all.hop(near), all.hop(far)), (Some(near.into()), Some(far.into())));
        for gateway in ["fe80::1", "2001:db8::a01:101"] {
            let with = settings6(here, 120, Some(gateway));
            with.check().unwrap();
            let net = Net::of(&with);
            let router = net.hop_at(ip(gateway)).unwrap();
            assert_eq!((net.hop(near), net.hop(far)), (Some(near.into()), Some(router)));
            assert_eq!(
                (net.ip_of(router), net.hop_at(ip("2001:db8::a01:2c8"))),
                (ip(gateway), None)
            );
            assert_eq!(net.ip_of(near.into()), ip("2001:db8::a01:1c8"));
            assert!(net.hop_at(ip("2001:db9::a01:1c8")).is_none());
            for nobody in [[10, 1, 1, 0], [0; 4], [255; 4]] {
                assert_eq!(net.hop(nobody.into()), None);
            }
            // There is no address of everybody, and no numbers of groups.
            assert!(
                net.hop([10, 1, 1, 255].into()).is_some() && net.hop([224; 4].into()).is_some()
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
    fn a_place_is_one_processs() {
        let at = settings(24, None);
        let first = Place::claim(&at, true).unwrap();
        let second = Place::claim(&at, true).unwrap();
        assert_ne!(first.addr(), second.addr());
        let named = IpSettings { port: Some(first.addr().port()), ..at };
        let said = Place::claim(&named, true).err().unwrap().to_string();
        assert!(said.contains("in use by another process") && said.contains("ss -ulnp"), "{said}");
        drop(first);
        Place::claim(&named, true).unwrap();
    }
}
