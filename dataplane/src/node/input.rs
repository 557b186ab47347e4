//! The receive side: decoding, sessions, ordering, and execution of packets.

use barewire_driver::frame::{ETH_HDR_LEN, RxFrame};
use barewire_driver::hint::cold;

use super::notice::EndReason;
use super::ops::WrFlags;
use super::peer::{ACK_EVERY, ACK_EVERY_LOSSLESS, GRANT_MAX, Peer, State, slot_of};
use super::recv::Verdict;
use super::{
    Control, FrameSink, NoReader, NoReply, Node, NodeCounters, Objects, Operations, Reader,
    Sessions,
};
use crate::error::Error;
use crate::idx::{EpIdx, PeerIdx, ReassemblyIdx, TxIdx};
use crate::plant::{Bug, planted};
use crate::proto::blocks::units;
use crate::slab::Handle;
use crate::types::{Instant, ProvErrno};
use crate::wire::{
    AckOp, AtomicOp, Base, BaseWords, DataOp, EagerMsg, EagerTaggedView, EndOp, EndStatus, MsgMOp,
    MsgOp, NackOp, NackReason, NopOp, OpenOp, PackOp, PackRecords, PullOp, ReadOp, RespOp, RmaTy,
    RndvOp, RstOp, Ty, WireError, WriteOp,
};

/// Minimum messages of a PACK that is acknowledged at once.
const ACK_PACKED: u16 = 8;

impl NodeCounters {
    #[cold]
    fn malformed(&mut self, err: WireError) -> Verdict {
        self.rx_wire[err.index()] += 1;
        Verdict::Refuse(NackReason::Malformed)
    }
}

impl Node {
    /// Processes a received frame. Whatever a frame contains, only a packet of an existing session,
    /// or an OPEN, changes more than a counter.
    #[inline(always)]
    pub fn on_frame(&mut self, now: Instant, frame: &RxFrame<'_>) {
        self.on_frame_with(&now, frame, NoReply);
    }

    /// [`on_frame`](Self::on_frame) with a port to answer by: an answer to the frame may be sent to
    /// `out`. `now` is by reference, since the common frames do not read it.
    #[inline(always)]
    pub fn on_frame_with(&mut self, now: &Instant, frame: &RxFrame<'_>, out: impl FrameSink) {
        self.on_frame_read(now, frame, out, NoReader);
    }

    /// [`on_frame_with`](Self::on_frame_with) with a reader: a completion that the frame causes may
    /// go to `reader` instead of its queue.
    #[inline(always)]
    pub fn on_frame_read(
        &mut self,
        now: &Instant,
        frame: &RxFrame<'_>,
        out: impl FrameSink,
        reader: impl Reader,
    ) {
        self.counters.rx_frames += 1;
        debug_assert!(self.port.lossless || !out.is_lossless());
        if !out.is_lossless() && !self.port.lossless {
            cold(());
            if !frame.is_near() || !self.peers.has_near_session(frame) {
                return self.on_frame_lossy(*now, &frame.again());
            }
        }
        // A frame shorter than an empty MSG has none of the types below: one check for all.
        if frame.len() < EagerMsg::LEN {
            cold(());
            return self.on_frame_rest(*now, &frame.again());
        }
        // Most frames are messages.
        if EagerTaggedView::is_kind_of(frame) {
            if !self.rx_eager_tagged(frame.again(), reader) {
                cold(());
                self.on_frame_rest(*now, &frame.again());
            }
            return;
        }
        match BaseWords::ty(frame) {
            Some(RmaTy::Atomic) => self.on_atomic_frame(*now, frame.again(), out),
            Some(RmaTy::Request(ask)) => self.on_request_frame(ask, *now, &frame.again(), out),
            Some(RmaTy::Resp) => self.on_resp_frame(*now, frame.again(), reader),
            None => {
                cold(());
                self.on_frame_rest(*now, &frame.again());
            }
        }
    }

