//! Timers of sessions: when a packet is declared lost, when a silent peer is probed, and when it is
//! declared dead.
//!
//! A peer is dead when the port reports that its process ended or, where the port cannot, when the
//! peer was silent for T_dead and did not answer probes that had time to be answered (rule S10;
//! `turn.rs` decides). A late turn first takes the waiting frames, then probes, then decides.

use barewire_driver::port::Presence;

use super::acks::ACK_DELAY_NS;
use super::notice::EndReason;
use super::peer::{PROBES_MIN, Peer, State};
use super::turn::OPENS_LATE;
use super::{Control, FrameSink, Node, PortState, Sessions};
use crate::idx::PeerIdx;
use crate::plant::{Bug, planted};
use crate::rel::congestion::CongestionControl;
use crate::rel::rtt::Rtt;
use crate::types::Instant;

/// Whether the `nth` repetition of a packet to a live process is skipped, since the process finds
/// the earlier ones when it polls: repetitions become less and less frequent. They do not end,
/// since a live process may drop frames that are not of its session, and another process may have
/// taken the address.
fn is_skipped(nth: u8) -> bool {
    nth > PROBES_MIN && !nth.is_power_of_two()
}

/// The number after `nth`. At the maximum it goes back to the last power of two, so that
/// repetitions go on at the same interval.
fn next_count(nth: u8) -> u8 {
    nth.checked_add(1).unwrap_or(1 << 7)
}

/// Added to the timeout of the tail probe, nanoseconds: the peer may delay its acknowledgement.
const PROBE_SLACK_NS: u64 = ACK_DELAY_NS + 10_000;

impl PortState {
    /// A lower bound of [`patience`](Peer::patience), nanoseconds.
    #[inline(always)]
    pub(super) fn patience_min(&self) -> u64 {
        self.rto_floor_ns.min(PROBE_SLACK_NS)
    }
}

impl Peer {
    /// How long the oldest packet in flight may go without progress, nanoseconds: before the tail
    /// probe two round trips plus their variation and the peer's acknowledgement delay; after it
    /// the retransmission timeout.
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
    /// The timer of `p` has fired. `out` is queried for the peer's presence, if the port tells it.
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
            // The process is alive, but the port lacks memory for frames to it.
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
                // it was present and received an OPEN of ours.
                let died = presence == Presence::Absent && self.openings.has_opened(p);
                if died {
                    return self.sessions().peer_died(now, p, EndReason::Died);
                }
                let refused = self.turn.is_over(self.openings.refusal_deadline(peer));
                if refused || self.turn.is_open_unanswered(&self.settings, peer, presence) {
                    let reason = self.openings.key_reason(p).unwrap_or(EndReason::NoAnswer);
                    return self.sessions().peer_died(now, p, reason);
                }
                if let Some(rst) = self.control().take_due_reset(p) {
                    return self.sessions().apply_rst(now, p, &rst);
                }
                self.control().resend_open(now, p, presence);
            }
            State::Open => {
                // The peer is alive but does not send announced data, and other pulls wait.
                let tells_presence = peer.path.tells_presence();
                let t_dead_ns = self.settings.t_dead_ns;
                let stalled =
                    !tells_presence && self.pulls.have_stalled(peer, &self.turn, t_dead_ns);
                if presence == Presence::Absent && !planted(Bug::DepartureIgnored) {
                    return self.sessions().peer_died(now, p, EndReason::Died);
                }
                if !tells_presence && peer.owes() && self.turn.is_silent(&self.settings, peer) {
                    return self.sessions().peer_died(now, p, EndReason::Silent);
                }
                if let Some(rst) = self.control().take_due_reset(p) {
                    return self.sessions().apply_rst(now, p, &rst);
                }
                if stalled {
                    return self.sessions().peer_died(now, p, EndReason::NoProgress);
                }
                let ends = match starves {
                    true => self.sessions().end_if_out_of_memory(now, p),
                    false => self.end_if_stuck(now, p),
                };
                if ends {
                    return;
                }
                self.control().on_open_timer(now, p);
            }
        }
        self.control().arm_timer(now, p);
    }
}

