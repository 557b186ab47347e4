//! A segment with arbitrary received frames, for the fuzz target `ip_port`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4};

use etherparse::checksum::Sum16BitWords;
use etherparse::{ArpOperation, Ipv4Header, LinkSlice, NetSlice, SlicedPacket, TransportSlice};

use super::super::inet::{Prefix, addr_of, mac_of};
use super::super::loopback::{Loopback, LoopbackSettings};
use super::datagram6::ETHERTYPE_IPV6;
use super::{AddressClaim, Ip, IpSettings, datagram::ETHERTYPE_IPV4, mld, ndp};
use crate::frame::{ETH_HDR_LEN, ETHERTYPE, RxFrame, TxFrame};
use crate::port::{MacAddr, Port, Tx};

/// The port's host, its UDP port, and a peer on the segment.
const HOST: [u8; 4] = [10, 9, 8, 1];
const UDP_PORT: u16 = 52_000;
const PEER: Ipv4Addr = Ipv4Addr::new(10, 9, 8, 2);
/// Frames that wait on the wire, at most.
const RING: usize = 8;
/// MTU of the wire, and of the frame inside: longer datagrams are coalesced ones.
const WIRE_MTU: usize = 1500;
const MTU: usize = 300;
/// Steps, and bytes of a frame, that are read of an input.
const STEPS: usize = 64;
const LEN_MAX: usize = ETH_HDR_LEN + WIRE_MTU;

/// Runs a port on the steps in `data`. The first byte selects IPv6 (bit 0) and a router (bit 1).
/// Then follow steps: a byte with the action, the length of a frame (16 bits, little-endian), and
/// the frame.
///
/// # Panics
/// If the port lends a frame that is not from its datagram's source to this station, replies more
/// often than requested, counts wrong, or stops to accept valid frames.
#[doc(hidden)]
pub fn fuzz_segment(data: &[u8]) {
    let Some((&kind, mut data)) = data.split_first() else { return };
    let mut segment = Segment::new(kind & 1 != 0, kind & 2 != 0);
    for _ in 0..STEPS {
        let [action, low, high, rest @ ..] = data else { break };
        let len = usize::from(u16::from_le_bytes([*low, *high])) % (LEN_MAX + 1);
        let (frame, rest) = rest.split_at(len.min(rest.len()));
        data = rest;
        match action & 7 {
            0..6 => segment.receive(frame, action & 8 != 0),
            6 => segment.send(frame),
            _ => segment.poll(),
        }
    }
    segment.end();
}

struct Segment {
    port: Ip,
    /// The other end of the wire: all other hosts.
    raw: Loopback,
    /// The NIC's MAC, and the station's.
    mac: MacAddr,
    station: MacAddr,
    prefix: Prefix,
    /// Sources of the datagrams that the port has received.
    senders: Vec<SocketAddrV4>,
    /// Received frames without a reply.
    unanswered: usize,
    /// Frames that the port has lent.
    lent: Vec<Vec<u8>>,
}

impl Segment {
    fn new(v6: bool, routed: bool) -> Self {
        let (prefix, len, router) = match v6 {
            true => {
                let router = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
                (Prefix::V6([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0]), 120, router.into())
            }
            false => (Prefix::V4, 24, IpAddr::from([10, 9, 8, 254])),
        };
        let address = prefix.ip(HOST.into());
        let gateway = routed.then_some(router);
        let settings = IpSettings { gateway, mtu: Some(MTU), ..IpSettings::at(address, len) };
        settings.check().expect("they make sense");
        let ring = LoopbackSettings { mtu: WIRE_MTU, ring_count: RING };
        let mut wire = Loopback::segment(2, ring);
        let (raw, inner) = (wire.pop().expect("two"), wire.pop().expect("two"));
        let mac = inner.caps().station.mac;
        let claim = AddressClaim::unclaimed(SocketAddr::new(address, UDP_PORT));
        let port =
            Ip::open_unprobed(&settings, claim, Box::new(inner)).expect("the wire carries it");
        let station = port.caps().station.mac;
        Self {
            port,
            raw,
            mac,
            station,
            prefix,
            senders: Vec::new(),
            unanswered: 0,
            lent: Vec::new(),
        }
    }

