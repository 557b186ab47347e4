//! Descriptor rings of VMware's vmxnet3 (`vmxnet3_defs.h`, revision 1), as the driver sees them.
//!
//! Each direction has two rings of equal length: of commands, which the driver writes and the
//! device reads, and of completions, the other way round. Who has written a descriptor last is told
//! by its generation bit: 1 in the first pass over a ring, 0 in the second, and so on. No index is
//! shared; the producer registers only wake the device.
//!
//! Buffer `i` belongs to command `i` for the life of the ring, so its address is written once, and
//! every frame lies in one buffer. The driver keeps one command of each ring back, because a device
//! that goes by the register could not tell a full ring from an empty one.
//!
//! A completion names the last command that it is for. The device completes in order and may skip:
//! all commands up to that one are the driver's again. A name of a command that the device does not
//! have is [`Broken`].
//!
//! # Ordering
//! As [`e1000`](super::e1000) has it: generation and length are one 64-bit word, read by an Acquire
//! load and written by a Release store. What stands in the first word of a completion is written by
//! the device before, and read after it.

use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::desc::{Descs, Received};
use super::virtq::Broken;

/// Fewest commands of a ring, whose length has to be a multiple of that.
pub const COUNT_MIN: u32 = 32;
/// What a ring's address has to be a multiple of.
pub const ALIGN: usize = 512;
/// Longest buffer, one less than the bits of a length tell apart.
pub const LEN_MAX: usize = LEN_BITS as usize;

/// Bits of a length, in the second half of commands and of completed receptions.
pub const LEN_BITS: u64 = (1 << 14) - 1;
/// Generation of a command to send.
pub const TX_GEN: u64 = 1 << 14;
/// Flags of a command to send: last of its frame, and a completion is wanted.
pub const TX_FLAGS: u64 = (1 << 12 | 1 << 13) << 32;
/// Generation of a command to receive.
pub const RX_GEN: u64 = 1 << 31;
/// Generation of a completion, in its second half.
pub const DONE_GEN: u64 = 1 << 63;
/// Bits of the command's number in the first half of a completion.
pub const INDEX_BITS: u64 = (1 << 12) - 1;
/// Both ends of a frame lie in this buffer, in the first half of a completed reception.
pub const RX_WHOLE: u64 = 1 << 14 | 1 << 15;
/// The ring of a received frame, in the first half: 0, the one that has buffers.
pub const RX_RING: u64 = 0x3ff << 16;
/// The frame is cut or damaged, in the second half of a completed reception.
pub const RX_ERROR: u64 = 1 << 14;

const TX_STRANGE: Broken = Broken("it completed a frame that it did not have");
const RX_STRANGE: Broken = Broken("it returned a buffer that it did not have");

/// Whether descriptor `i`, counted from the start, is of a pass whose generation bit is 1.
fn is_odd_pass(i: u32, mask: u32) -> bool {
    i & (mask + 1) == 0
}

/// What both directions have: the commands, and the completions that come back.
struct Pair {
    commands: Descs,
    completions: Descs,
    /// Commands given to the device in all.
    given: u32,
    /// Commands that it was found to be done with.
    done: u32,
    /// Completions read.
    read: u32,
}

impl Pair {
    /// # Safety
    /// As [`RxRing::new`].
    unsafe fn new(memory: [NonNull<u8>; 2], count: u32, addr_of: impl Fn(u32) -> u64) -> Self {
        assert!(count >= COUNT_MIN);
        for base in memory {
            assert!((base.as_ptr() as usize).is_multiple_of(ALIGN));
        }
        // SAFETY: the caller's promise.
        let [commands, completions] = memory.map(|base| unsafe { Descs::new(base, count) });
        for i in 0..count {
            commands.half(i, 0).store(addr_of(i).to_le(), Relaxed);
            // Of the pass before the first.
            commands.half(i, 1).store(0, Relaxed);
            completions.half(i, 1).store(0, Relaxed);
        }
        Self { commands, completions, given: 0, done: 0, read: 0 }
    }

    fn mask(&self) -> u32 {
        self.commands.mask()
    }

    /// Commands that may still be given.
    #[inline]
    fn room(&self) -> u32 {
        self.mask() - self.given.wrapping_sub(self.done)
    }

    /// Gives the next command, whose second half is `word` with the generation `generation`.
    #[inline]
    fn give(&mut self, word: u64, generation: u64) {
        let bit = if is_odd_pass(self.given, self.mask()) { generation } else { 0 };
        self.commands.half(self.given, 1).store((word | bit).to_le(), Release);
        self.given = self.given.wrapping_add(1);
    }

    /// The second half of the next completion, if there is one.
    #[inline]
    fn peek(&self) -> Option<u64> {
        let word = u64::from_le(self.completions.half(self.read, 1).load(Acquire));
        (is_odd_pass(self.read, self.mask()) == (word & DONE_GEN != 0)).then_some(word)
    }

