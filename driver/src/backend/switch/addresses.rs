//! The addresses of a switch's stations, and what was counted of each.

use super::StationFrames;
use crate::port::Station;

/// Places at least, and for each station: so that to look for one is short.
const PLACES_MIN: usize = 4096;
const PLACES_EACH: usize = 4;

/// Where a station is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    /// The number of its segment.
    pub(super) segment: usize,
    /// The user whose it is.
    pub(super) uid: u32,
}

/// What is known of an address.
#[derive(Clone, Copy, Default)]
struct Place {
    /// 0 for none, which no station has.
    key: u64,
    owner: Option<Owner>,
    frames: StationFrames,
}

/// See the module.
pub(super) struct Addresses {
    /// Each at the first free place from its own on; a power of two of them. The last, one more, is
    /// of addresses that no station has.
    places: Box<[Place]>,
    /// The address looked for last, and its place.
    last: (u64, usize),
    /// How many stations there are.
    count: usize,
}

impl Default for Addresses {
    fn default() -> Self {
        Self::of(PLACES_MIN)
    }
}

impl Addresses {
    fn of(count: usize) -> Self {
        let places = vec![Place::default(); count + 1].into_boxed_slice();
        Self { places, last: (0, count), count: 0 }
    }

    /// Has these stations from now on. Of two with one address it is the first's.
    pub(super) fn renew(&mut self, stations: &[(Station, Owner)]) {
        let count = (stations.len() * PLACES_EACH).next_power_of_two().max(PLACES_MIN);
        let were = std::mem::replace(self, Self::of(count));
        for &(station, owner) in stations {
            let key = station.word();
            let place = self.from(key).find(|&i| [0, key].contains(&self.places[i].key));
            let place = &mut self.places[place.expect("more places than stations")];
            if place.owner.is_none() && key != 0 {
                *place = Place { key, owner: Some(owner), frames: were.frames(key) };
            }
        }
        self.last = (0, count);
        self.count = stations.len();
    }

    /// How many stations there are.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Whose an address is.
    #[inline]
    pub(super) fn owner(&self, key: u64) -> Option<Owner> {
        self.places[self.place(key)].owner
    }

    /// What was counted of a station; nothing of an address that no station has.
    pub(super) fn frames(&self, key: u64) -> StationFrames {
        let place = &self.places[self.place(key)];
        place.owner.map_or_else(StationFrames::default, |_| place.frames)
    }

    /// As [`owner`](Self::owner), and what is counted of it: in vain if no station has the address.
    #[inline]
    pub(super) fn look(&mut self, key: u64) -> (Option<Owner>, &mut StationFrames) {
        if self.last.0 != key {
            self.last = (key, self.place(key));
        }
        let place = &mut self.places[self.last.1];
        (place.owner, &mut place.frames)
    }

    /// The place of an address; the last if no station has it.
    fn place(&self, key: u64) -> usize {
        let ended = self.from(key).find(|&i| [0, key].contains(&self.places[i].key));
        ended.filter(|&i| key != 0 && self.places[i].key == key).unwrap_or(self.places.len() - 1)
    }

    /// The places from that of `key` on.
    #[inline]
    fn from(&self, key: u64) -> impl Iterator<Item = usize> + use<> {
        let count = self.places.len() - 1;
        let first = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - count.ilog2())) as usize;
        (first..first + count).map(move |i| i & (count - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: what is counted stays with its station, and what frames from or to an address count
    /// that nobody has is nobody's, whoever comes next.
    #[test]
    fn counts_are_of_a_station_alone() {
        let station = |n| Station::at([2, 0, 0, 0, 0, n]);
        let of = |n| (station(n), Owner { segment: 0, uid: 1 });
        let mut here = Addresses::default();
        here.renew(&[of(1)]);
        here.look(station(1).word()).1.sent = 5;
        let (owner, of_nobody) = here.look(station(9).word());
        assert_eq!(owner, None);
        of_nobody.spoofed = 7;
        here.renew(&[of(1), of(2)]);
        assert_eq!(here.frames(station(1).word()).sent, 5);
        for n in [2, 9] {
            assert_eq!(here.frames(station(n).word()), StationFrames::default(), "{n}");
        }
        here.renew(&[of(2)]);
        here.renew(&[of(1), of(2)]);
        assert_eq!(here.frames(station(1).word()), StationFrames::default());
    }
}
