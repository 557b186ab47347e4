//! Progress of schedules: ended messages are reported to them, and their next actions are posted.

use barewire_driver::frame::TxFrame;
use barewire_driver::mem::IoBuf;

use super::control::{
    ABORT, ASK, ASK_NS, DISAGREE, KIND_CONTROL, KIND_DATA, KIND_SHIFT, LEAVE, LEFT, LISTENING,
    data_tag, parts_of, reason,
};
use super::{Caller, Coll, GroupState, JOIN, JOIN_WORDS, JoinEvent, LAYOUT_WORD, MODEL_WORD, Op};
use crate::cntr::Done;
use crate::error::Error;
use crate::flags::{CqFlags, OpFlags};
use crate::idx::{CallIdx, EpIdx, GroupIdx, PeerIdx, RecvIdx, UnexpectedIdx};
use crate::node::ep::Ep;
use crate::node::eps::SendRoom;
use crate::node::{
    Avs, Collectives, Control, Cqs, EpId, Eps, FrameSink, GroupId, MsgKind, Node, Objects, Peers,
    RecvReq, SendReq, Sessions, UnexpectedMsg,
};
use crate::proto::coll::plan::{Layout, Model};
use crate::proto::coll::run::Action;
use crate::proto::coll::{Area, Comm, Local, Place, Slice};
use crate::proto::matching::UnexpectedPool;
use crate::slab::Handle;
use crate::table::Table;
use crate::types::{CqErr, Cqe, EpAddr, FI_ADDR_UNSPEC, FiAddr, Instant, Tenant};

/// Context of a receive for control messages: this bit and the slot of the collective side.
pub(super) const CONTROL: u64 = 1 << 63;

/// Context of an ASK: this bit in addition, and [`ask_context`](super::fail).
pub(super) const ASKED: u64 = 1 << 62;

/// Pause before a post that found no room is retried, nanoseconds.
const RETRY_NS: u64 = 20_000;

/// Number of memory blocks kept for the next calls.
const SPARE: usize = 4;
const SPARE_LEN_MAX: usize = 1 << 20;

fn context_of(op: Handle<CallIdx>, round: u32) -> u64 {
    u64::from(op.idx().get() & 0xf_ffff)
        | u64::from(op.generation() & 0xf_ffff) << 20
        | u64::from(round & 0x7f_ffff) << 40
}

/// The stored messages, which have no receive yet.
pub(super) struct StoredMsgs<'a> {
    pub(super) eps: &'a Eps,
    /// The senders of the messages.
    pub(super) peers: &'a Peers,
    pub(super) unexpected: &'a UnexpectedPool<UnexpectedMsg>,
}

impl StoredMsgs<'_> {
    /// Whether no earlier message of this sender with this tag is stored. Sequence numbers of calls
    /// wrap, and the later message belongs to a later call.
    fn is_first(&self, msg: UnexpectedIdx) -> bool {
        let m = &self.unexpected[msg];
        let p = m.payload.peer;
        let from = self.peers[p].src(p, m.payload.src_ep);
        let matcher = &self.eps[m.payload.ep].matcher[MsgKind::Tagged as usize];
        matcher.match_unexpected(self.unexpected, m.tag, 0, from) == Some(msg)
    }
}

impl Coll {
    /// Whether a call by messages may make progress.
    #[inline(always)]
    pub(crate) fn has_work(&self) -> bool {
        !self.work.is_empty()
    }

    /// Number of receives that stay posted while there are collective sides.
    pub(crate) fn listening(&self) -> usize {
        self.sides.len() * LISTENING
    }

    fn op_of(&self, context: u64) -> Option<CallIdx> {
        let o = CallIdx::of((context & 0xf_ffff) as u32);
        let op = self.ops.get(o).is_some();
        let same = self.ops.generation(o) & 0xf_ffff == (context >> 20) as u32 & 0xf_ffff;
        (op && same).then_some(o)
    }

    /// Queues a call for progress in the next turn.
    pub(super) fn queue_op(&mut self, o: CallIdx) {
        let op = &mut self.ops[o];
        if !std::mem::replace(&mut op.queued, true) {
            self.work.push_back(o);
        }
    }

