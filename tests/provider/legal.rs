//! Odd calls by our own program in C.

/// Goal: what libfabric's manuals allow is done, or taken as the advice that it is.
#[test]
fn unusual_calls_that_the_manuals_allow_succeed() {
    super::check("legal.c", "fabric.h", |_| {});
}
