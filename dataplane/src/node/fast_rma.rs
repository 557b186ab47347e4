//! The fast path of one-sided operations at the initiator, on a lossless path. `fast_target` has
//! the target's side.
//!
//! As in `fast_eager`, every check comes first and nothing changes unless all pass; otherwise the
//! slow path (`rma`, `rma_out`, `rma_in`) starts from the beginning. An operation of one packet
//! leaves in the call that posts it. Its record ([`FastOp`]) is short: it keeps nothing to
//! retransmit from, and the packet carries the rest. The answer carries the record's id.
//!
//! At most [`ANSWERS_MAX`] operations are in flight to a peer, since the target has to keep as many
//! answers. The next operation takes the slow path (`Node::try_rma` decides), where it waits until
//! an operation ends.

use barewire_driver::frame::{ETH_HDR_LEN, RxFrame};
use barewire_driver::hint::cold;
use barewire_driver::mem::{InlineBytes, IoBuf, Span};
use barewire_driver::port::Tx;

use super::Todo;
use super::ep::Ep;
use super::fast_eager::{FAST_FLAGS, eager_cost, queue_of_reserved};
use super::fast_op::{FastOp, Fetch, Form, OpBits};
use super::ops::Response;
use super::peer::{Peer, slot_of};
use super::rma::{checked_len, valid_pair};
use super::rma_out::ANSWERS_MAX;
use super::{
    AtomicReq, EpId, FrameSink, InPlaceFrame, NoReader, Node, Operations, ReadReq, Reader, RmaIov,
    WriteReq,
};
use crate::error::Error;
use crate::flags::OpFlags;
use crate::idx::{EpIdx, FastOpIdx, PeerIdx, TxIdx};
use crate::proto::atomic::{self, AtomicKind};
use crate::rel::psn::Psn;
use crate::slab::Handle;
use crate::types::{CqErr, Cqe, FI_ADDR_UNSPEC, FiAddr, Instant, ProvErrno};
use crate::wire::{
    AtomicOp, BaseOut, HeadOut, NackReason, READ_ANSWER_MAX, ReadOp, RemoteRange, RespOp, Ty,
    WriteOp,
};

/// Longest read on the fast path, bytes. Longer ones are paced by the pull window.
const READ_FAST_MAX: usize = READ_ANSWER_MAX as usize;

/// Packets in flight at which an operation requests an acknowledgement.
pub(super) const ASKS_EVERY: u32 = 64;

/// Flags that an operation on the fast path may carry.
const FLAGS: OpFlags = FAST_FLAGS.union(OpFlags::DELIVERY_COMPLETE);

/// The common arguments of operations of the fast path. Each has one remote range.
#[derive(Clone, Copy, Debug)]
pub struct FastCall {
    /// Destination.
    pub dest: FiAddr,
    /// The remote range.
    pub range: RmaIov,
    /// Returned in the completion.
    pub context: u64,
    /// As in [`WriteReq::flags`].
    pub flags: OpFlags,
    /// As in [`WriteReq::no_completion`].
    pub no_completion: bool,
}

/// A write: [`WriteReq`] with borrowed memory, which has been read when the call returns true.
#[derive(Debug)]
pub struct FastWrite<'a> {
    /// The bytes.
    pub buf: &'a IoBuf,
    /// The other arguments.
    pub call: FastCall,
}

/// A read: [`ReadReq`] with borrowed memory, which is taken if the call returns true.
#[derive(Debug)]
pub struct FastRead<'a> {
    /// Destination of the bytes.
    pub buf: &'a mut IoBuf,
    /// The other arguments.
    pub call: FastCall,
}

/// An atomic operation: [`AtomicReq`] with borrowed memory. `result` is taken if the call returns
/// true.
#[derive(Debug)]
pub struct FastAtomic<'a> {
    /// Base, fetching or comparing.
    pub kind: AtomicKind,
    /// `enum fi_op`.
    pub op: u32,
    /// `enum fi_datatype`.
    pub ty: u32,
    /// The operands.
    pub operand: &'a Span,
    /// The compare values.
    pub compare: &'a Span,
    /// Destination of the old values.
    pub result: &'a mut IoBuf,
    /// The other arguments; the range's length counts elements.
    pub call: FastCall,
}

