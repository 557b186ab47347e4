//! Lengths of files, and memory for them.
//!
//! A file that would become longer than this process may make one (`RLIMIT_FSIZE`, `ulimit -f`)
//! ends the process by a signal (SIGXFSZ) before a call returns `EFBIG`. So the limit is asked
//! for first, and the call left out. To write to a pipe whose reader has left ends it likewise
//! (SIGPIPE), unless the program says otherwise, as those in Rust do.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, pthread_sigmask};
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

/// Has memory for `len` bytes of `file` from `at` on, which becomes as long if it is shorter: to
/// write them through a mapping is then no SIGBUS for want of room.
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
    // A signal has tmpfs give back all that it had taken in the call (Linux 6.1; not 6.18): a
    // program with a timer that is faster than that would never get to the end.
    without_signals(|| {
        loop {
            match take() {
                Err(Errno::EINTR) => {}
                done => return Ok(done?),
            }
        }
    })
}

/// Writes to a file that was empty, without a signal for `EFBIG` or `EPIPE`.
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

/// Runs `write`, whose `EPIPE` is no signal to the program. The kernel sends that signal to the
/// thread that writes. One that the thread had before stays pending, if the program holds it back.
fn without_sigpipe(write: impl FnOnce() -> io::Result<usize>) -> io::Result<usize> {
    let (pipe, mut before) = (SigSet::from(Signal::SIGPIPE), SigSet::empty());
    pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&pipe), Some(&mut before))?;
    let had = is_pending(Signal::SIGPIPE);
    let written = write();
    if written.as_ref().is_err_and(|why| why.kind() == io::ErrorKind::BrokenPipe) && !had {
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: reads a set and a time that live across the call, and waits for nothing.
        unsafe { libc::sigtimedwait(pipe.as_ref(), std::ptr::null_mut(), &raw const now) };
    }
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&before), None)?;
    written
}

/// Whether a signal waits for this thread, or for any of the process.
fn is_pending(signal: Signal) -> bool {
    // SAFETY: zeros are a set, which `sigpending` fills in; the number is one of a signal.
    unsafe {
        let mut waiting: libc::sigset_t = std::mem::zeroed();
        libc::sigpending(&raw mut waiting);
        libc::sigismember(&raw const waiting, signal as i32) == 1
    }
}

/// Whether this process may make a file of `len` bytes.
///
/// # Errors
/// `EFBIG`: that is more than its limit.
pub fn check_len(len: u64) -> io::Result<()> {
    let (limit, _) = getrlimit(Resource::RLIMIT_FSIZE)?;
    if len <= limit { Ok(()) } else { Err(Errno::EFBIG.into()) }
}

/// As [`check_len`], of `file`, which may be as long already, or no regular file.
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
    use std::os::unix::thread::JoinHandleExt;
    use std::time::{Duration, Instant};

    /// Goal: who may make no long files is told so by an error and lives, and uses one that others
    /// have made as long as before.
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
        // What is no file has no length.
        let mut appender = Appender::from(File::create("/dev/null").unwrap());
        appender.write_all(&[7; 5000]).unwrap();
        // What the test writes may go to a file as well.
        setrlimit(Resource::RLIMIT_FSIZE, soft, hard).unwrap();
    }

    /// Goal: memory is there in the end whatever signals come, as those of a profiler. Method: a
    /// thread that sends one far more often than so many pages are cleared. (With 6.18 there is
    /// nothing to see.)
    #[test]
    fn signals_do_not_keep_memory_away() {
        if !is_alone("file::tests::signals_do_not_keep_memory_away", |_| ()) {
            return;
        }
        extern "C" fn nothing(_signal: libc::c_int) {}
        // SAFETY: a handler that does nothing.
        unsafe { libc::signal(libc::SIGUSR1, nothing as extern "C" fn(libc::c_int) as usize) };
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        let (told, ended) = std::sync::mpsc::channel();
        let reserves = std::thread::spawn(move || {
            reserve(&file, 0, 48 << 20).unwrap();
            told.send(file.metadata().unwrap().len()).unwrap();
        });
        let until = Instant::now() + Duration::from_secs(30);
        let len = loop {
            match ended.recv_timeout(Duration::from_micros(100)) {
                Ok(len) => break len,
                Err(_) => assert!(Instant::now() < until, "no end of it"),
            }
            // SAFETY: a thread that was not joined, and a signal with a handler.
            unsafe { libc::pthread_kill(reserves.as_pthread_t(), libc::SIGUSR1) };
        };
        assert_eq!(len, 48 << 20);
    }

    /// Goal: a pipe whose reader has left is an error too, in a program that does nothing about the
    /// signal, as those in C; and one that the program itself holds back stays where it is.
    #[test]
    fn a_pipe_without_reader_is_an_error() {
        if !is_alone("file::tests::a_pipe_without_reader_is_an_error", |_| ()) {
            return;
        }
        // SAFETY: the action of a program in C that says nothing.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        let broken = || {
            let (reader, writer) = io::pipe().unwrap();
            let mut appender = Appender::from(File::from(std::os::fd::OwnedFd::from(writer)));
            appender.write_all(&[7; 100]).unwrap();
            drop(reader);
            appender.write_all(&[7; 100]).unwrap_err().kind()
        };
        assert_eq!(broken(), io::ErrorKind::BrokenPipe);
        let pipe = SigSet::from(Signal::SIGPIPE);
        assert!(!SigSet::thread_get_mask().unwrap().contains(Signal::SIGPIPE));
        pipe.thread_block().unwrap();
        assert_eq!(broken(), io::ErrorKind::BrokenPipe);
        assert!(!is_pending(Signal::SIGPIPE));
        nix::sys::signal::raise(Signal::SIGPIPE).unwrap();
        assert_eq!(broken(), io::ErrorKind::BrokenPipe);
        assert!(is_pending(Signal::SIGPIPE));
    }
}
