//! The fast path of eager messages, which nearly every message takes.
//!
//! A message leaves in the call that posts it if nothing is queued before it. A received message is
//! placed at once if it is next in order and its receive is posted and large enough. Both functions
//! check everything first and change nothing unless every check passes; otherwise the slow path
//! (`post`, `input`) starts from the beginning and handles every case. Both paths have the same
//! effect, with one exception: a send without a record does not count against `tx_size`.
//!
//! On a lossless path a send keeps no record, since nothing is ever retransmitted. On a lossy path
//! (`LOSSY`) it makes the same records as the slow path, so recovery, refusals and a dying peer
//! find what they expect, and the send completes when it is acknowledged.

use barewire_driver::frame::{Body, RxFrame};
use barewire_driver::hint::cold;
use barewire_driver::mem::{IoBuf, SHORT};
use barewire_driver::port::Tx;

use super::ep::{Ep, may_reserve_more};
use super::ops::{RecvWr, TxWr, WrFlags};
use super::output::PACK_MSG_MAX;
use super::peer::{ACK_EVERY, ACK_EVERY_LOSSLESS, Peer, Peers, slot_of};
use super::post::wr_flags;
use super::route::Route;
use super::{
    Avs, CqTable, Cqs, DynSink, EpId, FrameSink, Message, MsgKind, NoReader, Node, Objects, Reader,
    Receives, RecvReq, SendReq, Todo,
};
use crate::cntr::Done;
use crate::cq::Cq;
use crate::flags::{Caps, CqFlags, OpFlags};
use crate::idx::{CntrIdx, CqIdx, EpIdx, PeerIdx, TxIdx};
use crate::plant::{Bug, is_planted, planted};
use crate::proto::blocks::{UNIT, units};
use crate::proto::matching::Posted;
use crate::rel::sent::{self, BodyRef, Sent};
use crate::types::{Cqe, FI_ADDR_UNSPEC, FiAddr, Instant};
use crate::wire::{
    self, BASE_LEN, EagerMsg, EagerTaggedView, FrameHead, HeadOut, IMM_LEN, MsgOp, Ty,
};

/// Flags that are ignored for an operation that leaves in the call that posts it.
pub(super) const FAST_FLAGS: OpFlags = OpFlags::MORE
    .union(OpFlags::COMPLETION)
    .union(OpFlags::INJECT)
    .union(OpFlags::INJECT_COMPLETE)
    .union(OpFlags::TRANSMIT_COMPLETE);

/// Flags that a send on a lossless path may carry. `FI_MORE` is ignored: it allows messages to be
/// held back and packed, which pays only where a frame costs more than a copy to memory.
const SEND_FLAGS: OpFlags = FAST_FLAGS.union(OpFlags::REMOTE_CQ_DATA);

/// Flags that a send on a lossy path may carry. `FI_MORE` takes the slow path: there packing pays.
const SEND_FLAGS_LOSSY: OpFlags =
    SEND_FLAGS.difference(OpFlags::MORE).union(OpFlags::DELIVERY_COMPLETE);

/// `try_send_cached` charges one credit without checking the length.
const _: () = assert!(SHORT - EagerMsg::LEN <= UNIT);

/// Variants of the fast path of sends.
trait EagerSend {
    /// The path may lose the frame, which is kept until it is acknowledged.
    const LOSSY: bool = false;
    /// The limits of [`Node::try_send_inline`].
    const INLINE: bool = false;
    /// The limits of [`Node::try_send_cached`].
    const CACHED: bool = false;
    /// Permitted flags.
    const FLAGS: OpFlags;
}

/// [`Node::try_send`] on a path that may lose frames.
enum Lossy {}
/// [`Node::try_send`] on a lossless path.
enum Lossless {}
/// [`Node::try_send_inline`].
enum Inline {}
/// [`Node::try_send_cached`].
enum Cached {}

impl EagerSend for Lossy {
    const LOSSY: bool = true;
    const FLAGS: OpFlags = SEND_FLAGS_LOSSY;
}

impl EagerSend for Lossless {
    const FLAGS: OpFlags = SEND_FLAGS;
}

impl EagerSend for Inline {
    const INLINE: bool = true;
    const FLAGS: OpFlags = FAST_FLAGS;
}

impl EagerSend for Cached {
    const INLINE: bool = true;
    const CACHED: bool = true;
    const FLAGS: OpFlags = FAST_FLAGS;
}

impl Node {
    /// Whether the port is lossless: every frame that it accepts arrives, so nothing is
    /// retransmitted and no timer runs for it.
    #[inline]
    pub fn is_lossless(&self) -> bool {
        self.port.lossless
    }

