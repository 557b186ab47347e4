//! Errors of opening a port, for all kinds of ports.

use std::io;
use std::path::PathBuf;

use crate::backend::vfio::error::VfioError;
use crate::port::{MTU_MIN, Station};

/// Remedy for a full file system of a segment.
pub(crate) const ENLARGE: &str =
    "enlarge /dev/shm (mount -o remount,size=1G /dev/shm, of a container --shm-size=1g)";

/// Why a port did not open. Nothing is left behind: no file, no address, no memory.
///
/// Each message is one line and ends in what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The string names no port of this build, or an option is wrong.
    #[error("port \"{spec}\": {why}")]
    BadSpec {
        /// The string, or the part of it that is wrong.
        spec: String,
        /// What is wrong, and what to write instead.
        why: String,
    },
    /// The operating system refused.
    #[error("{what} {path}: {source}{hint}", path = path.display())]
    Os {
        /// What was tried, such as "cannot open".
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// With which errno.
        source: io::Error,
        /// What to do, starting with "; ", or empty.
        hint: &'static str,
    },
    /// The file system of the segment has too little room for it.
    #[error(
        "no room for a segment in {path}: {need} bytes needed, {free} free; free some (ls -l \
         {dir}) or enlarge it (mount -o remount,size=1G {dir}, of a container --shm-size=1g)",
        dir = path.parent().unwrap_or(path).display(), path = path.display()
    )]
    NoSpace {
        /// The segment's file.
        path: PathBuf,
        /// Bytes that have to be free.
        need: u64,
        /// Bytes that are.
        free: u64,
    },
    /// The segment's file belongs to another user, or is writable by others.
    #[error("{path} is not safe to use: {why}; remove it (rm {path}) or choose another name",
        path = path.display())]
    NotOurs {
        /// The segment's file.
        path: PathBuf,
        /// What was found.
        why: String,
    },
    /// The segment's file has another version of the format, or is no segment.
    #[error(
        "{path} is {found}, this build makes version {version}; end the programs that use it (see: \
         fuser -v {path}) and remove what is left (rm {path}), or choose another name",
        path = path.display()
    )]
    OtherVersion {
        /// The segment's file.
        path: PathBuf,
        /// What it is.
        found: String,
        /// The version that this build makes.
        version: u64,
    },
    /// Another process of the segment has the requested address.
    #[error(
        "address {station} is in use on {path} by process {pid}; choose another (mac=...) or none",
        path = path.display()
    )]
    AddressInUse {
        /// The address.
        station: Station,
        /// Who has it, as numbered where it lives.
        pid: u32,
        /// The segment's file.
        path: PathBuf,
    },
    /// The segment has a switch.
    #[error("{path} has a switch, process {pid}; end that one first (kill {pid})",
        path = path.display())]
    HasSwitch {
        /// The segment's file.
        path: PathBuf,
        /// Who it is, as numbered where it lives.
        pid: u32,
    },
    /// The segment has as many members as it was made for.
    #[error("{path} has all its {members} members; {}", if members < members_max {
        "make it larger with members= in the process that is first, or choose another name"
    } else {
        "no segment has more: run fewer processes on it, or give each process of the job a port of \
         its own that carries more, such as udp:127.0.0.1:50000, udp:127.0.0.1:50001; a segment of \
         another name does not reach this one"
    }, path = path.display())]
    Crowded {
        /// The segment's file.
        path: PathBuf,
        /// How many that is.
        members: usize,
        /// How many the largest segment has.
        members_max: usize,
    },
    /// The segment exists and was made with another size than the one asked for.
    #[error("{path} was made with {what}={is}, not {asked}; leave the option out or choose another \
        name", path = path.display())]
    Differs {
        /// The segment's file.
        path: PathBuf,
        /// The option.
        what: &'static str,
        /// Its value there.
        is: usize,
        /// The value asked for.
        asked: usize,
    },
    /// The frame size is outside what this port can carry.
    #[error("mtu {mtu} is outside {min} to {max} on this port; write {}", match mtu < min {
        true => format!("mtu={min} or more"),
        false => format!("mtu={max} or less"),
    })]
    BadMtu {
        /// The value asked for.
        mtu: usize,
        /// Smallest that the fabric can work with.
        min: usize,
        /// Largest that this port carries.
        max: usize,
    },
    /// A device or interface is not there, or not fit for use.
    #[error("port {port}: {why}; {mend}")]
    Device {
        /// The port's name.
        port: String,
        /// What is wrong.
        why: String,
        /// What to do about it.
        mend: String,
        /// The closest errno.
        errno: i32,
    },
    /// A NIC cannot be taken.
    #[error(transparent)]
    Vfio(#[from] VfioError),
    /// The segment's lock was held for longer than any operation takes.
    #[error("{path} is locked for over {seconds} s; is a process that uses it stopped? see: \
        fuser -v {path}", path = path.display())]
    Locked {
        /// The segment's file.
        path: PathBuf,
        /// Seconds waited.
        seconds: u64,
    },
}

/// Remedy for a process with too many descriptors.
pub(crate) const OPEN_FILES: &str = "; raise the limit on open files: ulimit -n 65536";

impl OpenError {
    pub(crate) fn os(
        what: &'static str,
        path: impl Into<PathBuf>,
        source: impl Into<io::Error>,
        hint: &'static str,
    ) -> Self {
        Self::Os { what, path: path.into(), source: source.into(), hint }
    }

    pub(crate) fn device(
        port: impl Into<String>,
        errno: i32,
        why: impl Into<String>,
        mend: impl Into<String>,
    ) -> Self {
        Self::Device { port: port.into(), why: why.into(), mend: mend.into(), errno }
    }

    /// The error of a system call for `port` without a better explanation.
    pub(crate) fn unexplained(port: impl Into<String>, what: &str, e: &io::Error) -> Self {
        let errno = e.raw_os_error().unwrap_or(libc::EIO);
        let mend = match errno {
            libc::EMFILE | libc::ENFILE => "raise the limit on open files: ulimit -n 65536",
            _ => "choose another port, see: barewire info",
        };
        Self::device(port, errno, format!("{what}: {e}"), mend)
    }

    /// Returns `mtu` if it is within the fabric's minimum and the port's maximum.
    pub(crate) fn check_mtu(mtu: usize, max: usize) -> Result<usize, Self> {
        match (MTU_MIN..=max).contains(&mtu) {
            true => Ok(mtu),
            false => Err(Self::BadMtu { mtu, min: MTU_MIN, max: max.max(MTU_MIN) }),
        }
    }

    /// The closest errno, for callers that can report no more.
    pub fn errno(&self) -> i32 {
        match self {
            Self::BadSpec { .. } | Self::BadMtu { .. } | Self::Differs { .. } => libc::EINVAL,
            Self::Os { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
            Self::NoSpace { .. } => libc::ENOSPC,
            Self::NotOurs { .. } => libc::EACCES,
            Self::OtherVersion { .. } => libc::EPROTO,
            Self::AddressInUse { .. } | Self::HasSwitch { .. } => libc::EADDRINUSE,
            Self::Crowded { .. } => libc::EUSERS,
            Self::Device { errno, .. } => *errno,
            Self::Locked { .. } => libc::EBUSY,
            Self::Vfio(error) => error.errno(),
        }
    }
}
