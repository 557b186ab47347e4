//! The file or pipe that a recording is written to.
//!
//! A recording command blocks the signals that end it, and a pipe with a slow reader blocks its
//! writer. So a pipe is written only when it has room, and the wait for room ends with a signal.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signalfd::SignalFd;

use crate::fail::Fail;

/// Bytes that a pipe with room takes without blocking. Source: POSIX, `PIPE_BUF`; pipe(7).
const PIPE_CHUNK: usize = 4096;

/// How long a reader may take the remaining bytes after a signal.
const GRACE: Duration = Duration::from_millis(300);

/// Pause between two checks whether a named pipe has a reader.
const LOOK: Duration = Duration::from_millis(50);

pub(crate) struct Recording {
    file: File,
    /// Whether a write may have to wait for a reader.
    has_reader: bool,
    /// End the wait for a reader; without them, they end the process.
    signals: Option<Rc<SignalFd>>,
    /// When a wait ends after a signal.
    until: Option<Instant>,
}

impl Recording {
    /// Opens the file with access for this user alone, also if it exists: it holds messages of
    /// programs. `-` is standard output. Waits until a named pipe has a reader.
    ///
    /// # Errors
    /// Those of opening it; [`ended`] for a named pipe without a reader at a signal.
    pub(crate) fn create(path: &Path, signals: Option<Rc<SignalFd>>) -> io::Result<Self> {
        if path == Path::new("-") {
            let file = File::from(io::stdout().as_fd().try_clone_to_owned()?);
            return Self::of(file, signals);
        }
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        if std::fs::metadata(path).is_ok_and(|is| is.file_type().is_fifo()) {
            options.custom_flags(libc::O_NONBLOCK);
        }
        let file = loop {
            match options.open(path) {
                // A named pipe without a reader.
                Err(why) if why.raw_os_error() == Some(libc::ENXIO) => pause(signals.as_deref())?,
                opened => break opened?,
            }
        };
        if file.metadata()?.is_file() {
            file.set_permissions(Permissions::from_mode(0o600))?;
        }
        Self::of(file, signals)
    }

    fn of(file: File, signals: Option<Rc<SignalFd>>) -> io::Result<Self> {
        let kind = file.metadata()?.file_type();
        let has_reader = kind.is_fifo() || kind.is_socket() || kind.is_char_device();
        Ok(Self { file, has_reader, signals, until: None })
    }

    /// Checks that the reader has not closed the pipe.
    ///
    /// # Errors
    /// `BrokenPipe`: the reader has closed it.
    pub(crate) fn check_reader(&self) -> io::Result<()> {
        let mut fds = [PollFd::new(self.file.as_fd(), PollFlags::empty())];
        poll(&mut fds, PollTimeout::ZERO)?;
        let gone = PollFlags::POLLERR | PollFlags::POLLHUP;
        match fds[0].revents().is_some_and(|is| is.intersects(gone)) {
            true if self.has_reader => Err(ErrorKind::BrokenPipe.into()),
            _ => Ok(()),
        }
    }

    /// Waits until a write does not block.
    fn wait(&mut self) -> io::Result<()> {
        loop {
            let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
            let timeout = left.map_or(PollTimeout::NONE, |left| {
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
            });
            let room = PollFd::new(self.file.as_fd(), PollFlags::POLLOUT);
            // The signal is left for the recording command to read.
            let heard = self.signals.as_ref().filter(|_| self.until.is_none());
            let mut fds = vec![room];
            fds.extend(heard.map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)));
            match poll(&mut fds, timeout) {
                Ok(0) => return Err(ended()),
                Ok(_) | Err(Errno::EINTR) => {}
                Err(why) => return Err(why.into()),
            }
            let is_there = |fd: &PollFd| fd.any().unwrap_or(false);
            if is_there(&fds[0]) {
                return Ok(());
            }
            if fds.get(1).is_some_and(is_there) {
                self.until = Some(Instant::now() + GRACE);
            }
        }
    }
}

impl Write for Recording {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.has_reader {
            return self.file.write(bytes);
        }
        loop {
            self.wait()?;
            match self.file.write(&bytes[..bytes.len().min(PIPE_CHUNK)]) {
                Err(why) if why.kind() == ErrorKind::WouldBlock => {}
                written => return written,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// The error of writing `path`; quiet if the reader has closed the pipe.
pub(crate) fn fail(path: &Path, why: &io::Error) -> Fail {
    let fail = Fail::new(format!("{}: {why}", path.display()));
    match why.kind() {
        ErrorKind::BrokenPipe => Fail::broken_pipe(),
        ErrorKind::StorageFull => fail.mend("make room: df -h"),
        _ => fail,
    }
}

/// The error of a write that a signal ended while the reader took nothing.
fn ended() -> io::Error {
    io::Error::other("ended before its reader took everything")
}

fn pause(signals: Option<&SignalFd>) -> io::Result<()> {
    let Some(signals) = signals else {
        std::thread::sleep(LOOK);
        return Ok(());
    };
    let mut fds = [PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
    let timeout = PollTimeout::try_from(LOOK).unwrap_or(PollTimeout::ZERO);
    match poll(&mut fds, timeout) {
        Ok(0) | Err(Errno::EINTR) => Ok(()),
        Ok(_) => Err(ended()),
        Err(why) => Err(why.into()),
    }
}
