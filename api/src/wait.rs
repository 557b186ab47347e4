//! Wait objects: how a thread sleeps until a queue or counter has something for it.
//!
//! No waiter spins. In a domain with a progress thread, waiters sleep until it finds something for
//! them. In a domain with manual progress a waiter has to run the loop: one, the *leader*, waits on
//! the port itself and runs the loop when a frame arrives; the others wait for it. When it leaves,
//! the next one leads.
//!
//! Sleepers register when they will turn the loop at the latest. A thread that creates an earlier
//! deadline (a receive that pulls a message, a send that may have to be retransmitted) wakes them.
//!
//! No wake-up is lost: a waiter reads the epoch, checks its queue, registers under the domain's
//! lock and sleeps only if the epoch is unchanged; a thread that makes its queue ready later finds
//! it registered and advances the epoch.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use barewire_dataplane::node::{CntrId, CqId, Node};
use barewire_dataplane::types::Instant;
use barewire_driver::port::PortWaiter;
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::errno::{Error, Result, refused_by_system};

/// Wait object of a queue or counter (`enum fi_wait_obj`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WaitObj {
    /// `FI_WAIT_NONE`: none; the blocking calls return `FI_ENOSYS`.
    #[default]
    None,
    /// `FI_WAIT_UNSPEC`: the blocking calls work.
    Unspec,
    /// `FI_WAIT_SET`: deprecated, refused with `FI_ENOSYS`. The provider makes sets of descriptors.
    Set,
    /// `FI_WAIT_FD`: the blocking calls work, and an eventfd is readable while the object may have
    /// an entry. In a domain with manual progress the first such object starts the progress thread
    /// with the idle policy `sleep`, which receives while the application sleeps in poll(2).
    Fd,
    /// `FI_WAIT_MUTEX_COND`: deprecated, refused with `FI_ENOSYS`.
    MutexCond,
    /// `FI_WAIT_YIELD`: as `Unspec`.
    Yield,
    /// `FI_WAIT_POLLFD`: refused with `FI_ENOSYS`.
    PollFd,
}

impl WaitObj {
    /// Whether there is a wait object. [`Error::NoSys`] for a kind that is not supported.
    pub(crate) fn waits(self) -> Result<bool> {
        match self {
            Self::None => Ok(false),
            Self::Unspec | Self::Fd | Self::Yield => Ok(true),
            Self::Set | Self::MutexCond | Self::PollFd => Err(Error::NoSys),
        }
    }
}

/// A timeout of a blocking call in milliseconds; negative: none.
pub(crate) fn timeout_of(ms: i32) -> Option<Duration> {
    u64::try_from(ms).ok().map(Duration::from_millis)
}

/// The object that a thread waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    Cq(CqId),
    Cntr(CntrId),
}

/// The level of a target that its sleepers compare with what they saw: entries of a queue, or
/// value and errors of a counter.
fn level(node: &Node, target: Target) -> (u64, u64) {
    match target {
        Target::Cq(cq) => (node.cqs.ready(cq).unwrap_or(0) as u64, 0),
        Target::Cntr(c) => (node.cntrs.read(c).unwrap_or(0), node.cntrs.readerr(c).unwrap_or(0)),
    }
}

/// All wait targets of a domain, with their sleepers and descriptors. Under the domain's lock.
#[derive(Default)]
pub(crate) struct Watch {
    entries: Vec<Option<Entry>>,
    /// Number of watchers: entries with a sleeper or a descriptor, and others that have to be
    /// checked after every turn and post, which skip this if it is 0. Plus [`DRIVEN`], if a
    /// progress thread turns the loop.
    active: u64,
    /// All sleepers.
    sleepers: u32,
    /// When the last sleeper that turns the loop wakes by itself; 0 if there is none.
    polled_by: Instant,
}

/// Flag in [`Watch::active`], above any number of watchers.
const DRIVEN: u64 = 1 << 32;

struct Entry {
    target: Target,
    sleepers: u32,
    /// Sleepers wake above this level or when the errors differ from these.
    above: u64,
    errors: u64,
    /// The sleepers have been woken already.
    woken: bool,
    /// `fi_cq_signal`s that no sleeper has taken yet.
    signals: u32,
    fd: Option<EventFd>,
    fd_set: bool,
    /// Level of a counter when its descriptor was last cleared.
    cleared: (u64, u64),
}

impl Entry {
    fn active(&self) -> bool {
        self.sleepers > 0 || self.fd.is_some()
    }
}

impl Watch {
    #[inline(always)]
    pub(crate) fn has_watchers(&self) -> bool {
        self.active as u32 > 0
    }

