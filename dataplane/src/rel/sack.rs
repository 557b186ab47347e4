//! The receive window: which packets beyond the next in order have arrived.
//!
//! A bitmap ring by PSN. A session has one only while a packet is missing; released bitmaps are
//! kept for other sessions.

use std::mem;

use crate::plant::{Bug, planted};
use crate::psn::Psn;

/// Most SACK words of a window.
pub const SACK_WORDS: usize = super::congestion::WINDOW as usize / 64;

/// Bitmap of the packets that have arrived, from the next in order on.
#[derive(Debug, Default)]
pub struct RcvBitmap {
    /// Bit `psn % 64` of word `psn / 64`, modulo the ring's length; empty if no packet has arrived.
    words: Box<[u64]>,
    /// Bits that are set.
    count: u16,
}

/// Unused bitmaps.
#[derive(Debug)]
pub struct BitmapPool {
    spare: Vec<Box<[u64]>>,
    words: usize,
}

impl BitmapPool {
    /// A pool of bitmaps for windows of up to `window` packets, a power of two from 64 on.
    pub fn new(window: u32) -> Self {
        debug_assert!(window.is_power_of_two() && window >= 64);
        Self { spare: Vec::new(), words: window as usize / 64 }
    }
}

impl RcvBitmap {
    /// Marks packet `psn` of the window from `next` on as received. False if it was marked already.
    ///
    /// # Panics
    /// If `psn` is outside of the window: the caller must refuse such a packet before.
    pub fn set(&mut self, (next, psn): (Psn, Psn), pool: &mut BitmapPool) -> bool {
        assert!((psn.since(next) as usize) < 64 * pool.words, "a packet outside of the window");
        if self.words.is_empty() {
            let empty = || vec![0; pool.words].into();
            self.words = pool.spare.pop().unwrap_or_else(empty);
        }
        let (word, bit) = self.place(psn);
        let fresh = self.words[word] & bit == 0;
        self.words[word] |= bit;
        self.count += u16::from(fresh);
        fresh
    }

    /// Whether packet `psn` of the window has arrived.
    #[inline]
    pub fn is_set(&self, psn: Psn) -> bool {
        !self.words.is_empty() && {
            let (word, bit) = self.place(psn);
            self.words[word] & bit != 0
        }
    }

    /// Clears packet `psn` of the window: it is in order now, or was refused.
    #[inline]
    pub fn clear(&mut self, psn: Psn, pool: &mut BitmapPool) {
        if !self.is_set(psn) {
            return;
        }
        let (word, bit) = self.place(psn);
        if !planted(Bug::BitmapNotCleared) {
            self.words[word] &= !bit;
        }
        self.count -= 1;
        if self.count == 0 {
            pool.spare.push(mem::take(&mut self.words));
        }
    }

    /// Whether no packet is marked, so that an ACK needs no SACK.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Writes the window as an ACK carries it to `sack`, as far as there is room, and returns the
    /// number of words up to the last non-zero one.
    ///
    /// Word `i` bit `j` stands for PSN `cack + 1 + 64 i + j`: packet `cack`, the next in order, is
    /// missing by definition and has no bit.
    pub fn sack(&self, cack: Psn, sack: &mut [u64]) -> usize {
        let mut used = 0;
        let first = cack.next();
        let shift = first.0 % 64;
        for (i, word) in sack.iter_mut().enumerate().take(self.words.len()) {
            let at = first.0 / 64 + i as u32;
            // Two shifts, since a shift by 64 would have no effect.
            *word = self.word(at) >> shift | self.word(at.wrapping_add(1)) << (63 - shift) << 1;
            if i + 1 == self.words.len() {
                // The last bit is that of `cack` itself.
                *word &= !(1 << 63);
            }
            if *word != 0 {
                used = i + 1;
            }
        }
        if planted(Bug::SackWordInBytes) {
            return slip(&mut sack[..used]);
        }
        used
    }

    /// Word `at` of the ring, whose index wraps.
    #[inline]
    fn word(&self, at: u32) -> u64 {
        self.words[at as usize & (self.words.len() - 1)]
    }

    #[inline(always)]
    fn place(&self, psn: Psn) -> (usize, u64) {
        ((psn.0 / 64) as usize & (self.words.len() - 1), 1 << (psn.0 % 64))
    }
}

