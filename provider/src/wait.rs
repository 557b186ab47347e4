//! Wait sets, which libfabric has deprecated: one object to wait on for several queues and
//! counters. Each of them has a descriptor, and that of the set is readable when one of theirs is.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use barewire::{Error, Result, WaitObj};

use crate::abi::*;
use crate::fabric::{self, FabricObject};
use crate::guard;
use crate::object::{Object, fid};

/// The object of a `struct fid_wait`.
pub(crate) struct Set {
    fabric: *mut FidFabric,
    _users: Arc<()>,
    epoll: OwnedFd,
    wait_obj: u32,
    members: Mutex<Vec<*mut Fid>>,
}

// SAFETY: the pointers are only used as libfabric allows for the objects behind them, from any
// thread that the negotiated level of threading lets in. A member leaves the set before it is
// closed, under the lock of all accesses to members.
unsafe impl Send for Set {}
// SAFETY: as above.
unsafe impl Sync for Set {}

/// The membership of an object in a wait set.
pub(crate) struct Membership {
    set: Arc<Set>,
    /// A duplicate of its descriptor, so that the number is not reused before it has left the set.
    fd: OwnedFd,
    /// The process that added it. A forked child shares the epoll set with it.
    pid: u32,
}

pub(crate) type WaitObject = Object<FidWait, Arc<Set>>;

static FID: FiOps = FiOps { close: close_set, control, ..FiOps::STUB };

static OPS: OpsWait = OpsWait { wait, ..OpsWait::STUB };

/// Converts `enum fi_wait_obj`.
pub(crate) fn wait_obj(c: u32) -> Result<WaitObj> {
    Ok(match c {
        0 => WaitObj::None,
        1 => WaitObj::Unspec,
        2 => WaitObj::Set,
        3 => WaitObj::Fd,
        4 => WaitObj::MutexCond,
        5 => WaitObj::Yield,
        6 => WaitObj::PollFd,
        _ => return Err(Error::NoSys),
    })
}

/// Answers `FI_GETWAIT` and `FI_GETWAITOBJ`.
///
/// # Safety
/// `arg` is what the command takes.
pub(crate) unsafe fn wait_control(
    command: c_int,
    arg: *mut c_void,
    wait_obj: u32,
    fd: impl FnOnce() -> Result<c_int>,
) -> Result<()> {
    let value = match command {
        FI_GETWAIT => fd()?,
        FI_GETWAITOBJ => wait_obj as c_int,
        _ => return Err(Error::NoSys),
    };
    if arg.is_null() {
        return Err(Error::Invalid("arg: NULL"));
    }
    // SAFETY: both commands take a place for an `int`.
    unsafe { *arg.cast::<c_int>() = value };
    Ok(())
}

/// `fi_wait_open`.
pub(crate) unsafe extern "C" fn open(
    fabric: *mut FidFabric,
    attr: *mut WaitAttr,
    out: *mut *mut FidWait,
) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to fabrics; the attributes are there or NULL.
        let (owner, attr) = unsafe { (FabricObject::of(fabric)?, attr.as_ref()) };
        let (wanted, flags) = attr.map_or((1, 0), |attr| (attr.wait_obj, attr.flags));
        if flags != 0 {
            return Err(Error::BadFlags);
        }
        if !matches!(wait_obj(wanted)?, WaitObj::Unspec | WaitObj::Fd) {
            return Err(Error::NoSys);
        }
        // SAFETY: no pointer is passed.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if epoll < 0 {
            return Err(refused("a wait set"));
        }
        // SAFETY: a fresh descriptor that nobody else has.
        let epoll = unsafe { OwnedFd::from_raw_fd(epoll) };
        let _users = Arc::clone(&owner.users);
        let set = Set { fabric, _users, epoll, wait_obj: wanted, members: Mutex::default() };
        let fid = fid(FI_CLASS_WAIT, std::ptr::null_mut(), &FID);
        // SAFETY: `out` can be written.
        unsafe { WaitObject::open(FidWait { fid, ops: &raw const OPS }, Arc::new(set), out) };
        Ok(())
    })
}

unsafe extern "C" fn close_set(at: *mut Fid) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to wait sets, and a program closes what it does not use.
        unsafe {
            WaitObject::close(at.cast(), |set| {
                if Arc::strong_count(&set) > 1 { Err((Error::Busy, set)) } else { Ok(()) }
            })
        }
    })
}

unsafe extern "C" fn control(at: *mut Fid, command: c_int, arg: *mut c_void) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to wait sets, and the command says what `arg` is.
        unsafe {
            let set = WaitObject::of(at.cast::<FidWait>())?;
            wait_control(command, arg, set.wait_obj, || Ok(set.epoll.as_raw_fd()))
        }
    })
}