impl AtomicReq {
    /// The same request for [`Node::try_atomic`]. `None` if its memory or its remote range is in
    /// several pieces.
    #[inline]
    pub fn fast(&mut self) -> Option<FastAtomic<'_>> {
        let &mut Self { kind, op, ty, dest, context, flags, no_completion, .. } = self;
        let &[range] = self.rma.as_slice() else { return None };
        Some(FastAtomic {
            kind,
            op,
            ty,
            operand: self.operand.as_one()?,
            compare: self.compare.as_one()?,
            result: &mut self.result,
            call: FastCall { dest, range, context, flags, no_completion },
        })
    }
}

impl WriteReq {
    /// The same request for [`Node::try_write`]. `None` if it has several remote ranges.
    #[inline]
    pub fn fast(&self) -> Option<FastWrite<'_>> {
        let &Self { ref buf, dest, context, flags, no_completion, .. } = self;
        let &[range] = self.rma.as_slice() else { return None };
        Some(FastWrite { buf, call: FastCall { dest, range, context, flags, no_completion } })
    }
}

impl ReadReq {
    /// The same request for [`Node::try_read`]. `None` if it has several remote ranges.
    #[inline]
    pub fn fast(&mut self) -> Option<FastRead<'_>> {
        let &mut Self { ref mut buf, dest, context, flags, .. } = self;
        let &[range] = self.rma.as_slice() else { return None };
        let no_completion = false;
        Some(FastRead { buf, call: FastCall { dest, range, context, flags, no_completion } })
    }
}

impl Fetch {
    /// Whether `req` has this shape.
    #[inline(always)]
    fn is_of(&self, req: &FastAtomic<'_>) -> bool {
        self.op_ty == Self::name(req.op, req.ty)
            && self.count == req.call.range.len
            && self.flags == req.call.flags
            && self.kind == req.kind
    }

    /// Checks a request shape and caches it in `ep`. `None`, and nothing changed, if the shape is
    /// invalid or not for the fast path. (The arguments fit the argument registers.)
    #[inline(never)]
    fn cache_shape(
        ep: &mut Ep,
        kind: AtomicKind,
        op: u32,
        ty: u32,
        count: u64,
        flags: OpFlags,
    ) -> Option<()> {
        let form = if kind == AtomicKind::Base { Form::Change } else { Form::Fetch };
        if !ep.may_rma[form as usize] || !FLAGS.contains(flags) {
            return None;
        }
        let (atomic_op, datatype) = valid_pair(kind, op, ty).ok()?;
        let bytes = checked_len(datatype, count).ok().filter(|&bytes| bytes <= Response::SHORT)?;
        let operand = if atomic_op == atomic::AtomicOp::Read { 0 } else { bytes };
        let compare = if kind == AtomicKind::Compare { bytes } else { 0 };
        let result = if kind == AtomicKind::Base { 0 } else { bytes };
        let word = operand == 8 && compare == 0;
        let bits = OpBits::new(form, is_signaled(flags, ep)).counted_by(&ep.rma_cntr);
        let op_ty = Self::name(op, ty);
        let bytes = bytes as u32;
        ep.fetch = Self { op_ty, count, flags, kind, bytes, result, operand, compare, word, bits };
        Some(())
    }
}

/// Whether a success writes a completion, for a call that does not suppress it.
#[inline(always)]
fn is_signaled(flags: OpFlags, ep: &Ep) -> bool {
    flags.contains(OpFlags::COMPLETION) || ep.sig_all
}

/// The differences between the four kinds of operations, for `try_rma`.
trait FastRequest {
    fn call(&self) -> &FastCall;

    fn form(&self) -> Form;

    /// Kind and signaled bit, before the peer is known. The request [`fits`](Self::fits) and does
    /// not suppress its completion.
    #[inline(always)]
    fn bits(&self, ep: &Ep) -> OpBits {
        OpBits::new(self.form(), is_signaled(self.call().flags, ep)).counted_by(&ep.rma_cntr)
    }

    /// Whether endpoint `ep` may post the request on the fast path: capability, flags, memory and
    /// lengths.
    fn fits(&self, ep: &mut Ep) -> bool;

    /// Length of the longer one of the request's and the answer's frame, bytes; 0 if any frame
    /// holds both.
    fn frame_len(&self) -> usize;

    /// Bytes that the operation transfers. The request [`fits`](Self::fits).
    fn bytes(&self, ep: &Ep) -> u32;

    /// Takes the memory for the answer. `None`, and nothing is taken, if it is in several pieces.
    fn take_result(&mut self) -> Option<Span>;

