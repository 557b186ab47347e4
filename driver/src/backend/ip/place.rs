//! Where a port is: an IPv4 address and a UDP port that are this process's alone.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;

use super::super::netdev::hold;
use super::super::udp::{PORTS_TRIED, keep_port, mac_of};
use crate::error::OpenError;
use crate::port::MTU_MIN;

/// Where to be, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpSettings {
    /// The port's IPv4 address. The kernel of the host may have the same one.
    pub address: Ipv4Addr,
    /// Bits of it that the hosts of its segment have in common, 1 to 32. All others are reached by
    /// the gateway.
    pub prefix_len: u8,
    /// The router of the segment. Default: none, and only the segment is reached.
    pub gateway: Option<Ipv4Addr>,
    /// The UDP port, one of [`PORTS`](super::super::udp::PORTS). Default: the first free one of
    /// [`PORTS_TRIED`].
    pub port: Option<u16>,
    /// Routers that a datagram may pass. Default 64.
    pub ttl: u8,
    /// Differentiated services code point of the datagrams, 0 to 63. Default 0.
    pub dscp: u8,
    /// Whether datagrams say that they may be marked for congestion. Default: yes.
    pub ecn: bool,
    /// Whether datagrams have a sum. The packet inside has a better one, and a sum takes a look at
    /// every byte. Default: no; for networks that drop datagrams without.
    pub sums: bool,
    /// Largest number of bytes after the Ethernet header of a frame inside, 256 to what the port
    /// below carries less 42, which is the default.
    pub mtu: Option<usize>,
}

impl IpSettings {
    /// The settings of a port at `address`.
    pub fn at(address: Ipv4Addr, prefix_len: u8) -> Self {
        Self {
            address,
            prefix_len,
            gateway: None,
            port: None,
            ttl: 64,
            dscp: 0,
            ecn: true,
            sums: false,
            mtu: None,
        }
    }

    /// Whether they make sense.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<(), OpenError> {
        let (ip, len) = (self.address, self.prefix_len);
        let net = Net::of(self);
        let refuse = |why: String, mend: &str| Err(self.refuse(libc::EINVAL, why, mend));
        if !(1..=32).contains(&len) {
            let why = format!("a prefix of {len} bits");
            return refuse(why, "write 1 to 32, as in ip(10.1.1.7/24)");
        }
        if !net.is_host(ip) {
            let why = format!("{ip} is no address of a host in its network of {len} bits");
            return refuse(why, "write the port's own address and the length of its prefix");
        }
        if let Some(gateway) = self.gateway {
            // With no network of its own, a host of a cloud has a gateway all the same.
            if gateway == ip || len < 32 && !(net.is_near(gateway) && net.is_host(gateway)) {
                let why = format!("the gateway {gateway} is no other host of the network");
                return refuse(why, "write the router's address there, see: ip route");
            }
        }
        if let Some(port) = self.port
            && mac_of(SocketAddrV4::new(ip, port)).is_none()
        {
            let why = format!("UDP port {port} has no address of the fabric");
            return refuse(why, "write 49152 to 65535: port=50000");
        }
        if self.dscp > 63 || self.ttl == 0 {
            return refuse("no such dscp= or ttl=".into(), "write dscp=0 to 63, ttl=1 to 255");
        }
        Ok(())
    }

    /// The MTU of a port over one with `below`.
    pub(super) fn mtu_over(&self, below: usize, headers: usize) -> Result<usize, OpenError> {
        let max = below.saturating_sub(headers);
        let mtu = self.mtu.unwrap_or(max);
        if (MTU_MIN..=max).contains(&mtu) {
            return Ok(mtu);
        }
        Err(OpenError::BadMtu { mtu, min: MTU_MIN, max: max.max(MTU_MIN) })
    }

    pub(super) fn refuse(
        &self,
        errno: i32,
        why: impl Into<String>,
        mend: impl Into<String>,
    ) -> OpenError {
        let port = format!("ip({}/{})", self.address, self.prefix_len);
        OpenError::Device { port, why: why.into(), mend: mend.into(), errno }
    }

    /// As it is written, for a port at `port`.
    pub(super) fn text(&self, port: u16) -> String {
        let Self { address, prefix_len, gateway, ttl, dscp, .. } = self;
        let mut text = format!("{address}/{prefix_len},port={port}");
        if let Some(gateway) = gateway {
            text += &format!(",gw={gateway}");
        }
        if *ttl != 64 {
            text += &format!(",ttl={ttl}");
        }
        if *dscp != 0 {
            text += &format!(",dscp={dscp}");
        }
        if !self.ecn {
            text += ",ecn=no";
        }
        if self.sums {
            text += ",sum=yes";
        }
        if let Some(mtu) = self.mtu {
            text += &format!(",mtu={mtu}");
        }
        format!("ip({text})")
    }
}

