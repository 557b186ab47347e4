//! ACK: acknowledges received packets. 8 bytes and up to 64 words of selective acknowledgement
//! (SACK).

use barewire_driver::frame::RxFrame;

use super::{BASE_LEN, Base, Bytes, WireError};
use crate::psn::Psn;

/// Header of an ACK, without its SACK words. The base's `cack` is the cumulative part, its `psn`
/// the sender's `snd_nxt`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AckOp {
    /// Time since packet `newest` arrived, in units of 64 ns; `u16::MAX` for 4.2 ms or more.
    pub delay: u16,
    /// PSN of the packet that arrived last, on which the round trip is measured. `cack - 1` if none
    /// has arrived yet.
    pub newest: Psn,
    /// Number of SACK words, 0 to [`Self::WORDS_MAX`]. Bit `j` of word `i`: PSN
    /// `cack + 1 + 64 i + j` has arrived.
    pub count: u8,
    /// Packets that arrived a second time since the last ACK, at most [`Self::DUPS_MAX`]: spurious
    /// retransmissions or duplicates of the network.
    pub dups: u8,
    /// Packet `newest` arrived as a retransmission (RTX was set).
    pub resent: bool,
}

impl AckOp {
    /// Length without words, bytes.
    pub const LEN: usize = 8;

    /// Most duplicates an ACK reports.
    pub const DUPS_MAX: u8 = 127;

    /// Most words an ACK has.
    pub const WORDS_MAX: usize = 64;

    /// Longest header with words, bytes.
    pub const LEN_MAX: usize = Self::LEN + 8 * Self::WORDS_MAX;

    /// Length in a frame, bytes.
    pub fn op_len(&self) -> usize {
        Self::LEN + 8 * usize::from(self.count)
    }

    /// Copies and validates the header. Its [words](Self::sack) are within the frame.
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
        let ack = Self { delay, newest, count, dups, resent };
        if frame.len() < BASE_LEN + ack.op_len() {
            return Err(WireError::OpTruncated);
        }
        base.check_end(frame, BASE_LEN + ack.op_len())?;
        Ok(ack)
    }

    /// Copies the SACK words of an ACK that was parsed from `frame` to `words`, and returns the
    /// filled part.
    pub fn sack<'a>(
        &self,
        frame: &RxFrame<'_>,
        words: &'a mut [u64; Self::WORDS_MAX],
    ) -> &'a [u64] {
        let words = &mut words[..usize::from(self.count).min(Self::WORDS_MAX)];
        for (i, word) in words.iter_mut().enumerate() {
            // `parse` has checked that all words are within the frame.
            let bytes = frame.chunk_at(BASE_LEN + Self::LEN + 8 * i).unwrap_or_default();
            *word = u64::from_le_bytes(bytes);
        }
        words
    }

    /// The header without its words, as in a frame.
    #[inline(always)]
    pub fn head(&self) -> [u8; Self::LEN] {
        let mut b = Bytes::<{ Self::LEN }>::ZERO;
        b.put16::<0>(self.delay);
        b.put8::<2>(self.count);
        b.put8::<3>(self.dups.min(Self::DUPS_MAX) | u8::from(self.resent) << 7);
        b.put32::<4>(self.newest.0);
        b.0
    }

    /// Writes the header with the first `count` of `words` to the start of `out`, and returns its
    /// length.
    ///
    /// # Panics
    /// If `out` or `words` is too short.
    #[inline]
    pub fn emit(&self, words: &[u64], out: &mut [u8]) -> usize {
        out[..Self::LEN].copy_from_slice(&self.head());
        let mut at = Self::LEN;
        for word in &words[..self.count.into()] {
            out[at..at + 8].copy_from_slice(&word.to_le_bytes());
            at += 8;
        }
        at
    }
}
