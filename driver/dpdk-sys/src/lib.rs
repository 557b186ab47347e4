//! Bindings to the DPDK that is installed, made from its headers when barewire is built.
//!
//! Empty without the feature `dpdk`. The names are DPDK's own; its programmer's guide and the
//! headers say what they do. Functions that the headers define inline are called through a wrapper
//! in C, but for the two that every burst goes through: `rx_burst` and `tx_burst` read the
//! table of functions that libdpdk exports, as the headers do.

#[cfg(feature = "dpdk")]
mod bound;

#[cfg(feature = "dpdk")]
pub use bound::*;
