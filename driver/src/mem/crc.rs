//! CRC32C of memory that may be written concurrently: each word is read once, and nothing is
//! copied.
//!
//! The CRC32 instruction has a throughput of one word per cycle but a latency of three. So longer
//! input is processed in three lanes, whose checksums are combined by carry-less multiplication, as
//! in Intel's "Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction" (323405).
//!
//! Where the processor multiplies four pairs of words at once (AVX-512 with VPCLMULQDQ: Ice Lake,
//! Zen 4), 256 bytes at a time are folded onto the next 256, as in Intel's "Fast CRC Computation
//! for Generic Polynomials Using PCLMULQDQ Instruction" (323102).

use std::mem::MaybeUninit;

use super::{copy_short, prefetch};

/// Longest input for which one lane is faster than three.
#[cfg(target_arch = "x86_64")]
const SHORT_MAX: usize = 192;

/// Longest lane, words.
#[cfg(target_arch = "x86_64")]
const LANE_MAX: usize = 128;

/// How far ahead bytes are prefetched. Three lanes are three short streams in a page or two, which
/// the hardware prefetcher follows too late, and not into the next page.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 4096;

/// Bytes of a vector, and of the four that are folded at once: the shortest input for
/// [`crc_folded`].
#[cfg(target_arch = "x86_64")]
const VECTOR: usize = 64;
#[cfg(target_arch = "x86_64")]
const BLOCK: usize = 4 * VECTOR;

/// `power` times x^`n` modulo the polynomial, bits reflected.
#[cfg(target_arch = "x86_64")]
const fn times_x(mut power: u32, n: usize) -> u32 {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let mut bit = 0;
    while bit < n {
        power = (power >> 1) ^ (POLYNOMIAL & 0_u32.wrapping_sub(power & 1));
        bit += 1;
    }
    power
}

/// x^31, reflected.
#[cfg(target_arch = "x86_64")]
const X_31: u32 = 1;

/// Factor that shifts a checksum by `n` words, at index `n`: x^(64 n - 33) modulo the polynomial,
/// bits reflected. The instruction multiplies by x^32, and the product of two reflected numbers by
/// x.
#[cfg(target_arch = "x86_64")]
static SHIFT_TABLE: [u32; 2 * LANE_MAX + 1] = shift_table();

#[cfg(target_arch = "x86_64")]
const fn shift_table() -> [u32; 2 * LANE_MAX + 1] {
    let mut all = [0; 2 * LANE_MAX + 1];
    let (mut power, mut n) = (X_31, 1);
    while n < all.len() {
        all[n] = power;
        power = times_x(power, 64);
        n += 1;
    }
    all
}

/// Factors that shift the low and the high word of 128 bits, reflected, by `bytes`. The low word
/// has the higher powers, 64 above those of the high one; the product adds one.
#[cfg(target_arch = "x86_64")]
const fn fold_factors(bytes: usize) -> [u64; 2] {
    let bits = 8 * bytes;
    [(times_x(X_31, bits + 32) as u64) << 32, (times_x(X_31, bits - 32) as u64) << 32]
}