    /// Whether [`transmit`](Self::transmit) may have something to send, timers not counted. Always
    /// true on a port that may lose frames: acknowledgements may be due.
    #[inline(always)]
    pub fn has_due(&self) -> bool {
        self.due.todo.intersects(Todo::SEND | Todo::KEEP | Todo::ROOM)
            || self.coll.is_due(&self.cqs)
    }

    /// Whether a collective that was just posted has something to send.
    #[inline(always)]
    pub fn calls_are_due(&self) -> bool {
        self.due.todo.contains(Todo::SEND) || self.coll.has_work()
    }

    /// Whether no work is left at the end of a burst: nothing is [due](Self::has_due), and no
    /// [answers](Self::has_answers) wait.
    #[inline(always)]
    pub fn is_at_rest(&self) -> bool {
        self.due.todo.is_empty() || !self.coll.has_calls_on_boards() && cold(self.is_at_rest_slow())
    }

    /// The slow part of [`is_at_rest`](Self::is_at_rest), for a `todo` word with a bit set and no
    /// call through a board in progress.
    #[inline(never)]
    fn is_at_rest_slow(&self) -> bool {
        !self.has_due() && !self.has_answers()
    }

    /// Whether a timer is armed, or something else depends on time.
    #[inline(always)]
    pub fn has_timers(&self) -> bool {
        !self.wheel.is_empty() || self.coll.has_calls_on_boards()
    }

    /// Whether [`transmit`](Self::transmit) would do nothing at `now`, timers included. This turn
    /// has [noted](super::Turn::tick) `now`.
    #[inline(always)]
    pub fn passes(&mut self, now: Instant) -> bool {
        let by_time = self.wheel.passes(now);
        by_time && ((self.due.todo - Todo::KEEP).is_empty() || self.passes_slow(now))
    }

    /// The slow part of [`passes`](Self::passes), for a `todo` word with a bit set.
    #[inline(always)]
    fn passes_slow(&mut self, now: Instant) -> bool {
        if self.due.todo.intersects(Todo::SEND | Todo::ANSWER | Todo::COLL | Todo::ROOM) {
            cold(());
            let sends = self.due.todo.intersects(Todo::SEND | Todo::ANSWER);
            if sends
                || self.coll.wants(now, &self.cqs)
                || self.objects().starved_with_room().is_some()
            {
                return false;
            }
        }
        if self.due.todo.contains(Todo::HELD) && self.packs.hold_is_over(now) {
            return false;
        }
        if self.due.todo.contains(Todo::ACKS) {
            if self.acks.has_quick_sent() {
                self.acks.judge_quick_ack(&mut self.peers, now);
            }
            if !self.acks.has_nothing_due(now, self.counters.rx_frames) {
                return false;
            }
            self.due.todo.set(Todo::ACKS, self.acks.is_waiting());
        }
        true
    }

    /// Posts a message and sends it in the same call: [`post_send`](Self::post_send) and
    /// [`transmit`](Self::transmit) in one. Only if nothing is queued before it and the endpoint,
    /// the flags and the length suit the fast path. True: it was sent, and on a lossy path the
    /// request's memory was taken. False: nothing has changed; call `post_send`, which also returns
    /// the error of an invalid request.
    ///
    /// `clock` is read before the message leaves on a lossy path, where its round trip is measured;
    /// on a lossless path after the message has left, and only if the peer's silence counts from
    /// then on.
    #[inline]
    pub fn try_send(
        &mut self,
        ep: EpId,
        req: &mut SendReq,
        out: &mut impl FrameSink,
        clock: impl Fn() -> Instant,
    ) -> bool {
        if self.port.lossless || self.port.near_max > 0 && self.is_near_dest(ep, req.dest) {
            return self.send_eager::<Lossless>(ep, req, out, clock).is_some();
        }
        let sent = if self.openings.seals.is_some() {
            self.through_seals(out, |node, out| {
                node.send_eager::<Lossy>(ep, req, &mut DynSink(out), clock)
            })
        } else {
            self.send_eager::<Lossy>(ep, req, out, clock)
        };
        let Some(w) = sent else { return false };
        self.tx.keep_memory_of(w, req.flags.contains(OpFlags::INJECT), &mut req.buf);
        true
    }

    /// As [`try_send`](Self::try_send), and false also on a lossy path, for more than one credit's
    /// worth of bytes, with remote CQ data, if a counter counts the endpoint's sends, and under
    /// selective completion without `COMPLETION`. (A call that never writes a completion may be
    /// sent.) The request's memory is never taken, so where this is inlined no request is built.
    ///
    /// The generation of `ep` is NOT checked: the caller keeps the endpoint open. A stale id sends
    /// from the endpoint that reused the slot, or is refused if the slot is free.
    #[inline(always)]
    pub fn try_send_inline(
        &mut self,
        ep: EpId,
        req: &SendReq,
        out: &mut impl FrameSink,
        clock: impl Fn() -> Instant,
    ) -> bool {
        self.send_eager::<Inline>(ep, req, out, clock).is_some()
    }

