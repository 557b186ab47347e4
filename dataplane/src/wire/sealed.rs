//! The format of sealed frames: offsets of counter and tag, and how the base differs from that of
//! the frame before sealing (`docs/wire.md`, "Sealed frames"). Keys are not handled here.

use barewire_driver::frame::RxFrame;

use super::base::{IMM, PLEN_AT, SEC};
use super::open::params_in;
use super::ty::Tail;
use super::{
    BASE_LEN, Base, ETHERTYPE, IMM_LEN, OpenOp, OpenParams, PROLOGUE_OFF, RstReason, TRAILER_LEN,
    Ty, VERSION, WireError, crc_of_head, verify_crc,
};
use crate::types::Tenant;

/// Length of the tag of a sealed frame, bytes.
pub const TAG_LEN: usize = 16;

/// Offset of the counter: behind the station numbers.
const COUNTER_AT: usize = 36;

/// Offset of the receiver's name of the session.
const DST_SID_AT: usize = 16;

/// Offset of the PSN.
const PSN_AT: usize = 20;

/// Offset of the answered OPEN's session name in an OPEN's operation header.
const ECHO_SID_AT: usize = 24;

/// End of an OPEN's operation header.
pub const OPEN_END: usize = BASE_LEN + OpenOp::LEN;

/// The type of a frame of this node.
///
/// # Panics
/// If `head` is shorter than a base.
pub fn ty_of(head: &[u8]) -> Option<Ty> {
    Ty::from_bits(head[PROLOGUE_OFF])
}

/// Writes the counter.
///
/// # Panics
/// If `bytes` is shorter than a base.
pub fn set_counter(bytes: &mut [u8], counter: u32) {
    bytes[COUNTER_AT..BASE_LEN].copy_from_slice(&counter.to_le_bytes());
}

/// The counter.
///
/// # Panics
/// As [`set_counter`].
pub fn counter(bytes: &[u8]) -> u32 {
    word(bytes, COUNTER_AT)
}

/// Stores the tenant whose key will seal an OPEN or RST. It is stored in place of the counter,
/// which such a frame does not have.
///
/// # Panics
/// As [`set_counter`].
pub fn set_tenant(bytes: &mut [u8], tenant: Tenant) {
    set_counter(bytes, tenant.get().into());
}

/// The tenant that [`set_tenant`] has stored.
///
/// # Panics
/// As [`set_counter`].
pub fn tenant(bytes: &[u8]) -> Tenant {
    Tenant::of(counter(bytes) as u8)
}

/// Changes the base of a frame to that of a sealed one: SEC, no trailer, and `plen` the bytes
/// between base and tag.
///
/// # Panics
/// If `bytes` is shorter than a base, or `plen` exceeds its field.
pub fn mark(bytes: &mut [u8], plen: usize) {
    bytes[PROLOGUE_OFF + 1] = bytes[PROLOGUE_OFF + 1] & !3 | SEC as u8;
    set_plen(bytes, plen.try_into().expect("a frame's payload leaves room for its header"));
}

/// Changes the base of an opened frame back to that of the frame before sealing.
///
/// # Errors
/// [`WireError::OpTruncated`]: the sealed bytes are shorter than the type's operation header.
pub fn unmark(bytes: &mut [u8]) -> Result<(), WireError> {
    let ty = ty_of(bytes).ok_or(WireError::UnknownType)?;
    let op = bytes.get(BASE_LEN..).unwrap_or_default();
    let at = |i: usize| op.get(i).copied().unwrap_or_default();
    let extra = match ty.tail() {
        Tail::Sack => usize::from(at(2)) * 8,
        Tail::Imm if at(4) & IMM != 0 => IMM_LEN,
        Tail::Imm | Tail::None => 0,
    };
    let plen = usize::from(plen(bytes)).checked_sub(ty.op_len() + extra);
    let plen = plen.ok_or(WireError::OpTruncated)?;
    bytes[PROLOGUE_OFF + 1] &= !(SEC as u8);
    set_counter(bytes, 0);
    set_plen(bytes, plen as u16);
    Ok(())
}

/// Bytes between base and tag.
///
/// # Panics
/// If `bytes` is shorter than a base.
pub fn plen(bytes: &[u8]) -> u16 {
    u16::from_le_bytes([bytes[PLEN_AT], bytes[PLEN_AT + 1]])
}

/// Writes `plen`.
///
/// # Panics
/// As [`plen`].
pub fn set_plen(bytes: &mut [u8], plen: u16) {
    bytes[PLEN_AT..PLEN_AT + 2].copy_from_slice(&plen.to_le_bytes());
}

/// Whether a frame of this protocol version is sealed. `None` if it is shorter than a base, or of
/// another EtherType or version.
pub fn is_sealed(frame: &RxFrame<'_>) -> Option<bool> {
    let head = frame.first_chunk::<BASE_LEN>()?;
    let ours =
        head[12..PROLOGUE_OFF] == ETHERTYPE.to_be_bytes() && head[PROLOGUE_OFF] >> 5 == VERSION;
    ours.then_some(head[PROLOGUE_OFF + 1] & SEC as u8 != 0)
}

