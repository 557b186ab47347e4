//! CRC32C of memory that others may write.

use std::mem::MaybeUninit;

use super::copy_short;

/// Bytes up to which a loop over words is quicker than the preparations for more at once.
const FEW: usize = 512;

/// CRC32C of `crc`'s bytes followed by `len` bytes at `src`, which others may write meanwhile.
///
/// # Safety
/// They are readable.
#[inline]
pub(crate) unsafe fn crc32c_of_raw(crc: u32, src: *const u8, len: usize) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if len <= FEW && is_x86_feature_detected!("sse4.2") {
        // SAFETY: the processor has the instruction, and the caller vouches for the bytes.
        return unsafe { of_few(crc, src, len) };
    }
    // SAFETY: the caller's promise.
    unsafe { of_many(crc, src, len) }
}

/// In pieces that are copied, since a slice must not change under its reader.
///
/// # Safety
/// As [`crc32c_of_raw`].
unsafe fn of_many(crc: u32, src: *const u8, len: usize) -> u32 {
    let mut piece = MaybeUninit::<[u8; 2048]>::uninit();
    let (mut crc, mut done) = (crc, 0);
    while done < len {
        let n = (len - done).min(size_of_val(&piece));
        // SAFETY: `copy_short` needs `n` readable bytes at the source, which the caller vouches
        // for, and as many writable ones in `piece`; the slice is of those just written.
        crc = unsafe {
            copy_short(src.add(done), piece.as_mut_ptr().cast(), n);
            crc32c::crc32c_append(crc, std::slice::from_raw_parts(piece.as_ptr().cast(), n))
        };
        done += n;
    }
    crc
}

/// Word by word, each read once.
///
/// # Safety
/// As [`crc32c_of_raw`], and the processor has SSE 4.2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
unsafe fn of_few(crc: u32, src: *const u8, len: usize) -> u32 {
    use std::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u16, _mm_crc32_u32, _mm_crc32_u64};
    let (mut word, mut at) = (u64::from(!crc), 0);
    // SAFETY: every read lies within the `len` bytes that the caller vouches for: whole words as
    // long as there are any, and then what the low bits of the length say is left.
    unsafe {
        while at + 32 <= len {
            for _ in 0..4 {
                word = _mm_crc32_u64(word, src.add(at).cast::<u64>().read_unaligned());
                at += 8;
            }
        }
        while at + 8 <= len {
            word = _mm_crc32_u64(word, src.add(at).cast::<u64>().read_unaligned());
            at += 8;
        }
        let mut crc = word as u32;
        if len & 4 != 0 {
            crc = _mm_crc32_u32(crc, src.add(at).cast::<u32>().read_unaligned());
            at += 4;
        }
        if len & 2 != 0 {
            crc = _mm_crc32_u16(crc, src.add(at).cast::<u16>().read_unaligned());
            at += 2;
        }
        if len & 1 != 0 {
            crc = _mm_crc32_u8(crc, src.add(at).read());
        }
        !crc
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the same checksum as the crate's, whatever the length, place and start value.
    #[test]
    fn crc_is_that_of_the_bytes() {
        let bytes: Vec<u8> = (0..5000_u32).map(|i| (i * 7 + (i >> 5)) as u8).collect();
        let lens = (0..700).chain([2047, 2048, 2049, 4096, 4900]);
        for (i, len) in lens.enumerate() {
            let (at, start) = (i % 17, [0, 1, 0xdead_beef][i % 3]);
            let slice = &bytes[at..at + len];
            // SAFETY: the bytes of a slice.
            let crc = unsafe { crc32c_of_raw(start, slice.as_ptr(), len) };
            assert_eq!(crc, crc32c::crc32c_append(start, slice), "{len} bytes at {at}");
        }
    }
}
