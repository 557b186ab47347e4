//! One-sided operations, transmit side: the packets of the initiator, and the responses of the
//! target.
//!
//! Writes and atomics are packets that the target executes at once; only the packet window bounds
//! them. A read is requested in parts by the pull engine, which bounds the bytes outstanding to
//! this node from all peers. The initiator bounds the state that a target keeps for it:
//! [`READS_MAX`] reads and [`ANSWERS_MAX`] atomic packets without an answer.

use super::ops::{Response, ResponseKind, Rma, RmaKind, TxWr, WrFlags};
use super::packet::Step;
use super::peer::Peer;
use super::pull::Pulls;
use super::tx::TxWrs;
use super::{FrameSink, Operations, Responder, RmaIov, Transmitter};
use crate::cntr::Done;
use crate::idx::{EpIdx, PeerIdx, PullIdx, ResponseIdx, TxIdx};
use crate::plant::{Bug, planted};
use crate::rel::sent::{BodyRef, ReadCounts};
use crate::types::Instant;
use crate::wire::{self, AtomicOp, DataOp, NackReason, ReadOp, RemoteRange, RespOp, Ty, WriteOp};

/// Maximum answers that wait for the end of a burst; further ones become a [`Response`].
pub(super) const ANSWERS_AT_ONCE: usize = 128;

/// Maximum atomic packets without an answer, from one initiator to one target.
pub(crate) const ANSWERS_MAX: usize = 64;

const _: () = assert!(ANSWERS_MAX <= u8::MAX as usize, "a peer's record counts them in a byte");

/// Maximum reads with bytes outstanding, from one initiator to one target.
const READS_MAX: u8 = 32;

/// Maximum operand bytes of an atomic packet, so that its answer fits the same memory.
const ATOMIC_LEN_MAX: usize = 4096;

/// Number of responses that a node with `peers` peers has room for.
pub(super) fn response_slots(peers: usize) -> usize {
    (peers * ANSWERS_MAX).clamp(2 * ANSWERS_AT_ONCE, 1 << 16)
}

impl Rma {
    /// The rest of the remote range in which the next packet starts.
    fn next_range(&mut self) -> RmaIov {
        let list = self.iov.as_slice();
        while self.at < list.len() && self.done == list[self.at].len {
            (self.at, self.done) = (self.at + 1, 0);
        }
        let Some(range) = list.get(self.at) else { return RmaIov::default() };
        RmaIov { addr: range.addr, len: range.len - self.done, key: range.key }
    }

    /// Maximum bytes of the next READ: one READ has one range.
    pub(crate) fn read_room(&self) -> u64 {
        let mut done = self.done;
        for range in &self.iov.as_slice()[self.at..] {
            if range.len > done {
                return range.len - done;
            }
            done = 0;
        }
        0
    }

    /// Lays out the operands and compare values packet by packet, if there will be several packets.
    fn lay_out_operands(&mut self, total: usize, seg: u64) {
        let list = self.iov;
        let RmaKind::Atomic(a) = &mut self.kind else { return };
        let single = list.as_slice().iter().filter(|range| range.len > 0).count() == 1;
        let elem = usize::from(a.elem_len);
        if a.operands.is_empty() || a.sent_len <= a.elem_len || single && total as u64 <= seg {
            return;
        }
        let mut laid = Vec::with_capacity(a.operands.len());
        let mut at = 0;
        for range in list.as_slice() {
            let mut left = range.len as usize;
            while left > 0 {
                let n = left.min(seg as usize);
                for base in [at, total + at] {
                    laid.extend_from_slice(&a.operands[base * elem..(base + n) * elem]);
                }
                (at, left) = (at + n, left - n);
            }
        }
        a.operands = laid;
    }

