//! The short way of atomic operations that fetch, on a port that loses nothing.
//!
//! As in `short`: every question is asked first, nothing changes unless the answer is yes, and else
//! the long way (`rma`, `rma_out`, `rma_in`) begins from the start. A request of one packet leaves
//! in the call that posts it. Its record is a transmit request alone ([`WrFlags::SHORT`]): nothing
//! is kept to send it again, and what else there is to say of it is in the packet. The target
//! executes it when it comes, and its answer waits in a list of its own until the burst has been
//! taken, since until then the port is lent to whoever takes it.

use barewire_driver::frame::{Body, RxFrame, TxFrame};
use barewire_driver::mem::IoBuf;
use barewire_driver::port::Tx;

use super::input::ACK_EVERY_LOSSLESS;
use super::ops::{Job, JobKind, TxWr, WrFlags};
use super::peer::slot_of;
use super::rma::{FETCHED, check_one_range};
use super::rma_in::{Target, atomic_needs, decode_atomic};
use super::rma_out::ANSWERS_MAX;
use super::short::{is_unawaited, short_cost};
use super::{AtomicReq, EpId, FrameSink, Node, RmaIov};
use crate::error::Error;
use crate::flags::OpFlags;
use crate::proto::atomic::AtomicKind;
use crate::rel::psn::Psn;
use crate::slab::{Handle, Link, NONE};
use crate::types::{FiAddr, Instant, ProvErrno};
use crate::wire::{AtomicOp, NackReason, PlainBase, RemoteRange, RespOp, Ty, mac_key};

/// Answers that may wait for the end of a burst; one more takes the long way.
pub(super) const ANSWERS_AT_ONCE: usize = 128;

/// Flags of an operation that the short way knows.
const FLAGS: OpFlags = OpFlags::MORE
    .union(OpFlags::COMPLETION)
    .union(OpFlags::INJECT)
    .union(OpFlags::INJECT_COMPLETE)
    .union(OpFlags::TRANSMIT_COMPLETE)
    .union(OpFlags::DELIVERY_COMPLETE);

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
    pub operand: &'a IoBuf,
    /// The compare values.
    pub compare: &'a IoBuf,
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
            operand: &self.operand,
            compare: &self.compare,
            result: &mut self.result,
            dest: self.dest,
            range: *range,
            context: self.context,
            flags: self.flags,
        })
    }
}

/// An answer that waits for the end of the burst.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    peer: u32,
    /// Our name for the session in which it was asked for.
    sid: u32,
    op: RespOp,
    len: usize,
    values: [u8; Job::SHORT],
}

impl Node {
    /// Posts an atomic operation and sends it in the same breath, if nothing stands before it and
    /// nothing about it is out of the ordinary: as [`post_atomic`](Self::post_atomic) and then
    /// [`transmit`](Self::transmit). False if not: nothing has happened, and those two are to be
    /// called, also to learn what is wrong with the call if anything is.
    ///
    /// `clock` is read after the packet has left, and only if the peer's silence counts from now.
    #[inline]
    pub fn atomic_now(
        &mut self,
        ep: EpId,
        req: &mut ShortAtomic<'_>,
        out: &mut impl FrameSink,
        clock: impl FnOnce() -> Instant,
    ) -> bool {
        let may = self.lossless && self.ready.is_empty() && !self.gone;
        if !may || !FLAGS.contains(req.flags) {
            return false;
        }
        let Some(len) = req.sent_len() else { return false };
        let e = ep.0.idx();
        let Some(ep) = self.eps.by_handle_mut(ep.0) else { return false };
        if !ep.may_fetch || ep.tx_used >= ep.tx_size {
            return false;
        }
        let Some(entry) = self.avs[ep.av].av.lookup(req.dest) else { return false };
        let (p, dst_ep, inc) = (entry.peer, entry.ep, entry.addr.incarnation);
        let Some(peer) = self.peers.get_mut(p) else { return false };
        let cq = &mut self.cqs[ep.tx_cq].cq;
        if inc != 0 && inc != peer.inc
            || !cq.has_room()
            || usize::from(peer.answers) >= ANSWERS_MAX
            || short_cost(peer, 0).is_none()
        {
            return false;
        }
        let (eps, mut flags) = ((dst_ep, ep.number), WrFlags::RMA | WrFlags::SHORT);
        flags.set(WrFlags::CQE, !ep.tx_selective || req.flags.contains(OpFlags::COMPLETION));
        let (in_flight, psn) = (peer.snd.in_flight(), peer.snd.nxt);
        let w = self.tx.alloc_with(|_| short_wr(req.context, psn, (p, e), eps, flags));
        let Some(w) = w else { return false };
        if self.send_bufs.len() <= w as usize {
            Self::touch_wr(&mut self.inject, &mut self.send_bufs, w);
        }
        let op = req.header(eps, peer.rma_seq, (w, self.tx.generation(w)));
        let base = PlainBase {
            dst_sid: peer.remote_sid,
            psn,
            cack: peer.rcv_nxt,
            grant: peer.granted as u16,
            plen: len as u16,
            ..PlainBase::between(peer.mac, self.mac)
        };
        let head = op.head(&base, in_flight % 64 == 63);
        let mut both = [0; 2 * Job::SHORT];
        let body = req.body(len, &mut both);
        if out.send_alone(&TxFrame { head: &head, body, tail: &[] }) != Tx::Sent {
            self.tx.discard(w);
            return false;
        }
        self.counters.tx_frames += 1;
        req.result.move_to(&mut self.send_bufs[w as usize]);
        ep.tx_used += 1;
        cq.reserve_free();
        peer.answers += 1;
        peer.rma_seq = peer.rma_seq.wrapping_add(1);
        peer.short_left -= 1;
        peer.tell_ack();
        // Heard in this very turn, it is as if we had begun to wait now.
        let heard = peer.heard == self.active_ns;
        if peer.timer_at == Instant(u64::MAX) || in_flight == 0 && !heard {
            self.wait_from(clock(), p);
        } else {
            peer.snd.number();
        }
        self.peers[p].wrs.push_back(&mut self.tx, w);
        true
    }

