//! A socket that sends whatever bytes it is given as a frame.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

pub(crate) struct RawSocket(OwnedFd);

impl RawSocket {
    pub(crate) fn open(interface: &str) -> io::Result<Self> {
        let name = std::ffi::CString::new(interface)?;
        // SAFETY: `socket` takes numbers; `if_nametoindex` reads a string that lives.
        let (fd, index) = unsafe {
            (libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 0), libc::if_nametoindex(name.as_ptr()))
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made the descriptor for us; zeros are a `sockaddr_ll`.
        let (fd, mut addr) =
            unsafe { (OwnedFd::from_raw_fd(fd), std::mem::zeroed::<libc::sockaddr_ll>()) };
        addr.sll_family = libc::AF_PACKET as u16;
        addr.sll_ifindex = index as i32;
        let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: `bind` reads `len` bytes of an address that lives across the call.
        let done = unsafe { libc::bind(fd.as_raw_fd(), (&raw const addr).cast(), len) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(Self(fd)) }
    }

    pub(crate) fn send(&self, frame: &[u8]) -> io::Result<()> {
        // SAFETY: `send` reads the bytes of a slice that lives across the call.
        let sent = unsafe { libc::send(self.0.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}
