//! Round-trip estimate, and the timeouts derived from it.
//!
//! Smoothing of RFC 6298, with a floor and a ceiling for an Ethernet segment, and the reordering
//! allowance of RFC 8985 (RACK), which grows when a retransmission turns out to be spurious.

use crate::types::Instant;

/// Ceiling of the retransmission timeout, nanoseconds.
pub const RTO_MAX_NS: u64 = 64_000_000;

/// Shift from nanoseconds to units of 1.05 ms.
const LAP_BITS: u32 = 20;

/// Longest time between two checks that counts, in these units: longer than any timeout.
const LAP_MAX: u16 = 64;

const _: () = assert!(RTO_MAX_NS / 1000 < u16::MAX as u64, "microseconds fit 16 bits");

/// The estimate of one session. Nanoseconds fit 32 bits: 4.2 s is far above [`RTO_MAX_NS`]. Packed,
/// to save space in the session's record.
#[derive(Clone, Copy, Debug)]
#[repr(C, packed(2))]
pub struct Rtt {
    srtt_ns: u32,
    var_ns: u32,
    min_ns: u32,
    /// The minimum since [`forget_recent`](Self::forget_recent), microseconds.
    recent_us: u16,
    /// When [`lap_ms`](Self::lap_ms) was called last, in units of 2^[`LAP_BITS`] ns.
    lap_at: u16,
    /// See [`keep_backoff`](Self::keep_backoff).
    backoff: u8,
    /// Reordering allowance in 64ths of the smoothed round trip.
    reo: u8,
}

/// Bounds of the reordering allowance once reordering was detected, in 64ths of the smoothed round
/// trip: a quarter and about four. Before, the allowance is 0: an overtaken packet is lost.
const REO: std::ops::RangeInclusive<u8> = 16..=255;

impl Default for Rtt {
    fn default() -> Self {
        Self {
            srtt_ns: 0,
            var_ns: 0,
            min_ns: u32::MAX,
            recent_us: u16::MAX,
            lap_at: 0,
            backoff: 0,
            reo: 0,
        }
    }
}

impl Rtt {
    /// Adds a sample: the round trip of a packet that was sent once (Karn).
    pub fn sample(&mut self, rtt_ns: u64) {
        let rtt = rtt_ns.clamp(1, RTO_MAX_NS) as u32;
        self.backoff = 0;
        self.min_ns = self.min_ns.min(rtt);
        self.recent_us = self.recent_us.min((rtt / 1000) as u16);
        if self.srtt_ns == 0 {
            self.srtt_ns = rtt;
            self.var_ns = rtt / 2;
            return;
        }
        let diff = self.srtt_ns.abs_diff(rtt);
        self.var_ns = self.var_ns - self.var_ns / 4 + diff / 4;
        self.srtt_ns = self.srtt_ns - self.srtt_ns / 8 + rtt / 8;
    }

    /// Smoothed round trip, 0 before the first sample.
    pub fn srtt_ns(&self) -> u64 {
        u64::from(self.srtt_ns)
    }

    /// Mean deviation of the round trip.
    pub fn var_ns(&self) -> u64 {
        u64::from(self.var_ns)
    }

    /// Minimum round trip of the path, `u32::MAX` before the first sample.
    pub fn min_ns(&self) -> u64 {
        u64::from(self.min_ns)
    }

    /// How long ago the last look was, milliseconds (of 1.05 each); at most 64 of them count, as a
    /// session may have been idle.
    #[inline]
    pub fn lap_ms(&mut self, now: Instant) -> u16 {
        let at = (now.0 >> LAP_BITS) as u16;
        let gap = at.wrapping_sub(self.lap_at);
        self.lap_at = at;
        gap.min(LAP_MAX)
    }

    /// Restarts the minimum of the recent round trips.
    #[inline]
    pub fn forget_recent(&mut self) {
        self.recent_us = u16::MAX;
    }

    /// The minimum of the recent round trips, in whole microseconds.
    pub fn recent_min_ns(&self) -> u64 {
        u64::from(self.recent_us) * 1000
    }

    /// The path has become longer: raises the path's minimum to the recent minimum.
    pub fn path_is_longer(&mut self) {
        if self.recent_us != u16::MAX {
            self.min_ns = self.min_ns.max(u32::from(self.recent_us) * 1000);
        }
    }

    /// Keeps a backoff of `backoff` timeouts in a row. The acknowledged packets had been sent more
    /// than once, so there is no sample; the timeout stays as long until there is one (RFC 6298,
    /// 5.7). Otherwise, on a path that has become longer, each packet would be retransmitted before
    /// its acknowledgement arrives, and there would never be a sample.
    pub fn keep_backoff(&mut self, backoff: u8) {
        self.backoff = self.backoff.saturating_add(backoff);
    }

    /// Whether a [backoff is kept](Self::keep_backoff).
    #[inline]
    pub fn keeps_backoff(&self) -> bool {
        self.backoff > 0
    }

    /// Retransmission timeout after `backoff` timeouts in a row.
    pub fn rto_ns(&self, floor_ns: u64, backoff: u8) -> u64 {
        let base = if self.srtt_ns == 0 {
            floor_ns * 4
        } else {
            (u64::from(self.srtt_ns) + 4 * u64::from(self.var_ns)).max(floor_ns)
        };
        (base << backoff.saturating_add(self.backoff).min(12)).min(RTO_MAX_NS.max(floor_ns))
    }