    /// As [`try_send_inline`](Self::try_send_inline), and false also if `dest` is not the
    /// destination whose route the endpoint has cached, or if the peer's silence would count from
    /// now on. Where this is inlined it makes no call, so no register is saved over one.
    #[inline(always)]
    pub fn try_send_cached(&mut self, ep: EpId, req: &SendReq, out: &mut impl FrameSink) -> bool {
        let clock = || unreachable!("no silence begins to count");
        self.send_eager::<Cached>(ep, req, out, clock).is_some()
    }

    /// The body of all variants. Returns the request that keeps the message ([`EagerSend::LOSSY`]),
    /// in which the caller has to store the memory, or [`TxIdx::NONE`]. `None`: nothing has
    /// changed.
    #[inline(always)]
    fn send_eager<S: EagerSend>(
        &mut self,
        ep: EpId,
        req: &SendReq,
        out: &mut impl FrameSink,
        clock: impl Fn() -> Instant,
    ) -> Option<TxIdx> {
        let e = ep.0.idx();
        if self.due.todo.contains(Todo::SEND) {
            return cold(None);
        }
        let ep = if S::INLINE { self.eps.at_mut(e)? } else { self.eps.by_handle_mut(ep.0)? };
        let completes = ep.admit_eager::<S>((&self.avs, &self.peers), req)?;
        let len = req.buf.len();
        if !S::CACHED && len > UNIT && (S::INLINE || len > one_max(req.flags, self.eager_max[0])) {
            return cold(None);
        }
        let Some(CqTable { cq, .. }) = self.cqs.at_mut(ep.tx_cq) else { return cold(None) };
        if !cq.has_room() {
            return cold(None);
        }
        let kind = req.kind as usize;
        let p = if S::CACHED { ep.route.fast_peer[kind] } else { ep.route.peer };
        let peer = self.peers.at_mut(p)?;
        let is_small = len as u64 <= PACK_MSG_MAX;
        let is_held = S::LOSSY && is_small && self.packs.nagle.wants(p, peer.snd.in_flight());
        if is_held || S::LOSSY && (self.tx.is_full() || self.sent.is_full()) {
            return cold(None);
        }
        let cost = peer.admit_eager::<S>(self.turn.polled_at, len)?;
        let uses_up = !S::INLINE && peer.tx_quota == 1;
        let ar =
            uses_up || S::LOSSY && self.acks.requests_ar(self.turn.polled_at, &peer.snd, 0, true);
        debug_assert!(ep.route.inc == 0 || ep.route.inc == peer.inc);
        // Read before the frame leaves: a round trip includes the kernel's part of it, and a kernel
        // port may have delivered the frame when the call returns.
        let left_at = if S::LOSSY { clock() } else { Instant(0) };
        let msg = EagerFrame { peer, src: &self.port.addr, ep, ar, req };
        // The receiver has the message from here on; the accounting overlaps with its work.
        let sent = match S::LOSSY && msg.peer.path.has_crc() {
            true => out.send_msg(&ChecksummedFrame::of(&msg)),
            false => out.send_msg(&msg),
        };
        if sent != Tx::Sent {
            return cold(None);
        }
        self.counters.tx_frames += 1;
        if S::LOSSY {
            self.packs.nagle.note_message(p);
            let (op, rests) = (msg.op(), peer.snd.in_flight() == 0);
            let wr = kept_wr((ep, e), cq, peer, req);
            return Some(self.record_sent(left_at, wr, op, (cost, ar, rests)));
        }
        ep.count_sent::<S>(cq, req, completes);
        let cntr = ep.tx_cntr;
        peer.charge(cost);
        if S::CACHED {
            peer.snd.number();
        } else if !peer.number_by_turn(self.turn.polled_at) {
            let p = ep.route.peer;
            self.wait_from(clock(), p);
        }
        if !S::INLINE && cntr != CntrIdx::NONE {
            self.cntrs.count(cntr, Done::one(req.buf.len() as u64));
        }
        Some(TxIdx::NONE)
    }

    /// Starts to count the peer's silence at `now`: the first packet of a flight has just left.
    ///
    /// An armed timer need not be set again: on a lossless path deadlines only move later.
    pub(super) fn wait_from(&mut self, now: Instant, p: PeerIdx) {
        self.turn.tick(now);
        self.peers[p].begin_to_wait(now);
        let peer = &mut self.peers[p];
        peer.probe_at = now;
        peer.snd.number();
        if peer.timer_at == Instant(u64::MAX) {
            self.control().arm_timer(now, p);
        }
    }

