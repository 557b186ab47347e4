//! Groups and collectives: the calls, and the node's state of them.
//!
//! A collective is a schedule ([`crate::proto::coll`]) whose messages are tagged messages between
//! the *collective sides* of endpoints: hidden endpoints, one for each endpoint that has
//! `FI_COLLECTIVE`, whose number is the endpoint's with bit 15 inverted, with a queue and an
//! address vector of their own. So messages of collectives and of the application never match each
//! other, and ordering, credit, retransmission, announcement and placement are the same as for
//! every message.
//!
//! - this file: joining and closing. `call`: calling.
//! - `board`: calls through memory that all members share, without messages.
//! - `drive`: progress of schedules; called with every transmit that may find work.
//! - `fail`: members that die, leave or disagree.

mod board;
mod call;
mod control;
mod drive;
mod fail;

use std::collections::{HashMap, VecDeque};

use barewire_driver::mem::atomic::{AtomicOp, Datatype};
use barewire_driver::mem::{IoBuf, Scratch};
use barewire_driver::port::{PortCaps, Station};

use board::{BoardState, name_words};
use call::CheckedCall;
pub use call::{CallWord, CollAttr, CollCall, CollReq, FI_NOOP, FI_VOID, Role, query};
use drive::StoredMsgs;

use super::ep::SIDE;
use super::peer::Peer;
use super::{AvId, BindFlags, CqId, EpAttr, EpId, Node, Objects, Todo};
use crate::error::{Error, Result};
use crate::flags::Caps;
use crate::idx::{CallIdx, EpIdx, GroupIdx, PeerIdx, UnexpectedIdx};
use crate::node::{Collectives, Control, Eps, Sessions};
use crate::proto::coll::Shape;
use crate::proto::coll::plan::{Force, Layout, MODEL_WORDS, Model, Plan, choose};
use crate::proto::coll::program::Program;
use crate::proto::coll::run::Run;
use crate::slab::{Handle, Slab};
use crate::types::{EpAddr, FiAddr, Instant, Tenant};

pub use crate::proto::coll::Kind;

/// Maximum bytes of a block: the data that one member contributes to or takes from a call, or sends
/// to one other member.
pub const BLOCK_MAX: u64 = 1 << 32;

/// Maximum members of a group.
pub const MEMBERS_MAX: usize = 1 << 20;

/// Maximum groups of a node.
const GROUPS_MAX: usize = 1 << 16;

/// Maximum calls in progress in a node.
const OPS_MAX: usize = 1 << 16;

/// A group of a [`Node`], which `fi_mc_addr` refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupId(pub(crate) Handle<GroupIdx>);

impl GroupId {
    /// The id as a number for [`from_bits`](Self::from_bits).
    pub const fn to_bits(self) -> u64 {
        (self.0.generation() as u64) << 32 | self.0.idx().get() as u64
    }

    /// The inverse of [`to_bits`](Self::to_bits). A number of no group is detected when the id is
    /// used.
    pub const fn from_bits(bits: u64) -> Self {
        Self(Handle::from_parts(GroupIdx::of(bits as u32), (bits >> 32) as u32))
    }
}

/// The arguments of a join.
#[derive(Clone, Debug)]
pub struct JoinReq {
    /// Addresses of the members in the endpoint's address vector, in the order of blocks.
    pub members: Vec<FiAddr>,
    /// The parent group, if any.
    pub parent: Option<GroupId>,
    /// How the group gets its id.
    pub model: JoinModel,
    /// Returned in the event.
    pub context: u64,
}

/// How a group gets its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JoinModel {
    /// The application assigns the key: the same at all members, and different for every two groups
    /// of the same members. Nothing is sent (application-managed). Using a key again creates
    /// another group, unless a member has left 65,536 others since.
    Key(u64),
    /// The members agree on the id by a collective of their own (provider-managed). Joins of the
    /// same members with different keys are never confused, in whatever order each member makes
    /// them (62 bits of hash distinguish them); joins with the same key match in the order in which
    /// they are made.
    Collective(u64),
}

