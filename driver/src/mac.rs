//! Ethernet addresses.

use std::fmt;
use std::str::FromStr;

/// An Ethernet address, in wire order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// The broadcast address.
    pub const BROADCAST: Self = Self([0xff; 6]);

    /// A random locally administered unicast address.
    pub(crate) fn random() -> Self {
        use std::hash::{BuildHasher, Hasher, RandomState};
        let mut hasher = RandomState::new().build_hasher();
        hasher.write_u64(crate::clock::now_ns());
        hasher.write_u32(std::process::id());
        let mut mac = Self::from_u64(hasher.finish());
        mac.0[0] = 0x02;
        mac
    }

    /// Whether it is a unicast address other than zero.
    pub fn is_single(self) -> bool {
        !self.is_group() && self != Self::default()
    }

    /// Decodes the address from two NIC registers.
    pub(crate) fn from_registers(low: u32, high: u32) -> Self {
        let ([a, b, c, d], [e, f, ..]) = (low.to_le_bytes(), high.to_le_bytes());
        Self([a, b, c, d, e, f])
    }

    /// Encodes the address for two NIC registers; the upper half of the second is 0.
    pub(crate) fn registers(self) -> [u32; 2] {
        let [a, b, c, d, e, f] = self.0;
        [[a, b, c, d], [e, f, 0, 0]].map(u32::from_le_bytes)
    }

    /// Whether the group bit is set: broadcast or multicast.
    pub const fn is_group(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// The address as a number below 2^48, first byte on the wire most significant.
    pub const fn to_u64(self) -> u64 {
        let b = self.0;
        u64::from_be_bytes([0, 0, b[0], b[1], b[2], b[3], b[4], b[5]])
    }

    /// The address in the lower 48 bits of a word, as the first eight bytes of a frame load it: for
    /// comparisons.
    pub const fn frame_word(self) -> u64 {
        let b = self.0;
        u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], 0, 0])
    }

    /// The inverse of [`to_u64`](Self::to_u64); bits 48 to 63 are ignored.
    pub const fn from_u64(v: u64) -> Self {
        let b = v.to_be_bytes();
        Self([b[2], b[3], b[4], b[5], b[6], b[7]])
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A string that is not six hexadecimal bytes separated by colons.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is not a MAC address: write six hexadecimal bytes, such as 02:00:00:00:00:01")]
pub struct BadMac(pub String);

impl FromStr for MacAddr {
    type Err = BadMac;

    fn from_str(s: &str) -> Result<Self, BadMac> {
        let bad = || BadMac(s.to_owned());
        let mut mac = [0; 6];
        let mut parts = s.split(':');
        for byte in &mut mac {
            let part = parts.next().ok_or_else(bad)?;
            // A number may have a sign.
            let is_hex = part.bytes().all(|digit| digit.is_ascii_hexdigit());
            if part.is_empty() || part.len() > 2 || !is_hex {
                return Err(bad());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| bad())?;
        }
        if parts.next().is_some() { Err(bad()) } else { Ok(Self(mac)) }
    }
}
