//! NACK: a packet was refused; its PSN does not count as received.

use barewire_driver::frame::RxFrame;

use super::{Base, Bytes, WireError};

/// Reason of a NACK.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum NackReason {
    /// The receiver does not know the packet's type.
    UnknownType = 1,
    /// The endpoint does not exist.
    NoEndpoint = 2,
    /// The operation header is malformed.
    Malformed = 3,
    /// The sender had no credit for the packet, or the receiver has no record for the request.
    Overdrawn = 4,
    /// No region has the key.
    BadKey = 5,
    /// The region does not permit the access, is too short, or belongs to another endpoint.
    BadAccess = 6,
    /// The atomic operation does not exist, or not for that datatype.
    BadAtomic = 7,
    /// The elements of an atomic operation are not aligned.
    Misaligned = 8,
    /// No receive is posted for the tag of an atomic operation.
    NoMatch = 9,
}

impl TryFrom<u16> for NackReason {
    type Error = WireError;

    #[inline]
    fn try_from(v: u16) -> Result<Self, WireError> {
        Ok(match v {
            1 => Self::UnknownType,
            2 => Self::NoEndpoint,
            3 => Self::Malformed,
            4 => Self::Overdrawn,
            5 => Self::BadKey,
            6 => Self::BadAccess,
            7 => Self::BadAtomic,
            8 => Self::Misaligned,
            9 => Self::NoMatch,
            _ => return Err(WireError::NackReason),
        })
    }
}

/// Header of a NACK. The base's `psn` is the PSN of the refused packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NackOp {
    /// Reason.
    pub reason: NackReason,
}

impl NackOp {
    /// Length in a frame, bytes.
    pub const LEN: usize = 8;

    /// Copies and validates the header.
    ///
    /// # Errors
    /// [`WireError::NackReason`], [`WireError::OpReserved`], [`WireError::OpTruncated`].
    pub fn parse(frame: &RxFrame<'_>, _base: &Base) -> Result<Self, WireError> {
        let b = Bytes::<{ Self::LEN }>::op(frame)?;
        let reason = b.u16::<0>().try_into()?;
        if b.u16::<2>() != 0 || b.u32::<4>() != 0 {
            return Err(WireError::OpReserved);
        }
        Ok(Self { reason })
    }

    /// Writes the header to the start of `out` and returns its length.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let mut b = Bytes::<{ Self::LEN }>::ZERO;
        b.put16::<0>(self.reason as u16);
        b.write(out)
    }
}
