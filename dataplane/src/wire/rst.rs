//! RST: the session that a packet named does not exist, or ends.

use std::hash::Hasher;

use barewire_driver::frame::RxFrame;

use super::{Bytes, VERSIONS, Versions, WireError};
use crate::psn::Psn;

/// Why there is no session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum RstReason {
    /// The sender of the RST knows no session of that name.
    UnknownSession = 1,
    /// It closed the session.
    Closed = 2,
    /// It speaks another version.
    Version = 3,
    /// The packet was for another incarnation.
    WrongIncarnation = 4,
    /// It took its peer for dead.
    Dead = 5,
    /// It has another key. Never sealed.
    OtherKey = 6,
    /// One of the two has a key and the other has none. Never sealed.
    NoKey = 7,
}

impl RstReason {
    /// Whether the key is the reason: then the RST can be read without one.
    pub fn is_of_key(self) -> bool {
        matches!(self, Self::OtherKey | Self::NoKey)
    }
}

impl TryFrom<u16> for RstReason {
    type Error = WireError;

    fn try_from(v: u16) -> Result<Self, WireError> {
        Ok(match v {
            1 => Self::UnknownSession,
            2 => Self::Closed,
            3 => Self::Version,
            4 => Self::WrongIncarnation,
            5 => Self::Dead,
            6 => Self::OtherKey,
            7 => Self::NoKey,
            _ => return Err(WireError::RstReason),
        })
    }
}

/// An image of an incarnation, not 0, that tells one life of a node from another and does not tell
/// the incarnation: SipHash-2-4 of eight zero bytes under the key (incarnation, incarnation).
pub fn life_of(incarnation: u64) -> u64 {
    #[expect(deprecated, reason = "the one keyed hash of the standard library that takes its keys")]
    let mut hash = std::hash::SipHasher::new_with_keys(incarnation, incarnation);
    hash.write_u64(0);
    hash.finish().max(1)
}

/// Header of an RST, the same in every version. Its receiver believes it only if it can have been
/// sent by one who saw the receiver's packets: `docs/wire.md`, "RST".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RstOp {
    /// `dst_sid` of the packet that caused it, or 0.
    pub echo_sid: u32,
    /// `psn` of the packet that caused it, or 0.
    pub echo_psn: Psn,
    /// [`life_of`] the incarnation of the RST's sender, who may not know whom it answers.
    pub life: u64,
    /// Incarnation of the node that the RST is for; 0 if its sender does not know it.
    pub victim_inc: u64,
    /// Epoch of that node's session; 0 if the sender does not know it.
    pub victim_epoch: u32,
    /// Why.
    pub reason: RstReason,
    /// Versions that the sender speaks.
    pub versions: Versions,
}

impl RstOp {
    /// Length in a frame, bytes.
    pub const LEN: usize = 32;

    /// What the life `inc` of a node says of a session that it does not know. It names none: for
    /// who has concluded so much of another frame.
    pub(crate) fn unknown_session(inc: u64) -> Self {
        Self {
            echo_sid: 0,
            echo_psn: Psn(0),
            life: life_of(inc),
            victim_inc: 0,
            victim_epoch: 0,
            reason: RstReason::UnknownSession,
            versions: VERSIONS,
        }
    }

    /// Copies and checks the header.
    ///
    /// # Errors
    /// [`WireError::RstReason`], [`WireError::Versions`], [`WireError::Nameless`],
    /// [`WireError::OpTruncated`].
    pub fn parse(frame: &RxFrame<'_>) -> Result<Self, WireError> {
        let b = Bytes::<{ Self::LEN }>::op(frame)?;
        let reason = b.u16::<28>().try_into()?;
        let versions = Versions { min: b.u8::<30>(), max: b.u8::<31>() };
        if !versions.is_range() {
            return Err(WireError::Versions);
        }
        if b.u64::<8>() == 0 {
            return Err(WireError::Nameless);
        }
        Ok(Self {
            echo_sid: b.u32::<0>(),
            echo_psn: Psn(b.u32::<4>()),
            life: b.u64::<8>(),
            victim_inc: b.u64::<16>(),
            victim_epoch: b.u32::<24>(),
            reason,
            versions,
        })
    }

    /// Writes the header to the start of `out` and returns its length.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let mut b = Bytes::<{ Self::LEN }>::ZERO;
        b.put32::<0>(self.echo_sid);
        b.put32::<4>(self.echo_psn.0);
        b.put64::<8>(self.life);
        b.put64::<16>(self.victim_inc);
        b.put32::<24>(self.victim_epoch);
        b.put16::<28>(self.reason as u16);
        b.put8::<30>(self.versions.min);
        b.put8::<31>(self.versions.max);
        b.write(out)
    }
}
