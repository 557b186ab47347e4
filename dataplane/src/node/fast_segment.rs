//! The fast path of segments of an eager message after the first (MSGM), and of pulled data (DATA).
//!
//! As in `fast_eager`, every check comes first; if one fails, nothing has changed.

use barewire_driver::frame::RxFrame;

use super::Node;
use super::peer::slot_of;
use super::recv::Verdict;
use crate::types::Instant;
use crate::wire::{BaseWords, DataOp, MsgMOp, SegmentTy, verify_crc};

impl Node {
    /// Processes a segment that is next in order, if nothing waits for its acknowledgement or
    /// credit. False otherwise: nothing has changed.
    #[inline(always)]
    pub(super) fn rx_segment(&mut self, now: Instant, frame: &RxFrame<'_>) -> bool {
        let crc = self.port.far.has_crc() && !frame.is_near();
        let Some((base_words, piece)) = BaseWords::segment(frame, crc) else { return false };
        let p = slot_of(base_words.dst_sid());
        let Some(peer) = self.peers.at_mut(p) else { return false };
        if !peer.fast_path
            || !peer.path.admits(crc, frame.is_near())
            || peer.path.is_lossless() && base_words.asks_ack()
            || peer.refused != 0
            || !peer.rcv.is_empty()
            || !peer.is_from(self.port.addr, &base_words.head)
            || base_words.sid_psn != peer.next_sid_psn()
            || base_words.cack != peer.snd.una
            || base_words.grant() != peer.snd.credit as u16
        {
            return false;
        }
        let (base, len) = (base_words.base(piece.ty(), crc), usize::from(base_words.plen()));
        match piece {
            SegmentTy::MsgM => {
                let Ok(op) = MsgMOp::parse(frame, &base) else { return false };
                let follows = self.reassemblies.get(peer.reassembly).is_some_and(|partial| {
                    op.offset != 0 && (partial.off, partial.len) == (op.offset, op.msg_len)
                });
                if !follows || crc && !verify_crc(frame, op.payload_off() + len) {
                    return false;
                }
                let taken = self.receiving().on_msgm(now, p, frame, &op, (op.payload_off(), len));
                debug_assert!(matches!(taken, Verdict::Accept));
            }
            SegmentTy::Data => {
                let Ok(op) = DataOp::parse(frame, &base) else { return false };
                if crc && !verify_crc(frame, op.payload_off() + len) {
                    return false;
                }
                self.operations().on_data(p, frame, &op, (op.payload_off(), len));
            }
        }
        self.control().count_received(p, frame);
        let active = self.turn.polled_at;
        let peer = &mut self.peers[p];
        let lossless = peer.path.is_lossless();
        (peer.last_rx, peer.probes) = (active, 0);
        if !lossless {
            peer.note_arrival(now, base_words.psn(), false);
            self.acks.note_ar(peer, base_words.psn(), base_words.asks_ack());
        }
        self.advance_rcv_nxt(now, p, 1);
        self.peers[p].note_order();
        true
    }
}