    /// Returns the memory of an operation that was not sent.
    fn return_result(&mut self, result: Span);

    /// Sends the operation's packet. False if the port did not take it.
    fn send(&self, to: &Endpoints<'_>, out: &mut impl FrameSink) -> bool;
}

impl FastRequest for FastAtomic<'_> {
    #[inline(always)]
    fn call(&self) -> &FastCall {
        &self.call
    }

    #[inline(always)]
    fn form(&self) -> Form {
        if self.kind == AtomicKind::Base { Form::Change } else { Form::Fetch }
    }

    #[inline(always)]
    fn bits(&self, ep: &Ep) -> OpBits {
        ep.fetch.bits
    }

    #[inline(always)]
    fn fits(&self, ep: &mut Ep) -> bool {
        let &Self { kind, op, ty, call: FastCall { range, flags, .. }, .. } = self;
        (ep.fetch.is_of(self)
            || cold(Fetch::cache_shape(ep, kind, op, ty, range.len, flags).is_some()))
            && self.has_memory(&ep.fetch)
    }

    #[inline(always)]
    fn frame_len(&self) -> usize {
        0
    }

    #[inline(always)]
    fn bytes(&self, ep: &Ep) -> u32 {
        ep.fetch.bytes
    }

    #[inline(always)]
    fn take_result(&mut self) -> Option<Span> {
        self.result.take_one()
    }

    #[inline(always)]
    fn return_result(&mut self, result: Span) {
        *self.result = IoBuf::one(result);
    }

    #[inline(always)]
    fn send(&self, to: &Endpoints<'_>, out: &mut impl FrameSink) -> bool {
        send_atomic(to, self, out)
    }
}

impl FastRequest for FastWrite<'_> {
    #[inline(always)]
    fn call(&self) -> &FastCall {
        &self.call
    }

    #[inline(always)]
    fn form(&self) -> Form {
        Form::Write
    }

    #[inline(always)]
    fn fits(&self, ep: &mut Ep) -> bool {
        let (FastCall { flags, range, .. }, len) = (&self.call, self.buf.len());
        let long = flags.contains(OpFlags::INJECT) && len > Node::INJECT_SIZE;
        let may = ep.may_rma[Form::Write as usize];
        // Longer than a frame otherwise, and the length with the header might wrap.
        let short = (1..=1 << 16).contains(&len);
        may && FLAGS.contains(*flags) && len as u64 == range.len && short && !long
    }

    #[inline(always)]
    fn frame_len(&self) -> usize {
        WriteOp::HEAD + self.buf.len()
    }

    #[inline(always)]
    fn bytes(&self, _: &Ep) -> u32 {
        self.call.range.len as u32
    }

    #[inline(always)]
    fn take_result(&mut self) -> Option<Span> {
        Some(Span::EMPTY)
    }

    #[inline(always)]
    fn return_result(&mut self, _: Span) {}

    #[inline(always)]
    fn send(&self, to: &Endpoints<'_>, out: &mut impl FrameSink) -> bool {
        out.send_in_place(&WriteFrame { to, write: self }) == Tx::Sent
    }
}

impl FastRequest for FastRead<'_> {
    #[inline(always)]
    fn call(&self) -> &FastCall {
        &self.call
    }

    #[inline(always)]
    fn form(&self) -> Form {
        Form::Read
    }

    #[inline(always)]
    fn fits(&self, ep: &mut Ep) -> bool {
        let (FastCall { flags, range, .. }, len) = (&self.call, self.buf.len());
        let allowed = const { FLAGS.difference(OpFlags::INJECT) };
        let may = ep.may_rma[Form::Read as usize];
        may && allowed.contains(*flags)
            && len as u64 == range.len
            && len > 0
            && len <= READ_FAST_MAX
    }

    #[inline(always)]
    fn frame_len(&self) -> usize {
        RespOp::HEAD + self.buf.len()
    }

    #[inline(always)]
    fn bytes(&self, _: &Ep) -> u32 {
        self.call.range.len as u32
    }

    #[inline(always)]
    fn take_result(&mut self) -> Option<Span> {
        self.buf.take_one()
    }

    #[inline(always)]
    fn return_result(&mut self, result: Span) {
        *self.buf = IoBuf::one(result);
    }

    #[inline(always)]
    fn send(&self, to: &Endpoints<'_>, out: &mut impl FrameSink) -> bool {
        out.send_in_place(&ReadFrame { to, read: self }) == Tx::Sent
    }
}