    /// Creates the records of a message that has just left, for its retransmission. Returns its
    /// request.
    #[inline(always)]
    fn record_sent(
        &mut self,
        now: Instant,
        wr: TxWr,
        msg: MsgOp,
        (cost, ar, rests): (u32, bool, bool),
    ) -> TxIdx {
        let (p, len) = (wr.peer, wr.len as u32);
        if rests {
            self.turn.tick(now);
        }
        let early = wr.flags.contains(WrFlags::EARLY);
        let w = self.tx.alloc(wr);
        let mut op = [0; sent::RELIABLE_OP_MAX];
        let op_len = msg.emit(&mut op);
        let op = (&op, op_len);
        self.observed.tallies[p.at()].tx_bytes +=
            u64::from(len) + (BASE_LEN + op.1 + self.peers[p].path.trailer_len()) as u64;
        let peer = &mut self.peers[p];
        if rests {
            peer.begin_to_wait(now);
        }
        peer.charge(cost);
        peer.wrs.add(&mut self.tx, w);
        let first = peer.snd.is_empty();
        let body = BodyRef::Wr { wr: w, offset: 0, len };
        let record = |psn| Sent { units: cost, ..Sent::new(psn, Ty::Msg, op, body, w, now) };
        peer.number_and_keep(now, &mut self.sent, record);
        self.acks.note_sent(&mut self.due.todo, p, peer, ar);
        if first {
            // Usually the timer of an earlier packet expires early enough.
            let timer_at = peer.timer_at;
            let patience =
                || self.peers[p].patience(self.port.rto_floor_ns).min(self.settings.t_dead_ns / 10);
            if timer_at > now + self.port.patience_min() && timer_at > now + patience() {
                self.control().arm_timer(now, p);
            }
        }
        if early {
            self.operations().report_wr(w);
        }
        w
    }

    /// Processes any frame on a lossy port.
    #[inline(always)]
    pub(super) fn on_frame_lossy(&mut self, now: Instant, frame: &RxFrame<'_>) {
        if self.port.far.is_sealed() {
            return self.on_frame_secured(now, frame);
        }
        if frame.is_marked() {
            self.note_mark(now, frame);
        }
        self.on_frame_plain(now, frame);
    }

    /// Processes a frame on a lossy port; a sealed frame has been opened.
    #[inline(never)]
    pub(super) fn on_frame_plain(&mut self, now: Instant, frame: &RxFrame<'_>) {
        let crc = self.port.far.has_crc();
        let taken = match EagerMsg::is_kind_of(frame, crc) {
            true => self.rx_eager::<true>(now, frame),
            false => self.rx_ack(now, frame, crc),
        };
        if !taken {
            self.on_frame_slow(now, frame);
        }
    }

    /// Processes a frame that holds a whole message, if the message is next in order and its
    /// receive is posted. False otherwise: nothing has changed, except an acknowledgement and
    /// credit that are noted on a lossless path, as these are valid whatever happens to the
    /// message.
    #[inline(always)]
    pub(super) fn rx_eager<const LOSSY: bool>(
        &mut self,
        now: Instant,
        frame: &RxFrame<'_>,
    ) -> bool {
        let crc = LOSSY && self.port.far.has_crc();
        let Some((head, msg)) = EagerMsg::parse(frame, crc) else { return cold(false) };
        let p = slot_of(msg.dst_sid);
        let Some(peer) = self.peers.at_mut(p) else { return cold(false) };
        if !peer.is_next(self.port.addr, &head, msg.sid_psn())
            || if LOSSY { peer.path.is_lossless() } else { head.asks_ack() }
        {
            return cold(false);
        }
        let Some((acked, granted)) = peer.note_unawaited::<LOSSY>(msg.cack, msg.grant) else {
            return cold(false);
        };
        let e = self.eps.slot(msg.op.dst_ep);
        let Some(ep) = self.eps.at_mut(e) else { return cold(false) };
        let cost = units(u64::from(msg.plen));
        let left = peer.outstanding();
        if left < cost {
            return cold(false);
        }
        let ack_every = if LOSSY { ACK_EVERY } else { ACK_EVERY_LOSSLESS };
        let ack = peer.owed >= ack_every - 1;
        let owes = ack || left - cost < peer.low() || !self.blocks.waiters.is_empty();
        let whole = WholeMsg {
            op: &msg.op,
            offset: EagerMsg::LEN + msg.op.imm.map_or(0, |_| IMM_LEN),
            len: usize::from(msg.plen),
        };
        let accept = || !crc || msg.verify(frame);
        let to = (ep, &mut self.posted, (&self.avs, &mut self.cqs));
        if !place_eager(to, (p, peer), frame, &whole, accept, NoReader) {
            return cold(false);
        }
        peer.consumed = peer.consumed.wrapping_add(cost);
        peer.last_rx = self.turn.polled_at;
        peer.probes = 0;
        if LOSSY {
            peer.snd.credit = peer.snd.credit.wrapping_add(u32::from(granted));
            peer.rx_quota = 0;
            peer.note_arrival(now, msg.psn, false);
            self.observed.tallies[p.at()].rx_bytes += frame.len() as u64;
            self.acks.note_ar(peer, msg.psn, head.asks_ack());
        }
        peer.rcv_nxt = peer.rcv_nxt.next();
        peer.owed = peer.owed.saturating_add(1);
        self.blocks.unpromised += if planted(Bug::CreditNotReturned) { 0 } else { cost as usize };
        if LOSSY {
            self.acks.owe(&mut self.due.todo, now, (p, peer.owed));
            if acked != 0 {
                self.on_cack(now, p, msg.cack, None);
            }
        }
        if owes {
            self.after_eager(p, ack);
        }
        if !LOSSY {
            let peer = &mut self.peers[p];
            peer.rx_quota = peer.rx_room(ack_every);
        }
        true
    }

