//! The receiving side of messages: matching, placing, unexpected messages, completions.
//!
//! Packets are executed here in order, each once. Lengths are not trusted: the codec has checked
//! them against the frame, and they are checked against the buffer here.

use std::ops::{Index, IndexMut};

use barewire_driver::frame::RxFrame;
use barewire_driver::mem::IoBuf;

use super::ops::{Pull, RecvFlags, RecvWr, UnexpectedMsg};
use super::peer::{Peer, Reassembly, ReassemblyDst};
use super::{Eps, MsgKind, Objects, Receiving, Todo};
use crate::cntr::Done;
use crate::error::Error;
use crate::flags::{Caps, CqFlags};
use crate::idx::{CqIdx, EpIdx, PeerIdx, ReassemblyIdx, RecvIdx, UnexpectedIdx};
use crate::plant::{Bug, planted};
use crate::proto::blocks::{Chain, units};
use crate::proto::matching::{Matcher, Posted, PostedPool, Src, UnexpectedPool};
use crate::slab::{NONE, Slab};
use crate::types::{CqErr, Cqe, EpAddr, FI_ADDR_UNSPEC, FiAddr, Instant, ProvErrno, Tenant};
use crate::wire::{EndStatus, MsgMOp, MsgOp, NackReason, RndvOp};

/// Result of executing the next packet in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Executed; the packet is acknowledged.
    Accept,
    /// Refused: answered by a NACK; the sender replaces the packet by a NOP.
    Refuse(NackReason),
}

/// Header of a message, common to all packet types.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MsgHead {
    pub(crate) peer: PeerIdx,
    /// Incarnation of the peer that sent it.
    pub(crate) inc: u64,
    pub(crate) src_ep: u16,
    pub(crate) tagged: bool,
    pub(crate) tag: u64,
    pub(crate) imm: Option<u64>,
    pub(crate) len: u64,
}

impl MsgHead {
    pub(super) fn kind(&self) -> MsgKind {
        if self.tagged { MsgKind::Tagged } else { MsgKind::Msg }
    }
}

/// Where a message is placed.
pub(super) enum Target {
    /// Into this receive, at offset `base` of its buffer.
    Recv { recv: RecvIdx, base: u64 },
    /// No receive matches: the message becomes an unexpected message.
    Store,
}

/// Initial capacity for messages being reassembled. Each peer has at most one; with more peers the
/// table grows when needed.
pub(super) const REASSEMBLIES_FIRST: usize = 4096;

/// The posted receives of a node, each with its buffer.
#[derive(Debug)]
pub(crate) struct Receives {
    pub(super) pool: PostedPool<RecvWr>,
    /// Memory of receives with several pieces, by the index of their record.
    lists: Vec<IoBuf>,
}

impl Index<RecvIdx> for Receives {
    type Output = Posted<RecvWr>;

    #[inline(always)]
    fn index(&self, recv: RecvIdx) -> &Posted<RecvWr> {
        &self.pool[recv]
    }
}

impl IndexMut<RecvIdx> for Receives {
    #[inline(always)]
    fn index_mut(&mut self, recv: RecvIdx) -> &mut Posted<RecvWr> {
        &mut self.pool[recv]
    }
}

impl Receives {
    pub(super) fn with_capacity(n: usize) -> Self {
        Self { pool: PostedPool::with_capacity(n), lists: Vec::with_capacity(n) }
    }

    /// Posts a receive in the tables of `matcher`. The caller has checked that a record is free.
    #[inline]
    pub(super) fn post(
        &mut self,
        matcher: &mut Matcher,
        (tag, ignore, src): (u64, u64, Src),
        wr: RecvWr,
        buf: &mut IoBuf,
    ) -> RecvIdx {
        let recv = matcher.post(&mut self.pool, tag, ignore, src, wr);
        let recv = recv.unwrap_or_else(|_| unreachable!("a free slot was checked"));
        if buf.as_one().is_none() {
            let at = recv.at();
            if self.lists.len() <= at {
                // Allocates only within what was reserved: one list per record.
                self.lists.resize_with(at + 1, IoBuf::default);
            }
            buf.move_to(&mut self.lists[at]);
        }
        recv
    }

    /// The memory of a receive.
    #[inline(always)]
    pub(super) fn buf(&self, recv: RecvIdx) -> IoBuf {
        let wr = &self[recv].payload;
        if wr.is(RecvFlags::LIST) {
            self.lists[recv.at()].again()
        } else {
            IoBuf::one(wr.buf.again())
        }
    }

    /// Bytes of the receive's buffer behind `base`.
    #[inline]
    pub(super) fn room(&self, recv: RecvIdx, base: u64) -> u64 {
        self.buf(recv).len() as u64 - base
    }
}

