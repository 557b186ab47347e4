//! The calls of fi_atomic(3). What the promises are is told in [`crate::msg`].

use std::ffi::{c_int, c_void};

use barewire::flags::op_flags;
use barewire::raw::{IoVec, RawAtomic};
use barewire::{AtomicKind, Datatype, Error, Remote, Result, RmaIov as OurIov, What};

use crate::abi::*;
use crate::ep::{EpObject, number};
use crate::guard::{call, int};
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
    fn one(at: *mut c_void, count: usize, what: What) -> Self {
        let mut all = [IoVec::EMPTY; LIMIT];
        all[0] = IoVec { base: at.cast(), len: bytes(count, what) };
        Self { all, count: 1 }
    }

    /// # Safety
    /// `count` pieces are at `at`.
    unsafe fn list(at: *const Ioc, count: usize, what: What) -> Result<Self> {
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
            *slot = IoVec { base: piece.addr.cast(), len: bytes(piece.count, what) };
        }
        Ok(Self { all, count })
    }
}

/// Bytes of so many elements. A datatype that does not exist is refused below, and a number of
/// elements that cannot be is above every limit.
fn bytes(count: usize, what: What) -> usize {
    Datatype::try_from(what.datatype).map_or(count, |ty| count.saturating_mul(ty.size()))
}

/// Elements in a list.
fn elements(iov: &[IoVec], what: What) -> u64 {
    let len = iov.iter().map(|piece| piece.len).fold(0, usize::saturating_add);
    Datatype::try_from(what.datatype).map_or(0, |ty| len / ty.size()) as u64
}

/// A call on one remote range.
struct Call<'a> {
    kind: AtomicKind,
    what: What,
    operands: &'a Pieces,
    compares: &'a Pieces,
    results: &'a Pieces,
    to: Remote,
    count: u64,
    context: *mut c_void,
}

const NONE: Pieces = Pieces { all: [IoVec::EMPTY; LIMIT], count: 0 };

/// # Safety
/// `at` is an endpoint; the memory is lent as fi_atomic(3) says.
unsafe fn post(at: *mut FidEp, c: Call<'_>) -> Result<()> {
    let ranges = [OurIov { addr: c.to.addr, len: c.count, key: c.to.key }];
    let call = RawAtomic {
        kind: c.kind,
        what: c.what,
        operands: c.operands.as_slice(),
        compares: c.compares.as_slice(),
        results: c.results.as_slice(),
        dest: c.to.dest,
        rma_iov: &ranges,
        data: 0,
        context: number(c.context),
    };
    // SAFETY: the caller's promise is that of the raw face.
    unsafe { EpObject::of(at)?.ep.atomic(call) }
}

/// # Safety
/// As [`post`], and the message is whole.
unsafe fn post_msg(
    at: *mut FidEp,
    kind: AtomicKind,
    msg: *const MsgAtomic,
    (compares, results): (&Pieces, &Pieces),
    flags: u64,
) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let m = given(msg)?;
        let what = What { op: m.op, datatype: m.datatype };
        let operands = Pieces::list(m.msg_iov, m.iov_count, what)?;
        if m.rma_iov.is_null() && m.rma_iov_count > 0 {
            return Err(Error::Invalid("rma_iov: NULL"));
        }
        let ranges = Ranges::copy(m.rma_iov_count, |i| {
            let range = *m.rma_iov.add(i);
            (range.addr, range.count as u64, range.key)
        })?;
        let call = RawAtomic {
            kind,
            what,
            operands: operands.as_slice(),
            compares: compares.as_slice(),
            results: results.as_slice(),
            dest: m.addr,
            rma_iov: ranges.as_slice(),
            data: m.data,
            context: number(m.context),
        };
        EpObject::of(at)?.ep.atomicmsg(call, op_flags(flags)?)
    }
}

unsafe extern "C" fn write(
    at: *mut FidEp,
    buf: *mut c_void,
    count: usize,
    _desc: *mut c_void,
    dest: u64,
    addr: u64,
    key: u64,
    datatype: u32,
    op: u32,
    context: *mut c_void,
) -> isize {
    call(|| {
        let (what, to) = (What { op, datatype }, Remote { dest, addr, key });
        let (operands, count) = (&Pieces::one(buf, count, what), count as u64);
        let (kind, compares, results) = (AtomicKind::Base, &NONE, &NONE);
        // SAFETY: the table belongs to endpoints; the memory is lent as fi_atomic(3) says.
        unsafe { post(at, Call { kind, what, operands, compares, results, to, count, context }) }
    })
}

