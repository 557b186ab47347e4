//! What several suites and benches share.

pub mod forge;
pub mod nodes;
pub mod rng;
