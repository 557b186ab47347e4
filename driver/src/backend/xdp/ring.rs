//! The four rings of an AF_XDP socket: addresses and descriptors in memory shared with the kernel.
//!
//! One side produces, the other consumes; each writes its own cursor and reads the other's. The
//! cursors count up and wrap. A cursor of the other side is validated before use: one that is ahead
//! of the entries, or behind its last value, is a [`RingError`].
//!
//! Source: Linux, Documentation/networking/af_xdp.rst.

use std::io;
use std::marker::PhantomData;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use super::super::lock::UnforkedMap;

/// The kernel violated the protocol of a ring, which is unusable from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RingError(pub(super) &'static str);

/// An entry of a ring.
///
/// # Safety
/// Plain numbers: any bytes are one.
pub(super) unsafe trait Entry: Copy {}

// SAFETY: a number: where a chunk starts in the umem.
unsafe impl Entry for u64 {}
// SAFETY: three numbers: a frame in the umem.
unsafe impl Entry for Desc {}

/// `struct xdp_desc`: a frame.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Desc {
    /// Where it starts in the umem.
    pub(super) addr: u64,
    pub(super) len: u32,
    pub(super) options: u32,
}

/// Offsets of a ring's parts in its mapping, bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingOffsets {
    pub(super) producer: usize,
    pub(super) consumer: usize,
    pub(super) flags: usize,
    pub(super) entries: usize,
}

struct Ring<T> {
    map: UnforkedMap,
    offsets: RingOffsets,
    count: u32,
    holds: PhantomData<fn() -> T>,
}

impl<T: Entry> Ring<T> {
    /// A ring of `count` entries, a power of two.
    ///
    /// # Errors
    /// `EPROTO`: its parts do not lie in the mapping.
    fn new(map: UnforkedMap, offsets: RingOffsets, count: u32) -> io::Result<Self> {
        let fits = |at: usize, len: usize| {
            at.is_multiple_of(align_of::<T>().min(8))
                && at.checked_add(len).is_some_and(|end| end <= map.len())
        };
        let words = [offsets.producer, offsets.consumer, offsets.flags];
        let words = words.into_iter().all(|at| at.is_multiple_of(4) && fits(at & !7, 8));
        let entries = (count as usize).checked_mul(size_of::<T>());
        let is_sound = words
            && count.is_power_of_two()
            && entries.is_some_and(|len| fits(offsets.entries, len));
        if !is_sound {
            return Err(io::Error::from_raw_os_error(libc::EPROTO));
        }
        Ok(Self { map, offsets, count, holds: PhantomData })
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: `new` has seen that the word lies in the mapping, aligned. Both sides access it
        // as a whole.
        unsafe { &*self.map.as_ptr().add(at).cast::<AtomicU32>() }
    }

    #[inline]
    fn producer(&self) -> &AtomicU32 {
        self.word(self.offsets.producer)
    }

    #[inline]
    fn consumer(&self) -> &AtomicU32 {
        self.word(self.offsets.consumer)
    }

    #[inline]
    fn entry(&self, cursor: u32) -> *mut T {
        let i = (cursor & (self.count - 1)) as usize;
        // SAFETY: `i` is below `count`, and as many entries lie in the mapping (`new`).
        unsafe { self.map.as_mut_ptr().add(self.offsets.entries).cast::<T>().add(i) }
    }
}

/// A ring that we fill: `TX` and `FILL`.
pub(super) struct Producer<T> {
    ring: Ring<T>,
    /// Cursors: the next entry to write, the end of published entries, and the kernel's consumer
    /// cursor when last read.
    next: u32,
    published: u32,
    consumed: u32,
}

impl<T: Entry> Producer<T> {
    pub(super) fn new(map: UnforkedMap, offsets: RingOffsets, count: u32) -> io::Result<Self> {
        let ring = Ring::new(map, offsets, count)?;
        let next = ring.producer().load(Relaxed);
        Ok(Self { ring, next, published: next, consumed: next })
    }

