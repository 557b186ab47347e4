//! Connections: passive endpoints, requests, and connection events (fi_cm(3)).

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use barewire::cm::CM_DATA_SIZE;
use barewire::{ConnRequest, EpAddr, Error, PassiveEndpoint, Result, opt};

use crate::abi::*;
use crate::addr::{Form, ParsedAddr};
use crate::av::put;
use crate::ep::{Endpoint, EpObject};
use crate::eq::{BoundEqs, EqObject};
use crate::fabric::FabricObject;
use crate::object::{Object, class_of, fid};
use crate::{guard, host, info, known_as, log};

/// The object of a `struct fid_pep`.
pub(crate) struct Passive {
    pep: PassiveEndpoint,
    /// The attributes that it was opened with, which its requests repeat.
    info: Box<barewire::Info>,
    form: Form,
    api_version: u32,
    _fabric: Arc<()>,
    eqs: BoundEqs,
}

type PepObject = Object<FidPep, Box<Passive>>;

/// `fi_info.handle` of a request: closed when it was accepted or refused.
type RequestObject = Object<Fid, ConnRequest>;

static FID: FiOps = FiOps { close, bind, control, ..FiOps::STUB };

static REQUEST_FID: FiOps = FiOps { close: close_request, ..FiOps::STUB };

static OPS: OpsEp = OpsEp { getopt, ..OpsEp::STUB };

static CM: OpsCm = OpsCm { getname, listen, reject, ..OpsCm::STUB };

/// `fi_passive_ep`.
pub(crate) unsafe extern "C" fn open(
    fabric: *mut FidFabric,
    info: *mut FiInfo,
    out: *mut *mut FidPep,
    context: *mut c_void,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to fabrics, and the info is whole.
        let (fabric, info) = unsafe { (FabricObject::of(fabric)?, info.as_ref()) };
        let info = info.ok_or(Error::Invalid("info: NULL"))?;
        log::start();
        let mut settings = known_as::settings_or_warn()?;
        // SAFETY: as above.
        let info::ParsedInfo { info: mut ours, form, .. } = unsafe {
            info::read(info, fabric.api_version, |port| info::names_on(port, &settings))?
        };
        let told = ours.clone();
        settings.by_name = form != Form::Native;
        let names = info::names_on(ours.domain_attr.name.as_deref(), &settings);
        let mut why = None;
        let pep = form.open(&mut ours, names, |ours| {
            let opened = fabric.fabric.passive_ep(ours, settings.clone());
            opened.map_err(|e| why.insert(e).error)
        });
        let pep = pep.inspect_err(|_| {
            why.iter().for_each(|why| host::warn_on_stderr(&why.to_string()));
        })?;
        let abi = FidPep {
            fid: fid(FI_CLASS_PEP, context, &FID),
            ops: &raw const OPS,
            cm: &raw const CM,
        };
        let (api_version, _fabric) = (fabric.api_version, Arc::clone(&fabric.users));
        let inner = Box::new(Passive {
            pep,
            info: Box::new(told),
            form,
            api_version,
            _fabric,
            eqs: BoundEqs::default(),
        });
        // SAFETY: `out` can be written.
        unsafe {
            let at = PepObject::open(abi, inner, out);
            PepObject::of(at)?.pep.set_fid(at.expose_provenance() as u64);
        }
        Ok(())
    })
}

unsafe extern "C" fn close(at: *mut Fid) -> c_int {
    // SAFETY: the table belongs to passive endpoints, and a program closes what it does not use.
    guard::int(|| unsafe {
        PepObject::close(at.cast(), |it| {
            it.end();
            Ok(())
        })
    })
}

impl Passive {
    /// Closes it, and frees the `fi_info` of each request that was peeked at but not read.
    fn end(self) {
        for seen in self.pep.close() {
            let info: *mut FiInfo = std::ptr::with_exposed_provenance_mut(seen.info as usize);
            // SAFETY: `request_info` made both, and the queue has lost them with the event. Whoever
            // answers a request closes its handle.
            unsafe {
                if !seen.answered {
                    let _ = RequestObject::close((*info).handle, |_| Ok(()));
                }
                info::free_list(info);
            }
        }
    }
}

