//! Messages over Unix sockets, with a descriptor or without, and their end.

use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, LazyLock};

use nix::errno::Errno;

/// What somebody else has a say in: a descriptor that was handed over, or a socket in which some
/// may wait. It is closed by a thread of its own, since that may take as long as they like: a file
/// system in user space is told (FUSE), a network one writes, a TCP socket lingers (`SO_LINGER`).
pub(super) struct Apart<T: Send + 'static>(Option<(T, Closings)>);

/// How many things are being closed that one user has a say in, or all who are not told apart.
#[derive(Clone)]
pub(super) struct Closings(Arc<Count>);

/// Those of whoever is not told apart, and those of all together.
static OF_ANYBODY: LazyLock<Closings> = LazyLock::new(Closings::new);
static OF_ALL: Count = Count(AtomicU64::new(0));
/// Things of one user, and of all.
pub(super) const CLOSING_MAX: usize = 64;
const ALL_MAX: usize = 1024;

/// A number of threads of this process: who forks leaves them behind, so a child begins at 0. The
/// process in the upper half, the number in the lower one.
#[derive(Default)]
struct Count(AtomicU64);

impl Count {
    fn is(&self) -> usize {
        Self::of(std::process::id(), self.0.load(Relaxed)) as usize
    }

    fn of(pid: u32, word: u64) -> u32 {
        if (word >> 32) as u32 == pid { word as u32 } else { 0 }
    }

    fn change(&self, change: impl Fn(u32) -> u32) {
        let pid = std::process::id();
        let new = |word| Some(u64::from(pid) << 32 | u64::from(change(Self::of(pid, word))));
        // It always has one to give.
        let _ = self.0.fetch_update(Relaxed, Relaxed, new);
    }
}

impl Closings {
    /// Those of somebody who is told apart.
    pub(super) fn new() -> Self {
        Self(Arc::default())
    }

    /// Whether so much takes its time to close that nobody new of these is to be let in.
    pub(super) fn is_crowded(&self) -> bool {
        self.0.is() >= CLOSING_MAX
    }

    /// Whether it is known to others: to what may have to be closed, or is being closed.
    pub(super) fn is_used(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.0.is()
    }

    fn one_more(&self) -> Closing {
        self.0.change(|count| count + 1);
        OF_ALL.change(|count| count + 1);
        Closing(self.clone())
    }
}

/// Counts as one that is being closed.
struct Closing(Closings);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.0.change(|count| count.saturating_sub(1));
        OF_ALL.change(|count| count.saturating_sub(1));
    }
}

impl<T: Send + 'static> Apart<T> {
    /// Of whoever is not told apart.
    pub(super) fn new(what: T) -> Self {
        Self::of(&OF_ANYBODY, what)
    }

    /// Of who `whose` counts.
    pub(super) fn of(whose: &Closings, what: T) -> Self {
        Self(Some((what, whose.clone())))
    }

    /// It is known to close at once.
    pub(super) fn trust(mut self) -> T {
        self.0.take().expect("taken here and by drop alone").0
    }
}

impl<T: Send + 'static> Deref for Apart<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0.as_ref().expect("taken by `trust` and drop alone").0
    }
}

impl<T: Send + 'static> Drop for Apart<T> {
    fn drop(&mut self) {
        let Some((what, whose)) = self.0.take() else { return };
        let both = (what, whose.one_more());
        // Without a thread it is closed here.
        let _ = std::thread::Builder::new().name("close".into()).spawn(move || drop(both));
    }
}

/// Whether so much of whoever is not told apart takes its time to close that nobody new is to be
/// let in, or there would be no end of threads and descriptors.
pub(super) fn is_crowded() -> bool {
    OF_ANYBODY.is_crowded()
}

/// The same of all together.
pub(super) fn is_full() -> bool {
    OF_ALL.is() >= ALL_MAX
}

/// Closes a socket from which nothing was received, of somebody who [is
/// crowded](Closings::is_crowded). That neither flushes what waits in it nor lingers: it was never
/// in a table of descriptors that it is taken from, and "when the socket is closed as part of
/// exit(2), it always lingers in the background" (socket(7)). The part of exit is played by a
/// thread with a table of its own.
pub(super) fn close_in_exit<T: AsFd + Send + 'static>(whose: &Closings, socket: T) {
    let counted = whose.one_more();
    let fd = socket.as_fd().as_raw_fd();
    let (tell_left, has_left) = sync_channel::<()>(1);
    let (tell_closed, is_closed) = sync_channel::<()>(1);
    let leaves = move || {
        if keep_alone(fd).is_ok() {
            let _ = tell_left.send(());
            // Until ours is the last one.
            let _ = is_closed.recv();
        }
    };
    let named = |name: &str| std::thread::Builder::new().name(name.into());
    let closes = move || {
        let other = named("close-exit").spawn(leaves);
        let is_there = other.is_ok() && has_left.recv().is_ok();
        drop(socket);
        drop(tell_closed);
        if is_there {
            let _ = other.map(std::thread::JoinHandle::join);
        }
        drop(counted);
    };
    // Without a thread it is closed here.
    let _ = named("close").spawn(closes);
}

