//! A minimal sending AF_XDP socket: the reference of the port `xdp`.
//!
//! Source: Linux, Documentation/networking/af_xdp.rst.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};

use memmap2::{MmapMut, MmapOptions, MmapRaw};

/// Entries of a ring, and chunks of the UMEM.
const COUNT: u32 = 2048;
const CHUNK: usize = 2048;

fn os<T>(what: &str) -> Result<T, String> {
    Err(format!("{what}: {}", io::Error::last_os_error()))
}

/// A ring shared with the kernel.
struct Ring {
    map: MmapRaw,
    producer: usize,
    consumer: usize,
    entries: usize,
    /// Index of this side's next entry.
    next: u32,
}

impl Ring {
    fn new(fd: &OwnedFd, at: u64, places: libc::xdp_ring_offset, len: usize) -> io::Result<Self> {
        let entries = places.desc as usize;
        let len = entries + COUNT as usize * len;
        let map = MmapOptions::new().offset(at).len(len).populate().map_raw(fd)?;
        let (producer, consumer) = (places.producer as usize, places.consumer as usize);
        Ok(Self { map, producer, consumer, entries, next: 0 })
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: the kernel says where in its mapping the word lies; both access it as a whole.
        unsafe { &*self.map.as_ptr().add(at).cast::<AtomicU32>() }
    }
}

/// A socket on queue 0 of an interface, whose chunks all contain the same frame.
pub struct Xsk {
    fd: OwnedFd,
    tx: Ring,
    completion: Ring,
    len: usize,
    /// Frames that the kernel has not completed.
    sent: u32,
    /// The UMEM, which the kernel reads while the socket is open.
    _umem: MmapMut,
}

impl Xsk {
    /// Opens the socket on an interface to send `frame`, in copy mode, as on a veth.
    ///
    /// # Errors
    /// The system call's error.
    pub fn open(interface: &str, frame: &[u8]) -> Result<Self, String> {
        // SAFETY: `socket` takes numbers and touches no memory.
        let fd = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW, 0) };
        if fd < 0 {
            return os("AF_XDP");
        }
        // SAFETY: the kernel has just made it for us.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut umem = MmapMut::map_anon(COUNT as usize * CHUNK).map_err(|e| e.to_string())?;
        for chunk in umem.chunks_exact_mut(CHUNK) {
            chunk[..frame.len()].copy_from_slice(frame);
        }
        let memory = libc::xdp_umem_reg {
            addr: umem.as_ptr() as u64,
            len: umem.len() as u64,
            chunk_size: CHUNK as u32,
            headroom: 0,
            flags: 0,
            tx_metadata_len: 0,
        };
        set(&fd, libc::XDP_UMEM_REG, &memory)?;
        for ring in [libc::XDP_UMEM_FILL_RING, libc::XDP_UMEM_COMPLETION_RING, libc::XDP_TX_RING] {
            set(&fd, ring, &COUNT)?;
        }
        let places = places(&fd)?;
        let why = |e: io::Error| format!("rings of AF_XDP: {e}");
        let desc_len = size_of::<libc::xdp_desc>();
        let tx =
            Ring::new(&fd, libc::XDP_PGOFF_TX_RING as u64, places.tx, desc_len).map_err(why)?;
        let at = libc::XDP_UMEM_PGOFF_COMPLETION_RING;
        let completion = Ring::new(&fd, at, places.cr, size_of::<u64>()).map_err(why)?;
        bind(&fd, interface)?;
        Ok(Self { fd, tx, completion, len: frame.len(), sent: 0, _umem: umem })
    }

    /// Sends `count` frames in one call, at most the number of ring entries.
    pub fn send(&mut self, count: u32) {
        while self.sent + count > COUNT {
            self.reap();
        }
        for _ in 0..count {
            let i = self.tx.next & (COUNT - 1);
            let addr = u64::from(i) * CHUNK as u64;
            let desc = libc::xdp_desc { addr, len: self.len as u32, options: 0 };
            // SAFETY: entry `i` lies in the mapping; it is ours, since `sent` is below the count.
            unsafe {
                let entries = self.tx.map.as_mut_ptr().add(self.tx.entries);
                entries.cast::<libc::xdp_desc>().add(i as usize).write(desc);
            }
            self.tx.next = self.tx.next.wrapping_add(1);
        }
        self.sent += count;
        self.tx.word(self.tx.producer).store(self.tx.next, Release);
        self.kick();
        self.reap();
    }

    /// Makes the kernel send the published entries.
    fn kick(&self) {
        // Frames that the kernel leaves for lack of a buffer are sent by the next call.
        while self.tx.word(self.tx.consumer).load(Acquire) != self.tx.next {
            let (fd, flags) = (self.fd.as_raw_fd(), libc::MSG_DONTWAIT);
            // SAFETY: it sends what is in the ring, and reads no memory of ours.
            unsafe { libc::sendto(fd, std::ptr::null(), 0, flags, std::ptr::null(), 0) };
        }
    }

    fn reap(&mut self) {
        let produced = self.completion.word(self.completion.producer).load(Acquire);
        self.sent -= produced.wrapping_sub(self.completion.next);
        self.completion.next = produced;
        self.completion.word(self.completion.consumer).store(produced, Release);
    }
}

fn set<T>(fd: &OwnedFd, option: i32, value: &T) -> Result<(), String> {
    let (at, len) = (std::ptr::from_ref(value).cast(), size_of::<T>() as libc::socklen_t);
    // SAFETY: the kernel reads `len` bytes of a value that lives across the call.
    match unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_XDP, option, at, len) } {
        0 => Ok(()),
        _ => os("setsockopt of AF_XDP"),
    }
}

fn places(fd: &OwnedFd) -> Result<libc::xdp_mmap_offsets, String> {
    // SAFETY: zeros are offsets.
    let mut places = unsafe { std::mem::zeroed::<libc::xdp_mmap_offsets>() };
    let mut len = size_of_val(&places) as libc::socklen_t;
    let (option, at) = (libc::XDP_MMAP_OFFSETS, (&raw mut places).cast());
    // SAFETY: the kernel writes at most `len` bytes to numbers that are as long.
    match unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_XDP, option, at, &raw mut len) } {
        0 => Ok(places),
        _ => os("getsockopt of AF_XDP"),
    }
}

fn bind(fd: &OwnedFd, interface: &str) -> Result<(), String> {
    let name = CString::new(interface).map_err(|e| e.to_string())?;
    let addr = libc::sockaddr_xdp {
        sxdp_family: libc::AF_XDP as u16,
        sxdp_flags: libc::XDP_COPY,
        // SAFETY: it reads a string that lives.
        sxdp_ifindex: unsafe { libc::if_nametoindex(name.as_ptr()) },
        sxdp_queue_id: 0,
        sxdp_shared_umem_fd: 0,
    };
    let len = size_of_val(&addr) as libc::socklen_t;
    // SAFETY: `bind` reads `len` bytes of an address that lives across the call.
    match unsafe { libc::bind(fd.as_raw_fd(), (&raw const addr).cast(), len) } {
        0 => Ok(()),
        _ => os(interface),
    }
}
