//! Station addresses of ports inside UDP: the encoding of an IP address and UDP port in a MAC.
//!
//! The 46 bits that a local unicast MAC leaves free hold 32 bits of a host and 14 bits of a UDP
//! port ([`mac_of`], [`addr_of`]). The host bits are its IPv4 address, or the last 32 bits of an
//! IPv6 address whose first 96 bits all hosts of the fabric share: the port's own, which are in no
//! frame ([`Prefix`]).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::RawFd;

use super::netdev::ip_addresses;
use crate::port::MacAddr;

/// UDP ports that a station address can encode.
pub const PORTS: std::ops::RangeInclusive<u16> = 0xc000..=0xffff;
/// The ports tried in turn when none is named: a firewall needs one rule for them.
pub const DEFAULT_PORTS: std::ops::RangeInclusive<u16> = 52_000..=52_063;

/// Length of the prefix that hosts with IPv6 addresses share, bits.
pub const PREFIX_LEN: u8 = 96;

/// ECN codepoints in the byte with DSCP and ECN (the traffic class of IPv6): ECN-capable, ECT(0),
/// and congestion experienced, CE (RFC 3168).
pub(super) const ECT_0: u8 = 2;
pub(super) const CE: u8 = 3;

/// The byte with DSCP (0 to 63) and ECN of datagrams that are ECN-capable (`ecn`) or not.
pub(super) fn tos_of(dscp: u8, ecn: bool) -> u8 {
    dscp << 2 | if ecn { ECT_0 } else { 0 }
}

/// The station's MAC of the port at `addr`; `None` if its UDP port is not one of [`PORTS`].
pub fn mac_of(addr: SocketAddrV4) -> Option<MacAddr> {
    word_of(addr).map(|word| {
        let [mac @ .., _, _] = word.to_le_bytes();
        MacAddr(mac)
    })
}

/// The same as [`MacAddr::frame_word`] has it.
#[inline]
pub(super) fn word_of(addr: SocketAddrV4) -> Option<u64> {
    let (ip, port) = (u32::from_le_bytes(addr.ip().octets()), u64::from(addr.port()));
    let [first, last] = [port >> 6 & 0xfc | 2, port & 0xff];
    PORTS.contains(&addr.port()).then_some(first | u64::from(ip) << 8 | last << 40)
}

/// The IPv4 address (or last 32 bits) and UDP port that `mac` encodes; `None` if it encodes none.
pub fn addr_of(mac: MacAddr) -> Option<SocketAddrV4> {
    let [high, a, b, c, d, low] = mac.0;
    let port = u16::from_be_bytes([high >> 2 | 0xc0, low]);
    (high & 3 == 2).then(|| SocketAddrV4::new(Ipv4Addr::new(a, b, c, d), port))
}

/// The prefix of all hosts that a port reaches, before their 32 host bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Prefix {
    /// None: the host bits are an IPv4 address.
    V4,
    /// The first 96 bits of IPv6 addresses.
    V6([u8; 12]),
}

impl Prefix {
    /// The prefix of an address.
    pub fn of(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(ip) => Self::V6(parts(ip).0),
        }
    }

    /// Whether `ip` has this prefix.
    pub fn contains(self, ip: IpAddr) -> bool {
        Self::of(ip) == self
    }

    /// The IP address of a host with these 32 bits.
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

    /// The 32 bits of a host; `None` if it has another prefix.
    pub fn host(self, ip: IpAddr) -> Option<Ipv4Addr> {
        self.contains(ip).then(|| host_bits(ip))
    }

    /// The socket address of `addr` with this prefix.
    #[inline]
    pub fn socket_addr(self, addr: SocketAddrV4) -> SocketAddr {
        match self.ip(*addr.ip()) {
            IpAddr::V4(ip) => SocketAddrV4::new(ip, addr.port()).into(),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, addr.port(), 0, 0).into(),
        }
    }

    /// The station's MAC of the port at `place`; `None` if that has another prefix, or its UDP port
    /// is not one of [`PORTS`].
    #[inline]
    pub fn mac_of(self, place: SocketAddr) -> Option<MacAddr> {
        mac_of(SocketAddrV4::new(self.host(place.ip())?, place.port()))
    }

    /// The socket address that `mac` encodes; `None` if it encodes none.
    #[inline]
    pub fn addr_of(self, mac: MacAddr) -> Option<SocketAddr> {
        addr_of(mac).map(|addr| self.socket_addr(addr))
    }
}

