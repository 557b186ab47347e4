//! Calling a collective: the validation of a call, and the values derived from its arguments.
//!
//! Arguments that are equal on all members ([`CollCall`]) are checked only when they change:
//! programs repeat their calls, so a group caches its last call ([`CheckedCall`]). Arguments that
//! differ between calls, the buffers and the kind of completion, are checked each time.

use barewire_driver::hint::{cold, outlined};
use barewire_driver::mem::atomic::{AtomicOp, Datatype, reduces};
use barewire_driver::mem::{IoBuf, Span};

use super::board::{AddOutcome, BoardState, Part};
use super::drive::StoredMsgs;
use super::{BLOCK_MAX, Caller, Coll, Group, GroupId, GroupState, Kind, MEMBERS_MAX, mix};
use crate::cntr::Done;
use crate::error::{Error, Result};
use crate::flags::{CqFlags, OpFlags};
use crate::idx::GroupIdx;
use crate::node::eps::SendRoom;
use crate::node::{EpId, Eps, Node};
use crate::plant::{Bug, planted};
use crate::proto::coll::Shape;
use crate::types::{FI_ADDR_UNSPEC, FiAddr};

/// The endpoint's part in a broadcast (`FI_SEND`, `FI_RECV`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The endpoint is the root.
    Send,
    /// The endpoint is not the root.
    Recv,
}

/// The arguments of a collective that are equal on all members of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollCall {
    /// Kind, operation and datatype.
    pub what: CallWord,
    /// The group.
    pub group: GroupId,
    /// Elements of a block.
    pub count: u64,
    /// The root, as an address in the address vector.
    pub root: FiAddr,
}

/// `FI_NOOP`, the operation of calls that do not reduce.
pub const FI_NOOP: u32 = 256;
/// `FI_VOID`, the datatype of a barrier.
pub const FI_VOID: u32 = 256;

/// Kind, operation and datatype of a call, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallWord(u32);

impl CallWord {
    /// No call: no call has these numbers.
    const NOTHING: Self = Self(u32::MAX);

    /// A call of this kind. The operation is `None` for calls that do not reduce, the datatype for
    /// a barrier.
    pub fn new(kind: Kind, op: Option<AtomicOp>, ty: Option<Datatype>) -> Self {
        let op = op.map_or(FI_NOOP, |op| op as u32);
        Self::of_numbers(kind, op, ty.map_or(FI_VOID, |ty| ty as u32))
    }

    /// A call by libfabric's numbers. The operation's number is ignored if the kind does not
    /// reduce. Numbers without a meaning are detected by the call.
    #[inline(always)]
    pub const fn of_numbers(kind: Kind, op: u32, ty: u32) -> Self {
        // All numbers above this one have no meaning.
        const MOST: u32 = 0xfff;
        let (op, ty) = (if op < MOST { op } else { MOST }, if ty < MOST { ty } else { MOST });
        Self(kind as u32 | op << 8 | ty << 20)
    }

    /// # Errors
    /// [`Error::OpNotSupp`]: a number has no meaning.
    fn parts(self) -> Result<(Kind, Option<AtomicOp>, Option<Datatype>)> {
        let none = Error::OpNotSupp("no such operation or datatype");
        let kind = *Kind::ALL.get((self.0 & 0xff) as usize).ok_or(none)?;
        let (op, ty) = (self.0 >> 8 & 0xfff, self.0 >> 20);
        let op = match op {
            _ if !kind.reduces() => None,
            FI_NOOP => None,
            op => Some(op.try_into().map_err(|_| none)?),
        };
        let ty = if ty == FI_VOID { None } else { Some(ty.try_into().map_err(|_| none)?) };
        Ok((kind, op, ty))
    }
}

/// A collective call, without its buffers.
#[derive(Clone, Copy, Debug)]
pub struct CollReq {
    /// The arguments that are equal on all members.
    pub call: CollCall,
    /// The caller's claim about its part in a broadcast.
    pub role: Option<Role>,
    /// Returned in the completion.
    pub context: u64,
    /// Only `COMPLETION` has a meaning.
    pub flags: OpFlags,
}

