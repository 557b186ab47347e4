//! The headers before a frame of the fabric: Ethernet, IPv6 without more headers, UDP.
//!
//! Source: RFC 8200 (IPv6), RFC 768 (UDP). Every datagram has a sum over its bytes: IPv6's header
//! has none, and only tunnels may do without (RFC 6936).

use std::net::{Ipv4Addr, SocketAddrV6};

use super::super::inet::Prefix;
use super::super::sum::sum_of_words;
use super::datagram::{Refused, udp_sum};
use crate::port::MacAddr;

/// EtherType of IPv6.
pub(super) const ETHERTYPE_IPV6: u16 = 0x86dd;
/// Bytes of the three headers.
pub(super) const HEADERS6_LEN: usize = 62;
/// Version 6, in the first half of a byte.
pub(super) const VERSION: u8 = 0x60;
/// Where IPv6's header begins, and UDP's.
const IP_AT: usize = 14;
const UDP_AT: usize = 54;
/// UDP's protocol number, and that of a header of a part of a longer datagram.
const UDP: u8 = 17;
const FRAGMENT: u8 = 44;
/// Headers that may stand between IPv6's and UDP's: hop by hop, routing, for the destination.
const OTHER_HEADERS: [u8; 3] = [0, 43, 60];

/// The headers of all datagrams of a port, without what is each one's own.
pub(super) struct Template6 {
    bytes: [u8; HEADERS6_LEN],
}

impl Template6 {
    /// Headers of datagrams from `from` to hosts of the same prefix, by the NIC with the address
    /// `mac`. `class` is the byte of DSCP and ECN.
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

