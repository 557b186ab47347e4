//! The fabric object.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use barewire::{Error, FabricAttr as OurAttr, Result, Waitable};

use crate::abi::*;
use crate::cntr::CntrObject;
use crate::cq::CqObject;
use crate::eq::EqObject;
use crate::object::{Object, class_of, fid};
use crate::wait::WaitObject;
use crate::{domain, eq, guard, pep, wait};

/// The object of a `struct fid_fabric`.
pub(crate) struct Fabric {
    pub(crate) fabric: barewire::Fabric,
    /// Interface version of the program.
    pub(crate) api_version: u32,
    /// Held by all objects that are opened in the fabric.
    pub(crate) users: Arc<()>,
}

pub(crate) type FabricObject = Object<FidFabric, Fabric>;

static FID: FiOps = FiOps { close, ..FiOps::STUB };

static OPS: OpsFabric = OpsFabric {
    domain: domain::open,
    passive_ep: pep::open,
    eq_open: eq::open,
    wait_open: wait::open,
    trywait,
    ..OpsFabric::STUB
};

/// `fi_provider.fabric`.
pub(crate) unsafe extern "C" fn open(
    attr: *mut FabricAttr,
    out: *mut *mut FidFabric,
    context: *mut c_void,
) -> c_int {
    guard::int(|| {
        // SAFETY: libfabric passes attributes of its own layout.
        let attr = unsafe { attr.as_ref() }.ok_or(Error::Invalid("attr: NULL"))?;
        // SAFETY: its name is a string or NULL.
        let name = unsafe { guard::text(attr.name)? }.map(str::to_owned);
        let api_version = attr.api_version;
        let ours = OurAttr { name, api_version, ..OurAttr::default() };
        let fabric = barewire::fabric(&ours)?;
        let abi = FidFabric {
            fid: fid(FI_CLASS_FABRIC, context, &FID),
            ops: &raw const OPS,
            api_version,
        };
        let inner = Fabric { fabric, api_version, users: Arc::new(()) };
        // SAFETY: `out` can be written.
        unsafe { FabricObject::open(abi, inner, out) };
        Ok(())
    })
}

unsafe extern "C" fn close(at: *mut Fid) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to fabrics, and a program closes what it does not use.
        unsafe {
            FabricObject::close(at.cast(), |fabric| {
                let busy = Arc::strong_count(&fabric.users) > 1;
                if busy { Err((Error::Busy, fabric)) } else { Ok(()) }
            })
        }
    })
}

unsafe extern "C" fn trywait(at: *mut FidFabric, fids: *mut *mut Fid, count: c_int) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to fabrics.
        let fabric = unsafe { FabricObject::of(at)? };
        for i in 0..usize::try_from(count).map_err(|_| Error::Invalid("count"))? {
            // SAFETY: `count` objects are listed.
            unsafe { one(fabric, *fids.add(i))? };
        }
        Ok(())
    })
}

/// # Safety
/// `at` is an object of libfabric.
pub(crate) unsafe fn one(fabric: &Fabric, at: *mut Fid) -> Result<()> {
    // SAFETY: the class says what is behind it, for each of the four.
    unsafe {
        match class_of(at)? {
            FI_CLASS_CQ => {
                let cq = CqObject::of(at.cast())?;
                fabric.fabric.trywait(&[Waitable::RawCq(&cq.cq)])
            }
            FI_CLASS_CNTR => {
                let cntr = CntrObject::of(at.cast())?;
                fabric.fabric.trywait(&[Waitable::Cntr(&cntr.cntr)])
            }
            FI_CLASS_EQ => {
                let eq = EqObject::of(at.cast())?;
                fabric.fabric.trywait(&[Waitable::Eq(&eq.eq)])
            }
            FI_CLASS_WAIT => WaitObject::of(at.cast())?.trywait(),
            _ => Err(Error::Invalid("fid: cannot be waited for")),
        }
    }
}
