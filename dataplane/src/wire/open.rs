//! OPEN: opens a session, or as a challenge requests a proof of address.

use barewire_driver::frame::RxFrame;

use super::{Base, Bytes, MAX_FRAME_MIN, VERSIONS, Versions, WireError};
use crate::types::INCARNATION_MAX;

/// Header of an OPEN. The base's `psn` is the first PSN that its sender will use.
///
/// With `sid` and `epoch` 0 it is a *challenge*: its sender has created no session, and requests
/// the echoed OPEN again with `cookie` in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenOp {
    /// The sender's name of the session, which every packet to the sender contains. 0 in a
    /// challenge.
    pub sid: u32,
    /// The sender's epoch: a counter of the sessions that it creates. 0 in a challenge.
    pub epoch: u32,
    /// The sender's incarnation. Not 0.
    pub inc: u64,
    /// The expected incarnation of the receiver; 0 for any.
    pub target_inc: u64,
    /// The receiver's `sid` in the OPEN that this one answers; 0 if this is no answer.
    pub echo_sid: u32,
    /// The receiver's `epoch`, likewise.
    pub echo_epoch: u32,
    /// Optional features of the sender, such as [`NEAR`](Self::NEAR). Unknown bits are ignored.
    pub caps: u32,
    /// Most bytes behind the Ethernet header that the sender accepts, at least 256.
    pub max_frame: u32,
    /// Receive window of the sender in packets. Not 0.
    pub window: u16,
    /// Minor version.
    pub minor: u16,
    /// Initial grant of eager units.
    pub grant: u32,
    /// In a challenge: the cookie that its receiver must return. Else: the returned cookie; 0 for
    /// none.
    pub cookie: u64,
    /// Length of the received OPEN that this one answers, bytes behind the Ethernet header: that
    /// frame length passes. 0 if this is no answer, or frames of every length pass.
    pub frame: u16,
    /// Protocol versions that the sender speaks.
    pub versions: Versions,
}

impl Default for OpenOp {
    /// All fields zero except the versions, which are those of this build.
    fn default() -> Self {
        Self {
            sid: 0,
            epoch: 0,
            inc: 0,
            target_inc: 0,
            echo_sid: 0,
            echo_epoch: 0,
            caps: 0,
            max_frame: 0,
            window: 0,
            minor: 0,
            grant: 0,
            cookie: 0,
            frame: 0,
            versions: VERSIONS,
        }
    }
}

/// The parameters of an OPEN, identical in each repetition and authenticated by the handshake of a
/// sealed session: `caps`, `max_frame`, `window`, `minor`, `grant` and the versions in the layout
/// of the header, without the bytes in between.
pub type OpenParams = [u8; 18];

/// The parameters in an OPEN's header.
///
/// # Panics
/// If `header` is shorter than an OPEN's header.
pub(super) fn params_in(header: &[u8]) -> OpenParams {
    let mut params = [0; 18];
    params[..16].copy_from_slice(&header[32..48]);
    params[16..].copy_from_slice(&header[58..60]);
    params
}

impl OpenOp {
    /// Length in a frame, bytes.
    pub const LEN: usize = 64;

    /// In [`caps`](Self::caps): the two stations are processes of one node, and every frame of the
    /// session, this one included, goes through shared memory.
    pub const NEAR: u32 = 1 << 0;

    /// In [`caps`](Self::caps): the sender's processor has AES instructions.
    pub const AES: u32 = 1 << 1;

    /// In [`caps`](Self::caps): the sender accepts ACKs with a congestion echo.
    pub const ECHO: u32 = 1 << 2;

    /// Whether [`NEAR`](Self::NEAR) is set.
    pub fn is_near(&self) -> bool {
        self.caps & Self::NEAR != 0
    }

    /// Whether [`AES`](Self::AES) is set.
    pub fn has_aes(&self) -> bool {
        self.caps & Self::AES != 0
    }

    /// The parameters.
    pub fn params(&self) -> OpenParams {
        let mut header = [0; Self::LEN];
        self.emit(&mut header);
        params_in(&header)
    }

    /// Whether this OPEN answers one of its receiver.
    pub fn is_answer(&self) -> bool {
        self.echo_sid != 0
    }

    /// Whether this OPEN is a challenge.
    pub fn is_challenge(&self) -> bool {
        self.sid == 0
    }

    /// Copies and validates the header.
    ///
    /// # Errors
    /// [`WireError::Nameless`], [`WireError::OpenEcho`], [`WireError::OpenWindow`],
    /// [`WireError::OpenMaxFrame`], [`WireError::OpenChallenge`], [`WireError::Versions`],
    /// [`WireError::OpReserved`], [`WireError::OpTruncated`].
    pub fn parse(frame: &RxFrame<'_>, base: &Base) -> Result<Self, WireError> {
        let b = Bytes::<{ Self::LEN }>::op(frame)?;
        let op = Self {
            sid: b.u32::<0>(),
            epoch: b.u32::<4>(),
            inc: b.u64::<8>(),
            target_inc: b.u64::<16>(),
            echo_sid: b.u32::<24>(),
            echo_epoch: b.u32::<28>(),
            caps: b.u32::<32>(),
            max_frame: b.u32::<36>(),
            window: b.u16::<40>(),
            minor: b.u16::<42>(),
            grant: b.u32::<44>(),
            cookie: b.u64::<48>(),
            frame: b.u16::<56>(),
            versions: Versions { min: b.u8::<58>(), max: b.u8::<59>() },
        };
        if (op.sid == 0) != (op.epoch == 0)
            || op.inc == 0
            || op.inc.max(op.target_inc) > INCARNATION_MAX
        {
            return Err(WireError::Nameless);
        }
        if op.echo_sid != base.dst_sid || (op.echo_sid == 0) != (op.echo_epoch == 0) {
            return Err(WireError::OpenEcho);
        }
        if op.window == 0 {
            return Err(WireError::OpenWindow);
        }
        if op.max_frame < MAX_FRAME_MIN {
            return Err(WireError::OpenMaxFrame);
        }
        if op.is_challenge() && (op.cookie == 0 || !op.is_answer()) {
            return Err(WireError::OpenChallenge);
        }
        if !op.versions.is_range() {
            return Err(WireError::Versions);
        }
        if b.u32::<60>() != 0 {
            return Err(WireError::OpReserved);
        }
        Ok(op)
    }

    /// Writes the header to the start of `out` and returns its length.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let mut b = Bytes::<{ Self::LEN }>::ZERO;
        b.put32::<0>(self.sid);
        b.put32::<4>(self.epoch);
        b.put64::<8>(self.inc);
        b.put64::<16>(self.target_inc);
        b.put32::<24>(self.echo_sid);
        b.put32::<28>(self.echo_epoch);
        b.put32::<32>(self.caps);
        b.put32::<36>(self.max_frame);
        b.put16::<40>(self.window);
        b.put16::<42>(self.minor);
        b.put32::<44>(self.grant);
        b.put64::<48>(self.cookie);
        b.put16::<56>(self.frame);
        b.put8::<58>(self.versions.min);
        b.put8::<59>(self.versions.max);
        b.write(out)
    }
}
