//! Network interfaces that stay with the kernel's driver: what the ports on one share.
//!
//! `link` is what the kernel says of an interface; `station` is the choice of one and the claim
//! of an address on it; `watched` is an interface in use, and what the log is told of its changes;
//! `waiter` sleeps on both it and the port's socket;
//! `egress` is what the kernel does to frames that leave it; `features` is what its driver can do
//! with XDP; `filter` is what raw sockets on it hear, and `ring` where they put it.

mod egress;
mod features;
pub(super) mod filter;
mod link;
pub(super) mod ring;
mod station;
mod waiter;
mod watched;

pub use egress::{Egress, egress};
pub use features::XdpFeatures;
pub use link::{
    DriverInfo, Link, ip_addresses, link_also_named, link_and_driver, links, other_names,
};
pub use station::{Accept, hold};

pub(super) use features::xdp_features;
pub(super) use link::Asker;
#[cfg(feature = "dpdk")]
pub(super) use link::interface_mtu;
pub(super) use station::{
    ALL_NODES, Claim, Wanted, join_accepted, join_for, mac_of_group, raw_socket, solicited_group,
};
pub(super) use waiter::{SOCKETS_MAX, Shared, Waiter};
pub(super) use watched::{Ear, Watched};