fn parts(ip: Ipv6Addr) -> ([u8; 12], [u8; 4]) {
    let [p @ .., a, b, c, d] = ip.octets();
    (p, [a, b, c, d])
}

/// The last 32 bits of an address, the whole of an IPv4 address.
pub fn host_bits(ip: IpAddr) -> Ipv4Addr {
    match ip {
        IpAddr::V4(ip) => ip,
        IpAddr::V6(ip) => parts(ip).1.into(),
    }
}

/// `ip` as written in a port's name: IPv6 in brackets, with the length of the prefix.
pub fn host_text(ip: IpAddr) -> String {
    match ip {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]/{PREFIX_LEN}"),
    }
}

/// Interfaces and those of their IP addresses that can be a port's, as `(name, address)`: not
/// link-local ones.
pub fn addresses() -> Vec<(String, IpAddr)> {
    let mut all = ip_addresses();
    all.retain(|(_, ip)| match ip {
        IpAddr::V4(_) => true,
        IpAddr::V6(ip) => !ip.is_unicast_link_local(),
    });
    all
}

/// A socket address in the kernel's format. The address of a `sockaddr_in` is at the offset of the
/// flow label of a `sockaddr_in6`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct SockAddr(libc::sockaddr_in6);

const _: () = {
    use libc::{sockaddr_in as V4, sockaddr_in6 as V6};
    use std::mem::offset_of;
    assert!(offset_of!(V4, sin_port) == offset_of!(V6, sin6_port));
    assert!(offset_of!(V4, sin_addr) == offset_of!(V6, sin6_flowinfo));
    assert!(size_of::<V4>() <= size_of::<V6>());
};

impl SockAddr {
    /// Length at most, bytes.
    pub(super) const LEN_MAX: libc::socklen_t = size_of::<libc::sockaddr_in6>() as _;

    /// An address of no family.
    pub(super) fn unspecified() -> Self {
        // SAFETY: zeros are a `sockaddr_in6`.
        Self(unsafe { std::mem::zeroed() })
    }

    #[inline]
    pub(super) fn of(addr: SocketAddr) -> Self {
        let mut name = Self::unspecified();
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

    /// The socket address, if its family is IPv4 or IPv6.
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

    /// Whether both have the same IP address and UDP port. They are of one family.
    #[inline]
    pub(super) fn equals(&self, other: &Self) -> bool {
        let key = |name: &Self| (name.0.sin6_port, name.0.sin6_flowinfo, name.0.sin6_addr.s6_addr);
        key(self) == key(other)
    }

    /// Length, bytes.
    #[inline]
    pub(super) fn len(&self) -> libc::socklen_t {
        match libc::c_int::from(self.0.sin6_family) {
            libc::AF_INET => size_of::<libc::sockaddr_in>() as _,
            _ => Self::LEN_MAX,
        }
    }

    /// Binds the socket `fd` to this address.
    pub(super) fn bind(&self, fd: RawFd) -> io::Result<()> {
        // SAFETY: `bind` reads `len` bytes of a name that lives across the call.
        let done = unsafe { libc::bind(fd, std::ptr::from_ref(self).cast(), self.len()) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// The address family of `ip`.
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
            let place = behind.socket_addr(SocketAddrV4::new(host.into(), port));
            let mac = behind.mac_of(place);
            prop_assert_eq!(mac.is_some(), PORTS.contains(&port));
            if let Some(mac) = mac {
                prop_assert_eq!(behind.addr_of(mac), Some(place));
            }
            prop_assert_eq!(behind.host(place.ip()), Some(Ipv4Addr::from(host)));
            let name = SockAddr::of(place);
            prop_assert_eq!(name.addr(), Some(place));
            prop_assert!(name.equals(&SockAddr::of(place)));
            let far = Prefix::V6(other).socket_addr(SocketAddrV4::new(host.into(), port));
            if far != place {
                prop_assert_eq!(behind.mac_of(far), None);
                prop_assert!(!name.equals(&SockAddr::of(far)));
            }
        }
    }
}
