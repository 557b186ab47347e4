//! Counters.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, OnceLock};

use barewire::{Cntr, CntrAttr as OurAttr, CntrEvents, Error, WaitObj};

use crate::abi::*;
use crate::domain::DomainObject;
use crate::guard;
use crate::object::{Object, fid};
use crate::wait::{self, Membership};

/// The object of a `struct fid_cntr`.
pub(crate) struct Counter {
    pub(crate) cntr: Cntr,
    wait_obj: u32,
    member: OnceLock<Membership>,
    /// Held by poll sets that it is in.
    pub(crate) polled: Arc<()>,
}

pub(crate) type CntrObject = Object<FidCntr, Counter>;

impl Counter {
    /// Closes it, or gives it back if it is busy.
    fn end(self) -> std::result::Result<(), (Error, Self)> {
        if Arc::strong_count(&self.polled) > 1 {
            return Err((Error::Busy, self));
        }
        let Self { cntr, wait_obj, member, polled } = self;
        cntr.close().map_err(|(e, cntr)| (e, Self { cntr, wait_obj, member, polled }))
    }
}

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
        let set = attr.map_or(std::ptr::null_mut(), |a| a.wait_set);
        let events = match events {
            FI_CNTR_EVENTS_COMP => CntrEvents::Comp,
            FI_CNTR_EVENTS_BYTES => CntrEvents::Bytes,
            _ => return Err(Error::NoSys),
        };
        if flags != 0 {
            return Err(Error::BadFlags);
        }
        // Programs wait on counters that they opened with FI_WAIT_NONE. SAFETY: as above.
        let (ours, set) = match unsafe { wait::asked(wait, set)? } {
            (WaitObj::None, _) => (WaitObj::Unspec, None),
            asked => asked,
        };
        let cntr = domain.domain.cntr_open(OurAttr { events, wait_obj: ours })?;
        let abi = FidCntr { fid: fid(FI_CLASS_CNTR, context, &FID), ops: &raw const OPS };
        let inner =
            Counter { cntr, wait_obj: wait, member: OnceLock::new(), polled: Arc::default() };
        // SAFETY: `out` can be written, and the object is fresh.
        unsafe {
            let at = CntrObject::open(abi, inner, out);
            let it = CntrObject::of(at)?;
            wait::join(set, at.cast(), || it.cntr.wait_fd(), &it.member)?;
        }
        Ok(())
    })
}

unsafe extern "C" fn close(at: *mut Fid) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to counters, and a program closes what it does not use.
        unsafe {
            let member = CntrObject::of(at.cast())?.member.get();
            wait::close(member, at, || CntrObject::close(at.cast(), Counter::end))
        }
    })
}

unsafe extern "C" fn control(at: *mut Fid, command: c_int, arg: *mut c_void) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to counters, and the command says what `arg` is.
        unsafe {
            let cntr = CntrObject::of(at.cast())?;
            wait::wait_control(command, arg, cntr.wait_obj, || cntr.cntr.wait_fd())
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
