//! The objects that C holds: a libfabric structure followed by its Rust object.
//!
//! C programs close objects by hand and sometimes twice. A closed object keeps its memory for a
//! while, refuses every call with `FI_EBADF`, and is freed after many others have been closed.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use barewire::{Error, Result};

use crate::abi::*;

/// A structure of libfabric that begins with a `struct fid`.
///
/// # Safety
/// The type is `repr(C)` and begins with a `struct fid`.
pub(crate) unsafe trait Abi: Copy + 'static {
    /// Replaces its tables by tables whose functions refuse with `FI_EBADF`.
    fn shut(&mut self);
}

/// A structure, and its tables but for that of the `struct fid`.
macro_rules! abis {
    ($($name:ident { $($table:ident: $ops:ident),* })*) => {
        $(
            // SAFETY: laid out by `layouts!`, with `fid: Fid` first.
            unsafe impl Abi for $name {
                fn shut(&mut self) {
                    self.fid.shut();
                    $(self.$table = $ops::CLOSED;)*
                }
            }
        )*
    };
}

abis! {
    FidFabric { ops: OpsFabric }
    FidDomain { ops: OpsDomain, mr: OpsMr }
    FidEp {
        ops: OpsEp, cm: OpsCm, msg: OpsMsg, rma: OpsRma, tagged: OpsTagged, atomic: OpsAtomic,
        collective: OpsCollective
    }
    FidAv { ops: OpsAv }
    FidAvSet { ops: OpsAvSet }
    FidMc {}
    FidMr {}
    FidCq { ops: OpsCq }
    FidCntr { ops: OpsCntr }
    FidEq { ops: OpsEq }
    FidPep { ops: OpsEp, cm: OpsCm }
    FidStx { ops: OpsEp }
    FidWait { ops: OpsWait }
    FidPoll { ops: OpsPoll }
}

// SAFETY: it is one.
unsafe impl Abi for Fid {
    fn shut(&mut self) {
        (self.fclass, self.ops) = (FI_CLASS_UNSPEC, FiOps::CLOSED);
    }
}

/// An object behind a pointer of C.
#[repr(C)]
pub(crate) struct Object<A, T> {
    /// C reads it at any time and may change the context.
    abi: UnsafeCell<A>,
    /// `None` once it is closed.
    inner: UnsafeCell<Option<T>>,
}

impl<A: Abi, T: 'static> Object<A, T> {
    /// Makes an object of `abi` and `inner` and stores its pointer for C in `to`.
    ///
    /// # Safety
    /// `to` can be written.
    pub(crate) unsafe fn open(abi: A, inner: T, to: *mut *mut A) -> *mut A {
        let object = Self { abi: UnsafeCell::new(abi), inner: UnsafeCell::new(Some(inner)) };
        let at = Box::into_raw(Box::new(object)).cast::<A>();
        // SAFETY: the caller's promise.
        unsafe { *to = at };
        at
    }

    /// The Rust object behind a pointer of C.
    ///
    /// # Errors
    /// [`Error::BadFd`]: the object was closed.
    ///
    /// # Safety
    /// `at` came from [`open`](Self::open) of the same types, its memory was not freed since, and
    /// it is not closed while the result is in use, which is libfabric's rule for every call.
    #[inline]
    pub(crate) unsafe fn of<'a>(at: *const A) -> Result<&'a T> {
        let object = at.cast::<Self>();
        // SAFETY: by the caller's promise the object is there, and `inner` changes in `close`
        // alone, which libfabric allows nobody to run beside another call on the object.
        unsafe { (*(*object).inner.get()).as_ref() }.ok_or(Error::BadFd)
    }

    /// The Rust object behind a pointer that C passes to a function of the object's own tables. The
    /// object is then not closed: closing replaces the tables ([`Abi::shut`]).
    ///
    /// # Safety
    /// As [`of`](Self::of), and the function was reached through a table that `abi` had.
    #[inline(always)]
    pub(crate) unsafe fn of_table<'a>(at: *const A) -> &'a T {
        // SAFETY: as in `of`; `close` empties `inner` and changes the tables in one call, beside
        // which there is no other, so whoever came through a table of an open one finds it.
        unsafe { (*(*at.cast::<Self>()).inner.get()).as_ref().unwrap_unchecked() }
    }

    /// Closes the object by `end`, or leaves it open if `end` gives it back.
    ///
    /// # Safety
    /// As [`of`](Self::of); nobody else uses the object now.
    pub(crate) unsafe fn close(
        at: *mut A,
        end: impl FnOnce(T) -> std::result::Result<(), (Error, T)>,
    ) -> Result<()> {
        let object = at.cast::<Self>();
        // SAFETY: nobody else uses it, by the caller's promise, so the exclusive reference is
        // alone; it ends before the memory is given to the morgue.
        let inner = unsafe { &mut *(*object).inner.get() };
        match end(inner.take().ok_or(Error::BadFd)?) {
            Err((error, back)) => {
                *inner = Some(back);
                Err(error)
            }
            Ok(()) => {
                // SAFETY: nobody else uses it now, and C's view of it is no reference.
                unsafe { (&mut *(*object).abi.get()).shut() };
                defer_free(ClosedMemory { at: object.cast(), free: Self::free });
                Ok(())
            }
        }
    }

    /// # Safety
    /// `at` came from [`open`](Self::open) of the same types, and nobody has it any more.
    unsafe fn free(at: *mut c_void) {
        // SAFETY: `open` made it from a box of this type.
        drop(unsafe { Box::from_raw(at.cast::<Self>()) });
    }
}

