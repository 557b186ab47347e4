//! ACK: what has arrived, 8 bytes and up to four words of selective acknowledgement.

use barewire_driver::frame::RxFrame;

use super::{BASE_LEN, Base, Bytes, WireError};
use crate::psn::Psn;

/// Header of an ACK. The base's `cack` is the cumulative part, its `psn` the sender's `snd_nxt`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AckOp {
    /// Time since the newest packet arrived, in units of 64 ns; `u16::MAX` for 4.2 ms or more.
    pub delay: u16,
    /// PSN of the packet that arrived last: the round trip is measured on it. `cack - 1` if none
    /// has arrived yet.
    pub newest: Psn,
    /// Bit `j` of word `i`: PSN `cack + 1 + 64 i + j` has arrived. Words from `count` on are 0.
    pub words: [u64; 4],
    /// Number of words sent, 0 to 4.
    pub count: u8,
    /// Packets that arrived a second time since the last ACK, at most [`Self::DUPS_MAX`]: what was
    /// sent again without need, or doubled on the way.
    pub dups: u8,
    /// The packet `newest` arrived as one that had been sent again (RTX was set).
    pub resent: bool,
}

impl AckOp {
    /// Length without words, bytes.
    pub const LEN: usize = 8;

    /// Most duplicates an ACK reports.
    pub const DUPS_MAX: u8 = 127;

    /// Most words an ACK has.
    pub const WORDS_MAX: usize = 4;

    /// Length in a frame, bytes.
    pub fn op_len(&self) -> usize {
        Self::LEN + 8 * usize::from(self.count)
    }

    /// Copies and checks the header.
    ///
    /// # Errors
    /// [`WireError::SackCount`], [`WireError::OpTruncated`].
    #[inline]
    pub fn parse(frame: &RxFrame<'_>, base: &Base) -> Result<Self, WireError> {
        let b = frame.chunk_at(BASE_LEN).ok_or(WireError::OpTruncated)?;
        let b = Bytes::<8>(b);
        let count = b.u8::<2>();
        if usize::from(count) > Self::WORDS_MAX {
            return Err(WireError::SackCount);
        }
        let (delay, newest) = (b.u16::<0>(), Psn(b.u32::<4>()));
        let (dups, resent) = (b.u8::<3>() & Self::DUPS_MAX, b.u8::<3>() > Self::DUPS_MAX);
        let mut ack = Self { delay, newest, words: [0; 4], count, dups, resent };
        for (i, word) in ack.words.iter_mut().take(count.into()).enumerate() {
            let w = frame.chunk_at(BASE_LEN + 8 + 8 * i).ok_or(WireError::OpTruncated)?;
            *word = u64::from_le_bytes(w);
        }
        base.check_end(frame, BASE_LEN + ack.op_len())?;
        Ok(ack)
    }

    /// The header but for its words, as it lies in a frame.
    #[inline(always)]
    pub fn head(&self) -> [u8; Self::LEN] {
        let mut b = Bytes::<{ Self::LEN }>::ZERO;
        b.put16::<0>(self.delay);
        b.put8::<2>(self.count);
        b.put8::<3>(self.dups.min(Self::DUPS_MAX) | u8::from(self.resent) << 7);
        b.put32::<4>(self.newest.0);
        b.0
    }

    /// Writes the header to the start of `out` and returns its length.
    ///
    /// # Panics
    /// If `out` is too short or `count` above 4.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        out[..Self::LEN].copy_from_slice(&self.head());
        let mut at = Self::LEN;
        for word in &self.words[..self.count.into()] {
            out[at..at + 8].copy_from_slice(&word.to_le_bytes());
            at += 8;
        }
        at
    }
}
