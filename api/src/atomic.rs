//! Remote atomics: the fourteen calls of fi_atomic(3), safe API; the raw one is in
//! [`crate::raw`].
//!
//! All calls return at once. [`crate::msg`] lists the errors of a refused call; in addition:
//! - [`Error::OpNotSupp`]: the operation has no meaning on the datatype, or not in this family of
//!   calls (`docs/atomics.md` has the table); or the endpoint has no `FI_ATOMIC`, or not `FI_WRITE`
//!   (base calls) or `FI_READ` (the others);
//! - [`Error::MsgTooLong`]: more elements than `atomicvalid` and the other valid calls allow;
//! - [`Error::Invalid`]: no element, lists of different lengths, or a result that overlaps its
//!   operands.
//!
//! Operands and compare values are copied before a call returns, so the calls borrow them. Result
//! buffers are lent until the completion gives them back. Base calls complete when the target has
//! executed them, the others when the old values are in the result buffers.

use barewire_dataplane::node::{AtomicReq, RmaIov, RmaList, atomic_valid};
use barewire_dataplane::types::{FI_ADDR_UNSPEC, FiAddr};
use barewire_driver::mem::IoBuf;

pub use barewire_dataplane::proto::atomic::{AtomicKind, AtomicOp, Datatype};

use crate::buf::{Buf, Bufs, PostError, PostResult, with_borrowed_pair};
use crate::domain::Domain;
use crate::ep::{Endpoint, EpCommon};
use crate::errno::{Error, Result};
use crate::flags::{FI_TAGGED, OpFlags};
use crate::rma::{Remote, list};

/// `FI_FETCH_ATOMIC`, a flag of [`Domain::query_atomic`].
pub const FI_FETCH_ATOMIC: u64 = 1 << 58;

/// `FI_COMPARE_ATOMIC`, a flag of [`Domain::query_atomic`].
pub const FI_COMPARE_ATOMIC: u64 = 1 << 59;

/// An atomic operation and the datatype of its elements, by libfabric's numbers. The calls check
/// both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TypedOp {
    /// `enum fi_op`.
    pub op: u32,
    /// `enum fi_datatype`.
    pub datatype: u32,
}

impl TypedOp {
    /// `op` on elements of `datatype`.
    pub const fn new(op: AtomicOp, datatype: Datatype) -> Self {
        Self { op: op as u32, datatype: datatype as u32 }
    }
}

/// The argument of the `msg` calls (`struct fi_msg_atomic`).
#[derive(Debug)]
pub struct AtomicMsg<'a> {
    /// Operands, a gather list.
    pub operands: &'a [&'a [u8]],
    /// The peer whose memory is accessed.
    pub addr: FiAddr,
    /// Ranges of remote memory; `len` counts elements. With [`OpFlags::TAGGED`] `key` is a tag.
    pub rma_iov: Vec<RmaIov>,
    /// Operation and datatype.
    pub op: TypedOp,
    /// Comes back in the completion.
    pub context: u64,
    /// Remote CQ data, used with [`OpFlags::REMOTE_CQ_DATA`].
    pub data: u64,
}

impl Default for AtomicMsg<'_> {
    fn default() -> Self {
        let op = TypedOp { op: 0, datatype: 0 };
        let (operands, rma_iov) = (&[][..], Vec::new());
        Self { operands, addr: FI_ADDR_UNSPEC, rma_iov, op, context: 0, data: 0 }
    }
}

/// `struct fi_atomic_attr`: the limits of an operation on a datatype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicAttr {
    /// Most elements of one call.
    pub count: usize,
    /// Bytes of an element.
    pub size: usize,
}

/// The arguments of an atomic call.
struct Call<'a> {
    kind: AtomicKind,
    op: TypedOp,
    operands: &'a [&'a [u8]],
    compares: &'a [&'a [u8]],
    results: Bufs,
    dest: FiAddr,
    rma: Result<RmaList>,
    data: u64,
    context: u64,
    flags: OpFlags,
}

/// Elements of the datatype of `op` in `len` bytes. 0 if the datatype does not exist: the node then
/// refuses the call.
pub(crate) fn elements(op: TypedOp, len: usize) -> usize {
    Datatype::try_from(op.datatype).map_or(0, |ty| len / ty.size())
}

fn len_of(pieces: &[&[u8]]) -> usize {
    pieces.iter().map(|p| p.len()).sum()
}

