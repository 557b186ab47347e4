//! Recording what passes the port of a process that runs, for `barewire capture`.
//!
//! Who records makes a segment of shared memory whose name follows from that of the process' file
//! ([`segment`]), joins it as a monitor, and [asks](ask). When the process publishes the next time
//! it sees that, joins the segment as well, and copies each frame there until no monitor lives. It
//! costs a process nothing that is not asked, and whoever may ask may also read its memory.

use std::io;
use std::path::{Path, PathBuf};

use barewire_driver::backend::shm::ShmSettings;
use barewire_driver::error::OpenError;

use super::DIR;
use super::file::{self, Writer};

/// Monitors that a process may have at once, and itself.
const MEMBERS: usize = 8;

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

/// Asks the process that publishes in the file `path` to show what passes its port. Repeated by
/// whoever records: a process that has just seen the last one go may miss the next.
///
/// # Errors
/// Those of writing the file: it has gone, or is another user's.
pub fn ask(path: &Path) -> io::Result<()> {
    file::ask(path)
}

/// Does what is asked: `show` is told the segment, and says whether anybody looks.
#[inline]
pub(super) fn attend(writer: &Writer, show: impl FnOnce(&ShmSettings) -> Result<bool, OpenError>) {
    if writer.is_asked() {
        begin_or_end(writer, show);
    }
}

#[cold]
fn begin_or_end(writer: &Writer, show: impl FnOnce(&ShmSettings) -> Result<bool, OpenError>) {
    let shown = segment(&writer.path).map_or(Ok(false), |segment| show(&segment));
    let is_watched = shown.unwrap_or_else(|why| {
        tracing::warn!("cannot be recorded: {why}");
        false
    });
    if !is_watched {
        writer.ask_no_more();
    }
}