impl CollCall {
    /// A barrier of `group`.
    pub const fn barrier(group: GroupId) -> Self {
        let what = CallWord::of_numbers(Kind::Barrier, FI_NOOP, FI_VOID);
        Self { what, group, count: 0, root: FI_ADDR_UNSPEC }
    }
}

/// Limits of calls of a kind (`struct fi_collective_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollAttr {
    /// Maximum elements of a block; 0 for a barrier.
    pub count: u64,
    /// Bytes of an element; 0 for a barrier.
    pub size: usize,
    /// Maximum members of a group.
    pub max_members: usize,
}

/// Answers `fi_query_collective`: exactly the calls that [`Node::coll_post`] accepts.
///
/// # Errors
/// [`Error::OpNotSupp`]: no such pair, or a barrier with a type, or another kind without one.
pub fn query(kind: Kind, op: Option<AtomicOp>, ty: Option<Datatype>) -> Result<CollAttr> {
    let max_members = MEMBERS_MAX;
    match (kind, op, ty) {
        (Kind::Barrier, None, None) => Ok(CollAttr { count: 0, size: 0, max_members }),
        (_, _, None) | (Kind::Barrier, ..) => {
            Err(Error::OpNotSupp("FI_VOID and FI_NOOP belong to barriers, and to them alone"))
        }
        (_, Some(op), Some(ty)) if kind.reduces() && reduces(op, ty) => Ok(attr_of(ty)),
        (_, None, Some(ty)) if !kind.reduces() && exists(ty) => Ok(attr_of(ty)),
        _ => Err(Error::OpNotSupp("the operation is no reduction that the datatype has")),
    }
}

fn attr_of(ty: Datatype) -> CollAttr {
    let size = ty.size();
    CollAttr { count: BLOCK_MAX / size as u64, size, max_members: MEMBERS_MAX }
}

fn exists(ty: Datatype) -> bool {
    reduces(AtomicOp::Sum, ty)
}

/// The last checked call of a group, and the values derived from its arguments.
#[derive(Debug)]
pub(super) struct CheckedCall {
    /// [`NOTHING`](CallWord::NOTHING) while no call may be made.
    what: CallWord,
    count: u64,
    root: FiAddr,
    shape: Shape,
    reduce: Option<(AtomicOp, Datatype)>,
    /// Bytes of source and result.
    source: usize,
    result: usize,
    pub(super) part: Part,
}

impl CheckedCall {
    /// No call.
    pub(super) const NONE: Self = Self {
        what: CallWord::NOTHING,
        count: 0,
        root: 0,
        shape: Shape::NONE,
        reduce: None,
        source: 0,
        result: 0,
        part: Part::NONE,
    };

    /// Forgets the checked call: until the next check no call may be made.
    pub(super) fn forget(&mut self) {
        self.what = CallWord::NOTHING;
    }

    /// Checks the arguments of this member: flags, role and buffers. Returns whether source and
    /// result are the same memory.
    ///
    /// # Errors
    /// [`Error::BadFlags`]; [`Error::Invalid`] for the role and the buffers.
    #[inline(always)]
    fn admits(&self, req: &CollReq, source: &Span, result: &Span) -> Result<bool> {
        if !OpFlags::COMPLETION.contains(req.flags) {
            return Err(Error::BadFlags);
        }
        let shape = &self.shape;
        if req.role.is_some_and(|role| (role == Role::Send) != (shape.root == shape.me)) {
            return Err(Error::Invalid("FI_SEND is for the root of a broadcast alone"));
        }
        if source.len() < self.source || result.len() < self.result {
            return Err(Error::Invalid("a buffer is too short"));
        }
        let (source, result) = (source.first(self.source), result.first(self.result));
        if !source.overlaps(&result) {
            return Ok(false);
        }
        let whole = matches!(shape.kind, Kind::Allreduce | Kind::Reduce);
        let same = (source.addr(), source.len()) == (result.addr(), result.len());
        if !whole || !same {
            return Err(Error::Invalid("source and result overlap"));
        }
        Ok(true)
    }
}