    /// Elements per packet: both the first packet, with `room` bytes of payload, and its answer
    /// have room for them. The operands are laid out accordingly, so later packets have as many,
    /// even if the session's frames have become longer.
    fn atomic_segment(&mut self, wr: &TxWr, room: usize) -> u64 {
        let again = planted(Bug::OperandsEncodedTwice) && wr.sent == 0;
        let RmaKind::Atomic(a) = &mut self.kind else { return 1 };
        let (elem, kept) = (usize::from(a.elem_len), u64::from(a.segment));
        if kept != 0 && !again && !planted(Bug::OperandsAtNewFrameLength) {
            return kept;
        }
        let per_elem = elem.max(usize::from(a.sent_len));
        let segment = (room / per_elem).min(ATOMIC_LEN_MAX / elem) as u16;
        a.segment = segment;
        if kept == 0 || again {
            self.lay_out_operands(wr.len as usize, segment.into());
        }
        segment.into()
    }
}

impl TxWrs {
    /// Assigns the sequence number of an operation whose first packet is about to be sent.
    fn number_rma(&mut self, peer: &Peer, w: TxIdx) -> u16 {
        if self[w].sent == 0 {
            // If the packet is not sent, the number is used again.
            let seq = peer.rma_seq;
            self.rma_mut(w).seq = seq;
        }
        self.rma_of(w).seq
    }

    /// Writes the header of the next READ of read `idx`. Returns the header's length, and the
    /// position in its range up to which it reads.
    pub(super) fn emit_read(&mut self, pulls: &Pulls, idx: PullIdx, out: &mut [u8]) -> usize {
        let pull = &pulls[idx];
        let (w, offset, len) = (pull.wr, pull.requested, pull.requesting);
        let last = offset + u64::from(len) == pull.want;
        let range = self.rma_mut(w).next_range();
        let done = self.rma_of(w).done;
        let wr = &self[w];
        let (dst_ep, rx_ctx, src_ep) = (wr.dst_ep, wr.rx_ctx, wr.src_ep);
        let (rkey, addr) = (range.key, range.addr.wrapping_add(done));
        let end = range.len == u64::from(len);
        let (dst_op, dst_gen) = (idx.get(), pulls.records.generation(idx));
        let range = RemoteRange { dst_ep, rx_ctx, src_ep, seq: 0, last, rkey, addr };
        ReadOp { range, end, answer: false, dst_op, dst_gen, offset, len }.emit(out)
    }
}

