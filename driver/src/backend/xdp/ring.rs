//! The four rings of an AF_XDP socket: numbers and descriptors in memory that the kernel shares.
//!
//! One side produces, the other consumes; each writes its own cursor and reads the other's. The
//! cursors count up for ever and wrap. What the other side says is checked before it is used: a
//! cursor that is ahead of what there is, or behind, is [`Broken`].
//!
//! Source: Linux, Documentation/networking/af_xdp.rst.

use std::io;
use std::marker::PhantomData;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use super::super::lock::UnforkedMap;

/// The other side broke the rules of a ring; nothing in it can be believed any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Broken(pub(super) &'static str);

/// What a ring holds.
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

/// Where the parts of a ring lie in its mapping, bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    pub(super) producer: usize,
    pub(super) consumer: usize,
    pub(super) flags: usize,
    pub(super) entries: usize,
}

struct Ring<T> {
    map: UnforkedMap,
    places: Places,
    count: u32,
    holds: PhantomData<fn() -> T>,
}

impl<T: Entry> Ring<T> {
    /// A ring of `count` entries, a power of two.
    ///
    /// # Errors
    /// `EPROTO`: its parts do not lie in the mapping.
    fn new(map: UnforkedMap, places: Places, count: u32) -> io::Result<Self> {
        let fits = |at: usize, len: usize| {
            at.is_multiple_of(align_of::<T>().min(8))
                && at.checked_add(len).is_some_and(|end| end <= map.len())
        };
        let words = [places.producer, places.consumer, places.flags];
        let words = words.into_iter().all(|at| at.is_multiple_of(4) && fits(at & !7, 8));
        let entries = (count as usize).checked_mul(size_of::<T>());
        let is_sound = words
            && count.is_power_of_two()
            && entries.is_some_and(|len| fits(places.entries, len));
        if !is_sound {
            return Err(io::Error::from_raw_os_error(libc::EPROTO));
        }
        Ok(Self { map, places, count, holds: PhantomData })
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: `new` has seen that the word lies in the mapping, aligned. Both sides access it
        // as a whole.
        unsafe { &*self.map.as_ptr().add(at).cast::<AtomicU32>() }
    }

    #[inline]
    fn producer(&self) -> &AtomicU32 {
        self.word(self.places.producer)
    }

    #[inline]
    fn consumer(&self) -> &AtomicU32 {
        self.word(self.places.consumer)
    }

    #[inline]
    fn entry(&self, cursor: u32) -> *mut T {
        let i = (cursor & (self.count - 1)) as usize;
        // SAFETY: `i` is below `count`, and as many entries lie in the mapping (`new`).
        unsafe { self.map.as_mut_ptr().add(self.places.entries).cast::<T>().add(i) }
    }
}

/// A ring that we fill: `TX` and `FILL`.
pub(super) struct Producer<T> {
    ring: Ring<T>,
    /// The next entry to write; how far the kernel may read; how far it had read when we looked.
    next: u32,
    published: u32,
    consumed: u32,
}

impl<T: Entry> Producer<T> {
    pub(super) fn new(map: UnforkedMap, places: Places, count: u32) -> io::Result<Self> {
        let ring = Ring::new(map, places, count)?;
        let next = ring.producer().load(Relaxed);
        Ok(Self { ring, next, published: next, consumed: next })
    }

    /// Entries that may be written now.
    ///
    /// # Errors
    /// [`Broken`].
    #[inline]
    pub(super) fn room(&mut self) -> Result<u32, Broken> {
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
    /// [`Broken`].
    pub(super) fn unread(&mut self) -> Result<u32, Broken> {
        // Acquire: it has read the entries before they are written again.
        let consumed = self.ring.consumer().load(Acquire);
        let unread = self.published.wrapping_sub(consumed);
        // Not behind where it was either.
        if unread > self.published.wrapping_sub(self.consumed) {
            return Err(Broken("the kernel read what was not sent"));
        }
        self.consumed = consumed;
        Ok(unread)
    }

    /// Writes an entry, which the kernel sees once [`publish`](Self::publish) is called.
    ///
    /// # Panics
    /// If there is no [`room`](Self::room) that has been seen.
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
        // What was published is seen before the kernel's last look is asked for.
        fence(SeqCst);
        self.asks_for_wakeup()
    }

    /// [`needs_wakeup`](Self::needs_wakeup) of what was published some time ago.
    #[inline]
    pub(super) fn asks_for_wakeup(&self) -> bool {
        self.ring.word(self.ring.places.flags).load(Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0
    }
}

/// A ring that we empty: `RX` and `COMPLETION`.
pub(super) struct Consumer<T> {
    ring: Ring<T>,
    /// The next entry to read; how far the kernel may write; how far it had written.
    next: u32,
    released: u32,
    produced: u32,
}

impl<T: Entry> Consumer<T> {
    pub(super) fn new(map: UnforkedMap, places: Places, count: u32) -> io::Result<Self> {
        let ring = Ring::new(map, places, count)?;
        let next = ring.consumer().load(Relaxed);
        Ok(Self { ring, next, released: next, produced: next })
    }

    /// The next entry, if there is one.
    ///
    /// # Errors
    /// [`Broken`].
    #[inline]
    pub(super) fn take(&mut self) -> Result<Option<T>, Broken> {
        if self.next == self.produced {
            // Acquire: what it wrote is seen after its cursor.
            let produced = self.ring.producer().load(Acquire);
            if produced.wrapping_sub(self.released) > self.ring.count
                || produced.wrapping_sub(self.next) > self.ring.count
            {
                return Err(Broken("the kernel returned more than it had"));
            }
            self.produced = produced;
            if produced == self.next {
                return Ok(None);
            }
        }
        // SAFETY: an entry of the ring, read once; whoever writes it now can only make it another
        // number, and any number is checked.
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
