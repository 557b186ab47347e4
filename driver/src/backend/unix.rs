//! Messages over Unix sockets, with an optional descriptor, and deferred closing of descriptors
//! that peers pass.

use std::io::IoSlice;
use std::ops::Deref;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use nix::errno::Errno;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, getsockopt, sendmsg};

use crate::own_thread::without_signals;

/// Whether the peer process is of the same user or root.
pub(super) fn is_trusted(socket: &OwnedFd) -> bool {
    let own = nix::unistd::geteuid().as_raw();
    getsockopt(socket, PeerCredentials).is_ok_and(|peer| peer.uid() == own || peer.uid() == 0)
}

/// Closes a descriptor from a peer, or a socket with such descriptors queued, in a thread of its
/// own. The peer decides how long closing takes: a FUSE file system is asked, a network file system
/// writes back, a TCP socket lingers (`SO_LINGER`).
pub(super) struct DeferredClose<T: Send + 'static>(Option<T>);

/// Number of values being closed.
static CLOSING: AtomicUsize = AtomicUsize::new(0);
const CLOSING_MAX: usize = 64;

/// Decrements [`CLOSING`] when dropped.
struct Closing;

impl Drop for Closing {
    fn drop(&mut self) {
        CLOSING.fetch_sub(1, Relaxed);
    }
}

impl<T: Send + 'static> DeferredClose<T> {
    pub(super) fn new(what: T) -> Self {
        Self(Some(what))
    }

    /// Returns the value, which is known to close at once.
    pub(super) fn into_inner(mut self) -> T {
        self.0.take().expect("taken here and by drop alone")
    }
}

impl<T: Send + 'static> Deref for DeferredClose<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("taken by `into_inner` and drop alone")
    }
}

impl<T: Send + 'static> Drop for DeferredClose<T> {
    fn drop(&mut self) {
        let Some(what) = self.0.take() else { return };
        CLOSING.fetch_add(1, Relaxed);
        let both = (what, Closing);
        // If no thread can be made, it is closed here.
        let named = std::thread::Builder::new().name("close".into());
        let _ = without_signals(|| named.spawn(move || drop(both)));
    }
}

/// Whether too many values are being closed. New connections are not accepted then, which bounds
/// the number of threads and descriptors.
pub(super) fn has_close_backlog() -> bool {
    CLOSING.load(Relaxed) >= CLOSING_MAX
}

/// A received message.
pub(super) struct Received {
    /// Length in bytes; 0 if the peer has closed the connection.
    pub(super) len: usize,
    /// The descriptor in the message, if one was wanted. Close-on-exec.
    pub(super) fd: Option<DeferredClose<OwnedFd>>,
    /// Whether nothing was truncated: the bytes fit, and the message had at most as many
    /// descriptors as were wanted.
    pub(super) is_whole: bool,
}

/// Bytes before a control message's own.
const CONTROL_HEAD: usize = size_of::<libc::cmsghdr>();
/// Descriptors of a message at most, in the kernel's `scm.h`.
const FDS_MAX: usize = 253;
const CONTROL_LEN: usize = CONTROL_HEAD + FDS_MAX * size_of::<RawFd>();

/// Sends a message with an optional descriptor, and returns the number of bytes sent. Never blocks.
pub(super) fn send(socket: RawFd, bytes: &[u8], fd: Option<RawFd>) -> Result<usize, Errno> {
    let fds = [fd.unwrap_or(-1)];
    let rights = [ControlMessage::ScmRights(&fds)];
    let rights = if fd.is_some() { &rights[..] } else { &[] };
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    sendmsg::<UnixAddr>(socket, &[IoSlice::new(bytes)], rights, flags, None)
}

/// Receives one message into `into`, with one descriptor if `takes_fd`. Never blocks.
///
/// The kernel closes descriptors beyond the room in `msg_control` within this call. So there is
/// room for all, and unwanted ones are closed through [`DeferredClose`].
///
/// # Errors
/// Those of `recvmsg`; nothing was received, and no descriptor made.
pub(super) fn receive(socket: RawFd, into: &mut [u8], takes_fd: bool) -> Result<Received, Errno> {
    let mut bytes = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // Words, so that it is aligned.
    let mut control = [0_u64; CONTROL_LEN.div_ceil(8)];
    // SAFETY: zeros are a message without an address, bytes and descriptors.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut bytes, 1);
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_LEN as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the kernel writes to `into` and `control`, no more than their lengths say, both of
    // which live across the call.
    let len = Errno::result(unsafe { libc::recvmsg(socket, &raw mut message, flags) })?;
    // SAFETY: a message that was just received, of whose control part the length is right.
    let mut fds = unsafe { descriptors(&message) };
    let is_whole = message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) == 0
        && fds.len() <= usize::from(takes_fd);
    let fd = if takes_fd { fds.pop() } else { None };
    if !fds.is_empty() {
        drop(DeferredClose::new(fds));
    }
    Ok(Received { len: len.unsigned_abs(), fd: fd.map(DeferredClose::new), is_whole })
}

