//! The endpoints of a node, and their numbers.

use std::ops::{Deref, DerefMut};

use super::ep::Ep;
use super::route::Route;
use super::sep::Numbers;
use super::{CqTable, Cqs, EpId};
use crate::cq::Cq;
use crate::error::{Error, Result};
use crate::flags::CqFlags;
use crate::idx::{CntrIdx, CqIdx, EpIdx};
use crate::table::Table;

/// The endpoints of a node. A call that names a closed endpoint returns [`Error::BadFd`].
#[derive(Debug)]
pub struct Eps {
    table: Table<Ep, (), EpIdx>,
    /// The endpoint of each number, and numbers that scalable endpoints reserve.
    pub(super) numbers: Numbers,
}

impl Deref for Eps {
    type Target = Table<Ep, (), EpIdx>;

    #[inline(always)]
    fn deref(&self) -> &Self::Target {
        &self.table
    }
}

impl DerefMut for Eps {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.table
    }
}

impl Eps {
    pub(super) fn new() -> Self {
        Self { table: Table::with_vacant_zero(65536), numbers: Numbers::default() }
    }

    /// Frees entries of queue `cq` if it is full only because of entries reserved in advance:
    /// releases those reservations.
    #[inline]
    pub(super) fn make_room(&mut self, cqs: &mut Cqs, cq: CqIdx) {
        let CqTable { cq: queue, has_reserved, .. } = &mut cqs[cq];
        if *has_reserved && !queue.has_room() {
            *has_reserved = false;
            self.release_reserved(cqs, cq);
        }
    }

    /// Releases the entries that endpoints have reserved in queue `cq`.
    #[cold]
    #[inline(never)]
    pub(super) fn release_reserved(&mut self, cqs: &mut Cqs, cq: CqIdx) {
        for (_, ep) in self.iter_mut() {
            if ep.rx_cq == cq {
                ep.release_receives(cqs);
            }
            if ep.tx_cq == cq {
                ep.release_ops(cqs);
            }
        }
    }

    /// Frees a place for a send of endpoint `e` in its transmit queue and its completion queue, if
    /// these are full only because of reservations.
    #[inline]
    pub(super) fn make_send_room(&mut self, cqs: &mut Cqs, e: EpIdx) {
        let ep = &mut self[e];
        if ep.tx_used >= ep.tx_size {
            ep.release_ops(cqs);
        }
        let cq = ep.tx_cq;
        self.make_room(cqs, cq);
    }

    /// [`make_send_room`](Self::make_send_room) for a receive of endpoint `e`.
    #[inline]
    pub(super) fn make_recv_room(&mut self, cqs: &mut Cqs, e: EpIdx) {
        let ep = &mut self[e];
        if ep.rx_used >= ep.rx_size {
            ep.release_receives(cqs);
        }
        let cq = ep.rx_cq;
        self.make_room(cqs, cq);
    }

    /// The slot of the endpoint with this number, or [`Ep::UNUSED_SLOT`].
    #[inline(always)]
    pub(crate) fn slot(&self, number: u16) -> EpIdx {
        self.numbers.ep(number)
    }

    /// Lets every peer send to `ep`, even with [`NodeSettings::inserted`](super::NodeSettings): its
    /// user checks the sources itself.
    pub fn admit_all(&mut self, ep: EpId) -> Result<()> {
        self.by_handle_mut(ep.0).ok_or(Error::BadFd)?.admits_all = true;
        Ok(())
    }

    /// Makes every endpoint look up the route of its next message again.
    pub(super) fn forget_routes(&mut self) {
        self.iter_mut().for_each(|(_, ep)| ep.route = Route::NONE);
    }
}

/// The transmit queue of an endpoint and its completion queue, borrowed together.
pub(super) struct SendRoom<'a> {
    pub(super) ep: &'a mut Ep,
    cq: &'a mut Cq,
}

impl<'a> SendRoom<'a> {
    /// The queues of endpoint `e`.
    #[inline(always)]
    pub(super) fn of(eps: &'a mut Eps, cqs: &'a mut Cqs, e: EpIdx) -> Self {
        let ep = &mut eps[e];
        let cq = &mut cqs[ep.tx_cq].cq;
        Self { ep, cq }
    }

    /// Whether the transmit queue has a place and the completion queue an entry.
    #[inline(always)]
    pub(super) fn is_available(&self) -> bool {
        self.ep.tx_used < self.ep.tx_size && self.cq.has_room()
    }

    /// Takes a place and an entry. The caller has checked [`is_available`](Self::is_available).
    #[inline(always)]
    pub(super) fn take(&mut self) {
        self.ep.tx_used += 1;
        self.cq.reserve_free();
    }

    /// Returns the place and the entry.
    #[inline(always)]
    pub(super) fn give_back(&mut self) {
        self.ep.tx_used -= 1;
        self.cq.unreserve();
    }

    /// Completes a send that has no place, or has returned it, with success. If a completion is
    /// `wanted`, the queue has an entry for it. Returns the counter of the send.
    #[inline(always)]
    pub(super) fn complete(self, context: u64, flags: CqFlags, wanted: bool) -> CntrIdx {
        if wanted {
            self.cq.push_sent_free(context, flags);
        }
        self.ep.tx_cntr
    }
}
