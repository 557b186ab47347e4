//! `cargo xtask mutants`: mutation tests of the protocol.
//!
//! Mutates the code at random places (an inverted comparison, a removed call, a function that
//! returns at once) and checks whether a test fails: first the dataplane's own tests, then some
//! seeds of the simulator's `sim_quick`, then conformance. Mutants that survive are printed, to be
//! explained or given a test.
//!
//! All mutants are in one build of a copy of the project, each behind a switch (see [`changes`]).

mod changes;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use serde_json::Value;

use self::changes::Change;
use crate::{cargo, process, root, target_dir};

/// The crate that is mutated.
const CRATE: &str = "dataplane/src";

/// Files that are mutated by default.
const FILES: [&str; 2] = ["dataplane/src/rel", "dataplane/src/node"];

/// Share of the mutants that the tests have to detect, percent.
const BAR: usize = 90;

/// The test suites, in this order: each tests the mutants that survived the suites before it, if
/// any of its tests reaches them.
static STAGES: [Stage; 3] = [
    Stage {
        name: "unit",
        target: "barewire_dataplane",
        dir: "dataplane",
        // These tests take long and reach neither `rel` nor `node`.
        args: &["--skip=proto::coll", "--skip=ping::"],
        runs: 1,
        space: 16 << 30,
    },
    Stage {
        name: "sim",
        target: "sim",
        dir: "tests",
        args: &["sim_quick"],
        runs: 1,
        space: 16 << 30,
    },
    Stage {
        name: "conformance",
        target: "conformance",
        dir: "tests",
        args: &[],
        runs: 2,
        // Address space for domains with the largest tables.
        space: 64 << 30,
    },
];

/// Seeds of `sim_quick`, as in `SIM_SEED`.
const SEEDS: &str = "0..60";

/// How many mutants, and where.
#[derive(clap::Args)]
#[command(after_help = "\
The project is built once with all mutants; then each takes seconds: only tests that come to the
changed place are run. A mutant that a test hangs with is noticed. The changed copy and what was
found are in target/mutants. A run that was interrupted goes on where it was if the same is asked
for and no file of the project has changed since.

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
    /// Files and folders to change, in dataplane/src; may be given several times. Default:
    /// dataplane/src/rel and dataplane/src/node.
    #[arg(long, value_name = "PATH")]
    file: Vec<String>,
}