impl Transmitter<'_> {
    /// Sends the next packet of the one-sided operation at the head of the queue.
    #[inline]
    pub(super) fn send_rma(
        &mut self,
        now: Instant,
        p: PeerIdx,
        w: TxIdx,
        out: &mut dyn FrameSink,
    ) -> Step {
        if !self.port.can_keep(self.sent) {
            return Step::Full;
        }
        match &self.tx.rma_of(w).kind {
            RmaKind::Write => self.send_write(now, p, w, out),
            RmaKind::Read => self.send_read(now, p, w, out),
            RmaKind::Atomic(_) => self.send_atomic(now, p, w, out),
        }
    }

    fn send_write(&mut self, now: Instant, p: PeerIdx, w: TxIdx, out: &mut dyn FrameSink) -> Step {
        let range = self.tx.rma_mut(w).next_range();
        let seq = self.tx.number_rma(&self.peers[p], w);
        let wr = &self.tx[w];
        let imm = wr.flags.contains(WrFlags::IMM).then_some(wr.data);
        let room = self.peers[p].payload_max(WriteOp::LEN + imm.map_or(0, |_| wire::IMM_LEN));
        let left = range.len.min(wr.len - wr.sent);
        let len = left.min(room as u64);
        let last = wr.sent + len == wr.len;
        let imm = imm.filter(|_| last);
        if imm.is_some() && self.peers[p].credits() == 0 {
            return Step::Wait;
        }
        let done = self.tx.rma_of(w).done;
        let wr = &self.tx[w];
        let (dst_ep, rx_ctx, src_ep) = (wr.dst_ep, wr.rx_ctx, wr.src_ep);
        let (rkey, addr) = (range.key, range.addr.wrapping_add(done));
        let range = RemoteRange { dst_ep, rx_ctx, src_ep, seq, last, rkey, addr };
        let mut op = [0; WriteOp::LEN + wire::IMM_LEN];
        let op_len = WriteOp { range, imm, left, ..WriteOp::default() }.emit(&mut op);
        let body = BodyRef::Wr { wr: w, offset: wr.sent, len: len as u32 };
        let packet = self.sending().data_packet(p, Ty::Write, &op[..op_len], body, w, last);
        if !self.sending().send_numbered(now, p, packet, true, out) {
            return Step::Full;
        }
        self.peers[p].charge_last(self.sent, imm.is_some().into(), true);
        self.tx.rma_mut(w).done += len;
        self.operations().rma_sent(p, w, len, last);
        Step::Sent
    }

    /// Hands a read to the pull engine.
    fn send_read(&mut self, now: Instant, p: PeerIdx, w: TxIdx, out: &mut dyn FrameSink) -> Step {
        if self.tx[w].len == 0 {
            let wr = &self.tx[w];
            let (dst_ep, rx_ctx, src_ep) = (wr.dst_ep, wr.rx_ctx, wr.src_ep);
            let range =
                RemoteRange { dst_ep, rx_ctx, src_ep, last: true, ..RemoteRange::default() };
            let mut op = [0; ReadOp::LEN];
            ReadOp { range, ..ReadOp::default() }.emit(&mut op);
            let packet = self.sending().data_packet(p, Ty::Read, &op, BodyRef::None, w, true);
            if !self.sending().send_numbered(now, p, packet, true, out) {
                return Step::Full;
            }
            self.operations().all_sent(p, w);
            return Step::Sent;
        }
        if self.peers[p].reads >= READS_MAX {
            return Step::Wait;
        }
        if self.pulls.records.free_count() == 0 {
            // Pulls that a peer does not finish, and abandoned reads, hold the records.
            self.port.blocked = true;
            return Step::Full;
        }
        self.peers[p].reads += 1;
        self.peers[p].send_q.remove(self.tx, w);
        self.tx[w].flags.remove(WrFlags::IN_SEND_Q);
        self.operations().begin_read(p, w);
        if self.serve_pulls(now, p, out) { Step::Sent } else { Step::Full }
    }

    fn send_atomic(&mut self, now: Instant, p: PeerIdx, w: TxIdx, out: &mut dyn FrameSink) -> Step {
        let range = self.tx.rma_mut(w).next_range();
        let seq = self.tx.number_rma(&self.peers[p], w);
        let imm_len = if self.tx[w].flags.contains(WrFlags::IMM) { wire::IMM_LEN } else { 0 };
        let room = self.peers[p].payload_max(AtomicOp::LEN + imm_len);
        let wr = &self.tx.wrs[w];
        let seg = self.tx.rma[wr.rma()].atomic_segment(wr, room);
        let (index, total) = (wr.sent, wr.len);
        let n = range.len.min(total - index).min(seg);
        let last = index + n == total;
        let imm = (last && imm_len > 0).then_some(wr.data);
        let (dst_ep, rx_ctx, src_ep) = (wr.dst_ep, wr.rx_ctx, wr.src_ep);
        let injected = wr.flags.contains(WrFlags::INJECTED);
        let (dst_op, dst_gen) = (w, self.tx.wrs.generation(w));
        let credits = self.peers[p].credits();
        let answers = usize::from(self.peers[p].answers);
        let rma = self.tx.rma_of(w);
        let (done, RmaKind::Atomic(a)) = (rma.done, &rma.kind) else { return Step::Wait };
        if imm.is_some() && credits == 0 || a.fetch && answers >= ANSWERS_MAX {
            return Step::Wait;
        }
        let addr = range.addr.wrapping_add(done * u64::from(a.elem_len));
        let end = n == range.len;
        let (rkey, sent_len, fetch) = (range.key, u64::from(a.sent_len), a.fetch);
        let range = RemoteRange { dst_ep, rx_ctx, src_ep, seq, last, rkey, addr };
        let op = AtomicOp {
            range,
            imm,
            end,
            fetch,
            compare: a.sent_len > a.elem_len,
            tagged: a.tagged,
            void: false,
            answer: false,
            dst_op: dst_op.get(),
            dst_gen,
            count: n as u16,
            op: a.op,
            ty: a.ty,
            offset: (index * u64::from(a.elem_len)) as u32,
        };
        let mut bytes = [0; 48];
        let op_len = op.emit(&mut bytes);
        let (offset, len) = (index * sent_len, (n * sent_len) as u32);
        let body = match injected {
            _ if len == 0 => BodyRef::None,
            true => BodyRef::Wr { wr: w, offset, len },
            false => BodyRef::Operands { wr: w, offset: offset as u32, len },
        };
        let packet =
            self.sending().data_packet(p, Ty::Atomic, &bytes[..op_len], body, w, last && !fetch);
        if !self.sending().send_numbered(now, p, packet, true, out) {
            return Step::Full;
        }
        self.operations().atomic_sent(p, w, n, imm.is_some(), last);
        Step::Sent
    }

    /// Sends the next packet of a response.
    pub(super) fn send_response(
        &mut self,
        now: Instant,
        p: PeerIdx,
        j: ResponseIdx,
        out: &mut dyn FrameSink,
    ) -> Step {
        let keep = !self.peers[p].path.is_lossless();
        if keep && !self.port.can_keep(self.sent) {
            return Step::Full;
        }
        let response = &self.responses[j];
        let (dst_op, dst_gen) = (response.dst_op, response.dst_gen);
        let mut op = [0; 16];
        let (ty, body, n) = match response.kind {
            ResponseKind::Read { mr, from, to, left, ep, counts } => {
                let len = left.min(self.peers[p].payload_max(DataOp::LEN) as u32);
                DataOp { dst_op, dst_gen, offset: to }.emit(&mut op);
                let counts = if len == left { counts } else { counts.without_end() };
                (Ty::Data, BodyRef::Mr { mr, offset: from, len, ep, counts }, len)
            }
            ResponseKind::Values { offset, len, .. } => {
                RespOp { dst_op, dst_gen, offset, status: None }.emit(&mut op);
                (
                    Ty::Resp,
                    if len > 0 { BodyRef::Response { response: j } } else { BodyRef::None },
                    0,
                )
            }
            ResponseKind::Failed { len, reason } => {
                RespOp { dst_op, dst_gen, offset: len, status: Some(reason) }.emit(&mut op);
                (Ty::Resp, BodyRef::None, 0)
            }
        };
        let packet = self.sending().data_packet(p, ty, &op, body, TxIdx::NONE, false);
        if !self.sending().send_numbered(now, p, packet, keep, out) {
            return Step::Full;
        }
        self.responder().response_sent(p, j, n, body);
        Step::Sent
    }
}