    /// Takes a frame that holds an atomic operation, or the answer to one, which is next in order
    /// and about which nothing is out of the ordinary. False if it holds anything else: nothing has
    /// happened.
    #[inline(never)]
    pub(super) fn take_atomic(&mut self, now: Instant, frame: &RxFrame<'_>) -> bool {
        let Some((ty, base)) = PlainBase::parse(frame) else { return false };
        let p = slot_of(base.dst_sid);
        let Some(peer) = self.peers.get(p) else { return false };
        let acked = base.cack.0.wrapping_sub(peer.snd.una.0);
        let granted = base.grant.wrapping_sub(peer.credit as u16);
        if !peer.in_order
            || base.dst != mac_key(self.mac)
            || base.src != mac_key(peer.mac)
            || base.dst_sid != peer.sid
            || base.psn != peer.rcv_nxt
            || (acked != 0 || granted != 0) && !is_unawaited::<false>(peer, acked, granted)
        {
            return false;
        }
        let done = match ty {
            Ty::Atomic => self.take_request(now, p, frame, &base),
            _ => self.take_answer(p, frame, &base),
        };
        if !done {
            return false;
        }
        let peer = &mut self.peers[p];
        peer.heard = self.active_ns;
        peer.probes = 0;
        peer.snd.una = base.cack;
        peer.credit = peer.credit.wrapping_add(granted.into());
        peer.rcv_nxt = peer.rcv_nxt.next();
        peer.owed = peer.owed.saturating_add(1);
        if peer.owed >= ACK_EVERY_LOSSLESS {
            peer.ack_now = true;
            self.make_ready(p);
        }
        true
    }

    /// Executes an operation that fetches few bytes of a region.
    #[inline]
    fn take_request(
        &mut self,
        now: Instant,
        p: u32,
        frame: &RxFrame<'_>,
        base: &PlainBase,
    ) -> bool {
        let Ok(op) = AtomicOp::plain(frame, base) else { return false };
        let plen = usize::from(base.plen);
        let plain = op.fetch && op.range.last && !op.tagged && !op.void && op.imm.is_none();
        let Ok((what, ty, bytes)) = decode_atomic(&op, plen) else { return false };
        let room = self.answers.len() < ANSWERS_AT_ONCE.min(self.jobs.free_count());
        let room = room && self.job_room(p).is_ok();
        if !plain || bytes > Job::SHORT || !room || self.peers[p].bad_seq != NONE {
            return false;
        }
        let (caps, access) = atomic_needs(&op, what);
        let e = self.ep_slot(op.range.dst_ep);
        if !self.eps.get(e).is_some_and(|ep| ep.enabled && ep.caps.contains(caps)) {
            return false;
        }
        let Ok((m, at)) = self.mr_look(e, &op.range, bytes as u64, access) else { return false };
        self.mr_near = m;
        let (mut few, mut values) = ([0; 2 * Job::SHORT], [0; Job::SHORT]);
        assert!(frame.copy_to(AtomicOp::HEAD, &mut few[..plen]), "length was checked");
        let target = Target::Region(m, at);
        let (operands, old) = (&few[..plen], &mut values[..bytes]);
        if self.execute(target, &op, (what, ty), operands, old).is_err() {
            return false;
        }
        self.atomic_done(now, p, e, &op, target);
        let peer = &mut self.peers[p];
        peer.nack.note_key(now, false);
        let (sid, dst_op, dst_gen) = (peer.sid, op.dst_op, op.dst_gen);
        let op = RespOp { dst_op, dst_gen, offset: op.offset, status: None };
        self.answers.push(Answer { peer: p, sid, op, len: bytes, values });
        true
    }

