//! Neighbour discovery: neighbour solicitations and advertisements (RFC 4861) as Ethernet frames;
//! probes as in RFC 4862.

use std::net::Ipv6Addr;

use etherparse::checksum::Sum16BitWords;

use super::super::netdev::{ALL_NODES, mac_of_group, solicited_group};
use super::datagram6::{ETHERTYPE_IPV6, VERSION};
use crate::frame::ETH_HDR_LEN;
use crate::port::MacAddr;

/// ICMPv6 as the next header, and two of its messages.
pub(super) const ICMPV6: u8 = 58;
pub(super) const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
/// A packet with this hop limit has passed no router: its sender is on the segment.
const HOP_LIMIT: u8 = 255;
/// Flags of an advertisement: a reply to a solicitation; the MAC replaces a cached one.
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;
/// Options with a MAC: source (of a solicitation) and target (of an advertisement).
const SOURCE: u8 = 1;
const TARGET: u8 = 2;

/// Where the header of IPv6, the message and its options begin.
const IP_AT: usize = ETH_HDR_LEN;
const MESSAGE_AT: usize = IP_AT + 40;
const OPTIONS_AT: usize = MESSAGE_AT + 24;
/// Bytes of a frame with one option.
pub(super) const NDP_LEN: usize = OPTIONS_AT + 8;
/// Bytes of a frame that are parsed: options of other kinds may precede the one with the MAC.
pub(super) const NDP_MAX: usize = 128;

/// A parsed message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ndp {
    /// A solicitation of `target`; else an advertisement.
    pub(super) is_request: bool,
    /// The sender's MAC and its IP address, which is unspecified in a probe.
    pub(super) sender: (MacAddr, Ipv6Addr),
    /// The solicited address, or that of the advertising host.
    pub(super) target: Ipv6Addr,
    /// The MAC replaces a cached one.
    pub(super) overrides: bool,
}

/// The solicited-node multicast group of `ip`: its MAC and its IP address.
fn group_of(ip: Ipv6Addr) -> (MacAddr, Ipv6Addr) {
    let group = solicited_group(ip);
    (mac_of_group(group), group)
}

impl Ndp {
    /// Parses a frame, from its Ethernet header on. `None`: not a solicitation or advertisement
    /// that is valid by RFC 4861, 7.1, or with a wrong checksum.
    pub(super) fn parse(frame: &[u8]) -> Option<Self> {
        let ip = frame.get(IP_AT..MESSAGE_AT)?;
        let is_ours = frame[12..14] == ETHERTYPE_IPV6.to_be_bytes()
            && ip[0] & 0xf0 == VERSION
            && ip[6] == ICMPV6
            && ip[7] == HOP_LIMIT;
        let len = usize::from(u16::from_be_bytes([ip[4], ip[5]]));
        let message = frame.get(MESSAGE_AT..MESSAGE_AT + len).filter(|_| is_ours)?;
        let address = |bytes: &[u8]| Some(Ipv6Addr::from(*bytes.first_chunk::<16>()?));
        let (from, target) = (address(&ip[8..])?, address(message.get(8..24)?)?);
        if sum(ip, message) != 0 || message[1] != 0 || target.is_multicast() || from.is_multicast()
        {
            return None;
        }
        let (is_request, kind) = match message[0] {
            SOLICITATION => (true, SOURCE),
            ADVERTISEMENT => (false, TARGET),
            _ => return None,
        };
        let (to, stated) = (address(&ip[24..])?, option(&message[24..], kind)?);
        // RFC 4861, 7.1.1 and 7.1.2: a solicitation from the unspecified address goes to a group
        // and states no MAC; an advertisement to a group is not solicited.
        let is_valid = match is_request {
            true => !from.is_unspecified() || to == solicited_group(target) && stated.is_none(),
            false => !to.is_multicast() || message[4] & SOLICITED == 0,
        };
        if !is_valid {
            return None;
        }
        let mac = match stated {
            Some(mac) => mac,
            // Without the option the frame's source is used: allowed in probes, and in
            // advertisements to a solicitor that knows the MAC.
            None => MacAddr(*frame.get(6..12)?.first_chunk()?),
        };
        let sender = if is_request { from } else { target };
        let overrides = is_request || message[4] & OVERRIDE != 0;
        mac.is_single().then_some(Self { is_request, sender: (mac, sender), target, overrides })
    }
}

