//! Attributes of objects by our own program in C.

/// Goal: whoever opens an object with more than `fi_getinfo` offers is refused, and has no object
/// that does less than it says.
#[test]
fn what_is_not_offered_is_refused() {
    super::check("attrs.c", "fabric.h", |_| {});
}
