//! The pulled message (rendezvous): RNDV announces it, PULL requests bytes, DATA carries them, END
//! completes it.

use barewire_driver::frame::RxFrame;

use super::msg::{flags, imm_len, long_msg_at, put_imm};
use super::{BASE_LEN, Base, Bytes, MsgMOp, MsgOp, PULL_MAX, WireError};

/// Header of an RNDV.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RndvOp {
    /// Endpoint it is for.
    pub dst_ep: u16,
    /// Which receive context of a scalable endpoint that is, 0 also of any other endpoint.
    pub rx_ctx: u8,
    /// Endpoint it is from.
    pub src_ep: u16,
    /// Whether it matches tagged receives, or untagged ones.
    pub tagged: bool,
    /// Remote CQ data.
    pub imm: Option<u64>,
    /// The tag; 0 unless tagged.
    pub tag: u64,
    /// Bytes of the message.
    pub msg_len: u64,
    /// The announcer's name of the operation: slot.
    pub src_op: u32,
    /// The announcer's name of the operation: generation of the slot.
    pub src_gen: u32,
}

impl RndvOp {
    /// Length without remote CQ data, bytes.
    pub const LEN: usize = MsgMOp::LEN;

    /// Length in a frame with remote CQ data if there is any: 32 or 40.
    #[inline]
    pub fn op_len(&self) -> usize {
        Self::LEN + imm_len(self.imm)
    }

    /// Where the packet ends in the frame, before its checksum.
    #[inline]
    pub fn payload_off(&self) -> usize {
        BASE_LEN + self.op_len()
    }

    /// Copies and checks the header.
    ///
    /// # Errors
    /// As [`MsgOp::parse`] but `StrayLen`.
    #[inline]
    pub fn parse(frame: &RxFrame<'_>, base: &Base) -> Result<Self, WireError> {
        let (op, msg_len, names) = long_msg_at(frame)?;
        let MsgOp { dst_ep, rx_ctx, src_ep, tagged, imm, tag, .. } = op;
        let (src_op, src_gen) = (names as u32, (names >> 32) as u32);
        let op = Self { dst_ep, rx_ctx, src_ep, tagged, imm, tag, msg_len, src_op, src_gen };
        base.check_end(frame, op.payload_off())?;
        Ok(op)
    }

    /// Writes header and remote CQ data to the start of `out` and returns their length.
    ///
    /// # Panics
    /// If `out` is too short.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let mut b = Bytes::<{ Self::LEN }>::ZERO;
        b.put16::<0>(self.dst_ep);
        b.put16::<2>(self.src_ep);
        b.put8::<4>(flags(self.tagged, self.imm));
        b.put8::<5>(self.rx_ctx);
        b.put64::<8>(self.tag);
        b.put64::<16>(self.msg_len);
        b.put32::<24>(self.src_op);
        b.put32::<28>(self.src_gen);
        let at = b.write(out);
        put_imm(out, at, self.imm)
    }
}

/// Header of a PULL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PullOp {
    /// The announcer's slot, from its RNDV.
    pub src_op: u32,
    /// The generation of that slot, from the RNDV.
    pub src_gen: u32,
    /// The puller's slot, to be named by every DATA.
    pub dst_op: u32,
    /// The generation of that slot.
    pub dst_gen: u32,
    /// First byte wanted.
    pub offset: u64,
    /// Bytes wanted, 1 to [`PULL_MAX`].
    pub len: u32,
}

impl PullOp {
    /// Length in a frame, bytes.
    pub const LEN: usize = 32;

    /// Copies and checks the header. Whether the message has such bytes is checked above.
    ///
    /// # Errors
    /// [`WireError::PullRange`], [`WireError::OpReserved`], [`WireError::OpTruncated`].
    #[inline]
    pub fn parse(frame: &RxFrame<'_>, _base: &Base) -> Result<Self, WireError> {
        let b = Bytes::<{ Self::LEN }>::op(frame)?;
        let (offset, len) = (b.u64::<16>(), b.u32::<24>());
        if len == 0 || len > PULL_MAX || offset.checked_add(len.into()).is_none() {
            return Err(WireError::PullRange);
        }
        if b.u32::<28>() != 0 {
            return Err(WireError::OpReserved);
        }
        Ok(Self {
            src_op: b.u32::<0>(),
            src_gen: b.u32::<4>(),
            dst_op: b.u32::<8>(),
            dst_gen: b.u32::<12>(),
            offset,
            len,
        })
    }

    /// Slot and generation of the puller in a header that [`emit`](Self::emit) wrote to the start
    /// of `bytes`.
    ///
    /// # Panics
    /// If `bytes` is shorter than the header.
    pub fn puller(bytes: &[u8]) -> (u32, u32) {
        let b = Bytes::<{ Self::LEN }>::kept(bytes);
        (b.u32::<8>(), b.u32::<12>())
    }

