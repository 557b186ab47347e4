//! Timers of sessions: when a packet counts as lost, and when a peer that is silent is probed and
//! when it is dead.
//!
//! A peer is dead when the port says so or, where the port cannot tell, when it was silent for
//! T_dead and did not answer probes that had time to be answered (rule S10). Pauses of our own loop
//! do not count: a late turn first takes the waiting frames, then probes, then decides.

use barewire_driver::port::Presence;

use super::acks::ACK_DELAY_NS;
use super::notice::EndReason;
use super::peer::{PROBES_MIN, Peer, State};
use super::{FrameSink, Node, NodeSettings};
use crate::idx::PeerIdx;
use crate::plant::{Bug, planted};
use crate::rel::congestion::CongestionControl;
use crate::rel::rtt::Rtt;
use crate::types::Instant;

/// Added to the tail probe's timeout, nanoseconds: an acknowledgement that the peer holds back.
const PROBE_SLACK_NS: u64 = ACK_DELAY_NS + 10_000;

/// Time for the answer to a probe before a peer is declared dead, nanoseconds; at most a sixteenth
/// of T_dead.
const ANSWER_NS: u64 = 100_000_000;

/// Times that an OPEN is repeated while the first one after T_dead may still be answered.
const OPENS_LATE: u8 = 4;

/// Pause after which frames left in the port are searched for an answer again, nanoseconds.
const BACKLOG_NS: u64 = 1_000;

/// Interval at which a port that tells presence is asked about a peer that we wait for,
/// nanoseconds.
const PRESENCE_NS: u64 = 50_000_000;

impl NodeSettings {
    /// Pause between two probes of a peer that owes us something: a tenth of T_dead.
    fn probe_ns(&self) -> u64 {
        self.t_dead_ns / 10
    }

    /// Time for an answer to the last probe, nanoseconds.
    fn answer_ns(&self) -> u64 {
        (self.t_dead_ns / 16).min(ANSWER_NS)
    }
}

impl Peer {
    /// How long the oldest packet in flight may go without progress, nanoseconds: until the tail
    /// probe two round trips, their variation and the peer's acknowledgement delay; after it the
    /// retransmission timeout.
    pub(super) fn patience(&self, floor_ns: u64) -> u64 {
        let rto = self.rtt.rto_ns(floor_ns, self.backoff);
        if self.probed || self.rtt.srtt_ns() == 0 || self.rtt.keeps_backoff() {
            return rto;
        }
        (2 * self.rtt.srtt_ns() + 4 * self.rtt.var_ns() + PROBE_SLACK_NS).min(rto)
    }

    /// Retransmission timeout of an OPEN, nanoseconds.
    fn open_rto(&self, floor_ns: u64) -> u64 {
        Rtt::default().rto_ns(floor_ns, self.backoff)
    }
}

impl Node {
    /// Notes the time of the turn. Called at the start of each turn that reads the clock, before
    /// frames are taken: a peer that is heard in the turn was heard at `now`.
    #[inline]
    pub fn tick(&mut self, now: Instant) {
        if now.since(self.polled_at) > self.settings.probe_ns() {
            self.resumed_at = now;
        }
        self.polled_at = self.polled_at.max(now);
    }

    /// [`tick`](Self::tick) for a turn that follows the last one without a pause.
    #[inline(always)]
    pub fn tick_on(&mut self, now: Instant) {
        self.polled_at = now;
    }

    /// Notes whether the port holds frames that this turn did not take. No peer is declared dead
    /// while it does: an answer may be among them.
    #[inline]
    pub fn note_backlog(&mut self, backlog: bool) {
        self.backlog = backlog;
    }

    /// Arms the timer of `p` for its next deadline, unless it fires earlier anyway. A deadline that
    /// has passed and waits for something else, such as frames still in the port, is the next
    /// turn's: a timer fires once in a turn.
    pub(crate) fn arm_timer(&mut self, now: Instant, p: PeerIdx) {
        let Some(due) = self.due(&self.peers[p]) else { return };
        let due = due.max(Instant(now.0 + 1));
        let peer = &mut self.peers[p];
        if due < peer.timer_at {
            peer.timer_at = due;
            self.wheel.arm(p, due);
        }
    }

