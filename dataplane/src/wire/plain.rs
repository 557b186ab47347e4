//! Packets about which nothing is out of the ordinary, read and written for the short way: sent for
//! the first time, without a checksum, asking for no acknowledgement.

use barewire_driver::frame::RxFrame;

use super::base::plain;
use super::{AtomicOp, BASE_LEN, Bytes, HeadOut, PlainHead, RespOp, Ty};
use crate::psn::Psn;

/// What such a packet says before its operation header.
#[derive(Clone, Copy, Debug)]
pub struct PlainBase {
    /// Addresses.
    pub head: PlainHead,
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
    ///
    /// Field by field, since of one copy of all the compiler makes pieces that it has to put
    /// together again.
    #[inline(always)]
    fn parse(frame: &RxFrame<'_>) -> Option<Self> {
        Some(Self {
            head: PlainHead::parse(frame)?,
            dst_sid: u32::from_le_bytes(frame.chunk_at(16)?),
            psn: Psn(u32::from_le_bytes(frame.chunk_at(20)?)),
            cack: Psn(u32::from_le_bytes(frame.chunk_at(24)?)),
            grant: u16::from_le_bytes(frame.chunk_at(28)?),
            plen: u16::from_le_bytes(frame.chunk_at(30)?),
        })
    }

    /// What a packet is, if it is one of the plain ones that this file knows. For any other, good
    /// or bad, [`Base::parse`](super::Base::parse) tells.
    #[inline(always)]
    pub fn ty(frame: &RxFrame<'_>) -> Option<PlainTy> {
        const ATOMIC: u32 = plain(Ty::Atomic, false);
        const RESP: u32 = plain(Ty::Resp, false);
        // One question for all others.
        if frame.chunk_at::<1>(14)? < const { [(ATOMIC >> 8) as u8] } {
            return None;
        }
        match u32::from_be_bytes(frame.chunk_at(12)?) {
            ATOMIC => Some(PlainTy::Atomic),
            RESP => Some(PlainTy::Resp),
            _ => None,
        }
    }

    /// Writes it, asking for an acknowledgement if `ar`.
    #[inline(always)]
    fn put(&self, ar: bool, out: &mut impl HeadOut) {
        self.head.put(ar, out);
        out.set::<16, 4>(self.dst_sid.to_le_bytes());
        out.set::<20, 4>(self.psn.0.to_le_bytes());
        out.set::<24, 4>(self.cack.0.to_le_bytes());
        out.set::<28, 2>(self.grant.to_le_bytes());
        out.set::<30, 2>(self.plen.to_le_bytes());
    }
}

/// The header of an ATOMIC as it was written, for who compares it with one that was checked.
#[derive(Clone, Copy, Debug)]
pub struct PlainAtomic {
    /// What one packet after the other may ask for alike.
    pub what: AtomicWhat,
    /// As in [`RemoteRange`](super::RemoteRange).
    pub addr: u64,
}

/// What an ATOMIC calls itself: the initiator's slot and its generation, and where in the result of
/// the operation the old values belong, all as it stands in the header.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    asked: u64,
    offset: u32,
}

/// Of the header of an ATOMIC: the endpoint it is for, the key, flags, count, operation and type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicWhat {
    rkey: u64,
    /// Endpoint, flags and the reserved byte.
    head: u32,
    /// Count, operation and type.
    kind: u32,
}

impl AtomicWhat {
    /// No header says this: a byte of it is reserved.
    pub const NOTHING: Self = Self { rkey: 0, head: u32::MAX, kind: 0 };

    /// A number for it that others are likely not to have.
    #[inline(always)]
    pub fn hash(&self) -> usize {
        (self.rkey as u32 ^ self.kind >> 16) as usize
    }
}

