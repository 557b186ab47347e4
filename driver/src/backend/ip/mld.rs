//! Multicast listener discovery (MLDv2, RFC 3810): membership in the solicited-node group of the
//! port's IPv6 address, as Ethernet frames.
//!
//! Switches with MLD snooping forward a group to its members only, and expire members that do not
//! report again when a router or switch queries. A port has no link-local address, so its reports
//! are from the unspecified address, which switches accept (RFC 4541, section 3).

use std::net::Ipv6Addr;

use super::super::netdev::{mac_of_group, solicited_group};
use super::datagram6::{ETHERTYPE_IPV6, VERSION};
use super::ndp::{self, ICMPV6};
use crate::frame::{ETH_HDR_LEN, RxFrame};
use crate::port::MacAddr;

const QUERY: u8 = 130;
pub(super) const REPORT: u8 = 143;
/// Record types: the group is received from all sources, as before, or from now on.
const IS_EXCLUDE: u8 = 2;
const TO_EXCLUDE: u8 = 4;
/// The group that reports are sent to: all MLDv2-capable routers.
const REPORTS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x16);
/// A hop-by-hop options header of 8 bytes with the router alert and padding, before ICMPv6.
const ALERT: [u8; 8] = [ICMPV6, 0, 5, 2, 0, 0, 1, 0];

const MESSAGE_AT: usize = ETH_HDR_LEN + 40 + ALERT.len();
/// Bytes of a report of one group, with the frame's header.
pub(super) const REPORT_LEN: usize = MESSAGE_AT + 8 + 20;
/// Bytes of a query of MLDv1, which queries of MLDv2 begin with.
const QUERY_LEN: usize = MESSAGE_AT + 24;
/// Bytes of the longest accepted query: a longer one lists sources and concerns source-specific
/// listeners only.
pub(super) const QUERY_MAX: usize = QUERY_LEN + 4;

/// A report that the NIC `mac` is a member of the solicited-node group of `ip`. `anew`: it joins.
pub(super) fn report(mac: MacAddr, ip: Ipv6Addr, anew: bool) -> [u8; REPORT_LEN] {
    let mut frame = [0; REPORT_LEN];
    frame[..6].copy_from_slice(&mac_of_group(REPORTS).0);
    frame[6..12].copy_from_slice(&mac.0);
    frame[12..14].copy_from_slice(&ETHERTYPE_IPV6.to_be_bytes());
    let (head, message) = frame.split_at_mut(MESSAGE_AT);
    let (ip_head, alert) = head[ETH_HDR_LEN..].split_at_mut(40);
    (ip_head[0], ip_head[5], ip_head[7]) = (VERSION, (ALERT.len() + message.len()) as u8, 1);
    ip_head[24..].copy_from_slice(&REPORTS.octets());
    alert.copy_from_slice(&ALERT);
    (message[0], message[7]) = (REPORT, 1);
    message[8] = if anew { TO_EXCLUDE } else { IS_EXCLUDE };
    message[12..].copy_from_slice(&solicited_group(ip).octets());
    let sum = ndp::sum(ip_head, message);
    message[2..4].copy_from_slice(&sum.to_ne_bytes());
    frame
}

