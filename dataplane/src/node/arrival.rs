//! Arrival of the next packet in order: whether a packet is the one that its session expects, and
//! what its head says: the peer is alive, it acknowledges and grants credit.

use super::peer::{ACK_EVERY_LOSSLESS, Peer};
use crate::idx::ReassemblyIdx;
use crate::plant::{Bug, is_planted, planted};
use crate::psn::Psn;
use crate::slab::NONE;
use crate::types::Instant;
use crate::wire::{BaseWords, FrameHead};

impl Peer {
    /// Whether the packet with these addresses, this session and this PSN is the next one in order
    /// of an open session.
    #[inline(always)]
    pub(super) fn is_next(&self, own: u64, head: &FrameHead, sid_psn: u64) -> bool {
        debug_assert!(!self.in_order || self.is_in_order() || is_planted());
        self.in_order && self.is_from(own, head) && sid_psn == self.next_sid_psn()
    }

    /// Packets acknowledged and credits granted by a packet, beyond those already known.
    #[inline(always)]
    fn acked_and_granted(&self, cack: Psn, grant: u16) -> (u32, u16) {
        (cack.0.wrapping_sub(self.snd.una.0), grant.wrapping_sub(self.snd.credit as u16))
    }

    /// [Packets and credits](Self::acked_and_granted), if nothing waits for them: no queue waits
    /// for window or credit and, on a lossless path, no record for its acknowledgement. `None` also
    /// for an impossible acknowledgement or grant.
    #[inline(always)]
    pub(super) fn unawaited<const LOSSY: bool>(&self, cack: Psn, grant: u16) -> Option<(u32, u16)> {
        let (acked, granted) = self.acked_and_granted(cack, grant);
        if acked != 0 || granted != 0 {
            let waited_for = self.has_queued() || !LOSSY && !self.snd.is_empty();
            if waited_for || acked > self.snd.in_flight() || granted >= 1 << 15 {
                return None;
            }
        }
        Some((acked, granted))
    }

    /// [`unawaited`](Self::unawaited), applied at once on a lossless path: both hold even if the
    /// slow path processes the message. On a lossy path the caller applies them once the checksum
    /// is verified.
    #[inline(always)]
    pub(super) fn note_unawaited<const LOSSY: bool>(
        &mut self,
        cack: Psn,
        grant: u16,
    ) -> Option<(u32, u16)> {
        let (acked, granted) = self.unawaited::<LOSSY>(cack, grant)?;
        if !LOSSY {
            self.snd.una = cack;
            self.snd.credit = self.snd.credit.wrapping_add(u32::from(granted));
        }
        Some((acked, granted))
    }

    /// Records that the next packet in order, whose [acknowledgement and grant](Self::unawaited)
    /// nothing waits for, was taken in the turn at `now`.
    #[inline(always)]
    pub(super) fn accept(&mut self, base: &BaseWords, now: Instant) {
        let (_, granted) = self.acked_and_granted(base.cack, base.grant());
        self.last_rx = now;
        self.probes = 0;
        self.snd.una = base.cack;
        self.snd.credit = self.snd.credit.wrapping_add(granted.into());
        self.rcv_nxt = self.rcv_nxt.next();
    }

    /// Packets in flight after the packet with `base`, if it is the [next one in
    /// order](Self::is_next) of a [steady](Self::is_steady) peer and grants no credit.
    #[inline(always)]
    pub(super) fn steady_flight(&self, own: u64, base: &BaseWords) -> Option<u32> {
        debug_assert!(!self.steady || self.is_steady() || is_planted());
        // Usually the packet acknowledges all of them: one compare.
        let flying = self.snd.nxt.0.wrapping_sub(base.cack.0);
        let steady = self.steady
            && self.is_from(own, &base.head)
            && base.sid_psn == self.next_sid_psn()
            && (flying == 0 || flying <= self.snd.in_flight())
            && base.grant() == self.snd.credit as u16;
        steady.then_some(flying)
    }

    /// [`steady_flight`](Self::steady_flight) for a peer that need not be steady, if nothing
    /// [waits](Self::unawaited) for the acknowledgement and the grant of the packet.
    #[cold]
    #[inline(never)]
    pub(super) fn flight(&mut self, own: u64, base: &BaseWords) -> Option<u32> {
        if !self.is_next(own, &base.head, base.sid_psn) || self.bad_seq != NONE {
            return None;
        }
        self.unawaited::<false>(base.cack, base.grant())?;
        self.steady = self.is_steady();
        Some(self.snd.nxt.0.wrapping_sub(base.cack.0))
    }

    /// Whether the next packet in order may take the fast path.
    #[inline]
    pub(crate) fn is_in_order(&self) -> bool {
        self.fast_path
            && self.refused == 0
            && self.reassembly == ReassemblyIdx::NONE
            && self.rcv.is_empty()
    }

    /// Recomputes the flags after a packet was taken on the slow path.
    #[inline]
    pub(crate) fn note_order(&mut self) {
        self.in_order = self.is_in_order() || self.in_order && planted(Bug::StaleInOrder);
        (self.rx_quota, self.steady) = (0, false);
    }

    /// Whether the session is in its steady state: the next packet in order may be taken as it is,
    /// no queue or record waits for what it acknowledges and grants, and no probe is unanswered.
    /// Queueing the peer, or keeping a record for its acknowledgement, clears
    /// [`steady`](Self::steady).
    #[inline(always)]
    pub(crate) fn is_steady(&self) -> bool {
        let (kept, probed) = (!self.snd.is_empty(), self.probes > 0);
        self.in_order && !self.has_queued() && !kept && !probed && self.bad_seq == NONE
    }

    /// How many messages of one credit could be received now before we owe the peer an
    /// acknowledgement (one for `ack_every` packets) or credits.
    pub(crate) fn rx_room(&self, ack_every: u8) -> u16 {
        if !self.in_order || self.probes > 0 {
            return 0;
        }
        let credits = self.outstanding().saturating_sub(self.low());
        let acks = (ack_every - 1).saturating_sub(self.owed);
        credits.min(acks.into()) as u16
    }

    /// Our session name and the next PSN in order, packed as in a packet: see
    /// [`EagerTaggedView::sid_psn`](crate::wire::EagerTaggedView::sid_psn) and
    /// [`BaseWords::sid_psn`](crate::wire::BaseWords::sid_psn).
    #[inline(always)]
    pub(crate) fn next_sid_psn(&self) -> u64 {
        u64::from(self.sid) | u64::from(self.rcv_nxt.0) << 32
    }

    /// Refills [`rx_quota`](Self::rx_quota) on a lossless path, since an acknowledgement may have
    /// been sent, and returns whether the quota is above 0.
    #[cold]
    #[inline(never)]
    pub(crate) fn refill_rx_quota(&mut self) -> bool {
        self.rx_quota = self.rx_room(ACK_EVERY_LOSSLESS);
        self.rx_quota > 0
    }
}
