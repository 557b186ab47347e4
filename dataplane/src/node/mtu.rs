//! Longer frames in an open session: packetization layer path MTU discovery, RFC 8899.
//!
//! A session begins with the frames that its OPENs have shown to pass (`opening`). Where both ends
//! take longer ones, each end searches for what its own direction carries (`docs/wire.md`, "Frame
//! length").

use barewire_driver::frame::{Body, ETH_HDR_LEN, RxFrame, TxFrame};
use barewire_driver::port::{Station, Tx};

use super::peer::Peer;
use super::{Control, FrameSink, Notice, Openings, Reply};
use crate::idx::PeerIdx;
use crate::types::Instant;
use crate::wire::{self, Base, ProbeOp, Ty};

/// Lengths behind the Ethernet header that are tried below what both ends accept: what every
/// Ethernet carries, and the least that a node may announce.
pub(super) const LENGTHS: [u16; 2] = [1500, wire::MAX_FRAME_MIN as u16];

/// Lengths that are tried at once between the longest that has passed and the shortest that has
/// not.
const BETWEEN: usize = 4;
/// An interval that is not searched further, bytes: the rest is a hundredth of a frame.
const CLOSE: u32 = 16;

/// Pauses between probes double from the first to the last, nanoseconds. The last is RFC 8899's
/// PMTU_RAISE_TIMER.
const PAUSE_MIN_NS: u64 = 20_000_000;
const PAUSE_MAX_NS: u64 = 600_000_000_000;

/// The pause from which on the search is taken to have found what the path carries, nanoseconds: a
/// peer that gets a processor now and then has answered by then.
const FOUND_NS: u64 = 32 * PAUSE_MIN_NS;

/// The search of a session whose frames are shorter than both ends accept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Search {
    /// When the next probes are due, and the pause behind them.
    at: Instant,
    pause_ns: u64,
    /// The lengths that were tried last in between, zeros before the first; and the shortest length
    /// that is taken not to pass.
    tried: [u16; BETWEEN],
    ceiling: u16,
}

impl Search {
    /// The shortest length that is taken not to pass, now that `passed` is the longest that has and
    /// `most` is the longest there is. A probe may have been lost by accident: once there is
    /// nothing more to be found below it, all is tried anew.
    fn ceiling(&self, passed: u32, most: u16) -> u16 {
        let answered = self.tried[0] != 0;
        let failed = self.tried.iter().chain(&LENGTHS).filter(|&&len| u32::from(len) > passed);
        let failed = failed.min().filter(|_| answered);
        let ceiling = failed.map_or(self.ceiling, |&len| len.min(self.ceiling));
        if u32::from(ceiling) <= passed + CLOSE { most } else { ceiling }
    }
}

/// Lengths to try between `passed` and `ceiling`.
fn between(passed: u32, ceiling: u16) -> [u16; BETWEEN] {
    let step = u32::from(ceiling).saturating_sub(passed) / (BETWEEN as u32 + 1);
    std::array::from_fn(|i| (passed + (i as u32 + 1) * step) as u16)
}

impl Openings {
    /// When probes to `p` are due next, if that is after `now`. Probes that are due go out with the
    /// next turn.
    pub(super) fn search_due(&self, p: PeerIdx, now: Instant) -> Option<Instant> {
        self.searches.get(&p).map(|search| search.at).filter(|&at| at > now)
    }

    /// Begins to search for longer frames in the session with `peer`, which is being opened.
    pub(super) fn begin_search(&mut self, now: Instant, peer: &mut Peer) {
        peer.searches = true;
        let (tried, ceiling) = ([0; BETWEEN], peer.frame_most);
        let search = Search { at: now, pause_ns: PAUSE_MIN_NS, tried, ceiling };
        self.searches.insert(peer.slot(), search);
    }

    fn end_search(&mut self, peer: &mut Peer) {
        peer.searches = false;
        self.searches.remove(&peer.slot());
    }
}

impl Peer {
    /// A PROBE from `src` without padding, which confirms frames of `heard` bytes; of 0 it asks.
    fn probe(&self, src: Station, heard: u16) -> Reply {
        let mut op = [0; ProbeOp::LEN];
        ProbeOp { heard }.emit(&mut op);
        Reply::new(&self.base(src, Ty::Probe), &op)
    }
}

impl Control<'_> {
    /// Sends the probes to `p` that are due: one of each length to try, those of [`LENGTHS`] and
    /// the longest always. False if the port is full.
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
        // A short ring has no room for all; what does not leave was not tried.
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
        tried[sent.saturating_sub(always_count).min(BETWEEN)..].fill(0);
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

    /// Sends a PROBE of `len` bytes after the Ethernet header. False if the port is full. It may
    /// well be lost, so what it acknowledges is still owed. It leaves alone: a train of datagrams
    /// (UDP_SEGMENT) passes virtual switches that drop a single frame of that length.
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

    /// Takes a PROBE: answers it, or sends frames of the length that it confirms.
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
        // An answer may come again, or be one to a probe of the session before.
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

    /// An answer may come after a round in which nothing in between had room to leave.
    #[test]
    fn a_search_that_has_reached_its_ceiling_begins_anew() {
        let (at, tried) = (Instant(0), [0; BETWEEN]);
        let search = Search { at, pause_ns: PAUSE_MIN_NS, tried, ceiling: 1500 };
        assert_eq!((search.ceiling(256, 9000), search.ceiling(1500, 9000)), (1500, 9000));
        let search = Search { tried: [500, 800, 1000, 1200], ..search };
        assert_eq!((search.ceiling(500, 9000), search.ceiling(1200, 9000)), (800, 1500));
    }
}
