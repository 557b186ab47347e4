//! Tables for the hottest look-ups: endpoints, completion queues, peers, posted receives.
//!
//! A table is a [`Slab`](crate::slab::Slab) whose free slots hold a value as well:
//! [`Vacant::vacant`], which refuses every request. So a look-up by index or handle need not test
//! whether the slot is in use, and a freed value need not be moved out.

use std::marker::PhantomData;
use std::mem::offset_of;
use std::ops::{Index, IndexMut};

use barewire_driver::hint::cold;
use barewire_driver::mem::{prefer_large_pages, prefetch};

use crate::idx::Idx;
use crate::slab::{Handle, Line, NONE};

/// The value of a slot that is not in use.
pub trait Vacant {
    /// A value that refuses every request.
    fn vacant() -> Self;
}

/// A table of at most `capacity` values, each named by the index `K` of its slot. A slot that was
/// never used takes address space only. Slots have the alignment of `A`, like those of a
/// [`Slab`](crate::slab::Slab).
#[derive(Debug)]
pub struct Table<T, A = (), K = u32> {
    slots: Vec<Slot<T, A>>,
    capacity: usize,
    free_head: u32,
    _named_by: PhantomData<fn() -> K>,
}

/// The generation is odd while the slot is in use.
#[derive(Debug)]
#[repr(C)]
struct Slot<T, A> {
    generation: u32,
    /// Next free slot, if this slot is free.
    next: u32,
    value: T,
    _aligned: [A; 0],
}

impl<T, A> Slot<T, A> {
    #[inline(always)]
    fn is_used(&self) -> bool {
        self.generation & 1 != 0
    }
}

impl<T: Vacant, K: Idx> Table<T, (), K> {
    /// An empty table.
    ///
    /// # Panics
    /// If `n` does not fit an index, or address space is exhausted.
    pub fn with_capacity(n: usize) -> Self {
        Self::reserve(n)
    }

    /// [`with_capacity`](Self::with_capacity) for `n` values beside slot 0, which stays vacant:
    /// index zero then names a vacant slot.
    pub fn with_vacant_zero(n: usize) -> Self {
        let mut table = Self::reserve(n + 1);
        table.grow();
        table
    }
}

impl<T: Vacant, K: Idx> Table<T, Line, K> {
    /// [`with_capacity`](Table::with_capacity) on large pages where the kernel has them, with slots
    /// aligned to cache lines. For a long table with random access; a sparse table would waste most
    /// of each large page.
    pub fn with_large_pages(n: usize) -> Self {
        let table = Self::reserve(n);
        prefer_large_pages(table.slots.as_ptr().cast(), n * Self::SLOT_LEN);
        table
    }

    /// Enlarges the table to `n` slots and moves its values. False, without side effect, if there
    /// is no memory.
    pub fn enlarge(&mut self, n: usize) -> bool {
        let mut slots: Vec<Slot<T, Line>> = Vec::new();
        if n >= NONE as usize || slots.try_reserve_exact(n.max(self.capacity)).is_err() {
            return false;
        }
        if n > self.capacity {
            prefer_large_pages(slots.as_ptr().cast(), n * Self::SLOT_LEN);
            slots.append(&mut self.slots);
            (self.slots, self.capacity) = (slots, n);
        }
        true
    }
}

impl<T: Vacant, A, K: Idx> Table<T, A, K> {
    /// Size of a slot, bytes.
    pub const SLOT_LEN: usize = size_of::<Slot<T, A>>();

    /// Bytes of a slot before the value.
    pub const HEAD_LEN: usize = offset_of!(Slot<T, A>, value);

    fn reserve(n: usize) -> Self {
        assert!(n < NONE as usize, "table: {n} slots do not fit an index");
        let slots = Vec::with_capacity(n);
        Self { slots, capacity: n, free_head: NONE, _named_by: PhantomData }
    }

    /// Stores `value` in a free slot; `None`, and `value` dropped, if there is none. Never
    /// allocates memory.
    pub fn alloc(&mut self, value: T) -> Option<K> {
        self.alloc_named(value).map(Handle::idx)
    }

