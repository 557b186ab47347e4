//! The route to the destination that an endpoint sent to last.

use crate::idx::PeerIdx;
use crate::types::{FI_ADDR_UNSPEC, FiAddr};

/// The address vector's entry for the destination that an endpoint sent to last, cached for the
/// next message. Removing the address, a new life of the peer or another path to it, and any change
/// of what the endpoint may do drop it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    /// The cached destination; [`FI_ADDR_UNSPEC`] matches no address and has no peer.
    pub(super) dest: FiAddr,
    pub(super) peer: PeerIdx,
    /// The destination endpoint and ours, in the order of a header.
    pub(super) ends: [u16; 2],
    /// The life of the peer that the address names, which is the current one; 0 any.
    pub(super) inc: u64,
    /// `dest` for each [`MsgKind`](super::MsgKind) with `Ep::fast_send` if the path is lossless,
    /// else [`FI_ADDR_UNSPEC`]: one compare asks for all.
    pub(super) fast_dest: [FiAddr; 2],
    /// `peer` for the same kinds, else `NONE`, so that a caller's `FI_ADDR_UNSPEC` leads nowhere.
    pub(super) fast_peer: [PeerIdx; 2],
}

impl Route {
    pub(super) const NONE: Self = Self {
        dest: FI_ADDR_UNSPEC,
        peer: PeerIdx::NONE,
        ends: [0; 2],
        inc: 0,
        fast_dest: [FI_ADDR_UNSPEC; 2],
        fast_peer: [PeerIdx::NONE; 2],
    };
}
