//! Memory for keys: locked against swapping, excluded from core dumps, and wiped when freed.
//!
//! A [`Locked`] is a box in this memory. Moving it moves a pointer, so that no copy of the secret
//! stays on the stack. All boxes share one pool of the process, in chunks that are never returned
//! to the kernel. If the kernel does not lock a chunk, because of `RLIMIT_MEMLOCK`, it is used
//! anyway: this is logged once, and reported by [`KeyMemory`].
//!
//! A forked child has a copy: excluded from its core dumps, but not locked. It is neither wiped
//! (`MADV_WIPEONFORK`) nor unmapped there: values with a secret may be dropped in the child too,
//! and zeros may be no valid value of them.

use std::alloc::{Layout, handle_alloc_error};
use std::cell::UnsafeCell;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use memmap2::{Advice, MmapMut};
use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::{SysconfVar, sysconf};

/// Bytes of the smallest slot.
const SLOT_MIN: usize = 32;

/// Bytes of the largest slot.
const SLOT_MAX: usize = 64 << 10;

/// Sizes of slots, each twice the one before.
const CLASSES: usize = (SLOT_MAX / SLOT_MIN).ilog2() as usize + 1;

/// Minimum bytes of a chunk; the smallest `RLIMIT_MEMLOCK` in use, 64 KiB, allows some.
const CHUNK_LEN: usize = 16 << 10;

/// Minimum bytes that become slots of one size at a time.
const RUN_LEN: usize = 1 << 10;

/// Largest alignment of a slot, bytes: a page of every architecture.
const ALIGN_MAX: usize = 4096;

/// A box in locked memory.
pub struct Locked<T: ?Sized> {
    at: NonNull<T>,
}

// SAFETY: it owns what it points to, as a `Box` does.
unsafe impl<T: ?Sized + Send> Send for Locked<T> {}
// SAFETY: as for `Send`.
unsafe impl<T: ?Sized + Sync> Sync for Locked<T> {}

impl<T> Locked<T> {
    /// Moves `value` there. Its previous location may keep a copy: bytes are better written in
    /// place.
    pub fn new(value: T) -> Self {
        const { assert!(align_of::<T>() <= ALIGN_MAX) };
        let at = slot_for(Layout::new::<T>()).cast::<T>();
        // SAFETY: the slot has the size and alignment of `T` and is nobody else's.
        unsafe { at.write(value) };
        Self { at }
    }
}

impl<const N: usize> Default for Locked<[u8; N]> {
    /// Zeros.
    fn default() -> Self {
        // A slot is all zeros.
        Self { at: slot_for(Layout::new::<[u8; N]>()).cast() }
    }
}

impl<const N: usize> From<[u8; N]> for Locked<[u8; N]> {
    /// A copy of the bytes; the original stays where it was.
    fn from(bytes: [u8; N]) -> Self {
        let mut copy = Self::default();
        copy.copy_from_slice(&bytes);
        copy
    }
}

impl<const N: usize> Clone for Locked<[u8; N]> {
    fn clone(&self) -> Self {
        let mut copy = Self::default();
        copy.copy_from_slice(&**self);
        copy
    }
}

impl Locked<[u8]> {
    /// Largest length.
    pub const LEN_MAX: usize = SLOT_MAX;

    /// `len` zeros, at most [`LEN_MAX`](Self::LEN_MAX).
    ///
    /// # Panics
    /// If there are more.
    pub fn zeros(len: usize) -> Self {
        let layout = Layout::array::<u8>(len).expect("no more than a slot");
        Self { at: NonNull::slice_from_raw_parts(slot_for(layout), len) }
    }

    /// A copy of `bytes`, at most [`LEN_MAX`](Self::LEN_MAX).
    ///
    /// # Panics
    /// If there are more.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut copy = Self::zeros(bytes.len());
        copy.copy_from_slice(bytes);
        copy
    }
}

impl Clone for Locked<[u8]> {
    fn clone(&self) -> Self {
        Self::copy_of(self)
    }
}

impl<T: ?Sized> Deref for Locked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: it points to a valid value that it owns.
        unsafe { self.at.as_ref() }
    }
}

impl<T: ?Sized> DerefMut for Locked<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as for `deref`, and `self` is borrowed alone.
        unsafe { self.at.as_mut() }
    }
}