    /// [`rx_eager`](Self::rx_eager) on a lossless path, for the most frequent frame
    /// ([`EagerTaggedView`]), if neither an acknowledgement nor a credit grant to its sender
    /// becomes due. Each field is read from the frame where it is used, so that none occupies a
    /// register.
    #[inline(always)]
    pub(super) fn rx_eager_tagged(&mut self, frame: RxFrame<'_>, reader: impl Reader) -> bool {
        let Some(msg) = EagerTaggedView::of(&frame) else { return cold(false) };
        let sid_psn = msg.sid_psn();
        let Some(peer) = self.peers.at_mut(slot_of(sid_psn as u32)) else { return cold(false) };
        if peer.rx_quota == 0 && !peer.refill_rx_quota()
            || !peer.is_from(self.port.addr, &msg.head())
            // One condition: two conditions compile to more instructions.
            || (sid_psn ^ peer.next_sid_psn()) as usize | self.blocks.waiters.len() != 0
        {
            return cold(false);
        }
        debug_assert!(peer.in_order && peer.is_in_order() || is_planted());
        if (msg.ack_credit() ^ peer.snd.ack_credit()) << 16 != 0
            && peer.note_unawaited::<false>(msg.cack(), msg.grant()).is_none()
        {
            return cold(false);
        }
        let e = self.eps.slot(msg.dst_ep());
        let Some(ep) = self.eps.at_mut(e) else { return cold(false) };
        let to = (ep, &mut self.posted, (&self.avs, &mut self.cqs));
        if !place_eager(to, (peer.slot(), peer), &frame, &msg, || true, reader) {
            return cold(false);
        }
        peer.consumed = peer.consumed.wrapping_add(1);
        peer.rx_quota -= 1;
        peer.owed += 1;
        peer.last_rx = self.turn.polled_at;
        debug_assert!(peer.probes == 0 || is_planted());
        peer.rcv_nxt = peer.rcv_nxt.next();
        self.blocks.unpromised += usize::from(!planted(Bug::CreditNotReturned));
        true
    }

    /// Grants the sender new credit and sends an acknowledgement, as far as this message made them
    /// due.
    #[cold]
    fn after_eager(&mut self, p: PeerIdx, ack: bool) {
        self.blocks.regrant(&mut self.peers, &mut self.due, p);
        if ack {
            self.peers[p].ack_now = true;
            self.due.make_ready(&mut self.peers, p);
        }
    }
}

impl Objects<'_> {
    /// Posts a receive: [`post_recv`](Node::post_recv) for the common case. The receive has one
    /// span, takes one message from any source, ignores no bit of the tag and writes a completion,
    /// and no unexpected message waits. False: nothing has changed; call `post_recv`, which also
    /// returns the error of an invalid request. Where this is inlined no request is built.
    #[inline(always)]
    pub fn try_post_recv(&mut self, ep: EpId, req: &RecvReq) -> bool {
        self.post_recv_fast::<true>(ep, req)
    }

    /// As [`try_post_recv`](Self::try_post_recv), and false also if the endpoint has no reserved
    /// room. Where this is inlined it makes no call. The generation of `ep` is NOT checked, as in
    /// [`try_send_inline`](Node::try_send_inline).
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
        if ep.rx_reserved[kind] == 0 && !(RESERVE && ep.reserve_receives(self.cqs, kind)) {
            return cold(false);
        }
        let Some(buf) = req.buf.as_one() else { return cold(false) };
        let tagged = req.kind == MsgKind::Tagged;
        let make = |wr: &mut RecvWr| wr.set_simple(e, tagged, req.context, buf.again());
        if ep.matcher[kind].post_simple(&mut self.posted.pool, req.tag, make).is_none() {
            return cold(false);
        }
        ep.rx_reserved[kind] -= 1;
        true
    }
}

