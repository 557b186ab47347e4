//! The short way of one-sided operations at their target, on a port that loses nothing. The
//! initiator's is in `short_rma`.
//!
//! A request is executed when it comes, and its answer or acknowledgement leaves while it is read,
//! if the port can do that. Else an answer waits in a list of its own until the burst has been
//! taken, since until then the port is lent to whoever takes it; and one acknowledgement for all is
//! sent behind them.

use barewire_driver::frame::{ETH_HDR_LEN, RxFrame};
use barewire_driver::hint::cold;
use barewire_driver::mem::{FEW, Few, IoBuf, Words};
use barewire_driver::port::Tx;

use super::mr::Mr;
use super::ops::{Job, JobKind};
use super::peer::{ACK_EVERY_LOSSLESS, Peer, slot_of};
use super::rma::{REMOTE_READ, REMOTE_WRITE};
use super::rma_in::{JOBS_MAX, atomic_needs, changes, decode_atomic};
use super::rma_out::ANSWERS_AT_ONCE;
use super::short_rma::{
    ASKS_EVERY, BaseTo, READ_SHORT, accept, accept_usual, asks, is_next, usual_flight,
};
use super::{FrameSink, Node, ShortFrame, Todo};
use crate::flags::{Caps, MrAccess};
use crate::plant::{Bug, planted};
use crate::proto::atomic::{self, Datatype};
use crate::rel::sent::WINDOW;
use crate::slab::{Link, NONE};
use crate::types::Instant;
use crate::wire::{
    self, AckOp, AtomicOp, BaseOut, HeadOut, PlainAsk, PlainBase, PlainOp, RespOp, Ty, Wanted,
    WriteOp,
};

/// Kinds of operations about which every question was answered, at most: atomic ones, and writes
/// and reads.
const NEAR_ATOMIC: usize = 8;
const NEAR_BYTES: usize = 4;
const NEAR: usize = NEAR_ATOMIC + 2 * NEAR_BYTES;

/// An answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    peer: u32,
    /// Our name for the session in which it was asked for.
    sid: u32,
    ty: Ty,
    asked: wire::Asked,
    values: Few,
}

/// What an operation of the short way asked for about which every question was answered, and the
/// answers. Who closes or narrows what they depend on forgets them
/// ([`forget_near`](Node::forget_near)).
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Near {
    what: Wanted,
    /// Of an atomic operation: bytes of the payload, and of the elements.
    plen: u16,
    bytes: u16,
    op: atomic::AtomicOp,
    ty: Datatype,
    /// One element that `Span::atomic_word` may change.
    word: bool,
    /// The old values are wanted.
    fetch: bool,
    /// It is [`Usual`].
    usual: bool,
    /// Counters of the region or the endpoint count it.
    counted: bool,
    mr: u32,
    ep: u32,
    /// Remote address of the region's first byte, and the offset above which it ends too early for
    /// the elements; for a write or a read, where it ends.
    base: u64,
    room: u64,
}

/// What most atomic operations are: it fetches and adds 8 bytes, which nobody counts, of a region
/// that is one piece of memory. What there is to know of it stands here as well, in half a line.
#[derive(Debug)]
#[repr(align(64))]
struct Usual {
    what: Wanted,
    /// Remote address of the region's first byte.
    base: u64,
    /// The region's memory: lent for as long as the region is there, and forgotten with it.
    memory: Words,
}

/// What a target keeps for the short way.
#[derive(Debug)]
pub(super) struct Asked {
    /// Apart from the node, whose own records stand close together.
    near: Box<[Near; NEAR]>,
    /// At the place where `near` has it.
    usual: Box<[Usual; NEAR_ATOMIC]>,
    /// Answers that the burst being taken has made due and that could not leave at once.
    answers: Vec<Answer>,
    /// Answers that wait, here and on the long way.
    pub(super) waiting: usize,
    /// How many answers there may be on the long way, and waiting here besides.
    jobs_few: usize,
}

