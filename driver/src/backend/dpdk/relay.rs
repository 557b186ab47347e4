//! Relay between a memif server of this process and its clients while they connect.
//!
//! The driver sends its hello in the call that accepts a client. If the client has disconnected by
//! then, the driver closes the socket but leaves it registered with EAL's interrupt thread, which
//! aborts the process over the invalid descriptor (22.11 and later). So a client that is killed at
//! the wrong time would take its server down. Therefore the driver listens on a file that no other
//! user can reach, and only this relay connects to it: it forwards the few control messages of a
//! connection, some with descriptors, and reports a disconnect to the driver only after its hello.
//! Frames do not pass the relay.
//!
//! Everything here runs in EAL's thread, whether or not the interrupt thread is parked.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Backlog, UnixAddr, connect};

use crate::backend::bound::{BoundSocket, seqpacket};
use crate::backend::unix::{DeferredClose, Received, has_close_backlog, is_trusted, receive, send};

/// Limit on connected and connecting clients; further ones wait.
const CLIENTS_MAX: usize = 256;

/// Messages of a client that are forwarded per turn and direction: more than a connection takes.
const MESSAGES_PER_TURN: usize = 32;

/// Connections that wait to be accepted, at most.
const BACKLOG: i32 = 8;

/// Longest message, bytes. The protocol's are 128 bytes.
const MESSAGE_LEN_MAX: usize = 512;

/// The public socket and its clients.
pub(super) struct Relay {
    public: BoundSocket,
    /// The public name is a path, whose permissions restrict who connects. An abstract name has no
    /// permissions: only processes of this user and root are accepted.
    is_file: bool,
    /// Address that the driver listens on.
    private: UnixAddr,
    clients: Vec<Client>,
}

/// A client, and the relay's connection to the driver for it.
struct Client {
    outer: DeferredClose<OwnedFd>,
    inner: OwnedFd,
    /// The driver has sent its hello, so a disconnect is safe.
    is_greeted: bool,
    has_left: bool,
}

impl Relay {
    /// Listens at `name`, a path or abstract, on behalf of the driver, which listens at the path
    /// `private`.
    ///
    /// # Errors
    /// The name is in use or invalid.
    pub(super) fn open(name: &str, is_file: bool, private: &Path) -> io::Result<Self> {
        let public = BoundSocket::bind(&address(name, is_file)?)?;
        public.listen(Backlog::new(BACKLOG)?)?;
        Ok(Self { public, is_file, private: UnixAddr::new(private)?, clients: Vec::new() })
    }

    /// Accepts new clients and forwards pending messages.
    pub(super) fn pump(&mut self) {
        while self.clients.len() < CLIENTS_MAX
            && !has_close_backlog()
            && is_ready(&self.public, PollFlags::POLLIN)
            && let Some(client) = self.accept()
        {
            self.clients.push(client);
        }
        self.clients.retain_mut(Client::pump);
    }

    fn accept(&self) -> Option<Client> {
        let outer = (0..BACKLOG).find_map(|_| {
            let outer = DeferredClose::new(self.public.accept()?);
            let is_accepted = self.is_file || is_trusted(&outer);
            if !is_accepted {
                tracing::debug!("a client of another user is refused");
            }
            is_accepted.then_some(outer)
        })?;
        let inner = seqpacket().ok()?;
        // The driver's backlog is short. A client that finds it full is disconnected, and retries.
        connect(inner.as_raw_fd(), &self.private).ok()?;
        Some(Client { outer, inner, is_greeted: false, has_left: false })
    }
}

impl Client {
    /// Forwards pending messages; false if the connection has ended.
    fn pump(&mut self) -> bool {
        self.has_left |= !forward(&self.outer, &self.inner, &mut false);
        let stays = forward(&self.inner, &self.outer, &mut self.is_greeted);
        stays && !(self.has_left && self.is_greeted)
    }
}

/// Forwards the messages pending at `from`, at most [`MESSAGES_PER_TURN`], while `to` accepts them,
/// and sets `has_forwarded` if there were any. False if `from` has disconnected and all its
/// messages were forwarded, or if a message is longer, or has more descriptors, than the protocol
/// allows.
fn forward(from: &OwnedFd, to: &OwnedFd, has_forwarded: &mut bool) -> bool {
    let mut bytes = [0; MESSAGE_LEN_MAX];
    for _ in 0..MESSAGES_PER_TURN {
        if !is_ready(to, PollFlags::POLLOUT) && !is_gone(to) {
            return true;
        }
        let Received { len, fd, is_whole } = match receive(from.as_raw_fd(), &mut bytes, true) {
            Ok(got) => got,
            Err(Errno::EAGAIN | Errno::EINTR) => return true,
            Err(_gone) => return false,
        };
        if len == 0 || !is_whole {
            return false;
        }
        *has_forwarded = true;
        // A disconnect of `to` is detected when it is read from.
        let fd = fd.as_ref().map(|fd| fd.as_raw_fd());
        let _ = send(to.as_raw_fd(), &bytes[..len], fd);
    }
    true
}

