//! Our own program in C, compiled against the headers that are installed: what every bad call
//! returns, and that neither caller nor target is harmed.

use super::{compile, succeed, with};

/// What is not there is refused and not promised: shared vectors (row X23), memory of other devices
/// (X68, AR12). Rows X12 and X13: datagrams, and prefixes of messages.
#[test]
fn every_bad_call_gets_its_code() {
    with(&[("cc", "gcc"), ("fi_info", "libfabric-bin")], |bench| {
        if !std::path::Path::new("/usr/include/rdma/fabric.h").exists() {
            println!("SKIPPED: no rdma/fabric.h: sudo apt-get install libfabric-dev");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let program = compile(dir.path(), &["cc", "-lfabric", "-ldl"], "probes.c");
        for progress in ["manual", "auto"] {
            let mut command = bench.program(program.to_str().unwrap());
            let said = succeed(command.env("FI_BAREWIRE_PROGRESS", progress), 120);
            let wrong: Vec<_> = said.lines().filter(|l| l.starts_with("BAD")).collect();
            assert!(wrong.is_empty(), "progress {progress}: {wrong:#?}");
            let probes = said.lines().filter(|l| l.starts_with("ok ")).count();
            assert!(probes >= 150, "only {probes} probes:\n{said}");
        }
    });
}
