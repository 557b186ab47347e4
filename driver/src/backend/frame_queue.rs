//! Frames that wait in memory reserved for them: those of a station to itself, which no switch
//! sends back, and what a switch holds.

use crate::frame::{RxFrame, TxFrame};
use crate::port::{PortCounters, RxSink, Tx};

/// A queue of a few frames, whose memory is reserved when it is made.
pub(super) struct FrameQueue {
    slots: Box<[(usize, Box<[u8]>)]>,
    head: usize,
    count: usize,
}

impl FrameQueue {
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

    /// Takes a frame; false if there is no room.
    ///
    /// # Panics
    /// If the frame is longer than a place.
    pub(super) fn push(&mut self, frame: &TxFrame<'_>) -> bool {
        if self.count == self.slots.len() {
            return false;
        }
        let at = (self.head + self.count) % self.slots.len();
        let (len, bytes) = &mut self.slots[at];
        *len = frame.copy_to(bytes);
        self.count += 1;
        true
    }

    /// The oldest frame.
    pub(super) fn first(&self) -> Option<&[u8]> {
        let (len, bytes) = &self.slots[self.head];
        (self.count > 0).then(|| &bytes[..*len])
    }

    /// Gives up the oldest frame, which is there.
    pub(super) fn drop_first(&mut self) {
        self.head = (self.head + 1) % self.slots.len();
        self.count -= 1;
    }

    /// Takes a frame of a port to itself, as [`Port::tx`](crate::port::Port::tx).
    #[cold]
    pub(super) fn tx(&mut self, frame: &TxFrame<'_>, counters: &mut PortCounters) -> Tx {
        let sent = if self.push(frame) { Tx::Sent } else { Tx::Full };
        counters.tried(sent, frame.len())
    }

    /// Lends at most `max` frames, oldest first, and says how many.
    pub(super) fn rx_burst(
        &mut self,
        max: usize,
        sink: &mut dyn RxSink,
        counters: &mut PortCounters,
    ) -> usize {
        let mut lent = 0;
        while lent < max
            && let Some(frame) = self.first()
        {
            sink.frame(&RxFrame::new(frame));
            counters.received(frame.len());
            self.drop_first();
            lent += 1;
        }
        lent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_in_order_and_a_full_queue_says_so() {
        let mut queue = FrameQueue::new(3, 64);
        let mut counters = PortCounters::default();
        for round in 0..5_u8 {
            for i in 0..3 {
                let frame = [round, i, 7];
                let frame = TxFrame::whole(&frame[..2 + i as usize % 2]);
                assert_eq!(queue.tx(&frame, &mut counters), Tx::Sent);
            }
            assert_eq!(queue.tx(&TxFrame::whole(&[1]), &mut counters), Tx::Full);
            let mut got = Vec::new();
            let mut sink = |f: &RxFrame<'_>| {
                let mut bytes = vec![0; f.len()];
                assert!(f.copy_to(0, &mut bytes));
                got.push(bytes);
            };
            assert_eq!(queue.rx_burst(2, &mut sink, &mut counters), 2);
            assert_eq!(queue.rx_burst(9, &mut sink, &mut counters), 1);
            assert_eq!(got, [vec![round, 0], vec![round, 1, 7], vec![round, 2]]);
            assert!(queue.is_empty());
        }
        let all =
            PortCounters { rx_frames: 15, tx_frames: 15, rx_bytes: 35, tx_bytes: 35, ..counters };
        assert_eq!((counters, counters.tx_full), (all, 5));
    }
}
