//! UDP GSO on a raw socket: datagrams of one flow leave as one frame with the headers of the first,
//! and the device, or else the kernel, segments it and writes the headers of each datagram.
//!
//! Source: packet(7), PACKET_VNET_HDR; linux/virtio_net.h, `struct virtio_net_hdr`, whose
//! VIRTIO_NET_HDR_GSO_UDP_L4 is of Linux 6.2.

use super::sum::{folded, sum_of_words};
use super::vlan::{ETHERTYPE_VLAN, TAG_LEN};
use crate::frame::ETH_HDR_LEN;

/// Bytes of a `virtio_net_hdr`. All zeros before a frame: no offload.
pub(super) const VNET_LEN: usize = 10;
/// Longest headers of a datagram: Ethernet, a VLAN tag, IPv6, UDP.
const HEADERS_MAX: usize = ETH_HDR_LEN + TAG_LEN + IPV6_LEN + UDP_LEN;
/// Bytes that [`write_gso_headers`] writes at most.
pub(super) const GSO_HEADERS_MAX: usize = VNET_LEN + HEADERS_MAX;

const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];
/// Bytes of IPv4's header without options, of IPv6's without others behind it, and of UDP's.
const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;
const UDP_LEN: usize = 8;
/// UDP's number in either.
const UDP_PROTOCOL: u8 = 17;

// Values of a `virtio_net_hdr`: the flag for checksum offload, and the GSO type.
const NEEDS_CSUM: u8 = 1;
const GSO_UDP_L4: u8 = 5;
/// Offset of the checksum in UDP's header.
const UDP_SUM_AT: usize = 6;

/// Bytes of the headers of `frame`, Ethernet's included. `None` if the frame is not exactly one UDP
/// datagram with a payload, or has IP options or extension headers.
pub(super) fn headers_len(frame: &[u8]) -> Option<usize> {
    let ip_at = ip_at(frame)?;
    let (packet, ethertype) = (&frame[ip_at..], &frame[ip_at - 2..ip_at]);
    let be16 = |at: usize| Some(u16::from_be_bytes(*packet.get(at..)?.first_chunk()?));
    let (ip_len, protocol, packet_len) = if ethertype == ETHERTYPE_IPV4 {
        // Without options, and no fragment.
        if *packet.first()? != 0x45 || be16(6)? & 0x3fff != 0 {
            return None;
        }
        (IPV4_LEN, *packet.get(9)?, usize::from(be16(2)?))
    } else if ethertype == ETHERTYPE_IPV6 {
        (IPV6_LEN, *packet.get(6)?, IPV6_LEN + usize::from(be16(4)?))
    } else {
        return None;
    };
    let has_payload = packet.len() > ip_len + UDP_LEN;
    let is_whole = protocol == UDP_PROTOCOL && packet_len == packet.len();
    (is_whole && has_payload).then_some(ip_at + ip_len + UDP_LEN)
}

/// Offset of the IP header, if the frame is long enough for one.
fn ip_at(frame: &[u8]) -> Option<usize> {
    let tag = if *frame.get(12..14)? == ETHERTYPE_VLAN.to_be_bytes() { TAG_LEN } else { 0 };
    let ip_at = ETH_HDR_LEN + tag;
    (frame.len() > ip_at).then_some(ip_at)
}

/// Whether the headers of both frames are equal except for lengths, checksums and IPv4's
/// identification. Those of `b` have `headers_len` bytes.
pub(super) fn is_same_flow(a: &[u8], b: &[u8], headers_len: usize) -> bool {
    if self::headers_len(a) != Some(headers_len) {
        return false;
    }
    let Some(ip_at) = ip_at(b) else { return false };
    let ports_end = headers_len - UDP_LEN + 4;
    let is_equal = |from: usize, to: usize| a[from..to] == b[from..to];
    match headers_len - ip_at {
        // Up to the length; fragments, hops, protocol; the addresses and the ports.
        24..=28 => {
            is_equal(0, ip_at + 2)
                && is_equal(ip_at + 6, ip_at + 10)
                && is_equal(ip_at + 12, ports_end)
        }
        _ => is_equal(0, ip_at + 4) && is_equal(ip_at + 6, ports_end),
    }
}

/// Writes the `virtio_net_hdr` and the headers of a GSO frame to `out`, and returns them. `frame`
/// is its first datagram, with headers of `headers_len` bytes. The payloads of all datagrams have
/// `payload` bytes together; all are as long as the first, the last may be shorter.
pub(super) fn write_gso_headers<'a>(
    out: &'a mut [u8; GSO_HEADERS_MAX],
    frame: &[u8],
    headers_len: usize,
    payload: usize,
) -> &'a [u8] {
    let (udp_at, gso_size) = (headers_len - UDP_LEN, frame.len() - headers_len);
    let (vnet, head) = out.split_at_mut(VNET_LEN);
    (vnet[0], vnet[1]) = (NEEDS_CSUM, GSO_UDP_L4);
    for (at, value) in [(2, headers_len), (4, gso_size), (6, udp_at), (8, UDP_SUM_AT)] {
        vnet[at..at + 2].copy_from_slice(&(value as u16).to_ne_bytes());
    }
    head[..headers_len].copy_from_slice(&frame[..headers_len]);
    let ip_at = ip_at(frame).unwrap_or(ETH_HDR_LEN);
    let udp_len = ((UDP_LEN + payload) as u16).to_be_bytes();
    let addresses_at = if udp_at - ip_at == IPV4_LEN {
        let packet_len = (IPV4_LEN + UDP_LEN + payload) as u16;
        head[ip_at + 2..ip_at + 4].copy_from_slice(&packet_len.to_be_bytes());
        head[ip_at + 10..ip_at + 12].fill(0);
        let sum = folded(sum_of_words(&head[ip_at..udp_at]));
        head[ip_at + 10..ip_at + 12].copy_from_slice(&(!sum).to_ne_bytes());
        ip_at + 12
    } else {
        head[ip_at + 4..ip_at + 6].copy_from_slice(&udp_len);
        ip_at + 8
    };
    // The sum over the pseudo-header. The device adds the rest.
    let pseudo = [0, UDP_PROTOCOL, udp_len[0], udp_len[1]];
    let sum = folded(sum_of_words(&head[addresses_at..udp_at]) + sum_of_words(&pseudo));
    head[udp_at + 4..udp_at + 6].copy_from_slice(&udp_len);
    head[udp_at + UDP_SUM_AT..headers_len].copy_from_slice(&sum.to_ne_bytes());
    &out[..VNET_LEN + headers_len]
}

