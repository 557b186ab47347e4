//! The send queue of a socket: frames that leave by one system call, with GSO if possible.
//!
//! On a UDP socket, a *run* of consecutive frames to one destination with equal lengths (the last
//! may be shorter) leaves as one datagram, which the card or the kernel's device layer segments
//! (GSO: UDP_SEGMENT, udp(7), Linux 4.18). Short frames among many long ones, such as the end of a
//! message before the next one, are padded. On a raw socket with PACKET_VNET_HDR the same holds for
//! the datagrams of one flow ([`udp_gso`]).
//!
//! [`udp_gso`]: super::udp_gso

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;

use super::inet::SockAddr;
use super::udp_gso::{self, GSO_HEADERS_MAX, VNET_LEN};
use crate::frame::TxFrame;

/// Frames per system call at most: two full GSO runs of frames with an MTU of 1,500 bytes.
const BATCH: usize = 88;

/// Bytes of the slots, unless [`FRAMES_MIN`] frames need more.
const BATCH_BYTES: usize = 128 << 10;

/// Slots at least, for any length of frames.
const FRAMES_MIN: usize = 32;

/// Longest payload of a datagram, and so of a run, bytes: 44 frames with an MTU of 1,500 bytes.
const GSO_BYTES: usize = 65_507;

/// Frames of a run at most (UDP_MAX_SEGMENTS; 128 since Linux 6.9).
const GSO_SEGMENTS: usize = 64;

/// Bytes of the longest Ethernet frame (jumbo).
const ETHERNET_FRAME_MAX: usize = 9_216;

/// Consecutive runs that find no room while their single frames do, after which GSO is disabled:
/// the device does not support it.
const GSO_REFUSALS_MAX: u8 = 8;

/// Offset of a frame in its slot behind a `virtio_net_hdr`, bytes.
const RAW_AT: usize = 16;

/// Divisor of a run's bytes that may be padding: padding costs less than a datagram of its own.
const PADDING_PART: usize = 16;

/// Copies of queued frames, in order. All memory is reserved at the start.
pub(super) struct Batch {
    bytes: Box<[u8]>,
    slot_len: usize,
    /// Number of slots, [`BATCH`] at most.
    slots: usize,
    /// Shorter frames are padded with zeros to this length.
    len_min: usize,
    lens: [usize; BATCH],
    to: Target,
    /// A run has more bytes than this, the longest frame, so that a receiver recognizes a run that
    /// was not segmented.
    frame_bytes: usize,
    /// Indices of the first queued frame and the end.
    first: usize,
    end: usize,
    /// Whether the kernel accepts GSO on the socket.
    uses_gso: bool,
    /// End of the frames that leave singly, since the kernel has refused their run.
    single_until: usize,
    /// The frames of a run that found no room are about to leave singly.
    probes_single: bool,
    /// Consecutive runs that found no room while their single frames did.
    gso_refusals: u8,
}

/// Kind of socket.
enum Target {
    /// A socket that sends frames as they are.
    Plain,
    /// An unconnected UDP socket: the destination of each frame.
    Udp(Box<[SockAddr; BATCH]>),
    /// A raw socket with PACKET_VNET_HDR: the headers of each run.
    Raw(Box<[[u8; GSO_HEADERS_MAX]; BATCH]>),
}

impl Batch {
    /// A queue of frames of at most `frame_max` bytes for a socket that sends them as they are.
    /// Shorter ones are padded with zeros to `len_min`.
    pub(super) fn new(frame_max: usize, len_min: usize) -> Self {
        Self::to(Target::Plain, frame_max, len_min)
    }

    /// A queue for an unconnected UDP socket, on an interface that carries frames of `carried`
    /// bytes. On interfaces other than Ethernet (`lo`) only UDP sockets receive, which segment
    /// runs.
    pub(super) fn udp(frame_max: usize, carried: usize) -> Self {
        let frame_bytes = if carried > ETHERNET_FRAME_MAX { 0 } else { carried };
        let to = Target::Udp(Box::new([SockAddr::unspecified(); BATCH]));
        Self { frame_bytes, ..Self::to(to, frame_max, 0) }
    }

