//! Longer frames in an open session: packetization layer path MTU discovery, RFC 8899.
//!
//! A session begins with frame lengths that its OPENs have shown to pass (`opening`). If both ends
//! accept longer frames, each end searches for the longest that its own direction carries
//! (`docs/wire.md`, "Frame length").

use barewire_driver::frame::{Body, ETH_HDR_LEN, RxFrame, TxFrame};
use barewire_driver::port::{Station, Tx};

use super::peer::Peer;
use super::{Control, FrameSink, Notice, Openings, Reply};
use crate::idx::PeerIdx;
use crate::types::Instant;
use crate::wire::{self, Base, ProbeOp, Ty};

/// Lengths after the Ethernet header that are always probed if both ends accept them: what every
/// Ethernet carries, and the least that a node may announce.
pub(super) const LENGTHS: [u16; 2] = [1500, wire::MAX_FRAME_MIN as u16];

/// Lengths probed at once between the longest that has passed and the shortest that has not.
const PROBES: usize = 4;
/// Width of an interval that is not searched further, bytes: a hundredth of a frame.
const INTERVAL_MIN: u32 = 16;

/// Shortest and longest pause between probes, nanoseconds. Pauses double from the one to the other.
/// The longest is RFC 8899's PMTU_RAISE_TIMER.
const PAUSE_MIN_NS: u64 = 20_000_000;
const PAUSE_MAX_NS: u64 = 600_000_000_000;

/// Pause from which on the search is assumed to have found the path's MTU, nanoseconds: a peer that
/// rarely gets a processor has answered by then.
const FOUND_NS: u64 = 32 * PAUSE_MIN_NS;

/// The search of a session whose frames are shorter than both ends accept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Search {
    /// When the next probes are due, and the pause after them.
    at: Instant,
    pause_ns: u64,
    /// Lengths of the last probes in between, zeros before the first; and the shortest length that
    /// is assumed not to pass.
    tried: [u16; PROBES],
    ceiling: u16,
}

impl Search {
    /// The shortest length that is assumed not to pass, given the longest that has (`passed`) and
    /// the longest that both ends accept (`most`). A probe may have been lost by accident: once the
    /// interval is exhausted, the search starts again from `most`.
    fn ceiling(&self, passed: u32, most: u16) -> u16 {
        let answered = self.tried[0] != 0;
        let failed = self.tried.iter().chain(&LENGTHS).filter(|&&len| u32::from(len) > passed);
        let failed = failed.min().filter(|_| answered);
        let ceiling = failed.map_or(self.ceiling, |&len| len.min(self.ceiling));
        if u32::from(ceiling) <= passed + INTERVAL_MIN { most } else { ceiling }
    }
}

/// Lengths to probe between `passed` and `ceiling`.
fn between(passed: u32, ceiling: u16) -> [u16; PROBES] {
    let step = u32::from(ceiling).saturating_sub(passed) / (PROBES as u32 + 1);
    std::array::from_fn(|i| (passed + (i as u32 + 1) * step) as u16)
}

impl Openings {
    /// When probes to `p` are due next, if after `now`. Due probes are sent in the next turn.
    pub(super) fn search_due(&self, p: PeerIdx, now: Instant) -> Option<Instant> {
        self.searches.get(&p).map(|search| search.at).filter(|&at| at > now)
    }

    /// Starts the search for longer frames in the session with `peer`, which is being opened.
    pub(super) fn begin_search(&mut self, now: Instant, peer: &mut Peer) {
        peer.searches = true;
        let (tried, ceiling) = ([0; PROBES], peer.frame_most);
        let search = Search { at: now, pause_ns: PAUSE_MIN_NS, tried, ceiling };
        self.searches.insert(peer.slot(), search);
    }

    fn end_search(&mut self, peer: &mut Peer) {
        peer.searches = false;
        self.searches.remove(&peer.slot());
    }
}

impl Peer {
    /// A PROBE from `src` without padding. It confirms that frames of `heard` bytes arrive; with 0
    /// it is a query.
    fn probe(&self, src: Station, heard: u16) -> Reply {
        let mut op = [0; ProbeOp::LEN];
        ProbeOp { heard }.emit(&mut op);
        Reply::new(&self.base(src, Ty::Probe), &op)
    }
}

