//! Encapsulation headers over IPv6: Ethernet, IPv6 without extension headers, UDP.
//!
//! Source: RFC 8200 (IPv6), RFC 768 (UDP). Every datagram has a UDP checksum: the IPv6 header has
//! none, and only tunnels may omit it (RFC 6936).

use std::net::{Ipv4Addr, SocketAddrV6};

use super::super::inet::Prefix;
use super::super::sum::sum_of_words;
use super::datagram::{RejectReason, udp_sum};
use crate::port::MacAddr;

/// EtherType of IPv6.
pub(super) const ETHERTYPE_IPV6: u16 = 0x86dd;
/// Bytes of the three headers.
pub(super) const HEADERS6_LEN: usize = 62;
/// Version 6, in the upper half of a byte.
pub(super) const VERSION: u8 = 0x60;
/// Offsets of the IPv6 and UDP headers.
const IP_AT: usize = 14;
const UDP_AT: usize = 54;
/// Next header values: UDP, and a fragment header.
const UDP: u8 = 17;
const FRAGMENT: u8 = 44;
/// Extension headers: hop-by-hop options, routing, destination options.
const OTHER_HEADERS: [u8; 3] = [0, 43, 60];

/// Header template: all fields that do not depend on destination or length.
pub(super) struct Template6 {
    bytes: [u8; HEADERS6_LEN],
}

impl Template6 {
    /// Template for datagrams from `from` to hosts of the same prefix, by the NIC with address
    /// `mac`. `class` is the byte with DSCP and ECN.
    pub(super) fn new(mac: MacAddr, from: SocketAddrV6, ttl: u8, class: u8) -> Self {
        let mut bytes = [0; HEADERS6_LEN];
        bytes[6..12].copy_from_slice(&mac.0);
        bytes[12..14].copy_from_slice(&ETHERTYPE_IPV6.to_be_bytes());
        (bytes[14], bytes[15]) = (VERSION | class >> 4, class << 4);
        (bytes[20], bytes[21]) = (UDP, ttl);
        bytes[22..38].copy_from_slice(&from.ip().octets());
        bytes[38..54].copy_from_slice(&from.ip().octets());
        bytes[UDP_AT..UDP_AT + 2].copy_from_slice(&from.port().to_be_bytes());
        Self { bytes }
    }

    /// Writes the headers of datagrams to the UDP port of the host with these last 32 bits, by the
    /// next hop with MAC `hop`, without the lengths and the checksum.
    pub(super) fn write_destination(
        &self,
        out: &mut [u8; HEADERS6_LEN],
        hop: MacAddr,
        (host, port): (Ipv4Addr, u16),
    ) {
        *out = self.bytes;
        out[..6].copy_from_slice(&hop.0);
        out[50..54].copy_from_slice(&host.octets());
        out[56..58].copy_from_slice(&port.to_be_bytes());
        let [high, middle, low] = flow_label(out);
        out[15] |= high;
        (out[16], out[17]) = (middle, low);
    }
}

/// The flow label of a datagram with these addresses and UDP ports: 20 bits, the first four of them
/// in the lower half of a byte, never 0. Constant for each pair of stations, and evenly
/// distributed, for routers that hash addresses and label alone for ECMP (RFC 6437, RFC 6438).
fn flow_label(out: &[u8; HEADERS6_LEN]) -> [u8; 3] {
    let four = |at: usize| *out[at..].first_chunk().expect("four bytes");
    let [from, to, ports] = [34, 50, UDP_AT].map(|at| u64::from(u32::from_be_bytes(four(at))));
    // Odd multipliers (Steele and Vigna 2021), whose products are well mixed in the upper bits.
    let hosts = (from << 32 | to).wrapping_mul(0xd134_2543_de82_ef95);
    let label = ((hosts ^ ports).wrapping_mul(0xf135_7aea_2e62_a9c5) >> 44) as u32;
    let [_, bytes @ ..] = label.max(1).to_be_bytes();
    bytes
}

/// Writes the lengths for `len` bytes of payload into headers from
/// [`Template6::write_destination`]. The checksum is not written.
#[inline]
pub(super) fn write_lengths(out: &mut [u8; HEADERS6_LEN], len: usize) {
    let udp_len = ((len + HEADERS6_LEN - UDP_AT) as u16).to_be_bytes();
    out[18..20].copy_from_slice(&udp_len);
    out[58..60].copy_from_slice(&udp_len);
}

/// Writes the UDP checksum of a datagram with headers `head` and payload `payload`.
pub(super) fn write_sum(head: &mut [u8; HEADERS6_LEN], payload: &[u8]) {
    let pseudo = [0, UDP, head[58], head[59]];
    // The 16-bit UDP length, padded with zeros to a word of 32 bits.
    let length = [head[58], head[59], 0, 0];
    let sum = sum_of_words(&head[22..58]) + sum_of_words(&pseudo) + sum_of_words(&length);
    head[60..62].copy_from_slice(&udp_sum(sum, payload));
}