/// The MAC in the option of `kind`, `Some(None)` without one. `None`: an option's length is
/// invalid.
fn option(mut options: &[u8], kind: u8) -> Option<Option<MacAddr>> {
    while let [what, len, rest @ ..] = options {
        let len = 8 * usize::from(*len);
        if len == 0 || len > options.len() {
            return None;
        }
        if *what == kind && len == 8 {
            return Some(rest.first_chunk().map(|mac| MacAddr(*mac)));
        }
        options = &options[len..];
    }
    Some(None)
}

/// The ICMPv6 checksum of a message behind the header `ip`: 0 if the message contains its checksum.
pub(super) fn sum(ip: &[u8], message: &[u8]) -> u16 {
    let [high, low] = (message.len() as u16).to_be_bytes();
    Sum16BitWords::new()
        .add_slice(&ip[8..40])
        .add_2bytes([high, low])
        .add_2bytes([0, ICMPV6])
        .add_slice(message)
        .ones_complement()
}

/// An Ethernet frame with a message.
pub(super) type NdpFrame = [u8; NDP_LEN];

/// A solicitation from `mac` and `ip` of `target`, to the station `to`, or to the target's group. A
/// probe is from the unspecified address.
pub(super) fn solicitation(
    (mac, ip): (MacAddr, Ipv6Addr),
    target: Ipv6Addr,
    to: Option<MacAddr>,
) -> NdpFrame {
    let to = to.map_or_else(|| group_of(target), |to| (to, target));
    framed((SOLICITATION, 0, SOURCE), (mac, ip), to, (target, mac))
}

/// A solicited advertisement from `own` to `requester`; to all nodes if that has no address yet.
pub(super) fn advertisement(own: (MacAddr, Ipv6Addr), requester: (MacAddr, Ipv6Addr)) -> NdpFrame {
    if requester.1.is_unspecified() {
        return announcement(own);
    }
    framed((ADVERTISEMENT, SOLICITED | OVERRIDE, TARGET), own, requester, (own.1, own.0))
}

/// An unsolicited advertisement from `own` to all nodes.
pub(super) fn announcement(own: (MacAddr, Ipv6Addr)) -> NdpFrame {
    let all = (mac_of_group(ALL_NODES), ALL_NODES);
    framed((ADVERTISEMENT, OVERRIDE, TARGET), own, all, (own.1, own.0))
}

