//! One-sided operations at the initiator: posting and completion.
//!
//! An operation is a transmit request like a message, with a record of its own ([`Rma`]) besides,
//! and goes through the same queue: so fences, the end of a session and the close of an endpoint
//! treat it alike. It completes when the target has executed all of it: a write at the
//! acknowledgement of its last packet, a read at its last byte, a fetching atomic at its last
//! answer. No completion level is weaker, because a refused packet has to find an operation that
//! has not reported success (rule S11).

use barewire_driver::mem::IoBuf;

use super::ops::{AtomicWr, Rma, RmaKind, TxWr, WrFlags};
use super::rma_list::RmaList;
use super::{Avs, EpId, Eps, Node, Objects, Operations, Posting};
use crate::av::AvEntry;
use crate::cntr::Done;
use crate::error::{Error, Result};
use crate::flags::{Caps, CqFlags, OpFlags};
use crate::idx::{CntrIdx, EpIdx, PeerIdx, PullIdx, RmaIdx, TxIdx};
use crate::proto::atomic::{self, AtomicKind, AtomicOp, Datatype};
use crate::types::{Cqe, FI_ADDR_UNSPEC, FiAddr, Instant};

/// Indices of an endpoint's counters of one-sided operations (`Ep::rma_cntr`).
pub(crate) const READ: usize = 0;
pub(crate) const WRITE: usize = 1;
pub(crate) const REMOTE_READ: usize = 2;
pub(crate) const REMOTE_WRITE: usize = 3;

/// Completion flags of a fetching atomic operation, and the index of its counter.
pub(super) const FETCHED: (CqFlags, usize) = (CqFlags::ATOMIC.union(CqFlags::READ), READ);

/// Bytes of operands and compare values that fit the smallest packet.
const COMPARE_SHORT: usize = 128;

/// Flags that any one-sided operation may carry.
const FLAGS: OpFlags = OpFlags::MORE
    .union(OpFlags::COMPLETION)
    .union(OpFlags::INJECT_COMPLETE)
    .union(OpFlags::TRANSMIT_COMPLETE)
    .union(OpFlags::DELIVERY_COMPLETE);

/// A write to remote memory. `buf` stays lent until the operation has completed, or, with
/// [`OpFlags::INJECT`], until the call returns.
#[derive(Debug)]
pub struct WriteReq {
    /// The bytes.
    pub buf: IoBuf,
    /// Destination.
    pub dest: FiAddr,
    /// Remote ranges, with as many bytes as `buf`. Ignored if `buf` is empty.
    pub rma: RmaList,
    /// Remote CQ data, sent if `flags` has `REMOTE_CQ_DATA`.
    pub data: u64,
    /// Returned in the completion.
    pub context: u64,
    /// All flags of the operation: the caller has merged in the endpoint's default flags.
    pub flags: OpFlags,
    /// The request is of an `inject` call: a success never writes a completion.
    pub no_completion: bool,
}

/// A read of remote memory. `buf` stays lent until the operation has completed.
#[derive(Debug)]
pub struct ReadReq {
    /// Destination of the bytes.
    pub buf: IoBuf,
    /// The peer to read from.
    pub dest: FiAddr,
    /// Remote ranges, with as many bytes as `buf`. Ignored if `buf` is empty.
    pub rma: RmaList,
    /// Returned in the completion.
    pub context: u64,
    /// As in [`WriteReq::flags`].
    pub flags: OpFlags,
}

/// An atomic operation on remote memory. `result` stays lent until it has completed; `operand` and
/// `compare` only until the call returns.
#[derive(Debug)]
pub struct AtomicReq {
    /// Form of the call.
    pub kind: AtomicKind,
    /// `enum fi_op`.
    pub op: u32,
    /// `enum fi_datatype`.
    pub ty: u32,
    /// The operands; ignored by an atomic read.
    pub operand: IoBuf,
    /// The compare values; empty unless `kind` is `Compare`.
    pub compare: IoBuf,
    /// Destination of the old values; empty if `kind` is `Base`.
    pub result: IoBuf,
    /// Destination.
    pub dest: FiAddr,
    /// Remote ranges; lengths count elements.
    pub rma: RmaList,
    /// As in [`WriteReq::data`].
    pub data: u64,
    /// Returned in the completion.
    pub context: u64,
    /// As in [`WriteReq::flags`].
    pub flags: OpFlags,
    /// As in [`WriteReq::no_completion`].
    pub no_completion: bool,
}