impl Sessions<'_> {
    fn peer_died(&mut self, now: Instant, p: PeerIdx, reason: EndReason) {
        self.counters.sessions_dead += 1;
        self.end_session(now, p, reason);
    }
}

impl Control<'_> {
    fn on_open_timer(&mut self, now: Instant, p: PeerIdx) {
        if !self.peers[p].path.is_lossless() && !self.peers[p].snd.is_empty() {
            self.on_loss_timer(now, p);
        }
        if self.peers[p].searches || self.peers[p].nack.is_due(now) {
            self.due.make_ready(self.peers, p);
        }
        let interval = self.peers[p].probe_interval(self.settings, self.port.rto_floor_ns);
        if self.peers[p].owes() && now >= self.peers[p].probe_at + interval {
            self.probe(now, p);
        }
    }

    fn on_loss_timer(&mut self, now: Instant, p: PeerIdx) {
        let patience = self.peers[p].patience(self.port.rto_floor_ns);
        let peer = &mut self.peers[p];
        if peer.reorder_at != Instant(0) && now >= peer.reorder_at {
            peer.reorder_at = Instant(0);
            let before = now.0.saturating_sub(peer.rtt.srtt_ns() + peer.rtt.reorder_ns());
            peer.snd.expire(self.sent, now, Instant(before), &peer.rtt);
            peer.note_window();
            self.due.make_ready(self.peers, p);
        }
        let peer = &mut self.peers[p];
        if now < peer.progress_at + patience {
            return;
        }
        peer.progress_at = now;
        if !peer.probed && peer.rtt.srtt_ns() > 0 {
            peer.probed = true;
            if let Some(psn) = peer.snd.newest(self.sent) {
                peer.snd.retransmit_speculatively(self.sent, psn);
            }
        } else if !(planted(Bug::RetransmitOnce) && peer.backoff > 0) {
            self.counters.timeouts += 1;
            self.observed.tallies[p.at()].timeouts += 1;
            peer.backoff = peer.backoff.saturating_add(1);
            peer.snd.cwnd.on_timeout(now, peer.backoff);
            peer.note_window();
            // Perhaps only the acknowledgement is late. The answers to the first and the last
            // packet of the flight tell which of the others are lost.
            let (oldest, newest) = (peer.snd.oldest(self.sent), peer.snd.newest(self.sent));
            for psn in oldest.into_iter().chain(newest) {
                peer.snd.retransmit_speculatively(self.sent, psn);
            }
        }
        self.peers[p].snd.make_room(self.sent);
        self.due.make_ready(self.peers, p);
    }

    /// Arms the timer of `p` for its next deadline, unless it is armed for an earlier time. A
    /// deadline that has passed and waits for something else, such as frames still in the port, is
    /// left to the next turn: a timer fires once per turn.
    pub(super) fn arm_timer(&mut self, now: Instant, p: PeerIdx) {
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
        let (s, floor_ns) = (&*self.settings, self.port.rto_floor_ns);
        match peer.state {
            State::Idle => None,
            State::Opening | State::Answered => {
                // Once due, it is sent in the next turn.
                let retry = self.openings.open_waits(peer, self.turn.polled_at);
                let due = self.open_due(peer);
                Some(retry.map_or(due, |at| due.min(at)))
            }
            State::Open => {
                let mut due = peer.owes().then(|| self.turn.probe_due(s, floor_ns, peer));
                if peer.path.is_sealed()
                    && let Some(at) = self.openings.reset_deadline(peer.slot(), s.t_dead_ns)
                {
                    due = Some(due.map_or(at, |d| d.min(at)));
                }
                let mut sooner = |at: Instant| due = Some(due.map_or(at, |d| d.min(at)));
                // Once due, it is sent in the next turn.
                if let Some(at) = peer.nack.waits(self.turn.polled_at) {
                    sooner(at);
                }
                if peer.searches
                    && let Some(at) = self.openings.search_due(peer.slot(), self.turn.polled_at)
                {
                    sooner(at);
                }
                if !peer.path.is_lossless() && !peer.snd.is_empty() {
                    sooner(peer.progress_at + peer.patience(floor_ns));
                    if peer.reorder_at != Instant(0) {
                        sooner(peer.reorder_at);
                    }
                }
                due
            }
        }
    }

    /// When the OPEN of a session being opened is repeated, or the session given up.
    fn open_due(&self, peer: &Peer) -> Instant {
        let (s, floor_ns) = (&*self.settings, self.port.rto_floor_ns);
        if self.turn.is_overdue(s, peer) && self.turn.was_probed(s, peer) {
            return self.turn.last_open_at(s, peer);
        }
        let pause = match peer.path.tells_presence() && peer.backoff >= PROBES_MIN {
            true => peer.probe_interval(s, floor_ns),
            false => peer.open_rto(floor_ns),
        };
        let due = (peer.probe_at + pause).min(self.turn.verdict_at(s, peer));
        let soonest = |due: Instant, at: Option<Instant>| at.map_or(due, |at| due.min(at));
        let due = soonest(due, self.openings.refusal_deadline(peer));
        soonest(due, self.openings.reset_deadline(peer.slot(), s.t_dead_ns))
    }

    /// Repeats an unanswered OPEN: less and less often if the port keeps it in the memory of a live
    /// process, which finds it when it polls. (The process may have dropped an OPEN of the other
    /// path, if it has become near or far meanwhile.)
    fn resend_open(&mut self, now: Instant, p: PeerIdx, presence: Presence) {
        if self.peers[p].want_open {
            // The OPEN may have waited for a route.
            self.due.make_ready(self.peers, p);
        }
        let due = now >= self.open_due(&self.peers[p]);
        let overdue = self.turn.is_overdue(self.settings, &self.peers[p]);
        let probed = self.turn.was_probed(self.settings, &self.peers[p]);
        let peer = &mut self.peers[p];
        if !due {
            return;
        }
        if overdue && probed && presence != Presence::Present {
            if peer.pings > 0 {
                peer.pings -= 1;
                peer.want_open = peer.repeats_open();
                self.due.make_ready(self.peers, p);
            }
            return;
        }
        peer.probe_at = now;
        peer.backoff = next_count(peer.backoff);
        if presence != Presence::Present || !is_skipped(peer.backoff) {
            peer.want_open = peer.repeats_open();
            peer.pings = if overdue { OPENS_LATE } else { 0 };
            self.due.make_ready(self.peers, p);
        }
    }

    /// Probes a peer that owes an answer. If this loop was paused until after T_dead, the missed
    /// probes are sent now.
    fn probe(&mut self, now: Instant, p: PeerIdx) {
        let overdue = self.turn.is_overdue(self.settings, &self.peers[p]);
        let probed = self.turn.was_probed(self.settings, &self.peers[p]);
        let peer = &mut self.peers[p];
        let missing = PROBES_MIN.saturating_sub(peer.probes);
        let count = match (overdue, peer.path.tells_presence()) {
            // Skipped probes count as well.
            (_, true) => {
                peer.probes = next_count(peer.probes);
                u8::from(!is_skipped(peer.probes))
            }
            (true, false) if probed => return,
            (true, false) => missing.max(PROBES_MIN / 2),
            (false, false) => 1,
        };
        peer.probe_at = now;
        if peer.is_stalled() {
            peer.backoff = peer.backoff.saturating_add(1);
        }
        if count > 0 {
            peer.pings = peer.pings.max(count);
            if !peer.path.tells_presence() {
                peer.probes = peer.probes.saturating_add(count);
            }
            peer.rx_quota = 0;
            self.counters.tx_probes += u64::from(count);
            self.due.make_ready(self.peers, p);
        }
    }
}
