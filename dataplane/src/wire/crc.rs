//! The checksum behind the payload: CRC32C from the prologue to the payload's end, little-endian.
//!
//! It covers what the Ethernet FCS does not: switch memory, PCIe, misdirected DMA. It has no key:
//! it detects accidental damage only.

use barewire_driver::frame::{Body, RxFrame};

use super::{PROLOGUE_OFF, TRAILER_LEN};

/// CRC32C of the headers `head` from the prologue on, to be continued over the payload.
///
/// # Panics
/// If `head` is shorter than its Ethernet header.
pub fn crc_of_head(head: &[u8]) -> u32 {
    Body::Bytes(&head[PROLOGUE_OFF..]).crc32c(0)
}

/// The checksum for the trailer of a frame of `head` and `body`.
///
/// # Panics
/// If `head` is shorter than its Ethernet header.
pub fn trailer(head: &[u8], body: &Body<'_>) -> [u8; TRAILER_LEN] {
    body.crc32c(crc_of_head(head)).to_le_bytes()
}

/// Whether the four bytes at `end`, where the payload ends, are the correct checksum. False if the
/// frame is shorter.
pub fn verify_crc(frame: &RxFrame<'_>, end: usize) -> bool {
    let Some(len) = end.checked_sub(PROLOGUE_OFF) else { return false };
    match (frame.crc32c(0, PROLOGUE_OFF, len), frame.chunk_at(end)) {
        (Some(crc), Some(sent)) => crc == u32::from_le_bytes(sent),
        _ => false,
    }
}
