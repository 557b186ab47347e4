//! The waiter of ports without interrupts, and the registration of threads with DPDK.

use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use barewire_dpdk_sys as sys;

use crate::port::{PortWaiter, brief};

/// Longest sleep between two polls: most drivers have no interrupt here.
const POLL_INTERVAL: Duration = Duration::from_micros(500);

/// A waiter that returns after [`POLL_INTERVAL`], or when it is woken.
#[derive(Default)]
pub(super) struct PollWaiter {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl PortWaiter for PollWaiter {
    fn wait_or(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) -> bool {
        let woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        let timeout = brief(also, timeout).min(POLL_INTERVAL);
        let slept = self.changed.wait_timeout_while(woken, timeout, |woken| !*woken);
        *slept.unwrap_or_else(PoisonError::into_inner).0 = false;
        true
    }

    fn wake(&self) {
        *self.woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    fn has_interrupt(&self) -> bool {
        false
    }
}

/// Registration of a thread with DPDK, undone when the thread ends.
struct LcoreRegistration(Cell<bool>);

impl Drop for LcoreRegistration {
    fn drop(&mut self) {
        if self.0.get() {
            // SAFETY: this thread was registered and calls no burst any more.
            unsafe { sys::rte_thread_unregister() };
        }
    }
}

thread_local!(static LCORE: LcoreRegistration = const { LcoreRegistration(Cell::new(false)) });

/// Registers the calling thread with DPDK, so that it has an mbuf cache. A thread beyond the limit
/// of 128 works without one.
pub(super) fn register_thread() {
    // Inaccessible only while the thread ends.
    let _ = LCORE.try_with(|lcore| {
        if !lcore.0.get() {
            // SAFETY: EAL runs, since a port exists. EAL's own threads are registered already.
            lcore.0.set(unsafe { sys::rte_thread_register() } == 0);
        }
    });
}