/// The class of an object.
///
/// # Errors
/// [`Error::Invalid`] for NULL.
///
/// # Safety
/// `fid` is NULL or an object of libfabric.
pub(crate) unsafe fn class_of(fid: *const Fid) -> Result<usize> {
    if fid.is_null() {
        return Err(Error::Invalid("fid: NULL"));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { (*fid).fclass })
}

/// A `struct fid` for a new object.
pub(crate) fn fid(fclass: usize, context: *mut c_void, ops: &'static FiOps) -> Fid {
    Fid { fclass, context, ops }
}

/// The memory of a closed object.
struct ClosedMemory {
    at: *mut c_void,
    free: unsafe fn(*mut c_void),
}

// SAFETY: the memory belongs to whoever has the record.
unsafe impl Send for ClosedMemory {}

/// Closed objects that keep their memory.
const KEPT: usize = 1024;

fn defer_free(dead: ClosedMemory) {
    static MORGUE: Mutex<VecDeque<ClosedMemory>> = Mutex::new(VecDeque::new());
    let mut kept = MORGUE.lock().unwrap_or_else(PoisonError::into_inner);
    kept.push_back(dead);
    if kept.len() > KEPT
        && let Some(oldest) = kept.pop_front()
    {
        // SAFETY: `close` handed it over, and it has left the list.
        unsafe { (oldest.free)(oldest.at) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Plain = Object<Fid, u32>;

    fn open(value: u32) -> *mut Fid {
        let mut at = std::ptr::null_mut();
        // SAFETY: `at` can be written.
        unsafe { Plain::open(fid(7, std::ptr::null_mut(), &FiOps::STUB), value, &mut at) };
        at
    }

    #[test]
    fn a_closed_object_refuses_and_closing_it_again_is_told() {
        let at = open(5);
        // SAFETY: `at` is a `Plain`, used by this thread alone.
        unsafe {
            assert_eq!(Plain::of(at), Ok(&5));
            assert_eq!(Plain::close(at, |v| Err((Error::Busy, v))), Err(Error::Busy));
            assert_eq!(Plain::of(at), Ok(&5));
            assert_eq!(Plain::close(at, |_| Ok(())), Ok(()));
            assert_eq!(Plain::of(at), Err(Error::BadFd));
            assert_eq!(((*(*at).ops).close)(at), -9);
            assert_eq!((*at).fclass, FI_CLASS_UNSPEC);
        }
    }

    /// What was open may have had any table; a call without a look at the object finds these.
    #[test]
    fn the_tables_of_a_closed_object_refuse() {
        let nothing = std::ptr::null_mut();
        let abi = FidEp {
            fid: fid(FI_CLASS_EP, nothing, &FiOps::STUB),
            ops: &OpsEp::STUB,
            cm: &OpsCm::STUB,
            msg: &OpsMsg::STUB,
            rma: &OpsRma::STUB,
            tagged: &OpsTagged::STUB,
            atomic: &OpsAtomic::STUB,
            collective: &OpsCollective::STUB,
        };
        let mut at = std::ptr::null_mut();
        // SAFETY: the tables are there for ever, and their functions touch nothing.
        let calls = |ep: FidEp, at: *mut FidEp| unsafe {
            [
                ((*ep.ops).cancel)(at.cast(), nothing),
                ((*ep.cm).shutdown)(at, 0) as isize,
                ((*ep.msg).recv)(at, nothing, 0, nothing, 0, nothing),
                ((*ep.rma).read)(at, nothing, 0, nothing, 0, 0, 0, nothing),
                ((*ep.tagged).send)(at, nothing, 0, nothing, 0, 0, nothing),
                ((*ep.atomic).write)(at, nothing, 0, nothing, 0, 0, 0, 0, 0, nothing),
                ((*ep.collective).barrier)(at, 0, nothing),
            ]
        };
        // SAFETY: `at` can be written, and is an object of this thread alone.
        unsafe {
            Object::<FidEp, u32>::open(abi, 5, &mut at);
            assert_eq!(calls(*at, at), [-38; 7]);
            assert_eq!(*Object::<FidEp, u32>::of_table(at), 5);
            Object::<FidEp, u32>::close(at, |_| Ok(())).unwrap();
            assert_eq!(calls(*at, at), [-9; 7]);
        }
    }

    #[test]
    fn the_memory_of_closed_objects_is_bounded() {
        for _ in 0..3 * KEPT {
            // SAFETY: a `Plain` of this thread alone.
            unsafe { Plain::close(open(1), |_| Ok(())) }.unwrap();
        }
    }
}
