//! Descriptor rings of Intel's gigabit NICs, as the driver sees them.
//!
//! A ring is an array of 16-byte descriptors: a buffer's address, then length, flags and a bit
//! ("descriptor done") that the device sets. Which bit says what is the [`Format`]. The driver owns
//! the descriptors from its own next one up to the tail register's; head and tail live in the
//! device and are never read.
//!
//! Buffer `i` belongs to descriptor `i` for the life of the ring. The device writes a length and
//! flags: the length is handed on for the caller to bound. None of the buffers that a frame is
//! split over is good, nor is one with an error flag. Where the device writes over an address, that
//! is written again.
//!
//! # Ordering
//! The second half of a descriptor is one 64-bit word: whoever sees "done" in it by an Acquire load
//! sees the length beside it and, on a coherent bus that keeps the order of the device's writes,
//! the frame. What was written to buffers and descriptors is ordered before the tail register by
//! that register's store (see `backend::vfio`).

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::desc::{Descs, Received};

/// What a buffer holds that the device has filled: a frame, or a part of one that is longer.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Bytes.
    len: u16,
    /// The frame ends there.
    is_end: bool,
    /// The frame is damaged.
    has_error: bool,
}

/// A format of descriptors. All have the buffer's address in the first word.
pub trait Format: Send + Sync + 'static {
    /// The device writes over the address of a receive descriptor.
    const WRITES_OVER_ADDRESS: bool;

    /// What the second word says of a received buffer; `None` while the device is not done.
    fn received(word: u64) -> Option<Piece>;

    /// The second word for a frame of `len` bytes to send: its last descriptor, insert the frame
    /// check sequence, report.
    fn to_send(len: u16) -> u64;
}

/// The format of the 8254x and 82574 ("legacy"; 82574 datasheet, sections 3.2.4 and 3.3.3).
#[derive(Debug)]
pub enum Legacy {}

/// The format of the 82576 and its successors ("advanced"; its datasheet, sections 7.1.5 and
/// 7.2.2.3), with one buffer a frame.
#[derive(Debug)]
pub enum Advanced {}

/// The device has sent the frame of the descriptor: both formats.
pub const SENT: u64 = 1 << 32;

impl Legacy {
    /// The device is done with the descriptor.
    pub const DONE: u64 = 1 << 32;
    /// Last descriptor of a frame.
    pub const END: u64 = 1 << 33;
    /// Checksum, sequence, symbol, carrier, data.
    pub const ERRORS: u64 = 0x97 << 40;
    const COMMAND: u64 = (0x01 | 0x02 | 0x08) << 24;
}

impl Format for Legacy {
    const WRITES_OVER_ADDRESS: bool = false;

    #[inline(always)]
    fn received(word: u64) -> Option<Piece> {
        let (is_end, has_error) = (word & Self::END != 0, word & Self::ERRORS != 0);
        (word & Self::DONE != 0).then_some(Piece { len: word as u16, is_end, has_error })
    }

    #[inline(always)]
    fn to_send(len: u16) -> u64 {
        u64::from(len) | Self::COMMAND
    }
}

impl Advanced {
    /// The device is done with the descriptor.
    pub const DONE: u64 = 1 << 0;
    /// Last descriptor of a frame.
    pub const END: u64 = 1 << 1;
    /// An error that the MAC found.
    pub const ERROR: u64 = 1 << 31;
    /// A data descriptor (type 3, DEXT), with the commands of [`Legacy`].
    pub const COMMAND: u64 = 3 << 20 | 1 << 29 | Legacy::COMMAND;
    /// Where the length of the whole frame stands.
    pub const LEN_AT: u32 = 46;
}

impl Format for Advanced {
    const WRITES_OVER_ADDRESS: bool = true;

    #[inline(always)]
    fn received(word: u64) -> Option<Piece> {
        let (is_end, has_error) = (word & Self::END != 0, word & Self::ERROR != 0);
        (word & Self::DONE != 0).then_some(Piece { len: (word >> 32) as u16, is_end, has_error })
    }

    #[inline(always)]
    fn to_send(len: u16) -> u64 {
        let len = u64::from(len);
        len | Self::COMMAND | len << Self::LEN_AT
    }
}

/// Buffers by the device's addresses: one behind the other.
#[derive(Clone, Copy, Debug)]
pub struct Addrs {
    /// Of the first.
    pub first: u64,
    /// From one to the next, bytes.
    pub stride: u64,
}

impl Addrs {
    #[inline(always)]
    fn of(self, i: u32) -> u64 {
        (self.first + u64::from(i) * self.stride).to_le()
    }
}

/// The driver's end of a receive ring.
pub struct RxRing<F> {
    ring: Descs,
    addrs: Addrs,
    format: PhantomData<F>,
    /// The next descriptor to look at. Those from here to `tail` are the device's.
    next: u32,
    /// Descriptors given to the device in all; its low bits are what the tail register wants.
    tail: u32,
    /// The next buffer goes on with a frame that did not end in the last: the rest of one that was
    /// too long, whatever that looks like.
    goes_on: bool,
}

