//! Files that are read again while a domain is open.
//!
//! A file may be on a server that does not answer, so no thread that runs the progress loop reads
//! files. A separate thread checks once a second whether a file has changed, reads it, and leaves
//! the content in a mailbox for the next turn of the loop that reads the clock.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::Thread;
use std::time::Duration;

use crate::errno::OpenError;
use crate::own_thread;

/// Pause between two checks of the files.
const POLL_PERIOD: Duration = Duration::from_secs(1);

/// Stack of the watching thread, bytes.
const STACK_LEN: usize = 256 << 10;

/// Most reads of files that change during a read.
const TRIES: u32 = 4;

/// Number of failed checks in a row at which a warning is logged. One is tolerated: several files
/// are not replaced at the same instant.
const WARN_AT: u32 = 2;

/// Version of a file: device, inode, length, times of change, mode. `None` if the file does not
/// exist.
type Stamp = Option<[i64; 8]>;

/// The current stamps of files.
fn stamps(paths: &[PathBuf]) -> Vec<Stamp> {
    let stamp = |path: &PathBuf| {
        let is = std::fs::metadata(path).ok()?;
        let (dev, ino, len) = (is.dev() as i64, is.ino() as i64, is.size() as i64);
        let times = [is.mtime(), is.mtime_nsec(), is.ctime(), is.ctime_nsec()];
        let [a, b, c, d] = times;
        Some([dev, ino, len, a, b, c, d, i64::from(is.mode())])
    };
    paths.iter().map(stamp).collect()
}

/// Files that are read as one unit.
pub(crate) trait Source {
    /// The parsed content.
    type Content;

    /// Consequence that is logged if the files cannot be used.
    const UNCHANGED: &str;

    /// The files, always in the same order.
    fn paths(&self) -> &[PathBuf];

    /// Reads them.
    ///
    /// # Errors
    /// The files cannot be used; the line has the reason and the remedy.
    fn read(&self) -> Result<Self::Content, OpenError>;
}

/// Files, and their stamps when they were read.
#[derive(Clone, Debug)]
pub(crate) struct Tracked<S> {
    pub(crate) source: S,
    /// Stamps at the last read; empty if the files have to be read again in any case.
    stamps: Vec<Stamp>,
    /// The reason why they cannot be used, and for how many checks in a row.
    bad: Option<(String, u32)>,
}

impl<S: Source> Tracked<S> {
    /// Reads the files for the first time.
    ///
    /// # Errors
    /// As for [`Source::read`].
    pub(crate) fn open(source: S) -> Result<(S::Content, Self), OpenError> {
        let mut files = Self { source, stamps: Vec::new(), bad: None };
        Ok((files.read()?, files))
    }

    /// Reads a consistent state of the files and keeps their stamps.
    fn read(&mut self) -> Result<S::Content, OpenError> {
        let mut tries = 0;
        loop {
            self.stamps = stamps(self.source.paths());
            let read = self.source.read();
            tries += 1;
            if tries == TRIES || self.stamps == stamps(self.source.paths()) {
                return read;
            }
        }
    }

    /// The new content, if the files have changed. Files that cannot be used change nothing: they
    /// are read again at the next check, since a file server or a limit on open files may be the
    /// reason. This is logged once, at the second failed check in a row.
    pub(crate) fn poll(&mut self) -> Option<S::Content> {
        if stamps(self.source.paths()) == self.stamps {
            return None;
        }
        match self.read() {
            Ok(read) => {
                self.bad = None;
                Some(read)
            }
            Err(why) => {
                self.stamps.clear();
                if self.note_failure(&why.line) {
                    tracing::warn!("{}; {}", why.line, S::UNCHANGED);
                }
                None
            }
        }
    }

    /// Counts a failed check and returns whether to log it.
    fn note_failure(&mut self, line: &str) -> bool {
        let before = self.bad.take().filter(|(known, _)| known == line);
        let times = before.map_or(1, |(_, times)| times.saturating_add(1));
        self.bad = Some((line.to_owned(), times));
        times == WARN_AT
    }

    /// Whether the files are read at the next check even if they do not change.
    #[cfg(test)]
    pub(crate) fn is_bad(&self) -> bool {
        self.stamps.is_empty()
    }
}

/// A thread that checks files once a second until this is dropped.
pub(crate) struct FileWatch<T> {
    mailbox: Arc<Mailbox<T>>,
    thread: Thread,
}

/// The last update that the domain has not taken.
struct Mailbox<T> {
    is_full: AtomicBool,
    update: Mutex<Option<T>>,
}

impl<T> Default for Mailbox<T> {
    fn default() -> Self {
        Self { is_full: AtomicBool::new(false), update: Mutex::new(None) }
    }
}

impl<T: Send + 'static> FileWatch<T> {
    /// Starts to call `poll`, in a thread that gets no signals.
    ///
    /// # Errors
    /// The system has no thread left.
    pub(crate) fn start(
        poll: impl FnMut() -> Option<T> + Clone + Send + 'static,
    ) -> io::Result<Self> {
        let mailbox = Arc::new(Mailbox::default());
        let watched = Arc::downgrade(&mailbox);
        let run = move || watch(poll.clone(), &watched);
        let thread = own_thread::spawn("barewire-keys", STACK_LEN, run)?;
        Ok(Self { mailbox, thread: thread.thread().clone() })
    }

    /// Takes the last update.
    pub(crate) fn take(&self) -> Option<T> {
        if !self.mailbox.is_full.load(Ordering::Relaxed) {
            return None;
        }
        let mut update = self.mailbox.update.lock().unwrap_or_else(PoisonError::into_inner);
        self.mailbox.is_full.store(false, Ordering::Relaxed);
        update.take()
    }
}

