//! One-sided operations: WRITE transfers bytes to a region; READ requests bytes of a region (DATA
//! transfers them); ATOMIC changes elements of a region. RESP responds to a READ that failed, an
//! ATOMIC that fetches old values, a READ that requests all of its bytes at once, and a WRITE or
//! ATOMIC that requests a response instead of an acknowledgement.

use barewire_driver::frame::RxFrame;

use super::base::IMM;
use super::msg::{imm_at, imm_len, put_imm};
use super::{BASE_LEN, Base, Bytes, NackReason, READ_ANSWER_MAX, READ_MAX, WireError};

/// The last packet of its operation.
pub(super) const LAST: u8 = 1;
/// READ, ATOMIC: the last packet for its remote range.
pub(super) const END: u8 = 1 << 2;
/// ATOMIC: the old values are requested.
const FETCH: u8 = 1 << 3;
/// ATOMIC: as many compare values follow the operands.
const COMPARE: u8 = 1 << 4;
/// ATOMIC: `rkey` is a tag, `addr` an offset in the matching receive.
const TAGGED: u8 = 1 << 5;
/// ATOMIC: withdrawn. Nothing is executed; only the response is sent.
const VOID: u8 = 1 << 6;
/// A RESP is requested: without payload (WRITE, ATOMIC; with LAST and without FETCH), or with all
/// bytes (READ; with LAST and END).
pub(super) const ANSWER: u8 = 1 << 7;

#[inline(always)]
fn flag(on: bool, bit: u8) -> u8 {
    if on { bit } else { 0 }
}

/// The common part of WRITE, READ and ATOMIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteRange {
    /// Destination endpoint.
    pub dst_ep: u16,
    /// Receive context of a scalable endpoint; 0 for any other endpoint too.
    pub rx_ctx: u8,
    /// Source endpoint.
    pub src_ep: u16,
    /// Number of the operation, one more than that of the node's previous operation. If one packet
    /// of an operation is refused, its later packets are dropped.
    pub seq: u16,
    /// Whether this is the last packet of its operation.
    pub last: bool,
    /// Key of the region.
    pub rkey: u64,
    /// Address in the region, in the owner's addressing.
    pub addr: u64,
}

impl RemoteRange {
    /// The operation number in the header `bytes`.
    pub fn seq_of(bytes: &[u8]) -> u16 {
        u16::from_le_bytes([bytes[6], bytes[7]])
    }

    /// The operation number in the header `bytes`, unless it is the operation's last packet.
    pub fn unfinished(bytes: &[u8]) -> Option<u16> {
        (bytes[4] & LAST == 0).then(|| Self::seq_of(bytes))
    }

    /// The header's words.
    #[inline(always)]
    fn words(&self, flags: u8) -> [u64; 3] {
        let flags = flags | if self.last { LAST } else { 0 };
        let eps = u64::from(self.dst_ep) | u64::from(self.src_ep) << 16;
        let rest = u64::from(flags) | u64::from(self.rx_ctx) << 8 | u64::from(self.seq) << 16;
        [eps | rest << 32, self.rkey, self.addr]
    }

    /// The range, and the flags that are not part of it.
    #[inline(always)]
    fn parse<const N: usize>(b: &Bytes<N>, known: u8) -> Result<(Self, u8), WireError> {
        let mut head = Bytes::<24>::ZERO;
        head.0.copy_from_slice(&b.0[..24]);
        let flags = head.u8::<4>();
        if flags & !(LAST | known) != 0 {
            return Err(WireError::RmaFlags);
        }
        let range = Self {
            dst_ep: head.u16::<0>(),
            rx_ctx: head.u8::<5>(),
            src_ep: head.u16::<2>(),
            seq: head.u16::<6>(),
            last: flags & LAST != 0,
            rkey: head.u64::<8>(),
            addr: head.u64::<16>(),
        };
        Ok((range, flags & !LAST))
    }
}

/// Header of a WRITE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteOp {
    /// Destination of the payload.
    pub range: RemoteRange,
    /// Remote CQ data, in the last packet only.
    pub imm: Option<u64>,
    /// Whether a RESP is requested; in the last packet only.
    pub answer: bool,
    /// The initiator's slot, which the RESP names; 0 without `answer`.
    pub dst_op: u32,
    /// The generation of that slot.
    pub dst_gen: u32,
    /// Bytes from `addr` on that this packet and later ones will write to the same range, at least
    /// the payload. The whole range is checked before the first byte is written.
    pub left: u64,
}

