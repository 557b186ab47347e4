//! The one lock of a domain, and who may go without it.
//!
//! A domain is in one of two modes. *Shared* (`FI_THREAD_SAFE` and whatever has a progress thread):
//! a spin lock, one exchange when nobody else is there, which yields the processor when somebody
//! is, since his holder may be waiting for it. *Owned* (`FI_THREAD_DOMAIN` with manual progress):
//! no atomic read-modify-write at all; one thread owns the domain and everybody else is turned
//! away. The safe face checks that by the thread's number, so that a caller who breaks his promise
//! gets `FI_EOPBADSTATE` and not a data race. In *serial* mode, which only an unsafe call gives, we
//! take his word.
//!
//! A domain in owned or serial mode may have a thread of ours beside the program's, which comes in
//! while the program is elsewhere ([`Lock::enter_beside`]). The program pays no fence for that: the
//! thread *claims* the lock and has the kernel run a barrier on every processor of the process
//! (membarrier(2), `PRIVATE_EXPEDITED`). After it, either the program's entry is seen, and the
//! claim is given up, or the program's next entry sees the claim, and waits.
//!
//! A forked child shares the parent's device memory and must never touch it: every entry compares
//! the number of forks in this process's ancestry, but for those through an open gate, which the
//! fork shuts in the child ([`Lock::shut_in_child`]).

use std::cell::{Cell, UnsafeCell};
use std::io;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, compiler_fence};
use std::sync::{Arc, Once, Weak};
use std::time::Duration;

use barewire_driver::hint::cold;

use crate::errno::{Error, Result};

const OWNED: u8 = 0;
const SHARED: u8 = 1;
const SERIAL: u8 = 3;
/// Somebody panicked inside, which only our own bug can cause: nothing is certain any more.
const POISONED: u8 = 2;

/// Who may enter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// One thread, which is checked.
    Owned,
    /// One thread at a time, which the application has promised (`Fabric::domain_serial`).
    Serial,
    /// Everybody.
    Shared,
}

/// Nobody is inside, and whoever comes may enter: the lock is in serial mode and of this process.
const OPEN: u8 = 0;
/// Somebody is inside.
const HELD: u8 = 1;
/// Nobody is inside; who may enter is to be asked.
const FREE: u8 = 2;
/// As [`OPEN`], where a thread of ours may be inside beside the program's: an entry looks, once it
/// holds the gate, whether that thread has claimed it.
const CLAIMABLE: u8 = 3;

/// Nobody owns an owned lock yet; the next to come does.
const NOBODY: u64 = 0;

/// Tries before the first yield. A turn that does something takes about as long.
const SPINS: u32 = 128;

pub(crate) struct Lock<T> {
    mode: AtomicU8,
    gate: Gate,
    forks: u32,
    /// Number of the owning thread.
    owner: AtomicU64,
    /// Threads that want in and found it held.
    waiting: AtomicU32,
    value: UnsafeCell<T>,
}

/// Whether one may enter.
struct Gate {
    /// [`OPEN`], [`CLAIMABLE`], [`HELD`] or [`FREE`]. Where nothing is exchanged, a plain flag
    /// against re-entry from a port.
    now: AtomicU8,
    /// What it becomes when whoever is inside leaves.
    then: AtomicU8,
    /// The thread beside the program is inside, or asks whether it may be.
    claimed: AtomicBool,
    /// There may be such a thread.
    beside: AtomicBool,
}

// SAFETY: the value moves between threads (hence `T: Send`) but is only reached through a `Guard`,
// of which there is one at a time:
// - shared mode: the gate becomes `HELD` in one exchange, with acquire, which whoever finds it so
//   has not won, and something else with release;
// - owned mode: only the owner gets past `enter`, he alone writes the gate, and ownership passes by
//   a release store and an acquiring exchange;
// - serial mode: whoever opened the domain has promised, in an unsafe call, that one thread at a
//   time is inside and that what one did happened before what the next does;
// - beside owned or serial mode: the claim is stored before a barrier on all processors of the
//   process, and `now` is read after it; an entry stores `now` and then reads the claim, in program
//   order. So one of the two is seen, and whoever sees the other's gives way: the program waits for
//   the claim to end (acquire), the thread gives it up (release). An entry through an open gate
//   reads no claim, and there is none then: `beside` is set, with release, after a guard's holder
//   has made the gate claimable for good, and without it (acquire) nothing is claimed;
// - from owned or serial to shared: only a guard's holder changes the mode, the gate being `HELD`,
//   and others see the new mode only after that store, so they find it so until he leaves.
unsafe impl<T: Send> Sync for Lock<T> {}

