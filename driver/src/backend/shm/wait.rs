//! Sleeping members, and how senders wake them.
//!
//! The sleeper sets `sleeping`, checks its rings once more, and waits on that word as a futex. A
//! sender publishes its frame, then reads `sleeping`. To exclude a missed wake-up, both sides would
//! need a full fence between their store and their load. The sender has none (it costs more than
//! the rest of sending): it may read a 0 that is about to become a 1, while the sleeper checks
//! before the frame is visible. The sleeper therefore checks again every millisecond, which bounds
//! the cost of a missed wake-up.
//!
//! A thread that sleeps on another port as well cannot wait on a futex. It waits on a datagram
//! socket ([`WakeSocket`]), whose abstract name stands in the segment, and senders wake it by an
//! empty datagram. The name belongs to one network namespace: a sender in another cannot wake the
//! sleeper, which is a missed wake-up as above, and sets `wake_failed`. Any process of that
//! namespace finds the name in /proc/net/unix and may send a datagram, which only ends a sleep
//! early.
//!
//! A sleeper that finds no frame at its second check may sleep for longer: a store leaves its
//! processor within microseconds, so a frame whose sender read a 0 is visible by then, and later
//! senders read a 1. A switch does so, to use no processor while idle.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, fence};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::layout::MEMBERS_MAX;
use super::segment::Segment;
use super::slots::Slots;
use crate::mac::MacAddr;
use crate::port::{PortWaiter, brief};

/// Longest sleep between two checks of the rings.
pub(crate) const RECHECK: Duration = Duration::from_millis(1);

/// Most datagrams that a woken thread reads, so that a sender cannot keep it reading. The rest end
/// the next sleep at once.
pub(super) const DATAGRAMS_MAX: usize = 8;

/// Values of a member's word `sleeping`: awake, or how the sleeper is woken.
const AWAKE: u32 = 0;
const ON_FUTEX: u32 = 1;
const ON_SOCKET: u32 = 2;

/// State shared by a port's own thread, its sleepers and its boards.
pub(super) struct Shared {
    pub(super) seg: Segment,
    pub(super) me: usize,
    /// Address of each sender's next frame word in the mapping; null for none. Written by the
    /// port's thread after each burst, and by the first empty poll after single frames. A sleeper
    /// that reads an old address sees a stale word or bytes of a frame, and checks again a
    /// millisecond later.
    pub(super) next_at: [AtomicPtr<AtomicU64>; MEMBERS_MAX],
    /// Our slots on boards.
    pub(super) slots: Mutex<Slots>,
    woken: AtomicBool,
    /// Sends wake-up datagrams; `None` if the socket could not be made.
    waker: OnceLock<Option<UnixDatagram>>,
}

impl Shared {
    pub(super) fn new(seg: Segment, me: usize) -> Self {
        let next_at = [const { AtomicPtr::new(std::ptr::null_mut()) }; MEMBERS_MAX];
        let slots = Mutex::default();
        Self { seg, me, next_at, slots, woken: AtomicBool::new(false), waker: OnceLock::new() }
    }

    fn has_frame(&self) -> bool {
        self.seg.doorbell(self.me).load(Acquire) != 0
            || self.next_at.iter().take(self.seg.places()).any(|at| {
                let at = at.load(Acquire);
                // SAFETY: null or a word of a mapping that `seg` keeps.
                unsafe { at.as_ref() }.is_some_and(|word| word.load(Acquire) != 0)
            })
    }
}

/// See [`crate::port::Port::waiter`].
pub(super) struct Waiter(pub(super) Arc<Shared>);

impl PortWaiter for Waiter {
    fn wait_or(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) -> bool {
        let until = Instant::now() + brief(also, timeout);
        let sleeping = self.0.seg.sleeping(self.0.me);
        loop {
            sleeping.store(ON_FUTEX, Relaxed);
            // Our store before our check; see the module for the sender's side.
            fence(SeqCst);
            let left = until.saturating_duration_since(Instant::now());
            if self.0.woken.swap(false, SeqCst) || self.0.has_frame() || left.is_zero() {
                break;
            }
            futex_wait(sleeping, ON_FUTEX, left.min(RECHECK));
        }
        sleeping.store(AWAKE, Relaxed);
        true
    }

    fn wake(&self) {
        self.0.woken.store(true, SeqCst);
        wake_member(&self.0, self.0.me);
    }
}

