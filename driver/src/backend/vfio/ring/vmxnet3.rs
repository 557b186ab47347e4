//! Descriptor rings of VMware's vmxnet3 (`vmxnet3_defs.h`, revision 1), driver side.
//!
//! Each direction has two rings of equal length: commands, written by the driver, and completions,
//! written by the device. A generation bit marks the last writer of a descriptor: 1 in the first
//! pass over a ring, 0 in the second, and so on. No index is shared; the producer registers only
//! wake the device.
//!
//! Buffer `i` belongs to command `i` for the life of the ring, so its address is written once; one
//! buffer per frame. The driver keeps one command of each ring unused, because a device that goes
//! by the register could not distinguish a full ring from an empty one.
//!
//! A completion names the last command that it covers. The device completes in order and may skip
//! commands: all up to the named one return to the driver. An index of a command that the device
//! does not own is a [`DeviceViolation`].
//!
//! # Ordering
//! As in [`e1000`](super::e1000): generation and length are one 64-bit word, read by an Acquire
//! load and written by a Release store. The device writes the first word of a completion before it,
//! and the driver reads it afterwards.

use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::desc::{DescRing, Received};
use super::virtq::DeviceViolation;

/// Fewest commands of a ring, whose length has to be a multiple of it.
pub const COUNT_MIN: u32 = 32;
/// Alignment of a ring's address.
pub const ALIGN: usize = 512;
/// Longest buffer that the length bits can express.
pub const LEN_MAX: usize = LEN_BITS as usize;

/// Bits of a length, in the second half of commands and of completed receptions.
pub const LEN_BITS: u64 = (1 << 14) - 1;
/// Generation of a transmit command.
pub const TX_GEN: u64 = 1 << 14;
/// Flags of a transmit command: end of packet, completion requested.
pub const TX_FLAGS: u64 = (1 << 12 | 1 << 13) << 32;
/// Generation of a receive command.
pub const RX_GEN: u64 = 1 << 31;
/// Generation of a completion, in its second half.
pub const DONE_GEN: u64 = 1 << 63;
/// Bits of the command's index in the first half of a completion.
pub const INDEX_BITS: u64 = (1 << 12) - 1;
/// Start and end of the frame are in this buffer, in the first half of a receive completion.
pub const RX_WHOLE: u64 = 1 << 14 | 1 << 15;
/// Ring of a received frame, in the first half: 0, the one that has buffers.
pub const RX_RING: u64 = 0x3ff << 16;
/// The frame is truncated or damaged, in the second half of a receive completion.
pub const RX_ERROR: u64 = 1 << 14;

const TX_UNKNOWN_COMPLETION: DeviceViolation =
    DeviceViolation("it completed a frame that it did not have");
const RX_UNKNOWN_COMPLETION: DeviceViolation =
    DeviceViolation("it returned a buffer that it did not have");

/// Whether descriptor `i`, counted from the start, is of a pass whose generation bit is 1.
fn is_odd_pass(i: u32, mask: u32) -> bool {
    i & (mask + 1) == 0
}

/// The command and completion rings of one direction.
struct RingPair {
    commands: DescRing,
    completions: DescRing,
    /// Commands posted in total.
    posted: u32,
    /// Commands completed in total.
    completed: u32,
    /// Completions read.
    read: u32,
}

impl RingPair {
    /// # Safety
    /// As [`RxRing::new`].
    unsafe fn new(memory: [NonNull<u8>; 2], count: u32, addr_of: impl Fn(u32) -> u64) -> Self {
        assert!(count >= COUNT_MIN);
        for base in memory {
            assert!((base.as_ptr() as usize).is_multiple_of(ALIGN));
        }
        // SAFETY: the caller's promise.
        let [commands, completions] = memory.map(|base| unsafe { DescRing::new(base, count) });
        for i in 0..count {
            commands.half(i, 0).store(addr_of(i).to_le(), Relaxed);
            // Of the pass before the first.
            commands.half(i, 1).store(0, Relaxed);
            completions.half(i, 1).store(0, Relaxed);
        }
        Self { commands, completions, posted: 0, completed: 0, read: 0 }
    }

    fn mask(&self) -> u32 {
        self.commands.mask()
    }

    /// Commands that may still be posted.
    #[inline]
    fn room(&self) -> u32 {
        self.mask() - self.posted.wrapping_sub(self.completed)
    }

    /// Posts the next command, whose second half is `word` with the generation `generation`.
    #[inline]
    fn post(&mut self, word: u64, generation: u64) {
        let bit = if is_odd_pass(self.posted, self.mask()) { generation } else { 0 };
        self.commands.half(self.posted, 1).store((word | bit).to_le(), Release);
        self.posted = self.posted.wrapping_add(1);
    }