    /// The port receives `frame`, to its NIC or a group. `fix_sums`: with valid checksums.
    fn receive(&mut self, frame: &[u8], fix_sums: bool) {
        let mut frame = frame.to_vec();
        if frame.len() < ETH_HDR_LEN {
            return;
        }
        if frame[0] & 1 == 0 {
            frame[..6].copy_from_slice(&self.mac.0);
        }
        if fix_sums {
            fix_checksums(&mut frame);
        }
        self.senders.extend(sender(&frame, self.prefix));
        // Frames of a coalesced datagram are lent a few at a time, and the ring waits meanwhile.
        while self.raw.tx(&TxFrame::whole(&frame)) != Ok(Tx::Sent) {
            self.poll();
        }
        self.unanswered += 1;
        self.poll();
    }

    /// The port sends `frame` to the station in its first bytes, from its own.
    fn send(&mut self, frame: &[u8]) {
        let mut frame = frame[..frame.len().min(ETH_HDR_LEN + MTU)].to_vec();
        if frame.len() < ETH_HDR_LEN {
            return;
        }
        frame[6..12].copy_from_slice(&self.station.0);
        self.port.tx(&TxFrame::whole(&frame)).expect("loopback is never gone");
        self.port.flush().expect("loopback is never gone");
        self.poll();
    }

    fn poll(&mut self) {
        let mut lent = std::mem::take(&mut self.lent);
        let before = lent.len();
        let mut sink = |frame: &RxFrame<'_>| {
            let mut bytes = vec![0; frame.len()];
            assert!(frame.copy_to(0, &mut bytes));
            lent.push(bytes);
        };
        let count = self.port.rx_burst(4, &mut sink).expect("loopback is never gone");
        assert!(count == lent.len() - before && count <= 4, "{count} frames");
        lent[before..].iter().for_each(|frame| self.check_lent(frame));
        self.lent = lent;
        self.check_sent();
        let (drops, counters) = (self.port.drops(), self.port.counters());
        let all = drops.options + drops.fragments + drops.sums + drops.lengths + drops.frames;
        assert_eq!(counters.rx_dropped, all);
        let own = self.lent.len() as u64;
        assert_eq!(counters.rx_frames, own);
    }

    fn check_lent(&self, frame: &[u8]) {
        assert!((ETH_HDR_LEN..=ETH_HDR_LEN + MTU).contains(&frame.len()));
        assert_eq!(frame[..6], self.station.0);
        let from = MacAddr(*frame[6..].first_chunk().expect("an address"));
        if from != self.station {
            assert_eq!(frame[12..14], ETHERTYPE.to_be_bytes());
            assert!(addr_of(from).is_some_and(|from| self.senders.contains(&from)), "from {from}");
        }
    }

    /// All sent frames are the port's own and valid, and there is no more than one reply per
    /// received frame.
    fn check_sent(&mut self) {
        let (mac, prefix) = (self.mac, self.prefix);
        let mut answers = 0;
        let mut sink = |frame: &RxFrame<'_>| {
            let mut bytes = vec![0; frame.len()];
            assert!(frame.copy_to(0, &mut bytes));
            answers += usize::from(is_answer(&bytes, mac, prefix.ip(HOST.into())));
        };
        while self.raw.rx_burst(8, &mut sink).expect("loopback is never gone") > 0 {}
        assert!(answers <= self.unanswered, "{answers} answers to {} frames", self.unanswered);
        self.unanswered -= answers;
    }

    /// A valid frame of a peer is still lent.
    fn end(mut self) {
        // The ring may hold coalesced datagrams too.
        for _ in 0..RING {
            self.poll();
            while !self.port.rx_filter.gro.is_empty() {
                self.poll();
            }
        }
        let from = SocketAddrV4::new(PEER, UDP_PORT);
        let mut inside = vec![0x5a; 60];
        inside[..6].copy_from_slice(&self.station.0);
        inside[6..12].copy_from_slice(&mac_of(from).expect("a port of the fabric").0);
        inside[12..14].copy_from_slice(&ETHERTYPE.to_be_bytes());
        let mut head = vec![0; self.port.headers_len];
        let of_peer =
            super::Headers::new(MacAddr([2, 9, 9, 9, 9, 9]), self.prefix.socket_addr(from), 64, 2);
        of_peer.write(&mut head, self.mac, SocketAddrV4::new(HOST.into(), UDP_PORT), inside.len());
        of_peer.write_sum(&mut head, &inside);
        let before = self.lent.len();
        self.receive(&[head, inside.clone()].concat(), false);
        assert!(self.lent[before..].contains(&inside));
    }
}