/// Wakes the sleepers of member `m`.
#[cold]
pub(super) fn wake_member(shared: &Shared, m: usize) {
    let sleeping = shared.seg.sleeping(m);
    match sleeping.swap(AWAKE, SeqCst) {
        AWAKE => {}
        ON_SOCKET => shared.send_wakeup(m),
        _ => futex_wake(sleeping),
    }
}

impl Shared {
    /// Sends the datagram that wakes `m`. If that fails, sets `wake_failed`, so that `m` checks its
    /// rings every millisecond.
    fn send_wakeup(&self, m: usize) {
        // Relaxed, here and below: an outdated name only fails to wake.
        let name = self.seg.wake_name(m).load(Relaxed);
        let waker = self.waker.get_or_init(|| {
            let socket = UnixDatagram::unbound().ok()?;
            socket.set_nonblocking(true).ok()?;
            Some(socket)
        });
        let is_sent = waker.as_ref().filter(|_| name != 0).is_some_and(|waker| {
            let sent = wake_address(name).and_then(|to| waker.send_to_addr(&[], &to));
            // A full queue wakes the sleeper as well.
            !sent.is_err_and(|why| why.kind() != io::ErrorKind::WouldBlock)
        });
        if !is_sent {
            self.seg.wake_failed(m).store(1, Relaxed);
        }
    }
}

/// Address of the wake-up socket `name`.
fn wake_address(name: u64) -> io::Result<SocketAddr> {
    let mut text = [0; 32];
    let mut left = &mut text[..];
    write!(left, "barewire-bell-{name:016x}")?;
    let len = 32 - left.len();
    SocketAddr::from_abstract_name(&text[..len])
}

/// Socket to sleep on, for a thread that also waits on other descriptors: it [arms](Self::arm) the
/// socket, waits until [its descriptor](Self::fd) can be read, for at most [`RECHECK`], arms it
/// again to check for a frame, and [disarms](Self::disarm) it.
pub(crate) struct WakeSocket {
    shared: Arc<Shared>,
    socket: UnixDatagram,
}

impl WakeSocket {
    /// Makes the socket of a member. The member must not sleep through a [`Waiter`] as well.
    ///
    /// # Errors
    /// Those of making a socket.
    pub(super) fn bind(shared: &Arc<Shared>) -> io::Result<Self> {
        let (first, second) = (MacAddr::random().to_u64(), MacAddr::random().to_u64());
        let name = first ^ second << 16;
        let socket = UnixDatagram::bind_addr(&wake_address(name)?)?;
        socket.set_nonblocking(true)?;
        shared.seg.wake_name(shared.me).store(name, Relaxed);
        Ok(Self { shared: Arc::clone(shared), socket })
    }

    /// Sets the sleep flag: from now on senders send wake-ups. True if a frame is already waiting.
    pub(crate) fn arm(&self) -> bool {
        self.shared.seg.sleeping(self.shared.me).store(ON_SOCKET, Relaxed);
        // As in `wait`.
        fence(SeqCst);
        self.shared.has_frame()
    }

    /// Clears the sleep flag and drains the socket.
    pub(crate) fn disarm(&self) {
        self.shared.seg.sleeping(self.shared.me).store(AWAKE, Relaxed);
        let _ = (0..DATAGRAMS_MAX).take_while(|_| self.socket.recv(&mut []).is_ok()).count();
    }

    /// Whether a wake-up could not be sent, as from another network namespace. Valid while armed;
    /// never cleared.
    pub(crate) fn has_missed_wakeup(&self) -> bool {
        self.shared.seg.wake_failed(self.shared.me).load(Relaxed) != 0
    }

    /// Makes all wake-ups fail, as if all other members were in another network namespace.
    #[cfg(test)]
    pub(crate) fn hide(&self) {
        self.shared.seg.wake_name(self.shared.me).fetch_xor(1, Relaxed);
    }

    /// Readable once a wake-up was sent.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn futex_wait(word: &AtomicU32, value: u32, timeout: Duration) {
    let ts = libc::timespec { tv_sec: 0, tv_nsec: i64::from(timeout.subsec_nanos()) };
    // SAFETY: FUTEX_WAIT reads an aligned 32-bit word (a reference) and a timespec that lives
    // across the call. Every way it can end (woken, changed, timeout, signal) leads to a new check.
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
