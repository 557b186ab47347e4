//! Segments of one request, sent back to back: segments of a long eager message (MSGM) or of pulled
//! data (DATA).
//!
//! Each leaves as [`send_numbered`](Sending::send_numbered) would send it, but the fields that all
//! segments share are looked up and written once.

use barewire_driver::frame::TxFrame;
use barewire_driver::port::Tx;

use super::packet::Step;
use super::{FrameSink, Sending};
use crate::idx::{PeerIdx, TxIdx};
use crate::rel::sent::{BodyRef, RELIABLE_OP_MAX, Sent};
use crate::types::Instant;
use crate::wire::{self, BASE_LEN, TRAILER_LEN, Ty};

/// The common part of the packets of a request's next segments.
pub(super) struct Segments {
    pub(super) ty: Ty,
    /// The operation header. The segment's offset in the request's memory is filled in at
    /// `offset_at`.
    pub(super) op: [u8; RELIABLE_OP_MAX],
    pub(super) op_len: usize,
    pub(super) offset_at: usize,
    /// Offset in the request's memory at which the segments end, bytes.
    pub(super) end: u64,
    /// The packets are kept until they are acknowledged.
    pub(super) keep: bool,
}

impl Sending<'_> {
    /// Sends the next segments of request `w`, at most `most` packets and as far as the window
    /// admits; `TxWr::sent` counts the bytes. [`Step::Full`] if the port or a pool had no room for
    /// the next.
    pub(super) fn send_segments(
        &mut self,
        now: Instant,
        (p, w): (PeerIdx, TxIdx),
        segments: &Segments,
        most: usize,
        out: &mut dyn FrameSink,
    ) -> Step {
        let room = self.peers[p].payload_max(segments.op_len) as u64;
        if self.peers[p].station() == self.port.station {
            return self.send_segment_to_self(now, (p, w), segments, room, out);
        }
        let (peer, wr) = (&mut self.peers[p], &mut self.tx.wrs[w]);
        let (crc, lossless) = (peer.path.has_crc(), peer.path.is_lossless());
        let op_end = BASE_LEN + segments.op_len;
        let mut head = [0; BASE_LEN + RELIABLE_OP_MAX];
        head[BASE_LEN..].copy_from_slice(&segments.op);
        let mut base = peer.base(self.port.station, segments.ty);
        for _ in 0..most {
            if wr.sent == segments.end || !peer.snd.open() {
                break;
            }
            if segments.keep && self.sent.is_full() {
                self.port.blocked = true;
                return Step::Full;
            }
            let (offset, len) = (wr.sent, (segments.end - wr.sent).min(room) as u32);
            base.psn = peer.snd.nxt;
            let last = offset + u64::from(len) == segments.end;
            let asks = || self.acks.requests_ar(now, &peer.snd, wr.unacked, last);
            base.ar = if lossless { segments.keep } else { asks() };
            base.plen = len as u16;
            let (fixed, op) = head.split_first_chunk_mut().expect("a head holds a base");
            base.emit(fixed);
            segments.put_offset(op, offset);
            // Prefetched while the frame is written.
            self.sent.prefetch_free();
            let memory = (&self.tx.inject[w.at()], &self.tx.bufs[w.at()]);
            let body = wr.body(memory, offset as usize, len as usize);
            let head = &head[..op_end];
            let tail = if crc { wire::trailer(head, &body) } else { [0; TRAILER_LEN] };
            let tail = &tail[..if crc { TRAILER_LEN } else { 0 }];
            let frame = TxFrame { head, body, tail };
            let frame_len = (frame.len() + peer.path.tag_len()) as u64;
            if out.send(&frame) != Tx::Sent {
                // No route: the peer may return; T_dead decides.
                self.port.blocked = true;
                return Step::Full;
            }
            self.counters.tx_frames += 1;
            self.observed.tallies[p.at()].tx_bytes += frame_len;
            peer.carried_ack();
            wr.sent = offset + u64::from(len);
            if !segments.keep {
                peer.number(now);
                continue;
            }
            let (ty, op) = (segments.ty, (&segments.op, segments.op_len));
            let body = BodyRef::Wr { wr: w, offset, len };
            let record = |psn| Sent::new(psn, ty, op, body, w, now);
            let idx = peer.number_and_keep(now, self.sent, record);
            segments.put_offset(&mut self.sent[idx].op, offset);
            wr.unacked += 1;
            if last && !lossless {
                self.acks.note_sent(&mut self.due.todo, p, peer, base.ar);
            }
        }
        Step::Sent
    }

    /// Sends the next single segment to this node itself.
    #[cold]
    fn send_segment_to_self(
        &mut self,
        now: Instant,
        (p, w): (PeerIdx, TxIdx),
        segments: &Segments,
        room: u64,
        out: &mut dyn FrameSink,
    ) -> Step {
        let offset = self.tx[w].sent;
        let len = (segments.end - offset).min(room);
        let body = BodyRef::Wr { wr: w, offset, len: len as u32 };
        let Segments { ty, mut op, op_len, keep, .. } = *segments;
        segments.put_offset(&mut op, offset);
        let packet = self.data_packet(p, ty, &op[..op_len], body, w, keep);
        if keep && !self.port.can_keep(self.sent) || !self.send_numbered(now, p, packet, keep, out)
        {
            return Step::Full;
        }
        self.tx[w].sent += len;
        Step::Sent
    }
}

impl Segments {
    /// Writes the segment's `offset` into `op`, a copy of the header.
    #[inline(always)]
    fn put_offset(&self, op: &mut [u8], offset: u64) {
        op[self.offset_at..][..8].copy_from_slice(&offset.to_le_bytes());
    }
}