impl<F: Format> RxRing<F> {
    /// A ring of `count` descriptors at `base`, with a buffer each at `addrs`. All but one are the
    /// device's as soon as it is told [`tail`](Self::tail).
    ///
    /// # Safety
    /// `count * 16` bytes at `base` are mapped, and reached by nobody but this ring and the device
    /// for as long as it lives.
    ///
    /// # Panics
    /// If `count` is no power of two from 8 to 4096, or `base` is not aligned to 128.
    pub unsafe fn new(base: NonNull<u8>, count: u32, addrs: Addrs) -> Self {
        // SAFETY: the caller's promise.
        let ring = unsafe { Descs::new(base, count) };
        for i in 0..count {
            ring.half(i, 0).store(addrs.of(i), Relaxed);
            ring.half(i, 1).store(0, Relaxed);
        }
        Self { ring, addrs, format: PhantomData, next: 0, tail: count - 1, goes_on: false }
    }

    /// What the tail register has to say: the first descriptor that the device does not have.
    #[inline]
    pub fn tail(&self) -> u32 {
        self.tail & self.ring.mask()
    }

    /// Whether [`take`](Self::take) would find something.
    #[inline]
    pub fn pending(&self) -> bool {
        self.next != self.tail && self.look().is_some()
    }

    /// What the device says of the next descriptor.
    #[inline(always)]
    fn look(&self) -> Option<Piece> {
        F::received(u64::from_le(self.ring.half(self.next, 1).load(Acquire)))
    }

    /// Takes the next frame, if there is one. Its buffer stays the caller's until
    /// [`give_back`](Self::give_back).
    #[inline]
    pub fn take(&mut self) -> Option<Received> {
        if self.next == self.tail {
            return None;
        }
        let Piece { len, is_end, has_error } = self.look()?;
        let is_rest = std::mem::replace(&mut self.goes_on, !is_end);
        let is_good = is_end && !is_rest && !has_error;
        let id = self.next & self.ring.mask();
        self.next = self.next.wrapping_add(1);
        Some(Received { id, len, is_good })
    }

    /// Gives the device `count` buffers back, oldest first. It hears of them through
    /// [`tail`](Self::tail).
    ///
    /// # Panics
    /// If fewer were taken.
    #[inline]
    pub fn give_back(&mut self, count: u32) {
        let lent = self.next.wrapping_sub(self.tail).wrapping_add(self.ring.mask());
        assert!(count <= lent, "buffers that were not taken");
        for _ in 0..count {
            // The descriptor at the tail is the one that was kept back until now.
            if F::WRITES_OVER_ADDRESS {
                let addr = self.addrs.of(self.tail & self.ring.mask());
                self.ring.half(self.tail, 0).store(addr, Relaxed);
            }
            self.ring.half(self.tail, 1).store(0, Release);
            self.tail = self.tail.wrapping_add(1);
        }
        // The one at the new tail is the gap by which the device knows a full ring from an empty
        // one: its old "done" is not looked at before it was given to the device and came back.
    }
}

/// The driver's end of a transmit ring.
pub struct TxRing<F> {
    ring: Descs,
    format: PhantomData<F>,
    /// The next descriptor to fill; its low bits are what the tail register wants.
    tail: u32,
    /// The oldest descriptor that the device may not be done with.
    clean: u32,
}

impl<F: Format> TxRing<F> {
    /// A ring of `count` descriptors, as [`RxRing::new`].
    ///
    /// # Safety
    /// As [`RxRing::new`].
    ///
    /// # Panics
    /// As [`RxRing::new`].
    pub unsafe fn new(base: NonNull<u8>, count: u32, addrs: Addrs) -> Self {
        // SAFETY: the caller's promise.
        let ring = unsafe { Descs::new(base, count) };
        for i in 0..count {
            ring.half(i, 0).store(addrs.of(i), Relaxed);
            ring.half(i, 1).store(0, Relaxed);
        }
        Self { ring, format: PhantomData, tail: 0, clean: 0 }
    }

    /// What the tail register has to say.
    #[inline]
    pub fn tail(&self) -> u32 {
        self.tail & self.ring.mask()
    }

    /// The number of the descriptor, and so of the buffer, that the next frame goes to; `None`
    /// while the ring is full.
    #[inline]
    pub fn place(&mut self) -> Option<u32> {
        if self.tail.wrapping_sub(self.clean) == self.ring.mask() && !self.reclaim() {
            return None;
        }
        Some(self.tail & self.ring.mask())
    }

    /// Describes a frame of `len` bytes in the buffer of [`place`](Self::place).
    ///
    /// # Panics
    /// If there was no place.
    #[inline]
    pub fn push(&mut self, len: u16) {
        assert!(self.tail.wrapping_sub(self.clean) < self.ring.mask(), "the ring is full");
        self.ring.half(self.tail, 1).store(F::to_send(len).to_le(), Release);
        self.tail = self.tail.wrapping_add(1);
    }

    /// Takes back what the device is done with, and says whether that was anything.
    pub fn reclaim(&mut self) -> bool {
        let before = self.clean;
        while self.clean != self.tail
            && u64::from_le(self.ring.half(self.clean, 1).load(Acquire)) & SENT != 0
        {
            self.clean = self.clean.wrapping_add(1);
        }
        self.clean != before
    }

    /// Frames that the device may not have sent yet.
    pub fn in_flight(&mut self) -> u32 {
        self.reclaim();
        self.tail.wrapping_sub(self.clean)
    }
}
