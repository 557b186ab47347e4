//! Encapsulation headers over IPv4: Ethernet, IPv4 without options, UDP.
//!
//! Source: RFC 791 (IPv4), RFC 768 (UDP), RFC 6864 (a datagram that is not fragmented needs no
//! identification). A UDP checksum of 0 means none, which IPv4 allows.

use std::net::SocketAddrV4;

use super::super::inet::CE;
use super::super::sum::{fold, folded, sum_of_words};
use crate::port::MacAddr;

/// EtherType of IPv4.
pub(super) const ETHERTYPE_IPV4: u16 = 0x0800;
/// Bytes of the three headers.
pub(super) const HEADERS_LEN: usize = 42;
/// Offsets of the IPv4 and UDP headers.
const IP_AT: usize = 14;
const UDP_AT: usize = 34;
/// Version 4, header of 20 bytes.
const VERSION_IHL: u8 = 0x45;
/// UDP's protocol number.
const UDP: u8 = 17;
/// Don't fragment, in the word of flags and offset.
const DONT_FRAGMENT: u16 = 0x4000;
/// All other bits of that word, behind the identification, little-endian.
const FRAGMENTED: u32 = u32::from_le_bytes([0, 0, 0x3f, 0xff]);

/// Header template: all fields that do not depend on destination or length.
pub(super) struct Template {
    bytes: [u8; HEADERS_LEN],
    /// Sum of the words of the IPv4 header, without length and destination.
    sum: u32,
}

impl Template {
    /// Template for datagrams from `from` by the NIC with address `mac`. `tos` is the byte with
    /// DSCP and ECN.
    pub(super) fn new(mac: MacAddr, from: SocketAddrV4, ttl: u8, tos: u8) -> Self {
        let mut bytes = [0; HEADERS_LEN];
        bytes[6..12].copy_from_slice(&mac.0);
        bytes[12..14].copy_from_slice(&ETHERTYPE_IPV4.to_be_bytes());
        let ip = &mut bytes[IP_AT..UDP_AT];
        (ip[0], ip[1], ip[8], ip[9]) = (VERSION_IHL, tos, ttl, UDP);
        ip[6..8].copy_from_slice(&DONT_FRAGMENT.to_be_bytes());
        ip[12..16].copy_from_slice(&from.ip().octets());
        let words =
            ip.chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
        let sum = words.sum();
        bytes[UDP_AT..UDP_AT + 2].copy_from_slice(&from.port().to_be_bytes());
        Self { bytes, sum }
    }

    /// Writes the headers of datagrams to `to` by the next hop with MAC `hop`, without the lengths.
    /// Returns the sum of the words of the IPv4 header without its length, in memory order.
    pub(super) fn write_destination(
        &self,
        out: &mut [u8; HEADERS_LEN],
        hop: MacAddr,
        to: SocketAddrV4,
    ) -> u16 {
        *out = self.bytes;
        let ip = u32::from(*to.ip());
        out[..6].copy_from_slice(&hop.0);
        out[30..34].copy_from_slice(&ip.to_be_bytes());
        out[36..38].copy_from_slice(&to.port().to_be_bytes());
        fold(self.sum + (ip >> 16) + (ip & 0xffff)).to_be()
    }
}

/// Writes the lengths for `len` bytes of payload and the IPv4 checksum into headers from
/// [`Template::write_destination`], which has returned `sum`.
#[inline(always)]
pub(super) fn write_lengths(out: &mut [u8; HEADERS_LEN], sum: u16, len: usize) {
    let udp_len = ((len + HEADERS_LEN - UDP_AT) as u16).to_be();
    let ip_len = ((len + HEADERS_LEN - IP_AT) as u16).to_be();
    // The carry is added in; byte order does not matter (RFC 1071).
    let (sum, carry) = sum.overflowing_add(ip_len);
    let sum = sum.wrapping_add(carry.into());
    out[16..18].copy_from_slice(&ip_len.to_ne_bytes());
    out[24..26].copy_from_slice(&(!sum).to_ne_bytes());
    out[38..40].copy_from_slice(&udp_len.to_ne_bytes());
}

/// Writes the UDP checksum of a datagram with headers `head` and payload `payload`.
pub(super) fn write_sum(head: &mut [u8; HEADERS_LEN], payload: &[u8]) {
    let pseudo = [0, UDP, head[38], head[39]];
    // The 16-bit UDP length, padded with zeros to a word of 32 bits.
    let length = [head[38], head[39], 0, 0];
    let sum = sum_of_words(&head[26..38]) + sum_of_words(&pseudo) + sum_of_words(&length);
    head[40..42].copy_from_slice(&udp_sum(sum, payload));
}

/// The UDP checksum as written, never 0 (RFC 768, RFC 1071). `head`: the [`sum_of_words`] of the
/// pseudo header and UDP header.
pub(super) fn udp_sum(head: u64, payload: &[u8]) -> [u8; 2] {
    // Memory order, in which the words were added.
    match !folded(head + sum_of_words(payload)) {
        0 => [0xff; 2],
        sum => sum.to_ne_bytes(),
    }
}

