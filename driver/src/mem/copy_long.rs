//! Copies of more than 2 KiB.
//!
//! C libraries copy such a piece by one `rep movsb` on processors that report it as fast. AMD's Zen
//! 3 and Zen 4 do, and are slow at it: up to 20 times slower if the destination's offset in its
//! page is a few bytes above the source's (glibc bug 30994, fixed in 2.40). Also, another processor
//! takes longer to read or write lines that were written or read this way. On a Zen 4, two
//! processors, messages of 64 KiB through a ring, Gbit/s, by which side copies with registers
//! instead:
//!
//! | a line takes | nobody | sender | receiver | both |
//! |---|---|---|---|---|
//! | 120 ns, frames of 9,000 B | 81 | 85 to 90 | 114 to 132 | 114 to 125 |
//! | 120 ns, frames of 33 KB | 174 | 186, 188 | 170 to 176 | 188 to 196 |
//! | 490 ns, frames of 9,000 B | 38 | 41 | 36, 37 | 38 to 40 |
//! | 490 ns, frames of 33 KB | 41 | 44 | 41, 42 | 44 to 46 |
//!
//! On a Xeon `rep movsb` was as fast as registers or faster, so others are left to the C library.

use std::ptr;

/// Copies like [`ptr::copy_nonoverlapping`], for lengths above [`SHORT`](super::SHORT).
///
/// # Safety
/// As `copy_nonoverlapping`: `len` bytes are readable at `src` and writable at `dst`, and the two
/// do not overlap. Others may write the source or read the destination meanwhile (D2 in
/// docs/memory.md).
#[inline(never)]
pub(super) unsafe fn copy_long(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise, passed on; `prefers_avx` has seen that there is AVX.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if len > amd::MIN && amd::prefers_avx() {
            return amd::copy(src, dst, len);
        }
        ptr::copy_nonoverlapping(src, dst, len);
    }
}

/// Whether [`copy_nontemporal`] may be called.
#[inline]
pub(super) fn supports_nontemporal() -> bool {
    #[cfg(target_arch = "x86_64")]
    return amd::prefers_avx();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Copies like [`copy_long`], by non-temporal stores, which bypass the caches.
///
/// A thread that observes a later Release store of this thread sees all bytes: non-temporal stores
/// are ordered only by a fence, which this ends with (D10 in docs/memory.md).
///
/// # Safety
/// As [`copy_long`]; [`supports_nontemporal`], and `len` is at least 256.
#[inline(never)]
pub(super) unsafe fn copy_nontemporal(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise, passed on; `supports_nontemporal` has seen that there is AVX.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        amd::copy_nontemporal(src, dst, len);
    }
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!("{src:p} to {dst:p}, {len} bytes: nobody may ask for this here");
}

/// Time-stamp counter; 0 on processors without one that is cheap to read.
#[inline]
pub(super) fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction, and Linux lets programs use it.
    return unsafe { std::arch::x86_64::_rdtsc() };
    #[cfg(not(target_arch = "x86_64"))]
    0
}

#[cfg(target_arch = "x86_64")]
mod amd {
    use std::arch::x86_64::{
        __cpuid, __m256i, _mm_sfence, _mm256_loadu_si256, _mm256_store_si256, _mm256_storeu_si256,
        _mm256_stream_si256,
    };
    use std::sync::atomic::AtomicU8;
    use std::sync::atomic::Ordering::Relaxed;

    /// Length above which C libraries use `rep movsb`.
    pub(super) const MIN: usize = 2048;

    /// Bytes of a register, and of a step.
    const REG: usize = size_of::<__m256i>();
    const STEP: usize = 4 * REG;

    /// Whether this is a processor of AMD (or Hygon) with AVX.
    #[inline]
    pub(super) fn prefers_avx() -> bool {
        /// 0 until CPUID was read, which is slow in a virtual machine; then 1 (no) or 2 (yes).
        static CACHED: AtomicU8 = AtomicU8::new(0);
        match CACHED.load(Relaxed) {
            0 => {
                #[allow(unused_unsafe, reason = "no longer unsafe in newer compilers")]
                // SAFETY: every x86-64 processor has the instruction.
                let vendor = unsafe { __cpuid(0) }.ebx.to_le_bytes();
                let wants = [*b"Auth", *b"Hygo"].contains(&vendor)
                    && std::arch::is_x86_feature_detected!("avx");
                CACHED.store(1 + u8::from(wants), Relaxed);
                wants
            }
            cached => cached == 2,
        }
    }

