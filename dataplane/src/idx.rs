//! The index of a slot, by what lies in it: an index of one table does not fit another.

/// The number of no slot.
pub const NONE: u32 = u32::MAX;

/// What names a slot of a [`Slab`](crate::slab::Slab) or a [`Table`](crate::table::Table).
pub trait Idx: Copy + Eq + 'static {
    /// No slot: the end of a list.
    const NONE: Self;

    /// The slot's number.
    fn get(self) -> u32;

    /// The index of slot number `n`.
    fn new(n: u32) -> Self;
}

impl Idx for u32 {
    const NONE: Self = NONE;

    #[inline(always)]
    fn get(self) -> u32 {
        self
    }

    #[inline(always)]
    fn new(n: u32) -> Self {
        n
    }
}

/// Types of indices.
macro_rules! indices {
    ($($(#[$what:meta])* $name:ident;)*) => {$(
        $(#[$what])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(transparent)]
        pub struct $name(u32);

        impl $name {
            /// None of them.
            pub const NONE: Self = Self(NONE);

            /// That in slot number `n`.
            #[inline(always)]
            pub const fn of(n: u32) -> Self {
                Self(n)
            }

            /// The slot's number.
            #[inline(always)]
            pub const fn get(self) -> u32 {
                self.0
            }

            /// [`get`](Self::get), to index what lies beside the table.
            #[inline(always)]
            pub const fn at(self) -> usize {
                self.0 as usize
            }
        }

        /// That of none.
        impl Default for $name {
            #[inline(always)]
            fn default() -> Self {
                Self::NONE
            }
        }

        impl Idx for $name {
            const NONE: Self = Self(NONE);

            #[inline(always)]
            fn get(self) -> u32 {
                self.0
            }

            #[inline(always)]
            fn new(n: u32) -> Self {
                Self(n)
            }
        }
    )*};
}

indices! {
    /// A peer of a node.
    PeerIdx;
    /// An endpoint of a node.
    EpIdx;
    /// A completion queue of a node.
    CqIdx;
    /// A counter of a node.
    CntrIdx;
    /// A memory region of a node.
    MrIdx;
    /// A transmit request of a node.
    TxIdx;
    /// A one-sided operation of the fast path.
    FastOpIdx;
    /// A packet that is kept until it is acknowledged.
    SentIdx;
    /// A message that is pulled, or a read.
    PullIdx;
    /// A posted receive.
    RecvIdx;
    /// A message that has come before its receive was posted.
    UnexpectedIdx;
    /// An answer to a peer's one-sided operation.
    ResponseIdx;
    /// A message of which some segments have arrived.
    ReassemblyIdx;
    /// A packet that waits for an earlier one.
    OooIdx;
    /// The record of a one-sided operation.
    RmaIdx;
    /// An address vector of a node.
    AvIdx;
    /// A scalable endpoint of a node.
    SepIdx;
    /// The record of a failure, of one completion queue.
    CqErrIdx;
    /// A group of collectives.
    GroupIdx;
    /// A call of a collective that is under way.
    CallIdx;
    /// A buffer for packed messages.
    PackIdx;
    /// Where the packets in flight of one session stand.
    RingIdx;
    /// An address in an address vector.
    AddrIdx;
    /// A block of memory for messages that nobody has posted a receive for.
    BlockIdx;
}

/// An index that is kept in 16 bits.
impl From<u16> for FastOpIdx {
    #[inline(always)]
    fn from(n: u16) -> Self {
        Self(n.into())
    }
}
