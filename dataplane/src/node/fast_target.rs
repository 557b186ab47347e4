//! The fast path of one-sided operations at the target, on a lossless path. `fast_rma` has the
//! initiator's side.
//!
//! A request is executed as it arrives. Its answer leaves while the request is read, if the port
//! can send then. Otherwise the port stays lent until the end of the burst, and answers wait in a
//! list.

use barewire_driver::frame::{ETH_HDR_LEN, RxFrame};
use barewire_driver::hint::cold;
use barewire_driver::mem::{InlineBytes, IoBuf, U128_LEN, Words};
use barewire_driver::port::Tx;

use super::fast_rma::{ASKS_EVERY, BaseTo, READ_FAST_MAX, asks, is_expected};
use super::mr::Mr;
use super::ops::{Response, ResponseKind};
use super::peer::{ACK_EVERY_LOSSLESS, Peer, slot_of};
use super::rma::{REMOTE_READ, REMOTE_WRITE};
use super::rma_in::{RESPONSES_MAX, atomic_needs, changes, decode_atomic};
use super::rma_out::ANSWERS_AT_ONCE;
use super::{Eps, FrameSink, InPlaceFrame, Node, Todo};
use crate::flags::{Caps, MrAccess};
use crate::idx::{CntrIdx, EpIdx, MrIdx, PeerIdx, ResponseIdx};
use crate::plant::{Bug, planted};
use crate::proto::atomic::{self, Datatype};
use crate::slab::{Link, NONE};
use crate::types::Instant;
use crate::wire::{
    self, AtomicOp, BaseOut, BaseWords, HeadOut, RawRequest, RequestKey, RequestTy, RespOp, Ty,
    WriteOp,
};

/// Request shapes whose access check is cached: of atomic operations, and of writes and reads each.
const ATOMIC_GRANTS: usize = 8;
const BYTES_GRANTS: usize = 4;
const GRANTS: usize = ATOMIC_GRANTS + 2 * BYTES_GRANTS;

/// An answer that waits for the end of the burst.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    peer: PeerIdx,
    /// The session that the request came by; if that has ended, the answer is dropped.
    sid: u32,
    ty: Ty,
    reply_to: wire::ReplyTo,
    values: InlineBytes,
}

/// A request shape that passed the access check (key, rights, endpoint, operation), and the
/// results. Whatever closes or narrows a region or an endpoint drops all of them
/// ([`revoke_grants`](TargetCache::revoke_grants)). Bounds and alignment are checked for each
/// request.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct AccessGrant {
    key: RequestKey,
    /// Of an atomic operation: bytes of its payload, and of the elements that it changes.
    plen: u16,
    bytes: u16,
    op: atomic::AtomicOp,
    ty: Datatype,
    /// It is one integer of 4 or 8 bytes: `Span::atomic_word` executes it.
    word: bool,
    /// It fetches: the old values go back.
    fetch: bool,
    /// It is an uncounted add of 8 bytes, so `adds` may have an [`AddGrant`] of it.
    add_ok: bool,
    /// A counter of the region or of the endpoint counts it.
    counted: bool,
    mr: MrIdx,
    ep: EpIdx,
    /// Remote address of the region's first byte, and the largest offset at which the elements
    /// still fit; for a write or a read, the region's length.
    base: u64,
    room: u64,
}

/// The commonest request shape: an uncounted add of 8 bytes, which may fetch, in a region of one
/// span. All that it takes lies in one cache line.
#[derive(Debug)]
#[repr(align(64))]
struct AddGrant {
    key: RequestKey,
    /// The old value goes back.
    fetch: bool,
    /// Remote address of the region's first byte.
    base: u64,
    /// The region's memory, lent while the region is registered: closing it drops the grant.
    memory: Words,
}

