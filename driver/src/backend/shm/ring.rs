//! A ring of bytes between one producer and one consumer, with the frames inside it.
//!
//! ```text
//!  granule  0        1        2        3        4        5
//!          [word|frame ............ ][word|frame .... ][ 0 |   free
//!          ^ consumer's head                          ^ producer's tail
//! ```
//!
//! A frame lies in one piece in as many 64-byte granules as it needs, after a word that says so.
//! The word is published last, so the consumer polls the very line that the frame starts in: one
//! line moves between two cores for a short frame, and no index is shared on the way.
//!
//! Invariants:
//! - **The word at the tail is 0.** Before a word is published, the next word's place is cleared.
//!   So the word at the consumer's head is 0 or was published for this place, and never bytes of an
//!   old frame. The consumer never writes into the ring.
//! - **Clearing runs ahead.** The first words of all granules from the tail to `clear_to` are 0.
//!   After a frame is published, more granules are cleared, so that the next frame needs no stores
//!   but its own. Clearing stops at the consumer's head and at the ring's end; so a short frame
//!   that ends before `clear_to` needs no other check.
//! - **A word carries its place**: bits 32 to 63 are the low bits of the producer's total in
//!   granules. They are compared before the length is used, and detect a consumer out of step and
//!   corrupted memory.
//! - **Totals never wrap** (64 bits of bytes); a place is a total modulo the length.
//! - A frame that does not fit before the end leaves a padding word there and starts at 0.
//! - **A ring grows once.** A word at the producer's tail tells the consumer; the next word comes
//!   behind the old end, at the first total with that place in the longer ring. Until the consumer
//!   has reached it, nothing is written before the old end, where frames may still be unread.
//!
//! Words are checked against private state before they become offsets: a hostile producer can deny
//! its own frames and nothing else. The same holds for the head that the producer reads.
//!
//! # Ordering
//! - `publish` is a Release store and `word` an Acquire load of the same place: the frame's bytes
//!   and the cleared word after it are visible with the word. `clear` is Relaxed, being ordered
//!   before the next `publish` by that one's Release (the consumer comes to a place cleared ahead
//!   only by the word of the frame that ends there, published later), and is the only writer of
//!   that place since the consumer gave it back.
//! - `set_head` is a Release store after the consumer's last read of the bytes, `head` an Acquire
//!   load before the producer's first write over them: a frame is never overwritten under its
//!   reader.
//! - Nothing needs SeqCst: there is no decision that depends on two places at once. (The doorbell
//!   beside the ring does; see [`super`].)
//!
//! The model checker loom runs this code in the tests below.

use crate::hint::cold;

/// Unit of space in a ring: a cache line.
pub(super) const GRANULE: usize = 64;

/// Bytes of the word before a frame.
pub(super) const WORD_LEN: usize = 8;

/// How far ahead of the tail granules are cleared, and what is left when that is done again: one
/// frame of three lines.
const AHEAD: u64 = 32 * GRANULE as u64;
const AHEAD_MIN: u64 = 4 * GRANULE as u64;

/// In place of a length: the rest of the ring is empty, continue at its start.
const PAD: u32 = u32::MAX;
/// In place of a length: the ring is longer from here on, continue behind its old end.
const GROW: u32 = u32::MAX - 1;

/// The shared memory of one ring. `pos` is a multiple of [`GRANULE`] below the ring's length.
pub(super) trait RingMem {
    /// Reads the word at `pos`; Acquire.
    fn word(&self, pos: usize) -> u64;
    /// Writes 0 at `pos`; Relaxed.
    fn clear(&self, pos: usize);
    /// Writes `word` at `pos`; Release.
    fn publish(&self, pos: usize, word: u64);
    /// Reads the total that the consumer has given back; Acquire.
    fn head(&self) -> u64;
    /// Writes the total that the consumer has given back; Release.
    fn set_head(&self, total: u64);
}

