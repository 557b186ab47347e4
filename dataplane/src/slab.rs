//! Placeholder until the tables land.

/// An index with a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle {
    pub(crate) idx: u32,
    pub(crate) generation: u32,
}
