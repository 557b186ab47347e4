//! Completion counters.

/// Counts successes and failures of operations. Both wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cntr {
    value: u64,
    err: u64,
    signal: bool,
}

impl Cntr {
    /// `fi_cntr_add`, and every success.
    #[inline]
    pub(crate) fn add(&mut self, n: u64) {
        self.value = self.value.wrapping_add(n);
        self.signal = true;
    }

    /// `fi_cntr_adderr`, and every failure.
    #[inline]
    pub(crate) fn adderr(&mut self, n: u64) {
        self.err = self.err.wrapping_add(n);
        self.signal = true;
    }

    /// `fi_cntr_set`.
    pub(crate) fn set(&mut self, value: u64) {
        self.value = value;
        self.signal = true;
    }

    /// `fi_cntr_seterr`.
    pub(crate) fn seterr(&mut self, err: u64) {
        self.err = err;
        self.signal = true;
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

    /// Whether anything changed since the last call: a thread may wait for it.
    #[inline]
    pub(crate) fn take_signal(&mut self) -> bool {
        std::mem::take(&mut self.signal)
    }
}
