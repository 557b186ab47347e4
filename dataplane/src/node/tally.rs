//! What a node keeps for an operator alone. Nothing in it decides anything, so it stands apart from
//! the records of the peers.

use super::notice::Notices;
use crate::types::Instant;

/// See the module.
#[derive(Debug)]
pub(super) struct Observed {
    /// What is counted of the peer in each slot.
    pub(super) tallies: Vec<Tally>,
    pub(super) notices: Notices,
}

impl Observed {
    /// Room for `peer_max` peers: memory is touched when they come.
    pub(super) fn new(peer_max: usize) -> Self {
        Self { tallies: Vec::with_capacity(peer_max), notices: Notices::new() }
    }
}

/// Of one peer, since its session began.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    /// When the session began: its first OPEN was sent or answered.
    pub(crate) begun: Instant,
    /// Packets sent again.
    pub(crate) retransmits: u64,
    /// Retransmission timeouts.
    pub(crate) timeouts: u64,
}

const _: () = assert!(size_of::<Tally>() <= 64, "448 bytes with the slot of the peer");
