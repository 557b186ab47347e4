//! Remote atomics beside the processor's own.

use super::check;

/// Goal: no update is lost where the target's threads change the same words
/// by atomic instructions, for operations that fetch and such that do not, on 1, 2, 4 and 8 bytes.
#[test]
fn no_update_is_lost_beside_the_targets_own_atomics() {
    check("words.c", "fi_atomic.h", |_| {});
}
