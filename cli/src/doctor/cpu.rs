//! Checks of the kernel and the processors.

use super::machine::Machine;
use super::{Check, SHM, SPEED};

/// The oldest kernel that the suites are run on.
const KERNEL_WANTED: (u32, u32) = (5, 10);

pub(super) fn kernel(machine: &Machine) -> Check {
    let name = "kernel";
    let mend = "sudo apt-get install -y linux-image-amd64 && sudo reboot";
    let Some(release) = machine.read("/proc/sys/kernel/osrelease") else {
        return Check::warn(name, SHM, "/proc cannot be read", "sudo mount -t proc proc /proc");
    };
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < KERNEL_WANTED {
        return Check::warn(name, SHM, format!("{release}: older than 5.10, not tested"), mend);
    }
    Check::ok(name, SHM, release)
}

pub(super) fn count(machine: &Machine) -> Check {
    let name = "cpus";
    match machine.read("/sys/devices/system/cpu/online") {
        None => Check::warn(name, SPEED, "/sys cannot be read", "sudo mount -t sysfs sysfs /sys"),
        Some(online) if online == "0" => {
            let found = "one: both sides of a local exchange and their pollers share it";
            Check::warn(name, SPEED, found, "give this machine a second CPU")
        }
        Some(online) => Check::ok(name, SPEED, format!("online: {online}")),
    }
}

pub(super) fn isolation(machine: &Machine) -> Check {
    let name = "isolation";
    let isolated = machine
        .boot_option("isolcpus")
        .filter(|value| !value.is_empty())
        .or_else(|| machine.read("/sys/devices/system/cpu/isolated").filter(|v| !v.is_empty()));
    let quiet = machine.boot_option("nohz_full").filter(|value| !value.is_empty());
    let mend = "sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&isolcpus=1 nohz_full=1 /' \
                /etc/default/grub && sudo update-grub && sudo reboot (1: the CPUs that poll)";
    match (isolated, quiet) {
        (Some(cpus), Some(quiet)) => {
            Check::ok(name, SPEED, format!("isolcpus {cpus}, nohz_full {quiet}"))
        }
        (Some(cpus), None) => {
            let found = format!("isolcpus {cpus}, but the timer interrupts them: no nohz_full");
            Check::warn(name, SPEED, found, mend)
        }
        (None, _) => {
            let found = "no CPU is kept for polling: others may run on it at any time";
            Check::warn(name, SPEED, found, mend)
        }
    }
}

pub(super) fn governor(machine: &Machine) -> Check {
    let name = "governor";
    let dir = "/sys/devices/system/cpu";
    let cpus = machine.names(dir).into_iter();
    let mut found: Vec<String> = cpus
        .filter_map(|cpu| machine.read(&format!("{dir}/{cpu}/cpufreq/scaling_governor")))
        .collect();
    found.sort();
    found.dedup();
    if found.is_empty() {
        return Check::ok(name, SPEED, "the kernel does not control the clock here");
    }
    if found == ["performance"] {
        return Check::ok(name, SPEED, "performance");
    }
    let mend = format!("echo performance | sudo tee {dir}/cpu*/cpufreq/scaling_governor");
    Check::warn(name, SPEED, found.join(", "), mend)
}

pub(super) fn smt(machine: &Machine) -> Check {
    let name = "smt";
    let dir = "/sys/devices/system/cpu/smt";
    if machine.read(&format!("{dir}/active")).as_deref() == Some("1") {
        let found = "on: a poller and its sibling share one core";
        return Check::warn(name, SPEED, found, format!("echo off | sudo tee {dir}/control"));
    }
    Check::ok(name, SPEED, "off, or none")
}

pub(super) fn clocksource(machine: &Machine) -> Check {
    let name = "clocksource";
    let dir = "/sys/devices/system/clocksource/clocksource0";
    let Some(current) = machine.read(&format!("{dir}/current_clocksource")) else {
        return Check::warn(name, SPEED, "/sys cannot be read", "sudo mount -t sysfs sysfs /sys");
    };
    if current == "tsc" {
        return Check::ok(name, SPEED, current);
    }
    let available = machine.read(&format!("{dir}/available_clocksource")).unwrap_or_default();
    let mend = if available.split_whitespace().any(|source| source == "tsc") {
        format!("echo tsc | sudo tee {dir}/current_clocksource")
    } else {
        "sudo dmesg | grep -i tsc (says why the kernel gave it up)".to_owned()
    };
    Check::warn(name, SPEED, format!("{current}: reading the time costs a system call"), mend)
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::machine::fixture::{CLOCK, Fixture};
    use super::*;

    #[test]
    fn an_old_kernel_is_named() {
        let check =
            |text| kernel(&Fixture::full().with("/proc/sys/kernel/osrelease", text).machine());
        assert_eq!(check("4.19.0-27-amd64").status, Status::Warn);
        assert_eq!(check("5.9.16").status, Status::Warn);
        assert_eq!(check("5.10.0").status, Status::Ok);
        assert_eq!(check("10.0-rc1").status, Status::Ok);
    }

    #[test]
    fn one_cpu_is_too_few() {
        let fixture = Fixture::full().with("/sys/devices/system/cpu/online", "0\n");
        assert_eq!(count(&fixture.machine()).status, Status::Warn);
    }

    #[test]
    fn isolation_wants_both_words() {
        let check = |line| isolation(&Fixture::full().with("/proc/cmdline", line).machine()).status;
        assert_eq!(check("isolcpus=1 nohz_full=1"), Status::Ok);
        assert_eq!(check("isolcpus=1"), Status::Warn);
        assert_eq!(check("nohz_full=1"), Status::Warn);
        assert_eq!(check("isolcpus nohz_full="), Status::Warn);
    }

    #[test]
    fn one_slow_governor_is_enough() {
        let file = "/sys/devices/system/cpu/cpu1/cpufreq/scaling_governor";
        let check = governor(&Fixture::full().with(file, "powersave").machine());
        assert_eq!((check.status, check.found.as_str()), (Status::Warn, "performance, powersave"));
    }

    #[test]
    fn siblings_are_mentioned() {
        let fixture = Fixture::full().with("/sys/devices/system/cpu/smt/active", "1");
        assert_eq!(smt(&fixture.machine()).status, Status::Warn);
    }

    #[test]
    fn a_slow_clock_is_changed_where_it_can_be() {
        let hpet = Fixture::full().with(&format!("{CLOCK}/current_clocksource"), "hpet");
        let mend = clocksource(&hpet.machine()).mend.unwrap();
        assert_eq!(mend, format!("echo tsc | sudo tee {CLOCK}/current_clocksource"));
        let none = hpet.with(&format!("{CLOCK}/available_clocksource"), "hpet acpi_pm");
        assert!(clocksource(&none.machine()).mend.unwrap().contains("dmesg"));
    }
}
