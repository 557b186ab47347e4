//! The parts of the format that are the same in every version: sufficient to refuse a frame of
//! another version, and to understand such a refusal.

use std::fmt;

use barewire_driver::frame::RxFrame;

use super::base::has_good_crc;
use super::{BASE_LEN, Base, Bytes, RawBase, Ty};

/// The range of protocol versions that a node speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Versions {
    /// Lowest, 1 to 7.
    pub min: u8,
    /// Highest, `min` to 7: the prologue has three bits for it.
    pub max: u8,
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { min, max } = self;
        if min == max { write!(f, "{min}") } else { write!(f, "{min} to {max}") }
    }
}

impl Versions {
    /// Whether the range is valid.
    pub(super) const fn is_range(self) -> bool {
        0 < self.min && self.min <= self.max && self.max < 8
    }
}

/// The version-independent fields of a frame in another protocol version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherVersionFrame {
    /// Base of the frame.
    pub base: RawBase,
    /// Incarnation of its sender, if it is an OPEN; else 0.
    pub inc: u64,
    /// The sender's epoch, if it is an OPEN; else 0.
    pub epoch: u32,
    /// The sender's name of the session, if it is an OPEN; else 0.
    pub sid: u32,
    /// Whether a checksum follows the payload (and is correct).
    pub crc: bool,
}

impl OtherVersionFrame {
    /// Parses `frame`, which [`Base::parse`] refused for its version. `None` if it is damaged or
    /// too short. The checksum is searched at every offset where a version can have it.
    #[cold]
    pub fn parse(frame: &RxFrame<'_>) -> Option<Self> {
        let base = Base::parse_raw(frame)?;
        let crc = has_good_crc(frame)?;
        let (mut sid, mut epoch, mut inc) = (0, 0, 0);
        if base.ty == Ty::Open as u8 {
            let b = Bytes::<16>::at(frame, BASE_LEN).ok()?;
            (sid, epoch, inc) = (b.u32::<0>(), b.u32::<4>(), b.u64::<8>());
        }
        Some(Self { base, inc, epoch, sid, crc })
    }

    /// Whether an RST may answer the frame. An answer to an RST or an ACK could be answered again,
    /// endlessly.
    pub fn may_be_refused(&self) -> bool {
        ![Ty::Ack as u8, Ty::Nack as u8, Ty::Rst as u8].contains(&self.base.ty)
    }
}
