//! `hugepage-setup.sh`, and the run of an ordinary user after it.

use std::process::Command;

use crate::machine::{driver, nic, rebind, sh, sysfs};

const SCRIPT: &str = "sh /usr/bin/hugepage-setup.sh";

/// Where it writes down what it changed.
const STATE: &str = "/var/lib/barewire/setup";

/// What can be seen of a machine's preparation.
fn seen(nics: &[String]) -> String {
    let pages =
        sh("cat /sys/kernel/mm/hugepages/*/nr_hugepages /proc/mounts; ls -l /etc /dev/vfio");
    let drivers: Vec<Option<String>> = nics.iter().map(|nic| driver(nic)).collect();
    format!("{pages}{drivers:?}")
}

/// Runs this program's test `name` as the user 1000.
fn as_user(name: &str, lock_kib: &str) -> (bool, String) {
    let exe = std::env::current_exe().unwrap();
    let line = format!(
        "ulimit -l {lock_kib}; export VM_AS_USER=1; exec su user -s /bin/sh -c \
         '{} --exact {name} --nocapture'",
        exe.display()
    );
    let output = Command::new("sh").args(["-c", &line]).output().unwrap();
    let said = [&output.stdout[..], &output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

/// Not a test but what an ordinary user runs.
#[test]
fn a_users_run() {
    if std::env::var_os("VM_AS_USER").is_none() {
        return;
    }
    let Some(n) = nic(0) else { return };
    match barewire_driver::open::open(&format!("vfio:{n}")) {
        Ok(port) => println!("@@{} opened", port.caps().name),
        Err(e) => println!("@@{e}"),
    }
}

fn said(name: &str, lock_kib: &str) -> String {
    let (ok, output) = as_user(name, lock_kib);
    assert!(ok, "{output}");
    let line = output.lines().find_map(|line| line.split_once("@@"));
    let line = line.unwrap_or_else(|| panic!("{output}")).1.to_owned();
    println!("{line}");
    line
}

/// Goal: a machine prepared by the script serves an ordinary user, `--check` changes nothing, and
/// `--undo` leaves it as it was.
#[test]
fn a_machine_is_prepared_used_and_given_back() {
    let (Some(n), Some(m)) = (nic(0), nic(1)) else { return };
    let nics = [n.clone(), m.clone()];
    rebind(&n, "");
    rebind(&m, "");
    sh("umount /dev/hugepages; echo 0 > /proc/sys/vm/nr_hugepages");
    let before = seen(&nics);

    let check = Command::new("sh").args(["-c", &format!("{SCRIPT} --check --bind {n}")]).output();
    let check = check.unwrap();
    let text = String::from_utf8_lossy(&check.stdout).into_owned();
    assert_eq!(check.status.code(), Some(1), "{text}");
    for missing in ["no hugepages", &format!("{n} is not bound to vfio-pci")] {
        assert!(text.contains(missing), "{text}");
    }
    assert_eq!(seen(&nics), before, "--check changed something");

    println!("{}", sh(&format!("{SCRIPT} --2m 8 --bind {n} {m} --memlock user")));
    assert!(sh("cat /proc/sys/vm/nr_hugepages").starts_with('8'));
    assert_eq!(driver(&n).as_deref(), Some("vfio-pci"));
    let line = said("setup::a_users_run", "8192");
    assert!(line.contains("Permission denied") && line.contains("--group"), "{line}");

    println!("{}", sh(&format!("{SCRIPT} --bind {n} {m} --group user")));
    let line = said("setup::a_users_run", "64");
    assert!(line.contains("locked memory") && line.contains("ulimit -l"), "{line}");
    let line = said("setup::a_users_run", "8192");
    assert!(line.ends_with("opened"), "{line}");
    assert!(sh(&format!("{SCRIPT} --check --bind {n}")).contains(&format!("ok:      {n}")));

    println!("{}", sh(&format!("{SCRIPT} --undo")));
    assert_eq!(seen(&nics), before, "--undo left something");
    rebind(&n, "vfio-pci");
    rebind(&m, "vfio-pci");
}

/// Goal: a limit that somebody else wrote, as `barewire doctor` says, outlives `--undo`.
#[test]
fn the_limits_of_others_stay() {
    if nic(0).is_none() {
        return;
    }
    let (dir, others) = ("/etc/security/limits.d", "* - memlock 8192\n");
    sh(&format!("mkdir -p {dir}; printf '{others}' > {dir}/barewire.conf"));
    sh(&format!("{SCRIPT} --memlock user --memlock user"));
    let all = sh(&format!("cat {dir}/barewire.conf"));
    assert_eq!(all, format!("{others}user - memlock unlimited\n"));
    sh(&format!("{SCRIPT} --undo"));
    assert_eq!(sh(&format!("cat {dir}/barewire.conf")), others);
    sh(&format!("rm {dir}/barewire.conf; rmdir -p {dir} || true"));
}

#[test]
fn a_nic_goes_back_to_its_driver() {
    let Some(n) = nic(0) else { return };
    if !has_virtio() {
        return;
    }
    rebind(&n, "virtio-pci");
    let old = driver(&n);
    sh(&format!("{SCRIPT} --bind {n}"));
    assert_eq!(driver(&n).as_deref(), Some("vfio-pci"));
    sh(&format!("{SCRIPT} --unbind {n}"));
    assert_eq!(driver(&n), old);
    // Once more: an interface that is taken away and comes back has another number.
    let dir = format!("/sys/bus/pci/devices/{n}/virtio*/net");
    let index = || sh(&format!("until cat {dir}/*/ifindex 2>/dev/null; do sleep 0.05; done"));
    let before = index();
    assert!(sh(&format!("{SCRIPT} --unbind {n}")).contains("virtio-pci"));
    assert_eq!(index(), before, "an interface in use was taken away");
    sh(&format!("{SCRIPT} --undo"));
    rebind(&n, "vfio-pci");
}

/// Goal: a device that vfio-pci does not take has its own driver again. Method: a bridge, of which
/// the kernel's vfio-pci takes none.
#[test]
fn a_device_that_is_not_taken_keeps_its_driver() {
    if nic(0).is_none() {
        return;
    }
    let bridges = "grep -l ^0x0604 /sys/bus/pci/devices/*/class | cut -d/ -f6";
    let bridges = sh(bridges);
    let bridge = bridges.lines().find(|bridge| driver(bridge).is_some());
    let bridge = bridge.expect("the guests' NICs are behind bridges");
    let own = driver(bridge);
    let (code, said) = run(&format!("--bind {bridge}"));
    assert!(code == Some(2) && said.contains("vfio-pci does not take"), "{said}");
    assert_eq!(driver(bridge), own);
    assert!(said.contains(&format!("(now: {})", own.clone().unwrap())), "{said}");
    sh(&format!("{SCRIPT} --undo"));
    assert_eq!(driver(bridge), own);
}

/// A run of the script that may fail: its exit code, and all that it said.
fn run(arguments: &str) -> (Option<i32>, String) {
    let line = format!("{SCRIPT} {arguments} 2>&1");
    let output = Command::new("sh").args(["-c", &line]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{}", said.trim());
    (output.status.code(), said)
}

/// The interface and the MAC that a NIC of virtio-net has with the kernel's driver.
fn interface(nic: &str) -> (String, String) {
    rebind(nic, "virtio-pci");
    let dir = format!("/sys/bus/pci/devices/{nic}/virtio*/net");
    // The driver's thread makes it a moment later.
    let name = sh(&format!("until ls {dir} 2>/dev/null; do sleep 0.05; done")).trim().to_owned();
    let mac = sh(&format!("cat {dir}/{name}/address")).trim().to_owned();
    (name, mac)
}

fn has_virtio() -> bool {
    sh("ls /sys/bus/pci/drivers").contains("virtio-pci")
}

/// Goal: what carries the default route or the ssh session is not taken without `--force`, be it on
/// the NIC or on what stands on it; other NICs are.
#[test]
fn a_nic_that_one_comes_in_by_is_not_taken() {
    let (Some(n), Some(m)) = (nic(0), nic(1)) else { return };
    if !has_virtio() {
        return;
    }
    let (first, _) = interface(&n);
    interface(&m);
    let refused = |arguments: &str, carries: &str| {
        let (code, said) = run(&format!("--bind {arguments}"));
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(carries) && said.contains("--force"), "{said}");
        assert_eq!(driver(&n).as_deref(), Some("virtio-pci"), "taken all the same");
        said
    };
    sh(&format!("ip link set {first} up; ip addr add 10.9.0.1/24 dev {first}"));
    for (add, what) in [
        (format!("ip route add default via 10.9.0.2 dev {first}"), first.clone()),
        (format!("ip -6 route add default dev {first}"), first.clone()),
        (
            format!(
                "ip link add link {first} name {first}.7 type vlan id 7; \
                 ip link set {first}.7 up; ip addr add 10.10.0.1/24 dev {first}.7; \
                 ip route add default via 10.10.0.2 dev {first}.7"
            ),
            format!("{first}.7"),
        ),
    ] {
        sh(&add);
        refused(&n, &format!("the default route ({what})"));
        // The other one of the call is bound.
        refused(&format!("{n} {m}"), "the default route");
        assert_eq!(driver(&m).as_deref(), Some("vfio-pci"));
        let (_, said) = run(&format!("--check --bind {n}"));
        assert!(said.contains("carries the default route"), "{said}");
        sh(&format!("{SCRIPT} --undo"));
        sh("ip route del default 2>/dev/null || ip -6 route del default");
    }
    // As sudo does, the script's own environment is without the variable.
    let session = |server: &str| {
        format!(
            "SSH_CONNECTION='10.9.0.2 50000 {server} 22' sh -c \
             'env -u SSH_CONNECTION {SCRIPT} --bind {n} 2>&1; exit $?'"
        )
    };
    for (server, taken) in [("10.9.0.1", false), ("10.10.0.1", false), ("10.9.0.7", true)] {
        let output = Command::new("sh").args(["-c", &session(server)]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        println!("{}", said.trim());
        assert_eq!(output.status.code(), Some(if taken { 0 } else { 2 }), "{said}");
        assert_eq!(said.contains(&format!("the ssh session to {server}")), !taken, "{said}");
    }
    sh(&format!("{SCRIPT} --undo"));
    let (first, _) = interface(&n);
    sh(&format!("ip link set {first} up; ip addr add 10.9.0.1/24 dev {first}"));
    sh(&format!("ip route add default via 10.9.0.2 dev {first}"));
    sh(&format!("{SCRIPT} --force --bind {n}"));
    assert_eq!(driver(&n).as_deref(), Some("vfio-pci"));
    sh(&format!("{SCRIPT} --undo"));
    rebind(&n, "vfio-pci");
    rebind(&m, "vfio-pci");
}

/// Goal: a reboot that gives the card another address binds the right one, opens no group but its
/// own, and is not kept from it by pages that there are not. Method: the address in the records is
/// another card's, as after such a reboot.
#[test]
fn a_card_is_found_by_its_mac() {
    let (Some(n), Some(m)) = (nic(0), nic(1)) else { return };
    if !has_virtio() {
        return;
    }
    let ((name, mac), _) = (interface(&n), interface(&m));
    sh(&format!("ip link set {name} address 52:54:00:00:00:ab"));
    let (_, said) = run("--check --bind 52:54:00:00:00:AB");
    assert!(said.contains(&format!("{n} is not bound")), "{said}");
    sh(&format!("ip link set {name} address {mac}"));
    let calls = pretend_systemd();
    println!("{}", sh(&format!("{SCRIPT} --bind {n} --group user --persist")));
    let start = unit_command();
    assert!(start.ends_with(&format!(" --bind {mac} --group user")), "{start}");
    let unit = sh("cat /etc/systemd/system/barewire-setup.service");
    assert!(unit.contains("(hugepage-setup.sh)"), "{unit}");
    assert_eq!(sh("ls /etc/udev/rules.d"), "", "a rule of udev opens other groups too");
    // By its MAC also while vfio-pci has it.
    assert!(run(&format!("--check --bind {mac}")).1.contains(&format!("ok:      {n}")));
    sh(&format!("{SCRIPT} --unbind {mac}"));
    assert_eq!(driver(&n).as_deref(), Some("virtio-pci"));
    sh(&format!("{SCRIPT} --bind {mac}"));
    assert_eq!(driver(&n).as_deref(), Some("vfio-pci"));

    // The boot: nothing is bound, the records are of before, and 50 pages of 1 GiB are not there.
    interface(&n);
    interface(&m);
    sh(&format!("rm -f /run/barewire-setup.macs; sed -i 's/^nic {n} /nic {m} /' {STATE}"));
    let (code, said) = run(&format!("--1g 50 {}", start.split_once(".sh ").unwrap().1));
    assert!(code == Some(2) && said.contains("ask for less"), "{said}");
    assert_eq!(driver(&n).as_deref(), Some("vfio-pci"));
    assert_eq!(driver(&m).as_deref(), Some("virtio-pci"));
    let group = |nic: &str| {
        let group = std::fs::read_link(sysfs(nic).join("iommu_group")).unwrap();
        format!("/dev/vfio/{}", group.file_name().unwrap().to_str().unwrap())
    };
    assert_eq!(sh(&format!("stat -c '%G %a' {}", group(&n))), "user 660\n");
    rebind(&m, "vfio-pci");
    assert_eq!(sh(&format!("stat -c '%G %a' {}", group(&m))), "root 600\n");

    // What has an address of the records and was never bound by the script stays where it is.
    let (name, _) = interface(&m);
    // A new number each time that there is one of this name.
    let index = || sh(&format!("cat /sys/class/net/{name}/ifindex"));
    let before = index();
    println!("{}", sh(&format!("{SCRIPT} --undo")));
    assert_eq!(index(), before, "another card was taken from its driver");
    assert_eq!(sh("ls /run/barewire-setup.macs 2>/dev/null || true"), "");
    let (code, said) = run("--bind 52:54:00:ff:ff:ff");
    assert!(code == Some(2) && said.contains("no NIC has the MAC"), "{said}");
    sh(&format!("rm {calls}"));
    rebind(&n, "vfio-pci");
    rebind(&m, "vfio-pci");
}

/// A systemd that writes down how it was called: in the file of this name.
fn pretend_systemd() -> &'static str {
    let calls = "/tmp/systemctl.calls";
    sh("mkdir -p /run/systemd/system /etc/systemd/system /etc/udev/rules.d");
    std::fs::write("/bin/systemctl", format!("#!/bin/sh\necho \"$*\" >> {calls}\n")).unwrap();
    sh("chmod +x /bin/systemctl");
    calls
}

/// What the unit that `--persist` wrote runs.
fn unit_command() -> String {
    let unit = std::fs::read_to_string("/etc/systemd/system/barewire-setup.service").unwrap();
    let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart="));
    start.unwrap_or_else(|| panic!("{unit}")).to_owned()
}

/// Goal: what `--persist` leaves behind prepares the machine again after a reboot, and `--undo`
/// takes that away too. Method: systemd is a script that writes down how it was called; the reboot
/// is a machine on which everything is as it was, and the command of the unit.
#[test]
fn a_preparation_outlives_a_reboot() {
    let Some(n) = nic(0) else { return };
    let calls = pretend_systemd();
    rebind(&n, "");
    sh("umount /dev/hugepages; echo 0 > /proc/sys/vm/nr_hugepages");
    let nics = [n.clone()];
    let before = seen(&nics);
    println!("{}", sh(&format!("{SCRIPT} --2m 6 --bind {n} --group user --persist")));
    let start = unit_command();
    assert!(start.starts_with('/') && !start.contains("--persist"), "{start}");
    let said = sh(&format!("cat {calls}"));
    assert_eq!(said, "daemon-reload\nenable -q barewire-setup.service\n");

    rebind(&n, "");
    sh("umount /dev/hugepages; echo 0 > /proc/sys/vm/nr_hugepages");
    println!("{}", sh(&start));
    assert_eq!(sh("cat /proc/sys/vm/nr_hugepages").trim(), "6");
    assert_eq!(driver(&n).as_deref(), Some("vfio-pci"));

    println!("{}", sh(&format!("{SCRIPT} --undo")));
    let undone = "disable -q barewire-setup.service\ndaemon-reload\n";
    assert!(sh(&format!("cat {calls}")).ends_with(undone));
    sh(&format!("rm {calls}"));
    assert_eq!(sh("ls /etc/systemd/system /etc/udev/rules.d | grep barewire || true"), "");
    assert_eq!(seen(&nics), before, "--undo left something");
    rebind(&n, "vfio-pci");
}

/// Pages of 1 GiB, those of one NUMA node, and more than there is.
#[test]
fn pages_of_every_size_and_of_a_node() {
    if nic(0).is_none() {
        return;
    }
    let pages = "/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages";
    let on_node = "/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages";
    let count = |file: &str| sh(&format!("cat {file}")).trim().parse::<u64>().unwrap();
    let before = [count(pages), count(on_node)];
    let refusal = |arguments: &str| {
        let (code, said) = run(arguments);
        let refused = said.lines().filter(|line| line.starts_with("hugepage-setup.sh: "));
        assert_eq!((code, refused.count()), (Some(2), 1), "{said}");
        said
    };
    println!("{}", sh(&format!("{SCRIPT} --node 0 --2m {}", before[1] + 5)));
    assert_eq!(count(on_node), before[1] + 5);
    // The kernel looks for a whole free one, which there may not be: then it is said.
    let (code, said) = run("--1g 1");
    assert_eq!(code, Some(if count(pages) == 1 { 0 } else { 2 }));
    assert!(code == Some(0) || said.contains("ask for less"), "{said}");
    assert!(refusal("--1g 50").contains("ask for less"));
    assert!(refusal("--node 7 --2m 1").contains("on node 7"));
    println!("{}", sh(&format!("{SCRIPT} --undo")));
    assert_eq!([count(pages), count(on_node)], before, "--undo left pages");
}
