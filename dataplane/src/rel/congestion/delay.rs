//! Delay-based congestion control.
//!
//! A queue in the path shows as a round trip longer than the minimum. While there is none, the
//! window grows by two packets per round trip; while there is one, the window shrinks in
//! proportion, at most once per round trip. So the queue stays short, and with it the repair of a
//! loss: a lost packet is retransmitted after one round trip, and the window behind it lasts for
//! several. A path that reorders packets has long round trips without a queue, so the allowance
//! follows their variation.
//!
//! A few losses alone change nothing: on the target links they are more often noise than
//! congestion. A loss of more than a 64th of the window while there is a queue halves the window,
//! at most once per round trip, and so does a loss of more than half of it: a switch port has
//! overflowed, as in an incast.
//!
//! Losses and marks reduce the window to one packet at least, delay alone to eight. A session that
//! began while the queue was full takes that delay for the path's, and would leave nothing to
//! sessions that know the path's minimum. Below eight packets the window grows by less than two per
//! round trip, and slowly even while there is a queue. An unused window does not grow (RFC 7661).
//!
//! A queue that persists for a second with eight or hardly more packets in flight is caused by
//! flows that yield to losses only, such as TCP: then the window competes. It grows regardless of
//! delay, twofold per round trip until the first loss and by one packet from then on, and losses
//! halve it, until the queue is gone (Copa's competitive mode). Or the path has become longer,
//! after a change of route. So after ten seconds the window shrinks to eight packets. If the queue
//! persists for another second, round trips are as long as the minimum of that second, and nothing
//! is lost, that minimum is the path's; otherwise the queue still belongs to other flows.
//!
//! A timeout while there is a queue halves the window as well. Without a queue, the peer is busy or
//! the path is broken: from the second timeout in a row on each halves the window, which then
//! doubles each round trip up to half of its former size (RFC 5681, 3.1).
//!
//! A router's mark (ECN) is no noise: it reduces the window by a fifth, at most once per round
//! trip, as in RFC 8511, since a router marks while its queue is still short.

use bitflags::bitflags;

use super::{Acked, CongestionControl, WINDOW};
use crate::rel::rtt::Rtt;
use crate::types::Instant;

/// Least window, packets.
const MIN: u32 = 1;

/// Least window for delay alone, without losses, packets.
const FEW: u32 = 8;

/// Initial window of a new session, packets. It doubles every round trip, so a short path is full
/// after a few, and a long message does not begin with a queue.
const FIRST: u32 = 16;

/// Largest target of slow start, packets as a power of two.
const START_TO_MAX: u8 = WINDOW.ilog2() as u8;

/// Units of `size` per packet.
const ONE: u32 = 256;

/// How long a queue persists until a small window competes; and how long it competes, milliseconds.
const PERSIST_MS: u16 = 1_000;
const COMPETE_MS: u16 = 10_000;

/// Shift from nanoseconds to units of 64 ns.
const CUT_BITS: u32 = 6;

/// Multiple of the round trip's variation beyond which a delay is certainly a queue. Reordering
/// delays by twice the variation, an overflowing queue by more than ten times.
const CERTAIN_QUEUE: u64 = 8;

bitflags! {
    /// State bits of a window.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct WindowFlags: u8 {
        /// Slow start: the window grows by the number of acknowledged packets, until the first
        /// queue or to `start_to`.
        const STARTING = 1;
        /// The last reduction was for a mark.
        const CUT_FOR_MARK = 1 << 1;
        /// There was certainly a queue at the last acknowledgement.
        const QUEUED = 1 << 2;
        /// Competitive mode: the window does not yield to a queue.
        const COMPETING = 1 << 3;
        /// The window has competed since there was last no queue.
        const HAS_COMPETED = 1 << 4;
    }
}

/// The window of one session. Packed, to save space in the session's record.
#[derive(Clone, Copy, Debug)]
#[repr(C, packed(2))]
pub struct DelayWindow {
    /// Window in 256ths of a packet.
    size: u32,
    is: WindowFlags,
    /// Target of slow start, packets as a power of two.
    start_to: u8,
    /// Time of the last reduction, in units of 2^[`CUT_BITS`] ns.
    cut_at: u32,
    /// How long a queue has persisted, or the window has competed, milliseconds.
    phase_ms: u16,
}

