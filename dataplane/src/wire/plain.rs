//! Packets about which nothing is out of the ordinary, read and written for the short way: sent for
//! the first time, without a checksum, asking for no acknowledgement.

use barewire_driver::frame::RxFrame;
use barewire_driver::port::MacAddr;

use super::base::{AR, plain};
use super::{AtomicOp, BASE_LEN, Bytes, RespOp, Ty, mac_key};
use crate::psn::Psn;

/// What such a packet says before its operation header. Addresses are [`mac_key`]s.
#[derive(Clone, Copy, Debug)]
pub struct PlainBase {
    /// The destination.
    pub dst: u64,
    /// The source.
    pub src: u64,
    /// The receiver's name of the session.
    pub dst_sid: u32,
    /// Sequence number.
    pub psn: Psn,
    /// The next PSN the sender expects.
    pub cack: Psn,
    /// As [`Base::grant`](super::Base::grant).
    pub grant: u16,
    /// Payload bytes.
    pub plen: u16,
}

/// The types of packets of one-sided operations that a short way takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainTy {
    /// An atomic operation.
    Atomic,
    /// The answer to one, or to a read.
    Resp,
}

impl PlainBase {
    /// Copies the base of a packet out of which [`ty`](Self::ty) has said that it is one. Compares
    /// nothing with the session: that is the caller's. `None` if the frame is too short.
    #[inline(always)]
    pub fn parse(frame: &RxFrame<'_>) -> Option<Self> {
        let b = Bytes::<BASE_LEN>(frame.first_chunk()?);
        Some(Self {
            dst: b.u64::<0>() & ((1 << 48) - 1),
            src: b.u64::<4>() >> 16,
            dst_sid: b.u32::<16>(),
            psn: Psn(b.u32::<20>()),
            cack: Psn(b.u32::<24>()),
            grant: b.u16::<28>(),
            plen: b.u16::<30>(),
        })
    }

    /// What a packet is, if it is one of the plain ones that this file knows. For any other, good
    /// or bad, [`Base::parse`](super::Base::parse) tells.
    #[inline(always)]
    pub fn ty(frame: &RxFrame<'_>) -> Option<PlainTy> {
        const ATOMIC: u32 = plain(Ty::Atomic, false);
        const RESP: u32 = plain(Ty::Resp, false);
        match u32::from_be_bytes(frame.chunk_at(12)?) {
            ATOMIC => Some(PlainTy::Atomic),
            RESP => Some(PlainTy::Resp),
            _ => None,
        }
    }

    /// Starts a head with the base of a packet of type `ty`, asking for an acknowledgement if `ar`.
    #[inline(always)]
    fn head<const N: usize>(&self, ty: Ty, ar: bool) -> Bytes<N> {
        let mut b = Bytes::<N>::ZERO;
        // The upper two bytes of the first are written over by the second.
        b.put64::<0>(self.dst);
        b.put64::<6>(self.src);
        b.set::<12, 4>((plain(ty, false) | if ar { u32::from(AR) } else { 0 }).to_be_bytes());
        b.put32::<16>(self.dst_sid);
        b.put32::<20>(self.psn.0);
        b.put32::<24>(self.cack.0);
        b.put16::<28>(self.grant);
        b.put16::<30>(self.plen);
        b
    }

    /// Addresses of a packet to `dst` from `src`; the rest is empty.
    #[inline(always)]
    pub fn between(dst: MacAddr, src: MacAddr) -> Self {
        let none = Psn(0);
        let (dst, src) = (mac_key(dst), mac_key(src));
        Self { dst, src, dst_sid: 0, psn: none, cack: none, grant: 0, plen: 0 }
    }
}

/// The header of an ATOMIC as it was written, for who compares it with one that was checked.
#[derive(Clone, Copy, Debug)]
pub struct PlainAtomic {
    /// What one packet after the other may ask for alike.
    pub what: AtomicWhat,
    /// As in [`RemoteRange`](super::RemoteRange).
    pub addr: u64,
    /// As in [`AtomicOp`], and so are the next two.
    pub dst_op: u32,
    /// See there.
    pub dst_gen: u32,
    /// See there.
    pub offset: u32,
}

