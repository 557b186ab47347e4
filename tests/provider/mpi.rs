//! Open MPI 4.1 over the provider: the matching of messages is ours (`mtl ofi`), and no shared
//! memory of MPI's own helps.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::ranks::yields;
use super::{Bench, compile, succeed, with};

pub(super) const OPEN_MPI: &[(&str, &str)] =
    &[("mpirun", "openmpi-bin"), ("mpicc", "libopenmpi-dev"), ("cc", "gcc")];

/// `command`, which starts the launcher, with what it is told for so many ranks.
pub(super) fn mpirun(command: Command, ranks: u32) -> Command {
    let mut command = bare_mpirun(command, ranks);
    for (name, value) in [
        ("pml", "cm"),
        // The file of Debian's package switches it off.
        ("mtl", "ofi"),
        ("mtl_ofi_provider_include", "barewire"),
        ("btl", "self"),
        ("osc", "pt2pt"),
    ] {
        command.args(["--mca", name, value]);
    }
    command
}

/// As [`mpirun`], with messages that are Open MPI's own.
pub(super) fn bare_mpirun(mut command: Command, ranks: u32) -> Command {
    command.args(["-n", &ranks.to_string(), "--oversubscribe"]);
    if nix::unistd::geteuid().is_root() {
        command.arg("--allow-run-as-root");
    }
    command.args(["--mca", "mpi_yield_when_idle", "1"]);
    for name in ["FI_PROVIDER", "FI_PROVIDER_PATH", "FI_BAREWIRE_PORT"] {
        command.args(["-x", name]);
    }
    command.env("LD_PRELOAD", yields()).args(["-x", "LD_PRELOAD"]);
    command
}

#[test]
fn open_mpi_runs_every_kind_of_call() {
    with(OPEN_MPI, |bench| {
        let dir = tempfile::tempdir().unwrap();
        let program = compile(dir.path(), &["mpicc"], "mpi.c");
        for ranks in [2, 3] {
            let said = succeed(mpirun(bench.program("mpirun"), ranks).arg(&program), 240);
            assert!(said.contains(&format!("all {ranks} ranks agree")), "{said}");
        }
    });
}

/// Kills one rank in the middle of its traffic, and says how long the launcher took to see it.
fn kill_one(bench: &Bench, program: &std::path::Path, n: u32) -> Duration {
    let mut command = mpirun(bench.program("mpirun"), 2);
    command.arg(program).arg("forever");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let pids: Vec<i32> = (&mut lines)
        .map_while(Result::ok)
        .filter_map(|line| line.strip_prefix("pid ")?.trim().parse().ok())
        .take(2)
        .collect();
    assert_eq!(pids.len(), 2, "the ranks did not start");
    // Some are killed while they connect, others in full swing.
    std::thread::sleep(Duration::from_millis(u64::from(n % 7) * 23));
    let victim = nix::unistd::Pid::from_raw(pids[(n % 2) as usize]);
    nix::sys::signal::kill(victim, nix::sys::signal::Signal::SIGKILL).unwrap();
    let killed = Instant::now();
    loop {
        match child.try_wait().unwrap() {
            Some(status) => {
                assert!(!status.success(), "a job that lost a rank has not succeeded");
                return killed.elapsed();
            }
            None if killed.elapsed() > Duration::from_secs(60) => {
                let _ = child.kill();
                panic!("the job hangs 60 s after rank {victim} was killed");
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

#[test]
fn a_job_ends_when_a_rank_is_killed_and_the_next_one_runs() {
    with(OPEN_MPI, |bench| {
        let dir = tempfile::tempdir().unwrap();
        let program = compile(dir.path(), &["mpicc"], "mpi.c");
        let nightly = std::env::var_os("BAREWIRE_NIGHTLY").is_some();
        let kills = if nightly { 100 } else { 8 };
        let mut longest = Duration::ZERO;
        for n in 0..kills {
            longest = longest.max(kill_one(bench, &program, n));
            if n % 4 == 3 {
                let mut command = mpirun(bench.program("mpirun"), 2);
                let said = succeed(command.arg(&program).arg("short"), 120);
                assert!(said.contains("all 2 ranks agree"), "after {n} kills: {said}");
            }
        }
        println!("{kills} kills, the longest end took {longest:?}");
    });
}
