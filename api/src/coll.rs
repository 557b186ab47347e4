//! Collectives: address vector sets, groups, and the nine operations of fi_collective(3), safe
//! API; the raw one is in [`crate::raw`].
//!
//! A set is an ordered list of members of an address vector; a group is made of it by
//! [`join_collective`](EpCommon::join_collective), and the calls name the group. All members make
//! the same calls on a group in the same order; several may be under way. docs/collectives.md
//! describes the calls, which of them can be in place, and what happens when a member dies.
//!
//! All calls return at once. [`crate::msg`] lists the errors of a refused call; in addition:
//! - [`Error::OpNotSupp`]: [`Domain::query_collective`] does not support the combination, or the
//!   endpoint lacks `FI_COLLECTIVE`;
//! - [`Error::MsgTooLong`]: more elements than [`Domain::query_collective`] allows;
//! - [`Error::Invalid`]: a root that is no member, a role that contradicts the root, a buffer that
//!   is too short, or source and result that overlap;
//! - [`Error::OpBadState`]: the join has not ended;
//! - any other: the group has failed for this reason and cannot be used any more.

use std::sync::{Arc, Weak};

use barewire_dataplane::node::{
    CollCall, CollReq, CollWord, GroupId, JoinModel, JoinReq, Node, query_collective,
};
use barewire_dataplane::poll::Engine;
use barewire_dataplane::types::FiAddr;
use barewire_driver::hint::cold;
use barewire_driver::mem::Span;

pub use barewire_dataplane::node::{CollAttr, CollKind, FI_NOOP, FI_VOID, Role};

use crate::atomic::{AtomicOp, Datatype};
use crate::auth_check::needs_one_key;
use crate::av::{Av, AvInner, FI_ADDR_NOTAVAIL};
use crate::buf::{Buf, Bufs, PostError, PostResult};
use crate::domain::Domain;
use crate::ep::{Endpoint, EpCommon};
use crate::eq::EqInner;
pub use crate::eq::FI_JOIN_COMPLETE;
use crate::errno::{Error, Result};
use crate::flags::OpFlags;
use crate::inner::DomainRef;

/// `FI_UNIVERSE`, a flag of [`AvSetAttr`]: all addresses of the vector.
pub const FI_UNIVERSE: u64 = 1 << 57;

/// `FI_SEND` and `FI_RECV`, flags of a broadcast and of a join.
pub const FI_SEND: u64 = 1 << 11;
/// See [`FI_SEND`].
pub const FI_RECV: u64 = 1 << 10;

/// Bits that tell the address of a group ([`Mc::addr`]) and of a set ([`AvSet::addr`]) from an
/// index of an address vector.
const GROUP: u64 = 1 << 62;
const SET: u64 = 1 << 61;

/// Attributes of an address vector set (`struct fi_av_set_attr`).
#[derive(Clone, Copy, Debug)]
pub struct AvSetAttr {
    /// Members expected; 0 if not known.
    pub count: usize,
    /// First address of the range; [`FI_ADDR_NOTAVAIL`] with the same end for an empty set.
    pub start_addr: FiAddr,
    /// Last address of the range.
    pub end_addr: FiAddr,
    /// Distance from one member to the next; 0 means 1.
    pub stride: u64,
    /// Key of groups that are made of the set without communication between the members; the same
    /// at all members. `None` if the provider negotiates one.
    pub comm_key: Option<u64>,
    /// [`FI_UNIVERSE`], and `FI_BARRIER_SET` (`1 << 40`) to `FI_GATHER_SET`, the collectives that
    /// the set is for. All collectives are possible in any case.
    pub flags: u64,
}

impl Default for AvSetAttr {
    fn default() -> Self {
        let (start_addr, end_addr) = (FI_ADDR_NOTAVAIL, FI_ADDR_NOTAVAIL);
        Self { count: 0, start_addr, end_addr, stride: 1, comm_key: None, flags: 0 }
    }
}

/// Bits of `FI_BARRIER_SET` to `FI_GATHER_SET`.
const KINDS: u64 = ((1 << CollKind::ALL.len()) - 1) << 40;

