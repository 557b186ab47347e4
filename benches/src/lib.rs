//! The common parts of the benchmarks: reports, placement and pairing of processes, counting
//! instead of timing, and the endpoints to measure.
//!
//! Rules of every benchmark:
//! - A measurement across cores is compared with the round trip of a cache line between the same
//!   two cores in the same round, since a virtual machine's cores move: without it the absolute
//!   value means nothing ([`CpuPair`]).
//! - Alternatives are measured in interleaved rounds, and the ratio is the median of the rounds'
//!   ratios.
//! - Instructions, allocations and system calls are counted for two run lengths and subtracted
//!   ([`count`]).
//! - The cost of an empty measurement is printed as well (`floor`).

mod args;
pub mod attacked;
pub mod count;
mod cpu_pair;
pub mod duo;
pub mod end;
pub mod group;
pub mod pair;
pub mod remote;
mod report;
mod stats;
pub mod stream;
pub mod switched;
pub mod wires;

pub use args::Args;
pub use cpu_pair::{BouncedLine, CpuPair};
pub use report::{Report, Row};
pub use stats::{Sample, median};