    /// The reordering allowance, nanoseconds: how much later than another packet one may be sent
    /// and still arrive first.
    pub fn reorder_ns(&self) -> u64 {
        u64::from(self.srtt_ns) * u64::from(self.reo) / 64
    }

    /// The peer reported `dups` spurious retransmissions: raises the reordering allowance. Each
    /// adds 6 units; each useful retransmission removes 1.
    pub fn on_duplicates(&mut self, dups: u8) {
        if dups > 0 {
            let more = self.reo.max(*REO.start()).saturating_add(6 * dups.min(16));
            self.reo = more.min(*REO.end());
        }
    }

    /// A retransmission was useful: its packet has arrived.
    pub fn on_resent_arrived(&mut self) {
        self.reo = if self.reo > *REO.start() { self.reo - 1 } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeout_follows_the_samples_between_floor_and_ceiling() {
        let mut rtt = Rtt::default();
        assert_eq!(rtt.rto_ns(100_000, 0), 400_000);
        for _ in 0..100 {
            rtt.sample(10_000);
        }
        assert!(rtt.srtt_ns().abs_diff(10_000) < 100);
        assert_eq!(rtt.rto_ns(100_000, 0), 100_000);
        assert_eq!(rtt.rto_ns(100_000, 1), 200_000);
        assert_eq!(rtt.rto_ns(100_000, 200), RTO_MAX_NS);
        rtt = Rtt::default();
        rtt.sample(10_000);
        rtt.keep_backoff(1);
        rtt.keep_backoff(2);
        assert!(rtt.keeps_backoff());
        assert_eq!([0, 1, 200].map(|n| rtt.rto_ns(100_000, n)), [800_000, 1_600_000, RTO_MAX_NS]);
        rtt.sample(10_000);
        assert!(!rtt.keeps_backoff());
        assert_eq!(rtt.rto_ns(100_000, 0), 100_000);
        for _ in 0..100 {
            rtt.sample(1_000_000);
        }
        assert!(rtt.rto_ns(100_000, 0) >= 1_000_000);
    }

    /// Goal: the estimate equals that of RFC 6298, to the nanosecond, for samples within bounds.
    #[test]
    fn smoothing_is_by_an_eighth_and_a_quarter() {
        let mut rtt = Rtt::default();
        assert_eq!([rtt.srtt_ns(), rtt.var_ns(), rtt.min_ns()], [0, 0, u64::from(u32::MAX)]);
        for (sample, srtt, var) in
            [(8_000, 8_000, 4_000), (16_000, 9_000, 5_000), (1_000, 8_000, 5_750)]
        {
            rtt.sample(sample);
            assert_eq!([rtt.srtt_ns(), rtt.var_ns()], [srtt, var]);
        }
        assert_eq!([0, 1].map(|n| rtt.rto_ns(1, n)), [31_000, 62_000]);
        assert_eq!((rtt.min_ns(), rtt.recent_min_ns()), (1_000, 1_000));
        let mut least = Rtt::default();
        least.sample(0);
        assert_eq!(least.srtt_ns(), 1, "0 is that of no sample");
        assert_eq!([11, 12, 13].map(|n| least.rto_ns(1000, n) / 1000), [2048, 4096, 4096]);
        let mut most = Rtt::default();
        most.sample(u64::MAX);
        assert_eq!(most.srtt_ns(), RTO_MAX_NS);
        assert_eq!(most.rto_ns(RTO_MAX_NS * 2, 3), RTO_MAX_NS * 2, "the floor is above it");
    }

    /// Goal: the minimum round trip can rise to the recent minimum, and falls at once.
    #[test]
    fn the_least_round_trip_follows_the_path() {
        const MS: u64 = 1_000_000;
        let mut rtt = Rtt::default();
        rtt.sample(20_000);
        rtt.path_is_longer();
        assert_eq!(rtt.min_ns(), 20_000);
        rtt.forget_recent();
        rtt.path_is_longer();
        assert_eq!(rtt.min_ns(), 20_000, "nothing was measured since");
        for ns in [700_300, 600_900, 650_000] {
            rtt.sample(ns);
        }
        assert_eq!(rtt.recent_min_ns(), 600_000);
        rtt.lap_ms(Instant(500 * MS));
        let gaps = [520, 540, 2540].map(|at| rtt.lap_ms(Instant(at * MS)));
        assert!((18..=20).contains(&gaps[0]) && gaps[2] == LAP_MAX, "{gaps:?}");
        rtt.path_is_longer();
        assert_eq!(rtt.min_ns(), 600_000);
        rtt.sample(30_000);
        assert_eq!(rtt.min_ns(), 30_000);
    }

    #[test]
    fn reordering_allowance_grows_shrinks_and_stops() {
        let mut rtt = Rtt::default();
        rtt.sample(40_000);
        rtt.on_duplicates(0);
        assert_eq!(rtt.reorder_ns(), 0);
        rtt.on_resent_arrived();
        assert_eq!(rtt.reorder_ns(), 0);
        rtt.on_duplicates(1);
        assert_eq!(rtt.reorder_ns(), 13_750);
        for _ in 0..100 {
            rtt.on_duplicates(1);
        }
        assert_eq!(rtt.reorder_ns(), 159_375);
        for _ in 0..239 {
            rtt.on_resent_arrived();
        }
        assert_eq!(rtt.reorder_ns(), 10_000);
        rtt.on_resent_arrived();
        assert_eq!(rtt.reorder_ns(), 0, "none was seen for long");
    }
}
