//! The lock of a domain, and when it can be skipped.
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
//! register, insert, close) come from any thread ([`Lock::enter_control`]). A domain in owned or
//! serial mode may also have a thread of ours, which enters while the program is outside
//! ([`Lock::enter_beside`]). Data calls pay no fence for either. A control call or thread *claims*
//! the lock, then the kernel runs a barrier on every processor of the process (membarrier(2),
//! `PRIVATE_EXPEDITED`). After it, either the claimer sees that a data call is inside, or the next
//! data call sees the claim and waits.
//!
//! A forked child shares the parent's device memory and must never touch it: every entry compares
//! the number of forks in this process's ancestry, except entries through an open gate, which the
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
/// A panic inside the lock, which only our own bug can cause: the state is undefined.
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

/// Somebody beside the data calls is inside, or waits until they are not.
const CLAIMED: u8 = 1;
/// The mode decides: it is not serial, or a fork would not set this in the child.
const ASK_MODE: u8 = 2;

/// An owned lock without an owner: the next thread to enter becomes it.
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

/// Whether a data call may enter.
struct Gate {
    /// A data call is inside in owned or serial mode, or checks whether it may be. Written by data
    /// calls only, with plain stores.
    inside: AtomicBool,
    /// [`CLAIMED`] and [`ASK_MODE`]: why a data call that is inside may have to leave again.
    asks: AtomicU8,
    /// Somebody is inside, in shared mode. A word of its own, since a data call that came before
    /// the mode changed may still write `inside`.
    held: AtomicBool,
}

// SAFETY: the value moves between threads (hence `T: Send`) but is only reached through a `Guard`
// or a `Beside`, of which there is one at a time:
// - shared mode: `held` becomes true in one exchange, with acquire, which whoever finds it so has
//   not won, and false with release;
// - owned mode: only the owner gets past `enter`, he alone writes `inside`, and ownership passes by
//   a release store and an acquiring exchange;
// - serial mode: whoever opened the domain has promised, in an unsafe call, that one data call at a
//   time is inside and that what one did happened before what the next does;
// - beside owned or serial mode: one claims at a time, in one exchange. The claim is stored before
//   a barrier on all processors of the process, and `inside` is read after it; a data call stores
//   `inside` and then reads the claim, in program order. So one of the two is seen. The data call
//   gives way and waits for the claim to end (acquire); who claims waits for the data call to leave
//   (acquire), or gives the claim up (release);
// - from owned or serial to shared: whoever is inside changes the mode, having taken `held`, so
//   that others who see the new mode wait for him. A data call looks at the mode, or at `ASK_MODE`,
//   after the claim, so it sees the new one.
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
    inside: ManuallyDrop<Beside<'a, T>>,
    /// The thread was already unwinding when it entered.
    unwinding: bool,
}

