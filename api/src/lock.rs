//! The lock of a domain, and its modes without a lock.
//!
//! A domain is in one of three modes. *Shared* (`FI_THREAD_SAFE`, and any domain with a progress
//! thread): a spin lock, one exchange if uncontended; under contention it yields the processor,
//! since the holder may be waiting for it. *Owned* (`FI_THREAD_DOMAIN` with manual progress): no
//! atomic read-modify-write; one thread owns the domain and every other one is refused. The safe
//! API checks that by the thread's number, so a program that breaks its promise gets
//! `FI_EOPBADSTATE` and not a data race. *Serial*, which only an unsafe call selects: the promise
//! is not checked.
//!
//! In serial mode the promise covers data calls only: control calls (fi_domain(3): open, bind,
//! register, insert, close) may come from any thread ([`Lock::enter_control`]). A domain in owned
//! or serial mode may also have a *service thread* (the receive thread), which enters while the
//! program is outside ([`Lock::try_enter_control`]). Data calls pay no fence for either. A control
//! call or service thread *claims* the lock, then the kernel runs a barrier on every processor of
//! the process (membarrier(2), `PRIVATE_EXPEDITED`). After it, either the claimer sees that a data
//! call is inside, or the next data call sees the claim and waits.
//!
//! A forked child shares the parent's device memory and must never touch it: every entry compares
//! the number of forks in this process's ancestry, except entries through an open gate, which a
//! fork closes in the child ([`Lock::close_in_child`]).

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
/// A thread has panicked inside the lock, by a bug of barewire: the state is undefined.
const POISONED: u8 = 2;

/// Which threads may enter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// One thread, the owner. Checked.
    Owned,
    /// One thread at a time. Promised by the application (`Fabric::domain_serial`), not checked.
    Serial,
    /// Every thread.
    Shared,
}

/// Flag of [`Gate::checks`]: a control call or service thread is inside, or waits for a data call
/// to leave.
const CLAIMED: u8 = 1;
/// Flag of [`Gate::checks`]: a data call has to check the mode. Clear only in serial mode, and
/// after the lock is registered for forks, which set it in the child.
const CHECK_MODE: u8 = 2;

/// An owned lock without an owner: the next thread that enters becomes its owner.
const NO_OWNER: u64 = 0;

/// Tries before the first yield: about the duration of a turn of the loop that moves frames.
const SPINS: u32 = 128;

pub(crate) struct Lock<T> {
    mode: AtomicU8,
    gate: Gate,
    forks: u32,
    /// Number of the owning thread.
    owner: AtomicU64,
    /// Threads that wait for the shared lock.
    waiting: AtomicU32,
    value: UnsafeCell<T>,
}

/// The words that decide whether a data call may enter.
struct Gate {
    /// A data call is inside in owned or serial mode, or is about to enter. Written by data calls
    /// only, with plain stores.
    inside: AtomicBool,
    /// [`CLAIMED`] and [`CHECK_MODE`]: reasons why a data call that has set `inside` must not go on
    /// at once.
    checks: AtomicU8,
    /// A thread is inside, in shared mode. A separate word, since a data call that began before the
    /// mode changed may still write `inside`.
    held: AtomicBool,
}

// SAFETY: the value moves between threads (hence `T: Send`) but is only reached through a `Guard`
// or a `ControlGuard`, of which there is one at a time:
// - shared mode: a thread enters by the exchange, with acquire, that changes `held` from false to
//   true, and leaves by a store of false, with release;
// - owned mode: only the owner gets past `enter` and writes `inside`; ownership passes by a release
//   store and an acquiring exchange;
// - serial mode: the program has promised, in an unsafe call, that one data call at a time is
//   inside and that each happens before the next;
// - claims in owned or serial mode: one thread claims at a time, by one exchange. The claim is
//   stored before a barrier on all processors of the process, and `inside` is read after it; a data
//   call stores `inside` and then reads the claim, in program order. So at least one of the two
//   sees the other. The data call then leaves and waits for the claim to end (acquire); the claimer
//   waits for the data call to leave (acquire), or drops the claim (release);
// - from owned or serial to shared: a thread that is inside takes `held` and then changes the mode,
//   so that threads that see the new mode wait for it. A data call reads the mode, or `CHECK_MODE`,
//   after the claim, so it sees the new mode.
unsafe impl<T: Send> Sync for Lock<T> {}

