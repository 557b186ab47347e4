//! Address formats: the native 16 bytes, or a `struct sockaddr_in` or `sockaddr_in6` for programs
//! that name peers by host and port (`barewire::names`).
//!
//! On ports where a service needs a query, a `sockaddr_in` of this provider has the MAC in the
//! bytes that the standard sets to zero, so a program that passes on the whole structure causes no
//! query. A `sockaddr_in6` has no such bytes: an endpoint that cannot be reached by its IPv6
//! address is written as an address that encodes its station.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Deref;

use barewire::names::{Names, interface_at, label};
use barewire::{EpAddr, Error, GroupAddr, Info, Result};

use crate::abi::{FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN6};
use crate::known_as;

/// `addr_format` of the native 16 bytes: the highest bit marks a provider-specific format.
pub(crate) const FORMAT_NATIVE: u32 = 1 << 31 | 0x6277;

/// Length of the native form and of a `sockaddr_in`.
pub(crate) const LEN: usize = EpAddr::LEN;

/// Length of a `sockaddr_in6`, the longest form.
pub(crate) const MAX: usize = 28;

/// The address format of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Native,
    /// `sockaddr_in`, with how the port resolves host and service.
    SockaddrIn(Names),
    /// The same.
    SockaddrIn6(Names),
}

/// An address in some form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddrBytes {
    bytes: [u8; MAX],
    len: usize,
}

impl AddrBytes {
    /// `bytes` of at most [`MAX`].
    pub(crate) fn new(bytes: &[u8]) -> Self {
        let mut all = [0; MAX];
        all[..bytes.len()].copy_from_slice(bytes);
        Self { bytes: all, len: bytes.len() }
    }
}

impl Deref for AddrBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// A parsed address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ParsedAddr {
    /// An endpoint.
    Addr(EpAddr),
    /// A service at a host, which needs a query.
    Host(IpAddr, u16),
}

impl Form {
    /// The form of a non-zero `addr_format`, if it is supported.
    pub(crate) fn of(format: u32, names: Names) -> Option<Self> {
        match format {
            FORMAT_NATIVE => Some(Self::Native),
            FI_SOCKADDR if names.is_v6() => Some(Self::SockaddrIn6(names)),
            // A `sockaddr_in` has no room for an IPv6 address.
            FI_SOCKADDR_IN if names.is_v6() => None,
            FI_SOCKADDR | FI_SOCKADDR_IN => Some(Self::SockaddrIn(names)),
            FI_SOCKADDR_IN6 => Some(Self::SockaddrIn6(names)),
            _ => None,
        }
    }

    /// The default form of a program, which may have named a host by its IP address.
    pub(crate) fn usual(names: Names, node: Option<&str>) -> Self {
        if !known_as::uses_ip_addresses() {
            Self::Native
        } else if names.is_v6() || node.is_some_and(is_v6) {
            Self::SockaddrIn6(names)
        } else {
            Self::SockaddrIn(names)
        }
    }

    /// Guesses the form of an address: a native address has its incarnation where a `struct
    /// sockaddr_in` has eight zero bytes. `None`: no known form.
    pub(crate) fn guess(bytes: &[u8], names: Names) -> Option<Self> {
        let family = bytes.first_chunk();
        match bytes.len() {
            LEN if family == Some(&AF_INET) && bytes[8..] == [0; 8] => {
                Some(Self::SockaddrIn(names))
            }
            LEN => Some(Self::Native),
            MAX if family == Some(&AF_INET6) => Some(Self::SockaddrIn6(names)),
            _ => None,
        }
    }

    /// Length of an address, bytes.
    pub(crate) fn len(self) -> usize {
        match self {
            Self::Native | Self::SockaddrIn(_) => LEN,
            Self::SockaddrIn6(_) => MAX,
        }
    }

