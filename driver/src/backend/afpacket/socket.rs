//! The raw socket: how it sends, what it hears, and what it lost.

use std::io;
use std::mem::size_of;
use std::os::fd::RawFd;

use super::super::netdev::filter;
use super::super::set_option;

/// Asked for as the socket's send buffer: a burst of the longest frames.
const SEND_BUFFER: libc::c_int = 4 << 20;

/// Sets an option of the packet layer.
pub(super) fn set<T>(fd: RawFd, option: libc::c_int, value: &T) -> io::Result<()> {
    set_option(fd, libc::SOL_PACKET, option, value)
}

/// Frames of any EtherType: `ETH_P_ALL`.
pub(super) const ANY: u16 = libc::ETH_P_ALL as u16;

/// Sets what has to be set before the first frame: the filter, and how frames leave.
pub(super) fn prepare(fd: RawFd, program: Vec<libc::sock_filter>, qdisc: bool) -> io::Result<()> {
    let on: libc::c_int = 1;
    // What the kernel sends itself, which sockets of any EtherType hear. Since Linux 4.20; the
    // filter drops it as well.
    let _ = set(fd, libc::PACKET_IGNORE_OUTGOING, &on);
    if !qdisc {
        // Straight to the driver: the fabric has windows of its own.
        set(fd, libc::PACKET_QDISC_BYPASS, &on)?;
    }
    if set_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &SEND_BUFFER).is_err() {
        // Without CAP_NET_ADMIN it is cut to the system's limit, which is enough to work.
        set_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, &SEND_BUFFER)?;
    }
    filter::attach(fd, program)
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
