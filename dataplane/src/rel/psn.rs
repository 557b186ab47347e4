//! Packet sequence numbers; they live below this room, because wire names them as well.

pub use crate::psn::Psn;