impl Group {
    /// The values derived from `call`, which names this group.
    #[inline(always)]
    fn check(&mut self, call: &CollCall) -> Result<&CheckedCall> {
        let known = &self.checked;
        if (known.what, known.count, known.root) != (call.what, call.count, call.root) {
            cold(());
            self.recheck(call.what, call.count, call.root)?;
        }
        Ok(&self.checked)
    }

    #[inline(never)]
    fn recheck(&mut self, what: CallWord, count: u64, root: FiAddr) -> Result<()> {
        match self.state {
            GroupState::Ready => {}
            GroupState::Joining(_) => return Err(Error::OpBadState),
            GroupState::Ended(err) => return Err(err),
        }
        let (kind, op, ty) = what.parts()?;
        if self.checked.shape.kind == kind && planted(Bug::CollectiveArgumentsUnchecked) {
            return Ok(());
        }
        let attr = query(kind, op, ty)?;
        if count > attr.count && kind != Kind::Barrier {
            return Err(Error::MsgTooLong);
        }
        let rank = if kind.has_root() { self.rank_of(root)? } else { 0 };
        let (n, me) = (self.members.len() as u32, self.me);
        let elements = if kind == Kind::Barrier { 0 } else { count };
        let size = attr.size as u64;
        let shape = Shape { kind, n, me, root: rank, count: elements, size, in_place: false };
        let all = shape.block().checked_mul(n.into()).filter(|&all| all <= Node::MAX_MSG_SIZE);
        if all.is_none() {
            return Err(Error::MsgTooLong);
        }
        let reduce = op.zip(ty);
        // At most the size of all members' blocks.
        let bytes = |blocks: u64| (shape.block() * blocks) as usize;
        let number = self.checked.part.number() + 1;
        let mark = self.mark_of(&shape, reduce);
        let has_board = matches!(self.shared, BoardState::Attached(_));
        self.checked = CheckedCall {
            what,
            count,
            root,
            shape,
            reduce,
            source: bytes(kind.blocks_in(n, me, rank)),
            result: bytes(kind.blocks_out(n, me, rank)),
            part: Part::of((number, mark), shape, reduce, has_board),
        };
        Ok(())
    }

    /// The hash of the parameters of a call that are equal on all members.
    pub(super) fn mark_of(&self, shape: &Shape, reduce: Option<(AtomicOp, Datatype)>) -> u64 {
        u64::from(self.hash) << 32 | u64::from(signature(shape, reduce))
    }
}

impl Coll {
    /// The error of a call of an endpoint that names no group of it.
    #[inline(never)]
    fn no_group_error(&self, eps: &Eps, ep: EpId) -> Error {
        let none = Error::Invalid("coll_addr is no group of this endpoint");
        self.side_of(eps, ep).err().unwrap_or(none)
    }

    /// Begins a call by messages. Returns whether it is the first in the order of the group's board
    /// and waits there, by which the members detect that they do not make the same call.
    #[inline(never)]
    fn call_by_messages(
        &mut self,
        stored: &StoredMsgs<'_>,
        (g, shape): (GroupIdx, Shape),
        reduce: Option<(AtomicOp, Datatype)>,
        (source, result): (Span, Span),
        caller: Caller,
    ) -> Result<bool> {
        let buffers = (IoBuf::one(source), IoBuf::one(result));
        let o = self.begin_op(stored, (g, shape), reduce, buffers, Some(caller))?;
        self.queue_op(o);
        Ok(matches!(self.groups[g].add_call(None), AddOutcome::Waiting))
    }
}