impl<T: ?Sized> Drop for Locked<T> {
    fn drop(&mut self) {
        let class = class_of(Layout::for_value(&**self));
        // SAFETY: the value is valid and never used again.
        unsafe { self.at.drop_in_place() };
        let at = self.at.cast::<u8>();
        wipe(at, SLOT_MIN << class);
        POOL.with(|pool| pool.free[class].push(at));
    }
}

/// Does not print the contents.
impl<T: ?Sized> fmt::Debug for Locked<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locked").finish_non_exhaustive()
    }
}

/// Usage of locked memory in this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyMemory {
    /// Bytes in allocated slots.
    pub used: usize,
    /// Bytes mapped.
    pub len: usize,
    /// Bytes of these that are locked.
    pub locked: usize,
}

impl KeyMemory {
    /// The current usage.
    pub fn now() -> Self {
        POOL.with(|pool| {
            let free = pool.free.iter().enumerate().map(|(c, free)| free.len() * (SLOT_MIN << c));
            let used = pool.len - pool.unused.1 - free.sum::<usize>();
            Self { used, len: pool.len, locked: pool.locked }
        })
    }
}

/// Size class of slots for values of this layout.
fn class_of(layout: Layout) -> usize {
    let len = layout.size().max(layout.align()).max(SLOT_MIN).next_power_of_two();
    (len / SLOT_MIN).ilog2() as usize
}

/// Allocates a slot for a value of this layout.
fn slot_for(layout: Layout) -> NonNull<u8> {
    let class = class_of(layout);
    assert!(class < CLASSES, "{} bytes of a secret", layout.size());
    // Not under the pool's lock, which the fork handler takes.
    register_fork_handlers();
    let (slot, refused) = POOL.with(|pool| {
        let refused = if pool.free[class].is_empty() { pool.grow(class) } else { None };
        (pool.free[class].pop(), refused)
    });
    if let Some((len, why)) = refused {
        warn_not_locked(len, &why);
    }
    slot.unwrap_or_else(|| handle_alloc_error(layout))
}

/// Logs once that memory is not locked.
fn warn_not_locked(len: usize, why: &std::io::Error) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::Relaxed) {
        let limit = getrlimit(Resource::RLIMIT_MEMLOCK).map_or(0, |(soft, _)| soft);
        tracing::warn!(
            "keys may get to swap space: the kernel does not lock {len} bytes for them ({why}; \
             limit {limit} bytes); raise it (ulimit -l), or encrypt swap, or have none"
        );
    }
}

/// Overwrites a slot.
fn wipe(at: NonNull<u8>, len: usize) {
    let words = at.cast::<u64>();
    for i in 0..len / size_of::<u64>() {
        // SAFETY: the slot is mapped, aligned to 32 bytes, and its owner has no other use for it.
        unsafe { words.add(i).write_volatile(0) };
    }
}

/// All slots of the process.
static POOL: Pool = Pool {
    is_locked: AtomicBool::new(false),
    slots: UnsafeCell::new(Slots {
        free: [const { Vec::new() }; CLASSES],
        all: [0; CLASSES],
        unused: (NonNull::dangling(), 0),
        len: 0,
        locked: 0,
    }),
};

/// Slots under a spin lock. A forking thread takes the lock, so that its child has them in a
/// consistent state.
struct Pool {
    is_locked: AtomicBool,
    slots: UnsafeCell<Slots>,
}

struct Slots {
    /// Free slots by size, all zeros. Each vector has capacity for all slots of its size.
    free: [Vec<NonNull<u8>>; CLASSES],
    /// Number of slots by size, free and allocated.
    all: [usize; CLASSES],
    /// Start and length of the part of the last chunk that is not yet divided into slots.
    unused: (NonNull<u8>, usize),
    len: usize,
    locked: usize,
}

// SAFETY: the slots are accessed only under the spin lock, taken with Acquire and released with
// Release; they point to memory of no particular thread.
unsafe impl Sync for Pool {}

impl Pool {
    fn lock(&self) {
        while self.is_locked.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
    }

    fn unlock(&self) {
        self.is_locked.store(false, Ordering::Release);
    }

    fn with<T>(&self, act: impl FnOnce(&mut Slots) -> T) -> T {
        self.lock();
        // SAFETY: one at a time is here (see `Sync`), and `act` does not come back here.
        let done = act(unsafe { &mut *self.slots.get() });
        self.unlock();
        done
    }
}

