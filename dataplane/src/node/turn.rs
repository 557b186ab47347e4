//! The turn of the loop: its time, and how the silence of a peer is judged at that time.
//!
//! A peer that is silent for T_dead is dead if its probes had time to be answered. Pauses of our
//! own loop do not count: the answer to a probe sent before a pause may have been lost in it, and
//! frames still in the port may contain an answer. A flood of frames postpones the decision until
//! all frames that the port held by then have been taken.

use barewire_driver::port::Presence;

use super::NodeSettings;
use super::peer::Peer;
use crate::plant::{Bug, planted};
use crate::types::Instant;

/// Time for the answer to a probe before a peer is declared dead, nanoseconds; at most a sixteenth
/// of T_dead.
const ANSWER_NS: u64 = 100_000_000;

/// Repetitions of an OPEN while the first one after T_dead may still be answered.
pub(super) const OPENS_LATE: u8 = 4;

/// Pause after which frames left in the port are searched for an answer again, nanoseconds.
const BACKLOG_NS: u64 = 1_000;

/// Consecutive full bursts after which a port, however short its bursts, has delivered every frame
/// that it held before them.
pub(crate) const INBOX_BURSTS: u32 = 1 << 15;

/// Interval at which a port that tells presence is queried about a peer with pending work,
/// nanoseconds.
const PRESENCE_NS: u64 = 50_000_000;

impl NodeSettings {
    /// Pause between two probes of a peer that owes an answer: a tenth of T_dead.
    fn probe_ns(&self) -> u64 {
        self.t_dead_ns / 10
    }

    /// Time for an answer to the last probe, nanoseconds.
    fn answer_ns(&self) -> u64 {
        (self.t_dead_ns / 16).min(ANSWER_NS)
    }
}

impl Peer {
    /// Interval of probes, nanoseconds: a tenth of T_dead. It is shorter where the port tells
    /// presence, and while sending may be blocked by a lost grant: then it doubles with each answer
    /// without credit.
    pub(super) fn probe_interval(&self, s: &NodeSettings, floor_ns: u64) -> u64 {
        let most = if self.path.tells_presence() { PRESENCE_NS } else { u64::MAX };
        if self.path.is_lossless() || !self.is_stalled() {
            return s.probe_ns().min(most);
        }
        self.rtt.rto_ns(floor_ns, self.backoff).min(s.probe_ns()).min(most)
    }
}

/// See the module.
#[derive(Debug)]
pub struct Turn {
    /// Time of this turn: the `last_rx` of every peer from which a packet is taken in it.
    pub(crate) polled_at: Instant,
    /// When the loop was last called after a pause longer than `pause_ns`.
    pub(super) resumed_at: Instant,
    /// The longest interval of probes, nanoseconds.
    pause_ns: u64,
    /// The port holds frames that this turn did not take.
    pub(super) backlog: bool,
    /// Consecutive bursts, up to [`INBOX_BURSTS`], after which the port held more frames.
    full_bursts: u32,
    /// When the first of these bursts was taken.
    full_since: Instant,
    /// Every frame that the port held at this time has been taken.
    drained_at: Instant,
}

impl Turn {
    /// Before the first turn, of a node with these settings.
    pub(super) fn new(s: &NodeSettings) -> Self {
        Self {
            polled_at: Instant(0),
            resumed_at: Instant(0),
            pause_ns: s.probe_ns(),
            backlog: false,
            full_bursts: 0,
            full_since: Instant(0),
            drained_at: Instant(0),
        }
    }

    /// Records the time of the turn. Called at the start of each turn that reads the clock, before
    /// frames are taken: packets taken in the turn count as received at `now`.
    #[inline]
    pub fn tick(&mut self, now: Instant) {
        if now.since(self.polled_at) > self.pause_ns {
            self.resumed_at = now;
        }
        self.polled_at = self.polled_at.max(now);
    }

    /// [`tick`](Self::tick) for a turn that follows the last one without a pause.
    #[inline(always)]
    pub fn tick_on(&mut self, now: Instant) {
        self.polled_at = now;
    }

