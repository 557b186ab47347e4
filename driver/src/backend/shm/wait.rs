//! Sleeping until a frame may have come, and waking who sleeps.
//!
//! The sleeper sets `sleeping`, looks once more, and waits on it as a futex. A sender publishes
//! its frame, then reads `sleeping`. For neither to miss the other, both would need a full fence
//! between their store and their load; the sender is spared that (it costs more than the rest of
//! sending). So it may read a 0 that is about to become a 1, and the sleeper may look before the
//! frame shows. The sleeper therefore looks again every millisecond, which is the most that a
//! missed wake-up costs.
//!
//! Who sleeps on another port as well ([`Bell`]) cannot wait on a futex. It waits on a socket then,
//! whose name stands in the segment, and is sent an empty datagram. The name is of one network
//! namespace: a sender in another cannot wake it, which is a missed wake-up as above, and leaves
//! word of that. Everybody in that namespace finds it in /proc/net/unix and may ring: the sleep is
//! shorter then, no more.
//!
//! A sleeper that is still down when it looks again may sleep for longer: a store leaves its
//! processor within microseconds, so a frame whose sender read a 0 shows by then, and whoever sends
//! later reads a 1. A switch does so, to take no processor while nothing comes.

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

/// Longest time between two looks.
pub(crate) const LOOK: Duration = Duration::from_millis(1);

/// Most datagrams that a woken thread reads, so that a sender cannot keep it there. The rest ends
/// its next sleep at once.
pub(super) const RINGS: usize = 8;

/// What a member's word `sleeping` says: nobody sleeps, or how who does is woken.
const AWAKE: u32 = 0;
const ON_FUTEX: u32 = 1;
const ON_SOCKET: u32 = 2;

/// What a port's own thread tells its sleepers.
pub(super) struct Shared {
    pub(super) seg: Segment,
    pub(super) me: usize,
    /// Where the next frame's word of each sender comes, in the mapping; null for none. Written by
    /// the port's thread after each burst, and by the first poll that finds nothing after frames
    /// that came one by one: a sleeper that reads an old one sees a word that is not 0 or one that
    /// was, or what a frame holds by now, and looks a millisecond later again.
    pub(super) next_at: [AtomicPtr<AtomicU64>; MEMBERS_MAX],
    /// Our slots on boards.
    pub(super) slots: Mutex<Slots>,
    woken: AtomicBool,
    /// What members that sleep on sockets are woken through; `None` if it could not be made.
    waker: OnceLock<Option<UnixDatagram>>,
}

impl Shared {
    pub(super) fn new(seg: Segment, me: usize) -> Self {
        let next_at = [const { AtomicPtr::new(std::ptr::null_mut()) }; MEMBERS_MAX];
        let slots = Mutex::default();
        Self { seg, me, next_at, slots, woken: AtomicBool::new(false), waker: OnceLock::new() }
    }

    fn something(&self) -> bool {
        self.seg.bell(self.me).load(Acquire) != 0
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
            // Our store before our look; see above for the other side.
            fence(SeqCst);
            let left = until.saturating_duration_since(Instant::now());
            if self.0.woken.swap(false, SeqCst) || self.0.something() || left.is_zero() {
                break;
            }
            futex_wait(sleeping, ON_FUTEX, left.min(LOOK));
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
        ON_SOCKET => shared.ring(m),
        _ => futex_wake(sleeping),
    }
}

impl Shared {
    /// Sends the datagram that wakes `m`. If that fails, `m` looks by itself later, and is told to
    /// look often.
    fn ring(&self, m: usize) {
        // Relaxed, here and below: a name that is not one wakes nobody.
        let name = self.seg.bell_name(m).load(Relaxed);
        let waker = self.waker.get_or_init(|| {
            let socket = UnixDatagram::unbound().ok()?;
            socket.set_nonblocking(true).ok()?;
            Some(socket)
        });
        let is_rung = waker.as_ref().filter(|_| name != 0).is_some_and(|waker| {
            let sent = socket_of(name).and_then(|to| waker.send_to_addr(&[], &to));
            // As many datagrams lie there as fit: it wakes.
            !sent.is_err_and(|why| why.kind() != io::ErrorKind::WouldBlock)
        });
        if !is_rung {
            self.seg.deaf(m).store(1, Relaxed);
        }
    }
}

/// Where the bell called `name` is.
fn socket_of(name: u64) -> io::Result<SocketAddr> {
    let mut text = [0; 32];
    let mut left = &mut text[..];
    write!(left, "barewire-bell-{name:016x}")?;
    let len = 32 - left.len();
    SocketAddr::from_abstract_name(&text[..len])
}

/// How a thread sleeps on this port and on something else: it [lies down](Self::lie_down), waits
/// until [its descriptor](Self::fd) can be read, for no longer than [`LOOK`], lies down again to
/// see whether a frame has come, and [gets up](Self::get_up).
pub(crate) struct Bell {
    shared: Arc<Shared>,
    socket: UnixDatagram,
}

impl Bell {
    /// The bell of a member, which sleeps on nothing else.
    ///
    /// # Errors
    /// Those of making a socket.
    pub(super) fn hang(shared: &Arc<Shared>) -> io::Result<Self> {
        let (first, second) = (MacAddr::random().to_u64(), MacAddr::random().to_u64());
        let name = first ^ second << 16;
        let socket = UnixDatagram::bind_addr(&socket_of(name)?)?;
        socket.set_nonblocking(true)?;
        shared.seg.bell_name(shared.me).store(name, Relaxed);
        Ok(Self { shared: Arc::clone(shared), socket })
    }

    /// From now on whoever sends rings. True if something has come already.
    pub(crate) fn lie_down(&self) -> bool {
        self.shared.seg.sleeping(self.shared.me).store(ON_SOCKET, Relaxed);
        // As in `wait`.
        fence(SeqCst);
        self.shared.something()
    }

    /// Nobody rings any more.
    pub(crate) fn get_up(&self) {
        self.shared.seg.sleeping(self.shared.me).store(AWAKE, Relaxed);
        let _ = (0..RINGS).take_while(|_| self.socket.recv(&mut []).is_ok()).count();
    }

    /// Whether somebody could not ring: one in another network namespace. To be asked while down;
    /// it stays so.
    pub(crate) fn is_deaf(&self) -> bool {
        self.shared.seg.deaf(self.shared.me).load(Relaxed) != 0
    }

    /// As if all others were in another network namespace.
    #[cfg(test)]
    pub(crate) fn hide(&self) {
        self.shared.seg.bell_name(self.shared.me).fetch_xor(1, Relaxed);
    }

    /// Can be read when somebody has rung.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
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