/// Tests the mutants; succeeds if the tests detected [`BAR`] percent of them.
///
/// # Errors
/// There is nothing to mutate, the project does not build, or the tests fail without mutants.
pub(crate) fn run(args: &MutantsArgs) -> Result<ExitCode, String> {
    let files: Vec<&str> = match args.file.as_slice() {
        [] => FILES.to_vec(),
        named => named.iter().map(String::as_str).collect(),
    };
    let project = project()?;
    let all = Source::all(&project, &files)?;
    let mut digest = DefaultHasher::new();
    project.hash(&mut digest);
    let key = format!("{} of {}, {:016x}", args.count, files.join(" "), digest.finish());
    let mut journal = Journal::open(&home().join("journal"), &key, args.seed)?;
    println!("mutants: {} of {}, seed {}", args.count, files.join(" "), journal.seed);
    let order = shuffled(all.iter().map(|source| source.changes.len()).sum(), journal.seed);
    let (drawn, programs) = build(project, &all, &order, args.count as usize)?;
    let judges =
        STAGES.iter().zip(programs).map(|(stage, program)| Judge::new(home(), stage, program));
    let judges: Vec<Judge> = judges.collect::<Result<_, _>>()?;

    let open = drawn.iter().filter(|n| !journal.found.contains_key(&name(&all, **n))).count();
    let (begun, mut done) = (Instant::now(), 0);
    for &n in &drawn {
        let name = name(&all, n);
        if journal.found.contains_key(&name) {
            continue;
        }
        let outcome = judge(n, &judges)?;
        journal.record(&outcome, &name)?;
        done += 1;
        let left =
            begun.elapsed().as_secs_f64() / f64::from(done) * (open as f64 - f64::from(done));
        println!("{done} of {open}: {outcome}: {name}; {:.0} min left", left / 60.0);
    }
    let missed = report(&drawn.iter().map(|&n| name(&all, n)).collect::<Vec<_>>(), &journal);
    journal.finish()?;
    let met = (drawn.len() - missed) * 100 >= drawn.len() * BAR;
    Ok(if met { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints how many mutants each suite detected, and the mutants that survived. Returns their
/// number.
fn report(names: &[String], journal: &Journal) -> usize {
    let by =
        |test: &str| names.iter().filter(|&name| journal.found[name].starts_with(test)).count();
    let mut left = names.len();
    for stage in &STAGES {
        let noticed = by(stage.name);
        println!("{}: {noticed} of {left} noticed", stage.name);
        left -= noticed;
    }
    println!("{} of {} noticed; bar {BAR} %", names.len() - left, names.len());
    for name in names.iter().filter(|&name| [MISSED, UNREACHED].contains(&&*journal.found[name])) {
        println!("{}: {name}", journal.found[name]);
    }
    left
}

/// Folder of the mutated copy, its build and the journal.
fn home() -> PathBuf {
    target_dir().join("mutants")
}

/// Files by their paths from the project's root.
type Files = BTreeMap<String, Vec<u8>>;

/// The project's files, without ignored ones.
fn project() -> Result<Files, String> {
    let mut git = Command::new("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let out = git.current_dir(root()).output().map_err(|why| format!("git: {why}"))?;
    if !out.status.success() {
        return Err(format!("git: {}", String::from_utf8_lossy(&out.stderr).trim_end()));
    }
    let names = String::from_utf8_lossy(&out.stdout).into_owned();
    let names = names.split_terminator('\0');
    // A file that is deleted without being staged is listed too.
    let read = |name: &str| Some((name.to_owned(), std::fs::read(root().join(name)).ok()?));
    Ok(names.filter_map(read).collect())
}

/// Makes `tree` contain exactly `files`, with their modes in the project; its build stays.
/// Unchanged files keep their times, so that they are not built again.
fn write_tree(tree: &Path, files: &Files) -> Result<(), String> {
    let mut stale = vec![tree.to_owned()];
    while let Some(dir) = stale.pop() {
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = path.strip_prefix(tree).unwrap_or(&path).to_string_lossy().into_owned();
            match path.is_dir() {
                true if name == "target" => {}
                true => stale.push(path),
                false if files.contains_key(&name) => {}
                false => std::fs::remove_file(&path).map_err(|why| format!("{name}: {why}"))?,
            }
        }
    }
    for (name, content) in files {
        let path = tree.join(name);
        if std::fs::read(&path).is_ok_and(|old| old == *content) {
            continue;
        }
        std::fs::create_dir_all(path.parent().unwrap_or(tree))
            .and_then(|()| std::fs::write(&path, content))
            .map_err(|why| format!("{}: {why}", path.display()))?;
        if let Ok(meta) = std::fs::metadata(root().join(name)) {
            let _ = std::fs::set_permissions(&path, meta.permissions());
        }
    }
    Ok(())
}

/// The results so far: a line with the parameters of the run, one with the seed, then a line `WHO:
/// NAME` per mutant.
struct Journal {
    path: PathBuf,
    seed: u64,
    /// By the mutant's name, the test that detected it, or [`MISSED`] or [`UNREACHED`].
    found: BTreeMap<String, String>,
}

/// Result of a mutant that survived.
const MISSED: &str = "not noticed";

/// Result of a mutant that no test reaches.
const UNREACHED: &str = "no test comes there";

impl Journal {
    /// Resumes the journal at `path` if its parameters are `key`, else starts a new one.
    fn open(path: &Path, key: &str, seed: Option<u64>) -> Result<Journal, String> {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let mut lines = text.lines();
        let same = lines.next() == Some(key);
        let old: Option<u64> = lines.next().and_then(|line| line.parse().ok()).filter(|_| same);
        let mut journal = Journal {
            path: path.to_owned(),
            seed: seed.or(old).unwrap_or_else(today),
            found: BTreeMap::new(),
        };
        if old == Some(journal.seed) {
            let found = lines.filter_map(|line| line.split_once(": "));
            journal.found.extend(found.map(|(test, name)| (name.to_owned(), test.to_owned())));
            println!("mutants: goes on after {}", journal.found.len());
            return Ok(journal);
        }
        let head = format!("{key}\n{}\n", journal.seed);
        std::fs::create_dir_all(path.parent().unwrap_or(path))
            .and_then(|()| std::fs::write(path, head))
            .map_err(|why| format!("{}: {why}", path.display()))?;
        Ok(journal)
    }

    fn record(&mut self, test: &str, name: &str) -> Result<(), String> {
        let opened = std::fs::OpenOptions::new().append(true).open(&self.path);
        opened
            .and_then(|mut file| writeln!(file, "{test}: {name}"))
            .map_err(|why| format!("{}: {why}", self.path.display()))?;
        self.found.insert(name.to_owned(), test.to_owned());
        Ok(())
    }

    /// Ends the journal: the next run starts a new one; this one stays readable.
    fn finish(self) -> Result<(), String> {
        std::fs::rename(&self.path, self.path.with_extension("last"))
            .map_err(|why| format!("{}: {why}", self.path.display()))
    }
}

/// Days since 1970: a seed for each night.
fn today() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| since.as_secs() / 86_400)
}

/// The numbers below `count`, shuffled by `seed`.
fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut state = seed;
    let mut next = || {
        // SplitMix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    };
    let mut all: Vec<usize> = (0..count).collect();
    for i in 0..count {
        let j = i + (next() % (count - i) as u64) as usize;
        all.swap(i, j);
    }
    all
}

/// A source file and its possible mutations.
struct Source {
    /// Path from the project's root.
    name: String,
    text: String,
    changes: Vec<Change>,
    /// Number of its first mutation; numbers count through all files.
    first: usize,
}

impl Source {
    /// The source files of `project` in the files or folders `named`, without test files.
    fn all(project: &Files, named: &[&str]) -> Result<Vec<Source>, String> {
        if let Some(name) = named.iter().find(|name| !Path::new(name).starts_with(CRATE)) {
            return Err(format!("{name} is not in {CRATE}"));
        }
        let (mut all, mut first) = (Vec::new(), 0);
        for (name, content) in project {
            let path = Path::new(name);
            let of_tests = path.iter().any(|part| part == "tests" || part == "tests.rs");
            let is_source = path.extension().is_some_and(|ext| ext == "rs") && !of_tests;
            if !is_source || !named.iter().any(|named| path.starts_with(named)) {
                continue;
            }
            let text = String::from_utf8_lossy(content).into_owned();
            let changes = changes::of(&text).map_err(|why| format!("{name}: {why}"))?;
            let count = changes.len();
            all.push(Source { name: name.clone(), text, changes, first });
            first += count;
        }
        match first {
            0 => Err(format!("there is nothing to change in {}", named.join(" "))),
            _ => Ok(all),
        }
    }
}

/// File, place and change of mutant `n` of `all`.
fn name(all: &[Source], n: usize) -> String {
    let source = &all[all.partition_point(|source| source.first <= n) - 1];
    format!("{}:{}", source.name, source.changes[n - source.first].label)
}

/// Builds the test programs with the first `count` mutants of `order` that compile. Returns these
/// mutants, and the programs by [`STAGES`].
fn build(
    mut project: Files,
    all: &[Source],
    order: &[usize],
    count: usize,
) -> Result<(Vec<usize>, Vec<PathBuf>), String> {
    let lib = project.get_mut(&format!("{CRATE}/lib.rs")).ok_or("the crate has no lib.rs")?;
    // The lints of the project are not for mutants.
    let mut text = b"#![allow(warnings, arithmetic_overflow, unconditional_panic)]\n".to_vec();
    text.append(lib);
    text.extend_from_slice(b"\npub mod mutant;\n");
    *lib = text;
    project.insert(format!("{CRATE}/mutant.rs"), changes::SWITCH.into());
    let tree = home().join("tree");
    let mut unfit = BTreeSet::new();
    loop {
        let fit = order.iter().copied().filter(|n| !unfit.contains(n));
        let drawn: Vec<usize> = fit.take(count).collect();
        let sorted: BTreeSet<usize> = drawn.iter().copied().collect();
        let mut places: BTreeMap<String, Vec<(usize, Range<usize>)>> = BTreeMap::new();
        for source in all {
            let mine = sorted.range(source.first..source.first + source.changes.len());
            let mine: Vec<_> = mine.map(|&n| (n, &source.changes[n - source.first])).collect();
            let (text, ranges) = changes::switched(&source.text, &mine);
            project.insert(source.name.clone(), text.into());
            places.insert(source.name.clone(), ranges);
        }
        write_tree(&tree, &project)?;
        println!("mutants: building {} at once", drawn.len());
        match compile(&tree)? {
            Ok(programs) => return Ok((drawn, programs)),
            Err(errors) => {
                let before = unfit.len();
                unfit.extend(errors.iter().filter_map(|error| {
                    let around = places.get(&error.file)?.iter().filter(|(_, place)| {
                        place.start <= error.at.start && error.at.end <= place.end
                    });
                    around.min_by_key(|(_, place)| place.len()).map(|&(n, _)| n)
                }));
                if unfit.len() == before {
                    errors.iter().for_each(|error| eprint!("{}", error.message));
                    return Err("the copy does not build, and no mutant is why".to_owned());
                }
                println!("mutants: {} do not build and are replaced", unfit.len() - before);
            }
        }
    }
}

/// A compiler error.
struct CompileError {
    /// Path of the file; empty if the error has no location.
    file: String,
    /// Byte range in the file.
    at: Range<usize>,
    /// The message.
    message: String,
}

/// Compiles the test programs of `tree`: returns the programs by [`STAGES`], or the errors.
fn compile(tree: &Path) -> Result<Result<Vec<PathBuf>, Vec<CompileError>>, String> {
    let mut command = Command::new(cargo());
    command.args(["test", "--no-run", "--quiet", "--message-format=json", "--lib"]);
    command.args(["--package=barewire-dataplane", "--package=barewire-tests"]);
    command.args(["--test=sim", "--test=conformance"]).current_dir(tree).stdin(Stdio::null());
    // The copy has its own build folder, most of which the next build reuses.
    command.env_remove("CARGO_TARGET_DIR").env("CARGO_INCREMENTAL", "1");
    command.env("CARGO_PROFILE_TEST_OPT_LEVEL", "1").stderr(Stdio::null());
    let run = command.output().map_err(|why| format!("cargo does not start: {why}"))?;
    let output = String::from_utf8_lossy(&run.stdout);
    let messages = || output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    if run.status.success() {
        let program = |stage: &Stage| {
            let mut all = messages().filter(|one| one["target"]["name"] == stage.target);
            all.find_map(|one| one["executable"].as_str().map(PathBuf::from))
        };
        let programs: Option<Vec<PathBuf>> = STAGES.iter().map(program).collect();
        return Ok(Ok(programs.ok_or("cargo names no test programs")?));
    }
    let errors = messages().map(|one| one["message"].clone()).filter(|one| one["level"] == "error");
    let error_of = |message: Value| {
        let mut spans = message["spans"].as_array().into_iter().flatten();
        let span = spans.find(|span| span["is_primary"] == true).unwrap_or(&Value::Null);
        let byte = |key: &str| span[key].as_u64().unwrap_or(0) as usize;
        CompileError {
            file: span["file_name"].as_str().unwrap_or_default().to_owned(),
            at: byte("byte_start")..byte("byte_end"),
            message: message["rendered"].as_str().unwrap_or_default().to_owned(),
        }
    };
    Ok(Err(errors.map(error_of).collect()))
}

/// A test suite that tests mutants.
struct Stage {
    name: &'static str,
    /// Cargo's name of the target.
    target: &'static str,
    /// Working directory.
    dir: &'static str,
    args: &'static [&'static str],
    /// Failures in a row that count as detection: more than one for suites that run in real time.
    runs: u32,
    /// Limit of address space, bytes: a mutant whose memory grows without bound fails.
    space: u64,
}

