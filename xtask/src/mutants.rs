//! `cargo xtask mutants`: how much of the protocol the tests really hold.
//!
//! Changes the code at random places (`cargo-mutants`: a comparison turned round, a function that
//! returns at once) and sees whether a test fails: first the dataplane's own tests, then the
//! simulator's `sim_quick`, then conformance. What no test notices is printed, to be explained or
//! given a test.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use serde_json::Value;

use crate::{cargo, root, target_dir};

/// The version that is installed where there is none.
const VERSION: &str = "^27";

/// Where the mutants are looked for, unless it is said.
const FILES: [&str; 2] = ["dataplane/src/rel/**/*.rs", "dataplane/src/node/*.rs"];

/// Share of the mutants that the tests have to notice, percent.
const BAR: usize = 90;

/// Seconds that a stage may take for one mutant; one that hangs is noticed.
const LIMIT: &str = "900";

/// Who judges, in this order, and what cargo is told: each sees what those before it let pass.
const STAGES: [(&str, &[&str]); 3] = [
    ("unit", &["--package", "barewire-dataplane"]),
    ("sim", &["--test-package", "barewire-tests", "--", "--test", "sim", "sim_quick"]),
    ("conformance", &["--test-package", "barewire-tests", "--", "--test", "conformance"]),
];

/// How many mutants, and where.
#[derive(clap::Args)]
#[command(after_help = "\
A mutant takes a build and up to three suites, some five minutes; 200 of them a night. The details
of each, with its change and what the tests said, stay in target/mutants.

Examples:
  cargo xtask mutants
  cargo xtask mutants --count 20 --seed 7
  cargo xtask mutants --count 10 --file dataplane/src/rel/sent.rs")]
pub(crate) struct MutantsArgs {
    /// Mutants to try, drawn at random.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// Seed of the draw; the same one draws the same of the same code. Default: another each day.
    #[arg(long)]
    seed: Option<u64>,
    /// Files to change, as a glob from the project's root; may be given several times.
    #[arg(long, value_name = "GLOB")]
    file: Vec<String>,
}

