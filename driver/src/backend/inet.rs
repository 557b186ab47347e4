//! Places of ports inside UDP: the IP address and the UDP port that an address of the fabric is.
//!
//! The 46 bits that a local unicast address leaves free hold 32 bits of a host and 14 of a UDP
//! port ([`mac_of`], [`addr_of`]). Those of a host are its IPv4 address, or the last of an IPv6
//! address whose first 96 bits all hosts of the fabric have in common: the port's own, which are
//! in no frame ([`Prefix`]).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::RawFd;

use super::netdev::ip_addresses;
use crate::port::MacAddr;

/// UDP ports that have an address of the fabric.
pub const PORTS: std::ops::RangeInclusive<u16> = 0xc000..=0xffff;
/// Those that are tried in turn when none is named: one rule of a firewall lets them through.
pub const PORTS_TRIED: std::ops::RangeInclusive<u16> = 52_000..=52_063;

/// Bits that hosts with IPv6 addresses have in common.
pub const PREFIX_LEN: u8 = 96;

/// In the byte of DSCP and ECN, which IPv6 calls the traffic class: what may be marked, ECT(0), and
/// what a router with a long queue makes of it, CE (RFC 3168).
pub(super) const ECT_0: u8 = 2;
pub(super) const CE: u8 = 3;

/// That byte of datagrams with a code point of 0 to 63, that may be marked (`ecn`) or not.
pub(super) fn tos_of(dscp: u8, ecn: bool) -> u8 {
    dscp << 2 | if ecn { ECT_0 } else { 0 }
}

/// The address of the port at `addr`, if its UDP port has one.
pub fn mac_of(addr: SocketAddrV4) -> Option<MacAddr> {
    word_of(addr).map(|word| {
        let [mac @ .., _, _] = word.to_le_bytes();
        MacAddr(mac)
    })
}

/// That address as [`MacAddr::frame_word`] has it.
#[inline]
pub(super) fn word_of(addr: SocketAddrV4) -> Option<u64> {
    let (ip, port) = (u32::from_le_bytes(addr.ip().octets()), u64::from(addr.port()));
    let [first, last] = [port >> 6 & 0xfc | 2, port & 0xff];
    PORTS.contains(&addr.port()).then_some(first | u64::from(ip) << 8 | last << 40)
}

/// Where the port with address `mac` is, if it is one of this kind.
pub fn addr_of(mac: MacAddr) -> Option<SocketAddrV4> {
    let [high, a, b, c, d, low] = mac.0;
    let port = u16::from_be_bytes([high >> 2 | 0xc0, low]);
    (high & 3 == 2).then(|| SocketAddrV4::new(Ipv4Addr::new(a, b, c, d), port))
}

/// What stands before the 32 bits of every host that a port reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Prefix {
    /// Nothing: they are an IPv4 address.
    V4,
    /// The first 96 bits of IPv6 addresses.
    V6([u8; 12]),
}

impl Prefix {
    /// That of an address.
    pub fn of(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(ip) => Self::V6(parts(ip).0),
        }
    }

    /// Whether `ip` is a host behind it.
    pub fn holds(self, ip: IpAddr) -> bool {
        Self::of(ip) == self
    }

    /// The IP address of a host, by its 32 bits.
    #[inline]
    pub fn ip(self, host: Ipv4Addr) -> IpAddr {
        match self {
            Self::V4 => host.into(),
            Self::V6(prefix) => {
                let mut bytes = [0; 16];
                bytes[..12].copy_from_slice(&prefix);
                bytes[12..].copy_from_slice(&host.octets());
                Ipv6Addr::from(bytes).into()
            }
        }
    }

    /// The 32 bits of a host behind it.
    pub fn host(self, ip: IpAddr) -> Option<Ipv4Addr> {
        self.holds(ip).then(|| host_bits(ip))
    }

    /// The place that `addr` is behind it.
    #[inline]
    pub fn place(self, addr: SocketAddrV4) -> SocketAddr {
        match self.ip(*addr.ip()) {
            IpAddr::V4(ip) => SocketAddrV4::new(ip, addr.port()).into(),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, addr.port(), 0, 0).into(),
        }
    }

    /// The address of the port at `place`: `None` if that is not behind it, or its UDP port has no
    /// address.
    #[inline]
    pub fn mac_of(self, place: SocketAddr) -> Option<MacAddr> {
        mac_of(SocketAddrV4::new(self.host(place.ip())?, place.port()))
    }

    /// Where the port with address `mac` is, if it is one of this kind.
    #[inline]
    pub fn addr_of(self, mac: MacAddr) -> Option<SocketAddr> {
        addr_of(mac).map(|addr| self.place(addr))
    }
}

