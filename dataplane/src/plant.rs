//! Bugs planted on purpose, so that the simulator can be tested as well.
//!
//! Without the feature `plant` [`planted`] is a constant `false` and costs nothing. With it, a test
//! enables one bug on its own thread (`with`) and checks which stage finds it. Each switch is at a
//! place where such a mistake is likely, and says in one line what goes wrong there.

/// One way to get the protocol wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Bug {
    /// A packet below the window is delivered again.
    OldDuplicateDelivered,
    /// A packet already in the window is delivered again.
    DuplicateDelivered,
    /// A rendezvous send completes when its announcement is acknowledged, before the data is here.
    RendezvousDoneOnAck,
    /// A packet held for order is never given back.
    HeldPacketLeaked,
    /// Operations that only wait for an answer are forgotten when a session ends.
    WaitingForgotten,
    /// A send completes on a SACK bit although an earlier packet may be lost for good.
    DoneOnSack,
    /// The word of a SACK bit is found by dividing by 8 instead of 64.
    SackWordInBytes,
    /// The receive bitmap is not cleared past its first word when the window moves.
    BitmapNotCleared,
    /// A packet for an earlier life of this node is taken.
    NoIncarnationCheck,
    /// Nothing is sent while an operation waits for the peer only.
    NoKeepalive,
    /// A session is named without its epoch: a packet of the one before is taken.
    NoSessionEpoch,
    /// The receiver takes the packet one past its window.
    WindowPlusOne,
    /// Credit of a consumed message is not granted again.
    CreditNotReturned,
    /// An acknowledgement of packets that were never sent is believed.
    AckOfUnsent,
    /// A wildcard receive is found before an older exact one.
    WildcardOrderIgnored,
    /// A message longer than its receive buffer is reported as a success.
    TruncationIsSuccess,
    /// A reset is believed although it does not name this session.
    ResetWithoutEcho,
    /// The place in a completion queue that a failed operation had reserved is not given back.
    CqReservationLeaked,
    /// A piece of a message is placed where it claims to belong, unchecked.
    PieceOffsetUnchecked,
    /// The timer of a lost packet is not armed again after its first firing.
    RetransmitOnce,
    /// A peer is found dead by a late poll, before it was asked and could answer.
    DeadUnasked,
    /// A message for an endpoint is matched before an earlier one that has not arrived in full.
    OrderGateOpen,
    /// Remote CQ data is left out of the second and later messages of a shared frame.
    PackedDataDropped,
    /// A cancelled receive stays in the matching list.
    CancelKeepsMatch,
    /// Of a region's key only the place in the table is compared.
    KeyHalfChecked,
    /// Operands and compare values are put side by side once for every try to send them.
    OperandsLaidOutTwice,
    /// Later packets of an atomic operation are as long as the session's frames have become, not as
    /// its operands are laid out.
    OperandsOfAnotherLength,
    /// What was found of a collective is taken for that of another root or length.
    OtherCallTaken,
    /// Processes behind one MAC are taken for one.
    OneStationPerMac,
    /// The room of a read that is given up is not offered to those that wait for it.
    ReadRoomKept,
    /// What stands behind a packet of a write that is given up is executed.
    GivenUpWriteGoesOn,
    /// What stands behind a withdrawn packet of a fetching atomic is executed.
    GivenUpFetchGoesOn,
    /// The cookie of an OPEN is taken unseen.
    CookieUnchecked,
    /// Every OPEN makes a session, however many are half open.
    HalfOpenUnbounded,
    /// An OPEN of another life replaces the one that is known, without proof.
    LifeDisplaced,
    /// What was queued for a session that nobody confirmed ends with it.
    QueuedEndedByOpen,
    /// An answer is repeated by a timer.
    AnswerRepeated,
    /// Frames are as long as both ends announce, whatever has passed.
    PathForgotten,
    /// A session ends by silence alone, although nothing gets through.
    ProgressUnbounded,
    /// The way to an address is remembered when that is taken out of the vector.
    RouteKept,
    /// What a sender is called is remembered when its address is taken out of the vector.
    SourceKept,
    /// What was found out about requests is remembered when the region is closed.
    GrantKept,
    /// Messages may still leave at once, though others wait.
    TxQuotaKept,
    /// The next packet is still taken for one that may be taken as it is.
    InOrderKept,
    /// A session that has ended is still taken for one that is open.
    FastPathKept,
    /// Receives may still be posted unasked, though a message waits.
    RxReservedKept,
    /// Room for operations that was taken in advance is not given back.
    OpsReservedLeaked,
    /// A frame of a near session is taken whatever it came by.
    CopyIsNear,
    /// A session has the path of the one before it.
    PathKept,
    /// What goes to a far peer leaves without a record, as to a near one.
    FarUnkept,
    /// Packets of peers that are to be looked up take the ways that ask fewer questions.
    StrangerUnasked,
    /// An OPEN need not name the incarnation, whoever is reached by name.
    NamelessTaken,
    /// Every sealed frame has the same counter.
    CounterKept,
    /// Where there is a key, frames that are not sealed are taken as well.
    ClearTaken,
    /// What is being opened when the first key changes goes on under the key before.
    OfferKept,
    /// A renewed certificate is not taken: the one before is remembered too long.
    CertificateKept,
    /// An old key is left although the peer may not have got a frame under it.
    RenewedUnheard,
    /// An OPEN is of the first tenant, whosever key it came under.
    TenantOfFirst,
    /// A receive for a tenant takes messages of all.
    TenantUnasked,
    /// The sessions of a tenant go on whose key is removed.
    TenantSessionsKept,
    /// An OPEN that the peer may have seen goes on on another path.
    OpenTurned,
    /// Who has the same MAC is taken for near.
    MacIsNear,
    /// A near peer that has left is waited for.
    AbsenceUnheard,
    /// A send that is to complete when it is matched completes when it has arrived.
    MatchUnheard,
}

/// All of them, in order of declaration.
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

/// Whether any bug is switched on for this thread: what the code believes of its own records may be
/// wrong then, and is to show by what comes of it.
#[cfg(not(feature = "plant"))]
#[inline(always)]
pub const fn is_planted() -> bool {
    false
}

/// Whether any bug is switched on for this thread: what the code believes of its own records may be
/// wrong then, and is to show by what comes of it.
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

/// Runs `f` with `bug` switched on for this thread, and says whether the place was reached.
#[cfg(feature = "plant")]
pub fn with<T>(bug: Bug, f: impl FnOnce() -> T) -> (T, bool) {
    /// Switches the bug off again, also when `f` panics, which a planted bug may well cause.
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
