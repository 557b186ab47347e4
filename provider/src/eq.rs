//! Event queues.

use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use barewire::cm::CM_DATA_SIZE;
use barewire::{ConnRequest, Eq, EqAttr as OurAttr, EqErr, Error, Result};

use crate::abi::*;
use crate::fabric::FabricObject;
use crate::object::{Object, fid};
use crate::wait::{self, Membership};
use crate::{guard, pep};

/// The object of a `struct fid_eq`.
pub(crate) struct EventQueue {
    pub(crate) eq: Eq,
    wait_obj: u32,
    api_version: u32,
    member: OnceLock<Membership>,
    _fabric: Arc<()>,
    /// Held by its poll sets, and by the objects that it is bound to.
    pub(crate) users: Arc<()>,
    /// The data of a rejection, valid until the next read of an error.
    err_data: Box<UnsafeCell<[u8; CM_DATA_SIZE]>>,
}

pub(crate) type EqObject = Object<FidEq, EventQueue>;

/// The event queues that an object was bound to, which stay open as long as it is.
#[derive(Default)]
pub(crate) struct BoundEqs(Mutex<Vec<Arc<()>>>);

impl BoundEqs {
    /// Binds `eq` by `bind`.
    ///
    /// # Errors
    /// Those of `bind`; the queue is not kept open then.
    pub(crate) fn bind(&self, eq: &EventQueue, bind: impl FnOnce(&Eq) -> Result<()>) -> Result<()> {
        bind(&eq.eq)?;
        let mut bound = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        bound.push(Arc::clone(&eq.users));
        Ok(())
    }
}

impl EventQueue {
    /// Closes it, or gives it back if it is busy.
    fn end(self) -> std::result::Result<(), (Error, Self)> {
        if Arc::strong_count(&self.users) > 1 { Err((Error::Busy, self)) } else { Ok(()) }
    }
}

static FID: FiOps = FiOps { close, control, ..FiOps::STUB };

static OPS: OpsEq = OpsEq { read, readerr, write, sread, strerror, ..OpsEq::STUB };

/// `fi_eq_open`.
pub(crate) unsafe extern "C" fn open(
    fabric: *mut FidFabric,
    attr: *mut EqAttr,
    out: *mut *mut FidEq,
    context: *mut c_void,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to fabrics; the attributes are there or NULL.
        let (fabric, attr) = unsafe { (FabricObject::of(fabric)?, attr.as_ref()) };
        let (size, flags, wait) = attr.map_or((0, 0, 1), |a| (a.size, a.flags, a.wait_obj));
        let set = attr.map_or(std::ptr::null_mut(), |a| a.wait_set);
        // FI_AFFINITY (bit 29) is a hint about interrupts, which are not used.
        if flags & !(FI_WRITE | 1 << 29) != 0 {
            return Err(Error::BadFlags);
        }
        // SAFETY: as above.
        let (wait_obj, set) = unsafe { wait::asked(wait, set)? };
        let ours = OurAttr { size, write: flags & FI_WRITE != 0, wait_obj };
        let eq = fabric.fabric.eq_open(ours)?;
        let abi = FidEq { fid: fid(FI_CLASS_EQ, context, &FID), ops: &raw const OPS };
        let inner = EventQueue {
            eq,
            wait_obj: wait,
            api_version: fabric.api_version,
            member: OnceLock::new(),
            _fabric: Arc::clone(&fabric.users),
            users: Arc::default(),
            err_data: Box::new(UnsafeCell::new([0; CM_DATA_SIZE])),
        };
        // SAFETY: `out` can be written, and the object is fresh.
        unsafe {
            let at = EqObject::open(abi, inner, out);
            let it = EqObject::of(at)?;
            wait::join(set, at.cast(), || it.eq.wait_fd(), &it.member)?;
        }
        Ok(())
    })
}

unsafe extern "C" fn close(at: *mut Fid) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to event queues, and a program closes what it does not use.
        unsafe {
            let member = EqObject::of(at.cast())?.member.get();
            wait::close(member, at, || EqObject::close(at.cast(), EventQueue::end))
        }
    })
}

unsafe extern "C" fn control(at: *mut Fid, command: c_int, arg: *mut c_void) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to event queues, and the command says what `arg` is.
        unsafe {
            let eq = EqObject::of(at.cast())?;
            wait::wait_control(command, arg, eq.wait_obj, || eq.eq.wait_fd())
        }
    })
}

/// # Safety
/// `len` writable bytes are at `buf`, or it is NULL.
unsafe fn bytes<'a>(buf: *mut c_void, len: usize) -> &'a mut [u8] {
    if buf.is_null() || len == 0 {
        return &mut [];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(buf.cast(), len) }
}

/// The address of the `fi_info` of a connection request. The passive endpoint is given by its
/// address.
///
/// # Safety
/// The endpoint is open: its requests are dropped with it.
unsafe fn info_of(of: u64, request: ConnRequest) -> Result<u64> {
    // SAFETY: the caller's promise.
    let info =
        unsafe { pep::request_info(std::ptr::with_exposed_provenance_mut(of as usize), request)? };
    Ok(info.expose_provenance() as u64)
}

/// Completes an event: a connection request gets its `fi_info`, unless a peek has made it before.
///
/// # Safety
/// The event comes from a queue of ours.
unsafe fn with_info(
    (event, len, request): (u32, usize, Option<ConnRequest>),
    buf: &mut [u8],
) -> Result<(u32, usize)> {
    if let Some(request) = request
        && let Some((entry, _)) = buf.split_first_chunk_mut::<16>()
        && entry[8..] == [0; 8]
    {
        let of = u64::from_ne_bytes(std::array::from_fn(|i| entry[i]));
        // SAFETY: such an event begins with the name of the passive endpoint and is dropped with
        // it.
        entry[8..].copy_from_slice(&unsafe { info_of(of, request)? }.to_ne_bytes());
    }
    Ok((event, len))
}