unsafe extern "C" fn writev(
    at: *mut FidEp,
    iov: *const Ioc,
    _desc: *mut *mut c_void,
    iov_count: usize,
    dest: u64,
    addr: u64,
    key: u64,
    datatype: u32,
    op: u32,
    context: *mut c_void,
) -> isize {
    call(|| {
        let (what, to) = (What { op, datatype }, Remote { dest, addr, key });
        let (kind, compares, results) = (AtomicKind::Base, &NONE, &NONE);
        // SAFETY: as in `write`.
        unsafe {
            let operands = &Pieces::list(iov, iov_count, what)?;
            let count = elements(operands.as_slice(), what);
            post(at, Call { kind, what, operands, compares, results, to, count, context })
        }
    })
}

unsafe extern "C" fn writemsg(at: *mut FidEp, msg: *const MsgAtomic, flags: u64) -> isize {
    // SAFETY: as in `write`.
    call(|| unsafe { post_msg(at, AtomicKind::Base, msg, (&NONE, &NONE), flags) })
}

unsafe extern "C" fn inject(
    at: *mut FidEp,
    buf: *mut c_void,
    count: usize,
    dest: u64,
    addr: u64,
    key: u64,
    datatype: u32,
    op: u32,
) -> isize {
    call(|| {
        let (what, to) = (What { op, datatype }, Remote { dest, addr, key });
        let operand = IoVec { base: buf.cast(), len: bytes(count, what) };
        // SAFETY: the table belongs to endpoints, and the memory is readable during the call.
        unsafe { EpObject::of(at)?.ep.inject_atomic(what, operand, to) }
    })
}

/// The operand of a fetch: an atomic read ignores what stands there.
fn operand(buf: *mut c_void, count: usize, what: What) -> Pieces {
    if buf.is_null() { NONE } else { Pieces::one(buf, count, what) }
}

unsafe extern "C" fn readwrite(
    at: *mut FidEp,
    buf: *mut c_void,
    count: usize,
    _desc: *mut c_void,
    result: *mut c_void,
    _result_desc: *mut c_void,
    dest: u64,
    addr: u64,
    key: u64,
    datatype: u32,
    op: u32,
    context: *mut c_void,
) -> isize {
    call(|| {
        let (what, to) = (What { op, datatype }, Remote { dest, addr, key });
        let (operands, compares) = (&operand(buf, count, what), &NONE);
        let (results, count) = (&Pieces::one(result, count, what), count as u64);
        let kind = AtomicKind::Fetch;
        // SAFETY: as in `write`.
        unsafe { post(at, Call { kind, what, operands, compares, results, to, count, context }) }
    })
}

unsafe extern "C" fn readwritev(
    at: *mut FidEp,
    iov: *const Ioc,
    _desc: *mut *mut c_void,
    iov_count: usize,
    resultv: *const Ioc,
    _result_desc: *mut *mut c_void,
    result_count: usize,
    dest: u64,
    addr: u64,
    key: u64,
    datatype: u32,
    op: u32,
    context: *mut c_void,
) -> isize {
    call(|| {
        let (what, to) = (What { op, datatype }, Remote { dest, addr, key });
        let (kind, compares) = (AtomicKind::Fetch, &NONE);
        // SAFETY: as in `write`.
        unsafe {
            let operands = &Pieces::list(iov, iov_count, what)?;
            let results = &Pieces::list(resultv, result_count, what)?;
            let count = elements(results.as_slice(), what);
            post(at, Call { kind, what, operands, compares, results, to, count, context })
        }
    })
}

unsafe extern "C" fn readwritemsg(
    at: *mut FidEp,
    msg: *const MsgAtomic,
    resultv: *const Ioc,
    _result_desc: *mut *mut c_void,
    result_count: usize,
    flags: u64,
) -> isize {
    call(|| {
        // SAFETY: as in `write`.
        unsafe {
            let m = given(msg)?;
            let what = What { op: m.op, datatype: m.datatype };
            let results = Pieces::list(resultv, result_count, what)?;
            post_msg(at, AtomicKind::Fetch, msg, (&NONE, &results), flags)
        }
    })
}

