//! MSG, a whole message in one packet, and MSGM, a segment of a message in several packets.

use barewire_driver::frame::{HeadBuf, RxFrame};
use barewire_driver::hint::cold;
use barewire_driver::port::Station;

use super::base::{AR_OF_KIND, IMM, NUMBERS_AT, kind};
use super::{BASE_LEN, Base, Bytes, IMM_LEN, TRAILER_LEN, Ty, WireError};
use crate::psn::Psn;

/// The message is tagged.
pub(super) const TAGGED: u8 = 1;

/// Header of a MSG, and of each record of a PACK.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsgOp {
    /// Destination endpoint.
    pub dst_ep: u16,
    /// Receive context of a scalable endpoint; 0 for any other endpoint too.
    pub rx_ctx: u8,
    /// Source endpoint.
    pub src_ep: u16,
    /// Whether the message matches tagged receives instead of untagged ones.
    pub tagged: bool,
    /// Remote CQ data, in the byte order of the sender's integer.
    pub imm: Option<u64>,
    /// The tag; 0 unless tagged.
    pub tag: u64,
    /// Bytes of the message in a PACK record; 0 in a MSG, whose length is the base's `plen`.
    pub len: u16,
}

impl MsgOp {
    /// Length without remote CQ data, bytes.
    pub const LEN: usize = 16;

    /// Length in a frame, bytes: 16, or 24 with remote CQ data.
    #[inline]
    pub fn op_len(&self) -> usize {
        Self::LEN + imm_len(self.imm)
    }

    /// Where the payload of a MSG starts in its frame.
    #[inline]
    pub fn payload_off(&self) -> usize {
        BASE_LEN + self.op_len()
    }

    /// Copies and validates the header of a MSG.
    ///
    /// # Errors
    /// [`WireError::MsgFlags`], [`WireError::OpReserved`], [`WireError::StrayTag`],
    /// [`WireError::StrayLen`], or one of the truncations if remote CQ data makes the packet longer
    /// than the frame.
    #[inline]
    pub fn parse(frame: &RxFrame<'_>, base: &Base) -> Result<Self, WireError> {
        let op = Self::parse_at(frame, BASE_LEN)?;
        if op.len != 0 {
            return Err(WireError::StrayLen);
        }
        if op.imm.is_some() {
            base.check_end(frame, op.payload_off())?;
        }
        Ok(op)
    }

    /// Copies and validates a header and its remote CQ data at `at`: a MSG's or a PACK record's.
    #[inline]
    pub(super) fn parse_at(frame: &RxFrame<'_>, at: usize) -> Result<Self, WireError> {
        let b = Bytes::<{ Self::LEN }>::at(frame, at)?;
        head_of(frame, at, &b)
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
        b.put16::<6>(self.len);
        b.put64::<8>(self.tag);
        let at = b.write(out);
        put_imm(out, at, self.imm)
    }
}

/// Ethernet addresses and prologue of a packet that is sent for the first time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHead {
    /// The destination's MAC in the lower six bytes; the upper two are ignored.
    pub dst: u64,
    /// The source's MAC, likewise.
    pub src: u64,
    /// EtherType and prologue.
    kind: u32,
    /// The station numbers of destination and source, as in the frame: the lower two pairs of
    /// bytes; the others are 0.
    pub numbers: u64,
}

impl FrameHead {
    /// The head of messages between two stations ([`Station::word`]) with the given station
    /// `numbers` (as in the field), with a checksum if `crc`.
    #[inline(always)]
    pub fn between(dst: u64, src: u64, numbers: u32, crc: bool) -> Self {
        let kind = if crc { const { kind(Ty::Msg, true) } } else { const { kind(Ty::Msg, false) } };
        Self { dst, src, kind, numbers: numbers.into() }
    }

    /// Writes EtherType and prologue of a packet of type `ty`, with a checksum if `crc`; it
    /// requests an acknowledgement if `ar`.
    #[inline(always)]
    pub(super) fn put_kind((ty, crc): (Ty, bool), ar: bool, out: &mut impl HeadOut) {
        out.set::<12, 4>((kind(ty, crc) | if ar { AR_OF_KIND } else { 0 }).to_le_bytes());
    }

    /// Whether the packet requests an acknowledgement.
    #[inline(always)]
    pub fn asks_ack(&self) -> bool {
        self.kind & AR_OF_KIND != 0
    }

