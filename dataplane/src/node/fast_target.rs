//! The fast path of one-sided operations at the target, on a lossless path. `fast_rma` has the
//! initiator's side.
//!
//! A request is executed as it arrives. Its answer leaves while the request is processed, if the
//! port can send then. Otherwise the port is lent until the end of the burst, and answers wait in a
//! list.

use barewire_driver::frame::RxFrame;
use barewire_driver::hint::cold;
use barewire_driver::mem::{InlineBytes, IoBuf, Span, U128_LEN, Words};
use barewire_driver::port::Tx;

use super::fast_rma::{ASKS_EVERY, PeerBase};
use super::ops::Response;
use super::peer::{Peer, slot_of};
use super::rma::{REMOTE_READ, REMOTE_WRITE};
use super::rma_in::{OldValues, RESPONSES_MAX, atomic_needs, changes, decode_atomic};
use super::rma_out::ANSWERS_AT_ONCE;
use super::{Eps, FrameSink, InPlaceFrame, Node, Responder, Todo};
use crate::cntr::Done;
use crate::flags::{Caps, MrAccess};
use crate::idx::{CntrIdx, EpIdx, MrIdx, PeerIdx, ResponseIdx};
use crate::plant::{Bug, planted};
use crate::proto::atomic::{self, Datatype, Sharing};
use crate::types::Instant;
use crate::wire::{
    self, AtomicOp, BaseOut, BaseWords, HeadOut, RawRequest, RequestKey, RequestTy, RespOp, Ty,
    WriteOp,
};

/// Number of cached access checks: of atomic operations, and of writes and of reads each.
const ATOMIC_GRANTS: usize = 8;
const BYTES_GRANTS: usize = 4;
const GRANTS: usize = ATOMIC_GRANTS + 2 * BYTES_GRANTS;

/// An answer that waits for the end of the burst.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    peer: PeerIdx,
    /// The session of the request; if that has ended, the answer is dropped.
    sid: u32,
    reply_to: wire::ReplyTo,
    values: InlineBytes,
}

/// How a request is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExecKind {
    /// Addition to one of `words`, without a counter.
    Add,
    /// One integer of 4 or 8 bytes: [`Span::atomic_word`].
    Word,
    /// Any other atomic operation.
    Elements,
    /// A write or a read.
    Bytes,
}

/// A request shape that passed the access check (key, rights, endpoint, operation), and the data to
/// execute it, the most frequent in the first cache line. Closing or restricting a region or an
/// endpoint drops all grants ([`revoke_grants`](TargetCache::revoke_grants)). Bounds and alignment
/// are checked for each request.
#[derive(Debug)]
#[repr(C, align(64))]
struct AccessGrant {
    key: RequestKey,
    /// Remote address of the region's first byte.
    base: u64,
    /// The region's memory, for [`ExecKind::Add`]; lent while the region is registered.
    words: Words,
    does: ExecKind,
    /// The operation fetches: the answer carries the old values.
    fetch: bool,
    /// A counter of the region or of the endpoint counts the operation.
    counted: bool,
    /// For an atomic operation: bytes of its payload, and of the elements that it changes.
    plen: u16,
    bytes: u16,
    op: atomic::AtomicOp,
    ty: Datatype,
    sharing: Sharing,
    mr: MrIdx,
    ep: EpIdx,
    /// The region's memory, for the other kinds.
    memory: Span,
}

/// Payload of an answer to the initiator.
#[derive(Clone, Copy)]
enum ReplyValue {
    Word(Word),
    Few(InlineBytes),
    /// Bytes of the grant's memory: offset and length.
    Part(usize, usize),
}

/// State of the fast path at the target.
#[derive(Debug)]
pub(super) struct TargetCache {
    /// Indexed by [`slot`](Self::slot). Boxed, so that the node's hot fields stay close together.
    grants: Box<[AccessGrant; GRANTS]>,
    /// Answers to requests of the burst being received that could not leave at once.
    answers: Vec<Answer>,
    /// Number of waiting answers, here and in `Node::responses`.
    pub(super) waiting: usize,
    /// Number of answers that may wait in `Node::responses` while the fast path adds its own.
    response_quota: usize,
}

