//! XDP features of an interface's driver, as the kernel reports them (6.3 and newer).
//!
//! Source: Linux, Documentation/netlink/specs/netdev.yaml, Documentation/userspace-api/netlink.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{MsgFlags, recv, send};

use super::link::{attributes, netlink, request};

/// XDP features of a driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpFeatures {
    /// It runs programs, which can redirect frames to sockets.
    pub native: bool,
    /// The device reads and writes the socket's memory itself.
    pub zero_copy: bool,
}

// Messages of generic netlink's controller, and of the family "netdev".
const ID_CTRL: u16 = 0x10;
const CTRL_GETFAMILY: u8 = 3;
const CTRL_FAMILY_ID: u16 = 1;
const CTRL_FAMILY_NAME: u16 = 2;
const DEV_GET: u8 = 1;
const DEV_IFINDEX: u16 = 1;
const DEV_XDP_FEATURES: u16 = 3;
// Bits of the latter.
const BASIC: u64 = 1;
const REDIRECT: u64 = 2;
const XSK_ZEROCOPY: u64 = 8;

/// Headers of netlink and of its generic messages.
const HEAD_LEN: usize = 16 + 4;

/// Features of the driver of interface `index`; `None` if the kernel does not report them.
pub(in super::super) fn xdp_features(index: u32) -> Option<XdpFeatures> {
    let socket = netlink(libc::NETLINK_GENERIC, 0).ok()?;
    let family = ask(&socket, ID_CTRL, CTRL_GETFAMILY, CTRL_FAMILY_NAME, b"netdev\0").ok()?;
    let family = u16::from_ne_bytes(*attribute(&family, CTRL_FAMILY_ID)?.first_chunk()?);
    let device = ask(&socket, family, DEV_GET, DEV_IFINDEX, &index.to_ne_bytes()).ok()?;
    let bits = u64::from_ne_bytes(*attribute(&device, DEV_XDP_FEATURES)?.first_chunk()?);
    let native = bits & (BASIC | REDIRECT) == BASIC | REDIRECT;
    Some(XdpFeatures { native, zero_copy: native && bits & XSK_ZEROCOPY != 0 })
}

/// Sends a request with one attribute and returns the attributes of the reply.
fn ask(socket: &OwnedFd, family: u16, command: u8, kind: u16, value: &[u8]) -> io::Result<Vec<u8>> {
    // `genlmsghdr`, and an attribute.
    let mut body = vec![command, 1, 0, 0];
    body.extend((4 + value.len() as u16).to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
    body.resize(body.len().next_multiple_of(4), 0);
    send(socket.as_raw_fd(), &request(family, 0, &body), MsgFlags::empty())?;
    let mut answer = vec![0_u8; 8192];
    // The kernel has answered by now.
    let got = recv(socket.as_raw_fd(), &mut answer, MsgFlags::MSG_DONTWAIT)?;
    answer.truncate(got);
    // An error is a message of its own type.
    match answer.get(4..6) {
        Some(of) if of == family.to_ne_bytes() && answer.len() >= HEAD_LEN => {
            Ok(answer.split_off(HEAD_LEN))
        }
        _ => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
    }
}

/// The value of an attribute of that kind.
fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(of, _)| *of == kind).map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_found_and_no_text_breaks_the_reader() {
        let mut bytes = Vec::new();
        for (kind, value) in [(1_u16, &[7_u8][..]), (2, &[1, 2, 3, 4, 5]), (3, &[9; 8])] {
            bytes.extend((4 + value.len() as u16).to_ne_bytes());
            bytes.extend(kind.to_ne_bytes());
            bytes.extend(value);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        assert_eq!(attribute(&bytes, 1), Some(&[7][..]));
        assert_eq!(attribute(&bytes, 3), Some(&[9; 8][..]));
        assert_eq!(attribute(&bytes, 4), None);
        for len in 0..bytes.len() {
            attribute(&bytes[..len], 9);
        }
        for at in 0..bytes.len() {
            for value in [0, 1, 3, 4, 0xff] {
                let mut bad = bytes.clone();
                bad[at] = value;
                attribute(&bad, 9);
            }
        }
    }

    /// `lo` runs no program in its driver.
    #[test]
    fn the_kernel_says_what_lo_can_do() {
        let said = xdp_features(1);
        assert!(matches!(said, None | Some(XdpFeatures { native: false, zero_copy: false })));
        assert_eq!(xdp_features(u32::MAX >> 1), None);
    }
}
