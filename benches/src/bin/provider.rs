//! Cost of the libfabric provider: the same C program over barewire and over libfabric's own
//! shared-memory provider, and Open MPI over barewire and over TCP.
//!
//! Needs Debian's `libfabric-dev`, `libopenmpi-dev` and `valgrind`, and the provider beside this
//! program (`cargo build --release -p barewire-provider`, which `cargo xtask bench` runs).

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use barewire_benches::{Args, Report, Row, Sample};

fn main() {
    let args = Args::read();
    let mut report = Report::new("provider", &args);
    let dir = match BenchDir::new() {
        Ok(dir) => dir,
        Err(why) => {
            // xtask recognises a skipped benchmark by the first word.
            println!("SKIPPED: {why}");
            return;
        }
    };
    if args.wants("instructions-64B") {
        let (few, many) = (args.size(10_000, 1000), args.size(60_000, 2000));
        match dir.instructions(few, many) {
            Ok([ours, theirs]) => report.row(
                Row::new("instructions-64B", ours, "instr/message")
                    .against("libfabric shm", theirs, ours / theirs)
                    .count(many - few)
                    .note("bar 600, aim 0.33 of shm"),
            ),
            Err(why) => report.skip("instructions-64B", &why),
        }
    }
    if args.wants("ns-64B") {
        match dir.pairs(args.size(9, 1), args.size(1_000_000, 1000)) {
            Ok((both, ratios)) => report.row(
                compared("ns-64B", "ns/message", "libfabric shm", &both)
                    .against("libfabric shm", both[1].median(), ratios.median())
                    .note(format!(
                        "bar 0.40 of shm; ratios {:.2} to {:.2} where they ran by turns",
                        ratios.quantile(0.05),
                        ratios.quantile(0.95),
                    )),
            ),
            Err(why) => report.skip("ns-64B", &why),
        }
    }
    for case in ["pingpong", "allreduce"] {
        let name = format!("openmpi-{case}-8B");
        if !args.wants(&name) {
            continue;
        }
        let count = args.size(300, 3);
        match dir.rounds(args.size(3, 1), |provider| dir.mpi(provider, case, count)) {
            Ok(both) => report
                .row(compared(&name, "ns", "tcp;ofi_rxm", &both).note("bar 0.5, aim 0.2; 2 ranks")),
            Err(why) => report.skip(&name, &why),
        }
    }
}

/// The provider that a program uses.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Provider {
    Barewire,
    /// libfabric's own: `shm` for a pair, `tcp;ofi_rxm` for MPI.
    Libfabric,
}

/// The median over barewire against the median over the other provider.
fn compared(name: &str, unit: &'static str, theirs: &str, [us, them]: &[Sample; 2]) -> Row {
    let (ours, other) = (us.median(), them.median());
    Row::new(name, ours, unit).against(theirs, other, ours / other).spread(us)
}

/// Folder of the library, and folder of the compiled C programs.
struct BenchDir {
    library: PathBuf,
    programs: PathBuf,
    segment: String,
}

impl Drop for BenchDir {
    fn drop(&mut self) {
        // A failure leaves temporary files only.
        let _ = std::fs::remove_dir_all(&self.programs);
    }
}

impl BenchDir {
    fn new() -> Result<Self, String> {
        let exe = std::env::current_exe().map_err(|why| format!("own path: {why}"))?;
        let library = exe.parent().unwrap_or(Path::new(".")).to_path_buf();
        if !library.join("libbarewire_fi.so").is_file() {
            return Err(
                "the provider is not built: cargo build --release -p barewire-provider".to_owned()
            );
        }
        if !Path::new("/usr/include/rdma/fabric.h").is_file() {
            return Err("no rdma/fabric.h: sudo apt-get install libfabric-dev".to_owned());
        }
        let programs =
            std::env::temp_dir().join(format!("barewire-bench-provider-{}", std::process::id()));
        std::fs::create_dir_all(&programs).map_err(|why| format!("{programs:?}: {why}"))?;
        let segment = format!("shm:bench-provider-{}", std::process::id());
        let dir = Self { library, programs, segment };
        dir.compile("cc", "pair.c", &["-lfabric"])?;
        Ok(dir)
    }

    /// Compiles a program of `benches/provider`.
    fn compile(&self, compiler: &str, source: &str, libs: &[&str]) -> Result<PathBuf, String> {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("provider").join(source);
        let to = self.programs.join(source.trim_end_matches(".c"));
        let mut command = Command::new(compiler);
        command.args(["-std=gnu11", "-O2", "-o"]).arg(&to).arg(from).args(libs);
        let built = command
            .output()
            .map_err(|why| format!("{compiler} does not start ({why}): see libopenmpi-dev, gcc"))?;
        if built.status.success() {
            Ok(to)
        } else {
            Err(String::from_utf8_lossy(&built.stderr).into_owned())
        }
    }

