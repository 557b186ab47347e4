//! Descriptor rings of Intel's gigabit NICs, driver side.
//!
//! A ring is an array of 16-byte descriptors: a buffer address, then length, flags and a
//! "descriptor done" bit that the device sets. The [`Format`] has the bit positions. The driver
//! owns the descriptors from `next` up to the tail register; head and tail registers are never
//! read.
//!
//! Buffer `i` belongs to descriptor `i` for the life of the ring. The device writes a length and
//! flags; the caller bounds the length. Frames that span several buffers, or have an error flag,
//! are not good. Formats that overwrite the address have it restored.
//!
//! # Ordering
//! The second word of a descriptor is read by one Acquire load: if it has the done bit, the length
//! is valid and, on a coherent bus that preserves the order of the device's writes, so is the
//! frame. Writes to buffers and descriptors are ordered before the tail register by that register's
//! store (see `backend::vfio`).

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::desc::{DescRing, Received};

/// Status of a completed receive buffer: a frame, or a part of a longer one.
#[derive(Clone, Copy, Debug)]
pub struct RxStatus {
    /// Bytes.
    len: u16,
    /// End of frame (EOP).
    is_end: bool,
    /// The frame is damaged.
    has_error: bool,
}

/// A descriptor format. All have the buffer's address in the first word.
pub trait Format: Send + Sync + 'static {
    /// The device overwrites the address of a receive descriptor.
    const OVERWRITES_ADDRESS: bool;

    /// Decodes the second word of a receive descriptor; `None` while the device owns it.
    fn rx_status(word: u64) -> Option<RxStatus>;

    /// Second word of a transmit descriptor for a frame of `len` bytes: end of packet, insert FCS,
    /// report status.
    fn tx_word(len: u16) -> u64;
}

/// The format of the 8254x and 82574 ("legacy"; 82574 datasheet, sections 3.2.4 and 3.3.3).
#[derive(Debug)]
pub enum Legacy {}

/// The format of the 82576 and its successors ("advanced"; its datasheet, sections 7.1.5 and
/// 7.2.2.3), with one buffer per frame.
#[derive(Debug)]
pub enum Advanced {}

/// Both formats: the frame was transmitted.
pub const SENT: u64 = 1 << 32;

impl Legacy {
    /// The device is done with the descriptor.
    pub const DONE: u64 = 1 << 32;
    /// Last descriptor of a frame.
    pub const END: u64 = 1 << 33;
    /// Checksum, sequence, symbol, carrier and data errors.
    pub const ERRORS: u64 = 0x97 << 40;
    const COMMAND: u64 = (0x01 | 0x02 | 0x08) << 24;
}

impl Format for Legacy {
    const OVERWRITES_ADDRESS: bool = false;

    #[inline(always)]
    fn rx_status(word: u64) -> Option<RxStatus> {
        let (is_end, has_error) = (word & Self::END != 0, word & Self::ERRORS != 0);
        (word & Self::DONE != 0).then_some(RxStatus { len: word as u16, is_end, has_error })
    }

    #[inline(always)]
    fn tx_word(len: u16) -> u64 {
        u64::from(len) | Self::COMMAND
    }
}

impl Advanced {
    /// The device is done with the descriptor.
    pub const DONE: u64 = 1 << 0;
    /// Last descriptor of a frame.
    pub const END: u64 = 1 << 1;
    /// Error detected by the MAC.
    pub const ERROR: u64 = 1 << 31;
    /// A data descriptor (type 3, DEXT), with the commands of [`Legacy`].
    pub const COMMAND: u64 = 3 << 20 | 1 << 29 | Legacy::COMMAND;
    /// Bit position of the frame length.
    pub const LEN_AT: u32 = 46;
}

impl Format for Advanced {
    const OVERWRITES_ADDRESS: bool = true;

    #[inline(always)]
    fn rx_status(word: u64) -> Option<RxStatus> {
        let (is_end, has_error) = (word & Self::END != 0, word & Self::ERROR != 0);
        (word & Self::DONE != 0).then_some(RxStatus { len: (word >> 32) as u16, is_end, has_error })
    }

    #[inline(always)]
    fn tx_word(len: u16) -> u64 {
        let len = u64::from(len);
        len | Self::COMMAND | len << Self::LEN_AT
    }
}

/// IOVAs of an array of buffers.
#[derive(Clone, Copy, Debug)]
pub struct BufferAddrs {
    /// IOVA of the first buffer.
    pub first: u64,
    /// Bytes from one buffer to the next.
    pub stride: u64,
}

impl BufferAddrs {
    #[inline(always)]
    fn of(self, i: u32) -> u64 {
        (self.first + u64::from(i) * self.stride).to_le()
    }
}

/// Receive ring, driver side.
pub struct RxRing<F> {
    ring: DescRing,
    addrs: BufferAddrs,
    format: PhantomData<F>,
    /// The next descriptor to poll. Those from here to `tail` are owned by the device.
    next: u32,
    /// Descriptors posted in total; the low bits are the value of the tail register.
    tail: u32,
    /// The next buffer continues an oversized frame, whose rest is dropped whatever its flags.
    continues: bool,
}

