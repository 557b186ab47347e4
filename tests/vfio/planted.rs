//! The test of the suite itself: a driver's mistake that no driver notices, and that the guest's
//! IOMMU does. Runs in a guest of its own, which has to be found guilty.

use std::os::fd::RawFd;
use std::time::Duration;

use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::port::MacAddr;

use crate::machine::{nic, pair};

/// The files of this process that are VFIO's containers.
fn containers() -> Vec<RawFd> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let leads = |entry: &std::fs::DirEntry| {
        std::fs::read_link(entry.path()).is_ok_and(|to| to.as_os_str() == "/dev/vfio/vfio")
    };
    let fds = entries.filter(leads).map(|entry| entry.file_name());
    fds.map(|name| name.to_str().unwrap().parse().unwrap()).collect()
}

/// `VFIO_IOMMU_UNMAP_DMA` of everything, behind the back of the driver whose memory it is.
fn unmap_all(container: RawFd) {
    #[repr(C)]
    struct Unmap {
        argsz: u32,
        flags: u32,
        iova: u64,
        size: u64,
    }
    let mut unmap = Unmap { argsz: 24, flags: 1 << 1, iova: 0, size: 0 };
    // SAFETY: the kernel reads and writes the structure, whose length it is told.
    let code = unsafe { libc::ioctl(container, 0x3b72, &raw mut unmap) };
    assert_eq!(code, 0, "{}", std::io::Error::last_os_error());
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
    all.into_iter().for_each(unmap_all);
    let frame = [&b.caps().mac.0[..], &MacAddr::BROADCAST.0, &[0x5a; 50]].concat();
    for _ in 0..4 {
        let _ = a.tx(&TxFrame::whole(&frame));
        let _ = a.flush();
        std::thread::sleep(Duration::from_millis(20));
        let _ = a.rx_burst(32, &mut |_: &RxFrame<'_>| {});
    }
}
