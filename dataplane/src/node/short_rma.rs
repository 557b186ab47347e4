//! The short way of atomic operations that fetch, on a port that loses nothing.
//!
//! As in `short`: every question is asked first, nothing changes unless the answer is yes, and else
//! the long way (`rma`, `rma_out`, `rma_in`) begins from the start. A request of one packet leaves
//! in the call that posts it. Its record is short ([`ShortOp`]): nothing is kept to send it again,
//! and what else there is to say of it is in the packet. The target
//! executes it when it comes, and its answer waits in a list of its own until the burst has been
//! taken, since until then the port is lent to whoever takes it.

use barewire_driver::frame::RxFrame;
use barewire_driver::mem::{FEW, Few, IoBuf, Span};
use barewire_driver::port::Tx;

use super::ep::Ep;
use super::input::ACK_EVERY_LOSSLESS;
use super::mr::Mr;
use super::ops::{Job, JobKind};
use super::peer::{Peer, slot_of};
use super::rma::{FETCHED, REMOTE_READ, checked_len, valid_pair};
use super::rma_in::{JOBS_MAX, atomic_needs, decode_atomic};
use super::rma_out::ANSWERS_MAX;
use super::short::{PLAIN_FLAGS, Route, is_unawaited, short_cost};
use super::{AtomicReq, EpId, FrameSink, Node, RmaIov, ShortFrame};
use crate::error::Error;
use crate::flags::{Caps, OpFlags};
use crate::proto::atomic::{self, AtomicKind, Datatype, Sharing};
use crate::rel::psn::Psn;
use crate::rel::sent::WINDOW;
use crate::slab::{Handle, Link, NONE, Slab};
use crate::types::{CqErr, Cqe, FI_ADDR_UNSPEC, FiAddr, Instant, ProvErrno};
use crate::wire::{
    self, AtomicOp, AtomicWhat, HeadOut, NackReason, PlainAtomic, PlainBase, PlainHead,
    RemoteRange, RespOp, Ty,
};

/// Answers that may wait for the end of a burst; one more takes the long way.
pub(super) const ANSWERS_AT_ONCE: usize = 128;

/// Kinds of operations about which every question was answered, at most.
const NEAR: usize = 8;

/// Flags of an operation that the short way knows.
const FLAGS: OpFlags = PLAIN_FLAGS.union(OpFlags::DELIVERY_COMPLETE);

/// An atomic operation that fetches, on one remote range. As [`AtomicReq`], with the memory
/// borrowed: `result` is taken if the operation is posted.
#[derive(Debug)]
pub struct ShortAtomic<'a> {
    /// `Fetch` or `Compare`.
    pub kind: AtomicKind,
    /// `enum fi_op`.
    pub op: u32,
    /// `enum fi_datatype`.
    pub ty: u32,
    /// The operands.
    pub operand: &'a Span,
    /// The compare values.
    pub compare: &'a Span,
    /// Where the old values go.
    pub result: &'a mut IoBuf,
    /// To whom.
    pub dest: FiAddr,
    /// On what.
    pub range: RmaIov,
    /// Comes back in the completion.
    pub context: u64,
    /// As in [`AtomicReq::flags`].
    pub flags: OpFlags,
}

impl AtomicReq {
    /// The same for [`Node::atomic_now`], if it is for that.
    #[inline]
    pub fn short(&mut self) -> Option<ShortAtomic<'_>> {
        let [range] = self.rma.as_slice() else { return None };
        if self.kind == AtomicKind::Base || self.no_completion {
            return None;
        }
        Some(ShortAtomic {
            kind: self.kind,
            op: self.op,
            ty: self.ty,
            operand: self.operand.as_one()?,
            compare: self.compare.as_one()?,
            result: &mut self.result,
            dest: self.dest,
            range: *range,
            context: self.context,
            flags: self.flags,
        })
    }
}

/// An operation of the short way whose answer is missing. Besides what its packet said, all that
/// there is to say of it: it stands in no list, and nothing of it is kept to be repeated. Its peer
/// knows how many there are.
#[derive(Debug)]
pub(super) struct ShortOp {
    context: u64,
    /// Where the old values go.
    result: Span,
    peer: u32,
    /// [`NONE`] once that is closed.
    ep: u32,
    /// That of its packet.
    psn: Psn,
    /// Writes a completion on success.
    told: bool,
}

impl ShortOp {
    /// Set in the slots that packets name, so that they are no slot of another table.
    const NAME: u32 = 1 << 31;

    /// What a packet calls slot `w`.
    #[inline(always)]
    const fn name(w: u32) -> u32 {
        w | Self::NAME
    }

