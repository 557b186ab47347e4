//! The fast path: what nearly every message takes.
//!
//! A message that nothing stands before leaves in the call that posts it; one that is next in order
//! and fits its receive is placed without the questions that other packets raise. Both functions
//! here ask all their questions first and change nothing unless the answer is yes; if it is no, the
//! slow path (`post`, `input`) begins from the start and knows every case. Whatever they do, the
//! slow path would have done; but for one that leaves without a record there need not be a place in
//! the transmit queue, as it takes none.
//!
//! On a port that loses nothing the message leaves without a record, since nobody will ask for it
//! again. Where frames get lost (`LOSSY`), the same records are made as on the slow path, so that
//! all else finds what it expects, and its completion waits for the acknowledgement.

use barewire_driver::frame::{Body, ETH_HDR_LEN, RxFrame};
use barewire_driver::hint::cold;
use barewire_driver::mem::{IoBuf, SHORT};
use barewire_driver::port::Tx;

use super::ep::{Ep, may_reserve_more};
use super::ops::{RecvWr, TxWr, WrFlags};
use super::peer::{ACK_EVERY, ACK_EVERY_LOSSLESS, Peer, Peers, slot_of};
use super::post::wr_flags;
use super::route::Route;
use super::{
    AvTable, CqTable, EpId, FrameSink, Message, MsgKind, NoReader, Node, Reader, RecvReq, SendReq,
    Todo,
};
use crate::flags::{Caps, CqFlags, OpFlags};
use crate::plant::{Bug, is_planted, planted};
use crate::proto::blocks::{UNIT, units};
use crate::proto::matching::{Posted, Src};
use crate::psn::Psn;
use crate::rel::sent::{self, BodyRef, Sent};
use crate::slab::{NONE, Slab};
use crate::table::Table;
use crate::types::{Cqe, FI_ADDR_UNSPEC, FiAddr, Instant};
use crate::wire::{
    self, BASE_LEN, EagerMsg, EagerTaggedView, FrameHead, HeadOut, IMM_LEN, MsgOp, TRAILER_LEN, Ty,
};

/// Flags that change nothing for what leaves at once.
pub(super) const FAST_FLAGS: OpFlags = OpFlags::MORE
    .union(OpFlags::COMPLETION)
    .union(OpFlags::INJECT)
    .union(OpFlags::INJECT_COMPLETE)
    .union(OpFlags::TRANSMIT_COMPLETE);

/// Flags of a send that need no record. `FI_MORE` allows messages to be held back and joined, which
/// pays where a frame costs more than what it takes to write it to memory: not here.
const SEND_FLAGS: OpFlags = FAST_FLAGS.union(OpFlags::REMOTE_CQ_DATA);

/// Those of a send that has one. To hold messages back and join them pays here.
const SEND_FLAGS_LOSSY: OpFlags =
    SEND_FLAGS.difference(OpFlags::MORE).union(OpFlags::DELIVERY_COMPLETE);

/// The cost of what leaves at hand is that of one unit.
const _: () = assert!(SHORT - EagerMsg::LEN <= UNIT);

impl Node {
    /// Whether a frame that the port took arrives, so that nothing is sent twice or timed.
    #[inline]
    pub fn is_lossless(&self) -> bool {
        self.lossless
    }

    /// Whether [`transmit`](Self::transmit) has something to do other than to look at the time, as
    /// it always may have on a port that may lose frames.
    #[inline(always)]
    pub fn has_due(&self) -> bool {
        self.todo.intersects(Todo::SEND | Todo::KEEP) || self.coll_due()
    }

    /// Whether there is nothing to do at the end of a burst either: neither is anything
    /// [due](Self::has_due), nor do [answers](Self::has_answers) wait.
    #[inline(always)]
    pub fn is_at_rest(&self) -> bool {
        self.todo.is_empty() || cold(self.only_may_have())
    }

    /// [`is_at_rest`](Self::is_at_rest), if there may be something to do.
    #[inline(never)]
    fn only_may_have(&self) -> bool {
        !self.has_due() && !self.has_answers()
    }

    /// Whether something is to be looked for by time.
    #[inline(always)]
    pub fn has_timers(&self) -> bool {
        !self.wheel.is_empty()
    }

    /// Whether nothing is to be sent at `now`, which this turn has [noted](Self::tick), not even by
    /// time: then [`transmit`](Self::transmit) would do nothing.
    #[inline(always)]
    pub fn passes(&mut self, now: Instant) -> bool {
        let by_time = self.wheel.passes(now);
        by_time && ((self.todo - Todo::KEEP).is_empty() || self.passes_todo(now))
    }

