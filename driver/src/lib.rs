//! Moves Ethernet frames and owns the memory they come from and go to; knows no packet of ours.
//!
//! - [`port`]: the [`Port`](port::Port) trait and what a port says of itself.
//! - [`frame`]: a frame on its way out ([`TxFrame`](frame::TxFrame)) and on its way in
//!   ([`RxFrame`](frame::RxFrame)).
//! - [`board`]: memory that the members of a group on one segment share.
//! - [`mem`]: the application's memory, reached by bounded copies only.
//! - [`error`]: why a port does not open.
//! - [`mod@file`]: lengths of files, and memory for them.
//! - [`hint`]: which ways of a program are seldom taken.
//! - [`own_thread`]: how threads of barewire itself are made.

#[cfg(test)]
mod alone;
pub mod backend;
pub mod board;
pub mod clock;
pub mod error;
pub mod file;
pub mod frame;
pub mod hint;
mod mac;
pub mod mem;
pub mod open;
pub mod own_thread;
pub mod port;
mod setup;
mod station;
