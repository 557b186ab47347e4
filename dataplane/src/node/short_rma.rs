//! The short way of one-sided operations at their initiator, on a port that loses nothing. The
//! target's is in `short_target`.
//!
//! As in `short`: every question is asked first, nothing changes unless the answer is yes, and else
//! the long way (`rma`, `rma_out`, `rma_in`) begins from the start. An operation of one packet
//! leaves in the call that posts it. Its record is short ([`ShortOp`]): nothing is kept to send it
//! again, and what else there is to say of it is in the packet. One that gets something, old values
//! or bytes of a read, is found by the name that the answer brings. Of the others the packet asks
//! for an acknowledgement, which says that it was executed; until then they stand in a list of
//! their peer, in the order of their packets.
//!
//! A peer may be made to keep no more than [`ANSWERS_MAX`] answers, and no more operations of the
//! short way are under way to it: the next takes the long way (`Node::rma_now` decides that), where
//! it waits until one of them has ended.

use barewire_driver::frame::{ETH_HDR_LEN, RxFrame};
use barewire_driver::hint::cold;
use barewire_driver::mem::{Few, IoBuf, Span};
use barewire_driver::port::Tx;

use super::Todo;
use super::ep::{Ep, may_borrow_more};
use super::ops::Job;
use super::peer::{ACK_EVERY_LOSSLESS, Peer, Peers, slot_of};
use super::rma::{checked_len, valid_pair};
use super::rma_out::ANSWERS_MAX;
use super::short::{PLAIN_FLAGS, is_unawaited, short_cost};
use super::short_op::{Fetch, Form, OpIs, ShortOp};
use super::{AtomicReq, EpId, FrameSink, Node, ReadReq, Reader, RmaIov, ShortFrame, WriteReq};
use crate::error::Error;
use crate::flags::OpFlags;
use crate::plant::is_planted;
use crate::proto::atomic::{self, AtomicKind};
use crate::rel::psn::Psn;
use crate::slab::{Handle, NONE};
use crate::table::Table;
use crate::types::{CqErr, Cqe, FI_ADDR_UNSPEC, FiAddr, Instant, ProvErrno};
use crate::wire::{
    AtomicOp, BaseOut, HeadOut, NackReason, PlainBase, PlainTold, ReadOp, RemoteRange, RespOp, Ty,
    WriteOp,
};

/// Bytes that a read of the short way asks for at most: larger ones are paced.
pub(super) const READ_SHORT: usize = 4096;

/// Of so many packets in flight the last asks for an acknowledgement.
pub(super) const ASKS_EVERY: u32 = 64;

/// Flags of an operation that the short way knows.
const FLAGS: OpFlags = PLAIN_FLAGS.union(OpFlags::DELIVERY_COMPLETE);

/// What the operations of the short way have in common: as in [`WriteReq`], on one remote range.
#[derive(Clone, Copy, Debug)]
pub struct ShortCall {
    /// To whom.
    pub dest: FiAddr,
    /// On what.
    pub range: RmaIov,
    /// Comes back in the completion.
    pub context: u64,
    /// As in [`WriteReq::flags`].
    pub flags: OpFlags,
    /// As in [`WriteReq::no_completion`].
    pub no_completion: bool,
}

/// A write. As [`WriteReq`], with the memory borrowed: if it is posted, it has been read.
#[derive(Debug)]
pub struct ShortWrite<'a> {
    /// The bytes.
    pub buf: &'a IoBuf,
    /// The rest.
    pub call: ShortCall,
}

/// A read. As [`ReadReq`], with the memory borrowed: it is taken if the operation is posted.
#[derive(Debug)]
pub struct ShortRead<'a> {
    /// Where the bytes go.
    pub buf: &'a mut IoBuf,
    /// The rest.
    pub call: ShortCall,
}

/// An atomic operation. As [`AtomicReq`], with the memory borrowed: `result` is taken if the
/// operation is posted.
#[derive(Debug)]
pub struct ShortAtomic<'a> {
    /// Which family.
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
    /// The rest; the range's length counts elements.
    pub call: ShortCall,
}

impl AtomicReq {
    /// The same for [`Node::atomic_now`], if it is for that.
    #[inline]
    pub fn short(&mut self) -> Option<ShortAtomic<'_>> {
        let &mut Self { kind, op, ty, dest, context, flags, no_completion, .. } = self;
        let &[range] = self.rma.as_slice() else { return None };
        Some(ShortAtomic {
            kind,
            op,
            ty,
            operand: self.operand.as_one()?,
            compare: self.compare.as_one()?,
            result: &mut self.result,
            call: ShortCall { dest, range, context, flags, no_completion },
        })
    }
}

