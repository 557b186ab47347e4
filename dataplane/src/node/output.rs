//! The transmit side: the order of peers and packets, and the encoding of packets.
//!
//! A peer that has packets to send is in the queue of ready peers and is served once per transmit,
//! oldest first. The order for each peer: control packets that are due (OPEN, NACK, PING),
//! retransmissions, PULL and END, then messages and pulled data in turns, and last an
//! acknowledgement if no packet carried it.

use barewire_driver::frame::{Body, TxFrame};
use barewire_driver::port::Tx;

use super::ops::{TxWr, WrFlags};
use super::packet::{Packet, Step};
use super::peer::{Peer, State};
use super::segments::Segments;
use super::tx::TxWrs;
use super::{DynSink, FrameSink, Node, Operations, Sending, Todo, Transmitter};
use crate::idx::{EpIdx, PeerIdx, PullIdx, ResponseIdx, TxIdx};
use crate::plant::{Bug, planted};
use crate::proto::blocks::units;
use crate::rel::sent::{BodyRef, RELIABLE_OP_MAX, Sent, SentPool};
use crate::slab::NONE;
use crate::types::Instant;
use crate::wire::{
    self, BASE_LEN, DataOp, EndOp, HEAD_MAX, MsgMOp, MsgOp, NackOp, NackReason, NopOp, PackOp,
    PullOp, ReadOp, RndvOp, TRAILER_LEN, Ty, record_len,
};

/// Frames that one peer may send before the next peer is served.
const TURN: usize = 88;

/// Pause before a full port is tried again, nanoseconds.
const FULL_RETRY_NS: u64 = 2_000;

/// Longest message that may be packed with others, bytes.
pub(super) const PACK_MSG_MAX: u64 = 512;

impl TxWr {
    /// Whether `next` may follow this message in one PACK. The messages of a packet are accepted or
    /// refused together, so they have one kind and one destination endpoint.
    fn packs_with(&self, next: &Self) -> bool {
        let (a, b) = (self, next);
        let alone = WrFlags::FENCE | WrFlags::MATCH | WrFlags::RMA | WrFlags::GROUP;
        (a.dst_ep, a.rx_ctx) == (b.dst_ep, b.rx_ctx)
            && !(a.flags ^ b.flags).contains(WrFlags::TAGGED)
            && !b.flags.intersects(alone)
    }
}

impl TxWrs {
    /// Whether the message after `w` may be packed with it.
    fn packs_next(&self, w: TxIdx) -> bool {
        let (wr, next) = (&self[w], self[w].queue.next);
        next != TxIdx::NONE && self[next].len <= PACK_MSG_MAX && wr.packs_with(&self[next])
    }
}

impl Peer {
    /// Charges `cost` credits for the packet sent last, and notes them in its record if that was
    /// kept.
    #[inline]
    pub(super) fn charge_last(&mut self, sent: &mut SentPool, cost: u32, kept: bool) {
        self.credit_used = self.credit_used.wrapping_add(cost);
        self.has_requested_credit = false;
        if let Some(idx) = self.snd.last(sent).filter(|_| kept) {
            sent[idx].units = cost;
        }
    }
}

impl Node {
    /// Sends everything that is due and returns the number of frames sent. When the port has no
    /// room for a frame of one peer, the next peer is served.
    ///
    /// Call it after posting, after each burst of received frames, and at
    /// [`next_deadline`](Self::next_deadline).
    pub fn transmit(&mut self, now: Instant, out: &mut dyn FrameSink) -> usize {
        self.turn.tick(now);
        if self.passes(now) { 0 } else { self.transmit_due(now, out) }
    }

    /// [`transmit`](Self::transmit) for a turn in which [`passes`](Self::passes) was false.
    pub(crate) fn transmit_due(&mut self, now: Instant, out: &mut dyn FrameSink) -> usize {
        if self.openings.seals.is_some() {
            if self.openings.key_check_is_due(now) {
                self.control().rotate_old_keys(now);
            }
            return self.through_seals(out, |node, out| node.transmit_all(now, out));
        }
        self.transmit_all(now, out)
    }

