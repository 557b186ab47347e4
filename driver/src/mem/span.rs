//! Descriptors of the application's memory for one operation.
//!
//! The creator of a [`Span`] promises, once, that the memory stays valid; all accesses are by
//! offsets that are checked here. The bytes cannot be borrowed: a peer may be writing them through
//! another operation at any time.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::{fmt, ptr, slice};

use super::U128_LEN;
use crate::hint::cold;

/// Most spans of one operation (`iov_limit`).
pub const IOV_LIMIT: usize = 8;

/// `len` bytes of the application's memory from `base`, lent to the fabric.
///
/// Neither `Clone` nor `Copy`: it belongs to one operation, and is dropped when that has completed.
#[derive(Debug)]
pub struct Span {
    base: *mut u8,
    len: usize,
}

// SAFETY: a span is an address and a promise that the memory behind it stays (`from_raw`), which
// holds on every thread.
unsafe impl Send for Span {}

impl Span {
    /// No memory.
    pub const EMPTY: Self = Self { base: ptr::null_mut(), len: 0 };

    /// Lends `len` bytes at `base` to the fabric.
    ///
    /// # Safety
    /// Until the span is dropped or the operation it was given to has completed, the bytes are
    /// mapped; readable if the operation reads them (a send), writable if it writes them (a
    /// receive); and no Rust reference to them is alive in the second case. `base` may be null or
    /// dangling if `len` is 0.
    pub const unsafe fn from_raw(base: *mut u8, len: usize) -> Self {
        Self { base, len }
    }

    /// Number of bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address, for completions that report where a message was placed.
    pub fn addr(&self) -> usize {
        self.base as usize
    }

    /// A second description of the same memory, for the same operation.
    #[inline(always)]
    pub fn again(&self) -> Self {
        Self { base: self.base, len: self.len }
    }

    /// The first `len` bytes, or all if there are fewer, for the same operation.
    #[inline(always)]
    pub fn first(&self, len: usize) -> Self {
        Self { base: self.base, len: self.len.min(len) }
    }

    /// `len` bytes at `offset`, for the same operation; `None` if they are not all inside.
    #[inline(always)]
    pub fn piece(&self, offset: usize, len: usize) -> Option<Self> {
        self.inside(offset, len).map(|base| Self { base, len })
    }

    /// The address of its first byte, valid for [`len`](Self::len) bytes.
    #[inline(always)]
    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }

    /// The address of `len` bytes at `offset`, if they are in range.
    #[inline(always)]
    pub(super) fn inside(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let inside = offset <= self.len && len <= self.len - offset;
        if inside { Some(self.base.wrapping_add(offset)) } else { cold(None) }
    }

    /// The word at `offset`, unaligned; `None` if out of range.
    #[inline(always)]
    pub fn word_at(&self, offset: usize) -> Option<u64> {
        let from = self.inside(offset, 8)?;
        // SAFETY: eight bytes inside lent memory, readable by the lender's promise.
        Some(unsafe { ptr::read_unaligned(from.cast::<u64>()) })
    }

    /// Writes a word at `offset`, unaligned. False, and nothing was written, if out of range.
    #[inline(always)]
    pub fn set_word_at(&self, offset: usize, word: u64) -> bool {
        let Some(to) = self.inside(offset, 8) else { return false };
        // SAFETY: eight bytes inside lent memory, writable by the lender's promise.
        unsafe { ptr::write_unaligned(to.cast::<u64>(), word) };
        true
    }

    /// Whether a byte is in both.
    #[inline(always)]
    pub fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.base as usize, other.base as usize);
        // Whether one begins within the other.
        let (a_in_b, b_in_a) = (a.wrapping_sub(b) < other.len, b.wrapping_sub(a) < self.len);
        (a_in_b || b_in_a) && self.len > 0 && other.len > 0
    }

    /// The bytes, zero-extended, as a little-endian number; `None` if longer than [`U128_LEN`].
    #[inline(always)]
    pub fn to_u128(&self) -> Option<u128> {
        if self.len == size_of::<u64>() {
            // SAFETY: all of the span is lent to be read, and has eight bytes.
            let word = unsafe { self.base.cast::<[u8; 8]>().read_unaligned() };
            return Some(u64::from_le_bytes(word).into());
        }
        // SAFETY: all of the span is lent to be read.
        unsafe { to_u128_odd(self.base, self.len) }
    }
}

