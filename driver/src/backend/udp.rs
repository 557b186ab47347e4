//! Frames inside UDP through a kernel socket, for hosts that permit no more to a program.
//!
//! A datagram carries one whole Ethernet frame, header first, so that the layers above work as on
//! a wire. Needs no privilege.
//!
//! # Addresses
//! A station's MAC encodes its IP address and UDP port: 32 bits of the IP address and 14 bits of
//! the UDP port fill the 46 bits that a local unicast MAC leaves free (`inet.rs`). So there is
//! nothing to resolve: a node that knows the MAC can send to it. This is why UDP ports are 49152 to
//! 65535, why IPv6 hosts share their first 96 bits ([`Prefix`]), and why ports do not work behind
//! address translation, which changes the address.
//!
//! # Trust
//! A frame is accepted only if its source address encodes the sender of the datagram, its
//! destination is ours and its EtherType is the fabric's. All others are dropped and counted. So a
//! process can forge another port only if it can send from that port's IP address, as on a wire
//! behind a switch; further protection is up to the protocol (`docs/wire.md`).
//!
//! # GSO and GRO
//! A system call and a pass through the network stack cost much more than a frame's bytes. So
//! consecutive frames of equal length to one destination, as those of a long message or of many
//! short ones, leave as one datagram that the kernel or the card segments (GSO, `batch.rs`), and
//! are received coalesced (GRO, `RxBatch`). Such a datagram is longer than a frame, by which
//! `ip(...)` recognizes one that was not segmented.
//!
//! # Length
//! Datagrams are not fragmented. The MTU is that of the interface with the address, less 42 bytes
//! for IPv4, UDP and the inner Ethernet header, or 62 with IPv6. A path that carries less refuses
//! longer frames, which is logged with advice.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use super::batch::Batch;
use super::inet::{CE, SockAddr, addresses, family, host_text, tos_of};
use super::lock::NotInChildren;
use super::netdev::{Link, Shared, Waiter, filter, link_by_alt_name, links};
use super::{WakeEvent, set_option};
use crate::clock::now_ns;
use crate::error::OpenError;
use crate::frame::{ETH_HDR_LEN, ETHERTYPE, RxFrame, TxFrame};
use crate::port::{Port, PortCaps, PortCounters, PortGone, PortWaiter, RxSink, Station, Tx};

pub use super::inet::{DEFAULT_PORTS, PORTS, Prefix, addr_of, mac_of};

/// Bytes of the headers of UDP, IPv4 without options, and IPv6 without extension headers.
const UDP_LEN: usize = 8;
const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;
/// Longest UDP payload, bytes: IPv6's length field does not include its own header.
const DATAGRAM_MAX: usize = 65_535 - UDP_LEN;
/// Largest MTU of a port: what fits an IPv4 datagram.
pub const MTU_MAX: usize = DATAGRAM_MAX - IPV4_LEN - ETH_HDR_LEN;

/// Frames lent at once.
const BURST: usize = 32;
/// Requested socket buffers, bytes; without privilege limited to net.core.rmem_max and wmem_max.
const BUFFER_LEN: libc::c_int = 8 << 20;
/// Time until frames that the kernel had no room for are offered again.
const RETRY_NS: u64 = 50_000;

/// Settings of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UdpSettings {
    /// An IP address of this host, or the name of an interface that has one.
    pub host: String,
    /// Use the interface's IPv6 address; also true if `host` is an IPv6 address.
    pub is_v6: bool,
    /// The UDP port, one of [`PORTS`]. Default: the first free one of [`DEFAULT_PORTS`].
    pub port: Option<u16>,
    /// Largest number of bytes after the Ethernet header, 256 to what the interface carries less
    /// 42, with IPv6 62, which is the default.
    pub mtu: Option<usize>,
    /// Differentiated services code point of the datagrams, 0 to 63. Default 0.
    pub dscp: u8,
    /// Whether datagrams are sent as ECN-capable. Default: yes. Marks of received datagrams are
    /// reported in any case.
    pub ecn: bool,
    /// Whether a poll that finds nothing runs the driver's NAPI poll, instead of its interrupt.
    /// Needs CAP_NET_ADMIN and Linux 5.11. Default: no.
    pub busy_poll: bool,
}

/// A local address, and its interface.
struct LocalAddress {
    ip: IpAddr,
    link: Option<Link>,
}

impl LocalAddress {
    /// Bytes of the IP and UDP headers.
    fn outer_len(&self) -> usize {
        UDP_LEN + if self.ip.is_ipv4() { IPV4_LEN } else { IPV6_LEN }
    }

    /// The largest MTU of a port at the address.
    fn mtu_max(&self) -> usize {
        let carried = self.link.as_ref().map_or(1500, |link| link.mtu);
        carried.saturating_sub(self.outer_len() + ETH_HDR_LEN).min(MTU_MAX)
    }

    /// The socket address with this UDP port.
    fn at(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.ip, port)
    }
}

impl UdpSettings {
    /// The settings of a port at `host`.
    pub fn at(host: &str) -> Self {
        let is_v6 = host.parse::<Ipv6Addr>().is_ok();
        Self {
            host: host.to_owned(),
            is_v6,
            port: None,
            mtu: None,
            dscp: 0,
            ecn: true,
            busy_poll: false,
        }
    }

    /// The settings as written in a port's name, without options.
    fn text(&self) -> String {
        match self.host.parse() {
            Ok(ip) => format!("udp:{}", host_text(ip)),
            Err(_) if self.is_v6 => format!("udp:{}/96", self.host),
            Err(_) => format!("udp:{}", self.host),
        }
    }

