//! Roles of a segment's members.

use crate::mac::MacAddr;

/// Bits of a member's state below its incarnation; all are 0 in an empty place.
const STATION: u64 = 1;
const MONITOR: u64 = 3;
const SWITCH: u64 = 5;
const LEASE: u64 = 7;
const ROLE: u64 = 7;

/// The role of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Sends to and receives from all members.
    Station,
    /// Gets a copy of every frame.
    Monitor,
    /// Forwards between the segment and an uplink. A segment has at most one.
    Switch(Uplink),
    /// Sends everything to the switch, and receives from it alone.
    Leaf,
    /// Has an address that no other member gets, and no frames.
    Lease,
}

impl Role {
    /// The role's bits in the member's state.
    pub(super) fn bits(self) -> u64 {
        match self {
            Self::Station | Self::Leaf => STATION,
            Self::Monitor => MONITOR,
            Self::Switch(_) => SWITCH,
            Self::Lease => LEASE,
        }
    }
}

/// Whether a member with this state is a monitor.
pub(super) fn is_monitor(state: u64) -> bool {
    state & ROLE == MONITOR
}

/// Whether frames are addressed to a member with this state: a station or the switch.
pub(super) fn is_addressed(state: u64) -> bool {
    [STATION, SWITCH].contains(&(state & ROLE))
}

/// Whether a member with this state is a switch.
pub(super) fn is_switch(state: u64) -> bool {
    state & ROLE == SWITCH
}

/// The link that a switch forwards to, as stored in its segment's header, and sent to processes of
/// builds with another layout: its words do not change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uplink {
    /// Largest number of bytes after the Ethernet header; 0 in a segment that never had a switch.
    pub mtu: u32,
    /// [`PortCaps::rto_floor_ns`](crate::port::PortCaps::rto_floor_ns), in microseconds, below
    /// 2^31.
    pub rto_floor_us: u32,
    /// [`Port::damages`](crate::port::Port::damages).
    pub damages: bool,
    /// [`PortCaps::via_kernel`](crate::port::PortCaps::via_kernel).
    pub via_kernel: bool,
    /// Bit/s, 0 if not known.
    pub link_bps: u64,
    /// Address of the NIC, behind which stations have numbers.
    pub mac: MacAddr,
}

impl Uplink {
    pub(crate) fn to_words(self) -> [u64; 3] {
        let rto_floor_us = u64::from(self.rto_floor_us & i32::MAX as u32);
        let [damages, via_kernel] = [self.damages, self.via_kernel].map(u64::from);
        [
            u64::from(self.mtu) | rto_floor_us << 32 | damages << 63,
            self.link_bps,
            self.mac.to_u64() | via_kernel << 63,
        ]
    }

    pub(crate) fn from_words([sizes, link_bps, mac]: [u64; 3]) -> Self {
        let rto_floor_us = (sizes >> 32) as u32 & i32::MAX as u32;
        let (mtu, damages, via_kernel) = (sizes as u32, sizes >> 63 != 0, mac >> 63 != 0);
        Self { mtu, rto_floor_us, damages, via_kernel, link_bps, mac: MacAddr::from_u64(mac) }
    }
}