    /// Whether a packet names an operation of the short way.
    #[inline(always)]
    pub(super) const fn is_name(name: u32) -> bool {
        name & Self::NAME != 0
    }

    /// The slot that is called so.
    #[inline(always)]
    const fn slot(name: u32) -> u32 {
        name & !Self::NAME
    }
}

/// What an operation of the short way is and on how much memory, which has been found to be right.
/// An endpoint keeps that of the last one, since most often the next is like it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fetch {
    op: u32,
    ty: u32,
    count: u64,
    kind: AtomicKind,
    /// Bytes of old values, operands and compare values.
    bytes: usize,
    operand: usize,
    compare: usize,
}

impl Fetch {
    /// That of no operation: each has an element.
    pub(crate) const NONE: Self =
        Self { op: 0, ty: 0, count: 0, kind: AtomicKind::Fetch, bytes: 0, operand: 0, compare: 0 };

    /// Whether `req` is alike.
    #[inline(always)]
    fn is_of(&self, req: &ShortAtomic<'_>) -> bool {
        self.op == req.op
            && self.ty == req.ty
            && self.count == req.range.len
            && self.kind == req.kind
    }

    /// Becomes that of `req`. False, and nothing changed, if that is wrong or not short.
    #[inline(always)]
    fn renew(&mut self, req: &ShortAtomic<'_>) -> bool {
        let found = Self::of((req.kind, req.op, req.ty, req.range.len));
        *self = found.unwrap_or(*self);
        found.is_some()
    }

    #[inline(never)]
    fn of((kind, op, ty, count): (AtomicKind, u32, u32, u64)) -> Option<Self> {
        let (what, datatype) = valid_pair(kind, op, ty).ok()?;
        let bytes = checked_len(datatype, count).ok().filter(|&bytes| bytes <= Job::SHORT)?;
        let operand = if what == atomic::AtomicOp::Read { 0 } else { bytes };
        let compare = if kind == AtomicKind::Compare { bytes } else { 0 };
        Some(Self { op, ty, count, kind, bytes, operand, compare })
    }
}

/// An answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    peer: u32,
    /// Our name for the session in which it was asked for.
    sid: u32,
    asked: wire::Asked,
    values: Few,
}

/// What an operation of the short way asked for about which every question was answered, and the
/// answers. Who closes or narrows what they depend on forgets them
/// ([`forget_near`](Node::forget_near)).
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Near {
    what: AtomicWhat,
    /// Bytes of the payload, and of the old values.
    plen: u16,
    bytes: u16,
    op: atomic::AtomicOp,
    ty: Datatype,
    /// One element that [`IoBuf::atomic_word`] may change.
    word: bool,
    /// It is a sum of 8 bytes, which nobody counts.
    usual: bool,
    /// Counters of the region or the endpoint count it.
    counted: bool,
    mr: u32,
    ep: u32,
    /// Remote address of the region's first byte, and the offset above which it ends too early.
    base: u64,
    room: u64,
}

/// What a target keeps for the short way.
#[derive(Debug)]
pub(super) struct Asked {
    /// Apart from the node, whose own records stand close together.
    near: Box<[Near; NEAR]>,
    /// Answers that the burst being taken has made due and that could not leave at once.
    answers: Vec<Answer>,
    /// How many answers there may be on the long way, and waiting here besides.
    jobs_few: usize,
}

impl Asked {
    /// For a node with room for `jobs` answers.
    pub(super) fn new(jobs: usize) -> Self {
        let answers = Vec::with_capacity(ANSWERS_AT_ONCE);
        Self { near: Box::new(Near::NONE), answers, jobs_few: jobs.min(JOBS_MAX.into()) }
    }

    /// Where that is kept which is known of `what`.
    #[inline(always)]
    fn place(what: &AtomicWhat) -> usize {
        what.hash() % NEAR
    }
}

impl Near {
    /// Nothing is known.
    const NONE: [Self; NEAR] = [Self {
        what: AtomicWhat::NOTHING,
        plen: 0,
        bytes: 0,
        op: atomic::AtomicOp::Read,
        ty: Datatype::Uint64,
        word: false,
        usual: false,
        counted: false,
        mr: NONE,
        ep: NONE,
        base: 0,
        room: 0,
    }; NEAR];
}