/// State of the fast path at the target.
#[derive(Debug)]
pub(super) struct TargetCache {
    /// By [`slot`](Self::slot). Boxed, so that the node's hot fields stay close together.
    grants: Box<[AccessGrant; GRANTS]>,
    /// At the same index as in `grants`.
    adds: Box<[AddGrant; ATOMIC_GRANTS]>,
    /// Answers to requests of the burst being received that could not leave at once.
    answers: Vec<Answer>,
    /// Answers that wait, here and in `Node::responses`.
    pub(super) waiting: usize,
    /// Answers that may wait in `Node::responses` while the fast path adds its own.
    response_quota: usize,
}

impl TargetCache {
    /// For a node whose table has room for `responses` answers.
    pub(super) fn new(responses: usize) -> Self {
        Self {
            grants: Box::new([AccessGrant::NOTHING; GRANTS]),
            adds: Box::new([const { AddGrant::NOTHING }; ATOMIC_GRANTS]),
            answers: Vec::with_capacity(ANSWERS_AT_ONCE),
            waiting: 0,
            response_quota: responses.min(RESPONSES_MAX.into()),
        }
    }

    /// Index of the grant for requests of type `ask` with this key. Two types never share one.
    #[inline(always)]
    fn slot(ask: RequestTy, key: &RequestKey) -> usize {
        match ask {
            RequestTy::Atomic => key.hash() % ATOMIC_GRANTS,
            RequestTy::Write => ATOMIC_GRANTS + key.hash() % BYTES_GRANTS,
            RequestTy::Read => ATOMIC_GRANTS + BYTES_GRANTS + key.hash() % BYTES_GRANTS,
        }
    }

    /// Drops all grants: a region or an endpoint was closed or changed.
    #[cold]
    pub(super) fn revoke_grants(&mut self) {
        if planted(Bug::GrantKept) {
            return;
        }
        *self.grants = [AccessGrant::NOTHING; GRANTS];
        *self.adds = [const { AddGrant::NOTHING }; ATOMIC_GRANTS];
    }

    /// Whether another answer may wait. The bound for all peers is that for one.
    #[inline(always)]
    fn may_answer(&self, responses: usize) -> bool {
        let has_room = responses + ANSWERS_AT_ONCE <= self.response_quota;
        has_room && self.answers.len() < ANSWERS_AT_ONCE
    }
}

impl AccessGrant {
    /// Matches no request.
    const NOTHING: Self = Self {
        key: RequestKey::NOTHING,
        plen: 0,
        bytes: 0,
        op: atomic::AtomicOp::Read,
        ty: Datatype::Uint64,
        word: false,
        fetch: false,
        add_ok: false,
        counted: false,
        mr: MrIdx::NONE,
        ep: EpIdx::NONE,
        base: 0,
        room: 0,
    };
}

impl Eps {
    /// The endpoint with this number, if it is enabled and has the capabilities, and whether a
    /// counter of it may count (`FI_RMA_EVENT`).
    fn grant_ep(&self, number: u16, caps: Caps) -> Option<(EpIdx, bool)> {
        let ep = self.slot(number);
        let e = self.get(ep).filter(|e| e.enabled && e.caps.contains(caps))?;
        Some((ep, e.caps.contains(Caps::RMA_EVENT)))
    }
}

impl Node {
    /// Takes an ATOMIC, and answers it to `out` if it has an answer.
    #[inline(always)]
    pub(super) fn on_atomic_frame(
        &mut self,
        now: Instant,
        frame: RxFrame<'_>,
        mut out: impl FrameSink,
    ) {
        if !self.rx_add(now, &frame, &mut out) {
            cold(());
            self.on_request_frame(RequestTy::Atomic, now, &frame.again(), out);
        }
    }

    /// Takes a request of type `ask`, and answers it to `out` if it has an answer.
    #[inline(never)]
    pub(super) fn on_request_frame(
        &mut self,
        ask: RequestTy,
        now: Instant,
        frame: &RxFrame<'_>,
        mut out: impl FrameSink,
    ) {
        if !self.rx_request(ask, now, frame, &mut out) {
            self.on_frame_slow(now, frame);
        }
    }

