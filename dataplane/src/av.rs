//! Address vectors: `fi_addr_t` to endpoint, and back for `FI_SOURCE`.
//!
//! Inserting and removing are the control path and may allocate; lookups never do.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::slab::NONE;
use crate::types::{EpAddr, FiAddr};

/// An endpoint as the node knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvEntry {
    /// Number of its peer in the node's table.
    pub peer: u32,
    /// Number of the endpoint at the peer.
    pub ep: u16,
    /// Which receive context of a scalable endpoint that is, if the address names one; else 0.
    pub rx_ctx: u8,
    /// The address as it was inserted, which names no receive context.
    pub addr: EpAddr,
}

/// An address vector (table and map alike: `fi_addr_t` is an index).
///
/// The same endpoint may be inserted any number of times. Each index stays usable until it is
/// removed; the way back names one of them.
#[derive(Debug, Default)]
pub struct Av {
    slots: Vec<Option<Slot>>,
    /// The indices that were removed and not given out again.
    free: BinaryHeap<Reverse<u32>>,
    reverse: Reversed,
    /// How many of the highest bits of an address name a receive context.
    rx_ctx_bits: u32,
}

/// An entry with its neighbours among those of the same endpoint, a list from newest to oldest.
#[derive(Clone, Copy, Debug)]
struct Slot {
    entry: AvEntry,
    newer: u32,
    older: u32,
}

impl Av {
    /// An empty vector with room for `count` addresses; it grows when they are more.
    pub fn with_capacity(count: usize) -> Self {
        // A hint comes from the application, so it is believed only so far.
        let count = count.min(1 << 20);
        let mut av = Self { slots: Vec::with_capacity(count), ..Self::default() };
        av.reverse.reserve(count);
        av
    }

    /// From now on an address has `bits` bits at the top, at most 16, that name a receive context
    /// of a scalable endpoint; the index stands in the others.
    pub fn name_contexts(&mut self, bits: u32) {
        self.rx_ctx_bits = bits;
    }

    /// Inserts an endpoint at the lowest index that is free.
    ///
    /// # Panics
    /// At 2^32 - 1 addresses, which memory does not hold.
    pub fn insert(&mut self, entry: AvEntry) -> FiAddr {
        let idx = self.free.pop().map_or(self.slots.len() as u32, |Reverse(idx)| idx);
        assert!(idx != NONE, "av: indices exhausted");
        let older = self.reverse.insert(key(entry.peer, entry.ep), idx).unwrap_or(NONE);
        if let Some(slot) = self.slot_mut(older) {
            slot.newer = idx;
        }
        let slot = Some(Slot { entry, newer: NONE, older });
        match self.slots.get_mut(idx as usize) {
            Some(place) => *place = slot,
            None => self.slots.push(slot),
        }
        FiAddr::from(idx)
    }

    /// Removes an index, and says what it named; `None` if it names nothing. Other indices of the
    /// same endpoint stay.
    pub fn remove(&mut self, addr: FiAddr) -> Option<AvEntry> {
        let Slot { entry, newer, older } =
            self.slots.get_mut(usize::try_from(addr).ok()?)?.take()?;
        if let Some(slot) = self.slot_mut(older) {
            slot.newer = newer;
        }
        if let Some(slot) = self.slot_mut(newer) {
            slot.older = older;
        } else if older != NONE {
            self.reverse.insert(key(entry.peer, entry.ep), older);
        } else {
            self.reverse.remove(key(entry.peer, entry.ep));
        }
        self.free.push(Reverse(addr as u32));
        Some(entry)
    }

    /// What `addr` names, `None` if nothing.
    #[inline]
    pub fn lookup(&self, addr: FiAddr) -> Option<AvEntry> {
        match self.slots.get(usize::try_from(addr).ok()?) {
            Some(slot) => slot.as_ref().map(|slot| slot.entry),
            None => self.lookup_context(addr),
        }
    }

    /// What an address names that is no index: its receive context has a number above that of the
    /// address that was inserted.
    #[inline(never)]
    fn lookup_context(&self, addr: FiAddr) -> Option<AvEntry> {
        let shift = FiAddr::BITS.checked_sub(self.rx_ctx_bits).filter(|&s| s < FiAddr::BITS)?;
        let (rx_ctx, idx) = (u8::try_from(addr >> shift).ok()?, addr & ((1 << shift) - 1));
        let entry = self.slots.get(usize::try_from(idx).ok()?)?.as_ref()?.entry;
        Some(AvEntry { ep: entry.ep.checked_add(rx_ctx.into())?, rx_ctx, ..entry })
    }

