//! Checks of what runs here already.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;

use barewire::stats::switch::SwitchSnapshot;
use barewire_driver::backend::switch::RUN_DIR;

use super::machine::{Machine, SwitchedDevice};
use super::{Check, SPEED, VFIO};

/// A switch that has published nothing for so long does not forward, ns.
const STUCK_NS: u64 = 2_000_000_000;

/// The switches that own NICs, and whether they turn.
pub(super) fn switches(machine: &Machine) -> Check {
    let name = "switches";
    let age = |s: &SwitchSnapshot| machine.now_ns.saturating_sub(s.updated_ns);
    let switches = &machine.published.switches;
    if let Some(stuck) = switches.iter().find(|s| age(s) > STUCK_NS) {
        let (pid, secs, owner) = (stuck.pid, age(stuck) as f64 / 1e9, stuck.owner);
        let found = format!("{}: process {pid} has not turned for {secs:.0} s", stuck.port_name);
        return match is_known(machine, stuck) {
            true => {
                let mend = "and start it again: its processes wait and go on";
                Check::warn(name, VFIO, found, format!("kill -9 {pid}, {mend}"))
            }
            false => {
                let found = format!("{found}, says user {owner}");
                let mend = format!("have user {owner} end it, see: ls -l {:?}", stuck.path);
                Check::warn(name, VFIO, found, mend)
            }
        };
    }
    let told = |s: &SwitchSnapshot| {
        format!("{}: process {}, {} stations", s.port_name, s.pid, s.stations.len())
    };
    let (others, left) = of_others(machine);
    let other =
        |socket: &String| match machine.switched_devices.iter().find(|of| of.socket == *socket) {
            Some(of) => format!("{}: another user's, which serves this user", of.port),
            None => format!("another user's at {RUN_DIR}/{socket}"),
        };
    let told: Vec<String> = switches.iter().map(told).chain(others.iter().map(other)).collect();
    let runs = if told.is_empty() { "none runs".to_owned() } else { told.join("; ") };
    if let Some((of, why, mend)) = machine.switched_devices.iter().find_map(refusal) {
        return Check::warn(name, VFIO, format!("{}: {why}", of.port), mend);
    }
    if left.is_empty() {
        return Check::ok(name, VFIO, runs);
    }
    let found =
        format!("{runs}; switches that have ended left {} sockets in {RUN_DIR}", left.len());
    let all = left.len() == machine.names(RUN_DIR).iter().filter(|n| n.ends_with(".sock")).count();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let mend = match all {
        true => format!("sudo rm {RUN_DIR}/*.sock"),
        // The directory may be another user's, with arbitrary file names in it.
        false if left.iter().all(|name| name.chars().all(is_plain)) => {
            format!("cd {RUN_DIR} && sudo rm ./{}", left.join(" ./"))
        }
        false => format!("ls -l {RUN_DIR}"),
    };
    Check::warn(name, VFIO, found, mend)
}

/// Why a switch does not serve this user, and what mends it, if it does not.
fn refusal(of: &SwitchedDevice) -> Option<(&SwitchedDevice, &str, &str)> {
    of.serves.as_ref().err().map(|(why, mend)| (of, &**why, &**mend))
}

/// Whether the process that `switch` names is its own: any user may write any number into a file.
/// Trusted if the file is root's or this user's, about processes of the same user.
fn is_known(machine: &Machine, switch: &SwitchSnapshot) -> bool {
    let own = nix::unistd::geteuid().as_raw();
    let process = std::fs::metadata(machine.at(&format!("/proc/{}", switch.pid)));
    [0, own].contains(&switch.owner) && process.is_ok_and(|meta| meta.uid() == switch.owner)
}

/// Sockets of switches whose statistics are another user's: those with a listener, and those
/// without.
fn of_others(machine: &Machine) -> (Vec<String>, Vec<String>) {
    let shown: Vec<String> = machine
        .published
        .switches
        .iter()
        .filter_map(|s| Some(format!("{}.sock", s.segment.strip_prefix("shm:")?)))
        .collect();
    let names = machine.names(RUN_DIR).into_iter();
    let others = names.filter(|name| name.ends_with(".sock") && !shown.contains(name));
    // A switch's sockets have another type, so a connection is refused with another error if a
    // switch listens, and the switch does not see it.
    let is_heard = |name: &String| {
        let asked = UnixStream::connect(machine.at(&format!("{RUN_DIR}/{name}")));
        !asked.is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused)
    };
    others.partition(is_heard)
}

