//! Parsers and writers of the fast path: packets in their common form, sent for the first time.
//! Each copies fields out of the frame and leaves the comparison with the session to the caller.
//! For a packet of any other form the caller uses [`Base::parse`], which also returns the error.

use barewire_driver::frame::RxFrame;
use barewire_driver::hint::cold;
use barewire_driver::port::Station;

use super::base::NUMBERS_AT;
use super::base::{AR, first_word};
use super::rma::{ANSWER, END, LAST};
use super::{
    AckOp, AtomicOp, BASE_LEN, Base, Bytes, FrameHead, HeadOut, READ_ANSWER_MAX, ReadOp,
    RemoteRange, RespOp, Ty, WriteOp, verify_crc,
};
use crate::psn::Psn;

/// The base of a packet as words: fields that are compared together share an integer.
#[derive(Clone, Copy, Debug)]
pub struct BaseWords {
    /// Addresses and prologue.
    pub head: FrameHead,
    /// The receiver's session name in the low half, the PSN in the high half: one compare for both.
    pub sid_psn: u64,
    /// The next PSN the sender expects.
    pub cack: Psn,
    /// The grant, as in [`Base::grant`], in the low half, the payload length in the high half: one
    /// compare for both.
    pub ack_len: u32,
}

/// Packet types that request one-sided operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestTy {
    /// An atomic operation.
    Atomic,
    /// A write.
    Write,
    /// A read.
    Read,
}

impl RequestTy {
    const ALL: [Self; 3] = [Self::Atomic, Self::Write, Self::Read];

    /// The least value of the frame's version-and-type byte among these types.
    const LEAST: u8 = {
        let (mut least, mut i) = (u8::MAX, 0);
        while i < Self::ALL.len() {
            let [_, _, byte, _] = first_word(Self::ALL[i].ty(), false).to_be_bytes();
            least = if byte < least { byte } else { least };
            i += 1;
        }
        least
    };

    /// The type.
    const fn ty(self) -> Ty {
        match self {
            Self::Atomic => Ty::Atomic,
            Self::Write => Ty::Write,
            Self::Read => Ty::Read,
        }
    }
}

/// Packet types that carry a segment of a longer transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentTy {
    /// A segment of a long eager message.
    MsgM,
    /// A segment of a rendezvous message or a read.
    Data,
}

impl SegmentTy {
    /// The type.
    #[inline(always)]
    pub fn ty(self) -> Ty {
        match self {
            Self::MsgM => Ty::MsgM,
            Self::Data => Ty::Data,
        }
    }
}

/// Packet types of one-sided operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RmaTy {
    /// An atomic operation that requests no acknowledgement.
    Atomic,
    /// The response to a request, or the refusal of a read.
    Resp,
    /// Any request, with or without AR.
    Request(RequestTy),
}

impl BaseWords {
    /// Copies the base of a packet whose type [`ty`](Self::ty) has recognised. Compares nothing
    /// with the session. `None` if the frame is too short.
    ///
    /// Field by field: the compiler splits one large copy into parts that it must join again.
    #[inline(always)]
    fn parse(frame: &RxFrame<'_>) -> Option<Self> {
        Some(Self {
            head: FrameHead::parse(frame)?,
            sid_psn: u64::from_le_bytes(frame.chunk_at(16)?),
            cack: Psn(u32::from_le_bytes(frame.chunk_at(24)?)),
            ack_len: u32::from_le_bytes(frame.chunk_at(28)?),
        })
    }

    /// The type of a packet, if it is a request or a RESP in the common form. `None` for any other;
    /// [`Base::parse`] returns its type or the error.
    #[inline(always)]
    pub fn ty(frame: &RxFrame<'_>) -> Option<RmaTy> {
        // In the frame's byte order, so that the frame's word is not swapped.
        const ATOMIC: u32 = u32::from_ne_bytes(first_word(Ty::Atomic, false).to_be_bytes());
        const RESP: u32 = u32::from_ne_bytes(first_word(Ty::Resp, false).to_be_bytes());
        match u32::from_ne_bytes(frame.chunk_at(12)?) {
            ATOMIC => Some(RmaTy::Atomic),
            RESP => Some(RmaTy::Resp),
            // One compare rules out most other types.
            _ if frame.chunk_at::<1>(14)? < [RequestTy::LEAST] => None,
            other => Self::request_ty(u32::from_be(other)).map(RmaTy::Request),
        }
    }

