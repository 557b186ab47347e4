//! Leases of addresses in a segment.

use std::time::Duration;

use super::role::Role;
use super::{ShmSettings, segment};
use crate::error::OpenError;
use crate::port::Station;

/// Longest wait for the segment's lock: its holder may have been stopped.
const PATIENCE: Duration = Duration::from_millis(100);

/// An address that no member of the segment gets, for as long as this lives.
pub(crate) struct AddressLease(segment::Joined);

impl AddressLease {
    /// Leases `station` in the segment that `settings` name.
    ///
    /// # Errors
    /// [`OpenError`]; [`OpenError::AddressInUse`] if a member has it.
    pub(crate) fn take(settings: &ShmSettings, station: Station) -> Result<Self, OpenError> {
        let settings = ShmSettings { station: Some(station), ..settings.clone() };
        segment::join(&settings, Role::Lease, PATIENCE).map(Self)
    }
}

impl Drop for AddressLease {
    fn drop(&mut self) {
        self.0.seg.leave(self.0.me);
    }
}
