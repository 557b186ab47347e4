//! One-sided operations, receive side: the target executes them, and the initiator processes the
//! answers.
//!
//! The target checks every field of a packet against its own tables, and trusts no check of the
//! initiator. Packets arrive here in order, each once, except bytes of reads, which are placed as
//! they arrive. A refused packet ends its operation: later packets of the operation have the same
//! sequence number and are dropped silently, since the initiator receives the refusal first.

use barewire_driver::frame::RxFrame;

use super::fast_op::FastOp;
use super::mr::{AccessNumber, Accessor};
use super::ops::{LateCompletion, Pull, Response, ResponseKind, RmaKind, WrFlags};
use super::peer::Peer;
use super::recv::Verdict;
use super::rma::{REMOTE_READ, REMOTE_WRITE, SpareBuffers, sent_len};
use super::{MsgKind, NodeCounters, Objects, Operations, Responder};
use crate::cntr::Done;
use crate::error::Error;
use crate::flags::{Caps, CqFlags, MrAccess};
use crate::idx::{CntrIdx, CqIdx, EpIdx, MrIdx, PeerIdx, PullIdx, RecvIdx, TxIdx};
use crate::plant::{Bug, planted};
use crate::proto::atomic::{self, AtomicFault, AtomicKind, Datatype, Sharing};
use crate::rel::sent::{BodyRef, RELIABLE_OP_MAX, ReadCounts};
use crate::slab::{Handle, Link, NONE};
use crate::types::{Cqe, FI_ADDR_UNSPEC, ProvErrno};
use crate::wire::{AtomicOp, DataOp, NackReason, ReadOp, RemoteRange, RespOp, Ty, WriteOp};

/// Target of an atomic operation: a region or a posted receive, at an offset.
#[derive(Clone, Copy)]
pub(super) enum Target {
    Region(MrIdx, usize),
    Receive(RecvIdx, usize),
}

/// Payload of an answer: `len` bytes, in `long` if that is not empty.
pub(super) struct OldValues {
    len: u16,
    short: [u8; Response::SHORT],
    long: Vec<u8>,
}

impl OldValues {
    const NONE: Self = Self { len: 0, short: [0; Response::SHORT], long: Vec::new() };

    /// `len` zero bytes.
    pub(super) fn of_len(len: usize, spare: &mut SpareBuffers) -> Self {
        let mut long = Vec::new();
        if len > Response::SHORT {
            long = spare.take();
            long.resize(len, 0);
        }
        Self { len: len as u16, long, ..Self::NONE }
    }

    /// The bytes.
    pub(super) fn get_mut(&mut self) -> &mut [u8] {
        if self.long.is_empty() { &mut self.short[..self.len.into()] } else { &mut self.long }
    }
}

/// Maximum responses that one peer may have outstanding here: more than any initiator requests at
/// once, its abandoned reads included.
pub(super) const RESPONSES_MAX: u16 = 1024;

impl Peer {
    /// Counts `len` bytes of a write or an atomic operation, and returns the bytes that the
    /// operation has written so far. A new sequence number resets the count of an operation that
    /// was abandoned or refused.
    fn note_written(&mut self, range: &RemoteRange, len: u64) -> u64 {
        let number = u64::from(range.seq) << Peer::WRITTEN_BITS;
        let before = self.written ^ number;
        let written = if before >> Peer::WRITTEN_BITS == 0 { before + len } else { len };
        let written = written & ((1 << Peer::WRITTEN_BITS) - 1);
        self.written = if range.last { 0 } else { number | written };
        written
    }
}

impl NodeCounters {
    #[cold]
    fn atomic_fault(&mut self, fault: AtomicFault) -> NackReason {
        self.rx_bad_atomic += 1;
        match fault {
            AtomicFault::Bounds => NackReason::BadAccess,
            AtomicFault::Misaligned | AtomicFault::Straddles => NackReason::Misaligned,
            AtomicFault::Unsupported => NackReason::BadAtomic,
            AtomicFault::Operand => NackReason::Malformed,
        }
    }
}

