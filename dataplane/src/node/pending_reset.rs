//! Resets of sealed sessions that do not prove knowledge of the session: they prove the key only.
//! Where nodes have certificates every reset is of this kind, since any station can make its tag.
//!
//! Such an RST repeats fields of the packet that it answers, and a hostile sender chooses that
//! packet: a node answers packets of unknown sessions before it could verify a tag, and its answers
//! can be recorded and replayed against a later session. So the RST ends nothing while the peer
//! answers. The peer is probed, and the session ends if nothing authentic arrives within
//! [`REFUSED_NS`] or T_dead / 2, whichever is less.

use super::other_key::REFUSED_NS;
use super::peer::State;
use super::{Control, Openings};
use crate::idx::PeerIdx;
use crate::types::Instant;
use crate::wire::RstOp;

/// The first such reset of a session since an authentic frame of its peer arrived.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingReset {
    since: Instant,
    rst: RstOp,
}

impl Openings {
    /// Cancels the pending reset: an authentic frame of the open session with `p` has arrived.
    #[inline]
    pub(super) fn cancel_reset(&mut self, p: PeerIdx) {
        if !self.pending_resets.is_empty() {
            self.pending_resets.remove(&p);
        }
    }

    /// When the session with `p` ends if nothing authentic arrives before.
    #[inline]
    pub(super) fn reset_deadline(&self, p: PeerIdx, t_dead_ns: u64) -> Option<Instant> {
        let pause = REFUSED_NS.min(t_dead_ns / 2);
        self.pending_resets.get(&p).map(|pending| pending.since + pause)
    }
}

impl Control<'_> {
    /// Records a reset of the sealed session with `p`, and probes the peer if the session is open.
    pub(super) fn note_unproven_reset(&mut self, now: Instant, p: PeerIdx, rst: &RstOp) {
        self.openings.pending_resets.entry(p).or_insert(PendingReset { since: now, rst: *rst });
        if self.peers[p].state == State::Open {
            self.peers[p].request_ping();
            self.due.make_ready(self.peers, p);
        }
        self.arm_timer(now, p);
    }

    /// Takes the reset to apply, once its deadline has passed and nothing authentic has arrived.
    pub(super) fn take_due_reset(&mut self, p: PeerIdx) -> Option<RstOp> {
        let over = self.openings.reset_deadline(p, self.settings.t_dead_ns);
        let ends = self.turn.is_over(over);
        ends.then(|| self.openings.pending_resets.remove(&p).map(|pending| pending.rst)).flatten()
    }
}
