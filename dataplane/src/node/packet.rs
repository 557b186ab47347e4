//! A packet about to be sent, and the outcome of the attempt.

use barewire_driver::port::Station;

use super::peer::Peer;
use crate::idx::TxIdx;
use crate::rel::psn::Psn;
use crate::rel::sent::BodyRef;
use crate::wire::{Base, Ty};

/// A packet about to be sent.
pub(super) struct Packet<'a> {
    pub(super) ty: Ty,
    pub(super) psn: Psn,
    pub(super) op: &'a [u8],
    pub(super) body: BodyRef,
    /// The request whose memory the body lies in, or `NONE`.
    pub(super) wr: TxIdx,
    /// Ask for an acknowledgement.
    pub(super) ar: bool,
    /// It is the last packet of `wr`, whose completion waits for the acknowledgement.
    pub(super) ends: bool,
    pub(super) rtx: bool,
}

/// Outcome of an attempt to send.
pub(super) enum Step {
    Sent,
    /// Something else has to happen first, and will queue the peer again.
    Wait,
    /// The port or a pool has no room now.
    Full,
}

/// What became of a message that was to be packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Joined {
    /// It cannot be packed: nothing has happened.
    No,
    /// Its packet waits for more.
    Waits,
    /// Its packet leaves with the next transmit.
    Leaves,
}

impl<'a> Packet<'a> {
    /// The base of the packet from `src` to `peer`, with `plen` bytes of payload.
    #[inline]
    pub(super) fn base(&self, src: Station, peer: &Peer, plen: usize) -> Base {
        let Self { ty, psn, ar, rtx, .. } = *self;
        Base { psn, ar, rtx, plen: plen as u16, ..peer.base(src, ty) }
    }

    pub(super) fn control(ty: Ty, psn: Psn, op: &'a [u8]) -> Self {
        Self {
            ty,
            psn,
            op,
            body: BodyRef::None,
            wr: TxIdx::NONE,
            ar: false,
            ends: false,
            rtx: false,
        }
    }
}
