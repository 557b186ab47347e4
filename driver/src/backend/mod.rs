//! The devices, ports around a port, and signs of life on files ([`lock`]).

pub mod afpacket;
pub mod any_board;
pub mod any_port;
mod batch;
mod bound;
#[cfg(feature = "dpdk")]
pub mod dpdk;
pub mod fault;
mod frame_queue;
pub mod inet;
pub mod ip;
pub mod lock;
#[cfg(test)]
mod logged;
pub mod loopback;
pub mod memif;
pub mod near;
pub mod netdev;
pub mod pcap;
pub mod shm;
mod sum;
pub mod switch;
mod tapped;
pub mod udp;
mod udp_gso;
mod unix;
pub mod vfio;
pub mod vlan;
pub mod xdp;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use nix::sys::eventfd::{EfdFlags, EventFd};

/// Sleeps until one of `fds` has something, at most for `timeout`. May return early. False if only
/// time has passed.
fn sleep(fds: &mut [libc::pollfd], timeout: Duration) -> bool {
    let timeout = libc::timespec {
        tv_sec: timeout.as_secs().min(1 << 30) as libc::time_t,
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // SAFETY: `ppoll` reads and writes the entries of a slice and reads a timespec, both of which
    // live across the call; null means the signal mask stays.
    unsafe {
        let (at, count) = (fds.as_mut_ptr(), fds.len() as libc::nfds_t);
        libc::ppoll(at, count, &raw const timeout, std::ptr::null()) != 0
    }
}

/// An entry for [`sleep`]: until `fd` can be read. One below 0 is not looked at.
fn readable(fd: RawFd) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

/// What [`sleep`] is given for a descriptor that may not be there.
fn raw(fd: Option<BorrowedFd<'_>>) -> RawFd {
    fd.map_or(-1, |fd| fd.as_raw_fd())
}

/// An eventfd that ends a [`sleep`] of another thread.
struct WakeEvent(EventFd);

impl WakeEvent {
    fn new() -> io::Result<Self> {
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        Ok(Self(EventFd::from_value_and_flags(0, flags)?))
    }

    fn fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }

    fn ring(&self) {
        // Fails only if the count would pass 2^64 - 2.
        let _ = self.0.write(1);
    }

    fn clear(&self) {
        // Fails only if another sleeper has done it.
        let _ = self.0.read();
    }
}

/// A descriptor that a system call returned, or the error.
fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it for us, so nobody else closes it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A socket that ends with this process's program.
fn socket(family: libc::c_int, kind: libc::c_int, protocol: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: `socket` takes numbers and touches no memory.
    owned(unsafe { libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol) })
}

/// Gives a socket its address, the `sockaddr_` of its family.
fn bind<T>(fd: RawFd, addr: &T) -> io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of a value that lives across the call.
    let done = unsafe { libc::bind(fd, std::ptr::from_ref(addr).cast(), len) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Sets an option of a socket.
fn set_option<T>(fd: RawFd, level: i32, option: i32, value: &T) -> io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of a value that lives across the call, and of a filter
    // also the program that it points to, which its caller keeps.
    let done =
        unsafe { libc::setsockopt(fd, level, option, std::ptr::from_ref(value).cast(), len) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Busy polling: microseconds and frames per call at most.
const BUSY_POLL_US: libc::c_int = 20;
const BUSY_POLL_BUDGET: libc::c_int = 64;

/// Enables busy polling: the thread that calls the socket runs the driver's NAPI poll.
///
/// # Errors
/// `ENOPROTOOPT`: the kernel is older than 5.11. `EPERM`: no CAP_NET_ADMIN.
fn busy_poll(fd: RawFd) -> io::Result<()> {
    let on: libc::c_int = 1;
    set_option(fd, libc::SOL_SOCKET, libc::SO_PREFER_BUSY_POLL, &on)?;
    set_option(fd, libc::SOL_SOCKET, libc::SO_BUSY_POLL, &BUSY_POLL_US)?;
    set_option(fd, libc::SOL_SOCKET, libc::SO_BUSY_POLL_BUDGET, &BUSY_POLL_BUDGET)
}

/// Sets the length of a socket's buffer, past what an unprivileged process may have if this one
/// may: by the option `forced`, or by `asked`.
fn enlarge(fd: RawFd, [forced, asked]: [libc::c_int; 2], len: libc::c_int) -> io::Result<()> {
    let set = |option| set_option(fd, libc::SOL_SOCKET, option, &len);
    set(forced).or_else(|_refused| set(asked))
}

const SEND_BUFFER: [libc::c_int; 2] = [libc::SO_SNDBUFFORCE, libc::SO_SNDBUF];
const RECEIVE_BUFFER: [libc::c_int; 2] = [libc::SO_RCVBUFFORCE, libc::SO_RCVBUF];

/// Numbers without padding.
///
/// # Safety
/// Any bytes, zeros as well, are a value of the type.
unsafe trait Plain {}

// SAFETY: a number.
unsafe impl Plain for u32 {}
// SAFETY: a number.
unsafe impl Plain for u64 {}
// SAFETY: nothing but the elements.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// Reads an option of a socket: the value, zero where the kernel says nothing, and how many of its
/// bytes the kernel has written.
fn get_option<T: Plain>(fd: RawFd, level: i32, option: i32) -> io::Result<(T, usize)> {
    // SAFETY: zeros are a value by the trait's word.
    let mut value: T = unsafe { std::mem::zeroed() };
    let mut len = size_of::<T>() as libc::socklen_t;
    let at = std::ptr::from_mut(&mut value);
    // SAFETY: the kernel writes at most `len` bytes to a value that is as long, and what they are
    // is a value by the trait's word.
    let done = unsafe { libc::getsockopt(fd, level, option, at.cast(), &raw mut len) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok((value, len as usize)) }
}

/// Takes the error that is left on a socket, so that [`sleep`] does not return for it again.
fn clear_error(fd: RawFd) {
    // There is nothing to be done about what it says.
    let _ = get_option::<u32>(fd, libc::SOL_SOCKET, libc::SO_ERROR);
}
