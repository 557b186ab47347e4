//! Errors of opening a NIC through VFIO, each with the command that fixes it.

use std::io;
use std::path::PathBuf;

use super::kind;
use super::survey::PhysicalFunction;
use crate::port::MacAddr;
use crate::setup;

/// Why a NIC did not open. The NIC is left as it was.
///
/// Each message is one line and ends in what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum VfioError {
    /// There is no PCI device at this address.
    #[error("there is no PCI device {bdf}; see what there is: barewire info")]
    NoDevice {
        /// The address that was asked for.
        bdf: String,
    },
    /// The device is in no IOMMU group: the IOMMU is disabled, or does not cover it.
    #[error("{bdf} is behind no IOMMU; see how to switch it on: barewire doctor")]
    NoIommu {
        /// The NIC.
        bdf: String,
    },
    /// `/dev/vfio/vfio` is missing.
    #[error("the kernel has no VFIO loaded; sudo modprobe vfio-pci")]
    NoVfio,
    /// The NIC is bound to another kernel driver, or to none.
    #[error("{bdf} is {}; sudo {setup} --bind {bdf}", match driver {
        Some(driver) => format!("driven by {driver}, not by vfio-pci"),
        None => "not bound to vfio-pci".to_owned(),
    }, setup = setup::command())]
    Unbound {
        /// The NIC.
        bdf: String,
        /// The driver that is bound to it.
        driver: Option<String>,
    },
    /// No permission to open the group's file.
    #[error("{}: {source}; sudo {setup} --bind {bdf} --group $(id -gn)", path.display(),
        setup = setup::command())]
    NoPermission {
        /// The NIC.
        bdf: String,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Another process has the group open.
    #[error("{bdf} is in use by another process; see by which: sudo fuser -v {}", path.display())]
    Busy {
        /// The NIC.
        bdf: String,
        /// The group's file.
        path: PathBuf,
    },
    /// Other devices of the same group are bound to kernel drivers.
    #[error("{bdf} shares IOMMU group {group} with {}; sudo {setup} --bind {}",
        others.join(", "), bind_args(bdf, others), setup = setup::command())]
    NotViable {
        /// The NIC.
        bdf: String,
        /// The group's number.
        group: u32,
        /// The other devices that are bound to kernel drivers, as `ADDRESS (DRIVER)`.
        others: Vec<String>,
    },
    /// The platform has no interrupt remapping, so a device could forge interrupts.
    #[error(
        "this machine has no interrupt remapping, so that {bdf} could forge interrupts; switch it \
         on (x2APIC and VT-d in the firmware), or trust the device: echo 1 | sudo tee \
         /sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts"
    )]
    NoInterruptRemapping {
        /// The NIC.
        bdf: String,
    },
    /// The DMA memory exceeds `RLIMIT_MEMLOCK`.
    #[error(
        "{bdf} needs {need} bytes of locked memory and the limit is {limit}; ulimit -l {}, and for \
         every login: sudo {setup} --memlock $(id -un)", need.div_ceil(1024),
        setup = setup::command()
    )]
    Memlock {
        /// The NIC.
        bdf: String,
        /// Bytes of DMA memory needed.
        need: u64,
        /// Bytes that this process may lock.
        limit: u64,
    },
    /// A virtio device that bypasses the IOMMU: it would take IOVAs for physical addresses.
    #[error(
        "{bdf} goes past the IOMMU (it does not offer VIRTIO_F_ACCESS_PLATFORM); start the virtual \
         machine with -device virtio-net-pci,disable-legacy=on,iommu_platform=on"
    )]
    NoAccessPlatform {
        /// The NIC.
        bdf: String,
    },
    /// The driver of the physical function does not answer a virtual function.
    #[error("{bdf} is a virtual function of {}, whose driver does not answer; {}",
        physical.bdf, pf_recovery_command(physical))]
    PfUnresponsive {
        /// The virtual function.
        bdf: String,
        /// Its physical function.
        physical: PhysicalFunction,
    },
    /// The driver of the physical function refused the MAC address of a virtual function.
    #[error("the driver of {} does not let {bdf} have the address {mac}; sudo ip link set {} vf {} \
             mac {mac}", physical.bdf, physical.interface, physical.number)]
    MacRefused {
        /// The virtual function.
        bdf: String,
        /// The address that was asked for.
        mac: MacAddr,
        /// Its physical function.
        physical: PhysicalFunction,
    },
    /// The driver of the physical function refused promiscuous mode.
    #[error("the driver of {0} lets {bdf} have no frames to other stations, which a switch needs; \
             take the whole card: sudo {setup} --bind {0}", physical.bdf, setup = setup::command())]
    PromiscuousRefused {
        /// The virtual function.
        bdf: String,
        /// Its physical function.
        physical: PhysicalFunction,
    },
    /// The device is not supported.
    #[error(
        "{bdf} is a {vendor:04x}:{device:04x}, for which there is no driver here; there are {}",
        kind::list()
    )]
    Unknown {
        /// The device.
        bdf: String,
        /// Its vendor id.
        vendor: u16,
        /// Its device id.
        device: u16,
    },
    /// The device does not support one of the port's options.
    #[error("{bdf}: {why}")]
    Option {
        /// The NIC.
        bdf: String,
        /// What is not supported, and which option to write instead.
        why: String,
    },
    /// The PHY of an I210 or I211 started without a clock.
    #[error(
        "{bdf}: its PHY started without a clock (an erratum of boards without a flash), which the \
         kernel's driver igb mends; sudo {setup} --unbind {bdf}; sleep 10; sudo {setup} --bind \
         {bdf}", setup = setup::command()
    )]
    PhyNoClock {
        /// The NIC.
        bdf: String,
    },
    /// The firmware holds the lock of the PHY.
    #[error(
        "{bdf}: its firmware keeps its PHY to itself; try again in a minute, and if it still does, \
         leave the NIC to the kernel: sudo {setup} --unbind {bdf}", setup = setup::command()
    )]
    PhyLockedByFirmware {
        /// The NIC.
        bdf: String,
    },
    /// The device does not behave as its datasheet says.
    #[error("{bdf}: {why}; reset it: echo 1 | sudo tee /sys/bus/pci/devices/{bdf}/reset")]
    Device {
        /// The NIC.
        bdf: String,
        /// What is wrong.
        why: String,
    },
    /// A system call failed for another reason.
    #[error("{bdf}: {what}: {source}; see the end of: sudo dmesg")]
    Os {
        /// The NIC.
        bdf: String,
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl VfioError {
    /// The closest errno.
    pub fn errno(&self) -> i32 {
        match self {
            Self::NoDevice { .. } | Self::NoVfio | Self::Unbound { .. } => libc::ENODEV,
            Self::NoIommu { .. } | Self::NoAccessPlatform { .. } | Self::Unknown { .. } => {
                libc::EOPNOTSUPP
            }
            Self::NoPermission { .. } => libc::EACCES,
            Self::Busy { .. } | Self::NotViable { .. } | Self::PhyLockedByFirmware { .. } => {
                libc::EBUSY
            }
            Self::NoInterruptRemapping { .. } | Self::MacRefused { .. } => libc::EPERM,
            Self::PromiscuousRefused { .. } => libc::EOPNOTSUPP,
            Self::PfUnresponsive { .. } => libc::ENETDOWN,
            Self::Memlock { .. } => libc::ENOMEM,
            Self::Option { .. } => libc::EINVAL,
            Self::Device { .. } | Self::PhyNoClock { .. } => libc::EIO,
            Self::Os { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
        }
    }
}

/// The command after which the driver of a physical function answers.
fn pf_recovery_command(physical: &PhysicalFunction) -> String {
    match physical.interface.as_str() {
        "" => format!(
            "give it back to the kernel: sudo {} --unbind {}",
            setup::command(),
            physical.bdf
        ),
        name => format!("sudo ip link set {name} up"),
    }
}

/// PCI addresses to bind: the NIC's, and those at the start of each of `others`.
fn bind_args(bdf: &str, others: &[String]) -> String {
    let others = others.iter().filter_map(|other| other.split(' ').next());
    std::iter::once(bdf).chain(others).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: every error is one line with a command or an option to change. Method: all variants.
    #[test]
    fn every_error_is_a_line_with_a_command() {
        let bdf = || "0000:05:00.0".to_owned();
        let source = || io::Error::from_raw_os_error(libc::EACCES);
        let path = || PathBuf::from("/dev/vfio/7");
        let others = vec!["0000:05:00.1 (e1000e)".to_owned()];
        let mac = MacAddr([2, 0, 0, 0, 0, 7]);
        let physical = |interface: &str| PhysicalFunction {
            bdf: "0000:01:00.0".to_owned(),
            interface: interface.to_owned(),
            number: 1,
        };
        let all = [
            VfioError::NoDevice { bdf: bdf() },
            VfioError::NoIommu { bdf: bdf() },
            VfioError::NoVfio,
            VfioError::Unbound { bdf: bdf(), driver: Some("e1000e".into()) },
            VfioError::Unbound { bdf: bdf(), driver: None },
            VfioError::NoPermission { bdf: bdf(), path: path(), source: source() },
            VfioError::Busy { bdf: bdf(), path: path() },
            VfioError::NotViable { bdf: bdf(), group: 7, others },
            VfioError::NoInterruptRemapping { bdf: bdf() },
            VfioError::Memlock { bdf: bdf(), need: 4 << 20, limit: 65_536 },
            VfioError::NoAccessPlatform { bdf: bdf() },
            VfioError::PfUnresponsive { bdf: bdf(), physical: physical("eth0") },
            VfioError::PfUnresponsive { bdf: bdf(), physical: physical("") },
            VfioError::MacRefused { bdf: bdf(), mac, physical: physical("eth0") },
            VfioError::PromiscuousRefused { bdf: bdf(), physical: physical("eth0") },
            VfioError::Unknown { bdf: bdf(), vendor: 0x15b3, device: 0x1017 },
            VfioError::Option {
                bdf: bdf(),
                why: "it carries no MTU of 1; write mtu=2 or less".into(),
            },
            VfioError::PhyNoClock { bdf: bdf() },
            VfioError::PhyLockedByFirmware { bdf: bdf() },
            VfioError::Device { bdf: bdf(), why: "it does not leave reset".into() },
            VfioError::Os { bdf: bdf(), what: "cannot map", source: source() },
        ];
        let words = ["sudo ", "barewire ", "-device ", "there are virtio-net", "; write "];
        for error in all {
            let line = error.to_string();
            assert!(!line.contains('\n') && words.iter().any(|w| line.contains(w)), "{line}");
            assert!(error.errno() > 0);
        }
        let line = VfioError::NotViable {
            bdf: bdf(),
            group: 7,
            others: vec!["0000:05:00.1 (e1000e)".to_owned()],
        };
        assert!(line.to_string().ends_with("--bind 0000:05:00.0 0000:05:00.1"), "{line}");
    }
}
