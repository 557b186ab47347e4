//! Completion queues.

use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_void};
use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use barewire::raw::{Cqe, EmptyCq, RawCq, TakeOne};
use barewire::{CqAttr as OurAttr, CqFormat, Error, Result, WaitCond};

use crate::abi::*;
use crate::addr::{self, Form};
use crate::domain::DomainObject;
use crate::guard;
use crate::object::{Object, fid};
use crate::wait::{self, Membership};

/// The object of a `struct fid_cq`.
pub(crate) struct Queue {
    pub(crate) cq: RawCq,
    wait_obj: u32,
    wait_cond: WaitCond,
    member: OnceLock<Membership>,
    /// Held by poll sets that it is in.
    pub(crate) polled: Arc<()>,
    form: Form,
    api_version: u32,
    /// The address of an unknown sender, valid until the next read of an error.
    err_data: Box<UnsafeCell<[u8; addr::MAX]>>,
}

pub(crate) type CqObject = Object<FidCq, Queue>;

static FID: FiOps = FiOps { close, control, ..FiOps::STUB };

/// The function table of queues with entries of type `E`: a table for each format spares the check
/// of the format at every entry.
struct Table<E>(PhantomData<E>);

impl<E: Entry> Table<E> {
    const OPS: &'static OpsCq = &OpsCq {
        read: read::<E>,
        readfrom: readfrom::<E>,
        readerr,
        sread: sread::<E>,
        sreadfrom: sreadfrom::<E>,
        signal,
        strerror,
        ..OpsCq::STUB
    };
}

/// The table for a format.
fn ops(format: CqFormat) -> &'static OpsCq {
    match format {
        CqFormat::Unspec | CqFormat::Context => Table::<CqEntry>::OPS,
        CqFormat::Msg => Table::<CqMsgEntry>::OPS,
        CqFormat::Data => Table::<CqDataEntry>::OPS,
        CqFormat::Tagged => Table::<CqTaggedEntry>::OPS,
    }
}

/// Least size of a queue, which grows with the endpoints bound to it: the requested size is a
/// minimum (fi_cq(3)). Each posted operation reserves an entry, and Open MPI, which requests 100,
/// waits for room inside its receive calls. With all receives posted, a program with fewer entries
/// could never send.
const LEAST_SIZE: usize = 2 * barewire::info::RX_SIZE;

/// `fi_cq_open`.
pub(crate) unsafe extern "C" fn open(
    domain: *mut FidDomain,
    attr_at: *mut CqAttr,
    out: *mut *mut FidCq,
    context: *mut c_void,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to domains; the attributes are there or NULL.
        let (domain, attr) = unsafe { (DomainObject::of(domain)?, attr_at.as_ref()) };
        let ours = OurAttr { size: LEAST_SIZE, grows: true, ..OurAttr::default() };
        let (mut ours, mut wait, mut set) = (ours, 0, None);
        // The format sets the length of entries, so an unspecified format is the shortest.
        ours.format = CqFormat::Context;
        if let Some(attr) = attr {
            // FI_AFFINITY (bit 29) is a hint about interrupts, which are not used.
            if attr.flags & !(1 << 29) != 0 {
                return Err(Error::BadFlags);
            }
            wait = attr.wait_obj;
            // 0 means the default size.
            ours.size = attr.size.max(LEAST_SIZE);
            ours.format = match attr.format {
                0 | 1 => CqFormat::Context,
                2 => CqFormat::Msg,
                3 => CqFormat::Data,
                4 => CqFormat::Tagged,
                _ => return Err(Error::NoSys),
            };
            // SAFETY: as above.
            (ours.wait_obj, set) = unsafe { wait::asked(wait, attr.wait_set)? };
            ours.wait_cond = match attr.wait_cond {
                0 => WaitCond::None,
                1 => WaitCond::Threshold,
                _ => return Err(Error::NoSys),
            };
        }
        let cq = domain.domain.raw_cq_open(ours)?;
        let abi = FidCq { fid: fid(FI_CLASS_CQ, context, &FID), ops: ops(ours.format) };
        let inner = Queue {
            cq,
            wait_obj: wait,
            wait_cond: ours.wait_cond,
            member: OnceLock::new(),
            polled: Arc::default(),
            form: domain.form,
            api_version: domain.api_version,
            err_data: Box::new(UnsafeCell::new([0; addr::MAX])),
        };
        // SAFETY: `out` can be written, and the object is fresh.
        unsafe {
            let at = CqObject::open(abi, inner, out);
            let queue = CqObject::of(at)?;
            wait::join(set, at.cast(), || queue.cq.wait_fd(), &queue.member)?;
        }
        // Returns the chosen format. SAFETY: the attributes are the caller's to be written.
        if let Some(attr) = unsafe { attr_at.as_mut() } {
            attr.format = attr.format.max(1);
        }
        Ok(())
    })
}