    /// Executes an ATOMIC of the commonest shape ([`AddGrant`]) from a [steady](Peer::is_steady)
    /// peer, if no answer waits. False otherwise: nothing has happened.
    #[inline(always)]
    pub(super) fn rx_add(
        &mut self,
        now: Instant,
        frame: &RxFrame<'_>,
        out: &mut impl FrameSink,
    ) -> bool {
        // The one length check: every read below lies in these bytes.
        if frame.len() < AtomicOp::HEAD + size_of::<u64>() {
            return cold(false);
        }
        let Some((base, op)) = RawRequest::parse(frame, RequestTy::Atomic) else {
            return cold(false);
        };
        let add = &self.target.adds[TargetCache::slot(RequestTy::Atomic, &op.key)];
        debug_assert!(self.target.waiting == self.target.answers.len() + self.responses.len());
        // No answer waits, so there is room for this one, in the list or in the table.
        let waits = self.target.waiting != 0 || usize::from(base.plen()) != size_of::<u64>();
        if add.key != op.key || waits {
            return cold(false);
        }
        let p = slot_of(base.dst_sid());
        let Some(peer) = self.peers.at_mut(p) else { return cold(false) };
        let Some(flying) = peer.steady_flight(self.port.addr, &base) else { return cold(false) };
        let Some(old) = add.execute(op.addr, frame) else { return cold(false) };
        let Some(reply_to) = wire::ReplyTo::of_atomic(frame) else { return cold(false) };
        peer.nack.note_key(now, false);
        peer.accept_steady(&base, self.turn.polled_at);
        self.counters.rma_executed += 1;
        let what = (Ty::Resp, &reply_to);
        let answer = AnswerTo { ar: false, ..AnswerTo::new(peer, &self.port.addr, what, old) };
        // Below this, the answer need not ask for an acknowledgement.
        if flying < ASKS_EVERY - 1 && out.send_in_place(&answer) == Tx::Sent {
            self.counters.tx_frames += 1;
            (peer.owed, peer.ack_now) = (0, false);
            // The peer was heard just now, which is as good as a probe.
            peer.probe_at = now;
            // As the only packet in flight it takes the place that `Peer::tx_room` leaves free.
            if flying != 0 {
                peer.tx_quota = peer.tx_quota.saturating_sub(1);
            }
            peer.snd.number();
            if peer.timer_at == Instant(u64::MAX) {
                cold(());
                self.arm_timer(now, p);
            }
        } else {
            cold(());
            self.answer_soon(p, (Ty::Resp, reply_to), old.value.into(), old.len());
        }
        true
    }

    /// Executes a request of type `ask` on up to 16 bytes of elements, or a write or read of one
    /// frame, if it is next in order and its shape passes the access check. False otherwise:
    /// nothing has happened. (Parses the frame anew, so that the caller's values can stay in
    /// registers.)
    #[inline(always)]
    fn rx_request(
        &mut self,
        ask: RequestTy,
        now: Instant,
        frame: &RxFrame<'_>,
        out: &mut impl FrameSink,
    ) -> bool {
        let Some((base, op)) = RawRequest::parse(frame, ask) else { return cold(false) };
        if !is_expected(&self.peers, self.port.addr, &base) {
            return cold(false);
        }
        let grant = &self.target.grants[TargetCache::slot(ask, &op.key)];
        let known = grant.key == op.key && (ask != RequestTy::Atomic || grant.plen == base.plen());
        if !known && !self.check_access(ask, op, base.plen()) {
            return cold(false);
        }
        match ask {
            RequestTy::Atomic => self.execute_atomic(now, frame, &base, op, out),
            RequestTy::Write | RequestTy::Read => {
                self.execute_bytes(ask, now, frame, &base, op, out)
            }
        }
    }