impl Node {
    /// Posts an atomic operation and sends it in the same call:
    /// [`post_atomic`](super::Posting::post_atomic) and [`transmit`](Self::transmit) in one. Only
    /// on a lossless path, if nothing is queued before it, and if it suits the fast path. False:
    /// nothing has changed; call `post_atomic`, which also returns the error of an invalid request.
    ///
    /// `clock` is read after the packet has left, and only if the peer's silence counts from now.
    #[inline(always)]
    pub fn try_atomic(
        &mut self,
        ep: EpId,
        req: &mut FastAtomic<'_>,
        out: &mut impl FrameSink,
        clock: impl FnOnce() -> Instant,
    ) -> bool {
        self.try_rma(ep, req, out, clock)
    }

    /// Posts a write and sends it in the same call. False, as in [`try_atomic`](Self::try_atomic):
    /// nothing has changed; call [`post_write`](super::Posting::post_write).
    #[inline(always)]
    pub fn try_write(
        &mut self,
        ep: EpId,
        req: &mut FastWrite<'_>,
        out: &mut impl FrameSink,
        clock: impl FnOnce() -> Instant,
    ) -> bool {
        self.try_rma(ep, req, out, clock)
    }

    /// Posts a read and sends it in the same call. False, as in [`try_atomic`](Self::try_atomic):
    /// nothing has changed; call [`post_read`](super::Posting::post_read).
    #[inline(always)]
    pub fn try_read(
        &mut self,
        ep: EpId,
        req: &mut FastRead<'_>,
        out: &mut impl FrameSink,
        clock: impl FnOnce() -> Instant,
    ) -> bool {
        self.try_rma(ep, req, out, clock)
    }

    #[inline(always)]
    fn try_rma(
        &mut self,
        ep: EpId,
        req: &mut impl FastRequest,
        out: &mut impl FrameSink,
        clock: impl FnOnce() -> Instant,
    ) -> bool {
        if self.due.todo.contains(Todo::SEND) {
            return cold(false);
        }
        let e = ep.0.idx();
        let Some(ep) = self.eps.by_handle_mut(ep.0) else { return cold(false) };
        if !req.fits(ep) {
            return cold(false);
        }
        let &FastCall { dest, context, no_completion, .. } = req.call();
        let net = (&self.avs, &self.peers);
        if ep.route.dest != dest && !cold(ep.find_route(net, dest)) {
            return false;
        }
        let p = ep.route.peer;
        let Some(peer) = self.peers.at_mut(p) else { return cold(false) };
        if ep.ops_reserved == 0 && !ep.reserve_ops(&mut self.cqs) {
            return cold(false);
        }
        if usize::from(peer.answers) >= ANSWERS_MAX
            || !peer.path.is_lossless()
            || eager_cost(peer, 0).is_none()
            || req.frame_len() > peer.frame_max as usize + ETH_HDR_LEN
        {
            return cold(false);
        }
        let Some(result) = req.take_result() else { return cold(false) };
        let (mut bits, psn) = (req.bits(ep).to(p), peer.snd.nxt);
        if no_completion {
            bits.0 &= !OpBits::SIGNALED;
        }
        let kept = result.again();
        let op = FastOp { context, result, bits, ep: e, psn, bytes: req.bytes(ep) };
        let Some(made) = self.fast_ops.alloc_named(op) else {
            req.return_result(kept);
            return cold(false);
        };
        if !req.send(&Endpoints { peer, src: &self.port.addr, ep, made }, out) {
            req.return_result(self.fast_ops.free(made.idx()).result);
            return cold(false);
        }
        self.counters.tx_frames += 1;
        ep.ops_reserved -= 1;
        peer.answers += 1;
        peer.rma_seq = peer.rma_seq.wrapping_add(1);
        peer.tx_quota -= 1;
        peer.carried_ack_in_order();
        if !peer.number_by_turn(self.turn.polled_at) {
            let p = ep.route.peer;
            self.wait_from(clock(), p);
        }
        true
    }

    /// Processes a RESP. The completion may go to `reader`.
    #[inline(always)]
    pub(super) fn on_resp_frame(&mut self, now: Instant, frame: RxFrame<'_>, reader: impl Reader) {
        if !self.rx_resp::<true>(&frame, reader) {
            cold(());
            self.on_resp_rest(now, &frame.again());
        }
    }

