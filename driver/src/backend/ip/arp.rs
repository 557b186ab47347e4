//! Who has an address: ARP, RFC 826, as frames; probes and announcements as in RFC 5227.

use std::net::Ipv4Addr;

use etherparse::{ArpEthIpv4Packet, ArpOperation, ArpPacket};

use crate::frame::ETH_HDR_LEN;
use crate::port::MacAddr;

/// EtherType of ARP.
pub(super) const ETHERTYPE_ARP: u16 = 0x0806;
/// Bytes of a packet.
pub(super) const ARP_LEN: usize = ArpEthIpv4Packet::LEN;

/// What a packet says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arp {
    /// It asks who has `target`; else it answers.
    pub(super) is_question: bool,
    /// Whom it is from: its hardware address, one of a single station, and its IP address, which is
    /// unspecified in a probe.
    pub(super) sender: (MacAddr, Ipv4Addr),
    /// Whom it asks for or answers to.
    pub(super) target: Ipv4Addr,
}

impl Arp {
    /// What `packet` says, if it is one for IPv4 over Ethernet and can be true.
    pub(super) fn parse(packet: &[u8]) -> Option<Self> {
        let packet = ArpPacket::from_slice(packet).ok()?.try_eth_ipv4().ok()?;
        let is_question = match packet.operation {
            ArpOperation::REQUEST => true,
            ArpOperation::REPLY => false,
            _ => return None,
        };
        let mac = MacAddr(packet.sender_mac);
        mac.is_single().then_some(Self {
            is_question,
            sender: (mac, packet.sender_ipv4_addr()),
            target: packet.target_ipv4_addr(),
        })
    }
}

/// A frame that holds a packet.
pub(super) type ArpFrame = [u8; ETH_HDR_LEN + ARP_LEN];

/// `mac` and `ip` ask who has `target`: everybody, or whoever had the address `of`. A probe is from
/// the unspecified address, an announcement asks for its own.
pub(super) fn question(
    (mac, ip): (MacAddr, Ipv4Addr),
    target: Ipv4Addr,
    of: Option<MacAddr>,
) -> ArpFrame {
    let to = of.unwrap_or(MacAddr::BROADCAST);
    framed(ArpOperation::REQUEST, (mac, ip), (MacAddr::default(), target), to)
}

/// `own` answers to `asker`.
pub(super) fn answer(own: (MacAddr, Ipv4Addr), asker: (MacAddr, Ipv4Addr)) -> ArpFrame {
    framed(ArpOperation::REPLY, own, asker, asker.0)
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
    fn questions_and_answers_are_read_as_they_were_written() {
        for of in [None, Some(PEER.0)] {
            let frame = question(OWN, PEER.1, of);
            assert_eq!(frame[..6], of.unwrap_or(MacAddr::BROADCAST).0);
            let said = Arp::parse(&frame[ETH_HDR_LEN..]).unwrap();
            assert_eq!(said, Arp { is_question: true, sender: OWN, target: PEER.1 });
        }
        let frame = answer(OWN, PEER);
        let said = Arp::parse(&frame[ETH_HDR_LEN..]).unwrap();
        assert_eq!((&frame[..6], frame[12..14].to_vec()), (&PEER.0.0[..], vec![8, 6]));
        assert_eq!(said, Arp { is_question: false, sender: OWN, target: PEER.1 });
    }

    #[test]
    fn what_cannot_be_true_is_refused() {
        for (at, byte) in [(0, 1), (1, 2), (2, 9), (4, 8), (5, 16), (7, 3), (8, 3), (8, 0xff)] {
            let mut packet = answer(OWN, PEER)[ETH_HDR_LEN..].to_vec();
            packet[at] = byte;
            assert_eq!(Arp::parse(&packet), None, "{byte} at {at}");
        }
        assert_eq!(Arp::parse(&answer((MacAddr::default(), OWN.1), PEER)[ETH_HDR_LEN..]), None);
        assert_eq!(Arp::parse(&answer(OWN, PEER)[ETH_HDR_LEN..ETH_HDR_LEN + 27]), None);
    }

    proptest! {
        #[test]
        fn no_packet_panics(packet in prop::collection::vec(any::<u8>(), 0..64)) {
            let said = Arp::parse(&packet);
            prop_assert!(said.is_none_or(|said| !said.sender.0.is_group()));
        }
    }
}
