//! The control thread of a port: makes connections and detects their end.
//!
//! The thread sleeps until a descriptor is readable, and never waits for the peer: sockets are
//! non-blocking, a message that does not fit its socket's buffer ends the connection, a handshake
//! not finished within [`PATIENCE`] is aborted, and descriptors from clients are closed by another
//! thread ([`DeferredClose`]).

use std::fmt::Display;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{Backlog, UnixAddr, connect};

use super::handshake::{ClientHandshake, Rules, ServerHandshake, ServerStep};
use super::proto::{MESSAGE_LEN, Message};
use super::region::{Conn, Layout};
use super::wait::Shared;
use super::{MemifSettings, Role};
use crate::backend::bound::{BoundSocket, inode, seqpacket};
use crate::backend::lock::NotInChildren;
use crate::backend::unix::{DeferredClose, Received, has_close_backlog, receive, send};
use crate::backend::{WakeEvent, readable, sleep};
use crate::error::OpenError;
use crate::own_thread::without_signals;

/// Longest duration of a handshake.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long opening a client waits for its connection if there is a server, and how much longer if
/// the server reports another client, which may just have died.
const OPENING: Duration = Duration::from_millis(500);
const BUSY: Duration = Duration::from_secs(2);
/// Pause between two attempts to connect, and after a refusal.
const RETRY: Duration = Duration::from_millis(50);
const RETRY_REFUSED: Duration = Duration::from_millis(200);
/// After a connection shorter than this the client pauses before the next attempt.
const BRIEF: Duration = Duration::from_secs(1);
/// How long closing a port waits for the thread.
const LEAVING: Duration = Duration::from_secs(2);
/// Most handshakes in progress.
const HANDSHAKES_MAX: usize = 8;

/// Handle of the control thread.
pub(super) struct Control {
    stop_signal: Arc<StopSignal>,
    thread: JoinHandle<()>,
    /// Disconnected when the thread has done everything.
    left: Receiver<()>,
}

/// Tells the thread to stop.
struct StopSignal {
    is_stopping: AtomicBool,
    wake_event: WakeEvent,
}

impl StopSignal {
    fn is_stopping(&self) -> bool {
        self.is_stopping.load(Acquire)
    }

    /// Sleeps for `time`, or until it is woken.
    fn pause(&self, time: Duration) {
        sleep(&mut [readable(self.wake_event.fd())], time);
        self.wake_event.clear();
    }
}

/// Result of a client's first attempt to connect.
enum FirstAttempt {
    Up,
    /// No server is there.
    Missing,
    /// The error of the kernel, or the refusal of the server.
    Failed(OpenError),
}

/// The error of a call that lacked memory, descriptors or another resource.
pub(super) fn no_resources(settings: &MemifSettings, error: &io::Error) -> OpenError {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    refused(settings, errno, error, "see: ulimit -n, ulimit -v, ulimit -f")
}

fn refused(
    settings: &MemifSettings,
    errno: i32,
    why: impl Display,
    hint: impl Into<String>,
) -> OpenError {
    OpenError::device(format!("memif:{}", settings.socket), errno, why.to_string(), hint)
}

impl Control {
    /// Starts the thread; a client waits for its connection if there is a server.
    pub(super) fn start(
        settings: &MemifSettings,
        layout: Layout,
        shared: &Arc<Shared>,
    ) -> Result<Self, OpenError> {
        let no_resources = |e: &io::Error| no_resources(settings, e);
        let wake_event = WakeEvent::new().map_err(|e| no_resources(&e))?;
        let stop_signal = Arc::new(StopSignal { is_stopping: AtomicBool::new(false), wake_event });
        let (stop, shared) = (Arc::clone(&stop_signal), Arc::clone(shared));
        let rules = Rules::of(settings, layout);
        let named = std::thread::Builder::new().name("memif".into());
        let (leaves, left) = sync_channel(1);
        if settings.role == Role::Server {
            let listener = listen(settings)?;
            let server = Server {
                listener,
                rules,
                stop_signal: stop,
                shared,
                pending_clients: vec![],
                live: None,
            };
            let run = move || {
                server.run();
                drop(leaves);
            };
            let thread = without_signals(|| named.spawn(run)).map_err(|e| no_resources(&e))?;
            return Ok(Self { stop_signal, thread, left });
        }
        let address = address(&settings.socket).map_err(|e| no_resources(&e))?;
        let (report, first) = sync_channel(1);
        let settings = settings.clone();
        let client = Client {
            settings: settings.clone(),
            address,
            rules,
            stop_signal: stop,
            shared,
            last_logged: None,
        };
        let run = move || {
            client.run(&report);
            drop(leaves);
        };
        let thread = without_signals(|| named.spawn(run)).map_err(|e| no_resources(&e))?;
        let control = Self { stop_signal, thread, left };
        match first.recv_timeout(OPENING + BUSY) {
            Ok(FirstAttempt::Failed(error)) => {
                control.end();
                Err(error)
            }
            // Its server is there and slow, or not there yet.
            Ok(FirstAttempt::Up | FirstAttempt::Missing) | Err(_) => Ok(control),
        }
    }

