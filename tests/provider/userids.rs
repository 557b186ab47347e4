//! Names of the user's for addresses, by our own program in C.

/// Row X24: completions of every length and kind call a sender what the user calls it.
#[test]
fn completions_have_the_users_names() {
    super::check("userids.c", "fi_tagged.h", |said| {
        let checks = said.lines().filter(|line| line.starts_with("ok ")).count();
        assert!(checks >= 100, "only {checks} checks:\n{said}");
    });
}
