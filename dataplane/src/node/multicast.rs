//! Multicast groups: messages of one frame to every endpoint that has joined, best effort.
//!
//! A MCAST goes to the broadcast address with the group inside, and belongs to no session: it is
//! neither acknowledged nor retransmitted. The members of a group are known only to their own
//! nodes.
//!
//! A message is placed into a posted receive or dropped and counted; no message is stored. So any
//! sender on the network can consume the posted receives of a group's members, but no memory.

use std::collections::VecDeque;

use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::port::{Station, Tx};

use super::post::wants_cqe;
use super::recv::{MsgHead, Target};
use super::{
    EpId, FrameSink, MsgKind, MulticastGroups, Node, Objects, Posting, Receiving, SendReq,
};
use crate::cntr::Done;
use crate::error::{Error, Result};
use crate::flags::{Caps, CqFlags, OpFlags};
use crate::idx::{EpIdx, PeerIdx};
use crate::proto::matching::Src;
use crate::psn::Psn;
use crate::types::{Cqe, EpAddr, FI_ADDR_UNSPEC, FiAddr, GroupAddr, Tenant};
use crate::wire::{self, Base, IMM_LEN, McastOp, Ty};

/// Maximum memberships of a node's endpoints: a group counts once for every endpoint in it.
pub const MEMBERS_MAX: usize = 256;

/// Maximum frames to groups that wait for room in the port.
const QUEUE_MAX: usize = 64;

/// Number of recent messages that are remembered to detect copies.
const SEEN: usize = 1024;

/// Marks the `fi_addr_t` of a group: no address vector has an index this high.
const MARK: FiAddr = 1 << 44;

/// Flags that a message to a group may have.
const FLAGS: OpFlags = OpFlags::MULTICAST
    .union(OpFlags::REMOTE_CQ_DATA)
    .union(OpFlags::MORE)
    .union(OpFlags::COMPLETION)
    .union(OpFlags::INJECT)
    .union(OpFlags::INJECT_COMPLETE)
    .union(OpFlags::TRANSMIT_COMPLETE);

/// Membership of an endpoint in a multicast group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct McId(u32);

impl McId {
    /// The destination address of the group (`fi_mc_addr`).
    pub fn addr(self) -> FiAddr {
        MARK | FiAddr::from(self.0)
    }

    fn of_addr(addr: FiAddr) -> Option<Self> {
        u32::try_from(addr ^ MARK).ok().map(Self)
    }
}

#[derive(Clone, Copy, Debug)]
struct Member {
    id: McId,
    ep: EpIdx,
    group: GroupAddr,
    sends: bool,
    receives: bool,
}

/// Identifies a message: its sender, the sender's incarnation, and the sender's message number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MessageId {
    by: u64,
    inc: u64,
    number: u32,
}

/// The groups of a node, and the frames to them that are still to be sent.
#[derive(Debug, Default)]
pub struct Multicast {
    members: Vec<Member>,
    /// Joins so far: the last membership id assigned.
    joined: u32,
    /// Messages sent so far: the number of the last one.
    sent: u32,
    /// Recent messages, each in the slot that its number and sender hash to, so that a message
    /// which arrives by two paths, such as memory and a switch, is delivered once. Empty until an
    /// endpoint joins a group.
    seen: Vec<Option<MessageId>>,
    queue: VecDeque<Vec<u8>>,
    free: Vec<Vec<u8>>,
}

impl Multicast {
    /// Leaves a group. Messages posted to it are still sent.
    ///
    /// # Errors
    /// [`Error::BadFd`]: the endpoint has left the group, or was closed.
    pub fn leave(&mut self, id: McId) -> Result<()> {
        let at = self.members.iter().position(|m| m.id == id).ok_or(Error::BadFd)?;
        self.members.swap_remove(at);
        Ok(())
    }

    /// Ends the memberships of endpoint `e`, which is being closed.
    pub(super) fn forget_ep(&mut self, e: EpIdx) {
        self.members.retain(|m| m.ep != e);
    }

