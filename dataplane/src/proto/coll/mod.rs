//! Collectives as schedules: what one member of a group sends, receives and computes.
//!
//! - [`Shape`]: one member's view of one call. [`plan`]: which algorithm, from a cost model.
//! - [`program`]: the algorithm as rounds, made one by one and never held as a whole.
//! - [`run`]: the interpreter that a node drives: what to post next, and what it waits for.
//!
//! Nothing here knows a packet, a peer or an address: members are ranks, memory is a place in one
//! of three areas. All members must come to the same schedule, so what decides is integers that all
//! of them have.

pub mod plan;
pub mod program;
pub mod run;
#[cfg(test)]
mod tests;

/// What a group does together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Nobody goes on before everybody has come.
    Barrier = 0,
    /// The root's vector to all.
    Broadcast = 1,
    /// Block `j` of member `i` becomes block `i` of member `j`.
    Alltoall = 2,
    /// The reduction of all vectors to all.
    Allreduce = 3,
    /// All members' blocks to all.
    Allgather = 4,
    /// Block `i` of the reduction of all vectors to member `i`.
    ReduceScatter = 5,
    /// The reduction of all vectors to the root.
    Reduce = 6,
    /// Block `i` of the root to member `i`.
    Scatter = 7,
    /// All members' blocks to the root.
    Gather = 8,
}

impl Kind {
    /// All of them, in the order of libfabric's `enum fi_collective_op`.
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

    /// Whether it computes.
    pub const fn reduces(self) -> bool {
        matches!(self, Self::Allreduce | Self::ReduceScatter | Self::Reduce)
    }

    /// Whether one member is special.
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

    /// Blocks that its result holds. Of a broadcast, that is the one buffer it has.
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
    /// What.
    pub kind: Kind,
    /// Members, 1 at least.
    pub n: u32,
    /// Which of them this is.
    pub me: u32,
    /// The special one, 0 if there is none.
    pub root: u32,
    /// Elements of a block.
    pub count: u64,
    /// Bytes of an element.
    pub size: u64,
    /// Source and result are the same memory.
    pub in_place: bool,
}

impl Shape {
    /// Of a barrier of nobody.
    pub const NONE: Self =
        Self { kind: Kind::Barrier, n: 0, me: 0, root: 0, count: 0, size: 0, in_place: false };

    /// Bytes of a block.
    pub const fn block(&self) -> u64 {
        self.count * self.size
    }
}

/// One of the memories of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    /// The source. Never written.
    In,
    /// The result.
    Out,
    /// Memory of ours.
    Scratch,
}

/// A byte in one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which.
    pub area: Area,
    /// Where.
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

    /// A place in our own memory.
    pub const fn scratch(off: u64) -> Self {
        Self { area: Area::Scratch, off }
    }

    /// `n` bytes further.
    #[must_use]
    pub const fn plus(self, n: u64) -> Self {
        Self { area: self.area, off: self.off + n }
    }
}

/// What one message carries: up to two pieces, since blocks in the order of ranks wrap around.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Start and bytes of each; what is not there has no bytes.
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
    /// Of the member that it goes to or comes from.
    pub rank: u32,
    /// Tells it from others between the same two members in the same call, as far as their order
    /// does not. Below 2^12.
    pub step: u16,
    /// What.
    pub slice: Slice,
}

/// Something computed without anybody else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Local {
    /// Copies `count` runs of `len` bytes.
    Copy {
        /// The first run.
        from: Place,
        /// Where it goes.
        to: Place,
        /// Bytes of a run.
        len: u64,
        /// Runs.
        count: u64,
        /// From one run to the next, bytes.
        from_step: i64,
        /// The same at the destination.
        to_step: i64,
    },
    /// `to = a op b`, element by element.
    Reduce {
        /// Left operand.
        a: Place,
        /// Right operand.
        b: Place,
        /// Result; may be one of them.
        to: Place,
        /// Bytes.
        len: u64,
    },
}

impl Local {
    /// One run.
    pub const fn copy(from: Place, to: Place, len: u64) -> Self {
        Self::Copy { from, to, len, count: 1, from_step: 0, to_step: 0 }
    }
}

/// What happens between two points at which a member waits for others.
///
/// The order is: `before`; all receives and sends together; when every receive has come, `after`.
/// A place that is sent from may be written by the `after` of a later round or by the receives of
/// the round after the next, since [`run::Run`] waits for the sends that matter; or by anything
/// that cannot happen before the message has arrived.
#[derive(Clone, Debug, Default)]
pub struct Round {
    /// Computed first.
    pub before: Vec<Local>,
    /// Received.
    pub recvs: Vec<Comm>,
    /// Sent.
    pub sends: Vec<Comm>,
    /// Computed last, in this order.
    pub after: Vec<Local>,
    /// The next round needs nothing of what this one receives, so it need not wait for all of it.
    pub free: bool,
}

impl Round {
    /// Forgets everything and keeps the memory.
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