    /// The peer's next deadline, if it has any.
    pub(super) fn due(&self, peer: &Peer) -> Option<Instant> {
        match peer.state {
            State::Idle => None,
            State::Opening | State::Answered => {
                if self.is_overdue(peer) && self.was_asked(peer) {
                    return Some(self.last_open_at(peer));
                }
                let pause = match peer.path.tells_presence() && peer.backoff >= PROBES_MIN {
                    true => self.probe_interval(peer),
                    false => peer.open_rto(self.rto_floor_ns),
                };
                let due = (peer.probe_at + pause).min(self.verdict_at(peer));
                let soonest = |due: Instant, at: Option<Instant>| at.map_or(due, |at| due.min(at));
                let due = soonest(due, self.openings.refused_at(peer));
                Some(soonest(due, self.openings.doubt_over(peer.slot(), self.settings.t_dead_ns)))
            }
            State::Open => {
                let mut due = peer.owes().then(|| self.probe_due(peer));
                if peer.path.is_sealed()
                    && let Some(at) = self.openings.doubt_over(peer.slot(), self.settings.t_dead_ns)
                {
                    due = Some(due.map_or(at, |d| d.min(at)));
                }
                let mut sooner = |at: Instant| due = Some(due.map_or(at, |d| d.min(at)));
                // Once it is due it goes out with the next turn.
                if let Some(at) = peer.nack.waits(self.polled_at) {
                    sooner(at);
                }
                if peer.searches
                    && let Some(at) = self.openings.search_due(peer.slot(), self.polled_at)
                {
                    sooner(at);
                }
                if !peer.path.is_lossless() && !peer.snd.is_empty() {
                    sooner(peer.progress_at + peer.patience(self.rto_floor_ns));
                    if peer.reorder_at != Instant(0) {
                        sooner(peer.reorder_at);
                    }
                }
                due
            }
        }
    }

    /// When a peer that owes us something is probed next, its presence is asked of the port, or its
    /// silence is judged.
    fn probe_due(&self, peer: &Peer) -> Instant {
        if !peer.path.tells_presence() && self.is_overdue(peer) && self.was_asked(peer) {
            return self.answered_by(peer);
        }
        (peer.probe_at + self.probe_interval(peer)).min(self.verdict_at(peer))
    }

    /// When the silence of a peer may be judged: after T_dead, and after the last probe had time to
    /// be answered. Never where the port tells presence.
    fn verdict_at(&self, peer: &Peer) -> Instant {
        if peer.path.tells_presence() || self.is_overdue(peer) && !self.was_asked(peer) {
            return Instant(u64::MAX);
        }
        (peer.last_rx + self.settings.t_dead_ns).max(self.answered_by(peer))
    }

    /// When the last probe has had time to be answered, frames still in the port included.
    fn answered_by(&self, peer: &Peer) -> Instant {
        let again = if self.backlog { self.polled_at + BACKLOG_NS } else { Instant(0) };
        (peer.probe_at + self.settings.answer_ns()).max(again)
    }

    /// When the OPEN to a peer is repeated after T_dead, or has had time to be answered.
    fn last_open_at(&self, peer: &Peer) -> Instant {
        let repeats = u64::from(OPENS_LATE.saturating_sub(peer.pings));
        match peer.pings {
            0 => self.answered_by(peer),
            _ => {
                peer.probe_at
                    + self.settings.answer_ns() * (repeats + 1) / u64::from(OPENS_LATE + 2)
            }
        }
    }

    /// Whether the peer was silent for T_dead.
    fn is_overdue(&self, peer: &Peer) -> bool {
        self.polled_at.since(peer.last_rx) >= self.settings.t_dead_ns
    }

    /// Whether a peer is dead by silence: no packet for T_dead, its probes had time to be answered,
    /// and the port holds no frame that could be the answer.
    fn is_silent(&self, peer: &Peer) -> bool {
        if planted(Bug::DeadUnasked) {
            return self.is_overdue(peer);
        }
        self.was_asked(peer) && self.polled_at >= self.verdict_at(peer)
    }

    /// Whether a peer was probed often enough, and the last probe followed our last pause or was
    /// sent after T_dead. An answer to an earlier probe may have been lost in the pause, if the
    /// pause stopped the whole host.
    pub(super) fn was_asked(&self, peer: &Peer) -> bool {
        let last = peer.probe_at;
        let since = last >= self.resumed_at || last >= peer.last_rx + self.settings.t_dead_ns;
        peer.was_asked() && since
    }

