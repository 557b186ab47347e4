//! Address vectors.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use barewire::{Av, AvAttr as OurAttr, AvType, EpAddr, Error, FI_ADDR_NOTAVAIL, Result};

use crate::abi::*;
use crate::addr::{AddrBytes, Form, ParsedAddr, ip_text};
use crate::domain::DomainObject;
use crate::info::key_of;
use crate::object::{Object, fid};
use crate::{guard, known_as};

/// The object of a `struct fid_av`.
pub(crate) struct Vector {
    pub(crate) av: Av,
    form: Form,
    /// Addresses are inserted under keys (`FI_AV_AUTH_KEY`).
    by_keys: bool,
    /// The inserted bytes of addresses that needed a query, by index: the resolved address has
    /// other bytes, and a lookup returns the inserted ones (fi_av(3)).
    originals: OriginalAddrs,
}

impl Vector {
    /// Refuses an insertion without keys in a vector whose addresses have keys.
    fn check_keyless(&self) -> Result<()> {
        match self.by_keys {
            true => Err(Error::Invalid("FI_AV_AUTH_KEY: insert by fi_av_insert, under a key")),
            false => Ok(()),
        }
    }
}

#[derive(Default)]
struct OriginalAddrs(Mutex<HashMap<u64, AddrBytes>>);

impl OriginalAddrs {
    /// Keeps the addresses whose slot in `to` has an index.
    fn record(&self, to: &[u64], originals: Vec<(usize, AddrBytes)>) {
        if !originals.is_empty() {
            let at = originals.into_iter().filter_map(|(i, by)| Some((*to.get(i)?, by)));
            self.all().extend(at.filter(|(at, _)| *at != FI_ADDR_NOTAVAIL));
        }
    }

    fn all(&self) -> MutexGuard<'_, HashMap<u64, AddrBytes>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) type AvObject = Object<FidAv, Vector>;

static FID: FiOps = FiOps { close, bind, ..FiOps::STUB };

static OPS: OpsAv = OpsAv {
    insert,
    insertsvc,
    insertsym,
    remove,
    lookup,
    straddr,
    av_set: crate::coll::av_set,
    insert_auth_key,
    lookup_auth_key,
    set_user_id,
    ..OpsAv::STUB
};

/// `fi_av_open`.
pub(crate) unsafe extern "C" fn open(
    domain: *mut FidDomain,
    attr_at: *mut AvAttr,
    out: *mut *mut FidAv,
    context: *mut c_void,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to domains; the attributes are there or NULL.
        let (domain, attr) = unsafe { (DomainObject::of(domain)?, attr_at.as_ref()) };
        let mut ours = OurAttr::default();
        if let Some(attr) = attr {
            ours.av_type = match attr.r#type {
                0 => AvType::Unspec,
                1 => AvType::Map,
                2 => AvType::Table,
                _ => return Err(Error::Invalid("av type")),
            };
            ours.count = if attr.count > 0 { attr.count } else { universe() };
            ours.event = attr.flags & FI_EVENT != 0;
            ours.name = (!attr.name.is_null()).then_some("shared");
            // `FI_READ` concerns a named vector of another process.
            let known = if ours.name.is_some() { FI_EVENT | FI_READ } else { FI_EVENT };
            ours.user_id = attr.flags & FI_AV_USER_ID != 0;
            // FI_SYMMETRIC (bit 59) is a hint for compression, which is not used.
            if attr.flags & !(known | FI_AV_USER_ID | 1 << 59) != 0 {
                return Err(Error::BadFlags);
            }
            let bits = u32::try_from(attr.rx_ctx_bits);
            ours.rx_ctx_bits = bits.map_err(|_| Error::Invalid("rx_ctx_bits"))?;
        }
        let av = domain.domain.av_open(ours)?;
        let by_keys = domain.domain.has_av_auth_keys()?;
        let abi = FidAv { fid: fid(FI_CLASS_AV, context, &FID), ops: &raw const OPS };
        let vector = Vector { av, form: domain.form, by_keys, originals: OriginalAddrs::default() };
        // SAFETY: `out` can be written.
        unsafe { AvObject::open(abi, vector, out) };
        // Returns the type that was made. SAFETY: the attributes are there or NULL, and the
        // caller's to be written.
        if let Some(attr) = unsafe { attr_at.as_mut() } {
            attr.r#type = if attr.r#type == 1 { 1 } else { 2 };
        }
        Ok(())
    })
}