    /// An index that names endpoint `ep` of `peer`, `None` if it was not inserted.
    #[inline]
    pub fn reverse(&self, peer: u32, ep: u16) -> Option<FiAddr> {
        self.reverse.get(key(peer, ep)).map(FiAddr::from)
    }

    /// Indices in use.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether no index is in use.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The indices in use in order, with what they name.
    pub fn iter(&self) -> impl Iterator<Item = (FiAddr, &AvEntry)> {
        let used = self.slots.iter().enumerate();
        used.filter_map(|(i, slot)| slot.as_ref().map(|slot| (i as FiAddr, &slot.entry)))
    }

    fn slot_mut(&mut self, idx: u32) -> Option<&mut Slot> {
        self.slots.get_mut(idx as usize)?.as_mut()
    }
}

/// The endpoint as a key of [`Reversed`]. Below 2^48, so never [`Reversed::EMPTY`].
const fn key(peer: u32, ep: u16) -> u64 {
    (peer as u64) << 16 | ep as u64
}

/// A hash table from 48-bit keys to indices: open addressing, linear probing, at most half full.
#[derive(Debug, Default)]
struct Reversed {
    /// A power of two of cells, or none.
    cells: Vec<(u64, u32)>,
    len: usize,
}

impl Reversed {
    const EMPTY: u64 = u64::MAX;

    /// Room for `n` keys in all.
    fn reserve(&mut self, n: usize) {
        if n * 2 <= self.cells.len() {
            return;
        }
        let cells = vec![(Self::EMPTY, NONE); (n * 2).next_power_of_two().max(16)];
        for (key, idx) in std::mem::replace(&mut self.cells, cells) {
            if key != Self::EMPTY {
                let at = self.find(key);
                self.cells[at] = (key, idx);
            }
        }
    }

    /// Sets the index of `key` and says the one before.
    fn insert(&mut self, key: u64, idx: u32) -> Option<u32> {
        self.reserve(self.len + 1);
        let at = self.find(key);
        let old = std::mem::replace(&mut self.cells[at], (key, idx));
        if old.0 == key {
            return Some(old.1);
        }
        self.len += 1;
        None
    }

    fn get(&self, key: u64) -> Option<u32> {
        if self.len == 0 {
            return None;
        }
        let (found, idx) = self.cells[self.find(key)];
        (found == key).then_some(idx)
    }

