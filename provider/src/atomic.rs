//! The calls of fi_atomic(3). The promises are those of [`crate::msg`].

use std::ffi::c_int;

use barewire::flags::{OpFlags, op_flags};
use barewire::raw::{IoVec, RawAtomic, RawEndpoint};
use barewire::{AtomicKind, Datatype, Error, Remote, Result, RmaIov as OurIov, TypedOp};

use crate::abi::*;
use crate::ep::{EpObject, entries, number};
use crate::guard::int;
use crate::msg::given;
use crate::rma::Ranges;

/// The table.
pub(crate) static OPS: OpsAtomic = OpsAtomic {
    write,
    writev,
    writemsg,
    inject,
    readwrite,
    readwritev,
    readwritemsg,
    compwrite,
    compwritev,
    compwritemsg,
    writevalid,
    readwritevalid,
    compwritevalid,
    ..OpsAtomic::STUB
};

/// Pieces of local memory: those of C count elements, ours count bytes.
struct Pieces {
    all: [IoVec; LIMIT],
    count: usize,
}

const LIMIT: usize = barewire::rma::RMA_IOV_LIMIT;

impl Pieces {
    fn as_slice(&self) -> &[IoVec] {
        &self.all[..self.count]
    }

    /// `count` elements at `at`; no piece at all for an atomic read, which has no operand.
    fn one(at: P, count: usize, op: TypedOp) -> Self {
        let mut all = [IoVec::EMPTY; LIMIT];
        all[0] = IoVec { base: at.cast(), len: bytes(count, op) };
        Self { all, count: 1 }
    }

    /// # Safety
    /// `count` pieces are at `at`.
    unsafe fn list((at, count): (*const Ioc, usize), op: TypedOp) -> Result<Self> {
        let mut all = [IoVec::EMPTY; LIMIT];
        let Some(to) = all.get_mut(..count) else {
            return Err(Error::Invalid("iov_count: above 8"));
        };
        if at.is_null() && count > 0 {
            return Err(Error::Invalid("iov: NULL"));
        }
        for (i, slot) in to.iter_mut().enumerate() {
            // SAFETY: `i` is below `count`.
            let piece = unsafe { *at.add(i) };
            *slot = IoVec { base: piece.addr.cast(), len: bytes(piece.count, op) };
        }
        Ok(Self { all, count })
    }
}

/// Bytes of so many elements. A datatype that does not exist is refused below, and a number of
/// elements that cannot be is above every limit.
fn bytes(count: usize, op: TypedOp) -> usize {
    Datatype::try_from(op.datatype).map_or(count, |ty| count.saturating_mul(ty.size()))
}

/// Elements in a list.
fn elements(iov: &[IoVec], op: TypedOp) -> u64 {
    let len = iov.iter().map(|piece| piece.len).fold(0, usize::saturating_add);
    Datatype::try_from(op.datatype).map_or(0, |ty| len / ty.size()) as u64
}

const NONE: Pieces = Pieces { all: [IoVec::EMPTY; LIMIT], count: 0 };

/// The operand of a fetch: an atomic read ignores what stands there.
fn operand(buf: P, count: usize, op: TypedOp) -> Pieces {
    if buf.is_null() { NONE } else { Pieces::one(buf, count, op) }
}

/// What a call on one remote range says besides its lists.
struct Call<'a> {
    ep: &'a RawEndpoint,
    op: TypedOp,
    to: Remote,
    context: P,
}

impl Call<'_> {
    /// # Safety
    /// The memory is lent as fi_atomic(3) says.
    unsafe fn post(
        &self,
        kind: AtomicKind,
        operands: &Pieces,
        compares: &Pieces,
        results: &Pieces,
    ) -> Result<()> {
        let lists = [operands, compares, results].map(Pieces::as_slice);
        let [operands, compares, results] = lists;
        let Self { op, to: Remote { dest, addr, key }, context, .. } = *self;
        let len = elements(if kind == AtomicKind::Base { operands } else { results }, op);
        let (rma_iov, context) = (&[OurIov { addr, len, key }], number(context));
        let data = 0;
        let call =
            RawAtomic { kind, op, operands, compares, results, dest, rma_iov, data, context };
        // SAFETY: the caller's promise is that of the raw API.
        unsafe { self.ep.atomic(call) }
    }
}

/// Entries for calls on one remote range, which end in the same arguments.
macro_rules! on_one_range {
    ($($name:ident($($arg:ident: $ty:ty),*) |$call:ident| $post:expr;)*) => {
        entries! {$(
            $name(
                $($arg: $ty,)*
                dest: u64, addr: u64, key: u64, datatype: u32, op: u32, context: P
            ) |ep| {
                let (op, to) = (TypedOp { op, datatype }, Remote { dest, addr, key });
                let $call = Call { ep, op, to, context };
                $post
            };
        )*}
    };
}

