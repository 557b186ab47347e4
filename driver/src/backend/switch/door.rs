//! Where processes of other users ask a switch for a segment.
//!
//! A connection is a process: its user is what the kernel says ([`PeerCredentials`]), and it lives
//! for as long as the connection does. Nothing that anybody does here makes the switch wait: a
//! message that does not fit a socket's buffer ends the connection, what is said there is closed
//! elsewhere ([`Apart`]), and a bounded number of them is looked at in a turn.

use std::collections::HashMap;
use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{Backlog, UnixAddr, getsockopt};
use nix::unistd::{Gid, chown};

use super::greeting::{Came, Message, Refusal, Socket};
use super::left::sweep;
use crate::backend::bound::BoundSocket;
use crate::backend::set_option;
use crate::backend::unix::{Apart, is_crowded};
use crate::error::OpenError;
use crate::port::Station;

/// Connections of one user at most, which say hello or not.
pub const GUESTS_MAX: usize = 255;
/// Whether who connects may hand descriptors over: an option of sockets since Linux 6.16.
const SO_PASSRIGHTS: libc::c_int = 83;
/// Connections made and connections looked at in a turn.
const ACCEPTS: usize = 4;
const EVENTS: usize = 16;
/// Time between two signs of life that the socket's file gives.
const TOUCH: Duration = Duration::from_secs(5);
/// What the listener is in the events, and what somebody else's descriptors are.
const LISTENER: u64 = 0;
pub(super) const OTHERS: u64 = u64::MAX;

/// Whom a switch serves besides its own user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Guests {
    /// Nobody: there is no socket to ask at.
    #[default]
    None,
    /// Whoever can reach the socket.
    All,
    /// These users.
    Users(Vec<u32>),
    /// Members of this group. The kernel sees to it, by the mode of the socket.
    Group(u32),
}

/// The socket, and the connections.
pub(super) struct Door {
    listener: BoundSocket,
    guests: Guests,
    /// Connections that each user may have.
    per_user: usize,
    connections: HashMap<u64, Connection>,
    last: u64,
    /// So much is being closed that nobody new is let in, and the listener wakes nobody.
    is_shut: bool,
    /// When the socket was last [touched](BoundSocket::touch).
    touched: Instant,
    /// Whose processes ask, for tests: a program has one user.
    #[cfg(test)]
    pub(super) taken_for: Option<u32>,
}

struct Connection {
    socket: Apart<Socket>,
    uid: u32,
    pid: u32,
    said_hello: bool,
}

/// What happened at the door.
pub(super) enum Event {
    /// A process asks to be a station.
    Asked(Asking),
    /// A connection has ended.
    Left(u64),
}

/// A process that asks.
pub(super) struct Asking {
    /// Its connection.
    pub(super) guest: u64,
    pub(super) uid: u32,
    /// As numbered here; 0 if it is not seen here.
    pub(super) pid: u32,
    pub(super) station: Option<Station>,
}

