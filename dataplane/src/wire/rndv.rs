//! Rendezvous: RNDV announces a message, PULL requests bytes, DATA carries them, END completes the
//! transfer.

use barewire_driver::frame::RxFrame;

use super::msg::{flags, imm_len, long_msg_at, put_imm};
use super::{BASE_LEN, Base, Bytes, MsgMOp, MsgOp, PULL_MAX, WireError};

/// Header of an RNDV.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RndvOp {
    /// Destination endpoint.
    pub dst_ep: u16,
    /// Receive context of a scalable endpoint; 0 for any other endpoint too.
    pub rx_ctx: u8,
    /// Source endpoint.
    pub src_ep: u16,
    /// Whether the message matches tagged receives instead of untagged ones.
    pub tagged: bool,
    /// Remote CQ data.
    pub imm: Option<u64>,
    /// The tag; 0 unless tagged.
    pub tag: u64,
    /// Length of the message, bytes.
    pub msg_len: u64,
    /// The sender's name of the operation: slot.
    pub src_op: u32,
    /// The sender's name of the operation: generation of the slot.
    pub src_gen: u32,
}

impl RndvOp {
    /// Length without remote CQ data, bytes.
    pub const LEN: usize = MsgMOp::LEN;

    /// Length in a frame, bytes: 32, or 40 with remote CQ data.
    #[inline]
    pub fn op_len(&self) -> usize {
        Self::LEN + imm_len(self.imm)
    }

    /// End of the packet in the frame, before its checksum.
    #[inline]
    pub fn payload_off(&self) -> usize {
        BASE_LEN + self.op_len()
    }

    /// Copies and validates the header.
    ///
    /// # Errors
    /// As [`MsgOp::parse`] without `StrayLen`.
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
    /// The sender's slot, from its RNDV.
    pub src_op: u32,
    /// The generation of that slot, from the RNDV.
    pub src_gen: u32,
    /// The receiver's slot, which every DATA names.
    pub dst_op: u32,
    /// The generation of that slot.
    pub dst_gen: u32,
    /// Offset of the first requested byte.
    pub offset: u64,
    /// Bytes requested, 1 to [`PULL_MAX`].
    pub len: u32,
}

impl PullOp {
    /// Length in a frame, bytes.
    pub const LEN: usize = 32;

    /// Copies and validates the header. Whether the range is within the message is checked by the
    /// node.
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

    /// The receiver's slot and generation in a header that [`emit`](Self::emit) wrote to the start
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

/// Header of a DATA. One without payload withdraws the message: no more bytes will be transferred.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DataOp {
    /// The receiver's slot, from its PULL.
    pub dst_op: u32,
    /// The generation of that slot, from the PULL.
    pub dst_gen: u32,
    /// Offset of the payload in the message, bytes.
    pub offset: u64,
}

impl DataOp {
    /// Length in a frame, bytes.
    pub const LEN: usize = 16;

    /// Offset of the `offset` field, eight bytes.
    pub const OFFSET_AT: usize = 8;

    /// Where the payload starts in the frame.
    #[inline]
    pub fn payload_off(&self) -> usize {
        BASE_LEN + Self::LEN
    }

    /// Copies and validates the header.
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

    /// The receiver's slot and generation in a header that [`emit`](Self::emit) wrote to the start
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

/// Outcome of a rendezvous message at its receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum EndStatus {
    /// Received in full.
    #[default]
    Ok = 0,
    /// The receive buffer was shorter than the message, and is full.
    Truncated = 1,
    /// The application discarded or cancelled the message.
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
    /// The sender's slot, from its RNDV.
    pub src_op: u32,
    /// The generation of that slot, from the RNDV.
    pub src_gen: u32,
    /// Outcome.
    pub status: EndStatus,
}

impl EndOp {
    /// Length in a frame, bytes.
    pub const LEN: usize = 16;

    /// Copies and validates the header.
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
