//! Domains.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use barewire::names::Names;
use barewire::raw::SerialPromise;
use barewire::{Error, TypedOp};

use crate::abi::*;
use crate::addr::Form;
use crate::eq::{BoundEqs, EqObject};
use crate::fabric::FabricObject;
use crate::object::{Object, class_of, fid};
use crate::{
    av, cntr, coll, cq, ep, guard, host, info, known_as, log, mr, poll, sep, srx, stx, work,
};

/// The object of a `struct fid_domain`.
pub(crate) struct Domain {
    pub(crate) domain: barewire::Domain,
    /// Format of its addresses.
    pub(crate) form: Form,
    /// Interface version of the program.
    pub(crate) api_version: u32,
    _fabric: Arc<()>,
    /// Held by objects that exist in this crate only: poll sets and shared transmit contexts.
    pub(crate) users: Arc<()>,
    eqs: BoundEqs,
}

impl Domain {
    /// How its port resolves host and service.
    pub(crate) fn names(&self) -> Names {
        Names::of(&self.domain.port().name)
    }
}

pub(crate) type DomainObject = Object<FidDomain, Domain>;

static FID: FiOps = FiOps { close, bind, control, ..FiOps::STUB };

static OPS: OpsDomain = OpsDomain {
    av_open: av::open,
    cq_open: cq::open,
    endpoint: ep::open,
    scalable_ep: sep::open,
    cntr_open: cntr::open,
    poll_open: poll::open,
    stx_ctx: stx::open,
    srx_ctx: srx::open,
    query_atomic,
    query_collective: coll::query,
    ..OpsDomain::STUB
};

/// `fi_domain`.
pub(crate) unsafe extern "C" fn open(
    fabric: *mut FidFabric,
    info: *mut FiInfo,
    out: *mut *mut FidDomain,
    context: *mut c_void,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to fabrics, and the info is whole.
        let (fabric, info) = unsafe { (FabricObject::of(fabric)?, info.as_ref()) };
        let info = info.ok_or(Error::Invalid("info: NULL"))?;
        log::start();
        let mut settings = known_as::settings_or_warn()?;
        // SAFETY: as above.
        let info::ParsedInfo { info: ours, form, .. } = unsafe {
            info::read(info, fabric.api_version, |port| info::names_on(port, &settings))?
        };
        // A `sockaddr_in` has no room for the incarnation.
        settings.by_name = form != Form::Native;
        // SAFETY: a program that asks for `FI_THREAD_DOMAIN` makes this promise by it.
        let promise = unsafe { SerialPromise::new() };
        let opened = fabric.fabric.domain_serial_with(&ours, settings, promise);
        let domain = opened.map_err(|e| {
            host::warn_on_stderr(&e.to_string());
            e.error
        })?;
        let abi = FidDomain {
            fid: fid(FI_CLASS_DOMAIN, context, &FID),
            ops: &raw const OPS,
            mr: &raw const mr::OPS,
        };
        let (api_version, _fabric) = (fabric.api_version, Arc::clone(&fabric.users));
        let inner = Domain {
            domain,
            form,
            api_version,
            _fabric,
            users: Arc::default(),
            eqs: BoundEqs::default(),
        };
        // SAFETY: `out` can be written.
        unsafe { DomainObject::open(abi, inner, out) };
        Ok(())
    })
}

unsafe extern "C" fn close(at: *mut Fid) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to domains, and a program closes what it does not use.
        unsafe {
            DomainObject::close(at.cast(), |it| {
                if Arc::strong_count(&it.users) > 1 {
                    return Err((Error::Busy, it));
                }
                let Domain { domain, form, api_version, _fabric, users, eqs } = it;
                domain.close().map_err(|(e, domain)| {
                    (e, Domain { domain, form, api_version, _fabric, users, eqs })
                })
            })
        }
    })
}

unsafe extern "C" fn bind(at: *mut Fid, other: *mut Fid, flags: u64) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to domains, and the class says what `other` is.
        unsafe {
            let domain = DomainObject::of(at.cast())?;
            if class_of(other)? != FI_CLASS_EQ {
                return Err(Error::Invalid("fid: a domain binds event queues"));
            }
            if flags != 0 {
                return Err(Error::BadFlags);
            }
            domain.eqs.bind(EqObject::of(other.cast())?, |eq| domain.domain.bind_eq(eq))
        }
    })
}

unsafe extern "C" fn control(at: *mut Fid, command: c_int, arg: *mut c_void) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to domains, and the command says what `arg` is.
        unsafe {
            let domain = DomainObject::of(at.cast::<FidDomain>())?;
            match command {
                FI_MAP_RAW_MR => mr::map_raw(arg.cast()),
                FI_UNMAP_KEY => Ok(()),
                FI_QUEUE_WORK => work::queue(domain, arg.cast()),
                FI_CANCEL_WORK => work::cancel(domain, arg.cast()),
                FI_FLUSH_WORK => work::flush(domain, arg.cast()),
                _ => Err(Error::NoSys),
            }
        }
    })
}

unsafe extern "C" fn query_atomic(
    at: *mut FidDomain,
    datatype: u32,
    op: u32,
    attr: *mut AtomicAttr,
    flags: u64,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to domains.
        let domain = unsafe { DomainObject::of(at)? };
        let limits = domain.domain.query_atomic(TypedOp { op, datatype }, flags)?;
        if attr.is_null() {
            return Err(Error::Invalid("attr: NULL"));
        }
        // SAFETY: `attr` can be written.
        unsafe { *attr = AtomicAttr { count: limits.count, size: limits.size } };
        Ok(())
    })
}
