//! ARP packets (RFC 826), with the probes and announcements of RFC 5227.

use std::net::Ipv4Addr;

use etherparse::{ArpEthIpv4Packet, ArpOperation, ArpPacket};

use crate::frame::ETH_HDR_LEN;
use crate::port::MacAddr;

/// EtherType of ARP.
pub(super) const ETHERTYPE_ARP: u16 = 0x0806;
/// Bytes of an ARP packet.
pub(super) const ARP_LEN: usize = ArpEthIpv4Packet::LEN;

/// A parsed ARP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arp {
    /// A request for `target`; else a reply.
    pub(super) is_request: bool,
    /// The sender's MAC, never a group's, and its IP address, which is unspecified in a probe.
    pub(super) sender: (MacAddr, Ipv4Addr),
    /// The address requested, or that of the host replied to.
    pub(super) target: Ipv4Addr,
}

impl Arp {
    /// Parses a packet. `None`: not a request or reply for IPv4 over Ethernet, or from a group.
    pub(super) fn parse(packet: &[u8]) -> Option<Self> {
        let packet = ArpPacket::from_slice(packet).ok()?.try_eth_ipv4().ok()?;
        let is_request = match packet.operation {
            ArpOperation::REQUEST => true,
            ArpOperation::REPLY => false,
            _ => return None,
        };
        let mac = MacAddr(packet.sender_mac);
        mac.is_single().then_some(Self {
            is_request,
            sender: (mac, packet.sender_ipv4_addr()),
            target: packet.target_ipv4_addr(),
        })
    }
}

/// An Ethernet frame with an ARP packet.
pub(super) type ArpFrame = [u8; ETH_HDR_LEN + ARP_LEN];

/// A request from `mac` and `ip` for the MAC of `target`, to the station `to`, or to all. A probe
/// is from the unspecified address; an announcement requests the sender's own.
pub(super) fn request(
    (mac, ip): (MacAddr, Ipv4Addr),
    target: Ipv4Addr,
    to: Option<MacAddr>,
) -> ArpFrame {
    let to = to.unwrap_or(MacAddr::BROADCAST);
    framed(ArpOperation::REQUEST, (mac, ip), (MacAddr::default(), target), to)
}

/// A reply from `own` to `requester`.
pub(super) fn reply(own: (MacAddr, Ipv4Addr), requester: (MacAddr, Ipv4Addr)) -> ArpFrame {
    framed(ArpOperation::REPLY, own, requester, requester.0)
}

fn framed(
    operation: ArpOperation,
    sender: (MacAddr, Ipv4Addr),
    target: (MacAddr, Ipv4Addr),
    to: MacAddr,
) -> ArpFrame {
    let packet = ArpEthIpv4Packet {
        operation,
        sender_mac: sender.0.0,
        sender_ipv4: sender.1.octets(),
        target_mac: target.0.0,
        target_ipv4: target.1.octets(),
    };
    let mut frame = [0; ETH_HDR_LEN + ARP_LEN];
    frame[..6].copy_from_slice(&to.0);
    frame[6..12].copy_from_slice(&sender.0.0);
    frame[12..14].copy_from_slice(&ETHERTYPE_ARP.to_be_bytes());
    frame[ETH_HDR_LEN..].copy_from_slice(&packet.to_bytes());
    frame
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OWN: (MacAddr, Ipv4Addr) = (MacAddr([2, 0, 0, 0, 0, 1]), Ipv4Addr::new(10, 0, 0, 1));
    const PEER: (MacAddr, Ipv4Addr) = (MacAddr([2, 0, 0, 0, 0, 2]), Ipv4Addr::new(10, 0, 0, 2));

    #[test]
    fn requests_and_replies_are_parsed_as_they_were_encoded() {
        for of in [None, Some(PEER.0)] {
            let frame = request(OWN, PEER.1, of);
            assert_eq!(frame[..6], of.unwrap_or(MacAddr::BROADCAST).0);
            let parsed = Arp::parse(&frame[ETH_HDR_LEN..]).unwrap();
            assert_eq!(parsed, Arp { is_request: true, sender: OWN, target: PEER.1 });
        }
        let frame = reply(OWN, PEER);
        let parsed = Arp::parse(&frame[ETH_HDR_LEN..]).unwrap();
        assert_eq!((&frame[..6], frame[12..14].to_vec()), (&PEER.0.0[..], vec![8, 6]));
        assert_eq!(parsed, Arp { is_request: false, sender: OWN, target: PEER.1 });
    }

    #[test]
    fn invalid_packets_are_rejected() {
        for (at, byte) in [(0, 1), (1, 2), (2, 9), (4, 8), (5, 16), (7, 3), (8, 3), (8, 0xff)] {
            let mut packet = reply(OWN, PEER)[ETH_HDR_LEN..].to_vec();
            packet[at] = byte;
            assert_eq!(Arp::parse(&packet), None, "{byte} at {at}");
        }
        assert_eq!(Arp::parse(&reply((MacAddr::default(), OWN.1), PEER)[ETH_HDR_LEN..]), None);
        assert_eq!(Arp::parse(&reply(OWN, PEER)[ETH_HDR_LEN..ETH_HDR_LEN + 27]), None);
    }

    proptest! {
        #[test]
        fn no_packet_panics(packet in prop::collection::vec(any::<u8>(), 0..64)) {
            let parsed = Arp::parse(&packet);
            prop_assert!(parsed.is_none_or(|parsed| !parsed.sender.0.is_group()));
        }
    }
}