impl Asked {
    /// For a node with room for `jobs` answers.
    pub(super) fn new(jobs: usize) -> Self {
        Self {
            near: Box::new([Near::NOTHING; NEAR]),
            usual: Box::new([const { Usual::NOTHING }; NEAR_ATOMIC]),
            answers: Vec::with_capacity(ANSWERS_AT_ONCE),
            waiting: 0,
            jobs_few: jobs.min(JOBS_MAX.into()),
        }
    }

    /// Where that is kept which is known of `what`. Never the same for two types.
    #[inline(always)]
    fn place(ask: PlainAsk, what: &Wanted) -> usize {
        match ask {
            PlainAsk::Atomic => what.hash() % NEAR_ATOMIC,
            PlainAsk::Write => NEAR_ATOMIC + what.hash() % NEAR_BYTES,
            PlainAsk::Read => NEAR_ATOMIC + NEAR_BYTES + what.hash() % NEAR_BYTES,
        }
    }
}

impl Near {
    /// Nothing is known.
    const NOTHING: Self = Self {
        what: Wanted::NOTHING,
        plen: 0,
        bytes: 0,
        op: atomic::AtomicOp::Read,
        ty: Datatype::Uint64,
        word: false,
        fetch: false,
        usual: false,
        counted: false,
        mr: NONE,
        ep: NONE,
        base: 0,
        room: 0,
    };
}

impl Node {
    /// Takes a frame that holds an atomic operation, and answers to `out` if that takes an answer.
    #[inline(always)]
    pub(super) fn on_atomic_frame(
        &mut self,
        now: Instant,
        frame: RxFrame<'_>,
        mut out: impl FrameSink,
    ) {
        if !self.take_usual_fetch(now, &frame, &mut out) {
            cold(());
            self.on_ask_frame(PlainAsk::Atomic, now, &frame.again(), out);
        }
    }

    /// Takes a frame that holds any request, as [`on_atomic_frame`](Self::on_atomic_frame) does.
    #[inline(never)]
    pub(super) fn on_ask_frame(
        &mut self,
        ask: PlainAsk,
        now: Instant,
        frame: &RxFrame<'_>,
        mut out: impl FrameSink,
    ) {
        if !self.take_request(ask, now, frame, &mut out) {
            self.on_frame_long(now, frame);
        }
    }

    /// Executes what most atomic operations are, if its packet is next in order and no answer
    /// waits. False if it is another: nothing has happened.
    #[inline(always)]
    pub(super) fn take_usual_fetch(
        &mut self,
        now: Instant,
        frame: &RxFrame<'_>,
        out: &mut impl FrameSink,
    ) -> bool {
        // With this every other length is asked.
        if frame.len() < AtomicOp::HEAD + size_of::<u64>() {
            return cold(false);
        }
        let Some((base, op)) = PlainOp::parse(frame, PlainAsk::Atomic) else {
            return cold(false);
        };
        let usual = &self.asked.usual[Asked::place(PlainAsk::Atomic, &op.what)];
        debug_assert!(self.asked.waiting == self.asked.answers.len() + self.jobs.len());
        // Nothing waits, so that there is room for the answer, wherever it goes.
        if usual.what != op.what || self.asked.waiting != 0 {
            return cold(false);
        }
        let p = slot_of(base.dst_sid());
        let Some(peer) = self.peers.at_mut(p) else { return cold(false) };
        let Some(flying) = usual_flight(peer, self.word, &base, size_of::<u64>()) else {
            return cold(false);
        };
        let Some(old) = usual.execute(op.addr, frame) else { return cold(false) };
        let Some(asked) = wire::Asked::parse(frame) else { return cold(false) };
        peer.nack.note_key(now, false);
        accept_usual(peer, &base, self.polled_at);
        self.counters.rma_executed += 1;
        let what = (Ty::Resp, &asked);
        let answer = AnswerTo { ar: false, ..AnswerTo::new(peer, &self.word, what, old) };
        // Before so many nobody asks for an acknowledgement.
        if flying < ASKS_EVERY - 1 && out.send_short(&answer) == Tx::Sent {
            self.counters.tx_frames += 1;
            (peer.owed, peer.ack_now) = (0, false);
            // Just heard, it is as if it had been probed.
            peer.probe_at = now;
            // Alone it takes the room that is left for it (`Peer::short_room`).
            if flying != 0 {
                peer.short_left = peer.short_left.saturating_sub(1);
            }
            peer.snd.number();
            if peer.timer_at == Instant(u64::MAX) {
                cold(());
                self.arm_timer(now, p);
            }
        } else {
            cold(());
            self.answer_soon(p, (Ty::Resp, asked), old.into(), 8);
        }
        true
    }

