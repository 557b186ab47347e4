//! Results of a run, as text and as JSON.

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::table::{Align, bytes, layout};

/// Times of single operations, 1 ns to 100 s with three digits.
pub(super) struct Times(Histogram<u64>);

impl Times {
    /// An empty histogram.
    pub(super) fn new() -> Self {
        let histogram = Histogram::new_with_bounds(1, 100_000_000_000, 3);
        Self(histogram.expect("the bounds are constants that fit each other"))
    }

    /// Adds a time, limited to the longest.
    pub(super) fn add(&mut self, ns: u64) {
        self.0.saturating_record(ns);
    }
}

/// One size of one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Line {
    /// `pingpong`, `stream`, or the operation.
    pub(super) run: &'static str,
    /// The port, as it would be opened again.
    pub(super) port: String,
    pub(super) tagged: bool,
    pub(super) verified: bool,
    /// Bytes of a message.
    pub(super) size: u64,
    /// Messages in flight.
    pub(super) window: u32,
    /// Messages measured, one way.
    pub(super) n: u64,
    pub(super) seconds: f64,
    /// Half round trip of a ping-pong; from posting to completion in a stream.
    pub(super) min_ns: u64,
    pub(super) p50_ns: u64,
    pub(super) p99_ns: u64,
    pub(super) p999_ns: u64,
    pub(super) max_ns: u64,
    /// Messages a second, one way.
    pub(super) rate: f64,
    /// Payload, bytes a second, one way.
    pub(super) goodput: f64,
}

impl Line {
    /// Fills in what follows from the times and the counts.
    pub(super) fn measured(mut self, times: &Times, seconds: f64) -> Self {
        let at = |q| times.0.value_at_quantile(q);
        self.seconds = seconds;
        if !times.0.is_empty() {
            (self.min_ns, self.max_ns) = (times.0.min(), times.0.max());
            (self.p50_ns, self.p99_ns, self.p999_ns) = (at(0.5), at(0.99), at(0.999));
        }
        if seconds > 0.0 {
            self.rate = self.n as f64 / seconds;
            self.goodput = self.rate * self.size as f64;
        }
        self
    }
}

/// The lines as a table.
pub(super) fn table(lines: &[Line]) -> String {
    let right = |name| (name, Align::Right);
    let head = [
        right("size"),
        right("messages"),
        right("median"),
        right("p99"),
        right("p99.9"),
        right("msg/s"),
        right("goodput"),
        ("verified", Align::Left),
    ];
    let rows: Vec<Vec<String>> = lines
        .iter()
        .map(|line| {
            // What moves no bytes has neither.
            let sized = |text: String| if line.size == 0 { "-".to_owned() } else { text };
            vec![
                sized(bytes(line.size)),
                line.n.to_string(),
                time(line.p50_ns),
                time(line.p99_ns),
                time(line.p999_ns),
                count(line.rate),
                sized(format!("{}B/s", count(line.goodput))),
                (if line.verified { "every byte" } else { "no" }).to_owned(),
            ]
        })
        .collect();
    layout(&head, &rows)
}

/// `1.23 us` and the like, three digits.
fn time(ns: u64) -> String {
    let ns = ns as f64;
    let (value, unit) = match ns {
        _ if ns < 1e3 => return format!("{ns} ns"),
        _ if ns < 1e6 => (ns / 1e3, "us"),
        _ if ns < 1e9 => (ns / 1e6, "ms"),
        _ => (ns / 1e9, "s"),
    };
    format!("{} {unit}", three(value))
}

/// `4.56 M` and the like, three digits, decimal.
fn count(value: f64) -> String {
    let (value, unit) = match value {
        _ if value < 1e3 => (value, ""),
        _ if value < 1e6 => (value / 1e3, "k"),
        _ if value < 1e9 => (value / 1e6, "M"),
        _ => (value / 1e9, "G"),
    };
    format!("{} {unit}", three(value))
}

fn three(value: f64) -> String {
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$}")
}

#[cfg(test)]
pub(super) fn empty_line() -> Line {
    Line {
        run: "pingpong",
        port: "shm".to_owned(),
        tagged: false,
        verified: true,
        size: 64,
        window: 1,
        n: 1000,
        seconds: 0.0,
        min_ns: 0,
        p50_ns: 0,
        p99_ns: 0,
        p999_ns: 0,
        max_ns: 0,
        rate: 0.0,
        goodput: 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_rate_and_goodput_follow_from_the_times() {
        let mut times = Times::new();
        for ns in 1..=1000 {
            times.add(ns);
        }
        let line = empty_line().measured(&times, 0.5);
        assert_eq!((line.min_ns, line.p50_ns, line.p99_ns, line.max_ns), (1, 500, 990, 1000));
        assert_eq!((line.rate, line.goodput), (2000.0, 128_000.0));
        let json = serde_json::to_value(&line).unwrap();
        assert_eq!(json["p50_ns"], 500);
        assert_eq!(json["run"], "pingpong");
    }

    #[test]
    fn a_run_of_nothing_divides_by_nothing() {
        let line = Line { n: 0, ..empty_line() }.measured(&Times::new(), 0.0);
        assert_eq!((line.p50_ns, line.rate), (0, 0.0));
        assert!(table(&[line]).contains("0 ns"));
    }

    #[test]
    fn a_row_without_bytes_has_no_size_and_no_goodput() {
        let line = Line { size: 0, rate: 5.0, ..empty_line() };
        let text = table(&[line]);
        assert!(!text.contains("B/s"), "{text}");
        assert_eq!(text.lines().last().unwrap().split_whitespace().next(), Some("-"));
    }

    #[test]
    fn times_and_counts_have_three_digits() {
        for (ns, text) in [(999, "999 ns"), (1234, "1.23 us"), (45_678, "45.7 us")] {
            assert_eq!(time(ns), text);
        }
        assert_eq!(time(2_000_000_000), "2.00 s");
        assert_eq!(count(4_560_000.0), "4.56 M");
        assert_eq!(count(12.0), "12.0 ");
    }
}
