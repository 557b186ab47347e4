//! Address vector sets, groups and collectives.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

use barewire::raw::{CollKind, RawCollective};
use barewire::{AvSet, AvSetAttr as OurAttr, Error, FI_ADDR_NOTAVAIL, Mc, Result};

use crate::abi::*;
use crate::av::AvObject;
use crate::domain::DomainObject;
use crate::ep::{EpObject, entries, number};
use crate::guard;
use crate::mcast;
use crate::object::{Object, fid};

type SetObject = Object<FidAvSet, Mutex<AvSet>>;

type McObject = Object<FidMc, OnceLock<Mc>>;

static SET_FID: FiOps = FiOps { close: close_set, ..FiOps::STUB };

static SET_OPS: OpsAvSet =
    OpsAvSet { set_union, intersect, diff, insert, remove, addr, ..OpsAvSet::STUB };

static MC_FID: FiOps = FiOps { close: close_mc, ..FiOps::STUB };

/// The calls of endpoints.
pub(crate) static OPS: OpsCollective = OpsCollective {
    barrier,
    broadcast,
    alltoall,
    allreduce,
    allgather,
    reduce_scatter,
    reduce,
    scatter,
    gather,
    barrier2,
    ..OpsCollective::STUB
};

/// `fi_av_set`.
pub(crate) unsafe extern "C" fn av_set(
    at: *mut FidAv,
    attr: *mut AvSetAttr,
    out: *mut *mut FidAvSet,
    context: *mut c_void,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to vectors; the attributes are there or NULL.
        let (av, attr) = unsafe { (AvObject::of(at)?, attr.as_ref()) };
        let mut ours = OurAttr::default();
        if let Some(attr) = attr {
            // SAFETY: the key has as many bytes as it says, or is NULL.
            let key = unsafe { key_of(attr.comm_key, attr.comm_key_size) };
            let (start_addr, end_addr) = (attr.start_addr, attr.end_addr);
            let (count, stride, flags) = (attr.count, attr.stride, attr.flags);
            ours = OurAttr { count, start_addr, end_addr, stride, comm_key: key, flags };
        }
        let set = av.av.av_set(&ours)?;
        let abi =
            FidAvSet { fid: fid(FI_CLASS_AV_SET, context, &SET_FID), ops: &raw const SET_OPS };
        // SAFETY: `out` can be written.
        unsafe { SetObject::open(abi, Mutex::new(set), out) };
        Ok(())
    })
}

/// A key of any length as a number.
///
/// # Safety
/// `len` bytes are at `key`, or it is NULL.
unsafe fn key_of(key: *const u8, len: usize) -> Option<u64> {
    if key.is_null() || len == 0 {
        return None;
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { std::slice::from_raw_parts(key, len) };
    let hash = |h: u64, &b: &u8| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3);
    Some(bytes.iter().fold(0xcbf2_9ce4_8422_2325, hash))
}

unsafe extern "C" fn close_set(at: *mut Fid) -> c_int {
    // SAFETY: the table belongs to sets, and a program closes what it does not use.
    guard::int(|| unsafe { SetObject::close(at.cast(), |_| Ok(())) })
}

/// # Safety
/// `at` is a set of ours.
unsafe fn with_set<R>(at: *const FidAvSet, f: impl FnOnce(&mut AvSet) -> Result<R>) -> Result<R> {
    // SAFETY: the caller's promise.
    let set = unsafe { SetObject::of(at)? };
    f(&mut set.lock().unwrap_or_else(PoisonError::into_inner))
}

/// # Safety
/// Both are sets of ours.
unsafe fn with_two(
    to: *mut FidAvSet,
    from: *const FidAvSet,
    f: impl FnOnce(&mut AvSet, &AvSet) -> Result<()>,
) -> Result<()> {
    if std::ptr::eq(to, from) {
        return Err(Error::Invalid("a set and itself"));
    }
    // One lock at a time, whatever the order of others.
    // SAFETY: the caller's promise.
    let other = unsafe { with_set(from, |from| Ok(from.duplicate()))? };
    // SAFETY: as above.
    unsafe { with_set(to, |to| f(to, &other)) }
}

/// Table functions on one set.
macro_rules! of_sets {
    ($($name:ident($other:ident: $ty:ty) |$to:ident| $call:expr;)*) => {$(
        unsafe extern "C" fn $name($to: *mut FidAvSet, $other: $ty) -> c_int {
            // SAFETY: the table belongs to sets, and so do both.
            guard::int(|| unsafe { $call })
        }
    )*};
}

of_sets! {
    set_union(from: *const FidAvSet) |to| with_two(to, from, AvSet::union);
    intersect(from: *const FidAvSet) |to| with_two(to, from, AvSet::intersect);
    diff(from: *const FidAvSet) |to| with_two(to, from, AvSet::diff);
    insert(addr: u64) |to| with_set(to, |set| set.insert(addr));
    remove(addr: u64) |to| with_set(to, |set| set.remove(addr));
}

