//! The way to the destination that an endpoint sent to last.

use crate::slab::NONE;
use crate::types::{FI_ADDR_UNSPEC, FiAddr};

/// What an address vector says of the destination that an endpoint sent to last, so that it need
/// not be asked for the next message. Whoever takes an address out of a vector, changes which life
/// of the peer we deal with, or what the endpoint may do, forgets it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    /// In front of the rest so that there is something to compare with: no address is
    /// [`FI_ADDR_UNSPEC`], and its peer is none either.
    pub(super) dest: FiAddr,
    pub(super) peer: u32,
    /// The endpoint there and ours, as they stand in a header.
    pub(super) ends: [u16; 2],
    /// The life of the peer that the address names, which is the one we deal with; 0 any.
    pub(super) inc: u64,
    /// `dest` for each [`MsgKind`](super::MsgKind) of which messages are plain, else
    /// [`FI_ADDR_UNSPEC`]: who finds an address there need ask neither of both.
    pub(super) fast_dest: [FiAddr; 2],
    /// `peer` for these, else none, so that `FI_ADDR_UNSPEC` leads nowhere.
    pub(super) fast_peer: [u32; 2],
}

impl Route {
    pub(super) const NONE: Self = Self {
        dest: FI_ADDR_UNSPEC,
        peer: NONE,
        ends: [0; 2],
        inc: 0,
        fast_dest: [FI_ADDR_UNSPEC; 2],
        fast_peer: [NONE; 2],
    };
}
