//! Connected endpoints by our own program in C, compiled against the headers that are installed.

use super::{succeed, with};

#[test]
fn connections_are_made_refused_and_ended() {
    with(&[("cc", "gcc"), ("fi_info", "libfabric-bin")], |bench| {
        if !std::path::Path::new("/usr/include/rdma/fi_cm.h").exists() {
            println!("SKIPPED: no rdma/fi_cm.h: sudo apt-get install libfabric-dev");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let program = bench.compile(dir.path(), &["cc", "-lfabric"], "connect.c");
        for progress in ["manual", "auto"] {
            let mut command = bench.program(program.to_str().unwrap());
            let said = succeed(command.env("FI_BAREWIRE_PROGRESS", progress), 120);
            let wrong: Vec<_> = said.lines().filter(|l| l.starts_with("BAD")).collect();
            assert!(wrong.is_empty(), "progress {progress}: {wrong:#?}");
            assert!(said.contains("ok end\n"), "{said}");
        }
    });
}