    /// Makes the thread check the state of the connection.
    pub(super) fn wake(&self) {
        self.stop_signal.wake_event.ring();
    }

    /// Disconnects and ends the thread. If closing descriptors of clients takes longer than
    /// [`LEAVING`], the thread is detached.
    pub(super) fn end(self) {
        self.stop_signal.is_stopping.store(true, Release);
        self.stop_signal.wake_event.ring();
        if self.left.recv_timeout(LEAVING) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("memif: closing a descriptor of a former client takes long");
            return;
        }
        // The thread does not panic; if it did, there would be nothing to do.
        let _ = self.thread.join();
    }
}

/// A connected socket. Forked children do not keep it open.
pub(super) struct Socket(pub(super) NotInChildren);

/// Result of a receive from the socket.
pub(super) enum Incoming {
    Empty,
    Message(Message, Option<DeferredClose<OwnedFd>>),
    /// Not a message of the protocol.
    Invalid,
    HungUp,
}

impl Socket {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self::own(seqpacket()?))
    }

    fn own(fd: OwnedFd) -> Self {
        Self(fd.into())
    }

    fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Sends a message; false if it could not be sent.
    pub(super) fn send(&self, message: &Message, fd: Option<RawFd>) -> bool {
        send(self.fd(), &message.bytes(), fd) == Ok(MESSAGE_LEN)
    }

    /// Receives a message, with a descriptor if `takes_fd`. Otherwise a message with a descriptor
    /// is invalid, and the descriptor is closed.
    pub(super) fn recv(&self, takes_fd: bool) -> Incoming {
        let mut bytes = [0; MESSAGE_LEN];
        let Received { len, fd, is_whole } = match receive(self.fd(), &mut bytes, takes_fd) {
            Ok(got) => got,
            Err(Errno::EAGAIN | Errno::EINTR) => return Incoming::Empty,
            Err(_gone) => return Incoming::HungUp,
        };
        match len {
            0 => Incoming::HungUp,
            MESSAGE_LEN if is_whole => match Message::parse(&bytes) {
                Some(message) => Incoming::Message(message, fd),
                None => Incoming::Invalid,
            },
            _ => Incoming::Invalid,
        }
    }
}

/// A connection that frames go through.
struct Live {
    socket: DeferredClose<Socket>,
    conn: Arc<Conn>,
}

impl Live {
    /// Why the connection has to end; `None` if it does not.
    fn check(&self) -> Option<String> {
        if self.conn.is_broken.load(Relaxed) {
            self.socket.send(&Message::Disconnect("Invalid ring".into()), None);
            return Some("invalid ring indices from the peer".into());
        }
        match self.socket.recv(false) {
            Incoming::Empty => None,
            Incoming::HungUp => Some("the other side has left".into()),
            Incoming::Message(Message::Disconnect(why), _) => Some(format!("it said \"{why}\"")),
            Incoming::Message(..) | Incoming::Invalid => {
                self.socket.send(&Message::Disconnect("Unexpected message".into()), None);
                Some("it said what makes no sense".into())
            }
        }
    }

    fn close(self, shared: &Shared, name: &str, why: &str) {
        tracing::info!(port = name, "link is down: {why}");
        self.conn.is_down.store(true, Release);
        shared.notify_port();
    }
}

/// The address of a socket by its name; `@NAME` is in the abstract namespace.
pub(super) fn address(name: &str) -> io::Result<UnixAddr> {
    Ok(match name.strip_prefix('@') {
        Some(name) => UnixAddr::new_abstract(name.as_bytes())?,
        None => UnixAddr::new(name)?,
    })
}