/// An object that contains a lock.
pub(crate) trait HasLock: Send + Sync {
    /// The value that the lock guards.
    type Value;

    /// The lock, always the same.
    fn lock(&self) -> &Lock<Self::Value>;
}

/// A lock of any value, whose gate a fork closes in the child.
trait HasGate: Send + Sync {
    fn gate(&self) -> &Gate;
}

impl<S: HasLock> HasGate for S {
    fn gate(&self) -> &Gate {
        &self.lock().gate
    }
}

/// Exclusive access of a data call to the value. Bound to its thread.
pub(crate) struct Guard<'a, T> {
    lock: &'a Lock<T>,
    on_this_thread: PhantomData<*const ()>,
}

/// Exclusive access of a destructor to the value.
pub(crate) struct CloseGuard<'a, T> {
    inside: ManuallyDrop<ControlGuard<'a, T>>,
    /// The thread was unwinding from a panic when it entered.
    unwinding: bool,
}

impl<T> Lock<T> {
    pub(crate) fn new(value: T, entry: Entry) -> Self {
        register_fork_handlers();
        Self {
            mode: AtomicU8::new(match entry {
                Entry::Owned => OWNED,
                // Without the barrier no control call could exclude data calls.
                Entry::Serial if register_membarrier().is_ok() => SERIAL,
                Entry::Serial | Entry::Shared => SHARED,
            }),
            gate: Gate {
                inside: AtomicBool::new(false),
                checks: AtomicU8::new(CHECK_MODE),
                held: AtomicBool::new(false),
            },
            forks: FORKS.load(Ordering::Relaxed),
            owner: AtomicU64::new(NO_OWNER),
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
        if !self.gate.enter_if_open() {
            cold(());
            self.enter_checked()?;
        }
        Ok(Guard { lock: self, on_this_thread: PhantomData })
    }

    /// Takes the lock if no further check is needed: in serial mode while nothing else is inside.
    /// `None` if not, also while a control call or service thread is inside, for which
    /// [`enter`](Self::enter) waits.
    #[inline(always)]
    pub(crate) fn enter_open(&self) -> Option<Guard<'_, T>> {
        if !self.gate.enter_if_open() {
            return cold(None);
        }
        Some(Guard { lock: self, on_this_thread: PhantomData })
    }