impl WriteReq {
    /// The same for [`Node::write_now`], if it is for that.
    #[inline]
    pub fn short(&self) -> Option<ShortWrite<'_>> {
        let &Self { ref buf, dest, context, flags, no_completion, .. } = self;
        let &[range] = self.rma.as_slice() else { return None };
        Some(ShortWrite { buf, call: ShortCall { dest, range, context, flags, no_completion } })
    }
}

impl ReadReq {
    /// The same for [`Node::read_now`], if it is for that.
    #[inline]
    pub fn short(&mut self) -> Option<ShortRead<'_>> {
        let &mut Self { ref mut buf, dest, context, flags, .. } = self;
        let &[range] = self.rma.as_slice() else { return None };
        let no_completion = false;
        Some(ShortRead { buf, call: ShortCall { dest, range, context, flags, no_completion } })
    }
}

impl Fetch {
    /// Whether `req` is alike.
    #[inline(always)]
    fn is_of(&self, req: &ShortAtomic<'_>) -> bool {
        self.named == Self::name(req.op, req.ty)
            && self.count == req.call.range.len
            && self.flags == req.call.flags
            && self.kind == req.kind
    }

    /// Makes that of `ep` one of such operations. `None`, and nothing changed, if they are wrong or
    /// not short. (In as many words as registers pass, or each call would put them in memory.)
    #[inline(never)]
    fn renew(
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
        let (what, datatype) = valid_pair(kind, op, ty).ok()?;
        let bytes = checked_len(datatype, count).ok().filter(|&bytes| bytes <= Job::SHORT)?;
        let operand = if what == atomic::AtomicOp::Read { 0 } else { bytes };
        let compare = if kind == AtomicKind::Compare { bytes } else { 0 };
        let result = if kind == AtomicKind::Base { 0 } else { bytes };
        let word = operand == 8 && compare == 0;
        let mut is = OpIs::new(form, is_told(flags, ep));
        if result == 8 && ep.rma_cntr[form.outcome().1] == NONE {
            is.0 |= OpIs::PLAIN;
        }
        let named = Self::name(op, ty);
        ep.fetch = Self { named, count, flags, kind, result, operand, compare, word, is };
        Some(())
    }
}

/// Whether the success of a call with these flags, of which somebody may want to hear, writes a
/// completion.
#[inline(always)]
fn is_told(flags: OpFlags, ep: &Ep) -> bool {
    flags.contains(OpFlags::COMPLETION) || ep.tells
}

/// What the short way asks an operation.
trait Short {
    fn call(&self) -> &ShortCall;

    fn form(&self) -> Form;

    /// What it is, to nobody yet, as it [`fits`](Self::fits) and if somebody may want to hear of
    /// it.
    #[inline(always)]
    fn is(&self, ep: &Ep) -> OpIs {
        OpIs::new(self.form(), is_told(self.call().flags, ep))
    }

    /// Whether flags, memory and lengths are those of an operation of the short way of endpoint
    /// `ep`, which may post it.
    fn fits(&self, ep: &mut Ep) -> bool;

    /// Length of its frame, or of the answer's, if that is longer; 0 if any holds it.
    fn frame_len(&self) -> usize;

    /// Takes the memory for the answer, if it is in one piece.
    fn take_result(&mut self) -> Option<Span>;

    /// Has it back.
    fn return_result(&mut self, result: Span);

    /// Sends it, and says whether it has left.
    fn send(&self, to: &To<'_>, out: &mut impl FrameSink) -> bool;
}

impl Short for ShortAtomic<'_> {
    #[inline(always)]
    fn call(&self) -> &ShortCall {
        &self.call
    }

    #[inline(always)]
    fn form(&self) -> Form {
        if self.kind == AtomicKind::Base { Form::Change } else { Form::Fetch }
    }

    #[inline(always)]
    fn is(&self, ep: &Ep) -> OpIs {
        ep.fetch.is
    }

    #[inline(always)]
    fn fits(&self, ep: &mut Ep) -> bool {
        let &Self { kind, op, ty, call: ShortCall { range, flags, .. }, .. } = self;
        (ep.fetch.is_of(self) || cold(Fetch::renew(ep, kind, op, ty, range.len, flags).is_some()))
            && self.has_memory(&ep.fetch)
    }

