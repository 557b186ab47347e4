//! What several suites and benches share.

pub mod cluster;
pub mod forge;
pub mod nodes;
pub mod openmpi;
pub mod rng;