impl Node {
    /// Posts an atomic operation and sends it in the same breath, if nothing stands before it and
    /// nothing about it is out of the ordinary: as [`post_atomic`](Self::post_atomic) and then
    /// [`transmit`](Self::transmit). False if not: nothing has happened, and those two are to be
    /// called, also to learn what is wrong with the call if anything is.
    ///
    /// `clock` is read after the packet has left, and only if the peer's silence counts from now.
    #[inline(always)]
    pub fn atomic_now(
        &mut self,
        ep: EpId,
        req: &mut ShortAtomic<'_>,
        out: &mut impl FrameSink,
        clock: impl FnOnce() -> Instant,
    ) -> bool {
        if !self.direct || !FLAGS.contains(req.flags) {
            return false;
        }
        let e = ep.0.idx();
        let Some(ep) = self.eps.by_handle_mut(ep.0) else { return false };
        if !ep.may_fetch || ep.tx_used >= ep.tx_size {
            return false;
        }
        if !ep.fetch.is_of(req) && !ep.fetch.renew(req) || !req.fits(&ep.fetch) {
            return false;
        }
        if ep.route.dest != req.dest {
            let found = self.avs.get(ep.av).and_then(|av| Route::find(&av.av, req.dest));
            let Some(route) = found else { return false };
            ep.route = route;
        }
        let Route { peer: p, inc, .. } = ep.route;
        let Some(peer) = self.peers.get_mut(p) else { return false };
        let Some(cq) = self.cqs.get_mut(ep.tx_cq) else { return false };
        let cq = &mut cq.cq;
        if inc != 0 && inc != peer.inc
            || !cq.has_room()
            || usize::from(peer.answers) >= ANSWERS_MAX
            || short_cost(peer, 0).is_none()
        {
            return false;
        }
        if !self.short_ops.has_used() && self.short_ops.vacant().is_none() {
            return false;
        }
        let Some(result) = req.result.take_one() else { return false };
        let (context, psn) = (req.context, peer.snd.nxt);
        let told = !ep.tx_selective || req.flags.contains(OpFlags::COMPLETION);
        let op = ShortOp { context, result, peer: p, ep: e, psn, told };
        let Some(made) = self.short_ops.alloc_again(op) else { return false };
        if !send_request(&To { peer, src: self.word, ep, made }, req, out) {
            *req.result = IoBuf::one(self.short_ops.free(made.idx()).result);
            return false;
        }
        self.counters.tx_frames += 1;
        ep.tx_used += 1;
        cq.reserve_free();
        peer.answers += 1;
        peer.short_ops += 1;
        peer.rma_seq = peer.rma_seq.wrapping_add(1);
        peer.short_left -= 1;
        peer.tell_ack();
        // Heard in this very turn, it is as if we had begun to wait now.
        let heard = peer.heard == self.active_ns;
        if peer.timer_at == Instant(u64::MAX) || peer.snd.in_flight() == 0 && !heard {
            self.wait_from(clock(), p);
        } else {
            peer.snd.number();
        }
        true
    }

    /// Takes a frame that holds an atomic operation, and answers to `out` if that takes an answer.
    #[inline(never)]
    pub(super) fn on_atomic_frame(
        &mut self,
        now: Instant,
        frame: &RxFrame<'_>,
        out: &mut impl FrameSink,
    ) {
        if !self.take_request(now, frame, out) {
            self.on_frame_long(now, frame);
        }
    }

    /// Takes a frame that holds the answer to an operation.
    #[inline(never)]
    pub(super) fn on_resp_frame(&mut self, now: Instant, frame: &RxFrame<'_>) {
        if !self.take_answer(frame) {
            self.on_frame_long(now, frame);
        }
    }

    /// Executes an operation that fetches few bytes of a region, if its packet is next in order and
    /// nothing about it is out of the ordinary. False if it is another: nothing has happened.
    #[inline(always)]
    fn take_request(
        &mut self,
        now: Instant,
        frame: &RxFrame<'_>,
        out: &mut impl FrameSink,
    ) -> bool {
        let Some((base, op)) = PlainAtomic::parse(frame) else { return false };
        if !is_next(&self.peers, self.word, &base) {
            return false;
        }
        let near = &self.asked.near[Asked::place(&op.what)];
        if near.what != op.what || near.plen != base.plen {
            return self.take_unknown(now, frame, out);
        }
        // Nothing waits, so that there is room for the answer, wherever it goes.
        let alone = self.jobs.is_empty() && self.asked.answers.is_empty();
        if near.usual && alone {
            return self.execute_near::<true>(now, frame, &base, op, out);
        }
        self.take_known(now, frame, out)
    }

    /// As [`take_request`](Self::take_request), for the first of its kind.
    #[inline(never)]
    fn take_unknown(
        &mut self,
        now: Instant,
        frame: &RxFrame<'_>,
        out: &mut impl FrameSink,
    ) -> bool {
        let Some((base, op)) = PlainAtomic::parse(frame) else { return false };
        self.look_near(op, base.plen) && self.take_known(now, frame, out)
    }

