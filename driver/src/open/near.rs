//! The option `near=` of ports that leave the node: processes of one node additionally reach each
//! other through a shared-memory segment.

use super::host_port::udp_host_port;
use super::spec::{bad_spec, skip_wrappers, split_option};
use crate::backend::any_port::AnyPort;
use crate::backend::inet::Prefix;
use crate::backend::near::{Near, node_segment};
use crate::backend::shm::ShmSettings;
use crate::error::OpenError;
use crate::port::Port;

/// Kinds of ports that have the option.
const KINDS: &[&str] = &["afpacket", "xdp", "udp", "vfio", "memif", "dpdk"];

/// Value of the option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NearOption {
    /// No segment.
    No,
    /// The node's segment.
    Node,
    /// Another segment.
    Named(String),
}

impl NearOption {
    fn parse(spec: &str, value: &str) -> Result<Self, OpenError> {
        match value {
            "no" => Ok(Self::No),
            "yes" => Ok(Self::Node),
            _ => match value.strip_prefix("shm:").filter(|name| !name.is_empty()) {
                Some(name) => Ok(Self::Named(name.to_owned())),
                None => Err(bad_spec(spec, "write near=yes, near=no or near=shm:NAME")),
            },
        }
    }

    /// Settings of the near segment of the port `far`, if any.
    fn segment(&self, far: &str) -> Result<Option<ShmSettings>, OpenError> {
        Ok(match self {
            Self::No => None,
            Self::Node => Some(ShmSettings::named(&node_segment_name(far)?)),
            Self::Named(name) => Some(ShmSettings::named(name)),
        })
    }

    fn text(&self) -> String {
        match self {
            Self::No => "near=no".to_owned(),
            Self::Node => "near=yes".to_owned(),
            Self::Named(name) => format!("near=shm:{name}"),
        }
    }

    /// Checks whether [`join`](Self::join) would succeed, as far as possible.
    pub(super) fn check(&self, far: &str) -> Result<(), OpenError> {
        self.segment(far)?.map_or(Ok(()), |segment| segment.check_here())
    }

    /// Adds a near side to `far`, if the option says so.
    pub(super) fn join(&self, far: Box<dyn Port>) -> Result<Box<dyn Port>, OpenError> {
        let Some(segment) = self.segment(&far.caps().name)? else { return Ok(far) };
        let name = with_option(&far.caps().name, &self.text());
        let near = Near::join(&segment, AnyPort::from(far), name);
        Ok(Box::new(near.map_err(|(_far, why)| why)?))
    }
}

/// Name of the node's segment for the port `far`. IPv6 ports have one segment per prefix: the
/// prefix is not part of a fabric address, so hosts of different prefixes may have equal addresses.
fn node_segment_name(far: &str) -> Result<String, OpenError> {
    let node = node_segment()?;
    match udp_host_port(far).map(|(ip, _)| Prefix::of(ip)) {
        Some(Prefix::V6(prefix)) => {
            let prefix: String = prefix.iter().map(|byte| format!("{byte:02x}")).collect();
            Ok(format!("{node}-{prefix}"))
        }
        _ => Ok(node),
    }
}

/// Adds the node's segment to `far` as its near side, if it can be joined. The port's name does not
/// mention it, since the requested name did not.
pub(super) fn join_node_segment(far: Box<dyn Port>) -> Box<dyn Port> {
    join_if_possible(node_segment_name(&far.caps().name).map(|name| ShmSettings::named(&name)), far)
}

fn join_if_possible(segment: Result<ShmSettings, OpenError>, far: Box<dyn Port>) -> Box<dyn Port> {
    let name = far.caps().name.clone();
    let joined = match segment {
        Ok(segment) => Near::join(&segment, AnyPort::from(far), name.clone()),
        Err(why) => Err((far.into(), why)),
    };
    joined.map_or_else(
        |(far, why)| {
            tracing::warn!(
                port = %name,
                "processes of this node are not reached through memory: {why}; or write \
                 near=no"
            );
            far.into()
        },
        |near| Box::new(near) as Box<dyn Port>,
    )
}

/// Whether a device leads out of the node rather than to another process of it.
pub(super) fn is_external(spec: &str) -> bool {
    let device = &spec[device_offset(spec)..];
    match kind_of(device) {
        "afpacket" | "xdp" | "udp" | "vfio" => true,
        // DPDK devices with a PCI address do; others are virtual.
        "dpdk" => options(device).2.split(',').next().is_some_and(|name| name.contains(':')),
        _ => false,
    }
}

