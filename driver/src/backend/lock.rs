//! Locks on bytes of a file as a sign of its owner's life, one per member of a segment, and the
//! lock of a segment.
//!
//! They belong to the open file (`F_OFD_SETLK`), so the kernel gives them back when the process
//! dies however it dies, and no pid has to be believed: not a reused one, not one of another pid
//! namespace. Two owners in one process open the file twice and exclude each other as well.
//!
//! A forked child would share the open file and so keep its dead parent alive. The child therefore
//! swaps the descriptor for /dev/null as its first act (`pthread_atfork`); `exec` closes it.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};

/// Far beyond the end of any file, where locks are as good and disturb nobody.
const SEGMENT: i64 = 1 << 61;
const LIFE: i64 = SEGMENT + 64;

/// Holds the segment's lock.
pub(crate) struct Guard<'a>(&'a File);

impl<'a> Guard<'a> {
    /// Takes the lock if it is free.
    pub(crate) fn try_take(file: &'a File) -> Option<Self> {
        set(file, libc::F_WRLCK, SEGMENT).ok().map(|()| Self(file))
    }

    /// Takes the lock, waiting at most `patience`.
    pub(crate) fn take(file: &'a File, patience: Duration) -> Option<Self> {
        let until = Instant::now() + patience;
        loop {
            if let Some(guard) = Self::try_take(file) {
                return Some(guard);
            }
            if Instant::now() > until {
                return None;
            }
            std::thread::sleep(Duration::from_micros(500));
        }
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        // Fails for no lock of ours: unlocking needs no memory and the descriptor is open.
        let _ = set(self.0, libc::F_UNLCK, SEGMENT);
    }
}

/// Shows that member `m` lives, until the file is closed or the process ends. [`end_life`] has to
/// be called before the file is closed.
///
/// # Errors
/// `WouldBlock` if another open file shows that already; those of `fcntl`.
pub fn show_life(file: &File, m: usize) -> io::Result<()> {
    set(file, libc::F_WRLCK, LIFE + m as i64)?;
    forget_in_children(file.as_raw_fd());
    Ok(())
}

/// Ends [`show_life`].
pub fn end_life(file: &File, m: usize) {
    children_may_keep(file.as_raw_fd());
    let _ = set(file, libc::F_UNLCK, LIFE + m as i64);
}

/// Whether one of `count` members from `m` on lives. Those that live by `file` itself are not seen.
pub fn lives(file: &File, m: usize, count: usize) -> bool {
    let mut lock = flock(libc::F_WRLCK, LIFE + m as i64, count as i64);
    // What cannot be asked is taken as alive: a slot lost is better than a ring shared.
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock)).is_err()
        || i32::from(lock.l_type) != libc::F_UNLCK
}

fn set(file: &File, kind: i32, at: i64) -> io::Result<()> {
    match fcntl(file, FcntlArg::F_OFD_SETLK(&flock(kind, at, 1))) {
        Ok(_) => Ok(()),
        Err(Errno::EAGAIN | Errno::EACCES) => Err(io::ErrorKind::WouldBlock.into()),
        Err(errno) => Err(errno.into()),
    }
}

fn flock(kind: i32, start: i64, len: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: len,
        l_pid: 0,
    }
}

/// Descriptors that a forked child must not keep; -1 where none is. A process with more of them
/// than that keeps the rest alive through its children.
static LOCKED: [AtomicI32; 128] = [const { AtomicI32::new(-1) }; 128];

/// Has forked children get /dev/null in place of `fd`, until [`children_may_keep`].
pub(crate) fn forget_in_children(fd: RawFd) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: `in_child` only makes calls that are allowed between fork and exec: it reads
        // atomics and calls open, dup3 and close. A failure (no memory) leaves children alone.
        unsafe { pthread_atfork(None, None, Some(in_child)) };
    });
    for place in &LOCKED {
        if place.compare_exchange(-1, fd, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return;
        }
    }
}

/// Ends [`forget_in_children`], before `fd` is closed.
pub(crate) fn children_may_keep(fd: RawFd) {
    for place in &LOCKED {
        let _ = place.compare_exchange(fd, -1, Ordering::AcqRel, Ordering::Relaxed);
    }
}

type Hook = Option<unsafe extern "C" fn()>;

unsafe extern "C" {
    /// POSIX; the libc crate leaves it out on Linux.
    fn pthread_atfork(prepare: Hook, parent: Hook, child: Hook) -> libc::c_int;
}

unsafe extern "C" fn in_child() {
    // SAFETY: open, dup3 and close take plain numbers and a C string literal. The descriptors in
    // the table are open here, being removed from it before they are closed; what they become is
    // still a descriptor, so their owner's copy in the child may use and close it.
    unsafe {
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        for place in &LOCKED {
            let fd = place.load(Ordering::Acquire);
            if fd >= 0 && null >= 0 {
                libc::dup3(null, fd, libc::O_CLOEXEC);
            }
        }
        libc::close(null);
    }
}
