//! RST: reports that the session of a packet does not exist, or has ended.

use std::hash::Hasher;

use barewire_driver::frame::RxFrame;

use super::{Bytes, VERSIONS, Versions, WireError};
use crate::psn::Psn;

/// Reason of an RST.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum RstReason {
    /// The RST's sender knows no session of that name.
    UnknownSession = 1,
    /// The sender closed the session.
    Closed = 2,
    /// The sender speaks another version.
    Version = 3,
    /// The packet was for another incarnation.
    WrongIncarnation = 4,
    /// The sender declared its peer dead.
    Dead = 5,
    /// The sender has another key. Never sealed.
    OtherKey = 6,
    /// Only one of the two stations has a key. Never sealed.
    NoKey = 7,
}

impl RstReason {
    /// Whether the reason is the key: such an RST can be read without a key.
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

/// A one-way image of an incarnation, not 0: distinguishes incarnations of a node and does not
/// reveal them. SipHash-2-4 of eight zero bytes under the key (incarnation, incarnation).
pub fn life_of(incarnation: u64) -> u64 {
    #[expect(deprecated, reason = "the one keyed hash of the standard library that takes its keys")]
    let mut hash = std::hash::SipHasher::new_with_keys(incarnation, incarnation);
    hash.write_u64(0);
    hash.finish().max(1)
}

/// Header of an RST, the same in every version. Its receiver accepts it only if the sender can have
/// seen the receiver's packets: `docs/wire.md`, "RST".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RstOp {
    /// `dst_sid` of the packet that caused it, or 0.
    pub echo_sid: u32,
    /// `psn` of the packet that caused it, or 0.
    pub echo_psn: Psn,
    /// [`life_of`] the incarnation of the RST's sender, which may not know its receiver.
    pub life: u64,
    /// Incarnation of the receiver of the RST; 0 if the sender does not know it.
    pub victim_inc: u64,
    /// Epoch of the receiver's session; 0 if the sender does not know it.
    pub victim_epoch: u32,
    /// Reason.
    pub reason: RstReason,
    /// Protocol versions that the sender speaks.
    pub versions: Versions,
}

impl RstOp {
    /// Length in a frame, bytes.
    pub const LEN: usize = 32;

    /// The RST of incarnation `inc` of a node for a session that it does not know, without a
    /// session name: for receivers that inferred the same from another frame.
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

    /// Copies and validates the header.
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
