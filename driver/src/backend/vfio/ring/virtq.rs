//! Virtio split queue, driver side (virtio 1.2, section 2.7).
//!
//! ```text
//!  descriptors   one per buffer: address, length, who writes      written by us
//!  available     numbers of posted descriptors, then an index     written by us
//!  used          (number, bytes written), then an index           written by the device
//! ```
//!
//! Buffer `i` belongs to descriptor `i` for the life of the queue, so posting it again writes two
//! bytes of the available ring and nothing else. [`Virtq`] keeps a free list of descriptor ids, so
//! that none is posted twice. A [`RecycledVirtq`] keeps all descriptors posted.
//!
//! The device writes the used index and pairs of id and length. The used index may not pass what
//! was posted, and an id must be a posted one; otherwise the queue returns [`DeviceViolation`] and
//! must not be used any more. The caller bounds the length.
//!
//! # Ordering
//! - [`publish`](Virtq::publish) is a Release store of the available index: a device that reads it
//!   sees the descriptors, the ring and the buffers.
//! - [`take_burst`](Virtq::take_burst) loads the used index with Acquire: its reader sees the used
//!   ring and what the device wrote to the buffers.
//! - [`wants_kick`](Virtq::wants_kick) reads a flag that the device sets after its last read of the
//!   available index. Store then load of two locations needs a full fence between them, on both
//!   sides, or a notification is lost.

use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, fence};

/// Largest queue: a 16-bit index has to distinguish empty from full.
pub const COUNT_MAX: u16 = 1 << 15;