    #[inline(always)]
    fn frame_len(&self) -> usize {
        0
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
    fn send(&self, to: &To<'_>, out: &mut impl FrameSink) -> bool {
        send_atomic(to, self, out)
    }
}

impl Short for ShortWrite<'_> {
    #[inline(always)]
    fn call(&self) -> &ShortCall {
        &self.call
    }

    #[inline(always)]
    fn form(&self) -> Form {
        Form::Write
    }

    #[inline(always)]
    fn fits(&self, ep: &mut Ep) -> bool {
        let (ShortCall { flags, range, .. }, len) = (&self.call, self.buf.len());
        let long = flags.contains(OpFlags::INJECT) && len > Node::INJECT_SIZE;
        let may = ep.may_rma[Form::Write as usize];
        may && FLAGS.contains(*flags) && len as u64 == range.len && len > 0 && !long
    }

    #[inline(always)]
    fn frame_len(&self) -> usize {
        WriteOp::HEAD + self.buf.len()
    }

    #[inline(always)]
    fn take_result(&mut self) -> Option<Span> {
        Some(Span::EMPTY)
    }

    #[inline(always)]
    fn return_result(&mut self, _: Span) {}

    #[inline(always)]
    fn send(&self, to: &To<'_>, out: &mut impl FrameSink) -> bool {
        out.send_short(&WriteTo { to, write: self }) == Tx::Sent
    }
}