    /// A queue for a raw socket with PACKET_VNET_HDR.
    pub(super) fn raw(frame_max: usize, len_min: usize) -> Self {
        let to = Self::to(Target::Raw(Box::new([[0; GSO_HEADERS_MAX]; BATCH])), frame_max, len_min);
        Self { frame_bytes: ETHERNET_FRAME_MAX.max(to.slot_len), ..to }
    }

    fn to(to: Target, frame_max: usize, len_min: usize) -> Self {
        let at = if matches!(to, Target::Raw(_)) { RAW_AT } else { 0 };
        let slot_len = (at + frame_max.max(len_min)).next_multiple_of(64);
        let slots = (BATCH_BYTES / slot_len).clamp(FRAMES_MIN, BATCH);
        let uses_gso = !matches!(to, Target::Plain);
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
            uses_gso,
            single_until: 0,
            probes_single: false,
            gso_refusals: 0,
        }
    }

    /// Bytes of the `virtio_net_hdr` before each frame.
    fn vnet_len(&self) -> usize {
        if matches!(self.to, Target::Raw(_)) { VNET_LEN } else { 0 }
    }

    /// The bytes of frame `i`.
    fn frame(&self, i: usize) -> &[u8] {
        &self.bytes[self.at(i)..][..self.lens[i]]
    }

    fn at(&self, i: usize) -> usize {
        i * self.slot_len + if matches!(self.to, Target::Raw(_)) { RAW_AT } else { 0 }
    }

    /// The bytes to send for the single frame `i`.
    fn packet(&self, i: usize) -> &[u8] {
        let vnet_len = self.vnet_len();
        &self.bytes[self.at(i) - vnet_len..][..vnet_len + self.lens[i]]
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first == self.end
    }

    pub(super) fn is_full(&self) -> bool {
        self.end == self.slots
    }

    /// Queues a copy of `frame`, at most `frame_max` bytes; the caller has checked `is_full`.
    pub(super) fn push(&mut self, frame: &TxFrame<'_>, to: Option<SockAddr>) {
        let at = self.at(self.end);
        let slot = &mut self.bytes[at..(self.end + 1) * self.slot_len];
        let len = frame.copy_to(slot);
        if len < self.len_min {
            slot[len..self.len_min].fill(0);
        }
        self.lens[self.end] = len.max(self.len_min);
        if let (Target::Udp(names), Some(to)) = (&mut self.to, to) {
            names[self.end] = to;
        }
        self.end += 1;
    }

    /// Sends all queued frames.
    ///
    /// # Errors
    /// The kernel's error for the first frame that is left.
    pub(super) fn send(&mut self, fd: RawFd) -> io::Result<()> {
        while self.first < self.end {
            self.first +=
                if self.end - self.first == 1 { self.send_one(fd)? } else { self.send_many(fd)? };
        }
        (self.first, self.end, self.single_until) = (0, 0, 0);
        Ok(())
    }

    /// Index of the first queued frame. Reused only after all have left.
    pub(super) fn first(&self) -> usize {
        self.first
    }

    /// Drops the first queued frame.
    pub(super) fn drop_first(&mut self) {
        self.first += 1;
        if self.is_empty() {
            (self.first, self.end, self.single_until) = (0, 0, 0);
        }
    }

    /// Destination of the first queued frame.
    pub(super) fn first_destination(&self) -> Option<SockAddr> {
        self.name(self.first).copied()
    }

    fn name(&self, i: usize) -> Option<&SockAddr> {
        if let Target::Udp(names) = &self.to { Some(&names[i]) } else { None }
    }

    fn send_one(&mut self, fd: RawFd) -> io::Result<usize> {
        let (bytes, name) = (self.packet(self.first), self.name(self.first));
        let name_len = name.map_or(0, SockAddr::len);
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

    /// Bytes of a frame's headers, which its run has once; `None` if the frame cannot be in a run.
    fn headers_len(&self, i: usize) -> Option<usize> {
        match self.to {
            _ if !self.uses_gso || i < self.single_until => None,
            Target::Plain => None,
            Target::Udp(_) => Some(0),
            Target::Raw(_) => udp_gso::headers_len(self.frame(i)),
        }
    }

    /// Whether frame `i` is of the flow of frame `at`, whose headers have `headers_len` bytes.
    fn can_join(&self, i: usize, at: usize, headers_len: usize) -> bool {
        match &self.to {
            Target::Plain => false,
            Target::Udp(names) => names[i].equals(&names[at]),
            Target::Raw(_) => udp_gso::is_same_flow(self.frame(i), self.frame(at), headers_len),
        }
    }

    /// The frames from `at` on that form a run, and the bytes of the headers of each. Shorter
    /// frames inside are followed by zeros, which count only [in the run](Self::segment): frames
    /// leave unpadded if the kernel refuses the run.
    fn gso_run(&mut self, at: usize) -> (Range<usize>, usize) {
        let Some(head) = self.headers_len(at) else { return (at..at + 1, 0) };
        let (len, most) = (self.lens[at], self.end.min(at + GSO_SEGMENTS));
        let (mut end, mut padding) = (at + 1, 0);
        for i in at + 1..most {
            // The last may be shorter; those before are padded.
            padding += len - self.lens[i - 1];
            let bytes = (i - at) * (len - head) + self.lens[i];
            if self.lens[i] > len || bytes > GSO_BYTES || !self.can_join(i, at, head) {
                break;
            }
            if padding * PADDING_PART <= bytes {
                end = i + 1;
            }
        }
        if !self.is_worth_gso(at..end, head) {
            return (at..at + 1, 0);
        }
        for i in at + 1..end - 1 {
            let (from, had) = (self.at(i), self.lens[i]);
            self.bytes[from + had..from + len].fill(0);
        }
        (at..end, head)
    }

    /// The bytes of frame `i` in `run`, where all but the last have the length of the first.
    fn segment(&self, i: usize, run: &Range<usize>) -> &[u8] {
        let like = if i + 1 < run.end { run.start } else { i };
        &self.bytes[self.at(i)..][..self.lens[like]]
    }

    /// Whether these frames leave as a run. On a raw socket, one of two unequal frames may be an
    /// MTU probe, which must be lost without the other.
    fn is_worth_gso(&self, run: Range<usize>, head: usize) -> bool {
        let (len, last) = (self.lens[run.start], self.lens[run.end - 1]);
        let bytes = (run.len() - 1) * (len - head) + last;
        let is_even = run.len() > 2 || last == len || !matches!(self.to, Target::Raw(_));
        bytes > self.frame_bytes && is_even
    }

    fn send_many(&mut self, fd: RawFd) -> io::Result<usize> {
        // SAFETY: zeros are an `iovec` and an `mmsghdr`.
        let (mut iovs, mut msgs): ([libc::iovec; 2 * BATCH], [libc::mmsghdr; BATCH]) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let (mut lens, mut controls) = ([0; BATCH], [Control::default(); BATCH]);
        let (mut count, mut pieces, mut at) = (0, 0, self.first);
        while at < self.end {
            let (run, headers_len) = self.gso_run(at);
            let first_piece = pieces;
            let mut put = |bytes: &[u8]| {
                let iov_base = bytes.as_ptr().cast_mut().cast();
                iovs[pieces] = libc::iovec { iov_base, iov_len: bytes.len() };
                pieces += 1;
            };
            if run.len() == 1 {
                put(self.packet(at));
            } else if headers_len == 0 {
                run.clone().for_each(|i| put(self.segment(i, &run)));
            } else {
                put(self.write_gso_headers(&run, headers_len));
                run.clone().for_each(|i| put(&self.segment(i, &run)[headers_len..]));
            }
            let msg = &mut msgs[count].msg_hdr;
            msg.msg_iovlen = pieces - first_piece;
            msg.msg_iov = (&raw mut iovs).cast::<libc::iovec>().wrapping_add(first_piece);
            if let Some(name) = self.name(at) {
                msg.msg_namelen = name.len();
                msg.msg_name = std::ptr::from_ref(name).cast_mut().cast();
                if run.len() > 1 {
                    controls[count] = Control::segment(self.lens[at] as u16);
                    msg.msg_control = (&raw mut controls[count]).cast();
                    msg.msg_controllen = Control::SEGMENT_LEN;
                }
            }
            lens[count] = run.len();
            (count, at) = (count + 1, run.end);
        }
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `sendmmsg` reads `count` headers, each with pieces of `self.bytes` and of
        // `self.to`, and a name of that and a control message or none, and writes their `msg_len`;
        // all live across the call, and none is changed before it.
        let sent = unsafe { libc::sendmmsg(fd, msgs.as_mut_ptr(), count as u32, flags as _) };
        if let Ok(sent) = usize::try_from(sent) {
            let has_gso = lens[..sent].iter().any(|&len| len > 1);
            self.note_sent(has_gso);
            return Ok(lens[..sent].iter().sum());
        }
        let error = io::Error::last_os_error();
        if std::mem::take(&mut self.probes_single) {
            // No room for a single frame either: the run is sent again.
            self.single_until = self.first;
        }
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        if lens[0] == 1 || !self.falls_back(errno) {
            return Err(error);
        }
        self.single_until = self.first + lens[0];
        Ok(0)
    }

    /// The kernel has accepted frames; `has_gso`: a run among them.
    fn note_sent(&mut self, has_gso: bool) {
        let probed_single = std::mem::take(&mut self.probes_single);
        if has_gso {
            self.gso_refusals = 0;
        } else if probed_single {
            self.gso_refusals += 1;
            self.uses_gso = self.gso_refusals < GSO_REFUSALS_MAX;
        }
    }

    /// Writes the headers of a run of datagrams.
    fn write_gso_headers(&mut self, run: &Range<usize>, headers_len: usize) -> &[u8] {
        let payload = run.clone().map(|i| self.segment(i, run).len() - headers_len).sum();
        let at = self.at(run.start);
        let frame = &self.bytes[at..at + self.lens[run.start]];
        let Target::Raw(heads) = &mut self.to else { return &[] };
        udp_gso::write_gso_headers(&mut heads[run.start], frame, headers_len, payload)
    }

    /// Whether the frames of a run leave singly after this error.
    fn falls_back(&mut self, errno: libc::c_int) -> bool {
        match (errno, &self.to) {
            // The path carries less.
            (libc::EMSGSIZE, _) | (libc::EINVAL, Target::Udp(_)) => true,
            // The device has no checksum offload, or the kernel no GSO.
            (libc::EIO | libc::EINVAL, _) => {
                self.uses_gso = false;
                true
            }
            // The device's ring is full, or it does not segment.
            (libc::ENOBUFS, Target::Raw(_)) => {
                self.probes_single = true;
                true
            }
            _ => false,
        }
    }
}

/// A control message with the length of a run's segments, as cmsg(3) lays it out.
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
    /// Length with padding, bytes.
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

    /// Goal: the frames of a refused run leave unpadded, so that a short one passes where the long
    /// ones around it do not. Method: a socket without checksums, for which the kernel refuses GSO
    /// (udp_send_skb).
    #[test]
    fn frames_of_a_refused_run_leave_unpadded() {
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
            let mut batch = Batch::udp(1500, ETHERNET_FRAME_MAX + 1);
            let name = SockAddr::of(to.local_addr().unwrap());
            // Enough long frames that the short one among them is padded.
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