    fn transmit_all(&mut self, now: Instant, out: &mut dyn FrameSink) -> usize {
        self.turn.tick(now);
        let before = self.counters.tx_frames;
        if self.has_answers() {
            self.send_answers(now, &mut DynSink(out));
        }
        let owes_acks = self.owes_acks(now);
        self.acks.note_frames(self.counters.rx_frames);
        self.port.blocked = false;
        while let Some(p) = self.wheel.expire(now) {
            self.observed.failures.lacks_memory = out.lacks_memory();
            self.on_timer(now, p, out);
        }
        if self.due.todo.contains(Todo::HELD) && self.packs.hold_is_over(now) {
            self.packs.release_held(&self.tx, &mut self.peers, &mut self.due);
        }
        if self.coll.wants(now, &self.cqs) {
            self.coll_progress(now, out);
        }
        if owes_acks {
            self.send_acks(now, &mut DynSink(out));
        }
        self.probe_tails(now);
        if let Some(cq) = self.objects().starved_with_room() {
            self.receiving().retry_cq_waiters(cq);
        }
        for _ in 0..self.due.ready.len() {
            let Some(p) = self.due.ready.pop_front() else { break };
            let Some(peer) = self.peers.get_mut(p) else { continue };
            peer.queued = false;
            self.serve(now, p, out);
        }
        while let Some(reply) = self.replies.queue.front() {
            if out.send(&TxFrame::whole(&reply.bytes[..reply.len])) == Tx::Full {
                self.port.blocked = true;
                break;
            }
            self.replies.queue.pop_front();
            self.counters.tx_frames += 1;
        }
        let groups_done = !self.groups.has_queued() || self.multicast().send_queued(out);
        if !self.self_loop.queue.is_empty() {
            self.drain_loop(now);
        }
        let sent = self.due.ready.is_empty() && self.replies.queue.is_empty() && groups_done;
        let all = sent && self.self_loop.queue.is_empty();
        self.turn.backlog = false;
        self.due.todo.set(Todo::SEND, !all || self.port.gone);
        (self.counters.tx_frames - before) as usize
    }

    /// When [`transmit`](Self::transmit) must be called again even if nothing arrives and nothing
    /// is posted; `None` if no timer runs.
    pub fn next_deadline(&self) -> Option<Instant> {
        let wheel = self.wheel.next_deadline();
        let mut due = wheel.unwrap_or(Instant(u64::MAX));
        if let Some(at) = self.coll.next_deadline(self.turn.polled_at, &self.cqs) {
            due = due.min(at);
        }
        if let Some(at) = self.acks.due(self.turn.polled_at) {
            due = due.min(at);
        }
        if let Some(at) = self.packs.hold_due() {
            due = due.min(at);
        }
        if self.port.blocked {
            due = due.min(self.turn.polled_at + FULL_RETRY_NS);
        } else if !self.due.ready.is_empty() || !self.self_loop.queue.is_empty() {
            due = due.min(self.turn.polled_at);
        }
        (due != Instant(u64::MAX)).then_some(due)
    }

    /// Serves one peer.
    fn serve(&mut self, now: Instant, p: PeerIdx, out: &mut dyn FrameSink) {
        match self.peers[p].state {
            State::Idle => return,
            State::Opening | State::Answered => return self.sessions().serve_open(p, out),
            State::Open if planted(Bug::StaleTxQuota) => {}
            State::Open => self.peers[p].tx_quota = 0,
        }
        // A NACK may get lost, and a packet that was selectively acknowledged is not retransmitted,
        // so the NACK is repeated. Only in every other turn: a port with room for one frame would
        // otherwise send nothing else.
        let peer = &self.peers[p];
        let refuses_again = peer.refused != 0 && peer.ack_now && !peer.nack.want;
        let done = self.sending().serve_owed(now, p, out)
            && (!self.peers[p].searches || self.control().serve_search(now, p, out))
            && (self.peers[p].snd.lost == 0 || self.sending().serve_lost(now, p, out))
            && (!self.peers[p].has_queued() || self.transmitter().serve_requests(now, p, out));
        if self.peers[p].ack_now {
            self.send_ack(now, p, &mut DynSink(out));
        }
        if !done || self.peers[p].ack_now {
            self.due.make_ready(&mut self.peers, p);
        }
        if refuses_again {
            self.peers[p].nack.want = true;
            self.due.make_ready(&mut self.peers, p);
        }
        self.control().arm_timer(now, p);
    }
}

