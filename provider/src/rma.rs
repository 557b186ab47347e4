//! The nine calls of fi_rma(3). What the promises are is told in [`crate::msg`].

use std::ffi::c_void;

use barewire::flags::{OpFlags, op_flags};
use barewire::raw::{IoVec, RawRma};
use barewire::{Error, Remote, Result, RmaIov as OurIov};

use crate::abi::*;
use crate::ep::{EpObject, number};
use crate::guard::call;
use crate::msg::{given, list, one};

/// The table.
pub(crate) static OPS: OpsRma = OpsRma {
    read,
    readv,
    readmsg,
    write,
    writev,
    writemsg,
    inject,
    writedata,
    injectdata,
    ..OpsRma::STUB
};

/// Ranges of remote memory, copied.
pub(crate) struct Ranges {
    all: [OurIov; barewire::rma::RMA_IOV_LIMIT],
    count: usize,
}

impl Ranges {
    /// `count` ranges, of which `nth` gives address, length and key.
    pub(crate) fn copy(count: usize, nth: impl Fn(usize) -> (u64, u64, u64)) -> Result<Self> {
        let mut all = [OurIov { addr: 0, len: 0, key: 0 }; barewire::rma::RMA_IOV_LIMIT];
        let Some(to) = all.get_mut(..count) else {
            return Err(Error::Invalid("rma_iov_count: above 8"));
        };
        for (i, slot) in to.iter_mut().enumerate() {
            let (addr, len, key) = nth(i);
            *slot = OurIov { addr, len, key };
        }
        Ok(Self { all, count })
    }

    pub(crate) fn as_slice(&self) -> &[OurIov] {
        &self.all[..self.count]
    }
}

/// # Safety
/// `count` ranges are at `at`.
unsafe fn ranges(at: *const RmaIov, count: usize) -> Result<Ranges> {
    if at.is_null() && count > 0 {
        return Err(Error::Invalid("rma_iov: NULL"));
    }
    Ranges::copy(count, |i| {
        // SAFETY: `i` is below `count`.
        let range = unsafe { *at.add(i) };
        (range.addr, range.len as u64, range.key)
    })
}

fn len_of(iov: &[IoVec]) -> u64 {
    iov.iter().map(|piece| piece.len as u64).fold(0, u64::wrapping_add)
}

/// One remote range for a list of local pieces.
fn whole(iov: &[IoVec], addr: u64, key: u64) -> [OurIov; 1] {
    [OurIov { addr, len: len_of(iov), key }]
}

unsafe extern "C" fn read(
    at: *mut FidEp,
    buf: *mut c_void,
    len: usize,
    _desc: *mut c_void,
    dest: u64,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    call(|| {
        let (iov, context) = (&one(buf, len), number(context));
        let rma_iov = &whole(iov, addr, key);
        // SAFETY: the table belongs to endpoints; the memory is lent as fi_rma(3) says, which is
        // the promise of the raw face.
        unsafe { EpObject::of(at)?.ep.read(RawRma { iov, dest, rma_iov, data: 0, context }) }
    })
}

unsafe extern "C" fn readv(
    at: *mut FidEp,
    iov: *const Iovec,
    _desc: *mut *mut c_void,
    count: usize,
    dest: u64,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    call(|| {
        let context = number(context);
        // SAFETY: as in `read`.
        unsafe {
            let iov = list(iov, count)?;
            let rma_iov = &whole(few(iov)?, addr, key);
            EpObject::of(at)?.ep.read(RawRma { iov, dest, rma_iov, data: 0, context })
        }
    })
}

/// A list that is short enough to be looked at: beyond the limit that was told, nothing says that
/// its pieces are there.
fn few(iov: &[IoVec]) -> Result<&[IoVec]> {
    if iov.len() > barewire::rma::RMA_IOV_LIMIT {
        return Err(Error::Invalid("iov_count: above 8"));
    }
    Ok(iov)
}

unsafe extern "C" fn readmsg(at: *mut FidEp, msg: *const MsgRma, flags: u64) -> isize {
    call(|| {
        // SAFETY: as in `read`.
        unsafe {
            let (m, flags) = (given(msg)?, op_flags(flags)?);
            let (iov, context) = (list(m.msg_iov, m.iov_count)?, number(m.context));
            let ranges = ranges(m.rma_iov, m.rma_iov_count)?;
            let (dest, rma_iov) = (m.addr, ranges.as_slice());
            let read = RawRma { iov, dest, rma_iov, data: m.data, context };
            EpObject::of(at)?.ep.readmsg(read, flags)
        }
    })
}

unsafe extern "C" fn write(
    at: *mut FidEp,
    buf: *mut c_void,
    len: usize,
    _desc: *mut c_void,
    dest: u64,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    call(|| {
        let (iov, context) = (&one(buf, len), number(context));
        let rma_iov = &whole(iov, addr, key);
        let write = RawRma { iov, dest, rma_iov, data: 0, context };
        // SAFETY: as in `read`.
        unsafe { EpObject::of(at)?.ep.write(write, OpFlags::empty()) }
    })
}

unsafe extern "C" fn writev(
    at: *mut FidEp,
    iov: *const Iovec,
    _desc: *mut *mut c_void,
    count: usize,
    dest: u64,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    call(|| {
        let context = number(context);
        // SAFETY: as in `read`.
        unsafe {
            let iov = list(iov, count)?;
            let rma_iov = &whole(few(iov)?, addr, key);
            let write = RawRma { iov, dest, rma_iov, data: 0, context };
            EpObject::of(at)?.ep.write(write, OpFlags::empty())
        }
    })
}

unsafe extern "C" fn writemsg(at: *mut FidEp, msg: *const MsgRma, flags: u64) -> isize {
    call(|| {
        // SAFETY: as in `read`.
        unsafe {
            let (m, flags) = (given(msg)?, op_flags(flags)?);
            let (iov, context) = (list(m.msg_iov, m.iov_count)?, number(m.context));
            let ranges = ranges(m.rma_iov, m.rma_iov_count)?;
            let (dest, rma_iov) = (m.addr, ranges.as_slice());
            let write = RawRma { iov, dest, rma_iov, data: m.data, context };
            EpObject::of(at)?.ep.writemsg(write, flags)
        }
    })
}

unsafe extern "C" fn inject(
    at: *mut FidEp,
    buf: *mut c_void,
    len: usize,
    dest: u64,
    addr: u64,
    key: u64,
) -> isize {
    let to = Remote { dest, addr, key };
    // SAFETY: the table belongs to endpoints, and the memory is readable during the call.
    call(|| unsafe { EpObject::of(at)?.ep.inject_write((buf.cast(), len), to, None) })
}

unsafe extern "C" fn writedata(
    at: *mut FidEp,
    buf: *mut c_void,
    len: usize,
    _desc: *mut c_void,
    data: u64,
    dest: u64,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    call(|| {
        let (iov, context) = (&one(buf, len), number(context));
        let rma_iov = &whole(iov, addr, key);
        let write = RawRma { iov, dest, rma_iov, data, context };
        // SAFETY: as in `read`.
        unsafe { EpObject::of(at)?.ep.write(write, OpFlags::REMOTE_CQ_DATA) }
    })
}

unsafe extern "C" fn injectdata(
    at: *mut FidEp,
    buf: *mut c_void,
    len: usize,
    data: u64,
    dest: u64,
    addr: u64,
    key: u64,
) -> isize {
    let to = Remote { dest, addr, key };
    // SAFETY: as in `inject`.
    call(|| unsafe { EpObject::of(at)?.ep.inject_write((buf.cast(), len), to, Some(data)) })
}
