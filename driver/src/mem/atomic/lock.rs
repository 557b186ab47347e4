//! Locks for elements that are too wide for atomic instructions.

use std::sync::{Mutex, PoisonError};

/// Mutual exclusion of atomics on the same element: `long double`, the 16- and 32-byte complex
/// types, and a `float complex` that is not 8-byte aligned.
///
/// Only atomics take the lock. A plain read of such an element by the application, or by RMA, may
/// see half of an update.
pub trait WideLock: Sync {
    /// Calls `f` once, exclusively among all callers with the same `addr`, in whatever process and
    /// wherever it has mapped the page: only the offset of `addr` in its 4 KiB page may count.
    fn with(&self, addr: usize, f: &mut dyn FnMut());
}

/// Number of locks of a table. Elements in the same 64 bytes of their page share one.
pub(super) const STRIPES: usize = 64;

/// The lock for an element at `addr`, which is the same in every mapping of its page.
pub(super) const fn stripe(addr: usize) -> usize {
    (addr % 4096) / 64 % STRIPES
}

/// Locks of this process only.
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
