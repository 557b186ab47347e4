//! Statistics for an operator. The protocol does not use them, so they are not in the peers'
//! records.

use super::claims::Claims;
use super::failed::Failures;
use super::lost::Losses;
use super::notice::Notices;
use super::round_trips::RoundTrips;
use crate::rel::psn::Psn;
use crate::types::Instant;

/// See the module.
#[derive(Debug)]
pub struct Observed {
    /// Statistics of the peer in each slot.
    pub(super) tallies: Vec<Tally>,
    pub(super) notices: Notices,
    pub(super) failures: Failures,
    pub(super) losses: Losses,
    /// Durations of round trips to all peers on lossy paths, measured by their acknowledgements.
    pub round_trips: RoundTrips,
    /// Source addresses claimed by frames that were refused for their seal.
    pub(super) claims: Claims,
}

impl Observed {
    /// With room for `peer_max` peers. Memory is touched when peers are added.
    pub(super) fn new(peer_max: usize) -> Self {
        Self {
            tallies: Vec::with_capacity(peer_max),
            notices: Notices::new(),
            failures: Failures::default(),
            losses: Losses::default(),
            round_trips: RoundTrips::default(),
            claims: Claims::default(),
        }
    }
}

/// Statistics of one peer, since its session began.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    /// When the session began: its first OPEN was sent or answered.
    pub(crate) begun: Instant,
    /// Bytes of frames to the peer and from it, on a lossy port. (A lossless port counts them
    /// itself: counting here would cost time on the fast path.)
    pub(crate) tx_bytes: u64,
    pub(crate) rx_bytes: u64,
    /// PSN of the first packet to the peer and from it; for an ended session the numbers of
    /// packets.
    tx: u32,
    rx: u32,
    /// Packets sent again.
    pub(crate) retransmits: u32,
    /// Retransmission timeouts.
    pub(crate) timeouts: u32,
}

impl Tally {
    /// For a session that begins `now`, whose first packet is `first`.
    pub(super) fn new(now: Instant, first: Psn) -> Self {
        Self { begun: now, tx: first.0, ..Self::default() }
    }

    /// Sets the PSN of the peer's first packet.
    pub(super) fn expect(&mut self, first: Psn) {
        self.rx = first.0;
    }

    /// Packets to the peer and from it, modulo 2^32, if `tx` and `rx` are the PSNs of the next
    /// ones: PSNs make separate counters unnecessary.
    pub(super) fn packets(&self, tx: Psn, rx: Psn) -> (u64, u64) {
        (tx.0.wrapping_sub(self.tx).into(), rx.0.wrapping_sub(self.rx).into())
    }

    /// Ends the session; `tx` and `rx` are the PSNs of the next packets, `rx` if the peer ever sent
    /// its first.
    pub(super) fn end(&mut self, tx: Psn, rx: Option<Psn>) {
        self.tx = tx.0.wrapping_sub(self.tx);
        self.rx = rx.map_or(0, |rx| rx.0.wrapping_sub(self.rx));
    }

    /// As [`packets`](Self::packets), for an ended session.
    pub(super) fn counted(&self) -> (u64, u64) {
        (self.tx.into(), self.rx.into())
    }
}

const _: () = assert!(size_of::<Tally>() == 40, "512 bytes with all that a node has of a peer");
