//! What several suites and benches share.

pub mod nodes;
