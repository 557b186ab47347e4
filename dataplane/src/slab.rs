//! Slabs: tables of fixed capacity, and lists threaded through their slots.
//!
//! A slab reserves address space for all its slots when it is created and touches a slot's memory
//! at the slot's first use, so a large table of a small node costs address space only. Slots are
//! named by index; a holder that may keep an index beyond a free keeps a [`Handle`] instead.
//!
//! An index of a slot that is not in use is a bug of this crate and panics in every build: it would
//! lead to the state of another operation.

use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

use barewire_driver::hint::cold;
use barewire_driver::mem::prefetch;

use crate::idx::Idx;
pub use crate::idx::NONE;

/// The index of a slot with its generation: names one allocation of the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle<K = u32> {
    pub(crate) idx: K,
    pub(crate) generation: u32,
}

impl<K: Copy> Handle<K> {
    /// Reassembles a handle from its [`idx`](Self::idx) and [`generation`](Self::generation). Parts
    /// that do not come from a handle name no value.
    pub const fn from_parts(idx: K, generation: u32) -> Self {
        Self { idx, generation }
    }

    /// Index of the slot.
    pub const fn idx(self) -> K {
        self.idx
    }

    /// Generation of the slot. Starts at 1, so a handle of two zeros names no value.
    pub const fn generation(self) -> u32 {
        self.generation
    }
}

/// A table of at most `capacity` values, each named by the index `K` of its slot.
///
/// The slot freed last is allocated first, while its memory is still in the cache. Slots have the
/// alignment of `A`: [`Line`] where it matters which fields of a value share a cache line.
#[derive(Debug)]
pub struct Slab<T, A = (), K = u32> {
    slots: Vec<Slot<T, A>>,
    capacity: usize,
    free_head: u32,
    len: u32,
    _named_by: PhantomData<fn() -> K>,
}

/// Both variants contain the generation, which shares a word with the tag. So the compiler does not
/// encode the tag in a niche of `T`, whose comparison would occupy a register.
///
/// The aligning member follows the value: before it, its padding would be wasted.
#[derive(Debug)]
#[repr(u32)]
enum Slot<T, A> {
    Free { generation: u32, next: u32 },
    Used { generation: u32, value: T, _aligned: [A; 0] },
}

impl<T, A> Slot<T, A> {
    #[inline(always)]
    const fn used(generation: u32, value: T) -> Self {
        Self::Used { generation, value, _aligned: [] }
    }
}

/// Alignment to a cache line.
#[derive(Debug)]
#[repr(align(64))]
pub struct Line;

impl<T, K: Idx> Slab<T, (), K> {
    /// An empty slab. Reserves room for `n` values and touches none of it.
    ///
    /// # Panics
    /// If `n` does not fit an index, or address space is exhausted.
    pub fn with_capacity(n: usize) -> Self {
        Self::reserve(n)
    }
}

impl<T, K: Idx> Slab<T, Line, K> {
    /// [`with_capacity`](Slab::with_capacity) with slots aligned to cache lines.
    pub fn with_lines(n: usize) -> Self {
        Self::reserve(n)
    }
}

impl<T, A, K: Idx> Slab<T, A, K> {
    /// Size of a slot, bytes.
    pub const SLOT_LEN: usize = size_of::<Slot<T, A>>();

    /// Bytes of a slot before the value: the tag and the generation.
    pub const HEAD_LEN: usize = if align_of::<T>() > 8 { align_of::<T>() } else { 8 };

    fn reserve(n: usize) -> Self {
        assert!(n < NONE as usize, "slab: {n} slots do not fit an index");
        let slots = Vec::with_capacity(n);
        Self { slots, capacity: n, free_head: NONE, len: 0, _named_by: PhantomData }
    }

    /// Stores `value` in a free slot; `None`, and `value` dropped, if there is none. Never
    /// allocates memory.
    #[inline]
    pub fn alloc(&mut self, value: T) -> Option<K> {
        self.vacant().map(|_| self.fill(value))
    }

    /// The slot that the next [`fill`](Self::fill) uses, `None` if the slab is full. For callers
    /// that keep the value in that case.
    #[inline]
    pub fn vacant(&mut self) -> Option<K> {
        if self.free_head == NONE && !self.grow() {
            return None;
        }
        Some(K::new(self.free_head))
    }

