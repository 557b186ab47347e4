//! Completion counters.

/// Counts successes and failures of operations. Both wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cntr {
    value: u64,
    err: u64,
}

impl Cntr {
    /// `fi_cntr_add`, and every success.
    #[inline]
    pub(crate) fn add(&mut self, n: u64) {
        self.value = self.value.wrapping_add(n);
    }

    /// `fi_cntr_adderr`, and every failure.
    #[inline]
    pub(crate) fn adderr(&mut self, n: u64) {
        self.err = self.err.wrapping_add(n);
    }

    /// `fi_cntr_set`.
    pub(crate) fn set(&mut self, value: u64) {
        self.value = value;
    }

    /// `fi_cntr_seterr`.
    pub(crate) fn seterr(&mut self, err: u64) {
        self.err = err;
    }

    /// Successes.
    #[inline]
    pub(crate) fn read(&self) -> u64 {
        self.value
    }

    /// Failures.
    #[inline]
    pub(crate) fn readerr(&self) -> u64 {
        self.err
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_both_kinds_apart() {
        let mut cntr = Cntr::default();
        type Change = (fn(&mut Cntr), (u64, u64));
        let changes: [Change; 6] = [
            (|c| c.add(2), (2, 0)),
            (|c| c.adderr(3), (2, 3)),
            (|c| c.set(u64::MAX), (u64::MAX, 3)),
            (|c| c.add(2), (1, 3)),
            (|c| c.seterr(u64::MAX), (1, u64::MAX)),
            (|c| c.adderr(1), (1, 0)),
        ];
        for (change, want) in changes {
            change(&mut cntr);
            assert_eq!((cntr.read(), cntr.readerr()), want);
        }
    }
}