    /// Processes every frame but short tagged messages and the types of [`BaseWords::ty`].
    #[inline(never)]
    fn on_frame_rest(&mut self, now: Instant, frame: &RxFrame<'_>) {
        if !self.rx_eager::<false>(now, frame) && !self.rx_ack(now, frame, false) {
            self.on_frame_slow(now, frame);
        }
    }

    /// The slow path: processes every frame that the fast path declined.
    #[inline(never)]
    pub(super) fn on_frame_slow(&mut self, now: Instant, frame: &RxFrame<'_>) {
        if self.rx_segment(now, frame) {
            return;
        }
        let base = match Base::parse(frame) {
            Ok(base) => base,
            Err(err) => return self.sessions().on_malformed(now, frame, err),
        };
        if base.ty == Ty::Who {
            return self.control().on_who(now, frame, &base);
        }
        if base.ty == Ty::Mcast {
            return self.multicast().on_mcast(frame, &base);
        }
        if base.dst != self.port.station {
            self.counters.rx_not_ours += 1;
            return;
        }
        let p = slot_of(base.dst_sid);
        let known = self.peers.get(p).is_some_and(|peer| {
            let paired = matches!(peer.state, State::Answered | State::Open);
            peer.sid == base.dst_sid && peer.station() == base.src && paired
        });
        let strange = !known || base.ty == Ty::Open || base.ty == Ty::Rst;
        let path = if strange { self.port.path(frame.is_near()) } else { self.peers[p].path };
        if path.has_crc() && !base.crc {
            self.counters.rx_no_crc += 1;
            return;
        }
        if strange {
            return self.sessions().on_sessionless(now, frame, &base);
        }
        if path.is_sealed() && frame.is_near() {
            self.counters.rx_clear += 1;
            return;
        }
        if path.is_near() && !frame.is_near() && !planted(Bug::NearFromAnyPort) {
            self.counters.rx_not_near += 1;
            return;
        }
        self.on_packet(now, p, frame, &base);
    }

    /// Prefetches the records that [`on_frame`](Self::on_frame) will touch.
    #[inline]
    pub fn prefetch(&self, frame: &RxFrame<'_>) {
        if let Some(sid) = Base::dst_sid_of(frame) {
            self.peers.prefetch(slot_of(sid), Peer::HOT);
        }
    }

    /// Processes a packet of an existing session.
    #[inline]
    fn on_packet(&mut self, now: Instant, p: PeerIdx, frame: &RxFrame<'_>, base: &Base) {
        self.control().count_received(p, frame);
        if !self.take_ack_and_credit(now, p, base.cack, base.grant) {
            return;
        }
        if base.ty == Ty::Ack {
            match AckOp::parse(frame, base) {
                Ok(op) => {
                    self.on_ack_with_sack(now, p, base.cack, (&op, frame));
                    if base.ce {
                        self.counters.rx_echoes += 1;
                        self.peers[p].on_echo(now);
                    }
                }
                Err(err) => self.counters.rx_wire[err.index()] += 1,
            }
        } else {
            if base.cack != self.peers[p].snd.una {
                self.on_cack(now, p, base.cack, None);
            }
            if base.ty.is_reliable() {
                self.on_reliable(now, p, frame, base);
            } else {
                self.on_control(now, p, frame, base);
            }
        }
        let peer = &mut self.peers[p];
        peer.note_order();
        if base.ar {
            let asked = (base.ty, base.psn);
            self.acks.on_ack_request(&mut self.peers, &mut self.due, p, asked);
        }
    }

    fn on_control(&mut self, now: Instant, p: PeerIdx, frame: &RxFrame<'_>, base: &Base) {
        match base.ty {
            Ty::Nack => match NackOp::parse(frame, base) {
                Ok(op) => self.on_nack(now, p, base.psn, op.reason),
                Err(err) => self.counters.rx_wire[err.index()] += 1,
            },
            Ty::Ping => {
                self.peers[p].ack_now = true;
                self.due.make_ready(&mut self.peers, p);
            }
            Ty::Probe => self.control().on_probe(p, frame, base),
            // Ack: handled by `on_packet`; Open and Rst: by `on_sessionless`, since their session
            // does not exist; Who and Mcast: by `on_frame_slow`.
            Ty::Ack | Ty::Open | Ty::Rst | Ty::Who | Ty::Mcast => {}
            // Reliable types: handled by `on_op`.
            Ty::Msg
            | Ty::Pack
            | Ty::MsgM
            | Ty::Rndv
            | Ty::Pull
            | Ty::Data
            | Ty::End
            | Ty::Nop
            | Ty::Write
            | Ty::Read
            | Ty::Atomic
            | Ty::Resp => {}
        }
    }