    /// A lower bound of [`patience`](Peer::patience), nanoseconds.
    #[inline(always)]
    pub(super) fn patience_min(&self) -> u64 {
        self.rto_floor_ns.min(PROBE_SLACK_NS)
    }

    /// Interval of probes, nanoseconds: a tenth of T_dead. Less where the port tells presence, and
    /// while a lost grant may be what stops us: then it doubles with each answer that brought no
    /// credit.
    fn probe_interval(&self, peer: &Peer) -> u64 {
        let most = if peer.path.tells_presence() { PRESENCE_NS } else { u64::MAX };
        if peer.path.is_lossless() || !peer.is_stalled() {
            return self.settings.probe_ns().min(most);
        }
        peer.rtt.rto_ns(self.rto_floor_ns, peer.backoff).min(self.settings.probe_ns()).min(most)
    }

    /// The timer of `p` has fired. `out` is asked for presence, if the port tells it.
    pub(crate) fn on_timer(&mut self, now: Instant, p: PeerIdx, out: &mut dyn FrameSink) {
        self.peers[p].timer_at = Instant(u64::MAX);
        let peer = &self.peers[p];
        let waits = peer.state != State::Open || peer.owes();
        let presence = match peer.path.tells_presence() && waits {
            true => out.presence(peer.station()),
            false => Presence::Unknown,
        };
        let starves = presence == Presence::Starved;
        let presence = match presence {
            // The process lives, but the port lacks memory for frames to it.
            Presence::Present | Presence::Starved
                if peer.want_open && self.observed.failures.lacks_memory =>
            {
                Presence::Unknown
            }
            Presence::Starved => Presence::Present,
            other => other,
        };
        match peer.state {
            State::Idle => return,
            State::Opening | State::Answered => {
                // The peer may not have been started yet: an absent process is waited for, unless
                // it was present and took an OPEN of ours.
                let died = presence == Presence::Absent && self.openings.has_opened(p);
                if died {
                    return self.peer_died(now, p, EndReason::Died);
                }
                let refused = self.openings.refused_at(peer).is_some_and(|at| self.polled_at >= at);
                if refused && !self.backlog || self.has_no_answer(peer, presence) {
                    let reason = self.openings.key_reason(p).unwrap_or(EndReason::NoAnswer);
                    return self.peer_died(now, p, reason);
                }
                if let Some(rst) = self.proven_reset(p) {
                    return self.believe_rst(now, p, &rst);
                }
                self.on_open_again(now, p, presence);
            }
            State::Open => {
                // The peer is alive but does not send what it announced, and other pulls wait.
                let tells_presence = peer.path.tells_presence();
                let stalled = !tells_presence && self.pulls_stalled(p);
                let peer = &self.peers[p];
                let silent = !tells_presence && peer.owes() && self.is_silent(peer);
                if presence == Presence::Absent && !planted(Bug::AbsenceUnheard) {
                    return self.peer_died(now, p, EndReason::Died);
                }
                if silent {
                    return self.peer_died(now, p, EndReason::Silent);
                }
                if let Some(rst) = self.proven_reset(p) {
                    return self.believe_rst(now, p, &rst);
                }
                if stalled {
                    return self.peer_died(now, p, EndReason::NoProgress);
                }
                let ends = match starves {
                    true => self.end_if_starved(now, p),
                    false => self.end_if_stuck(now, p),
                };
                if ends {
                    return;
                }
                self.on_open_timer(now, p);
            }
        }
        self.arm_timer(now, p);
    }

    /// Whether our OPEN has had no answer for T_dead.
    fn has_no_answer(&self, peer: &Peer, presence: Presence) -> bool {
        let asked = self.was_asked(peer) && self.polled_at >= self.answered_by(peer);
        presence != Presence::Present && self.is_overdue(peer) && asked
    }

    fn peer_died(&mut self, now: Instant, p: PeerIdx, reason: EndReason) {
        self.counters.sessions_dead += 1;
        self.end_session(now, p, reason);
    }

