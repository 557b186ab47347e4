//! `cargo xtask mutants`: how much of the protocol the tests really hold.
//!
//! Changes the code at random places (`cargo-mutants`: a comparison turned round, a function that
//! returns at once) and sees whether a test fails: first the dataplane's own tests, then the
//! simulator's `sim_quick`, then conformance. What no test notices is printed, to be explained or
//! given a test.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

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

/// Who judges, in this order, and what `cargo-mutants` is told: each stage sees what those before
/// it let pass. The target is named for the build too, or cargo builds all of the package's.
const STAGES: [(&str, &[&str]); 3] = [
    ("unit", &["--package", "barewire-dataplane", "--cargo-arg=--lib"]),
    ("sim", &["--test-package", "barewire-tests", "--cargo-arg=--test=sim", "--", "sim_quick"]),
    ("conformance", &["--test-package", "barewire-tests", "--cargo-arg=--test=conformance"]),
];

/// How many mutants, and where.
#[derive(clap::Args)]
#[command(after_help = "\
A mutant takes a build and up to three suites, some three minutes; 200 of them a night. What each
stage said of each mutant is in target/mutants. A run that was interrupted goes on where it was if
the same is asked for and no file of the project has changed since.

Examples:
  cargo xtask mutants
  cargo xtask mutants --count 20 --seed 7
  cargo xtask mutants --count 10 --file dataplane/src/rel/sent.rs")]
