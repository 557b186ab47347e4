//! Copying long frames that another processor wrote.
//!
//! A `memcpy` of some 8 KiB and more is one `rep movsb` on x86-64 processors that call it fast, a
//! shorter one a loop of vector registers. Between two processors of a Zen 4, one writing frames of
//! 9,000 B to a ring and the other copying them out, that made, Gbit/s:
//!
//! | from one to the other a line takes | in one | in pieces |
//! |---|---|---|
//! | 50 to 60 ns: they share a cache | 85 or 220, by run | 200 to 240 |
//! | 140 to 500 ns | 35 to 55 | 15 to 18 |
//!
//! The slower half of "in one" is the writer's time: the reader leaves him lines that take long to
//! write again. So not the copy is timed, but now and then a line.

#[cfg(target_arch = "x86_64")]
use std::cell::Cell;
use std::ptr;

/// Bytes of a piece: too few for any C library's `rep movsb`.
#[cfg(target_arch = "x86_64")]
const PIECE: usize = 2048;

/// Copies like [`ptr::copy_nonoverlapping`], for lengths above [`LONG`](super::LONG).
///
/// # Safety
/// As `copy_nonoverlapping`: `len` bytes are readable at `src` and writable at `dst`, and the two
/// do not overlap. Others may write the source or read the destination meanwhile (D2 in
/// docs/memory.md).
#[inline(never)]
pub(super) unsafe fn copy_long(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if is_near(src, len) {
            return copy_in_pieces(src, dst, len);
        }
        ptr::copy_nonoverlapping(src, dst, len);
    }
}

/// # Safety
/// As [`copy_long`].
#[cfg(target_arch = "x86_64")]
unsafe fn copy_in_pieces(src: *const u8, dst: *mut u8, len: usize) {
    let mut done = 0;
    // SAFETY: every piece lies within the `len` bytes that the caller vouches for.
    unsafe {
        while len - done > PIECE {
            ptr::copy_nonoverlapping(src.add(done), dst.add(done), PIECE);
            done += PIECE;
        }
        ptr::copy_nonoverlapping(src.add(done), dst.add(done), len - done);
    }
}

/// Whether who wrote the `len` bytes at `src` is near, as far as this thread knows.
///
/// # Safety
/// As [`copy_long`].
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn is_near(src: *const u8, len: usize) -> bool {
    thread_local! {
        static DISTANCE: Cell<Distance> = const { Cell::new(Distance::NEAR) };
    }
    let mut distance = DISTANCE.get();
    // SAFETY: the caller's promise, passed on.
    let is_near = distance.is_near(|| unsafe { line_ns(src, len) });
    DISTANCE.set(distance);
    is_near
}

/// The nanoseconds that a line in the middle of the `len` bytes at `src` takes to come.
///
/// # Safety
/// The bytes are readable, and more than [`LONG`](super::LONG).
#[cfg(target_arch = "x86_64")]
#[cold]
unsafe fn line_ns(src: *const u8, len: usize) -> u64 {
    use crate::clock::now_ns;
    use std::arch::x86_64::_mm_lfence;
    let middle = src.wrapping_add(len / 2);
    // `prefetch_long` has asked for the start of each page.
    let is_asked_for = middle.addr() % super::PAGE < super::PAGE_START;
    let line = if is_asked_for { middle.wrapping_add(super::PAGE_START) } else { middle };
    // SAFETY: inside: `PAGE_START` is far less than half of `LONG`. Every such processor has the
    // fences, without which the clock would not wait for the line.
    unsafe {
        _mm_lfence();
        let begun = now_ns();
        _mm_lfence();
        line.read_volatile();
        _mm_lfence();
        now_ns() - begun
    }
}

/// How far away those are whose frames a thread copies.
#[derive(Clone, Copy)]
#[cfg(target_arch = "x86_64")]
struct Distance {
    near: bool,
    /// Copies before the next line is timed.
    left: u8,
    /// Lines in a row that said otherwise.
    doubts: u8,
}

#[cfg(target_arch = "x86_64")]
impl Distance {
    const NEAR: Self = Self { near: true, left: 0, doubts: 0 };

    /// A line that takes longer comes from afar: 50 to 60 ns and 140 to 500 were seen.
    const FAR_NS: u64 = 100;

    /// Whether the writer of the next copy is near. Every so often `line_ns` is asked, and believed
    /// if it says the same three times.
    #[inline]
    fn is_near(&mut self, line_ns: impl FnOnce() -> u64) -> bool {
        if self.left > 0 {
            self.left -= 1;
            return self.near;
        }
        self.left = 63;
        let near = line_ns() < Self::FAR_NS;
        self.doubts = if near == self.near { 0 } else { self.doubts + 1 };
        if self.doubts == 3 {
            (self.near, self.doubts) = (near, 0);
        }
        self.near
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    /// Goal: the distance follows what lines take, and no single one. Method: times as drawn here,
    /// each asked for once in 64 copies.
    #[test]
    fn three_lines_in_a_row_decide() {
        let mut distance = Distance::NEAR;
        let line = [
            (50, true),
            (900, true),
            (900, true),
            (60, true),
            (150, true),
            (150, true),
            (150, false),
            (60, false),
            (150, false),
            (60, false),
            (60, false),
            (99, true),
        ];
        for (ns, near) in line {
            assert_eq!(distance.is_near(|| ns), near, "{ns} ns");
            for _ in 0..63 {
                assert_eq!(distance.is_near(|| unreachable!("timed too often")), near);
            }
        }
    }

    /// Goal: either way, and the choice between them, copies exactly its bytes. Method: lengths
    /// around two pieces, three and four, from all places in a page that matter, with guards on
    /// both sides.
    #[test]
    fn long_copies_copy_exactly_their_bytes() {
        let src: Vec<u8> = (0..20_000_u32).map(|i| ((i * 31) >> 3) as u8 | 1).collect();
        let lens = [2, 3, 4].map(|n| n * PIECE);
        for len in lens.iter().flat_map(|n| [n + 1, n + 63, n + PIECE - 1, n + PIECE]) {
            for from in (3..8192).step_by(509) {
                for copy in [copy_long, copy_in_pieces] {
                    let mut dst = vec![0_u8; len + 20];
                    // SAFETY: `len` bytes fit in `src` from `from` and in `dst` from 7; two
                    // allocations.
                    unsafe { copy(src.as_ptr().add(from), dst.as_mut_ptr().add(7), len) };
                    assert_eq!(&dst[7..7 + len], &src[from..from + len], "{len}");
                    assert!(dst[..7].iter().chain(&dst[7 + len..]).all(|&b| b == 0), "{len}");
                }
            }
        }
    }
}
