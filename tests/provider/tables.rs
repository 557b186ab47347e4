//! Tables of calls by our own program in C.

/// Row X5: no entry of any table is NULL, and what we do not have is refused by `FI_ENOSYS`. Rows
/// X7 and CO17: so are tables of the provider's own, and the collective that no call leads to.
#[test]
fn no_table_has_a_hole() {
    super::check("tables.c", "fi_collective.h", |said| {
        let checks = said.lines().filter(|line| line.starts_with("ok ")).count();
        assert!(checks >= 150, "only {checks} checks:\n{said}");
    });
}