    /// The uncommon cases of [`on_resp_frame`](Self::on_resp_frame).
    #[inline(never)]
    fn on_resp_rest(&mut self, now: Instant, frame: &RxFrame<'_>) {
        if !self.rx_resp::<false>(frame, NoReader) {
            self.on_frame_slow(now, frame);
        }
    }

    /// Completes the operation that a RESP answers, if the RESP is next in order and carries the
    /// whole result. False otherwise: nothing has changed.
    ///
    /// `COMMON`: only from a [steady](Peer::is_steady) peer, if no acknowledgement becomes due, and
    /// if a success only writes a completion, so that little code is inlined.
    #[inline(always)]
    fn rx_resp<const COMMON: bool>(&mut self, frame: &RxFrame<'_>, reader: impl Reader) -> bool {
        let Some((base, (w, generation))) = RespOp::parse_whole(frame) else { return cold(false) };
        let p = slot_of(base.dst_sid());
        let Some(peer) = self.peers.at_mut(p) else { return cold(false) };
        let own = self.port.addr;
        let steady = peer.steady_flight(own, &base).is_some();
        // The slow path ends an operation that a fenced request waits for.
        let takes = steady
            || !COMMON && peer.send_q.head == TxIdx::NONE && peer.flight(own, &base).is_some();
        if !takes || COMMON && !peer.may_owe_ack() {
            return cold(false);
        }
        let handle = FastOp::handle(w, generation);
        let Some(op) = self.fast_ops.by_handle(handle) else { return cold(false) };
        // The endpoint of the operation may be closed.
        let Some(ep) = self.eps.at_mut(op.ep) else { return cold(false) };
        if if COMMON { !op.bits.completes_alone(p) } else { op.peer() != p }
            || usize::from(base.plen()) != op.result.len()
            || !frame.fill_span(RespOp::HEAD, &op.result)
        {
            return cold(false);
        }
        peer.accept(&base, self.turn.polled_at);
        let acks = peer.owe_ack_lossless();
        if !COMMON {
            self.operations().complete_fast_op(p, handle.idx());
            if acks {
                self.due.make_ready(&mut self.peers, p);
            }
            return true;
        }
        let (flags, _) = op.form().outcome();
        let op_context = op.context;
        // Here the compiler still knows that the slot is in use.
        self.fast_ops.discard(handle.idx());
        peer.forget_fast_op();
        self.counters.rma_done += 1;
        let cqe = Cqe { op_context, flags, src: FI_ADDR_UNSPEC, ..Cqe::default() };
        let place = (&mut ep.tx_used, &mut ep.ops_reserved);
        match queue_of_reserved(&mut self.cqs, ep.tx_cq, place, &reader) {
            None => reader.take(&cqe),
            Some(cq) => cq.push(cqe),
        }
        true
    }
}