unsafe extern "C" fn close(at: *mut Fid) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to queues, and a program closes what it does not use.
        unsafe {
            let member = CqObject::of(at.cast())?.member.get();
            wait::close(member, at, || CqObject::close(at.cast(), Queue::end))
        }
    })
}

unsafe extern "C" fn control(at: *mut Fid, command: c_int, arg: *mut c_void) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to queues, and the command says what `arg` is.
        unsafe {
            let cq = CqObject::of(at.cast())?;
            wait::wait_control(command, arg, cq.wait_obj, || cq.cq.wait_fd())
        }
    })
}

/// A context number as the pointer that the program passed.
fn pointer(value: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(value as usize)
}

/// An entry of one format.
trait Entry: Sized {
    /// Converts a completion to this format.
    fn of(e: &Cqe) -> Self;
}

impl Entry for CqEntry {
    #[inline(always)]
    fn of(e: &Cqe) -> Self {
        Self { op_context: pointer(e.op_context) }
    }
}

impl Entry for CqMsgEntry {
    #[inline(always)]
    fn of(e: &Cqe) -> Self {
        Self { op_context: pointer(e.op_context), flags: e.flags.bits(), len: e.len as usize }
    }
}

impl Entry for CqDataEntry {
    #[inline(always)]
    fn of(e: &Cqe) -> Self {
        let CqMsgEntry { op_context, flags, len } = CqMsgEntry::of(e);
        Self { op_context, flags, len, buf: pointer(e.buf), data: e.data }
    }
}

impl Entry for CqTaggedEntry {
    #[inline(always)]
    fn of(e: &Cqe) -> Self {
        let CqDataEntry { op_context, flags, len, buf, data } = CqDataEntry::of(e);
        Self { op_context, flags, len, buf, data, tag: e.tag }
    }
}

/// The program's buffer for entries.
#[derive(Clone, Copy)]
struct Out<E> {
    buf: *mut E,
    count: usize,
    src: *mut u64,
}

impl<E: Entry> Out<E> {
    /// # Errors
    /// [`Error::Invalid`]: there is no room at all.
    #[inline(always)]
    fn new(buf: *mut c_void, count: usize, src: *mut u64) -> Result<Self> {
        if buf.is_null() && count > 0 {
            return Err(Error::Invalid("buf: NULL"));
        }
        Ok(Self { buf: buf.cast(), count, src })
    }

    /// Writes entry number `i`.
    ///
    /// # Safety
    /// `i` is below `count`, for which there is room, and for as many sources if `src` is not NULL.
    #[inline(always)]
    unsafe fn put(&self, i: usize, e: &Cqe) {
        // SAFETY: the caller's promise.
        unsafe {
            self.buf.add(i).write(E::of(e));
            if !self.src.is_null() {
                *self.src.add(i) = e.src;
            }
        }
    }

    /// A closure that writes entries, one after the other.
    ///
    /// # Safety
    /// As [`put`](Self::put); the result is called no more than `count` times.
    #[inline(always)]
    unsafe fn writer(self) -> impl FnMut(&Cqe) {
        let mut i = 0;
        move |e: &Cqe| {
            // SAFETY: the caller's promise.
            unsafe { self.put(i, e) };
            i += 1;
        }
    }
}

