//! Poll sets, which libfabric has deprecated: several queues and counters polled at once.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use barewire::{Error, Result};

use crate::abi::*;
use crate::cntr::CntrObject;
use crate::cq::CqObject;
use crate::domain::DomainObject;
use crate::eq::EqObject;
use crate::guard;
use crate::object::{Object, class_of, fid};

/// The object of a `struct fid_poll`.
pub(crate) struct Set {
    members: Mutex<Vec<Member>>,
    _domain: Arc<()>,
}

/// A member, and the counts of a counter that were last reported.
struct Member {
    at: *mut Fid,
    told: (u64, u64),
    /// Keeps the member open.
    _polled: Arc<()>,
}

// SAFETY: the pointer is only used as libfabric allows for the object behind it, from any thread
// that the negotiated level of threading lets in.
unsafe impl Send for Member {}

type SetObject = Object<FidPoll, Set>;

static FID: FiOps = FiOps { close, ..FiOps::STUB };

static OPS: OpsPoll = OpsPoll { poll, poll_add, poll_del, ..OpsPoll::STUB };

impl Set {
    fn members(&self) -> MutexGuard<'_, Vec<Member>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `fi_poll_open`.
pub(crate) unsafe extern "C" fn open(
    domain: *mut FidDomain,
    attr: *mut PollAttr,
    out: *mut *mut FidPoll,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to domains; the attributes are there or NULL.
        let (domain, attr) = unsafe { (DomainObject::of(domain)?, attr.as_ref()) };
        if attr.is_some_and(|attr| attr.flags != 0) {
            return Err(Error::BadFlags);
        }
        let fid = fid(FI_CLASS_POLL, std::ptr::null_mut(), &FID);
        let set = Set { members: Mutex::default(), _domain: Arc::clone(&domain.users) };
        // SAFETY: `out` can be written.
        unsafe { SetObject::open(FidPoll { fid, ops: &raw const OPS }, set, out) };
        Ok(())
    })
}

unsafe extern "C" fn close(at: *mut Fid) -> c_int {
    // SAFETY: the table belongs to poll sets, and a program closes what it does not use.
    guard::int(|| unsafe { SetObject::close(at.cast(), |_| Ok(())) })
}

unsafe extern "C" fn poll_add(at: *mut FidPoll, other: *mut Fid, flags: u64) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to poll sets, and `other` is an object of libfabric's.
        let (set, class) = unsafe { (SetObject::of(at)?, class_of(other)?) };
        if flags != 0 {
            return Err(Error::BadFlags);
        }
        // SAFETY: the class says what is behind it.
        let polled = unsafe {
            match class {
                FI_CLASS_CQ => &CqObject::of(other.cast())?.polled,
                FI_CLASS_CNTR => &CntrObject::of(other.cast())?.polled,
                FI_CLASS_EQ => &EqObject::of(other.cast())?.users,
                _ => return Err(Error::Invalid("fid: cannot be polled")),
            }
        };
        let mut members = set.members();
        if members.iter().all(|member| member.at != other) {
            members.push(Member { at: other, told: (0, 0), _polled: Arc::clone(polled) });
        }
        Ok(())
    })
}

unsafe extern "C" fn poll_del(at: *mut FidPoll, other: *mut Fid, flags: u64) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to poll sets.
        let set = unsafe { SetObject::of(at)? };
        if flags != 0 {
            return Err(Error::BadFlags);
        }
        set.members().retain(|member| member.at != other);
        Ok(())
    })
}

unsafe extern "C" fn poll(at: *mut FidPoll, contexts: *mut *mut c_void, count: c_int) -> c_int {
    guard::value(|| {
        // SAFETY: the table belongs to poll sets.
        let set = unsafe { SetObject::of(at)? };
        let room = usize::try_from(count).map_err(|_| Error::Invalid("count"))?;
        let (mut found, mut failed) = (0, Ok(()));
        // Each member is polled, since that turns its loop, even without room to report it.
        for member in set.members().iter_mut() {
            // SAFETY: a member cannot be closed.
            match unsafe { member.look() } {
                Ok(Some(counts)) if found < room => {
                    member.told = counts;
                    // SAFETY: there is room for `count` contexts, and a member begins with a `Fid`.
                    unsafe { *contexts.add(found) = (*member.at).context };
                    found += 1;
                }
                Ok(_) => {}
                Err(e) => failed = Err(e),
            }
        }
        if found == 0 {
            failed?;
        }
        c_int::try_from(found).map_err(|_| Error::Overflow)
    })
}

impl Member {
    /// Turns the loop and returns whether there is something to read: the counts of a counter if
    /// they have changed since the last report, else (0, 0).
    ///
    /// # Safety
    /// It is an object of libfabric's.
    unsafe fn look(&self) -> Result<Option<(u64, u64)>> {
        // SAFETY: the caller's promise, and the class says what is behind it.
        let ready = unsafe {
            match class_of(self.at)? {
                FI_CLASS_CQ => CqObject::of(self.at.cast())?.cq.ready()? > 0,
                FI_CLASS_EQ => EqObject::of(self.at.cast())?.eq.peek(&mut []) != Err(Error::Again),
                FI_CLASS_CNTR => {
                    let cntr = &CntrObject::of(self.at.cast())?.cntr;
                    let now = (cntr.read()?, cntr.readerr()?);
                    return Ok((self.told != now).then_some(now));
                }
                // A set has no other members.
                _ => false,
            }
        };
        Ok(ready.then_some((0, 0)))
    }
}