/// The checked arguments that all one-sided calls have in common.
struct CheckedArgs {
    e: EpIdx,
    peer: PeerIdx,
    dst_ep: u16,
    rx_ctx: u8,
    inc: u64,
    context: u64,
    data: u64,
    flags: WrFlags,
}

impl Rma {
    /// Bytes of the operands that an atomic operation keeps.
    pub(crate) fn operands(&self, offset: usize, len: usize) -> &[u8] {
        match &self.kind {
            RmaKind::Atomic(a) => &a.operands[offset..offset + len],
            RmaKind::Write | RmaKind::Read => &[],
        }
    }

    /// Bytes of one unit of the request's length.
    fn unit(&self) -> u64 {
        match &self.kind {
            RmaKind::Atomic(a) => a.elem_len.into(),
            RmaKind::Write | RmaKind::Read => 1,
        }
    }

    /// Completion flags of the operation, and the index of its counter.
    fn flags(&self) -> (CqFlags, usize) {
        match &self.kind {
            RmaKind::Write => (CqFlags::RMA | CqFlags::WRITE, WRITE),
            RmaKind::Read => (CqFlags::RMA | CqFlags::READ, READ),
            RmaKind::Atomic(a) if a.fetch => FETCHED,
            RmaKind::Atomic(_) => (CqFlags::ATOMIC | CqFlags::WRITE, WRITE),
        }
    }
}

/// Spare buffers for the next operations that need one.
#[derive(Debug, Default)]
pub(crate) struct SpareBuffers(Vec<Vec<u8>>);

impl SpareBuffers {
    /// Maximum number of buffers kept.
    const MAX: usize = 64;

    /// Takes an empty buffer.
    pub(super) fn take(&mut self) -> Vec<u8> {
        self.0.pop().unwrap_or_default()
    }

    /// Returns a buffer that is no longer needed.
    pub(super) fn keep(&mut self, mut bytes: Vec<u8>) {
        if bytes.capacity() > 0 && self.0.len() < Self::MAX {
            bytes.clear();
            self.0.push(bytes);
        }
    }
}

impl Eps {
    /// The checks of every one-sided call.
    fn check_rma(
        &self,
        avs: &Avs,
        ep: EpId,
        caps: Caps,
        dest: FiAddr,
        flags: OpFlags,
        mut allowed: OpFlags,
    ) -> Result<CheckedArgs> {
        let e = self.by_handle(ep.0).ok_or(Error::BadFd)?;
        if !e.enabled || e.is_over {
            return Err(Error::OpBadState);
        }
        if !e.caps.contains(caps) {
            return Err(Error::OpNotSupp("FI_RMA or FI_ATOMIC with this direction not requested"));
        }
        if e.caps.contains(Caps::FENCE) {
            allowed |= OpFlags::FENCE;
        }
        if !allowed.contains(flags) {
            return Err(Error::BadFlags);
        }
        let entry = avs[e.av].av.lookup(dest);
        let entry = entry.ok_or(Error::Invalid("destination is not in the AV"))?;
        let AvEntry { peer, ep: dst_ep, rx_ctx, incarnation: inc } = entry;
        let flags = wr_flags(flags, e.tx_selective);
        Ok(CheckedArgs { e: ep.0.idx(), peer, dst_ep, rx_ctx, inc, context: 0, data: 0, flags })
    }
}