    fn refuse(&self, errno: i32, why: impl Into<String>, mend: impl Into<String>) -> OpenError {
        OpenError::device(self.text(), errno, why, mend)
    }

    fn os(&self, what: &str, e: &io::Error) -> OpenError {
        OpenError::unexplained(self.text(), what, e)
    }

    /// Whether a port could be opened with these settings, if its UDP port is free; changes
    /// nothing.
    ///
    /// # Errors
    /// The first obstacle, and how to remove it.
    pub fn check(&self) -> Result<(), OpenError> {
        let place = self.local_address()?;
        self.mtu(&place)?;
        self.check_dscp()?;
        if self.busy_poll {
            let os = |e: io::Error| self.os("cannot make a UDP socket", &e);
            self.set_busy_poll(socket(place.ip, 0).map_err(os)?.as_raw_fd())?;
        }
        self.port.map_or(Ok(()), |port| self.check_port(place.at(port)))
    }

    fn check_dscp(&self) -> Result<(), OpenError> {
        match self.dscp {
            ..64 => Ok(()),
            _ => Err(self.refuse(libc::EINVAL, "no such dscp=", "write dscp=0 to 63")),
        }
    }

    /// Refuses a UDP port that is not one of [`PORTS`].
    fn check_port(&self, addr: SocketAddr) -> Result<(), OpenError> {
        if Prefix::of(addr.ip()).mac_of(addr).is_some() {
            return Ok(());
        }
        let why = format!("UDP port {} has no address of the fabric", addr.port());
        let mend = format!("write 49152 to 65535: {}:50000", self.text());
        Err(self.refuse(libc::EINVAL, why, mend))
    }

    /// The local address to use, and its interface.
    fn local_address(&self) -> Result<LocalAddress, OpenError> {
        let here = addresses();
        let asked: Option<IpAddr> = self.host.parse().ok();
        let found = match asked {
            Some(asked) => here.iter().find(|(_, ip)| *ip == asked).cloned(),
            None => on_interface(&here, &self.host, self.is_v6),
        };
        let Some((name, ip)) = found else { return Err(self.no_place(asked, &here)) };
        let link = links().into_iter().find(|link| link.name == name);
        if link.as_ref().is_some_and(|link| !link.is_up) {
            let mend = format!("ip link set {name} up");
            return Err(self.refuse(libc::ENETDOWN, format!("interface {name} is down"), mend));
        }
        Ok(LocalAddress { ip, link })
    }

    fn no_place(&self, asked: Option<IpAddr>, here: &[(String, IpAddr)]) -> OpenError {
        let version = if self.is_v6 { "IPv6" } else { "IPv4" };
        let fit = here.iter().filter(|(_, ip)| ip.is_ipv6() == self.is_v6);
        let list: Vec<String> =
            fit.map(|(name, ip)| format!("{} ({name})", host_text(*ip))).collect();
        let mend = match list.is_empty() {
            true => "give it one of the fabric's: ip addr add ADDRESS/96 dev INTERFACE".to_owned(),
            false => format!("this host has {}; write udp:ADDRESS", list.join(", ")),
        };
        let why = match asked {
            Some(IpAddr::V6(ip)) if ip.is_unicast_link_local() => {
                "an address of one link, which others do not reach".to_owned()
            }
            Some(_) => "no interface of this host has that address".to_owned(),
            None => format!("neither an {version} address nor an interface with one"),
        };
        self.refuse(libc::EADDRNOTAVAIL, why, mend)
    }

    fn mtu(&self, place: &LocalAddress) -> Result<usize, OpenError> {
        let max = place.mtu_max();
        OpenError::check_mtu(self.mtu.unwrap_or(max), max)
    }

    /// Enables busy polling, if it was asked for.
    fn set_busy_poll(&self, fd: RawFd) -> Result<(), OpenError> {
        if !self.busy_poll {
            return Ok(());
        }
        super::busy_poll(fd).map_err(|e| match e.raw_os_error() {
            Some(libc::EPERM) => {
                let mend = "sudo setcap cap_net_admin+ep PROGRAM, run it as root, or leave it out";
                self.refuse(libc::EACCES, "busypoll=yes needs CAP_NET_ADMIN", mend)
            }
            _ => self.os("the kernel has no busy polling", &e),
        })
    }

    /// Binds the socket to the address and the named UDP port, or the first free one.
    fn bind(&self, fd: RawFd, place: &LocalAddress) -> Result<SocketAddr, OpenError> {
        if let Some(port) = self.port {
            self.check_port(place.at(port))?;
        }
        for port in self.port.map_or(DEFAULT_PORTS, |port| port..=port) {
            let addr = place.at(port);
            match SockAddr::of(addr).bind(fd) {
                Ok(()) => return Ok(addr),
                Err(e) if e.raw_os_error() == Some(libc::EADDRINUSE) => {}
                // Duplicate address detection is in progress or has failed (RFC 4862).
                Err(e) if self.is_v6 && e.raw_os_error() == Some(libc::EADDRNOTAVAIL) => {
                    let why = format!("the kernel does not use {} yet, or not any more", place.ip);
                    return Err(self.refuse(libc::EADDRNOTAVAIL, why, ADVICE_UNUSED));
                }
                Err(e) => return Err(self.os("cannot bind the socket", &e)),
            }
        }
        let (why, mend) = match self.port {
            Some(port) => (
                format!("UDP port {port} is in use by another process"),
                format!("choose another or none, see: ss -ulnp sport = :{port}"),
            ),
            None => (
                format!(
                    "UDP ports {} to {} are all in use",
                    DEFAULT_PORTS.start(),
                    DEFAULT_PORTS.end()
                ),
                format!("name another, 49152 to 65535: {}:50000", self.text()),
            ),
        };
        Err(self.refuse(libc::EADDRINUSE, why, mend))
    }
}

