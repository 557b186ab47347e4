//! The eventfds by which the two sides of a memif wake each other.
//!
//! Both sides have the same open file. It has to be an eventfd: any other file may be served by a
//! process that does not answer (FUSE). The other side may drain it before us, fill it or make it
//! blocking. So it is never read: an epoll instance of ours reports each write once. It is written
//! by the kernel's asynchronous I/O, whose completions raise an eventfd, never wait for room in it,
//! and raise no other file. Where the kernel refuses that (it can be forbidden, or all contexts be
//! in use), the fallback is a non-blocking write. It can block only if the peer clears O_NONBLOCK
//! and fills the counter at that very moment.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::write;

use crate::backend::unix::DeferredClose;

/// What wakes the receiver of one ring.
pub(super) struct Event {
    fd: OwnedFd,
    how: How,
}

enum How {
    /// We wait for it.
    Wait(Epoll),
    /// We raise it.
    Raise(Raiser),
    /// We raise it where there is nothing better.
    Write,
}

/// Checks that a descriptor from the peer is an eventfd, by its name in /proc, which no path can
/// have. The file itself is not accessed.
///
/// # Errors
/// It is not an eventfd, or /proc is not mounted.
pub(super) fn check_eventfd(fd: DeferredClose<OwnedFd>) -> Result<OwnedFd, &'static str> {
    check_eventfd_by("/proc/self/fd", fd)
}

/// As [`check_eventfd`], with the directory to ask.
fn check_eventfd_by(dir: &str, fd: DeferredClose<OwnedFd>) -> Result<OwnedFd, &'static str> {
    match std::fs::read_link(format!("{dir}/{}", fd.as_raw_fd())) {
        Ok(name) if name.as_os_str() == "anon_inode:[eventfd]" => Ok(fd.into_inner()),
        Ok(_) => Err("Interrupt fd is no eventfd"),
        // The client reads it too, and has room for 95 bytes.
        Err(_) => Err("Server cannot read its /proc/self/fd to check fds; there: mount /proc"),
    }
}

impl Event {
    /// An eventfd that this side waits on.
    ///
    /// # Errors
    /// It is none.
    pub(super) fn for_waiting(fd: OwnedFd) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&fd, EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, 0))?;
        Ok(Self { fd, how: How::Wait(epoll) })
    }

    /// An eventfd that this side raises.
    ///
    /// # Errors
    /// It is none.
    pub(super) fn for_raising(fd: OwnedFd) -> io::Result<Self> {
        if let Ok(raiser) = Raiser::new() {
            // Says whether it is an event at all.
            raiser.raise(&fd)?;
            return Ok(Self { fd, how: How::Raise(raiser) });
        }
        let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
        fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        Ok(Self { fd, how: How::Write })
    }

    /// The descriptor to poll.
    pub(super) fn poll_fd(&self) -> Option<i32> {
        match &self.how {
            How::Wait(epoll) => Some(epoll.0.as_raw_fd()),
            How::Raise(_) | How::Write => None,
        }
    }

    /// Clears the event, so that the next sleep waits for a new one.
    pub(super) fn clear(&self) {
        let How::Wait(epoll) = &self.how else { return };
        // It is there or not: nothing is left to do about it.
        let _ = epoll.wait(&mut [EpollEvent::empty()], EpollTimeout::ZERO);
    }

    /// Wakes the other side.
    #[cold]
    #[inline(never)]
    pub(super) fn ring(&self) {
        match &self.how {
            How::Wait(_) => {}
            How::Raise(raiser) => {
                // Nothing is left to try: the sleeper looks for itself, or is woken by the next.
                let _ = raiser.raise(&self.fd);
            }
            How::Write => {
                let _ = write(&self.fd, &1_u64.to_ne_bytes());
            }
        }
    }
}

/// From the kernel's aio_abi.h.
const IOCB_CMD_PREAD: u16 = 0;
const IOCB_FLAG_RESFD: u32 = 1;

/// Raises events by reading nothing from an empty file, asynchronously.
struct Raiser {
    /// What `io_setup` gave.
    context: u64,
    empty: OwnedFd,
}

impl Raiser {
    fn new() -> io::Result<Self> {
        let empty = memfd_create(c"empty", MFdFlags::MFD_CLOEXEC)?;
        let mut context = 0_u64;
        // SAFETY: writes the context to `context`.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, 4, &raw mut context) };
        if made < 0 { Err(io::Error::last_os_error()) } else { Ok(Self { context, empty }) }
    }

