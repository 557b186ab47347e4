//! `cargo xtask demo`: two processes exchange messages over shared memory and access each other's
//! memory; prints the results as tables.

use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use crate::{cargo, root, target_dir};

/// Builds `barewire` in release, and runs a ping-pong, a verified stream, and each operation on
/// remote memory, each between two processes that the command starts itself.
///
/// # Errors
/// The command does not build, or a run failed; the run has printed the reason.
pub(crate) fn run() -> Result<ExitCode, String> {
    println!("Building barewire (release). The first time takes a minute or two.");
    let started = Instant::now();
    let built = Command::new(cargo())
        .args(["build", "--release", "--quiet", "--package", "barewire-cli"])
        .current_dir(root())
        .stdin(Stdio::null())
        .status()
        .map_err(|why| format!("cargo does not start: {why}"))?;
    if !built.success() {
        return Err("barewire does not build".to_owned());
    }
    println!("Built in {:.0} s.\n", started.elapsed().as_secs_f64());
    step("Two processes, one message to and fro at a time:", &["pingpong", "--spawn"])?;
    step(
        "Two processes, one sends, the other compares every byte:",
        &["bench", "--spawn", "--verify"],
    )?;
    for (what, op, size) in [
        ("One writes to memory of the other, and reads it back at the end:", "write", "64k"),
        ("It reads there:", "read", "64k"),
        ("It adds to a word there:", "fadd", "8"),
        ("It swaps words there, compared with what they were:", "cswap", "8"),
    ] {
        step(what, &["bench", "--spawn", "--verify", "--op", op, "--size", size])?;
    }
    step(
        "Four processes add up what each of them has:",
        &["bench", "--spawn", "4", "--verify", "--op", "allreduce"],
    )?;
    println!(
        "Next: `barewire info` says what this machine offers, `barewire doctor` what it lacks."
    );
    println!("The command is {}.", target_dir().join("release/barewire").display());
    Ok(ExitCode::SUCCESS)
}

fn step(what: &str, args: &[&str]) -> Result<(), String> {
    println!("{what}\n  $ barewire {}", args.join(" "));
    let status = Command::new(target_dir().join("release/barewire"))
        .args(args)
        .current_dir(root())
        .stdin(Stdio::null())
        .status()
        .map_err(|why| format!("barewire does not start: {why}"))?;
    println!();
    if status.success() { Ok(()) } else { Err(format!("barewire {} failed", args.join(" "))) }
}