impl UnexpectedPool<UnexpectedMsg> {
    /// The header of a message.
    pub(super) fn head(&self, msg: UnexpectedIdx) -> MsgHead {
        let unexpected = &self[msg];
        let (tag, m) = (unexpected.tag, &unexpected.payload);
        let (peer, inc, src_ep) = (m.peer, m.inc, m.src_ep);
        MsgHead { peer, inc, src_ep, tagged: m.tagged, tag, imm: m.imm, len: m.msg_len }
    }
}

impl Eps {
    /// Takes an unexpected message out of matching, unless it was claimed.
    pub(super) fn unmatch(
        &mut self,
        unexpected: &mut UnexpectedPool<UnexpectedMsg>,
        msg: UnexpectedIdx,
    ) {
        let m = &unexpected[msg].payload;
        if m.claimed || m.recv != RecvIdx::NONE || m.discard {
            return;
        }
        let kind = if m.tagged { MsgKind::Tagged } else { MsgKind::Msg };
        let at = self.matching_of(m.ep);
        self[at].matcher[kind as usize].unlink_unexpected(unexpected, msg);
    }

    /// Frees a receive and subtracts it from its endpoint's count.
    pub(super) fn free_recv(&mut self, posted: &mut Receives, recv: RecvIdx) {
        let wr = posted.pool.free(recv).payload;
        self[wr.ep].rx_used -= 1;
    }
}

/// Messages of which some segments have arrived, by [`Peer::reassembly`].
pub(super) type Reassemblies = Slab<Reassembly, (), ReassemblyIdx>;

impl Reassemblies {
    /// Takes the record of `peer`, if there is one.
    pub(super) fn take(&mut self, peer: &mut Peer) -> Option<Reassembly> {
        let partial = std::mem::replace(&mut peer.reassembly, ReassemblyIdx::NONE);
        (partial != ReassemblyIdx::NONE).then(|| self.free(partial))
    }

    /// The receive that the unfinished message of `peer` is placed into.
    pub(super) fn placing(&self, peer: &Peer) -> Option<RecvIdx> {
        match self.get(peer.reassembly)?.to {
            ReassemblyDst::Recv { recv, .. } => Some(recv),
            ReassemblyDst::Store { .. } | ReassemblyDst::Nowhere => None,
        }
    }

    /// Discards the rest of the unfinished message of `peer`.
    pub(super) fn discard_rest(&mut self, peer: &Peer) {
        if let Some(partial) = self.get_mut(peer.reassembly) {
            partial.to = ReassemblyDst::Nowhere;
        }
    }
}

