//! The index of a slot, by what lies in it: an index of one table does not fit another.

use crate::slab::NONE;

/// What names a slot of a [`Table`](crate::table::Table).
pub trait Idx: Copy + Eq {
    /// The slot's number.
    fn get(self) -> u32;

    /// The index of slot number `n`.
    fn new(n: u32) -> Self;
}

impl Idx for u32 {
    #[inline(always)]
    fn get(self) -> u32 {
        self
    }

    #[inline(always)]
    fn new(n: u32) -> Self {
        n
    }
}

/// A peer of a node, by its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct PeerIdx(u32);

impl PeerIdx {
    /// No peer.
    pub const NONE: Self = Self(NONE);

    /// The peer in slot number `n`.
    pub const fn of(n: u32) -> Self {
        Self(n)
    }

    /// The slot's number.
    #[inline(always)]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// [`get`](Self::get), to index what lies beside the table.
    #[inline(always)]
    pub const fn at(self) -> usize {
        self.0 as usize
    }
}

impl Idx for PeerIdx {
    #[inline(always)]
    fn get(self) -> u32 {
        self.0
    }

    #[inline(always)]
    fn new(n: u32) -> Self {
        Self(n)
    }
}
