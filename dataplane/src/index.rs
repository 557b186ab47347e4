//! A hash table of indices. It does not store keys: an index leads to its key, and the caller
//! compares.
//!
//! Four bytes a cell; the load is at most 7/8. A cell holds an index and, in the remaining bits, a
//! part of the key's hash, so that other keys are rarely compared. Open addressing with linear
//! probing; deletion moves later entries of the probe sequence back.
//!
//! (hashbrown's table marks deleted cells, and rehashes into a larger table when these and the
//! others fill it: an allocation at a moment that a peer chooses. This table is sized for the
//! largest number of indices and never rehashes.)

use std::marker::PhantomData;

use crate::idx::Idx;

/// Minimum number of cells of a table that has any.
const MIN: usize = 16;

/// The hash table. A hash is the caller's function of a key: its upper half yields the position,
/// its lower half the bits that the cell keeps.
#[derive(Debug, Default)]
pub(crate) struct Index<K> {
    /// Empty, or a power of two in number. 0 is an empty cell; otherwise the lowest bits are an
    /// index plus one and the others those of the hash.
    cells: Vec<u32>,
    len: usize,
    _of: PhantomData<fn() -> K>,
}

impl<K: Idx> Index<K> {
    /// An empty table for the indices below `n`. The memory of a large table is not touched before
    /// use.
    pub(crate) fn with_capacity(n: usize) -> Self {
        Self { cells: cells_for(n), len: 0, _of: PhantomData }
    }

    /// Indices in the table.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The index with this hash for whose key `is` returns true.
    #[inline]
    pub(crate) fn get(&self, hash: u64, is: impl Fn(K) -> bool) -> Option<K> {
        if self.len == 0 {
            return None;
        }
        let (cells, mask) = (&self.cells, self.cells.len() - 1);
        let mut at = self.home(hash);
        loop {
            let cell = cells[at];
            if cell == 0 {
                return None;
            }
            let idx = K::new((cell & mask as u32).wrapping_sub(1));
            if cell == self.cell(hash, idx) && is(idx) {
                return Some(idx);
            }
            at = (at + 1) & mask;
        }
    }

    /// Inserts `idx`, whose key is not in the table. `hash_of` returns the hashes of other indices.
    pub(crate) fn insert(&mut self, hash: u64, idx: K, hash_of: impl Fn(K) -> u64) {
        let needed = self.len.max(idx.get() as usize) + 1;
        if !fits(needed, self.cells.len()) {
            let old = std::mem::replace(&mut self.cells, cells_for(needed.max(2 * self.len)));
            let bits = old.len().wrapping_sub(1) as u32;
            for cell in old.into_iter().filter(|&cell| cell != 0) {
                let idx = K::new((cell & bits) - 1);
                self.put(hash_of(idx), idx);
            }
        }
        self.put(hash, idx);
        self.len += 1;
    }

    /// Removes `idx`, if it is in the table. `hash_of` returns the hashes of other indices.
    pub(crate) fn remove(&mut self, hash: u64, idx: K, hash_of: impl Fn(K) -> u64) {
        if !fits(idx.get() as usize + 1, self.cells.len()) {
            return;
        }
        let (mask, cell) = (self.cells.len() - 1, self.cell(hash, idx));
        let mut hole = self.home(hash);
        while self.cells[hole] != cell {
            if self.cells[hole] == 0 {
                return;
            }
            hole = (hole + 1) & mask;
        }
        self.len -= 1;
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let other = self.cells[at];
            if other == 0 {
                break;
            }
            let home = self.home(hash_of(K::new((other & mask as u32) - 1)));
            // A cell must not move back before its home position.
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(hole) & mask {
                self.cells[hole] = other;
                hole = at;
            }
        }
        self.cells[hole] = 0;
    }

    fn put(&mut self, hash: u64, idx: K) {
        let mask = self.cells.len() - 1;
        let mut at = self.home(hash);
        while self.cells[at] != 0 {
            at = (at + 1) & mask;
        }
        self.cells[at] = self.cell(hash, idx);
    }

    /// The cell of `idx`, which fits, with a key of this hash.
    fn cell(&self, hash: u64, idx: K) -> u32 {
        let mask = self.cells.len().wrapping_sub(1) as u32;
        hash as u32 & !mask | idx.get().wrapping_add(1) & mask
    }

    fn home(&self, hash: u64) -> usize {
        (hash >> (u64::BITS - self.cells.len().trailing_zeros())) as usize
    }
}

