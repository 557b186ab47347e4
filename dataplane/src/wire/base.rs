//! The first 40 bytes of every packet: Ethernet header, prologue and base.

use barewire_driver::frame::{DST_NUMBER_AT, FRAME_MIN, RxFrame, SRC_NUMBER_AT};
use barewire_driver::port::{MacAddr, Station};

use super::ty::Tail;
use super::{BASE_LEN, Bytes, ETHERTYPE, IMM_LEN, TRAILER_LEN, Ty, VERSION, WireError, verify_crc};
use crate::psn::Psn;

/// Flag in the operation header of every type that may carry remote CQ data: eight bytes of it
/// follow the header.
pub(super) const IMM: u8 = 1 << 1;

pub(super) const SEC: u16 = 1 << 7;

/// Offset of the payload length.
pub(super) const PLEN_AT: usize = 30;

pub(super) const AR: u16 = 1 << 6;
const RTX: u16 = 1 << 5;
const CE: u16 = 1 << 4;
const RESERVED: u16 = 3 << 2;
/// Trailer code: both bits set for a checksum, none set for no trailer. Two bits, so that no single
/// bit flip hides the checksum that would detect it.
const TRAILER: u16 = 3;

/// EtherType and prologue as one big-endian word: the mask of the bits that are the same in every
/// frame of this version, and their value. CE is fixed as well except in an ACK.
const FIXED_MASK: u32 = 0xffff_0000 | (0xe000 | SEC | RESERVED) as u32;
const FIXED: u32 = (ETHERTYPE as u32) << 16 | (VERSION as u32) << 13;

/// EtherType and prologue of a packet of type `ty` without flags, with a checksum if `crc`.
#[inline(always)]
pub(super) const fn first_word(ty: Ty, crc: bool) -> u32 {
    FIXED | (ty as u32) << 8 | if crc { TRAILER as u32 } else { 0 }
}

/// [`first_word`] in the frame's byte order.
pub(super) const fn kind(ty: Ty, crc: bool) -> u32 {
    u32::from_le_bytes(first_word(ty, crc).to_be_bytes())
}

/// The [`AR`] bit in [`kind`].
pub(super) const AR_OF_KIND: u32 = (AR as u32).swap_bytes();

/// Offset of the two station numbers, which four zero bytes follow.
pub(super) const NUMBERS_AT: usize = DST_NUMBER_AT;
const _: () = assert!(SRC_NUMBER_AT == DST_NUMBER_AT + 2 && FRAME_MIN == BASE_LEN);

/// Longest operation header with remote CQ data in any minor version, in multiples of eight bytes.
/// Bounds the search for the checksum of a packet of unknown type.
const OP_WORDS_MAX: usize = 12;

/// Ethernet header, prologue and base of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// Destination.
    pub dst: Station,
    /// Source.
    pub src: Station,
    /// Type of the packet.
    pub ty: Ty,
    /// The sender requests an acknowledgement at once.
    pub ar: bool,
    /// A retransmission: the packet was sent before with this PSN.
    pub rtx: bool,
    /// In an ACK: congestion echo. A packet that it acknowledges arrived with a congestion mark.
    pub ce: bool,
    /// A CRC32C follows the payload.
    pub crc: bool,
    /// The receiver's name of the session: bits 0 to 19 slot, 20 to 31 generation. 0 if the sender
    /// does not know a name, which is allowed in OPEN and RST only.
    pub dst_sid: u32,
    /// Sequence number; in a control packet its meaning depends on the type.
    pub psn: Psn,
    /// The next PSN that the sender expects: all before it have arrived.
    pub cack: Psn,
    /// Low 16 bits of the total of eager units that the sender has granted to the receiver.
    pub grant: u16,
    /// Payload bytes, without checksum and Ethernet padding.
    pub plen: u16,
}

/// The fields of a frame of unknown type: sufficient to refuse its packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawBase {
    /// Destination.
    pub dst: Station,
    /// Source.
    pub src: Station,
    /// The protocol's major version, 0 to 7.
    pub version: u8,
    /// The type's number, 0 to 31.
    pub ty: u8,
    /// The receiver's name of the session.
    pub dst_sid: u32,
    /// Sequence number.
    pub psn: Psn,
}

