//! What the lock of a domain guards of its regions.

use crate::flags::MrMode;

/// What a domain knows of its regions.
#[derive(Debug, Default)]
pub(crate) struct MrTable {
    pub(crate) mode: MrMode,
    /// Regions registered.
    pub(crate) open: usize,
}

impl MrTable {
    /// How the domain names memory.
    pub(crate) fn set_mode(&mut self, mode: MrMode) {
        self.mode = mode;
    }

    /// Regions registered, for tests.
    pub(crate) fn level(&self) -> usize {
        self.open
    }
}
