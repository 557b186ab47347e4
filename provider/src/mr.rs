//! Memory regions.

use std::ffi::{c_int, c_void};

use barewire::flags::{Access, BindFlags};
use barewire::raw::IoVec;
use barewire::{Error, MrAttr as OurAttr, RawMr, Result};

use crate::abi::*;
use crate::cntr::CntrObject;
use crate::domain::{Domain, DomainObject};
use crate::ep::{EpObject, number};
use crate::guard;
use crate::info::key_of;
use crate::msg::{list, one};
use crate::object::{Object, class_of, fid};
use crate::sep::SepObject;

/// The object of a `struct fid_mr`.
pub(crate) struct Region {
    mr: Box<RawMr>,
    base: u64,
}

pub(crate) type MrObject = Object<FidMr, Region>;

static FID: FiOps = FiOps { close, bind, control, ..FiOps::STUB };

/// The function table in a `struct fid_domain`.
pub(crate) static OPS: OpsMr = OpsMr { reg, regv, regattr, ..OpsMr::STUB };

/// The common arguments of the three registration calls.
struct MrCall<'a> {
    iov: &'a [IoVec],
    access: u64,
    offset: u64,
    key: u64,
    flags: u64,
    context: *mut c_void,
    /// The base region, of which it becomes a part.
    of: Option<&'a Region>,
}

/// # Safety
/// `domain` is a domain; the memory stays registered as fi_mr(3) says; `out` can be written.
unsafe fn register(domain: *mut Fid, ask: MrCall<'_>, out: *mut *mut FidMr) -> Result<()> {
    // SAFETY: the caller's promise.
    let domain = unsafe { DomainObject::of(domain.cast())? };
    if ask.offset != 0 {
        return Err(Error::Invalid("offset: reserved, must be 0"));
    }
    let attr = OurAttr {
        access: Access::from_bits(ask.access).ok_or(Error::Invalid("access"))?,
        requested_key: Some(ask.key),
        context: number(ask.context),
        // Announces that a counter will be bound, which is always possible.
        flags: ask.flags & !(FI_RMA_EVENT | FI_MR_SINGLE_USE),
        single_use: ask.flags & FI_MR_SINGLE_USE != 0,
        ..OurAttr::default()
    };
    // SAFETY: the caller's promise is that of the raw API.
    let mr = unsafe {
        match ask.of {
            Some(of) => domain.domain.raw_mr_reg_in(&of.mr, ask.iov, &attr)?,
            None => domain.domain.raw_mr_reg(ask.iov, &attr)?,
        }
    };
    let base = ask.iov.first().map_or(0, |piece| piece.base.addr() as u64);
    let fid = fid(FI_CLASS_MR, ask.context, &FID);
    // Data calls need no descriptor, but a program may take NULL for an error.
    let abi = FidMr { fid, mem_desc: std::ptr::null_mut(), key: mr.key() };
    let mr = Box::new(mr);
    // SAFETY: the caller's promise.
    let at = unsafe { MrObject::open(abi, Region { mr, base }, out) };
    // SAFETY: the object is new, and nobody else has it yet.
    unsafe { (*at).mem_desc = at.cast() };
    Ok(())
}

unsafe extern "C" fn reg(
    domain: *mut Fid,
    buf: *mut c_void,
    len: usize,
    access: u64,
    offset: u64,
    key: u64,
    flags: u64,
    out: *mut *mut FidMr,
    context: *mut c_void,
) -> c_int {
    let ask = MrCall { iov: &one(buf, len), access, offset, key, flags, context, of: None };
    // SAFETY: the table belongs to domains; the memory is lent as fi_mr(3) says.
    guard::int(|| unsafe { register(domain, ask, out) })
}

unsafe extern "C" fn regv(
    domain: *mut Fid,
    iov: *const Iovec,
    count: usize,
    access: u64,
    offset: u64,
    key: u64,
    flags: u64,
    out: *mut *mut FidMr,
    context: *mut c_void,
) -> c_int {
    guard::int(|| {
        // SAFETY: as above, and there are `count` pieces.
        unsafe {
            let iov = list(iov, count)?;
            let ask = MrCall { iov, access, offset, key, flags, context, of: None };
            register(domain, ask, out)
        }
    })
}

unsafe extern "C" fn regattr(
    domain: *mut Fid,
    attr: *const MrAttr,
    flags: u64,
    out: *mut *mut FidMr,
) -> c_int {
    guard::int(|| {
        // SAFETY: as above. No more than the members of the domain's version are read.
        unsafe {
            let a = crate::msg::given(attr)?;
            let it = DomainObject::of(domain.cast())?;
            check_key(it, a, flags)?;
            let of = match it.api_version >= version(2, 0) {
                true => base_of((*attr.cast::<LateMrAttr>()).base_mr)?,
                false => None,
            };
            let flags = flags & !FI_AUTH_KEY;
            let ask = MrCall {
                iov: list(a.mr_iov, a.iov_count)?,
                access: a.access,
                offset: a.offset,
                key: a.requested_key,
                flags,
                context: a.context,
                of,
            };
            register(domain, ask, out)
        }
    })
}

