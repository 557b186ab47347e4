//! Client side of the handshake: a process asks a switch to be a station.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{UnixAddr, connect, getsockopt};

use super::handshake::{Incoming, Message, Refusal, Socket};
use crate::backend::shm::Uplink;
use crate::backend::{readable, sleep};
use crate::error::{OPEN_FILES, OpenError};
use crate::port::Station;

/// Directory of the sockets at which switches serve processes of other users. Not abstract names:
/// those belong to one network namespace, and any user can bind them. Root makes the directory, so
/// whoever has a socket in it is trusted to, and a container gets the directory as a mount.
pub const RUN_DIR: &str = "/run/barewire";

/// Longest wait for the switch's reply.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two attempts at a socket without a listener.
const RETRY: Duration = Duration::from_millis(10);

/// Path of the socket of the switch whose segment for its own user is `segment`.
pub fn socket_in(dir: &Path, segment: &str) -> PathBuf {
    dir.join(format!("{segment}.sock"))
}

/// What the switch granted.
pub(super) struct Grant {
    /// Stays open for as long as both the switch and this process live.
    pub(super) socket: Socket,
    pub(super) way: Way,
}

/// How frames reach the switch.
pub(super) enum Way {
    /// Through the segment in this file, under this address.
    Segment(File, Station),
    /// Through the segment of its own user, which has a name.
    Named,
    /// Through the connection, under this address: the switch is of a build whose segments have
    /// another layout.
    Relayed(Station, Uplink),
}

/// Whom to ask for what.
#[derive(Clone)]
pub(super) struct Request {
    /// The switch's socket.
    pub(super) path: PathBuf,
    /// The address, or any.
    pub(super) station: Option<Station>,
    /// Version of the layout that segments have here.
    pub(super) version: u64,
    /// Whether only a switch of our own user is trusted at the socket.
    pub(super) is_own: bool,
}

/// Asks a switch. `None` without one: at once if there is no socket, and after `patience` if nobody
/// listens at it, as between a killed switch and its successor.
///
/// # Errors
/// The switch refuses this user or has no resources, or whoever listens is not trusted.
pub(super) fn attach(request: &Request, patience: Duration) -> Result<Option<Grant>, OpenError> {
    let until = Instant::now() + patience;
    loop {
        match try_attach(request)? {
            AttachResult::Attached(grant) => return Ok(Some(grant)),
            AttachResult::NoListener if Instant::now() < until => std::thread::sleep(RETRY),
            AttachResult::NoListener | AttachResult::NoSocket => return Ok(None),
        }
    }
}

enum AttachResult {
    Attached(Grant),
    /// No socket at the path.
    NoSocket,
    /// Nobody listens, or the switch ended before its reply.
    NoListener,
}

fn try_attach(request: &Request) -> Result<AttachResult, OpenError> {
    let Request { path, station, version, is_own } = request;
    let os = |what, errno: Errno, hint| OpenError::os(what, path, errno, hint);
    let no_socket = |e| OpenError::os("cannot make a socket for", path, e, OPEN_FILES);
    let socket = Socket::new().map_err(no_socket)?;
    let to = UnixAddr::new(path.as_path()).map_err(|errno| os("cannot ask", errno, ""))?;
    match connect(socket.fd(), &to) {
        Ok(()) => {}
        Err(Errno::ENOENT | Errno::ENOTDIR) => return Ok(AttachResult::NoSocket),
        Err(Errno::ECONNREFUSED | Errno::EAGAIN | Errno::EINTR) => {
            return Ok(AttachResult::NoListener);
        }
        Err(errno) => {
            let hint = "; the switch does not serve this user: see its --user and --group";
            return Err(os("cannot ask the switch at", errno, hint));
        }
    }
    check_trust(path, &socket, *is_own)?;
    // A switch that refuses the user has already sent that and closed: a failed send is no error.
    socket.send(Message::Hello { station: *station, version: *version }, None);
    let until = Instant::now() + ANSWER_TIMEOUT;
    loop {
        let way = match socket.recv(true) {
            // The sender was checked by `check_trust`.
            Incoming::Message(Message::Welcome(station), Some(fd)) => {
                Way::Segment(fd.into_inner().into(), station)
            }
            Incoming::Message(Message::Relayed(station, uplink), None) => {
                Way::Relayed(station, uplink)
            }
            Incoming::Message(Message::Named, None) => Way::Named,
            Incoming::Message(Message::Refused(why), _) => return Err(refusal_error(path, why)),
            Incoming::NoDescriptor => {
                let what = "cannot take what is given by the switch at";
                return Err(os(what, Errno::EMFILE, OPEN_FILES));
            }
            Incoming::Message(..) | Incoming::Closed => return Ok(AttachResult::NoListener),
            Incoming::Empty => {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    let what = "no answer from the switch at";
                    return Err(os(what, Errno::ETIMEDOUT, "; is it stopped?"));
                }
                sleep(&mut [readable(socket.fd())], left);
                continue;
            }
        };
        return Ok(AttachResult::Attached(Grant { socket, way }));
    }
}

