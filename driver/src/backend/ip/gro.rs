//! Generic receive offload (GRO): the datagrams of one sender that arrive coalesced.
//!
//! `udp:` hands the kernel many frames at once (GSO), which the sender's NIC segments. Without a
//! NIC (a veth, a virtual machine's interface) they arrive unsegmented, one after the other behind
//! the headers of the first, of equal length but for the last. The headers do not carry the segment
//! length; the frames reveal it, since each begins with the same Ethernet header. A wrong segment
//! length costs the frames, which fail their checksums and are retransmitted.

use crate::frame::{ETH_HDR_LEN, RxFrame};

/// Longest payload of a datagram.
const DATAGRAM_MAX: usize = 65_507;

/// Non-empty bursts after a coalesced datagram in which another is expected. Each takes one frame.
const EXPECTED_BURSTS: u16 = 4096;

/// A copy of one coalesced datagram, whose frames are lent one by one.
pub(super) struct GroBuffer {
    bytes: Box<[u8]>,
    /// Offset of the next frame, end of the last, and length of each but the last, bytes. The
    /// length is tried first for the next datagram.
    at: usize,
    end: usize,
    segment_len: usize,
    /// The datagram was marked (CE): so are all of its frames.
    marked: bool,
    /// Non-empty bursts in which another is expected.
    expected: u16,
}

impl GroBuffer {
    pub(super) fn new() -> Self {
        Self {
            bytes: vec![0; DATAGRAM_MAX].into(),
            at: 0,
            end: 0,
            segment_len: 0,
            marked: false,
            expected: 0,
        }
    }

    /// Whether the next burst may hold a coalesced datagram.
    #[inline]
    pub(super) fn is_expected(&self) -> bool {
        self.expected > 0
    }

    /// Counts a non-empty burst.
    #[inline]
    pub(super) fn note_burst(&mut self) {
        self.expected = self.expected.saturating_sub(1);
    }

    /// Whether frames wait to be lent.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.at == self.end
    }

    /// Copies a coalesced datagram of frames of at most `frame_max` bytes. False if no segment
    /// length fits, or frames of the datagram before are left.
    pub(super) fn store(&mut self, datagram: &RxFrame<'_>, frame_max: usize) -> bool {
        let len = datagram.len();
        if !self.is_empty() || len > DATAGRAM_MAX || !datagram.copy_to(0, &mut self.bytes[..len]) {
            return false;
        }
        let found = find_segment_len(&self.bytes[..len], frame_max, self.segment_len);
        let Some(segment_len) = found else { return false };
        (self.at, self.end, self.segment_len, self.expected) =
            (0, len, segment_len, EXPECTED_BURSTS);
        self.marked = datagram.is_marked();
        true
    }

    /// The next frame, if one is left.
    pub(super) fn next(&mut self) -> Option<RxFrame<'_>> {
        let from = self.at;
        self.at = self.end.min(from + self.segment_len);
        let frame = || RxFrame::new(&self.bytes[from..self.at]).with_mark(self.marked);
        (from < self.end).then(frame)
    }
}

/// The segment length of a coalesced datagram: the least at which each frame begins with the
/// Ethernet header of the first. `before`: that of another datagram, which is tried first.
fn find_segment_len(datagram: &[u8], frame_max: usize, before: usize) -> Option<usize> {
    let head = datagram.first_chunk::<ETH_HDR_LEN>()?;
    let begins = |at: usize| datagram.get(at..at + ETH_HDR_LEN) == Some(head);
    let all = |len: usize| (len..datagram.len()).step_by(len).all(begins);
    let max = frame_max.min(datagram.len());
    if (ETH_HDR_LEN..=max).contains(&before) && begins(before) && all(before) {
        // Headers are at all multiples of the least, so the least divides this one.
        let mut parts = 2..=before / ETH_HDR_LEN;
        if !parts.any(|n| before.is_multiple_of(n) && begins(before / n)) {
            return Some(before);
        }
    }
    (ETH_HDR_LEN..=max).find(|&len| begins(len) && all(len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Goal: every coalesced datagram is segmented as it was sent, and nothing else is.
        #[test]
        fn a_coalesced_datagram_is_segmented_where_its_frames_end(
            len in ETH_HDR_LEN..1500_usize,
            count in 2..40_usize,
            last in ETH_HDR_LEN..1500_usize,
            times in 0..5_usize,
            seed: u8,
        ) {
            let last = last.min(len);
            let frame = |n: usize, len: usize| {
                let body = (0..len).map(move |at| (at * 31 + n * 7) as u8 ^ seed);
                (0..ETH_HDR_LEN as u8).chain(body.skip(ETH_HDR_LEN)).collect::<Vec<u8>>()
            };
            let len_of = |n| if n == count { last } else { len };
            let frames: Vec<_> = (1..=count).map(|n| frame(n, len_of(n))).collect();
            let bytes = frames.concat();
            prop_assume!(bytes.len() <= DATAGRAM_MAX);
            // Segments of the datagram before may have been as many times as long.
            let mut gro = GroBuffer { segment_len: times * len, ..GroBuffer::new() };
            let is_marked = seed % 2 == 1;
            let lent = RxFrame::new(&bytes).with_mark(is_marked);
            prop_assert!(gro.store(&lent, 1500));
            // One at a time.
            prop_assert!(!gro.store(&RxFrame::new(&bytes), 1500));
            for sent in &frames {
                let got = gro.next().unwrap();
                let mut copy = vec![0; got.len()];
                prop_assert!(got.copy_to(0, &mut copy));
                prop_assert_eq!((&copy, got.is_marked()), (sent, is_marked));
            }
            prop_assert!(gro.next().is_none() && gro.is_empty());
            prop_assert!(len < 40 || !gro.store(&RxFrame::new(&bytes), len - 1));
        }

        #[test]
        fn noise_keeps_its_length(bytes in prop::collection::vec(0..2_u8, 0..3000)) {
            let mut gro = GroBuffer::new();
            let len = bytes.len();
            if gro.store(&RxFrame::new(&bytes), 1500) {
                let mut all = 0;
                while let Some(frame) = gro.next() {
                    all += frame.len();
                }
                prop_assert_eq!(all, len);
            }
        }
    }
}
