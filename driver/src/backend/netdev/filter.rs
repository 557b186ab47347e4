//! Filters of raw sockets: classic BPF programs that the kernel runs on each frame.

use std::io;
use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, RawFd};

use nix::sys::socket::{MsgFlags, recv};

use super::super::set_option;
use super::super::vlan::VLAN_ID;
use super::link::Link;
use super::station::{join_groups, raw_socket};
use crate::backend::lock::NotInChildren;
use crate::frame::{DST_NUMBER_AT, RxFrame};
use crate::port::{MacAddr, RxSink, Station};

const LD_W: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const LD_H: u16 = (libc::BPF_LD | libc::BPF_H | libc::BPF_ABS) as u16;
const LD_B: u16 = (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16;
const TAX: u16 = (libc::BPF_MISC | libc::BPF_TAX) as u16;
const JEQ: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const JEQ_X: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_X) as u16;
const JSET: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;
const RET: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
// SKF_AD_OFF and what is behind it, of linux/filter.h.
const PACKET_TYPE: u32 = (-0x1000_i32 + 4) as u32;
const VLAN_TAG: u32 = (-0x1000_i32 + 44) as u32;
const VLAN_TAG_PRESENT: u32 = (-0x1000_i32 + 48) as u32;

fn op(code: u16, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

/// Continues for frames with the tag of `vlan`, which the kernel has stripped by then; drops
/// others. Without `vlan`: for untagged frames and priority-tagged ones (VLAN 0; IEEE 802.1Q, 6.9).
///
/// If the kernel has no interface for a frame's VLAN, sockets of one EtherType receive the frame
/// without its tag, as one to another host; sockets of any EtherType receive it before.
fn vlan_check(vlan: Option<u16>) -> Vec<libc::sock_filter> {
    let without = if vlan.is_none() { 4 } else { 3 };
    vec![
        op(LD_W, VLAN_TAG_PRESENT, 0, 0),
        op(JEQ, 0, without, 0),
        op(LD_W, VLAN_TAG, 0, 0),
        op(AND, VLAN_ID.into(), 0, 0),
        op(JEQ, vlan.unwrap_or(0).into(), 1, 0),
        op(RET, 0, 0, 0), // drop
    ]
}

/// Accepts frames of `ethertype` with the tag of `vlan` or none, to `station` or to a group;
/// without `station` to any. The number [`Station::EVERY`] is any number. `has_nics_mac`: the
/// station has the NIC's MAC, so that the kernel classifies its frames as for this host.
///
/// Raw sockets receive frames to other stations too if the interface is promiscuous or behind a
/// hub.
pub(in super::super) fn frames(
    ethertype: u16,
    station: Option<Station>,
    (vlan, has_nics_mac): (Option<u16>, bool),
) -> Vec<libc::sock_filter> {
    let take = op(RET, u32::MAX, 0, 0);
    let Station { mac: MacAddr([a, b, c, d, e, f]), number } = station.unwrap_or_default();
    let mut program = vlan_check(vlan);
    if has_nics_mac && vlan.is_none() {
        let others = op(JEQ, libc::PACKET_OTHERHOST.into(), 0, 1);
        program.extend([op(LD_W, PACKET_TYPE, 0, 0), others, op(RET, 0, 0, 0)]);
    }
    program.extend([
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
    ]);
    program
}

/// Accepts UDP datagrams to `place`, without options or fragments; ARP or neighbour discovery of
/// its address; echo requests; and over IPv6 MLD queries. All with the tag of `vlan` or none, and
/// not sent by this host.
pub(in super::super) fn datagrams(place: SocketAddr, vlan: Option<u16>) -> Vec<libc::sock_filter> {
    match place {
        SocketAddr::V4(place) => datagrams4(place, vlan),
        SocketAddr::V6(place) => datagrams6(place, vlan, true),
    }
}

/// The IPv6 part. `datagrams`: datagrams and echo requests too, else only neighbour discovery and
/// MLD.
fn datagrams6(place: SocketAddrV6, vlan: Option<u16>, datagrams: bool) -> Vec<libc::sock_filter> {
    /// Neighbour solicitations and advertisements of ICMPv6.
    const SOLICITATION: u32 = 135;
    const ADVERTISEMENT: u32 = 136;
    /// Echo requests, and queries of MLD.
    const ECHO: u32 = 128;
    const QUERY: u32 = 130;
    // Continues if the own address is at `at`, else jumps to the drop `drop` instructions ahead.
    let words: [[u8; 4]; 4] =
        std::array::from_fn(|i| std::array::from_fn(|j| place.ip().octets()[4 * i + j]));
    let ours = |at: u32, drop: u8| {
        let check = move |(i, word): (usize, [u8; 4])| {
            let is = op(JEQ, u32::from_be_bytes(word), 0, drop - 2 * i as u8 - 1);
            [op(LD_W, at + 4 * i as u32, 0, 0), is]
        };
        words.into_iter().enumerate().flat_map(check)
    };
    let mut program = vlan_check(vlan);
    // A value that no byte has.
    let never = u32::MAX;
    let (udp, echo) = if datagrams { (libc::IPPROTO_UDP as u32, ECHO) } else { (never, never) };
    program.extend([
        op(LD_W, PACKET_TYPE, 0, 0),
        op(JEQ, libc::PACKET_OUTGOING.into(), 42, 0),
        op(LD_H, 12, 0, 0),
        op(JEQ, libc::ETH_P_IPV6 as u32, 0, 40),
        op(LD_B, 20, 0, 0),
        op(JEQ, libc::IPPROTO_ICMPV6 as u32, 12, 0),
        op(JEQ, libc::IPPROTO_HOPOPTS as u32, 15, 0),
        op(JEQ, udp, 0, 36),
    ]);
    program.extend(ours(38, 35));
    program.extend([
        op(LD_H, 56, 0, 0),
        op(JEQ, place.port().into(), 25, 26),
        // An advertisement, or a solicitation of our address, or a probe for it.
        op(LD_B, 54, 0, 0),
        op(JEQ, ADVERTISEMENT, 23, 0),
        op(JEQ, echo, 5, 0),
        op(JEQ, SOLICITATION, 13, 22),
        // Behind hop-by-hop options of 8 bytes: an MLD query.
        op(LD_H, 54, 0, 0),
        op(JEQ, (libc::IPPROTO_ICMPV6 as u32) << 8, 0, 20),
        op(LD_B, 62, 0, 0),
        op(JEQ, QUERY, 17, 18),
    ]);
    program.extend(ours(38, 17));
    program.extend([op(RET, u32::MAX, 0, 0)]);
    program.extend(ours(62, 8));
    program.extend([
        op(RET, u32::MAX, 0, 0), // all of it
        op(RET, 0, 0, 0),        // drop
    ]);
    program
}

/// The IPv4 part, with ARP.
fn datagrams4(place: SocketAddrV4, vlan: Option<u16>) -> Vec<libc::sock_filter> {
    /// Echo requests of ICMP.
    const ECHO: u32 = 8;
    let ip = u32::from(*place.ip());
    let mut program = vlan_check(vlan);
    program.extend([
        op(LD_W, PACKET_TYPE, 0, 0),
        op(JEQ, libc::PACKET_OUTGOING.into(), 22, 0),
        op(LD_H, 12, 0, 0),
        op(JEQ, libc::ETH_P_ARP as u32, 14, 0),
        op(JEQ, libc::ETH_P_IP as u32, 0, 19),
        // IPv4: our address, no options, no fragment, UDP and our port, or an echo request.
        op(LD_W, 30, 0, 0),
        op(JEQ, ip, 0, 17),
        op(LD_B, 14, 0, 0),
        op(JEQ, 0x45, 0, 15),
        op(LD_H, 20, 0, 0),
        op(JSET, 0x3fff, 13, 0),
        op(LD_B, 23, 0, 0),
        op(JEQ, libc::IPPROTO_UDP as u32, 3, 0),
        op(JEQ, libc::IPPROTO_ICMP as u32, 0, 10),
        op(LD_B, 34, 0, 0),
        op(JEQ, ECHO, 9, 8),
        op(LD_H, 36, 0, 0),
        op(JEQ, place.port().into(), 7, 6),
        // ARP: sender and target address. A host with our address may reply to a probe's sender.
        op(LD_W, 28, 0, 0),
        op(JEQ, ip, 5, 0),
        op(TAX, 0, 0, 0),
        op(LD_W, 38, 0, 0),
        op(JEQ, ip, 2, 0),
        op(JEQ_X, 0, 1, 0),
        op(RET, 0, 0, 0),        // drop
        op(RET, u32::MAX, 0, 0), // all of it
    ]);
    program
}

/// Attaches `program` to the socket `fd`, which receives only what it accepts.
pub(in super::super) fn attach(fd: RawFd, mut program: Vec<libc::sock_filter>) -> io::Result<()> {
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    set_option(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
}

/// Binds the socket: it receives frames of `ethertype` on `link` from now on.
pub(in super::super) fn bind(fd: RawFd, link: &Link, ethertype: u16) -> io::Result<()> {
    // SAFETY: zeros are a `sockaddr_ll`.
    let mut addr: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    addr.sll_family = libc::AF_PACKET as u16;
    addr.sll_protocol = ethertype.to_be();
    addr.sll_ifindex = link.index as libc::c_int;
    super::super::bind(fd, &addr)
}

/// A raw socket for ARP or neighbour discovery of an address, which the kernel receives too.
pub(in super::super) struct ArpSocket(NotInChildren);

impl ArpSocket {
    /// Frames lent at once.
    const BURST: usize = 16;

    pub(in super::super) fn new(
        link: &Link,
        place: SocketAddr,
        vlan: Option<u16>,
    ) -> io::Result<Self> {
        let socket = raw_socket()?;
        let (program, of_it) = match place {
            SocketAddr::V4(place) => (datagrams4(place, vlan), libc::ETH_P_ARP),
            SocketAddr::V6(place) => (datagrams6(place, vlan, false), libc::ETH_P_IPV6),
        };
        attach(socket.as_raw_fd(), program)?;
        join_groups(socket.as_raw_fd(), link, Some(place))?;
        // See `vlan_check` for the EtherType.
        let ethertype = if vlan.is_some() { libc::ETH_P_ALL } else { of_it };
        bind(socket.as_raw_fd(), link, ethertype as u16)?;
        Ok(Self(socket))
    }

    pub(in super::super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Lends received frames, and returns their number. One system call more than frames.
    pub(in super::super) fn lend(&self, max: usize, sink: &mut dyn RxSink) -> usize {
        let mut bytes = [0; 128];
        let mut count = 0;
        while count < max.min(Self::BURST) {
            let got = recv(self.fd(), &mut bytes, MsgFlags::MSG_DONTWAIT);
            let Ok(len @ 1..) = got else { break };
            sink.frame(&RxFrame::new(&bytes[..len]));
            count += 1;
        }
        count
    }
}
