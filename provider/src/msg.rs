//! The nine calls of fi_msg(3), and as many of fi_tagged(3), which differ in the tag alone.

use barewire::raw::{IoVec, MsgKind, RawRecv, RawSend};
use barewire::{Error, Result};

use crate::abi::*;
use crate::ep::number;

/// Converts a list from C.
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
pub(crate) fn one(base: P, len: usize) -> [IoVec; 1] {
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

/// The first two of `tags` are the tag and the bits of it to ignore.
#[inline]
fn get<const N: usize>(
    kind: MsgKind,
    iov: &[IoVec],
    src: u64,
    tags: [u64; N],
    context: P,
) -> RawRecv<'_> {
    RawRecv { kind, iov, src, tag: tags[0], ignore: tags[1], context: number(context) }
}

/// The first of `tags` is the tag.
#[inline]
fn put<const N: usize>(
    kind: MsgKind,
    iov: &[IoVec],
    data: u64,
    dest: u64,
    tags: [u64; N],
    context: P,
) -> RawSend<'_> {
    RawSend { kind, iov, dest, tag: tags[0], data, context: number(context) }
}

/// The table of one kind of message; a tagged one names the arguments that are its tag and the bits
/// of it to ignore, and what has none has 0 there.
macro_rules! messages {
    ($kind:ident, $ops:ident, $msg:ident $(, $tag:ident, $ignore:ident)?) => {
        use barewire::flags::{OpFlags, op_flags};

        use super::{MsgKind, get, given, list, one, put};
        use crate::abi::*;
        use crate::ep::{EpObject, entries};
        use crate::guard::{PANICKED, at_once};

        const KIND: MsgKind = MsgKind::$kind;

        const NO_FLAGS: OpFlags = OpFlags::empty();

        /// The table.
        pub(crate) static OPS: $ops = $ops {
            recv,
            recvv,
            recvmsg,
            send,
            sendv,
            sendmsg,
            inject,
            senddata,
            injectdata,
            ..$ops::STUB
        };

        /// The common receive is inlined. All other cases are tail calls, so that this path saves
        /// no registers; [`send`] likewise.
        unsafe extern "C" fn recv(
            at: *mut FidEp,
            buf: P,
            len: usize,
            desc: P,
            src: u64,
            $($tag: u64, $ignore: u64,)?
            context: P,
        ) -> isize {
            // SAFETY: as for `entries`.
            let posted = at_once(|| unsafe {
                let iov = one(buf, len);
                let recv = get(KIND, &iov, src, [$($tag, $ignore,)? 0, 0], context);
                EpObject::of_table(at).ep.try_recv_fast(recv)
            });
            match posted {
                Some(true) => 0,
                // SAFETY: as this call.
                Some(false) => unsafe {
                    recv_rest(at, buf, len, desc, src, $($tag, $ignore,)? context)
                },
                None => PANICKED,
            }
        }

        unsafe extern "C" fn send(
            at: *mut FidEp,
            buf: P,
            len: usize,
            desc: P,
            dest: u64,
            $($tag: u64,)?
            context: P,
        ) -> isize {
            // SAFETY: as for `entries`.
            let sent = at_once(|| unsafe {
                let iov = one(buf, len);
                let send = put(KIND, &iov, 0, dest, [$($tag,)? 0], context);
                EpObject::of_table(at).ep.try_send_fast(send)
            });
            match sent {
                Some(true) => 0,
                // SAFETY: as this call.
                Some(false) => unsafe { send_rest(at, buf, len, desc, dest, $($tag,)? context) },
                None => PANICKED,
            }
        }

        entries! {
            #[inline(never)]
            recv_rest(
                buf: P, len: usize, _desc: P, src: u64, $($tag: u64, $ignore: u64,)? context: P
            )
                |ep| ep.recv(get(KIND, &one(buf, len), src, [$($tag, $ignore,)? 0, 0], context));
            recvv(
                iov: *const Iovec, _desc: *mut P, count: usize,
                src: u64, $($tag: u64, $ignore: u64,)? context: P
            ) |ep| ep.recv(get(KIND, list(iov, count)?, src, [$($tag, $ignore,)? 0, 0], context));
            recvmsg(msg: *const $msg, flags: u64) |ep| {
                let (m, flags) = (given(msg)?, op_flags(flags)?);
                let (iov, tags) = (list(m.msg_iov, m.iov_count)?, [$(m.$tag, m.$ignore,)? 0, 0]);
                ep.recvmsg(get(KIND, iov, m.addr, tags, m.context), flags)
            };
            #[inline(never)]
            send_rest(buf: P, len: usize, _desc: P, dest: u64, $($tag: u64,)? context: P)
                |ep| ep.send(put(KIND, &one(buf, len), 0, dest, [$($tag,)? 0], context), NO_FLAGS);
            sendv(
                iov: *const Iovec, _desc: *mut P, count: usize,
                dest: u64, $($tag: u64,)? context: P
            ) |ep| ep.send(put(KIND, list(iov, count)?, 0, dest, [$($tag,)? 0], context), NO_FLAGS);
            sendmsg(msg: *const $msg, flags: u64) |ep| {
                let (m, flags) = (given(msg)?, op_flags(flags)?);
                let iov = list(m.msg_iov, m.iov_count)?;
                ep.sendmsg(put(KIND, iov, m.data, m.addr, [$(m.$tag,)? 0], m.context), flags)
            };
            inject(buf: P, len: usize, dest: u64 $(, $tag: u64)?)
                |ep| ep.inject(KIND, (buf.cast(), len), dest, [$($tag,)? 0][0], None);
            senddata(
                buf: P, len: usize, _desc: P, data: u64, dest: u64, $($tag: u64,)? context: P
            ) |ep| {
                let iov = &one(buf, len);
                let send = put(KIND, iov, data, dest, [$($tag,)? 0], context);
                ep.send(send, OpFlags::REMOTE_CQ_DATA)
            };
            injectdata(buf: P, len: usize, data: u64, dest: u64 $(, $tag: u64)?)
                |ep| ep.inject(KIND, (buf.cast(), len), dest, [$($tag,)? 0][0], Some(data));
        }
    };
}

/// fi_msg(3).
pub(crate) mod untagged {
    messages!(Msg, OpsMsg, Msg);
}

/// fi_tagged(3).
pub(crate) mod tagged {
    messages!(Tagged, OpsTagged, MsgTagged, tag, ignore);
}