/// Gives this thread a table of descriptors in which `fd` alone is.
///
/// # Errors
/// Those of `unshare` and `close_range` (Linux 5.9): nothing has changed for other threads.
fn keep_alone(fd: RawFd) -> Result<(), Errno> {
    let fd = libc::c_uint::try_from(fd).map_err(|_negative| Errno::EBADF)?;
    let close = |first: libc::c_uint, last: libc::c_uint, flags: libc::c_uint| {
        // SAFETY: takes numbers. With its own table, which the first call makes, this thread
        // closes copies that nobody else has the numbers of.
        Errno::result(unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) })
    };
    close(fd + 1, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE)?;
    if fd > 0 {
        close(0, fd - 1, 0)?;
    }
    Ok(())
}

/// What was received.
pub(super) struct Received {
    /// Its bytes; 0 if the other side has hung up.
    pub(super) len: usize,
    /// The descriptor that came along, if one was wanted. Closed in children that execute something
    /// else.
    pub(super) fd: Option<Apart<OwnedFd>>,
    /// All of it is there: there were no more bytes than room, and no more descriptors than one, or
    /// than none where none was wanted.
    pub(super) is_whole: bool,
}

/// Bytes before a control message's own.
const CONTROL_HEAD: usize = size_of::<libc::cmsghdr>();
/// Descriptors of a message at most, in the kernel's `scm.h`.
const FDS_MAX: usize = 253;
const CONTROL_LEN: usize = CONTROL_HEAD + FDS_MAX * size_of::<RawFd>();

/// Receives one message into `into`, with one descriptor if `takes_fd`. Never blocks.
///
/// What the kernel has no room for in `msg_control` it closes itself, in this call. So there is
/// room for all, and those that nobody wants are closed apart. Where none is wanted none is made: a
/// message with some stays where it is, not whole, and waits for the socket's end.
///
/// # Errors
/// Those of `recvmsg`; nothing was received, and no descriptor made.
pub(super) fn receive(socket: RawFd, into: &mut [u8], takes_fd: bool) -> Result<Received, Errno> {
    // Words, so that it is aligned.
    let mut control = [0_u64; CONTROL_LEN.div_ceil(8)];
    if !takes_fd {
        // With this flag the kernel lets go of copies, of which none is the last.
        let seen = receive_as(socket, into, &mut [], libc::MSG_PEEK)?;
        if seen.1.msg_flags & libc::MSG_CTRUNC != 0 {
            return Ok(Received { len: seen.0, fd: None, is_whole: false });
        }
    }
    let room = if takes_fd { &mut control[..] } else { &mut [] };
    let (len, message) = receive_as(socket, into, room, libc::MSG_CMSG_CLOEXEC)?;
    // SAFETY: a message that was just received, of whose control part the length is right.
    let mut fds = unsafe { descriptors(&message) };
    let is_whole = message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) == 0 && fds.len() <= 1;
    let fd = fds.pop();
    if !fds.is_empty() {
        drop(Apart::new(fds));
    }
    Ok(Received { len, fd: fd.map(Apart::new), is_whole })
}