impl Slots {
    /// Adds slots of this size, unless there is no memory. Returns the length that the kernel
    /// refused to lock, and why.
    fn grow(&mut self, class: usize) -> Option<(usize, std::io::Error)> {
        let slot_len = SLOT_MIN << class;
        let (run_len, align) = (slot_len.max(RUN_LEN), slot_len.min(ALIGN_MAX));
        let gap_at = |at: NonNull<u8>| at.addr().get().next_multiple_of(align) - at.addr().get();
        let mut refused = None;
        if gap_at(self.unused.0) + run_len > self.unused.1 {
            self.carve(self.unused.1, 0);
            refused = self.map(run_len);
        }
        let gap = gap_at(self.unused.0);
        if gap + run_len <= self.unused.1 {
            self.carve(gap, 0);
            self.carve(run_len, class);
        }
        refused
    }

    /// Divides the next `len` unused bytes into slots of this size.
    fn carve(&mut self, len: usize, class: usize) {
        let slot_len = SLOT_MIN << class;
        let (at, unused_len) = self.unused;
        let free = &mut self.free[class];
        self.all[class] += len / slot_len;
        // Freeing a slot must not allocate.
        free.reserve(self.all[class] - free.len());
        // SAFETY: each slot is within the unused part.
        free.extend((0..len / slot_len).map(|i| unsafe { at.add(i * slot_len) }));
        // SAFETY: at most the end of the unused part.
        self.unused = (unsafe { at.add(len) }, unused_len - len);
    }

    /// Maps a chunk of at least `len` bytes, which becomes the unused part.
    fn map(&mut self, len: usize) -> Option<(usize, std::io::Error)> {
        let page_len = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().unwrap_or(4096) as usize;
        let len = len.max(CHUNK_LEN).next_multiple_of(page_len);
        // Never unmapped.
        let mut map = ManuallyDrop::new(MmapMut::map_anon(len).ok()?);
        // Supported since Linux 3.4.
        let _ = map.advise(Advice::DontDump);
        let refused = map.lock().err();
        self.len += len;
        self.locked += if refused.is_none() { len } else { 0 };
        self.unused = (NonNull::new(map.as_mut_ptr()).expect("a mapping is not at 0"), len);
        refused.map(|why| (len, why))
    }
}

extern "C" fn before_fork() {
    POOL.lock();
}

extern "C" fn after_fork() {
    POOL.unlock();
}