impl TargetCache {
    /// A cache for a node whose table has room for `responses` answers.
    pub(super) fn new(responses: usize) -> Self {
        Self {
            grants: Box::new([const { AccessGrant::NOTHING }; GRANTS]),
            answers: Vec::with_capacity(ANSWERS_AT_ONCE),
            waiting: 0,
            response_quota: responses.min(RESPONSES_MAX.into()),
        }
    }

    /// Index of the grant for requests of type `req_ty` with this key. No index serves two types.
    #[inline(always)]
    fn slot(req_ty: RequestTy, key: &RequestKey) -> usize {
        match req_ty {
            RequestTy::Atomic => key.hash() % ATOMIC_GRANTS,
            RequestTy::Write => ATOMIC_GRANTS + key.hash() % BYTES_GRANTS,
            RequestTy::Read => ATOMIC_GRANTS + BYTES_GRANTS + key.hash() % BYTES_GRANTS,
        }
    }

    /// Drops all grants: a region or an endpoint was closed or changed.
    #[cold]
    pub(super) fn revoke_grants(&mut self) {
        if planted(Bug::StaleGrant) {
            return;
        }
        *self.grants = [const { AccessGrant::NOTHING }; GRANTS];
    }

    /// Answers that wait for the end of the burst. Each may then need a place in `Node::responses`.
    pub(super) fn held(&self) -> usize {
        self.answers.len()
    }

    /// Whether another answer may wait. All peers together have the bound of one.
    #[inline(always)]
    fn may_answer(&self) -> bool {
        let responses = self.waiting - self.answers.len();
        let has_room = responses + ANSWERS_AT_ONCE <= self.response_quota;
        has_room && self.answers.len() < ANSWERS_AT_ONCE
    }

    /// Whether an answer to `peer` that leaves now overtakes no other.
    #[inline(always)]
    fn is_next(&self, peer: &Peer) -> bool {
        self.answers.is_empty() && peer.resp_q.head == ResponseIdx::NONE
    }
}

