//! Completion queues: a ring that cannot overrun, since each operation reserves an entry when it is
//! posted.

use barewire_driver::hint::cold;

use crate::error::{Error, Result};
use crate::flags::CqFlags;
use crate::idx::{CqErrIdx, CqIdx};
use crate::slab::Slab;
use crate::types::{CqErr, Cqe, FI_ADDR_UNSPEC};

/// A consumer of one completion. It takes the completion from the ring or, if the queue is empty
/// when the operation completes, directly from the code that completes it, so that the completion
/// never enters the ring.
pub trait Reader {
    /// Whether it reads queue `cq`.
    fn reads(&self, cq: CqIdx) -> bool;

    /// Consumes the completion.
    fn take(self, cqe: &Cqe);
}

/// No reader: every completion goes to its queue.
pub struct NoReader;

impl Reader for NoReader {
    #[inline(always)]
    fn reads(&self, _: CqIdx) -> bool {
        false
    }

    #[inline(always)]
    fn take(self, _: &Cqe) {}
}

/// A completion queue.
///
/// Entries are read in the order in which they were written, successes and failures alike. Used and
/// reserved entries together, `head..promised`, never exceed the capacity; the [`Lead`] before the
/// ring occupies no entry.
#[derive(Debug)]
pub(crate) struct Cq {
    /// Entries in use are `head..tail` modulo the capacity. During the first round the vector grows
    /// within its reserved capacity, so that unused memory is never touched.
    ring: Vec<Entry>,
    /// Records of the failures in the ring, which are long and rare. (Boxed, to keep the queue's
    /// slot small.)
    errs: Box<Slab<CqErr, (), CqErrIdx>>,
    head: u64,
    tail: u64,
    mask: u64,
    /// The tail once every reserved entry is used.
    promised: u64,
    lead: Lead,
    /// Entries that can be read: `tail - head`, plus 1 while there is a lead.
    ready: usize,
}

/// The completion of a send that was written while the queue was empty, reduced to its two non-zero
/// words. Usually it is read before another entry is written. Later entries go into the ring,
/// behind it.
#[derive(Clone, Copy, Debug, Default)]
struct Lead {
    op_context: u64,
    /// Empty if there is no lead.
    flags: CqFlags,
}

impl Lead {
    #[inline(always)]
    fn cqe(self) -> Cqe {
        let Self { op_context, flags } = self;
        Cqe { op_context, flags, src: FI_ADDR_UNSPEC, ..Cqe::default() }
    }
}

/// An entry of the ring, 64 bytes.
#[derive(Clone, Copy, Debug)]
struct Entry {
    cqe: Cqe,
    /// The record of a failure, [`NONE`](CqErrIdx::NONE) for a success.
    err: CqErrIdx,
}

impl Cq {
    /// An empty queue of at least `size` entries: the next power of two. Reserves address space.
    pub(crate) fn new(size: usize) -> Self {
        let capacity = size.max(1).next_power_of_two();
        Self {
            ring: Vec::with_capacity(capacity),
            errs: Box::new(Slab::with_capacity(capacity)),
            head: 0,
            tail: 0,
            mask: capacity as u64 - 1,
            promised: 0,
            lead: Lead::default(),
            ready: 0,
        }
    }

    /// Enlarges the queue to at least `size` entries. Allocates and moves the entries.
    pub(crate) fn raise_capacity(&mut self, size: usize) {
        let capacity = size.next_power_of_two();
        if capacity <= self.capacity() {
            return;
        }
        let (used, reserved) = (self.tail - self.head, self.reserved() as u64);
        let mut ring = Vec::with_capacity(capacity);
        ring.extend((self.head..self.tail).map(|at| self.ring[(at & self.mask) as usize]));
        self.ring = ring;
        self.errs.raise_capacity(capacity);
        self.mask = capacity as u64 - 1;
        (self.head, self.tail, self.promised) = (0, used, used + reserved);
    }