/// The network that a port is in, and the way out of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Net {
    own: u32,
    mask: u32,
    gateway: Option<Ipv4Addr>,
}

impl Net {
    pub(super) fn of(settings: &IpSettings) -> Self {
        let len = u32::from(settings.prefix_len.min(32));
        let mask = u32::MAX.checked_shl(32 - len).unwrap_or(0);
        Self { own: settings.address.into(), mask, gateway: settings.gateway }
    }

    /// Whether `ip` is on the segment, or would be.
    #[inline]
    pub(super) fn is_near(self, ip: Ipv4Addr) -> bool {
        (u32::from(ip) ^ self.own) & self.mask == 0
    }

    /// Whether a host can have `ip`, seen from here: not a network's own, a group's, everybody's.
    fn is_host(self, ip: Ipv4Addr) -> bool {
        let number = u32::from(ip);
        let host = number & !self.mask;
        // Networks of one or two hosts have no other addresses, RFC 3021.
        let is_special = self.is_near(ip) && !self.mask > 1 && (host == 0 || host == !self.mask);
        let [first, ..] = ip.octets();
        !(is_special || first == 0 || first == 127 || first >= 224)
    }

    /// Who is next on the way to `ip`. `None`: it is outside, and there is no gateway, or nobody
    /// has such an address.
    #[inline]
    pub(super) fn hop(self, ip: Ipv4Addr) -> Option<Ipv4Addr> {
        if !self.is_host(ip) {
            return None;
        }
        if self.is_near(ip) { Some(ip) } else { self.gateway }
    }

    /// Whether `ip` can be next on a way.
    pub(super) fn is_hop(self, ip: Ipv4Addr) -> bool {
        self.is_near(ip) && self.is_host(ip) || self.gateway == Some(ip)
    }
}

/// Keeps an address and a UDP port for this process.
pub struct Place {
    pub(super) addr: SocketAddrV4,
    _name: OwnedFd,
    /// If the kernel has the address as well: else it would tell senders that nobody is there.
    socket: Option<OwnedFd>,
}

impl Place {
    /// Whether the kernel has the address as well.
    pub(super) fn is_kernels(&self) -> bool {
        self.socket.is_some()
    }

    /// Takes the place that `settings` name. `beside_kernel`: the kernel hears of what comes too.
    ///
    /// # Errors
    /// [`OpenError`]: a process has it.
    pub fn claim(settings: &IpSettings, beside_kernel: bool) -> Result<Self, OpenError> {
        settings.check()?;
        let is_taken = |e: &io::Error| e.raw_os_error() == Some(libc::EADDRINUSE);
        let os = |e: &io::Error| {
            let errno = e.raw_os_error().unwrap_or(libc::EIO);
            settings.refuse(errno, format!("cannot claim a UDP port: {e}"), "see: ss -uanp")
        };
        let ports = settings.port.map_or(PORTS_TRIED, |port| port..=port);
        for port in ports.clone() {
            match claim(SocketAddrV4::new(settings.address, port), beside_kernel) {
                Ok(place) => return Ok(place),
                Err(e) if is_taken(&e) => {}
                Err(e) => return Err(os(&e)),
            }
        }
        let (first, last) = (ports.start(), ports.end());
        let why = match settings.port {
            Some(port) => format!("UDP port {port} is in use by another process"),
            None => format!("UDP ports {first} to {last} are all in use"),
        };
        let mend =
            format!("name another, 49152 to 65535: port=50000; see: ss -ulnp sport = :{first}");
        Err(settings.refuse(libc::EADDRINUSE, why, mend))
    }