    /// Returns the guard of a lock that this thread still holds.
    ///
    /// # Safety
    /// This thread holds the lock by a guard that [stayed](Guard::stay), and has not resumed it
    /// since.
    #[inline(always)]
    pub(crate) unsafe fn resume(&self) -> Guard<'_, T> {
        Guard { lock: self, on_this_thread: PhantomData }
    }

    /// The rest of [`enter`](Self::enter). The caller makes the guard, so that it stays in
    /// registers.
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
                        NO_OWNER => {
                            // Acquires the writes of the last owner. The mode may have changed, so
                            // the loop checks again.
                            let (order, fail) = (Ordering::Acquire, Ordering::Relaxed);
                            let _ = self.owner.compare_exchange(NO_OWNER, me, order, fail);
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
        if self.gate.held.swap(true, Ordering::Acquire) {
            self.spin_until_free();
        }
        if self.mode.load(Ordering::Relaxed) == POISONED {
            self.gate.leave();
            return Err(Error::OpBadState);
        }
        Ok(())
    }

    #[cold]
    fn spin_until_free(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let mut tries = 0_u32;
        let held = || self.gate.held.load(Ordering::Relaxed);
        while held() || self.gate.held.swap(true, Ordering::Acquire) {
            tries += 1;
            if tries < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// Enters in owned or serial mode, after claims have ended. The caller may enter if no data
    /// call is inside.
    ///
    /// # Errors
    /// [`Error::OpBadState`]: called back from inside, or a thread has panicked inside.
    fn take(&self) -> Result<()> {
        if self.gate.inside.load(Ordering::Relaxed) {
            // The mode may have become shared: then another thread tries the gate at this moment.
            return match self.mode.load(Ordering::Acquire) {
                SHARED => self.enter_shared(),
                _ => Err(Error::OpBadState),
            };
        }
        loop {
            if self.gate.set_inside() & CLAIMED == 0 {
                match self.mode.load(Ordering::Relaxed) {
                    OWNED | SERIAL => return Ok(()),
                    SHARED => {
                        self.gate.inside.store(false, Ordering::Relaxed);
                        return self.enter_shared();
                    }
                    _ => {
                        self.gate.inside.store(false, Ordering::Relaxed);
                        return Err(Error::OpBadState);
                    }
                }
            }
            self.gate.inside.store(false, Ordering::Release);
            wait_while(|| self.gate.checks.load(Ordering::Acquire) & CLAIMED != 0);
        }
    }

    /// Takes the lock for a service thread, in owned and serial mode without the program's promise.
    /// `None` if a data call is inside, or the lock is poisoned. Costs about a microsecond and
    /// interrupts each processor that runs a thread of the process. Also `None` before
    /// [`allow_service_threads`](Self::allow_service_threads), in owned mode.
    pub(crate) fn try_enter_control(&self) -> Option<ControlGuard<'_, T>> {
        if self.forked() {
            return None;
        }
        if self.mode.load(Ordering::Acquire) == SHARED {
            return self.enter().ok().map(|guard| ControlGuard::of(guard));
        }
        if self.gate.claim() {
            return None;
        }
        let claimed = ControlGuard::claimed(self);
        // No other thread can change the mode now.
        let mode = || self.mode.load(Ordering::Acquire);
        let enters = process_barrier().is_ok()
            && !self.gate.inside.load(Ordering::Acquire)
            && matches!(mode(), OWNED | SERIAL);
        enters.then_some(claimed)
    }

    /// Takes the lock for a control call, which in serial mode may come while a data call is inside
    /// on another thread: waits until that has left. Costs what
    /// [`try_enter_control`](Self::try_enter_control) does.
    ///
    /// # Errors
    /// As [`enter`](Self::enter). In serial mode a thread that is already inside deadlocks.
    pub(crate) fn enter_control(&self) -> Result<ControlGuard<'_, T>> {
        if self.mode.load(Ordering::Acquire) != SERIAL {
            return self.enter().map(|guard| ControlGuard::of(guard));
        }
        if self.forked() {
            return Err(Error::OpBadState);
        }
        wait_while(|| self.gate.claim());
        let claimed = ControlGuard::claimed(self);
        let barred = process_barrier();
        wait_while(|| self.gate.inside.load(Ordering::Acquire));
        if barred.is_ok() && self.mode.load(Ordering::Acquire) == SERIAL {
            return Ok(claimed);
        }
        // The mode has changed. The claim ends without its destructor, which would poison the lock
        // if this thread unwinds.
        std::mem::forget(claimed);
        self.end_claim(false);
        barred.map_err(|_| Error::OpBadState)?;
        self.enter().map(|guard| ControlGuard::of(guard))
    }

    /// Ends a claim, and releases `held` if `is_held`: the lock was made shared from inside.
    fn end_claim(&self, is_held: bool) {
        if is_held {
            self.gate.held.store(false, Ordering::Release);
        }
        self.gate.checks.fetch_and(!CLAIMED, Ordering::Release);
    }

    /// Allows a service thread to enter while the program is outside.
    ///
    /// # Errors
    /// The kernel has no `membarrier`, without which a service thread can only enter a shared lock.
    pub(crate) fn allow_service_threads(&self) -> io::Result<()> {
        if self.mode.load(Ordering::Relaxed) == SHARED {
            return Ok(());
        }
        register_membarrier().map_err(|e| io::Error::new(e.kind(), format!("membarrier(2): {e}")))
    }

    /// As [`enter_control`](Self::enter_control) for a destructor, which may run while its
    /// thread unwinds from a panic elsewhere.
    pub(crate) fn enter_to_close(&self) -> Result<CloseGuard<'_, T>> {
        let inside = ManuallyDrop::new(self.enter_control()?);
        Ok(CloseGuard { inside, unwinding: std::thread::panicking() })
    }

    /// Gives up the ownership of an owned domain. The next thread that enters becomes the owner.
    ///
    /// # Errors
    /// As [`enter`](Self::enter): only the owner can.
    pub(crate) fn disown(&self) -> Result<()> {
        drop(self.enter()?);
        self.owner.store(NO_OWNER, Ordering::Release);
        Ok(())
    }

    /// Yields to threads that wait for the lock, after a turn of the progress loop.
    pub(crate) fn yield_to_waiters(&self) {
        // Bounded: a waiter may have been stopped by a debugger.
        for _ in 0..64 {
            if self.waiting.load(Ordering::Relaxed) == 0 {
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Registers the lock of `owner`: a fork closes its gate in the child from now on, so in serial
    /// mode the gate can be open. (If a thread is inside the gate is not opened, which costs time
    /// only.)
    pub(crate) fn close_in_child<S: HasLock<Value = T> + 'static>(owner: &Arc<S>) {
        let lock = owner.lock();
        if lock.mode.load(Ordering::Relaxed) != SERIAL {
            return;
        }
        let Ok(inside) = lock.enter() else { return };
        if lock.mode.load(Ordering::Relaxed) != SERIAL {
            return;
        }
        let entry: Weak<S> = Arc::downgrade(owner);
        FORK_REGISTRY.change(|locks| locks.push(entry));
        // A later fork closes the gate in the child; before, the gate was not open. A child of a
        // fork in between does not run this code.
        lock.gate.checks.fetch_and(!CHECK_MODE, Ordering::Relaxed);
        inside.leave();
    }

    /// Whether this is a forked child's copy.
    #[inline]
    pub(crate) fn forked(&self) -> bool {
        self.forks != FORKS.load(Ordering::Relaxed)
    }
}

impl Gate {
    /// Enters if no further check is needed. Makes no call, so that a caller into which it is
    /// inlined keeps its registers.
    #[inline(always)]
    fn enter_if_open(&self) -> bool {
        if self.inside.load(Ordering::Relaxed) {
            return cold(false);
        }
        if self.set_inside() != 0 {
            self.inside.store(false, Ordering::Release);
            return cold(false);
        }
        true
    }

    /// Sets `inside` and returns the pending checks. The barrier of a claimer, which runs on this
    /// processor, orders the two.
    #[inline(always)]
    fn set_inside(&self) -> u8 {
        self.inside.store(true, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        self.checks.load(Ordering::Acquire)
    }

    /// Claims the lock. Returns true if it was already claimed: then nothing has happened.
    fn claim(&self) -> bool {
        self.checks.fetch_or(CLAIMED, Ordering::Acquire) & CLAIMED != 0
    }

    /// Leaves in any mode. A claimer waits for `inside`, which is stored last.
    #[inline(always)]
    fn leave(&self) {
        self.held.store(false, Ordering::Release);
        self.inside.store(false, Ordering::Release);
    }

    #[cfg(test)]
    fn is_open(&self) -> bool {
        self.checks.load(Ordering::Relaxed) == 0 && !self.inside.load(Ordering::Relaxed)
    }

    /// Closes the gate for good: in a forked child, or when the mode changes.
    fn close(&self) {
        self.checks.fetch_or(CHECK_MODE, Ordering::Relaxed);
    }
}

impl<T> Drop for Lock<T> {
    fn drop(&mut self) {
        // The object of this lock is being dropped: its weak reference is dead.
        FORK_REGISTRY.change(|locks| locks.retain(|lock| lock.strong_count() > 0));
    }
}

impl<T> Guard<'_, T> {
    /// Leaves as `drop` does, without the check for a panic.
    #[inline(always)]
    pub(crate) fn leave(self) {
        self.lock.gate.leave();
        std::mem::forget(self);
    }

    /// Keeps the lock held without a guard, until [`Lock::resume`].
    #[inline(always)]
    pub(crate) fn stay(self) {
        std::mem::forget(self);
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
            self.lock.gate.close();
        }
        self.lock.gate.leave();
    }
}