    /// The second half of the next completion, if there is one.
    #[inline]
    fn peek(&self) -> Option<u64> {
        let word = u64::from_le(self.completions.half(self.read, 1).load(Acquire));
        (is_odd_pass(self.read, self.mask()) == (word & DONE_GEN != 0)).then_some(word)
    }

    /// Takes that completion and returns its first half; `violation` if its index is not of a
    /// posted command.
    #[inline]
    fn take(&mut self, violation: DeviceViolation) -> Result<u64, DeviceViolation> {
        let first = u64::from_le(self.completions.half(self.read, 0).load(Relaxed));
        let index = (first & INDEX_BITS) as u32;
        let skipped = index.wrapping_sub(self.completed) & self.mask();
        if index > self.mask() || skipped >= self.posted.wrapping_sub(self.completed) {
            return Err(violation);
        }
        self.read = self.read.wrapping_add(1);
        self.completed = self.completed.wrapping_add(skipped + 1);
        Ok(first)
    }
}

/// Receive rings, driver side.
pub struct RxRing {
    pair: RingPair,
    /// Second half of each command, without its generation.
    word: u64,
}

impl RxRing {
    /// Rings of `count` descriptors at `memory` (commands, completions), with buffers of `len`
    /// bytes, number `i` at the IOVA `addr_of(i)`. All but one are posted.
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
        let pair = unsafe { RingPair::new(memory, count, addr_of) };
        let mut rings = Self { pair, word: len as u64 };
        rings.refill();
        rings
    }

    /// Value of the producer register: the first command that the device does not own.
    #[inline]
    pub fn tail(&self) -> u32 {
        self.pair.posted & self.pair.mask()
    }

    /// Takes the next frame, if there is one. Its buffer stays the caller's until
    /// [`refill`](Self::refill).
    ///
    /// # Errors
    /// [`DeviceViolation`].
    #[inline]
    pub fn take(&mut self) -> Result<Option<Received>, DeviceViolation> {
        let Some(second) = self.pair.peek() else { return Ok(None) };
        let first = self.pair.take(RX_UNKNOWN_COMPLETION)?;
        let is_good =
            first & RX_WHOLE == RX_WHOLE && first & RX_RING == 0 && second & RX_ERROR == 0;
        let id = (first & INDEX_BITS) as u32;
        Ok(Some(Received { id, len: (second & LEN_BITS) as u16, is_good }))
    }

    /// Posts the buffers of all taken frames, and those that the device skipped.
    #[inline]
    pub fn refill(&mut self) {
        for _ in 0..self.pair.room() {
            self.pair.post(self.word, RX_GEN);
        }
    }
}

/// Transmit rings, driver side.
pub struct TxRing {
    pair: RingPair,
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
        Self { pair: unsafe { RingPair::new(memory, count, addr_of) } }
    }

    /// Value of the producer register.
    #[inline]
    pub fn tail(&self) -> u32 {
        self.pair.posted & self.pair.mask()
    }

    /// Index of the command and buffer for the next frame; `None` while the ring is full.
    ///
    /// # Errors
    /// [`DeviceViolation`].
    #[inline]
    pub fn next_slot(&mut self) -> Result<Option<u32>, DeviceViolation> {
        if self.pair.room() == 0 {
            self.reclaim()?;
        }
        Ok((self.pair.room() > 0).then_some(self.tail()))
    }

    /// Describes a frame of `len` bytes in the buffer of [`next_slot`](Self::next_slot).
    ///
    /// # Panics
    /// If the ring is full, or `len` is 0 or above [`LEN_MAX`].
    #[inline]
    pub fn push(&mut self, len: usize) {
        assert!(self.pair.room() > 0, "the ring is full");
        assert!((1..=LEN_MAX).contains(&len));
        self.pair.post(len as u64 | TX_FLAGS, TX_GEN);
    }

    /// Reclaims completed commands.
    ///
    /// # Errors
    /// [`DeviceViolation`].
    pub fn reclaim(&mut self) -> Result<(), DeviceViolation> {
        while self.pair.peek().is_some() {
            self.pair.take(TX_UNKNOWN_COMPLETION)?;
        }
        Ok(())
    }

    /// Frames that may not have been sent yet.
    ///
    /// # Errors
    /// [`DeviceViolation`].
    pub fn in_flight(&mut self) -> Result<u32, DeviceViolation> {
        self.reclaim()?;
        Ok(self.pair.posted.wrapping_sub(self.pair.completed))
    }
}
