//! `hugepage-setup.sh`, and the run of an ordinary user after it.

use std::process::Command;

use crate::machine::{driver, nic, rebind, sh};

const SCRIPT: &str = "sh /usr/bin/hugepage-setup.sh";

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

#[test]
fn a_nic_goes_back_to_its_driver() {
    let Some(n) = nic(0) else { return };
    if !sh("ls /sys/bus/pci/drivers").contains("virtio-pci") {
        return;
    }
    rebind(&n, "virtio-pci");
    let old = driver(&n);
    sh(&format!("{SCRIPT} --bind {n}"));
    assert_eq!(driver(&n).as_deref(), Some("vfio-pci"));
    sh(&format!("{SCRIPT} --unbind {n}"));
    assert_eq!(driver(&n), old);
    sh(&format!("{SCRIPT} --undo"));
    rebind(&n, "vfio-pci");
}

/// Goal: what `--persist` leaves behind prepares the machine again after a reboot, and `--undo`
/// takes that away too. Method: systemd is a script that writes down how it was called; the reboot
/// is a machine on which everything is as it was, and the command of the unit.
#[test]
fn a_preparation_outlives_a_reboot() {
    let Some(n) = nic(0) else { return };
    let calls = "/tmp/systemctl.calls";
    sh("mkdir -p /run/systemd/system /etc/systemd/system /etc/udev/rules.d");
    std::fs::write("/bin/systemctl", format!("#!/bin/sh\necho \"$*\" >> {calls}\n")).unwrap();
    sh("chmod +x /bin/systemctl");
    rebind(&n, "");
    sh("umount /dev/hugepages; echo 0 > /proc/sys/vm/nr_hugepages");
    let nics = [n.clone()];
    let before = seen(&nics);
    println!("{}", sh(&format!("{SCRIPT} --2m 6 --bind {n} --group user --persist")));
    let unit = std::fs::read_to_string("/etc/systemd/system/barewire-setup.service").unwrap();
    let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart="));
    let start = start.unwrap_or_else(|| panic!("{unit}")).to_owned();
    assert!(start.starts_with('/') && !start.contains("--persist"), "{start}");
    let rule = std::fs::read_to_string("/etc/udev/rules.d/70-barewire.rules").unwrap();
    assert!(rule.contains("GROUP=\"user\""), "{rule}");
    let said = sh(&format!("cat {calls}"));
    assert_eq!(said, "daemon-reload\nenable -q barewire-setup.service\n");

    rebind(&n, "");
    sh("umount /dev/hugepages; echo 0 > /proc/sys/vm/nr_hugepages");
    println!("{}", sh(&start));
    assert_eq!(sh("cat /proc/sys/vm/nr_hugepages").trim(), "6");
    assert_eq!(driver(&n).as_deref(), Some("vfio-pci"));

    println!("{}", sh(&format!("{SCRIPT} --undo")));
    assert!(sh(&format!("cat {calls}")).ends_with("disable -q barewire-setup.service\n"));
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
    let run = |arguments: &str| {
        let line = format!("{SCRIPT} {arguments}");
        let output = Command::new("sh").args(["-c", &line]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        println!("{}{}", String::from_utf8_lossy(&output.stdout), said.trim());
        (output.status.code(), said)
    };
    let refusal = |arguments: &str| {
        let (code, said) = run(arguments);
        assert_eq!((code, said.lines().count()), (Some(2), 1), "{said}");
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