/// The IP address that the host of a [`UdpSettings`] names, or that of the named interface.
pub fn address_of(host: &str, is_v6: bool) -> Option<IpAddr> {
    host.parse().ok().or_else(|| Some(on_interface(&addresses(), host, is_v6)?.1))
}

/// The first address in `here` of the interface with this name or alternative name.
fn on_interface(here: &[(String, IpAddr)], name: &str, is_v6: bool) -> Option<(String, IpAddr)> {
    let of = |name: &str| here.iter().find(|(on, ip)| on == name && ip.is_ipv6() == is_v6).cloned();
    of(name).or_else(|| of(&link_by_alt_name(name)?.name))
}

/// Advice on an address that the kernel has but does not use.
pub(super) const ADVICE_UNUSED: &str =
    "see whether it is tentative or dadfailed: ip -6 addr; try again in two seconds";

/// Reserves `addr`, so that no other socket gets it and the kernel does not reply "port
/// unreachable" to datagrams. The socket receives nothing. `None`: the kernel has no such address.
///
/// # Errors
/// `EADDRINUSE`: a socket has it. `EADDRNOTAVAIL`: the kernel has the address and does not use it
/// yet, or not any more (RFC 4862).
pub(super) fn reserve_port(addr: SocketAddr) -> io::Result<Option<NotInChildren>> {
    let fd = match super::socket(family(addr.ip()), libc::SOCK_DGRAM, 0) {
        Err(e) if e.raw_os_error() == Some(libc::EAFNOSUPPORT) => return Ok(None),
        made => made?,
    };
    let code = (libc::BPF_RET | libc::BPF_K) as u16;
    filter::attach(fd.as_raw_fd(), vec![libc::sock_filter { code, jt: 0, jf: 0, k: 0 }])?;
    match SockAddr::of(addr).bind(fd.as_raw_fd()) {
        Ok(()) => Ok(Some(fd.into())),
        Err(e) if e.raw_os_error() == Some(libc::EADDRNOTAVAIL) => {
            let is_there = addresses().iter().any(|(_, ip)| *ip == addr.ip());
            if is_there { Err(e) } else { Ok(None) }
        }
        Err(e) => Err(e),
    }
}

/// A socket for `ip` whose datagrams have `tos` as the byte with DSCP and ECN, and are not
/// fragmented.
fn socket(ip: IpAddr, tos: u8) -> io::Result<NotInChildren> {
    let fd = super::socket(family(ip), libc::SOCK_DGRAM | libc::SOCK_NONBLOCK, 0)?;
    let at = fd.as_raw_fd();
    for buffer in [super::RECEIVE_BUFFER, super::SEND_BUFFER] {
        super::enlarge(at, buffer, BUFFER_LEN)?;
    }
    let (level, options) = match ip {
        IpAddr::V4(_) => (
            libc::IPPROTO_IP,
            [
                (libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO),
                (libc::IP_TOS, tos.into()),
                (libc::IP_RECVTOS, 1),
            ],
        ),
        IpAddr::V6(_) => (
            libc::IPPROTO_IPV6,
            [
                (libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO),
                (libc::IPV6_TCLASS, tos.into()),
                (libc::IPV6_RECVTCLASS, 1),
            ],
        ),
    };
    for (option, value) in options {
        set_option::<libc::c_int>(at, level, option, &value)?;
    }
    Ok(fd.into())
}

/// See the module's documentation.
pub struct Udp {
    caps: PortCaps,
    prefix: Prefix,
    frame_max: usize,
    batch: Batch,
    rx_batch: RxBatch,
    /// Consecutive polls have had frames: receive several datagrams per call.
    in_bulk: bool,
    last_had_frames: bool,
    counters: PortCounters,
    /// Errors that have been logged.
    logged_errnos: Vec<i32>,
    shared: Arc<Shared>,
}

impl fmt::Debug for Udp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Udp").field(&self.caps.name).finish()
    }
}