impl<'a, T> Deref for CloseGuard<'a, T> {
    type Target = ControlGuard<'a, T>;

    fn deref(&self) -> &ControlGuard<'a, T> {
        &self.inside
    }
}

impl<T> DerefMut for CloseGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.inside
    }
}

impl<T> Drop for CloseGuard<'_, T> {
    fn drop(&mut self) {
        if self.unwinding {
            // The panic began elsewhere, so the lock is not poisoned.
            match &self.inside.shared {
                Some(_) => self.inside.lock.gate.leave(),
                None => self.inside.lock.end_claim(self.inside.is_held),
            }
        } else {
            // SAFETY: the value must not be used after this, and this is its last use.
            unsafe { ManuallyDrop::drop(&mut self.inside) };
        }
    }
}

/// Exclusive access of a control call or service thread to the value.
pub(crate) struct ControlGuard<'a, T> {
    lock: &'a Lock<T>,
    /// Guard of a lock that was entered and not claimed.
    shared: Option<Guard<'a, T>>,
    /// The lock was claimed, and made shared since.
    is_held: bool,
}

impl<'a, T> ControlGuard<'a, T> {
    fn of(guard: Guard<'a, T>) -> Self {
        Self { lock: guard.lock, shared: Some(guard), is_held: false }
    }