/// The outcome of a join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JoinEvent {
    /// The endpoint that joined.
    pub ep: EpId,
    /// The group. Already closed if the join failed.
    pub group: GroupId,
    /// Context of the request.
    pub context: u64,
    /// Success, or the reason for the failure.
    pub result: Result<()>,
}

/// The groups and calls of a node.
#[derive(Debug)]
pub struct Coll {
    pub(super) cq: Option<CqId>,
    av: Option<AvId>,
    /// Collective sides by the number of their endpoint.
    sides: HashMap<u16, EpId>,
    groups: Slab<Group, (), GroupIdx>,
    ops: Slab<Op, (), CallIdx>,
    /// Calls that may make progress.
    work: VecDeque<CallIdx>,
    /// Peers whose session has ended, and the error of each.
    pub(super) lost: Vec<(PeerIdx, Error)>,
    /// Messages of joins that arrived in the next session with such a peer, in the same burst.
    pub(super) next_session: Vec<(PeerIdx, UnexpectedIdx, u32)>,
    /// Messages stored since the last turn, with the generations of their slots.
    pub(super) arrived: Vec<(UnexpectedIdx, u32)>,
    /// Number of queue entries taken, processed ones included, in total.
    taken: u64,
    looked_at: u64,
    /// Messages of joins that arrived behind queue entries which are not processed yet, with the
    /// generations of their slots and the number of the last of these entries.
    behind: Vec<(UnexpectedIdx, u32, u64)>,
    events: VecDeque<JoinEvent>,
    /// Members of groups in the hidden address vector: address and use count.
    named: HashMap<EpAddr, (FiAddr, u32)>,
    /// For each application-managed group and member on this node: number of joins, and number of
    /// these that have not been left.
    joined: HashMap<(u64, u32), (u32, u32)>,
    /// Application-managed groups that were left, with their number of joins at that time, oldest
    /// first, at most [`JOINED_MAX`]: older ones are forgotten.
    counted: VecDeque<JoinCounts>,
    /// Ids of groups that were closed here, or abandoned before the join completed, each with its
    /// side, oldest first.
    ended: VecDeque<(EpIdx, u32, Error)>,
    /// Members that left a group before it was joined here, oldest first.
    early_leaves: VecDeque<EarlyLeave>,
    /// Memory of ended calls for reuse.
    spare: Vec<(Box<Run>, Vec<PeerIdx>)>,
    scratch: Vec<Scratch>,
    /// A post was refused for lack of room: it is retried.
    stalled: bool,
    /// Sides that lack a receive for control messages, for lack of room.
    without_recv: Vec<EpId>,
    /// Control messages that wait for room: (side, to, tag, data).
    owed: VecDeque<(EpId, FiAddr, u64, u64)>,
    /// Members of groups that were left, whose addresses some of `owed` still use.
    left_members: Vec<Member>,
    /// Earliest timeout of a join in progress.
    deadline: Option<Instant>,
    /// Time at which awaited members are asked next, while some call waits.
    asks_at: Option<Instant>,
    /// Groups with calls through their boards.
    on_boards: Vec<GroupIdx>,
    /// Cost model of the node's port.
    model: Model,
}

impl Coll {
    /// The empty state of a node with a port of these capabilities, with the operator's choice of
    /// algorithms.
    pub(super) fn new(caps: &PortCaps, force: Force) -> Self {
        let model = Model { force, ..Model::of_port(caps) };
        Self {
            cq: None,
            av: None,
            sides: HashMap::new(),
            groups: Slab::with_capacity(GROUPS_MAX),
            ops: Slab::with_capacity(OPS_MAX),
            work: VecDeque::new(),
            lost: Vec::new(),
            next_session: Vec::new(),
            arrived: Vec::new(),
            taken: 0,
            looked_at: 0,
            behind: Vec::new(),
            events: VecDeque::new(),
            named: HashMap::new(),
            joined: HashMap::new(),
            counted: VecDeque::new(),
            ended: VecDeque::new(),
            early_leaves: VecDeque::new(),
            spare: Vec::new(),
            scratch: Vec::new(),
            stalled: false,
            without_recv: Vec::new(),
            owed: VecDeque::new(),
            left_members: Vec::new(),
            deadline: None,
            asks_at: None,
            on_boards: Vec::new(),
            model,
        }
    }

