//! The devices, and ports around a port.

pub mod loopback;
pub mod shm;
