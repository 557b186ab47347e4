//! The processes of an interface: who has which queues, and the program that they share.
//!
//! An interface runs one program. That one only looks by which queue a frame came and goes on to
//! the program of the process that has the queue, by a map. Who comes first makes the map and
//! attaches the program; who comes later has both handed over by any process that is there. The
//! link is then open in each, so it ends with the last of them, however they end and in whatever
//! order. What a dead process leaves in the map is a program without a socket, which passes
//! everything on, until the queue has somebody else or the map ends with its last process.
//!
//! A queue is a name in the network namespace that its process has. At the name of its first queue
//! a process listens: a thread hands map and link to processes of its own user or root, and nobody
//! else.

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{Backlog, UnixAddr, connect, getsockopt};

use super::super::bound::{BoundSocket, seqpacket};
use super::super::lock::NotInChildren;
use super::super::unix::{Apart, receive, send};
use super::super::{Bell, readable, sleep};
use super::XdpMode;
use crate::own_thread::without_signals;

/// How long a process may take to answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Before somebody is let in whom there is no descriptor for now.
const PAUSE: Duration = Duration::from_millis(10);
/// First byte of a message; a build in which the map or the programs mean something else has
/// another.
const VERSION: u8 = 1;

/// What the processes of an interface share.
pub(super) struct Common {
    /// From queues to the programs of their processes.
    pub(super) programs: NotInChildren,
    /// Keeps the program attached.
    pub(super) link: NotInChildren,
    pub(super) mode: XdpMode,
}

/// What came of asking the processes of an interface.
pub(super) enum Found {
    Common(Common),
    /// Nobody is there.
    Nobody,
    /// The process with this queue does not answer.
    Silent(u32),
    /// That with this queue is another user's.
    Foreign(u32),
    /// That with this queue is of a build that shares otherwise.
    Other(u32),
}

fn name(index: u32, queue: u32) -> String {
    format!("barewire-xdp-{index}-{queue}")
}

fn bound(index: u32, queue: u32) -> Result<BoundSocket, Errno> {
    BoundSocket::bind(&UnixAddr::new_abstract(name(index, queue).as_bytes())?)
}

/// Queues that are this process's alone.
pub(super) struct Claims {
    first: BoundSocket,
    others: Vec<BoundSocket>,
}

impl Claims {
    /// # Errors
    /// `EADDRINUSE`: a process has one of them; those of `socket`. None is taken.
    pub(super) fn take(index: u32, queues: &RangeInclusive<u32>) -> Result<Self, Errno> {
        let first = bound(index, *queues.start())?;
        let others = queues.clone().skip(1).map(|queue| bound(index, queue));
        Ok(Self { first, others: others.collect::<Result<_, _>>()? })
    }

    /// Lets others have `common`, from now on.
    ///
    /// # Errors
    /// Those of `listen`, and no thread.
    pub(super) fn share(self, common: Common) -> io::Result<Door> {
        self.first.listen(Backlog::MAXCONN)?;
        let Self { first, others } = self;
        let room = Room { listener: first, common, bell: Bell::new()?, is_over: false.into() };
        let room = Arc::new(room);
        let served = Arc::clone(&room);
        let thread = std::thread::Builder::new().name("barewire-xdp".to_owned());
        let thread = without_signals(|| thread.spawn(move || served.serve()))?;
        Ok(Door { room, thread: Some(thread), pid: std::process::id(), _others: others })
    }
}

/// A process's queues and its share of the program, until it is dropped.
pub(super) struct Door {
    room: Arc<Room>,
    thread: Option<JoinHandle<()>>,
    /// Whose thread it is: a forked child has none.
    pid: u32,
    _others: Vec<BoundSocket>,
}

impl Drop for Door {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return;
        }
        self.room.is_over.store(true, Release);
        self.room.bell.ring();
        // The names are free when this returns. Without a panic of the thread it says nothing.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// What the thread has.
struct Room {
    listener: BoundSocket,
    common: Common,
    bell: Bell,
    is_over: AtomicBool,
}