fn parts(ip: Ipv6Addr) -> ([u8; 12], [u8; 4]) {
    let [p @ .., a, b, c, d] = ip.octets();
    (p, [a, b, c, d])
}

/// The last 32 bits of an address, all of one of IPv4.
pub fn host_bits(ip: IpAddr) -> Ipv4Addr {
    match ip {
        IpAddr::V4(ip) => ip,
        IpAddr::V6(ip) => parts(ip).1.into(),
    }
}

/// How `ip` is written in the name of a port: one of IPv6 in brackets, with the bits that all hosts
/// of the fabric have in common.
pub fn host_text(ip: IpAddr) -> String {
    match ip {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]/{PREFIX_LEN}"),
    }
}

/// Interfaces and those of their IP addresses that can be a port's, as `(name, address)`: not those
/// that are of one link alone.
pub fn addresses() -> Vec<(String, IpAddr)> {
    let mut all = ip_addresses();
    all.retain(|(_, ip)| match ip {
        IpAddr::V4(_) => true,
        IpAddr::V6(ip) => !ip.is_unicast_link_local(),
    });
    all
}

/// A socket address as the kernel reads and writes it. That of IPv4 has its address where that of
/// IPv6 has a label of flows.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Name(libc::sockaddr_in6);

const _: () = {
    use libc::{sockaddr_in as V4, sockaddr_in6 as V6};
    use std::mem::offset_of;
    assert!(offset_of!(V4, sin_port) == offset_of!(V6, sin6_port));
    assert!(offset_of!(V4, sin_addr) == offset_of!(V6, sin6_flowinfo));
    assert!(size_of::<V4>() <= size_of::<V6>());
};

impl Name {
    /// Bytes that one takes at most.
    pub(super) const LEN_MAX: libc::socklen_t = size_of::<libc::sockaddr_in6>() as _;

    /// Nobody's.
    pub(super) fn nobody() -> Self {
        // SAFETY: zeros are a `sockaddr_in6`.
        Self(unsafe { std::mem::zeroed() })
    }

    #[inline]
    pub(super) fn of(addr: SocketAddr) -> Self {
        let mut name = Self::nobody();
        name.0.sin6_port = addr.port().to_be();
        match addr {
            SocketAddr::V4(addr) => {
                name.0.sin6_family = libc::AF_INET as libc::sa_family_t;
                name.0.sin6_flowinfo = u32::from(*addr.ip()).to_be();
            }
            SocketAddr::V6(addr) => {
                name.0.sin6_family = libc::AF_INET6 as libc::sa_family_t;
                name.0.sin6_addr.s6_addr = addr.ip().octets();
            }
        }
        name
    }

    /// What it says, if it is of IP.
    #[inline]
    pub(super) fn addr(&self) -> Option<SocketAddr> {
        let port = u16::from_be(self.0.sin6_port);
        match libc::c_int::from(self.0.sin6_family) {
            libc::AF_INET => {
                let ip = Ipv4Addr::from(u32::from_be(self.0.sin6_flowinfo));
                Some(SocketAddrV4::new(ip, port).into())
            }
            libc::AF_INET6 => {
                let ip = Ipv6Addr::from(self.0.sin6_addr.s6_addr);
                Some(SocketAddrV6::new(ip, port, 0, 0).into())
            }
            _ => None,
        }
    }