impl<T> Drop for FileWatch<T> {
    /// The thread ends by itself and is not joined: it may wait for a file server.
    fn drop(&mut self) {
        self.mailbox = Arc::default();
        self.thread.unpark();
    }
}

fn watch<T>(mut poll: impl FnMut() -> Option<T>, mailbox: &Weak<Mailbox<T>>) {
    loop {
        std::thread::park_timeout(POLL_PERIOD);
        if mailbox.strong_count() == 0 {
            return;
        }
        if let Some(update) = poll()
            && let Some(mailbox) = mailbox.upgrade()
        {
            *mailbox.update.lock().unwrap_or_else(PoisonError::into_inner) = Some(update);
            mailbox.is_full.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::AtomicU32;
    use std::time::Instant;

    use super::*;
    use crate::errno::Error;

    /// A number in a file.
    #[derive(Clone)]
    struct Number([PathBuf; 1]);

    impl Source for Number {
        type Content = u32;
        const UNCHANGED: &str = "the number stays";

        fn paths(&self) -> &[PathBuf] {
            &self.0
        }

        fn read(&self) -> Result<u32, OpenError> {
            let text = std::fs::read_to_string(&self.0[0]).unwrap_or_default();
            let bad = |_| OpenError::new(Error::Invalid("x"), format!("{text:?}: none"));
            text.parse().map_err(bad)
        }
    }

    fn number(dir: &tempfile::TempDir) -> (PathBuf, impl Fn(&str) + use<>) {
        let path = dir.path().join("number");
        let put = {
            let path = path.clone();
            move |text: &str| {
                let beside = path.with_extension("tmp");
                std::fs::write(&beside, text).unwrap();
                std::fs::rename(beside, &path).unwrap();
            }
        };
        put("1");
        (path, put)
    }

    /// Goal: unusable files change nothing, are logged once for each cause, at the second check,
    /// and are used as soon as they are usable.
    #[test]
    fn bad_files_are_logged_once() {
        let dir = tempfile::tempdir().unwrap();
        let (path, put) = number(&dir);
        let (held, mut files) = Tracked::open(Number([path.clone()])).unwrap();
        assert_eq!((held, files.poll()), (1, None));
        put("2");
        assert_eq!(files.poll(), Some(2));
        let mode = std::fs::Permissions::from_mode(0o640);
        std::fs::set_permissions(&path, mode).unwrap();
        assert_eq!(files.poll(), Some(2), "another mode is another state");
        put("x");
        let told = |files: &Tracked<Number>| files.bad.as_ref().map(|(_, times)| *times);
        for times in 1..5 {
            assert_eq!((files.poll(), told(&files)), (None, Some(times)));
        }
        assert!(!files.note_failure("\"x\": none"), "it was told");
        put("y");
        assert_eq!((files.poll(), told(&files)), (None, Some(1)));
        assert!(files.note_failure("\"y\": none"));
        put("3");
        assert_eq!((files.poll(), told(&files), files.poll()), (Some(3), None, None));
        let missing = Number([dir.path().join("none")]);
        assert!(Tracked::open(missing).is_err());
    }

    /// Signals that the threads of this name block, as bits from the lowest.
    fn blocked_by(name: &str) -> Vec<u64> {
        let of = |task: io::Result<std::fs::DirEntry>| {
            let path = task.ok()?.path();
            let is = std::fs::read_to_string(path.join("comm")).ok()?;
            let status = std::fs::read_to_string(path.join("status")).ok()?;
            let line = status.lines().find_map(|line| line.strip_prefix("SigBlk:"))?;
            (is.trim() == name).then(|| u64::from_str_radix(line.trim(), 16).unwrap())
        };
        std::fs::read_dir("/proc/self/task").unwrap().filter_map(of).collect()
    }

    /// Goal: the thread finds what changes, blocks all signals, and ends with the watch, also while
    /// a look takes long. Method: it is woken in place of the second's pause.
    #[test]
    fn the_thread_finds_what_changes_and_ends() {
        let dir = tempfile::tempdir().unwrap();
        let (path, put) = number(&dir);
        let (_, mut files) = Tracked::open(Number([path])).unwrap();
        let looks = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&looks);
        let watch = FileWatch::start(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            files.poll()
        })
        .unwrap();
        assert!(watch.take().is_none());
        put("7");
        let begun = Instant::now();
        let mailbox = loop {
            if let Some(number) = watch.take() {
                break number;
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "nobody has looked");
            watch.thread.unpark();
            std::thread::sleep(Duration::from_millis(5));
        };
        assert_eq!((mailbox, watch.take()), (7, None), "it is taken once");
        let masks = blocked_by("barewire-keys");
        // Those of the kernel that none can block, and two of the C library's own.
        let all = (1..=31).filter(|n| ![libc::SIGKILL, libc::SIGSTOP].contains(n));
        let all = all.fold(0_u64, |mask, n| mask | 1 << (n - 1));
        assert!(!masks.is_empty() && masks.iter().all(|mask| mask & all == all), "{masks:x?}");
        // The thread has the closure, and so the counter, until it ends.
        drop(watch);
        while Arc::strong_count(&looks) > 1 {
            assert!(begun.elapsed() < Duration::from_secs(30), "it goes on");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