impl Endpoint {
    fn post_atomic(&self, call: Call<'_>) -> PostResult {
        let Call { kind, op, operands, compares, results, dest, rma, data, context, flags } = call;
        let rma = match rma {
            Ok(rma) => rma,
            Err(error) => return Err(PostError { error, bufs: results }),
        };
        self.post_one_sided(results, context, flags, |engine, result, context, flags| {
            let (op, ty, no_completion) = (op.op, op.datatype, false);
            with_borrowed_pair(operands, compares, |operand, compare| {
                let req = AtomicReq {
                    kind,
                    op,
                    ty,
                    operand,
                    compare,
                    result,
                    dest,
                    rma,
                    data,
                    context,
                    flags,
                    no_completion,
                };
                engine.post_atomic(self.id, req)
            })?
        })
    }

    /// Applies `op` to `operand.len()` bytes of remote memory.
    ///
    /// # Errors
    /// See the [module](self).
    ///
    /// Source: fi_atomic(3), "fi_atomic".
    #[doc(alias = "fi_atomic")]
    pub fn atomic(&self, op: TypedOp, operand: &[u8], to: Remote, context: u64) -> PostResult {
        self.atomicv(op, &[operand], to, context)
    }

    /// As [`atomic`](Self::atomic), with operands from at most 8 pieces.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_atomicv")]
    pub fn atomicv(&self, op: TypedOp, operands: &[&[u8]], to: Remote, context: u64) -> PostResult {
        self.post_atomic(Call {
            kind: AtomicKind::Base,
            op,
            operands,
            compares: &[],
            results: Bufs::None,
            dest: to.dest,
            rma: Ok(to.range(elements(op, len_of(operands)))),
            data: 0,
            context,
            flags: self.rma_op_flags(),
        })
    }

    /// As [`atomicv`](Self::atomicv), on a list of remote ranges, with flags in place of the
    /// endpoint's.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_atomicmsg")]
    pub fn atomicmsg(&self, msg: AtomicMsg<'_>, flags: OpFlags) -> PostResult {
        self.post_atomic(from_msg(AtomicKind::Base, msg, &[], Bufs::None, flags))
    }

    /// As [`atomic`](Self::atomic), of at most `inject_size` bytes; success writes no completion.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_inject_atomic")]
    pub fn inject_atomic(&self, op: TypedOp, operand: &[u8], to: Remote) -> Result<()> {
        let rma = to.range(elements(op, operand.len()));
        with_borrowed_pair(&[operand], &[], |operand, _| {
            inject(self, op, operand, (to.dest, rma), 0)
        })?
    }

    /// Applies `op` to elements of remote memory and returns their old values in `result`. The
    /// length of `result` gives the number of elements. An atomic read has no operand.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_fetch_atomic")]
    pub fn fetch_atomic(
        &self,
        op: TypedOp,
        operand: &[u8],
        result: impl Into<Bufs>,
        to: Remote,
        context: u64,
    ) -> PostResult {
        let operands = [operand];
        self.fetch(op, if operand.is_empty() { &[] } else { &operands }, result, to, context)
    }

    /// As [`fetch_atomic`](Self::fetch_atomic), with at most 8 pieces on each side.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_fetch_atomicv")]
    pub fn fetch_atomicv(
        &self,
        op: TypedOp,
        operands: &[&[u8]],
        results: Vec<Buf>,
        to: Remote,
        context: u64,
    ) -> PostResult {
        self.fetch(op, operands, results, to, context)
    }

    fn fetch(
        &self,
        op: TypedOp,
        operands: &[&[u8]],
        result: impl Into<Bufs>,
        to: Remote,
        context: u64,
    ) -> PostResult {
        let results = result.into();
        let rma = Ok(to.range(elements(op, results.len())));
        self.post_atomic(Call {
            kind: AtomicKind::Fetch,
            op,
            operands,
            compares: &[],
            results,
            dest: to.dest,
            rma,
            data: 0,
            context,
            flags: self.rma_op_flags(),
        })
    }

    /// As [`fetch_atomicv`](Self::fetch_atomicv), on a list of remote ranges, with flags in place
    /// of the endpoint's.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_fetch_atomicmsg")]
    pub fn fetch_atomicmsg(
        &self,
        msg: AtomicMsg<'_>,
        results: impl Into<Bufs>,
        flags: OpFlags,
    ) -> PostResult {
        self.post_atomic(from_msg(AtomicKind::Fetch, msg, &[], results.into(), flags))
    }

    /// Changes the elements of remote memory that compare with `compare` as the operation demands,
    /// and returns the old values of all elements.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_compare_atomic")]
    pub fn compare_atomic(
        &self,
        op: TypedOp,
        operand: &[u8],
        compare: &[u8],
        result: impl Into<Bufs>,
        to: Remote,
        context: u64,
    ) -> PostResult {
        self.compare(op, &[operand], &[compare], result.into(), to, context)
    }

