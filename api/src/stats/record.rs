//! Recording what passes the port of a process that runs, for `barewire capture`.
//!
//! Who records makes a segment of shared memory whose name follows from that of the process' file
//! ([`segment`]), joins it as a monitor, and [asks](ask). When the process publishes the next time
//! it sees that, joins the segment as well, and copies each frame there until no monitor lives. It
//! costs a process nothing that is not asked. Who may ask is who may write that file: the process'
//! user, where it sees the same /dev/shm, and root.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use barewire_driver::backend::shm::ShmSettings;
use barewire_driver::error::OpenError;

use super::DIR;
use super::file::{self, Writer};

/// Monitors that a process may have at once, and itself.
const MEMBERS: usize = 8;
/// When a process that could not show its frames tries again.
const AGAIN: Duration = Duration::from_secs(1);
/// How often it says so.
const WARN: Duration = Duration::from_secs(10);

/// The files of all processes, to be [looked at](super::look).
///
/// # Errors
/// The directory cannot be read.
pub fn files() -> io::Result<Vec<PathBuf>> {
    file::files(Path::new(DIR))
}

/// The segment in which the process that publishes in the file `path` shows frames; `None` if that
/// is none of ours. It is that of the process' user: see [`ShmSettings::path`].
pub fn segment(path: &Path) -> Option<ShmSettings> {
    let name = format!("frames-{}", file::name_of(path)?);
    Some(ShmSettings { members: Some(MEMBERS), ..ShmSettings::named(&name) })
}

/// Asks the process of `owner` that publishes in the file `path` to show what passes its port.
/// Repeated by whoever records: a process that has just seen the last one go may miss the next.
///
/// # Errors
/// Those of writing the file: it has gone, or is another user's.
pub fn ask(path: &Path, owner: u32) -> io::Result<()> {
    file::ask(path, owner)
}

/// The process that publishes in the file `path`, by its name.
pub fn pid_of(path: &Path) -> Option<u32> {
    file::pid_of(path)
}

/// Whether the process that publishes in the file `path` lives.
pub fn lives(path: &Path) -> bool {
    file::lives(path)
}

/// When a process could not show what it was asked for.
#[derive(Debug, Default)]
pub(super) struct RetryLog {
    at: Option<Instant>,
    warned: Option<Instant>,
}

impl RetryLog {
    /// Whether it is too early to try again.
    fn is_recent(&self, now: Instant) -> bool {
        self.at.is_some_and(|at| now.duration_since(at) < AGAIN)
    }

    /// Notes it, and says whether a warning is due.
    fn note(&mut self, now: Instant) -> bool {
        self.at = Some(now);
        let is_due = self.warned.is_none_or(|at| now.duration_since(at) >= WARN);
        if is_due {
            self.warned = Some(now);
        }
        is_due
    }
}

/// Does what is asked: `show` is told the segment, and says whether anybody looks.
#[inline]
pub(super) fn attend(
    writer: &Writer,
    refused: &mut RetryLog,
    show: impl FnOnce(&ShmSettings) -> Result<bool, OpenError>,
) {
    if writer.is_asked() {
        begin_or_end(writer, refused, show);
    }
}

#[cold]
fn begin_or_end(
    writer: &Writer,
    refused: &mut RetryLog,
    show: impl FnOnce(&ShmSettings) -> Result<bool, OpenError>,
) {
    let now = Instant::now();
    if refused.is_recent(now) {
        return;
    }
    let shown = segment(&writer.path).map_or(Ok(false), |segment| show(&segment));
    let is_watched = shown.unwrap_or_else(|why| {
        if refused.note(now) {
            tracing::warn!("cannot be recorded: {why}");
        }
        false
    });
    if !is_watched {
        writer.ask_no_more();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: requests for a recording that cannot be made cost the process, and its log, little.
    #[test]
    fn what_fails_is_tried_and_told_now_and_then() {
        let mut refused = RetryLog::default();
        let begun = Instant::now();
        let (mut tried, mut told) = (0, 0);
        for ms in (0..20_000).step_by(10) {
            let now = begun + Duration::from_millis(ms);
            if !refused.is_recent(now) {
                tried += 1;
                told += u32::from(refused.note(now));
            }
        }
        assert_eq!((tried, told), (20, 2));
    }
}
