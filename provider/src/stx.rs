//! Shared transmit contexts: what endpoints share are sends in flight, of which a domain has one
//! table, so a context is but a name.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use barewire::Error;

use crate::abi::*;
use crate::domain::DomainObject;
use crate::guard;
use crate::object::{Object, fid};

/// Held by the endpoints that are bound to it.
pub(crate) type StxObject = Object<FidStx, Arc<()>>;

static FID: FiOps = FiOps { close, ..FiOps::STUB };

static OPS: OpsEp = OpsEp::STUB;

/// `fi_stx_context`.
pub(crate) unsafe extern "C" fn open(
    domain: *mut FidDomain,
    _attr: *mut TxAttr,
    out: *mut *mut FidStx,
    context: *mut c_void,
) -> c_int {
    guard::int(|| {
        let abi = FidStx { fid: fid(FI_CLASS_STX_CTX, context, &FID), ops: &raw const OPS };
        // SAFETY: the table belongs to domains, and `out` can be written.
        unsafe {
            DomainObject::of(domain)?;
            StxObject::open(abi, Arc::new(()), out);
        }
        Ok(())
    })
}

unsafe extern "C" fn close(at: *mut Fid) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to contexts, and a program closes what it does not use.
        unsafe {
            StxObject::close(at.cast(), |users| {
                if Arc::strong_count(&users) > 1 { Err((Error::Busy, users)) } else { Ok(()) }
            })
        }
    })
}