/// Of the header of an ATOMIC: the endpoint it is for, the key, flags, count, operation and type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicWhat {
    head: u64,
    rkey: u64,
    /// Count, operation and type.
    kind: u32,
}

impl AtomicWhat {
    /// No header says this: a byte of it is reserved.
    pub const NOTHING: Self = Self { head: u64::MAX, rkey: 0, kind: 0 };

    /// A number for it that others are likely not to have.
    #[inline(always)]
    pub fn hash(&self) -> usize {
        (self.rkey as u32 ^ self.kind >> 16) as usize
    }
}

impl PlainAtomic {
    /// Copies the header out and checks nothing. `None` if the frame is too short for one.
    #[inline(always)]
    pub fn parse(frame: &RxFrame<'_>) -> Option<Self> {
        // All but the number of the operation and the endpoint that it is from.
        const ALIKE: u64 = u64::from_le_bytes([255, 255, 0, 0, 255, 255, 0, 0]);
        let b = Bytes::<{ AtomicOp::LEN }>::op(frame).ok()?;
        let what =
            AtomicWhat { head: b.u64::<0>() & ALIKE, rkey: b.u64::<8>(), kind: b.u32::<32>() };
        let (addr, offset) = (b.u64::<16>(), b.u32::<36>());
        Some(Self { what, addr, dst_op: b.u32::<24>(), dst_gen: b.u32::<28>(), offset })
    }

    /// The header, checked, but for the number of the operation and the endpoint that it is from.
    /// `None` if something is wrong with it, or remote CQ data follows it.
    pub fn checked(&self) -> Option<AtomicOp> {
        // From what was copied, since the frame may say something else by now.
        let mut b = Bytes::ZERO;
        b.put64::<0>(self.what.head);
        b.put64::<8>(self.what.rkey);
        b.put64::<16>(self.addr);
        b.put32::<24>(self.dst_op);
        b.put32::<28>(self.dst_gen);
        b.put32::<32>(self.what.kind);
        b.put32::<36>(self.offset);
        match AtomicOp::of(&b) {
            Ok((op, false)) => Some(op),
            _ => None,
        }
    }
}

impl AtomicOp {
    /// Bytes before the payload of an ATOMIC without remote CQ data.
    pub const HEAD: usize = BASE_LEN + Self::LEN;

    /// A packet without remote CQ data, asking for an acknowledgement if `ar`, with room for `N`
    /// bytes in all.
    #[inline(always)]
    pub fn head<const N: usize>(&self, base: &PlainBase, ar: bool) -> [u8; N] {
        let mut b = base.head::<N>(Ty::Atomic, ar);
        b.set::<BASE_LEN, { Self::LEN }>(self.bytes().0);
        b.0
    }
}

impl RespOp {
    /// Bytes before the payload of a RESP.
    pub const HEAD: usize = BASE_LEN + Self::LEN;

    /// The slot and its generation that a RESP with all old values of an operation names. `None`
    /// if it says anything else.
    #[inline(always)]
    pub fn plain(frame: &RxFrame<'_>, base: &PlainBase) -> Option<(u32, u32)> {
        let b = Bytes::<{ Self::LEN }>::op(frame).ok()?;
        let whole = b.u64::<8>() == 0 && frame.len() >= Self::HEAD + usize::from(base.plen);
        whole.then(|| (b.u32::<0>(), b.u32::<4>()))
    }

    /// As [`AtomicOp::head`].
    #[inline(always)]
    pub fn head<const N: usize>(&self, base: &PlainBase, ar: bool) -> [u8; N] {
        let mut b = base.head::<N>(Ty::Resp, ar);
        b.set::<BASE_LEN, { Self::LEN }>(self.bytes().0);
        b.0
    }
}
