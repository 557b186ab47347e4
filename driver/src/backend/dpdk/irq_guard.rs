//! Keeps EAL's interrupt thread away from memifs that are in use.
//!
//! The memif driver handles its connection in EAL's interrupt thread, without locks: when the peer
//! disconnects, that thread unmaps the rings under a running burst, and double-frees what a closing
//! port frees. Both were seen to crash the process.
//!
//! So that thread is parked in an alarm callback, and runs only in short periodic *windows*. While
//! a window is open no burst of a memif runs, and while EAL's own thread (of [`super::eal`]) opens
//! and closes devices neither a burst nor the interrupt thread runs. Without a memif, the thread is
//! not parked.
//!
//! A burst costs two stores and a load: their order against the window's flag is enforced by
//! membarrier(2) on the window's side.

use std::ffi::c_void;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, compiler_fence, fence};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use barewire_dpdk_sys as sys;

use super::lock;

/// Guard of the bursts of an open memif.
pub(super) struct BurstGuard {
    port: u16,
    /// A burst is under way.
    is_busy: AtomicBool,
}

/// A window is open: no burst of a memif may begin.
static WINDOW_OPEN: AtomicBool = AtomicBool::new(true);

/// membarrier(2) is supported; if not, bursts execute a fence.
static HAS_MEMBARRIER: AtomicBool = AtomicBool::new(false);

static GUARDS: Mutex<Vec<Arc<BurstGuard>>> = Mutex::new(Vec::new());

/// Requested and actual state of the interrupt thread.
struct IrqThreadState {
    park_requested: bool,
    is_parked: bool,
}

static IRQ_THREAD: Mutex<IrqThreadState> =
    Mutex::new(IrqThreadState { park_requested: false, is_parked: false });
static CHANGED: Condvar = Condvar::new();

/// Length of a window, and the interval between two while every memif is connected or while one is
/// connecting: a connection takes about ten windows.
const WINDOW_US: u64 = 30;
const WINDOW_INTERVAL: Duration = Duration::from_millis(50);
const WINDOW_INTERVAL_CONNECTING: Duration = Duration::from_millis(1);

/// Longest wait for the interrupt thread; a timeout is logged, and the work goes on.
const PARK_TIMEOUT: Duration = Duration::from_secs(5);

impl BurstGuard {
    /// Begins a burst; false if a window is open.
    #[inline(always)]
    pub(super) fn begin(&self) -> bool {
        self.is_busy.store(true, Relaxed);
        if HAS_MEMBARRIER.load(Relaxed) {
            compiler_fence(SeqCst);
        } else {
            fence(SeqCst);
        }
        // Acquire: makes the window's changes visible to the burst.
        if WINDOW_OPEN.load(Acquire) {
            self.is_busy.store(false, Release);
            return false;
        }
        true
    }

    /// Ends a burst.
    #[inline(always)]
    pub(super) fn end(&self) {
        self.is_busy.store(false, Release);
    }
}

/// Registers a memif. Called in EAL's thread, as are the functions below.
pub(super) fn register(port: u16) -> Arc<BurstGuard> {
    if !HAS_MEMBARRIER.load(Relaxed) {
        HAS_MEMBARRIER.store(membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED), Relaxed);
    }
    let guard = Arc::new(BurstGuard { port, is_busy: AtomicBool::new(false) });
    lock(&GUARDS).push(Arc::clone(&guard));
    guard
}

/// Unregisters the memif of `port`, if it is one.
pub(super) fn unregister(port: u16) {
    lock(&GUARDS).retain(|guard| guard.port != port);
}

/// Time until the next [`run_window`]; `None` without a memif.
pub(super) fn next_window() -> Option<Duration> {
    let guards = lock(&GUARDS);
    let connecting = guards.iter().any(|guard| !super::link::link(guard.port).0);
    (!guards.is_empty()).then_some(if connecting {
        WINDOW_INTERVAL_CONNECTING
    } else {
        WINDOW_INTERVAL
    })
}

/// Opens a window: the interrupt thread runs.
pub(super) fn run_window() {
    block_bursts();
    unpark_irq_thread();
    park_irq_thread(WINDOW_US);
    unblock_bursts();
}

/// Runs `job` while neither a burst of a memif nor the interrupt thread runs.
pub(super) fn run_exclusive<R>(job: impl FnOnce() -> R) -> R {
    if lock(&GUARDS).is_empty() {
        return job();
    }
    block_bursts();
    park_irq_thread(1);
    let result = job();
    unblock_bursts();
    result
}

/// Blocks new bursts and waits until none is running.
fn block_bursts() {
    WINDOW_OPEN.store(true, SeqCst);
    fence(SeqCst);
    if HAS_MEMBARRIER.load(Relaxed) {
        membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED);
    }
    for guard in lock(&GUARDS).iter() {
        while guard.is_busy.load(Acquire) {
            std::thread::yield_now();
        }
    }
}

/// Unblocks bursts, or lets the interrupt thread run freely if there is no memif any more.
fn unblock_bursts() {
    if lock(&GUARDS).is_empty() {
        unpark_irq_thread();
    } else {
        WINDOW_OPEN.store(false, Release);
    }
}

/// Parks the interrupt thread once it is idle, `us` microseconds from now at the earliest. Returns
/// when it is parked.
fn park_irq_thread(us: u64) {
    let mut state = lock(&IRQ_THREAD);
    if state.is_parked {
        return;
    }
    state.park_requested = true;
    // SAFETY: `park_callback` is called in the interrupt thread and ignores its argument.
    let code = unsafe { sys::rte_eal_alarm_set(us, Some(park_callback), std::ptr::null_mut()) };
    let waited =
        CHANGED.wait_timeout_while(state, PARK_TIMEOUT, |state| code == 0 && !state.is_parked);
    let state = waited.unwrap_or_else(PoisonError::into_inner).0;
    if !state.is_parked {
        tracing::error!(code, "DPDK's interrupt thread does not stop: a memif may crash");
    }
}

fn unpark_irq_thread() {
    let mut state = lock(&IRQ_THREAD);
    state.park_requested = false;
    CHANGED.notify_all();
    while state.is_parked {
        state = CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Alarm callback that parks the interrupt thread.
unsafe extern "C" fn park_callback(_none: *mut c_void) {
    let mut state = lock(&IRQ_THREAD);
    state.is_parked = true;
    CHANGED.notify_all();
    while state.park_requested {
        state = CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    state.is_parked = false;
    CHANGED.notify_all();
}

/// Calls membarrier(2); true on success.
fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: takes numbers and touches no memory.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}
