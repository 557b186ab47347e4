//! Reliability of one session, one direction at a time: sequence numbers, what is in flight, what
//! has arrived, round trips.

pub mod congestion;
pub(crate) mod flight;
pub mod psn;
pub mod rtt;
pub mod sack;
pub mod sent;
