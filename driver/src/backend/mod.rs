//! The devices, and ports around a port.

pub mod fault;
pub mod loopback;
pub mod pcap;
pub mod shm;
