//! A rank that computes, sleeps or, over memory, is stopped is not taken for dead, and one that was
//! killed while it computed is, in time: with three MPIs, over memory, over `udp`, and over
//! `afpacket` with each rank in a network namespace of its own.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use barewire_tests::nodes::{FABRIC, Nodes, or_skip};
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use super::ranks::{Mpi, nightly, with_each};
use super::{Bench, compile, succeed};

/// T_dead in milliseconds.
fn t_dead_ms() -> u32 {
    if nightly() { 2000 } else { 500 }
}

/// Three times T_dead.
fn away() -> Duration {
    Duration::from_millis(u64::from(3 * t_dead_ms()))
}

/// What the ranks reach each other through.
#[derive(Clone, Copy, Debug)]
enum Way {
    Memory,
    Udp,
    Namespaces,
}

/// Nodes of ranks, and the last, whose two bridges join them: one for the fabric, one for
/// what the launcher and the ranks say to each other.
pub(super) struct Network {
    pub(super) nodes: Nodes,
    pub(super) switch: usize,
    /// They keep the nodes, and tell `nsenter` of them.
    holders: Vec<Child>,
}

/// The launcher's side of the second bridge, and the ranks'.
const CONTROL: &str = "ctl0";

impl Network {
    pub(super) fn new(count: usize) -> Result<Self, String> {
        let (nodes, switch) = (Nodes::new(count + 1)?, count);
        nodes.bridge(switch, "br0", 1500)?;
        nodes.bridge(switch, CONTROL, 1500)?;
        nodes.ip(switch, &format!("addr add 10.79.0.100/24 dev {CONTROL}"))?;
        for node in 0..count {
            let (port, control) = (format!("port{node}"), format!("line{node}"));
            nodes.veth([(node, FABRIC), (switch, &port)], 1500)?;
            nodes.veth([(node, CONTROL), (switch, &control)], 1500)?;
            nodes.plug(switch, &port, "br0")?;
            nodes.plug(switch, &control, CONTROL)?;
            nodes.ip(node, &format!("addr add 10.79.0.{}/24 dev {CONTROL}", node + 1))?;
        }
        let holder = |node| {
            let mut command = nodes.command(node, "sleep");
            command.arg("10000").stdin(Stdio::null()).spawn().map_err(|e| format!("sleep: {e}"))
        };
        let holders = (0..count).map(holder).collect::<Result<_, _>>()?;
        Ok(Self { nodes, switch, holders })
    }

    /// Has Open MPI's launcher listen where the nodes reach it.
    pub(super) fn let_launch(&self, command: &mut Command) {
        command.env("PMIX_MCA_ptl_base_remote_connections", "1");
        command.env("PMIX_MCA_ptl_base_if_include", CONTROL);
    }