impl Door {
    /// Makes the socket, and its directory if there is none.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub(super) fn open(
        path: &Path,
        guests: Guests,
        per_user: usize,
        epoll: &Epoll,
    ) -> Result<Self, OpenError> {
        let hint = "; start the switch as root, or have root make the directory for this user";
        let os = |e: io::Error| OpenError::os("cannot serve other users at", path, e, hint);
        if let Some(dir) = path.parent().filter(|dir| !dir.exists()) {
            std::fs::create_dir_all(dir).map_err(os)?;
            std::fs::set_permissions(dir, Permissions::from_mode(0o755)).map_err(os)?;
        }
        let address = UnixAddr::new(path).map_err(|e| os(e.into()))?;
        let listener = BoundSocket::bind(&address).map_err(|e| os(e.into()))?;
        let door = Self {
            listener,
            guests,
            per_user: per_user.min(GUESTS_MAX),
            connections: HashMap::new(),
            last: 0,
            is_shut: false,
            touched: Instant::now(),
            #[cfg(test)]
            taken_for: None,
        };
        let mode = match door.guests {
            Guests::Group(gid) => {
                chown(path, None, Some(Gid::from_raw(gid))).map_err(|e| os(e.into()))?;
                0o660
            }
            _ => 0o666,
        };
        std::fs::set_permissions(path, Permissions::from_mode(mode)).map_err(os)?;
        // Connections have it from their listener. An older kernel takes descriptors, which are
        // then closed apart: a user whose take long to close can keep new ones of all users out.
        let _ = set_option(door.listener.fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, &0_i32);
        // After that: nobody comes in before the mode is right.
        door.listener.listen(Backlog::MAXCONN).map_err(|e| os(e.into()))?;
        door.hear_knocks(epoll).map_err(|e| os(e.into()))?;
        sweep(path);
        Ok(door)
    }

    /// Who wants in wakes the switch.
    fn hear_knocks(&self, epoll: &Epoll) -> nix::Result<()> {
        epoll.add(self.listener.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, LISTENER))
    }

    /// What has happened since the last time, a bounded number of things.
    pub(super) fn look(&mut self, epoll: &Epoll) -> Vec<Event> {
        if self.is_shut && !is_crowded() {
            self.is_shut = self.hear_knocks(epoll).is_err();
        }
        if self.touched.elapsed() >= TOUCH {
            self.touched = Instant::now();
            self.listener.touch();
        }
        let mut ready = [EpollEvent::empty(); EVENTS];
        let count = epoll.wait(&mut ready, EpollTimeout::ZERO).unwrap_or(0);
        let mut events = Vec::new();
        for event in &ready[..count] {
            match event.data() {
                LISTENER => self.accept(epoll),
                OTHERS => {}
                guest => events.extend(self.hear(guest)),
            }
        }
        events
    }

    fn accept(&mut self, epoll: &Epoll) {
        if is_crowded() {
            tracing::warn!(
                "connections of other users take long to close: nobody new is let in until they do"
            );
            self.is_shut = epoll.delete(self.listener.as_fd()).is_ok();
            return;
        }
        for _ in 0..ACCEPTS {
            // Without a descriptor left they wait, and those who are here go on.
            let Some(fd) = self.listener.accept() else { return };
            let socket = Apart::new(Socket::own(fd));
            let Ok(peer) = getsockopt(&socket.0, PeerCredentials) else { continue };
            let (uid, pid) = (peer.uid(), u32::try_from(peer.pid()).unwrap_or(0));
            #[cfg(test)]
            let uid = self.taken_for.unwrap_or(uid);
            let refusal = if self.serves(uid) { self.crowd(uid) } else { Some(Refusal::Stranger) };
            if let Some(why) = refusal {
                socket.say(Message::Refused(why), None);
                continue;
            }
            self.last += 1;
            let event = EpollEvent::new(EpollFlags::EPOLLIN, self.last);
            if epoll.add(socket.0.as_fd(), event).is_err() {
                socket.say(Message::Refused(Refusal::NoRoom), None);
                continue;
            }
            let connection = Connection { socket, uid, pid, said_hello: false };
            self.connections.insert(self.last, connection);
        }
    }

    fn serves(&self, uid: u32) -> bool {
        let is_own = uid == nix::unistd::geteuid().as_raw() || uid == 0;
        match &self.guests {
            Guests::None => is_own,
            Guests::All | Guests::Group(_) => true,
            Guests::Users(users) => is_own || users.contains(&uid),
        }
    }

    fn crowd(&self, uid: u32) -> Option<Refusal> {
        let there = self.connections.values().filter(|there| there.uid == uid).count();
        (there >= self.per_user).then_some(Refusal::Crowded)
    }

    fn hear(&mut self, guest: u64) -> Option<Event> {
        let there = self.connections.get_mut(&guest)?;
        match there.socket.hear(false) {
            Came::Nothing => None,
            Came::Message(Message::Hello(station), None) if !there.said_hello => {
                there.said_hello = true;
                Some(Event::Asked(Asking { guest, uid: there.uid, pid: there.pid, station }))
            }
            Came::Message(..) | Came::Unopened | Came::HungUp => {
                // Closing it takes it out of the epoll.
                self.connections.remove(&guest);
                Some(Event::Left(guest))
            }
        }
    }

    /// Answers a process that asked, and says whether it was heard. A connection that is refused or
    /// does not hear has ended.
    pub(super) fn answer(
        &mut self,
        guest: u64,
        answer: Result<(Station, impl AsRawFd), Refusal>,
    ) -> bool {
        let Some(there) = self.connections.get(&guest) else { return false };
        let is_in = match answer {
            Ok((station, file)) => {
                there.socket.say(Message::Welcome(station), Some(file.as_raw_fd()))
            }
            Err(why) => {
                there.socket.say(Message::Refused(why), None);
                false
            }
        };
        if !is_in {
            self.connections.remove(&guest);
        }
        is_in
    }
}