    /// [`alloc`](Self::alloc), inlined, that returns the value's handle.
    #[inline(always)]
    pub fn alloc_named(&mut self, value: T) -> Option<Handle<K>> {
        let mut idx = self.free_head;
        let slot = match self.slots.get_mut(idx.get() as usize) {
            Some(slot) => slot,
            None => {
                // `grow` does not take the value, which could otherwise not stay in registers.
                idx = cold(self.grow())?;
                self.slots.get_mut(idx.get() as usize)?
            }
        };
        debug_assert!(!slot.is_used());
        let generation = slot.generation.wrapping_add(1);
        (slot.generation, slot.value) = (generation, value);
        self.free_head = slot.next;
        Some(Handle { idx: K::new(idx), generation })
    }

    /// Adds a never used slot to the free list, if that is empty and the table is not full.
    #[cold]
    #[inline(never)]
    fn grow(&mut self) -> Option<u32> {
        if self.slots.len() == self.capacity {
            return None;
        }
        let idx = self.slots.len() as u32;
        self.slots.push(Slot { generation: 0, next: NONE, value: T::vacant(), _aligned: [] });
        Some(idx)
    }

    /// Ensures that a free slot exists, by adding a never used one to the free list if that is
    /// empty. [`alloc_again`](Self::alloc_again) needs this until each slot was used once.
    #[inline]
    pub fn make_free(&mut self) {
        if self.free_head == NONE
            && let Some(idx) = self.grow()
        {
            self.free_head = idx;
        }
    }

    /// Allocates a free slot with the value that it still holds. `None` if no slot is free.
    #[inline(always)]
    pub fn alloc_again(&mut self) -> Option<(K, &mut T)> {
        let idx = self.free_head;
        let Some(slot) = self.slots.get_mut(idx.get() as usize) else { return cold(None) };
        debug_assert!(!slot.is_used());
        slot.generation = slot.generation.wrapping_add(1);
        self.free_head = slot.next;
        Some((K::new(idx), &mut slot.value))
    }

    /// Frees a slot and returns its value.
    ///
    /// # Panics
    /// If the slot is not in use.
    pub fn free(&mut self, idx: K) -> T {
        let slot = &mut self.slots[idx.get() as usize];
        assert!(slot.is_used(), "table: slot {} is not in use", idx.get());
        (slot.generation, slot.next) = (slot.generation.wrapping_add(1), self.free_head);
        self.free_head = idx.get();
        std::mem::replace(&mut slot.value, T::vacant())
    }
}

impl<T, A, K: Idx> Table<T, A, K> {
    /// [`free`](Self::free) that leaves the value in the slot: for callers that made it vacant, or
    /// that never access free slots with [`at_mut`](Self::at_mut).
    ///
    /// # Panics
    /// If the slot does not exist.
    #[inline(always)]
    pub fn discard(&mut self, idx: K) -> &mut T {
        let slot = &mut self.slots[idx.get() as usize];
        debug_assert!(slot.is_used());
        (slot.generation, slot.next) = (slot.generation.wrapping_add(1), self.free_head);
        self.free_head = idx.get();
        &mut slot.value
    }

    /// The value of a slot, `None` if the slot is not in use.
    #[inline(always)]
    pub fn get(&self, idx: K) -> Option<&T> {
        match self.slots.get(idx.get() as usize) {
            Some(slot) if slot.is_used() => Some(&slot.value),
            _ => cold(None),
        }
    }

    /// [`get`](Self::get), mutable.
    #[inline(always)]
    pub fn get_mut(&mut self, idx: K) -> Option<&mut T> {
        match self.slots.get_mut(idx.get() as usize) {
            Some(slot) if slot.is_used() => Some(&mut slot.value),
            _ => cold(None),
        }
    }

    /// The value of a slot, in use or not; `None` if the slot was never used.
    #[inline(always)]
    pub fn at(&self, idx: K) -> Option<&T> {
        match self.slots.get(idx.get() as usize) {
            Some(slot) => Some(&slot.value),
            None => cold(None),
        }
    }

