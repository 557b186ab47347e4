//! System calls of an AF_XDP socket, one function each; errors carry their errno.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use memmap2::MmapOptions;

use super::super::lock::{NotInChildren, UnforkedMap};
use super::super::{SEND_BUFFER, get_option, set_option};
use super::ring::{Consumer, Desc, Producer, RingOffsets};
use super::umem::Umem;

/// Requested send buffer, bytes: a burst of the longest frames.
const SEND_BUFFER_LEN: libc::c_int = 4 << 20;

/// An unbound socket.
///
/// # Errors
/// `EPERM`: no CAP_NET_RAW. `EAFNOSUPPORT`: the kernel has no AF_XDP.
pub(super) fn open() -> io::Result<NotInChildren> {
    Ok(super::super::socket(libc::AF_XDP, libc::SOCK_RAW, 0)?.into())
}

fn set<T>(fd: RawFd, option: libc::c_int, value: &T) -> io::Result<()> {
    set_option(fd, libc::SOL_XDP, option, value)
}

/// `struct xdp_mmap_offsets`: producer, consumer, entries and flags of `RX`, `TX`, `FILL` and
/// `COMPLETION`.
type Offsets = [[u64; 4]; 4];
const _: () = assert!(size_of::<Offsets>() == size_of::<libc::xdp_mmap_offsets>());

/// `struct xdp_statistics`.
type Statistics = [u64; 6];
const _: () = assert!(size_of::<Statistics>() == size_of::<libc::xdp_statistics>());

/// `struct xdp_options`.
type Options = [u32; 1];

/// Registers `umem` with the socket.
///
/// # Errors
/// `ENOBUFS`: it is more than this process may lock.
pub(super) fn register(fd: RawFd, umem: &Umem, chunk_len: usize) -> io::Result<()> {
    let request = libc::xdp_umem_reg {
        addr: umem.base() as u64,
        len: umem.len() as u64,
        chunk_size: chunk_len as u32,
        headroom: 0,
        flags: 0,
        tx_metadata_len: 0,
    };
    set(fd, libc::XDP_UMEM_REG, &request)
}

/// The receive rings of a socket.
pub(super) struct RxRings {
    pub(super) rx: Consumer<Desc>,
    pub(super) fill: Producer<u64>,
}

/// The send rings of a socket.
pub(super) struct TxRings {
    pub(super) tx: Producer<Desc>,
    pub(super) completion: Consumer<u64>,
}

/// Maps receive rings for `count` frames, a power of two.
///
/// # Errors
/// `ENOMEM` and what else mapping says; `EOPNOTSUPP`: the kernel is older than 5.4.
pub(super) fn rx_rings(fd: &OwnedFd, count: u32) -> io::Result<RxRings> {
    set(fd.as_raw_fd(), libc::XDP_RX_RING, &count)?;
    // A chunk's fill entry may still be the kernel's when the chunk is ours again.
    let fill_count = 2 * count;
    set(fd.as_raw_fd(), libc::XDP_UMEM_FILL_RING, &fill_count)?;
    let [rx, _, fill, _] = offsets(fd)?;
    let rx_map = map(fd, libc::XDP_PGOFF_RX_RING as u64, rx, count, size_of::<Desc>())?;
    let fill_map = map(fd, libc::XDP_UMEM_PGOFF_FILL_RING, fill, fill_count, 8)?;
    Ok(RxRings {
        rx: Consumer::new(rx_map, rx, count)?,
        fill: Producer::new(fill_map, fill, fill_count)?,
    })
}

/// Maps send rings for `count` frames, a power of two.
///
/// # Errors
/// As [`rx_rings`].
pub(super) fn tx_rings(fd: &OwnedFd, count: u32) -> io::Result<TxRings> {
    set(fd.as_raw_fd(), libc::XDP_TX_RING, &count)?;
    set(fd.as_raw_fd(), libc::XDP_UMEM_COMPLETION_RING, &count)?;
    let [_, tx, _, completion] = offsets(fd)?;
    let tx_map = map(fd, libc::XDP_PGOFF_TX_RING as u64, tx, count, size_of::<Desc>())?;
    let completion_map = map(fd, libc::XDP_UMEM_PGOFF_COMPLETION_RING, completion, count, 8)?;
    Ok(TxRings {
        tx: Producer::new(tx_map, tx, count)?,
        completion: Consumer::new(completion_map, completion, count)?,
    })
}

