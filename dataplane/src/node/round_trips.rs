//! A histogram of round trip times. A reader takes the difference of two readings. One for a node,
//! since one for each of thousands of peers would take a page each.

use crate::rel::rtt::RTO_MAX_NS;

/// Exponents of the least and the longest round trip that are told apart: 256 ns, and what the
/// estimate of a session takes at most.
const LEAST: u32 = 8;
const MOST: u32 = RTO_MAX_NS.ilog2();

/// Bits below the highest by which lengths of one power of two are told apart.
const FINE: u32 = 3;

/// See the module. A count is of lengths that differ by an eighth at most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoundTrips {
    counts: [u64; Self::COUNT],
    sum_ns: u64,
}

impl Default for RoundTrips {
    fn default() -> Self {
        Self { counts: [0; Self::COUNT], sum_ns: 0 }
    }
}

impl RoundTrips {
    /// Lengths that are told apart.
    pub const COUNT: usize = ((MOST - LEAST + 1) << FINE) as usize;

    /// Counts a round trip of `ns`.
    #[inline]
    pub(super) fn note(&mut self, ns: u64) {
        let ns = ns.clamp(1 << LEAST, RTO_MAX_NS);
        let high = ns.ilog2();
        let fine = ns >> (high - FINE) & ((1 << FINE) - 1);
        self.counts[((high - LEAST) << FINE) as usize + fine as usize] += 1;
        self.sum_ns += ns;
    }

    /// How many there were of each length.
    pub fn counts(&self) -> &[u64; Self::COUNT] {
        &self.counts
    }

    /// How long all of them took together, ns.
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// The lengths that are counted at `at`, ns. The first has shorter ones too, the last longer.
    pub fn lengths(at: usize) -> std::ops::Range<u64> {
        let bound =
            |at: u64| ((1 << FINE) + (at & ((1 << FINE) - 1))) << (at >> FINE) << (LEAST - FINE);
        bound(at as u64)..bound(at as u64 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a round trip is counted where its length is, and none is lost however long it is.
    #[test]
    fn a_round_trip_is_counted_where_its_length_is() {
        let mut before = RoundTrips::default();
        for ns in (0..200).chain((200..RTO_MAX_NS).step_by(997)).chain([RTO_MAX_NS, u64::MAX]) {
            let mut after = before.clone();
            after.note(ns);
            let at = (0..RoundTrips::COUNT).find(|&i| after.counts[i] != before.counts[i]).unwrap();
            let lengths = RoundTrips::lengths(at);
            assert!(lengths.contains(&ns.clamp(256, RTO_MAX_NS)), "{ns} in {lengths:?}");
            assert!(lengths.end - lengths.start <= lengths.start / 8);
            before = after;
        }
        let ends: Vec<u64> = (0..RoundTrips::COUNT).map(|at| RoundTrips::lengths(at).end).collect();
        let begins: Vec<u64> =
            (1..RoundTrips::COUNT).map(|at| RoundTrips::lengths(at).start).collect();
        assert_eq!(ends[..RoundTrips::COUNT - 1], begins);
    }
}
