//! Network interfaces with their kernel driver: code that the ports on them share.
//!
//! `link` queries interfaces from the kernel; `station` selects an interface and claims an address
//! on it; `link_state` tracks an interface in use and logs its changes; `waiter` sleeps on a port's
//! sockets and on link changes; `egress` finds what the kernel does to frames that leave;
//! `features` queries XDP features; `filter` has the BPF filters of raw sockets, and `ring` their
//! receive ring.

mod egress;
mod features;
pub(super) mod filter;
mod link;
mod link_state;
pub(super) mod ring;
mod station;
mod waiter;

pub use egress::{Egress, egress};
pub use features::XdpFeatures;
pub use link::{
    DriverInfo, Link, alt_names, ip_addresses, link_and_driver, link_by_alt_name, links,
};
pub use station::{Accept, reserve_name};

pub(super) use features::xdp_features;
pub(super) use link::LinkQuery;
#[cfg(feature = "dpdk")]
pub(super) use link::interface_mtu;
pub(super) use link_state::{LinkMonitor, LinkState};
pub(super) use station::{
    ALL_NODES, PortRequest, StationClaim, join_accepted, join_groups, mac_of_group, raw_socket,
    solicited_group,
};
pub(super) use waiter::{SOCKETS_MAX, Shared, Waiter};
