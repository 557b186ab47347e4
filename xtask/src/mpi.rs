//! `cargo xtask mpi`: prints and runs the command line that starts an MPI or SHMEM program over
//! barewire, on one host or several.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

use crate::cluster::Cluster;
use crate::nodes::FABRIC;
use crate::packages::in_path;
use crate::{cargo, mpi_coll, root, target_dir};

mod line;

use line::{Coll, Job, Line, Mpi, Spread};

/// What to run, where, and under which MPI.
#[derive(clap::Args)]
#[command(after_help = "\
Prints the command line before it runs it: copied to a shell, it does the same without cargo.
PROGRAM has to be compiled with the mpicc that belongs to the launcher in PATH.

--nodes makes hosts on this machine, network namespaces with a NIC, a name and a /dev/shm of their
own, and runs the line there that --hosts would run on as many machines. Machines need ssh without
a password, PROGRAM and the provider in the same place (or the package), and a port whose name is
the same on all of them.

Examples:
  cargo xtask mpi -n 4 -- ./program --its-option
  cargo xtask mpi -n 4 --coll -- ./program
  cargo xtask mpi --nodes 2 --ranks-per-node 4 -- ./program
  cargo xtask mpi --nodes 2 --ranks-per-node 4 --port udp:fab0 -- ./program
  cargo xtask mpi --nodes 2 --ranks-per-node 3 --switch -- ./program
  cargo xtask mpi --hosts hosts --ranks-per-node 4 --port afpacket:eth0 -- ./program
  cargo xtask mpi --hosts hosts --port vfio:0000:05:00.0 --switch --print -- ./program
  cargo xtask mpi --nodes 2 --srun --print -- ./program
  PATH=\"$HOME/venv/bin:$PATH\" cargo xtask mpi --mpi mpich5 -- python3 script.py
  PATH=\"$HOME/venv/bin:$PATH\" cargo xtask mpi --mpi mpich5 --coll -n 4 -- ./program")]
pub(crate) struct MpiArgs {
    /// What launches.
    #[arg(long, value_enum, default_value_t = Mpi::Openmpi)]
    mpi: Mpi,
    /// Ranks on this machine [default: 2].
    #[arg(short, conflicts_with_all = ["nodes", "hosts"])]
    n: Option<usize>,
    /// So many hosts, made of network namespaces of this machine.
    #[arg(long, conflicts_with = "hosts", value_parser = clap::value_parser!(u8).range(1..=64))]
    nodes: Option<u8>,
    /// Hosts that this file names, one a line.
    #[arg(long, value_name = "FILE")]
    hosts: Option<PathBuf>,
    /// Ranks on each host.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks_per_node: u16,
    /// The port, the same on all hosts, such as afpacket:eth0 [default: shm, with --nodes
    /// afpacket:fab0].
    #[arg(long)]
    port: Option<String>,
    /// A `barewire switch` on each host owns the port's device: started with --nodes, said with
    /// --hosts.
    #[arg(long)]
    switch: bool,
    /// Says, or has, Slurm start the ranks.
    #[arg(long)]
    srun: bool,
    /// Has barewire's collectives called: builds the component of Open MPI 4.1, or the library for
    /// another MPI with the mpicc in PATH.
    #[arg(long)]
    coll: bool,
    /// Only prints the command line.
    #[arg(long)]
    print: bool,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    program: Vec<String>,
}

