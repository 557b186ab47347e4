//! Listening sockets of memif servers: the public one that clients connect to, handled by a
//! [`Relay`], and the driver's private one.
//!
//! The driver never closes its socket: when the last device of a socket is removed it frees the
//! socket's state, but leaves the descriptor to EAL's interrupt thread, which would use the freed
//! state when the next client connects (22.11 and later). So the descriptor, which EAL keeps
//! polling, is replaced by an eventfd that is never signalled.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{UnixAddr, getsockname};

use super::DpdkSettings;
use super::failure::Failure;
use super::private_dir::PrivateDir;
use super::relay::Relay;
use crate::backend::get_option;

/// The server sockets of this process, by public name.
static SERVERS: Mutex<Option<HashMap<String, ServerSocket>>> = Mutex::new(None);

/// A public socket with its relay and the number of its devices.
struct ServerSocket {
    count: usize,
    relay: Relay,
    /// Directory of the socket that the driver listens on.
    private: PrivateDir,
}

/// Reference of one device to its server socket.
pub(super) struct Listener {
    name: String,
    private: PathBuf,
}

fn servers() -> MutexGuard<'static, Option<HashMap<String, ServerSocket>>> {
    SERVERS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Listener {
    /// References the server socket of a device that is about to be opened, if it is a memif
    /// server. Opens the socket for its first device.
    ///
    /// # Errors
    /// The socket cannot be opened.
    pub(super) fn of(settings: &DpdkSettings) -> Result<Option<Self>, Failure> {
        if !settings.device.starts_with("net_memif") || settings.arg("role") != Some("server") {
            return Ok(None);
        }
        let name = settings.arg("socket").unwrap_or("/run/memif.sock").to_owned();
        let is_file = settings.arg("socket-abstract") == Some("no");
        let mut servers = servers();
        let servers = servers.get_or_insert_default();
        if !servers.contains_key(&name) {
            let private = PrivateDir::new().map_err(|why| {
                let errno = why.raw_os_error().unwrap_or(libc::EINVAL);
                Failure::new(errno, format!("no directory for the driver's socket: {why}"))
                    .mend("check free space and permissions: df -h /tmp; ls -ld /tmp")
            })?;
            let relay = Relay::open(&name, is_file, &private.socket()).map_err(|why| {
                let errno = why.raw_os_error().unwrap_or(libc::EINVAL);
                let failure = Failure::new(errno, format!("the socket {name}: {why}"));
                let stale = if is_file { format!(", or rm {name}") } else { String::new() };
                failure.mend(format!("choose another name{stale}"))
            })?;
            servers.insert(name.clone(), ServerSocket { count: 0, relay, private });
        }
        let ServerSocket { count, private, .. } =
            servers.get_mut(&name).expect("it is there by now");
        *count += 1;
        Ok(Some(Self { private: private.socket(), name }))
    }

    /// Device arguments with the private socket in place of the public one.
    pub(super) fn args(&self, args: &str) -> String {
        let is_other = |arg: &&str| !arg.starts_with("socket=") && !arg.starts_with("socket-abs");
        let others = args.split(',').filter(is_other).map(|arg| format!("{arg},"));
        let private = self.private.display();
        format!("{}socket={private},socket-abstract=no", others.collect::<String>())
    }
}

/// Forwards the messages of connections that are being made.
pub(super) fn pump() {
    servers().iter_mut().flat_map(HashMap::values_mut).for_each(|servers| servers.relay.pump());
}

impl Drop for Listener {
    /// Called in EAL's thread after the device was removed, while nothing else uses memifs.
    fn drop(&mut self) {
        let mut all = servers();
        let Some(servers) = all.as_mut().and_then(|all| all.get_mut(&self.name)) else { return };
        servers.count -= 1;
        if servers.count == 0 {
            for fd in listening_fds(&self.private) {
                replace_with_eventfd(fd);
            }
            all.as_mut().and_then(|all| all.remove(&self.name));
        }
    }
}

/// Descriptors of this process that listen on the local socket `name`.
fn listening_fds(name: &Path) -> Vec<RawFd> {
    let name = name.as_os_str().as_bytes();
    let is_named = |fd: &RawFd| is_listening(*fd) && local_name(*fd).as_deref() == Some(name);
    descriptors().filter(is_named).collect()
}

/// Descriptors of this process.
fn descriptors() -> impl Iterator<Item = RawFd> {
    let dir = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    dir.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn is_listening(fd: RawFd) -> bool {
    let is_listening = get_option::<u32>(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN);
    is_listening.is_ok_and(|(value, _)| value == 1)
}

/// Name that a local socket is bound to, abstract or a path.
fn local_name(fd: RawFd) -> Option<Vec<u8>> {
    let address = getsockname::<UnixAddr>(fd).ok()?;
    let path = || Some(address.path()?.as_os_str().as_bytes());
    // The driver may have appended zeros.
    let name = address.as_abstract().or_else(path)?.split(|&byte| byte == 0).next()?;
    Some(name.to_vec())
}

/// Replaces `fd` by an eventfd that is never signalled.
fn replace_with_eventfd(fd: RawFd) {
    let Ok(never) = EventFd::from_flags(EfdFlags::EFD_CLOEXEC) else { return };
    let never = OwnedFd::from(never);
    // SAFETY: takes numbers. Only EAL's interrupt thread still uses `fd`, which it polls for
    // reading, and which may be any file.
    if unsafe { libc::dup3(never.as_raw_fd(), fd, libc::O_CLOEXEC) } < 0 {
        tracing::warn!("a memif's socket stays open: {}", std::io::Error::last_os_error());
    }
}

/// Names of the local sockets that this process listens on.
#[cfg(test)]
pub(super) fn names() -> Vec<String> {
    let listening = descriptors().filter(|&fd| is_listening(fd)).filter_map(local_name);
    listening.map(|name| String::from_utf8_lossy(&name).into_owned()).collect()
}
