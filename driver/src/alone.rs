//! Tests that need a process of their own: they fork, or their sockets must not be inherited by
//! other tests' children.

use std::process::Command;

/// Whether the test with this path runs in a process of its own. If not, runs it in one, which
/// `change` may change, and returns false.
///
/// # Panics
/// If the test fails in that process.
pub(crate) fn is_alone(test: &str, change: impl FnOnce(&mut Command)) -> bool {
    const ALONE: &str = "BAREWIRE_TEST_ALONE";
    if std::env::var_os(ALONE).is_some_and(|alone| alone == test) {
        return true;
    }
    let mut process = Command::new(std::env::current_exe().expect("it runs"));
    process.args(["--exact", test, "--nocapture"]).env(ALONE, test);
    change(&mut process);
    let status = process.status().expect("this program starts");
    assert!(status.success(), "{test}: {status}");
    false
}
