//! What the man pages promise, one row at a time.
//!
//! Row ids (R1, M7, X50 ...) are those of the feature list; `table.rs` knows all rows that messages
//! can meet and fails if one has neither a test that quotes it nor a reason.
//!
//! Two domains of one process talk over a loopback segment, so a test drives both sides and sees
//! everything that happens.

mod cm;
mod codes;
mod coll;
mod execution;
mod harness;
mod kfi;
mod lending;
mod matching;
mod msg;
mod multicast;
mod objects;
mod queues;
mod rma;
mod rules;
mod scalable;
mod table;
