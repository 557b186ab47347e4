//! Our own program in C whose operations wait for counters.

use super::check;

/// Rows X73 and X74: triggered operations and deferred work. Row X8: an alias with flags of its
/// own.
#[test]
fn operations_wait_for_counters() {
    check("trigger.c", "fi_trigger.h", |_| {});
}
