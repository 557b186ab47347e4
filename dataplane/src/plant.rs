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
    RendezvousCompletedOnAck,
    /// A packet held for order is never freed.
    HeldPacketLeaked,
    /// Operations that only wait for a response are forgotten when a session ends.
    PendingResponsesDropped,
    /// A send completes on a SACK bit although an earlier packet may be lost for good.
    CompletionOnSack,
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
    SegmentOffsetUnchecked,
    /// The timer of a lost packet is not armed again after its first firing.
    RetransmitOnce,
    /// A late poll declares a peer dead before a keepalive could be answered.
    DeadWithoutKeepalive,
    /// A message for an endpoint is matched before an earlier one that has not arrived in full.
    OrderingNotEnforced,
    /// Remote CQ data is left out of the second and later messages of a shared frame.
    PackedCqDataDropped,
    /// A cancelled receive stays in the matching list.
    CancelledReceiveMatches,
    /// Of a region's key only the table index is compared.
    KeyPartlyChecked,
    /// Operands and compare values are laid out again at every attempt to send them.
    OperandsEncodedTwice,
    /// Later packets of an atomic operation have the session's new frame length instead of the
    /// length that its operands are laid out for.
    OperandsAtNewFrameLength,
    /// The state of a collective is used for a call with another root or length.
    CollectiveArgumentsUnchecked,
    /// Processes behind one MAC are treated as one station.
    OneStationPerMac,
    /// The room of an abandoned read is not offered to waiting reads.
    ReadRoomLeaked,
    /// The packets after an abandoned packet of a write are executed.
    AbandonedWriteContinues,
    /// The packets after a withdrawn packet of a fetching atomic are executed.
    WithdrawnFetchContinues,
    /// The cookie of an OPEN is not verified.
    CookieUnchecked,
    /// Every OPEN creates a session, however many are half open.
    HalfOpenUnbounded,
    /// An OPEN of another incarnation replaces the known one without proof.
    IncarnationReplacedUnproven,
    /// Operations queued for a session that the peer never confirmed end with it.
    QueuedOpsFailedByOpen,
    /// A response is repeated by a timer.
    ResponseRetransmitted,
    /// Frames have the length that both ends announce, whatever length passed.
    PathMtuIgnored,
    /// A session ends by silence alone, although retransmissions make no progress.
    StallUndetected,
    /// The cached route to an address survives its removal from the vector.
    StaleRoute,
    /// The cached source address of a peer survives its removal from the vector.
    StaleSource,
    /// The cached grant of requests survives the closing of the region.
    StaleGrant,
    /// Messages may still be sent at once although others are queued.
    StaleTxQuota,
    /// The next packet is still taken for one that may be accepted in order.
    StaleInOrder,
    /// A session that has ended is still taken for an open one.
    StaleFastPath,
    /// Receives may still be posted without a look-up although an unexpected message waits.
    StaleRxReservation,
    /// Reserved room for operations is not released.
    OpsReservationLeaked,
    /// A frame of a near session is accepted from any port.
    NearFromAnyPort,
    /// A session inherits the path of the previous one.
    StalePath,
    /// A packet to a far peer leaves without a retransmission record, as to a near one.
    FarWithoutRecord,
    /// Packets of peers that need a look-up take the fast paths that skip it.
    FastPathWithoutLookup,
    /// An OPEN need not name the incarnation, although this node requires it.
    OpenWithoutIncarnation,
    /// Every sealed frame has the same counter.
    NonceReused,
    /// A node with a key also accepts frames that are not sealed.
    UnsealedAccepted,
    /// A handshake in progress continues under the old key when the first key changes.
    StaleHandshakeKey,
    /// A renewed certificate is not used: the cached one is kept too long.
    StaleCertificate,
    /// An old key is dropped although the peer may not have received a frame under the new one.
    OldKeyDroppedEarly,
    /// An OPEN is assigned to the first tenant, whatever key it came under.
    WrongTenant,
    /// A receive for one tenant matches messages of all tenants.
    TenantNotMatched,
    /// The sessions of a tenant survive the removal of its key.
    RemovedTenantSessionsKept,
    /// An OPEN that the peer may have seen is repeated on another path.
    OpenRepeatedOnOtherPath,
    /// A station with the same MAC is taken for near.
    NearByMacAlone,
    /// A near peer that has left is still waited for.
    DepartureIgnored,
    /// A send with match completion completes when the message has arrived.
    MatchCompleteOnArrival,
    /// A send with inject completion completes once it was sent, although its source was not copied
    /// and may have to be sent again.
    InjectCompleteUncopied,
    /// A member puts its contribution to a call on a board before all have read what that
    /// overwrites.
    ContributionOverwritten,
}

/// All bugs in order of declaration.
pub const ALL: [Bug; 66] = [
    Bug::OldDuplicateDelivered,
    Bug::DuplicateDelivered,
    Bug::RendezvousCompletedOnAck,
    Bug::HeldPacketLeaked,
    Bug::PendingResponsesDropped,
    Bug::CompletionOnSack,
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
    Bug::SegmentOffsetUnchecked,
    Bug::RetransmitOnce,
    Bug::DeadWithoutKeepalive,
    Bug::OrderingNotEnforced,
    Bug::PackedCqDataDropped,
    Bug::CancelledReceiveMatches,
    Bug::KeyPartlyChecked,
    Bug::OperandsEncodedTwice,
    Bug::OperandsAtNewFrameLength,
    Bug::CollectiveArgumentsUnchecked,
    Bug::OneStationPerMac,
    Bug::ReadRoomLeaked,
    Bug::AbandonedWriteContinues,
    Bug::WithdrawnFetchContinues,
    Bug::CookieUnchecked,
    Bug::HalfOpenUnbounded,
    Bug::IncarnationReplacedUnproven,
    Bug::QueuedOpsFailedByOpen,
    Bug::ResponseRetransmitted,
    Bug::PathMtuIgnored,
    Bug::StallUndetected,
    Bug::StaleRoute,
    Bug::StaleSource,
    Bug::StaleGrant,
    Bug::StaleTxQuota,
    Bug::StaleInOrder,
    Bug::StaleFastPath,
    Bug::StaleRxReservation,
    Bug::OpsReservationLeaked,
    Bug::NearFromAnyPort,
    Bug::StalePath,
    Bug::FarWithoutRecord,
    Bug::FastPathWithoutLookup,
    Bug::OpenWithoutIncarnation,
    Bug::NonceReused,
    Bug::UnsealedAccepted,
    Bug::StaleHandshakeKey,
    Bug::StaleCertificate,
    Bug::OldKeyDroppedEarly,
    Bug::WrongTenant,
    Bug::TenantNotMatched,
    Bug::RemovedTenantSessionsKept,
    Bug::OpenRepeatedOnOtherPath,
    Bug::NearByMacAlone,
    Bug::DepartureIgnored,
    Bug::MatchCompleteOnArrival,
    Bug::InjectCompleteUncopied,
    Bug::ContributionOverwritten,
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