impl Queue {
    /// Reads entries until the buffer is full or the queue is empty.
    ///
    /// # Safety
    /// As [`Out::put`].
    #[inline(always)]
    unsafe fn read<E: Entry>(&self, out: Out<E>) -> Result<usize> {
        // SAFETY: the caller's promise, and no more than `count` are taken.
        self.cq.take(out.count, unsafe { out.writer() })
    }

    /// Waits for entries.
    ///
    /// # Safety
    /// As [`Out::put`].
    unsafe fn sread<E: Entry>(
        &self,
        out: Out<E>,
        cond: *const c_void,
        timeout: c_int,
    ) -> Result<usize> {
        // The argument is the number itself, in place of a pointer.
        let threshold = match self.wait_cond {
            WaitCond::Threshold => cond.addr().clamp(1, out.count.max(1)),
            WaitCond::None => 1,
        };
        // SAFETY: the caller's promise, and no more than `count` are taken.
        self.cq.sread(out.count, unsafe { out.writer() }, threshold, timeout)
    }

    /// Closes it, or gives it back if it is busy.
    fn end(self) -> std::result::Result<(), (Error, Self)> {
        if Arc::strong_count(&self.polled) > 1 {
            return Err((Error::Busy, self));
        }
        let Self { cq, wait_obj, wait_cond, member, polled, .. } = self;
        let (form, api_version, err_data) = (self.form, self.api_version, self.err_data);
        cq.close().map_err(|(e, cq)| {
            (e, Self { cq, wait_obj, wait_cond, member, polled, form, api_version, err_data })
        })
    }

    /// Takes the error at the head.
    ///
    /// # Safety
    /// `to` is an entry as long as the version that the program speaks has it.
    unsafe fn readerr(&self, to: *mut CqErrEntry) -> Result<usize> {
        let e = self.cq.readerr()?;
        // SAFETY: the caller's promise; members are written one by one, since a program of an
        // older version has no memory for the last ones.
        unsafe {
            (*to).op_context = pointer(e.cqe.op_context);
            ((*to).flags, (*to).len) = (e.cqe.flags.bits(), e.cqe.len as usize);
            ((*to).buf, (*to).data, (*to).tag) = (pointer(e.cqe.buf), e.cqe.data, e.cqe.tag);
            ((*to).olen, (*to).err) = (e.olen as usize, e.err.fi_errno());
            (*to).prov_errno = e.prov_errno as c_int;
            if self.api_version >= version(1, 20) {
                (*to).src_addr = e.cqe.src;
            }
            let data = e.err_data.map(|addr| self.form.write(addr));
            let data = data.as_ref().map_or(&[][..], |bytes| &bytes[..]);
            // One thread at a time reads errors of a queue that lends them.
            let ours = self.err_data.get().cast();
            // A program of a version before 1.5 has neither a length nor a buffer for error data.
            let (mut none, is_old) = (0, self.api_version < version(1, 5));
            let size = if is_old { &mut none } else { &mut (*to).err_data_size };
            guard::put_err_data(data, &mut (*to).err_data, size, ours);
        }
        Ok(1)
    }
}

unsafe extern "C" fn read<E: Entry>(at: *mut FidCq, buf: *mut c_void, count: usize) -> isize {
    // Most programs read one entry. All other cases are tail calls, so that this path saves no
    // registers.
    if count == 1 {
        if buf.is_null() {
            // SAFETY: as this call.
            return unsafe { read_to_nowhere::<E>(at) };
        }
        // SAFETY: the table belongs to queues.
        let queue = unsafe { CqObject::of_table(at) };
        // SAFETY: `buf` has room for an entry.
        match queue.cq.take_one(|e| unsafe { buf.cast::<E>().write(E::of(e)) }) {
            TakeOne::Taken => return 1,
            // SAFETY: as this call.
            TakeOne::Empty(queue) => return unsafe { read_of_turn::<E>(queue, buf) },
            TakeOne::Other => {}
        }
    }
    // SAFETY: as for `readfrom`, which takes no sources then.
    unsafe { read_many::<E>(at, buf, count) }
}