    /// Keeps the memory of an ended call for the next one.
    pub(super) fn give_back(&mut self, op: Op) {
        if let Some(scratch) = op.scratch
            && self.scratch.len() < SPARE
            && scratch.len() <= SPARE_LEN_MAX
        {
            self.scratch.push(scratch);
        }
        if self.spare.len() < SPARE {
            self.spare.push((op.run, op.waits));
        }
    }

    fn joining(&self, gid: u32) -> bool {
        let joining = |g: &super::Group| matches!(g.state, GroupState::Joining(_)) && g.gid == gid;
        self.groups.iter().any(|(_, g)| joining(g))
    }

    /// Whether messages were stored, or sessions have ended, since the last turn.
    fn has_arrived(&self) -> bool {
        !self.arrived.is_empty() || !self.lost.is_empty() || !self.next_session.is_empty()
    }

    /// Whether control messages wait to be sent, or members that left to be forgotten.
    fn owes_messages(&self) -> bool {
        !self.owed.is_empty() || !self.left_members.is_empty()
    }

    /// Whether [`coll_progress`](Node::coll_progress) would find work.
    #[inline]
    pub(crate) fn is_due(&self, cqs: &Cqs) -> bool {
        let Coll { work, lost, arrived, owed, .. } = self;
        // One branch for all queues: usually all are empty.
        let waiting = work.len() | lost.len() | arrived.len() | owed.len();
        self.cq.is_some_and(|cq| cqs[cq.0.idx()].cq.ready() | waiting != 0)
    }

    /// Whether there is work, timeouts included.
    #[inline]
    pub(crate) fn wants(&self, now: Instant, cqs: &Cqs) -> bool {
        let Coll { deadline, asks_at, .. } = *self;
        let is_past = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        let by_time = self.stalled || is_past(deadline) || is_past(asks_at);
        by_time || self.is_due(cqs) || self.boards_are_due() || self.boards_are_late(now)
    }

    /// Time at which progress is due even if nothing arrives.
    pub(crate) fn next_deadline(&self, now: Instant, cqs: &Cqs) -> Option<Instant> {
        let busy = self.stalled || !self.owed.is_empty();
        // Messages that the last transmit delivered to this node are processed by the next one.
        let retry = if busy { Some(now + RETRY_NS) } else { self.is_due(cqs).then_some(now) };
        let Coll { deadline, asks_at, .. } = *self;
        [deadline, asks_at, retry, self.boards_deadline(now)].into_iter().flatten().min()
    }

    /// Drops messages stored under the number of a beginning call that do not belong to it.
    pub(super) fn drop_mismatched_early(&mut self, stored: &StoredMsgs<'_>, o: CallIdx) {
        let op = &self.ops[o];
        let group = &self.groups[op.group];
        let matcher = &stored.eps[group.side.0.idx()].matcher[MsgKind::Tagged as usize];
        if matcher.unexpected_len() == 0 || matches!(group.state, GroupState::Joining(_)) {
            return;
        }
        let (gid, seq, mark) = (group.gid, op.seq, op.mark);
        let stranger = matcher.find_unexpected(stored.unexpected, |m| {
            parts_of(m.tag) == (gid, seq, KIND_DATA) && m.payload.imm != Some(mark)
        });
        if let Some(msg) = stranger.filter(|&msg| stored.is_first(msg)) {
            let generation = stored.unexpected.generation(msg);
            self.arrived.push((msg, generation));
        }
    }

    /// Notes that a message was stored for a collective side: it is processed in the next turn.
    #[cold]
    pub(in crate::node) fn note_arrived(
        &mut self,
        eps: &Eps,
        cqs: &Cqs,
        unexpected: &UnexpectedPool<UnexpectedMsg>,
        (e, msg): (EpIdx, UnexpectedIdx),
    ) {
        let Some(cq) = self.cq.filter(|_| self.is_side(eps, e)) else { return };
        let generation = unexpected.generation(msg);
        self.arrived.push((msg, generation));
        let from = unexpected[msg].payload.peer;
        if self.lost.iter().any(|&(p, _)| p == from) {
            self.next_session.push((from, msg, generation));
        }
        let last = self.taken + cqs[cq.0.idx()].cq.ready() as u64;
        if last > self.looked_at && parts_of(unexpected[msg].tag).0 & JOIN != 0 {
            self.behind.push((msg, generation, last));
        }
    }