    /// The head of `frame`; `None` if it is too short.
    #[inline(always)]
    pub(super) fn parse(frame: &RxFrame<'_>) -> Option<Self> {
        Some(Self {
            dst: u64::from_le_bytes(frame.chunk_at(0)?),
            src: u64::from_le_bytes(frame.chunk_at(6)?),
            kind: u32::from_le_bytes(frame.chunk_at(12)?),
            numbers: u64::from_le_bytes(frame.chunk_at(NUMBERS_AT)?),
        })
    }

    /// The head of a frame from its first bytes.
    #[inline(always)]
    fn of<const N: usize>(b: &Bytes<N>) -> Self {
        let (dst, src) = (b.u64::<0>(), b.u64::<6>());
        Self { dst, src, kind: b.u32::<12>(), numbers: b.u64::<NUMBERS_AT>() }
    }
}

impl From<[u8; BASE_LEN]> for FrameHead {
    fn from(bytes: [u8; BASE_LEN]) -> Self {
        Self::of(&Bytes(bytes))
    }
}

/// The destination of header writes.
pub trait HeadOut {
    /// Writes `W` bytes at `AT`.
    fn set<const AT: usize, const W: usize>(&mut self, bytes: [u8; W]);
}

impl<const N: usize> HeadOut for HeadBuf<N> {
    #[inline(always)]
    fn set<const AT: usize, const W: usize>(&mut self, bytes: [u8; W]) {
        HeadBuf::set::<AT, W>(self, bytes);
    }
}

impl<const N: usize> HeadOut for Bytes<N> {
    #[inline(always)]
    fn set<const AT: usize, const W: usize>(&mut self, bytes: [u8; W]) {
        Bytes::set::<AT, W>(self, bytes);
    }
}

impl<const N: usize> HeadOut for [u8; N] {
    #[inline(always)]
    fn set<const AT: usize, const W: usize>(&mut self, bytes: [u8; W]) {
        const { assert!(AT + W <= N) };
        self[AT..AT + W].copy_from_slice(&bytes);
    }
}

/// Base and operation header of a MSG: the part behind the [`FrameHead`].
#[derive(Clone, Copy, Debug)]
pub struct EagerMsg {
    /// The receiver's name of the session.
    pub dst_sid: u32,
    /// Sequence number.
    pub psn: Psn,
    /// The next PSN the sender expects.
    pub cack: Psn,
    /// As [`Base::grant`].
    pub grant: u16,
    /// Payload bytes.
    pub plen: u16,
    /// The operation header.
    pub op: MsgOp,
}

impl EagerMsg {
    /// Session name and PSN, packed as in [`BaseWords::sid_psn`](super::BaseWords::sid_psn).
    #[inline(always)]
    pub fn sid_psn(&self) -> u64 {
        u64::from(self.dst_sid) | u64::from(self.psn.0) << 32
    }

    /// Length of head, base and operation header without remote CQ data, bytes.
    pub const LEN: usize = BASE_LEN + MsgOp::LEN;

    /// Length with remote CQ data, bytes.
    pub const LEN_MAX: usize = Self::LEN + IMM_LEN;

    /// The head of messages from `src` to `dst`, with a checksum if `crc`.
    #[inline(always)]
    pub fn head(dst: Station, src: Station, crc: bool) -> FrameHead {
        let numbers = u32::from(dst.number) | u32::from(src.number) << 16;
        FrameHead::between(dst.word(), src.word(), numbers, crc)
    }

