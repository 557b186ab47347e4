//! `barewire capture` of processes that run, on every kind of port: each frame that a process sends
//! and receives while it is recorded is in the file once, and as it was.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use barewire::stats::{Snapshot, read_published};
use barewire_tests::nodes::{Nodes, address, or_skip};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::messages::{AFPACKET, UDP};
use crate::start;
use crate::supervisor::{PATIENCE, Worker};
use crate::users::{ALICE, as_user, start_as};

/// Lengths of the messages that are recorded, there and back.
const LENGTHS: [usize; 4] = [1, 64, 5_000, 70_000];

/// The command, which the suite builds beside this program.
pub(crate) fn barewire() -> Result<PathBuf, String> {
    let this = std::env::current_exe().map_err(|e| e.to_string())?;
    let dir = this.parent().and_then(Path::parent).ok_or("no directory")?;
    let path = dir.join("barewire");
    path.is_file().then_some(path).ok_or("not built: cargo build -p barewire-cli".to_owned())
}

/// A command that runs until it is interrupted, and what it says.
struct Running {
    child: Child,
    said: BufReader<std::process::ChildStderr>,
    /// The line that was waited for.
    line: String,
}

impl Running {
    /// Starts it, and waits for a line that begins so.
    fn start(mut command: Command, begins: &str) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(child.stderr.take().unwrap());
        let mut running = Self { child, said, line: String::new() };
        while !running.line.starts_with(begins) {
            running.line.clear();
            let len = running.said.read_line(&mut running.line).unwrap();
            assert!(len > 0, "no line: {begins}");
        }
        running
    }

    /// Ends it, and returns its last line.
    fn end(mut self) -> String {
        kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), Signal::SIGINT).unwrap();
        let lines = self.said.lines().map_while(Result::ok).last();
        assert!(self.child.wait().unwrap().success());
        lines.unwrap_or_default()
    }
}

/// Frames in a pcapng file of ours: whether it was sent, and its bytes.
fn frames(path: &Path) -> Vec<(bool, Vec<u8>)> {
    let file = std::fs::read(path).unwrap();
    let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
    let (mut at, mut frames) = (0, Vec::new());
    while at < file.len() {
        if word(at) == 6 {
            let len = word(at + 20) as usize;
            let is_sent = word(at + 28 + len.next_multiple_of(4) + 4) == 2;
            frames.push((is_sent, file[at + 28..at + 28 + len].to_vec()));
        }
        at += word(at + 4) as usize;
    }
    frames
}

/// Two processes that talk when they are told to.
struct Pair {
    echo: Worker,
    caller: Worker,
}

impl Pair {
    fn start(begin: impl Fn(usize, &str) -> Worker) -> Self {
        let (mut echo, mut caller) = (begin(1, "echo"), begin(0, "caller"));
        let (addr, _) = caller.addr.split_once(" mtu ").unwrap();
        echo.say(&format!("PEER {addr}"));
        let to = format!("PEER {}", echo.addr);
        caller.say(&to);
        Self { echo, caller }
    }

    fn talk(&mut self) {
        for len in LENGTHS {
            self.echo.say(&format!("SIZE {len}"));
            self.caller.say(&format!("CALL {len}"));
            self.caller.answer("BACK");
            self.echo.answer("ECHOED");
        }
    }

    fn end(mut self) {
        self.echo.say("END");
        self.caller.say("END");
        self.echo.finish();
        self.caller.finish();
    }
}

/// Frames that the far side of a process' port took and received, and when it said so, ns.
fn passed(pid: u32) -> ([u64; 2], u64) {
    let all = read_published().unwrap();
    let of = |counters: &[(&str, u64)], name: &str| {
        counters.iter().find(|(is, _)| *is == name).map_or(0, |(_, count)| *count)
    };
    // One that `ip(...)` drops while it looks for the neighbour was taken.
    let sent = |of: &dyn Fn(&str) -> u64| of("tx_frames") + of("tx_dropped");
    let both = |of: &dyn Fn(&str) -> u64| [sent(of), of("rx_frames")];
    let far = |s: &Snapshot| both(&|n| of(&s.port, n) - of(&s.port, &format!("near_{n}")));
    let domain = all.domains.iter().filter(|s| s.pid == pid && s.alive);
    let domain = domain.map(|s| (far(s), s.updated_ns));
    let switch = all.switches.iter().filter(|s| s.pid == pid && s.alive);
    let switch = switch.map(|s| (both(&|n| of(&s.nic, n)), s.updated_ns));
    domain.chain(switch).next().expect("the process publishes")
}