    /// Removes `key`, and moves back what had to step over its cell.
    fn remove(&mut self, key: u64) {
        if self.len == 0 {
            return;
        }
        let mask = self.cells.len() - 1;
        let mut hole = self.find(key);
        if self.cells[hole].0 != key {
            return;
        }
        self.len -= 1;
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let (other, _) = self.cells[at];
            if other == Self::EMPTY {
                break;
            }
            // It may move back unless that would put it before its home.
            if at.wrapping_sub(self.home(other)) & mask >= at.wrapping_sub(hole) & mask {
                self.cells[hole] = self.cells[at];
                hole = at;
            }
        }
        self.cells[hole] = (Self::EMPTY, NONE);
    }

    /// The cell of `key`, or the empty one where it would go. There is one: at most half are full.
    fn find(&self, key: u64) -> usize {
        let mask = self.cells.len() - 1;
        let mut at = self.home(key);
        while self.cells[at].0 != key && self.cells[at].0 != Self::EMPTY {
            at = (at + 1) & mask;
        }
        at
    }

    fn home(&self, key: u64) -> usize {
        let bits = self.cells.len().trailing_zeros();
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - bits)) as usize
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use barewire_driver::port::MacAddr;
    use proptest::prelude::*;

    use super::*;

    fn entry(peer: u32, ep: u16) -> AvEntry {
        let mut mac = [2; 6];
        mac[2..].copy_from_slice(&peer.to_be_bytes());
        AvEntry { peer, ep, rx_ctx: 0, addr: EpAddr { mac: MacAddr(mac), ep, incarnation: 0 } }
    }

    #[derive(Clone, Copy, Debug)]
    enum Op {
        Insert(u32, u16),
        Remove(usize),
        RemoveUnset(u64),
    }

    /// Peers and endpoints few enough that duplicates are common.
    fn op() -> impl Strategy<Value = Op> {
        let peer = prop_oneof![0u32..6, Just(u32::MAX)];
        let ep = prop_oneof![0u16..3, Just(u16::MAX)];
        let far = prop::sample::select(vec![FiAddr::MAX, u64::from(u32::MAX), 1 << 32, 1 << 33]);
        prop_oneof![
            6 => (peer, ep).prop_map(|(peer, ep)| Op::Insert(peer, ep)),
            5 => any::<usize>().prop_map(Op::Remove),
            1 => prop_oneof![0u64..80, far].prop_map(Op::RemoveUnset),
        ]
    }

    proptest! {
        /// The vector against a map from index to endpoint.
        #[test]
        fn av_is_a_map_both_ways(hint in 0usize..40, ops in prop::collection::vec(op(), 1..200)) {
            let mut av = Av::with_capacity(hint);
            let mut model: BTreeMap<FiAddr, AvEntry> = BTreeMap::new();
            for op in ops {
                match op {
                    Op::Insert(peer, ep) => {
                        let lowest = (0..).find(|i| !model.contains_key(i)).unwrap();
                        prop_assert_eq!(av.insert(entry(peer, ep)), lowest);
                        model.insert(lowest, entry(peer, ep));
                    }
                    Op::Remove(nth) if !model.is_empty() => {
                        let addr = *model.keys().nth(nth % model.len()).unwrap();
                        prop_assert_eq!(av.remove(addr), model.remove(&addr));
                    }
                    Op::RemoveUnset(addr) if !model.contains_key(&addr) => {
                        prop_assert_eq!(av.remove(addr), None);
                        prop_assert_eq!(av.lookup(addr), None);
                    }
                    _ => {}
                }
                prop_assert_eq!(av.len(), model.len());
                prop_assert!(av.iter().eq(model.iter().map(|(&addr, entry)| (addr, entry))));
                for peer in (0..6).chain([u32::MAX]) {
                    for ep in (0..3).chain([u16::MAX]) {
                        let named = av.reverse(peer, ep).map(|addr| model.get(&addr).copied());
                        let known = model.values().any(|e| (e.peer, e.ep) == (peer, ep));
                        prop_assert_eq!(named, known.then_some(Some(entry(peer, ep))));
                    }
                }
            }
        }
    }

    #[test]
    fn an_address_names_a_receive_context() {
        let mut plain = Av::with_capacity(2);
        assert_eq!(plain.insert(entry(1, 7)), 0);
        assert_eq!(plain.lookup(1 << 62), None);
        let mut av = Av::with_capacity(2);
        av.name_contexts(2);
        assert_eq!((av.insert(entry(1, 7)), av.insert(entry(2, u16::MAX - 1))), (0, 1));
        for context in 0..4 {
            let named = av.lookup(context << 62).unwrap();
            assert_eq!((named.peer, named.ep, named.addr.ep), (1, 7 + context as u16, 7));
        }
        assert_eq!(av.lookup(1 << 62 | 1).unwrap().ep, u16::MAX);
        let nothing = [2 << 62 | 1, 1 << 62 | 2, 1 << 61, FiAddr::MAX];
        assert!(nothing.iter().all(|&addr| av.lookup(addr).is_none()));
        assert_eq!((av.remove(1 << 62), av.reverse(1, 8)), (None, None));
    }

    /// Enough endpoints to grow the way back many times, removed in another order.
    #[test]
    fn many_endpoints_come_and_go() {
        let mut av = Av::with_capacity(0);
        let of = |i: u32| (i % 1_000, (i / 1_000) as u16);
        for i in 0..20_000 {
            assert_eq!(av.insert(entry(of(i).0, of(i).1)), FiAddr::from(i));
        }
        for i in (0..20_000).map(|i| i * 7_919 % 20_000) {
            assert_eq!(av.reverse(of(i).0, of(i).1), Some(FiAddr::from(i)));
            assert!(av.remove(FiAddr::from(i)).is_some());
            assert_eq!(av.reverse(of(i).0, of(i).1), None);
        }
        assert!(av.is_empty());
        assert_eq!(av.reverse.len, 0);
    }
}
