//! The receive thread of a process, under forks, ends, signals, quotas and policies, and what it
//! costs.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Bench, compile, finish, succeed, text, with};

/// Runs `test` with the program, over UDP and with T_dead of 500 ms.
fn with_program(test: impl FnOnce(&dyn Fn(&[&str]) -> Command)) {
    with(&[("cc", "gcc"), ("fi_info", "libfabric-bin")], |bench: &Bench| {
        if !Path::new("/usr/include/rdma/fabric.h").exists() {
            println!("SKIPPED: no rdma/fabric.h: sudo apt-get install libfabric-dev");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let program = compile(dir.path(), &["cc", "-lfabric"], "answers.c");
        test(&|args| {
            let mut command = bench.program(program.to_str().unwrap());
            command.args(args).env("FI_BAREWIRE_PORT", "udp:127.0.0.1,near=no");
            command.env("FI_BAREWIRE_T_DEAD_MS", "500");
            command
        });
    });
}

/// Runs a case and returns what it said.
fn passes(command: &mut Command) -> String {
    let said = succeed(command, 60);
    match said.lines().find_map(|line| line.strip_prefix("lacking: ")) {
        Some(what) => println!("SKIPPED: this machine lacks {what}"),
        None => assert!(!said.contains("BAD") && said.contains("ok end\n"), "{command:?}: {said}"),
    }
    said
}

const THREADING: [&str; 2] = ["safe", "domain"];

/// Goal: children of a fork are refused and end, whatever they do and whatever the thread was
/// doing, and the thread goes on for the parent.
#[test]
fn forks_leave_the_receive_thread_alone() {
    with_program(|program| {
        for threading in THREADING {
            passes(&mut program(&["fork", threading]));
        }
    });
}

/// Goal: a process may end, without closing anything, while the thread works.
#[test]
fn a_process_ends_while_its_receive_thread_works() {
    with_program(|program| {
        for _ in 0..3 {
            for threading in THREADING {
                passes(&mut program(&["exit", threading]));
            }
        }
    });
}

/// Goal: no signal of the process comes to the thread, and a handler may jump out of what the
/// program computes.
#[test]
fn signals_are_the_programs() {
    with_program(|program| {
        for threading in THREADING {
            passes(&mut program(&["signals", threading]));
        }
    });
}

/// Goal: a creator with a real-time policy that is pinned to one processor and computes there does
/// not starve the thread.
#[test]
fn a_real_time_program_does_not_starve_the_receive_thread() {
    with_program(|program| {
        for threading in THREADING {
            passes(&mut program(&["fifo", threading]));
        }
    });
}

/// Goal: where the system gives no thread, or no barrier, the domain opens, works for who polls,
/// and the log says so.
#[test]
fn a_domain_works_without_its_receive_thread() {
    with_program(|program| {
        for threading in THREADING {
            for what in ["clone", "membarrier", "nproc"] {
                let mut command = program(&[&format!("refuse-{what}"), threading]);
                let said = passes(command.env("FI_LOG_LEVEL", "warn"));
                // Who takes the lock needs no barrier, and without it every domain does.
                let without = what != "membarrier";
                assert_eq!(said.contains("no receive thread ("), without, "{what}: {said}");
                assert!(said.contains("<warn> no receive thread (") || !without, "{said}");
            }
        }
    });
}

/// A group of processes that get a fifth of a processor.
struct Quota {
    dir: PathBuf,
}

impl Quota {
    fn new() -> Result<Self, String> {
        let name = format!("barewire-test-{}", std::process::id());
        let two = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
        let (root, file, words) = if two {
            ("/sys/fs/cgroup", "cpu.max", "20000 100000")
        } else {
            ("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "20000")
        };
        let quota = Self { dir: Path::new(root).join(name) };
        let made = std::fs::create_dir(&quota.dir)
            .and_then(|()| std::fs::write(quota.dir.join(file), words));
        made.map(|()| quota).map_err(|e| format!("no CPU quota can be set in {root}: {e}"))
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.dir);
    }
}

/// Goal: a program that computes all that its quota gives it still answers within T_dead.
#[test]
fn a_quota_leaves_the_receive_thread_its_part() {
    let quota = match Quota::new() {
        Ok(quota) => quota,
        Err(why) => {
            println!("SKIPPED: {why}");
            return;
        }
    };
    with_program(|program| {
        let procs = quota.dir.join("cgroup.procs");
        let mut command = program(&["quota", "domain", procs.to_str().unwrap()]);
        passes(command.env("FI_BAREWIRE_T_DEAD_MS", "1000"));
    });
}

/// Goal: the thread wakes at most twice a second while the program computes and nobody talks to it,
/// never without peers, and takes at most a thousandth of a processor.
#[test]
fn the_receive_thread_costs_next_to_nothing() {
    with_program(|program| {
        let mut command = program(&["cost", "domain"]);
        let said = passes(command.env("FI_BAREWIRE_T_DEAD_MS", "5000"));
        said.lines().filter(|line| line.starts_with("cost ")).for_each(|line| println!("{line}"));
    });
}

/// Goal: with the setting that switches it off there is no thread.
#[test]
fn no_receive_thread_where_it_is_switched_off() {
    with_program(|program| {
        let mut command = program(&["refuse-nothing", "safe"]);
        let output = finish(command.env("FI_BAREWIRE_RCVTHREAD", "0"), 60);
        assert!(output.status.success(), "{}", text(&output));
    });
}
