//! NOP: replaces a packet that was refused or withdrawn.

use barewire_driver::frame::RxFrame;

use super::{Base, Bytes, WireError};

/// Header of a NOP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NopOp {
    /// Eager units that the replaced packet had used. The receiver counts them as used, since it
    /// never accepted the packet itself; otherwise both ends would lose them.
    pub units: u32,
    /// The message to which the preceding segments (MSGM) belong ends here: no more segments will
    /// come.
    pub cuts: bool,
    /// The NOP replaces a packet of the one-sided operation with this number, which was refused or
    /// abandoned: later packets of the operation must be dropped.
    pub drops: Option<u16>,
}

/// Flag of [`NopOp::cuts`].
const CUTS: u8 = 1;
/// Flag of [`NopOp::drops`].
const DROPS: u8 = 2;

impl NopOp {
    /// Length in a frame, bytes.
    pub const LEN: usize = 8;

    /// Copies and validates the header.
    ///
    /// # Errors
    /// [`WireError::OpReserved`], [`WireError::OpTruncated`].
    pub fn parse(frame: &RxFrame<'_>, _base: &Base) -> Result<Self, WireError> {
        let b = Bytes::<{ Self::LEN }>::op(frame)?;
        let (flags, seq) = (b.u8::<4>(), b.u16::<6>());
        let drops = flags & DROPS != 0;
        if flags & !(CUTS | DROPS) != 0 || b.u8::<5>() != 0 || !drops && seq != 0 {
            return Err(WireError::OpReserved);
        }
        Ok(Self { units: b.u32::<0>(), cuts: flags & CUTS != 0, drops: drops.then_some(seq) })
    }

    /// Writes the header to the start of `out` and returns its length.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let mut b = Bytes::<{ Self::LEN }>::ZERO;
        b.put32::<0>(self.units);
        let flag = |on: bool, bit: u8| if on { bit } else { 0 };
        b.put8::<4>(flag(self.cuts, CUTS) | flag(self.drops.is_some(), DROPS));
        b.put16::<6>(self.drops.unwrap_or(0));
        b.write(out)
    }
}
