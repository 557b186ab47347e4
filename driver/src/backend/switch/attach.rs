//! Client side of the handshake: a process asks the switch of another user for a segment.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{UnixAddr, connect, getsockopt};

use super::handshake::{Incoming, Message, Refusal, Socket};
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
    pub(super) file: File,
    pub(super) station: Station,
}

/// Asks the switch at `path` for the address `station`, or for any. `None` without a switch: at
/// once if there is no socket, and after `patience` if nobody listens at it, as between a killed
/// switch and its successor.
///
/// # Errors
/// The switch refuses this user or has no resources, or whoever listens is not trusted.
pub(super) fn attach(
    path: &Path,
    station: Option<Station>,
    patience: Duration,
) -> Result<Option<Grant>, OpenError> {
    let until = Instant::now() + patience;
    loop {
        match try_attach(path, station)? {
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

fn try_attach(path: &Path, station: Option<Station>) -> Result<AttachResult, OpenError> {
    let os = |what, errno: Errno, hint| OpenError::os(what, path, errno, hint);
    let no_socket = |e| OpenError::os("cannot make a socket for", path, e, OPEN_FILES);
    let socket = Socket::new().map_err(no_socket)?;
    let to = UnixAddr::new(path).map_err(|errno| os("cannot ask", errno, ""))?;
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
    check_trust(path, &socket)?;
    // A switch that refuses the user has already sent that and closed: a failed send is no error.
    socket.send(Message::Hello(station), None);
    let until = Instant::now() + ANSWER_TIMEOUT;
    loop {
        match socket.recv(true) {
            Incoming::Message(Message::Welcome(station), Some(fd)) => {
                // The sender was checked by `check_trust`.
                let file = fd.into_inner().into();
                return Ok(AttachResult::Attached(Grant { socket, file, station }));
            }
            Incoming::Message(Message::Refused(why), _) => return Err(refusal_error(path, why)),
            Incoming::NoDescriptor => {
                let what = "cannot take what is given by the switch at";
                return Err(os(what, Errno::EMFILE, OPEN_FILES));
            }
            Incoming::Message(..) | Incoming::Closed => return Ok(AttachResult::NoListener),
            Incoming::Empty => {}
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(os("no answer from the switch at", Errno::ETIMEDOUT, "; is it stopped?"));
        }
        sleep(&mut [readable(socket.fd())], left);
    }
}

/// Checks that the listener runs as root, as our user, or as the directory's owner: it will see
/// all our frames.
fn check_trust(path: &Path, socket: &Socket) -> Result<(), OpenError> {
    let untrusted = |why: String, mend: String| {
        let why = format!("not safe to ask: {why}");
        OpenError::device(path.display().to_string(), libc::EACCES, why, mend)
    };
    let dir = path.parent().unwrap_or(Path::new("/"));
    let see = || format!("see: ls -ld {}", dir.display());
    let meta = std::fs::metadata(dir).map_err(|e| untrusted(e.to_string(), see()))?;
    if meta.mode() & 0o002 != 0 {
        let mend = format!("chmod o-w {}", dir.display());
        return Err(untrusted("everybody may make files beside it".into(), mend));
    }
    let peer =
        getsockopt(&socket.0, PeerCredentials).map_err(|e| untrusted(e.to_string(), see()))?;
    let own = nix::unistd::geteuid().as_raw();
    if [0, own, meta.uid()].contains(&peer.uid()) {
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