impl Default for DelayWindow {
    fn default() -> Self {
        Self {
            size: FIRST * ONE,
            is: WindowFlags::STARTING,
            start_to: START_TO_MAX,
            cut_at: 0,
            phase_ms: 0,
        }
    }
}

impl DelayWindow {
    fn is(&self, what: WindowFlags) -> bool {
        { self.is }.contains(what)
    }

    /// Reduces the window by `by` for a queue, and ends slow start.
    fn cut(&mut self, now: Instant, by: u32, for_mark: bool) {
        self.size -= by.min(self.size - MIN * ONE);
        let mut is = self.is - WindowFlags::STARTING;
        is.set(WindowFlags::CUT_FOR_MARK, for_mark);
        (self.cut_at, self.is) = ((now.0 >> CUT_BITS) as u32, is);
    }

    /// Time since the last reduction, nanoseconds; wraps after some minutes.
    fn since_cut_ns(&self, now: Instant) -> u64 {
        u64::from(((now.0 >> CUT_BITS) as u32).wrapping_sub(self.cut_at)) << CUT_BITS
    }

    /// Detects competing flows or a longer path. `stands`: round trips exceed the minimum, whatever
    /// their variation. `allowed`: by how much they may exceed it, nanoseconds.
    fn detect_competition(&mut self, now: Instant, stands: bool, allowed: u64, rtt: &mut Rtt) {
        let (gap, window, competes) =
            (rtt.lap_ms(now), self.window(), self.is(WindowFlags::COMPETING));
        let mut is = self.is;
        if !stands {
            is -= WindowFlags::HAS_COMPETED;
            if competes {
                is -= WindowFlags::COMPETING | WindowFlags::STARTING;
            }
        } else if competes {
            self.phase_ms += gap;
            if self.phase_ms < COMPETE_MS {
                return;
            }
            is =
                (is - (WindowFlags::COMPETING | WindowFlags::STARTING)) | WindowFlags::HAS_COMPETED;
            self.size = self.size.min(FEW * ONE);
        } else if window <= 2 * FEW {
            // Below eight packets, losses keep the window small; or round trips vary too much to
            // decide.
            let queued = rtt.srtt_ns().saturating_sub(rtt.min_ns()) > allowed;
            if window < FEW || !queued {
                return;
            }
            self.phase_ms += gap;
            if self.phase_ms < PERSIST_MS {
                return;
            }
            let is_steady = rtt.srtt_ns().saturating_sub(rtt.recent_min_ns()) <= allowed;
            let had_losses = self.since_cut_ns(now) < 1_000_000 * u64::from(PERSIST_MS);
            if self.is(WindowFlags::HAS_COMPETED) && is_steady && !had_losses {
                rtt.path_is_longer();
            } else {
                is |= WindowFlags::COMPETING | WindowFlags::STARTING;
                self.start_to = START_TO_MAX;
            }
            is -= WindowFlags::HAS_COMPETED;
        }
        self.is = is;
        self.phase_ms = 0;
        rtt.forget_recent();
    }

    /// The growth of a window of `packets` by an acknowledgement of `acked` packets. `queued`:
    /// there is a queue.
    fn growth(&self, acked: u32, packets: u32, queued: bool) -> u32 {
        let competes = self.is(WindowFlags::COMPETING);
        if self.is(WindowFlags::STARTING) && (competes || !queued) && packets < 1 << self.start_to {
            return acked * ONE;
        }
        if competes {
            return acked * ONE / packets;
        }
        // A quarter of a packet per round trip for each packet of the window, at most two; a
        // quarter of that with a queue.
        let slower = if queued { 4 } else { 1 };
        acked * ONE * packets.min(FEW) / (4 * packets * slower)
    }
}

impl CongestionControl for DelayWindow {
    /// The whole window from the start: acknowledgements begin once half of it is in flight.
    fn whole() -> Self {
        Self { size: WINDOW * ONE, ..Self::default() }
    }

    #[inline]
    fn window(&self) -> u32 {
        self.size / ONE
    }