    /// Whether a stored message arrived behind the last processed queue entry.
    pub(super) fn is_behind(
        &self,
        unexpected: &UnexpectedPool<UnexpectedMsg>,
        msg: UnexpectedIdx,
    ) -> bool {
        let behind = (msg, unexpected.generation(msg));
        self.behind.iter().any(|&(m, g, last)| (m, g) == behind && last >= self.looked_at)
    }

    /// Notes that a receive of a call has ended.
    fn end_wait(&mut self, avs: &Avs, peers: &mut Peers, o: CallIdx, src: FiAddr) {
        let Some(av) = self.av else { return };
        let Some(entry) = avs[av.0.idx()].av.lookup(src) else { return };
        let peer = entry.peer;
        let waits = &mut self.ops[o].waits;
        if let Some(at) = waits.iter().position(|&p| p == peer) {
            waits.swap_remove(at);
            peers[peer].coll_waits -= 1;
        }
    }
}

impl Node {
    /// Advances every call as far as possible.
    pub(crate) fn coll_progress(&mut self, now: Instant, out: &mut dyn FrameSink) {
        let Some(cq) = self.coll.cq else { return };
        self.coll.stalled = false;
        for side in std::mem::take(&mut self.coll.without_recv) {
            self.listen(side);
        }
        self.drive_boards(now);
        let tries = self.coll.work.len();
        for _ in 0..tries {
            let Some(o) = self.coll.work.pop_front() else { break };
            if let Some(op) = self.coll.ops.get_mut(o) {
                op.queued = false;
                self.drive_op(now, o, out);
            }
        }
        let mut entries = [Cqe::default(); 32];
        loop {
            if self.coll.has_arrived() {
                let mut collectives = self.collectives();
                collectives.process_arrived(now);
                collectives.process_lost(now);
            }
            match self.cq_read(cq, &mut entries) {
                Ok(n) => {
                    self.coll.taken += n as u64;
                    for cqe in &entries[..n] {
                        self.coll.looked_at += 1;
                        self.on_side_done(now, cqe, out);
                    }
                }
                Err(Error::Avail) => {
                    if let Ok(err) = self.receiving().cq_readerr(cq) {
                        self.coll.taken += 1;
                        self.coll.looked_at += 1;
                        let context = err.cqe.op_context;
                        if is_control_recv(context) && !self.port.gone {
                            self.listen(side_of(&self.eps, context));
                        }
                        self.collectives().on_side_failed(now, &err);
                    }
                }
                Err(_) => break,
            }
        }
        self.coll.behind.clear();
        // Arrived messages first: the join may complete by them.
        if self.coll.deadline.is_some_and(|at| at <= now) {
            self.collectives().end_late_joins(now);
        }
        if self.coll.asks_at.is_some_and(|at| at <= now) {
            self.collectives().ask_awaited(now);
        }
        if self.coll.owes_messages() {
            self.collectives().send_owed(now);
        }
    }

    /// Processes the completion of a message between collective sides.
    fn on_side_done(&mut self, now: Instant, cqe: &Cqe, out: &mut dyn FrameSink) {
        if cqe.op_context & CONTROL != 0 {
            if !is_control_recv(cqe.op_context) {
                self.coll.on_ask_ended(cqe.op_context);
            } else {
                let side = side_of(&self.eps, cqe.op_context);
                self.listen(side);
                self.collectives().on_control_message(now, side, cqe);
            }
            return;
        }
        let Some(o) = self.coll.op_of(cqe.op_context) else { return };
        let op = &mut self.coll.ops[o];
        if cqe.flags.contains(CqFlags::SEND) {
            op.run.sent((cqe.op_context >> 40) as u32);
            op.sends -= 1;
        } else {
            let (mark, g) = (op.mark, op.group);
            op.run.received();
            self.coll.end_wait(&self.avs, &mut self.peers, o, cqe.src);
            let marked = cqe.flags.contains(CqFlags::REMOTE_CQ_DATA) && cqe.data == mark;
            if !marked {
                return self.collectives().abort_group(now, g, DISAGREE);
            }
        }
        self.drive_op(now, o, out);
    }

