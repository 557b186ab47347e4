//! The protocols between endpoints, above a reliable stream of packets.

pub mod atomic;
pub mod blocks;
pub mod coll;
pub mod matching;