    /// Takes that completion; gives its first half. `strange` if it is for none that is out.
    #[inline]
    fn take(&mut self, strange: Broken) -> Result<u64, Broken> {
        let first = u64::from_le(self.completions.half(self.read, 0).load(Relaxed));
        let index = (first & INDEX_BITS) as u32;
        let skipped = index.wrapping_sub(self.done) & self.mask();
        if index > self.mask() || skipped >= self.given.wrapping_sub(self.done) {
            return Err(strange);
        }
        self.read = self.read.wrapping_add(1);
        self.done = self.done.wrapping_add(skipped + 1);
        Ok(first)
    }
}

/// The driver's end of the receive rings.
pub struct RxRing {
    pair: Pair,
    /// Second half of each command, without its generation.
    word: u64,
}

impl RxRing {
    /// Rings of `count` descriptors at `memory` (commands, completions), with buffers of `len`
    /// bytes of which number `i` is at the device's address `addr_of(i)`. All but one are the
    /// device's as soon as it runs.
    ///
    /// # Safety
    /// `count * 16` bytes at each place of `memory` are mapped, and reached by nobody but this and
    /// the device for as long as it lives.
    ///
    /// # Panics
    /// If `count` is no power of two from 32 to 4096, a place is not aligned to 512, or `len` is
    /// 0 or above [`LEN_MAX`].
    pub unsafe fn new(
        memory: [NonNull<u8>; 2],
        count: u32,
        len: usize,
        addr_of: impl Fn(u32) -> u64,
    ) -> Self {
        assert!((1..=LEN_MAX).contains(&len));
        // SAFETY: the caller's promise.
        let pair = unsafe { Pair::new(memory, count, addr_of) };
        let mut rings = Self { pair, word: len as u64 };
        rings.give_back();
        rings
    }

    /// What the producer register has to say: the first command that the device does not have.
    #[inline]
    pub fn tail(&self) -> u32 {
        self.pair.given & self.pair.mask()
    }

    /// Takes the next frame, if there is one. Its buffer stays the caller's until
    /// [`give_back`](Self::give_back).
    ///
    /// # Errors
    /// [`Broken`].
    #[inline]
    pub fn take(&mut self) -> Result<Option<Received>, Broken> {
        let Some(second) = self.pair.peek() else { return Ok(None) };
        let first = self.pair.take(RX_STRANGE)?;
        let is_good =
            first & RX_WHOLE == RX_WHOLE && first & RX_RING == 0 && second & RX_ERROR == 0;
        let id = (first & INDEX_BITS) as u32;
        Ok(Some(Received { id, len: (second & LEN_BITS) as u16, is_good }))
    }

    /// Gives the device the buffers of all frames that were taken, and those that it skipped.
    #[inline]
    pub fn give_back(&mut self) {
        for _ in 0..self.pair.room() {
            self.pair.give(self.word, RX_GEN);
        }
    }
}

/// The driver's end of the transmit rings.
pub struct TxRing {
    pair: Pair,
}

impl TxRing {
    /// Rings of `count` descriptors, as [`RxRing::new`].
    ///
    /// # Safety
    /// As [`RxRing::new`].
    ///
    /// # Panics
    /// As [`RxRing::new`].
    pub unsafe fn new(memory: [NonNull<u8>; 2], count: u32, addr_of: impl Fn(u32) -> u64) -> Self {
        // SAFETY: the caller's promise.
        Self { pair: unsafe { Pair::new(memory, count, addr_of) } }
    }

    /// What the producer register has to say.
    #[inline]
    pub fn tail(&self) -> u32 {
        self.pair.given & self.pair.mask()
    }

    /// The number of the command, and so of the buffer, that the next frame goes to; `None` while
    /// the ring is full.
    ///
    /// # Errors
    /// [`Broken`].
    #[inline]
    pub fn place(&mut self) -> Result<Option<u32>, Broken> {
        if self.pair.room() == 0 {
            self.reclaim()?;
        }
        Ok((self.pair.room() > 0).then_some(self.tail()))
    }

    /// Describes a frame of `len` bytes in the buffer of [`place`](Self::place).
    ///
    /// # Panics
    /// If there was no place, or `len` is 0 or above [`LEN_MAX`].
    #[inline]
    pub fn push(&mut self, len: usize) {
        assert!(self.pair.room() > 0, "the ring is full");
        assert!((1..=LEN_MAX).contains(&len));
        self.pair.give(len as u64 | TX_FLAGS, TX_GEN);
    }

    /// Takes back what the device is done with.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn reclaim(&mut self) -> Result<(), Broken> {
        while self.pair.peek().is_some() {
            self.pair.take(TX_STRANGE)?;
        }
        Ok(())
    }

    /// Frames that the device may not have sent yet.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn in_flight(&mut self) -> Result<u32, Broken> {
        self.reclaim()?;
        Ok(self.pair.given.wrapping_sub(self.pair.done))
    }
}
