//! What switches that were killed, and do not come back, left beside a socket.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use nix::sys::socket::UnixAddr;

use super::reserved::KEPT;
use crate::backend::bound::{inode, remove_stale};

/// Files that are removed at once, as each may take a while.
const FILES_MAX: usize = 16;

/// Removes sockets in the directory of `own` that nobody listens at, and records of addresses
/// without a socket, if they are so old that nobody waits for their switch any more. What cannot be
/// removed stays: `barewire doctor` tells of it.
pub(super) fn sweep(own: &Path) {
    let entries = own.parent().map(std::fs::read_dir).and_then(Result::ok);
    let paths: Vec<PathBuf> = entries.into_iter().flatten().flatten().map(|e| e.path()).collect();
    let ends = |path: &&PathBuf, with| path.extension() == Some(OsStr::new(with));
    let old = || paths.iter().filter(|path| *path != own && is_old(path));
    for path in old().filter(|path| ends(path, "sock") && inode(path).is_some()).take(FILES_MAX) {
        if let Ok(address) = UnixAddr::new(path) {
            let _ = remove_stale(path, &address);
        }
    }
    let records = old().filter(|path| ends(path, "stations"));
    for path in records.filter(|path| !path.with_extension("sock").exists()).take(FILES_MAX) {
        let _ = std::fs::remove_file(path);
    }
}

/// Whether a file was last touched before a switch that is to come back would have.
fn is_old(path: &Path) -> bool {
    let touched = std::fs::symlink_metadata(path).and_then(|is| is.modified());
    touched.is_ok_and(|at| at.elapsed().is_ok_and(|ago| ago > KEPT))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::time::SystemTime;

    use nix::sys::socket::Backlog;

    use super::*;
    use crate::backend::bound::{BoundSocket, touch};

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
        for name in ["dead.sock", "young.sock", "apart.sock"] {
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
        sweep(&at("own.sock"));
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
            "young.sock",
            "young.stations",
        ];
        assert_eq!(left, stay);
        drop((own, alive));
    }
}
