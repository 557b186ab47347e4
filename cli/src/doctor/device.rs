//! Checks of what a NIC of our own needs: IOMMU, VFIO, DPDK.

use super::machine::Machine;
use super::{Check, DPDK, VFIO};

pub(super) fn iommu(machine: &Machine) -> Check {
    let name = "iommu";
    let groups = machine.names("/sys/kernel/iommu_groups").len();
    if groups > 0 {
        return Check::ok(name, VFIO, format!("{groups} groups"));
    }
    let intel = machine.cpu_line("vendor_id").is_some_and(|vendor| vendor == "GenuineIntel");
    let asked = machine.boot_option("intel_iommu").is_some_and(|value| value.starts_with("on"));
    if machine.is_virtual() {
        let mend = "give the virtual machine an IOMMU on its host (QEMU: -device intel-iommu)";
        return Check::missing(name, VFIO, "none in this virtual machine", mend);
    }
    if intel && !asked {
        let mend = "sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&intel_iommu=on iommu=pt /' \
                    /etc/default/grub && sudo update-grub && sudo reboot";
        return Check::missing(name, VFIO, "no intel_iommu=on on the kernel's line", mend);
    }
    let mend = "switch on VT-d or AMD-Vi (\"IOMMU\") in the firmware's setup: \
                sudo systemctl reboot --firmware-setup";
    Check::missing(name, VFIO, "the firmware offers none", mend)
}

pub(super) fn vfio(machine: &Machine) -> Check {
    let name = "vfio";
    let driver = machine.exists("/sys/bus/pci/drivers/vfio-pci");
    if driver && machine.exists("/dev/vfio/vfio") {
        return Check::ok(name, VFIO, "/dev/vfio/vfio and the driver vfio-pci");
    }
    let release = machine.read("/proc/sys/kernel/osrelease").unwrap_or_default();
    if !driver && !machine.exists(&format!("/lib/modules/{release}")) {
        let found = format!("kernel {release} has no vfio-pci and no folder of modules");
        let mend = "sudo apt-get install -y linux-image-amd64 && sudo reboot";
        return Check::missing(name, VFIO, found, mend);
    }
    let found = if driver { "no /dev/vfio/vfio" } else { "the driver vfio-pci is not loaded" };
    Check::missing(name, VFIO, found, "sudo modprobe vfio-pci")
}

pub(super) fn dpdk(machine: &Machine) -> Check {
    let name = "dpdk";
    let mend = "sudo apt-get install -y libdpdk-dev libclang-dev";
    let Some(version) = dpdk_version(machine) else {
        return Check::missing(name, DPDK, "libdpdk is not installed", mend);
    };
    // 21.11 is the first with the table that the fast path uses, 22.11 the one it is tested with.
    let mut numbers = version.split('.').map_while(|part| part.parse::<u32>().ok());
    if (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < (22, 11) {
        return Check::warn(name, DPDK, format!("{version}: older than 22.11"), mend);
    }
    let built = match cfg!(feature = "dpdk") {
        true => "this build has its ports",
        false => "this build has no dpdk: ports (--features dpdk)",
    };
    Check::ok(name, DPDK, format!("{version} is installed; {built}"))
}

/// The version of the installed `libdpdk`, found where pkg-config looks without being told.
fn dpdk_version(machine: &Machine) -> Option<String> {
    let mut dirs = Vec::new();
    for lib in ["/usr/local/lib", "/usr/local/lib64", "/usr/lib", "/usr/lib64"] {
        dirs.push(format!("{lib}/pkgconfig"));
        // Debian keeps one folder for each architecture.
        let inner = machine.names(lib).into_iter().filter(|name| name.contains("-linux-"));
        dirs.extend(inner.map(|name| format!("{lib}/{name}/pkgconfig")));
    }
    dirs.iter().find_map(|dir| {
        let text = machine.read(&format!("{dir}/libdpdk.pc"))?;
        let version = text.lines().find_map(|line| line.strip_prefix("Version:"))?;
        Some(version.trim().to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::machine::fixture::Fixture;
    use super::*;

    #[test]
    fn an_absent_iommu_is_explained_by_its_cause() {
        let bare = || Fixture::full().without("/sys/kernel/iommu_groups");
        let cpu = |vendor, flags| format!("vendor_id\t: {vendor}\nflags\t: fpu {flags}\n");
        let mend = |fixture: Fixture| iommu(&fixture.machine()).mend.unwrap();
        assert!(mend(bare()).contains("firmware"));
        assert!(mend(bare().with("/proc/cmdline", "quiet")).contains("intel_iommu=on"));
        let amd = cpu("AuthenticAMD", "svm");
        assert!(mend(bare().with("/proc/cpuinfo", &amd)).contains("firmware"));
        let guest = cpu("GenuineIntel", "hypervisor");
        assert!(mend(bare().with("/proc/cpuinfo", &guest)).contains("virtual machine"));
    }

    #[test]
    fn vfio_wants_its_driver_and_its_device() {
        let no_device = Fixture::full().without("/dev/vfio");
        assert_eq!(vfio(&no_device.machine()).found, "no /dev/vfio/vfio");
        let no_driver = Fixture::full().without("/sys/bus/pci/drivers/vfio-pci");
        assert!(vfio(&no_driver.machine()).found.contains("no folder of modules"));
        let modules = no_driver.with("/lib/modules/6.1.0-32-amd64/modules.dep", "");
        assert_eq!(vfio(&modules.machine()).mend.as_deref(), Some("sudo modprobe vfio-pci"));
    }

    #[test]
    fn dpdk_is_found_and_its_age_judged() {
        let file = "/usr/lib/x86_64-linux-gnu/pkgconfig/libdpdk.pc";
        let old = Fixture::full().with(file, "prefix=/usr\nVersion: 20.11.10\n");
        assert_eq!(dpdk(&old.machine()).status, Status::Warn);
        assert_eq!(dpdk(&old.without(file).machine()).status, Status::Missing);
        let own = Fixture::empty().with("/usr/local/lib64/pkgconfig/libdpdk.pc", "Version: 24.11");
        assert!(dpdk(&own.machine()).found.starts_with("24.11 is installed; this build has "));
    }
}
