//! Groups and collectives: the calls on them, and what a node keeps of them.
//!
//! A collective is a schedule ([`crate::proto::coll`]) whose messages are tagged messages between
//! the *collective sides* of endpoints: hidden endpoints, one beside each endpoint that has
//! `FI_COLLECTIVE`, with the number of the endpoint in which bit 15 is turned over, a queue and an
//! address vector of their own. So a message of a collective can match nothing of the
//! application's and the other way round, and order, credit, repetition, announcement and placing
//! are those of every message.
//!
//! - this file: joining, closing. `call`: calling.
//! - `board`: calls through memory that all members share, without a message.
//! - `drive`: schedules go on; called with every transmit that could find something new.
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

use board::{Shared, name_words};
use call::CheckedCall;
pub use call::{CallWord, CollAttr, CollCall, CollReq, FI_NOOP, FI_VOID, Role, query};
use drive::Stored;

use super::ep::SIDE;
use super::peer::Peer;
use super::{AvId, BindFlags, CqId, EpAttr, EpId, Node, Objects, Todo};
use crate::error::{Error, Result};
use crate::flags::Caps;
use crate::idx::{CallIdx, EpIdx, GroupIdx, PeerIdx, UnexpectedIdx};
use crate::node::{Control, Eps};
use crate::proto::coll::Shape;
use crate::proto::coll::plan::{Force, Layout, MODEL_WORDS, Model, Plan, choose};
use crate::proto::coll::program::Program;
use crate::proto::coll::run::Run;
use crate::slab::{Handle, Slab};
use crate::types::{EpAddr, FiAddr, Instant, Tenant};

pub use crate::proto::coll::Kind;

/// Bytes of a block at most: what one member contributes to or takes from a call, or sends to one
/// other.
pub const BLOCK_MAX: u64 = 1 << 32;

/// Members of a group at most.
pub const MEMBERS_MAX: usize = 1 << 20;

/// Groups of a node at most.
const GROUPS_MAX: usize = 1 << 16;

/// Calls under way in a node at most.
const OPS_MAX: usize = 1 << 16;

/// A group of a [`Node`]: what `fi_mc_addr` stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupId(pub(crate) Handle<GroupIdx>);

impl GroupId {
    /// As a number that [`from_bits`](Self::from_bits) takes back.
    pub const fn to_bits(self) -> u64 {
        (self.0.generation() as u64) << 32 | self.0.idx().get() as u64
    }

    /// The inverse of [`to_bits`](Self::to_bits). A number that names no group is found out when
    /// it is used.
    pub const fn from_bits(bits: u64) -> Self {
        Self(Handle::from_parts(GroupIdx::of(bits as u32), (bits >> 32) as u32))
    }
}

/// Who comes together and how.
#[derive(Clone, Debug)]
pub struct JoinReq {
    /// The members, in the order that blocks have. Looked up in the endpoint's address vector.
    pub members: Vec<FiAddr>,
    /// The group that they are part of, if any.
    pub parent: Option<GroupId>,
    /// How the group gets its name.
    pub model: JoinModel,
    /// Comes back in the event.
    pub context: u64,
}

/// How a group gets its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JoinModel {
    /// The application gives it, the same at all members and different for every two groups of the
    /// same members: nothing is sent (application-managed). The same once more stands for another
    /// group, unless a member has left 65,536 others since.
    Key(u64),
    /// The members agree on it (provider-managed): a collective of its own. Joins of the same
    /// members with different keys are not taken for one another, in whatever order each makes them
    /// (62 bits of hash tell them apart); those with the same key meet in the order in which they
    /// are made.
    Collective(u64),
}

/// The outcome of a join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JoinEvent {
    /// The endpoint that joined.
    pub ep: EpId,
    /// The group. Closed already if the join failed.
    pub group: GroupId,
    /// That of the request.
    pub context: u64,
    /// Why there is no group.
    pub result: Result<()>,
}