    /// Whether frames wait to be sent.
    pub(super) fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Records a message, and returns whether it has arrived before.
    fn is_copy(&mut self, sent: MessageId) -> bool {
        // Consecutive messages of one sender, up to the size of the table, have distinct slots.
        let at = (sent.by.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32;
        let at = at.wrapping_add(sent.number) as usize % SEEN;
        let place = self.seen.get_mut(at);
        place.is_some_and(|place| place.replace(sent) == Some(sent))
    }
}

impl MulticastGroups<'_> {
    /// Joins `ep` to `group`, to send to it if `directions` has `SEND` and to receive if it has
    /// `RECV`; both if it has neither. Effective at once.
    ///
    /// # Errors
    /// - [`Error::BadFd`]: the endpoint was closed. [`Error::OpBadState`]: it is not enabled.
    /// - [`Error::OpNotSupp`]: the endpoint has no `FI_MULTICAST`, or no `FI_MSG` of a direction;
    ///   it takes unexpected messages by their announcement; or the node has a key, which multicast
    ///   groups do not support.
    /// - [`Error::Invalid`]: the endpoint is in the group already.
    /// - [`Error::NoMem`]: there are [`MEMBERS_MAX`] memberships.
    pub fn join(&mut self, ep: EpId, group: GroupAddr, directions: Caps) -> Result<McId> {
        let own = Caps::SEND | Caps::RECV;
        let e = self.sessions.eps.by_handle(ep.0).ok_or(Error::BadFd)?;
        if !e.caps.contains(Caps::MULTICAST | Caps::MSG) || e.buffered {
            return Err(Error::OpNotSupp("the endpoint has no FI_MULTICAST with FI_MSG"));
        }
        if self.sessions.port.far.is_sealed() {
            return Err(Error::OpNotSupp("the domain has a key, and a multicast group has none"));
        }
        if !e.enabled {
            return Err(Error::OpBadState);
        }
        let asked = if directions.intersects(own) { directions & own } else { e.caps & own };
        if asked.is_empty() || !e.caps.contains(asked) {
            return Err(Error::OpNotSupp("the endpoint does not have this direction"));
        }
        let (idx, multicast) = (ep.0.idx(), &mut *self.groups);
        if multicast.members.iter().any(|m| (m.ep, m.group) == (idx, group)) {
            return Err(Error::Invalid("the endpoint is in the group"));
        }
        if multicast.members.len() >= MEMBERS_MAX || multicast.joined == u32::MAX {
            return Err(Error::NoMem);
        }
        multicast.joined += 1;
        let id = McId(multicast.joined);
        multicast.seen.resize(SEEN, None);
        let (sends, receives) = (asked.contains(Caps::SEND), asked.contains(Caps::RECV));
        multicast.members.push(Member { id, ep: idx, group, sends, receives });
        if sends && multicast.free.is_empty() && multicast.queue.is_empty() {
            let len = self.sessions.port.frame_len();
            self.groups.free.resize_with(QUEUE_MAX, || Vec::with_capacity(len));
        }
        Ok(id)
    }

    /// Sends the queued frames to the port and to the members on this node. False if the port had
    /// no room for some.
    pub(super) fn send_queued(&mut self, out: &mut dyn FrameSink) -> bool {
        while let Some(bytes) = self.groups.queue.pop_front() {
            if out.send(&TxFrame::whole(&bytes)) == Tx::Full {
                self.sessions.port.blocked = true;
                self.groups.queue.push_front(bytes);
                return false;
            }
            self.sessions.counters.tx_frames += 1;
            let frame = RxFrame::new(&bytes);
            if let Ok(base) = Base::parse(&frame)
                && let Ok(op) = McastOp::parse(&frame, &base)
            {
                self.deliver_to_members(&frame, &base, &op);
            }
            self.groups.free.push(bytes);
        }
        true
    }

