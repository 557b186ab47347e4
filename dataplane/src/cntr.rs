//! Completion counters (`fi_cntr`).

/// What the value of a counter counts (`enum fi_cntr_events`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CntrEvents {
    /// Operations that succeeded (`FI_CNTR_EVENTS_COMP`).
    #[default]
    Comp,
    /// Bytes that successful operations transferred (`FI_CNTR_EVENTS_BYTES`).
    Bytes,
}

/// An increment of a counter: operations that succeeded, and the bytes that they transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) ops: u64,
    pub(crate) bytes: u64,
}

impl Done {
    /// A collective call: its bytes are not counted (fi_cntr(3), `FI_CNTR_EVENTS_BYTES`).
    pub(crate) const CALL: Self = Self::one(0);

    /// One operation.
    #[inline(always)]
    pub(crate) const fn one(bytes: u64) -> Self {
        Self { ops: 1, bytes }
    }
}

/// A counter of successes (or their bytes) and failures. Both values wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cntr {
    value: u64,
    err: u64,
    events: CntrEvents,
}

impl Cntr {
    /// A counter of `events`, with both values 0.
    pub(crate) fn of(events: CntrEvents) -> Self {
        Self { events, ..Self::default() }
    }

    /// Whether the value is a number of bytes.
    #[inline]
    pub(crate) fn counts_bytes(&self) -> bool {
        self.events == CntrEvents::Bytes
    }

    /// Counts successes.
    #[inline]
    pub(crate) fn count(&mut self, done: Done) {
        self.add(if self.counts_bytes() { done.bytes } else { done.ops });
    }

    /// `fi_cntr_add`.
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

    /// Successes, or their bytes.
    #[inline]
    pub(crate) fn read(&self) -> u64 {
        self.value
    }

    /// Number of failures.
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

    #[test]
    fn counts_operations_or_their_bytes() {
        for (events, want) in [(CntrEvents::Comp, 3), (CntrEvents::Bytes, 1_007)] {
            let mut cntr = Cntr::of(events);
            cntr.count(Done::one(7));
            cntr.count(Done { ops: 2, bytes: 1_000 });
            cntr.adderr(1);
            assert_eq!((cntr.read(), cntr.readerr()), (want, 1));
        }
    }
}
