//! The provider under programs that know libfabric or MPI and nothing of us: Debian's fi_info and
//! fi_pingpong, programs in C of our own, Open MPI, MPICH.
//!
//! The library is the one that `cargo build -p barewire-provider` made last.

mod alive;
mod answers;
mod attrs;
mod chosen;
mod collectives;
mod colls;
mod connect;
mod counted;
mod edges;
mod gaps;
mod hooks;
mod hosts;
mod injects;
mod legal;
mod life;
mod limits;
mod loading;
mod mpi;
mod multicast;
mod names;
mod nics;
mod package;
mod preloaded;
mod probes;
mod queues;
mod ranks;
mod regions;
mod rekey;
mod scalable;
mod shared;
mod strangers;
mod tables;
mod tenants;
mod trigger;
mod userids;
mod waits;
mod words;

use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The directory that libfabric finds the provider in.
fn library_dir() -> Result<PathBuf, String> {
    let exe = std::env::current_exe().map_err(|e| e.to_string())?;
    // target/debug/deps/provider-HASH
    let dir = exe.parent().and_then(Path::parent).ok_or("no directory")?.to_path_buf();
    if dir.join("libbarewire_fi.so").is_file() {
        Ok(dir)
    } else {
        Err("the library is not built: cargo build -p barewire-provider".to_owned())
    }
}

/// Whether a program is in `PATH`.
fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

/// What a test needs of the machine, or why it cannot run.
fn need(programs: &[(&str, &str)]) -> Result<PathBuf, String> {
    for (program, package) in programs {
        if !has(program) {
            return Err(format!("no {program}: sudo apt-get install {package}"));
        }
    }
    library_dir()
}

/// Runs `test` with what it needs, or says why not.
fn with(programs: &[(&str, &str)], test: impl FnOnce(&Bench)) {
    match need(programs) {
        Ok(dir) => test(&Bench::new(dir)),
        Err(why) => println!("SKIPPED: {why}"),
    }
}

/// Runs a program of ours that calls what `header` declares and says "ok" or "BAD" of each, with
/// both kinds of progress, and hands what it said to `more`.
fn check(source: &str, header: &str, more: impl Fn(&str)) {
    check_over(None, source, header, more);
}

/// As [`check`], over another port than a segment.
fn check_over(port: Option<&str>, source: &str, header: &str, more: impl Fn(&str)) {
    check_with(port, source, header, |_| {}, more);
}

/// As [`check_over`], with what `equip` adds to the command.
fn check_with(
    port: Option<&str>,
    source: &str,
    header: &str,
    equip: impl Fn(&mut Command),
    more: impl Fn(&str),
) {
    with(&[("cc", "gcc"), ("fi_info", "libfabric-bin")], |bench| {
        if !Path::new("/usr/include/rdma").join(header).exists() {
            println!("SKIPPED: no rdma/{header}: sudo apt-get install libfabric-dev");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let program = compile(dir.path(), &["cc", "-lfabric", "-lpthread"], source);
        for progress in ["manual", "auto"] {
            let mut command = bench.program(program.to_str().unwrap());
            if let Some(port) = port {
                command.env("FI_BAREWIRE_PORT", port);
            }
            equip(&mut command);
            let said = succeed(command.env("FI_BAREWIRE_PROGRESS", progress), 240);
            let wrong: Vec<_> = said.lines().filter(|l| l.starts_with("BAD")).collect();
            assert!(wrong.is_empty(), "progress {progress}: {wrong:#?}");
            assert!(said.contains("ok end\n"), "{said}");
            more(&said);
        }
    });
}

/// A segment of its own, and the environment in which programs find the provider.
struct Bench {
    dir: PathBuf,
    segment: String,
}

impl Bench {
    fn new(dir: PathBuf) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        Self { dir, segment: format!("fi{}x{n}", std::process::id()) }
    }

    /// A program that sees the provider and knows nothing of it.
    fn bare(&self, program: &str) -> Command {
        self.seeing(Command::new(program))
    }

    fn seeing(&self, mut command: Command) -> Command {
        let ours = ["FI_BAREWIRE_PORT", "BAREWIRE_PORT", "FI_BAREWIRE_AS", "BAREWIRE_AS"];
        for name in ours.into_iter().chain(["FI_PROVIDER", "FI_LOG_LEVEL"]) {
            command.env_remove(name);
        }
        command.env("FI_PROVIDER_PATH", &self.dir).stdin(Stdio::null());
        command
    }

    /// The provider.
    fn library(&self) -> PathBuf {
        self.dir.join("libbarewire_fi.so")
    }

    fn port(&self) -> String {
        format!("shm:{}", self.segment)
    }

    /// A program that uses it, on the segment of this test.
    fn program(&self, program: &str) -> Command {
        self.using(Command::new(program))
    }

    fn using(&self, command: Command) -> Command {
        let mut command = self.seeing(command);
        command.env("FI_PROVIDER", "barewire").env("FI_BAREWIRE_PORT", self.port());
        command
    }
}