    /// Entries that may be written now.
    ///
    /// # Errors
    /// [`RingError`].
    #[inline]
    pub(super) fn room(&mut self) -> Result<u32, RingError> {
        let room = self.ring.count - self.next.wrapping_sub(self.consumed);
        if room > 0 {
            return Ok(room);
        }
        self.unread()?;
        Ok(self.ring.count - self.next.wrapping_sub(self.consumed))
    }

    /// Published entries that the kernel has not read yet.
    ///
    /// # Errors
    /// [`RingError`].
    pub(super) fn unread(&mut self) -> Result<u32, RingError> {
        // Acquire: it has read the entries before they are written again.
        let consumed = self.ring.consumer().load(Acquire);
        let unread = self.published.wrapping_sub(consumed);
        // Nor may the cursor move back.
        if unread > self.published.wrapping_sub(self.consumed) {
            return Err(RingError("the kernel read what was not sent"));
        }
        self.consumed = consumed;
        Ok(unread)
    }

    /// Writes an entry, which the kernel sees once [`publish`](Self::publish) is called.
    ///
    /// # Panics
    /// If [`room`](Self::room) has not returned some before.
    #[inline]
    pub(super) fn put(&mut self, value: T) {
        assert!(self.next.wrapping_sub(self.consumed) < self.ring.count, "no room in the ring");
        // SAFETY: an entry of the ring that is ours: the kernel has read what was there.
        unsafe { self.ring.entry(self.next).write(value) };
        self.next = self.next.wrapping_add(1);
    }

    /// Whether there is something to publish.
    #[inline]
    pub(super) fn is_pending(&self) -> bool {
        self.next != self.published
    }

    /// Shows the kernel what was written.
    #[inline]
    pub(super) fn publish(&mut self) {
        // Release: the entries, and the frames that they name, are seen before the cursor.
        self.ring.producer().store(self.next, Release);
        self.published = self.next;
    }

    /// Whether the kernel wants a system call to look at what was published.
    #[inline]
    pub(super) fn needs_wakeup(&self) -> bool {
        // Orders the published cursor before the load of the wake-up flag.
        fence(SeqCst);
        self.has_wakeup_flag()
    }

    /// [`needs_wakeup`](Self::needs_wakeup) of what was published some time ago.
    #[inline]
    pub(super) fn has_wakeup_flag(&self) -> bool {
        self.ring.word(self.ring.offsets.flags).load(Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0
    }
}

/// A ring that we empty: `RX` and `COMPLETION`.
pub(super) struct Consumer<T> {
    ring: Ring<T>,
    /// Cursors: the next entry to read, the end of released entries, and the kernel's producer
    /// cursor when last read.
    next: u32,
    released: u32,
    produced: u32,
}

impl<T: Entry> Consumer<T> {
    pub(super) fn new(map: UnforkedMap, offsets: RingOffsets, count: u32) -> io::Result<Self> {
        let ring = Ring::new(map, offsets, count)?;
        let next = ring.consumer().load(Relaxed);
        Ok(Self { ring, next, released: next, produced: next })
    }

    /// The next entry, if there is one.
    ///
    /// # Errors
    /// [`RingError`].
    #[inline]
    pub(super) fn take(&mut self) -> Result<Option<T>, RingError> {
        if self.next == self.produced {
            // Acquire: what it wrote is seen after its cursor.
            let produced = self.ring.producer().load(Acquire);
            if produced.wrapping_sub(self.released) > self.ring.count
                || produced.wrapping_sub(self.next) > self.ring.count
            {
                return Err(RingError("the kernel returned more than it had"));
            }
            self.produced = produced;
            if produced == self.next {
                return Ok(None);
            }
        }
        // SAFETY: an entry of the ring, read once; a concurrent write can only change the numbers,
        // and any numbers are checked.
        let value = unsafe { self.ring.entry(self.next).read_volatile() };
        self.next = self.next.wrapping_add(1);
        Ok(Some(value))
    }

    /// Lets the kernel write the entries that were taken.
    #[inline]
    pub(super) fn release(&mut self) {
        if self.next != self.released {
            // Release: we have read them before.
            self.ring.consumer().store(self.next, Release);
            self.released = self.next;
        }
    }
}
