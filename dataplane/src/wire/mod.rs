//! The wire format: one file per header, every byte in `docs/wire.md`.
//!
//! A frame is Ethernet header (14) | prologue (2) | base (24) | operation header | payload |
//! trailer (0, 4 or 16) | padding. [`Base::parse`] copies the first 40 bytes once, validates
//! everything that does not need the operation header, and verifies the checksum if there is one;
//! then the operation's own `parse` copies and validates its header. Both copy before they
//! validate, because the frame may be in memory that its sender can still write. Parsed headers are
//! valid: a payload of `base.plen` bytes at `payload_off()` is within the frame.
//!
//! This module has no state: whether the session, endpoint or operation of a packet exists is
//! decided by the node.

mod ack;
mod base;
mod crc;
mod error;
mod fast;
mod mcast;
mod msg;
mod nack;
mod nop;
mod op;
mod open;
mod pack;
mod probe;
mod rma;
mod rndv;
mod rst;
pub mod sealed;
mod ty;
mod version;
mod who;

use barewire_driver::frame::RxFrame;

pub use ack::AckOp;
pub use base::{Base, RawBase};
pub use crc::{crc_of_head, trailer, verify_crc};
pub use error::WireError;
pub use fast::{BaseOut, BaseWords, RawRequest, ReplyTo, RequestKey, RequestTy, RmaTy, SegmentTy};
pub use mcast::McastOp;
pub use msg::{EagerMsg, EagerTaggedView, FrameHead, HeadOut, MsgMOp, MsgOp};
pub use nack::{NackOp, NackReason};
pub use nop::NopOp;
pub use op::{Op, frame};
pub use open::{OpenOp, OpenParams};
pub use pack::{PackOp, PackRecords, record_len};
pub use probe::ProbeOp;
pub use rma::{AtomicOp, ReadOp, RemoteRange, RespOp, WriteOp};
pub use rndv::{DataOp, EndOp, EndStatus, PullOp, RndvOp};
pub use rst::{RstOp, RstReason, life_of};
pub use sealed::TAG_LEN;
pub use ty::Ty;
pub use version::{OtherVersionFrame, Versions};
pub use who::{Host, WhoOp};

/// EtherType of every frame: IEEE 802 local experimental 1. Does not leave the site.
pub const ETHERTYPE: u16 = barewire_driver::frame::ETHERTYPE;

/// Version in the first three bits of the prologue of every frame sent.
pub const VERSION: u8 = 3;

/// Lowest and highest protocol version that this build speaks.
pub const VERSIONS: Versions = Versions { min: VERSION, max: VERSION };

/// Bytes before the operation header: Ethernet 14, prologue 2, base 24.
pub const BASE_LEN: usize = 40;

/// Offset of the prologue, where the checksum's coverage starts.
pub const PROLOGUE_OFF: usize = 14;

/// Room for any operation header with its remote CQ data, except an ACK's; the longest is 64 bytes.
pub const OP_MAX: usize = 72;

/// Room for the bytes from Ethernet header to payload, except of an ACK; rounded up.
pub const HEAD_MAX: usize = 120;

/// Length of the checksum behind the payload, bytes.
pub const TRAILER_LEN: usize = 4;

/// Length of remote CQ data, bytes.
pub const IMM_LEN: usize = 8;

/// Most bytes that one PULL requests.
pub const PULL_MAX: u32 = 1 << 20;

/// Most bytes that one READ requests.
pub const READ_MAX: u32 = 256 << 10;

/// Most bytes that a READ requests in one RESP.
pub const READ_ANSWER_MAX: u32 = 4096;

/// Least `max_frame` that a node may announce: every port carries frames of this length.
pub const MAX_FRAME_MIN: u32 = 256;

/// Payload bytes of one eager unit.
pub const UNIT_LEN: u64 = 256;

/// Eager units that a message of `len` bytes costs: one per 256 bytes or part of it, at least one.
pub const fn units_of(len: u64) -> u64 {
    if len == 0 { 1 } else { len.div_ceil(UNIT_LEN) }
}

/// A header as bytes, with integers at constant offsets, little-endian. An offset outside of the
/// header does not compile.
#[derive(Clone, Copy, Debug)]
struct Bytes<const N: usize>([u8; N]);

impl<const N: usize> Bytes<N> {
    const ZERO: Self = Self([0; N]);

    /// A header of `W` words.
    fn of_words<const W: usize>(words: [u64; W]) -> Self {
        const { assert!(8 * W == N) };
        let mut b = Self::ZERO;
        for (bytes, word) in b.0.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        b
    }

    /// Copies the header at `at` out of `frame`.
    #[inline(always)]
    fn at(frame: &RxFrame<'_>, at: usize) -> Result<Self, WireError> {
        frame.chunk_at(at).map(Self).ok_or(WireError::OpTruncated)
    }

    /// Copies a header that this node wrote to the start of `bytes`.
    ///
    /// # Panics
    /// If `bytes` is shorter than the header.
    #[inline]
    fn kept(bytes: &[u8]) -> Self {
        let mut b = Self::ZERO;
        b.0.copy_from_slice(&bytes[..N]);
        b
    }

    /// Copies the operation header out of `frame`.
    #[inline(always)]
    fn op(frame: &RxFrame<'_>) -> Result<Self, WireError> {
        Self::at(frame, BASE_LEN)
    }

    #[inline(always)]
    fn get<const AT: usize, const W: usize>(&self) -> [u8; W] {
        const { assert!(AT + W <= N) };
        let mut b = [0; W];
        b.copy_from_slice(&self.0[AT..AT + W]);
        b
    }

    #[inline(always)]
    fn set<const AT: usize, const W: usize>(&mut self, v: [u8; W]) {
        const { assert!(AT + W <= N) };
        self.0[AT..AT + W].copy_from_slice(&v);
    }

    #[inline(always)]
    fn u8<const AT: usize>(&self) -> u8 {
        self.get::<AT, 1>()[0]
    }

    #[inline(always)]
    fn u16<const AT: usize>(&self) -> u16 {
        u16::from_le_bytes(self.get::<AT, 2>())
    }

    #[inline(always)]
    fn u32<const AT: usize>(&self) -> u32 {
        u32::from_le_bytes(self.get::<AT, 4>())
    }

    #[inline(always)]
    fn u64<const AT: usize>(&self) -> u64 {
        u64::from_le_bytes(self.get::<AT, 8>())
    }

    #[inline(always)]
    fn put8<const AT: usize>(&mut self, v: u8) {
        self.set::<AT, 1>([v]);
    }

    #[inline(always)]
    fn put16<const AT: usize>(&mut self, v: u16) {
        self.set::<AT, 2>(v.to_le_bytes());
    }

    #[inline(always)]
    fn put32<const AT: usize>(&mut self, v: u32) {
        self.set::<AT, 4>(v.to_le_bytes());
    }

    #[inline(always)]
    fn put64<const AT: usize>(&mut self, v: u64) {
        self.set::<AT, 8>(v.to_le_bytes());
    }

    /// Writes the header to the start of `out` and returns its length.
    ///
    /// # Panics
    /// If `out` is shorter than the header; [`OP_MAX`] bytes suffice.
    #[inline(always)]
    fn write(&self, out: &mut [u8]) -> usize {
        out[..N].copy_from_slice(&self.0);
        N
    }
}

#[cfg(test)]
mod tests;
