//! Properties of the device below a port, from its name, sysfs and netlink.

use std::net::IpAddr;

use super::host_port::{device_of, udp_host_port};
use super::near::{kind_of, options};
use super::nics::full_address;
use super::shm_settings;
use super::switch::full_device;
use crate::backend::inet::addresses;
use crate::backend::netdev::link_and_driver;
use crate::backend::vfio::survey;
use crate::port::MacAddr;

/// The device below a port. Unknown properties are `None`, 0 or empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// Name of the network interface, else the PCI address, else the file of a segment or memif
    /// socket, else DPDK's name.
    pub name: String,
    /// The device's own MAC address, whatever the port's is.
    pub mac: Option<MacAddr>,
    /// IP address of a port over UDP.
    pub ip: Option<IpAddr>,
    /// MTU of the device; of a segment, that of its ports.
    pub mtu: usize,
    /// Link speed, bit/s.
    pub bps: u64,
    /// Whether it is administratively up. `None` for memory.
    pub is_up: Option<bool>,
    /// Whether it has a carrier; false while it is down.
    pub has_carrier: Option<bool>,
    /// Name of the kernel driver.
    pub driver: Option<String>,
    /// Firmware version.
    pub firmware: Option<String>,
    /// PCI address.
    pub pci: Option<PciAddress>,
    /// PCI vendor id, device id and revision.
    pub ids: Option<[u16; 3]>,
}

impl Device {
    /// A device of which only the name is known.
    fn named(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }
}

/// A PCI address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciAddress {
    /// Domain.
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device, 0 to 31.
    pub device: u8,
    /// Function, 0 to 7.
    pub function: u8,
}

impl PciAddress {
    /// Parses an address such as `0000:05:00.0`; `None` if it is invalid.
    pub fn parse(bdf: &str) -> Option<Self> {
        let full = full_address(bdf)?;
        let (rest, function) = full.split_once('.')?;
        let [domain, bus, device] = rest.split(':').collect::<Vec<_>>()[..] else { return None };
        let hex = |text: &str| u8::from_str_radix(text, 16).ok();
        let (device, function) = (hex(device)?, hex(function)?);
        let domain = u32::from_str_radix(domain, 16).ok()?;
        let is_sound = device < 32 && function < 8;
        is_sound.then_some(Self { domain, bus: hex(bus)?, device, function })
    }
}

/// Whether the port named `port` and `spec` are on the same device, whatever wraps either. For
/// `udp`: the same IP address, and the same UDP port if `spec` has one. Queries the kernel if
/// `spec` is `udp` and names an interface.
pub fn is_same_device(port: &str, spec: &str) -> bool {
    let (Some(port), Some(device)) = (device_of(port), device_of(spec)) else { return false };
    match (kind_of(port), kind_of(device)) {
        ("udp", "udp") => match (udp_host_port(port), udp_host_port(device)) {
            (Some((ip, number)), Some((of, wanted))) => {
                ip == of && (wanted.is_none() || wanted == number)
            }
            _ => false,
        },
        (kind, of) => kind == of && full_device(port) == full_device(device),
    }
}

/// The device below the port that `spec` names, whatever wraps it; `spec` must be no pattern. Opens
/// and changes nothing; about ten system calls. An invalid `spec` gives an unknown device.
pub fn device(spec: &str) -> Device {
    let device = device_of(spec).unwrap_or("");
    let ip = udp_host_port(spec).map(|(ip, _)| ip);
    let name = options(device).2;
    let first = device.split_once(':').map_or("", |(_, rest)| rest).split(',').next().unwrap_or("");
    let found = match kind_of(device) {
        "shm" => segment(device),
        "afpacket" | "xdp" => interface(first),
        "udp" => ip.and_then(interface_of).map_or_else(Device::default, |on| interface(&on)),
        "vfio" => pci_device(&first.to_ascii_lowercase()),
        "dpdk" => pci_device(name.split(',').next().unwrap_or("")),
        "memif" => Device::named(first),
        _ => Device::default(),
    };
    Device { ip, ..found }
}

fn segment(spec: &str) -> Device {
    let Ok(settings) = shm_settings(spec) else { return Device::default() };
    Device {
        name: settings.path().display().to_string(),
        mtu: settings.mtu_here().unwrap_or(0),
        ..Device::default()
    }
}

fn interface_of(ip: IpAddr) -> Option<String> {
    addresses().into_iter().find(|(_, other)| *other == ip).map(|(name, _)| name)
}

/// A network interface.
fn interface(name: &str) -> Device {
    let Some((link, info)) = link_and_driver(name) else {
        return Device::named(name);
    };
    // Only PCI buses have addresses of this form.
    let card = info.bus.as_deref().map(pci_device).filter(|card| card.ids.is_some());
    Device {
        name: link.name,
        mac: Some(link.mac).filter(|mac| *mac != MacAddr::default()),
        mtu: link.mtu,
        bps: link.bps,
        is_up: Some(link.is_up),
        has_carrier: Some(link.is_up && link.has_carrier),
        driver: info.driver,
        firmware: info.firmware,
        ..card.unwrap_or_default()
    }
}

