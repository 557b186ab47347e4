//! Endpoints: open, bind, options, aliases, addresses and close.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, OnceLock};

use barewire::flags::{BindFlags, OpFlags};
use barewire::info::MAX_MSG_SIZE;
use barewire::raw::RawEndpoint;
use barewire::{EpType, Error, Info, Result, opt};

use crate::abi::*;
use crate::addr::Form;
use crate::av::{AvObject, put};
use crate::cntr::CntrObject;
use crate::cq::CqObject;
use crate::domain::{Domain, DomainObject};
use crate::eq::{BoundEqs, EqObject};
use crate::object::{Object, class_of, fid};
use crate::stx::StxObject;
use crate::{atomic, coll, guard, info, msg, pep, rma, work};

/// The object of a `struct fid_ep`.
pub(crate) struct Endpoint {
    pub(crate) ep: Arc<RawEndpoint>,
    /// The endpoint that it is an alias of, which has the connection.
    whole: Option<Arc<RawEndpoint>>,
    /// Held by the endpoint and its aliases.
    names: Arc<()>,
    pub(crate) form: Form,
    /// The connection request that it was opened with, or NULL.
    pub(crate) request: *mut Fid,
    /// It is bound to a shared transmit context.
    pub(crate) stx: OnceLock<()>,
    /// Those of its aliases too.
    pub(crate) eqs: Arc<BoundEqs>,
}

impl Endpoint {
    /// `request` is the connection request that it is opened with, or NULL.
    pub(crate) fn new(ep: RawEndpoint, form: Form, request: *mut Fid) -> Self {
        Self {
            ep: Arc::new(ep),
            whole: None,
            names: Arc::default(),
            form,
            request,
            stx: OnceLock::new(),
            eqs: Arc::default(),
        }
    }

    /// The endpoint that has the connection: itself, or the endpoint that it is an alias of.
    pub(crate) fn whole(&self) -> &Arc<RawEndpoint> {
        self.whole.as_ref().unwrap_or(&self.ep)
    }

    /// Waits for injected messages. With the last alias the connection ends before.
    fn end(self) {
        if Arc::into_inner(self.names).is_some() {
            self.whole.as_ref().unwrap_or(&self.ep).end_connection();
        }
        self.ep.linger();
    }
}

pub(crate) type EpObject = Object<FidEp, Endpoint>;

/// Defines functions of an endpoint's table, in C's calling convention: the arguments after the
/// endpoint, and the call that they become.
macro_rules! entries {
    ($(
        $(#[$attr:meta])*
        $name:ident($($arg:ident: $ty:ty),* $(,)?) |$ep:ident| $call:expr;
    )*) => {$(
        $(#[$attr])*
        unsafe extern "C" fn $name(at: *mut FidEp, $($arg: $ty),*) -> isize {
            // SAFETY: the table belongs to endpoints, and what the arguments name is there and lent
            // as the manual page of the call says, which is the promise of the raw API.
            crate::guard::call(|| unsafe {
                let $ep = &*crate::ep::EpObject::of(at)?.ep;
                $call
            })
        }
    )*};
}

pub(crate) use entries;

static FID: FiOps = FiOps { close, bind, control, ..FiOps::STUB };

static OPS: OpsEp = OpsEp { cancel, getopt, setopt, ..OpsEp::STUB };

pub(crate) static CM: OpsCm = OpsCm { setname, getname, join: coll::join, ..OpsCm::STUB };

/// The table of connected endpoints.
static CM_MSG: OpsCm = OpsCm {
    getpeer: pep::getpeer,
    connect: pep::connect,
    accept: pep::accept,
    shutdown: pep::shutdown,
    ..CM
};

/// `fi_endpoint`.
pub(crate) unsafe extern "C" fn open(
    domain: *mut FidDomain,
    info: *mut FiInfo,
    out: *mut *mut FidEp,
    context: *mut c_void,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to domains, and the info is whole or NULL.
        let (domain, mut ours, request) = unsafe {
            let domain = DomainObject::of(domain)?;
            let ours = wanted(info.as_ref(), domain)?;
            (domain, ours, (*info).handle)
        };
        let connected = ours.ep_attr.ep_type == EpType::Msg;
        let ep = domain.form.open(&mut ours, domain.names(), |ours| {
            domain.domain.raw_endpoint(ours).map_err(taken_label)
        })?;
        ep.set_condition_reader(work::condition_of);
        let abi = tables(FI_CLASS_EP, if connected { &CM_MSG } else { &CM }, context);
        let form = domain.form;
        let inner = Endpoint::new(ep, form, request);
        // SAFETY: `out` can be written.
        unsafe {
            let at = EpObject::open(abi, inner, out);
            EpObject::of(at)?.ep.set_fid(at.expose_provenance() as u64);
        }
        Ok(())
    })
}