    /// Stores `value` in the slot that [`vacant`](Self::vacant) has just returned.
    ///
    /// # Panics
    /// If no slot is free.
    #[inline]
    pub fn fill(&mut self, value: T) -> K {
        let idx = self.free_head;
        let slot = &mut self.slots[idx.get() as usize];
        let Slot::Free { generation, next } = *slot else { free_list_corrupt() };
        *slot = Slot::used(generation.wrapping_add(1), value);
        self.free_head = next;
        self.len += 1;
        K::new(idx)
    }

    /// Stores the value of `make`, which is given the index, in a free slot. `None`, and `make` not
    /// called, if there is none. Never allocates memory.
    #[inline(always)]
    pub fn alloc_with(&mut self, make: impl FnOnce(K) -> T) -> Option<K> {
        // `grow` does not take `make`, so that the value is constructed in its slot.
        if self.free_head == NONE && !self.grow() {
            return cold(None);
        }
        let idx = self.free_head;
        let Some(slot) = self.slots.get_mut(idx.get() as usize) else {
            return cold(None);
        };
        let Slot::Free { generation, next } = *slot else { free_list_corrupt() };
        *slot = Slot::used(generation.wrapping_add(1), make(K::new(idx)));
        self.free_head = next;
        self.len += 1;
        Some(K::new(idx))
    }

    /// Prefetches the slot that will be allocated next, for callers with other work until then.
    #[inline(always)]
    pub fn prefetch_free(&self) {
        self.prefetch(K::new(self.free_head), Self::SLOT_LEN);
    }

    /// Adds the next never used slot to the free list. Within the capacity of the vector, so it
    /// does not allocate memory.
    #[cold]
    #[inline(never)]
    fn grow(&mut self) -> bool {
        if self.slots.len() == self.capacity {
            return false;
        }
        self.free_head = self.slots.len() as u32;
        self.slots.push(Slot::Free { generation: 0, next: NONE });
        true
    }

    /// Frees a slot and returns its value.
    ///
    /// # Panics
    /// If the slot is not in use.
    #[inline]
    pub fn free(&mut self, idx: K) -> T {
        let slot = &mut self.slots[idx.get() as usize];
        let generation = match *slot {
            Slot::Used { generation, .. } => generation,
            Slot::Free { .. } => not_used(idx.get()),
        };
        let old = std::mem::replace(slot, Slot::Free { generation, next: self.free_head });
        self.free_head = idx.get();
        self.len -= 1;
        match old {
            Slot::Used { value, .. } => value,
            Slot::Free { .. } => not_used(idx.get()),
        }
    }

    /// [`free`](Self::free) that drops the value in place.
    ///
    /// # Panics
    /// If the slot is not in use.
    #[inline(always)]
    pub fn discard(&mut self, idx: K) {
        let slot = &mut self.slots[idx.get() as usize];
        let Slot::Used { generation, .. } = *slot else { not_used(idx.get()) };
        *slot = Slot::Free { generation, next: self.free_head };
        self.free_head = idx.get();
        self.len -= 1;
    }

    /// The value of a slot, `None` if the slot is not in use.
    #[inline(always)]
    pub fn get(&self, idx: K) -> Option<&T> {
        match self.slots.get(idx.get() as usize) {
            Some(Slot::Used { value, .. }) => Some(value),
            _ => cold(None),
        }
    }

    /// [`get`](Self::get), mutable.
    #[inline(always)]
    pub fn get_mut(&mut self, idx: K) -> Option<&mut T> {
        match self.slots.get_mut(idx.get() as usize) {
            Some(Slot::Used { value, .. }) => Some(value),
            _ => cold(None),
        }
    }

    /// Prefetches the lines of the first `bytes` of a slot, in use or not, counted from the start
    /// of the slot. Reads nothing, so that prefetches of several slots overlap.
    #[inline]
    pub fn prefetch(&self, idx: K, bytes: usize) {
        let Some(slot) = self.slots.get(idx.get() as usize) else { return };
        let at = std::ptr::from_ref(slot).cast::<u8>();
        for line in (0..bytes).step_by(64) {
            prefetch(at.wrapping_add(line));
        }
        if align_of::<A>() < align_of::<Line>() {
            prefetch(at.wrapping_add(bytes - 1));
        }
    }

    /// Allocations of the slot so far, the current one included; 0 for a slot that was never used.
    /// Wraps.
    pub fn generation(&self, idx: K) -> u32 {
        match self.slots.get(idx.get() as usize) {
            Some(Slot::Used { generation, .. } | Slot::Free { generation, .. }) => *generation,
            None => 0,
        }
    }

