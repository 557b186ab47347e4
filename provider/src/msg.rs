//! The nine calls of fi_msg(3).

use std::ffi::c_void;

use barewire::flags::{OpFlags, op_flags};
use barewire::raw::{IoVec, MsgKind, RawRecv, RawSend};
use barewire::{Error, Result};

use crate::abi::*;
use crate::ep::{EpObject, number};
use crate::guard::call;

/// The table.
pub(crate) static OPS: OpsMsg = OpsMsg {
    recv,
    recvv,
    recvmsg,
    send,
    sendv,
    sendmsg,
    inject,
    senddata,
    injectdata,
    ..OpsMsg::STUB
};

/// A list of C as ours.
///
/// # Safety
/// `count` pieces are at `at`, for as long as the result is used.
#[inline]
pub(crate) unsafe fn list<'a>(at: *const Iovec, count: usize) -> Result<&'a [IoVec]> {
    const { assert!(size_of::<IoVec>() == size_of::<Iovec>()) };
    if count == 0 {
        return Ok(&[]);
    }
    if at.is_null() {
        return Err(Error::Invalid("iov: NULL"));
    }
    // SAFETY: the caller's promise; both types are an address and a length, in this order.
    Ok(unsafe { std::slice::from_raw_parts(at.cast(), count) })
}

/// One piece.
#[inline]
pub(crate) fn one(base: *mut c_void, len: usize) -> [IoVec; 1] {
    [IoVec { base: base.cast(), len }]
}

/// The struct that a `msg` call takes.
///
/// # Safety
/// It is there or NULL.
#[inline]
pub(crate) unsafe fn given<'a, T>(msg: *const T) -> Result<&'a T> {
    // SAFETY: the caller's promise.
    unsafe { msg.as_ref() }.ok_or(Error::Invalid("msg: NULL"))
}

const KIND: MsgKind = MsgKind::Msg;

unsafe extern "C" fn recv(
    at: *mut FidEp,
    buf: *mut c_void,
    len: usize,
    _desc: *mut c_void,
    src: u64,
    context: *mut c_void,
) -> isize {
    call(|| {
        let (iov, context) = (&one(buf, len), number(context));
        let recv = RawRecv { kind: KIND, iov, src, tag: 0, ignore: 0, context };
        // SAFETY: the table belongs to endpoints; the memory is lent as fi_msg(3) says, which is
        // the promise of the raw face.
        unsafe { EpObject::of(at)?.ep.recv(recv) }
    })
}

unsafe extern "C" fn recvv(
    at: *mut FidEp,
    iov: *const Iovec,
    _desc: *mut *mut c_void,
    count: usize,
    src: u64,
    context: *mut c_void,
) -> isize {
    call(|| {
        let context = number(context);
        // SAFETY: as in `recv`.
        unsafe {
            let iov = list(iov, count)?;
            let recv = RawRecv { kind: KIND, iov, src, tag: 0, ignore: 0, context };
            EpObject::of(at)?.ep.recv(recv)
        }
    })
}

unsafe extern "C" fn recvmsg(at: *mut FidEp, msg: *const Msg, flags: u64) -> isize {
    call(|| {
        // SAFETY: as in `recv`.
        unsafe {
            let (m, flags) = (given(msg)?, op_flags(flags)?);
            let (iov, context) = (list(m.msg_iov, m.iov_count)?, number(m.context));
            let recv = RawRecv { kind: KIND, iov, src: m.addr, tag: 0, ignore: 0, context };
            EpObject::of(at)?.ep.recvmsg(recv, flags)
        }
    })
}

unsafe extern "C" fn send(
    at: *mut FidEp,
    buf: *mut c_void,
    len: usize,
    _desc: *mut c_void,
    dest: u64,
    context: *mut c_void,
) -> isize {
    call(|| {
        let (iov, context) = (&one(buf, len), number(context));
        let send = RawSend { kind: KIND, iov, dest, tag: 0, data: 0, context };
        // SAFETY: as in `recv`.
        unsafe { EpObject::of(at)?.ep.send(send, OpFlags::empty()) }
    })
}

unsafe extern "C" fn sendv(
    at: *mut FidEp,
    iov: *const Iovec,
    _desc: *mut *mut c_void,
    count: usize,
    dest: u64,
    context: *mut c_void,
) -> isize {
    call(|| {
        let context = number(context);
        // SAFETY: as in `recv`.
        unsafe {
            let iov = list(iov, count)?;
            let send = RawSend { kind: KIND, iov, dest, tag: 0, data: 0, context };
            EpObject::of(at)?.ep.send(send, OpFlags::empty())
        }
    })
}

unsafe extern "C" fn sendmsg(at: *mut FidEp, msg: *const Msg, flags: u64) -> isize {
    call(|| {
        // SAFETY: as in `recv`.
        unsafe {
            let (m, flags) = (given(msg)?, op_flags(flags)?);
            let (iov, context) = (list(m.msg_iov, m.iov_count)?, number(m.context));
            let send = RawSend { kind: KIND, iov, dest: m.addr, tag: 0, data: m.data, context };
            EpObject::of(at)?.ep.sendmsg(send, flags)
        }
    })
}

unsafe extern "C" fn inject(at: *mut FidEp, buf: *mut c_void, len: usize, dest: u64) -> isize {
    // SAFETY: the table belongs to endpoints, and the memory is readable during the call.
    call(|| unsafe { EpObject::of(at)?.ep.inject(KIND, (buf.cast(), len), dest, 0, None) })
}

unsafe extern "C" fn senddata(
    at: *mut FidEp,
    buf: *mut c_void,
    len: usize,
    _desc: *mut c_void,
    data: u64,
    dest: u64,
    context: *mut c_void,
) -> isize {
    call(|| {
        let (iov, context) = (&one(buf, len), number(context));
        let send = RawSend { kind: KIND, iov, dest, tag: 0, data, context };
        // SAFETY: as in `recv`.
        unsafe { EpObject::of(at)?.ep.send(send, OpFlags::REMOTE_CQ_DATA) }
    })
}

unsafe extern "C" fn injectdata(
    at: *mut FidEp,
    buf: *mut c_void,
    len: usize,
    data: u64,
    dest: u64,
) -> isize {
    // SAFETY: as in `inject`.
    call(|| unsafe { EpObject::of(at)?.ep.inject(KIND, (buf.cast(), len), dest, 0, Some(data)) })
}