unsafe extern "C" fn close_request(at: *mut Fid) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to requests, and a program closes what it does not use.
        unsafe {
            RequestObject::close(at, |request| {
                // The request may have been answered.
                let _ = request.refuse();
                Ok(())
            })
        }
    })
}

/// Closes the request that `it` was opened with. An unanswered request is rejected.
///
/// # Safety
/// The request was open when the endpoint was opened.
pub(crate) unsafe fn end_request(it: &Endpoint) {
    if it.ep.refuse_request() {
        // SAFETY: the caller's promise, and whoever closes a request answers it: so it is open.
        let _ = unsafe { RequestObject::close(it.request, |_| Ok(())) };
    }
}

unsafe extern "C" fn bind(at: *mut Fid, other: *mut Fid, flags: u64) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to passive endpoints, and the class says what `other` is.
        unsafe {
            let it = PepObject::of(at.cast::<FidPep>())?;
            if class_of(other)? != FI_CLASS_EQ {
                return Err(Error::Invalid("fid: a passive endpoint binds event queues"));
            }
            if flags != 0 {
                return Err(Error::BadFlags);
            }
            it.eqs.bind(EqObject::of(other.cast())?, |eq| it.pep.bind_eq(eq))
        }
    })
}

/// The size of the event queue limits waiting requests; `FI_BACKLOG` is accepted and ignored.
unsafe extern "C" fn control(at: *mut Fid, command: c_int, arg: *mut c_void) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to passive endpoints; the command takes a place of an `int`.
        unsafe {
            PepObject::of(at.cast::<FidPep>())?;
            match (command, arg.cast::<c_int>().as_ref()) {
                (FI_BACKLOG, Some(0..)) => Ok(()),
                (FI_BACKLOG, _) => Err(Error::Invalid("arg: NULL, or a negative backlog")),
                _ => Err(Error::NoSys),
            }
        }
    })
}

unsafe extern "C" fn getopt(
    at: *mut Fid,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut usize,
) -> c_int {
    guard::int(|| {
        if level != FI_OPT_ENDPOINT || name != opt::FI_OPT_CM_DATA_SIZE {
            return Err(Error::NoProtoOpt);
        }
        // SAFETY: the table belongs to passive endpoints; `value` has `*len` bytes.
        let fits = unsafe {
            PepObject::of(at.cast::<FidPep>())?;
            put(&CM_DATA_SIZE.to_ne_bytes(), value, len)?
        };
        if fits { Ok(()) } else { Err(Error::TooSmall) }
    })
}

unsafe extern "C" fn getname(at: *mut Fid, to: *mut c_void, len: *mut usize) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to passive endpoints; `to` has `*len` bytes.
        unsafe {
            let it = PepObject::of(at.cast::<FidPep>())?;
            put_name(it.form, it.pep.getname()?, to, len)
        }
    })
}

/// # Safety
/// `to` has `*len` bytes.
pub(crate) unsafe fn put_name(
    form: Form,
    name: EpAddr,
    to: *mut c_void,
    len: *mut usize,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let fits = unsafe { put(&form.write(name), to, len)? };
    if fits { Ok(()) } else { Err(Error::TooSmall) }
}

unsafe extern "C" fn listen(at: *mut FidPep) -> c_int {
    // SAFETY: the table belongs to passive endpoints.
    guard::int(|| unsafe { PepObject::of(at)?.pep.listen() })
}

unsafe extern "C" fn reject(
    at: *mut FidPep,
    handle: *mut Fid,
    param: *const c_void,
    len: usize,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to passive endpoints; the handle came from `request_info`, and
        // `param` has `len` bytes.
        unsafe {
            let pep = &PepObject::of(at)?.pep;
            let request = request_of(handle)?.ok_or(Error::Invalid("handle: NULL"))?;
            pep.reject(&request, bytes(param, len))?;
            RequestObject::close(handle, |_| Ok(()))
        }
    })
}

