//! Address vectors: `fi_addr_t` to endpoint, and endpoint to `fi_addr_t` for `FI_SOURCE`.
//!
//! Insertion and removal are control path and may allocate; look-ups never do.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::idx::{AddrIdx, PeerIdx};
use crate::index::Index;
use crate::types::{FI_ADDR_UNSPEC, FiAddr};

/// An endpoint, as an address vector stores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvEntry {
    /// Index of the peer in the node's table.
    pub peer: PeerIdx,
    /// Number of the endpoint at the peer.
    pub ep: u16,
    /// The receive context of a scalable endpoint, if the address names one; else 0.
    pub rx_ctx: u8,
    /// Incarnation of the peer in the inserted address; 0 for any.
    pub incarnation: u64,
}

impl AvEntry {
    /// The endpoint number of the inserted address, which names no receive context.
    pub fn inserted_ep(&self) -> u16 {
        self.ep - u16::from(self.rx_ctx)
    }
}

/// An address vector (table and map alike: `fi_addr_t` is an index).
///
/// The same endpoint may be inserted any number of times. Each index stays valid until it is
/// removed; the reverse look-up returns one of them.
#[derive(Debug, Default)]
pub struct Av {
    slots: Vec<Slot>,
    /// Removed indices that can be assigned again, lowest first.
    free: BinaryHeap<Reverse<AddrIdx>>,
    /// The newest index of each endpoint, keyed by peer and endpoint.
    reverse: Index<AddrIdx>,
    /// Indices in use of each peer.
    of_peer: Vec<u32>,
    /// Number of the highest bits of an address that name a receive context.
    rx_ctx_bits: u32,
    /// User IDs of the first indices; empty until the user sets one.
    user_ids: Vec<FiAddr>,
    /// User IDs of authorization keys, by the key's handle.
    key_ids: Vec<(FiAddr, FiAddr)>,
    /// Whether completions report an index without a user ID as [`FI_ADDR_UNSPEC`] instead of the
    /// index.
    by_user_id: bool,
}

/// One index: an entry, linked with the other indices of the same endpoint from newest to oldest.
#[derive(Clone, Copy, Debug)]
enum Slot {
    Free,
    /// The incarnation as two words, for a smaller alignment: there are as many slots as peers.
    Used {
        peer: PeerIdx,
        ep: u16,
        incarnation: [u32; 2],
        newer: AddrIdx,
        older: AddrIdx,
    },
}

const _: () = assert!(size_of::<Slot>() <= 24, "one for each peer");

impl Slot {
    fn entry(&self) -> Option<AvEntry> {
        let Self::Used { peer, ep, incarnation: [low, high], .. } = *self else { return None };
        let incarnation = u64::from(high) << 32 | u64::from(low);
        Some(AvEntry { peer, ep, rx_ctx: 0, incarnation })
    }

    /// Hash of the endpoint of a used slot; 0 for a free one.
    fn hash(&self) -> u64 {
        let Self::Used { peer, ep, .. } = *self else { return 0 };
        hash(peer, ep)
    }
}

impl Av {
    /// An empty vector with room for `count` addresses; it grows beyond that.
    pub fn with_capacity(count: usize) -> Self {
        // The hint comes from the application, so the reservation is capped.
        let count = count.min(1 << 20);
        let (slots, reverse) = (Vec::with_capacity(count), Index::with_capacity(count));
        Self { slots, reverse, ..Self::default() }
    }

    /// Reserves the `bits` highest bits of an address, at most 16, for the receive context of a
    /// scalable endpoint; the other bits hold the index.
    pub fn name_contexts(&mut self, bits: u32) {
        self.rx_ctx_bits = bits;
    }

    /// Makes completions report user IDs only (`FI_AV_USER_ID`).
    pub fn name_by_user_id(&mut self) {
        self.by_user_id = true;
    }

    /// Whether [`name_by_user_id`](Self::name_by_user_id) was called.
    pub fn is_by_user_id(&self) -> bool {
        self.by_user_id
    }

    /// Sets the user ID that completions report for index `addr` until the index is removed.
    /// Returns the index's entry, `None` if it has none.
    pub fn set_user_id(&mut self, addr: FiAddr, user_id: FiAddr) -> Option<AvEntry> {
        let at = usize::try_from(addr).ok()?;
        let entry = self.slots.get(at)?.entry()?;
        for i in self.user_ids.len()..=at {
            self.user_ids.push(self.default_id(i as FiAddr));
        }
        self.user_ids[at] = user_id;
        Some(entry)
    }

    /// [`set_user_id`](Self::set_user_id) for the `handle` of an authorization key; permanent.
    pub fn set_key_user_id(&mut self, handle: FiAddr, user_id: FiAddr) {
        self.key_ids.retain(|(of, _)| *of != handle);
        self.key_ids.push((handle, user_id));
    }