/// What a lock is part of.
pub(crate) trait HasLock: Send + Sync {
    /// What the lock is for.
    type Value;

    /// The lock, always the same.
    fn lock(&self) -> &Lock<Self::Value>;
}

/// A lock that a fork shuts, of whatever value.
trait Shut: Send + Sync {
    fn gate(&self) -> &Gate;
}

impl<S: HasLock> Shut for S {
    fn gate(&self) -> &Gate {
        &self.lock().gate
    }
}

/// The right to touch the value. Stays on its thread.
pub(crate) struct Guard<'a, T> {
    lock: &'a Lock<T>,
    on_this_thread: PhantomData<*const ()>,
}

/// The right of a destructor to touch the value.
pub(crate) struct Closing<'a, T> {
    guard: ManuallyDrop<Guard<'a, T>>,
    /// The thread was already unwinding when it entered.
    unwinding: bool,
}

impl<T> Lock<T> {
    pub(crate) fn new(value: T, entry: Entry) -> Self {
        watch_forks();
        Self {
            mode: AtomicU8::new(match entry {
                Entry::Owned => OWNED,
                Entry::Serial => SERIAL,
                Entry::Shared => SHARED,
            }),
            gate: Gate {
                now: AtomicU8::new(FREE),
                then: AtomicU8::new(FREE),
                claimed: AtomicBool::new(false),
                beside: AtomicBool::new(false),
            },
            forks: FORKS.load(Ordering::Relaxed),
            owner: AtomicU64::new(NOBODY),
            waiting: AtomicU32::new(0),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the lock.
    ///
    /// # Errors
    /// [`Error::OpBadState`] in a forked child, on a thread that does not own an owned domain, when
    /// called back from inside, and after a panic inside.
    #[inline]
    pub(crate) fn enter(&self) -> Result<Guard<'_, T>> {
        if !self.gate.hold_if_open() {
            cold(());
            self.enter_checked()?;
        }
        Ok(Guard { lock: self, on_this_thread: PhantomData })
    }

    /// Takes the lock if one may enter without another question, which is so in serial mode while
    /// nobody is inside. `None` if not, also while the thread beside the program is, for which
    /// [`enter`](Self::enter) waits.
    #[inline(always)]
    pub(crate) fn enter_open(&self) -> Option<Guard<'_, T>> {
        if !self.gate.hold_if_open() {
            return cold(None);
        }
        Some(Guard { lock: self, on_this_thread: PhantomData })
    }

