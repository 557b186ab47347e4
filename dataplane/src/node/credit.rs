//! Credit for peers: each is a reserved block, so that what a peer may send can be stored.

use super::Node;
use super::peer::{GRANT_FIRST, GRANT_MAX, State};
use crate::idx::PeerIdx;
use crate::plant::{Bug, planted};
use crate::types::Instant;

impl Node {
    /// Grants credits to the peers that wait for free blocks, as far as there are any.
    pub(super) fn serve_block_waiters(&mut self, now: Instant) {
        for _ in 0..self.block_waiters.len() {
            if self.blocks_unpromised == 0 {
                return;
            }
            let Some(p) = self.block_waiters.pop_front() else { return };
            if self.peers.get(p).is_some() {
                self.peers[p].wants_blocks = false;
                self.regrant_now(now, p);
            }
        }
    }

    /// The peer used credit for a message that was not stored: the credit counts as used, and its
    /// blocks are free again.
    pub(crate) fn return_credit(&mut self, now: Instant, p: PeerIdx, cost: u32) {
        let peer = &mut self.peers[p];
        let cost = cost.min(peer.outstanding());
        peer.consumed = peer.consumed.wrapping_add(cost);
        self.release_units(p, cost);
        self.regrant(now, p);
    }

    /// The blocks behind the credit of a message that went straight to its receive are free again.
    #[inline]
    pub(super) fn release_units(&mut self, _p: PeerIdx, cost: u32) {
        if !planted(Bug::CreditNotReturned) {
            self.blocks_unpromised += cost as usize;
        }
    }

    /// Grants the peer more credit when it has used half of its target. The target doubles each
    /// time while half of all blocks are free.
    #[inline]
    pub(crate) fn regrant(&mut self, now: Instant, p: PeerIdx) {
        let peer = &mut self.peers[p];
        let outstanding = peer.outstanding();
        if outstanding < peer.low() {
            self.regrant_now(now, p);
        }
        if !self.block_waiters.is_empty() {
            self.serve_block_waiters(now);
        }
    }

    pub(super) fn regrant_now(&mut self, _now: Instant, p: PeerIdx) {
        let blocks = self.settings.unexpected_bytes / crate::proto::blocks::UNIT;
        let peer = &mut self.peers[p];
        if peer.state == State::Idle {
            return;
        }
        if self.blocks_unpromised > blocks / 2 {
            peer.target = (peer.target * 2).min(GRANT_MAX as u16);
        }
        let more = u32::from(peer.target).saturating_sub(peer.outstanding());
        if more == 0 {
            return;
        }
        // One half of the blocks is for the first credits of sessions. What a peer holds
        // beyond these comes from the other half, or a new session might never get any.
        let spare = self.blocks_unpromised.saturating_sub(blocks / 2);
        let first = GRANT_FIRST.saturating_sub(peer.outstanding()) as usize;
        let more = more.min(spare.max(first).min(self.blocks_unpromised) as u32);
        if more == 0 {
            if !peer.wants_blocks {
                peer.wants_blocks = true;
                self.block_waiters.push_back(p);
            }
            return;
        }
        peer.granted = peer.granted.wrapping_add(more);
        peer.rx_quota = 0;
        self.blocks_unpromised -= more as usize;
        peer.ack_now = true;
        self.make_ready(p);
    }
}
