//! Edges of libfabric's interface by our own program in C.

/// Goal: in a domain with 16 operations and 32 receives, what libfabric's manuals say of peeks in a
/// full queue, of default flags, of sizes of 0, of the number of regions and of old error entries.
#[test]
fn edges_are_as_the_manuals_have_them() {
    let equip = |command: &mut std::process::Command| {
        command.env("FI_BAREWIRE_TX_MAX", "16").env("FI_BAREWIRE_RX_MAX", "32");
    };
    super::check_with(None, "edges.c", "fi_tagged.h", equip, |_| {});
}

/// Goal: what `fi_getinfo` answers is no less than its hints, good as hints again, and opens.
#[test]
fn an_answer_has_what_was_asked_for_and_is_good_as_hints() {
    super::check("offers.c", "fi_endpoint.h", |_| {});
}
