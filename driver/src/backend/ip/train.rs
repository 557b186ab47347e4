//! Trains: datagrams of one sender that came in one piece.
//!
//! `udp:` gives the kernel many frames at once, which the sender's card cuts. Where there is no
//! card (a veth, a virtual machine's interface) they arrive uncut, one after the other under the
//! headers of the first, equally long but for the last. The headers do not say how long; the frames
//! do, as each begins with the same Ethernet header. A cut in the wrong place costs a frame, which
//! its checksum tells, and which is repeated alone.

use crate::frame::{ETH_HDR_LEN, RxFrame};

/// Longest payload of a datagram.
const TRAIN_MAX: usize = 65_507;

/// Bursts with a frame after a train in which another one may come. Each of them is of one frame.
const EXPECTED: u16 = 4096;

/// One train, whose frames are lent one by one.
pub(super) struct Train {
    bytes: Box<[u8]>,
    /// The next frame, the end of all, and how long each but the last is.
    at: usize,
    end: usize,
    cut: usize,
    /// Its headers were marked: all of its frames are.
    marked: bool,
    /// Bursts for which another one is expected.
    expected: u16,
}

impl Train {
    pub(super) fn new() -> Self {
        Self { bytes: vec![0; TRAIN_MAX].into(), at: 0, end: 0, cut: 0, marked: false, expected: 0 }
    }

    /// Whether the next burst may have one.
    #[inline]
    pub(super) fn may_come(&self) -> bool {
        self.expected > 0
    }

    /// A burst had something.
    #[inline]
    pub(super) fn note_burst(&mut self) {
        self.expected = self.expected.saturating_sub(1);
    }

    /// Whether frames wait to be lent.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.at == self.end
    }

    /// Copies a train, of frames of `frame_max` bytes at most. False if it is none, or the one
    /// before has not been lent whole.
    pub(super) fn take(&mut self, train: &RxFrame<'_>, frame_max: usize) -> bool {
        let len = train.len();
        if !self.is_empty() || len > TRAIN_MAX || !train.copy_to(0, &mut self.bytes[..len]) {
            return false;
        }
        let Some(cut) = cut(&self.bytes[..len], frame_max) else { return false };
        (self.at, self.end, self.cut, self.expected) = (0, len, cut, EXPECTED);
        self.marked = train.is_marked();
        true
    }

    /// The next frame, if one is left.
    pub(super) fn next(&mut self) -> Option<RxFrame<'_>> {
        let from = self.at;
        self.at = self.end.min(from + self.cut);
        let frame = || RxFrame::new(&self.bytes[from..self.at]).with_mark(self.marked);
        (from < self.end).then(frame)
    }
}

/// How long the frames of a train are: so that each begins as the first does.
fn cut(train: &[u8], frame_max: usize) -> Option<usize> {
    let head = train.first_chunk::<ETH_HDR_LEN>()?;
    let begins = |at: usize| train.get(at..at + ETH_HDR_LEN) == Some(head);
    let all = |cut: usize| (cut..train.len()).step_by(cut).all(begins);
    (ETH_HDR_LEN..=frame_max.min(train.len())).find(|&cut| begins(cut) && all(cut))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Goal: every train is cut as it was made, and nothing else is cut.
        #[test]
        fn a_train_is_cut_where_its_frames_end(
            len in ETH_HDR_LEN..1500_usize,
            count in 2..40_usize,
            last in ETH_HDR_LEN..1500_usize,
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
            prop_assume!(bytes.len() <= TRAIN_MAX);
            let mut train = Train::new();
            let is_marked = seed % 2 == 1;
            let lent = RxFrame::new(&bytes).with_mark(is_marked);
            prop_assert!(train.take(&lent, 1500));
            // One at a time.
            prop_assert!(!train.take(&RxFrame::new(&bytes), 1500));
            for sent in &frames {
                let got = train.next().unwrap();
                let mut copy = vec![0; got.len()];
                prop_assert!(got.copy_to(0, &mut copy));
                prop_assert_eq!((&copy, got.is_marked()), (sent, is_marked));
            }
            prop_assert!(train.next().is_none() && train.is_empty());
            prop_assert!(len < 40 || !train.take(&RxFrame::new(&bytes), len - 1));
        }

        #[test]
        fn noise_is_no_train(bytes in prop::collection::vec(0..2_u8, 0..3000)) {
            let mut train = Train::new();
            let len = bytes.len();
            if train.take(&RxFrame::new(&bytes), 1500) {
                let mut all = 0;
                while let Some(frame) = train.next() {
                    all += frame.len();
                }
                prop_assert_eq!(all, len);
            }
        }
    }
}