/// Bytes of ring that a frame of `len` bytes takes.
#[inline]
pub(super) const fn slot_len(len: usize) -> usize {
    (len + WORD_LEN + GRANULE - 1) & !(GRANULE - 1)
}

#[inline]
const fn word_of(total: u64, len: u32) -> u64 {
    // A total is a multiple of GRANULE: this is its number in granules, shifted by 32.
    total << (32 - GRANULE.trailing_zeros()) | len as u64
}

/// The total at which a ring of `short` bytes continues after it grew to `len` bytes at `total`.
const fn grown_at(total: u64, short: u64, len: u64) -> u64 {
    let behind = (total & !(len - 1)) + short;
    if behind > total { behind } else { behind + len }
}

/// Why there is no place for a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoRoom {
    /// The consumer has to give something back first.
    Full,
    /// The ring is too short for the frame, whatever is given back.
    Long,
    /// The consumer's total is impossible: the shared memory was corrupted.
    Broken,
}

/// Space reserved for one frame, to be filled and then committed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reservation {
    /// Where the frame's first byte goes.
    pub(super) frame_pos: usize,
    word_pos: usize,
    end_pos: usize,
    start: u64,
    end: u64,
    /// Whether padding comes first, at the tail.
    is_padded: bool,
}

/// Space in `M` claimed for one short frame, to be filled and then committed.
#[derive(Debug)]
pub(super) struct FastSlot<M> {
    mem: M,
    word_pos: usize,
    word: u64,
    /// Whether [`Producer::clear_ahead`] is due once the frame is visible.
    pub(super) is_clearing_due: bool,
}

impl<M: RingMem> FastSlot<M> {
    /// Where the frame's first byte goes.
    #[inline(always)]
    pub(super) fn frame_pos(&self) -> usize {
        self.word_pos + WORD_LEN
    }

    /// Where its word goes, [`WORD_LEN`] bytes before.
    #[inline(always)]
    pub(super) fn word_pos(&self) -> usize {
        self.word_pos
    }

    /// The memory that this is a place of.
    #[inline(always)]
    pub(super) fn mem(&self) -> &M {
        &self.mem
    }

    /// Makes the frame that was written to this place visible.
    #[inline(always)]
    pub(super) fn commit(self) {
        self.mem.publish(self.word_pos, self.word);
    }
}

/// The writing end.
pub(super) struct Producer<M> {
    mem: M,
    len: u64,
    mask: u64,
    tail: u64,
    /// `tail` may not pass this: the consumer's head as last read, plus `len`.
    limit: u64,
    /// Granules from `tail` up to this have a word of 0; above `tail`, at most `limit`.
    clear_to: u64,
    /// Beyond this tail more of them are cleared; below `clear_to`.
    clear_at: u64,
    /// The total at which the ring grew, until the consumer has reached it; else 0.
    grown: u64,
    /// Bytes that the totals skipped when it grew.
    skipped: u64,
}

impl<M: RingMem> Producer<M> {
    /// The writing end of an empty ring of `len` bytes, a power of two and at least two granules,
    /// whose head is 0 and whose first word is 0.
    pub(super) fn new(mem: M, len: usize) -> Self {
        assert!(len.is_power_of_two() && len >= 2 * GRANULE);
        let len = len as u64;
        let clear_to = GRANULE as u64;
        let (mask, limit) = (len - 1, len);
        Self { mem, len, mask, tail: 0, limit, clear_to, clear_at: 0, grown: 0, skipped: 0 }
    }

    /// Grows the ring to `len` bytes, a power of two and more than now. All of them are allocated.
    pub(super) fn grow(&mut self, len: usize) {
        let (short, len) = (self.len, len as u64);
        assert!(len.is_power_of_two() && len > short);
        let start = grown_at(self.tail, short, len);
        self.mem.clear((start & (len - 1)) as usize);
        self.mem.publish((self.tail & self.mask) as usize, word_of(self.tail, GROW));
        self.skipped += start - self.tail;
        (self.len, self.mask) = (len, len - 1);
        (self.tail, self.grown, self.limit) = (start, start, start + len - short);
        self.set_clear(start + GRANULE as u64);
    }