    fn check_parent(&self, ep: EpId, parent: Option<GroupId>) -> Result<u64> {
        let Some(parent) = parent else { return Ok(0) };
        let group = self.groups.by_handle(parent.0).filter(|group| group.ep == ep);
        let group = group.ok_or(Error::Invalid("coll_addr is no group of this endpoint"))?;
        match group.state {
            GroupState::Ready => Ok(u64::from(group.gid) << 32 | u64::from(group.hash)),
            GroupState::Joining(_) => Err(Error::OpBadState),
            GroupState::Ended(err) => Err(err),
        }
    }

    fn plan_for(&mut self, g: GroupIdx, shape: &Shape) -> Plan {
        // Only fields that are equal on all members take part, since all must choose the same.
        let key = Shape { me: 0, root: 0, in_place: false, ..*shape };
        let group = &mut self.groups[g];
        if let Some((_, plan)) = group.plans.iter().find(|(known, _)| *known == key) {
            return *plan;
        }
        let (plan, _) = choose(&key, group.layout, &group.model);
        if group.plans.len() == PLANS {
            group.plans.remove(0);
        }
        group.plans.push((key, plan));
        plan
    }

    /// Creates the record of a call. Nothing is posted yet.
    fn begin_op(
        &mut self,
        stored: &StoredMsgs<'_>,
        (g, shape): (GroupIdx, Shape),
        reduce: Option<(AtomicOp, Datatype)>,
        (input, out): (IoBuf, IoBuf),
        caller: Option<Caller>,
    ) -> Result<CallIdx> {
        let plan = self.plan_for(g, &shape);
        let program = Program::new(shape, &plan);
        let scratch = self.take_scratch(program.scratch_len())?;
        let (run, waits) = match self.spare.pop() {
            Some((mut run, waits)) => {
                run.restart(program);
                (run, waits)
            }
            None => (Box::new(Run::new(program)), Vec::new()),
        };
        let group = &mut self.groups[g];
        let mark = group.mark_of(&shape, reduce);
        let seq = group.seq;
        let op = Op {
            group: g,
            seq,
            mark,
            caller,
            reduce,
            input,
            out,
            scratch,
            words: None,
            run,
            queued: false,
            waits,
            sends: 0,
        };
        let Some(o) = self.ops.alloc(op) else { return Err(Error::Again) };
        group.seq = seq.wrapping_add(1);
        group.ops += 1;
        self.drop_mismatched_early(stored, o);
        Ok(o)
    }

    fn take_scratch(&mut self, len: u64) -> Result<Option<Scratch>> {
        if len == 0 {
            return Ok(None);
        }
        let len = usize::try_from(len).map_err(|_| Error::NoMem)?;
        let fits = |s: &Scratch| s.len() >= len && s.len() / 4 <= len.max(4096);
        let at = self.scratch.iter().position(fits);
        match at {
            Some(at) => Ok(Some(self.scratch.swap_remove(at))),
            None => Scratch::new(len.max(4096)).map(Some).ok_or(Error::NoMem),
        }
    }

    /// Takes the outcome of the next join that has ended.
    pub fn event(&mut self) -> Option<JoinEvent> {
        self.events.pop_front()
    }

    /// Checks whether a group is usable.
    ///
    /// # Errors
    /// [`Error::BadFd`]: it was closed. [`Error::OpBadState`]: the join is in progress. Else the
    /// error that ended the group.
    pub fn check(&self, group: GroupId) -> Result<()> {
        match self.groups.by_handle(group.0).ok_or(Error::BadFd)?.state {
            GroupState::Ready => Ok(()),
            GroupState::Joining(_) => Err(Error::OpBadState),
            GroupState::Ended(err) => Err(err),
        }
    }