impl<T> Lock<T> {
    pub(crate) fn new(value: T, entry: Entry) -> Self {
        watch_forks();
        Self {
            mode: AtomicU8::new(match entry {
                Entry::Owned => OWNED,
                // Without the barrier nobody could come beside the data calls.
                Entry::Serial if register_beside().is_ok() => SERIAL,
                Entry::Serial | Entry::Shared => SHARED,
            }),
            gate: Gate {
                inside: AtomicBool::new(false),
                asks: AtomicU8::new(ASK_MODE),
                held: AtomicBool::new(false),
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
        if !self.gate.enter_if_open() {
            cold(());
            self.enter_checked()?;
        }
        Ok(Guard { lock: self, on_this_thread: PhantomData })
    }

    /// Takes the lock if no further check is needed: in serial mode while nothing else is inside.
    /// `None` if not, also while a control call or thread of ours is inside, for which
    /// [`enter`](Self::enter) waits.
    #[inline(always)]
    pub(crate) fn enter_open(&self) -> Option<Guard<'_, T>> {
        if !self.gate.enter_if_open() {
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
        if self.gate.held.swap(true, Ordering::Acquire) {
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

    /// Enters in owned or serial mode, for somebody who may if nobody is inside, once nobody beside
    /// the data calls is.
    ///
    /// # Errors
    /// [`Error::OpBadState`]: called back from inside, or somebody panicked there.
    fn take(&self) -> Result<()> {
        if self.gate.inside.load(Ordering::Relaxed) {
            // It has become shared: whoever tries its gate is there for a moment.
            return match self.mode.load(Ordering::Acquire) {
                SHARED => self.enter_shared(),
                _ => Err(Error::OpBadState),
            };
        }
        loop {
            if self.gate.go_in() & CLAIMED == 0 {
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
            wait_while(|| self.gate.asks.load(Ordering::Acquire) & CLAIMED != 0);
        }
    }

    /// Takes the lock for a thread of ours beside the program's data calls, in owned and serial
    /// mode. `None` if the program is inside, or nobody may enter any more. Takes a microsecond and
    /// disturbs each processor that runs a thread of the process. Also `None` before
    /// [`admit_beside`](Self::admit_beside), in owned mode.
    pub(crate) fn enter_beside(&self) -> Option<Beside<'_, T>> {
        if self.forked() {
            return None;
        }
        if self.mode.load(Ordering::Acquire) == SHARED {
            return self.enter().ok().map(|guard| Beside::of(guard));
        }
        if self.gate.claim() {
            return None;
        }
        let claimed = Beside::claimed(self);
        // Nobody else can change the mode now.
        let mode = || self.mode.load(Ordering::Acquire);
        let enters = barrier_everywhere().is_ok()
            && !self.gate.inside.load(Ordering::Acquire)
            && matches!(mode(), OWNED | SERIAL);
        enters.then_some(claimed)
    }

    /// Takes the lock for a control call, which in serial mode may come while a data call is inside
    /// on another thread: waits until that has left. Costs what
    /// [`enter_beside`](Self::enter_beside) does.
    ///
    /// # Errors
    /// As [`enter`](Self::enter). In serial mode who is inside already waits for ever.
    pub(crate) fn enter_control(&self) -> Result<Beside<'_, T>> {
        if self.mode.load(Ordering::Acquire) != SERIAL {
            return self.enter().map(|guard| Beside::of(guard));
        }
        if self.forked() {
            return Err(Error::OpBadState);
        }
        wait_while(|| self.gate.claim());
        let claimed = Beside::claimed(self);
        let barred = barrier_everywhere();
        wait_while(|| self.gate.inside.load(Ordering::Acquire));
        if barred.is_ok() && self.mode.load(Ordering::Acquire) == SERIAL {
            return Ok(claimed);
        }
        // Somebody has changed the mode. Nothing has panicked in here, whatever this thread does.
        std::mem::forget(claimed);
        self.end_claim(false);
        barred.map_err(|_| Error::OpBadState)?;
        self.enter().map(|guard| Beside::of(guard))
    }

    /// Leaves a lock that was claimed, and `is_held` besides since it was made shared from inside.
    fn end_claim(&self, is_held: bool) {
        if is_held {
            self.gate.held.store(false, Ordering::Release);
        }
        self.gate.asks.fetch_and(!CLAIMED, Ordering::Release);
    }

    /// From now on a thread of ours may come in beside the program's, which is elsewhere.
    ///
    /// # Errors
    /// The kernel has no `membarrier`, without which only a shared lock can be had beside the
    /// program. Nobody may then.
    pub(crate) fn admit_beside(&self) -> io::Result<()> {
        if self.mode.load(Ordering::Relaxed) == SHARED {
            return Ok(());
        }
        register_beside().map_err(|e| io::Error::new(e.kind(), format!("membarrier(2): {e}")))
    }

    /// As [`enter_control`](Self::enter_control) for a destructor, which may run while its
    /// thread unwinds from a panic elsewhere.
    pub(crate) fn enter_to_close(&self) -> Result<Closing<'_, T>> {
        let inside = ManuallyDrop::new(self.enter_control()?);
        Ok(Closing { inside, unwinding: std::thread::panicking() })
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

    /// Lets a thread that has run the progress loop yield while others want in.
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
        if lock.mode.load(Ordering::Relaxed) != SERIAL {
            return;
        }
        let watched: Weak<S> = Arc::downgrade(owner);
        WATCHED.change(|locks| locks.push(watched));
        // A fork after this shuts it; before it there was nothing to shut, but for a fork in
        // between, whose child this is not, since it would not be here.
        lock.gate.asks.fetch_and(!ASK_MODE, Ordering::Relaxed);
        inside.leave();
    }

    /// Whether this is a forked child's copy.
    #[inline]
    pub(crate) fn forked(&self) -> bool {
        self.forks != FORKS.load(Ordering::Relaxed)
    }
}

impl Gate {
    /// Enters if no question is to be asked. Makes no call, so that a caller in which it is inlined
    /// keeps its registers.
    #[inline(always)]
    fn enter_if_open(&self) -> bool {
        if self.inside.load(Ordering::Relaxed) {
            return cold(false);
        }
        if self.go_in() != 0 {
            self.inside.store(false, Ordering::Release);
            return cold(false);
        }
        true
    }

    /// Enters, and says what there was to be asked. The order of the two is kept for whoever claims
    /// by his barrier on this processor.
    #[inline(always)]
    fn go_in(&self) -> u8 {
        self.inside.store(true, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        self.asks.load(Ordering::Acquire)
    }

    /// Claims it. Whether somebody else had: then nothing has happened.
    fn claim(&self) -> bool {
        self.asks.fetch_or(CLAIMED, Ordering::Acquire) & CLAIMED != 0
    }

    /// Leaves, in whatever mode: who waits for a data call looks at `inside`, which changes last.
    #[inline(always)]
    fn leave(&self) {
        self.held.store(false, Ordering::Release);
        self.inside.store(false, Ordering::Release);
    }

    #[cfg(test)]
    fn is_open(&self) -> bool {
        self.asks.load(Ordering::Relaxed) == 0 && !self.inside.load(Ordering::Relaxed)
    }

    /// Shuts it for good: in a process that must not come in, or where the mode changes.
    fn shut(&self) {
        self.asks.fetch_or(ASK_MODE, Ordering::Relaxed);
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
            self.lock.gate.shut();
        }
        self.lock.gate.leave();
    }
}

impl<'a, T> Deref for Closing<'a, T> {
    type Target = Beside<'a, T>;

    fn deref(&self) -> &Beside<'a, T> {
        &self.inside
    }
}

impl<T> DerefMut for Closing<'_, T> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.inside
    }
}

