//! A directory that no other user can enter, for the socket of memif's driver.
//!
//! The driver trusts every client, and any process may connect to an abstract name. The directory
//! of a process that was killed is removed by the next process of its user that makes one.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::unistd::{geteuid, mkdtemp};

use crate::backend::lock::{end_life, show_life};

/// Prefix of the directories' names.
const PREFIX: &str = "barewire-memif-";

/// File in the directory that its process keeps locked.
const ALIVE: &str = "alive";
const SOCKET: &str = "socket";

/// Longest path of the parent directory, bytes. The socket's path has at most 107 (unix(7)).
const BASE_MAX: usize = 64;

/// Removed when dropped.
#[derive(Debug)]
pub(super) struct PrivateDir {
    path: PathBuf,
    alive: File,
    /// Process that removes it; a forked child does not.
    owner: u32,
}

impl PrivateDir {
    /// Makes a directory in that of temporary files, or in `/tmp` if its path is too long for a
    /// socket or has characters that device arguments cannot contain.
    ///
    /// # Errors
    /// Those of `mkdtemp`, `open` and `fcntl`. Nothing is left behind.
    pub(super) fn new() -> io::Result<Self> {
        let base = std::env::temp_dir();
        let path = base.as_os_str().as_encoded_bytes();
        let is_plain = |b: &u8| b.is_ascii_alphanumeric() || b"/._-".contains(b);
        let fits = base.is_absolute() && path.len() <= BASE_MAX && path.iter().all(is_plain);
        Self::new_in(if fits { &base } else { Path::new("/tmp") })
    }

    fn new_in(base: &Path) -> io::Result<Self> {
        remove_stale(base);
        loop {
            // Its mode is 0700.
            let path = mkdtemp(&base.join(format!("{PREFIX}XXXXXX")))?;
            match lock_new(&path) {
                Ok(Some(alive)) => return Ok(Self { path, alive, owner: std::process::id() }),
                // Another process took it for stale.
                Ok(None) => {}
                Err(why) => {
                    remove(&path);
                    return Err(why);
                }
            }
        }
    }

    /// Path of the socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.path.join(SOCKET)
    }
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        if self.owner == std::process::id() {
            remove(&self.path);
            end_life(&self.alive, 0);
        }
    }
}

/// Makes and locks the file [`ALIVE`] of a new directory. `None` if another process removes the
/// directory, since the file was not locked yet.
fn lock_new(dir: &Path) -> io::Result<Option<File>> {
    let mut options = OpenOptions::new();
    let alive = options.write(true).create_new(true).mode(0o600).open(dir.join(ALIVE))?;
    match show_life(&alive, 0) {
        Ok(()) => {}
        Err(why) if why.kind() == io::ErrorKind::WouldBlock => return Ok(None),
        Err(why) => return Err(why),
    }
    let is_there = alive.metadata().map(|file| file.nlink() > 0);
    if !matches!(is_there, Ok(true)) {
        end_life(&alive, 0);
    }
    Ok(is_there?.then_some(alive))
}

/// Removes the directories of killed processes of this user.
fn remove_stale(base: &Path) {
    let all = std::fs::read_dir(base).into_iter().flatten().flatten();
    let own = all.filter(|entry| {
        let is_own = |dir: std::fs::Metadata| dir.is_dir() && dir.uid() == geteuid().as_raw();
        entry.file_name().to_string_lossy().starts_with(PREFIX)
            && entry.metadata().is_ok_and(is_own)
    });
    for path in own.map(|entry| entry.path()) {
        // A directory without the file is being made.
        let Ok(alive) = OpenOptions::new().write(true).open(path.join(ALIVE)) else { continue };
        if show_life(&alive, 0).is_ok() {
            remove(&path);
            end_life(&alive, 0);
        }
    }
}

/// Removes a directory with its files, as far as they exist.
fn remove(path: &Path) {
    for file in [SOCKET, ALIVE] {
        let _ = std::fs::remove_file(path.join(file));
    }
    let _ = std::fs::remove_dir(path);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: no other user can enter the directory. It is removed with its owner, or by the next
    /// one if the owner was killed.
    #[test]
    fn a_directory_is_removed_with_its_owner_or_by_the_next() {
        let base = tempfile::tempdir().unwrap();
        let count = || std::fs::read_dir(&base).unwrap().count();
        let one = PrivateDir::new_in(base.path()).unwrap();
        assert_eq!(std::fs::metadata(&one.path).unwrap().mode() & 0o7777, 0o700);
        let _socket = std::os::unix::net::UnixListener::bind(one.socket()).unwrap();
        let other = PrivateDir::new_in(base.path()).unwrap();
        assert_eq!(count(), 2, "a directory in use is not stale");
        drop(other);
        assert_eq!(count(), 1);
        // As if its process were killed.
        end_life(&one.alive, 0);
        std::mem::forget(one);
        let next = PrivateDir::new_in(base.path()).unwrap();
        assert_eq!(count(), 1);
        assert!(next.path.is_dir());
        drop(next);
        assert_eq!(count(), 0);
    }
}