/// Builds the provider and runs the program over it; the exit code is the launcher's.
///
/// # Errors
/// The missing piece, with the command that installs it.
pub(crate) fn run(args: &MpiArgs) -> Result<ExitCode, String> {
    let (port, spread) = (port(args)?, spread(args)?);
    let library = target_dir().join("release");
    let ranks = spread.as_ref().map(|spread| spread.host_count * spread.per_node);
    let mut job = Job {
        mpi: args.mpi,
        ranks: ranks.or(args.n).unwrap_or(2),
        spread,
        port: &port,
        library: &library,
        is_root: nix::unistd::geteuid().is_root(),
        agent: None,
        coll: None,
        program: &args.program,
    };
    if args.coll {
        job.coll = Some(coll(args.mpi, &library)?);
    }
    let line = if args.srun { job.srun() } else { job.line() };
    if args.switch && job.spread.is_some() {
        println!("# on every host, until the jobs are over:\nbarewire switch --port {port}");
    }
    println!("{}", line.shell());
    if args.print {
        return Ok(ExitCode::SUCCESS);
    }
    if !in_path(&line.words[0]) {
        let hint = if args.srun { "leave --srun out where no Slurm is" } else { args.mpi.hint() };
        return Err(format!("no {}: {hint}", line.words[0]));
    }
    build("barewire-provider")?;
    let Some(nodes) = args.nodes.filter(|_| !args.srun) else {
        return start(Command::new(&line.words[0]), &line);
    };
    if args.switch {
        build("barewire-cli")?;
    }
    let dir = target_dir().join("xtask").join(format!("mpi-{}", std::process::id()));
    let ended = on_namespaces(&mut job, nodes.into(), args.switch, &dir);
    // The files of the job are no longer needed.
    let _ = std::fs::remove_dir_all(dir);
    ended
}

/// Builds the collectives module for `mpi`, below `library`.
fn coll(mpi: Mpi, library: &Path) -> Result<Coll, String> {
    let sources = root().join("mpi");
    let dir = match mpi {
        Mpi::Openmpi => {
            let component = mpi_coll::component(&root(), &library.join("openmpi4"))?;
            return Ok(Coll::Components(mpi_coll::component_path(&component)));
        }
        Mpi::Openmpi5 => "openmpi5",
        Mpi::Mpich5 => "mpich5",
        Mpi::Sos => return Err("--coll: the collectives are those of an MPI".to_owned()),
    };
    if !in_path("mpicc") {
        return Err(format!("no mpicc: {}", mpi.hint()));
    }
    mpi_coll::library("mpicc", &sources, &library.join(dir)).map(Coll::Library)
}

/// The requested port, or the default one.
fn port(args: &MpiArgs) -> Result<String, String> {
    let several = args.nodes.is_some() || args.hosts.is_some();
    let port = match &args.port {
        Some(port) => port.clone(),
        None if args.nodes.is_some() => format!("afpacket:{FABRIC}"),
        None if several => {
            return Err(
                "which port do the hosts have? --port afpacket:eth0, or udp:eth0".to_owned()
            );
        }
        None => "shm".to_owned(),
    };
    if several && port.starts_with("shm") {
        return Err(format!("{port} joins processes of one host; write --port afpacket:eth0"));
    }
    if args.switch && !several {
        return Err("a switch serves the ranks of a host: --nodes 2 --switch".to_owned());
    }
    if args.switch && port.starts_with("udp:") {
        return Err("udp: needs no switch; leave --switch out".to_owned());
    }
    Ok(port)
}

/// The hosts, if there are several.
fn spread(args: &MpiArgs) -> Result<Option<Spread>, String> {
    let per_node = args.ranks_per_node.into();
    if let Some(nodes) = args.nodes {
        return Ok(Some(Spread { file: "hosts".into(), host_count: nodes.into(), per_node }));
    }
    let Some(file) = args.hosts.clone() else { return Ok(None) };
    let hint = format!("write one: printf 'node1\\nnode2\\n' > {}", file.display());
    let text = std::fs::read_to_string(&file)
        .map_err(|why| format!("{}: {why}; {hint}", file.display()))?;
    let names = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
    match names.count() {
        0 => Err(format!("{} names no host; {hint}", file.display())),
        host_count => Ok(Some(Spread { file, host_count, per_node })),
    }
}

fn build(package: &str) -> Result<(), String> {
    let built = Command::new(cargo())
        .args(["build", "--release", "--quiet", "--package", package])
        .current_dir(root())
        .stdin(Stdio::null())
        .status()
        .map_err(|why| format!("cargo does not start: {why}"))?;
    if built.success() { Ok(()) } else { Err(format!("{package} does not build")) }
}

