//! Typed indices of slots: an index of one table cannot be used in another.

/// The number that stands for no slot.
pub const NONE: u32 = u32::MAX;

/// An index of a slot of a [`Slab`](crate::slab::Slab) or a [`Table`](crate::table::Table).
pub trait Idx: Copy + Eq + 'static {
    /// No slot: the end of a list.
    const NONE: Self;

    /// Number of the slot.
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

/// Defines the index types.
macro_rules! indices {
    ($($(#[$what:meta])* $name:ident;)*) => {$(
        $(#[$what])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(transparent)]
        pub struct $name(u32);

        impl $name {
            /// No slot.
            pub const NONE: Self = Self(NONE);

            /// The index of slot number `n`.
            #[inline(always)]
            pub const fn of(n: u32) -> Self {
                Self(n)
            }

            /// Number of the slot.
            #[inline(always)]
            pub const fn get(self) -> u32 {
                self.0
            }

            /// [`get`](Self::get) as `usize`, for arrays parallel to the table.
            #[inline(always)]
            pub const fn at(self) -> usize {
                self.0 as usize
            }
        }

        /// The default is no slot.
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
    /// A packet that is kept for retransmission until it is acknowledged.
    SentIdx;
    /// A rendezvous message that is being pulled, or a read.
    PullIdx;
    /// A posted receive.
    RecvIdx;
    /// A message that arrived before its receive was posted.
    UnexpectedIdx;
    /// A response to a peer's one-sided operation.
    ResponseIdx;
    /// A message whose segments have arrived in part.
    ReassemblyIdx;
    /// An out-of-order packet.
    OooIdx;
    /// The record of a one-sided operation.
    RmaIdx;
    /// An address vector of a node.
    AvIdx;
    /// A scalable endpoint of a node.
    SepIdx;
    /// The record of a failure in one completion queue.
    CqErrIdx;
    /// A group of collectives.
    GroupIdx;
    /// A collective operation in progress.
    CallIdx;
    /// A buffer for packed messages.
    PackIdx;
    /// The retransmission ring of one session.
    RingIdx;
    /// An address in an address vector.
    AddrIdx;
    /// A block of memory for unexpected messages.
    BlockIdx;
}

/// From an index that is stored in 16 bits.
impl From<u16> for FastOpIdx {
    #[inline(always)]
    fn from(n: u16) -> Self {
        Self(n.into())
    }
}
