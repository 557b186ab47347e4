//! The listening socket at which processes of other users ask a switch for a segment.
//!
//! One connection is one process: the kernel tells its user ([`PeerCredentials`]), and its end is
//! the end of the connection. No client can make the switch wait: a message that does not fit the
//! socket's buffer ends the connection, sockets and descriptors are closed by another thread
//! ([`DeferredClose`]), and a turn handles a bounded number of events.

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

use super::handshake::{Incoming, Message, Refusal, Socket};
use super::stale::sweep;
use crate::backend::bound::BoundSocket;
use crate::backend::set_option;
use crate::backend::unix::{DeferredClose, has_close_backlog};
use crate::error::OpenError;
use crate::port::Station;

/// Most connections of one user, whether they have sent a request or not.
pub const CLIENTS_MAX: usize = 255;
/// Socket option that permits received descriptors; Linux 6.16 and later.
const SO_PASSRIGHTS: libc::c_int = 83;
/// Most connections accepted, and most epoll events handled, per call of [`Listener::poll`].
const ACCEPTS_MAX: usize = 4;
const EVENTS_MAX: usize = 16;
/// Interval at which the socket's file is touched.
const TOUCH_EVERY: Duration = Duration::from_secs(5);
/// Epoll data of the listening socket, and of the switch's other descriptors. Connections have
/// numbers from 1.
const LISTENER: u64 = 0;
pub(super) const NOT_A_CLIENT: u64 = u64::MAX;

/// The users that a switch serves besides its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ServedUsers {
    /// None: there is no socket.
    #[default]
    None,
    /// Every user who can reach the socket.
    All,
    /// These users.
    Users(Vec<u32>),
    /// Members of this group; enforced by the socket's mode.
    Group(u32),
}

/// The listening socket and its connections.
pub(super) struct Listener {
    socket: BoundSocket,
    served: ServedUsers,
    /// Most connections of each user.
    per_user: usize,
    connections: HashMap<u64, Connection>,
    last_client: u64,
    /// Too many descriptors wait to be closed: the listening socket is out of the epoll.
    is_paused: bool,
    /// When the socket was last [touched](BoundSocket::touch).
    touched: Instant,
    /// The user that connecting processes count as: a test program has one user.
    #[cfg(test)]
    pub(super) test_uid: Option<u32>,
}

struct Connection {
    socket: DeferredClose<Socket>,
    uid: u32,
    pid: u32,
    has_requested: bool,
}

/// An event of a connection.
pub(super) enum Event {
    /// A process asks to be a station.
    Attach(AttachRequest),
    /// A connection has ended.
    Disconnected(u64),
}

/// A process that asks for a station.
pub(super) struct AttachRequest {
    /// Its connection.
    pub(super) client: u64,
    pub(super) uid: u32,
    /// In this pid namespace; 0 if the process is not visible here.
    pub(super) pid: u32,
    pub(super) station: Option<Station>,
}