impl Short for ShortRead<'_> {
    #[inline(always)]
    fn call(&self) -> &ShortCall {
        &self.call
    }

    #[inline(always)]
    fn form(&self) -> Form {
        Form::Read
    }

    #[inline(always)]
    fn fits(&self, ep: &mut Ep) -> bool {
        let (ShortCall { flags, range, .. }, len) = (&self.call, self.buf.len());
        let allowed = const { FLAGS.difference(OpFlags::INJECT) };
        let may = ep.may_rma[Form::Read as usize];
        may && allowed.contains(*flags) && len as u64 == range.len && len > 0 && len <= READ_SHORT
    }

    #[inline(always)]
    fn frame_len(&self) -> usize {
        RespOp::HEAD + self.buf.len()
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
    fn send(&self, to: &To<'_>, out: &mut impl FrameSink) -> bool {
        out.send_short(&ReadTo { to, read: self }) == Tx::Sent
    }
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
        self.rma_now(ep, req, out, clock)
    }

    /// As [`atomic_now`](Self::atomic_now), for a write.
    #[inline(always)]
    pub fn write_now(
        &mut self,
        ep: EpId,
        req: &mut ShortWrite<'_>,
        out: &mut impl FrameSink,
        clock: impl FnOnce() -> Instant,
    ) -> bool {
        self.rma_now(ep, req, out, clock)
    }

    /// As [`atomic_now`](Self::atomic_now), for a read.
    #[inline(always)]
    pub fn read_now(
        &mut self,
        ep: EpId,
        req: &mut ShortRead<'_>,
        out: &mut impl FrameSink,
        clock: impl FnOnce() -> Instant,
    ) -> bool {
        self.rma_now(ep, req, out, clock)
    }

    #[inline(always)]
    fn rma_now(
        &mut self,
        ep: EpId,
        req: &mut impl Short,
        out: &mut impl FrameSink,
        clock: impl FnOnce() -> Instant,
    ) -> bool {
        if self.todo.contains(Todo::SEND) {
            return cold(false);
        }
        let e = ep.0.idx();
        let Some(ep) = self.eps.by_handle_mut(ep.0) else { return cold(false) };
        let form = req.form();
        if !req.fits(ep) {
            return cold(false);
        }
        let &ShortCall { dest, context, no_completion, .. } = req.call();
        let net = (&self.avs, &self.peers);
        if ep.route.dest != dest && !cold(ep.find_route(net, dest)) {
            return false;
        }
        let p = ep.route.peer;
        let Some(peer) = self.peers.at_mut(p) else { return cold(false) };
        if ep.ops_left == 0 && !ep.borrow_ops(&mut self.cqs) {
            return cold(false);
        }
        if usize::from(peer.answers) >= ANSWERS_MAX
            || !peer.path.is_lossless()
            || short_cost(peer, 0).is_none()
            || req.frame_len() > peer.frame_max as usize + ETH_HDR_LEN
        {
            return cold(false);
        }
        let Some(result) = req.take_result() else { return cold(false) };
        let (mut is, psn) = (req.is(ep).to(p), peer.snd.nxt);
        if no_completion {
            is.0 &= !OpIs::TOLD;
        }
        let kept = result.again();
        let op = ShortOp { context, result, is, ep: e, psn, next: Peer::NO_OP };
        let Some(made) = self.short_ops.alloc_named(op) else {
            req.return_result(kept);
            return cold(false);
        };
        // Only one of those can be the last that waits for an acknowledgement.
        let nameable = !form.is_acked() || made.idx() < Peer::NO_OP.into();
        if !nameable || !req.send(&To { peer, src: &self.word, ep, made }, out) {
            req.return_result(self.short_ops.free(made.idx()).result);
            return cold(false);
        }
        self.counters.tx_frames += 1;
        ep.ops_left -= 1;
        peer.answers += 1;
        peer.rma_seq = peer.rma_seq.wrapping_add(1);
        peer.short_left -= 1;
        peer.tell_ack();
        if form.is_acked() {
            peer.await_ack(&mut self.short_ops, made.idx());
        }
        // Heard in this very turn, it is as if we had begun to wait now.
        let heard = peer.heard == self.polled_at;
        if peer.timer_at == Instant(u64::MAX) || peer.snd.in_flight() == 0 && !heard {
            let p = ep.route.peer;
            self.wait_from(clock(), p);
        } else {
            peer.snd.number();
        }
        true
    }

    /// Takes a frame that holds the answer to an atomic operation. The completion of a usual one
    /// may go to `reader`.
    #[inline(always)]
    pub(super) fn on_resp_frame(&mut self, now: Instant, frame: RxFrame<'_>, reader: impl Reader) {
        if !self.take_usual_answer(&frame, reader) {
            cold(());
            self.on_resp_rest(now, &frame.again());
        }
    }

    /// As [`on_resp_frame`](Self::on_resp_frame), for all but usual answers.
    #[inline(never)]
    fn on_resp_rest(&mut self, now: Instant, frame: &RxFrame<'_>) {
        if !self.take_answer(frame, Form::Fetch) {
            self.on_frame_long(now, frame);
        }
    }

    /// Takes a frame that tells what became of a read, or of others.
    #[inline(never)]
    pub(super) fn on_told_frame(&mut self, now: Instant, frame: &RxFrame<'_>, told: PlainTold) {
        let taken = match told {
            PlainTold::Data => self.take_answer(frame, Form::Read),
            PlainTold::Ack => self.take_ack(now, frame, false),
        };
        if !taken {
            self.on_frame_long(now, frame);
        }
    }

    /// Completes the fetch that a RESP answers, if its sender is quiet and need not hear that it
    /// came, and the fetch is told of and not counted. False if it is another: nothing has
    /// happened.
    #[inline(always)]
    fn take_usual_answer(&mut self, frame: &RxFrame<'_>, reader: impl Reader) -> bool {
        let Some((base, (w, generation))) = RespOp::plain_word(frame) else {
            return cold(false);
        };
        let p = slot_of(base.dst_sid());
        let Some(peer) = self.peers.at_mut(p) else { return cold(false) };
        if peer.owed >= ACK_EVERY_LOSSLESS - 1
            || usual_flight(peer, self.word, &base, size_of::<u64>()).is_none()
        {
            return cold(false);
        }
        let handle = ShortOp::handle(w, generation);
        let Some(op) = self.short_ops.by_handle(handle) else { return cold(false) };
        // One that was closed has no endpoint.
        let Some(ep) = self.eps.at_mut(op.ep) else { return cold(false) };
        if op.is != OpIs::USUAL.to(p) || op.result.len() != size_of::<u64>() {
            return cold(false);
        }
        let (flags, _) = Form::Fetch.outcome();
        let (op_context, result) = (op.context, op.result.again());
        // At once, while the compiler knows that it is there.
        self.short_ops.discard(handle.idx());
        let filled = frame.fill_span(RespOp::HEAD, &result);
        debug_assert!(filled, "what is not as long as it says is no RESP");
        accept_usual(peer, &base, self.polled_at);
        peer.owed += 1;
        if peer.take_left > 0 {
            peer.take_left -= 1;
        }
        peer.forget_short_op();
        self.counters.rma_done += 1;
        let cqe = Cqe { op_context, flags, src: FI_ADDR_UNSPEC, ..Cqe::default() };
        // As a receive's (`report`): its room is that of another operation then.
        if reader.reads(ep.tx_cq) && may_borrow_more(ep.ops_left) {
            debug_assert!(self.cqs[ep.tx_cq].cq.is_empty(), "what is in the queue comes first");
            ep.ops_left += 1;
            reader.take(&cqe);
        } else {
            ep.tx_used -= 1;
            let queue = self.cqs.at_mut(ep.tx_cq).expect("what was posted has a queue");
            queue.cq.push(cqe);
        }
        true
    }

    /// Completes the operation that a RESP or DATA answers, if the packet is next in order and
    /// nothing about it is out of the ordinary. False if it is another: nothing has happened.
    #[inline(always)]
    fn take_answer(&mut self, frame: &RxFrame<'_>, form: Form) -> bool {
        let Some((base, (w, generation))) = RespOp::plain(frame) else { return cold(false) };
        if !is_next(&self.peers, self.word, &base) {
            return cold(false);
        }
        let p = slot_of(base.dst_sid());
        let handle = ShortOp::handle(w, generation);
        let Some(op) = self.short_ops.by_handle(handle) else { return cold(false) };
        let Some(peer) = self.peers.get_mut(p) else { return cold(false) };
        // A closed endpoint's, and one that somebody may wait behind, end the long way.
        if !ShortOp::is_name(w)
            || op.peer() != p
            || op.ep == NONE
            || op.form() != form
            || usize::from(base.plen()) != op.result.len()
            || peer.txq.head != NONE
            || !frame.fill_span(RespOp::HEAD, &op.result)
        {
            return cold(false);
        }
        accept(peer, &base, self.polled_at);
        self.finish_short(p, handle.idx(), form);
        self.owe_short(p);
        if form == Form::Fetch {
            let peer = &mut self.peers[p];
            peer.quiet = peer.is_quiet();
        }
        true
    }

    /// Completes what waited for the acknowledgement that peer `p` has just given.
    #[inline]
    pub(super) fn finish_acked(&mut self, p: u32) {
        while let Some(peer) = self.peers.get_mut(p)
            && peer.last_unacked != Peer::NO_OP
            && let Some(last) = self.short_ops.get(peer.last_unacked.into())
            && let Some(op) = self.short_ops.get(last.next.into())
            && op.psn.since(peer.snd.una) < 0
        {
            let (w, closed, form) = (u32::from(last.next), op.ep == NONE, op.form());
            let next = op.next;
            peer.forget_ack(&mut self.short_ops, (peer.last_unacked.into(), w, next));
            if closed {
                self.short_ops.discard(w);
                self.peers[p].forget_short_op();
            } else {
                self.finish_short(p, w, form);
            }
        }
    }

    /// Completes operation `w` of the short way, which is such a one, and whose answer is in place.
    #[inline(always)]
    fn finish_short(&mut self, p: u32, w: u32, form: Form) {
        let Some(op) = self.short_ops.get(w) else { return };
        let (e, context) = (op.ep, op.is.told().then_some(op.context));
        self.short_ops.discard(w);
        let Some(peer) = self.peers.get_mut(p) else { return };
        peer.forget_short_op();
        self.eps[e].tx_used -= 1;
        let (flags, which) = form.outcome();
        self.tell_rma(e, context, flags, which);
    }

    /// The answer to an operation of the short way, on the long way: what it names, where in the
    /// result it says that it belongs, and where in the frame it lies.
    pub(super) fn on_short_answer(
        &mut self,
        (p, form): (u32, Form),
        frame: &RxFrame<'_>,
        (dst_op, dst_gen, offset): (u32, u32, u64),
        (off, len): (usize, usize),
    ) {
        let Some(w) = self.short_named(p, form, (dst_op, dst_gen)) else { return };
        // A fenced request may wait for this one.
        if !self.peers[p].txq.is_empty() {
            self.make_ready(p);
        }
        let op = &self.short_ops[w];
        if op.ep == NONE {
            self.short_ops.discard(w);
            self.peers[p].forget_short_op();
        } else if offset == 0 && len == op.result.len() && frame.fill_span(off, &op.result) {
            self.finish_short(p, w, form);
        } else {
            // The peer lies.
            self.fail_short(w, Error::ConnReset, ProvErrno::UnknownOutcome);
        }
    }

    /// The operation of the short way that an answer from peer `p` names, if it is such a one.
    fn short_named(&mut self, p: u32, form: Form, (w, generation): (u32, u32)) -> Option<u32> {
        let handle = ShortOp::handle(w, generation);
        let known = self.short_ops.by_handle(handle);
        let known = known.is_some_and(|op| op.peer() == p && op.form() == form);
        self.counters.rx_stray += u64::from(!known);
        known.then_some(handle.idx())
    }

    /// A read of the short way is not served, and never will be.
    #[cold]
    pub(super) fn on_short_failed(&mut self, p: u32, name: (u32, u32), reason: NackReason) {
        if let Some(w) = self.short_named(p, Form::Read, name) {
            self.make_ready(p);
            self.fail_short(w, super::input::nack_error(reason), ProvErrno::NotExecuted);
        }
    }

    /// Packet `psn`, of which nothing was kept, was refused: ends the operation that it was, if it
    /// was one of the short way.
    #[cold]
    pub(super) fn on_short_nack(&mut self, p: u32, psn: Psn, reason: NackReason) {
        let found = self.short_ops.iter().find(|(_, op)| op.peer() == p && op.psn == psn);
        let Some(w) = found.map(|(w, _)| w) else { return };
        let prov = match reason {
            NackReason::NoEndpoint => ProvErrno::NoEndpoint,
            _ => ProvErrno::NotExecuted,
        };
        self.fail_short(w, super::input::nack_error(reason), prov);
    }

    /// Ends operation `w` of the short way with an error, which its endpoint is told if it is open.
    fn fail_short(&mut self, w: u32, err: Error, prov_errno: ProvErrno) {
        let &ShortOp { context, ep: e, is, next, .. } = &self.short_ops[w];
        let (p, form) = (is.peer(), is.form());
        let peer = &mut self.peers[p];
        if form.is_acked() {
            let ops = &mut self.short_ops;
            let before = ops.iter().find(|(_, op)| op.peer() == p && u32::from(op.next) == w);
            let before = before.map_or(w, |(before, _)| before);
            peer.forget_ack(ops, (before, w, next));
        }
        peer.forget_short_op();
        self.short_ops.discard(w);
        if e != NONE {
            self.eps[e].tx_used -= 1;
            self.tell_short_failure((e, p, form), context, err, prov_errno);
        }
    }

    fn tell_short_failure(
        &mut self,
        (e, p, form): (u32, u32, Form),
        op_context: u64,
        err: Error,
        prov_errno: ProvErrno,
    ) {
        let (flags, which) = form.outcome();
        let cqe = Cqe { op_context, flags, src: FI_ADDR_UNSPEC, ..Cqe::default() };
        let failure = CqErr { cqe, olen: 0, err, prov_errno, err_data: None };
        self.tell_failure((e, p), failure, self.eps[e].rma_cntr[which]);
    }

    /// Ends all operations of the short way to peer `p`, whose session has ended with `err`.
    #[cold]
    pub(super) fn fail_short_ops(&mut self, p: u32, err: Error) {
        let ops = self.short_ops.iter().filter(|(_, op)| op.peer() == p);
        let mut ops: Vec<(u32, Psn)> = ops.map(|(w, op)| (w, op.psn)).collect();
        // In the order of their posting.
        let una = self.peers[p].snd.una;
        ops.sort_by_key(|(_, psn)| psn.0.wrapping_sub(una.0.wrapping_sub(1 << 31)));
        for (w, _) in ops {
            self.fail_short(w, err, ProvErrno::UnknownOutcome);
        }
    }

    /// What the operations of the short way to peer `p` are, but those of closed endpoints.
    pub(super) fn short_forms(&self, p: u32) -> impl Iterator<Item = Form> {
        let ops = self.short_ops.iter().filter(move |(_, op)| op.peer() == p && op.ep != NONE);
        ops.map(|(_, op)| op.form())
    }

    /// A counter counts operations of endpoint `e` from now on, those under way included.
    #[cold]
    pub(super) fn count_short_ops(&mut self, e: u32) {
        for (_, op) in self.short_ops.iter_mut().filter(|(_, op)| op.ep == e) {
            op.is.0 &= !OpIs::PLAIN;
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
            let (context, form, p) = (op.context, op.form(), op.peer());
            self.eps[e].tx_used -= 1;
            let (err, prov) = (Error::Canceled, ProvErrno::UnknownOutcome);
            self.tell_short_failure((e, p, form), context, err, prov);
        }
    }
}