impl Base {
    /// Copies the first 40 bytes of `frame`, validates everything that does not need the operation
    /// header, and verifies the checksum if there is one.
    ///
    /// On success the frame holds at least the operation header's least length, `plen` bytes and
    /// the checksum. Remote CQ data makes a message longer; the operation's own parse checks that.
    ///
    /// # Errors
    /// The cause. [`WireError::UnknownType`] is returned only for an undamaged packet (as far as it
    /// carries a checksum), so that it may be answered by a NACK: [`Base::parse_raw`] returns the
    /// fields for that. For all other causes the packet is counted and dropped. A frame of
    /// [`WireError::Version`] may be damaged.
    #[inline]
    pub fn parse(frame: &RxFrame<'_>) -> Result<Self, WireError> {
        let Some(b) = frame.first_chunk() else { return Err(WireError::Short) };
        // Nothing below borrows `b` or `base`, so that they stay in registers: every packet passes
        // this code.
        let b = Bytes::<BASE_LEN>(b);
        let fixed = u32::from_be_bytes(b.get::<12, 4>());
        let Some(ty) = Ty::from_bits((fixed >> 8) as u8) else { return Err(invalid_cause(frame)) };
        let numbers = b.u64::<NUMBERS_AT>();
        let base = Self {
            dst: Station { mac: MacAddr(b.get::<0, 6>()), number: numbers as u16 },
            src: Station { mac: MacAddr(b.get::<6, 6>()), number: (numbers >> 16) as u16 },
            ty,
            ar: fixed as u16 & AR != 0,
            rtx: fixed as u16 & RTX != 0,
            ce: fixed as u16 & CE != 0,
            crc: fixed as u16 & TRAILER != 0,
            dst_sid: b.u32::<16>(),
            psn: Psn(b.u32::<20>()),
            cack: Psn(b.u32::<24>()),
            grant: b.u16::<28>(),
            plen: b.u16::<PLEN_AT>(),
        };
        // Without `&&`: none of these checks fails for a valid packet, so one branch suffices.
        let fits = (fixed & FIXED_MASK == FIXED)
            & (fixed.wrapping_add(1) & 2 == 0)
            & (!base.ce | (ty as u8 == Ty::Ack as u8))
            & is_station(b.u64::<6>(), numbers)
            & (base.dst_sid >= ty.sid_min())
            & (base.plen <= ty.plen_max())
            & (frame.len() >= base.end(BASE_LEN + ty.op_len()));
        if !fits {
            return Err(invalid_cause(frame));
        }
        if base.crc {
            check_crc(frame, ty, base.plen)?;
        }
        Ok(base)
    }

    /// The receiver's name of the session in an unvalidated frame. `None` if the frame is shorter.
    #[inline(always)]
    pub fn dst_sid_of(frame: &RxFrame<'_>) -> Option<u32> {
        frame.chunk_at(16).map(u32::from_le_bytes)
    }

    /// The fields of a frame whose type this version does not know, or `None` if it is shorter than
    /// 40 bytes. Validates nothing else.
    #[cold]
    pub fn parse_raw(frame: &RxFrame<'_>) -> Option<RawBase> {
        let b = Bytes::<BASE_LEN>(frame.first_chunk()?);
        let prologue = u16::from_be_bytes(b.get::<14, 2>());
        Some(RawBase {
            dst: Station { mac: MacAddr(b.get::<0, 6>()), number: b.u16::<DST_NUMBER_AT>() },
            src: Station { mac: MacAddr(b.get::<6, 6>()), number: b.u16::<SRC_NUMBER_AT>() },
            version: (prologue >> 13) as u8,
            ty: (prologue >> 8) as u8 & 31,
            dst_sid: b.u32::<16>(),
            psn: Psn(b.u32::<20>()),
        })
    }

    /// Writes the 40 bytes.
    #[inline]
    pub fn emit(&self, out: &mut [u8; BASE_LEN]) {
        let mut prologue = u16::from(VERSION) << 13 | (self.ty as u16) << 8;
        prologue |= u16::from(self.ar) << 6 | u16::from(self.rtx) << 5;
        prologue |= u16::from(self.ce) << 4;
        prologue |= u16::from(self.crc) * TRAILER;
        let mut b = Bytes::<BASE_LEN>::ZERO;
        b.set::<0, 6>(self.dst.mac.0);
        b.set::<6, 6>(self.src.mac.0);
        b.set::<12, 2>(ETHERTYPE.to_be_bytes());
        b.set::<14, 2>(prologue.to_be_bytes());
        b.put32::<16>(self.dst_sid);
        b.put32::<20>(self.psn.0);
        b.put32::<24>(self.cack.0);
        b.put16::<28>(self.grant);
        b.put16::<PLEN_AT>(self.plen);
        b.put16::<DST_NUMBER_AT>(self.dst.number);
        b.put16::<SRC_NUMBER_AT>(self.src.number);
        *out = b.0;
    }

    /// End of the packet in a frame whose payload starts at `payload_off`, checksum included.
    #[inline]
    pub fn end(&self, payload_off: usize) -> usize {
        let trailer = if self.crc { TRAILER_LEN } else { 0 };
        payload_off + usize::from(self.plen) + trailer
    }

    /// Checks that payload and checksum are within the frame, for a payload that starts at
    /// `payload_off`, later than [`parse`](Self::parse) could know.
    #[inline]
    pub(super) fn check_end(
        &self,
        frame: &RxFrame<'_>,
        payload_off: usize,
    ) -> Result<(), WireError> {
        if frame.len() >= self.end(payload_off) {
            Ok(())
        } else {
            Err(truncated(frame.len(), payload_off, self.plen.into()))
        }
    }
}