impl Listener {
    /// Makes the socket, and its directory if there is none.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub(super) fn open(
        path: &Path,
        served: ServedUsers,
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
        let socket = BoundSocket::bind(&address).map_err(|e| os(e.into()))?;
        let listener = Self {
            socket,
            served,
            per_user: per_user.min(CLIENTS_MAX),
            connections: HashMap::new(),
            last_client: 0,
            is_paused: false,
            touched: Instant::now(),
            #[cfg(test)]
            test_uid: None,
        };
        let mode = match listener.served {
            ServedUsers::Group(gid) => {
                chown(path, None, Some(Gid::from_raw(gid))).map_err(|e| os(e.into()))?;
                0o660
            }
            _ => 0o666,
        };
        std::fs::set_permissions(path, Permissions::from_mode(mode)).map_err(os)?;
        // Connections inherit it. An older kernel accepts descriptors, which are then closed by
        // another thread: a user whose descriptors close slowly can delay new connections of all.
        let _ = set_option(listener.socket.fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, &0_i32);
        // Last: nobody can connect before the mode is set.
        listener.socket.listen(Backlog::MAXCONN).map_err(|e| os(e.into()))?;
        listener.watch_socket(epoll).map_err(|e| os(e.into()))?;
        sweep(path);
        Ok(listener)
    }

    /// Lets new connections wake the switch.
    fn watch_socket(&self, epoll: &Epoll) -> nix::Result<()> {
        epoll.add(self.socket.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, LISTENER))
    }

    /// Accepts connections and returns the events since the last call, at most [`EVENTS_MAX`].
    pub(super) fn poll(&mut self, epoll: &Epoll) -> Vec<Event> {
        if self.is_paused && !has_close_backlog() {
            self.is_paused = self.watch_socket(epoll).is_err();
        }
        if self.touched.elapsed() >= TOUCH_EVERY {
            self.touched = Instant::now();
            self.socket.touch();
        }
        let mut ready = [EpollEvent::empty(); EVENTS_MAX];
        let count = epoll.wait(&mut ready, EpollTimeout::ZERO).unwrap_or(0);
        let mut events = Vec::new();
        for event in &ready[..count] {
            match event.data() {
                LISTENER => self.accept(epoll),
                NOT_A_CLIENT => {}
                client => events.extend(self.read_request(client)),
            }
        }
        events
    }

    fn accept(&mut self, epoll: &Epoll) {
        if has_close_backlog() {
            tracing::warn!(
                "connections of other users take long to close: nobody new is let in until they do"
            );
            self.is_paused = epoll.delete(self.socket.as_fd()).is_ok();
            return;
        }
        for _ in 0..ACCEPTS_MAX {
            // Without a free descriptor new connections wait; existing ones go on.
            let Some(fd) = self.socket.accept() else { return };
            let socket = DeferredClose::new(Socket::own(fd));
            let Ok(peer) = getsockopt(&socket.0, PeerCredentials) else { continue };
            let (uid, pid) = (peer.uid(), u32::try_from(peer.pid()).unwrap_or(0));
            #[cfg(test)]
            let uid = self.test_uid.unwrap_or(uid);
            let refusal =
                if self.serves(uid) { self.check_quota(uid) } else { Some(Refusal::UserNotServed) };
            if let Some(why) = refusal {
                socket.send(Message::Refused(why), None);
                continue;
            }
            self.last_client += 1;
            let event = EpollEvent::new(EpollFlags::EPOLLIN, self.last_client);
            if epoll.add(socket.0.as_fd(), event).is_err() {
                socket.send(Message::Refused(Refusal::NoResources), None);
                continue;
            }
            let connection = Connection { socket, uid, pid, has_requested: false };
            self.connections.insert(self.last_client, connection);
        }
    }

    fn serves(&self, uid: u32) -> bool {
        let is_own = uid == nix::unistd::geteuid().as_raw() || uid == 0;
        match &self.served {
            ServedUsers::None => is_own,
            ServedUsers::All | ServedUsers::Group(_) => true,
            ServedUsers::Users(users) => is_own || users.contains(&uid),
        }
    }

    fn check_quota(&self, uid: u32) -> Option<Refusal> {
        let count = self.connections.values().filter(|connection| connection.uid == uid).count();
        (count >= self.per_user).then_some(Refusal::TooManyStations)
    }

    fn read_request(&mut self, client: u64) -> Option<Event> {
        let connection = self.connections.get_mut(&client)?;
        match connection.socket.recv(false) {
            Incoming::Empty => None,
            Incoming::Message(Message::Hello(station), None) if !connection.has_requested => {
                connection.has_requested = true;
                Some(Event::Attach(AttachRequest {
                    client,
                    uid: connection.uid,
                    pid: connection.pid,
                    station,
                }))
            }
            Incoming::Message(..) | Incoming::NoDescriptor | Incoming::Closed => {
                // Closing it takes it out of the epoll.
                self.connections.remove(&client);
                Some(Event::Disconnected(client))
            }
        }
    }

    /// Sends the reply to a request. True if the client was admitted and the reply was sent;
    /// otherwise the connection is closed.
    pub(super) fn answer(
        &mut self,
        client: u64,
        answer: Result<(Station, impl AsRawFd), Refusal>,
    ) -> bool {
        let Some(connection) = self.connections.get(&client) else { return false };
        let is_admitted = match answer {
            Ok((station, file)) => {
                connection.socket.send(Message::Welcome(station), Some(file.as_raw_fd()))
            }
            Err(why) => {
                connection.socket.send(Message::Refused(why), None);
                false
            }
        };
        if !is_admitted {
            self.connections.remove(&client);
        }
        is_admitted
    }
}