    /// Whether a join is in progress, or its event has not been read.
    pub fn is_joining(&self) -> bool {
        let joining = |group: &Group| matches!(group.state, GroupState::Joining(_));
        self.has_event() || self.groups.iter().any(|(_, group)| joining(group))
    }

    /// Number of application-managed groups whose joins are remembered.
    #[cfg(test)]
    pub(super) fn counted_joins(&self) -> usize {
        self.joined.len()
    }

    /// Notes that member `me` has left an application-managed group.
    fn note_left(&mut self, join_key: u64, me: u32) {
        let Some((times, open)) = self.joined.get_mut(&(join_key, me)) else { return };
        *open -= 1;
        self.counted.push_back(((join_key, me), *times));
        if self.counted.len() > JOINED_MAX
            && let Some((group, times)) = self.counted.pop_front()
            && self.joined.get(&group) == Some(&(times, 0))
        {
            self.joined.remove(&group);
        }
    }

    /// Whether there is an event to read.
    pub fn has_event(&self) -> bool {
        !self.events.is_empty()
    }

    /// Whether endpoint `e` is a collective side.
    pub(super) fn is_side(&self, eps: &Eps, e: EpIdx) -> bool {
        let cq = eps.get(e).map(|ep| ep.tx_cq);
        cq.is_some() && cq == self.cq.map(|cq| cq.0.idx())
    }

    /// The collective side of an endpoint, if it may use one.
    fn side_of(&self, eps: &Eps, ep: EpId) -> Result<EpId> {
        let e = eps.by_handle(ep.0).ok_or(Error::BadFd)?;
        if !e.enabled {
            return Err(Error::OpBadState);
        }
        if !e.caps.contains(Caps::COLLECTIVE) {
            return Err(Error::OpNotSupp("FI_COLLECTIVE was not requested"));
        }
        let side = self.sides.get(&e.number).copied();
        side.ok_or(Error::OpNotSupp("another endpoint has this one's number plus or minus 32768"))
    }
}

/// An application-managed group and a member on this node, with the number of joins.
type JoinCounts = ((u64, u32), u32);

/// A member that has left a group which is not joined here yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct EarlyLeave {
    /// The side here that is to be in the group.
    side: EpIdx,
    gid: u32,
    /// The member, and the number of its side.
    station: Station,
    ep: u16,
}