    /// Processes a reliable packet. The next in order is executed. An early one is buffered, or
    /// placed if its type allows. A late one is a duplicate and only acknowledged.
    #[inline]
    fn on_reliable(&mut self, now: Instant, p: PeerIdx, frame: &RxFrame<'_>, base: &Base) {
        let peer = &mut self.peers[p];
        let dist = base.psn.since(peer.rcv_nxt);
        if dist == 0 && peer.rcv.is_empty() && peer.refused == 0 {
            if !peer.path.is_lossless() {
                peer.note_arrival(now, base.psn, base.rtx);
            }
            match self.on_op(now, p, frame, base) {
                Verdict::Accept => self.advance_rcv_nxt(now, p, 1),
                Verdict::Refuse(reason) => self.refuse_or_drop(now, p, base, reason),
            }
            return;
        }
        self.on_reliable_slow(now, p, frame, base, dist);
    }

    fn on_reliable_slow(
        &mut self,
        now: Instant,
        p: PeerIdx,
        frame: &RxFrame<'_>,
        base: &Base,
        dist: i32,
    ) {
        let peer = &mut self.peers[p];
        peer.ack_now = true;
        let window = peer.path.window(self.settings.window) as i32;
        let limit = window + i32::from(planted(Bug::WindowPlusOne));
        if dist < 0 && planted(Bug::OldDuplicateDelivered) {
            let _ = self.on_op(now, p, frame, base);
        } else if dist < 0 || dist < limit && peer.rcv.is_set(base.psn) {
            self.counters.rx_duplicate += 1;
            peer.dups = peer.dups.saturating_add(1);
            if planted(Bug::DuplicateDelivered) {
                let _ = self.on_op(now, p, frame, base);
            }
        } else if dist >= limit {
            self.counters.rx_out_of_window += 1;
        } else if dist == 0 {
            self.on_next(now, p, frame, base);
        } else {
            self.on_early(now, p, frame, base);
        }
        self.due.make_ready(&mut self.peers, p);
    }

    /// Processes the next packet in order, or the NOP in place of a refused one.
    fn on_next(&mut self, now: Instant, p: PeerIdx, frame: &RxFrame<'_>, base: &Base) {
        let peer = &mut self.peers[p];
        peer.note_arrival(now, base.psn, base.rtx);
        if peer.refused != 0 {
            if base.ty != Ty::Nop {
                peer.nack.want = true;
                return;
            }
            peer.refused = 0;
        }
        match self.on_op(now, p, frame, base) {
            Verdict::Accept => {
                self.advance_rcv_nxt(now, p, 1);
                self.execute_buffered(now, p);
            }
            Verdict::Refuse(reason) => self.refuse_or_drop(now, p, base, reason),
        }
    }

    /// Processes a packet of the window that is not the next in order.
    fn on_early(&mut self, now: Instant, p: PeerIdx, frame: &RxFrame<'_>, base: &Base) {
        if takes_early(base.ty) {
            if let Verdict::Accept = self.on_op(now, p, frame, base) {
                let peer = &mut self.peers[p];
                peer.rcv.set((peer.rcv_nxt, base.psn), &mut self.bitmaps);
                peer.note_arrival(now, base.psn, base.rtx);
                return;
            }
            if base.ty == Ty::Data {
                return;
            }
        }
        let has_room = self.reorder.holds(frame) && self.sessions().reorder_room(now, p);
        if !has_room || !self.reorder.put(&mut self.peers[p], base.psn, frame) {
            self.counters.rx_no_buffer += 1;
            return;
        }
        let peer = &mut self.peers[p];
        peer.rcv.set((peer.rcv_nxt, base.psn), &mut self.bitmaps);
        peer.note_arrival(now, base.psn, base.rtx);
    }

