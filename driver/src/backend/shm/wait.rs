//! Sleeping until a frame may have come, and waking who sleeps.
//!
//! The sleeper sets `sleeping`, looks once more, and waits on it as a futex. A sender publishes
//! its frame, then reads `sleeping`. For neither to miss the other, both would need a full fence
//! between their store and their load; the sender is spared that (it costs more than the rest of
//! sending). So it may read a 0 that is about to become a 1, and the sleeper may look before the
//! frame shows. The sleeper therefore looks again every millisecond, which is the most that a
//! missed wake-up costs.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, fence};
use std::time::{Duration, Instant};

use super::layout::MEMBERS_MAX;
use super::segment::Segment;
use crate::port::PortWaiter;

/// Longest time between two looks.
const LOOK: Duration = Duration::from_millis(1);

/// What a port's own thread tells its sleepers.
pub(super) struct Shared {
    pub(super) seg: Segment,
    pub(super) me: usize,
    /// Where the next frame's word of each sender comes, in the mapping; null for none. Written by
    /// the port's thread after each burst, and by the first poll that finds nothing after frames
    /// that came one by one: a sleeper that reads an old one sees a word that is not 0 or one that
    /// was, or what a frame holds by now, and looks a millisecond later again.
    pub(super) next_at: [AtomicPtr<AtomicU64>; MEMBERS_MAX],
    woken: AtomicBool,
}

impl Shared {
    pub(super) fn new(seg: Segment, me: usize) -> Self {
        let next_at = [const { AtomicPtr::new(std::ptr::null_mut()) }; MEMBERS_MAX];
        Self { seg, me, next_at, woken: AtomicBool::new(false) }
    }

    fn something(&self) -> bool {
        self.seg.bell(self.me).load(Acquire) != 0
            || self.next_at.iter().any(|at| {
                let at = at.load(Acquire);
                // SAFETY: null or a word of the mapping that `seg` keeps.
                unsafe { at.as_ref() }.is_some_and(|word| word.load(Acquire) != 0)
            })
    }
}

/// See [`crate::port::Port::waiter`].
pub(super) struct Waiter(pub(super) Arc<Shared>);

impl PortWaiter for Waiter {
    fn wait(&self, timeout: Duration) {
        let until = Instant::now() + timeout;
        let sleeping = self.0.seg.sleeping(self.0.me);
        loop {
            sleeping.store(1, Relaxed);
            // Our store before our look; see above for the other side.
            fence(SeqCst);
            let left = until.saturating_duration_since(Instant::now());
            if self.0.woken.swap(false, SeqCst) || self.0.something() || left.is_zero() {
                break;
            }
            futex_wait(sleeping, 1, left.min(LOOK));
        }
        sleeping.store(0, Relaxed);
    }

    fn wake(&self) {
        self.0.woken.store(true, SeqCst);
        wake_member(&self.0.seg, self.0.me);
    }
}

/// Wakes the sleepers of member `m`.
#[cold]
pub(super) fn wake_member(seg: &Segment, m: usize) {
    wake_all(seg.sleeping(m));
}

/// Wakes all who sleep on `sleeping`.
pub(super) fn wake_all(sleeping: &AtomicU32) {
    if sleeping.swap(0, SeqCst) != 0 {
        futex_wake(sleeping);
    }
}

fn futex_wait(word: &AtomicU32, value: u32, timeout: Duration) {
    let ts = libc::timespec { tv_sec: 0, tv_nsec: i64::from(timeout.subsec_nanos()) };
    // SAFETY: FUTEX_WAIT reads an aligned 32-bit word (a reference) and a timespec that lives
    // across the call. Every way it can end (woken, changed, timeout, signal) leads to a new look.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, &raw const ts);
    }
}

fn futex_wake(word: &AtomicU32) {
    // SAFETY: FUTEX_WAKE uses the address of an aligned word as a key and writes nothing.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
    }
}
