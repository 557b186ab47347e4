//! Our own program in C that waits for several queues and counters at once.

use super::check;

/// Row X35: wait sets and poll sets.
#[test]
fn one_set_waits_for_all_that_is_in_it() {
    check("waits.c", "fi_eq.h", |_| {});
}