/// The attributes of a new endpoint.
///
/// # Errors
/// [`Error::Invalid`]: the info is NULL.
///
/// # Safety
/// The info is whole.
pub(crate) unsafe fn wanted(info: Option<&FiInfo>, domain: &Domain) -> Result<Info> {
    let info = info.ok_or(Error::Invalid("info: NULL"))?;
    // SAFETY: the caller's promise.
    let read = unsafe { info::read(info, domain.api_version, |_| domain.names())? };
    let mut ours = read.info;
    if ours.ep_attr.max_msg_size > MAX_MSG_SIZE {
        return Err(Error::Invalid("info: beyond what is offered"));
    }
    // The provider requires no modes, so those of the program are ignored.
    ours.mode = barewire::flags::Mode::empty();
    // SAFETY: the handle is NULL or an object of libfabric's.
    ours.handle = unsafe { pep::request_of(info.handle)? };
    let (tx_size, rx_size) = domain.domain.usual_sizes();
    let usual = |size: &mut usize, usual| *size = if *size == 0 { usual } else { *size };
    usual(&mut ours.tx_attr.size, tx_size);
    usual(&mut ours.rx_attr.size, rx_size);
    // Attributes of the answer that the program may have changed are not requests.
    ours.ep_attr.max_msg_size = 0;
    // SAFETY: the caller's promise.
    if unsafe { info::wants(Some(info), FI_EP_DGRAM) } {
        ours.ep_attr.max_msg_size = info::DGRAM_MAX as u64;
    }
    Ok(ours)
}

/// The error of an address with another MAC than the port's: the domain did not get the label,
/// since another domain has it.
pub(crate) fn taken_label(e: Error) -> Error {
    if e == Error::AddrNotAvail { Error::AddrInUse } else { e }
}

/// An endpoint with all its tables.
pub(crate) fn tables(class: usize, cm: &'static OpsCm, context: *mut c_void) -> FidEp {
    FidEp {
        fid: fid(class, context, &FID),
        ops: &raw const OPS,
        cm: &raw const *cm,
        msg: &raw const msg::untagged::OPS,
        rma: &raw const rma::OPS,
        tagged: &raw const msg::tagged::OPS,
        atomic: &raw const atomic::OPS,
        collective: &raw const coll::OPS,
    }
}

/// `fi_ep_alias`.
///
/// # Safety
/// `at` is an endpoint, and `said` whole or NULL.
unsafe fn alias(at: *mut Fid, said: *const Alias) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let said = said.as_ref().ok_or(Error::Invalid("alias: NULL"))?;
        let it = EpObject::of(at.cast::<FidEp>())?;
        let (flags, recv) = directed(said.flags)?;
        let ep = Arc::new(it.ep.alias(flags, recv)?);
        let inner = Endpoint {
            ep,
            whole: Some(Arc::clone(it.whole())),
            names: Arc::clone(&it.names),
            form: it.form,
            request: it.request,
            stx: it.stx.clone(),
            eqs: Arc::clone(&it.eqs),
        };
        // Only its default flags differ.
        EpObject::open(*at.cast::<FidEp>(), inner, said.fid.cast());
    }
    Ok(())
}

unsafe extern "C" fn close(at: *mut Fid) -> c_int {
    // SAFETY: the table belongs to endpoints, and a program closes what it does not use.
    guard::int(|| unsafe {
        EpObject::close(at.cast(), |it| {
            pep::end_request(&it);
            it.end();
            Ok(())
        })
    })
}

unsafe extern "C" fn bind(at: *mut Fid, other: *mut Fid, flags: u64) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to endpoints, and the class says what `other` is.
        unsafe {
            let it = EpObject::of(at.cast::<FidEp>())?;
            let ep = &it.ep;
            let bind = BindFlags::from_bits(flags).ok_or(Error::BadFlags);
            match class_of(other)? {
                FI_CLASS_CQ => ep.bind_cq(&CqObject::of(other.cast())?.cq, bind?),
                FI_CLASS_CNTR => ep.bind_cntr(&CntrObject::of(other.cast())?.cntr, bind?),
                FI_CLASS_AV => ep.bind_av(&AvObject::of(other.cast())?.av),
                FI_CLASS_EQ => it.eqs.bind(EqObject::of(other.cast())?, |eq| ep.bind_eq(eq)),
                FI_CLASS_STX_CTX => {
                    StxObject::of(other.cast())?;
                    it.stx.set(()).map_err(|_| Error::Invalid("fid: a context is bound"))
                }
                FI_CLASS_SRX_CTX => ep.bind_srx(&EpObject::of(other.cast())?.ep),
                _ => Err(Error::Invalid("fid: cannot be bound to an endpoint")),
            }
        }
    })
}

