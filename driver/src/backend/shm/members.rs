//! A set of members as a two-level bitmap, like a doorbell: a bit per group, and a bit per member
//! in the group's word.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::layout::{GROUP, GROUPS_MAX, MEMBERS_MAX};

/// See the module. Emptiness is one load; the next member is found by two bit scans.
pub(super) struct MemberSet {
    /// A bit for each of `words` that is not 0.
    groups: u64,
    words: [u64; GROUPS_MAX],
}

/// The position of member `m`, modulo [`MEMBERS_MAX`], in a set or a doorbell: its group, and its
/// bit in the group's word.
#[inline(always)]
pub(super) const fn place_of(m: usize) -> (usize, u64) {
    (m / GROUP % GROUPS_MAX, 1 << (m % GROUP))
}

/// Rings a doorbell for the member at a position: sets its bit in the group's word, and the group's
/// bit in the summary word. Writes nothing if both are still set.
#[inline]
pub(super) fn ring(doorbell_group: &AtomicU64, bell: &AtomicU64, (group, bit): (usize, u64)) {
    if doorbell_group.load(Relaxed) & bit == 0 {
        // Release: the receiver that takes the bit sees the published frame. SeqCst: if the load
        // below finds the group's bit still set, the receiver that takes it takes this bit after
        // it.
        doorbell_group.fetch_or(bit, SeqCst);
    }
    if bell.load(SeqCst) & 1 << group == 0 {
        bell.fetch_or(1 << group, SeqCst);
    }
}

impl MemberSet {
    pub(super) const EMPTY: Self = Self { groups: 0, words: [0; GROUPS_MAX] };

    /// Not 0 if the set is not empty.
    #[inline(always)]
    pub(super) fn any(&self) -> u64 {
        self.groups
    }

    #[inline]
    pub(super) fn insert(&mut self, m: usize) {
        let (group, bit) = place_of(m);
        self.insert_all(group, bit);
    }

    /// Inserts the members of a group that have a bit in `bits`.
    #[inline]
    pub(super) fn insert_all(&mut self, group: usize, bits: u64) {
        let group = group % GROUPS_MAX;
        self.words[group] |= bits;
        self.groups |= u64::from(self.words[group] != 0) << group;
    }

    #[inline]
    pub(super) fn remove(&mut self, m: usize) {
        let (group, bit) = place_of(m);
        self.words[group] &= !bit;
        if self.words[group] == 0 {
            self.groups &= !(1 << group);
        }
    }

    /// The first member from `at` on.
    #[inline]
    pub(super) fn first_from(&self, at: usize) -> Option<usize> {
        if at >= MEMBERS_MAX {
            return None;
        }
        let group = at / GROUP;
        let here = self.words[group] & (u64::MAX << (at % GROUP));
        if here != 0 {
            return Some(group * GROUP + here.trailing_zeros() as usize);
        }
        let later = self.groups & (u64::MAX << 1 << group);
        if later == 0 {
            return None;
        }
        let group = later.trailing_zeros() as usize % GROUPS_MAX;
        Some(group * GROUP + self.words[group].trailing_zeros() as usize)
    }

    /// Removes the first member and returns it.
    pub(super) fn pop(&mut self) -> Option<usize> {
        let first = self.first_from(0);
        first.inspect(|&m| self.remove(m))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_set(ops in prop::collection::vec((0..4_u8, 0..MEMBERS_MAX), 1..200)) {
            let (mut set, mut model) = (MemberSet::EMPTY, BTreeSet::new());
            for (what, m) in ops {
                // Few, so that they meet.
                let m = m % 6 * 171 + m % 3;
                match what {
                    0 | 1 => {
                        set.insert(m);
                        model.insert(m);
                    }
                    2 => {
                        set.remove(m);
                        model.remove(&m);
                    }
                    _ => prop_assert_eq!(set.pop(), model.pop_first()),
                }
                prop_assert_eq!(set.any() != 0, !model.is_empty());
                for at in [0, m, m + 1, MEMBERS_MAX - 1, MEMBERS_MAX] {
                    prop_assert_eq!(set.first_from(at), model.range(at..).next().copied());
                }
            }
        }
    }
}
