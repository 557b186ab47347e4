//! Odd calls by our own program in C.

/// Goal: what libfabric's manuals allow is done, or taken as the advice that it is.
#[test]
fn what_is_odd_and_legal_is_done() {
    super::check("legal.c", "fabric.h", |_| {});
}