    /// Executes an atomic operation whose shape passed the access check: bounds are still to be
    /// checked.
    #[inline(always)]
    fn execute_atomic(
        &mut self,
        now: Instant,
        frame: &RxFrame<'_>,
        base: &BaseWords,
        op: RawRequest,
        out: &mut impl FrameSink,
    ) -> bool {
        let p = slot_of(base.dst_sid());
        let may_answer = self.target.may_answer(self.responses.len());
        let grant = &self.target.grants[TargetCache::slot(RequestTy::Atomic, &op.key)];
        let at = op.addr.wrapping_sub(grant.base);
        let peer = &mut self.peers[p];
        // One that asks for an acknowledgement as well is left to the slow path.
        let odd = !may_answer || base.asks_ack();
        if at > grant.room || peer.bad_seq != NONE || odd {
            return cold(false);
        }
        let mr = &self.mrs[grant.mr];
        let Some(old) = grant.execute(mr, at as usize, frame) else { return cold(false) };
        let Some(reply_to) = wire::ReplyTo::of_atomic(frame) else { return cold(false) };
        peer.nack.note_key(now, false);
        peer.accept(base, self.turn.polled_at);
        if grant.add_ok {
            peer.steady = peer.is_steady();
        }
        self.counters.rma_executed += 1;
        let fetch = grant.fetch;
        let old = if fetch { (old, grant.bytes.into()) } else { (0, 0) };
        let counted = grant.counted.then_some((grant.mr, grant.ep, grant.op));
        let alone = self.target.answers.is_empty() && peer.resp_q.head == ResponseIdx::NONE;
        self.answer_to((now, p, alone), (Ty::Resp, reply_to), old, out);
        if let Some((mr, ep, what)) = counted {
            self.count_executed(mr, ep, fetch, changes(what));
        }
        true
    }

    /// Executes a write or a read whose shape passed the access check: bounds are still to be
    /// checked.
    #[inline(always)]
    fn execute_bytes(
        &mut self,
        ask: RequestTy,
        now: Instant,
        frame: &RxFrame<'_>,
        base: &BaseWords,
        op: RawRequest,
        out: &mut impl FrameSink,
    ) -> bool {
        let Some(len) = RawRequest::len(frame, ask, base) else { return cold(false) };
        let p = slot_of(base.dst_sid());
        let alone =
            self.target.answers.is_empty() && self.peers[p].resp_q.head == ResponseIdx::NONE;
        let may_answer =
            alone && self.responses.is_empty() || self.target.may_answer(self.responses.len());
        let grant = &self.target.grants[TargetCache::slot(ask, &op.key)];
        let at = op.addr.wrapping_sub(grant.base);
        let peer = &mut self.peers[p];
        if at > grant.room || len as u64 > grant.room - at || peer.bad_seq != NONE {
            return cold(false);
        }
        let (at, buf) = (at as usize, &self.mrs[grant.mr].buf);
        let (counted, mr, ep) = (grant.counted, grant.mr, grant.ep);
        let Some(reply_to) = wire::ReplyTo::of_bytes(frame) else { return cold(false) };
        if !may_answer || base.asks_ack() {
            return cold(false);
        }
        if ask == RequestTy::Write {
            frame.copy_to_io(WriteOp::HEAD, buf, at, len);
            // A new sequence number discards the byte count of an abandoned write.
            peer.written = 0;
            peer.accept(base, self.turn.polled_at);
            self.answer_to((now, p, alone), (Ty::Resp, reply_to), (0, 0), out);
        } else if len <= U128_LEN {
            let mut old = [0; U128_LEN];
            buf.read_at(at, &mut old[..len]);
            peer.accept(base, self.turn.polled_at);
            let old = u128::from_le_bytes(old);
            self.answer_to((now, p, alone), (Ty::Data, reply_to), (old, len), out);
        } else {
            // The answer acknowledges the request, which is accepted below once the answer has
            // left.
            let what = (Ty::Data, &reply_to);
            let mut part = AnswerTo::new(peer, &self.port.addr, what, (buf, at, len));
            part.base.ahead = 1;
            // The initiator paces longer reads.
            let open = alone && peer.snd.in_flight() < peer.snd.limit() && len <= READ_FAST_MAX;
            let holds = RespOp::HEAD + len <= peer.frame_max as usize + ETH_HDR_LEN;
            if !open || !holds || out.send_in_place(&part) != Tx::Sent {
                return cold(false);
            }
            peer.accept(base, self.turn.polled_at);
            self.answer_left(now, p);
        }
        self.peers[p].nack.note_key(now, false);
        self.counters.rma_executed += 1;
        if counted {
            let read = ask == RequestTy::Read;
            self.count_executed(mr, ep, read, !read);
        }
        true
    }

