//! Control messages between members: tags, and error codes of ended groups.

use crate::error::Error;

/// Receives for control messages that every collective side keeps posted.
pub(super) const LISTENING: usize = 8;

/// Kinds of messages between collective sides, in bits 12 to 15 of the tag.
pub(super) const KIND_SHIFT: u32 = 12;
pub(super) const KIND_DATA: u64 = 0;
pub(super) const KIND_CONTROL: u64 = 1;

/// Kinds of control messages.
pub(super) const ABORT: u64 = 1;
pub(super) const LEAVE: u64 = 2;
/// Asks whether the receiver is still in the group. If not, it answers LEAVE or ABORT.
pub(super) const ASK: u64 = 3;

/// Time after which an awaited member is asked, nanoseconds.
pub(super) const ASK_NS: u64 = 1_000_000_000;

/// Members called different collectives, or the same with different arguments.
pub(super) const DISAGREE: Error =
    Error::Invalid("members of the group called different collectives");

/// A member has left the group.
pub(super) const LEFT: Error = Error::ConnRefused;

/// The tag of a message of a call.
pub(super) fn data_tag(gid: u32, seq: u16, step: u16) -> u64 {
    u64::from(gid) << 32 | u64::from(seq) << 16 | KIND_DATA << KIND_SHIFT | u64::from(step & 0xfff)
}

/// The tag of a control message.
pub(super) fn control_tag(gid: u32, kind: u64) -> u64 {
    u64::from(gid) << 32 | KIND_CONTROL << KIND_SHIFT | kind
}

/// The group id, the call's sequence number and the message kind in a tag.
pub(super) fn parts_of(tag: u64) -> (u32, u16, u64) {
    ((tag >> 32) as u32, (tag >> 16) as u16, tag >> KIND_SHIFT & 15)
}

/// The error that ended a group, from its code in a control message.
pub(super) fn reason(code: u64) -> Error {
    const REASONS: [Error; 6] = [
        Error::HostUnreach,
        Error::Canceled,
        Error::TimedOut,
        Error::ConnRefused,
        DISAGREE,
        Error::NetDown,
    ];
    let known = REASONS.into_iter().find(|err| err.fi_errno() as u64 == code);
    known.unwrap_or(Error::ConnReset)
}