    /// Completes the operation that a RESP answers.
    #[inline]
    fn take_answer(&mut self, p: u32, frame: &RxFrame<'_>, base: &PlainBase) -> bool {
        let Ok(op) = RespOp::plain(frame, base) else { return false };
        let handle = Handle::from_parts(op.dst_op, op.dst_gen);
        let (len, peer) = (usize::from(base.plen), &self.peers[p]);
        let Some(wr) = self.tx.by_handle(handle) else { return false };
        // A closed endpoint's, and one that somebody may wait behind, end the long way.
        let plain = wr.flags.contains(WrFlags::SHORT) && wr.peer == p && wr.ep != NONE;
        let buf = &self.send_bufs[handle.idx() as usize];
        if !plain || op.status.is_some() || op.offset != 0 || len != buf.len() {
            return false;
        }
        if peer.answers == 0 || !peer.txq.is_empty() {
            return false;
        }
        frame.copy_to_start(RespOp::HEAD, buf, len);
        self.peers[p].answers -= 1;
        self.finish_short(p, handle.idx());
        true
    }

    /// Completes an operation of the short way whose old values are in place.
    #[inline(always)]
    fn finish_short(&mut self, p: u32, w: u32) {
        let wr = &self.tx[w];
        let (e, context) = (wr.ep, wr.context);
        let context = wr.flags.contains(WrFlags::CQE).then_some(context);
        self.peers[p].wrs.remove(&mut self.tx, w);
        self.tx.discard(w);
        self.eps[e].tx_used -= 1;
        self.tell_rma(e, context, FETCHED.0, FETCHED.1);
    }

    /// The answer to operation `w` of the short way, on the long way. That it is awaited has been
    /// counted off.
    pub(super) fn on_short_resp(
        &mut self,
        p: u32,
        w: u32,
        frame: &RxFrame<'_>,
        op: &RespOp,
        (off, len): (usize, usize),
    ) {
        let buf = &self.send_bufs[w as usize];
        if self.tx[w].ep == NONE {
            self.free_wr(w);
        } else if op.offset == 0 && len == buf.len() {
            frame.copy_to_start(off, buf, len);
            self.finish_short(p, w);
        } else {
            // The peer lies.
            self.fail_wr(w, Error::ConnReset, ProvErrno::UnknownOutcome);
        }
        // A fenced request may have waited for this one.
        if !self.peers[p].txq.is_empty() {
            self.make_ready(p);
        }
    }

    /// Packet `psn`, of which nothing was kept, was refused: ends the operation that it was, if it
    /// was one of the short way.
    #[cold]
    pub(super) fn on_short_nack(&mut self, p: u32, psn: u32, reason: NackReason) {
        let peer = &mut self.peers[p];
        let short = |w: &u32| self.tx[*w].flags.contains(WrFlags::SHORT);
        let found = peer.wrs.iter(&self.tx).find(|w| short(w) && self.tx[*w].pull_gen == psn);
        let Some(w) = found else { return };
        peer.answers = peer.answers.saturating_sub(1);
        let prov = match reason {
            NackReason::NoEndpoint => ProvErrno::NoEndpoint,
            _ => ProvErrno::NotExecuted,
        };
        self.fail_wr(w, super::input::nack_error(reason), prov);
    }

