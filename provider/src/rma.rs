//! The nine calls of fi_rma(3). The promises are those of [`crate::msg`].

use barewire::flags::{OpFlags, op_flags};
use barewire::raw::{IoVec, RawRma};
use barewire::{Error, Remote, Result, RmaIov as OurIov};

use crate::abi::*;
use crate::ep::{entries, number};
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

/// A list of pieces within the limit. Longer lists are not read: they are refused by their length.
///
/// # Safety
/// As [`list`].
unsafe fn few<'a>(iov: *const Iovec, count: usize) -> Result<&'a [IoVec]> {
    if count > barewire::rma::RMA_IOV_LIMIT {
        return Err(Error::Invalid("iov_count: above 8"));
    }
    // SAFETY: the caller's promise.
    unsafe { list(iov, count) }
}

/// Passes local pieces and their single remote range to `post`.
fn on_one(
    iov: &[IoVec],
    (dest, addr, key): (u64, u64, u64),
    (data, context): (u64, P),
    post: impl FnOnce(RawRma<'_>) -> Result<()>,
) -> Result<()> {
    let rma_iov = &[OurIov { addr, len: len_of(iov), key }];
    post(RawRma { iov, dest, rma_iov, data, context: number(context) })
}

/// A message and its flags, handed to `post`.
///
/// # Safety
/// The message is whole, or NULL.
pub(crate) unsafe fn on_msg(
    msg: *const MsgRma,
    flags: u64,
    post: impl FnOnce(RawRma<'_>, OpFlags) -> Result<()>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let (m, flags) = (given(msg)?, op_flags(flags)?);
        let (iov, ranges) = (list(m.msg_iov, m.iov_count)?, ranges(m.rma_iov, m.rma_iov_count)?);
        let (rma_iov, context) = (ranges.as_slice(), number(m.context));
        post(RawRma { iov, dest: m.addr, rma_iov, data: m.data, context }, flags)
    }
}

const NO_FLAGS: OpFlags = OpFlags::empty();

entries! {
    read(buf: P, len: usize, _desc: P, dest: u64, addr: u64, key: u64, context: P)
        |ep| on_one(&one(buf, len), (dest, addr, key), (0, context), |r| ep.read(r));
    readv(
        iov: *const Iovec, _desc: *mut P, count: usize,
        dest: u64, addr: u64, key: u64, context: P,
    ) |ep| on_one(few(iov, count)?, (dest, addr, key), (0, context), |r| ep.read(r));
    readmsg(msg: *const MsgRma, flags: u64) |ep| on_msg(msg, flags, |r, f| ep.readmsg(r, f));
    write(buf: P, len: usize, _desc: P, dest: u64, addr: u64, key: u64, context: P)
        |ep| on_one(&one(buf, len), (dest, addr, key), (0, context), |w| ep.write(w, NO_FLAGS));
    writev(
        iov: *const Iovec, _desc: *mut P, count: usize,
        dest: u64, addr: u64, key: u64, context: P,
    ) |ep| on_one(few(iov, count)?, (dest, addr, key), (0, context), |w| ep.write(w, NO_FLAGS));
    writemsg(msg: *const MsgRma, flags: u64) |ep| on_msg(msg, flags, |w, f| ep.writemsg(w, f));
    writedata(
        buf: P, len: usize, _desc: P, data: u64, dest: u64, addr: u64, key: u64, context: P,
    ) |ep| on_one(&one(buf, len), (dest, addr, key), (data, context), |w| {
        ep.write(w, OpFlags::REMOTE_CQ_DATA)
    });
    inject(buf: P, len: usize, dest: u64, addr: u64, key: u64)
        |ep| ep.inject_write((buf.cast(), len), Remote { dest, addr, key }, None);
    injectdata(buf: P, len: usize, data: u64, dest: u64, addr: u64, key: u64)
        |ep| ep.inject_write((buf.cast(), len), Remote { dest, addr, key }, Some(data));
}