/// The process that listens at `path`, if one does: in its own pid namespace, and 0 if it is of one
/// that cannot be seen from here.
pub(crate) fn listener_pid(path: &Path) -> Option<u32> {
    let socket = Socket::new().ok()?;
    connect(socket.fd(), &UnixAddr::new(path).ok()?).ok()?;
    let peer = getsockopt(&socket.0, PeerCredentials).ok()?;
    u32::try_from(peer.pid()).ok()
}

/// Checks that the listener runs as our user or, unless it has to be `own`, as root or as the
/// directory's owner: it will see all our frames.
fn check_trust(path: &Path, socket: &Socket, own: bool) -> Result<(), OpenError> {
    let untrusted = |why: String, mend: String| {
        let why = format!("not safe to ask: {why}");
        OpenError::device(path.display().to_string(), libc::EACCES, why, mend)
    };
    let dir = path.parent().unwrap_or(Path::new("/"));
    let see = || format!("see: ls -ld {}", dir.display());
    let meta = std::fs::metadata(dir).map_err(|e| untrusted(e.to_string(), see()))?;
    if meta.mode() & 0o002 != 0 && !own {
        let mend = format!("chmod o-w {}", dir.display());
        return Err(untrusted("everybody may make files beside it".into(), mend));
    }
    let peer =
        getsockopt(&socket.0, PeerCredentials).map_err(|e| untrusted(e.to_string(), see()))?;
    let ours = nix::unistd::geteuid().as_raw();
    if peer.uid() == ours || !own && [0, meta.uid()].contains(&peer.uid()) {
        return Ok(());
    }
    let why = format!("user {} listens, and user {} has the directory", peer.uid(), meta.uid());
    let (whose, path) = (describe_listener(peer.uid(), peer.pid()), path.display());
    Err(untrusted(why, format!("end {whose} and remove it (rm {path})")))
}

/// Names the process to end. The kernel keeps the pid of the process that called `listen`: it may
/// have exited, the pid may be reused, or it may be of another pid namespace.
fn describe_listener(uid: u32, pid: i32) -> String {
    let is_theirs = |meta: std::fs::Metadata| meta.uid() == uid;
    if pid > 0 && std::fs::metadata(format!("/proc/{pid}")).is_ok_and(is_theirs) {
        format!("process {pid} of user {uid}")
    } else {
        format!("what user {uid} runs there (as root: ss -xlp)")
    }
}

fn refusal_error(path: &Path, why: Refusal) -> OpenError {
    let (why, mend, errno) = match why {
        Refusal::UserNotServed => (
            "it does not serve processes of this user",
            "have its user start it for them too, with --user or --group",
            libc::EACCES,
        ),
        Refusal::AddressInUse => {
            ("somebody has that address", "choose another (mac=...) or none", libc::EADDRINUSE)
        }
        Refusal::AddressNotAllowed => (
            "processes of other users than its own have an address behind the NIC's MAC",
            "leave out mac=",
            libc::EACCES,
        ),
        Refusal::TooManyStations => (
            "this user has as many processes behind it as one may have (its --per-user, 255 unless \
             it was given less)",
            "run fewer of them on this node",
            libc::EUSERS,
        ),
        Refusal::NoResources => (
            "it has no memory or open files left",
            "raise its limit on open files (LimitNOFILE= of its service)",
            libc::ENOMEM,
        ),
    };
    OpenError::device(path.display().to_string(), errno, format!("the switch says: {why}"), mend)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a process is named if it lives and runs as the listening user.
    #[test]
    fn a_process_is_named_if_it_runs_as_the_listening_user() {
        let own = nix::unistd::geteuid().as_raw();
        let (pid, other) = (std::process::id() as i32, own + 1);
        assert_eq!(describe_listener(own, pid), format!("process {pid} of user {own}"));
        // No process has a number from 2^22 on.
        let unknown = [(other, pid), (own, 1 << 22), (own, 0), (own, -1)];
        for (uid, pid) in unknown {
            assert_eq!(
                describe_listener(uid, pid),
                format!("what user {uid} runs there (as root: ss -xlp)")
            );
        }
    }
}