    /// Executes the actions of a call until it has to wait.
    fn drive_op(&mut self, now: Instant, o: CallIdx, out: &mut dyn FrameSink) {
        if self.coll.ops[o].words.is_some() {
            self.coll.offer_board(&self.peers, self.port.station, o, out);
        }
        loop {
            let op = &mut self.coll.ops[o];
            let went = match op.run.action() {
                Action::Wait => return,
                Action::Done if op.caller.is_some() => return self.objects().end_call(o),
                Action::Done => return self.collectives().end_join(now, o),
                Action::Local(local) => {
                    compute(op, local);
                    op.run.done();
                    continue;
                }
                Action::Recv(comm) => self.post_side_recv(now, o, &comm),
                Action::Send(comm, round) => self.post_side_send(now, o, (&comm, round), out),
            };
            match went {
                PostOutcome::On => {}
                PostOutcome::NoRoom => {
                    self.coll.stalled = true;
                    return self.coll.queue_op(o);
                }
                PostOutcome::Ended => return,
            }
        }
    }

    fn post_side_recv(&mut self, now: Instant, o: CallIdx, comm: &Comm) -> PostOutcome {
        let handle = self.coll.ops.handle(o);
        let op = &self.coll.ops[o];
        let (g, round) = (op.group, op.run.number());
        let group = &self.coll.groups[g];
        let member = group.members[comm.rank as usize];
        let (side, tag) = (group.side, data_tag(group.gid, op.seq, comm.step));
        if let Some(err) = member.lost {
            // An early message of that member may be stored.
            let from = self.peers[member.peer].src(member.peer, member.ep);
            let matcher = &self.eps[side.0.idx()].matcher[MsgKind::Tagged as usize];
            if matcher.match_unexpected(&self.unexpected, tag, 0, from).is_none() {
                self.collectives().abort_group(now, g, err);
                return PostOutcome::Ended;
            }
        }
        let req = RecvReq {
            kind: MsgKind::Tagged,
            buf: memory(op, &comm.slice),
            src: member.side,
            tag,
            ignore: 0,
            context: context_of(handle, round),
            flags: OpFlags::empty(),
        };
        let p = member.peer;
        self.turn.tick(now);
        self.peers[p].begin_to_wait(now);
        match self.post_recv(now, side, req) {
            Ok(()) => {}
            Err(Error::Again) => return PostOutcome::NoRoom,
            Err(err) => {
                self.collectives().abort_group(now, g, err);
                return PostOutcome::Ended;
            }
        }
        self.peers[p].coll_waits += 1;
        self.coll.asks_at.get_or_insert(now + ASK_NS);
        let op = &mut self.coll.ops[o];
        op.waits.push(p);
        op.run.done();
        // The peer's silence counts, even if no message was ever exchanged with it.
        self.control().probe_silent(now, p);
        PostOutcome::On
    }

    fn post_side_send(
        &mut self,
        now: Instant,
        o: CallIdx,
        (comm, round): (&Comm, u32),
        out: &mut dyn FrameSink,
    ) -> PostOutcome {
        let handle = self.coll.ops.handle(o);
        let op = &self.coll.ops[o];
        let g = op.group;
        let group = &self.coll.groups[g];
        let member = group.members[comm.rank as usize];
        if let Some(err) = member.lost {
            self.collectives().abort_group(now, g, err);
            return PostOutcome::Ended;
        }
        let inject = comm.slice.len() <= Self::INJECT_SIZE as u64;
        let mut flags = OpFlags::REMOTE_CQ_DATA;
        flags.set(OpFlags::INJECT, inject);
        let (side, tag) = (group.side, data_tag(group.gid, op.seq, comm.step));
        let mut req = SendReq {
            kind: MsgKind::Tagged,
            buf: memory(op, &comm.slice),
            dest: member.side,
            tag,
            data: op.mark,
            context: context_of(handle, round),
            flags,
            no_completion: inject,
        };
        let sink = &mut |frame: &TxFrame<'_>| out.send(frame);
        let sent = self.try_send(side, &mut req, sink, || now);
        let posted = if sent { Ok(()) } else { self.post_send(now, side, req) };
        match posted {
            Ok(()) => {}
            Err(Error::Again) => return PostOutcome::NoRoom,
            Err(err) => {
                self.collectives().abort_group(now, g, err);
                return PostOutcome::Ended;
            }
        }
        // A post to a peer that is known to have another incarnation fails at once.
        let Some(op) = self.coll.ops.get_mut(o) else { return PostOutcome::Ended };
        op.run.done();
        if inject {
            op.run.sent(round);
        } else {
            op.sends += 1;
        }
        PostOutcome::On
    }

