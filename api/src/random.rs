//! Random bytes of the kernel.

use std::io::Read;

use barewire_driver::mem::Locked;

use crate::errno::{OpenError, refused_by_system};

const PATH: &str = "/dev/urandom";

/// `N` fresh random bytes.
///
/// # Errors
/// `/dev/urandom` cannot be read.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], OpenError> {
    let mut bytes = [0; N];
    fill(&mut bytes).map(|()| bytes)
}

/// 32 fresh random bytes in locked memory, without another copy.
///
/// # Errors
/// As for [`random`].
pub(crate) fn random_secret() -> Result<Locked<[u8; 32]>, OpenError> {
    let mut bytes = Locked::default();
    fill(&mut *bytes).map(|()| bytes)
}

fn fill(bytes: &mut [u8]) -> Result<(), OpenError> {
    let read = std::fs::File::open(PATH).and_then(|mut file| file.read_exact(bytes));
    read.map_err(|e| {
        let errno = e.raw_os_error().unwrap_or(libc::EIO);
        OpenError::new(refused_by_system(PATH, errno), format!("{PATH}: {e}"))
    })
}
