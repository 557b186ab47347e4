//! The distribution of a domain's round trips between two snapshots.

use barewire::stats::Snapshot;
use barewire_dataplane::node::RoundTrips;
use hdrhistogram::Histogram;
use serde_json::{Value, json};

use crate::table::{Align, layout, round_trip};

/// Quantiles that are printed.
const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)];

/// Length of the longest bar, characters.
const BAR_LEN: u64 = 40;

/// Round trips between two snapshots of a domain.
pub(crate) struct Trips {
    counts: Vec<u64>,
    values: Histogram<u64>,
}

impl Trips {
    /// The difference of `now` and `before`, which is of the same domain.
    pub(crate) fn between(before: &Snapshot, now: &Snapshot) -> Self {
        let pairs = now.round_trips.iter().zip(&before.round_trips);
        let counts: Vec<u64> = pairs.map(|(now, before)| now.saturating_sub(*before)).collect();
        let longest = RoundTrips::lengths(RoundTrips::COUNT - 1).end;
        // Two digits are finer than the counts.
        let mut values = Histogram::new_with_max(longest, 2).expect("such a one can be made");
        for (at, &count) in counts.iter().enumerate().take(RoundTrips::COUNT) {
            let lengths = RoundTrips::lengths(at);
            values.saturating_record_n((lengths.start + lengths.end) / 2, count);
        }
        Self { counts, values }
    }

    pub(crate) fn count(&self) -> u64 {
        self.values.len()
    }

    /// A quantile of the round trips, ns; 0 if there were none.
    pub(crate) fn quantile_ns(&self, quantile: f64) -> u64 {
        self.values.value_at_quantile(quantile)
    }

    fn rows(&self) -> impl Iterator<Item = (std::ops::Range<u64>, u64)> + '_ {
        let counts = self.counts.iter().enumerate().take(RoundTrips::COUNT);
        counts.filter(|(_, count)| **count > 0).map(|(at, &count)| (RoundTrips::lengths(at), count))
    }

    /// The text form: quantiles, then a bar for each length that occurred.
    pub(crate) fn text(&self, of: &Snapshot, seconds: f64) -> String {
        let mut text = format!(
            "process {}, {} at {}: {} round trips in {seconds:.1} s\n",
            of.pid,
            of.port_name,
            of.station,
            self.count()
        );
        if self.count() == 0 {
            return text;
        }
        let told = QUANTILES.map(|(name, q)| format!("{name} {}", round_trip(self.quantile_ns(q))));
        text.push_str(&format!("  {}\n", told.join(", ")));
        let most = self.rows().map(|(_, count)| count).max().unwrap_or(1);
        let row = |(lengths, count): (std::ops::Range<u64>, u64)| {
            let bar = "#".repeat((count * BAR_LEN).div_ceil(most) as usize);
            vec![
                format!("  {}", round_trip(lengths.start)),
                round_trip(lengths.end),
                count.to_string(),
                bar,
            ]
        };
        let rows: Vec<Vec<String>> = self.rows().map(row).collect();
        let head = [
            ("  from", Align::Right),
            ("to", Align::Right),
            ("count", Align::Right),
            ("", Align::Left),
        ];
        text.push_str(&layout(&head, &rows));
        text
    }

    /// The JSON form.
    pub(crate) fn object(&self, of: &Snapshot, seconds: f64) -> Value {
        let rows = self.rows().map(|(lengths, count)| {
            json!({"from_ns": lengths.start, "to_ns": lengths.end, "count": count})
        });
        json!({
            "kind": "round_trips", "pid": of.pid, "port": of.port_name,
            "mac": of.station.to_string(),
            "seconds": seconds, "n": self.count(),
            "p50_ns": self.quantile_ns(0.5), "p90_ns": self.quantile_ns(0.9),
            "p99_ns": self.quantile_ns(0.99), "p99_9_ns": self.quantile_ns(0.999),
            "lengths": rows.collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    /// Goal: quantiles are of what came between two looks. Method: nine of ten short, one long, on
    /// top of many that had been before.
    #[test]
    fn a_distribution_is_what_came_in_between() {
        let before = sample::domain(12, 1);
        let mut now = before.clone();
        let at = |ns| (0..RoundTrips::COUNT).find(|&at| RoundTrips::lengths(at).contains(&ns));
        now.round_trips[at(10_000).unwrap()] += 900;
        now.round_trips[at(1_000_000).unwrap()] += 100;
        let trips = Trips::between(&before, &now);
        assert_eq!(trips.count(), 1000);
        assert!(
            trips.quantile_ns(0.5).abs_diff(10_000) < 10_000 / 12,
            "{}",
            trips.quantile_ns(0.5)
        );
        assert!(trips.quantile_ns(0.99).abs_diff(1_000_000) < 1_000_000 / 12);
        let text = trips.text(&now, 2.0);
        assert!(text.starts_with(
            "process 12, afpacket:eth0 at 02:00:00:00:00:01: 1000 round trips in 2.0 s\n"
        ));
        assert!(
            text.lines().nth(3).unwrap().ends_with(&format!("900  {}", "#".repeat(40))),
            "{text}"
        );
        assert!(text.lines().nth(4).unwrap().ends_with("100  #####"), "{text}");
        let object = trips.object(&now, 2.0);
        assert_eq!((&object["n"], &object["lengths"][1]["count"]), (&1000.into(), &100.into()));
        let none = Trips::between(&now, &now);
        assert_eq!(
            (none.count(), none.quantile_ns(0.5), none.text(&now, 1.0).lines().count()),
            (0, 0, 1)
        );
    }
}