impl WriteOp {
    /// Length without remote CQ data, bytes.
    pub const LEN: usize = 40;

    /// Where the payload starts in the frame.
    #[inline]
    pub fn payload_off(&self) -> usize {
        BASE_LEN + Self::LEN + imm_len(self.imm)
    }

    /// Copies and validates the header.
    ///
    /// # Errors
    /// [`WireError::RmaFlags`], [`WireError::RmaRange`], [`WireError::LateImm`],
    /// [`WireError::OpReserved`], [`WireError::OpTruncated`].
    #[inline]
    pub fn parse(frame: &RxFrame<'_>, base: &Base) -> Result<Self, WireError> {
        let b = Bytes::<{ Self::LEN }>::op(frame)?;
        let (range, flags) = RemoteRange::parse(&b, IMM | ANSWER)?;
        let answer = flags & ANSWER != 0;
        if answer && !range.last {
            return Err(WireError::RmaFlags);
        }
        let left = b.u64::<32>();
        if left < base.plen.into() {
            return Err(WireError::RmaRange);
        }
        let imm = imm_at(frame, flags, BASE_LEN + Self::LEN)?;
        if imm.is_some() && !range.last {
            return Err(WireError::LateImm);
        }
        let (dst_op, dst_gen) = (b.u32::<24>(), b.u32::<28>());
        let op = Self { range, imm, answer, dst_op, dst_gen, left };
        base.check_end(frame, op.payload_off())?;
        Ok(op)
    }

    /// Writes header and remote CQ data to the start of `out` and returns their length.
    ///
    /// # Panics
    /// If `out` is too short.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let at = Bytes::<{ Self::LEN }>::of_words(self.words()).write(out);
        put_imm(out, at, self.imm)
    }

    /// The header of the response.
    pub fn resp(&self) -> RespOp {
        RespOp { dst_op: self.dst_op, dst_gen: self.dst_gen, offset: 0, status: None }
    }

    /// The header's words.
    #[inline(always)]
    pub(super) fn words(&self) -> [u64; Self::LEN / 8] {
        let [head, rkey, addr] = self.range.words(self.flags());
        let reply_to = u64::from(self.dst_op) | u64::from(self.dst_gen) << 32;
        [head, rkey, addr, reply_to, self.left]
    }

    /// The flags that are not part of the range.
    #[inline(always)]
    pub(super) fn flags(&self) -> u8 {
        flag(self.imm.is_some(), IMM) | flag(self.answer, ANSWER)
    }
}

/// Header of a READ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadOp {
    /// Source of the bytes.
    pub range: RemoteRange,
    /// Whether this is the last packet for its remote range.
    pub end: bool,
    /// Whether one RESP with all the bytes is requested; of a whole operation only.
    pub answer: bool,
    /// The reader's slot, which every DATA, or the RESP, names.
    pub dst_op: u32,
    /// The generation of that slot.
    pub dst_gen: u32,
    /// Offset in the operation: the `offset` of the first DATA.
    pub offset: u64,
    /// Bytes requested, 0 to [`READ_MAX`]; with `answer` 1 to [`READ_ANSWER_MAX`].
    pub len: u32,
}

impl ReadOp {
    /// Length in a frame, bytes.
    pub const LEN: usize = 48;

    /// Copies and validates the header.
    ///
    /// # Errors
    /// [`WireError::RmaFlags`], [`WireError::RmaRange`], [`WireError::OpReserved`],
    /// [`WireError::OpTruncated`].
    #[inline]
    pub fn parse(frame: &RxFrame<'_>, _base: &Base) -> Result<Self, WireError> {
        let b = Bytes::<{ Self::LEN }>::op(frame)?;
        let (range, flags) = RemoteRange::parse(&b, END | ANSWER)?;
        let (end, answer) = (flags & END != 0, flags & ANSWER != 0);
        if answer && !(range.last && end) {
            return Err(WireError::RmaFlags);
        }
        let (offset, len) = (b.u64::<32>(), b.u32::<40>());
        let whole = offset == 0 && (1..=READ_ANSWER_MAX).contains(&len);
        // Whether the remote range is within the region is checked with the region.
        if len > READ_MAX || offset.checked_add(len.into()).is_none() || answer && !whole {
            return Err(WireError::RmaRange);
        }
        if b.u32::<44>() != 0 {
            return Err(WireError::OpReserved);
        }
        let (dst_op, dst_gen) = (b.u32::<24>(), b.u32::<28>());
        Ok(Self { range, end, answer, dst_op, dst_gen, offset, len })
    }