/// What `recvmsg` makes of a message, with this room for control messages. The header says where
/// that is.
fn receive_as(
    socket: RawFd,
    into: &mut [u8],
    control: &mut [u64],
    flags: i32,
) -> Result<(usize, libc::msghdr), Errno> {
    let mut bytes = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: zeros are a message without an address, bytes and descriptors.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut bytes, 1);
    if !control.is_empty() {
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_LEN as _;
    }
    let flags = libc::MSG_DONTWAIT | flags;
    // SAFETY: the kernel writes to `into` and `control`, no more than their lengths say, both of
    // which live across the call.
    let len = Errno::result(unsafe { libc::recvmsg(socket, &raw mut message, flags) })?;
    message.msg_iov = std::ptr::null_mut();
    Ok((len.unsigned_abs(), message))
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
    use std::sync::Mutex;
    use std::time::{Duration, Instant};

    use nix::sys::socket::{
        AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, sendmsg, socketpair,
    };

    /// Held by tests that copy the table of descriptors, as a fork does until its child's first
    /// act, and by those that count on a descriptor's being closed at once.
    pub(crate) static TABLE: Mutex<()> = Mutex::new(());

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

    /// Descriptors of this process that lead to the file that `fd` does.
    fn count(fd: &OwnedFd) -> usize {
        let of = |path: &std::path::Path| std::fs::read_link(path).ok();
        let wanted = of(format!("/proc/self/fd/{}", fd.as_raw_fd()).as_ref()).unwrap();
        let is_one = |entry: &std::fs::DirEntry| of(&entry.path()).as_ref() == Some(&wanted);
        std::fs::read_dir("/proc/self/fd").unwrap().flatten().filter(is_one).count()
    }

    /// Whether soon no other descriptor of this process leads to the file that `fd` does.
    pub(crate) fn is_alone(fd: &OwnedFd) -> bool {
        let until = Instant::now() + Duration::from_secs(10);
        while count(fd) > 1 {
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// A TCP socket that takes a minute to close, for whoever closes it last, and the other end,
    /// which ends the minute.
    pub(crate) fn slow_to_close() -> (OwnedFd, TcpStream) {
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

    /// Goal: nobody waits for what a descriptor or a socket takes to close: one that was wanted,
    /// one too many, one that was not, and one that waits in a socket.
    #[test]
    fn who_receives_does_not_wait_for_what_is_slow_to_close() {
        let (mut others, begun) = (Vec::new(), Instant::now());
        for (takes_fd, times) in [(true, 1), (true, 2), (false, 1)] {
            let ([a, b], (slow, other)) = (joined(), slow_to_close());
            send(&a, b"8 bytes.", &slow, times);
            drop(slow);
            drop(receive(b.as_raw_fd(), &mut [0; 8], takes_fd).unwrap());
            // Where it was not wanted, it is there still.
            drop(Apart::new(b));
            others.push(other);
        }
        let ([a, b], (slow, other)) = (joined(), slow_to_close());
        send(&a, b"8 bytes.", &slow, 1);
        drop((slow, Apart::new(b)));
        others.push(other);
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    }

    /// Goal: whatever comes along, all of it is closed in the end. 253 are the most that the kernel
    /// passes on.
    #[test]
    fn no_descriptor_stays_open() {
        let [a, b] = joined();
        let (file, mut bytes) = (OwnedFd::from(tempfile::tempfile().unwrap()), [0; 8]);
        for times in [0, 1, 2, 4, 12, 13, 253] {
            send(&a, b"8 bytes.", &file, times);
            for takes_fd in [false, true] {
                if takes_fd && times == 0 {
                    continue;
                }
                let got = receive(b.as_raw_fd(), &mut bytes, takes_fd).unwrap();
                assert_eq!((got.len, &bytes), (8, b"8 bytes."));
                assert_eq!(got.is_whole, times <= usize::from(takes_fd), "{times}");
                assert_eq!(got.fd.is_some(), takes_fd && times > 0, "{times}");
                // Of what is not wanted there never is one.
                assert!(takes_fd || count(&file) == 1, "{times}");
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
    /// Goal: what a forked child has of its parent's closings keeps nobody out: their threads are
    /// the parent's.
    #[test]
    fn a_child_closes_nothing_of_its_parents() {
        let _alone = TABLE.lock();
        let whose = Closings::new();
        let many: Vec<Closing> = (0..CLOSING_MAX).map(|_| whose.one_more()).collect();
        assert!(whose.is_crowded());
        // SAFETY: the child reads and writes atomics and ends.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let (before, one) = (whose.count(), whose.one_more());
            let is_one = whose.count() == 1;
            drop(one);
            let good = before == 0 && is_one && whose.count() == 0;
            // SAFETY: takes a number.
            unsafe { libc::_exit(i32::from(!good)) }
        }
        let mut status = 0;
        // SAFETY: writes the status to a number that lives across the call.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, status), (child, 0));
        assert!(whose.is_crowded());
        drop(many);
        assert_eq!(whose.count(), 0);
    }

    /// Goal: a socket that nothing was received from is closed at once in a thread's exit, whatever
    /// waits in it.
    #[test]
    fn what_was_not_received_closes_in_an_exit() {
        let _alone = TABLE.lock();
        let ([a, b], whose) = (joined(), Closings::new());
        let (slow, _other) = slow_to_close();
        send(&a, b"8 bytes.", &slow, 1);
        drop(slow);
        close_in_exit(&whose, b);
        let until = Instant::now() + Duration::from_secs(10);
        while whose.count() > 0 {
            assert!(Instant::now() < until, "it lingers");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(nix::unistd::write(&a, b"x").is_err(), "nobody is there");
    }
}