/// Locates the end of the payload and verifies the checksum behind it. The operation's parse copies
/// the same bytes again.
#[inline(never)]
fn check_crc(frame: &RxFrame<'_>, ty: Ty, plen: u16) -> Result<(), WireError> {
    let op = frame.chunk_at::<8>(BASE_LEN).unwrap_or([0; 8]);
    let extra = match ty.tail() {
        Tail::None => 0,
        Tail::Sack => usize::from(op[2]) * 8,
        Tail::Imm if op[4] & IMM != 0 => IMM_LEN,
        Tail::Imm => 0,
    };
    let payload_off = BASE_LEN + ty.op_len() + extra;
    let end = payload_off + usize::from(plen);
    if frame.len() < end + TRAILER_LEN {
        Err(truncated(frame.len(), payload_off, plen.into()))
    } else if verify_crc(frame, end) {
        Ok(())
    } else {
        Err(WireError::Crc)
    }
}

/// Whether MAC (in the lower six bytes, in frame order) and source number in `numbers` are valid
/// for a station, and the four bytes after the numbers are 0.
#[inline]
fn is_station(mac: u64, numbers: u64) -> bool {
    let number = (numbers >> 16) as u16;
    (mac & 1 == 0) & (mac << 16 != 0) & (number != Station::EVERY) & (numbers >> 32 == 0)
}

/// The cause why a base is invalid. Copies the base again: if the sender changes the frame in
/// between, the cause is that of the changed bytes.
#[cold]
#[inline(never)]
fn invalid_cause(frame: &RxFrame<'_>) -> WireError {
    let Some(b) = frame.first_chunk() else { return WireError::Short };
    let b = Bytes::<BASE_LEN>(b);
    let prologue = u16::from_be_bytes(b.get::<14, 2>());
    let plen = usize::from(b.u16::<PLEN_AT>());
    if u16::from_be_bytes(b.get::<12, 2>()) != ETHERTYPE {
        return WireError::EtherType;
    }
    if prologue >> 13 != VERSION.into() {
        return WireError::Version;
    }
    if prologue & SEC != 0 {
        return WireError::Secured;
    }
    if prologue & CE != 0 && (prologue >> 8) as u8 & 31 != Ty::Ack as u8 {
        return WireError::CongestionEcho;
    }
    if prologue & RESERVED != 0 {
        return WireError::PrologueReserved;
    }
    if prologue & TRAILER != 0 && prologue & TRAILER != TRAILER {
        return WireError::TrailerCode;
    }
    if !is_station(b.u64::<6>(), b.u64::<NUMBERS_AT>()) {
        return WireError::Source;
    }
    let crc = prologue & TRAILER == TRAILER;
    let no_sid = b.u32::<16>() == 0;
    match Ty::try_from((prologue >> 8) as u8 & 31) {
        Err(..16) => WireError::ReservedType,
        Err(_) if no_sid => WireError::NoSid,
        Err(_) if frame.len() < BASE_LEN + plen + if crc { TRAILER_LEN } else { 0 } => {
            truncated(frame.len(), BASE_LEN, plen)
        }
        Err(_) if crc && !search_crc(frame, plen) => WireError::Crc,
        Err(_) => WireError::UnknownType,
        Ok(ty) if no_sid && ty.sid_min() != 0 => WireError::NoSid,
        Ok(ty) if plen != 0 && !ty.has_payload() => WireError::StrayPayload,
        Ok(ty) => truncated(frame.len(), BASE_LEN + ty.op_len(), plen),
    }
}

/// The error for a frame of `len` bytes that is too short.
#[cold]
fn truncated(len: usize, payload_off: usize, plen: usize) -> WireError {
    if len < payload_off {
        WireError::OpTruncated
    } else if len < payload_off + plen {
        WireError::PayloadTruncated
    } else {
        WireError::TrailerTruncated
    }
}

/// Whether a frame of unknown operation header carries a correct checksum; `None` if the frame is
/// damaged: it announces a checksum that is nowhere, or its trailer code is invalid.
pub(super) fn has_good_crc(frame: &RxFrame<'_>) -> Option<bool> {
    let b = Bytes::<BASE_LEN>(frame.first_chunk()?);
    match u16::from_be_bytes(b.get::<14, 2>()) & TRAILER {
        0 => Some(false),
        TRAILER => search_crc(frame, b.u16::<PLEN_AT>().into()).then_some(true),
        _ => None,
    }
}

/// Whether the checksum of a packet of unknown type is correct at any of its possible offsets. A
/// damaged type must not be taken for an unknown one: its refusal would take a good packet out of
/// the sequence.
fn search_crc(frame: &RxFrame<'_>, plen: usize) -> bool {
    (0..=OP_WORDS_MAX).any(|words| verify_crc(frame, BASE_LEN + words * 8 + plen))
}