    /// The rest of [`passes`](Self::passes), if there may be something to do.
    #[inline(always)]
    fn passes_todo(&mut self, now: Instant) -> bool {
        if self.todo.intersects(Todo::SEND | Todo::ANSWER | Todo::COLL) {
            cold(());
            if self.todo.intersects(Todo::SEND | Todo::ANSWER) || self.coll_wants(now) {
                return false;
            }
        }
        if self.todo.contains(Todo::ACKS) {
            if !self.acks.passes(now, self.counters.rx_frames) {
                return false;
            }
            self.todo.set(Todo::ACKS, self.acks.is_waiting());
        }
        true
    }

    /// Posts a message and sends it in the same breath, if nothing stands before it and nothing
    /// about it is out of the ordinary: as [`post_send`](Self::post_send) and then
    /// [`transmit`](Self::transmit). False if not: nothing has happened, and those two are to be
    /// called, also to learn what is wrong with the call if anything is. If it was sent, the
    /// request's memory may have gone with it.
    ///
    /// `clock` is read after the message has left, and only if somebody has to wait for the peer
    /// from then on.
    #[inline]
    pub fn try_send(
        &mut self,
        ep: EpId,
        req: &mut SendReq,
        out: &mut impl FrameSink,
        clock: impl FnOnce() -> Instant,
    ) -> bool {
        if self.lossless || self.near_max > 0 && self.is_near_dest(ep, req.dest) {
            return self.send_eager::<false, false, false>(ep, req, out, clock).is_some();
        }
        let Some(w) = self.send_eager::<true, false, false>(ep, req, out, clock) else {
            return false;
        };
        self.keep_memory_of(w, req.flags.contains(OpFlags::INJECT), &mut req.buf);
        true
    }

    /// As [`try_send`](Self::try_send), but false on a path that may lose frames, for a message
    /// with remote CQ data or of many bytes, and for one that a counter counts or nobody wants to
    /// hear of. The request's memory never goes with it, so where this is inlined, no request is
    /// ever put together.
    ///
    /// The endpoint is the caller's, who keeps it open: that is not asked. (In place of one that
    /// was closed the next sends that was opened where it stood, or none.)
    #[inline(always)]
    pub fn try_send_inline(
        &mut self,
        ep: EpId,
        req: &SendReq,
        out: &mut impl FrameSink,
        clock: impl FnOnce() -> Instant,
    ) -> bool {
        self.send_eager::<false, true, false>(ep, req, out, clock).is_some()
    }

    /// As [`try_send_inline`](Self::try_send_inline), but false also if the way to the peer was not
    /// asked for last, or if somebody has to wait for the peer from then on: so where this is
    /// inlined, there is no call over which anything would have to be kept.
    #[inline(always)]
    pub fn try_send_cached(&mut self, ep: EpId, req: &SendReq, out: &mut impl FrameSink) -> bool {
        let clock = || unreachable!("nobody begins to wait");
        self.send_eager::<false, true, true>(ep, req, out, clock).is_some()
    }