    /// The user ID of the `handle` of an authorization key.
    pub fn key_user_id(&self, handle: FiAddr) -> FiAddr {
        let id = self.key_ids.iter().find(|(of, _)| *of == handle);
        id.map_or_else(|| self.default_id(handle), |(_, id)| *id)
    }

    /// What completions report for an address without a user ID.
    fn default_id(&self, addr: FiAddr) -> FiAddr {
        if self.by_user_id { FI_ADDR_UNSPEC } else { addr }
    }

    /// Inserts an endpoint at the lowest free index.
    ///
    /// # Panics
    /// At 2^32 - 1 addresses, which memory does not hold.
    pub fn insert(&mut self, entry: AvEntry) -> FiAddr {
        let idx = self.free.pop().map_or(AddrIdx::of(self.slots.len() as u32), |Reverse(idx)| idx);
        assert!(idx != AddrIdx::NONE, "av: indices exhausted");
        let AvEntry { peer, ep, incarnation, .. } = entry;
        let older = self.newest(peer, ep).unwrap_or(AddrIdx::NONE);
        if let Some(Slot::Used { newer, .. }) = self.slots.get_mut(older.at()) {
            *newer = idx;
            self.unlink_newest(peer, ep, older);
        }
        let incarnation = words(incarnation);
        let slot = Slot::Used { peer, ep, incarnation, newer: AddrIdx::NONE, older };
        match self.slots.get_mut(idx.at()) {
            Some(place) => *place = slot,
            None => self.slots.push(slot),
        }
        self.link_newest(peer, ep, idx);
        if self.of_peer.len() <= peer.at() {
            self.of_peer.resize(peer.at() + 1, 0);
        }
        self.of_peer[peer.at()] += 1;
        let addr = FiAddr::from(idx.get());
        if idx.at() < self.user_ids.len() {
            self.user_ids[idx.at()] = self.default_id(addr);
        }
        addr
    }

    /// Removes an index. Returns its entry, `None` if it had none. Other indices of the same
    /// endpoint stay.
    pub fn remove(&mut self, addr: FiAddr) -> Option<AvEntry> {
        let slot = self.slots.get_mut(usize::try_from(addr).ok()?)?;
        let entry = slot.entry()?;
        let idx = AddrIdx::of(addr as u32);
        let Slot::Used { newer, older, .. } = std::mem::replace(slot, Slot::Free) else {
            return None;
        };
        if let Some(Slot::Used { newer: of_older, .. }) = self.slots.get_mut(older.at()) {
            *of_older = newer;
        }
        if let Some(Slot::Used { older: of_newer, .. }) = self.slots.get_mut(newer.at()) {
            *of_newer = older;
        } else {
            self.unlink_newest(entry.peer, entry.ep, idx);
            if older != AddrIdx::NONE {
                self.link_newest(entry.peer, entry.ep, older);
            }
        }
        self.free.push(Reverse(idx));
        self.of_peer[entry.peer.at()] -= 1;
        Some(entry)
    }

    /// The entry of `addr`, `None` if it has none.
    #[inline]
    pub fn lookup(&self, addr: FiAddr) -> Option<AvEntry> {
        match self.slots.get(usize::try_from(addr).ok()?) {
            Some(slot) => slot.entry(),
            None => self.lookup_context(addr),
        }
    }

    /// The entry of an address that names a receive context: endpoint numbers of receive contexts
    /// follow that of the inserted address.
    #[inline(never)]
    fn lookup_context(&self, addr: FiAddr) -> Option<AvEntry> {
        let shift = FiAddr::BITS.checked_sub(self.rx_ctx_bits).filter(|&s| s < FiAddr::BITS)?;
        let (rx_ctx, idx) = (u8::try_from(addr >> shift).ok()?, addr & ((1 << shift) - 1));
        let entry = self.slots.get(usize::try_from(idx).ok()?)?.entry()?;
        Some(AvEntry { ep: entry.ep.checked_add(rx_ctx.into())?, rx_ctx, ..entry })
    }

    /// What completions report as the source for endpoint `ep` of incarnation `inc` of `peer`: the
    /// newest index that was inserted with that incarnation or with any, or its user ID. `None` if
    /// there is no such index.
    #[inline]
    pub fn reverse(&self, peer: PeerIdx, inc: u64, ep: u16) -> Option<FiAddr> {
        let mut idx = self.newest(peer, ep)?;
        while let Slot::Used { incarnation, older, .. } = self.slots.get(idx.at())?
            && *incarnation != [0; 2]
            && *incarnation != words(inc)
        {
            idx = *older;
        }
        let id = self.user_ids.get(idx.at()).copied();
        Some(id.unwrap_or_else(|| self.default_id(FiAddr::from(idx.get()))))
    }