// ---------------------------------------------------------------------------------------------
// The server
// ---------------------------------------------------------------------------------------------

fn listen(settings: &MemifSettings) -> Result<BoundSocket, OpenError> {
    let no_resources = |e: &io::Error| no_resources(settings, e);
    let address = address(&settings.socket).map_err(|e| no_resources(&e))?;
    let socket = BoundSocket::bind(&address).map_err(|errno| cannot_bind(settings, errno))?;
    let backlog = Backlog::new(8).unwrap_or(Backlog::MAXCONN);
    socket.listen(backlog).map_err(|errno| no_resources(&errno.into()))?;
    Ok(socket)
}

/// The error of a missing directory of the socket; `None` if it exists or none is needed.
pub(super) fn no_directory(settings: &MemifSettings) -> Option<OpenError> {
    let name = &settings.socket;
    let dir = Path::new(name).parent().filter(|dir| !name.starts_with('@') && !dir.is_dir())?;
    if settings.role == Role::Server {
        return Some(cannot_bind(settings, Errno::ENOENT));
    }
    let why = format!("no directory {}", dir.display());
    let hint = format!("start the server, or: mkdir -p {}", dir.display());
    Some(refused(settings, libc::ENOENT, why, hint))
}

fn cannot_bind(settings: &MemifSettings, errno: Errno) -> OpenError {
    let name = &settings.socket;
    let dir = Path::new(name).parent().unwrap_or(Path::new("/")).display();
    let code = errno as i32;
    match errno {
        Errno::EADDRINUSE if name.starts_with('@') => {
            let hint = "choose another name, or end it; ss -xlp shows whose it is";
            refused(settings, code, "a server is there already", hint)
        }
        Errno::EADDRINUSE if inode(name).is_some() => {
            let hint = format!("choose another path, or end it, see: ss -xlp src {name}");
            refused(settings, code, "a server is there already", hint)
        }
        Errno::EADDRINUSE => {
            let hint = format!("choose another path, or: rm {name}");
            refused(settings, code, "a file that is no socket is there", hint)
        }
        Errno::ENOENT | Errno::ENOTDIR => {
            refused(settings, code, format!("no directory {dir}"), format!("mkdir -p {dir}"))
        }
        Errno::EACCES | Errno::EPERM | Errno::EROFS => {
            let hint = format!("choose a directory that you may write, see: ls -ld {dir}");
            refused(settings, code, format!("no permission to make a socket in {dir}"), hint)
        }
        _ => no_resources(settings, &errno.into()),
    }
}

struct Server {
    listener: BoundSocket,
    rules: Rules,
    stop_signal: Arc<StopSignal>,
    shared: Arc<Shared>,
    pending_clients: Vec<PendingClient>,
    live: Option<Live>,
}

/// A client whose handshake is not complete.
struct PendingClient {
    socket: DeferredClose<Socket>,
    handshake: ServerHandshake,
    until: Instant,
}

impl Server {
    fn run(mut self) {
        while !self.stop_signal.is_stopping() {
            let mut fds =
                vec![readable(self.stop_signal.wake_event.fd()), readable(self.listener.fd())];
            fds.extend(self.live.as_ref().map(|live| readable(live.socket.fd())));
            fds.extend(self.pending_clients.iter().map(|pending| readable(pending.socket.fd())));
            let next = self.pending_clients.iter().map(|pending| pending.until).min();
            let left = next.map(|until| until.saturating_duration_since(Instant::now()));
            sleep(&mut fds, left.unwrap_or(Duration::from_secs(3600)));
            self.stop_signal.wake_event.clear();
            if let Some(why) = self.live.as_ref().and_then(Live::check)
                && let Some(live) = self.live.take()
            {
                live.close(&self.shared, &self.rules.name, &why);
            }
            if fds[1].revents != 0 {
                self.accept();
            }
            for pending in std::mem::take(&mut self.pending_clients) {
                self.serve(pending);
            }
        }
        if let Some(live) = self.live.take() {
            live.socket.send(&Message::Disconnect("Interface closed".into()), None);
            live.close(&self.shared, &self.rules.name, "closed");
        }
    }