fn register_fork_handlers() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the child's handler does one atomic store, and the handler before the fork waits
        // for the pool's lock, under which no lock of the forking thread is taken. The handlers
        // live as long as the code that registers them. The call fails only for want of memory.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
    });
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::Command;
    use std::sync::Arc;

    use super::*;
    use crate::alone::is_alone;

    /// Flags of the mapping that `at` is in (proc_pid_smaps(5)).
    fn flags(at: *const u8) -> Vec<String> {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_here = false;
        for line in smaps.lines() {
            let range = line.split(' ').next().and_then(|word| word.split_once('-'));
            let range = range.map(|(a, b)| [a, b].map(|n| usize::from_str_radix(n, 16)));
            if let Some([Ok(from), Ok(to)]) = range {
                is_here = (from..to).contains(&at.addr());
            } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| is_here) {
                return flags.split_whitespace().map(str::to_owned).collect();
            }
        }
        panic!("mapped nowhere");
    }

    fn has(flags: &[String], flag: &str) -> bool {
        flags.iter().any(|it| it == flag)
    }

    #[test]
    fn the_kernel_neither_swaps_nor_dumps_it() {
        let held = [Locked::copy_of(&[1; 32]), Locked::zeros(Locked::LEN_MAX)];
        for secret in &held {
            let flags = flags(secret.as_ptr());
            assert!(has(&flags, "dd"), "{flags:?}");
            let (limit, _) = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap();
            assert!(has(&flags, "lo") || limit < 1 << 20, "{flags:?}, limit {limit}");
        }
        let stack = 0_u8;
        assert!(!has(&flags(&raw const stack), "dd"), "as other memory is");
    }

    /// Goal: what is given back is overwritten, all of the slot. Method: a size that no other test
    /// has; its slot stays mapped and nobody's.
    #[test]
    fn a_freed_slot_is_overwritten() {
        let secret = Locked::copy_of(&[0xA5; 20_000]);
        let at = secret.as_ptr();
        // SAFETY: the slot has 32 KiB, and nobody writes to it.
        let read = |i: usize| unsafe { at.add(i).read_volatile() };
        assert!((0..20_000).all(|i| read(i) == 0xA5));
        drop(secret);
        assert!((0..32 << 10).all(|i| read(i) == 0));
        let again = Locked::zeros(20_000);
        assert!(again.as_ptr() == at && again.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_value_is_dropped_with_its_box() {
        let counted = Arc::new(());
        let mut held = Locked::new((Arc::clone(&counted), 7));
        held.1 += 1;
        assert_eq!((Arc::strong_count(&held.0), held.1), (2, 8));
        assert!(!format!("{held:?}").contains('8'));
        drop(held);
        assert_eq!(Arc::strong_count(&counted), 1);
    }

    /// Goal: slots are of the length asked for, aligned, apart from each other, and used again.
    /// Method: lengths drawn, each filled with its own byte; a third is given back now and then.
    #[test]
    fn slots_are_apart() {
        let mut held: Vec<(u8, Locked<[u8]>)> = Vec::new();
        let (mut drawn, mut most) = (7_u32, 0);
        for i in 0..20_000_u32 {
            drawn = drawn.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let len = (drawn >> 8) as usize % (16 << (drawn >> 29));
            let mut secret = Locked::zeros(len);
            assert!(secret.iter().all(|&byte| byte == 0));
            assert_eq!(secret.as_ptr().addr() % len.next_power_of_two().clamp(32, 4096), 0);
            secret.fill(i as u8);
            held.push((i as u8, secret));
            if held.len() == 300 {
                assert!(held.iter().all(|(fill, secret)| secret.iter().all(|b| b == fill)));
                held.retain(|(fill, _)| fill % 3 != 0);
                most = most.max(KeyMemory::now().len);
            }
        }
        assert!(most <= 4 << 20, "{most} bytes for 300 slots of 2 KiB at most");
    }

    /// Goal: where the kernel locks nothing, there is memory for secrets all the same, which is
    /// left out of dumps. Method: a process of a user without privilege whose limit is 0.
    #[test]
    fn a_limit_is_no_failure() {
        // SAFETY: the two calls of `unlocked` are async-signal-safe.
        let change = |process: &mut Command| _ = unsafe { process.pre_exec(unlocked) };
        if !is_alone("mem::locked::tests::a_limit_is_no_failure", change) {
            return;
        }
        let secret = Locked::copy_of(&[1; 32]);
        let flags = flags(secret.as_ptr());
        assert!(has(&flags, "dd") && !has(&flags, "lo"), "{flags:?}");
        assert_eq!(KeyMemory::now().locked, 0);
        assert!(secret.iter().all(|&byte| byte == 1));
    }

    /// Takes from this process what lets it lock memory.
    fn unlocked() -> std::io::Result<()> {
        const CAP_IPC_LOCK: libc::c_ulong = 14;
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: plain system calls. The capability is not among those after the exec.
        unsafe {
            libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const none);
            libc::prctl(libc::PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0);
        }
        Ok(())
    }

    /// A child of fork has what its parent has, and may drop it, and take more, whatever another
    /// thread was at. (In a process without other tests, whose descriptors its children would keep
    /// open.)
    #[test]
    fn a_child_may_drop_it() {
        if !is_alone("mem::locked::tests::a_child_may_drop_it", |_| ()) {
            return;
        }
        let over = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&over);
        let holder = std::thread::spawn(move || {
            while !until.load(Ordering::Relaxed) {
                drop(Locked::zeros(64));
            }
        });
        for _ in 0..100 {
            let secret = Locked::copy_of(&[7; 32]);
            // SAFETY: the child calls nothing that another thread may have been in the middle of.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: it ends the child, should that wait for ever.
                unsafe { libc::alarm(10) };
                let is = secret.iter().all(|&byte| byte == 7);
                drop(secret);
                let more = Locked::<[u8; 32]>::default();
                let is = is && more.iter().all(|&byte| byte == 0);
                // SAFETY: it ends the child at once.
                unsafe { libc::_exit(if is { 0 } else { 1 }) };
            }
            let mut status = 0;
            // SAFETY: the child is this process's.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0);
        }
        over.store(true, Ordering::Relaxed);
        holder.join().unwrap();
    }
}