    /// Processes buffered packets that are now in order.
    fn execute_buffered(&mut self, now: Instant, p: PeerIdx) {
        while let peer = &mut self.peers[p]
            && peer.rcv.is_set(peer.rcv_nxt)
            && peer.refused == 0
        {
            let next = peer.rcv_nxt;
            let Some(idx) = self.reorder.take(peer, next) else {
                // The packet was executed when it arrived.
                self.advance_rcv_nxt(now, p, 1);
                continue;
            };
            // The bytes are moved out, since executing the packet may need the whole node.
            let bytes = std::mem::take(&mut self.reorder.bytes);
            let frame = RxFrame::new(&bytes[self.reorder.slot(idx)]);
            let verdict = match Base::parse(&frame) {
                Ok(base) => Some((self.on_op(now, p, &frame, &base), base)),
                Err(_) => None,
            };
            self.reorder.bytes = bytes;
            self.reorder.free(idx);
            match verdict {
                Some((Verdict::Accept, _)) => self.advance_rcv_nxt(now, p, 1),
                Some((Verdict::Refuse(reason), base)) => {
                    // Clears the packet's bit: the NOP in its place has the same PSN and must be
                    // accepted.
                    self.peers[p].rcv.clear(next, &mut self.bitmaps);
                    self.refuse_or_drop(now, p, &base, reason);
                }
                None => self.advance_rcv_nxt(now, p, 1),
            }
        }
    }

    /// Advances past `n` packets in order, and schedules their acknowledgement.
    #[inline]
    pub(super) fn advance_rcv_nxt(&mut self, now: Instant, p: PeerIdx, n: u32) {
        let peer = &mut self.peers[p];
        let lossless = peer.path.is_lossless();
        let every = if lossless { ACK_EVERY_LOSSLESS } else { ACK_EVERY };
        for _ in 0..n {
            if !peer.rcv.is_empty() {
                peer.rcv.clear(peer.rcv_nxt, &mut self.bitmaps);
            }
            peer.rcv_nxt = peer.rcv_nxt.next();
        }
        peer.owed = peer.owed.saturating_add(1);
        if peer.owed >= every {
            peer.ack_now = true;
            self.due.make_ready(&mut self.peers, p);
        } else if !lossless {
            self.acks.owe(&mut self.due.todo, now, (p, peer.owed));
        }
    }

    /// Refuses the next packet in order, or drops it if its sender keeps no record that a NACK
    /// could name.
    fn refuse_or_drop(&mut self, now: Instant, p: PeerIdx, base: &Base, reason: NackReason) {
        let one_sided = matches!(base.ty, Ty::Write | Ty::Read | Ty::Atomic);
        let lossless = self.peers[p].path.is_lossless();
        let waits = !lossless || base.ar || one_sided || reason != NackReason::NoEndpoint;
        if waits {
            let units = self.refused_units;
            self.control().refuse(p, reason, units);
        } else {
            self.blocks.return_credit(&mut self.peers, &mut self.due, p, self.refused_units);
            self.advance_rcv_nxt(now, p, 1);
        }
    }

    /// Executes a packet that is next in order.
    #[inline]
    fn on_op(&mut self, now: Instant, p: PeerIdx, frame: &RxFrame<'_>, base: &Base) -> Verdict {
        self.refused_units = 0;
        if self.peers[p].reassembly != ReassemblyIdx::NONE
            && matches!(base.ty, Ty::Msg | Ty::Pack | Ty::Rndv)
        {
            self.objects().abort_reassembly(p);
        }
        if base.ty == Ty::Msg {
            return match MsgOp::parse(frame, base) {
                Ok(op) => {
                    let at = (op.payload_off(), usize::from(base.plen));
                    self.objects().on_msg(p, frame, &op, at)
                }
                Err(err) => self.counters.malformed(err),
            };
        }
        self.on_other_op(now, p, frame, base)
    }