    /// Whether any index names an endpoint of `peer`.
    pub(crate) fn has_peer(&self, peer: PeerIdx) -> bool {
        self.of_peer.get(peer.at()).is_some_and(|&count| count > 0)
    }

    /// Indices in use.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether no index is in use.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The indices in use in ascending order, with their entries.
    pub fn iter(&self) -> impl Iterator<Item = (FiAddr, AvEntry)> {
        let used = self.slots.iter().enumerate();
        used.filter_map(|(i, slot)| Some((i as FiAddr, slot.entry()?)))
    }

    /// The newest index of an endpoint.
    fn newest(&self, peer: PeerIdx, ep: u16) -> Option<AddrIdx> {
        self.reverse.get(hash(peer, ep), |i| match self.slots[i.at()] {
            Slot::Used { peer: p, ep: e, .. } => (p, e) == (peer, ep),
            Slot::Free => false,
        })
    }

    /// Makes `idx` the reverse look-up's result for an endpoint that has none.
    fn link_newest(&mut self, peer: PeerIdx, ep: u16, idx: AddrIdx) {
        let Self { reverse, slots, .. } = self;
        reverse.insert(hash(peer, ep), idx, |i| slots[i.at()].hash());
    }

    /// Undoes [`link_newest`](Self::link_newest).
    fn unlink_newest(&mut self, peer: PeerIdx, ep: u16, idx: AddrIdx) {
        let Self { reverse, slots, .. } = self;
        reverse.remove(hash(peer, ep), idx, |i| slots[i.at()].hash());
    }
}

/// An incarnation, low word first.
const fn words(incarnation: u64) -> [u32; 2] {
    [incarnation as u32, (incarnation >> 32) as u32]
}