    /// Sends an answer: at once if no other of this peer waits (`alone`), else at the end of the
    /// burst.
    #[inline(always)]
    fn answer_to(
        &mut self,
        (now, p, alone): (Instant, PeerIdx, bool),
        (ty, reply_to): (Ty, wire::ReplyTo),
        (old, bytes): (u128, usize),
        out: &mut impl FrameSink,
    ) {
        let (peer, src, what) = (&self.peers[p], &self.port.addr, (ty, &reply_to));
        let sent = alone
            && match bytes {
                0 | 8 => AnswerTo::new(peer, src, what, Word::of(old, bytes)).send(out),
                _ => AnswerTo::new(peer, src, what, InlineBytes::one(old, bytes)).send(out),
            };
        if sent {
            self.answer_left(now, p);
        } else {
            self.answer_soon(p, (ty, reply_to), old, bytes);
        }
    }

    /// Notes that an answer to peer `p` has left.
    #[inline(always)]
    fn answer_left(&mut self, now: Instant, p: PeerIdx) {
        self.counters.tx_frames += 1;
        let peer = &mut self.peers[p];
        peer.carried_ack_in_order();
        if answered(now, peer) {
            self.arm_timer(now, p);
        }
    }

    /// Keeps an answer of `bytes` bytes until the end of the burst.
    #[inline(never)]
    fn answer_soon(
        &mut self,
        p: PeerIdx,
        (ty, reply_to): (Ty, wire::ReplyTo),
        old: u128,
        bytes: usize,
    ) {
        let (sid, values) = (self.peers[p].sid, InlineBytes::one(old, bytes));
        self.target.answers.push(Answer { peer: p, sid, ty, reply_to, values });
        self.todo |= Todo::ANSWER;
        self.target.waiting += 1;
        self.owe_ack_fast(p);
    }

    /// Notes that one more packet is to be acknowledged, and acknowledges if that makes enough of
    /// them.
    #[inline(always)]
    pub(super) fn owe_ack_fast(&mut self, p: PeerIdx) {
        let peer = &mut self.peers[p];
        peer.owed = peer.owed.saturating_add(1);
        peer.rx_quota = peer.rx_quota.saturating_sub(1);
        if peer.owed >= ACK_EVERY_LOSSLESS {
            peer.ack_now = true;
            self.make_ready(p);
        }
    }

    /// Checks access for a request shape (key, rights, endpoint, operation) and caches the grant.
    /// False if any check fails: the slow path then refuses the request.
    #[inline(never)]
    fn check_access(&mut self, ask: RequestTy, request: RawRequest, plen: u16) -> bool {
        let grant = match ask {
            RequestTy::Atomic => self.grant_atomic(request, plen),
            RequestTy::Write | RequestTy::Read => self.grant_bytes(ask, request),
        };
        let Some(grant) = grant else { return false };
        self.mrs.last = grant.mr;
        let at = TargetCache::slot(ask, &request.key);
        self.target.grants[at] = grant;
        if let Some(add) = self.target.adds.get_mut(at) {
            let memory = self.mrs[grant.mr].buf.as_one().filter(|_| grant.add_ok);
            let AccessGrant { key, fetch, base, .. } = grant;
            let shared = self.mrs[grant.mr].is_shared();
            *add = memory
                .and_then(|span| Words::of(span, shared))
                .map_or(AddGrant::NOTHING, |memory| AddGrant { key, fetch, base, memory });
        }
        true
    }

