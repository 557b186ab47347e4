//! Guarantees of the path to a peer: a property of the session, since one port may reach processes
//! of this node through memory and all others through a NIC.
//!
//! A session is *near* if its OPEN says so and came through memory that only the peer's process can
//! have written (`docs/wire.md`, "Sessions"); any other is *far*. That does not change before the
//! session ends.

use barewire_driver::frame::ETH_HDR_LEN;
use barewire_driver::port::PortCaps;

use crate::rel::sent::WINDOW_LOSSLESS;
use crate::wire::{BASE_LEN, TAG_LEN, TRAILER_LEN};

/// The length field of a sealed frame counts header and payload, and no frame is longer after its
/// Ethernet header than such a length can express.
const _: () = assert!(ETH_HDR_LEN <= BASE_LEN + TAG_LEN);

bitflags::bitflags! {
    /// See the module.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub(crate) struct Path: u8 {
        /// Lossless: every frame that the port accepted arrives, once and in order, so it is not
        /// recorded for retransmission.
        const LOSSLESS = 1 << 0;
        /// Frames carry a checksum.
        const CRC = 1 << 1;
        /// The port knows whether the peer's process is alive.
        const PRESENCE = 1 << 2;
        /// The peer is a process of this node, on a port that also reaches others: its frames are
        /// [near](barewire_driver::frame::RxFrame::is_near), and far frames do not belong to the
        /// session.
        const NEAR = 1 << 3;
        /// Frames are sealed.
        const SEALED = 1 << 4;
    }
}

impl Path {
    /// The path to peers that are not near, on a port with `caps`. `crc`: the setting for
    /// checksums, if there is one; `key`: the node has a key. A lossless port is memory of this
    /// machine, and its frames are not sealed.
    pub(super) fn far(caps: &PortCaps, crc: Option<bool>, key: bool) -> Self {
        let mut path = Self::empty();
        let sealed = key && !caps.lossless;
        path.set(Self::SEALED, sealed);
        path.set(Self::LOSSLESS, caps.lossless);
        path.set(Self::PRESENCE, caps.tells_presence);
        path.set(Self::CRC, crc.unwrap_or(!caps.lossless) && !sealed);
        path
    }

    /// Packets in flight that this end accepts, if its setting is `window`.
    pub(super) fn window(self, window: u32) -> u32 {
        if self.is_lossless() { WINDOW_LOSSLESS } else { window }
    }

    /// Whether the path is lossless.
    #[inline(always)]
    pub(crate) fn is_lossless(self) -> bool {
        self.contains(Self::LOSSLESS)
    }

    /// Whether frames carry a checksum.
    #[inline(always)]
    pub(crate) fn has_crc(self) -> bool {
        self.contains(Self::CRC)
    }

    /// Whether frames are sealed.
    #[inline(always)]
    pub(crate) fn is_sealed(self) -> bool {
        self.contains(Self::SEALED)
    }

    /// Whether a frame may belong to a session on this path: that of a near peer came through
    /// memory, that of a sealed session did not, and any other has a checksum as the path requires.
    #[inline(always)]
    pub(super) fn admits(self, crc: bool, is_near: bool) -> bool {
        self.has_crc() == crc && self.admits_from(is_near)
    }

    /// Whether a frame that came through memory (`is_near`), or not, may belong to a session on
    /// this path.
    #[inline(always)]
    pub(super) fn admits_from(self, is_near: bool) -> bool {
        if is_near { !self.is_sealed() } else { !self.is_near() }
    }

    /// Bytes that follow the payload: a tag, a checksum, or none.
    #[inline]
    pub(super) fn trailer_len(self) -> usize {
        match (self.is_sealed(), self.has_crc()) {
            (true, _) => TAG_LEN,
            (false, true) => TRAILER_LEN,
            (false, false) => 0,
        }
    }

    /// Bytes of the tag that is appended to an outgoing frame.
    #[inline]
    pub(super) fn tag_len(self) -> usize {
        if self.is_sealed() { TAG_LEN } else { 0 }
    }

    /// Payload bytes of a frame with `frame_max` bytes after the Ethernet header and `op_len` bytes
    /// of operation header. 0 if the path to the peer is not known.
    #[inline]
    pub(super) fn room(self, frame_max: u32, op_len: usize) -> usize {
        (frame_max as usize + ETH_HDR_LEN).saturating_sub(BASE_LEN + op_len + self.trailer_len())
    }

    /// Whether the port tells if the peer's process is present.
    #[inline(always)]
    pub(crate) fn tells_presence(self) -> bool {
        self.contains(Self::PRESENCE)
    }

    /// Whether the path leads through memory to a process of this node, on a port that also reaches
    /// others.
    #[inline(always)]
    pub(crate) fn is_near(self) -> bool {
        self.contains(Self::NEAR)
    }
}