unsafe extern "C" fn compwrite(
    at: *mut FidEp,
    buf: *mut c_void,
    count: usize,
    _desc: *mut c_void,
    compare: *mut c_void,
    _compare_desc: *mut c_void,
    result: *mut c_void,
    _result_desc: *mut c_void,
    dest: u64,
    addr: u64,
    key: u64,
    datatype: u32,
    op: u32,
    context: *mut c_void,
) -> isize {
    call(|| {
        let (what, to) = (What { op, datatype }, Remote { dest, addr, key });
        let (operands, compares) =
            (&Pieces::one(buf, count, what), &Pieces::one(compare, count, what));
        let (results, count) = (&Pieces::one(result, count, what), count as u64);
        let kind = AtomicKind::Compare;
        // SAFETY: as in `write`.
        unsafe { post(at, Call { kind, what, operands, compares, results, to, count, context }) }
    })
}

unsafe extern "C" fn compwritev(
    at: *mut FidEp,
    iov: *const Ioc,
    _desc: *mut *mut c_void,
    iov_count: usize,
    comparev: *const Ioc,
    _compare_desc: *mut *mut c_void,
    compare_count: usize,
    resultv: *const Ioc,
    _result_desc: *mut *mut c_void,
    result_count: usize,
    dest: u64,
    addr: u64,
    key: u64,
    datatype: u32,
    op: u32,
    context: *mut c_void,
) -> isize {
    call(|| {
        let (what, to) = (What { op, datatype }, Remote { dest, addr, key });
        let kind = AtomicKind::Compare;
        // SAFETY: as in `write`.
        unsafe {
            let operands = &Pieces::list(iov, iov_count, what)?;
            let compares = &Pieces::list(comparev, compare_count, what)?;
            let results = &Pieces::list(resultv, result_count, what)?;
            let count = elements(results.as_slice(), what);
            post(at, Call { kind, what, operands, compares, results, to, count, context })
        }
    })
}

unsafe extern "C" fn compwritemsg(
    at: *mut FidEp,
    msg: *const MsgAtomic,
    comparev: *const Ioc,
    _compare_desc: *mut *mut c_void,
    compare_count: usize,
    resultv: *const Ioc,
    _result_desc: *mut *mut c_void,
    result_count: usize,
    flags: u64,
) -> isize {
    call(|| {
        // SAFETY: as in `write`.
        unsafe {
            let m = given(msg)?;
            let what = What { op: m.op, datatype: m.datatype };
            let compares = Pieces::list(comparev, compare_count, what)?;
            let results = Pieces::list(resultv, result_count, what)?;
            post_msg(at, AtomicKind::Compare, msg, (&compares, &results), flags)
        }
    })
}

/// # Safety
/// `count` can be written or is NULL.
unsafe fn put_count(count: *mut usize, value: usize) -> Result<()> {
    // SAFETY: the caller's promise.
    if let Some(count) = unsafe { count.as_mut() } {
        *count = value;
    }
    Ok(())
}

unsafe extern "C" fn writevalid(
    at: *mut FidEp,
    datatype: u32,
    op: u32,
    count: *mut usize,
) -> c_int {
    // SAFETY: the table belongs to endpoints, and `count` can be written or is NULL.
    int(|| unsafe { put_count(count, EpObject::of(at)?.ep.atomicvalid(What { op, datatype })?) })
}

unsafe extern "C" fn readwritevalid(
    at: *mut FidEp,
    datatype: u32,
    op: u32,
    count: *mut usize,
) -> c_int {
    int(|| {
        // SAFETY: as above.
        unsafe { put_count(count, EpObject::of(at)?.ep.fetch_atomicvalid(What { op, datatype })?) }
    })
}

unsafe extern "C" fn compwritevalid(
    at: *mut FidEp,
    datatype: u32,
    op: u32,
    count: *mut usize,
) -> c_int {
    int(|| {
        // SAFETY: as above.
        unsafe {
            put_count(count, EpObject::of(at)?.ep.compare_atomicvalid(What { op, datatype })?)
        }
    })
}