    /// The memory below.
    pub(super) fn mem(&self) -> &M {
        &self.mem
    }

    /// Bytes of the ring.
    pub(super) fn ring_len(&self) -> usize {
        self.len as usize
    }

    /// Bytes that went through the ring, with words and padding.
    pub(super) fn passed(&self) -> u64 {
        self.tail - self.skipped
    }

    /// Claims space for a frame of `len` bytes that needs no clearing, no padding and no read of
    /// the consumer's head; `None` otherwise. The caller fills and [commits](FastSlot::commit) it
    /// before any other call, and then calls [`clear_ahead`](Self::clear_ahead) if
    /// `is_clearing_due`; without that, later claims return `None`.
    #[inline(always)]
    pub(super) fn claim_fast(&mut self, len: usize) -> Option<FastSlot<M>>
    where
        M: Clone,
    {
        let tail = self.tail;
        let end = tail + slot_len(len) as u64;
        // `clear_at` is below `clear_to`, so that one comparison is enough most often.
        let is_clearing_due = end > self.clear_at;
        // Before `clear_to` means: before the ring's end and inside the free space.
        if is_clearing_due && cold(end >= self.clear_to) {
            return cold(None);
        }
        self.tail = end;
        let (mem, word_pos) = (self.mem.clone(), (tail & self.mask) as usize);
        Some(FastSlot { mem, word_pos, word: word_of(tail, len as u32), is_clearing_due })
    }

    /// Clears the words of the next granules, as far as they are free and before the ring's end.
    #[inline(never)]
    pub(super) fn clear_ahead(&mut self) {
        let mask = self.mask;
        let lap_end = (self.tail | mask) + 1;
        let to = (self.tail + AHEAD).min(lap_end).min(self.limit);
        // Nothing to do near the end or the limit: `commit` clears there.
        if self.clear_to >= to {
            return;
        }
        // None of them is in another lap.
        let pos = (self.clear_to & mask) as usize;
        let end = pos + (to - self.clear_to) as usize;
        for at in (pos..end).step_by(GRANULE) {
            self.mem.clear(at);
        }
        self.set_clear(to);
    }

    #[inline(always)]
    fn set_clear(&mut self, to: u64) {
        (self.clear_to, self.clear_at) = (to, to.saturating_sub(AHEAD_MIN));
    }

    /// Reserves space for a frame of `len` bytes, which with its word is at most a quarter of the
    /// ring.
    ///
    /// # Errors
    /// [`NoRoom`]; nothing changed.
    #[inline(always)]
    pub(super) fn reserve(&mut self, len: usize) -> Result<Reservation, NoRoom> {
        let slot = slot_len(len) as u64;
        if slot > self.len / 4 {
            return cold(Err(NoRoom::Long));
        }
        let mask = self.mask;
        let at = self.tail & mask;
        let is_padded = at + slot > self.len;
        let start = if is_padded { self.tail + (self.len - at) } else { self.tail };
        let end = start + slot;
        // One granule more for the word that has to be cleared after this slot.
        if end + GRANULE as u64 > self.limit {
            self.refill(end + GRANULE as u64)?;
        }
        let word_pos = (start & mask) as usize;
        let end_pos = (end & mask) as usize;
        Ok(Reservation { frame_pos: word_pos + WORD_LEN, word_pos, end_pos, start, end, is_padded })
    }

    #[cold]
    fn refill(&mut self, need: u64) -> Result<(), NoRoom> {
        let head = self.mem.head();
        if head < self.grown {
            return Err(NoRoom::Full);
        }
        self.grown = 0;
        // Only whole granules are given back: `clear_to` may be the limit, and is written at.
        let is_granules = head.is_multiple_of(GRANULE as u64);
        if !is_granules || head > self.tail || self.tail - head > self.len {
            return Err(NoRoom::Broken);
        }
        self.limit = head + self.len;
        if need > self.limit { Err(NoRoom::Full) } else { Ok(()) }
    }