    /// As if every free slot had been used 2^32 - 1 times.
    #[cfg(test)]
    pub(crate) fn exhaust_generations(&mut self) {
        for slot in &mut self.slots {
            if let Slot::Free { generation, .. } = slot {
                *generation = u32::MAX;
            }
        }
    }

    /// The handle of the slot's current allocation.
    pub fn handle(&self, idx: K) -> Handle<K> {
        Handle { idx, generation: self.generation(idx) }
    }

    /// The value that `handle` names, `None` if its slot was freed since.
    #[inline(always)]
    pub fn by_handle(&self, handle: Handle<K>) -> Option<&T> {
        match self.slots.get(handle.idx.get() as usize) {
            Some(Slot::Used { generation, value, .. }) if *generation == handle.generation => {
                Some(value)
            }
            _ => cold(None),
        }
    }

    /// [`by_handle`](Self::by_handle), mutable.
    #[inline(always)]
    pub fn by_handle_mut(&mut self, handle: Handle<K>) -> Option<&mut T> {
        match self.slots.get_mut(handle.idx.get() as usize) {
            Some(Slot::Used { generation, value, .. }) if *generation == handle.generation => {
                Some(value)
            }
            _ => cold(None),
        }
    }

    /// Slots in use.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether no slot is in use.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether every slot is in use.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.free_head == NONE && self.slots.len() == self.capacity
    }

    /// Raises the capacity to `n`. Allocates, and moves the values; their indices stay.
    ///
    /// # Panics
    /// As [`with_capacity`](Slab::with_capacity).
    pub fn raise_capacity(&mut self, n: usize) {
        assert!(n < NONE as usize, "slab: {n} slots do not fit an index");
        self.slots.reserve_exact(n.saturating_sub(self.slots.len()));
        self.capacity = self.capacity.max(n);
    }

    /// Number of slots.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Slots not in use.
    pub fn free_count(&self) -> usize {
        self.capacity - self.len()
    }

    /// The used slots in ascending order. Visits every slot ever used.
    pub fn iter(&self) -> impl Iterator<Item = (K, &T)> {
        self.slots.iter().enumerate().filter_map(|(i, slot)| match slot {
            Slot::Used { value, .. } => Some((K::new(i as u32), value)),
            Slot::Free { .. } => None,
        })
    }

    /// [`iter`](Self::iter), mutable.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (K, &mut T)> {
        self.slots.iter_mut().enumerate().filter_map(|(i, slot)| match slot {
            Slot::Used { value, .. } => Some((K::new(i as u32), value)),
            Slot::Free { .. } => None,
        })
    }
}

impl<T, A, K: Idx> Index<K> for Slab<T, A, K> {
    type Output = T;

    #[inline(always)]
    fn index(&self, idx: K) -> &T {
        match &self.slots[idx.get() as usize] {
            Slot::Used { value, .. } => value,
            Slot::Free { .. } => not_used(idx.get()),
        }
    }
}

impl<T, A, K: Idx> IndexMut<K> for Slab<T, A, K> {
    #[inline(always)]
    fn index_mut(&mut self, idx: K) -> &mut T {
        match &mut self.slots[idx.get() as usize] {
            Slot::Used { value, .. } => value,
            Slot::Free { .. } => not_used(idx.get()),
        }
    }
}

#[cold]
#[inline(never)]
fn free_list_corrupt() -> ! {
    panic!("slab: no free slot where the free list says")
}

#[cold]
#[inline(never)]
fn not_used(idx: u32) -> ! {
    panic!("slab: slot {idx} is not in use")
}

/// The links of an entry in one list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link<K = u32> {
    /// Previous entry, or [`NONE`](Idx::NONE).
    pub prev: K,
    /// Next entry, or [`NONE`](Idx::NONE).
    pub next: K,
}

impl<K: Idx> Default for Link<K> {
    fn default() -> Self {
        Self { prev: K::NONE, next: K::NONE }
    }
}

/// An entry that can be in list number `LIST` of its slab. One that can be in two lists at once
/// implements the trait twice.
pub trait Linked<const LIST: usize, K = u32> {
    /// The links, mutable.
    fn link(&mut self) -> &mut Link<K>;
    /// The links.
    fn link_ref(&self) -> &Link<K>;
}

/// A table of values that are named by their index: a [`Slab`], or a
/// [`Table`](crate::table::Table).
pub trait Slots<T, K>: Index<K, Output = T> {}

