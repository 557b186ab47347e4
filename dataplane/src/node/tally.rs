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
    /// What is counted of the peer in each slot.
    pub(super) tallies: Vec<Tally>,
    pub(super) notices: Notices,
    pub(super) failures: Failures,
    pub(super) losses: Losses,
    /// How long round trips took, to all peers on lossy paths, as their acknowledgements tell.
    pub round_trips: RoundTrips,
    /// Where frames claim to be from that were refused for their seal.
    pub(super) claims: Claims,
}

impl Observed {
    /// Room for `peer_max` peers: memory is touched when they come.
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

/// Of one peer, since its session began.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    /// When the session began: its first OPEN was sent or answered.
    pub(crate) begun: Instant,
    /// Bytes of frames to it and from it, on a lossy port. (A lossless port counts them itself:
    /// counting here would cost the fast path.)
    pub(crate) tx_bytes: u64,
    pub(crate) rx_bytes: u64,
    /// The first packet to it and from it; of a session that is over, how many there were.
    tx: u32,
    rx: u32,
    /// Packets sent again.
    pub(crate) retransmits: u32,
    /// Retransmission timeouts.
    pub(crate) timeouts: u32,
}

impl Tally {
    /// Of a session that begins `now`, whose first packet is `first`.
    pub(super) fn new(now: Instant, first: Psn) -> Self {
        Self { begun: now, tx: first.0, ..Self::default() }
    }

    /// The first packet of the peer will be `first`.
    pub(super) fn expect(&mut self, first: Psn) {
        self.rx = first.0;
    }

    /// Packets each way, those to it first, modulo 2^32, if the next ones are `tx` and `rx`: what a
    /// session numbers need not be counted.
    pub(super) fn packets(&self, tx: Psn, rx: Psn) -> (u64, u64) {
        (tx.0.wrapping_sub(self.tx).into(), rx.0.wrapping_sub(self.rx).into())
    }

    /// The session is over; the next packets would have been `tx` and `rx`, if the peer ever told
    /// its first.
    pub(super) fn end(&mut self, tx: Psn, rx: Option<Psn>) {
        self.tx = tx.0.wrapping_sub(self.tx);
        self.rx = rx.map_or(0, |rx| rx.0.wrapping_sub(self.rx));
    }

    /// As [`packets`](Self::packets), of a session that is over.
    pub(super) fn counted(&self) -> (u64, u64) {
        (self.tx.into(), self.rx.into())
    }
}

const _: () = assert!(size_of::<Tally>() == 40, "512 bytes with all that a node has of a peer");
