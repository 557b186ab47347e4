//! Descriptor rings of NICs over plain memory, and models of the devices that use them. Testing a
//! ring needs no device.

pub mod desc;
pub mod e1000;
pub mod model;
pub mod virtq;
pub mod vmxnet3;

#[cfg(test)]
mod tests;
