//! What differs between IPv4 and IPv6: headers of datagrams, and packets about neighbours.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4};
use std::ops::Deref;

use super::arp::{self, ARP_LEN, Arp, ETHERTYPE_ARP};
use super::datagram::{self, HEADERS_LEN, Refused, Template};
use super::datagram6::{self, HEADERS6_LEN, Template6};
use super::mld::{self, REPORT_LEN};
use super::ndp::{self, NDP_MAX, Ndp};
use crate::frame::{ETH_HDR_LEN, RxFrame};
use crate::port::MacAddr;

use super::super::inet::CE;

/// Bytes of the headers before a frame, with that of Ethernet, for places of this kind.
pub(super) fn headers_len(place: SocketAddr) -> usize {
    if place.is_ipv4() { HEADERS_LEN } else { HEADERS6_LEN }
}

/// The headers of all datagrams of a port, without what is each one's own.
pub(super) enum Headers {
    V4(Template),
    V6(Template6),
}

impl Headers {
    /// Headers of datagrams from `from`, by the NIC with the address `mac`. `tos` is the byte of
    /// DSCP and ECN.
    pub(super) fn new(mac: MacAddr, from: SocketAddr, ttl: u8, tos: u8) -> Self {
        match from {
            SocketAddr::V4(from) => Self::V4(Template::new(mac, from, ttl, tos)),
            SocketAddr::V6(from) => Self::V6(Template6::new(mac, from, ttl, tos)),
        }
    }

    /// Writes what the headers of all datagrams to `to`, behind the port's prefix, have in common,
    /// whose next hop has the address `hop`. `out` is as long as they are. Returns the sum that
    /// [`measure`](Self::measure) takes.
    pub(super) fn aim(&self, out: &mut [u8], hop: MacAddr, to: SocketAddrV4) -> u16 {
        match self {
            Self::V4(template) => template.aim(as_long(out), hop, to),
            Self::V6(template) => {
                template.aim(as_long(out), hop, (*to.ip(), to.port()));
                0
            }
        }
    }

    /// Writes what a datagram of `len` bytes has of its own into headers that were
    /// [aimed](Self::aim).
    #[inline]
    pub(super) fn measure(&self, out: &mut [u8], sum: u16, len: usize) {
        match self {
            Self::V4(_) => datagram::measure(as_long(out), sum, len),
            Self::V6(_) => datagram6::measure(as_long(out), len),
        }
    }

    /// Writes the headers of a datagram of `len` bytes: [`aim`](Self::aim) and
    /// [`measure`](Self::measure).
    pub(super) fn write(&self, out: &mut [u8], hop: MacAddr, to: SocketAddrV4, len: usize) {
        let sum = self.aim(out, hop, to);
        self.measure(out, sum, len);
    }

    /// Writes the sum of a datagram whose headers are `head` and whose payload is `payload`.
    pub(super) fn write_sum(&self, head: &mut [u8], payload: &[u8]) {
        match self {
            Self::V4(_) => datagram::write_sum(as_long(head), payload),
            Self::V6(_) => datagram6::write_sum(as_long(head), payload),
        }
    }
}

/// Headers in a slice, which is as long as they are or longer.
#[inline]
pub(super) fn as_long<const N: usize>(head: &mut [u8]) -> &mut [u8; N] {
    head.first_chunk_mut().expect("as long as the headers")
}

/// A datagram that was looked at.
pub(super) struct Seen<'a> {
    /// Its sender, behind the port's prefix.
    pub(super) from: SocketAddrV4,
    /// Its payload, as a frame.
    pub(super) inside: RxFrame<'a>,
    /// A router has marked it.
    pub(super) marked: bool,
}

/// Looks at a frame that may hold a datagram to `place`.
#[inline]
pub(super) fn look<'a>(frame: &RxFrame<'a>, place: &SocketAddr) -> Result<Seen<'a>, Refused> {
    match place {
        SocketAddr::V4(place) => {
            let head = frame.first_chunk().ok_or(Refused::Foreign)?;
            let (from, len) = datagram::check(&head, frame.len(), place)?;
            let inside = frame.part(HEADERS_LEN, len).ok_or(Refused::Length)?;
            Ok(Seen { from, inside, marked: datagram::is_marked(&head) })
        }
        SocketAddr::V6(place) => {
            let head = frame.first_chunk().ok_or(Refused::Foreign)?;
            let ((host, port), len) = datagram6::check(&head, frame.len(), place)?;
            let inside = frame.part(HEADERS6_LEN, len).ok_or(Refused::Length)?;
            let marked = datagram6::class(&head) & CE == CE;
            Ok(Seen { from: SocketAddrV4::new(host, port), inside, marked })
        }
    }
}

