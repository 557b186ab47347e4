//! Stations with another key, or without one: both ends report the mismatch, and operations that
//! wait for such a peer end soon.
//!
//! A node that cannot verify an OPEN answers with an RST that is not sealed, since the opener could
//! not verify a sealed one. Any station can forge such an RST, so it ends nothing by itself: it
//! supplies the reason if no authentic answer arrives, and shortens the wait for one from T_dead to
//! [`REFUSED_NS`].

use barewire_driver::frame::RxFrame;
use barewire_driver::port::Station;

use super::notice::EndReason;
use super::peer::{Peer, State};
use super::{Control, Notice, Openings, Sessions};
use crate::idx::PeerIdx;
use crate::types::{Instant, Tenant};
use crate::wire::{Base, OpenOp, RstOp, RstReason, sealed};

/// Wait for an authentic answer after a refusal, nanoseconds.
pub(super) const REFUSED_NS: u64 = 1_000_000_000;

/// Number of stations whose key is reported. Further ones are not: a sender of frames can invent
/// addresses.
const STATIONS_MAX: usize = 64;

/// Stations already reported to have another key or none.
#[derive(Debug, Default)]
pub(crate) struct KeyMismatches {
    stations: Vec<Station>,
}

impl KeyMismatches {
    /// Clears the list: with new keys these stations are reported again.
    pub(super) fn forget(&mut self) {
        self.stations.clear();
    }
}

impl Openings {
    /// When a session that is being opened ends because its key was refused and no authentic answer
    /// has arrived.
    pub(super) fn refusal_deadline(&self, peer: &Peer) -> Option<Instant> {
        self.refusal(peer.slot()).map(|(at, _)| at + REFUSED_NS)
    }

    /// Reason why a session that never opened ends: the refusal of the key, if there was one.
    pub(super) fn key_reason(&self, p: PeerIdx) -> Option<EndReason> {
        let (_, reason) = self.refusal(p)?;
        Some(match reason {
            RstReason::OtherKey => EndReason::OtherKey,
            _ => EndReason::NoKey,
        })
    }
}

impl Sessions<'_> {
    /// Processes an RST that is not sealed, at a node with a key: it may report a key mismatch.
    pub(super) fn on_clear_rst(&mut self, now: Instant, src: Station, frame: &RxFrame<'_>) {
        match RstOp::parse(frame) {
            Ok(op) if op.reason.is_of_key() => self.on_key_refusal(now, src, &op),
            Ok(_) => self.counters.rx_bad_rst += 1,
            Err(err) => self.counters.rx_wire[err.index()] += 1,
        }
    }

    /// Processes the refusal of our OPEN because of its key.
    pub(super) fn on_key_refusal(&mut self, now: Instant, src: Station, op: &RstOp) {
        let at = |tenant| self.by_station.get(self.peers, src, tenant);
        let known = self.openings.tenants().filter_map(at).filter(|_| src != self.port.station);
        // The refusal does not name the key; the epoch identifies the session.
        let refused = known.into_iter().find(|&p| {
            let peer = &self.peers[p];
            let opens = peer.state == State::Opening || peer.state == State::Answered && peer.opens;
            let named = op.victim_inc == self.settings.incarnation && op.victim_epoch == peer.epoch;
            opens && named && !peer.path.is_near()
        });
        let Some(p) = refused else {
            self.counters.rx_bad_rst += 1;
            return;
        };
        if self.peers[p].state == State::Answered
            && self.openings.is_answer_outdated(&self.peers[p])
        {
            // The peer's OPEN was under a key that neither end lists any more: this node opens
            // under another.
            return self.reopen(now, p, false);
        }
        if self.openings.note_refusal(p, now, op.reason) {
            self.control().note_key(src, op.reason);
            self.control().arm_timer(now, p);
        }
    }
}

impl Control<'_> {
    /// Refuses an OPEN that is not sealed under a key of this node.
    pub(super) fn refuse_key(&mut self, now: Instant, base: &Base, op: &OpenOp, reason: RstReason) {
        if base.src == self.port.station || base.dst != self.port.station {
            return;
        }
        let known = self.by_station.get(self.peers, base.src, Tenant::NONE);
        let is_open = |p: &PeerIdx| self.peers[*p].state == State::Open;
        if let Some(p) = known.filter(is_open).filter(|&p| self.peers[p].is_echoed_in(op)) {
            // This is an answer under a key that is no longer listed, and its session is open here:
            // any sealed frame tells the peer.
            self.peers[p].request_ping();
            return self.due.make_ready(self.peers, p);
        }
        self.note_key(base.src, reason);
        self.reset_open(now, base, op, reason);
    }

    /// Handles a sealed frame at a node without a key: an OPEN is refused.
    #[cold]
    pub(super) fn on_sealed_without_key(&mut self, now: Instant, frame: &RxFrame<'_>) {
        if let Some((base, op)) = sealed::open_in(frame) {
            self.refuse_key(now, &base, &op, RstReason::NoKey);
        }
    }

    fn note_key(&mut self, station: Station, reason: RstReason) {
        let has_key = reason == RstReason::OtherKey;
        self.report_mismatch(station, Notice::OtherKey { station, has_key });
    }

    /// Reports what is wrong with the key of a station, once.
    pub(super) fn report_mismatch(&mut self, station: Station, notice: Notice) {
        let known = &mut self.openings.other_keys.stations;
        if known.len() < STATIONS_MAX && !known.contains(&station) {
            known.push(station);
            self.observed.note(notice);
        }
    }
}
