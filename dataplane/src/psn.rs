//! Packet sequence numbers, which wrap.

/// A packet sequence number of one session and direction.
///
/// There is no order: on a circle neither of two numbers is the smaller. Code names the base that
/// it measures from, with [`since`](Self::since).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Psn(pub u32);

impl Psn {
    /// The distance from `base` to `self` in packets; negative if `self` comes before. Valid while
    /// the two are less than 2^31 apart; a window keeps them within 4,096.
    #[inline]
    pub const fn since(self, base: Self) -> i32 {
        since(self.0, base.0, u32::BITS)
    }

    /// The number after this one.
    #[inline]
    #[must_use]
    pub const fn next(self) -> Self {
        self.add(1)
    }

    /// The number `n` packets later.
    #[inline]
    #[must_use]
    #[allow(clippy::should_implement_trait)] // a `+` would hide that it wraps
    pub const fn add(self, n: u32) -> Self {
        Self(self.0.wrapping_add(n))
    }
}

/// The signed distance from `b` to `a` on a circle of `2^bits`. The width is a parameter so that a
/// small circle can be tested exhaustively.
#[inline]
const fn since(a: u32, b: u32, bits: u32) -> i32 {
    let unused = u32::BITS - bits;
    ((a.wrapping_sub(b) << unused) as i32) >> unused
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every pair on a circle of 256, compared with counting step by step.
    #[test]
    fn since_is_the_shorter_way_on_a_small_circle() {
        for b in 0..=255u8 {
            let mut a = b;
            for steps in 0..=255i32 {
                let want = if steps < 128 { steps } else { steps - 256 };
                assert_eq!(since(a.into(), b.into(), 8), want, "{a} since {b}");
                a = a.wrapping_add(1);
            }
        }
    }

    #[test]
    fn full_width_crosses_the_wrap() {
        for base in [0u32, 1, 5, u32::MAX, u32::MAX - 100, 1 << 31, (1 << 31) - 1] {
            for d in [0i32, 1, -1, 255, -255, 1024, -1024, i32::MAX, i32::MIN] {
                assert_eq!(Psn(base).add(d as u32).since(Psn(base)), d, "{base} {d}");
            }
        }
        assert_eq!(Psn(u32::MAX).next(), Psn(0));
    }
}