    /// Processes a MCAST.
    #[cold]
    pub(super) fn on_mcast(&mut self, frame: &RxFrame<'_>, base: &Base) {
        if base.src == self.sessions.port.station || base.dst != Station::BROADCAST {
            self.sessions.counters.rx_not_ours += 1;
            return;
        }
        if self.sessions.port.far.has_crc() && !base.crc {
            self.sessions.counters.rx_no_crc += 1;
            return;
        }
        match McastOp::parse(frame, base) {
            Ok(op) => {
                let sent = MessageId { by: base.src.word(), inc: op.inc, number: base.psn.0 };
                if self.groups.is_copy(sent) {
                    self.sessions.counters.rx_duplicate += 1;
                } else if !self.deliver_to_members(frame, base, &op) {
                    self.sessions.counters.rx_mcast_other += 1;
                }
            }
            Err(err) => self.sessions.counters.rx_wire[err.index()] += 1,
        }
    }

    /// Delivers a message to the members of its group except the endpoint that sent it. False if
    /// there are none.
    fn deliver_to_members(&mut self, frame: &RxFrame<'_>, base: &Base, op: &McastOp) -> bool {
        let own = base.src == self.sessions.port.station;
        let mut any = false;
        for i in 0..self.groups.members.len() {
            let Member { ep, group, receives, .. } = self.groups.members[i];
            if group == op.group && receives && !(own && self.sessions.eps[ep].number == op.src_ep)
            {
                any = true;
                self.sessions.receiving().deliver_to_member(ep, frame, base, op);
            }
        }
        any
    }
}

impl Posting<'_> {
    /// Posts a message to a group. `declined`: the reason that no single peer is its destination.
    /// The message is copied, and completes at once.
    ///
    /// # Errors
    /// As [`Node::post_send`].
    #[cold]
    pub(super) fn post_to_group(&mut self, ep: EpId, req: &SendReq, declined: Error) -> Result<()> {
        let by_dest = matches!(declined, Error::Invalid(_) | Error::BadFlags | Error::MsgTooLong);
        let e = self
            .sessions
            .eps
            .by_handle(ep.0)
            .filter(|e| by_dest && e.caps.contains(Caps::MULTICAST));
        let Some(e) = e else { return Err(declined) };
        let Some(id) = McId::of_addr(req.dest) else {
            let meant = req.flags.contains(OpFlags::MULTICAST);
            let no_group = Error::Invalid("FI_MULTICAST: not the address of a group");
            return Err(if meant { no_group } else { declined });
        };
        if req.kind != MsgKind::Msg {
            return Err(Error::OpNotSupp("a message to a group has no tag"));
        }
        if !FLAGS.contains(req.flags) {
            return Err(Error::BadFlags);
        }
        let (idx, src_ep) = (ep.0.idx(), e.number);
        let member = self.groups.members.iter().find(|m| (m.id, m.ep) == (id, idx));
        let Member { group, sends, .. } =
            *member.ok_or(Error::Invalid("destination is no group of the endpoint"))?;
        if !sends {
            return Err(Error::OpNotSupp("the group was joined to receive"));
        }
        let imm = req.flags.contains(OpFlags::REMOTE_CQ_DATA).then_some(req.data);
        let len = req.buf.len();
        let inject = req.flags.contains(OpFlags::INJECT) && len > Node::INJECT_SIZE;
        if inject || len > self.sessions.port.mc_max() - imm.map_or(0, |_| IMM_LEN) {
            return Err(Error::MsgTooLong);
        }
        if self.sessions.port.gone {
            return Err(Error::NetDown);
        }
        self.sessions.eps.make_send_room(self.sessions.cqs, idx);
        if self.groups.free.is_empty()
            || !self.sessions.cqs[self.sessions.eps[idx].tx_cq].cq.reserve()
        {
            return Err(Error::Again);
        }
        let op = McastOp { group, src_ep, inc: self.sessions.settings.incarnation, imm };
        self.queue_for_group(&op, req);
        self.sessions.objects().complete_to_group(idx, req);
        Ok(())
    }

    /// Writes the frame of a message. The caller has checked that a buffer is free.
    fn queue_for_group(&mut self, op: &McastOp, req: &SendReq) {
        let (payload_off, len) = (op.payload_off(), req.buf.len());
        let multicast = &mut self.groups;
        multicast.sent = multicast.sent.wrapping_add(1);
        let number = Psn(multicast.sent);
        let control = self.sessions.port.control(Station::BROADCAST, Ty::Mcast, 0, number);
        let base = Base { plen: len as u16, ..control };
        let mut bytes = self.groups.free.pop().expect("a free buffer was checked");
        bytes.clear();
        bytes.resize(payload_off + len, 0);
        let (head, rest) = bytes.split_first_chunk_mut().expect("a head holds a base");
        base.emit(head);
        op.emit(rest);
        req.buf.read_at(0, &mut bytes[payload_off..]);
        if base.crc {
            let crc = wire::crc_of_head(&bytes).to_le_bytes();
            bytes.extend_from_slice(&crc);
        }
        self.groups.queue.push_back(bytes);
        self.sessions.due.note_send();
    }
}

