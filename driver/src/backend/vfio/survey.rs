//! The NICs of this machine as sysfs shows them: their drivers, their IOMMU groups, and the command
//! that makes one usable through VFIO. Nothing is opened or changed.

use std::path::Path;

use super::Kind;
use crate::setup;

/// Directory of PCI devices in sysfs.
pub(super) const DEVICES: &str = "/sys/bus/pci/devices";

/// Hint for a machine without an IOMMU.
pub const IOMMU_HINT: &str = "see how to switch it on: barewire doctor";

/// A NIC of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicInfo {
    /// Its PCI address.
    pub bdf: String,
    /// PCI vendor and device id.
    pub id: (u16, u16),
    /// The kernel driver bound to it, if any.
    pub driver: Option<String>,
    /// Names of its network interfaces.
    pub interfaces: Vec<String>,
    /// Its IOMMU group.
    pub group: Option<u32>,
    /// Other devices of the group that a kernel driver is bound to, as `ADDRESS (DRIVER)`. If there
    /// are none, the group is viable once the NIC itself is bound to vfio-pci.
    pub group_blockers: Vec<String>,
    /// Its NUMA node, if the machine has several.
    pub numa_node: Option<u32>,
    /// Whether a driver of this crate supports it.
    pub has_driver: bool,
    /// For a virtual function (SR-IOV): its physical function.
    pub physical: Option<PhysicalFunction>,
}

/// The physical function of a virtual one.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct PhysicalFunction {
    /// Its PCI address.
    pub bdf: String,
    /// Name of its network interface; empty if there is none.
    pub interface: String,
    /// Index of the virtual function, from 0.
    pub number: u32,
}

impl NicInfo {
    /// Name of the kind of NIC.
    pub fn kind_name(&self) -> &'static str {
        Kind::of(self.id).map_or("NIC without a driver here", Kind::name)
    }

    /// PCI vendor and device id, such as `8086:10d3`.
    pub fn ids_text(&self) -> String {
        let (vendor, device) = self.id;
        format!("{vendor:04x}:{device:04x}")
    }

    /// PCI ids, IOMMU group, NUMA node, physical function and kernel driver, in one line.
    pub fn location(&self) -> String {
        let mut place = self.ids_text();
        if let Some(group) = self.group {
            place.push_str(&format!(", IOMMU group {group}"));
        }
        if let Some(node) = self.numa_node {
            place.push_str(&format!(", NUMA node {node}"));
        }
        if let Some(physical) = &self.physical {
            place.push_str(&format!(", VF {} of {}", physical.number, physical.bdf));
        }
        let driver = self.driver.as_deref().unwrap_or("none");
        place.push_str(&format!(", driver {driver}"));
        if !self.interfaces.is_empty() {
            place.push_str(&format!(" ({})", self.interfaces.join(", ")));
        }
        place
    }

    /// Why it cannot be opened, and the command that fixes it; `None` if it can.
    pub fn obstacle(&self) -> Option<(String, String)> {
        let bdf = &self.bdf;
        if !self.has_driver {
            let why = "there is no driver for it here".to_owned();
            return Some((why, format!("take it through DPDK (dpdk:{bdf}) or the kernel")));
        }
        if self.group.is_none() {
            let why = "behind no IOMMU".to_owned();
            return Some((why, IOMMU_HINT.to_owned()));
        }
        let busy = match self.interfaces.as_slice() {
            [] => String::new(),
            names => format!(" ({} stops working then)", names.join(", ")),
        };
        let mut binds = bdf.clone();
        for other in self.group_blockers.iter().filter_map(|other| other.split(' ').next()) {
            binds.push(' ');
            binds.push_str(other);
        }
        let setup = setup::command();
        let free = format!("sudo {setup} --bind {binds}{busy}");
        if !self.group_blockers.is_empty() {
            return Some((format!("its group also has {}", self.group_blockers.join(", ")), free));
        }
        match self.driver.as_deref() {
            Some("vfio-pci") => None,
            Some(driver) => Some((format!("driven by {driver}"), free)),
            None => Some(("not bound to vfio-pci".to_owned(), free)),
        }
    }

    /// [`obstacle`](Self::obstacle) as one line.
    pub fn unusable_reason(&self) -> Option<String> {
        self.obstacle().map(|(why, mend)| format!("{why}; {mend}"))
    }
}

