//! What calls return when the system has nothing left, and that a line names the cure.

use std::path::PathBuf;

use super::{Bench, succeed, with};

/// Compiles the program and hands it to `run`, or says why not.
fn limits(run: impl FnOnce(&Bench, PathBuf)) {
    with(&[("cc", "gcc"), ("fi_info", "libfabric-bin")], |bench| {
        if !std::path::Path::new("/usr/include/rdma/fabric.h").exists() {
            println!("SKIPPED: no rdma/fabric.h: sudo apt-get install libfabric-dev");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        run(bench, bench.compile(dir.path(), &["cc", "-lfabric"], "limits.c"));
    });
}

fn check(said: &str, cure: &str) {
    let wrong: Vec<_> = said.lines().filter(|l| l.starts_with("BAD")).collect();
    assert!(wrong.is_empty() && said.contains("ok end\n"), "{said}");
    assert!(said.contains(cure), "no \"{cure}\" in {said}");
}

/// Goal: -FI_EMFILE where no descriptor is left, from every call that needs one.
#[test]
fn without_a_descriptor_calls_say_so() {
    limits(|bench, program| {
        let mut command = bench.program("sh");
        let script = "ulimit -n 64; exec \"$0\" descriptors";
        command.args(["-c", script]).arg(program).env("FI_LOG_LEVEL", "warn");
        check(&succeed(&mut command, 60), "ulimit -n 65536");
    });
}

/// Goal: -FI_ENOSPC where /dev/shm has no room for a segment. Method: a name space with a small
/// one.
#[test]
fn without_room_in_dev_shm_a_domain_says_so() {
    limits(|bench, program| {
        let script = "mount -t tmpfs -o size=256k tmpfs /dev/shm && exec \"$0\" space";
        let mut command = bench.program("unshare");
        command.args(["-rm", "sh", "-c", script]).arg(program);
        let mut probe = bench.program("unshare");
        let can = probe.args(["-rm", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]).output();
        if !can.is_ok_and(|output| output.status.success()) {
            println!("SKIPPED: no user name spaces: sysctl kernel.unprivileged_userns_clone=1");
            return;
        }
        // At libfabric's default log level.
        check(&succeed(&mut command, 60), "mount -o remount,size=1G");
    });
}
