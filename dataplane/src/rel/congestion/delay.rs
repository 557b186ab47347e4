//! A window ruled by delay.
//!
//! A queue in the path shows as a round trip longer than the shortest one. As long as it is not,
//! the window grows by two packets a round trip; when it is, the window shrinks in proportion, at
//! most once a round trip. So the queue stays short, which keeps the repair of a loss short as
//! well: a lost packet is sent again after one round trip, and the packets that may be numbered
//! beyond it last for several. Loss by itself changes nothing: on the links this is made for it is
//! noise more often than congestion. A mark that a router sets (ECN) is no noise: it takes a fifth
//! of the window, at most once a round trip, as RFC 8511 has it, since a router marks while its
//! queue is still short. A path that reorders has long round trips without a queue, so
//! the allowance follows their variation.

use super::{CongestionControl, WINDOW};
use crate::rel::rtt::Rtt;
use crate::types::Instant;

/// Packets that may always be under way.
const MIN: u32 = 8;

/// Packets that a new session may have under way. It doubles every round trip, so a short path is
/// full after a few, and a long message does not begin with a queue.
const FIRST: u32 = 16;

/// Fractions of a packet.
const ONE: u32 = 256;

/// The window of one session. Packed, for the sake of its neighbours.
#[derive(Clone, Copy, Debug)]
#[repr(C, packed(2))]
pub struct DelayWindow {
    /// In 256ths of a packet.
    size: u32,
    /// Grows by what is acknowledged, until the first queue.
    slow_start: bool,
    /// When it shrank last, that was for a mark.
    cut_for_mark: bool,
    /// When it shrank last.
    cut_at: Instant,
}

impl Default for DelayWindow {
    fn default() -> Self {
        Self { size: FIRST * ONE, slow_start: true, cut_at: Instant(0), cut_for_mark: false }
    }
}

impl DelayWindow {
    /// There is a queue: the window shrinks, and does not grow again as it did at first.
    fn cut(&mut self, now: Instant, by: u32, for_mark: bool) {
        self.size = (self.size - by).max(MIN * ONE);
        self.slow_start = false;
        (self.cut_at, self.cut_for_mark) = (now, for_mark);
    }
}

impl CongestionControl for DelayWindow {
    /// All at once: nobody reports what has arrived before half of them are under way.
    fn whole() -> Self {
        Self { size: WINDOW * ONE, ..Self::default() }
    }

    #[inline]
    fn window(&self) -> u32 {
        self.size / ONE
    }

    /// It is the smoothed round trip that counts: a single packet may be late for reasons of its
    /// own.
    fn on_ack(&mut self, now: Instant, acked: u32, rtt: &Rtt, floor_ns: u64) {
        let limit = rtt.min_ns() + (floor_ns / 4).max(4 * rtt.var_ns());
        let srtt = rtt.srtt_ns();
        if srtt <= limit {
            let packets = self.window().max(1);
            let grow = if self.slow_start { acked * ONE } else { 2 * acked * ONE / packets };
            self.size = (self.size + grow).min(WINDOW * ONE);
        } else if now.since(self.cut_at) > srtt {
            let over = ((srtt - limit) * 256 / srtt) as u32;
            self.cut(now, self.size / 512 * over.min(256), false);
        }
    }

    fn on_mark(&mut self, now: Instant, rtt: &Rtt) {
        // A cut for a delay that is hardly too long does not stand for it.
        if !self.cut_for_mark || now.since(self.cut_at) > rtt.srtt_ns() {
            self.cut(now, self.size / 5, true);
        }
    }

    /// Nothing: see the [file](self).
    fn on_loss(&mut self, _: Instant, _: u32) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_follows_the_queue() {
        let mut rtt = Rtt::default();
        for _ in 0..50 {
            rtt.sample(20_000);
        }
        let mut cwnd = DelayWindow::default();
        let mut now = Instant(0);
        for _ in 0..600 {
            cwnd.on_ack(now, 8, &rtt, 100_000);
        }
        assert_eq!(cwnd.window(), WINDOW, "no queue: as many as may be numbered");
        for _ in 0..100 {
            rtt.sample(400_000);
            now = now + 500_000;
            cwnd.on_ack(now, 8, &rtt, 100_000);
        }
        assert_eq!(cwnd.window(), MIN, "a queue that stays: the least");
        for _ in 0..200 {
            rtt.sample(20_000);
        }
        for _ in 0..10 {
            cwnd.on_ack(now, 8, &rtt, 100_000);
        }
        let grown = cwnd.window();
        assert!((MIN + 10..MIN + 24).contains(&grown), "about two a round trip, not {grown}");
    }

    /// Goal: a mark takes its fifth although the delay has just taken next to nothing, and once a
    /// round trip all the same.
    #[test]
    fn a_mark_counts_beside_a_delay() {
        let mut rtt = Rtt::default();
        rtt.sample(20_000);
        let mut cwnd = DelayWindow::default();
        cwnd.on_ack(Instant(0), 984, &rtt, 100_000);
        // Just over the limit.
        while rtt.srtt_ns() <= rtt.min_ns() + (100_000 / 4).max(4 * rtt.var_ns()) {
            rtt.sample(60_000);
        }
        let mut now = Instant(1_000_000_000);
        for _ in 0..4 {
            let before = cwnd.window();
            cwnd.on_ack(now, 0, &rtt, 100_000);
            for _ in 0..3 {
                cwnd.on_mark(now + 1, &rtt);
            }
            assert!((before * 3 / 4..=before * 4 / 5).contains(&cwnd.window()), "{before}");
            now = now + 2 * rtt.srtt_ns();
        }
    }

    #[test]
    fn a_mark_takes_a_fifth_once_a_round_trip() {
        let mut rtt = Rtt::default();
        rtt.sample(20_000);
        let mut cwnd = DelayWindow::default();
        let mut now = Instant(1_000_000);
        cwnd.on_ack(now, 984, &rtt, 100_000);
        assert_eq!(cwnd.window(), 1000);
        for (after, window) in [(0, 800), (10_000, 800), (10_000, 800), (1, 640), (20_001, 512)] {
            now = now + after;
            cwnd.on_mark(now, &rtt);
            assert_eq!(cwnd.window(), window);
        }
        cwnd.on_ack(now, 64, &rtt, 100_000);
        assert_eq!(cwnd.window(), 512, "it grows by two a round trip from then on");
        for _ in 0..100 {
            now = now + 30_000;
            cwnd.on_mark(now, &rtt);
        }
        assert_eq!(cwnd.window(), MIN);
    }
}
