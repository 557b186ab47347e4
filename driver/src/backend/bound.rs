//! A listening socket with a name: a file, or an abstract name.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::AT_FDCWD;
use nix::sys::socket::{
    AddressFamily, Backlog, Shutdown, SockFlag, SockType, UnixAddr, accept4, bind, connect, listen,
    shutdown, socket,
};
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;

use super::lock::NotInChildren;
use super::unix::{DeferredClose, has_close_backlog};

/// How long to wait for other processes that check the same file for staleness.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Accepts connections ([`SockType::SeqPacket`]) at its name. Forked children do not keep it open.
pub(super) struct BoundSocket {
    /// `None` only during drop.
    fd: Option<DeferredClose<NotInChildren>>,
    /// The file and its inode, unless the name is abstract.
    file: Option<(PathBuf, Inode)>,
}

/// Device and inode number of a file.
pub(super) type Inode = (u64, u64);

impl BoundSocket {
    /// Binds the name, and replaces a stale socket file of a dead process. Connections are refused
    /// until [`listen`](Self::listen).
    ///
    /// # Errors
    /// `EADDRINUSE` if a process has it, or another file is there; those of `socket`, `bind` and
    /// `unlink`. Nothing is left behind.
    pub(super) fn bind(address: &UnixAddr) -> Result<Self, Errno> {
        let fd = seqpacket()?;
        let fd = DeferredClose::new(NotInChildren::from(fd));
        let path = address.path();
        // Before the attempt: a later file may be of a process that does not listen yet.
        let old = path.and_then(inode);
        let mut bound = bind(fd.as_raw_fd(), address);
        if let (Err(Errno::EADDRINUSE), Some(path), Some(old)) = (bound, path, old) {
            remove_stale(path, address, LOCK_TIMEOUT, || inode(path) == Some(old))?;
            bound = bind(fd.as_raw_fd(), address);
        }
        bound?;
        let file = path.and_then(|path| Some((path.to_owned(), inode(path)?)));
        Ok(Self { fd: Some(fd), file })
    }

    /// Listens, with at most `backlog` connections that wait for [`accept`](Self::accept).
    ///
    /// # Errors
    /// Those of `listen`.
    pub(super) fn listen(&self, backlog: Backlog) -> Result<(), Errno> {
        listen(self, backlog)
    }

    /// The next connection, non-blocking; `None` if none waits, or descriptors are short.
    pub(super) fn accept(&self) -> Option<OwnedFd> {
        if has_close_backlog() {
            return None;
        }
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = accept4(self.fd(), flags).ok()?;
        // SAFETY: a descriptor that was just made and is nobody else's.
        Some(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Updates the file's time, which shows that a process listens.
    pub(super) fn touch(&self) {
        if let Some((path, _)) = &self.file {
            // Clients that find the file without a listener wait only if its time is recent.
            touch(path, TimeSpec::UTIME_NOW);
        }
    }

    pub(super) fn fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for BoundSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("taken by drop alone").as_fd()
    }
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        if let Some((path, is)) = &self.file {
            if inode(path) == Some(*is) {
                let _ = std::fs::remove_file(path);
            }
            // Connections are refused from now on, also if the descriptor is closed later.
            let _ = shutdown(self.fd(), Shutdown::Both);
            return;
        }
        // An abstract name is free once the descriptor is closed, on which callers rely.
        if let Some(fd) = self.fd.take() {
            drop(fd.into_inner());
        }
    }
}

/// A non-blocking seqpacket socket.
///
/// # Errors
/// Those of `socket`.
pub(super) fn seqpacket() -> Result<OwnedFd, Errno> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)
}

/// Sets the times of the file at `path`, not of a link's target, if it exists and is owned.
pub(super) fn touch(path: &Path, time: TimeSpec) {
    let _ = utimensat(AT_FDCWD, path, &time, &time, UtimensatFlags::NoFollowSymlink);
}

/// The inode of `path`, if it is a socket.
pub(super) fn inode(path: impl AsRef<Path>) -> Option<Inode> {
    let meta = std::fs::symlink_metadata(path).ok()?;
    meta.file_type().is_socket().then(|| (meta.dev(), meta.ino()))
}

/// Name of the lock for staleness checks of the socket at `path`.
pub(super) fn lock_name(path: &Path) -> String {
    let mut hasher = DefaultHasher::new();
    path.hash(&mut hasher);
    format!("barewire-bind-{:x}", hasher.finish())
}