impl Udp {
    /// Opens a port at an address of this host.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub fn open(settings: &UdpSettings) -> Result<Self, OpenError> {
        let place = settings.local_address()?;
        let (mtu, mtu_max) = (settings.mtu(&place)?, place.mtu_max());
        settings.check_dscp()?;
        let os = |e: io::Error| settings.os("cannot make a UDP socket", &e);
        let socket = socket(place.ip, tos_of(settings.dscp, settings.ecn)).map_err(os)?;
        settings.set_busy_poll(socket.as_raw_fd())?;
        let addr = settings.bind(socket.as_raw_fd(), &place)?;
        let prefix = Prefix::of(place.ip);
        let mac = prefix.mac_of(addr).expect("a UDP port without an address was refused");
        let bell = WakeEvent::new().map_err(os)?;
        // Since Linux 5.0; without GRO every datagram is one frame.
        let has_gro = set_option(socket.as_raw_fd(), libc::SOL_UDP, libc::UDP_GRO, &1).is_ok();
        let frame_max = ETH_HDR_LEN + mtu;
        let caps = PortCaps {
            rto_floor_ns: 1_000_000,
            via_kernel: true,
            link_bps: place.link.map_or(0, |link| link.bps),
            ..PortCaps::new(mac, mtu, format!("udp:{}:{}", host_text(place.ip), addr.port()))
        };
        tracing::debug!(port = %caps.name, %mac, mtu, "opened");
        Ok(Self {
            caps,
            prefix,
            frame_max,
            batch: Batch::udp(frame_max, ETH_HDR_LEN + mtu_max),
            rx_batch: RxBatch::new(frame_max, has_gro),
            in_bulk: false,
            last_had_frames: false,
            counters: PortCounters::default(),
            logged_errnos: Vec::new(),
            shared: Arc::new(Shared { sockets: vec![socket], monitor: None, bell, arp: None }),
        })
    }

    /// Sends queued frames, as far as the kernel has room.
    fn push(&mut self) {
        let fd = self.shared.sockets[0].as_raw_fd();
        while let Err(e) = self.batch.send(fd) {
            match e.raw_os_error().unwrap_or(libc::EIO) {
                libc::EINTR => {}
                libc::EAGAIN | libc::ENOBUFS => return,
                errno => {
                    self.log_once(errno);
                    self.batch.drop_first();
                    self.counters.tx_dropped += 1;
                }
            }
        }
    }

    /// Logs each kind of send error once, with advice.
    #[cold]
    fn log_once(&mut self, errno: i32) {
        if self.logged_errnos.contains(&errno) {
            return;
        }
        self.logged_errnos.push(errno);
        let (port, error) = (&self.caps.name, io::Error::from_raw_os_error(errno));
        let to = self.batch.first_destination().and_then(|name| name.addr());
        let to = to.map_or_else(String::new, |to| to.to_string());
        let mend = match errno {
            libc::EMSGSIZE => "the path there carries less; open the port with a smaller mtu=",
            libc::EPERM => "a rule of this host's firewall drops it, see: nft list ruleset",
            _ => "see: ip route get ADDRESS",
        };
        tracing::warn!(%port, %to, %error, "frames are refused and lost; {mend}");
    }

    /// Whether a frame received from `from` is of the fabric, to this station, and from the station
    /// at `from`.
    fn is_valid(&self, frame: &RxFrame<'_>, from: &SockAddr) -> bool {
        let Some(head) = frame.first_chunk::<ETH_HDR_LEN>() else { return false };
        let from = from.addr().and_then(|from| self.prefix.mac_of(from));
        let source = from.is_some_and(|mac| head[6..12] == mac.0);
        frame.len() <= self.frame_max
            && source
            && head[..6] == self.caps.station.mac.0
            && head[12..] == ETHERTYPE.to_be_bytes()
    }
}

/// Received datagrams. The kernel may have coalesced several frames of one sender into one
/// (UDP_GRO, udp(7), Linux 5.0), of equal length but for a shorter last.
struct RxBatch {
    bytes: Box<[u8]>,
    slot_len: usize,
    names: Box<[SockAddr; BURST]>,
    datagrams: [Datagram; BURST],
    /// Number of datagrams, and the next frame: its datagram and offset, bytes.
    count: usize,
    next: (usize, usize),
}

/// A datagram in its slot.
#[derive(Clone, Copy, Default)]
struct Datagram {
    len: usize,
    /// Length of each frame in it but the last.
    frame_len: usize,
    /// A router has marked it. The kernel coalesces only datagrams with equal marks.
    marked: bool,
}

/// Room for two control messages, as cmsg(3) lays them out: each of an `int` or of a byte.
type Control = [u64; 8];

impl RxBatch {
    fn new(frame_max: usize, has_gro: bool) -> Self {
        let longest = if has_gro { DATAGRAM_MAX } else { frame_max };
        // Odd in cache lines: the first lines of slots a power of two apart share one set.
        let slot_len = longest.next_multiple_of(128) + 64;
        let (names, datagrams) =
            (Box::new([SockAddr::unspecified(); BURST]), [Datagram::default(); BURST]);
        let bytes = vec![0; slot_len * BURST].into();
        Self { bytes, slot_len, names, datagrams, count: 0, next: (0, 0) }
    }

    fn is_empty(&self) -> bool {
        self.next.0 >= self.count
    }

    /// The next frame, if one is left: its datagram and its range of bytes, which is empty if the
    /// datagram was truncated or its segment length is unknown.
    fn take(&mut self) -> Option<(usize, Range<usize>)> {
        let (slot, at) = self.next;
        if slot >= self.count {
            return None;
        }
        let Datagram { len, frame_len, .. } = self.datagrams[slot];
        let end = len.min(at + frame_len);
        self.next = if end < len { (slot, end) } else { (slot + 1, 0) };
        let base = slot * self.slot_len;
        let whole = len <= self.slot_len;
        Some((slot, if whole { base + at..base + end } else { base..base }))
    }