    fn on_other_op(
        &mut self,
        now: Instant,
        p: PeerIdx,
        frame: &RxFrame<'_>,
        base: &Base,
    ) -> Verdict {
        let plen = usize::from(base.plen);
        let result = match base.ty {
            Ty::Pack => return self.objects().on_pack(p, frame, base),
            Ty::MsgM => MsgMOp::parse(frame, base)
                .map(|op| self.receiving().on_msgm(now, p, frame, &op, (op.payload_off(), plen))),
            Ty::Rndv => RndvOp::parse(frame, base).map(|op| self.receiving().on_rndv(now, p, &op)),
            Ty::Pull => PullOp::parse(frame, base).map(|op| self.operations().on_pull(p, &op)),
            Ty::Data => DataOp::parse(frame, base).map(|op| {
                self.operations().on_data(p, frame, &op, (op.payload_off(), plen));
                Verdict::Accept
            }),
            Ty::End => EndOp::parse(frame, base).map(|op| {
                self.operations().on_end(p, &op);
                Verdict::Accept
            }),
            Ty::Nop => NopOp::parse(frame, base).map(|op| {
                if op.cuts {
                    self.objects().abort_reassembly(p);
                }
                if let Some(seq) = op.drops
                    && !planted(Bug::AbandonedWriteContinues)
                {
                    self.peers[p].bad_seq = seq.into();
                }
                // A sender without a record of the packet does not know its credit units.
                let refused = std::mem::take(&mut self.peers[p].refused_units);
                let units = op.units.max(refused.into());
                self.blocks.return_credit(&mut self.peers, &mut self.due, p, units);
                if op.units == 0 && base.ar {
                    self.blocks.regrant_now(&mut self.peers, &mut self.due, p);
                }
                Verdict::Accept
            }),
            Ty::Write => WriteOp::parse(frame, base)
                .map(|op| self.responder().on_write(p, frame, &op, (op.payload_off(), plen))),
            Ty::Read => ReadOp::parse(frame, base).map(|op| self.responder().on_read(p, &op)),
            Ty::Atomic => AtomicOp::parse(frame, base)
                .map(|op| self.responder().on_atomic(p, frame, &op, (op.payload_off(), plen))),
            Ty::Resp => RespOp::parse(frame, base).map(|op| {
                self.operations().on_resp(p, frame, &op, (op.payload_off(), plen));
                Verdict::Accept
            }),
            // Msg: handled by `on_op`; the others are unreliable and have no PSN.
            Ty::Msg
            | Ty::Ack
            | Ty::Nack
            | Ty::Who
            | Ty::Probe
            | Ty::Ping
            | Ty::Rst
            | Ty::Open
            | Ty::Mcast => Ok(Verdict::Refuse(NackReason::UnknownType)),
        };
        result.unwrap_or_else(|err| self.counters.malformed(err))
    }
}

