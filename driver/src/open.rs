//! Ports by name: `shm`, `shm:job7,mtu=9000`, `fault(loss=0.01,seed=7):shm:job7`.

use std::io;
use std::path::PathBuf;

use crate::backend::shm::{ShmPort, ShmSettings};
use crate::port::{MacAddr, Port};

/// Opens the port that `spec` names.
///
/// `shm` is the user's default segment, `shm:job7` another one, both with options after a comma:
/// `mac=02:00:00:00:00:07`, `mtu=9000`, `ring=262144` (bytes per pair), `members=16`.
///
/// # Errors
/// [`OpenError`]; nothing is left behind.
pub fn open(spec: &str) -> Result<Box<dyn Port>, OpenError> {
    let (kind, rest) = split_kind(spec);
    match kind {
        "shm" => Ok(Box::new(ShmPort::open(&shm_settings(spec, rest)?)?)),
        _ => Err(unknown(spec, kind)),
    }
}

/// The part before the first colon or comma, and what follows it.
fn split_kind(spec: &str) -> (&str, &str) {
    let end = spec.find([':', ',', '(']).unwrap_or(spec.len());
    let (kind, rest) = spec.split_at(end);
    (kind, rest.strip_prefix(':').unwrap_or(rest))
}

fn bad(spec: &str, why: impl Into<String>) -> OpenError {
    OpenError::BadSpec { spec: spec.to_owned(), why: why.into() }
}

fn unknown(spec: &str, kind: &str) -> OpenError {
    match kind {
        "afpacket" | "udp" | "dpdk" | "vfio" => {
            bad(spec, format!("{kind} is not part of this build; write shm or shm:NAME"))
        }
        "loopback" => bad(spec, "loopback joins ports of one program only; write shm or shm:NAME"),
        _ => bad(spec, "no such kind of port; write shm or shm:NAME"),
    }
}

fn shm_settings(spec: &str, rest: &str) -> Result<ShmSettings, OpenError> {
    let mut settings = ShmSettings::default();
    let mut parts = rest.split(',');
    let name = parts.next().unwrap_or("");
    if !name.is_empty() {
        settings.name = name.to_owned();
    } else if spec.ends_with(':') {
        return Err(bad(spec, "a name is missing; write shm for the default segment, or shm:job7"));
    }
    for part in parts {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        match key {
            "mac" => settings.mac = Some(parse(spec, value)?),
            "mtu" => settings.mtu = Some(parse(spec, value)?),
            "ring" => settings.ring_len = Some(parse(spec, value)?),
            "members" => settings.members = Some(parse(spec, value)?),
            _ => {
                let why = format!("no option \"{key}\"; there are mac=, mtu=, ring= and members=");
                return Err(bad(spec, why));
            }
        }
    }
    Ok(settings)
}

fn parse<T: std::str::FromStr>(spec: &str, value: &str) -> Result<T, OpenError>
where
    T::Err: std::fmt::Display,
{
    value.parse().map_err(|e: T::Err| bad(spec, format!("\"{value}\": {e}")))
}

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
        "no room for a segment in {path}: {need} bytes needed, {free} free; free some (ls -l {dir}), \
         enlarge it (mount -o remount,size=1G {dir}), or ask for less (ring=262144)",
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
    /// The segment's file is somebody else's, or others could write it.
    #[error("{path} is not safe to use: {why}; remove it (rm {path}) or choose another name",
        path = path.display())]
    NotOurs {
        /// The segment's file.
        path: PathBuf,
        /// What was found.
        why: String,
    },
    /// The segment's file was written by another version of barewire, or by something else.
    #[error(
        "{path} is {found}, this build makes version {version}; end the programs that use it and \
         remove it (rm {path}), or choose another name", path = path.display()
    )]
    OtherVersion {
        /// The segment's file.
        path: PathBuf,
        /// What it is.
        found: String,
        /// The version that this build makes.
        version: u64,
    },
    /// A process of the segment has the address that was asked for.
    #[error("address {mac} is in use on {path} by process {pid}; choose another (mac=...) or none",
        path = path.display())]
    MacInUse {
        /// The address.
        mac: MacAddr,
        /// Who has it, as numbered where it lives.
        pid: u32,
        /// The segment's file.
        path: PathBuf,
    },
    /// The segment has as many members as it was made for.
    #[error("{path} has all its {members} members; choose another name, or make it larger with \
        members= in the process that is first", path = path.display())]
    Crowded {
        /// The segment's file.
        path: PathBuf,
        /// How many that is.
        members: usize,
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
    #[error("mtu {mtu} is outside {min} to {max} on this port; write mtu={max} or less")]
    BadMtu {
        /// The value asked for.
        mtu: usize,
        /// Smallest that the fabric can work with.
        min: usize,
        /// Largest that this port carries.
        max: usize,
    },
    /// Some process holds the segment's lock for longer than any operation takes.
    #[error("{path} is locked for over {seconds} s; is a process that uses it stopped? see: \
        fuser -v {path}", path = path.display())]
    Locked {
        /// The segment's file.
        path: PathBuf,
        /// How long was waited.
        seconds: u64,
    },
}

impl OpenError {
    /// The errno that says it best, for callers that can pass on no more.
    pub fn errno(&self) -> i32 {
        match self {
            Self::BadSpec { .. } | Self::BadMtu { .. } | Self::Differs { .. } => libc::EINVAL,
            Self::Os { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
            Self::NoSpace { .. } => libc::ENOSPC,
            Self::NotOurs { .. } => libc::EACCES,
            Self::OtherVersion { .. } => libc::EPROTO,
            Self::MacInUse { .. } => libc::EADDRINUSE,
            Self::Crowded { .. } => libc::EUSERS,
            Self::Locked { .. } => libc::EBUSY,
        }
    }
}
