//! Injected operations that fail are counted and logged, and write no entry: Open MPI takes the
//! context of every error entry for a request of its own.

use super::{compile, succeed, with};

/// M7, "fi_inject: peer dies; tx counter": a bound counter counts the error, the log names the
/// peer, and no completion queue has an entry without a context. Every way is taken: what waits for
/// a session that never opens, what is refused on the fast path, and with selective completion.
#[test]
fn a_failed_inject_is_counted_and_logged_and_writes_no_entry() {
    with(&[("cc", "gcc"), ("fi_info", "libfabric-bin")], |bench| {
        if !std::path::Path::new("/usr/include/rdma/fabric.h").exists() {
            println!("SKIPPED: no rdma/fabric.h: sudo apt-get install libfabric-dev");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let program = compile(dir.path(), &["cc", "-lfabric"], "injects.c");
        for progress in ["manual", "auto"] {
            let mut command = bench.program(program.to_str().unwrap());
            command.env("FI_BAREWIRE_PROGRESS", progress).env("FI_BAREWIRE_T_DEAD_MS", "300");
            let said = succeed(command.env("FI_LOG_LEVEL", "warn"), 60);
            let wrong: Vec<_> = said.lines().filter(|l| l.starts_with("BAD")).collect();
            assert!(wrong.is_empty() && said.contains("ok end\n"), "{progress}: {said}");
            let told = "7 injects to 02:77:00:00:00:09 failed, which no completion reports: ";
            let lines = said.lines().filter(|l| l.contains(told)).count();
            assert_eq!(lines, 2, "progress {progress}: {said}");
            let told = "injects to 02:";
            let lines = said.lines().filter(|l| l.contains(told) && l.contains("key")).count();
            assert_eq!(lines, 1, "progress {progress}, with a wrong key: {said}");
        }
    });
}
