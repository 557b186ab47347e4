//! Calling a collective: what a call may be, and what follows from its arguments.
//!
//! What all members say alike ([`CollCall`]) is checked when it changes: programs repeat their
//! calls, so a group remembers its last one ([`Checked`]). What differs from call to call, the
//! buffers and how it is told, is looked at each time.

use barewire_driver::hint::cold;
use barewire_driver::mem::atomic::{AtomicOp, Datatype, reduces};
use barewire_driver::mem::{IoBuf, Span};

use super::board::{self, Shared, Through};
use super::{BLOCK_MAX, Group, GroupId, GroupState, Kind, MEMBERS_MAX, User, mix};
use crate::error::{Error, Result};
use crate::flags::OpFlags;
use crate::idx::GroupIdx;
use crate::node::{EpId, Node};
use crate::plant::{Bug, planted};
use crate::proto::coll::Shape;
use crate::types::{FI_ADDR_UNSPEC, FiAddr};

/// What an endpoint says of its part in a broadcast (`FI_SEND`, `FI_RECV`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It is the root.
    Send,
    /// It is not.
    Recv,
}

/// What all members of a group say alike when they call a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollCall {
    /// What.
    pub kind: Kind,
    /// Among whom.
    pub group: GroupId,
    /// Elements of a block.
    pub count: u64,
    /// What an element is; `None` for a barrier (`FI_VOID`).
    pub ty: Option<Datatype>,
    /// The reduction; `None` (`FI_NOOP`) for what does not reduce.
    pub op: Option<AtomicOp>,
    /// The root, as an address of the vector.
    pub root: FiAddr,
}

/// A collective to call. Buffers stay lent until it has ended. They may be longer than the call
/// needs.
#[derive(Debug)]
pub struct CollReq {
    /// What all members say alike.
    pub call: CollCall,
    /// The source. A broadcast has none.
    pub source: Span,
    /// The result; of a broadcast the one buffer it has.
    pub result: Span,
    /// The caller's own opinion of who is the root of a broadcast.
    pub role: Option<Role>,
    /// Comes back in the completion.
    pub context: u64,
    /// `COMPLETION` alone means something here.
    pub flags: OpFlags,
}

impl CollCall {
    /// A barrier of `group`.
    pub const fn barrier(group: GroupId) -> Self {
        Self { kind: Kind::Barrier, group, count: 0, ty: None, op: None, root: FI_ADDR_UNSPEC }
    }
}

/// What a call of some kind takes (`struct fi_collective_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollAttr {
    /// Elements of a block at most; 0 for a barrier.
    pub count: u64,
    /// Bytes of an element; 0 for a barrier.
    pub size: usize,
    /// Members of a group at most.
    pub max_members: usize,
}

/// Answers `fi_query_collective`: exactly what [`Node::coll_post`] takes.
///
/// # Errors
/// [`Error::OpNotSupp`]: no such pair, or a barrier with a type, or anything else without one.
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

/// A call that may be made, and what follows from its arguments.
#[derive(Debug)]
pub(super) struct Checked {
    call: CollCall,
    shape: Shape,
    /// What must be in every message of the call.
    mark: u64,
    /// Bytes of source and result.
    source: usize,
    result: usize,
    on_board: bool,
}

impl Checked {
    /// No call has been checked: no group has this number.
    pub(super) const NOTHING: Self = Self {
        call: CollCall::barrier(GroupId::from_bits(u64::MAX)),
        shape: Shape {
            kind: Kind::Barrier,
            n: 0,
            me: 0,
            root: 0,
            count: 0,
            size: 0,
            in_place: false,
        },
        mark: 0,
        source: 0,
        result: 0,
        on_board: false,
    };

    /// This member's view of the call with these buffers.
    ///
    /// # Errors
    /// [`Error::BadFlags`]; [`Error::Invalid`] for the role and the buffers.
    fn with(&self, req: &CollReq) -> Result<Shape> {
        if !OpFlags::COMPLETION.contains(req.flags) {
            return Err(Error::BadFlags);
        }
        let shape = self.shape;
        if req.role.is_some_and(|role| (role == Role::Send) != (shape.root == shape.me)) {
            return Err(Error::Invalid("FI_SEND is for the root of a broadcast alone"));
        }
        if req.source.len() < self.source || req.result.len() < self.result {
            return Err(Error::Invalid("a buffer is too short"));
        }
        let (source, result) = (req.source.first(self.source), req.result.first(self.result));
        if !source.overlaps(&result) {
            return Ok(shape);
        }
        let whole = matches!(shape.kind, Kind::Allreduce | Kind::Reduce);
        let same = (source.addr(), source.len()) == (result.addr(), result.len());
        if !whole || !same {
            return Err(Error::Invalid("source and result overlap"));
        }
        Ok(Shape { in_place: true, ..shape })
    }
}

impl Group {
    /// What follows from `call`, which names this group.
    #[inline]
    fn check(&mut self, call: &CollCall) -> Result<&Checked> {
        match self.state {
            GroupState::Ready => {}
            GroupState::Joining(_) => return Err(Error::OpBadState),
            GroupState::Over(err) => return Err(err),
        }
        let known = self.checked.call;
        let other = known.kind == call.kind && planted(Bug::OtherCallTaken);
        if known != *call && !other {
            cold(());
            self.checked = self.check_anew(call)?;
        }
        Ok(&self.checked)
    }