    /// Posts a receive for control messages.
    pub(super) fn listen(&mut self, side: EpId) {
        let req = RecvReq {
            kind: MsgKind::Tagged,
            buf: IoBuf::EMPTY,
            src: FI_ADDR_UNSPEC,
            tag: KIND_CONTROL << KIND_SHIFT,
            ignore: !(15 << KIND_SHIFT),
            context: CONTROL | u64::from(side.0.idx().get()),
            flags: OpFlags::empty(),
        };
        if self.post_recv(self.turn.polled_at, side, req) == Err(Error::Again) {
            // The program's receives fill the table.
            self.coll.without_recv.push(side);
            self.coll.stalled = true;
        }
    }
}

impl Collectives<'_> {
    /// Processes the error entry of a message between collective sides.
    fn on_side_failed(&mut self, now: Instant, err: &CqErr) {
        if err.cqe.op_context & CONTROL != 0 {
            if err.cqe.op_context & ASKED != 0 {
                return self.on_ask_failed(now, err);
            }
            self.on_unknown_control(err);
            return;
        }
        let Some(o) = self.sessions.coll.op_of(err.cqe.op_context) else { return };
        let g = self.sessions.coll.ops[o].group;
        let reason = match err.err {
            Error::Trunc => DISAGREE,
            // An operation that this node cancelled itself says nothing about the member.
            other => other,
        };
        let op = &mut self.sessions.coll.ops[o];
        if err.cqe.flags.contains(CqFlags::SEND) {
            op.sends = op.sends.saturating_sub(1);
        }
        self.abort_group(now, g, reason);
    }

    /// Processes a control message of a sender that is in no group of this node (yet).
    fn on_unknown_control(&mut self, err: &CqErr) {
        let Some(from) = err.err_data else { return };
        let (gid, _, _) = parts_of(err.cqe.tag);
        if let Some(p) =
            self.sessions.by_station.get(self.sessions.peers, from.station, Tenant::NONE)
        {
            self.discard_joins((p, Some(from.ep)), Some(gid));
        }
        let side = side_of(self.sessions.eps, err.cqe.op_context);
        self.on_unjoined_group_end(side, from, &err.cqe);
    }

    /// Ends the exchange of a join.
    fn end_join(&mut self, now: Instant, o: CallIdx) {
        let op = self.sessions.objects().free_op(o);
        self.apply_join(now, op.group, &op);
        self.sessions.coll.give_back(op);
    }

    /// Joins a group whose members have exchanged their parameters.
    fn apply_join(&mut self, now: Instant, g: GroupIdx, op: &Op) {
        let word = |i: usize| {
            let mut bytes = [0; 8];
            op.out.read_at(8 * i, &mut bytes);
            u64::from_le_bytes(bytes)
        };
        let [name, most, least] = [0, 1, 2].map(word);
        // An id that the first member has not drawn.
        if most != !least || name as u32 == 0 || name >= JOIN.into() {
            return self.abort_group(now, g, DISAGREE);
        }
        let [most, least] = [0, 1].map(|i| word(LAYOUT_WORD + i));
        let layout = if most == !least { most } else { 0 };
        let id = GroupId(self.sessions.coll.groups.handle(g));
        let group = &mut self.sessions.coll.groups[g];
        group.gid = name as u32;
        group.seq = 0;
        group.layout = Layout::from_word(layout, group.members.len() as u32);
        let numbers = std::array::from_fn(|i| word(MODEL_WORD + i));
        group.model = Model::from_words(numbers, group.model.force);
        group.plans.clear();
        let slots: Vec<u64> = (JOIN_WORDS..op.out.len() / 8).map(word).collect();
        if let Err(err) = self.sessions.coll.agree_on_board(g, &slots) {
            return self.abort_group(now, g, err);
        }
        let group = &mut self.sessions.coll.groups[g];
        group.state = GroupState::Ready;
        let (ep, context) = (group.ep, group.context);
        let side = group.side;
        if let Some(err) = self.sessions.coll.ended_group_error(side, name as u32) {
            self.sessions.coll.groups[g].state = GroupState::Ended(err);
        }
        self.sessions.coll.events.push_back(JoinEvent { ep, group: id, context, result: Ok(()) });
        self.apply_early_leaves(now, g);
    }

    /// Processes a control message that a collective side has received.
    fn on_control_message(&mut self, now: Instant, side: EpId, cqe: &Cqe) {
        let (gid, _, _) = parts_of(cqe.tag);
        let Some(av) = self.sessions.coll.av else { return };
        let Some(entry) = self.sessions.avs[av.0.idx()].av.lookup(cqe.src) else { return };
        let from = self.sessions.peers.addr_of(entry);
        let named = |g: &super::Group| {
            let from = |m: &super::Member| (m.peer, m.ep) == (entry.peer, entry.ep);
            g.side == side && g.gid == gid && g.members.iter().any(from)
        };
        let found = self.sessions.coll.groups.iter().find(|(_, g)| named(g)).map(|(g, _)| g);
        match (found, cqe.tag & 0xfff) {
            (None, _) => {
                self.discard_joins((entry.peer, Some(entry.ep)), Some(gid));
                self.on_unjoined_group_end(side, from, cqe);
            }
            (Some(g), ASK) => {
                if let GroupState::Ended(err) = self.sessions.coll.groups[g].state {
                    self.answer_ask(now, (side, from), (gid, ABORT), err);
                }
            }
            (Some(g), LEAVE) => self.member_gone(now, g, (entry.peer, entry.ep), LEFT),
            (Some(g), ABORT) => {
                self.discard_joins((entry.peer, Some(entry.ep)), Some(gid));
                self.abort_group(now, g, reason(cqe.data));
            }
            _ => self.sessions.counters.rx_coll_unknown += 1,
        }
    }

    /// Handles an ABORT, LEAVE or ASK for a group that is not joined here.
    fn on_unjoined_group_end(&mut self, side: EpId, from: EpAddr, cqe: &Cqe) {
        let (gid, _, _) = parts_of(cqe.tag);
        match cqe.tag & 0xfff {
            ABORT => self.sessions.coll.record_ended_group(side, gid, reason(cqe.data)),
            LEAVE => self.sessions.coll.record_early_leave(side, gid, from),
            ASK => self.answer_unjoined(side, gid, from, cqe.data),
            _ => self.sessions.counters.rx_coll_unknown += 1,
        }
    }

    /// Checks the messages stored since the last turn: drops messages of unknown kinds, of ended
    /// groups, and of calls other than the one that their number names.
    fn process_arrived(&mut self, now: Instant) {
        while let Some((msg, generation)) = self.sessions.coll.arrived.pop() {
            if self.sessions.unexpected.get(msg).is_none()
                || self.sessions.unexpected.generation(msg) != generation
            {
                continue;
            }
            let m = &self.sessions.unexpected[msg];
            let (gid, seq, kind) = parts_of(m.tag);
            if m.payload.recv != RecvIdx::NONE || m.payload.claimed {
                continue;
            }
            if kind > KIND_CONTROL {
                self.sessions.counters.rx_coll_unknown += 1;
                self.sessions.receiving().discard_unexpected(
                    now,
                    msg,
                    crate::wire::EndStatus::Discarded,
                );
            } else if kind == KIND_DATA {
                let (e, imm) = (m.payload.ep, m.payload.imm);
                let is_joined = |g: &super::Group| g.gid == gid && g.side.0.idx() == e;
                if self.sessions.coll.ended.iter().any(|&(side, over, _)| (side, over) == (e, gid))
                    && !self.sessions.coll.groups.iter().any(|(_, g)| is_joined(g))
                {
                    self.sessions.receiving().discard_unexpected(
                        now,
                        msg,
                        crate::wire::EndStatus::Discarded,
                    );
                    continue;
                }
                let other = self.sessions.coll.ops.iter().find(|(_, op)| {
                    let g = &self.sessions.coll.groups[op.group];
                    g.side.0.idx() == e && g.gid == gid && op.seq == seq && imm != Some(op.mark)
                });
                let Sessions { eps, peers, unexpected, coll, .. } = &self.sessions;
                let stored = StoredMsgs { eps, peers, unexpected };
                let is_next = |_: &_| !coll.joining(gid) && stored.is_first(msg);
                let g = other.filter(is_next).map(|(_, op)| op.group);
                if let Some(g) = g {
                    self.abort_group(now, g, DISAGREE);
                }
            }
        }
    }
}

