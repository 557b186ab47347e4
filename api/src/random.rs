//! Random bytes of the kernel's.

use std::io::Read;

use crate::errno::{OpenError, refused_by_system};

/// So many, fresh.
///
/// # Errors
/// There is no `/dev/urandom`.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], OpenError> {
    let (mut bytes, path) = ([0; N], "/dev/urandom");
    let read = std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut bytes));
    read.map(|()| bytes).map_err(|e| {
        let errno = e.raw_os_error().unwrap_or(libc::EIO);
        OpenError::new(refused_by_system(path, errno), format!("{path}: {e}"))
    })
}
