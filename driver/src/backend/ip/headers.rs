//! The differences between IPv4 and IPv6: headers of datagrams, and control packets (ARP, neighbour
//! discovery, MLD).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4};
use std::ops::Deref;

use super::arp::{self, ARP_LEN, Arp, ETHERTYPE_ARP};
use super::datagram::{self, HEADERS_LEN, RejectReason, Template};
use super::datagram6::{self, HEADERS6_LEN, Template6};
use super::mld::{self, REPORT_LEN};
use super::ndp::{self, NDP_MAX, Ndp};
use crate::frame::{ETH_HDR_LEN, RxFrame};
use crate::port::MacAddr;

use super::super::inet::CE;

/// Bytes of the Ethernet, IP and UDP headers before a frame, for addresses of this IP version.
pub(super) fn headers_len(own_addr: SocketAddr) -> usize {
    if own_addr.is_ipv4() { HEADERS_LEN } else { HEADERS6_LEN }
}

/// Header template of a port's datagrams: all fields that do not depend on destination or length.
pub(super) enum Headers {
    V4(Template),
    V6(Template6),
}

impl Headers {
    /// Template for datagrams from `from` by the NIC with address `mac`. `tos` is the byte with
    /// DSCP and ECN.
    pub(super) fn new(mac: MacAddr, from: SocketAddr, ttl: u8, tos: u8) -> Self {
        match from {
            SocketAddr::V4(from) => Self::V4(Template::new(mac, from, ttl, tos)),
            SocketAddr::V6(from) => Self::V6(Template6::new(mac, from, ttl, tos)),
        }
    }

    /// Writes the headers of datagrams to `to`, a host of the port's prefix, by the next hop with
    /// MAC `hop`, without the lengths. `out` has the length of the headers. Returns the partial
    /// checksum for [`write_lengths`](Self::write_lengths).
    pub(super) fn write_destination(&self, out: &mut [u8], hop: MacAddr, to: SocketAddrV4) -> u16 {
        match self {
            Self::V4(template) => template.write_destination(as_long(out), hop, to),
            Self::V6(template) => {
                template.write_destination(as_long(out), hop, (*to.ip(), to.port()));
                0
            }
        }
    }

    /// Writes the lengths of a datagram with `len` bytes of payload, and IPv4's checksum, into
    /// headers from [`write_destination`](Self::write_destination).
    #[inline]
    pub(super) fn write_lengths(&self, out: &mut [u8], sum: u16, len: usize) {
        match self {
            Self::V4(_) => datagram::write_lengths(as_long(out), sum, len),
            Self::V6(_) => datagram6::write_lengths(as_long(out), len),
        }
    }

    /// Writes the headers of a datagram with `len` bytes of payload, without the UDP checksum:
    /// [`write_destination`](Self::write_destination) and
    /// [`write_lengths`](Self::write_lengths).
    pub(super) fn write(&self, out: &mut [u8], hop: MacAddr, to: SocketAddrV4, len: usize) {
        let sum = self.write_destination(out, hop, to);
        self.write_lengths(out, sum, len);
    }

    /// Writes the UDP checksum of a datagram with headers `head` and payload `payload`.
    pub(super) fn write_sum(&self, head: &mut [u8], payload: &[u8]) {
        match self {
            Self::V4(_) => datagram::write_sum(as_long(head), payload),
            Self::V6(_) => datagram6::write_sum(as_long(head), payload),
        }
    }
}

/// The first `N` bytes of a slice that has at least so many.
#[inline]
pub(super) fn as_long<const N: usize>(head: &mut [u8]) -> &mut [u8; N] {
    head.first_chunk_mut().expect("as long as the headers")
}

/// A validated datagram for this port.
pub(super) struct RxDatagram<'a> {
    /// Its source, a host of the port's prefix.
    pub(super) from: SocketAddrV4,
    /// Its payload, as a frame.
    pub(super) inside: RxFrame<'a>,
    /// A router has marked it: CE (RFC 3168).
    pub(super) marked: bool,
}

/// Validates a received frame as a datagram to `own_addr`.
#[inline]
pub(super) fn parse_datagram<'a>(
    frame: &RxFrame<'a>,
    own_addr: &SocketAddr,
) -> Result<RxDatagram<'a>, RejectReason> {
    match own_addr {
        SocketAddr::V4(to) => {
            let head = frame.first_chunk().ok_or(RejectReason::Foreign)?;
            let (from, len) = datagram::check(&head, frame.len(), to)?;
            let inside = frame.part(HEADERS_LEN, len).ok_or(RejectReason::Length)?;
            Ok(RxDatagram { from, inside, marked: datagram::is_marked(&head) })
        }
        SocketAddr::V6(to) => {
            let head = frame.first_chunk().ok_or(RejectReason::Foreign)?;
            let ((host, port), len) = datagram6::check(&head, frame.len(), to)?;
            let inside = frame.part(HEADERS6_LEN, len).ok_or(RejectReason::Length)?;
            let marked = datagram6::class(&head) & CE == CE;
            Ok(RxDatagram { from: SocketAddrV4::new(host, port), inside, marked })
        }
    }
}