impl Posting<'_> {
    /// Posts a write. It leaves with the next [`transmit`](Node::transmit), and completes when the
    /// target has executed it.
    ///
    /// # Errors
    /// Nothing was sent, nothing will complete:
    /// - [`Error::OpBadState`]: the endpoint is not enabled, or its connection is over.
    ///   [`Error::BadFd`]: it was closed.
    /// - [`Error::OpNotSupp`]: it has no `FI_RMA` or no `FI_WRITE`.
    /// - [`Error::BadFlags`]: a flag is unknown here or was not granted.
    /// - [`Error::Invalid`]: `dest` is not in the address vector, or the lengths on both sides
    ///   differ.
    /// - [`Error::MsgTooLong`]: above [`Node::MAX_MSG_SIZE`], or injected and above
    ///   [`Node::INJECT_SIZE`].
    /// - [`Error::Again`]: the transmit queue or the completion queue is full.
    pub fn post_write(&mut self, now: Instant, ep: EpId, mut req: WriteReq) -> Result<()> {
        let allowed = FLAGS | OpFlags::REMOTE_CQ_DATA | OpFlags::INJECT;
        let mut args = self.sessions.eps.check_rma(
            self.sessions.avs,
            ep,
            Caps::RMA | Caps::WRITE,
            req.dest,
            req.flags,
            allowed,
        )?;
        self.sessions.control().report_loss(args.e, args.peer)?;
        let len = req.buf.len() as u64;
        let inject = req.flags.contains(OpFlags::INJECT);
        check_len(len, &req.rma)?;
        if inject && len > Node::INJECT_SIZE as u64 {
            return Err(Error::MsgTooLong);
        }
        self.sessions.operations().reserve_tx(args.e)?;
        (args.context, args.data) = (req.context, req.data);
        if req.no_completion {
            args.flags.remove(WrFlags::CQE);
        }
        let w = self.sessions.operations().alloc_rma(&args, len, RmaKind::Write, req.rma);
        self.sessions.tx.keep_memory(w, &mut req.buf);
        self.queue_wr(now, args.peer, w, args.inc);
        Ok(())
    }

    /// Posts a read. It completes when all bytes are in `buf`.
    ///
    /// # Errors
    /// As [`post_write`](Self::post_write), with `FI_READ`.
    pub fn post_read(&mut self, now: Instant, ep: EpId, mut req: ReadReq) -> Result<()> {
        let mut args = self.sessions.eps.check_rma(
            self.sessions.avs,
            ep,
            Caps::RMA | Caps::READ,
            req.dest,
            req.flags,
            FLAGS,
        )?;
        self.sessions.control().report_loss(args.e, args.peer)?;
        let len = req.buf.len() as u64;
        check_len(len, &req.rma)?;
        self.sessions.operations().reserve_tx(args.e)?;
        args.context = req.context;
        let w = self.sessions.operations().alloc_rma(&args, len, RmaKind::Read, req.rma);
        self.sessions.tx.keep_memory(w, &mut req.buf);
        self.queue_wr(now, args.peer, w, args.inc);
        Ok(())
    }

    /// Posts an atomic operation. It completes when the target has executed it on every element,
    /// each of them atomically, and the old values are in `result` if requested.
    ///
    /// # Errors
    /// As [`post_write`](Self::post_write), with `FI_ATOMIC` and `FI_WRITE`, or `FI_READ` if old
    /// values are requested; and
    /// - [`Error::OpNotSupp`]: the operation has no meaning on the type, or not in this family.
    /// - [`Error::Invalid`]: no element, or lists of different lengths, or `result` overlaps
    ///   operands or compare values.
    /// - [`Error::MsgTooLong`]: more elements than [`atomic_valid`] returns, or
    ///   injected and more than [`Node::INJECT_SIZE`] bytes of operands.
    pub fn post_atomic(&mut self, now: Instant, ep: EpId, req: AtomicReq) -> Result<()> {
        let allowed = FLAGS | OpFlags::REMOTE_CQ_DATA | OpFlags::INJECT | OpFlags::TAGGED;
        let way = if req.kind == AtomicKind::Base { Caps::WRITE } else { Caps::READ };
        let caps = Caps::ATOMIC | way;
        let mut args = self.sessions.eps.check_rma(
            self.sessions.avs,
            ep,
            caps,
            req.dest,
            req.flags,
            allowed,
        )?;
        self.sessions.control().report_loss(args.e, args.peer)?;
        let (op, ty, count) = check_atomic(&req)?;
        self.sessions.operations().reserve_tx(args.e)?;
        (args.context, args.data) = (req.context, req.data);
        if req.no_completion {
            args.flags.remove(WrFlags::CQE);
        }
        let elem_len = ty.size();
        let per_elem = sent_len(req.kind, op, elem_len);
        let len = per_elem * count;
        // Short operands are stored in the inject memory; with compare values only if one packet
        // holds both, since in each packet the compare values follow its own operands.
        let compares = per_elem > elem_len;
        let few = if compares { COMPARE_SHORT } else { Node::INJECT_SIZE };
        let short = len <= few && !(compares && req.rma.as_slice().len() > 1);
        args.flags.set(WrFlags::INJECTED, short);
        let split = if compares { len / 2 } else { len };
        let mut operands = Vec::new();
        let mut bytes = [0; Node::INJECT_SIZE];
        if len > 0 {
            let to = if short {
                &mut bytes[..len]
            } else {
                operands = self.sessions.spare.take();
                operands.resize(len, 0);
                &mut operands[..]
            };
            let (operand, compare) = to.split_at_mut(split);
            req.operand.read_at(0, operand);
            req.compare.read_at(0, compare);
        }
        let kind = RmaKind::Atomic(AtomicWr {
            op: op as u8,
            ty: ty as u8,
            elem_len: elem_len as u8,
            sent_len: per_elem as u8,
            fetch: req.kind != AtomicKind::Base,
            tagged: req.flags.contains(OpFlags::TAGGED),
            result: req.result,
            operands,
            segment: 0,
            answers: 0,
            got: 0,
            all_out: false,
        });
        let w = self.sessions.operations().alloc_rma(&args, count as u64, kind, req.rma);
        if short {
            self.sessions.tx.inject[w.at()][..len].copy_from_slice(&bytes[..len]);
        }
        self.queue_wr(now, args.peer, w, args.inc);
        Ok(())
    }
}

