//! Frames that wait to be given to a socket, several in one system call.
//!
//! To a UDP socket, frames in turn that go to one place and are equally long (the last may be
//! shorter) leave as one *train*: the kernel carries it through its network stack as one datagram,
//! and it is cut by the card, or at the last moment before that (UDP_SEGMENT, udp(7), Linux 4.18).
//! Short frames among many long ones, such as the end of a message before the next one, are padded.
//! To a raw socket with PACKET_VNET_HDR, so do the datagrams of one flow ([`segments`]).
//!
//! [`segments`]: super::segments

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;

use super::inet::Name;
use super::segments::{self, HEAD_MAX, VNET_LEN};
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

/// Bytes that no frame of Ethernet has.
const FRAME_BYTES: usize = 9_216;

/// Trains in a row that the kernel has no room for while it takes their frames one by one: the
/// device cuts none.
const REFUSED_MAX: u8 = 8;

/// Where a frame begins in its slot, if a `virtio_net_hdr` stands before it.
const RAW_AT: usize = 16;

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
    to: To,
    /// Trains have more bytes: than any frame that arrives whole, so that whoever gets one uncut
    /// sees that it is one.
    frame_bytes: usize,
    /// The first that has not left, and the end.
    first: usize,
    end: usize,
    /// Whether the kernel takes trains.
    trains: bool,
    /// The end of those that leave one by one, since the kernel refused their train.
    alone: usize,
    /// The frames of a train for which it had no room are about to leave one by one.
    tries_alone: bool,
    /// Trains in a row for which it had no room, while it had for their frames.
    refused: u8,
}

/// What the frames go to.
enum To {
    /// A socket that takes them as they are.
    Plain,
    /// A UDP socket that is not bound to one place: where each goes.
    Udp(Box<[Name; BATCH]>),
    /// A raw socket with PACKET_VNET_HDR: what stands before each train.
    Raw(Box<[[u8; HEAD_MAX]; BATCH]>),
}

impl Batch {
    /// Room for frames of `frame_max` bytes at most, to a socket that takes them as they are.
    /// Shorter ones are filled up with zeros to `len_min`.
    pub(super) fn new(frame_max: usize, len_min: usize) -> Self {
        Self::to(To::Plain, frame_max, len_min)
    }

    /// To a UDP socket that is not bound to one place, on an interface that carries frames of
    /// `carried` bytes. Those of no Ethernet (`lo`) arrive at such sockets alone, cut.
    pub(super) fn udp(frame_max: usize, carried: usize) -> Self {
        let frame_bytes = if carried > FRAME_BYTES { 0 } else { carried };
        let to = To::Udp(Box::new([Name::nobody(); BATCH]));
        Self { frame_bytes, ..Self::to(to, frame_max, 0) }
    }

    /// To a raw socket with PACKET_VNET_HDR.
    pub(super) fn raw(frame_max: usize, len_min: usize) -> Self {
        let to = Self::to(To::Raw(Box::new([[0; HEAD_MAX]; BATCH])), frame_max, len_min);
        Self { frame_bytes: FRAME_BYTES.max(to.slot_len), ..to }
    }

    fn to(to: To, frame_max: usize, len_min: usize) -> Self {
        let at = if matches!(to, To::Raw(_)) { RAW_AT } else { 0 };
        let slot_len = (at + frame_max.max(len_min)).next_multiple_of(64);
        let slots = (BATCH_BYTES / slot_len).clamp(LEAST, BATCH);
        let trains = !matches!(to, To::Plain);
        Self {
            bytes: vec![0; slot_len * slots].into(),
            slot_len,
            slots,
            len_min,
            lens: [0; BATCH],
            to,
            frame_bytes: 0,
            first: 0,
            end: 0,
            trains,
            alone: 0,
            tries_alone: false,
            refused: 0,
        }
    }

    /// Bytes of what stands before each frame.
    fn lead(&self) -> usize {
        if matches!(self.to, To::Raw(_)) { VNET_LEN } else { 0 }
    }

    /// The bytes of frame `i`, and where they begin in the memory of all.
    fn frame(&self, i: usize) -> &[u8] {
        &self.bytes[self.at(i)..][..self.lens[i]]
    }

    fn at(&self, i: usize) -> usize {
        i * self.slot_len + if matches!(self.to, To::Raw(_)) { RAW_AT } else { 0 }
    }

    /// What the socket is given for frame `i` alone.
    fn given(&self, i: usize) -> &[u8] {
        let lead = self.lead();
        &self.bytes[self.at(i) - lead..][..lead + self.lens[i]]
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first == self.end
    }

    pub(super) fn is_full(&self) -> bool {
        self.end == self.slots
    }

