//! Locks shared by the processes of one domain name.
//!
//! fi_atomic(3) treats one domain name as one actor: atomics of two processes on the same memory
//! registered under it must be atomic with each other. For elements of up to 8 bytes the
//! processor's instructions ensure that; for wider ones these locks do.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use memmap2::{MmapOptions, MmapRaw};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::lock::{STRIPES, WideLock, stripe};
use crate::file::reserve;

/// The contents of the file: robust mutexes of the C library, one cache line each.
///
/// Robust, because the owner may be killed at any instruction. The next owner then may find the
/// element half updated, which is inherent in a death during an update, and continues.
#[derive(Debug)]
pub struct ProcessLocks {
    table: *const Table,
    /// Locked while the process lives, so that no other process removes the file.
    _file: Flock<File>,
}

#[repr(C, align(64))]
struct Table {
    magic: u64,
    locks: [Stripe; STRIPES],
}

#[repr(C, align(64))]
struct Stripe(UnsafeCell<libc::pthread_mutex_t>);

/// "bwlocks" and the number of the layout.
const MAGIC: u64 = u64::from_le_bytes(*b"bwlocks1");

// SAFETY: the address of a mapping that is never taken away; what lies there are a word that does
// not change and mutexes for any thread of any process. The file, which may be sent, is only kept.
unsafe impl Send for ProcessLocks {}
// SAFETY: as for Send.
unsafe impl Sync for ProcessLocks {}

impl ProcessLocks {
    /// Opens the locks in the file at `path`, which is created for this user alone if it does not
    /// exist.
    ///
    /// Returns the same table for the same path, mapped until the process ends. The path should be
    /// on a file system in memory. The file, 4 KiB, outlives its processes. A process that creates
    /// another file beside it, whose name is the same up to `-locks-`, removes it if no process
    /// uses it.
    ///
    /// # Errors
    /// Those of opening, locking and mapping; `PermissionDenied` if the file is another user's or
    /// no regular file, `InvalidData` if it is no table of this version, `WouldBlock` if somebody
    /// keeps it locked.
    pub fn open(path: &Path) -> io::Result<&'static Self> {
        static TABLES: Mutex<Option<HashMap<PathBuf, &'static ProcessLocks>>> = Mutex::new(None);
        let mut open = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
        let open = open.get_or_insert_default();
        if let Some(locks) = open.get(path) {
            return Ok(locks);
        }
        let file = open_and_lock(path)?;
        let map = map(&file)?;
        let table = map.as_mut_ptr().cast::<Table>();
        // SAFETY: a word inside the mapping that nobody changes after the file has its name.
        if unsafe { (*table).magic } != MAGIC {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // Regions hold the locks without a lifetime, so the mapping has to stay.
        std::mem::forget(map);
        let locks: &'static Self = Box::leak(Box::new(Self { table, _file: file }));
        open.insert(path.to_owned(), locks);
        Ok(locks)
    }
}

impl WideLock for ProcessLocks {
    fn with(&self, addr: usize, f: &mut dyn FnMut()) {
        // SAFETY: the table is mapped for ever and has `STRIPES` locks, of which `stripe` names
        // one; a raw pointer, so no reference to memory that others change.
        let mutex = unsafe { UnsafeCell::raw_get(&raw const (*self.table).locks[stripe(addr)].0) };
        let _held = LockGuard::take(mutex);
        f();
    }
}

/// Guard of a locked mutex.
struct LockGuard(*mut libc::pthread_mutex_t);

impl LockGuard {
    fn take(mutex: *mut libc::pthread_mutex_t) -> Self {
        // SAFETY: a mutex that was initialised before its file had a name, at an address that
        // stays. This thread does not hold it: what runs under it locks nothing.
        let mut error = unsafe { libc::pthread_mutex_lock(mutex) };
        if error == libc::EOWNERDEAD {
            // SAFETY: the mutex is robust and this thread holds it, as EOWNERDEAD says.
            error = unsafe { libc::pthread_mutex_consistent(mutex) };
        }
        // Continuing without the lock would break another update.
        assert!(error == 0, "a shared lock is broken: error {error}");
        Self(mutex)
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        // SAFETY: this thread locked it in `take`. Unlocking a held robust mutex does not fail.
        unsafe { libc::pthread_mutex_unlock(self.0) };
    }
}

/// Opens the table at `path`, creating it if necessary, and takes a shared file lock.
fn open_and_lock(path: &Path) -> io::Result<Flock<File>> {
    // Another process may be checking or removing it.
    for _ in 0..1000 {
        let file = match open_existing(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                remove_stale_tables(path);
                match create(path)? {
                    Some(file) => return Ok(file),
                    None => continue,
                }
            }
            other => other?,
        };
        match Flock::lock(file, FlockArg::LockSharedNonblock) {
            Ok(file) if is_same_file(&file, path) => return Ok(file),
            Ok(_) => {}
            Err((_, Errno::EWOULDBLOCK)) => std::thread::sleep(Duration::from_millis(1)),
            Err((_, errno)) => return Err(errno.into()),
        }
    }
    Err(io::ErrorKind::WouldBlock.into())
}