/// [`Span::to_u128`] for any length. Takes address and length, since a reference would force the
/// span into memory.
///
/// # Safety
/// `len` bytes at `base` are readable.
#[inline(never)]
unsafe fn to_u128_odd(base: *const u8, len: usize) -> Option<u128> {
    let mut few = [0; U128_LEN];
    if len > U128_LEN {
        return None;
    }
    // SAFETY: the caller's promise; `few` is our own and has room.
    unsafe { super::copy_inline(base, few.as_mut_ptr(), len) }
    Some(u128::from_le_bytes(few))
}

/// The memory of one operation: 0 to [`IOV_LIMIT`] spans in sequence.
pub struct IoBuf {
    len: usize,
    count: usize,
    /// The first `count` are initialised. The others are not: most operations have one span, and
    /// clearing eight would cost more than describing the message.
    spans: [MaybeUninit<Span>; IOV_LIMIT],
}

impl fmt::Debug for IoBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoBuf").field("len", &self.len).field("spans", &self.spans()).finish()
    }
}

impl Default for IoBuf {
    fn default() -> Self {
        Self::EMPTY
    }
}

impl IoBuf {
    /// No memory.
    pub const EMPTY: Self =
        Self { len: 0, count: 0, spans: [const { MaybeUninit::uninit() }; IOV_LIMIT] };

    /// One span.
    #[inline(always)]
    pub fn one(span: Span) -> Self {
        // Not from `EMPTY`, whose bytes would be copied with it.
        // SAFETY: an array of `MaybeUninit` needs no initialisation.
        let spans =
            unsafe { MaybeUninit::<[MaybeUninit<Span>; IOV_LIMIT]>::uninit().assume_init() };
        let mut buf = Self { len: span.len, count: 1, spans };
        buf.spans[0] = MaybeUninit::new(span);
        buf
    }

    /// Moves to `slot`, copying only the used spans. Nothing is left here.
    #[inline(always)]
    pub fn move_to(&mut self, slot: &mut Self) {
        (slot.len, slot.count) = (self.len, self.count);
        if let [one] = self.spans() {
            slot.spans[0] = MaybeUninit::new(one.again());
        } else {
            // SAFETY: a bitwise copy of what may be uninitialised; `count` says what is, and the
            // original is forgotten below.
            slot.spans = unsafe { ptr::read(&raw const self.spans) };
        }
        (self.len, self.count) = (0, 0);
    }

    /// The memory, if it is contiguous; empty memory is.
    #[inline(always)]
    pub fn as_one(&self) -> Option<&Span> {
        match self.spans() {
            [one] => Some(one),
            [] => Some(const { &Span::EMPTY }),
            _ => None,
        }
    }

    /// Takes the memory out, if it is contiguous. Nothing is left here.
    #[inline(always)]
    pub fn take_one(&mut self) -> Option<Span> {
        let &Span { base, len } = self.as_one()?;
        (self.len, self.count) = (0, 0);
        Some(Span { base, len })
    }

    /// The first span; most operations have no other.
    #[inline(always)]
    pub fn first(&self) -> Option<&Span> {
        self.spans().first()
    }

    /// The spans there are.
    #[inline(always)]
    fn spans(&self) -> &[Span] {
        // SAFETY: the first `count` elements, at most `IOV_LIMIT`, are initialised: every function
        // that raises `count` writes them first; and a `MaybeUninit<Span>` is laid out as a `Span`.
        unsafe { slice::from_raw_parts(self.spans.as_ptr().cast::<Span>(), self.count) }
    }

    /// A copy of `bytes` in memory that is never freed, for tests and examples.
    pub fn leaked(bytes: &[u8]) -> Self {
        Self::leaked_pair(bytes).0
    }

