//! Locks on bytes of a file as a sign of its owner's life, one per member of a segment, and the
//! lock of a segment.
//!
//! They belong to the open file (`F_OFD_SETLK`), so the kernel gives them back when the process
//! dies however it dies, and no pid has to be believed: not a reused one, not one of another pid
//! namespace. Two owners in one process open the file twice and exclude each other as well.
//!
//! A forked child would share the open file and so keep its dead parent alive. The child therefore
//! swaps the descriptor for /dev/null as its first act (`pthread_atfork`); `exec` closes it. The
//! same goes for whatever else the kernel keeps for a dead process as long as a child has it
//! ([`NotInChildren`]).

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use memmap2::{Advice, MmapRaw};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};

/// Far beyond the end of any file, where locks are as good and disturb nobody. The same for every
/// version of a segment: a build of another one sees whether somebody lives.
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

/// Whether any member lives, however many `file` is made for.
pub(crate) fn any_lives(file: &File) -> bool {
    // No length is all that there is.
    lives(file, 0, 0)
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
/// than that keeps the rest alive through its children, and the log says so.
static LOCKED: [AtomicI32; 4096] = [const { AtomicI32::new(-1) }; 4096];

/// A descriptor that a forked child does not keep: an address, a NIC's queue or a connection that
/// goes with this process however that ends.
#[derive(Debug)]
pub struct NotInChildren(OwnedFd);

impl From<OwnedFd> for NotInChildren {
    fn from(fd: OwnedFd) -> Self {
        forget_in_children(fd.as_raw_fd());
        Self(fd)
    }
}

impl Drop for NotInChildren {
    fn drop(&mut self) {
        children_may_keep(self.0.as_raw_fd());
    }
}

impl Deref for NotInChildren {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        &self.0
    }
}

impl AsFd for NotInChildren {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A mapping that a forked child does not have, as it would keep what is mapped. What the child has
/// at that place is its own, and stays when its copy of this is dropped.
#[derive(Debug)]
pub(crate) struct UnforkedMap {
    map: ManuallyDrop<MmapRaw>,
    pid: u32,
}

impl UnforkedMap {
    /// # Errors
    /// Those of madvise(2).
    pub(crate) fn new(map: MmapRaw) -> io::Result<Self> {
        map.advise(Advice::DontFork)?;
        Ok(Self { map: ManuallyDrop::new(map), pid: std::process::id() })
    }
}

impl Deref for UnforkedMap {
    type Target = MmapRaw;

    fn deref(&self) -> &MmapRaw {
        &self.map
    }
}

impl Drop for UnforkedMap {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            // SAFETY: dropped once, here, and not used after.
            unsafe { ManuallyDrop::drop(&mut self.map) };
        }
    }
}

/// Has forked children get /dev/null in place of `fd`, until [`children_may_keep`].
pub(crate) fn forget_in_children(fd: RawFd) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: `in_child` only makes calls that are allowed between fork and exec: it reads
        // atomics and calls open, dup3 and close. A failure (no memory) leaves children alone.
        unsafe { pthread_atfork(None, None, Some(in_child)) };
    });
    static TOLD: Once = Once::new();
    note(&LOCKED, fd, &TOLD);
}