/// # Safety
/// `len` bytes are at `at`, or it is NULL.
unsafe fn bytes<'a>(at: *const c_void, len: usize) -> &'a [u8] {
    if at.is_null() || len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(at.cast(), len) }
}

/// The request that a `fi_info.handle` names; `None` for NULL and for a passive endpoint, which
/// `fi_getinfo` copies from its hints.
///
/// # Errors
/// [`Error::Invalid`]: the handle is another object. [`Error::BadFd`]: the request was already
/// answered.
///
/// # Safety
/// `handle` is NULL or an object of libfabric's.
pub(crate) unsafe fn request_of(handle: *mut Fid) -> Result<Option<ConnRequest>> {
    if handle.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise; the class says what is behind it.
    unsafe {
        match class_of(handle)? {
            FI_CLASS_CONNREQ => RequestObject::of(handle).cloned().map(Some),
            FI_CLASS_PEP => Ok(None),
            FI_CLASS_UNSPEC => Err(Error::BadFd),
            _ => Err(Error::Invalid("handle: not a connection request")),
        }
    }
}

/// The `fi_info` of an `FI_CONNREQ` of the passive endpoint `at`: its attributes, the address of
/// the peer, and the request as the handle.
///
/// # Safety
/// `at` came from [`open`].
pub(crate) unsafe fn request_info(at: *mut FidPep, request: ConnRequest) -> Result<*mut FiInfo> {
    // SAFETY: the caller's promise.
    let it = unsafe { PepObject::of(at)? };
    let mut told = barewire::Info::clone(&it.info);
    told.src_addr = None;
    told.dest_addr = Some(request.peer().to_bytes().to_vec());
    let c = info::whole(&told, it.form, it.api_version)?;
    let mut handle = std::ptr::null_mut();
    let abi = fid(FI_CLASS_CONNREQ, std::ptr::null_mut(), &REQUEST_FID);
    // SAFETY: both are fresh structures of ours.
    unsafe {
        RequestObject::open(abi, request, &mut handle);
        (*c).handle = handle;
    }
    Ok(c)
}

pub(crate) unsafe extern "C" fn connect(
    at: *mut FidEp,
    to: *const c_void,
    param: *const c_void,
    len: usize,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to endpoints; `to` is an address in the form of the domain, and
        // `param` has `len` bytes.
        unsafe {
            let it = EpObject::of(at)?;
            if to.is_null() {
                return Err(Error::Invalid("addr: NULL"));
            }
            let to = std::slice::from_raw_parts(to.cast::<u8>(), it.form.len());
            let to = match it.form.read(to)? {
                ParsedAddr::Addr(addr) => addr,
                ParsedAddr::Host(ip, service) => it.ep.find_host(ip, service)?,
            };
            it.whole().connect(to, bytes(param, len))
        }
    })
}

pub(crate) unsafe extern "C" fn accept(at: *mut FidEp, param: *const c_void, len: usize) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to endpoints; `param` has `len` bytes.
        unsafe {
            let it = EpObject::of(at)?;
            it.whole().accept(bytes(param, len))?;
            // The request was open until now: an answered or closed request is not accepted.
            RequestObject::close(it.request, |_| Ok(()))
        }
    })
}

pub(crate) unsafe extern "C" fn shutdown(at: *mut FidEp, flags: u64) -> c_int {
    guard::int(|| {
        if flags != 0 {
            return Err(Error::BadFlags);
        }
        // SAFETY: the table belongs to endpoints.
        unsafe { EpObject::of(at)?.whole().shutdown() }
    })
}

pub(crate) unsafe extern "C" fn getpeer(at: *mut FidEp, to: *mut c_void, len: *mut usize) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to endpoints; `to` has `*len` bytes.
        unsafe {
            let it = EpObject::of(at)?;
            put_name(it.form, it.whole().getpeer()?, to, len)
        }
    })
}