    /// Writes what all datagrams to the UDP port of the host with these last 32 bits have in
    /// common, whose next hop has the address `hop`.
    pub(super) fn aim(
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

/// The label of the flow that a datagram with these addresses and UDP ports is of: 20 bits, the
/// first four of them in the lower half of a byte, and never 0. One for each pair of stations, and
/// spread evenly, for routers that choose among paths by addresses and label alone (RFC 6437, RFC
/// 6438).
fn flow_label(out: &[u8; HEADERS6_LEN]) -> [u8; 3] {
    let four = |at: usize| *out[at..].first_chunk().expect("four bytes");
    let [from, to, ports] = [34, 50, UDP_AT].map(|at| u64::from(u32::from_be_bytes(four(at))));
    // Two odd numbers without a pattern (Steele and Vigna 2021): products spread in their upper
    // bits.
    let hosts = (from << 32 | to).wrapping_mul(0xd134_2543_de82_ef95);
    let label = ((hosts ^ ports).wrapping_mul(0xf135_7aea_2e62_a9c5) >> 44) as u32;
    let [_, bytes @ ..] = label.max(1).to_be_bytes();
    bytes
}

/// Writes how long a datagram of `len` bytes is into headers that were aimed. The sum is not
/// written.
#[inline]
pub(super) fn measure(out: &mut [u8; HEADERS6_LEN], len: usize) {
    let udp_len = ((len + HEADERS6_LEN - UDP_AT) as u16).to_be_bytes();
    out[18..20].copy_from_slice(&udp_len);
    out[58..60].copy_from_slice(&udp_len);
}

/// Writes the sum of a datagram whose headers are `head` and whose payload is `payload`.
pub(super) fn write_sum(head: &mut [u8; HEADERS6_LEN], payload: &[u8]) {
    let pseudo = [0, UDP, head[58], head[59]];
    // The half of UDP's length stands alone: with two zeros its word is whole.
    let length = [head[58], head[59], 0, 0];
    let sum = sum_of_words(&head[22..58]) + sum_of_words(&pseudo) + sum_of_words(&length);
    head[60..62].copy_from_slice(&udp_sum(sum, payload));
}

/// The byte of DSCP and ECN.
#[inline]
pub(super) fn class(head: &[u8; HEADERS6_LEN]) -> u8 {
    head[14] << 4 | head[15] >> 4
}

/// The sender of a datagram that came to `to`, by its last 32 bits and its UDP port, and the length
/// of its payload, which begins behind `head`; the frame has `frame_len` bytes, of which the last
/// may be padding. UDP's sum is not looked at but for whether there is one: interfaces that are no
/// hardware hand over sums that nobody has finished, and the checksum of the packet inside covers
/// more.
#[inline]
pub(super) fn check(
    head: &[u8; HEADERS6_LEN],
    frame_len: usize,
    to: &SocketAddrV6,
) -> Result<((Ipv4Addr, u16), usize), Refused> {
    let half = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    let is_to_us = half(12) == ETHERTYPE_IPV6
        && head[IP_AT] & 0xf0 == VERSION
        && head[38..54] == to.ip().octets();
    if !is_to_us {
        return Err(Refused::Foreign);
    }
    match head[20] {
        UDP => {}
        FRAGMENT => return Err(Refused::Fragment),
        other if OTHER_HEADERS.contains(&other) => return Err(Refused::Options),
        _ => return Err(Refused::Foreign),
    }
    if half(56) != to.port() {
        return Err(Refused::Foreign);
    }
    let (ip_len, udp_len) = (usize::from(half(18)), usize::from(half(58)));
    let is_sound =
        udp_len >= HEADERS6_LEN - UDP_AT && ip_len == udp_len && udp_len + UDP_AT <= frame_len;
    if !is_sound {
        return Err(Refused::Length);
    }
    if half(60) == 0 {
        return Err(Refused::Sum);
    }
    let from: [u8; 16] = *head[22..].first_chunk().expect("an address");
    let host = Prefix::of((*to.ip()).into()).host(from.into()).ok_or(Refused::Outside)?;
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
        Template6::new(MACS[0], from(), 64, 0xb9).aim(&mut head, MACS[1], to);
        // Of another length before.
        measure(&mut head, 1400);
        measure(&mut head, payload.len());
        write_sum(&mut head, payload);
        [&head[..], payload].concat()
    }

    fn checked(frame: &[u8]) -> Result<((Ipv4Addr, u16), usize), Refused> {
        let Some(head) = frame.first_chunk() else { return Err(Refused::Foreign) };
        check(head, frame.len(), &to())
    }

    const HOST: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 1, 1, 7), 52_000);
    const TO: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 2, 255, 9), 65_535);

    /// What a library makes of it: the sender and the payload's length, if all is right.
    fn by_library(frame: &[u8]) -> Option<((Ipv4Addr, u16), usize)> {
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

    /// Goal: routers that look at addresses and labels alone spread the pairs of processes of two
    /// hosts, and each pair stays where it is whatever it sends. Method: as such a router would,
    /// among two to eight paths.
    #[test]
    fn pairs_of_stations_have_labels_of_their_own() {
        let label = |ports: [u16; 2], len: usize| {
            let from = SocketAddrV6::new(*from().ip(), ports[0], 0, 0);
            let mut head = [0; HEADERS6_LEN];
            Template6::new(MACS[0], from, 64, 0xff).aim(&mut head, MACS[1], (TO.0, ports[1]));
            measure(&mut head, len);
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
        /// Goal: every datagram is one for a library as well, its sum too, and for ourselves.
        #[test]
        fn what_is_written_is_read(
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
            prop_assert_eq!(by_library(&frame), Some((HOST, payload.len())));
        }

        /// Goal: what is changed on the way is taken by us if and only if a library finds nothing
        /// wrong with it, and nothing panics. Method: a datagram with bytes exchanged, cut or
        /// lengthened.
        #[test]
        fn what_is_spoilt_is_refused(
            changes in prop::collection::vec((12..HEADERS6_LEN, any::<u8>()), 0..4),
            len in 0..120_usize,
        ) {
            let mut frame = datagram(TO, &[7; 30]);
            for (at, byte) in changes {
                frame[at] = byte;
            }
            frame.resize(len, 0);
            prop_assert_eq!(checked(&frame).ok(), by_library(&frame));
        }
    }

    #[test]
    fn every_refusal_has_its_cause() {
        let good = datagram(TO, &[1; 60]);
        let spoilt = |at: usize, byte: u8| {
            let mut frame = good.clone();
            frame[at] = byte;
            checked(&frame).map(drop)
        };
        assert_eq!(spoilt(0, 0), Ok(()));
        assert_eq!(spoilt(13, 0), Err(Refused::Foreign));
        assert_eq!(spoilt(14, 0x40), Err(Refused::Foreign));
        for header in OTHER_HEADERS {
            assert_eq!(spoilt(20, header), Err(Refused::Options));
        }
        assert_eq!(spoilt(20, FRAGMENT), Err(Refused::Fragment));
        assert_eq!(spoilt(20, 6), Err(Refused::Foreign));
        assert_eq!(spoilt(53, 1), Err(Refused::Foreign));
        assert_eq!(spoilt(57, 1), Err(Refused::Foreign));
        assert_eq!(spoilt(19, 1), Err(Refused::Length));
        assert_eq!(spoilt(59, 1), Err(Refused::Length));
        assert_eq!(spoilt(33, 1), Err(Refused::Outside));
        assert_eq!(spoilt(34, 1), Ok(()));
        assert_eq!(checked(&good[..121]).map(drop), Err(Refused::Length));
        let mut none = good.clone();
        none[60..62].fill(0);
        assert_eq!(checked(&none).map(drop), Err(Refused::Sum));
        // A link may fill frames up.
        assert_eq!(checked(&[&good[..], &[0; 9]].concat()), Ok((HOST, 60)));
    }
}
