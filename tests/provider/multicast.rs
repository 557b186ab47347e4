//! Multicast, by our own program in C.

/// Rows X18 and MF12: fi_join, fi_mc_addr and FI_MULTICAST.
#[test]
fn members_of_a_group_receive() {
    super::check("multicast.c", "fi_cm.h", |said| {
        let checks = said.lines().filter(|line| line.starts_with("ok ")).count();
        assert!(checks >= 30, "only {checks} checks:\n{said}");
    });
}