impl Control<'_> {
    /// Schedules what detects the silence of a peer: a PING, or a timer if an answer is due.
    pub(super) fn probe_silent(&mut self, now: Instant, p: PeerIdx) {
        if self.peers[p].state == super::super::peer::State::Idle && !self.port.gone {
            self.schedule(now, p);
        } else {
            self.arm_timer(now, p);
        }
    }
}

impl Objects<'_> {
    /// Ends a call by messages with success.
    fn end_call(&mut self, o: CallIdx) {
        let op = self.free_op(o);
        let (ep, caller) = (self.coll.groups[op.group].ep, op.caller);
        self.coll.give_back(op);
        if let Some(caller) = caller {
            self.complete_call(ep, caller);
        }
    }

    /// Frees the record of a call, or of the exchange of a join, that has succeeded.
    fn free_op(&mut self, o: CallIdx) -> Op {
        let op = self.coll.ops.free(o);
        self.coll.groups[op.group].ops -= 1;
        self.counters.colls_done += 1;
        op
    }

    /// Reports to the application that its call has succeeded.
    #[inline(always)]
    pub(super) fn complete_call(&mut self, ep: EpId, caller: Caller) {
        let mut room = SendRoom::of(self.eps, self.cqs, ep.0.idx());
        room.give_back();
        let cntr = room.complete(caller.context, CqFlags::COLLECTIVE, caller.wanted);
        self.cntrs.count(cntr, Done::CALL);
    }
}

