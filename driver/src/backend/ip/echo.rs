//! Echo replies (RFC 792, RFC 4443), for ports whose address no kernel shares.
//!
//! A reply goes to the station that the request came from: a host of the segment, or the router
//! that forwarded it. So ping tells whether a port is up and which lengths its segment carries,
//! before any program of the fabric runs.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use etherparse::checksum::Sum16BitWords;

use super::datagram::ETHERTYPE_IPV4;
use super::datagram6::{ETHERTYPE_IPV6, VERSION};
use super::ndp::{self, ICMPV6};
use crate::frame::{ETH_HDR_LEN, RxFrame};
use crate::port::MacAddr;

const ICMP: u8 = 1;
/// Message types of ICMP and ICMPv6.
const ECHO_REQUEST: u8 = 8;
const ECHO_REPLY: u8 = 0;
const ECHO_REQUEST6: u8 = 128;
const ECHO_REPLY6: u8 = 129;
/// TTL or hop limit of replies.
const TTL: u8 = 64;
/// Bytes of the shortest request: an ICMP header without data.
const LEN_MIN: usize = ETH_HDR_LEN + 20 + 8;

/// Turns `frame` into a reply if it is a valid echo request to `own`, without options or fragments
/// and from a unicast address. Returns the reply's bytes; `None`: `frame` may be changed.
pub(super) fn reply(frame: &mut [u8], own: (MacAddr, IpAddr)) -> Option<&[u8]> {
    let mac = MacAddr(*frame.get(6..12)?.first_chunk()?);
    let is_single = mac.is_single() && mac != own.0;
    if frame.len() < LEN_MIN || frame[..6] != own.0.0 || !is_single {
        return None;
    }
    frame[..6].copy_from_slice(&mac.0);
    frame[6..12].copy_from_slice(&own.0.0);
    let ethertype = u16::from_be_bytes([frame[12], frame[13]]);
    let len = match own.1 {
        IpAddr::V4(ip) if ethertype == ETHERTYPE_IPV4 => reply4(&mut frame[ETH_HDR_LEN..], ip)?,
        IpAddr::V6(ip) if ethertype == ETHERTYPE_IPV6 => reply6(&mut frame[ETH_HDR_LEN..], ip)?,
        _ => return None,
    };
    Some(&frame[..ETH_HDR_LEN + len])
}

/// Whether `frame` may hold an echo request, by two bytes: before the frame is copied.
pub(super) fn may_be_request(frame: &RxFrame<'_>, own: IpAddr) -> bool {
    let is = |at, byte| frame.chunk_at::<1>(at) == Some([byte]);
    match own {
        IpAddr::V4(_) => is(23, ICMP) && is(34, ECHO_REQUEST),
        IpAddr::V6(_) => is(20, ICMPV6) && is(54, ECHO_REQUEST6),
    }
}

/// Turns an IPv4 packet into its reply and returns the length of that.
fn reply4(packet: &mut [u8], own: Ipv4Addr) -> Option<usize> {
    let (ip, rest) = packet.split_at_mut(20);
    let len = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
    let message = rest.get_mut(..len.checked_sub(20)?)?;
    let from = Ipv4Addr::new(ip[12], ip[13], ip[14], ip[15]);
    let is_host = !(from.octets()[0] == 0 || from.is_loopback() || from.octets()[0] >= 224);
    let is_request = ip[0] == 0x45
        && u16::from_be_bytes([ip[6], ip[7]]) & 0x3fff == 0
        && ip[9] == ICMP
        && ip[16..20] == own.octets()
        && sum(ip) == 0
        && message.len() >= 8
        && message[..2] == [ECHO_REQUEST, 0]
        && sum(message) == 0;
    if !is_request || !is_host || from == own {
        return None;
    }
    ip[8] = TTL;
    ip[12..16].copy_from_slice(&own.octets());
    ip[16..20].copy_from_slice(&from.octets());
    write_sum(ip, 10);
    message[0] = ECHO_REPLY;
    write_sum(message, 2);
    Some(len)
}

/// Turns an IPv6 packet into its reply and returns the length of that.
fn reply6(packet: &mut [u8], own: Ipv6Addr) -> Option<usize> {
    let (ip, rest) = packet.split_at_mut_checked(40)?;
    let message = rest.get_mut(..usize::from(u16::from_be_bytes([ip[4], ip[5]])))?;
    let from = Ipv6Addr::from(*ip[8..].first_chunk::<16>()?);
    let is_host = !(from.is_multicast() || from.is_unspecified() || from.is_loopback());
    let is_request = ip[0] & 0xf0 == VERSION
        && ip[6] == ICMPV6
        && ip[24..40] == own.octets()
        && message.len() >= 8
        && message[..2] == [ECHO_REQUEST6, 0]
        && ndp::sum(ip, message) == 0;
    if !is_request || !is_host || from == own {
        return None;
    }
    ip[7] = TTL;
    ip[8..24].copy_from_slice(&own.octets());
    ip[24..40].copy_from_slice(&from.octets());
    (message[0], message[2], message[3]) = (ECHO_REPLY6, 0, 0);
    let sum = ndp::sum(ip, message);
    message[2..4].copy_from_slice(&sum.to_ne_bytes());
    Some(40 + message.len())
}