/// Default number of addresses: as in libfabric's own providers, the size of the job from the
/// launcher; 0 if unknown.
fn universe() -> usize {
    let said = std::env::var("FI_UNIVERSE_SIZE").ok();
    said.and_then(|said| said.trim().parse().ok()).unwrap_or(0)
}

unsafe extern "C" fn close(at: *mut Fid) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to vectors, and a program closes what it does not use.
        unsafe {
            AvObject::close(at.cast(), |it| {
                let Vector { av, form, by_keys, originals } = it;
                av.close().map_err(|(e, av)| (e, Vector { av, form, by_keys, originals }))
            })
        }
    })
}

/// Only an event queue could be bound, for asynchronous insertions, which are not supported.
unsafe extern "C" fn bind(_: *mut Fid, _: *mut Fid, _flags: u64) -> c_int {
    -barewire::errno::FI_ENOSYS
}

/// # Safety
/// `count` places are at `at`, or it is NULL.
unsafe fn places<'a, T>(at: *mut T, count: usize) -> &'a mut [T] {
    if at.is_null() || count == 0 {
        return &mut [];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(at, count) }
}

unsafe extern "C" fn insert(
    at: *mut FidAv,
    addrs: *const c_void,
    count: usize,
    fi_addrs: *mut u64,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    guard::value(|| {
        if flags & !(FI_MORE | FI_SYNC_ERR | FI_AUTH_KEY | FI_AV_USER_ID) != 0 {
            return Err(Error::BadFlags);
        }
        if addrs.is_null() && count > 0 {
            return Err(Error::Invalid("addr: NULL"));
        }
        // SAFETY: the table belongs to vectors; there are `count` addresses of the vector's form,
        // as many places, and with `FI_SYNC_ERR` as many numbers behind `context`.
        unsafe {
            let it = AvObject::of(at)?;
            let under = flags & FI_AUTH_KEY != 0;
            if under != it.by_keys {
                return Err(Error::Invalid("FI_AUTH_KEY: with FI_AV_AUTH_KEY, and only then"));
            }
            let is_named = flags & FI_AV_USER_ID != 0;
            if under && is_named {
                return Err(Error::Invalid("FI_AV_USER_ID: with keys by fi_av_set_user_id"));
            }
            let len = count.checked_mul(it.form.len()).ok_or(Error::Overflow)?;
            let from = places(addrs.cast_mut().cast::<u8>(), len);
            let (native, originals) = native_of(it, from);
            let errors = statuses(flags, context, count)?;
            let (mut to, mut own) = (places(fi_addrs, count), Vec::new());
            if to.is_empty() && !originals.is_empty() && !under && !is_named {
                own.resize(count, 0);
                to = &mut own;
            }
            let n = match (under, is_named) {
                (true, _) => it.av.insert_under(&native, to, errors),
                (false, true) => it.av.insert_named(&native, to, errors),
                (false, false) => it.av.insert_bytes(&native, to, errors),
            }?;
            it.originals.record(to, originals);
            c_int::try_from(n).map_err(|_| Error::Overflow)
        }
    })
}

/// Converts addresses of the vector's format to native ones; also returns the addresses that needed
/// a query, with their slots. An invalid address, or a host without an answer, fails in its slot.
fn native_of(it: &Vector, from: &[u8]) -> (Vec<u8>, Vec<(usize, AddrBytes)>) {
    let each = from.chunks_exact(it.form.len());
    let mut all: Vec<Result<ParsedAddr>> = each.clone().map(|bytes| it.form.read(bytes)).collect();
    let originals = each.zip(&all).enumerate();
    let originals = originals.filter(|(_, (_, one))| matches!(one, Ok(ParsedAddr::Host(..))));
    let originals = originals.map(|(i, (bytes, _))| (i, AddrBytes::new(bytes))).collect();
    let hosts = all.iter().filter_map(|one| match one {
        Ok(ParsedAddr::Host(ip, service)) => Some((*ip, *service)),
        _ => None,
    });
    let hosts: Vec<_> = hosts.collect();
    if !hosts.is_empty() {
        let mut found = it.av.find_hosts(&hosts).into_iter();
        for one in all.iter_mut().filter(|one| matches!(one, Ok(ParsedAddr::Host(..)))) {
            *one = found.next().unwrap_or(Err(Error::NoData)).map(ParsedAddr::Addr);
        }
    }
    let native = all.into_iter().flat_map(|one| match one {
        Ok(ParsedAddr::Addr(addr)) => addr.to_bytes(),
        _ => [0; EpAddr::LEN],
    });
    (native.collect(), originals)
}

