//! Copying few bytes without a call.

use std::ptr;

/// Copies `len` bytes like [`ptr::copy`], up to 128 of them inline.
///
/// A frame is assembled from two or three short pieces, and for those the call into the library's
/// `memcpy` and its dispatch on the length cost more than the bytes do.
///
/// # Safety
/// As `copy`: `len` bytes are readable at `src` and writable at `dst`. The two may overlap: every
/// short length reads all before it writes. Others may write the source or read the destination
/// meanwhile (D2 in docs/memory.md).
#[inline(always)]
pub(crate) unsafe fn copy_short(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: every branch moves `N` bytes from the start and `N` from the end of both, with
    // `N <= len <= 2 N`, so all lies within the `len` bytes the caller vouches for.
    unsafe {
        match len {
            0 => {}
            1..=3 => {
                let (a, b, c) = (*src, *src.add(len / 2), *src.add(len - 1));
                (*dst, *dst.add(len / 2), *dst.add(len - 1)) = (a, b, c);
            }
            4..=7 => ends::<4>(src, dst, len),
            8..=15 => ends::<8>(src, dst, len),
            16..=31 => ends::<16>(src, dst, len),
            32..=63 => ends::<32>(src, dst, len),
            64..=128 => ends::<64>(src, dst, len),
            _ => ptr::copy(src, dst, len),
        }
    }
}

/// Copies the first and the last `N` of `len` bytes.
///
/// # Safety
/// `N <= len`, and as [`copy_short`].
#[inline(always)]
unsafe fn ends<const N: usize>(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: `N <= len`, so both pieces are inside; unaligned accesses are declared as such.
    unsafe {
        let first = src.cast::<[u8; N]>().read_unaligned();
        let last = src.add(len - N).cast::<[u8; N]>().read_unaligned();
        dst.cast::<[u8; N]>().write_unaligned(first);
        dst.add(len - N).cast::<[u8; N]>().write_unaligned(last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: every length copies exactly its bytes. Method: all lengths over the inline limit,
    /// with guards on both sides.
    #[test]
    fn copy_short_copies_exactly_its_bytes() {
        let src: Vec<u8> = (0..200).map(|i| i as u8 | 1).collect();
        for len in 0..=180 {
            let mut dst = vec![0_u8; 220];
            // SAFETY: `len` bytes fit in `src` from 3 and in `dst` from 7; two allocations.
            unsafe { copy_short(src.as_ptr().add(3), dst.as_mut_ptr().add(7), len) };
            assert_eq!(&dst[7..7 + len], &src[3..3 + len], "{len}");
            assert!(dst[..7].iter().chain(&dst[7 + len..]).all(|&b| b == 0), "{len} wrote outside");
        }
    }
}