impl Room {
    fn serve(&self) {
        loop {
            let mut fds = [readable(self.listener.fd()), readable(self.bell.fd())];
            sleep(&mut fds, Duration::MAX);
            if self.is_over.load(Acquire) {
                return;
            }
            let Some(caller) = self.listener.accept() else {
                std::thread::sleep(PAUSE);
                continue;
            };
            // Others' descriptors may wait in it.
            self.greet(&Apart::new(caller));
        }
    }

    fn greet(&self, caller: &OwnedFd) {
        if !is_trusted(caller) {
            return;
        }
        let Common { programs, link, mode } = &self.common;
        let message = [VERSION, u8::from(*mode == XdpMode::Generic)];
        for fd in [programs, link] {
            // Who does not hear it has gone.
            let _ = send(caller.as_raw_fd(), &message, Some(fd.as_raw_fd()));
        }
    }
}

/// Whether the other side is of our user or root's.
fn is_trusted(socket: &OwnedFd) -> bool {
    let own = nix::unistd::geteuid().as_raw();
    getsockopt(socket, PeerCredentials).is_ok_and(|peer| peer.uid() == own || peer.uid() == 0)
}

/// Asks the processes that have one of the first `count` queues of interface `index`.
///
/// # Errors
/// Those of `socket`.
pub(super) fn find(index: u32, count: u32) -> Result<Found, Errno> {
    let mut found = Found::Nobody;
    for queue in 0..count {
        match ask(index, queue)? {
            Found::Nobody => {}
            common @ Found::Common(_) => return Ok(common),
            other => found = other,
        }
    }
    Ok(found)
}

fn ask(index: u32, queue: u32) -> Result<Found, Errno> {
    let socket = seqpacket()?;
    let address = UnixAddr::new_abstract(name(index, queue).as_bytes())?;
    match connect(socket.as_raw_fd(), &address) {
        Ok(()) if is_trusted(&socket) => {}
        Ok(()) => return Ok(Found::Foreign(queue)),
        // So many ask already.
        Err(Errno::EAGAIN) => return Ok(Found::Silent(queue)),
        // Nobody has it, or it is not the first of its process.
        Err(_) => return Ok(Found::Nobody),
    }
    let mut modes = [XdpMode::Native; 2];
    let mut got = Vec::new();
    for mode in &mut modes {
        match handed(socket.as_raw_fd(), queue) {
            Ok((fd, of)) => {
                got.push(fd);
                *mode = of;
            }
            Err(why) => return Ok(why),
        }
    }
    let [Some(link), Some(programs)] = [got.pop(), got.pop()] else { return Ok(Found::Nobody) };
    Ok(Found::Common(Common { programs, link, mode: modes[0] }))
}

/// One descriptor that is handed over.
fn handed(socket: RawFd, queue: u32) -> Result<(NotInChildren, XdpMode), Found> {
    if !sleep(&mut [readable(socket)], PATIENCE) {
        return Err(Found::Silent(queue));
    }
    let mut bytes = [0; 2];
    let got = receive(socket, &mut bytes, true).map_err(|_| Found::Silent(queue))?;
    let mode = match (got.len, bytes) {
        (0, _) => return Err(Found::Foreign(queue)),
        (2, [VERSION, 0]) => XdpMode::Native,
        (2, [VERSION, 1]) => XdpMode::Generic,
        _ => return Err(Found::Other(queue)),
    };
    let fd = got.fd.filter(|_| got.is_whole).ok_or(Found::Other(queue))?;
    Ok((fd.trust().into(), mode))
}

/// The queues of interface `index` that processes have, as far as can be seen.
pub(super) fn taken(index: u32) -> Vec<u32> {
    let names = std::fs::read_to_string("/proc/thread-self/net/unix").unwrap_or_default();
    let start = format!("@{}", name(index, 0).trim_end_matches('0'));
    // A connection that was accepted has the name too, in state 3, and does not keep it.
    let is_bound = |line: &&str| line.split_whitespace().nth(5) == Some("01");
    let of = |line: &str| line.split_whitespace().last()?.strip_prefix(&start)?.parse().ok();
    let mut queues: Vec<u32> = names.lines().filter(is_bound).filter_map(of).collect();
    queues.sort_unstable();
    queues.dedup();
    queues
}
