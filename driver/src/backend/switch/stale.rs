//! Removal of stale files: sockets and address records of switches that were killed for good.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::socket::UnixAddr;

use super::reserved::RESERVED_FOR;
use crate::backend::bound::{inode, remove_stale};

/// Most files of each kind removed per call: each may take a while.
const FILES_MAX: usize = 16;

/// Removes sockets without a listener and address records without a socket from the directory of
/// `own`, if they are older than [`RESERVED_FOR`] and their names begin with `prefix`. Files that
/// cannot be removed, or not without waiting, stay: `barewire doctor` reports them.
pub(super) fn sweep(own: &Path, prefix: &str) {
    let entries = own.parent().map(std::fs::read_dir).and_then(Result::ok);
    let paths: Vec<PathBuf> = entries.into_iter().flatten().flatten().map(|e| e.path()).collect();
    let ends = |path: &&PathBuf, with| path.extension() == Some(OsStr::new(with));
    let begins =
        |path: &Path| path.file_name().is_some_and(|it| it.to_string_lossy().starts_with(prefix));
    let old = || paths.iter().filter(|path| *path != own && begins(path) && is_old(path));
    let sockets = old().filter(|path| ends(path, "sock"));
    for (path, which) in sockets.filter_map(|path| Some((path, inode(path)?))).take(FILES_MAX) {
        if let Ok(address) = UnixAddr::new(path) {
            // A switch that started meanwhile has made a new file, or touched this one. Inode
            // numbers are reused, so the age is checked as well.
            let is_it = || inode(path) == Some(which) && is_old(path);
            let _ = remove_stale(path, &address, Duration::ZERO, is_it);
        }
    }
    let records = old().filter(|path| ends(path, "stations"));
    for path in records.filter(|path| !path.with_extension("sock").exists()).take(FILES_MAX) {
        let _ = std::fs::remove_file(path);
    }
}

/// Whether a file was last touched longer than [`RESERVED_FOR`] ago. A live switch touches its
/// socket every few seconds, and no client waits that long for the next switch.
fn is_old(path: &Path) -> bool {
    let touched = std::fs::symlink_metadata(path).and_then(|is| is.modified());
    touched.is_ok_and(|at| at.elapsed().is_ok_and(|ago| ago > RESERVED_FOR))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::time::{Instant, SystemTime};

    use nix::sys::socket::Backlog;

    use super::*;
    use crate::backend::bound::{BoundSocket, lock_name, touch};

    /// Goal: stale files are removed; sockets with a listener, young files and other files stay.
    #[test]
    fn stale_files_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let bound = |name: &str| BoundSocket::bind(&UnixAddr::new(&at(name)).unwrap()).unwrap();
        let own = bound("own.sock");
        let alive = bound("alive.sock");
        alive.listen(Backlog::new(8).unwrap()).unwrap();
        // The standard library's listener leaves its file when dropped, as a killed switch does.
        for name in ["dead.sock", "young.sock", "apart.sock", "watched.sock"] {
            drop(UnixListener::bind(at(name)).unwrap());
        }
        let records = ["own", "alive", "dead", "young", "ended", "back"];
        for name in records {
            std::fs::write(at(&format!("{name}.stations")), "").unwrap();
        }
        for name in ["file.sock", "other"] {
            std::fs::write(at(name), "").unwrap();
        }
        let old = SystemTime::now() - 2 * RESERVED_FOR;
        for entry in std::fs::read_dir(dir.path()).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap();
            if !["young", "back"].contains(&name) {
                let since = old.duration_since(SystemTime::UNIX_EPOCH).unwrap();
                touch(&path, since.into());
            }
        }
        // Another process checks this socket, or any user holds the lock's name.
        let watched = lock_name(&at("watched.sock"));
        let watched = BoundSocket::bind(&UnixAddr::new_abstract(watched.as_bytes()).unwrap());
        let begun = Instant::now();
        sweep(&at("own.sock"), "");
        assert!(begun.elapsed() < Duration::from_millis(500), "{:?}", begun.elapsed());
        let left = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name());
        let mut left: Vec<String> = left.map(|name| name.into_string().unwrap()).collect();
        left.sort_unstable();
        let stay = [
            "alive.sock",
            "alive.stations",
            "back.stations",
            "file.sock",
            "other",
            "own.sock",
            "own.stations",
            "watched.sock",
            "young.sock",
            "young.stations",
        ];
        assert_eq!(left, stay);
        drop((own, alive, watched));
    }
}
