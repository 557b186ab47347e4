//! The driver's end of a virtio split queue (virtio 1.2, section 2.7).
//!
//! ```text
//!  descriptors   one per buffer: address, length, who writes      written by us
//!  available     numbers of posted descriptors, then an index     written by us
//!  used          (number, bytes written), then an index           written by the device
//! ```
//!
//! Every buffer has one descriptor of the same number for the life of the queue, so posting it
//! again writes two bytes of the available ring and nothing else. [`Virtq`] keeps the numbers of
//! those that the device does not have, so that none is posted twice and none needs a check on its
//! way there; of a [`RecycledVirtq`] the device has them all.
//!
//! What the device writes is an index and pairs of number and length. The index may not run ahead
//! of what was posted, and a number has to be one that is posted; anything else is [`Broken`] and
//! the queue must not be used any more. The length is handed on for the caller to bound.
//!
//! # Ordering
//! - [`publish`](Virtq::publish) is a Release store of the available index: a device that sees it
//!   sees the descriptors, the ring and the buffers.
//! - [`take_burst`](Virtq::take_burst) loads the used index with Acquire: whoever sees it sees the
//!   used ring and what the device wrote to the buffers.
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

/// The memory of a queue. A copy is as good as the other.
#[derive(Clone, Copy)]
struct Memory {
    desc: NonNull<u8>,
    avail: NonNull<u8>,
    used: NonNull<u8>,
    mask: u16,
}

// SAFETY: the queue is the only one of ours who touches the memory behind the pointers, whichever
// thread it is on; the device does so through atomics' memory.
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

    /// Shows the device the entries of the available ring before `idx`.
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

    /// Writes entry `idx` of the available ring, which the device looks at once it is published.
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

    /// Number and length in entry `idx` of the used ring, which was written before the index that
    /// we have seen.
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

/// How far we are in the used ring.
struct Progress {
    /// Index of the next entry that we look at.
    used_idx: u16,
    /// The device's index when we last looked.
    used_seen: u16,
}

impl Progress {
    const START: Self = Self { used_idx: 0, used_seen: 0 };

