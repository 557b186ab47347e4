//! STUB stats
use barewire_dataplane::poll::Engine;
use barewire_dataplane::types::Instant;
pub(crate) struct Publisher {}
impl Publisher {
    pub(crate) fn create(_e: &Engine) -> Option<Self> {
        None
    }
    pub(crate) fn is_due(&self, _now: Instant) -> bool {
        false
    }
    pub(crate) fn publish(&mut self, _e: &Engine) {}
}
