//! Descriptions of frames to send ([`TxFrame`]) and of received frames ([`RxFrame`]).

use std::marker::PhantomData;

use crate::mem::{
    InlineBytes, IoBuf, SHORT, Span, Stores, U128_LEN, copy_four, copy_inline, copy_inline_32,
    copy_short, crc32c_of_raw,
};
use crate::station::Station;

/// Bytes of destination, source and EtherType that start every frame.
pub const ETH_HDR_LEN: usize = 14;

/// EtherType of the fabric's frames: the first of IEEE 802's two local experimental EtherTypes.
pub const ETHERTYPE: u16 = 0x88b5;

/// Offsets of the destination's and the source's station number, little-endian, in every packet
/// (docs/wire.md).
pub const DST_NUMBER_AT: usize = 32;
/// See [`DST_NUMBER_AT`].
pub const SRC_NUMBER_AT: usize = 34;
/// Minimum length of the fabric's frames.
pub const FRAME_MIN: usize = 40;

/// The station with its MAC at `mac_at` and its number at `number_at`, as [`Station::word`].
///
/// # Panics
/// If `head` is too short for the MAC.
#[inline(always)]
pub(crate) fn word_at(head: &[u8], mac_at: usize, number_at: usize) -> u64 {
    let mut word = [0; 8];
    word[..6].copy_from_slice(&head[mac_at..mac_at + 6]);
    if let Some(number) = head.get(number_at..number_at + 2) {
        word[6..].copy_from_slice(number);
    }
    u64::from_le_bytes(word)
}

/// Writes both MACs of `frame` and, if it is long enough, both station numbers.
///
/// # Panics
/// If it is shorter than 12 bytes.
pub fn address(frame: &mut [u8], dst: Station, src: Station) {
    for (mac_at, number_at, of) in [(0, DST_NUMBER_AT, dst), (6, SRC_NUMBER_AT, src)] {
        frame[mac_at..mac_at + 6].copy_from_slice(&of.mac.0);
        if let Some(number) = frame.get_mut(number_at..number_at + 2) {
            number.copy_from_slice(&of.number.to_le_bytes());
        }
    }
}

/// `frame` with these addresses.
#[cfg(test)]
pub(crate) fn addressed(dst: Station, src: Station, mut frame: Vec<u8>) -> Vec<u8> {
    address(&mut frame, dst, src);
    frame
}

/// The body of a frame, between head and tail.
#[derive(Clone, Copy)]
pub enum Body<'a> {
    /// Bytes that the caller owns. Empty for none.
    Bytes(&'a [u8]),
    /// `len` bytes at `offset` of the application's memory.
    Io {
        /// The memory, which stays registered while the frame is sent.
        buf: &'a IoBuf,
        /// First byte, at most `buf.len()`.
        offset: usize,
        /// Number of bytes; `offset + len` is at most `buf.len()`.
        len: usize,
    },
    /// The bytes of a received frame from `offset` on, which is at most its length: for forwarding.
    /// The sender may still write them until they are copied.
    Frame {
        /// The frame, lent by another port.
        frame: &'a RxFrame<'a>,
        /// First byte.
        offset: usize,
    },
}

impl Body<'_> {
    /// Number of bytes.
    #[inline]
    pub fn len(&self) -> usize {
        match *self {
            Body::Bytes(b) => b.len(),
            Body::Io { len, .. } => len,
            Body::Frame { frame, offset } => frame.len().saturating_sub(offset),
        }
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the body to `dst`, which has exactly its length.
    pub fn copy_to(&self, dst: &mut [u8]) {
        match *self {
            Body::Bytes(b) => dst.copy_from_slice(b),
            Body::Io { buf, offset, len } => {
                assert_eq!(dst.len(), len);
                buf.read_at(offset, dst);
            }
            Body::Frame { frame, offset } => {
                assert_eq!(dst.len(), self.len());
                assert!(frame.copy_to(offset, dst), "behind the frame's end");
            }
        }
    }

    /// CRC32C of `crc`'s bytes followed by these.
    pub fn crc32c(&self, crc: u32) -> u32 {
        match *self {
            // SAFETY: the bytes of a slice.
            Body::Bytes(b) => unsafe { crc32c_of_raw(crc, b.as_ptr(), b.len(), 0) },
            Body::Io { buf, offset, len } => buf.crc32c(crc, offset, len),
            Body::Frame { frame, offset } => {
                let sum = frame.crc32c(crc, offset, self.len());
                sum.expect("no further than the frame's end")
            }
        }
    }
}