    /// Whether there are no watchers and no progress thread.
    #[inline(always)]
    pub(crate) fn is_idle(&self) -> bool {
        self.active == 0
    }

    /// Notes that a progress thread turns the loop from now on.
    pub(crate) fn set_driven(&mut self) {
        self.active |= DRIVEN;
    }

    /// Whether a progress thread turns the loop.
    pub(crate) fn is_driven(&self) -> bool {
        self.active & DRIVEN != 0
    }

    /// Adds a watcher, to be checked after every turn and post.
    pub(crate) fn add_watcher(&mut self) {
        self.active += 1;
    }

    /// Removes a watcher.
    pub(crate) fn remove_watcher(&mut self) {
        self.active -= 1;
    }

    /// Registers a target, with a descriptor or without.
    ///
    /// # Errors
    /// [`Error::ManyFiles`] if the process has no descriptor left.
    pub(crate) fn open(&mut self, target: Target, fd: bool) -> Result<usize> {
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        let fd = match fd {
            false => None,
            true => Some(EventFd::from_value_and_flags(0, flags).map_err(|errno| {
                refused_by_system("the descriptor of a queue or counter", errno as i32)
            })?),
        };
        let entry = Entry {
            target,
            sleepers: 0,
            above: 0,
            errors: 0,
            woken: false,
            signals: 0,
            fd,
            fd_set: false,
            cleared: (0, 0),
        };
        self.active += u64::from(entry.active());
        let free = self.entries.iter().position(Option::is_none);
        let idx = free.unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() - 1
        });
        self.entries[idx] = Some(entry);
        Ok(idx)
    }

    pub(crate) fn close(&mut self, idx: usize) {
        if let Some(entry) = self.entries[idx].take() {
            self.active -= u64::from(entry.active());
        }
    }

    fn entry(&mut self, idx: usize) -> &mut Entry {
        self.entries[idx].as_mut().expect("the object that owns the entry is open")
    }

    pub(crate) fn fd(&mut self, idx: usize) -> Option<RawFd> {
        self.entry(idx).fd.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Asks for one sleeper, now or next, to return without an entry.
    pub(crate) fn signal(&mut self, idx: usize) {
        let entry = self.entry(idx);
        entry.signals = entry.sleepers.max(1);
        entry.set_fd();
    }

    /// Takes a pending signal.
    pub(crate) fn take_signal(&mut self, idx: usize) -> bool {
        let entry = self.entry(idx);
        let there = entry.signals > 0;
        entry.signals -= u32::from(there);
        there
    }

    /// The level now, to decide above which one to sleep.
    pub(crate) fn level(&mut self, idx: usize, node: &Node) -> (u64, u64) {
        level(node, self.entry(idx).target)
    }

    /// Registers a sleeper that wakes above level `above`, or when the error count is not `errors`.
    pub(crate) fn sleep_on(&mut self, idx: usize, above: u64, errors: u64) {
        let entry = self.entry(idx);
        let was = entry.active();
        // Woken sleepers check again, and register anew.
        let alone = entry.sleepers == 0 || entry.woken;
        entry.above = if alone { above } else { entry.above.min(above) };
        (entry.errors, entry.woken) = (errors, false);
        entry.sleepers += 1;
        self.active += u64::from(!was);
        self.sleepers += 1;
    }

    /// Notes that a registered sleeper turns the loop at `due`, the next deadline, at the latest.
    pub(crate) fn sleeps_until(&mut self, due: Instant) {
        self.polled_by = self.polled_by.max(due);
    }

    /// Whether a sleeper turns the loop.
    #[inline]
    pub(crate) fn has_pollers(&self) -> bool {
        self.polled_by != Instant(0)
    }

    /// Whether a sleeper that turns the loop sleeps longer than to `due`. All such sleepers have to
    /// be woken then, and register anew.
    pub(crate) fn oversleeps(&mut self, due: Instant) -> bool {
        let late = due < self.polled_by;
        if late {
            self.polled_by = Instant(0);
        }
        late
    }

    pub(crate) fn awake(&mut self, idx: usize) {
        let entry = self.entry(idx);
        entry.sleepers -= 1;
        let is = entry.active();
        self.active -= u64::from(!is);
        self.sleepers -= 1;
        if self.sleepers == 0 {
            self.polled_by = Instant(0);
        }
    }

    /// Sets descriptors and wakes sleepers whose target is ready.
    pub(crate) fn notify(&mut self, node: &Node, sleep: &Sleep) {
        let mut wake = false;
        for entry in self.entries.iter_mut().flatten().filter(|e| e.active()) {
            let (at, errors) = level(node, entry.target);
            if entry.sleepers > 0 && !entry.woken && (at > entry.above || errors != entry.errors) {
                entry.woken = true;
                wake = true;
            }
            let ready = match entry.target {
                Target::Cq(_) => at > 0,
                Target::Cntr(_) => (at, errors) != entry.cleared,
            };
            if ready {
                entry.set_fd();
            }
        }
        if wake {
            sleep.notify();
        }
    }

    /// Makes the descriptor unreadable again: the caller has seen the target empty.
    #[cold]
    pub(crate) fn clear_fd(&mut self, idx: usize, node: &Node) {
        let entry = self.entry(idx);
        entry.cleared = level(node, entry.target);
        if std::mem::take(&mut entry.fd_set)
            && let Some(fd) = &entry.fd
        {
            // Fails only if it is clear already.
            let _ = fd.read();
        }
    }

    /// Whether the descriptor must stay readable: an entry is there or a signal is owed.
    pub(crate) fn pending(&mut self, idx: usize, node: &Node) -> bool {
        let entry = self.entry(idx);
        let now = level(node, entry.target);
        match entry.target {
            Target::Cq(_) => now.0 > 0 || entry.signals > 0,
            Target::Cntr(_) => now != entry.cleared,
        }
    }
}