    /// How many buffers can be taken now, at most `max`, if the device has `posted_count`. Its
    /// index is read once, and not at all while as many are known of.
    #[inline(always)]
    fn ready_count(
        &mut self,
        memory: Memory,
        max: usize,
        posted_count: u16,
    ) -> Result<usize, Broken> {
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
fn too_many() -> Broken {
    Broken("it returned more buffers than it had")
}

#[cold]
fn not_posted() -> Broken {
    Broken("it returned a buffer that it did not have")
}

/// The driver's end of a queue whose buffers are posted one by one: to send, or for commands.
///
/// Invariants: `free[..free_count]` are different numbers below `count`, and `posted` is true for
/// the `count - free_count` others and for none of them.
pub struct Virtq {
    memory: Memory,
    /// Index of the next entry that we make available.
    avail_idx: u16,
    progress: Progress,
    /// Descriptors that the device does not have.
    free_count: u16,
    /// Their numbers, the next to be posted last.
    free: Box<[u16]>,
    posted: Box<[bool]>,
}

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

    /// Descriptors that the device has.
    #[inline]
    pub fn posted_count(&self) -> u16 {
        self.memory.count() - self.free_count
    }

    /// Describes buffer `id`: `len` bytes at the device's address `addr`.
    ///
    /// # Panics
    /// If the device has it, or there is no such descriptor.
    pub fn describe(&mut self, id: u16, addr: u64, len: u32, device_writes: bool) {
        assert!(!self.posted[id as usize], "a descriptor that the device has");
        self.memory.describe(id, addr, len, device_writes);
    }

    /// Lets the buffer `next` follow buffer `id` in one chain, which is posted by its first.
    ///
    /// # Panics
    /// If the device has one of them, or there is no such descriptor.
    pub fn chain(&mut self, id: u16, next: u16) {
        assert!(!self.posted[id as usize] && !self.posted[next as usize], "the device has it");
        // SAFETY: `posted` has `count` entries, and has this one.
        let word = unsafe { self.memory.desc_word(id, 12) };
        let flags = u32::from_le(word.load(Relaxed)) as u16 | DESC_NEXT;
        word.store((u32::from(flags) | u32::from(next) << 16).to_le(), Relaxed);
    }

    /// The buffer that [`post`](Self::post) would give to the device: of those that came back, the
    /// last; at first, 0.
    #[inline(always)]
    pub fn next(&self) -> Option<u16> {
        let top = usize::from(self.free_count).checked_sub(1)?;
        // SAFETY: `free` has `count` entries, and `free_count` is at most that.
        Some(unsafe { *self.free.get_unchecked(top) })
    }

    /// Gives buffer [`next`](Self::next) to the device with the next [`publish`](Self::publish),
    /// as it was described. `false` if the device has them all.
    #[inline(always)]
    pub fn post(&mut self) -> bool {
        self.post_as(|_| None)
    }

    /// As [`post`](Self::post), after `fill` has been told the buffer's number, has written to it
    /// and has said how long it is now; `None`: as before. It is not called if the device has all.
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

    /// Shows the device what was posted.
    #[inline(always)]
    pub fn publish(&mut self) {
        self.memory.publish(self.avail_idx);
    }

    /// Whether the device wants to be told of what was published.
    #[inline(always)]
    pub fn wants_kick(&self) -> bool {
        self.memory.wants_kick()
    }

    /// Whether [`take`](Self::take) would find something.
    #[inline]
    pub fn pending(&self) -> bool {
        self.memory.used_now() != self.progress.used_idx
    }

    /// Takes a buffer back: its number and how many bytes the device says it wrote.
    ///
    /// # Errors
    /// [`Broken`]: nothing that the device writes can be believed any more.
    pub fn take(&mut self) -> Result<Option<(u16, u32)>, Broken> {
        let at = self.progress.used_idx;
        if self.take_burst(1)? == 0 {
            return Ok(None);
        }
        let len = self.memory.used_entry(at)[1].load(Relaxed);
        // It was put there just now.
        Ok(self.next().map(|id| (id, u32::from_le(len))))
    }

    /// Takes at most `max` buffers back and says how many there were.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    #[inline(always)]
    pub fn take_burst(&mut self, max: usize) -> Result<usize, Broken> {
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

/// The driver's end of a queue whose buffers are always with the device, but for a moment: to
/// receive.
///
/// All are posted when it is made. A buffer that is taken is posted again at once, in the order in
/// which it came, and the device hears of it with the next [`publish`](Self::publish): until then
/// it is the caller's. So nothing has to be kept of those that were taken but which they are.
pub struct RecycledVirtq {
    memory: Memory,
    progress: Progress,
    /// The period, from one `publish` to the next, in which a buffer was last taken.
    taken_in: Box<[u16]>,
    /// The period now, never 0.
    period: u16,
    /// Buffers that were taken in it.
    taken_count: u16,
}

impl RecycledVirtq {
    /// A queue as [`Virtq::new`], all of whose buffers are posted: `len` bytes that the device
    /// writes, buffer `id` at its address `addr_of(id)`.
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
        let taken_in = vec![0; count as usize].into();
        Self { memory, progress: Progress::START, taken_in, period: 1, taken_count: 0 }
    }

    /// Takes at most `max` buffers, oldest first, tells `each` number and length of every one, and
    /// says how many there were. The length is what the device says that it wrote.
    ///
    /// # Errors
    /// [`Broken`]: nothing that the device writes can be believed any more. `each` has been told
    /// of those before the wrong one.
    #[inline(always)]
    pub fn take_burst(
        &mut self,
        max: usize,
        mut each: impl FnMut(u16, u32),
    ) -> Result<usize, Broken> {
        let Self { memory, progress, taken_in, period, taken_count } = self;
        let (memory, period) = (*memory, *period);
        let now = progress.ready_count(memory, max, memory.count() - *taken_count)?;
        let first = progress.used_idx;
        let taken_in = &mut taken_in[..];
        for i in 0..now {
            let idx = first.wrapping_add(i as u16);
            let entry = memory.used_entry(idx);
            let (id, len) = (entry[0].load(Relaxed), entry[1].load(Relaxed));
            let id = u32::from_le(id);
            match taken_in.get_mut(id as usize) {
                Some(taken_in) if *taken_in != period => *taken_in = period,
                _ => return Err(not_posted()),
            }
            // All have been posted since this one was, so the available ring is as far ahead as it
            // is long: this is the next entry of both.
            memory.set_available(idx, id as u16);
            each(id as u16, u32::from_le(len));
        }
        progress.used_idx = first.wrapping_add(now as u16);
        *taken_count += now as u16;
        Ok(now)
    }

    /// Lets the device have the buffers that were taken, and says whether there were any.
    #[inline(always)]
    pub fn publish(&mut self) -> bool {
        if std::mem::take(&mut self.taken_count) == 0 {
            return false;
        }
        self.memory.publish(self.progress.used_idx.wrapping_add(self.memory.count()));
        self.period = self.period.wrapping_add(1);
        if self.period == 0 {
            // Marks of 65,535 periods ago must not be taken for those to come.
            self.taken_in.fill(0);
            self.period = 1;
        }
        true
    }

    /// Whether the device is to interrupt when it has used a buffer. One that it used before it
    /// saw this may go unannounced: who asks for interrupts takes once more before it sleeps.
    pub fn set_interrupt(&mut self, wanted: bool) {
        let flags = if wanted { 0 } else { NO_INTERRUPT };
        self.memory.avail_half(0).store(flags.to_le(), Relaxed);
        // Before the look at the used index that follows.
        fence(SeqCst);
    }

    /// Whether the device wants to be told of what was published.
    #[inline(always)]
    pub fn wants_kick(&self) -> bool {
        self.memory.wants_kick()
    }
}
