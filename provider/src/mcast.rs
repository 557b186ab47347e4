//! Multicast groups: `fi_join` without `FI_COLLECTIVE`.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use barewire::{Error, FI_ADDR_NOTAVAIL, Group, Result};

use crate::abi::*;
use crate::ep::{EpObject, number};
use crate::guard;
use crate::object::{Object, fid};

type GroupObject = Object<FidMc, OnceLock<Group>>;

static FID: FiOps = FiOps { close, ..FiOps::STUB };

/// Joins the group that `addr` names in the form of the endpoint's addresses.
///
/// # Safety
/// `at` is an endpoint, `addr` an address or NULL, and `out` can be written.
pub(crate) unsafe fn join(
    at: *mut FidEp,
    addr: *const c_void,
    flags: u64,
    out: *mut *mut FidMc,
    context: *mut c_void,
) -> Result<()> {
    if addr.is_null() {
        return Err(Error::Invalid("addr: NULL"));
    }
    // SAFETY: the caller's promise; an address of a form has its length.
    let (ep, group) = unsafe {
        let ep = EpObject::of(at)?;
        (ep, ep.form.read_group(std::slice::from_raw_parts(addr.cast(), ep.form.len()))?)
    };
    let abi = FidMc { fid: fid(FI_CLASS_MC, context, &FID), fi_addr: FI_ADDR_NOTAVAIL };
    let mut made = std::ptr::null_mut();
    // SAFETY: `made` and `out` can be written, and nobody else has the object yet.
    unsafe {
        let mc = GroupObject::open(abi, OnceLock::new(), &mut made);
        let name = mc.expose_provenance() as u64;
        let joined = ep.ep.join_named(group, flags, number(context), |addr| {
            (*mc).fi_addr = addr;
            Some(name)
        });
        match joined {
            Ok(joined) => {
                // The first and only one.
                let _ = GroupObject::of(mc)?.set(joined);
                *out = mc;
                Ok(())
            }
            Err(e) => {
                GroupObject::close(mc, |_| Ok(()))?;
                Err(e)
            }
        }
    }
}

unsafe extern "C" fn close(at: *mut Fid) -> c_int {
    // SAFETY: the table belongs to groups, and a program closes what it does not use.
    guard::int(|| unsafe { GroupObject::close(at.cast(), |_| Ok(())) })
}