/// Whether `cells` have room for `count` indices, all of them below `count`.
const fn fits(count: usize, cells: usize) -> bool {
    count <= cells / 8 * 7
}

/// Empty cells for `count` indices.
fn cells_for(count: usize) -> Vec<u32> {
    // Allocated as zeroed memory: the pages are not written.
    vec![0; if count == 0 { 0 } else { (count * 8).div_ceil(7).next_power_of_two().max(MIN) }]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// A hash with few different values, so that keys collide.
    fn poor(key: u64) -> u64 {
        (key % 7).wrapping_mul(0x2492_4924_9249_2492)
    }

    proptest! {
        /// The table compared with a map. The key of an index is in a list.
        #[test]
        fn an_index_is_a_map(
            hint in 0usize..40,
            ops in prop::collection::vec((any::<bool>(), 0u64..60), 1..300),
        ) {
            let mut keys: Vec<u64> = Vec::new();
            let mut model: BTreeMap<u64, u32> = BTreeMap::new();
            let mut table = Index::<u32>::with_capacity(hint);
            for (put, key) in ops {
                let found = table.get(poor(key), |i| keys[i as usize] == key);
                prop_assert_eq!(found, model.get(&key).copied());
                match found {
                    None if put => {
                        let idx = keys.len() as u32;
                        keys.push(key);
                        table.insert(poor(key), idx, |i| poor(keys[i as usize]));
                        model.insert(key, idx);
                    }
                    Some(idx) if !put => {
                        // The key may be gone before the removal.
                        keys[idx as usize] = u64::MAX;
                        table.remove(poor(key), idx, |i| poor(keys[i as usize]));
                        model.remove(&key);
                    }
                    _ => {}
                }
                prop_assert_eq!(table.len(), model.len());
                for key in 0..60 {
                    let found = table.get(poor(key), |i| keys[i as usize] == key);
                    prop_assert_eq!(found, model.get(&key).copied());
                }
            }
        }
    }

    #[test]
    fn removing_an_absent_key_changes_nothing() {
        let mut table = Index::<u32>::with_capacity(0);
        table.remove(poor(1), 0, |_| 0);
        table.insert(poor(1), 3, |_| poor(1));
        table.remove(poor(1), 2, |_| poor(1));
        table.remove(poor(2), 3, |_| poor(1));
        table.remove(poor(1), u32::MAX - 1, |_| poor(1));
        assert_eq!((table.len(), table.get(poor(1), |_| true)), (1, Some(3)));
        assert_eq!(table.get(poor(1), |_| false), None);
    }

    /// Room for `n` suffices for `n`: no rehash.
    #[test]
    fn the_requested_capacity_suffices() {
        for n in [1, 14, 15, 4096, 100_000] {
            let mut table = Index::<u32>::with_capacity(n);
            let (at, cells) = (table.cells.as_ptr(), table.cells.len());
            let hash = |i: u32| u64::from(i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (0..n as u32).for_each(|i| table.insert(hash(i), i, hash));
            assert!((0..n as u32).all(|i| table.get(hash(i), |at| at == i) == Some(i)));
            assert_eq!((table.cells.as_ptr(), table.cells.len()), (at, cells));
        }
        assert_eq!(Index::<u32>::with_capacity(100_000).cells.len(), 1 << 17);
    }
}