/// What a node has of groups and calls.
#[derive(Debug)]
pub struct Coll {
    pub(super) cq: Option<CqId>,
    av: Option<AvId>,
    /// Collective sides by the number of their endpoint.
    sides: HashMap<u16, EpId>,
    groups: Slab<Group, (), GroupIdx>,
    ops: Slab<Op, (), CallIdx>,
    /// Calls that may go on.
    work: VecDeque<CallIdx>,
    /// Peers whose session has ended, and why.
    pub(super) lost: Vec<(PeerIdx, Error)>,
    /// Messages of joins that came in the next session with such a peer, in the same burst.
    pub(super) fresh: Vec<(PeerIdx, UnexpectedIdx, u32)>,
    /// Messages that were stored since the last turn, with the generations of their slots.
    pub(super) arrived: Vec<(UnexpectedIdx, u32)>,
    /// Entries of the queue that were taken, and of these that were looked at, in all.
    taken: u64,
    looked_at: u64,
    /// Messages of joins that came behind entries which are to be looked at, with the generations
    /// of their slots and the number of the last of these entries.
    behind: Vec<(UnexpectedIdx, u32, u64)>,
    events: VecDeque<JoinEvent>,
    /// Members of groups in the hidden address vector.
    named: HashMap<EpAddr, (FiAddr, u32)>,
    /// How often each member here has joined each application-managed group, and how many of these
    /// it has not left.
    joined: HashMap<(u64, u32), (u32, u32)>,
    /// Application-managed groups as they were left, and how often they had been joined then,
    /// oldest first, [`JOINED_MAX`] at most: the older ones are forgotten.
    counted: VecDeque<JoinCounts>,
    /// Names of groups that were closed here or given up before they were joined, each with the
    /// side that was or would be in it, oldest first.
    over: VecDeque<(EpIdx, u32, Error)>,
    /// Members that left a group before it was joined here, oldest first.
    early: VecDeque<EarlyLeave>,
    /// What calls ran on, and memory, to be used again.
    spare: Vec<(Box<Run>, Vec<PeerIdx>)>,
    scratch: Vec<Scratch>,
    /// A post was refused for want of room: it is tried again.
    stalled: bool,
    /// Sides that lack a receive for control messages for want of room.
    deaf: Vec<EpId>,
    /// Control messages that wait for room: (side, to, tag, data).
    owed: VecDeque<(EpId, FiAddr, u64, u64)>,
    /// Members of groups that were left, under whose names some of `owed` wait.
    left: Vec<Member>,
    /// When the first join under way ends by time.
    deadline: Option<Instant>,
    /// When members that are waited for are asked next, while somebody waits.
    asks_at: Option<Instant>,
    /// Groups with calls through their boards.
    on_boards: Vec<GroupIdx>,
    /// What messages cost by the node's port.
    model: Model,
}