/// Whether a router has marked the datagram: CE (RFC 3168).
#[inline]
pub(super) fn is_marked(head: &[u8; HEADERS_LEN]) -> bool {
    let [first, ..] = words(head);
    (first >> 8) as u8 & CE == CE
}

/// Why a received frame is not a datagram for this port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RejectReason {
    /// Another protocol, or another destination.
    Foreign,
    /// IPv4 options or IPv6 extension headers, which stations do not send.
    Options,
    /// A fragment.
    Fragment,
    /// The IPv4 header checksum is wrong, or the UDP checksum over IPv6 is absent.
    Sum,
    /// The lengths contradict each other or the frame's.
    Length,
    /// The source is outside the prefix that all hosts of the fabric share.
    ForeignPrefix,
}

/// Validates the headers `head` of a frame of `frame_len` bytes, the last of which may be padding,
/// as a datagram to `to`. Returns its source and the length of its payload, which follows `head`.
/// The UDP checksum is not verified: virtual interfaces deliver unfinished ones, and the checksum
/// of the packet inside covers more.
#[inline]
pub(super) fn check(
    head: &[u8; HEADERS_LEN],
    frame_len: usize,
    to: &SocketAddrV4,
) -> Result<(SocketAddrV4, usize), RejectReason> {
    let [first, second, third, from, dst, ports, lengths] = words(head);
    let is_to_us = head[12..14] == ETHERTYPE_IPV4.to_be_bytes()
        && dst == u32::from_le_bytes(to.ip().octets())
        && (third >> 8) as u8 == UDP;
    if !is_to_us {
        return Err(RejectReason::Foreign);
    }
    let version = first as u8;
    if version != VERSION_IHL {
        return Err(if version >> 4 == 4 { RejectReason::Options } else { RejectReason::Foreign });
    }
    // A valid header's 16-bit words add up to 0xffff with their carries. So the sum of its 32-bit
    // words, in any byte order, is a multiple of 0xffff (RFC 1071), and not 0.
    let [a, b, c, d, e] = [first, second, third, from, dst].map(u64::from);
    if !(a + b + c + d + e).is_multiple_of(0xffff) {
        return Err(RejectReason::Sum);
    }
    if second & FRAGMENTED != 0 {
        return Err(RejectReason::Fragment);
    }
    if (ports >> 16) as u16 != to.port().to_be() {
        return Err(RejectReason::Foreign);
    }
    let ip_len = usize::from(((first >> 16) as u16).swap_bytes());
    let udp_len = usize::from((lengths as u16).swap_bytes());
    let is_sound = udp_len >= HEADERS_LEN - UDP_AT
        && ip_len == udp_len + (UDP_AT - IP_AT)
        && ip_len + IP_AT <= frame_len;
    if !is_sound {
        return Err(RejectReason::Length);
    }
    let from = SocketAddrV4::new(from.to_le_bytes().into(), (ports as u16).swap_bytes());
    Ok((from, udp_len - (HEADERS_LEN - UDP_AT)))
}

