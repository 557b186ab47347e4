//! VLAN tagging with a priority: a port that wraps any port that sends Ethernet frames.
//!
//! `tx` inserts the tag between the MACs and the EtherType. Received frames without the VLAN's tag
//! are dropped, by a filter in the kernel if there is one. Raw sockets receive frames whose tag the
//! kernel has stripped; all other ports receive it in the frame, which is copied once without the
//! tag. The priority of received frames is ignored.
//!
//! A tag takes 4 bytes of the MTU of the port below.
//!
//! Source: IEEE 802.1Q, clause 9 (tag: EtherType 0x8100, 3 bits of priority, 1 that is 0, 12 of the
//! VLAN; 0 is no VLAN, only a priority).

use std::fmt;

use crate::error::OpenError;
use crate::frame::{ETH_HDR_LEN, RxFrame, TxFrame};
use crate::port::{Port, PortCaps, PortCounters, PortGone, RxSink, Tx};

/// EtherType of a tag.
pub const ETHERTYPE_VLAN: u16 = 0x8100;
/// Bytes of a tag.
pub const TAG_LEN: usize = 4;
/// Mask of the VLAN ID in a tag's second half.
pub const VLAN_ID: u16 = 0x0fff;
/// Offset of a tag, behind both MACs, bytes.
const TAG_AT: usize = 12;

/// Tag of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VlanSettings {
    /// The VLAN, 1 to 4,094; 0 for a priority without a VLAN.
    pub id: u16,
    /// Priority code point of frames that are sent, 0 to 7. Default 0.
    pub pcp: u8,
}

impl VlanSettings {
    /// Validates the settings.
    ///
    /// # Errors
    /// The value out of range, and the range.
    pub fn check(self) -> Result<(), String> {
        match self {
            Self { id: 4095.., .. } => {
                Err(format!("VLAN {}; write vlan(1) to vlan(4094)", self.id))
            }
            Self { pcp: 8.., .. } => Err(format!("priority {}; write pcp=0 to pcp=7", self.pcp)),
            _ => Ok(()),
        }
    }

    fn tag(self) -> [u8; TAG_LEN] {
        let [a, b] = ETHERTYPE_VLAN.to_be_bytes();
        let [c, d] = (u16::from(self.pcp) << 13 | self.id).to_be_bytes();
        [a, b, c, d]
    }
}

/// See the module's documentation.
pub struct Vlan {
    inner: Box<dyn Port>,
    caps: PortCaps,
    tag: [u8; TAG_LEN],
    id: u16,
    /// The port below may deliver frames of the VLAN with the tag stripped.
    is_stripped_below: bool,
    /// Buffers: the head of a sent frame with the tag, and a received frame without it.
    head: Box<[u8]>,
    untagged: Box<[u8]>,
    counters: PortCounters,
}

impl fmt::Debug for Vlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Vlan").field(&self.caps.name).finish()
    }
}

impl Vlan {
    /// Wraps `inner`, with `spec` before its name. `is_stripped_below`: a received frame without a
    /// tag is of the VLAN.
    ///
    /// # Errors
    /// [`OpenError`]: `inner` carries too little.
    pub fn new(
        inner: Box<dyn Port>,
        settings: VlanSettings,
        is_stripped_below: bool,
        spec: &str,
    ) -> Result<Self, OpenError> {
        let below = inner.caps();
        let mtu = below.mtu.saturating_sub(TAG_LEN);
        OpenError::check_mtu(mtu, mtu)?;
        // The kernel's interfaces do not count the tag in their MTU, so longer frames may arrive.
        let frame_max = ETH_HDR_LEN + below.mtu;
        let caps = PortCaps {
            mtu,
            lossless: false,
            gather: false,
            tells_presence: false,
            near_mtu: 0,
            name: format!("{spec}:{}", below.name),
            ..below.clone()
        };
        Ok(Self {
            inner,
            caps,
            tag: settings.tag(),
            id: settings.id,
            is_stripped_below,
            head: vec![0; TAG_LEN + frame_max].into(),
            untagged: vec![0; frame_max].into(),
            counters: PortCounters::default(),
        })
    }
}

