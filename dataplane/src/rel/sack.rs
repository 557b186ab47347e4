//! The receive window: which packets from `rcv_nxt` on have arrived.
//!
//! Counts in distances, `psn - rcv_nxt`, and knows neither number: the caller moves `rcv_nxt` and
//! the window together.

use crate::plant::{Bug, planted};

/// What has arrived of the 256 packets from `rcv_nxt` on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RcvBitmap {
    words: [u64; Self::WORDS],
}

impl RcvBitmap {
    /// Packets in the window.
    pub const LEN: u32 = 64 * Self::WORDS as u32;

    const WORDS: usize = 4;

    /// A window in which nothing has arrived.
    pub const fn new() -> Self {
        Self { words: [0; Self::WORDS] }
    }

    /// Notes the packet `dist` after `rcv_nxt`, 0 to 255. False if it had arrived already.
    ///
    /// # Panics
    /// If `dist` is outside the window: the caller has to refuse such a packet before.
    #[inline]
    pub fn set(&mut self, dist: u32) -> bool {
        let word = &mut self.words[dist as usize / 64];
        let bit = 1 << (dist % 64);
        let fresh = *word & bit == 0;
        *word |= bit;
        fresh
    }

    /// Forgets that the packet `rcv_nxt` has arrived: it was refused.
    pub fn clear_first(&mut self) {
        self.words[0] &= !1;
    }

    /// Whether the packet `dist` after `rcv_nxt` has arrived; false outside the window.
    #[inline]
    pub fn is_set(&self, dist: u32) -> bool {
        self.words.get(dist as usize / 64).is_some_and(|w| w >> (dist % 64) & 1 == 1)
    }

    /// Moves the window on by `n` packets, however many. What falls out is forgotten.
    #[inline]
    pub fn advance(&mut self, n: u32) {
        let skip = n as usize / 64;
        let shift = n % 64;
        let moved = if planted(Bug::BitmapNotCleared) { 1 } else { Self::WORDS };
        for i in 0..moved {
            let low = self.words.get(i + skip).copied().unwrap_or(0) >> shift;
            let above = if planted(Bug::BitmapNotCleared) { None } else { Some(i + skip + 1) };
            let high = above.and_then(|i| self.words.get(i)).copied().unwrap_or(0);
            // Two shifts: one by 64 would be none at all.
            self.words[i] = low | (high << (63 - shift) << 1);
        }
    }

    /// How many packets from `rcv_nxt` on have arrived without a gap, 0 to 256.
    #[inline]
    pub fn leading_ones(&self) -> u32 {
        let mut run = 0;
        for word in self.words {
            let ones = word.trailing_ones();
            run += ones;
            if ones < 64 {
                break;
            }
        }
        run
    }

    /// Moves the window past the packets that have arrived without a gap and says how many:
    /// `rcv_nxt` moves on by as much.
    #[inline]
    pub fn take_run(&mut self) -> u32 {
        let run = self.leading_ones();
        if run > 0 {
            self.advance(run);
        }
        run
    }