impl Control<'_> {
    /// Sends the due probes to `p`: one for each length to try, always including [`LENGTHS`] and
    /// the longest. False if the port is full.
    pub(super) fn serve_search(
        &mut self,
        now: Instant,
        p: PeerIdx,
        out: &mut dyn FrameSink,
    ) -> bool {
        let Some(&search) = self.openings.searches.get(&p) else { return true };
        let Search { at, pause_ns, .. } = search;
        if now < at {
            return true;
        }
        let (passed, most) = (self.peers[p].frame_max, self.peers[p].frame_most);
        let longer = |len: u16| u32::from(len) > passed && len < most;
        let ceiling = search.ceiling(passed, most);
        let mut tried = between(passed, ceiling);
        let always = LENGTHS.into_iter().filter(|&len| longer(len));
        let always_count = 1 + always.clone().count();
        let others = tried.into_iter().filter(|&len| longer(len));
        let all = std::iter::once(most).chain(always).chain(others);
        // A short ring may lack room for all; a length whose probe does not leave counts as not
        // tried.
        let (all_count, mut sent) = (all.clone().count(), 0_usize);
        for len in all {
            if !self.send_probe(p, len, out) {
                break;
            }
            sent += 1;
        }
        if sent == 0 {
            return false;
        }
        tried[sent.saturating_sub(always_count).min(PROBES)..].fill(0);
        let (at, pause) = (now + pause_ns, (2 * pause_ns).min(PAUSE_MAX_NS));
        let next = Search { at, pause_ns: pause, tried, ceiling };
        self.openings.searches.insert(p, next);
        if pause_ns == FOUND_NS {
            let (station, whole) = (self.peers[p].station(), |len: u32| len + ETH_HDR_LEN as u32);
            let (passed, most) = (whole(passed), whole(most.into()));
            self.observed.note(Notice::ShortFrames { station, passed, most });
        }
        sent == all_count
    }

    /// Sends a PROBE of `len` bytes after the Ethernet header. False if the port is full. The probe
    /// may be lost, so the acknowledgement that it carries remains due. It is sent alone: a UDP GSO
    /// segment train passes virtual switches that drop a single frame of that length.
    fn send_probe(&mut self, p: PeerIdx, len: u16, out: &mut dyn FrameSink) -> bool {
        let Reply { bytes, len: head_len } = self.peers[p].probe(self.port.station, 0);
        let padding = (usize::from(len) + ETH_HDR_LEN).saturating_sub(head_len);
        let body = Body::Bytes(self.openings.padding(padding));
        match out.send_alone(&TxFrame { head: &bytes[..head_len], body, tail: &[] }) {
            Tx::Sent => {
                self.counters.tx_frames += 1;
                self.observed.tallies[p.at()].tx_bytes += (head_len + padding) as u64;
            }
            Tx::Full => {
                self.port.blocked = true;
                return false;
            }
            Tx::NoRoute => {}
        }
        true
    }

    /// Processes a PROBE: answers it, or adopts the length that it confirms.
    pub(super) fn on_probe(&mut self, p: PeerIdx, frame: &RxFrame<'_>, base: &Base) {
        let op = match ProbeOp::parse(frame, base) {
            Ok(op) => op,
            Err(err) => return self.counters.rx_wire[err.index()] += 1,
        };
        if op.heard == 0 {
            let heard = (frame.len() - ETH_HDR_LEN).min(usize::from(u16::MAX)) as u16;
            let answer = self.peers[p].probe(self.port.station, heard);
            return self.push_reply(answer, frame.len());
        }
        let peer = &mut self.peers[p];
        // An answer may be a duplicate, or belong to a probe of an earlier session.
        let heard = op.heard.min(peer.frame_most);
        if !peer.searches || u32::from(heard) <= peer.frame_max {
            return;
        }
        (peer.frame_max, peer.tx_quota) = (heard.into(), 0);
        if heard == peer.frame_most {
            self.openings.end_search(peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An answer may arrive after a round in which the port had no room for the probes in between.
    #[test]
    fn a_search_that_has_reached_its_ceiling_begins_anew() {
        let (at, tried) = (Instant(0), [0; PROBES]);
        let search = Search { at, pause_ns: PAUSE_MIN_NS, tried, ceiling: 1500 };
        assert_eq!((search.ceiling(256, 9000), search.ceiling(1500, 9000)), (1500, 9000));
        let search = Search { tried: [500, 800, 1000, 1200], ..search };
        assert_eq!((search.ceiling(500, 9000), search.ceiling(1200, 9000)), (800, 1500));
    }
}