    /// Writes the header to the start of `out` and returns its length.
    ///
    /// # Panics
    /// If `out` is too short.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let mut b = Bytes::<{ Self::LEN }>::ZERO;
        b.put32::<0>(self.src_op);
        b.put32::<4>(self.src_gen);
        b.put32::<8>(self.dst_op);
        b.put32::<12>(self.dst_gen);
        b.put64::<16>(self.offset);
        b.put32::<24>(self.len);
        b.write(out)
    }
}

/// Header of a DATA. One without payload withdraws the message: no more of it will come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DataOp {
    /// The puller's slot, from its PULL.
    pub dst_op: u32,
    /// The generation of that slot, from the PULL.
    pub dst_gen: u32,
    /// Where in the message the payload starts.
    pub offset: u64,
}

impl DataOp {
    /// Length in a frame, bytes.
    pub const LEN: usize = 16;

    /// Where `offset` stands, eight bytes.
    pub const OFFSET_AT: usize = 8;

    /// Where the payload starts in the frame.
    #[inline]
    pub fn payload_off(&self) -> usize {
        BASE_LEN + Self::LEN
    }

    /// Copies and checks the header.
    ///
    /// # Errors
    /// [`WireError::PieceRange`], [`WireError::OpTruncated`].
    #[inline(always)]
    pub fn parse(frame: &RxFrame<'_>, base: &Base) -> Result<Self, WireError> {
        let b = Bytes::<{ Self::LEN }>::op(frame)?;
        let offset = b.u64::<8>();
        if offset.checked_add(base.plen.into()).is_none() {
            return Err(WireError::PieceRange);
        }
        Ok(Self { dst_op: b.u32::<0>(), dst_gen: b.u32::<4>(), offset })
    }

    /// Slot and generation of the puller in a header that [`emit`](Self::emit) wrote to the start
    /// of `bytes`.
    ///
    /// # Panics
    /// If `bytes` is shorter than the header.
    pub fn puller(bytes: &[u8]) -> (u32, u32) {
        let b = Bytes::<{ Self::LEN }>::kept(bytes);
        (b.u32::<0>(), b.u32::<4>())
    }

    /// Writes the header to the start of `out` and returns its length.
    ///
    /// # Panics
    /// If `out` is too short.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let mut b = Bytes::<{ Self::LEN }>::ZERO;
        b.put32::<0>(self.dst_op);
        b.put32::<4>(self.dst_gen);
        b.put64::<{ Self::OFFSET_AT }>(self.offset);
        b.write(out)
    }
}

/// How a pulled message ended at its receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum EndStatus {
    /// Received whole.
    #[default]
    Ok = 0,
    /// The buffer was shorter; it is full.
    Truncated = 1,
    /// The application discarded or cancelled it.
    Discarded = 2,
    /// The endpoint closed.
    Closed = 3,
}

impl TryFrom<u16> for EndStatus {
    type Error = WireError;

    #[inline]
    fn try_from(v: u16) -> Result<Self, WireError> {
        Ok(match v {
            0 => Self::Ok,
            1 => Self::Truncated,
            2 => Self::Discarded,
            3 => Self::Closed,
            _ => return Err(WireError::EndStatus),
        })
    }
}

/// Header of an END.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndOp {
    /// The announcer's slot, from its RNDV.
    pub src_op: u32,
    /// The generation of that slot, from the RNDV.
    pub src_gen: u32,
    /// How it ended.
    pub status: EndStatus,
}

impl EndOp {
    /// Length in a frame, bytes.
    pub const LEN: usize = 16;

    /// Copies and checks the header.
    ///
    /// # Errors
    /// [`WireError::EndStatus`], [`WireError::OpReserved`], [`WireError::OpTruncated`].
    #[inline]
    pub fn parse(frame: &RxFrame<'_>, _base: &Base) -> Result<Self, WireError> {
        let b = Bytes::<{ Self::LEN }>::op(frame)?;
        let status = b.u16::<8>().try_into()?;
        if b.u16::<10>() != 0 || b.u32::<12>() != 0 {
            return Err(WireError::OpReserved);
        }
        Ok(Self { src_op: b.u32::<0>(), src_gen: b.u32::<4>(), status })
    }

    /// Writes the header to the start of `out` and returns its length.
    ///
    /// # Panics
    /// If `out` is too short.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let mut b = Bytes::<{ Self::LEN }>::ZERO;
        b.put32::<0>(self.src_op);
        b.put32::<4>(self.src_gen);
        b.put16::<8>(self.status as u16);
        b.write(out)
    }
}