    /// Records whether the port holds frames that this turn did not take. No peer is declared dead
    /// while it does: an answer may be among them.
    #[inline]
    pub fn note_backlog(&mut self, backlog: bool) {
        self.backlog = backlog;
        if !backlog {
            self.full_bursts = 0;
            return;
        }
        if self.full_bursts == 0 {
            self.full_since = self.polled_at;
        }
        self.full_bursts += 1;
        if self.full_bursts == INBOX_BURSTS {
            (self.full_bursts, self.drained_at) = (0, self.full_since);
        }
    }

    /// Records that a burst was taken, and whether it was full: more frames may wait after a full
    /// one.
    #[inline(always)]
    pub(crate) fn note_burst(&mut self, is_full: bool) {
        if is_full || self.full_bursts != 0 {
            self.note_backlog(is_full);
        }
    }

    /// Whether the port may still hold a frame that arrived before `at`.
    fn may_hold_older(&self, at: Instant) -> bool {
        self.backlog && self.drained_at < at
    }

    /// Whether the deadline `at` has passed and the port holds no frame from before it.
    pub(super) fn is_over(&self, at: Option<Instant>) -> bool {
        at.is_some_and(|at| self.polled_at >= at && !self.may_hold_older(at))
    }

    /// When a peer that owes an answer is probed next, its presence is queried, or its silence is
    /// judged.
    pub(super) fn probe_due(&self, s: &NodeSettings, floor_ns: u64, peer: &Peer) -> Instant {
        if !peer.path.tells_presence() && self.is_overdue(s, peer) && self.was_probed(s, peer) {
            return self.answered_by(s, peer);
        }
        (peer.probe_at + peer.probe_interval(s, floor_ns)).min(self.verdict_at(s, peer))
    }

    /// When the silence of a peer may be judged: after T_dead, and after the last probe had time to
    /// be answered. Never where the port tells presence.
    pub(super) fn verdict_at(&self, s: &NodeSettings, peer: &Peer) -> Instant {
        if peer.path.tells_presence() || self.is_overdue(s, peer) && !self.was_probed(s, peer) {
            return Instant(u64::MAX);
        }
        (peer.last_rx + s.t_dead_ns).max(self.answered_by(s, peer))
    }

    /// When the last probe has had time to be answered, counting frames still in the port.
    fn answered_by(&self, s: &NodeSettings, peer: &Peer) -> Instant {
        let at = peer.probe_at + s.answer_ns();
        if self.may_hold_older(at) { at.max(self.polled_at + BACKLOG_NS) } else { at }
    }

    /// When the OPEN to a peer is repeated after T_dead, or has had time to be answered.
    pub(super) fn last_open_at(&self, s: &NodeSettings, peer: &Peer) -> Instant {
        let repeats = u64::from(OPENS_LATE.saturating_sub(peer.pings));
        match peer.pings {
            0 => self.answered_by(s, peer),
            _ => peer.probe_at + s.answer_ns() * (repeats + 1) / u64::from(OPENS_LATE + 2),
        }
    }

    /// Whether the peer was silent for T_dead.
    pub(super) fn is_overdue(&self, s: &NodeSettings, peer: &Peer) -> bool {
        self.polled_at.since(peer.last_rx) >= s.t_dead_ns
    }

    /// Whether a peer is dead by silence: no packet for T_dead, its probes had time to be answered,
    /// and the port holds no frame that could be the answer.
    pub(super) fn is_silent(&self, s: &NodeSettings, peer: &Peer) -> bool {
        if planted(Bug::DeadWithoutKeepalive) {
            return self.is_overdue(s, peer);
        }
        self.was_probed(s, peer) && self.polled_at >= self.verdict_at(s, peer)
    }

    /// Whether our OPEN has had no answer for T_dead.
    pub(super) fn is_open_unanswered(
        &self,
        s: &NodeSettings,
        peer: &Peer,
        presence: Presence,
    ) -> bool {
        let probed = self.was_probed(s, peer) && self.polled_at >= self.answered_by(s, peer);
        presence != Presence::Present && self.is_overdue(s, peer) && probed
    }

    /// Whether a peer was probed often enough, with the last probe after our last pause or after
    /// T_dead. If a pause stopped the whole host, the answer to an earlier probe may have been lost
    /// in it.
    pub(super) fn was_probed(&self, s: &NodeSettings, peer: &Peer) -> bool {
        let last = peer.probe_at;
        let since = last >= self.resumed_at || last >= peer.last_rx + s.t_dead_ns;
        peer.was_probed() && since
    }
}
