//! Minimal raw AF_PACKET sockets: the reference of ports on an interface.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};

use super::{LEN, Wire};

const ETH_HDR_LEN: usize = 14;
/// EtherTypes of the two sockets, so that neither receives the other's frames; neither is the
/// fabric's.
const SOCKET: u16 = 0x9abc;
const RING: u16 = 0x9abd;

fn os(what: &str) -> String {
    format!("{what}: {}", io::Error::last_os_error())
}

/// A frame to the only other station, and a socket that bypasses the queueing discipline.
struct Sender {
    fd: OwnedFd,
    frame: [u8; LEN],
}

impl Sender {
    fn new(ethertype: u16) -> Result<Self, String> {
        let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK;
        // SAFETY: `socket` takes numbers and touches no memory.
        let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if fd < 0 {
            return Err(os("raw socket"));
        }
        // SAFETY: the kernel has just made it for us.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut frame = [0; LEN];
        frame[..6].fill(0xff);
        frame[6] = 2;
        frame[12..ETH_HDR_LEN].copy_from_slice(&ethertype.to_be_bytes());
        let sender = Self { fd, frame };
        sender.set(libc::PACKET_QDISC_BYPASS, &1_i32)?;
        Ok(sender)
    }

    fn set<T>(&self, option: i32, value: &T) -> Result<(), String> {
        let (fd, len) = (self.fd.as_raw_fd(), size_of::<T>() as libc::socklen_t);
        let at = std::ptr::from_ref(value).cast();
        // SAFETY: the kernel reads `len` bytes of a value that lives across the call.
        let done = unsafe { libc::setsockopt(fd, libc::SOL_PACKET, option, at, len) };
        if done < 0 { Err(os("setsockopt")) } else { Ok(()) }
    }

    fn bind(&self, interface: &str, ethertype: u16) -> Result<(), String> {
        let name = std::ffi::CString::new(interface).map_err(|e| e.to_string())?;
        // SAFETY: zeros are a `sockaddr_ll`; `if_nametoindex` reads a string that lives.
        let (mut addr, index) = unsafe {
            (std::mem::zeroed::<libc::sockaddr_ll>(), libc::if_nametoindex(name.as_ptr()))
        };
        addr.sll_family = libc::AF_PACKET as u16;
        addr.sll_protocol = ethertype.to_be();
        addr.sll_ifindex = index as i32;
        let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: `bind` reads `len` bytes of an address that lives across the call.
        let done = unsafe { libc::bind(self.fd.as_raw_fd(), (&raw const addr).cast(), len) };
        if done < 0 { Err(os(interface)) } else { Ok(()) }
    }

    #[inline]
    fn send(&self) {
        let (fd, at, len) = (self.fd.as_raw_fd(), self.frame.as_ptr().cast(), self.frame.len());
        // SAFETY: `send` reads the bytes of an array that lives across the call.
        while unsafe { libc::send(fd, at, len, 0) } < 0 {}
    }
}

/// A raw socket with `send` and `recv`.
pub struct Socket(Sender);

impl Socket {
    /// Opens the socket on an interface.
    ///
    /// # Errors
    /// The system call's error.
    pub fn open(interface: &str) -> Result<Self, String> {
        let sender = Sender::new(SOCKET)?;
        sender.bind(interface, SOCKET)?;
        Ok(Self(sender))
    }
}

impl Wire for Socket {
    #[inline]
    fn send(&mut self) {
        self.0.send();
    }

    #[inline]
    fn arrived(&mut self) -> bool {
        let mut bytes = [0_u8; 2048];
        let fd = self.0.fd.as_raw_fd();
        // SAFETY: `recv` writes at most the array's length to it.
        unsafe { libc::recv(fd, bytes.as_mut_ptr().cast(), bytes.len(), 0) > 0 }
    }
}

/// A raw socket with `send` and a mapped receive ring.
pub struct Ring {
    sender: Sender,
    base: *const u8,
    at: usize,
}

const SLOT_LEN: usize = 2048;
const SLOTS: usize = 1024;

impl Ring {
    /// Opens the socket on an interface.
    ///
    /// # Errors
    /// The system call's error.
    pub fn open(interface: &str) -> Result<Self, String> {
        let sender = Sender::new(RING)?;
        sender.set(libc::PACKET_VERSION, &(libc::tpacket_versions::TPACKET_V2 as i32))?;
        let request = libc::tpacket_req {
            tp_block_size: 1 << 16,
            tp_block_nr: ((SLOTS * SLOT_LEN) >> 16) as u32,
            tp_frame_size: SLOT_LEN as u32,
            tp_frame_nr: SLOTS as u32,
        };
        sender.set(libc::PACKET_RX_RING, &request)?;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        let (fd, len) = (sender.fd.as_raw_fd(), SLOTS * SLOT_LEN);
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory. It
        // stays until the process ends.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(os("mmap"));
        }
        sender.bind(interface, RING)?;
        Ok(Self { sender, base: base.cast(), at: 0 })
    }
}

impl Wire for Ring {
    #[inline]
    fn send(&mut self) {
        self.sender.send();
    }

    #[inline]
    fn arrived(&mut self) -> bool {
        // SAFETY: `at` is a slot of the mapping, which begins with the status word; the kernel and
        // we access it as a whole.
        let status = unsafe { &*self.base.add(self.at * SLOT_LEN).cast::<AtomicU32>() };
        if status.load(Acquire) & libc::TP_STATUS_USER == 0 {
            return false;
        }
        status.store(libc::TP_STATUS_KERNEL, Release);
        self.at = (self.at + 1) % SLOTS;
        true
    }
}