    /// As [`compare_atomic`](Self::compare_atomic), with at most 8 pieces of each.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_compare_atomicv")]
    pub fn compare_atomicv(
        &self,
        op: TypedOp,
        operands: &[&[u8]],
        compares: &[&[u8]],
        results: Vec<Buf>,
        to: Remote,
        context: u64,
    ) -> PostResult {
        self.compare(op, operands, compares, results.into(), to, context)
    }

    fn compare(
        &self,
        op: TypedOp,
        operands: &[&[u8]],
        compares: &[&[u8]],
        results: Bufs,
        to: Remote,
        context: u64,
    ) -> PostResult {
        let rma = Ok(to.range(elements(op, results.len())));
        self.post_atomic(Call {
            kind: AtomicKind::Compare,
            op,
            operands,
            compares,
            results,
            dest: to.dest,
            rma,
            data: 0,
            context,
            flags: self.rma_op_flags(),
        })
    }

    /// As [`compare_atomicv`](Self::compare_atomicv), on a list of remote ranges, with flags in
    /// place of the endpoint's.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_compare_atomicmsg")]
    pub fn compare_atomicmsg(
        &self,
        msg: AtomicMsg<'_>,
        compares: &[&[u8]],
        results: impl Into<Bufs>,
        flags: OpFlags,
    ) -> PostResult {
        self.post_atomic(from_msg(AtomicKind::Compare, msg, compares, results.into(), flags))
    }
}

fn from_msg<'a>(
    kind: AtomicKind,
    msg: AtomicMsg<'a>,
    compares: &'a [&'a [u8]],
    results: Bufs,
    flags: OpFlags,
) -> Call<'a> {
    let AtomicMsg { operands, addr: dest, rma_iov, op, context, data } = msg;
    let rma = list(&rma_iov);
    Call { kind, op, operands, compares, results, dest, rma, data, context, flags }
}

/// `fi_inject_atomic`. A failure is an error entry with `context`.
pub(crate) fn inject(
    ep: &EpCommon,
    op: TypedOp,
    operand: IoBuf,
    (dest, rma): (FiAddr, RmaList),
    context: u64,
) -> Result<()> {
    let req = AtomicReq {
        kind: AtomicKind::Base,
        op: op.op,
        ty: op.datatype,
        operand,
        compare: IoBuf::EMPTY,
        result: IoBuf::EMPTY,
        dest: ep.to(dest),
        rma,
        data: 0,
        context,
        flags: OpFlags::INJECT,
        no_completion: true,
    };
    let mut core = ep.dom.enter()?;
    let posted = core.engine.post_atomic(ep.id, req);
    core.posted(&ep.dom);
    posted
}

impl EpCommon {
    /// The largest number of elements of a base call with this operation and datatype.
    ///
    /// # Errors
    /// [`Error::OpNotSupp`].
    #[doc(alias = "fi_atomicvalid")]
    pub fn atomicvalid(&self, op: TypedOp) -> Result<usize> {
        atomic_valid(AtomicKind::Base, op.op, op.datatype)
    }

    /// The largest number of elements of a fetch call with this operation and datatype.
    ///
    /// # Errors
    /// [`Error::OpNotSupp`].
    #[doc(alias = "fi_fetch_atomicvalid")]
    pub fn fetch_atomicvalid(&self, op: TypedOp) -> Result<usize> {
        atomic_valid(AtomicKind::Fetch, op.op, op.datatype)
    }

    /// The largest number of elements of a compare call with this operation and datatype.
    ///
    /// # Errors
    /// [`Error::OpNotSupp`].
    #[doc(alias = "fi_compare_atomicvalid")]
    pub fn compare_atomicvalid(&self, op: TypedOp) -> Result<usize> {
        atomic_valid(AtomicKind::Compare, op.op, op.datatype)
    }
}

impl Domain {
    /// The limits of an operation in the base calls, or with [`FI_FETCH_ATOMIC`] or
    /// [`FI_COMPARE_ATOMIC`] in the fetch or compare calls. `FI_TAGGED` changes nothing.
    ///
    /// # Errors
    /// - [`Error::BadFlags`]: another flag, or both.
    /// - [`Error::OpNotSupp`]: there is no such operation.
    #[doc(alias = "fi_query_atomic")]
    pub fn query_atomic(&self, op: TypedOp, flags: u64) -> Result<AtomicAttr> {
        let kind = match flags & !FI_TAGGED {
            0 => AtomicKind::Base,
            FI_FETCH_ATOMIC => AtomicKind::Fetch,
            FI_COMPARE_ATOMIC => AtomicKind::Compare,
            _ => return Err(Error::BadFlags),
        };
        let count = atomic_valid(kind, op.op, op.datatype)?;
        let size = Datatype::try_from(op.datatype).map_or(0, Datatype::size);
        Ok(AtomicAttr { count, size })
    }
}
