//! A packet on its way to a frame.

use crate::rel::psn::Psn;
use crate::rel::sent::BodyRef;
use crate::slab::NONE;
use crate::wire::Ty;

/// A packet about to be sent.
pub(super) struct Packet<'a> {
    pub(super) ty: Ty,
    pub(super) psn: Psn,
    pub(super) op: &'a [u8],
    pub(super) body: BodyRef,
    /// The request whose memory the body lies in, or `NONE`.
    pub(super) wr: u32,
    /// Ask for an acknowledgement.
    pub(super) ar: bool,
    /// It is the last of `wr`, and somebody waits for the acknowledgement.
    pub(super) ends: bool,
    pub(super) rtx: bool,
}

/// What became of an attempt to send.
pub(super) enum Step {
    Sent,
    /// Something else has to happen first; it will put the peer into the queue again.
    Wait,
    /// The port or a pool has no room now.
    Full,
}

impl<'a> Packet<'a> {
    pub(super) fn control(ty: Ty, psn: Psn, op: &'a [u8]) -> Self {
        Self { ty, psn, op, body: BodyRef::None, wr: NONE, ar: false, ends: false, rtx: false }
    }
}
