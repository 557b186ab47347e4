//! The ends of one member's rings, one of which is at hand.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Ends whose number and places do not change. The usual one is reached without its number, which
/// would be compared and multiplied with each frame.
pub(super) struct Ends<T> {
    /// From `Box::leak`, and freed in `drop`. All references are made from this pointer, none is
    /// kept.
    all: NonNull<[T]>,
    /// One of `all`.
    usual: NonNull<T>,
}

impl<T> Ends<T> {
    /// Takes `ends`, of which the first is the usual one.
    ///
    /// # Panics
    /// If there is none.
    pub(super) fn new(ends: impl Iterator<Item = T>) -> Self {
        let all: Box<[T]> = ends.collect();
        assert!(!all.is_empty());
        let all = NonNull::from(Box::leak(all));
        Self { all, usual: all.cast() }
    }

    /// The one that [`set_usual`](Self::set_usual) was told of last.
    #[inline(always)]
    pub(super) fn usual(&mut self) -> &mut T {
        // SAFETY: one of `all`, which live as long as `self`; the only reference to any of them
        // for as long as `self` is borrowed.
        unsafe { self.usual.as_mut() }
    }

    /// Makes end `i` the usual one.
    ///
    /// # Panics
    /// If there is none of that number.
    #[inline]
    pub(super) fn set_usual(&mut self, i: usize) {
        assert!(i < self.all.len());
        // SAFETY: inside the slice, by the line above.
        self.usual = unsafe { self.all.cast::<T>().add(i) };
    }
}

impl<T> Deref for Ends<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: as in `usual`, but shared.
        unsafe { self.all.as_ref() }
    }
}

impl<T> DerefMut for Ends<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `usual`.
        unsafe { self.all.as_mut() }
    }
}

impl<T> Drop for Ends<T> {
    fn drop(&mut self) {
        // SAFETY: from `Box::leak` in `new`; nobody uses it after this.
        drop(unsafe { Box::from_raw(self.all.as_ptr()) });
    }
}

#[cfg(test)]
mod tests {
    use super::Ends;

    #[test]
    fn the_usual_end_is_one_of_all() {
        let mut ends = Ends::new((0..3).map(|i| vec![i]));
        ends.usual().push(10);
        ends.set_usual(2);
        ends.usual().push(12);
        ends[2].push(22);
        ends.usual().push(32);
        assert_eq!(*ends, [vec![0, 10], vec![1], vec![2, 12, 22, 32]]);
        assert_eq!(ends.iter().map(Vec::len).sum::<usize>(), 7);
    }
}
