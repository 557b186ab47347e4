//! The driver's end of a virtio split queue (virtio 1.2, section 2.7).
//!
//! ```text
//!  descriptors   one per buffer: address, length, who writes      written by us
//!  available     numbers of posted descriptors, then an index     written by us
//!  used          (number, bytes written), then an index           written by the device
//! ```
//!
//! Every buffer has one descriptor of the same number for the life of the queue, so posting it
//! again writes two bytes of the available ring and nothing else.
//!
//! What the device writes is an index and pairs of number and length. The index may not run ahead
//! of what was posted, and a number has to be one that is posted; anything else is [`Broken`] and
//! the queue must not be used any more. The length is handed on for the caller to bound.
//!
//! # Ordering
//! - [`publish`](Virtq::publish) is a Release store of the available index: a device that sees it
//!   sees the descriptors, the ring and the buffers.
//! - [`take`](Virtq::take) loads the used index with Acquire: whoever sees it sees the used ring
//!   and what the device wrote to the buffers.
//! - [`wants_kick`](Virtq::wants_kick) reads a flag that the device sets after it has looked at the
//!   available index for the last time. Store then load of two places: a full fence between them,
//!   on both sides, or a kick is missed for ever.

use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, fence};

/// Largest queue: an index of 16 bits has to tell an empty queue from a full one.
pub const COUNT_MAX: u16 = 1 << 15;

/// The device wrote something that the specification does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the device wrote what no device may: {0}")]
pub struct Broken(pub &'static str);

/// Where the three parts of a queue of `count` descriptors lie, in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The descriptors; a multiple of 16.
    pub desc: usize,
    /// The available ring; a multiple of 2.
    pub avail: usize,
    /// The used ring; a multiple of 4, in a cache line that we never write.
    pub used: usize,
    /// All of it.
    pub len: usize,
}

impl Layout {
    /// The layout of a queue of `count` descriptors.
    pub const fn of(count: u16) -> Self {
        let count = count as usize;
        let avail = 16 * count;
        let used = (avail + 6 + 2 * count).next_multiple_of(64);
        Self { desc: 0, avail, used, len: (used + 6 + 8 * count).next_multiple_of(64) }
    }
}

/// Flag of a descriptor: the device writes the buffer.
pub const DESC_WRITE: u16 = 2;
/// Flag of a descriptor: another one follows.
pub const DESC_NEXT: u16 = 1;
/// Flag of the available ring: the device need not interrupt.
pub const NO_INTERRUPT: u16 = 1;
/// Flag of the used ring: the driver need not kick.
pub const NO_NOTIFY: u16 = 1;

/// The driver's end of a queue.
pub struct Virtq {
    base: NonNull<u8>,
    layout: Layout,
    mask: u16,
    /// Index of the next entry that we make available.
    avail_idx: u16,
    /// Index of the next entry of the used ring that we look at.
    used_idx: u16,
    /// The device's index when we last looked.
    used_seen: u16,
    /// Descriptors that the device has.
    posted_count: u16,
    posted: Box<[bool]>,
}

// SAFETY: the queue is the only one of ours who touches the memory behind `base`, whichever thread
// it is on; the device does so through atomics' memory.
unsafe impl Send for Virtq {}

impl Virtq {
    /// A queue of `count` descriptors over zeroed memory at `base`. Polled: the device is told not
    /// to interrupt.
    ///
    /// # Safety
    /// [`Layout::of`]`(count).len` bytes at `base`, aligned to 64, are mapped, zero and reached by
    /// nobody but this queue and the device for as long as it lives.
    ///
    /// # Panics
    /// If `count` is no power of two, or above [`COUNT_MAX`].
    pub unsafe fn new(base: NonNull<u8>, count: u16) -> Self {
        assert!(
            count.is_power_of_two()
                && count <= COUNT_MAX
                && (base.as_ptr() as usize).is_multiple_of(64)
        );
        let queue = Self {
            base,
            layout: Layout::of(count),
            mask: count - 1,
            avail_idx: 0,
            used_idx: 0,
            used_seen: 0,
            posted_count: 0,
            posted: vec![false; count as usize].into(),
        };
        queue.half(queue.layout.avail).store(NO_INTERRUPT.to_le(), Relaxed);
        queue
    }

    /// Number of descriptors.
    pub fn count(&self) -> u16 {
        self.mask + 1
    }

    /// Descriptors that the device has.
    #[inline]
    pub fn posted_count(&self) -> u16 {
        self.posted_count
    }

    /// Whether the device is to interrupt when it has used a buffer.
    pub fn set_interrupt(&self, wanted: bool) {
        let flags = if wanted { 0 } else { NO_INTERRUPT };
        self.half(self.layout.avail).store(flags.to_le(), SeqCst);
    }

    /// Describes buffer `id`: `len` bytes at the device's address `addr`.
    ///
    /// # Panics
    /// If the device has it, or there is no such descriptor.
    pub fn describe(&mut self, id: u16, addr: u64, len: u32, device_writes: bool) {
        assert!(!self.posted[id as usize], "a descriptor that the device has");
        let at = self.layout.desc + 16 * id as usize;
        let flags = if device_writes { DESC_WRITE } else { 0 };
        self.long(at).store(addr.to_le(), Relaxed);
        self.word(at + 8).store(len.to_le(), Relaxed);
        self.word(at + 12).store(u32::from(flags).to_le(), Relaxed);
    }