/// CRC32C of `crc`'s bytes followed by `len` bytes at `src`, which others may write meanwhile.
///
/// The `next` bytes behind them are probably read soon, and are prefetched. They need not be
/// readable.
///
/// # Safety
/// The `len` bytes are readable.
#[inline]
pub(crate) unsafe fn crc32c_of_raw(crc: u32, src: *const u8, len: usize, next: usize) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("sse4.2") {
        // SAFETY: the processor has the instructions, and the caller vouches for the bytes.
        unsafe {
            if len <= SHORT_MAX {
                return crc_short(crc, src, len);
            }
            let has_fold = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("vpclmulqdq")
                && is_x86_feature_detected!("pclmulqdq");
            if has_fold && len >= BLOCK {
                return crc_folded(crc, src, len);
            }
            if is_x86_feature_detected!("pclmulqdq") {
                return crc_three_lanes(crc, src, len, next);
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

/// By folding, and what is left word by word. Everything before the four vectors is in them:
/// modulo the polynomial, they and what follows are the input.
///
/// # Safety
/// As [`crc32c_of_raw`], `len` is [`BLOCK`] at least, and the processor has SSE 4.2, AVX-512F,
/// PCLMULQDQ and VPCLMULQDQ.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2,avx512f,pclmulqdq,vpclmulqdq")]
unsafe fn crc_folded(crc: u32, src: *const u8, len: usize) -> u32 {
    use std::arch::x86_64::*;
    let factors = |[low, high]: [u64; 2]| {
        let pair = _mm_set_epi64x(high.cast_signed(), low.cast_signed());
        _mm512_broadcast_i32x4(pair)
    };
    let fold = |x: __m512i, by: __m512i, onto: __m512i| {
        let low = _mm512_clmulepi64_epi128::<0x00>(x, by);
        let high = _mm512_clmulepi64_epi128::<0x11>(x, by);
        _mm512_ternarylogic_epi64::<0x96>(low, high, onto)
    };
    // SAFETY: each call below is for a vector within the `len` bytes.
    let load = |at: usize| unsafe { _mm512_loadu_si512(src.add(at).cast()) };
    let mut x = [load(0), load(VECTOR), load(2 * VECTOR), load(3 * VECTOR)];
    x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(!crc as i32)));
    let by = factors(const { fold_factors(BLOCK) });
    let mut done = BLOCK;
    while done + BLOCK <= len {
        for (i, x) in x.iter_mut().enumerate() {
            *x = fold(*x, by, load(done + VECTOR * i));
        }
        done += BLOCK;
    }
    let by = factors(const { fold_factors(VECTOR) });
    let mut last = fold(fold(fold(x[0], by, x[1]), by, x[2]), by, x[3]);
    while done + VECTOR <= len {
        last = fold(last, by, load(done));
        done += VECTOR;
    }
    let mut words = [0_u64; 8];
    // SAFETY: `words` has the size of a vector; the words after `done` are readable.
    unsafe {
        _mm512_storeu_si512(words.as_mut_ptr().cast(), last);
        let crc = words.iter().fold(0, |crc, word| _mm_crc32_u64(crc, *word));
        crc_short(!(crc as u32), src.add(done), len - done)
    }
}

/// In three lanes, and what is left word by word.
///
/// # Safety
/// As [`crc32c_of_raw`], and the processor has SSE 4.2 and PCLMULQDQ.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2,pclmulqdq")]
unsafe fn crc_three_lanes(crc: u32, src: *const u8, len: usize, next: usize) -> u32 {
    use std::arch::x86_64::_mm_crc32_u64;
    let (mut crc, mut done) = (crc, 0);
    while len - done > SHORT_MAX {
        let words = ((len - done) / 24).min(LANE_MAX);
        let first = src.wrapping_add(done);
        let has_next = done + 24 * words + AHEAD <= len.saturating_add(next);
        // SAFETY: three lanes of as many words lie within what is left of the bytes that the
        // caller vouches for.
        let [a, b, c] = unsafe {
            match has_next {
                true => lanes::<true>(crc, first, words),
                false => lanes::<false>(crc, first, words),
            }
        };
        let moved = product(a, SHIFT_TABLE[2 * words]) ^ product(b, SHIFT_TABLE[words]);
        crc = !((_mm_crc32_u64(0, moved) ^ c) as u32);
        done += 24 * words;
    }
    // SAFETY: the bytes that are left.
    unsafe { crc_short(crc, src.add(done), len - done) }
}

/// The checksums of three lanes of `words` words each, one behind the other; the first continues
/// `crc`. With `PREFETCH`, as many bytes [`AHEAD`] of them are prefetched.
///
/// # Safety
/// The words are readable, and the processor has SSE 4.2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
#[inline]
unsafe fn lanes<const PREFETCH: bool>(crc: u32, src: *const u8, words: usize) -> [u64; 3] {
    use std::arch::x86_64::_mm_crc32_u64;
    let [mut a, mut b, mut c] = [u64::from(!crc), 0, 0];
    for at in 0..words {
        if PREFETCH && at % 8 == 0 {
            let line = src.wrapping_add(24 * at + AHEAD);
            (0..3).for_each(|i| prefetch(line.wrapping_add(64 * i)));
        }
        let word = |lane| src.wrapping_add(8 * (lane * words + at)).cast::<u64>();
        // SAFETY: words of the three lanes.
        unsafe {
            a = _mm_crc32_u64(a, word(0).read_unaligned());
            b = _mm_crc32_u64(b, word(1).read_unaligned());
            c = _mm_crc32_u64(c, word(2).read_unaligned());
        }
    }
    [a, b, c]
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
            let src = slice.as_ptr();
            // SAFETY: the bytes of a slice.
            let mut ways =
                unsafe { vec![crc32c_of_raw(start, src, len, 0), crc_long(start, src, len)] };
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("sse4.2") && is_x86_feature_detected!("pclmulqdq") {
                for next in [0, usize::MAX] {
                    // SAFETY: the bytes of a slice; the processor has the instructions.
                    ways.push(unsafe { crc_three_lanes(start, src, len, next) });
                }
            }
            let crc = crc32c::crc32c_append(start, slice);
            assert_eq!(ways, vec![crc; ways.len()], "{len} bytes at {at}");
        }
    }
}