    /// Slot and generation of the initiator, and the number of requested bytes, in a header that
    /// [`emit`](Self::emit) wrote to the start of `bytes`.
    ///
    /// # Panics
    /// If `bytes` is shorter than the header.
    pub fn initiator_and_len(bytes: &[u8]) -> ((u32, u32), u32) {
        let b = Bytes::<{ Self::LEN }>::kept(bytes);
        ((b.u32::<24>(), b.u32::<28>()), b.u32::<40>())
    }

    /// Writes the header to the start of `out` and returns its length.
    ///
    /// # Panics
    /// If `out` is too short.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        Bytes::<{ Self::LEN }>::of_words(self.words()).write(out)
    }

    /// The header of the response.
    pub fn resp(&self) -> RespOp {
        RespOp { dst_op: self.dst_op, dst_gen: self.dst_gen, offset: 0, status: None }
    }

    /// The header's words.
    #[inline(always)]
    pub(super) fn words(&self) -> [u64; Self::LEN / 8] {
        let [head, rkey, addr] = self.range.words(self.flags());
        let reply_to = u64::from(self.dst_op) | u64::from(self.dst_gen) << 32;
        [head, rkey, addr, reply_to, self.offset, self.len.into()]
    }

    /// The flags that are not part of the range.
    #[inline(always)]
    pub(super) fn flags(&self) -> u8 {
        flag(self.end, END) | flag(self.answer, ANSWER)
    }
}

/// Header of an ATOMIC. The payload is `count` operands, then, with `compare`, as many compare
/// values; an atomic read has no payload. Whether operation and datatype exist and match each other
/// and the payload is checked by the node, which refuses the packet with a NACK.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AtomicOp {
    /// The elements; with `tagged`, a tag and the offset in the matching receive.
    pub range: RemoteRange,
    /// Remote CQ data, in the last packet only.
    pub imm: Option<u64>,
    /// Whether this is the last packet for its remote range.
    pub end: bool,
    /// Whether the old values are requested.
    pub fetch: bool,
    /// Whether compare values follow the operands.
    pub compare: bool,
    /// Whether `rkey` is a tag.
    pub tagged: bool,
    /// Whether the operation is withdrawn: only the response is sent.
    pub void: bool,
    /// Whether a RESP is requested although old values are not; in the last packet only.
    pub answer: bool,
    /// The initiator's slot, which the RESP names.
    pub dst_op: u32,
    /// The generation of that slot.
    pub dst_gen: u32,
    /// Number of elements.
    pub count: u16,
    /// Operation, `enum fi_op`.
    pub op: u8,
    /// Datatype, `enum fi_datatype`.
    pub ty: u8,
    /// Offset of the old values in the result of the operation, bytes.
    pub offset: u32,
}

impl AtomicOp {
    /// Length without remote CQ data, bytes.
    pub const LEN: usize = 40;

    /// Where the payload starts in the frame.
    #[inline]
    pub fn payload_off(&self) -> usize {
        BASE_LEN + Self::LEN + imm_len(self.imm)
    }

    /// Copies and validates the header.
    ///
    /// # Errors
    /// As [`WriteOp::parse`].
    #[inline]
    pub fn parse(frame: &RxFrame<'_>, base: &Base) -> Result<Self, WireError> {
        let (mut op, has_imm) = Self::of(&Bytes::op(frame)?)?;
        if has_imm {
            op.imm = imm_at(frame, IMM, BASE_LEN + Self::LEN)?;
        }
        if op.imm.is_some() && !op.range.last {
            return Err(WireError::LateImm);
        }
        base.check_end(frame, op.payload_off())?;
        Ok(op)
    }

    /// Validates a header. Also returns whether remote CQ data follows, which is not copied yet.
    #[inline]
    pub(super) fn of(b: &Bytes<{ Self::LEN }>) -> Result<(Self, bool), WireError> {
        const KNOWN: u8 = IMM | END | FETCH | COMPARE | TAGGED | VOID | ANSWER;
        let (range, flags) = RemoteRange::parse(b, KNOWN)?;
        if flags & ANSWER != 0 && (flags & FETCH != 0 || !range.last) {
            return Err(WireError::RmaFlags);
        }
        let op = Self {
            range,
            imm: None,
            end: flags & END != 0,
            fetch: flags & FETCH != 0,
            compare: flags & COMPARE != 0,
            tagged: flags & TAGGED != 0,
            void: flags & VOID != 0,
            answer: flags & ANSWER != 0,
            dst_op: b.u32::<24>(),
            dst_gen: b.u32::<28>(),
            count: b.u16::<32>(),
            op: b.u8::<34>(),
            ty: b.u8::<35>(),
            offset: b.u32::<36>(),
        };
        Ok((op, flags & IMM != 0))
    }

