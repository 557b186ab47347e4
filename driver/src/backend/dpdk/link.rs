//! The state of a link.

use std::mem::MaybeUninit;

use barewire_dpdk_sys as sys;

/// Whether the link of `port` is up, and its speed in bit/s, 0 if unknown.
pub(super) fn link(port: u16) -> (bool, u64) {
    let mut link = MaybeUninit::<sys::rte_eth_link>::zeroed();
    // SAFETY: fills a struct that is local; zeros are one.
    let (code, link) = unsafe {
        let code = sys::rte_eth_link_get_nowait(port, link.as_mut_ptr());
        (code, link.assume_init())
    };
    let known = link.link_speed != 0 && link.link_speed != u32::MAX;
    let bps = if known { u64::from(link.link_speed) * 1_000_000 } else { 0 };
    (code == 0 && link.link_status() != 0, bps)
}
