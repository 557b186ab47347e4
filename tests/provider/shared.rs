//! Our own program in C that lets several endpoints take their receives from one context.

use super::check;

#[test]
fn endpoints_share_receives() {
    check("shared.c", "fi_endpoint.h", |_| {});
}