/// An ordered set of addresses (`struct fid_av_set`).
///
/// The members keep their order when one is removed and in an intersection or difference. A union
/// appends the missing members in the order of the other set.
pub struct AvSet {
    av: Arc<AvInner>,
    members: Vec<FiAddr>,
    comm_key: Option<u64>,
    number: u64,
}

impl Av {
    /// Makes a set of addresses of this vector.
    ///
    /// # Errors
    /// - [`Error::Invalid`]: the end of the range is before its start, or an address of the range
    ///   is not in the vector.
    /// - [`Error::BadFlags`]: unknown flags.
    /// - [`Error::OpNotSupp`]: the domain's keys are those of address vectors.
    ///
    /// Source: fi_av_set(3).
    #[doc(alias = "fi_av_set")]
    pub fn av_set(&self, attr: &AvSetAttr) -> Result<AvSet> {
        if attr.flags & !(FI_UNIVERSE | KINDS) != 0 {
            return Err(Error::BadFlags);
        }
        let mut core = self.0.dom.enter_control()?;
        needs_one_key(&mut core)?;
        let node = core.node();
        let set = |addr: &FiAddr| node.objects().av_lookup(self.0.id, *addr).is_ok();
        let empty = (attr.start_addr, attr.end_addr) == (FI_ADDR_NOTAVAIL, FI_ADDR_NOTAVAIL);
        let members: Vec<FiAddr> = if attr.flags & FI_UNIVERSE != 0 {
            node.avs.addrs(self.0.id)?
        } else if empty {
            Vec::new()
        } else {
            if attr.start_addr > attr.end_addr || attr.end_addr >= SET {
                return Err(Error::Invalid("start_addr and end_addr: not a range"));
            }
            let stride = usize::try_from(attr.stride.max(1)).unwrap_or(usize::MAX);
            let range = (attr.start_addr..=attr.end_addr).step_by(stride);
            let members: Vec<FiAddr> = range.take_while(set).collect();
            let all = (attr.end_addr - attr.start_addr) / stride as u64 + 1;
            if members.len() as u64 != all {
                return Err(Error::Invalid(
                    "start_addr and end_addr: an address of the range is not in the vector",
                ));
            }
            members
        };
        let number = self.0.dom.next_set();
        Ok(AvSet { av: Arc::clone(&self.0), members, comm_key: attr.comm_key, number })
    }
}

impl AvSet {
    fn same_av(&self, other: &Self) -> Result<()> {
        let same = Arc::ptr_eq(&self.av, &other.av);
        if same { Ok(()) } else { Err(Error::Invalid("the sets are of two address vectors")) }
    }

    /// Appends the members of `other` that are missing, in their order.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the sets are of two vectors.
    #[doc(alias = "fi_av_set_union")]
    pub fn union(&mut self, other: &Self) -> Result<()> {
        self.same_av(other)?;
        let known: std::collections::HashSet<FiAddr> = self.members.iter().copied().collect();
        self.members.extend(other.members.iter().filter(|m| !known.contains(m)));
        Ok(())
    }

    /// Keeps the members that are in `other` as well.
    ///
    /// # Errors
    /// As [`union`](Self::union).
    #[doc(alias = "fi_av_set_intersect")]
    pub fn intersect(&mut self, other: &Self) -> Result<()> {
        self.same_av(other)?;
        let known: std::collections::HashSet<FiAddr> = other.members.iter().copied().collect();
        self.members.retain(|m| known.contains(m));
        Ok(())
    }

    /// Removes the members that are in `other`.
    ///
    /// # Errors
    /// As [`union`](Self::union).
    #[doc(alias = "fi_av_set_diff")]
    pub fn diff(&mut self, other: &Self) -> Result<()> {
        self.same_av(other)?;
        let known: std::collections::HashSet<FiAddr> = other.members.iter().copied().collect();
        self.members.retain(|m| !known.contains(m));
        Ok(())
    }

    /// Appends a member.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the address is already a member, or is not in the address vector.
    #[doc(alias = "fi_av_set_insert")]
    pub fn insert(&mut self, addr: FiAddr) -> Result<()> {
        self.av.dom.enter_control()?.node().objects().av_lookup(self.av.id, addr)?;
        if self.members.contains(&addr) {
            return Err(Error::Invalid("the address is a member already"));
        }
        self.members.push(addr);
        Ok(())
    }

