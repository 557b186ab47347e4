//! Memory of a ring of 16-byte descriptors, each of two 64-bit words.

use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// Bytes of a descriptor.
pub const DESC_LEN: usize = 16;

/// The memory of a ring, shared with the device.
pub struct DescRing {
    base: NonNull<u8>,
    mask: u32,
}

// SAFETY: the words are atomic, and the ring is reached under its owner's borrow, whichever thread
// that is on.
unsafe impl Send for DescRing {}

impl DescRing {
    /// The ring of `count` descriptors at `base`.
    ///
    /// # Safety
    /// `count * 16` bytes at `base` are mapped, and reached by nobody but the two ends of this ring
    /// for as long as it lives.
    ///
    /// # Panics
    /// If `count` is no power of two from 8 to 4096, or `base` is not aligned to 128.
    pub unsafe fn new(base: NonNull<u8>, count: u32) -> Self {
        assert!(count.is_power_of_two() && (8..=4096).contains(&count));
        assert!((base.as_ptr() as usize).is_multiple_of(128));
        Self { base, mask: count - 1 }
    }

    /// Number of descriptors minus one.
    #[inline(always)]
    pub fn mask(&self) -> u32 {
        self.mask
    }

    /// Word `half` (0 or 1) of descriptor `i` modulo the ring's length.
    #[inline(always)]
    pub fn half(&self, i: u32, half: usize) -> &AtomicU64 {
        debug_assert!(half < 2);
        let at = (i & self.mask) as usize * DESC_LEN + 8 * (half & 1);
        // SAFETY: `i` is masked, so `at` lies in the ring, which is mapped for our life, is aligned
        // and may be shared with the device (`new`).
        unsafe { self.base.add(at).cast::<AtomicU64>().as_ref() }
    }
}

/// A completed receive descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Index of the descriptor and of its buffer.
    pub id: u32,
    /// Length written by the device; not validated.
    pub len: u16,
    /// The frame is complete and without error.
    pub is_good: bool,
}
