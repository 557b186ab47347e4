//! Stands between a memif server of ours and its clients while they connect.
//!
//! The driver greets a client in the call that accepts it. If the client has hung up by then, the
//! driver closes the socket and leaves it on the list of EAL's interrupt thread, which ends the
//! process over a descriptor that is not open (22.11 and later). A client that is killed at the
//! wrong time would take its server along. So the driver listens under a name that nobody knows,
//! and who connects to it is always this: the messages that go to and fro while a connection is
//! made, few and with descriptors in some, are passed on, and an end that has hung up is told to
//! the driver after its greeting. Frames do not come this way.
//!
//! Everything here runs in EAL's thread, while the interrupt thread stands or goes by itself.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Backlog, UnixAddr, connect};

use crate::backend::bound::{BoundSocket, seqpacket};
use crate::backend::unix::{Apart, Received, is_crowded, receive, send};

/// Clients that may be connected, or about to be, at a time; more wait.
const CLIENTS: usize = 256;

/// Messages of a client that are passed on in a turn, each way: more than it takes to connect.
const MESSAGES: usize = 32;

/// Longest message. The protocol's are 128 bytes.
const MESSAGE: usize = 512;

/// The socket that clients know.
pub(super) struct Relay {
    public: BoundSocket,
    /// Where the driver listens.
    private: UnixAddr,
    clients: Vec<Client>,
}

/// A client, and our connection to the driver in its place.
struct Client {
    outer: Apart<OwnedFd>,
    inner: OwnedFd,
    /// The driver has spoken, so it may be hung up on.
    is_greeted: bool,
    has_left: bool,
}

impl Relay {
    /// Listens at `name`, a file or not, for the driver, who listens at `private`, which is none.
    ///
    /// # Errors
    /// Somebody has the name, or it cannot be one.
    pub(super) fn open(name: &str, is_file: bool, private: &str) -> io::Result<Self> {
        let public = BoundSocket::bind(&address(name, is_file)?)?;
        public.listen(Backlog::new(8)?)?;
        Ok(Self { public, private: address(private, false)?, clients: Vec::new() })
    }

    /// Takes new clients, and passes on what there is to be passed on.
    pub(super) fn pump(&mut self) {
        while self.clients.len() < CLIENTS
            && !is_crowded()
            && is_ready(&self.public, PollFlags::POLLIN)
            && let Some(client) = self.accept()
        {
            self.clients.push(client);
        }
        self.clients.retain_mut(Client::pump);
    }

    fn accept(&self) -> Option<Client> {
        let outer = Apart::new(self.public.accept()?);
        let inner = seqpacket().ok()?;
        // The driver's queue is short. Who finds it full is hung up on, and comes again.
        connect(inner.as_raw_fd(), &self.private).ok()?;
        Some(Client { outer, inner, is_greeted: false, has_left: false })
    }
}

impl Client {
    /// Passes on what there is, and says whether there is a connection still.
    fn pump(&mut self) -> bool {
        self.has_left |= !pass_on(&self.outer, &self.inner, &mut false);
        let stays = pass_on(&self.inner, &self.outer, &mut self.is_greeted);
        stays && !(self.has_left && self.is_greeted)
    }
}

/// Passes on the messages that wait at `from`, [`MESSAGES`] at most, as far as `to` takes them now,
/// and notes if there were any. False if `from` has hung up and everything it said was passed on,
/// or if it sent a message that is longer, or has more descriptors, than the protocol's.
fn pass_on(from: &OwnedFd, to: &OwnedFd, any: &mut bool) -> bool {
    let mut bytes = [0; MESSAGE];
    for _ in 0..MESSAGES {
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
        *any = true;
        // Who has hung up is heard of when it is read from.
        let fd = fd.as_ref().map(|fd| fd.as_raw_fd());
        let _ = send(to.as_raw_fd(), &bytes[..len], fd);
    }
    true
}

/// Whether one of `events` is there.
fn is_ready(fd: &impl AsFd, events: PollFlags) -> bool {
    let mut fds = [PollFd::new(fd.as_fd(), events)];
    let found = poll(&mut fds, PollTimeout::ZERO);
    found.is_ok_and(|n| n > 0) && fds[0].revents().is_some_and(|seen| seen.intersects(events))
}

/// Whether the other side has hung up.
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
    use super::*;
    use crate::backend::unix::tests::{is_alone, joined, send};

    /// Goal: a client that says without end what nobody hears is not all that is looked at.
    #[test]
    fn a_client_has_a_turn_and_no_more() {
        for is_heard in [true, false] {
            let ([client, outer], [inner, driver]) = (joined(), joined());
            (0..MESSAGES + 1).for_each(|_| send(&client, &[7; 128], &client, 0));
            let driver = is_heard.then_some(driver);
            assert!(pass_on(&outer, &inner, &mut false));
            let left = receive(outer.as_raw_fd(), &mut [0; MESSAGE], true);
            assert_eq!(left.map(|left| left.len), Ok(128), "after {MESSAGES}");
            drop(driver);
        }
    }

    /// Goal: the socket of a server that is dead is taken over, and goes with the relay; one that
    /// somebody else has made in its place stays.
    #[test]
    fn a_file_is_removed_by_whose_socket_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("relay.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let open = || Relay::open(path.to_str().unwrap(), true, "barewire-nobody").unwrap();
        drop(open());
        assert!(!path.exists());
        let relay = open();
        std::fs::remove_file(&path).unwrap();
        let other = std::os::unix::net::UnixListener::bind(&path).unwrap();
        drop(relay);
        assert!(path.exists(), "{other:?}");
    }

    /// Goal: one descriptor is passed on and closed here; a client that sends more is hung up on.
    #[test]
    fn descriptors_do_not_stay_open() {
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        for times in [0, 1, 13, 253] {
            let ([client, outer], [inner, driver]) = (joined(), joined());
            send(&client, &[7; 128], &file, times);
            let mut any = false;
            assert_eq!(pass_on(&outer, &inner, &mut any), times < 2, "{times}");
            assert_eq!(any, times < 2, "{times}");
            let got = receive(driver.as_raw_fd(), &mut [0; MESSAGE], true);
            let got = got.ok().map(|got| (got.len, got.fd.is_some()));
            assert_eq!(got, (times < 2).then_some((128, times == 1)), "{times}");
            drop((outer, inner, driver));
            assert!(is_alone(&file), "{times}");
        }
    }
}