/// A frame to send: head (Ethernet and fabric headers), body, tail.
#[derive(Clone, Copy)]
pub struct TxFrame<'a> {
    /// Starts with the 14-byte Ethernet header.
    pub head: &'a [u8],
    /// The payload.
    pub body: Body<'a>,
    /// What follows the payload: a checksum, or nothing.
    pub tail: &'a [u8],
}

impl<'a> TxFrame<'a> {
    /// A frame in one contiguous slice.
    #[inline]
    pub fn whole(bytes: &'a [u8]) -> Self {
        Self { head: bytes, body: Body::Bytes(&[]), tail: &[] }
    }

    /// Bytes in total.
    #[inline]
    pub fn len(&self) -> usize {
        self.head.len() + self.body.len() + self.tail.len()
    }

    /// Whether there are none, which no port sends.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Destination station. The number is 0 in a frame that is too short to have one.
    #[inline]
    pub fn dst(&self) -> Station {
        Station::from_word(self.dst_word())
    }

    /// [`dst`](Self::dst) as [`Station::word`] has it.
    #[inline(always)]
    pub(crate) fn dst_word(&self) -> u64 {
        word_at(self.head, 0, DST_NUMBER_AT)
    }

    /// Source station, as [`Station::word`].
    #[inline]
    pub(crate) fn src_word(&self) -> u64 {
        word_at(self.head, 6, SRC_NUMBER_AT)
    }

    /// Copies the whole frame to the start of `dst` and returns its length.
    ///
    /// # Panics
    /// If `dst` is shorter than [`len`](Self::len).
    pub fn copy_to(&self, dst: &mut [u8]) -> usize {
        let (head, rest) = dst.split_at_mut(self.head.len());
        let (body, rest) = rest.split_at_mut(self.body.len());
        head.copy_from_slice(self.head);
        self.body.copy_to(body);
        rest[..self.tail.len()].copy_from_slice(self.tail);
        self.len()
    }

    /// Address and length of the body, if it is known to be contiguous.
    #[inline(always)]
    pub(crate) fn body_in_one_piece(&self) -> Option<(*const u8, usize)> {
        match self.body {
            Body::Bytes(b) => Some((b.as_ptr(), b.len())),
            Body::Io { buf, offset, len } => Some((buf.in_one_piece(offset, len)?, len)),
            Body::Frame { frame, offset } => {
                let len = frame.len().checked_sub(offset)?;
                Some((frame.base.wrapping_add(offset), len))
            }
        }
    }

    /// Whether head and tail have the lengths that `copy_short_to_raw` is made for: fabric headers,
    /// a checksum or none.
    #[inline(always)]
    pub(crate) fn fits_short_copy(&self) -> bool {
        self.head.len() >= FRAME_MIN && matches!(self.tail.len(), 0 | 4)
    }

    /// Copies the whole frame to `dst` without a call; `body` is what
    /// [`body_in_one_piece`](Self::body_in_one_piece) said.
    ///
    /// Copies from end to start: a polling receiver reads the first cache line all the time and
    /// takes it away from the writer each time, so that line is written last.
    ///
    /// # Safety
    /// As [`copy_to_raw`](Self::copy_to_raw); the frame
    /// [`fits_short_copy`](Self::fits_short_copy) and has at most `SHORT` bytes.
    #[inline(always)]
    pub(crate) unsafe fn copy_short_to_raw(&self, body: (*const u8, usize), dst: *mut u8) {
        let (head, tail) = (self.head, self.tail);
        // SAFETY: the three pieces are `len()` bytes together, which the caller has room for, and
        // are readable: two slices and lent memory in range (`in_one_piece`). None is longer than
        // the whole, the head has 40 and the tail 0 or 4 (`fits_short_copy`).
        unsafe {
            let at = dst.add(head.len());
            if !tail.is_empty() {
                copy_four(tail.as_ptr(), at.add(body.1));
            }
            if body.1 != 0 {
                copy_inline(body.0, at, body.1);
            }
            copy_inline_32(head.as_ptr(), dst, head.len());
        }
    }