    /// [`at`](Self::at), mutable.
    #[inline(always)]
    pub fn at_mut(&mut self, idx: K) -> Option<&mut T> {
        match self.slots.get_mut(idx.get() as usize) {
            Some(slot) => Some(&mut slot.value),
            None => cold(None),
        }
    }

    /// Prefetches the lines of the first `bytes` of a slot, in use or not, counted from the start
    /// of the slot. Reads nothing, so that prefetches of several slots overlap.
    #[inline]
    pub fn prefetch(&self, idx: K, bytes: usize) {
        const { assert!(align_of::<A>() >= align_of::<Line>(), "else there may be one more") };
        let Some(slot) = self.slots.get(idx.get() as usize) else { return };
        let at = std::ptr::from_ref(slot).cast::<u8>();
        for line in (0..bytes).step_by(64) {
            prefetch(at.wrapping_add(line));
        }
    }

    /// Whether every slot is in use.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.free_head == NONE && self.slots.len() == self.capacity
    }

    /// Number of slots.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Number of slots ever used: above every index in use.
    pub fn slots(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Slots in use. Visits every slot ever used.
    pub fn count(&self) -> usize {
        self.iter().count()
    }

    /// The handle of the slot's current allocation; one that names no value if the slot is free.
    pub fn handle(&self, idx: K) -> Handle<K> {
        let used = self.slots.get(idx.get() as usize).filter(|slot| slot.is_used());
        Handle { idx, generation: used.map_or(0, |slot| slot.generation) }
    }

    /// The value that `handle` names, `None` if its slot was freed since.
    #[inline(always)]
    pub fn by_handle(&self, handle: Handle<K>) -> Option<&T> {
        match self.slots.get(handle.idx.get() as usize) {
            Some(slot) if slot.generation == handle.generation => Some(&slot.value),
            _ => cold(None),
        }
    }

    /// [`by_handle`](Self::by_handle), mutable.
    #[inline(always)]
    pub fn by_handle_mut(&mut self, handle: Handle<K>) -> Option<&mut T> {
        match self.slots.get_mut(handle.idx.get() as usize) {
            Some(slot) if slot.generation == handle.generation => Some(&mut slot.value),
            _ => cold(None),
        }
    }

    /// The used slots in ascending order. Visits every slot ever used.
    pub fn iter(&self) -> impl Iterator<Item = (K, &T)> {
        let used = self.slots.iter().enumerate().filter(|(_, slot)| slot.is_used());
        used.map(|(i, slot)| (K::new(i as u32), &slot.value))
    }

    /// [`iter`](Self::iter), mutable.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (K, &mut T)> {
        let used = self.slots.iter_mut().enumerate().filter(|(_, slot)| slot.is_used());
        used.map(|(i, slot)| (K::new(i as u32), &mut slot.value))
    }
}

impl<T, A, K: Idx> Index<K> for Table<T, A, K> {
    type Output = T;

    #[inline(always)]
    fn index(&self, idx: K) -> &T {
        let slot = &self.slots[idx.get() as usize];
        if !slot.is_used() {
            not_used(idx.get());
        }
        &slot.value
    }
}

impl<T, A, K: Idx> IndexMut<K> for Table<T, A, K> {
    #[inline(always)]
    fn index_mut(&mut self, idx: K) -> &mut T {
        let slot = &mut self.slots[idx.get() as usize];
        if !slot.is_used() {
            not_used(idx.get());
        }
        &mut slot.value
    }
}

