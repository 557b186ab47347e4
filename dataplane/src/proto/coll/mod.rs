//! Collectives as schedules: what one member of a group sends, receives and computes.
//!
//! - [`Shape`]: one member's view of one call. [`plan`]: the choice of an algorithm by a cost
//!   model.
//! - [`program`]: the algorithm as rounds, generated one by one and never held as a whole.
//! - [`run`]: the interpreter that a node drives: the next action, and what it waits for.
//!
//! No packet, peer or address appears here: members are ranks, and memory is a place in one of
//! three areas. All members must derive the same schedule, so the choice uses only integers that
//! all of them have.

pub mod plan;
pub mod program;
pub mod run;
#[cfg(test)]
mod tests;

/// The kind of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// No member proceeds before all have arrived.
    Barrier = 0,
    /// The root's vector goes to all members.
    Broadcast = 1,
    /// Block `j` of member `i` becomes block `i` of member `j`.
    Alltoall = 2,
    /// The reduction of all vectors goes to all members.
    Allreduce = 3,
    /// All members' blocks go to all members.
    Allgather = 4,
    /// Block `i` of the reduction of all vectors goes to member `i`.
    ReduceScatter = 5,
    /// The reduction of all vectors goes to the root.
    Reduce = 6,
    /// Block `i` of the root goes to member `i`.
    Scatter = 7,
    /// All members' blocks go to the root.
    Gather = 8,
}

impl Kind {
    /// All kinds, in the order of libfabric's `enum fi_collective_op`.
    pub const ALL: [Self; 9] = [
        Self::Barrier,
        Self::Broadcast,
        Self::Alltoall,
        Self::Allreduce,
        Self::Allgather,
        Self::ReduceScatter,
        Self::Reduce,
        Self::Scatter,
        Self::Gather,
    ];

    /// Whether the collective reduces.
    pub const fn reduces(self) -> bool {
        matches!(self, Self::Allreduce | Self::ReduceScatter | Self::Reduce)
    }

    /// Whether one member is the root.
    pub const fn has_root(self) -> bool {
        matches!(self, Self::Broadcast | Self::Reduce | Self::Scatter | Self::Gather)
    }

    /// Blocks of `count` elements that the source of member `me` holds, in a group of `n`.
    pub const fn blocks_in(self, n: u32, me: u32, root: u32) -> u64 {
        match self {
            Self::Barrier | Self::Broadcast => 0,
            Self::Alltoall | Self::ReduceScatter => n as u64,
            Self::Scatter => {
                if me == root {
                    n as u64
                } else {
                    0
                }
            }
            _ => 1,
        }
    }

    /// Blocks in the result of member `me`. A broadcast has one buffer, which counts as the result.
    pub const fn blocks_out(self, n: u32, me: u32, root: u32) -> u64 {
        match self {
            Self::Barrier => 0,
            Self::Alltoall | Self::Allgather => n as u64,
            Self::Reduce if me != root => 0,
            Self::Gather => {
                if me == root {
                    n as u64
                } else {
                    0
                }
            }
            _ => 1,
        }
    }
}

/// One member's view of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The collective.
    pub kind: Kind,
    /// Number of members, at least 1.
    pub n: u32,
    /// Rank of this member.
    pub me: u32,
    /// Rank of the root, 0 if there is none.
    pub root: u32,
    /// Elements of a block.
    pub count: u64,
    /// Bytes of an element.
    pub size: u64,
    /// Source and result are the same memory.
    pub in_place: bool,
}

impl Shape {
    /// The shape of a barrier without members.
    pub const NONE: Self =
        Self { kind: Kind::Barrier, n: 0, me: 0, root: 0, count: 0, size: 0, in_place: false };

    /// Bytes of a block.
    pub const fn block(&self) -> u64 {
        self.count * self.size
    }
}

/// One of the memory areas of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    /// The source. Never written.
    In,
    /// The result.
    Out,
    /// Memory of the node.
    Scratch,
}

/// A byte position in an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The area.
    pub area: Area,
    /// Offset in the area, bytes.
    pub off: u64,
}

impl Place {
    /// A place in the source.
    pub const fn input(off: u64) -> Self {
        Self { area: Area::In, off }
    }

    /// A place in the result.
    pub const fn out(off: u64) -> Self {
        Self { area: Area::Out, off }
    }

    /// A place in the node's memory.
    pub const fn scratch(off: u64) -> Self {
        Self { area: Area::Scratch, off }
    }

    /// `n` bytes further.
    #[must_use]
    pub const fn plus(self, n: u64) -> Self {
        Self { area: self.area, off: self.off + n }
    }
}

/// The payload of one message: up to two pieces, since a range of blocks may wrap around.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Start and bytes of each piece; an unused piece has 0 bytes.
    pub pieces: [(Place, u64); 2],
}

impl Slice {
    /// No bytes.
    pub const EMPTY: Self = Self { pieces: [(Place::scratch(0), 0); 2] };

    /// One piece.
    pub const fn one(at: Place, len: u64) -> Self {
        Self { pieces: [(at, len), (Place::scratch(0), 0)] }
    }

    /// Bytes in total.
    pub const fn len(&self) -> u64 {
        self.pieces[0].1 + self.pieces[1].1
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One message of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Comm {
    /// Rank of the member that it goes to or comes from.
    pub rank: u32,
    /// Distinguishes the message from others between the same two members in the same call, as far
    /// as their order does not. Below 2^12.
    pub step: u16,
    /// The payload.
    pub slice: Slice,
}

/// A computation without messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Local {
    /// Copies `count` runs of `len` bytes.
    Copy {
        /// Start of the first run.
        from: Place,
        /// Destination of the first run.
        to: Place,
        /// Bytes of a run.
        len: u64,
        /// Number of runs.
        count: u64,
        /// Distance between runs in the source, bytes.
        from_step: i64,
        /// Distance between runs at the destination, bytes.
        to_step: i64,
    },
    /// `to = a op b`, element by element.
    Reduce {
        /// Left operand.
        a: Place,
        /// Right operand.
        b: Place,
        /// Result; may be the same as an operand.
        to: Place,
        /// Bytes of each operand.
        len: u64,
    },
}

impl Local {
    /// A copy of one run.
    pub const fn copy(from: Place, to: Place, len: u64) -> Self {
        Self::Copy { from, to, len, count: 1, from_step: 0, to_step: 0 }
    }
}

/// The actions between two points at which a member waits for others.
///
/// The order is: `before`; all receives and sends together; when every receive has completed,
/// `after`. A place that is sent from may be written by the `after` of a later round or by the
/// receives of the round after the next, since [`run::Run`] waits for the sends that matter; or by
/// anything that cannot happen before the message has arrived.
#[derive(Clone, Debug, Default)]
pub struct Round {
    /// Computations before the messages.
    pub before: Vec<Local>,
    /// Receives.
    pub recvs: Vec<Comm>,
    /// Sends.
    pub sends: Vec<Comm>,
    /// Computations after the receives, in this order.
    pub after: Vec<Local>,
    /// The next round needs no data that this one receives, so it need not wait for all of it.
    pub free: bool,
}

impl Round {
    /// Clears the round and keeps its memory.
    pub fn clear(&mut self) {
        self.before.clear();
        self.recvs.clear();
        self.sends.clear();
        self.after.clear();
        self.free = false;
    }

    fn is_empty(&self) -> bool {
        self.before.is_empty()
            && self.recvs.is_empty()
            && self.sends.is_empty()
            && self.after.is_empty()
    }
}
