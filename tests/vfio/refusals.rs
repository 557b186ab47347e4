//! What an operator gets wrong: one line each, with the command that mends it.
//!
//! The guest has, besides two NICs that work: NIC2, virtio-net that goes past the IOMMU; NIC3 and
//! NIC4, two functions of one slot.

use crate::machine::{nic, pair, port, rebind, refusal, sh};

#[test]
fn a_nic_that_nobody_or_the_kernel_drives() {
    let Some(n) = nic(0) else { return };
    rebind(&n, "");
    let line = refusal(&format!("vfio:{n}"));
    assert_eq!(line, format!("{n} is not bound to vfio-pci; sudo ./hugepage-setup.sh --bind {n}"));
    if sh("ls /sys/bus/pci/drivers").contains("virtio-pci") {
        rebind(&n, "virtio-pci");
        let line = refusal(&format!("vfio:{n}"));
        assert!(line.contains("driven by virtio-pci") && line.contains("--bind"), "{line}");
    }
    rebind(&n, "vfio-pci");
    port(&format!("vfio:{n}"));
}

#[test]
fn an_address_without_a_device() {
    if nic(0).is_none() {
        return;
    }
    assert!(refusal("vfio:0000:7f:00.0").contains("barewire info"));
    // A bridge is no NIC of ours, and nobody bound it.
    assert!(refusal("vfio:0000:00:00.0").contains("--bind"));
}

#[test]
fn a_nic_that_another_process_has() {
    let Some(n) = nic(0) else { return };
    let first = port(&format!("vfio:{n}"));
    let line = refusal(&format!("vfio:{n}"));
    assert!(line.contains("in use") && line.contains("sudo fuser -v /dev/vfio/"), "{line}");
    drop(first);
    port(&format!("vfio:{n}"));
}

#[test]
fn a_virtio_nic_that_goes_past_the_iommu() {
    let Some(n) = nic(2) else { return };
    let line = refusal(&format!("vfio:{n}"));
    assert!(line.contains("ACCESS_PLATFORM") && line.contains("iommu_platform=on"), "{line}");
}

#[test]
fn a_group_that_the_kernel_has_a_part_of() {
    let (Some(n), Some(other)) = (nic(3), nic(4)) else { return };
    rebind(&other, "virtio-pci");
    let line = refusal(&format!("vfio:{n}"));
    assert!(line.contains(&format!("{other} (virtio-pci)")), "{line}");
    assert!(line.ends_with(&format!("--bind {n} {other}")), "{line}");
    rebind(&other, "");
    port(&format!("vfio:{n}"));
    rebind(&other, "vfio-pci");
    port(&format!("vfio:{n}"));
}

#[test]
fn an_mtu_that_the_nic_does_not_carry() {
    let Some(n) = nic(0) else { return };
    let line = refusal(&format!("vfio:{n},mtu=20000"));
    assert!(line.contains("20000"), "{line}");
}

/// Without hugepages its memory is ordinary pages.
#[test]
fn a_machine_without_hugepages() {
    if nic(0).is_none() {
        return;
    }
    let before = sh("cat /proc/sys/vm/nr_hugepages");
    sh("echo 0 > /proc/sys/vm/nr_hugepages");
    assert!(pair("").is_some());
    sh(&format!("echo {} > /proc/sys/vm/nr_hugepages", before.trim()));
}

/// In a guest of its own: the platform cannot keep a device from forging interrupts.
#[test]
fn a_machine_without_interrupt_remapping() {
    let Some(n) = nic(0) else { return };
    if std::env::var_os("VM_NO_REMAPPING").is_none() {
        return;
    }
    let line = refusal(&format!("vfio:{n}"));
    assert!(line.contains("allow_unsafe_interrupts"), "{line}");
    sh("echo 1 > /sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts");
    port(&format!("vfio:{n}"));
}