/// Removes the tables beside `path` that no living process has locked. Files that cannot be checked
/// stay, as do drafts.
fn remove_stale_tables(path: &Path) {
    const KIND: &str = "-locks-";
    let name = |path: &Path| path.file_name().and_then(OsStr::to_str).map(str::to_owned);
    let Some(own) = name(path) else { return };
    let Some(prefix) = own.find(KIND).map(|at| &own[..at + KIND.len()]) else { return };
    let Some(entries) = path.parent().and_then(|dir| fs::read_dir(dir).ok()) else { return };
    let others = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let alike = |name: &String| name.starts_with(prefix) && !name.contains('.') && *name != own;
    for other in others.filter(|other| name(other).as_ref().is_some_and(alike)) {
        let Ok(file) = open_existing(&other) else { continue };
        let Ok(file) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else { continue };
        // While it is locked under this name, no other process removes the name.
        if is_same_file(&file, &other) {
            let _ = fs::remove_file(&other);
        }
    }
}

/// Whether `path` names `file`.
fn is_same_file(file: &File, path: &Path) -> bool {
    let (Ok(file), Ok(named)) = (file.metadata(), fs::symlink_metadata(path)) else { return false };
    (file.dev(), file.ino()) == (named.dev(), named.ino())
}

/// Opens the table of this user at `path`.
fn open_existing(path: &Path) -> io::Result<File> {
    let file =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
    let meta = file.metadata()?;
    // SAFETY: geteuid has no preconditions.
    if !meta.is_file() || meta.uid() != unsafe { libc::geteuid() } {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    if meta.len() != size_of::<Table>() as u64 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(file)
}

/// Creates a table with all locks free at `path`, and takes a shared file lock. `None` if another
/// process was first.
///
/// It is created as a draft under another name, and linked to its own when it is complete and
/// locked: no process sees a partial table, or takes it for a stale one.
fn create(path: &Path) -> io::Result<Option<Flock<File>>> {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let mut draft = path.as_os_str().to_owned();
    draft.push(format!(".{}.{serial}", std::process::id()));
    let file =
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&draft)?;
    let named = init_table(&file).and_then(|()| {
        let file = Flock::lock(file, FlockArg::LockSharedNonblock).map_err(|(_, errno)| errno)?;
        match fs::hard_link(&draft, path) {
            Ok(()) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
            Err(error) => Err(error),
        }
    });
    fs::remove_file(&draft)?;
    named
}

/// Initialises a table.
fn init_table(file: &File) -> io::Result<()> {
    reserve(file, 0, size_of::<Table>())?;
    let map = map(file)?;
    let table = map.as_mut_ptr().cast::<Table>();
    let mut attr = MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
    // SAFETY: `attr` is initialised first and given up last; both settings are values that the
    // call knows. Nobody else has the file yet, so the mutexes are initialised once, in place, and
    // the word and they lie inside the mapping, which is page-aligned.
    let errors = unsafe {
        let mut errors = libc::pthread_mutexattr_init(attr.as_mut_ptr());
        let attr = attr.as_mut_ptr();
        errors |= libc::pthread_mutexattr_setpshared(attr, libc::PTHREAD_PROCESS_SHARED);
        errors |= libc::pthread_mutexattr_setrobust(attr, libc::PTHREAD_MUTEX_ROBUST);
        for i in 0..STRIPES {
            let mutex = UnsafeCell::raw_get(&raw const (*table).locks[i].0);
            errors |= libc::pthread_mutex_init(mutex, attr);
        }
        errors |= libc::pthread_mutexattr_destroy(attr);
        (*table).magic = MAGIC;
        errors
    };
    if errors != 0 {
        return Err(io::Error::other("the C library has no robust mutexes between processes"));
    }
    Ok(())
}

/// Maps the whole file.
fn map(file: &File) -> io::Result<MmapRaw> {
    MmapOptions::new().len(size_of::<Table>()).map_raw(file.as_raw_fd())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    use super::*;

    /// Goal: the table that somebody holds is the one that everybody else finds, however many look
    /// for dead ones meanwhile.
    #[test]
    fn a_table_that_is_held_keeps_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("x-locks-1"), dir.path().join("x-locks-2"));
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        remove_stale_tables(&other);
                    }
                });
            }
            let user = scope.spawn(|| {
                let start = Instant::now();
                while start.elapsed() < Duration::from_secs(1) {
                    let file = open_and_lock(&path).unwrap();
                    assert!(is_same_file(&file, &path), "its name was taken away");
                }
            });
            let end = user.join();
            over.store(true, Ordering::Relaxed);
            assert!(end.is_ok());
        });
    }
}
