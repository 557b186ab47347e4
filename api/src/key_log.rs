//! The file to which a domain writes the secrets of its sessions, if the user sets
//! `BAREWIRE_KEY_LOG`. A reader of the file can read every recording of these sessions
//! (`docs/security.md`).

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use barewire_dataplane::node::Node;
use barewire_dataplane::seal::lines;

use crate::errno::{Error, OpenError, mend_of};

/// An open key log file.
pub(crate) struct KeyLog {
    path: PathBuf,
    /// `None` after a failed write.
    file: Option<File>,
}

impl KeyLog {
    /// Opens or creates the file, with access for this user alone, and logs a warning. New lines
    /// are appended.
    ///
    /// # Errors
    /// The file cannot be written, is not this user's, or other users have access to it.
    pub(crate) fn open(path: &Path) -> Result<Self, OpenError> {
        let shown = path.display();
        let failed = |e: io::Error| {
            let (error, mend) = mend_of(e.raw_os_error().unwrap_or(libc::EIO));
            OpenError::new(error, format!("BAREWIRE_KEY_LOG={shown}: {e}{mend}"))
        };
        let mut options = OpenOptions::new();
        options.append(true).create(true).mode(0o600);
        // A FIFO could block for ever, and a link could lead to another user's file.
        options.custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW);
        let file = options.open(path).map_err(failed)?;
        let is = file.metadata().map_err(failed)?;
        let ours = is.uid() == nix::unistd::geteuid().as_raw();
        if !is.is_file() || !ours || is.mode() & 0o077 != 0 {
            let line = format!(
                "BAREWIRE_KEY_LOG={shown}: it has to be a file of this user's that others cannot \
                 use: chmod 600 {shown}"
            );
            return Err(OpenError::new(Error::Access, line));
        }
        tracing::warn!(
            "BAREWIRE_KEY_LOG: the secrets of all sessions are written to {shown}; a reader of \
             that file can read what was recorded of them"
        );
        Ok(Self { path: path.to_owned(), file: Some(file) })
    }

    /// Writes the secrets of newly opened sessions, in one write, since several processes may
    /// append to the file. A failed write is logged and is the last.
    #[cold]
    pub(crate) fn write(&mut self, node: &mut Node) {
        let secrets = node.openings.take_secrets();
        let Some(file) = self.file.as_mut().filter(|_| !secrets.is_empty()) else { return };
        if let Err(e) = file.write_all(lines(&secrets).as_bytes()) {
            let shown = self.path.display();
            tracing::error!("{shown}: {e}: no more secrets are written");
            self.file = None;
        }
    }
}