/// A PCI device, if `name` is a PCI address.
fn pci_device(name: &str) -> Device {
    let bdf = full_address(name).unwrap_or_default();
    let Some(ids) = survey::ids_of(&bdf).filter(|_| !bdf.is_empty()) else {
        return Device::named(name);
    };
    Device {
        driver: survey::driver_at(&bdf),
        pci: PciAddress::parse(&bdf),
        ids: Some(ids),
        name: bdf,
        ..Device::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::netdev::links;

    #[test]
    fn a_port_is_on_its_device_however_that_is_written() {
        for (port, spec, is) in [
            ("afpacket:eth0,switch=yes", "afpacket:eth0", true),
            ("fault(loss=0.1):afpacket:eth0,near=shm:x", "afpacket:eth0,mtu=900", true),
            ("afpacket:eth0", "afpacket:eth01", false),
            ("afpacket:eth0", "xdp:eth0", false),
            ("ip(10.1.1.7/24):xdp:eth0", "xdp:eth0,mode=native", true),
            ("ip(10.1.1.7/24):xdp:eth0", "udp:10.1.1.7", false),
            ("udp:127.0.0.1:50000,near=yes", "udp:lo", true),
            ("udp:127.0.0.1:50000", "udp:127.0.0.1", true),
            ("udp:127.0.0.1:50000", "udp:127.0.0.1:50000", true),
            ("udp:127.0.0.1:50000", "udp:127.0.0.1:50001", false),
            ("udp:127.0.0.1:50000", "udp:127.0.0.2", false),
            ("udp:192.0.2.1:50000", "udp:nothing0", false),
            ("vfio:0000:0a:00.0", "vfio:0A:00.0,mtu=900", true),
            ("vfio:0000:0a:00.0", "dpdk:0000:0a:00.0", false),
            ("dpdk(mtu=9000):net_tap0,iface=b", "dpdk:net_tap0", true),
            ("memif:@job7,role=server", "memif:@job7", true),
            ("memif:@job7", "memif:@job8", false),
            ("fault(", "fault(", false),
        ] {
            assert_eq!(is_same_device(port, spec), is, "{port} on {spec}");
        }
    }

    #[test]
    fn a_place_on_the_bus_is_read() {
        let is = |domain, bus, device, function| Some(PciAddress { domain, bus, device, function });
        for (text, address) in [
            ("0000:05:00.0", is(0, 5, 0, 0)),
            ("81:1f.7", is(0, 0x81, 31, 7)),
            ("10000:e1:00.1", is(0x10000, 0xe1, 0, 1)),
            ("0000:05:20.0", None),
            ("0000:05:00.8", None),
            ("eth0", None),
            ("", None),
        ] {
            assert_eq!(PciAddress::parse(text), address, "{text}");
        }
    }

    /// Goal: each interface of this machine is told as the kernel tells it, by whichever port.
    #[test]
    fn an_interface_is_told_as_it_is() {
        for link in links().into_iter().filter(|link| link.is_ethernet) {
            for kind in ["afpacket", "xdp", "fault(loss=0.1):vlan(7):afpacket"] {
                let is = device(&format!("{kind}:{},mtu=600", link.name));
                assert_eq!((is.name, is.mtu), (link.name.clone(), link.mtu));
                assert_eq!((is.mac.unwrap_or_default(), is.bps), (link.mac, link.bps));
                assert_eq!(is.is_up, Some(link.is_up));
                assert_eq!(is.has_carrier, Some(link.is_up && link.has_carrier));
                assert_eq!(is.pci.is_some(), is.ids.is_some());
            }
        }
        let card = survey::nics().into_iter().find(|nic| !nic.interfaces.is_empty());
        let Some(card) = card else { return };
        let is = device(&format!("afpacket:{}", card.interfaces[0]));
        assert_eq!(is.pci, PciAddress::parse(&card.bdf));
        assert_eq!(is.ids.map(|[vendor, device, _]| (vendor, device)), Some(card.id));
        let is = device(&format!("vfio:{}", card.bdf));
        assert_eq!((is.name, is.driver), (card.bdf.clone(), card.driver));
        assert_eq!((is.pci, is.is_up), (PciAddress::parse(&card.bdf), None));
    }

    #[test]
    fn unknown_properties_of_a_device_are_none() {
        let lo = device("udp:127.0.0.1:50000");
        assert_eq!((lo.name.as_str(), lo.mac, lo.ip), ("lo", None, Some([127, 0, 0, 1].into())));
        assert_eq!((lo.pci, lo.bps), (None, 0));
        for (spec, name) in [
            ("afpacket:nothing0", "nothing0"),
            ("vfio:fffe:00:00.0", "fffe:00:00.0"),
            ("dpdk:net_tap0,iface=a", "net_tap0"),
            ("memif:/run/vpp/memif.sock,role=server", "/run/vpp/memif.sock"),
            ("memif:@job", "@job"),
            ("udp:192.0.2.1", ""),
            ("auto", ""),
            ("fault(", ""),
            ("", ""),
        ] {
            let is = device(spec);
            let ip = is.ip;
            assert_eq!(is, Device { name: name.into(), ip, ..Device::default() }, "{spec}");
        }
    }

    /// Goal: the MTU is the one that a port has.
    #[test]
    fn a_segment_has_the_mtu_of_its_ports() {
        let name = format!("device-{}", std::process::id());
        for options in ["", ",ring=65536", ",mtu=9000", ",mtu=900,ring=65536"] {
            let spec = format!("shm:{name}{options}");
            let before = device(&spec);
            assert!(before.name.starts_with("/dev/shm/barewire-") && before.is_up.is_none());
            let port = crate::open::open(&spec).unwrap();
            assert_eq!(before.mtu, port.caps().mtu, "{spec}");
            let other = device(&format!("shm:{name}"));
            let usual = crate::open::open(&format!("shm:{name}")).unwrap();
            assert_eq!(other.mtu, usual.caps().mtu, "beside {spec}");
        }
        assert_eq!(device("shm:x,ring=7").mtu, 0);
    }
}
