//! The switch's forwarding table: station address to segment, with the station's frame counters.

use super::StationFrames;
use crate::port::Station;

/// Least entries of the table, and entries per station: a load of at most a quarter keeps probe
/// sequences short.
const ENTRIES_MIN: usize = 4096;
const ENTRIES_PER_STATION: usize = 4;

/// The segment and user of a station.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    /// Index in [`Switch::segments`](super::Switch).
    pub(super) segment: usize,
    /// The user that the station's process runs as.
    pub(super) uid: u32,
}

/// One slot of the hash table.
#[derive(Clone, Copy, Default)]
struct Entry {
    /// [`Station::word`]; 0 in a free entry, since no station has that.
    key: u64,
    owner: Option<Owner>,
    frames: StationFrames,
}

/// Open addressing with linear probing.
pub(super) struct ForwardingTable {
    /// A power of two of entries, and one more at the end: the sink for counts of unknown
    /// addresses.
    entries: Box<[Entry]>,
    /// The key of the last lookup, and its entry's index.
    last_lookup: (u64, usize),
    /// Number of stations.
    count: usize,
}

impl Default for ForwardingTable {
    fn default() -> Self {
        Self::of(ENTRIES_MIN)
    }
}

impl ForwardingTable {
    fn of(count: usize) -> Self {
        let entries = vec![Entry::default(); count + 1].into_boxed_slice();
        Self { entries, last_lookup: (0, count), count: 0 }
    }

    /// Replaces the contents by `stations`; counters of those that stay are kept. Of two stations
    /// with one address the first gets the entry.
    pub(super) fn rebuild(&mut self, stations: &[(Station, Owner)]) {
        let count = (stations.len() * ENTRIES_PER_STATION).next_power_of_two().max(ENTRIES_MIN);
        let old = std::mem::replace(self, Self::of(count));
        for &(station, owner) in stations {
            let key = station.word();
            let entry = self.probe(key).find(|&i| [0, key].contains(&self.entries[i].key));
            let entry = &mut self.entries[entry.expect("more entries than stations")];
            if entry.owner.is_none() && key != 0 {
                *entry = Entry { key, owner: Some(owner), frames: old.frames(key) };
            }
        }
        self.last_lookup = (0, count);
        self.count = stations.len();
    }

    /// Number of stations.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The owner of an address.
    #[inline]
    pub(super) fn owner(&self, key: u64) -> Option<Owner> {
        self.entries[self.index_of(key)].owner
    }

    /// Counters of a station; zeros for an unknown address.
    pub(super) fn frames(&self, key: u64) -> StationFrames {
        let entry = &self.entries[self.index_of(key)];
        entry.owner.map_or_else(StationFrames::default, |_| entry.frames)
    }

    /// As [`owner`](Self::owner), with the station's counters. For an unknown address they are the
    /// sink's, which nobody reads.
    #[inline]
    pub(super) fn lookup_mut(&mut self, key: u64) -> (Option<Owner>, &mut StationFrames) {
        if self.last_lookup.0 != key {
            self.last_lookup = (key, self.index_of(key));
        }
        let entry = &mut self.entries[self.last_lookup.1];
        (entry.owner, &mut entry.frames)
    }

    /// Index of an address's entry; that of the sink if no station has the address.
    fn index_of(&self, key: u64) -> usize {
        let ended = self.probe(key).find(|&i| [0, key].contains(&self.entries[i].key));
        ended.filter(|&i| key != 0 && self.entries[i].key == key).unwrap_or(self.entries.len() - 1)
    }

    /// Indices of the probe sequence for `key`.
    #[inline]
    fn probe(&self, key: u64) -> impl Iterator<Item = usize> + use<> {
        let count = self.entries.len() - 1;
        let first = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - count.ilog2())) as usize;
        (first..first + count).map(move |i| i & (count - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: counters stay with their station; frames from or to an unknown address are counted for
    /// no station, also not for one that gets the address later.
    #[test]
    fn counts_are_of_a_station_alone() {
        let station = |n| Station::at([2, 0, 0, 0, 0, n]);
        let of = |n| (station(n), Owner { segment: 0, uid: 1 });
        let mut forwarding = ForwardingTable::default();
        forwarding.rebuild(&[of(1)]);
        forwarding.lookup_mut(station(1).word()).1.sent = 5;
        let (owner, sink) = forwarding.lookup_mut(station(9).word());
        assert_eq!(owner, None);
        sink.spoofed = 7;
        forwarding.rebuild(&[of(1), of(2)]);
        assert_eq!(forwarding.frames(station(1).word()).sent, 5);
        for n in [2, 9] {
            assert_eq!(forwarding.frames(station(n).word()), StationFrames::default(), "{n}");
        }
        forwarding.rebuild(&[of(2)]);
        forwarding.rebuild(&[of(1), of(2)]);
        assert_eq!(forwarding.frames(station(1).word()), StationFrames::default());
    }
}