/// The IPv4 and UDP headers as little-endian words, each read once.
#[inline(always)]
fn words(head: &[u8; HEADERS_LEN]) -> [u32; 7] {
    let (words, _) = head[IP_AT..].as_chunks::<4>();
    let words: &[[u8; 4]; 7] = words.first_chunk().expect("28 bytes");
    words.map(u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::super::super::inet::ECT_0;
    use super::*;
    use etherparse::{NetSlice, SlicedPacket, TransportSlice};
    use proptest::prelude::*;

    const FROM: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 1, 1, 7), 52_000);
    const TO: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 2, 255, 9), 65_535);
    const MACS: [MacAddr; 2] = [MacAddr([2, 1, 1, 1, 1, 1]), MacAddr([2, 9, 9, 9, 9, 9])];

    fn datagram(to: SocketAddrV4, payload: &[u8], with_sum: bool) -> Vec<u8> {
        let mut head = [0xee; HEADERS_LEN];
        let template = Template::new(MACS[0], FROM, 64, 46 << 2);
        let sum = template.write_destination(&mut head, MACS[1], to);
        // Another length first: lengths are overwritten.
        write_lengths(&mut head, sum, 1400);
        write_lengths(&mut head, sum, payload.len());
        if with_sum {
            write_sum(&mut head, payload);
        }
        [&head[..], payload].concat()
    }

    fn checked(frame: &[u8], to: SocketAddrV4) -> Result<(SocketAddrV4, usize), RejectReason> {
        let Some(head) = frame.first_chunk() else { return Err(RejectReason::Foreign) };
        check(head, frame.len(), &to)
    }

    /// The source and payload length by an independent parser, if the datagram is valid.
    fn parse_independently(frame: &[u8], to: SocketAddrV4) -> Option<(SocketAddrV4, usize)> {
        let packet = SlicedPacket::from_ethernet(frame).ok()?;
        let Some(NetSlice::Ipv4(ip)) = &packet.net else { return None };
        let header = ip.header();
        let Some(TransportSlice::Udp(udp)) = &packet.transport else { return None };
        let is_ours = packet.link_exts.is_empty()
            && header.destination_addr() == *to.ip()
            && udp.destination_port() == to.port();
        let is_plain = header.options().is_empty() && !header.is_fragmenting_payload();
        // The reserved flag is rejected like the other bits of that word.
        let is_plain = is_plain && frame[20] & 0x80 == 0;
        let sum = header.to_header().calc_header_checksum() == header.header_checksum();
        let from = SocketAddrV4::new(header.source_addr(), udp.source_port());
        let fits = usize::from(udp.length()) == ip.payload().payload.len();
        (is_ours && is_plain && sum && fits).then(|| (from, udp.payload().len()))
    }

    proptest! {
        /// Goal: an independent parser and our own accept every datagram with its checksums.
        #[test]
        fn datagrams_are_parsed_as_they_were_encoded(
            ip: u32,
            port: u16,
            payload in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let to = SocketAddrV4::new(ip.into(), port);
            for with_sum in [false, true] {
                let frame = datagram(to, &payload, with_sum);
                prop_assert_eq!(parse_independently(&frame, to), Some((FROM, payload.len())));
                prop_assert_eq!(checked(&frame, to), Ok((FROM, payload.len())));
                let packet = SlicedPacket::from_ethernet(&frame).unwrap();
                let (Some(NetSlice::Ipv4(ip)), Some(TransportSlice::Udp(udp))) =
                    (packet.net, packet.transport) else { panic!() };
                let sum = udp.to_header().calc_checksum_ipv4(&ip.header().to_header(), &payload);
                prop_assert_eq!(udp.checksum(), if with_sum { sum.unwrap() } else { 0 });
            }
        }

        /// Goal: a changed datagram is accepted if and only if an independent parser accepts it,
        /// and nothing panics. Method: bytes replaced, the checksum recomputed half of the time,
        /// the frame truncated or padded.
        #[test]
        fn corrupted_datagrams_are_rejected(
            changes in prop::collection::vec((12..HEADERS_LEN, any::<u8>()), 0..4),
            mends: bool,
            len in 0..100_usize,
        ) {
            let mut frame = datagram(TO, &[7; 30], false);
            for (at, byte) in changes {
                frame[at] = byte;
            }
            if mends {
                frame[24..26].fill(0);
                let words = frame[14..34].chunks_exact(2);
                let sum = words.map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
                frame[24..26].copy_from_slice(&(!fold(sum)).to_be_bytes());
            }
            frame.resize(len, 0);
            prop_assert_eq!(checked(&frame, TO).ok(), parse_independently(&frame, TO));
        }
    }

    #[test]
    fn every_rejection_has_its_reason() {
        let good = datagram(TO, &[1; 60], false);
        let corrupted = |at: usize, byte: u8, mends: bool| {
            let mut frame = good.clone();
            frame[at] = byte;
            if mends {
                frame[24..26].fill(0);
                let words = frame[14..34].chunks_exact(2);
                let sum = words.map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
                frame[24..26].copy_from_slice(&(!fold(sum)).to_be_bytes());
            }
            checked(&frame, TO).map(drop)
        };
        assert_eq!(corrupted(0, 0, false), Ok(()));
        assert_eq!(corrupted(12, 0x86, false), Err(RejectReason::Foreign));
        assert_eq!(corrupted(14, 0x46, true), Err(RejectReason::Options));
        assert_eq!(corrupted(14, 0x65, true), Err(RejectReason::Foreign));
        assert_eq!(corrupted(20, 0x20, true), Err(RejectReason::Fragment));
        assert_eq!(corrupted(21, 1, true), Err(RejectReason::Fragment));
        assert_eq!(corrupted(22, 63, false), Err(RejectReason::Sum));
        assert_eq!(corrupted(22, 63, true), Ok(()));
        for (tos, marked) in [(0, false), (1, false), (ECT_0, false), (CE, true), (0xfd, false)] {
            let mut frame = good.clone();
            frame[15] = tos;
            assert_eq!(is_marked(frame.first_chunk().unwrap()), marked, "{tos}");
        }
        assert_eq!(corrupted(23, 6, true), Err(RejectReason::Foreign));
        assert_eq!(corrupted(33, 1, true), Err(RejectReason::Foreign));
        assert_eq!(corrupted(37, 1, false), Err(RejectReason::Foreign));
        assert_eq!(corrupted(16, 1, true), Err(RejectReason::Length));
        assert_eq!(corrupted(39, 1, true), Err(RejectReason::Length));
        assert_eq!(checked(&good[..101], TO).map(drop), Err(RejectReason::Length));
        // Padding is ignored.
        assert_eq!(checked(&[&good[..], &[0; 9]].concat(), TO), Ok((FROM, 60)));
    }
}