impl<F: Format> RxRing<F> {
    /// A ring of `count` descriptors at `base`, with their buffers at `addrs`. The device owns all
    /// but one once [`tail`](Self::tail) is written to its register.
    ///
    /// # Safety
    /// `count * 16` bytes at `base` are mapped, and reached by nobody but this ring and the device
    /// for as long as it lives.
    ///
    /// # Panics
    /// If `count` is no power of two from 8 to 4096, or `base` is not aligned to 128.
    pub unsafe fn new(base: NonNull<u8>, count: u32, addrs: BufferAddrs) -> Self {
        // SAFETY: the caller's promise.
        let ring = unsafe { DescRing::new(base, count) };
        for i in 0..count {
            ring.half(i, 0).store(addrs.of(i), Relaxed);
            ring.half(i, 1).store(0, Relaxed);
        }
        Self { ring, addrs, format: PhantomData, next: 0, tail: count - 1, continues: false }
    }

    /// Value of the tail register: the first descriptor that the device does not own.
    #[inline]
    pub fn tail(&self) -> u32 {
        self.tail & self.ring.mask()
    }

    /// Whether [`take`](Self::take) would return a frame.
    #[inline]
    pub fn pending(&self) -> bool {
        self.next != self.tail && self.peek().is_some()
    }

    /// Status of the next descriptor.
    #[inline(always)]
    fn peek(&self) -> Option<RxStatus> {
        F::rx_status(u64::from_le(self.ring.half(self.next, 1).load(Acquire)))
    }

    /// Takes the next frame, if there is one. Its buffer stays the caller's until
    /// [`refill`](Self::refill).
    #[inline]
    pub fn take(&mut self) -> Option<Received> {
        if self.next == self.tail {
            return None;
        }
        let RxStatus { len, is_end, has_error } = self.peek()?;
        let is_continuation = std::mem::replace(&mut self.continues, !is_end);
        let is_good = is_end && !is_continuation && !has_error;
        let id = self.next & self.ring.mask();
        self.next = self.next.wrapping_add(1);
        Some(Received { id, len, is_good })
    }

    /// Posts `count` taken buffers again, oldest first. The device sees them once
    /// [`tail`](Self::tail) is written to its register.
    ///
    /// # Panics
    /// If fewer were taken.
    #[inline]
    pub fn refill(&mut self, count: u32) {
        let lent = self.next.wrapping_sub(self.tail).wrapping_add(self.ring.mask());
        assert!(count <= lent, "buffers that were not taken");
        for _ in 0..count {
            // The descriptor at the tail was the unused one until now.
            if F::OVERWRITES_ADDRESS {
                let addr = self.addrs.of(self.tail & self.ring.mask());
                self.ring.half(self.tail, 0).store(addr, Relaxed);
            }
            self.ring.half(self.tail, 1).store(0, Release);
            self.tail = self.tail.wrapping_add(1);
        }
        // The descriptor at the new tail stays unused, which distinguishes a full ring from an
        // empty one. Its stale done bit is not read before it was posted and completed again.
    }
}

/// Transmit ring, driver side.
pub struct TxRing<F> {
    ring: DescRing,
    format: PhantomData<F>,
    /// The next descriptor to fill; the low bits are the value of the tail register.
    tail: u32,
    /// The oldest descriptor that may not be completed.
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
    pub unsafe fn new(base: NonNull<u8>, count: u32, addrs: BufferAddrs) -> Self {
        // SAFETY: the caller's promise.
        let ring = unsafe { DescRing::new(base, count) };
        for i in 0..count {
            ring.half(i, 0).store(addrs.of(i), Relaxed);
            ring.half(i, 1).store(0, Relaxed);
        }
        Self { ring, format: PhantomData, tail: 0, clean: 0 }
    }

    /// Value of the tail register.
    #[inline]
    pub fn tail(&self) -> u32 {
        self.tail & self.ring.mask()
    }

    /// Index of the descriptor and buffer for the next frame; `None` while the ring is full.
    #[inline]
    pub fn next_slot(&mut self) -> Option<u32> {
        if self.tail.wrapping_sub(self.clean) == self.ring.mask() && !self.reclaim() {
            return None;
        }
        Some(self.tail & self.ring.mask())
    }

    /// Describes a frame of `len` bytes in the buffer of [`next_slot`](Self::next_slot).
    ///
    /// # Panics
    /// If the ring is full.
    #[inline]
    pub fn push(&mut self, len: u16) {
        assert!(self.tail.wrapping_sub(self.clean) < self.ring.mask(), "the ring is full");
        self.ring.half(self.tail, 1).store(F::tx_word(len).to_le(), Release);
        self.tail = self.tail.wrapping_add(1);
    }

    /// Reclaims completed descriptors; returns whether there were any.
    pub fn reclaim(&mut self) -> bool {
        let before = self.clean;
        while self.clean != self.tail
            && u64::from_le(self.ring.half(self.clean, 1).load(Acquire)) & SENT != 0
        {
            self.clean = self.clean.wrapping_add(1);
        }
        self.clean != before
    }

    /// Frames that may not have been sent yet.
    pub fn in_flight(&mut self) -> u32 {
        self.reclaim();
        self.tail.wrapping_sub(self.clean)
    }
}