impl Operations<'_> {
    /// Starts requesting the bytes of read `w`.
    pub(crate) fn begin_read(&mut self, p: PeerIdx, w: TxIdx) {
        let mut pull = super::ops::Pull::new(p, NONE, 0, None);
        (pull.read, pull.wr, pull.want) = (true, w, self.tx[w].len);
        let idx = self.pulls.add(&mut self.objects.peers[p], pull);
        self.tx.rma_mut(w).pull = idx;
        self.pull_engine().request(idx);
    }

    /// Takes bytes of a read, in any order.
    pub(crate) fn on_read_data(
        &mut self,
        (p, idx): (PeerIdx, PullIdx),
        frame: &RxFrame<'_>,
        op: &DataOp,
        (off, len): (usize, usize),
    ) {
        let pull = &mut self.pulls[idx];
        let (w, len64) = (pull.wr, len as u64);
        let end = op.offset.checked_add(len64);
        if end.is_none_or(|end| end > pull.want) || pull.got + len64 > pull.requested {
            self.objects.counters.rx_stray += 1;
            return;
        }
        pull.got += len64;
        let done = pull.got == pull.want;
        let more =
            pull.requested < pull.want && pull.requested - pull.got <= super::pull::PULL_CHUNK;
        self.pulls.settled(&mut self.objects.peers[p], len64);
        if w == TxIdx::NONE {
            self.free_if_idle(idx);
        } else {
            frame.copy_to_io(off, &self.tx.bufs[w.at()], op.offset as usize, len);
            if done {
                self.tx.rma_mut(w).pull = PullIdx::NONE;
                self.pulls.free(self.objects.peers, idx);
                self.tx[w].flags |= WrFlags::ALL_SENT;
                self.try_complete(w);
            } else if more {
                self.pull_engine().request(idx);
            }
        }
        if !self.objects.peers[p].send_q.is_empty() {
            self.objects.due.make_ready(self.objects.peers, p);
        }
        self.pull_engine().serve_waiting_pulls();
    }

    /// Abandons read `idx`: its outstanding bytes are still expected, and discarded.
    pub(crate) fn abandon_read(&mut self, idx: PullIdx) {
        let pull = &mut self.pulls[idx];
        pull.wr = TxIdx::NONE;
        let (p, requesting) = (pull.peer, std::mem::take(&mut pull.requesting));
        self.pulls.settled(&mut self.objects.peers[p], u64::from(requesting));
        self.pulls.dequeue(&mut self.objects.peers[p], idx);
        self.pulls.cancel_wait(&mut self.objects.peers[p], idx);
        // Any byte of the operation may still arrive.
        self.free_if_idle(idx);
        // The read requests no more bytes: other pulls may use its room in the window.
        if !planted(Bug::ReadRoomLeaked) {
            self.pull_engine().serve_waiting_pulls();
        }
    }

    /// Frees an abandoned read once none of its bytes is outstanding.
    fn free_if_idle(&mut self, idx: PullIdx) {
        let pull = &self.pulls[idx];
        if pull.wr == TxIdx::NONE && pull.got == pull.requested {
            let p = pull.peer;
            self.pulls.free(self.objects.peers, idx);
            if !self.objects.peers[p].send_q.is_empty() {
                self.objects.due.make_ready(self.objects.peers, p);
            }
        }
    }

    /// Fails the operation of read `handle`, of which `len` requested bytes will not arrive.
    pub(crate) fn read_failed(
        &mut self,
        p: PeerIdx,
        handle: Handle<PullIdx>,
        len: u32,
        err: Error,
    ) {
        let known = self.pulls.records.by_handle(handle).filter(|pull| pull.peer == p && pull.read);
        let missing = |pull: &&Pull| len > 0 && u64::from(len) <= pull.requested - pull.got;
        let Some(pull) = known.filter(missing) else {
            self.objects.counters.rx_stray += 1;
            return;
        };
        let (w, idx) = (pull.wr, handle.idx());
        if w != TxIdx::NONE {
            self.abandon_wr(w);
            self.fail_wr(w, err, ProvErrno::NotExecuted);
        }
        self.pulls[idx].requested -= u64::from(len);
        self.pulls.settled(&mut self.objects.peers[p], u64::from(len));
        self.free_if_idle(idx);
        self.pull_engine().serve_waiting_pulls();
    }

    /// Processes a RESP: the answer to a request, or the refusal of a read.
    pub(crate) fn on_resp(
        &mut self,
        p: PeerIdx,
        frame: &RxFrame<'_>,
        op: &RespOp,
        (off, len): (usize, usize),
    ) {
        if FastOp::is_name(op.dst_op) {
            return self.on_fast_answer(p, frame, op, (off, len));
        }
        if let Some(reason) = op.status {
            let handle = Handle::from_parts(PullIdx::of(op.dst_op), op.dst_gen);
            self.read_failed(p, handle, op.offset, super::acked::nack_error(reason));
            return;
        }
        if !self.objects.peers[p].send_q.is_empty() {
            self.objects.due.make_ready(self.objects.peers, p);
        }
        self.objects.peers[p].answered(1);
        let handle = Handle::from_parts(TxIdx::of(op.dst_op), op.dst_gen);
        let known = self.tx.wrs.by_handle(handle);
        let known = known.filter(|wr| wr.peer == p && wr.flags.contains(WrFlags::RMA));
        let Some(total) = known.map(|wr| wr.len) else {
            self.objects.counters.rx_stray += 1;
            return;
        };
        let w = handle.idx();
        let RmaKind::Atomic(a) = &mut self.tx.rma_mut(w).kind else {
            self.objects.counters.rx_stray += 1;
            return;
        };
        let at = op.offset as usize;
        if a.answers == 0 || at > a.result.len() || len > a.result.len() - at {
            self.objects.counters.rx_stray += 1;
            return;
        }
        frame.copy_to_io(off, &a.result, at, len);
        a.got += len as u64;
        a.answers -= 1;
        if a.answers > 0 || !a.all_out {
            return;
        }
        if a.got == total * u64::from(a.elem_len) {
            self.tx[w].flags |= WrFlags::ALL_SENT;
            self.try_complete(w);
        } else {
            // The answer does not match the request: the peer is faulty.
            self.abandon_wr(w);
            self.fail_wr(w, Error::ConnReset, ProvErrno::UnknownOutcome);
        }
    }

    /// Fails the operation of a packet that was refused and became a NOP.
    pub(crate) fn on_rma_nack(
        &mut self,
        p: PeerIdx,
        ty: Ty,
        op: &[u8; RELIABLE_OP_MAX],
        w: TxIdx,
        body: BodyRef,
        reason: NackReason,
    ) {
        let err = super::acked::nack_error(reason);
        if ty == Ty::Atomic {
            self.drop_refused(p, op);
        }
        if w != TxIdx::NONE {
            if let (Ty::Write, BodyRef::Wr { offset, .. }) = (ty, body) {
                self.tx[w].pulled = offset;
            }
            // Earlier packets of the operation have been executed.
            let first = match body {
                BodyRef::Wr { offset, .. } => offset == 0,
                BodyRef::Operands { offset, .. } => offset == 0,
                // An atomic read has no operands.
                _ => ty != Ty::Atomic || AtomicOp::offset_of(op) == 0,
            };
            let prov = match reason {
                NackReason::NoEndpoint => ProvErrno::NoEndpoint,
                _ if first || ty == Ty::Read => ProvErrno::NotExecuted,
                _ => ProvErrno::UnknownOutcome,
            };
            self.abandon_wr(w);
            self.fail_wr(w, err, prov);
        }
        if ty == Ty::Read {
            let ((idx, generation), len) = ReadOp::initiator_and_len(op);
            if generation != 0 {
                self.read_failed(p, Handle::from_parts(PullIdx::of(idx), generation), len, err);
            }
        }
    }

    /// Frees the operands of the later packets of a refused atomic operation: the target drops
    /// these packets and answers none.
    fn drop_refused(&mut self, p: PeerIdx, op: &[u8; RELIABLE_OP_MAX]) {
        let (seq, mut unanswered) = (RemoteRange::seq_of(op), u16::from(AtomicOp::fetches(op)));
        self.objects.peers[p].snd.for_each(self.sent, |entry| {
            if entry.ty == Ty::Atomic && RemoteRange::seq_of(&entry.op) == seq {
                unanswered += u16::from(AtomicOp::fetches(&entry.op));
                entry.become_nop();
            }
        });
        let peer = &mut self.objects.peers[p];
        peer.answered(unanswered);
    }
}