    fn grant_bytes(&self, ask: RequestTy, request: RawRequest) -> Option<AccessGrant> {
        let read = ask == RequestTy::Read;
        let (caps, access) = match read {
            true => (Caps::REMOTE_READ, MrAccess::REMOTE_READ),
            false => (Caps::REMOTE_WRITE, MrAccess::REMOTE_WRITE),
        };
        if !request.key.is_whole(ask) {
            return None;
        }
        let range = request.range();
        let (ep, counted) = self.eps.grant_ep(range.dst_ep, Caps::RMA | caps)?;
        let (m, _) = self.mrs.look(&self.eps, ep, &range, 1, access).ok()?;
        let mr = &self.mrs[m];
        let counted = counted || if read { mr.read_cntr } else { mr.write_cntr } != CntrIdx::NONE;
        let (base, room) = (mr.base, mr.buf.len() as u64);
        Some(AccessGrant {
            key: request.key,
            counted,
            mr: m,
            ep,
            base,
            room,
            ..AccessGrant::NOTHING
        })
    }

    fn grant_atomic(&self, request: RawRequest, plen: u16) -> Option<AccessGrant> {
        let op = request.checked()?;
        let answered = op.fetch || op.answer;
        let whole = op.range.last && op.end && !op.void && answered;
        let plain = whole && !op.tagged && op.range.rx_ctx == 0;
        let (plen, payload_len) = (usize::from(plen), plen);
        let (what, ty, bytes) = decode_atomic(&op, plen).ok()?;
        if !plain || bytes > Response::SHORT {
            return None;
        }
        let (caps, access) = atomic_needs(&op, what);
        let (ep, counted) = self.eps.grant_ep(op.range.dst_ep, caps)?;
        let (m, _) = self.mrs.look(&self.eps, ep, &op.range, bytes as u64, access).ok()?;
        let mr = &self.mrs[m];
        let one = op.count == 1 && plen <= U128_LEN;
        let word = one && ty.is_integer() && bytes >= 4;
        let counted = counted
            || op.fetch && mr.read_cntr != CntrIdx::NONE
            || changes(what) && mr.write_cntr != CntrIdx::NONE;
        let add_ok = word && bytes == 8 && what == atomic::AtomicOp::Sum && !counted;
        Some(AccessGrant {
            key: request.key,
            plen: payload_len,
            bytes: bytes as u16,
            op: what,
            ty,
            word,
            fetch: op.fetch,
            add_ok,
            counted,
            mr: m,
            ep,
            base: mr.base,
            room: mr.buf.len() as u64 - bytes as u64,
        })
    }

    #[cold]
    fn count_executed(&mut self, mr: MrIdx, ep: EpIdx, reads: bool, writes: bool) {
        self.count_access(mr, reads, writes);
        self.count_remote(ep, if reads { REMOTE_READ } else { REMOTE_WRITE });
    }

    /// Whether answers wait for the end of the burst.
    #[inline(always)]
    pub fn has_answers(&self) -> bool {
        !self.target.answers.is_empty()
    }

    /// Sends the answers to requests of the last burst. An answer that cannot leave now, or behind
    /// another one of its peer, is left to the next [`transmit`](Self::transmit).
    pub fn send_answers(&mut self, now: Instant, out: &mut impl FrameSink) {
        for i in 0..self.target.answers.len() {
            let answer = &self.target.answers[i];
            let p = answer.peer;
            let sent = self.peers.get_mut(p).filter(|peer| {
                let free = peer.sid == answer.sid
                    && peer.fast_path
                    && peer.resp_q.head == ResponseIdx::NONE;
                let what = (answer.ty, &answer.reply_to);
                free && AnswerTo::new(peer, &self.port.addr, what, answer.values).send(out)
            });
            let Some(peer) = sent else {
                self.answer_later(i);
                continue;
            };
            self.counters.tx_frames += 1;
            peer.carried_ack_in_order();
            if answered(now, peer) {
                self.arm_timer(now, p);
            }
        }
        self.target.waiting -= self.target.answers.len();
        self.target.answers.clear();
        self.todo -= Todo::ANSWER;
    }