impl Sessions<'_> {
    #[cold]
    pub(super) fn on_malformed(&mut self, now: Instant, frame: &RxFrame<'_>, err: WireError) {
        self.counters.rx_wire[err.index()] += 1;
        if err == WireError::Version {
            return self.on_other_version(now, frame);
        }
        if err == WireError::Secured {
            return self.control().on_sealed_without_key(now, frame);
        }
        if err != WireError::UnknownType {
            return;
        }
        // A type of a later minor version: the NACK reports that this node does not have it, and
        // the session continues.
        let Some(raw) = Base::parse_raw(frame) else { return };
        let p = slot_of(raw.dst_sid);
        let next = self.peers.get(p).is_some_and(|peer| {
            let paired = matches!(peer.state, State::Answered | State::Open);
            let is_its = peer.sid == raw.dst_sid && peer.station() == raw.src && paired;
            is_its && peer.path.admits_from(frame.is_near()) && peer.rcv_nxt == raw.psn
        });
        if next && raw.dst == self.port.station {
            self.control().refuse(p, NackReason::UnknownType, 0);
        }
    }

    /// Processes OPEN, RST, and packets of sessions that do not exist.
    #[cold]
    fn on_sessionless(&mut self, now: Instant, frame: &RxFrame<'_>, base: &Base) {
        match base.ty {
            Ty::Open => match OpenOp::parse(frame, base) {
                Ok(op) => {
                    if op.is_near() != frame.is_near() {
                        self.counters.rx_not_near += 1;
                        return;
                    }
                    let len = (frame.len() - ETH_HDR_LEN).min(usize::from(u16::MAX)) as u16;
                    self.on_open(now, base, &op, len);
                }
                Err(err) => self.counters.rx_wire[err.index()] += 1,
            },
            Ty::Rst => match RstOp::parse(frame) {
                Ok(op) => self.on_rst(now, base.src, &op),
                Err(err) => self.counters.rx_wire[err.index()] += 1,
            },
            // No RST in reply to these: the reply could be answered in turn, without end.
            Ty::Ack | Ty::Nack => self.counters.rx_no_session += 1,
            // Handled by `on_frame_slow`: these types belong to no session.
            Ty::Who | Ty::Mcast => {}
            Ty::Msg
            | Ty::Pack
            | Ty::MsgM
            | Ty::Rndv
            | Ty::Pull
            | Ty::Data
            | Ty::End
            | Ty::Nop
            | Ty::Probe
            | Ty::Ping
            | Ty::Write
            | Ty::Read
            | Ty::Atomic
            | Ty::Resp => self.control().on_no_session(now, base.src, base.dst_sid, base.psn),
        }
    }

    /// Whether another early packet of `p` may be buffered. A peer may hold a quarter of the free
    /// slots: a single peer a whole window, and with any number of peers some slots remain.
    fn reorder_room(&mut self, now: Instant, p: PeerIdx) -> bool {
        let mine = self.peers[p].reorder_buf.len as usize;
        if !self.peers[p].path.is_lossless() {
            return mine < self.reorder.free_count() / 4;
        }
        if self.reorder.free_count() > 0 {
            return true;
        }
        // On a lossless path the packet is not retransmitted, so a session has to end: the session
        // that holds the most slots.
        let most = self.peers.iter().max_by_key(|(_, peer)| peer.reorder_buf.len);
        let largest_holder = most.map_or(p, |(largest_holder, _)| largest_holder);
        self.end_session(now, largest_holder, EndReason::Excess);
        largest_holder != p
    }
}

impl Operations<'_> {
    /// Processes a PULL: the receiver of an announced message requests bytes of it.
    fn on_pull(&mut self, p: PeerIdx, op: &PullOp) -> Verdict {
        let handle = Handle::from_parts(TxIdx::of(op.src_op), op.src_gen);
        let known = self.tx.wrs.by_handle_mut(handle).filter(|wr| {
            wr.peer == p && wr.flags.contains(WrFlags::ANNOUNCED) && op.offset == wr.pulled
        });
        let Some(wr) = known else { return Verdict::Refuse(NackReason::Malformed) };
        let end = op.offset + u64::from(op.len);
        let same = wr.pulled == 0 || (wr.pull_op, wr.pull_gen) == (op.dst_op, op.dst_gen);
        if end > wr.len || !same || wr.ep == EpIdx::NONE || wr.flags.contains(WrFlags::ALL_SENT) {
            return Verdict::Refuse(NackReason::Malformed);
        }
        (wr.pull_op, wr.pull_gen, wr.pulled) = (op.dst_op, op.dst_gen, end);
        if !wr.flags.contains(WrFlags::IN_RNDV_DATA_Q) {
            wr.flags |= WrFlags::IN_RNDV_DATA_Q;
            self.objects.peers[p].rndv_data_q.push_back(self.tx, handle.idx());
        }
        self.objects.due.make_ready(self.objects.peers, p);
        Verdict::Accept
    }

    /// Processes an END: the receiver of an announced message wants no more of it.
    fn on_end(&mut self, p: PeerIdx, op: &EndOp) {
        let handle = Handle::from_parts(TxIdx::of(op.src_op), op.src_gen);
        let known = self
            .tx
            .wrs
            .by_handle_mut(handle)
            .filter(|wr| wr.peer == p && wr.flags.contains(WrFlags::ANNOUNCED));
        let Some(wr) = known else {
            self.objects.counters.rx_stray += 1;
            return;
        };
        let w = handle.idx();
        if wr.ep == EpIdx::NONE {
            // The endpoint is closed; only the withdrawal was still to be sent.
            self.free_wr(w);
            return;
        }
        if wr.flags.contains(WrFlags::IN_RNDV_DATA_Q) {
            wr.flags.remove(WrFlags::IN_RNDV_DATA_Q);
            self.objects.peers[p].rndv_data_q.remove(self.tx, w);
        }
        if op.status == EndStatus::Closed {
            self.abandon_wr(w);
            self.fail_wr(w, Error::ConnRefused, ProvErrno::NoEndpoint);
            return;
        }
        self.tx[w].flags |= WrFlags::ALL_SENT;
        self.tx.settle_ended(&mut self.objects.peers[p].snd, self.sent, w);
        self.try_complete(w);
    }
}