    /// Goes on inside.
    ///
    /// # Safety
    /// This thread is inside by a guard that [stayed](Guard::stay), and has not gone on since.
    #[inline(always)]
    pub(crate) unsafe fn resume(&self) -> Guard<'_, T> {
        Guard { lock: self, on_this_thread: PhantomData }
    }

    /// The rest of [`enter`](Self::enter). The caller makes the guard, of whose parts then none has
    /// to be looked up.
    #[inline(never)]
    fn enter_checked(&self) -> Result<()> {
        if self.forked() {
            return Err(Error::OpBadState);
        }
        match self.mode.load(Ordering::Relaxed) {
            OWNED if self.owner.load(Ordering::Relaxed) == thread_number() => self.take(),
            SHARED => self.enter_shared(),
            _ => self.enter_slow(),
        }
    }

    #[cold]
    fn enter_slow(&self) -> Result<()> {
        loop {
            match self.mode.load(Ordering::Acquire) {
                SHARED => return self.enter_shared(),
                OWNED => {
                    let me = thread_number();
                    match self.owner.load(Ordering::Relaxed) {
                        NOBODY => {
                            // Acquires what the last owner did; the mode may be another now.
                            let (order, fail) = (Ordering::Acquire, Ordering::Relaxed);
                            let _ = self.owner.compare_exchange(NOBODY, me, order, fail);
                        }
                        owner if owner == me => return self.take(),
                        _ => return Err(Error::OpBadState),
                    }
                }
                SERIAL => return self.take(),
                _ => return Err(Error::OpBadState),
            }
        }
    }

    #[inline]
    fn enter_shared(&self) -> Result<()> {
        if self.gate.now.swap(HELD, Ordering::Acquire) == HELD {
            self.wait_for_it();
        }
        if self.mode.load(Ordering::Relaxed) == POISONED {
            self.gate.leave();
            return Err(Error::OpBadState);
        }
        Ok(())
    }

    #[cold]
    fn wait_for_it(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let mut tries = 0_u32;
        let held = || self.gate.now.load(Ordering::Relaxed) == HELD;
        while held() || self.gate.now.swap(HELD, Ordering::Acquire) == HELD {
            tries += 1;
            if tries < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// Enters in owned or serial mode, for somebody who may if nobody is inside.
    fn take(&self) -> Result<()> {
        if self.gate.now.load(Ordering::Relaxed) == HELD {
            return Err(Error::OpBadState);
        }
        if self.gate.hold_is_contested() { self.hold_after_claim() } else { Ok(()) }
    }

    /// Waits outside until the thread beside the program has left, and enters. That thread is
    /// inside for a few turns of the loop.
    ///
    /// # Errors
    /// [`Error::OpBadState`]: it panicked there.
    #[cold]
    #[inline(never)]
    fn hold_after_claim(&self) -> Result<()> {
        loop {
            self.gate.now.store(FREE, Ordering::Release);
            let mut tries = 0_u32;
            while self.gate.claimed.load(Ordering::Acquire) {
                tries += 1;
                if tries < SPINS {
                    std::hint::spin_loop();
                } else {
                    // Not a yield: a program with a real-time policy would yield to its like alone.
                    std::thread::sleep(Duration::from_micros(20));
                }
            }
            if self.mode.load(Ordering::Relaxed) == POISONED {
                self.gate.shut();
                return Err(Error::OpBadState);
            }
            if !self.gate.hold_is_contested() {
                return Ok(());
            }
        }
    }

    /// Takes the lock for a thread of ours beside the program's, which in owned and serial mode is
    /// the only one. `None` if the program is inside, or nobody may enter any more. Takes a
    /// microsecond and disturbs each processor that runs a thread of the process.
    /// Also `None` before [`admit_beside`](Self::admit_beside).
    pub(crate) fn enter_beside(&self) -> Option<Beside<'_, T>> {
        if self.forked() || !self.gate.beside.load(Ordering::Acquire) {
            return None;
        }
        if self.mode.load(Ordering::Acquire) == SHARED {
            return self.enter().ok().map(|guard| Beside { lock: self, shared: Some(guard) });
        }
        self.gate.claimed.store(true, Ordering::Relaxed);
        let mode = || self.mode.load(Ordering::Acquire);
        // The program cannot change the mode from outside.
        if barrier_everywhere().is_ok()
            && self.gate.now.load(Ordering::Acquire) != HELD
            && matches!(mode(), OWNED | SERIAL)
        {
            return Some(Beside { lock: self, shared: None });
        }
        self.gate.claimed.store(false, Ordering::Release);
        None
    }

    /// From now on a thread of ours may come in beside the program's, which is elsewhere.
    ///
    /// # Errors
    /// The kernel has no `membarrier`, without which only a shared lock can be had beside the
    /// program, or the lock cannot be entered. Nobody may then.
    pub(crate) fn admit_beside(&self) -> io::Result<()> {
        if self.mode.load(Ordering::Relaxed) != SHARED {
            register_beside()
                .map_err(|e| io::Error::new(e.kind(), format!("membarrier(2): {e}")))?;
        }
        if self.mode.load(Ordering::Relaxed) == SERIAL {
            let inside = self.enter().map_err(|_| io::ErrorKind::ResourceBusy)?;
            if self.gate.then.load(Ordering::Relaxed) == OPEN {
                self.gate.then.store(CLAIMABLE, Ordering::Relaxed);
            }
            inside.leave();
        }
        // In owned mode, and through a gate that is free, every entry looks for a claim.
        self.gate.beside.store(true, Ordering::Release);
        Ok(())
    }

    /// As [`enter`](Self::enter) for a destructor, which may run while its thread unwinds from a
    /// panic elsewhere.
    pub(crate) fn enter_to_close(&self) -> Result<Closing<'_, T>> {
        let guard = ManuallyDrop::new(self.enter()?);
        Ok(Closing { guard, unwinding: std::thread::panicking() })
    }

    /// Lets go of an owned domain, so that another thread may own it: the next to enter does.
    ///
    /// # Errors
    /// As [`enter`](Self::enter): only the owner can.
    pub(crate) fn disown(&self) -> Result<()> {
        drop(self.enter()?);
        self.owner.store(NOBODY, Ordering::Release);
        Ok(())
    }

    /// Lets a thread that turned the loop stand back while others want in.
    pub(crate) fn let_others_in(&self) {
        // Bounded: a waiter may have been stopped by a debugger.
        for _ in 0..64 {
            if self.waiting.load(Ordering::Relaxed) == 0 {
                return;
            }
            std::thread::yield_now();
        }
    }

    /// From now on a fork shuts the lock of `owner` in the child, so that in serial mode its gate
    /// can be open. (If somebody is inside it is not opened, which costs him and others time only.)
    pub(crate) fn shut_in_child<S: HasLock<Value = T> + 'static>(owner: &Arc<S>) {
        let lock = owner.lock();
        if lock.mode.load(Ordering::Relaxed) != SERIAL {
            return;
        }
        let Ok(inside) = lock.enter() else { return };
        let watched: Weak<S> = Arc::downgrade(owner);
        WATCHED.change(|locks| locks.push(watched));
        // A fork after this shuts it; before it there was nothing to shut, but for a fork in
        // between, whose child this is not, since it would not be here.
        let beside = lock.gate.beside.load(Ordering::Relaxed);
        lock.gate.then.store(if beside { CLAIMABLE } else { OPEN }, Ordering::Relaxed);
        inside.leave();
    }

    /// Whether this is a forked child's copy.
    #[inline]
    pub(crate) fn forked(&self) -> bool {
        self.forks != FORKS.load(Ordering::Relaxed)
    }
}