/// A whole message in a received frame. Each field is read where it is used, so that none occupies
/// a register earlier.
pub(super) trait WholeEager {
    /// The sending endpoint.
    fn src_ep(&self) -> u16;
    fn tagged(&self) -> bool;
    fn tag(&self) -> u64;
    /// Remote CQ data.
    fn imm(&self) -> Option<u64>;
    /// Where the payload begins in the frame, bytes.
    fn offset(&self) -> usize;
    /// Payload bytes.
    fn len(&self) -> usize;
}

impl WholeEager for EagerTaggedView<'_, '_> {
    #[inline(always)]
    fn src_ep(&self) -> u16 {
        self.src_ep()
    }

    #[inline(always)]
    fn tagged(&self) -> bool {
        Self::TAGGED
    }

    #[inline(always)]
    fn tag(&self) -> u64 {
        self.tag()
    }

    #[inline(always)]
    fn imm(&self) -> Option<u64> {
        None
    }

    #[inline(always)]
    fn offset(&self) -> usize {
        EagerMsg::LEN
    }

    #[inline(always)]
    fn len(&self) -> usize {
        self.plen
    }
}

/// A message with a decoded header: of a MSG, or of one record of a PACK.
pub(super) struct WholeMsg<'a> {
    pub(super) op: &'a MsgOp,
    pub(super) offset: usize,
    pub(super) len: usize,
}

impl WholeEager for WholeMsg<'_> {
    #[inline(always)]
    fn src_ep(&self) -> u16 {
        self.op.src_ep
    }

    #[inline(always)]
    fn tagged(&self) -> bool {
        self.op.tagged
    }

    #[inline(always)]
    fn tag(&self) -> u64 {
        self.op.tag
    }

    #[inline(always)]
    fn imm(&self) -> Option<u64> {
        self.op.imm
    }

    #[inline(always)]
    fn offset(&self) -> usize {
        self.offset
    }

    #[inline(always)]
    fn len(&self) -> usize {
        self.len
    }
}

/// Copies a message of peer `p` into the first posted receive of `ep` that it matches, and writes
/// the completion. False, and nothing has changed, if no posted receive is simple and as long as
/// the message, or if `accept` declines the frame.
#[inline(always)]
pub(super) fn place_eager(
    (ep, posted, (avs, cqs)): (&mut Ep, &mut Receives, (&Avs, &mut Cqs)),
    (p, peer): (PeerIdx, &mut Peer),
    frame: &RxFrame<'_>,
    msg: &impl WholeEager,
    accept: impl FnOnce() -> bool,
    reader: impl Reader,
) -> bool {
    let (kind, len) = (usize::from(msg.tagged()), msg.len());
    let found = ep.matcher[kind].take_first(
        &mut posted.pool,
        || peer.src(p, msg.src_ep()),
        msg.tag(),
        |wr| (len <= wr.buf.len() && accept()).then(|| wr.buf.again()),
    );
    let Some((buf, posted)) = found else { return cold(false) };
    frame.copy_to_span(msg.offset(), &buf, len);
    // The matcher counts the message ([`Ep::received`]).
    ep.counters.received_bytes += len as u64;
    let place = (&mut ep.rx_used, &mut ep.rx_reserved[kind]);
    let queue = queue_of_reserved(cqs, ep.rx_cq, place, &reader);
    match queue {
        None => reader.take(&received_cqe(posted, msg, source((ep, peer), avs, msg))),
        Some(cq) => cq.push(received_cqe(posted, msg, source((ep, peer), avs, msg))),
    }
    true
}

/// The queue for the completion of an operation with a reserved place in `cq`, one of `used`.
/// `None`: `reader` takes the completion, since it reads that queue; the place then becomes one
/// more that is `reserved` in advance, if the endpoint may have one.
#[inline(always)]
pub(super) fn queue_of_reserved<'a>(
    cqs: &'a mut Cqs,
    cq: CqIdx,
    (used, reserved): (&mut u32, &mut u16),
    reader: &impl Reader,
) -> Option<&'a mut Cq> {
    if reader.reads(cq) && may_reserve_more(*reserved) {
        debug_assert!(cqs[cq].cq.is_empty(), "queued completions come first");
        *reserved += 1;
        return None;
    }
    *used -= 1;
    Some(&mut cqs.at_mut(cq).expect("a posted operation has a queue").cq)
}

/// The completion of a receive with the message from `src`. Most fields are read when the
/// completion is written.
#[inline(always)]
fn received_cqe(posted: &Posted<RecvWr>, msg: &impl WholeEager, src: FiAddr) -> Cqe {
    let mut flags = CqFlags::RECV | if msg.tagged() { CqFlags::TAGGED } else { CqFlags::MSG };
    flags.set(CqFlags::REMOTE_CQ_DATA, msg.imm().is_some());
    let &Posted { tag, payload: RecvWr { context: op_context, .. }, .. } = posted;
    let (len, data) = (msg.len() as u64, msg.imm().unwrap_or(0));
    Cqe { op_context, flags, len, buf: 0, data, tag, src }
}

