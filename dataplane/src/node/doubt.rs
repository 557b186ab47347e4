//! Resets of sealed sessions by somebody who has the key but does not know the session; where nodes
//! have certificates, of whom nothing is known, all resets.
//!
//! Such an RST says only what was in the packet that it answers, and who can send frames chooses
//! that: a node answers packets of sessions that it does not have before it could check a tag, and
//! its answers can be kept for a session to come. So the RST ends nothing while the peer answers.
//! The peer is asked, and [`REFUSED_NS`] later, or half of T_dead if that is less, the session ends
//! if nothing authentic has come.

use super::Node;
use super::other_key::REFUSED_NS;
use super::peer::State;
use crate::idx::PeerIdx;
use crate::types::Instant;
use crate::wire::RstOp;

/// The first such reset of a session since its peer was heard.
#[derive(Clone, Copy, Debug)]
pub(super) struct Doubt {
    since: Instant,
    rst: RstOp,
}

impl Node {
    /// Notes a reset of the sealed session with `p`, and asks the peer if it is open.
    pub(super) fn doubt(&mut self, now: Instant, p: PeerIdx, rst: &RstOp) {
        self.openings.doubts.entry(p).or_insert(Doubt { since: now, rst: *rst });
        if self.peers[p].state == State::Open {
            self.peers[p].ask();
            self.make_ready(p);
        }
        self.arm_timer(now, p);
    }

    /// An authentic frame of the open session with `p` has come.
    #[inline]
    pub(super) fn trust(&mut self, p: PeerIdx) {
        if !self.openings.doubts.is_empty() {
            self.openings.doubts.remove(&p);
        }
    }

    /// When the session with `p` ends if nothing comes before.
    #[inline]
    pub(super) fn doubt_over(&self, p: PeerIdx) -> Option<Instant> {
        let pause = REFUSED_NS.min(self.settings.t_dead_ns / 2);
        self.openings.doubts.get(&p).map(|doubt| doubt.since + pause)
    }

    /// The reset that has been right, as nothing has come.
    pub(super) fn proven_reset(&mut self, p: PeerIdx) -> Option<RstOp> {
        let over = self.doubt_over(p).is_some_and(|at| self.polled_at >= at && !self.backlog);
        over.then(|| self.openings.doubts.remove(&p).map(|doubt| doubt.rst)).flatten()
    }
}
