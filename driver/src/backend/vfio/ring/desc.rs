//! Rings of 16-byte descriptors, two words of 64 bits each: the memory alone, without a meaning.

use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// Bytes of a descriptor.
pub const DESC_LEN: usize = 16;

/// The memory of a ring, shared with the device.
pub struct Descs {
    base: NonNull<u8>,
    mask: u32,
}

// SAFETY: the words are atomic, and the ring is reached under its owner's borrow, whichever thread
// that is on.
unsafe impl Send for Descs {}

impl Descs {
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

    /// One less than there are.
    #[inline(always)]
    pub fn mask(&self) -> u32 {
        self.mask
    }

    /// Half `half` (0 or 1) of descriptor `i`, of which the low bits count.
    #[inline(always)]
    pub fn half(&self, i: u32, half: usize) -> &AtomicU64 {
        debug_assert!(half < 2);
        let at = (i & self.mask) as usize * DESC_LEN + 8 * (half & 1);
        // SAFETY: `i` is masked, so `at` lies in the ring, which is mapped for our life, is aligned
        // and may be shared with the device (`new`).
        unsafe { self.base.add(at).cast::<AtomicU64>().as_ref() }
    }
}

/// What a receive descriptor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Its number, which is its buffer's.
    pub id: u32,
    /// Bytes that the device says it wrote.
    pub len: u16,
    /// The frame is whole and has no error.
    pub is_good: bool,
}
