//! The protocols between endpoints, above a reliable stream of packets.

pub mod blocks;
pub mod matching;
