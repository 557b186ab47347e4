//! Scalable endpoints. A context is an endpoint, as in C; the scalable endpoint itself has an
//! address and no data calls.

use std::ffi::{c_int, c_void};

use barewire::raw::RawEndpoint;
use barewire::{Error, Result, ScalableEndpoint};

use crate::abi::*;
use crate::addr::Form;
use crate::av::AvObject;
use crate::domain::DomainObject;
use crate::ep::{self, Endpoint, EpObject};
use crate::eq::{BoundEqs, EqObject};
use crate::object::{Object, class_of, fid};
use crate::{guard, info, pep, work};

/// The object of a `struct fid_ep` of class `FI_CLASS_SEP`.
pub(crate) struct Scalable {
    pub(crate) sep: ScalableEndpoint,
    form: Form,
    eqs: BoundEqs,
}

pub(crate) type SepObject = Object<FidEp, Scalable>;

static FID: FiOps = FiOps { close, bind, control, ..FiOps::STUB };

static OPS: OpsEp = OpsEp { tx_ctx, rx_ctx, ..OpsEp::STUB };

static CM: OpsCm = OpsCm { getname, ..OpsCm::STUB };
static MSG: OpsMsg = OpsMsg::STUB;
static RMA: OpsRma = OpsRma::STUB;
static TAGGED: OpsTagged = OpsTagged::STUB;
static ATOMIC: OpsAtomic = OpsAtomic::STUB;
static COLLECTIVE: OpsCollective = OpsCollective::STUB;

/// `fi_scalable_ep`.
pub(crate) unsafe extern "C" fn open(
    domain: *mut FidDomain,
    info: *mut FiInfo,
    out: *mut *mut FidEp,
    context: *mut c_void,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to domains, and the info is whole.
        let (domain, mut ours) = unsafe {
            let domain = DomainObject::of(domain)?;
            (domain, ep::wanted(info.as_ref(), domain)?)
        };
        let sep = domain.form.open(&mut ours, domain.names(), |ours| {
            domain.domain.scalable_endpoint(ours).map_err(ep::taken_label)
        })?;
        let abi = FidEp {
            fid: fid(FI_CLASS_SEP, context, &FID),
            ops: &raw const OPS,
            cm: &raw const CM,
            msg: &raw const MSG,
            rma: &raw const RMA,
            tagged: &raw const TAGGED,
            atomic: &raw const ATOMIC,
            collective: &raw const COLLECTIVE,
        };
        // SAFETY: `out` can be written.
        unsafe {
            SepObject::open(abi, Scalable { sep, form: domain.form, eqs: BoundEqs::default() }, out)
        };
        Ok(())
    })
}

unsafe extern "C" fn close(at: *mut Fid) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to scalable endpoints, and a program closes what it does not
        // use.
        unsafe {
            SepObject::close(at.cast(), |Scalable { sep, form, eqs }| {
                sep.close().map_err(|(e, sep)| (e, Scalable { sep, form, eqs }))
            })
        }
    })
}

unsafe extern "C" fn bind(at: *mut Fid, other: *mut Fid, flags: u64) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to scalable endpoints, and the class says what `other` is.
        unsafe {
            let it = SepObject::of(at.cast::<FidEp>())?;
            let sep = &it.sep;
            let class = class_of(other)?;
            if flags != 0 {
                return Err(Error::BadFlags);
            }
            match class {
                FI_CLASS_AV => sep.bind_av(&AvObject::of(other.cast())?.av),
                FI_CLASS_EQ => it.eqs.bind(EqObject::of(other.cast())?, |eq| sep.bind_eq(eq)),
                _ => Err(Error::Invalid("fid: bind it to the contexts")),
            }
        }
    })
}

unsafe extern "C" fn control(at: *mut Fid, command: c_int, _arg: *mut c_void) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to scalable endpoints.
        let it = unsafe { SepObject::of(at.cast::<FidEp>())? };
        if command == FI_ENABLE { it.sep.enable() } else { Err(Error::NoSys) }
    })
}

unsafe extern "C" fn getname(at: *mut Fid, addr: *mut c_void, len: *mut usize) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to scalable endpoints; `addr` has `*len` bytes.
        unsafe {
            let it = SepObject::of(at.cast::<FidEp>())?;
            pep::put_name(it.form, it.sep.getname()?, addr, len)
        }
    })
}

/// # Errors
/// [`Error::Invalid`]: no such context.
fn index(index: c_int) -> Result<usize> {
    usize::try_from(index).map_err(|_| Error::Invalid("index"))
}

/// Returns a context to C.
///
/// # Safety
/// `out` can be written.
unsafe fn hand_out(
    it: &Scalable,
    made: RawEndpoint,
    class: usize,
    out: *mut *mut FidEp,
    context: *mut c_void,
) {
    made.set_condition_reader(work::condition_of);
    let (form, request) = (it.form, std::ptr::null_mut());
    let inner = Endpoint::new(made, form, request);
    // SAFETY: the caller's promise.
    unsafe { EpObject::open(ep::tables(class, &ep::CM, context), inner, out) };
}

unsafe extern "C" fn tx_ctx(
    at: *mut FidEp,
    idx: c_int,
    attr: *mut TxAttr,
    out: *mut *mut FidEp,
    context: *mut c_void,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to scalable endpoints; the attributes are there or NULL, and
        // what was given is said back; `out` can be written.
        unsafe {
            let it = SepObject::of(at)?;
            let asked = attr.as_ref().map(info::read_tx);
            let made = it.sep.raw_tx_context(index(idx)?, asked.as_ref())?;
            if let Some(attr) = attr.as_mut() {
                let mut is = it.sep.tx_attr(asked.as_ref())?;
                is.caps &= info::TX_CAPS;
                info::write_tx(attr, &is);
            }
            hand_out(it, made, FI_CLASS_TX_CTX, out, context);
        }
        Ok(())
    })
}

unsafe extern "C" fn rx_ctx(
    at: *mut FidEp,
    idx: c_int,
    attr: *mut RxAttr,
    out: *mut *mut FidEp,
    context: *mut c_void,
) -> c_int {
    guard::int(|| {
        // SAFETY: as in `tx_ctx`.
        unsafe {
            let it = SepObject::of(at)?;
            let asked = attr.as_ref().map(info::read_rx);
            let made = it.sep.raw_rx_context(index(idx)?, asked.as_ref())?;
            if let Some(attr) = attr.as_mut() {
                let mut is = it.sep.rx_attr(asked.as_ref())?;
                is.caps &= info::RX_CAPS;
                info::write_rx(attr, &is);
            }
            hand_out(it, made, FI_CLASS_RX_CTX, out, context);
        }
        Ok(())
    })
}