    /// Parses an address of this form.
    ///
    /// # Errors
    /// [`Error::Invalid`]: it is none.
    pub(crate) fn read(self, bytes: &[u8]) -> Result<ParsedAddr> {
        if bytes.len() != self.len() {
            return Err(Error::Invalid("address: wrong length"));
        }
        match self {
            Self::Native => {
                let bytes = bytes.first_chunk().ok_or(Error::Invalid("address: wrong length"))?;
                EpAddr::from_bytes(bytes).map(ParsedAddr::Addr)
            }
            Self::SockaddrIn(names) => from_sockaddr(bytes, names),
            Self::SockaddrIn6(names) => {
                let (ip, port) = parts(bytes)?;
                exact(names, ip, port)
            }
        }
    }

    /// The multicast group that an address of this form names: in a `sockaddr` an IP multicast
    /// address and a port.
    ///
    /// # Errors
    /// [`Error::Invalid`]: it names none.
    pub(crate) fn read_group(self, bytes: &[u8]) -> Result<GroupAddr> {
        let wrong = Error::Invalid("address: not of a multicast group");
        match self {
            Self::Native => GroupAddr::from_bytes(bytes.first_chunk().ok_or(wrong)?),
            Self::SockaddrIn(_) | Self::SockaddrIn6(_) => {
                let (ip, port) = parts(bytes)?;
                let group = match ip {
                    IpAddr::V4(ip) => GroupAddr::of_v4(ip.octets(), port),
                    IpAddr::V6(ip) => GroupAddr::of_v6(ip.octets(), port),
                };
                group.ok_or(wrong)
            }
        }
    }

    /// As [`read`](Self::read), for an endpoint's own address; returns the native address. `None`:
    /// any number.
    ///
    /// # Errors
    /// [`Error::NoData`]: it is not an address of the port.
    pub(crate) fn read_own(self, bytes: &[u8]) -> Result<Option<[u8; LEN]>> {
        let none = |_| Error::NoData;
        let names = match self {
            Self::Native => {
                let ParsedAddr::Addr(addr) = self.read(bytes).map_err(none)? else {
                    return Err(Error::NoData);
                };
                return Ok((addr != label(0)).then(|| addr.to_bytes()));
            }
            Self::SockaddrIn(names) | Self::SockaddrIn6(names) => names,
        };
        if bytes.len() != self.len() {
            return Err(Error::NoData);
        }
        let (ip, port) = parts(bytes).map_err(none)?;
        let own = if names.is_own(ip) {
            names.here(port)
        } else {
            // The complete address of an open endpoint.
            match self.read(bytes) {
                Ok(ParsedAddr::Addr(addr)) if !matches!(names, Names::Udp { .. }) => addr,
                _ => {
                    tracing::warn!("{ip}: not the address of the port");
                    return Err(Error::NoData);
                }
            }
        };
        Ok((own != names.here(0)).then(|| own.to_bytes()))
    }

    /// Writes an address in this form.
    pub(crate) fn write(self, addr: EpAddr) -> AddrBytes {
        match self {
            Self::Native => AddrBytes::new(&addr.to_bytes()),
            Self::SockaddrIn(names) => AddrBytes::new(&to_sockaddr(addr, names)),
            Self::SockaddrIn6(names) => AddrBytes::new(&to_sockaddr6(addr, names)),
        }
    }

    /// Opens an object with the source address of `info`, or with any. In a program that names
    /// peers by host and port the object gets an address that host and port name, if one is free.
    pub(crate) fn open<T>(
        self,
        info: &mut Info,
        names: Names,
        mut open: impl FnMut(&Info) -> Result<T>,
    ) -> Result<T> {
        if info.src_addr.is_none() && self != Self::Native {
            for service in names.services() {
                let at = names.here(service);
                info.src_addr = Some(at.to_bytes().to_vec());
                match open(info) {
                    Err(Error::AddrInUse) => {}
                    opened => return opened,
                }
            }
            info.src_addr = None;
        }
        open(info)
    }

