//! CRC32C of memory that may be written concurrently: each word is read once, and nothing is
//! copied.
//!
//! The CRC32 instruction has a throughput of one word per cycle but a latency of three. So longer
//! input is processed in three lanes, whose checksums are combined by carry-less multiplication, as
//! in Intel's "Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction" (323405).

use std::mem::MaybeUninit;

use super::copy_short;

/// Longest input for which one lane is faster than three.
#[cfg(target_arch = "x86_64")]
const SHORT_MAX: usize = 192;

/// Longest lane, words.
#[cfg(target_arch = "x86_64")]
const LANE_MAX: usize = 128;

/// Factor that shifts a checksum by `n` words, at index `n`: x^(64 n - 33) modulo the polynomial,
/// bits reflected. The instruction multiplies by x^32, and the product of two reflected numbers by
/// x.
#[cfg(target_arch = "x86_64")]
static SHIFT_TABLE: [u32; 2 * LANE_MAX + 1] = shift_table();

#[cfg(target_arch = "x86_64")]
const fn shift_table() -> [u32; 2 * LANE_MAX + 1] {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let mut all = [0; 2 * LANE_MAX + 1];
    // x^31.
    let (mut power, mut n) = (1_u32, 1);
    while n < all.len() {
        all[n] = power;
        let mut bit = 0;
        while bit < 64 {
            power = (power >> 1) ^ (POLYNOMIAL & 0_u32.wrapping_sub(power & 1));
            bit += 1;
        }
        n += 1;
    }
    all
}

/// CRC32C of `crc`'s bytes followed by `len` bytes at `src`, which others may write meanwhile.
///
/// # Safety
/// They are readable.
#[inline]
pub(crate) unsafe fn crc32c_of_raw(crc: u32, src: *const u8, len: usize) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("sse4.2") {
        // SAFETY: the processor has the instructions, and the caller vouches for the bytes.
        unsafe {
            if len <= SHORT_MAX {
                return crc_short(crc, src, len);
            }
            if is_x86_feature_detected!("pclmulqdq") {
                return crc_three_lanes(crc, src, len);
            }
        }
    }
    // SAFETY: the caller's promise.
    unsafe { crc_long(crc, src, len) }
}

/// Without those instructions: in pieces that are copied, since a slice must not change under its
/// reader.
///
/// # Safety
/// As [`crc32c_of_raw`].
unsafe fn crc_long(crc: u32, src: *const u8, len: usize) -> u32 {
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

/// In three lanes, and what is left word by word.
///
/// # Safety
/// As [`crc32c_of_raw`], and the processor has SSE 4.2 and PCLMULQDQ.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2,pclmulqdq")]
unsafe fn crc_three_lanes(crc: u32, src: *const u8, len: usize) -> u32 {
    use std::arch::x86_64::_mm_crc32_u64;
    let (mut crc, mut done) = (crc, 0);
    while len - done > SHORT_MAX {
        let words = ((len - done) / 24).min(LANE_MAX);
        let lane = 8 * words;
        let [mut a, mut b, mut c] = [u64::from(!crc), 0, 0];
        for at in (done..done + lane).step_by(8) {
            // SAFETY: three lanes of as many words lie within what is left of the bytes that the
            // caller vouches for.
            unsafe {
                a = _mm_crc32_u64(a, src.add(at).cast::<u64>().read_unaligned());
                b = _mm_crc32_u64(b, src.add(at + lane).cast::<u64>().read_unaligned());
                c = _mm_crc32_u64(c, src.add(at + 2 * lane).cast::<u64>().read_unaligned());
            }
        }
        let moved = product(a, SHIFT_TABLE[2 * words]) ^ product(b, SHIFT_TABLE[words]);
        crc = !((_mm_crc32_u64(0, moved) ^ c) as u32);
        done += 3 * lane;
    }
    // SAFETY: the bytes that are left.
    unsafe { crc_short(crc, src.add(done), len - done) }
}

/// The product without carries.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "pclmulqdq")]
#[inline]
fn product(a: u64, b: u32) -> u64 {
    use std::arch::x86_64::{_mm_clmulepi64_si128, _mm_cvtsi64_si128, _mm_cvtsi128_si64};
    let of = |word: u64| _mm_cvtsi64_si128(word.cast_signed());
    _mm_cvtsi128_si64(_mm_clmulepi64_si128::<0>(of(a), of(u64::from(b)))).cast_unsigned()
}

/// Word by word, each read once.
///
/// # Safety
/// As [`crc32c_of_raw`], and the processor has SSE 4.2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
unsafe fn crc_short(crc: u32, src: *const u8, len: usize) -> u32 {
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
        let lens = (0..700).chain([1472, 2047, 2048, 2049, 3071, 3072, 3073, 4096, 4900]);
        for (i, len) in lens.enumerate() {
            let (at, start) = (i % 17, [0, 1, 0xdead_beef][i % 3]);
            let slice = &bytes[at..at + len];
            // SAFETY: the bytes of a slice.
            let ways = unsafe {
                [crc32c_of_raw(start, slice.as_ptr(), len), crc_long(start, slice.as_ptr(), len)]
            };
            let crc = crc32c::crc32c_append(start, slice);
            assert_eq!(ways, [crc; 2], "{len} bytes at {at}");
        }
    }
}