/// The array of status codes, one for each address, if `flags` has `FI_SYNC_ERR`.
///
/// # Errors
/// [`Error::Invalid`]: `context` is NULL.
///
/// # Safety
/// `count` numbers are at `context` if `FI_SYNC_ERR` says so.
unsafe fn statuses<'a>(
    flags: u64,
    context: *mut c_void,
    count: usize,
) -> Result<Option<&'a mut [c_int]>> {
    if flags & FI_SYNC_ERR == 0 {
        return Ok(None);
    }
    if context.is_null() {
        return Err(Error::Invalid("context: NULL, with FI_SYNC_ERR"));
    }
    // SAFETY: the caller's promise.
    Ok(Some(unsafe { places(context.cast(), count) }))
}

/// `node` and `service` as strings; empty for NULL.
///
/// # Safety
/// Both are strings or NULL.
unsafe fn names<'a>(node: *const c_char, service: *const c_char) -> Result<[&'a str; 2]> {
    // SAFETY: the caller's promise.
    let (node, service) = unsafe { (guard::text(node)?, guard::text(service)?) };
    Ok([node.unwrap_or_default(), service.unwrap_or_default()])
}

unsafe extern "C" fn insertsvc(
    at: *mut FidAv,
    node: *const c_char,
    service: *const c_char,
    fi_addr: *mut u64,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    guard::value(|| {
        if flags & !(FI_MORE | FI_SYNC_ERR | FI_AV_USER_ID) != 0 {
            return Err(Error::BadFlags);
        }
        // SAFETY: the table belongs to vectors; two strings, a place or NULL, and with
        // `FI_SYNC_ERR` a number behind `context`.
        unsafe {
            let it = AvObject::of(at)?;
            it.check_keyless()?;
            let [node, service] = names(node, service)?;
            let (to, mut status) = (places(fi_addr, 1), statuses(flags, context, 1)?);
            let inserted = if flags & FI_AV_USER_ID != 0 {
                it.av.insertsym_errors((node, 1), (service, 1), to, true, status.as_deref_mut())
            } else {
                let found = it.av.insertsvc(node, service);
                to.fill(found.unwrap_or(FI_ADDR_NOTAVAIL));
                found.map(|_| 1)
            };
            fill_statuses(status, &inserted);
            c_int::try_from(inserted?).map_err(|_| Error::Overflow)
        }
    })
}

unsafe extern "C" fn insertsym(
    at: *mut FidAv,
    node: *const c_char,
    node_count: usize,
    service: *const c_char,
    service_count: usize,
    fi_addrs: *mut u64,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    guard::value(|| {
        if flags & !(FI_MORE | FI_SYNC_ERR | FI_AV_USER_ID) != 0 {
            return Err(Error::BadFlags);
        }
        // SAFETY: the table belongs to vectors; two strings, a place for every address, and with
        // `FI_SYNC_ERR` a number for every address behind `context`.
        unsafe {
            let it = AvObject::of(at)?;
            it.check_keyless()?;
            let count = node_count.checked_mul(service_count).ok_or(Error::Overflow)?;
            let [node, service] = names(node, service)?;
            let to = places(fi_addrs, count);
            let (mut status, named) =
                (statuses(flags, context, count)?, flags & FI_AV_USER_ID != 0);
            let (node, service) = ((node, node_count), (service, service_count));
            let errors = status.as_deref_mut();
            let inserted = it.av.insertsym_errors(node, service, to, named, errors);
            fill_statuses(status, &inserted);
            c_int::try_from(inserted?).map_err(|_| Error::Overflow)
        }
    })
}

/// Fills in status codes: the error of the whole call, or 0 for a single inserted address.
/// Otherwise the insertion has filled them in.
fn fill_statuses(status: Option<&mut [c_int]>, inserted: &Result<usize>) {
    match (status, inserted) {
        (Some(status), Err(e)) => status.fill(e.fi_errno()),
        (Some([one]), Ok(1)) => *one = 0,
        _ => {}
    }
}