/// [`read`] of one entry of an empty queue: turns the loop.
#[inline(never)]
unsafe extern "C" fn read_of_turn<E: Entry>(queue: EmptyCq<'_>, buf: *mut c_void) -> isize {
    guard::count(|| {
        // SAFETY: `buf` has room for an entry.
        let read = queue.take(|e| unsafe { buf.cast::<E>().write(E::of(e)) });
        read.unwrap_or(Ok(1))
    })
}

/// [`read`] of one entry without a buffer. (A separate function, so that the fast path has one
/// check.)
#[cold]
#[inline(never)]
unsafe extern "C" fn read_to_nowhere<E: Entry>(at: *mut FidCq) -> isize {
    // SAFETY: the table belongs to queues; nothing is written.
    guard::count(|| unsafe {
        CqObject::of(at)?.read(Out::<E>::new(std::ptr::null_mut(), 1, std::ptr::null_mut())?)
    })
}

/// The remaining cases of [`read`].
#[inline(never)]
unsafe extern "C" fn read_many<E: Entry>(at: *mut FidCq, buf: *mut c_void, count: usize) -> isize {
    // SAFETY: the table belongs to queues; `buf` has room for `count` entries; no sources are asked
    // for.
    unsafe { readfrom::<E>(at, buf, count, std::ptr::null_mut()) }
}

unsafe extern "C" fn readfrom<E: Entry>(
    at: *mut FidCq,
    buf: *mut c_void,
    count: usize,
    src: *mut u64,
) -> isize {
    // SAFETY: the table belongs to queues; `buf` has room for `count` entries, and `src` for as
    // many addresses, or is NULL.
    guard::count(|| unsafe { CqObject::of(at)?.read(Out::<E>::new(buf, count, src)?) })
}

unsafe extern "C" fn sread<E: Entry>(
    at: *mut FidCq,
    buf: *mut c_void,
    count: usize,
    cond: *const c_void,
    timeout: c_int,
) -> isize {
    // SAFETY: the table belongs to queues; `buf` has room for `count` entries.
    guard::count(|| unsafe {
        CqObject::of(at)?.sread(Out::<E>::new(buf, count, std::ptr::null_mut())?, cond, timeout)
    })
}

unsafe extern "C" fn sreadfrom<E: Entry>(
    at: *mut FidCq,
    buf: *mut c_void,
    count: usize,
    src: *mut u64,
    cond: *const c_void,
    timeout: c_int,
) -> isize {
    // SAFETY: the table belongs to queues; `buf` has room for `count` entries, and `src` for as
    // many addresses, or is NULL.
    guard::count(|| unsafe {
        CqObject::of(at)?.sread(Out::<E>::new(buf, count, src)?, cond, timeout)
    })
}

unsafe extern "C" fn readerr(at: *mut FidCq, buf: *mut CqErrEntry, flags: u64) -> isize {
    guard::count(|| {
        if flags != 0 {
            return Err(Error::BadFlags);
        }
        if buf.is_null() {
            return Err(Error::Invalid("buf: NULL"));
        }
        // SAFETY: the table belongs to queues, and `buf` is an entry.
        unsafe { CqObject::of(at)?.readerr(buf) }
    })
}

unsafe extern "C" fn signal(at: *mut FidCq) -> c_int {
    // SAFETY: the table belongs to queues.
    guard::int(|| unsafe { CqObject::of(at)?.cq.signal() })
}

unsafe extern "C" fn strerror(
    at: *mut FidCq,
    prov_errno: c_int,
    _err_data: *const c_void,
    buf: *mut c_char,
    len: usize,
) -> *const c_char {
    guard::or(c"unknown error".as_ptr(), || {
        // SAFETY: the table belongs to queues, and `buf` has `len` bytes or is NULL.
        unsafe { Ok(guard::put_text(CqObject::of(at)?.cq.strerror(prov_errno), buf, len)) }
    })
}