impl Entry {
    fn set_fd(&mut self) {
        if let Some(fd) = self.fd.as_ref().filter(|_| !self.fd_set) {
            // Fails only if the count would pass 2^64 - 2.
            let _ = fd.write(1);
            self.fd_set = true;
        }
    }
}

/// Where the threads of a domain sleep.
pub(crate) struct Sleep {
    epoch: AtomicU64,
    /// Whether a leader waits on the port.
    led: Mutex<bool>,
    woken: Condvar,
    port: Option<Arc<dyn PortWaiter>>,
}

/// Longest sleep in one piece. What could be missed longer than this does not exist.
const LONGEST: Duration = Duration::from_secs(1);

/// Period of a leader whose port cannot be slept on.
const POLL_PERIOD: Duration = Duration::from_micros(200);

impl Sleep {
    pub(crate) fn new(port: Option<Arc<dyn PortWaiter>>) -> Self {
        Self { epoch: AtomicU64::new(0), led: Mutex::new(false), woken: Condvar::new(), port }
    }

    /// To be read before the queue is checked.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Wakes all waiters, to check again.
    pub(crate) fn notify(&self) {
        let led = self.lock();
        self.epoch.fetch_add(1, Ordering::Release);
        let somebody_leads = *led;
        drop(led);
        self.woken.notify_all();
        if somebody_leads {
            self.wake_port();
        }
    }

    /// Sleeps until the epoch differs from `seen`, the port has an event (if `may_lead` and no
    /// other thread is leader), or `timeout` has passed. May return early.
    pub(crate) fn sleep(&self, seen: u64, timeout: Duration, may_lead: bool) {
        let timeout = timeout.min(LONGEST);
        let mut led = self.lock();
        if self.epoch() != seen {
            return;
        }
        if may_lead && !*led {
            *led = true;
            drop(led);
            self.wait_port(timeout);
            *self.lock() = false;
            // Whoever waited for us may have to lead now.
            self.woken.notify_all();
            return;
        }
        let slept = self.woken.wait_timeout(led, timeout);
        drop(slept.unwrap_or_else(PoisonError::into_inner));
    }

    /// Sleeps on the port alone, for the progress thread.
    pub(crate) fn wait_port(&self, timeout: Duration) {
        match &self.port {
            Some(port) => port.wait(timeout.min(LONGEST)),
            None => std::thread::sleep(timeout.min(POLL_PERIOD)),
        }
    }

    /// Whether a thread of the program sleeps on the port, and turns the loop when a frame comes.
    pub(crate) fn is_led(&self) -> bool {
        *self.lock()
    }

    /// Sleeps on the port for `timeout` at most. False, at once, if it can only be polled.
    pub(crate) fn wait_port_long(&self, timeout: Duration) -> bool {
        let port = self.port.as_ref().filter(|port| port.has_interrupt());
        port.map(|port| port.wait(timeout)).is_some()
    }

    /// Passes a wake-up of the port on to the leader: another thread that slept on the port may
    /// have consumed it.
    pub(crate) fn pass_on(&self) {
        if self.is_led() {
            self.wake_port();
        }
    }

    pub(crate) fn wake_port(&self) {
        if let Some(port) = &self.port {
            port.wake();
        }
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.led.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