    /// As [`take_request`](Self::take_request), for all that is known and not usual. (From the
    /// start, so that what others look at never has to lie in memory.)
    #[inline(never)]
    fn take_known(&mut self, now: Instant, frame: &RxFrame<'_>, out: &mut impl FrameSink) -> bool {
        let Some((base, op)) = PlainAtomic::parse(frame) else { return false };
        let near = &self.asked.near[Asked::place(&op.what)];
        // No more answers for a peer than for all of them.
        let few = self.jobs.len() + ANSWERS_AT_ONCE <= self.asked.jobs_few;
        is_next(&self.peers, self.word, &base)
            && (near.what == op.what && near.plen == base.plen)
            && (few && self.asked.answers.len() < ANSWERS_AT_ONCE)
            && self.execute_near::<false>(now, frame, &base, op, out)
    }

    /// Executes an operation of which everything is known that is alike in many. `USUAL` ones are,
    /// and no answer waits.
    #[inline(always)]
    fn execute_near<const USUAL: bool>(
        &mut self,
        now: Instant,
        frame: &RxFrame<'_>,
        base: &PlainBase,
        op: PlainAtomic,
        out: &mut impl FrameSink,
    ) -> bool {
        let p = slot_of(base.dst_sid);
        let near = &self.asked.near[Asked::place(&op.what)];
        let at = op.addr.wrapping_sub(near.base);
        let peer = &mut self.peers[p];
        if at > near.room || peer.bad_seq != NONE {
            return false;
        }
        let mr = &self.mrs[near.mr];
        let Some(old) = near.execute::<USUAL>(mr, at as usize, frame) else { return false };
        let Some(asked) = wire::Asked::parse(frame) else { return false };
        peer.nack.note_key(now, false);
        accept(peer, base, self.active_ns);
        self.counters.rma_executed += 1;
        let counted = (!USUAL && near.counted).then_some((near.mr, near.ep));
        let bytes = if USUAL { 8 } else { near.bytes.into() };
        let alone = USUAL || self.asked.answers.is_empty() && peer.jobq.head == NONE;
        let word = if bytes == 8 { Old::Word(old as u64) } else { Old::Few(Few::one(old, bytes)) };
        if alone && send_answer(peer, self.word, &asked, word, out) {
            self.counters.tx_frames += 1;
            if answered(now, peer) {
                self.arm_timer(now, p);
            }
        } else {
            self.answer_soon(p, asked, old, bytes);
        }
        if let Some((mr, ep)) = counted {
            self.count_fetched(mr, ep);
        }
        true
    }

    /// Keeps an answer of `bytes` bytes for the end of the burst.
    #[inline(never)]
    fn answer_soon(&mut self, p: u32, asked: wire::Asked, old: u128, bytes: usize) {
        let (sid, values) = (self.peers[p].sid, Few::one(old, bytes));
        self.asked.answers.push(Answer { peer: p, sid, asked, values });
        self.owe_short(p);
    }

    /// Asks every question about an operation that fetches, and remembers the answers if each of
    /// them is yes.
    #[inline(never)]
    fn look_near(&mut self, said: PlainAtomic, plen: u16) -> bool {
        let Some(op) = said.checked() else { return false };
        let last = op.range.last && op.end;
        let plain = op.fetch && last && !op.tagged && !op.void;
        let (plen, said_len) = (usize::from(plen), plen);
        let Ok((what, ty, bytes)) = decode_atomic(&op, plen) else { return false };
        if !plain || bytes > Job::SHORT {
            return false;
        }
        let (caps, access) = atomic_needs(&op, what);
        let ep = self.ep_slot(op.range.dst_ep);
        let Some(e) = self.eps.get(ep).filter(|e| e.enabled && e.caps.contains(caps)) else {
            return false;
        };
        let counted = e.caps.contains(Caps::RMA_EVENT);
        let Ok((m, _)) = self.mr_look(ep, &op.range, bytes as u64, access) else { return false };
        self.mr_near = m;
        let mr = &self.mrs[m];
        let few = op.count == 1 && matches!(mr.sharing, Sharing::Single) && plen <= FEW;
        let word = few && ty.is_integer() && bytes >= 4;
        let counted = counted || mr.read_cntr != NONE;
        let usual = word && bytes == 8 && what == atomic::AtomicOp::Sum && !counted;
        self.asked.near[Asked::place(&said.what)] = Near {
            what: said.what,
            plen: said_len,
            bytes: bytes as u16,
            op: what,
            ty,
            word,
            usual,
            counted,
            mr: m,
            ep,
            base: mr.base,
            room: mr.buf.len() as u64 - bytes as u64,
        };
        true
    }

    /// What was found out about operations holds no longer.
    #[cold]
    pub(super) fn forget_near(&mut self) {
        *self.asked.near = Near::NONE;
    }