/// Compiles a source of ours and returns where the result lies.
fn compile(to: &Path, compiler: &[&str], source: &str) -> PathBuf {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("provider").join(source);
    let program = to.join(source.trim_end_matches(".c"));
    let mut command = Command::new(compiler[0]);
    command.args(["-std=gnu11", "-O1", "-Wall", "-o"]).arg(&program).arg(from);
    let built = command.args(&compiler[1..]).output().unwrap();
    assert!(built.status.success(), "{}", text(&built));
    program
}

impl Drop for Bench {
    fn drop(&mut self) {
        // Whoever leaves last removes the file; a killed program left it.
        let name = format!("barewire-{}-{}", nix::unistd::geteuid(), self.segment);
        let _ = std::fs::remove_file(Path::new("/dev/shm").join(name));
    }
}

/// Both outputs of a program.
fn text(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    format!("{}{}", String::from_utf8_lossy(out), String::from_utf8_lossy(err))
}

/// Runs a program to its end, which is at most `seconds` away.
fn finish(command: &mut Command, seconds: u64) -> Output {
    use std::os::unix::process::CommandExt;
    // Files and no pipes: a daemon of a launcher keeps a pipe open after the launcher's end.
    let mut files = [(); 2].map(|()| tempfile::tempfile().unwrap());
    let [out, err] = [0, 1].map(|at| Stdio::from(files[at].try_clone().unwrap()));
    let command = command.stdout(out).stderr(err).process_group(0);
    let mut child = command.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let in_time = wait_for(&mut child, seconds);
    if in_time.is_none() {
        // A launcher ends its ranks if it may.
        let group = nix::unistd::Pid::from_raw(child.id() as i32);
        for signal in [nix::sys::signal::Signal::SIGTERM, nix::sys::signal::Signal::SIGKILL] {
            let _ = nix::sys::signal::killpg(group, signal);
            let _ = wait_for(&mut child, 5);
        }
    }
    let [stdout, stderr] = [0, 1].map(|at| {
        let (mut bytes, file) = (Vec::new(), &mut files[at]);
        file.rewind().and_then(|()| file.read_to_end(&mut bytes)).unwrap();
        bytes
    });
    let status = child.wait().unwrap();
    let output = Output { status, stdout, stderr };
    assert!(in_time.is_some(), "not finished in {seconds} s: {command:?}: {}", text(&output));
    output
}

/// How a process ended, if it does within so many seconds.
fn wait_for(child: &mut Child, seconds: u64) -> Option<ExitStatus> {
    let end = Instant::now() + Duration::from_secs(seconds);
    loop {
        let status = child.try_wait().unwrap();
        if status.is_some() || Instant::now() >= end {
            return status;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Runs a program that succeeds, and returns what it said.
fn succeed(command: &mut Command, seconds: u64) -> String {
    let output = finish(command, seconds);
    assert!(output.status.success(), "{command:?}: {}\n{}", output.status, text(&output));
    text(&output)
}