impl Peer {
    /// One operation less of the short way is not at its end.
    #[inline(always)]
    fn forget_short_op(&mut self) {
        self.answers -= 1;
    }

    /// Operation `w`, whose packet is the last one sent, waits for its acknowledgement.
    #[inline(always)]
    fn await_ack(&mut self, ops: &mut Table<ShortOp>, w: u32) {
        self.quiet = false;
        let w = w as u16;
        let first = match std::mem::replace(&mut self.last_unacked, w) {
            Self::NO_OP => w,
            last => std::mem::replace(&mut ops[last.into()].next, w),
        };
        ops[w.into()].next = first;
    }

    /// Operation `w`, which stands between these two, does so no longer.
    #[inline(always)]
    fn forget_ack(&mut self, ops: &mut Table<ShortOp>, (before, w, next): (u32, u32, u16)) {
        if u32::from(self.last_unacked) == w {
            self.last_unacked = if before == w { Self::NO_OP } else { before as u16 };
        }
        if before != w {
            ops[before].next = next;
        }
    }
}

/// Whether a packet says that it is from `peer`, and for us.
#[inline(always)]
fn is_between(peer: &Peer, word: u64, base: &PlainBase) -> bool {
    (base.head.dst ^ word) << 16 == 0 && base.head.src == peer.word
}

