//! PACK: several whole messages in one packet, 8 bytes plus one record per message.

use barewire_driver::frame::RxFrame;

use super::{BASE_LEN, Base, Bytes, IMM_LEN, MsgOp, WireError};

/// Bytes of a record with a message of `len` bytes: header, remote CQ data, message, and padding to
/// a multiple of eight.
pub const fn record_len(imm: bool, len: usize) -> usize {
    (MsgOp::LEN + if imm { IMM_LEN } else { 0 } + len).next_multiple_of(8)
}

/// Header of a PACK.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackOp {
    /// Number of records, 1 to 255.
    pub count: u16,
}

impl PackOp {
    /// Length in a frame, bytes.
    pub const LEN: usize = 8;

    /// Most records of a PACK.
    pub const COUNT_MAX: u16 = 255;

    /// Where the records start in the frame.
    #[inline]
    pub fn payload_off(&self) -> usize {
        BASE_LEN + Self::LEN
    }

    /// Copies and validates the header, not the records.
    ///
    /// # Errors
    /// [`WireError::PackCount`], [`WireError::OpReserved`], [`WireError::OpTruncated`].
    #[inline]
    pub fn parse(frame: &RxFrame<'_>, _base: &Base) -> Result<Self, WireError> {
        let b = Bytes::<{ Self::LEN }>::op(frame)?;
        let count = b.u16::<0>();
        if count == 0 || count > Self::COUNT_MAX {
            return Err(WireError::PackCount);
        }
        if b.u16::<2>() != 0 || b.u32::<4>() != 0 {
            return Err(WireError::OpReserved);
        }
        Ok(Self { count })
    }

    /// Writes the header to the start of `out` and returns its length.
    ///
    /// # Panics
    /// If `out` is too short.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let mut b = Bytes::<{ Self::LEN }>::ZERO;
        b.put16::<0>(self.count);
        b.write(out)
    }
}

/// The records of a PACK, first to last: header, offset of the message in the frame, and its
/// length. Ends after the first error.
///
/// A pack is refused as a whole: call [`check`](Self::check) before the first message is delivered.
/// The frame's sender may still change it in between, so a later error is possible; then the sender
/// loses its own messages.
#[derive(Clone)]
pub struct PackRecords<'f, 'm> {
    frame: &'f RxFrame<'m>,
    at: usize,
    end: usize,
    left: u16,
    /// Whether the bytes behind the last record were checked.
    done: bool,
}

impl<'f, 'm> PackRecords<'f, 'm> {
    /// The `count` records in the `plen` bytes at `payload_off`.
    #[inline]
    pub fn new(frame: &'f RxFrame<'m>, payload_off: usize, plen: u16, count: u16) -> Self {
        let end = (payload_off + usize::from(plen)).min(frame.len());
        Self { frame, at: payload_off.min(end), end, left: count, done: false }
    }

    /// Checks that all records are well-formed and fill the payload.
    ///
    /// # Errors
    /// The error of the first invalid record.
    pub fn check(&self) -> Result<(), WireError> {
        self.clone().try_for_each(|record| record.map(|_| ()))
    }

    #[inline]
    fn record(&mut self) -> Result<(MsgOp, usize, usize), WireError> {
        if self.end - self.at < MsgOp::LEN {
            return Err(WireError::PackRecord);
        }
        let op = MsgOp::parse_at(self.frame, self.at).map_err(|e| match e {
            WireError::OpTruncated => WireError::PackRecord,
            e => e,
        })?;
        let len = usize::from(op.len);
        let padded = record_len(op.imm.is_some(), len);
        if self.end - self.at < padded {
            return Err(WireError::PackRecord);
        }
        let next = self.at + padded;
        let off = self.at + op.op_len();
        let pad = next - off - len;
        if pad != 0 {
            let last = self.frame.chunk_at(next - 8).ok_or(WireError::PackRecord)?;
            if u64::from_le_bytes(last) >> (64 - 8 * pad) != 0 {
                return Err(WireError::PackPadding);
            }
        }
        self.at = next;
        Ok((op, off, len))
    }
}

impl Iterator for PackRecords<'_, '_> {
    type Item = Result<(MsgOp, usize, usize), WireError>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        if self.left == 0 {
            self.done = true;
            return (self.at != self.end).then_some(Err(WireError::PackTrailing));
        }
        self.left -= 1;
        let record = self.record();
        self.done = record.is_err();
        Some(record)
    }
}