    /// All of them. What was sent is kept, if it is (`LOSSY`), in the request that this names, and
    /// its memory is still to be put there.
    #[inline(always)]
    fn send_eager<const LOSSY: bool, const INLINE: bool, const CACHED: bool>(
        &mut self,
        ep: EpId,
        req: &SendReq,
        out: &mut impl FrameSink,
        clock: impl FnOnce() -> Instant,
    ) -> Option<u32> {
        let e = ep.0.idx();
        if self.todo.contains(Todo::SEND) {
            return cold(None);
        }
        let ep = if INLINE { self.eps.at_mut(e)? } else { self.eps.by_handle_mut(ep.0)? };
        let tagged = req.kind == MsgKind::Tagged;
        let len = req.buf.len();
        let allowed = match (LOSSY, INLINE) {
            (true, _) => SEND_FLAGS_LOSSY,
            (false, false) => SEND_FLAGS,
            (false, true) => FAST_FLAGS,
        };
        let mut signaled = !req.no_completion;
        let net = (&self.avs, &self.peers);
        if INLINE {
            // What stands there for a kind that is not plain may be asked for as well; at hand,
            // that has no peer.
            let named = CACHED || req.dest != FI_ADDR_UNSPEC;
            let known = ep.route.fast_dest[usize::from(tagged)] == req.dest && named;
            let asked = req.no_completion || req.flags.contains(OpFlags::COMPLETION);
            if !known && (CACHED || !ep.find_inline_route(net, req.dest, tagged, asked)) {
                return cold(None);
            }
        } else {
            if !ep.fast_send[usize::from(tagged)] {
                cold(());
                signaled =
                    signaled && (req.flags.contains(OpFlags::COMPLETION) || !ep.tx_selective);
                if !ep.may_send[usize::from(tagged)] {
                    return None;
                }
            }
            if ep.route.dest != req.dest && !cold(ep.find_route(net, req.dest)) {
                return None;
            }
        }
        if !allowed.contains(req.flags)
            // What leaves at hand is short for the port as well.
            || CACHED && len > SHORT - EagerMsg::LEN
            || !CACHED && len > UNIT && (INLINE || len > one_max(req.flags, self.eager_max[0]))
            || LOSSY && ep.tx_used >= ep.tx_size
        {
            return cold(None);
        }
        let Some(CqTable { cq, .. }) = self.cqs.at_mut(ep.tx_cq) else { return cold(None) };
        if !cq.has_room() {
            return cold(None);
        }
        let route = &ep.route;
        let p = if CACHED { route.fast_peer[usize::from(tagged)] } else { route.peer };
        let peer = self.peers.at_mut(p)?;
        if peer.path.is_lossless() == LOSSY && (LOSSY || !planted(Bug::FarUnkept)) {
            return cold(None);
        }
        if LOSSY && (self.tx.is_full() || self.sent.is_full()) {
            return cold(None);
        }
        // The last one that may leave asks for an acknowledgement, and then there is something to
        // ask: not here, if all others can do without.
        if INLINE && peer.tx_quota <= 1 {
            return cold(None);
        }
        if CACHED && !peer.needs_no_clock(self.polled_at) {
            return cold(None);
        }
        let cost = if INLINE { 1 } else { eager_cost(peer, len)? };
        let ar = if LOSSY {
            peer.tx_quota == 1 || self.acks.asks(self.polled_at, &peer.snd, 0, true)
        } else {
            !INLINE && peer.tx_quota == 1
        };
        debug_assert!(ep.route.inc == 0 || ep.route.inc == peer.inc);
        let msg = EagerFrame { peer, src: &self.mac_word, ep, ar, req };
        // The receiver has it from here on; what follows is done meanwhile.
        let sent = match LOSSY && msg.peer.path.has_crc() {
            true => out.send_msg(&Checked::of(&msg)),
            false => out.send_msg(&msg),
        };
        if sent != Tx::Sent {
            return cold(None);
        }
        self.counters.tx_frames += 1;
        if LOSSY {
            let op = msg.op();
            let wr_flags = wr_flags(req, ep.tx_selective) | WrFlags::ALL_SENT;
            cq.reserve_free();
            ep.tx_used += 1;
            let wr = TxWr {
                tag: req.tag,
                data: req.data,
                len: len as u64,
                sent: len as u64,
                unacked: 1,
                of_peer: peer.wrs.end(),
                ..TxWr::new(
                    req.context,
                    (ep.route.peer, e),
                    (ep.route.ends[0], ep.number),
                    wr_flags,
                )
            };
            let rests = peer.snd.in_flight() == 0;
            return Some(self.record_sent(clock(), wr, op, (cost, ar, rests)));
        }
        ep.counters.sent += 1;
        ep.counters.sent_bytes += len as u64;
        if if INLINE { !req.no_completion } else { signaled } {
            let flags = CqFlags::SEND | if tagged { CqFlags::TAGGED } else { CqFlags::MSG };
            let (op_context, src) = (req.context, FI_ADDR_UNSPEC);
            if INLINE {
                cq.push_sent_free(op_context, flags);
            } else {
                cq.push_free(Cqe { op_context, flags, src, ..Cqe::default() });
            }
        }
        let cntr = ep.tx_cntr;
        peer.credit_used = peer.credit_used.wrapping_add(cost);
        peer.tx_quota -= cost as u16;
        peer.carried_ack_in_order();
        if !CACHED && peer.begins_to_wait(self.polled_at) {
            let p = ep.route.peer;
            self.wait_from(clock(), p);
        } else {
            if !CACHED {
                peer.probe_from(self.polled_at);
            }
            peer.snd.number();
        }
        if !INLINE && cntr != NONE {
            self.count(cntr, true);
        }
        Some(NONE)
    }