    /// Executes an operation on few elements or bytes of a region, if its packet is next in order
    /// and nothing about it is out of the ordinary. False if it is another: nothing has happened.
    /// (From the start, so that what others look at never has to lie in memory.)
    #[inline(always)]
    fn take_request(
        &mut self,
        ask: PlainAsk,
        now: Instant,
        frame: &RxFrame<'_>,
        out: &mut impl FrameSink,
    ) -> bool {
        let Some((base, op)) = PlainOp::parse(frame, ask) else { return cold(false) };
        if !is_next(&self.peers, self.word, &base) {
            return cold(false);
        }
        let near = &self.asked.near[Asked::place(ask, &op.what)];
        let known = near.what == op.what && (ask != PlainAsk::Atomic || near.plen == base.plen());
        if !known && !self.look_near(ask, op, base.plen()) {
            return cold(false);
        }
        match ask {
            PlainAsk::Atomic => self.execute_atomic(now, frame, &base, op, out),
            PlainAsk::Write | PlainAsk::Read => self.execute_bytes(ask, now, frame, &base, op, out),
        }
    }

    /// Whether another answer may wait: no more for a peer than for all of them.
    #[inline(always)]
    fn may_answer(&self) -> bool {
        let few = self.jobs.len() + ANSWERS_AT_ONCE <= self.asked.jobs_few;
        few && self.asked.answers.len() < ANSWERS_AT_ONCE
    }

    /// Executes an atomic operation of which everything is known that is alike in many.
    #[inline(always)]
    fn execute_atomic(
        &mut self,
        now: Instant,
        frame: &RxFrame<'_>,
        base: &PlainBase,
        op: PlainOp,
        out: &mut impl FrameSink,
    ) -> bool {
        let p = slot_of(base.dst_sid());
        let may_answer = self.may_answer();
        let near = &self.asked.near[Asked::place(PlainAsk::Atomic, &op.what)];
        let at = op.addr.wrapping_sub(near.base);
        let peer = &mut self.peers[p];
        // One that is to be acknowledged besides being answered is left to the long way.
        let odd = near.fetch && (!may_answer || base.asks_ack());
        if at > near.room || peer.bad_seq != NONE || odd {
            return cold(false);
        }
        let mr = &self.mrs[near.mr];
        let Some(old) = near.execute(mr, at as usize, frame) else { return cold(false) };
        let Some(asked) = wire::Asked::parse(frame) else { return cold(false) };
        peer.nack.note_key(now, false);
        accept(peer, base, self.polled_at);
        if near.usual {
            peer.quiet = peer.is_quiet();
        }
        self.counters.rma_executed += 1;
        let (fetch, bytes) = (near.fetch, near.bytes.into());
        let counted = near.counted.then_some((near.mr, near.ep, near.op));
        if fetch {
            let alone = self.asked.answers.is_empty() && peer.jobq.head == NONE;
            self.answer_to((now, p, alone), (Ty::Resp, asked), (old, bytes), out);
        } else {
            self.acknowledge(p, base, out);
        }
        if let Some((mr, ep, what)) = counted {
            self.count_executed(mr, ep, fetch, changes(what));
        }
        true
    }