/// The Ethernet controllers of this machine, sorted by address.
pub fn nics() -> Vec<NicInfo> {
    nics_in(Path::new(DEVICES))
}

/// As [`nics`], from a directory with the layout of `/sys/bus/pci/devices`.
pub fn nics_in(devices: &Path) -> Vec<NicInfo> {
    let mut names = names(devices);
    names.retain(|bdf| number(&devices.join(bdf).join("class")).is_some_and(|c| c >> 8 == 0x0200));
    names.into_iter().filter_map(|bdf| nic(devices, bdf)).collect()
}

fn nic(devices: &Path, bdf: String) -> Option<NicInfo> {
    let dir = devices.join(&bdf);
    let [vendor, device, _] = ids_in(&dir)?;
    let node = std::fs::read_to_string(dir.join("numa_node")).unwrap_or_default();
    let mut interfaces = names(&dir.join("net"));
    // The interface of a virtio NIC is one level below.
    for inner in names(&dir).into_iter().filter(|name| name.starts_with("virtio")) {
        interfaces.extend(names(&dir.join(inner).join("net")));
    }
    let id = (vendor, device);
    Some(NicInfo {
        id,
        driver: driver_of(&dir),
        interfaces,
        group: group_of(&dir),
        group_blockers: group_blockers(&dir),
        numa_node: node.trim().parse().ok(),
        has_driver: Kind::of(id).is_some(),
        physical: physical_in(devices, &bdf),
        bdf,
    })
}

/// The physical function of a virtual function; `None` for other devices.
pub(super) fn physical_of(bdf: &str) -> Option<PhysicalFunction> {
    physical_in(Path::new(DEVICES), bdf)
}

fn physical_in(devices: &Path, bdf: &str) -> Option<PhysicalFunction> {
    let link = std::fs::read_link(devices.join(bdf).join("physfn")).ok()?;
    let physical = link.file_name()?.to_str()?.to_owned();
    let dir = devices.join(&physical);
    let number = names(&dir).iter().find_map(|name| {
        let number = name.strip_prefix("virtfn")?.parse().ok()?;
        let is_it = std::fs::read_link(dir.join(name)).ok()?.file_name()?.to_str()? == bdf;
        is_it.then_some(number)
    });
    let interface = names(&dir.join("net")).into_iter().next().unwrap_or_default();
    Some(PhysicalFunction { bdf: physical, interface, number: number.unwrap_or(0) })
}

/// The number of a device's IOMMU group.
pub(super) fn group_of(dir: &Path) -> Option<u32> {
    std::fs::read_link(dir.join("iommu_group")).ok()?.file_name()?.to_str()?.parse().ok()
}

/// Name of the kernel driver bound to a device.
pub(super) fn driver_of(dir: &Path) -> Option<String> {
    let link = std::fs::read_link(dir.join("driver")).ok()?;
    Some(link.file_name()?.to_str()?.to_owned())
}

