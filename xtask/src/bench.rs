//! `cargo xtask bench`: builds `benches/` in release and runs the benchmarks.
//!
//! A benchmark is a binary in `benches/src/bin`. It takes `--json` (one object a line) and
//! `--quick` (the smallest size that still runs everything).

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use serde_json::{Map, Value};

use crate::packages::DPDK as DPDK_HEADER;
use crate::{cargo, root, target_dir};

/// The benchmark against DPDK, and the feature that it needs. Its sources are in benches/src/dpdk.
pub(crate) const DPDK: &str = "dpdk";

/// The benchmark of the libfabric provider.
const PROVIDER: &str = "provider";

/// The benchmark that boots a virtual machine, and its program in the guest, which needs that
/// feature too.
pub(crate) const VFIO: &str = "vfio";
pub(crate) const VFIO_GUEST: &str = "vfio-guest";

/// Which benches to run and how to print.
#[derive(clap::Args)]
#[command(after_help = "\
With --json every line is one object: `bench`, `case`, `value`, `unit`, and where they apply
`reference`, `reference_value`, `ratio` (value / reference), `min`, `p50`, `p99`, `n`, `placement`.

Examples:
  cargo xtask bench                   all of them
  cargo xtask bench latency           one
  cargo xtask bench latency --json    for a program to read
  cargo xtask bench latency --plot latency.svg")]
pub(crate) struct BenchArgs {
    /// A file of benches/src/bin, without its ending, or `dpdk`; all of them if it is not given,
    /// `dpdk` among them where DPDK is installed.
    name: Option<String>,
    /// Prints one JSON object a line and nothing else.
    #[arg(long)]
    json: bool,
    /// Draws what was measured into this file, as SVG: a bar a case. Prints as --json does.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Takes the smallest size: shows that the bench runs, measures nothing worth keeping.
    #[arg(long)]
    quick: bool,
}

/// Builds and runs the benches.
///
/// # Errors
/// The benchmark does not exist, or it does not build.
pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode, String> {
    let mut all = names()?;
    let has_dpdk = Path::new(DPDK_HEADER.program).exists();
    if has_dpdk {
        all.push(DPDK.to_owned());
    }
    let chosen = match &args.name {
        None => all,
        Some(name) if all.contains(name) => vec![name.clone()],
        Some(name) => return Err(format!("no bench {name}: there are {}", all.join(", "))),
    };
    let (with_dpdk, plain): (Vec<_>, Vec<_>) = chosen.iter().partition(|name| *name == DPDK);
    if !plain.is_empty() {
        // Builds only the named benchmark: each takes as long as the rest of the build.
        let mut what = args.name.as_deref().map_or(vec!["--bins"], |name| vec!["--bin", name]);
        if plain.iter().any(|name| *name == PROVIDER) {
            // The benchmark loads the library at run time, a dependency that Cargo does not know.
            what.extend(["--package", "barewire-provider", "--lib"]);
        }
        build(&what)?;
    }
    if !with_dpdk.is_empty() {
        build(&["--bin", DPDK, "--features", DPDK])?;
    }
    if has_dpdk && plain.iter().any(|name| *name == VFIO) {
        build(&["--bin", VFIO_GUEST, "--features", DPDK])?;
    }
    let mut failed = Vec::new();
    let json = args.json || args.plot.is_some();
    let mut lines = String::new();
    for name in chosen {
        let mut command = Command::new(target_dir().join("release").join(&name));
        command.current_dir(root()).stdin(Stdio::null());
        command.args(json.then_some("--json")).args(args.quick.then_some("--quick"));
        if !json {
            println!("{name}");
        }
        let done = match &args.plot {
            None => command.status().is_ok_and(|status| status.success()),
            Some(_) => command.stderr(Stdio::inherit()).output().is_ok_and(|output| {
                let printed = String::from_utf8_lossy(&output.stdout);
                print!("{printed}");
                lines.push_str(&printed);
                output.status.success()
            }),
        };
        if !done {
            failed.push(name);
        }
    }
    if !failed.is_empty() {
        return Err(format!("failed: {}", failed.join(", ")));
    }
    if let Some(file) = &args.plot {
        check_json(&lines)?;
        std::fs::write(file, crate::plot::svg(&lines))
            .map_err(|why| format!("{}: {why}", file.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn build(what: &[&str]) -> Result<(), String> {
    let built = Command::new(cargo())
        .args(["build", "--release", "--quiet", "--package", "barewire-benches"])
        .args(what)
        .current_dir(root())
        .stdin(Stdio::null())
        .status()
        .map_err(|why| format!("cargo does not start: {why}"))?;
    if built.success() { Ok(()) } else { Err("the benches do not build".to_owned()) }
}

/// The benchmarks that need no feature, sorted by name.
///
/// # Errors
/// `benches/src/bin` cannot be read. A missing folder means that there are none.
pub(crate) fn names() -> Result<Vec<String>, String> {
    let dir = root().join("benches/src/bin");
    if !dir.is_dir() {
        return Ok(Vec::new());
    }
    let files = std::fs::read_dir(&dir).map_err(|why| format!("{}: {why}", dir.display()))?;
    let mut names: Vec<String> = files
        .flatten()
        .map(|file| file.path())
        .filter(|path| path.extension().is_some_and(|ext| ext == "rs"))
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
        .collect();
    names.sort();
    Ok(names)
}

/// Checks that a benchmark printed at least one line under `--json`, and that every line is an
/// object with the mandatory fields.
///
/// # Errors
/// The first invalid line and the reason.
pub(crate) fn check_json(output: &str) -> Result<(), String> {
    let mut count = 0;
    for line in output.lines().filter(|line| !line.trim().is_empty()) {
        let object: Map<String, Value> =
            serde_json::from_str(line).map_err(|why| format!("{why}: {line}"))?;
        let text = ["bench", "case", "unit"];
        if let Some(key) = text.iter().find(|key| !object.get(**key).is_some_and(Value::is_string))
        {
            return Err(format!("no text \"{key}\": {line}"));
        }
        let numbers = ["reference_value", "ratio", "min", "p50", "p99", "n"];
        let wrong = numbers.iter().find(|key| object.get(**key).is_some_and(|v| !v.is_number()));
        if let Some(key) = wrong {
            return Err(format!("\"{key}\" is no number: {line}"));
        }
        if !object.get("value").is_some_and(Value::is_number) {
            return Err(format!("no number \"value\": {line}"));
        }
        count += 1;
    }
    if count == 0 { Err("it printed nothing".to_owned()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_what_every_line_has_is_refused() {
        let good = r#"{"bench":"latency","case":"shm-8B","value":1.5,"unit":"ns","ratio":1.2}"#;
        assert_eq!(check_json(good), Ok(()));
        for key in ["bench", "case", "value", "unit"] {
            let bad = good.replacen(&format!("\"{key}\""), "\"other\"", 1);
            assert!(check_json(&bad).is_err_and(|why| why.contains(key)), "{key}");
        }
        assert!(check_json(&good.replace("1.2", "\"1.2\"")).is_err());
        assert!(check_json("words").is_err());
        assert!(check_json("").is_err());
    }
}