/// Runs `command` with the words of the line.
fn start(mut command: Command, line: &Line) -> Result<ExitCode, String> {
    command.args(&line.words[1..]).envs(line.env.iter().cloned());
    let status = command.status().map_err(|why| format!("{}: {why}", line.words[0]))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Ok(ExitCode::from(code))
}

/// Creates the namespaces, runs the job on them, and prints the command line.
fn on_namespaces(
    job: &mut Job<'_>,
    nodes: usize,
    switch: bool,
    dir: &Path,
) -> Result<ExitCode, String> {
    std::fs::create_dir_all(dir).map_err(|why| format!("{}: {why}", dir.display()))?;
    let cluster = Cluster::new(nodes, dir)?;
    if let Some(spread) = &mut job.spread {
        spread.file = cluster.hosts_file("")?;
    }
    job.agent = Some(cluster.agent());
    // Every process is root in a user namespace.
    job.is_root = true;
    let mut switches = Vec::new();
    for node in 0..if switch { nodes } else { 0 } {
        switches.push(Switch::start(&cluster, node, job.port)?);
    }
    let line = job.line();
    println!("# here, on {nodes} network namespaces:\n{}", line.shell());
    start(cluster.on_head(&line.words[0]), &line)
}

/// A switch process, killed on drop.
struct Switch(Child);

impl Switch {
    /// Starts the switch; returns once it owns the device.
    fn start(cluster: &Cluster, node: usize, port: &str) -> Result<Self, String> {
        let mut command = cluster.command(node, target_dir().join("release/barewire"));
        command.args(["switch", "--port", port]).stdin(Stdio::null()).stdout(Stdio::null());
        let mut child = command.stderr(Stdio::piped()).spawn().map_err(|e| e.to_string())?;
        let line = child.stderr.take().and_then(|stderr| BufReader::new(stderr).lines().next());
        let switch = Self(child);
        match line {
            Some(Ok(line)) if line.starts_with("a switch on") => Ok(switch),
            Some(Ok(line)) => Err(line),
            _ => Err(format!("no switch on {port}")),
        }
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Called {
        #[command(flatten)]
        args: MpiArgs,
    }

    fn parsed(words: &str) -> MpiArgs {
        let words = format!("mpi {words} -- ./program");
        Called::try_parse_from(words.split_whitespace()).unwrap().args
    }

    #[test]
    fn the_port_is_what_the_hosts_have() {
        assert_eq!(port(&parsed("")).unwrap(), "shm");
        assert_eq!(port(&parsed("--nodes 2")).unwrap(), "afpacket:fab0");
        assert_eq!(port(&parsed("--nodes 2 --port udp:fab0")).unwrap(), "udp:fab0");
        for (words, cure) in [
            ("--hosts x", "--port afpacket:eth0"),
            ("--nodes 2 --port shm:job7", "--port afpacket:eth0"),
            ("--switch", "--nodes 2 --switch"),
            ("--nodes 2 --switch --port udp:fab0", "leave --switch out"),
        ] {
            let error = port(&parsed(words)).unwrap_err();
            assert!(error.contains(cure), "{words}: {error}");
        }
    }

    #[test]
    fn hosts_are_counted() {
        let file = std::env::temp_dir().join(format!("xtask-hosts-{}", std::process::id()));
        let args = parsed(&format!("--hosts {} --ranks-per-node 3", file.display()));
        let error = spread(&args).unwrap_err();
        assert!(error.contains("printf 'node1"), "{error}");
        std::fs::write(&file, "# ours\nnode1\n\nnode2\n").unwrap();
        let spread = spread(&args).unwrap().unwrap();
        assert_eq!((spread.host_count, spread.per_node), (2, 3));
        std::fs::remove_file(file).unwrap();
    }
}
