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