impl AccessGrant {
    /// Matches no request.
    const NOTHING: Self = Self {
        key: RequestKey::NOTHING,
        base: 0,
        words: Words::NONE,
        does: ExecKind::Bytes,
        fetch: false,
        counted: false,
        plen: 0,
        bytes: 0,
        op: atomic::AtomicOp::Read,
        ty: Datatype::Uint64,
        sharing: Sharing::Single,
        mr: MrIdx::NONE,
        ep: EpIdx::NONE,
        memory: Span::EMPTY,
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
    /// Processes an ATOMIC that requests no acknowledgement, and sends the answer to `out`.
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

    /// [`rx_request`](Self::rx_request) for the most frequent kind: [`Add`].
    #[inline(always)]
    pub(super) fn rx_add(
        &mut self,
        now: Instant,
        frame: &RxFrame<'_>,
        out: &mut impl FrameSink,
    ) -> bool {
        self.rx_request::<Add>(now, frame, out)
    }

    /// Processes a request of type `req_ty`, and sends the answer to `out`.
    #[inline(never)]
    pub(super) fn on_request_frame(
        &mut self,
        req_ty: RequestTy,
        now: Instant,
        frame: &RxFrame<'_>,
        mut out: impl FrameSink,
    ) {
        let taken = match req_ty {
            RequestTy::Atomic => self.rx_request::<Atomic>(now, frame, &mut out),
            RequestTy::Write => self.rx_request::<Write>(now, frame, &mut out),
            RequestTy::Read => self.rx_request::<Read>(now, frame, &mut out),
        };
        if !taken {
            self.on_frame_slow(now, frame);
        }
    }

    /// Executes an atomic operation on up to 16 bytes of elements, or a write or read of one frame,
    /// if it is next in order and its shape passes the access check, and answers it. False
    /// otherwise: nothing has changed.
    ///
    /// The answer leaves at once if no other answer to this peer waits, else at the end of the
    /// burst.
    #[inline(always)]
    fn rx_request<E: Execution>(
        &mut self,
        now: Instant,
        frame: &RxFrame<'_>,
        out: &mut impl FrameSink,
    ) -> bool {
        let Some((base, op)) = RawRequest::parse(frame, E::TYPE) else { return cold(false) };
        let (own, p) = (self.port.addr, slot_of(base.dst_sid()));
        let slot = TargetCache::slot(E::TYPE, &op.key);
        if self.target.grants[slot].key != op.key {
            cold(());
            // A frame of no session changes nothing, not even the cache.
            let is_next = |peer: &Peer| peer.is_next(own, &base.head, base.sid_psn);
            if E::COMMON
                || !self.peers.at(p).is_some_and(is_next)
                || !self.responder().check_access(E::TYPE, op, base.plen())
            {
                return false;
            }
        }
        debug_assert!(self.target.waiting == self.target.answers.len() + self.responses.len());
        let Some(peer) = self.peers.at_mut(p) else { return cold(false) };
        let flying = peer.steady_flight(own, &base);
        let flying = if E::COMMON { flying } else { flying.or_else(|| peer.flight(own, &base)) };
        let Some(flying) = flying else { return cold(false) };
        let ar = flying % ASKS_EVERY == ASKS_EVERY - 1;
        let waits = self.target.waiting != 0;
        // A request that asks for an acknowledgement is left to the slow path.
        if E::COMMON && (waits || ar)
            || !E::COMMON && (waits && !self.target.may_answer() || base.asks_ack())
        {
            return cold(false);
        }
        let is_next = !waits || cold(self.target.is_next(peer));
        let grant = &self.target.grants[slot];
        let answer_max = peer.path.room(peer.frame_max, RespOp::LEN);
        let Some(old) = E::execute(grant, &op, &base, (frame, answer_max)) else {
            return cold(false);
        };
        peer.nack.note_key(now, false);
        peer.accept(&base, self.turn.polled_at);
        self.counters.rma_executed += 1;
        if E::TYPE == RequestTy::Write {
            // A new sequence number resets the byte count of an abandoned write.
            peer.written = 0;
        }
        let to = PeerBase { peer, src: &self.port.addr };
        let answer = AnswerFrame { base: to, reply_to: &op.reply_to, ar, payload: &grant.memory };
        if is_next && flying < peer.snd.limit() && old.send(answer, out) == Tx::Sent {
            self.counters.tx_frames += 1;
            if answered(now, peer, flying) {
                cold(());
                self.control().arm_timer(now, p);
            }
        } else {
            cold(());
            self.responder().queue_answer(p, op.reply_to, (slot, old.kept()));
        }
        if !E::COMMON && self.target.grants[slot].counted {
            cold(());
            let bytes = E::bytes(&self.target.grants[slot], &base, &old);
            self.responder().count_executed(E::TYPE, slot, bytes as u64);
        }
        true
    }

    /// Whether answers wait for the end of the burst.
    #[inline(always)]
    pub fn has_answers(&self) -> bool {
        !self.target.answers.is_empty()
    }

    /// Sends the answers to requests of the last burst. An answer that cannot leave now, or would
    /// overtake another answer to its peer, is left to the next [`transmit`](Self::transmit).
    pub fn send_answers(&mut self, now: Instant, out: &mut impl FrameSink) {
        for i in 0..self.target.answers.len() {
            let answer = &self.target.answers[i];
            let p = answer.peer;
            let sent = self.peers.get_mut(p).filter(|peer| {
                let free = peer.sid == answer.sid
                    && peer.fast_path
                    && peer.resp_q.head == ResponseIdx::NONE;
                let flying = peer.snd.in_flight();
                let to = AnswerFrame {
                    base: PeerBase { peer, src: &self.port.addr },
                    reply_to: &answer.reply_to,
                    ar: flying % ASKS_EVERY == ASKS_EVERY - 1,
                    payload: answer.values,
                };
                free && flying < peer.snd.limit() && out.send_in_place(&to) == Tx::Sent
            });
            let Some(peer) = sent else {
                self.responder().defer_answer(i);
                continue;
            };
            self.counters.tx_frames += 1;
            if answered(now, peer, peer.snd.in_flight()) {
                self.control().arm_timer(now, p);
            }
        }
        self.target.waiting -= self.target.answers.len();
        self.target.answers.clear();
        self.due.todo -= Todo::ANSWER;
    }
}

impl Responder<'_> {
    /// Keeps an answer until the end of the burst, or, if it is long, for the next
    /// [`transmit`](Node::transmit).
    #[inline(never)]
    fn queue_answer(
        &mut self,
        p: PeerIdx,
        reply_to: wire::ReplyTo,
        (slot, old): (usize, ReplyValue),
    ) {
        if self.objects.peers[p].owe_ack_lossless() {
            self.objects.due.make_ready(self.objects.peers, p);
        }
        let values = match old {
            ReplyValue::Word(word) => InlineBytes::one(word.value.into(), word.len()),
            ReplyValue::Few(values) => values,
            ReplyValue::Part(at, len) => {
                let memory = IoBuf::one(self.target.grants[slot].memory.again());
                let mut bytes = OldValues::of_len(len, self.spare);
                memory.read_at(at, bytes.get_mut());
                return self.answer_op(p, reply_to.resp(), bytes);
            }
        };
        let sid = self.objects.peers[p].sid;
        self.target.answers.push(Answer { peer: p, sid, reply_to, values });
        self.objects.due.todo |= Todo::ANSWER;
        self.target.waiting += 1;
    }