/// Hash of an endpoint.
const fn hash(peer: PeerIdx, ep: u16) -> u64 {
    ((peer.get() as u64) << 16 | ep as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn entry(peer: PeerIdx, ep: u16) -> AvEntry {
        AvEntry { peer, ep, rx_ctx: 0, incarnation: LIVES[1] }
    }

    /// Any incarnation, and two that differ in the high word.
    const LIVES: [u64; 3] = [0, 5, 1 << 40 | 5];

    #[derive(Clone, Copy, Debug)]
    enum Op {
        Insert(u32, u16, u64),
        Remove(usize),
        RemoveUnset(u64),
    }

    /// Few peers and endpoints, so that duplicates are common.
    fn op() -> impl Strategy<Value = Op> {
        let peer = 0u32..7;
        let ep = prop_oneof![0u16..3, Just(u16::MAX)];
        let life = prop::sample::select(LIVES.to_vec());
        let far = prop::sample::select(vec![FiAddr::MAX, u64::from(u32::MAX), 1 << 32, 1 << 33]);
        prop_oneof![
            6 => (peer, ep, life).prop_map(|(peer, ep, life)| Op::Insert(peer, ep, life)),
            5 => any::<usize>().prop_map(Op::Remove),
            1 => prop_oneof![0u64..80, far].prop_map(Op::RemoveUnset),
        ]
    }

    proptest! {
        /// The vector compared with a map from index to endpoint.
        #[test]
        fn av_is_a_map_both_ways(hint in 0usize..40, ops in prop::collection::vec(op(), 1..200)) {
            let mut av = Av::with_capacity(hint);
            let mut model: BTreeMap<FiAddr, AvEntry> = BTreeMap::new();
            let mut inserted = Vec::new();
            for op in ops {
                match op {
                    Op::Insert(peer, ep, incarnation) => {
                        let entry = AvEntry { incarnation, ..entry(PeerIdx::of(peer), ep) };
                        let lowest = (0..).find(|i| !model.contains_key(i)).unwrap();
                        prop_assert_eq!(av.insert(entry), lowest);
                        model.insert(lowest, entry);
                        inserted.push(lowest);
                    }
                    Op::Remove(nth) if !model.is_empty() => {
                        let addr = *model.keys().nth(nth % model.len()).unwrap();
                        prop_assert_eq!(av.remove(addr), model.remove(&addr));
                        inserted.retain(|&at| at != addr);
                    }
                    Op::RemoveUnset(addr) if !model.contains_key(&addr) => {
                        prop_assert_eq!(av.remove(addr), None);
                        prop_assert_eq!(av.lookup(addr), None);
                    }
                    _ => {}
                }
                prop_assert_eq!(av.len(), model.len());
                prop_assert!(av.iter().eq(model.iter().map(|(&addr, &entry)| (addr, entry))));
                for peer in (0..7).map(PeerIdx::of) {
                    let known = model.values().any(|e| e.peer == peer);
                    prop_assert_eq!(av.has_peer(peer), known);
                    for ep in (0..3).chain([u16::MAX]) {
                        for life in &LIVES[1..] {
                            let of = |e: &AvEntry| {
                                (e.peer, e.ep) == (peer, ep) && [0, *life].contains(&e.incarnation)
                            };
                            let newest = inserted.iter().rfind(|&addr| of(&model[addr]));
                            prop_assert_eq!(av.reverse(peer, *life, ep), newest.copied());
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn an_address_names_a_receive_context() {
        let mut plain = Av::with_capacity(2);
        assert_eq!(plain.insert(entry(PeerIdx::of(1), 7)), 0);
        assert_eq!(plain.lookup(1 << 62), None);
        let mut av = Av::with_capacity(2);
        av.name_contexts(2);
        assert_eq!(
            (av.insert(entry(PeerIdx::of(1), 7)), av.insert(entry(PeerIdx::of(2), u16::MAX - 1))),
            (0, 1)
        );
        for context in 0..4 {
            let named = av.lookup(context << 62).unwrap();
            assert_eq!(
                (named.peer, named.ep, named.inserted_ep()),
                (PeerIdx::of(1), 7 + context as u16, 7)
            );
        }
        assert_eq!(av.lookup(1 << 62 | 1).unwrap().ep, u16::MAX);
        let nothing = [2 << 62 | 1, 1 << 62 | 2, 1 << 61, FiAddr::MAX];
        assert!(nothing.iter().all(|&addr| av.lookup(addr).is_none()));
        assert_eq!((av.remove(1 << 62), av.reverse(PeerIdx::of(1), LIVES[1], 8)), (None, None));
    }

    /// Row X24: a user ID stays until the index is removed, and nothing else changes.
    #[test]
    fn an_index_has_a_name_of_its_users() {
        for by_user_id in [false, true] {
            let mut av = Av::with_capacity(0);
            if by_user_id {
                av.name_by_user_id();
            }
            let of = |i: u32| (PeerIdx::of(i), 3);
            for i in 0..5 {
                assert_eq!(av.insert(entry(of(i).0, 3)), FiAddr::from(i));
            }
            let default_id = |i: u32| if by_user_id { FI_ADDR_UNSPEC } else { FiAddr::from(i) };
            let called = |av: &Av, i: u32| av.reverse(of(i).0, LIVES[1], of(i).1);
            for name in [0, 1 << 63, FI_ADDR_UNSPEC, 7] {
                assert_eq!(av.set_user_id(3, name), Some(entry(of(3).0, 3)));
                assert_eq!(called(&av, 3), Some(name));
            }
            for i in [0, 1, 2, 4] {
                assert_eq!(called(&av, i), Some(default_id(i)));
            }
            for nothing in [5, FI_ADDR_UNSPEC, 1 << 32] {
                assert_eq!(av.set_user_id(nothing, 1), None);
            }
            assert_eq!(av.insert(entry(of(3).0, 3)), 5);
            assert_eq!(called(&av, 3), Some(default_id(5)), "the newest index counts");
            assert!(av.remove(5).is_some() && called(&av, 3) == Some(7));
            assert!(av.remove(3).is_some() && called(&av, 3).is_none());
            assert_eq!(av.set_user_id(3, 1), None);
            assert_eq!(av.insert(entry(of(3).0, 3)), 3);
            assert_eq!(called(&av, 3), Some(default_id(3)), "the name went with the index");
            let handle = 1 << 63 | 5;
            let is = if by_user_id { FI_ADDR_UNSPEC } else { handle };
            assert_eq!(av.key_user_id(handle), is);
            av.set_key_user_id(handle, 1);
            av.set_key_user_id(handle, 2);
            assert_eq!(av.key_user_id(handle), 2);
        }
    }

    /// Enough endpoints to grow the reverse table many times, removed in another order.
    #[test]
    fn many_endpoints_come_and_go() {
        let mut av = Av::with_capacity(0);
        let of = |i: u32| (PeerIdx::of(i % 1_000), (i / 1_000) as u16);
        for i in 0..20_000 {
            assert_eq!(av.insert(entry(of(i).0, of(i).1)), FiAddr::from(i));
        }
        for i in (0..20_000).map(|i| i * 7_919 % 20_000) {
            assert_eq!(av.reverse(of(i).0, LIVES[1], of(i).1), Some(FiAddr::from(i)));
            assert!(av.remove(FiAddr::from(i)).is_some());
            assert_eq!(av.reverse(of(i).0, LIVES[1], of(i).1), None);
        }
        assert!(av.is_empty());
        assert_eq!(av.reverse.len(), 0);
    }
}