    /// Where that is.
    pub fn addr(&self) -> SocketAddrV4 {
        self.addr
    }
}

fn claim(addr: SocketAddrV4, beside_kernel: bool) -> io::Result<Place> {
    let name = hold(&format!("barewire-ip-{addr}"))?;
    let socket = if beside_kernel { keep_port(addr.into())? } else { None };
    Ok(Place { addr, _name: name, socket })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(len: u8, gateway: Option<[u8; 4]>) -> IpSettings {
        let at = IpSettings::at(Ipv4Addr::new(10, 1, 1, 7), len);
        IpSettings { gateway: gateway.map(Ipv4Addr::from), ..at }
    }

    #[test]
    fn the_next_hop_is_the_host_itself_or_the_gateway() {
        let gateway = Ipv4Addr::new(10, 1, 1, 1);
        let (alone, net) =
            (Net::of(&settings(24, None)), Net::of(&settings(24, Some([10, 1, 1, 1]))));
        let near = Ipv4Addr::new(10, 1, 1, 200);
        let far = Ipv4Addr::new(10, 1, 2, 200);
        assert_eq!((alone.hop(near), alone.hop(far)), (Some(near), None));
        assert_eq!((net.hop(near), net.hop(far)), (Some(near), Some(gateway)));
        for nobody in [[10, 1, 1, 0], [10, 1, 1, 255], [0, 0, 0, 0], [127, 0, 0, 1], [224, 0, 0, 1]]
        {
            assert_eq!(net.hop(nobody.into()), None, "{nobody:?}");
        }
        assert!(net.hop([255; 4].into()).is_none());
        assert!(net.is_hop(near) && net.is_hop(gateway) && !net.is_hop(far));
        // A host of a cloud: nobody is near.
        let cloud = Net::of(&settings(32, Some([10, 1, 1, 1])));
        assert_eq!((cloud.hop(near), cloud.hop(far)), (Some(gateway), Some(gateway)));
        // A wire between two.
        let two = Net::of(&settings(31, None));
        assert_eq!(two.hop(Ipv4Addr::new(10, 1, 1, 6)), Some(Ipv4Addr::new(10, 1, 1, 6)));
    }

    #[test]
    fn settings_that_make_no_sense_say_so() {
        let good = settings(24, Some([10, 1, 1, 1]));
        good.check().unwrap();
        settings(32, Some([10, 9, 9, 9])).check().unwrap();
        for (bad, says) in [
            (settings(0, None), "write 1 to 32"),
            (settings(33, None), "write 1 to 32"),
            (settings(24, Some([10, 1, 2, 1])), "ip route"),
            (settings(24, Some([10, 1, 1, 7])), "ip route"),
            (settings(24, Some([10, 1, 1, 255])), "ip route"),
            (
                IpSettings { address: [10, 1, 1, 255].into(), ..good.clone() },
                "no address of a host",
            ),
            (IpSettings { address: [127, 0, 0, 1].into(), ..good.clone() }, "no address of a host"),
            (IpSettings { port: Some(80), ..good.clone() }, "49152 to 65535"),
            (IpSettings { dscp: 64, ..good.clone() }, "dscp=0 to 63"),
            (IpSettings { ttl: 0, ..good.clone() }, "ttl=1 to 255"),
        ] {
            let said = bad.check().unwrap_err().to_string();
            assert!(said.contains(says), "{said}");
        }
    }

    #[test]
    fn a_place_is_one_processs() {
        let at = settings(24, None);
        let first = Place::claim(&at, true).unwrap();
        let second = Place::claim(&at, true).unwrap();
        assert_ne!(first.addr(), second.addr());
        let named = IpSettings { port: Some(first.addr().port()), ..at };
        let said = Place::claim(&named, true).err().unwrap().to_string();
        assert!(said.contains("in use by another process") && said.contains("ss -ulnp"), "{said}");
        drop(first);
        Place::claim(&named, true).unwrap();
    }
}
