//! What the benches share: how a figure is reported, how a process is placed and paired with
//! another, what is counted instead of timed, and the two ends of a fabric to measure.
//!
//! The rules of every bench here:
//! - Whatever crosses cores is set against a cache line that goes to and fro between the same two
//!   cores in the same round, since a virtual machine's cores move: the absolute figure means
//!   nothing without it ([`Place`]).
//! - What is compared is measured by turns, and the ratio is the median of the ratios of the
//!   rounds.
//! - Instructions, allocations and system calls are counted, for two run lengths, and subtracted
//!   ([`count`]).
//! - What it costs to measure nothing is printed as well (`floor`).

mod args;
pub mod attacked;
pub mod count;
pub mod duo;
pub mod end;
pub mod group;
pub mod pair;
mod place;
pub mod remote;
mod report;
mod stats;
pub mod stream;
pub mod switched;
pub mod wires;

pub use args::Args;
pub use place::{Bounced, Place};
pub use report::{Report, Row};
pub use stats::{Sample, median};
