//! Keys that change under endpoints that talk, by the interface of C.

/// Goal: the three steps of `docs/security.md` bring another key to endpoints that send and write
/// to each other all the time and are not closed: no operation fails, waits as long as a refused
/// key takes, or brings a wrong byte, also to processes that come between the steps; a program's
/// own key is the new one then, and the old one is refused. The same of a tenant's key, beside
/// another tenant.
#[test]
fn a_key_changes_under_load() {
    let dir = tempfile::tempdir().unwrap();
    let equip = |program: &mut std::process::Command| {
        program.arg(dir.path()).env("FI_BAREWIRE_REKEY_S", "1");
    };
    super::check_with(Some("udp:127.0.0.1,near=no"), "rekey.c", "fi_errno.h", equip, |_| {});
}