#[cfg(test)]
mod tests {
    use etherparse::{PacketBuilder, SlicedPacket, TransportSlice, VlanId};
    use proptest::prelude::*;

    use super::*;

    /// A datagram of that payload, over IPv4 or IPv6, and the bytes of its headers.
    fn datagram(is_v6: bool, has_tag: bool, payload: &[u8]) -> (Vec<u8>, usize) {
        let plain = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
        let ip = match (has_tag, is_v6) {
            (false, false) => plain.ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64),
            (false, true) => plain.ipv6([1; 16], [2; 16], 64),
            (true, is_v6) => {
                let tagged = plain.single_vlan(VlanId::try_new(5).unwrap());
                match is_v6 {
                    false => tagged.ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64),
                    true => tagged.ipv6([1; 16], [2; 16], 64),
                }
            }
        };
        let udp = ip.udp(52_000, 52_001);
        let mut frame = vec![0; udp.size(payload.len())];
        let len = frame.len() - payload.len();
        udp.write_to_slice(&mut frame, payload).unwrap();
        (frame, len)
    }

    proptest! {
        /// Goal: the headers of a GSO frame are those of one datagram with all payloads, whose
        /// checksum the device completes.
        #[test]
        fn gso_headers_are_those_of_one_long_datagram(
            is_v6: bool,
            has_tag: bool,
            lens in prop::collection::vec(1..1400_usize, 1..40),
        ) {
            let gso_size = lens[0];
            let payload: usize = lens.iter().map(|&len| len.min(gso_size)).sum();
            let (frame, len) = datagram(is_v6, has_tag, &vec![7; gso_size]);
            prop_assert_eq!(headers_len(&frame), Some(len));
            let mut out = [0xff; GSO_HEADERS_MAX];
            let head = write_gso_headers(&mut out, &frame, len, payload);
            let (vnet, head) = head.split_at(VNET_LEN);
            let word = |at: usize| usize::from(u16::from_ne_bytes([vnet[at], vnet[at + 1]]));
            prop_assert_eq!(&vnet[..2], &[1, 5]);
            prop_assert_eq!([2, 4, 6, 8].map(word), [len, gso_size, len - 8, 6]);
            let mut whole = [head, &vec![9; payload]].concat();
            let sum = !folded(sum_of_words(&whole[len - 8..]));
            whole[len - 2..len].copy_from_slice(&sum.to_ne_bytes());
            let seen = SlicedPacket::from_ethernet(&whole).unwrap();
            let Some(TransportSlice::Udp(udp)) = &seen.transport else { panic!("{seen:?}") };
            prop_assert_eq!(udp.payload().len(), payload);
            let right = match seen.net.as_ref().unwrap() {
                etherparse::NetSlice::Ipv4(ip) => {
                    let header = ip.header().to_header();
                    prop_assert_eq!(header.calc_header_checksum(), header.header_checksum);
                    udp.to_header().calc_checksum_ipv4(&header, udp.payload())
                }
                etherparse::NetSlice::Ipv6(ip) => {
                    udp.to_header().calc_checksum_ipv6(&ip.header().to_header(), udp.payload())
                }
                other => panic!("{other:?}"),
            };
            prop_assert_eq!(udp.checksum(), right.unwrap());
        }

        /// Goal: two frames are of one flow only if every byte of the headers is equal, except for
        /// lengths, checksums and identification.
        #[test]
        fn a_flow_is_recognized_by_its_headers(
            is_v6: bool,
            has_tag: bool,
            at in 0..66_usize,
            bit in 0..8_u8,
        ) {
            let (frame, len) = datagram(is_v6, has_tag, &[1; 100]);
            let (mut other, _) = datagram(is_v6, has_tag, &[2; 60]);
            prop_assert!(is_same_flow(&other, &frame, len) && is_same_flow(&frame, &other, len));
            let at = at % len;
            let ip_at = if has_tag { 18 } else { 14 };
            let own = match is_v6 {
                true => (ip_at + 4..ip_at + 6).contains(&at),
                false => {
                    (ip_at + 2..ip_at + 6).contains(&at) || (ip_at + 10..ip_at + 12).contains(&at)
                }
            };
            prop_assume!(!own && at < len - 4);
            other[at] ^= 1 << bit;
            prop_assert!(!is_same_flow(&other, &frame, len));
        }

        #[test]
        fn no_frame_makes_the_parser_panic(
            mut frame in prop::collection::vec(any::<u8>(), 0..90),
            has_ip: bool,
        ) {
            if has_ip && frame.len() > 15 {
                (frame[12], frame[13], frame[14]) = (8, 0, 0x45);
            }
            if let Some(len) = headers_len(&frame) {
                prop_assert!(len < frame.len() && is_same_flow(&frame, &frame, len));
            }
        }
    }
}