impl Operations<'_> {
    /// Notes that a packet with `n` bytes or elements of `w` was sent.
    fn rma_sent(&mut self, p: PeerIdx, w: TxIdx, n: u64, last: bool) {
        let wr = &mut self.tx[w];
        if wr.sent == 0 {
            let peer = &mut self.objects.peers[p];
            peer.rma_seq = peer.rma_seq.wrapping_add(1);
        }
        wr.sent += n;
        if last {
            self.all_sent(p, w);
        }
    }

    fn atomic_sent(&mut self, p: PeerIdx, w: TxIdx, n: u64, imm: bool, last: bool) {
        self.objects.peers[p].charge_last(self.sent, imm.into(), true);
        let rma = self.tx.rma_mut(w);
        rma.done += n;
        let RmaKind::Atomic(a) = &mut rma.kind else { return };
        let fetch = a.fetch;
        if fetch {
            a.answers += 1;
            a.all_out = last;
            let peer = &mut self.objects.peers[p];
            (peer.answers, peer.long_answers) = (peer.answers + 1, peer.long_answers + 1);
        }
        self.rma_sent(p, w, n, last && !fetch);
        if fetch && last {
            // The operation waits for its answers; the last answer completes it.
            self.tx[w].flags.remove(WrFlags::IN_SEND_Q);
            self.objects.peers[p].send_q.remove(self.tx, w);
        }
    }
}

