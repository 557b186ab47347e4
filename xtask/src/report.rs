//! Parses the output of `cargo test` and adds up the counts.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::AddAssign;

/// Numbers of passed, failed and skipped checks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// Results in the output of `cargo test -- --show-output`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Tests {
    pub(crate) counts: Counts,
    /// `test name: reason` of every skipped test.
    pub(crate) skips: Vec<String>,
    /// Names of the failed tests, if their program printed them.
    pub(crate) failed: Vec<String>,
}

/// Start of the line that a test prints before it returns if it cannot run here.
pub(crate) const SKIPPED: &str = "SKIPPED: ";

/// Adds up the `test result:` lines of `output`.
///
/// A test that printed a line starting with [`SKIPPED`] counts as passed in its result line; it is
/// moved to the skipped. Ignored tests count as skipped as well.
pub(crate) fn read_tests(output: &str) -> Tests {
    let mut tests = Tests::default();
    // Names are unique within a binary only, so the seen ones are forgotten at its result line.
    let mut skipped_here = BTreeSet::new();
    let mut test = "";
    // The last list under this head contains the names, the one before it the tests' output.
    let mut failed_here: Vec<&str> = Vec::new();
    for line in output.lines() {
        if let Some(name) = line.strip_prefix("---- ").and_then(|l| l.strip_suffix(" stdout ----"))
        {
            test = name;
        } else if let Some(reason) = line.strip_prefix(SKIPPED) {
            if skipped_here.insert(test.to_owned()) {
                tests.skips.push(format!("{test}: {reason}"));
            }
        } else if line == "failures:" {
            failed_here.clear();
        } else if let Some(name) = line.strip_prefix("    ") {
            failed_here.push(name);
        } else if let Some(result) = line.strip_prefix("test result: ") {
            let mut counts = read_result(result);
            if counts.failed == failed_here.len() as u64 {
                tests.failed.extend(failed_here.iter().map(|&name| name.to_owned()));
            }
            failed_here.clear();
            let skipped = skipped_here.len() as u64;
            counts.passed = counts.passed.saturating_sub(skipped);
            counts.skipped += skipped;
            tests.counts += counts;
            skipped_here.clear();
            test = "";
        }
    }
    tests
}

/// Tests that had run for a minute and have no result.
pub(crate) fn unfinished(output: &str) -> Vec<&str> {
    let names = |end: &'static str| {
        output.lines().filter_map(move |line| line.strip_prefix("test ")?.strip_suffix(end))
    };
    let ended: BTreeSet<&str> =
        [" ... ok", " ... FAILED", " ... ignored"].into_iter().flat_map(names).collect();
    names(" has been running for over 60 seconds").filter(|name| !ended.contains(name)).collect()
}

/// Parses `ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s`.
fn read_result(result: &str) -> Counts {
    let field = |name: &str| {
        result
            .split(['.', ';'])
            .find_map(|part| part.trim().strip_suffix(name)?.trim().parse().ok())
            .unwrap_or(0)
    };
    Counts { passed: field("passed"), failed: field("failed"), skipped: field("ignored") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
running 3 tests
test a ... ok
test b ... FAILED
test c ... ok

successes:

---- a stdout ----
some words
SKIPPED: tshark is not installed
SKIPPED: and once more
---- c stdout ----
not SKIPPED: in the middle of a line

successes:
    a
    c

failures:

---- b stdout ----
    words of its own

failures:
    b

test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s

running 1 test
test result: ok. 1 passed; 0 failed; 2 ignored; 0 measured; 5 filtered out; finished in 1.50s
";

    #[test]
    fn tests_that_hang_are_named() {
        let output = "test a::quick ... ok\n\
                      test a::slow has been running for over 60 seconds\n\
                      test a::hung has been running for over 60 seconds\n\
                      test a::slow ... FAILED\n";
        assert_eq!(unfinished(output), ["a::hung"]);
    }

    #[test]
    fn counts_are_added_up_and_a_skipped_test_did_not_pass() {
        let tests = read_tests(OUTPUT);
        assert_eq!(tests.counts, Counts { passed: 2, failed: 1, skipped: 3 });
        assert_eq!(tests.skips, ["a: tshark is not installed"]);
        assert_eq!(tests.failed, ["b"]);
    }

    #[test]
    fn the_last_line_has_the_form_that_scripts_read() {
        let counts = Counts { passed: 12, failed: 0, skipped: 3 };
        assert_eq!(counts.to_string(), "12 passed, 0 failed, 3 skipped");
    }

    #[test]
    fn output_without_results_counts_nothing() {
        assert_eq!(read_tests("error: could not compile"), Tests::default());
    }
}