    /// Moves an answer to `Node::responses`. Dropped if the session has ended: the initiator has
    /// ended the operation then.
    #[cold]
    fn answer_later(&mut self, i: usize) {
        let Answer { peer, sid, ty, reply_to, values } = self.target.answers[i];
        let RespOp { dst_op, dst_gen, offset, .. } = reply_to.resp();
        if self.peers.get(peer).is_none_or(|peer| peer.sid != sid) {
            return;
        }
        let (mut short, all, len) = ([0; Response::SHORT], values.to_bytes(), values.len() as u16);
        short.copy_from_slice(&all[..Response::SHORT]);
        let kind = ResponseKind::Values { ty, offset, len, short, long: Vec::new() };
        let link = Link::default();
        self.add_response(Response { peer, dst_op, dst_gen, kind, queued: true, link });
    }
}

impl AccessGrant {
    /// Executes the operation in `frame` at offset `at` of region `mr` and returns the old values.
    /// `None`, and nothing changed, if that is not possible (alignment, a region in several spans).
    #[inline(always)]
    fn execute(&self, mr: &Mr, at: usize, frame: &RxFrame<'_>) -> Option<u128> {
        if self.word {
            return self.execute_word(mr, at, frame).map(u128::from);
        }
        self.execute_inline(mr, at, frame)
    }

    #[inline(never)]
    fn execute_word(&self, mr: &Mr, at: usize, frame: &RxFrame<'_>) -> Option<u64> {
        let operands = frame.u128_at(AtomicOp::HEAD, self.plen.into())?;
        mr.buf.first()?.atomic_word(at, self.op, self.ty, operands, mr.is_shared())
    }

    /// For elements that are not one word.
    #[inline(never)]
    fn execute_inline(&self, mr: &Mr, at: usize, frame: &RxFrame<'_>) -> Option<u128> {
        let (plen, bytes) = (usize::from(self.plen), usize::from(self.bytes));
        let (mut operands, mut old) = ([0; InlineBytes::MAX], [0; U128_LEN]);
        if !frame.copy_to(AtomicOp::HEAD, &mut operands[..plen]) {
            return None;
        }
        let (operand, compare) = operands[..plen].split_at(plen.min(bytes));
        let count = bytes / self.ty.size();
        let to = &mut old[..bytes];
        let done = mr.buf.atomic(at, self.op, self.ty, count, operand, compare, to, mr.sharing);
        done.ok().map(|()| u128::from_le_bytes(old))
    }
}

impl AddGrant {
    /// Matches no request.
    const NOTHING: Self =
        Self { key: RequestKey::NOTHING, fetch: false, base: 0, memory: Words::NONE };

    /// Adds the operand in `frame` to the word at remote address `addr` and returns what goes back.
    /// `None`, and nothing changed, unless the word is aligned and in bounds.
    #[inline(always)]
    fn execute(&self, addr: u64, frame: &RxFrame<'_>) -> Option<Word> {
        let operand = u64::from_le_bytes(frame.chunk_at(AtomicOp::HEAD)?);
        let old = self.memory.fetch_add(addr.wrapping_sub(self.base), operand)?;
        Some(if self.fetch { Word::of(old.into(), size_of::<u64>()) } else { Word::NONE })
    }
}

/// Notes that an answer to `peer` has left. Returns whether its timer is to be armed.
#[inline(always)]
fn answered(now: Instant, peer: &mut Peer) -> bool {
    if peer.snd.in_flight() == 0 {
        peer.probe_at = now;
    }
    peer.snd.number();
    if peer.tx_quota > 0 {
        peer.tx_quota -= 1;
    }
    peer.timer_at == Instant(u64::MAX)
}

