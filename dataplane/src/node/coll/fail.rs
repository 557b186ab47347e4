//! The end of a group: members that die, leave, disagree or never join.
//!
//! A member that detects it ends the group's calls, each with one error entry, and notifies the
//! others, and each of these does the same once. In a group of up to [`FLOOD_ALL`] members every
//! member notifies every other; in a larger one, the members at distances of powers of two. So a
//! member is left waiting only if all members that would notify it die.

use super::control::{ABORT, ASK, ASK_NS, LEAVE, LEFT, control_tag};
use super::drive::{ASKED, CONTROL};
use super::{Caller, Coll, EarlyLeave, GroupId, GroupState, JOIN, JoinEvent, Member, Op, SIDE};
use crate::error::Error;
use crate::flags::{CqFlags, OpFlags};
use crate::idx::{CallIdx, EpIdx, GroupIdx, PeerIdx, PullIdx, RecvIdx, TxIdx, UnexpectedIdx};
use crate::node::{Collectives, EpId, MsgKind, Objects, Receives, Receiving, SendReq};
use crate::slab::NONE;
use crate::types::{CqErr, Cqe, EpAddr, FI_ADDR_UNSPEC, Instant, ProvErrno};
use crate::wire::EndStatus;

/// Maximum group size at which every member notifies every other.
const FLOOD_ALL: usize = 64;

/// Maximum answers that wait to leave for one peer. A peer that gets no answer asks again.
const ANSWERS_MAX: usize = 16;

/// Context of control messages whose completion is ignored: no call has this value.
const NO_CONTEXT: u64 = 0xf_ffff;

/// Maximum number of ended groups, and of members that left early, that are remembered.
const ENDED_MAX: usize = 256;

/// Mask of the generation of a group in the context of an ASK.
const GENERATIONS: u32 = (1 << 25) - 1;

/// Context of an ASK: a group, its generation and the rank of the asked member.
fn ask_context(g: GroupIdx, generation: u32, rank: u32) -> u64 {
    u64::from(rank) | u64::from(g.get()) << 20 | u64::from(generation & GENERATIONS) << 37
}

fn parts_of_ask(context: u64) -> (GroupIdx, u32, u32) {
    let (rank, g) = (context as u32 & 0xf_ffff, (context >> 20) as u32 & 0x1_ffff);
    (GroupIdx::of(g), (context >> 37) as u32 & GENERATIONS, rank)
}

impl Coll {
    pub(super) fn record_ended_group(&mut self, side: EpId, gid: u32, err: Error) {
        if gid & JOIN != 0 || self.ended_group_error(side, gid).is_some() {
            return;
        }
        if self.ended.len() == ENDED_MAX {
            self.ended.pop_front();
        }
        self.ended.push_back((side.0.idx(), gid, err));
    }

    /// Error that ended the group of this id for a side that is not in it, if it has ended.
    pub(super) fn ended_group_error(&self, side: EpId, gid: u32) -> Option<Error> {
        let side = side.0.idx();
        let mut over = self.ended.iter();
        over.find(|&&(of, name, _)| (of, name) == (side, gid)).map(|&(.., err)| err)
    }

    /// Notes that a member has left a group that is not joined here yet. Its messages have arrived,
    /// so the others may proceed without it.
    pub(super) fn record_early_leave(&mut self, side: EpId, gid: u32, from: EpAddr) {
        let (side, station) = (side.0.idx(), from.station);
        let early = EarlyLeave { side, gid, station, ep: from.ep };
        if gid & JOIN != 0 || self.early_leaves.contains(&early) {
            return;
        }
        if self.early_leaves.len() == ENDED_MAX {
            self.early_leaves.pop_front();
        }
        self.early_leaves.push_back(early);
    }

    /// Notes that an ASK has ended, so that the next one may be sent. Returns the group, if it
    /// still exists, and the asked member.
    pub(super) fn on_ask_ended(&mut self, context: u64) -> Option<(GroupIdx, (PeerIdx, u16))> {
        let (g, generation, rank) = parts_of_ask(context);
        let known = self.groups.generation(g) & GENERATIONS == generation;
        let group = self.groups.get_mut(g).filter(|_| known)?;
        let member = group.members.get_mut(rank as usize)?;
        member.is_asked = false;
        Some((g, (member.peer, member.ep)))
    }

