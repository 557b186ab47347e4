//! The completion queues of a node.

use std::collections::VecDeque;

use super::ops::LateCompletion;
use super::{CqId, NodeSettings, Reader};
use crate::cq::Cq;
use crate::error::{Error, Result};
use crate::idx::CqIdx;
use crate::table::{Table, Vacant};
use crate::types::Cqe;

/// Maximum entries of a completion queue.
const ENTRIES_MAX: usize = 1 << 24;

/// Entries for completions without a posted operation of their own: messages in a multi-receive,
/// and remote CQ data.
const UNPOSTED: usize = 1024;

/// The completion queues of a node. A call that names a closed queue returns [`Error::BadFd`].
pub(super) type Cqs = Table<CqTable, (), CqIdx>;

/// A completion queue, and the node's state of it.
#[derive(Debug)]
#[repr(align(16))]
pub struct CqTable {
    pub(crate) cq: Cq,
    /// A message waits for room in the queue.
    pub(crate) cq_blocked: bool,
    /// Endpoints may hold reserved entries for operations that are not posted yet
    /// ([`reserve_receives`](super::ep::Ep::reserve_receives)).
    pub(crate) has_reserved: bool,
    /// The queue has room for every operation that its endpoints may have outstanding: see
    /// [`Cqs::open_to_fit`].
    pub(crate) fits: bool,
    pub(crate) rest: Box<CqCold>,
}

/// State that data calls do not need. It is allocated separately to keep a slot short.
#[derive(Debug, Default)]
pub(crate) struct CqCold {
    /// Completions with remote CQ data that wait for room, oldest first.
    pub(crate) late: VecDeque<LateCompletion>,
    /// Maximum outstanding sends and receives of the endpoints bound to the queue.
    bound: [u64; 2],
}

const _: () = assert!(Table::<CqTable>::SLOT_LEN == 128, "a shift finds a slot");

impl CqTable {
    pub(crate) fn new(cq: Cq) -> Self {
        let rest = Box::default();
        Self { cq, cq_blocked: false, has_reserved: false, fits: false, rest }
    }

    /// Binds the sends, the receives, or both, of an endpoint that may have `ops` of each
    /// outstanding. A queue that [fits](Cqs::open_to_fit) gets room for them, as far as the node
    /// has.
    pub(super) fn bind(&mut self, ops: [u32; 2], s: &NodeSettings) {
        for (bound, ops) in self.rest.bound.iter_mut().zip(ops) {
            *bound += u64::from(ops);
        }
        if self.fits {
            let [sends, receives] = self.rest.bound.map(|ops| ops as usize);
            let most = sends.min(s.tx_wr_max) + receives.min(s.rx_wr_max) + UNPOSTED;
            self.cq.raise_capacity(most.min(ENTRIES_MAX));
        }
    }

    /// Reverts [`bind`](Self::bind) with the same `ops`.
    pub(super) fn unbind(&mut self, ops: [u32; 2]) {
        for (bound, ops) in self.rest.bound.iter_mut().zip(ops) {
            *bound -= u64::from(ops);
        }
    }

    /// Whether an endpoint is bound to the queue.
    pub(super) fn is_bound(&self) -> bool {
        self.rest.bound != [0; 2]
    }

    /// [`Node::cq_take`](super::Node::cq_take); also returns whether something waits for room in
    /// the queue.
    #[inline(always)]
    pub(super) fn take(&mut self, most: usize, put: impl FnMut(&Cqe)) -> Option<(usize, bool)> {
        if self.cq.is_empty() {
            return None;
        }
        let n = self.cq.take(most, put);
        Some((n, n > 0 && self.cq_blocked))
    }

    /// See [`Cqs::take_one`].
    #[inline(always)]
    fn take_one(&mut self, reader: impl Reader) -> Option<bool> {
        if self.cq.is_empty() {
            return None;
        }
        // The [lead](crate::cq) occupies no entry: reading it frees no room.
        Some(self.cq.take_one(self.cq_blocked, reader))
    }
}

impl Vacant for CqTable {
    fn vacant() -> Self {
        Self::new(Cq::none())
    }
}

impl Cqs {
    /// Creates a completion queue that holds at least `size` entries.
    ///
    /// # Errors
    /// [`Error::Invalid`]: `size` is 0 or above 2^24. [`Error::NoMem`]: too many queues.
    pub fn open(&mut self, size: usize) -> Result<CqId> {
        if !(1..=ENTRIES_MAX).contains(&size) {
            return Err(Error::Invalid("a completion queue has 1 to 2^24 entries"));
        }
        let idx = self.alloc(CqTable::new(Cq::new(size))).ok_or(Error::NoMem)?;
        Ok(CqId(self.handle(idx)))
    }

    /// As [`open`](Self::open), but binding the queue makes room for everything that its endpoints
    /// may have outstanding at once. So a post finds the queue full only while it holds unread
    /// completions: reading it makes room.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_to_fit(&mut self, least: usize) -> Result<CqId> {
        let cq = self.open(least)?;
        self[cq.0.idx()].fits = true;
        Ok(cq)
    }

    /// Passes the next completion to `reader`, if it is a success and nothing waits for room in the
    /// queue. `None`, and nothing has changed, if the queue is empty; false if the caller has to
    /// use [`cq_take`](super::Node::cq_take). The generation is NOT checked, as in `cq_take`.
    #[inline(always)]
    pub fn take_one(&mut self, cq: CqId, reader: impl Reader) -> Option<bool> {
        self.at_mut(cq.0.idx()).map_or(Some(false), |table| table.take_one(reader))
    }

    /// The reason for which [`cq_take`](super::Node::cq_take) has taken nothing.
    ///
    /// # Errors
    /// As [`cq_read`](super::Node::cq_read); 0 if no room was given.
    pub fn empty_reason(&self, cq: CqId) -> Result<usize> {
        self.by_handle(cq.0).ok_or(Error::BadFd)?.cq.empty_reason()
    }

    /// Whether the queue is empty. The generation is NOT checked, as in
    /// [`cq_take`](super::Node::cq_take).
    #[inline(always)]
    pub fn is_empty(&mut self, cq: CqId) -> bool {
        self.at_mut(cq.0.idx()).is_some_and(|table| table.cq.is_empty())
    }

    /// Number of entries waiting, errors included.
    #[inline]
    pub fn ready(&self, cq: CqId) -> Result<usize> {
        Ok(self.by_handle(cq.0).ok_or(Error::BadFd)?.cq.ready())
    }
}
