//! Why something of DPDK did not work, and what to do about it.

use barewire_dpdk_sys as sys;

/// Why something of DPDK did not work.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) why: String,
    pub(super) mend: String,
    pub(super) errno: i32,
}

impl Failure {
    pub(super) fn new(errno: i32, why: impl Into<String>) -> Self {
        Self { why: why.into(), mend: "see docs/dpdk.md".into(), errno }
    }

    /// With what to do about it.
    pub(super) fn mend(self, mend: impl Into<String>) -> Self {
        Self { mend: mend.into(), ..self }
    }
}

/// `rte_errno` of this thread.
pub(super) fn errno() -> i32 {
    // SAFETY: reads a variable of this thread.
    unsafe { sys::barewire_rte_errno() }
}