    /// Notes that the session with `p` has ended: no more messages come from its members.
    pub(crate) fn peer_lost(&mut self, p: PeerIdx, err: Error) {
        if self.cq.is_some() {
            self.next_session.retain(|&(of, ..)| of != p);
            self.lost.push((p, err));
        }
    }
}

impl Collectives<'_> {
    /// Ends a group and every call of it.
    pub(super) fn abort_group(&mut self, now: Instant, g: GroupIdx, err: Error) {
        let Some(group) = self.sessions.coll.groups.get_mut(g) else { return };
        let joining = matches!(group.state, GroupState::Joining(_));
        if matches!(group.state, GroupState::Ended(_)) {
            return;
        }
        group.state = GroupState::Ended(err);
        group.checked.forget();
        let (gid, ep, context) = (group.gid, group.ep, group.context);
        self.notify_group(now, g, ABORT, err);
        let ops: Vec<CallIdx> =
            self.sessions.coll.ops.iter().filter(|(_, op)| op.group == g).map(|(o, _)| o).collect();
        for o in ops {
            self.fail_op(now, o, err);
        }
        self.sessions.objects().fail_board(g, err);
        self.discard_stored(now, g, gid);
        if joining {
            let group = GroupId(self.sessions.coll.groups.handle(g));
            self.sessions.coll.events.push_back(JoinEvent { ep, group, context, result: Err(err) });
        }
    }

    /// Ends a call with an error entry. Its memory is not accessed any more.
    fn fail_op(&mut self, now: Instant, o: CallIdx, err: Error) {
        self.revoke(now, o);
        let op = self.sessions.coll.ops.free(o);
        let group = &mut self.sessions.coll.groups[op.group];
        group.ops -= 1;
        let ep = group.ep;
        if let Some(caller) = op.caller {
            self.sessions.objects().fail_call(ep, caller, err);
        }
        self.sessions.coll.give_back(op);
    }

    /// Cancels everything posted for a call, so that its memory is not accessed any more.
    fn revoke(&mut self, now: Instant, o: CallIdx) {
        let op = &mut self.sessions.coll.ops[o];
        let waits = std::mem::take(&mut op.waits);
        let side = self.sessions.coll.groups[op.group].side.0.idx();
        let busy = !waits.is_empty() || op.sends > 0;
        for &p in &waits {
            self.sessions.peers[p].coll_waits -= 1;
        }
        if !busy {
            return;
        }
        let handle = self.sessions.coll.ops.handle(o);
        let ours = |context: u64| {
            context >> 63 == 0
                && context as u32 & 0xf_ffff == handle.idx().get() & 0xf_ffff
                && (context >> 20) as u32 & 0xf_ffff == handle.generation() & 0xf_ffff
        };
        if self.sessions.coll.ops[o].sends > 0 {
            let wrs =
                self.sessions.tx.wrs.iter().filter(|(_, wr)| wr.ep == side && ours(wr.context));
            let wrs: Vec<(TxIdx, PeerIdx)> = wrs.map(|(w, wr)| (w, wr.peer)).collect();
            for (w, p) in wrs {
                self.sessions.operations().abandon_wr(w);
                self.sessions.operations().cancel_wr(w);
                self.sessions.control().arm_timer(now, p);
            }
        }
        while let Some(recv) = self.sessions.eps[side].matcher[MsgKind::Tagged as usize]
            .find_posted(&self.sessions.posted.pool, |r| ours(r.payload.context))
        {
            self.sessions.eps[side].matcher[MsgKind::Tagged as usize]
                .unlink_posted(&mut self.sessions.posted.pool, recv);
            self.sessions.objects().fail_recv(recv, Error::Canceled);
        }
        self.sessions.receiving().revoke_placing(now, side, &waits, &ours);
    }

    /// Discards the stored messages of a group.
    fn discard_stored(&mut self, now: Instant, g: GroupIdx, gid: u32) {
        let side = self.sessions.coll.groups[g].side;
        self.sessions.coll.record_ended_group(side, gid, Error::Canceled);
        let side = side.0.idx();
        if gid & JOIN != 0 {
            // Others may be in their next join attempt already; see `discard_joins`.
            return;
        }
        if self.sessions.eps[side].matcher[MsgKind::Tagged as usize].unexpected_len() == 0 {
            return;
        }
        let unexpected: Vec<UnexpectedIdx> = (self.sessions.unexpected.iter())
            .filter(|(_, m)| m.payload.ep == side && (m.tag >> 32) as u32 == gid)
            .map(|(i, _)| i)
            .collect();
        for msg in unexpected {
            if self.sessions.unexpected.get(msg).is_some() {
                self.sessions.receiving().discard_unexpected(now, msg, EndStatus::Discarded);
            }
        }
    }

    /// Discards a member's messages of abandoned joins: all that arrived before its ABORT, behind
    /// which its next attempt follows. With `None` as the number: the messages of every member of a
    /// peer from ended sessions.
    pub(super) fn discard_joins(&mut self, (p, number): (PeerIdx, Option<u16>), gid: Option<u32>) {
        let now = self.sessions.turn.polled_at;
        if self.sessions.peers.get(p).is_none_or(|peer| peer.unexpected == 0) {
            return;
        }
        let unexpected: Vec<UnexpectedIdx> = (self.sessions.unexpected.iter())
            .filter(|&(i, m)| {
                let name = (m.tag >> 32) as u32;
                m.payload.peer == p
                    && number.is_none_or(|n| m.payload.src_ep == n)
                    && self.sessions.coll.is_side(self.sessions.eps, m.payload.ep)
                    && name & JOIN != 0
                    && match gid {
                        Some(gid) => {
                            gid == name
                                && !self.sessions.coll.is_behind(self.sessions.unexpected, i)
                        }
                        None => !self.sessions.coll.next_session.contains(&(
                            p,
                            i,
                            self.sessions.unexpected.generation(i),
                        )),
                    }
            })
            .map(|(i, _)| i)
            .collect();
        for msg in unexpected {
            if self.sessions.unexpected.get(msg).is_some() {
                self.sessions.receiving().discard_unexpected(now, msg, EndStatus::Discarded);
            }
        }
    }

    /// Applies the early leaves to a group that has just been joined.
    pub(super) fn apply_early_leaves(&mut self, now: Instant, g: GroupIdx) {
        if self.sessions.coll.early_leaves.is_empty() {
            return;
        }
        let group = &self.sessions.coll.groups[g];
        let (side, gid) = (group.side.0.idx(), group.gid);
        let left: Vec<(PeerIdx, u16)> = (group.members.iter())
            .filter(|m| {
                let (station, ep) = (self.sessions.peers[m.peer].station(), m.ep);
                self.sessions.coll.early_leaves.contains(&EarlyLeave { side, gid, station, ep })
            })
            .map(|m| (m.peer, m.ep))
            .collect();
        self.sessions.coll.early_leaves.retain(|early| (early.side, early.gid) != (side, gid));
        for member in left {
            self.member_gone(now, g, member, LEFT);
        }
    }

    /// Asks the awaited members whether they are still in the group. A member that left may not
    /// have notified this one, or may have used an id that this one did not know then.
    pub(super) fn ask_awaited(&mut self, now: Instant) {
        self.sessions.coll.asks_at = None;
        let groups: Vec<GroupIdx> = (self.sessions.coll.groups.iter())
            .filter(|(_, group)| group.ops > 0 && group.state == GroupState::Ready)
            .map(|(g, _)| g)
            .collect();
        for g in groups {
            let group = &self.sessions.coll.groups[g];
            let ops = self.sessions.coll.ops.iter().filter(|(_, op)| op.group == g);
            let peers: Vec<PeerIdx> = ops.flat_map(|(_, op)| op.waits.iter().copied()).collect();
            let awaited: Vec<u32> = (0..group.members.len() as u32)
                .filter(|&rank| {
                    let m = &group.members[rank as usize];
                    let is_other = rank != group.me && m.lost.is_none();
                    // A member that computes receives nothing meanwhile.
                    is_other
                        && !m.is_asked
                        && (peers.contains(&m.peer) || group.awaits_on_board(rank))
                })
                .collect();
            for rank in awaited {
                self.ask_member(now, g, rank);
            }
            self.sessions.coll.asks_at.get_or_insert(now + ASK_NS);
        }
        // Joins end by their timeout; calls may wait longer.
        if !self.sessions.coll.ops.is_empty() {
            self.sessions.coll.asks_at.get_or_insert(now + ASK_NS);
        }
    }

    fn ask_member(&mut self, now: Instant, g: GroupIdx, rank: u32) {
        let group = &self.sessions.coll.groups[g];
        let member = group.members[rank as usize];
        let req = SendReq {
            kind: MsgKind::Tagged,
            buf: barewire_driver::mem::IoBuf::EMPTY,
            dest: member.side,
            tag: control_tag(group.gid, ASK),
            data: u64::from(group.is_agreed) << 32 | u64::from(group.hash),
            context: CONTROL
                | ASKED
                | ask_context(g, self.sessions.coll.groups.generation(g), rank),
            // A closed endpoint is reported by the failure of the send.
            flags: OpFlags::REMOTE_CQ_DATA | OpFlags::DELIVERY_COMPLETE,
            no_completion: false,
        };
        // Without room now, the member is asked at the next time.
        let side = group.side;
        let posted = self.posting().post_message(now, side, req);
        self.sessions.coll.groups[g].members[rank as usize].is_asked = posted.is_ok();
    }

    /// Handles an ASK that no endpoint has received: the member's endpoint is closed, unless its
    /// session has ended.
    pub(super) fn on_ask_failed(&mut self, now: Instant, err: &CqErr) {
        if let Some((g, member)) = self.sessions.coll.on_ask_ended(err.cqe.op_context)
            && err.err == Error::ConnRefused
        {
            self.member_gone(now, g, member, LEFT);
        }
    }

    /// Answers a member of a group that is not joined here: by LEAVE if this node has left the
    /// group, or has abandoned the join, which then had another id. A group of the other model may
    /// still be joined, and a group that is being joined has no id yet.
    pub(super) fn answer_unjoined(&mut self, side: EpId, gid: u32, from: EpAddr, data: u64) {
        let (is_agreed, hash) = (data >> 32 != 0, data as u32);
        let joins = |group: &super::Group| {
            let joins = matches!(group.state, GroupState::Joining(_));
            joins && group.side == side && group.hash == hash
        };
        let is_open = is_agreed && !self.sessions.coll.groups.iter().any(|(_, group)| joins(group));
        if gid & JOIN == 0 && (is_open || self.sessions.coll.ended_group_error(side, gid).is_some())
        {
            self.answer_ask(self.sessions.turn.polled_at, (side, from), (gid, LEAVE), LEFT);
        }
    }

    /// Answers an ASK, unless an earlier answer still waits: a peer that asks and takes no answer
    /// must not use up the requests of this node.
    pub(super) fn answer_ask(
        &mut self,
        now: Instant,
        (side, to): (EpId, EpAddr),
        (gid, control): (u32, u64),
        err: Error,
    ) {
        // `name_members` takes the endpoint's address, not its side's.
        let to = EpAddr { ep: to.ep ^ SIDE, ..to };
        let Ok(named) = self.name_members(now, &[to]) else { return };
        let takes = |m: &Member| {
            let answers = (side.0.idx(), NO_CONTEXT);
            self.sessions.tx.waiting(&self.sessions.peers[m.peer], answers, ANSWERS_MAX)
                < ANSWERS_MAX
        };
        if !self.sessions.coll.owed.is_empty() || !named.iter().all(takes) {
            return self.sessions.objects().unname_members(&named);
        }
        let (tag, data) = (control_tag(gid, control), err.fi_errno() as u64);
        self.sessions.coll.owed.extend(named.iter().map(|m| (side, m.side, tag, data)));
        self.sessions.coll.left_members.extend(named);
        self.send_owed(now);
    }

    /// Notifies the members that a group has ended or that this member leaves it.
    fn notify_group(&mut self, now: Instant, g: GroupIdx, control: u64, err: Error) {
        let group = &self.sessions.coll.groups[g];
        let (n, me) = (group.members.len(), group.me as usize);
        let (side, tag) = (group.side, control_tag(group.gid, control));
        let mut to: Vec<usize> = if n <= FLOOD_ALL {
            (0..n).collect()
        } else {
            let steps = (0..n.ilog2() + 1).map(|i| 1_usize << i).filter(|&far| far < n);
            steps.flat_map(|far| [(me + far) % n, (me + n - far) % n]).collect()
        };
        if n > FLOOD_ALL && control == LEAVE {
            let open =
                |m: &Member| self.sessions.peers[m.peer].state == crate::node::peer::State::Open;
            to.extend((0..n).filter(|&rank| open(&group.members[rank])));
        }
        to.sort_unstable();
        to.dedup();
        let data = err.fi_errno() as u64;
        for rank in to {
            let m = group.members[rank];
            if rank != me && m.lost.is_none() {
                self.sessions.coll.owed.push_back((side, m.side, tag, data));
            }
        }
        self.send_owed(now);
    }

    /// Sends the waiting control messages.
    pub(super) fn send_owed(&mut self, now: Instant) {
        while let Some(&(side, dest, tag, data)) = self.sessions.coll.owed.front() {
            let req = SendReq {
                kind: MsgKind::Tagged,
                buf: barewire_driver::mem::IoBuf::EMPTY,
                dest,
                tag,
                data,
                context: NO_CONTEXT,
                flags: OpFlags::REMOTE_CQ_DATA | OpFlags::INJECT,
                no_completion: true,
            };
            // Errors other than a full table: the member is unknown by now.
            if self.posting().post_message(now, side, req) == Err(Error::Again) {
                return;
            }
            self.sessions.coll.owed.pop_front();
        }
        if !self.sessions.coll.left_members.is_empty() {
            let left = std::mem::take(&mut self.sessions.coll.left_members);
            self.sessions.objects().unname_members(&left);
        }
    }

    pub(super) fn process_lost(&mut self, now: Instant) {
        while let Some((p, err)) = self.sessions.coll.lost.pop() {
            self.discard_joins((p, None), None);
            let groups: Vec<GroupIdx> = self.sessions.coll.groups.iter().map(|(g, _)| g).collect();
            for g in groups {
                let Some(group) = self.sessions.coll.groups.get(g) else { continue };
                let gone: Vec<(PeerIdx, u16)> = (group.members.iter())
                    .filter(|m| m.peer == p && m.lost.is_none())
                    .map(|m| (m.peer, m.ep))
                    .collect();
                for member in gone {
                    self.member_gone(now, g, member, err);
                }
            }
        }
        self.sessions.coll.next_session.clear();
    }

    /// Notes that a member sends no more messages. That ends the group if a call waits for the
    /// member, or as soon as one does.
    pub(super) fn member_gone(
        &mut self,
        now: Instant,
        g: GroupIdx,
        gone: (PeerIdx, u16),
        err: Error,
    ) {
        let group = &mut self.sessions.coll.groups[g];
        let side = group.side.0.idx();
        let mut rank = NONE;
        for (i, m) in (0..).zip(&mut group.members) {
            if (m.peer, m.ep) == gone && i != group.me {
                m.lost = Some(err);
                group.is_whole = false;
                rank = i;
            }
        }
        if rank == NONE {
            return;
        }
        let from = self.sessions.peers[gone.0].src(gone.0, gone.1);
        let gid = group.gid;
        self.drive_group(now, g);
        let waits = |op: &Op| op.group == g && op.waits.contains(&gone.0);
        let waited = self.sessions.coll.ops.iter().any(|(_, op)| waits(op));
        // The awaited member may be another endpoint of the same peer.
        let posted = self.sessions.eps[side].matcher[MsgKind::Tagged as usize]
            .find_posted(&self.sessions.posted.pool, |r| {
                r.src == from && (r.tag >> 32) as u32 == gid
            });
        if waited && posted.is_some() {
            self.abort_group(now, g, err);
        }
    }

    /// Ends joins whose timeout has passed.
    pub(super) fn end_late_joins(&mut self, now: Instant) {
        self.sessions.coll.deadline = None;
        let joining: Vec<(GroupIdx, Instant)> = (self.sessions.coll.groups.iter())
            .filter_map(|(g, group)| match group.state {
                GroupState::Joining(until) => Some((g, until)),
                _ => None,
            })
            .collect();
        for (g, until) in joining {
            if until <= now {
                self.abort_group(now, g, Error::TimedOut);
            } else {
                let first = self.sessions.coll.deadline.map_or(until, |d| d.min(until));
                self.sessions.coll.deadline = Some(first);
            }
        }
    }

    /// Leaves a group and frees it.
    pub(super) fn leave_group(&mut self, now: Instant, g: GroupIdx) {
        let group = &self.sessions.coll.groups[g];
        let (busy, over) = (group.ops > 0, matches!(group.state, GroupState::Ended(_)));
        if busy {
            self.abort_group(now, g, Error::Canceled);
        } else if !over {
            self.notify_group(now, g, LEAVE, Error::ConnRefused);
        }
        let gid = self.sessions.coll.groups[g].gid;
        self.sessions.objects().fail_board(g, Error::Canceled);
        self.discard_stored(now, g, gid);
        let mut group = self.sessions.coll.groups.free(g);
        if let Some(join_key) = group.join_key {
            self.sessions.coll.note_left(join_key, group.me);
        }
        // Waiting control messages still use the members' addresses.
        self.sessions.coll.left_members.append(&mut group.members);
        self.send_owed(now);
    }

    /// Ends all groups: the port is gone.
    pub(crate) fn end_groups(&mut self, now: Instant, err: Error) {
        let groups: Vec<GroupIdx> = self.sessions.coll.groups.iter().map(|(g, _)| g).collect();
        for g in groups {
            self.abort_group(now, g, err);
        }
    }

    /// Leaves the groups of an endpoint that is being closed.
    pub(crate) fn coll_ep_closed(&mut self, now: Instant, e: EpIdx) {
        let groups: Vec<GroupIdx> = (self.sessions.coll.groups.iter())
            .filter(|(_, group)| group.ep.0.idx() == e)
            .map(|(g, _)| g)
            .collect();
        for g in groups {
            self.leave_group(now, g);
        }
    }
}