    /// Posts a receive for which nothing has come yet and that asks for nothing special, but to be
    /// told of its end: as [`post_recv`](Self::post_recv). False if it is another one: nothing has
    /// happened, and that is to be called. Where this is inlined, no request is ever put together.
    #[inline(always)]
    pub fn try_post_recv(&mut self, ep: EpId, req: &RecvReq) -> bool {
        self.post_recv_fast::<true>(ep, req)
    }

    /// As [`try_post_recv`](Self::try_post_recv), but false also if the endpoint has no room for it
    /// yet: so where this is inlined, there is no call over which anything would have to be kept.
    /// That the endpoint is open is not asked, as in [`try_send_inline`](Self::try_send_inline).
    #[inline(always)]
    pub fn try_post_recv_reserved(&mut self, ep: EpId, req: &RecvReq) -> bool {
        self.post_recv_fast::<false>(ep, req)
    }

    #[inline(always)]
    fn post_recv_fast<const RESERVE: bool>(&mut self, ep: EpId, req: &RecvReq) -> bool {
        let (e, kind) = (ep.0.idx(), req.kind as usize);
        let ep = if RESERVE { self.eps.by_handle_mut(ep.0) } else { self.eps.at_mut(e) };
        let Some(ep) = ep else { return cold(false) };
        if req.flags.symmetric_difference(OpFlags::COMPLETION).intersects(ep.rx_slow_flags)
            || req.src != FI_ADDR_UNSPEC
            || req.ignore != 0
        {
            return cold(false);
        }
        if ep.rx_reserved[kind] == 0 && !(RESERVE && ep.reserve_receives(&mut self.cqs, kind)) {
            return cold(false);
        }
        let Some(buf) = req.buf.as_one() else { return cold(false) };
        let tagged = req.kind == MsgKind::Tagged;
        let make = |wr: &mut RecvWr| wr.set_simple(e, tagged, req.context, buf.again());
        if ep.matcher[kind].post_simple(&mut self.posted, req.tag, make).is_none() {
            return cold(false);
        }
        ep.rx_reserved[kind] -= 1;
        true
    }

    /// The first packet of a flight has left: numbers it, and the peer's silence counts from now.
    ///
    /// A timer that is armed is never too late on a port that loses nothing: what is due moves on
    /// only.
    pub(super) fn wait_from(&mut self, now: Instant, p: u32) {
        self.tick(now);
        self.begin_to_wait(now, p);
        let peer = &mut self.peers[p];
        peer.probe_at = now;
        peer.snd.number();
        if peer.timer_at == Instant(u64::MAX) {
            self.arm_timer(now, p);
        }
    }

    /// Keeps a message that has just left, to be sent again, and says in which request, which is
    /// linked to the last one of the peer. `rests` if nothing else is in flight.
    #[inline(always)]
    fn record_sent(
        &mut self,
        now: Instant,
        wr: TxWr,
        msg: MsgOp,
        (cost, ar, rests): (u32, bool, bool),
    ) -> u32 {
        let (p, len) = (wr.peer, wr.len as u32);
        if rests {
            self.tick(now);
        }
        let early = wr.flags.contains(WrFlags::EARLY);
        let w = self.alloc_wr(wr);
        let mut op = [0; sent::OP_MAX];
        let op_len = msg.emit(&mut op);
        let op = (&op, op_len);
        self.observed.tallies[p as usize].tx_bytes +=
            u64::from(len) + (BASE_LEN + op.1 + TRAILER_LEN) as u64;
        let peer = &mut self.peers[p];
        if rests {
            peer.begin_to_wait(now);
            peer.probe_at = now;
        }
        let psn = peer.snd.number();
        peer.credit_used = peer.credit_used.wrapping_add(cost);
        peer.tx_quota -= cost.min(u32::from(peer.tx_quota)) as u16;
        peer.carried_ack_in_order();
        peer.wrs.add(&mut self.tx, w);
        let first = peer.snd.is_empty();
        let body = BodyRef::Wr { wr: w, offset: 0, len };
        let sent = Sent { units: cost, ..Sent::new(psn, Ty::Msg, op, body, w, now) };
        peer.snd.keep(&mut self.sent, sent);
        self.acks.left(&mut self.todo, p, peer, ar);
        if first {
            peer.begin_flight(now);
            // Most often the wheel will call in time anyhow, for what was sent before.
            let timer_at = peer.timer_at;
            let patience = || self.patience(&self.peers[p]).min(self.settings.t_dead_ns / 10);
            if timer_at > now + self.patience_min() && timer_at > now + patience() {
                self.arm_timer(now, p);
            }
        }
        if early {
            self.report_wr(w);
        }
        w
    }

