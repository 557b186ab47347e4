//! The short way of the pieces of a long message: all but the first of one that comes by itself,
//! and all of one that was asked for.
//!
//! As in `short`: first all questions, and nothing has changed if the answer is no.

use barewire_driver::frame::RxFrame;

use super::Node;
use super::peer::slot_of;
use super::recv::Verdict;
use crate::types::Instant;
use crate::wire::{DataOp, MsgMOp, PlainBase, PlainPiece, verify_crc};

impl Node {
    /// Takes a piece that is next in order and asks for nothing. False if it is anything else:
    /// nothing has happened.
    #[inline(always)]
    pub(super) fn take_piece(&mut self, now: Instant, frame: &RxFrame<'_>) -> bool {
        let crc = self.has_crc() && !frame.is_near();
        let Some((plain, piece)) = PlainBase::piece(frame, crc) else { return false };
        let p = slot_of(plain.dst_sid());
        let Some(peer) = self.peers.at_mut(p) else { return false };
        if !peer.plain
            || peer.path.has_crc() != crc
            || peer.path.is_near() && !frame.is_near()
            || peer.path.is_lossless() && plain.asks_ack()
            || peer.refused != 0
            || !peer.rcv.is_empty()
            || (plain.head.dst ^ self.word) << 16 != 0
            || plain.head.src != peer.word
            || plain.named != peer.next_place()
            || plain.cack != peer.snd.una
            || plain.grant() != peer.snd.credit as u16
        {
            return false;
        }
        let (base, len) = (plain.base(piece.ty(), crc), usize::from(plain.plen()));
        match piece {
            PlainPiece::MsgM => {
                let Ok(op) = MsgMOp::parse(frame, &base) else { return false };
                let follows = self.halves.get(peer.inbound).is_some_and(|half| {
                    op.offset != 0 && (half.off, half.len) == (op.offset, op.msg_len)
                });
                if !follows || crc && !verify_crc(frame, op.payload_off() + len) {
                    return false;
                }
                let taken = self.on_msgm(now, p, frame, &op, (op.payload_off(), len));
                debug_assert!(matches!(taken, Verdict::Accept));
            }
            PlainPiece::Data => {
                let Ok(op) = DataOp::parse(frame, &base) else { return false };
                if crc && !verify_crc(frame, op.payload_off() + len) {
                    return false;
                }
                self.on_data(now, p, frame, &op, (op.payload_off(), len));
            }
        }
        self.count_received(p, frame);
        let active = self.polled_at;
        let peer = &mut self.peers[p];
        let lossless = peer.path.is_lossless();
        (peer.heard, peer.probes) = (active, 0);
        if !lossless {
            peer.note_arrival(now, plain.psn(), false);
            self.acks.soon |= plain.asks_ack();
        }
        self.took(now, p, 1);
        self.peers[p].note_order();
        true
    }
}
