//! Bounds on lack of progress: ends a session that passes short frames but not longer ones, or
//! whose receiver has lost its place in a ring, although the peer answers; and a session whose
//! frames the port has no memory for.

use barewire_driver::hint::cold;

use super::{EndReason, Node, Openings, Sending, Sessions};
use crate::idx::PeerIdx;
use crate::plant::{Bug, planted};
use crate::rel::psn::Psn;
use crate::types::Instant;
use crate::wire;

/// Shift from nanoseconds to units of 131 us.
const UNIT_BITS: u32 = 17;

/// Consecutive timeouts after which a session is checked.
const TIMEOUTS_MIN: u8 = 2;

/// The oldest packet in flight, and how long it has been retransmitted while the peer answered.
/// Times are in units of [`UNIT_BITS`] and wrap after six days.
///
/// Only an ACK packet counts as an answer: it shows that the peer receives. Other packets do not,
/// since a program also sends while it does not poll.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Progress {
    /// PSN of the oldest packet.
    oldest: Psn,
    /// How long it has not got through while the peer answered.
    stuck: u32,
    /// Time of the last check.
    checked_at: u32,
    /// Time of the last answer, and whether one has arrived since the last check.
    answered_at: u32,
    is_answered: bool,
}

impl Progress {
    /// Updates the record at `now`, and returns how long nothing has got through to a peer that
    /// answers. The time between two checks counts up to `most`; time without an answer does not
    /// count once it exceeds twice that.
    fn update(&mut self, now: u32, oldest: Psn, most: u32) -> u32 {
        if oldest != self.oldest {
            let (checked_at, answered_at) = (now, now);
            *self = Self { oldest, stuck: 0, checked_at, answered_at, is_answered: false };
            return 0;
        }
        if std::mem::take(&mut self.is_answered) {
            self.answered_at = now;
        }
        let gap = now.wrapping_sub(self.checked_at).min(most);
        if now.wrapping_sub(self.answered_at) <= 2 * most {
            self.stuck += gap;
        }
        self.checked_at = now;
        self.stuck
    }
}

impl Openings {
    /// Records that an ACK packet has arrived from `p`.
    #[inline(always)]
    pub(super) fn note_answer(&mut self, p: PeerIdx) {
        if !self.progress.is_empty()
            && let Some(progress) = cold(self.progress.get_mut(&p))
        {
            progress.is_answered = true;
        }
    }
}

impl Node {
    /// Ends the session with `p` if its oldest packet has not got through for T_dead, and returns
    /// whether it did. Called when a timer may have retransmitted something.
    pub(super) fn end_if_stuck(&mut self, now: Instant, p: PeerIdx) -> bool {
        let t_dead = (self.settings.t_dead_ns >> UNIT_BITS) as u32;
        let peer = &self.peers[p];
        // On a lossy path one or two losses in a row say nothing about the path.
        let repeated = peer.path.is_lossless() || peer.backoff > TIMEOUTS_MIN;
        if peer.snd.in_flight() == 0 || !repeated {
            if !self.openings.progress.is_empty() {
                self.openings.progress.remove(&p);
            }
            return false;
        }
        let oldest = peer.snd.una;
        // At most T_dead / 8: probes go out every tenth, so the peer answers as often.
        let progress = self.openings.progress.entry(p).or_default();
        let stuck = progress.update((now.0 >> UNIT_BITS) as u32, oldest, t_dead / 8);
        if stuck < t_dead || planted(Bug::StallUndetected) {
            return false;
        }
        self.counters.sessions_stuck += 1;
        let len = self.sending().oldest_len(p);
        self.sessions().end_session(now, p, EndReason::Stuck(len));
        true
    }
}

impl Sessions<'_> {
    /// Ends the session with `p` if the port has had no memory for the next frame to it for T_dead,
    /// and returns whether it did. Called at each of its timers while the port lacks memory.
    pub(super) fn end_if_out_of_memory(&mut self, now: Instant, p: PeerIdx) -> bool {
        let t_dead = (self.settings.t_dead_ns >> UNIT_BITS) as u32;
        let peer = &self.peers[p];
        if !peer.queued {
            self.openings.progress.remove(&p);
            return false;
        }
        let next = peer.snd.nxt;
        let progress = self.openings.progress.entry(p).or_default();
        // No answer of the peer is needed.
        progress.is_answered = true;
        if progress.update((now.0 >> UNIT_BITS) as u32, next, t_dead / 8) < t_dead {
            return false;
        }
        self.counters.sessions_stuck += 1;
        self.end_session(now, p, EndReason::Starved);
        true
    }
}

impl Sending<'_> {
    /// Bytes of the frame of the oldest packet in flight; 0 if it was not kept.
    fn oldest_len(&self, p: PeerIdx) -> u32 {
        let snd = &self.peers[p].snd;
        let oldest = snd.oldest(self.sent).and_then(|psn| snd.by_psn(self.sent, psn));
        let Some(idx) = oldest else { return 0 };
        let entry = &self.sent[idx];
        let trailer = self.peers[p].path.trailer_len();
        let head = wire::BASE_LEN + usize::from(entry.op_len);
        (head + self.body(entry.body).len() + trailer) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How long nothing got through after `checks` of (gap, answered), with a `most` of 10.
    fn stuck(checks: &[(u32, bool)]) -> u32 {
        let (mut progress, mut now) = (Progress::default(), 5);
        progress.update(now, Psn(7), 10);
        let mut stuck = 0;
        for &(gap, is_answered) in checks {
            now += gap;
            progress.is_answered = is_answered;
            stuck = progress.update(now, Psn(7), 10);
        }
        stuck
    }

    #[test]
    fn the_clock_runs_while_the_peer_answers() {
        assert_eq!(stuck(&[(4, true), (4, false), (4, true)]), 12);
        assert_eq!(stuck(&[(100, true)]), 10, "a gap in looking counts for little");
        assert_eq!(stuck(&[(10, false), (10, false), (10, false), (10, false)]), 20, "silence");
        assert_eq!(stuck(&[(10, false), (10, false), (10, false), (10, true)]), 30, "an answer");
    }

    #[test]
    fn progress_sets_the_clock_back() {
        let mut progress = Progress::default();
        for now in 1..9 {
            progress.is_answered = true;
            progress.update(now, Psn(1), 10);
        }
        assert_eq!(progress.update(9, Psn(1), 10), 8);
        assert_eq!(progress.update(10, Psn(2), 10), 0);
        assert_eq!(progress.update(11, Psn(2), 10), 1);
    }
}