impl Sending<'_> {
    /// Sends NACK, NOP and PING as far as they are due. False if the port is full.
    fn serve_owed(&mut self, now: Instant, p: PeerIdx, out: &mut dyn FrameSink) -> bool {
        let peer = &mut self.peers[p];
        if peer.nack.is_due(now) {
            peer.nack.want = false;
            let psn = peer.rcv_nxt;
            let reason = NackReason::try_from(u16::from(peer.refused));
            if let Ok(reason) = reason {
                let mut op = [0; 8];
                NackOp { reason }.emit(&mut op);
                let packet = Packet::control(Ty::Nack, psn, &op);
                if self.emit(p, &packet, out) != Tx::Sent {
                    self.peers[p].nack.want = true;
                    return false;
                }
            }
        }
        if self.peers[p].has_nop_for {
            let psn = self.peers[p].nop_for;
            if self.emit(p, &Packet::control(Ty::Nop, psn, &[0; NopOp::LEN]), out) != Tx::Sent {
                return false;
            }
            self.peers[p].has_nop_for = false;
        }
        if self.peers[p].want_nop && self.peers[p].snd.open() && self.port.can_keep(self.sent) {
            let psn = self.peers[p].snd.nxt;
            let mut op = [0; NopOp::LEN];
            NopOp { cuts: true, ..NopOp::default() }.emit(&mut op);
            let packet = Packet::control(Ty::Nop, psn, &op);
            if !self.send_numbered(now, p, packet, true, out) {
                return false;
            }
            self.peers[p].want_nop = false;
        }
        while self.peers[p].pings > 0 {
            let psn = self.peers[p].snd.nxt;
            let packet = Packet { ar: true, ..Packet::control(Ty::Ping, psn, &[]) };
            if self.emit(p, &packet, out) != Tx::Sent {
                return false;
            }
            self.peers[p].pings -= 1;
        }
        true
    }
}