    #[cold]
    fn count_fetched(&mut self, mr: u32, ep: u32) {
        let cntr = self.mrs[mr].read_cntr;
        self.count(cntr, true);
        self.count_remote(ep, REMOTE_READ);
    }

    /// Completes the operation that a RESP answers, if the packet is next in order and nothing
    /// about it is out of the ordinary. False if it is another: nothing has happened.
    #[inline(always)]
    fn take_answer(&mut self, frame: &RxFrame<'_>) -> bool {
        let Some((base, (w, generation))) = RespOp::plain(frame) else { return false };
        if !is_next(&self.peers, self.word, &base) {
            return false;
        }
        let p = slot_of(base.dst_sid);
        let handle = Handle::from_parts(ShortOp::slot(w), generation);
        let Some(op) = self.short_ops.by_handle(handle) else { return false };
        let Some(peer) = self.peers.get_mut(p) else { return false };
        // A closed endpoint's, and one that somebody may wait behind, end the long way.
        if !ShortOp::is_name(w)
            || op.peer != p
            || op.ep == NONE
            || usize::from(base.plen) != op.result.len()
            || peer.txq.head != NONE
            || !frame.fill_span(RespOp::HEAD, &op.result)
        {
            return false;
        }
        accept(peer, &base, self.active_ns);
        self.finish_short(p, handle.idx());
        self.owe_short(p);
        true
    }

    /// An acknowledgement is owed for one packet more of the short way.
    #[inline(always)]
    fn owe_short(&mut self, p: u32) {
        let peer = &mut self.peers[p];
        peer.owed = peer.owed.saturating_add(1);
        peer.take_left = peer.take_left.saturating_sub(1);
        if peer.owed >= ACK_EVERY_LOSSLESS {
            peer.ack_now = true;
            self.make_ready(p);
        }
    }

    /// Completes operation `w` of the short way, whose old values are in place.
    #[inline(always)]
    fn finish_short(&mut self, p: u32, w: u32) {
        let Some(op) = self.short_ops.get(w) else { return };
        let (e, context) = (op.ep, op.told.then_some(op.context));
        self.short_ops.discard(w);
        let Some(peer) = self.peers.get_mut(p) else { return };
        peer.forget_short_op();
        self.eps[e].tx_used -= 1;
        self.tell_rma(e, context, FETCHED.0, FETCHED.1);
    }

    /// The answer to an operation of the short way, on the long way.
    pub(super) fn on_short_resp(
        &mut self,
        p: u32,
        frame: &RxFrame<'_>,
        resp: &RespOp,
        (off, len): (usize, usize),
    ) {
        let handle = Handle::from_parts(ShortOp::slot(resp.dst_op), resp.dst_gen);
        let Some(op) = self.short_ops.by_handle(handle).filter(|op| op.peer == p) else {
            self.counters.rx_stray += 1;
            return;
        };
        let w = handle.idx();
        if op.ep == NONE {
            self.short_ops.discard(w);
            self.peers[p].forget_short_op();
        } else if resp.offset == 0 && len == op.result.len() && frame.fill_span(off, &op.result) {
            self.finish_short(p, w);
        } else {
            // The peer lies.
            self.fail_short(w, Error::ConnReset, ProvErrno::UnknownOutcome);
        }
    }

    /// Packet `psn`, of which nothing was kept, was refused: ends the operation that it was, if it
    /// was one of the short way.
    #[cold]
    pub(super) fn on_short_nack(&mut self, p: u32, psn: Psn, reason: NackReason) {
        let found = self.short_ops.iter().find(|(_, op)| op.peer == p && op.psn == psn);
        let Some(w) = found.map(|(w, _)| w) else { return };
        let prov = match reason {
            NackReason::NoEndpoint => ProvErrno::NoEndpoint,
            _ => ProvErrno::NotExecuted,
        };
        self.fail_short(w, super::input::nack_error(reason), prov);
    }

    /// Ends operation `w` of the short way with an error, which its endpoint is told if it is open.
    fn fail_short(&mut self, w: u32, err: Error, prov_errno: ProvErrno) {
        let ShortOp { context: op_context, ep: e, peer: p, .. } = self.short_ops.free(w);
        self.peers[p].forget_short_op();
        if e != NONE {
            self.eps[e].tx_used -= 1;
            self.tell_short_failure(e, op_context, err, prov_errno);
        }
    }

    fn tell_short_failure(&mut self, e: u32, op_context: u64, err: Error, prov_errno: ProvErrno) {
        let (flags, which) = FETCHED;
        let cqe = Cqe { op_context, flags, src: FI_ADDR_UNSPEC, ..Cqe::default() };
        let failure = CqErr { cqe, olen: 0, err, prov_errno, err_data: None };
        self.tell_failure(e, failure, self.eps[e].rma_cntr[which]);
    }