impl Node {
    /// Calls a collective. It makes progress with the turns of the loop.
    ///
    /// `lend` gets the lengths of this member's source and result in the call, and lends buffers of
    /// at least these lengths until the call has ended. A broadcast has only a result.
    ///
    /// # Errors
    /// Nothing was begun, nothing will complete:
    /// - [`Error::BadFd`], [`Error::OpBadState`], [`Error::OpNotSupp`] for the endpoint as in
    ///   [`coll_join`]; [`Error::OpBadState`] also while the join is in progress.
    /// - [`Error::Invalid`]: no group of this endpoint; a root that is no member; a role that
    ///   contradicts it; a buffer that is too short; source and result that overlap, unless they
    ///   are the same memory of an allreduce or reduce.
    /// - [`Error::OpNotSupp`]: a call that [`query`] refuses. [`Error::MsgTooLong`]: above its
    ///   count.
    /// - [`Error::BadFlags`]. [`Error::Again`]: a queue is full. [`Error::NoMem`].
    /// - the error that ended the group, if a member died or left: the group is not usable any
    ///   more.
    ///
    /// [`coll_join`]: super::super::Collectives::coll_join
    #[inline]
    pub fn coll_post(
        &mut self,
        ep: EpId,
        req: &CollReq,
        lend: impl FnOnce(usize, usize) -> (Span, Span),
    ) -> Result<()> {
        let group = match self.coll.groups.by_handle_mut(req.call.group.0) {
            Some(group) if group.ep == ep => group,
            _ => return Err(cold(self.coll.no_group_error(&self.eps, ep))),
        };
        let checked = group.check(&req.call)?;
        let (source, result) = lend(checked.source, checked.result);
        let in_place = checked.admits(req, &source, &result)?;
        let (e, g) = (ep.0.idx(), req.call.group.0.idx());
        let mut room = SendRoom::of(&mut self.eps, &mut self.cqs, e);
        if !room.is_available() {
            cold(());
            self.eps.make_send_room(&mut self.cqs, e);
            room = SendRoom::of(&mut self.eps, &mut self.cqs, e);
            if !room.is_available() {
                return Err(Error::Again);
            }
        }
        let wanted = !room.ep.tx_selective || req.flags.contains(OpFlags::COMPLETION);
        let caller = Caller { context: req.context, wanted };
        let waits = if checked.part.by_board {
            match group.add_call(Some((caller, source, result))) {
                AddOutcome::Ended => {
                    let cntr = room.complete(caller.context, CqFlags::COLLECTIVE, wanted);
                    self.cntrs.count(cntr, Done::CALL);
                    self.counters.count_shared();
                    false
                }
                AddOutcome::Queued => {
                    room.take();
                    false
                }
                AddOutcome::Waiting => {
                    room.take();
                    true
                }
            }
        } else {
            let (shape, reduce) = (Shape { in_place, ..checked.shape }, checked.reduce);
            room.take();
            let Self { eps, peers, unexpected, coll, .. } = self;
            let stored = StoredMsgs { eps, peers, unexpected };
            coll.call_by_messages(&stored, (g, shape), reduce, (source, result), caller)
                .inspect_err(|_| SendRoom::of(&mut self.eps, &mut self.cqs, e).give_back())?
        };
        if waits && self.coll.register_waiting_call(self.turn.polled_at, g) {
            let now = self.turn.polled_at;
            outlined(move || self.collectives().drive_group(now, g));
        }
        Ok(())
    }
}

/// The parameters that members must agree on in a call, in 32 bits.
fn signature(shape: &Shape, reduce: Option<(AtomicOp, Datatype)>) -> u32 {
    let op_ty = reduce.map_or(0xffff, |(op, ty)| (op as u64) << 8 | ty as u64);
    let kind = (shape.kind as u64) << 16 | op_ty;
    let mut hash = mix(mix(kind, shape.count), shape.size);
    if shape.kind.has_root() {
        hash = mix(hash, u64::from(shape.root) + 1);
    }
    (hash >> 32) as u32
}