impl Receiving<'_> {
    /// Detaches messages that are partly received. Their senders learn the reason from the ABORT,
    /// not from a failed send, so these messages end as if they had been received.
    fn revoke_placing(
        &mut self,
        now: Instant,
        side: EpIdx,
        peers: &[PeerIdx],
        ours: &dyn Fn(u64) -> bool,
    ) {
        let is_ours = |posted: &Receives, recv: RecvIdx| {
            recv != RecvIdx::NONE
                && posted[recv].payload.ep == side
                && ours(posted[recv].payload.context)
        };
        let pulls: Vec<PullIdx> = self
            .sessions
            .pulls
            .records
            .iter()
            .filter(|(_, p)| is_ours(self.sessions.posted, p.recv))
            .map(|(i, _)| i)
            .collect();
        for pull in pulls {
            let recv = std::mem::replace(&mut self.sessions.pulls[pull].recv, RecvIdx::NONE);
            self.sessions.operations().pull_engine().end_pull(pull, EndStatus::Discarded);
            self.sessions.objects().cancel_placing(recv);
        }
        for &p in peers {
            if let Some(recv) = self.sessions.reassemblies.placing(&self.sessions.peers[p])
                && is_ours(self.sessions.posted, recv)
            {
                self.sessions.reassemblies.discard_rest(&self.sessions.peers[p]);
                self.sessions.objects().cancel_placing(recv);
            }
        }
        let unexpected: Vec<UnexpectedIdx> = (self.sessions.unexpected.iter())
            .filter(|(_, m)| m.payload.ep == side && is_ours(self.sessions.posted, m.payload.recv))
            .map(|(i, _)| i)
            .collect();
        for msg in unexpected {
            if self.sessions.unexpected.get(msg).is_some() {
                self.discard_unexpected(now, msg, EndStatus::Discarded);
            }
        }
    }
}

impl Objects<'_> {
    /// Reports to the application that its call has failed.
    pub(super) fn fail_call(&mut self, ep: EpId, caller: Caller, err: Error) {
        let Some(ep) = self.eps.get_mut(ep.0.idx()) else { return };
        ep.tx_used -= 1;
        ep.counters.errors += 1;
        let (op_context, flags, src) = (caller.context, CqFlags::COLLECTIVE, FI_ADDR_UNSPEC);
        let cqe = Cqe { op_context, flags, src, ..Cqe::default() };
        let (cntr, cq) = (ep.tx_cntr, ep.tx_cq);
        let prov_errno = ProvErrno::UnknownOutcome;
        self.cqs[cq].cq.push_err(CqErr { cqe, olen: 0, err, prov_errno, err_data: None });
        self.cntrs.count_failed(cntr);
    }
}