    fn request_ty(ty: u32) -> Option<RequestTy> {
        const ATOMIC: u32 = first_word(Ty::Atomic, false);
        const WRITE: u32 = first_word(Ty::Write, false);
        const READ: u32 = first_word(Ty::Read, false);
        match ty & !u32::from(AR) {
            ATOMIC => Some(RequestTy::Atomic),
            WRITE => Some(RequestTy::Write),
            READ => Some(RequestTy::Read),
            _ => None,
        }
    }

    /// Parses an ACK without AR, with a checksum if `crc`, which is verified. `None` for any other
    /// packet; [`Base::parse`] handles it.
    #[inline(always)]
    pub fn ack(frame: &RxFrame<'_>, crc: bool) -> Option<(Self, AckOp)> {
        if u32::from_be_bytes(frame.chunk_at(12)?) != first_word(Ty::Ack, crc) {
            return None;
        }
        let plain = Self::parse(frame)?;
        let op = AckOp::parse(frame, &plain.base(Ty::Ack, crc)).ok()?;
        let whole = plain.plen() == 0 && (!crc || verify_crc(frame, BASE_LEN + op.op_len()));
        whole.then_some((plain, op))
    }

    /// Parses a segment that is sent for the first time, with a checksum if `crc`, which the caller
    /// must verify. Its payload is within the frame. `None` for any other packet; [`Base::parse`]
    /// handles it.
    #[inline(always)]
    pub fn segment(frame: &RxFrame<'_>, crc: bool) -> Option<(Self, SegmentTy)> {
        let ty = u32::from_be_bytes(frame.chunk_at(12)?) & !u32::from(AR);
        let piece = [SegmentTy::MsgM, SegmentTy::Data]
            .into_iter()
            .find(|piece| first_word(piece.ty(), crc) == ty)?;
        let plain = Self::parse(frame)?;
        let end = plain.base(piece.ty(), crc).end(BASE_LEN + piece.ty().op_len());
        (frame.len() >= end).then_some((plain, piece))
    }

    /// The base as [`Base::parse`] returns it, for a packet of type `ty` with a checksum if `crc`.
    #[inline(always)]
    pub fn base(&self, ty: Ty, crc: bool) -> Base {
        let Self { head, cack, .. } = *self;
        let (dst_sid, psn, grant, plen) = (self.dst_sid(), self.psn(), self.grant(), self.plen());
        let station = |mac: u64, number: u64| Station::from_word(mac << 16 >> 16 | number << 48);
        let dst = station(head.dst, head.numbers);
        let src = station(head.src, head.numbers >> 16);
        let (ar, rtx) = (self.asks_ack(), false);
        Base { dst, src, ty, ar, rtx, ce: false, crc, dst_sid, psn, cack, grant, plen }
    }

    /// The receiver's session name.
    #[inline(always)]
    pub fn dst_sid(&self) -> u32 {
        self.sid_psn as u32
    }

    /// Sequence number.
    #[inline(always)]
    pub fn psn(&self) -> Psn {
        Psn((self.sid_psn >> 32) as u32)
    }

    /// The grant: see [`Base::grant`].
    #[inline(always)]
    pub fn grant(&self) -> u16 {
        self.ack_len as u16
    }

    /// Payload bytes.
    #[inline(always)]
    pub fn plen(&self) -> u16 {
        (self.ack_len >> 16) as u16
    }

    /// Whether the packet requests an acknowledgement.
    #[inline(always)]
    pub fn asks_ack(&self) -> bool {
        self.head.asks_ack()
    }
}

