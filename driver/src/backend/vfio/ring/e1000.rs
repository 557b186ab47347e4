//! Descriptor rings of Intel's gigabit NICs (82574 datasheet, sections 3.2 and 3.3, "legacy"
//! format), as the driver sees them.
//!
//! A ring is an array of 16-byte descriptors: a buffer's address, then length, flags and a status
//! byte whose bit 0 ("descriptor done") the device sets. The driver owns the descriptors from its
//! own next one up to the tail register's; head and tail live in the device and are never read.
//!
//! Buffer `i` belongs to descriptor `i` for the life of the ring, so its address is written once.
//! The device writes a length and flags: the length is handed on for the caller to bound, and a
//! frame that was split over several buffers, or has an error flag, says so.
//!
//! # Ordering
//! The second half of a descriptor is one 64-bit word: whoever sees "done" in it by an Acquire load
//! sees the length beside it and, on a coherent bus that keeps the order of the device's writes,
//! the frame. What was written to buffers and descriptors is ordered before the tail register by
//! that register's store (see `backend::vfio`).

use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::desc::Descs;

/// The device is done with the descriptor.
pub const DONE: u64 = 1 << 32;
/// Last descriptor of a frame.
pub const RX_END: u64 = 1 << 33;
/// Errors of a received frame: checksum, sequence, symbol, carrier, data.
pub const RX_ERRORS: u64 = 0x97 << 40;
/// Commands of a frame to send: last descriptor, insert the frame check sequence, report.
pub const TX_COMMAND: u64 = (0x01 | 0x02 | 0x08) << 24;

/// What a receive descriptor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Its number, which is its buffer's.
    pub id: u32,
    /// Bytes that the device says it wrote.
    pub len: u16,
    /// The frame is whole and has no error.
    pub is_good: bool,
}

/// The driver's end of a receive ring.
pub struct RxRing {
    ring: Descs,
    /// The next descriptor to look at. Those from here to `tail` are the device's.
    next: u32,
    /// Descriptors given to the device in all; its low bits are what the tail register wants.
    tail: u32,
}

impl RxRing {
    /// A ring of `count` descriptors at `base`, whose buffer `i` is at the device's address
    /// `addr_of(i)`. All but one are the device's as soon as it is told [`tail`](Self::tail).
    ///
    /// # Safety
    /// `count * 16` bytes at `base` are mapped, and reached by nobody but this ring and the device
    /// for as long as it lives.
    ///
    /// # Panics
    /// If `count` is no power of two from 8 to 4096, or `base` is not aligned to 128.
    pub unsafe fn new(base: NonNull<u8>, count: u32, addr_of: impl Fn(u32) -> u64) -> Self {
        // SAFETY: the caller's promise.
        let ring = unsafe { Descs::new(base, count) };
        for i in 0..count {
            ring.half(i, 0).store(addr_of(i).to_le(), Relaxed);
            ring.half(i, 1).store(0, Relaxed);
        }
        Self { ring, next: 0, tail: count - 1 }
    }

    /// What the tail register has to say: the first descriptor that the device does not have.
    #[inline]
    pub fn tail(&self) -> u32 {
        self.tail & self.ring.mask()
    }

    /// Whether [`take`](Self::take) would find something.
    #[inline]
    pub fn pending(&self) -> bool {
        self.next != self.tail
            && u64::from_le(self.ring.half(self.next, 1).load(Acquire)) & DONE != 0
    }

    /// Takes the next frame, if there is one. Its buffer stays the caller's until
    /// [`give_back`](Self::give_back).
    #[inline]
    pub fn take(&mut self) -> Option<Received> {
        if self.next == self.tail {
            return None;
        }
        let word = u64::from_le(self.ring.half(self.next, 1).load(Acquire));
        if word & DONE == 0 {
            return None;
        }
        let id = self.next & self.ring.mask();
        self.next = self.next.wrapping_add(1);
        let is_good = word & RX_END != 0 && word & RX_ERRORS == 0;
        Some(Received { id, len: word as u16, is_good })
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
            self.ring.half(self.tail, 1).store(0, Release);
            self.tail = self.tail.wrapping_add(1);
        }
        // The one at the new tail is the gap by which the device knows a full ring from an empty
        // one: its old "done" is not looked at before it was given to the device and came back.
    }
}

/// The driver's end of a transmit ring.
pub struct TxRing {
    ring: Descs,
    /// The next descriptor to fill; its low bits are what the tail register wants.
    tail: u32,
    /// The oldest descriptor that the device may not be done with.
    clean: u32,
}

impl TxRing {
    /// A ring of `count` descriptors, as [`RxRing::new`].
    ///
    /// # Safety
    /// As [`RxRing::new`].
    ///
    /// # Panics
    /// As [`RxRing::new`].
    pub unsafe fn new(base: NonNull<u8>, count: u32, addr_of: impl Fn(u32) -> u64) -> Self {
        // SAFETY: the caller's promise.
        let ring = unsafe { Descs::new(base, count) };
        for i in 0..count {
            ring.half(i, 0).store(addr_of(i).to_le(), Relaxed);
            ring.half(i, 1).store(0, Relaxed);
        }
        Self { ring, tail: 0, clean: 0 }
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
        let word = u64::from(len) | TX_COMMAND;
        self.ring.half(self.tail, 1).store(word.to_le(), Release);
        self.tail = self.tail.wrapping_add(1);
    }

    /// Takes back what the device is done with, and says whether that was anything.
    pub fn reclaim(&mut self) -> bool {
        let before = self.clean;
        while self.clean != self.tail
            && u64::from_le(self.ring.half(self.clean, 1).load(Acquire)) & DONE != 0
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
