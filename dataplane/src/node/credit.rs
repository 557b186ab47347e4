//! Credit for peers: each credit is a reserved block, so that every message that a peer may send
//! can be stored.

use std::collections::VecDeque;

use super::due::Due;
use super::peer::{GRANT_FIRST, GRANT_MAX, Peer, Peers, State};
use crate::idx::PeerIdx;
use crate::plant::{Bug, planted};
use crate::proto::blocks::BlockPool;

/// The memory of unexpected messages, in blocks, and how much of it was promised to peers.
#[derive(Debug)]
pub(crate) struct Blocks {
    /// Blocks neither in use nor promised to a peer.
    pub(super) unpromised: usize,
    /// Peers that wait for blocks to become free.
    pub(super) waiters: VecDeque<PeerIdx>,
    pub(super) pool: BlockPool,
    count: usize,
}

impl Blocks {
    pub(super) fn with_capacity(count: usize) -> Self {
        let (pool, waiters) = (BlockPool::with_capacity(count), VecDeque::new());
        Self { unpromised: count, waiters, pool, count }
    }

    /// Blocks that hold messages.
    pub(super) fn used(&self) -> usize {
        self.count - self.pool.free_count()
    }

    /// Number of blocks missing or in excess, if messages and peers hold `held`: not 0 only after a
    /// bug.
    pub(super) fn lost(&self, held: usize) -> usize {
        self.count.abs_diff(self.unpromised + held)
    }

    /// Takes the first credit of a session, as far as there is any. Until the session is confirmed
    /// the peer gets none that confirmed peers may need.
    pub(super) fn grant_initial(&mut self, is_confirmed: bool) -> u32 {
        let kept = if is_confirmed { 0 } else { self.count / 4 };
        let grant = GRANT_FIRST.min(self.unpromised.saturating_sub(kept) as u32);
        self.unpromised -= grant as usize;
        grant
    }

    /// Grants peer `p` credit up to its target, or as much of it as there is; a peer left without
    /// any waits for blocks. Returns whether the peer has more now.
    fn grant(&mut self, p: PeerIdx, peer: &mut Peer) -> bool {
        if self.unpromised > self.count / 2 {
            peer.target = (peer.target * 2).min(GRANT_MAX as u16);
        }
        let more = u32::from(peer.target).saturating_sub(peer.outstanding());
        if more == 0 {
            return false;
        }
        // One half of the blocks is for the first credits of sessions. Credit of a peer beyond
        // these comes from the other half, or a new session might never get any.
        let spare = self.unpromised.saturating_sub(self.count / 2);
        let first = GRANT_FIRST.saturating_sub(peer.outstanding()) as usize;
        let more = more.min(spare.max(first).min(self.unpromised) as u32);
        if more == 0 {
            self.queue_for_blocks(p, peer);
            return false;
        }
        peer.granted = peer.granted.wrapping_add(more);
        peer.rx_quota = 0;
        self.unpromised -= more as usize;
        peer.ack_now = true;
        true
    }

    /// Puts peer `p` into the queue for blocks.
    pub(super) fn queue_for_blocks(&mut self, p: PeerIdx, peer: &mut Peer) {
        if !std::mem::replace(&mut peer.wants_blocks, true) {
            self.waiters.push_back(p);
        }
    }

    /// Frees the blocks behind the credit of a message that went straight to its receive.
    #[inline]
    pub(super) fn give_back(&mut self, cost: u32) {
        if !planted(Bug::CreditNotReturned) {
            self.unpromised += cost as usize;
        }
    }

    /// Frees the blocks behind the credit of `peer`, whose session has ended.
    pub(super) fn revoke(&mut self, peer: &mut Peer) {
        self.unpromised += peer.outstanding() as usize;
        (peer.granted, peer.consumed) = (0, 0);
    }

    /// Grants credit to the peers that wait for free blocks, as far as there are any.
    pub(super) fn serve_waiters(&mut self, peers: &mut Peers, due: &mut Due) {
        for _ in 0..self.waiters.len() {
            if self.unpromised == 0 {
                return;
            }
            let Some(p) = self.waiters.pop_front() else { return };
            if let Some(peer) = peers.get_mut(p) {
                peer.wants_blocks = false;
                self.regrant_now(peers, due, p);
            }
        }
    }

    /// Peer `p` used credit for a message that was not stored: the credit counts as used, and its
    /// blocks are free again.
    pub(super) fn return_credit(
        &mut self,
        peers: &mut Peers,
        due: &mut Due,
        p: PeerIdx,
        cost: u32,
    ) {
        let peer = &mut peers[p];
        let cost = cost.min(peer.outstanding());
        peer.consumed = peer.consumed.wrapping_add(cost);
        self.give_back(cost);
        self.regrant(peers, due, p);
    }

    /// Releases the block that a completion from peer `p` held while it waited.
    pub(super) fn release_late_block(&mut self, peers: &mut Peers, due: &mut Due, p: PeerIdx) {
        peers[p].unexpected -= 1;
        self.unpromised += 1;
        self.regrant(peers, due, p);
    }

    /// Grants peer `p` more credit when it has used half of its target. The target doubles each
    /// time while half of all blocks are free.
    #[inline]
    pub(super) fn regrant(&mut self, peers: &mut Peers, due: &mut Due, p: PeerIdx) {
        let peer = &mut peers[p];
        if peer.outstanding() < peer.low() {
            self.regrant_now(peers, due, p);
        }
        if !self.waiters.is_empty() {
            self.serve_waiters(peers, due);
        }
    }

    /// [`regrant`](Self::regrant), however much of its credit the peer has left.
    pub(super) fn regrant_now(&mut self, peers: &mut Peers, due: &mut Due, p: PeerIdx) {
        let peer = &mut peers[p];
        if peer.state != State::Idle && self.grant(p, peer) {
            due.make_ready(peers, p);
        }
    }
}