    fn accept(&mut self) {
        let made = if has_close_backlog() { None } else { self.listener.accept() };
        let Some(fd) = made else {
            // No descriptor is left, or it has hung up, or what others left is still to be closed.
            std::thread::sleep(Duration::from_millis(1));
            return;
        };
        let socket = DeferredClose::new(Socket::own(fd));
        if self.pending_clients.len() == HANDSHAKES_MAX {
            self.pending_clients.remove(0);
        }
        if socket.send(&self.rules.hello(), None) {
            let (handshake, until) = (ServerHandshake::default(), Instant::now() + PATIENCE);
            self.pending_clients.push(PendingClient { socket, handshake, until });
        }
    }

    /// Reads a pending client's messages; keeps it pending, connects it, or drops it.
    fn serve(&mut self, mut pending: PendingClient) {
        loop {
            let (message, fd) = match pending.socket.recv(true) {
                Incoming::Empty if Instant::now() < pending.until => {
                    return self.pending_clients.push(pending);
                }
                Incoming::Empty | Incoming::HungUp => return,
                Incoming::Message(message, fd) => (Some(message), fd),
                Incoming::Invalid => (None, None),
            };
            let is_free = self.live.is_none() && self.shared.has_room();
            match pending.handshake.handle(message, fd, &self.rules, is_free) {
                Ok(ServerStep::Reply(answer)) => {
                    if !pending.socket.send(&answer, None) {
                        return;
                    }
                }
                Ok(ServerStep::Done(conn)) => return self.connect(pending.socket, *conn),
                Err(why) => {
                    tracing::info!(port = self.rules.name, why, "a client was refused");
                    pending.socket.send(&Message::Disconnect(why.into()), None);
                    return;
                }
            }
        }
    }

    fn connect(&mut self, socket: DeferredClose<Socket>, conn: Conn) {
        if socket.send(&Message::Connected, None) {
            tracing::info!(port = self.rules.name, "link is up");
            let conn = Arc::new(conn);
            self.shared.made(&conn);
            self.live = Some(Live { socket, conn });
        }
    }
}

// ---------------------------------------------------------------------------------------------
// The client
// ---------------------------------------------------------------------------------------------

struct Client {
    settings: MemifSettings,
    address: UnixAddr,
    rules: Rules,
    stop_signal: Arc<StopSignal>,
    shared: Arc<Shared>,
    /// What was logged last.
    last_logged: Option<String>,
}

impl Client {
    fn run(mut self, report: &SyncSender<FirstAttempt>) {
        let opened = Instant::now();
        while !self.stop_signal.is_stopping() {
            // Connections are not made while the port is not polled.
            if !self.shared.has_room() {
                self.stop_signal.pause(RETRY);
                continue;
            }
            match self.connect() {
                Ok(live) => {
                    let _ = report.try_send(FirstAttempt::Up);
                    self.last_logged = None;
                    let begun = Instant::now();
                    self.watch(live);
                    if begun.elapsed() < BRIEF {
                        // Limits the rate if the server ends each connection at once.
                        self.stop_signal.pause(RETRY);
                    }
                }
                Err(ConnectError::Missing) => {
                    let _ = report.try_send(FirstAttempt::Missing);
                    self.log("no memif server there yet; retrying");
                    self.stop_signal.pause(RETRY);
                }
                Err(ConnectError::Refused(error, may_pass)) => {
                    self.log(&error.to_string());
                    if !may_pass || opened.elapsed() > BUSY {
                        let _ = report.try_send(FirstAttempt::Failed(error));
                    }
                    self.stop_signal.pause(if may_pass { RETRY } else { RETRY_REFUSED });
                }
            }
        }
    }

    /// Logs `what`, unless it was the last line.
    fn log(&mut self, what: &str) {
        if self.last_logged.as_deref() != Some(what) {
            tracing::warn!(port = self.rules.name, "{what}");
            self.last_logged = Some(what.to_owned());
        }
    }

