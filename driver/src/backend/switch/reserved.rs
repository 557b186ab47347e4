//! Address reservations that outlive a switch: which user had which address.
//!
//! A station keeps its address across a restart of the switch. Until it has attached again, another
//! user's process could take the address, and with it the frames for that station. So the switch
//! records its assignments in a file beside its socket (mode 0600), and the next one reserves those
//! addresses for their users for as long as a session can survive the gap.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::time::TimeSpec;

use crate::backend::bound::touch;
use crate::port::Station;

/// How long addresses stay reserved: a multiple of T_dead.
pub(super) const RESERVED_FOR: Duration = Duration::from_secs(30);
/// Most bytes of the file that are read.
const LEN_MAX: u64 = 1 << 20;

/// The reservations of the previous switch, and the file for the next.
pub(super) struct Reserved {
    path: PathBuf,
    previous: Vec<(Station, u32)>,
    since: Instant,
}

impl Reserved {
    /// Reads the record of the previous switch with this socket, if there is one, and touches it:
    /// the `sweep` of another switch then leaves it until the socket exists.
    pub(super) fn read(socket: &Path) -> Self {
        let path = socket.with_extension("stations");
        touch(&path, TimeSpec::UTIME_NOW);
        let previous = read(&path).map(|text| parse(&text)).unwrap_or_default();
        Self { path, previous, since: Instant::now() }
    }

    /// Whether an address is reserved for another user than `uid`.
    pub(super) fn is_reserved_for_other(&self, uid: u32, station: Station) -> bool {
        self.since.elapsed() < RESERVED_FOR
            && self.previous.iter().any(|&(kept, whose)| kept == station && whose != uid)
    }

    /// Whether an address is reserved for any user: not to be chosen for a process that asks for
    /// no particular one.
    pub(super) fn is_reserved(&self, station: Station) -> bool {
        self.since.elapsed() < RESERVED_FOR
            && self.previous.iter().any(|&(kept, _)| kept == station)
    }

    /// Records the current assignments `given`, and reservations that are still valid.
    pub(super) fn write(&mut self, given: impl Iterator<Item = (Station, u32)>) {
        if self.since.elapsed() >= RESERVED_FOR {
            self.previous.clear();
        }
        let mut all: Vec<_> = given.collect();
        all.extend(
            self.previous.iter().filter(|kept| !all.contains(kept)).copied().collect::<Vec<_>>(),
        );
        let text: String = all.iter().map(|(station, uid)| format!("{station} {uid}\n")).collect();
        if let Err(error) = write(&self.path, &text) {
            let path = self.path.display();
            tracing::warn!(%path, %error, "addresses are not kept for the next switch");
        }
    }
}

impl Drop for Reserved {
    /// The time of the switch's end is the record's age.
    fn drop(&mut self) {
        touch(&self.path, TimeSpec::UTIME_NOW);
    }
}

fn parse(text: &str) -> Vec<(Station, u32)> {
    let line = |line: &str| {
        let (station, uid) = line.split_once(' ')?;
        Some((station.parse().ok()?, uid.parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}

fn read(path: &Path) -> Option<String> {
    let mut options = OpenOptions::new();
    let file =
        options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC).open(path).ok()?;
    let is_ours = file.metadata().ok()?.uid() == nix::unistd::geteuid().as_raw();
    let mut text = String::new();
    file.take(LEN_MAX).read_to_string(&mut text).ok()?;
    is_ours.then_some(text)
}

/// Replaces the file atomically.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let new = path.with_extension("new");
    let _ = std::fs::remove_file(&new);
    let mut file = File::create_new(&new)?;
    file.set_permissions(Permissions::from_mode(0o600))?;
    file.write_all(text.as_bytes())?;
    std::fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: assigned addresses stay reserved for their users, released ones do not, and a
    /// malformed record is empty.
    #[test]
    fn addresses_are_reserved_for_their_users() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("x.sock");
        let [a, b, c] = [1, 2, 3].map(|n| Station::at([2, 0, 0, 0, 0, n]));
        let mut first = Reserved::read(&socket);
        assert!(!first.is_reserved_for_other(2, a));
        first.write([(a, 1), (b, 2), (c, 2)].into_iter());
        first.write([(a, 1), (b, 2)].into_iter());
        let mut next = Reserved::read(&socket);
        let kept = |of: &Reserved| {
            [1, 2].map(|uid| [a, b, c].map(|station| of.is_reserved_for_other(uid, station)))
        };
        assert_eq!(kept(&next), [[false, true, false], [true, false, false]]);
        // A station that is back is recorded once; one that is not stays reserved.
        next.write([(b, 2)].into_iter());
        assert_eq!(read(&next.path).unwrap().lines().count(), 2);
        assert_eq!(kept(&Reserved::read(&socket)), kept(&next));
        next.since -= RESERVED_FOR;
        assert_eq!(kept(&next), [[false; 3]; 2]);
        next.write([(b, 2)].into_iter());
        assert_eq!(read(&next.path).unwrap().lines().count(), 1);
        std::fs::write(&next.path, "\n\n02:00 1\nx\n02:00:00:00:00:01 x\n\u{0}").unwrap();
        assert!(Reserved::read(&socket).previous.is_empty());
    }

    /// Goal: the record's age counts from the end of its switch, and from the start of the next
    /// one, not from its writing: `sweep` leaves it for that one.
    #[test]
    fn a_record_ages_from_the_end_of_its_switch() {
        let dir = tempfile::tempdir().unwrap();
        let mut reserved = Reserved::read(&dir.path().join("x.sock"));
        reserved.write([(Station::at([2, 0, 0, 0, 0, 1]), 1)].into_iter());
        let path = reserved.path.clone();
        let age = || path.metadata().unwrap().modified().unwrap().elapsed().unwrap();
        let grow_old = || {
            touch(&path, TimeSpec::from_duration(Duration::from_secs(1_000_000_000)));
            assert!(age() > RESERVED_FOR);
        };
        grow_old();
        drop(reserved);
        assert!(age() < RESERVED_FOR);
        grow_old();
        let next = Reserved::read(&dir.path().join("x.sock"));
        assert!(age() < RESERVED_FOR && next.previous.len() == 1);
    }
}