/// The checksum over `bytes`: 0 if they contain their checksum.
fn sum(bytes: &[u8]) -> u16 {
    Sum16BitWords::new().add_slice(bytes).ones_complement()
}

fn write_sum(bytes: &mut [u8], at: usize) {
    bytes[at..at + 2].fill(0);
    let sum = sum(bytes);
    bytes[at..at + 2].copy_from_slice(&sum.to_ne_bytes());
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use etherparse::{NetSlice, SlicedPacket, TransportSlice};

    const OWN: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
    const PEER: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);

    /// An echo request from `peer` to `own`.
    pub(in super::super) fn request(own: (MacAddr, IpAddr), peer: (MacAddr, IpAddr)) -> Vec<u8> {
        let data = b"odd number of bytes";
        let mut message = [&[ECHO_REQUEST, 0, 0, 0, 0, 7, 0, 9], &data[..]].concat();
        let len = message.len() as u8;
        let (ethertype, ip) = match (own.1, peer.1) {
            (IpAddr::V4(own), IpAddr::V4(peer)) => {
                write_sum(&mut message, 2);
                let fixed = [0x45, 0, 0, 20 + len, 0, 0, 0x40, 0, 3, ICMP, 0, 0];
                let mut ip = [&fixed[..], &peer.octets(), &own.octets()].concat();
                write_sum(&mut ip, 10);
                (ETHERTYPE_IPV4, ip)
            }
            (IpAddr::V6(own), IpAddr::V6(peer)) => {
                message[0] = ECHO_REQUEST6;
                let fixed = [VERSION, 0, 0, 0, 0, len, ICMPV6, 3];
                let ip = [&fixed[..], &peer.octets(), &own.octets()].concat();
                let sum = ndp::sum(&ip, &message);
                message[2..4].copy_from_slice(&sum.to_ne_bytes());
                (ETHERTYPE_IPV6, ip)
            }
            _ => unreachable!(),
        };
        [&own.0.0[..], &peer.0.0, &ethertype.to_be_bytes(), &ip, &message].concat()
    }

    /// Goal: an independent parser accepts the reply, and a request with a flipped bit is answered
    /// only if no check covers the bit.
    #[test]
    fn only_valid_requests_are_answered() {
        for (own, peer) in [("10.1.1.7", "10.2.2.9"), ("2001:db8::a01:107", "fe80::9")] {
            let (own, peer): (IpAddr, IpAddr) = (own.parse().unwrap(), peer.parse().unwrap());
            let asked = request((OWN, own), (PEER, peer));
            // Padding does not come back.
            let mut frame = [&asked[..], &[0; 9]].concat();
            let rx = RxFrame::new(&asked);
            assert!(may_be_request(&rx, own));
            let answer = reply(&mut frame, (OWN, own)).unwrap();
            assert_eq!((&answer[..6], &answer[6..12]), (&PEER.0[..], &OWN.0[..]));
            assert_eq!(answer.len(), asked.len());
            let packet = SlicedPacket::from_ethernet(answer).unwrap();
            match (&packet.net, &packet.transport) {
                (Some(NetSlice::Ipv4(ip)), Some(TransportSlice::Icmpv4(icmp))) => {
                    let header = ip.header().to_header();
                    assert_eq!(header.header_checksum, header.calc_header_checksum());
                    assert_eq!(ip.header().destination_addr(), peer);
                    assert!(sum(icmp.slice()) == 0 && icmp.slice()[4..] == asked[38..]);
                }
                (Some(NetSlice::Ipv6(ip)), Some(TransportSlice::Icmpv6(icmp))) => {
                    assert_eq!(ip.header().destination_addr(), peer);
                    let (from, to) = (ip.header().source(), ip.header().destination());
                    assert!(icmp.is_checksum_valid(from, to));
                    assert_eq!(icmp.slice()[4..], asked[58..]);
                }
                other => panic!("{other:?}"),
            }
            for bit in 0..asked.len() * 8 {
                let mut frame = asked.clone();
                frame[bit / 8] ^= 1 << (bit % 8);
                let is_answered = super::reply(&mut frame, (OWN, own)).is_some();
                let (at, v6) = (bit / 8, own.is_ipv6());
                // The requester's MAC; over IPv6 also traffic class, flow label and hop limit.
                let is_free = (6..12).contains(&at) && bit != 6 * 8
                    || v6 && ((15..18).contains(&at) || at == 21 || at == 14 && bit % 8 < 4);
                assert_eq!(is_answered, is_free, "{own}: bit {bit}");
            }
            for len in 0..asked.len() {
                let mut cut = asked[..len].to_vec();
                assert!(super::reply(&mut cut, (OWN, own)).is_none(), "{len}");
            }
        }
    }

    #[test]
    fn requests_from_invalid_sources_are_not_answered() {
        for (own, peers) in [
            ("10.1.1.7", ["0.0.0.0", "127.0.0.1", "224.0.0.1", "255.255.255.255", "10.1.1.7"]),
            ("2001:db8::7", ["::", "::1", "ff02::1", "ff05::2", "2001:db8::7"]),
        ] {
            let own: IpAddr = own.parse().unwrap();
            for peer in peers {
                let mut frame = request((OWN, own), (PEER, peer.parse().unwrap()));
                assert!(reply(&mut frame, (OWN, own)).is_none(), "{peer}");
            }
        }
    }
}