/// The source address of a message from `peer`, or `FI_ADDR_UNSPEC` without `FI_SOURCE`.
#[inline(always)]
fn source((ep, peer): (&Ep, &mut Peer), avs: &Avs, msg: &impl WholeEager) -> FiAddr {
    if !ep.caps.contains(Caps::SOURCE) {
        return FI_ADDR_UNSPEC;
    }
    let life = (peer.slot(), peer.inc);
    peer.source.of((ep.av, avs), life, msg.src_ep()).unwrap_or(FI_ADDR_UNSPEC)
}

/// Longest message with `flags` that is sent eagerly in one frame, bytes.
#[inline]
fn one_max(flags: OpFlags, eager_one: usize) -> usize {
    if flags.contains(OpFlags::INJECT) { Node::INJECT_SIZE } else { eager_one }
}

/// The request of a message that has left and is kept. It counts in the endpoint and its queue.
#[inline(always)]
fn kept_wr((ep, e): (&mut Ep, EpIdx), cq: &mut Cq, peer: &Peer, req: &SendReq) -> TxWr {
    cq.reserve_free();
    ep.tx_used += 1;
    let (flags, len) = (wr_flags(req, ep.tx_selective) | WrFlags::ALL_SENT, req.buf.len() as u64);
    let ends = (ep.route.ends[0], ep.number);
    TxWr {
        tag: req.tag,
        data: req.data,
        len,
        sent: len,
        unacked: 1,
        of_peer: peer.wrs.end(),
        ..TxWr::new(req.context, (ep.route.peer, e), ends, flags)
    }
}

impl Peer {
    /// Accounts for a message that has left with `credit`, and for the acknowledgement in it.
    #[inline(always)]
    fn charge(&mut self, credit: u32) {
        self.credit_used = self.credit_used.wrapping_add(credit);
        self.tx_quota = self.tx_quota.saturating_sub(credit as u16);
        self.carried_ack_in_order();
    }

    /// The credit that a message of `len` bytes costs, if the session admits it now.
    #[inline(always)]
    fn admit_eager<S: EagerSend>(&mut self, now: Instant, len: usize) -> Option<u32> {
        if self.path.is_lossless() == S::LOSSY && (S::LOSSY || !planted(Bug::FarWithoutRecord)) {
            return cold(None);
        }
        // Left to the slow path: the send that uses up the quota refreshes it and requests an
        // acknowledgement.
        if S::INLINE && self.tx_quota <= 1 {
            return cold(None);
        }
        if S::CACHED && !self.needs_no_clock(now) {
            return cold(None);
        }
        if S::INLINE { Some(1) } else { eager_cost(self, len) }
    }
}

impl Ep {
    /// Checks whether the endpoint may send this now, and caches the route. Returns whether the
    /// send writes a completion.
    #[inline(always)]
    fn admit_eager<S: EagerSend>(&mut self, net: (&Avs, &Peers), req: &SendReq) -> Option<bool> {
        let tagged = req.kind == MsgKind::Tagged;
        let mut completes = !req.no_completion;
        if S::INLINE {
            // The sentinel is `FI_ADDR_UNSPEC`, which a caller may pass as `dest`. `CACHED` needs
            // no check: the peer that belongs to the sentinel is `NONE`.
            let named = S::CACHED || req.dest != FI_ADDR_UNSPEC;
            let known = self.route.fast_dest[usize::from(tagged)] == req.dest && named;
            let asked = req.no_completion || req.flags.contains(OpFlags::COMPLETION);
            if !known && (S::CACHED || !self.find_inline_route(net, req.dest, tagged, asked)) {
                return cold(None);
            }
        } else {
            if !self.fast_send[usize::from(tagged)] {
                cold(());
                let asked = req.flags.contains(OpFlags::COMPLETION);
                completes = completes && (asked || !self.tx_selective);
                if !self.may_send[usize::from(tagged)] {
                    return None;
                }
            }
            if self.route.dest != req.dest && !cold(self.find_route(net, req.dest)) {
                return None;
            }
        }
        if !S::FLAGS.contains(req.flags)
            // Short enough for the port to write it without a call.
            || S::CACHED && req.buf.len() > SHORT - EagerMsg::LEN
            || S::LOSSY && self.tx_used >= self.tx_size
        {
            return cold(None);
        }
        Some(completes)
    }