impl Responder<'_> {
    /// Executes a WRITE.
    #[inline]
    pub(crate) fn on_write(
        &mut self,
        p: PeerIdx,
        frame: &RxFrame<'_>,
        op: &WriteOp,
        (off, len): (usize, usize),
    ) -> Verdict {
        if self.is_of_refused(p, &op.range, op.imm) {
            return Verdict::Accept;
        }
        let done = self.do_write(p, frame, op, (off, len));
        self.verdict(p, Some(&op.range), done)
    }

    fn do_write(
        &mut self,
        p: PeerIdx,
        frame: &RxFrame<'_>,
        op: &WriteOp,
        (off, len): (usize, usize),
    ) -> Result<(), NackReason> {
        let e = self.remote_ep(p, &op.range, Caps::RMA | Caps::REMOTE_WRITE, op.imm)?;
        if op.answer {
            self.response_room(p)?;
        }
        if op.left > 0 {
            let of = self.accessor(p, AccessNumber::Change(op.range.seq));
            let (m, at) = self.mr_find((e, of), &op.range, op.left, MrAccess::REMOTE_WRITE)?;
            self.note_use(m, of, op.range.last);
            let mr = &self.mrs[m];
            frame.copy_to_io(off, &mr.buf, at, len);
            let (cntr, bytes) = (mr.write_cntr, len as u64);
            self.objects.cntrs.count(cntr, Done { ops: (bytes == op.left).into(), bytes });
        }
        let written = self.objects.peers[p].note_written(&op.range, len as u64);
        if op.range.last {
            self.objects.counters.rma_executed += 1;
            self.objects.count_remote(e, REMOTE_WRITE, Done::one(written));
        }
        if let Some(data) = op.imm {
            let flags = CqFlags::RMA | CqFlags::REMOTE_WRITE;
            let cqe = Cqe { flags, len: written, data, ..Cqe::default() };
            self.objects.complete_remote_cq_data(p, e, op.range.src_ep, cqe);
        }
        if op.answer {
            self.answer_op(p, op.resp(), OldValues::NONE);
        }
        Ok(())
    }

    /// Executes an ATOMIC.
    #[inline]
    pub(crate) fn on_atomic(
        &mut self,
        p: PeerIdx,
        frame: &RxFrame<'_>,
        op: &AtomicOp,
        (off, len): (usize, usize),
    ) -> Verdict {
        // Read before `is_of_refused`, which clears the note of another operation.
        let void =
            op.void || self.objects.peers[p].bad_seq == Peer::WITHDRAWN | u32::from(op.range.seq);
        if self.is_of_refused(p, &op.range, op.imm) {
            return Verdict::Accept;
        }
        let done =
            if void { self.do_withdrawn(p, op) } else { self.do_atomic(p, frame, op, (off, len)) };
        self.verdict(p, Some(&op.range), done)
    }

    /// Answers a withdrawn atomic, or a packet behind one: the initiator waits only for the answer.
    #[cold]
    fn do_withdrawn(&mut self, p: PeerIdx, op: &AtomicOp) -> Result<(), NackReason> {
        if !op.range.last && !planted(Bug::WithdrawnFetchContinues) {
            self.objects.peers[p].bad_seq = Peer::WITHDRAWN | u32::from(op.range.seq);
        }
        if op.fetch || op.answer {
            self.response_room(p)?;
            self.answer_op(p, op.resp(), OldValues::NONE);
        }
        self.objects.blocks.return_credit(
            self.objects.peers,
            self.objects.due,
            p,
            op.imm.is_some().into(),
        );
        Ok(())
    }

    fn do_atomic(
        &mut self,
        p: PeerIdx,
        frame: &RxFrame<'_>,
        op: &AtomicOp,
        (off, len): (usize, usize),
    ) -> Result<(), NackReason> {
        let (atomic_op, ty, bytes) = self.check_atomic(p, op, len)?;
        let (caps, access) = atomic_needs(op, atomic_op);
        let e = self.remote_ep(p, &op.range, caps, op.imm)?;
        if op.fetch || op.answer {
            self.response_room(p)?;
        }
        let target = if op.tagged {
            self.tagged_target(p, e, op)?
        } else {
            let of = self.accessor(p, AccessNumber::Change(op.range.seq));
            let (m, at) = self.mr_find((e, of), &op.range, bytes as u64, access)?;
            Target::Region(m, at)
        };
        let mut old = OldValues::of_len(if op.fetch { bytes } else { 0 }, self.spare);
        let mut scratch = std::mem::take(self.scratch);
        let mut few = [0; 32];
        let operands = if len <= few.len() {
            &mut few[..len]
        } else {
            scratch.resize(len, 0);
            &mut scratch[..]
        };
        assert!(frame.copy_to(off, operands), "length was checked");
        let done = self.execute(target, op, (atomic_op, ty), operands, old.get_mut());
        *self.scratch = scratch;
        done.map_err(|fault| self.objects.counters.atomic_fault(fault))?;
        self.atomic_done(p, e, op, (target, bytes));
        if op.fetch || op.answer {
            self.answer_op(p, op.resp(), old);
        }
        Ok(())
    }

    /// Executes the operation on the elements of `target`. The old values go to `old` unless that
    /// is empty.
    #[inline]
    pub(super) fn execute(
        &self,
        target: Target,
        op: &AtomicOp,
        (atomic_op, ty): (atomic::AtomicOp, Datatype),
        operands: &[u8],
        old: &mut [u8],
    ) -> Result<(), AtomicFault> {
        let split = if op.compare { operands.len() / 2 } else { operands.len() };
        let (operand, compare) = operands.split_at(split);
        let of_receive;
        let (buf, at, sharing) = match target {
            Target::Region(m, at) => (&self.mrs[m].buf, at, self.mrs[m].sharing),
            Target::Receive(r, at) => {
                of_receive = self.objects.posted.buf(r);
                (&of_receive, at, Sharing::Single)
            }
        };
        buf.atomic(at, atomic_op, ty, op.count.into(), operand, compare, old, sharing)
    }

    /// The checks of an atomic packet that need no table. Returns operation, type and the bytes of
    /// the elements.
    fn check_atomic(
        &mut self,
        p: PeerIdx,
        op: &AtomicOp,
        len: usize,
    ) -> Result<(atomic::AtomicOp, Datatype, usize), NackReason> {
        let decoded = decode_atomic(op, len).and_then(|(atomic_op, ty, bytes)| {
            let answers = !op.fetch
                || bytes <= self.objects.port.answer_max(&self.objects.peers[p], RespOp::LEN);
            if answers { Ok((atomic_op, ty, bytes)) } else { Err(AtomicFault::Operand) }
        });
        decoded.map_err(|fault| self.objects.counters.atomic_fault(fault))
    }

    /// The oldest receive posted for the tag of a tagged atomic. It stays posted.
    fn tagged_target(&mut self, p: PeerIdx, e: EpIdx, op: &AtomicOp) -> Result<Target, NackReason> {
        let ep = &self.objects.eps[e];
        let src = self.objects.peers[p].src(p, op.range.src_ep);
        let matcher =
            &self.objects.eps[self.objects.eps.matching_of(e)].matcher[MsgKind::Tagged as usize];
        let tagged = ep.caps.contains(Caps::TAGGED);
        let found =
            matcher.match_posted(&self.objects.posted.pool, src, op.range.rkey).filter(|_| tagged);
        let recv = found.ok_or(NackReason::NoMatch)?;
        let at = usize::try_from(op.range.addr).map_err(|_| NackReason::BadAccess)?;
        Ok(Target::Receive(recv, at))
    }

    /// Counts an executed atomic operation, and writes the completion for its remote CQ data, if
    /// any.
    pub(super) fn atomic_done(
        &mut self,
        p: PeerIdx,
        e: EpIdx,
        op: &AtomicOp,
        (target, bytes): (Target, usize),
    ) {
        let bytes = bytes as u64;
        let is_whole = op.offset == 0 && op.range.last;
        let all =
            if is_whole { bytes } else { self.objects.peers[p].note_written(&op.range, bytes) };
        if let Target::Region(m, _) = target {
            let of = self.accessor(p, AccessNumber::Change(op.range.seq));
            self.note_use(m, of, op.range.last);
            let atomic_op = atomic::AtomicOp::try_from(u32::from(op.op));
            let ways = (op.fetch, atomic_op.is_ok_and(changes));
            self.count_access(m, ways, Done { ops: op.end.into(), bytes });
        }
        if op.range.last {
            self.objects.counters.rma_executed += 1;
            let which = if op.fetch { REMOTE_READ } else { REMOTE_WRITE };
            self.objects.count_remote(e, which, Done::one(all));
        }
        if let Some(data) = op.imm {
            let way = if op.fetch { CqFlags::REMOTE_READ } else { CqFlags::REMOTE_WRITE };
            let cqe = Cqe { flags: CqFlags::ATOMIC | way, data, ..Cqe::default() };
            self.objects.complete_remote_cq_data(p, e, op.range.src_ep, cqe);
        }
    }

    /// Sends an answer and keeps it until it is acknowledged: a repeated request is a duplicate and
    /// gets this answer, not another execution.
    pub(super) fn answer_op(&mut self, p: PeerIdx, resp: RespOp, old: OldValues) {
        let RespOp { dst_op, dst_gen, offset, .. } = resp;
        let OldValues { len, short, long } = old;
        let kind = ResponseKind::Values { offset, len, short, long };
        let link = Link::default();
        self.add_response(Response { peer: p, dst_op, dst_gen, kind, queued: true, link });
    }

    /// Whether the packet is a later packet of a refused operation, which is dropped.
    #[inline]
    fn is_of_refused(&mut self, p: PeerIdx, range: &RemoteRange, imm: Option<u64>) -> bool {
        let bad = &mut self.objects.peers[p].bad_seq;
        if *bad == NONE {
            return false;
        }
        let same = *bad == u32::from(range.seq);
        if !same || range.last {
            *bad = NONE;
        }
        if same {
            self.objects.blocks.return_credit(
                self.objects.peers,
                self.objects.due,
                p,
                imm.is_some().into(),
            );
        }
        same
    }

    /// The verdict on a packet. If it is refused and `range` names its operation, the later packets
    /// of that operation are refused too. Guessing keys is slow: packets behind a refused one wait
    /// until the peer has processed the NACK.
    #[inline]
    fn verdict(
        &mut self,
        p: PeerIdx,
        range: Option<&RemoteRange>,
        done: Result<(), NackReason>,
    ) -> Verdict {
        let peer = &mut self.objects.peers[p];
        peer.nack.note_key(self.turn.polled_at, done == Err(NackReason::BadKey));
        let Err(reason) = done else { return Verdict::Accept };
        if let Some(range) = range.filter(|range| !range.last) {
            peer.bad_seq = range.seq.into();
        }
        Verdict::Refuse(reason)
    }

    /// Slot of the target endpoint of a one-sided operation, if the endpoint has the capabilities
    /// and the peer has credit for the remote CQ data.
    #[inline]
    fn remote_ep(
        &mut self,
        p: PeerIdx,
        range: &RemoteRange,
        caps: Caps,
        imm: Option<u64>,
    ) -> Result<EpIdx, NackReason> {
        let e = self.objects.eps.slot(range.dst_ep);
        let Some(ep) = self.objects.eps.get(e).filter(|ep| ep.enabled && ep.is_named(range.rx_ctx))
        else {
            self.objects.counters.rx_no_endpoint += 1;
            return Err(NackReason::NoEndpoint);
        };
        if !ep.caps.contains(caps) {
            self.objects.counters.rx_bad_access += 1;
            return Err(NackReason::BadAccess);
        }
        if !self.objects.may_reach(p, e) {
            return Err(NackReason::BadAccess);
        }
        if imm.is_some() && self.objects.peers[p].outstanding() == 0 {
            return Err(NackReason::Overdrawn);
        }
        Ok(e)
    }

    /// Counts an access in the counters of region `m`, one for reads and one for writes: a fetching
    /// atomic that changes the region in both, but only once if both are one counter. (fi_mr(3),
    /// "fi_mr_bind"; an endpoint's counter of writes counts only base atomics, fi_endpoint(3),
    /// "fi_ep_bind".)
    #[inline]
    pub(super) fn count_access(&mut self, m: MrIdx, (reads, writes): (bool, bool), done: Done) {
        let mr = &self.mrs[m];
        let read = if reads { mr.read_cntr } else { CntrIdx::NONE };
        let write = if writes { mr.write_cntr } else { CntrIdx::NONE };
        self.objects.cntrs.count(read, done);
        if write != read {
            self.objects.cntrs.count(write, done);
        }
    }

    /// Executes a READ: a peer requests bytes of a region.
    pub(crate) fn on_read(&mut self, p: PeerIdx, op: &ReadOp) -> Verdict {
        let done = self.do_read(p, op);
        self.verdict(p, None, done)
    }

    fn do_read(&mut self, p: PeerIdx, op: &ReadOp) -> Result<(), NackReason> {
        let e = self.remote_ep(p, &op.range, Caps::RMA | Caps::REMOTE_READ, None)?;
        if op.len == 0 {
            self.objects.counters.rma_executed += 1;
            self.objects.count_remote(e, REMOTE_READ, Done::one(0));
            return Ok(());
        }
        let of = self.accessor(p, AccessNumber::Read(op.dst_op, op.dst_gen));
        let need = MrAccess::REMOTE_READ;
        let (mr, at) = self.mr_find((e, of), &op.range, op.len.into(), need)?;
        self.response_room(p)?;
        if op.answer {
            return self.answer_read((p, of), (e, mr, at), op);
        }
        self.note_use(mr, of, op.range.last);
        self.mrs[mr].readers += 1;
        self.objects.counters.rma_executed += u64::from(op.range.last);
        let kind = ResponseKind::Read {
            mr,
            from: at as u64,
            to: op.offset,
            left: op.len,
            ep: e,
            counts: self.counts_of_read(op, e, mr),
        };
        let (dst_op, dst_gen, link) = (op.dst_op, op.dst_gen, Link::default());
        self.add_response(Response { peer: p, dst_op, dst_gen, kind, queued: true, link });
        Ok(())
    }

    /// Identifies operation `number` of peer `p`.
    #[inline]
    fn accessor(&self, p: PeerIdx, number: AccessNumber) -> Accessor {
        Accessor { peer: p, sid: self.objects.peers[p].sid, number }
    }

    /// The counters of endpoint `e` and of region `mr` that count a READ.
    fn counts_of_read(&self, op: &ReadOp, e: EpIdx, mr: MrIdx) -> ReadCounts {
        let Objects { eps, cntrs, .. } = &self.objects;
        let mut counts = ReadCounts::empty();
        counts.set(ReadCounts::ENDS, op.range.last);
        counts.set(ReadCounts::REGION_ENDS, op.end);
        counts.set(ReadCounts::BYTES, cntrs.counts_bytes(eps[e].rma_cntr[REMOTE_READ]));
        counts.set(ReadCounts::REGION_BYTES, cntrs.counts_bytes(self.mrs[mr].read_cntr));
        counts
    }

    /// Answers a READ by one RESP, with the present bytes of region `mr` at `at`.
    fn answer_read(
        &mut self,
        (p, of): (PeerIdx, Accessor),
        (e, mr, at): (EpIdx, MrIdx, usize),
        op: &ReadOp,
    ) -> Result<(), NackReason> {
        let len = op.len as usize;
        if len > self.objects.peers[p].payload_max(RespOp::LEN) {
            return Err(NackReason::Malformed);
        }
        let mut bytes = OldValues::of_len(len, self.spare);
        self.mrs[mr].buf.read_at(at, bytes.get_mut());
        self.answer_op(p, op.resp(), bytes);
        self.objects.counters.rma_executed += 1;
        let done = Done::one(len as u64);
        self.note_use(mr, of, true);
        self.count_access(mr, (true, false), done);
        self.objects.count_remote(e, REMOTE_READ, done);
        Ok(())
    }

    /// Checks that another response to `p` has a record, besides the records that answers of this
    /// burst may need.
    pub(super) fn response_room(&self, p: PeerIdx) -> Result<(), NackReason> {
        let is_free = self.responses.free_count() > self.target.held();
        let room = self.objects.peers[p].responses < RESPONSES_MAX && is_free;
        if room { Ok(()) } else { Err(NackReason::Overdrawn) }
    }
}