impl Operations<'_> {
    /// Reserves a place in the transmit queue and the completion queue of endpoint `e`.
    fn reserve_tx(&mut self, e: EpIdx) -> Result<()> {
        self.objects.eps.make_send_room(self.objects.cqs, e);
        let ep = &mut self.objects.eps[e];
        if ep.tx_used >= ep.tx_size || self.tx.wrs.free_count() == 0 {
            return Err(Error::Again);
        }
        if !self.objects.cqs[ep.tx_cq].cq.reserve() {
            return Err(Error::Again);
        }
        ep.tx_used += 1;
        Ok(())
    }

    fn alloc_rma(&mut self, args: &CheckedArgs, len: u64, kind: RmaKind, iov: RmaList) -> TxIdx {
        let rma = Rma { kind, iov, at: 0, done: 0, seq: 0, pull: PullIdx::NONE };
        let r = self.tx.rma.alloc(rma).expect("one record per request");
        let (ends, eps) = ((args.peer, args.e), (args.dst_ep, self.objects.eps[args.e].number));
        let wr = TxWr::new(args.context, ends, eps, args.flags);
        self.tx.alloc(TxWr { rx_ctx: args.rx_ctx, data: args.data, len, pull_op: r.get(), ..wr })
    }

    /// Completion flags of a one-sided request, and the counter that counts its outcome.
    pub(crate) fn rma_outcome(&self, w: TxIdx) -> (CqFlags, CntrIdx) {
        let (flags, which) = self.tx.rma_of(w).flags();
        (flags, self.objects.eps[self.tx[w].ep].rma_cntr[which])
    }

    /// Writes the success completion of a one-sided request.
    pub(crate) fn report_rma(&mut self, w: TxIdx) {
        let rma = self.tx.rma_of(w);
        let (flags, which) = rma.flags();
        let wr = &self.tx[w];
        let context = wr.flags.contains(WrFlags::CQE).then_some(wr.context);
        let (e, bytes) = (wr.ep, wr.len * rma.unit());
        self.objects.complete_rma(e, context, flags, (which, bytes));
    }

    /// Frees the one-sided record of a request that is being freed. Bytes that a read has requested
    /// are still expected, and discarded.
    pub(crate) fn free_rma(&mut self, r: RmaIdx) {
        if r == RmaIdx::NONE {
            return;
        }
        let rma = self.tx.rma.free(r);
        if rma.pull != PullIdx::NONE {
            self.abandon_read(rma.pull);
        }
        if let RmaKind::Atomic(AtomicWr { operands, .. }) = rma.kind {
            self.spare.keep(operands);
        }
    }
}

impl Objects<'_> {
    /// Reports a success to endpoint `e`: an entry in its queue if the operation's `context` is
    /// given, and a count in the counter with index `which`. A counter of bytes counts `bytes`.
    #[inline(always)]
    pub(super) fn complete_rma(
        &mut self,
        e: EpIdx,
        context: Option<u64>,
        flags: CqFlags,
        (which, bytes): (usize, u64),
    ) {
        let ep = &self.eps[e];
        let cq = &mut self.cqs[ep.tx_cq].cq;
        if let Some(op_context) = context {
            cq.push(Cqe { op_context, flags, src: FI_ADDR_UNSPEC, ..Cqe::default() });
        } else {
            cq.unreserve();
        }
        self.counters.rma_done += 1;
        let cntr = ep.rma_cntr[which];
        if cntr != CntrIdx::NONE {
            self.cntrs.count(cntr, Done::one(bytes));
        }
    }
}