    /// The wildcard address: any number of this port.
    pub(crate) fn any(self) -> AddrBytes {
        match self {
            Self::Native => self.write(label(0)),
            Self::SockaddrIn(names) | Self::SockaddrIn6(names) => self.write(names.here(0)),
        }
    }
}

/// Whether a node is an IPv6 address, alone or in libfabric's text form.
fn is_v6(node: &str) -> bool {
    node.starts_with("fi_sockaddr_in6:") || node.parse::<Ipv6Addr>().is_ok()
}

const AF_INET: [u8; 2] = (libc::AF_INET as u16).to_ne_bytes();

const AF_INET6: [u8; 2] = (libc::AF_INET6 as u16).to_ne_bytes();

/// The interface of a local address.
pub(crate) fn interface_of(bytes: &[u8]) -> Option<String> {
    parts(bytes).ok().and_then(|(ip, _)| interface_at(ip))
}

/// The text of a `sockaddr_in` or `sockaddr_in6` in libfabric's format, which programs parse.
///
/// # Errors
/// [`Error::Invalid`]: it is none.
pub(crate) fn ip_text(bytes: &[u8]) -> Result<String> {
    let (ip, port) = parts(bytes)?;
    let family = if ip.is_ipv4() { "in" } else { "in6" };
    Ok(format!("fi_sockaddr_{family}://{}", SocketAddr::new(ip, port)))
}

/// IP address and port of a `sockaddr_in` or `sockaddr_in6`.
fn parts(bytes: &[u8]) -> Result<(IpAddr, u16)> {
    let wrong = Error::Invalid("address: not of the family that its form says");
    let port = |bytes: &[u8]| u16::from_be_bytes([bytes[2], bytes[3]]);
    match (bytes.len(), bytes.first_chunk()) {
        (LEN, Some(&AF_INET)) => {
            let ip: [u8; 4] = *bytes[4..].first_chunk().ok_or(wrong)?;
            Ok((ip.into(), port(bytes)))
        }
        (MAX, Some(&AF_INET6)) => {
            let ip: [u8; 16] = *bytes[8..].first_chunk().ok_or(wrong)?;
            Ok((ip.into(), port(bytes)))
        }
        _ => Err(wrong),
    }
}

fn exact(names: Names, ip: IpAddr, port: u16) -> Result<ParsedAddr> {
    match names.exact(ip, port) {
        Some(addr) => Ok(ParsedAddr::Addr(addr)),
        None if matches!(names, Names::Queried { .. }) => Ok(ParsedAddr::Host(ip, port)),
        None => {
            tracing::warn!("{ip}: {}", names.reach_text());
            Err(Error::Invalid("address: the port does not reach it"))
        }
    }
}

/// Parses a `sockaddr_in`. If host and port do not name the endpoint it has the station, MAC first,
/// in the bytes that the standard sets to zero.
fn from_sockaddr(bytes: &[u8], names: Names) -> Result<ParsedAddr> {
    let (ip, port) = parts(bytes)?;
    if bytes[8..] == [0; 8] {
        return exact(names, ip, port);
    }
    let mut native = [0; LEN];
    native[..6].copy_from_slice(&bytes[8..14]);
    native[6..8].copy_from_slice(&port.to_le_bytes());
    native[14..].copy_from_slice(&bytes[14..]);
    let addr = EpAddr::from_bytes(&native)?;
    names.remember_ip(addr, ip);
    Ok(ParsedAddr::Addr(addr))
}

fn to_sockaddr6(addr: EpAddr, names: Names) -> [u8; MAX] {
    let (ip, port) = names.name6(addr);
    let mut bytes = [0; MAX];
    bytes[..2].copy_from_slice(&AF_INET6);
    bytes[2..4].copy_from_slice(&port.to_be_bytes());
    bytes[8..24].copy_from_slice(&ip.octets());
    bytes
}