/// The source of the datagram in `frame`, if that is long enough for one.
fn sender(frame: &[u8], prefix: Prefix) -> Option<SocketAddrV4> {
    let (ip_at, port_at) = if prefix == Prefix::V4 { (26, 34) } else { (34, 54) };
    let host: [u8; 4] = *frame.get(ip_at..)?.first_chunk()?;
    let port = u16::from_be_bytes(*frame.get(port_at..)?.first_chunk()?);
    Some(SocketAddrV4::new(host.into(), port))
}

/// Recomputes the checksums of a packet, as far as `frame` holds one.
fn fix_checksums(frame: &mut [u8]) {
    let ethertype = u16::from_be_bytes([frame[12], frame[13]]);
    if ethertype == ETHERTYPE_IPV4
        && let Ok((mut header, _)) = Ipv4Header::from_slice(&frame[ETH_HDR_LEN..])
    {
        header.header_checksum = header.calc_header_checksum();
        frame[24..26].copy_from_slice(&header.header_checksum.to_be_bytes());
        if header.protocol.0 == 1 && frame.len() >= 42 {
            frame[36..38].fill(0);
            let sum = Sum16BitWords::new().add_slice(&frame[34..]).ones_complement();
            frame[36..38].copy_from_slice(&sum.to_ne_bytes());
        }
    }
    if ethertype == ETHERTYPE_IPV6 && frame.len() >= 62 && frame[20] == 58 {
        let (head, message) = frame.split_at_mut(ETH_HDR_LEN + 40);
        head[18..20].copy_from_slice(&(message.len() as u16).to_be_bytes());
        message[2..4].fill(0);
        let sum = ndp::sum(&head[ETH_HDR_LEN..], message);
        message[2..4].copy_from_slice(&sum.to_ne_bytes());
    }
}

/// Whether `frame` is a reply.
///
/// # Panics
/// If an independent parser finds another source than `mac` and `ip`, or a wrong checksum.
fn is_answer(frame: &[u8], mac: MacAddr, ip: IpAddr) -> bool {
    let packet = SlicedPacket::from_ethernet(frame).expect("a packet");
    let Some(LinkSlice::Ethernet2(link)) = &packet.link else { panic!("no frame") };
    assert_eq!(link.source(), mac.0);
    let is_datagram = matches!(packet.transport, Some(TransportSlice::Udp(_)));
    assert!(!is_datagram || link.destination()[0] & 1 == 0);
    match (&packet.net, &packet.transport) {
        (Some(NetSlice::Arp(arp)), None) => {
            assert_eq!(arp.sender_hw_addr(), &mac.0);
            arp.operation() == ArpOperation::REPLY
        }
        (Some(NetSlice::Ipv4(v4)), _) => {
            assert_eq!(IpAddr::from(v4.header().source_addr()), ip);
            let header = v4.header().to_header();
            assert_eq!(header.header_checksum, header.calc_header_checksum());
            matches!(packet.transport, Some(TransportSlice::Icmpv4(_)))
        }
        (Some(NetSlice::Ipv6(v6)), Some(TransportSlice::Icmpv6(icmp))) => {
            let (from, to) = (v6.header().source(), v6.header().destination());
            assert!(icmp.is_checksum_valid(from, to));
            let is_report = icmp.type_u8() == mld::REPORT;
            assert!(IpAddr::from(from) == ip || is_report && from == [0; 16]);
            icmp.type_u8() != ndp::SOLICITATION
        }
        (Some(NetSlice::Ipv6(v6)), _) => {
            assert_eq!(IpAddr::from(v6.header().source_addr()), ip);
            false
        }
        other => panic!("{other:?}"),
    }
}