    /// Whether answers wait.
    #[inline(always)]
    pub fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    /// Sends the answers that the last burst has made due. What cannot leave now, or has something
    /// before it, is the next [`transmit`](Self::transmit)'s.
    pub fn send_answers(&mut self, now: Instant, out: &mut (impl FrameSink + ?Sized)) {
        for i in 0..self.answers.len() {
            let answer = self.answers[i];
            if self.peers.get(answer.peer).is_none_or(|peer| peer.sid != answer.sid) {
                // The session has ended: nobody waits for it.
                continue;
            }
            if !self.answer_now(now, &answer, out) {
                let Answer { peer, op, len, values, .. } = answer;
                let (short, long) = (values, Vec::new());
                let kind = JobKind::Values { offset: op.offset, len: len as u32, short, long };
                let (dst_op, dst_gen, link) = (op.dst_op, op.dst_gen, Link::default());
                self.add_job(Job { peer, dst_op, dst_gen, kind, queued: true, link });
            }
        }
        self.answers.clear();
    }

    #[inline]
    fn answer_now(
        &mut self,
        now: Instant,
        answer: &Answer,
        out: &mut (impl FrameSink + ?Sized),
    ) -> bool {
        let peer = &mut self.peers[answer.peer];
        if !peer.plain || !peer.snd.open() || peer.jobq.head != NONE {
            return false;
        }
        let in_flight = peer.snd.in_flight();
        let base = PlainBase {
            dst_sid: peer.remote_sid,
            psn: peer.snd.nxt,
            cack: peer.rcv_nxt,
            grant: peer.granted as u16,
            plen: answer.len as u16,
            ..PlainBase::between(peer.mac, self.mac)
        };
        let head = answer.op.head(&base, in_flight % 64 == 63);
        let body = Body::Bytes(&answer.values[..answer.len]);
        if out.send(&TxFrame { head: &head, body, tail: &[] }) != Tx::Sent {
            return false;
        }
        self.counters.tx_frames += 1;
        peer.snd.number();
        peer.short_left = peer.short_left.saturating_sub(1);
        peer.tell_ack();
        if in_flight == 0 {
            peer.probe_at = now;
        }
        if peer.timer_at == Instant(u64::MAX) {
            self.arm_timer(now, answer.peer);
        }
        true
    }
}

/// The record of an operation of the short way, posted to `peer` by endpoint `ep`.
#[inline(always)]
fn short_wr(
    context: u64,
    psn: Psn,
    (peer, ep): (u32, u32),
    (dst_ep, src_ep): (u16, u16),
    flags: WrFlags,
) -> TxWr {
    TxWr {
        context,
        tag: 0,
        data: 0,
        len: 0,
        sent: 0,
        asked: 0,
        pull_op: NONE,
        pull_gen: psn.0,
        peer,
        ep,
        unacked: 0,
        dst_ep,
        src_ep,
        flags,
        queue: Link::default(),
        of_peer: Link::default(),
    }
}

impl ShortAtomic<'_> {
    /// Its packet's header, as operation number `seq` with the name `dst_op`, `dst_gen`.
    #[inline(always)]
    fn header(
        &self,
        (dst_ep, src_ep): (u16, u16),
        seq: u16,
        (dst_op, dst_gen): (u32, u32),
    ) -> AtomicOp {
        let (rkey, addr) = (self.range.key, self.range.addr);
        AtomicOp {
            range: RemoteRange { dst_ep, src_ep, seq, last: true, rkey, addr },
            end: true,
            fetch: true,
            compare: self.kind == AtomicKind::Compare,
            dst_op,
            dst_gen,
            count: self.range.len as u16,
            op: self.op as u8,
            ty: self.ty as u8,
            ..AtomicOp::default()
        }
    }

    /// The `len` bytes of its packet's payload. Operands and compare values lie in `both` then.
    #[inline(always)]
    fn body<'a>(&'a self, len: usize, both: &'a mut [u8; 2 * Job::SHORT]) -> Body<'a> {
        if self.kind != AtomicKind::Compare {
            return Body::Io { buf: self.operand, offset: 0, len };
        }
        let (operand, compare) = both[..len].split_at_mut(len / 2);
        self.operand.read_at(0, operand);
        self.compare.read_at(0, compare);
        Body::Bytes(&both[..len])
    }

    /// Bytes of its packet's payload, if everything about the call is right and it is short.
    #[inline(always)]
    fn sent_len(&self) -> Option<usize> {
        let lens = (self.operand, self.compare, &*self.result);
        let count = self.range.len;
        if count > Job::SHORT as u64 {
            return None;
        }
        let (bytes, sent) = check_one_range(self.kind, (self.op, self.ty), count, lens).ok()?;
        (bytes <= Job::SHORT).then_some(sent)
    }
}