    /// Copies the whole frame to `dst`: the one copy on the send path.
    ///
    /// # Safety
    /// [`len`](Self::len) bytes at `dst` are writable and overlap no memory of the frame. Others
    /// may read or write them meanwhile.
    #[inline(never)]
    pub unsafe fn copy_to_raw(&self, dst: *mut u8) {
        let (head, tail) = (self.head, self.tail);
        // SAFETY: the three pieces are `len()` bytes together, which the caller has room for; a
        // slice is readable for its length, a received frame from `offset` to its end, and
        // `read_to_raw` checks its range itself.
        unsafe {
            copy_short(head.as_ptr(), dst, head.len());
            let at = dst.add(head.len());
            match self.body {
                Body::Bytes(b) => copy_short(b.as_ptr(), at, b.len()),
                Body::Io { buf, offset, len } => buf.read_to_raw(offset, at, len),
                Body::Frame { frame, offset } => {
                    copy_short(frame.base.wrapping_add(offset), at, self.body.len());
                }
            }
            copy_short(tail.as_ptr(), at.add(self.body.len()), tail.len());
        }
    }

    /// As [`copy_to_raw`](Self::copy_to_raw), for a frame that another processor reads next:
    /// `stores` chooses between cached and non-temporal stores for a long body.
    ///
    /// # Safety
    /// As `copy_to_raw`.
    #[inline]
    pub(crate) unsafe fn copy_to_peer(&self, dst: *mut u8, stores: &mut Stores) {
        // SAFETY: as in `copy_to_raw`; a body in one piece is readable for its length.
        unsafe {
            match self.body_in_one_piece() {
                Some((body, len)) if len >= Stores::LONG => {
                    copy_short(self.head.as_ptr(), dst, self.head.len());
                    let at = dst.add(self.head.len());
                    stores.copy(body, at, len);
                    copy_short(self.tail.as_ptr(), at.add(len), self.tail.len());
                }
                _ => self.copy_to_raw(dst),
            }
        }
    }
}

/// Writes the first `H` bytes of a frame. A trait rather than a closure, because a trait method can
/// be marked `#[inline(always)]`.
pub trait WriteHead<const H: usize> {
    /// Writes all of them.
    fn fill(&self, out: &mut HeadBuf<H>);
}

/// Write access to the first `H` bytes of a frame in its ring slot.
pub struct HeadBuf<const H: usize>(*mut u8);

impl<const H: usize> HeadBuf<H> {
    /// The head of a frame at `to`.
    ///
    /// # Safety
    /// `H` bytes at `to` are writable as long as this is used. Others may read them meanwhile.
    #[inline(always)]
    pub(crate) unsafe fn at(to: *mut u8) -> Self {
        Self(to)
    }

    /// Writes `W` bytes at `AT`; an offset outside of the head does not compile.
    #[inline(always)]
    pub fn set<const AT: usize, const W: usize>(&mut self, bytes: [u8; W]) {
        const { assert!(AT + W <= H) };
        // SAFETY: inside the `H` bytes that whoever made this has room for.
        unsafe { self.0.add(AT).cast::<[u8; W]>().write_unaligned(bytes) }
    }
}

/// The part of a short frame behind its head. A trait rather than a closure, because closures are
/// not always inlined.
///
/// # Safety
/// `fill` writes exactly `size` bytes.
pub unsafe trait WriteBody {
    /// Head and body may exceed `SHORT` bytes.
    const LONG: bool = false;

    /// Number of bytes.
    fn size(&self) -> usize;

    /// Writes them.
    ///
    /// # Safety
    /// As many bytes are writable at `to`, and they are no more than `SHORT`, unless it may be
    /// [`LONG`](Self::LONG).
    unsafe fn fill(&self, to: *mut u8);
}

// SAFETY: `write_to` writes `len` bytes.
unsafe impl WriteBody for InlineBytes {
    #[inline(always)]
    fn size(&self) -> usize {
        self.len()
    }

