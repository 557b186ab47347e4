//! Several hosts of several ranks each, which share their host's one NIC: three MPIs as users start
//! them, with a file of hosts and the port's name, the same on all. Hosts are namespaces.

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use barewire_driver::open::{SwitchAccess, open_switch};
use barewire_tests::cluster::Cluster;
use barewire_tests::nodes::{FABRIC, or_skip};

use super::ranks::{MODULES, Mpi, nightly, ran, suite_of_mpi4py, with_each};
use super::{Bench, compile, finish, succeed, text};

/// Hosts with their files, which go with them.
pub(super) struct Hosts {
    cluster: Cluster,
    /// T_dead of the ranks, milliseconds, if it is not the default.
    t_dead_ms: Option<u32>,
    /// The file of the ranks' key, the same name on each host.
    key_file: Option<PathBuf>,
    _dir: tempfile::TempDir,
}

impl Hosts {
    pub(super) fn new(count: usize) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let cluster = or_skip(Cluster::new(count, dir.path()))?;
        Some(Self { cluster, t_dead_ms: None, key_file: None, _dir: dir })
    }

    /// Has ranks wait longer than a loaded machine takes to start a switch: up to 4 s were seen.
    pub(super) fn patient(self) -> Self {
        Self { t_dead_ms: Some(20_000), ..self }
    }

    /// Gives each host a file with this key.
    fn with_key(self, key: [u8; 32]) -> Self {
        for node in 0..self.cluster.count() {
            let mut options = std::fs::OpenOptions::new();
            let options = options.write(true).create(true).truncate(true).mode(0o600);
            let mut file = options.open(self.cluster.dir_of(node).join("job.key")).unwrap();
            file.write_all(&key).unwrap();
        }
        let key_file = Some(self.cluster.own().join("job.key"));
        Self { key_file, ..self }
    }

    /// The launcher's command for so many ranks on each host, but for the program.
    pub(super) fn launch(&self, mpi: &Mpi, bench: &Bench, per_node: usize) -> Command {
        let mut command = mpi.launch_on(&self.cluster, bench, per_node);
        // Says why an operation failed.
        mpi.pass(&mut command, "FI_LOG_LEVEL", "warn");
        mpi.pass(&mut command, "FI_LOG_PROV", "barewire");
        if let Some(ms) = self.t_dead_ms {
            mpi.pass(&mut command, "FI_BAREWIRE_T_DEAD_MS", &ms.to_string());
        }
        if let Some(file) = &self.key_file {
            mpi.pass(&mut command, "FI_BAREWIRE_KEY_FILE", &file.to_string_lossy());
        }
        command
    }

    /// Runs every kind of call with so many ranks on each host.
    fn agree(&self, mpi: &Mpi, bench: &Bench, per_node: usize, port: &str, args: &[&str]) {
        let (hosts, begun) = (self.cluster.count(), std::time::Instant::now());
        let mut command = self.launch(mpi, bench, per_node);
        mpi.program(&mut command, args);
        let said = succeed(command.env("FI_BAREWIRE_PORT", port), 120);
        let what = format!("{}, {port}, {hosts} x {per_node}, {args:?}", mpi.name);
        let each = format!("ranks on each host:{}", format!(" {per_node}").repeat(hosts));
        let agree = format!("all {} ranks agree", hosts * per_node);
        assert!(said.contains(&each) && said.contains(&agree), "{what}: {said}");
        println!("{what}: {:.1} s", begun.elapsed().as_secs_f64());
    }
}