    #[inline(never)]
    fn check_anew(&self, call: &CollCall) -> Result<Checked> {
        let kind = call.kind;
        let attr = query(kind, call.op, call.ty)?;
        if call.count > attr.count && kind != Kind::Barrier {
            return Err(Error::MsgTooLong);
        }
        let root = if kind.has_root() { self.rank_of(call.root)? } else { 0 };
        let (n, me) = (self.members.len() as u32, self.me);
        let count = if kind == Kind::Barrier { 0 } else { call.count };
        let shape = Shape { kind, n, me, root, count, size: attr.size as u64, in_place: false };
        let all = shape.block().checked_mul(n.into()).filter(|&all| all <= Node::MAX_MSG_SIZE);
        if all.is_none() {
            return Err(Error::MsgTooLong);
        }
        // As many as all members' blocks at most.
        let bytes = |blocks: u64| (shape.block() * blocks) as usize;
        Ok(Checked {
            call: *call,
            shape,
            mark: self.mark_of(&shape, call.op.zip(call.ty)),
            source: bytes(kind.blocks_in(n, me, root)),
            result: bytes(kind.blocks_out(n, me, root)),
            on_board: self.has_board() && board::fits(&shape),
        })
    }

    fn has_board(&self) -> bool {
        matches!(self.shared, Shared::Yes(_))
    }

    /// What all members have alike in a call.
    pub(super) fn mark_of(&self, shape: &Shape, reduce: Option<(AtomicOp, Datatype)>) -> u64 {
        u64::from(self.hash) << 32 | u64::from(signature(shape, reduce))
    }
}

impl Node {
    /// Calls a collective. It goes on with the turns of the loop.
    ///
    /// # Errors
    /// Nothing was begun, nothing will complete:
    /// - [`Error::BadFd`], [`Error::OpBadState`], [`Error::OpNotSupp`] for the endpoint as in
    ///   [`coll_join`](Self::coll_join); [`Error::OpBadState`] also while the join goes on.
    /// - [`Error::Invalid`]: no group of this endpoint; a root that is no member; a role that
    ///   contradicts it; a buffer that is too short; source and result that overlap, unless they
    ///   are the same memory of an allreduce or reduce.
    /// - [`Error::OpNotSupp`]: what [`query`] refuses. [`Error::MsgTooLong`]: above its count.
    /// - [`Error::BadFlags`]. [`Error::Again`]: a queue is full. [`Error::NoMem`].
    /// - the error that ended the group, if a member died or left: the group is of no more use.
    #[inline]
    pub fn coll_post(&mut self, ep: EpId, req: CollReq) -> Result<()> {
        let (g, checked) = self.check_call(ep, &req.call)?;
        let (shape, mark, on_board) = (checked.with(&req)?, checked.mark, checked.on_board);
        let e = ep.0.idx();
        self.make_send_room(e);
        let ep = &mut self.eps[e];
        if ep.tx_used >= ep.tx_size || !self.cqs[ep.tx_cq].cq.reserve() {
            return Err(Error::Again);
        }
        let wanted = !ep.tx_selective || req.flags.contains(OpFlags::COMPLETION);
        let user = User { context: req.context, wanted };
        let CollReq { call, source, result, .. } = req;
        let reduce = call.op.zip(call.ty);
        if on_board {
            ep.tx_used += 1;
            let through = Through { shape, reduce, input: source, out: result, user };
            self.call_on_board(g, mark, Some(through));
            return Ok(());
        }
        let buffers = (IoBuf::one(source), IoBuf::one(result));
        match self.begin_op(g, shape, reduce, buffers, Some(user)) {
            Ok(o) => {
                self.eps[e].tx_used += 1;
                self.queue_op(o);
                self.call_on_board(g, mark, None);
                Ok(())
            }
            Err(err) => {
                let cq = self.eps[e].tx_cq;
                self.cqs[cq].cq.unreserve();
                Err(err)
            }
        }
    }

    /// Bytes that this member's source and result have in a call. A broadcast has the result alone.
    ///
    /// # Errors
    /// Those of [`coll_post`](Self::coll_post), but for buffers, role, flags and room.
    #[inline]
    pub fn coll_lengths(&mut self, ep: EpId, call: &CollCall) -> Result<(usize, usize)> {
        let (_, checked) = self.check_call(ep, call)?;
        Ok((checked.source, checked.result))
    }

    #[inline]
    fn check_call(&mut self, ep: EpId, call: &CollCall) -> Result<(GroupIdx, &Checked)> {
        let group = self.coll.groups.by_handle(call.group.0);
        if group.is_none_or(|group| group.ep != ep) {
            cold(());
            self.coll_side(ep)?;
            return Err(Error::Invalid("coll_addr is no group of this endpoint"));
        }
        let g = call.group.0.idx();
        Ok((g, self.coll.groups[g].check(call)?))
    }
}

/// What members must agree on in a call, in 32 bits.
fn signature(shape: &Shape, reduce: Option<(AtomicOp, Datatype)>) -> u32 {
    let what = reduce.map_or(0xffff, |(op, ty)| (op as u64) << 8 | ty as u64);
    let kind = (shape.kind as u64) << 16 | what;
    let mut hash = mix(mix(kind, shape.count), shape.size);
    if shape.kind.has_root() {
        hash = mix(hash, u64::from(shape.root) + 1);
    }
    (hash >> 32) as u32
}