unsafe extern "C" fn wait(at: *mut FidWait, timeout: c_int) -> c_int {
    guard::int(|| {
        // SAFETY: the table belongs to wait sets.
        let set = unsafe { WaitObject::of(at)? };
        let end = u64::try_from(timeout).ok().map(|ms| Instant::now() + Duration::from_millis(ms));
        loop {
            match set.trywait() {
                Err(Error::Again) => return Ok(()),
                other => other?,
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            // Rounded up, so that a call does not return too early.
            let ms = left.map_or(-1, |left| left.as_nanos().div_ceil(1_000_000) as c_int);
            let mut polled =
                libc::pollfd { fd: set.epoll.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one entry is listed. A signal is as good as nothing.
            if unsafe { libc::poll(&mut polled, 1, ms) } == 1 {
                return Ok(());
            }
            if left == Some(Duration::ZERO) {
                return Err(Error::TimedOut);
            }
        }
    })
}

impl Set {
    fn members(&self) -> MutexGuard<'_, Vec<*mut Fid>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// [`Error::Again`] if a member has an entry, so that the thread must not sleep.
    pub(crate) fn trywait(&self) -> Result<()> {
        // SAFETY: the set keeps the fabric open.
        let fabric = unsafe { FabricObject::of(self.fabric)? };
        let members = self.members();
        // SAFETY: what is in the set is open.
        members.iter().try_for_each(|&member| unsafe { fabric::one(fabric, member) })
    }
}

/// The wait object of an object with these attributes, and its wait set.
///
/// # Safety
/// `set` is a wait set of ours if `wait_obj` says so.
pub(crate) unsafe fn asked(
    wait: u32,
    set: *mut FidWait,
) -> Result<(WaitObj, Option<&'static Arc<Set>>)> {
    match wait_obj(wait)? {
        WaitObj::Set if set.is_null() => Err(Error::Invalid("wait_set: NULL")),
        // SAFETY: the caller's promise.
        WaitObj::Set => Ok((WaitObj::Fd, Some(unsafe { WaitObject::of(set)? }))),
        other => Ok((other, None)),
    }
}

/// Adds a new object to the wait set of its attributes, if any, or closes it on failure.
///
/// # Safety
/// `at` is an object of ours which nobody else knows, and `member` a part of it.
pub(crate) unsafe fn join(
    set: Option<&Arc<Set>>,
    at: *mut Fid,
    fd: impl FnOnce() -> Result<RawFd>,
    member: &OnceLock<Membership>,
) -> Result<()> {
    let Some(set) = set else { return Ok(()) };
    match fd().and_then(|fd| Membership::of(set, at, fd)) {
        Ok(joined) => {
            // A new object is in no other set.
            let _ = member.set(joined);
            Ok(())
        }
        Err(e) => {
            // SAFETY: the caller's promise; every object of ours has a table.
            unsafe { ((*(*at).ops).close)(at) };
            Err(e)
        }
    }
}

/// Closes the object `at` with `close`, and removes it from its set. Waiting threads access no
/// member meanwhile.
pub(crate) fn close(
    member: Option<&Membership>,
    at: *mut Fid,
    close: impl FnOnce() -> Result<()>,
) -> Result<()> {
    // The membership ends with the object.
    let Some(set) = member.map(|member| Arc::clone(&member.set)) else { return close() };
    let mut members = set.members();
    close()?;
    members.retain(|member| *member != at);
    Ok(())
}

/// The error of a failed system call for the descriptor of `what`.
fn refused(what: &str) -> Error {
    let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    barewire::errno::refused_by_system(what, errno)
}

impl Membership {
    /// Adds the object `at`, whose descriptor is `fd`, to the set.
    pub(crate) fn of(set: &Arc<Set>, at: *mut Fid, fd: RawFd) -> Result<Self> {
        // SAFETY: the descriptor of an object that is open.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned();
        let fd = fd.map_err(|_io| refused("an object in a wait set"))?;
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        let epoll = set.epoll.as_raw_fd();
        // SAFETY: the event is read during the call.
        if unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &mut event) } != 0 {
            return Err(refused("an object in a wait set"));
        }
        set.members().push(at);
        Ok(Self { set: Arc::clone(set), fd, pid: std::process::id() })
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return;
        }
        let epoll = self.set.epoll.as_raw_fd();
        let fd = self.fd.as_raw_fd();
        // SAFETY: removing needs no event. Both are open, so it does not fail.
        unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
    }
}
