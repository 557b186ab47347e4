//! Time, addresses and completions: the plain values of this crate's interfaces.

use std::fmt;
use std::ops::Add;
use std::str::FromStr;

use barewire_driver::port::{MacAddr, Station};

use crate::error::Error;
use crate::flags::CqFlags;

/// A point in time, nanoseconds from an arbitrary start. The dataplane never reads a clock: every
/// entry point takes `now`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Instant(pub u64);

impl Instant {
    /// Nanoseconds from `earlier` to `self`, 0 if `earlier` is later.
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<u64> for Instant {
    type Output = Self;

    /// `ns` nanoseconds later; saturates.
    fn add(self, ns: u64) -> Self {
        Self(self.0.saturating_add(ns))
    }
}

/// `fi_addr_t`: an index in an address vector, or [`FI_ADDR_UNSPEC`].
pub type FiAddr = u64;

/// On a receive: any source. On a send: no destination. Also `FI_ADDR_NOTAVAIL`.
pub const FI_ADDR_UNSPEC: FiAddr = u64::MAX;

/// Identifies the key that a peer has, on a node that separates its keys
/// ([`Keyring::of_tenants`](crate::seal::Keyring::of_tenants)): one station under two keys is two
/// peers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant(u8);

impl Tenant {
    /// The only tenant of a node that does not separate its keys.
    pub const NONE: Self = Self(0);

    /// The bit that marks the handle of a key: no address vector has as many indices.
    const HANDLE: FiAddr = 1 << 40;

    /// The tenant of key number `n`, from 1.
    pub(crate) const fn of(n: u8) -> Self {
        Self(n)
    }

    /// Number of its key; 0 is [`NONE`](Self::NONE).
    pub(crate) const fn get(self) -> u8 {
        self.0
    }

    /// The `fi_addr_t` that stands for all peers of this tenant.
    pub const fn handle(self) -> FiAddr {
        Self::HANDLE | self.0 as FiAddr
    }

    /// The tenant that `handle` names; `None` if it is no key's handle.
    pub const fn of_handle(handle: FiAddr) -> Option<Self> {
        match handle ^ Self::HANDLE {
            n @ 1..=0xff => Some(Self(n as u8)),
            _ => None,
        }
    }
}

/// Highest incarnation: 48 bits.
pub const INCARNATION_MAX: u64 = (1 << 48) - 1;

/// The address of an endpoint: 16 bytes, `fi_getname`'s native form (`FI_FORMAT_UNSPEC` with
/// addrlen 16 and, as text, `FI_ADDR_STR`).
///
/// | bytes | field |
/// |---|---|
/// | 0..6 | MAC of the station |
/// | 6..8 | endpoint number, little-endian |
/// | 8..14 | incarnation of the domain, little-endian; 0 for the current one |
/// | 14..16 | number of the station, little-endian |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EpAddr {
    /// The station, one per process.
    pub station: Station,
    /// Number of the endpoint within its domain, 0 to 65,535.
    pub ep: u16,
    /// Random identifier of this incarnation of the domain, at most [`INCARNATION_MAX`]; 0 for any
    /// incarnation.
    pub incarnation: u64,
}

impl EpAddr {
    /// Length of the native form, bytes.
    pub const LEN: usize = 16;

    /// The native form.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[8..].copy_from_slice(&self.incarnation.to_le_bytes());
        b[..6].copy_from_slice(&self.station.mac.0);
        b[6..8].copy_from_slice(&self.ep.to_le_bytes());
        b[14..].copy_from_slice(&self.station.number.to_le_bytes());
        b
    }

    /// The inverse of [`to_bytes`](Self::to_bytes).
    ///
    /// # Errors
    /// [`Error::Invalid`] if the MAC is a group address or zero, or the station number is one of a
    /// group: no endpoint has such an address.
    pub fn from_bytes(b: &[u8; Self::LEN]) -> Result<Self, Error> {
        let (mut mac, mut inc) = ([0; 6], [0; 8]);
        mac.copy_from_slice(&b[..6]);
        inc[..6].copy_from_slice(&b[8..14]);
        let [ep, number] = [6, 14].map(|at| u16::from_le_bytes([b[at], b[at + 1]]));
        let station = Station { mac: MacAddr(mac), number };
        if !station.is_single() {
            return Err(Error::Invalid("address: not of a single station"));
        }
        Ok(Self { station, ep, incarnation: u64::from_le_bytes(inc) })
    }
}

impl fmt::Display for EpAddr {
    /// `barewire://02:00:00:00:00:01/7` or, with a number of the station and an incarnation,
    /// `barewire://02:00:00:00:00:01.3/7#c0ffee00c0ff`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "barewire://{}/{}", self.station, self.ep)?;
        if self.incarnation != 0 {
            write!(f, "#{:012x}", self.incarnation)?;
        }
        Ok(())
    }
}

impl FromStr for EpAddr {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        const BAD: Error =
            Error::Invalid("address: expected barewire://MAC[.STATION]/EP[#INCARNATION]");
        let s = s.strip_prefix("barewire://").unwrap_or(s);
        let (station, rest) = s.split_once('/').ok_or(BAD)?;
        let (ep, inc) = rest.split_once('#').unwrap_or((rest, "0"));
        let addr = Self {
            station: station.parse().map_err(|_| BAD)?,
            ep: ep.parse().map_err(|_| BAD)?,
            incarnation: u64::from_str_radix(inc, 16).map_err(|_| BAD)?,
        };
        if addr.incarnation > INCARNATION_MAX {
            return Err(BAD);
        }
        Self::from_bytes(&addr.to_bytes())
    }
}