impl Coll {
    /// Nothing yet, of a node with such a port, with the operator's choice of algorithms.
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
            fresh: Vec::new(),
            arrived: Vec::new(),
            taken: 0,
            looked_at: 0,
            behind: Vec::new(),
            events: VecDeque::new(),
            named: HashMap::new(),
            joined: HashMap::new(),
            counted: VecDeque::new(),
            over: VecDeque::new(),
            early: VecDeque::new(),
            spare: Vec::new(),
            scratch: Vec::new(),
            stalled: false,
            deaf: Vec::new(),
            owed: VecDeque::new(),
            left: Vec::new(),
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
            GroupState::Over(err) => Err(err),
        }
    }

    fn plan_for(&mut self, g: GroupIdx, shape: &Shape) -> Plan {
        // Only what all members have alike decides, so only that is compared.
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

    /// Makes the record of a call. Nothing is posted yet.
    fn begin_op(
        &mut self,
        stored: &Stored<'_>,
        (g, shape): (GroupIdx, Shape),
        reduce: Option<(AtomicOp, Datatype)>,
        (input, out): (IoBuf, IoBuf),
        user: Option<User>,
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
            user,
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
        self.drop_foreign_early(stored, o);
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

    /// The outcome of a join that has ended since the last call.
    pub fn event(&mut self) -> Option<JoinEvent> {
        self.events.pop_front()
    }

    /// Why a group is of no more use, if it is.
    ///
    /// # Errors
    /// [`Error::BadFd`]: it was closed. [`Error::OpBadState`]: the join goes on. Else the reason.
    pub fn check(&self, group: GroupId) -> Result<()> {
        match self.groups.by_handle(group.0).ok_or(Error::BadFd)?.state {
            GroupState::Ready => Ok(()),
            GroupState::Joining(_) => Err(Error::OpBadState),
            GroupState::Over(err) => Err(err),
        }
    }

    /// Whether a join has not ended, or its event was not read.
    pub fn is_joining(&self) -> bool {
        let joining = |group: &Group| matches!(group.state, GroupState::Joining(_));
        self.has_event() || self.groups.iter().any(|(_, group)| joining(group))
    }

    /// Application-managed groups whose joins are remembered.
    #[cfg(test)]
    pub(super) fn counted_joins(&self) -> usize {
        self.joined.len()
    }

    /// Member `me` has left an application-managed group.
    fn note_left(&mut self, lives: u64, me: u32) {
        let Some((times, open)) = self.joined.get_mut(&(lives, me)) else { return };
        *open -= 1;
        self.counted.push_back(((lives, me), *times));
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

    /// Whether endpoint `e` is the collective side of one.
    pub(super) fn is_side(&self, eps: &Eps, e: EpIdx) -> bool {
        let cq = eps.get(e).map(|ep| ep.tx_cq);
        cq.is_some() && cq == self.cq.map(|cq| cq.0.idx())
    }

    /// The collective side of an endpoint that may use it.
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

/// How often a member here has joined an application-managed group.
type JoinCounts = ((u64, u32), u32);

/// A member of a group that has left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct EarlyLeave {
    /// The side here that is to be in the group.
    side: EpIdx,
    gid: u32,
    /// The member and the number of its side.
    station: Station,
    ep: u16,
}

/// A member of a group.
#[derive(Clone, Copy, Debug)]
struct Member {
    /// Its address in the hidden vector.
    side: FiAddr,
    peer: PeerIdx,
    ep: u16,
    /// It died or left: nothing more will come from it.
    gone: Option<Error>,
    /// An ASK to it has not ended.
    is_asked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GroupState {
    /// Until then.
    Joining(Instant),
    Ready,
    /// Every later call is refused with this.
    Over(Error),
}

#[derive(Debug)]
struct Group {
    ep: EpId,
    side: EpId,
    members: Vec<Member>,
    /// No member is gone.
    is_whole: bool,
    /// Address of the application to rank, in the order of addresses.
    ranks: Vec<(FiAddr, u32)>,
    me: u32,
    /// What an application-managed group is counted by.
    lives: Option<u64>,
    /// Its name in every tag.
    gid: u32,
    /// Its members have agreed on its name, so that all of them have begun to join it.
    is_agreed: bool,
    /// Who its members are, in every message.
    hash: u32,
    /// Number of the next call.
    seq: u16,
    state: GroupState,
    /// Calls under way.
    ops: u32,
    context: u64,
    plans: Vec<(Shape, Plan)>,
    layout: Layout,
    /// What all members choose with: the same before they have agreed on another one.
    model: Model,
    shared: Shared,
    /// The call that was checked last.
    checked: CheckedCall,
}

impl Group {
    fn rank_of(&self, root: FiAddr) -> Result<u32> {
        let at = self.ranks.binary_search_by_key(&root, |r| r.0);
        Ok(self.ranks[at.map_err(|_| Error::Invalid("root_addr is no member of the group"))?].1)
    }
}

/// A call under way.
#[derive(Debug)]
struct Op {
    group: GroupIdx,
    seq: u16,
    /// What must be in every message of the call.
    mark: u64,
    /// `None` for the exchange of a join.
    user: Option<User>,
    reduce: Option<(AtomicOp, Datatype)>,
    input: IoBuf,
    out: IoBuf,
    scratch: Option<Scratch>,
    /// What a join exchanges, which `input` and `out` then name.
    words: Option<Scratch>,
    run: Box<Run>,
    /// Stands in the queue of those that may go on.
    queued: bool,
    /// Peers that something is to come from, once per receive.
    waits: Vec<PeerIdx>,
    /// Sends that have not ended.
    sends: u32,
}

/// Who called.
#[derive(Clone, Copy, Debug)]
struct User {
    context: u64,
    wanted: bool,
}

/// Bit of the names under which groups agree on their names. The same members have the same such
/// name every time, so it is never over for good.
const JOIN: u32 = 1 << 31;

/// Words of the exchange of a join before the names of slots: the group's name; the hash of what
/// all must have alike, and its complement; the layout that a member sees, and its complement; the
/// numbers of its cost model.
const JOIN_WORDS: usize = MODEL_WORD + MODEL_WORDS;

/// The first of the two words of the layout.
const LAYOUT_WORD: usize = 3;

/// The first of the numbers of the model.
const MODEL_WORD: usize = LAYOUT_WORD + 2;

/// Application-managed groups that were left whose joins are remembered: some 4 MB. A later group
/// of the same key and members would get the name of the first.
const JOINED_MAX: usize = 1 << 16;

/// Distinct calls of a group whose algorithm is remembered.
const PLANS: usize = 8;

/// The hash of everything that members must agree on.
fn mix(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

impl Node {
    /// Gives an endpoint that is being enabled its collective side, if it may use one.
    pub(super) fn coll_enable(&mut self, ep: EpId) -> Result<()> {
        let e = self.eps.by_handle(ep.0).ok_or(Error::BadFd)?;
        let number = e.number;
        // A number whose side's number somebody has taken by name has none.
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
            // Who is not known by a group yet may have something to say of a join.
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

    /// Joins a group. How it ends is told by `Coll::event`.
    ///
    /// # Errors
    /// Nothing was joined, nothing will be told:
    /// - [`Error::BadFd`], [`Error::OpBadState`], [`Error::OpNotSupp`]: the endpoint was closed, is
    ///   not enabled, or has no `FI_COLLECTIVE`.
    /// - [`Error::Invalid`]: the set is empty or too large, names something that is not in the
    ///   address vector, or an endpoint twice; or this endpoint is not in it; or a member is not in
    ///   the parent.
    /// - [`Error::ConnReset`]: the address of a member names an earlier life of it.
    /// - [`Error::NoMem`]: too many groups or peers.
    pub fn coll_join(&mut self, now: Instant, ep: EpId, req: &JoinReq) -> Result<GroupId> {
        let side = self.coll.side_of(&self.eps, ep)?;
        let parent = self.coll.check_parent(ep, req.parent)?;
        let mut addrs = self.objects().member_addrs(ep, req)?;
        if self.coll.groups.is_full() {
            return Err(Error::NoMem);
        }
        let own = self.addr_of(ep)?;
        let me = addrs.iter().position(|a| (a.station, a.ep) == (own.station, own.ep));
        let me = me.ok_or(Error::Invalid("the endpoint is not in its address vector set"))? as u32;
        addrs[me as usize].incarnation = own.incarnation;
        let (gid, hash, counted) = self.group_names((&addrs, me), parent, req.model)?;
        let members = self.name_members(now, &addrs)?;
        // Sessions that have ended are not the new group's: they were with an earlier life of a
        // member, or with the peer whose record it has now.
        self.take_lost(now);
        let mut ranks: Vec<_> = (0..).zip(&req.members).map(|(rank, &a)| (a, rank)).collect();
        ranks.sort_unstable();
        let until = now + self.settings.join_ns;
        let is_collective = matches!(req.model, JoinModel::Collective(_));
        let managed = is_collective && members.len() > 1;
        let state = if managed { GroupState::Joining(until) } else { GroupState::Ready };
        let over = self.coll.ended_group_error(side, gid).filter(|_| !managed);
        let state = over.map_or(state, GroupState::Over);
        let group = Group {
            ep,
            side,
            members,
            is_whole: true,
            ranks,
            me,
            lives: counted.map(|((lives, _), _)| lives),
            gid,
            is_agreed: managed,
            hash,
            seq: 0,
            state,
            ops: 0,
            context: req.context,
            plans: Vec::new(),
            layout: Layout::FLAT,
            model: Model { force: self.coll.model.force, ..Model::MEMORY },
            checked: CheckedCall::NONE,
            shared: if managed { Shared::Wanted } else { Shared::No },
        };
        let g = self.coll.groups.alloc(group).ok_or(Error::NoMem)?;
        let id = GroupId(self.coll.groups.handle(g));
        if let Some((group, times)) = counted {
            let (joins, open) = self.coll.joined.entry(group).or_default();
            (*joins, *open) = (times, *open + 1);
        }
        if managed {
            if let Err(err) = self.begin_join(g) {
                let group = self.coll.groups.free(g);
                self.objects().unname_members(&group.members);
                return Err(err);
            }
            self.coll.deadline = Some(self.coll.deadline.map_or(until, |d| d.min(until)));
        } else {
            let context = req.context;
            self.coll.events.push_back(JoinEvent { ep, group: id, context, result: Ok(()) });
            self.take_early(now, g);
        }
        Ok(id)
    }

    /// The name of a group until it has agreed on another, the hash of its members, and what to
    /// count once member `me` of an application-managed group has joined it.
    fn group_names(
        &mut self,
        (addrs, me): (&[EpAddr], u32),
        parent: u64,
        model: JoinModel,
    ) -> Result<(u32, u32, Option<JoinCounts>)> {
        let mut hash = mix(parent, self.coll.model.force as u64);
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
                // Lives of the members, so that a group that lost one is never taken for the one
                // that its successor joins; and how often, so that neither is a group that ended.
                let mut lives = mix(hash, key);
                for a in addrs {
                    lives = mix(lives, self.control().life_of(a)?);
                }
                let times = self.coll.joined.get(&(lives, me)).map_or(0, |&(times, _)| times) + 1;
                counted = Some(((lives, me), times));
                mix(lives, u64::from(times))
            }
        };
        let gid = (gid >> 32) as u32 & !JOIN;
        let join = if matches!(model, JoinModel::Collective(_)) { JOIN } else { 0 };
        Ok((gid | join, (hash >> 32) as u32, counted))
    }

    /// Inserts the members' collective sides in the hidden address vector.
    fn name_members(&mut self, now: Instant, addrs: &[EpAddr]) -> Result<Vec<Member>> {
        let av = self.coll.av.ok_or(Error::OpBadState)?;
        let mut members = Vec::with_capacity(addrs.len());
        for addr in addrs {
            let addr = EpAddr { ep: addr.ep ^ SIDE, ..*addr };
            if self.control().is_of_other_life(&addr) {
                self.objects().unname_members(&members);
                return Err(Error::ConnReset);
            }
            let side = match self.coll.named.get_mut(&addr) {
                Some((side, refs)) => {
                    *refs += 1;
                    *side
                }
                None => match self.sessions().av_insert(now, av, addr) {
                    Ok(side) => {
                        self.coll.named.insert(addr, (side, 1));
                        side
                    }
                    Err(err) => {
                        self.objects().unname_members(&members);
                        return Err(err);
                    }
                },
            };
            let peer =
                self.avs[av.0.idx()].av.lookup(side).map_or(PeerIdx::NONE, |entry| entry.peer);
            members.push(Member { side, peer, ep: addr.ep, gone: None, is_asked: false });
        }
        Ok(members)
    }

    /// The members agree on a name that the first of them draws, and compare what they are.
    fn begin_join(&mut self, g: GroupIdx) -> Result<()> {
        let drawn = self.openings.random() >> 32 & u64::from(!JOIN) | 1;
        let group = &self.coll.groups[g];
        let hash = u64::from(group.hash);
        let name = if group.me == 0 { drawn } else { 0 };
        let count = JOIN_WORDS + name_words(group.members.len());
        let scratch = Scratch::new(count * 8).ok_or(Error::NoMem)?;
        // Of the layout nothing is known yet, nor which numbers are this member's.
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
        let Self { eps, peers, unexpected, coll, .. } = self;
        let stored = Stored { eps, peers, unexpected };
        let o = coll.begin_op(&stored, (g, shape), reduce, (input, out), None)?;
        self.coll.ops[o].words = Some(scratch);
        self.coll.queue_op(o);
        Ok(())
    }

    /// Leaves a group. Calls under way end with [`Error::Canceled`] here, and with an error at
    /// every member that still needs this one.
    ///
    /// # Errors
    /// [`Error::BadFd`]: it was closed.
    pub fn coll_close(&mut self, now: Instant, group: GroupId) -> Result<()> {
        self.coll.groups.by_handle(group.0).ok_or(Error::BadFd)?;
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
    /// Whether `addr` names another life of its peer than the present one. To insert it would end
    /// the session with that one. What an OPEN only claimed is not held against an address.
    fn is_of_other_life(&self, addr: &EpAddr) -> bool {
        let p = self.by_station.get(self.peers, addr.station, Tenant::NONE);
        let other = |peer: &Peer| peer.inc != 0 && peer.inc != addr.incarnation;
        let peer = p.map(|p| &self.peers[p]).filter(|peer| !peer.is_life_claimed);
        addr.incarnation != 0 && peer.is_some_and(other)
    }

    /// The incarnation of a member, which others know as well.
    fn life_of(&self, addr: &EpAddr) -> Result<u64> {
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

/// The operator's choice among the algorithms.
pub type CollForce = Force;