/// A member of a group.
#[derive(Clone, Copy, Debug)]
struct Member {
    /// Address in the hidden vector.
    side: FiAddr,
    peer: PeerIdx,
    ep: u16,
    /// The member has died or left: no more messages come from it.
    lost: Option<Error>,
    /// An ASK to the member is in progress.
    is_asked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GroupState {
    /// The join is in progress, with this timeout.
    Joining(Instant),
    Ready,
    /// The group has ended: later calls return this error.
    Ended(Error),
}

#[derive(Debug)]
struct Group {
    ep: EpId,
    side: EpId,
    members: Vec<Member>,
    /// No member has died or left.
    is_whole: bool,
    /// Ranks by the application's address, sorted by address.
    ranks: Vec<(FiAddr, u32)>,
    me: u32,
    /// Key of an application-managed group in `Coll::joined`.
    join_key: Option<u64>,
    /// Group id, part of every tag.
    gid: u32,
    /// The members have agreed on the group id, so all of them have begun to join.
    is_agreed: bool,
    /// Hash of the members, part of every message.
    hash: u32,
    /// Sequence number of the next call.
    seq: u16,
    state: GroupState,
    /// Number of calls in progress.
    ops: u32,
    context: u64,
    plans: Vec<(Shape, Plan)>,
    layout: Layout,
    /// Cost model for the choice of algorithms: the same on all members, also before they have
    /// agreed on another.
    model: Model,
    shared: BoardState,
    /// The last call that was checked.
    checked: CheckedCall,
}

impl Group {
    fn rank_of(&self, root: FiAddr) -> Result<u32> {
        let at = self.ranks.binary_search_by_key(&root, |r| r.0);
        Ok(self.ranks[at.map_err(|_| Error::Invalid("root_addr is no member of the group"))?].1)
    }
}

/// A call in progress.
#[derive(Debug)]
struct Op {
    group: GroupIdx,
    seq: u16,
    /// Word that every message of the call must carry.
    mark: u64,
    /// `None` for the exchange of a join.
    caller: Option<Caller>,
    reduce: Option<(AtomicOp, Datatype)>,
    input: IoBuf,
    out: IoBuf,
    scratch: Option<Scratch>,
    /// Memory of the exchange of a join, which `input` and `out` then refer to.
    words: Option<Scratch>,
    run: Box<Run>,
    /// The call is in the queue of calls that may make progress.
    queued: bool,
    /// Peers from which messages are expected, one entry per receive.
    waits: Vec<PeerIdx>,
    /// Sends in progress.
    sends: u32,
}

/// The caller of a collective.
#[derive(Clone, Copy, Debug)]
struct Caller {
    context: u64,
    wanted: bool,
}

/// Bit of the group ids under which the members agree on an id. The same members always use the
/// same such id, so it never ends for good.
const JOIN: u32 = 1 << 31;

/// Words of the exchange of a join before the names of slots: the group id; the hash of the values
/// that all members must share, and its complement; the layout that a member sees, and its
/// complement; the numbers of its cost model.
const JOIN_WORDS: usize = MODEL_WORD + MODEL_WORDS;

/// Index of the first of the two words of the layout.
const LAYOUT_WORD: usize = 3;

/// Index of the first number of the cost model.
const MODEL_WORD: usize = LAYOUT_WORD + 2;

/// Number of application-managed groups that were left and whose joins are remembered: about 4 MB.
/// After that, a group of the same key and members may get the id of an earlier one.
const JOINED_MAX: usize = 1 << 16;

/// Number of distinct calls of a group whose algorithm is cached.
const PLANS: usize = 8;

/// Adds a word to the hash of the values that members must agree on.
fn mix(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

impl Node {
    /// Creates the collective side of an endpoint that is being enabled, if it may use one.
    pub(super) fn coll_enable(&mut self, ep: EpId) -> Result<()> {
        let e = self.eps.by_handle(ep.0).ok_or(Error::BadFd)?;
        let number = e.number;
        // An endpoint whose side's number is taken explicitly has no side.
        let free = !self.eps.is_taken(number ^ SIDE);
        if !e.caps.contains(Caps::COLLECTIVE) || !free {
            return Ok(());
        }
        let cq = match self.coll.cq {
            Some(cq) => cq,
            None => self.cqs.open(1 << 17)?,
        };
        let av = match self.coll.av {
            Some(av) => av,
            None => self.sessions().av_open(0)?,
        };
        (self.coll.cq, self.coll.av) = (Some(cq), Some(av));
        self.due.todo |= Todo::COLL;
        let kinds = Caps::TAGGED | Caps::SEND | Caps::RECV;
        let attr = EpAttr {
            number: Some(number ^ SIDE),
            // A source that no group knows yet may send messages of a join.
            caps: kinds | Caps::DIRECTED_RECV | Caps::SOURCE | Caps::SOURCE_ERR,
            tx_size: 1 << 20,
            rx_size: 1 << 20,
            ..EpAttr::default()
        };
        let side = self.eps.add(attr, number ^ SIDE)?;
        self.objects().ep_bind_cq(side, cq, BindFlags::TRANSMIT | BindFlags::RECV)?;
        self.objects().ep_bind_av(side, av)?;
        self.ep_enable(side)?;
        self.coll.sides.insert(number, side);
        for _ in 0..control::LISTENING {
            self.listen(side);
        }
        Ok(())
    }
}

impl Collectives<'_> {
    /// Joins a group. `Coll::event` reports the outcome.
    ///
    /// # Errors
    /// Nothing was joined, no event will come:
    /// - [`Error::BadFd`], [`Error::OpBadState`], [`Error::OpNotSupp`]: the endpoint was closed, is
    ///   not enabled, or has no `FI_COLLECTIVE`.
    /// - [`Error::Invalid`]: the set is empty or too large, contains an address that is not in the
    ///   address vector, or an endpoint twice; or this endpoint is not in it; or a member is not in
    ///   the parent.
    /// - [`Error::ConnReset`]: the address of a member names an earlier incarnation of it.
    /// - [`Error::NoMem`]: too many groups or peers.
    pub fn coll_join(&mut self, now: Instant, ep: EpId, req: &JoinReq) -> Result<GroupId> {
        let side = self.sessions.coll.side_of(self.sessions.eps, ep)?;
        let parent = self.sessions.coll.check_parent(ep, req.parent)?;
        let mut addrs = self.sessions.objects().member_addrs(ep, req)?;
        if self.sessions.coll.groups.is_full() {
            return Err(Error::NoMem);
        }
        let own = (self.sessions.port.station, self.sessions.eps[ep.0.idx()].number);
        let me = addrs.iter().position(|a| (a.station, a.ep) == own);
        let me = me.ok_or(Error::Invalid("the endpoint is not in its address vector set"))? as u32;
        addrs[me as usize].incarnation = self.sessions.settings.incarnation;
        let (gid, hash, counted) = self.group_names((&addrs, me), parent, req.model)?;
        let members = self.name_members(now, &addrs)?;
        // Ended sessions do not concern the new group: they were with an earlier incarnation of a
        // member, or with another peer that had the record.
        self.process_lost(now);
        let mut ranks: Vec<_> = (0..).zip(&req.members).map(|(rank, &a)| (a, rank)).collect();
        ranks.sort_unstable();
        let until = now + self.sessions.settings.join_ns;
        let is_collective = matches!(req.model, JoinModel::Collective(_));
        let managed = is_collective && members.len() > 1;
        let state = if managed { GroupState::Joining(until) } else { GroupState::Ready };
        let over = self.sessions.coll.ended_group_error(side, gid).filter(|_| !managed);
        let state = over.map_or(state, GroupState::Ended);
        let group = Group {
            ep,
            side,
            members,
            is_whole: true,
            ranks,
            me,
            join_key: counted.map(|((join_key, _), _)| join_key),
            gid,
            is_agreed: managed,
            hash,
            seq: 0,
            state,
            ops: 0,
            context: req.context,
            plans: Vec::new(),
            layout: Layout::FLAT,
            model: Model { force: self.sessions.coll.model.force, ..Model::MEMORY },
            checked: CheckedCall::NONE,
            shared: if managed { BoardState::Wanted } else { BoardState::Unused },
        };
        let g = self.sessions.coll.groups.alloc(group).ok_or(Error::NoMem)?;
        let id = GroupId(self.sessions.coll.groups.handle(g));
        if let Some((group, times)) = counted {
            let (joins, open) = self.sessions.coll.joined.entry(group).or_default();
            (*joins, *open) = (times, *open + 1);
        }
        if managed {
            if let Err(err) = self.begin_join(g) {
                let group = self.sessions.coll.groups.free(g);
                self.sessions.objects().unname_members(&group.members);
                return Err(err);
            }
            let first = self.sessions.coll.deadline.map_or(until, |d| d.min(until));
            self.sessions.coll.deadline = Some(first);
        } else {
            let event = JoinEvent { ep, group: id, context: req.context, result: Ok(()) };
            self.sessions.coll.events.push_back(event);
            self.apply_early_leaves(now, g);
        }
        Ok(id)
    }

    /// The group id before the members agree on another, the hash of its members, and the key to
    /// count once member `me` has joined an application-managed group.
    fn group_names(
        &mut self,
        (addrs, me): (&[EpAddr], u32),
        parent: u64,
        model: JoinModel,
    ) -> Result<(u32, u32, Option<JoinCounts>)> {
        let mut hash = mix(parent, self.sessions.coll.model.force as u64);
        for a in addrs {
            hash = mix(mix(hash, a.station.word()), a.ep.into());
        }
        let mut counted = None;
        let gid = match model {
            JoinModel::Collective(key) => {
                hash = mix(hash, key);
                mix(hash, 1)
            }
            JoinModel::Key(key) => {
                // The hash includes the incarnations of the members, so that a group with a dead
                // member is never confused with that of its successor; and the number of joins, so
                // that neither is confused with an ended group.
                let mut join_key = mix(hash, key);
                for a in addrs {
                    join_key = mix(join_key, self.sessions.control().incarnation_of(a)?);
                }
                let times =
                    self.sessions.coll.joined.get(&(join_key, me)).map_or(0, |&(times, _)| times)
                        + 1;
                counted = Some(((join_key, me), times));
                mix(join_key, u64::from(times))
            }
        };
        let gid = (gid >> 32) as u32 & !JOIN;
        let join = if matches!(model, JoinModel::Collective(_)) { JOIN } else { 0 };
        Ok((gid | join, (hash >> 32) as u32, counted))
    }

    /// Inserts the members' collective sides into the hidden address vector.
    fn name_members(&mut self, now: Instant, addrs: &[EpAddr]) -> Result<Vec<Member>> {
        let av = self.sessions.coll.av.ok_or(Error::OpBadState)?;
        let mut members = Vec::with_capacity(addrs.len());
        for addr in addrs {
            let addr = EpAddr { ep: addr.ep ^ SIDE, ..*addr };
            if self.sessions.control().is_of_other_incarnation(&addr) {
                self.sessions.objects().unname_members(&members);
                return Err(Error::ConnReset);
            }
            let side = match self.sessions.coll.named.get_mut(&addr) {
                Some((side, refs)) => {
                    *refs += 1;
                    *side
                }
                None => match self.sessions.av_insert(now, av, addr) {
                    Ok(side) => {
                        self.sessions.coll.named.insert(addr, (side, 1));
                        side
                    }
                    Err(err) => {
                        self.sessions.objects().unname_members(&members);
                        return Err(err);
                    }
                },
            };
            let peer = self.sessions.avs[av.0.idx()]
                .av
                .lookup(side)
                .map_or(PeerIdx::NONE, |entry| entry.peer);
            members.push(Member { side, peer, ep: addr.ep, lost: None, is_asked: false });
        }
        Ok(members)
    }

    /// Starts the exchange by which the members agree on an id that the first member draws, and
    /// compare their parameters.
    fn begin_join(&mut self, g: GroupIdx) -> Result<()> {
        let drawn = self.sessions.openings.random() >> 32 & u64::from(!JOIN) | 1;
        let group = &self.sessions.coll.groups[g];
        let hash = u64::from(group.hash);
        let name = if group.me == 0 { drawn } else { 0 };
        let count = JOIN_WORDS + name_words(group.members.len());
        let scratch = Scratch::new(count * 8).ok_or(Error::NoMem)?;
        // The layout is unknown so far, and so are this member's cost numbers.
        for (i, word) in [name, hash, !hash, 0, !0].into_iter().enumerate() {
            scratch.io().write_at(8 * i, &word.to_le_bytes());
        }
        let shape = Shape {
            kind: Kind::Allreduce,
            n: group.members.len() as u32,
            me: group.me,
            root: 0,
            count: count as u64,
            size: 8,
            in_place: true,
        };
        let reduce = Some((AtomicOp::Max, Datatype::Uint64));
        let (input, out) = (scratch.io(), scratch.io());
        let Sessions { eps, peers, unexpected, coll, .. } = &mut self.sessions;
        let stored = StoredMsgs { eps, peers, unexpected };
        let o = coll.begin_op(&stored, (g, shape), reduce, (input, out), None)?;
        self.sessions.coll.ops[o].words = Some(scratch);
        self.sessions.coll.queue_op(o);
        Ok(())
    }

    /// Leaves a group. Calls in progress end with [`Error::Canceled`] here, and with an error at
    /// every member that still needs this one.
    ///
    /// # Errors
    /// [`Error::BadFd`]: it was closed.
    pub fn coll_close(&mut self, now: Instant, group: GroupId) -> Result<()> {
        self.sessions.coll.groups.by_handle(group.0).ok_or(Error::BadFd)?;
        self.leave_group(now, group.0.idx());
        Ok(())
    }
}

impl Objects<'_> {
    fn member_addrs(&self, ep: EpId, req: &JoinReq) -> Result<Vec<EpAddr>> {
        if req.members.is_empty() || req.members.len() > MEMBERS_MAX {
            return Err(Error::Invalid("a group has 1 to 2^20 members"));
        }
        let av = &self.avs[self.eps[ep.0.idx()].av].av;
        let known = |addr| av.lookup(addr).ok_or(Error::Invalid("a member is not in the AV"));
        let addrs: Vec<EpAddr> = (req.members.iter().map(|&a| Ok(self.peers.addr_of(known(a)?))))
            .collect::<Result<_>>()?;
        let mut names: Vec<_> = addrs.iter().map(|a| (a.station, a.ep)).collect();
        names.sort_unstable();
        if names.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(Error::Invalid("an endpoint is in the set twice"));
        }
        if let Some(parent) = req.parent {
            let group = &self.coll.groups[parent.0.idx()];
            let inside = |m: &FiAddr| group.ranks.binary_search_by_key(m, |r| r.0).is_ok();
            if !req.members.iter().all(inside) {
                return Err(Error::Invalid("a member of the set is not in the parent group"));
            }
        }
        Ok(addrs)
    }

    fn unname_members(&mut self, members: &[Member]) {
        let Some(av) = self.coll.av else { return };
        for m in members {
            let Ok(addr) = self.avs.entry(av, m.side).map(|entry| self.peers.addr_of(entry)) else {
                continue;
            };
            let Some((_, refs)) = self.coll.named.get_mut(&addr) else { continue };
            *refs -= 1;
            if *refs == 0 {
                self.coll.named.remove(&addr);
                let removed = self.av_remove(av, m.side);
                debug_assert!(removed.is_ok());
            }
        }
    }
}

