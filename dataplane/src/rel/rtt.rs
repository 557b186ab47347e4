//! Round-trip estimate and the times derived from it.
//!
//! RFC 6298's smoothing with a floor and a ceiling that suit an Ethernet segment, and the
//! reordering allowance of RFC 8985 (RACK), which grows when a retransmission proves to have been
//! needless.

/// Ceiling of the retransmission timeout, nanoseconds.
pub const RTO_MAX_NS: u64 = 64_000_000;

/// The estimate of one session. Nanoseconds fit 32 bits: 4.2 s is far above [`RTO_MAX_NS`].
#[derive(Clone, Copy, Debug)]
pub struct Rtt {
    srtt_ns: u32,
    var_ns: u32,
    min_ns: u32,
    /// Reordering allowance in 64ths of the smoothed round trip.
    reo: u16,
}

/// Bounds of the reordering allowance once reordering was seen, in 64ths of the smoothed round
/// trip: a quarter and four. Before, there is none: a packet that was overtaken is lost.
const REO: std::ops::RangeInclusive<u16> = 16..=256;

impl Default for Rtt {
    fn default() -> Self {
        Self { srtt_ns: 0, var_ns: 0, min_ns: u32::MAX, reo: 0 }
    }
}

impl Rtt {
    /// Takes a measured round trip of a packet that was sent once (Karn).
    pub fn sample(&mut self, rtt_ns: u64) {
        let rtt = rtt_ns.clamp(1, RTO_MAX_NS) as u32;
        self.min_ns = self.min_ns.min(rtt);
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

    /// Smallest round trip seen, `u32::MAX` before the first sample.
    pub fn min_ns(&self) -> u64 {
        u64::from(self.min_ns)
    }

    /// Retransmission timeout after `backoff` timeouts in a row.
    pub fn rto_ns(&self, floor_ns: u64, backoff: u8) -> u64 {
        let base = if self.srtt_ns == 0 {
            floor_ns * 4
        } else {
            (u64::from(self.srtt_ns) + 4 * u64::from(self.var_ns)).max(floor_ns)
        };
        (base << backoff.min(12)).min(RTO_MAX_NS.max(floor_ns))
    }

    /// The reordering allowance, nanoseconds: how much later than a packet another one may be sent
    /// and still arrive first.
    pub fn reorder_ns(&self) -> u64 {
        u64::from(self.srtt_ns) * u64::from(self.reo) / 64
    }

    /// The peer received `dups` spurious retransmissions: more reordering is allowed. Each adds 6
    /// units; each useful retransmission removes 1.
    pub fn on_duplicates(&mut self, dups: u8) {
        if dups > 0 {
            self.reo = (self.reo.max(*REO.start()) + 6 * u16::from(dups.min(16))).min(*REO.end());
        }
    }

    /// A packet that had been sent again has arrived.
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
        for _ in 0..100 {
            rtt.sample(1_000_000);
        }
        assert!(rtt.rto_ns(100_000, 0) >= 1_000_000);
    }

    #[test]
    fn reordering_allowance_grows_shrinks_and_stops() {
        let mut rtt = Rtt::default();
        rtt.sample(40_000);
        rtt.on_duplicates(0);
        rtt.on_resent_arrived();
        assert_eq!(rtt.reorder_ns(), 0);
        rtt.on_duplicates(1);
        assert_eq!(rtt.reorder_ns(), 13_750);
        for _ in 0..100 {
            rtt.on_duplicates(1);
        }
        assert_eq!(rtt.reorder_ns(), 160_000);
        for _ in 0..240 {
            rtt.on_resent_arrived();
        }
        assert_eq!(rtt.reorder_ns(), 10_000);
        rtt.on_resent_arrived();
        assert_eq!(rtt.reorder_ns(), 0, "none was seen for long");
    }
}