impl Objects<'_> {
    /// Counts remote operations in the counter of endpoint `e`, if it has `FI_RMA_EVENT`.
    #[inline]
    pub(crate) fn count_remote(&mut self, e: EpIdx, which: usize, done: Done) {
        let Some(ep) = self.eps.get(e) else { return };
        if ep.caps.contains(Caps::RMA_EVENT) {
            let cntr = ep.rma_cntr[which];
            self.cntrs.count(cntr, done);
        }
    }

    /// Writes a completion with remote CQ data for endpoint `e`. Without room in the queue it
    /// waits, in the unexpected block that the sender's credit has reserved.
    fn complete_remote_cq_data(&mut self, p: PeerIdx, e: EpIdx, src_ep: u16, cqe: Cqe) {
        let peer = &mut self.peers[p];
        peer.consumed = peer.consumed.wrapping_add(1);
        let inc = peer.inc;
        let src = self.source_of(e, (p, inc), src_ep).unwrap_or(FI_ADDR_UNSPEC);
        let cqe = Cqe { flags: cqe.flags | CqFlags::REMOTE_CQ_DATA, src, ..cqe };
        let cq = self.eps[e].rx_cq;
        if cq != CqIdx::NONE {
            self.eps.make_room(self.cqs, cq);
            let table = &mut self.cqs[cq];
            if !table.rest.late.is_empty() || !table.cq.try_push(cqe) {
                table.rest.late.push_back(LateCompletion { ep: e, peer: p, inc, src_ep, cqe });
                self.mark_starved(cq);
                self.peers[p].unexpected += 1;
                return;
            }
        }
        self.blocks.unpromised += 1;
        self.blocks.regrant(self.peers, self.due, p);
    }

    /// Writes the completions that waited for room in queue `cq`.
    pub(crate) fn retry_late_completions(&mut self, cq: CqIdx) {
        while let Some(&late) = self.cqs[cq].rest.late.front() {
            let LateCompletion { ep: e, peer: p, inc, src_ep, cqe } = late;
            let src = self.source_of(e, (p, inc), src_ep).unwrap_or(FI_ADDR_UNSPEC);
            let cqe = Cqe { src, ..cqe };
            self.eps.make_room(self.cqs, cq);
            let table = &mut self.cqs[cq];
            if !table.cq.try_push(cqe) {
                self.mark_starved(cq);
                return;
            }
            table.rest.late.pop_front();
            self.blocks.release_late_block(self.peers, self.due, p);
        }
    }

    /// Discards waiting completions of endpoint `e`, which is being closed.
    pub(crate) fn drop_late(&mut self, e: EpIdx) {
        let cq = self.eps[e].rx_cq;
        if cq == CqIdx::NONE {
            return;
        }
        let waiting = std::mem::take(&mut self.cqs[cq].rest.late);
        for late in waiting {
            if late.ep == e {
                self.blocks.release_late_block(self.peers, self.due, late.peer);
            } else {
                self.cqs[cq].rest.late.push_back(late);
            }
        }
    }
}