    /// One attempt to connect.
    fn connect(&self) -> Result<Live, ConnectError> {
        let no_resources =
            |e: io::Error| ConnectError::Refused(no_resources(&self.settings, &e), true);
        let socket = Socket::new().map_err(no_resources)?;
        match connect(socket.fd(), &self.address) {
            Ok(()) => {}
            // EAGAIN: the backlog of the server is full.
            Err(Errno::ENOENT | Errno::ECONNREFUSED | Errno::EAGAIN) => return self.no_server(),
            Err(errno) => return Err(ConnectError::Refused(self.cannot_connect(errno), false)),
        }
        let (socket, mut handshake) = (DeferredClose::new(socket), ClientHandshake::new());
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until && !self.stop_signal.is_stopping() {
            let message = match socket.recv(false) {
                Incoming::Empty => {
                    let mut fds =
                        [readable(socket.fd()), readable(self.stop_signal.wake_event.fd())];
                    sleep(&mut fds, until.saturating_duration_since(Instant::now()));
                    self.stop_signal.wake_event.clear();
                    continue;
                }
                Incoming::HungUp => return Err(ConnectError::Missing),
                Incoming::Message(message, _none) => Some(message),
                Incoming::Invalid => None,
            };
            match handshake.handle(message, &self.rules) {
                Ok(Some(next)) => {
                    if !socket.send(&next, handshake.descriptor()) {
                        return Err(ConnectError::Missing);
                    }
                }
                Ok(None) => {
                    let conn = Arc::new(handshake.connected().map_err(no_resources)?);
                    tracing::info!(port = self.rules.name, "link is up");
                    self.shared.made(&conn);
                    return Ok(Live { socket, conn });
                }
                Err(why) => {
                    socket.send(&Message::Disconnect(why.clone()), None);
                    return Err(self.classify_refusal(&why));
                }
            }
        }
        Err(ConnectError::Missing)
    }

    /// No server listens: retried, unless the directory of its socket is missing.
    fn no_server(&self) -> Result<Live, ConnectError> {
        match no_directory(&self.settings) {
            Some(why) => Err(ConnectError::Refused(why, false)),
            None => Err(ConnectError::Missing),
        }
    }

    fn cannot_connect(&self, errno: Errno) -> OpenError {
        let name = &self.settings.socket;
        match errno {
            Errno::EACCES | Errno::EPERM => {
                let hint = format!("let the server's owner give it: chmod g+w {name}");
                refused(&self.settings, errno as i32, "no permission to connect", hint)
            }
            Errno::EPROTOTYPE | Errno::ENOTSOCK => {
                let hint = format!("ask the server where it listens, see: ss -xl src {name}");
                refused(&self.settings, errno as i32, "that is no memif's socket", hint)
            }
            _ => no_resources(&self.settings, &errno.into()),
        }
    }

    /// The error for a server's refusal, and whether a later attempt may succeed.
    fn classify_refusal(&self, why: &str) -> ConnectError {
        let MemifSettings { id, socket, .. } = &self.settings;
        let reason = why.to_ascii_lowercase();
        let (errno, hint, may_pass) = if reason.contains("secret") {
            (libc::EACCES, "give both ends the same secret=".to_owned(), false)
        } else if reason.contains("already") || reason.contains("connected") {
            let hint =
                format!("choose another id=, or end its client, see: ss -xp | grep {socket}");
            (libc::EADDRINUSE, hint, true)
        } else if reason.contains("id") && reason.contains("not found")
            || reason.contains("unmatched")
        {
            (
                libc::ENODEV,
                format!("the server has no memif {id}; give both ends the same id="),
                true,
            )
        } else if reason.contains("version") {
            (
                libc::EPROTO,
                "both ends have to speak version 2.0; update the other".to_owned(),
                false,
            )
        } else {
            (libc::ECONNREFUSED, "see what the server logs".to_owned(), true)
        };
        let why = format!("refused: \"{why}\"");
        ConnectError::Refused(refused(&self.settings, errno, why, hint), may_pass)
    }

    /// Waits for the end of a connection.
    fn watch(&self, live: Live) {
        let why = loop {
            if self.stop_signal.is_stopping() {
                live.socket.send(&Message::Disconnect("Interface closed".into()), None);
                break "closed".into();
            }
            if let Some(why) = live.check() {
                break why;
            }
            let mut fds = [readable(live.socket.fd()), readable(self.stop_signal.wake_event.fd())];
            sleep(&mut fds, Duration::from_secs(3600));
            self.stop_signal.wake_event.clear();
        };
        live.close(&self.shared, &self.rules.name, &why);
    }
}

/// Why an attempt to connect failed.
enum ConnectError {
    Missing,
    /// The error, and whether a later attempt may succeed.
    Refused(OpenError, bool),
}
