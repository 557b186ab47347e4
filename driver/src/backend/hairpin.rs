//! Frames of a station to itself, which no switch sends back.

use crate::frame::{RxFrame, TxFrame};
use crate::port::{RxSink, Tx};

/// A queue of a few frames, whose memory is reserved when it is made.
pub(super) struct Hairpin {
    slots: Box<[(usize, Box<[u8]>)]>,
    head: usize,
    count: usize,
}

impl Hairpin {
    /// Room for `slot_count` frames of `frame_max` bytes.
    pub(super) fn new(slot_count: usize, frame_max: usize) -> Self {
        let slot = || (0, vec![0; frame_max].into_boxed_slice());
        Self { slots: (0..slot_count).map(|_| slot()).collect(), head: 0, count: 0 }
    }

    /// Whether no frame waits.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Takes a frame, if there is room.
    pub(super) fn push(&mut self, frame: &TxFrame<'_>) -> Tx {
        if self.count == self.slots.len() {
            return Tx::Full;
        }
        let at = (self.head + self.count) % self.slots.len();
        let (len, bytes) = &mut self.slots[at];
        *len = frame.copy_to(bytes);
        self.count += 1;
        Tx::Sent
    }

    /// Lends at most `max` frames, oldest first, and says how many and how many bytes.
    pub(super) fn lend(&mut self, max: usize, sink: &mut dyn RxSink) -> (usize, u64) {
        let count = max.min(self.count);
        let mut byte_count = 0;
        for _ in 0..count {
            let (len, bytes) = &self.slots[self.head];
            sink.frame(&RxFrame::new(&bytes[..*len]));
            byte_count += *len as u64;
            self.head = (self.head + 1) % self.slots.len();
            self.count -= 1;
        }
        (count, byte_count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_in_order_and_a_full_queue_says_so() {
        let mut hairpin = Hairpin::new(3, 64);
        for round in 0..5_u8 {
            for i in 0..3 {
                let frame = [round, i, 7];
                assert_eq!(hairpin.push(&TxFrame::whole(&frame[..2 + i as usize % 2])), Tx::Sent);
            }
            assert_eq!(hairpin.push(&TxFrame::whole(&[1])), Tx::Full);
            let mut got = Vec::new();
            let mut sink = |f: &RxFrame<'_>| {
                let mut bytes = vec![0; f.len()];
                assert!(f.copy_to(0, &mut bytes));
                got.push(bytes);
            };
            assert_eq!(hairpin.lend(2, &mut sink), (2, 5));
            assert_eq!(hairpin.lend(9, &mut sink), (1, 2));
            assert_eq!(got, [vec![round, 0], vec![round, 1, 7], vec![round, 2]]);
            assert!(hairpin.is_empty());
        }
    }
}
