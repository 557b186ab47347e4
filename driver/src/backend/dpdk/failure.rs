//! Errors of DPDK, with a remedy.

use barewire_dpdk_sys as sys;

/// An error of DPDK or of its settings.
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

    /// Sets the remedy, for the user.
    pub(super) fn mend(self, mend: impl Into<String>) -> Self {
        Self { mend: mend.into(), ..self }
    }
}

/// `rte_errno` of this thread.
pub(super) fn errno() -> i32 {
    // SAFETY: reads a variable of this thread.
    unsafe { sys::barewire_rte_errno() }
}