    fn claimed(lock: &'a Lock<T>) -> Self {
        Self { lock, shared: None, is_held: false }
    }

    /// Makes the lock shared, before another thread of barewire enters.
    pub(crate) fn share(&mut self) {
        if matches!(self.lock.mode.load(Ordering::Relaxed), OWNED | SERIAL) {
            self.lock.gate.held.store(true, Ordering::Relaxed);
            self.is_held = self.shared.is_none();
            self.lock.gate.close();
            self.lock.mode.store(SHARED, Ordering::Release);
        }
    }
}

impl<T> Deref for ControlGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: either a guard is held, or the claim keeps every other entry out (see `Sync`),
        // and the value is lent while `self` is borrowed.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for ControlGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: either a guard is held, or the claim keeps every other entry out (see `Sync`);
        // `&mut self` keeps out a second borrow through this guard.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for ControlGuard<'_, T> {
    fn drop(&mut self) {
        if self.shared.is_some() {
            return;
        }
        if std::thread::panicking() {
            self.lock.mode.store(POISONED, Ordering::Relaxed);
            self.lock.gate.close();
        }
        self.lock.end_claim(self.is_held);
    }
}

/// Waits for a thread that is inside, for a few turns of the loop.
fn wait_while(mut busy: impl FnMut() -> bool) {
    let mut tries = 0_u32;
    while busy() {
        tries += 1;
        if tries < SPINS {
            std::hint::spin_loop();
        } else {
            // Not a yield: a thread with a real-time policy yields only to threads of its priority.
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

/// Prepares the process for [`Lock::try_enter_control`]. May be called again.
///
/// # Errors
/// The kernel's, before Linux 4.14 or where a filter forbids membarrier(2).
pub(crate) fn register_membarrier() -> io::Result<()> {
    membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)
}

/// Runs a full memory barrier on every thread of the process.
fn process_barrier() -> io::Result<()> {
    membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)
}

fn membarrier(command: libc::c_int) -> io::Result<()> {
    // SAFETY: membarrier(2) takes three numbers and touches no memory of ours.
    let answer = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A number of this thread, not 0, that no other thread of the process ever has.
#[inline]
fn thread_number() -> u64 {
    thread_local! {
        static NUMBER: Cell<u64> = const { Cell::new(NO_OWNER) };
    }
    NUMBER.with(|n| match n.get() {
        NO_OWNER => {
            static NEXT: AtomicU64 = AtomicU64::new(1);
            n.set(NEXT.fetch_add(1, Ordering::Relaxed));
            n.get()
        }
        number => number,
    })
}

/// Forks between the first domain and this process.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The locks whose gates a fork closes in the child.
static FORK_REGISTRY: ForkRegistry =
    ForkRegistry { busy: AtomicBool::new(false), locks: UnsafeCell::new(Vec::new()) };

struct ForkRegistry {
    /// A thread changes the list or forks: a fork must find the list consistent.
    busy: AtomicBool,
    locks: UnsafeCell<Vec<Weak<dyn HasGate>>>,
}

// SAFETY: a thread that accesses the list has set `busy`, by one exchange with acquire, and clears
// it with release.
unsafe impl Sync for ForkRegistry {}

impl ForkRegistry {
    fn begin(&self) {
        while self.busy.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
    }

    fn end(&self) {
        self.busy.store(false, Ordering::Release);
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Weak<dyn HasGate>>)) {
        self.begin();
        // SAFETY: one thread at a time is here (see `Sync`), and `change` does not call this
        // function.
        change(unsafe { &mut *self.locks.get() });
        self.end();
    }
}

extern "C" fn before_fork() {
    FORK_REGISTRY.begin();
}

extern "C" fn in_parent() {
    FORK_REGISTRY.end();
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: `before_fork` has set `busy`, so no thread was changing the list.
    for lock in unsafe { &*FORK_REGISTRY.locks.get() } {
        // This is never the last reference: the reference of the fork's time still exists.
        if let Some(lock) = lock.upgrade() {
            lock.gate().close();
        }
    }
    FORK_REGISTRY.end();
}

fn register_fork_handlers() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: `pthread_atfork` needs handlers of which that for the child may run in the child
        // of a threaded process, where only async-signal-safe work is allowed: ours is atomic
        // operations on a list that no thread was changing. The handler before the fork waits for a
        // thread that changes the list of locks, which needs no lock that the forking thread could
        // hold. They live as long as the code that registers them. It fails only for want of
        // memory; then a child is not recognised, as it was before this call.
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
            Lock::close_in_child(&lock);
            lock.allow_service_threads().expect("the kernel has membarrier");
            let (there, stop) = (Arc::clone(&lock), Arc::new(AtomicBool::new(false)));
            let stopped = Arc::clone(&stop);
            let beside = std::thread::spawn(move || {
                let mut entered = 0_u64;
                while !stopped.load(Ordering::Relaxed) || entered == 0 {
                    if let Some(mut value) = there.try_enter_control() {
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

    /// Goal: control calls of several threads and data calls, which take no lock, exclude each
    /// other, also where one of the former makes the lock shared under way.
    #[test]
    fn control_calls_and_data_calls_exclude_each_other() {
        const ROUNDS: u64 = 100;
        for trial in 0..100 {
            let lock = Arc::new(Lock::new([0_u64; 2], Entry::Serial));
            Lock::close_in_child(&lock);
            let data = |lock: &Lock<[u64; 2]>| match lock.enter_open() {
                Some(mut value) => add_one(&mut value),
                None => add_one(&mut lock.enter().expect("nobody panicked")),
            };
            let control = |shares: bool| {
                let lock = Arc::clone(&lock);
                std::thread::spawn(move || {
                    for round in 0..ROUNDS {
                        let mut inside = lock.enter_control().expect("nobody panicked");
                        add_one(&mut inside);
                        if shares && round == trial % ROUNDS {
                            inside.share();
                        }
                    }
                })
            };
            let controls = [true, false, false].map(control);
            let mut entered = 0_u64;
            while !controls.iter().all(std::thread::JoinHandle::is_finished) {
                data(&lock);
                entered += 1;
            }
            controls.into_iter().for_each(|control| control.join().expect("it did not panic"));
            assert_eq!(*lock.enter().unwrap(), [entered + 3 * ROUNDS; 2]);
        }
    }

    /// Not one step, so that two threads inside at once are detected.
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
        lock.allow_service_threads().expect("the kernel has membarrier");
        Lock::close_in_child(&lock);
        let there = Arc::clone(&lock);
        let panicked = std::thread::spawn(move || {
            let _inside = there.try_enter_control().expect("nobody is inside");
            panic!("planted");
        });
        assert!(panicked.join().is_err());
        assert!(lock.enter_open().is_none());
        assert_eq!(lock.enter().err(), Some(Error::OpBadState));
        assert!(lock.try_enter_control().is_none());
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
        Lock::close_in_child(&lock);
        lock.enter_control().unwrap().share();
        let there = Arc::clone(&lock);
        let turns = |lock: &Lock<[u64; 2]>| {
            (0..50_000).for_each(|_| add_one(&mut lock.enter().unwrap()));
        };
        let other = std::thread::spawn(move || turns(&there));
        turns(&lock);
        other.join().unwrap();
        assert_eq!(*lock.enter().unwrap(), [100_000; 2]);
    }

    #[test]
    fn a_domain_of_one_thread_is_not_entered_twice() {
        let locks = [Entry::Owned, Entry::Serial, Entry::Serial].map(|e| Lock::new((), e));
        let locks = locks.map(Arc::new);
        Lock::close_in_child(&locks[2]);
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
                    locks.iter().for_each(Lock::close_in_child);
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
                    let mut locks = unsafe { &*FORK_REGISTRY.locks.get() }.iter();
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

    /// Goal: a call during the change to a shared lock is not taken for a reentrant one. Method:
    /// the gate as it is while the thread that made it shared tries it.
    #[test]
    fn a_call_during_the_change_to_shared_enters() {
        let lock = Lock::new(3, Entry::Serial);
        lock.enter_control().expect("nobody is inside").share();
        lock.gate.inside.store(true, Ordering::Relaxed);
        assert_eq!(lock.take(), Ok(()));
        // SAFETY: this thread is inside, and goes on once.
        assert_eq!(*unsafe { lock.resume() }, 3);
        assert!(!lock.gate.held.load(Ordering::Relaxed));
    }

    #[test]
    fn sharing_while_inside_keeps_others_out_until_the_guard_goes() {
        for entry in [Entry::Owned, Entry::Serial] {
            let lock = Arc::new(Lock::new(0_u64, entry));
            let mut inside = lock.enter_control().unwrap();
            inside.share();
            let there = Arc::clone(&lock);
            let other = std::thread::spawn(move || *there.enter().unwrap());
            std::thread::sleep(std::time::Duration::from_millis(20));
            *inside = 7;
            drop(inside);
            assert_eq!(other.join().unwrap(), 7);
        }
    }

    /// The gate of a lock that is held, or that is not serial, is not opened by its registration.
    #[test]
    fn a_gate_is_opened_only_when_nobody_is_inside() {
        for entry in [Entry::Owned, Entry::Serial, Entry::Shared] {
            let lock = Arc::new(Lock::new((), entry));
            let inside = lock.enter().unwrap();
            Lock::close_in_child(&lock);
            assert!(!lock.gate.is_open());
            drop(inside);
            assert!(!lock.gate.is_open() && lock.enter().is_ok());
            Lock::close_in_child(&lock);
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
        locks[2..].iter().for_each(Lock::close_in_child);
        locks[3].allow_service_threads().expect("the kernel has membarrier");
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
        Lock::close_in_child(&lock);
        lock.enter_open().expect("nobody is inside").stay();
        assert!(lock.enter_open().is_none());
        assert_eq!(lock.enter().err(), Some(Error::OpBadState));
        // SAFETY: the guard of this thread has stayed, and this is the first to go on.
        unsafe { lock.resume() }.leave();
        assert_eq!(lock.enter_open().map(|guard| *guard), Some(5));
        assert!(lock.enter().is_ok());
    }
}
