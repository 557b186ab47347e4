//! `cargo xtask test`: runs the test suites in order and prints a line for each.

use std::cell::Cell;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use crate::packages::{self, Tool};
use crate::process::{self, ProcessOutput};
use crate::report::{Counts, read_tests, unfinished};
use crate::vm::{NotHere, guest, hosts, mpi, suite};
use crate::{bench, cargo, dist, root, target_dir, vm};

/// Every suite builds with `--workspace` and names its targets: Cargo's selection decides on the
/// features of third-party crates, and other features would recompile everything above them.
const ALL: &[&str] = &["--workspace"];

/// [`ALL`] for test programs that wait more than they compute: in a profile that compiles in two
/// thirds of the simulator's time.
const ALL_WAITING: &[&str] =
    &["--workspace", "--config=profile.test.package.barewire-tests.opt-level=1"];

/// [`ALL`] with the feature `dpdk`: its tests, and the command, which keeps the features of
/// third-party crates the same. The workspace's crates are compiled for these tests only, which
/// compute little.
pub(crate) const ALL_WITH_DPDK: &[&str] = &[
    "--config=profile.test.opt-level=1",
    "--package=barewire-driver",
    "--package=barewire-dpdk-sys",
    "--package=barewire-tests",
    "--package=barewire-benches",
    "--package=barewire-cli",
    "--features=dpdk",
];

/// Suites to run and how long a size to take.
#[derive(clap::Args)]
#[command(after_help = "\
Each suite writes what it said to target/xtask/SUITE.log; a failed one shows it as well.
The last line is `N passed, N failed, N skipped`, and the exit code is 0 if nothing failed.

A test that cannot run here prints a line that starts with `SKIPPED: ` and returns. With CI=true
in the environment a skipped test counts as failed.

Up to three failures of a suite that starts processes are tried once more, alone: a busy machine
may have let a process wait for longer than a test does. What passes then is named in a line that
starts with `FLAKY: `. Not with --nightly.

Examples:
  cargo xtask test                  everything
  cargo xtask test sim e2e          two suites
  SIM_SEED=17 cargo xtask test sim  one seed of the simulator, as a failure prints it
  cargo xtask test --nightly sim    the long sizes")]
pub(crate) struct TestArgs {
    /// Suites to run, all of them if none is named.
    #[arg(value_enum)]
    suites: Vec<Suite>,
    /// Takes the sizes that need hours: sets BAREWIRE_NIGHTLY=1 for the tests.
    #[arg(long)]
    nightly: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Suite {
    /// rustfmt changes nothing.
    Fmt,
    /// Clippy has no warning in any target.
    Clippy,
    /// The sources keep the direction of dependencies and the rules of docs/style.md.
    Tidy,
    /// Tests and examples inside every crate.
    Unit,
    /// Whole nodes in virtual time over a seeded network.
    Sim,
    /// Real processes over real ports, and whatever else `tests/Cargo.toml` has.
    E2e,
    /// The ports `afpacket` and `udp` between network namespaces.
    Wires,
    /// Man pages of libfabric, clause by clause.
    Conformance,
    /// The provider under libfabric's own programs, C programs of ours, Open MPI and MPICH.
    Provider,
    /// Every fuzz target over its corpus, and its body as a property test.
    Fuzz,
    /// The documentation builds without a warning.
    Doc,
    /// shellcheck is content with every script.
    Shellcheck,
    /// What the feature `dpdk` adds, over the devices that DPDK has without hardware.
    Dpdk,
    /// NICs of our own in a virtual machine with an IOMMU.
    Vfio,
    /// Every bench runs once in its smallest size and prints what it promises.
    Benches,
}

impl Suite {
    /// In the order in which they run: quick ones first.
    const ALL: [Self; 15] = [
        Self::Fmt,
        Self::Clippy,
        Self::Tidy,
        Self::Unit,
        Self::Sim,
        Self::E2e,
        Self::Wires,
        Self::Conformance,
        Self::Provider,
        Self::Fuzz,
        Self::Doc,
        Self::Shellcheck,
        Self::Dpdk,
        Self::Vfio,
        Self::Benches,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Fmt => "fmt",
            Self::Clippy => "clippy",
            Self::Tidy => "tidy",
            Self::Unit => "unit",
            Self::Sim => "sim",
            Self::E2e => "e2e",
            Self::Wires => "wires",
            Self::Conformance => "conformance",
            Self::Provider => "provider",
            Self::Fuzz => "fuzz",
            Self::Doc => "doc",
            Self::Shellcheck => "shellcheck",
            Self::Dpdk => "dpdk",
            Self::Vfio => "vfio",
            Self::Benches => "benches",
        }
    }

    fn tools(self) -> &'static [Tool] {
        match self {
            Self::Unit => &[
                packages::TSHARK,
                packages::LIBFABRIC,
                packages::IP,
                packages::VALGRIND,
                packages::CRYPTOGRAPHY,
                packages::OPENSSL,
            ],
            Self::Wires => &[packages::TSHARK, packages::IP, packages::NFT],
            Self::Sim => &[packages::CC],
            Self::E2e => &[packages::TSHARK, packages::CC],
            Self::Conformance => &[packages::LIBFABRIC],
            Self::Provider => &[
                packages::CC,
                packages::LIBFABRIC,
                packages::FI_INFO,
                packages::MPIRUN,
                packages::MPICC,
                packages::VENV,
                packages::IP,
                packages::SHLIBDEPS,
                packages::RPMBUILD,
                packages::BINUTILS,
            ],
            Self::Shellcheck => &[packages::SHELLCHECK],
            Self::Dpdk => &[
                packages::CC,
                packages::MPIRUN,
                packages::MPICC,
                packages::VENV,
                packages::DPDK,
                packages::LIBCLANG,
                packages::PKG_CONFIG,
                packages::IP,
                packages::VALGRIND,
                crate::vm::QEMU,
            ],
            Self::Vfio => &[
                crate::vm::QEMU,
                packages::XZ,
                packages::TESTPMD,
                packages::LIBFABRIC,
                packages::FI_INFO,
                packages::MPIRUN,
                packages::MPICC,
            ],
            Self::Benches => &[
                packages::VALGRIND,
                packages::STRACE,
                packages::IP,
                packages::FI_INFO,
                // For the benchmark `vfio`, which compares with DPDK in a guest.
                crate::vm::QEMU,
                packages::TESTPMD,
                packages::DPDK,
                packages::LIBCLANG,
                packages::PKG_CONFIG,
            ],
            _ => &[],
        }
    }

    /// Whether its tests start processes, which a busy machine may delay for seconds.
    fn has_processes(self) -> bool {
        match self {
            Self::Unit
            | Self::E2e
            | Self::Wires
            | Self::Provider
            | Self::Dpdk
            | Self::Vfio
            | Self::Benches => true,
            Self::Fmt
            | Self::Clippy
            | Self::Tidy
            | Self::Sim
            | Self::Conformance
            | Self::Fuzz
            | Self::Doc
            | Self::Shellcheck => false,
        }
    }

    /// Whether it computes all the time, or builds in the profile of such suites.
    fn computes(self) -> bool {
        matches!(self, Self::Sim | Self::Tidy)
    }

    /// Whether its tests mostly wait: for deaths, restarts and links. The tests share no name, port
    /// or interface.
    fn waits(self) -> bool {
        matches!(self, Self::Wires | Self::Provider)
    }

    /// Time limit, far above the usual duration: reaching it means a hang.
    fn limit(self, nightly: bool) -> Duration {
        Duration::from_secs(if nightly { 6 * 3600 } else { 900 })
    }
}

