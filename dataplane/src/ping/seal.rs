//! The sealing layer of a ping, used if the station has a key: the handshake of its one session,
//! and the sealing and opening of frames between state machine and port.

use barewire_driver::frame::RxFrame;

use crate::seal::{Ending, Initiator, Keyring, Refused, SessionKeys, SessionNames};
use crate::wire::sealed::{self, OPEN_END};
use crate::wire::{BASE_LEN, Base, OpenOp, TAG_LEN, Ty};

/// Handshake and keys of the ping's session.
#[derive(Debug)]
pub(super) struct Seal {
    ring: Keyring,
    /// Whether this processor has AES instructions.
    aes: bool,
    /// The handshake of our OPENs, until one is answered.
    handshake: Option<Initiator>,
    /// The session's keys, once agreed.
    keys: Option<SessionKeys>,
    /// Whether an OPEN in answer had a certificate that this side refuses.
    refuses: bool,
}

impl Seal {
    /// A layer that uses the first key of `ring`, or its certificate.
    pub(super) fn new(ring: Keyring, aes: bool) -> Self {
        Self { ring, aes, handshake: None, keys: None, refuses: false }
    }

    /// The bits of an OPEN's `caps` for sealing.
    pub(super) fn caps(&self) -> u32 {
        if self.aes { OpenOp::AES } else { 0 }
    }

    /// Bytes of the longest OPEN that is sealed, Ethernet header included.
    pub(super) fn open_len(&self) -> usize {
        self.ring.open_len()
    }

    /// Whether the tag of an RST proves that its sender has the key. With certificates the tag key
    /// is public.
    pub(super) fn proves_rst(&self) -> bool {
        !self.ring.has_certificate()
    }

    /// Whether the station answered with a certificate that this side refuses.
    pub(super) fn refuses(&self) -> bool {
        self.refuses
    }

    /// The sealed form of `frame`, a frame without checksum and payload. `None` if there are no
    /// keys for it yet.
    pub(super) fn seal(&mut self, mut frame: Vec<u8>) -> Option<Vec<u8>> {
        let bytes = RxFrame::new(&frame);
        let base = Base::parse(&bytes).ok()?;
        let head = BASE_LEN + base.ty.op_len();
        if matches!(base.ty, Ty::Open | Ty::Rst) {
            let message = match OpenOp::parse(&bytes, &base) {
                Ok(op) if base.ty == Ty::Open => self.message(&base, &op),
                _ => Vec::new(),
            };
            let tag_key = self.ring.tag_key();
            let ending = Ending { message: &message, finished: None, tag_key };
            frame.resize(frame.len().max(head + ending.len(base.ty == Ty::Open)), 0);
            ending.put(&mut frame, head);
            return Some(frame);
        }
        let keys = self.keys.as_mut()?;
        frame.resize(frame.len().max(head + TAG_LEN), 0);
        sealed::mark(&mut frame, head - BASE_LEN);
        keys.seal(&mut frame[..head + TAG_LEN]);
        Some(frame)
    }

    /// The first message of the handshake, in the OPEN with this header: the same in each
    /// repetition.
    fn message(&mut self, base: &Base, op: &OpenOp) -> Vec<u8> {
        let Self { ring, handshake, .. } = self;
        let (opener, answerer) = (base.src.word(), base.dst.word());
        let OpenOp { inc, sid, epoch, .. } = *op;
        let (psn, params) = (base.psn.0, op.params());
        let names = SessionNames { opener, answerer, inc, sid, epoch, psn, params };
        handshake.get_or_insert_with(|| Initiator::new(ring, names)).message().clone()
    }

    /// The opened form of `frame`, if its sender is proven to have the key or a valid certificate.
    /// The tags of challenges and RSTs prove the key only; with certificates they prove nothing.
    pub(super) fn open(&mut self, frame: &RxFrame<'_>) -> Option<Vec<u8>> {
        let mut bytes = vec![0; frame.len()];
        if sealed::is_sealed(frame) != Some(true) || !frame.copy_to(0, &mut bytes) {
            return None;
        }
        let end = BASE_LEN + usize::from(sealed::plen(&bytes));
        let tag = bytes.get(end..end + TAG_LEN)?;
        let is_open = sealed::ty_of(&bytes) == Some(Ty::Open);
        if is_open || sealed::ty_of(&bytes) == Some(Ty::Rst) {
            self.ring.key_of(&bytes[..end], tag)?;
            if is_open && end > OPEN_END {
                if !self.agree(&bytes[..end]) {
                    return None;
                }
                sealed::set_plen(&mut bytes, OpenOp::LEN as u16);
            } else if is_open && end == OPEN_END && !sealed::open_kind(&bytes).is_challenge {
                // Every other OPEN carries a message of the handshake.
                return None;
            }
        } else {
            self.keys.as_mut()?.open(&mut bytes[..end + TAG_LEN]).ok()?;
        }
        sealed::unmark(&mut bytes).ok()?;
        Some(bytes)
    }

    /// Whether an OPEN in answer, up to its tag, proves that its sender has the key or a valid
    /// certificate. The first such answer yields the session's keys. A second answer, as of another
    /// node with the same address, is accepted on its tag alone with a pre-shared key, and refused
    /// with certificates, where the tag proves nothing.
    fn agree(&mut self, open: &[u8]) -> bool {
        if self.keys.is_some() {
            return !self.ring.has_certificate();
        }
        let Some(handshake) = &mut self.handshake else { return false };
        // Both ends announce AES in `caps`.
        let theirs = open[BASE_LEN + 32] & OpenOp::AES as u8 != 0;
        let finished = handshake.finish(open, self.aes && theirs);
        self.refuses |= matches!(finished, Err(Refused::Certificate(_)));
        self.keys = finished.ok();
        self.keys.is_some()
    }
}