/// Whether one of `events` is pending.
fn is_ready(fd: &impl AsFd, events: PollFlags) -> bool {
    let mut fds = [PollFd::new(fd.as_fd(), events)];
    let found = poll(&mut fds, PollTimeout::ZERO);
    found.is_ok_and(|n| n > 0) && fds[0].revents().is_some_and(|seen| seen.intersects(events))
}

/// Whether the peer has disconnected.
fn is_gone(fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(fd.as_fd(), PollFlags::empty())];
    let gone = PollFlags::POLLHUP | PollFlags::POLLERR;
    poll(&mut fds, PollTimeout::ZERO).is_ok()
        && fds[0].revents().is_some_and(|seen| seen.intersects(gone))
}

fn address(name: &str, is_file: bool) -> io::Result<UnixAddr> {
    let address =
        if is_file { UnixAddr::new(name) } else { UnixAddr::new_abstract(name.as_bytes()) };
    Ok(address?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::backend::unix::tests::{is_alone, send, socket_pair};

    /// Goal: a client that floods the relay gets one turn and no more.
    #[test]
    fn a_client_has_a_turn_and_no_more() {
        for is_heard in [true, false] {
            let ([client, outer], [inner, driver]) = (socket_pair(), socket_pair());
            (0..MESSAGES_PER_TURN + 1).for_each(|_| send(&client, &[7; 128], &client, 0));
            let driver = is_heard.then_some(driver);
            assert!(forward(&outer, &inner, &mut false));
            let left = receive(outer.as_raw_fd(), &mut [0; MESSAGE_LEN_MAX], true);
            assert_eq!(left.map(|left| left.len), Ok(128), "after {MESSAGES_PER_TURN}");
            drop(driver);
        }
    }

    /// Goal: the stale socket file of a dead server is replaced, and is removed with the relay; a
    /// file that another process has made in its place stays.
    #[test]
    fn a_file_is_removed_by_whose_socket_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("relay.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let open = || Relay::open(path.to_str().unwrap(), true, Path::new("/nobody")).unwrap();
        drop(open());
        assert!(!path.exists());
        let relay = open();
        std::fs::remove_file(&path).unwrap();
        let other = std::os::unix::net::UnixListener::bind(&path).unwrap();
        drop(relay);
        assert!(path.exists(), "{other:?}");
    }

    /// Goal: an abstract name accepts no process of another user; a file accepts whom its
    /// permissions do. Method: a thread of another user connects.
    #[test]
    fn an_abstract_name_accepts_its_user_alone() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIPPED: needs root to be another user");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o755)).unwrap();
        let path = |name: &str| dir.path().join(name);
        let driver = BoundSocket::bind(&UnixAddr::new(&path("driver")).unwrap()).unwrap();
        driver.listen(Backlog::new(8).unwrap()).unwrap();
        let name = format!("barewire-unit-relay-{}", std::process::id());
        for (name, is_file) in [(name.as_str(), false), (path("public").to_str().unwrap(), true)] {
            let mut relay = Relay::open(name, is_file, &path("driver")).unwrap();
            if is_file {
                std::fs::set_permissions(name, PermissionsExt::from_mode(0o777)).unwrap();
            }
            let connect_as = |uid: libc::c_long| {
                let to = address(name, is_file).unwrap();
                let connected = std::thread::spawn(move || {
                    // SAFETY: takes numbers. The system call, unlike libc's function, changes this
                    // thread alone, which ends with it.
                    let done = unsafe { libc::syscall(libc::SYS_setresuid, -1_i64, uid, -1_i64) };
                    assert_eq!(done, 0);
                    let client = seqpacket().unwrap();
                    connect(client.as_raw_fd(), &to).unwrap();
                    client
                });
                connected.join().unwrap()
            };
            // The relay closes refused connections in another thread.
            let other = connect_as(65_534);
            let own = connect_as(0);
            relay.pump();
            assert_eq!(relay.clients.len(), if is_file { 2 } else { 1 }, "{name}");
            let start = Instant::now();
            while !is_file && !is_gone(&other) {
                assert!(start.elapsed() < Duration::from_secs(10), "it stays connected");
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(!is_gone(&own));
        }
    }

    /// Goal: one descriptor is forwarded and closed here; a client that sends more is disconnected.
    #[test]
    fn descriptors_do_not_stay_open() {
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        for times in [0, 1, 13, 253] {
            let ([client, outer], [inner, driver]) = (socket_pair(), socket_pair());
            send(&client, &[7; 128], &file, times);
            let mut has_forwarded = false;
            assert_eq!(forward(&outer, &inner, &mut has_forwarded), times < 2, "{times}");
            assert_eq!(has_forwarded, times < 2, "{times}");
            let got = receive(driver.as_raw_fd(), &mut [0; MESSAGE_LEN_MAX], true);
            let got = got.ok().map(|got| (got.len, got.fd.is_some()));
            assert_eq!(got, (times < 2).then_some((128, times == 1)), "{times}");
            drop((outer, inner, driver));
            assert!(is_alone(&file), "{times}");
        }
    }
}
