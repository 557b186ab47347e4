//! The commands as services: what they tell systemd, as sd_notify(3) says, and the limits that they
//! set themselves.

use std::collections::HashMap;
use std::io::Read;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const PATIENCE: Duration = Duration::from_secs(20);

/// A command under limits on open files, soft and hard, that tells `socket` of itself.
fn start(args: &[&str], limits: [u32; 2], socket: &str, watchdog_us: &str) -> Child {
    let [soft, hard] = limits;
    let script = format!("ulimit -S -n {soft}; ulimit -H -n {hard}; exec \"$0\" \"$@\"");
    Command::new("sh")
        .args(["-c", &script, env!("CARGO_BIN_EXE_barewire")])
        .args(args)
        .env_remove("WATCHDOG_PID")
        .envs([("NOTIFY_SOCKET", socket), ("WATCHDOG_USEC", watchdog_us)])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn listener(path: &Path) -> UnixDatagram {
    let socket = UnixDatagram::bind(path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn hear(socket: &UnixDatagram) -> String {
    let mut words = [0; 512];
    let len = socket.recv(&mut words).expect("systemd is told nothing");
    String::from_utf8(words[..len].to_vec()).unwrap()
}

/// Ends a command in order, and returns what it wrote to standard error.
fn end(mut child: Child) -> String {
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(child.wait().unwrap().success(), "{said}");
    said
}

fn memif(name: &str) -> String {
    format!("memif:@services-{name}-{}", std::process::id())
}

/// Goal: a switch says when it forwards, that it lives while it does, and when it ends; and it uses
/// all of the descriptors that it may have, and says for how many processes that is room.
#[test]
fn a_switch_says_when_it_forwards_and_that_it_lives() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notify");
    let (socket, port) = (listener(&path), memif("switch"));
    let args = ["switch", "--port", &port];
    let child = start(&args, [64, 200], path.to_str().unwrap(), "200000");
    let ready = hear(&socket);
    assert!(ready.starts_with(&format!("READY=1\nSTATUS={port}")), "{ready}");
    assert!(ready.ends_with(", 0 processes"), "{ready}");
    let (begun, told) = (Instant::now(), (0..5).map(|_| hear(&socket)).collect::<Vec<_>>());
    let took = begun.elapsed();
    assert!(told.iter().all(|word| word.starts_with("WATCHDOG=1\nSTATUS=memif:")), "{told:?}");
    // Once in 100 ms, or when a nap of as long has ended.
    assert!(took > Duration::from_millis(400), "{took:?}");
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", child.id())).unwrap();
    let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    assert_eq!(files.split_whitespace().filter(|word| *word == "200").count(), 2, "{files}");
    let pid = child.id();
    let said = end(child);
    let mut last = hear(&socket);
    while last.starts_with("WATCHDOG=1") {
        last = hear(&socket);
    }
    assert_eq!(last, "STOPPING=1");
    // Root's serves other users.
    let is_root = nix::unistd::geteuid().is_root();
    let mend = format!("sudo prlimit --pid {pid} --nofile=65536");
    assert_eq!(said.contains(&mend), is_root, "{said}");
    assert_eq!(said.contains("processes of other users, by the limit of 200"), is_root, "{said}");
}

/// Goal: a switch that cannot take its NIC fails and never says that it is ready.
#[test]
fn a_switch_without_a_nic_is_not_ready() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notify");
    let socket = listener(&path);
    let args = ["switch", "--port", "afpacket:none0"];
    let mut child = start(&args, [1024; 2], path.to_str().unwrap(), "200000");
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1), "{said}");
    assert!(said.contains("none0"), "{said}");
    socket.set_nonblocking(true).unwrap();
    let mut words = [0; 512];
    while let Ok(len) = socket.recv(&mut words) {
        let told = String::from_utf8_lossy(&words[..len]);
        assert!(!told.contains("READY"), "{told}");
    }
}

/// Goal: a service whose NIC or address is absent for a while is not given up by systemd, and a
/// switch that hangs is noticed early enough to be replaced within T_dead. Method: the units as
/// they are installed: settings by section.
#[test]
fn the_units_restart_without_end() {
    for (name, restart, pause_ms) in
        [("barewire-switch@", "always", 100), ("barewire-exporter", "on-failure", 1000)]
    {
        let path = format!("{}/systemd/{name}.service", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(path).unwrap();
        let mut section = "";
        let mut settings = HashMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            match line.split_once('=') {
                Some((key, value)) => assert!(settings.insert((section, key), value).is_none()),
                None => section = line,
            }
        }
        // systemd ignores it in another section.
        assert_eq!(settings[&("[Unit]", "StartLimitIntervalSec")], "0", "{name}");
        assert_eq!(settings[&("[Service]", "Type")], "notify", "{name}");
        assert_eq!(settings[&("[Service]", "Restart")], restart, "{name}");
        assert_eq!(settings[&("[Service]", "RestartPreventExitStatus")], "2", "{name}");
        let pause = settings[&("[Service]", "RestartSec")];
        let pause = pause
            .strip_suffix("ms")
            .map_or_else(|| 1000 * pause.parse::<u64>().unwrap(), |ms| ms.parse().unwrap());
        assert_eq!(pause, pause_ms, "{name}");
        let watchdog = settings.get(&("[Service]", "WatchdogSec"));
        assert_eq!(watchdog, (restart == "always").then_some(&"1"), "{name}");
    }
}

