//! The retransmission ring: records of the packets in flight, by PSN.
//!
//! A ring has a power of two of slots, one per PSN, in groups of 64 with a bitmap per property of a
//! packet. So a packet is found by its PSN, and packets with a property 64 at a time: an
//! acknowledgement of a window of thousands costs in proportion to what it newly reports.
//!
//! A session has a ring while it has records. The ring begins with 64 slots and doubles; released
//! rings are kept for other sessions.

use crate::idx::{RingIdx, SentIdx};
use crate::psn::Psn;

/// Slots of a group.
const GROUP: u32 = u64::BITS;

/// Number of ring sizes: 2^n groups each.
const SIZES: usize = 32;

/// The slots of 64 consecutive packets.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Group {
    /// Packets with a record.
    pub(super) kept: u64,
    /// Packets with a record that the peer has received out of order.
    pub(super) sacked: u64,
    /// Packets to be retransmitted.
    pub(super) lost: u64,
    /// The records of the `kept` packets.
    records: [SentIdx; GROUP as usize],
}

impl Group {
    const EMPTY: Self =
        Self { kept: 0, sacked: 0, lost: 0, records: [SentIdx::NONE; GROUP as usize] };

    /// The record of `psn`, whose slot is in this group and in use.
    #[inline(always)]
    pub(super) fn record(&self, psn: Psn) -> SentIdx {
        self.records[(psn.0 % GROUP) as usize]
    }

    /// Packets neither received by the peer nor marked lost.
    pub(super) fn under_way(&self) -> u64 {
        self.kept & !self.sacked & !self.lost
    }
}

/// The retransmission ring of one session.
#[derive(Debug)]
pub(super) struct Ring(Box<[Group]>);

impl Ring {
    fn new(groups: usize) -> Self {
        Self(vec![Group::EMPTY; groups].into())
    }

    /// Number of slots: consecutive packets that fit.
    #[inline(always)]
    fn slots(&self) -> u32 {
        self.0.len() as u32 * GROUP
    }

    /// The group with the slot of `psn`.
    #[inline(always)]
    fn group(&self, psn: Psn) -> &Group {
        &self.0[(psn.0 / GROUP) as usize & (self.0.len() - 1)]
    }

    /// [`group`](Self::group), mutable, and the bit of `psn` in it.
    #[inline(always)]
    pub(super) fn slot(&mut self, psn: Psn) -> (&mut Group, u64) {
        let at = (psn.0 / GROUP) as usize & (self.0.len() - 1);
        (&mut self.0[at], bit(psn))
    }

    /// The record of `psn`, whose slot is in use.
    #[inline(always)]
    pub(super) fn record(&self, psn: Psn) -> SentIdx {
        self.group(psn).record(psn)
    }

    /// [`record`](Self::record), `None` if the slot of `psn` is not in use.
    #[inline(always)]
    pub(super) fn find_record(&self, psn: Psn) -> Option<SentIdx> {
        let group = self.group(psn);
        (group.kept & bit(psn) != 0).then(|| group.record(psn))
    }

    /// Whether the bit of `psn` is set in the bitmap `of`.
    #[inline(always)]
    pub(super) fn is(&self, psn: Psn, of: impl Fn(&Group) -> u64) -> bool {
        of(self.group(psn)) & bit(psn) != 0
    }

    /// Stores the record of `psn` in its slot, which is free.
    #[inline(always)]
    fn put(&mut self, psn: Psn, record: SentIdx) {
        let (group, bit) = self.slot(psn);
        group.kept |= bit;
        group.records[(psn.0 % GROUP) as usize] = record;
    }

    /// The bitmap `of` for the 64 packets from `psn` on: the first has bit 0.
    pub(super) fn bits(&self, psn: Psn, of: impl Fn(&Group) -> u64) -> u64 {
        let shift = psn.0 % GROUP;
        let next = of(self.group(psn.add(GROUP)));
        // Two shifts, since a shift by 64 would have no effect.
        of(self.group(psn)) >> shift | next << (GROUP - 1 - shift) << 1
    }

    /// The first packet from `first` to before `end` with a bit in the bitmap `of`. The range is
    /// not longer than the ring.
    #[inline]
    pub(super) fn find(&self, first: Psn, end: Psn, of: impl Fn(&Group) -> u64) -> Option<Psn> {
        let mut at = first;
        while end.since(at) > 0 {
            let found = of(self.group(at)) >> (at.0 % GROUP);
            if found != 0 {
                let found = at.add(found.trailing_zeros());
                return (end.since(found) > 0).then_some(found);
            }
            at = at.add(GROUP - at.0 % GROUP);
        }
        None
    }

    /// The last packet from `first` to before `end` with a bit in the bitmap `of`. The range is not
    /// longer than the ring.
    pub(super) fn find_last(
        &self,
        first: Psn,
        end: Psn,
        of: impl Fn(&Group) -> u64,
    ) -> Option<Psn> {
        let mut left = end.since(first);
        while left > 0 {
            let at = first.add(left as u32 - 1);
            let found = of(self.group(at)) << (GROUP - 1 - at.0 % GROUP);
            if found != 0 {
                left -= found.leading_zeros() as i32;
                return (left > 0).then(|| first.add(left as u32 - 1));
            }
            left -= (at.0 % GROUP) as i32 + 1;
        }
        None
    }
}

/// The bit of `psn` in its group.
#[inline(always)]
const fn bit(psn: Psn) -> u64 {
    1 << (psn.0 % GROUP)
}

/// The rings of all sessions of a node.
#[derive(Debug, Default)]
pub(super) struct Rings {
    all: Vec<Ring>,
    /// Unused rings, by size.
    spare: [Vec<RingIdx>; SIZES],
}

