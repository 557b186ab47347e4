//! The network cards of this machine: the driver of each, and how to use it.

use barewire_driver::backend::vfio::survey::{IOMMU_HINT, nics_in};

use super::machine::Machine;
use super::{Check, VFIO};

/// What says how to get an IOMMU, among the checks.
const ABOVE: &str = "see the rows iommu and vfio above";

/// A check for each card.
pub(super) fn nics(machine: &Machine) -> Vec<Check> {
    let nics = nics_in(&machine.at("/sys/bus/pci/devices"));
    let check = |nic: barewire_driver::backend::vfio::survey::NicInfo| {
        let found = format!("{}: {}, {}", nic.bdf, nic.kind_name(), nic.location());
        match nic.obstacle() {
            None => Check::ok("nic", VFIO, found),
            Some((why, mend)) => {
                let mend = if mend == IOMMU_HINT { ABOVE } else { &mend };
                Check::missing("nic", VFIO, format!("{found}: {why}"), mend)
            }
        }
    };
    nics.into_iter().map(check).collect()
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::machine::fixture::Fixture;
    use super::*;

    #[test]
    fn a_card_that_the_kernel_has_comes_with_the_command_that_frees_it() {
        let dir = "/sys/bus/pci/devices/0000:05:00.0";
        let mut fixture = Fixture::full();
        for (file, text) in [("class", "0x020000"), ("vendor", "0x8086"), ("device", "0x10d3")] {
            fixture = fixture.with(&format!("{dir}/{file}"), text);
        }
        let checks = nics(&fixture.machine());
        assert_eq!(checks.len(), 1);
        assert_eq!(checks[0].status, Status::Missing);
        assert!(checks[0].found.starts_with("0000:05:00.0: Intel 82574L, 8086:10d3"));
        assert!(checks[0].found.ends_with("behind no IOMMU"));
        assert_eq!(checks[0].mend.as_deref(), Some(ABOVE));
    }

    #[test]
    fn other_devices_are_none_of_our_business() {
        let disk = "/sys/bus/pci/devices/0000:06:00.0/class";
        assert!(nics(&Fixture::full().with(disk, "0x010802").machine()).is_empty());
    }
}