/// Tries the mutants; succeeds if the tests noticed [`BAR`] percent of them.
///
/// # Errors
/// `cargo-mutants` cannot be installed, finds nothing to change, or the tests fail as they are.
pub(crate) fn run(args: &MutantsArgs) -> Result<ExitCode, String> {
    let tool = installed()?;
    let files: Vec<&str> = match args.file.as_slice() {
        [] => FILES.to_vec(),
        named => named.iter().map(String::as_str).collect(),
    };
    let all = list(&tool, &files)?;
    let seed = args.seed.unwrap_or_else(today);
    let mut left = draw(all.clone(), args.count as usize, seed);
    let drawn = left.len();
    println!("mutants: {drawn} of {}, seed {seed}", files.join(" "));
    let mut unviable = 0;
    for (stage, how) in STAGES {
        if left.is_empty() {
            break;
        }
        let judged = judge(&tool, (stage, how), &files, (&all, &left))?;
        // A mutant that does not build says nothing.
        unviable += judged.unviable;
        let viable = left.len() - judged.unviable;
        println!("{stage}: {} of {viable} noticed", viable - judged.missed.len());
        left = judged.missed;
    }
    let viable = drawn - unviable;
    let caught = viable - left.len();
    println!("{caught} of {viable} noticed ({unviable} do not build); bar {BAR} %");
    for mutant in &left {
        println!("not noticed: {mutant}");
    }
    let met = caught * 100 >= viable * BAR;
    Ok(if met { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Days since 1970: a draw of its own for each night.
fn today() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| since.as_secs() / 86_400)
}

/// `cargo-mutants`, installed below `target` unless it is there.
fn installed() -> Result<PathBuf, String> {
    let own = target_dir().join("tools");
    for tool in [PathBuf::from("cargo-mutants"), own.join("bin/cargo-mutants")] {
        let mut asked = Command::new(&tool);
        asked.args(["mutants", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
        if asked.status().is_ok_and(|status| status.success()) {
            return Ok(tool);
        }
    }
    println!("mutants: installing cargo-mutants");
    let status = Command::new(cargo())
        .args(["install", "--quiet", "--locked", "cargo-mutants", "--version", VERSION, "--root"])
        .arg(&own)
        .stdin(Stdio::null())
        .status();
    match status {
        Ok(status) if status.success() => Ok(own.join("bin/cargo-mutants")),
        _ => Err("cargo-mutants cannot be installed: cargo install cargo-mutants".to_owned()),
    }
}

/// `cargo mutants` at the project's root.
fn mutants(tool: &Path) -> Command {
    let mut command = Command::new(tool);
    command.arg("mutants").current_dir(root()).stdin(Stdio::null());
    command
}

/// Names of all mutants of `files`.
fn list(tool: &Path, files: &[&str]) -> Result<Vec<String>, String> {
    let mut command = mutants(tool);
    command.args(["--list", "--json", "--package", "barewire-dataplane"]);
    for file in files {
        command.args(["--file", file]);
    }
    let out = command.output().map_err(|why| format!("cargo-mutants does not start: {why}"))?;
    let all: Value = serde_json::from_slice(&out.stdout).map_err(|why| {
        format!("cargo-mutants lists nothing: {why}\n{}", String::from_utf8_lossy(&out.stderr))
    })?;
    let names = all.as_array().into_iter().flatten().filter_map(|one| one["name"].as_str());
    let names: Vec<String> = names.map(str::to_owned).collect();
    if names.is_empty() {
        return Err(format!("there is nothing to change in {}", files.join(" ")));
    }
    Ok(names)
}

/// `count` of `all`, by `seed`, in their order.
fn draw(mut all: Vec<String>, count: usize, seed: u64) -> Vec<String> {
    let mut state = seed;
    let mut next = || {
        // SplitMix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    };
    let keep = count.min(all.len());
    for i in 0..keep {
        let j = i + (next() % (all.len() - i) as u64) as usize;
        all.swap(i, j);
    }
    all.truncate(keep);
    all.sort();
    all
}

/// What a stage said.
struct Judged {
    /// Mutants that no test noticed.
    missed: Vec<String>,
    /// Those that do not build.
    unviable: usize,
}

/// Runs a stage on `names` of `all` mutants. (All others are told to be known from an earlier run.
/// Asked for by name, the tool tries some besides that match none.)
fn judge(
    tool: &Path,
    (stage, how): (&str, &[&str]),
    files: &[&str],
    (all, names): (&[String], &[String]),
) -> Result<Judged, String> {
    let out = target_dir().join("mutants").join(stage);
    // What an earlier run left is not what this one says.
    let _ = std::fs::remove_dir_all(&out);
    let told = out.join("mutants.out");
    let others: Vec<&str> =
        all.iter().filter(|one| !names.contains(one)).map(String::as_str).collect();
    std::fs::create_dir_all(&told)
        .and_then(|()| std::fs::write(told.join("previously_caught.txt"), others.join("\n")))
        .map_err(|why| format!("{}: {why}", told.display()))?;
    let mut command = mutants(tool);
    command.arg("--output").arg(&out).args(["--iterate", "--timeout", LIMIT]);
    command.args(["--no-shuffle", "--colors=never"]);
    for file in files {
        command.args(["--file", file]);
    }
    let status = command.args(how).env("CARGO_INCREMENTAL", "1").status();
    let status = status.map_err(|why| format!("cargo-mutants does not start: {why}"))?;
    // 0: all noticed; 2: some were not; 3: some hung.
    if !matches!(status.code(), Some(0 | 2 | 3)) {
        return Err(format!("{stage}: the tests fail without a change; see {}", out.display()));
    }
    let lines = |file: &str| -> Vec<String> {
        let text = std::fs::read_to_string(told.join(file)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    };
    Ok(Judged { missed: lines("missed.txt"), unviable: lines("unviable.txt").len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_draws_the_same_and_another_something_else() {
        let all: Vec<String> = (0..1000).map(|n| format!("{n:03}")).collect();
        let drawn = draw(all.clone(), 50, 7);
        assert_eq!(drawn.len(), 50);
        assert_eq!(drawn, draw(all.clone(), 50, 7));
        assert_ne!(drawn, draw(all.clone(), 50, 8));
        assert!(drawn.windows(2).all(|two| two[0] < two[1]), "each once");
        assert_eq!(draw(all.clone(), 2000, 1), all);
    }
}