    /// Takes any frame, where they may be lost.
    #[inline(never)]
    pub(super) fn on_frame_lossy(&mut self, now: Instant, frame: &RxFrame<'_>) {
        let crc = self.has_crc();
        let taken = match EagerMsg::is_kind_of(frame, crc) {
            true => self.rx_eager::<true>(now, frame),
            false => self.rx_ack(now, frame, crc),
        };
        if !taken {
            self.on_frame_slow(now, frame);
        }
    }

    /// Takes a frame that holds a whole message which is next in order and has a receive. False if
    /// it holds anything else: nothing has happened.
    #[inline(always)]
    pub(super) fn rx_eager<const LOSSY: bool>(
        &mut self,
        now: Instant,
        frame: &RxFrame<'_>,
    ) -> bool {
        let crc = LOSSY && self.has_crc();
        let Some((head, msg)) = EagerMsg::parse(frame, crc) else { return cold(false) };
        let p = slot_of(msg.dst_sid);
        let Some(peer) = self.peers.at_mut(p) else { return cold(false) };
        if !is_next(peer, self.mac_word, (&head, &msg))
            || if LOSSY { peer.path.is_lossless() } else { head.asks_ack() }
        {
            return cold(false);
        }
        let Some((acked, granted)) = note_ack_and_credit::<LOSSY>(peer, msg.cack, msg.grant) else {
            return cold(false);
        };
        let e = self.numbers.at[usize::from(msg.op.dst_ep)];
        let Some(ep) = self.eps.at_mut(e) else { return cold(false) };
        let MsgOp { src_ep, tagged, tag, imm, .. } = msg.op;
        let cost = units(u64::from(msg.plen));
        let left = peer.outstanding();
        if left < cost {
            return cold(false);
        }
        let ack_every = if LOSSY { ACK_EVERY } else { ACK_EVERY_LOSSLESS };
        let ack = peer.owed >= ack_every - 1;
        let owes = ack || left - cost < peer.low() || !self.block_waiters.is_empty();
        let matcher = &mut ep.matcher[usize::from(tagged)];
        let len = usize::from(msg.plen);
        // What does not fit ends on the slow path.
        let found = matcher.take_first(
            &mut self.posted,
            || Src::of(p, src_ep),
            tag,
            |wr| (len <= wr.buf.len() && (!crc || msg.verify(frame))).then(|| wr.buf.again()),
        );
        let Some((buf, posted)) = found else { return cold(false) };
        frame.copy_to_span(EagerMsg::LEN + imm.map_or(0, |_| IMM_LEN), &buf, len);
        peer.consumed = peer.consumed.wrapping_add(cost);
        peer.last_rx = self.polled_at;
        peer.probes = 0;
        if LOSSY {
            peer.snd.credit = peer.snd.credit.wrapping_add(u32::from(granted));
            peer.rx_quota = 0;
            peer.note_arrival(now, msg.psn, false);
            self.observed.tallies[p as usize].rx_bytes += frame.len() as u64;
            self.acks.soon |= head.asks_ack();
        }
        peer.rcv_nxt = peer.rcv_nxt.next();
        peer.owed = peer.owed.saturating_add(1);
        self.blocks_unpromised += if planted(Bug::CreditNotReturned) { 0 } else { cost as usize };
        let flags = CqFlags::RECV | if tagged { CqFlags::TAGGED } else { CqFlags::MSG };
        let placed = PlacedMsg { posted, flags, len, imm };
        complete_eager((ep, peer), (&self.avs, &mut self.cqs), || src_ep, placed, NoReader);
        if LOSSY {
            self.acks.owe(&mut self.todo, now, (p, peer.owed));
            if acked != 0 {
                self.on_cack(now, p, msg.cack, true);
            }
        }
        if owes {
            self.after_eager(now, p, ack);
        }
        if !LOSSY {
            let peer = &mut self.peers[p];
            peer.rx_quota = peer.rx_room(ack_every);
        }
        true
    }