/// A message with flags and one option. A message from the unspecified address has no option: the
/// last 8 bytes of the frame are then padding.
fn framed(
    (kind, flags, option): (u8, u8, u8),
    from: (MacAddr, Ipv6Addr),
    to: (MacAddr, Ipv6Addr),
    (target, mac): (Ipv6Addr, MacAddr),
) -> NdpFrame {
    let mut frame = [0; NDP_LEN];
    frame[..6].copy_from_slice(&to.0.0);
    frame[6..12].copy_from_slice(&from.0.0);
    frame[12..14].copy_from_slice(&ETHERTYPE_IPV6.to_be_bytes());
    let len = if from.1.is_unspecified() { 24 } else { 32 };
    let (head, message) = frame.split_at_mut(MESSAGE_AT);
    let (ip, message) = (&mut head[IP_AT..], &mut message[..len]);
    (ip[0], ip[5], ip[6], ip[7]) = (VERSION, len as u8, ICMPV6, HOP_LIMIT);
    ip[8..24].copy_from_slice(&from.1.octets());
    ip[24..40].copy_from_slice(&to.1.octets());
    (message[0], message[4]) = (kind, flags);
    message[8..24].copy_from_slice(&target.octets());
    if let Some([what, len, address @ ..]) = message.get_mut(24..) {
        (*what, *len) = (option, 1);
        address.copy_from_slice(&mac.0);
    }
    let sum = sum(ip, message);
    message[2..4].copy_from_slice(&sum.to_ne_bytes());
    frame
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::{NetSlice, SlicedPacket, TransportSlice};
    use proptest::prelude::*;

    fn own() -> (MacAddr, Ipv6Addr) {
        (MacAddr([2, 0, 0, 0, 0, 1]), "2001:db8::a01:107".parse().unwrap())
    }

    fn peer() -> (MacAddr, Ipv6Addr) {
        (MacAddr([2, 0, 0, 0, 0, 2]), "2001:db8::a01:108".parse().unwrap())
    }

    /// A library finds the message sound, its sum too.
    fn is_sound(frame: &[u8]) {
        let packet = SlicedPacket::from_ethernet(frame).unwrap();
        let Some(NetSlice::Ipv6(ip)) = &packet.net else { panic!() };
        let Some(TransportSlice::Icmpv6(icmp)) = &packet.transport else { panic!() };
        let (from, to) = (ip.header().source(), ip.header().destination());
        assert!(icmp.is_checksum_valid(from, to) && ip.header().hop_limit() == 255);
    }

    #[test]
    fn messages_are_parsed_as_they_were_encoded() {
        for of in [None, Some(peer().0)] {
            let frame = solicitation(own(), peer().1, of);
            is_sound(&frame);
            assert_eq!(frame[..6], of.unwrap_or(MacAddr([0x33, 0x33, 0xff, 1, 1, 8])).0);
            let said = Ndp::parse(&frame).unwrap();
            let want = Ndp { is_request: true, sender: own(), target: peer().1, overrides: true };
            assert_eq!(said, want);
        }
        let probe = solicitation((own().0, Ipv6Addr::UNSPECIFIED), own().1, None);
        is_sound(&probe);
        assert_eq!(Ndp::parse(&probe).unwrap().sender, (own().0, Ipv6Addr::UNSPECIFIED));
        let nobody = (peer().0, Ipv6Addr::UNSPECIFIED);
        for (frame, to) in [
            (advertisement(own(), peer()), peer().0),
            (advertisement(own(), nobody), MacAddr([0x33, 0x33, 0, 0, 0, 1])),
            (announcement(own()), MacAddr([0x33, 0x33, 0, 0, 0, 1])),
        ] {
            is_sound(&frame);
            assert_eq!(frame[..6], to.0);
            let want = Ndp { is_request: false, sender: own(), target: own().1, overrides: true };
            assert_eq!(Ndp::parse(&frame), Some(want));
        }
        assert_eq!(group_of(own().1).1.to_string(), "ff02::1:ff01:107");
    }

    /// RFC 4861, 7.1.1 and 7.1.2.
    #[test]
    fn messages_against_rfc_4861_are_rejected() {
        let (own, peer) = (own(), peer());
        let nobody = (own.0, Ipv6Addr::UNSPECIFIED);
        let probe = (SOLICITATION, 0, SOURCE);
        assert!(Ndp::parse(&framed(probe, nobody, group_of(peer.1), (peer.1, own.0))).is_some());
        assert!(Ndp::parse(&framed(probe, nobody, peer, (peer.1, own.0))).is_none());
        let all = (mac_of_group(ALL_NODES), ALL_NODES);
        for (flags, is_valid) in [(OVERRIDE, true), (OVERRIDE | SOLICITED, false)] {
            let told = framed((ADVERTISEMENT, flags, TARGET), own, all, (own.1, own.0));
            assert_eq!(Ndp::parse(&told).is_some(), is_valid);
        }
    }

    proptest! {
        /// Goal: no change of a bit passes but in the addresses of Ethernet and what routers may
        /// write, and nothing panics.
        #[test]
        fn corrupted_messages_are_rejected(at in 12..NDP_LEN, bit in 0..8_u8, len in 0..NDP_LEN) {
            let mut frame = solicitation(own(), peer().1, None);
            prop_assert_eq!(Ndp::parse(&frame[..len]), None);
            frame[at] ^= 1 << bit;
            // The traffic class and the label of a flow.
            let is_free = (15..18).contains(&at) || at == 14 && bit < 4;
            prop_assert_eq!(Ndp::parse(&frame).is_some(), is_free, "{} {}", at, bit);
        }

        #[test]
        fn no_message_panics(mut frame in prop::collection::vec(any::<u8>(), 0..160)) {
            let good = solicitation(own(), peer().1, None);
            let len = frame.len().min(62);
            frame[..len].copy_from_slice(&good[..len]);
            if frame.len() > MESSAGE_AT + 24 {
                // With a valid checksum.
                let len = frame.len() - MESSAGE_AT;
                frame[18..20].copy_from_slice(&(len as u16).to_be_bytes());
                frame[56..58].fill(0);
                let sum = sum(&frame[IP_AT..MESSAGE_AT], &frame[MESSAGE_AT..]);
                frame[56..58].copy_from_slice(&sum.to_ne_bytes());
            }
            let said = Ndp::parse(&frame);
            prop_assert!(said.is_none_or(|said| !said.sender.0.is_group()));
        }
    }
}
