//! What bindgen made, and the bursts.

#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unsafe_op_in_unsafe_fn,
    unreachable_pub,
    dead_code,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}

pub use generated::*;

/// Receives at most `count` packets of queue `queue` to `pkts` and says how many, as
/// `rte_eth_rx_burst` does; callbacks that somebody put on the queue are not called.
///
/// # Safety
/// `port` is a started port with this queue, `pkts` has room for `count`, and no other thread uses
/// the queue meanwhile. The caller owns the packets that were received.
#[inline(always)]
pub unsafe fn rx_burst(port: u16, queue: u16, pkts: *mut *mut rte_mbuf, count: u16) -> u16 {
    // SAFETY: `port` is one of the table and `queue` one of the port, says the caller; a stopped
    // port has a function that receives nothing.
    unsafe {
        let ops = (&raw const rte_eth_fp_ops).cast::<rte_eth_fp_ops>().add(usize::from(port));
        let queue = *(*ops).rxq.data.add(usize::from(queue));
        match (*ops).rx_pkt_burst {
            Some(burst) => burst(queue, pkts, count),
            None => 0,
        }
    }
}

/// Hands at most `count` packets of `pkts` to queue `queue` and says how many it took, as
/// `rte_eth_tx_burst` does; callbacks that somebody put on the queue are not called.
///
/// # Safety
/// As [`rx_burst`]; the `count` packets are the caller's, and those taken are no longer.
#[inline(always)]
pub unsafe fn tx_burst(port: u16, queue: u16, pkts: *mut *mut rte_mbuf, count: u16) -> u16 {
    // SAFETY: as in `rx_burst`.
    unsafe {
        let ops = (&raw const rte_eth_fp_ops).cast::<rte_eth_fp_ops>().add(usize::from(port));
        let queue = *(*ops).txq.data.add(usize::from(queue));
        match (*ops).tx_pkt_burst {
            Some(burst) => burst(queue, pkts, count),
            None => 0,
        }
    }
}
