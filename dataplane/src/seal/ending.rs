//! The end of a frame without a session: an OPEN or an RST.

use super::key::TagKey;
use crate::wire::{BASE_LEN, TAG_LEN, TRAILER_LEN, Ty, sealed};

/// Handshake message and tags at the end of an OPEN or RST.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ending<'a> {
    /// The handshake message; empty if there is none.
    pub(crate) message: &'a [u8],
    /// The key of the Finished tag behind the message of an OPEN in answer.
    pub(crate) finished: Option<&'a TagKey>,
    /// The key of the frame's tag.
    pub(crate) tag_key: &'a TagKey,
}

impl Ending<'_> {
    /// Length, bytes.
    pub(crate) fn len(&self, is_open: bool) -> usize {
        let finished = self.finished.map_or(0, |_| TAG_LEN);
        self.message.len() + finished + TAG_LEN + if is_open { TRAILER_LEN } else { 0 }
    }

    /// Writes it behind the header of a frame; Ethernet header to operation header are the first
    /// `head` bytes. The rest of `bytes` is padding.
    ///
    /// # Panics
    /// If there is no room for it.
    pub(crate) fn put(&self, bytes: &mut [u8], head: usize) {
        let is_open = sealed::ty_of(bytes) == Some(Ty::Open);
        let message_end = head + self.message.len();
        let end = message_end + self.finished.map_or(0, |_| TAG_LEN);
        bytes[head..message_end].copy_from_slice(self.message);
        sealed::mark(bytes, end - BASE_LEN);
        sealed::set_counter(bytes, 0);
        if let Some(finished) = self.finished {
            let tag = finished.tag(&bytes[..message_end]);
            bytes[message_end..end].copy_from_slice(&tag);
        }
        let tag = self.tag_key.tag(&bytes[..end]);
        bytes[end..end + TAG_LEN].copy_from_slice(&tag);
        if is_open {
            // By the checksum a receiver without the key distinguishes a damaged OPEN from one
            // under another key.
            sealed::append_crc(bytes, end + TAG_LEN);
        }
        bytes[head + self.len(is_open)..].fill(0);
    }
}