/// Runs the suites and prints the counts.
///
/// # Errors
/// A suite cannot even be started.
pub(crate) fn run(args: &TestArgs) -> Result<ExitCode, String> {
    let suites = if args.suites.is_empty() { Suite::ALL.to_vec() } else { args.suites.clone() };
    let ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
    let tools: Vec<Tool> = suites.iter().flat_map(|suite| suite.tools()).copied().collect();
    packages::provide(&tools);
    let started = Instant::now();
    let mut total = Counts::default();
    for suite in suites {
        total += run_suite(suite, args.nightly, ci)?;
    }
    println!("in {:.1} s", started.elapsed().as_secs_f64());
    println!("{total}");
    Ok(if total.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Result of one suite.
#[derive(Default)]
struct Outcome {
    counts: Counts,
    /// Reasons of the skipped tests, for the reader.
    skips: Vec<String>,
    /// Tests that failed and then passed when repeated.
    second_tries: Vec<String>,
    /// Output to print after a failure.
    output: String,
}

impl Outcome {
    /// Result of a suite that is one check.
    fn single(ok: bool, output: String) -> Self {
        let counts = Counts { passed: u64::from(ok), failed: u64::from(!ok), skipped: 0 };
        Self { counts, output, ..Self::default() }
    }

    fn skipped(why: String) -> Self {
        let counts = Counts { skipped: 1, ..Counts::default() };
        Self { counts, skips: vec![why], ..Self::default() }
    }

    /// Adds the result of another run of the suite.
    fn add(&mut self, other: Self) {
        self.counts += other.counts;
        self.skips.extend(other.skips);
        self.second_tries.extend(other.second_tries);
        self.output.push_str(&other.output);
    }

    /// Whether failed tests are repeated once: they may have starved among other processes. Not for
    /// suites that depend on nothing else, and not `nightly`, when rare failures are wanted.
    fn is_retried(&self, suite: Suite, nightly: bool) -> bool {
        suite.has_processes() && !nightly && (1..=SECOND_TRIES).contains(&self.counts.failed)
    }
}

/// Most failures that are repeated; more are no accident.
const SECOND_TRIES: u64 = 3;

/// The result of `run`, or of a second run if the first one failed. `what` names it.
fn with_second_try(
    (suite, nightly): (Suite, bool),
    what: &str,
    run: impl Fn() -> Outcome,
) -> Outcome {
    let first = run();
    if !first.is_retried(suite, nightly) {
        return first;
    }
    let mut second = run();
    if second.counts.failed > 0 || second.counts.passed == 0 {
        return first;
    }
    second.second_tries.push(what.to_owned());
    second
}

fn run_suite(suite: Suite, nightly: bool, ci: bool) -> Result<Counts, String> {
    print!("{:<12}", suite.name());
    // Nothing else is printed for minutes, and the user wants to see which suite runs.
    let _ = std::io::stdout().flush();
    let started = Instant::now();
    // The log of the last run; it may not exist.
    let _ = std::fs::remove_file(log_of(&target_dir(), suite));
    let mut outcome = match suite {
        Suite::Fmt => check(suite, nightly, &["fmt", "--all", "--check"], &[])?,
        Suite::Clippy => {
            let lint = |what: &[&str]| {
                let args = [&["clippy", "--all-targets"], what, &["--", "-D", "warnings"]].concat();
                check(suite, nightly, &args, &[])
            };
            let mut outcome = lint(&["--workspace"])?;
            // The simulator's planted bugs.
            outcome.add(lint(&["--package", "barewire-dataplane", "--features", "plant"])?);
            outcome
        }
        Suite::Doc => {
            let args = ["doc", "--workspace", "--no-deps", "--document-private-items"];
            check(suite, nightly, &args, &[("RUSTDOCFLAGS", "-D warnings")])?
        }
        Suite::Unit => unit(suite, nightly)?,
        Suite::Tidy => integration(suite, nightly, "tests/tidy.rs")?,
        Suite::E2e => e2e(suite, nightly)?,
        Suite::Wires => wires(suite, nightly)?,
        Suite::Sim => sim(suite, nightly)?,
        Suite::Conformance => integration(suite, nightly, "tests/conformance/main.rs")?,
        Suite::Provider => provider(suite, nightly)?,
        Suite::Fuzz => fuzz(suite, nightly)?,
        Suite::Shellcheck => shellcheck(suite)?,
        Suite::Dpdk => dpdk(suite, nightly)?,
        Suite::Vfio => vfio(suite, nightly)?,
        Suite::Benches => benches(suite, nightly)?,
    };
    if ci {
        outcome.counts.failed += std::mem::take(&mut outcome.counts.skipped);
    }
    let seconds = started.elapsed().as_secs_f64();
    let verdict = if outcome.counts.failed == 0 { "ok" } else { "FAILED" };
    println!("{verdict:<7} {seconds:>7.1} s   {}", outcome.counts);
    if outcome.counts.failed > 0 {
        println!("{}", outcome.output.trim_end());
    }
    for skip in &outcome.skips {
        println!("    SKIPPED: {skip}");
    }
    for what in &outcome.second_tries {
        println!("    FLAKY: {what} failed, and passed when it was tried again");
    }
    Ok(outcome.counts)
}

/// Runs `cargo ARGS`, which is one check.
fn check(
    suite: Suite,
    nightly: bool,
    args: &[&str],
    env: &[(&str, &str)],
) -> Result<Outcome, String> {
    let mut command = Command::new(cargo());
    command.args(args).envs(env.iter().copied());
    let ended = start(suite, nightly, &mut command)?;
    let missing = ["is not installed for the toolchain", "no such command: `"];
    if !ended.ok && missing.iter().any(|words| ended.output.contains(words)) {
        let component = if suite == Suite::Fmt { "rustfmt" } else { "clippy" };
        let hint = format!("cargo {0} is not here: rustup component add {component}", args[0]);
        return Ok(Outcome::skipped(hint));
    }
    Ok(Outcome::single(ended.ok, ended.output))
}

/// Runs `cargo test ARGS`.
fn cargo_test(suite: Suite, nightly: bool, args: &[&str]) -> Result<Outcome, String> {
    cargo_test_with(suite, nightly, args, &[])
}

/// Runs the tests inside the crates, without the suites, which have their own lines. Of the
/// benchmarks only the library: their programs have no tests, and would each be compiled for
/// nothing.
fn unit(suite: Suite, nightly: bool) -> Result<Outcome, String> {
    let inside = ["barewire-tests", "barewire-fuzz", "barewire-benches"];
    let inside = inside.map(|package| ["--exclude", package]).concat();
    let mut outcome = cargo_test(suite, nightly, &[ALL, &inside].concat())?;
    // The command has no library; with `--workspace --lib` features would differ.
    let packages = ["barewire-tests", "barewire-fuzz", "barewire-benches", "barewire-cli"];
    let packages = packages.map(|package| ["--package", package]).concat();
    outcome.add(cargo_test(suite, nightly, &[&packages[..], &["--lib"]].concat())?);
    if nightly {
        outcome.add(hostile_under_valgrind(suite, &[ALL, &inside].concat())?);
    }
    Ok(outcome)
}

/// The driver's test of a hostile user behind a switch.
const HOSTILE: &str = "a_hostile_process_harms_no_other_user";

/// Runs [`HOSTILE`] under valgrind, in a small size: one check. `selected` is the package selection
/// of the previous build.
fn hostile_under_valgrind(suite: Suite, selected: &[&str]) -> Result<Outcome, String> {
    if !packages::in_path(packages::VALGRIND.program) {
        let hint = "a hostile user under valgrind: sudo apt-get install -y valgrind";
        return Ok(Outcome::skipped(hint.to_owned()));
    }
    let mut build = Command::new(cargo());
    build.arg("test").args(selected).args(["--lib", "--no-run"]);
    build.args(["--message-format", "json-render-diagnostics"]);
    let built = start(suite, true, &mut build)?;
    let Some(program) = lib_test(&built.output, "barewire_driver").filter(|_| built.ok) else {
        return Ok(Outcome::single(false, "the driver's tests were not built".to_owned()));
    };
    let mut command = Command::new(packages::VALGRIND.program);
    command.args(["--error-exitcode=9", &program, HOSTILE]).env("BAREWIRE_ROUNDS", "4");
    let ended = start(suite, true, &mut command)?;
    let ran = read_tests(&ended.output).counts;
    let ok = ended.ok && ran.passed > 0 && ran.failed == 0;
    Ok(Outcome::single(ok, format!("a hostile user under valgrind:\n{}", ended.output)))
}

/// The test program of the library `name` in Cargo's JSON output.
fn lib_test(output: &str, name: &str) -> Option<String> {
    output.lines().find_map(|line| {
        let object: serde_json::Value = serde_json::from_str(line).ok()?;
        let is_it =
            object.pointer("/target/name")? == name && object.pointer("/profile/test")? == true;
        is_it.then(|| object.get("executable")?.as_str().map(str::to_owned)).flatten()
    })
}

/// Runs every file of `fuzz/tests`.
fn fuzz(suite: Suite, nightly: bool) -> Result<Outcome, String> {
    let dir = root().join("fuzz/tests");
    let files = std::fs::read_dir(&dir).map_err(|why| format!("{}: {why}", dir.display()))?;
    let stem = |path: std::path::PathBuf| path.file_stem()?.to_str().map(str::to_owned);
    let names: Vec<String> = files.flatten().filter_map(|file| stem(file.path())).collect();
    let tests: Vec<&str> = names.iter().flat_map(|name| ["--test", name]).collect();
    cargo_test(suite, nightly, &[ALL, &tests].concat())
}

/// Runs `cargo test ARGS` with environment variables.
fn cargo_test_with(
    suite: Suite,
    nightly: bool,
    args: &[&str],
    env: &[(&str, &str)],
) -> Result<Outcome, String> {
    let (mut outcome, failed) = cargo_test_once(suite, nightly, args, env)?;
    if outcome.is_retried(suite, nightly) && failed.len() as u64 == outcome.counts.failed {
        let names: Vec<&str> = failed.iter().map(String::as_str).collect();
        let only = [&["--", "--exact"], &names[..]].concat();
        let only = if args.contains(&"--") { &only[1..] } else { &only[..] };
        let (second, _) = cargo_test_once(suite, nightly, &[args, only].concat(), env)?;
        if second.counts == (Counts { passed: outcome.counts.failed, ..Counts::default() }) {
            outcome.counts.passed += std::mem::take(&mut outcome.counts.failed);
            outcome.output.clear();
            outcome.second_tries = failed;
        }
    }
    Ok(outcome)
}

/// Runs `cargo test ARGS` once. Also returns the failed tests, if their program printed them.
fn cargo_test_once(
    suite: Suite,
    nightly: bool,
    args: &[&str],
    env: &[(&str, &str)],
) -> Result<(Outcome, Vec<String>), String> {
    let mut command = Command::new(cargo());
    // Arguments after two dashes are for the test program.
    let mut parts = args.splitn(2, |arg| *arg == "--");
    command.arg("test").args(parts.next().unwrap_or_default());
    command.args(["--no-fail-fast", "--", "--show-output"]);
    command.args(parts.next().unwrap_or_default());
    command.envs(env.iter().copied());
    let ended = start(suite, nightly, &mut command)?;
    Ok(outcome_of(&ended, &args.join(" ")))
}

/// The result of `cargo test ARGS`, and the failed tests, if their program printed them.
fn outcome_of(ended: &ProcessOutput, args: &str) -> (Outcome, Vec<String>) {
    let tests = read_tests(&ended.output);
    let mut outcome = Outcome { counts: tests.counts, skips: tests.skips, ..Outcome::default() };
    if !ended.ok {
        // The build failed, or a test crashed its process.
        let unnamed = crashed(&ended.output).max(u64::from(tests.counts.failed == 0));
        outcome.counts.failed += unnamed;
        outcome.output = failures(&ended.output);
    } else if tests.counts == Counts::default() {
        // Selected tests were renamed.
        outcome = Outcome::single(false, format!("no test ran: cargo test {args}\n"));
    }
    (outcome, tests.failed)
}

/// Number of test programs that were started and printed no result.
fn crashed(output: &str) -> u64 {
    let lines = |starts: &'static [&'static str]| {
        output.lines().filter(|line| starts.iter().any(|start| line.starts_with(start))).count()
    };
    let started = lines(&["     Running ", "   Doc-tests "]);
    started.saturating_sub(lines(&["test result: "])) as u64
}

/// Runs one suite of the crate `barewire-tests`.
fn integration(suite: Suite, nightly: bool, file: &str) -> Result<Outcome, String> {
    if !root().join(file).is_file() {
        return Ok(Outcome::skipped(format!("{file} does not exist")));
    }
    let selected = if suite.computes() { ALL } else { ALL_WAITING };
    let args = [selected, &["--test", suite.name()]].concat();
    let many = test_threads();
    let env = suite.waits().then_some((THREADS, many.as_str()));
    cargo_test_with(suite, nightly, &args, env.as_slice())
}

/// Environment variable: number of tests of a program that run at the same time.
const THREADS: &str = "RUST_TEST_THREADS";

/// Its value for tests that mostly wait: two per processor, unless it is set.
fn test_threads() -> String {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::env::var(THREADS).unwrap_or_else(|_| (2 * processors).to_string())
}

/// Runs the simulator; nightly also the tests of the simulator, for which the dataplane is built
/// with planted bugs.
fn sim(suite: Suite, nightly: bool) -> Result<Outcome, String> {
    let mut outcome = integration(suite, nightly, "tests/sim/main.rs")?;
    if nightly {
        let planted = ["--features", "plant", "--test", "sim", "planted_bugs"];
        outcome.add(cargo_test(suite, nightly, &[ALL, &planted].concat())?);
        let model = ["--package", "barewire-dataplane", "--features", "plant", "--lib", "planted"];
        outcome.add(cargo_test(suite, nightly, &model)?);
    }
    Ok(outcome)
}

/// Builds the provider and the command, on which no test can depend.
fn libraries_and_commands(suite: Suite, nightly: bool) -> Result<ProcessOutput, String> {
    let mut build = Command::new(cargo());
    build.args(["build", "--profile", "test", "--exclude", "xtask", "--lib", "--bins"]).args(ALL);
    start(suite, nightly, &mut build)
}

/// Runs the suite of the provider.
fn provider(suite: Suite, nightly: bool) -> Result<Outcome, String> {
    let ended = libraries_and_commands(suite, nightly)?;
    if !ended.ok {
        return Ok(Outcome::single(false, ended.output));
    }
    if let Err(why) = pack(false, &dist::Format::ALL) {
        return Ok(Outcome::single(false, why));
    }
    packages::provide_mpi(&target_dir());
    let mut outcome = integration(suite, nightly, "tests/provider/main.rs")?;
    outcome.add(crates(suite, nightly)?);
    Ok(outcome)
}

/// Packs the published crates, and nightly builds them from the packages: one check. Their
/// dependencies are present, since they were built before.
fn crates(suite: Suite, nightly: bool) -> Result<Outcome, String> {
    let mut package = Command::new(cargo());
    package.args(["package", "--workspace", "--allow-dirty", "--offline"]);
    for name in ["xtask", "barewire-tests", "barewire-benches", "barewire-fuzz"] {
        package.args(["--exclude", name]);
    }
    if !nightly {
        package.arg("--no-verify");
    }
    let ended = start(suite, nightly, &mut package)?;
    Ok(Outcome::single(ended.ok && !ended.output.contains("warning:"), ended.output))
}

/// Makes the packages whose tools are installed; the tests of the other packages are skipped.
fn pack(dpdk: bool, formats: &[dist::Format]) -> Result<(), String> {
    let built = dist::build(true, dpdk)?;
    let mut here = formats.iter().filter(|format| packages::in_path(format.tool().program));
    here.try_for_each(|format| dist::pack(&built, *format).map(drop))
}

/// Whether two ports `xdp` can be opened: the kernel has AF_XDP, and this process is root outside
/// of user namespaces.
fn has_xdp() -> bool {
    let text = |path| std::fs::read_to_string(path).unwrap_or_default();
    let sockets = text("/proc/net/protocols").lines().any(|line| line.starts_with("XDP "));
    let whole = text("/proc/self/uid_map").split_whitespace().eq(["0", "0", "4294967295"]);
    sockets && whole && nix::unistd::geteuid().is_root()
}

/// Ports of a near pair and a far third, in the format of `tests/conformance`.
const NEAR_BESIDE_FAR: &str = "udp:127.0.0.1,near=yes udp:127.0.0.1,near=yes udp:127.0.0.1,near=no";

/// Ports of a far pair, and a third that is near to the first.
const FAR_BESIDE_NEAR: &str = "udp:127.0.0.1,near=yes udp:127.0.0.1,near=no udp:127.0.0.1,near=yes";

/// The clause that is not run over [`NEAR_BESIDE_FAR`].
const SKIPPED_NEAR: &str = "a_death_is_told_in_time_whatever_the_polling";

/// Lets a network namespace reach itself.
const UP: &str = "ip link set lo up";

/// Makes a host drop one of fifty received datagrams.
const LOSES: &str = "nft add table inet wires && \
     nft add chain inet wires loss \"{ type filter hook input priority 0 ; }\" && \
     nft add rule inet wires loss meta l4proto udp numgen random mod 50 == 0 drop";

/// Runs the suite `wires`, the [`in_namespaces`] part of `conformance`, and the clauses on calls
/// and flags of messages over a memif.
fn wires(suite: Suite, nightly: bool) -> Result<Outcome, String> {
    // Some tests run the command.
    let built = libraries_and_commands(suite, nightly)?;
    if !built.ok {
        return Ok(Outcome::single(false, built.output));
    }
    let mut outcome = integration(suite, nightly, "tests/wires/main.rs")?;
    let unshare = if nix::unistd::geteuid().is_root() { "-n" } else { "-Urn" };
    match works_after(unshare, UP) {
        Ok(()) => outcome.add(in_namespaces(suite, nightly, unshare)?),
        Err(why) => outcome.add(Outcome::skipped(format!("conformance over each port: {why}"))),
    }
    let memifs = "memif:@barewire-flags,role=server memif:@barewire-flags";
    outcome.add(calls_over(suite, nightly, memifs, ALL_WAITING, &[])?);
    Ok(outcome)
}

/// Runs `conformance` again over each port on which two domains of one process can reach each
/// other, and over near ports beside a far one with a lossy link, each in its own network
/// namespace, which `unshare` creates with these flags. Then runs the clauses on calls and flags of
/// messages between two far ports, beside a near one, and those over ports `xdp`.
fn in_namespaces(suite: Suite, nightly: bool, unshare: &str) -> Result<Outcome, String> {
    let after = |commands: &str| {
        format!(
            "target.'cfg(all())'.runner = ['unshare', '{unshare}', 'sh', '-c', \
             '{commands} && exec \"$@\"', 'sh']"
        )
    };
    let mut outcome = Outcome::default();
    let (up, lossy) = (after(UP), format!("{UP} && {LOSES}"));
    let loses = works_after(unshare, &lossy);
    let lossy = if loses.is_ok() { &after(&lossy) } else { &up };
    if let Err(why) = loses {
        outcome.add(Outcome::skipped(format!("that far frames are lost beside near ones: {why}")));
    }
    for port in ["afpacket:lo", "udp:127.0.0.1", NEAR_BESIDE_FAR] {
        let is_near = port == NEAR_BESIDE_FAR;
        let runner = if is_near { lossy } else { &up };
        let mut args = vec!["--config", runner, "--test", "conformance"];
        if is_near {
            // The test has its own ports, and its peers die within 300 ms: two losses can suffice.
            args.extend(["--", "--skip", SKIPPED_NEAR]);
        }
        // Near ports share a segment, which a joining test locks for some milliseconds.
        let threads = is_near.then_some((THREADS, "1"));
        let env: Vec<_> = threads.into_iter().chain([("BAREWIRE_TEST_PORT", port)]).collect();
        let mut over = cargo_test_with(suite, nightly, &[ALL_WAITING, &args].concat(), &env)?;
        if over.counts.failed > 0 {
            over.output.insert_str(0, &format!("conformance over {port}:\n"));
        }
        outcome.add(over);
    }
    let selected = [ALL_WAITING, &["--config", lossy]].concat();
    outcome.add(calls_over(suite, nightly, FAR_BESIDE_NEAR, &selected, &[])?);
    if has_xdp() {
        outcome.add(over_xdp(suite, nightly, after)?);
    } else {
        let why = "the calls over xdp: that takes AF_XDP and the machine's root";
        outcome.add(Outcome::skipped(why.to_owned()));
    }
    Ok(outcome)
}

/// Interfaces on a bridge, for the test of most ports; `x1`, `x2` and so on.
const BRIDGE: &str = "ip link add br0 type bridge && ip link set br0 up && for i in $(seq 21); do \
     ip link add x$i type veth peer name y$i && ip link set y$i master br0 && \
     ip link set x$i up && ip link set y$i up || exit 1; done";

/// Tests that open the same name twice, where an interface has one owner.
const SHARERS: [&str; 5] = [
    "codes::capabilities_not_requested",
    "codes::x17_enabling_needs_queue",
    "coll::a_join_refuses_what",
    "coll::any_number_of_an_endpoint",
    "coll::sets_are_made_of_ranges",
];

/// Runs the clauses on calls and flags of messages between two ports `xdp`, with the program in the
/// driver and in the stack, and `nightly` all clauses. `after` is the runner after commands in a
/// network namespace.
fn over_xdp(
    suite: Suite,
    nightly: bool,
    after: impl Fn(&str) -> String,
) -> Result<Outcome, String> {
    let mut outcome = Outcome::default();
    let runner = after(&format!("{UP} && {BRIDGE}"));
    for mode in ["native", "generic"] {
        let port = |n: usize| format!("xdp:x{n},mode={mode}");
        let selected = [ALL_WAITING, &["--config", &runner]].concat();
        if nightly {
            let ports = (1..=21).map(port).collect::<Vec<_>>().join(" ");
            let skips = SHARERS.iter().flat_map(|test| ["--skip", test]);
            let args = ["--test", "conformance", "--"].into_iter().chain(skips);
            let args = selected.into_iter().chain(args).collect::<Vec<_>>();
            let env = [("BAREWIRE_TEST_PORT", ports.as_str()), (THREADS, "1")];
            outcome.add(cargo_test_with(suite, nightly, &args, &env)?);
        } else {
            let ports = [1, 2].map(port).join(" ");
            outcome.add(calls_over(suite, nightly, &ports, &selected, &[])?);
        }
    }
    Ok(outcome)
}

/// Whether a program can run in its own network namespace, which `unshare` creates with these
/// flags, after `commands` in it. The error is the output, with a possible remedy.
fn works_after(flags: &str, commands: &str) -> Result<(), String> {
    let mut command = Command::new("unshare");
    command.args([flags, "sh", "-c", commands]).stdin(std::process::Stdio::null());
    let output = command.output().map_err(|why| format!("unshare: {why}"))?;
    if output.status.success() {
        return Ok(());
    }
    let output = String::from_utf8_lossy(&output.stderr);
    let why = output.trim().lines().next_back().unwrap_or("no reason given").to_owned();
    Err(format!(
        "{why}; sudo apt-get install iproute2 nftables, and run as root, or: \
         sudo sysctl -w kernel.unprivileged_userns_clone=1"
    ))
}

/// Runs the clauses on calls and flags of messages between two ports, one test after the other, in
/// a build of the packages `selected`.
fn calls_over(
    suite: Suite,
    nightly: bool,
    ports: &str,
    selected: &[&str],
    without: &[&str],
) -> Result<Outcome, String> {
    let mut outcome = Outcome::default();
    let env = [("BAREWIRE_TEST_PORT", ports), (THREADS, "1")];
    for tests in ["msg::", "matching::x50_the", "matching::x51"] {
        let args = [selected, &["--test", "conformance", tests], without].concat();
        outcome.add(cargo_test_with(suite, nightly, &args, &env)?);
    }
    Ok(outcome)
}

/// Runs every test of `barewire-tests` without a suite of its own, so that none is forgotten.
fn e2e(suite: Suite, nightly: bool) -> Result<Outcome, String> {
    let file = root().join("tests/Cargo.toml");
    let manifest = std::fs::read_to_string(&file).map_err(|why| format!("{file:?}: {why}"))?;
    let own: Vec<&str> = Suite::ALL.iter().filter(|s| **s != suite).map(|s| s.name()).collect();
    let rest = test_targets(&manifest).filter(|name| !own.contains(name));
    let args: Vec<&str> = rest.flat_map(|name| ["--test", name]).collect();
    if args.is_empty() {
        return Ok(Outcome::skipped("tests/Cargo.toml has no such test".to_owned()));
    }
    cargo_test(suite, nightly, &[ALL, &args].concat())
}

/// Names of the `[[test]]` tables of a manifest.
fn test_targets(manifest: &str) -> impl Iterator<Item = &str> {
    manifest.split("[[test]]").skip(1).filter_map(|table| {
        let line = table.lines().find(|line| line.trim_start().starts_with("name"))?;
        line.split('"').nth(1)
    })
}

/// The parts of a test run's output that explain a failure; the output of thousands of passed tests
/// is left out.
fn failures(output: &str) -> String {
    let mut shown = String::new();
    let mut inside = false;
    for line in output.lines() {
        // The output of a run names the failures from here to its result; a build stops at its
        // errors.
        inside |= line == "failures:" || line.starts_with("error");
        if inside {
            shown.push_str(line);
            shown.push('\n');
        }
        let run_begins = line.starts_with("     Running ") || line.starts_with("   Doc-tests ");
        inside &= !run_begins && !line.starts_with("test result: ");
    }
    shown
}

fn shellcheck(suite: Suite) -> Result<Outcome, String> {
    if !packages::in_path("shellcheck") {
        let hint = "shellcheck is not installed: sudo apt-get install -y shellcheck";
        return Ok(Outcome::skipped(hint.to_owned()));
    }
    let mut scripts = vec![root().join(".ci/run")];
    for dir in [
        root(),
        root().join("tests"),
        root().join("docs"),
        root().join("fuzz"),
        root().join("xtask/src/vm"),
    ] {
        let files = std::fs::read_dir(&dir).into_iter().flatten().flatten();
        let paths = files.map(|file| file.path());
        scripts.extend(paths.filter(|path| path.extension().is_some_and(|ext| ext == "sh")));
    }
    let mut command = Command::new("shellcheck");
    command.args(scripts);
    let ended = start(suite, false, &mut command)?;
    Ok(Outcome::single(ended.ok, ended.output))
}

/// Runs Clippy and the tests for the feature `dpdk`.
fn dpdk(suite: Suite, nightly: bool) -> Result<Outcome, String> {
    if !Path::new(packages::DPDK.program).exists() {
        let hint = "DPDK is not installed: sudo apt-get install -y libdpdk-dev libclang-dev";
        return Ok(Outcome::skipped(hint.to_owned()));
    }
    let lint = ["clippy", "--all-targets"];
    let args = [&lint, ALL_WITH_DPDK, &["--", "-D", "warnings"]].concat();
    let mut outcome = check(suite, nightly, &args, &[])?;
    // The other tests inside the crates do not depend on the feature; `unit` has run them.
    let inside = ["--lib", "--", "backend::dpdk::", "backend::any_", "open::"];
    // Tests of NICs run in guests. One test at a time: with more polling processes than processors,
    // kernel threads that these devices depend on would starve.
    let tests = ["--test", "dpdk", "--", "--test-threads=1", "--skip", "nic::"];
    for args in [&inside[..], &tests] {
        outcome.add(cargo_test(suite, nightly, &[ALL_WITH_DPDK, args].concat())?);
    }
    // Before the build of the ordinary provider, which replaces the one in this package.
    if let Err(why) = pack(true, &[dist::Format::Deb]) {
        return Ok(Outcome::single(false, why));
    }
    // MPI behind switches that own a device; its provider is the ordinary one.
    let library = libraries_and_commands(suite, nightly)?;
    if !library.ok {
        return Ok(Outcome::single(false, library.output));
    }
    packages::provide_mpi(&target_dir());
    let tests = ["--test", "provider", "--", "every_mpi_behind_switches_on_taps", "with_dpdk"];
    outcome.add(cargo_test(suite, nightly, &[ALL_WITH_DPDK, &tests].concat())?);
    let build = &mut suite::build("dpdk", ALL_WITH_DPDK);
    outcome.add(in_guests(suite, nightly, build, suite::dpdk)?);
    // Over a pair of rings and over a memif, whose server comes first. Skipped on a memif: tests
    // that rely on a frame having left when the call returns, and then poll the other side only.
    let rings = "dpdk:net_ring_flags_a,pair=flags dpdk:net_ring_flags_b,pair=flags";
    let memifs = "dpdk:net_memif_flags_a,role=server,socket=barewire-flags \
                  dpdk:net_memif_flags_b,role=client,socket=barewire-flags";
    for (ports, without) in [(rings, &[][..]), (memifs, &["--", "--skip", "mf5"])] {
        outcome.add(calls_over(suite, nightly, ports, ALL_WITH_DPDK, without)?);
    }
    let name = [bench::DPDK.to_owned()];
    let bench = [ALL_WITH_DPDK, &["--bin", bench::DPDK]].concat();
    outcome.add(run_benches(suite, nightly, &name, &bench)?);
    Ok(outcome)
}

/// Runs the test program `vfio` inside guests.
fn vfio(suite: Suite, nightly: bool) -> Result<Outcome, String> {
    let mut outcome = Outcome::default();
    let ran = in_guests(suite, nightly, &mut suite::build("vfio", ALL_WAITING), |program| {
        let lossy = || two_guests(suite, "two guests", suite::two_guests(program));
        let stopped =
            || two_guests(suite, "a stopped guest", suite::stopped_guest(program, nightly));
        outcome.add(with_second_try((suite, nightly), "two guests", lossy));
        outcome.add(with_second_try((suite, nightly), "a stopped guest", stopped));
        if outcome.counts.failed == 0 {
            // Nothing failed.
            outcome.output.clear();
        }
        suite::runs(program, nightly)
    })?;
    outcome.add(ran);
    let barewire = &vm::barewire()?;
    // One of two guests boots when the other has booted: booting a pair would leave half of the
    // machine idle.
    let nics = [None, Some(guest::Model::Virtio), Some(guest::Model::E1000e)];
    let pairs = process::side_by_side(nics.len(), |n| {
        let (what, run): (_, Box<dyn Fn() -> _>) = match nics[n] {
            None => ("two hosts".to_owned(), Box::new(|| hosts::two_hosts(barewire))),
            Some(nic) => {
                let what = format!("three processes of a host, {nic:?}");
                (what, Box::new(move || hosts::behind_switches(barewire, nic)))
            }
        };
        with_second_try((suite, nightly), &what, || {
            let began = Instant::now();
            let ended = run();
            append(suite, &format!("{what}: {:.1} s\n", began.elapsed().as_secs_f64()));
            hosts_pair(suite, &what, ended)
        })
    });
    pairs.into_iter().for_each(|pair| outcome.add(pair));
    let built = libraries_and_commands(suite, nightly)?;
    if !built.ok {
        outcome.add(Outcome::single(false, built.output));
        return Ok(outcome);
    }
    let provider = target_dir().join("debug/libbarewire_fi.so");
    for nic in [guest::Model::Virtio, guest::Model::E1000e] {
        let what = format!("MPI, three ranks of a host, {nic:?}");
        let ranks = || {
            let began = Instant::now();
            let ended = mpi::between_guests(barewire, &provider, nic, nightly);
            append(suite, &format!("{what}: {:.1} s\n", began.elapsed().as_secs_f64()));
            hosts_pair(suite, &what, ended)
        };
        outcome.add(with_second_try((suite, nightly), &what, ranks));
    }
    Ok(outcome)
}

/// Builds a test program with `build`, and runs it in the guests that `runs` names.
fn in_guests(
    suite: Suite,
    nightly: bool,
    build: &mut Command,
    runs: impl FnOnce(&Path) -> Vec<suite::Run>,
) -> Result<Outcome, String> {
    let built = start(suite, nightly, build)?;
    let Some(program) = suite::program(&built.output).filter(|_| built.ok) else {
        // Without Cargo's JSON lines.
        let output = built.output.lines().filter(|line| !line.starts_with('{'));
        return Ok(Outcome::single(false, output.collect::<Vec<_>>().join("\n")));
    };
    let mut outcome = Outcome::default();
    let runs = runs(&program);
    let all = suite::run_all(&runs, |run, ended, took| {
        let (name, seconds) = (run.name(), took.as_secs_f64());
        let log = format!("guest {name}, {seconds:.1} s\n{}{}", ended.output, ended.trouble);
        append(suite, &log);
    });
    for (run, ended) in runs.iter().zip(all) {
        let first = Cell::new(Some(ended));
        outcome.add(with_second_try((suite, nightly), &format!("guest {}", run.name()), || {
            judge(run, first.take().unwrap_or_else(|| run.run()))
        }));
    }
    Ok(outcome)
}

/// The result of one guest.
fn judge(run: &suite::Run, ended: Result<guest::GuestOutput, NotHere>) -> Outcome {
    let ended = match ended {
        Ok(ended) => ended,
        Err(NotHere(why)) => return Outcome::skipped(format!("{}: {why}", run.name())),
    };
    let tests = read_tests(&ended.output);
    let skips = tests.skips.iter().map(|skip| format!("{}: {skip}", run.name())).collect();
    let mut outcome = Outcome { counts: tests.counts, skips, ..Outcome::default() };
    let (faults, is_idle) = (ended.faults > 0, tests.counts == Counts::default());
    if ended.code != Some(0) || faults != run.is_planted || is_idle {
        // The guest itself failed, or its IOMMU reported a fault that no test noticed.
        outcome.counts.failed += u64::from(tests.counts.failed == 0);
        let why = match (faults, run.is_planted) {
            (true, false) => "the IOMMU refused accesses\n",
            (false, true) => "a planted mistake went unnoticed\n",
            _ if is_idle && ended.code == Some(0) => "no test ran\n",
            _ => "",
        };
        let output = format!("{}{}", failures(&ended.output), ended.trouble);
        outcome.output = format!("guest {}: {why}{output}", run.name());
    }
    outcome
}

/// The result of two guests joined by a cable: one check.
fn two_guests(
    suite: Suite,
    what: &str,
    ended: Result<(Vec<guest::GuestOutput>, String), NotHere>,
) -> Outcome {
    match ended {
        Err(NotHere(why)) => Outcome::skipped(format!("{what}: {why}")),
        Ok((ends, cable)) => {
            let mut outcome = pair(suite, &format!("{what}: {cable}"), &ends);
            if !ends.iter().all(|end| has_run_one(&end.output)) {
                outcome.counts = Counts { failed: 1, ..Counts::default() };
            }
            outcome
        }
    }
}

/// Whether the test program's `output` (with `--nocapture`) shows exactly one test run, the
/// requested one: a test's own output follows its name.
fn has_run_one(output: &str) -> bool {
    let is_left_out = output.contains(crate::report::SKIPPED);
    !is_left_out && read_tests(output).counts == Counts { passed: 1, ..Counts::default() }
}

/// The result of two guests that are hosts.
fn hosts_pair(
    suite: Suite,
    what: &str,
    ended: Result<Vec<guest::GuestOutput>, NotHere>,
) -> Outcome {
    match ended {
        Err(NotHere(why)) => Outcome::skipped(format!("{what}: {why}")),
        Ok(ends) => pair(suite, what, &ends),
    }
}

/// The result of a pair of guests; both must exist.
fn pair(suite: Suite, what: &str, ends: &[guest::GuestOutput]) -> Outcome {
    let output: String = ends.iter().map(|end| format!("{}{}", end.output, end.trouble)).collect();
    let output = format!("{what}\n{output}");
    append(suite, &output);
    let ok = ends.iter().all(|end| end.code == Some(0) && end.faults == 0);
    Outcome::single(ok && ends.len() == 2, output)
}

/// Appends to a suite's log. The result does not depend on the log.
fn append(suite: Suite, text: &str) {
    let file = File::options().create(true).append(true).open(log_of(&target_dir(), suite));
    let _ = file.and_then(|mut file| file.write_all(text.as_bytes()));
}

/// Runs every benchmark in its smallest size.
fn benches(suite: Suite, nightly: bool) -> Result<Outcome, String> {
    let mut names = bench::names()?;
    // This benchmark takes longer than all the others together, which run beside it.
    names.sort_by_key(|name| name != bench::VFIO);
    if names.is_empty() {
        return Ok(Outcome::skipped("benches/src/bin holds no bench".to_owned()));
    }
    if Path::new(packages::DPDK.program).exists() {
        let guest = [ALL_WITH_DPDK, &["--bin", bench::VFIO_GUEST]].concat();
        let guest = build_benches(suite, nightly, &guest)?;
        if !guest.ok {
            return Ok(Outcome::single(false, guest.output));
        }
    }
    run_benches(suite, nightly, &names, &[ALL, &["--exclude", "xtask", "--bins"]].concat())
}

/// Builds benchmarks in the tests' profile: the suite checks only that they run, and the crates are
/// already built in it. `what` selects benchmarks and features.
fn build_benches(suite: Suite, nightly: bool, what: &[&str]) -> Result<ProcessOutput, String> {
    let mut build = Command::new(cargo());
    build.args(["build", "--profile", "test"]).args(what);
    start(suite, nightly, &mut build)
}

/// Builds benchmarks as [`build_benches`] and runs them in their smallest size.
fn run_benches(
    suite: Suite,
    nightly: bool,
    names: &[String],
    what: &[&str],
) -> Result<Outcome, String> {
    let mut outcome = Outcome::default();
    let ended = build_benches(suite, nightly, what)?;
    if !ended.ok {
        return Ok(Outcome::single(false, ended.output));
    }
    // In their smallest size benchmarks measure nothing that others could disturb.
    let all = process::side_by_side(names.len(), |n| run_bench(suite, nightly, &names[n]));
    for (name, first) in names.iter().zip(all) {
        let first = Cell::new(Some(first?));
        outcome.add(with_second_try((suite, nightly), &format!("bench {name}"), || {
            let again = || run_bench(suite, nightly, name);
            let output = first.take().map_or_else(again, Ok);
            output.unwrap_or_else(|why| Outcome::single(false, why))
        }));
    }
    Ok(outcome)
}

/// Runs a benchmark in its smallest size: one check.
fn run_bench(suite: Suite, nightly: bool, name: &str) -> Result<Outcome, String> {
    let mut command = Command::new(target_dir().join("debug").join(name));
    command.args(["--quick", "--json"]);
    // Other benchmarks write to the suite's log at the same time.
    let own = log_of(&target_dir(), suite).with_extension(name);
    let ended = start_with(suite, nightly, &mut command, &own)?;
    let _ = std::fs::remove_file(own);
    append(suite, &ended.output);
    let skip = ended.output.lines().find_map(|l| l.strip_prefix(crate::report::SKIPPED));
    if let (true, Some(why)) = (ended.ok, skip) {
        return Ok(Outcome::skipped(format!("{name}: {why}")));
    }
    let wrong = bench::check_json(&ended.output).err();
    if ended.ok && wrong.is_none() {
        return Ok(Outcome::single(true, String::new()));
    }
    let wrong = wrong.unwrap_or_default();
    Ok(Outcome::single(false, format!("bench {name}: {wrong}\n{}\n", ended.output)))
}

/// Runs a command of a suite with its log and its time limit.
fn start(suite: Suite, nightly: bool, command: &mut Command) -> Result<ProcessOutput, String> {
    start_with(suite, nightly, command, &log_of(&target_dir(), suite))
}

/// [`start`] with a log of its own.
fn start_with(
    suite: Suite,
    nightly: bool,
    command: &mut Command,
    log: &Path,
) -> Result<ProcessOutput, String> {
    command.current_dir(root());
    // Cargo sets them for xtask; a test that reads them would take itself for xtask.
    for name in ["CARGO_MANIFEST_DIR", "CARGO_PKG_NAME", "CARGO_PKG_VERSION"] {
        command.env_remove(name);
    }
    command.env("CARGO_TERM_COLOR", "never");
    if nightly {
        command.env("BAREWIRE_NIGHTLY", "1");
    }
    let limit = suite.limit(nightly);
    let mut ended = process::run(command, log, limit)
        .map_err(|why| format!("{}: {} {why}", suite.name(), command.get_program().display()))?;
    if ended.timed_out {
        let hung = unfinished(&ended.output).join(", ");
        let seconds = limit.as_secs();
        ended.output.push_str(&format!("\nerror: killed after {seconds} s, still ran: {hung}\n"));
    }
    Ok(ended)
}

fn log_of(target: &Path, suite: Suite) -> std::path::PathBuf {
    target.join("xtask").join(format!("{}.log", suite.name()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn every_suite_runs_once_and_under_the_name_that_calls_it() {
        assert_eq!(Suite::ALL, Suite::value_variants());
        for suite in Suite::ALL {
            assert_eq!(Suite::from_str(suite.name(), false), Ok(suite));
        }
    }

    #[test]
    fn failed_tests_are_retried_once_where_processes_starve() {
        let outcome_of = |suite, nightly, failures: [u64; 2]| {
            let runs = Cell::new(0);
            let outcome = with_second_try((suite, nightly), "it", || {
                let failed = failures[runs.replace(runs.get() + 1)];
                Outcome { counts: Counts { passed: 5, failed, skipped: 0 }, ..Outcome::default() }
            });
            (outcome.counts.failed, outcome.second_tries, runs.get())
        };
        let it = || vec!["it".to_owned()];
        assert_eq!(outcome_of(Suite::Wires, false, [0, 1]), (0, vec![], 1));
        assert_eq!(outcome_of(Suite::Wires, false, [1, 0]), (0, it(), 2));
        assert_eq!(outcome_of(Suite::Wires, false, [1, 1]), (1, vec![], 2));
        assert_eq!(outcome_of(Suite::Wires, false, [4, 0]), (4, vec![], 1));
        assert_eq!(outcome_of(Suite::Wires, true, [1, 0]), (1, vec![], 1));
        assert_eq!(outcome_of(Suite::Sim, false, [1, 0]), (1, vec![], 1));
    }

    /// Goal: what runs no test has passed none, as where a name that chose some is one no more.
    #[test]
    fn a_run_without_tests_has_failed() {
        let run = |result: &str, ok| {
            let output = format!("test result: {result}; 0 measured; 7 filtered out\n");
            outcome_of(&ProcessOutput { ok, timed_out: false, output }, "--lib x").0
        };
        let nothing = run("ok. 0 passed; 0 failed; 0 ignored", true);
        assert_eq!(nothing.counts, Counts { failed: 1, ..Counts::default() });
        assert!(nothing.output.contains("cargo test --lib x"), "{}", nothing.output);
        assert_eq!(run("ok. 1 passed; 0 failed; 0 ignored", true).counts.failed, 0);
        assert_eq!(run("ok. 0 passed; 0 failed; 1 ignored", true).counts.failed, 0);
        assert_eq!(run("FAILED. 0 passed; 1 failed; 0 ignored", false).counts.failed, 1);
    }

    /// Goal: tests that only long runs select by name exist, so that a renaming shows by day.
    #[test]
    fn tests_that_are_selected_by_name_exist() {
        for (file, test) in [
            ("driver/src/backend/switch/tests/hostile.rs", HOSTILE),
            ("tests/conformance/execution.rs", SKIPPED_NEAR),
            ("tests/conformance/msg.rs", "mf5"),
            ("tests/sim/stages/planted.rs", "planted_bugs"),
        ] {
            let text = std::fs::read_to_string(root().join(file)).unwrap();
            assert!(text.contains(&format!("fn {test}")), "{file}: {test}");
        }
    }

    #[test]
    fn a_guest_has_run_its_test() {
        let has_run = |test: &str, result: &str| {
            has_run_one(&format!("{test}\ntest result: ok. {result}; 0 failed; 0 ignored\n"))
        };
        assert!(has_run("test wire::sends ... 60 messages sent\nok", "1 passed"));
        assert!(!has_run("test wire::sends ... SKIPPED: no NIC\nok", "1 passed"));
        assert!(!has_run("running 0 tests", "0 passed"));
        assert!(!has_run_one("init: no such program\n"));
    }

    /// Goal: what a machine does not let us do is found out before tests are run by it.
    #[test]
    fn a_namespace_is_tried_before_tests_run_there() {
        let flags = if nix::unistd::geteuid().is_root() { "-n" } else { "-Urn" };
        let refused = works_after(flags, "echo this is missing >&2; exit 1").unwrap_err();
        if works_after(flags, "true").is_ok() {
            assert!(refused.starts_with("this is missing; "), "{refused}");
        }
        assert!(works_after("--no-such-flag", "true").is_err());
    }

    #[test]
    fn a_crash_beside_a_failure_is_seen() {
        let output = "     Running a\nrunning 2 tests\nerror: signal: 11\n     Running b\n\
                      test result: FAILED. 1 passed; 1 failed\n   Doc-tests c\n\
                      test result: ok. 0 passed; 0 failed\n";
        assert_eq!(crashed(output), 1);
        assert_eq!(crashed("error: could not compile\n"), 0);
    }

    #[test]
    fn the_tests_of_a_manifest_are_found() {
        let manifest = "[package]\nname = \"x\"\n[[test]]\nname = \"sim\"\npath = \"y\"\n\n\
                        [[test]]\npath = \"z\"\nname = \"e2e\"\n";
        assert_eq!(test_targets(manifest).collect::<Vec<_>>(), ["sim", "e2e"]);
    }

    #[test]
    fn a_failure_is_shown_without_what_passed() {
        let output = "successes:\n---- a ----\nnoise\nfailures:\n---- b ----\nwhy\n\
                      test result: FAILED. 1 passed\n     Running c\ntest d ... ok\n\
                      test result: ok. 1 passed\nerror: 1 target failed:\n    `-p x`\n";
        let shown = "failures:\n---- b ----\nwhy\ntest result: FAILED. 1 passed\n\
                     error: 1 target failed:\n    `-p x`\n";
        assert_eq!(failures(output), shown);
        assert_eq!(failures("   Compiling x\nerror: no\n --> y\n"), "error: no\n --> y\n");
    }
}
