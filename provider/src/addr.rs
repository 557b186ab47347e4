//! Forms of an address: 16 bytes of ours, or a `struct sockaddr_in` for programs that name peers
//! by host and port, as `barewire::names` does.

use std::net::{Ipv4Addr, SocketAddrV4};

use barewire::names::{Names, label};
use barewire::{EpAddr, Error, Info, Result};

/// Our 16 bytes as an `addr_format`: the uppermost bit says that it is one provider's own.
pub(crate) const FORMAT_NATIVE: u32 = 1 << 31 | 0x6277;

/// Length of both forms.
pub(crate) const LEN: usize = EpAddr::LEN;

/// Which form a program speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Native,
    /// With what host and port mean where it is used.
    SockaddrIn(Names),
}

impl Form {
    /// The form of a non-zero `addr_format`, if it is one of ours.
    pub(crate) fn of(format: u32, names: Names) -> Option<Self> {
        match format {
            FORMAT_NATIVE => Some(Self::Native),
            crate::abi::FI_SOCKADDR | crate::abi::FI_SOCKADDR_IN => Some(Self::SockaddrIn(names)),
            _ => None,
        }
    }

    /// The form of an address whose form nobody said: a native address of an endpoint has its
    /// incarnation where a `struct sockaddr_in` has eight zero bytes.
    pub(crate) fn guess(bytes: &[u8; LEN], names: Names) -> Self {
        let is_sockaddr = bytes[..2] == AF_INET && bytes[8..] == [0; 8];
        if is_sockaddr { Self::SockaddrIn(names) } else { Self::Native }
    }

    /// The address in 16 bytes of this form as the native ones.
    ///
    /// # Errors
    /// [`Error::Invalid`]: it is none.
    pub(crate) fn read(self, bytes: &[u8; LEN]) -> Result<[u8; LEN]> {
        match self {
            Self::Native => Ok(*bytes),
            Self::SockaddrIn(names) => from_sockaddr(bytes, names).map(EpAddr::to_bytes),
        }
    }

    /// As [`read`](Self::read), of an endpoint's own address. `None`: any number is meant.
    ///
    /// # Errors
    /// [`Error::NoData`]: it is none of the port's.
    pub(crate) fn read_own(self, bytes: &[u8; LEN]) -> Result<Option<[u8; LEN]>> {
        let native = self.read(bytes).map_err(|_| Error::NoData)?;
        let any = match self {
            Self::Native => native == label(0).to_bytes(),
            Self::SockaddrIn(names) => {
                let at = SocketAddrV4::new(host_of(bytes), 0);
                let ours = names.at(Ipv4Addr::UNSPECIFIED, 0);
                if names.at(*at.ip(), 0) != ours {
                    tracing::warn!("{}: not the address of the port", at.ip());
                    return Err(Error::NoData);
                }
                native == ours.to_bytes()
            }
        };
        Ok((!any).then_some(native))
    }

    /// An address in this form.
    pub(crate) fn write(self, addr: EpAddr) -> [u8; LEN] {
        match self {
            Self::Native => addr.to_bytes(),
            Self::SockaddrIn(names) => to_sockaddr(addr, names),
        }
    }

