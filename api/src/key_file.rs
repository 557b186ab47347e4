//! Files with secrets, and with whom to trust: who may own and write them.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use zeroize::Zeroizing;

use crate::errno::{Error, OpenError, mend_of};

/// Opens a file, also where a FIFO would keep it for ever.
pub(crate) fn open(path: &Path) -> io::Result<std::fs::File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// What a file is, and who may do what with it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    /// As a line has it, such as "key file".
    pub(crate) what: &'static str,
    /// Bits of the mode that it must not have.
    pub(crate) not: u32,
    /// Bytes that are read at most.
    pub(crate) most: usize,
}

impl Kind {
    /// The bytes of a file that was opened.
    ///
    /// # Errors
    /// It cannot be read, is somebody else's, or others than its owner may use it.
    pub(crate) fn read(
        &self,
        path: &Path,
        file: io::Result<std::fs::File>,
    ) -> Result<Zeroizing<Vec<u8>>, OpenError> {
        let (what, shown) = (self.what, path.display());
        let failed = |e: io::Error| {
            let (error, mend) = mend_of(e.raw_os_error().unwrap_or(libc::EIO));
            OpenError::new(error, format!("{what} {shown}: {e}{mend}"))
        };
        let file = file.map_err(failed)?;
        let is = file.metadata().map_err(failed)?;
        let mode = is.mode();
        let ours = is.uid() == nix::unistd::geteuid().as_raw() || is.uid() == 0;
        if !is.is_file() || !ours {
            let line = format!("{what} {shown}: it has to be a file of this user's or root's");
            return Err(OpenError::new(Error::Access, line));
        }
        if mode & self.not != 0 {
            let now = mode & 0o777;
            let (verb, mend) = match self.not & 0o044 {
                0 => ("change", now & !self.not),
                _ => ("use", 0o600),
            };
            let line = format!(
                "{what} {shown}: mode {now:o}, so others than its owner can {verb} it; \
                 chmod {mend:o} {shown}"
            );
            return Err(OpenError::new(Error::Access, line));
        }
        // Set aside at once, so that no part of a secret stays where it was before it grew.
        let mut bytes = Zeroizing::new(Vec::with_capacity(self.most.min(is.len() as usize + 1)));
        file.take(self.most as u64).read_to_end(&mut bytes).map_err(failed)?;
        Ok(bytes)
    }
}