/// The device wrote a value that the specification does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the device wrote what no device may: {0}")]
pub struct DeviceViolation(pub &'static str);

/// Offsets of the three parts of a queue of `count` descriptors, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The descriptors; a multiple of 16.
    pub desc: usize,
    /// The available ring; a multiple of 2.
    pub avail: usize,
    /// The used ring; a multiple of 4, in cache lines that the driver never writes.
    pub used: usize,
    /// Total length.
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

/// Pointers to a queue's memory.
#[derive(Clone, Copy)]
struct Memory {
    desc: NonNull<u8>,
    avail: NonNull<u8>,
    used: NonNull<u8>,
    mask: u16,
}

// SAFETY: only the queue accesses the memory behind the pointers, on any thread; the device's
// accesses are to atomics.
unsafe impl Send for Memory {}

impl Memory {
    /// # Safety
    /// As [`Virtq::new`].
    unsafe fn new(base: NonNull<u8>, count: u16) -> Self {
        assert!(
            count.is_power_of_two()
                && count <= COUNT_MAX
                && (base.as_ptr() as usize).is_multiple_of(64)
        );
        let layout = Layout::of(count);
        // SAFETY: inside the `layout.len` bytes that the caller vouches for.
        let part = |at: usize| unsafe { base.add(at) };
        let memory = Self {
            desc: part(layout.desc),
            avail: part(layout.avail),
            used: part(layout.used),
            mask: count - 1,
        };
        memory.avail_half(0).store(NO_INTERRUPT.to_le(), Relaxed);
        memory
    }

    #[inline(always)]
    fn count(&self) -> u16 {
        self.mask + 1
    }

    fn describe(&self, id: u16, addr: u64, len: u32, device_writes: bool) {
        assert!(id <= self.mask, "no such descriptor");
        let flags = if device_writes { DESC_WRITE } else { 0 };
        // SAFETY: just checked.
        unsafe {
            self.desc_long(id).store(addr.to_le(), Relaxed);
            self.desc_word(id, 8).store(len.to_le(), Relaxed);
            self.desc_word(id, 12).store(u32::from(flags).to_le(), Relaxed);
        }
    }

    /// Publishes the entries of the available ring before `idx`.
    #[inline(always)]
    fn publish(&self, idx: u16) {
        self.avail_half(2).store(idx.to_le(), Release);
    }

    #[inline(always)]
    fn wants_kick(&self) -> bool {
        fence(SeqCst);
        u16::from_le(self.used_half(0).load(Relaxed)) & NO_NOTIFY == 0
    }

    #[inline(always)]
    fn used_now(&self) -> u16 {
        u16::from_le(self.used_half(2).load(Acquire))
    }

    #[inline(always)]
    fn avail_half(&self, at: usize) -> &AtomicU16 {
        debug_assert!(at <= 4 + 2 * usize::from(self.mask) && at.is_multiple_of(2));
        // SAFETY: the callers' offsets are 0, 2 and those of entries whose index is masked, all
        // inside the available ring. It is mapped for our life and an atomic may be shared with
        // the device (`new`).
        unsafe { self.avail.add(at).cast().as_ref() }
    }

    /// Writes entry `idx` of the available ring, which the device reads once it is published.
    #[inline(always)]
    fn set_available(&self, idx: u16, id: u16) {
        self.avail_half(4 + 2 * usize::from(idx & self.mask)).store(id.to_le(), Relaxed);
    }

    #[inline(always)]
    fn used_half(&self, at: usize) -> &AtomicU16 {
        debug_assert!(at <= 2 && at.is_multiple_of(2));
        // SAFETY: 0 and 2 lie inside the used ring, which is mapped for our life; an atomic may be
        // shared with the device.
        unsafe { self.used.add(at).cast().as_ref() }
    }

    /// Id and length in entry `idx` of the used ring, which was written before the used index that
    /// was read.
    #[inline(always)]
    fn used_entry(&self, idx: u16) -> &[AtomicU32; 2] {
        // SAFETY: an entry of 8 bytes, aligned to 4, whose index is masked: inside the used ring,
        // which is mapped for our life. Atomics may be shared with the device.
        unsafe { self.used.add(4 + 8 * usize::from(idx & self.mask)).cast().as_ref() }
    }

    /// The address in descriptor `id`.
    ///
    /// # Safety
    /// `id` is below `count`.
    unsafe fn desc_long(&self, id: u16) -> &AtomicU64 {
        // SAFETY: inside the descriptors, the caller says, and aligned to 16. They are mapped for
        // our life; an atomic may be shared with the device.
        unsafe { self.desc.add(16 * usize::from(id)).cast().as_ref() }
    }

    /// The word at `at`, 8 or 12, in descriptor `id`.
    ///
    /// # Safety
    /// `id` is below `count`.
    #[inline(always)]
    unsafe fn desc_word(&self, id: u16, at: usize) -> &AtomicU32 {
        // SAFETY: inside the descriptors, the caller says, and aligned to 4. They are mapped for
        // our life; an atomic may be shared with the device.
        unsafe { self.desc.add(16 * usize::from(id) + at).cast().as_ref() }
    }
}

/// Consumer state of the used ring.
struct Progress {
    /// Index of the next entry to read.
    used_idx: u16,
    /// The device's used index as last read.
    used_seen: u16,
}

impl Progress {
    const START: Self = Self { used_idx: 0, used_seen: 0 };

    /// Number of buffers that can be taken, at most `max`, if `posted_count` are posted. Reads the
    /// device's index once, and not at all while enough are known.
    #[inline(always)]
    fn ready_count(
        &mut self,
        memory: Memory,
        max: usize,
        posted_count: u16,
    ) -> Result<usize, DeviceViolation> {
        let mut ready = self.used_seen.wrapping_sub(self.used_idx);
        if usize::from(ready) < max {
            let seen = memory.used_now();
            ready = seen.wrapping_sub(self.used_idx);
            if ready > posted_count {
                return Err(too_many());
            }
            self.used_seen = seen;
        }
        Ok(usize::from(ready).min(max))
    }
}

#[cold]
fn too_many() -> DeviceViolation {
    DeviceViolation("it returned more buffers than it had")
}

#[cold]
fn not_posted() -> DeviceViolation {
    DeviceViolation("it returned a buffer that it did not have")
}

/// A queue whose buffers are posted one by one: for transmission or commands.
///
/// Invariants: `free[..free_count]` are distinct ids below `count`, and `posted` is true for
/// exactly the `count - free_count` others.
pub struct Virtq {
    memory: Memory,
    /// Index of the next entry of the available ring.
    avail_idx: u16,
    progress: Progress,
    /// Number of free descriptors.
    free_count: u16,
    /// Stack of their ids, the next one on top.
    free: Box<[u16]>,
    posted: Box<[bool]>,
}

impl Virtq {
    /// A queue of `count` descriptors over zeroed memory at `base`, with interrupts disabled.
    ///
    /// # Safety
    /// [`Layout::of`]`(count).len` bytes at `base`, aligned to 64, are mapped, zero and reached by
    /// nobody but this queue and the device for as long as it lives.
    ///
    /// # Panics
    /// If `count` is no power of two, or above [`COUNT_MAX`].
    pub unsafe fn new(base: NonNull<u8>, count: u16) -> Self {
        Self {
            // SAFETY: the caller's promise.
            memory: unsafe { Memory::new(base, count) },
            avail_idx: 0,
            progress: Progress::START,
            free_count: count,
            free: (0..count).rev().collect(),
            posted: vec![false; count as usize].into(),
        }
    }

    /// Number of posted descriptors.
    #[inline]
    pub fn posted_count(&self) -> u16 {
        self.memory.count() - self.free_count
    }

    /// Describes buffer `id`: `len` bytes at the device's address `addr`.
    ///
    /// # Panics
    /// If it is posted or out of range.
    pub fn describe(&mut self, id: u16, addr: u64, len: u32, device_writes: bool) {
        assert!(!self.posted[id as usize], "a descriptor that the device has");
        self.memory.describe(id, addr, len, device_writes);
    }

    /// Chains buffer `next` behind buffer `id`; the chain is posted by its head.
    ///
    /// # Panics
    /// If one of them is posted or out of range.
    pub fn chain(&mut self, id: u16, next: u16) {
        assert!(!self.posted[id as usize] && !self.posted[next as usize], "the device has it");
        // SAFETY: `posted` has `count` entries, and has this one.
        let word = unsafe { self.memory.desc_word(id, 12) };
        let flags = u32::from_le(word.load(Relaxed)) as u16 | DESC_NEXT;
        word.store((u32::from(flags) | u32::from(next) << 16).to_le(), Relaxed);
    }

    /// The buffer that [`post`](Self::post) would post: the last one returned; at first, 0.
    #[inline(always)]
    pub fn next(&self) -> Option<u16> {
        let top = usize::from(self.free_count).checked_sub(1)?;
        // SAFETY: `free` has `count` entries, and `free_count` is at most that.
        Some(unsafe { *self.free.get_unchecked(top) })
    }

    /// Posts buffer [`next`](Self::next) as it was described; the device sees it after the next
    /// [`publish`](Self::publish). `false` if all are posted.
    #[inline(always)]
    pub fn post(&mut self) -> bool {
        self.post_as(|_| None)
    }

    /// As [`post`](Self::post), after `fill` has written to buffer `id` and returned its new length
    /// (`None`: unchanged). `fill` is not called if all are posted.
    #[inline(always)]
    pub fn post_as(&mut self, fill: impl FnOnce(u16) -> Option<u32>) -> bool {
        let Some(id) = self.next() else { return false };
        let (memory, left, idx) = (self.memory, self.free_count - 1, self.avail_idx);
        if let Some(len) = fill(id) {
            // SAFETY: a number of `free`, and so below `count`.
            unsafe { memory.desc_word(id, 8).store(len.to_le(), Relaxed) };
        }
        // SAFETY: as above; `posted` has `count` entries.
        unsafe { *self.posted.get_unchecked_mut(usize::from(id)) = true };
        memory.set_available(idx, id);
        self.free_count = left;
        self.avail_idx = idx.wrapping_add(1);
        true
    }

    /// Publishes the posted buffers to the device.
    #[inline(always)]
    pub fn publish(&mut self) {
        self.memory.publish(self.avail_idx);
    }

    /// Whether the device wants a notification for the published buffers.
    #[inline(always)]
    pub fn wants_kick(&self) -> bool {
        self.memory.wants_kick()
    }

    /// Whether [`take`](Self::take) would return a buffer.
    #[inline]
    pub fn pending(&self) -> bool {
        self.memory.used_now() != self.progress.used_idx
    }

    /// Takes a used buffer: its id and the length that the device reports.
    ///
    /// # Errors
    /// [`DeviceViolation`]: nothing that the device writes can be trusted any more.
    pub fn take(&mut self) -> Result<Option<(u16, u32)>, DeviceViolation> {
        let at = self.progress.used_idx;
        if self.take_burst(1)? == 0 {
            return Ok(None);
        }
        let len = self.memory.used_entry(at)[1].load(Relaxed);
        // `take_burst` has just pushed it.
        Ok(self.next().map(|id| (id, u32::from_le(len))))
    }

    /// Takes at most `max` used buffers and returns their number.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    #[inline(always)]
    pub fn take_burst(&mut self, max: usize) -> Result<usize, DeviceViolation> {
        let posted_count = self.posted_count();
        let Self { memory, progress, free_count, free, posted, .. } = self;
        let taken_count = progress.ready_count(*memory, max, posted_count)?;
        for i in 0..taken_count {
            let entry = memory.used_entry(progress.used_idx.wrapping_add(i as u16));
            let id = u32::from_le(entry[0].load(Relaxed));
            match posted.get_mut(id as usize) {
                Some(posted) if *posted => *posted = false,
                _ => return Err(not_posted()),
            }
            // SAFETY: at most `posted_count` are taken, so `free` has room for this one: it has
            // `count` entries, of which those of posted buffers are not in use.
            unsafe { *free.get_unchecked_mut(usize::from(*free_count) + i) = id as u16 };
        }
        progress.used_idx = progress.used_idx.wrapping_add(taken_count as u16);
        *free_count += taken_count as u16;
        Ok(taken_count)
    }
}

/// A queue whose buffers are always posted, except while the caller reads them: for reception.
///
/// All buffers are posted at the start. A taken buffer is posted again at once, in the order of
/// completion; the device sees it after the next [`publish`](Self::publish), and until then it
/// belongs to the caller. So the only state is which buffers are taken.
pub struct RecycledVirtq {
    memory: Memory,
    progress: Progress,
    /// Per buffer, the period (from one `publish` to the next) in which it was last taken.
    taken_period: Box<[u16]>,
    /// The current period, never 0.
    period: u16,
    /// Buffers taken in the current period.
    taken_count: u16,
}

impl RecycledVirtq {
    /// A queue as [`Virtq::new`], with all buffers posted: `len` writable bytes each, buffer `id`
    /// at the IOVA `addr_of(id)`.
    ///
    /// # Safety
    /// As [`Virtq::new`].
    ///
    /// # Panics
    /// As [`Virtq::new`].
    pub unsafe fn new(
        base: NonNull<u8>,
        count: u16,
        len: u32,
        addr_of: impl Fn(u16) -> u64,
    ) -> Self {
        // SAFETY: the caller's promise.
        let memory = unsafe { Memory::new(base, count) };
        for id in 0..count {
            memory.describe(id, addr_of(id), len, true);
            memory.set_available(id, id);
        }
        memory.publish(count);
        let taken_period = vec![0; count as usize].into();
        Self { memory, progress: Progress::START, taken_period, period: 1, taken_count: 0 }
    }

    /// Takes at most `max` buffers, oldest first, calls `each` with id and length of every one, and
    /// returns their number. The length is the device's, not validated.
    ///
    /// # Errors
    /// [`DeviceViolation`]: nothing that the device writes can be trusted any more. `each` was
    /// called for the entries before the invalid one.
    #[inline(always)]
    pub fn take_burst(
        &mut self,
        max: usize,
        mut each: impl FnMut(u16, u32),
    ) -> Result<usize, DeviceViolation> {
        let Self { memory, progress, taken_period, period, taken_count } = self;
        let (memory, period) = (*memory, *period);
        let now = progress.ready_count(memory, max, memory.count() - *taken_count)?;
        let first = progress.used_idx;
        let taken_period = &mut taken_period[..];
        for i in 0..now {
            let idx = first.wrapping_add(i as u16);
            let entry = memory.used_entry(idx);
            let (id, len) = (entry[0].load(Relaxed), entry[1].load(Relaxed));
            let id = u32::from_le(id);
            match taken_period.get_mut(id as usize) {
                Some(taken_period) if *taken_period != period => *taken_period = period,
                _ => return Err(not_posted()),
            }
            // All buffers are posted, so the available ring is ahead by the queue's length: this is
            // the next entry of both.
            memory.set_available(idx, id as u16);
            each(id as u16, u32::from_le(len));
        }
        progress.used_idx = first.wrapping_add(now as u16);
        *taken_count += now as u16;
        Ok(now)
    }

    /// Publishes the taken buffers to the device; returns whether there were any.
    #[inline(always)]
    pub fn publish(&mut self) -> bool {
        if std::mem::take(&mut self.taken_count) == 0 {
            return false;
        }
        self.memory.publish(self.progress.used_idx.wrapping_add(self.memory.count()));
        self.period = self.period.wrapping_add(1);
        if self.period == 0 {
            // Marks of 65,535 periods ago must not be mistaken for new ones.
            self.taken_period.fill(0);
            self.period = 1;
        }
        true
    }

    /// Enables or disables the interrupt for used buffers. A buffer that was used before the device
    /// reads the flag may not be signalled: poll once more before sleeping.
    pub fn set_interrupt(&mut self, wanted: bool) {
        let flags = if wanted { 0 } else { NO_INTERRUPT };
        self.memory.avail_half(0).store(flags.to_le(), Relaxed);
        // Ordered before the following read of the used index.
        fence(SeqCst);
    }

    /// Whether the device wants a notification for the published buffers.
    #[inline(always)]
    pub fn wants_kick(&self) -> bool {
        self.memory.wants_kick()
    }
}
