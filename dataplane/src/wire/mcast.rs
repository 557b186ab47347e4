//! MCAST: a message to a multicast group.

use barewire_driver::frame::RxFrame;
use barewire_driver::port::MacAddr;

use super::base::IMM;
use super::msg::{imm_at, imm_len, put_imm};
use super::{BASE_LEN, Base, Bytes, WireError};
use crate::types::{GroupAddr, INCARNATION_MAX};

/// Header of a MCAST.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct McastOp {
    /// The destination group.
    pub group: GroupAddr,
    /// Source endpoint.
    pub src_ep: u16,
    /// The sender's incarnation.
    pub inc: u64,
    /// Remote CQ data.
    pub imm: Option<u64>,
}

impl McastOp {
    /// Length without remote CQ data, bytes.
    pub const LEN: usize = 24;

    /// Where the payload starts in its frame.
    pub fn payload_off(&self) -> usize {
        BASE_LEN + Self::LEN + imm_len(self.imm)
    }

    /// Copies and validates the header.
    ///
    /// # Errors
    /// [`WireError::McastGroup`], [`WireError::MsgFlags`], [`WireError::Nameless`],
    /// [`WireError::OpReserved`], or one of the truncations.
    pub fn parse(frame: &RxFrame<'_>, base: &Base) -> Result<Self, WireError> {
        let b = Bytes::<{ Self::LEN }>::op(frame)?;
        let (flags, inc) = (b.u8::<4>(), b.u64::<8>());
        if b.u16::<0>() != 0 || b.u8::<5>() != 0 || b.u16::<6>() != 0 {
            return Err(WireError::OpReserved);
        }
        if flags & !IMM != 0 {
            return Err(WireError::MsgFlags);
        }
        if inc == 0 || inc > INCARNATION_MAX {
            return Err(WireError::Nameless);
        }
        let mac = MacAddr(b.get::<16, 6>());
        let group = GroupAddr::new(mac, b.u16::<22>()).ok_or(WireError::McastGroup)?;
        let imm = imm_at(frame, flags, BASE_LEN + Self::LEN)?;
        let op = Self { group, src_ep: b.u16::<2>(), inc, imm };
        base.check_end(frame, op.payload_off())?;
        Ok(op)
    }

    /// Writes header and remote CQ data to the start of `out` and returns their length.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let mut b = Bytes::<{ Self::LEN }>::ZERO;
        b.put16::<2>(self.src_ep);
        b.put8::<4>(if self.imm.is_some() { IMM } else { 0 });
        b.put64::<8>(self.inc);
        b.set::<16, 6>(self.group.mac().0);
        b.put16::<22>(self.group.number());
        let at = b.write(out);
        put_imm(out, at, self.imm)
    }
}
