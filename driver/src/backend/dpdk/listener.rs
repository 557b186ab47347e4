//! The sockets on which memif servers wait for their clients: the one that clients know, behind
//! which stands a [`Relay`], and the driver's.
//!
//! The driver never closes its own: when the last device of a socket goes it frees what belongs to
//! it, and leaves the descriptor to EAL's interrupt thread, which would use that memory when the
//! next client comes (22.11 and later). So the socket is taken away from under the descriptor,
//! which EAL keeps: an event that never happens takes its place.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{UnixAddr, getsockname};

use super::DpdkSettings;
use super::failure::Failure;
use super::relay::Relay;
use crate::backend::get_option;

/// The sockets of this process that have servers, by name.
static SERVERS: Mutex<Option<HashMap<String, Servers>>> = Mutex::new(None);

/// Names that were given to the driver.
static SERIAL: Mutex<u32> = Mutex::new(0);

/// The servers of one socket.
struct Servers {
    count: usize,
    relay: Relay,
    /// What the driver listens on.
    private: String,
}

/// One server of a socket.
pub(super) struct Listener {
    name: String,
    private: String,
}

fn servers() -> MutexGuard<'static, Option<HashMap<String, Servers>>> {
    SERVERS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Listener {
    /// Counts a device that is about to be opened, if it is a memif server. The first of a socket
    /// opens that.
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
            let mut serial = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
            *serial += 1;
            let private = format!("barewire-memif-{}-{}", std::process::id(), *serial);
            let relay = Relay::open(&name, is_file, &private).map_err(|why| {
                let errno = why.raw_os_error().unwrap_or(libc::EINVAL);
                let failure = Failure::new(errno, format!("the socket {name}: {why}"));
                let stale = if is_file { format!(", or rm {name}") } else { String::new() };
                failure.mend(format!("choose another name{stale}"))
            })?;
            servers.insert(name.clone(), Servers { count: 0, relay, private });
        }
        let Servers { count, private, .. } = servers.get_mut(&name).expect("it is there by now");
        *count += 1;
        Ok(Some(Self { private: private.clone(), name }))
    }

    /// What the driver is told in place of `args`.
    pub(super) fn args(&self, args: &str) -> String {
        let is_other = |arg: &&str| !arg.starts_with("socket=") && !arg.starts_with("socket-abs");
        let others = args.split(',').filter(is_other).map(|arg| format!("{arg},"));
        format!("{}socket={}", others.collect::<String>(), self.private)
    }
}

/// Moves on the connections that are being made.
pub(super) fn pump() {
    servers().iter_mut().flat_map(HashMap::values_mut).for_each(|servers| servers.relay.pump());
}

impl Drop for Listener {
    /// Called when the device is gone, in EAL's thread, while nothing else uses memifs.
    fn drop(&mut self) {
        let mut all = servers();
        let Some(servers) = all.as_mut().and_then(|all| all.get_mut(&self.name)) else { return };
        servers.count -= 1;
        if servers.count == 0 {
            for fd in listening(&servers.private) {
                replace(fd);
            }
            all.as_mut().and_then(|all| all.remove(&self.name));
        }
    }
}

/// Descriptors of this process that listen on the local socket `name`.
fn listening(name: &str) -> Vec<RawFd> {
    let dir = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let fds = dir.filter_map(|entry| entry.file_name().to_str()?.parse::<RawFd>().ok());
    fds.filter(|&fd| listens(fd) && local_name(fd).as_deref() == Some(name.as_bytes())).collect()
}

fn listens(fd: RawFd) -> bool {
    let listens = get_option::<u32>(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN);
    listens.is_ok_and(|(value, _)| value == 1)
}

/// The name a local socket is bound to, abstract or a path.
fn local_name(fd: RawFd) -> Option<Vec<u8>> {
    let address = getsockname::<UnixAddr>(fd).ok()?;
    let path = || Some(address.path()?.as_os_str().as_bytes());
    // A driver may have given zeros behind it.
    let name = address.as_abstract().or_else(path)?.split(|&byte| byte == 0).next()?;
    Some(name.to_vec())
}

/// Puts an event that never happens in the place of `fd`.
fn replace(fd: RawFd) {
    let Ok(never) = EventFd::from_flags(EfdFlags::EFD_CLOEXEC) else { return };
    let never = OwnedFd::from(never);
    // SAFETY: takes numbers. What `fd` was is used by nobody any more but by EAL's interrupt
    // thread, which waits for it to become readable and is content with any file.
    if unsafe { libc::dup3(never.as_raw_fd(), fd, libc::O_CLOEXEC) } < 0 {
        tracing::warn!("a memif's socket stays open: {}", std::io::Error::last_os_error());
    }
}
