//! Domains with an `auth_key`, or with several (`FI_AV_AUTH_KEY`), on one wire.

/// Goal: two domains with one `auth_key` exchange messages over a wire, and those with two keys, or
/// with one and none, do not: the operation ends with its own code after a second. An endpoint with
/// the keys of two tenants receives from each what is his (X26, MF13).
#[test]
fn tenants_with_different_keys_do_not_meet() {
    super::check_over(Some("udp:127.0.0.1,near=no"), "tenants.c", "fi_errno.h", |_| {});
}