    /// Checks access for a request shape (key, rights, endpoint, operation) and caches the grant.
    /// False if any check fails: the slow path then refuses the request, or executes it if its
    /// region is in several pieces.
    #[inline(never)]
    fn check_access(&mut self, req_ty: RequestTy, request: RawRequest, plen: u16) -> bool {
        let grant = match req_ty {
            RequestTy::Atomic => self.grant_atomic(request, plen),
            RequestTy::Write | RequestTy::Read => self.grant_bytes(req_ty, request),
        };
        let Some(grant) = grant else { return false };
        self.mrs.last = grant.mr;
        self.target.grants[TargetCache::slot(req_ty, &request.key)] = grant;
        true
    }

    fn grant_bytes(&self, req_ty: RequestTy, request: RawRequest) -> Option<AccessGrant> {
        let read = req_ty == RequestTy::Read;
        let (caps, access) = match read {
            true => (Caps::REMOTE_READ, MrAccess::REMOTE_READ),
            false => (Caps::REMOTE_WRITE, MrAccess::REMOTE_WRITE),
        };
        if !request.key.is_whole(req_ty) {
            return None;
        }
        let range = request.range();
        let (ep, counted) = self.objects.eps.grant_ep(range.dst_ep, Caps::RMA | caps)?;
        let (m, _) = self.mrs.lookup(self.objects.eps, ep, &range, 1, access).ok()?;
        let mr = Some(&self.mrs[m]).filter(|mr| mr.is_reusable())?;
        let counted = counted || if read { mr.read_cntr } else { mr.write_cntr } != CntrIdx::NONE;
        let (key, base, memory) = (request.key, mr.base, mr.buf.as_one()?.again());
        Some(AccessGrant { key, base, counted, mr: m, ep, memory, ..AccessGrant::NOTHING })
    }

