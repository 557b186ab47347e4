//! Shared receive contexts: an endpoint that only receives, as in C.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use barewire::{Error, RxAttr as OurAttr};

use crate::abi::*;
use crate::domain::DomainObject;
use crate::ep::{Endpoint, EpObject, cancel, getopt, setopt};
use crate::object::fid;
use crate::{ep, guard, info, msg};

static FID: FiOps = FiOps { close, control, ..FiOps::STUB };

static OPS: OpsEp = OpsEp { cancel, getopt, setopt, ..OpsEp::STUB };

static CM: OpsCm = OpsCm::STUB;
static RMA: OpsRma = OpsRma::STUB;
static ATOMIC: OpsAtomic = OpsAtomic::STUB;
static COLLECTIVE: OpsCollective = OpsCollective::STUB;

/// `fi_srx_context`.
pub(crate) unsafe extern "C" fn open(
    domain: *mut FidDomain,
    attr: *mut RxAttr,
    out: *mut *mut FidEp,
    context: *mut c_void,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to domains; the attributes are there or NULL.
        let (domain, attr) = unsafe { (DomainObject::of(domain)?, attr.as_ref()) };
        let ours = attr.map_or_else(OurAttr::default, info::read_rx);
        let srx = domain.domain.raw_srx_context(&ours)?;
        let abi = FidEp {
            fid: fid(FI_CLASS_SRX_CTX, context, &FID),
            ops: &raw const OPS,
            cm: &raw const CM,
            msg: &raw const msg::untagged::OPS,
            rma: &raw const RMA,
            tagged: &raw const msg::tagged::OPS,
            atomic: &raw const ATOMIC,
            collective: &raw const COLLECTIVE,
        };
        let (form, request) = (domain.form, std::ptr::null_mut());
        let inner = Endpoint::new(srx, form, request);
        // SAFETY: `out` can be written.
        unsafe { EpObject::open(abi, inner, out) };
        Ok(())
    })
}

unsafe extern "C" fn close(at: *mut Fid) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to contexts, and a program closes what it does not use.
        unsafe {
            EpObject::close(at.cast(), |it| {
                let shared = Arc::strong_count(&it.ep) > 1;
                if shared { Err((Error::Busy, it)) } else { Ok(()) }
            })
        }
    })
}

unsafe extern "C" fn control(at: *mut Fid, command: c_int, arg: *mut c_void) -> c_int {
    // A shared context is always enabled, so enabling it is no error.
    if command == FI_ENABLE {
        return 0;
    }
    // SAFETY: the caller's promise is the same.
    unsafe { ep::control(at, command, arg) }
}
