//! Messages between a switch and a process of another user over a Unix socket
//! (`SOCK_SEQPACKET`): one request, and one reply with a descriptor. The connection then stays
//! open: its end tells each side that the other has ended.
//!
//! ```text
//! 0   "bw-gues2"    8   kind    16  address, 0 for none
//! ```

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::errno::Errno;

use crate::backend::bound::seqpacket;
use crate::backend::lock::NotInChildren;
use crate::backend::unix::{DeferredClose, Received, receive, send};
use crate::port::Station;

const MAGIC: u64 = u64::from_le_bytes(*b"bw-gues2");
const LEN: usize = 24;

/// A message of either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// Request of the process: a station, with this address if there is one.
    Hello(Option<Station>),
    /// Reply of the switch: the station's address. The segment's descriptor comes with it.
    Welcome(Station),
    /// Reply of the switch: no station.
    Refused(Refusal),
}

/// Why a switch refuses a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The switch does not serve the process's user.
    UserNotServed,
    /// Another station has the address.
    AddressInUse,
    /// Processes of other users than the switch's may not have the address.
    AddressNotAllowed,
    /// The user has its maximum of stations.
    TooManyStations,
    /// The switch has no memory or no descriptor left.
    NoResources,
}

/// Refusals in the order of their message kinds, from [`REFUSED`] on.
const REFUSALS: [Refusal; 5] = [
    Refusal::UserNotServed,
    Refusal::AddressInUse,
    Refusal::TooManyStations,
    Refusal::NoResources,
    Refusal::AddressNotAllowed,
];
const HELLO: u64 = 1;
const WELCOME: u64 = 2;
const REFUSED: u64 = 16;

impl Message {
    fn encode(self) -> [u8; LEN] {
        let (kind, station) = match self {
            Self::Hello(station) => (HELLO, station.map_or(0, Station::word)),
            Self::Welcome(station) => (WELCOME, station.word()),
            Self::Refused(why) => {
                let at = REFUSALS.iter().position(|&known| known == why).unwrap_or(0);
                (REFUSED + at as u64, 0)
            }
        };
        let mut bytes = [0; LEN];
        for (to, word) in bytes.chunks_exact_mut(8).zip([MAGIC, kind, station]) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn parse(bytes: &[u8; LEN]) -> Option<Self> {
        let word = |i: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[i * 8..][..8]);
            u64::from_le_bytes(word)
        };
        let (kind, address) = (word(1), word(2));
        if word(0) != MAGIC {
            return None;
        }
        let station = Station::from_word(address);
        match kind {
            HELLO => Some(Self::Hello((address != 0).then_some(station))),
            WELCOME if address != 0 => Some(Self::Welcome(station)),
            _ if address == 0 => {
                let at = usize::try_from(kind.checked_sub(REFUSED)?).ok()?;
                REFUSALS.get(at).map(|&why| Self::Refused(why))
            }
            _ => None,
        }
    }
}

/// One end of a connection, or a listening socket. A forked child does not keep it open.
pub(super) struct Socket(pub(super) NotInChildren);

/// What a receive call found.
pub(super) enum Incoming {
    Empty,
    Message(Message, Option<DeferredClose<OwnedFd>>),
    /// A message whose descriptor was lost: this process has reached its limit of open files.
    NoDescriptor,
    /// The other end has closed the connection, or sent an invalid message.
    Closed,
}

impl Socket {
    /// Makes an unconnected, non-blocking socket.
    ///
    /// # Errors
    /// Those of `socket`.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self::own(seqpacket()?))
    }

    pub(super) fn own(fd: OwnedFd) -> Self {
        Self(fd.into())
    }

    pub(super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Sends a message with an optional descriptor. False if it was not sent. Never blocks.
    pub(super) fn send(&self, message: Message, fd: Option<RawFd>) -> bool {
        send(self.fd(), &message.encode(), fd) == Ok(LEN)
    }

    /// Receives the next message, with its descriptor if `takes_fd`. Never blocks.
    pub(super) fn recv(&self, takes_fd: bool) -> Incoming {
        match self.recv_once(takes_fd) {
            // The other end closed with our message unread. Its own message is still queued.
            Err(Errno::ECONNRESET) => self.recv_once(takes_fd).unwrap_or(Incoming::Closed),
            Err(Errno::EAGAIN | Errno::EINTR) => Incoming::Empty,
            Err(_gone) => Incoming::Closed,
            Ok(incoming) => incoming,
        }
    }

    fn recv_once(&self, takes_fd: bool) -> nix::Result<Incoming> {
        let mut bytes = [0; LEN];
        let Received { len, fd, is_whole } = receive(self.fd(), &mut bytes, takes_fd)?;
        Ok(match Message::parse(&bytes) {
            Some(message) if is_whole && len == LEN => Incoming::Message(message, fd),
            Some(_) if takes_fd && fd.is_none() && len == LEN => Incoming::NoDescriptor,
            _ => Incoming::Closed,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: every message parses to itself, and to nothing else once a bit is flipped.
    #[test]
    fn messages_parse_to_what_was_encoded() {
        let station = Station { number: 7, ..Station::at([2, 1, 2, 3, 4, 5]) };
        let hellos =
            [Message::Hello(None), Message::Hello(Some(station)), Message::Welcome(station)];
        let all = hellos.into_iter().chain(REFUSALS.map(Message::Refused));
        for message in all {
            let bytes = message.encode();
            assert_eq!(Message::parse(&bytes), Some(message));
            for bit in 0..LEN * 8 {
                let mut other = bytes;
                other[bit / 8] ^= 1 << (bit % 8);
                let read = Message::parse(&other);
                assert!(read != Some(message), "{message:?} bit {bit}");
                assert!(bit >= 64 || read.is_none());
            }
        }
    }

    #[test]
    fn a_descriptor_is_received_and_noise_closes() {
        let (a, b) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let (a, b) = (Socket::own(a.into()), Socket::own(b.into()));
        assert!(matches!(b.recv(true), Incoming::Empty));
        assert!(a.send(Message::Hello(None), Some(a.fd())));
        assert!(matches!(b.recv(true), Incoming::Message(Message::Hello(None), Some(_))));
        assert!(a.send(Message::Hello(None), Some(a.fd())));
        assert!(matches!(b.recv(false), Incoming::Closed));
        assert!(a.send(Message::Hello(None), None));
        assert!(matches!(b.recv(false), Incoming::Message(Message::Hello(None), None)));
        nix::unistd::write(&a.0, b"noise").unwrap();
        assert!(matches!(b.recv(true), Incoming::Closed));
    }

    /// Goal: a process at its limit of open files gets that error, and not a closed connection.
    /// Method: a forked child with a limit of 0.
    #[test]
    fn a_descriptor_beyond_the_limit_is_reported() {
        let (a, b) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let (a, b) = (Socket::own(a.into()), b);
        assert!(a.send(Message::Welcome(Station::at([2, 0, 0, 0, 0, 1])), Some(a.fd())));
        // SAFETY: the child only sets a limit, receives into its stack and ends.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: reads a limit that lives across the call.
            let set = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) };
            // Its parent's descriptor is the child's as well.
            let incoming = Socket::own(b.into()).recv(true);
            let good = set == 0 && matches!(incoming, Incoming::NoDescriptor);
            // SAFETY: takes a number.
            unsafe { libc::_exit(i32::from(!good)) }
        }
        let mut status = 0;
        // SAFETY: writes the status to a number that lives across the call.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, status), (child, 0));
    }
}