    /// Whether two are one place, of one family.
    #[inline]
    pub(super) fn is(&self, other: &Self) -> bool {
        let key = |name: &Self| (name.0.sin6_port, name.0.sin6_flowinfo, name.0.sin6_addr.s6_addr);
        key(self) == key(other)
    }

    /// Bytes that it takes.
    #[inline]
    pub(super) fn len(&self) -> libc::socklen_t {
        match libc::c_int::from(self.0.sin6_family) {
            libc::AF_INET => size_of::<libc::sockaddr_in>() as _,
            _ => Self::LEN_MAX,
        }
    }

    /// Gives the socket `fd` this address.
    pub(super) fn bind(&self, fd: RawFd) -> io::Result<()> {
        // SAFETY: `bind` reads `len` bytes of a name that lives across the call.
        let done = unsafe { libc::bind(fd, std::ptr::from_ref(self).cast(), self.len()) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// The family of sockets for `ip`.
pub(super) fn family(ip: IpAddr) -> libc::c_int {
    if ip.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::ETH_HDR_LEN;
    use proptest::prelude::*;

    #[test]
    fn an_address_is_a_place() {
        assert_eq!(ETH_HDR_LEN, 14);
        for port in [0xc000, 0xc001, 0xcb20, 0xff00, 0xffff] {
            for ip in [[10, 0, 0, 1], [255, 255, 255, 255], [0, 0, 0, 0], [127, 0, 0, 1]] {
                let addr = SocketAddrV4::new(ip.into(), port);
                let mac = mac_of(addr).unwrap();
                assert!(!mac.is_group() && mac.0[0] & 2 == 2);
                assert_eq!(addr_of(mac), Some(addr));
            }
        }
        assert_eq!(mac_of(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0xbfff)), None);
        assert_eq!(addr_of(MacAddr::BROADCAST), None);
        assert_eq!(addr_of(MacAddr([0, 1, 2, 3, 4, 5])), None);
        let ip: IpAddr = "2001:db8::a01:107".parse().unwrap();
        let prefix = Prefix::of(ip);
        let mac = prefix.mac_of(SocketAddr::new(ip, 52_000)).unwrap();
        assert_eq!(mac, mac_of("10.1.1.7:52000".parse().unwrap()).unwrap());
        assert_eq!(prefix.addr_of(mac).unwrap().to_string(), "[2001:db8::a01:107]:52000");
        assert_eq!(host_text(ip), "[2001:db8::a01:107]/96");
        let far = "[2001:db8::1:a01:107]:52000".parse().unwrap();
        assert_eq!((prefix.mac_of(far), Prefix::V4.mac_of(far)), (None, None));
    }

    proptest! {
        /// Goal: behind any prefix places and addresses are one to one, and what the kernel is told
        /// says the same.
        #[test]
        fn places_and_addresses_are_one_to_one(
            prefix in any::<Option<[u8; 12]>>(),
            other: [u8; 12],
            host: u32,
            port: u16,
        ) {
            let behind = prefix.map_or(Prefix::V4, Prefix::V6);
            let place = behind.place(SocketAddrV4::new(host.into(), port));
            let mac = behind.mac_of(place);
            prop_assert_eq!(mac.is_some(), PORTS.contains(&port));
            if let Some(mac) = mac {
                prop_assert_eq!(behind.addr_of(mac), Some(place));
            }
            prop_assert_eq!(behind.host(place.ip()), Some(Ipv4Addr::from(host)));
            let name = Name::of(place);
            prop_assert_eq!(name.addr(), Some(place));
            prop_assert!(name.is(&Name::of(place)));
            let far = Prefix::V6(other).place(SocketAddrV4::new(host.into(), port));
            if far != place {
                prop_assert_eq!(behind.mac_of(far), None);
                prop_assert!(!name.is(&Name::of(far)));
            }
        }
    }
}
