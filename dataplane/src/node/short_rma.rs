//! The short way of atomic operations that fetch, on a port that loses nothing.
//!
//! As in `short`: every question is asked first, nothing changes unless the answer is yes, and else
//! the long way (`rma`, `rma_out`, `rma_in`) begins from the start. A request of one packet leaves
//! in the call that posts it. Its record is a transmit request alone ([`WrFlags::SHORT`]): nothing
//! is kept to send it again, and what else there is to say of it is in the packet. The target
//! executes it when it comes, and its answer waits in a list of its own until the burst has been
//! taken, since until then the port is lent to whoever takes it.

use barewire_driver::frame::RxFrame;
use barewire_driver::mem::{FEW, IoBuf, Span};
use barewire_driver::port::{MacAddr, Tx};

use super::input::ACK_EVERY_LOSSLESS;
use super::mr::Mr;
use super::ops::{Job, JobKind, TxWr, WrFlags};
use super::peer::{Peer, slot_of};
use super::rma::{FETCHED, REMOTE_READ, check_one_range};
use super::rma_in::{JOBS_MAX, atomic_needs, decode_atomic};
use super::rma_out::ANSWERS_MAX;
use super::short::{PLAIN_FLAGS, is_unawaited, short_cost};
use super::{AtomicReq, EpId, FrameSink, Inject, Node, RmaIov};
use crate::error::Error;
use crate::flags::{Caps, OpFlags};
use crate::proto::atomic::{self, AtomicKind, Datatype, Sharing};
use crate::slab::{Handle, Link, NONE, Slab};
use crate::types::{FiAddr, Instant, ProvErrno};
use crate::wire::{
    AtomicOp, AtomicWhat, NackReason, PlainAtomic, PlainBase, RemoteRange, RespOp, mac_key,
};

/// Answers that may wait for the end of a burst; one more takes the long way.
pub(super) const ANSWERS_AT_ONCE: usize = 128;

/// Bytes of a request with its payload, at most.
const REQUEST_MAX: usize = AtomicOp::HEAD + 2 * Job::SHORT;

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