impl Responder<'_> {
    /// Notes that a packet of a response was sent, with `n` bytes of a region if it answers a read.
    fn response_sent(&mut self, p: PeerIdx, j: ResponseIdx, n: u32, body: BodyRef) {
        let lossless = self.objects.peers[p].path.is_lossless();
        if let ResponseKind::Read { mr, from, to, left, .. } = &mut self.responses[j].kind {
            (*from, *to, *left) = (*from + u64::from(n), *to + u64::from(n), *left - n);
            let (m, done) = (*mr, *left == 0);
            if lossless {
                self.region_read(body);
            } else {
                self.mrs[m].readers += 1;
            }
            if done {
                self.free_response(j);
            } else {
                let resp_q = &mut self.objects.peers[p].resp_q;
                resp_q.remove(self.responses, j);
                resp_q.push_back(self.responses, j);
            }
        } else if !lossless && matches!(body, BodyRef::Response { .. }) {
            // Kept until acknowledged: a repeated answer is the first answer again.
            self.objects.peers[p].resp_q.remove(self.responses, j);
            self.responses[j].queued = false;
        } else {
            self.free_response(j);
        }
    }

    /// Queues a response for its peer.
    pub(crate) fn add_response(&mut self, response: Response) {
        let p = response.peer;
        let j = self.responses.alloc(response).expect("a free slot was checked");
        self.target.waiting += 1;
        let peer = &mut self.objects.peers[p];
        peer.responses += 1;
        peer.resp_q.push_back(self.responses, j);
        self.objects.due.make_ready(self.objects.peers, p);
    }

    /// Fails a read that can no longer be answered, since its region was closed.
    pub(crate) fn fail_response(&mut self, j: ResponseIdx, reason: NackReason) {
        let response = &mut self.responses[j];
        if let ResponseKind::Read { mr, left, .. } = response.kind {
            self.mrs[mr].readers -= 1;
            response.kind = ResponseKind::Failed { len: left, reason };
        }
    }

    /// Frees a response.
    pub(crate) fn free_response(&mut self, j: ResponseIdx) {
        let p = self.responses[j].peer;
        if self.responses[j].queued {
            self.objects.peers[p].resp_q.remove(self.responses, j);
        }
        self.objects.peers[p].responses -= 1;
        self.target.waiting -= 1;
        match self.responses.free(j).kind {
            ResponseKind::Read { mr, .. } => self.mrs[mr].readers -= 1,
            ResponseKind::Values { long, .. } => self.spare.keep(long),
            ResponseKind::Failed { .. } => {}
        }
    }

    /// Frees the responses of `p` that wait to be sent.
    pub(super) fn free_queued(&mut self, p: PeerIdx) {
        loop {
            let j = self.objects.peers[p].resp_q.head;
            if j == ResponseIdx::NONE {
                return;
            }
            self.free_response(j);
        }
    }

    /// Frees the state of a packet record without a request.
    pub(crate) fn drop_body(&mut self, body: BodyRef) {
        match body {
            BodyRef::Mr { mr, .. } => self.mrs[mr].readers -= 1,
            BodyRef::Response { response } => self.free_response(response),
            _ => {}
        }
    }

    /// Stops counting reads through closed endpoint `e`, so that they do not count for the next
    /// endpoint in its slot.
    pub(super) fn stop_counting_reads(&mut self, e: EpIdx) {
        let forget = |ep: &mut EpIdx| {
            if *ep == e {
                *ep = EpIdx::NONE;
            }
        };
        for (_, response) in self.responses.iter_mut() {
            if let ResponseKind::Read { ep, .. } = &mut response.kind {
                forget(ep);
            }
        }
        for entry in self.sent.iter_mut() {
            if let BodyRef::Mr { ep, .. } = &mut entry.body {
                forget(ep);
            }
        }
    }

    /// Notes that the peer has received bytes of a region: counts them, and the read if they were
    /// its last.
    pub(crate) fn region_read(&mut self, body: BodyRef) {
        let BodyRef::Mr { mr, ep, len, counts, .. } = body else { return };
        if counts.is_empty() {
            return;
        }
        let done = |end, bytes| {
            let bytes = if counts.contains(bytes) { len.into() } else { 0 };
            Done { ops: counts.contains(end).into(), bytes }
        };
        let cntr = self.mrs[mr].read_cntr;
        let of_region = done(ReadCounts::REGION_ENDS, ReadCounts::REGION_BYTES);
        self.objects.cntrs.count(cntr, of_region);
        if ep != EpIdx::NONE {
            let of_read = done(ReadCounts::ENDS, ReadCounts::BYTES);
            self.objects.count_remote(ep, super::rma::REMOTE_READ, of_read);
        }
    }
}