/// A message of ARP or neighbour discovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NeighbourMessage {
    /// A request (neighbour solicitation) for `target`; else a reply (neighbour advertisement).
    pub(super) is_request: bool,
    /// The sender's MAC, never a group's, and its IP address, which is unspecified in a probe.
    pub(super) sender: (MacAddr, IpAddr),
    /// The address requested, or that of the host replied to; in an advertisement the sender's.
    pub(super) target: IpAddr,
    /// The sender's MAC replaces a cached one.
    pub(super) overrides: bool,
}

impl NeighbourMessage {
    /// Parses a message received by a port at `own_addr`. `None`: not a valid message of the IP
    /// version's protocol.
    pub(super) fn parse(frame: &RxFrame<'_>, own_addr: SocketAddr) -> Option<Self> {
        if own_addr.is_ipv4() {
            let head = frame.first_chunk::<ETH_HDR_LEN>()?;
            if head[12..] != ETHERTYPE_ARP.to_be_bytes() {
                return None;
            }
            let Arp { is_request, sender, target } =
                Arp::parse(&frame.chunk_at::<ARP_LEN>(ETH_HDR_LEN)?)?;
            let (sender, target) = ((sender.0, sender.1.into()), target.into());
            return Some(Self { is_request, sender, target, overrides: true });
        }
        let mut bytes = [0; NDP_MAX];
        let bytes = &mut bytes[..frame.len().min(NDP_MAX)];
        frame.copy_to(0, bytes);
        let Ndp { is_request, sender, target, overrides } = Ndp::parse(bytes)?;
        let (sender, target) = ((sender.0, sender.1.into()), target.into());
        Some(Self { is_request, sender, target, overrides })
    }
}

/// A frame with a packet of ARP, neighbour discovery or MLD.
pub(super) struct ControlPacket {
    bytes: [u8; REPORT_LEN],
    len: usize,
}

impl Deref for ControlPacket {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl ControlPacket {
    fn new(frame: &[u8]) -> Self {
        let mut bytes = [0; REPORT_LEN];
        bytes[..frame.len()].copy_from_slice(frame);
        Self { bytes, len: frame.len() }
    }

    /// A request by `own` for the MAC of `target`, to the station `to`, or to all.
    pub(super) fn request(own: (MacAddr, IpAddr), target: IpAddr, to: Option<MacAddr>) -> Self {
        match (own.1, target) {
            (IpAddr::V6(ip), IpAddr::V6(target)) => {
                Self::new(&ndp::solicitation((own.0, ip), target, to))
            }
            (ip, target) => Self::new(&arp::request((own.0, v4(ip)), v4(target), to)),
        }
    }

    /// A probe by `mac` for a duplicate of `ip` (RFC 5227, RFC 4862).
    pub(super) fn probe(mac: MacAddr, ip: IpAddr) -> Self {
        let nobody = match ip {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        Self::request((mac, nobody), ip, None)
    }

    /// An MLD report by `mac` of the solicited-node group of `ip`; `None` for IPv4. `anew`: `mac`
    /// joins the group.
    pub(super) fn report(mac: MacAddr, ip: IpAddr, anew: bool) -> Option<Self> {
        match ip {
            IpAddr::V4(_) => None,
            IpAddr::V6(ip) => Some(Self::new(&mld::report(mac, ip, anew))),
        }
    }

    /// A reply by `own` to `requester`.
    pub(super) fn reply(own: (MacAddr, IpAddr), requester: (MacAddr, IpAddr)) -> Self {
        match (own.1, requester.1) {
            (IpAddr::V6(ip), IpAddr::V6(to)) => {
                Self::new(&ndp::advertisement((own.0, ip), (requester.0, to)))
            }
            (ip, to) => Self::new(&arp::reply((own.0, v4(ip)), (requester.0, v4(to)))),
        }
    }

    /// An announcement by `own` to all (gratuitous ARP, unsolicited advertisement).
    pub(super) fn announcement(own: (MacAddr, IpAddr)) -> Self {
        match own.1 {
            IpAddr::V6(ip) => Self::new(&ndp::announcement((own.0, ip))),
            ip => Self::request(own, ip, None),
        }
    }
}

/// ARP carries IPv4 addresses only.
fn v4(ip: IpAddr) -> Ipv4Addr {
    super::super::inet::host_bits(ip)
}