#[cold]
#[inline(never)]
fn not_used(idx: u32) -> ! {
    panic!("table: slot {idx} is not in use")
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    impl Vacant for usize {
        fn vacant() -> Self {
            Self::MAX
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Op {
        Alloc,
        Free(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![5 => Just(Op::Alloc), 4 => any::<usize>().prop_map(Op::Free)]
    }

    proptest! {
        /// A table compared with a map: same values at the same indices, full at capacity, the last
        /// freed slot first, vacant values in all free slots, and handles valid exactly as long as
        /// their values.
        #[test]
        fn table_is_a_bounded_map(
            capacity in 0usize..12,
            ops in prop::collection::vec(op(), 1..300),
        ) {
            let mut table: Table<_> = Table::with_capacity(capacity);
            let room = table.slots.as_ptr();
            let (mut model, mut freed) = (BTreeMap::new(), Vec::new());
            let mut dead: BTreeSet<(u32, u32)> = BTreeSet::new();
            for (n, op) in ops.into_iter().enumerate() {
                match op {
                    Op::Alloc => {
                        let made = if n % 3 == 0 { table.alloc_named(n) } else { None };
                        let idx = match n % 3 {
                            0 => made.map(Handle::idx),
                            1 => table.alloc(n),
                            _ => {
                                table.make_free();
                                table.alloc_again().map(|(idx, value)| {
                                    *value = n;
                                    idx
                                })
                            }
                        };
                        let Some(idx) = idx else {
                            prop_assert_eq!(model.len(), capacity);
                            continue;
                        };
                        prop_assert!(made.is_none_or(|made| made == table.handle(idx)));
                        prop_assert_eq!(idx, freed.pop().unwrap_or(model.len() as u32));
                        prop_assert!(model.insert(idx, n).is_none());
                        prop_assert_eq!(table.by_handle(table.handle(idx)), Some(&n));
                    }
                    Op::Free(nth) if !model.is_empty() => {
                        let idx = *model.keys().nth(nth % model.len()).unwrap();
                        let handle = table.handle(idx);
                        prop_assert!(dead.insert((handle.idx(), handle.generation())));
                        let was = model.remove(&idx).unwrap();
                        if nth % 2 == 0 {
                            prop_assert_eq!(table.free(idx), was);
                        } else {
                            prop_assert_eq!(table.discard(idx), &was);
                            prop_assert_eq!(table.at_mut(idx), Some(&mut { was }));
                            // The value that the test expects of a vacant slot.
                            *table.at_mut(idx).unwrap() = usize::MAX;
                        }
                        freed.push(idx);
                    }
                    Op::Free(_) => {}
                }
                for &(idx, generation) in &dead {
                    let handle = Handle::from_parts(idx, generation);
                    prop_assert_eq!(table.by_handle(handle), None);
                    prop_assert_eq!(table.by_handle_mut(handle), None);
                }
                prop_assert_eq!(table.is_full(), model.len() == capacity);
                prop_assert_eq!((table.count(), table.capacity()), (model.len(), capacity));
                for idx in 0..table.slots.len() as u32 {
                    let want = model.get(&idx);
                    prop_assert_eq!(table.get(idx), want);
                    prop_assert_eq!(table.at(idx), Some(want.unwrap_or(&usize::MAX)));
                    prop_assert_eq!(table.at_mut(idx), Some(&mut want.map_or(usize::MAX, |n| *n)));
                    prop_assert_eq!(table.get_mut(idx).is_some(), want.is_some());
                    prop_assert_eq!(table.by_handle(table.handle(idx)), want);
                }
                let want: Vec<_> = model.iter().map(|(i, v)| (*i, v)).collect();
                prop_assert_eq!(table.iter().collect::<Vec<_>>(), want);
                prop_assert_eq!(table.iter_mut().count(), model.len());
            }
            prop_assert_eq!(table.slots.as_ptr(), room, "it allocated after it was made");
        }
    }

    #[test]
    #[should_panic(expected = "not in use")]
    fn freeing_twice_panics() {
        let mut table: Table<_> = Table::with_capacity(2);
        let idx = table.alloc(7_usize).unwrap();
        table.free(idx);
        table.free(idx);
    }

    #[test]
    #[should_panic(expected = "not in use")]
    fn indexing_a_free_slot_panics() {
        let mut table: Table<_> = Table::with_capacity(2);
        let idx = table.alloc(7_usize).unwrap();
        table.free(idx);
        let _ = table[idx];
    }

    #[test]
    fn a_handle_of_zeros_names_nothing() {
        let mut table: Table<_> = Table::with_capacity(1);
        table.alloc(7_usize).unwrap();
        assert_eq!(table.by_handle(Handle::from_parts(0, 0)), None);
    }
}
