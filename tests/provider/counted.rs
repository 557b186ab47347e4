//! Counters of bytes, by our own program in C.

/// Row X37: `FI_CNTR_EVENTS_BYTES` of libfabric 2.x, on both sides of every kind of transfer.
#[test]
fn counters_count_bytes() {
    super::check("counted.c", "fi_atomic.h", |said| {
        let checks = said.lines().filter(|line| line.starts_with("ok ")).count();
        assert!(checks >= 60, "only {checks} checks:\n{said}");
    });
}
