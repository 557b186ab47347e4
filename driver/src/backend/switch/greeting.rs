//! What a switch and a process of another user say to each other over a Unix socket
//! (`SOCK_SEQPACKET`): one message each way, the answer with a descriptor. The connection then
//! stays, as a sign of life of either end.
//!
//! ```text
//! 0   "bw-guest"    8   kind    16  address, 0 for none
//! ```

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::errno::Errno;

use crate::backend::bound::seqpacket;
use crate::backend::lock::NotInChildren;
use crate::backend::unix::{Apart, Received, receive, send};
use crate::port::Station;

const MAGIC: u64 = u64::from_le_bytes(*b"bw-gues2");
const LEN: usize = 24;

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// The process: it wants to be a station, of this address if it has one.
    Hello(Option<Station>),
    /// The switch: it is one, of this address, in the segment that comes with this.
    Welcome(Station),
    /// The switch: it is none.
    Refused(Refusal),
}

/// Why a process is no station.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Processes of its user are not served.
    Stranger,
    /// Somebody has the address.
    AddressInUse,
    /// The address is none that a process of another user than the switch's may have.
    NotYours,
    /// Its user has as many stations as one may have.
    Crowded,
    /// The switch has no memory or no descriptor left.
    NoRoom,
}

/// Numbers of messages, in this order; refusals come last.
const REFUSALS: [Refusal; 5] = [
    Refusal::Stranger,
    Refusal::AddressInUse,
    Refusal::Crowded,
    Refusal::NoRoom,
    Refusal::NotYours,
];
const HELLO: u64 = 1;
const WELCOME: u64 = 2;
const REFUSED: u64 = 16;

impl Message {
    fn bytes(self) -> [u8; LEN] {
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

/// One end of a connection, or what makes some. A forked child does not keep it open.
pub(super) struct Socket(pub(super) NotInChildren);

/// What came from the other end.
pub(super) enum Came {
    Nothing,
    Message(Message, Option<Apart<OwnedFd>>),
    /// A message with a descriptor, of which this process may open no more.
    Unopened,
    /// It has gone, or says what makes no sense.
    HungUp,
}

impl Socket {
    /// One that is not connected, non-blocking.
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

    /// Sends a message, and says whether it went. Never blocks.
    pub(super) fn say(&self, message: Message, fd: Option<RawFd>) -> bool {
        send(self.fd(), &message.bytes(), fd) == Ok(LEN)
    }

    /// What has come, with a descriptor if `takes_fd`. Never blocks.
    pub(super) fn hear(&self, takes_fd: bool) -> Came {
        match self.receive(takes_fd) {
            // It did not read what we said, and what it said comes after this.
            Err(Errno::ECONNRESET) => self.receive(takes_fd).unwrap_or(Came::HungUp),
            Err(Errno::EAGAIN | Errno::EINTR) => Came::Nothing,
            Err(_gone) => Came::HungUp,
            Ok(came) => came,
        }
    }

    fn receive(&self, takes_fd: bool) -> nix::Result<Came> {
        let mut bytes = [0; LEN];
        let Received { len, fd, is_whole } = receive(self.fd(), &mut bytes, takes_fd)?;
        Ok(match Message::parse(&bytes) {
            Some(message) if is_whole && len == LEN => Came::Message(message, fd),
            Some(_) if takes_fd && fd.is_none() && len == LEN => Came::Unopened,
            _ => Came::HungUp,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: what is said is heard, and nothing else is: each bit of a message matters.
    #[test]
    fn messages_are_read_as_they_were_written() {
        let station = Station { number: 7, ..Station::at([2, 1, 2, 3, 4, 5]) };
        let hellos =
            [Message::Hello(None), Message::Hello(Some(station)), Message::Welcome(station)];
        let all = hellos.into_iter().chain(REFUSALS.map(Message::Refused));
        for message in all {
            let bytes = message.bytes();
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
    fn a_descriptor_comes_along_and_noise_hangs_up() {
        let (a, b) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let (a, b) = (Socket::own(a.into()), Socket::own(b.into()));
        assert!(matches!(b.hear(true), Came::Nothing));
        assert!(a.say(Message::Hello(None), Some(a.fd())));
        assert!(matches!(b.hear(true), Came::Message(Message::Hello(None), Some(_))));
        assert!(a.say(Message::Hello(None), Some(a.fd())));
        assert!(matches!(b.hear(false), Came::HungUp));
        assert!(a.say(Message::Hello(None), None));
        assert!(matches!(b.hear(false), Came::Message(Message::Hello(None), None)));
        nix::unistd::write(&a.0, b"noise").unwrap();
        assert!(matches!(b.hear(true), Came::HungUp));
    }

    /// Goal: who may open no more is told so, and not that nobody is there. Method: a forked child
    /// without any descriptor left.
    #[test]
    fn a_descriptor_that_cannot_be_made_is_told() {
        let (a, b) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let (a, b) = (Socket::own(a.into()), b);
        assert!(a.say(Message::Welcome(Station::at([2, 0, 0, 0, 0, 1])), Some(a.fd())));
        // SAFETY: the child only sets a limit, receives into its stack and ends.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: reads a limit that lives across the call.
            let set = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) };
            // Its parent's descriptor is the child's as well.
            let came = Socket::own(b.into()).hear(true);
            let good = set == 0 && matches!(came, Came::Unopened);
            // SAFETY: takes a number.
            unsafe { libc::_exit(i32::from(!good)) }
        }
        let mut status = 0;
        // SAFETY: writes the status to a number that lives across the call.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, status), (child, 0));
    }
}
