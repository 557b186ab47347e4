//! Addresses behind the IOMMU: which there are, and which are in use.
//!
//! The kernel reports ranges. On Intel's platforms they leave out the window of interrupts
//! (0xfee00000) and end at the width of the IOMMU, 39 or 48 bits, so an address of the process does
//! not do for one of the device.

/// What of a NIC's addresses is in use.
#[derive(Clone, Debug)]
pub struct IovaSpace {
    /// Free ranges, first and last byte, in order, no two adjacent.
    free: Vec<(u64, u64)>,
}

/// Below this nothing is given out, so that an address that a device made up of a zero faults.
const FLOOR: u64 = 1 << 20;

impl IovaSpace {
    /// The space of the ranges (first and last byte) that the kernel reports, in any order.
    pub fn new(ranges: &[(u64, u64)]) -> Self {
        let mut free: Vec<(u64, u64)> = ranges
            .iter()
            .map(|&(first, last)| (first.max(FLOOR), last))
            .filter(|(first, last)| first <= last)
            .collect();
        free.sort_unstable();
        // Overlapping ranges would be the kernel's bug, and giving an address twice ours.
        let mut at = 0;
        free.retain_mut(|range| {
            range.0 = range.0.max(at);
            let is_sound = range.0 <= range.1;
            if is_sound {
                at = range.1.saturating_add(1);
            }
            is_sound
        });
        Self { free }
    }

    /// Takes `len` addresses from a multiple of `align` on, the lowest there are, or `None`.
    ///
    /// # Panics
    /// If `len` is 0 or `align` is no power of two.
    pub fn take(&mut self, len: u64, align: u64) -> Option<u64> {
        assert!(len > 0 && align.is_power_of_two());
        for i in 0..self.free.len() {
            let (first, last) = self.free[i];
            let Some(start) = first.checked_next_multiple_of(align) else { continue };
            let Some(end) = start.checked_add(len - 1) else { continue };
            if end > last {
                continue;
            }
            self.free.remove(i);
            if end < last {
                self.free.insert(i, (end + 1, last));
            }
            if first < start {
                self.free.insert(i, (first, start - 1));
            }
            return Some(start);
        }
        None
    }

    /// Takes `len` addresses from `start` on back.
    ///
    /// # Panics
    /// If one of them was not taken.
    pub fn put(&mut self, start: u64, len: u64) {
        let end = start + (len - 1);
        let i = self.free.partition_point(|&(first, _)| first < start);
        let apart = |i: usize| self.free.get(i).is_none_or(|&(first, _)| end < first);
        assert!(apart(i) && (i == 0 || self.free[i - 1].1 < start), "addresses that were free");
        self.free.insert(i, (start, end));
        if i + 1 < self.free.len() && self.free[i + 1].0 - 1 == end {
            self.free[i].1 = self.free.remove(i + 1).1;
        }
        if i > 0 && self.free[i - 1].1 + 1 == start {
            self.free[i - 1].1 = self.free.remove(i).1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What an Intel IOMMU of 39 bits reports.
    const INTEL_39: [(u64, u64); 2] = [(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)];

    #[test]
    fn the_window_of_interrupts_is_never_given_out() {
        let mut space = IovaSpace::new(&INTEL_39);
        let mut last = 0;
        for _ in 0..40 {
            let at = space.take(1 << 28, 1 << 21).unwrap();
            assert!(at >= FLOOR && at >= last && at.is_multiple_of(1 << 21));
            assert!(at + (1 << 28) <= 0xfee0_0000 || at >= 0xfef0_0000, "{at:#x}");
            last = at + (1 << 28);
        }
        assert_eq!(space.take(1 << 39, 4096), None);
    }

    #[test]
    fn ranges_that_make_no_sense_are_cut() {
        let mut space = IovaSpace::new(&[(0x50_0000, 0x40_0000), (0, 0x1f_ffff), (0x18_0000, !0)]);
        assert_eq!(space.take(0x10_0000, 4096), Some(0x10_0000));
        assert_eq!(space.take(0x10_0000, 4096), Some(0x20_0000));
        assert_eq!(IovaSpace::new(&[]).take(1, 1), None);
    }

    proptest! {
        /// Goal: no address is given twice, all come back. Method: random takes and puts against a
        /// list of what is held.
        #[test]
        fn addresses_are_apart_and_come_back(
            ops in prop::collection::vec((any::<bool>(), 1..9_u64, 0..4_u32, 0..100_usize), 1..200)
        ) {
            let whole = [(FLOOR, FLOOR + (64 << 12) - 1), (1 << 32, (1 << 32) + (16 << 12) - 1)];
            let mut space = IovaSpace::new(&whole);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (take, pages, shift, n) in ops {
                if take {
                    let Some(at) = space.take(pages << 12, 4096 << shift) else { continue };
                    let end = at + (pages << 12);
                    prop_assert!(whole.iter().any(|&(a, b)| a <= at && end - 1 <= b));
                    prop_assert_eq!(at % (4096 << shift), 0);
                    prop_assert!(held.iter().all(|&(a, len)| end <= a || a + len <= at));
                    held.push((at, pages << 12));
                } else if !held.is_empty() {
                    let (at, len) = held.swap_remove(n % held.len());
                    space.put(at, len);
                }
            }
            for (at, len) in held {
                space.put(at, len);
            }
            prop_assert_eq!(space.free, whole);
        }
    }
}
