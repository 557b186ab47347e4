//! Files with secrets and certificates: checks of their owner and mode.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use barewire_driver::mem::Locked;

use crate::errno::{Error, OpenError, mend_of};

/// Opens a file, also where a FIFO would keep it for ever.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// A kind of file, and which access other users may have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileKind {
    /// Its name in messages, such as "key file".
    pub(crate) what: &'static str,
    /// Bits of the mode that it must not have.
    pub(crate) not: u32,
    /// Bytes that are read at most; of a secret [`Locked::LEN_MAX`] at most.
    pub(crate) most: usize,
}

impl FileKind {
    /// The bytes of a file that was opened, which are no secret.
    ///
    /// # Errors
    /// It cannot be read, is another user's, or other users have access to it.
    pub(crate) fn read(&self, path: &Path, file: io::Result<File>) -> Result<Vec<u8>, OpenError> {
        let (file, len) = self.checked(path, file)?;
        let mut bytes = Vec::with_capacity(len);
        let read = file.take(self.most as u64).read_to_end(&mut bytes);
        read.map(|_| bytes).map_err(|e| self.failed(path, &e))
    }

    /// The bytes of a file that was opened, which are a secret: no copy of them is elsewhere.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub(crate) fn read_secret(
        &self,
        path: &Path,
        file: io::Result<File>,
    ) -> Result<Locked<[u8]>, OpenError> {
        let (mut file, len) = self.checked(path, file)?;
        let (mut bytes, mut end) = (Locked::zeros(len), 0);
        loop {
            match file.read(&mut bytes[end..]) {
                Ok(0) if end < bytes.len() || end == self.most => {
                    return Ok(Locked::copy_of(&bytes[..end]));
                }
                // It has grown.
                Ok(0) => {
                    let mut more = Locked::zeros((2 * end).min(self.most));
                    more[..end].copy_from_slice(&bytes);
                    bytes = more;
                }
                Ok(read) => end += read,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.failed(path, &e)),
            }
        }
    }

    fn failed(&self, path: &Path, e: &io::Error) -> OpenError {
        let (what, shown) = (self.what, path.display());
        let (error, mend) = mend_of(e.raw_os_error().unwrap_or(libc::EIO));
        OpenError::new(error, format!("{what} {shown}: {e}{mend}"))
    }

    /// The file, if it may be used, and room for its bytes.
    fn checked(&self, path: &Path, file: io::Result<File>) -> Result<(File, usize), OpenError> {
        let (what, shown) = (self.what, path.display());
        let file = file.map_err(|e| self.failed(path, &e))?;
        let is = file.metadata().map_err(|e| self.failed(path, &e))?;
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
        let len = (is.len() as usize).saturating_add(1).min(self.most);
        Ok((file, len))
    }
}
