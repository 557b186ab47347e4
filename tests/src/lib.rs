//! What several suites and benches share.

pub mod cluster;
pub mod forge;
pub mod mpi_coll;
pub mod nodes;
pub mod rng;