impl Gate {
    /// Holds it if no other question is to be asked. Makes no call, so that a caller in which it is
    /// inlined keeps its registers.
    #[inline(always)]
    fn hold_if_open(&self) -> bool {
        match self.now.load(Ordering::Relaxed) {
            OPEN => self.now.store(HELD, Ordering::Relaxed),
            CLAIMABLE => {
                cold(());
                if self.hold_is_contested() {
                    // Not claimable: the thread may have shut it meanwhile. Leaving opens it again.
                    self.now.store(FREE, Ordering::Release);
                    return false;
                }
            }
            _ => return cold(false),
        }
        true
    }

    /// Holds it, and says whether the thread beside the program has claimed it before. The order of
    /// the two is kept for that thread by its barrier on this processor.
    #[inline(always)]
    fn hold_is_contested(&self) -> bool {
        self.now.store(HELD, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        self.claimed.load(Ordering::Acquire)
    }

    #[inline(always)]
    fn leave(&self) {
        self.now.store(self.then.load(Ordering::Relaxed), Ordering::Release);
    }

    #[cfg(test)]
    fn is_open(&self) -> bool {
        matches!(self.now.load(Ordering::Relaxed), OPEN | CLAIMABLE)
    }

    /// Shuts it for good, in a process that must not come in.
    fn shut(&self) {
        self.then.store(FREE, Ordering::Relaxed);
        if matches!(self.now.load(Ordering::Relaxed), OPEN | CLAIMABLE) {
            self.now.store(FREE, Ordering::Relaxed);
        }
    }
}

impl<T> Drop for Lock<T> {
    fn drop(&mut self) {
        // What it is part of is being dropped, and is no longer to be had from there.
        WATCHED.change(|locks| locks.retain(|lock| lock.strong_count() > 0));
    }
}

impl<T> Guard<'_, T> {
    /// Leaves, as dropping does, when nothing has panicked: it is not asked.
    #[inline(always)]
    pub(crate) fn leave(self) {
        self.lock.gate.leave();
        std::mem::forget(self);
    }

