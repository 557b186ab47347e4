//! Regions by our own program in C.

/// Row X67: a sub-region has a key and rights of its own and outlives nothing; a region for one
/// operation is of use to one. Row X69: memory is given back once its region is closed, under
/// transfers.
#[test]
fn regions_of_regions_and_memory_that_goes_away() {
    super::check("regions.c", "fi_rma.h", |said| {
        let checks = said.lines().filter(|line| line.starts_with("ok ")).count();
        assert!(checks >= 80, "only {checks} checks:\n{said}");
    });
}
