//! Interface of NIC drivers. One file per kind of NIC implements this, and
//! [`VfioPort`](super::VfioPort) makes a port of it.
//!
//! A driver owns descriptor rings and buffers, and moves whole frames. The port does the rest: it
//! filters addresses, counts and lends frames.

use std::ptr::NonNull;

use super::ring::desc::Received;
use super::ring::virtq::DeviceViolation;
use crate::frame::ETH_HDR_LEN;
use crate::port::MacAddr;

/// A received frame in a buffer of the driver, valid until [`Rings::rx_release`].
#[derive(Clone, Copy, Debug)]
pub struct LentFrame {
    /// Its first byte.
    pub base: *const u8,
    /// Its length, at most that of the buffer.
    pub len: usize,
}

// SAFETY: an address; the code that dereferences it argues for that, on any thread.
unsafe impl Send for LentFrame {}

impl LentFrame {
    /// Placeholder without a frame.
    pub const NONE: Self = Self { base: std::ptr::null(), len: 0 };
}

/// Capabilities of a started device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicCaps {
    /// MAC address.
    pub mac: MacAddr,
    /// Largest number of bytes after the Ethernet header.
    pub mtu: usize,
    /// Link speed in bit/s, 0 if the device does not say.
    pub link_bps: u64,
}

/// Transmit and receive rings of a NIC. Used by one thread at a time. Nothing here blocks or
/// allocates.
pub trait Rings {
    /// Queues a frame of `len` bytes. `fill` writes it to the given buffer, which has room for a
    /// header and the largest frame. `false`, and `fill` was not called, while the ring is full.
    ///
    /// # Errors
    /// [`DeviceViolation`].
    ///
    /// # Panics
    /// If `len` exceeds the buffer.
    fn tx(&mut self, len: usize, fill: impl FnOnce(NonNull<u8>)) -> Result<bool, DeviceViolation>;

    /// Rings the doorbell for the queued frames.
    fn tx_flush(&mut self);

    /// Takes at most `max` received frames, oldest first, calls `each` for every one, and returns
    /// their number. Frames that the driver drops count towards `max`.
    ///
    /// # Errors
    /// [`DeviceViolation`].
    fn rx_take(
        &mut self,
        max: usize,
        each: impl FnMut(LentFrame),
    ) -> Result<usize, DeviceViolation>;

    /// Returns the buffers of all taken frames to the device. A driver may batch the doorbell, as
    /// long as the device keeps most of the buffers.
    fn rx_release(&mut self);
}

/// A started NIC of one kind.
///
/// Used by one thread at a time. Nothing here blocks or allocates but [`stop`](Self::stop).
pub trait Nic: Send + 'static {
    /// Its rings' type.
    type Rings: Rings;

    /// Its rings.
    fn rings(&mut self) -> &mut Self::Rings;

    /// Enables or disables the receive interrupt, which signals the eventfd given at the start.
    /// Frames that arrived before may not be signalled: poll once more. A frame that was already
    /// taken may still be signalled: a spurious wake-up.
    fn set_interrupt(&mut self, wanted: bool);

    /// Frames that the device or the driver dropped so far: no buffer, a bad checksum, an invalid
    /// length.
    fn dropped(&self) -> u64;

    /// Checks that the device still runs as it was started.
    ///
    /// # Errors
    /// The reason, for the log.
    fn health(&mut self) -> Result<(), String>;

    /// Whether the link is up. `None` if the device does not report it. Costs a register read.
    fn has_link(&self) -> Option<bool> {
        None
    }

    /// Stops all DMA of the device. Waits for that, at most a tenth of a second.
    fn stop(&mut self);
}

/// An array of buffers of equal length.
#[derive(Clone, Copy)]
pub(super) struct Buffers {
    base: NonNull<u8>,
    stride: usize,
    count: usize,
}

// SAFETY: an address; the code that uses it argues for that, on any thread.
unsafe impl Send for Buffers {}

impl Buffers {
    /// `count` buffers of `stride` bytes from `base` on.
    ///
    /// # Safety
    /// `count * stride` bytes at `base` are mapped for as long as this is used.
    pub(super) unsafe fn new(base: NonNull<u8>, stride: usize, count: usize) -> Self {
        Self { base, stride, count }
    }

    /// Bytes of each buffer.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// The frame that a receive descriptor describes, if it is valid.
    #[inline]
    pub(super) fn lend(&self, got: Received) -> Option<LentFrame> {
        let len = usize::from(got.len);
        let is_frame = got.is_good && len >= ETH_HDR_LEN && len <= self.stride;
        is_frame.then(|| LentFrame { base: self.at(got.id as usize).as_ptr(), len })
    }

    /// The first byte of buffer `i`.
    ///
    /// # Panics
    /// If `i` is out of range.
    #[inline]
    pub(super) fn at(&self, i: usize) -> NonNull<u8> {
        assert!(i < self.count, "no such buffer");
        // SAFETY: inside the `count * stride` mapped bytes (`new`).
        unsafe { self.base.add(i * self.stride) }
    }
}