    /// Removes a member.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the address is no member.
    #[doc(alias = "fi_av_set_remove")]
    pub fn remove(&mut self, addr: FiAddr) -> Result<()> {
        let at = self.members.iter().position(|&m| m == addr);
        self.members.remove(at.ok_or(Error::Invalid("the address is no member"))?);
        Ok(())
    }

    /// The address that [`join_collective`](EpCommon::join_collective) takes for a group that the
    /// provider manages.
    #[doc(alias = "fi_av_set_addr")]
    pub fn addr(&self) -> FiAddr {
        SET | self.number
    }

    /// Another set with the same members.
    pub fn duplicate(&self) -> Self {
        let (av, members) = (Arc::clone(&self.av), self.members.clone());
        let number = self.av.dom.next_set();
        Self { av, members, comm_key: self.comm_key, number }
    }

    /// The members in their order.
    pub fn members(&self) -> &[FiAddr] {
        &self.members
    }

    /// Closes the set. Groups that were made of it go on.
    #[doc(alias = "fi_close")]
    pub fn close(self) {}
}

/// A group, joined or being joined (`struct fid_mc`). Dropping it leaves the group.
pub struct Mc {
    dom: DomainRef,
    id: GroupId,
    /// Fid of its events (0: none), and their event queue.
    fid: u64,
    eq: Weak<EqInner>,
}

impl Mc {
    /// The address that the calls take.
    #[doc(alias = "fi_mc_addr")]
    pub fn addr(&self) -> FiAddr {
        GROUP | self.id.to_bits()
    }

    /// Whether the group can be used.
    ///
    /// # Errors
    /// [`Error::OpBadState`]: the join has not ended. Else the error by which the group failed.
    pub fn check(&self) -> Result<()> {
        self.dom.enter_control()?.node().coll.check(self.id)
    }

    /// Leaves the group. Calls under way end with [`Error::Canceled`] here and with an error at the
    /// other members.
    #[doc(alias = "fi_close")]
    pub fn close(self) {}
}

impl Drop for Mc {
    fn drop(&mut self) {
        let Ok(mut core) = self.dom.lock.enter_to_close() else { return };
        // A later event must not have the fid of a closed group.
        for (_, fid) in core.join_fids.iter_mut().filter(|(group, _)| *group == self.id) {
            *fid = 0;
        }
        if let Some(eq) = self.eq.upgrade() {
            eq.forget(self.fid);
        }
        let now = Engine::now();
        // A group is also closed with its endpoint.
        let _ = core.node().collectives().coll_close(now, self.id);
        core.engine.after_post(now);
        core.posted(&self.dom);
    }
}

/// The group that `addr` names. The node checks that it is a group of the endpoint.
pub(crate) fn group_of(addr: FiAddr) -> Result<GroupId> {
    if addr & (GROUP | SET) != GROUP || addr >> 63 != 0 {
        return Err(Error::Invalid("coll_addr is not a group"));
    }
    Ok(GroupId::from_bits(addr & !GROUP))
}

impl EpCommon {
    /// Joins the group of the members of `set`, of which this endpoint is one.
    ///
    /// With [`FI_ADDR_NOTAVAIL`] as `coll_addr` the application manages the group: nothing is sent,
    /// and [`AvSetAttr::comm_key`] must tell groups of the same members apart. With [`AvSet::addr`]
    /// the members agree on the group: all of them have to join. With [`Mc::addr`] they agree as
    /// well, and the group is a part of that group. Concurrent joins of the same members are
    /// matched by `comm_key` if their keys differ, else by their order.
    ///
    /// The bound event queue gets [`FI_JOIN_COMPLETE`] with `context` (8 bytes, little-endian), or
    /// an error event with it if a member dies, disagrees or does not join within 60 s.
    ///
    /// # Errors
    /// - [`Error::NoEq`]: no event queue is bound.
    /// - [`Error::Invalid`]: the set is empty, is of an address vector that is not bound to the
    ///   endpoint, lacks this endpoint, or is no part of the parent; or `coll_addr` is none of the
    ///   three.
    /// - [`Error::BadFlags`]: other flags than [`FI_SEND`] and [`FI_RECV`], which change nothing.
    /// - [`Error::OpNotSupp`], [`Error::OpBadState`], [`Error::NoMem`].
    ///
    /// Source: fi_collective(3), "fi_join_collective".
    #[doc(alias = "fi_join_collective")]
    pub fn join_collective(
        &self,
        coll_addr: FiAddr,
        set: &AvSet,
        flags: u64,
        context: u64,
    ) -> Result<Mc> {
        self.join_with(coll_addr, set, flags, context, |_| None)
    }