impl Port for Vlan {
    fn caps(&self) -> &PortCaps {
        &self.caps
    }

    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        let (len, head) = (frame.len(), frame.head);
        let is_fit = head.len() >= ETH_HDR_LEN && len <= ETH_HDR_LEN + self.caps.mtu;
        assert!(is_fit, "frame of {len} bytes");
        let (addresses, rest) = head.split_at(TAG_AT);
        self.head[..TAG_AT].copy_from_slice(addresses);
        self.head[TAG_AT..TAG_AT + TAG_LEN].copy_from_slice(&self.tag);
        self.head[TAG_AT + TAG_LEN..TAG_LEN + head.len()].copy_from_slice(rest);
        let head = &self.head[..TAG_LEN + head.len()];
        let sent = self.inner.tx(&TxFrame { head, ..*frame })?;
        if sent == Tx::Sent {
            self.counters.sent(len);
        }
        Ok(sent)
    }

    fn flush(&mut self) -> Result<(), PortGone> {
        self.inner.flush()
    }

    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        let before = self.counters.rx_frames;
        let Self { inner, id, is_stripped_below, untagged, counters, .. } = self;
        let (id, is_stripped) = (*id, *is_stripped_below);
        inner.rx_burst(max, &mut UntagSink { id, is_stripped, untagged, counters, sink })?;
        Ok((self.counters.rx_frames - before) as usize)
    }

    /// Frames are counted without tags; drops include those of the port below, whose other counters
    /// are passed on.
    fn counters(&self) -> PortCounters {
        let below = self.inner.counters();
        PortCounters {
            rx_frames: self.counters.rx_frames,
            rx_bytes: self.counters.rx_bytes,
            rx_dropped: self.counters.rx_dropped + below.rx_dropped,
            tx_frames: self.counters.tx_frames,
            tx_bytes: self.counters.tx_bytes,
            ..below
        }
    }

    fn below(&self) -> Option<&dyn Port> {
        Some(&*self.inner)
    }

    fn damages(&self) -> bool {
        true
    }
}

/// Lends frames without their tags.
struct UntagSink<'a> {
    id: u16,
    is_stripped: bool,
    untagged: &'a mut [u8],
    counters: &'a mut PortCounters,
    sink: &'a mut dyn RxSink,
}

impl UntagSink<'_> {
    fn lend(&mut self, frame: &RxFrame<'_>) {
        self.counters.received(frame.len());
        self.sink.frame(frame);
    }

    /// Copies a frame of the VLAN without its tag, and returns the copy's length.
    fn untag(&mut self, frame: &RxFrame<'_>) -> Option<usize> {
        let [c, d] = frame.chunk_at(TAG_AT + 2)?;
        let len = frame.len() - TAG_LEN;
        let fits = len >= ETH_HDR_LEN && len <= self.untagged.len();
        if !fits || u16::from_be_bytes([c, d]) & VLAN_ID != self.id {
            return None;
        }
        let (addresses, rest) = self.untagged[..len].split_at_mut(TAG_AT);
        let is_whole = frame.copy_to(0, addresses) && frame.copy_to(TAG_AT + TAG_LEN, rest);
        is_whole.then_some(len)
    }
}

