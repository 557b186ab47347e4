//! A segment in a sealed memfd, for members that do not trust each other.
//!
//! The memfd is sealed against every change of its size, so that no member can remove pages under
//! another's mapping: a punched page reads as zero at the next access. It belongs to the user who
//! made it, mode 0600. Each member gets an open file of its own ([`reopen`]), whose locks show that
//! the member lives ([`lock`](crate::backend::lock)): a duplicated descriptor would share the
//! maker's open file and its locks. The maker opens the file again through /proc/self/fd, so that a
//! member needs neither /proc nor permission to open the file.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::ShmSettings;
use super::role::Role;
use super::segment;
use crate::error::OpenError;

/// Name of the file in messages.
fn label(name: &str) -> PathBuf {
    format!("/memfd:{name}").into()
}

fn seals() -> SealFlag {
    SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL
}

/// Makes an empty segment without members.
///
/// # Errors
/// [`OpenError`].
pub(crate) fn create(settings: &ShmSettings) -> Result<File, OpenError> {
    let path = label(&settings.name);
    let hint = "; raise the limits on open files and file size (ulimit -n 65536 -f unlimited)";
    let os = |source: io::Error| OpenError::os("cannot make", &path, source, hint);
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    // Some systems require a non-executable memfd; kernels before 6.3 do not know the flag.
    let no_exec = MFdFlags::from_bits_retain(libc::MFD_NOEXEC_SEAL);
    let made = match memfd_create(settings.name.as_str(), flags | no_exec) {
        Err(Errno::EINVAL) => memfd_create(settings.name.as_str(), flags),
        made => made,
    };
    let file = File::from(made.map_err(|e| os(e.into()))?);
    file.set_permissions(Permissions::from_mode(0o600)).map_err(os)?;
    segment::make(&file, &path, settings)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals())).map_err(|e| os(e.into()))?;
    Ok(file)
}

/// Opens the same file again.
///
/// # Errors
/// Those of opening; `NotFound` where there is no /proc.
pub(crate) fn reopen(file: &File) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_CLOEXEC);
    options.open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Joins a sealed segment.
///
/// # Errors
/// [`OpenError`]; `EACCES` if the size of `file` is not sealed.
pub(super) fn join(
    file: File,
    settings: &ShmSettings,
    role: Role,
) -> Result<segment::Joined, OpenError> {
    let path = label(&settings.name);
    let has = fcntl(&file, FcntlArg::F_GET_SEALS).unwrap_or(0);
    if !SealFlag::from_bits_retain(has).contains(seals()) {
        let why = "the size of the segment that the switch gave can be changed";
        let mend = "end that switch and start one of this version, or leave it out: switch=no";
        return Err(OpenError::device(path.display().to_string(), libc::EACCES, why, mend));
    }
    segment::join_file(file, path, settings, role)
}
