//! Mutations for the simulator's own test: protocol bugs that a test can switch on.
//!
//! Without the feature `plant` [`planted`] is a constant `false` and costs nothing. With it, a test
//! enables one bug on its own thread (`with`) and checks which stage detects it. Each switch is at
//! a place where the mistake is likely, and its documentation says in one line what goes wrong.

/// A protocol bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Bug {
    /// A packet below the window is delivered again.
    OldDuplicateDelivered,
    /// A packet already in the window is delivered again.
    DuplicateDelivered,
    /// A rendezvous send completes when its RNDV is acknowledged, before the data is transferred.
    RendezvousDoneOnAck,
    /// A packet held for order is never freed.
    HeldPacketLeaked,
    /// Operations that only wait for a response are forgotten when a session ends.
    WaitingForgotten,
    /// A send completes on a SACK bit although an earlier packet may be lost for good.
    DoneOnSack,
    /// The word of a SACK bit is found by dividing by 8 instead of 64.
    SackWordInBytes,
    /// The receive bitmap is not cleared past its first word when the window moves.
    BitmapNotCleared,
    /// A packet for an earlier incarnation of this node is accepted.
    NoIncarnationCheck,
    /// No keepalive is sent while an operation only waits for the peer.
    NoKeepalive,
    /// A session name lacks the epoch: a packet of the previous session is accepted.
    NoSessionEpoch,
    /// The receiver accepts the packet one past its window.
    WindowPlusOne,
    /// Credit of a consumed message is not granted again.
    CreditNotReturned,
    /// An acknowledgement of packets that were never sent is accepted.
    AckOfUnsent,
    /// A wildcard receive matches before an older exact one.
    WildcardOrderIgnored,
    /// A message longer than its receive buffer is reported as a success.
    TruncationIsSuccess,
    /// A reset is accepted although it does not name this session.
    ResetWithoutEcho,
    /// The completion-queue entry that a failed operation had reserved is not released.
    CqReservationLeaked,
    /// A segment of a message is placed at its offset without a range check.
    PieceOffsetUnchecked,
    /// The timer of a lost packet is not armed again after its first firing.
    RetransmitOnce,
    /// A late poll declares a peer dead before a keepalive could be answered.
    DeadUnasked,
    /// A message for an endpoint is matched before an earlier one that has not arrived in full.
    OrderGateOpen,
    /// Remote CQ data is left out of the second and later messages of a shared frame.
    PackedDataDropped,
    /// A cancelled receive stays in the matching list.
    CancelKeepsMatch,
    /// Of a region's key only the table index is compared.
    KeyHalfChecked,
    /// Operands and compare values are laid out again at every attempt to send them.
    OperandsLaidOutTwice,
    /// Later packets of an atomic operation have the session's new frame length instead of the
    /// length that its operands are laid out for.
    OperandsOfAnotherLength,
    /// The state of a collective is used for a call with another root or length.
    OtherCallTaken,
    /// Processes behind one MAC are treated as one station.
    OneStationPerMac,
    /// The room of an abandoned read is not offered to waiting reads.
    ReadRoomKept,
    /// The packets after an abandoned packet of a write are executed.
    GivenUpWriteGoesOn,
    /// The packets after a withdrawn packet of a fetching atomic are executed.
    GivenUpFetchGoesOn,
    /// The cookie of an OPEN is not verified.
    CookieUnchecked,
    /// Every OPEN creates a session, however many are half open.
    HalfOpenUnbounded,
    /// An OPEN of another incarnation replaces the known one without proof.
    LifeDisplaced,
    /// Operations queued for a session that the peer never confirmed end with it.
    QueuedEndedByOpen,
    /// A response is repeated by a timer.
    AnswerRepeated,
    /// Frames have the length that both ends announce, whatever length passed.
    PathForgotten,
    /// A session ends by silence alone, although retransmissions make no progress.
    ProgressUnbounded,
    /// The cached route to an address survives its removal from the vector.
    RouteKept,
    /// The cached source address of a peer survives its removal from the vector.
    SourceKept,
    /// The cached grant of requests survives the closing of the region.
    GrantKept,
    /// Messages may still be sent at once although others are queued.
    TxQuotaKept,
    /// The next packet is still taken for one that may be accepted in order.
    InOrderKept,
    /// A session that has ended is still taken for an open one.
    FastPathKept,
    /// Receives may still be posted without a look-up although an unexpected message waits.
    RxReservedKept,
    /// Reserved room for operations is not released.
    OpsReservedLeaked,
    /// A frame of a near session is accepted from any port.
    CopyIsNear,
    /// A session inherits the path of the previous one.
    PathKept,
    /// A packet to a far peer leaves without a retransmission record, as to a near one.
    FarUnkept,
    /// Packets of peers that need a look-up take the fast paths that skip it.
    StrangerUnasked,
    /// An OPEN need not name the incarnation, although this node requires it.
    NamelessTaken,
    /// Every sealed frame has the same counter.
    CounterKept,
    /// A node with a key also accepts frames that are not sealed.
    ClearTaken,
    /// A handshake in progress continues under the old key when the first key changes.
    OfferKept,
    /// A renewed certificate is not used: the cached one is kept too long.
    CertificateKept,
    /// An old key is dropped although the peer may not have received a frame under the new one.
    RenewedUnheard,
    /// An OPEN is assigned to the first tenant, whatever key it came under.
    TenantOfFirst,
    /// A receive for one tenant matches messages of all tenants.
    TenantUnasked,
    /// The sessions of a tenant survive the removal of its key.
    TenantSessionsKept,
    /// An OPEN that the peer may have seen is repeated on another path.
    OpenTurned,
    /// A station with the same MAC is taken for near.
    MacIsNear,
    /// A near peer that has left is still waited for.
    AbsenceUnheard,
    /// A send with match completion completes when the message has arrived.
    MatchUnheard,
}

