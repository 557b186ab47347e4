//! Which row of the feature list has a test, here or in another suite, and why the others have
//! none.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The rows, by the letters that they begin with, from the first to the last of each.
const ROWS: &[(&str, &[std::ops::RangeInclusive<u32>])] = &[
    ("R", &[1..=12]),
    ("M", &[1..=9]),
    ("MF", &[1..=13]),
    ("MB", &[1..=5]),
    ("AR", &[1..=15]),
    ("A", &[1..=14]),
    ("AF", &[1..=7]),
    ("CR", &[1..=13]),
    ("CO", &[1..=17]),
    ("K", &[1..=6]),
    ("S", &[1..=13]),
    ("X", &[1..=9, 10..=19, 20..=27, 30..=45, 50..=57, 60..=69, 70..=83]),
];

/// Rows without a test, and why.
const WITHOUT: &[(&str, &str)] = &[
    ("R5", "no call takes a descriptor: memory that is not registered is staged"),
    ("MF6", "FI_INJECT on sendmsg is among the flags of M6, its buffer rule in R12"),
    ("MF8", "FI_INJECT_COMPLETE is among the flags of M6, its level in R12 and X40"),
    ("K3", "KFI_FENCE asks for less than the fence that there is, MF11"),
    ("S9", "the wire is little-endian, as is every host that there is: docs/wire.md has examples"),
    ("S12", "nothing is promised of the order of an array's elements"),
    ("X57", "peer groups and formats of tags: no provider has them, and the hints are refused"),
    ("X65", "no order of completions is promised"),
    ("X77", "FI_PEER: no queue of another provider is taken, and the hint is refused"),
    ("X78", "FI_DIRECT is for a library that a program is built with: the crate is that"),
    ("X79", "fi_profile: counters are read by barewire stats and the exporter"),
];

/// Where tests lie, from the root of the repository.
const DIRS: &[&str] =
    &["tests", "dataplane/src/node/tests", "dataplane/src/proto", "driver/src/mem"];

/// In these a letter S and a number are a rule of sessions (docs/wire.md), unless a "row" is said.
const OWN_S: &[&str] = &["dataplane/src/node/tests"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every row, as `X17`.
fn rows() -> BTreeSet<String> {
    let each = ROWS.iter().flat_map(|(letters, ranges)| {
        ranges.iter().cloned().flatten().map(move |n| format!("{letters}{n}"))
    });
    each.collect()
}

/// The sources below a directory.
fn sources(dir: &Path, to: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, to);
        } else if path.extension().is_some_and(|end| end == "rs") && !path.ends_with("table.rs") {
            to.push(path);
        }
    }
}

/// A word that may be a row: its letters and its number.
fn parts(word: &str) -> Option<(&str, u32)> {
    let at = word.find(|c: char| c.is_ascii_digit())?;
    Some((&word[..at], word[at..].parse().ok()?))
}

/// The rows that a text quotes: `X17`, and of `A1 to A14` all between.
fn quoted_in(text: &str) -> BTreeSet<String> {
    let words: Vec<&str> = text.split(|c: char| !c.is_alphanumeric()).collect();
    let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
    let mut all = BTreeSet::new();
    for (i, word) in words.iter().enumerate() {
        let Some((letters, first)) = parts(word) else { continue };
        let last = match words[i + 1..] {
            ["to", end, ..] => parts(end).filter(|(of, _)| *of == letters).map(|(_, n)| n),
            _ => None,
        };
        let last = last.filter(|last| *last < first + 100).unwrap_or(first);
        all.extend((first..=last).map(|n| format!("{letters}{n}")));
    }
    all
}

/// The rows that the doc comments of tests quote.
fn quoted() -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for dir in DIRS {
        let mut files = Vec::new();
        sources(&root().join(dir), &mut files);
        for file in files {
            let text = std::fs::read_to_string(&file).unwrap();
            let docs = text.lines().map(str::trim_start).filter(|line| line.starts_with("///"));
            let docs: Vec<&str> = docs.map(|line| &line[3..]).collect();
            let mut rows = quoted_in(&docs.join(" "));
            if OWN_S.contains(dir) {
                rows.retain(|row| !row.starts_with('S') || text.contains(&format!("row {row}")));
            }
            all.extend(rows);
        }
    }
    all
}

/// Every row has a test that quotes it or a reason, and no reason outlives its test.
#[test]
fn every_row_has_a_test_or_a_reason() {
    let (rows, quoted) = (rows(), quoted());
    assert_eq!(rows.len(), 199);
    let reason = |row: &str| WITHOUT.iter().any(|(r, _)| *r == row);
    let wrong: Vec<_> = rows.iter().filter(|row| quoted.contains(*row) == reason(row)).collect();
    assert!(wrong.is_empty(), "neither a test nor a reason, or both: {wrong:?}");
    assert!(WITHOUT.iter().all(|(row, _)| rows.contains(*row)));
}

#[test]
fn rows_are_found_in_a_text() {
    let found = quoted_in("CO12, and (X7): A3 to A5, K1 to X9, u64, 5 to 6.");
    let found: Vec<&str> = found.iter().map(String::as_str).collect();
    assert_eq!(found, ["5", "6", "A3", "A4", "A5", "CO12", "K1", "X7", "X9", "u64"]);
}
