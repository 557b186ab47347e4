//! PROBE: tests whether frames of its length arrive.

use barewire_driver::frame::RxFrame;

use super::{Base, Bytes, WireError};

/// Header of a PROBE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbeOp {
    /// Length of the PROBE that this one answers, as it arrived, bytes behind the Ethernet header.
    /// 0 in a request.
    pub heard: u16,
}

impl ProbeOp {
    /// Length in a frame, bytes.
    pub const LEN: usize = 8;

    /// Copies and validates the header.
    ///
    /// # Errors
    /// [`WireError::OpReserved`], [`WireError::OpTruncated`].
    pub fn parse(frame: &RxFrame<'_>, _base: &Base) -> Result<Self, WireError> {
        let b = Bytes::<{ Self::LEN }>::op(frame)?;
        if b.u16::<2>() != 0 || b.u32::<4>() != 0 {
            return Err(WireError::OpReserved);
        }
        Ok(Self { heard: b.u16::<0>() })
    }

    /// Writes the header to the start of `out` and returns its length.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let mut b = Bytes::<{ Self::LEN }>::ZERO;
        b.put16::<0>(self.heard);
        b.write(out)
    }
}
