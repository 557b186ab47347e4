//! Atomics under the names of kfabric: the thirteen calls of kfi_atomic, over the same engine as
//! [`crate::atomic`].
//!
//! Operations and datatypes are those of libfabric, number for number, and so are the errors
//! ([`KFI_EAGAIN`] and its two sisters). What differs:
//! - a base [`KFI_ATOMIC_READ`] reads into its buffer; libfabric knows only the fetch form;
//! - [`KfiFlags::REMOTE_SIGNAL`] raises a completion at the target, with the message's `data`;
//! - a fence need hold back only the fenced operation. Ours holds back the later ones too, which
//!   that allows.

use bitflags::bitflags;

use crate::atomic::{AtomicMsg, TypedOp};
use crate::buf::{Buf, Bufs, PostError, PostResult};
use crate::ep::Endpoint;
use crate::errno::{Error, Result};
use crate::flags::OpFlags;
use crate::rma::Remote;

/// No resource now: drive the completion queue, then try again.
pub const KFI_EAGAIN: Error = Error::Again;
/// More elements than the valid calls say.
pub const KFI_EMSGSIZE: Error = Error::MsgTooLong;
/// `errno` of an operation that has no meaning on the datatype.
pub const KFI_EOPNOTSUPP: i32 = 95;

macro_rules! numbers {
    ($($name:ident = $fi:literal, $value:literal;)*) => {
        $(#[doc = concat!("`", $fi, "`.")] pub const $name: u32 = $value;)*
    };
}

numbers! {
    KFI_MIN = "FI_MIN", 0;
    KFI_MAX = "FI_MAX", 1;
    KFI_SUM = "FI_SUM", 2;
    KFI_PROD = "FI_PROD", 3;
    KFI_LOR = "FI_LOR", 4;
    KFI_LAND = "FI_LAND", 5;
    KFI_BOR = "FI_BOR", 6;
    KFI_BAND = "FI_BAND", 7;
    KFI_LXOR = "FI_LXOR", 8;
    KFI_BXOR = "FI_BXOR", 9;
    KFI_ATOMIC_READ = "FI_ATOMIC_READ", 10;
    KFI_ATOMIC_WRITE = "FI_ATOMIC_WRITE", 11;
    KFI_CSWAP = "FI_CSWAP", 12;
    KFI_CSWAP_NE = "FI_CSWAP_NE", 13;
    KFI_CSWAP_LE = "FI_CSWAP_LE", 14;
    KFI_CSWAP_LT = "FI_CSWAP_LT", 15;
    KFI_CSWAP_GE = "FI_CSWAP_GE", 16;
    KFI_CSWAP_GT = "FI_CSWAP_GT", 17;
    KFI_MSWAP = "FI_MSWAP", 18;
}

numbers! {
    KFI_INT8 = "FI_INT8", 0;
    KFI_UINT8 = "FI_UINT8", 1;
    KFI_INT16 = "FI_INT16", 2;
    KFI_UINT16 = "FI_UINT16", 3;
    KFI_INT32 = "FI_INT32", 4;
    KFI_UINT32 = "FI_UINT32", 5;
    KFI_INT64 = "FI_INT64", 6;
    KFI_UINT64 = "FI_UINT64", 7;
    KFI_FLOAT = "FI_FLOAT", 8;
    KFI_DOUBLE = "FI_DOUBLE", 9;
    KFI_FLOAT_COMPLEX = "FI_FLOAT_COMPLEX", 10;
    KFI_DOUBLE_COMPLEX = "FI_DOUBLE_COMPLEX", 11;
    KFI_LONG_DOUBLE = "FI_LONG_DOUBLE", 12;
    KFI_LONG_DOUBLE_COMPLEX = "FI_LONG_DOUBLE_COMPLEX", 13;
}

bitflags! {
    /// Flags of the three `msg` calls. A set of our own: only the names are kfabric's.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct KfiFlags: u64 {
        /// `KFI_MORE`.
        const MORE = 1 << 18;
        /// `KFI_REMOTE_SIGNAL`: a completion at the target.
        const REMOTE_SIGNAL = 1 << 20;
        /// `KFI_FENCE`.
        const FENCE = 1 << 21;
        /// `KFI_COMPLETION`.
        const COMPLETION = 1 << 24;
        /// `KFI_INJECT`.
        const INJECT = 1 << 25;
    }
}

/// The flags as the engine knows them.
fn flags(f: KfiFlags) -> Result<OpFlags> {
    let pairs = [
        (KfiFlags::MORE, OpFlags::MORE),
        (KfiFlags::REMOTE_SIGNAL, OpFlags::REMOTE_CQ_DATA),
        (KfiFlags::FENCE, OpFlags::FENCE),
        (KfiFlags::COMPLETION, OpFlags::COMPLETION),
        (KfiFlags::INJECT, OpFlags::INJECT),
    ];
    if !KfiFlags::all().contains(f) {
        return Err(Error::BadFlags);
    }
    let wanted = pairs.into_iter().filter(|(kfi, _)| f.contains(*kfi));
    Ok(wanted.fold(OpFlags::empty(), |flags, (_, fi)| flags | fi))
}

fn with_flags(
    f: KfiFlags,
    bufs: Bufs,
    post: impl FnOnce(OpFlags, Bufs) -> PostResult,
) -> PostResult {
    match flags(f) {
        Ok(flags) => post(flags, bufs),
        Err(error) => Err(PostError { error, bufs }),
    }
}

/// Changes elements of remote memory by those in `buf`; a read fills `buf` instead, and its
/// completion gives it back.
///
/// # Errors
/// Those of [`crate::atomic`].
pub fn kfi_atomic(ep: &Endpoint, op: TypedOp, buf: Buf, to: Remote, context: u64) -> PostResult {
    kfi_atomicv(ep, op, vec![buf], to, context)
}