pub(crate) unsafe extern "C" fn control(at: *mut Fid, command: c_int, arg: *mut c_void) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to endpoints, and the command says what `arg` is.
        unsafe {
            let ep = &EpObject::of(at.cast::<FidEp>())?.ep;
            match command {
                FI_ENABLE => ep.enable(),
                FI_GETOPSFLAG | FI_SETOPSFLAG if arg.is_null() => Err(Error::Invalid("arg: NULL")),
                FI_GETOPSFLAG => ops_flags(ep, &mut *arg.cast()),
                FI_SETOPSFLAG => set_ops_flags(ep, *arg.cast()),
                FI_ALIAS => alias(at, arg.cast()),
                _ => Err(Error::NoSys),
            }
        }
    })
}

/// `FI_GETOPSFLAG`: the flags word names a direction and gets its default flags.
fn ops_flags(ep: &RawEndpoint, word: &mut u64) -> Result<()> {
    *word = match *word & (FI_TRANSMIT | FI_RECV) {
        FI_TRANSMIT => ep.tx_op_flags().bits(),
        FI_RECV => ep.rx_op_flags().bits(),
        _ => return Err(Error::Invalid("flags: FI_TRANSMIT or FI_RECV")),
    };
    Ok(())
}

fn set_ops_flags(ep: &RawEndpoint, word: u64) -> Result<()> {
    match directed(word)? {
        (flags, false) => ep.set_tx_op_flags(flags),
        (flags, true) => ep.set_rx_op_flags(flags),
    }
}

/// A word of flags, and whether it is for receives.
fn directed(word: u64) -> Result<(OpFlags, bool)> {
    let flags = OpFlags::from_bits(word & !(FI_TRANSMIT | FI_RECV)).ok_or(Error::BadFlags)?;
    match word & (FI_TRANSMIT | FI_RECV) {
        FI_TRANSMIT => Ok((flags, false)),
        FI_RECV => Ok((flags, true)),
        _ => Err(Error::Invalid("flags: FI_TRANSMIT or FI_RECV")),
    }
}

pub(crate) unsafe extern "C" fn cancel(at: *mut Fid, context: *mut c_void) -> isize {
    // SAFETY: the table belongs to endpoints.
    guard::call(|| unsafe { EpObject::of(at.cast::<FidEp>())?.ep.cancel(number(context)) })
}

/// A context pointer as a number.
#[inline]
pub(crate) fn number(context: *mut c_void) -> u64 {
    context.expose_provenance() as u64
}

/// Options whose value is a C `bool` or `int`; the others are `size_t`.
fn option_len(name: c_int) -> usize {
    match name {
        opt::FI_OPT_CUDA_API_PERMITTED | opt::FI_OPT_SHARED_MEMORY_PERMITTED => size_of::<bool>(),
        _ => size_of::<usize>(),
    }
}

pub(crate) unsafe extern "C" fn getopt(
    at: *mut Fid,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut usize,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to endpoints; `value` has `*len` bytes.
        unsafe {
            let ep = &EpObject::of(at.cast::<FidEp>())?.ep;
            if level != FI_OPT_ENDPOINT {
                return Err(Error::NoProtoOpt);
            }
            let bytes = ep.getopt(name)?.to_ne_bytes();
            // On little-endian machines a small number is its first byte.
            let fits = put(&bytes[..option_len(name)], value, len)?;
            if fits { Ok(()) } else { Err(Error::TooSmall) }
        }
    })
}

pub(crate) unsafe extern "C" fn setopt(
    at: *mut Fid,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: usize,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to endpoints; `value` has `len` bytes.
        unsafe {
            let ep = &EpObject::of(at.cast::<FidEp>())?.ep;
            if level != FI_OPT_ENDPOINT {
                return Err(Error::NoProtoOpt);
            }
            let want = option_len(name);
            let mut bytes = [0; size_of::<usize>()];
            if !value.is_null() && len >= want {
                std::ptr::copy_nonoverlapping(value.cast(), bytes.as_mut_ptr(), want);
                return ep.setopt(name, usize::from_ne_bytes(bytes));
            }
            // An unknown option is reported before a wrong length.
            ep.getopt(name)?;
            Err(Error::Invalid("optlen"))
        }
    })
}

unsafe extern "C" fn setname(at: *mut Fid, addr: *mut c_void, len: usize) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to endpoints; `addr` has `len` bytes.
        unsafe {
            let it = EpObject::of(at.cast::<FidEp>())?;
            if addr.is_null() || len != it.form.len() {
                return Err(Error::Invalid("addrlen: not the length of an address"));
            }
            // A wildcard address means its own number.
            let bytes = std::slice::from_raw_parts(addr.cast::<u8>(), len);
            it.form.read(bytes)?;
            match it.form.read_own(bytes).map_err(|_| Error::AddrNotAvail)? {
                None => Ok(()),
                Some(native) => it.ep.setname_bytes(&native),
            }
        }
    })
}

unsafe extern "C" fn getname(at: *mut Fid, addr: *mut c_void, len: *mut usize) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to endpoints; `addr` has `*len` bytes.
        unsafe {
            let it = EpObject::of(at.cast::<FidEp>())?;
            pep::put_name(it.form, it.ep.getname()?, addr, len)
        }
    })
}