    /// Executes a write or a read of which everything is known that is alike in many.
    #[inline(always)]
    fn execute_bytes(
        &mut self,
        ask: PlainAsk,
        now: Instant,
        frame: &RxFrame<'_>,
        base: &PlainBase,
        op: PlainOp,
        out: &mut impl FrameSink,
    ) -> bool {
        let Some(len) = PlainOp::len(frame, ask, base) else { return cold(false) };
        let p = slot_of(base.dst_sid());
        let alone = self.asked.answers.is_empty() && self.peers[p].jobq.head == NONE;
        let may_answer = alone && self.jobs.is_empty() || self.may_answer();
        let near = &self.asked.near[Asked::place(ask, &op.what)];
        let at = op.addr.wrapping_sub(near.base);
        let peer = &mut self.peers[p];
        if at > near.room || len as u64 > near.room - at || peer.bad_seq != NONE {
            return cold(false);
        }
        let (at, buf) = (at as usize, &self.mrs[near.mr].buf);
        let (counted, mr, ep) = (near.counted, near.mr, near.ep);
        if ask == PlainAsk::Write {
            frame.copy_to_io(WriteOp::HEAD, buf, at, len);
            // What one that was given up half way had written ends with this one's number.
            peer.written = 0;
            accept(peer, base, self.polled_at);
            self.acknowledge(p, base, out);
        } else {
            let Some(asked) = wire::Asked::of_read(frame) else { return cold(false) };
            if !may_answer || base.asks_ack() {
                return cold(false);
            }
            if len <= FEW {
                let mut old = [0; FEW];
                buf.read_at(at, &mut old[..len]);
                accept(peer, base, self.polled_at);
                let old = u128::from_le_bytes(old);
                self.answer_to((now, p, alone), (Ty::Data, asked), (old, len), out);
            } else {
                // As if it had been taken, so that it is acknowledged as well.
                let what = (Ty::Data, &asked);
                let mut part = AnswerTo::new(peer, &self.word, what, (buf, at, len));
                part.base.ahead = 1;
                // More is paced by who asks for it.
                let open = alone && peer.snd.in_flight() < WINDOW && len <= READ_SHORT;
                let holds = RespOp::HEAD + len <= peer.frame_max as usize + ETH_HDR_LEN;
                if !open || !holds || out.send_short(&part) != Tx::Sent {
                    return cold(false);
                }
                accept(peer, base, self.polled_at);
                self.answer_left(now, p);
            }
        }
        self.peers[p].nack.note_key(now, false);
        self.counters.rma_executed += 1;
        if counted {
            let read = ask == PlainAsk::Read;
            self.count_executed(mr, ep, read, !read);
        }
        true
    }

    /// Sends an answer, at once if it is `alone`, else with the end of the burst.
    #[inline(always)]
    fn answer_to(
        &mut self,
        (now, p, alone): (Instant, u32, bool),
        (ty, asked): (Ty, wire::Asked),
        (old, bytes): (u128, usize),
        out: &mut impl FrameSink,
    ) {
        let (peer, src, what) = (&self.peers[p], &self.word, (ty, &asked));
        let sent = alone
            && match bytes {
                8 => AnswerTo::new(peer, src, what, old as u64).send(out),
                _ => AnswerTo::new(peer, src, what, Few::one(old, bytes)).send(out),
            };
        if sent {
            self.answer_left(now, p);
        } else {
            self.answer_soon(p, (ty, asked), old, bytes);
        }
    }

    /// Notes that an answer has left to peer `p`.
    #[inline(always)]
    fn answer_left(&mut self, now: Instant, p: u32) {
        self.counters.tx_frames += 1;
        let peer = &mut self.peers[p];
        peer.tell_ack();
        if answered(now, peer) {
            self.arm_timer(now, p);
        }
    }

    /// Keeps an answer of `bytes` bytes for the end of the burst.
    #[inline(never)]
    fn answer_soon(&mut self, p: u32, (ty, asked): (Ty, wire::Asked), old: u128, bytes: usize) {
        let (sid, values) = (self.peers[p].sid, Few::one(old, bytes));
        self.asked.answers.push(Answer { peer: p, sid, ty, asked, values });
        self.todo |= Todo::ANSWER;
        self.asked.waiting += 1;
        self.owe_short(p);
    }

    /// Tells peer `p` that what `base` brought has been executed, if it wants to hear that.
    #[inline(always)]
    fn acknowledge(&mut self, p: u32, base: &PlainBase, out: &mut impl FrameSink) {
        if !base.asks_ack() {
            return self.owe_short(p);
        }
        let peer = &mut self.peers[p];
        if out.send_short(&AckTo(BaseTo { peer, src: &self.word, ahead: 0 })) == Tx::Sent {
            (peer.owed, peer.ack_now, peer.dups) = (0, false, 0);
            self.counters.tx_frames += 1;
            self.counters.tx_acks += 1;
        } else {
            peer.ack_now = true;
            self.make_ready(p);
        }
    }