    /// As [`leaked`](Self::leaked), with a second handle on the same memory to look at it while an
    /// operation has the first.
    pub fn leaked_pair(bytes: &[u8]) -> (Self, Self) {
        let memory = Box::leak(Box::<[u8]>::from(bytes));
        let (base, len) = (memory.as_mut_ptr(), memory.len());
        // SAFETY: leaked memory stays mapped and writable for ever, and the one reference to it
        // ends here.
        unsafe { (Self::one(Span::from_raw(base, len)), Self::one(Span::from_raw(base, len))) }
    }

    /// The part `offset..offset + len`, and the rest is lent no more. For tests.
    ///
    /// # Panics
    /// If it is not all inside.
    pub fn piece(self, offset: usize, len: usize) -> Self {
        self.share(offset, len)
    }

    /// A second description of `offset..offset + len`, for an operation that is made of several.
    ///
    /// The memory is lent until the first operation has ended, so the parts have to end before it;
    /// the caller ensures that.
    ///
    /// # Panics
    /// If it is not all inside.
    pub fn share(&self, offset: usize, len: usize) -> Self {
        let mut part = Self::EMPTY;
        self.each(offset, len, |base, _, n| {
            part.spans[part.count] = MaybeUninit::new(Span { base, len: n });
            (part.count, part.len) = (part.count + 1, part.len + n);
        });
        part
    }

    /// A second description of all of it, as by [`share`](Self::share), for a call that is not
    /// inlined: only the copy is spilled to memory for it, and the original stays in registers.
    #[inline(always)]
    pub fn again(&self) -> Self {
        match self.spans() {
            [one] => Self::one(one.again()),
            _ => self.share(0, self.len),
        }
    }

    /// Appends the spans of `other` and says whether there was room. If not, nothing changed.
    pub fn append(&mut self, other: Self) -> bool {
        let Some(len) = self.len.checked_add(other.len) else { return false };
        if self.count + other.count > IOV_LIMIT {
            return false;
        }
        for (to, from) in self.spans[self.count..].iter_mut().zip(other.spans()) {
            *to = MaybeUninit::new(from.again());
        }
        self.len = len;
        self.count += other.count;
        true
    }

    /// Copies `len` bytes at `offset` to `to_offset` of `to`. The two may be the same memory.
    ///
    /// # Panics
    /// If they are not all inside.
    pub fn copy_to(&self, offset: usize, to: &Self, to_offset: usize, len: usize) {
        self.each(offset, len, |from, before, n| {
            to.each(to_offset + before, n, |at, done, n| {
                // SAFETY: `n` bytes at `from + done` lie inside a lent span of `self`, and at `at`
                // inside one of `to`; `copy` allows them to overlap.
                unsafe { ptr::copy(from.wrapping_add(done), at, n) };
            });
        });
    }

    /// Appends a span and says whether there was room and the total length did not overflow.
    /// If not, nothing changed.
    pub fn push(&mut self, span: Span) -> bool {
        let Some(len) = self.len.checked_add(span.len) else { return false };
        if self.count == IOV_LIMIT {
            return false;
        }
        self.len = len;
        self.spans[self.count] = MaybeUninit::new(span);
        self.count += 1;
        true
    }

    /// Bytes in total.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of `len` bytes at `offset`; `None` if out of range or not known to be contiguous
    /// (more than one span).
    #[inline(always)]
    pub(crate) fn in_one_piece(&self, offset: usize, len: usize) -> Option<*const u8> {
        let [one] = self.spans() else { return None };
        if offset > self.len || len > self.len - offset {
            return None;
        }
        Some(one.base.wrapping_add(offset).cast_const())
    }

    /// Whether a byte is in both.
    #[inline(always)]
    pub fn overlaps(&self, other: &Self) -> bool {
        match (self.spans(), other.spans()) {
            ([a], [b]) => a.overlaps(b),
            _ => self.overlaps_any(other),
        }
    }

