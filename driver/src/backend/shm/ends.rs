//! The ends of one member's rings, with a cached pointer to the current one.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// A fixed slice of ring ends. The current one is reached by a pointer, without the bounds check
/// and multiplication of an index for each frame.
pub(super) struct RingEnds<T> {
    /// From `Box::leak`, and freed in `drop`. All references are made from this pointer, none is
    /// kept.
    all: NonNull<[T]>,
    /// One of `all`.
    current: NonNull<T>,
}

impl<T> RingEnds<T> {
    /// Takes `ends`; the first is the current one.
    ///
    /// # Panics
    /// If there is none.
    pub(super) fn new(ends: impl Iterator<Item = T>) -> Self {
        let all: Box<[T]> = ends.collect();
        assert!(!all.is_empty());
        let all = NonNull::from(Box::leak(all));
        Self { all, current: all.cast() }
    }

    /// The end that [`set_current`](Self::set_current) chose last.
    #[inline(always)]
    pub(super) fn current(&mut self) -> &mut T {
        // SAFETY: one of `all`, which live as long as `self`; the only reference to any of them
        // for as long as `self` is borrowed.
        unsafe { self.current.as_mut() }
    }

    /// Makes end `i` the current one.
    ///
    /// # Panics
    /// If there is none of that number.
    #[inline]
    pub(super) fn set_current(&mut self, i: usize) {
        assert!(i < self.all.len());
        // SAFETY: inside the slice, by the line above.
        self.current = unsafe { self.all.cast::<T>().add(i) };
    }
}

impl<T> Deref for RingEnds<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: as in `current`, but shared.
        unsafe { self.all.as_ref() }
    }
}

impl<T> DerefMut for RingEnds<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `current`.
        unsafe { self.all.as_mut() }
    }
}

impl<T> Drop for RingEnds<T> {
    fn drop(&mut self) {
        // SAFETY: from `Box::leak` in `new`; nobody uses it after this.
        drop(unsafe { Box::from_raw(self.all.as_ptr()) });
    }
}

#[cfg(test)]
mod tests {
    use super::RingEnds;

    #[test]
    fn the_current_end_is_one_of_all() {
        let mut ends = RingEnds::new((0..3).map(|i| vec![i]));
        ends.current().push(10);
        ends.set_current(2);
        ends.current().push(12);
        ends[2].push(22);
        ends.current().push(32);
        assert_eq!(*ends, [vec![0, 10], vec![1], vec![2, 12, 22, 32]]);
        assert_eq!(ends.iter().map(Vec::len).sum::<usize>(), 7);
    }
}