    /// Opens something whose own address `info` says, or may be any. Who is found by host and port
    /// gets one that says where, if there is one left.
    pub(crate) fn open<T>(
        self,
        info: &mut Info,
        names: Names,
        mut open: impl FnMut(&Info) -> Result<T>,
    ) -> Result<T> {
        if info.src_addr.is_none() && self != Self::Native {
            for service in names.services() {
                let at = names.at(Ipv4Addr::UNSPECIFIED, service);
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

    /// What stands where an address is expected and none is settled: any number here.
    pub(crate) fn any(self) -> [u8; LEN] {
        match self {
            Self::Native => label(0).to_bytes(),
            Self::SockaddrIn(names) => self.write(names.at(Ipv4Addr::UNSPECIFIED, 0)),
        }
    }
}

const AF_INET: [u8; 2] = (libc::AF_INET as u16).to_ne_bytes();

fn host_of(bytes: &[u8; LEN]) -> Ipv4Addr {
    Ipv4Addr::new(bytes[4], bytes[5], bytes[6], bytes[7])
}

/// A `sockaddr_in` that host and port do not name an endpoint by has the MAC where the standard has
/// zeros.
fn from_sockaddr(bytes: &[u8; LEN], names: Names) -> Result<EpAddr> {
    let port = u16::from_be_bytes([bytes[2], bytes[3]]);
    if bytes[..2] != AF_INET {
        return Err(Error::Invalid("address: not AF_INET"));
    }
    if bytes[8..] == [0; 8] {
        return Ok(names.at(host_of(bytes), port));
    }
    let mut native = [0; LEN];
    native[..6].copy_from_slice(&bytes[8..14]);
    native[6..8].copy_from_slice(&port.to_le_bytes());
    EpAddr::from_bytes(&native)
}

fn to_sockaddr(addr: EpAddr, names: Names) -> [u8; LEN] {
    let (at, is_name) = names.name(addr);
    let mut bytes = [0; LEN];
    bytes[..2].copy_from_slice(&AF_INET);
    bytes[2..4].copy_from_slice(&at.port().to_be_bytes());
    bytes[4..8].copy_from_slice(&at.ip().octets());
    if !is_name {
        bytes[8..14].copy_from_slice(&addr.to_bytes()[..6]);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const LABELS: Form = Form::SockaddrIn(Names::Labels);

    #[test]
    fn a_sockaddr_of_a_program_is_a_label_and_one_of_ours_is_exact() {
        let theirs = [2, 0, 0x24, 0x0c, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(Form::guess(&theirs, Names::Labels), LABELS);
        let native = LABELS.read(&theirs).unwrap();
        assert_eq!(EpAddr::from_bytes(&native), Ok(label(9228)));
        assert_eq!(LABELS.write(label(9228)), theirs);
        let mut addr = label(9);
        addr.ep = 10;
        let back = LABELS.read(&LABELS.write(addr)).unwrap();
        assert_eq!(EpAddr::from_bytes(&back), Ok(addr));
        assert_eq!(
            (LABELS.read_own(&LABELS.any()), LABELS.any()[2..4].to_vec()),
            (Ok(None), vec![0; 2])
        );
    }

    #[test]
    fn a_native_address_is_not_taken_for_a_sockaddr() {
        let text = "barewire://02:00:24:0c:7f:00/9#00c0ffee00c0ffee";
        let addr: EpAddr = text.parse().unwrap();
        assert_eq!(Form::guess(&addr.to_bytes(), Names::Labels), Form::Native);
        assert_eq!(Form::Native.read(&addr.to_bytes()), Ok(addr.to_bytes()));
        assert_eq!(Form::Native.read_own(&Form::Native.any()), Ok(None));
    }

    /// Goal: over udp a `sockaddr_in` is the place of the port and goes both ways unchanged.
    #[test]
    fn a_sockaddr_on_udp_is_the_place_itself() {
        let form = Form::SockaddrIn(Names::Udp { ip: Ipv4Addr::new(10, 1, 1, 1), port: None });
        let theirs = [2, 0, 0x1d, 0x2f, 10, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0];
        let native = EpAddr::from_bytes(&form.read(&theirs).unwrap()).unwrap();
        assert_eq!((native.ep, form.write(native)), (7471, theirs));
        // Another endpoint of that port has no name of two numbers.
        let other = EpAddr { ep: 3, ..native };
        assert_eq!(form.write(other)[..8], [2, 0, 0, 3, 10, 1, 1, 2]);
        assert_eq!(form.read(&form.write(other)), Ok(other.to_bytes()));
        // Ours is of our host, and port 0 any.
        assert_eq!(form.any(), [2, 0, 0, 0, 10, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(form.read_own(&form.any()), Ok(None));
        assert_eq!(form.read_own(&theirs), Err(Error::NoData));
        let ours = [2, 0, 0x1d, 0x2f, 10, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0];
        assert!(form.read_own(&ours).unwrap().is_some());
    }
}