    /// Ends all operations of the short way to peer `p`, whose session has ended with `err`.
    #[cold]
    pub(super) fn fail_short_ops(&mut self, p: u32, err: Error) {
        let ops = self.short_ops.iter().filter(|(_, op)| op.peer == p);
        let mut ops: Vec<(u32, Psn)> = ops.map(|(w, op)| (w, op.psn)).collect();
        // In the order of their posting.
        let una = self.peers[p].snd.una;
        ops.sort_by_key(|(_, psn)| psn.0.wrapping_sub(una.0.wrapping_sub(1 << 31)));
        for (w, _) in ops {
            self.fail_short(w, err, ProvErrno::UnknownOutcome);
        }
    }

    /// Ends the operations of the short way of endpoint `e`, which is being closed. Their records
    /// stay until their answers, or their refusals, have been counted off.
    #[cold]
    pub(super) fn cancel_short_ops(&mut self, e: u32) {
        let ops = self.short_ops.iter().filter(|(_, op)| op.ep == e);
        let ops: Vec<u32> = ops.map(|(w, _)| w).collect();
        for w in ops {
            let op = &mut self.short_ops[w];
            (op.ep, op.result) = (NONE, Span::EMPTY);
            let context = op.context;
            self.eps[e].tx_used -= 1;
            let (err, prov) = (Error::Canceled, ProvErrno::UnknownOutcome);
            self.tell_short_failure(e, context, err, prov);
        }
    }

    /// Whether answers wait.
    #[inline(always)]
    pub fn has_answers(&self) -> bool {
        !self.asked.answers.is_empty()
    }

    /// Sends the answers that the last burst has made due. What cannot leave now, or has something
    /// before it, is the next [`transmit`](Self::transmit)'s.
    pub fn send_answers(&mut self, now: Instant, out: &mut impl FrameSink) {
        for i in 0..self.asked.answers.len() {
            let answer = &self.asked.answers[i];
            let p = answer.peer;
            let sent = self.peers.get_mut(p).filter(|peer| {
                let free = peer.sid == answer.sid && peer.plain && peer.jobq.head == NONE;
                let old = Old::Few(answer.values);
                free && send_answer(peer, self.word, &answer.asked, old, out)
            });
            let Some(peer) = sent else {
                self.answer_later(i);
                continue;
            };
            self.counters.tx_frames += 1;
            if answered(now, peer) {
                self.arm_timer(now, p);
            }
        }
        self.asked.answers.clear();
    }

    /// Leaves an answer to the long way, unless the session has ended: nobody waits for it then.
    #[cold]
    fn answer_later(&mut self, i: usize) {
        let Answer { peer, sid, asked, values } = self.asked.answers[i];
        let RespOp { dst_op, dst_gen, offset, .. } = asked.resp();
        if self.peers.get(peer).is_none_or(|peer| peer.sid != sid) {
            return;
        }
        let (mut short, all, len) = ([0; Job::SHORT], values.to_bytes(), values.len() as u32);
        short.copy_from_slice(&all[..Job::SHORT]);
        let kind = JobKind::Values { offset, len, short, long: Vec::new() };
        let link = Link::default();
        self.add_job(Job { peer, dst_op, dst_gen, kind, queued: true, link });
    }
}

impl Near {
    /// Executes the operation that `frame` holds from offset `at` of region `mr`, if that can be,
    /// and returns the old values.
    #[inline(always)]
    fn execute<const USUAL: bool>(&self, mr: &Mr, at: usize, frame: &RxFrame<'_>) -> Option<u128> {
        if USUAL {
            // Of what is written here the compiler makes a few instructions.
            let (op, ty) = (atomic::AtomicOp::Sum, Datatype::Uint64);
            let operand = u64::from_le_bytes(frame.chunk_at(AtomicOp::HEAD)?);
            return mr.buf.atomic_word(at, op, ty, operand.into()).map(u128::from);
        }
        if self.word {
            return self.execute_word(mr, at, frame).map(u128::from);
        }
        self.execute_few(mr, at, frame)
    }

    #[inline(never)]
    fn execute_word(&self, mr: &Mr, at: usize, frame: &RxFrame<'_>) -> Option<u64> {
        let operands = frame.few_at(AtomicOp::HEAD, self.plen.into())?;
        mr.buf.atomic_word(at, self.op, self.ty, operands)
    }

