//! Collectives by our own program in C, compiled against the headers that are installed.

use super::{succeed, with};

#[test]
fn the_nine_through_libfabric() {
    with(&[("cc", "gcc"), ("fi_info", "libfabric-bin")], |bench| {
        if !std::path::Path::new("/usr/include/rdma/fi_collective.h").exists() {
            println!("SKIPPED: no rdma/fi_collective.h: sudo apt-get install libfabric-dev");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let program = bench.compile(dir.path(), &["cc", "-lfabric"], "collectives.c");
        for progress in ["manual", "auto"] {
            let mut command = bench.program(program.to_str().unwrap());
            let said = succeed(command.env("FI_BAREWIRE_PROGRESS", progress), 120);
            let wrong: Vec<_> = said.lines().filter(|l| l.starts_with("BAD")).collect();
            assert!(wrong.is_empty(), "progress {progress}: {wrong:#?}");
            assert!(said.contains("ok end\n"), "{said}");
            let checks = said.lines().filter(|l| l.starts_with("ok ")).count();
            assert!(checks >= 60, "only {checks} checks:\n{said}");
        }
        // Row 9 of B.7.1: under a hook of libfabric's the domain opens all the same.
        let mut command = bench.program(program.to_str().unwrap());
        let said = succeed(command.env("FI_HOOK", "noop"), 120);
        assert!(said.contains("ok end\n") && !said.contains("BAD"), "{said}");
    });
}