    /// As [`rx_eager`](Self::rx_eager) on a port that loses nothing, for a frame that holds
    /// what nearly every one does (see [`EagerTaggedView`]) and leaves us owing its sender nothing.
    /// Each field is read where it is asked for, so that none has to be kept for later.
    #[inline(always)]
    pub(super) fn rx_eager_tagged(&mut self, frame: RxFrame<'_>, reader: impl Reader) -> bool {
        let Some(msg) = EagerTaggedView::of(&frame) else { return cold(false) };
        let sid_psn = msg.sid_psn();
        let Some(peer) = self.peers.at_mut(slot_of(sid_psn as u32)) else { return cold(false) };
        if peer.rx_quota == 0 && !peer.refill_rx_quota()
            || (msg.dst() ^ self.mac_word) << 16 != 0
            || msg.src() != peer.mac_word
            // In one, as the compiler makes more of two.
            || (sid_psn ^ peer.next_sid_psn()) as usize | self.block_waiters.len() != 0
        {
            return cold(false);
        }
        debug_assert!(peer.in_order && peer.is_in_order() || is_planted());
        if (msg.ack_credit() ^ peer.snd.ack_credit()) << 16 != 0
            && note_ack_and_credit::<false>(peer, msg.cack(), msg.grant()).is_none()
        {
            return cold(false);
        }
        let e = self.numbers.at[usize::from(msg.dst_ep())];
        let Some(ep) = self.eps.at_mut(e) else { return cold(false) };
        let matcher = &mut ep.matcher[usize::from(EagerTaggedView::TAGGED)];
        let len = msg.plen;
        // What does not fit ends on the slow path.
        let found = matcher.take_first(
            &mut self.posted,
            || Src::of(peer.slot(), msg.src_ep()),
            msg.tag(),
            |wr| (len <= wr.buf.len()).then(|| wr.buf.again()),
        );
        let Some((buf, posted)) = found else { return cold(false) };
        frame.copy_to_span(EagerMsg::LEN, &buf, len);
        peer.consumed = peer.consumed.wrapping_add(1);
        peer.rx_quota -= 1;
        peer.owed += 1;
        peer.last_rx = self.polled_at;
        debug_assert!(peer.probes == 0 || is_planted());
        peer.rcv_nxt = peer.rcv_nxt.next();
        self.blocks_unpromised += usize::from(!planted(Bug::CreditNotReturned));
        let flags = CqFlags::RECV | CqFlags::TAGGED;
        let placed = PlacedMsg { posted, flags, len, imm: None };
        complete_eager((ep, peer), (&self.avs, &mut self.cqs), || msg.src_ep(), placed, reader);
        true
    }

    /// What a message makes us owe to its sender.
    #[cold]
    fn after_eager(&mut self, now: Instant, p: u32, ack: bool) {
        self.regrant(now, p);
        if ack {
            self.peers[p].ack_now = true;
            self.make_ready(p);
        }
    }
}

/// A message of the fast path that has been placed.
pub(super) struct PlacedMsg<'a> {
    /// Its receive, which has been given up.
    pub(super) posted: &'a Posted<RecvWr>,
    pub(super) flags: CqFlags,
    pub(super) len: usize,
    pub(super) imm: Option<u64>,
}

impl PlacedMsg<'_> {
    /// Its completion. Most of it stands with the receive and is read there when it is written, so
    /// that nothing has to be kept until then.
    #[inline(always)]
    fn cqe(&self, src: FiAddr) -> Cqe {
        let mut flags = self.flags;
        flags.set(CqFlags::REMOTE_CQ_DATA, self.imm.is_some());
        let Posted { tag, payload: RecvWr { context, .. }, .. } = *self.posted;
        let (len, data) = (self.len as u64, self.imm.unwrap_or(0));
        Cqe { op_context: context, flags, len, buf: 0, data, tag, src }
    }
}

/// Counts a message of the fast path that has been placed, whose receive has been given up; writes
/// its completion, with the name of its sender, which is endpoint `src_ep` of the peer.
///
/// It goes to `reader`, if it is for him and the endpoint has room for another receive in advance:
/// then it has that of this one as well.
#[inline(always)]
pub(super) fn complete_eager(
    (ep, peer): (&mut Ep, &mut Peer),
    (avs, cqs): (&Slab<AvTable>, &mut Table<CqTable>),
    src_ep: impl FnOnce() -> u16,
    placed: PlacedMsg<'_>,
    reader: impl Reader,
) {
    // That it is one more says the matcher ([`Ep::received`]).
    ep.counters.received_bytes += placed.len as u64;
    let left = &mut ep.rx_reserved[usize::from(placed.flags.contains(CqFlags::TAGGED))];
    if reader.reads(ep.rx_cq) && may_reserve_more(*left) {
        debug_assert!(cqs[ep.rx_cq].cq.is_empty(), "what is in the queue comes first");
        *left += 1;
        let src = source((ep, peer), avs, src_ep);
        return reader.take(&placed.cqe(src));
    }
    ep.rx_used -= 1;
    let queue = cqs.at_mut(ep.rx_cq).expect("what was posted has a queue");
    queue.cq.push(placed.cqe(source((ep, peer), avs, src_ep)));
}