/// Whether a packet is next in order from a peer that we have, and what it acknowledges and grants
/// is waited for by nobody.
#[inline(always)]
pub(super) fn is_next(peers: &Peers, word: u64, base: &PlainBase) -> bool {
    let Some(peer) = peers.at(slot_of(base.dst_sid())) else { return false };
    let acked = base.cack.0.wrapping_sub(peer.snd.una.0);
    let granted = base.grant().wrapping_sub(peer.snd.credit as u16);
    peer.in_order
        && is_between(peer, word, base)
        && base.named == peer.next_place()
        && (acked == 0 && granted == 0 || is_unawaited::<false>(peer, acked, granted))
}

/// As [`is_next`], from a peer that is [`quiet`](Peer::quiet), of a packet with `plen` bytes of
/// payload that grants nothing: if so, how many packets are in flight when it has been taken.
#[inline(always)]
pub(super) fn usual_flight(peer: &Peer, word: u64, base: &PlainBase, plen: usize) -> Option<u32> {
    debug_assert!(!peer.quiet || peer.is_quiet() || is_planted());
    // Most often all of them are acknowledged.
    let flying = peer.snd.nxt.0.wrapping_sub(base.cack.0);
    let usual = peer.quiet
        && is_between(peer, word, base)
        && base.named == peer.next_place()
        && (flying == 0 || flying <= peer.snd.in_flight())
        && base.sized == peer.snd.credit & 0xffff | (plen as u32) << 16;
    usual.then_some(flying)
}