    /// As [`join_collective`](Self::join_collective), for the C provider. `named` gets the address
    /// of the group before an event can be written, and returns the fid of the event: a `struct
    /// fi_eq_entry` of 24 bytes with this fid, the context and 0. An error event has this fid as
    /// well. Events that are unread when the group is closed are dropped.
    ///
    /// # Errors
    /// As there.
    pub fn join_with(
        &self,
        coll_addr: FiAddr,
        set: &AvSet,
        flags: u64,
        context: u64,
        named: impl FnOnce(FiAddr) -> Option<u64>,
    ) -> Result<Mc> {
        const FI_COLLECTIVE: u64 = 1 << 6;
        if flags & !(FI_SEND | FI_RECV | FI_COLLECTIVE) != 0 {
            return Err(Error::BadFlags);
        }
        let eq = Arc::downgrade(&self.eq().ok_or(Error::NoEq)?);
        if !self.uses_av(&set.av) {
            return Err(Error::Invalid("the set is of another address vector"));
        }
        let key = set.comm_key.unwrap_or(0);
        let (model, parent) = if coll_addr == FI_ADDR_NOTAVAIL {
            (JoinModel::Key(key), None)
        } else if coll_addr == set.addr() {
            (JoinModel::Collective(key), None)
        } else {
            (JoinModel::Collective(key), Some(group_of(coll_addr)?))
        };
        let members = set.members.clone();
        let req = JoinReq { members, parent, model, context };
        let mut core = self.dom.enter_control()?;
        let now = Engine::now();
        let id = core.node().collectives().coll_join(now, self.id, &req)?;
        if !std::mem::replace(&mut core.joins, true) {
            core.watch.add_watcher();
        }
        let fid = named(GROUP | id.to_bits());
        core.join_fids.extend(fid.map(|fid| (id, fid)));
        core.engine.after_post(now);
        core.poll_joins(&self.dom);
        core.posted(&self.dom);
        drop(core);
        Ok(Mc { dom: self.dom.clone(), id, fid: fid.unwrap_or(0), eq })
    }

    /// Posts a call to the node. `lend` gets the least lengths of source and result and returns
    /// their memory.
    #[inline]
    pub(crate) fn post_collective(
        &self,
        core: &mut crate::inner::Core,
        req: &CollReq,
        lend: impl FnOnce(usize, usize) -> (Span, Span),
    ) -> Result<()> {
        core.node().coll_post(self.id, req, lend)?;
        core.engine.after_call();
        Ok(())
    }
}

impl Domain {
    /// Limits of a collective: most elements of a block, bytes of an element, most members. `op`
    /// and `datatype` are libfabric's numbers; a barrier has [`FI_NOOP`] and [`FI_VOID`], and a
    /// collective that does not reduce may have any operation. `flags` is 0, or `FI_SCATTER` (7)
    /// with `coll` [`CollKind::Reduce`] or [`CollKind::ReduceScatter`] for a reduce-scatter.
    ///
    /// # Errors
    /// [`Error::OpNotSupp`]: no call has the combination. [`Error::BadFlags`].
    #[doc(alias = "fi_query_collective")]
    pub fn query_collective(
        &self,
        coll: CollKind,
        op: u32,
        datatype: u32,
        flags: u64,
    ) -> Result<CollAttr> {
        query(coll, op, datatype, flags)
    }
}

fn query(coll: CollKind, op: u32, datatype: u32, flags: u64) -> Result<CollAttr> {
    let coll = match (flags, coll) {
        (0, coll) => coll,
        (7, CollKind::Reduce | CollKind::ReduceScatter) => CollKind::ReduceScatter,
        _ => return Err(Error::BadFlags),
    };
    let ty = if datatype == FI_VOID { None } else { Some(known(datatype)?) };
    let op = match op {
        FI_NOOP if !coll.reduces() => None,
        _ if !coll.reduces() && coll != CollKind::Barrier => None,
        other => Some(known(other)?),
    };
    query_collective(coll, op, ty)
}

