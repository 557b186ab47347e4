//! The protocols as state machines without IO. Input: bytes, state and time. Output: bytes,
//! completions and deadlines.
#![forbid(unsafe_code)]

pub mod av;
mod cntr;
mod cq;
pub mod error;
pub mod flags;
pub mod idx;
mod index;
pub mod node;
pub mod ping;
pub mod plant;
pub mod poll;
pub mod proto;
pub mod psn;
pub mod rel;
pub mod seal;
pub mod slab;
pub mod table;
pub mod types;
pub mod wheel;
pub mod wire;