/// As [`accept`], of a packet that has a [`usual_flight`].
#[inline(always)]
pub(super) fn accept_usual(peer: &mut Peer, base: &PlainBase, heard: Instant) {
    // Of a peer that is quiet nothing was asked.
    debug_assert!(peer.probes == 0 || is_planted());
    peer.heard = heard;
    peer.snd.una = base.cack;
    peer.rcv_nxt = peer.rcv_nxt.next();
}

/// Notes that the packet that [`is_next`] from `peer` has been taken. `heard` is the time of
/// this turn.
#[inline(always)]
pub(super) fn accept(peer: &mut Peer, base: &PlainBase, heard: Instant) {
    hear(peer, base, heard);
    peer.rcv_nxt = peer.rcv_nxt.next();
}

/// Notes what the base of any packet from `peer` says that is true.
#[inline(always)]
fn hear(peer: &mut Peer, base: &PlainBase, heard: Instant) {
    let granted = base.grant().wrapping_sub(peer.snd.credit as u16);
    peer.heard = heard;
    peer.probes = 0;
    peer.snd.una = base.cack;
    peer.snd.credit = peer.snd.credit.wrapping_add(granted.into());
}

/// The base of the next packet to a peer.
#[derive(Clone, Copy)]
pub(super) struct BaseTo<'a> {
    pub(super) peer: &'a Peer,
    /// This node, as [`mac_word`](crate::wire::mac_word) has it.
    pub(super) src: &'a u64,
    /// Packets that will have been taken from the peer when this one has left.
    pub(super) ahead: u32,
}

impl BaseOut for BaseTo<'_> {
    #[inline(always)]
    fn dst(&self) -> u64 {
        self.peer.word
    }

    #[inline(always)]
    fn src(&self) -> u64 {
        *self.src
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
        Psn(self.peer.rcv_nxt.0.wrapping_add(self.ahead))
    }

    #[inline(always)]
    fn grant(&self) -> u16 {
        self.peer.granted as u16
    }
}