/// An operation or a datatype by libfabric's number.
fn known<T: TryFrom<u32>>(number: u32) -> Result<T> {
    number.try_into().map_err(|_| Error::OpNotSupp("no such operation or datatype"))
}

/// The role and the flags of a call of the raw API. `default` stands in for calls without flags.
pub(crate) fn role_of(
    kind: CollKind,
    flags: u64,
    default: OpFlags,
) -> Result<(Option<Role>, OpFlags)> {
    let role = match flags & (FI_SEND | FI_RECV) {
        0 => None,
        named => Some(cold(named_role(kind, named)?)),
    };
    let rest = OpFlags::from_bits(flags & !(FI_SEND | FI_RECV)).ok_or(Error::BadFlags)?;
    Ok((role, rest | default & OpFlags::COMPLETION))
}

#[inline(never)]
fn named_role(kind: CollKind, named: u64) -> Result<Role> {
    match (kind, named) {
        (CollKind::Broadcast, FI_SEND) => Ok(Role::Send),
        (CollKind::Broadcast, FI_RECV) => Ok(Role::Recv),
        _ => Err(Error::BadFlags),
    }
}

/// One call of the safe API. The completion gives back both buffers, the source first.
struct Call {
    kind: CollKind,
    source: Buf,
    result: Buf,
    /// Elements of a block.
    count: usize,
    ty: Option<Datatype>,
    op: Option<AtomicOp>,
    group: FiAddr,
    root: FiAddr,
    role: Option<Role>,
    context: u64,
    flags: OpFlags,
}

impl Endpoint {
    fn collective(&self, call: Call) -> PostResult {
        let Call { kind, source, result, count, ty, op, group, root, role, context, flags } = call;
        let split = source.len();
        let bufs = Bufs::Many(vec![source, result]);
        let group = match group_of(group) {
            Ok(group) => group,
            Err(error) => return Err(PostError { error, bufs }),
        };
        let mut core = match self.dom.enter() {
            Ok(core) => core,
            Err(error) => return Err(PostError { error, bufs }),
        };
        let how = self.tx_kind(flags);
        let (key, io) = core.ops.lend(self.object, how, context, bufs)?;
        let one = |at, len| io.share(at, len).take_one().expect("a buffer is one piece");
        let result = one(split, io.len() - split);
        let req = CollReq {
            call: CollCall { what: CollWord::new(kind, op, ty), group, count: count as u64, root },
            role,
            context: key.0,
            flags: flags | OpFlags::COMPLETION,
        };
        let source = match kind {
            CollKind::Broadcast => Span::EMPTY,
            // In place: the source is where the result goes.
            _ if split == 0 => result.again(),
            _ => one(0, split),
        };
        let posted = self.post_collective(&mut core, &req, |_, _| (source, result));
        match posted {
            Ok(()) => {
                core.posted(&self.dom);
                Ok(())
            }
            Err(error) => Err(core.ops.refuse(key, error)),
        }
    }

    fn call(&self, kind: CollKind, group: FiAddr, context: u64) -> Call {
        Call {
            kind,
            source: Buf::default(),
            result: Buf::default(),
            count: 0,
            ty: None,
            op: None,
            group,
            root: FI_ADDR_NOTAVAIL,
            role: None,
            context,
            flags: self.tx_op_flags() & OpFlags::COMPLETION,
        }
    }

    /// Completes when every member has called it.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_barrier")]
    pub fn barrier(&self, group: FiAddr, context: u64) -> PostResult {
        self.collective(self.call(CollKind::Barrier, group, context))
    }

    /// As [`barrier`](Self::barrier), with flags in place of the endpoint's.
    ///
    /// # Errors
    /// See the [module](self). [`Error::BadFlags`]: other than [`OpFlags::COMPLETION`].
    #[doc(alias = "fi_barrier2")]
    pub fn barrier2(&self, group: FiAddr, flags: OpFlags, context: u64) -> PostResult {
        self.collective(Call { flags, ..self.call(CollKind::Barrier, group, context) })
    }

