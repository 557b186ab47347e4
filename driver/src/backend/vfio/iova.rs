//! Allocator of IO virtual addresses (IOVA).
//!
//! The kernel reports the usable ranges. On Intel's platforms they exclude the MSI window
//! (0xfee00000) and end at the width of the IOMMU, 39 or 48 bits, so virtual addresses of the
//! process cannot be used as IOVAs.

/// The IOVA space of a device.
#[derive(Clone, Debug)]
pub struct IovaSpace {
    /// Free ranges, first and last byte, in order, no two adjacent.
    free: Vec<(u64, u64)>,
}

/// Lowest IOVA that is allocated: a device that uses a zeroed address faults.
const FLOOR: u64 = 1 << 20;

impl IovaSpace {
    /// The space of the inclusive ranges that the kernel reports, in any order.
    pub fn new(ranges: &[(u64, u64)]) -> Self {
        let mut free: Vec<(u64, u64)> = ranges
            .iter()
            .map(|&(first, last)| (first.max(FLOOR), last))
            .filter(|(first, last)| first <= last)
            .collect();
        free.sort_unstable();
        // The kernel should report no overlapping ranges; overlaps are cut, so that no address is
        // allocated twice.
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

    /// Allocates `len` addresses aligned to `align`, the lowest free ones, or returns `None`.
    ///
    /// # Panics
    /// If `len` is 0 or `align` is no power of two.
    pub fn alloc(&mut self, len: u64, align: u64) -> Option<u64> {
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

    /// Frees `len` addresses from `start`.
    ///
    /// # Panics
    /// If one of them was free.
    pub fn free(&mut self, start: u64, len: u64) {
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
            let at = space.alloc(1 << 28, 1 << 21).unwrap();
            assert!(at >= FLOOR && at >= last && at.is_multiple_of(1 << 21));
            assert!(at + (1 << 28) <= 0xfee0_0000 || at >= 0xfef0_0000, "{at:#x}");
            last = at + (1 << 28);
        }
        assert_eq!(space.alloc(1 << 39, 4096), None);
    }

    #[test]
    fn ranges_that_make_no_sense_are_cut() {
        let mut space = IovaSpace::new(&[(0x50_0000, 0x40_0000), (0, 0x1f_ffff), (0x18_0000, !0)]);
        assert_eq!(space.alloc(0x10_0000, 4096), Some(0x10_0000));
        assert_eq!(space.alloc(0x10_0000, 4096), Some(0x20_0000));
        assert_eq!(IovaSpace::new(&[]).alloc(1, 1), None);
    }

    proptest! {
        /// Goal: no address is allocated twice, all are freed in the end. Method: random operations
        /// against a list of what is allocated.
        #[test]
        fn addresses_are_apart_and_come_back(
            ops in prop::collection::vec((any::<bool>(), 1..9_u64, 0..4_u32, 0..100_usize), 1..200)
        ) {
            let whole = [(FLOOR, FLOOR + (64 << 12) - 1), (1 << 32, (1 << 32) + (16 << 12) - 1)];
            let mut space = IovaSpace::new(&whole);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (take, pages, shift, n) in ops {
                if take {
                    let Some(at) = space.alloc(pages << 12, 4096 << shift) else { continue };
                    let end = at + (pages << 12);
                    prop_assert!(whole.iter().any(|&(a, b)| a <= at && end - 1 <= b));
                    prop_assert_eq!(at % (4096 << shift), 0);
                    prop_assert!(held.iter().all(|&(a, len)| end <= a || a + len <= at));
                    held.push((at, pages << 12));
                } else if !held.is_empty() {
                    let (at, len) = held.swap_remove(n % held.len());
                    space.free(at, len);
                }
            }
            for (at, len) in held {
                space.free(at, len);
            }
            prop_assert_eq!(space.free, whole);
        }
    }
}
