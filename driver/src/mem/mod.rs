//! Memory of the application and of the fabric, accessed only by bounds-checked copies.

mod arena;
pub mod atomic;
mod copy;
mod copy_long;
mod crc;
mod inline_bytes;
mod locked;
mod nt_store;
mod scratch;
mod span;

pub use arena::{Arena, ArenaError, Block, Hugepages};
pub use atomic::Words;
pub use copy::SHORT;
pub(crate) use copy::{copy_four, copy_inline, copy_inline_32, copy_short, copy_to_start};
pub(crate) use crc::crc32c_of_raw;
pub use inline_bytes::{InlineBytes, U128_LEN};
pub use locked::{KeyMemory, Locked};
pub(crate) use nt_store::{Lap, Stores};
pub use scratch::Scratch;
pub use span::{IOV_LIMIT, IoBuf, Span};

/// Size of a transparent huge page.
const LARGE_PAGE: usize = 2 << 20;

/// Advises the kernel to back a table of `len` bytes with huge pages, for fewer TLB misses at
/// random accesses. The first huge page's worth stays in small pages, so that a sparsely used table
/// costs little. A hint only: a kernel without transparent huge pages refuses it (madvise(2),
/// `MADV_HUGEPAGE`).
pub fn prefer_large_pages(table: *const u8, len: usize) {
    let start = (table.addr() + LARGE_PAGE).next_multiple_of(LARGE_PAGE);
    let end = (table.addr() + len) & !(LARGE_PAGE - 1);
    if end > start {
        let at = table.with_addr(start).cast_mut().cast();
        // SAFETY: the advice changes neither what is mapped nor what is in it.
        unsafe { libc::madvise(at, end - start, libc::MADV_HUGEPAGE) };
    }
}

/// Prefetches the cache line at `p`, which need not be valid.
#[inline]
pub fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint, reads nothing architecturally and cannot fault.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Length above which a received frame is prefetched before it is parsed.
const LONG_FRAME: usize = PAGE;

const PAGE: usize = 4096;

/// Bytes of each page that are prefetched.
const PAGE_START: usize = 4 * 64;

/// Prefetches the start of a long frame at `p`, and a few lines of each following page: the
/// hardware prefetcher works within a page, once it has detected the copy's direction. The work
/// before the copy hides part of the latency. Does nothing for a frame of up to [`LONG_FRAME`]
/// bytes.
#[inline(always)]
pub(crate) fn prefetch_long(p: *const u8, len: usize) {
    if len > LONG_FRAME {
        prefetch_pages(p, len);
    }
}

#[inline(never)]
fn prefetch_pages(p: *const u8, len: usize) {
    let prefetch_range = |at: usize, bytes: usize| {
        (0..bytes).step_by(64).for_each(|line| prefetch(p.wrapping_add(at + line)));
    };
    prefetch_range(0, PAGE / 2);
    let mut at = PAGE - p.addr() % PAGE;
    while at + PAGE_START <= len {
        prefetch_range(at, PAGE_START);
        at += PAGE;
    }
}

/// As [`prefetch`], with exclusive ownership of the line, for writing.
#[inline(always)]
pub(crate) fn prefetch_to_write(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint as well, a no-op on processors without it.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) p, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}