/// [`Bug::SackWordInBytes`]: bit `d` in word `d / 8`, as far as there are words.
#[cold]
fn slip(sack: &mut [u64]) -> usize {
    let was = sack.to_vec();
    sack.fill(0);
    for d in (0..64 * was.len()).filter(|d| was[d / 64] >> (d % 64) & 1 == 1) {
        sack[(d / 8).min(was.len() - 1)] |= 1 << (d % 64);
    }
    was.len()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// The distances from `cack` in a SACK, by its definition.
    fn told(words: &[u64]) -> BTreeSet<u32> {
        assert!(words.last() != Some(&0), "an empty word is sent");
        let bits = (0..words.len() as u32).flat_map(|i| (0..64u32).map(move |j| (i, j)));
        let set = bits.filter(|&(i, j)| words[i as usize] & (1 << j) != 0);
        set.map(|(i, j)| 1 + 64 * i + j).collect()
    }

    /// Applies `ops` to a window of `len` packets from `first` on, and to a set of unwrapped
    /// numbers.
    fn play((len, first): (u32, u32), ops: &[(u8, u32)]) -> Result<(), TestCaseError> {
        let mut pool = BitmapPool::new(len);
        let mut window = RcvBitmap::default();
        let mut rcv_nxt = 0u64;
        let psn = |n: u64| Psn(first.wrapping_add(n as u32));
        let mut arrived: BTreeSet<u64> = BTreeSet::new();
        for &(what, n) in ops {
            match what {
                // Mostly near the front, so that runs occur; else anywhere.
                0..=6 => {
                    let dist = if what < 4 { n % 8 } else { n % len };
                    let at = rcv_nxt + u64::from(dist);
                    let fresh = arrived.insert(at);
                    let place = (psn(rcv_nxt), psn(at));
                    prop_assert_eq!(window.set(place, &mut pool), fresh);
                }
                // Packets that have arrived in order, and some that have not.
                _ => {
                    let more = if what == 9 { n % (len + 10) } else { 0 };
                    while arrived.contains(&rcv_nxt) {
                        arrived.remove(&rcv_nxt);
                        window.clear(psn(rcv_nxt), &mut pool);
                        rcv_nxt += 1;
                    }
                    for _ in 0..more {
                        arrived.remove(&rcv_nxt);
                        window.clear(psn(rcv_nxt), &mut pool);
                        rcv_nxt += 1;
                    }
                }
            }
            let dists: BTreeSet<u32> = arrived.iter().map(|at| (at - rcv_nxt) as u32).collect();
            let is_set = |d: u32| window.is_set(psn(rcv_nxt + u64::from(d)));
            prop_assert!((0..len).all(|d| is_set(d) == dists.contains(&d)));
            prop_assert_eq!(window.is_empty(), dists.is_empty());
            let mut words = [0; SACK_WORDS];
            let used = window.sack(psn(rcv_nxt), &mut words);
            let beyond: BTreeSet<u32> = dists.iter().copied().filter(|&d| d > 0).collect();
            prop_assert_eq!(told(&words[..used]), beyond);
            let mut some = [0; 2];
            let used = window.sack(psn(rcv_nxt), &mut some);
            prop_assert_eq!(&some[..used.max(1)], &words[..used.max(1)], "cut short");
        }
        prop_assert!(pool.spare.len() < 2, "one bitmap was enough");
        Ok(())
    }

    type Window = (u32, u32);

    fn moves() -> impl Strategy<Value = (Window, Vec<(u8, u32)>)> {
        let len = prop_oneof![Just(64), Just(128), Just(256), Just(4096)];
        let first = prop_oneof![Just(0), Just(u32::MAX - 100), any::<u32>()];
        ((len, first), prop::collection::vec((0u8..10, any::<u32>()), 1..100))
    }

    proptest! {
        #[test]
        fn window_is_a_set((window, ops) in moves()) {
            play(window, &ops)?;
        }
    }

    /// Every single bit at its place on the wire: a division by 8 would misplace all from the ninth
    /// on.
    #[test]
    fn each_packet_has_its_bit() {
        let (mut pool, cack) = (BitmapPool::new(4096), Psn(u32::MAX - 70));
        for dist in 1..4096 {
            let mut window = RcvBitmap::default();
            window.set((cack, cack.add(dist)), &mut pool);
            let mut words = [0; SACK_WORDS];
            let used = window.sack(cack, &mut words);
            assert_eq!(used, (dist as usize - 1) / 64 + 1);
            assert_eq!(told(&words[..used]), BTreeSet::from([dist]));
        }
    }

    #[test]
    #[should_panic(expected = "outside of the window")]
    fn a_packet_past_the_window_panics() {
        RcvBitmap::default().set((Psn(7), Psn(71)), &mut BitmapPool::new(64));
    }

    #[cfg(feature = "plant")]
    #[test]
    fn the_model_sees_the_planted_bugs() {
        use proptest::test_runner::{Config, TestRunner};
        for bug in [Bug::SackWordInBytes, Bug::BitmapNotCleared] {
            let config = Config { failure_persistence: None, ..Config::with_cases(1_000) };
            let mut runner = TestRunner::new(config);
            let (found, reached) = crate::plant::with(bug, || {
                runner.run(&moves(), |(window, ops)| {
                    // `told` asserts the general properties of a SACK.
                    std::panic::catch_unwind(|| play(window, &ops))
                        .unwrap_or_else(|_| Err(TestCaseError::fail("panicked")))
                })
            });
            assert!(reached && found.is_err(), "{bug:?}");
        }
    }
}
