//! The raw socket: filtered, bound, and asked what it lost.

use std::io;
use std::mem::size_of;
use std::os::fd::RawFd;

use super::super::netdev::Link;
use super::super::set_option;
use crate::frame::DST_NUMBER_AT;
use crate::port::{MacAddr, Station};

/// Asked for as the socket's send buffer: a burst of the longest frames.
const SEND_BUFFER: libc::c_int = 4 << 20;

/// Sets an option of the packet layer.
pub(super) fn set<T>(fd: RawFd, option: libc::c_int, value: &T) -> io::Result<()> {
    set_option(fd, libc::SOL_PACKET, option, value)
}

/// Sets what has to be set before the first frame: the filter, which passes frames to `station` or
/// to everybody, and how frames leave.
pub(super) fn prepare(fd: RawFd, ethertype: u16, station: Option<Station>) -> io::Result<()> {
    let on: libc::c_int = 1;
    // Straight to the driver, past the queueing discipline: the fabric has windows of its own.
    set(fd, libc::PACKET_QDISC_BYPASS, &on)?;
    if set_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &SEND_BUFFER).is_err() {
        // Without CAP_NET_ADMIN it is cut to the system's limit, which is enough to work.
        set_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, &SEND_BUFFER)?;
    }
    let mut program = filter(ethertype, station);
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    set_option(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
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

/// Lets through what is ours: our EtherType, no VLAN tag, to `station` or to a group; without
/// `station` to any. The number [`Station::EVERY`] is any number.
///
/// The kernel's tap hears frames to other stations too, where the interface is promiscuous for
/// somebody or sits behind a hub.
fn filter(ethertype: u16, station: Option<Station>) -> [libc::sock_filter; 14] {
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
    let Station { mac: MacAddr([a, b, c, d, e, f]), number } = station.unwrap_or_default();
    [
        op(LD_W, VLAN_TAG_PRESENT, 0, 0),
        op(JEQ, 0, 0, 10),
        op(LD_H, 12, 0, 0),
        op(JEQ, ethertype.into(), 0, 8),
        if station.is_some() { op(LD_B, 0, 0, 0) } else { take },
        op(JSET, 1, 7, 0),
        op(LD_W, 2, 0, 0),
        op(JEQ, u32::from_be_bytes([c, d, e, f]), 0, 4),
        op(LD_H, 0, 0, 0),
        op(JEQ, u16::from_be_bytes([a, b]).into(), 0, 2),
        if number == Station::EVERY { take } else { op(LD_H, DST_NUMBER_AT as u32, 0, 0) },
        op(JEQ, number.swap_bytes().into(), 1, 0),
        op(RET, 0, 0, 0), // drop
        take,             // all of it
    ]
}