on_one_range! {
    write(buf: P, n: usize, _desc: P)
        |c| c.post(AtomicKind::Base, &Pieces::one(buf, n, c.op), &NONE, &NONE);
    writev(iov: *const Ioc, _desc: *mut P, n: usize)
        |c| c.post(AtomicKind::Base, &Pieces::list((iov, n), c.op)?, &NONE, &NONE);
    readwrite(buf: P, n: usize, _desc: P, result: P, _result_desc: P) |c| {
        let result = &Pieces::one(result, n, c.op);
        c.post(AtomicKind::Fetch, &operand(buf, n, c.op), &NONE, result)
    };
    readwritev(
        iov: *const Ioc, _desc: *mut P, n: usize,
        resultv: *const Ioc, _result_desc: *mut P, result_n: usize
    ) |c| {
        let operand = &Pieces::list((iov, n), c.op)?;
        c.post(AtomicKind::Fetch, operand, &NONE, &Pieces::list((resultv, result_n), c.op)?)
    };
    compwrite(
        buf: P, n: usize, _desc: P,
        compare: P, _compare_desc: P, result: P, _result_desc: P
    ) |c| {
        let [operand, compare, result] =
            &[buf, compare, result].map(|at| Pieces::one(at, n, c.op));
        c.post(AtomicKind::Compare, operand, compare, result)
    };
    compwritev(
        iov: *const Ioc, _desc: *mut P, n: usize,
        comparev: *const Ioc, _compare_desc: *mut P, compare_n: usize,
        resultv: *const Ioc, _result_desc: *mut P, result_n: usize
    ) |c| {
        let operand = &Pieces::list((iov, n), c.op)?;
        let compare = &Pieces::list((comparev, compare_n), c.op)?;
        c.post(AtomicKind::Compare, operand, compare, &Pieces::list((resultv, result_n), c.op)?)
    };
}

/// No list.
pub(crate) const EMPTY: (*const Ioc, usize) = (std::ptr::null(), 0);

/// A message and its flags, handed to `post`.
///
/// # Safety
/// The message is whole, or NULL; the lists have as many pieces as they say.
pub(crate) unsafe fn on_msg(
    kind: AtomicKind,
    msg: *const MsgAtomic,
    (compares, results): ((*const Ioc, usize), (*const Ioc, usize)),
    flags: u64,
    post: impl FnOnce(RawAtomic<'_>, OpFlags) -> Result<()>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let m = given(msg)?;
        let op = TypedOp { op: m.op, datatype: m.datatype };
        let (compares, results) = (Pieces::list(compares, op)?, Pieces::list(results, op)?);
        let operands = Pieces::list((m.msg_iov, m.iov_count), op)?;
        if m.rma_iov.is_null() && m.rma_iov_count > 0 {
            return Err(Error::Invalid("rma_iov: NULL"));
        }
        let ranges = Ranges::copy(m.rma_iov_count, |i| {
            let range = *m.rma_iov.add(i);
            (range.addr, range.count as u64, range.key)
        })?;
        let call = RawAtomic {
            kind,
            op,
            operands: operands.as_slice(),
            compares: compares.as_slice(),
            results: results.as_slice(),
            dest: m.addr,
            rma_iov: ranges.as_slice(),
            data: m.data,
            context: number(m.context),
        };
        post(call, op_flags(flags)?)
    }
}

entries! {
    writemsg(msg: *const MsgAtomic, flags: u64)
        |ep| on_msg(AtomicKind::Base, msg, (EMPTY, EMPTY), flags, |c, f| ep.atomicmsg(c, f));
    readwritemsg(
        msg: *const MsgAtomic, resultv: *const Ioc, _result_desc: *mut P, n: usize, flags: u64
    ) |ep| {
        let lists = (EMPTY, (resultv, n));
        on_msg(AtomicKind::Fetch, msg, lists, flags, |c, f| ep.atomicmsg(c, f))
    };
    compwritemsg(
        msg: *const MsgAtomic, comparev: *const Ioc, _compare_desc: *mut P, compare_n: usize,
        resultv: *const Ioc, _result_desc: *mut P, n: usize, flags: u64
    ) |ep| {
        let lists = ((comparev, compare_n), (resultv, n));
        on_msg(AtomicKind::Compare, msg, lists, flags, |c, f| ep.atomicmsg(c, f))
    };
    inject(
        buf: P, n: usize, dest: u64, addr: u64, key: u64, datatype: u32, op: u32
    ) |ep| {
        let op = TypedOp { op, datatype };
        let operand = IoVec { base: buf.cast(), len: bytes(n, op) };
        ep.inject_atomic(op, operand, Remote { dest, addr, key })
    };
}

/// Whether an operation exists, and for how many elements.
macro_rules! valid {
    ($($name:ident $ask:ident;)*) => {$(
        unsafe extern "C" fn $name(at: *mut FidEp, ty: u32, op: u32, count: *mut usize) -> c_int {
            int(|| {
                // SAFETY: the table belongs to endpoints.
                let found = unsafe { EpObject::of(at)?.ep.$ask(TypedOp { op, datatype: ty })? };
                // SAFETY: `count` can be written or is NULL.
                if let Some(count) = unsafe { count.as_mut() } {
                    *count = found;
                }
                Ok(())
            })
        }
    )*};
}

valid! {
    writevalid atomicvalid;
    readwritevalid fetch_atomicvalid;
    compwritevalid compare_atomicvalid;
}
