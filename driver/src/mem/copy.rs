//! Inlined copies of few bytes.

use super::copy_long::copy_long;

/// Longest inlined copy, and so the longest short frame, bytes.
pub const SHORT: usize = 128;

/// Copies `len` bytes like [`std::ptr::copy_nonoverlapping`], up to [`SHORT`] of them inline.
///
/// # Safety
/// As `copy_nonoverlapping`: `len` bytes are readable at `src` and writable at `dst`, and the two
/// do not overlap. Others may write the source or read the destination meanwhile (D2 in
/// docs/memory.md).
#[inline(always)]
pub(crate) unsafe fn copy_short(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise, for all lengths.
    unsafe {
        if len > SHORT {
            copy_long(src, dst, len);
        } else {
            copy_inline(src, dst, len);
        }
    }
}

/// Copies all of `src` to the start of `dst`, a short one without a call.
///
/// # Panics
/// If `dst` is shorter.
#[inline(always)]
pub(crate) fn copy_to_start(src: &[u8], dst: &mut [u8]) {
    assert!(src.len() <= dst.len());
    // SAFETY: a slice is readable for its length, the other one is as long or longer and writable,
    // and two slices of which one is exclusive do not overlap.
    unsafe { copy_short(src.as_ptr(), dst.as_mut_ptr(), src.len()) }
}

/// [`copy_short`] for callers that know the length to be at most [`SHORT`].
///
/// # Safety
/// As [`copy_short`], and `len <= SHORT`.
#[inline(always)]
pub(crate) unsafe fn copy_inline(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: every piece lies within the `len` bytes the caller vouches for: those from the start
    // reach to 16, 32 or 64 and those from the end as far back, under a condition that `len` is at
    // least that. Together they reach all bytes, `len` being at most twice that.
    unsafe {
        if len > 32 {
            copy_inline_32(src, dst, len);
        } else if len >= 16 {
            piece::<16>(src.add(len - 16), dst.add(len - 16));
            piece::<16>(src, dst);
        } else if len >= 8 {
            piece::<8>(src, dst);
            piece::<8>(src.add(len - 8), dst.add(len - 8));
        } else if len >= 4 {
            piece::<4>(src, dst);
            piece::<4>(src.add(len - 4), dst.add(len - 4));
        } else if len > 0 {
            piece::<1>(src, dst);
            piece::<1>(src.add(len / 2), dst.add(len / 2));
            piece::<1>(src.add(len - 1), dst.add(len - 1));
        }
    }
}

/// [`copy_inline`] for callers that know the length to be at least 32. From the end to the start.
///
/// # Safety
/// As [`copy_short`], and `32 <= len <= SHORT`.
#[inline(always)]
pub(crate) unsafe fn copy_inline_32(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: as in `copy_inline`: 32 from either end, and 64 if `len` is more than that.
    unsafe {
        if len > 64 {
            pieces(src.add(len - 32), dst.add(len - 32));
            pieces(src.add(len - 64), dst.add(len - 64));
            pieces(src.add(32), dst.add(32));
        } else {
            pieces(src.add(len - 32), dst.add(len - 32));
        }
        pieces(src, dst);
    }
}

/// Copies four bytes.
///
/// # Safety
/// They are readable at `src` and writable at `dst`, and do not overlap.
#[inline(always)]
pub(crate) unsafe fn copy_four(src: *const u8, dst: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { piece::<4>(src, dst) }
}

/// Copies 32 bytes.
///
/// # Safety
/// They are readable at `src` and writable at `dst`.
#[inline(always)]
unsafe fn pieces(src: *const u8, dst: *mut u8) {
    // SAFETY: 16 and 16 of the 32 bytes that the caller vouches for.
    unsafe {
        piece::<16>(src, dst);
        piece::<16>(src.add(16), dst.add(16));
    }
}

/// Copies `N` bytes in one move.
///
/// # Safety
/// `N` bytes are readable at `src` and writable at `dst`.
#[inline(always)]
unsafe fn piece<const N: usize>(src: *const u8, dst: *mut u8) {
    // SAFETY: the caller's promise; unaligned accesses are declared as such.
    unsafe { dst.cast::<[u8; N]>().write_unaligned(src.cast::<[u8; N]>().read_unaligned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: every length copies exactly its bytes. Method: all lengths over the inline limit,
    /// with guards on both sides.
    #[test]
    fn copy_short_copies_exactly_its_bytes() {
        let src: Vec<u8> = (0..400).map(|i| i as u8 | 1).collect();
        for len in 0..=330 {
            let mut dst = vec![0_u8; 350];
            // SAFETY: `len` bytes fit in `src` from 3 and in `dst` from 7; two allocations.
            unsafe { copy_short(src.as_ptr().add(3), dst.as_mut_ptr().add(7), len) };
            assert_eq!(&dst[7..7 + len], &src[3..3 + len], "{len}");
            assert!(dst[..7].iter().chain(&dst[7 + len..]).all(|&b| b == 0), "{len} wrote outside");
        }
    }
}
