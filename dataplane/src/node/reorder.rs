//! The reorder buffer: early packets of all peers together, and those after a refused one. Data of
//! pulled messages needs no buffer.

use std::ops::Range;

use barewire_driver::frame::RxFrame;

use super::ops::OooPacket;
use super::peer::Peer;
use crate::idx::OooIdx;
use crate::plant::{Bug, planted};
use crate::rel::psn::Psn;
use crate::slab::{Link, Slab};

/// See the module.
#[derive(Debug)]
pub(crate) struct Reorder {
    packets: Slab<OooPacket, (), OooIdx>,
    /// The bytes of the packets, each in the slot of its index.
    pub(super) bytes: Vec<u8>,
    /// Length of a slot, bytes: that of the longest frame that may arrive.
    frame_len: usize,
}

impl Reorder {
    /// Room for frames of `frame_len` bytes.
    pub(super) fn new(frame_len: usize) -> Self {
        // A whole window, unless frames are so long that the memory would be reserved for nothing.
        let count = if frame_len > 16 << 10 { 2048 } else { 4096 };
        let bytes = vec![0; count * frame_len];
        Self { packets: Slab::with_capacity(count), bytes, frame_len }
    }

    /// Packets buffered.
    pub(super) fn len(&self) -> usize {
        self.packets.len()
    }

    /// Packets for which there is room.
    pub(super) fn free_count(&self) -> usize {
        self.packets.free_count()
    }

    /// Whether a frame fits into a slot.
    pub(super) fn holds(&self, frame: &RxFrame<'_>) -> bool {
        frame.len() <= self.frame_len
    }

    /// Buffers packet `psn` of `peer`, which fits into a slot. False if no slot is free.
    pub(super) fn put(&mut self, peer: &mut Peer, psn: Psn, frame: &RxFrame<'_>) -> bool {
        let len = frame.len();
        let packet = OooPacket { psn, len, link: Link::default() };
        let Some(idx) = self.packets.alloc(packet) else { return false };
        let to = self.slot(idx);
        assert!(frame.copy_to(0, &mut self.bytes[to]), "length is the frame's");
        peer.reorder_buf.push_back(&mut self.packets, idx);
        true
    }

    /// Removes packet `psn` of `peer` from its list, if it is buffered. The caller frees its slot.
    pub(super) fn take(&mut self, peer: &mut Peer, psn: Psn) -> Option<OooIdx> {
        let is_it = |idx: &OooIdx| self.packets[*idx].psn == psn;
        let idx = peer.reorder_buf.iter(&self.packets).find(is_it)?;
        peer.reorder_buf.remove(&mut self.packets, idx);
        Some(idx)
    }

    /// Range of the bytes of a packet.
    pub(super) fn slot(&self, idx: OooIdx) -> Range<usize> {
        let at = idx.at() * self.frame_len;
        at..at + self.packets[idx].len
    }

    /// Frees the slot of a removed packet.
    pub(super) fn free(&mut self, idx: OooIdx) {
        if !planted(Bug::HeldPacketLeaked) {
            self.packets.free(idx);
        }
    }

    /// Drops the packets of `peer`.
    pub(super) fn drop_all(&mut self, peer: &mut Peer) {
        while let Some(idx) = peer.reorder_buf.pop_front(&mut self.packets) {
            self.free(idx);
        }
    }
}