impl<T, K, S: Index<K, Output = T>> Slots<T, K> for S {}

/// [`Slots`], mutable.
pub trait SlotsMut<T, K>: IndexMut<K, Output = T> {}

impl<T, K, S: IndexMut<K, Output = T>> SlotsMut<T, K> for S {}

/// The length field of a list: `u32`, or `()`, which takes no memory.
pub trait Count: Copy {
    /// Length of an empty list.
    const ZERO: Self;
    /// Adds one.
    fn up(&mut self);
    /// Subtracts one.
    fn down(&mut self);
}

impl Count for u32 {
    const ZERO: Self = 0;

    #[inline(always)]
    fn up(&mut self) {
        *self += 1;
    }

    #[inline(always)]
    fn down(&mut self) {
        *self -= 1;
    }
}

impl Count for () {
    const ZERO: Self = ();

    #[inline(always)]
    fn up(&mut self) {}

    #[inline(always)]
    fn down(&mut self) {}
}

/// A list without a length field.
pub type Queue<const LIST: usize, K = u32> = List<LIST, (), K>;

/// A doubly linked list of slots of one slab or table.
///
/// Holds indices only: every call is given the slab, always the same. An entry must be removed from
/// the list before its slot is freed.
#[derive(Clone, Copy, Debug)]
pub struct List<const LIST: usize, C = u32, K = u32> {
    /// The first entry, or [`NONE`](Idx::NONE).
    pub head: K,
    /// The last entry, or [`NONE`](Idx::NONE).
    pub tail: K,
    /// Entries in the list.
    pub len: C,
}

impl<const LIST: usize, C: Count, K: Idx> Default for List<LIST, C, K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const LIST: usize, C: Count, K: Idx> List<LIST, C, K> {
    /// An empty list.
    pub const fn new() -> Self {
        Self { head: K::NONE, tail: K::NONE, len: C::ZERO }
    }