    fn grant_atomic(&self, request: RawRequest, plen: u16) -> Option<AccessGrant> {
        let op = request.checked()?;
        let answered = op.fetch || op.answer;
        let whole = op.range.last && op.end && !op.void && answered && op.offset == 0;
        let plain = whole && !op.tagged && op.range.rx_ctx == 0;
        let (atomic_op, ty, bytes) = decode_atomic(&op, plen.into()).ok()?;
        if !plain || bytes > Response::SHORT {
            return None;
        }
        let (caps, access) = atomic_needs(&op, atomic_op);
        let (ep, counted) = self.objects.eps.grant_ep(op.range.dst_ep, caps)?;
        let (m, _) = self.mrs.lookup(self.objects.eps, ep, &op.range, bytes as u64, access).ok()?;
        let mr = Some(&self.mrs[m]).filter(|mr| mr.is_reusable())?;
        let memory = mr.buf.as_one()?.again();
        let counted = counted
            || op.fetch && mr.read_cntr != CntrIdx::NONE
            || changes(atomic_op) && mr.write_cntr != CntrIdx::NONE;
        let word = op.count == 1 && ty.is_integer() && (4..=8).contains(&bytes);
        let words = Words::of(&memory, mr.is_shared());
        let adds = word && bytes == 8 && atomic_op == atomic::AtomicOp::Sum && !counted;
        let does = match words {
            Some(_) if adds => ExecKind::Add,
            _ if word => ExecKind::Word,
            _ => ExecKind::Elements,
        };
        Some(AccessGrant {
            key: request.key,
            base: mr.base,
            words: words.unwrap_or(Words::NONE),
            does,
            fetch: op.fetch,
            counted,
            plen,
            bytes: bytes as u16,
            op: atomic_op,
            ty,
            sharing: mr.sharing,
            mr: m,
            ep,
            memory,
        })
    }

    /// Counts a request that was executed by the grant in `slot` and has transferred `bytes`.
    #[cold]
    fn count_executed(&mut self, req_ty: RequestTy, slot: usize, bytes: u64) {
        let &AccessGrant { mr, ep, fetch, op, .. } = &self.target.grants[slot];
        let (reads, writes) = match req_ty {
            RequestTy::Atomic => (fetch, changes(op)),
            RequestTy::Write => (false, true),
            RequestTy::Read => (true, false),
        };
        let done = Done::one(bytes);
        self.count_access(mr, (reads, writes), done);
        self.objects.count_remote(ep, if reads { REMOTE_READ } else { REMOTE_WRITE }, done);
    }

    /// Moves an answer to `Node::responses`. Dropped if the session has ended: then the initiator
    /// has ended the operation.
    #[cold]
    fn defer_answer(&mut self, i: usize) {
        let Answer { peer, sid, reply_to, values } = self.target.answers[i];
        if self.objects.peers.get(peer).is_none_or(|peer| peer.sid != sid) {
            return;
        }
        let (all, len) = (values.to_bytes(), values.len());
        let mut bytes = OldValues::of_len(len, self.spare);
        bytes.get_mut().copy_from_slice(&all[..len]);
        self.answer_op(peer, reply_to.resp(), bytes);
    }
}

/// How requests of one kind are executed and answered.
trait Execution {
    /// Type of the requests.
    const TYPE: RequestTy;
    /// Only while no answer waits, from a [steady](Peer::is_steady) peer, and if the answer need
    /// not request an acknowledgement, so that little code is inlined. [`Atomic`] handles the other
    /// cases.
    const COMMON: bool = false;

    /// Payload of the answer.
    type ReplyValue: AnswerPayload;

    /// Executes the request in `frame`, which has the shape of `grant`. `None`, and nothing
    /// changed, if that is not possible (bounds, alignment, lengths). `answer_max`: bytes that an
    /// answer holds.
    fn execute(
        grant: &AccessGrant,
        op: &RawRequest,
        base: &BaseWords,
        rest: (&RxFrame<'_>, usize),
    ) -> Option<Self::ReplyValue>;

    /// Bytes that the executed request has transferred, for counters: the elements, or the bytes
    /// written or read.
    fn bytes(grant: &AccessGrant, base: &BaseWords, old: &Self::ReplyValue) -> usize;
}

/// [`ExecKind::Add`].
enum Add {}
/// Any atomic operation.
enum Atomic {}
enum Write {}
enum Read {}

impl Execution for Add {
    const TYPE: RequestTy = RequestTy::Atomic;
    const COMMON: bool = true;
    type ReplyValue = Word;