/// What endpoint `src_ep` of the peer is called, for who wants to know.
#[inline(always)]
fn source(
    (ep, peer): (&Ep, &mut Peer),
    avs: &Slab<AvTable>,
    src_ep: impl FnOnce() -> u16,
) -> FiAddr {
    if !ep.caps.contains(Caps::SOURCE) {
        return FI_ADDR_UNSPEC;
    }
    let p = peer.slot();
    peer.source.of((ep.av, avs), p, src_ep())
}

/// Longest message with `flags` that leaves in one frame unasked.
#[inline]
fn one_max(flags: OpFlags, eager_one: usize) -> usize {
    if flags.contains(OpFlags::INJECT) { Node::INJECT_SIZE } else { eager_one }
}

impl Ep {
    /// Finds the way to `dest`. False also if it names a context, which fast paths do not, or a
    /// life of the peer that is not the one we deal with.
    #[cold]
    #[inline(never)]
    pub(super) fn find_route(
        &mut self,
        (avs, peers): (&Slab<AvTable>, &Peers),
        dest: FiAddr,
    ) -> bool {
        let entry = avs.get(self.av).and_then(|table| table.av.lookup(dest));
        let Some(entry) = entry.filter(|entry| entry.rx_ctx == 0) else { return false };
        let (peer, ep, inc) = (entry.peer, entry.ep, entry.incarnation);
        if inc != 0 && peers.get(peer).is_none_or(|peer| peer.inc != inc) {
            return false;
        }
        let fast_dest = self.fast_send.map(|fast| if fast { dest } else { FI_ADDR_UNSPEC });
        let fast_peer = self.fast_send.map(|fast| if fast { peer } else { NONE });
        self.route = Route { dest, peer, ends: [ep, self.number], inc, fast_dest, fast_peer };
        true
    }

    /// Whether a message goes the way of most, and the way to `dest` is known from now on: it is
    /// told of or nobody wants to hear of it (`asked`, if the endpoint tells on demand), and it is
    /// not counted.
    #[cold]
    #[inline(never)]
    fn find_inline_route(
        &mut self,
        net: (&Slab<AvTable>, &Peers),
        dest: FiAddr,
        tagged: bool,
        asked: bool,
    ) -> bool {
        self.may_send[usize::from(tagged)]
            && self.tx_cntr == NONE
            && (asked || !self.tx_selective)
            && (self.route.dest == dest || self.find_route(net, dest))
    }
}

/// A message that is about to leave. Looked at when it is written, so that until then nothing of
/// it stands in a register.
struct EagerFrame<'a> {
    peer: &'a Peer,
    /// This node, as [`mac_word`](crate::wire::mac_word) has it.
    src: &'a u64,
    /// The endpoint that it leaves from, which knows the way.
    ep: &'a Ep,
    /// It asks for an acknowledgement.
    ar: bool,
    req: &'a SendReq,
}

impl EagerFrame<'_> {
    #[inline(always)]
    fn op(&self) -> MsgOp {
        let tagged = self.req.kind == MsgKind::Tagged;
        let ([dst_ep, src_ep], tag) = (self.ep.route.ends, self.req.tag);
        MsgOp { dst_ep, rx_ctx: 0, src_ep, tagged, imm: self.imm(), tag, len: 0 }
    }
}

impl Message for EagerFrame<'_> {
    #[inline(always)]
    fn head(&self) -> FrameHead {
        FrameHead::between(self.peer.mac_word, *self.src, false)
    }

    #[inline(always)]
    fn ar(&self) -> bool {
        self.ar
    }

    #[inline(always)]
    fn imm(&self) -> Option<u64> {
        self.req.flags.contains(OpFlags::REMOTE_CQ_DATA).then_some(self.req.data)
    }

    #[inline(always)]
    fn msg(&self) -> EagerMsg {
        let peer = self.peer;
        EagerMsg {
            dst_sid: peer.remote_sid,
            psn: peer.snd.nxt,
            cack: peer.rcv_nxt,
            grant: peer.granted as u16,
            plen: self.req.buf.len() as u16,
            op: self.op(),
        }
    }

    #[inline(always)]
    fn body(&self) -> &IoBuf {
        &self.req.buf
    }
}