    /// A program with the environment for `provider`.
    fn command(&self, program: impl AsRef<std::ffi::OsStr>, provider: Provider) -> Command {
        let mut command = Command::new(program);
        command.env_remove("FI_PROVIDER").env_remove("FI_LOG_LEVEL").stdin(Stdio::null());
        if provider == Provider::Barewire {
            command.env("FI_PROVIDER", "barewire").env("FI_PROVIDER_PATH", &self.library);
            command.env("FI_BAREWIRE_PORT", &self.segment);
        }
        command
    }

    /// Nanoseconds per message over both providers, in interleaved blocks of a thousand in one
    /// process, and the ratio of each pair of blocks: other load on the machine affects both.
    /// Repeated in `rounds` processes, since the speed depends on the location of the memory.
    fn pairs(&self, rounds: u64, count: u64) -> Result<([Sample; 2], Sample), String> {
        let (mut both, mut ratios) = ([Sample::default(), Sample::default()], Sample::default());
        for _ in 0..rounds {
            let mut command = self.command(self.programs.join("pair"), Provider::Barewire);
            command.env("FI_PROVIDER", "barewire,shm");
            let output = output_of(command.args([&count.to_string(), "barewire", "shm"]))?;
            for line in output.lines() {
                let turn: Vec<f64> = line.split(' ').filter_map(|n| n.parse().ok()).collect();
                let [ours, theirs] = turn[..] else { return Err(format!("no turn: {line}")) };
                both[0].push(ours);
                both[1].push(theirs);
                ratios.push(ours / theirs);
            }
        }
        Ok((both, ratios))
    }

    fn mpi(&self, provider: Provider, case: &str, count: u64) -> Result<Sample, String> {
        let program = self.compile("mpicc", "mpi.c", &[])?;
        let name = if provider == Provider::Barewire { "barewire" } else { "tcp;ofi_rxm" };
        let mut command = self.command("mpirun", provider);
        command.args(["-n", "2", "--oversubscribe", "--bind-to", "core"]);
        if nix::unistd::geteuid().is_root() {
            command.arg("--allow-run-as-root");
        }
        let settings =
            [("pml", "cm"), ("mtl", "ofi"), ("mtl_ofi_provider_include", name), ("btl", "self")];
        for (key, value) in settings {
            command.args(["--mca", key, value]);
        }
        if provider == Provider::Libfabric {
            command.env("FI_TCP_IFACE", "lo");
        }
        numbers(command.arg(program).args([case, &count.to_string()]))
    }

    /// Both providers in interleaved rounds, so that other load on the machine affects both.
    fn rounds(
        &self,
        rounds: u64,
        run: impl Fn(Provider) -> Result<Sample, String>,
    ) -> Result<[Sample; 2], String> {
        let mut both = [Sample::default(), Sample::default()];
        for _ in 0..rounds {
            both[0].extend(&run(Provider::Barewire)?);
            both[1].extend(&run(Provider::Libfabric)?);
        }
        Ok(both)
    }

    /// Instructions per message over both providers: the difference of two run lengths.
    fn instructions(&self, few: u64, many: u64) -> Result<[f64; 2], String> {
        let per = |provider| {
            let [a, b] = [few, many].map(|count| self.callgrind(provider, count));
            Ok::<_, String>((b? as f64 - a? as f64) / (many - few) as f64)
        };
        Ok([per(Provider::Barewire)?, per(Provider::Libfabric)?])
    }

    fn callgrind(&self, provider: Provider, count: u64) -> Result<u64, String> {
        let name = if provider == Provider::Barewire { "barewire" } else { "shm" };
        let out = self.programs.join(format!("callgrind.{name}.{count}"));
        let mut command = self.command("valgrind", provider);
        command
            .args(["--tool=callgrind", "--quiet", "--collect-atstart=no"])
            .arg("--toggle-collect=exchange")
            .arg(format!("--callgrind-out-file={}", out.display()))
            .arg(self.programs.join("pair"))
            .args([&count.to_string(), name]);
        output_of(&mut command)?;
        let written = std::fs::read_to_string(&out).map_err(|why| format!("{out:?}: {why}"))?;
        let total = written.lines().find_map(|line| line.strip_prefix("totals: "));
        total.and_then(|n| n.trim().parse().ok()).ok_or_else(|| "nothing was counted".to_owned())
    }
}

/// The numbers that a program prints, one a line.
fn numbers(command: &mut Command) -> Result<Sample, String> {
    Ok(output_of(command)?.lines().filter_map(|line| line.trim().parse().ok()).collect())
}

/// The standard output of a program.
fn output_of(command: &mut Command) -> Result<String, String> {
    let ran = command.output().map_err(|why| format!("{:?}: {why}", command.get_program()))?;
    if !ran.status.success() {
        let output = String::from_utf8_lossy(&ran.stderr);
        return Err(output.lines().next_back().unwrap_or("it failed").to_owned());
    }
    Ok(String::from_utf8_lossy(&ran.stdout).into_owned())
}