/// The same once nothing has passed for a while of the process' own time.
fn at_rest(pid: u32) -> [u64; 2] {
    let until = Instant::now() + PATIENCE;
    let (mut count, mut since) = passed(pid);
    loop {
        std::thread::sleep(Duration::from_millis(20));
        let (now, at) = passed(pid);
        if now != count {
            (count, since) = (now, at);
        } else if at > since + 400_000_000 {
            return count;
        }
        assert!(Instant::now() < until, "it does not come to rest");
    }
}

/// Has `capture`, a command, record while `pair` talks, and compares the file with what the process
/// `pid`, the only one that it is to find, counts.
fn records(mut capture: Command, port: &str, pid: u32, pair: &mut Pair) {
    let dir = tempfile::tempdir().unwrap();
    // A user writes it who may be another one.
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777))
        .unwrap();
    let path = dir.path().join("a.pcapng");
    let before = at_rest(pid);
    capture.args(["capture", "--port", port, "-o"]).arg(&path);
    let capture = Running::start(capture, "capturing on");
    pair.talk();
    let after = at_rest(pid);
    let said = capture.end();
    // On a loaded machine something may be repeated after a rest.
    let ended = at_rest(pid);
    let frames = frames(&path);
    assert_eq!(said, format!("{} frames, 0 missed", frames.len()), "{port}");
    let count = |way| frames.iter().filter(|(is_sent, _)| *is_sent == way).count() as u64;
    for (i, count) in [count(true), count(false)].into_iter().enumerate() {
        let passed = after[i] - before[i]..=ended[i] - before[i];
        // With a near side the far frames are known by a difference of counters alone.
        let is_bound = true;
        let fits = count >= *passed.start() && (count <= *passed.end() || !is_bound);
        assert!(fits, "{port}: {count} of {passed:?}");
    }
    // Twice the longest message passed in frames of 64 KiB at most.
    let bytes: usize = frames.iter().map(|(_, frame)| frame.len()).sum();
    assert!(bytes > 2 * LENGTHS.iter().sum::<usize>(), "{port}: {bytes} bytes");
    assert!(frames.iter().all(|(_, frame)| frame[12..14] == [0x88, 0xb5]), "{port}");
    dissects(&path, frames.len());
    // And nothing of it stays.
    let again = at_rest(pid);
    pair.talk();
    assert!(at_rest(pid)[0] > again[0]);
    let left = std::fs::read_dir("/dev/shm").unwrap().flatten();
    let of_it = format!("-frames-{pid}.");
    let left: Vec<_> = left.filter(|e| e.file_name().to_string_lossy().contains(&of_it)).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Every frame is one to the dissector.
fn dissects(file: &Path, count: usize) {
    if Command::new("tshark").arg("--version").output().is_err() {
        let _ = or_skip::<()>(Err("tshark missing (apt-get install tshark)".to_owned()));
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/barewire.lua");
    let mut tshark = Command::new("tshark");
    tshark.arg("-r").arg(file).arg("-X").arg(format!("lua_script:{}", script.display()));
    tshark.args(["-Y", "barewire && !barewire.refused", "-T", "fields", "-e", "frame.number"]);
    let out = tshark.env("HOME", file.parent().unwrap()).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert_eq!(text.lines().count(), count, "{}", String::from_utf8_lossy(&out.stderr));
}

/// Records the process in node 0 of a pair that has these ports there and in node 1.
fn records_on(nodes: &Nodes, ports: [&str; 2]) {
    let Some(barewire) = or_skip(barewire()) else { return };
    let mut pair = Pair::start(|node, role| start(nodes, node, role, ports[node]));
    let pid = pair.caller.id();
    records(nodes.command(0, barewire), ports[0], pid, &mut pair);
    pair.end();
}

/// Goal: on the ports that the kernel's stack carries, in the process' terms and without tcpdump's
/// privilege.
#[test]
fn capture_on_ports_of_the_kernel() {
    for port in [UDP, AFPACKET, "afpacket:fab0,near=yes"] {
        let Some(nodes) = or_skip(Nodes::unprivileged_pair(1500)) else { return };
        records_on(&nodes, [port; 2]);
    }
}

/// Goal: a process of another network namespace is another one's, whatever its interface is called,
/// also where nobody but itself can see in which it is.
#[test]
fn capture_knows_its_own_namespace() {
    let Some(barewire) = or_skip(barewire()) else { return };
    let Some(nodes) = or_skip(Nodes::unprivileged_pair(1500)) else { return };
    let Some(others) = or_skip(Nodes::unprivileged_pair(1500)) else { return };
    let pairs = [&nodes, &others];
    let pairs = pairs.map(|of| Pair::start(|node, role| start(of, node, role, UDP)));
    let mut capture = nodes.command(0, barewire);
    capture.args(["capture", "--port", UDP, "-o", "/dev/null"]);
    let capture = Running::start(capture, "capturing on");
    let of_it = format!("of process {}", pairs[0].caller.id());
    assert!(capture.line.contains(&of_it), "{of_it}: {}", capture.line);
    capture.end();
    pairs.into_iter().for_each(Pair::end);
}

/// Goal: past the kernel, where no packet socket sees a frame.
#[test]
fn capture_on_xdp() {
    let Some(nodes) = crate::xdp::pair(1500) else { return };
    records_on(&nodes, ["xdp:fab0,mode=native"; 2]);
}

/// Goal: of datagrams of our own, the frames inside of them; by the device's name too.
#[test]
fn capture_on_ip() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let ports = [0, 1].map(|node| format!("ip({}/24):fault():{AFPACKET}", address(node)));
    records_on(&nodes, [&ports[0], &ports[1]]);
}

