//! Opening of a port on an interface: checks of the interface, and the claim of a station address
//! for this process.

use std::io;
use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, RawFd};

use nix::sys::socket::UnixAddr;

use super::super::lock::NotInChildren;
use super::super::{set_option, socket};
use super::link::{Link, LinkQuery, links};
use crate::error::OpenError;
use crate::port::{MTU_MIN, MacAddr, Station};

/// Which frames a port accepts, in addition to those to groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Accept {
    /// Those to its station.
    #[default]
    Own,
    /// Those to all stations with its MAC, for a switch.
    Node,
    /// Those to any.
    All,
}

impl Accept {
    /// The filter of the port at `station`: one station, all of a node by the number
    /// [`Station::EVERY`], or `None` for any.
    pub(in super::super) fn filter(self, station: Station) -> Option<Station> {
        match self {
            Self::Own => Some(station),
            Self::Node => Some(Station { number: Station::EVERY, ..station }),
            Self::All => None,
        }
    }
}

/// A request to open a port on an interface.
pub(in super::super) struct PortRequest<'a> {
    /// The port's name.
    pub(in super::super) port: String,
    /// The interface's name.
    pub(in super::super) interface: &'a str,
    /// The port's station. Default: the interface's MAC, or a random one if it has none, and the
    /// first free number.
    pub(in super::super) station: Option<Station>,
    /// Bytes after the Ethernet header. Default: what the interface carries, at most `mtu_max`.
    pub(in super::super) mtu: Option<usize>,
    /// Largest MTU of such a port.
    pub(in super::super) mtu_max: usize,
}

impl PortRequest<'_> {
    pub(in super::super) fn refuse(
        &self,
        errno: i32,
        why: impl Into<String>,
        mend: impl Into<String>,
    ) -> OpenError {
        OpenError::device(&self.port, errno, why, mend)
    }

    /// The error of a system call without a specific explanation.
    pub(in super::super) fn os(&self, what: &str, e: &io::Error) -> OpenError {
        OpenError::unexplained(&self.port, what, e)
    }

    /// The interface, if usable, and the port's MTU.
    pub(in super::super) fn find(&self) -> Result<(LinkQuery, Link, usize), OpenError> {
        let query = LinkQuery::new().map_err(|e| self.os("cannot ask for interfaces", &e))?;
        let name = self.interface;
        let link = query.link(name).map_err(|e| {
            if e.raw_os_error() != Some(libc::ENODEV) {
                return self.os("cannot query the interface", &e);
            }
            let names: Vec<String> = links().into_iter().map(|link| link.name).collect();
            let mend = format!("there are {} (ip link)", names.join(", "));
            self.refuse(libc::ENODEV, "no such interface", mend)
        })?;
        if !link.is_ethernet {
            let mend = "send the frames inside UDP: udp:ADDRESS";
            return Err(self.refuse(libc::EPROTONOSUPPORT, "it carries no Ethernet frames", mend));
        }
        if !link.is_up {
            let mend = format!("ip link set {name} up");
            return Err(self.refuse(libc::ENETDOWN, "the interface is down", mend));
        }
        let max = link.mtu.min(self.mtu_max);
        let mtu = self.mtu.unwrap_or(max);
        if max < MTU_MIN {
            let why = format!("it carries {max} bytes a frame, the fabric needs {MTU_MIN}");
            return Err(self.refuse(libc::EINVAL, why, format!("ip link set {name} mtu 1500")));
        }
        Ok((query, link, OpenError::check_mtu(mtu, max)?))
    }

    /// The station to use, and its claim.
    ///
    /// # Errors
    /// Another process has the station, or accepts frames to all numbers of its MAC as this port
    /// would.
    pub(in super::super) fn claim(
        &self,
        link: &Link,
        accept: Accept,
    ) -> Result<(Station, StationClaim), OpenError> {
        let (station, own) = self.claim_station(link)?;
        let every = Station { number: Station::EVERY, ..station };
        let node = match accept {
            Accept::Node => Some(claim(link.index, every).map_err(|e| match e.raw_os_error() {
                Some(libc::EADDRINUSE) => {
                    let why = "another process takes frames to all stations of its MAC";
                    self.refuse(libc::EADDRINUSE, why, "end that one, or leave out stations=all")
                }
                _ => self.os("cannot claim an address", &e),
            })?),
            Accept::Own | Accept::All => None,
        };
        Ok((station, StationClaim { _own: own, _node: node }))
    }

    fn claim_station(&self, link: &Link) -> Result<(Station, NotInChildren), OpenError> {
        let taken = |e: &io::Error| e.raw_os_error() == Some(libc::EADDRINUSE);
        if let Some(station) = self.station {
            if !station.is_single() {
                let why = format!("{station} is no station's address: the first byte must be even");
                return Err(self.refuse(libc::EINVAL, why, "write mac=02:00:00:00:00:01"));
            }
            return match claim(link.index, station) {
                Ok(claim) => Ok((station, claim)),
                Err(e) if taken(&e) => {
                    let why = format!("address {station} is in use by another process");
                    let mend = "choose another (mac=...) or none";
                    Err(self.refuse(libc::EADDRINUSE, why, mend))
                }
                Err(e) => Err(self.os("cannot claim an address", &e)),
            };
        }
        let mac = if link.mac == MacAddr::default() { MacAddr::random() } else { link.mac };
        for number in Station::OF_PORT {
            let station = Station { mac, number };
            match claim(link.index, station) {
                Ok(claim) => return Ok((station, claim)),
                Err(e) if taken(&e) => {}
                Err(e) => return Err(self.os("cannot claim an address", &e)),
            }
        }
        let why = format!("{} processes have it open", Station::OF_PORT.len());
        Err(self.refuse(libc::EADDRINUSE, why, "end some of them"))
    }
}

