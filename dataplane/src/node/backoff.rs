//! When a frame is tried again that the port did not take, and that is dear to try.

use crate::types::Instant;

/// A wait that doubles with each refusal.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Backoff {
    /// Before then the frame is not tried.
    pub(super) not_before: Instant,
    /// What the last refusal took; 0 if the frame after it was tried.
    pub(super) wait_ns: u32,
}

impl Backoff {
    /// The first wait: less than a ring of short frames lasts.
    const MIN_NS: u32 = 2_000;
    /// The longest. 2^22 frames, one key, last for an hour.
    const MAX_NS: u32 = 1_000_000;

    /// The port refused a frame that was tried after a wait of `tried_ns`.
    pub(super) fn refused(&mut self, now: Instant, tried_ns: u32) {
        self.wait_ns = tried_ns.saturating_mul(2).clamp(Self::MIN_NS, Self::MAX_NS);
        self.not_before = now + u64::from(self.wait_ns);
    }
}