    /// Makes the frame of `len` bytes that was written to `place` visible.
    #[inline(always)]
    pub(super) fn commit(&mut self, place: Reservation, len: usize) {
        if place.end >= self.clear_to {
            self.mem.clear(place.end_pos);
            self.set_clear(place.end + GRANULE as u64);
        }
        self.mem.publish(place.word_pos, word_of(place.start, len as u32));
        if place.is_padded {
            // The consumer is still before the padding, so this is what makes the frame visible.
            let at = (self.tail & self.mask) as usize;
            self.mem.publish(at, word_of(self.tail, PAD));
        }
        self.tail = place.end;
        if self.tail > self.clear_at {
            self.clear_ahead();
        }
    }
}

/// What the consumer finds at the head of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RingItem {
    /// Nothing yet.
    Empty,
    /// A frame of `len` bytes at `pos`, lent until [`Consumer::release`].
    Frame {
        /// Its first byte.
        pos: usize,
        /// Its length, at least `FRAME_MIN` and at most `frame_max`.
        len: usize,
    },
    /// The ring is longer from here on: [`Consumer::grow`] goes on there.
    Grow,
    /// An invalid word. The ring cannot be used any more.
    Broken,
}

/// The reading end, of frames of at least `FRAME_MIN` bytes.
pub(super) struct Consumer<M, const FRAME_MIN: usize> {
    mem: M,
    len: u64,
    mask: u64,
    frame_max: u32,
    /// Longest plain frame less `FRAME_MIN`.
    plain_span: u64,
    head: u64,
    /// The head at which `set_head` is called next.
    publish_at: u64,
    /// The nearer of `publish_at` and the end of the lap, which a plain frame stays before.
    plain_end: u64,
    /// Bytes that the totals skipped when the ring grew.
    skipped: u64,
}

impl<M: RingMem, const FRAME_MIN: usize> Consumer<M, FRAME_MIN> {
    /// Bytes that went through the ring, with words and padding.
    pub(super) fn passed(&self) -> u64 {
        self.head - self.skipped
    }

    /// Bytes of the ring.
    pub(super) fn ring_len(&self) -> usize {
        self.len as usize
    }

    /// The reading end of an empty ring of `len` bytes, a power of two.
    ///
    /// # Panics
    /// If a frame of `frame_max` bytes takes more than a quarter of the ring, from where on the
    /// producer could wait for ever.
    pub(super) fn new(mem: M, len: usize, frame_max: usize) -> Self {
        const { assert!(FRAME_MIN > 0) };
        assert!(len.is_power_of_two() && slot_len(frame_max) <= len / 4 && FRAME_MIN <= frame_max);
        let plain_span = (frame_max - FRAME_MIN) as u64;
        let frame_max = frame_max as u32;
        let (len, publish_at) = (len as u64, len as u64 / 8);
        let (mask, plain_end) = (len - 1, publish_at);
        Self { mem, len, mask, frame_max, plain_span, head: 0, publish_at, plain_end, skipped: 0 }
    }