/// Whether `frame` is a query for members of the group of `ip`, or of all groups.
pub(super) fn is_query(frame: &RxFrame<'_>, ip: Ipv6Addr) -> bool {
    let Some(head) = frame.first_chunk::<QUERY_LEN>() else { return false };
    let ip_head = &head[ETH_HDR_LEN..ETH_HDR_LEN + 40];
    let is_ours = head[12..14] == ETHERTYPE_IPV6.to_be_bytes()
        && ip_head[0] & 0xf0 == VERSION
        && (ip_head[6], ip_head[7]) == (0, 1)
        && (head[54], head[55], head[MESSAGE_AT]) == (ICMPV6, 0, QUERY);
    let Some(from) = ip_head[8..].first_chunk::<16>().map(|from| Ipv6Addr::from(*from)) else {
        return false;
    };
    if !is_ours || !from.is_unicast_link_local() {
        return false;
    }
    let len = usize::from(u16::from_be_bytes([ip_head[4], ip_head[5]]));
    let mut bytes = [0; QUERY_MAX];
    let is_whole = (QUERY_LEN..=QUERY_MAX).contains(&(ETH_HDR_LEN + 40 + len))
        && frame.copy_to(0, &mut bytes[..ETH_HDR_LEN + 40 + len]);
    let message = &bytes[MESSAGE_AT..][..len.saturating_sub(ALERT.len()).min(28)];
    let group = &head[QUERY_LEN - 16..];
    let is_of_us = *group == [0; 16] || *group == solicited_group(ip).octets();
    is_whole && is_of_us && ndp::sum(ip_head, message) == 0
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use etherparse::{NetSlice, SlicedPacket, TransportSlice};

    const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);

    fn ip() -> Ipv6Addr {
        "2001:db8::a01:107".parse().unwrap()
    }

    /// A query as a router writes it; of the second version it has 4 bytes more.
    pub(in super::super) fn query(group: Ipv6Addr, second: bool) -> Vec<u8> {
        let len = if second { QUERY_MAX } else { QUERY_LEN };
        let mut frame = report(MAC, ip(), false)[..len].to_vec();
        frame[18..20].copy_from_slice(&((len - 54) as u16).to_be_bytes());
        frame[22..38].copy_from_slice(&"fe80::1".parse::<Ipv6Addr>().unwrap().octets());
        let (head, message) = frame.split_at_mut(MESSAGE_AT);
        message.fill(0);
        message[0] = QUERY;
        message[8..24].copy_from_slice(&group.octets());
        let sum = ndp::sum(&head[ETH_HDR_LEN..ETH_HDR_LEN + 40], message);
        message[2..4].copy_from_slice(&sum.to_ne_bytes());
        frame
    }

    #[test]
    fn an_independent_parser_accepts_reports() {
        for anew in [true, false] {
            let frame = report(MAC, ip(), anew);
            assert_eq!(frame[..6], [0x33, 0x33, 0, 0, 0, 0x16]);
            let packet = SlicedPacket::from_ethernet(&frame).unwrap();
            let Some(NetSlice::Ipv6(v6)) = &packet.net else { panic!() };
            let Some(TransportSlice::Icmpv6(icmp)) = &packet.transport else { panic!() };
            let (from, to) = (v6.header().source(), v6.header().destination());
            assert!(icmp.is_checksum_valid(from, to) && v6.header().hop_limit() == 1);
            assert_eq!(icmp.type_u8(), REPORT);
            let group: Ipv6Addr = "ff02::1:ff01:107".parse().unwrap();
            assert_eq!(icmp.slice()[12..], group.octets());
            assert_eq!(icmp.slice()[8], if anew { 4 } else { 2 });
        }
    }

    /// Goal: queries of the port's group are accepted, and no corrupted one is, but in bits that
    /// routers may write.
    #[test]
    fn only_queries_of_the_own_group_are_accepted() {
        for second in [false, true] {
            for (group, is_ours) in [
                (Ipv6Addr::UNSPECIFIED, true),
                (solicited_group(ip()), true),
                ("ff02::1:ff01:108".parse().unwrap(), false),
            ] {
                let asked = query(group, second);
                let heard = |bytes: &[u8]| is_query(&RxFrame::new(bytes), ip());
                assert_eq!(heard(&asked), is_ours);
                assert_eq!(heard(&[&asked[..], &[0; 10]].concat()), is_ours);
                for bit in 12 * 8..asked.len() * 8 {
                    let mut corrupted = asked.clone();
                    corrupted[bit / 8] ^= 1 << (bit % 8);
                    let at = bit / 8;
                    // The class, the flow, and what is in the header for routers.
                    let is_free =
                        (15..18).contains(&at) || at == 14 && bit % 8 < 4 || (56..62).contains(&at);
                    assert_eq!(heard(&corrupted), is_ours && is_free, "bit {bit}");
                }
                assert!((0..asked.len()).all(|len| !heard(&asked[..len])));
            }
        }
    }
}
