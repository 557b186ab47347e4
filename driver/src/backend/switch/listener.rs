//! The listening sockets at which processes ask a switch to be stations: one for processes of the
//! switch's own user, and one for those of all users that it serves.
//!
//! One connection is one process: the kernel tells its user ([`PeerCredentials`]), and its end is
//! the end of the connection. No client can make the switch wait: a message that does not fit the
//! socket's buffer ends the connection, sockets and descriptors are closed by another thread
//! ([`DeferredClose`]), and a turn handles a bounded number of events.

use std::collections::HashMap;
use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{Backlog, UnixAddr, getsockopt};
use nix::unistd::{Gid, chown};

use super::attach::listener_pid;
use super::handshake::{Incoming, Message, Refusal, SharedSocket, Socket};
use super::stale::sweep;
use crate::backend::bound::BoundSocket;
use crate::backend::set_option;
use crate::backend::shm::{ShmSettings, Uplink};
use crate::backend::unix::{DeferredClose, has_close_backlog};
use crate::error::{OPEN_FILES, OpenError};
use crate::port::Station;

/// Most connections of one user, whether they have sent a request or not.
pub const CLIENTS_MAX: usize = 255;
/// Most connections of processes of the switch's own user: as many as its segment may have members.
const OWN_CLIENTS_MAX: usize = 1024;
/// Socket option that permits received descriptors; Linux 6.16 and later.
const SO_PASSRIGHTS: libc::c_int = 83;
/// Most connections accepted, and most epoll events handled, per call of [`Listener::poll`].
const ACCEPTS_MAX: usize = 4;
const EVENTS_MAX: usize = 16;
/// Interval at which the socket's file is touched.
const TOUCH_EVERY: Duration = Duration::from_secs(5);
/// Epoll data of the switch's other descriptors. Listening sockets have their index, connections
/// have numbers from [`FIRST_CLIENT`].
pub(super) const NOT_A_CLIENT: u64 = u64::MAX;
const FIRST_CLIENT: u64 = 16;

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

/// The socket for processes of the switch's own user, beside its segment. Its owner alone may be
/// the switch, whatever layout segments have.
pub struct OwnSocket {
    socket: BoundSocket,
    path: PathBuf,
    /// Whether the segment was of another build, and was removed.
    pub(super) has_replaced: bool,
}

impl OwnSocket {
    /// Listens at the socket of the switch of `segment`, and removes a segment of another layout:
    /// its members are then served through their connections.
    ///
    /// # Errors
    /// [`OpenError`]: [`OpenError::HasSwitch`] if a switch runs; nothing is left behind.
    pub fn bind(segment: &ShmSettings) -> Result<Self, OpenError> {
        let path = segment.switch_socket();
        let hint = "; if it is another user's file, remove it as root";
        let os = |e: io::Error| OpenError::os("cannot serve processes at", &path, e, hint);
        let address = UnixAddr::new(&path).map_err(|e| os(e.into()))?;
        let socket = BoundSocket::bind(&address).map_err(|e| match listener_pid(&path) {
            Some(pid) if e == Errno::EADDRINUSE => {
                OpenError::HasSwitch { path: segment.path(), pid }
            }
            _ => os(e.into()),
        })?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).map_err(os)?;
        listen(&socket).map_err(|e| os(e.into()))?;
        sweep(&path, &segment.file_prefix());
        let has_replaced = segment.remove_other_version()?;
        Ok(Self { socket, path, has_replaced })
    }
}

/// Lets processes connect, which can hand over no descriptors.
fn listen(socket: &BoundSocket) -> Result<(), Errno> {
    // Connections inherit it. An older kernel accepts descriptors, which are then closed by another
    // thread: a user whose descriptors close slowly can delay new connections of all.
    let _ = set_option(socket.fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, &0_i32);
    socket.listen(Backlog::MAXCONN)
}

/// A listening socket.
struct Entrance {
    socket: BoundSocket,
    served: ServedUsers,
    /// Most connections of each user.
    per_user: usize,
    /// Whether its processes may join the switch's own segment.
    is_own: bool,
}

/// The listening sockets and their connections.
pub(super) struct Listener {
    entrances: Vec<Entrance>,
    connections: HashMap<u64, Connection>,
    next_client: u64,
    /// Too many descriptors wait to be closed: the listening sockets are out of the epoll.
    is_paused: bool,
    /// When the sockets were last [touched](BoundSocket::touch).
    touched: Instant,
    /// The user that connecting processes count as: a test program has one user.
    #[cfg(test)]
    pub(super) test_uid: Option<u32>,
}