impl Receiving<'_> {
    /// Takes a segment of an eager message (MSGM).
    pub(crate) fn on_msgm(
        &mut self,
        now: Instant,
        p: PeerIdx,
        frame: &RxFrame<'_>,
        op: &MsgMOp,
        (off, len): (usize, usize),
    ) -> Verdict {
        if op.offset == 0
            && let Err(reason) = self.begin_reassembly(now, p, op)
        {
            return Verdict::Refuse(reason);
        }
        let Some(partial) = self.sessions.reassemblies.get_mut(self.sessions.peers[p].reassembly)
        else {
            return Verdict::Refuse(NackReason::Malformed);
        };
        let fits = partial.off == op.offset && partial.len == op.msg_len;
        if !fits && !planted(Bug::SegmentOffsetUnchecked) {
            return Verdict::Refuse(NackReason::Malformed);
        }
        // Inside the message, as `MsgMOp::parse` has checked.
        let end = op.offset + len as u64;
        partial.off = end;
        match partial.to {
            ReassemblyDst::Recv { recv, base } => {
                let room = self.sessions.posted.room(recv, base).saturating_sub(op.offset);
                let n = room.min(len as u64);
                if n > 0 {
                    let at = (base + op.offset) as usize;
                    frame.copy_to_io(off, &self.sessions.posted.buf(recv), at, n as usize);
                }
            }
            ReassemblyDst::Store { msg } => {
                let chain = &mut self.sessions.unexpected[msg].payload.chain;
                let kept = self.sessions.blocks.pool.append(chain, frame, off, len);
                assert!(kept, "credit covers the blocks");
            }
            ReassemblyDst::Nowhere => {}
        }
        if end == op.msg_len {
            self.finish_reassembly(now, p, op);
        }
        Verdict::Accept
    }

    fn begin_reassembly(
        &mut self,
        now: Instant,
        p: PeerIdx,
        op: &MsgMOp,
    ) -> Result<(), NackReason> {
        self.sessions.objects().abort_reassembly(p);
        let head = msgm_head(p, self.sessions.peers[p].inc, op);
        let e = self.sessions.objects().admit(p, (op.dst_ep, op.rx_ctx), &head, units(head.len))?;
        let to = match self.sessions.objects().target(e, &head) {
            Target::Recv { recv, base } => {
                self.sessions.posted[recv].payload.active += 1;
                self.sessions.blocks.give_back(units(head.len));
                ReassemblyDst::Recv { recv, base }
            }
            Target::Store => ReassemblyDst::Store {
                msg: self.sessions.objects().add_unexpected(e, &head, NONE, 0),
            },
        };
        let partial = Reassembly { to, len: op.msg_len, off: 0, imm: op.imm };
        if self.sessions.reassemblies.is_full() {
            self.sessions.reassemblies.raise_capacity(2 * self.sessions.reassemblies.capacity());
        }
        // The peer owes the rest of the message: its silence counts from now.
        self.sessions.peers[p].begin_to_wait(now);
        self.sessions.peers[p].reassembly =
            self.sessions.reassemblies.alloc(partial).expect("there is room now");
        self.sessions.control().arm_timer(now, p);
        self.sessions.blocks.regrant(self.sessions.peers, self.sessions.due, p);
        Ok(())
    }

    fn finish_reassembly(&mut self, now: Instant, p: PeerIdx, op: &MsgMOp) {
        let Some(partial) = self.sessions.reassemblies.take(&mut self.sessions.peers[p]) else {
            return;
        };
        match partial.to {
            ReassemblyDst::Recv { recv, base } => {
                self.sessions.posted[recv].payload.active -= 1;
                let head =
                    MsgHead { imm: partial.imm, ..msgm_head(p, self.sessions.peers[p].inc, op) };
                let n = self.sessions.posted.room(recv, base).min(head.len);
                self.sessions.objects().complete_recv(recv, &head, base, n);
            }
            ReassemblyDst::Store { msg } => {
                let unexpected = &mut self.sessions.unexpected[msg].payload;
                unexpected.complete = true;
                let (recv, base, e) = (unexpected.recv, unexpected.base, unexpected.ep);
                let claimed = unexpected.claimed;
                if unexpected.discard {
                    self.sessions.objects().free_unexpected(msg);
                } else if recv != RecvIdx::NONE {
                    self.sessions.unexpected[msg].payload.recv = RecvIdx::NONE;
                    self.sessions.posted[recv].payload.active -= 1;
                    self.deliver_unexpected(now, msg, recv, base);
                } else if !claimed {
                    self.sessions.objects().announce(e, msg);
                }
            }
            ReassemblyDst::Nowhere => {}
        }
    }

    /// Takes the announcement of a message (RNDV).
    pub(crate) fn on_rndv(&mut self, now: Instant, p: PeerIdx, op: &RndvOp) -> Verdict {
        let head = MsgHead {
            peer: p,
            inc: self.sessions.peers[p].inc,
            src_ep: op.src_ep,
            tagged: op.tagged,
            tag: op.tag,
            imm: op.imm,
            len: op.msg_len,
        };
        // Not stored as unexpected: a receive may wait for the message, and later messages would
        // overtake it. If another peer holds the most records, `pull` ends its session.
        if self.sessions.pulls.largest_holder(self.sessions.peers) == Some(p) {
            return Verdict::Refuse(NackReason::Overdrawn);
        }
        let e = match self.sessions.objects().admit(p, (op.dst_ep, op.rx_ctx), &head, 1) {
            Ok(e) => e,
            Err(reason) => return Verdict::Refuse(reason),
        };
        match self.sessions.objects().target(e, &head) {
            Target::Recv { recv, base } => {
                self.sessions.blocks.give_back(1);
                self.pull(now, recv, base, &head, op.src_op, op.src_gen);
            }
            Target::Store => {
                let msg = self.sessions.objects().add_unexpected(e, &head, op.src_op, op.src_gen);
                self.sessions.unexpected[msg].payload.complete = true;
                self.sessions.objects().announce(e, msg);
            }
        }
        self.sessions.blocks.regrant(self.sessions.peers, self.sessions.due, p);
        Verdict::Accept
    }

    /// Copies an unexpected message to a receive, at offset `base` of its buffer, or starts to pull
    /// it.
    pub(crate) fn deliver_unexpected(
        &mut self,
        now: Instant,
        msg: UnexpectedIdx,
        recv: RecvIdx,
        base: u64,
    ) {
        let head = self.sessions.unexpected.head(msg);
        let m = &mut self.sessions.unexpected[msg].payload;
        if m.is_announced() {
            let (src_op, src_gen) = (m.src_op, m.src_gen);
            self.sessions.objects().free_unexpected(msg);
            self.pull(now, recv, base, &head, src_op, src_gen);
        } else if m.complete {
            let n = self.sessions.posted.room(recv, base).min(head.len);
            let (chain, buf) =
                (&self.sessions.unexpected[msg].payload.chain, self.sessions.posted.buf(recv));
            self.sessions.blocks.pool.copy_out(chain, &buf, base as usize, n as usize);
            self.sessions.objects().free_unexpected(msg);
            self.sessions.objects().complete_recv(recv, &head, base, n);
        } else {
            (m.recv, m.base) = (recv, base);
            self.sessions.posted[recv].payload.active += 1;
        }
    }

    /// Discards an unexpected message. If it was announced, its sender gets END with `status`.
    pub(crate) fn discard_unexpected(
        &mut self,
        now: Instant,
        msg: UnexpectedIdx,
        status: EndStatus,
    ) {
        self.sessions.eps.unmatch(self.sessions.unexpected, msg);
        let m = &mut self.sessions.unexpected[msg].payload;
        let recv = std::mem::replace(&mut m.recv, RecvIdx::NONE);
        if recv != RecvIdx::NONE {
            self.sessions.posted[recv].payload.active -= 1;
            self.sessions.objects().fail_placing(recv, Error::Canceled);
        }
        let m = &mut self.sessions.unexpected[msg].payload;
        if m.is_announced() {
            let pull = Pull::new(m.peer, m.src_op, m.src_gen, Some(status));
            self.sessions.objects().free_unexpected(msg);
            self.add_pull(now, pull);
        } else if m.complete {
            self.sessions.objects().free_unexpected(msg);
        } else {
            m.discard = true;
        }
    }

    /// Delivers, in order, the messages that waited for room in completion queue `cq`, which was
    /// full and has been read.
    pub(crate) fn retry_cq_waiters(&mut self, cq: CqIdx) {
        self.sessions.cqs[cq].cq_blocked = false;
        let now = self.sessions.turn.polled_at;
        self.sessions.objects().retry_late_completions(cq);
        self.sessions.objects().end_waiting_receives();
        if self.sessions.port.gone {
            self.sessions.objects().srx_port_gone();
        }
        let eps: Vec<EpIdx> = (self.sessions.eps.iter())
            .filter(|(_, ep)| ep.rx_cq == cq && ep.cq_blocked)
            .map(|(e, _)| e)
            .collect();
        for e in eps {
            self.retry_ep_waiters(now, e);
        }
        self.sessions.objects().note_starved();
    }

    /// Delivers, in order and while there is room, the messages that wait for room in the receive
    /// queue of endpoint `e`.
    pub(crate) fn retry_ep_waiters(&mut self, now: Instant, e: EpIdx) {
        self.sessions.eps[e].set_cq_blocked(false);
        let srx = self.sessions.eps[e].srx;
        if srx != EpIdx::NONE {
            return self.retry_shared_unexpected(now, srx);
        }
        for kind in [MsgKind::Msg, MsgKind::Tagged] {
            self.retry_unexpected(now, e, kind);
        }
        self.sessions.objects().end_receives_if_over(e);
    }

    fn retry_unexpected(&mut self, now: Instant, e: EpIdx, kind: MsgKind) {
        while !self.sessions.eps[e].cq_blocked {
            let (ep, posted) = (&self.sessions.eps[e], &self.sessions.posted.pool);
            let matcher = &ep.matcher[kind as usize];
            let buffered = ep.buffered;
            let found = matcher.find_unexpected(self.sessions.unexpected, |m| {
                buffered && m.payload.complete
                    || matcher.match_posted(posted, m.src, m.tag).is_some()
            });
            let Some(msg) = found else { return };
            let head = self.sessions.unexpected.head(msg);
            match self.sessions.objects().target(e, &head) {
                Target::Recv { recv, base } => {
                    self.sessions.eps.unmatch(self.sessions.unexpected, msg);
                    self.deliver_unexpected(now, msg, recv, base);
                }
                Target::Store if buffered => self.sessions.objects().announce(e, msg),
                Target::Store => return,
            }
        }
    }

    /// Delivers waiting unexpected messages to a new multi-receive. True if they use up its buffer.
    pub(crate) fn fill_multi(&mut self, now: Instant, e: EpIdx, kind: MsgKind, recv: RecvIdx) {
        loop {
            let posted = &self.sessions.posted[recv];
            if posted.payload.is(RecvFlags::CLOSED) || self.sessions.eps[e].cq_blocked {
                return;
            }
            let (tag, ignore, src) = (posted.tag, posted.ignore, posted.src);
            let matcher = &self.sessions.eps[e].matcher[kind as usize];
            let Some(msg) = matcher.match_unexpected(self.sessions.unexpected, tag, ignore, src)
            else {
                return;
            };
            let head = self.sessions.unexpected.head(msg);
            let Target::Recv { recv, base } = self.sessions.objects().target_multi(e, recv, &head)
            else {
                return;
            };
            self.sessions.eps.unmatch(self.sessions.unexpected, msg);
            let was_last = self.sessions.posted[recv].payload.is(RecvFlags::CLOSED);
            self.deliver_unexpected(now, msg, recv, base);
            if was_last {
                return;
            }
        }
    }
}