/// Removes the option from the device's part of `spec`. `fault(...)` applies to the far side only;
/// `pcap(...)` is applied to the whole port.
pub(super) fn split(spec: &str) -> Result<(String, Option<NearOption>), OpenError> {
    let mut choice = None;
    let (before, device) = spec.split_at(device_offset(spec));
    if !KINDS.contains(&kind_of(device)) {
        return Ok((spec.to_owned(), None));
    }
    let mut left = Vec::new();
    for (i, part) in options(device).1.split(',').enumerate() {
        match split_option(part) {
            ("near", value) if i > 0 || is_dpdk(device) => {
                choice = Some(NearOption::parse(spec, value)?);
            }
            _ => left.push(part),
        }
    }
    let Some(choice) = choice else { return Ok((spec.to_owned(), None)) };
    Ok((format!("{before}{}", with_options(device, &left.join(","))), Some(choice)))
}

/// Adds an option to a port name.
pub(super) fn with_option(spec: &str, option: &str) -> String {
    let (before, device) = spec.split_at(device_offset(spec));
    let is = options(device).1;
    let all = if is.is_empty() { option.to_owned() } else { format!("{is},{option}") };
    format!("{before}{}", with_options(device, &all))
}

/// Offset of the device in `spec`, behind its wrappers (faults, tunnels).
pub(super) fn device_offset(spec: &str) -> usize {
    skip_wrappers(spec, &["fault(", "ip(", "vlan("]).unwrap_or(spec.len())
}

pub(super) fn kind_of(device: &str) -> &str {
    device.split([':', ',', '(']).next().unwrap_or("")
}

fn is_dpdk(device: &str) -> bool {
    kind_of(device) == "dpdk"
}

/// Splits `device` into the text before its options, the options (which begin with the device's
/// name unless it is DPDK's), and the text behind.
pub(super) fn options(device: &str) -> (&str, &str, &str) {
    if !is_dpdk(device) {
        return ("", device, "");
    }
    let behind = device.strip_prefix("dpdk(");
    match behind.and_then(|behind| behind.split_once("):")) {
        Some((list, rest)) => ("dpdk", list, rest),
        None => ("dpdk", "", device.strip_prefix("dpdk:").unwrap_or("")),
    }
}

