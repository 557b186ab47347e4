//! What a frame without a session ends with, an OPEN or an RST.

use super::key::TagKey;
use crate::wire::{BASE_LEN, TAG_LEN, TRAILER_LEN, Ty, sealed};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ending<'a> {
    /// The message of the handshake; empty if there is none.
    pub(crate) message: &'a [u8],
    /// What makes the tag behind the message of an OPEN in answer.
    pub(crate) finished: Option<&'a TagKey>,
    /// What makes the tag of the frame.
    pub(crate) tag_key: &'a TagKey,
}

impl Ending<'_> {
    /// Bytes of it.
    pub(crate) fn len(&self, is_open: bool) -> usize {
        let finished = self.finished.map_or(0, |_| TAG_LEN);
        self.message.len() + finished + TAG_LEN + if is_open { TRAILER_LEN } else { 0 }
    }

    /// Puts it behind the header of a frame, whose first `head` bytes that and what is before are;
    /// what follows is padding.
    ///
    /// # Panics
    /// If there is no room for it.
    pub(crate) fn put(&self, bytes: &mut [u8], head: usize) {
        let is_open = sealed::ty_of(bytes) == Some(Ty::Open);
        let said = head + self.message.len();
        let end = said + self.finished.map_or(0, |_| TAG_LEN);
        bytes[head..said].copy_from_slice(self.message);
        sealed::mark(bytes, end - BASE_LEN);
        sealed::set_counter(bytes, 0);
        if let Some(finished) = self.finished {
            let tag = finished.tag(&bytes[..said]);
            bytes[said..end].copy_from_slice(&tag);
        }
        let tag = self.tag_key.tag(&bytes[..end]);
        bytes[end..end + TAG_LEN].copy_from_slice(&tag);
        if is_open {
            // Who cannot tell the tag tells by it a damaged OPEN from one under another key.
            sealed::append_crc(bytes, end + TAG_LEN);
        }
        bytes[head + self.len(is_open)..].fill(0);
    }
}
