//! Queries of network interfaces, and notifications of their changes.
//!
//! By ioctl and netlink, not in /sys, which shows the network namespace in which it was mounted.

use std::ffi::CStr;
use std::io;
use std::mem::size_of;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::if_nameindex;
use nix::sys::socket::{MsgFlags, SockaddrStorage, recv, send};

use super::super::{bind, socket};
use crate::port::MacAddr;

/// An interface and its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Its index, which survives a new name.
    pub index: u32,
    /// Its name now.
    pub name: String,
    /// Its MAC; zero on `lo`.
    pub mac: MacAddr,
    /// Its MTU, bytes after the Ethernet header.
    pub mtu: usize,
    /// Administratively up (IFF_UP).
    pub is_up: bool,
    /// It has a carrier: the other end of the cable is there.
    pub has_carrier: bool,
    /// Frames on it start with an Ethernet header.
    pub is_ethernet: bool,
    /// It is `lo`.
    pub is_loopback: bool,
    /// Bit/s; 0 if the driver does not report it.
    pub bps: u64,
}

/// Driver information of an interface (`ethtool -i`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverInfo {
    /// Its name.
    pub driver: Option<String>,
    /// The version of the card's firmware.
    pub firmware: Option<String>,
    /// Bus address of the card, such as the PCI address `0000:05:00.0`.
    pub bus: Option<String>,
}

/// A socket for ioctl queries of interfaces.
pub(in super::super) struct LinkQuery(OwnedFd);

/// `struct ifreq`; the meaning of its second half depends on the request.
#[repr(C)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    value: [u8; 24],
}

// The kernel copies a whole `struct ifreq` in and out.
const _: () = assert!(size_of::<Request>() == size_of::<libc::ifreq>());

impl LinkQuery {
    pub(in super::super) fn new() -> io::Result<Self> {
        Ok(Self(socket(libc::AF_INET, libc::SOCK_DGRAM, 0)?))
    }

