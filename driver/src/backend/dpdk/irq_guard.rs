//! Keeps DPDK's interrupt thread off memifs that are being used.
//!
//! The driver of memif does all that belongs to its connection in EAL's interrupt thread, and locks
//! nothing: when the other side leaves, that thread unmaps the rings under a burst that runs, and
//! frees twice what a closing port is freeing. Both were seen to end the process.
//!
//! So that thread is held, in a callback of ours, and let go for a moment now and then, in a
//! *window*. While the window is open no burst of a memif is called, and while EAL's own thread (of
//! [`super::eal`]) opens and closes devices neither a burst nor the interrupt thread runs. Where
//! there is no memif, nobody is held.
//!
//! The side of the bursts costs two stores and a load: the order between them and the window's flag
//! is made by membarrier(2) on the side of the window.

use std::ffi::c_void;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, compiler_fence, fence};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use barewire_dpdk_sys as sys;

use super::lock;

/// A memif that is open.
pub(super) struct Member {
    port: u16,
    /// A burst is under way.
    is_busy: AtomicBool,
}

/// No burst of a memif may begin.
static WINDOW: AtomicBool = AtomicBool::new(true);

/// membarrier(2) works here; if not, bursts have a fence.
static BARRIER: AtomicBool = AtomicBool::new(false);

static MEMBERS: Mutex<Vec<Arc<Member>>> = Mutex::new(Vec::new());

/// What is wanted of the interrupt thread, and where it is.
struct Held {
    is_wanted: bool,
    is_held: bool,
}

static HELD: Mutex<Held> = Mutex::new(Held { is_wanted: false, is_held: false });
static CHANGED: Condvar = Condvar::new();

/// How long a window is open, and how long it is not, while every memif is connected or while one
/// is not: a connection takes about ten windows.
const OPEN_US: u64 = 30;
const SHUT: Duration = Duration::from_millis(50);
const SHUT_CONNECTING: Duration = Duration::from_millis(1);

/// Longest wait for the interrupt thread; it is told, and things go on.
const PATIENCE: Duration = Duration::from_secs(5);

impl Member {
    /// Says that a burst begins, if one may.
    #[inline(always)]
    pub(super) fn begin(&self) -> bool {
        self.is_busy.store(true, Relaxed);
        if BARRIER.load(Relaxed) {
            compiler_fence(SeqCst);
        } else {
            fence(SeqCst);
        }
        // Acquire: what was done in the window is visible to the burst.
        if WINDOW.load(Acquire) {
            self.is_busy.store(false, Release);
            return false;
        }
        true
    }

    /// Says that it has ended.
    #[inline(always)]
    pub(super) fn end(&self) {
        self.is_busy.store(false, Release);
    }
}

/// Adds a memif. Called in EAL's thread, as everything below.
pub(super) fn join(port: u16) -> Arc<Member> {
    if !BARRIER.load(Relaxed) {
        BARRIER.store(membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED), Relaxed);
    }
    let member = Arc::new(Member { port, is_busy: AtomicBool::new(false) });
    lock(&MEMBERS).push(Arc::clone(&member));
    member
}

/// Removes the memif of `port`, if it is one.
pub(super) fn leave(port: u16) {
    lock(&MEMBERS).retain(|member| member.port != port);
}

/// When [`window`] is due, if it is.
pub(super) fn due() -> Option<Duration> {
    let members = lock(&MEMBERS);
    let connecting = members.iter().any(|member| !super::link::link(member.port).0);
    (!members.is_empty()).then_some(if connecting { SHUT_CONNECTING } else { SHUT })
}

/// Lets the interrupt thread do its work.
pub(super) fn window() {
    quiet();
    release();
    hold(OPEN_US);
    settle();
}

/// Runs `job` while neither a burst of a memif nor the interrupt thread does anything.
pub(super) fn alone<R>(job: impl FnOnce() -> R) -> R {
    if lock(&MEMBERS).is_empty() {
        return job();
    }
    quiet();
    hold(1);
    let result = job();
    settle();
    result
}

/// Begins a window: when this returns no burst of a memif is under way, and none begins.
fn quiet() {
    WINDOW.store(true, SeqCst);
    fence(SeqCst);
    if BARRIER.load(Relaxed) {
        membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED);
    }
    for member in lock(&MEMBERS).iter() {
        while member.is_busy.load(Acquire) {
            std::thread::yield_now();
        }
    }
}

/// Ends a window, or leaves the interrupt thread to itself if there is no memif any more.
fn settle() {
    if lock(&MEMBERS).is_empty() {
        release();
    } else {
        WINDOW.store(false, Release);
    }
}

/// Stops the interrupt thread when it has nothing to do, `us` microseconds from now at the
/// earliest. Returns when it stands.
fn hold(us: u64) {
    let mut held = lock(&HELD);
    if held.is_held {
        return;
    }
    held.is_wanted = true;
    // SAFETY: `stay` is called in the interrupt thread and takes no argument.
    let code = unsafe { sys::rte_eal_alarm_set(us, Some(stay), std::ptr::null_mut()) };
    let waited = CHANGED.wait_timeout_while(held, PATIENCE, |held| code == 0 && !held.is_held);
    let held = waited.unwrap_or_else(PoisonError::into_inner).0;
    if !held.is_held {
        tracing::error!(code, "DPDK's interrupt thread does not stop: a memif may crash");
    }
}

fn release() {
    let mut held = lock(&HELD);
    held.is_wanted = false;
    CHANGED.notify_all();
    while held.is_held {
        held = CHANGED.wait(held).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Where the interrupt thread stands.
unsafe extern "C" fn stay(_none: *mut c_void) {
    let mut held = lock(&HELD);
    held.is_held = true;
    CHANGED.notify_all();
    while held.is_wanted {
        held = CHANGED.wait(held).unwrap_or_else(PoisonError::into_inner);
    }
    held.is_held = false;
    CHANGED.notify_all();
}

/// Whether the call did what it says.
fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: takes numbers and touches no memory.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}