    /// Uses the smoothed round trip: a single packet may be late for other reasons.
    fn on_ack(&mut self, now: Instant, ack: Acked, rtt: &mut Rtt, floor_ns: u64) {
        let (packets, srtt) = (self.window().max(1), rtt.srtt_ns());
        let queue_ns = srtt.saturating_sub(rtt.min_ns());
        let certain = (floor_ns / 4).max(CERTAIN_QUEUE * rtt.var_ns());
        let mut is = self.is;
        is.set(WindowFlags::QUEUED, queue_ns > certain);
        self.is = is;
        let allowed = (floor_ns / 4).max(4 * rtt.var_ns());
        let queued = queue_ns > allowed;
        self.detect_competition(now, queue_ns > floor_ns / 4, allowed, rtt);
        if !queued || packets < FEW || self.is(WindowFlags::COMPETING) {
            let is_used = ack.under_way + 2 >= packets / 2;
            if is_used {
                let grown = self.growth(ack.packets, packets, queued);
                self.size = (self.size + grown).min(WINDOW * ONE);
            }
        } else if self.since_cut_ns(now) > srtt {
            let over = ((queue_ns - allowed) * 256 / srtt) as u32;
            let most = self.size.saturating_sub(FEW * ONE);
            let by = (self.size * over.min(256) / 512).min(most);
            // A reduction by 0 would prevent the reduction for a loss in this round trip.
            if by > 0 {
                self.cut(now, by, false);
            }
        }
    }

    fn on_mark(&mut self, now: Instant, rtt: &Rtt) {
        // A reduction for a slightly long delay does not prevent the one for a mark.
        let may = !self.is(WindowFlags::CUT_FOR_MARK) || self.since_cut_ns(now) > rtt.srtt_ns();
        if may {
            self.cut(now, self.size / 5, true);
        }
    }

    /// A session that began in a full queue does not detect it by delay; but noise rarely costs
    /// more than half of a window.
    fn on_loss(&mut self, now: Instant, lost: u32, rtt: &Rtt) {
        let window = self.window();
        let is_heavy = lost > 1 && lost > window / 2;
        let overflowed =
            self.is(WindowFlags::COMPETING) || self.is(WindowFlags::QUEUED) && lost > window / 64;
        if (is_heavy || overflowed) && self.since_cut_ns(now) > rtt.srtt_ns() {
            self.cut(now, self.size / 2, false);
        }
    }

