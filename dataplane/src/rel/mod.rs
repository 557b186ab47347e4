//! Reliability: what makes a stream of packets that are lost, repeated and reordered arrive in
//! order and each once.

pub mod psn;
pub mod sack;