/// Removes the socket at `path` if no process listens and `is_it` then confirms that it is the one
/// that the caller means. A lock serializes the processes that check, so that none removes what
/// another has made.
///
/// With `patience` it waits for the lock for so long, and then continues without it: any process
/// can take the lock's name. Without, the socket stays if another process has the lock.
///
/// # Errors
/// Those of `socket` and `unlink`; the socket stays.
pub(super) fn remove_stale(
    path: &Path,
    address: &UnixAddr,
    patience: Duration,
    is_it: impl Fn() -> bool,
) -> Result<(), Errno> {
    let (lock, lock_address) = (seqpacket()?, UnixAddr::new_abstract(lock_name(path).as_bytes())?);
    let until = Instant::now() + patience;
    while bind(lock.as_raw_fd(), &lock_address).is_err() {
        if patience.is_zero() {
            return Ok(());
        }
        if Instant::now() > until {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let is_dead = connect(seqpacket()?.as_raw_fd(), address) == Err(Errno::ECONNREFUSED);
    if is_dead && is_it() {
        tracing::info!(?path, "removing the socket of a dead process");
        std::fs::remove_file(path).map_err(|e| Errno::from_raw(e.raw_os_error().unwrap_or(0)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alone::is_alone;

    fn connects(address: &UnixAddr) -> bool {
        connect(seqpacket().unwrap().as_raw_fd(), address).is_ok()
    }

    fn listening(address: &UnixAddr) -> Result<BoundSocket, Errno> {
        let socket = BoundSocket::bind(address)?;
        socket.listen(Backlog::new(8).unwrap()).unwrap();
        Ok(socket)
    }

    /// Goal: the file of a dead process is replaced, that of a live one is not; it is removed with
    /// its socket, and another file that has replaced it stays.
    #[test]
    fn only_stale_files_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let address = UnixAddr::new(&path).unwrap();
        let dead = seqpacket().unwrap();
        bind(dead.as_raw_fd(), &address).unwrap();
        drop(dead);
        let first = listening(&address).unwrap();
        assert!(connects(&address));
        assert_eq!(listening(&address).err(), Some(Errno::EADDRINUSE));
        drop(first);
        assert!(!path.exists());
        let first = listening(&address).unwrap();
        let elsewhere = dir.path().join("elsewhere");
        std::fs::rename(&path, &elsewhere).unwrap();
        let second = listening(&address).unwrap();
        drop(first);
        assert!(!connects(&UnixAddr::new(&elsewhere).unwrap()), "it listens for nobody");
        assert!(connects(&address), "the second one's");
        drop(second);
        std::fs::write(&path, "no socket").unwrap();
        assert_eq!(listening(&address).err(), Some(Errno::EADDRINUSE));
        assert!(path.exists());
    }

    /// Goal: a socket that has replaced the stale one stays, also while no process listens at it
    /// yet, and without patience so does one whose lock is held.
    #[test]
    fn only_the_stale_socket_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let made = |path: &Path| {
            let socket = seqpacket().unwrap();
            bind(socket.as_raw_fd(), &UnixAddr::new(path).unwrap()).unwrap();
            socket
        };
        drop(made(&path));
        let dead = inode(&path);
        let elsewhere = dir.path().join("elsewhere");
        let bound = made(&elsewhere);
        std::fs::rename(&elsewhere, &path).unwrap();
        let address = UnixAddr::new(&path).unwrap();
        let remove = |patience, which| {
            remove_stale(&path, &address, patience, || inode(&path) == which).unwrap();
            path.exists()
        };
        assert!(remove(LOCK_TIMEOUT, dead), "it is another one's");
        drop(bound);
        let lock = seqpacket().unwrap();
        let name = UnixAddr::new_abstract(lock_name(&path).as_bytes()).unwrap();
        bind(lock.as_raw_fd(), &name).unwrap();
        let begun = Instant::now();
        assert!(remove(Duration::ZERO, inode(&path)));
        assert!(begun.elapsed() < LOCK_TIMEOUT / 2, "{:?}", begun.elapsed());
        drop(lock);
        assert!(!remove(Duration::ZERO, inode(&path)));
    }

    #[test]
    fn an_abstract_name_is_free_at_once() {
        let test = "backend::bound::tests::an_abstract_name_is_free_at_once";
        if !is_alone(test, |_| ()) {
            return;
        }
        let name = format!("barewire-bound-{}", std::process::id());
        let address = UnixAddr::new_abstract(name.as_bytes()).unwrap();
        for _ in 0..100 {
            let socket = listening(&address).unwrap();
            assert_eq!(listening(&address).err(), Some(Errno::EADDRINUSE));
            assert!(connects(&address));
            drop(socket);
        }
    }
}