    fn ioctl(&self, what: libc::c_ulong, request: &mut Request) -> io::Result<()> {
        // SAFETY: each `what` used here takes a `struct ifreq`, whose size was asserted; those that
        // point to more memory (`ethtool`) make sure of it.
        let done =
            unsafe { libc::ioctl(self.0.as_raw_fd(), what as _, std::ptr::from_mut(request)) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    fn query(&self, name: &str, what: libc::c_ulong) -> io::Result<[u8; 24]> {
        let mut request = Request { name: [0; libc::IFNAMSIZ], value: [0; 24] };
        if name.len() >= libc::IFNAMSIZ {
            return Err(io::Error::from_raw_os_error(libc::ENODEV));
        }
        request.name[..name.len()].copy_from_slice(name.as_bytes());
        self.ioctl(what, &mut request)?;
        Ok(request.value)
    }

    fn query_u32(&self, name: &str, what: libc::c_ulong) -> io::Result<u32> {
        let value = self.query(name, what)?;
        Ok(u32::from_ne_bytes([value[0], value[1], value[2], value[3]]))
    }

    fn mtu(&self, name: &str) -> io::Result<usize> {
        Ok(self.query_u32(name, libc::SIOCGIFMTU)? as usize)
    }

    /// The interface of that name.
    ///
    /// # Errors
    /// `ENODEV`: there is none.
    pub(in super::super) fn link(&self, name: &str) -> io::Result<Link> {
        let flags = self.query(name, libc::SIOCGIFFLAGS)?;
        let flags = i32::from(i16::from_ne_bytes([flags[0], flags[1]]));
        let hw = self.query(name, libc::SIOCGIFHWADDR)?;
        let kind = u16::from_ne_bytes([hw[0], hw[1]]);
        let mac = MacAddr([hw[2], hw[3], hw[4], hw[5], hw[6], hw[7]]);
        Ok(Link {
            index: self.query_u32(name, libc::SIOCGIFINDEX)?,
            name: name.to_owned(),
            mac,
            mtu: self.mtu(name)?,
            is_up: flags & libc::IFF_UP != 0,
            has_carrier: flags & libc::IFF_RUNNING != 0,
            is_ethernet: matches!(kind, libc::ARPHRD_ETHER | libc::ARPHRD_LOOPBACK),
            is_loopback: flags & libc::IFF_LOOPBACK != 0,
            bps: self.speed(name),
        })
    }

    /// The interface of that number, whatever it is called now.
    ///
    /// # Errors
    /// `ENODEV`: it is gone.
    pub(in super::super) fn link_at(&self, index: u32) -> io::Result<Link> {
        loop {
            let mut request = Request { name: [0; libc::IFNAMSIZ], value: [0; 24] };
            request.value[..4].copy_from_slice(&index.to_ne_bytes());
            self.ioctl(libc::SIOCGIFNAME, &mut request)?;
            let name = CStr::from_bytes_until_nul(&request.name);
            let name = name.map_or_else(|_| String::new(), |n| n.to_string_lossy().into_owned());
            match self.link(&name) {
                Ok(link) if link.index == index => return Ok(link),
                // The interface was renamed or removed meanwhile.
                Ok(_) => {}
                Err(e) if e.raw_os_error() == Some(libc::ENODEV) => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Link speed, bit/s; 0 if the driver does not report it.
    fn speed(&self, name: &str) -> u64 {
        // `struct ethtool_cmd`: command first, speed in two halves at 12 and 28.
        const GSET: u32 = 1;
        let Ok(command) = self.ethtool::<11>(name, GSET) else { return 0 };
        let half = |word: u32| {
            let [a, b, ..] = word.to_ne_bytes();
            u64::from(u16::from_ne_bytes([a, b]))
        };
        let (low, high) = (half(command[3]), half(command[7]));
        match high << 16 | low {
            // SPEED_UNKNOWN, as one number or as its low half.
            0 | 0xffff | 0xffff_ffff => 0,
            mbit => mbit * 1_000_000,
        }
    }

    /// Receive queues of the interface. If the driver does not report them, those that the
    /// interface was created with, of which it may use fewer.
    pub(in super::super) fn rx_queues(&self, name: &str) -> u32 {
        // `struct ethtool_channels`: after the command four limits, then those that are for
        // receiving only, sending only, others, and both.
        const GCHANNELS: u32 = 0x3c;
        let count = match self.ethtool::<9>(name, GCHANNELS) {
            Ok(channels) => channels[5].saturating_add(channels[8]),
            Err(_) => configured_rx_queues(name),
        };
        count.max(1)
    }

    /// The name of an interface's driver, if reported.
    pub(in super::super) fn driver(&self, name: &str) -> Option<String> {
        self.driver_info(name).driver
    }

    /// Driver information of an interface; empty without support.
    pub(in super::super) fn driver_info(&self, name: &str) -> DriverInfo {
        // `struct ethtool_drvinfo`: after the command four texts of 32 bytes: driver, its version,
        // firmware, place on the bus.
        const GDRVINFO: u32 = 3;
        let Ok(info) = self.ethtool::<49>(name, GDRVINFO) else { return DriverInfo::default() };
        let text = |at: usize| {
            let words = &info[1 + at * 8..9 + at * 8];
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let text = CStr::from_bytes_until_nul(&bytes).ok()?.to_string_lossy().into_owned();
            // Some drivers write these for unknown values.
            Some(text).filter(|text| !["", "N/A"].contains(&text.as_str()))
        };
        DriverInfo { driver: text(0), firmware: text(2), bus: text(3) }
    }

    /// Runs a command of ethtool, whose structure has `WORDS` words and begins with the command.
    fn ethtool<const WORDS: usize>(&self, name: &str, what: u32) -> io::Result<[u32; WORDS]> {
        let mut command = [0_u32; WORDS];
        command[0] = what;
        let mut request = Request { name: [0; libc::IFNAMSIZ], value: [0; 24] };
        let len = name.len().min(libc::IFNAMSIZ - 1);
        request.name[..len].copy_from_slice(&name.as_bytes()[..len]);
        let at = command.as_mut_ptr() as usize;
        request.value[..size_of::<usize>()].copy_from_slice(&at.to_ne_bytes());
        // The callers' commands write as many words, and they outlive the call.
        self.ioctl(libc::SIOCETHTOOL, &mut request)?;
        Ok(command)
    }
}

/// The interfaces of this network namespace, by number.
pub fn links() -> Vec<Link> {
    let Ok(query) = LinkQuery::new() else { return Vec::new() };
    names().iter().filter_map(|name| query.link(name).ok()).collect()
}

/// The interface of this network namespace with this name or alternative name, and its driver
/// information. Costs some ten system calls.
pub fn link_and_driver(name: &str) -> Option<(Link, DriverInfo)> {
    let query = LinkQuery::new().ok()?;
    let link = query.link(name).ok().or_else(|| link_by_alt_name(name))?;
    let info = query.driver_info(&link.name);
    Some((link, info))
}

/// The MTU of an interface of this network namespace.
#[cfg(feature = "dpdk")]
pub(in super::super) fn interface_mtu(name: &str) -> Option<usize> {
    LinkQuery::new().ok()?.mtu(name).ok()
}

/// Names of the interfaces of this network namespace.
fn names() -> Vec<String> {
    let all = if_nameindex();
    let all = all.iter().flat_map(|all| all.iter());
    all.map(|link| link.name().to_string_lossy().into_owned()).collect()
}

/// Interfaces of this network namespace and their IP addresses, as `(name, address)`.
pub fn ip_addresses() -> Vec<(String, IpAddr)> {
    let ip_of = |address: SockaddrStorage| -> Option<IpAddr> {
        let v4 = address.as_sockaddr_in().map(|v4| v4.ip().into());
        v4.or_else(|| address.as_sockaddr_in6().map(|v6| v6.ip().into()))
    };
    let all = getifaddrs().into_iter().flatten();
    all.filter_map(|entry| Some((entry.interface_name, ip_of(entry.address?)?))).collect()
}

/// Alternative names of the interfaces of this network namespace (`ip link property`), each with
/// the index of its interface. Empty if the kernel has none.
pub fn alt_names() -> Vec<(u32, String)> {
    let mut found = Vec::new();
    // An `ifinfomsg` of zeros selects all interfaces.
    dump(libc::RTM_GETLINK, &[0; 16], |bytes| parse_alt_names(bytes, &mut found));
    found
}

/// Receive queues that an interface was created with; 0 if the kernel does not report them.
fn configured_rx_queues(name: &str) -> u32 {
    let mut count = 0;
    dump(libc::RTM_GETLINK, &[0; 16], |bytes| {
        parse_messages(bytes, libc::RTM_NEWLINK, |message| {
            let of = |request| {
                let mut all = attributes(message.get(16..).unwrap_or(&[]));
                all.find(|(kind, _)| *kind == request).map(|(_, value)| value)
            };
            if of(libc::IFLA_IFNAME).is_some_and(|value| text(value) == name) {
                let queues = of(libc::IFLA_NUM_RX_QUEUES).and_then(<[u8]>::first_chunk::<4>);
                count = queues.map_or(0, |queues| u32::from_ne_bytes(*queues));
            }
        })
    });
    count
}

/// Sends a netlink dump request with `header` as its body, and passes the replies to `take` until
/// that returns false.
pub(super) fn dump(what: u16, header: &[u8], mut take: impl FnMut(&[u8]) -> bool) {
    let Ok(fd) = netlink(libc::NETLINK_ROUTE, 0) else { return };
    let ask = request(what, libc::NLM_F_DUMP, header);
    if send(fd.as_raw_fd(), &ask, MsgFlags::empty()).is_err() {
        return;
    }
    let mut bytes = vec![0_u8; 64 << 10];
    loop {
        let len = recv(fd.as_raw_fd(), &mut bytes, MsgFlags::empty()).unwrap_or(0);
        if !take(&bytes[..len]) {
            return;
        }
    }
}

/// A netlink request with `body` behind its header.
pub(super) fn request(what: u16, flags: libc::c_int, body: &[u8]) -> Vec<u8> {
    let flags = (libc::NLM_F_REQUEST | flags) as u16;
    // `nlmsghdr`, of which sequence and port are 0.
    let mut bytes = (16 + body.len() as u32).to_ne_bytes().to_vec();
    bytes.extend([what, flags].map(u16::to_ne_bytes).as_flattened());
    bytes.extend([0; 8]);
    bytes.extend(body);
    bytes
}

/// The interface with this alternative name.
pub fn link_by_alt_name(name: &str) -> Option<Link> {
    let (index, _) = alt_names().into_iter().find(|(_, other)| other == name)?;
    links().into_iter().find(|link| link.index == index)
}

/// Parses alternative names from netlink messages. False: these were the last, or there are none.
fn parse_alt_names(bytes: &[u8], found: &mut Vec<(u32, String)>) -> bool {
    parse_messages(bytes, libc::RTM_NEWLINK, |message| {
        let Some(info) = message.first_chunk::<16>() else { return };
        let index = u32::from_ne_bytes([info[4], info[5], info[6], info[7]]);
        let lists = attributes(&message[16..]).filter(|(kind, _)| *kind == libc::IFLA_PROP_LIST);
        let names = lists.flat_map(|(_, list)| attributes(list));
        let names = names.filter(|(kind, _)| *kind == libc::IFLA_ALT_IFNAME);
        found.extend(names.map(|(_, name)| (index, text(name))));
    })
}

/// The text of an attribute.
pub(super) fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value.strip_suffix(&[0]).unwrap_or(value)).into_owned()
}

/// Passes the messages of `kind` in `bytes` to `each`, without their headers. False: these were the
/// last, or there are none.
pub(super) fn parse_messages(mut bytes: &[u8], kind: u16, mut each: impl FnMut(&[u8])) -> bool {
    if bytes.is_empty() {
        return false;
    }
    while let Some(head) = bytes.first_chunk::<16>() {
        let len = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let of = u16::from_ne_bytes([head[4], head[5]]);
        let Some(message) = bytes.get(16..len) else { return false };
        if of != kind {
            return false;
        }
        each(message);
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or(&[]);
    }
    true
}

/// The attributes in `bytes`, up to the first incomplete one.
pub(super) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    /// The bits of the type; the others describe the value's encoding.
    const KIND: u16 = 0x3fff;
    std::iter::from_fn(move || {
        let head = bytes.first_chunk::<4>()?;
        let len = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        let kind = u16::from_ne_bytes([head[2], head[3]]) & KIND;
        let value = bytes.get(4..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, value))
    })
}

/// A netlink socket of a protocol.
pub(super) fn netlink(part: libc::c_int, flags: libc::c_int) -> io::Result<OwnedFd> {
    socket(libc::AF_NETLINK, libc::SOCK_RAW | flags, part)
}

/// Notifications of changes of any interface (rtnetlink). The new state is queried afterwards, so
/// messages are not parsed, and lost ones do no harm.
pub(in super::super) struct LinkEvents(OwnedFd);

impl LinkEvents {
    pub(in super::super) fn new() -> io::Result<Self> {
        let fd = netlink(libc::NETLINK_ROUTE, libc::SOCK_NONBLOCK)?;
        // SAFETY: zeros are a `sockaddr_nl`.
        let mut addr: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        addr.nl_family = libc::AF_NETLINK as libc::sa_family_t;
        addr.nl_groups = libc::RTMGRP_LINK as u32;
        bind(fd.as_raw_fd(), &addr)?;
        Ok(Self(fd))
    }