    #[inline(always)]
    unsafe fn fill(&self, to: *mut u8) {
        // SAFETY: passed on.
        unsafe { self.write_to(to) }
    }
}

/// An optional word, application memory, and an optional checksum.
pub(crate) struct PrefixedBody {
    word: Option<u64>,
    /// Where `len` bytes are lent to be read.
    from: *const u8,
    len: usize,
    crc: Option<u32>,
}

impl PrefixedBody {
    /// `word` and `len` bytes at `offset` of `body`, if they are known to be contiguous.
    #[inline(always)]
    pub(crate) fn of(word: Option<u64>, body: &IoBuf, offset: usize, len: usize) -> Option<Self> {
        let from = body.in_one_piece(offset, len)?;
        Some(Self { word, from, len, crc: None })
    }

    /// Appends `crc`, if any.
    #[inline(always)]
    pub(crate) fn with(self, crc: Option<u32>) -> Self {
        Self { crc, ..self }
    }
}

// SAFETY: `fill` writes the word, if there is one, `len` bytes behind it, and then the checksum, if
// there is one.
unsafe impl WriteBody for PrefixedBody {
    #[inline(always)]
    fn size(&self) -> usize {
        let crc = self.crc.map_or(0, |_| size_of::<u32>());
        self.word.map_or(0, |_| size_of::<u64>()) + self.len + crc
    }

    #[inline(always)]
    unsafe fn fill(&self, to: *mut u8) {
        // SAFETY: 8 bytes if there is a word, behind them `len`, which are there to be read, and
        // four if there is a checksum.
        unsafe {
            let at = to.add(self.word.map_or(0, |_| size_of::<u64>()));
            if let Some(crc) = self.crc {
                at.add(self.len).cast::<[u8; 4]>().write_unaligned(crc.to_le_bytes());
            }
            copy_inline(self.from, at, self.len);
            if let Some(word) = self.word {
                to.cast::<[u8; 8]>().write_unaligned(word.to_le_bytes());
            }
        }
    }
}

/// Application memory, up to a whole frame.
pub(crate) struct LongBody {
    /// Where `len` bytes are lent to be read.
    from: *const u8,
    len: usize,
}

impl LongBody {
    /// `len` bytes at `offset` of `body`, if they are in one piece for sure.
    #[inline(always)]
    pub(crate) fn of(body: &IoBuf, offset: usize, len: usize) -> Option<Self> {
        Some(Self { from: body.in_one_piece(offset, len)?, len })
    }
}

// SAFETY: `fill` writes `len` bytes.
unsafe impl WriteBody for LongBody {
    const LONG: bool = true;

    #[inline(always)]
    fn size(&self) -> usize {
        self.len
    }

    #[inline(always)]
    unsafe fn fill(&self, to: *mut u8) {
        // SAFETY: `len` bytes, which are there to be read, and in nobody's frame.
        unsafe { copy_short(self.from, to, self.len) }
    }
}

/// A received frame, lent by the port for the length of a call.
///
/// Its bytes may be in memory that a hostile process can still write, so they cannot be borrowed:
/// what is to be validated is copied first.
pub struct RxFrame<'a> {
    base: *const u8,
    len: usize,
    near: bool,
    marked: bool,
    memory: PhantomData<&'a [u8]>,
}

impl<'a> RxFrame<'a> {
    /// A frame in private memory.
    #[inline]
    pub fn new(bytes: &'a [u8]) -> Self {
        let (base, len) = (bytes.as_ptr(), bytes.len());
        Self { base, len, near: false, marked: false, memory: PhantomData }
    }

    /// A frame in memory that another process may write.
    ///
    /// # Safety
    /// `len` bytes from `base` are mapped and readable for `'a`. Another process may write them
    /// meanwhile.
    #[inline]
    pub unsafe fn from_raw(base: *const u8, len: usize) -> Self {
        Self { base, len, near: false, marked: false, memory: PhantomData }
    }

    /// A second handle on the same frame, for a call that is not inlined: only the copy is spilled
    /// to memory for it, and the original stays in registers.
    #[inline(always)]
    pub fn again(&self) -> Self {
        let Self { base, len, near, marked, memory } = *self;
        Self { base, len, near, marked, memory }
    }