impl Transmitter<'_> {
    /// Sends PULL and END, then messages, pulled data and responses. False if more is queued and
    /// the window is open.
    fn serve_requests(&mut self, now: Instant, p: PeerIdx, out: &mut dyn FrameSink) -> bool {
        self.serve_pulls(now, p, out) && self.serve_messages(now, p, out)
    }

    /// Sends PULL and END. False if the port is full or the window is closed.
    pub(super) fn serve_pulls(
        &mut self,
        now: Instant,
        p: PeerIdx,
        out: &mut dyn FrameSink,
    ) -> bool {
        while self.peers[p].rndv_ctl_q.head != PullIdx::NONE {
            let idx = self.peers[p].rndv_ctl_q.head;
            if !self.peers[p].snd.open() {
                return true;
            }
            if !self.port.can_keep(self.sent) {
                return false;
            }
            let pull = &self.pulls[idx];
            let mut op = [0; ReadOp::LEN];
            let (read, wr) = (pull.read, pull.wr);
            let (ty, op_len, len) = if read {
                let len = pull.requesting;
                (Ty::Read, self.tx.emit_read(self.pulls, idx, &mut op), len)
            } else if let Some(status) = pull.end {
                let end = EndOp { src_op: pull.src_op, src_gen: pull.src_gen, status };
                (Ty::End, end.emit(&mut op), 0)
            } else {
                let (offset, len) = (pull.requested, pull.requesting);
                let (dst_op, dst_gen) = (idx.get(), self.pulls.records.generation(idx));
                let (src_op, src_gen) = (pull.src_op, pull.src_gen);
                let ask = PullOp { src_op, src_gen, dst_op, dst_gen, offset, len };
                (Ty::Pull, ask.emit(&mut op), len)
            };
            let psn = self.peers[p].snd.nxt;
            let packet = Packet {
                ty,
                psn,
                op: &op[..op_len],
                body: BodyRef::None,
                wr,
                ar: self.peers[p].path.is_lossless() && !read,
                ends: false,
                rtx: false,
            };
            if !self.sending().send_numbered(now, p, packet, true, out) {
                return false;
            }
            if ty == Ty::End {
                self.pulls.free(self.peers, idx);
                continue;
            }
            self.pulls.dequeue(&mut self.peers[p], idx);
            let pull = &mut self.pulls[idx];
            pull.requested += u64::from(len);
            (pull.requesting, pull.psn) = (0, psn);
            if read {
                self.tx.rma_mut(wr).done += u64::from(len);
            }
        }
        true
    }

    /// Sends messages, pulled data and responses in turns. False if more is queued and the window
    /// is open.
    fn serve_messages(&mut self, now: Instant, p: PeerIdx, out: &mut dyn FrameSink) -> bool {
        let begun = self.peers[p].snd.nxt;
        for _ in 0..TURN {
            let peer = &self.peers[p];
            let (message, data, response) =
                (peer.send_q.head, peer.rndv_data_q.head, peer.resp_q.head);
            if message == TxIdx::NONE && data == TxIdx::NONE && response == ResponseIdx::NONE
                || !peer.snd.open()
            {
                return true;
            }
            let left = TURN as i32 - peer.snd.nxt.since(begun);
            if left <= 0 {
                return false;
            }
            // If only one queue has packets, it sends several at once.
            let alone = [message.get(), data.get(), response.get()]
                .into_iter()
                .filter(|&head| head != NONE)
                .count()
                == 1;
            let most = if alone { left as usize } else { 1 };
            if response != ResponseIdx::NONE {
                if let Step::Full = self.send_response(now, p, response, out) {
                    return false;
                }
                if !self.peers[p].snd.open() {
                    return true;
                }
            }
            if data != TxIdx::NONE {
                match self.send_data(now, (p, data), most, out) {
                    Step::Sent => {}
                    Step::Wait => return true,
                    Step::Full => return false,
                }
            }
            if message != TxIdx::NONE && self.peers[p].snd.open() {
                match self.send_message(now, (p, message), most, out) {
                    Step::Sent => {}
                    Step::Wait if data == TxIdx::NONE && response == ResponseIdx::NONE => {
                        return true;
                    }
                    Step::Wait => {}
                    Step::Full => return false,
                }
            }
        }
        false
    }

    /// Sends the next packet of the message at the head of the queue, or up to `most` of its
    /// segments.
    fn send_message(
        &mut self,
        now: Instant,
        (p, w): (PeerIdx, TxIdx),
        most: usize,
        out: &mut dyn FrameSink,
    ) -> Step {
        let wr = &self.tx[w];
        let peer = &self.peers[p];
        // Operations of the fast path are in no list.
        let behind = peer.wrs.head != w || peer.fast_ops() > 0;
        if wr.flags.contains(WrFlags::FENCE) && behind {
            return Step::Wait;
        }
        if wr.flags.contains(WrFlags::RMA) {
            return self.send_rma(now, p, w, out);
        }
        if wr.flags.contains(WrFlags::GROUP) {
            return self.send_group(now, p, w, out);
        }
        if wr.sent > 0 {
            return self.send_eager_segments(now, (p, w), most, out);
        }
        let cost = units(wr.len);
        let credits = self.peers[p].credits();
        let imm = if wr.flags.contains(WrFlags::IMM) { wire::IMM_LEN } else { 0 };
        let whole = self.peers[p].payload_max(MsgOp::LEN + imm);
        let small = wr.len <= whole as u64;
        let pull = wr.flags.contains(WrFlags::MATCH)
            || wr.len > self.eager_max[usize::from(!small)] as u64;
        if credits == 0 {
            return Step::Wait;
        }
        let short = cost > credits;
        if !pull && short && !self.peers[p].credit_is_short() {
            self.sending().request_credit(now, p, out)
        } else if pull || short {
            self.sending().send_announcement(now, p, w, out)
        } else if !small {
            self.send_eager_segments(now, (p, w), most, out)
        } else if wr.len <= PACK_MSG_MAX && self.tx.packs_next(w) && !self.packs.free.is_empty() {
            self.send_pack(now, p, out)
        } else {
            self.send_whole(now, p, w, out)
        }
    }

    /// Sends a message that fits one packet.
    #[inline]
    fn send_whole(&mut self, now: Instant, p: PeerIdx, w: TxIdx, out: &mut dyn FrameSink) -> Step {
        let wr = &self.tx[w];
        let mut op = [0; 24];
        let len = wr.len;
        let op_len = MsgOp {
            dst_ep: wr.dst_ep,
            rx_ctx: wr.rx_ctx,
            src_ep: wr.src_ep,
            tagged: wr.flags.contains(WrFlags::TAGGED),
            imm: wr.flags.contains(WrFlags::IMM).then_some(wr.data),
            tag: wr.tag,
            len: 0,
        }
        .emit(&mut op);
        let body = BodyRef::Wr { wr: w, offset: 0, len: len as u32 };
        let keep = self.tx.keeps(self.peers, w);
        let packet = self.sending().data_packet(p, Ty::Msg, &op[..op_len], body, w, keep);
        if keep && !self.port.can_keep(self.sent)
            || !self.sending().send_numbered(now, p, packet, keep, out)
        {
            return Step::Full;
        }
        self.peers[p].charge_last(self.sent, units(len), keep);
        self.tx[w].sent = len;
        self.operations().all_sent(p, w);
        Step::Sent
    }

    /// Sends the next segments of a long eager message, at most `most`.
    fn send_eager_segments(
        &mut self,
        now: Instant,
        (p, w): (PeerIdx, TxIdx),
        most: usize,
        out: &mut dyn FrameSink,
    ) -> Step {
        let wr = &self.tx[w];
        // The first segment has the remote CQ data and is charged the credit of the whole message.
        let first = wr.sent == 0;
        let mut op = [0; RELIABLE_OP_MAX];
        let op_len = MsgMOp {
            dst_ep: wr.dst_ep,
            rx_ctx: wr.rx_ctx,
            src_ep: wr.src_ep,
            tagged: wr.flags.contains(WrFlags::TAGGED),
            imm: (first && wr.flags.contains(WrFlags::IMM)).then_some(wr.data),
            tag: wr.tag,
            msg_len: wr.len,
            offset: wr.sent,
        }
        .emit(&mut op);
        let (offset_at, end, keep) = (MsgMOp::OFFSET_AT, wr.len, self.tx.keeps(self.peers, w));
        let segments = Segments { ty: Ty::MsgM, op, op_len, offset_at, end, keep };
        let most = if first { 1 } else { most };
        if let Step::Full = self.sending().send_segments(now, (p, w), &segments, most, out) {
            return Step::Full;
        }
        if first {
            self.peers[p].charge_last(self.sent, units(end), keep);
        }
        if self.tx[w].sent == end {
            self.operations().all_sent(p, w);
        }
        Step::Sent
    }

    /// Sends the next segments that the receiver has pulled, at most `most`.
    fn send_data(
        &mut self,
        now: Instant,
        (p, w): (PeerIdx, TxIdx),
        most: usize,
        out: &mut dyn FrameSink,
    ) -> Step {
        let wr = &self.tx[w];
        if wr.ep == EpIdx::NONE {
            return self.send_withdrawal(now, p, w, out);
        }
        let mut op = [0; RELIABLE_OP_MAX];
        let data = DataOp { dst_op: wr.pull_op, dst_gen: wr.pull_gen, offset: wr.sent };
        let op_len = data.emit(&mut op);
        let (offset_at, end) = (DataOp::OFFSET_AT, wr.pulled);
        let keep = !self.peers[p].path.is_lossless();
        let segments = Segments { ty: Ty::Data, op, op_len, offset_at, end, keep };
        if let Step::Full = self.sending().send_segments(now, (p, w), &segments, most, out) {
            return Step::Full;
        }
        let wr = &mut self.tx[w];
        if wr.sent == end {
            wr.flags.remove(WrFlags::IN_RNDV_DATA_Q);
            self.peers[p].rndv_data_q.remove(self.tx, w);
        }
        Step::Sent
    }

    /// Informs the receiver that the rest of an announced message will not come, since its endpoint
    /// was closed.
    #[cold]
    fn send_withdrawal(
        &mut self,
        now: Instant,
        p: PeerIdx,
        w: TxIdx,
        out: &mut dyn FrameSink,
    ) -> Step {
        let wr = &self.tx[w];
        let mut op = [0; 16];
        DataOp { dst_op: wr.pull_op, dst_gen: wr.pull_gen, offset: 0 }.emit(&mut op);
        if !self.port.can_keep(self.sent) {
            return Step::Full;
        }
        let packet = self.sending().data_packet(p, Ty::Data, &op, BodyRef::None, TxIdx::NONE, true);
        if !self.sending().send_numbered(now, p, packet, true, out) {
            return Step::Full;
        }
        self.operations().free_wr(w);
        Step::Sent
    }

    /// Sends as many small messages from the head of the queue as fit one PACK.
    fn send_pack(&mut self, now: Instant, p: PeerIdx, out: &mut dyn FrameSink) -> Step {
        let Some(&buf) = self.packs.free.last() else { return Step::Full };
        if !self.port.can_keep(self.sent) {
            return Step::Full;
        }
        let room = self.peers[p].pack_room();
        let mut bytes = std::mem::take(&mut self.packs.bytes[buf.at()]);
        bytes.clear();
        let (count, cost) = self.sending().fill_pack(p, &mut bytes, room);
        let len = bytes.len() as u32;
        self.packs.bytes[buf.at()] = bytes;
        let first = self.peers[p].send_q.head;
        if count < 2 {
            return self.send_whole(now, p, first, out);
        }
        let mut op = [0; 8];
        let op_len = PackOp { count }.emit(&mut op);
        let any_kept = {
            let (mut w, mut any) = (first, false);
            for _ in 0..count {
                any |= self.tx.keeps(self.peers, w);
                w = self.tx[w].queue.next;
            }
            any
        };
        let body = BodyRef::Pack { buf, len };
        let packet = self.sending().data_packet(p, Ty::Pack, &op[..op_len], body, first, any_kept);
        if !self.sending().send_numbered(now, p, packet, any_kept, out) {
            return Step::Full;
        }
        self.peers[p].charge_last(self.sent, cost, any_kept);
        if any_kept {
            self.packs.free.pop();
            self.tx[first].unacked -= 1;
        }
        self.operations().chain_pack(p, count, any_kept);
        Step::Sent
    }
}

