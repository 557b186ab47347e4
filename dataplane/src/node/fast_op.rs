//! Records of one-sided operations that left at once: what one is, and what of it is kept.

use barewire_driver::mem::Span;

use super::peer::{Peer, SLOT_BITS, slot_of};
use super::rma::{FETCHED, READ, WRITE};
use crate::flags::{Caps, CqFlags, OpFlags};
use crate::proto::atomic::AtomicKind;
use crate::rel::psn::Psn;
use crate::slab::{Handle, NONE};
use crate::table::Vacant;

/// Kind of a one-sided operation, as checks, answers and completions tell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// An atomic operation that fetches.
    Fetch,
    /// One that does not.
    Change,
    Write,
    Read,
}

impl Form {
    pub(crate) const ALL: [Self; 4] = [Self::Fetch, Self::Change, Self::Write, Self::Read];

    /// Capabilities of an endpoint that posts it.
    pub(crate) const fn caps(self) -> Caps {
        match self {
            Self::Fetch => Caps::ATOMIC.union(Caps::READ),
            Self::Change => Caps::ATOMIC.union(Caps::WRITE),
            Self::Write => Caps::RMA.union(Caps::WRITE),
            Self::Read => Caps::RMA.union(Caps::READ),
        }
    }

    /// Completion flags, and the place of the counter.
    pub(super) const fn outcome(self) -> (CqFlags, usize) {
        match self {
            Self::Fetch => FETCHED,
            Self::Change => (CqFlags::ATOMIC.union(CqFlags::WRITE), WRITE),
            Self::Write => (CqFlags::RMA.union(CqFlags::WRITE), WRITE),
            Self::Read => (CqFlags::RMA.union(CqFlags::READ), READ),
        }
    }

    /// Whether nothing comes back but that it was executed.
    pub(super) const fn is_acked(self) -> bool {
        matches!(self, Self::Change | Self::Write)
    }
}

/// A one-sided operation that was sent and has not ended. Holds what its completion needs and
/// nothing to repeat it by, since the port loses nothing. The peer's record counts them.
#[derive(Debug)]
pub(super) struct FastOp {
    pub(super) context: u64,
    /// Where the answer goes, if there will be one.
    pub(super) result: Span,
    pub(super) is: OpBits,
    /// [`NONE`] once that is closed.
    pub(super) ep: u32,
    /// That of its packet.
    pub(super) psn: Psn,
    /// The next of those that wait for an acknowledgement, or the first if it is the last.
    pub(super) next: u16,
}

/// Peer, kind and flags packed into a `u32`, so that the common case is one compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OpBits(pub(super) u32);

impl OpBits {
    /// Writes a completion on success.
    pub(super) const SIGNALED: u32 = 1 << (SLOT_BITS + 2);

    /// Gets a word, and no counter counts it.
    pub(super) const WORD_UNCOUNTED: u32 = 1 << (SLOT_BITS + 3);

    /// The common case without its peer: a fetch with a completion, and
    /// [`WORD_UNCOUNTED`](Self::WORD_UNCOUNTED).
    pub(super) const WORD_FETCH: Self = Self(Self::new(Form::Fetch, true).0 | Self::WORD_UNCOUNTED);

    pub(super) const fn new(form: Form, signaled: bool) -> Self {
        Self((form as u32) << SLOT_BITS | if signaled { Self::SIGNALED } else { 0 })
    }

    /// The same, to peer `p`.
    #[inline(always)]
    pub(super) const fn to(self, p: u32) -> Self {
        Self(self.0 | p)
    }

    #[inline(always)]
    pub(super) const fn peer(self) -> u32 {
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
        let (is, next) = (OpBits::new(Form::Fetch, false), Peer::NO_OP);
        Self { context: 0, result: Span::EMPTY, is, ep: NONE, psn: Psn(0), next }
    }
}

impl FastOp {
    #[inline(always)]
    pub(super) const fn peer(&self) -> u32 {
        self.is.peer()
    }

    #[inline(always)]
    pub(super) const fn form(&self) -> Form {
        self.is.form()
    }
}

const _: () = assert!(size_of::<FastOp>() <= 40, "there is one for every transmit request");

impl FastOp {
    /// Set in the slots that packets name, so that they are no slot of another table.
    pub(super) const NAME: u32 = 1 << 31;

    /// What a packet calls slot `w`.
    #[inline(always)]
    pub(super) const fn name(w: u32) -> u32 {
        w | Self::NAME
    }

    /// Whether a packet names a slot of this table.
    #[inline(always)]
    pub(super) const fn is_name(name: u32) -> bool {
        name & Self::NAME != 0
    }

    /// What a peer names so; nothing if it is no name. Generations of slots in use are odd, and of
    /// the others a peer must not name one.
    #[inline(always)]
    pub(super) const fn handle(name: u32, generation: u32) -> Handle {
        Handle::from_parts(name ^ Self::NAME, generation | 1)
    }
}

/// Operation, type, length and flags of an atomic request that passed all checks: one like it needs
/// no other.
/// An endpoint keeps that of the last one, since most often the next is like it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fetch {
    /// `enum fi_op` and above it `enum fi_datatype`: who knows both compares them at once.
    pub(super) op_ty: u64,
    pub(super) count: u64,
    pub(super) flags: OpFlags,
    pub(super) kind: AtomicKind,
    /// Bytes of old values, operands and compare values.
    pub(super) result: usize,
    pub(super) operand: usize,
    pub(super) compare: usize,
    /// The operand is a word, and there is no compare value: most often. What is fetched is a word
    /// then.
    pub(super) word: bool,
    /// What it is if somebody may want to hear of it.
    pub(super) is: OpBits,
}

impl Fetch {
    /// That of no operation: none has memory for so much.
    pub(crate) const NONE: Self = Self {
        op_ty: 0,
        count: 0,
        flags: OpFlags::empty(),
        kind: AtomicKind::Fetch,
        result: usize::MAX,
        operand: usize::MAX,
        compare: usize::MAX,
        word: false,
        is: OpBits::new(Form::Fetch, false),
    };

    #[inline(always)]
    pub(super) const fn name(op: u32, ty: u32) -> u64 {
        op as u64 | (ty as u64) << 32
    }
}
