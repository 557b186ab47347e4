//! Which user has which address, kept for the switch that comes next.
//!
//! A station keeps its address from switch to switch. Between two of them another user's process
//! could take it, and with it the frames of the one whose it was. So the switch writes down what it
//! gives, beside its socket and for itself alone, and the next one keeps those addresses for their
//! users for as long as a session could outlive the gap.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::time::TimeSpec;

use crate::backend::bound::touch;
use crate::port::Station;

/// How long addresses are kept: some times T_dead.
pub(super) const KEPT: Duration = Duration::from_secs(30);
/// Longest file that is read.
const LEN_MAX: u64 = 1 << 20;

/// See the module.
pub(super) struct Reserved {
    path: PathBuf,
    left: Vec<(Station, u32)>,
    since: Instant,
}

impl Reserved {
    /// What the last switch with this socket wrote, if one did. From then on the record is young:
    /// who sweeps leaves it, until the socket is there.
    pub(super) fn read(socket: &Path) -> Self {
        let path = socket.with_extension("stations");
        touch(&path, TimeSpec::UTIME_NOW);
        let left = read(&path).map(|text| parse(&text)).unwrap_or_default();
        Self { path, left, since: Instant::now() }
    }

    /// Whether an address is kept for another user than this one.
    pub(super) fn is_kept_from(&self, uid: u32, station: Station) -> bool {
        self.since.elapsed() < KEPT
            && self.left.iter().any(|&(kept, whose)| kept == station && whose != uid)
    }

    /// Whether an address is kept for any user: not to be given to a process that asks for none.
    pub(super) fn is_kept(&self, station: Station) -> bool {
        self.since.elapsed() < KEPT && self.left.iter().any(|&(kept, _)| kept == station)
    }

    /// Writes what there is now: that, and what is kept yet.
    pub(super) fn write(&mut self, given: impl Iterator<Item = (Station, u32)>) {
        if self.since.elapsed() >= KEPT {
            self.left.clear();
        }
        let mut all: Vec<_> = given.collect();
        all.extend(
            self.left.iter().filter(|kept| !all.contains(kept)).copied().collect::<Vec<_>>(),
        );
        let text: String = all.iter().map(|(station, uid)| format!("{station} {uid}\n")).collect();
        if let Err(error) = write(&self.path, &text) {
            let path = self.path.display();
            tracing::warn!(%path, %error, "addresses are not kept for the next switch");
        }
    }
}

impl Drop for Reserved {
    /// From now on they wait for the next switch.
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

/// Puts a whole file in the place of the old one.
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

    /// Goal: what was given is kept for its user, what was left is not, and nonsense is nothing.
    #[test]
    fn addresses_are_kept_for_their_users() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("x.sock");
        let [a, b, c] = [1, 2, 3].map(|n| Station::at([2, 0, 0, 0, 0, n]));
        let mut first = Reserved::read(&socket);
        assert!(!first.is_kept_from(2, a));
        first.write([(a, 1), (b, 2), (c, 2)].into_iter());
        first.write([(a, 1), (b, 2)].into_iter());
        let mut next = Reserved::read(&socket);
        let kept = |of: &Reserved| {
            [1, 2].map(|uid| [a, b, c].map(|station| of.is_kept_from(uid, station)))
        };
        assert_eq!(kept(&next), [[false, true, false], [true, false, false]]);
        // Who has come back is written once, who has not stays.
        next.write([(b, 2)].into_iter());
        assert_eq!(read(&next.path).unwrap().lines().count(), 2);
        assert_eq!(kept(&Reserved::read(&socket)), kept(&next));
        next.since -= KEPT;
        assert_eq!(kept(&next), [[false; 3]; 2]);
        next.write([(b, 2)].into_iter());
        assert_eq!(read(&next.path).unwrap().lines().count(), 1);
        std::fs::write(&next.path, "\n\n02:00 1\nx\n02:00:00:00:00:01 x\n\u{0}").unwrap();
        assert!(Reserved::read(&socket).left.is_empty());
    }

    /// Goal: the record is as young as the end of its switch and the start of the next one, however
    /// long ago it was written: who sweeps leaves it for that one.
    #[test]
    fn a_record_waits_from_the_end_on() {
        let dir = tempfile::tempdir().unwrap();
        let mut reserved = Reserved::read(&dir.path().join("x.sock"));
        reserved.write([(Station::at([2, 0, 0, 0, 0, 1]), 1)].into_iter());
        let path = reserved.path.clone();
        let age = || path.metadata().unwrap().modified().unwrap().elapsed().unwrap();
        let grow_old = || {
            touch(&path, TimeSpec::from_duration(Duration::from_secs(1_000_000_000)));
            assert!(age() > KEPT);
        };
        grow_old();
        drop(reserved);
        assert!(age() < KEPT);
        grow_old();
        let next = Reserved::read(&dir.path().join("x.sock"));
        assert!(age() < KEPT && next.left.len() == 1);
    }
}
