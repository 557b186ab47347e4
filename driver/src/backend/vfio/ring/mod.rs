//! Descriptor rings of NICs, as arithmetic over plain memory, and models of the devices at their
//! other end. No device is needed to test a ring.

pub mod desc;
pub mod e1000;
pub mod model;
pub mod virtq;
pub mod vmxnet3;

#[cfg(test)]
mod tests;