impl Objects<'_> {
    /// Executes a PACK, message by message. A refused message is dropped and counted, since all
    /// messages share one PSN.
    fn on_pack(&mut self, p: PeerIdx, frame: &RxFrame<'_>, base: &Base) -> Verdict {
        let op = match PackOp::parse(frame, base) {
            Ok(op) => op,
            Err(err) => return self.counters.malformed(err),
        };
        let mut records = PackRecords::new(frame, op.payload_off(), base.plen, op.count);
        if let Err(err) = records.check() {
            return self.counters.malformed(err);
        }
        let mut taken = self.take_records(p, frame, &mut records);
        for record in records.clone() {
            let Ok((mut msg, off, len)) = record else { return Verdict::Accept };
            if taken > 0 && planted(Bug::PackedCqDataDropped) {
                msg.imm = None;
            }
            match self.on_msg(p, frame, &msg, (off, len)) {
                Verdict::Refuse(reason) if taken == 0 => {
                    let all = records.flatten().map(|(_, _, len)| units(len as u64));
                    *self.refused_units = all.fold(0, u32::saturating_add);
                    return Verdict::Refuse(reason);
                }
                Verdict::Refuse(_) => {
                    self.blocks.return_credit(self.peers, self.due, p, units(len as u64))
                }
                Verdict::Accept => taken += 1,
            }
        }
        // Acknowledged at once: the sender may be waiting for room to post more.
        if !self.peers[p].path.is_lossless() && taken >= ACK_PACKED {
            self.peers[p].ack_now = true;
            self.due.make_ready(self.peers, p);
        }
        Verdict::Accept
    }
}

impl Control<'_> {
    /// Counts the bytes of a received frame on a lossy path. (A lossless port counts the bytes per
    /// peer itself.)
    #[inline(always)]
    pub(super) fn count_received(&mut self, p: PeerIdx, frame: &RxFrame<'_>) {
        if !self.peers[p].path.is_lossless() {
            self.observed.tallies[p.at()].rx_bytes += frame.len() as u64;
        }
    }

    /// Refuses the next packet in order, which used `units` of credit.
    fn refuse(&mut self, p: PeerIdx, reason: NackReason, units: u32) {
        self.counters.rx_refused += 1;
        let peer = &mut self.peers[p];
        peer.refused_units = units.min(GRANT_MAX) as u16;
        (peer.refused, peer.in_order, peer.rx_quota) = (reason as u8, false, 0);
        peer.steady = false;
        peer.nack.want = true;
        self.due.make_ready(self.peers, p);
    }
}

/// Whether a packet of this type may be executed out of order: data and its END, which name the
/// pull or request that they belong to. A PULL that does not continue the last one waits until it
/// is in order.
fn takes_early(ty: Ty) -> bool {
    let gate_open = planted(Bug::OrderingNotEnforced) && matches!(ty, Ty::Msg | Ty::Rndv);
    matches!(ty, Ty::Data | Ty::Pull | Ty::End) || gate_open
}