    /// Leaves the lock to be held, until [`Lock::resume`] goes on.
    #[inline(always)]
    pub(crate) fn stay(self) {
        std::mem::forget(self);
    }

    /// Makes a lock in serial mode shared, since the application promises no more for it.
    pub(crate) fn share_if_promised(&mut self) {
        if self.lock.mode.load(Ordering::Relaxed) == SERIAL {
            self.share();
        }
    }

    /// Makes the lock shared, before another thread of ours may come.
    pub(crate) fn share(&mut self) {
        if matches!(self.lock.mode.load(Ordering::Relaxed), OWNED | SERIAL) {
            self.lock.gate.then.store(FREE, Ordering::Relaxed);
            self.lock.mode.store(SHARED, Ordering::Release);
        }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: there is one guard at a time (see `Sync`) and it lends the value while borrowed.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above; `&mut self` keeps out a second borrow through this guard.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.lock.mode.store(POISONED, Ordering::Relaxed);
            self.lock.gate.then.store(FREE, Ordering::Relaxed);
        }
        self.lock.gate.leave();
    }
}

impl<'a, T> Deref for Closing<'a, T> {
    type Target = Guard<'a, T>;

    fn deref(&self) -> &Guard<'a, T> {
        &self.guard
    }
}

impl<T> DerefMut for Closing<'_, T> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.guard
    }
}

impl<T> Drop for Closing<'_, T> {
    fn drop(&mut self) {
        if self.unwinding {
            // Nothing has panicked in here that we know of.
            self.guard.lock.gate.leave();
        } else {
            // SAFETY: `drop` asks that the guard is not used afterwards, and this is the last that
            // happens to it.
            unsafe { ManuallyDrop::drop(&mut self.guard) };
        }
    }
}

/// The right of a thread beside the program's to touch the value.
pub(crate) struct Beside<'a, T> {
    lock: &'a Lock<T>,
    /// The lock itself, in shared mode.
    shared: Option<Guard<'a, T>>,
}

impl<T> Deref for Beside<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: either a guard is held, or the claim keeps every other entry out (see `Sync`),
        // and the value is lent while `self` is borrowed.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Beside<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: either a guard is held, or the claim keeps every other entry out (see `Sync`);
        // `&mut self` keeps out a second borrow through this guard.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Beside<'_, T> {
    fn drop(&mut self) {
        if self.shared.is_some() {
            return;
        }
        if std::thread::panicking() {
            self.lock.mode.store(POISONED, Ordering::Relaxed);
            self.lock.gate.shut();
        }
        self.lock.gate.claimed.store(false, Ordering::Release);
    }
}

/// Prepares the process for [`Lock::enter_beside`]. May be called again.
///
/// # Errors
/// The kernel's, before Linux 4.14 or where a filter forbids membarrier(2).
pub(crate) fn register_beside() -> io::Result<()> {
    membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)
}

/// When it returns, every thread of the process has passed a full memory barrier.
fn barrier_everywhere() -> io::Result<()> {
    membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)
}

fn membarrier(command: libc::c_int) -> io::Result<()> {
    // SAFETY: membarrier(2) takes three numbers and touches no memory of ours.
    let answer = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A number of this thread that no other thread of the process ever has, not 0.
#[inline]
fn thread_number() -> u64 {
    thread_local! {
        static NUMBER: Cell<u64> = const { Cell::new(NOBODY) };
    }
    NUMBER.with(|n| match n.get() {
        NOBODY => {
            static NEXT: AtomicU64 = AtomicU64::new(1);
            n.set(NEXT.fetch_add(1, Ordering::Relaxed));
            n.get()
        }
        number => number,
    })
}

/// Forks between the first domain and this process.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// What a fork shuts.
static WATCHED: Watched =
    Watched { busy: AtomicBool::new(false), locks: UnsafeCell::new(Vec::new()) };

struct Watched {
    /// Somebody is at the list, or forks, which has to find it whole.
    busy: AtomicBool,
    locks: UnsafeCell<Vec<Weak<dyn Shut>>>,
}

// SAFETY: whoever reaches the list has set `busy`, in one exchange, with acquire, and clears it
// with release.
unsafe impl Sync for Watched {}

impl Watched {
    fn begin(&self) {
        while self.busy.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
    }

    fn end(&self) {
        self.busy.store(false, Ordering::Release);
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Weak<dyn Shut>>)) {
        self.begin();
        // SAFETY: one at a time is here (see `Sync`), and `change` does not come back here.
        change(unsafe { &mut *self.locks.get() });
        self.end();
    }
}

