//! Reports: a value as a line of a table, or as a JSON object a line.

use std::process::Command;

use serde::Serialize;

use crate::{Args, Sample};

/// One value of a report.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    bench: &'static str,
    case: String,
    value: f64,
    unit: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reference: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reference_value: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    min: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p50: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p99: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p999: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    n: Option<u64>,
    /// The cache line's round trip before and after the measurement, nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    placement: Option<[f64; 2]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    commit: String,
}

impl Row {
    /// The value of `case`.
    pub fn new(case: impl Into<String>, value: f64, unit: &'static str) -> Self {
        Self { case: case.into(), value, unit, ..Self::default() }
    }

    /// Sets the reference, and the ratio that is compared with a limit.
    pub fn against(mut self, reference: impl Into<String>, value: f64, ratio: f64) -> Self {
        self.reference = Some(reference.into());
        (self.reference_value, self.ratio) = (Some(value), Some(ratio));
        self
    }

    /// Sets the distribution of the single measurements.
    pub fn spread(mut self, sample: &Sample) -> Self {
        self.min = Some(sample.min());
        self.p50 = Some(sample.median());
        self.p99 = Some(sample.quantile(0.99));
        self.p999 = (sample.len() >= 1000).then(|| sample.quantile(0.999));
        self.n = Some(sample.len() as u64);
        self
    }

    /// Sets the number of measurements.
    pub fn count(mut self, n: u64) -> Self {
        self.n = Some(n);
        self
    }

    /// Sets the cache line's round trip before and after the measurement, nanoseconds.
    pub fn placed(mut self, before: f64, after: f64) -> Self {
        self.placement = Some([before, after]);
        self
    }

    /// Sets a note for the reader.
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.note = Some(note.into());
        self
    }
}

/// Prints the values of one benchmark as they are added.
pub struct Report {
    bench: &'static str,
    json: bool,
    commit: String,
    begun: bool,
}

impl Report {
    /// A report of benchmark `bench`.
    pub fn new(bench: &'static str, args: &Args) -> Self {
        Self { bench, json: args.json, commit: commit(), begun: false }
    }

    /// Prints one value.
    pub fn row(&mut self, mut row: Row) {
        row.bench = self.bench;
        row.commit.clone_from(&self.commit);
        if self.json {
            match serde_json::to_string(&row) {
                Ok(line) => println!("{line}"),
                Err(why) => eprintln!("{}: {why}", row.case),
            }
            return;
        }
        if !std::mem::replace(&mut self.begun, true) {
            println!(
                "  {:<26} {:>12} {:<14} {:>8}  {:<34} spread",
                "case", "value", "unit", "ratio", "to"
            );
        }
        println!("{}", self.line(&row));
    }

    /// Prints why a case could not be measured. No error: the benchmark continues.
    pub fn skip(&mut self, case: &str, why: &str) {
        // The message is for a reader of the table, so it is never printed among the JSON objects.
        eprintln!("  {case:<26} not measured: {why}");
    }

    fn line(&self, row: &Row) -> String {
        let number = |v: Option<f64>| v.map_or_else(String::new, figure);
        let mut to = row.reference.clone().unwrap_or_default();
        if let Some(value) = row.reference_value {
            to = format!("{to} {}", figure(value));
        }
        let mut line = format!(
            "  {:<26} {:>12} {:<14} {:>8}  {to:<34}",
            row.case,
            figure(row.value),
            row.unit,
            number(row.ratio),
        );
        let spread = [("min", row.min), ("p50", row.p50), ("p99", row.p99), ("p99.9", row.p999)];
        for (name, value) in spread {
            if let Some(value) = value {
                line += &format!(" {name} {}", figure(value));
            }
        }
        if let Some(n) = row.n {
            line += &format!(" n {n}");
        }
        if let Some([before, after]) = row.placement {
            line += &format!(" [line {before:.0}/{after:.0} ns]");
        }
        if let Some(note) = &row.note {
            line += &format!(" ({note})");
        }
        line.trim_end().to_owned()
    }
}

/// A value with about four significant digits.
fn figure(v: f64) -> String {
    match v.abs() {
        a if a >= 1000.0 || v == v.trunc() => format!("{v:.0}"),
        a if a >= 100.0 => format!("{v:.1}"),
        a if a >= 1.0 => format!("{v:.2}"),
        _ => format!("{v:.3}"),
    }
}

/// The measured commit, marked if the tree has changes; empty if unknown.
fn commit() -> String {
    let out = Command::new("git")
        .args(["-C", env!("CARGO_MANIFEST_DIR"), "describe", "--always", "--dirty"])
        .output();
    match out {
        Ok(out) if out.status.success() => String::from_utf8_lossy(&out.stdout).trim().to_owned(),
        _ => String::new(),
    }
}