    /// The frame in these bytes, of the datagram `from`.
    fn frame(&self, from: usize, bytes: Range<usize>) -> RxFrame<'_> {
        RxFrame::new(&self.bytes[bytes]).with_mark(self.datagrams[from].marked)
    }

    /// Receives up to `max` datagrams (at least 1), after all frames before were taken.
    fn receive(&mut self, fd: RawFd, max: usize) {
        (self.count, self.next) = (0, (0, 0));
        let got = if max == 1 { self.recv_one(fd) } else { self.recv_many(fd, max) };
        self.count = got;
    }

    fn recv_one(&mut self, fd: RawFd) -> usize {
        let mut control = Control::default();
        // SAFETY: zeros are an `msghdr`.
        let mut head: libc::msghdr = unsafe { std::mem::zeroed() };
        let slot = &mut self.bytes[..self.slot_len];
        let mut iov = libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: slot.len() };
        prepare(&mut head, &mut iov, &mut self.names[0], &mut control);
        // SAFETY: `recvmsg` writes one slot of `bytes`, one of `names` and the control message,
        // all of which live across the call.
        let got = unsafe { libc::recvmsg(fd, &raw mut head, RECEIVE) };
        // No datagram, or an error of a sent one, which the fabric detects as a loss.
        let Ok(len) = usize::try_from(got) else { return 0 };
        self.datagrams[0] = Datagram::of(len, &head);
        1
    }

    fn recv_many(&mut self, fd: RawFd, max: usize) -> usize {
        let mut controls = [Control::default(); BURST];
        // SAFETY: zeros are an `iovec` and an `mmsghdr`.
        let (mut iovs, mut msgs): ([libc::iovec; BURST], [libc::mmsghdr; BURST]) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        for (i, slot) in self.bytes.chunks_exact_mut(self.slot_len).enumerate().take(max) {
            iovs[i] = libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: slot.len() };
            let head = &mut msgs[i].msg_hdr;
            prepare(head, &mut iovs[i], &mut self.names[i], &mut controls[i]);
        }
        let (count, none) = (max.min(BURST) as u32, std::ptr::null_mut());
        // SAFETY: `recvmmsg` writes `count` headers at most, each with one slot of `bytes`, one of
        // `names` and one control message, all of which live across the call; no timeout.
        let got = unsafe { libc::recvmmsg(fd, msgs.as_mut_ptr(), count, RECEIVE as _, none) };
        let got = usize::try_from(got).unwrap_or(0);
        for (datagram, msg) in self.datagrams.iter_mut().zip(&msgs[..got]) {
            *datagram = Datagram::of(msg.msg_len as usize, &msg.msg_hdr);
        }
        got
    }
}

const RECEIVE: libc::c_int = libc::MSG_DONTWAIT | libc::MSG_TRUNC;

/// Prepares `head` for the reception of a datagram.
fn prepare(
    head: &mut libc::msghdr,
    iov: &mut libc::iovec,
    name: &mut SockAddr,
    control: &mut Control,
) {
    (head.msg_iov, head.msg_iovlen) = (iov, 1);
    head.msg_name = std::ptr::from_mut(name).cast();
    head.msg_namelen = SockAddr::LEN_MAX;
    head.msg_control = control.as_mut_ptr().cast();
    head.msg_controllen = size_of::<Control>();
}

impl Datagram {
    /// A datagram of `len` bytes, with the control messages of `head`.
    fn of(len: usize, head: &libc::msghdr) -> Self {
        if head.msg_flags & libc::MSG_CTRUNC != 0 {
            return Self { len: usize::MAX, frame_len: usize::MAX, marked: false };
        }
        let (mut frame_len, mut marked) = (0, false);
        // SAFETY: `head` is one that the kernel has filled in, whose control messages live.
        // `CMSG_FIRSTHDR` and `CMSG_NXTHDR` point to a whole header or nowhere; that of UDP_GRO has
        // an `int` behind it, that of IP_TOS a byte, that of IPV6_TCLASS an `int` (udp(7), ip(7),
        // RFC 3542).
        unsafe {
            let mut at = libc::CMSG_FIRSTHDR(head);
            while let Some(message) = at.as_ref() {
                match (message.cmsg_level, message.cmsg_type) {
                    (libc::SOL_UDP, libc::UDP_GRO) => {
                        frame_len = libc::CMSG_DATA(at).cast::<libc::c_int>().read_unaligned();
                    }
                    (libc::IPPROTO_IP, libc::IP_TOS) => marked = *libc::CMSG_DATA(at) & CE == CE,
                    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                        let class = libc::CMSG_DATA(at).cast::<libc::c_int>().read_unaligned();
                        marked = class as u8 & CE == CE;
                    }
                    _ => {}
                }
                at = libc::CMSG_NXTHDR(head, at);
            }
        }
        // A segment length of 0 would never end.
        let frame_len = usize::try_from(frame_len).unwrap_or(0);
        Self { len, frame_len: if frame_len == 0 { usize::MAX } else { frame_len }, marked }
    }
}