    #[inline(always)]
    fn execute(
        grant: &AccessGrant,
        op: &RawRequest,
        base: &BaseWords,
        (frame, _): (&RxFrame<'_>, usize),
    ) -> Option<Word> {
        if grant.does != ExecKind::Add || usize::from(base.plen()) != size_of::<u64>() {
            return cold(None);
        }
        let operand = u64::from_le_bytes(frame.chunk_at(AtomicOp::HEAD)?);
        let old = grant.words.fetch_add(op.addr.wrapping_sub(grant.base), operand)?;
        Some(Word::of(old, if grant.fetch { size_of::<u64>() } else { 0 }))
    }

    fn bytes(grant: &AccessGrant, _: &BaseWords, _: &Word) -> usize {
        grant.bytes.into()
    }
}

impl Execution for Atomic {
    const TYPE: RequestTy = RequestTy::Atomic;
    type ReplyValue = ReplyValue;

    fn execute(
        grant: &AccessGrant,
        op: &RawRequest,
        base: &BaseWords,
        (frame, _): (&RxFrame<'_>, usize),
    ) -> Option<ReplyValue> {
        let (plen, bytes) = (usize::from(grant.plen), usize::from(grant.bytes));
        let at = usize::try_from(op.addr.wrapping_sub(grant.base)).ok()?;
        let memory = grant.memory.piece(at, bytes)?;
        if base.plen() != grant.plen {
            return None;
        }
        let fetched = if grant.fetch { bytes } else { 0 };
        if grant.does != ExecKind::Elements {
            let operands = frame.u128_at(AtomicOp::HEAD, plen)?;
            let shared = grant.sharing.is_shared();
            let old = memory.atomic_word(0, grant.op, grant.ty, operands, shared)?;
            return Some(ReplyValue::of(old.into(), fetched));
        }
        let (mut operands, mut old) = ([0; InlineBytes::MAX], [0; U128_LEN]);
        if !frame.copy_to(AtomicOp::HEAD, &mut operands[..plen]) {
            return None;
        }
        let (operand, compare) = operands[..plen].split_at(plen.min(bytes));
        let (count, to) = (bytes / grant.ty.size(), &mut old[..bytes]);
        let buf = IoBuf::one(memory);
        let done = buf.atomic(0, grant.op, grant.ty, count, operand, compare, to, grant.sharing);
        done.ok().map(|()| ReplyValue::of(u128::from_le_bytes(old), fetched))
    }

    fn bytes(grant: &AccessGrant, _: &BaseWords, _: &ReplyValue) -> usize {
        grant.bytes.into()
    }
}

impl Execution for Write {
    const TYPE: RequestTy = RequestTy::Write;
    type ReplyValue = Word;

    #[inline(always)]
    fn execute(
        grant: &AccessGrant,
        op: &RawRequest,
        base: &BaseWords,
        (frame, _): (&RxFrame<'_>, usize),
    ) -> Option<Word> {
        let len = RawRequest::len(frame, Self::TYPE, base)?;
        let at = usize::try_from(op.addr.wrapping_sub(grant.base)).ok()?;
        frame.copy_to_span(WriteOp::HEAD, &grant.memory.piece(at, len)?, len);
        Some(Word::NONE)
    }

    fn bytes(_: &AccessGrant, base: &BaseWords, _: &Word) -> usize {
        base.plen().into()
    }
}

impl Execution for Read {
    const TYPE: RequestTy = RequestTy::Read;
    type ReplyValue = ReplyValue;