    /// Whether nothing in the window has arrived, so an ACK needs no SACK.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.words == [0; Self::WORDS]
    }

    /// The window as an ACK carries it, and how many of the words it takes, 0 to 4.
    ///
    /// Word `i` bit `j` stands for PSN `cack + 1 + 64 i + j`, with `cack` = `rcv_nxt`: that packet
    /// itself is missing by definition and has no bit.
    #[inline]
    pub fn sack_words(&self) -> (u8, [u64; 4]) {
        let mut sack = *self;
        sack.advance(1);
        if planted(Bug::SackWordInBytes) {
            sack = sack.slipped();
        }
        let n = Self::WORDS - sack.words.iter().rev().take_while(|&&w| w == 0).count();
        (n as u8, sack.words)
    }
    /// [`Bug::SackWordInBytes`]: bit `d` in word `d / 8`, as far as there are words.
    #[cold]
    fn slipped(&self) -> Self {
        let mut slipped = Self::new();
        for d in (0..Self::LEN).filter(|&d| self.is_set(d)) {
            slipped.words[(d as usize / 8).min(Self::WORDS - 1)] |= 1 << (d % 64);
        }
        slipped
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// The distances a SACK tells of, read off its definition.
    fn told(n: u8, words: [u64; 4]) -> BTreeSet<u32> {
        assert!(words[n.into()..].iter().all(|&w| w == 0), "a word in use is not sent");
        assert!(n == 0 || words[usize::from(n) - 1] != 0, "an empty word is sent");
        let bits = (0..4u32).flat_map(|i| (0..64u32).map(move |j| (i, j)));
        let set = bits.filter(|&(i, j)| words[i as usize] & (1 << j) != 0);
        set.map(|(i, j)| 1 + 64 * i + j).collect()
    }

    /// Plays `ops` on a window and on a set of sequence numbers that do not wrap.
    fn play(ops: &[(u8, u32)]) -> Result<(), TestCaseError> {
        let mut window = RcvBitmap::new();
        let mut rcv_nxt = 0u64;
        let mut arrived: BTreeSet<u64> = BTreeSet::new();
        for &(what, n) in ops {
            match what {
                // Mostly near the front, so that runs come about; else anywhere.
                0..=6 => {
                    let dist = if what < 4 { n % 8 } else { n % RcvBitmap::LEN };
                    let fresh = arrived.insert(rcv_nxt + u64::from(dist));
                    prop_assert_eq!(window.set(dist), fresh);
                }
                7 | 8 => {
                    let run = (rcv_nxt..).take_while(|psn| arrived.contains(psn)).count() as u32;
                    prop_assert_eq!(window.leading_ones(), run);
                    prop_assert_eq!(window.take_run(), run);
                    rcv_nxt += u64::from(run);
                }
                _ => {
                    let n = if n % 4 == 0 { n % 600 } else { n % 70 };
                    window.advance(n);
                    rcv_nxt += u64::from(n);
                }
            }
            arrived.retain(|&psn| psn >= rcv_nxt);
            let dists: BTreeSet<u32> = arrived.iter().map(|psn| (psn - rcv_nxt) as u32).collect();
            prop_assert!((0..300).all(|d| window.is_set(d) == dists.contains(&d)));
            prop_assert_eq!(window.is_empty(), dists.is_empty());
            let (n, words) = window.sack_words();
            let beyond: BTreeSet<u32> = dists.iter().copied().filter(|&d| d > 0).collect();
            prop_assert_eq!(told(n, words), beyond);
        }
        Ok(())
    }

    fn ops() -> impl Strategy<Value = Vec<(u8, u32)>> {
        prop::collection::vec((0u8..10, any::<u32>()), 1..200)
    }

    proptest! {
        #[test]
        fn window_is_a_set(ops in ops()) {
            play(&ops)?;
        }
    }

    #[test]
    fn the_whole_window_is_one_run() {
        for skip in 0..RcvBitmap::LEN {
            let mut window = RcvBitmap::new();
            for dist in (0..RcvBitmap::LEN).filter(|&d| d != skip) {
                assert!(window.set(dist) && !window.set(dist));
            }
            assert_eq!(window.leading_ones(), skip);
            assert!(window.set(skip));
            assert_eq!(window.take_run(), 256);
            assert!(window.is_empty());
        }
    }

    /// Every single bit at its place on the wire: dividing by 8 would move all from the ninth on.
    #[test]
    fn each_packet_has_its_bit() {
        for dist in 1..RcvBitmap::LEN {
            let mut window = RcvBitmap::new();
            window.set(dist);
            let mut want = [0; 4];
            want[(dist as usize - 1) / 64] = 1 << ((dist - 1) % 64);
            assert_eq!(window.sack_words(), ((dist as u8 - 1) / 64 + 1, want), "{dist}");
        }
        let mut window = RcvBitmap::new();
        window.set(0);
        assert_eq!(window.sack_words(), (0, [0; 4]));
    }

    #[test]
    #[should_panic]
    fn a_packet_past_the_window_panics() {
        RcvBitmap::new().set(RcvBitmap::LEN);
    }

    #[cfg(feature = "plant")]
    #[test]
    fn the_model_sees_the_planted_bugs() {
        use proptest::test_runner::{Config, TestRunner};
        for bug in [Bug::SackWordInBytes, Bug::BitmapNotCleared] {
            let config = Config { failure_persistence: None, ..Config::with_cases(1_000) };
            let mut runner = TestRunner::new(config);
            let (found, reached) = crate::plant::with(bug, || {
                runner.run(&ops(), |ops| {
                    // `told` asserts what a SACK must not look like at all.
                    std::panic::catch_unwind(|| play(&ops))
                        .unwrap_or_else(|_| Err(TestCaseError::fail("panicked")))
                })
            });
            assert!(reached && found.is_err(), "{bug:?}");
        }
    }
}