    /// Whether the list is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.head == K::NONE
    }

    /// Appends `idx`, which is in no list with this number.
    #[inline]
    pub fn push_back<T: Linked<LIST, K>>(&mut self, slab: &mut impl SlotsMut<T, K>, idx: K) {
        *slab[idx].link() = self.end();
        self.add(slab, idx);
    }

    /// The links of an entry that [`add`](Self::add) will append.
    #[inline(always)]
    pub const fn end(&self) -> Link<K> {
        Link { prev: self.tail, next: K::NONE }
    }

    /// [`push_back`](Self::push_back) for an entry constructed with the links of
    /// [`end`](Self::end).
    #[inline(always)]
    pub fn add<T: Linked<LIST, K>>(&mut self, slab: &mut impl SlotsMut<T, K>, idx: K) {
        debug_assert!(*slab[idx].link_ref() == self.end());
        if self.tail == K::NONE {
            self.head = idx;
        } else {
            slab[self.tail].link().next = idx;
        }
        self.tail = idx;
        self.len.up();
    }

    /// Prepends `idx`, which is in no list with this number.
    #[inline]
    pub fn push_front<T: Linked<LIST, K>>(&mut self, slab: &mut impl SlotsMut<T, K>, idx: K) {
        *slab[idx].link() = Link { prev: K::NONE, next: self.head };
        if self.head == K::NONE {
            self.tail = idx;
        } else {
            slab[self.head].link().prev = idx;
        }
        self.head = idx;
        self.len.up();
    }

    /// Removes the first entry.
    #[inline]
    pub fn pop_front<T: Linked<LIST, K>>(&mut self, slab: &mut impl SlotsMut<T, K>) -> Option<K> {
        let idx = self.head;
        if idx == K::NONE {
            return None;
        }
        self.remove(slab, idx);
        Some(idx)
    }

    /// Removes `idx`, which is in this list.
    ///
    /// # Panics
    /// If the links of `idx` show that it is first or last of a list, but not of this one.
    #[inline]
    pub fn remove<T: Linked<LIST, K>>(&mut self, slab: &mut impl SlotsMut<T, K>, idx: K) {
        let link = std::mem::take(slab[idx].link());
        self.cut(slab, idx, link);
    }

    /// Links the neighbours of `idx`, whose links were `link`, with each other.
    ///
    /// # Panics
    /// As [`remove`](Self::remove).
    #[inline(always)]
    pub(crate) fn cut<T: Linked<LIST, K>>(
        &mut self,
        slab: &mut impl SlotsMut<T, K>,
        idx: K,
        link: Link<K>,
    ) {
        let Link { prev, next } = link;
        if prev == K::NONE {
            assert!(self.head == idx, "list: {} is not in this list", idx.get());
            self.head = next;
        } else {
            slab[prev].link().next = next;
        }
        if next == K::NONE {
            assert!(self.tail == idx, "list: {} is not in this list", idx.get());
            self.tail = prev;
        } else {
            slab[next].link().prev = prev;
        }
        self.len.down();
    }

    /// The entry after `idx`.
    #[inline]
    pub fn next<T: Linked<LIST, K>>(&self, slab: &impl Slots<T, K>, idx: K) -> Option<K> {
        let next = slab[idx].link_ref().next;
        (next != K::NONE).then_some(next)
    }

    /// The entries from first to last.
    pub fn iter<'a, T: Linked<LIST, K> + 'a>(
        &self,
        slab: &'a impl Slots<T, K>,
    ) -> impl Iterator<Item = K> + 'a {
        let some = |idx: K| (idx != K::NONE).then_some(idx);
        std::iter::successors(some(self.head), move |&idx| some(slab[idx].link_ref().next))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet, VecDeque};

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Op {
        Alloc,
        Free(usize),
        StaleHandle(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            5 => Just(Op::Alloc),
            4 => any::<usize>().prop_map(Op::Free),
            1 => any::<usize>().prop_map(Op::StaleHandle),
        ]
    }

    proptest! {
        /// A slab compared with a map: same values at the same indices, full at capacity, the last
        /// freed slot first, and handles valid exactly as long as their values.
        #[test]
        fn slab_is_a_bounded_map(
            capacity in 0usize..12,
            ops in prop::collection::vec(op(), 1..300),
        ) {
            let mut slab: Slab<_> = Slab::with_capacity(capacity);
            let room = slab.slots.as_ptr();
            let mut model = BTreeMap::new();
            let mut freed = Vec::new();
            let mut dead: BTreeSet<(u32, u32)> = BTreeSet::new();
            for (n, op) in ops.into_iter().enumerate() {
                match op {
                    Op::Alloc => {
                        prop_assert_eq!(slab.is_full(), model.len() == capacity);
                        let Some(idx) = slab.alloc(n) else {
                            prop_assert_eq!(model.len(), capacity);
                            continue;
                        };
                        prop_assert_eq!(idx, freed.pop().unwrap_or(model.len() as u32));
                        prop_assert!(model.insert(idx, n).is_none());
                        prop_assert_eq!(slab.by_handle(slab.handle(idx)), Some(&n));
                    }
                    Op::Free(nth) if !model.is_empty() => {
                        let idx = *model.keys().nth(nth % model.len()).unwrap();
                        let handle = slab.handle(idx);
                        prop_assert!(dead.insert((handle.idx(), handle.generation())));
                        prop_assert_eq!(slab.free(idx), model.remove(&idx).unwrap());
                        prop_assert_eq!(slab.get(idx), None);
                        freed.push(idx);
                    }
                    Op::StaleHandle(nth) if !dead.is_empty() => {
                        let &(idx, generation) = dead.iter().nth(nth % dead.len()).unwrap();
                        let handle = Handle::from_parts(idx, generation);
                        prop_assert_eq!(slab.by_handle(handle), None);
                        prop_assert_eq!(slab.by_handle_mut(handle), None);
                    }
                    _ => {}
                }
                let want: Vec<_> = model.iter().map(|(i, v)| (*i, v)).collect();
                prop_assert_eq!(slab.iter().collect::<Vec<_>>(), want);
                prop_assert_eq!(slab.len() + slab.free_count(), capacity);
                prop_assert_eq!(slab.len(), model.len());
            }
            prop_assert_eq!(slab.slots.as_ptr(), room, "it allocated after it was made");
        }
    }

    #[test]
    #[should_panic(expected = "not in use")]
    fn freeing_twice_panics() {
        let mut slab: Slab<_> = Slab::with_capacity(2);
        let idx = slab.alloc(7).unwrap();
        slab.free(idx);
        slab.free(idx);
    }

    #[test]
    #[should_panic(expected = "not in use")]
    fn indexing_a_free_slot_panics() {
        let mut slab: Slab<_> = Slab::with_capacity(2);
        let idx = slab.alloc(7).unwrap();
        slab.free(idx);
        let _ = slab[idx];
    }

    #[test]
    fn a_raised_capacity_keeps_what_there_is() {
        let mut slab: Slab<_> = Slab::with_capacity(2);
        let first: Vec<_> = (0..2).map(|i| slab.alloc(i).unwrap()).collect();
        let handle = slab.handle(first[1]);
        assert!(slab.is_full() && slab.alloc(2).is_none());
        slab.raise_capacity(1);
        assert_eq!((slab.capacity(), slab.alloc(2)), (2, None));
        slab.raise_capacity(4);
        assert_eq!((slab.capacity(), slab.free_count()), (4, 2));
        let more: Vec<_> = (2..4).map(|i| slab.alloc(i).unwrap()).collect();
        assert!(slab.is_full() && slab.alloc(4).is_none());
        assert!(first.iter().chain(&more).zip(0..).all(|(&idx, i)| slab[idx] == i));
        assert_eq!(slab.by_handle(handle), Some(&1));
    }

    #[test]
    fn a_handle_of_zeros_names_nothing() {
        let mut slab: Slab<_> = Slab::with_capacity(1);
        slab.alloc(()).unwrap();
        assert_eq!(slab.by_handle(Handle::from_parts(0, 0)), None);
    }

    #[derive(Default)]
    struct Entry([Link; 2]);

    impl Linked<0> for Entry {
        fn link(&mut self) -> &mut Link {
            &mut self.0[0]
        }
        fn link_ref(&self) -> &Link {
            &self.0[0]
        }
    }

    impl Linked<1> for Entry {
        fn link(&mut self) -> &mut Link {
            &mut self.0[1]
        }
        fn link_ref(&self) -> &Link {
            &self.0[1]
        }
    }

    /// A random operation on a list and on the queue that it is compared with.
    fn turn<const LIST: usize>(
        list: &mut List<LIST>,
        model: &mut VecDeque<u32>,
        slab: &mut Slab<Entry>,
        (what, nth): (u8, usize),
    ) -> Result<(), TestCaseError>
    where
        Entry: Linked<LIST>,
    {
        let outside: Vec<u32> =
            slab.iter().map(|(i, _)| i).filter(|i| !model.contains(i)).collect();
        match what {
            0 if !outside.is_empty() => {
                let idx = outside[nth % outside.len()];
                list.push_back(slab, idx);
                model.push_back(idx);
            }
            1 if !outside.is_empty() => {
                let idx = outside[nth % outside.len()];
                list.push_front(slab, idx);
                model.push_front(idx);
            }
            2 => prop_assert_eq!(list.pop_front(slab), model.pop_front()),
            _ if !model.is_empty() => {
                let idx = model.remove(nth % model.len()).unwrap();
                list.remove(slab, idx);
            }
            _ => {}
        }
        prop_assert!(list.iter(slab).eq(model.iter().copied()));
        prop_assert_eq!(list.len as usize, model.len());
        prop_assert_eq!(list.is_empty(), model.is_empty());
        for pair in model.iter().zip(model.iter().skip(1)) {
            prop_assert_eq!(list.next(slab, *pair.0), Some(*pair.1));
            prop_assert_eq!(<Entry as Linked<LIST>>::link_ref(&slab[*pair.1]).prev, *pair.0);
        }
        Ok(())
    }

    proptest! {
        /// Two lists through the same entries, compared with two queues.
        #[test]
        fn lists_are_queues(
            ops in prop::collection::vec((any::<bool>(), 0u8..5, any::<usize>()), 1..300),
        ) {
            let mut slab: Slab<_> = Slab::with_capacity(8);
            while slab.alloc(Entry::default()).is_some() {}
            let (mut a, mut b) = (List::<0>::new(), List::<1>::new());
            let (mut in_a, mut in_b) = (VecDeque::new(), VecDeque::new());
            for (first, what, nth) in ops {
                if first {
                    turn(&mut a, &mut in_a, &mut slab, (what, nth))?;
                } else {
                    turn(&mut b, &mut in_b, &mut slab, (what, nth))?;
                }
            }
            prop_assert!(a.iter(&slab).eq(in_a) && b.iter(&slab).eq(in_b));
        }
    }

    #[test]
    #[should_panic(expected = "not in this list")]
    fn removing_what_is_in_no_list_panics() {
        let mut slab: Slab<_> = Slab::with_capacity(2);
        let mut list = List::<0>::new();
        let (a, b) = (slab.alloc(Entry::default()).unwrap(), slab.alloc(Entry::default()).unwrap());
        list.push_back(&mut slab, a);
        list.remove(&mut slab, b);
    }
}