    /// Follows the producer, of whom [`RingItem::Grow`] was taken, into a ring of `len` bytes, a
    /// power of two and more than it was, with frames of at most `frame_max` bytes. All of `len` is
    /// memory. Frames that are lent stay so until [`release`](Self::release), which tells the
    /// producer.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    pub(super) fn grow(&mut self, len: usize, frame_max: usize) {
        assert!(len.is_power_of_two() && len as u64 > self.len);
        assert!(slot_len(frame_max) <= len / 4 && FRAME_MIN <= frame_max);
        let (short, len) = (self.len, len as u64);
        let start = grown_at(self.head, short, len);
        self.skipped += start - self.head;
        (self.len, self.mask, self.head) = (len, len - 1, start);
        (self.frame_max, self.plain_span) = (frame_max as u32, (frame_max - FRAME_MIN) as u64);
        (self.publish_at, self.plain_end) = (start, start);
    }

    /// Leaves frames longer than `len_max` to [`take`](Self::take).
    pub(super) fn set_plain_max(&mut self, len_max: usize) {
        let max = len_max.min(self.frame_max as usize).max(FRAME_MIN);
        self.plain_span = (max - FRAME_MIN) as u64;
    }

    /// The memory below.
    pub(super) fn mem(&self) -> &M {
        &self.mem
    }

    /// Whether [`take`](Self::take) would find something.
    #[inline]
    pub(super) fn pending(&self) -> bool {
        self.mem.word(self.pos()) != 0
    }

    /// Where the next word will come.
    #[inline]
    pub(super) fn pos(&self) -> usize {
        (self.head & self.mask) as usize
    }

    /// Takes the frame at the head. Its bytes stay until [`release`](Self::release).
    #[inline(always)]
    pub(super) fn take(&mut self) -> RingItem {
        let word = self.mem.word(self.pos());
        if word == 0 {
            return RingItem::Empty;
        }
        self.check(word)
    }

    /// Takes the frame at the head if it is no longer than [`set_plain_max`](Self::set_plain_max)
    /// said, nothing but a frame is there, it ends before the ring does and there is nothing to
    /// [`release`](Self::release) after it; otherwise changes nothing and says [`RingItem::Empty`].
    /// `word` is what [`RingMem::word`] reads at [`pos`](Self::pos).
    #[inline(always)]
    pub(super) fn take_plain(&mut self, word: u64) -> RingItem {
        let head = self.head;
        // The word of another place leaves no valid length.
        let len = word ^ word_of(head, 0);
        if len.wrapping_sub(FRAME_MIN as u64) > self.plain_span {
            return cold(RingItem::Empty);
        }
        let end = head + slot_len(len as usize) as u64;
        // Before `plain_end` means: in the lap in which that was set, so `head` is in it as well.
        if end >= self.plain_end {
            return cold(RingItem::Empty);
        }
        self.head = end;
        RingItem::Frame { pos: (head & self.mask) as usize + WORD_LEN, len: len as usize }
    }

    #[inline(always)]
    fn check(&mut self, word: u64) -> RingItem {
        let len = word as u32;
        let pos = self.pos();
        if word != word_of(self.head, len) {
            return RingItem::Broken;
        }
        match len {
            PAD => return self.skip(pos),
            GROW => return cold(RingItem::Grow),
            _ => {}
        }
        let slot = slot_len(len as usize);
        let is_possible = len >= FRAME_MIN as u32 && len <= self.frame_max;
        if !is_possible || pos + slot > self.len as usize {
            return RingItem::Broken;
        }
        self.head += slot as u64;
        RingItem::Frame { pos: pos + WORD_LEN, len: len as usize }
    }

    #[cold]
    fn skip(&mut self, pos: usize) -> RingItem {
        // Padding fills the end, so it is never at the start; this also bounds the recursion.
        if pos == 0 {
            return RingItem::Broken;
        }
        self.head += self.len - pos as u64;
        match self.mem.word(0) {
            0 => RingItem::Empty,
            word => self.check(word),
        }
    }

    /// Gives the space of all taken frames back to the producer.
    ///
    /// The head is published only after an eighth of the ring, since that costs the producer a
    /// cache miss. The producer can send meanwhile: an eighth and a frame with its padding are less
    /// than the ring.
    #[inline(always)]
    pub(super) fn release(&mut self) {
        if self.head >= self.plain_end {
            cold(());
            if self.head >= self.publish_at {
                self.publish_at = self.head + self.len / 8;
                self.mem.set_head(self.head);
            }
            let lap_end = (self.head | self.mask) + 1;
            self.plain_end = self.publish_at.min(lap_end);
        }
    }
}

#[cfg(test)]
mod tests;