/// Sets up a receive-only socket, for which the kernel needs a completion ring all the same.
pub(super) fn set_receive_only(fd: RawFd) -> io::Result<()> {
    let count: u32 = 1;
    set(fd, libc::XDP_UMEM_COMPLETION_RING, &count)
}

/// Offsets of the rings' parts in their mappings: `RX`, `TX`, `FILL`, `COMPLETION`.
fn offsets(fd: &OwnedFd) -> io::Result<[RingOffsets; 4]> {
    let (offsets, len): (Offsets, usize) =
        get_option(fd.as_raw_fd(), libc::SOL_XDP, libc::XDP_MMAP_OFFSETS)?;
    if len != size_of::<Offsets>() {
        return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
    }
    Ok(offsets.map(|[producer, consumer, entries, flags]| RingOffsets {
        producer: producer as usize,
        consumer: consumer as usize,
        flags: flags as usize,
        entries: entries as usize,
    }))
}

fn map(
    fd: &OwnedFd,
    at: u64,
    offsets: RingOffsets,
    count: u32,
    entry_len: usize,
) -> io::Result<UnforkedMap> {
    let len = offsets.entries.saturating_add(count as usize * entry_len);
    // A child's mapping would keep the socket, and with it the queue.
    UnforkedMap::new(MmapOptions::new().offset(at).len(len).populate().map_raw(fd)?)
}

/// The umem of a socket.
#[derive(Clone, Copy, Debug)]
pub(super) enum UmemSource {
    /// Its own.
    Own {
        /// The kernel copies frames; else only if the driver has no zero-copy.
        copies: bool,
    },
    /// That of this bound socket, in the same mode.
    SharedWith(RawFd),
}

/// Binds the socket to `queue`: from now on it receives what the program redirects there, and sends
/// by it.
///
/// # Errors
/// `EBUSY`: another socket has the queue. `EINVAL`: there is no such queue. `EOPNOTSUPP`: the other
/// socket is zero-copy, and this queue cannot be.
pub(super) fn bind(fd: RawFd, index: u32, queue: u32, memory: UmemSource) -> io::Result<()> {
    let (flags, of) = match memory {
        UmemSource::Own { copies } => {
            (libc::XDP_USE_NEED_WAKEUP | if copies { libc::XDP_COPY } else { 0 }, 0)
        }
        // The mode is that of the other socket.
        UmemSource::SharedWith(fd) => (libc::XDP_SHARED_UMEM, fd as u32),
    };
    let addr = libc::sockaddr_xdp {
        sxdp_family: libc::AF_XDP as u16,
        sxdp_flags: flags,
        sxdp_ifindex: index,
        sxdp_queue_id: queue,
        sxdp_shared_umem_fd: of,
    };
    super::super::bind(fd, &addr)
}

/// ShareServer for bursts in the kernel, as far as it is allowed.
pub(super) fn enlarge(fd: RawFd) {
    // A smaller buffer is enough to work.
    let _ = super::super::enlarge(fd, SEND_BUFFER, SEND_BUFFER_LEN);
}

/// Whether the socket is zero-copy.
pub(super) fn is_zero_copy(fd: RawFd) -> bool {
    let options = get_option::<Options>(fd, libc::SOL_XDP, libc::XDP_OPTIONS);
    options.is_ok_and(|([flags], _)| flags & libc::XDP_OPTIONS_ZEROCOPY != 0)
}

/// Received frames that found no room, or no chunk that was long enough, since the socket was made.
pub(super) fn dropped_frames(fd: RawFd) -> u64 {
    let statistics = get_option::<Statistics>(fd, libc::SOL_XDP, libc::XDP_STATISTICS);
    // The second and third count invalid descriptors.
    statistics.map_or(0, |([dropped, _, _, ring_full, ..], _)| dropped + ring_full)
}

/// Makes the kernel send published frames.
pub(super) fn kick(fd: RawFd) -> io::Result<()> {
    // SAFETY: no bytes and no address are read.
    let done =
        unsafe { libc::sendto(fd, std::ptr::null(), 0, libc::MSG_DONTWAIT, std::ptr::null(), 0) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Makes the kernel read the fill ring, or poll for frames.
pub(super) fn kick_rx(fd: RawFd) {
    let (nothing, nobody) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: no bytes and no address are written. The result is not needed: received frames are in
    // the ring.
    unsafe {
        libc::recvfrom(fd, nothing, 0, libc::MSG_DONTWAIT, nobody, std::ptr::null_mut());
    }
}
