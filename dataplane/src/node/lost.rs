//! Reports of a lost session, besides the error completions of the operations that it ends.
//!
//! Messages that completed successfully may be lost with a session: messages sent without a record,
//! where no completion waits for delivery, and injected ones. No pending operation can report the
//! error, so the next post of each endpoint that may have sent such a message to the peer is
//! refused, once. Receives that name the peer may wait for a lost message, so they end too.

use super::ops::{TxWr, WrFlags};
use super::peer::State;
use super::srx::EndedRecv;
use super::{Control, EndReason, MsgKind, Objects, Operations};
use crate::error::{Error, Result};
use crate::idx::{EpIdx, PeerIdx};
use crate::types::NO_ENTRY;

/// An endpoint to which the loss of the session with a peer has not been reported yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LossReport {
    ep: EpIdx,
    peer: PeerIdx,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Losses {
    reports: Vec<LossReport>,
    /// Ended receives of shared contexts whose completions wait for room.
    pub(super) unended: Vec<EndedRecv>,
}

impl Losses {
    /// Whether a loss concerning peer `p` has yet to be reported to an endpoint: then no post to
    /// the peer may take the fast path.
    pub(super) fn has_report(&self, p: PeerIdx) -> bool {
        self.reports.iter().any(|report| report.peer == p)
    }

    /// Drops the reports to endpoint `e`, which is closed.
    pub(super) fn forget_ep(&mut self, e: EpIdx) {
        self.reports.retain(|report| report.ep != e);
    }

    /// Drops the reports about peer `p`: another incarnation is current, or its record is freed.
    pub(super) fn forget_peer(&mut self, p: PeerIdx) {
        self.reports.retain(|report| report.peer != p);
    }
}

impl Operations<'_> {
    /// The session with `p` ends for `reason`; none of its operations has ended yet. Records the
    /// endpoints that may have lost a message and have no operation that reports it.
    pub(super) fn note_losses(&mut self, p: PeerIdx, reason: EndReason) {
        let peer = &self.objects.peers[p];
        if peer.state != State::Open
            || !reason.is_loss()
            || peer.station() == self.objects.port.station
        {
            return;
        }
        let mut kept = 0;
        peer.snd.for_each(self.sent, |_| kept += 1);
        let lossless = peer.path.is_lossless();
        let concerned: Vec<EpIdx> = if lossless && peer.snd.in_flight() > kept {
            // A send without a record does not name its endpoint: any endpoint may be affected.
            let own = self.objects.eps.iter().filter(|(_, ep)| {
                ep.enabled && ep.sharers.is_none() && ep.deferred_for == EpIdx::NONE
            });
            own.map(|(e, _)| e)
                .filter(|&e| !self.objects.coll.is_side(self.objects.eps, e))
                .collect()
        } else {
            let lost = |flags: WrFlags| flags.intersects(WrFlags::INJECTED | WrFlags::REPORTED);
            let sends = self.tx.wrs.iter().filter(|(_, wr)| wr.peer == p && lost(wr.flags));
            sends
                .map(|(_, wr)| wr.ep)
                .filter(|&e| e != EpIdx::NONE && !self.objects.coll.is_side(self.objects.eps, e))
                .collect()
        };
        for ep in concerned {
            let reports = LossReport { ep, peer: p };
            if !self.objects.observed.losses.reports.contains(&reports) {
                self.objects.observed.losses.reports.push(reports);
                if lossless {
                    self.objects.cntrs.count_failed(self.objects.eps[ep].tx_cntr);
                }
            }
        }
    }

    /// Whether the receives that name `p` end with its session: because messages of the peer may be
    /// lost, or because no session opened and messages to the peer are lost without a completion,
    /// so that the program may wait for an answer.
    pub(super) fn ends_receives(&self, p: PeerIdx, reason: EndReason) -> bool {
        if self.objects.peers[p].state == State::Open {
            return reason.is_loss();
        }
        let is_untold = |wr: &TxWr| wr.context == NO_ENTRY || wr.flags.contains(WrFlags::REPORTED);
        let mut all = self.tx.wrs.iter();
        reason.is_refusal() && all.any(|(_, wr)| wr.peer == p && is_untold(wr))
    }
}

impl Objects<'_> {
    /// Ends the receives that name `p`. Receives from any source stay posted.
    pub(super) fn fail_receives_from(&mut self, p: PeerIdx, err: Error) {
        let eps: Vec<EpIdx> =
            self.eps.iter().map(|(e, _)| e).filter(|&e| !self.coll.is_side(self.eps, e)).collect();
        for e in eps {
            let is_shared = self.eps[e].sharers.is_some();
            for kind in [MsgKind::Msg, MsgKind::Tagged] {
                let k = kind as usize;
                let named = |node: &Self| {
                    node.eps[e].matcher[k]
                        .find_posted(&node.posted.pool, |receive| receive.names(p))
                };
                while let Some(recv) = named(self) {
                    if is_shared {
                        if !self.end_shared_in_time(e, kind, recv, err) {
                            break;
                        }
                        continue;
                    }
                    self.eps[e].matcher[k].unlink_posted(&mut self.posted.pool, recv);
                    self.fail_recv(recv, err);
                }
            }
        }
    }
}

impl Control<'_> {
    /// Refuses one post of endpoint `e` to peer `p` after a session was lost with messages of the
    /// endpoint.
    ///
    /// # Errors
    /// [`Error::ConnReset`]: nothing was posted.
    #[inline]
    pub(super) fn report_loss(&mut self, e: EpIdx, p: PeerIdx) -> Result<()> {
        if self.observed.losses.reports.is_empty() { Ok(()) } else { self.report_loss_to(e, p) }
    }

    #[cold]
    fn report_loss_to(&mut self, e: EpIdx, p: PeerIdx) -> Result<()> {
        let losses = &mut self.observed.losses;
        let reports = LossReport { ep: e, peer: p };
        let Some(at) = losses.reports.iter().position(|other| *other == reports) else {
            return Ok(());
        };
        losses.reports.swap_remove(at);
        if self.peers[p].state == State::Open && !self.observed.losses.has_report(p) {
            self.peers[p].fast_path = self.takes_fast_path(p);
            self.peers[p].note_order();
        }
        Err(Error::ConnReset)
    }
}