impl Operations<'_> {
    /// Completes operation `w`, whose result is in place.
    #[inline(always)]
    fn complete_fast_op(&mut self, p: PeerIdx, w: FastOpIdx) {
        let Some(op) = self.fast_ops.get(w) else { return };
        let (e, form, bytes) = (op.ep, op.form(), op.bytes.into());
        let context = op.bits.signaled().then_some(op.context);
        self.fast_ops.discard(w);
        let Some(peer) = self.objects.peers.get_mut(p) else { return };
        peer.forget_fast_op();
        self.objects.eps[e].tx_used -= 1;
        let (flags, which) = form.outcome();
        self.objects.complete_rma(e, context, flags, (which, bytes));
    }

    /// Processes an answer to an operation of the fast path that took the slow path: the RESP, and
    /// the position of its payload in the frame.
    pub(super) fn on_fast_answer(
        &mut self,
        p: PeerIdx,
        frame: &RxFrame<'_>,
        &RespOp { dst_op, dst_gen, offset, status }: &RespOp,
        (off, len): (usize, usize),
    ) {
        let handle = FastOp::handle(dst_op, dst_gen);
        let known = self.fast_ops.by_handle(handle).is_some_and(|op| op.peer() == p);
        if !known {
            self.objects.counters.rx_stray += 1;
            return;
        }
        let w = handle.idx();
        // A fenced request may wait for this one.
        if !self.objects.peers[p].send_q.is_empty() {
            self.objects.due.make_ready(self.objects.peers, p);
        }
        let op = &self.fast_ops[w];
        if op.ep == EpIdx::NONE {
            self.fast_ops.discard(w);
            self.objects.peers[p].forget_fast_op();
        } else if status.is_none()
            && offset == 0
            && len == op.result.len()
            && frame.fill_span(off, &op.result)
        {
            self.complete_fast_op(p, w);
        } else {
            // The answer does not match the request: the peer is faulty.
            self.fail_fast_op(w, Error::ConnReset, ProvErrno::UnknownOutcome);
        }
    }

    /// Ends the operation of the fast path whose packet `psn` was refused, if any. The packet has
    /// no record to retransmit from.
    #[cold]
    pub(super) fn on_fast_nack(&mut self, p: PeerIdx, psn: Psn, reason: NackReason) {
        let found = self.fast_ops.iter().find(|(_, op)| op.peer() == p && op.psn == psn);
        let Some(w) = found.map(|(w, _)| w) else { return };
        let prov = match reason {
            NackReason::NoEndpoint => ProvErrno::NoEndpoint,
            _ => ProvErrno::NotExecuted,
        };
        self.fail_fast_op(w, super::acked::nack_error(reason), prov);
    }

    /// Ends operation `w` with an error, written to the queue of its endpoint unless that is
    /// closed.
    fn fail_fast_op(&mut self, w: FastOpIdx, err: Error, prov_errno: ProvErrno) {
        let &FastOp { context, ep: e, bits, .. } = &self.fast_ops[w];
        let (p, form) = (bits.peer(), bits.form());
        self.objects.peers[p].forget_fast_op();
        self.fast_ops.discard(w);
        if e != EpIdx::NONE {
            self.objects.eps[e].tx_used -= 1;
            self.report_fast_failure((e, p, form), context, err, prov_errno);
        }
    }

    fn report_fast_failure(
        &mut self,
        (e, p, form): (EpIdx, PeerIdx, Form),
        op_context: u64,
        err: Error,
        prov_errno: ProvErrno,
    ) {
        let (flags, which) = form.outcome();
        let cqe = Cqe { op_context, flags, src: FI_ADDR_UNSPEC, ..Cqe::default() };
        let failure = CqErr { cqe, olen: 0, err, prov_errno, err_data: None };
        let cntr = self.objects.eps[e].rma_cntr[which];
        self.objects.report_op_failure((e, p), failure, cntr);
    }

    /// Ends all operations to peer `p`, whose session has ended with `err`.
    #[cold]
    pub(super) fn fail_fast_ops(&mut self, p: PeerIdx, err: Error) {
        let ops = self.fast_ops.iter().filter(|(_, op)| op.peer() == p);
        let mut ops: Vec<(FastOpIdx, Psn)> = ops.map(|(w, op)| (w, op.psn)).collect();
        // In the order in which they were posted.
        let una = self.objects.peers[p].snd.una;
        ops.sort_by_key(|(_, psn)| psn.0.wrapping_sub(una.0.wrapping_sub(1 << 31)));
        for (w, _) in ops {
            self.fail_fast_op(w, err, ProvErrno::UnknownOutcome);
        }
    }

    /// Kinds of the operations in flight to peer `p`, without those of closed endpoints.
    pub(super) fn fast_op_forms(&self, p: PeerIdx) -> impl Iterator<Item = Form> {
        let ops =
            self.fast_ops.iter().filter(move |(_, op)| op.peer() == p && op.ep != EpIdx::NONE);
        ops.map(|(_, op)| op.form())
    }

    /// Counts the operations in flight of endpoint `e`, which has just been bound to a counter.
    #[cold]
    pub(super) fn count_fast_ops(&mut self, e: EpIdx) {
        for (_, op) in self.fast_ops.iter_mut().filter(|(_, op)| op.ep == e) {
            op.bits.0 &= !OpBits::UNCOUNTED;
        }
    }

    /// Ends the operations of endpoint `e`, which is being closed. Their records stay until the
    /// answer or the refusal arrives, since `Peer::answers` counts them.
    #[cold]
    pub(super) fn cancel_fast_ops(&mut self, e: EpIdx) {
        let ops = self.fast_ops.iter().filter(|(_, op)| op.ep == e);
        let ops: Vec<FastOpIdx> = ops.map(|(w, _)| w).collect();
        for w in ops {
            let op = &mut self.fast_ops[w];
            (op.ep, op.result) = (EpIdx::NONE, Span::EMPTY);
            let (context, form, p) = (op.context, op.form(), op.peer());
            self.objects.eps[e].tx_used -= 1;
            let (err, prov) = (Error::Canceled, ProvErrno::UnknownOutcome);
            self.report_fast_failure((e, p, form), context, err, prov);
        }
    }
}