    /// On few bytes that are no word.
    #[inline(never)]
    fn execute_few(&self, mr: &Mr, at: usize, frame: &RxFrame<'_>) -> Option<u128> {
        let (plen, bytes) = (usize::from(self.plen), usize::from(self.bytes));
        let (mut few, mut old) = ([0; Few::MAX], [0; FEW]);
        if !frame.copy_to(AtomicOp::HEAD, &mut few[..plen]) {
            return None;
        }
        let (operand, compare) = few[..plen].split_at(plen.min(bytes));
        let count = bytes / self.ty.size();
        let to = &mut old[..bytes];
        let done = mr.buf.atomic(at, self.op, self.ty, count, operand, compare, to, mr.sharing);
        done.ok().map(|()| u128::from_le_bytes(old))
    }
}

impl Peer {
    /// One answer less is missing to an operation of the short way.
    #[inline(always)]
    fn forget_short_op(&mut self) {
        self.answers -= 1;
        self.short_ops -= 1;
    }
}

/// Whether a packet is next in order from a peer that we have, and what it acknowledges and grants
/// is waited for by nobody.
#[inline(always)]
fn is_next(peers: &Slab<Peer>, word: u64, base: &PlainBase) -> bool {
    let Some(peer) = peers.get(slot_of(base.dst_sid)) else { return false };
    let acked = base.cack.0.wrapping_sub(peer.snd.una.0);
    let granted = base.grant.wrapping_sub(peer.credit as u16);
    peer.in_order
        && (base.head.dst ^ word) << 16 == 0
        && base.head.src == peer.word
        && base.dst_sid == peer.sid
        && base.psn == peer.rcv_nxt
        && (acked == 0 && granted == 0 || is_unawaited::<false>(peer, acked, granted))
}

/// Notes that the packet that [`is_next`] from `peer` has been taken. `heard` is the time in which
/// our own loop ran.
#[inline(always)]
fn accept(peer: &mut Peer, base: &PlainBase, heard: u64) {
    let granted = base.grant.wrapping_sub(peer.credit as u16);
    peer.heard = heard;
    peer.probes = 0;
    peer.snd.una = base.cack;
    peer.credit = peer.credit.wrapping_add(granted.into());
    peer.rcv_nxt = peer.rcv_nxt.next();
}

/// The base of the next packet to `peer` from `src`.
#[inline(always)]
fn base_to(peer: &Peer, src: u64, ty: Ty, plen: usize) -> PlainBase {
    PlainBase {
        head: PlainHead::of_ty(ty, peer.word, src),
        dst_sid: peer.remote_sid,
        psn: peer.snd.nxt,
        cack: peer.rcv_nxt,
        grant: peer.granted as u16,
        plen: plen as u16,
    }
}

/// To whom an operation that is about to leave goes.
#[derive(Clone, Copy)]
struct To<'a> {
    peer: &'a Peer,
    /// This node, as [`mac_word`](crate::wire::mac_word) has it.
    src: u64,
    /// From whom, which knows the way.
    ep: &'a Ep,
    /// Its name, for the answer.
    made: Handle,
}

/// What it is.
#[derive(Clone, Copy)]
struct What {
    kind: AtomicKind,
    op: u32,
    ty: u32,
    range: RmaIov,
}

/// Sends an operation, and says whether it has left.
#[inline(always)]
fn send_request(to: &To<'_>, req: &ShortAtomic<'_>, out: &mut impl FrameSink) -> bool {
    let fetch = &to.ep.fetch;
    let &ShortAtomic { kind, op, ty, range, operand, compare, .. } = req;
    let what = What { kind, op, ty, range };
    // Most often it carries one word, and then how long it is need not be asked on the way.
    if fetch.operand == 8 && fetch.compare == 0 {
        return out.send_short(&WithWord { to, what: &what, operand }) == Tx::Sent;
    }
    let few = match (fetch.operand, fetch.compare) {
        (0, _) => Some(Few::NONE),
        (len, 0) => operand.few().map(|operand| Few::one(operand, len)),
        (len, _) => match (operand.few(), compare.few()) {
            (Some(operand), Some(compare)) => Some(Few::pair(operand, compare, len)),
            _ => None,
        },
    };
    // Copies, so that what others look at never has to lie in memory.
    few.is_some_and(|few| send_with_few(*to, what, few, out))
}

#[inline(never)]
fn send_with_few(to: To<'_>, what: What, few: Few, out: &mut impl FrameSink) -> bool {
    out.send_short(&WithFew { to: &to, what: &what, few }) == Tx::Sent
}