/// The base of a packet about to be sent. Each accessor is called where its field is written, so
/// that no field occupies a register before.
pub trait BaseOut {
    /// As in [`FrameHead`].
    fn dst(&self) -> u64;
    /// As in [`FrameHead`].
    fn src(&self) -> u64;
    /// As in [`FrameHead`].
    fn numbers(&self) -> u32;
    /// As in [`BaseWords`].
    fn dst_sid(&self) -> u32;
    /// As in [`BaseWords`].
    fn psn(&self) -> Psn;
    /// As in [`BaseWords`].
    fn cack(&self) -> Psn;
    /// As in [`BaseWords`].
    fn grant(&self) -> u16;

    /// Writes the base of a packet of type `ty` with `plen` bytes of payload and no checksum; it
    /// requests an acknowledgement if `ar`.
    #[inline(always)]
    fn put(&self, ty: Ty, plen: usize, ar: bool, out: &mut impl HeadOut) {
        self.put_with((ty, false), plen, ar, out);
    }

    /// [`put`](Self::put) for a packet with a checksum if `crc`.
    #[inline(always)]
    fn put_with(&self, (ty, crc): (Ty, bool), plen: usize, ar: bool, out: &mut impl HeadOut) {
        // The upper two bytes of each are overwritten by the next write.
        out.set::<0, 8>(self.dst().to_le_bytes());
        out.set::<6, 8>(self.src().to_le_bytes());
        FrameHead::put_kind((ty, crc), ar, out);
        out.set::<16, 4>(self.dst_sid().to_le_bytes());
        out.set::<20, 4>(self.psn().0.to_le_bytes());
        out.set::<24, 4>(self.cack().0.to_le_bytes());
        out.set::<28, 2>(self.grant().to_le_bytes());
        out.set::<30, 2>((plen as u16).to_le_bytes());
        out.set::<NUMBERS_AT, 8>(u64::from(self.numbers()).to_le_bytes());
    }
}

/// The header of a WRITE, READ or ATOMIC, copied but not validated: it is compared with a validated
/// one.
#[derive(Clone, Copy, Debug)]
pub struct RawRequest {
    /// The fields that repeated requests share.
    pub key: RequestKey,
    /// As in [`RemoteRange`].
    pub addr: u64,
    /// The initiator's slot, for the response.
    pub reply_to: ReplyTo,
}

/// Destination of the response to a request: the initiator's slot and generation, as in the header.
#[derive(Clone, Copy, Debug)]
pub struct ReplyTo(u64);

/// The shape of a request: destination endpoint, key and flags, and of an ATOMIC count, operation,
/// datatype and offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestKey {
    rkey: u64,
    /// Endpoint, flags and receive context, at their places in the header's first 64 bits.
    head: u64,
    /// Count, operation, datatype and offset.
    kind: u64,
}

impl RequestKey {
    /// Equals the key of no header: a header's key has zeros in the unused bits of `head`.
    pub const NOTHING: Self = Self { rkey: 0, head: u64::MAX, kind: 0 };

    /// A hash, for the index of a cached grant. Its lowest bit tells whether an ATOMIC fetches.
    #[inline(always)]
    pub fn hash(&self) -> usize {
        (self.rkey as u32 ^ (self.kind >> 16) as u32 ^ (self.head >> 35) as u32) as usize
    }

    /// Whether a WRITE or READ with this key is a whole operation that requests a RESP and has no
    /// remote CQ data.
    pub fn is_whole(&self, ask: RequestTy) -> bool {
        let more = if ask == RequestTy::Read { END | ANSWER } else { ANSWER };
        self.head >> 32 == u64::from(LAST | more)
    }
}

