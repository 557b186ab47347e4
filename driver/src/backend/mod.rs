//! The devices, and ports around a port.

pub mod afpacket;
mod batch;
#[cfg(feature = "dpdk")]
pub mod dpdk;
pub mod fault;
mod hairpin;
pub mod loopback;
pub mod pcap;
pub mod shm;
pub mod vfio;

use std::time::Duration;

/// Sleeps until one of `fds` has something, at most for `timeout`. May return early.
fn sleep(fds: &mut [libc::pollfd], timeout: Duration) {
    let timeout = libc::timespec {
        tv_sec: timeout.as_secs().min(1 << 30) as libc::time_t,
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // SAFETY: `ppoll` reads and writes the entries of a slice and reads a timespec, both of which
    // live across the call; null means the signal mask stays.
    unsafe {
        let (at, count) = (fds.as_mut_ptr(), fds.len() as libc::nfds_t);
        libc::ppoll(at, count, &raw const timeout, std::ptr::null());
    }
}
