//! Failures of sends and one-sided operations: an error entry or, for an operation posted with
//! [`NO_ENTRY`], a record for the log.

use barewire_driver::port::Station;

use super::{Objects, Observed};
use crate::error::Error;
use crate::idx::{CntrIdx, EpIdx, PeerIdx};
use crate::plant::{Bug, planted};
use crate::types::{CqErr, NO_ENTRY};

/// Distinct failures kept until they are read.
const KEPT_MAX: usize = 8;

/// Failed operations that wrote no completion entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedInject {
    /// The peer they were posted to.
    pub station: Station,
    /// The error.
    pub err: Error,
    /// Their number.
    pub count: u64,
}

/// Failures that have no completion entry.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    /// Failures not read yet.
    kept: [Option<FailedInject>; KEPT_MAX],
    /// The port had no memory for frames when a timer last fired.
    pub(super) lacks_memory: bool,
}

impl Failures {
    /// Counts a failure. Failures for which there is no place are counted in the last one.
    fn note(&mut self, station: Station, err: Error) {
        let [first @ .., last] = &mut self.kept;
        let same = |place: &&mut Option<FailedInject>| {
            place.as_ref().is_none_or(|it| (it.station, it.err) == (station, err))
        };
        let place = first.iter_mut().find(same).unwrap_or(last);
        place.get_or_insert(FailedInject { station, err, count: 0 }).count += 1;
    }
}

impl Observed {
    /// Whether [`failed_injects`](Self::failed_injects) would return any.
    #[inline(always)]
    pub fn has_failed_injects(&self) -> bool {
        self.failures.kept[0].is_some()
    }

    /// Takes the failures of operations posted with [`NO_ENTRY`], by peer and error. Failures
    /// without a place of their own are counted in the last one.
    #[cold]
    pub fn failed_injects(&mut self) -> impl Iterator<Item = FailedInject> + use<> {
        std::mem::take(&mut self.failures.kept).into_iter().flatten()
    }
}

impl Objects<'_> {
    /// Reports the failure of an operation of endpoint `e` for peer `p`, which counter `cntr`
    /// counts. The entry reserved in the endpoint's queue is used or given back.
    #[cold]
    pub(super) fn report_op_failure(
        &mut self,
        (e, p): (EpIdx, PeerIdx),
        mut failure: CqErr,
        cntr: CntrIdx,
    ) {
        // The cause is our own port, not the peer.
        if failure.err == Error::HostUnreach && self.observed.failures.lacks_memory {
            failure.err = Error::NoSpace;
        }
        let ep = &mut self.eps[e];
        ep.counters.errors += 1;
        let cq = &mut self.cqs[ep.tx_cq].cq;
        if failure.cqe.op_context != NO_ENTRY {
            cq.push_err(failure);
        } else {
            cq.unreserve();
            // Cancelled by the close of the endpoint: its caller knows.
            if failure.err != Error::Canceled {
                self.observed.failures.note(self.peers[p].station(), failure.err);
            }
        }
        if planted(Bug::CqReservationLeaked) {
            self.cqs[self.eps[e].tx_cq].cq.reserve();
        }
        self.cntrs.count_failed(cntr);
    }
}
