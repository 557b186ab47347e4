//! Names and IP addresses of this host, and IP addresses of the stations that queries found.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use barewire_dataplane::wire::Host;
use barewire_driver::backend::netdev::ip_addresses;
use barewire_driver::open::kind_and_device;
use barewire_driver::port::Station;

/// Most stations whose IP address is remembered.
const KNOWN_MAX: usize = 1 << 16;

/// An IP address in a query. An IPv4-mapped IPv6 address is an IPv4 address.
pub(crate) fn host_of(ip: IpAddr) -> Host {
    match ip.to_canonical() {
        IpAddr::V4(ip) => Host::V4(ip.octets()),
        IpAddr::V6(ip) => Host::V6(ip.octets()),
    }
}

/// This host's name; empty if it cannot be read.
pub(crate) fn own_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim_end().to_owned()
}

/// The kernel interface of a port. For a port without one, a string that names no interface.
pub(crate) fn interface_of(port: &str) -> &str {
    kind_and_device(port).map_or("", |(_, device)| device)
}

/// The IP addresses of this host without loopback, those of `interface` first.
pub(crate) fn own_ips(interface: &str) -> Vec<IpAddr> {
    let mut all = ip_addresses();
    all.retain(|(_, ip)| !ip.is_loopback() && !ip.is_unspecified());
    all.sort_by_key(|(name, ip)| (name != interface, ip.is_ipv6()));
    all.into_iter().map(|(_, ip)| ip).collect()
}

/// The names that this host answers to on a port of `interface`: its IP addresses, and its
/// hostname, whole and up to the first dot.
pub(crate) fn own_hosts(interface: &str) -> Vec<Host> {
    let name = own_name();
    let short = name.split('.').next().unwrap_or_default();
    let mut names = vec![name.as_str(), short];
    names.dedup();
    let names = names.into_iter().filter(|name| !name.is_empty() && *name != "localhost");
    let ips = own_ips(interface).into_iter().map(host_of);
    ips.take(64).chain(names.map(Host::name)).collect()
}

static KNOWN: Mutex<Option<HashMap<Station, IpAddr>>> = Mutex::new(None);

/// Remembers the IP address of a station, to print its address as a `sockaddr`.
pub(crate) fn remember_ip(station: Station, ip: IpAddr) {
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    if known.len() >= KNOWN_MAX {
        known.clear();
    }
    known.insert(station, ip);
}

/// The IP address at which a station was found.
pub(crate) fn ip_of(station: Station) -> Option<IpAddr> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.get(&station).copied()
}