struct Connection {
    socket: SharedSocket,
    uid: u32,
    pid: u32,
    is_own: bool,
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
    /// Version of the layout of its segments.
    pub(super) version: u64,
    /// Whether it may join the switch's own segment.
    pub(super) is_own: bool,
}

/// What a station is granted.
pub(super) enum Grant {
    /// A segment under this address.
    Segment(Station, File),
    /// The switch's own segment.
    Named,
    /// Its connection, for frames under this address.
    Relayed(Station, Uplink),
}

impl Listener {
    pub(super) fn new() -> Self {
        Self {
            entrances: Vec::new(),
            connections: HashMap::new(),
            next_client: FIRST_CLIENT,
            is_paused: false,
            touched: Instant::now(),
            #[cfg(test)]
            test_uid: None,
        }
    }

    /// Serves processes of the switch's own user at `own`.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub(super) fn add_own(&mut self, own: OwnSocket, epoll: &Epoll) -> Result<(), OpenError> {
        let OwnSocket { socket, path, .. } = own;
        let per_user = OWN_CLIENTS_MAX;
        let entrance = Entrance { socket, served: ServedUsers::None, per_user, is_own: true };
        self.add(entrance, &path, epoll)
    }

    /// Makes the socket for processes of all users that are served, and its directory if there is
    /// none.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub(super) fn open(
        &mut self,
        path: &Path,
        served: ServedUsers,
        per_user: usize,
        epoll: &Epoll,
    ) -> Result<(), OpenError> {
        let hint = "; start the switch as root, or have root make the directory for this user";
        let os = |e: io::Error| OpenError::os("cannot serve other users at", path, e, hint);
        if let Some(dir) = path.parent().filter(|dir| !dir.exists()) {
            std::fs::create_dir_all(dir).map_err(os)?;
            std::fs::set_permissions(dir, Permissions::from_mode(0o755)).map_err(os)?;
        }
        let address = UnixAddr::new(path).map_err(|e| os(e.into()))?;
        let socket = BoundSocket::bind(&address).map_err(|e| os(e.into()))?;
        let mode = match served {
            ServedUsers::Group(gid) => {
                chown(path, None, Some(Gid::from_raw(gid))).map_err(|e| os(e.into()))?;
                0o660
            }
            _ => 0o666,
        };
        std::fs::set_permissions(path, Permissions::from_mode(mode)).map_err(os)?;
        // Last: nobody can connect before the mode is set.
        listen(&socket).map_err(|e| os(e.into()))?;
        let per_user = per_user.min(CLIENTS_MAX);
        self.add(Entrance { socket, served, per_user, is_own: false }, path, epoll)?;
        sweep(path, "");
        Ok(())
    }

    /// Lets new connections at a listening socket wake the switch.
    fn add(&mut self, entrance: Entrance, path: &Path, epoll: &Epoll) -> Result<(), OpenError> {
        let no_epoll = |e| OpenError::os("cannot watch", path, e, OPEN_FILES);
        assert!((self.entrances.len() as u64) < FIRST_CLIENT);
        entrance.watch(self.entrances.len(), epoll).map_err(no_epoll)?;
        self.entrances.push(entrance);
        Ok(())
    }

    /// Accepts connections and returns the events since the last call, at most [`EVENTS_MAX`].
    pub(super) fn poll(&mut self, epoll: &Epoll) -> Vec<Event> {
        if self.is_paused && !has_close_backlog() {
            // A socket that is watched already says so by an error.
            for (i, entrance) in self.entrances.iter().enumerate() {
                let _ = entrance.watch(i, epoll);
            }
            self.is_paused = false;
        }
        if self.touched.elapsed() >= TOUCH_EVERY {
            self.touched = Instant::now();
            self.entrances.iter().for_each(|entrance| entrance.socket.touch());
        }
        let mut ready = [EpollEvent::empty(); EVENTS_MAX];
        let count = epoll.wait(&mut ready, EpollTimeout::ZERO).unwrap_or(0);
        let mut events = Vec::new();
        for event in &ready[..count] {
            match event.data() {
                NOT_A_CLIENT => {}
                i if i < FIRST_CLIENT => self.accept(i as usize, epoll),
                client => events.extend(self.read_request(client)),
            }
        }
        events
    }

    /// Accepts connections at listening socket `i`.
    fn accept(&mut self, i: usize, epoll: &Epoll) {
        if has_close_backlog() {
            tracing::warn!(
                "connections of other users take long to close: nobody new is let in until they do"
            );
            for entrance in &self.entrances {
                let _ = epoll.delete(entrance.socket.as_fd());
            }
            self.is_paused = true;
            return;
        }
        for _ in 0..ACCEPTS_MAX {
            let entrance = &self.entrances[i];
            // Without a free descriptor new connections wait; existing ones go on.
            let Some(fd) = entrance.socket.accept() else { return };
            let socket = DeferredClose::new(Socket::own(fd));
            let Ok(peer) = getsockopt(&socket.0, PeerCredentials) else { continue };
            let (uid, pid) = (peer.uid(), u32::try_from(peer.pid()).unwrap_or(0));
            #[cfg(test)]
            let uid = self.test_uid.filter(|_| !entrance.is_own).unwrap_or(uid);
            if let Some(why) = self.refusal(entrance, uid) {
                socket.send(Message::Refused(why), None);
                continue;
            }
            let event = EpollEvent::new(EpollFlags::EPOLLIN, self.next_client);
            if epoll.add(socket.0.as_fd(), event).is_err() {
                socket.send(Message::Refused(Refusal::NoResources), None);
                continue;
            }
            let (socket, is_own, has_requested) = (Arc::new(socket), entrance.is_own, false);
            let connection = Connection { socket, uid, pid, is_own, has_requested };
            self.connections.insert(self.next_client, connection);
            self.next_client += 1;
        }
    }

    /// Why a process of user `uid` is refused at a listening socket, if it is.
    fn refusal(&self, entrance: &Entrance, uid: u32) -> Option<Refusal> {
        let is_like = |of: &&Connection| of.uid == uid && of.is_own == entrance.is_own;
        if !entrance.serves(uid) {
            Some(Refusal::UserNotServed)
        } else if self.connections.values().filter(is_like).count() >= entrance.per_user {
            Some(Refusal::TooManyStations)
        } else {
            None
        }
    }

    fn read_request(&mut self, client: u64) -> Option<Event> {
        let connection = self.connections.get_mut(&client)?;
        match connection.socket.recv(false) {
            Incoming::Empty => None,
            Incoming::Message(Message::Hello { station, version }, None)
                if !connection.has_requested =>
            {
                connection.has_requested = true;
                let Connection { uid, pid, is_own, .. } = *connection;
                Some(Event::Attach(AttachRequest { client, uid, pid, station, version, is_own }))
            }
            Incoming::Message(..) | Incoming::NoDescriptor | Incoming::Closed => {
                self.remove(client);
                Some(Event::Disconnected(client))
            }
        }
    }

    /// Sends the reply to a request. True if the client was admitted and the reply was sent;
    /// otherwise the connection is closed.
    pub(super) fn answer(&mut self, client: u64, answer: &Result<Grant, Refusal>) -> bool {
        let Some(connection) = self.connections.get(&client) else { return false };
        let (message, fd) = match answer {
            Ok(Grant::Segment(station, file)) => {
                (Message::Welcome(*station), Some(file.as_raw_fd()))
            }
            Ok(Grant::Named) => (Message::Named, None),
            Ok(Grant::Relayed(station, uplink)) => (Message::Relayed(*station, *uplink), None),
            Err(why) => (Message::Refused(*why), None),
        };
        let is_admitted = connection.socket.send(message, fd) && answer.is_ok();
        if !is_admitted {
            self.remove(client);
        }
        is_admitted
    }

    /// Closes a connection.
    pub(super) fn remove(&mut self, client: u64) {
        // Closing it takes it out of the epoll.
        self.connections.remove(&client);
    }

    /// The socket of a connection whose messages are frames from now on. It is for the caller to
    /// watch, also for the connection's end.
    pub(super) fn take_over(&self, client: u64, epoll: &Epoll) -> Option<SharedSocket> {
        let connection = self.connections.get(&client)?;
        epoll.delete(connection.socket.0.as_fd()).ok()?;
        Some(Arc::clone(&connection.socket))
    }
}

impl Entrance {
    /// Lets new connections wake the switch.
    fn watch(&self, i: usize, epoll: &Epoll) -> nix::Result<()> {
        epoll.add(self.socket.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, i as u64))
    }

    fn serves(&self, uid: u32) -> bool {
        let is_own = uid == nix::unistd::geteuid().as_raw() || uid == 0;
        match &self.served {
            ServedUsers::None => is_own,
            ServedUsers::All | ServedUsers::Group(_) => true,
            ServedUsers::Users(users) => is_own || users.contains(&uid),
        }
    }
}
