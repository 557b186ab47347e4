//! Messages over Unix sockets, with a descriptor or without.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;

/// What was received.
pub(super) struct Received {
    /// Its bytes; 0 if the other side has hung up.
    pub(super) len: usize,
    /// The descriptor that came along. Closed in children that execute something else.
    pub(super) fd: Option<OwnedFd>,
    /// All of it is there: there were no more bytes than room, and no more descriptors than one, or
    /// than none where none was wanted.
    pub(super) is_whole: bool,
}

/// Bytes before a control message's own.
const CONTROL_HEAD: usize = size_of::<libc::cmsghdr>();

/// Receives one message into `into`, with one descriptor if `takes_fd`. Never blocks.
///
/// The kernel makes as many descriptors as `msg_control` has room for, closes the others itself and
/// says so (`MSG_CTRUNC`), as it does when the process may open no more. So there is room for one,
/// and whatever was made is taken, whether the message is whole or not.
///
/// # Errors
/// Those of `recvmsg`; nothing was received, and no descriptor made.
pub(super) fn receive(socket: RawFd, into: &mut [u8], takes_fd: bool) -> Result<Received, Errno> {
    let mut bytes = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // Words, so that it is aligned.
    let mut control = [0_u64; (CONTROL_HEAD + size_of::<RawFd>()).div_ceil(8)];
    // SAFETY: zeros are a message without an address, bytes and descriptors.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut bytes, 1);
    if takes_fd {
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = (CONTROL_HEAD + size_of::<RawFd>()) as _;
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the kernel writes to `into` and `control`, no more than their lengths say, both of
    // which live across the call.
    let len = Errno::result(unsafe { libc::recvmsg(socket, &raw mut message, flags) })?;
    // SAFETY: a message that was just received, of whose control part the length is right.
    let fd = unsafe { first_fd(&message) };
    let is_whole = message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) == 0;
    Ok(Received { len: len.unsigned_abs(), fd, is_whole })
}

/// The descriptor of a message that has one at most.
///
/// # Safety
/// `message` was received just now, and this is the first call for it.
unsafe fn first_fd(message: &libc::msghdr) -> Option<OwnedFd> {
    // SAFETY: the control part is as long as the message says, and null if there is none.
    let head = unsafe { libc::CMSG_FIRSTHDR(message).as_ref() }?;
    let is_fd = (head.cmsg_level, head.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS);
    if !is_fd || (head.cmsg_len as usize) < CONTROL_HEAD + size_of::<RawFd>() {
        return None;
    }
    // SAFETY: the bytes behind the head are there, as its length says.
    let fd = unsafe { libc::CMSG_DATA(head).cast::<RawFd>().read_unaligned() };
    // SAFETY: a descriptor that was received just now, and is nobody else's.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::io::IoSlice;
    use std::os::fd::AsRawFd;

    use nix::sys::socket::{
        AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, sendmsg, socketpair,
    };

    /// Two ends that are joined.
    pub(crate) fn joined() -> [OwnedFd; 2] {
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

    /// How many descriptors of this process lead to the file that `fd` does.
    pub(crate) fn open_files(fd: &OwnedFd) -> usize {
        let of = |path: &std::path::Path| std::fs::read_link(path).ok();
        let wanted = of(format!("/proc/self/fd/{}", fd.as_raw_fd()).as_ref()).unwrap();
        let all = std::fs::read_dir("/proc/self/fd").unwrap();
        all.filter(|entry| of(&entry.as_ref().unwrap().path()).as_ref() == Some(&wanted)).count()
    }

    /// Goal: whatever comes along, at most one descriptor is made of it, and that one is ours to
    /// close. 253 are the most that the kernel passes on.
    #[test]
    fn no_descriptor_stays_open() {
        let [a, b] = joined();
        let (file, mut bytes) = (OwnedFd::from(tempfile::tempfile().unwrap()), [0; 8]);
        for takes_fd in [true, false] {
            for times in [0, 1, 2, 4, 12, 13, 253] {
                send(&a, b"8 bytes.", &file, times);
                let got = receive(b.as_raw_fd(), &mut bytes, takes_fd).unwrap();
                assert_eq!((got.len, &bytes), (8, b"8 bytes."));
                assert_eq!(got.is_whole, times <= usize::from(takes_fd), "{times}");
                assert_eq!(got.fd.is_some(), takes_fd && times > 0, "{times}");
                drop(got);
                assert_eq!(open_files(&file), 1, "{times} descriptors, wanted: {takes_fd}");
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
