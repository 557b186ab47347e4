//! Frames that wait to be given to a socket, several in one system call.

use std::io;
use std::os::fd::RawFd;

use crate::frame::TxFrame;

/// Frames given to the kernel at once.
pub(super) const BATCH: usize = 32;

/// Copies of frames, in the order in which they were taken. All memory is reserved at the start.
pub(super) struct Batch {
    bytes: Box<[u8]>,
    slot_len: usize,
    /// Shorter frames are filled up with zeros to this length.
    len_min: usize,
    lens: [usize; BATCH],
    /// Where each goes, if the socket is not bound to one place.
    names: Option<Box<[libc::sockaddr_in; BATCH]>>,
    /// The first that has not left, and the end.
    first: usize,
    end: usize,
}

impl Batch {
    /// Room for frames of `frame_max` bytes at most.
    pub(super) fn new(frame_max: usize, len_min: usize, named: bool) -> Self {
        let slot_len = frame_max.max(len_min).next_multiple_of(64);
        // SAFETY: zeros are a `sockaddr_in`.
        let nobody: libc::sockaddr_in = unsafe { std::mem::zeroed() };
        Self {
            bytes: vec![0; slot_len * BATCH].into(),
            slot_len,
            len_min,
            lens: [0; BATCH],
            names: named.then(|| Box::new([nobody; BATCH])),
            first: 0,
            end: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first == self.end
    }

    pub(super) fn is_full(&self) -> bool {
        self.end == BATCH
    }

    /// Takes a copy of `frame`, which fits (`frame_max`); there is room (`is_full`).
    pub(super) fn push(&mut self, frame: &TxFrame<'_>, to: Option<libc::sockaddr_in>) {
        let slot = &mut self.bytes[self.end * self.slot_len..][..self.slot_len];
        let len = frame.copy_to(slot);
        if len < self.len_min {
            slot[len..self.len_min].fill(0);
        }
        self.lens[self.end] = len.max(self.len_min);
        if let (Some(names), Some(to)) = (&mut self.names, to) {
            names[self.end] = to;
        }
        self.end += 1;
    }

    /// Gives all of them to the socket.
    ///
    /// # Errors
    /// What the kernel said of the first that is left.
    pub(super) fn send(&mut self, fd: RawFd) -> io::Result<()> {
        while self.first < self.end {
            self.first += if self.end - self.first == 1 { self.one(fd)? } else { self.many(fd)? };
        }
        (self.first, self.end) = (0, 0);
        Ok(())
    }

    /// Place of the first that is left. Another frame has it only after all have left.
    pub(super) fn first(&self) -> usize {
        self.first
    }

    /// Forgets the first that is left.
    pub(super) fn drop_first(&mut self) {
        self.first += 1;
        if self.is_empty() {
            (self.first, self.end) = (0, 0);
        }
    }

    /// Where the first that is left goes.
    pub(super) fn first_name(&self) -> Option<libc::sockaddr_in> {
        self.names.as_ref().map(|names| names[self.first])
    }

    fn one(&mut self, fd: RawFd) -> io::Result<usize> {
        let bytes = &self.bytes[self.first * self.slot_len..][..self.lens[self.first]];
        let name = self.names.as_ref().map(|names| &names[self.first]);
        let name_len = name.map_or(0, |_| size_of::<libc::sockaddr_in>());
        let name = name.map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: `sendto` reads the bytes of a slice, and `name_len` bytes of an address (none of
        // null), all of which live across the call.
        let sent = unsafe {
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            let (at, len) = (bytes.as_ptr().cast(), bytes.len());
            libc::sendto(fd, at, len, flags, name.cast(), name_len as libc::socklen_t)
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(1) }
    }

    fn many(&mut self, fd: RawFd) -> io::Result<usize> {
        // SAFETY: zeros are an `iovec` and an `mmsghdr`.
        let (mut iovs, mut msgs): ([libc::iovec; BATCH], [libc::mmsghdr; BATCH]) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let count = self.end - self.first;
        for (i, msg) in msgs.iter_mut().enumerate().take(count) {
            let at = self.first + i;
            let slot = &mut self.bytes[at * self.slot_len..][..self.lens[at]];
            iovs[i] = libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: slot.len() };
            msg.msg_hdr.msg_iov = &raw mut iovs[i];
            msg.msg_hdr.msg_iovlen = 1;
            if let Some(names) = &mut self.names {
                msg.msg_hdr.msg_name = (&raw mut names[at]).cast();
                msg.msg_hdr.msg_namelen = size_of::<libc::sockaddr_in>() as libc::socklen_t;
            }
        }
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `sendmmsg` reads `count` headers, each with one range of `self.bytes` and a name
        // of `self.names` or none, and writes their `msg_len`; all live across the call.
        let sent = unsafe { libc::sendmmsg(fd, msgs.as_mut_ptr(), count as u32, flags as _) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(sent as usize) }
    }
}