    /// Writes header and remote CQ data to the start of `out` and returns their length.
    ///
    /// # Panics
    /// If `out` is too short.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let at = Bytes::<{ Self::LEN }>::of_words(self.words()).write(out);
        put_imm(out, at, self.imm)
    }

    /// The header of the response.
    pub fn resp(&self) -> RespOp {
        RespOp { dst_op: self.dst_op, dst_gen: self.dst_gen, offset: self.offset, status: None }
    }

    /// The header's words.
    #[inline(always)]
    pub(super) fn words(&self) -> [u64; Self::LEN / 8] {
        let [head, rkey, addr] = self.range.words(self.flags());
        let reply_to = u64::from(self.dst_op) | u64::from(self.dst_gen) << 32;
        let kind = u64::from(self.count) | u64::from(self.op) << 16 | u64::from(self.ty) << 24;
        [head, rkey, addr, reply_to, kind | u64::from(self.offset) << 32]
    }

    /// The flags that are not part of the range.
    #[inline(always)]
    pub(super) fn flags(&self) -> u8 {
        flag(self.imm.is_some(), IMM)
            | flag(self.end, END)
            | flag(self.fetch, FETCH)
            | flag(self.compare, COMPARE)
            | flag(self.tagged, TAGGED)
            | flag(self.void, VOID)
            | flag(self.answer, ANSWER)
    }

    /// Offset of the old values in the result, for the ATOMIC header at the start of `bytes`.
    pub fn offset_of(bytes: &[u8]) -> u32 {
        Bytes::<{ Self::LEN }>::kept(bytes).u32::<36>()
    }

    /// Whether the ATOMIC header at the start of `bytes` requests the old values.
    pub fn fetches(bytes: &[u8]) -> bool {
        bytes[4] & FETCH != 0
    }

    /// Withdraws the ATOMIC whose header `bytes` starts with: it then requests only its response,
    /// and its remote CQ data is kept as payment for the eager unit that it used.
    pub fn withdraw(bytes: &mut [u8]) {
        bytes[4] |= VOID;
    }
}

/// Header of a RESP. The payload is old values, or the bytes of a READ, if `status` is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RespOp {
    /// The slot in the WRITE, ATOMIC or READ.
    pub dst_op: u32,
    /// The generation in the WRITE, ATOMIC or READ.
    pub dst_gen: u32,
    /// Offset of the payload in the result; of a failed READ, the number of bytes that will not be
    /// transferred.
    pub offset: u32,
    /// Why the bytes of a READ will not be transferred.
    pub status: Option<NackReason>,
}

impl RespOp {
    /// Length in a frame, bytes.
    pub const LEN: usize = 16;

    /// Where the payload starts in the frame.
    #[inline]
    pub fn payload_off(&self) -> usize {
        BASE_LEN + Self::LEN
    }

    /// Copies and validates the header.
    ///
    /// # Errors
    /// [`WireError::RespStatus`], [`WireError::OpReserved`], [`WireError::OpTruncated`].
    #[inline]
    pub fn parse(frame: &RxFrame<'_>, _base: &Base) -> Result<Self, WireError> {
        Self::header(frame)
    }

    /// Copies and validates the header.
    #[inline(always)]
    pub(super) fn header(frame: &RxFrame<'_>) -> Result<Self, WireError> {
        let b = Bytes::<{ Self::LEN }>::op(frame)?;
        let status = match b.u16::<12>() {
            0 => None,
            v => Some(NackReason::try_from(v).map_err(|_| WireError::RespStatus)?),
        };
        if b.u16::<14>() != 0 {
            return Err(WireError::OpReserved);
        }
        Ok(Self { dst_op: b.u32::<0>(), dst_gen: b.u32::<4>(), offset: b.u32::<8>(), status })
    }

    /// Writes the header to the start of `out` and returns its length.
    ///
    /// # Panics
    /// If `out` is too short.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        Bytes::<{ Self::LEN }>::of_words(self.words()).write(out)
    }

    /// The header's words.
    #[inline(always)]
    pub(super) fn words(&self) -> [u64; Self::LEN / 8] {
        let status = self.status.map_or(0, |reason| reason as u64);
        let reply_to = u64::from(self.dst_op) | u64::from(self.dst_gen) << 32;
        [reply_to, u64::from(self.offset) | status << 32]
    }
}