/// The traffic class: the byte with DSCP and ECN.
#[inline]
pub(super) fn class(head: &[u8; HEADERS6_LEN]) -> u8 {
    head[14] << 4 | head[15] >> 4
}

/// Validates the headers `head` of a frame of `frame_len` bytes, the last of which may be padding,
/// as a datagram to `to`. Returns its source, by the last 32 bits and the UDP port, and the length
/// of its payload, which follows `head`. The UDP checksum must be present, but is not verified:
/// virtual interfaces deliver unfinished ones, and the checksum of the packet inside covers more.
#[inline]
pub(super) fn check(
    head: &[u8; HEADERS6_LEN],
    frame_len: usize,
    to: &SocketAddrV6,
) -> Result<((Ipv4Addr, u16), usize), RejectReason> {
    let half = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    let is_to_us = half(12) == ETHERTYPE_IPV6
        && head[IP_AT] & 0xf0 == VERSION
        && head[38..54] == to.ip().octets();
    if !is_to_us {
        return Err(RejectReason::Foreign);
    }
    match head[20] {
        UDP => {}
        FRAGMENT => return Err(RejectReason::Fragment),
        other if OTHER_HEADERS.contains(&other) => return Err(RejectReason::Options),
        _ => return Err(RejectReason::Foreign),
    }
    if half(56) != to.port() {
        return Err(RejectReason::Foreign);
    }
    let (ip_len, udp_len) = (usize::from(half(18)), usize::from(half(58)));
    let is_sound =
        udp_len >= HEADERS6_LEN - UDP_AT && ip_len == udp_len && udp_len + UDP_AT <= frame_len;
    if !is_sound {
        return Err(RejectReason::Length);
    }
    if half(60) == 0 {
        return Err(RejectReason::Sum);
    }
    let from: [u8; 16] = *head[22..].first_chunk().expect("an address");
    let host =
        Prefix::of((*to.ip()).into()).host(from.into()).ok_or(RejectReason::ForeignPrefix)?;
    Ok(((host, half(UDP_AT)), udp_len - (HEADERS6_LEN - UDP_AT)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::{NetSlice, SlicedPacket, TransportSlice};
    use proptest::prelude::*;

    const MACS: [MacAddr; 2] = [MacAddr([2, 1, 1, 1, 1, 1]), MacAddr([2, 9, 9, 9, 9, 9])];

    fn from() -> SocketAddrV6 {
        "[2001:db8::a01:107]:52000".parse().unwrap()
    }

    fn to() -> SocketAddrV6 {
        "[2001:db8::a02:ff09]:65535".parse().unwrap()
    }

    fn datagram(to: (Ipv4Addr, u16), payload: &[u8]) -> Vec<u8> {
        let mut head = [0xee; HEADERS6_LEN];
        Template6::new(MACS[0], from(), 64, 0xb9).write_destination(&mut head, MACS[1], to);
        // Another length first: lengths are overwritten.
        write_lengths(&mut head, 1400);
        write_lengths(&mut head, payload.len());
        write_sum(&mut head, payload);
        [&head[..], payload].concat()
    }

    fn checked(frame: &[u8]) -> Result<((Ipv4Addr, u16), usize), RejectReason> {
        let Some(head) = frame.first_chunk() else { return Err(RejectReason::Foreign) };
        check(head, frame.len(), &to())
    }

    const HOST: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 1, 1, 7), 52_000);
    const TO: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 2, 255, 9), 65_535);

    /// The source and payload length by an independent parser, if the datagram is valid.
    fn parse_independently(frame: &[u8]) -> Option<((Ipv4Addr, u16), usize)> {
        let packet = SlicedPacket::from_ethernet(frame).ok()?;
        let Some(NetSlice::Ipv6(ip)) = &packet.net else { return None };
        let header = ip.header();
        let Some(TransportSlice::Udp(udp)) = &packet.transport else { return None };
        let is_ours = packet.link_exts.is_empty()
            && header.destination_addr() == *to().ip()
            && udp.destination_port() == to().port()
            && header.next_header().0 == UDP;
        let fits = usize::from(udp.length()) == usize::from(header.payload_length())
            && udp.checksum() != 0;
        let host = Prefix::of((*from().ip()).into()).host(header.source_addr().into())?;
        (is_ours && fits).then(|| ((host, udp.source_port()), usize::from(udp.length()) - 8))
    }

    /// Goal: routers that hash addresses and labels alone spread the pairs of processes of two
    /// hosts over their paths, and each pair keeps its path. Method: labels modulo two to eight
    /// paths.
    #[test]
    fn pairs_of_stations_have_labels_of_their_own() {
        let label = |ports: [u16; 2], len: usize| {
            let from = SocketAddrV6::new(*from().ip(), ports[0], 0, 0);
            let mut head = [0; HEADERS6_LEN];
            let template = Template6::new(MACS[0], from, 64, 0xff);
            template.write_destination(&mut head, MACS[1], (TO.0, ports[1]));
            write_lengths(&mut head, len);
            assert_eq!(class(&head), 0xff);
            u32::from_be_bytes(*head[14..].first_chunk().unwrap()) & 0xf_ffff
        };
        let pairs = (0..16).flat_map(|a| (0..16).map(move |b| [52_000 + a, 52_000 + b]));
        let labels: Vec<u32> = pairs.map(|ports| label(ports, 100)).collect();
        assert_eq!(label([52_000; 2], 1400), labels[0]);
        for paths in 2..=8 {
            let mut of_path = vec![0; paths];
            labels.iter().for_each(|label| of_path[*label as usize % paths] += 1);
            let fair = labels.len() / paths;
            assert!(of_path.iter().all(|&n| n > fair / 2 && n < fair * 2), "{of_path:?}");
        }
        // The same port at both ends, as the processes with one rank on each have.
        let same: std::collections::HashSet<_> = (0..16).map(|n| labels[17 * n] % 2).collect();
        assert_eq!(same.len(), 2);
    }

    proptest! {
        /// Goal: an independent parser and our own accept every datagram with its checksum.
        #[test]
        fn datagrams_are_parsed_as_they_were_encoded(
            host: u32,
            port: u16,
            payload in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let frame = datagram((host.into(), port), &payload);
            let packet = SlicedPacket::from_ethernet(&frame).unwrap();
            let (Some(NetSlice::Ipv6(ip)), Some(TransportSlice::Udp(udp))) =
                (packet.net, packet.transport) else { panic!() };
            let header = ip.header().to_header();
            prop_assert_eq!(&header.source, &from().ip().octets());
            prop_assert_eq!(header.destination[12..].to_vec(), host.to_be_bytes().to_vec());
            prop_assert_eq!((header.hop_limit, udp.destination_port()), (64, port));
            prop_assert_eq!(header.traffic_class, 0xb9);
            prop_assert!(header.flow_label.value() != 0);
            let sum = udp.to_header().calc_checksum_ipv6(&header, &payload);
            prop_assert_eq!(udp.checksum(), sum.unwrap());
            prop_assert_eq!(class(frame.first_chunk().unwrap()), 0xb9);
            let frame = datagram(TO, &payload);
            prop_assert_eq!(checked(&frame), Ok((HOST, payload.len())));
            prop_assert_eq!(parse_independently(&frame), Some((HOST, payload.len())));
        }

        /// Goal: a changed datagram is accepted if and only if an independent parser accepts it,
        /// and nothing panics. Method: bytes replaced, the frame truncated or padded.
        #[test]
        fn corrupted_datagrams_are_rejected(
            changes in prop::collection::vec((12..HEADERS6_LEN, any::<u8>()), 0..4),
            len in 0..120_usize,
        ) {
            let mut frame = datagram(TO, &[7; 30]);
            for (at, byte) in changes {
                frame[at] = byte;
            }
            frame.resize(len, 0);
            prop_assert_eq!(checked(&frame).ok(), parse_independently(&frame));
        }
    }

    #[test]
    fn every_rejection_has_its_reason() {
        let good = datagram(TO, &[1; 60]);
        let corrupted = |at: usize, byte: u8| {
            let mut frame = good.clone();
            frame[at] = byte;
            checked(&frame).map(drop)
        };
        assert_eq!(corrupted(0, 0), Ok(()));
        assert_eq!(corrupted(13, 0), Err(RejectReason::Foreign));
        assert_eq!(corrupted(14, 0x40), Err(RejectReason::Foreign));
        for header in OTHER_HEADERS {
            assert_eq!(corrupted(20, header), Err(RejectReason::Options));
        }
        assert_eq!(corrupted(20, FRAGMENT), Err(RejectReason::Fragment));
        assert_eq!(corrupted(20, 6), Err(RejectReason::Foreign));
        assert_eq!(corrupted(53, 1), Err(RejectReason::Foreign));
        assert_eq!(corrupted(57, 1), Err(RejectReason::Foreign));
        assert_eq!(corrupted(19, 1), Err(RejectReason::Length));
        assert_eq!(corrupted(59, 1), Err(RejectReason::Length));
        assert_eq!(corrupted(33, 1), Err(RejectReason::ForeignPrefix));
        assert_eq!(corrupted(34, 1), Ok(()));
        assert_eq!(checked(&good[..121]).map(drop), Err(RejectReason::Length));
        let mut none = good.clone();
        none[60..62].fill(0);
        assert_eq!(checked(&none).map(drop), Err(RejectReason::Sum));
        // Padding is ignored.
        assert_eq!(checked(&[&good[..], &[0; 9]].concat()), Ok((HOST, 60)));
    }
}
