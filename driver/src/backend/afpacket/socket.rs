//! The raw socket: opened, filtered, bound, and written to.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use super::super::{owned, set_option};
use super::link::Link;
use crate::port::MacAddr;

/// Asked for as the socket's send buffer: a burst of the longest frames.
const SEND_BUFFER: libc::c_int = 4 << 20;

/// Sets an option of the packet layer.
pub(super) fn set<T>(fd: RawFd, option: libc::c_int, value: &T) -> io::Result<()> {
    set_option(fd, libc::SOL_PACKET, option, value)
}

/// A raw socket that hears nothing yet.
///
/// # Errors
/// `EPERM`: the process has no CAP_NET_RAW in its network namespace.
pub(super) fn open() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: `socket` takes numbers and touches no memory. Protocol 0: no frame arrives before
    // `bind`, so none passes before the filter is there.
    owned(unsafe { libc::socket(libc::AF_PACKET, kind, 0) })
}

/// Sets what has to be set before the first frame: the filter, which passes frames to `mac` or to
/// everybody, and how frames leave.
pub(super) fn prepare(fd: RawFd, ethertype: u16, mac: Option<MacAddr>) -> io::Result<()> {
    let on: libc::c_int = 1;
    // Straight to the driver, past the queueing discipline: the fabric has windows of its own.
    set(fd, libc::PACKET_QDISC_BYPASS, &on)?;
    if set_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &SEND_BUFFER).is_err() {
        // Without CAP_NET_ADMIN it is cut to the system's limit, which is enough to work.
        set_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, &SEND_BUFFER)?;
    }
    let mut program = filter(ethertype, mac);
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    set_option(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
}

/// Makes the interface take frames to `mac`, which is not its own: by its address filter, or by
/// promiscuous mode if it has none (the kernel decides). Without an address, frames to everybody.
pub(super) fn join(fd: RawFd, link: &Link, mac: Option<MacAddr>) -> io::Result<()> {
    let kind = if mac.is_some() { libc::PACKET_MR_UNICAST } else { libc::PACKET_MR_PROMISC };
    let mut address = [0; 8];
    address[..6].copy_from_slice(&mac.unwrap_or_default().0);
    let request = libc::packet_mreq {
        mr_ifindex: link.index as libc::c_int,
        mr_type: kind as u16,
        mr_alen: 6,
        mr_address: address,
    };
    set(fd, libc::PACKET_ADD_MEMBERSHIP, &request)
}

/// From now on frames of `ethertype` on `link` arrive.
pub(super) fn bind(fd: RawFd, link: &Link, ethertype: u16) -> io::Result<()> {
    // SAFETY: zeros are a `sockaddr_ll`.
    let mut addr: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    addr.sll_family = libc::AF_PACKET as u16;
    addr.sll_protocol = ethertype.to_be();
    addr.sll_ifindex = link.index as libc::c_int;
    let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: `bind` reads `len` bytes of a `sockaddr_ll` that lives across the call.
    let done = unsafe { libc::bind(fd, (&raw const addr).cast(), len) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Frames that the kernel had no slot for since the last call.
pub(super) fn lost(fd: RawFd) -> u64 {
    let mut stats = libc::tpacket_stats { tp_packets: 0, tp_drops: 0 };
    let mut len = size_of::<libc::tpacket_stats>() as libc::socklen_t;
    let (level, option) = (libc::SOL_PACKET, libc::PACKET_STATISTICS);
    // SAFETY: the kernel writes at most `len` bytes to `stats`, which is as long.
    let done =
        unsafe { libc::getsockopt(fd, level, option, (&raw mut stats).cast(), &raw mut len) };
    if done < 0 { 0 } else { stats.tp_drops.into() }
}

/// The name that keeps `mac` on interface `index` for one process. It is one of the network
/// namespace, like the interface, and goes with the process however that ends.
///
/// # Errors
/// `EADDRINUSE`: a process has it.
pub(super) fn claim(index: u32, mac: MacAddr) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
    // SAFETY: `socket` takes numbers and touches no memory.
    let fd = owned(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })?;
    // SAFETY: zeros are a `sockaddr_un`.
    let mut addr: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    addr.sun_family = libc::AF_UNIX as u16;
    let name = format!("barewire-afpacket-{index}-{mac}");
    // The first byte stays 0: an abstract name, which is in no file system.
    for (to, byte) in addr.sun_path[1..].iter_mut().zip(name.bytes()) {
        *to = byte as libc::c_char;
    }
    let len = (std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len()) as u32;
    // SAFETY: `bind` reads `len` bytes of a `sockaddr_un`, which is longer, across the call.
    let done = unsafe { libc::bind(fd.as_raw_fd(), (&raw const addr).cast(), len) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(fd) }
}

/// Lets through what is ours: our EtherType, no VLAN tag, to `mac` or to a group; without `mac` to
/// any address.
///
/// The kernel's tap hears frames to other stations too, where the interface is promiscuous for
/// somebody or sits behind a hub.
fn filter(ethertype: u16, mac: Option<MacAddr>) -> [libc::sock_filter; 12] {
    const LD_W: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const LD_H: u16 = (libc::BPF_LD | libc::BPF_H | libc::BPF_ABS) as u16;
    const LD_B: u16 = (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16;
    const JEQ: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const JSET: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
    const RET: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    // SKF_AD_OFF + SKF_AD_VLAN_TAG_PRESENT of linux/filter.h.
    const VLAN_TAG_PRESENT: u32 = (-0x1000_i32 + 48) as u32;
    let op = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    let take = op(RET, u32::MAX, 0, 0);
    let [a, b, c, d, e, f] = mac.unwrap_or_default().0;
    [
        op(LD_W, VLAN_TAG_PRESENT, 0, 0),
        op(JEQ, 0, 0, 8),
        op(LD_H, 12, 0, 0),
        op(JEQ, ethertype.into(), 0, 6),
        if mac.is_some() { op(LD_B, 0, 0, 0) } else { take },
        op(JSET, 1, 5, 0),
        op(LD_W, 2, 0, 0),
        op(JEQ, u32::from_be_bytes([c, d, e, f]), 0, 2),
        op(LD_H, 0, 0, 0),
        op(JEQ, u16::from_be_bytes([a, b]).into(), 1, 0),
        op(RET, 0, 0, 0), // drop
        take,             // all of it
    ]
}
