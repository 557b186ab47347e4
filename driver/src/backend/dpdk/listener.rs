//! The socket on which a memif server waits for its client.
//!
//! The driver never closes it: when the last device of a socket goes it frees what belongs to it,
//! and leaves the descriptor to EAL's interrupt thread, which would use that memory when the next
//! client comes (22.11 and later). So the socket is taken away from under the descriptor, which
//! EAL keeps: an event that never happens takes its place.

use std::collections::HashMap;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::DpdkSettings;

/// Servers on each socket.
static SERVERS: Mutex<Option<HashMap<String, usize>>> = Mutex::new(None);

/// One server of a socket.
pub(super) struct Listener(String);

impl Listener {
    /// Counts a device that is being opened, if it is a memif server.
    pub(super) fn of(settings: &DpdkSettings) -> Option<Self> {
        if !settings.device.starts_with("net_memif") || settings.arg("role") != Some("server") {
            return None;
        }
        let name = settings.arg("socket").unwrap_or("/run/memif.sock").to_owned();
        let mut servers = SERVERS.lock().unwrap_or_else(PoisonError::into_inner);
        *servers.get_or_insert_default().entry(name.clone()).or_default() += 1;
        Some(Self(name))
    }
}

impl Drop for Listener {
    /// Called when the device is gone, in EAL's thread, while nothing else uses memifs.
    fn drop(&mut self) {
        let mut servers = SERVERS.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(count) = servers.as_mut().and_then(|servers| servers.get_mut(&self.0)) else {
            return;
        };
        *count = count.saturating_sub(1);
        if *count == 0 {
            for fd in listening(&self.0) {
                replace(fd);
            }
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
    let (mut value, mut len) = (0, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: writes at most `len` bytes to an int, and fails on what is no socket.
    let code = unsafe {
        let value = (&raw mut value).cast();
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN, value, &mut len)
    };
    code == 0 && value == 1
}

/// The name a local socket is bound to, abstract or a path.
fn local_name(fd: RawFd) -> Option<Vec<u8>> {
    let mut address = MaybeUninit::<libc::sockaddr_un>::zeroed();
    let mut len = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: writes at most `len` bytes to an address; zeros are one.
    let (code, address) = unsafe {
        let code = libc::getsockname(fd, address.as_mut_ptr().cast(), &mut len);
        (code, address.assume_init())
    };
    if code != 0 || i32::from(address.sun_family) != libc::AF_UNIX {
        return None;
    }
    let bytes: Vec<u8> = address.sun_path.iter().map(|&byte| byte as u8).collect();
    let bytes = bytes.strip_prefix(&[0]).unwrap_or(&bytes);
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    Some(bytes[..end].to_vec())
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