/// Keeps a station from other processes until dropped.
pub(in super::super) struct StationClaim {
    _own: NotInChildren,
    _node: Option<NotInChildren>,
}

/// A raw socket that receives no frames yet.
///
/// # Errors
/// `EPERM`: the process has no CAP_NET_RAW in its network namespace.
pub(in super::super) fn raw_socket() -> io::Result<NotInChildren> {
    // Protocol 0: no frame arrives before `bind`, so none passes before the filter is there.
    Ok(socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_NONBLOCK, 0)?.into())
}

/// Makes the interface receive frames to `mac`, which is not its own, while the raw socket `fd` is
/// open: by its address filter, or by promiscuous mode if it has none (the kernel decides). Without
/// `mac`: promiscuous mode.
fn join(fd: RawFd, link: &Link, mac: Option<MacAddr>) -> io::Result<()> {
    let kind = match mac {
        Some(mac) if mac.is_group() => libc::PACKET_MR_MULTICAST,
        Some(_) => libc::PACKET_MR_UNICAST,
        None => libc::PACKET_MR_PROMISC,
    };
    let mut address = [0; 8];
    address[..6].copy_from_slice(&mac.unwrap_or_default().0);
    let request = libc::packet_mreq {
        mr_ifindex: link.index as libc::c_int,
        mr_type: kind as u16,
        mr_alen: 6,
        mr_address: address,
    };
    set_option(fd, libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, &request)
}

/// Makes the interface receive what a port with `mac` accepts, while the socket `fd` is open.
pub(in super::super) fn join_accepted(
    fd: RawFd,
    link: &Link,
    accept: Accept,
    mac: MacAddr,
) -> io::Result<()> {
    match accept {
        _ if link.is_loopback => Ok(()),
        Accept::All => join(fd, link, None),
        Accept::Own | Accept::Node if mac == link.mac => Ok(()),
        Accept::Own | Accept::Node => join(fd, link, Some(mac)),
    }
}

/// The group of all nodes of a segment (RFC 4291).
pub(in super::super) const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// The solicited-node multicast group of `ip` (RFC 4291).
pub(in super::super) fn solicited_group(ip: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c] = ip.octets();
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(a), u16::from_be_bytes([b, c]))
}

/// The MAC of a group (RFC 2464).
pub(in super::super) fn mac_of_group(group: Ipv6Addr) -> MacAddr {
    let [.., a, b, c, d] = group.octets();
    MacAddr([0x33, 0x33, a, b, c, d])
}

/// Joins the groups of a port's IPv6 address while the socket `fd` is open: the solicited-node
/// group, and all nodes, to which probes are answered (RFC 4862). Nothing for IPv4.
pub(in super::super) fn join_groups(
    fd: RawFd,
    link: &Link,
    place: Option<SocketAddr>,
) -> io::Result<()> {
    match place {
        Some(SocketAddr::V6(place)) if !link.is_loopback => {
            join(fd, link, Some(mac_of_group(solicited_group(*place.ip()))))?;
            join(fd, link, Some(mac_of_group(ALL_NODES)))
        }
        _ => Ok(()),
    }
}

/// Reserves `station` on interface `index` for this process.
///
/// # Errors
/// `EADDRINUSE`: a process has it.
fn claim(index: u32, station: Station) -> io::Result<NotInChildren> {
    reserve_name(&format!("barewire-station-{index}-{station}"))
}

/// Reserves a name for this process in its network namespace: an abstract socket name, which is
/// released when the process ends, however it does, and not inherited by children.
///
/// # Errors
/// `EADDRINUSE`: a process has it.
pub fn reserve_name(name: &str) -> io::Result<NotInChildren> {
    let fd = socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0)?;
    nix::sys::socket::bind(fd.as_raw_fd(), &UnixAddr::new_abstract(name.as_bytes())?)?;
    Ok(fd.into())
}
