//! Records of one-sided operations on the fast path, and the request shape that an endpoint caches.

use barewire_driver::mem::Span;

use super::peer::{SLOT_BITS, slot_of};
use super::rma::{FETCHED, READ, WRITE};
use crate::flags::{Caps, CqFlags, OpFlags};
use crate::idx::{CntrIdx, EpIdx, FastOpIdx, PeerIdx};
use crate::proto::atomic::AtomicKind;
use crate::rel::psn::Psn;
use crate::slab::Handle;
use crate::table::Vacant;

/// Kind of a one-sided operation, by its completion and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// An atomic operation that fetches.
    Fetch,
    /// An atomic operation that does not fetch.
    Change,
    Write,
    Read,
}

impl Form {
    pub(crate) const ALL: [Self; 4] = [Self::Fetch, Self::Change, Self::Write, Self::Read];

    /// Capabilities that an endpoint needs to post an operation of this kind.
    pub(crate) const fn caps(self) -> Caps {
        match self {
            Self::Fetch => Caps::ATOMIC.union(Caps::READ),
            Self::Change => Caps::ATOMIC.union(Caps::WRITE),
            Self::Write => Caps::RMA.union(Caps::WRITE),
            Self::Read => Caps::RMA.union(Caps::READ),
        }
    }

    /// Completion flags of the kind, and the index of its counter in `Ep::rma_cntr`.
    pub(super) const fn outcome(self) -> (CqFlags, usize) {
        match self {
            Self::Fetch => FETCHED,
            Self::Change => (CqFlags::ATOMIC.union(CqFlags::WRITE), WRITE),
            Self::Write => (CqFlags::RMA.union(CqFlags::WRITE), WRITE),
            Self::Read => (CqFlags::RMA.union(CqFlags::READ), READ),
        }
    }
}

/// A one-sided operation in flight. The record holds the data for the completion and none for a
/// retransmission, since the path is lossless. [`Peer::answers`](super::peer::Peer::answers) counts
/// these records.
#[derive(Debug)]
pub(super) struct FastOp {
    pub(super) context: u64,
    /// Memory for the answer's payload; empty if the answer has none.
    pub(super) result: Span,
    pub(super) bits: OpBits,
    /// The endpoint that posted the operation; [`EpIdx::NONE`] once that is closed.
    pub(super) ep: EpIdx,
    /// PSN of the operation's packet.
    pub(super) psn: Psn,
    /// Bytes that the operation transfers, for counters.
    pub(super) bytes: u32,
}

/// Peer, kind and flags packed into a `u32`, so that the common case is one compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OpBits(pub(super) u32);

impl OpBits {
    /// A success writes a completion.
    pub(super) const SIGNALED: u32 = 1 << (SLOT_BITS + 2);

    /// No counter counts the operation.
    pub(super) const UNCOUNTED: u32 = 1 << (SLOT_BITS + 3);

    const FORM: u32 = 3 << SLOT_BITS;

    pub(super) const fn new(form: Form, signaled: bool) -> Self {
        Self((form as u32) << SLOT_BITS | if signaled { Self::SIGNALED } else { 0 })
    }

    /// The same bits, uncounted unless `Ep::rma_cntr` has a counter for the kind.
    #[inline(always)]
    pub(super) fn counted_by(self, counters: &[CntrIdx]) -> Self {
        let counted = counters[self.form().outcome().1] != CntrIdx::NONE;
        Self(self.0 | if counted { 0 } else { Self::UNCOUNTED })
    }

    /// Whether the operation is to peer `p` and its success only writes a completion.
    #[inline(always)]
    pub(super) const fn completes_alone(self, p: PeerIdx) -> bool {
        self.0 & !Self::FORM == Self::SIGNALED | Self::UNCOUNTED | p.get()
    }

    /// The same bits with peer `p`.
    #[inline(always)]
    pub(super) const fn to(self, p: PeerIdx) -> Self {
        Self(self.0 | p.get())
    }

    #[inline(always)]
    pub(super) const fn peer(self) -> PeerIdx {
        slot_of(self.0)
    }

    #[inline(always)]
    pub(super) const fn form(self) -> Form {
        Form::ALL[(self.0 >> SLOT_BITS & 3) as usize]
    }

    #[inline(always)]
    pub(super) const fn signaled(self) -> bool {
        self.0 & Self::SIGNALED != 0
    }
}

impl Vacant for FastOp {
    fn vacant() -> Self {
        let bits = OpBits::new(Form::Fetch, false);
        let (ep, psn) = (EpIdx::NONE, Psn(0));
        Self { context: 0, result: Span::EMPTY, bits, ep, psn, bytes: 0 }
    }
}

impl FastOp {
    #[inline(always)]
    pub(super) const fn peer(&self) -> PeerIdx {
        self.bits.peer()
    }

    #[inline(always)]
    pub(super) const fn form(&self) -> Form {
        self.bits.form()
    }
}

const _: () = assert!(size_of::<FastOp>() <= 40, "one record per transmit request");

impl FastOp {
    /// Set in the ids of these records on the wire, to distinguish them from slots of `Node::rma`.
    pub(super) const NAME: u32 = 1 << 31;

    /// The id of slot `w` on the wire.
    #[inline(always)]
    pub(super) const fn name(w: FastOpIdx) -> u32 {
        w.get() | Self::NAME
    }

    /// Whether an id on the wire belongs to this table.
    #[inline(always)]
    pub(super) const fn is_name(name: u32) -> bool {
        name & Self::NAME != 0
    }

    /// The handle for an id and a generation from the wire. An id of another table yields a slot
    /// out of range. The generation is made odd: generations of slots in use are odd, and a peer
    /// must not reach a vacant slot.
    #[inline(always)]
    pub(super) const fn handle(name: u32, generation: u32) -> Handle<FastOpIdx> {
        Handle::from_parts(FastOpIdx::of(name ^ Self::NAME), generation | 1)
    }
}

/// The shape of an atomic request (operation, type, count, flags) that passed all checks, and the
/// results of the checks. An endpoint caches the last shape: for a request of the same shape only
/// the memory is checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fetch {
    /// `enum fi_op` in the low half, `enum fi_datatype` in the high half: one compare for both.
    pub(super) op_ty: u64,
    pub(super) count: u64,
    pub(super) flags: OpFlags,
    pub(super) kind: AtomicKind,
    /// Bytes of the elements.
    pub(super) bytes: u32,
    /// Bytes of old values, operands and compare values.
    pub(super) result: usize,
    pub(super) operand: usize,
    pub(super) compare: usize,
    /// The operand is 8 bytes and there is no compare value: the common case. The result is then 8
    /// bytes or none.
    pub(super) word: bool,
    /// Kind and flags of the operation's record, unless the call suppresses the completion.
    pub(super) bits: OpBits,
}

impl Fetch {
    /// Matches no request: no memory has this length.
    pub(crate) const NONE: Self = Self {
        op_ty: 0,
        count: 0,
        flags: OpFlags::empty(),
        kind: AtomicKind::Fetch,
        bytes: 0,
        result: usize::MAX,
        operand: usize::MAX,
        compare: usize::MAX,
        word: false,
        bits: OpBits::new(Form::Fetch, false),
    };

    #[inline(always)]
    pub(super) const fn name(op: u32, ty: u32) -> u64 {
        op as u64 | (ty as u64) << 32
    }
}