    /// An acknowledgement is owed for one packet more of the short way.
    #[inline(always)]
    pub(super) fn owe_short(&mut self, p: u32) {
        let peer = &mut self.peers[p];
        peer.owed = peer.owed.saturating_add(1);
        peer.take_left = peer.take_left.saturating_sub(1);
        if peer.owed >= ACK_EVERY_LOSSLESS {
            peer.ack_now = true;
            self.make_ready(p);
        }
    }

    /// Asks every question about an operation, and remembers the answers if each of them is yes.
    #[inline(never)]
    fn look_near(&mut self, ask: PlainAsk, said: PlainOp, plen: u16) -> bool {
        let near = match ask {
            PlainAsk::Atomic => self.near_atomic(said, plen),
            PlainAsk::Write | PlainAsk::Read => self.near_bytes(ask, said),
        };
        let Some(near) = near else { return false };
        self.mr_near = near.mr;
        let at = Asked::place(ask, &said.what);
        self.asked.near[at] = near;
        if let Some(usual) = self.asked.usual.get_mut(at) {
            let memory = self.mrs[near.mr].buf.as_one().filter(|_| near.usual);
            let (what, base) = (near.what, near.base);
            let shared = self.mrs[near.mr].is_shared();
            *usual = memory
                .and_then(|span| Words::of(span, shared))
                .map_or(Usual::NOTHING, |memory| Usual { what, base, memory });
        }
        true
    }

    /// The endpoint that an operation is for, if it may be worked on so, and whether it counts
    /// that.
    fn near_ep(&self, number: u16, caps: Caps) -> Option<(u32, bool)> {
        let ep = self.ep_slot(number);
        let e = self.eps.get(ep).filter(|e| e.enabled && e.caps.contains(caps))?;
        Some((ep, e.caps.contains(Caps::RMA_EVENT)))
    }

    fn near_bytes(&self, ask: PlainAsk, said: PlainOp) -> Option<Near> {
        let read = ask == PlainAsk::Read;
        let (caps, access) = match read {
            true => (Caps::REMOTE_READ, MrAccess::REMOTE_READ),
            false => (Caps::REMOTE_WRITE, MrAccess::REMOTE_WRITE),
        };
        if !said.what.is_whole(ask) {
            return None;
        }
        let range = said.range();
        let (ep, counted) = self.near_ep(range.dst_ep, Caps::RMA | caps)?;
        let (m, _) = self.mr_look(ep, &range, 1, access).ok()?;
        let mr = &self.mrs[m];
        let counted = counted || if read { mr.read_cntr } else { mr.write_cntr } != NONE;
        let (base, room) = (mr.base, mr.buf.len() as u64);
        Some(Near { what: said.what, counted, mr: m, ep, base, room, ..Near::NOTHING })
    }

    fn near_atomic(&self, said: PlainOp, plen: u16) -> Option<Near> {
        let op = said.checked()?;
        let plain = op.range.last && op.end && !op.tagged && !op.void && op.range.rx_ctx == 0;
        let (plen, said_len) = (usize::from(plen), plen);
        let (what, ty, bytes) = decode_atomic(&op, plen).ok()?;
        if !plain || bytes > Job::SHORT {
            return None;
        }
        let (caps, access) = atomic_needs(&op, what);
        let (ep, counted) = self.near_ep(op.range.dst_ep, caps)?;
        let (m, _) = self.mr_look(ep, &op.range, bytes as u64, access).ok()?;
        let mr = &self.mrs[m];
        let few = op.count == 1 && plen <= FEW;
        let word = few && ty.is_integer() && bytes >= 4;
        let counted =
            counted || op.fetch && mr.read_cntr != NONE || changes(what) && mr.write_cntr != NONE;
        let sum = op.fetch && what == atomic::AtomicOp::Sum;
        let usual = word && bytes == 8 && sum && !counted;
        Some(Near {
            what: said.what,
            plen: said_len,
            bytes: bytes as u16,
            op: what,
            ty,
            word,
            fetch: op.fetch,
            usual,
            counted,
            mr: m,
            ep,
            base: mr.base,
            room: mr.buf.len() as u64 - bytes as u64,
        })
    }