/// Whether this is the context of a receive for control messages.
fn is_control_recv(context: u64) -> bool {
    context & (CONTROL | ASKED) == CONTROL
}

/// The collective side of a receive for control messages.
fn side_of(eps: &Table<Ep, (), EpIdx>, context: u64) -> EpId {
    EpId(eps.handle(EpIdx::of(context as u32)))
}

/// The result of a post.
enum PostOutcome {
    On,
    NoRoom,
    /// The call has ended.
    Ended,
}

/// The memory of a slice.
fn memory(op: &Op, slice: &Slice) -> IoBuf {
    let [first, (more, rest)] = slice.pieces;
    let mut buf = match first {
        (_, 0) => IoBuf::EMPTY,
        (at, len) => share(op, at, len),
    };
    if rest > 0 {
        let fits = buf.append(share(op, more, rest));
        assert!(fits, "areas are in one piece each");
    }
    buf
}

/// `len` bytes at a place of a call.
fn share(op: &Op, at: Place, len: u64) -> IoBuf {
    with_area(op, at.area, |io| io.share(at.off as usize, len as usize))
}

/// Calls `f` with the memory of an area.
fn with_area<R>(op: &Op, area: Area, f: impl FnOnce(&IoBuf) -> R) -> R {
    match (area, &op.scratch) {
        (Area::In, _) => f(&op.input),
        (Area::Out, _) => f(&op.out),
        (Area::Scratch, Some(scratch)) => f(&scratch.io()),
        (Area::Scratch, None) => f(&IoBuf::EMPTY),
    }
}

fn compute(op: &Op, local: Local) {
    match local {
        Local::Copy { from, to, len, count, from_step, to_step } => {
            with_area(op, from.area, |source| {
                with_area(op, to.area, |target| {
                    for i in 0..count as i64 {
                        let at = (from.off as i64 + i * from_step) as usize;
                        let to = (to.off as i64 + i * to_step) as usize;
                        source.copy_to(at, target, to, len as usize);
                    }
                });
            });
        }
        Local::Reduce { a, b, to, len } => {
            let Some((red, ty)) = op.reduce else { unreachable!("only reductions compute") };
            let count = len as usize / ty.size();
            let [a_off, b_off, to_off] = [a, b, to].map(|place| place.off as usize);
            let sum = with_area(op, a.area, |left| {
                with_area(op, b.area, |right| {
                    with_area(op, to.area, |sum| {
                        sum.combine(to_off, red, ty, count, (left, a_off), (right, b_off))
                    })
                })
            });
            assert!(sum.is_ok(), "a schedule stays inside its memory");
        }
    }
}
