//! What a peer reports of our packets: acknowledgements, gaps, refusals. `acks.rs` has our reports
//! of its packets.

use barewire_driver::frame::RxFrame;
use barewire_driver::hint::cold;

use super::Node;
use super::ops::WrFlags;
use super::peer::State;
use crate::error::Error;
use crate::idx::{PeerIdx, PullIdx, SentIdx, TxIdx};
use crate::plant::{Bug, planted};
use crate::rel::congestion::{Acked, CongestionControl};
use crate::rel::psn::Psn;
use crate::rel::sent::{BodyRef, Sent};
use crate::slab::Handle;
use crate::types::{Instant, ProvErrno};
use crate::wire::{AckOp, NackReason, PullOp, Ty};

impl Node {
    /// Applies what the base of every packet says: the peer is alive, it acknowledges and grants
    /// credit. False if the packet acknowledges one that was never sent: then nothing of it is
    /// applied.
    #[inline(always)]
    pub(super) fn take_ack_and_credit(
        &mut self,
        now: Instant,
        p: PeerIdx,
        cack: Psn,
        grant: u16,
    ) -> bool {
        let active = self.turn.polled_at;
        let peer = &mut self.peers[p];
        let bad = cack != peer.snd.una && peer.snd.check(cack).is_err();
        if bad && !planted(Bug::AckOfUnsent) {
            self.counters.rx_bad_ack += 1;
            return false;
        }
        if peer.state != State::Open {
            // A packet that names our sid proves that our answer arrived.
            self.control().opened(now, p);
        }
        let peer = &mut self.peers[p];
        peer.last_rx = active;
        peer.probes = 0;
        let more = grant.wrapping_sub(peer.snd.credit as u16);
        // The credit in a reordered packet is an older one, whatever its lower 16 bits say.
        if more != 0 && more < 1 << 15 && cack.since(peer.snd.una) >= 0 {
            peer.snd.credit = peer.snd.credit.wrapping_add(u32::from(more));
            if !peer.send_q.is_empty() {
                if peer.is_stalled() {
                    peer.backoff = 0;
                }
                self.due.make_ready(&mut self.peers, p);
            }
        }
        true
    }

    /// Applies a cumulative acknowledgement: every packet before `cack` has arrived. Carried by a
    /// packet other than an ACK (`ack` is `None`), it is a round-trip sample. Otherwise returns the
    /// sample of ACK packet `ack`, if the packet that it was measured on is among those
    /// acknowledged.
    #[inline]
    pub(super) fn on_cack(
        &mut self,
        now: Instant,
        p: PeerIdx,
        cack: Psn,
        ack: Option<&AckOp>,
    ) -> Option<u64> {
        let peer = &mut self.peers[p];
        if !peer.snd.advance(cack) {
            return None;
        }
        peer.progress_at = now;
        // A tail probe is a retransmission as well.
        let probed = u8::from(std::mem::take(&mut peer.probed));
        let backoff = std::mem::take(&mut peer.backoff).saturating_add(probed);
        let carried = ack.is_none() && !peer.path.is_lossless();
        let (mut sent_at, mut count, mut sample) = (None, 0, None);
        while let Some(peer) = self.peers.get_mut(p)
            && let Some(acked) = peer.snd.pop_acked(&mut self.sent)
        {
            if let Some(ack) = ack
                && ack.newest == acked.psn
            {
                sample = self.sent[acked.idx].round_trip(now, ack);
            }
            if !acked.sacked {
                count += 1;
                if acked.rtx {
                    peer.rtt.on_resent_arrived();
                } else {
                    sent_at = Some(acked.at);
                }
            }
            if acked.of_request {
                self.sent.discard(acked.idx);
                self.on_packet_acked(acked.wr);
            } else {
                cold(());
                self.on_acked(acked.idx);
            }
        }
        if let Some(at) = sent_at
            && carried
        {
            self.on_round_trip(p, now, now.since(at), count);
        } else if backoff > 0 {
            self.peers[p].rtt.keep_backoff(backoff);
        }
        let peer = &self.peers[p];
        if peer.has_queued() || peer.snd.lost != 0 {
            self.due.make_ready(&mut self.peers, p);
        }
        sample
    }