/// Whether a frame of a node with a key may leave this machine's memory: it is sealed, or of a type
/// without application data (an OPEN of a near session, an RST, a WHO).
pub fn may_leave(head: &[u8]) -> bool {
    let clear = || matches!(ty_of(head), Some(Ty::Open | Ty::Rst | Ty::Who));
    head.get(PROLOGUE_OFF + 1).is_some_and(|flags| flags & SEC as u8 != 0 || clear())
}

/// The properties of an OPEN that sealing depends on.
#[derive(Clone, Copy, Debug)]
pub struct OpenKind {
    /// Whether it is a challenge, which carries no handshake message.
    pub is_challenge: bool,
    /// Whether it is of a near session.
    pub is_near: bool,
    /// Whether it answers another OPEN.
    pub is_answer: bool,
    /// `inc`, `sid` and `epoch`.
    pub inc: u64,
    /// See [`inc`](Self::inc).
    pub sid: u32,
    /// See [`inc`](Self::inc).
    pub epoch: u32,
    /// The base's `psn`.
    pub psn: u32,
    /// See [`OpenParams`].
    pub params: OpenParams,
}

/// Parses an OPEN of this node.
///
/// # Panics
/// If `head` is shorter than an OPEN.
pub fn open_kind(head: &[u8]) -> OpenKind {
    let (sid, caps) = (op_word(head, 0), op_word(head, 32));
    OpenKind {
        is_challenge: sid == 0,
        is_near: caps & OpenOp::NEAR != 0,
        is_answer: op_word(head, ECHO_SID_AT) != 0,
        inc: u64::from(op_word(head, 8)) | u64::from(op_word(head, 12)) << 32,
        sid,
        epoch: op_word(head, 4),
        psn: word(head, PSN_AT),
        params: params_in(&head[BASE_LEN..]),
    }
}

/// Whether an RST of this node refuses a key.
///
/// # Panics
/// If `head` is shorter than an RST.
pub fn is_key_refusal(head: &[u8]) -> bool {
    RstReason::try_from(op_word(head, 28) as u16).is_ok_and(RstReason::is_of_key)
}

/// The receiver's name of the session in a frame of this node.
///
/// # Panics
/// If `head` is shorter than a base.
pub fn dst_sid(head: &[u8]) -> u32 {
    word(head, DST_SID_AT)
}

/// Writes the receiver's name of the session.
///
/// # Panics
/// As [`dst_sid`].
pub fn set_dst_sid(head: &mut [u8], sid: u32) {
    head[DST_SID_AT..PSN_AT].copy_from_slice(&sid.to_le_bytes());
}

/// Writes the receiver's name of the session into an OPEN in answer: in its base, and in its echo.
///
/// # Panics
/// If `head` is shorter than an OPEN.
pub fn set_answered(head: &mut [u8], sid: u32) {
    set_dst_sid(head, sid);
    head[BASE_LEN + ECHO_SID_AT..][..4].copy_from_slice(&sid.to_le_bytes());
}

/// Base and operation header of a sealed OPEN whose tag cannot be verified, for a refusal. `None`
/// if the frame is no OPEN or damaged.
pub fn open_in(frame: &RxFrame<'_>) -> Option<(Base, OpenOp)> {
    let mut head = frame.first_chunk::<OPEN_END>()?;
    let end = BASE_LEN + usize::from(plen(&head)) + TAG_LEN;
    if ty_of(&head) != Some(Ty::Open) || !verify_crc(frame, end) {
        return None;
    }
    set_plen(&mut head, OpenOp::LEN as u16);
    unmark(&mut head).ok()?;
    let frame = RxFrame::new(&head);
    let base = Base::parse(&frame).ok()?;
    Some((base, OpenOp::parse(&frame, &base).ok()?))
}

/// Appends a checksum to the first `len` bytes; the base does not announce it. Returns the new
/// length.
///
/// # Panics
/// If there is no room for it.
pub fn append_crc(bytes: &mut [u8], len: usize) -> usize {
    let crc = crc_of_head(&bytes[..len]).to_le_bytes();
    bytes[len..len + TRAILER_LEN].copy_from_slice(&crc);
    len + TRAILER_LEN
}

/// Appends a checksum to the first `len` bytes, a frame without payload and trailer. Returns the
/// new length.
///
/// # Panics
/// If there is no room for it.
pub fn put_crc(bytes: &mut [u8], len: usize) -> usize {
    bytes[PROLOGUE_OFF + 1] |= 3;
    append_crc(bytes, len)
}

/// The word at offset `at` of an operation header.
fn op_word(head: &[u8], at: usize) -> u32 {
    word(head, BASE_LEN + at)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}