/// The base region of a sub-region.
///
/// # Safety
/// It is a region that is not closed meanwhile, or NULL.
unsafe fn base_of<'a>(at: *const FidMr) -> Result<Option<&'a Region>> {
    if at.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    unsafe {
        match class_of(at.cast_mut().cast())? {
            FI_CLASS_MR => MrObject::of(at).map(Some),
            _ => Err(Error::Invalid("base_mr: not a region")),
        }
    }
}

/// Refuses a region with a key that is not the domain's. With keys of address vectors the region
/// names an address vector, and all keys of the domain give access.
///
/// # Errors
/// [`Error::Invalid`]: another key, or no address vector. [`Error::OpNotSupp`]: for one key alone.
///
/// # Safety
/// The key that the attributes name is there.
unsafe fn check_key(domain: &Domain, a: &MrAttr, flags: u64) -> Result<()> {
    let modern = domain.api_version >= version(1, 5);
    let named = modern && a.auth_key_size != 0 && !a.auth_key.is_null();
    if domain.domain.has_av_auth_keys()? {
        if !named || a.auth_key_size != size_of::<MrAuthKey>() {
            return Err(Error::Invalid("auth_key: a struct fi_mr_auth_key, with FI_AV_AUTH_KEY"));
        }
        // SAFETY: the caller's promise; it need not be aligned.
        let of = unsafe { a.auth_key.cast::<MrAuthKey>().read_unaligned() };
        // SAFETY: as above.
        if unsafe { class_of(of.av.cast())? } != FI_CLASS_AV {
            return Err(Error::Invalid("auth_key: not an address vector"));
        }
        if flags & FI_AUTH_KEY != 0 {
            return Err(Error::OpNotSupp("FI_AUTH_KEY: regions belong to all keys of the domain"));
        }
        return Ok(());
    }
    // SAFETY: the caller's promise.
    let other =
        named && !domain.domain.is_auth_key(&unsafe { key_of(a.auth_key, a.auth_key_size) })?;
    if other || flags & FI_AUTH_KEY != 0 {
        return Err(Error::Invalid("auth_key of the region: not the domain's"));
    }
    Ok(())
}

unsafe extern "C" fn close(at: *mut Fid) -> c_int {
    // SAFETY: the table belongs to regions, and a program closes what it does not use.
    guard::int(|| unsafe {
        MrObject::close(
            at.cast(),
            |it| {
                if it.mr.has_parts() { Err((Error::Busy, it)) } else { Ok(()) }
            },
        )
    })
}

unsafe extern "C" fn bind(at: *mut Fid, other: *mut Fid, flags: u64) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to regions, and the class says what `other` is.
        unsafe {
            let it = MrObject::of(at.cast::<FidMr>())?;
            match class_of(other)? {
                FI_CLASS_CNTR => {
                    let flags = BindFlags::from_bits(flags).ok_or(Error::BadFlags)?;
                    it.mr.bind_cntr(&CntrObject::of(other.cast())?.cntr, flags)
                }
                FI_CLASS_EP | FI_CLASS_RX_CTX => {
                    it.mr.bind_ep(&EpObject::of(other.cast::<FidEp>())?.ep)
                }
                FI_CLASS_SEP => it.mr.bind_sep(&SepObject::of(other.cast::<FidEp>())?.sep),
                _ => Err(Error::Invalid("fid: cannot be bound to a region")),
            }
        }
    })
}

unsafe extern "C" fn control(at: *mut Fid, command: c_int, arg: *mut c_void) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to regions, and the command says what `arg` is.
        unsafe {
            let it = MrObject::of(at.cast::<FidMr>())?;
            match command {
                // A region is ready once it is registered, and follows its memory by itself.
                FI_ENABLE | FI_REFRESH => Ok(()),
                FI_GET_RAW_MR => raw(it, arg.cast()),
                _ => Err(Error::NoSys),
            }
        }
    })
}

/// `fi_mr_raw_attr`: raw keys have 8 bytes.
///
/// # Safety
/// `attr` is what the command takes.
unsafe fn raw(it: &Region, attr: *mut MrRawAttr) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let attr = attr.as_mut().ok_or(Error::Invalid("arg: NULL"))?;
        if attr.flags != 0 {
            return Err(Error::BadFlags);
        }
        if attr.key_size.is_null() {
            return Err(Error::Invalid("key_size: NULL"));
        }
        let room = std::mem::replace(&mut *attr.key_size, 8);
        if room < 8 || attr.raw_key.is_null() {
            return Err(Error::TooSmall);
        }
        attr.raw_key.cast::<[u8; 8]>().write(it.mr.key().to_ne_bytes());
        if !attr.base_addr.is_null() {
            *attr.base_addr = it.base;
        }
    }
    Ok(())
}

/// `fi_mr_map_raw`: the inverse of [`raw`].
///
/// # Safety
/// `attr` is what the command takes.
pub(crate) unsafe fn map_raw(attr: *mut MrMapRaw) -> Result<()> {
    // SAFETY: the caller's promise; a raw key of 8 bytes has 8 bytes.
    unsafe {
        let attr = attr.as_ref().ok_or(Error::Invalid("arg: NULL"))?;
        if attr.key_size != 8 || attr.raw_key.is_null() || attr.key.is_null() {
            return Err(Error::Invalid("raw_key: 8 bytes"));
        }
        *attr.key = u64::from_ne_bytes(attr.raw_key.cast::<[u8; 8]>().read());
    }
    Ok(())
}
