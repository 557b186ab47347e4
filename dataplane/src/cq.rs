//! Completion queues: a ring that cannot overrun, since whoever will complete an operation has
//! reserved the entry when the operation was posted.

use crate::error::{Error, Result};
use crate::slab::Slab;
use crate::types::{CqErr, Cqe};

/// A completion queue.
///
/// Entries come out in the order they went in, successes and failures alike. `used + reserved` is
/// never above the capacity.
#[derive(Debug)]
pub(crate) struct Cq {
    /// Slots in use are `head..tail` modulo the capacity. Grows, in reserved room, up to the
    /// capacity on the first way around: what is never used is never touched.
    ring: Vec<Slot>,
    /// The records of the failures in the ring, which are long and rare.
    errs: Slab<CqErr>,
    head: u64,
    tail: u64,
    mask: u64,
    reserved: u64,
    signal: bool,
}

/// 64 bytes.
#[derive(Clone, Copy, Debug)]
enum Slot {
    Done(Cqe),
    Failed(u32),
}

impl Cq {
    /// An empty queue of at least `size` entries: the next power of two. Reserves address space.
    pub(crate) fn new(size: usize) -> Self {
        let capacity = size.max(1).next_power_of_two();
        Self {
            ring: Vec::with_capacity(capacity),
            errs: Slab::with_capacity(capacity),
            head: 0,
            tail: 0,
            mask: capacity as u64 - 1,
            reserved: 0,
            signal: false,
        }
    }

    /// Keeps one entry free for a later push. False, and nothing kept, if none is left: the
    /// operation must not start, its caller gets [`Error::Again`].
    #[inline]
    pub(crate) fn reserve(&mut self) -> bool {
        let room = self.has_room();
        self.reserved += u64::from(room);
        room
    }

    /// Gives one reservation back: the operation will write no completion.
    ///
    /// # Panics
    /// If there is none.
    #[inline]
    pub(crate) fn unreserve(&mut self) {
        assert!(self.reserved > 0, "cq: nothing is reserved");
        self.reserved -= 1;
    }

    /// Appends a success, in an entry reserved before.
    ///
    /// # Panics
    /// If none is reserved: a completion would be lost.
    #[inline]
    pub(crate) fn push(&mut self, cqe: Cqe) {
        self.unreserve();
        self.append(Slot::Done(cqe));
    }

    /// Appends a failure, in an entry reserved before.
    ///
    /// # Panics
    /// As [`push`](Self::push).
    pub(crate) fn push_err(&mut self, err: CqErr) {
        self.unreserve();
        let idx = self.errs.alloc(err).expect("as many records as entries");
        self.append(Slot::Failed(idx));
    }

    /// Appends a success that nobody has reserved an entry for. False, and nothing written, if
    /// every entry is used or reserved.
    #[inline]
    pub(crate) fn try_push(&mut self, cqe: Cqe) -> bool {
        let room = self.has_room();
        if room {
            self.append(Slot::Done(cqe));
        }
        room
    }

    /// Takes successes out, as many as `out` holds or as stand before the next failure.
    ///
    /// # Errors
    /// - [`Error::Again`]: the queue is empty.
    /// - [`Error::Avail`]: a failure is next. Nothing was read; [`readerr`](Self::readerr) takes
    ///   it.
    #[inline]
    pub(crate) fn read(&mut self, out: &mut [Cqe]) -> Result<usize> {
        let ready = (self.tail - self.head).min(out.len() as u64) as usize;
        let mut n = 0;
        while n < ready {
            let Slot::Done(cqe) = self.ring[(self.head & self.mask) as usize] else { break };
            out[n] = cqe;
            self.head += 1;
            n += 1;
        }
        if n > 0 {
            return Ok(n);
        }
        self.read_nothing()
    }

    #[cold]
    fn read_nothing(&self) -> Result<usize> {
        if self.head == self.tail {
            return Err(Error::Again);
        }
        match self.ring[(self.head & self.mask) as usize] {
            Slot::Failed(_) => Err(Error::Avail),
            Slot::Done(_) => Ok(0), // `out` is empty
        }
    }

    /// Takes the failure that is next.
    ///
    /// # Errors
    /// [`Error::Again`] if the queue is empty or a success is next. Nothing was read.
    pub(crate) fn readerr(&mut self) -> Result<CqErr> {
        if self.head == self.tail {
            return Err(Error::Again);
        }
        let Slot::Failed(idx) = self.ring[(self.head & self.mask) as usize] else {
            return Err(Error::Again);
        };
        self.head += 1;
        Ok(self.errs.free(idx))
    }

    /// Entries waiting to be read, successes and failures.
    pub(crate) fn ready(&self) -> usize {
        (self.tail - self.head) as usize
    }

    /// Entries there are.
    pub(crate) fn capacity(&self) -> usize {
        self.mask as usize + 1
    }

    /// Entries kept free for operations in flight.
    pub(crate) fn reserved(&self) -> usize {
        self.reserved as usize
    }

    /// Whether anything was appended since the last call: a thread may wait for it.
    #[inline]
    pub(crate) fn take_signal(&mut self) -> bool {
        std::mem::take(&mut self.signal)
    }

    #[inline]
    fn has_room(&self) -> bool {
        self.tail - self.head + self.reserved <= self.mask
    }

    #[inline]
    fn append(&mut self, slot: Slot) {
        match self.ring.get_mut((self.tail & self.mask) as usize) {
            Some(place) => *place = slot,
            None => self.append_fresh(slot),
        }
        self.tail += 1;
        self.signal = true;
    }

    /// The first way around. Within the capacity of the vector, so it does not allocate.
    #[cold]
    fn append_fresh(&mut self, slot: Slot) {
        assert!(self.ring.len() < self.capacity(), "cq: ring grew past its capacity");
        self.ring.push(slot);
    }
}