unsafe extern "C" fn addr(at: *mut FidAvSet, out: *mut u64) -> c_int {
    guard::int(|| {
        if out.is_null() {
            return Err(Error::Invalid("coll_addr: NULL"));
        }
        // SAFETY: the table belongs to sets, and `out` is a place.
        unsafe { *out = with_set(at, |set| Ok(set.addr()))? };
        Ok(())
    })
}

/// `fi_join`; with `FI_COLLECTIVE` it is `fi_join_collective`.
pub(crate) unsafe extern "C" fn join(
    at: *mut FidEp,
    addr: *const c_void,
    flags: u64,
    out: *mut *mut FidMc,
    context: *mut c_void,
) -> c_int {
    guard::int(|| {
        if flags & FI_COLLECTIVE == 0 {
            // SAFETY: the table belongs to endpoints, and the rest is the program's promise.
            return unsafe { mcast::join(at, addr, flags, out, context) };
        }
        // SAFETY: the table belongs to endpoints; with the flag, `addr` is a collective address.
        let (ep, addr) = unsafe { (EpObject::of(at)?, addr.cast::<CollectiveAddr>().as_ref()) };
        let addr = addr.filter(|a| !a.set.is_null()).ok_or(Error::Invalid("addr: NULL"))?;
        let abi = FidMc { fid: fid(FI_CLASS_MC, context, &MC_FID), fi_addr: FI_ADDR_NOTAVAIL };
        let mut made = std::ptr::null_mut();
        // SAFETY: `made` can be written; the set is one of ours.
        unsafe {
            let mc = McObject::open(abi, OnceLock::new(), &mut made);
            let (name, context) = (mc.expose_provenance() as u64, number(context));
            let named = |addr| {
                (*mc).fi_addr = addr;
                Some(name)
            };
            let joined = with_set(addr.set, |set| {
                ep.ep.join_with(addr.coll_addr, set, flags, context, named)
            });
            match joined {
                Ok(joined) => {
                    // The cell is set here alone.
                    let _ = McObject::of(mc)?.set(joined);
                    *out = mc;
                    Ok(())
                }
                Err(e) => {
                    McObject::close(mc, |_| Ok(()))?;
                    Err(e)
                }
            }
        }
    })
}

unsafe extern "C" fn close_mc(at: *mut Fid) -> c_int {
    // SAFETY: the table belongs to groups, and a program closes what it does not use.
    guard::int(|| unsafe { McObject::close(at.cast(), |_| Ok(())) })
}

/// `fi_query_collective`.
pub(crate) unsafe extern "C" fn query(
    at: *mut FidDomain,
    coll: u32,
    attr: *mut CollectiveAttr,
    flags: u64,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to domains; the attributes are there or NULL.
        let (domain, attr) = unsafe { (DomainObject::of(at)?, attr.as_mut()) };
        let attr = attr.ok_or(Error::Invalid("attr: NULL"))?;
        let found = domain.domain.raw_query_collective(coll, attr.op, attr.datatype, flags)?;
        let count = usize::try_from(found.count).unwrap_or(usize::MAX);
        attr.datatype_attr = AtomicAttr { count, size: found.size };
        (attr.max_members, attr.mode) = (found.max_members, 0);
        Ok(())
    })
}

/// A call without buffers.
fn bare(kind: CollKind, coll_addr: u64, flags: u64, context: P) -> RawCollective {
    let (none, root_addr) = (std::ptr::null_mut(), FI_ADDR_NOTAVAIL);
    let (buf, result, count, datatype, op) = (none, none, 0, 0, 0);
    let context = number(context);
    RawCollective { kind, buf, result, count, datatype, op, coll_addr, root_addr, flags, context }
}

/// Table functions of calls with a source and a result, whose first and last arguments are the
/// same.
macro_rules! with_buffers {
    ($($name:ident $kind:ident($($arg:ident: $ty:ty),*);)*) => {
        entries! {$(
            $name(
                buf: P, count: usize, _desc: P, result: P, _result_desc: P, group: u64,
                $($arg: $ty,)* flags: u64, context: P
            ) |ep| {
                let (buf, result) = (buf.cast(), result.cast());
                let call = bare(CollKind::$kind, group, flags, context);
                ep.collective(RawCollective { buf, count, result, $($arg,)* ..call })
            };
        )*}
    };
}

with_buffers! {
    alltoall Alltoall(datatype: u32);
    allreduce Allreduce(datatype: u32, op: u32);
    allgather Allgather(datatype: u32);
    reduce_scatter ReduceScatter(datatype: u32, op: u32);
    reduce Reduce(root_addr: u64, datatype: u32, op: u32);
    scatter Scatter(root_addr: u64, datatype: u32);
    gather Gather(root_addr: u64, datatype: u32);
}

entries! {
    barrier(group: u64, context: P)
        |ep| ep.collective(bare(CollKind::Barrier, group, 0, context));
    barrier2(group: u64, flags: u64, context: P)
        |ep| ep.collective(bare(CollKind::Barrier, group, flags, context));
    broadcast(
        buf: P, count: usize, _desc: P, group: u64,
        root_addr: u64, datatype: u32, flags: u64, context: P
    ) |ep| {
        let call = bare(CollKind::Broadcast, group, flags, context);
        ep.collective(RawCollective { buf: buf.cast(), count, root_addr, datatype, ..call })
    };
}