/// Whether all that runs can be looked into by this program.
pub(super) fn statistics(machine: &Machine) -> Check {
    let name = "statistics";
    let published = &machine.published;
    match published.unread.first() {
        Some(unread) => {
            let found = format!("process {} publishes {}", unread.pid, unread.why);
            Check::warn(name, SPEED, found, "install one version of barewire")
        }
        None => {
            let count = published.domains.len();
            Check::ok(name, SPEED, format!("{count} open domains: barewire stats"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::machine::fixture::Fixture;
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixListener;

    use nix::sys::socket::{
        AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket,
    };

    use barewire::stats::UnreadableProcess;

    fn switch(updated_ns: u64) -> SwitchSnapshot {
        SwitchSnapshot {
            path: "a".into(),
            owner: nix::unistd::geteuid().as_raw(),
            pid: 12,
            alive: true,
            opened_ns: 1,
            updated_ns,
            port_name: "vfio:0000:05:00.0".to_owned(),
            station: "02:00:00:00:00:01".parse().unwrap(),
            mtu: 1500,
            segment: "shm:x".to_owned(),
            counters: Vec::new(),
            nic: Vec::new(),
            stations: Vec::new(),
        }
    }

    #[test]
    fn a_switch_that_does_not_turn_is_told_of() {
        let mut machine = Fixture::full().machine();
        assert_eq!(switches(&machine).found, "none runs");
        let beside = Fixture::full().with("/run/barewire/z", "");
        let at = |name: &str| beside.machine().at("/run/barewire").join(name);
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).unwrap();
        bind(socket.as_raw_fd(), &UnixAddr::new(&at("y.sock")).unwrap()).unwrap();
        listen(&socket, Backlog::new(1).unwrap()).unwrap();
        let check = switches(&beside.machine());
        let found = "another user's at /run/barewire/y.sock";
        assert_eq!((check.status, &*check.found), (Status::Ok, found));
        let refusal = Err(("it does not serve this user".to_owned(), "--user".to_owned()));
        for (serves, status, found) in [
            (Ok(()), Status::Ok, "vfio:x: another user's, which serves this user"),
            (refusal, Status::Warn, "vfio:x: it does not serve this user"),
        ] {
            let mut machine = beside.machine();
            let (port, socket) = ("vfio:x".to_owned(), "y.sock".to_owned());
            machine.switched_devices = vec![SwitchedDevice { port, socket, serves }];
            let check = switches(&machine);
            assert_eq!((check.status, &*check.found), (status, found));
        }
        drop(UnixListener::bind(at("dead.sock")).unwrap());
        let check = switches(&beside.machine());
        assert!(check.found.contains(" left 1 sockets in /run/barewire"), "{check:?}");
        assert_eq!(check.mend.as_deref(), Some("cd /run/barewire && sudo rm ./dead.sock"));
        drop(UnixListener::bind(at("a;b.sock")).unwrap());
        let check = switches(&beside.machine());
        assert_eq!(check.mend.as_deref(), Some("ls -l /run/barewire"));
        drop(socket);
        let check = switches(&beside.machine());
        assert!(
            check.found.starts_with("none runs; ") && check.status == Status::Warn,
            "{check:?}"
        );
        assert_eq!(check.mend.as_deref(), Some("sudo rm /run/barewire/*.sock"));
        machine.published.switches = vec![switch(machine.now_ns), switch(machine.now_ns)];
        let check = switches(&machine);
        assert_eq!(check.status, Status::Ok);
        assert!(
            check.found.starts_with("vfio:0000:05:00.0: process 12, 0 stations; "),
            "{check:?}"
        );
        machine.published.switches[1].updated_ns = machine.now_ns - 3_000_000_000;
        let check = switches(&machine);
        assert_eq!(check.status, Status::Warn);
        assert!(check.found.contains("not turned for 3 s"), "{check:?}");
    }

    /// Goal: nobody has root kill a process by a number in a file of his. Method: a process of the
    /// number that is its owner's, none, and an owner who is neither root nor us.
    #[test]
    fn only_a_process_of_the_files_owner_is_to_be_killed() {
        let mend = |owner: u32, fixture: Fixture| {
            let mut machine = fixture.machine();
            let mut stuck = switch(machine.now_ns - 3_000_000_000);
            stuck.owner = owner;
            machine.published.switches = vec![stuck];
            switches(&machine).mend.unwrap()
        };
        let own = nix::unistd::geteuid().as_raw();
        let with = || Fixture::full().with("/proc/12/comm", "barewire");
        assert!(mend(own, with()).starts_with("kill -9 12,"));
        for (owner, fixture) in [(own, Fixture::full()), (own + 1, with())] {
            let mend = mend(owner, fixture);
            assert!(mend.starts_with(&format!("have user {owner} end it")), "{mend}");
        }
    }

    #[test]
    fn a_process_of_another_version_is_told_of() {
        let mut machine = Fixture::full().machine();
        assert_eq!(statistics(&machine).status, Status::Ok);
        machine.published.unread = vec![UnreadableProcess { pid: 7, why: "version 3".to_owned() }];
        let check = statistics(&machine);
        assert_eq!((check.status, &*check.found), (Status::Warn, "process 7 publishes version 3"));
    }
}