unsafe extern "C" fn remove(at: *mut FidAv, addrs: *mut u64, count: usize, flags: u64) -> c_int {
    guard::int(|| {
        if flags & !FI_AUTH_KEY != 0 {
            return Err(Error::BadFlags);
        }
        // SAFETY: the table belongs to vectors, and there are `count` addresses.
        let (it, addrs) = unsafe { (AvObject::of(at)?, places(addrs, count)) };
        match flags {
            0 => {
                // Locked across both, so that the same index is not recorded anew in between.
                let mut originals = it.originals.all();
                let removed = it.av.remove(addrs);
                for at in addrs.iter() {
                    // Addresses after the first invalid index were not removed.
                    if originals.contains_key(at) && it.av.lookup(*at).is_err() {
                        originals.remove(at);
                    }
                }
                removed
            }
            _ => it.av.remove_auth_keys(addrs),
        }
    })
}

unsafe extern "C" fn set_user_id(at: *mut FidAv, fi_addr: u64, user_id: u64, flags: u64) -> c_int {
    guard::int(|| {
        if flags & !FI_AUTH_KEY != 0 {
            return Err(Error::BadFlags);
        }
        // SAFETY: the table belongs to vectors.
        let it = unsafe { AvObject::of(at)? };
        match flags {
            0 => it.av.set_user_id(fi_addr, user_id),
            _ => it.av.set_key_user_id(fi_addr, user_id),
        }
    })
}

unsafe extern "C" fn insert_auth_key(
    at: *mut FidAv,
    key: *const c_void,
    len: usize,
    fi_addr: *mut u64,
    flags: u64,
) -> c_int {
    guard::int(|| {
        if flags != 0 {
            return Err(Error::BadFlags);
        }
        if key.is_null() || fi_addr.is_null() {
            return Err(Error::Invalid("auth_key, fi_addr: NULL"));
        }
        // SAFETY: the table belongs to vectors; a key of `len` bytes, and a place.
        unsafe {
            let handle = AvObject::of(at)?.av.insert_auth_key(&key_of(key.cast(), len))?;
            *fi_addr = handle;
        }
        Ok(())
    })
}

unsafe extern "C" fn lookup_auth_key(
    at: *mut FidAv,
    fi_addr: u64,
    key: *mut c_void,
    len: *mut usize,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to vectors; `key` has `*len` bytes.
        unsafe { put(&AvObject::of(at)?.av.lookup_auth_key(fi_addr)?, key, len).map(drop) }
    })
}

/// Copies as much of `from` as fits, and stores its length in `len`.
///
/// # Safety
/// `len` is a number, and so many bytes are at `to`, or it is NULL.
pub(crate) unsafe fn put(from: &[u8], to: *mut c_void, len: *mut usize) -> Result<bool> {
    if len.is_null() {
        return Err(Error::Invalid("addrlen: NULL"));
    }
    // SAFETY: the caller's promise.
    unsafe {
        let room = if to.is_null() { 0 } else { *len };
        std::ptr::copy_nonoverlapping(from.as_ptr(), to.cast(), from.len().min(room));
        *len = from.len();
        Ok(room >= from.len())
    }
}

unsafe extern "C" fn lookup(
    at: *mut FidAv,
    fi_addr: u64,
    addr: *mut c_void,
    len: *mut usize,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to vectors; `addr` has `*len` bytes.
        unsafe {
            let it = AvObject::of(at)?;
            if fi_addr == FI_ADDR_NOTAVAIL {
                return Err(Error::Invalid("fi_addr"));
            }
            // A short buffer gets the beginning, and `len` the full length.
            let found = it.form.write(it.av.lookup(fi_addr)?);
            put(it.originals.all().get(&fi_addr).unwrap_or(&found), addr, len).map(drop)
        }
    })
}

unsafe extern "C" fn straddr(
    at: *mut FidAv,
    addr: *const c_void,
    buf: *mut c_char,
    len: *mut usize,
) -> *const c_char {
    guard::or(std::ptr::null(), || {
        // SAFETY: the table belongs to vectors; an address of its form, and `*len` bytes.
        unsafe {
            let it = AvObject::of(at)?;
            let bytes = std::slice::from_raw_parts(addr.cast::<u8>(), it.form.len());
            let text = match it.form.read(bytes)? {
                _ if known_as::uses_ip_addresses() => ip_text(bytes)?,
                ParsedAddr::Addr(addr) => it.av.straddr(&addr),
                ParsedAddr::Host(ip, service) => std::net::SocketAddr::new(ip, service).to_string(),
            };
            // Without room for it only the length is told.
            if !buf.is_null() && *len > 0 {
                guard::put_text(&text, buf, *len);
            }
            *len = text.len() + 1;
            Ok(buf.cast_const())
        }
    })
}