    /// # Safety
    /// As [`copy_long`](super::copy_long), and `len` is at least [`STEP`].
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
        // Bytes up to the first aligned address of the destination.
        let mut done = REG - dst.addr() % REG;
        // SAFETY: every register lies within the `len` bytes that the caller vouches for: the first
        // of them, `STEP` from `done` on while as many are left, and the last `STEP`. `dst + done`
        // is aligned from the first step on.
        unsafe {
            store(dst, load(src));
            while len - done > STEP {
                let regs = [0, 1, 2, 3].map(|i| load(src.add(done + i * REG)));
                for (i, reg) in regs.into_iter().enumerate() {
                    _mm256_store_si256(dst.add(done + i * REG).cast(), reg);
                }
                done += STEP;
            }
            for i in [1, 2, 3, 4] {
                store(dst.add(len - i * REG), load(src.add(len - i * REG)));
            }
        }
    }

    /// # Safety
    /// As [`copy_nontemporal`](super::copy_nontemporal).
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn copy_nontemporal(src: *const u8, dst: *mut u8, len: usize) {
        // Bytes up to the first cache line of the destination: a partial line would be read from
        // memory first.
        let mut done = 2 * REG - dst.addr() % (2 * REG);
        // SAFETY: every register lies within the `len` bytes that the caller vouches for: the first
        // two of them, `STEP` from `done` on while as many are left, and the last `STEP`. `dst +
        // done` is aligned from the first step on.
        unsafe {
            store(dst, load(src));
            store(dst.add(REG), load(src.add(REG)));
            while len - done > STEP {
                let regs = [0, 1, 2, 3].map(|i| load(src.add(done + i * REG)));
                for (i, reg) in regs.into_iter().enumerate() {
                    _mm256_stream_si256(dst.add(done + i * REG).cast(), reg);
                }
                done += STEP;
            }
            for i in [1, 2, 3, 4] {
                store(dst.add(len - i * REG), load(src.add(len - i * REG)));
            }
            _mm_sfence();
        }
    }

    /// # Safety
    /// A register's bytes are readable at `src`.
    #[inline]
    #[target_feature(enable = "avx")]
    unsafe fn load(src: *const u8) -> __m256i {
        // SAFETY: the caller's promise; needs no alignment.
        unsafe { _mm256_loadu_si256(src.cast()) }
    }

    /// # Safety
    /// A register's bytes are writable at `dst`.
    #[inline]
    #[target_feature(enable = "avx")]
    unsafe fn store(dst: *mut u8, reg: __m256i) {
        // SAFETY: the caller's promise; needs no alignment.
        unsafe { _mm256_storeu_si256(dst.cast(), reg) }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        /// Goal: a copy copies exactly its bytes, on processors of either design and past the
        /// caches. Method: lengths around one step, many, and [`MIN`], between all places in a
        /// line, with guards on both sides.
        #[test]
        fn long_copies_copy_exactly_their_bytes() {
            let src: Vec<u8> = (0..20_000_u32).map(|i| ((i * 31) >> 3) as u8 | 1).collect();
            let has_avx = std::arch::is_x86_feature_detected!("avx");
            let lens = [STEP, 3 * STEP, MIN, 64 * STEP];
            for len in lens.iter().flat_map(|n| [*n, n + 1, n + 31, n + 33, n + STEP - 1]) {
                for from in (0..64).step_by(3).chain([4096 - 17]) {
                    let to = 7 + (from * 5) % 64;
                    for way in 0..3 {
                        let mut dst = vec![0_u8; len + 90];
                        let (from, at) = (src[from..].as_ptr(), dst[to..].as_mut_ptr());
                        // SAFETY: `len` bytes fit in `src` from `from` and in `dst` from `to`; two
                        // allocations; AVX was asked for.
                        unsafe {
                            match way {
                                1 if has_avx => copy(from, at, len),
                                2 if has_avx && len >= 2 * STEP => copy_nontemporal(from, at, len),
                                _ => super::super::copy_long(from, at, len),
                            }
                        }
                        let from = from.addr() - src.as_ptr().addr();
                        assert_eq!(&dst[to..to + len], &src[from..from + len], "{len}");
                        let mut around = dst[..to].iter().chain(&dst[to + len..]);
                        assert!(around.all(|&b| b == 0), "{len} from {from} wrote outside");
                    }
                }
            }
        }
    }
}