    fn raise(&self, event: &OwnedFd) -> io::Result<()> {
        // SAFETY: zeros are an `iocb`, and a read of no bytes.
        let mut block: libc::iocb = unsafe { std::mem::zeroed() };
        block.aio_lio_opcode = IOCB_CMD_PREAD;
        block.aio_fildes = self.empty.as_raw_fd() as u32;
        block.aio_flags = IOCB_FLAG_RESFD;
        block.aio_resfd = event.as_raw_fd() as u32;
        let blocks = [&raw mut block];
        // SAFETY: a context of ours, and an array of one block, which is read and done with when
        // the call returns: to read nothing never waits.
        let done = unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, blocks.as_ptr()) };
        let failed = (done != 1).then(io::Error::last_os_error);
        // Four words each.
        let mut seen = [[0_u64; 4]; 4];
        let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes at most four completions, to ours, and does not wait.
        unsafe {
            let (to, time) = (seen.as_mut_ptr(), &raw const none);
            libc::syscall(libc::SYS_io_getevents, self.context, 0, 4, to, time);
        }
        failed.map_or(Ok(()), Err)
    }
}

impl Drop for Raiser {
    fn drop(&mut self) {
        // SAFETY: a context of ours, ended once.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::proto::Message;
    use super::*;
    use std::fs::File;
    use std::time::{Duration, Instant};

    fn event(flags: i32) -> OwnedFd {
        // SAFETY: takes numbers and touches no memory.
        crate::backend::owned(unsafe { libc::eventfd(0, flags) }).unwrap()
    }

    fn waits(event: &Event) -> bool {
        let mut fds = [super::super::super::readable(event.poll_fd().unwrap())];
        super::super::super::sleep(&mut fds, Duration::ZERO);
        event.clear();
        fds[0].revents != 0
    }

    #[test]
    fn every_raise_is_seen_once() {
        let fd = event(0);
        let (rings, hears) =
            (Event::for_raising(fd.try_clone().unwrap()).unwrap(), Event::for_waiting(fd).unwrap());
        // To find out what it is raises it.
        waits(&hears);
        for _ in 0..20 {
            assert!(!waits(&hears));
            rings.ring();
            assert!(waits(&hears));
        }
    }

    /// Goal: an event that is full and blocks does not hold us up.
    #[test]
    fn raising_a_full_eventfd_does_not_fail() {
        let fd = event(0);
        let full = u64::MAX - 1;
        // SAFETY: reads eight bytes of a number that lives.
        assert_eq!(unsafe { libc::write(fd.as_raw_fd(), (&raw const full).cast(), 8) }, 8);
        let begun = Instant::now();
        let rings = Event::for_raising(fd).unwrap();
        (0..10).for_each(|_| rings.ring());
        assert!(begun.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn a_descriptor_that_is_no_eventfd_is_refused() {
        // SAFETY: takes numbers and touches no memory.
        let epoll =
            crate::backend::owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }).unwrap();
        let named = tempfile::Builder::new().prefix("anon_inode:[eventfd]").tempfile().unwrap();
        let others = [
            File::options().write(true).open("/dev/null").unwrap().into(),
            File::open("/").unwrap().into(),
            OwnedFd::from(named.into_file()),
            std::io::pipe().unwrap().0.into(),
            memfd_create(c"anon_inode:[eventfd]", MFdFlags::MFD_CLOEXEC).unwrap(),
            epoll,
        ];
        for other in others {
            assert!(check_eventfd(DeferredClose::new(other)).is_err());
        }
        assert!(check_eventfd(DeferredClose::new(event(0))).is_ok());
    }

    /// Goal: who cannot see what a descriptor is says so of itself, and not of the other side; in
    /// words that a message holds whole.
    #[test]
    fn a_hidden_proc_is_not_the_peers_fault() {
        let dir = tempfile::tempdir().unwrap();
        let why = check_eventfd_by(dir.path().to_str().unwrap(), DeferredClose::new(event(0)))
            .unwrap_err();
        assert!(why.starts_with("Server cannot") && why.ends_with("mount /proc"), "{why}");
        let message = Message::Disconnect(why.into());
        assert_eq!(Message::parse(&message.bytes()), Some(message));
    }
}