    /// The same frame, marked as near: it was received through memory that only its sender, a
    /// process of this node, can have written. For ports that have [near
    /// stations](crate::port::Port::is_near).
    #[inline(always)]
    pub fn as_near(&self) -> Self {
        Self { near: true, ..self.again() }
    }

    /// The same frame with or without the ECN congestion mark (RFC 3168: congestion experienced) of
    /// its outer header.
    #[inline(always)]
    pub fn with_mark(&self, marked: bool) -> Self {
        Self { marked, ..self.again() }
    }

    /// The same frame without the near mark, from a wrapping port without near stations.
    #[inline(always)]
    pub fn as_far(&self) -> Self {
        Self { near: false, ..self.again() }
    }

    /// The `len` bytes at `offset` as a frame, for decapsulation. `None` if out of range.
    #[inline]
    pub fn part(&self, offset: usize, len: usize) -> Option<Self> {
        let fits = offset <= self.len && len <= self.len - offset;
        fits.then(|| Self { base: self.base.wrapping_add(offset), len, ..self.again() })
    }

    /// Whether it was received from a process of this node through shared memory, on a port with
    /// near stations; false on all others.
    #[inline(always)]
    pub fn is_near(&self) -> bool {
        self.near
    }

    /// Whether it has the congestion mark: see [`with_mark`](Self::with_mark).
    #[inline(always)]
    pub fn is_marked(&self) -> bool {
        self.marked
    }

    /// Destination and source stations of its header, not validated. `None` if it is too short.
    pub fn stations(&self) -> Option<[Station; 2]> {
        let head: [u8; FRAME_MIN] = self.first_chunk()?;
        let words = [word_at(&head, 0, DST_NUMBER_AT), word_at(&head, 6, SRC_NUMBER_AT)];
        Some(words.map(Station::from_word))
    }

    /// Length with the Ethernet header; padding that the link added is part of it.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the frame has no byte.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies the first `N` bytes out, or `None` if there are fewer.
    #[inline]
    pub fn first_chunk<const N: usize>(&self) -> Option<[u8; N]> {
        self.chunk_at(0)
    }

