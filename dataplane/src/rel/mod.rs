//! Reliability of one session, one direction at a time: sequence numbers, packets in flight,
//! received packets, round trips.

pub mod congestion;
pub(crate) mod flight;
pub mod psn;
pub mod rtt;
pub mod sack;
pub mod sent;
