//! Our own program in C that lets several endpoints take their receives from one context.

use super::check;

/// Row X15: who takes what, in which order, and what is refused.
#[test]
fn endpoints_share_receives() {
    check("shared.c", "fi_endpoint.h", |_| {});
}