    /// Lets the buffer `next` follow buffer `id` in one chain, which is posted by its first.
    ///
    /// # Panics
    /// If the device has one of them, or there is no such descriptor.
    pub fn chain(&mut self, id: u16, next: u16) {
        assert!(!self.posted[id as usize] && !self.posted[next as usize], "the device has it");
        let at = self.layout.desc + 16 * id as usize + 12;
        let flags = u32::from_le(self.word(at).load(Relaxed)) as u16 | DESC_NEXT;
        let word = u32::from(flags) | u32::from(next) << 16;
        self.word(at).store(word.to_le(), Relaxed);
    }

    /// Changes the length of buffer `id`.
    ///
    /// # Panics
    /// If the device has it, or there is no such descriptor.
    #[inline]
    pub fn set_len(&mut self, id: u16, len: u32) {
        assert!(!self.posted[id as usize], "a descriptor that the device has");
        self.word(self.layout.desc + 16 * id as usize + 8).store(len.to_le(), Relaxed);
    }

    /// Gives buffer `id` to the device with the next [`publish`](Self::publish).
    ///
    /// # Panics
    /// If the device has it, or there is no such descriptor.
    #[inline(always)]
    pub fn post(&mut self, id: u16) {
        let posted = &mut self.posted[id as usize];
        assert!(!*posted, "a descriptor that the device has");
        *posted = true;
        self.posted_count += 1;
        let at = self.layout.avail + 4 + 2 * (self.avail_idx & self.mask) as usize;
        self.half(at).store(id.to_le(), Relaxed);
        self.avail_idx = self.avail_idx.wrapping_add(1);
    }

    /// Gives buffer `id`, of `len` bytes now, to the device: [`set_len`](Self::set_len) and
    /// [`post`](Self::post) with one check.
    ///
    /// # Panics
    /// If the device has it, or there is no such descriptor.
    #[inline(always)]
    pub fn post_len(&mut self, id: u16, len: u32) {
        // What `post` checks: a number below `count`, which is what the descriptor's place needs.
        self.post(id);
        self.word(self.layout.desc + 16 * id as usize + 8).store(len.to_le(), Relaxed);
    }

    /// Shows the device what was posted.
    #[inline]
    pub fn publish(&mut self) {
        self.half(self.layout.avail + 2).store(self.avail_idx.to_le(), Release);
    }

    /// Whether the device wants to be told of what was published.
    #[inline]
    pub fn wants_kick(&self) -> bool {
        fence(SeqCst);
        u16::from_le(self.half(self.layout.used).load(Relaxed)) & NO_NOTIFY == 0
    }

    /// Whether [`take`](Self::take) would find something.
    #[inline]
    pub fn pending(&self) -> bool {
        u16::from_le(self.half(self.layout.used + 2).load(Acquire)) != self.used_idx
    }

    /// Takes a buffer back: its number and how many bytes the device says it wrote.
    ///
    /// # Errors
    /// [`Broken`]: nothing that the device writes can be believed any more.
    #[inline(always)]
    pub fn take(&mut self) -> Result<Option<(u16, u32)>, Broken> {
        if self.used_idx == self.used_seen {
            let seen = u16::from_le(self.half(self.layout.used + 2).load(Acquire));
            if seen == self.used_idx {
                return Ok(None);
            }
            if seen.wrapping_sub(self.used_idx) > self.posted_count {
                return Err(Broken("it returned more buffers than it had"));
            }
            self.used_seen = seen;
        }
        let at = self.layout.used + 4 + 8 * (self.used_idx & self.mask) as usize;
        let entry = u64::from_le(self.long_unaligned(at));
        let (id, len) = (entry as u32, (entry >> 32) as u32);
        let posted = usize::try_from(id).ok().and_then(|id| self.posted.get_mut(id));
        let Some(posted) = posted.filter(|posted| **posted) else {
            return Err(Broken("it returned a buffer that it did not have"));
        };
        *posted = false;
        self.posted_count -= 1;
        self.used_idx = self.used_idx.wrapping_add(1);
        Ok(Some((id as u16, len)))
    }

    #[inline(always)]
    fn at<T>(&self, at: usize) -> &T {
        debug_assert!(at + size_of::<T>() <= self.layout.len && at.is_multiple_of(align_of::<T>()));
        // SAFETY: every caller stays inside the layout: its offsets are those of `Layout::of`, and
        // numbers of entries are masked or indices of `posted` that were just checked. The memory
        // is mapped for our life and an atomic may be shared with the device (`new`).
        unsafe { self.base.add(at).cast::<T>().as_ref() }
    }

    #[inline(always)]
    fn half(&self, at: usize) -> &AtomicU16 {
        self.at(at)
    }

    #[inline(always)]
    fn word(&self, at: usize) -> &AtomicU32 {
        self.at(at)
    }

    #[inline(always)]
    fn long(&self, at: usize) -> &AtomicU64 {
        self.at(at)
    }

    /// A used entry: aligned to 4 only, and written before the index that we have seen.
    #[inline(always)]
    fn long_unaligned(&self, at: usize) -> u64 {
        let low = self.word(at).load(Relaxed);
        let high = self.word(at + 4).load(Relaxed);
        u64::from(low) | u64::from(high) << 32
    }
}