    /// Takes a copy of `frame`, which fits (`frame_max`); there is room (`is_full`).
    pub(super) fn push(&mut self, frame: &TxFrame<'_>, to: Option<Name>) {
        let at = self.at(self.end);
        let slot = &mut self.bytes[at..(self.end + 1) * self.slot_len];
        let len = frame.copy_to(slot);
        if len < self.len_min {
            slot[len..self.len_min].fill(0);
        }
        self.lens[self.end] = len.max(self.len_min);
        if let (To::Udp(names), Some(to)) = (&mut self.to, to) {
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
        self.name(self.first).copied()
    }

    fn name(&self, i: usize) -> Option<&Name> {
        if let To::Udp(names) = &self.to { Some(&names[i]) } else { None }
    }

    fn one(&mut self, fd: RawFd) -> io::Result<usize> {
        let (bytes, name) = (self.given(self.first), self.name(self.first));
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

    /// Bytes of a frame that its train has but once, before all others; `None` if it can be in no
    /// train.
    fn head_len(&self, i: usize) -> Option<usize> {
        match self.to {
            _ if !self.trains || i < self.alone => None,
            To::Plain => None,
            To::Udp(_) => Some(0),
            To::Raw(_) => segments::head_len(self.frame(i)),
        }
    }

    /// Whether frame `i` goes where frame `at` goes, whose head has `head_len` bytes.
    fn is_of_train(&self, i: usize, at: usize, head_len: usize) -> bool {
        match &self.to {
            To::Plain => false,
            To::Udp(names) => names[i].is(&names[at]),
            To::Raw(_) => segments::is_same_flow(self.frame(i), self.frame(at), head_len),
        }
    }

    /// The frames from `at` on that make a train, and the bytes of the head of each. Zeros stand
    /// behind those between that are shorter, which they have only [in the train](Self::in_train):
    /// each leaves alone as it came if the kernel refuses that.
    fn train(&mut self, at: usize) -> (Range<usize>, usize) {
        let Some(head) = self.head_len(at) else { return (at..at + 1, 0) };
        let (len, most) = (self.lens[at], self.end.min(at + TRAIN_FRAMES));
        let (mut end, mut padding) = (at + 1, 0);
        for i in at + 1..most {
            // The last may be shorter, those before it not.
            padding += len - self.lens[i - 1];
            let bytes = (i - at) * (len - head) + self.lens[i];
            if self.lens[i] > len || bytes > TRAIN_BYTES || !self.is_of_train(i, at, head) {
                break;
            }
            if padding * PADDING_PART <= bytes {
                end = i + 1;
            }
        }
        if !self.is_worth(at..end, head) {
            return (at..at + 1, 0);
        }
        for i in at + 1..end - 1 {
            let (from, had) = (self.at(i), self.lens[i]);
            self.bytes[from + had..from + len].fill(0);
        }
        (at..end, head)
    }

    /// The bytes of frame `i` in `train`, in which all but the last are as long as the first.
    fn in_train(&self, i: usize, train: &Range<usize>) -> &[u8] {
        let like = if i + 1 < train.end { train.start } else { i };
        &self.bytes[self.at(i)..][..self.lens[like]]
    }

    /// Whether these frames leave as one. To a raw socket one of two may ask whether the path
    /// carries frames of its length: it gets lost alone then.
    fn is_worth(&self, train: Range<usize>, head: usize) -> bool {
        let (len, last) = (self.lens[train.start], self.lens[train.end - 1]);
        let bytes = (train.len() - 1) * (len - head) + last;
        let is_even = train.len() > 2 || last == len || !matches!(self.to, To::Raw(_));
        bytes > self.frame_bytes && is_even
    }

    fn many(&mut self, fd: RawFd) -> io::Result<usize> {
        // SAFETY: zeros are an `iovec` and an `mmsghdr`.
        let (mut iovs, mut msgs): ([libc::iovec; 2 * BATCH], [libc::mmsghdr; BATCH]) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let (mut lens, mut controls) = ([0; BATCH], [Control::default(); BATCH]);
        let (mut count, mut pieces, mut at) = (0, 0, self.first);
        while at < self.end {
            let (train, head_len) = self.train(at);
            let first_piece = pieces;
            let mut put = |bytes: &[u8]| {
                let iov_base = bytes.as_ptr().cast_mut().cast();
                iovs[pieces] = libc::iovec { iov_base, iov_len: bytes.len() };
                pieces += 1;
            };
            if train.len() == 1 {
                put(self.given(at));
            } else if head_len == 0 {
                train.clone().for_each(|i| put(self.in_train(i, &train)));
            } else {
                put(self.write_head(&train, head_len));
                train.clone().for_each(|i| put(&self.in_train(i, &train)[head_len..]));
            }
            let msg = &mut msgs[count].msg_hdr;
            msg.msg_iovlen = pieces - first_piece;
            msg.msg_iov = (&raw mut iovs).cast::<libc::iovec>().wrapping_add(first_piece);
            if let Some(name) = self.name(at) {
                msg.msg_namelen = name.len();
                msg.msg_name = std::ptr::from_ref(name).cast_mut().cast();
                if train.len() > 1 {
                    controls[count] = Control::segment(self.lens[at] as u16);
                    msg.msg_control = (&raw mut controls[count]).cast();
                    msg.msg_controllen = Control::SEGMENT_LEN;
                }
            }
            lens[count] = train.len();
            (count, at) = (count + 1, train.end);
        }
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `sendmmsg` reads `count` headers, each with pieces of `self.bytes` and of
        // `self.to`, and a name of that and a control message or none, and writes their `msg_len`;
        // all live across the call, and none is changed before it.
        let sent = unsafe { libc::sendmmsg(fd, msgs.as_mut_ptr(), count as u32, flags as _) };
        if let Ok(sent) = usize::try_from(sent) {
            let has_train = lens[..sent].iter().any(|&len| len > 1);
            self.note_sent(has_train);
            return Ok(lens[..sent].iter().sum());
        }
        let error = io::Error::last_os_error();
        if std::mem::take(&mut self.tries_alone) {
            // No room for a frame either: the train is tried again.
            self.alone = self.first;
        }
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        if lens[0] == 1 || !self.goes_alone(errno) {
            return Err(error);
        }
        self.alone = self.first + lens[0];
        Ok(0)
    }

    /// The socket has taken some, perhaps with a train among them.
    fn note_sent(&mut self, has_train: bool) {
        let tried_alone = std::mem::take(&mut self.tries_alone);
        if has_train {
            self.refused = 0;
        } else if tried_alone {
            self.refused += 1;
            self.trains = self.refused < REFUSED_MAX;
        }
    }

    /// What stands before the payloads of a train of datagrams.
    fn write_head(&mut self, train: &Range<usize>, head_len: usize) -> &[u8] {
        let payload = train.clone().map(|i| self.in_train(i, train).len() - head_len).sum();
        let at = self.at(train.start);
        let frame = &self.bytes[at..at + self.lens[train.start]];
        let To::Raw(heads) = &mut self.to else { return &[] };
        segments::write_head(&mut heads[train.start], frame, head_len, payload)
    }

    /// Whether the frames of a train that was refused for this reason leave one by one.
    fn goes_alone(&mut self, errno: libc::c_int) -> bool {
        match (errno, &self.to) {
            // The path carries less.
            (libc::EMSGSIZE, _) | (libc::EINVAL, To::Udp(_)) => true,
            // It has a device on its way that cannot sum up, or the kernel is older.
            (libc::EIO | libc::EINVAL, _) => {
                self.trains = false;
                true
            }
            // The device's ring is full, or it cuts none.
            (libc::ENOBUFS, To::Raw(_)) => {
                self.tries_alone = true;
                true
            }
            _ => false,
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

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    use super::*;

    /// Goal: the frames of a train that the kernel refuses leave as they came, so that a short one
    /// passes where the long ones between which it stood do not. Method: a socket that writes no
    /// sums, by which the kernel cuts no train (udp_send_skb).
    #[test]
    fn a_refused_train_leaves_as_the_frames_that_it_was_made_of() {
        let [from, to] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        to.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let no_sums: libc::c_int = 1;
        let value = (&raw const no_sums).cast();
        let len = size_of::<libc::c_int>() as libc::socklen_t;
        for refuses in [false, true] {
            if refuses {
                let (fd, level, name) = (from.as_raw_fd(), libc::SOL_SOCKET, libc::SO_NO_CHECK);
                // SAFETY: the kernel reads `len` bytes of `value`, which lives across the call.
                assert_eq!(unsafe { libc::setsockopt(fd, level, name, value, len) }, 0);
            }
            let mut batch = Batch::udp(1500, FRAME_BYTES + 1);
            let name = Name::of(to.local_addr().unwrap());
            // So many long ones that the short one among them is worth padding.
            let mut lens = [1400; 22];
            (lens[10], lens[21]) = (100, 40);
            for (i, len) in lens.into_iter().enumerate() {
                batch.push(&TxFrame::whole(&vec![i as u8 + 1; len]), Some(name));
            }
            batch.send(from.as_raw_fd()).unwrap();
            let mut got = Vec::new();
            let mut bytes = [0; 2000];
            for _ in lens {
                let n = to.recv(&mut bytes).unwrap();
                let end = bytes[..n].iter().rposition(|&byte| byte != 0).map_or(0, |at| at + 1);
                assert!(bytes[..end].iter().all(|&byte| byte == bytes[0]));
                got.push((usize::from(bytes[0]), end, n));
            }
            let padded = |i: usize| if refuses || i == 21 { lens[i] } else { 1400 };
            let want: Vec<_> = (0..22).map(|i| (i + 1, lens[i], padded(i))).collect();
            assert_eq!(got, want, "refuses {refuses}");
        }
    }
}
