//! Files that are read again while a domain is open.
//!
//! A file may be on a server that does not answer, so no thread that runs the progress loop reads
//! one. A separate thread checks once a second whether a file has changed, reads it, and leaves its
//! content for the next turn that reads the clock.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::Thread;
use std::time::Duration;

use crate::errno::OpenError;
use crate::own_thread;

/// Pause between two looks at the files.
const LOOK: Duration = Duration::from_secs(1);

/// Stack of the thread that looks.
const STACK_LEN: usize = 256 << 10;

/// Times that files are read again which change meanwhile.
const TRIES: u32 = 4;

/// Looks in a row at files that cannot be used, at which the log is told: several files do not
/// change at one time.
const TELL_AT: u32 = 2;

/// What tells one state of a file from another: device, inode, length, times of change, mode.
/// `None` if there is no such file.
type Stamp = Option<[i64; 8]>;

/// How files are.
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

/// Files that hold something.
pub(crate) trait Source {
    /// What they hold.
    type Held;

    /// What the log says where they cannot be used.
    const STAYS: &str;

    /// The files, in an order that stays.
    fn paths(&self) -> &[PathBuf];

    /// Reads them.
    ///
    /// # Errors
    /// They cannot be used; the line says why, and what would mend it.
    fn read(&self) -> Result<Self::Held, OpenError>;
}

/// Files, and how they were when they were read.
#[derive(Clone, Debug)]
pub(crate) struct Tracked<S> {
    pub(crate) source: S,
    /// How they were; empty if they are to be read again whatever they are.
    stamps: Vec<Stamp>,
    /// Why they cannot be used, and at how many looks in a row.
    bad: Option<(String, u32)>,
}

impl<S: Source> Tracked<S> {
    /// Reads the files for the first time.
    ///
    /// # Errors
    /// As for [`Source::read`].
    pub(crate) fn open(source: S) -> Result<(S::Held, Self), OpenError> {
        let mut files = Self { source, stamps: Vec::new(), bad: None };
        Ok((files.read()?, files))
    }

    /// Reads the files, as they are at one time, and notes how they are.
    fn read(&mut self) -> Result<S::Held, OpenError> {
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

    /// What the files hold, if they are others than when they were read last. Files that cannot be
    /// used change nothing, which the log tells once, at the second look in a row, and are looked
    /// at again: a file server, or a limit on open files, may be why.
    pub(crate) fn look(&mut self) -> Option<S::Held> {
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
                if self.is_to_tell(&why.line) {
                    tracing::warn!("{}; {}", why.line, S::STAYS);
                }
                None
            }
        }
    }

    /// Counts a look at files that cannot be used, and says whether that is to be told.
    fn is_to_tell(&mut self, line: &str) -> bool {
        let before = self.bad.take().filter(|(known, _)| known == line);
        let times = before.map_or(1, |(_, times)| times.saturating_add(1));
        self.bad = Some((line.to_owned(), times));
        times == TELL_AT
    }

    /// Whether they are read at the next look, also if they do not change.
    #[cfg(test)]
    pub(crate) fn is_bad(&self) -> bool {
        self.stamps.is_empty()
    }
}

/// Looks once a second, until this is dropped.
pub(crate) struct FileWatch<T> {
    found: Arc<Found<T>>,
    thread: Thread,
}

/// What the thread has found and the domain has not taken.
struct Found<T> {
    any: AtomicBool,
    news: Mutex<Option<T>>,
}

impl<T> Default for Found<T> {
    fn default() -> Self {
        Self { any: AtomicBool::new(false), news: Mutex::new(None) }
    }
}

impl<T: Send + 'static> FileWatch<T> {
    /// Starts to call `look`, in a thread that no signal goes to.
    ///
    /// # Errors
    /// The system has no thread left.
    pub(crate) fn start(
        look: impl FnMut() -> Option<T> + Clone + Send + 'static,
    ) -> io::Result<Self> {
        let found = Arc::new(Found::default());
        let watched = Arc::downgrade(&found);
        let run = move || watch(look.clone(), &watched);
        let thread = own_thread::spawn("barewire-keys", STACK_LEN, run)?;
        Ok(Self { found, thread: thread.thread().clone() })
    }

    /// What was found last, once.
    pub(crate) fn take(&self) -> Option<T> {
        if !self.found.any.load(Ordering::Relaxed) {
            return None;
        }
        let mut news = self.found.news.lock().unwrap_or_else(PoisonError::into_inner);
        self.found.any.store(false, Ordering::Relaxed);
        news.take()
    }
}

impl<T> Drop for FileWatch<T> {
    /// The thread ends by itself. Nobody waits for it: it may wait for a file server.
    fn drop(&mut self) {
        self.found = Arc::default();
        self.thread.unpark();
    }
}

fn watch<T>(mut look: impl FnMut() -> Option<T>, found: &Weak<Found<T>>) {
    loop {
        std::thread::park_timeout(LOOK);
        if found.strong_count() == 0 {
            return;
        }
        if let Some(news) = look()
            && let Some(found) = found.upgrade()
        {
            *found.news.lock().unwrap_or_else(PoisonError::into_inner) = Some(news);
            found.any.store(true, Ordering::Relaxed);
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
        type Held = u32;
        const STAYS: &str = "the number stays";

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

    /// Goal: files that cannot be used change nothing, are told once for each cause, at the second
    /// look, and are taken as soon as they can be used.
    #[test]
    fn bad_files_are_told_once() {
        let dir = tempfile::tempdir().unwrap();
        let (path, put) = number(&dir);
        let (held, mut files) = Tracked::open(Number([path.clone()])).unwrap();
        assert_eq!((held, files.look()), (1, None));
        put("2");
        assert_eq!(files.look(), Some(2));
        let mode = std::fs::Permissions::from_mode(0o640);
        std::fs::set_permissions(&path, mode).unwrap();
        assert_eq!(files.look(), Some(2), "another mode is another state");
        put("x");
        let told = |files: &Tracked<Number>| files.bad.as_ref().map(|(_, times)| *times);
        for times in 1..5 {
            assert_eq!((files.look(), told(&files)), (None, Some(times)));
        }
        assert!(!files.is_to_tell("\"x\": none"), "it was told");
        put("y");
        assert_eq!((files.look(), told(&files)), (None, Some(1)));
        assert!(files.is_to_tell("\"y\": none"));
        put("3");
        assert_eq!((files.look(), told(&files), files.look()), (Some(3), None, None));
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
            files.look()
        })
        .unwrap();
        assert!(watch.take().is_none());
        put("7");
        let begun = Instant::now();
        let found = loop {
            if let Some(number) = watch.take() {
                break number;
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "nobody has looked");
            watch.thread.unpark();
            std::thread::sleep(Duration::from_millis(5));
        };
        assert_eq!((found, watch.take()), (7, None), "it is taken once");
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