unsafe extern "C" fn read(
    at: *mut FidEq,
    event: *mut u32,
    buf: *mut c_void,
    len: usize,
    flags: u64,
) -> isize {
    guard::count(|| {
        // SAFETY: the table belongs to event queues; `buf` has `len` bytes, `event` is a place.
        unsafe {
            let (eq, buf) = (EqObject::of(at)?, bytes(buf, len));
            let (number, n) = match flags {
                0 => with_info(eq.eq.read_cm(buf)?, buf)?,
                FI_PEEK => eq.eq.peek_cm(buf, |of, request| info_of(of, request))?,
                _ => return Err(Error::BadFlags),
            };
            *event = number;
            Ok(n)
        }
    })
}

unsafe extern "C" fn sread(
    at: *mut FidEq,
    event: *mut u32,
    buf: *mut c_void,
    len: usize,
    timeout: c_int,
    flags: u64,
) -> isize {
    guard::count(|| {
        // SAFETY: the table belongs to event queues; `buf` has `len` bytes, `event` is a place.
        unsafe {
            if flags & !FI_PEEK != 0 {
                return Err(Error::BadFlags);
            }
            let (eq, buf) = (EqObject::of(at)?, bytes(buf, len));
            let (number, n) = match flags {
                0 => with_info(eq.eq.sread_cm(buf, timeout)?, buf)?,
                _ => eq.eq.speek_cm(buf, timeout, |of, request| info_of(of, request))?,
            };
            *event = number;
            Ok(n)
        }
    })
}

/// Writes an error event, with the data of a rejection at `ours` if the program has no buffer for
/// it.
///
/// # Safety
/// `buf` is an entry as long as version `api_version` of the interface has it, whose `err_data` has
/// the length that it says; `CM_DATA_SIZE` bytes are at `ours`.
unsafe fn fill(buf: *mut EqErrEntry, err: &EqErr, api_version: u32, ours: *mut u8) {
    // SAFETY: the caller's promise; the object of the error is open.
    unsafe {
        let fid: *mut Fid = std::ptr::with_exposed_provenance_mut(err.fid as usize);
        (*buf).fid = fid;
        (*buf).context = match fid.as_ref() {
            Some(fid) => fid.context,
            None => std::ptr::without_provenance_mut(err.context as usize),
        };
        (*buf).data = err.data;
        ((*buf).err, (*buf).prov_errno) = (err.err.fi_errno(), err.err.fi_errno());
        // `err_data_size` exists since version 1.5: an older program has set neither member.
        if api_version < version(1, 5) {
            return;
        }
        guard::put_err_data(&err.err_data, &mut (*buf).err_data, &mut (*buf).err_data_size, ours);
    }
}

unsafe extern "C" fn readerr(at: *mut FidEq, buf: *mut EqErrEntry, flags: u64) -> isize {
    guard::count(|| {
        // SAFETY: the table belongs to event queues, and `buf` is an entry.
        unsafe {
            let eq = EqObject::of(at)?;
            let err = match flags {
                0 => eq.eq.readerr()?,
                FI_PEEK => eq.eq.peekerr()?,
                _ => return Err(Error::BadFlags),
            };
            fill(buf, &err, eq.api_version, eq.err_data.get().cast());
            Ok(size_of::<EqErrEntry>())
        }
    })
}

unsafe extern "C" fn write(
    at: *mut FidEq,
    event: u32,
    buf: *const c_void,
    len: usize,
    flags: u64,
) -> isize {
    guard::count(|| {
        if flags != 0 {
            return Err(Error::BadFlags);
        }
        // SAFETY: the table belongs to event queues, and `buf` has `len` bytes.
        unsafe { EqObject::of(at)?.eq.write(event, bytes(buf.cast_mut(), len)) }
    })
}

unsafe extern "C" fn strerror(
    at: *mut FidEq,
    prov_errno: c_int,
    _err_data: *const c_void,
    buf: *mut c_char,
    len: usize,
) -> *const c_char {
    guard::or(c"unknown error".as_ptr(), || {
        // SAFETY: the table belongs to event queues, and `buf` has `len` bytes or is NULL.
        unsafe { Ok(guard::put_text(EqObject::of(at)?.eq.strerror(prov_errno), buf, len)) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_before_version_1_5_has_no_length_of_error_data() {
        let refusal =
            EqErr { fid: 0, err_data: vec![7; 5], err: Error::ConnRefused, context: 3, data: 9 };
        let mut theirs = [0_u8; 8];
        let mut ours = [0; CM_DATA_SIZE];
        // SAFETY: an entry of numbers and pointers may be 0.
        let mut entry: EqErrEntry = unsafe { std::mem::zeroed() };
        for (version, told) in [(version(1, 4), 0), (version(1, 5), 5)] {
            (entry.err_data, entry.err_data_size) = (theirs.as_mut_ptr().cast(), theirs.len());
            // SAFETY: the entry is whole, and the places are as long as said.
            unsafe { fill(&mut entry, &refusal, version, ours.as_mut_ptr()) };
            assert_eq!((entry.data, entry.err), (9, Error::ConnRefused.fi_errno()));
            assert_eq!(theirs.iter().filter(|byte| **byte == 7).count(), told);
        }
    }
}