impl Rings {
    /// Allocates a ring of the smallest size, without records.
    #[inline(always)]
    pub(super) fn take(&mut self) -> RingIdx {
        self.spare[0].pop().unwrap_or_else(|| self.make(0))
    }

    /// Releases ring `at`, which has no record left.
    #[inline(always)]
    pub(super) fn release(&mut self, at: RingIdx) {
        let size = self.all[at.at()].0.len().trailing_zeros();
        self.spare[size as usize].push(at);
    }

    /// Stores the record of `psn` in ring `at`, whose oldest record is that of `first`. Returns the
    /// ring that holds the records: a larger one if the range did not fit.
    #[inline(always)]
    pub(super) fn put(&mut self, at: RingIdx, first: Psn, psn: Psn, record: SentIdx) -> RingIdx {
        let span = psn.since(first) as u32;
        if span < self[at].slots() {
            self[at].put(psn, record);
            return at;
        }
        let at = self.widen(at, (first, psn), span);
        self[at].put(psn, record);
        at
    }

    #[cold]
    #[inline(never)]
    fn widen(&mut self, at: RingIdx, (first, end): (Psn, Psn), span: u32) -> RingIdx {
        let size = (span / GROUP + 1).next_power_of_two().trailing_zeros();
        let wide = self.spare[size as usize].pop().unwrap_or_else(|| self.make(size));
        let mut next = first;
        while let Some(psn) = self[at].find(next, end, |group| group.kept) {
            next = psn.next();
            let record = self[at].record(psn);
            self[wide].put(psn, record);
            let (from, bit) = self[at].slot(psn);
            let (sacked, lost) = (from.sacked & bit, from.lost & bit);
            from.kept &= !bit;
            from.sacked &= !bit;
            from.lost &= !bit;
            let (to, _) = self[wide].slot(psn);
            to.sacked |= sacked;
            to.lost |= lost;
        }
        self.release(at);
        wide
    }

    #[cold]
    #[inline(never)]
    fn make(&mut self, size: u32) -> RingIdx {
        self.all.push(Ring::new(1 << size));
        RingIdx::of(self.all.len() as u32 - 1)
    }
}

impl std::ops::Index<RingIdx> for Rings {
    type Output = Ring;

    #[inline(always)]
    fn index(&self, at: RingIdx) -> &Ring {
        &self.all[at.at()]
    }
}

impl std::ops::IndexMut<RingIdx> for Rings {
    #[inline(always)]
    fn index_mut(&mut self, at: RingIdx) -> &mut Ring {
        &mut self.all[at.at()]
    }
}

#[cfg(test)]
impl Rings {
    /// Number of rings, in use or not.
    pub(super) fn count(&self) -> usize {
        self.all.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Goal: a ring is a map from the PSNs in flight to records, wherever the PSNs begin and
        /// however far the ring has grown.
        #[test]
        fn a_ring_is_a_map(
            begin in prop_oneof![Just(0), Just(u32::MAX - 70), any::<u32>()],
            steps in prop::collection::vec((0u32..90, any::<bool>()), 1..80),
        ) {
            let mut rings = Rings::default();
            let mut at = rings.take();
            let mut map = BTreeMap::new();
            let (mut next, mut widest) = (0_u32, 0);
            for (gap, drops) in steps {
                if drops && map.len() > 1 {
                    let (&oldest, _) = map.first_key_value().expect("two");
                    map.remove(&oldest);
                    let (group, bit) = rings[at].slot(Psn(begin).add(oldest));
                    group.kept &= !bit;
                    group.lost &= !bit;
                }
                next += gap;
                let first = map.first_key_value().map_or(next, |(&oldest, _)| oldest);
                let (psn, first) = (Psn(begin).add(next), Psn(begin).add(first));
                at = rings.put(at, first, psn, SentIdx::of(7 * next));
                let (span, slots) = (psn.since(first) as u32 + 1, rings[at].slots());
                widest = widest.max(span);
                // Room for all, and at most twice the necessary slots.
                prop_assert!(span <= slots && slots <= (2 * widest).max(64), "{} {}", span, slots);
                if gap % 3 == 0 {
                    let (group, bit) = rings[at].slot(psn);
                    group.lost |= bit;
                }
                map.insert(next, gap % 3 == 0);
                next += 1;
                let end = Psn(begin).add(next);
                let (ring, mut seen) = (&rings[at], first);
                for (&n, &lost) in &map {
                    let psn = Psn(begin).add(n);
                    prop_assert_eq!(ring.find(seen, end, |group| group.kept), Some(psn));
                    prop_assert_eq!(ring.find(seen, psn, |group| group.kept), None);
                    prop_assert_eq!(ring.find_last(seen, psn, |group| group.kept), None);
                    prop_assert_eq!(ring.record(psn), SentIdx::of(7 * n));
                    prop_assert_eq!(ring.is(psn, |group| group.lost), lost);
                    seen = psn.next();
                }
                prop_assert_eq!(ring.find(seen, end, |group| group.kept), None);
                let last = map.iter().rev().find(|&(_, &lost)| !lost);
                let last = last.map(|(&n, _)| Psn(begin).add(n));
                prop_assert_eq!(ring.find_last(first, end, Group::under_way), last);
                let bits = ring.bits(first, |group| group.kept);
                for d in (0..64).take_while(|&d| end.since(first.add(d)) > 0) {
                    let kept = map.contains_key(&first.0.wrapping_sub(begin).wrapping_add(d));
                    prop_assert_eq!(bits >> d & 1 == 1, kept);
                }
            }
        }
    }
}