/// Other devices of the same group whose drivers make the group not viable. Bridges and devices
/// without a driver do not.
pub(super) fn group_blockers(dir: &Path) -> Vec<String> {
    let own = dir.file_name().and_then(|name| name.to_str()).unwrap_or("");
    let group = dir.join("iommu_group/devices");
    let others = names(&group).into_iter().filter(|name| name != own);
    others
        .filter_map(|name| {
            let driver = driver_of(&group.join(&name))?;
            let is_fine = ["vfio-pci", "pcieport", "pci-stub"].contains(&driver.as_str());
            (!is_fine).then(|| format!("{name} ({driver})"))
        })
        .collect()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Vendor, device and revision of the PCI device at `bdf`; `None` if there is none.
pub fn ids_of(bdf: &str) -> Option<[u16; 3]> {
    ids_in(&Path::new(DEVICES).join(bdf))
}

fn ids_in(dir: &Path) -> Option<[u16; 3]> {
    let half = |name| number(&dir.join(name)).and_then(|n| u16::try_from(n).ok());
    Some([half("vendor")?, half("device")?, half("revision").unwrap_or(0)])
}

/// Name of the kernel driver bound to the PCI device at `bdf`.
pub fn driver_at(bdf: &str) -> Option<String> {
    driver_of(&Path::new(DEVICES).join(bdf))
}

/// A file that holds a number such as `0x1af4`.
fn number(file: &Path) -> Option<u32> {
    let text = std::fs::read_to_string(file).ok()?;
    u32::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir_all, write};
    use std::os::unix::fs::symlink;

    use super::*;

    /// A directory like sysfs with two NICs in IOMMU group 7.
    fn machine(first: Option<&str>, second: Option<&str>) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        create_dir_all(at("groups/7/devices")).unwrap();
        for driver in ["vfio-pci", "e1000e", "pcieport"] {
            create_dir_all(at(&format!("drivers/{driver}"))).unwrap();
        }
        let devices = [
            ("0000:00:01.0", "0x060400", "0x8086", "0x3420", Some("pcieport")),
            ("0000:05:00.0", "0x020000", "0x8086", "0x10d3", first),
            ("0000:05:00.1", "0x020000", "0x15b3", "0x1017", second),
        ];
        for (bdf, class, vendor, device, driver) in devices {
            let dir = at(&format!("devices/{bdf}"));
            create_dir_all(dir.join("net/eth0")).unwrap();
            for (file, text) in [("class", class), ("vendor", vendor), ("device", device)] {
                write(dir.join(file), format!("{text}\n")).unwrap();
            }
            write(dir.join("numa_node"), "-1\n").unwrap();
            symlink(at("groups/7"), dir.join("iommu_group")).unwrap();
            symlink(&dir, at(&format!("groups/7/devices/{bdf}"))).unwrap();
            if let Some(driver) = driver {
                symlink(at(&format!("drivers/{driver}")), dir.join("driver")).unwrap();
            }
        }
        root
    }

    fn unusable_reason_of(first: Option<&str>, second: Option<&str>) -> Option<String> {
        let root = machine(first, second);
        let nics = nics_in(&root.path().join("devices"));
        assert_eq!(
            nics.iter().map(|n| &*n.bdf).collect::<Vec<_>>(),
            ["0000:05:00.0", "0000:05:00.1"]
        );
        assert!(nics[0].has_driver && !nics[1].has_driver && nics[0].group == Some(7));
        assert!(nics[1].unusable_reason().unwrap().contains("no driver for it here"));
        assert!(nics[1].location().starts_with("15b3:1017, IOMMU group 7"));
        nics[0].unusable_reason()
    }

    #[test]
    fn a_nic_says_what_keeps_it_from_being_used() {
        assert_eq!(unusable_reason_of(Some("vfio-pci"), None), None);
        assert_eq!(unusable_reason_of(Some("vfio-pci"), Some("vfio-pci")), None);
        let own = unusable_reason_of(Some("e1000e"), None).unwrap();
        let bind = format!("sudo {} --bind 0000:05:00.0", setup::command());
        assert_eq!(own, format!("driven by e1000e; {bind} (eth0 stops working then)"));
        assert!(unusable_reason_of(None, None).unwrap().starts_with("not bound to vfio-pci; sudo"));
        let shared = unusable_reason_of(Some("vfio-pci"), Some("e1000e")).unwrap();
        assert!(shared.contains("0000:05:00.1 (e1000e)"), "{shared}");
        assert!(shared.contains(&format!("{bind} 0000:05:00.1")), "{shared}");
    }

    /// A virtual function is listed with its physical function and index.
    #[test]
    fn a_virtual_function_names_its_card() {
        let root = machine(Some("e1000e"), Some("vfio-pci"));
        let devices = root.path().join("devices");
        symlink("../0000:05:00.0", devices.join("0000:05:00.1/physfn")).unwrap();
        symlink("../0000:05:00.7", devices.join("0000:05:00.0/virtfn0")).unwrap();
        symlink("../0000:05:00.1", devices.join("0000:05:00.0/virtfn3")).unwrap();
        let nics = nics_in(&devices);
        let (bdf, interface) = ("0000:05:00.0".to_owned(), "eth0".to_owned());
        let expected = PhysicalFunction { bdf, interface, number: 3 };
        assert_eq!((&nics[0].physical, &nics[1].physical), (&None, &Some(expected)));
        let place = nics[1].location();
        assert!(place.contains(", VF 3 of 0000:05:00.0, driver vfio-pci"), "{place}");
    }
}
