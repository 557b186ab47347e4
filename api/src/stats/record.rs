//! Capture of the frames of a running process, for `barewire capture`.
//!
//! The monitor creates a segment of shared memory whose name follows from that of the process'
//! statistics file ([`segment`]), joins it, and [requests](request) a capture. At its next update
//! the process sees the request, joins the segment as well, and copies each frame there until no
//! monitor lives. A process without a request pays nothing. A request needs write
//! permission on the statistics file: the process' user has it, if it sees the same /dev/shm, and
//! root.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use barewire_driver::backend::shm::ShmSettings;
use barewire_driver::error::OpenError;

use super::DIR;
use super::file::{self, Writer};

/// Most members of a segment: monitors, and the process itself.
const MEMBERS: usize = 8;
/// When a process that could not join the segment tries again.
const RETRY_PERIOD: Duration = Duration::from_secs(1);
/// Period of warnings about it.
const WARN_PERIOD: Duration = Duration::from_secs(10);

/// The statistics files of all processes, for [`publisher_of`](super::publisher_of).
///
/// # Errors
/// The directory cannot be read.
pub fn files() -> io::Result<Vec<PathBuf>> {
    file::files(Path::new(DIR))
}

/// The segment to which the process that publishes in the file `path` copies frames; `None` if it
/// is not a statistics file. The segment belongs to the process' user: see [`ShmSettings::path`].
pub fn segment(path: &Path) -> Option<ShmSettings> {
    let name = format!("frames-{}", file::name_of(path)?);
    Some(ShmSettings { members: Some(MEMBERS), ..ShmSettings::named(&name) })
}

/// Requests that the process of `owner` that publishes in the file `path` copies its frames. A
/// monitor repeats the request: a process that has just seen its last monitor leave may miss one.
///
/// # Errors
/// Those of writing the file: it was removed, or is another user's.
pub fn request(path: &Path, owner: u32) -> io::Result<()> {
    file::request_recording(path, owner)
}

/// The process that publishes in the file `path`, by the name of the file.
pub fn pid_of(path: &Path) -> Option<u32> {
    file::pid_of(path)
}

/// Whether the process that publishes in the file `path` lives.
pub fn is_alive(path: &Path) -> bool {
    file::lives(path)
}

/// Backoff after a failure to join the segment.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    at: Option<Instant>,
    warned: Option<Instant>,
}

impl Backoff {
    /// Whether it is too early to try again.
    fn is_recent(&self, now: Instant) -> bool {
        self.at.is_some_and(|at| now.duration_since(at) < RETRY_PERIOD)
    }

    /// Notes a failure and returns whether a warning is due.
    fn note_failure(&mut self, now: Instant) -> bool {
        self.at = Some(now);
        let is_due = self.warned.is_none_or(|at| now.duration_since(at) >= WARN_PERIOD);
        if is_due {
            self.warned = Some(now);
        }
        is_due
    }
}

/// Serves a pending request: `show` joins the segment and returns whether a monitor lives.
#[inline]
pub(super) fn serve_request(
    writer: &Writer,
    backoff: &mut Backoff,
    show: impl FnOnce(&ShmSettings) -> Result<bool, OpenError>,
) {
    if writer.is_recording_requested() {
        start_or_stop(writer, backoff, show);
    }
}

#[cold]
fn start_or_stop(
    writer: &Writer,
    backoff: &mut Backoff,
    show: impl FnOnce(&ShmSettings) -> Result<bool, OpenError>,
) {
    let now = Instant::now();
    if backoff.is_recent(now) {
        return;
    }
    let shown = segment(&writer.path).map_or(Ok(false), |segment| show(&segment));
    let is_watched = shown.unwrap_or_else(|why| {
        if backoff.note_failure(now) {
            tracing::warn!("cannot be recorded: {why}");
        }
        false
    });
    if !is_watched {
        writer.clear_request();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: requests for a recording that cannot be made cost the process, and its log, little.
    #[test]
    fn failed_recording_requests_are_retried_and_logged_rarely() {
        let mut backoff = Backoff::default();
        let begun = Instant::now();
        let (mut tried, mut told) = (0, 0);
        for ms in (0..20_000).step_by(10) {
            let now = begun + Duration::from_millis(ms);
            if !backoff.is_recent(now) {
                tried += 1;
                told += u32::from(backoff.note_failure(now));
            }
        }
        assert_eq!((tried, told), (20, 2));
    }
}