    /// Copies `N` bytes at `offset` out, or `None` if there are fewer.
    #[inline]
    pub fn chunk_at<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        if self.len < N || offset > self.len - N {
            return None;
        }
        // SAFETY: `read_unaligned` needs `N` readable bytes at `base + offset`: `offset + N <= len`
        // was just checked and `len` bytes are mapped for `'a` (`new`, `from_raw`). A concurrent
        // writer can only make the copy a mixture (D2 in docs/memory.md), and every byte is valid.
        Some(unsafe { self.base.add(offset).cast::<[u8; N]>().read_unaligned() })
    }

    /// Copies `dst.len()` bytes at `offset` out and says whether there were as many. If not,
    /// nothing was copied.
    #[inline]
    pub fn copy_to(&self, offset: usize, dst: &mut [u8]) -> bool {
        if offset > self.len || self.len - offset < dst.len() {
            return false;
        }
        // SAFETY: `copy_nonoverlapping` needs `dst.len()` readable bytes at the source (checked
        // against `len`, which is mapped for `'a`) and writable ones at `dst` (a `&mut`); device
        // memory and a Rust borrow do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(self.base.add(offset), dst.as_mut_ptr(), dst.len());
        }
        true
    }

    /// Copies `len` bytes at `offset`, at most [`U128_LEN`], zero-extended as a little-endian
    /// number; `None` if out of range or longer.
    #[inline(always)]
    pub fn u128_at(&self, offset: usize, len: usize) -> Option<u128> {
        if len > U128_LEN || offset > self.len || self.len - offset < len {
            return None;
        }
        if len == size_of::<u64>() {
            return self.chunk_at(offset).map(|word| u64::from_le_bytes(word).into());
        }
        let mut few = [0; U128_LEN];
        // SAFETY: `len` bytes at `offset` are mapped and `few` has room for as many, as was just
        // checked; device memory and a Rust borrow do not overlap.
        unsafe { copy_inline(self.base.add(offset), few.as_mut_ptr(), len) };
        Some(u128::from_le_bytes(few))
    }

    /// Copies `len` bytes at `offset` to `buf_offset` of application memory: the one copy on the
    /// receive path.
    ///
    /// # Panics
    /// If the frame or `buf` is too short; the caller has checked both against the header.
    #[inline(never)]
    pub fn copy_to_io(&self, offset: usize, buf: &IoBuf, buf_offset: usize, len: usize) {
        assert!(offset <= self.len && len <= self.len - offset);
        // SAFETY: `write_from_raw` needs `len` readable bytes at the source: checked against
        // `self.len`, which is mapped for `'a`.
        unsafe { buf.write_from_raw(buf_offset, self.base.add(offset), len) }
    }

    /// Fills `span` with the bytes at `offset`; most often one word. False, and nothing copied, if
    /// the frame has fewer.
    #[inline(always)]
    pub fn fill_span(&self, offset: usize, span: &Span) -> bool {
        let (to, len) = (span.base(), span.len());
        if len == size_of::<u64>() {
            let Some(word) = self.chunk_at::<8>(offset) else { return false };
            // SAFETY: eight bytes are lent to be written.
            unsafe { to.cast::<[u8; 8]>().write_unaligned(word) };
            return true;
        }
        if len == 0 {
            return true;
        }
        if offset > self.len || self.len - offset < len {
            return false;
        }
        // SAFETY: `len` bytes at `offset` are mapped, as many are lent to be written, and lent
        // memory is none of the frame's.
        unsafe { copy_any(self.base.add(offset), to, len) };
        true
    }

    /// As [`copy_to_io`](Self::copy_to_io) to the start of contiguous memory, inlined if the bytes
    /// are few.
    ///
    /// # Panics
    /// As `copy_to_io`.
    #[inline(always)]
    pub fn copy_to_span(&self, offset: usize, to: &Span, len: usize) {
        let here = offset <= self.len && len <= self.len - offset;
        if here && len <= to.len() && len <= SHORT {
            // SAFETY: `len` bytes at `offset` are mapped (`here`), as many are lent to be written,
            // and lent memory is none of the frame's.
            unsafe { copy_inline(self.base.add(offset), to.base(), len) };
        } else {
            self.again().copy_to_io(offset, &IoBuf::one(to.again()), 0, len);
        }
    }

    /// CRC32C of `crc`'s bytes followed by `len` bytes at `offset`, or `None` if there are fewer.
    pub fn crc32c(&self, crc: u32, offset: usize, len: usize) -> Option<u32> {
        if offset > self.len || self.len - offset < len {
            return None;
        }
        // The checksum protects against accidental corruption, not against a concurrent writer, so
        // reading the bytes again later is no vulnerability.
        // SAFETY: `len` bytes at `offset` are mapped, as was just checked.
        Some(unsafe { crc32c_of_raw(crc, self.base.add(offset), len, 0) })
    }

    /// Asks the processor to fetch the first cache line.
    #[inline]
    pub fn prefetch(&self) {
        crate::mem::prefetch(self.base);
    }
}

/// [`copy_short`], not inlined.
///
/// # Safety
/// As there.
#[inline(never)]
unsafe fn copy_any(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: passed on.
    unsafe { copy_short(src, dst, len) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every offset and length against the bytes themselves, with zeros behind them.
    #[test]
    fn few_bytes_are_those_of_the_frame() {
        let bytes: Vec<u8> = (1..=40).collect();
        for frame_len in [0, 1, 15, 16, 17, 40] {
            let frame = RxFrame::new(&bytes[..frame_len]);
            for offset in (0..45).chain([usize::MAX]) {
                for len in 0..20 {
                    let inside = bytes[..frame_len].get(offset..).and_then(|rest| rest.get(..len));
                    let want = inside.filter(|few| few.len() <= U128_LEN).map(|few| {
                        let mut padded = [0; U128_LEN];
                        padded[..len].copy_from_slice(few);
                        u128::from_le_bytes(padded)
                    });
                    assert_eq!(frame.u128_at(offset, len), want, "{len} at {offset}");
                }
            }
        }
    }
}