    /// What was found out about operations holds no longer.
    #[cold]
    pub(super) fn forget_near(&mut self) {
        if planted(Bug::NearKept) {
            return;
        }
        *self.asked.near = [Near::NOTHING; NEAR];
        *self.asked.usual = [const { Usual::NOTHING }; NEAR_ATOMIC];
    }

    #[cold]
    fn count_executed(&mut self, mr: u32, ep: u32, reads: bool, writes: bool) {
        self.count_access(mr, reads, writes);
        self.count_remote(ep, if reads { REMOTE_READ } else { REMOTE_WRITE });
    }

    /// Whether answers wait.
    #[inline(always)]
    pub fn has_answers(&self) -> bool {
        !self.asked.answers.is_empty()
    }

    /// Sends the answers that the last burst has made due. What cannot leave now, or has something
    /// before it, is the next [`transmit`](Self::transmit)'s.
    pub fn send_answers(&mut self, now: Instant, out: &mut impl FrameSink) {
        for i in 0..self.asked.answers.len() {
            let answer = &self.asked.answers[i];
            let p = answer.peer;
            let sent = self.peers.get_mut(p).filter(|peer| {
                let free = peer.sid == answer.sid && peer.plain && peer.jobq.head == NONE;
                let what = (answer.ty, &answer.asked);
                free && AnswerTo::new(peer, &self.word, what, answer.values).send(out)
            });
            let Some(peer) = sent else {
                self.answer_later(i);
                continue;
            };
            self.counters.tx_frames += 1;
            peer.tell_ack();
            if answered(now, peer) {
                self.arm_timer(now, p);
            }
        }
        self.asked.waiting -= self.asked.answers.len();
        self.asked.answers.clear();
        self.todo -= Todo::ANSWER;
    }

    /// Leaves an answer to the long way, unless the session has ended: nobody waits for it then.
    #[cold]
    fn answer_later(&mut self, i: usize) {
        let Answer { peer, sid, ty, asked, values } = self.asked.answers[i];
        let RespOp { dst_op, dst_gen, offset, .. } = asked.resp();
        if self.peers.get(peer).is_none_or(|peer| peer.sid != sid) {
            return;
        }
        let (mut short, all, len) = ([0; Job::SHORT], values.to_bytes(), values.len() as u16);
        short.copy_from_slice(&all[..Job::SHORT]);
        let kind = JobKind::Values { ty, offset, len, short, long: Vec::new() };
        let link = Link::default();
        self.add_job(Job { peer, dst_op, dst_gen, kind, queued: true, link });
    }
}

impl Near {
    /// Executes the operation that `frame` holds from offset `at` of region `mr`, if that can be,
    /// and returns the old values.
    #[inline(always)]
    fn execute(&self, mr: &Mr, at: usize, frame: &RxFrame<'_>) -> Option<u128> {
        if self.word {
            return self.execute_word(mr, at, frame).map(u128::from);
        }
        self.execute_few(mr, at, frame)
    }

    #[inline(never)]
    fn execute_word(&self, mr: &Mr, at: usize, frame: &RxFrame<'_>) -> Option<u64> {
        let operands = frame.few_at(AtomicOp::HEAD, self.plen.into())?;
        mr.buf.first()?.atomic_word(at, self.op, self.ty, operands, mr.is_shared())
    }

    /// On few bytes that are no word.
    #[inline(never)]
    fn execute_few(&self, mr: &Mr, at: usize, frame: &RxFrame<'_>) -> Option<u128> {
        let (plen, bytes) = (usize::from(self.plen), usize::from(self.bytes));
        let (mut few, mut old) = ([0; Few::MAX], [0; FEW]);
        if !frame.copy_to(AtomicOp::HEAD, &mut few[..plen]) {
            return None;
        }
        let (operand, compare) = few[..plen].split_at(plen.min(bytes));
        let count = bytes / self.ty.size();
        let to = &mut old[..bytes];
        let done = mr.buf.atomic(at, self.op, self.ty, count, operand, compare, to, mr.sharing);
        done.ok().map(|()| u128::from_le_bytes(old))
    }
}