/// `device` with other options.
pub(super) fn with_options(device: &str, list: &str) -> String {
    if !is_dpdk(device) {
        return list.to_owned();
    }
    match (options(device).2, list) {
        (rest, "") => format!("dpdk:{rest}"),
        (rest, list) => format!("dpdk({list}):{rest}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is(spec: &str) -> (String, NearOption) {
        let (left, choice) = split(spec).unwrap_or_else(|e| panic!("{spec}: {e}"));
        (left, choice.unwrap_or(NearOption::No))
    }

    #[test]
    fn a_nic_port_joins_the_node_segment_by_default() {
        for spec in ["afpacket:eth0,mtu=900", "udp:lo", "vfio:05:00.0", "fault():udp:lo"] {
            assert!(is_external(&format!("ip(10.1.1.7/24):{spec}")), "{spec}");
            assert!(is_external(spec), "{spec}");
        }
        assert!(is_external("dpdk:0000:05:00.0") && is_external("dpdk(mtu=9000):0000:05:00.0,x=1"));
        for spec in ["shm", "memif:@x", "dpdk:net_tap0,iface=a:b", "pcap(file=a):shm", "fault(", ""]
        {
            assert!(!is_external(spec), "{spec}");
        }
    }

    /// Goal: a segment that cannot be joined costs the near side and nothing else.
    #[test]
    fn a_port_without_a_segment_is_opened_all_the_same() {
        let far = || {
            let settings = crate::backend::udp::UdpSettings::at("127.0.0.1");
            Box::new(crate::backend::udp::Udp::open(&settings).unwrap())
        };
        let dir = tempfile::tempdir().unwrap();
        let mut segment = ShmSettings { dir: dir.path().into(), ..ShmSettings::named("x") };
        let near = join_if_possible(Ok(segment.clone()), far());
        assert!(near.caps().near_mtu > 60_000 && near.caps().name.starts_with("udp:127.0.0.1:"));
        segment.dir.push("nowhere");
        let port = join_if_possible(Ok(segment), far());
        assert_eq!((port.caps().near_mtu, port.damages()), (0, true));
        assert_eq!(join_if_possible(Err(bad_spec("x", "no")), far()).caps().near_mtu, 0);
    }

    /// Goal: no text panics, and what is left of it is looked at by others as it was written.
    /// Method: texts of the pieces that there are, in any order.
    #[test]
    fn any_text_is_split() {
        const PIECES: &[&str] = &[
            "fault(",
            "ip(10.1.1.7/24",
            "pcap(file=",
            "):",
            ":",
            ",",
            ",near=yes",
            ",near=no",
            ",near=shm:x",
            "near",
            "=",
            "yes",
            "no",
            "shm:",
            "x",
            "dpdk",
            "dpdk(",
            "udp:",
            "memif:@",
            "afpacket:",
            "vfio:",
            "é",
            "loss=0.1",
            "mtu=9",
            "(",
            ")",
        ];
        let mut state = 1_u64;
        let mut next = |n: usize| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 33) as usize % n
        };
        let mut found = 0;
        for _ in 0..200_000 {
            let spec: String = (0..next(10)).map(|_| PIECES[next(PIECES.len())]).collect();
            is_external(&spec);
            let Ok((left, choice)) = split(&spec) else { continue };
            let Some(choice) = choice else {
                assert_eq!(left, spec);
                continue;
            };
            found += 1;
            // Taken out, it is gone.
            assert_eq!(split(&left).unwrap(), (left.clone(), None), "{spec}");
            // Without a device there is nothing to add it to.
            if !left.is_empty() && kind_of(&left[device_offset(&left)..]) != "dpdk" {
                let again = with_option(&left, &choice.text());
                assert_eq!(split(&again).unwrap(), (left, Some(choice)), "{spec}");
            }
        }
        assert!(found > 100, "{found}");
    }

    /// Goal: the option is found wherever it may stand and nothing else is changed; written again
    /// it means the same.
    #[test]
    fn the_option_is_taken_out_and_put_back() {
        let named = NearOption::Named("job7".into());
        for (spec, left, choice) in [
            ("afpacket:eth0", "afpacket:eth0", NearOption::No),
            ("afpacket:eth0,near=yes", "afpacket:eth0", NearOption::Node),
            ("afpacket:eth0,near=no,mtu=1500", "afpacket:eth0,mtu=1500", NearOption::No),
            ("udp:10.0.0.1:52000,mtu=900,near=yes", "udp:10.0.0.1:52000,mtu=900", NearOption::Node),
            ("vfio:0000:05:00.0,near=shm:job7", "vfio:0000:05:00.0", named.clone()),
            ("memif:@x,near=yes,role=server", "memif:@x,role=server", NearOption::Node),
            ("dpdk:net_tap0,iface=b", "dpdk:net_tap0,iface=b", NearOption::No),
            ("dpdk(near=yes):net_tap0,iface=b", "dpdk:net_tap0,iface=b", NearOption::Node),
            ("dpdk(mtu=9,near=yes):0000:05:00.0", "dpdk(mtu=9):0000:05:00.0", NearOption::Node),
            // The driver's own.
            ("dpdk:net_x,near=yes", "dpdk:net_x,near=yes", NearOption::No),
            ("fault(loss=0.1):udp:lo,near=yes", "fault(loss=0.1):udp:lo", NearOption::Node),
            ("fault():fault():udp:lo,near=shm:job7", "fault():fault():udp:lo", named),
            ("ip(10.1.1.7/24):xdp:e,near=yes", "ip(10.1.1.7/24):xdp:e", NearOption::Node),
            // Not ours to take: these say themselves what is wrong.
            ("shm:x,near=yes", "shm:x,near=yes", NearOption::No),
            ("pcap(file=a):udp:lo,near=yes", "pcap(file=a):udp:lo,near=yes", NearOption::No),
            ("near=yes", "near=yes", NearOption::No),
            ("fault(", "fault(", NearOption::No),
            ("dpdk(near=yes", "dpdk(near=yes", NearOption::No),
            ("", "", NearOption::No),
        ] {
            assert_eq!(is(spec), (left.to_owned(), choice.clone()), "{spec}");
            if choice != NearOption::No {
                let again = with_option(left, &choice.text());
                assert_eq!(is(&again), (left.to_owned(), choice), "{again}");
            }
        }
        for spec in ["udp:lo,near", "udp:lo,near=", "udp:lo,near=x", "dpdk(near=shm:):x"] {
            let e = split(spec).unwrap_err().to_string();
            assert!(e.contains("write near=yes, near=no or near=shm:NAME"), "{spec}: {e}");
        }
    }
}