/// Goal: a service whose arguments are wrong ends with the status that its unit does not restart
/// after, and one whose device is absent with another.
#[test]
fn wrong_arguments_are_told_from_what_may_come() {
    for (args, code) in [
        (&["switch", "--every", "x"][..], 2),
        (&["switch", "--port", "vfio:nonsense"], 2),
        (&["switch", "--port", "memif:@x,colour=red"], 2),
        (&["switch", "--port", "shm"], 2),
        (&["switch", "--port", "afpacket:none0"], 1),
        (&["switch", "--port", "afpacket:none*"], 1),
        (&["switch", "--port", "afpacket:198.51.100.0/24"], 1),
        (&["exporter", "--listen", "nowhere"], 2),
        (&["exporter", "--listen", "198.51.100.1:9"], 1),
    ] {
        let mut child = start(args, [1024; 2], "/nowhere", "200000");
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code), "{args:?}: {said}");
    }
}

/// Goal: systemd understands the units. Method: its own check, with a command that is there.
#[test]
fn systemd_understands_the_units() {
    let dir = tempfile::tempdir().unwrap();
    let mut units = Vec::new();
    for name in ["barewire-switch@", "barewire-exporter"] {
        let from = format!("{}/systemd/{name}.service", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(from).unwrap();
        let unit = dir.path().join(format!("{name}.service"));
        std::fs::write(&unit, text.replace("/usr/bin/barewire", "/bin/true")).unwrap();
        units.push(unit);
    }
    let checked =
        Command::new("systemd-analyze").args(["verify", "--man=no"]).args(&units).output();
    let Ok(checked) = checked else {
        println!("SKIPPED: no systemd-analyze here");
        return;
    };
    let said = String::from_utf8_lossy(&checked.stderr);
    // It looks at the units of this machine as well.
    let ours: Vec<_> = said.lines().filter(|line| line.contains("barewire")).collect();
    assert!(ours.is_empty(), "{said}");
}

/// Goal: a switch with room says nothing of it, and one whose starter cannot be told, or reads
/// nothing, does its work.
#[test]
fn a_switch_does_not_wait_for_the_reader_of_its_output() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let full = listener(Path::new(&at("full")));
    let sender = UnixDatagram::unbound().unwrap();
    sender.set_nonblocking(true).unwrap();
    while sender.send_to(b"noise", at("full")).is_ok() {}
    for (i, socket) in [at("full"), at("none"), "nonsense".into()].iter().enumerate() {
        let port = memif(&format!("deaf{i}"));
        let mut child = start(&["switch", "--port", &port], [4096; 2], socket, "x");
        std::thread::sleep(Duration::from_secs(3));
        assert!(child.try_wait().unwrap().is_none(), "{socket}");
        let said = end(child);
        assert!(said.contains("a switch on") && !said.contains("room for"), "{said}");
        assert_eq!(said.contains("NOTIFY_SOCKET=nonsense: "), i == 2, "{said}");
        assert_eq!(said.matches("systemd is not told").count(), [2, 2, 0][i], "{said}");
    }
    drop(full);
}

/// Goal: a switch forwards on where its words cannot be written, because a disk is full: what it
/// counts, what it says, and what it logs.
#[test]
fn a_full_disk_does_not_end_a_switch() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_barewire"))
        .args(["switch", "--every", "1", "--port", &memif("full")])
        // A line of its log, which says that this is none.
        .envs([("NOTIFY_SOCKET", "nonsense")])
        .stdin(Stdio::null())
        .stdout(full())
        .stderr(full())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(2500));
    assert!(child.try_wait().unwrap().is_none(), "it has ended");
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    // What it counted cannot be written at its end either.
    assert_eq!(child.wait().unwrap().code(), Some(1));
}

#[test]
fn an_exporter_says_when_it_listens() {
    let name = format!("services-{}", std::process::id());
    let at = SocketAddr::from_abstract_name(&name).unwrap();
    let socket = UnixDatagram::bind_addr(&at).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let args = ["exporter", "--listen", "127.0.0.1:0"];
    let child = start(&args, [1024; 2], &format!("@{name}"), "600000");
    let ready = hear(&socket);
    assert!(ready.starts_with("READY=1\nSTATUS=at http://127.0.0.1:"), "{ready}");
    // For a unit to which somebody has given a WatchdogSec=.
    let told = hear(&socket);
    assert!(told.starts_with("WATCHDOG=1\nSTATUS=at http://127.0.0.1:"), "{told}");
    end(child);
    let mut last = hear(&socket);
    while last.starts_with("WATCHDOG=1") {
        last = hear(&socket);
    }
    assert_eq!(last, "STOPPING=1");
}