    #[inline(never)]
    fn overlaps_any(&self, other: &Self) -> bool {
        self.spans().iter().any(|a| other.spans().iter().any(|b| a.overlaps(b)))
    }

    /// Whether it has a byte with an address in `range`.
    pub fn touches(&self, range: &Range<usize>) -> bool {
        let touches = |span: &Span| {
            let (from, to) = (span.addr(), span.addr().saturating_add(span.len));
            from.max(range.start) < to.min(range.end)
        };
        self.spans().iter().any(touches)
    }

    /// The address of the byte at `offset`, 0 if it lies beyond the end.
    pub fn addr_at(&self, offset: usize) -> usize {
        let mut at = offset;
        for span in self.spans() {
            if at < span.len {
                return span.base as usize + at;
            }
            at -= span.len;
        }
        0
    }

    /// Copies `dst.len()` bytes at `offset` out.
    ///
    /// # Panics
    /// If they are not all inside.
    #[inline]
    pub fn read_at(&self, offset: usize, dst: &mut [u8]) {
        let to = dst.as_mut_ptr();
        // SAFETY: `each` calls with `n` bytes at `piece` inside a lent span, and with `done + n <=
        // dst.len()`, so source and destination hold `n` bytes; `dst` is an exclusive borrow and
        // so overlaps no lent memory.
        self.each(offset, dst.len(), |piece, done, n| unsafe {
            ptr::copy_nonoverlapping(piece, to.add(done), n);
        });
    }

    /// As [`read_at`](Self::read_at) from the start, without a call if the bytes are few and the
    /// memory is in one piece.
    ///
    /// # Panics
    /// As `read_at`.
    #[inline(always)]
    pub fn read_start(&self, dst: &mut [u8]) {
        match self.in_one_piece(0, dst.len()) {
            // SAFETY: as many bytes are lent (`in_one_piece`), and `dst` is an exclusive borrow.
            Some(from) if dst.len() <= super::SHORT => unsafe {
                super::copy_inline(from, dst.as_mut_ptr(), dst.len());
            },
            _ => self.read_at(0, dst),
        }
    }

    /// Copies `src` to `offset`.
    ///
    /// # Panics
    /// If it does not fit.
    #[inline]
    pub fn write_at(&self, offset: usize, src: &[u8]) {
        // SAFETY: `src` is readable for its length.
        unsafe { self.write_from_raw(offset, src.as_ptr(), src.len()) }
    }

    /// Copies `len` bytes from `src` to `offset`.
    ///
    /// # Safety
    /// `len` bytes at `src` are readable and none of this memory. They may be written meanwhile.
    ///
    /// # Panics
    /// If they do not fit.
    #[inline]
    pub(crate) unsafe fn write_from_raw(&self, offset: usize, src: *const u8, len: usize) {
        if self.count == 1 {
            assert!(offset <= self.len && len <= self.len - offset, "copy outside the lent memory");
            // SAFETY: one span holds all `self.len` bytes, so `offset + len` is inside it; the
            // caller vouches for `src`.
            unsafe { super::copy_short(src, self.spans()[0].base.wrapping_add(offset), len) };
            return;
        }
        // SAFETY: `each` calls with `n` writable bytes at `piece` (the lender's promise) and with
        // `done + n <= len`, which the caller says are readable.
        self.each(offset, len, |piece, done, n| unsafe {
            ptr::copy(src.add(done), piece, n);
        });
    }

    /// Copies `len` bytes at `offset` to `dst`, for ports whose slots lie in shared memory.
    ///
    /// # Safety
    /// `len` bytes at `dst` are writable and none of this memory. They may be read by others
    /// meanwhile.
    ///
    /// # Panics
    /// If they are not all inside.
    #[inline]
    pub unsafe fn read_to_raw(&self, offset: usize, dst: *mut u8, len: usize) {
        if self.count == 1 {
            assert!(offset <= self.len && len <= self.len - offset, "copy outside the lent memory");
            // SAFETY: one span holds all `self.len` bytes, so `offset + len` is inside it; the
            // caller vouches for `dst`.
            unsafe { super::copy_short(self.spans()[0].base.wrapping_add(offset), dst, len) };
            return;
        }
        // SAFETY: `each` calls with `n` readable bytes at `piece` (the lender's promise) and with
        // `done + n <= len`, which the caller says are writable.
        self.each(offset, len, |piece, done, n| unsafe {
            ptr::copy(piece, dst.add(done), n);
        });
    }