/// The descriptors of a message. Over a socket that asks for nothing else they are its only control
/// message.
///
/// # Safety
/// `message` was received just now, and this is the first call for it.
unsafe fn descriptors(message: &libc::msghdr) -> Vec<OwnedFd> {
    // SAFETY: the control part is as long as the message says, and null if there is none.
    let Some(head) = (unsafe { libc::CMSG_FIRSTHDR(message).as_ref() }) else { return vec![] };
    if (head.cmsg_level, head.cmsg_type) != (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
        return vec![];
    }
    // Of another type with another C library.
    let len: usize = head.cmsg_len as _;
    let count = len.saturating_sub(CONTROL_HEAD) / size_of::<RawFd>();
    // SAFETY: the bytes behind the head are there, as its length says.
    let at = unsafe { libc::CMSG_DATA(head) }.cast::<RawFd>();
    // SAFETY: as above, and descriptors that were received just now are nobody else's.
    let own = |i| unsafe { OwnedFd::from_raw_fd(at.wrapping_add(i).read_unaligned()) };
    (0..count).map(own).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::io::{IoSlice, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::time::{Duration, Instant};

    use nix::sys::socket::{
        AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, sendmsg, socketpair,
    };

    /// Two ends that are joined.
    pub(crate) fn socket_pair() -> [OwnedFd; 2] {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap().into()
    }

    /// Sends `bytes`, and `fd` as often as `times` says.
    pub(crate) fn send(from: &OwnedFd, bytes: &[u8], fd: &OwnedFd, times: usize) {
        let fds = vec![fd.as_raw_fd(); times];
        let rights = [ControlMessage::ScmRights(&fds)];
        let rights = if times == 0 { &[][..] } else { &rights[..] };
        let (bytes, flags) = ([IoSlice::new(bytes)], MsgFlags::MSG_DONTWAIT);
        sendmsg::<UnixAddr>(from.as_raw_fd(), &bytes, rights, flags, None).unwrap();
    }

    /// Whether soon no other descriptor of this process leads to the file that `fd` does.
    pub(crate) fn is_alone(fd: &OwnedFd) -> bool {
        let of = |path: &std::path::Path| std::fs::read_link(path).ok();
        let wanted = of(format!("/proc/self/fd/{}", fd.as_raw_fd()).as_ref()).unwrap();
        let is_one = |entry: &std::fs::DirEntry| of(&entry.path()).as_ref() == Some(&wanted);
        let until = Instant::now() + Duration::from_secs(10);
        while std::fs::read_dir("/proc/self/fd").unwrap().flatten().filter(is_one).count() > 1 {
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// A TCP socket that takes a minute to close, for whoever closes it last, and the other end,
    /// which ends the minute.
    pub(crate) fn slow_closing_socket() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut slow = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        slow.set_nonblocking(true).unwrap();
        while slow.write(&[0; 1 << 16]).is_ok() {}
        slow.set_nonblocking(false).unwrap();
        let linger = libc::linger { l_onoff: 1, l_linger: 60 };
        let fd = slow.as_raw_fd();
        crate::backend::set_option(fd, libc::SOL_SOCKET, libc::SO_LINGER, &linger).unwrap();
        (slow.into(), other)
    }

    /// Goal: the receiver does not wait for a slow close: of a wanted descriptor, of a second one,
    /// of an unwanted one, and of one that is queued in a socket.
    #[test]
    fn receiving_does_not_wait_for_a_slow_close() {
        let (mut others, begun) = (Vec::new(), Instant::now());
        for (takes_fd, times) in [(true, 1), (true, 2), (false, 1)] {
            let ([a, b], (slow, other)) = (socket_pair(), slow_closing_socket());
            send(&a, b"8 bytes.", &slow, times);
            drop(slow);
            drop(receive(b.as_raw_fd(), &mut [0; 8], takes_fd).unwrap());
            others.push(other);
        }
        let ([a, b], (slow, other)) = (socket_pair(), slow_closing_socket());
        send(&a, b"8 bytes.", &slow, 1);
        drop((slow, DeferredClose::new(b)));
        others.push(other);
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    }

    /// Goal: all descriptors of a message are closed in the end. The kernel passes at most 253.
    #[test]
    fn no_descriptor_stays_open() {
        let [a, b] = socket_pair();
        let (file, mut bytes) = (OwnedFd::from(tempfile::tempfile().unwrap()), [0; 8]);
        for takes_fd in [true, false] {
            for times in [0, 1, 2, 4, 12, 13, 253] {
                send(&a, b"8 bytes.", &file, times);
                let got = receive(b.as_raw_fd(), &mut bytes, takes_fd).unwrap();
                assert_eq!((got.len, &bytes), (8, b"8 bytes."));
                assert_eq!(got.is_whole, times <= usize::from(takes_fd), "{times}");
                assert_eq!(got.fd.is_some(), takes_fd && times > 0, "{times}");
                drop(got);
                assert!(is_alone(&file), "{times} descriptors, wanted: {takes_fd}");
            }
        }
        send(&a, b"more than 8 bytes", &file, 1);
        let got = receive(b.as_raw_fd(), &mut bytes, true).unwrap();
        assert!(!got.is_whole && got.fd.is_some());
        assert_eq!(receive(b.as_raw_fd(), &mut bytes, true).err(), Some(Errno::EAGAIN));
        drop(a);
        assert_eq!(receive(b.as_raw_fd(), &mut bytes, true).unwrap().len, 0);
    }
}