/// An answer about to be sent.
struct AnswerTo<'a, P> {
    base: BaseTo<'a>,
    ty: Ty,
    reply_to: &'a wire::ReplyTo,
    /// The answer asks for an acknowledgement.
    ar: bool,
    payload: P,
}

impl<'a, P> AnswerTo<'a, P> {
    #[inline(always)]
    fn new(
        peer: &'a Peer,
        src: &'a u64,
        (ty, reply_to): (Ty, &'a wire::ReplyTo),
        payload: P,
    ) -> Self {
        let base = BaseTo { peer, src, ahead: 0 };
        Self { base, ty, reply_to, ar: asks(peer), payload }
    }

    /// Sends it. False if the window is closed or the port did not take it.
    #[inline(always)]
    fn send<const H: usize>(&self, out: &mut impl FrameSink) -> bool
    where
        P: Payload<H>,
    {
        self.base.peer.snd.in_flight() < self.base.peer.snd.limit()
            && out.send_in_place(self) == Tx::Sent
    }
}

/// The payload of an answer. The first `H` bytes of the frame are written field by field.
trait Payload<const H: usize> {
    /// Length, bytes.
    fn len(&self) -> usize;

    /// Writes the part of it that lies in the first `H` bytes: none by default.
    #[inline(always)]
    fn put(&self, _: &mut impl HeadOut) {}

    /// The payload if it is short: see [`InPlaceFrame::inline_bytes`].
    #[inline(always)]
    fn inline_bytes(&self) -> InlineBytes {
        InlineBytes::NONE
    }

    /// The payload as part of a region: see [`InPlaceFrame::part`].
    #[inline(always)]
    fn part(&self) -> Option<(&IoBuf, usize, usize)> {
        None
    }
}

/// One word, or nothing with as much padding: frames of one length take no branch.
#[derive(Clone, Copy)]
struct Word {
    value: u64,
    is_some: bool,
}

impl Word {
    const NONE: Self = Self { value: 0, is_some: false };

    /// `value` if `bytes` is not 0. Who may not read gets none of it, nor as padding.
    #[inline(always)]
    const fn of(value: u128, bytes: usize) -> Self {
        if bytes == 0 { Self::NONE } else { Self { value: value as u64, is_some: true } }
    }
}

impl Payload<{ RespOp::HEAD + 8 }> for Word {
    #[inline(always)]
    fn len(&self) -> usize {
        if self.is_some { size_of::<u64>() } else { 0 }
    }

    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        out.set::<{ RespOp::HEAD }, 8>(self.value.to_le_bytes());
    }
}

impl Payload<{ RespOp::HEAD }> for InlineBytes {
    #[inline(always)]
    fn len(&self) -> usize {
        self.len()
    }

    #[inline(always)]
    fn inline_bytes(&self) -> InlineBytes {
        *self
    }
}

/// Part of a region: its memory, offset and length.
impl Payload<{ RespOp::HEAD }> for (&IoBuf, usize, usize) {
    #[inline(always)]
    fn len(&self) -> usize {
        self.2
    }

    #[inline(always)]
    fn part(&self) -> Option<(&IoBuf, usize, usize)> {
        Some(*self)
    }
}

impl<const H: usize, P: Payload<H>> InPlaceFrame<H> for AnswerTo<'_, P> {
    #[inline(always)]
    fn dst(&self) -> u64 {
        self.base.dst()
    }

    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        self.payload.put(out);
        self.base.put(self.ty, self.payload.len(), self.ar, out);
        self.reply_to.resp().put(out);
    }

    #[inline(always)]
    fn inline_bytes(&self) -> InlineBytes {
        self.payload.inline_bytes()
    }

    #[inline(always)]
    fn part(&self) -> Option<(&IoBuf, usize, usize)> {
        self.payload.part()
    }
}
