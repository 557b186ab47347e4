//! Messages between a switch and a process over a Unix socket (`SOCK_SEQPACKET`): one request, and
//! one reply. The connection then stays open: its end tells each side that the other has ended.
//!
//! ```text
//! 0   "bwswitch"    8   kind    16  address, 0 for none    24  three words of the kind, or 0
//!
//! kind  1 hello: version of the process's segment layout
//!       2 welcome, with the descriptor of a segment of that layout
//!       3 relayed: the uplink (`Uplink::to_words`); later messages both ways are Ethernet frames
//!       4 named: the segment has a name, and that layout
//!      16 and up, refused: `REFUSALS`
//! ```
//!
//! # Stability
//! Processes outlive the switch that they attached to, and attach to one of another build: these
//! messages and [`Uplink::to_words`] do not change. A later build may add kinds, and gives an
//! unknown layout the reply `relayed`. See "What does not change" in docs/wires.md.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use nix::errno::Errno;

use crate::backend::bound::seqpacket;
use crate::backend::lock::NotInChildren;
use crate::backend::shm::Uplink;
use crate::backend::unix::{DeferredClose, Received, receive, send};
use crate::port::Station;

const MAGIC: u64 = u64::from_le_bytes(*b"bwswitch");
const WORDS: usize = 6;
const LEN: usize = 8 * WORDS;

/// A message of either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// Request of a process whose segments have the layout `version`: a station, with this address
    /// if there is one.
    Hello { station: Option<Station>, version: u64 },
    /// Reply of the switch: the station's address. The segment's descriptor comes with it.
    Welcome(Station),
    /// Reply of a switch whose segments have another layout: the station's address, and what its
    /// frames are forwarded to. From now on each message is a frame.
    Relayed(Station, Uplink),
    /// Reply of the switch to a process of its own user: it may join the segment by its name.
    Named,
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
const RELAYED: u64 = 3;
const NAMED: u64 = 4;
const REFUSED: u64 = 16;

impl Message {
    fn encode(self) -> [u8; LEN] {
        let (kind, address, rest) = match self {
            Self::Hello { station, version } => {
                (HELLO, station.map_or(0, Station::word), [version, 0, 0])
            }
            Self::Welcome(station) => (WELCOME, station.word(), [0; 3]),
            Self::Relayed(station, uplink) => (RELAYED, station.word(), uplink.to_words()),
            Self::Named => (NAMED, 0, [0; 3]),
            Self::Refused(why) => {
                let at = REFUSALS.iter().position(|&known| known == why).unwrap_or(0);
                (REFUSED + at as u64, 0, [0; 3])
            }
        };
        let mut bytes = [0; LEN];
        let words = [MAGIC, kind, address].into_iter().chain(rest);
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn parse(bytes: &[u8; LEN]) -> Option<Self> {
        let words: [u64; WORDS] = std::array::from_fn(|i| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[i * 8..][..8]);
            u64::from_le_bytes(word)
        });
        let [MAGIC, kind, address, rest @ ..] = words else { return None };
        let station = Some(Station::from_word(address)).filter(|_| address != 0);
        match (kind, station, rest) {
            (HELLO, station, [version, 0, 0]) => Some(Self::Hello { station, version }),
            (WELCOME, Some(station), [0, 0, 0]) => Some(Self::Welcome(station)),
            (RELAYED, Some(station), uplink) => {
                Some(Self::Relayed(station, Uplink::from_words(uplink)))
            }
            (NAMED, None, [0, 0, 0]) => Some(Self::Named),
            (_, None, [0, 0, 0]) => {
                let at = usize::try_from(kind.checked_sub(REFUSED)?).ok()?;
                REFUSALS.get(at).map(|&why| Self::Refused(why))
            }
            _ => None,
        }
    }
}

/// One end of a connection, or a listening socket. A forked child does not keep it open.
pub(super) struct Socket(pub(super) NotInChildren);

/// The socket of a client at the switch.
pub(super) type SharedSocket = Arc<DeferredClose<Socket>>;

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
        let mac = station.mac;
        let uplink = Uplink { mtu: 1500, link_bps: 9, damages: true, mac, ..Uplink::default() };
        let others = [
            Message::Hello { station: None, version: 8 },
            Message::Hello { station: Some(station), version: 9 },
            Message::Welcome(station),
            Message::Relayed(station, uplink),
            Message::Named,
        ];
        let all = others.into_iter().chain(REFUSALS.map(Message::Refused));
        for message in all {
            let bytes = message.encode();
            assert_eq!(Message::parse(&bytes), Some(message));
            for bit in 0..LEN * 8 {
                let mut other = bytes;
                other[bit / 8] ^= 1 << (bit % 8);
                let read = Message::parse(&other);
                // The uplink has two unused bytes.
                let is_unused = matches!(message, Message::Relayed(..)) && bit >= 64 * 5 + 48;
                assert!(read != Some(message) || is_unused, "{message:?} bit {bit}");
                assert!(bit >= 64 || read.is_none());
            }
        }
    }

    const HELLO: Message = Message::Hello { station: None, version: 8 };

    #[test]
    fn a_descriptor_is_received_and_noise_closes() {
        let (a, b) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let (a, b) = (Socket::own(a.into()), Socket::own(b.into()));
        assert!(matches!(b.recv(true), Incoming::Empty));
        assert!(a.send(HELLO, Some(a.fd())));
        assert!(matches!(b.recv(true), Incoming::Message(HELLO, Some(_))));
        assert!(a.send(HELLO, Some(a.fd())));
        assert!(matches!(b.recv(false), Incoming::Closed));
        assert!(a.send(HELLO, None));
        assert!(matches!(b.recv(false), Incoming::Message(HELLO, None)));
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