/// As [`kfi_atomic`], with at most 8 buffers.
///
/// # Errors
/// Those of [`crate::atomic`].
pub fn kfi_atomicv(
    ep: &Endpoint,
    op: TypedOp,
    bufs: Vec<Buf>,
    to: Remote,
    context: u64,
) -> PostResult {
    if op.op == KFI_ATOMIC_READ {
        return ep.fetch_atomicv(op, &[], bufs, to, context);
    }
    let operands: Vec<&[u8]> = bufs.iter().map(|b| &b[..]).collect();
    let posted = ep.atomicv(op, &operands, to, context);
    posted.map_err(|refused| PostError { error: refused.error, bufs: bufs.into() })
}

/// As [`kfi_atomicv`], on a list of remote ranges. A read fills `read_into`, which is not used
/// otherwise.
///
/// # Errors
/// Those of [`crate::atomic`].
pub fn kfi_atomicmsg(
    ep: &Endpoint,
    msg: AtomicMsg<'_>,
    read_into: impl Into<Bufs>,
    flags: KfiFlags,
) -> PostResult {
    with_flags(flags, read_into.into(), |flags, bufs| {
        if msg.op.op == KFI_ATOMIC_READ {
            ep.fetch_atomicmsg(msg, bufs, flags - OpFlags::INJECT)
        } else {
            ep.atomicmsg(msg, flags)
        }
    })
}

/// As [`kfi_atomic`], of at most `inject_size` bytes; success writes no completion.
///
/// # Errors
/// Those of [`crate::atomic`]. A read has nowhere to put its values: `KFI_EOPNOTSUPP`.
pub fn kfi_inject_atomic(ep: &Endpoint, op: TypedOp, buf: &[u8], to: Remote) -> Result<()> {
    ep.inject_atomic(op, buf, to)
}

/// As [`Endpoint::fetch_atomic`].
///
/// # Errors
/// Those of [`crate::atomic`].
pub fn kfi_fetch_atomic(
    ep: &Endpoint,
    op: TypedOp,
    buf: &[u8],
    result: Buf,
    to: Remote,
    context: u64,
) -> PostResult {
    ep.fetch_atomic(op, buf, result, to, context)
}

/// As [`Endpoint::fetch_atomicv`].
///
/// # Errors
/// Those of [`crate::atomic`].
pub fn kfi_fetch_atomicv(
    ep: &Endpoint,
    op: TypedOp,
    bufs: &[&[u8]],
    results: Vec<Buf>,
    to: Remote,
    context: u64,
) -> PostResult {
    ep.fetch_atomicv(op, bufs, results, to, context)
}

/// As [`Endpoint::fetch_atomicmsg`].
///
/// # Errors
/// Those of [`crate::atomic`].
pub fn kfi_fetch_atomicmsg(
    ep: &Endpoint,
    msg: AtomicMsg<'_>,
    results: impl Into<Bufs>,
    flags: KfiFlags,
) -> PostResult {
    with_flags(flags, results.into(), |flags, bufs| ep.fetch_atomicmsg(msg, bufs, flags))
}

/// As [`Endpoint::compare_atomic`].
///
/// # Errors
/// Those of [`crate::atomic`].
pub fn kfi_compare_atomic(
    ep: &Endpoint,
    op: TypedOp,
    (buf, compare): (&[u8], &[u8]),
    result: Buf,
    to: Remote,
    context: u64,
) -> PostResult {
    ep.compare_atomic(op, buf, compare, result, to, context)
}

/// As [`Endpoint::compare_atomicv`].
///
/// # Errors
/// Those of [`crate::atomic`].
pub fn kfi_compare_atomicv(
    ep: &Endpoint,
    op: TypedOp,
    (bufs, compares): (&[&[u8]], &[&[u8]]),
    results: Vec<Buf>,
    to: Remote,
    context: u64,
) -> PostResult {
    ep.compare_atomicv(op, bufs, compares, results, to, context)
}

/// As [`Endpoint::compare_atomicmsg`].
///
/// # Errors
/// Those of [`crate::atomic`].
pub fn kfi_compare_atomicmsg(
    ep: &Endpoint,
    msg: AtomicMsg<'_>,
    compares: &[&[u8]],
    results: impl Into<Bufs>,
    flags: KfiFlags,
) -> PostResult {
    with_flags(flags, results.into(), |flags, bufs| {
        ep.compare_atomicmsg(msg, compares, bufs, flags)
    })
}

/// Whether [`kfi_atomic`] has the operation, and the most elements of one call.
///
/// # Errors
/// `KFI_EOPNOTSUPP`.
pub fn kfi_atomicvalid(ep: &Endpoint, op: TypedOp) -> Result<usize> {
    if op.op == KFI_ATOMIC_READ { ep.fetch_atomicvalid(op) } else { ep.atomicvalid(op) }
}

/// Whether [`kfi_fetch_atomic`] has the operation, and the most elements of one call.
///
/// # Errors
/// `KFI_EOPNOTSUPP`.
pub fn kfi_fetch_atomicvalid(ep: &Endpoint, op: TypedOp) -> Result<usize> {
    ep.fetch_atomicvalid(op)
}

/// Whether [`kfi_compare_atomic`] has the operation, and the most elements of one call.
///
/// # Errors
/// `KFI_EOPNOTSUPP`.
pub fn kfi_compare_atomicvalid(ep: &Endpoint, op: TypedOp) -> Result<usize> {
    ep.compare_atomicvalid(op)
}