#[test]
fn capture_on_a_memif() {
    let Some(barewire) = or_skip(barewire()) else { return };
    for options in ["", "lossless=yes"] {
        let port = |place| crate::memif::port("capture", place, options);
        let mut pair = Pair::start(|place, role| Worker::start(role, role, &port(place)));
        let pid = pair.caller.id();
        both_ends(Command::new(&barewire), &port(0), pid, &mut pair);
        pair.end();
    }
}

/// As [`records`], of two processes of this machine that have the device open: what one receives
/// the other has sent.
fn both_ends(mut capture: Command, port: &str, pid: u32, pair: &mut Pair) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.pcapng");
    let before = at_rest(pid);
    capture.args(["capture", "--port", port, "-o"]).arg(&path);
    let capture = Running::start(capture, "capturing on");
    pair.talk();
    at_rest(pair.echo.id());
    let after = at_rest(pid);
    let said = capture.end();
    let frames = frames(&path);
    assert_eq!(said, format!("{} frames, 0 missed", frames.len()));
    let of = |way| frames.iter().filter(move |(is_sent, _)| *is_sent == way);
    let mut sent: Vec<&[u8]> = of(true).map(|(_, frame)| &frame[..]).collect();
    assert_eq!(sent.len() as u64, (0..2).map(|i| after[i] - before[i]).sum::<u64>());
    for (_, frame) in of(false) {
        let at = sent.iter().position(|sent| sent == frame).expect("it was sent");
        sent.swap_remove(at);
    }
    assert!(sent.is_empty(), "{} frames were received by nobody", sent.len());
    dissects(&path, frames.len());
}

/// Goal: root sees what all users of a switch send and receive; a user without a privilege sees
/// what is his own.
#[test]
fn capture_behind_a_switch() {
    let Some(nodes) = crate::users::nodes() else { return };
    let Some(barewire) = or_skip(barewire()) else { return };
    let switches = [0, 1].map(|node| {
        let mut command = nodes.command(node, &barewire);
        command.args(["switch", "--port", AFPACKET]);
        Running::start(command, "a switch on")
    });
    let port = "afpacket:fab0,switch=yes";
    let mut pair = Pair::start(|node, role| start_as(&nodes, node, ALICE, role, port));
    let pid = pair.caller.id();
    records(nodes.command(0, &barewire), AFPACKET, switches[0].child.id(), &mut pair);
    let mut hers = nodes.command(0, "setpriv");
    hers.args(as_user(ALICE).split_whitespace().skip(1)).arg(&barewire);
    records(hers, AFPACKET, pid, &mut pair);
    pair.end();
    for switch in switches {
        switch.end();
    }
}

/// Goal: root records a process of any user.
#[test]
fn capture_by_root_of_a_users_process() {
    let Some(nodes) = crate::users::nodes() else { return };
    let Some(barewire) = or_skip(barewire()) else { return };
    let mut pair = Pair::start(|node, role| start_as(&nodes, node, ALICE, role, UDP));
    let pid = pair.caller.id();
    records(nodes.command(0, &barewire), UDP, pid, &mut pair);
    pair.end();
}
