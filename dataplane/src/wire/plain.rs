//! Packets about which nothing is out of the ordinary, read and written for the short way: sent for
//! the first time, without a checksum, asking for no acknowledgement.

use barewire_driver::frame::RxFrame;
use barewire_driver::port::MacAddr;

use super::base::{AR, plain};
use super::{AtomicOp, BASE_LEN, Bytes, RespOp, Ty, WireError, mac_key};
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

impl PlainBase {
    /// Copies the base of an ATOMIC or a RESP out, and says which. Compares nothing with the
    /// session: that is the caller's. `None` for any other packet; good or bad,
    /// [`Base::parse`](super::Base::parse) tells.
    #[inline(always)]
    pub fn parse(frame: &RxFrame<'_>) -> Option<(Ty, Self)> {
        const ATOMIC: u32 = plain(Ty::Atomic, false);
        const RESP: u32 = plain(Ty::Resp, false);
        let b = Bytes::<BASE_LEN>(frame.first_chunk()?);
        let ty = match u32::from_be_bytes(b.get::<12, 4>()) {
            ATOMIC => Ty::Atomic,
            RESP => Ty::Resp,
            _ => return None,
        };
        let base = Self {
            dst: b.u64::<0>() & ((1 << 48) - 1),
            src: b.u64::<4>() >> 16,
            dst_sid: b.u32::<16>(),
            psn: Psn(b.u32::<20>()),
            cack: Psn(b.u32::<24>()),
            grant: b.u16::<28>(),
            plen: b.u16::<30>(),
        };
        Some((ty, base))
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

impl AtomicOp {
    /// Bytes before the payload of an ATOMIC without remote CQ data.
    pub const HEAD: usize = BASE_LEN + Self::LEN;

    /// Copies and checks the header of a packet whose base is `base`.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    #[inline(always)]
    pub fn plain(frame: &RxFrame<'_>, base: &PlainBase) -> Result<Self, WireError> {
        let op = Self::header(frame)?;
        ends_within(frame, op.payload_off(), base)?;
        Ok(op)
    }

    /// The head of a packet without remote CQ data, asking for an acknowledgement if `ar`.
    #[inline(always)]
    pub fn head(&self, base: &PlainBase, ar: bool) -> [u8; Self::HEAD] {
        let mut b = base.head::<{ Self::HEAD }>(Ty::Atomic, ar);
        b.set::<BASE_LEN, { Self::LEN }>(self.bytes().0);
        b.0
    }
}

impl RespOp {
    /// Bytes before the payload of a RESP.
    pub const HEAD: usize = BASE_LEN + Self::LEN;

    /// As [`AtomicOp::plain`].
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    #[inline(always)]
    pub fn plain(frame: &RxFrame<'_>, base: &PlainBase) -> Result<Self, WireError> {
        let op = Self::header(frame)?;
        ends_within(frame, Self::HEAD, base)?;
        Ok(op)
    }

    /// As [`AtomicOp::head`].
    #[inline(always)]
    pub fn head(&self, base: &PlainBase, ar: bool) -> [u8; Self::HEAD] {
        let mut b = base.head::<{ Self::HEAD }>(Ty::Resp, ar);
        b.set::<BASE_LEN, { Self::LEN }>(self.bytes().0);
        b.0
    }
}

/// Checks that the payload, which starts at `payload_off`, lies within the frame.
#[inline(always)]
fn ends_within(frame: &RxFrame<'_>, off: usize, base: &PlainBase) -> Result<(), WireError> {
    let fits = frame.len() >= off + usize::from(base.plen);
    if fits { Ok(()) } else { Err(WireError::PayloadTruncated) }
}