/// A suite with its program, and the reference run without a mutant.
struct Judge {
    stage: &'static Stage,
    program: PathBuf,
    /// See [`home`].
    home: PathBuf,
    /// Time limit of a run with a mutant.
    limit: Duration,
    /// Threads that reach the mutation with this number: names of tests, or of other threads.
    reached: BTreeMap<usize, BTreeSet<String>>,
    tests: BTreeSet<String>,
}

impl Judge {
    /// Runs the suite without a mutant.
    fn new(home: PathBuf, stage: &'static Stage, program: PathBuf) -> Result<Judge, String> {
        let (reached, tests) = (BTreeMap::new(), BTreeSet::new());
        let limit = Duration::from_secs(900);
        let mut judge = Judge { stage, program, home, limit, reached, tests };
        let mut command = judge.command(&["--list"]);
        let listed = command.output().map_err(|why| format!("{}: {why}", stage.name))?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        judge.tests = listed
            .lines()
            .filter_map(|line| line.strip_suffix(": test"))
            .map(str::to_owned)
            .collect();
        let file = judge.home.join("reached");
        let _ = std::fs::remove_file(&file);
        let begun = Instant::now();
        if let Some(test) = judge.run(judge.command(stage.args).env(changes::REACHED, &file))? {
            return Err(format!("without a change: {test} fails; see {}", judge.home.display()));
        }
        println!("{}: {:.0} s", stage.name, begun.elapsed().as_secs_f64());
        // Other programs may need the processors too.
        judge.limit = begun.elapsed() * 4 + Duration::from_secs(20);
        for line in std::fs::read_to_string(&file).unwrap_or_default().lines() {
            if let Some((n, thread)) = line.split_once(' ')
                && let Ok(n) = n.parse()
            {
                judge.reached.entry(n).or_default().insert(thread.to_owned());
            }
        }
        Ok(judge)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(args).current_dir(self.home.join("tree").join(self.stage.dir));
        command.env("SIM_SEED", SEEDS).env("RUST_BACKTRACE", "0");
        command.env("PROPTEST_MAX_SHRINK_ITERS", "0");
        command.env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "1");
        command
    }

    /// Runs the tests that reach mutant `n` until one fails. Returns that test, if any.
    fn detecting_test(&self, n: usize) -> Result<Option<String>, String> {
        let Some(threads) = self.reached.get(&n) else { return Ok(None) };
        let mut args = vec!["--exact"];
        args.extend(threads.iter().map(String::as_str));
        // Other threads may belong to any test.
        let of_tests = threads.is_subset(&self.tests);
        self.run(
            self.command(if of_tests { &args } else { self.stage.args })
                .env(changes::VARIABLE, n.to_string()),
        )
    }

    /// Runs `command` until a test fails, as often as configured. Returns that test, if any.
    fn run(&self, command: &mut Command) -> Result<Option<String>, String> {
        let mut test = None;
        for _ in 0..self.stage.runs {
            test = self.run_once(command)?;
            if test.is_none() {
                break;
            }
        }
        Ok(test)
    }

    fn run_once(&self, command: &mut Command) -> Result<Option<String>, String> {
        let log = self.home.join(format!("{}.log", self.stage.name));
        let _ = std::fs::remove_file(&log);
        // Child processes inherit the limit.
        setrlimit(Resource::RLIMIT_AS, self.stage.space, RLIM_INFINITY)
            .map_err(|why| format!("setrlimit: {why}"))?;
        let ended =
            process::run_until(command, &log, self.limit, |output| failed(output).is_some())
                .map_err(|why| format!("{}: {why}", self.program.display()))?;
        let test = match failed(&ended.output) {
            Some(test) => test,
            None if ended.timed_out => "hangs",
            None if !ended.ok => "dies",
            None => return Ok(None),
        };
        Ok(Some(format!("{} ({test})", self.stage.name)))
    }
}