impl RawRequest {
    /// Copies base and header, without the lengths. Validates nothing. `None` if the frame is too
    /// short.
    #[inline(always)]
    pub fn parse(frame: &RxFrame<'_>, ask: RequestTy) -> Option<(BaseWords, Self)> {
        let head = match ask {
            RequestTy::Atomic => AtomicOp::HEAD,
            RequestTy::Write => WriteOp::HEAD,
            RequestTy::Read => ReadOp::HEAD,
        };
        if frame.len() < head {
            return cold(None);
        }
        // Without the sequence number and the source endpoint.
        let head = u64::from_le_bytes(frame.chunk_at(BASE_LEN)?) & 0xffff_0000_ffff;
        let rkey = u64::from_le_bytes(frame.chunk_at(BASE_LEN + 8)?);
        let kind = match ask {
            RequestTy::Atomic => u64::from_le_bytes(frame.chunk_at(BASE_LEN + 32)?),
            RequestTy::Write | RequestTy::Read => 0,
        };
        let addr = u64::from_le_bytes(frame.chunk_at(BASE_LEN + 16)?);
        let reply_to = ReplyTo(u64::from_le_bytes(frame.chunk_at(BASE_LEN + 24)?));
        let key = RequestKey { rkey, head, kind };
        Some((BaseWords::parse(frame)?, Self { key, addr, reply_to }))
    }

    /// Bytes that a WRITE or READ accesses, at least 1. `None` if the packet is not the whole
    /// operation, if its payload exceeds the frame, or if a field is invalid.
    #[inline(always)]
    pub fn len(frame: &RxFrame<'_>, ask: RequestTy, base: &BaseWords) -> Option<usize> {
        let plen = usize::from(base.plen());
        let len = match ask {
            RequestTy::Write => {
                let left = u64::from_le_bytes(frame.chunk_at(BASE_LEN + 32)?);
                let here = frame.len().checked_sub(WriteOp::HEAD)? >= plen;
                (here && left == plen as u64).then_some(plen)?
            }
            RequestTy::Read => {
                let offset = u64::from_le_bytes(frame.chunk_at(BASE_LEN + 32)?);
                let len = u64::from_le_bytes(frame.chunk_at(BASE_LEN + 40)?);
                let plain = offset == 0 && plen == 0 && len <= READ_ANSWER_MAX.into();
                plain.then_some(len as usize)?
            }
            RequestTy::Atomic => return None,
        };
        (len > 0).then_some(len)
    }

    /// The remote range, without sequence number and source endpoint.
    pub fn range(&self) -> RemoteRange {
        let Self { key: RequestKey { rkey, head, .. }, addr, .. } = *self;
        let last = (head >> 32) as u8 & LAST != 0;
        let rx_ctx = (head >> 40) as u8;
        RemoteRange { dst_ep: head as u16, rx_ctx, src_ep: 0, seq: 0, last, rkey, addr }
    }

    /// The validated header of an ATOMIC, without initiator's slot and source endpoint. `None` if a
    /// field is invalid or remote CQ data follows.
    pub fn checked(&self) -> Option<AtomicOp> {
        // Validates the copy: the frame may have changed since.
        let mut b = Bytes::ZERO;
        b.put16::<0>(self.key.head as u16);
        b.put16::<4>((self.key.head >> 32) as u16);
        b.put64::<8>(self.key.rkey);
        b.put64::<16>(self.addr);
        b.put64::<32>(self.key.kind);
        match AtomicOp::of(&b) {
            Ok((op, false)) => Some(op),
            _ => None,
        }
    }
}

impl ReplyTo {
    /// The header of the response.
    #[inline(always)]
    pub fn resp(&self) -> RespOp {
        let (dst_op, dst_gen) = (self.0 as u32, (self.0 >> 32) as u32);
        RespOp { dst_op, dst_gen, offset: 0, status: None }
    }
}

/// Writes the words `$at` of an operation header; `$at` counts 8-byte words behind the base.
macro_rules! put_words {
    ($words:expr, $out:ident, $($at:literal),*) => {
        let words = $words;
        $($out.set::<{ BASE_LEN + 8 * $at }, 8>(words[$at].to_le_bytes());)*
    };
}