impl<T> Drop for Closing<'_, T> {
    fn drop(&mut self) {
        if self.unwinding {
            // Nothing has panicked in here that we know of.
            match &self.inside.shared {
                Some(_) => self.inside.lock.gate.leave(),
                None => self.inside.lock.end_claim(self.inside.is_held),
            }
        } else {
            // SAFETY: `drop` asks that the value is not used afterwards, and this is the last that
            // happens to it.
            unsafe { ManuallyDrop::drop(&mut self.inside) };
        }
    }
}

/// The right of a control call, or of a thread of ours, to touch the value.
pub(crate) struct Beside<'a, T> {
    lock: &'a Lock<T>,
    /// The lock itself, where it was not claimed.
    shared: Option<Guard<'a, T>>,
    /// It was claimed, and made shared since.
    is_held: bool,
}

impl<'a, T> Beside<'a, T> {
    fn of(guard: Guard<'a, T>) -> Self {
        Self { lock: guard.lock, shared: Some(guard), is_held: false }
    }

    fn claimed(lock: &'a Lock<T>) -> Self {
        Self { lock, shared: None, is_held: false }
    }

    /// Makes the lock shared, before another thread of ours may come.
    pub(crate) fn share(&mut self) {
        if matches!(self.lock.mode.load(Ordering::Relaxed), OWNED | SERIAL) {
            self.lock.gate.held.store(true, Ordering::Relaxed);
            self.is_held = self.shared.is_none();
            self.lock.gate.shut();
            self.lock.mode.store(SHARED, Ordering::Release);
        }
    }
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
        self.lock.end_claim(self.is_held);
    }
}

/// Waits for somebody who is inside for a few turns of the loop.
fn wait_while(mut busy: impl FnMut() -> bool) {
    let mut tries = 0_u32;
    while busy() {
        tries += 1;
        if tries < SPINS {
            std::hint::spin_loop();
        } else {
            // Not a yield: a program with a real-time policy would yield to its like alone.
            std::thread::sleep(Duration::from_micros(20));
        }
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

    /// Goal: control calls of several threads and data calls, which take no lock, exclude each
    /// other, also where one of the former makes the lock shared under way.
    #[test]
    fn control_calls_and_data_calls_exclude_each_other() {
        const ROUNDS: u64 = 100;
        for trial in 0..100 {
            let lock = Arc::new(Lock::new([0_u64; 2], Entry::Serial));
            Lock::shut_in_child(&lock);
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

    /// Goal: a call that comes while the lock becomes shared is not taken for one that is made from
    /// inside. Method: the gate as it is while the thread that made it shared tries it.
    #[test]
    fn a_call_that_meets_the_change_to_shared_gets_in() {
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
