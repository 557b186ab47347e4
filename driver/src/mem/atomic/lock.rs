//! Locks for elements that no instruction changes at once.

use std::sync::{Mutex, PoisonError};

/// Excludes whoever changes the same element: `long double`, the 16- and 32-byte complex types, and
/// a `float complex` that is not at a multiple of 8.
///
/// Only atomics take the lock. A plain read of such an element by the application, or by RMA, may
/// see half of an update.
pub trait WideLock: Sync {
    /// Calls `f` once, alone among all callers that gave the same `addr`, in whatever process and
    /// wherever that process has the page: only `addr`'s place in its page of 4 KiB may count.
    fn with(&self, addr: usize, f: &mut dyn FnMut());
}

/// How many locks a table has. Elements share one if they lie in the same 64 bytes of their page.
pub(super) const STRIPES: usize = 64;

/// The lock for an element at `addr`, which is the same in every mapping of its page.
pub(super) const fn stripe(addr: usize) -> usize {
    (addr % 4096) / 64 % STRIPES
}

/// Locks that only this process knows.
#[derive(Debug)]
pub struct LocalLocks([Mutex<()>; STRIPES]);

impl LocalLocks {
    /// All free.
    pub const fn new() -> Self {
        Self([const { Mutex::new(()) }; STRIPES])
    }
}

impl Default for LocalLocks {
    fn default() -> Self {
        Self::new()
    }
}

impl WideLock for LocalLocks {
    fn with(&self, addr: usize, f: &mut dyn FnMut()) {
        // The lock guards no state of its own that a panic could have left half done.
        let _held = self.0[stripe(addr)].lock().unwrap_or_else(PoisonError::into_inner);
        f();
    }
}

/// The table of [`Sharing::Shared`](super::Sharing::Shared).
pub(super) static LOCAL: LocalLocks = LocalLocks::new();
