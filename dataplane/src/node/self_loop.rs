//! Loopback: frames to this node itself do not pass its port.

use std::collections::VecDeque;

use barewire_driver::frame::RxFrame;
use barewire_driver::port::Tx;

use super::packet::Packet;
use super::{Node, Sending};
use crate::idx::PeerIdx;
use crate::types::Instant;
use crate::wire::{self, BASE_LEN};

/// Maximum number of frames queued between two turns.
const LOOP_MAX: usize = 64;

/// See the module.
#[derive(Debug)]
pub(crate) struct SelfLoop {
    pub(super) queue: VecDeque<Vec<u8>>,
    /// Free buffers.
    free: Vec<Vec<u8>>,
}

impl SelfLoop {
    pub(super) fn new() -> Self {
        let (queue, free) = (VecDeque::with_capacity(LOOP_MAX), Vec::with_capacity(LOOP_MAX));
        Self { queue, free }
    }
}

impl Node {
    /// Delivers frames to this node itself.
    pub(super) fn drain_loop(&mut self, now: Instant) {
        for _ in 0..self.self_loop.queue.len() {
            let Some(bytes) = self.self_loop.queue.pop_front() else { return };
            self.on_self_loop_frame(now, &RxFrame::new(&bytes));
            self.self_loop.free.push(bytes);
        }
    }

    /// Processes a frame of this node to itself. It was never on a wire, so it is not sealed.
    fn on_self_loop_frame(&mut self, now: Instant, frame: &RxFrame<'_>) {
        if self.port.far.is_sealed() {
            self.counters.rx_frames += 1;
            self.on_frame_slow(now, frame);
        } else {
            self.on_frame(now, frame);
        }
    }
}

impl Sending<'_> {
    /// Queues a frame to this node itself, which [`transmit`](Node::transmit) passes to `on_frame`.
    #[cold]
    pub(super) fn emit_to_self(&mut self, p: PeerIdx, packet: &Packet<'_>) -> Tx {
        if self.self_loop.queue.len() >= LOOP_MAX {
            return Tx::Full;
        }
        let mut bytes = self.self_loop.free.pop().unwrap_or_default();
        let body = self.body(packet.body);
        let head_len = BASE_LEN + packet.op.len();
        bytes.clear();
        bytes.resize(head_len + body.len(), 0);
        let (fixed, rest) = bytes.split_first_chunk_mut().expect("a head holds a base");
        packet.base(self.port.station, &self.peers[p], body.len()).emit(fixed);
        rest[..packet.op.len()].copy_from_slice(packet.op);
        body.copy_to(&mut rest[packet.op.len()..]);
        if self.peers[p].path.has_crc() {
            let crc = wire::crc_of_head(&bytes).to_le_bytes();
            bytes.extend_from_slice(&crc);
        }
        self.self_loop.queue.push_back(bytes);
        self.due.note_send();
        self.counters.tx_frames += 1;
        let peer = &mut self.peers[p];
        (peer.owed, peer.ack_now) = (0, false);
        Tx::Sent
    }
}
