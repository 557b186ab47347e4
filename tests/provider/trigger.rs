//! Our own program in C whose operations wait for counters.

use super::check;

#[test]
fn operations_wait_for_counters() {
    check("trigger.c", "fi_trigger.h", |_| {});
}