/// The address of a multicast group, as `fi_join` takes it: an Ethernet group address and a number.
/// 16 bytes in the layout of an [`EpAddr`]: MAC, number in place of the endpoint number, and 8 zero
/// bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupAddr {
    mac: MacAddr,
    number: u16,
}

impl GroupAddr {
    /// The group with this address and number. `None` if the address is a unicast address or the
    /// broadcast address.
    pub fn new(mac: MacAddr, number: u16) -> Option<Self> {
        (mac.is_group() && mac != MacAddr::BROADCAST).then_some(Self { mac, number })
    }

    /// The group of an IPv4 multicast address and a port, with the MAC that RFC 1112 maps the
    /// address to. `None` if the address is not multicast.
    pub fn of_v4(ip: [u8; 4], port: u16) -> Option<Self> {
        let [first, b, c, d] = ip;
        let mac = MacAddr([1, 0, 0x5e, b & 0x7f, c, d]);
        (first >> 4 == 0xe).then_some(Self { mac, number: port })
    }

    /// The group of an IPv6 multicast address and a port (RFC 2464).
    pub fn of_v6(ip: [u8; 16], port: u16) -> Option<Self> {
        let [first, .., a, b, c, d] = ip;
        let mac = MacAddr([0x33, 0x33, a, b, c, d]);
        (first == 0xff).then_some(Self { mac, number: port })
    }

    /// The Ethernet group address.
    pub fn mac(self) -> MacAddr {
        self.mac
    }

    /// The number of the group.
    pub fn number(self) -> u16 {
        self.number
    }

    /// The native form.
    pub fn to_bytes(self) -> [u8; EpAddr::LEN] {
        let mut b = [0; EpAddr::LEN];
        b[..6].copy_from_slice(&self.mac.0);
        b[6..8].copy_from_slice(&self.number.to_le_bytes());
        b
    }

    /// The inverse of [`to_bytes`](Self::to_bytes).
    ///
    /// # Errors
    /// [`Error::Invalid`] if no group can have the address.
    pub fn from_bytes(b: &[u8; EpAddr::LEN]) -> Result<Self, Error> {
        let mut mac = [0; 6];
        mac.copy_from_slice(&b[..6]);
        let group = Self::new(MacAddr(mac), u16::from_le_bytes([b[6], b[7]]));
        group.filter(|_| b[8..] == [0; 8]).ok_or(Error::Invalid("address: not of a group"))
    }
}

impl fmt::Display for GroupAddr {
    /// `barewire://01:00:5e:01:02:03/7`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "barewire://{}/{}", self.mac, self.number)
    }
}

impl FromStr for GroupAddr {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        const BAD: Error = Error::Invalid("address: expected barewire://GROUP-MAC/NUMBER");
        let s = s.strip_prefix("barewire://").unwrap_or(s);
        let (mac, number) = s.split_once('/').ok_or(BAD)?;
        let mac = mac.parse().map_err(|_| BAD)?;
        Self::new(mac, number.parse().map_err(|_| BAD)?).ok_or(BAD)
    }
}

/// Context of an operation whose failure writes no completion entry. The failure is counted, in the
/// endpoint's errors and by a bound counter, and kept for the log.
///
/// The C calls without a context (`fi_inject` and its like) post with this value: Open MPI takes
/// the context of every error entry for a request, and libfabric's own providers write no entry
/// here. The value is no valid pointer: it is not canonical on any processor.
pub const NO_ENTRY: u64 = 0x8000_0000_6277_0001;

/// One completion, the union of all formats (`fi_cq_tagged_entry` plus the source), with C's order
/// of members, so that it is copied to the C structure as a whole.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cqe {
    /// The operation's context, verbatim.
    pub op_context: u64,
    /// Kind of the operation and of the completion.
    pub flags: CqFlags,
    /// Bytes received; 0 for sends.
    pub len: u64,
    /// Start address of a multi-recv or buffered message; else 0.
    pub buf: u64,
    /// Remote CQ data if `flags` contains it.
    pub data: u64,
    /// The tag of a tagged message.
    pub tag: u64,
    /// The sender for `readfrom`; [`FI_ADDR_UNSPEC`] (`FI_ADDR_NOTAVAIL`) if unknown.
    pub src: FiAddr,
}

/// One failed operation (`fi_cq_err_entry`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqErr {
    /// As in a success. `len` is the number of bytes placed.
    pub cqe: Cqe,
    /// Bytes that did not fit, for [`Error::Trunc`].
    pub olen: u64,
    /// The error.
    pub err: Error,
    /// Whether the peer may have executed the operation, or why it failed.
    pub prov_errno: ProvErrno,
    /// The raw address of an unknown sender (`FI_SOURCE_ERR`).
    pub err_data: Option<EpAddr>,
}

/// Detail of a failed operation, in `prov_errno`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(i32)]
pub enum ProvErrno {
    /// Nothing to add to `err`.
    #[default]
    None = 0,
    /// The peer has certainly not executed it.
    NotExecuted = 1,
    /// The peer may or may not have executed it.
    UnknownOutcome = 2,
    /// The peer had no such endpoint.
    NoEndpoint = 3,
}
