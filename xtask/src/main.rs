//! The commands of the workspace: `cargo xtask test`, `demo`, `bench`, `figures`, `dist`, `mpi`,
//! `mutants` and `vm`.
//!
//! Needs Rust only. Everything is started without standard input, so that nothing can wait for an
//! answer.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench;
// Network namespaces as hosts, shared with the tests.
#[allow(dead_code, unreachable_pub)]
#[path = "../../tests/src/cluster.rs"]
mod cluster;
mod demo;
mod dist;
mod figures;
mod mpi;
mod mutants;
#[allow(dead_code, unreachable_pub)]
#[path = "../../tests/src/nodes.rs"]
mod nodes;
// The build of the Open MPI component, shared with the tests.
#[allow(unreachable_pub)]
#[path = "../../tests/src/mpi_coll.rs"]
mod mpi_coll;
mod packages;
mod plot;
mod process;
mod report;
mod test;
mod vm;

/// Builds, checks, shows and measures barewire.
#[derive(Parser)]
#[command(name = "cargo xtask", version, max_term_width = 100)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs every suite, or the ones named, and ends with the counts.
    Test(test::TestArgs),
    /// Builds the command and shows two processes exchanging messages over shared memory.
    Demo,
    /// Builds the benches in release and runs all of them, or the one named.
    Bench(bench::BenchArgs),
    /// Draws the plots of the documents anew, from their tables.
    Figures,
    /// Runs a command in a virtual machine with an IOMMU and NICs bound to vfio-pci.
    Vm(vm::VmArgs),
    /// Makes packages, .deb, .rpm and a tarball: the provider, the command, man pages, units.
    Dist(dist::DistArgs),
    /// Runs an MPI program over barewire and says the command line that does it.
    Mpi(mpi::MpiArgs),
    /// Changes the protocol's code at random places and sees whether the tests notice.
    Mutants(mutants::MutantsArgs),
}

fn main() -> ExitCode {
    let done = match Args::parse().command {
        Command::Test(args) => test::run(&args),
        Command::Demo => demo::run(),
        Command::Bench(args) => bench::run(&args),
        Command::Figures => figures::run(),
        Command::Vm(args) => vm::run(&args),
        Command::Dist(args) => dist::run(&args),
        Command::Mpi(args) => mpi::run(&args),
        Command::Mutants(args) => mutants::run(&args),
    };
    done.unwrap_or_else(|why| {
        eprintln!("error: {why}");
        ExitCode::FAILURE
    })
}

/// The folder of the workspace's `Cargo.toml`.
fn root() -> PathBuf {
    // Read at run time where cargo sets it, so that a moved checkout still works.
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest.parent().map_or_else(|| manifest.clone(), Path::to_path_buf)
}

/// Cargo's build folder.
fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// The cargo that runs this program, so that `cargo +toolchain xtask` uses one toolchain
/// throughout.
fn cargo() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}