impl PlainAtomic {
    /// Copies base and header out, but for what [`Asked`] is, and checks nothing. `None` if the
    /// frame is too short for them.
    #[inline(always)]
    pub fn parse(frame: &RxFrame<'_>) -> Option<(PlainBase, Self)> {
        if frame.len() < AtomicOp::HEAD {
            return None;
        }
        // All but the number of the operation and the endpoint that it is from.
        let dst_ep = u16::from_le_bytes(frame.chunk_at(BASE_LEN)?);
        let flags = u16::from_le_bytes(frame.chunk_at(BASE_LEN + 4)?);
        let head = u32::from(dst_ep) | u32::from(flags) << 16;
        let rkey = u64::from_le_bytes(frame.chunk_at(BASE_LEN + 8)?);
        let kind = u32::from_le_bytes(frame.chunk_at(BASE_LEN + 32)?);
        let addr = u64::from_le_bytes(frame.chunk_at(BASE_LEN + 16)?);
        Some((PlainBase::parse(frame)?, Self { what: AtomicWhat { rkey, head, kind }, addr }))
    }

    /// The header, checked, but for how it calls itself and the endpoint that it is from. `None`
    /// if something is wrong with it, or remote CQ data follows it.
    pub fn checked(&self) -> Option<AtomicOp> {
        // From what was copied, since the frame may say something else by now.
        let mut b = Bytes::ZERO;
        b.put16::<0>(self.what.head as u16);
        b.put16::<4>((self.what.head >> 16) as u16);
        b.put64::<8>(self.what.rkey);
        b.put64::<16>(self.addr);
        b.put32::<32>(self.what.kind);
        match AtomicOp::of(&b) {
            Ok((op, false)) => Some(op),
            _ => None,
        }
    }
}

impl Asked {
    /// Copies it out of the header of an ATOMIC. `None` if the frame is too short for one.
    #[inline(always)]
    pub fn parse(frame: &RxFrame<'_>) -> Option<Self> {
        let asked = u64::from_le_bytes(frame.chunk_at(BASE_LEN + 24)?);
        let offset = u32::from_le_bytes(frame.chunk_at(BASE_LEN + 36)?);
        Some(Self { asked, offset })
    }

    /// The header of the answer.
    #[inline(always)]
    pub fn resp(&self) -> RespOp {
        let (dst_op, dst_gen) = (self.asked as u32, (self.asked >> 32) as u32);
        RespOp { dst_op, dst_gen, offset: self.offset, status: None }
    }
}

impl AtomicOp {
    /// Bytes before the payload of an ATOMIC without remote CQ data.
    pub const HEAD: usize = BASE_LEN + Self::LEN;

    /// Writes the [`HEAD`](Self::HEAD) of a packet without remote CQ data, asking for an
    /// acknowledgement if `ar`.
    #[inline(always)]
    pub fn put(&self, base: &PlainBase, ar: bool, out: &mut impl HeadOut) {
        base.put(ar, out);
        let [head, rkey, addr, asked, what] = self.words();
        out.set::<32, 8>(head.to_le_bytes());
        out.set::<40, 8>(rkey.to_le_bytes());
        out.set::<48, 8>(addr.to_le_bytes());
        out.set::<56, 8>(asked.to_le_bytes());
        out.set::<64, 8>(what.to_le_bytes());
    }
}

impl RespOp {
    /// Bytes before the payload of a RESP.
    pub const HEAD: usize = BASE_LEN + Self::LEN;

    /// The base of a RESP with all old values of an operation, and the slot and its generation that
    /// it names. `None` if it says anything else.
    #[inline(always)]
    pub fn plain(frame: &RxFrame<'_>) -> Option<(PlainBase, (u32, u32))> {
        if frame.len() < Self::HEAD {
            return None;
        }
        let base = PlainBase::parse(frame)?;
        let rest = u64::from_le_bytes(frame.chunk_at(BASE_LEN + 8)?);
        let w = u32::from_le_bytes(frame.chunk_at(BASE_LEN)?);
        let generation = u32::from_le_bytes(frame.chunk_at(BASE_LEN + 4)?);
        let whole = rest == 0 && frame.len() - Self::HEAD >= usize::from(base.plen);
        whole.then_some((base, (w, generation)))
    }

    /// As [`AtomicOp::put`].
    #[inline(always)]
    pub fn put(&self, base: &PlainBase, ar: bool, out: &mut impl HeadOut) {
        base.put(ar, out);
        let [asked, rest] = self.words();
        out.set::<32, 8>(asked.to_le_bytes());
        out.set::<40, 8>(rest.to_le_bytes());
    }
}