pub(crate) struct MutantsArgs {
    /// Mutants to try, drawn at random.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// Seed of the draw; the same one draws the same of the same code. Default: another each day,
    /// or that of the run that was interrupted.
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
    let trial = Trial { tool, tree: home().join("tree"), files };
    let digest = copy_tree(&trial.tree)?;
    let asked = format!("{} of {}, tree {digest:016x}", args.count, trial.files.join(" "));
    let mut journal = Journal::open(&home().join("journal"), &asked, args.seed)?;
    let all = trial.list()?;
    let mut left = draw(all.clone(), args.count as usize, journal.seed);
    let drawn = left.len();
    println!("mutants: {drawn} of {}, seed {}", trial.files.join(" "), journal.seed);
    let mut unviable = 0;
    for stage in STAGES {
        let judged = trial.stage(stage, (&all, &left), &mut journal)?;
        // A mutant that does not build says nothing.
        unviable += judged.unviable;
        let viable = left.len() - judged.unviable;
        println!("{}: {} of {viable} noticed", stage.0, viable - judged.missed.len());
        left = judged.missed;
    }
    journal.finish()?;
    let viable = drawn - unviable;
    let caught = viable - left.len();
    println!("{caught} of {viable} noticed ({unviable} do not build); bar {BAR} %");
    for mutant in &left {
        println!("not noticed: {mutant}");
    }
    let met = caught * 100 >= viable * BAR;
    Ok(if met { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Where the changed tree, its build and what was found lie.
fn home() -> PathBuf {
    target_dir().join("mutants")
}

/// Makes `tree` a copy of the project as it is, without what git ignores, and leaves its build.
/// Returns a digest of all names and contents.
fn copy_tree(tree: &Path) -> Result<u64, String> {
    let failed = |path: &Path, why: std::io::Error| format!("{}: {why}", path.display());
    std::fs::create_dir_all(tree).map_err(|why| failed(tree, why))?;
    for entry in std::fs::read_dir(tree).map_err(|why| failed(tree, why))?.flatten() {
        let path = entry.path();
        if entry.file_name() == "target" {
            continue;
        }
        let gone = match path.is_dir() {
            true => std::fs::remove_dir_all(&path),
            false => std::fs::remove_file(&path),
        };
        gone.map_err(|why| failed(&path, why))?;
    }
    let mut git = Command::new("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let out = git.current_dir(root()).output().map_err(|why| format!("git: {why}"))?;
    let mut digest = DefaultHasher::new();
    for name in String::from_utf8_lossy(&out.stdout).split_terminator('\0') {
        let (from, to) = (root().join(name), tree.join(name));
        // A file that is deleted and not yet committed as such is listed too.
        let Ok(content) = std::fs::read(&from) else { continue };
        (name, &content).hash(&mut digest);
        let folder = to.parent().unwrap_or(tree);
        std::fs::create_dir_all(folder)
            .and_then(|()| std::fs::copy(&from, &to))
            .map_err(|why| failed(&to, why))?;
    }
    Ok(digest.finish())
}

/// What was found so far: a line that says what was asked for, one with the seed, then a line
/// `STAGE VERDICT NAME` per judgement.
struct Journal {
    path: PathBuf,
    seed: u64,
    found: BTreeMap<(String, String), Verdict>,
}

impl Journal {
    /// Goes on with the journal at `path` if it is of what is `asked` now, else begins it.
    fn open(path: &Path, asked: &str, seed: Option<u64>) -> Result<Journal, String> {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let mut lines = text.lines();
        let same = lines.next() == Some(asked);
        let old: Option<u64> = lines.next().and_then(|line| line.parse().ok()).filter(|_| same);
        let mut journal = Journal {
            path: path.to_owned(),
            seed: seed.or(old).unwrap_or_else(today),
            found: BTreeMap::new(),
        };
        if old == Some(journal.seed) {
            for line in lines {
                let mut words = line.splitn(3, ' ');
                let (Some(stage), Some(said), Some(name)) =
                    (words.next(), words.next(), words.next())
                else {
                    continue;
                };
                let known = Verdict::ALL.into_iter().find(|verdict| verdict.word() == said);
                let of = (stage.to_owned(), name.to_owned());
                journal.found.extend(known.map(|verdict| (of, verdict)));
            }
            println!("mutants: goes on after {} judgements", journal.found.len());
            return Ok(journal);
        }
        let head = format!("{asked}\n{}\n", journal.seed);
        std::fs::write(path, head).map_err(|why| format!("{}: {why}", path.display()))?;
        Ok(journal)
    }

    fn note(&mut self, stage: &str, verdict: Verdict, name: &str) -> Result<(), String> {
        let opened = std::fs::OpenOptions::new().append(true).open(&self.path);
        opened
            .and_then(|mut file| writeln!(file, "{stage} {} {name}", verdict.word()))
            .map_err(|why| format!("{}: {why}", self.path.display()))?;
        self.found.insert((stage.to_owned(), name.to_owned()), verdict);
        Ok(())
    }

    /// The next run begins anew; what this one found can still be read.
    fn finish(self) -> Result<(), String> {
        std::fs::rename(&self.path, self.path.with_extension("last"))
            .map_err(|why| format!("{}: {why}", self.path.display()))
    }
}

/// What a stage says of a mutant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    /// A test failed or hung.
    Noticed,
    Missed,
    /// It does not build.
    Unviable,
}

impl Verdict {
    const ALL: [Verdict; 3] = [Verdict::Noticed, Verdict::Missed, Verdict::Unviable];

    fn word(self) -> &'static str {
        match self {
            Verdict::Noticed => "noticed",
            Verdict::Missed => "missed",
            Verdict::Unviable => "unviable",
        }
    }
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

/// What a stage said of all mutants.
struct Judged {
    /// Mutants that no test noticed.
    missed: Vec<String>,
    /// Those that do not build.
    unviable: usize,
}

/// The tool, the copy of the project that it changes, and the globs of the files to change.
struct Trial<'a> {
    tool: PathBuf,
    tree: PathBuf,
    files: Vec<&'a str>,
}

impl Trial<'_> {
    /// `cargo mutants` in the copy, for the files.
    fn mutants(&self) -> Command {
        let mut command = Command::new(&self.tool);
        command.arg("mutants").current_dir(&self.tree).stdin(Stdio::null());
        // The copy has a build of its own.
        command.env_remove("CARGO_TARGET_DIR").env("CARGO_INCREMENTAL", "1");
        for file in &self.files {
            command.args(["--file", file]);
        }
        command
    }

    /// Names of all mutants.
    fn list(&self) -> Result<Vec<String>, String> {
        let mut command = self.mutants();
        command.args(["--list", "--json", "--package", "barewire-dataplane"]);
        let out = command.output().map_err(|why| format!("cargo-mutants does not start: {why}"))?;
        let all: Value = serde_json::from_slice(&out.stdout).map_err(|why| {
            format!("cargo-mutants lists nothing: {why}\n{}", String::from_utf8_lossy(&out.stderr))
        })?;
        let names = all.as_array().into_iter().flatten().filter_map(|one| one["name"].as_str());
        let names: Vec<String> = names.map(str::to_owned).collect();
        if names.is_empty() {
            return Err(format!("there is nothing to change in {}", self.files.join(" ")));
        }
        Ok(names)
    }

    /// Runs a stage on `names` of `all` mutants, without those that the journal knows. Tells the
    /// rate and the time left after each.
    fn stage(
        &self,
        (stage, how): (&str, &[&str]),
        (all, names): (&[String], &[String]),
        journal: &mut Journal,
    ) -> Result<Judged, String> {
        let key = |name: &String| (stage.to_owned(), name.clone());
        let open: Vec<&String> =
            names.iter().filter(|&one| !journal.found.contains_key(&key(one))).collect();
        let mut begun = None;
        for (n, &name) in open.iter().enumerate() {
            // The first also runs the tests without a change: they have to pass.
            let verdict = self.judge((stage, how), (all, name), n == 0)?;
            journal.note(stage, verdict, name)?;
            // The first builds everything: it is not of the rate.
            let begun = begun.get_or_insert_with(Instant::now);
            let each = begun.elapsed().as_secs_f64() / n.max(1) as f64;
            let left = open.len() - n - 1;
            let told = match n {
                0 => String::new(),
                _ => format!("; {each:.0} s each, {:.0} min left", each * left as f64 / 60.0),
            };
            println!("{stage} {} of {}: {}: {name}{told}", n + 1, open.len(), verdict.word());
        }
        let said = |one: &String| journal.found.get(&key(one)).copied();
        let missed = |one: &&String| said(one) == Some(Verdict::Missed);
        Ok(Judged {
            missed: names.iter().filter(missed).cloned().collect(),
            unviable: names.iter().filter(|&one| said(one) == Some(Verdict::Unviable)).count(),
        })
    }

    /// Runs a stage on the mutant `name` of `all`. (All others are told to be known from an earlier
    /// run. Asked for by name, the tool tries some besides that match none.)
    fn judge(
        &self,
        (stage, how): (&str, &[&str]),
        (all, name): (&[String], &String),
        baseline: bool,
    ) -> Result<Verdict, String> {
        let out = home().join(stage);
        // What an earlier one left is not what this one says.
        let _ = std::fs::remove_dir_all(&out);
        let told = out.join("mutants.out");
        let others: Vec<&str> = all.iter().filter(|&one| one != name).map(String::as_str).collect();
        std::fs::create_dir_all(&told)
            .and_then(|()| std::fs::write(told.join("previously_caught.txt"), others.join("\n")))
            .map_err(|why| format!("{}: {why}", told.display()))?;
        let mut command = self.mutants();
        command.arg("--output").arg(&out).args(["--iterate", "--in-place", "--timeout", LIMIT]);
        command.arg(if baseline { "--baseline=run" } else { "--baseline=skip" });
        let run = command.arg("--colors=never").args(how).output();
        let run = run.map_err(|why| format!("cargo-mutants does not start: {why}"))?;
        // 0: noticed, or does not build; 2: not noticed; 3: hangs.
        match run.status.code() {
            Some(0) => {
                let unviable = std::fs::read_to_string(told.join("unviable.txt"));
                let builds = unviable.unwrap_or_default().is_empty();
                Ok(if builds { Verdict::Noticed } else { Verdict::Unviable })
            }
            Some(2) => Ok(Verdict::Missed),
            Some(3) => Ok(Verdict::Noticed),
            _ => {
                eprint!("{}", String::from_utf8_lossy(&run.stdout));
                eprint!("{}", String::from_utf8_lossy(&run.stderr));
                Err(format!("{stage}: the tests fail without a change; see {}", out.display()))
            }
        }
    }
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

    #[test]
    fn an_interrupted_run_goes_on_and_another_one_begins() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let mut journal = Journal::open(&path, "10 of a", Some(7)).unwrap();
        journal.note("unit", Verdict::Missed, "a.rs:1:2: replace == with != in f").unwrap();
        let of = ("unit".to_owned(), "a.rs:1:2: replace == with != in f".to_owned());
        let same = Journal::open(&path, "10 of a", None).unwrap();
        assert_eq!((same.seed, same.found.get(&of)), (7, Some(&Verdict::Missed)));
        // Another seed, and other files, are another run.
        assert!(Journal::open(&path, "10 of a", Some(8)).unwrap().found.is_empty());
        assert!(Journal::open(&path, "10 of b", Some(8)).unwrap().found.is_empty());
        // One that is finished does not go on.
        Journal::open(&path, "10 of b", Some(8)).unwrap().finish().unwrap();
        assert!(!path.exists() && path.with_extension("last").exists());
    }
}