    /// A queue with capacity 0: nothing can be reserved or pushed.
    pub(crate) fn none() -> Self {
        Self {
            ring: Vec::new(),
            errs: Box::new(Slab::with_capacity(0)),
            head: 1,
            tail: 1,
            mask: 0,
            promised: 2,
            lead: Lead::default(),
            ready: 0,
        }
    }

    /// Reserves one entry for a later push. False, and nothing reserved, if none is free: the
    /// operation must not start, and its caller gets [`Error::Again`].
    #[inline]
    pub(crate) fn reserve(&mut self) -> bool {
        let room = self.has_room();
        self.promised += u64::from(room);
        room
    }

    /// [`reserve`](Self::reserve) after [`has_room`](Self::has_room) returned true.
    #[inline(always)]
    pub(crate) fn reserve_free(&mut self) {
        self.promised += 1;
    }

    /// Returns one reservation: the operation will write no completion.
    ///
    /// # Panics
    /// If nothing is reserved.
    #[inline]
    pub(crate) fn unreserve(&mut self) {
        self.check_reserved();
        self.promised -= 1;
    }

    /// Reserves `n` entries at once.
    ///
    /// # Panics
    /// If fewer than `n` are free.
    pub(crate) fn reserve_many(&mut self, n: u32) {
        assert!(n as usize <= self.room(), "cq: {n} entries are not free");
        self.promised += u64::from(n);
    }

    /// Returns `n` reservations.
    ///
    /// # Panics
    /// If fewer than `n` are reserved.
    pub(crate) fn unreserve_many(&mut self, n: u32) {
        assert!(n as usize <= self.reserved(), "cq: {n} entries are not reserved");
        self.promised -= u64::from(n);
    }

    /// Appends a success in a reserved entry.
    ///
    /// # Panics
    /// If none is reserved: a completion would be lost.
    #[inline(always)]
    pub(crate) fn push(&mut self, cqe: Cqe) {
        self.check_reserved();
        self.append(cqe, CqErrIdx::NONE);
    }

    /// Appends a failure in a reserved entry.
    ///
    /// # Panics
    /// As [`push`](Self::push).
    pub(crate) fn push_err(&mut self, err: CqErr) {
        self.check_reserved();
        let idx = self.errs.alloc(err).expect("as many records as entries");
        self.append(Cqe::default(), idx);
    }

    /// Appends a success without a reservation. False, and nothing written, if every entry is used
    /// or reserved.
    #[inline]
    pub(crate) fn try_push(&mut self, cqe: Cqe) -> bool {
        let room = self.reserve();
        if room {
            self.append(cqe, CqErrIdx::NONE);
        }
        room
    }

    /// [`try_push`](Self::try_push) after [`has_room`](Self::has_room) returned true.
    #[inline(always)]
    pub(crate) fn push_free(&mut self, cqe: Cqe) {
        self.reserve_free();
        self.append(cqe, CqErrIdx::NONE);
    }

    /// [`push_free`](Self::push_free) for a completed send, whose `flags` are not empty. It becomes
    /// the [lead](Lead) if the queue is empty.
    #[inline(always)]
    pub(crate) fn push_sent_free(&mut self, op_context: u64, flags: CqFlags) {
        debug_assert!(!flags.is_empty());
        let lead = Lead { op_context, flags };
        if !self.is_empty() {
            return self.push_sent_behind(lead);
        }
        self.lead = lead;
        self.ready = 1;
    }

    /// Not inlined, so that a send that finds the queue empty uses no registers for the ring.
    #[inline(never)]
    fn push_sent_behind(&mut self, sent: Lead) {
        self.push_free(sent.cqe());
    }

    /// Whether there is a [`Lead`].
    #[inline(always)]
    pub(crate) fn has_lead(&self) -> bool {
        !self.lead.flags.is_empty()
    }

    /// Removes successes, at most `most` and up to the next failure, and returns their number. Each
    /// is lent to `put` in place.
    #[inline(always)]
    pub(crate) fn take(&mut self, most: usize, mut put: impl FnMut(&Cqe)) -> usize {
        let mut n = 0;
        if self.has_lead() && most > 0 {
            self.take_first_send(&mut put);
            n = 1;
        }
        while n < most {
            let Some(next) = self.next() else { break };
            if next.err != CqErrIdx::NONE {
                cold(());
                break;
            }
            put(&next.cqe);
            self.take_next();
            n += 1;
        }
        n
    }