    /// Whether any interface has changed since the last call.
    pub(in super::super) fn take_changes(&self) -> bool {
        let mut bytes = [0_u8; 8192];
        // An overflow of the socket's buffer is a change too.
        let mut has_more = || match recv(self.fd(), &mut bytes, MsgFlags::empty()) {
            Ok(len) => len > 0,
            Err(errno) => errno == Errno::ENOBUFS,
        };
        let heard = has_more();
        while heard && has_more() {}
        heard
    }

    pub(in super::super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_found_by_name_and_number() {
        let query = LinkQuery::new().unwrap();
        let lo = query.link("lo").unwrap();
        assert!(lo.is_loopback && lo.is_ethernet && lo.mtu >= 1500, "{lo:?}");
        assert_eq!(lo.mac, MacAddr::default());
        assert_eq!(query.link_at(lo.index).unwrap(), lo);
        assert!(links().contains(&lo));
        assert_eq!((configured_rx_queues("lo"), configured_rx_queues("nothing0")), (1, 0));
        for name in ["nothing0", "a-name-that-is-too-long", ""] {
            let why = query.link(name).unwrap_err();
            assert_eq!(why.raw_os_error(), Some(libc::ENODEV), "{name}");
        }
        assert!(query.link_at(u32::MAX >> 1).is_err());
        assert!(!LinkEvents::new().unwrap().take_changes());
    }

    /// Goal: other names are found, and no prefix of the kernel's words makes a panic.
    #[test]
    fn other_names_are_taken_from_the_kernels_words() {
        let attribute = |kind: u16, value: &[u8]| {
            let mut bytes = (4 + value.len() as u16).to_ne_bytes().to_vec();
            bytes.extend(kind.to_ne_bytes());
            bytes.extend(value);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes
        };
        let alt = |name: &[u8]| attribute(libc::IFLA_ALT_IFNAME, name);
        let list = [alt(b"enp3s0\0"), alt(b"rail1\0")].concat();
        let body = [
            attribute(libc::IFLA_IFNAME, b"eth0\0"),
            attribute(libc::IFLA_PROP_LIST | 1 << 15, &list),
        ]
        .concat();
        let mut message = vec![0; 32];
        message[..4].copy_from_slice(&(32 + body.len() as u32).to_ne_bytes());
        message[4..6].copy_from_slice(&libc::RTM_NEWLINK.to_ne_bytes());
        message[20..24].copy_from_slice(&7_u32.to_ne_bytes());
        message.extend(body);
        let mut found = Vec::new();
        assert!(parse_alt_names(&message, &mut found));
        assert_eq!(found, [(7, "enp3s0".to_owned()), (7, "rail1".to_owned())]);
        let mut done = message.clone();
        done[4..6].copy_from_slice(&(libc::NLMSG_DONE as u16).to_ne_bytes());
        assert!(!parse_alt_names(&done, &mut Vec::new()));
        for len in 0..message.len() {
            parse_alt_names(&message[..len], &mut Vec::new());
            attributes(&message[len..]).for_each(drop);
            let mut flipped = message.clone();
            flipped[len] ^= 0xff;
            parse_alt_names(&flipped, &mut Vec::new());
        }
        // What this machine has, if anything.
        alt_names();
    }
}