/// To whom an operation that is about to leave goes.
#[derive(Clone, Copy)]
struct To<'a> {
    peer: &'a Peer,
    /// This node, as [`mac_word`](crate::wire::mac_word) has it.
    src: &'a u64,
    /// From whom, which knows the way.
    ep: &'a Ep,
    /// Its name, for the answer.
    made: Handle,
}

impl To<'_> {
    /// What it says of itself, on `range`, all of it in one packet.
    #[inline(always)]
    fn range(&self, range: &RmaIov) -> RemoteRange {
        let RmaIov { addr, key: rkey, .. } = *range;
        let ([dst_ep, src_ep], seq) = (self.ep.route.ends, self.peer.rma_seq);
        RemoteRange { dst_ep, rx_ctx: 0, src_ep, seq, last: true, rkey, addr }
    }

    /// Writes the base of its packet, asking for an acknowledgement if `ar`.
    #[inline(always)]
    fn put_base(&self, ty: Ty, plen: usize, ar: bool, out: &mut impl HeadOut) {
        BaseTo { peer: self.peer, src: self.src, ahead: 0 }.put(ty, plen, ar, out);
    }
}

/// What an atomic operation is.
#[derive(Clone, Copy)]
struct What {
    kind: AtomicKind,
    op: u32,
    ty: u32,
    range: RmaIov,
}

/// Sends an atomic operation, and says whether it has left.
#[inline(always)]
fn send_atomic(to: &To<'_>, req: &ShortAtomic<'_>, out: &mut impl FrameSink) -> bool {
    let fetch = &to.ep.fetch;
    let &ShortAtomic { kind, op, ty, operand, compare, call: ShortCall { range, .. }, .. } = req;
    let what = What { kind, op, ty, range };
    // Then how long it is need not be asked on the way.
    if fetch.word {
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

/// Writes all of a request but its payload of `plen` bytes. It asks for an acknowledgement if
/// nothing else comes back, which would be one as well.
#[inline(always)]
fn put_request(to: &To<'_>, what: &What, plen: usize, out: &mut impl HeadOut) {
    let fetch = what.kind != AtomicKind::Base;
    to.put_base(Ty::Atomic, plen, !fetch, out);
    let op = AtomicOp {
        range: to.range(&what.range),
        end: true,
        fetch,
        compare: what.kind == AtomicKind::Compare,
        dst_op: ShortOp::name(to.made.idx()),
        dst_gen: to.made.generation(),
        count: what.range.len as u16,
        op: what.op as u8,
        ty: what.ty as u8,
        ..AtomicOp::default()
    };
    op.put(out);
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

/// A write.
struct WriteTo<'a> {
    to: &'a To<'a>,
    write: &'a ShortWrite<'a>,
}

impl ShortFrame<{ WriteOp::HEAD }> for WriteTo<'_> {
    #[inline(always)]
    fn dst(&self) -> u64 {
        self.to.peer.word
    }

    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        let len = self.write.buf.len();
        self.to.put_base(Ty::Write, len, true, out);
        let range = self.to.range(&self.write.call.range);
        WriteOp { range, imm: None, left: len as u64 }.put(out);
    }

    #[inline(always)]
    fn part(&self) -> Option<(&IoBuf, usize, usize)> {
        Some((self.write.buf, 0, self.write.buf.len()))
    }
}

/// A read.
struct ReadTo<'a> {
    to: &'a To<'a>,
    read: &'a ShortRead<'a>,
}

impl ShortFrame<{ ReadOp::HEAD }> for ReadTo<'_> {
    #[inline(always)]
    fn dst(&self) -> u64 {
        self.to.peer.word
    }

    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        let Self { to, read: ShortRead { call: ShortCall { range, .. }, .. } } = self;
        to.put_base(Ty::Read, 0, false, out);
        let op = ReadOp {
            range: to.range(range),
            end: true,
            dst_op: ShortOp::name(to.made.idx()),
            dst_gen: to.made.generation(),
            offset: 0,
            len: range.len as u32,
        };
        op.put(out);
    }
}

/// Whether the next packet to `peer` asks for an acknowledgement.
#[inline(always)]
pub(super) fn asks(peer: &Peer) -> bool {
    peer.snd.in_flight() % ASKS_EVERY == ASKS_EVERY - 1
}

impl ShortAtomic<'_> {
    /// Whether its memory is as `fetch` has it, and the result overlaps nothing.
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
