//! What calls return when the system has nothing left, and that a line names the cure.

use std::path::PathBuf;

use super::{Bench, compile, succeed, with};

/// Compiles the program and hands it to `run`, or says why not.
fn limits(run: impl FnOnce(&Bench, PathBuf)) {
    with(&[("cc", "gcc"), ("fi_info", "libfabric-bin")], |bench| {
        if !std::path::Path::new("/usr/include/rdma/fabric.h").exists() {
            println!("SKIPPED: no rdma/fabric.h: sudo apt-get install libfabric-dev");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        run(bench, compile(dir.path(), &["cc", "-lfabric"], "limits.c"));
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

/// Goal: -FI_ENOSPC where /dev/shm has no room for a segment, and FI_ENOSPC, not "unreachable",
/// where it has none for a ring later. Method: a name space with a small one.
#[test]
fn without_room_in_dev_shm_calls_say_so() {
    limits(|bench, program| {
        let mut probe = bench.program("unshare");
        let can = probe.args(["-rm", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]).output();
        if !can.is_ok_and(|output| output.status.success()) {
            println!("SKIPPED: no user name spaces: sysctl kernel.unprivileged_userns_clone=1");
            return;
        }
        for (size, case, level) in [("256k", "space", ""), ("16m", "later", "warn")] {
            let script =
                format!("mount -t tmpfs -o size={size} tmpfs /dev/shm && exec \"$0\" {case}");
            let mut command = bench.program("unshare");
            command.args(["-rm", "sh", "-c", &script]).arg(&program);
            // A failed opening is seen at libfabric's default log level.
            if !level.is_empty() {
                command.env("FI_LOG_LEVEL", level);
            }
            command.env("FI_BAREWIRE_T_DEAD_MS", "300");
            check(&succeed(&mut command, 60), "mount -o remount,size=1G");
        }
    });
}

/// Goal: as many peers as `fi_av_open` is told and as are inserted; where a setting says less, the
/// log says which.
#[test]
fn a_vector_holds_what_is_inserted() {
    limits(|bench, program| {
        // Told, not told, told by the launcher.
        for (count, told, universe) in [
            ("5000", "5000", "1"),
            ("20000", "20000", "1"),
            ("20000", "0", ""),
            ("5000", "0", "6000"),
        ] {
            let mut command = bench.program(program.to_str().unwrap());
            command.args(["peers", count, count, told]).env("FI_LOG_LEVEL", "warn");
            let said = succeed(command.env("FI_UNIVERSE_SIZE", universe), 60);
            check(&said, "ok fi_av_insert");
            assert!(!said.contains("not inserted"), "{said}");
        }
        let mut command = bench.program(program.to_str().unwrap());
        command.args(["peers", "5000", "100", "5000"]).env("FI_BAREWIRE_PEER_MAX", "100");
        let said = succeed(command.env("FI_LOG_LEVEL", "warn"), 60);
        check(&said, "4900 of 5000 addresses not inserted, 100 first: ");
        assert!(said.contains("raise or unset BAREWIRE_PEER_MAX=100"), "{said}");
    });
}