/// Whether the operation changes its target.
#[inline]
pub(super) fn changes(atomic_op: atomic::AtomicOp) -> bool {
    atomic_op != atomic::AtomicOp::Read
}

/// Operation, type and element bytes of an atomic packet with `len` bytes of payload.
pub(super) fn decode_atomic(
    op: &AtomicOp,
    len: usize,
) -> Result<(atomic::AtomicOp, Datatype, usize), AtomicFault> {
    let kind = match (op.fetch, op.compare) {
        (false, false) => AtomicKind::Base,
        (true, false) => AtomicKind::Fetch,
        (true, true) => AtomicKind::Compare,
        (false, true) => return Err(AtomicFault::Unsupported),
    };
    let atomic_op = atomic::AtomicOp::try_from(u32::from(op.op));
    let ty = Datatype::try_from(u32::from(op.ty));
    let (Ok(atomic_op), Ok(ty)) = (atomic_op, ty) else { return Err(AtomicFault::Unsupported) };
    if !atomic::valid(kind, atomic_op, ty) {
        return Err(AtomicFault::Unsupported);
    }
    let bytes = usize::from(op.count) * ty.size();
    let operands = sent_len(kind, atomic_op, bytes);
    if bytes == 0 || bytes > atomic::OPERAND_LEN_MAX || len != operands {
        return Err(AtomicFault::Operand);
    }
    Ok((atomic_op, ty, bytes))
}

/// The capabilities and access rights that an atomic packet needs.
#[inline]
pub(super) fn atomic_needs(op: &AtomicOp, atomic_op: atomic::AtomicOp) -> (Caps, MrAccess) {
    let (mut caps, mut access) = (Caps::ATOMIC, MrAccess::empty());
    if op.fetch {
        (caps, access) = (caps | Caps::REMOTE_READ, access | MrAccess::REMOTE_READ);
    }
    if atomic_op != atomic::AtomicOp::Read {
        (caps, access) = (caps | Caps::REMOTE_WRITE, access | MrAccess::REMOTE_WRITE);
    }
    (caps, access)
}
