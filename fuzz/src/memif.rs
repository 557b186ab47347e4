//! The other side of a memif: what it says while a connection is made, and what it writes into the
//! rings.

/// See `barewire_driver::backend::memif`: whatever the bytes do, no side leaves its regions, panics
/// or stands still.
pub fn memif(data: &[u8]) {
    barewire_driver::backend::memif::wild_peer(data);
}