    /// Copies the root's `buf` to the `buf` of all other members. `role` may state whether this
    /// endpoint sends or receives.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_broadcast")]
    pub fn broadcast(
        &self,
        buf: Buf,
        group: FiAddr,
        root: FiAddr,
        ty: Datatype,
        role: Option<Role>,
        context: u64,
    ) -> PostResult {
        let (count, call) = (buf.len() / ty.size(), self.call(CollKind::Broadcast, group, context));
        self.collective(Call { result: buf, count, ty: Some(ty), root, role, ..call })
    }

    /// Copies block `j` of `source` to the result of member `j`, as this member's block there. A
    /// block has `count` elements.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_alltoall")]
    pub fn alltoall(
        &self,
        (source, result): (Buf, Buf),
        count: usize,
        group: FiAddr,
        ty: Datatype,
        context: u64,
    ) -> PostResult {
        let call = self.call(CollKind::Alltoall, group, context);
        self.collective(Call { source, result, count, ty: Some(ty), ..call })
    }

    /// Reduces the sources of all members to the results of all members. An empty source means in
    /// place: `result` is the source.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_allreduce")]
    pub fn allreduce(
        &self,
        (source, result): (Buf, Buf),
        group: FiAddr,
        (op, ty): (AtomicOp, Datatype),
        context: u64,
    ) -> PostResult {
        let count = source.len().max(result.len()) / ty.size();
        let call = self.call(CollKind::Allreduce, group, context);
        self.collective(Call { source, result, count, ty: Some(ty), op: Some(op), ..call })
    }

    /// Concatenates the sources of all members in the results of all members.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_allgather")]
    pub fn allgather(
        &self,
        (source, result): (Buf, Buf),
        group: FiAddr,
        ty: Datatype,
        context: u64,
    ) -> PostResult {
        let count = source.len() / ty.size();
        let call = self.call(CollKind::Allgather, group, context);
        self.collective(Call { source, result, count, ty: Some(ty), ..call })
    }

    /// Reduces the sources of all members; each member gets its block of the reduction.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_reduce_scatter")]
    pub fn reduce_scatter(
        &self,
        (source, result): (Buf, Buf),
        group: FiAddr,
        (op, ty): (AtomicOp, Datatype),
        context: u64,
    ) -> PostResult {
        let count = result.len() / ty.size();
        let call = self.call(CollKind::ReduceScatter, group, context);
        self.collective(Call { source, result, count, ty: Some(ty), op: Some(op), ..call })
    }

    /// Reduces the sources of all members to the root's `result`, which may be empty at other
    /// members.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_reduce")]
    pub fn reduce(
        &self,
        (source, result): (Buf, Buf),
        group: FiAddr,
        root: FiAddr,
        (op, ty): (AtomicOp, Datatype),
        context: u64,
    ) -> PostResult {
        let count = source.len() / ty.size();
        let call = self.call(CollKind::Reduce, group, context);
        let (ty, op) = (Some(ty), Some(op));
        self.collective(Call { source, result, count, ty, op, root, ..call })
    }

    /// Copies block `i` of the root's `source` to member `i`. `source` may be empty at other
    /// members.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_scatter")]
    pub fn scatter(
        &self,
        (source, result): (Buf, Buf),
        group: FiAddr,
        root: FiAddr,
        ty: Datatype,
        context: u64,
    ) -> PostResult {
        let count = result.len() / ty.size();
        let call = self.call(CollKind::Scatter, group, context);
        self.collective(Call { source, result, count, ty: Some(ty), root, ..call })
    }

    /// Concatenates the sources of all members in the root's `result`, which may be empty at other
    /// members.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_gather")]
    pub fn gather(
        &self,
        (source, result): (Buf, Buf),
        group: FiAddr,
        root: FiAddr,
        ty: Datatype,
        context: u64,
    ) -> PostResult {
        let count = source.len() / ty.size();
        let call = self.call(CollKind::Gather, group, context);
        self.collective(Call { source, result, count, ty: Some(ty), root, ..call })
    }
}

const _: () = assert!(Node::MAX_MSG_SIZE < SET);