    /// Copies head and headers at once and validates everything that needs no session. The caller
    /// compares destination and source, and [verifies](Self::verify) the checksum, which is present
    /// if `crc`. `None` for any other packet; [`Base::parse`] returns the cause.
    #[inline(always)]
    pub fn parse(frame: &RxFrame<'_>, crc: bool) -> Option<(FrameHead, Self)> {
        let b = Bytes::<{ Self::LEN }>(frame.chunk_at(0)?);
        let word = b.u32::<44>();
        let tag = b.u64::<48>();
        let plen = b.u16::<30>();
        let (flags, imm_len) = (word as u8, (word & u32::from(IMM)) as usize * (IMM_LEN / 2));
        // The word's upper bytes are the receive context (rarely used) and the length of a PACK
        // record.
        let trailer = if crc { TRAILER_LEN } else { 0 };
        let head = FrameHead::of(&b);
        if head.kind & !AR_OF_KIND != kind(Ty::Msg, crc)
            || word & !u32::from(TAGGED | IMM) != 0
            || frame.len() - Self::LEN < imm_len + usize::from(plen) + trailer
            || flags & TAGGED == 0 && tag != 0
        {
            return None;
        }
        let imm = match imm_len {
            0 => None,
            _ => Some(u64::from_le_bytes(frame.chunk_at(Self::LEN)?)),
        };
        let msg = Self {
            dst_sid: b.u32::<16>(),
            psn: Psn(b.u32::<20>()),
            cack: Psn(b.u32::<24>()),
            grant: b.u16::<28>(),
            plen,
            op: MsgOp {
                dst_ep: b.u16::<40>(),
                rx_ctx: 0,
                src_ep: b.u16::<42>(),
                tagged: flags & TAGGED != 0,
                imm,
                tag,
                len: 0,
            },
        };
        Some((head, msg))
    }

    /// Whether type and trailer code of a frame are those of a MSG, with a checksum if `crc`.
    #[inline(always)]
    pub fn is_kind_of(frame: &RxFrame<'_>, crc: bool) -> bool {
        let kind_of = |bytes| u32::from_le_bytes(bytes) & !AR_OF_KIND;
        frame.chunk_at(12).map(kind_of) == Some(kind(Ty::Msg, crc))
    }

    /// Whether the checksum of a parsed frame is correct.
    #[inline]
    pub fn verify(&self, frame: &RxFrame<'_>) -> bool {
        super::verify_crc(frame, Self::LEN + imm_len(self.op.imm) + usize::from(self.plen))
    }

    /// Builds head and headers of a message; it requests an acknowledgement if `ar`. Returns the
    /// bytes and their number.
    #[inline(always)]
    pub fn emit(&self, head: &FrameHead, ar: bool) -> ([u8; Self::LEN_MAX], usize) {
        let mut b = Bytes::<{ Self::LEN_MAX }>::ZERO;
        Self::put(|| *head, || *self, ar, &mut b);
        let Some(imm) = self.op.imm else { return (b.0, Self::LEN) };
        b.put64::<{ Self::LEN }>(imm);
        (b.0, Self::LEN_MAX)
    }

    /// Writes the first [`LEN`](Self::LEN) bytes of [`emit`](Self::emit). `head` and `msg` are
    /// called once per field, so that each field is read where it is written and occupies no
    /// register before.
    #[inline(always)]
    pub fn put(
        head: impl Fn() -> FrameHead,
        msg: impl Fn() -> Self,
        ar: bool,
        out: &mut impl HeadOut,
    ) {
        // The upper two bytes of each are overwritten by the next write.
        out.set::<0, 8>(head().dst.to_le_bytes());
        out.set::<6, 8>(head().src.to_le_bytes());
        out.set::<12, 4>((head().kind | if ar { AR_OF_KIND } else { 0 }).to_le_bytes());
        out.set::<16, 4>(msg().dst_sid.to_le_bytes());
        out.set::<20, 4>(msg().psn.0.to_le_bytes());
        out.set::<24, 4>(msg().cack.0.to_le_bytes());
        out.set::<28, 2>(msg().grant.to_le_bytes());
        out.set::<30, 2>(msg().plen.to_le_bytes());
        let ends = u32::from(msg().op.dst_ep) | u32::from(msg().op.src_ep) << 16;
        out.set::<NUMBERS_AT, 8>(head().numbers.to_le_bytes());
        out.set::<40, 4>(ends.to_le_bytes());
        out.set::<44, 4>(u32::from(flags(msg().op.tagged, msg().op.imm)).to_le_bytes());
        out.set::<48, 8>(msg().op.tag.to_le_bytes());
    }
}

/// A view of the most common frame: a whole short tagged message without checksum or remote CQ
/// data. Each accessor reads its field from the frame. The sender may still write the frame's
/// memory, so a second read may differ: read each field once.
///
/// As after [`EagerMsg::parse`], the caller compares destination and source.
/// As after [`EagerMsg::parse`], the caller compares destination and source.
pub struct EagerTaggedView<'a, 'f> {
    frame: &'a RxFrame<'f>,
    /// Payload bytes, at most [`MAX`](Self::MAX). They are within the frame.
    pub plen: usize,
}

