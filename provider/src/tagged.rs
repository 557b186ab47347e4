//! The nine calls of fi_tagged(3). What the promises are is told in [`crate::msg`].

use std::ffi::c_void;

use barewire::flags::{OpFlags, op_flags};
use barewire::raw::{MsgKind, RawRecv, RawSend};

use crate::abi::*;
use crate::ep::{EpObject, number};
use crate::guard::call;
use crate::msg::{given, list, one};

/// The table.
pub(crate) static OPS: OpsTagged = OpsTagged {
    recv,
    recvv,
    recvmsg,
    send,
    sendv,
    sendmsg,
    inject,
    senddata,
    injectdata,
    ..OpsTagged::STUB
};

const KIND: MsgKind = MsgKind::Tagged;

unsafe extern "C" fn recv(
    at: *mut FidEp,
    buf: *mut c_void,
    len: usize,
    _desc: *mut c_void,
    src: u64,
    tag: u64,
    ignore: u64,
    context: *mut c_void,
) -> isize {
    call(|| {
        let (iov, context) = (&one(buf, len), number(context));
        let recv = RawRecv { kind: KIND, iov, src, tag, ignore, context };
        // SAFETY: the table belongs to endpoints; the memory is lent as fi_tagged(3) says, which
        // is the promise of the raw face.
        unsafe { EpObject::of(at)?.ep.recv(recv) }
    })
}

unsafe extern "C" fn recvv(
    at: *mut FidEp,
    iov: *const Iovec,
    _desc: *mut *mut c_void,
    count: usize,
    src: u64,
    tag: u64,
    ignore: u64,
    context: *mut c_void,
) -> isize {
    call(|| {
        let context = number(context);
        // SAFETY: as in `recv`.
        unsafe {
            let iov = list(iov, count)?;
            EpObject::of(at)?.ep.recv(RawRecv { kind: KIND, iov, src, tag, ignore, context })
        }
    })
}

unsafe extern "C" fn recvmsg(at: *mut FidEp, msg: *const MsgTagged, flags: u64) -> isize {
    call(|| {
        // SAFETY: as in `recv`.
        unsafe {
            let (m, flags) = (given(msg)?, op_flags(flags)?);
            let (iov, context) = (list(m.msg_iov, m.iov_count)?, number(m.context));
            let (src, tag, ignore) = (m.addr, m.tag, m.ignore);
            let recv = RawRecv { kind: KIND, iov, src, tag, ignore, context };
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
    tag: u64,
    context: *mut c_void,
) -> isize {
    call(|| {
        let (iov, context) = (&one(buf, len), number(context));
        let send = RawSend { kind: KIND, iov, dest, tag, data: 0, context };
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
    tag: u64,
    context: *mut c_void,
) -> isize {
    call(|| {
        let context = number(context);
        // SAFETY: as in `recv`.
        unsafe {
            let iov = list(iov, count)?;
            let send = RawSend { kind: KIND, iov, dest, tag, data: 0, context };
            EpObject::of(at)?.ep.send(send, OpFlags::empty())
        }
    })
}

unsafe extern "C" fn sendmsg(at: *mut FidEp, msg: *const MsgTagged, flags: u64) -> isize {
    call(|| {
        // SAFETY: as in `recv`.
        unsafe {
            let (m, flags) = (given(msg)?, op_flags(flags)?);
            let (iov, context) = (list(m.msg_iov, m.iov_count)?, number(m.context));
            let (dest, tag, data) = (m.addr, m.tag, m.data);
            let send = RawSend { kind: KIND, iov, dest, tag, data, context };
            EpObject::of(at)?.ep.sendmsg(send, flags)
        }
    })
}

unsafe extern "C" fn inject(
    at: *mut FidEp,
    buf: *mut c_void,
    len: usize,
    dest: u64,
    tag: u64,
) -> isize {
    // SAFETY: the table belongs to endpoints, and the memory is readable during the call.
    call(|| unsafe { EpObject::of(at)?.ep.inject(KIND, (buf.cast(), len), dest, tag, None) })
}

unsafe extern "C" fn senddata(
    at: *mut FidEp,
    buf: *mut c_void,
    len: usize,
    _desc: *mut c_void,
    data: u64,
    dest: u64,
    tag: u64,
    context: *mut c_void,
) -> isize {
    call(|| {
        let (iov, context) = (&one(buf, len), number(context));
        let send = RawSend { kind: KIND, iov, dest, tag, data, context };
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
    tag: u64,
) -> isize {
    // SAFETY: as in `inject`.
    call(|| unsafe { EpObject::of(at)?.ep.inject(KIND, (buf.cast(), len), dest, tag, Some(data)) })
}
