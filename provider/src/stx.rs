//! Shared transmit contexts. Endpoints would share the table of sends in flight, which a domain has
//! once anyway, so a context has no state. It may be closed before the endpoints that are bound to
//! it, as Sandia OpenSHMEM does.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::abi::*;
use crate::domain::DomainObject;
use crate::object::{Object, fid};
use crate::{guard, info};

pub(crate) type StxObject = Object<FidStx, Arc<()>>;

static FID: FiOps = FiOps { close, ..FiOps::STUB };

static OPS: OpsEp = OpsEp::STUB;

/// `fi_stx_context`.
pub(crate) unsafe extern "C" fn open(
    domain: *mut FidDomain,
    attr: *mut TxAttr,
    out: *mut *mut FidStx,
    context: *mut c_void,
) -> c_int {
    guard::int(|| {
        let abi = FidStx { fid: fid(FI_CLASS_STX_CTX, context, &FID), ops: &raw const OPS };
        // SAFETY: the table belongs to domains, the attributes are there or NULL, and `out` can be
        // written.
        unsafe {
            let domain = DomainObject::of(domain)?;
            if let Some(attr) = attr.as_ref() {
                domain.domain.check_tx_attr(&info::read_tx(attr))?;
            }
            StxObject::open(abi, Arc::clone(&domain.users), out);
        }
        Ok(())
    })
}

unsafe extern "C" fn close(at: *mut Fid) -> c_int {
    // SAFETY: the table belongs to contexts, and a program closes what it does not use.
    guard::int(|| unsafe { StxObject::close(at.cast(), |_| Ok(())) })
}