/// A message that leaves with a checksum.
struct Checked<'a> {
    msg: &'a EagerFrame<'a>,
    /// What was summed up is what is sent.
    head: [u8; EagerMsg::LEN_MAX],
    crc: u32,
}

impl<'a> Checked<'a> {
    #[inline(always)]
    fn of(msg: &'a EagerFrame<'a>) -> Self {
        let start = FrameHead::between(msg.peer.mac_word, *msg.src, true);
        let (head, len) = msg.msg().emit(&start, msg.ar());
        let body = Body::Io { buf: msg.body(), offset: 0, len: msg.body().len() };
        let crc = body.crc32c(wire::crc_of_head(&head[..len]));
        Self { msg, head, crc }
    }
}

impl Message for Checked<'_> {
    #[inline(always)]
    fn head(&self) -> FrameHead {
        FrameHead::between(self.msg.peer.mac_word, *self.msg.src, true)
    }

    #[inline(always)]
    fn crc(&self) -> Option<u32> {
        Some(self.crc)
    }

    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        if let Some(head) = self.head.first_chunk::<{ EagerMsg::LEN }>() {
            out.set::<0, { EagerMsg::LEN }>(*head);
        }
    }

    #[inline(always)]
    fn ar(&self) -> bool {
        self.msg.ar()
    }

    #[inline(always)]
    fn imm(&self) -> Option<u64> {
        self.msg.imm()
    }

    #[inline(always)]
    fn msg(&self) -> EagerMsg {
        self.msg.msg()
    }

    #[inline(always)]
    fn body(&self) -> &IoBuf {
        self.msg.body()
    }
}

/// The credits that a message of `len` bytes costs, if it may leave in one frame now.
#[inline(always)]
pub(super) fn eager_cost(peer: &mut Peer, len: usize) -> Option<u32> {
    let mut cost = 1;
    // Of the last one that may leave, too: what has been acknowledged since makes room.
    if len > UNIT || peer.tx_quota <= 1 {
        cost = units(len as u64);
        peer.tx_quota = peer.tx_room();
        let holds = EagerMsg::AROUND_MAX + len <= peer.frame_max as usize + ETH_HDR_LEN;
        if u32::from(peer.tx_quota) < cost || !holds {
            return None;
        }
    }
    debug_assert!(u32::from(peer.tx_room()) >= cost || is_planted());
    Some(cost)
}

/// Whether a message is the next from `peer`, and for us, who are `word`.
#[inline(always)]
fn is_next(peer: &Peer, own: u64, (head, msg): (&FrameHead, &EagerMsg)) -> bool {
    debug_assert!(!peer.in_order || peer.is_in_order() || is_planted());
    peer.in_order
        && (head.dst ^ own) << 16 == 0
        && head.src == peer.mac_word
        && msg.dst_sid == peer.sid
        && msg.psn == peer.rcv_nxt
}

/// What a message acknowledges and grants, if nobody waits for it. That is noted, since it is true
/// whatever becomes of the message, unless its bytes are not (`LOSSY`).
#[inline(always)]
fn note_ack_and_credit<const LOSSY: bool>(
    peer: &mut Peer,
    cack: Psn,
    grant: u16,
) -> Option<(u32, u16)> {
    let acked = cack.0.wrapping_sub(peer.snd.una.0);
    let granted = grant.wrapping_sub(peer.snd.credit as u16);
    if (acked != 0 || granted != 0) && !is_unawaited::<LOSSY>(peer, acked, granted) {
        return None;
    }
    if !LOSSY {
        peer.snd.una = cack;
        peer.snd.credit = peer.snd.credit.wrapping_add(u32::from(granted));
    }
    Some((acked, granted))
}

/// Whether nothing waits to be sent for what a packet acknowledges and grants, no packet is kept
/// (`LOSSY`: but those that are kept anyhow), and it can be true.
#[inline(always)]
pub(super) fn is_unawaited<const LOSSY: bool>(peer: &Peer, acked: u32, granted: u16) -> bool {
    let kept = !peer.snd.is_empty() || peer.last_unacked != Peer::NO_OP;
    let waited_for = peer.any_waits() || !LOSSY && kept;
    !waited_for && acked <= peer.snd.in_flight() && granted < 1 << 15
}
