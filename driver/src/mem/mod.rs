//! Memory of the application and of the fabric, reached only by bounded copies.

mod arena;
pub mod atomic;
mod copy;
mod scratch;
mod span;

pub use arena::{Arena, ArenaError, Block, Hugepages};
pub(crate) use copy::{SHORT, copy_four, copy_inline, copy_inline_32, copy_short};
pub use scratch::Scratch;
pub use span::{IOV_LIMIT, IoBuf, Span};

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
