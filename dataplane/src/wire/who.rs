//! WHO: query for the server of a service at a host, and its answer HERE.

use std::hash::Hasher;

use barewire_driver::frame::RxFrame;

use super::{Base, Bytes, Versions, WireError};

/// Name or address of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Host {
    /// A hashed name, see [`Host::name`].
    Name(u64),
    /// An IPv4 address.
    V4([u8; 4]),
    /// An IPv6 address.
    V6([u8; 16]),
}

impl Host {
    /// A host by its name, case-insensitive.
    pub fn name(name: &str) -> Self {
        #[expect(
            deprecated,
            reason = "the one keyed hash of the standard library that takes its keys"
        )]
        let mut hasher = std::hash::SipHasher::new_with_keys(0, 0);
        hasher.write(name.to_ascii_lowercase().as_bytes());
        Self::Name(hasher.finish())
    }

    fn kind(self) -> u8 {
        match self {
            Self::Name(_) => 1,
            Self::V4(_) => 4,
            Self::V6(_) => 6,
        }
    }

    fn bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        match self {
            Self::Name(hash) => bytes[..8].copy_from_slice(&hash.to_le_bytes()),
            Self::V4(ip) => bytes[..4].copy_from_slice(&ip),
            Self::V6(ip) => bytes = ip,
        }
        bytes
    }

    fn read(kind: u8, bytes: [u8; 16]) -> Result<Self, WireError> {
        let [a, b, c, d, ..] = bytes;
        let host = match kind {
            1 => Self::Name(u64::from_le_bytes(*bytes.first_chunk().expect("16 are 8"))),
            4 => Self::V4([a, b, c, d]),
            6 => Self::V6(bytes),
            _ => return Err(WireError::WhoKind),
        };
        // Unused bytes of a shorter host are zero.
        if host.bytes() == bytes { Ok(host) } else { Err(WireError::OpReserved) }
    }
}

/// Header of a WHO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WhoOp {
    /// Number of the query; 0 in an announcement.
    pub nonce: u64,
    /// Whether this is an answer or announcement (HERE) instead of a query.
    pub here: bool,
    /// The host.
    pub host: Host,
    /// Number of the endpoint; 0 in a query for any.
    pub service: u16,
    /// Protocol versions that the sender speaks.
    pub versions: Versions,
}

impl WhoOp {
    /// Length in a frame, bytes.
    pub const LEN: usize = 32;

    /// Copies and validates the header.
    ///
    /// # Errors
    /// [`WireError::WhoKind`], [`WireError::Nameless`], [`WireError::Versions`],
    /// [`WireError::OpReserved`], [`WireError::OpTruncated`].
    pub fn parse(frame: &RxFrame<'_>, _base: &Base) -> Result<Self, WireError> {
        let b = Bytes::<{ Self::LEN }>::op(frame)?;
        let here = match b.u8::<8>() {
            0 => false,
            1 => true,
            _ => return Err(WireError::WhoKind),
        };
        let op = Self {
            nonce: b.u64::<0>(),
            here,
            host: Host::read(b.u8::<9>(), b.get::<16, 16>())?,
            service: b.u16::<10>(),
            versions: Versions { min: b.u8::<12>(), max: b.u8::<13>() },
        };
        if b.u16::<14>() != 0 {
            return Err(WireError::OpReserved);
        }
        if if here { op.service == 0 } else { op.nonce == 0 } {
            return Err(WireError::Nameless);
        }
        if !op.versions.is_range() {
            return Err(WireError::Versions);
        }
        Ok(op)
    }

    /// Writes the header to the start of `out` and returns its length.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let mut b = Bytes::<{ Self::LEN }>::ZERO;
        b.put64::<0>(self.nonce);
        b.put8::<8>(self.here.into());
        b.put8::<9>(self.host.kind());
        b.put16::<10>(self.service);
        b.put8::<12>(self.versions.min);
        b.put8::<13>(self.versions.max);
        b.set::<16, 16>(self.host.bytes());
        b.write(out)
    }
}