impl<'a, 'f> EagerTaggedView<'a, 'f> {
    /// Most payload bytes of such a message.
    pub const MAX: usize = 128;

    /// Such a message is always tagged.
    pub const TAGGED: bool = true;

    /// Whether `frame` is a MSG without checksum, sent for the first time, that requests no
    /// acknowledgement.
    #[inline(always)]
    pub fn is_kind_of(frame: &RxFrame<'_>) -> bool {
        frame.chunk_at(12).map(u32::from_le_bytes) == const { Some(kind(Ty::Msg, false)) }
    }

    /// The message in `frame`; `None` if it is of another form.
    #[inline(always)]
    pub fn of(frame: &'a RxFrame<'f>) -> Option<Self> {
        let Some(room) = frame.len().checked_sub(EagerMsg::LEN) else { return cold(None) };
        let plen = usize::from(u16::from_le_bytes(frame.chunk_at(30)?));
        let msg = Self { frame, plen };
        let usual = plen <= room
            && plen <= Self::MAX
            && msg.u32::<44>() == u32::from(TAGGED)
            && Self::is_kind_of(frame);
        if usual { Some(msg) } else { cold(None) }
    }

    /// The bytes at `AT`, which are within the frame: [`of`](Self::of) has checked that.
    #[inline(always)]
    fn bytes<const AT: usize, const W: usize>(&self) -> [u8; W] {
        const { assert!(AT + W <= EagerMsg::LEN) };
        self.frame.chunk_at(AT).unwrap_or([0; W])
    }

    #[inline(always)]
    fn u16<const AT: usize>(&self) -> u16 {
        u16::from_le_bytes(self.bytes::<AT, 2>())
    }

    #[inline(always)]
    fn u32<const AT: usize>(&self) -> u32 {
        u32::from_le_bytes(self.bytes::<AT, 4>())
    }

    #[inline(always)]
    fn u64<const AT: usize>(&self) -> u64 {
        u64::from_le_bytes(self.bytes::<AT, 8>())
    }

    /// The head.
    #[inline(always)]
    pub fn head(&self) -> FrameHead {
        let (dst, src) = (self.u64::<0>(), self.u64::<6>());
        FrameHead { dst, src, kind: self.u32::<12>(), numbers: self.u64::<NUMBERS_AT>() }
    }

    /// The receiver's session name in the low half, the PSN in the high half.
    #[inline(always)]
    pub fn sid_psn(&self) -> u64 {
        self.u64::<16>()
    }

    /// [`cack`](Self::cack) in the lowest 32 bits, [`grant`](Self::grant) in the next 16; the
    /// highest 16 are other fields.
    #[inline(always)]
    pub fn ack_credit(&self) -> u64 {
        self.u64::<24>()
    }

    /// The next PSN the sender expects.
    #[inline(always)]
    pub fn cack(&self) -> Psn {
        Psn(self.u32::<24>())
    }

    /// As [`Base::grant`].
    #[inline(always)]
    pub fn grant(&self) -> u16 {
        self.u16::<28>()
    }

    /// Destination endpoint.
    #[inline(always)]
    pub fn dst_ep(&self) -> u16 {
        self.u16::<40>()
    }

    /// Source endpoint.
    #[inline(always)]
    pub fn src_ep(&self) -> u16 {
        self.u16::<42>()
    }

    /// The tag.
    #[inline(always)]
    pub fn tag(&self) -> u64 {
        self.u64::<48>()
    }
}

/// Header of a MSGM. The segments of a message follow each other in the sequence, first to last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsgMOp {
    /// Destination endpoint.
    pub dst_ep: u16,
    /// Receive context of a scalable endpoint; 0 for any other endpoint too.
    pub rx_ctx: u8,
    /// Source endpoint.
    pub src_ep: u16,
    /// Whether the message matches tagged receives instead of untagged ones.
    pub tagged: bool,
    /// Remote CQ data, in the first segment only.
    pub imm: Option<u64>,
    /// The tag; 0 unless tagged.
    pub tag: u64,
    /// Length of the whole message, bytes.
    pub msg_len: u64,
    /// Offset of this packet's payload in the message, bytes.
    pub offset: u64,
}

impl MsgMOp {
    /// Length without remote CQ data, bytes.
    pub const LEN: usize = 32;

    /// Offset of the `offset` field, eight bytes.
    pub const OFFSET_AT: usize = 24;

