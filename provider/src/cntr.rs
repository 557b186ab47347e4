//! Counters.

use std::ffi::{c_int, c_void};

use barewire::{Cntr, CntrAttr as OurAttr, Error, WaitObj};

use crate::abi::*;
use crate::domain::DomainObject;
use crate::eq::{wait_control, wait_obj};
use crate::guard;
use crate::object::{Object, fid};

/// What stands behind a `struct fid_cntr`.
pub(crate) struct Counter {
    pub(crate) cntr: Cntr,
    wait_obj: u32,
}

pub(crate) type CntrObject = Object<FidCntr, Counter>;

static FID: FiOps = FiOps { close, control, ..FiOps::STUB };

static OPS: OpsCntr = OpsCntr { read, readerr, add, set, wait, adderr, seterr, ..OpsCntr::STUB };

/// `fi_cntr_open`.
pub(crate) unsafe extern "C" fn open(
    domain: *mut FidDomain,
    attr: *mut CntrAttr,
    out: *mut *mut FidCntr,
    context: *mut c_void,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to domains; the attributes are there or NULL.
        let (domain, attr) = unsafe { (DomainObject::of(domain)?, attr.as_ref()) };
        let (events, wait, flags) = attr.map_or((0, 1, 0), |a| (a.events, a.wait_obj, a.flags));
        if events != 0 {
            return Err(Error::NoSys);
        }
        if flags != 0 {
            return Err(Error::BadFlags);
        }
        // Programs wait on counters that they opened without anything to wait on.
        let ours = match wait_obj(wait)? {
            WaitObj::None => WaitObj::Unspec,
            named => named,
        };
        let cntr = domain.domain.cntr_open(OurAttr { wait_obj: ours })?;
        let abi = FidCntr { fid: fid(FI_CLASS_CNTR, context, &FID), ops: &raw const OPS };
        // SAFETY: `out` can be written.
        unsafe { CntrObject::open(abi, Counter { cntr, wait_obj: wait }, out) };
        Ok(())
    })
}

unsafe extern "C" fn close(at: *mut Fid) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to counters, and a program closes what it does not use.
        unsafe {
            CntrObject::close(at.cast(), |it| {
                let Counter { cntr, wait_obj } = it;
                cntr.close().map_err(|(e, cntr)| (e, Counter { cntr, wait_obj }))
            })
        }
    })
}

unsafe extern "C" fn control(at: *mut Fid, command: c_int, arg: *mut c_void) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to counters, and the command says what `arg` is.
        unsafe {
            let cntr = CntrObject::of(at.cast())?;
            wait_control(command, arg, cntr.wait_obj, || cntr.cntr.wait_fd())
        }
    })
}

unsafe extern "C" fn read(at: *mut FidCntr) -> u64 {
    // SAFETY: the table belongs to counters.
    guard::or(0, || unsafe { CntrObject::of(at)?.cntr.read() })
}

unsafe extern "C" fn readerr(at: *mut FidCntr) -> u64 {
    // SAFETY: as above.
    guard::or(0, || unsafe { CntrObject::of(at)?.cntr.readerr() })
}

unsafe extern "C" fn add(at: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: as above.
    guard::int(|| unsafe { CntrObject::of(at)?.cntr.add(value) })
}

unsafe extern "C" fn set(at: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: as above.
    guard::int(|| unsafe { CntrObject::of(at)?.cntr.set(value) })
}

unsafe extern "C" fn adderr(at: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: as above.
    guard::int(|| unsafe { CntrObject::of(at)?.cntr.adderr(value) })
}

unsafe extern "C" fn seterr(at: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: as above.
    guard::int(|| unsafe { CntrObject::of(at)?.cntr.seterr(value) })
}

unsafe extern "C" fn wait(at: *mut FidCntr, threshold: u64, timeout: c_int) -> c_int {
    // SAFETY: as above.
    guard::int(|| unsafe { CntrObject::of(at)?.cntr.wait(threshold, timeout) })
}