/// An answer that waits for the end of the burst.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    peer: u32,
    /// Our name for the session in which it was asked for.
    sid: u32,
    dst_op: u32,
    dst_gen: u32,
    offset: u32,
    len: u32,
    values: [u8; Job::SHORT],
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
    /// Answers that the burst being taken has made due.
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

    /// What is known of `what`, if anything, and the answers.
    #[inline(always)]
    fn look(&mut self, what: &AtomicWhat) -> (&Near, &mut Vec<Answer>) {
        (&self.near[what.hash() % NEAR], &mut self.answers)
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
        let Some(av) = self.avs.get(ep.av) else { return false };
        let Some(entry) = av.av.lookup(req.dest) else { return false };
        let (p, dst_ep, inc) = (entry.peer, entry.ep, entry.addr.incarnation);
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
        let (eps, mut flags) = ((dst_ep, ep.number), WrFlags::RMA | WrFlags::SHORT);
        flags.set(WrFlags::CQE, !ep.tx_selective || req.flags.contains(OpFlags::COMPLETION));
        let (in_flight, psn) = (peer.snd.in_flight(), peer.snd.nxt);
        if !self.tx.has_used() && !fresh_wr(&mut self.tx, &mut self.inject, &mut self.send_bufs) {
            return false;
        }
        let wr = TxWr { pull_gen: psn.0, ..TxWr::new(req.context, (p, e), eps, flags) };
        let Some(made) = self.tx.alloc_again(wr) else { return false };
        let w = made.idx();
        let op = req.header(eps, peer.rma_seq, made);
        let base = base_to(peer, self.mac, len as u16);
        let mut packet = op.head::<REQUEST_MAX>(&base, in_flight % 64 == 63);
        req.put_payload(&mut packet, len);
        let sent = match packet.get(..AtomicOp::HEAD + len) {
            Some(packet) => out.send_few(packet) == Tx::Sent,
            None => false,
        };
        let Some(buf) = self.send_bufs.get_mut(w as usize).filter(|_| sent) else {
            self.tx.discard(w);
            return false;
        };
        self.counters.tx_frames += 1;
        req.result.move_to(buf);
        ep.tx_used += 1;
        cq.reserve_free();
        peer.answers += 1;
        peer.rma_seq = peer.rma_seq.wrapping_add(1);
        peer.short_left -= 1;
        peer.tell_ack();
        // Heard in this very turn, it is as if we had begun to wait now.
        let heard = peer.heard == self.active_ns;
        if peer.timer_at == Instant(u64::MAX) || in_flight == 0 && !heard {
            peer.wrs.push_back(&mut self.tx, w);
            self.wait_from(clock(), p);
        } else {
            peer.wrs.push_back(&mut self.tx, w);
            peer.snd.number();
        }
        true
    }

    /// Takes a frame that holds an atomic operation.
    #[inline(never)]
    pub(super) fn on_atomic_frame(&mut self, now: Instant, frame: &RxFrame<'_>) {
        if !self.take_atomic::<true>(now, frame) {
            self.on_frame_long(now, frame);
        }
    }

    /// Takes a frame that holds the answer to an operation.
    #[inline(never)]
    pub(super) fn on_resp_frame(&mut self, now: Instant, frame: &RxFrame<'_>) {
        if !self.take_atomic::<false>(now, frame) {
            self.on_frame_long(now, frame);
        }
    }

    /// Takes a packet that is next in order and about which nothing is out of the ordinary: an
    /// atomic operation (`ASKED`) or the answer to one. False if it is another: nothing has
    /// happened.
    #[inline(always)]
    fn take_atomic<const ASKED: bool>(&mut self, now: Instant, frame: &RxFrame<'_>) -> bool {
        let Some(base) = PlainBase::parse(frame) else { return false };
        let p = slot_of(base.dst_sid);
        let Some(peer) = self.peers.get(p) else { return false };
        let acked = base.cack.0.wrapping_sub(peer.snd.una.0);
        let granted = base.grant.wrapping_sub(peer.credit as u16);
        if !peer.in_order
            || base.dst != mac_key(self.mac)
            || base.src != mac_key(peer.mac())
            || base.dst_sid != peer.sid
            || base.psn != peer.rcv_nxt
            || (acked != 0 || granted != 0) && !is_unawaited::<false>(peer, acked, granted)
        {
            return false;
        }
        let done = if ASKED {
            self.take_request(now, p, frame, &base)
        } else {
            self.take_answer(p, frame, &base)
        };
        if !done {
            return false;
        }
        let Some(peer) = self.peers.get_mut(p) else { return true };
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
    #[inline(always)]
    fn take_request(
        &mut self,
        now: Instant,
        p: u32,
        frame: &RxFrame<'_>,
        base: &PlainBase,
    ) -> bool {
        let Some(op) = PlainAtomic::parse(frame) else { return false };
        let (near, _) = self.asked.look(&op.what);
        if near.what != op.what || near.plen != base.plen {
            return self.look_near(op, base.plen) && self.execute_first(now, p, frame, op);
        }
        self.execute_near(now, p, frame, op)
    }

    /// As [`execute_near`](Self::execute_near), for the first operation of its kind.
    #[inline(never)]
    fn execute_first(
        &mut self,
        now: Instant,
        p: u32,
        frame: &RxFrame<'_>,
        op: PlainAtomic,
    ) -> bool {
        self.execute_near(now, p, frame, op)
    }

    /// Executes an operation of which everything is known that is alike in many.
    #[inline(always)]
    fn execute_near(&mut self, now: Instant, p: u32, frame: &RxFrame<'_>, op: PlainAtomic) -> bool {
        let jobs_few = self.asked.jobs_few;
        let (near, answers) = self.asked.look(&op.what);
        let at = op.addr.wrapping_sub(near.base);
        let (plen, bytes) = (usize::from(near.plen), usize::from(near.bytes));
        // No more answers for a peer than for all of them.
        let few = self.jobs.len() + ANSWERS_AT_ONCE <= jobs_few;
        let peer = &mut self.peers[p];
        if at > near.room || peer.bad_seq != NONE || !few || answers.len() >= ANSWERS_AT_ONCE {
            return false;
        }
        let mut values = [0; Job::SHORT];
        if near.word {
            let Some(operands) = frame.few_at(AtomicOp::HEAD, plen) else { return false };
            let buf = &self.mrs[near.mr].buf;
            let old = buf.atomic_word(at as usize, near.op, near.ty, operands);
            let Some(old) = old else { return false };
            values[..8].copy_from_slice(&old.to_le_bytes());
        } else if !execute_few(&self.mrs[near.mr], near, at as usize, frame, &mut values) {
            return false;
        }
        peer.nack.note_key(now, false);
        let (dst_op, dst_gen, offset) = (op.dst_op, op.dst_gen, op.offset);
        let (sid, len) = (peer.sid, bytes as u32);
        answers.push(Answer { peer: p, sid, dst_op, dst_gen, offset, len, values });
        self.counters.rma_executed += 1;
        if near.counted {
            let (mr, ep) = (near.mr, near.ep);
            self.count_fetched(mr, ep);
        }
        true
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
        self.asked.near[said.what.hash() % NEAR] = Near {
            what: said.what,
            plen: said_len,
            bytes: bytes as u16,
            op: what,
            ty,
            word: few && ty.is_integer() && bytes >= 4,
            counted: counted || mr.read_cntr != NONE,
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

    /// Completes the operation that a RESP answers.
    #[inline(always)]
    fn take_answer(&mut self, p: u32, frame: &RxFrame<'_>, base: &PlainBase) -> bool {
        let Some((w, generation)) = RespOp::plain(frame, base) else { return false };
        let Some(wr) = self.tx.by_handle(Handle::from_parts(w, generation)) else { return false };
        let len = usize::from(base.plen);
        let Some(buf) = self.send_bufs.get(w as usize) else { return false };
        let Some(peer) = self.peers.get(p) else { return false };
        // A closed endpoint's, and one that somebody may wait behind, end the long way.
        if !wr.flags.contains(WrFlags::SHORT)
            || wr.peer != p
            || wr.ep == NONE
            || len != buf.len()
            || peer.answers == 0
            || peer.txq.head != NONE
        {
            return false;
        }
        frame.copy_to_start(RespOp::HEAD, buf, len);
        self.finish_short(p, w, 1);
        true
    }

    /// Completes an operation of the short way whose old values are in place; `awaited` answers
    /// less are missing.
    #[inline(always)]
    fn finish_short(&mut self, p: u32, w: u32, awaited: u16) {
        let Some(wr) = self.tx.get(w) else { return };
        let (e, context, link) = (wr.ep, wr.context, wr.of_peer);
        let context = wr.flags.contains(WrFlags::CQE).then_some(context);
        self.tx.discard(w);
        let Some(peer) = self.peers.get_mut(p) else { return };
        peer.answers -= awaited;
        peer.wrs.cut(&mut self.tx, w, link);
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
            self.finish_short(p, w, 0);
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
        !self.asked.answers.is_empty()
    }

    /// Sends the answers that the last burst has made due. What cannot leave now, or has something
    /// before it, is the next [`transmit`](Self::transmit)'s.
    pub fn send_answers(&mut self, now: Instant, out: &mut (impl FrameSink + ?Sized)) {
        for i in 0..self.asked.answers.len() {
            if !self.answer_now(now, i, out) {
                self.answer_later(i);
            }
        }
        self.asked.answers.clear();
    }

    #[inline(always)]
    fn answer_now(&mut self, now: Instant, i: usize, out: &mut (impl FrameSink + ?Sized)) -> bool {
        const LEN_MAX: usize = RespOp::HEAD + Job::SHORT;
        let Some(answer) = self.asked.answers.get(i) else { return false };
        let Some(peer) = self.peers.get_mut(answer.peer) else { return false };
        if peer.sid != answer.sid
            || peer.short_left == 0 && !(peer.plain && peer.snd.open())
            || peer.jobq.head != NONE
        {
            return false;
        }
        let in_flight = peer.snd.in_flight();
        let base = base_to(peer, self.mac, answer.len as u16);
        let (dst_op, dst_gen, offset) = (answer.dst_op, answer.dst_gen, answer.offset);
        let op = RespOp { dst_op, dst_gen, offset, status: None };
        let mut packet = op.head::<LEN_MAX>(&base, in_flight % 64 == 63);
        packet[RespOp::HEAD..].copy_from_slice(&answer.values);
        let Some(head) = packet.get(..RespOp::HEAD + answer.len as usize) else { return false };
        if out.send_few(head) != Tx::Sent {
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
            let p = answer.peer;
            self.arm_timer(now, p);
        }
        true
    }

    /// Leaves an answer to the long way, unless the session has ended: nobody waits for it then.
    #[cold]
    fn answer_later(&mut self, i: usize) {
        let Answer { peer, sid, dst_op, dst_gen, offset, len, values: short } =
            self.asked.answers[i];
        if self.peers.get(peer).is_none_or(|peer| peer.sid != sid) {
            return;
        }
        let kind = JobKind::Values { offset, len, short, long: Vec::new() };
        let link = Link::default();
        self.add_job(Job { peer, dst_op, dst_gen, kind, queued: true, link });
    }
}

/// Executes an operation on few bytes of region `mr` that is none of [`Near::word`].
#[inline(never)]
fn execute_few(
    mr: &Mr,
    near: &Near,
    at: usize,
    frame: &RxFrame<'_>,
    values: &mut [u8; Job::SHORT],
) -> bool {
    let (plen, bytes) = (usize::from(near.plen), usize::from(near.bytes));
    let mut few = [0; 2 * Job::SHORT];
    if !frame.copy_to(AtomicOp::HEAD, &mut few[..plen]) {
        return false;
    }
    let (operand, compare) = few[..plen].split_at(plen.min(bytes));
    let count = bytes / near.ty.size();
    let old = &mut values[..bytes];
    mr.buf.atomic(at, near.op, near.ty, count, operand, compare, old, mr.sharing).is_ok()
}

/// The base of the next packet to `peer` from `mac`.
#[inline(always)]
fn base_to(peer: &Peer, mac: MacAddr, plen: u16) -> PlainBase {
    PlainBase {
        dst_sid: peer.remote_sid,
        psn: peer.snd.nxt,
        cack: peer.rcv_nxt,
        grant: peer.granted as u16,
        plen,
        ..PlainBase::between(peer.mac(), mac)
    }
}

/// Makes a slot ready that was never used. False if there is none.
#[cold]
#[inline(never)]
fn fresh_wr(tx: &mut Slab<TxWr>, inject: &mut Vec<Inject>, bufs: &mut Vec<IoBuf>) -> bool {
    let Some(w) = tx.vacant() else { return false };
    Node::touch_wr(inject, bufs, w);
    true
}

impl ShortAtomic<'_> {
    /// Its packet's header, as operation number `seq` with the name `dst_op`, `dst_gen`.
    #[inline(always)]
    fn header(&self, (dst_ep, src_ep): (u16, u16), seq: u16, made: Handle) -> AtomicOp {
        let (dst_op, dst_gen) = (made.idx(), made.generation());
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

    /// Puts its packet's payload behind the header.
    #[inline(always)]
    fn put_payload(&self, packet: &mut [u8; REQUEST_MAX], len: usize) {
        let (_, payload) = packet.split_at_mut(AtomicOp::HEAD);
        let (operand, _) = payload.split_at_mut(FEW);
        let Ok(operand) = <&mut [u8; FEW]>::try_from(operand) else { return };
        if len > 0 {
            self.operand.read_few(operand);
        }
        if self.kind == AtomicKind::Compare {
            let mut compare = [0; FEW];
            self.compare.read_few(&mut compare);
            // Right behind the operand, however long that is.
            let at = AtomicOp::HEAD + len / 2;
            packet[at..at + FEW].copy_from_slice(&compare);
        }
    }

    /// Bytes of its packet's payload, if everything about the call is right and it is short.
    #[inline(always)]
    fn sent_len(&self) -> Option<usize> {
        let memory = (self.operand, self.compare, self.result.as_one()?);
        let count = self.range.len;
        if count > Job::SHORT as u64 {
            return None;
        }
        let (bytes, sent) = check_one_range(self.kind, (self.op, self.ty), count, memory).ok()?;
        (bytes <= Job::SHORT).then_some(sent)
    }
}
