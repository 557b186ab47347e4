//! Lengths of files, and memory for them.
//!
//! A file that would become longer than this process may make one (`RLIMIT_FSIZE`, `ulimit -f`)
//! ends the process by a signal (SIGXFSZ) before a call returns `EFBIG`. So the limit is asked
//! for first, and the call left out.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::resource::{Resource, getrlimit};
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

/// Writes to a file that was empty, without a signal for `EFBIG`.
pub struct Appender {
    file: File,
    /// Bytes written.
    len: u64,
}

impl From<File> for Appender {
    fn from(file: File) -> Self {
        Self { file, len: 0 }
    }
}

impl Write for Appender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        check(&self.file, self.len + bytes.len() as u64)?;
        let written = self.file.write(bytes)?;
        self.len += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
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
}
