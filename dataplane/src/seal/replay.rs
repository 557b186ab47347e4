//! The replay window: the counters seen in one direction, and the reconstruction of a 64-bit
//! counter from the 32 bits in a frame.

/// Counters below the highest that are tracked. A frame with an older counter is refused; its
/// packet is retransmitted under a new counter if needed.
pub(super) const WINDOW: u64 = 1024;

const WORDS: usize = (WINDOW / 64) as usize;

/// The counters of opened frames.
#[derive(Debug)]
pub(super) struct ReplayWindow {
    /// The highest seen counter plus one.
    next: u64,
    /// Bit `counter % WINDOW`, for the `WINDOW` counters below `next`.
    seen: [u64; WORDS],
}

impl ReplayWindow {
    pub(super) const fn new() -> Self {
        Self { next: 0, seen: [0; WORDS] }
    }

    /// The counter with these low 32 bits that is nearest to the next expected one.
    pub(super) fn whole(&self, low: u32) -> u64 {
        const SPAN: u64 = 1 << 32;
        let guess = self.next & !(SPAN - 1) | u64::from(low);
        if guess + SPAN / 2 <= self.next {
            guess.saturating_add(SPAN)
        } else if guess > self.next + SPAN / 2 && guess >= SPAN {
            guess - SPAN
        } else {
            guess
        }
    }

    /// Whether a frame with this counter may be opened: the counter is new and not below the
    /// window.
    pub(super) fn admits(&self, counter: u64) -> bool {
        counter >= self.next
            || self.next - counter <= WINDOW && self.seen[word(counter)] & bit(counter) == 0
    }

    /// Marks an admitted counter as seen, after the frame was authenticated.
    pub(super) fn note(&mut self, counter: u64) {
        if counter >= self.next {
            if counter - self.next >= WINDOW {
                self.seen = [0; WORDS];
            } else {
                for skipped in self.next..counter {
                    self.seen[word(skipped)] &= !bit(skipped);
                }
            }
            self.next = counter + 1;
        }
        self.seen[word(counter)] |= bit(counter);
    }
}

fn word(counter: u64) -> usize {
    (counter % WINDOW / 64) as usize
}

fn bit(counter: u64) -> u64 {
    1 << (counter % 64)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compared with a set of all seen counters.
        #[test]
        fn each_counter_is_admitted_once(
            start in prop_oneof![Just(0u64), 0u64..1 << 33],
            steps in proptest::collection::vec((-1500i64..1500, any::<bool>()), 1..400),
        ) {
            let mut window = ReplayWindow::new();
            let (mut seen, mut top) = (HashSet::new(), None::<u64>);
            let mut at = start;
            for (step, big) in steps {
                let step = if big { step } else { step / 100 };
                at = at.saturating_add_signed(step);
                let fresh = top.is_none_or(|top| at + WINDOW > top) && !seen.contains(&at);
                prop_assert_eq!(window.admits(at), fresh, "{}", at);
                if fresh {
                    window.note(at);
                    seen.insert(at);
                    top = top.max(Some(at));
                }
            }
        }

        /// Reconstruction from the low half, within a distance of 2^31.
        #[test]
        fn a_counter_is_found_again(
            next in prop_oneof![0u64..5, 0u64..1 << 40, (1u64 << 32) - 5..(1 << 32) + 5],
            away in prop_oneof![-3i64..3, -(1i64 << 31) + 1..(1 << 31) - 1],
        ) {
            let window = ReplayWindow { next, seen: [0; WORDS] };
            let counter = next.checked_add_signed(away);
            prop_assume!(counter.is_some());
            let counter = counter.unwrap();
            prop_assert_eq!(window.whole(counter as u32), counter);
        }
    }
}