/// Notes `fd` in a free one of `places`. Without one the log is told, once.
fn note(places: &[AtomicI32], fd: RawFd, told: &Once) {
    let takes = |place: &AtomicI32| {
        place.compare_exchange(-1, fd, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    };
    if !places.iter().any(takes) {
        told.call_once(|| {
            tracing::warn!(
                "more than {} descriptors that forked children are to give up: a child that does \
                 not exec keeps addresses, NICs and peers of further ones from being seen as gone \
                 when this process ends; open fewer ports in it, or fork before they are opened",
                places.len()
            );
        });
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
                // The number is the child's from now on, which may give it to something else.
                place.store(-1, Ordering::Release);
            }
        }
        libc::close(null);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::logged::Logged;
    use std::fs::File;
    use std::io::{Read, Write};

    use nix::sys::signal::{Signal, kill};
    use nix::sys::wait::waitpid;
    use nix::unistd::{ForkResult, Pid, fork, pipe, pipe2};

    /// A forked child, killed at the end.
    struct Child(Pid);

    impl Child {
        /// Has run `f`, which must not allocate, and sleeps.
        fn after(f: impl FnOnce()) -> Self {
            let (here, there) = pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
            // SAFETY: the child runs `f`, writes and sleeps, until it is killed.
            match unsafe { fork() }.unwrap() {
                ForkResult::Child => {
                    f();
                    let _ = nix::unistd::write(&there, b"x");
                    loop {
                        nix::unistd::pause();
                    }
                }
                ForkResult::Parent { child } => {
                    assert_eq!(File::from(here).read(&mut [0]).unwrap(), 1);
                    Self(child)
                }
            }
        }
    }

    impl Drop for Child {
        fn drop(&mut self) {
            let _ = kill(self.0, Signal::SIGKILL);
            let _ = waitpid(self.0, None);
        }
    }

    fn ended(file: &File) -> bool {
        let mut fds = [libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
        super::super::sleep(&mut fds, Duration::from_secs(5)) && fds[0].revents == libc::POLLHUP
    }

    /// Goal: what goes with a process goes with it while a child of its lives on.
    #[test]
    fn a_child_keeps_nothing() {
        let (here, there) = pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
        let there = NotInChildren::from(there);
        let _child = Child::after(|| ());
        drop(there);
        assert!(ended(&File::from(here)));
    }

    /// Goal: a number that the child has given to something else is left alone when it forks.
    #[test]
    fn a_grandchild_keeps_what_is_its_parents() {
        let (_kept, there) = pipe().unwrap();
        let there = NotInChildren::from(there);
        let (here, other) = pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
        let (from, to) = (other.as_raw_fd(), there.as_raw_fd());
        let _child = Child::after(|| {
            // SAFETY: numbers of open descriptors, of which the child has the second for itself;
            // its child only writes and ends.
            unsafe {
                libc::dup2(from, to);
                let child = libc::fork();
                if child == 0 {
                    libc::write(to, c"g".as_ptr().cast(), 1);
                    libc::_exit(0);
                }
                libc::waitpid(child, std::ptr::null_mut(), 0);
            }
        });
        File::from(other).write_all(b"p").unwrap();
        let mut got = [0; 2];
        let count = File::from(here).read(&mut got).unwrap();
        assert_eq!(&got[..count], b"gp");
    }

    /// Goal: a child that drops its copy of a mapping which it does not have keeps what it has
    /// mapped there itself. Method: a page at the same place, and what `mincore` says of it.
    #[test]
    fn a_child_keeps_what_it_has_in_place_of_a_mapping() {
        let map = memmap2::MmapOptions::new().len(4096).map_anon().unwrap();
        let map = UnforkedMap::new(map.into()).unwrap();
        let at = map.as_mut_ptr();
        let is_mapped = move || {
            // SAFETY: writes one byte, for one page, which need not be mapped.
            unsafe { libc::mincore(at.cast(), 4096, [0_u8].as_mut_ptr()) == 0 }
        };
        // SAFETY: the child maps a page where it has none, makes plain calls and ends.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let was_mapped = is_mapped();
            let (prot, flags) = (libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // SAFETY: as above.
            let own = unsafe { libc::mmap(at.cast(), 4096, prot, flags, -1, 0) };
            drop(map);
            let good = !was_mapped && own == at.cast() && is_mapped();
            // SAFETY: takes a number.
            unsafe { libc::_exit(i32::from(!good)) }
        }
        let mut status = 0;
        // SAFETY: writes the status to a number that lives across the call.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, status), (child, 0));
        assert!(is_mapped());
        drop(map);
    }

    /// Goal: that there is no place left is told, once, and places that are given back are taken.
    #[test]
    fn the_log_is_told_when_places_run_out() {
        let (places, told) = ([const { AtomicI32::new(-1) }; 2], Once::new());
        let say = |fd| Logged::by(|| note(&places, fd, &told));
        assert!(say(3).is_empty() && say(4).is_empty());
        let lines = say(5);
        assert!(lines.len() == 1 && lines[0].1.contains("more than 2 descriptors"), "{lines:?}");
        assert!(say(6).is_empty());
        places[0].store(-1, Ordering::Relaxed);
        assert!(say(7).is_empty());
        assert_eq!(places.map(AtomicI32::into_inner), [7, 4]);
    }
}
