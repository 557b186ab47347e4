//! Who reaches an endpoint and a region over the provider: who was told an address, who guesses,
//! who was inserted.

use super::{compile, succeed, with};

/// Goal: the address is the capability. Who knows the MAC and the key of a region and not the
/// incarnation reaches nothing, by whatever call; a server with a number is reached by it; keys of
/// `FI_MR_PROV_KEY` are 64 random bits; and with `FI_BAREWIRE_PEERS=inserted` who is not in the
/// vector is told so.
#[test]
fn a_stranger_reaches_nothing() {
    with(&[("cc", "gcc"), ("fi_info", "libfabric-bin")], |bench| {
        if !std::path::Path::new("/usr/include/rdma/fabric.h").exists() {
            println!("SKIPPED: no rdma/fabric.h: sudo apt-get install libfabric-dev");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let program = compile(dir.path(), &["cc", "-lfabric"], "strangers.c");
        for (peers, progress) in
            [("named", "manual"), ("inserted", "manual"), ("named", "auto"), ("inserted", "auto")]
        {
            let mut command = bench.program(program.to_str().unwrap());
            command.env("FI_BAREWIRE_PEERS", peers).env("FI_BAREWIRE_PROGRESS", progress);
            if peers == "inserted" {
                command.arg(peers);
            }
            let said = succeed(&mut command, 60);
            let wrong: Vec<_> = said.lines().filter(|l| l.starts_with("BAD")).collect();
            assert!(wrong.is_empty() && said.contains("ok end\n"), "{peers} {progress}: {said}");
        }
    });
}
