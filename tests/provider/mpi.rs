//! Open MPI 4.1 over the provider: the matching of messages is ours (`mtl ofi`), and no shared
//! memory of MPI's own helps.

use std::process::Command;

use super::{Bench, succeed, with};

const OPEN_MPI: &[(&str, &str)] =
    &[("mpirun", "openmpi-bin"), ("mpicc", "libopenmpi-dev"), ("cc", "gcc")];

fn mpirun(bench: &Bench, ranks: u32) -> Command {
    let mut command = bench.program("mpirun");
    command.args(["-n", &ranks.to_string(), "--oversubscribe"]);
    if nix::unistd::geteuid().is_root() {
        command.arg("--allow-run-as-root");
    }
    for (name, value) in [
        ("mpi_yield_when_idle", "1"),
        ("pml", "cm"),
        // The file of Debian's package switches it off.
        ("mtl", "ofi"),
        ("mtl_ofi_provider_include", "barewire"),
        ("btl", "self"),
        ("osc", "pt2pt"),
    ] {
        command.args(["--mca", name, value]);
    }
    for name in ["FI_PROVIDER", "FI_PROVIDER_PATH", "FI_BAREWIRE_PORT"] {
        command.args(["-x", name]);
    }
    command
}

#[test]
fn open_mpi_runs_every_kind_of_call() {
    with(OPEN_MPI, |bench| {
        let dir = tempfile::tempdir().unwrap();
        let program = bench.compile(dir.path(), &["mpicc"], "mpi.c");
        for ranks in [2, 3] {
            let said = succeed(mpirun(bench, ranks).arg(&program), 240);
            assert!(said.contains(&format!("all {ranks} ranks agree")), "{said}");
        }
    });
}