    /// Counts a message that has left and is not kept, and writes its completion if it has one.
    #[inline(always)]
    fn count_sent<S: EagerSend>(&mut self, cq: &mut Cq, req: &SendReq, completes: bool) {
        self.counters.sent += 1;
        self.counters.sent_bytes += req.buf.len() as u64;
        let is_tagged = req.kind == MsgKind::Tagged;
        let flags = CqFlags::SEND | if is_tagged { CqFlags::TAGGED } else { CqFlags::MSG };
        let (op_context, src) = (req.context, FI_ADDR_UNSPEC);
        match (completes, S::INLINE) {
            (false, _) => {}
            (true, true) => cq.push_sent_free(op_context, flags),
            (true, false) => cq.push_free(Cqe { op_context, flags, src, ..Cqe::default() }),
        }
    }

    /// Looks up the route to `dest` and caches it. False if the address is not in the vector, if it
    /// names a receive context, which the fast path does not support, or if it names another
    /// incarnation of the peer than the current one.
    #[cold]
    #[inline(never)]
    pub(super) fn find_route(&mut self, (avs, peers): (&Avs, &Peers), dest: FiAddr) -> bool {
        let entry = avs.get(self.av).and_then(|table| table.av.lookup(dest));
        let Some(entry) = entry.filter(|entry| entry.rx_ctx == 0) else { return false };
        let (p, ep, inc) = (entry.peer, entry.ep, entry.incarnation);
        let peer = peers.get(p);
        if inc != 0 && peer.is_none_or(|peer| peer.inc != inc) {
            return false;
        }
        // Messages that a path may lose do not use the cached entries, which need no further check
        // then.
        let lossless =
            peer.is_some_and(|peer| peer.path.is_lossless() || planted(Bug::FarWithoutRecord));
        let fast = self.fast_send.map(|fast| fast && lossless);
        let fast_dest = fast.map(|fast| if fast { dest } else { FI_ADDR_UNSPEC });
        let fast_peer = fast.map(|fast| if fast { p } else { PeerIdx::NONE });
        self.route = Route { dest, peer: p, ends: [ep, self.number], inc, fast_dest, fast_peer };
        true
    }

    /// Caches the route to `dest` for `try_send_inline`. False if the endpoint may not send, if a
    /// counter counts its sends, or if the call writes a completion only on demand and did not
    /// demand it (`asked`).
    #[cold]
    #[inline(never)]
    fn find_inline_route(
        &mut self,
        net: (&Avs, &Peers),
        dest: FiAddr,
        tagged: bool,
        asked: bool,
    ) -> bool {
        self.may_send[usize::from(tagged)]
            && self.tx_cntr == CntrIdx::NONE
            && (asked || !self.tx_selective)
            && (self.route.dest == dest || self.find_route(net, dest))
            && net.1.get(self.route.peer).is_some_and(|peer| peer.path.is_lossless())
    }
}

/// A message about to be sent. Its fields are read when they are written to the frame, so that none
/// occupies a register earlier.
struct EagerFrame<'a> {
    peer: &'a Peer,
    /// This node's address, as [`Station::word`](barewire_driver::port::Station::word) returns it.
    src: &'a u64,
    /// The sending endpoint, which caches the route.
    ep: &'a Ep,
    /// The packet requests an acknowledgement.
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
        FrameHead::between(self.peer.addr, *self.src, self.peer.numbers_out(), false)
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

/// A message about to be sent with a checksum.
struct ChecksummedFrame<'a> {
    msg: &'a EagerFrame<'a>,
    /// The frame is written from the bytes that the checksum covers.
    head: [u8; EagerMsg::LEN_MAX],
    crc: u32,
}

impl<'a> ChecksummedFrame<'a> {
    #[inline(always)]
    fn of(msg: &'a EagerFrame<'a>) -> Self {
        let start = FrameHead::between(msg.peer.addr, *msg.src, msg.peer.numbers_out(), true);
        let (head, len) = msg.msg().emit(&start, msg.ar());
        let body = Body::Io { buf: msg.body(), offset: 0, len: msg.body().len() };
        let crc = body.crc32c(wire::crc_of_head(&head[..len]));
        Self { msg, head, crc }
    }
}

impl Message for ChecksummedFrame<'_> {
    #[inline(always)]
    fn head(&self) -> FrameHead {
        FrameHead::between(self.msg.peer.addr, *self.msg.src, self.msg.peer.numbers_out(), true)
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

/// Credits that a message of `len` bytes costs. `None` if it does not fit one frame, or if window
/// or credit do not admit it now. Refreshes `tx_quota` when it is nearly used up.
#[inline(always)]
pub(super) fn eager_cost(peer: &mut Peer, len: usize) -> Option<u32> {
    let mut cost = 1;
    // Also at the last of the quota: acknowledgements may have freed room since.
    if len > UNIT || peer.tx_quota <= 1 {
        cost = units(len as u64);
        peer.tx_quota = peer.tx_room();
        if u32::from(peer.tx_quota) < cost || len > peer.eager_room() {
            return None;
        }
    }
    debug_assert!(u32::from(peer.tx_room()) >= cost || is_planted());
    Some(cost)
}
