//! Forms of an address: 16 bytes of ours, or a `struct sockaddr_in` for programs that name peers
//! by host and port.
//!
//! A *label* is the address of an endpoint that a program knows by a port number only, as servers
//! do: `fi_getinfo` with `FI_SOURCE` and a service there, host and service here. On a segment of
//! one machine the number alone is enough. The domain that is opened with a label takes the MAC
//! `06:62:77:00:PP:PP`, which says it, so that nobody has to be asked who has it.

use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs, UdpSocket};

use barewire::{EpAddr, Error, Result};

/// Our 16 bytes as an `addr_format`: the uppermost bit says that it is one provider's own.
pub(crate) const FORMAT_NATIVE: u32 = 1 << 31 | 0x6277;

/// Length of both forms.
pub(crate) const LEN: usize = EpAddr::LEN;

/// Which form a program speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Native,
    SockaddrIn,
}

impl Form {
    /// The form of a non-zero `addr_format`, if it is one of ours.
    pub(crate) fn of(format: u32) -> Option<Self> {
        match format {
            FORMAT_NATIVE => Some(Self::Native),
            crate::abi::FI_SOCKADDR | crate::abi::FI_SOCKADDR_IN => Some(Self::SockaddrIn),
            _ => None,
        }
    }

    /// The address in 16 bytes of this form as the native ones.
    ///
    /// # Errors
    /// [`Error::Invalid`]: it is none.
    pub(crate) fn read(self, bytes: &[u8; LEN]) -> Result<[u8; LEN]> {
        match self {
            Self::Native => Ok(*bytes),
            Self::SockaddrIn => from_sockaddr(bytes).map(EpAddr::to_bytes),
        }
    }

    /// An address in this form.
    pub(crate) fn write(self, addr: EpAddr) -> [u8; LEN] {
        match self {
            Self::Native => addr.to_bytes(),
            Self::SockaddrIn => to_sockaddr(addr),
        }
    }
}

const AF_INET: [u8; 2] = (libc::AF_INET as u16).to_ne_bytes();

/// Whether 16 bytes of no stated form are a `struct sockaddr_in` with its eight zero bytes; a
/// native address of an endpoint has its incarnation there.
pub(crate) fn looks_like_sockaddr(bytes: &[u8; LEN]) -> bool {
    bytes[..2] == AF_INET && bytes[8..] == [0; 8]
}

/// The address that a program knows as `port`.
pub(crate) fn label(port: u16) -> EpAddr {
    let [high, low] = port.to_be_bytes();
    let mut bytes = [0; LEN];
    bytes[..6].copy_from_slice(&[0x06, 0x62, 0x77, 0x00, high, low]);
    bytes[6..8].copy_from_slice(&port.to_le_bytes());
    // It cannot fail: the MAC is a station's.
    EpAddr::from_bytes(&bytes).unwrap_or(EpAddr { mac: Default::default(), ep: 0, incarnation: 0 })
}

/// Whether an address is a label, whichever life it names.
pub(crate) fn is_label(addr: EpAddr) -> bool {
    addr.mac == label(addr.ep).mac
}

/// A `sockaddr_in` that we made has the MAC where the standard has zeros; one that a program made
/// is a label.
fn from_sockaddr(bytes: &[u8; LEN]) -> Result<EpAddr> {
    let port = u16::from_be_bytes([bytes[2], bytes[3]]);
    if bytes[..2] != AF_INET {
        return Err(Error::Invalid("address: not AF_INET"));
    }
    if bytes[8..] == [0; 8] {
        return Ok(label(port));
    }
    let mut native = [0; LEN];
    native[..6].copy_from_slice(&bytes[8..14]);
    native[6..8].copy_from_slice(&port.to_le_bytes());
    EpAddr::from_bytes(&native)
}

fn to_sockaddr(addr: EpAddr) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    bytes[..2].copy_from_slice(&AF_INET);
    bytes[2..4].copy_from_slice(&addr.ep.to_be_bytes());
    bytes[4..8].copy_from_slice(&Ipv4Addr::LOCALHOST.octets());
    if !is_label(addr) {
        bytes[8..14].copy_from_slice(&addr.to_bytes()[..6]);
    }
    bytes
}

/// The address that `node` and `service` name: ours in text, or a host of this machine and a port
/// number. `None`: any free number is meant.
///
/// # Errors
/// [`Error::NoData`]: they name none that can be reached.
pub(crate) fn resolve(node: Option<&str>, service: Option<&str>) -> Result<Option<EpAddr>> {
    if let Some(node) = node
        && let Ok(addr) = barewire::resolve(node, service.filter(|s| *s != "0"))
    {
        return Ok(Some(addr));
    }
    if node.is_some_and(|node| !is_here(node)) {
        return Err(Error::NoData);
    }
    match service.map(str::parse) {
        None | Some(Ok(0)) => Ok(None),
        Some(Ok(port)) => Ok(Some(label(port))),
        Some(Err(_)) => Err(Error::NoData),
    }
}

/// Whether a name or number of a host means this machine: only its own addresses can be bound.
fn is_here(node: &str) -> bool {
    let can_bind = |ip: IpAddr| UdpSocket::bind((ip, 0)).is_ok();
    match node.parse::<IpAddr>() {
        Ok(ip) => can_bind(ip),
        Err(_) => (node, 0).to_socket_addrs().is_ok_and(|mut all| all.any(|a| can_bind(a.ip()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sockaddr_of_a_program_is_a_label_and_one_of_ours_is_exact() {
        let theirs = [2, 0, 0x24, 0x0c, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
        assert!(looks_like_sockaddr(&theirs));
        let native = Form::SockaddrIn.read(&theirs).unwrap();
        assert_eq!(EpAddr::from_bytes(&native), Ok(label(9228)));
        assert_eq!(Form::SockaddrIn.write(label(9228)), theirs);
        let mut addr = label(9);
        addr.ep = 10;
        assert!(!is_label(addr));
        let back = Form::SockaddrIn.read(&Form::SockaddrIn.write(addr)).unwrap();
        assert_eq!(EpAddr::from_bytes(&back), Ok(addr));
    }

    #[test]
    fn a_native_address_is_not_taken_for_a_sockaddr() {
        let text = "barewire://02:00:24:0c:7f:00/9#00c0ffee00c0ffee";
        let addr: EpAddr = text.parse().unwrap();
        assert!(!looks_like_sockaddr(&addr.to_bytes()));
        assert_eq!(Form::Native.read(&addr.to_bytes()), Ok(addr.to_bytes()));
    }

    #[test]
    fn nodes_of_this_machine_are_labels_and_others_are_unknown() {
        assert_eq!(resolve(Some("127.0.0.1"), Some("7")), Ok(Some(label(7))));
        assert_eq!(resolve(Some("localhost"), Some("7")), Ok(Some(label(7))));
        assert_eq!(resolve(None, Some("7")), Ok(Some(label(7))));
        assert_eq!(resolve(None, Some("0")), Ok(None));
        assert_eq!(resolve(Some("127.0.0.1"), None), Ok(None));
        let mac = resolve(Some("02:00:00:00:00:05"), Some("3")).unwrap().unwrap();
        assert_eq!((mac.ep, mac.incarnation), (3, 0));
        // TEST-NET-1: nobody's.
        assert_eq!(resolve(Some("192.0.2.1"), Some("7")), Err(Error::NoData));
        assert_eq!(resolve(None, Some("http?")), Err(Error::NoData));
        assert_eq!(resolve(None, Some("65536")), Err(Error::NoData));
    }
}