/// Hosts, ranks on each, and what they do.
type Size = (usize, usize, [&'static str; 2]);

/// Runs every MPI on so many hosts, which `equip` prepares, over a port.
fn every_mpi<T>(sizes: &[Size], port: impl Fn(&Hosts) -> String, equip: impl Fn(&Hosts) -> T) {
    for &(count, per_node, args) in sizes {
        let Some(hosts) = Hosts::new(count) else { return };
        let (port, equipment) = (port(&hosts), equip(&hosts));
        with_each(|mpi, bench| hosts.agree(mpi, bench, per_node, &port, &args));
        drop(equipment);
    }
}

/// Two hosts of two ranks and all kinds of calls; larger jobs without windows.
const SMALL: [Size; 1] = [(2, 2, ["all", "4096"])];
const LARGER: [Size; 2] = [(2, 4, ["two-sided", "64"]), (4, 2, ["two-sided", "64"])];
const NIGHTLY: [Size; 4] = [
    (2, 2, ["all", "1048576"]),
    (2, 4, ["all", "65536"]),
    (4, 2, ["all", "65536"]),
    (4, 4, ["all", "4096"]),
];

fn sizes(small: &[Size]) -> &[Size] {
    if nightly() { &NIGHTLY } else { small }
}

/// Goal: two ranks on each of two hosts send, receive from anybody, share windows and do all
/// collectives over one raw Ethernet interface a host; more ranks and hosts do so without windows.
/// Row X75: several ranks of a host and one NIC.
#[test]
fn every_mpi_on_hosts_over_afpacket() {
    let by_day = [SMALL.as_slice(), &LARGER].concat();
    every_mpi(sizes(&by_day), |_| format!("afpacket:{FABRIC}"), |_| ());
}

#[test]
fn every_mpi_on_hosts_over_udp() {
    every_mpi(sizes(&SMALL), |_| format!("udp:{FABRIC}"), |_| ());
}

/// Goal: a key file is the only setting that MPI needs for sealed frames between hosts.
#[test]
fn every_mpi_with_a_key_file() {
    let port = format!("afpacket:{FABRIC}");
    let Some(hosts) = Hosts::new(2) else { return };
    let hosts = hosts.with_key([7; 32]);
    with_each(|mpi, bench| hosts.agree(mpi, bench, 2, &port, &["all", "4096"]));
}

/// Variables with the port of a switch, and with those that a hub joins.
pub(super) const SWITCH: &str = "BAREWIRE_TEST_SWITCH";
const HUB: &str = "BAREWIRE_TEST_HUB";

/// Frames that a switch has forwarded when it says that it serves, and how long it may take to.
const SERVED: usize = 64;
const SERVED_WITHIN: Duration = Duration::from_secs(1);

/// Not a test but a switch, until it is killed; passes at once when nobody asked for one.
#[test]
fn switch_process() {
    let Ok(port) = std::env::var(SWITCH) else { return };
    let mut switch = open_switch(&port, &SwitchAccess::default()).unwrap();
    println!("@@up");
    let (mut idle, mut forwarded, mut says) = (0, 0, true);
    let begun = std::time::Instant::now();
    loop {
        let frames = switch.turn().unwrap();
        idle = if frames > 0 { 0 } else { idle + 1 };
        forwarded += frames;
        if says && (forwarded >= SERVED || begun.elapsed() > SERVED_WITHIN) {
            println!("@@serves");
            says = false;
        }
        if idle >= 100 {
            switch.sleep(Duration::from_millis(10));
        }
    }
}

/// Not a test but a hub in the place of VPP, until it is killed: what comes on one port goes out on
/// all others.
#[test]
fn hub_process() {
    let Ok(ports) = std::env::var(HUB) else { return };
    let open = |port| barewire_driver::open::open(port).unwrap();
    let mut ports: Vec<_> = ports.split(' ').map(open).collect();
    println!("@@up");
    let mut idle = 0;
    loop {
        let mut frames = Vec::new();
        for (from, port) in ports.iter_mut().enumerate() {
            let mut sink = |frame: &barewire_driver::frame::RxFrame<'_>| {
                let mut bytes = vec![0; frame.len()];
                frame.copy_to(0, &mut bytes);
                frames.push((from, bytes));
            };
            port.rx_burst(64, &mut sink).unwrap();
        }
        idle = if frames.is_empty() { idle + 1 } else { 0 };
        for (from, bytes) in frames {
            for (to, port) in ports.iter_mut().enumerate().filter(|(to, _)| *to != from) {
                // One that finds no room is lost.
                let frame = barewire_driver::frame::TxFrame::whole(&bytes);
                port.tx(&frame).unwrap_or_else(|e| panic!("port {to}: {e}"));
            }
        }
        ports.iter_mut().for_each(|port| port.flush().unwrap());
        if idle >= 100 {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

/// A process of this program that runs until it is dropped.
pub(super) struct Helper {
    child: Child,
    /// Kept also when nobody reads what it says, so that its pipe does not break.
    out: BufReader<ChildStdout>,
}

impl Helper {
    /// Starts the test `role` on a host, or on the head; returns when it is up.
    pub(super) fn start(
        hosts: &Hosts,
        node: usize,
        role: &str,
        variable: &str,
        value: &str,
    ) -> Self {
        let mut command = hosts.cluster.command(node, std::env::current_exe().unwrap());
        command.args(["--exact", &format!("hosts::{role}"), "--nocapture"]).env(variable, value);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let mut helper = Self { child, out };
        assert!(helper.says("@@up"), "no {role} on node {node}");
        helper
    }

    /// Waits until it says so; false if it ends without.
    pub(super) fn says(&mut self, word: &str) -> bool {
        self.out.by_ref().lines().map_while(Result::ok).any(|line| line.contains(word))
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A switch on every host.
pub(super) fn switches(hosts: &Hosts, port: &str) -> Vec<Helper> {
    let start = |node| Helper::start(hosts, node, "switch_process", SWITCH, port);
    (0..hosts.cluster.count()).map(start).collect()
}

/// Goal: where one process owns a host's NIC, MPI runs as it does elsewhere, with the same setting.
#[test]
fn every_mpi_behind_switches_on_afpacket() {
    let port = format!("afpacket:{FABRIC}");
    every_mpi(sizes(&SMALL), |_| port.clone(), |hosts| switches(hosts, &port));
}

/// A user without a privilege.
const SOMEBODY: u32 = 65_534;

/// Goal: an ordinary user runs MPI over a NIC that root's switches own, and sets nothing for that:
/// messages, receives from anybody, collectives and windows; without a switch he is told of it.
/// Method: what the launcher starts on the hosts is his.
#[test]
fn every_mpi_of_a_user_without_privileges_behind_roots_switches() {
    let Some(hosts) = Hosts::new(2) else { return };
    let port = format!("afpacket:{FABRIC}");
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    with_each(|mpi, bench| {
        let is_root = nix::unistd::geteuid().is_root().then_some(());
        let users = is_root.ok_or("only root can be several users".to_owned());
        let log_in = |()| hosts.cluster.log_in(SOMEBODY, &bench.library());
        if or_skip(users.and_then(log_in)).is_none() {
            return;
        }
        let program = compile(dir.path(), &[&mpi.compiler()], "mpi.c");
        let run = || {
            let mut command = hosts.launch(mpi, bench, 2);
            command.arg(&program).arg("small").env("FI_BAREWIRE_PORT", &port);
            let output = finish(&mut command, 120);
            (output.status.success(), text(&output))
        };
        let (good, said) = run();
        let mend = format!("sudo barewire switch --port {port}");
        assert!(!good && said.contains(&mend), "{}: {said}", mpi.name);
        let switches = switches(&hosts, &port);
        let (good, said) = run();
        assert!(good && said.contains("all 4 ranks agree"), "{}: {said}", mpi.name);
        drop(switches);
    });
}

/// The same where the NIC is a memif, as into VPP; all hosts find its socket at the same place.
#[test]
fn every_mpi_behind_switches_on_memif() {
    // The segment of a host is joined only if it is asked for, as a memif leads to one process.
    let port = |hosts: &Hosts| {
        format!("memif:{},near=yes", hosts.cluster.own().join("memif.sock").display())
    };
    every_mpi(sizes(&SMALL), port, |hosts| {
        let cluster = &hosts.cluster;
        let server = |node| {
            let socket = cluster.dir_of(node).join("memif.sock");
            format!("memif:{},role=server", socket.display())
        };
        let ports: Vec<String> = (0..cluster.count()).map(server).collect();
        let hub = Helper::start(hosts, cluster.count(), "hub_process", HUB, &ports.join(" "));
        let device = port(hosts).replace(",near=yes", "");
        (switches(hosts, &device), hub)
    });
}

/// The same where the NIC is a device of DPDK: a tap, which joins a bridge of its host.
#[cfg(feature = "dpdk")]
#[test]
fn every_mpi_behind_switches_on_taps() {
    let device = "dpdk:net_tap0,iface=bw0";
    let port = |_: &Hosts| "dpdk(near=yes):net_tap0,iface=bw0".to_owned();
    every_mpi(sizes(&SMALL), port, |hosts| {
        let switches = switches(hosts, device);
        let nodes = hosts.cluster.nodes();
        for node in 0..hosts.cluster.count() {
            nodes.bridge(node, "br1", 1500).unwrap();
            nodes.plug(node, FABRIC, "br1").unwrap();
            nodes.plug(node, "bw0", "br1").unwrap();
        }
        switches
    });
}

/// Goal: a switch that is killed and started again under a job costs it nothing but time. Method:
/// the switches of two hosts are killed by turns, each after it has served, since on a machine
/// without a free processor the frames of a job need longer than a pause.
#[test]
fn every_mpi_while_switches_are_killed() {
    let port = format!("afpacket:{FABRIC}");
    let Some(hosts) = Hosts::new(2).map(Hosts::patient) else { return };
    with_each(|mpi, bench| {
        let mut helpers = switches(&hosts, &port);
        let (done, is_done) = channel();
        let start = |node| Helper::start(&hosts, node, "switch_process", SWITCH, &port);
        let (helpers, start) = (&mut helpers, &start);
        let kills = std::thread::scope(|scope| {
            // Goes with this closure, also when the job fails, and ends the killer.
            let done: Sender<()> = done;
            let killer = scope.spawn(move || {
                let mut kills = 0;
                let pause = Duration::from_millis(200);
                while let Err(RecvTimeoutError::Timeout) = is_done.recv_timeout(pause) {
                    let node = kills % 2;
                    assert!(helpers[node].says("@@serves"), "the switch of node {node} ended");
                    drop(helpers.swap_remove(node));
                    // They end with this thread, and so before the next MPI.
                    helpers.insert(node, start(node));
                    kills += 1;
                }
                kills
            });
            hosts.agree(mpi, bench, 2, &port, &["all", "4096"]);
            drop(done);
            killer.join().unwrap()
        });
        println!("{}: {kills} switches were killed", mpi.name);
        assert!(kills > 0);
    });
}

/// Modules of mpi4py's tests that say most of sending in little time.
const QUICK: &[&str] = &["test_msgzero", "test_win"];

/// Goal: mpi4py's own tests that send pass with near and far ranks, by day some of them.
#[test]
fn mpi4pys_own_tests_pass_on_hosts() {
    let Some(suite) = suite_of_mpi4py() else { return };
    let Some(hosts) = Hosts::new(2) else { return };
    let modules = if nightly() { MODULES } else { QUICK };
    with_each(|mpi, bench| {
        // The package is a wheel's, and Debian's Open MPI 4.1 is older than what it tests.
        if mpi.name == "debian" {
            return;
        }
        let command = mpi.launch_on(&hosts.cluster, bench, 2);
        let mut command = mpi.own_tests(command, &suite, modules);
        ran(mpi, command.env("FI_BAREWIRE_PORT", format!("afpacket:{FABRIC}")), 4);
    });
}