/// Writes all of a request but its payload of `plen` bytes.
#[inline(always)]
fn put_request(to: &To<'_>, what: &What, plen: usize, out: &mut impl HeadOut) {
    let To { peer, src, ep, made } = *to;
    let RmaIov { addr, len, key: rkey } = what.range;
    let (dst_ep, src_ep, seq) = (ep.route.ep, ep.number, peer.rma_seq);
    let op = AtomicOp {
        range: RemoteRange { dst_ep, src_ep, seq, last: true, rkey, addr },
        end: true,
        fetch: true,
        compare: what.kind == AtomicKind::Compare,
        dst_op: ShortOp::name(made.idx()),
        dst_gen: made.generation(),
        count: len as u16,
        op: what.op as u8,
        ty: what.ty as u8,
        ..AtomicOp::default()
    };
    op.put(&base_to(peer, src, Ty::Atomic, plen), asks(peer), out);
}

/// A request whose payload is its operand, a word. Looked at when it is written, so that until then
/// nothing of it stands in a register.
struct WithWord<'a> {
    to: &'a To<'a>,
    what: &'a What,
    operand: &'a Span,
}

impl ShortFrame<{ AtomicOp::HEAD + 8 }> for WithWord<'_> {
    #[inline(always)]
    fn dst(&self) -> u64 {
        self.to.peer.word
    }

    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        // Of a word that is all.
        let word = self.operand.few().unwrap_or_default() as u64;
        out.set::<{ AtomicOp::HEAD }, 8>(word.to_le_bytes());
        put_request(self.to, self.what, 8, out);
    }
}

/// A request with its payload.
struct WithFew<'a> {
    to: &'a To<'a>,
    what: &'a What,
    few: Few,
}

impl ShortFrame<{ AtomicOp::HEAD }> for WithFew<'_> {
    #[inline(always)]
    fn dst(&self) -> u64 {
        self.to.peer.word
    }

    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        put_request(self.to, self.what, self.few.len(), out);
    }

    #[inline(always)]
    fn few(&self) -> Few {
        self.few
    }
}

/// Whether the next packet to `peer` asks for an acknowledgement.
#[inline(always)]
fn asks(peer: &Peer) -> bool {
    peer.snd.in_flight() % 64 == 63
}

/// The old values of an answer: as in [`send_request`], most often a word.
enum Old {
    Word(u64),
    Few(Few),
}

/// Sends an answer to `peer` from node `src`, and says whether it has left.
#[inline(always)]
fn send_answer(
    peer: &Peer,
    src: u64,
    asked: &wire::Asked,
    old: Old,
    out: &mut impl FrameSink,
) -> bool {
    let open = peer.snd.in_flight() < WINDOW;
    open && match old {
        Old::Word(old) => out.send_short(&WordTo { peer, src, asked, old }) == Tx::Sent,
        Old::Few(old) => out.send_short(&FewTo { peer, src, asked, old }) == Tx::Sent,
    }
}

/// Notes that an answer has left to `peer`. Returns whether its timer is to be armed.
#[inline(always)]
fn answered(now: Instant, peer: &mut Peer) -> bool {
    if peer.snd.in_flight() == 0 {
        peer.probe_at = now;
    }
    peer.snd.number();
    peer.short_left = peer.short_left.saturating_sub(1);
    peer.tell_ack();
    peer.timer_at == Instant(u64::MAX)
}

/// An answer with a word that is about to leave.
struct WordTo<'a> {
    peer: &'a Peer,
    src: u64,
    asked: &'a wire::Asked,
    old: u64,
}

impl ShortFrame<{ RespOp::HEAD + 8 }> for WordTo<'_> {
    #[inline(always)]
    fn dst(&self) -> u64 {
        self.peer.word
    }

    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        out.set::<{ RespOp::HEAD }, 8>(self.old.to_le_bytes());
        let base = base_to(self.peer, self.src, Ty::Resp, 8);
        self.asked.resp().put(&base, asks(self.peer), out);
    }
}

/// An answer that is about to leave.
struct FewTo<'a> {
    peer: &'a Peer,
    src: u64,
    asked: &'a wire::Asked,
    old: Few,
}

impl ShortFrame<{ RespOp::HEAD }> for FewTo<'_> {
    #[inline(always)]
    fn dst(&self) -> u64 {
        self.peer.word
    }

    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        let base = base_to(self.peer, self.src, Ty::Resp, self.old.len());
        self.asked.resp().put(&base, asks(self.peer), out);
    }

    #[inline(always)]
    fn few(&self) -> Few {
        self.old
    }
}

impl ShortAtomic<'_> {
    /// Whether its memory is as `fetch` has it, and the result overlaps nothing.
    #[inline(always)]
    fn fits(&self, fetch: &Fetch) -> bool {
        let Some(result) = self.result.as_one() else { return false };
        let (reads, compares) = (fetch.operand == 0, fetch.compare != 0);
        let fits = |part: &Span, len: usize| part.len() == len && !part.overlaps(result);
        result.len() == fetch.bytes
            && (reads || fits(self.operand, fetch.operand))
            && (!compares || fits(self.compare, fetch.compare))
    }
}
