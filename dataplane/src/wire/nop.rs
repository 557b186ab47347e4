//! NOP: takes the place of a packet that was refused or withdrawn.

use barewire_driver::frame::RxFrame;

use super::{BASE_LEN, Base, Bytes, WireError};

/// Header of a NOP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NopOp {
    /// Eager units that the packet in whose place it stands had used. Its receiver counts them as
    /// used, for it never took the packet itself; without that they would be lost to both.
    pub units: u32,
    /// The message of which the last pieces (MSGM) went by ends here: no more of it will come.
    pub cuts: bool,
}

impl NopOp {
    /// Length in a frame, bytes.
    pub const LEN: usize = 8;

    /// Copies and checks the header.
    ///
    /// # Errors
    /// [`WireError::OpReserved`], [`WireError::OpTruncated`].
    pub fn parse(frame: &RxFrame<'_>, _base: &Base) -> Result<Self, WireError> {
        let b = frame.chunk_at(BASE_LEN).ok_or(WireError::OpTruncated)?;
        let b = Bytes::<{ Self::LEN }>(b);
        let flags = b.u32::<4>();
        if flags > 1 {
            return Err(WireError::OpReserved);
        }
        Ok(Self { units: b.u32::<0>(), cuts: flags == 1 })
    }

    /// Writes the header to the start of `out` and returns its length.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let mut b = Bytes::<{ Self::LEN }>::ZERO;
        b.put32::<0>(self.units);
        b.put32::<4>(self.cuts.into());
        b.write(out)
    }
}
