//! What switches that were killed, and do not come back, left beside a socket.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::socket::UnixAddr;

use super::reserved::KEPT;
use crate::backend::bound::{inode, remove_stale};

/// Files that are removed at once, as each may take a while.
const FILES_MAX: usize = 16;

/// Removes sockets in the directory of `own` that nobody listens at, and records of addresses
/// without a socket, if they are so old that nobody waits for their switch any more. What cannot be
/// removed, or not at once, stays: `barewire doctor` tells of it.
pub(super) fn sweep(own: &Path) {
    let entries = own.parent().map(std::fs::read_dir).and_then(Result::ok);
    let paths: Vec<PathBuf> = entries.into_iter().flatten().flatten().map(|e| e.path()).collect();
    let ends = |path: &&PathBuf, with| path.extension() == Some(OsStr::new(with));
    let old = || paths.iter().filter(|path| *path != own && is_old(path));
    let sockets = old().filter(|path| ends(path, "sock"));
    for (path, which) in sockets.filter_map(|path| Some((path, inode(path)?))).take(FILES_MAX) {
        if let Ok(address) = UnixAddr::new(path) {
            // A switch that came meanwhile has made a file, which is young, or touched this one. A
            // number may be given again.
            let is_it = || inode(path) == Some(which) && is_old(path);
            let _ = remove_stale(path, &address, Duration::ZERO, is_it);
        }
    }
    let records = old().filter(|path| ends(path, "stations"));
    for path in records.filter(|path| !path.with_extension("sock").exists()).take(FILES_MAX) {
        let _ = std::fs::remove_file(path);
    }
}

/// Whether a file was last touched longer ago than addresses are kept ([`KEPT`]): no switch that
/// uses it lives, since that touches it every few seconds, and none is waited for.
fn is_old(path: &Path) -> bool {
    let touched = std::fs::symlink_metadata(path).and_then(|is| is.modified());
    touched.is_ok_and(|at| at.elapsed().is_ok_and(|ago| ago > KEPT))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::time::{Instant, SystemTime};

    use nix::sys::socket::Backlog;

    use super::*;
    use crate::backend::bound::{BoundSocket, lock_name, touch};

    /// Goal: what is old and dead goes; what lives, is young, or is no socket stays.
    #[test]
    fn what_the_dead_left_goes() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let bound = |name: &str| BoundSocket::bind(&UnixAddr::new(&at(name)).unwrap()).unwrap();
        let own = bound("own.sock");
        let alive = bound("alive.sock");
        alive.listen(Backlog::new(8).unwrap()).unwrap();
        // Of another type than ours: its end leaves it, as a kill leaves ours.
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
        let old = SystemTime::now() - 2 * KEPT;
        for entry in std::fs::read_dir(dir.path()).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap();
            if !["young", "back"].contains(&name) {
                let since = old.duration_since(SystemTime::UNIX_EPOCH).unwrap();
                touch(&path, since.into());
            }
        }
        // Somebody else looks at it, or any user keeps the name of who does.
        let watched = lock_name(&at("watched.sock"));
        let watched = BoundSocket::bind(&UnixAddr::new_abstract(watched.as_bytes()).unwrap());
        let begun = Instant::now();
        sweep(&at("own.sock"));
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