/// What a packet of ARP or of neighbour discovery says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Notice {
    /// It asks who has `target`; else it answers.
    pub(super) is_question: bool,
    /// The sender: its hardware address, of a single station, and its IP address, which is
    /// unspecified in a probe.
    pub(super) sender: (MacAddr, IpAddr),
    /// The address asked for, or of the host that is answered; in an IPv6 answer the sender's.
    pub(super) target: IpAddr,
    /// It replaces what was known of the sender.
    pub(super) overrides: bool,
}

impl Notice {
    /// What `frame` says to a port at `place`, if it is such a packet and can be true.
    pub(super) fn parse(frame: &RxFrame<'_>, place: SocketAddr) -> Option<Self> {
        if place.is_ipv4() {
            let head = frame.first_chunk::<ETH_HDR_LEN>()?;
            if head[12..] != ETHERTYPE_ARP.to_be_bytes() {
                return None;
            }
            let Arp { is_question, sender, target } =
                Arp::parse(&frame.chunk_at::<ARP_LEN>(ETH_HDR_LEN)?)?;
            let (sender, target) = ((sender.0, sender.1.into()), target.into());
            return Some(Self { is_question, sender, target, overrides: true });
        }
        let mut bytes = [0; NDP_MAX];
        let bytes = &mut bytes[..frame.len().min(NDP_MAX)];
        frame.copy_to(0, bytes);
        let Ndp { is_question, sender, target, overrides } = Ndp::parse(bytes)?;
        let (sender, target) = ((sender.0, sender.1.into()), target.into());
        Some(Self { is_question, sender, target, overrides })
    }
}

/// A frame with a packet about neighbours.
pub(super) struct Packet {
    bytes: [u8; REPORT_LEN],
    len: usize,
}

impl Deref for Packet {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Packet {
    fn new(frame: &[u8]) -> Self {
        let mut bytes = [0; REPORT_LEN];
        bytes[..frame.len()].copy_from_slice(frame);
        Self { bytes, len: frame.len() }
    }

    /// `own` asks who has `target`: everybody, or whoever had the address `of`.
    pub(super) fn question(own: (MacAddr, IpAddr), target: IpAddr, of: Option<MacAddr>) -> Self {
        match (own.1, target) {
            (IpAddr::V6(ip), IpAddr::V6(target)) => {
                Self::new(&ndp::question((own.0, ip), target, of))
            }
            (ip, target) => Self::new(&arp::question((own.0, v4(ip)), v4(target), of)),
        }
    }

    /// `mac` asks whether somebody has `ip` before it takes that.
    pub(super) fn probe(mac: MacAddr, ip: IpAddr) -> Self {
        let nobody = match ip {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        Self::question((mac, nobody), ip, None)
    }

    /// The NIC `mac` says that it hears questions for `ip`, which nobody has to say over IPv4.
    pub(super) fn report(mac: MacAddr, ip: IpAddr, anew: bool) -> Option<Self> {
        match ip {
            IpAddr::V4(_) => None,
            IpAddr::V6(ip) => Some(Self::new(&mld::report(mac, ip, anew))),
        }
    }

    /// `own` answers to `asker`.
    pub(super) fn answer(own: (MacAddr, IpAddr), asker: (MacAddr, IpAddr)) -> Self {
        match (own.1, asker.1) {
            (IpAddr::V6(ip), IpAddr::V6(to)) => Self::new(&ndp::answer((own.0, ip), (asker.0, to))),
            (ip, to) => Self::new(&arp::answer((own.0, v4(ip)), (asker.0, v4(to)))),
        }
    }

    /// `own` tells everybody where it is.
    pub(super) fn announcement(own: (MacAddr, IpAddr)) -> Self {
        match own.1 {
            IpAddr::V6(ip) => Self::new(&ndp::announcement((own.0, ip))),
            ip => Self::question(own, ip, None),
        }
    }
}

/// Packets of ARP are between IPv4 addresses alone.
fn v4(ip: IpAddr) -> Ipv4Addr {
    super::super::inet::host_bits(ip)
}
