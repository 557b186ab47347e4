//! Names of ports with a VLAN tag on their frames: `vlan(100,pcp=3):PORT`.

use super::ip::{self, BELOW, inner_device_offset};
use super::near::kind_of;
use super::spec::{PortInfo, bad_spec, parse, split_wrapper};
use super::switch;
use crate::backend::vlan::{Vlan, VlanSettings};
use crate::error::OpenError;
use crate::port::Port;

/// Opens `vlan(ID,...):PORT`; `below` opens `PORT` for the given VLAN.
pub(super) fn open(
    spec: &str,
    below: impl Fn(&str, u16) -> Result<Box<dyn Port>, OpenError>,
) -> Result<Box<dyn Port>, OpenError> {
    let (wrapper, settings, inner) = parts(spec)?;
    let port = below(&inner, settings.id)?;
    let takes_off = ["afpacket", "xdp"].contains(&kind_of(&inner[inner_device_offset(&inner)..]));
    Ok(Box::new(Vlan::new(port, settings, takes_off, wrapper)?))
}

/// Parses `spec`: the wrapper's text, the tag, and the port below without options of a stand-alone
/// port.
pub(super) fn parts(spec: &str) -> Result<(&str, VlanSettings, String), OpenError> {
    let (wrapper, list, inner) = split_wrapper(spec)?;
    let (id, options) = list.split_once(',').unwrap_or((list, ""));
    if id.is_empty() {
        return Err(bad_spec(spec, "which VLAN? write vlan(100):PORT or vlan(100,pcp=3):PORT"));
    }
    let mut settings = VlanSettings { id: parse(wrapper, id)?, pcp: 0 };
    for part in options.split(',').filter(|part| !part.is_empty()) {
        match part.split_once('=') {
            Some(("pcp", value)) => settings.pcp = parse(wrapper, value)?,
            _ => return Err(bad_spec(wrapper, format!("no option \"{part}\"; there is pcp="))),
        }
    }
    settings.check().map_err(|why| bad_spec(wrapper, why))?;
    let (before, device) = inner.split_at(inner_device_offset(inner));
    let is_below = BELOW.iter().any(|(below, _)| *below == kind_of(device));
    if !is_below || before.contains("vlan(") {
        let why = "vlan() stands around a port that writes Ethernet frames, afpacket:, xdp:, \
                   vfio:, dpdk: or memif:, and inside of ip()";
        return Err(bad_spec(spec, why));
    }
    let (device, through) = switch::split(device, false)?;
    if through == switch::SwitchOption::Yes {
        return Err(bad_spec(spec, "vlan() takes the device itself; leave out switch=yes"));
    }
    ip::refuse_options(spec, &device, &["ethertype"])?;
    Ok((wrapper, settings, format!("{before}{device}")))
}

/// Entry of the list of ports.
pub(super) fn kind_info() -> PortInfo {
    PortInfo {
        spec: "vlan".into(),
        what: "a VLAN, by a port of Ethernet frames".into(),
        why_not: Some("name VLAN, priority and port: vlan(100,pcp=3):afpacket:eth0".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_the_tag_and_the_port_below() {
        for (spec, id, pcp, below) in [
            ("vlan(100):afpacket:eth0,mtu=900", 100, 0, "afpacket:eth0,mtu=900"),
            ("vlan(0,pcp=7):fault(loss=0.1):xdp:eth0", 0, 7, "fault(loss=0.1):xdp:eth0"),
            (
                "vlan(4094,pcp=3):dpdk(mtu=9000,switch=no):05:00.0",
                4094,
                3,
                "dpdk(mtu=9000):05:00.0",
            ),
        ] {
            let (_, settings, inner) = parts(spec).unwrap();
            assert_eq!((settings, inner.as_str()), (VlanSettings { id, pcp }, below), "{spec}");
        }
    }

    #[test]
    fn wrong_names_say_what_to_write() {
        for (spec, says) in [
            ("vlan:afpacket:eth0", "vlan(OPTION=VALUE,...):PORT"),
            ("vlan():afpacket:eth0", "write vlan(100):PORT"),
            ("vlan(x):afpacket:eth0", "not a number; write digits"),
            ("vlan(4095):afpacket:eth0", "vlan(4094)"),
            ("vlan(5,pcp=8):afpacket:eth0", "pcp=7"),
            ("vlan(5,dei=1):afpacket:eth0", "there is pcp="),
            ("vlan(5):udp:lo", "afpacket:, xdp:"),
            ("vlan(5):shm", "afpacket:, xdp:"),
            ("vlan(5):vlan(6):afpacket:eth0", "afpacket:, xdp:"),
            ("vlan(5):ip(10.1.1.7/24):afpacket:eth0", "inside of ip()"),
            ("vlan(5):vfio:05:00.0,switch=yes", "leave out switch=yes"),
            ("vlan(5):dpdk(ethertype=0x88b5):net_tap0", "ethertype= is for frames"),
        ] {
            let said = parts(spec).unwrap_err().to_string();
            assert!(said.contains(says) && !said.contains('\n'), "{spec}: {said}");
        }
    }
}