/// The first failed test in the output of a test program.
fn failed(output: &str) -> Option<&str> {
    let mut lines = output.lines().filter_map(|line| line.strip_prefix("test "));
    lines.find_map(|line| line.strip_suffix(" ... FAILED"))
}

/// Result of mutant `n`: suite and test, or [`MISSED`] or [`UNREACHED`].
fn judge(n: usize, judges: &[Judge]) -> Result<String, String> {
    for judge in judges {
        if let Some(test) = judge.detecting_test(n)? {
            return Ok(test);
        }
    }
    let is_reached = judges.iter().any(|judge| judge.reached.contains_key(&n));
    Ok(if is_reached { MISSED } else { UNREACHED }.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_draws_the_same_and_another_something_else() {
        let drawn = shuffled(1000, 7);
        assert_eq!(drawn, shuffled(1000, 7));
        assert_ne!(drawn, shuffled(1000, 8));
        assert_eq!(drawn.iter().collect::<BTreeSet<_>>().len(), 1000, "each once");
    }

    #[test]
    fn a_mutant_is_named_by_file_place_and_change() {
        let project: Files = [
            ("dataplane/src/rel/a.rs", "fn f(a: u8) { g(a); }"),
            ("dataplane/src/rel/b/c.rs", "fn h(a: u8) -> u8 {\n    a + 1\n}"),
            ("dataplane/src/rel/tests.rs", "fn t() { g(1); }"),
            ("dataplane/src/rel/b/tests/d.rs", "fn t() { g(1); }"),
            ("dataplane/src/relative.rs", "fn t() { g(1); }"),
        ]
        .map(|(name, text)| (name.to_owned(), text.into()))
        .into();
        let all = Source::all(&project, &["dataplane/src/rel"]).unwrap();
        let names: Vec<String> = (0..3).map(|n| name(&all, n)).collect();
        assert_eq!(
            names,
            [
                "dataplane/src/rel/a.rs:1:14: return in f",
                "dataplane/src/rel/a.rs:1:15: delete g(a); in f",
                "dataplane/src/rel/b/c.rs:2:5: replace + with - in h",
            ]
        );
        assert_eq!(all.iter().map(|source| source.changes.len()).sum::<usize>(), 3);
        assert!(Source::all(&project, &["driver/src"]).is_err());
        assert!(Source::all(&project, &["dataplane/src/rel/none.rs"]).is_err());
    }

    /// Goal: a mutant is judged by the tests that come to it, by all if another thread does, and by
    /// none if nobody does. Method: a script for a test program, which notes how it is called.
    #[test]
    fn only_tests_that_come_to_a_mutant_judge_it() {
        use std::os::unix::fs::PermissionsExt;
        static STAGE: Stage = Stage {
            name: "unit",
            target: "x",
            dir: "d",
            args: &["--skip=x"],
            runs: 2,
            space: 1 << 34,
        };
        let home = tempfile::tempdir().unwrap().keep();
        std::fs::create_dir_all(home.join("tree/d")).unwrap();
        let script = "#!/bin/sh\n\
            case $1 in --list) printf 'a::b: test\\nc: test\\n'; exit;; esac\n\
            echo \"$*\" >> called\n\
            to=$BAREWIRE_REACHED\n\
            [ -z \"$to\" ] || printf '1 a::b\\n2 c\\n2 other\\n' > \"$to\"\n\
            [ \"$BAREWIRE_MUTANT\" != 1 ] || { echo 'test a::b ... FAILED'; exec sleep 600; }\n";
        let program = home.join("program");
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let judge = Judge::new(home.clone(), &STAGE, program).unwrap();
        assert_eq!(judge.detecting_test(1), Ok(Some("unit (a::b)".to_owned())));
        assert_eq!((judge.detecting_test(2), judge.detecting_test(3)), (Ok(None), Ok(None)));
        let called = std::fs::read_to_string(home.join("tree/d/called")).unwrap();
        assert_eq!(called, "--skip=x\n--exact a::b\n--exact a::b\n--skip=x\n");
        let judges = [judge];
        assert_eq!(super::judge(2, &judges), Ok(MISSED.to_owned()));
        assert_eq!(super::judge(3, &judges), Ok(UNREACHED.to_owned()));
        std::fs::remove_dir_all(home).unwrap();
    }

    #[test]
    fn the_first_test_that_fails_is_named() {
        let output = "running 3 tests\ntest a::b ... ok\ntest a::c ... FAILED\ntest d ... FAILED\n";
        assert_eq!(failed(output), Some("a::c"));
        assert_eq!(failed("running 1 test\ntest a ... ok\n"), None);
    }

    #[test]
    fn an_interrupted_run_goes_on_and_another_one_begins() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let mut journal = Journal::open(&path, "10 of a", Some(7)).unwrap();
        journal.record("unit (a::b)", "a.rs:1:2: replace == with != in f").unwrap();
        let same = Journal::open(&path, "10 of a", None).unwrap();
        assert_eq!((same.seed, &same.found), (7, &journal.found));
        // Another seed, and other files, are another run.
        assert!(Journal::open(&path, "10 of a", Some(8)).unwrap().found.is_empty());
        assert!(Journal::open(&path, "10 of b", Some(8)).unwrap().found.is_empty());
        // One that is finished does not go on.
        Journal::open(&path, "10 of b", Some(8)).unwrap().finish().unwrap();
        assert!(!path.exists() && path.with_extension("last").exists());
    }
}