    /// [`take`](Self::take) for one entry; returns whether one was read. With `lead_only` the ring
    /// is not read.
    #[inline(always)]
    pub(crate) fn take_one(&mut self, lead_only: bool, reader: impl Reader) -> bool {
        if self.has_lead() {
            self.take_first_send(|cqe| reader.take(cqe));
            return true;
        }
        match self.next() {
            Some(&Entry { ref cqe, err: CqErrIdx::NONE }) if !lead_only => reader.take(cqe),
            _ => return cold(false),
        }
        self.take_next();
        true
    }

    #[inline(always)]
    fn take_first_send(&mut self, put: impl FnOnce(&Cqe)) {
        put(&self.lead.cqe());
        self.lead.flags = CqFlags::empty();
        self.ready -= 1;
    }

    /// Removes the [`next`](Self::next) entry, which was read.
    #[inline(always)]
    fn take_next(&mut self) {
        self.head += 1;
        self.ready -= 1;
    }

    /// Whether there is nothing to read.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.ready == 0
    }

    /// The ring's next entry.
    #[inline(always)]
    fn next(&self) -> Option<&Entry> {
        if self.head == self.tail {
            return None;
        }
        self.ring.get((self.head & self.mask) as usize)
    }

    /// The reason why [`take`](Self::take) returned 0.
    ///
    /// # Errors
    /// - [`Error::Again`]: the queue is empty.
    /// - [`Error::Avail`]: a failure is next. Nothing was read; [`readerr`](Self::readerr) takes
    ///   it.
    pub(crate) fn empty_reason(&self) -> Result<usize> {
        match self.next() {
            // The caller's array was empty.
            _ if self.has_lead() => Ok(0),
            None => Err(Error::Again),
            Some(next) if next.err != CqErrIdx::NONE => Err(Error::Avail),
            Some(_) => Ok(0),
        }
    }

    /// Removes the failure that is next.
    ///
    /// # Errors
    /// [`Error::Again`] if the queue is empty or a success is next. Nothing was read.
    pub(crate) fn readerr(&mut self) -> Result<CqErr> {
        match self.next() {
            Some(&Entry { err, .. }) if err != CqErrIdx::NONE && !self.has_lead() => {
                self.take_next();
                Ok(self.errs.free(err))
            }
            _ => Err(Error::Again),
        }
    }

    /// Entries waiting to be read, successes and failures.
    pub(crate) fn ready(&self) -> usize {
        self.ready
    }

    /// Entries of the ring; the lead is not counted.
    pub(crate) fn capacity(&self) -> usize {
        self.mask as usize + 1
    }

    /// Entries reserved for operations in flight.
    pub(crate) fn reserved(&self) -> usize {
        (self.promised - self.tail) as usize
    }

    /// Entries neither used nor reserved.
    pub(crate) fn room(&self) -> usize {
        self.capacity() - (self.promised - self.head) as usize
    }

    /// Whether an entry is neither used nor reserved.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        self.promised - self.head <= self.mask
    }

    #[inline(always)]
    fn check_reserved(&self) {
        assert!(self.promised != self.tail, "cq: nothing is reserved");
    }

    #[inline(always)]
    fn append(&mut self, cqe: Cqe, err: CqErrIdx) {
        match self.ring.get_mut((self.tail & self.mask) as usize) {
            Some(place) => {
                place.cqe = cqe;
                place.err = err;
            }
            None => self.append_fresh(Entry { cqe, err }),
        }
        self.tail += 1;
        self.ready += 1;
    }

    /// Appends during the first round. Within the capacity of the vector, so it does not allocate.
    #[cold]
    #[inline(never)]
    fn append_fresh(&mut self, entry: Entry) {
        assert!(self.ring.len() < self.capacity(), "cq: ring grew past its capacity");
        self.ring.push(entry);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    use crate::types::ProvErrno;

    /// A reader that keeps the entry.
    struct Keep<'a>(&'a mut Option<Cqe>);

    impl Reader for Keep<'_> {
        fn reads(&self, _: CqIdx) -> bool {
            true
        }

        fn take(self, cqe: &Cqe) {
            *self.0 = Some(*cqe);
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Op {
        Reserve,
        Unreserve,
        ReserveMany(usize),
        UnreserveMany(usize),
        Push,
        PushErr,
        TryPush,
        PushSent,
        Read(usize),
        ReadOne,
        ReadErr,
        Raise(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            6 => Just(Op::Reserve),
            1 => Just(Op::Unreserve),
            1 => (0usize..6).prop_map(Op::ReserveMany),
            1 => (0usize..6).prop_map(Op::UnreserveMany),
            4 => Just(Op::Push),
            2 => Just(Op::PushErr),
            2 => Just(Op::TryPush),
            4 => Just(Op::PushSent),
            4 => Just(Op::ReadOne),
            4 => (0usize..6).prop_map(Op::Read),
            2 => Just(Op::ReadErr),
            1 => (1usize..80).prop_map(Op::Raise),
        ]
    }

    fn cqe(n: u64) -> Cqe {
        Cqe { op_context: n, len: n + 1, ..Cqe::default() }
    }

    fn sent(n: u64) -> Cqe {
        let (flags, src) = (CqFlags::SEND | CqFlags::MSG, FI_ADDR_UNSPEC);
        Cqe { op_context: n, flags, src, ..Cqe::default() }
    }

    fn failure(n: u64) -> CqErr {
        let (err, prov_errno) = (Error::Canceled, ProvErrno::None);
        CqErr { cqe: cqe(n), olen: n, err, prov_errno, err_data: None }
    }

    fn copied(cq: &mut Cq, out: &mut [Cqe]) -> usize {
        let mut to = out.iter_mut();
        cq.take(to.len(), |cqe| *to.next().unwrap() = *cqe)
    }

    fn read(cq: &mut Cq, most: usize) -> Result<Vec<Cqe>> {
        let mut out = vec![cqe(u64::MAX - 1); most];
        let got = match copied(cq, &mut out) {
            0 => cq.empty_reason(),
            n => Ok(n),
        };
        got.map(|n| out[..n].to_vec())
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Kind {
        Whole,
        Sent,
        Lead,
        Failed,
    }

    impl Kind {
        fn cqe(self, n: u64) -> Cqe {
            if matches!(self, Self::Sent | Self::Lead) { sent(n) } else { cqe(n) }
        }
    }

    /// The expected result of a read: the successes before the next failure.
    fn expected(model: &mut VecDeque<(u64, Kind)>, most: usize) -> Result<Vec<Cqe>> {
        match model.front() {
            None => return Err(Error::Again),
            Some((_, Kind::Failed)) => return Err(Error::Avail),
            Some(_) => {}
        }
        let mut out = Vec::new();
        while let Some(&(n, kind)) = model.front()
            && out.len() < most
            && kind != Kind::Failed
        {
            out.push(kind.cqe(n));
            model.pop_front();
        }
        Ok(out)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        /// The queue compared with a `VecDeque` of (number, kind): no entry is lost or out of
        /// order, used and reserved entries never exceed the capacity, and only growth allocates.
        #[test]
        fn queue_keeps_order_and_promises(
            size in 1usize..20,
            ops in prop::collection::vec(op(), 1..300),
        ) {
            let mut cq = Cq::new(size);
            let mut capacity = cq.capacity();
            prop_assert!(capacity >= size && capacity < 2 * size && capacity.is_power_of_two());
            let mut room = cq.ring.as_ptr();
            let mut model: VecDeque<(u64, Kind)> = VecDeque::new();
            let mut reserved = 0;
            for (n, op) in (0u64..).zip(ops) {
                let led = usize::from(matches!(model.front(), Some((_, Kind::Lead))));
                let free = capacity - (model.len() - led) - reserved;
                let has_room = free > 0;
                match op {
                    Op::Reserve => {
                        prop_assert_eq!(cq.reserve(), has_room);
                        reserved += usize::from(has_room);
                    }
                    Op::Unreserve if reserved > 0 => {
                        cq.unreserve();
                        reserved -= 1;
                    }
                    Op::ReserveMany(n) => {
                        prop_assert_eq!(cq.room(), free);
                        let n = n.min(cq.room());
                        cq.reserve_many(n as u32);
                        reserved += n;
                    }
                    Op::UnreserveMany(n) => {
                        let n = n.min(reserved);
                        cq.unreserve_many(n as u32);
                        reserved -= n;
                    }
                    Op::Push if reserved > 0 => {
                        cq.push(cqe(n));
                        reserved -= 1;
                        model.push_back((n, Kind::Whole));
                    }
                    Op::PushErr if reserved > 0 => {
                        cq.push_err(failure(n));
                        reserved -= 1;
                        model.push_back((n, Kind::Failed));
                    }
                    Op::TryPush => {
                        prop_assert_eq!(cq.try_push(cqe(n)), has_room);
                        model.extend(has_room.then_some((n, Kind::Whole)));
                    }
                    Op::PushSent => {
                        prop_assert_eq!(cq.has_room(), has_room);
                        if has_room {
                            cq.push_sent_free(n, sent(n).flags);
                            let kind = if model.is_empty() { Kind::Lead } else { Kind::Sent };
                            model.push_back((n, kind));
                        }
                    }
                    Op::Read(most) => {
                        prop_assert_eq!(read(&mut cq, most), expected(&mut model, most));
                    }
                    Op::ReadOne => {
                        let mut got = None;
                        let taken = cq.take_one(false, Keep(&mut got));
                        let want = expected(&mut model, 1).ok().map(|one| one[0]);
                        prop_assert_eq!((taken, got), (want.is_some(), want));
                    }
                    Op::ReadErr => {
                        let want = match model.front() {
                            Some(&(n, Kind::Failed)) => {
                                model.pop_front();
                                Ok(failure(n))
                            }
                            _ => Err(Error::Again),
                        };
                        prop_assert_eq!(cq.readerr(), want);
                    }
                    Op::Raise(size) => {
                        cq.raise_capacity(size);
                        capacity = capacity.max(size.next_power_of_two());
                        prop_assert_eq!(cq.capacity(), capacity);
                        room = cq.ring.as_ptr();
                    }
                    _ => {}
                }
                prop_assert_eq!((cq.ready(), cq.reserved()), (model.len(), reserved));
                prop_assert_eq!((cq.is_empty(), cq.empty_reason().err()), {
                    let failed = matches!(model.front(), Some((_, Kind::Failed)));
                    let why = if failed { Some(Error::Avail) } else { None };
                    (model.is_empty(), if model.is_empty() { Some(Error::Again) } else { why })
                });
            }
            prop_assert_eq!(cq.ring.as_ptr(), room, "it allocated after it was made");
        }
    }

    #[test]
    #[should_panic(expected = "nothing is reserved")]
    fn a_push_without_reservation_panics() {
        Cq::new(4).push(Cqe::default());
    }

    /// The lead's ring entry is free: no operation may use it without a reservation.
    #[test]
    #[should_panic(expected = "nothing is reserved")]
    fn a_push_without_reservation_panics_behind_a_lead_too() {
        let mut cq = Cq::new(4);
        cq.push_sent_free(1, sent(1).flags);
        cq.push(Cqe::default());
    }

    #[test]
    fn a_queue_without_an_entry_takes_and_gives_none() {
        let mut cq = Cq::none();
        assert!(cq.is_empty() && !cq.has_room() && !cq.reserve() && !cq.try_push(cqe(1)));
        assert_eq!((cq.room(), cq.take(8, |_| ()), cq.take_one(false, NoReader)), (0, 0, false));
        assert_eq!(cq.empty_reason(), Err(Error::Again));
    }

    #[test]
    fn an_entry_is_a_cache_line() {
        assert_eq!(size_of::<Entry>(), 64);
    }
}
