//! Memory of the application and of the fabric, reached only by bounded copies.

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

/// A large page of every architecture that has them.
const LARGE_PAGE: usize = 2 << 20;

/// Asks the kernel for large pages behind a table of `len` bytes that is used all over: an access
/// at random then misses the translation of its address less often. The first large page stays in
/// small ones, so that a table of which little is used costs little. Only a wish: a kernel without
/// transparent large pages refuses it (madvise(2), `MADV_HUGEPAGE`).
pub fn prefer_large_pages(table: *const u8, len: usize) {
    let start = (table.addr() + LARGE_PAGE).next_multiple_of(LARGE_PAGE);
    let end = (table.addr() + len) & !(LARGE_PAGE - 1);
    if end > start {
        let at = table.with_addr(start).cast_mut().cast();
        // SAFETY: the advice changes neither what is mapped nor what is in it.
        unsafe { libc::madvise(at, end - start, libc::MADV_HUGEPAGE) };
    }
}

/// Asks the processor to fetch the cache line at `p`, which need not be valid.
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

/// Bytes above which a received frame is fetched before it is looked at.
const LONG: usize = PAGE;

const PAGE: usize = 4096;

/// Bytes of each page that are fetched.
const PAGE_START: usize = 4 * 64;

/// Asks for what a copy of a long frame from `p` will begin with, and for a little of each page
/// behind: the processor itself looks ahead within a page, once it has seen where the copy goes.
/// What is done before the copy takes as long as to fetch a part of it. A frame of up to [`LONG`]
/// bytes is left alone.
#[inline(always)]
pub(crate) fn prefetch_long(p: *const u8, len: usize) {
    if len > LONG {
        prefetch_pages(p, len);
    }
}

#[inline(never)]
fn prefetch_pages(p: *const u8, len: usize) {
    let ask = |at: usize, bytes: usize| {
        (0..bytes).step_by(64).for_each(|line| prefetch(p.wrapping_add(at + line)));
    };
    ask(0, PAGE / 2);
    let mut at = PAGE - p.addr() % PAGE;
    while at + PAGE_START <= len {
        ask(at, PAGE_START);
        at += PAGE;
    }
}

/// As [`prefetch`], and takes the line away from other processors, so that it can be written.
#[inline(always)]
pub(crate) fn prefetch_to_write(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint as well, which processors without it take for nothing to do.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) p, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}
