//! Packet sequence numbers, defined outside of this module because `wire` uses them as well.

pub use crate::psn::Psn;
