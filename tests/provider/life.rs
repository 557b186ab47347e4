//! Threads, forks, libraries that are closed too early, processes that end in the middle.

use std::path::Path;

use super::{Bench, succeed, with};

fn survives(bench: &Bench, program: &Path, case: &str) {
    let said = succeed(bench.program(program.to_str().unwrap()).arg(case), 120);
    assert!(said.contains(&format!("{case} survived")), "{case}: {said}");
    // Nobody is left, so nothing of the segment is: whoever ends takes its part along.
    let name = format!("barewire-{}-{}", nix::unistd::geteuid(), bench.segment);
    let left = Path::new("/dev/shm").join(name).exists();
    // A process that ends without closing leaves the file to the next one that comes.
    assert!(!left || case.starts_with("exit") || case.starts_with("dlclose"), "{case}");
}

#[test]
fn a_process_may_live_and_end_as_it_likes() {
    with(&[("cc", "gcc"), ("fi_info", "libfabric-bin")], |bench| {
        if !Path::new("/usr/include/rdma/fabric.h").exists() {
            println!("SKIPPED: no rdma/fabric.h: sudo apt-get install libfabric-dev");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let program = bench.compile(dir.path(), &["cc", "-ldl", "-lpthread"], "life.c");
        for case in ["threads", "queue", "dlclose", "exit", "fork", "reload"] {
            survives(bench, &program, case);
            survives(bench, &program, &format!("{case}-auto"));
        }
        // The next one frees what was left by one that ended without closing, and says so.
        survives(bench, &program, "exit");
        let mut command = bench.program(program.to_str().unwrap());
        let said = succeed(command.arg("reload").env("FI_LOG_LEVEL", "warn"), 60);
        assert!(said.contains(" bytes were left by processes that died; they are freed"), "{said}");
        // What lies below logs to libfabric's log.
        let mut command = bench.program(program.to_str().unwrap());
        let said = succeed(command.arg("exit").env("FI_LOG_LEVEL", "debug"), 60);
        assert!(said.contains("joined path=/dev/shm/barewire-"), "{said}");
    });
}