impl Peer {
    /// Notes that an operation of the fast path has ended.
    #[inline(always)]
    fn forget_fast_op(&mut self) {
        self.answers -= 1;
    }
}

/// The base of the next packet to a peer.
#[derive(Clone, Copy)]
pub(super) struct PeerBase<'a> {
    pub(super) peer: &'a Peer,
    /// This node's address, as [`Station::word`](barewire_driver::port::Station::word) returns it.
    pub(super) src: &'a u64,
}

impl BaseOut for PeerBase<'_> {
    #[inline(always)]
    fn dst(&self) -> u64 {
        self.peer.addr
    }

    #[inline(always)]
    fn src(&self) -> u64 {
        *self.src
    }

    #[inline(always)]
    fn numbers(&self) -> u32 {
        self.peer.numbers_out()
    }

    #[inline(always)]
    fn dst_sid(&self) -> u32 {
        self.peer.remote_sid
    }

    #[inline(always)]
    fn psn(&self) -> Psn {
        self.peer.snd.nxt
    }

    #[inline(always)]
    fn cack(&self) -> Psn {
        self.peer.rcv_nxt
    }

    #[inline(always)]
    fn grant(&self) -> u16 {
        self.peer.granted as u16
    }
}

/// Destination and source of an operation about to be sent.
#[derive(Clone, Copy)]
struct Endpoints<'a> {
    peer: &'a Peer,
    /// This node's address, as [`Station::word`](barewire_driver::port::Station::word) returns it.
    src: &'a u64,
    /// The initiating endpoint, which caches the route.
    ep: &'a Ep,
    /// The record that the answer will name.
    made: Handle<FastOpIdx>,
}

impl Endpoints<'_> {
    /// The remote range of a packet that carries the whole operation.
    #[inline(always)]
    fn range(&self, range: &RmaIov) -> RemoteRange {
        let RmaIov { addr, key: rkey, .. } = *range;
        let ([dst_ep, src_ep], seq) = (self.ep.route.ends, self.peer.rma_seq);
        RemoteRange { dst_ep, rx_ctx: 0, src_ep, seq, last: true, rkey, addr }
    }

    /// Writes the base of its packet.
    #[inline(always)]
    fn put_base(&self, ty: Ty, plen: usize, out: &mut impl HeadOut) {
        // The answer acknowledges it.
        PeerBase { peer: self.peer, src: self.src }.put(ty, plen, false, out);
    }
}

/// Operation, type and range of an atomic request.
#[derive(Clone, Copy)]
struct AtomicDesc {
    kind: AtomicKind,
    op: u32,
    ty: u32,
    range: RmaIov,
}

/// Sends an atomic operation. False if the port did not take it.
#[inline(always)]
fn send_atomic(to: &Endpoints<'_>, req: &FastAtomic<'_>, out: &mut impl FrameSink) -> bool {
    let fetch = &to.ep.fetch;
    let &FastAtomic { kind, op, ty, operand, compare, call: FastCall { range, .. }, .. } = req;
    let desc = AtomicDesc { kind, op, ty, range };
    // A payload of constant length needs no branches on the way.
    if fetch.word {
        return out.send_in_place(&AtomicWordFrame { to, desc: &desc, operand }) == Tx::Sent;
    }
    let payload = match (fetch.operand, fetch.compare) {
        (0, _) => Some(InlineBytes::NONE),
        (len, 0) => operand.to_u128().map(|operand| InlineBytes::one(operand, len)),
        (len, _) => match (operand.to_u128(), compare.to_u128()) {
            (Some(operand), Some(compare)) => Some(InlineBytes::pair(operand, compare, len)),
            _ => None,
        },
    };
    // The callee gets copies, so that the caller's values can stay in registers.
    payload.is_some_and(|payload| send_with_inline(*to, desc, payload, out))
}

#[inline(never)]
fn send_with_inline(
    to: Endpoints<'_>,
    desc: AtomicDesc,
    payload: InlineBytes,
    out: &mut impl FrameSink,
) -> bool {
    out.send_in_place(&AtomicInlineFrame { to: &to, desc: &desc, payload }) == Tx::Sent
}