    fn on_timeout(&mut self, now: Instant, nth: u8) {
        let is_queued = self.is(WindowFlags::QUEUED);
        if !is_queued && nth == 2 {
            self.start_to = (self.window() / 2).max(1).ilog2() as u8;
        }
        if is_queued || nth > 1 {
            self.cut(now, self.size / 2, false);
            let mut is = self.is;
            is.set(WindowFlags::STARTING, !is_queued);
            self.is = is;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An acknowledgement of some packets of a fully used window.
    fn ack(packets: u32) -> Acked {
        Acked { packets, under_way: WINDOW }
    }

    #[test]
    fn window_follows_the_queue() {
        let mut rtt = Rtt::default();
        for _ in 0..50 {
            rtt.sample(20_000);
        }
        let mut cwnd = DelayWindow::default();
        let mut now = Instant(0);
        for _ in 0..600 {
            cwnd.on_ack(now, ack(8), &mut rtt, 100_000);
        }
        assert_eq!(cwnd.window(), WINDOW, "no queue: as many as may be numbered");
        for _ in 0..100 {
            rtt.sample(400_000);
            now = now + 500_000;
            cwnd.on_ack(now, ack(8), &mut rtt, 100_000);
        }
        assert_eq!(cwnd.window(), FEW, "a queue that stays: the least");
        for _ in 0..200 {
            rtt.sample(20_000);
        }
        for _ in 0..10 {
            cwnd.on_ack(now, ack(8), &mut rtt, 100_000);
        }
        let grown = cwnd.window();
        assert!((FEW + 10..FEW + 24).contains(&grown), "about two a round trip, not {grown}");
    }

    /// A new window, and an estimate whose last round trips took `rtt_ns` and whose first took 20
    /// us.
    fn after_round_trips(rtt_ns: u64) -> (DelayWindow, Rtt) {
        let (mut cwnd, mut rtt) = (DelayWindow::default(), Rtt::default());
        rtt.sample(20_000);
        cwnd.on_ack(Instant(0), ack(240), &mut rtt, 100_000);
        for _ in 0..60 {
            rtt.sample(rtt_ns);
        }
        cwnd.on_ack(Instant(1), ack(0), &mut rtt, 100_000);
        (cwnd, rtt)
    }

    /// Goal: the losses of an overflowing port halve the window once per round trip, noise does
    /// not; likewise for timeouts.
    #[test]
    fn a_loss_counts_where_there_is_a_queue() {
        let (mut calm, rtt) = after_round_trips(22_000);
        for i in 1..9 {
            calm.on_loss(Instant(i * 1_000_000), 100, &rtt);
            calm.on_timeout(Instant(i * 1_000_000), 1);
        }
        assert_eq!(calm.window(), 256);
        calm.on_loss(Instant(20_000_000), 129, &rtt);
        assert_eq!(calm.window(), 128, "no noise takes more than half of it");
        let (mut full, rtt) = after_round_trips(120_000);
        let now = Instant(1_000_000);
        for after in [0, 60_000, 119_000] {
            full.on_loss(now + after, 5, &rtt);
        }
        let halved = full.window();
        assert!((100..=128).contains(&halved), "{halved}");
        full.on_loss(now + 130_000, 5, &rtt);
        assert_eq!(full.window(), halved / 2);
        for _ in 0..9 {
            full.on_timeout(now + 140_000, 1);
        }
        assert_eq!(full.window(), MIN);
    }

    /// Goal: a queue of other flows does not starve a session by delay, but by losses.
    #[test]
    fn delay_alone_leaves_a_few_packets() {
        let (mut cwnd, mut rtt) = after_round_trips(20_000);
        let mut now = Instant(1_000_000);
        for _ in 0..100 {
            rtt.sample(400_000);
            now = now + 500_000;
            cwnd.on_ack(now, ack(8), &mut rtt, 100_000);
        }
        assert_eq!(cwnd.window(), FEW);
        for _ in 0..4 {
            now = now + 500_000;
            cwnd.on_loss(now, 1, &rtt);
        }
        assert_eq!(cwnd.window(), MIN);
        for _ in 0..32 {
            cwnd.on_ack(now, ack(2), &mut rtt, 100_000);
        }
        assert!((3..=FEW).contains(&cwnd.window()), "{cwnd:?}");
    }

    /// Feeds a window round trips of `rtt_ns`, one per millisecond, for `ms` from `from_ms` on.
    fn stands(cwnd: &mut DelayWindow, rtt: &mut Rtt, from_ms: u64, ms: u64, rtt_ns: u64) {
        for at in from_ms..from_ms + ms {
            rtt.sample(rtt_ns + at % 3 * 1000);
            cwnd.on_ack(Instant(at * 1_000_000), ack(1), rtt, 100_000);
        }
    }

    /// Goal: a small window competes with flows that keep up a queue for a second, yields to losses
    /// then, and stops competing once the queue is gone.
    #[test]
    fn a_queue_of_others_is_competed_with() {
        let (mut cwnd, mut rtt) = after_round_trips(20_000);
        stands(&mut cwnd, &mut rtt, 1, 900, 400_000);
        assert_eq!(cwnd.window(), FEW);
        stands(&mut cwnd, &mut rtt, 901, 2000, 400_000);
        let grown = cwnd.window();
        assert!(grown > 5 * FEW, "{grown}");
        cwnd.on_loss(Instant(2901 * 1_000_000), 1 + grown / 64, &rtt);
        assert_eq!(cwnd.window(), grown / 2);
        stands(&mut cwnd, &mut rtt, 2902, 60, 20_000);
        assert!(!cwnd.is(WindowFlags::COMPETING));
        assert_eq!(rtt.min_ns(), 20_000);
    }

    /// Goal: idle time of a session does not count as a persistent queue.
    #[test]
    fn an_idle_session_does_not_compete() {
        let (mut cwnd, mut rtt) = after_round_trips(20_000);
        stands(&mut cwnd, &mut rtt, 1, 100, 400_000);
        for second in 2..12 {
            stands(&mut cwnd, &mut rtt, 1000 * second, 5, 400_000);
            assert!(!cwnd.is(WindowFlags::COMPETING), "after {second} s");
        }
    }

    /// Goal: a competing window yields to each loss, however much round trips vary.
    #[test]
    fn a_competing_window_yields_to_losses() {
        let (mut cwnd, mut rtt) = after_round_trips(20_000);
        stands(&mut cwnd, &mut rtt, 1, 1300, 400_000);
        for ms in 1301..1320 {
            rtt.sample(if ms % 2 == 0 { 200_000 } else { 1_200_000 });
            cwnd.on_ack(Instant(ms * 1_000_000), ack(1), &mut rtt, 100_000);
        }
        let grown = cwnd.window();
        assert!(
            cwnd.is(WindowFlags::COMPETING) && !cwnd.is(WindowFlags::QUEUED) && grown > 2 * FEW,
            "{cwnd:?}"
        );
        cwnd.on_loss(Instant(1400 * 1_000_000), 1, &rtt);
        assert_eq!((cwnd.window(), cwnd.is(WindowFlags::STARTING)), (grown / 2, false));
    }

    /// Goal: a path that has become longer is detected after a second, ten of competition, and
    /// another second, and does not cause competition from then on.
    #[test]
    fn a_longer_path_is_told_from_a_queue() {
        let (mut cwnd, mut rtt) = after_round_trips(20_000);
        stands(&mut cwnd, &mut rtt, 1, 12_400, 400_000);
        assert_eq!((cwnd.window(), rtt.min_ns()), (FEW, 20_000));
        stands(&mut cwnd, &mut rtt, 12_401, 1500, 400_000);
        assert_eq!(rtt.min_ns(), 400_000);
        assert!(cwnd.window() > FEW && !cwnd.is(WindowFlags::COMPETING));
    }

    /// Goal: after a pause of a busy peer the window recovers within a few round trips.
    #[test]
    fn a_peer_that_was_silent_is_not_congestion() {
        let (mut cwnd, mut rtt) = after_round_trips(22_000);
        cwnd.cut(Instant(1), 0, false);
        let before = cwnd.window();
        let now = Instant(1_000_000);
        for nth in 1..9 {
            cwnd.on_timeout(now + 1_000_000 * u64::from(nth), nth);
        }
        assert!((MIN..FEW).contains(&cwnd.window()));
        for _ in 0..8 {
            let packets = cwnd.window();
            cwnd.on_ack(now + 20_000_000, ack(packets), &mut rtt, 100_000);
        }
        assert!(cwnd.window() >= before / 2, "{} of {before}", cwnd.window());
    }

    /// Goal: a session that sends little has no large window when a queue builds up.
    #[test]
    fn an_unused_window_does_not_grow() {
        let (mut cwnd, mut rtt) = after_round_trips(20_000);
        let before = cwnd.size;
        for _ in 0..50 {
            cwnd.on_ack(Instant(2), Acked { packets: 1, under_way: 20 }, &mut rtt, 100_000);
        }
        assert_eq!({ cwnd.size }, before);
        cwnd.on_ack(Instant(2), Acked { packets: 1, under_way: 200 }, &mut rtt, 100_000);
        assert!(cwnd.size > before);
    }

    /// Goal: a mark takes a fifth of the window although a delay has just taken very little, but
    /// only once per round trip.
    #[test]
    fn a_mark_counts_beside_a_delay() {
        let mut rtt = Rtt::default();
        rtt.sample(20_000);
        let mut cwnd = DelayWindow::default();
        cwnd.on_ack(Instant(0), ack(984), &mut rtt, 100_000);
        // Just over the limit.
        while rtt.srtt_ns() <= rtt.min_ns() + (100_000 / 4).max(4 * rtt.var_ns()) {
            rtt.sample(60_000);
        }
        let mut now = Instant(1_000_000_000);
        for _ in 0..4 {
            let before = cwnd.window();
            cwnd.on_ack(now, ack(0), &mut rtt, 100_000);
            for _ in 0..3 {
                cwnd.on_mark(now + 1, &rtt);
            }
            assert!((before * 3 / 4..=before * 4 / 5).contains(&cwnd.window()), "{before}");
            now = now + 2 * rtt.srtt_ns();
        }
    }

    /// A window of `packets` after slow start.
    fn settled(packets: u32, is: WindowFlags) -> DelayWindow {
        DelayWindow { size: packets * ONE, is, ..DelayWindow::default() }
    }

    /// Goal: a window grows by two packets per round trip, by less below eight packets and in a
    /// queue, by one while it competes, and by all acknowledged packets in slow start.
    #[test]
    fn growth_is_by_what_the_window_knows() {
        let none = settled(16, WindowFlags::empty());
        assert_eq!([none.growth(16, 16, false), none.growth(16, 16, true)], [2 * ONE, ONE / 2]);
        assert_eq!([none.growth(4, 4, false), none.growth(2, 2, true)], [ONE, ONE / 8]);
        let competes = settled(16, WindowFlags::COMPETING);
        assert_eq!([16, 4].map(|acked| competes.growth(acked, 16, true)), [ONE, ONE / 4]);
        let mut starts = settled(16, WindowFlags::STARTING);
        starts.start_to = 4;
        assert_eq!([15, 16].map(|packets| starts.growth(3, packets, false)), [3 * ONE, 96]);
        assert_eq!(starts.growth(15, 15, true), ONE / 2);
        starts.is |= WindowFlags::COMPETING;
        assert_eq!([15, 16].map(|packets| starts.growth(16, packets, true)), [16 * ONE, ONE]);
    }

    /// Goal: delay takes a proportional share of half of the window, once per round trip, and
    /// leaves eight packets; a window counts as used if half of it was in flight.
    #[test]
    fn a_queue_takes_in_proportion() {
        let (mut cwnd, mut rtt) = (settled(100, WindowFlags::empty()), Rtt::default());
        rtt.sample(100_000);
        for _ in 0..200 {
            rtt.sample(200_000);
        }
        let (srtt, var) = (rtt.srtt_ns(), rtt.var_ns());
        assert!(var < 1_000 && srtt.abs_diff(200_000) < 100, "{rtt:?}");
        let over = (srtt - 100_000 - 25_000) * 256 / srtt;
        let now = Instant(1 << 30);
        cwnd.on_ack(now, ack(1), &mut rtt, 100_000);
        let left = 100 * ONE - (100 * u64::from(ONE) * over / 512) as u32;
        assert_eq!({ cwnd.size }, left);
        assert!(cwnd.is(WindowFlags::QUEUED) && !cwnd.is(WindowFlags::CUT_FOR_MARK));
        cwnd.on_ack(now + (srtt & !63), ack(1), &mut rtt, 100_000);
        assert_eq!({ cwnd.size }, left, "within the round trip");
        cwnd.on_ack(now + srtt + 64, ack(1), &mut rtt, 100_000);
        assert!(cwnd.size < left);
        let mut few = settled(FEW + 1, WindowFlags::empty());
        few.on_ack(now, ack(1), &mut rtt, 100_000);
        assert_eq!({ few.size }, FEW * ONE);
        let mut calm = Rtt::default();
        calm.sample(20_000);
        let used = |under_way| {
            let mut cwnd = settled(100, WindowFlags::empty());
            cwnd.on_ack(now, Acked { packets: 50, under_way }, &mut calm, 100_000);
            cwnd.size > 100 * ONE
        };
        assert_eq!([47, 48].map(used), [false, true]);
    }

    /// Goal: the second timeout in a row of a silent peer halves the window, which then doubles to
    /// half of its former size; in a queue the first timeout halves it.
    #[test]
    fn a_timeout_halves_by_what_was_seen() {
        let now = Instant(1 << 30);
        let mut calm = settled(100, WindowFlags::empty());
        calm.on_timeout(now, 1);
        assert_eq!((calm.window(), calm.is(WindowFlags::STARTING)), (100, false));
        calm.on_timeout(now, 2);
        assert_eq!((calm.window(), calm.is(WindowFlags::STARTING), calm.start_to), (50, true, 5));
        calm.on_timeout(now, 3);
        assert_eq!((calm.window(), calm.is(WindowFlags::STARTING), calm.start_to), (25, true, 5));
        let mut full = settled(100, WindowFlags::QUEUED | WindowFlags::STARTING);
        full.on_timeout(now, 1);
        assert_eq!((full.window(), full.is(WindowFlags::STARTING)), (50, false));
        full.on_timeout(now, 2);
        assert_eq!((full.window(), full.start_to), (25, START_TO_MAX));
        let mut one = settled(1, WindowFlags::empty());
        one.on_timeout(now, 2);
        assert_eq!((one.window(), one.start_to), (1, 0));
    }

    /// Goal: noise and an overflowing port are distinguished by the share of lost packets.
    #[test]
    fn a_loss_is_heavy_by_its_share() {
        let mut rtt = Rtt::default();
        rtt.sample(20_000);
        let left = |is, packets, lost| {
            let mut cwnd = settled(packets, is);
            cwnd.on_loss(Instant(1 << 30), lost, &rtt);
            cwnd.window()
        };
        assert_eq!([1, 64, 65].map(|lost| left(WindowFlags::empty(), 128, lost)), [128, 128, 64]);
        assert_eq!([left(WindowFlags::empty(), 1, 1), left(WindowFlags::empty(), 2, 2)], [1, 1]);
        assert_eq!([2, 3].map(|lost| left(WindowFlags::QUEUED, 128, lost)), [128, 64]);
        assert_eq!(left(WindowFlags::COMPETING, 128, 1), 64);
    }

    /// Goal: an action that is limited to once per round trip is possible again after a round trip.
    #[test]
    fn a_round_trip_has_passed_when_it_is_over() {
        let mut rtt = Rtt::default();
        rtt.sample(64_000);
        let at = Instant(64_000_000);
        let window_after = |is, ns, f: fn(&mut DelayWindow, Instant, &Rtt)| {
            let mut cwnd = settled(100, is);
            cwnd.cut_at = (at.0 >> CUT_BITS) as u32;
            f(&mut cwnd, at + ns, &rtt);
            cwnd.window()
        };
        let mark = |ns| {
            window_after(WindowFlags::CUT_FOR_MARK, ns, |cwnd, now, rtt| cwnd.on_mark(now, rtt))
        };
        assert_eq!([64_000, 64_064].map(mark), [100, 80]);
        let loss =
            |ns| window_after(WindowFlags::QUEUED, ns, |cwnd, now, rtt| cwnd.on_loss(now, 9, rtt));
        assert_eq!([64_000, 64_064].map(loss), [100, 50]);
        assert_eq!(DelayWindow::whole().window(), WINDOW);
    }

    /// Goal: windows of eight to sixteen packets in a queue that exceeds the allowance begin to
    /// compete after a second.
    #[test]
    fn a_small_window_in_a_queue_counts_its_time() {
        let mut rtt = Rtt::default();
        rtt.sample(20_000);
        (0..60).for_each(|_| rtt.sample(420_000));
        let queue = rtt.srtt_ns() - rtt.min_ns();
        let competes = |packets, allowed| {
            let (mut cwnd, mut rtt) = (settled(packets, WindowFlags::empty()), rtt);
            (0..1_100).for_each(|ms| {
                cwnd.detect_competition(Instant(ms * 1_000_000), true, allowed, &mut rtt);
            });
            cwnd.is(WindowFlags::COMPETING)
        };
        let by_size = [FEW - 1, FEW, 2 * FEW, 2 * FEW + 1].map(|n| competes(n, queue - 1));
        assert_eq!(by_size, [false, true, true, false]);
        assert!(!competes(FEW, queue), "as long as is allowed");
    }

    #[test]
    fn a_mark_takes_a_fifth_once_a_round_trip() {
        let mut rtt = Rtt::default();
        rtt.sample(20_000);
        let mut cwnd = DelayWindow::default();
        let mut now = Instant(1_000_000);
        cwnd.on_ack(now, ack(984), &mut rtt, 100_000);
        assert_eq!(cwnd.window(), 1000);
        for (after, window) in [(0, 800), (10_000, 800), (9_900, 800), (300, 640), (20_100, 512)] {
            now = now + after;
            cwnd.on_mark(now, &rtt);
            assert_eq!(cwnd.window(), window);
        }
        cwnd.on_ack(now, ack(64), &mut rtt, 100_000);
        assert_eq!(cwnd.window(), 512, "it grows by two a round trip from then on");
        for _ in 0..100 {
            now = now + 30_000;
            cwnd.on_mark(now, &rtt);
        }
        assert_eq!(cwnd.window(), MIN);
    }
}