impl Objects<'_> {
    /// Executes a whole message, whose payload is `off..off + len` of `frame`.
    #[inline]
    pub(crate) fn on_msg(
        &mut self,
        p: PeerIdx,
        frame: &RxFrame<'_>,
        op: &MsgOp,
        (off, len): (usize, usize),
    ) -> Verdict {
        let head = MsgHead {
            peer: p,
            inc: self.peers[p].inc,
            src_ep: op.src_ep,
            tagged: op.tagged,
            tag: op.tag,
            imm: op.imm,
            len: len as u64,
        };
        let e = match self.admit(p, (op.dst_ep, op.rx_ctx), &head, units(head.len)) {
            Ok(e) => e,
            Err(reason) => return Verdict::Refuse(reason),
        };
        match self.target(e, &head) {
            Target::Recv { recv, base } => {
                let n = self.posted.room(recv, base).min(head.len);
                if n > 0 {
                    frame.copy_to_io(off, &self.posted.buf(recv), base as usize, n as usize);
                }
                self.blocks.give_back(units(head.len));
                self.complete_recv(recv, &head, base, n);
            }
            Target::Store => {
                let msg = self.add_unexpected(e, &head, NONE, 0);
                let unexpected = &mut self.unexpected[msg].payload;
                let kept = self.blocks.pool.append(&mut unexpected.chain, frame, off, len);
                assert!(kept, "credit covers the blocks");
                unexpected.complete = true;
                self.announce(e, msg);
            }
        }
        self.blocks.regrant(self.peers, self.due, p);
        Verdict::Accept
    }

    /// Ends the unfinished message of a sender that has abandoned it.
    pub(crate) fn abort_reassembly(&mut self, p: PeerIdx) {
        let Some(partial) = self.reassemblies.take(&mut self.peers[p]) else { return };
        match partial.to {
            ReassemblyDst::Recv { recv, .. } => {
                self.posted[recv].payload.active -= 1;
                self.fail_placing(recv, Error::ConnReset);
            }
            ReassemblyDst::Store { msg } => {
                let m = &mut self.unexpected[msg].payload;
                let recv = m.recv;
                if m.claimed && recv == RecvIdx::NONE && !m.discard {
                    // The application has claimed the message: receiving it returns the error.
                    (m.dead, m.complete) = (true, true);
                    return;
                }
                self.eps.unmatch(self.unexpected, msg);
                self.free_unexpected(msg);
                if recv != RecvIdx::NONE {
                    self.posted[recv].payload.active -= 1;
                    self.fail_placing(recv, Error::ConnReset);
                }
            }
            ReassemblyDst::Nowhere => {}
        }
    }

    /// Checks the endpoint and the credit of a message, and charges the credit.
    #[inline]
    fn admit(
        &mut self,
        p: PeerIdx,
        (dst_ep, rx_ctx): (u16, u8),
        head: &MsgHead,
        cost: u32,
    ) -> Result<EpIdx, NackReason> {
        let e = self.eps.slot(dst_ep);
        let kind = if head.tagged { Caps::TAGGED } else { Caps::MSG };
        let open = self.eps.get(e).is_some_and(|ep| {
            ep.enabled && ep.caps.contains(Caps::RECV | kind) && ep.is_named(rx_ctx)
        });
        *self.refused_units = cost;
        if !open {
            self.counters.rx_no_endpoint += 1;
            return Err(NackReason::NoEndpoint);
        }
        if !self.may_reach(p, e) {
            return Err(NackReason::NoEndpoint);
        }
        let peer = &mut self.peers[p];
        if peer.outstanding() < cost {
            return Err(NackReason::Overdrawn);
        }
        peer.consumed = peer.consumed.wrapping_add(cost);
        Ok(e)
    }

    /// Writes the completion that announces an unexpected message (`FI_BUFFERED_RECV`), if the
    /// endpoint requests it.
    pub(crate) fn announce(&mut self, e: EpIdx, msg: UnexpectedIdx) {
        if !self.eps[e].buffered {
            return self.coll.note_arrived(self.eps, self.cqs, self.unexpected, (e, msg));
        }
        let m = &self.unexpected[msg].payload;
        let (life, src_ep) = ((m.peer, m.inc), m.src_ep);
        let src = self.source_of(e, life, src_ep).unwrap_or(FI_ADDR_UNSPEC);
        let (tag, m) = (self.unexpected[msg].tag, &self.unexpected[msg].payload);
        let (buf, piece) = self.blocks.pool.first_piece(&m.chain);
        let mut flags = CqFlags::RECV | CqFlags::BUFFERED_RECV;
        flags |= if m.tagged { CqFlags::TAGGED } else { CqFlags::MSG };
        if (piece as u64) < m.msg_len {
            flags |= CqFlags::MORE;
        }
        if m.imm.is_some() {
            flags |= CqFlags::REMOTE_CQ_DATA;
        }
        let handle = u64::from(self.unexpected.generation(msg)) << 32 | u64::from(msg.get());
        let data = m.imm.unwrap_or(0);
        let cqe = Cqe { op_context: handle, flags, len: m.msg_len, buf, data, tag, src };
        let cq = self.eps[e].rx_cq;
        self.eps.make_room(self.cqs, cq);
        if self.eps[e].cq_blocked || !self.cqs[cq].cq.try_push(cqe) {
            self.eps[e].set_cq_blocked(true);
            self.mark_starved(cq);
            return;
        }
        let ep = &mut self.eps[e];
        ep.claimed.push((handle, msg));
        self.eps.unmatch(self.unexpected, msg);
        self.unexpected[msg].payload.claimed = true;
    }

    /// Adds an unexpected message, and returns its index.
    fn add_unexpected(
        &mut self,
        e: EpIdx,
        head: &MsgHead,
        src_op: u32,
        src_gen: u32,
    ) -> UnexpectedIdx {
        let cost = if src_op == NONE { units(head.len) } else { 1 };
        let unexpected = UnexpectedMsg {
            peer: head.peer,
            inc: head.inc,
            src_ep: head.src_ep,
            ep: e,
            tagged: head.tagged,
            imm: head.imm,
            msg_len: head.len,
            src_op,
            src_gen,
            units: cost,
            chain: Chain::default(),
            complete: false,
            claimed: false,
            recv: RecvIdx::NONE,
            base: 0,
            dead: false,
            discard: false,
        };
        let at = self.eps.matching_of(e);
        if !planted(Bug::StaleRxReservation) {
            self.eps[at].stop_reserving(head.kind());
        }
        let src = self.peers[head.peer].src(head.peer, head.src_ep);
        let matcher = self.eps[at].matcher_of(head.kind());
        let added = matcher.add_unexpected(self.unexpected, src, head.tag, unexpected);
        self.counters.msgs_unexpected += 1;
        self.peers[head.peer].unexpected += 1;
        added.unwrap_or_else(|_| unreachable!("credit covers the record"))
    }

    /// Frees the record and blocks of a message that is out of matching.
    pub(super) fn free_unexpected(&mut self, msg: UnexpectedIdx) {
        let mut m = self.unexpected.free(msg).payload;
        self.blocks.pool.release(&mut m.chain);
        self.peers[m.peer].unexpected -= 1;
        self.blocks.unpromised += m.units as usize;
        self.blocks.serve_waiters(self.peers, self.due);
    }

    /// Source address of a sender in the address vector of endpoint `e`; `None` if it is not in it.
    pub(super) fn source_of(
        &mut self,
        e: EpIdx,
        (p, inc): (PeerIdx, u64),
        src_ep: u16,
    ) -> Option<FiAddr> {
        let ep = &self.eps[e];
        if !ep.caps.intersects(Caps::SOURCE | Caps::SOURCE_ERR) {
            return None;
        }
        let peer = &mut self.peers[p];
        if inc != peer.inc {
            return self.avs[ep.av].av.reverse(p, inc, src_ep);
        }
        peer.source.of((ep.av, self.avs), (p, inc), src_ep)
    }

    /// Matches a message to a receive. The receive leaves matching unless it takes further
    /// messages.
    #[inline]
    fn target(&mut self, e: EpIdx, head: &MsgHead) -> Target {
        self.target_of(e, head, self.peers[head.peer].src(head.peer, head.src_ep))
    }

    /// [`target`](Self::target) of a message from `src`.
    #[inline]
    pub(super) fn target_of(&mut self, e: EpIdx, head: &MsgHead, src: Src) -> Target {
        let ep = &mut self.eps[e];
        if ep.cq_blocked {
            return Target::Store;
        }
        if ep.srx != EpIdx::NONE {
            let recv = self.target_shared(e, head, src);
            return recv.map_or(Target::Store, |recv| Target::Recv { recv, base: 0 });
        }
        let matcher = &mut ep.matcher[head.kind() as usize];
        let Some(recv) = matcher
            .take_posted(&mut self.posted.pool, src, head.tag, |wr| !wr.is(RecvFlags::MULTI))
        else {
            return Target::Store;
        };
        if !self.posted[recv].payload.is(RecvFlags::MULTI) {
            return Target::Recv { recv, base: 0 };
        }
        self.target_multi(e, recv, head)
    }

    /// Takes the next bytes of a multi-receive, if the completion queue has room for the entry.
    fn target_multi(&mut self, e: EpIdx, recv: RecvIdx, head: &MsgHead) -> Target {
        let len = self.posted.room(recv, 0);
        self.eps.make_room(self.cqs, self.eps[e].rx_cq);
        let cq = self.eps[e].rx_cq;
        if !self.cqs[cq].cq.reserve() {
            self.eps[e].set_cq_blocked(true);
            self.mark_starved(cq);
            return Target::Store;
        }
        let ep = &mut self.eps[e];
        let min = ep.min_multi_recv;
        let wr = &mut self.posted[recv].payload;
        let base = wr.used;
        let room = len - base;
        wr.used = base + head.len.min(room);
        if len - wr.used < min.max(1) {
            wr.is |= RecvFlags::CLOSED;
            ep.matcher[head.kind() as usize].unlink_posted(&mut self.posted.pool, recv);
        }
        Target::Recv { recv, base }
    }

    /// Writes the completion of a message of which `n` bytes were placed at `base`.
    #[inline]
    pub(super) fn complete_recv(&mut self, recv: RecvIdx, head: &MsgHead, base: u64, n: u64) {
        let life = (head.peer, head.inc);
        let source = self.source_of(self.posted[recv].payload.ep, life, head.src_ep);
        self.complete_recv_of(recv, head, (base, n), source, |node| {
            let peer = &node.peers[head.peer];
            let (station, incarnation) = (peer.station(), head.inc);
            (EpAddr { station, ep: head.src_ep, incarnation }, peer.tenant)
        });
    }

    /// [`complete_recv`](Self::complete_recv) of a message from `source`, with the sender's address
    /// and tenant in `from`.
    #[inline]
    pub(super) fn complete_recv_of(
        &mut self,
        recv: RecvIdx,
        head: &MsgHead,
        (base, n): (u64, u64),
        source: Option<u64>,
        from: impl FnOnce(&Self) -> (EpAddr, Tenant),
    ) {
        let wr = &self.posted[recv].payload;
        let (e, multi, wanted) = (wr.ep, wr.is(RecvFlags::MULTI), wr.is(RecvFlags::SIGNALED));
        let mut flags = CqFlags::RECV;
        flags |= if head.tagged { CqFlags::TAGGED } else { CqFlags::MSG };
        if head.imm.is_some() {
            flags |= CqFlags::REMOTE_CQ_DATA;
        }
        let buf = if multi { self.posted.buf(recv).addr_at(base as usize) as u64 } else { 0 };
        let context = wr.context;
        let mut cqe = Cqe {
            op_context: context,
            flags,
            len: n,
            buf,
            data: head.imm.unwrap_or(0),
            tag: head.tag,
            src: source.unwrap_or(FI_ADDR_UNSPEC),
        };
        let last = multi && wr.is(RecvFlags::CLOSED) && wr.active == 0;
        let ep = &mut self.eps[e];
        let err = if n < head.len && !planted(Bug::TruncationIsSuccess) {
            Some(Error::Trunc)
        } else if source.is_none() && ep.caps.contains(Caps::SOURCE_ERR) {
            Some(Error::AddrNotAvail)
        } else {
            None
        };
        ep.counters.received += 1;
        ep.counters.received_bytes += n;
        let (cntr, cq) = (ep.rx_cntr, ep.rx_cq);
        let failed = err.map(|err| (err, from(self)));
        let cq = &mut self.cqs[cq].cq;
        if let Some((err, (addr, tenant))) = failed {
            self.eps[e].counters.errors += 1;
            let err_data = (err == Error::AddrNotAvail).then_some(addr);
            if err_data.is_some() && tenant != Tenant::NONE {
                cqe.src = self.avs[self.eps[e].av].av.key_user_id(tenant.handle());
            }
            let (olen, prov_errno) = (head.len - n, ProvErrno::None);
            cq.push_err(CqErr { cqe, olen, err, prov_errno, err_data });
            self.cntrs.count_failed(cntr);
        } else {
            // The last message reports the buffer's release, unless its completion is suppressed.
            if last && wanted {
                cqe.flags |= CqFlags::MULTI_RECV;
            }
            if wanted {
                cq.push(cqe);
            } else {
                cq.unreserve();
            }
            self.cntrs.count(cntr, Done::one(n));
        }
        if !multi {
            self.eps.free_recv(self.posted, recv);
        } else if last {
            self.release_multi(recv, wanted && err.is_none());
        }
    }

    /// Ends a multi-receive. `signaled`: its last completion has reported the release of the
    /// buffer.
    fn release_multi(&mut self, recv: RecvIdx, signaled: bool) {
        let (tag, wr) = (self.posted[recv].tag, &self.posted[recv].payload);
        let flags = wr.cq_flags() | CqFlags::MULTI_RECV;
        let cqe = Cqe { op_context: wr.context, flags, tag, src: FI_ADDR_UNSPEC, ..Cqe::default() };
        let cq = &mut self.cqs[self.eps[wr.ep].rx_cq].cq;
        if signaled {
            cq.unreserve();
        } else {
            cq.push(cqe);
        }
        self.eps.free_recv(self.posted, recv);
    }

    /// Fails the receive `recv` of a message whose rest will not arrive.
    pub(super) fn fail_placing(&mut self, recv: RecvIdx, err: Error) {
        let (tag, wr) = (self.posted[recv].tag, &self.posted[recv].payload);
        if !wr.is(RecvFlags::MULTI) {
            self.fail_recv(recv, err);
            return;
        }
        let (e, last) = (wr.ep, wr.is(RecvFlags::CLOSED) && wr.active == 0);
        let flags = wr.cq_flags();
        let cqe = Cqe { op_context: wr.context, flags, tag, src: FI_ADDR_UNSPEC, ..Cqe::default() };
        let ep = &mut self.eps[e];
        ep.counters.errors += 1;
        let (cntr, cq) = (ep.rx_cntr, ep.rx_cq);
        let (olen, prov_errno) = (0, ProvErrno::None);
        self.cqs[cq].cq.push_err(CqErr { cqe, olen, err, prov_errno, err_data: None });
        self.cntrs.count_failed(cntr);
        if last {
            self.release_multi(recv, false);
        }
    }

    /// Ends a receive that is out of matching, with an error entry.
    pub(super) fn fail_recv(&mut self, recv: RecvIdx, err: Error) {
        self.complete_with_error(recv, err);
        self.eps.free_recv(self.posted, recv);
    }

    /// Writes the error entry of a receive.
    pub(super) fn complete_with_error(&mut self, recv: RecvIdx, err: Error) {
        let tag = self.posted[recv].tag;
        let wr = &self.posted[recv].payload;
        let mut flags = wr.cq_flags();
        if wr.is(RecvFlags::MULTI) {
            flags |= CqFlags::MULTI_RECV;
        }
        let cqe = Cqe { op_context: wr.context, flags, tag, src: FI_ADDR_UNSPEC, ..Cqe::default() };
        let e = wr.ep;
        self.error_to(e, cqe, err);
    }

    /// Writes an error entry to the receive queue of endpoint `e` in a reserved place.
    pub(super) fn error_to(&mut self, e: EpIdx, cqe: Cqe, err: Error) {
        let ep = &mut self.eps[e];
        ep.counters.errors += 1;
        let (cntr, cq) = (ep.rx_cntr, ep.rx_cq);
        let prov_errno = ProvErrno::None;
        self.cqs[cq].cq.push_err(CqErr { cqe, olen: 0, err, prov_errno, err_data: None });
        self.cntrs.count_failed(cntr);
    }

    /// Updates whether something waits for room in any completion queue.
    pub(super) fn note_starved(&mut self) {
        self.due.todo.set(Todo::ROOM, self.cqs.iter().any(|(_, table)| table.cq_blocked));
    }

    /// A completion queue that has room and for which something waits.
    #[inline]
    pub(super) fn starved_with_room(&self) -> Option<CqIdx> {
        if !self.due.todo.contains(Todo::ROOM) {
            return None;
        }
        let mut all = self.cqs.iter();
        all.find(|(_, table)| table.cq_blocked && table.cq.has_room()).map(|(cq, _)| cq)
    }
}

fn msgm_head(peer: PeerIdx, inc: u64, op: &MsgMOp) -> MsgHead {
    let (src_ep, tagged, tag, imm) = (op.src_ep, op.tagged, op.tag, op.imm);
    MsgHead { peer, inc, src_ep, tagged, tag, imm, len: op.msg_len }
}