/// All bugs in order of declaration.
pub const ALL: [Bug; 64] = [
    Bug::OldDuplicateDelivered,
    Bug::DuplicateDelivered,
    Bug::RendezvousDoneOnAck,
    Bug::HeldPacketLeaked,
    Bug::WaitingForgotten,
    Bug::DoneOnSack,
    Bug::SackWordInBytes,
    Bug::BitmapNotCleared,
    Bug::NoIncarnationCheck,
    Bug::NoKeepalive,
    Bug::NoSessionEpoch,
    Bug::WindowPlusOne,
    Bug::CreditNotReturned,
    Bug::AckOfUnsent,
    Bug::WildcardOrderIgnored,
    Bug::TruncationIsSuccess,
    Bug::ResetWithoutEcho,
    Bug::CqReservationLeaked,
    Bug::PieceOffsetUnchecked,
    Bug::RetransmitOnce,
    Bug::DeadUnasked,
    Bug::OrderGateOpen,
    Bug::PackedDataDropped,
    Bug::CancelKeepsMatch,
    Bug::KeyHalfChecked,
    Bug::OperandsLaidOutTwice,
    Bug::OperandsOfAnotherLength,
    Bug::OtherCallTaken,
    Bug::OneStationPerMac,
    Bug::ReadRoomKept,
    Bug::GivenUpWriteGoesOn,
    Bug::GivenUpFetchGoesOn,
    Bug::CookieUnchecked,
    Bug::HalfOpenUnbounded,
    Bug::LifeDisplaced,
    Bug::QueuedEndedByOpen,
    Bug::AnswerRepeated,
    Bug::PathForgotten,
    Bug::ProgressUnbounded,
    Bug::RouteKept,
    Bug::SourceKept,
    Bug::GrantKept,
    Bug::TxQuotaKept,
    Bug::InOrderKept,
    Bug::FastPathKept,
    Bug::RxReservedKept,
    Bug::OpsReservedLeaked,
    Bug::CopyIsNear,
    Bug::PathKept,
    Bug::FarUnkept,
    Bug::StrangerUnasked,
    Bug::NamelessTaken,
    Bug::CounterKept,
    Bug::ClearTaken,
    Bug::OfferKept,
    Bug::CertificateKept,
    Bug::RenewedUnheard,
    Bug::TenantOfFirst,
    Bug::TenantUnasked,
    Bug::TenantSessionsKept,
    Bug::OpenTurned,
    Bug::MacIsNear,
    Bug::AbsenceUnheard,
    Bug::MatchUnheard,
];

/// Whether `bug` is switched on for this thread.
#[cfg(not(feature = "plant"))]
#[inline(always)]
pub const fn planted(_bug: Bug) -> bool {
    false
}

/// Whether any bug is switched on for this thread: then the code's internal state may be
/// inconsistent, and its self-checks must not report it before the tests do.
#[cfg(not(feature = "plant"))]
#[inline(always)]
pub const fn is_planted() -> bool {
    false
}

/// Whether any bug is switched on for this thread: then the code's internal state may be
/// inconsistent, and its self-checks must not report it before the tests do.
#[cfg(feature = "plant")]
pub fn is_planted() -> bool {
    state::ON.get().is_some()
}

/// Whether `bug` is switched on for this thread. Marks it as reached if so.
#[cfg(feature = "plant")]
#[inline]
pub fn planted(bug: Bug) -> bool {
    let on = state::ON.get() == Some(bug);
    if on {
        state::REACHED.set(true);
    }
    on
}

/// Runs `f` with `bug` switched on for this thread. Also returns whether the switch was reached.
#[cfg(feature = "plant")]
pub fn with<T>(bug: Bug, f: impl FnOnce() -> T) -> (T, bool) {
    /// Switches the bug off when dropped, also if `f` panics, which a planted bug may well cause.
    struct Off;
    impl Drop for Off {
        fn drop(&mut self) {
            state::ON.set(None);
        }
    }
    state::REACHED.set(false);
    state::ON.set(Some(bug));
    let off = Off;
    let out = f();
    drop(off);
    (out, state::REACHED.get())
}

#[cfg(feature = "plant")]
mod state {
    use std::cell::Cell;

    thread_local! {
        pub(super) static ON: Cell<Option<super::Bug>> = const { Cell::new(None) };
        pub(super) static REACHED: Cell<bool> = const { Cell::new(false) };
    }
}