pub(super) fn valid_pair(kind: AtomicKind, op: u32, ty: u32) -> Result<(AtomicOp, Datatype)> {
    const NONE: Error = Error::OpNotSupp("no such atomic operation on this datatype");
    let (op, ty) = (AtomicOp::try_from(op), Datatype::try_from(ty));
    let (Ok(op), Ok(ty)) = (op, ty) else { return Err(NONE) };
    if atomic::valid(kind, op, ty) { Ok((op, ty)) } else { Err(NONE) }
}

const LENGTHS: Error = Error::Invalid("element counts differ");

/// Checks operation, type and all lengths of an atomic call. Returns the number of elements.
fn check_atomic(req: &AtomicReq) -> Result<(AtomicOp, Datatype, usize)> {
    let (op, ty) = valid_pair(req.kind, req.op, req.ty)?;
    let count = req.rma.total().ok_or(LENGTHS)?;
    let len = checked_len(ty, count)?;
    let inject = req.flags.contains(OpFlags::INJECT);
    if inject && op != AtomicOp::Read && len > Node::INJECT_SIZE {
        return Err(Error::MsgTooLong);
    }
    let (operand, compare, result) = (&req.operand, &req.compare, &req.result);
    let (meets, compared) = (|| operand.overlaps(result), || compare.overlaps(result));
    let lens = [operand.len(), compare.len(), result.len()];
    check_memory(req.kind, op, len, lens, meets, compared)?;
    Ok((op, ty, count as usize))
}

/// Bytes of `count` elements. Refuses 0 and too many.
pub(super) fn checked_len(ty: Datatype, count: u64) -> Result<usize> {
    if count == 0 {
        return Err(Error::Invalid("no element"));
    }
    if count > atomic::count_max(ty) as u64 {
        return Err(Error::MsgTooLong);
    }
    Ok(count as usize * ty.size())
}

/// Checks the memory of an atomic call with `len` bytes of elements: the lengths of operands,
/// compare values and result, and that the result overlaps neither of the others.
#[inline(always)]
fn check_memory(
    kind: AtomicKind,
    op: AtomicOp,
    len: usize,
    [operand, compare, result]: [usize; 3],
    operand_meets: impl FnOnce() -> bool,
    compare_meets: impl FnOnce() -> bool,
) -> Result<()> {
    let (reads, fetch) = (op == AtomicOp::Read, kind != AtomicKind::Base);
    let compares = kind == AtomicKind::Compare;
    let all =
        (reads || operand == len) && (!compares || compare == len) && (!fetch || result == len);
    if !all {
        return Err(LENGTHS);
    }
    if fetch && (!reads && operand_meets() || compares && compare_meets()) {
        return Err(Error::Invalid("result overlaps operands or compare values"));
    }
    Ok(())
}

/// Bytes of operands and compare values that elements of `len` bytes send.
#[inline(always)]
pub(super) fn sent_len(kind: AtomicKind, op: AtomicOp, len: usize) -> usize {
    match (op, kind) {
        (AtomicOp::Read, _) => 0,
        (_, AtomicKind::Compare) => 2 * len,
        _ => len,
    }
}

/// Checks the length of an operation against its remote ranges.
fn check_len(len: u64, rma: &RmaList) -> Result<()> {
    if len > Node::MAX_MSG_SIZE {
        return Err(Error::MsgTooLong);
    }
    if len > 0 && rma.total() != Some(len) {
        return Err(Error::Invalid("local and remote lengths differ"));
    }
    Ok(())
}

fn wr_flags(f: OpFlags, selective: bool) -> WrFlags {
    let mut flags = WrFlags::RMA;
    flags.set(WrFlags::IMM, f.contains(OpFlags::REMOTE_CQ_DATA));
    flags.set(WrFlags::INJECTED, f.contains(OpFlags::INJECT));
    flags.set(WrFlags::FENCE, f.contains(OpFlags::FENCE));
    flags.set(WrFlags::MORE, f.contains(OpFlags::MORE));
    flags.set(WrFlags::CQE, !selective || f.contains(OpFlags::COMPLETION));
    flags
}

/// Checks whether an atomic operation exists. Returns the maximum elements of one call.
///
/// # Errors
/// [`Error::OpNotSupp`].
pub fn atomic_valid(kind: AtomicKind, op: u32, ty: u32) -> Result<usize> {
    let (_, ty) = valid_pair(kind, op, ty)?;
    Ok(atomic::count_max(ty))
}