impl Usual {
    /// Nothing is known.
    const NOTHING: Self = Self { what: Wanted::NOTHING, base: 0, memory: Words::NONE };

    /// Fetches and adds the word that `frame` holds at remote address `addr`, if it is inside and
    /// aligned.
    #[inline(always)]
    fn execute(&self, addr: u64, frame: &RxFrame<'_>) -> Option<u64> {
        let operand = u64::from_le_bytes(frame.chunk_at(AtomicOp::HEAD)?);
        self.memory.fetch_add(addr.wrapping_sub(self.base), operand)
    }
}

/// Notes that an answer has left to `peer`. Returns whether its timer is to be armed.
#[inline(always)]
fn answered(now: Instant, peer: &mut Peer) -> bool {
    if peer.snd.in_flight() == 0 {
        peer.probe_at = now;
    }
    peer.snd.number();
    if peer.short_left > 0 {
        peer.short_left -= 1;
    }
    peer.timer_at == Instant(u64::MAX)
}

/// An answer that is about to leave.
struct AnswerTo<'a, P> {
    base: BaseTo<'a>,
    ty: Ty,
    asked: &'a wire::Asked,
    /// It asks for an acknowledgement.
    ar: bool,
    payload: P,
}

impl<'a, P> AnswerTo<'a, P> {
    #[inline(always)]
    fn new(peer: &'a Peer, src: &'a u64, (ty, asked): (Ty, &'a wire::Asked), payload: P) -> Self {
        let base = BaseTo { peer, src, ahead: 0 };
        Self { base, ty, asked, ar: asks(peer), payload }
    }

    /// Sends it, and says whether it has left.
    #[inline(always)]
    fn send<const H: usize>(&self, out: &mut impl FrameSink) -> bool
    where
        P: Payload<H>,
    {
        self.base.peer.snd.in_flight() < WINDOW && out.send_short(self) == Tx::Sent
    }
}

/// What an answer brings, in a frame whose first `H` bytes are written one by one.
trait Payload<const H: usize> {
    /// Its length, bytes.
    fn len(&self) -> usize;

    /// Writes what of it lies in the first `H` bytes.
    #[inline(always)]
    fn put(&self, _: &mut impl HeadOut) {}

    /// As [`ShortFrame::few`].
    #[inline(always)]
    fn few(&self) -> Few {
        Few::NONE
    }

    /// As [`ShortFrame::part`].
    #[inline(always)]
    fn part(&self) -> Option<(&IoBuf, usize, usize)> {
        None
    }
}

impl Payload<{ RespOp::HEAD + 8 }> for u64 {
    #[inline(always)]
    fn len(&self) -> usize {
        8
    }

    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        out.set::<{ RespOp::HEAD }, 8>(self.to_le_bytes());
    }
}

impl Payload<{ RespOp::HEAD }> for Few {
    #[inline(always)]
    fn len(&self) -> usize {
        self.len()
    }

    #[inline(always)]
    fn few(&self) -> Few {
        *self
    }
}

/// Bytes of a region: which, where and how many.
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

impl<const H: usize, P: Payload<H>> ShortFrame<H> for AnswerTo<'_, P> {
    #[inline(always)]
    fn dst(&self) -> u64 {
        self.base.dst()
    }

    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        self.payload.put(out);
        self.base.put(self.ty, self.payload.len(), self.ar, out);
        self.asked.resp().put(out);
    }

    #[inline(always)]
    fn few(&self) -> Few {
        self.payload.few()
    }

    #[inline(always)]
    fn part(&self) -> Option<(&IoBuf, usize, usize)> {
        self.payload.part()
    }
}

/// An acknowledgement that is about to leave.
struct AckTo<'a>(BaseTo<'a>);

impl ShortFrame<{ AckOp::HEAD }> for AckTo<'_> {
    #[inline(always)]
    fn dst(&self) -> u64 {
        self.0.dst()
    }

    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        self.0.put(Ty::Ack, 0, false, out);
        AckOp::put(self.0.cack(), out);
    }
}
