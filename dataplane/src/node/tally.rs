//! What a node keeps for an operator alone. Nothing in it decides anything, so it stands apart from
//! the records of the peers.

use super::notice::Notices;
use crate::rel::psn::Psn;
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
#[repr(align(64))]
pub(crate) struct Tally {
    /// When the session began: its first OPEN was sent or answered.
    pub(crate) begun: Instant,
    /// Bytes of frames to it and from it, on a port that may lose frames. (On one that cannot, the
    /// shortest ways of a message would pay for it.)
    pub(crate) tx_bytes: u64,
    pub(crate) rx_bytes: u64,
    /// Packets that were numbered up to `tx_seen`, and taken in order up to `rx_seen`.
    tx_packets: u64,
    rx_packets: u64,
    tx_seen: Psn,
    rx_seen: Psn,
    /// Packets sent again.
    pub(crate) retransmits: u32,
    /// Retransmission timeouts.
    pub(crate) timeouts: u32,
}

impl Tally {
    /// Of a session that begins `now`, whose first packet is `first`.
    pub(super) fn new(now: Instant, first: Psn) -> Self {
        Self { begun: now, tx_seen: first, ..Self::default() }
    }

    /// The first packet of the peer will be `first`.
    pub(super) fn expect(&mut self, first: Psn) {
        self.rx_seen = first;
    }

    /// Packets each way, those to it first, of a session that is over.
    pub(super) fn counted(&self) -> (u64, u64) {
        (self.tx_packets, self.rx_packets)
    }

    /// Packets each way, those to it first, if the next ones are `tx` and `rx`: what a session
    /// numbers need not be counted. To be called before it has numbered 2^32 more.
    pub(super) fn packets(&mut self, tx: Psn, rx: Psn) -> (u64, u64) {
        self.tx_packets += u64::from(tx.0.wrapping_sub(self.tx_seen.0));
        self.rx_packets += u64::from(rx.0.wrapping_sub(self.rx_seen.0));
        (self.tx_seen, self.rx_seen) = (tx, rx);
        (self.tx_packets, self.rx_packets)
    }
}

const _: () = assert!(size_of::<Tally>() <= 64, "448 bytes with the slot of the peer");