impl Sending<'_> {
    /// Sends retransmissions. False if the port is full.
    fn serve_lost(&mut self, now: Instant, p: PeerIdx, out: &mut dyn FrameSink) -> bool {
        let mut turn = TURN;
        while self.peers[p].snd.lost > 0 {
            let Some(idx) = self.peers[p].snd.first_lost(self.sent) else { break };
            if !self.peers[p].snd.may_resend() {
                break;
            }
            if turn == 0 {
                return false;
            }
            turn -= 1;
            let entry = &self.sent[idx];
            let (ty, psn, body, wr) = (entry.ty, entry.psn, entry.body, entry.wr);
            let (op, op_len) = (entry.op, usize::from(entry.op_len));
            let last = self.peers[p].snd.lost == 1;
            let ar = last || self.peers[p].path.is_lossless();
            let packet =
                Packet { ty, psn, op: &op[..op_len], body, wr, ar, ends: false, rtx: true };
            if self.emit(p, &packet, out) != Tx::Sent {
                return false;
            }
            self.counters.tx_retransmits += 1;
            self.observed.tallies[p.at()].retransmits += 1;
            self.peers[p].snd.on_resent(self.sent, idx, now);
        }
        true
    }

    /// Requests credit, once, and waits for the answer: grants for messages in flight may suffice.
    /// Only if the peer has no blocks left is a short message announced (RNDV), so that later
    /// messages can proceed. An announced message completes when it is matched, for which a program
    /// that sends first and receives later may wait in vain.
    #[cold]
    fn request_credit(&mut self, now: Instant, p: PeerIdx, out: &mut dyn FrameSink) -> Step {
        if self.peers[p].has_requested_credit {
            return Step::Wait;
        }
        if !self.port.can_keep(self.sent) {
            return Step::Full;
        }
        let psn = self.peers[p].snd.nxt;
        let packet = Packet { ar: true, ..Packet::control(Ty::Nop, psn, &[0; NopOp::LEN]) };
        if !self.send_numbered(now, p, packet, true, out) {
            return Step::Full;
        }
        let peer = &mut self.peers[p];
        (peer.credit_requested_at, peer.has_requested_credit) = (psn, true);
        Step::Wait
    }

    /// Announces a message (RNDV), which the receiver then pulls.
    fn send_announcement(
        &mut self,
        now: Instant,
        p: PeerIdx,
        w: TxIdx,
        out: &mut dyn FrameSink,
    ) -> Step {
        let wr = &self.tx[w];
        let mut op = [0; 40];
        let op_len = RndvOp {
            dst_ep: wr.dst_ep,
            rx_ctx: wr.rx_ctx,
            src_ep: wr.src_ep,
            tagged: wr.flags.contains(WrFlags::TAGGED),
            imm: wr.flags.contains(WrFlags::IMM).then_some(wr.data),
            tag: wr.tag,
            msg_len: wr.len,
            src_op: w.get(),
            src_gen: self.tx.wrs.generation(w),
        }
        .emit(&mut op);
        if !self.port.can_keep(self.sent) {
            return Step::Full;
        }
        let packet = self.data_packet(p, Ty::Rndv, &op[..op_len], BodyRef::None, w, true);
        if !self.send_numbered(now, p, packet, true, out) {
            return Step::Full;
        }
        self.peers[p].charge_last(self.sent, 1, true);
        let peer = &mut self.peers[p];
        peer.send_q.remove(self.tx, w);
        let wr = &mut self.tx[w];
        wr.flags.remove(WrFlags::IN_SEND_Q);
        wr.flags |= WrFlags::ANNOUNCED;
        if planted(Bug::RendezvousCompletedOnAck) {
            self.tx[w].flags |= WrFlags::ALL_SENT;
        }
        Step::Sent
    }

    /// Writes the PACK records of messages at the head of the queue. Returns their number and cost
    /// in credits.
    fn fill_pack(&self, p: PeerIdx, bytes: &mut Vec<u8>, room: usize) -> (u16, u32) {
        let credits = self.peers[p].credits();
        let (mut count, mut cost) = (0, 0);
        let first = self.peers[p].send_q.head;
        let mut w = first;
        while w != TxIdx::NONE && count < PackOp::COUNT_MAX {
            let wr = &self.tx[w];
            let imm = wr.flags.contains(WrFlags::IMM).then_some(wr.data);
            let size = record_len(imm.is_some(), wr.len as usize);
            let alone = count > 0 && !self.tx[first].packs_with(&self.tx[w]);
            if wr.len > PACK_MSG_MAX || alone || cost + units(wr.len) > credits {
                break;
            }
            if bytes.len() + size > room {
                break;
            }
            let at = bytes.len();
            bytes.resize(at + size, 0);
            let op_len = MsgOp {
                dst_ep: wr.dst_ep,
                rx_ctx: wr.rx_ctx,
                src_ep: wr.src_ep,
                tagged: wr.flags.contains(WrFlags::TAGGED),
                imm,
                tag: wr.tag,
                len: wr.len as u16,
            }
            .emit(&mut bytes[at..]);
            let from = at + op_len;
            let to = from + wr.len as usize;
            self.body(BodyRef::Wr { wr: w, offset: 0, len: wr.len as u32 })
                .copy_to(&mut bytes[from..to]);
            count += 1;
            cost += units(wr.len);
            w = wr.queue.next;
        }
        (count, cost)
    }

    /// The next packet of request `wr`, or of none. `awaited`: a completion waits for the
    /// acknowledgement of the packet.
    #[inline]
    pub(super) fn data_packet<'a>(
        &self,
        p: PeerIdx,
        ty: Ty,
        op: &'a [u8],
        body: BodyRef,
        wr: TxIdx,
        awaited: bool,
    ) -> Packet<'a> {
        let peer = &self.peers[p];
        let ar = if peer.path.is_lossless() { awaited } else { self.requests_ar(p, wr, awaited) };
        let ends = awaited && wr != TxIdx::NONE;
        Packet { ty, psn: peer.snd.nxt, op, body, wr, ar, ends, rtx: false }
    }

    /// Sends a packet with the next PSN, and records it for retransmission if `keep`. False, and
    /// nothing has changed, if the port did not take it.
    #[inline]
    pub(super) fn send_numbered(
        &mut self,
        now: Instant,
        p: PeerIdx,
        packet: Packet<'_>,
        keep: bool,
        out: &mut dyn FrameSink,
    ) -> bool {
        if self.emit(p, &packet, out) != Tx::Sent {
            return false;
        }
        let peer = &mut self.peers[p];
        if !keep {
            peer.number(now);
            return true;
        }
        let Packet { ty, op, body, wr, ar, ends, .. } = packet;
        let mut bytes = [0; RELIABLE_OP_MAX];
        bytes[..op.len()].copy_from_slice(op);
        let op = (&bytes, op.len());
        peer.number_and_keep(now, self.sent, |psn| Sent::new(psn, ty, op, body, wr, now));
        if wr != TxIdx::NONE {
            self.tx[wr].unacked += 1;
        }
        if ends && !peer.path.is_lossless() {
            self.acks.note_sent(&mut self.due.todo, p, peer, ar);
        }
        true
    }

    /// Builds a packet and hands it to the port.
    #[inline]
    pub(super) fn emit(&mut self, p: PeerIdx, packet: &Packet<'_>, out: &mut dyn FrameSink) -> Tx {
        let peer = &self.peers[p];
        let body = self.body(packet.body);
        let mut head = [0; HEAD_MAX];
        let (fixed, rest) = head.split_first_chunk_mut().expect("a head holds a base");
        packet.base(self.port.station, peer, body.len()).emit(fixed);
        rest[..packet.op.len()].copy_from_slice(packet.op);
        let head = &head[..BASE_LEN + packet.op.len()];
        let (crc, mut tail) = (peer.path.has_crc(), [0; TRAILER_LEN]);
        if crc {
            tail = wire::trailer(head, &body);
        }
        let tail = &tail[..if crc { TRAILER_LEN } else { 0 }];
        let frame = TxFrame { head, body, tail };
        if peer.station() == self.port.station {
            return self.emit_to_self(p, packet);
        }
        let frame_len = frame.len();
        let sent = out.send(&frame);
        self.left(p, (packet.ty, frame_len), sent)
    }

    /// Counts a frame of `len` bytes before sealing, with a packet of type `ty`. `sent`: the
    /// port's result. Returns the result that counts: a frame without a route may count as sent.
    #[inline(always)]
    pub(super) fn left(&mut self, p: PeerIdx, (ty, len): (Ty, usize), sent: Tx) -> Tx {
        match sent {
            Tx::Sent => {
                self.counters.tx_frames += 1;
                let peer = &mut self.peers[p];
                self.observed.tallies[p.at()].tx_bytes += (len + peer.path.tag_len()) as u64;
                peer.carried_ack();
            }
            Tx::Full => self.port.blocked = true,
            // No route, and no state of this node depends on the packet: it counts as sent.
            Tx::NoRoute if !ty.is_reliable() || ty == Ty::Nop => {
                let peer = &mut self.peers[p];
                (peer.owed, peer.ack_now) = (0, false);
                return Tx::Sent;
            }
            // No route: the peer may return; T_dead decides.
            Tx::NoRoute => self.port.blocked = true,
        }
        sent
    }

    /// The payload that a record describes.
    #[inline]
    pub(super) fn body(&self, body: BodyRef) -> Body<'_> {
        match body {
            BodyRef::None => Body::Bytes(&[]),
            BodyRef::Wr { wr, offset, len } => self.tx.body(wr, offset as usize, len as usize),
            BodyRef::Operands { wr, offset, len } => {
                Body::Bytes(self.tx.rma_of(wr).operands(offset as usize, len as usize))
            }
            BodyRef::Mr { mr, offset, len, .. } => {
                let (offset, len) = (offset as usize, len as usize);
                Body::Io { buf: &self.mrs[mr].buf, offset, len }
            }
            BodyRef::Response { response } => Body::Bytes(self.responses[response].values()),
            BodyRef::Pack { buf, len } => Body::Bytes(&self.packs.bytes[buf.at()][..len as usize]),
        }
    }
}

impl Operations<'_> {
    /// Links the requests of a PACK that was sent, so that its acknowledgement finds them.
    fn chain_pack(&mut self, p: PeerIdx, count: u16, kept: bool) {
        let mut before = TxIdx::NONE;
        for _ in 0..count {
            let w = self.objects.peers[p].send_q.head;
            let wr = &mut self.tx[w];
            wr.sent = wr.len;
            if kept {
                wr.unacked += 1;
                wr.flags |= WrFlags::PACKED;
                wr.set_next_packed(TxIdx::NONE);
                if before != TxIdx::NONE {
                    self.tx[before].set_next_packed(w);
                }
                before = w;
            }
            self.all_sent(p, w);
        }
    }

    /// Notes that the whole message has been handed to the port once.
    #[inline]
    pub(super) fn all_sent(&mut self, p: PeerIdx, w: TxIdx) {
        let wr = &mut self.tx[w];
        wr.flags.remove(WrFlags::IN_SEND_Q);
        wr.flags |= WrFlags::ALL_SENT;
        let early = wr.flags.contains(WrFlags::EARLY);
        self.objects.peers[p].send_q.remove(self.tx, w);
        if early {
            self.report_wr(w);
        }
        self.try_complete(w);
    }
}
