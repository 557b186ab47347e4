//! Frames that wait to be given to a socket, several in one system call.
//!
//! To a UDP socket, frames in turn that go to one place and are equally long (the last may be
//! shorter) leave as one *train*: the kernel carries it through its network stack as one datagram,
//! and it is cut by the card, or at the last moment before that (UDP_SEGMENT, udp(7), Linux 4.18).
//! Short frames among many long ones, such as the end of a message before the next one, are padded.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;

use super::inet::Name;
use crate::frame::TxFrame;

/// Most frames given to the kernel at once: two whole trains of Ethernet's 1,500 bytes.
const BATCH: usize = 88;

/// Bytes that are kept for them, if those of [`LEAST`] frames are not more.
const BATCH_BYTES: usize = 128 << 10;

/// Frames for which there is room, however long they are.
const LEAST: usize = 32;

/// Longest payload of a datagram, and so of a train: 44 frames of Ethernet's 1,500 bytes.
const TRAIN_BYTES: usize = 65_507;

/// Most frames of a train (UDP_MAX_SEGMENTS; 128 since Linux 6.9).
const TRAIN_FRAMES: usize = 64;

/// The part of a train's bytes that may be padding: less than a datagram costs a kernel.
const PADDING_PART: usize = 16;

/// Copies of frames, in the order in which they were taken. All memory is reserved at the start.
pub(super) struct Batch {
    bytes: Box<[u8]>,
    slot_len: usize,
    /// Frames for which there is room, [`BATCH`] at most.
    slots: usize,
    /// Shorter frames are filled up with zeros to this length.
    len_min: usize,
    lens: [usize; BATCH],
    /// Where each goes, if the socket is not bound to one place.
    names: Option<Box<[Name; BATCH]>>,
    /// The first that has not left, and the end.
    first: usize,
    end: usize,
    /// Whether the kernel takes trains.
    trains: bool,
    /// The end of those that leave one by one, since the kernel refused their train.
    alone: usize,
}

impl Batch {
    /// Room for frames of `frame_max` bytes at most.
    pub(super) fn new(frame_max: usize, len_min: usize, named: bool) -> Self {
        let slot_len = frame_max.max(len_min).next_multiple_of(64);
        let slots = (BATCH_BYTES / slot_len).clamp(LEAST, BATCH);
        Self {
            bytes: vec![0; slot_len * slots].into(),
            slot_len,
            slots,
            len_min,
            lens: [0; BATCH],
            names: named.then(|| Box::new([Name::nobody(); BATCH])),
            first: 0,
            end: 0,
            trains: named,
            alone: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first == self.end
    }

    pub(super) fn is_full(&self) -> bool {
        self.end == self.slots
    }

    /// Takes a copy of `frame`, which fits (`frame_max`); there is room (`is_full`).
    pub(super) fn push(&mut self, frame: &TxFrame<'_>, to: Option<Name>) {
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
        (self.first, self.end, self.alone) = (0, 0, 0);
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
            (self.first, self.end, self.alone) = (0, 0, 0);
        }
    }

    /// Where the first that is left goes.
    pub(super) fn first_name(&self) -> Option<Name> {
        self.names.as_ref().map(|names| names[self.first])
    }

    fn one(&mut self, fd: RawFd) -> io::Result<usize> {
        let bytes = &self.bytes[self.first * self.slot_len..][..self.lens[self.first]];
        let name = self.names.as_ref().map(|names| &names[self.first]);
        let name_len = name.map_or(0, Name::len);
        let name = name.map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: `sendto` reads the bytes of a slice, and `name_len` bytes of an address (none of
        // null), all of which live across the call.
        let sent = unsafe {
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            let (at, len) = (bytes.as_ptr().cast(), bytes.len());
            libc::sendto(fd, at, len, flags, name.cast(), name_len)
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(1) }
    }

    /// The frames from `at` on that make a train. Pads those between that are shorter.
    fn train(&mut self, at: usize) -> Range<usize> {
        let Some(names) = self.names.as_ref().filter(|_| self.trains && at >= self.alone) else {
            return at..at + 1;
        };
        let (len, most) = (self.lens[at], self.end.min(at + TRAIN_FRAMES));
        let (mut end, mut padding) = (at + 1, 0);
        for i in at + 1..most {
            // The last may be shorter, those before it not.
            padding += len - self.lens[i - 1];
            let bytes = (i - at) * len + self.lens[i];
            if self.lens[i] > len || !names[i].is(&names[at]) || bytes > TRAIN_BYTES {
                break;
            }
            if padding * PADDING_PART <= bytes {
                end = i + 1;
            }
        }
        for i in at + 1..end - 1 {
            let slot = &mut self.bytes[i * self.slot_len..][..len];
            slot[self.lens[i]..].fill(0);
            self.lens[i] = len;
        }
        at..end
    }

    fn many(&mut self, fd: RawFd) -> io::Result<usize> {
        // SAFETY: zeros are an `iovec` and an `mmsghdr`.
        let (mut iovs, mut msgs): ([libc::iovec; BATCH], [libc::mmsghdr; BATCH]) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let (mut lens, mut controls) = ([0; BATCH], [Control::default(); BATCH]);
        let (mut count, mut at) = (0, self.first);
        while at < self.end {
            let train = self.train(at);
            for i in train.clone() {
                let slot = &mut self.bytes[i * self.slot_len..][..self.lens[i]];
                iovs[i] = libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: slot.len() };
            }
            let head = &mut msgs[count].msg_hdr;
            (head.msg_iov, head.msg_iovlen) = (&raw mut iovs[at], train.len());
            if let Some(names) = &mut self.names {
                head.msg_namelen = names[at].len();
                head.msg_name = (&raw mut names[at]).cast();
            }
            if train.len() > 1 {
                controls[count] = Control::segment(self.lens[at] as u16);
                head.msg_control = (&raw mut controls[count]).cast();
                head.msg_controllen = Control::SEGMENT_LEN;
            }
            lens[count] = train.len();
            (count, at) = (count + 1, train.end);
        }
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `sendmmsg` reads `count` headers, each with ranges of `self.bytes`, and a name of
        // `self.names` and a control message or none, and writes their `msg_len`; all live across
        // the call.
        let sent = unsafe { libc::sendmmsg(fd, msgs.as_mut_ptr(), count as u32, flags as _) };
        if let Ok(sent) = usize::try_from(sent) {
            return Ok(lens[..sent].iter().sum());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            // Of a train: it has a device on its way that cannot sum up, a kernel before 4.18 does
            // not know the message, or the path carries less.
            Some(errno @ (libc::EIO | libc::EINVAL | libc::EMSGSIZE)) if lens[0] > 1 => {
                self.trains &= errno == libc::EMSGSIZE || errno == libc::EINVAL;
                self.alone = self.first + lens[0];
                Ok(0)
            }
            _ => Err(error),
        }
    }
}

/// A control message with the length of a train's segments, as cmsg(3) lays it out.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Control {
    len: usize,
    level: libc::c_int,
    kind: libc::c_int,
    /// The length, in the first two bytes.
    data: [u16; 4],
}

impl Control {
    /// Bytes of it with its padding.
    const SEGMENT_LEN: usize = size_of::<Self>();

    fn segment(len: u16) -> Self {
        const HEAD: usize = std::mem::offset_of!(Control, data);
        Self {
            len: HEAD + size_of::<u16>(),
            level: libc::SOL_UDP,
            kind: libc::UDP_SEGMENT,
            data: [len, 0, 0, 0],
        }
    }
}
