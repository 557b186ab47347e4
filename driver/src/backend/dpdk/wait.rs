//! Sleeping on a port that can only be polled, and threads that DPDK has to know.

use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use barewire_dpdk_sys as sys;

use crate::port::{PortWaiter, brief};

/// How long a sleeper leaves the device alone: most drivers wake nobody.
const NAP: Duration = Duration::from_micros(500);

/// A waiter that returns after a nap, or when it is woken.
#[derive(Default)]
pub(super) struct Nap {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl PortWaiter for Nap {
    fn wait_or(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) -> bool {
        let woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        let nap = brief(also, timeout).min(NAP);
        let slept = self.changed.wait_timeout_while(woken, nap, |woken| !*woken);
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

/// A thread that DPDK knows, until it ends.
struct Registered(Cell<bool>);

impl Drop for Registered {
    fn drop(&mut self) {
        if self.0.get() {
            // SAFETY: this thread was registered and calls no burst any more.
            unsafe { sys::rte_thread_unregister() };
        }
    }
}

thread_local!(static LCORE: Registered = const { Registered(Cell::new(false)) });

/// Makes the calling thread known to DPDK, so that it may keep packet buffers at hand. One that
/// cannot be (there are 128) goes to the pool each time.
pub(super) fn register() {
    // It is gone only while the thread ends.
    let _ = LCORE.try_with(|lcore| {
        if !lcore.0.get() {
            // SAFETY: EAL runs, or there would be no port. A thread of EAL's own has a number.
            lcore.0.set(unsafe { sys::rte_thread_register() } == 0);
        }
    });
}