fn to_sockaddr(addr: EpAddr, names: Names) -> [u8; LEN] {
    let (at, is_name) = match names.name(addr) {
        (SocketAddr::V4(at), is_name) => (at, is_name),
        // A `sockaddr_in` has no room for an IPv6 address.
        (SocketAddr::V6(at), _) => {
            (std::net::SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, at.port()), false)
        }
    };
    let mut bytes = [0; LEN];
    bytes[..2].copy_from_slice(&AF_INET);
    bytes[2..4].copy_from_slice(&at.port().to_be_bytes());
    bytes[4..8].copy_from_slice(&at.ip().octets());
    if !is_name {
        let native = addr.to_bytes();
        bytes[8..14].copy_from_slice(&native[..6]);
        bytes[14..].copy_from_slice(&native[14..]);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const LABELS: Form = Form::SockaddrIn(Names::Labels);
    const HERE: Ipv4Addr = Ipv4Addr::new(10, 1, 1, 1);

    fn addr(form: Form, bytes: &[u8]) -> EpAddr {
        match form.read(bytes) {
            Ok(ParsedAddr::Addr(addr)) => addr,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_sockaddr_of_a_program_is_a_label_and_one_of_ours_is_exact() {
        let theirs = [2, 0, 0x24, 0x0c, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(Form::guess(&theirs, Names::Labels), Some(LABELS));
        assert_eq!(addr(LABELS, &theirs), label(9228));
        assert_eq!(LABELS.write(label(9228))[..], theirs);
        let mut other = label(9);
        for number in [0, 0x1234] {
            (other.ep, other.station.number) = (10, number);
            assert_eq!(addr(LABELS, &LABELS.write(other)), other);
        }
        assert_eq!(LABELS.read_own(&LABELS.any()), Ok(None));
        assert_eq!(LABELS.any()[2..4], [0; 2]);
    }

    #[test]
    fn a_native_address_is_not_taken_for_a_sockaddr() {
        let text = "barewire://02:00:24:0c:7f:00/9#c0ffee00c0ff";
        let native: EpAddr = text.parse().unwrap();
        assert_eq!(Form::guess(&native.to_bytes(), Names::Labels), Some(Form::Native));
        assert_eq!(addr(Form::Native, &native.to_bytes()), native);
        assert_eq!(Form::Native.read_own(&Form::Native.any()), Ok(None));
        for bytes in [&[0_u8; 15][..], &[0; 28], &[2; 17], &[]] {
            assert_eq!(Form::guess(bytes, Names::Labels), None);
            for form in [Form::Native, LABELS, Form::SockaddrIn6(Names::Labels)] {
                assert!(form.read(bytes).is_err() && form.read_own(bytes).is_err());
            }
        }
    }

    /// Goal: over udp a `sockaddr_in` is the place of the port and goes both ways unchanged, and
    /// so does a `sockaddr_in6` with the same IPv4 address in it.
    #[test]
    fn a_sockaddr_on_udp_is_the_place_itself() {
        let names = Names::Udp { ip: HERE.into(), port: None, by_kernel: true };
        let form = Form::SockaddrIn(names);
        let theirs = [2, 0, 0x1d, 0x2f, 10, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0];
        let native = addr(form, &theirs);
        assert_eq!((native.ep, &form.write(native)[..]), (7471, &theirs[..]));
        let v6 = Form::SockaddrIn6(names);
        assert_eq!(addr(v6, &v6.write(native)), native);
        assert_eq!(v6.write(native)[8..24], Ipv4Addr::new(10, 1, 1, 2).to_ipv6_mapped().octets());
        // Another endpoint of that port has no name of two numbers.
        let other = EpAddr { ep: 3, ..native };
        assert_eq!(form.write(other)[..8], [2, 0, 0, 3, 10, 1, 1, 2]);
        assert_eq!(addr(form, &form.write(other)), other);
        // Ours is of our host, and port 0 any.
        assert_eq!(form.any()[..], [2, 0, 0, 0, 10, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(form.read_own(&form.any()), Ok(None));
        assert_eq!(form.read_own(&theirs), Err(Error::NoData));
        let ours = [2, 0, 0x1d, 0x2f, 10, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0];
        assert!(form.read_own(&ours).unwrap().is_some());
    }

    /// Goal: behind a prefix of IPv6 a `sockaddr_in6` is the place, and a `sockaddr_in`, which has
    /// no room for it, still says the endpoint.
    #[test]
    fn a_sockaddr_in6_behind_a_prefix_is_the_place_itself() {
        let ip: IpAddr = "2001:db8::a01:107".parse().unwrap();
        let names = Names::Udp { ip, port: None, by_kernel: true };
        let (v4, v6) = (Form::SockaddrIn(names), Form::SockaddrIn6(names));
        assert_eq!(Form::of(FI_SOCKADDR, names), Some(v6));
        let mut theirs = [0; MAX];
        theirs[..2].copy_from_slice(&AF_INET6);
        theirs[2..4].copy_from_slice(&7471_u16.to_be_bytes());
        theirs[8..24].copy_from_slice(&"2001:db8::a01:108".parse::<Ipv6Addr>().unwrap().octets());
        let native = addr(v6, &theirs);
        assert_eq!((native.ep, &v6.write(native)[..]), (7471, &theirs[..]));
        assert_eq!(addr(v4, &v4.write(native)), native);
        let other = EpAddr { ep: 3, ..native };
        assert_eq!((addr(v6, &v6.write(other)), addr(v4, &v4.write(other))), (other, other));
        assert_eq!(v6.read_own(&theirs), Err(Error::NoData));
        theirs[23] = 7;
        assert_eq!(v6.read_own(&theirs), Ok(Some(names.here(7471).to_bytes())));
        assert_eq!(v6.read_own(&v6.any()), Ok(None));
        theirs[15] = 1;
        assert!(v6.read(&theirs).is_err() && v6.read_own(&theirs).is_err());
        let bare = [2, 0, 0x1d, 0x2f, 10, 1, 1, 8, 0, 0, 0, 0, 0, 0, 0, 0];
        assert!(v4.read(&bare).is_err());
    }

    /// Goal: where services are asked for, a bare address is a question, what was found goes both
    /// ways and says its host, and IPv6 has an address for whoever has none.
    #[test]
    fn a_bare_sockaddr_is_asked_for_and_one_of_ours_is_not() {
        let names = Names::Queried { ip: HERE };
        let (v4, v6) = (Form::SockaddrIn(names), Form::SockaddrIn6(names));
        let theirs = [2, 0, 0x1d, 0x2f, 10, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0];
        let host: IpAddr = [10, 1, 1, 2].into();
        assert_eq!(v4.read(&theirs), Ok(ParsedAddr::Host(host, 7471)));
        let found: EpAddr = "barewire://02:00:00:00:77:05/7471".parse().unwrap();
        names.remember_ip(found, host);
        let written = v4.write(found);
        assert_eq!((&written[..8], &written[8..14]), (&theirs[..8], &found.to_bytes()[..6]));
        assert_eq!(addr(v4, &written), found);
        assert_eq!(addr(v6, &v6.write(found)), found);
        let far: IpAddr = "2001:db8::7".parse().unwrap();
        names.remember_ip(found, far);
        assert_eq!(v6.read(&v6.write(found)), Ok(ParsedAddr::Host(far, 7471)));
        // Ours, before the port is open.
        assert_eq!(v4.write(label(7471))[..8], [2, 0, 0x1d, 0x2f, 10, 1, 1, 1]);
        assert_eq!(v4.read_own(&v4.write(label(7471))), Ok(Some(label(7471).to_bytes())));
        for form in [v4, v6] {
            assert_eq!(form.read_own(&form.any()), Ok(None));
        }
    }
}
