//! A segment without a name, in memory that cannot be made shorter: for members who do not believe
//! each other.
//!
//! The file is a memfd sealed against every change of its size, so that no member can take a page
//! away under another's mapping for good: one that is punched out is a zero page again at the next
//! touch. It belongs to the user who made it, mode 0600. Who is to be a member is given an open
//! file of its own ([`another`]), by which it shows its life ([`lock`](crate::backend::lock)): a
//! descriptor that is passed as it is would share the open file, and with it the locks, of who
//! passes it. The maker opens the file anew by its place in /proc/self/fd, so that a member needs
//! neither /proc nor a right to the file.

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

/// What is said of such a file in messages.
fn label(name: &str) -> PathBuf {
    format!("/memfd:{name}").into()
}

fn seals() -> SealFlag {
    SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL
}

/// An empty segment without members.
///
/// # Errors
/// [`OpenError`].
pub(crate) fn make(settings: &ShmSettings) -> Result<File, OpenError> {
    let path = label(&settings.name);
    let hint = "; raise the limits on open files and file size (ulimit -n 65536 -f unlimited)";
    let os = |source: io::Error| OpenError::os("cannot make", &path, source, hint);
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    // Some systems insist that nobody can execute it, and kernels before 6.3 do not know of that.
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

/// The same file opened once more.
///
/// # Errors
/// Those of opening; `NotFound` where there is no /proc.
pub(crate) fn another(file: &File) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_CLOEXEC);
    options.open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Joins such a segment.
///
/// # Errors
/// [`OpenError`]; `EACCES` if somebody can change the size of `file`.
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