extern "C" fn before_fork() {
    WATCHED.begin();
}

extern "C" fn in_parent() {
    WATCHED.end();
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: `before_fork` has begun, so that nobody was at the list.
    for lock in unsafe { &*WATCHED.locks.get() } {
        // Never the last to let go of it: whoever had it at the fork still has.
        if let Some(lock) = lock.upgrade() {
            lock.gate().shut();
        }
    }
    WATCHED.end();
}

fn watch_forks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: `pthread_atfork` needs handlers of which that for the child may run in the child
        // of a threaded process, where only async-signal-safe work is allowed: ours is atomic
        // operations on what nobody was half way through changing. That before the fork waits for
        // whoever changes the list of locks, who needs nothing that who forks could have. They live
        // as long as the code that registers them. It fails only for want of memory; then a child
        // is not recognised, as it was before this call.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    impl<T: Send> HasLock for Lock<T> {
        type Value = T;

        fn lock(&self) -> &Self {
            self
        }
    }

    /// Goal: a thread beside the program's and the program, which takes no lock, are never inside
    /// at once, and each sees what the other did.
    #[test]
    fn a_thread_beside_the_program_and_the_program_exclude_each_other() {
        for entry in [Entry::Owned, Entry::Serial, Entry::Shared] {
            let lock = Arc::new(Lock::new([0_u64; 2], entry));
            Lock::shut_in_child(&lock);
            lock.admit_beside().expect("the kernel has membarrier");
            let (there, stop) = (Arc::clone(&lock), Arc::new(AtomicBool::new(false)));
            let stopped = Arc::clone(&stop);
            let beside = std::thread::spawn(move || {
                let mut entered = 0_u64;
                while !stopped.load(Ordering::Relaxed) || entered == 0 {
                    if let Some(mut value) = there.enter_beside() {
                        add_one(&mut value);
                        entered += 1;
                    }
                    std::hint::spin_loop();
                }
                entered
            });
            let mut entered = 0_u64;
            for round in 0..50_000_u64 {
                match lock.enter_open() {
                    Some(mut value) => add_one(&mut value),
                    None => add_one(&mut lock.enter().expect("the program's own")),
                }
                entered += 1;
                if round % 1_000 == 0 {
                    std::thread::yield_now();
                }
            }
            stop.store(true, Ordering::Relaxed);
            let beside = beside.join().expect("it did not panic");
            assert_eq!(*lock.enter().unwrap(), [entered + beside; 2], "{entry:?}");
        }
    }

    /// Not one step, so that two who are inside at once show.
    fn add_one(value: &mut [u64; 2]) {
        let seen = std::hint::black_box(value[0]);
        assert_eq!(seen, value[1], "another is half way");
        value[0] = seen + 1;
        std::hint::black_box(&mut *value);
        value[1] = seen + 1;
    }

    /// What panics beside the program closes the domain for the program as well.
    #[test]
    fn a_panic_beside_the_program_closes_the_domain() {
        let lock = Arc::new(Lock::new((), Entry::Serial));
        assert!(lock.enter_beside().is_none(), "it was not admitted");
        lock.admit_beside().expect("the kernel has membarrier");
        Lock::shut_in_child(&lock);
        let there = Arc::clone(&lock);
        let panicked = std::thread::spawn(move || {
            let _inside = there.enter_beside().expect("nobody is inside");
            panic!("planted");
        });
        assert!(panicked.join().is_err());
        assert!(lock.enter_open().is_none());
        assert_eq!(lock.enter().err(), Some(Error::OpBadState));
        assert!(lock.enter_beside().is_none());
    }

    #[test]
    fn an_owned_domain_turns_other_threads_away_until_it_is_disowned() {
        let lock = Arc::new(Lock::new(0_u64, Entry::Owned));
        *lock.enter().unwrap() += 1;
        let there = Arc::clone(&lock);
        let other = std::thread::spawn(move || there.enter().map(|mut g| *g += 1));
        assert_eq!(other.join().unwrap().err(), Some(Error::OpBadState));
        lock.disown().unwrap();
        let there = Arc::clone(&lock);
        std::thread::spawn(move || *there.enter().unwrap() += 10).join().unwrap();
        assert_eq!(lock.enter().err(), Some(Error::OpBadState));
        let there = Arc::clone(&lock);
        assert_eq!(there.disown(), Err(Error::OpBadState));
    }

    #[test]
    fn a_serial_domain_passes_from_thread_to_thread() {
        let lock = Arc::new(Lock::new(0_u64, Entry::Serial));
        *lock.enter().unwrap() += 1;
        let there = Arc::clone(&lock);
        std::thread::spawn(move || *there.enter().unwrap() += 1).join().unwrap();
        let inside = lock.enter().unwrap();
        assert_eq!(*inside, 2);
        assert_eq!(lock.enter().err(), Some(Error::OpBadState));
    }

    /// Goal: where the application's promise ends, threads that come at once wait for each other.
    #[test]
    fn a_serial_domain_whose_promise_ended_keeps_threads_apart() {
        let lock = Arc::new(Lock::new([0_u64; 2], Entry::Serial));
        Lock::shut_in_child(&lock);
        lock.enter().unwrap().share_if_promised();
        let there = Arc::clone(&lock);
        let turns = |lock: &Lock<[u64; 2]>| {
            (0..50_000).for_each(|_| add_one(&mut lock.enter().unwrap()));
        };
        let other = std::thread::spawn(move || turns(&there));
        turns(&lock);
        other.join().unwrap();
        assert_eq!(*lock.enter().unwrap(), [100_000; 2]);
        // An owned one goes on turning others away.
        let owned = Lock::new((), Entry::Owned);
        owned.enter().unwrap().share_if_promised();
        let turned_away = std::thread::scope(|s| s.spawn(|| owned.enter().err()).join().unwrap());
        assert_eq!(turned_away, Some(Error::OpBadState));
    }

    #[test]
    fn a_domain_of_one_thread_is_not_entered_twice() {
        let locks = [Entry::Owned, Entry::Serial, Entry::Serial].map(|e| Lock::new((), e));
        let locks = locks.map(Arc::new);
        Lock::shut_in_child(&locks[2]);
        for lock in &locks {
            let inside = lock.enter().unwrap();
            assert_eq!(lock.enter().err(), Some(Error::OpBadState));
            drop(inside);
            assert!(lock.enter().is_ok());
        }
    }

    /// Locks come and go while processes are forked: the list of them is whole in each, and in the
    /// child all are shut. One that was taken out of where it was is no longer there to be shut.
    #[test]
    fn forks_among_locks_that_come_and_go() {
        let (stop, mut all_shut) = (AtomicBool::new(false), true);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let lock = |_| Arc::new(Lock::new((), Entry::Serial));
                    let mut locks: Vec<_> = (0..8).map(lock).collect();
                    locks.iter().for_each(Lock::shut_in_child);
                    assert!(locks.iter().all(|lock| lock.gate.is_open() && lock.enter().is_ok()));
                    drop(locks.pop().and_then(Arc::into_inner));
                }
            });
            for _ in 0..50 {
                // SAFETY: the child only makes async-signal-safe calls: loads and `_exit`.
                let pid = unsafe { libc::fork() };
                assert!(pid >= 0);
                if pid == 0 {
                    // SAFETY: nobody else is in this process, and the list was found whole.
                    let mut locks = unsafe { &*WATCHED.locks.get() }.iter();
                    let open = locks.any(|l| l.upgrade().is_some_and(|l| l.gate().is_open()));
                    // SAFETY: ends the child without running anybody's destructors.
                    unsafe { libc::_exit(i32::from(open)) };
                }
                let mut status = -1;
                // SAFETY: `status` is a valid place for the child's state.
                let ended = unsafe { libc::waitpid(pid, &mut status, 0) } == pid;
                all_shut &= ended && status == 0;
            }
            // Before anything is said of it, since the other thread runs until then.
            stop.store(true, Ordering::Relaxed);
        });
        assert!(all_shut, "a gate is open in a child");
    }

    #[test]
    fn a_shared_domain_counts_right_under_contention() {
        let lock = Arc::new(Lock::new(0_u64, Entry::Shared));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let lock = Arc::clone(&lock);
                std::thread::spawn(move || {
                    for _ in 0..50_000 {
                        let mut g = lock.enter().unwrap();
                        let seen = *g;
                        std::hint::black_box(&mut g);
                        *g = seen + 1;
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(*lock.enter().unwrap(), 200_000);
        assert_eq!(lock.waiting.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn sharing_while_inside_keeps_others_out_until_the_guard_goes() {
        for entry in [Entry::Owned, Entry::Serial] {
            let lock = Arc::new(Lock::new(0_u64, entry));
            let mut inside = lock.enter().unwrap();
            inside.share();
            let there = Arc::clone(&lock);
            let other = std::thread::spawn(move || *there.enter().unwrap());
            std::thread::sleep(std::time::Duration::from_millis(20));
            *inside = 7;
            drop(inside);
            assert_eq!(other.join().unwrap(), 7);
        }
    }

    /// A lock that somebody holds, or that is not serial, is not opened by who asks for it.
    #[test]
    fn a_gate_is_opened_only_when_nobody_is_inside() {
        for entry in [Entry::Owned, Entry::Serial, Entry::Shared] {
            let lock = Arc::new(Lock::new((), entry));
            let inside = lock.enter().unwrap();
            Lock::shut_in_child(&lock);
            assert!(!lock.gate.is_open());
            drop(inside);
            assert!(!lock.gate.is_open() && lock.enter().is_ok());
            Lock::shut_in_child(&lock);
            assert_eq!(lock.gate.is_open(), entry == Entry::Serial);
        }
    }

    #[test]
    fn a_panic_inside_closes_the_domain() {
        for entry in [Entry::Owned, Entry::Serial, Entry::Shared] {
            let lock = Arc::new(Lock::new((), entry));
            let there = Arc::clone(&lock);
            let r = std::thread::spawn(move || {
                let _inside = there.enter().unwrap();
                panic!("planted");
            });
            assert!(r.join().is_err());
            assert_eq!(lock.enter().err(), Some(Error::OpBadState), "{entry:?}");
        }
    }

    #[test]
    fn a_forked_child_is_turned_away() {
        let locks =
            [Entry::Shared, Entry::Serial, Entry::Serial, Entry::Serial].map(|e| Lock::new((), e));
        let locks = locks.map(Arc::new);
        locks[2..].iter().for_each(Lock::shut_in_child);
        locks[3].admit_beside().expect("the kernel has membarrier");
        assert!(!locks[1].gate.is_open() && locks[2..].iter().all(|lock| lock.gate.is_open()));
        // SAFETY: the child only makes async-signal-safe calls: an atomic load and `_exit`.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            let turned_away = |lock: &Arc<Lock<()>>| lock.enter().err() == Some(Error::OpBadState);
            let code = i32::from(
                locks[2..].iter().any(|l| l.gate.is_open()) || !locks.iter().all(turned_away),
            );
            // SAFETY: ends the child without running anybody's destructors.
            unsafe { libc::_exit(code) };
        }
        let mut status = -1;
        // SAFETY: `status` is a valid place for the child's state.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        assert_eq!(status, 0, "the child got in");
        assert!(locks.iter().all(|lock| lock.enter().is_ok()));
        assert!(locks[2..].iter().all(|lock| lock.gate.is_open()));
    }

    #[test]
    fn an_open_gate_is_entered_once_and_a_guard_that_stayed_is_gone_on_with() {
        let lock = Arc::new(Lock::new(5, Entry::Serial));
        assert!(lock.enter_open().is_none(), "no fork would shut it");
        Lock::shut_in_child(&lock);
        lock.enter_open().expect("nobody is inside").stay();
        assert!(lock.enter_open().is_none());
        assert_eq!(lock.enter().err(), Some(Error::OpBadState));
        // SAFETY: the guard of this thread has stayed, and this is the first to go on.
        unsafe { lock.resume() }.leave();
        assert_eq!(lock.enter_open().map(|guard| *guard), Some(5));
        assert!(lock.enter().is_ok());
    }
}