impl Control<'_> {
    /// Whether `addr` names another incarnation of its peer than the present one. Inserting such an
    /// address would end the session with the present one. An incarnation that only an OPEN has
    /// claimed does not count.
    fn is_of_other_incarnation(&self, addr: &EpAddr) -> bool {
        let p = self.by_station.get(self.peers, addr.station, Tenant::NONE);
        let other = |peer: &Peer| peer.inc != 0 && peer.inc != addr.incarnation;
        let peer = p.map(|p| &self.peers[p]).filter(|peer| !peer.is_life_claimed);
        addr.incarnation != 0 && peer.is_some_and(other)
    }

    /// The incarnation of a member, which other members know as well.
    fn incarnation_of(&self, addr: &EpAddr) -> Result<u64> {
        if addr.incarnation != 0 {
            return Ok(addr.incarnation);
        }
        if addr.station == self.port.station {
            return Ok(self.settings.incarnation);
        }
        let met = self
            .by_station
            .get(self.peers, addr.station, Tenant::NONE)
            .map(|p| self.peers[p].inc)
            .filter(|&inc| inc != 0);
        met.ok_or(Error::Invalid(
            "a group that the application manages: a member is known by name alone and was never \
             met; insert what its fi_getname gave",
        ))
    }
}

impl Default for JoinReq {
    fn default() -> Self {
        Self { members: Vec::new(), parent: None, model: JoinModel::Collective(0), context: 0 }
    }
}

/// The operator's choice of algorithms.
pub type CollForce = Force;