    /// CRC32C of `crc`'s bytes followed by `len` bytes at `offset`.
    ///
    /// # Panics
    /// If they are not all inside.
    pub fn crc32c(&self, crc: u32, offset: usize, len: usize) -> u32 {
        if let Some(piece) = self.in_first(offset, len) {
            // The next frame of a long message has the bytes behind these.
            let next = self.spans()[0].len - offset - len;
            // SAFETY: `len` bytes at `piece` are inside a lent span.
            return unsafe { super::crc32c_of_raw(crc, piece, len, next) };
        }
        let mut crc = crc;
        // SAFETY: `each` calls with `n` bytes at `piece` inside a lent span.
        self.each(offset, len, |piece, _, n| unsafe {
            crc = super::crc32c_of_raw(crc, piece, n, 0);
        });
        crc
    }

    /// The address of `len` bytes at `offset`, if they lie in the first span: the usual case.
    #[inline]
    pub(super) fn in_first(&self, offset: usize, len: usize) -> Option<*mut u8> {
        self.first()?.inside(offset, len)
    }

    /// Calls `f(address, bytes before, bytes)` for every contiguous piece of `offset..offset+len`.
    #[inline]
    pub(super) fn each(&self, offset: usize, len: usize, mut f: impl FnMut(*mut u8, usize, usize)) {
        assert!(offset <= self.len && len <= self.len - offset, "copy outside the lent memory");
        if len == 0 {
            return;
        }
        let mut at = offset;
        let mut done = 0;
        for span in self.spans() {
            if at >= span.len {
                at -= span.len;
                continue;
            }
            let n = (span.len - at).min(len - done);
            // SAFETY: `add` stays inside the lent span: `at < span.len`.
            f(unsafe { span.base.add(at) }, done, n);
            done += n;
            at = 0;
            if done == len {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Few bytes are those of the span, with zeros behind them.
    #[test]
    fn few_bytes_are_those_of_the_span() {
        let memory = Box::leak(Box::new([0xa5_u8; U128_LEN + 4])).as_mut_ptr();
        for len in 0..U128_LEN + 4 {
            // SAFETY: leaked memory stays mapped, nobody has a reference to it; it is only read.
            let few = unsafe { Span::from_raw(memory, len) }.to_u128();
            let mut want = [0; U128_LEN];
            want[..len.min(U128_LEN)].fill(0xa5);
            assert_eq!(few, (len <= U128_LEN).then(|| u128::from_le_bytes(want)), "{len}");
        }
    }

    /// Spans of two ranges overlap if a byte is in both.
    #[test]
    fn spans_overlap_where_a_byte_is_in_both() {
        let memory = Box::leak(Box::new([0_u8; 12])).as_mut_ptr();
        // SAFETY: leaked memory stays mapped, nobody has a reference to it, and it is only read.
        let span = |at, len| unsafe { Span::from_raw(memory.add(at), len) };
        for (a, a_len) in (0..8).flat_map(|a| (0..5).map(move |len| (a, len))) {
            for (b, b_len) in (0..8).flat_map(|b| (0..5).map(move |len| (b, len))) {
                let both = (a..a + a_len).any(|byte| (b..b + b_len).contains(&byte));
                assert_eq!(span(a, a_len).overlaps(&span(b, b_len)), both, "{a} {b}");
                let at = memory as usize;
                let range = at + b..at + b + b_len;
                assert_eq!(IoBuf::one(span(a, a_len)).touches(&range), both, "{a} {b}");
            }
        }
        assert!(!Span::EMPTY.overlaps(&span(0, 4)) && !span(0, 4).overlaps(&Span::EMPTY));
    }
}
