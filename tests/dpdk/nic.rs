//! Devices on the PCI bus, which vfio-pci has, with DPDK's drivers and in hugepages. There are two
//! in the guest that `cargo xtask test dpdk` runs these tests in, on one segment.

use crate::ring::{join, ping_pong};

/// Short of what takes an emulated machine long.
const SIZES: [usize; 9] = [0, 1, 64, 256, 1400, 1500, 1501, 16_385, 300_000];

/// PCI address of the guest's NIC `n`; prints why there is none.
fn nic(n: usize) -> Option<String> {
    let nic = std::env::var(format!("NIC{n}")).ok();
    if nic.is_none() {
        println!("SKIPPED: no NIC{n} in the environment, see cargo xtask test dpdk");
    }
    nic
}

fn free_hugepages() -> usize {
    let file = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    std::fs::read_to_string(file).unwrap().trim().parse().unwrap()
}

/// Each takes the device and gives it back, and the next finds it as it was.
#[test]
fn messages_between_two_nics_in_hugepages() {
    let (Some(n), Some(m)) = (nic(0), nic(1)) else { return };
    let before = free_hugepages();
    for round in 0..2 {
        let ends = join([&format!("dpdk(huge=yes):{n}"), &format!("dpdk(huge=yes):{m}")]);
        let free = free_hugepages();
        assert!(free < before, "{free} pages are free in round {round}, as before");
        assert_eq!(ends[0].0.domain.port().mtu, 1500);
        ping_pong(&ends, &SIZES);
    }
}

#[test]
fn messages_between_a_driver_of_dpdk_and_ours() {
    let (Some(n), Some(m)) = (nic(0), nic(1)) else { return };
    ping_pong(&join([&format!("dpdk:{n}"), &format!("vfio:{m}")]), &SIZES);
    ping_pong(&join([&format!("vfio:{n}"), &format!("dpdk:{m}")]), &SIZES);
}