    #[inline(always)]
    fn execute(
        grant: &AccessGrant,
        op: &RawRequest,
        base: &BaseWords,
        (frame, answer_max): (&RxFrame<'_>, usize),
    ) -> Option<ReplyValue> {
        let len = RawRequest::len(frame, Self::TYPE, base)?;
        let at = usize::try_from(op.addr.wrapping_sub(grant.base)).ok()?;
        match grant.memory.piece(at, len)?.word_at(0) {
            Some(word) if len == size_of::<u64>() => Some(ReplyValue::Word(Word::of(word, len))),
            _ if len > answer_max => cold(None),
            _ => Some(ReplyValue::Part(at, len)),
        }
    }

    fn bytes(_: &AccessGrant, _: &BaseWords, old: &ReplyValue) -> usize {
        match old {
            ReplyValue::Word(word) => word.len(),
            ReplyValue::Few(values) => values.len(),
            ReplyValue::Part(_, len) => *len,
        }
    }
}

/// Payload of an answer, with a type for each kind of requests.
trait AnswerPayload: Copy {
    /// Sends `answer` with this payload.
    fn send(self, answer: AnswerFrame<'_, &Span>, out: &mut impl FrameSink) -> Tx;

    /// The payload for an answer that leaves later.
    fn kept(self) -> ReplyValue;
}

impl AnswerPayload for Word {
    #[inline(always)]
    fn send(self, answer: AnswerFrame<'_, &Span>, out: &mut impl FrameSink) -> Tx {
        out.send_in_place(&answer.with(self))
    }

    fn kept(self) -> ReplyValue {
        ReplyValue::Word(self)
    }
}

impl AnswerPayload for ReplyValue {
    #[inline(always)]
    fn send(self, answer: AnswerFrame<'_, &Span>, out: &mut impl FrameSink) -> Tx {
        match self {
            Self::Word(word) => word.send(answer, out),
            Self::Few(values) => out.send_in_place(&answer.with(values)),
            Self::Part(at, len) => {
                let buf = IoBuf::one(answer.payload.again());
                out.send_in_place(&answer.with((&buf, at, len)))
            }
        }
    }

    fn kept(self) -> Self {
        self
    }
}

impl ReplyValue {
    /// The first `bytes` bytes of `value`.
    fn of(value: u128, bytes: usize) -> Self {
        match bytes {
            0 | 8 => Self::Word(Word::of(value as u64, bytes)),
            _ => Self::Few(InlineBytes::one(value, bytes)),
        }
    }
}

/// Notes that an answer to `peer` has left, with `flying` packets in flight. Returns whether the
/// peer's timer is to be armed.
#[inline(always)]
fn answered(now: Instant, peer: &mut Peer, flying: u32) -> bool {
    if flying == 0 {
        peer.probe_at = now;
    } else {
        // The only packet in flight uses the place that `Peer::tx_room` leaves free.
        peer.tx_quota = peer.tx_quota.saturating_sub(1);
    }
    peer.snd.number();
    peer.carried_ack_in_order();
    peer.timer_at == Instant(u64::MAX)
}

/// An answer about to be sent.
struct AnswerFrame<'a, P> {
    base: PeerBase<'a>,
    reply_to: &'a wire::ReplyTo,
    /// The answer requests an acknowledgement.
    ar: bool,
    payload: P,
}

impl<'a, S> AnswerFrame<'a, S> {
    #[inline(always)]
    fn with<P>(self, payload: P) -> AnswerFrame<'a, P> {
        let Self { base, reply_to, ar, .. } = self;
        AnswerFrame { base, reply_to, ar, payload }
    }
}

/// The payload of an answer. The first `H` bytes of the frame are written field by field.
trait Payload<const H: usize> {
    /// Length, bytes.
    fn len(&self) -> usize;

    /// Writes the part of the payload in the first `H` bytes of the frame: none by default.
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

/// One word, or nothing with as much padding: frames of one length need no branch.
#[derive(Clone, Copy)]
struct Word {
    value: u64,
    is_some: bool,
}

impl Word {
    const NONE: Self = Self { value: 0, is_some: false };

    /// `value` if `bytes` is not 0. An initiator without read access gets none of it, not even as
    /// padding.
    #[inline(always)]
    const fn of(value: u64, bytes: usize) -> Self {
        if bytes == 0 { Self::NONE } else { Self { value, is_some: true } }
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

impl<const H: usize, P: Payload<H>> InPlaceFrame<H> for AnswerFrame<'_, P> {
    #[inline(always)]
    fn dst(&self) -> u64 {
        self.base.dst()
    }

    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        self.payload.put(out);
        self.base.put(Ty::Resp, self.payload.len(), self.ar, out);
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
