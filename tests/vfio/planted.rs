//! The test of the suite itself: a driver's mistake that no driver notices, and that the guest's
//! IOMMU does. Runs in a guest of its own, which has to be found guilty.

use std::fs::File;
use std::os::fd::{BorrowedFd, RawFd};
use std::process::Command;
use std::time::{Duration, Instant};

use barewire_driver::backend::vfio::sys::unmap_all;
use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::port::Station;

use crate::machine::{nic, pair};

/// The files of this process that are VFIO's containers, by other numbers.
fn containers() -> Vec<File> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let leads = |entry: &std::fs::DirEntry| {
        std::fs::read_link(entry.path()).is_ok_and(|to| to.as_os_str() == "/dev/vfio/vfio")
    };
    let fds = entries.filter(leads).map(|entry| entry.file_name());
    let fds: Vec<RawFd> = fds.map(|name| name.to_str().unwrap().parse().unwrap()).collect();
    // SAFETY: the ports keep them open meanwhile.
    let fds = fds.into_iter().map(|fd| unsafe { BorrowedFd::borrow_raw(fd) });
    fds.map(|fd| File::from(fd.try_clone_to_owned().unwrap())).collect()
}

/// Memory is taken away from a NIC that goes on using it. Nothing says so but the IOMMU.
#[test]
fn memory_is_unmapped_while_the_nic_uses_it() {
    if nic(0).is_none() || std::env::var_os("VM_PLANTED").is_none() {
        return;
    }
    let Some([mut a, b]) = pair("") else { return };
    let all = containers();
    assert_eq!(all.len(), 2, "one container for each port");
    for container in &all {
        assert_ne!(unmap_all(container).unwrap(), 0, "nothing was mapped");
    }
    // A clone keeps the container alive.
    drop(all);
    let frame = [&b.caps().station.mac.0[..], &Station::BROADCAST.mac.0, &[0; 50]].concat();
    // A busy host looks at the NIC's doorbell late; a port that is closed by then has asked
    // nothing.
    let end = Instant::now() + Duration::from_secs(60);
    while !has_refused() {
        assert!(Instant::now() < end, "the IOMMU refused nothing");
        let _ = a.tx(&TxFrame::whole(&frame));
        let _ = a.flush();
        std::thread::sleep(Duration::from_millis(20));
        let _ = a.rx_burst(32, &mut |_: &RxFrame<'_>| {});
    }
}

/// Whether the guest's kernel has told of an access that its IOMMU refused.
fn has_refused() -> bool {
    let told = Command::new("dmesg").output().expect("the guest has dmesg").stdout;
    String::from_utf8_lossy(&told).contains("fault addr")
}