impl Port for Udp {
    fn caps(&self) -> &PortCaps {
        &self.caps
    }

    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        let len = frame.len();
        assert!(frame.head.len() >= ETH_HDR_LEN && len <= self.frame_max, "frame of {len} bytes");
        let to = match self.prefix.addr_of(frame.dst().mac) {
            Some(to) => to,
            None if frame.dst().is_group() => {
                // There is no list of all stations.
                self.counters.tx_dropped += 1;
                return Ok(Tx::Sent);
            }
            None => {
                self.counters.tx_no_route += 1;
                return Ok(Tx::NoRoute);
            }
        };
        if self.batch.is_full() {
            self.push();
            if self.batch.is_full() {
                self.counters.tx_full += 1;
                return Ok(Tx::Full);
            }
        }
        self.batch.push(frame, Some(SockAddr::of(to)));
        self.counters.sent(len);
        Ok(Tx::Sent)
    }

    fn flush(&mut self) -> Result<(), PortGone> {
        self.push();
        Ok(())
    }

    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        if !self.batch.is_empty() {
            self.push();
        }
        let max = max.min(BURST);
        if max > 0 && self.rx_batch.is_empty() {
            let fd = self.shared.sockets[0].as_raw_fd();
            self.rx_batch.receive(fd, if self.in_bulk { max } else { 1 });
            let has_frames = !self.rx_batch.is_empty();
            // In a ping-pong every frame is followed by empty polls, and a call for one datagram is
            // cheaper; in a stream it is not.
            self.in_bulk = has_frames && (self.in_bulk || self.last_had_frames);
            self.last_had_frames = has_frames;
        }
        let mut lent = [const { (0, 0..0) }; BURST];
        let mut count = 0;
        while count < max
            && let Some((from, bytes)) = self.rx_batch.take()
        {
            let frame = self.rx_batch.frame(from, bytes.clone());
            if self.is_valid(&frame, &self.rx_batch.names[from]) {
                sink.prefetch(&frame);
                lent[count] = (from, bytes);
                count += 1;
            } else {
                self.counters.rx_dropped += 1;
            }
        }
        for (from, bytes) in &lent[..count] {
            let frame = self.rx_batch.frame(*from, bytes.clone());
            self.counters.received(frame.len());
            sink.frame(&frame);
        }
        Ok(count)
    }

    fn counters(&self) -> PortCounters {
        self.counters
    }

    fn station(&self, station: Station) -> Option<String> {
        self.prefix.addr_of(station.mac).map(|addr| addr.to_string())
    }

    fn waiter(&self) -> Option<Arc<dyn PortWaiter>> {
        Some(Arc::new(Waiter(Arc::clone(&self.shared))))
    }

    fn next_deadline_ns(&self) -> Option<u64> {
        (!self.batch.is_empty()).then(|| now_ns() + RETRY_NS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::MacAddr;
    use std::net::Ipv4Addr;
    use std::time::{Duration, Instant};

    const V4: &str = "127.0.0.1";

    fn open(host: &str) -> Udp {
        Udp::open(&UdpSettings::at(host)).unwrap()
    }

    /// Addresses of this host, of each version of IP that it has.
    fn hosts() -> impl Iterator<Item = &'static str> {
        let has_v6 = addresses().iter().any(|(_, ip)| *ip == std::net::Ipv6Addr::LOCALHOST);
        [V4, "::1"].into_iter().take(if has_v6 { 2 } else { 1 })
    }

    fn frame(to: MacAddr, from: MacAddr, ty: u16, payload: &[u8]) -> Vec<u8> {
        [&to.0[..], &from.0, &ty.to_be_bytes(), payload].concat()
    }

    /// Frames that arrive until none has for a while.
    fn drain(port: &mut Udp) -> Vec<Vec<u8>> {
        let mut got = Vec::new();
        let mut last = Instant::now();
        while last.elapsed() < Duration::from_millis(50) {
            let mut sink = |f: &RxFrame<'_>| {
                let mut bytes = vec![0; f.len()];
                assert!(f.copy_to(0, &mut bytes));
                got.push(bytes);
            };
            if port.rx_burst(64, &mut sink).unwrap() > 0 {
                last = Instant::now();
            }
        }
        got
    }

    #[test]
    fn frames_arrive_one_by_one_and_in_bulk() {
        for host in hosts() {
            let (mut a, mut b) = (open(host), open(host));
            let (from, to) = (a.caps().station.mac, b.caps().station.mac);
            let mtu = if host == V4 { MTU_MAX } else { 65_536 - 62 };
            assert_eq!(a.caps().mtu, mtu);
            let sent: Vec<_> = (0..100_u8)
                .map(|i| frame(to, from, ETHERTYPE, &vec![i; 1 + 19 * usize::from(i)]))
                .collect();
            for (i, frame) in sent.iter().enumerate() {
                assert_eq!(a.tx(&TxFrame::whole(frame)), Ok(Tx::Sent));
                if i == 0 {
                    a.flush().unwrap();
                }
            }
            a.flush().unwrap();
            assert_eq!(drain(&mut b), sent);
            let long = frame(to, from, ETHERTYPE, &vec![7; mtu]);
            assert_eq!(a.tx(&TxFrame::whole(&long)), Ok(Tx::Sent));
            a.flush().unwrap();
            assert!(drain(&mut b) == [long]);
            let nobody = frame(MacAddr([0, 1, 2, 3, 4, 5]), from, ETHERTYPE, b"x");
            assert_eq!(a.tx(&TxFrame::whole(&nobody)), Ok(Tx::NoRoute));
            let all = frame(MacAddr::BROADCAST, from, ETHERTYPE, b"x");
            assert_eq!((a.tx(&TxFrame::whole(&all)), a.counters().tx_dropped), (Ok(Tx::Sent), 1));
        }
    }

    /// Goal: frames of equal length travel as one datagram on a path with GSO and GRO, and arrive
    /// on one without, and no poll returns more than requested.
    #[test]
    fn frames_of_one_length_travel_together() {
        for host in hosts() {
            let (mut a, mut b) = (open(host), open(host));
            let (from, to) = (a.caps().station.mac, b.caps().station.mac);
            let sent: Vec<_> = (0..20_u8).map(|i| frame(to, from, ETHERTYPE, &[i; 500])).collect();
            let send = |a: &mut Udp| {
                sent.iter()
                    .for_each(|frame| assert_eq!(a.tx(&TxFrame::whole(frame)), Ok(Tx::Sent)));
                a.flush().unwrap();
            };
            send(&mut a);
            b.rx_batch.receive(b.shared.sockets[0].as_raw_fd(), BURST);
            assert_eq!((b.rx_batch.count, b.rx_batch.datagrams[0].frame_len), (1, 514));
            let mut got = Vec::new();
            for asked in [3, 1, 0, 16] {
                let mut sink = |f: &RxFrame<'_>| {
                    got.push(vec![0; f.len()]);
                    assert!(f.copy_to(0, got.last_mut().unwrap()));
                };
                assert_eq!(b.rx_burst(asked, &mut sink), Ok(asked));
            }
            assert_eq!(got, sent);
            // As with a device without checksum offload.
            let fd = a.shared.sockets[0].as_raw_fd();
            if host == V4 {
                set_option(fd, libc::SOL_SOCKET, libc::SO_NO_CHECK, &1).unwrap();
            } else {
                // UDP_NO_CHECK6_TX and UDP_NO_CHECK6_RX, of linux/udp.h.
                set_option(fd, libc::SOL_UDP, 101, &1).unwrap();
                set_option(b.shared.sockets[0].as_raw_fd(), libc::SOL_UDP, 102, &1).unwrap();
            }
            send(&mut a);
            b.rx_batch.receive(b.shared.sockets[0].as_raw_fd(), BURST);
            assert_eq!(b.rx_batch.count, 20);
            assert_eq!(drain(&mut b), sent);
        }
    }

    /// Goal: a datagram of several frames is longer than any frame, so that a receiver recognizes
    /// one that was not segmented. Method: as on an interface with an MTU of 1,500 bytes.
    #[test]
    fn frames_that_travel_together_are_longer_than_one() {
        let (mut a, mut b) = (open(V4), open(V4));
        let (from, to) = (a.caps().station.mac, b.caps().station.mac);
        a.batch = Batch::udp(1472, 1472);
        for (count, len, datagrams) in [(2, 736, 2), (2, 737, 1), (24, 60, 24), (25, 60, 1)] {
            let frame = frame(to, from, ETHERTYPE, &vec![7; len - ETH_HDR_LEN]);
            for _ in 0..count {
                assert_eq!(a.tx(&TxFrame::whole(&frame)), Ok(Tx::Sent));
            }
            a.flush().unwrap();
            b.rx_batch.receive(b.shared.sockets[0].as_raw_fd(), BURST);
            assert_eq!(b.rx_batch.count, datagrams, "{count} of {len}");
            assert_eq!(drain(&mut b), vec![frame; count]);
        }
    }

    /// Goal: a short frame among long ones does not split the datagram: it arrives padded with
    /// zeros. One among few does, since the padding would cost more.
    #[test]
    fn a_short_frame_travels_with_long_ones() {
        let (mut a, mut b) = (open(V4), open(V4));
        let (from, to) = (a.caps().station.mac, b.caps().station.mac);
        for (count, short_at, datagrams) in [(30, 1, 1), (30, 29, 1), (30, 0, 2), (5, 1, 2)] {
            let mut sent = Vec::new();
            for i in 0..count {
                // The slot's old content is longer, and is not sent.
                let payload = vec![0xee; if i == short_at { 50 } else { 500 }];
                sent.push(frame(to, from, ETHERTYPE, &payload));
                assert_eq!(a.tx(&TxFrame::whole(&sent[i])), Ok(Tx::Sent));
            }
            a.flush().unwrap();
            b.rx_batch.receive(b.shared.sockets[0].as_raw_fd(), BURST);
            assert_eq!(b.rx_batch.count, datagrams, "{count}, {short_at}");
            assert!(are_padded(&drain(&mut b), &sent));
        }
    }

    /// Whether the received frames are the sent ones, padded with zeros.
    fn are_padded(got: &[Vec<u8>], sent: &[Vec<u8>]) -> bool {
        let is_padded = |(got, sent): (&Vec<u8>, &Vec<u8>)| {
            got.strip_prefix(sent.as_slice()).is_some_and(|rest| rest.iter().all(|&b| b == 0))
        };
        got.len() == sent.len() && got.iter().zip(sent).all(is_padded)
    }

    /// Goal: each frame of a marked datagram is marked, and no other.
    #[test]
    fn frames_of_marked_datagrams_are_marked() {
        for (host, (level, option)) in
            hosts().zip([(libc::IPPROTO_IP, libc::IP_TOS), (libc::IPPROTO_IPV6, libc::IPV6_TCLASS)])
        {
            let (mut a, mut b) = (open(host), open(host));
            let (from, to) = (a.caps().station.mac, b.caps().station.mac);
            let fd = a.shared.sockets[0].as_raw_fd();
            for (tos, marked) in [(2_i32, false), (0, false), (1, false), (3, true), (0xbb, true)] {
                set_option(fd, level, option, &tos).unwrap();
                for count in [1, 20] {
                    let frame = frame(to, from, ETHERTYPE, &[7; 500]);
                    let sent = (0..count).map(|_| a.tx(&TxFrame::whole(&frame)));
                    sent.for_each(|sent| assert_eq!(sent, Ok(Tx::Sent)));
                    a.flush().unwrap();
                    let mut got = Vec::new();
                    while got.len() < count {
                        let mut sink = |f: &RxFrame<'_>| got.push(f.is_marked());
                        assert_ne!(b.rx_burst(32, &mut sink), Ok(0));
                    }
                    assert_eq!(got, vec![marked; count], "{host}: {tos}");
                }
            }
        }
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(48))]

        /// Goal: for any lengths and destinations, each destination receives its frames whole and
        /// in order.
        #[test]
        fn gso_keeps_every_frame_whole_and_in_order(
            frames in proptest::collection::vec((0..2_usize, 0..30_usize), 1..120),
            cut in 1..40_usize,
            version in 0..2_usize,
        ) {
            let host = hosts().nth(version).unwrap_or(V4);
            let (mut a, mut to) = (open(host), [open(host), open(host)]);
            let (from, mut sent) = (a.caps().station.mac, [Vec::new(), Vec::new()]);
            for (i, &(place, len)) in frames.iter().enumerate() {
                let payload = vec![1 + i as u8; *[1, 699, 20].get(len).unwrap_or(&700)];
                let frame = frame(to[place].caps().station.mac, from, ETHERTYPE, &payload);
                assert_eq!(a.tx(&TxFrame::whole(&frame)), Ok(Tx::Sent));
                sent[place].push(frame);
                if i % cut == 0 {
                    a.flush().unwrap();
                }
            }
            a.flush().unwrap();
            for (port, sent) in to.iter_mut().zip(sent) {
                let mut got = Vec::new();
                while got.len() < sent.len() {
                    let mut sink = |f: &RxFrame<'_>| {
                        let mut bytes = vec![0; f.len()];
                        assert!(f.copy_to(0, &mut bytes));
                        got.push(bytes);
                    };
                    // On `lo` frames have arrived when the call returns.
                    assert_ne!(port.rx_burst(5, &mut sink), Ok(0), "frames are missing");
                }
                assert!(are_padded(&got, &sent));
            }
        }
    }

    /// Goal: only frames to this station whose source encodes the datagram's sender are accepted.
    #[test]
    fn frames_with_a_forged_source_are_dropped() {
        let (a, mut b) = (open(V4), open(V4));
        let (from, to) = (a.caps().station.mac, b.caps().station.mac);
        let at = addr_of(to).unwrap();
        let liar = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let outside = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let good = frame(to, from, ETHERTYPE, &[1; 50]);
        liar.send_to(&good, at).unwrap();
        outside.send_to(&[], at).unwrap();
        outside.send_to(&good[..13], at).unwrap();
        let honest = mac_of(match liar.local_addr().unwrap() {
            std::net::SocketAddr::V4(addr) => addr,
            std::net::SocketAddr::V6(_) => unreachable!(),
        });
        let mut dropped = 3;
        // The kernel gives out ports from below ours as well.
        if let Some(honest) = honest {
            liar.send_to(&frame(from, honest, ETHERTYPE, &[1; 50]), at).unwrap();
            liar.send_to(&frame(to, honest, 0x0806, &[1; 50]), at).unwrap();
            dropped += 2;
            let fine = frame(to, honest, ETHERTYPE, &[1; 50]);
            liar.send_to(&fine, at).unwrap();
            assert_eq!(drain(&mut b), [fine]);
        } else {
            assert!(drain(&mut b).is_empty());
        }
        let long = vec![1; DATAGRAM_MAX - IPV4_LEN];
        let mut short =
            Udp::open(&UdpSettings { mtu: Some(256), ..UdpSettings::at("lo") }).unwrap();
        liar.send_to(&long, addr_of(short.caps().station.mac).unwrap()).unwrap();
        assert!(drain(&mut short).is_empty());
        assert_eq!((b.counters().rx_dropped, short.counters().rx_dropped), (dropped, 1));
    }

    #[test]
    fn errors_of_opening_have_advice() {
        let why = |settings: UdpSettings| Udp::open(&settings).unwrap_err();
        let here = UdpSettings::at("127.0.0.1");
        let first = Udp::open(&UdpSettings { port: Some(60_001), ..here.clone() }).unwrap();
        let e = why(UdpSettings { port: Some(60_001), ..here.clone() });
        assert_eq!(e.errno(), libc::EADDRINUSE, "{e}");
        let e = why(UdpSettings { port: Some(80), ..here.clone() });
        assert!(e.errno() == libc::EINVAL && e.to_string().contains("49152 to 65535"), "{e}");
        let e = why(UdpSettings { mtu: Some(70_000), ..here });
        assert!(e.to_string().contains("65493"), "{e}");
        for host in ["192.0.2.1", "nothing0", "0.0.0.0"] {
            let e = why(UdpSettings::at(host));
            assert!(e.errno() == libc::EADDRNOTAVAIL && e.to_string().contains("127.0.0.1 (lo)"));
        }
        for host in ["2001:db8::1", "fe80::1", "nothing0"] {
            let e = why(UdpSettings { is_v6: true, ..UdpSettings::at(host) });
            let cure = if hosts().count() > 1 { "[::1]/96 (lo)" } else { "ip addr add" };
            assert!(e.errno() == libc::EADDRNOTAVAIL && e.to_string().contains(cure), "{e}");
        }
        drop(first);
    }

    #[test]
    fn a_waiter_returns_when_a_frame_comes_or_somebody_wakes_it() {
        let (mut a, b) = (open(V4), open(V4));
        let waiter = b.waiter().unwrap();
        let frame = frame(b.caps().station.mac, a.caps().station.mac, ETHERTYPE, b"x");
        let start = Instant::now();
        waiter.wake();
        waiter.wait(Duration::from_secs(20));
        assert_eq!(a.tx(&TxFrame::whole(&frame)), Ok(Tx::Sent));
        a.flush().unwrap();
        waiter.wait(Duration::from_secs(20));
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}
