//! Errors of calls and of operations.

/// One variant per `fi_errno`. A call that returns an error had no side effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No work request, credit or completion-queue entry is free, or the queue read is empty.
    /// Progress the completion queue, then try again.
    #[error("resource temporarily unavailable: read the completion queue, then try again")]
    Again,
    /// The queue's next entry is an error: read it with `readerr`.
    #[error("an error entry is next: call readerr")]
    Avail,
    /// An argument is out of range; the text names it.
    #[error("invalid argument: {0}")]
    Invalid(&'static str),
    /// A length or count exceeds the limit that the attributes report.
    #[error("message or element count too long")]
    MsgTooLong,
    /// A flag is unknown, or is not enabled for this object.
    #[error("flag not known or not granted")]
    BadFlags,
    /// The operation needs a capability that was not requested, or the combination does not exist.
    #[error("operation not supported: {0}")]
    OpNotSupp(&'static str),
    /// The endpoint is not enabled, or closed.
    #[error("object is in the wrong state")]
    OpBadState,
    /// The endpoint has no completion queue for a direction it uses.
    #[error("no completion queue bound")]
    NoCq,
    /// The endpoint has no address vector.
    #[error("no address vector bound")]
    NoAv,
    /// The endpoint needs an event queue and has none.
    #[error("no event queue bound")]
    NoEq,
    /// The object is in use.
    #[error("object is busy")]
    Busy,
    /// The function is not implemented.
    #[error("function not implemented")]
    NoSys,
    /// No provider or object matches the hints.
    #[error("nothing matches")]
    NoData,
    /// A receive buffer was shorter than its message.
    #[error("message truncated")]
    Trunc,
    /// A peek found no message.
    #[error("no matching message")]
    NoMsg,
    /// The operation was cancelled, or its endpoint closed.
    #[error("operation cancelled")]
    Canceled,
    /// The peer does not answer, or never did.
    #[error("peer unreachable")]
    HostUnreach,
    /// The peer restarted, or dropped the session.
    #[error("session reset by peer")]
    ConnReset,
    /// The peer speaks another version of the protocol, or the option is unknown.
    #[error("protocol version or option not supported")]
    NoProtoOpt,
    /// A result does not fit the caller's buffer.
    #[error("buffer too small")]
    TooSmall,
    /// The wait timed out.
    #[error("timed out")]
    TimedOut,
    /// The sender is not in the address vector (`FI_SOURCE_ERR`).
    #[error("source address not in the address vector")]
    AddrNotAvail,
    /// The address (MAC or endpoint number) is in use already.
    #[error("address already in use")]
    AddrInUse,
    /// The requested key is in use or does not exist.
    #[error("key not available")]
    NoKey,
    /// The key of a remote operation is unknown at the target.
    #[error("key rejected")]
    KeyRejected,
    /// The key is valid, but access or bounds are not; or a permission is missing.
    #[error("permission denied")]
    Access,
    /// A table whose size was fixed when the domain was opened is full.
    #[error("out of memory or table space")]
    NoMem,
    /// The process has no file descriptor left; the log names the remedy.
    #[error("too many open files")]
    ManyFiles,
    /// `/dev/shm`, or another file system of the port's memory, is full; the log names the remedy.
    #[error("no space left on device")]
    NoSpace,
    /// The device is gone.
    #[error("network is down")]
    NetDown,
    /// The peer has no such endpoint.
    #[error("no such endpoint at the peer")]
    ConnRefused,
    /// A handle of a closed object.
    #[error("bad handle")]
    BadFd,
    /// The process or environment lacks something; the log names it.
    #[error("no such device")]
    NoDev,
    /// Completion queue overrun.
    #[error("queue overrun")]
    Overrun,
    /// A value does not fit.
    #[error("value too large")]
    Overflow,
}

impl Error {
    /// The positive `fi_errno`, as in `fi_cq_err_entry.err`; a call returns it negated.
    ///
    /// Source: rdma/fi_errno.h.
    pub const fn fi_errno(self) -> i32 {
        match self {
            Self::Again => 11,
            Self::NoMem => 12,
            Self::Access => 13,
            Self::Busy => 16,
            Self::NoDev => 19,
            Self::Invalid(_) => 22,
            Self::BadFd => 9,
            Self::ManyFiles => 24,
            Self::NoSpace => 28,
            Self::NoSys => 38,
            Self::NoMsg => 42,
            Self::NoData => 61,
            Self::Overflow => 75,
            Self::MsgTooLong => 90,
            Self::NoProtoOpt => 92,
            Self::OpNotSupp(_) => 95,
            Self::AddrInUse => 98,
            Self::AddrNotAvail => 99,
            Self::NetDown => 100,
            Self::ConnReset => 104,
            Self::TimedOut => 110,
            Self::ConnRefused => 111,
            Self::HostUnreach => 113,
            Self::Canceled => 125,
            Self::KeyRejected => 129,
            Self::TooSmall => 257,
            Self::OpBadState => 258,
            Self::Avail => 259,
            Self::BadFlags => 260,
            Self::NoEq => 261,
            Self::NoCq => 263,
            Self::Trunc => 265,
            Self::NoKey => 266,
            Self::NoAv => 267,
            Self::Overrun => 268,
        }
    }
}

/// The result of a call.
pub type Result<T> = std::result::Result<T, Error>;