impl RemoteRange {
    /// Writes the range, with `flags` of the operation, field by field.
    #[inline(always)]
    fn put(&self, flags: u8, out: &mut impl HeadOut) {
        let last = if self.last { LAST } else { 0 };
        out.set::<{ BASE_LEN }, 2>(self.dst_ep.to_le_bytes());
        out.set::<{ BASE_LEN + 2 }, 2>(self.src_ep.to_le_bytes());
        out.set::<{ BASE_LEN + 4 }, 2>(u16::from(flags | last).to_le_bytes());
        out.set::<{ BASE_LEN + 6 }, 2>(self.seq.to_le_bytes());
        out.set::<{ BASE_LEN + 8 }, 8>(self.rkey.to_le_bytes());
        out.set::<{ BASE_LEN + 16 }, 8>(self.addr.to_le_bytes());
    }
}

impl WriteOp {
    /// Bytes before the payload of a WRITE without remote CQ data.
    pub const HEAD: usize = BASE_LEN + Self::LEN;

    /// Writes the operation header, field by field.
    #[inline(always)]
    pub fn put(&self, out: &mut impl HeadOut) {
        self.range.put(self.flags(), out);
        put_words!(self.words(), out, 3, 4);
    }
}

impl ReadOp {
    /// Length of a READ, bytes.
    pub const HEAD: usize = BASE_LEN + Self::LEN;

    /// Writes the operation header, field by field.
    #[inline(always)]
    pub fn put(&self, out: &mut impl HeadOut) {
        self.range.put(self.flags(), out);
        put_words!(self.words(), out, 3, 4, 5);
    }
}

impl AtomicOp {
    /// Bytes before the payload of an ATOMIC without remote CQ data.
    pub const HEAD: usize = BASE_LEN + Self::LEN;

    /// Writes the operation header of a packet without remote CQ data, field by field.
    #[inline(always)]
    pub fn put(&self, out: &mut impl HeadOut) {
        self.range.put(self.flags(), out);
        out.set::<{ BASE_LEN + 24 }, 4>(self.dst_op.to_le_bytes());
        out.set::<{ BASE_LEN + 28 }, 4>(self.dst_gen.to_le_bytes());
        put_words!(self.words(), out, 4);
    }
}

impl AckOp {
    /// Length of an ACK without SACK words, bytes.
    pub const HEAD: usize = BASE_LEN + 8;

    /// Writes the operation header of an ACK that is sent immediately after the arrival of packet
    /// `cack - 1`.
    #[inline(always)]
    pub fn put(cack: Psn, out: &mut impl HeadOut) {
        let newest = cack.0.wrapping_sub(1);
        out.set::<{ BASE_LEN }, 8>((u64::from(newest) << 32).to_le_bytes());
    }
}

impl RespOp {
    /// Bytes before the payload of a RESP.
    pub const HEAD: usize = BASE_LEN + Self::LEN;

    /// Parses a RESP that carries the whole result of an operation: its base, and the slot and
    /// generation that it names. `None` for any other packet.
    #[inline(always)]
    pub fn parse_whole(frame: &RxFrame<'_>) -> Option<(BaseWords, (u32, u32))> {
        if frame.len() < Self::HEAD {
            return cold(None);
        }
        let base = BaseWords::parse(frame)?;
        if frame.len() - Self::HEAD < usize::from(base.plen()) {
            return cold(None);
        }
        let rest = u64::from_le_bytes(frame.chunk_at(BASE_LEN + 8)?);
        let w = u32::from_le_bytes(frame.chunk_at(BASE_LEN)?);
        let generation = u32::from_le_bytes(frame.chunk_at(BASE_LEN + 4)?);
        if rest == 0 { Some((base, (w, generation))) } else { cold(None) }
    }

    /// Writes the operation header, field by field.
    #[inline(always)]
    pub fn put(&self, out: &mut impl HeadOut) {
        put_words!(self.words(), out, 0, 1);
    }
}
