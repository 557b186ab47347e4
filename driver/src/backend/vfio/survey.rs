//! The NICs of this machine as sysfs shows them: who drives them, what shares their IOMMU group,
//! and what it takes to free one. Nothing is opened or changed.

use std::path::Path;

use super::Kind;
use crate::setup;

/// Where the kernel shows PCI devices.
pub(super) const DEVICES: &str = "/sys/bus/pci/devices";

/// What mends that there is no IOMMU: a command that says it of this machine.
pub const BY_DOCTOR: &str = "see how to switch it on: barewire doctor";

/// A NIC of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicInfo {
    /// Its PCI address.
    pub bdf: String,
    /// Vendor and device.
    pub id: (u16, u16),
    /// The kernel's driver that has it.
    pub driver: Option<String>,
    /// Names of the kernel's interfaces on it.
    pub interfaces: Vec<String>,
    /// Its IOMMU group.
    pub group: Option<u32>,
    /// Devices of the group that the kernel drives, as `ADDRESS (DRIVER)`. Empty: the group is
    /// viable once the NIC itself is bound.
    pub in_the_way: Vec<String>,
    /// Its NUMA node, if the machine has several.
    pub numa_node: Option<u32>,
    /// Whether there is a driver for it here.
    pub is_known: bool,
    /// Of a virtual function (SR-IOV): the card that it is a part of.
    pub physical: Option<Physical>,
}

/// The physical function of a virtual one.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Physical {
    /// Its PCI address.
    pub bdf: String,
    /// The name of the kernel's interface on it; empty if there is none.
    pub interface: String,
    /// Which of its virtual functions this is, from 0 on.
    pub number: u32,
}

impl NicInfo {
    /// The kind of NIC in words.
    pub fn what(&self) -> &'static str {
        Kind::of(self.id).map_or("NIC without a driver here", Kind::name)
    }

    /// Where it sits: number, IOMMU group, NUMA node, who drives it.
    pub fn place(&self) -> String {
        let (vendor, device) = self.id;
        let mut place = format!("{vendor:04x}:{device:04x}");
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

    /// Why it cannot be opened, and the command that mends it; `None` if nothing is in the way.
    pub fn obstacle(&self) -> Option<(String, String)> {
        let bdf = &self.bdf;
        if !self.is_known {
            let why = "there is no driver for it here".to_owned();
            return Some((why, format!("take it through DPDK (dpdk:{bdf}) or the kernel")));
        }
        if self.group.is_none() {
            let why = "behind no IOMMU".to_owned();
            return Some((why, BY_DOCTOR.to_owned()));
        }
        let busy = match self.interfaces.as_slice() {
            [] => String::new(),
            names => format!(" ({} stops working then)", names.join(", ")),
        };
        let mut binds = bdf.clone();
        for other in self.in_the_way.iter().filter_map(|other| other.split(' ').next()) {
            binds.push(' ');
            binds.push_str(other);
        }
        let setup = setup::command();
        let free = format!("sudo {setup} --bind {binds}{busy}");
        if !self.in_the_way.is_empty() {
            return Some((format!("its group also has {}", self.in_the_way.join(", ")), free));
        }
        match self.driver.as_deref() {
            Some("vfio-pci") => None,
            Some(driver) => Some((format!("driven by {driver}"), free)),
            None => Some(("not bound to vfio-pci".to_owned(), free)),
        }
    }

    /// [`obstacle`](Self::obstacle) in one line.
    pub fn why_not(&self) -> Option<String> {
        self.obstacle().map(|(why, mend)| format!("{why}; {mend}"))
    }
}

/// The Ethernet controllers of this machine, by address.
pub fn nics() -> Vec<NicInfo> {
    nics_in(Path::new(DEVICES))
}

/// As [`nics`], in a folder that looks like `/sys/bus/pci/devices`.
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
    // A virtio NIC has its interface one level below.
    for inner in names(&dir).into_iter().filter(|name| name.starts_with("virtio")) {
        interfaces.extend(names(&dir.join(inner).join("net")));
    }
    let id = (vendor, device);
    Some(NicInfo {
        id,
        driver: driver_of(&dir),
        interfaces,
        group: group_of(&dir),
        in_the_way: in_the_way(&dir),
        numa_node: node.trim().parse().ok(),
        is_known: Kind::of(id).is_some(),
        physical: physical_in(devices, &bdf),
        bdf,
    })
}