    /// Length in a frame, bytes: 32, or 40 with remote CQ data.
    #[inline]
    pub fn op_len(&self) -> usize {
        Self::LEN + imm_len(self.imm)
    }

    /// Where the payload starts in the frame.
    #[inline]
    pub fn payload_off(&self) -> usize {
        BASE_LEN + self.op_len()
    }

    /// Copies and validates the header, and that the segment is within its message.
    ///
    /// # Errors
    /// As [`MsgOp::parse`] without `StrayLen`, and [`WireError::EmptyPiece`],
    /// [`WireError::PieceRange`], [`WireError::LateImm`].
    #[inline(always)]
    pub fn parse(frame: &RxFrame<'_>, base: &Base) -> Result<Self, WireError> {
        let (op, msg_len, offset) = long_msg_at(frame)?;
        if base.plen == 0 {
            return Err(WireError::EmptyPiece);
        }
        if offset.checked_add(base.plen.into()).is_none_or(|end| end > msg_len) {
            return Err(WireError::PieceRange);
        }
        if op.imm.is_some() {
            if offset != 0 {
                return Err(WireError::LateImm);
            }
            base.check_end(frame, BASE_LEN + Self::LEN + IMM_LEN)?;
        }
        let MsgOp { dst_ep, rx_ctx, src_ep, tagged, imm, tag, .. } = op;
        Ok(Self { dst_ep, rx_ctx, src_ep, tagged, imm, tag, msg_len, offset })
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
        b.put64::<{ Self::OFFSET_AT }>(self.offset);
        let at = b.write(out);
        put_imm(out, at, self.imm)
    }
}

/// The common part of MSG, MSGM and RNDV: the first 16 bytes of header `b` at `at`, and the remote
/// CQ data behind the header.
#[inline(always)]
fn head_of<const N: usize>(
    frame: &RxFrame<'_>,
    at: usize,
    b: &Bytes<N>,
) -> Result<MsgOp, WireError> {
    let flags = b.u8::<4>();
    let tag = b.u64::<8>();
    if flags & !(TAGGED | IMM) != 0 {
        return Err(WireError::MsgFlags);
    }
    let tagged = flags & TAGGED != 0;
    if !tagged && tag != 0 {
        return Err(WireError::StrayTag);
    }
    Ok(MsgOp {
        dst_ep: b.u16::<0>(),
        rx_ctx: b.u8::<5>(),
        src_ep: b.u16::<2>(),
        tagged,
        imm: imm_at(frame, flags, at + N)?,
        tag,
        len: b.u16::<6>(),
    })
}

/// The 32-byte header of MSGM and RNDV: a MSG header without record length, the message's length,
/// and eight bytes that differ.
#[inline(always)]
pub(super) fn long_msg_at(frame: &RxFrame<'_>) -> Result<(MsgOp, u64, u64), WireError> {
    let b = Bytes::<{ MsgMOp::LEN }>::op(frame)?;
    if b.u16::<6>() != 0 {
        return Err(WireError::OpReserved);
    }
    Ok((head_of(frame, BASE_LEN, &b)?, b.u64::<16>(), b.u64::<24>()))
}

/// The flags byte of a message.
#[inline]
pub(super) fn flags(tagged: bool, imm: Option<u64>) -> u8 {
    (u8::from(tagged) * TAGGED) | (u8::from(imm.is_some()) * IMM)
}

/// Length of remote CQ data, bytes: 0 or 8.
#[inline]
pub(super) fn imm_len(imm: Option<u64>) -> usize {
    if imm.is_some() { IMM_LEN } else { 0 }
}

/// The remote CQ data at `at`, if `flags` announce it.
#[inline]
pub(super) fn imm_at(frame: &RxFrame<'_>, flags: u8, at: usize) -> Result<Option<u64>, WireError> {
    if flags & IMM == 0 {
        return Ok(None);
    }
    let b = frame.chunk_at(at).ok_or(WireError::OpTruncated)?;
    Ok(Some(u64::from_le_bytes(b)))
}

/// Writes the remote CQ data, if any, at `at` and returns its end.
#[inline]
pub(super) fn put_imm(out: &mut [u8], at: usize, imm: Option<u64>) -> usize {
    let Some(v) = imm else { return at };
    out[at..at + IMM_LEN].copy_from_slice(&v.to_le_bytes());
    at + IMM_LEN
}