impl Receiving<'_> {
    fn deliver_to_member(&mut self, e: EpIdx, frame: &RxFrame<'_>, base: &Base, op: &McastOp) {
        // A sender with another incarnation is not the one that was inserted.
        let known =
            self.sessions.by_station.get(self.sessions.peers, base.src, Tenant::NONE).filter(
                |&p| {
                    let inc = self.sessions.peers[p].inc;
                    inc == 0 || inc == op.inc
                },
            );
        let may = match known {
            Some(p) => self.sessions.objects().may_reach(p, e),
            None => {
                let open =
                    !self.sessions.settings.inserted || base.src == self.sessions.port.station;
                let may = open || self.sessions.eps[e].admits_all;
                self.sessions.counters.rx_not_inserted += u64::from(!may);
                may
            }
        };
        if !may {
            return;
        }
        let src = known.map_or(Src::UNKNOWN, |p| self.sessions.peers[p].src(p, op.src_ep));
        let (peer, len) = (known.unwrap_or(PeerIdx::NONE), u64::from(base.plen));
        let (inc, src_ep, imm) = (op.inc, op.src_ep, op.imm);
        let head = MsgHead { peer, inc, src_ep, tagged: false, tag: 0, imm, len };
        let Target::Recv { recv, base: at } = self.sessions.objects().target_of(e, &head, src)
        else {
            self.sessions.counters.rx_mcast_dropped += 1;
            return;
        };
        let n = self.sessions.posted.room(recv, at).min(len);
        if n > 0 {
            frame.copy_to_io(
                op.payload_off(),
                &self.sessions.posted.buf(recv),
                at as usize,
                n as usize,
            );
        }
        let source = known.and_then(|p| self.sessions.objects().source_of(e, (p, inc), src_ep));
        let addr = EpAddr { station: base.src, ep: src_ep, incarnation: inc };
        self.sessions
            .objects()
            .complete_recv_of(recv, &head, (at, n), source, |_| (addr, Tenant::NONE));
        self.sessions.counters.rx_mcast += 1;
    }
}

impl Objects<'_> {
    /// Writes the completion of a message in a reserved entry.
    fn complete_to_group(&mut self, e: EpIdx, req: &SendReq) {
        let ep = &mut self.eps[e];
        let wanted = wants_cqe(req, ep.tx_selective);
        ep.counters.sent += 1;
        ep.counters.sent_bytes += req.buf.len() as u64;
        let (cntr, cq) = (ep.tx_cntr, &mut self.cqs[ep.tx_cq].cq);
        if wanted {
            let flags = CqFlags::SEND | CqFlags::MSG;
            let (op_context, src) = (req.context, FI_ADDR_UNSPEC);
            cq.push(Cqe { op_context, flags, src, ..Cqe::default() });
        } else {
            cq.unreserve();
        }
        self.cntrs.count(cntr, Done::one(req.buf.len() as u64));
        self.counters.tx_mcast += 1;
    }
}