    /// Entry `idx`, already unlinked, is acknowledged; its payload is not in the memory of a
    /// request. Completes the operation that it carried and frees the entry.
    #[inline(never)]
    fn on_acked(&mut self, idx: SentIdx) {
        let Sent { wr, body, .. } = self.sent[idx];
        self.sent.discard(idx);
        if let BodyRef::Pack { buf, .. } = body {
            self.packs.free.push(buf);
            let mut w = wr;
            while w != TxIdx::NONE {
                let next = self.tx[w].next_packed();
                self.on_packet_acked(w);
                w = next;
            }
        } else if wr != TxIdx::NONE {
            self.on_packet_acked(wr);
        } else if body != BodyRef::None {
            self.responder().region_read(body);
            self.responder().drop_body(body);
        }
    }

    /// One packet of request `w` has been acknowledged.
    #[inline(always)]
    fn on_packet_acked(&mut self, w: TxIdx) {
        let wr = &mut self.tx[w];
        wr.unacked -= 1;
        if wr.is_done() {
            self.finish_wr(w);
        }
    }

    /// Processes the ACK packet in `frame`, whose header is `op`.
    #[inline(always)]
    pub(super) fn on_ack_frame(
        &mut self,
        now: Instant,
        p: PeerIdx,
        cack: Psn,
        (op, frame): (&AckOp, &RxFrame<'_>),
    ) {
        if op.count > 0 {
            cold(());
            self.on_ack_with_sack(now, p, cack, (op, frame));
        } else {
            self.on_ack(now, p, cack, op, &[]);
        }
    }

    /// [`on_ack_frame`](Self::on_ack_frame) for an ACK with any number of SACK words. (A function
    /// of its own, so that the room for the words is cleared only when needed.)
    #[inline(never)]
    pub(super) fn on_ack_with_sack(
        &mut self,
        now: Instant,
        p: PeerIdx,
        cack: Psn,
        (op, frame): (&AckOp, &RxFrame<'_>),
    ) {
        let mut words = [0; AckOp::WORDS_MAX];
        self.on_ack(now, p, cack, op, op.sack(frame, &mut words));
    }

    /// Processes an ACK packet with the SACK words `sack`: round-trip sample, packets received out
    /// of order, packets lost.
    #[inline(always)]
    fn on_ack(&mut self, now: Instant, p: PeerIdx, cack: Psn, op: &AckOp, sack: &[u64]) {
        self.openings.note_answer(p);
        let peer = &mut self.peers[p];
        let (pipe, lossless) = (peer.snd.pipe(), peer.path.is_lossless());
        let mut round_trip = None;
        if cack != peer.snd.una {
            round_trip = self.on_cack(now, p, cack, Some(op));
        }
        if lossless {
            return;
        }
        if op.dups > 0 {
            let peer = &mut self.peers[p];
            peer.rtt.on_duplicates(peer.snd.non_speculative(op.dups));
        }
        if !sack.is_empty() {
            let snd = &self.peers[p].snd;
            round_trip = round_trip.or_else(|| snd.round_trip(&self.sent, now, op));
            // An older ACK may acknowledge a packet that was refused since.
            if cack == snd.una {
                self.on_sack(now, p, cack, sack);
            }
        }
        if let Some(rtt_ns) = round_trip {
            let arrived = pipe.saturating_sub(self.peers[p].snd.pipe());
            self.on_round_trip(p, now, rtt_ns, arrived);
        }
    }

    /// Applies the SACK words: packets after the missing `cack` have arrived.
    fn on_sack(&mut self, now: Instant, p: PeerIdx, cack: Psn, sack: &[u64]) {
        let peer = &mut self.peers[p];
        let news = peer.snd.on_sack(&mut self.sent, now, sack, cack, &mut peer.rtt);
        let Some(newest) = news.newest else { return };
        peer.progress_at = now;
        let again = peer.snd.detect(&mut self.sent, now, newest, &peer.rtt);
        peer.reorder_at = again.unwrap_or(Instant(0));
        peer.note_window();
        if planted(Bug::CompletionOnSack) {
            self.complete_sacked(p);
        }
        // Lost packets are retransmitted, and acknowledged ones make room in the window.
        self.due.make_ready(&mut self.peers, p);
        self.control().arm_timer(now, p);
    }

    /// Records a round-trip sample of `rtt_ns` from an acknowledgement of `count` packets.
    #[inline(always)]
    fn on_round_trip(&mut self, p: PeerIdx, now: Instant, rtt_ns: u64, count: u32) {
        let floor = self.port.rto_floor_ns;
        let peer = &mut self.peers[p];
        peer.rtt.sample(rtt_ns);
        self.observed.round_trips.note(rtt_ns);
        let ack = Acked { packets: count, under_way: peer.snd.pipe() + count };
        peer.snd.cwnd.on_ack(now, ack, &mut peer.rtt, floor);
        peer.note_window();
    }

    /// [`Bug::CompletionOnSack`]: completes packets on a SACK, which the peer may still drop.
    #[cold]
    fn complete_sacked(&mut self, p: PeerIdx) {
        let (mut done, snd) = (Vec::new(), &self.peers[p].snd);
        snd.for_each(&mut self.sent, |entry| {
            if entry.wr != TxIdx::NONE && !matches!(entry.body, BodyRef::Pack { .. }) {
                done.push((entry.psn, entry.wr));
            }
        });
        done.retain(|&(psn, _)| snd.is_sacked(&self.sent, psn));
        for (_, w) in done {
            if self.tx[w].flags.contains(WrFlags::ALL_SENT) && self.tx[w].unacked == 1 {
                self.operations().report_wr(w);
            }
        }
    }

    /// Processes a NACK: the operation of packet `psn` fails, and a NOP takes the packet's place.
    pub(super) fn on_nack(&mut self, now: Instant, p: PeerIdx, psn: Psn, reason: NackReason) {
        let peer = &mut self.peers[p];
        if psn != peer.snd.una || peer.snd.in_flight() == 0 {
            return;
        }
        let Some(idx) = peer.snd.by_psn(&self.sent, psn) else {
            // The packet has no record: its operation is of the fast path, or it has completed.
            (peer.nop_for, peer.has_nop_for) = (psn, true);
            self.operations().on_fast_nack(p, psn, reason);
            self.due.make_ready(&mut self.peers, p);
            return;
        };
        let entry = &self.sent[idx];
        let (ty, op, w, body) = (entry.ty, entry.op, entry.wr, entry.body);
        if !peer.snd.on_refused(&mut self.sent, idx) {
            return;
        }
        self.due.make_ready(&mut self.peers, p);
        let err = nack_error(reason);
        if ty == Ty::Pull {
            self.sent[idx].become_nop();
            let (idx, generation) = PullOp::puller(&op);
            let handle = Handle::from_parts(PullIdx::of(idx), generation);
            if self.pulls.records.by_handle(handle).is_some_and(|pull| pull.peer == p) {
                self.operations().fail_pull(handle.idx(), Error::Canceled);
            }
            return;
        }
        self.sent[idx].become_nop();
        if matches!(ty, Ty::Write | Ty::Read | Ty::Atomic) {
            self.operations().on_rma_nack(p, ty, &op, w, body, reason);
        } else if let BodyRef::Response { .. } | BodyRef::Mr { .. } = body {
            self.responder().drop_body(body);
        } else if let BodyRef::Pack { buf, .. } = body {
            self.packs.free.push(buf);
            let mut next = w;
            while next != TxIdx::NONE {
                let w = next;
                next = self.tx[w].next_packed();
                self.operations().fail_wr(w, err, ProvErrno::NoEndpoint);
            }
        } else if w != TxIdx::NONE {
            self.operations().abandon_wr(w);
            self.operations().fail_wr(w, err, ProvErrno::NoEndpoint);
        }
        self.control().arm_timer(now, p);
    }
}

/// The error of an operation whose packet was refused for `reason`.
pub(super) fn nack_error(reason: NackReason) -> Error {
    match reason {
        NackReason::NoEndpoint => Error::ConnRefused,
        NackReason::UnknownType => Error::NoProtoOpt,
        NackReason::Malformed | NackReason::Overdrawn => Error::ConnReset,
        NackReason::BadKey => Error::KeyRejected,
        NackReason::BadAccess => Error::Access,
        NackReason::BadAtomic => Error::OpNotSupp("the target has no such atomic operation"),
        NackReason::Misaligned => Error::Invalid("elements are not aligned at the target"),
        NackReason::NoMatch => Error::NoMsg,
    }
}
