//! State shared by a port, its control thread and the threads that sleep on it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::region::Conn;
use super::ring::{arm, disarm, has_frames};
use crate::backend::{WakeEvent, raw, readable, sleep};
use crate::port::PortWaiter;

/// Most connections that wait for the port to adopt them; more clients have to wait.
const QUEUE: usize = 4;

/// Sleep before the first check: a sender may have read the old flag just before it was set. Later
/// senders see it set.
const RECHECK: Duration = Duration::from_millis(1);
/// Longest sleep between two checks, for failed wake-ups; each sleep is twice the last. Less than
/// the longest retransmission timeout, or a frame without a wake-up would be retransmitted.
const RECHECK_MAX: Duration = Duration::from_millis(32);
/// A wake-up that failed, in [`Shared::misses`].
const MISS: u32 = 1 << 31;

pub(super) struct Shared {
    /// Raised with every connection that is made or ends.
    pub(super) epoch: AtomicU32,
    /// The port's index in its receive ring.
    pub(super) rx_at: AtomicU16,
    is_woken: AtomicBool,
    /// Which of the last 32 wake-ups failed, the latest in the highest bit. While any has, or the
    /// peer coalesces them, a sleeper checks often.
    pub(super) misses: AtomicU32,
    bell: WakeEvent,
    state: Mutex<State>,
}

struct State {
    /// The port's current connection.
    live: Option<Arc<Conn>>,
    /// Connections that wait for the port to adopt them.
    made: VecDeque<Arc<Conn>>,
    /// The epoch that the port has seen.
    seen: u32,
    /// Threads that sleep, or are about to.
    sleepers: u32,
}

impl Shared {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            epoch: AtomicU32::new(0),
            rx_at: AtomicU16::new(0),
            is_woken: AtomicBool::new(false),
            misses: AtomicU32::new(0),
            bell: WakeEvent::new()?,
            state: Mutex::new(State {
                live: None,
                made: VecDeque::with_capacity(QUEUE),
                seen: 0,
                sleepers: 0,
            }),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The port takes the next connection, if there is one, and forgets the last.
    pub(super) fn adopt(&self) -> Option<Arc<Conn>> {
        self.misses.store(0, Relaxed);
        let mut state = self.state();
        state.live = state.made.pop_front();
        state.live.clone()
    }

    /// The port has done what `epoch` was raised for.
    pub(super) fn mark_seen(&self, epoch: u32) {
        self.state().seen = epoch;
    }

    /// Whether one more connection may be made.
    pub(super) fn has_room(&self) -> bool {
        self.state().made.len() < QUEUE
    }

    /// Queues a new connection for the port.
    pub(super) fn made(&self, conn: &Arc<Conn>) {
        self.state().made.push_back(Arc::clone(conn));
        self.notify_port();
    }

    /// The other side has woken us, or has failed to.
    fn record_wakeup(&self, miss: u32) {
        self.misses.store(self.misses.load(Relaxed) >> 1 | miss, Relaxed);
    }

    /// A thread is about to sleep: on this connection, and until the epoch is another one.
    fn begin_sleep(&self) -> (Option<Arc<Conn>>, u32) {
        let mut state = self.state();
        state.sleepers += 1;
        (state.live.clone(), state.seen)
    }

    /// It does no more. The last one says so to the sender: others would not be woken.
    fn end_sleep(&self, conn: Option<&Conn>) {
        let mut state = self.state();
        state.sleepers -= 1;
        if state.sleepers == 0 {
            [conn, state.live.as_deref()].into_iter().flatten().for_each(|conn| disarm(&conn.rx));
        }
    }

    /// Makes the port check its connection.
    pub(super) fn notify_port(&self) {
        self.epoch.fetch_add(1, SeqCst);
        self.bell.ring();
    }
}

/// See [`crate::port::Port::waiter`].
pub(super) struct Waiter(pub(super) Arc<Shared>);

impl Waiter {
    /// Whether there is something for the port to do.
    fn has_event(&self, conn: Option<&Conn>, seen: u32) -> bool {
        let shared = &*self.0;
        shared.is_woken.swap(false, SeqCst)
            || shared.epoch.load(Acquire) != seen
            || self.has_frame(conn)
    }

    fn has_frame(&self, conn: Option<&Conn>) -> bool {
        conn.is_some_and(|conn| has_frames(&conn.rx, self.0.rx_at.load(Relaxed)))
    }
}

impl PortWaiter for Waiter {
    fn wait_or(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        let shared = &*self.0;
        let (conn, seen) = shared.begin_sleep();
        let bell = readable(shared.bell.fd());
        let event = conn.as_ref().and_then(|conn| conn.rx.event.poll_fd());
        let may_hear = || event.is_some() && shared.misses.load(Relaxed) == 0;
        // Without a connection only the bell says that something has happened.
        let mut look = if conn.is_some() { RECHECK } else { timeout };
        let mut is_first = true;
        let came = loop {
            if let Some(conn) = &conn {
                arm(&conn.rx);
            }
            let left = until.saturating_duration_since(Instant::now());
            if self.has_event(conn.as_deref(), seen) {
                break true;
            }
            if left.is_zero() {
                break false;
            }
            let mut fds = [bell, readable(event.unwrap_or(-1)), readable(raw(also))];
            let mut is_heard = sleep(&mut fds, left.min(look));
            let is_found = !is_heard && self.has_frame(conn.as_deref());
            if is_found {
                // It may have come, and woken us, only now.
                is_heard = sleep(&mut fds, Duration::ZERO);
            }
            if fds[0].revents != 0 {
                shared.bell.clear();
            }
            if let Some(conn) = conn.as_ref().filter(|_| fds[1].revents != 0) {
                conn.rx.event.clear();
                shared.record_wakeup(0);
            }
            if is_found && !is_heard && !is_first {
                shared.record_wakeup(MISS);
            }
            is_first = false;
            if conn.is_some() {
                look = if may_hear() { RECHECK_MAX.min(2 * look) } else { RECHECK };
            }
            if fds[2].revents != 0 {
                break true;
            }
        };
        shared.end_sleep(conn.as_deref());
        came
    }

    fn wake(&self) {
        self.0.is_woken.store(true, SeqCst);
        self.0.bell.ring();
    }
}
