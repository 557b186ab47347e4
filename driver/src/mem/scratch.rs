//! Private memory that operations can use like the application's.

use std::fmt;

use super::span::{IoBuf, Span};

/// Bytes on the heap, accessed like application memory: by bounds-checked copies.
pub struct Scratch {
    base: *mut [u8],
}

// SAFETY: it owns its bytes, and hands out no reference to them.
unsafe impl Send for Scratch {}

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scratch").field("len", &self.len()).finish()
    }
}

impl Scratch {
    /// `len` zero bytes, or `None` if there is no memory for them.
    pub fn new(len: usize) -> Option<Self> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).ok()?;
        bytes.resize(len, 0);
        Some(Self { base: Box::into_raw(bytes.into_boxed_slice()) })
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.base.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, lent to operations. The owner keeps the scratch until they have ended.
    pub fn io(&self) -> IoBuf {
        // SAFETY: the bytes are mapped, readable and writable as long as `self` lives, which its
        // owner sees to; no reference to them exists between `new` and `drop`.
        IoBuf::one(unsafe { Span::from_raw(self.base.cast(), self.len()) })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: `base` came from `Box::into_raw` and is given back once.
        drop(unsafe { Box::from_raw(self.base) });
    }
}