impl RxSink for UntagSink<'_> {
    fn prefetch(&mut self, frame: &RxFrame<'_>) {
        // What is copied is fetched by that.
        if self.is_stripped {
            self.sink.prefetch(frame);
        }
    }

    fn frame(&mut self, frame: &RxFrame<'_>) {
        let is_tagged = frame.chunk_at(TAG_AT) == Some(ETHERTYPE_VLAN.to_be_bytes());
        if !is_tagged && self.is_stripped {
            return self.lend(frame);
        }
        let Some(len) = is_tagged.then(|| self.untag(frame)).flatten() else {
            self.counters.rx_dropped += 1;
            return;
        };
        self.counters.received(len);
        self.sink.frame(&RxFrame::new(&self.untagged[..len]).with_mark(frame.is_marked()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::loopback::Loopback;
    use crate::port::MacAddr;

    const TAG: VlanSettings = VlanSettings { id: 100, pcp: 3 };

    fn received(port: &mut dyn Port) -> Vec<Vec<u8>> {
        let mut got = Vec::new();
        let mut sink = |frame: &RxFrame<'_>| {
            let mut bytes = vec![0; frame.len()];
            assert!(frame.copy_to(0, &mut bytes));
            got.push(bytes);
        };
        port.rx_burst(64, &mut sink).unwrap();
        got
    }

    fn frame(to: MacAddr, from: MacAddr, len: usize) -> Vec<u8> {
        let head = [&to.0[..], &from.0, &[0x88, 0xb5]].concat();
        head.into_iter().chain((0..).map(|i: u32| i as u8)).take(len).collect()
    }

    /// Goal: a tag is where a library finds it, with everything else of the frame around it, and
    /// the other end takes it off.
    #[test]
    fn a_frame_travels_with_its_tag() {
        let (a, mut b) = Loopback::pair();
        let (from, to) = (a.caps().station.mac, b.caps().station.mac);
        let mut a = Vlan::new(Box::new(a), TAG, false, "vlan(100,pcp=3)").unwrap();
        assert_eq!((a.caps().mtu, a.caps().lossless), (8996, false));
        let sent: Vec<_> = [14, 60, 64, 1514, 9010].map(|len| frame(to, from, len)).into();
        for frame in &sent {
            let (head, tail) = frame.split_at(frame.len().min(40));
            let parts = TxFrame { head, tail, ..TxFrame::whole(&[]) };
            assert_eq!(a.tx(&parts), Ok(Tx::Sent));
        }
        a.flush().unwrap();
        let got = received(&mut b);
        for (got, sent) in got.iter().zip(&sent) {
            let packet = etherparse::SlicedPacket::from_ethernet(got).unwrap();
            let etherparse::VlanSlice::SingleVlan(tag) = packet.vlan().unwrap() else { panic!() };
            assert_eq!(
                (tag.vlan_identifier().value(), tag.priority_code_point().value()),
                (100, 3)
            );
            assert_eq!((&got[..12], &got[16..]), (&sent[..12], &sent[12..]));
        }
        assert_eq!(got.len(), sent.len());
        let mut b = Vlan::new(Box::new(b), VlanSettings { pcp: 0, ..TAG }, false, "x").unwrap();
        for frame in &sent {
            assert_eq!(a.tx(&TxFrame::whole(frame)), Ok(Tx::Sent));
        }
        assert_eq!(received(&mut b), sent);
        let bytes = sent.iter().map(|frame| frame.len() as u64).sum::<u64>();
        assert_eq!((b.counters().rx_bytes, a.counters().tx_bytes), (bytes, 2 * bytes));
    }

    /// Goal: frames of another VLAN, untagged and truncated ones are dropped and counted; with a
    /// port below that strips tags, untagged ones are accepted.
    #[test]
    fn frames_of_other_vlans_are_dropped() {
        for is_stripped in [false, true] {
            let (mut a, b) = Loopback::pair();
            let (from, to) = (a.caps().station.mac, b.caps().station.mac);
            let mut b = Vlan::new(Box::new(b), TAG, is_stripped, "x").unwrap();
            let plain = frame(to, from, 60);
            let tagged = |tag: [u8; 4]| [&plain[..12], &tag, &plain[12..]].concat();
            let mine = tagged([0x81, 0, 0xe0, 100]);
            let long = frame(to, from, 9014);
            let sent = [
                plain.clone(),
                mine.clone(),
                tagged([0x81, 0, 0x60, 101]),
                tagged([0x88, 0xa8, 0x60, 100]),
                mine[..17].to_vec(),
                mine[..14].to_vec(),
                [&long[..12], &[0x81, 0, 0, 100], &long[12..9010]].concat(),
            ];
            for frame in &sent {
                assert_eq!(a.tx(&TxFrame::whole(frame)), Ok(Tx::Sent));
            }
            let mut want = vec![plain.clone(), [&long[..9010]].concat()];
            if is_stripped {
                want.insert(0, plain.clone());
                want.insert(2, tagged([0x88, 0xa8, 0x60, 100]));
            }
            assert_eq!(received(&mut b), want, "{is_stripped}");
            assert_eq!(b.counters().rx_dropped, (sent.len() - want.len()) as u64);
        }
    }

    #[test]
    fn tags_out_of_range_are_rejected() {
        for (id, pcp, is_right) in
            [(0, 0, true), (4094, 7, true), (4095, 0, false), (9, 8, false), (u16::MAX, 0, false)]
        {
            assert_eq!(VlanSettings { id, pcp }.check().is_ok(), is_right, "{id} {pcp}");
        }
        let short = crate::backend::loopback::LoopbackSettings { mtu: 258, ring_count: 2 };
        let a = Loopback::segment(1, short).remove(0);
        assert!(Vlan::new(Box::new(a), TAG, false, "x").is_err());
    }
}
