//! Sharing of an interface among processes: who has which queues, and the program in common.
//!
//! An interface runs one program, the dispatcher, which tail-calls the program of the process that
//! has the frame's queue, by a map. The first process makes the map and attaches the dispatcher;
//! later ones receive both from any process present. The BPF link is then open in each, so it ends
//! with the last of them, however they end and in whatever order. The map entry of a dead process
//! is a program without a socket, which passes everything on, until another process has the queue
//! or the map ends with its last process.
//!
//! A queue is claimed by a socket name in the process's network namespace. A process listens at the
//! name of its first queue: a thread hands map and link to processes of the same user or root only.

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{Backlog, UnixAddr, connect};

use super::super::bound::{BoundSocket, seqpacket};
use super::super::lock::NotInChildren;
use super::super::unix::{DeferredClose, is_trusted, receive, send};
use super::super::{WakeEvent, readable, sleep};
use super::XdpMode;
use crate::own_thread::without_signals;

/// How long a process may take to reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause before the next attempt to accept a connection, after a lack of descriptors.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(10);
/// First byte of a message; differs between builds whose maps or programs are incompatible.
const VERSION: u8 = 1;

/// The program that the processes of an interface share.
pub(super) struct SharedProgram {
    /// Map from queues to the programs of their processes.
    pub(super) programs: NotInChildren,
    /// Keeps the program attached.
    pub(super) link: NotInChildren,
    pub(super) mode: XdpMode,
}

/// The result of a query of the interface's processes.
pub(super) enum Discovery {
    Shared(SharedProgram),
    /// No process has the interface.
    Nobody,
    /// The process with this queue does not reply.
    Unresponsive(u32),
    /// The process with this queue is another user's.
    OtherUser(u32),
    /// The process with this queue is of an incompatible build.
    OtherBuild(u32),
}

fn name(index: u32, queue: u32) -> String {
    format!("barewire-xdp-{index}-{queue}")
}

fn bind_name(index: u32, queue: u32) -> Result<BoundSocket, Errno> {
    BoundSocket::bind(&UnixAddr::new_abstract(name(index, queue).as_bytes())?)
}

/// Queues that are claimed for this process.
pub(super) struct QueueClaims {
    first: BoundSocket,
    others: Vec<BoundSocket>,
}

impl QueueClaims {
    /// Claims all of `queues`.
    ///
    /// # Errors
    /// `EADDRINUSE`: a process has one of them; those of `socket`. None is claimed.
    pub(super) fn acquire(index: u32, queues: &RangeInclusive<u32>) -> Result<Self, Errno> {
        let first = bind_name(index, *queues.start())?;
        let others = queues.clone().skip(1).map(|queue| bind_name(index, queue));
        Ok(Self { first, others: others.collect::<Result<_, _>>()? })
    }

    /// Hands `shared` to other processes from now on.
    ///
    /// # Errors
    /// Those of `listen`, and no thread.
    pub(super) fn serve(self, shared: SharedProgram) -> io::Result<QueueShare> {
        self.first.listen(Backlog::MAXCONN)?;
        let Self { first, others } = self;
        let server =
            ShareServer { listener: first, shared, bell: WakeEvent::new()?, is_over: false.into() };
        let server = Arc::new(server);
        let served = Arc::clone(&server);
        let thread = std::thread::Builder::new().name("barewire-xdp".to_owned());
        let thread = without_signals(|| thread.spawn(move || served.serve()))?;
        Ok(QueueShare { server, thread: Some(thread), pid: std::process::id(), _others: others })
    }
}

/// A process's queues and its share of the program, until dropped.
pub(super) struct QueueShare {
    server: Arc<ShareServer>,
    thread: Option<JoinHandle<()>>,
    /// Process of the thread: a forked child has none.
    pid: u32,
    _others: Vec<BoundSocket>,
}

impl Drop for QueueShare {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return;
        }
        self.server.is_over.store(true, Release);
        self.server.bell.ring();
        // The names are free when this returns. An error would be a panic of the thread.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// State of the serving thread.
struct ShareServer {
    listener: BoundSocket,
    shared: SharedProgram,
    bell: WakeEvent,
    is_over: AtomicBool,
}