/// Writes a request without its payload of `plen` bytes.
#[inline(always)]
fn put_request(to: &Endpoints<'_>, desc: &AtomicDesc, plen: usize, out: &mut impl HeadOut) {
    let fetch = desc.kind != AtomicKind::Base;
    to.put_base(Ty::Atomic, plen, out);
    let op = AtomicOp {
        range: to.range(&desc.range),
        end: true,
        fetch,
        answer: !fetch,
        compare: desc.kind == AtomicKind::Compare,
        dst_op: FastOp::name(to.made.idx()),
        dst_gen: to.made.generation(),
        count: desc.range.len as u16,
        op: desc.op as u8,
        ty: desc.ty as u8,
        ..AtomicOp::default()
    };
    op.put(out);
}

/// A request whose payload is one 8-byte operand. The operand is read when it is written, so that
/// it occupies no register earlier.
struct AtomicWordFrame<'a> {
    to: &'a Endpoints<'a>,
    desc: &'a AtomicDesc,
    operand: &'a Span,
}

impl InPlaceFrame<{ AtomicOp::HEAD + 8 }> for AtomicWordFrame<'_> {
    #[inline(always)]
    fn dst(&self) -> u64 {
        self.to.peer.addr
    }

    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        // The low 8 bytes are the whole operand.
        let word = self.operand.to_u128().unwrap_or_default() as u64;
        out.set::<{ AtomicOp::HEAD }, 8>(word.to_le_bytes());
        put_request(self.to, self.desc, 8, out);
    }
}

/// A request with up to [`InlineBytes::MAX`] bytes of payload.
struct AtomicInlineFrame<'a> {
    to: &'a Endpoints<'a>,
    desc: &'a AtomicDesc,
    payload: InlineBytes,
}

impl InPlaceFrame<{ AtomicOp::HEAD }> for AtomicInlineFrame<'_> {
    #[inline(always)]
    fn dst(&self) -> u64 {
        self.to.peer.addr
    }

    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        put_request(self.to, self.desc, self.payload.len(), out);
    }

    #[inline(always)]
    fn inline_bytes(&self) -> InlineBytes {
        self.payload
    }
}

/// The frame of a write.
struct WriteFrame<'a> {
    to: &'a Endpoints<'a>,
    write: &'a FastWrite<'a>,
}

impl InPlaceFrame<{ WriteOp::HEAD }> for WriteFrame<'_> {
    #[inline(always)]
    fn dst(&self) -> u64 {
        self.to.peer.addr
    }

    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        let len = self.write.buf.len();
        self.to.put_base(Ty::Write, len, out);
        let range = self.to.range(&self.write.call.range);
        let (dst_op, dst_gen) = (FastOp::name(self.to.made.idx()), self.to.made.generation());
        let left = len as u64;
        WriteOp { range, imm: None, answer: true, dst_op, dst_gen, left }.put(out);
    }

    #[inline(always)]
    fn part(&self) -> Option<(&IoBuf, usize, usize)> {
        Some((self.write.buf, 0, self.write.buf.len()))
    }
}

/// The frame of a read.
struct ReadFrame<'a> {
    to: &'a Endpoints<'a>,
    read: &'a FastRead<'a>,
}

impl InPlaceFrame<{ ReadOp::HEAD }> for ReadFrame<'_> {
    #[inline(always)]
    fn dst(&self) -> u64 {
        self.to.peer.addr
    }

    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        let Self { to, read: FastRead { call: FastCall { range, .. }, .. } } = self;
        to.put_base(Ty::Read, 0, out);
        let op = ReadOp {
            range: to.range(range),
            end: true,
            answer: true,
            dst_op: FastOp::name(to.made.idx()),
            dst_gen: to.made.generation(),
            offset: 0,
            len: range.len as u32,
        };
        op.put(out);
    }
}

impl FastAtomic<'_> {
    /// Whether the request's memory has the lengths of `fetch`, and the result overlaps neither
    /// operand nor compare value.
    #[inline(always)]
    fn has_memory(&self, fetch: &Fetch) -> bool {
        let Some(result) = self.result.as_one() else { return cold(false) };
        if fetch.word {
            let fetched = if self.kind == AtomicKind::Base { 0 } else { 8 };
            let fits = self.operand.len() == 8 && result.len() == fetched;
            return fits && !self.operand.overlaps(result);
        }
        let (reads, compares) = (fetch.operand == 0, fetch.compare != 0);
        let fits = |part: &Span, len: usize| part.len() == len && !part.overlaps(result);
        result.len() == fetch.result
            && (reads || fits(self.operand, fetch.operand))
            && (!compares || fits(self.compare, fetch.compare))
    }
}