    /// Repeats an unanswered OPEN. Not if the port keeps it in the memory of a live process, which
    /// finds it when it polls.
    fn on_open_again(&mut self, now: Instant, p: PeerIdx, presence: Presence) {
        let due = self.due(&self.peers[p]).is_some_and(|due| now >= due);
        let overdue = self.is_overdue(&self.peers[p]);
        let asked = self.was_asked(&self.peers[p]);
        let peer = &mut self.peers[p];
        if !due {
            return;
        }
        if overdue && asked && presence != Presence::Present {
            if peer.pings > 0 {
                peer.pings -= 1;
                peer.want_open = peer.repeats_open();
                self.make_ready(p);
            }
            return;
        }
        peer.probe_at = now;
        if presence != Presence::Present || peer.backoff < PROBES_MIN {
            peer.want_open = peer.repeats_open();
            peer.pings = if overdue { OPENS_LATE } else { 0 };
            peer.backoff = peer.backoff.saturating_add(1);
            self.make_ready(p);
        }
    }

    fn on_open_timer(&mut self, now: Instant, p: PeerIdx) {
        if !self.peers[p].path.is_lossless() && !self.peers[p].snd.is_empty() {
            self.on_loss_timer(now, p);
        }
        if self.peers[p].searches || self.peers[p].nack.is_due(now) {
            self.make_ready(p);
        }
        let interval = self.probe_interval(&self.peers[p]);
        if self.peers[p].owes() && now >= self.peers[p].probe_at + interval {
            self.probe(now, p);
        }
    }

    /// Probes a peer that owes us something. If our loop was paused until after T_dead, the missed
    /// probes are sent now.
    fn probe(&mut self, now: Instant, p: PeerIdx) {
        let overdue = self.is_overdue(&self.peers[p]);
        let asked = self.was_asked(&self.peers[p]);
        let peer = &mut self.peers[p];
        let missing = PROBES_MIN.saturating_sub(peer.probes);
        let count = match (overdue, peer.path.tells_presence()) {
            // The peer's ring holds the probes until it polls.
            (_, true) => missing.min(1),
            (true, false) if asked => return,
            (true, false) => missing.max(PROBES_MIN / 2),
            (false, false) => 1,
        };
        peer.probe_at = now;
        if peer.is_stalled() {
            peer.backoff = peer.backoff.saturating_add(1);
        }
        if count > 0 {
            peer.pings = peer.pings.max(count);
            (peer.probes, peer.rx_quota) = (peer.probes.saturating_add(count), 0);
            self.counters.tx_probes += u64::from(count);
            self.make_ready(p);
        }
    }

    fn on_loss_timer(&mut self, now: Instant, p: PeerIdx) {
        let patience = self.peers[p].patience(self.rto_floor_ns);
        let peer = &mut self.peers[p];
        if peer.reorder_at != Instant(0) && now >= peer.reorder_at {
            peer.reorder_at = Instant(0);
            let before = now.0.saturating_sub(peer.rtt.srtt_ns() + peer.rtt.reorder_ns());
            peer.snd.expire(&mut self.sent, now, Instant(before), &peer.rtt);
            peer.note_window();
            self.make_ready(p);
        }
        let peer = &mut self.peers[p];
        if now < peer.progress_at + patience {
            return;
        }
        peer.progress_at = now;
        if !peer.probed && peer.rtt.srtt_ns() > 0 {
            peer.probed = true;
            if let Some(psn) = peer.snd.newest(&self.sent) {
                peer.snd.guess(&mut self.sent, psn);
            }
        } else if !(planted(Bug::RetransmitOnce) && peer.backoff > 0) {
            self.counters.timeouts += 1;
            self.observed.tallies[p.at()].timeouts += 1;
            peer.backoff = peer.backoff.saturating_add(1);
            peer.snd.cwnd.on_timeout(now, peer.backoff);
            peer.note_window();
            // Perhaps only the acknowledgement is late. The answers to the first and the last
            // packet of the flight tell which of the others are lost.
            let (oldest, newest) = (peer.snd.oldest(&self.sent), peer.snd.newest(&self.sent));
            for psn in oldest.into_iter().chain(newest) {
                peer.snd.guess(&mut self.sent, psn);
            }
        }
        self.peers[p].snd.make_room(&mut self.sent);
        self.make_ready(p);
    }
}