impl ShareServer {
    fn serve(&self) {
        loop {
            let mut fds = [readable(self.listener.fd()), readable(self.bell.fd())];
            sleep(&mut fds, Duration::MAX);
            if self.is_over.load(Acquire) {
                return;
            }
            let Some(caller) = self.listener.accept() else {
                std::thread::sleep(ACCEPT_BACKOFF);
                continue;
            };
            // The connection may hold descriptors of other processes.
            self.hand_over(&DeferredClose::new(caller));
        }
    }

    fn hand_over(&self, caller: &OwnedFd) {
        if !is_trusted(caller) {
            return;
        }
        let SharedProgram { programs, link, mode } = &self.shared;
        let message = [VERSION, u8::from(*mode == XdpMode::Generic)];
        for fd in [programs, link] {
            // An error means that the peer has gone.
            let _ = send(caller.as_raw_fd(), &message, Some(fd.as_raw_fd()));
        }
    }
}

/// Queries the processes that have one of the first `count` queues of interface `index`.
///
/// # Errors
/// Those of `socket`.
pub(super) fn discover(index: u32, count: u32) -> Result<Discovery, Errno> {
    let mut found = Discovery::Nobody;
    for queue in 0..count {
        match query(index, queue)? {
            Discovery::Nobody => {}
            shared @ Discovery::Shared(_) => return Ok(shared),
            other => found = other,
        }
    }
    Ok(found)
}

fn query(index: u32, queue: u32) -> Result<Discovery, Errno> {
    let socket = seqpacket()?;
    let address = UnixAddr::new_abstract(name(index, queue).as_bytes())?;
    match connect(socket.as_raw_fd(), &address) {
        Ok(()) if is_trusted(&socket) => {}
        Ok(()) => return Ok(Discovery::OtherUser(queue)),
        // The backlog is full.
        Err(Errno::EAGAIN) => return Ok(Discovery::Unresponsive(queue)),
        // Not claimed, or not the first queue of its process.
        Err(_) => return Ok(Discovery::Nobody),
    }
    let mut modes = [XdpMode::Native; 2];
    let mut got = Vec::new();
    for mode in &mut modes {
        match receive_fd(socket.as_raw_fd(), queue) {
            Ok((fd, of)) => {
                got.push(fd);
                *mode = of;
            }
            Err(why) => return Ok(why),
        }
    }
    let [Some(link), Some(programs)] = [got.pop(), got.pop()] else { return Ok(Discovery::Nobody) };
    Ok(Discovery::Shared(SharedProgram { programs, link, mode: modes[0] }))
}

/// Receives one descriptor.
fn receive_fd(socket: RawFd, queue: u32) -> Result<(NotInChildren, XdpMode), Discovery> {
    if !sleep(&mut [readable(socket)], REPLY_TIMEOUT) {
        return Err(Discovery::Unresponsive(queue));
    }
    let mut bytes = [0; 2];
    let got = receive(socket, &mut bytes, true).map_err(|_| Discovery::Unresponsive(queue))?;
    let mode = match (got.len, bytes) {
        (0, _) => return Err(Discovery::OtherUser(queue)),
        (2, [VERSION, 0]) => XdpMode::Native,
        (2, [VERSION, 1]) => XdpMode::Generic,
        _ => return Err(Discovery::OtherBuild(queue)),
    };
    let fd = got.fd.filter(|_| got.is_whole).ok_or(Discovery::OtherBuild(queue))?;
    Ok((fd.into_inner().into(), mode))
}

/// The queues of interface `index` that processes have claimed, as listed in /proc.
pub(super) fn claimed_queues(index: u32) -> Vec<u32> {
    let names = std::fs::read_to_string("/proc/thread-self/net/unix").unwrap_or_default();
    let start = format!("@{}", name(index, 0).trim_end_matches('0'));
    // An accepted connection has the name too, in state 3, and does not claim it.
    let is_bound = |line: &&str| line.split_whitespace().nth(5) == Some("01");
    let of = |line: &str| line.split_whitespace().last()?.strip_prefix(&start)?.parse().ok();
    let mut queues: Vec<u32> = names.lines().filter(is_bound).filter_map(of).collect();
    queues.sort_unstable();
    queues.dedup();
    queues
}
