//! Collectives by our own program in C, compiled against the headers that are installed.

#[test]
fn the_nine_through_libfabric() {
    super::check("collectives.c", "fi_collective.h", |said| {
        let checks = said.lines().filter(|l| l.starts_with("ok ")).count();
        assert!(checks >= 60, "only {checks} checks:\n{said}");
    });
}
