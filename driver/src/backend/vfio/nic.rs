//! What a NIC's driver has to do: one file per kind of NIC implements this, and
//! [`VfioPort`](super::VfioPort) makes a port of it.
//!
//! A driver owns descriptor rings and buffers, and moves whole frames. It knows no addresses, no
//! counters of frames and nothing of who sends: the port filters, counts and lends.

use std::ptr::NonNull;

use super::ring::desc::Received;
use super::ring::virtq::Broken;
use crate::frame::ETH_HDR_LEN;
use crate::port::MacAddr;

/// A received frame in a buffer of the driver's, valid until [`Rings::rx_release`].
#[derive(Clone, Copy, Debug)]
pub struct Lent {
    /// Its first byte.
    pub base: *const u8,
    /// Its length, at most that of the buffer.
    pub len: usize,
}

// SAFETY: an address; whoever reads there answers for it, on whichever thread.
unsafe impl Send for Lent {}

impl Lent {
    /// No frame.
    pub const NONE: Self = Self { base: std::ptr::null(), len: 0 };
}

/// What a driver found out about its device when it started it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The station's address.
    pub mac: MacAddr,
    /// Largest number of bytes after the Ethernet header.
    pub mtu: usize,
    /// Link speed in bit/s, 0 if the device does not say.
    pub link_bps: u64,
}

/// The rings of a NIC, both ways. Used by one thread at a time. Nothing here blocks or allocates.
pub trait Rings {
    /// Queues a frame of `len` bytes, which `fill` writes to where it goes: room for a header and
    /// the largest frame. `false`, and `fill` was not called, while the ring is full.
    ///
    /// # Errors
    /// [`Broken`].
    ///
    /// # Panics
    /// If `len` is more than fits.
    fn tx(&mut self, len: usize, fill: impl FnOnce(NonNull<u8>)) -> Result<bool, Broken>;

    /// Tells the device of what was queued.
    fn tx_flush(&mut self);

    /// Takes at most `max` received frames, oldest first, tells `each` of every one, and says how
    /// many there were. It looks no further than `max`, also if it drops some by itself.
    ///
    /// # Errors
    /// [`Broken`].
    fn rx_take(&mut self, max: usize, each: impl FnMut(Lent)) -> Result<usize, Broken>;

    /// Gives the device the buffers of all frames that were taken. A driver may tell it of many at
    /// once, as long as the device has most of them.
    fn rx_release(&mut self);
}

/// The driver of one kind of NIC, started.
///
/// Used by one thread at a time. Nothing here blocks or allocates but [`stop`](Self::stop).
pub trait Nic: Send + 'static {
    /// What its frames go through.
    type Rings: Rings;

    /// Its rings.
    fn rings(&mut self) -> &mut Self::Rings;

    /// Whether the device signals, when a frame arrives, the event that its driver gave it at the
    /// start. Frames that arrived before may go unannounced: look once more. Or they may be
    /// announced although they were taken: somebody wakes in vain.
    fn set_interrupt(&mut self, wanted: bool);

    /// Frames that the device or the driver dropped so far: no buffer, a bad checksum, a length
    /// that cannot be.
    fn dropped(&self) -> u64;

    /// Whether the device still runs as it was started.
    ///
    /// # Errors
    /// What is wrong, for a person.
    fn health(&mut self) -> Result<(), String>;

    /// Whether the link is up: a cable is in, and something at its other end. `None` if the device
    /// does not say. Costs a read of a register.
    fn has_link(&self) -> Option<bool> {
        None
    }

    /// Makes the device reach for no memory any more. Waits for it, at most a tenth of a second.
    fn stop(&mut self);
}

/// Buffers of one length in a row.
#[derive(Clone, Copy)]
pub(super) struct Buffers {
    base: NonNull<u8>,
    stride: usize,
    count: usize,
}

// SAFETY: an address, and whoever has it answers for its use on whichever thread.
unsafe impl Send for Buffers {}

impl Buffers {
    /// `count` buffers of `stride` bytes from `base` on.
    ///
    /// # Safety
    /// `count * stride` bytes at `base` are mapped for as long as this is used.
    pub(super) unsafe fn new(base: NonNull<u8>, stride: usize, count: usize) -> Self {
        Self { base, stride, count }
    }

    /// Bytes of each.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// What a receive descriptor holds, if it is a frame.
    #[inline]
    pub(super) fn lend(&self, got: Received) -> Option<Lent> {
        let len = usize::from(got.len);
        let is_frame = got.is_good && len >= ETH_HDR_LEN && len <= self.stride;
        is_frame.then(|| Lent { base: self.at(got.id as usize).as_ptr(), len })
    }

    /// The first byte of buffer `i`.
    ///
    /// # Panics
    /// If there is none.
    #[inline]
    pub(super) fn at(&self, i: usize) -> NonNull<u8> {
        assert!(i < self.count, "no such buffer");
        // SAFETY: inside the `count * stride` mapped bytes (`new`).
        unsafe { self.base.add(i * self.stride) }
    }
}
