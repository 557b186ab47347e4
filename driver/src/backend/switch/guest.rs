//! A process that asks the switch of another user for a segment.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{UnixAddr, connect, getsockopt};

use super::greeting::{Came, Message, Refusal, Socket};
use crate::backend::{readable, sleep};
use crate::error::{OPEN_FILES, OpenError};
use crate::port::Station;

/// Where switches have the sockets at which processes of other users ask. Not the abstract ones,
/// which are of one network namespace and anybody's to take: a directory that root made says that
/// who has a socket in there is meant to, and a container is given it as a whole.
pub const RUN_DIR: &str = "/run/barewire";

/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(5);
/// Between two attempts at a socket that nobody listens at.
const RETRY: Duration = Duration::from_millis(10);

/// The socket of the switch whose segment for its own user has this name.
pub fn socket_in(dir: &Path, segment: &str) -> PathBuf {
    dir.join(format!("{segment}.sock"))
}

/// What a switch gave.
pub(super) struct Welcome {
    /// Open for as long as the switch lives and we do.
    pub(super) socket: Socket,
    pub(super) file: File,
    pub(super) station: Station,
}

/// Asks at `path` to be `station`, or any. `None` if there is no switch: at once if there
/// is no socket, and after `patience` if nobody listens at it, as when a switch was killed and the
/// next one is about to start.
///
/// # Errors
/// It does not serve us, or cannot; or it is none that we trust.
pub(super) fn ask(
    path: &Path,
    station: Option<Station>,
    patience: Duration,
) -> Result<Option<Welcome>, OpenError> {
    let until = Instant::now() + patience;
    loop {
        match ask_once(path, station)? {
            Asked::Welcome(welcome) => return Ok(Some(welcome)),
            Asked::Deaf if Instant::now() < until => std::thread::sleep(RETRY),
            Asked::Deaf | Asked::Missing => return Ok(None),
        }
    }
}

enum Asked {
    Welcome(Welcome),
    /// There is no socket.
    Missing,
    /// Nobody listens, or went before the answer.
    Deaf,
}

fn ask_once(path: &Path, station: Option<Station>) -> Result<Asked, OpenError> {
    let os = |what, errno: Errno, hint| OpenError::os(what, path, errno, hint);
    let no_socket = |e| OpenError::os("cannot make a socket for", path, e, OPEN_FILES);
    let socket = Socket::new().map_err(no_socket)?;
    let to = UnixAddr::new(path).map_err(|errno| os("cannot ask", errno, ""))?;
    match connect(socket.fd(), &to) {
        Ok(()) => {}
        Err(Errno::ENOENT | Errno::ENOTDIR) => return Ok(Asked::Missing),
        Err(Errno::ECONNREFUSED | Errno::EAGAIN | Errno::EINTR) => return Ok(Asked::Deaf),
        Err(errno) => {
            let hint = "; the switch does not serve this user: see its --user and --group";
            return Err(os("cannot ask the switch at", errno, hint));
        }
    }
    check_trust(path, &socket)?;
    // Who refuses all of us has done so already, and hears nothing.
    socket.say(Message::Hello(station), None);
    let until = Instant::now() + ANSWER;
    loop {
        match socket.hear(true) {
            Came::Message(Message::Welcome(station), Some(fd)) => {
                // Of whom we trust (`check_trust`).
                let file = fd.trust().into();
                return Ok(Asked::Welcome(Welcome { socket, file, station }));
            }
            Came::Message(Message::Refused(why), _) => return Err(refused(path, why)),
            Came::Unopened => {
                let what = "cannot take what is given by the switch at";
                return Err(os(what, Errno::EMFILE, OPEN_FILES));
            }
            Came::Message(..) | Came::HungUp => return Ok(Asked::Deaf),
            Came::Nothing => {}
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(os("no answer from the switch at", Errno::ETIMEDOUT, "; is it stopped?"));
        }
        sleep(&mut [readable(socket.fd())], left);
    }
}

/// Who listens is root, ourselves, or whom root gave the directory to: it is about to see all our
/// frames.
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
    let (whose, path) = (listener(peer.uid(), peer.pid()), path.display());
    Err(untrusted(why, format!("end {whose} and remove it (rm {path})")))
}

/// Who is to be ended. The kernel keeps the number of the process that began to listen, which may
/// have ended, be another's by now, or be of other numbers than ours.
fn listener(uid: u32, pid: i32) -> String {
    let is_theirs = |meta: std::fs::Metadata| meta.uid() == uid;
    if pid > 0 && std::fs::metadata(format!("/proc/{pid}")).is_ok_and(is_theirs) {
        format!("process {pid} of user {uid}")
    } else {
        format!("what user {uid} runs there (as root: ss -xlp)")
    }
}

fn refused(path: &Path, why: Refusal) -> OpenError {
    let (why, mend, errno) = match why {
        Refusal::Stranger => (
            "it does not serve processes of this user",
            "have its user start it for them too, with --user or --group",
            libc::EACCES,
        ),
        Refusal::AddressInUse => {
            ("somebody has that address", "choose another (mac=...) or none", libc::EADDRINUSE)
        }
        Refusal::NotYours => (
            "processes of other users than its own have an address behind the NIC's MAC",
            "leave out mac=",
            libc::EACCES,
        ),
        Refusal::Crowded => (
            "this user has as many processes behind it as one may have (its --per-user, 255 unless \
             it was given less)",
            "run fewer of them on this node",
            libc::EUSERS,
        ),
        Refusal::NoRoom => (
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

    /// Goal: a process is named if it lives and is of the user who listens.
    #[test]
    fn a_process_is_named_if_it_is_theirs() {
        let own = nix::unistd::geteuid().as_raw();
        let (pid, other) = (std::process::id() as i32, own + 1);
        assert_eq!(listener(own, pid), format!("process {pid} of user {own}"));
        // No process has a number from 2^22 on.
        let unknown = [(other, pid), (own, 1 << 22), (own, 0), (own, -1)];
        for (uid, pid) in unknown {
            assert_eq!(
                listener(uid, pid),
                format!("what user {uid} runs there (as root: ss -xlp)")
            );
        }
    }
}