    /// A script that runs its arguments in the node of the rank; each has so many, one after the
    /// other.
    pub(super) fn script(&self, dir: &Path, per_node: usize) -> PathBuf {
        let pids: Vec<_> = self.holders.iter().map(|holder| holder.id().to_string()).collect();
        let script = format!(
            "#!/bin/sh\nrank=${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}\nfor pid in {}; do\n\
             [ $rank -lt {per_node} ] && exec nsenter --net=/proc/$pid/ns/net \"$@\"\n\
             rank=$((rank - {per_node}))\ndone\n",
            pids.join(" ")
        );
        write_script(dir.join("in-node"), &script)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for holder in &mut self.holders {
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}

fn write_script(path: PathBuf, script: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// The program, compiled for one MPI.
struct Job<'a> {
    mpi: &'a Mpi,
    bench: &'a Bench,
    dir: tempfile::TempDir,
    program: PathBuf,
}

impl<'a> Job<'a> {
    /// `None`, with a line that says why, where there is no compiler for it.
    fn new(mpi: &'a Mpi, bench: &'a Bench) -> Option<Self> {
        Self::of(mpi, bench, "computes.c")
    }

    /// As [`new`](Self::new), of another program.
    fn of(mpi: &'a Mpi, bench: &'a Bench, source: &str) -> Option<Self> {
        let compiler = mpi.compiler();
        if !super::has("cc") || !(super::has(&compiler) || Path::new(&compiler).is_file()) {
            println!("SKIPPED: no {compiler}: sudo apt-get install gcc libopenmpi-dev");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let program = compile(dir.path(), &[&compiler], source);
        Some(Self { mpi, bench, dir, program })
    }

    /// The launcher's command line, up to the program of the ranks. `None` if there is no such way
    /// here; the network lives as long as the job.
    fn launch(&self, way: Way, ranks: u32) -> Option<(Command, Option<Network>)> {
        let network = match way {
            Way::Namespaces => Some(or_skip(Network::new(ranks as usize))?),
            _ => None,
        };
        let launcher = &self.mpi.launcher;
        let command = match &network {
            Some(network) => network.nodes.command(network.switch, launcher),
            None => Command::new(launcher),
        };
        let mut command = self.mpi.launch(self.bench.using(command), ranks);
        self.mpi.pass(&mut command, "FI_BAREWIRE_T_DEAD_MS", &t_dead_ms().to_string());
        match way {
            Way::Memory => {}
            Way::Udp => drop(command.env("FI_BAREWIRE_PORT", "udp:127.0.0.1,near=no")),
            Way::Namespaces => {
                command.env("FI_BAREWIRE_PORT", format!("afpacket:{FABRIC}"));
            }
        }
        if let Some(network) = &network {
            network.let_launch(&mut command);
            command.arg(network.script(self.dir.path(), 1));
        }
        Some((command, network))
    }

    fn computes(&self, way: Way, ranks: u32, mode: &str) {
        let Some((mut command, _network)) = self.launch(way, ranks) else { return };
        let start = Instant::now();
        command.arg(&self.program).args([mode, &away().as_secs_f64().to_string()]);
        let said = succeed(&mut command, 240);
        let alive = format!("all {ranks} ranks are alive");
        assert!(said.contains(&alive), "{}, {way:?}, {ranks} ranks: {said}", self.mpi.name);
        let took = start.elapsed().as_secs_f64();
        println!("{}, {way:?}, {ranks} ranks, {mode}: {took:.1} s", self.mpi.name);
    }
}

fn ranks_that_compute_live(way: Way) {
    with_each(|mpi, bench| {
        let Some(job) = Job::new(mpi, bench) else { return };
        job.computes(way, 3, "all");
        if nightly() {
            job.computes(way, 2, "all");
            job.computes(way, 4, "all");
            job.computes(way, 3, "each");
        }
    });
}

/// Goal: a rank that computes or sleeps for three times T_dead is not taken for dead, in the middle
/// of eager messages, a rendezvous, one-sided and atomic operations and collectives. Every run ends
/// right.
#[test]
fn ranks_that_compute_live_over_memory() {
    ranks_that_compute_live(Way::Memory);
}

/// As [`ranks_that_compute_live_over_memory`]; their receive threads answer.
#[test]
fn ranks_that_compute_live_over_udp() {
    ranks_that_compute_live(Way::Udp);
}

/// As [`ranks_that_compute_live_over_udp`], over Ethernet between network namespaces.
#[test]
fn ranks_that_compute_live_between_namespaces() {
    ranks_that_compute_live(Way::Namespaces);
}

fn lines_of(child: &mut Child) -> impl Iterator<Item = String> + use<> {
    BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok)
}

/// Ends the child if it still runs after so long.
fn end_after(child: &Child, limit: Duration) -> impl FnOnce() + use<> {
    let pid = Pid::from_raw(child.id() as i32);
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let watcher = std::thread::spawn(move || {
        if stopped.recv_timeout(limit).is_err() {
            let _ = nix::sys::signal::kill(pid, Signal::SIGTERM);
        }
    });
    move || {
        let _ = stop.send(());
        let _ = watcher.join();
    }
}

/// Goal: a rank that is stopped for three times T_dead in the middle of traffic of every kind lives
/// over memory: the others wait for it and the job ends right.
#[test]
fn stopped_ranks_live_over_memory() {
    with_each(|mpi, bench| {
        let Some(job) = Job::new(mpi, bench) else { return };
        let stops = if nightly() { 3 } else { 1 };
        let Some((mut command, _)) = job.launch(Way::Memory, 3) else { return };
        let seconds = 0.5 + f64::from(stops) * (away().as_secs_f64() + 0.3);
        command.arg(&job.program).args(["traffic", &seconds.to_string()]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let done = end_after(&child, Duration::from_secs_f64(60.0 + seconds));
        let mut lines = lines_of(&mut child);
        let pids: Vec<i32> = (&mut lines)
            .filter_map(|line| line.strip_prefix("pid ")?.trim().parse().ok())
            .take(3)
            .collect();
        for &pid in pids.iter().rev().take(stops as usize) {
            std::thread::sleep(Duration::from_millis(200));
            nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap();
            std::thread::sleep(away());
            nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGCONT).unwrap();
        }
        let said: Vec<_> = lines.collect();
        let status = child.wait().unwrap();
        done();
        assert!(status.success(), "{}: {status}, {said:?}", mpi.name);
        assert!(said.iter().any(|l| l == "all 3 ranks are alive"), "{}: {said:?}", mpi.name);
        println!("{}: {stops} stops, {}", mpi.name, said[0]);
    });
}

/// Goal: the others are told of the death of a rank that was killed while it computed, after
/// T_dead, two gaps between their polls and 100 ms at the latest, over memory after two gaps and
/// 100 ms; one polls without a pause, one every 50 ms. Method: the launcher does not see it, since
/// what it has started goes on for some seconds.
#[test]
fn a_killed_rank_that_computed_is_told_of_in_time() {
    with_each(|mpi, bench| {
        let Some(job) = Job::new(mpi, bench) else { return };
        let outlives = "#!/bin/sh\nsetsid -w \"$@\"\nexec sleep 10 > /dev/null\n";
        let outlives = write_script(job.dir.path().join("outlives"), outlives);
        let ways: &[Way] = if nightly() {
            &[Way::Memory, Way::Udp, Way::Namespaces]
        } else {
            &[Way::Memory, Way::Namespaces]
        };
        for &way in ways {
            let Some((mut command, _network)) = job.launch(way, 3) else { continue };
            let bound = match way {
                Way::Memory => 0.1,
                _ => f64::from(t_dead_ms()) / 1e3 + 0.1,
            };
            let verdicts = tempfile::tempdir().unwrap();
            command.arg(&outlives).arg(&job.program).args(["killed", &bound.to_string()]);
            command.arg(verdicts.path()).stdout(Stdio::null()).stderr(Stdio::null());
            let mut child = command.spawn().unwrap();
            // With MPICH the first that is told ends the job, and with it, at times, the other.
            let most = if mpi.name == "mpich" { 1 } else { 2 };
            let until = Instant::now() + Duration::from_secs(90);
            let verdict = |rank| std::fs::read_to_string(verdicts.path().join(rank)).ok();
            let told = loop {
                let told: Vec<_> = ["rank1", "rank2"].into_iter().filter_map(verdict).collect();
                if told.len() >= most {
                    break told.concat();
                }
                assert!(Instant::now() < until, "{}, {way:?}: {told:?}", mpi.name);
                std::thread::sleep(Duration::from_millis(10));
            };
            let _ = nix::sys::signal::kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM);
            child.wait().unwrap();
            assert!(!told.contains("WRONG"), "{}, {way:?}: {told}", mpi.name);
            println!("{}, {way:?}: {}", mpi.name, told.trim_end().replace('\n', "; "));
        }
    });
}

/// Bytes that a program could still use.
fn memory_available() -> u64 {
    let all = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = all.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// Memory that two ranks with a message of 2 GiB need, half of it holes.
const LARGE_NEEDS: u64 = 16 << 30;

/// Goal: a rank that packs, copies or unpacks for longer than T_dead is not taken for dead. Method:
/// a message of 1 KiB, one of a little more than 2 GiB, and as many bytes with a hole behind each,
/// which an MPI packs: what MPICH's `pt2pt_large` does in its three options. Nightly in full, else
/// with 64 MiB.
#[test]
fn large_messages_arrive() {
    let available = memory_available();
    if nightly() && available < LARGE_NEEDS {
        println!("SKIPPED: {} GiB of memory are free, 16 are needed", available >> 30);
        return;
    }
    let large: u64 = if nightly() { (2 << 30) + 99 } else { (64 << 20) + 99 };
    with_each(|mpi, bench| {
        // Open MPI has no calls with large counts.
        if mpi.name != "mpich" {
            return;
        }
        let Some(job) = Job::of(mpi, bench, "large.c") else { return };
        for way in [Way::Memory, Way::Udp] {
            for (count, stride) in [(1024, "1"), (large, "1"), (large, "2")] {
                let Some((mut command, _)) = job.launch(way, 2) else { return };
                let start = Instant::now();
                command.arg(&job.program).args([&count.to_string(), stride]);
                let said = succeed(&mut command, 240);
                let right = format!("all {count} bytes are right");
                assert!(said.contains(&right), "{}, {way:?}, stride {stride}: {said}", mpi.name);
                let took = start.elapsed().as_secs_f64();
                println!("{}, {way:?}, {count} bytes, stride {stride}: {took:.1} s", mpi.name);
            }
        }
    });
}
