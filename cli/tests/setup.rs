//! `hugepage-setup.sh` on hosts that are not there: what of it needs no NIC. The suite `vfio` has
//! the rest, in virtual machines.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../hugepage-setup.sh");

/// A folder in place of `/sys`, and one for what the script writes down.
struct Host(tempfile::TempDir);

impl Host {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let file = self.at(path);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }

    fn state(&self) -> Option<String> {
        fs::read_to_string(self.at("state")).ok()
    }

    /// A NIC with the interface `name`.
    fn nic(&self, pci: &str, name: &str) {
        fs::create_dir_all(self.at(&format!("sys/bus/pci/devices/{pci}/net/{name}"))).unwrap();
        self.write(&format!("sys/class/net/{name}/address"), "52:54:00:00:00:01\n");
    }

    /// Runs the script as `before` in a shell leaves the machine, in namespaces of its own.
    fn run(&self, before: &str, args: &str) -> Output {
        let line = format!("set -e\n{before}\nexec sh '{SCRIPT}' {args}");
        let mut command = Command::new("unshare");
        command.args(["--mount", "--net", "sh", "-c", &line]);
        command.env("BAREWIRE_SYS", self.at("sys")).env("BAREWIRE_STATE", self.at("state"));
        command.output().unwrap()
    }
}

/// Whether this test can be: it needs root, who makes namespaces.
fn may_test() -> bool {
    let made = || Command::new("unshare").args(["--mount", "--net", "ip", "link"]).output();
    let may = nix::unistd::geteuid().is_root() && made().is_ok_and(|ran| ran.status.success());
    if !may {
        println!("SKIPPED: not root, or without namespaces");
    }
    may
}

fn said(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|said| String::from_utf8_lossy(said));
    format!("{out}{err}")
}

/// Goal: of a default route over several interfaces each carries it, so does one with a default
/// route of another table, or of IPv6 alone, and Open vSwitch is told of, whose bridges the kernel
/// does not link; nothing else is kept.
#[test]
fn all_interfaces_with_a_default_route_are_found() {
    if !may_test() {
        return;
    }
    let host = Host::new();
    let mut before = String::new();
    for n in 0..6 {
        host.nic(&format!("0000:05:00.{n}"), &format!("e{n}"));
        before += &format!("ip link add e{n} type veth peer name p{n}\n");
        before += &format!("ip link set e{n} up; ip link set p{n} up\n");
        before += &format!("ip addr add 10.{n}.0.1/24 dev e{n}\n");
    }
    before += "ip route add default nexthop via 10.0.0.2 dev e0 nexthop via 10.1.0.2 dev e1\n\
               ip route add default via 10.2.0.2 dev e2 table 7\n\
               ip -6 route add default dev e3\n";
    fs::create_dir_all(host.at("sys/class/net/ovs-system")).unwrap();
    let upper = host.at("sys/class/net/e4/upper_ovs-system");
    std::os::unix::fs::symlink("../ovs-system", upper).unwrap();
    for (n, carries) in [
        (0, "the default route (e0)"),
        (1, "the default route (e1)"),
        (2, "the default route (e2)"),
        (3, "the default route (e3)"),
        (4, "Open vSwitch"),
    ] {
        let checked = said(&host.run(&before, &format!("--check --bind 0000:05:00.{n}")));
        assert!(checked.contains(&format!("vfio-pci, and carries {carries}")), "{checked}");
        assert!(checked.contains("--force if that may end"), "{checked}");
    }
    let checked = said(&host.run(&before, "--check --bind 0000:05:00.5"));
    assert!(checked.contains("0000:05:00.5 is not bound to vfio-pci\n"), "{checked}");
}

/// Goal: what cannot be given back is told, is the only thing that stays, and goes the next time.
#[test]
fn a_change_that_cannot_be_undone_is_kept_for_the_next_undo() {
    if !may_test() {
        return;
    }
    let host = Host::new();
    let pages = |name: &str| host.at(&format!("{name}/nr_hugepages"));
    let line = |name: &str, count| format!("pages {} {count}\n", host.at(name).display());
    host.write("a/nr_hugepages", "9");
    host.write("c/nr_hugepages", "9");
    fs::create_dir_all(pages("b")).unwrap();
    let gone = "mount /no/such/place\ndir /no/such/place\n";
    host.write("state", &[&*line("a", 1), gone, &line("b", 2), &line("c", 3)].concat());
    let undone = host.run("", "--undo");
    assert_eq!(undone.status.code(), Some(2), "{}", said(&undone));
    assert!(said(&undone).contains("not everything is as it was"), "{}", said(&undone));
    let count = |name| fs::read_to_string(pages(name)).unwrap().trim().to_owned();
    assert_eq!([count("a"), count("c")], ["1", "3"]);
    assert_eq!(host.state(), Some(line("b", 2)));
    fs::remove_dir(pages("b")).unwrap();
    host.write("b/nr_hugepages", "9");
    let undone = host.run("", "--undo");
    assert!(undone.status.success(), "{}", said(&undone));
    assert_eq!((count("b"), host.state()), ("2".to_owned(), None));
    let left: Vec<_> = fs::read_dir(Path::new(host.0.path())).unwrap().flatten().collect();
    assert_eq!(left.len(), 3, "{left:?}");
}

/// Goal: a file that cannot be written ends nothing else that was asked for, and is exit code 2,
/// which is not that of a check. Method: folders of a system that is mounted read-only.
#[test]
fn a_read_only_system_is_exit_code_2() {
    if !may_test() {
        return;
    }
    let host = Host::new();
    host.write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "0");
    // Its `/dev` is the host's: no folder is to be made there.
    let before = "mount -t tmpfs none /dev; mkdir /dev/hugepages\n\
                  mount -t tmpfs -o mode=1777 none /dev/hugepages\n\
                  mount -t tmpfs -o ro none /etc";
    for args in ["--memlock user --2m 4", "--2m 4 --memlock @group"] {
        host.write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "0");
        let output = host.run(before, args);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(2), "{args}: {said}");
        assert!(said.contains("/etc/security"), "{args}: {said}");
        assert!(said.contains("pages of 2048 kB: 4 (asked: 4)"), "{args}: {said}");
    }
}