/// The physical function of a device; `None` if it is no virtual one.
pub(super) fn physical_of(bdf: &str) -> Option<Physical> {
    physical_in(Path::new(DEVICES), bdf)
}

fn physical_in(devices: &Path, bdf: &str) -> Option<Physical> {
    let link = std::fs::read_link(devices.join(bdf).join("physfn")).ok()?;
    let physical = link.file_name()?.to_str()?.to_owned();
    let dir = devices.join(&physical);
    let number = names(&dir).iter().find_map(|name| {
        let number = name.strip_prefix("virtfn")?.parse().ok()?;
        let is_it = std::fs::read_link(dir.join(name)).ok()?.file_name()?.to_str()? == bdf;
        is_it.then_some(number)
    });
    let interface = names(&dir.join("net")).into_iter().next().unwrap_or_default();
    Some(Physical { bdf: physical, interface, number: number.unwrap_or(0) })
}

/// The number of a device's IOMMU group.
pub(super) fn group_of(dir: &Path) -> Option<u32> {
    std::fs::read_link(dir.join("iommu_group")).ok()?.file_name()?.to_str()?.parse().ok()
}

/// The name of the driver that has a device.
pub(super) fn driver_of(dir: &Path) -> Option<String> {
    let link = std::fs::read_link(dir.join("driver")).ok()?;
    Some(link.file_name()?.to_str()?.to_owned())
}

/// Other devices of the same group whose drivers keep VFIO from using it. Bridges are allowed, as
/// are devices without a driver.
pub(super) fn in_the_way(dir: &Path) -> Vec<String> {
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

/// The driver that has the PCI device at `bdf`.
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

    /// A folder like sysfs with two NICs in group 7, one of them the kernel's.
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

    fn why_not(first: Option<&str>, second: Option<&str>) -> Option<String> {
        let root = machine(first, second);
        let nics = nics_in(&root.path().join("devices"));
        assert_eq!(
            nics.iter().map(|n| &*n.bdf).collect::<Vec<_>>(),
            ["0000:05:00.0", "0000:05:00.1"]
        );
        assert!(nics[0].is_known && !nics[1].is_known && nics[0].group == Some(7));
        assert!(nics[1].why_not().unwrap().contains("no driver for it here"));
        assert!(nics[1].place().starts_with("15b3:1017, IOMMU group 7"));
        nics[0].why_not()
    }

    #[test]
    fn a_nic_says_what_keeps_it_from_being_used() {
        assert_eq!(why_not(Some("vfio-pci"), None), None);
        assert_eq!(why_not(Some("vfio-pci"), Some("vfio-pci")), None);
        let own = why_not(Some("e1000e"), None).unwrap();
        let bind = format!("sudo {} --bind 0000:05:00.0", setup::command());
        assert_eq!(own, format!("driven by e1000e; {bind} (eth0 stops working then)"));
        assert!(why_not(None, None).unwrap().starts_with("not bound to vfio-pci; sudo"));
        let shared = why_not(Some("vfio-pci"), Some("e1000e")).unwrap();
        assert!(shared.contains("0000:05:00.1 (e1000e)"), "{shared}");
        assert!(shared.contains(&format!("{bind} 0000:05:00.1")), "{shared}");
    }

    /// A virtual function is told with the card that it is a part of, and which one it is.
    #[test]
    fn a_virtual_function_names_its_card() {
        let root = machine(Some("e1000e"), Some("vfio-pci"));
        let devices = root.path().join("devices");
        symlink("../0000:05:00.0", devices.join("0000:05:00.1/physfn")).unwrap();
        symlink("../0000:05:00.7", devices.join("0000:05:00.0/virtfn0")).unwrap();
        symlink("../0000:05:00.1", devices.join("0000:05:00.0/virtfn3")).unwrap();
        let nics = nics_in(&devices);
        let (bdf, interface) = ("0000:05:00.0".to_owned(), "eth0".to_owned());
        let expected = Physical { bdf, interface, number: 3 };
        assert_eq!((&nics[0].physical, &nics[1].physical), (&None, &Some(expected)));
        let place = nics[1].place();
        assert!(place.contains(", VF 3 of 0000:05:00.0, driver vfio-pci"), "{place}");
    }
}
