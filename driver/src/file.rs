//! Extending files and writing to them without signals.
//!
//! Extending a file beyond `RLIMIT_FSIZE` (`ulimit -f`) raises SIGXFSZ, which ends the process,
//! before the call returns `EFBIG`. So the limit is checked first. Writing to a pipe without a
//! reader likewise raises SIGPIPE, unless the program ignores it, as Rust programs do.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, fallocate, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, pthread_sigmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::stat::fstat;

use crate::own_thread::without_signals;

/// Makes `file` `len` bytes long.
///
/// # Errors
/// Those of ftruncate(2), without a signal for `EFBIG`.
pub fn set_len(file: &File, len: u64) -> io::Result<()> {
    check(file, len)?;
    file.set_len(len)
}

/// Allocates memory for `len` bytes of `file` at `at`, and extends the file if necessary: writing
/// them through a mapping then raises no SIGBUS.
///
/// # Errors
/// Those of fallocate(2), without a signal for `EFBIG`.
pub fn reserve(file: impl AsFd, at: usize, len: usize) -> io::Result<()> {
    check(&file, (at + len) as u64)?;
    let take = || fallocate(&file, FallocateFlags::empty(), at as libc::off_t, len as libc::off_t);
    match take() {
        Err(Errno::EINTR) => {}
        done => return Ok(done?),
    }
    // A signal makes tmpfs free everything that the call had allocated (Linux 6.1; not 6.18): with
    // a fast periodic timer the call would never finish.
    without_signals(|| {
        loop {
            match take() {
                Err(Errno::EINTR) => {}
                done => return Ok(done?),
            }
        }
    })
}

/// Writes to an initially empty file, without a signal for `EFBIG` or `EPIPE`.
pub struct Appender {
    file: File,
    is_regular: bool,
    /// Bytes written.
    len: u64,
}

impl From<File> for Appender {
    fn from(file: File) -> Self {
        let is_regular = file.metadata().is_ok_and(|meta| meta.is_file());
        Self { file, is_regular, len: 0 }
    }
}

impl Appender {
    /// Has writing to a pipe or the like end with `EWOULDBLOCK` where there is no room. What else
    /// the same open file was handed to is concerned as well.
    ///
    /// # Errors
    /// Those of fcntl(2).
    pub(crate) fn never_wait(&self) -> io::Result<()> {
        if !self.is_regular {
            let flags = OFlag::from_bits_retain(fcntl(&self.file, FcntlArg::F_GETFL)?);
            fcntl(&self.file, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        }
        Ok(())
    }
}

impl Write for Appender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        check(&self.file, self.len + bytes.len() as u64)?;
        let file = &mut self.file;
        let written = match self.is_regular {
            true => file.write(bytes)?,
            false => without_sigpipe(|| file.write(bytes))?,
        };
        self.len += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Runs `write` with SIGPIPE suppressed. The kernel sends it to the writing thread. A SIGPIPE that
/// was pending before stays pending.
fn without_sigpipe(write: impl FnOnce() -> io::Result<usize>) -> io::Result<usize> {
    let (pipe, mut before) = (SigSet::from(Signal::SIGPIPE), SigSet::empty());
    let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
    let pending = SignalFd::with_flags(&pipe, flags)?;
    pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&pipe), Some(&mut before))?;
    let mut waits = [PollFd::new(pending.as_fd(), PollFlags::POLLIN)];
    let had = poll(&mut waits, PollTimeout::ZERO).is_ok_and(|count| count > 0);
    let written = write();
    if written.as_ref().is_err_and(|why| why.kind() == io::ErrorKind::BrokenPipe) && !had {
        // None is pending if the program ignores it.
        let _ = pending.read_signal();
    }
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&before), None)?;
    written
}

/// Checks that this process may create a file of `len` bytes.
///
/// # Errors
/// `EFBIG`: above `RLIMIT_FSIZE`.
pub fn check_len(len: u64) -> io::Result<()> {
    let (limit, _) = getrlimit(Resource::RLIMIT_FSIZE)?;
    if len <= limit { Ok(()) } else { Err(Errno::EFBIG.into()) }
}

/// As [`check_len`], for `file`, which passes if it is that long already, or no regular file.
fn check(file: impl AsFd, len: u64) -> io::Result<()> {
    let Err(too_long) = check_len(len) else { return Ok(()) };
    let stat = fstat(&file)?;
    let is_regular = stat.st_mode & libc::S_IFMT == libc::S_IFREG;
    let grows = is_regular && u64::try_from(stat.st_size).is_ok_and(|is| is < len);
    if grows { Err(too_long) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alone::is_alone;
    use nix::sys::resource::setrlimit;

    /// Goal: exceeding `RLIMIT_FSIZE` is an error and no signal, and an existing longer file stays
    /// usable.
    #[test]
    fn a_limit_on_files_is_an_error() {
        if !is_alone("file::tests::a_limit_on_files_is_an_error", |_| ()) {
            return;
        }
        let there = tempfile::tempfile_in("/dev/shm").unwrap();
        set_len(&there, 8192).unwrap();
        let (soft, hard) = getrlimit(Resource::RLIMIT_FSIZE).unwrap();
        setrlimit(Resource::RLIMIT_FSIZE, 4096, hard).unwrap();
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        let errno = |done: io::Result<()>| done.err().and_then(|why| why.raw_os_error());
        for len in [4097, 8192, usize::MAX >> 1] {
            assert_eq!(errno(set_len(&file, len as u64)), Some(libc::EFBIG), "{len}");
            assert_eq!(errno(reserve(&file, 4096, len - 4096)), Some(libc::EFBIG), "{len}");
            assert_eq!(file.metadata().unwrap().len(), 0);
        }
        reserve(&file, 0, 100).unwrap();
        set_len(&file, 4096).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 4096);
        reserve(&there, 4096, 4096).unwrap();
        set_len(&there, 8192).unwrap();
        let mut appender = Appender::from(tempfile::tempfile_in("/dev/shm").unwrap());
        appender.write_all(&[7; 4000]).unwrap();
        assert_eq!(errno(appender.write_all(&[7; 97])), Some(libc::EFBIG));
        appender.write_all(&[7; 96]).unwrap();
        // A device has no length.
        let mut appender = Appender::from(File::create("/dev/null").unwrap());
        appender.write_all(&[7; 5000]).unwrap();
        // The test's output may go to a file.
        setrlimit(Resource::RLIMIT_FSIZE, soft, hard).unwrap();
    }
}
