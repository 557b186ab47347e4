//! Parsing of port names and opening of ports: `shm`, `shm:job7,mtu=9000`,
//! `fault(loss=0.01,seed=7):shm:job7`, and patterns that select a port on each node ([`choose`]):
//! `udp:10.1.0.0/16`, `afpacket:en*|udp:en*`.

use std::net::Ipv4Addr;
use std::path::Path;

use crate::backend::fault::{Fault, FaultSettings};
use crate::backend::netdev::links;
use crate::backend::pcap;
use crate::backend::shm::{Monitor, ShmPort, ShmSettings};
use crate::error::OpenError;
use crate::port::Port;

mod choice;
mod device;
mod host_port;
mod ip;
mod mark;
mod memif;
mod near;
mod nics;
mod spec;
mod switch;
mod vlan;
mod wires;

pub use choice::choose;
pub use device::{Device, PciAddress, device, is_same_device};
pub use host_port::{kind_and_device, udp_host_port, with_udp_port};
pub use mark::{Mark, with_mark};
pub use spec::PortInfo;
use spec::{Encapsulation, bad_spec, no_option, parse, split_option, split_wrapper};
pub use switch::{SwitchAccess, check_switch, open_switch, open_through_switch, switch_socket};

/// Opens the port that `spec` names.
///
/// - `shm` is the user's default segment, `shm:job7` another one, both with options after a comma:
///   `mac=02:00:00:00:00:07`, `mtu=9000`, `ring=262144` (bytes per pair), `members=16`. See
///   [`ShmSettings`].
/// - `afpacket:eth0` is a network interface, with options after a comma: `mac=`, `mtu=` and
///   `ring=1024` (frames that can wait); `stations=all` takes frames to every number behind its
///   MAC; with `qdisc=yes` frames leave through the queueing discipline. See
///   [`AfPacketSettings`](crate::backend::afpacket::AfPacketSettings).
/// - `xdp:eth0` is a network interface by AF_XDP: it bypasses the kernel's stack and keeps the
///   kernel's driver. Options after a comma: `queue=0`, `queue=0-3` or `queue=free`, `mode=native`
///   or `mode=generic`, `zerocopy=no` or `zerocopy=yes`, `busypoll=yes`, `mac=`, `mtu=` and
///   `ring=1024` (a power of two). See [`XdpSettings`](crate::backend::xdp::XdpSettings).
/// - `vfio:0000:05:00.0` is a NIC driven in user space, by its PCI address, with `mac=`,
///   `mtu=9000`, `rx=512` and `tx=512` (buffers) after a comma. See
///   [`VfioSettings`](crate::backend::vfio::VfioSettings).
/// - `udp:10.0.0.1` or `udp:10.0.0.1:50000` carries frames inside UDP from that address of this
///   host (or of that interface: `udp:eth0`), with the options `mtu=`, `dscp=46`, `ecn=no` and
///   `busypoll=yes`. So do `udp:[2001:db8::a01:107]/96` and `udp:eth0/96` by IPv6, to hosts whose
///   addresses begin with the same 96 bits. See
///   [`UdpSettings`](crate::backend::udp::UdpSettings).
/// - `memif:/run/vpp/memif.sock` or `memif:@job7` is a memif to another process, such as VPP or a
///   DPDK program, with `role=server`, `id=0`, `secret=`, `rsize=10`, `bsize=2048`, `mtu=`, `mac=`,
///   `crc=yes` and `lossless=yes` after a comma. See
///   [`MemifSettings`](crate::backend::memif::MemifSettings).
/// - `fault(loss=0.01,dup=0.001,reorder=0.01,corrupt=0.001,seed=7):PORT` injects faults into the
///   frames that `PORT` sends. All options are optional; further ones are `delay_us=50`, `mtu=1500`
///   and `hold=256`. See [`FaultSettings`].
/// - `pcap(file=PATH):PORT` captures the frames of `PORT`.
/// - `ip(10.1.1.7/24,gw=10.1.1.1):PORT` sends the datagrams of `udp:` by `PORT`, which bypasses the
///   kernel's IP stack: `afpacket`, `xdp`, `vfio`, `dpdk` or `memif`. Further options:
///   `port=50000`, `ttl=64`, `dscp=46`, `ecn=no`, `sum=yes` and `mtu=1458`. An IPv6 address is
///   written in brackets: `ip([2001:db8::a01:107]/96):PORT`. See
///   [`IpSettings`](crate::backend::ip::IpSettings).
/// - `vlan(100,pcp=3):PORT` adds a VLAN tag to the frames of such a `PORT`; it may be wrapped by
///   `ip(...):`. See [`VlanSettings`](crate::backend::vlan::VlanSettings).
/// - `dpdk:net_tap0,iface=bw0` is a DPDK device by its name and device arguments, in builds with
///   the feature `dpdk`. Options of the port precede the colon, as in `dpdk(mtu=9000):...`; see
///   `DpdkSettings`.
/// - All of these but `shm` have the option `near=yes` (among DPDK's in the parentheses, elsewhere
///   after a comma): processes of this user in this network namespace that have it too are reached
///   through shared memory. `near=shm:job7` selects another segment than the node's. `fault(...)`
///   does not affect frames through memory. See [`Near`](crate::backend::near::Near).
/// - Devices that one process owns (`afpacket`, `xdp`, `vfio`, `memif`, `dpdk`) have the option
///   `switch=yes`, in the same place: frames go through the [`Switch`](crate::backend::switch) of
///   this user that owns the device. `promisc=yes` (but for `memif`) enables promiscuous mode.
/// - Alternatives separated by `|`, and patterns, are resolved by [`choose`].
///
/// # Errors
/// [`OpenError`]; nothing is left behind, except for a capture file that was created before `PORT`
/// failed.
pub fn open(spec: &str) -> Result<Box<dyn Port>, OpenError> {
    open_as_written(&choose(spec)?, false)
}

/// As [`open`], for a program that shares its node with others. Defaults: `switch=yes` if a switch
/// owns the device, and with `near` the option `near=yes` for a port that leaves the node, unless
/// `spec` says otherwise. Ports that lead to one other process (`memif`, virtual devices of DPDK)
/// have no near side by default. If the node's segment cannot be joined, the reason is logged and
/// the port opens without it.
///
/// # Errors
/// As there.
pub fn open_in_node(spec: &str, near: bool) -> Result<Box<dyn Port>, OpenError> {
    let (device, near_side) = near::split(&choose(spec)?)?;
    let port = open_device(&device, true)?;
    match near_side {
        Some(side) => side.join(port),
        None if near && near::is_external(&device) => Ok(near::join_node_segment(port)),
        None => Ok(port),
    }
}

/// Opens a port, with a near side if `spec` says so.
fn open_as_written(spec: &str, in_node: bool) -> Result<Box<dyn Port>, OpenError> {
    let (device, near) = near::split(spec)?;
    let port = open_device(&device, in_node)?;
    match near {
        Some(near) => near.join(port),
        None => Ok(port),
    }
}

/// Opens a port without a near side, or a port inside of `pcap(...)`. `in_node`: through a switch
/// that owns the device, if there is one and `spec` does not say otherwise.
fn open_device(spec: &str, in_node: bool) -> Result<Box<dyn Port>, OpenError> {
    let kind = near::kind_of(spec);
    let (device, through) = switch::split(spec, in_node)?;
    let refusal = match switch::join(&device, through)? {
        switch::Attachment::Switch(port) => return Ok(port),
        switch::Attachment::Device => None,
        switch::Attachment::Refused(why) => Some(why),
    };
    match (open_without_switch(&device, kind, in_node), refusal) {
        (Ok(port), Some(why)) => {
            tracing::warn!("opened without the switch: {why}");
            Ok(port)
        }
        // The switch's error has the remedy.
        (Err(own), Some(why)) if [libc::EPERM, libc::EACCES].contains(&own.errno()) => Err(why),
        (opened, _) => opened,
    }
}

/// As [`open_device`], if no switch owns the device.
fn open_without_switch(spec: &str, kind: &str, in_node: bool) -> Result<Box<dyn Port>, OpenError> {
    match kind {
        "shm" => Ok(Box::new(ShmPort::open(&shm_settings(spec)?)?)),
        "udp" => wires::udp(spec),
        "ip" => ip::open(spec, |inner, host_port| {
            open_encapsulated(inner, Encapsulation { udp_addr: Some(host_port), vlan: None })
        }),
        "vlan" => open_encapsulated(spec, Encapsulation::default()),
        "fault" => fault(spec, |inner| open_device(inner, in_node)),
        "pcap" => pcap(spec, |inner| open_as_written(inner, in_node)),
        _ => ip::device(spec, Encapsulation::default()),
    }
}

/// Opens a port whose frames have the encapsulation `encap`.
fn open_encapsulated(spec: &str, encap: Encapsulation) -> Result<Box<dyn Port>, OpenError> {
    match near::kind_of(spec) {
        "fault" => fault(spec, |inner| open_encapsulated(inner, encap)),
        "pcap" => pcap(spec, |inner| open_encapsulated(inner, encap)),
        "vlan" => vlan::open(spec, |inner, id| {
            open_encapsulated(inner, Encapsulation { vlan: Some(id), ..encap })
        }),
        _ => ip::device(spec, encap),
    }
}

#[cfg(feature = "dpdk")]
fn dpdk(spec: &str) -> Result<Box<dyn Port>, OpenError> {
    let settings = crate::backend::dpdk::parse(spec).map_err(|why| bad_spec(spec, why))?;
    Ok(Box::new(crate::backend::dpdk::DpdkPort::open(&settings)?))
}

fn fault(
    spec: &str,
    open: impl FnOnce(&str) -> Result<Box<dyn Port>, OpenError>,
) -> Result<Box<dyn Port>, OpenError> {
    let (wrapper, options, inner) = split_wrapper(spec)?;
    let settings = fault_settings(wrapper, options)?;
    let inner = open(inner)?;
    if inner.caps().near_mtu != 0 {
        let why = "near= cannot stand behind both; write pcap(file=...):fault(...):PORT";
        return Err(bad_spec(spec, why));
    }
    let fault = Fault::new(inner, settings, wrapper);
    let max = fault.caps().mtu;
    OpenError::check_mtu(settings.mtu.unwrap_or(max), max)?;
    Ok(Box::new(fault))
}

fn pcap(
    spec: &str,
    open: impl FnOnce(&str) -> Result<Box<dyn Port>, OpenError>,
) -> Result<Box<dyn Port>, OpenError> {
    let (wrapper, path, inner) = pcap_parts(spec)?;
    let os = |e| OpenError::os("cannot write the capture", path, e, "; choose another file");
    pcap::recorded(open(inner)?, Path::new(path), wrapper).map_err(os)
}

/// The wrapper's text, the capture file, and the captured port.
fn pcap_parts(spec: &str) -> Result<(&str, &str, &str), OpenError> {
    let (wrapper, options, inner) = split_wrapper(spec)?;
    let path = options.strip_prefix("file=").filter(|path| !path.is_empty());
    let path = path.ok_or_else(|| bad_spec(wrapper, "write pcap(file=PATH):PORT"))?;
    Ok((wrapper, path, inner))
}

/// Checks whether [`open`] would succeed, as far as possible without opening: nothing is created,
/// bound or acquired. Failures that only the attempt shows, such as a UDP port in use, are not
/// found. Costs a few system calls.
///
/// # Errors
/// As [`open`].
pub fn check(spec: &str) -> Result<(), OpenError> {
    check_one(&choose(spec)?)
}

/// As [`check`], for a name without alternatives.
fn check_one(spec: &str) -> Result<(), OpenError> {
    let (device, near) = near::split(spec)?;
    check_device(&device)?;
    near.map_or(Ok(()), |near| near.check(&device))
}

fn check_device(spec: &str) -> Result<(), OpenError> {
    let kind = near::kind_of(spec);
    let (device, through) = switch::split(spec, true)?;
    if switch::exists(&device, through)? {
        return Ok(());
    }
    let spec = device.as_str();
    match kind {
        "shm" => shm_settings(spec)?.check_here(),
        "afpacket" => wires::check_afpacket(spec),
        "xdp" => wires::check_xdp(spec),
        "udp" => wires::check_udp(spec),
        "memif" => memif::check(spec),
        "vfio" => nics::check(spec),
        #[cfg(feature = "dpdk")]
        "dpdk" => crate::backend::dpdk::parse(spec).map(drop).map_err(|why| bad_spec(spec, why)),
        "fault" => {
            let (wrapper, options, inner) = split_wrapper(spec)?;
            fault_settings(wrapper, options)?;
            check_device(inner)
        }
        "pcap" => check_one(pcap_parts(spec)?.2),
        "ip" => check_device(&ip::parts(spec)?.1),
        "vlan" => check_device(&vlan::parts(spec)?.2),
        _ => Err(unknown_kind(spec, kind)),
    }
}

/// Whether this build supports the kind of port that `spec` names, whatever wraps it.
pub fn is_known(spec: &str) -> bool {
    let known = |one: &str| {
        let device = host_port::device_of(one).unwrap_or("");
        let kind = near::kind_of(device);
        choice::has_choice(one) || DEVICE_KINDS.iter().any(|built| built.0 == kind)
    };
    choice::alternatives(spec).into_iter().any(known)
}

/// Kinds of devices in this build, and how each is written.
const DEVICE_KINDS: &[(&str, &str)] = &[
    ("shm", "shm or shm:NAME"),
    ("vfio", "vfio:PCI-ADDRESS"),
    ("afpacket", "afpacket:INTERFACE"),
    ("xdp", "xdp:INTERFACE"),
    ("udp", "udp:ADDRESS"),
    ("memif", "memif:SOCKET"),
    #[cfg(feature = "dpdk")]
    ("dpdk", "dpdk:DEVICE"),
];

/// Other prefixes of port names, and how each is written.
const OTHER_KINDS: &[(&str, &str)] = &[
    ("auto", "auto"),
    ("ip", "ip(ADDRESS/BITS):PORT"),
    ("vlan", "vlan(ID):PORT"),
    ("fault", "fault(loss=0.01):PORT"),
    ("pcap", "pcap(file=FILE):PORT"),
    #[cfg(not(feature = "dpdk"))]
    ("dpdk", "dpdk:DEVICE in builds with --features dpdk"),
];

/// Joins the segment that `spec` names (`shm` or `shm:NAME`) to capture its frames.
///
/// # Errors
/// [`OpenError`]; nothing is left behind.
pub fn monitor(spec: &str) -> Result<Monitor, OpenError> {
    match near::kind_of(spec) {
        "shm" => Monitor::open(&shm_settings(spec)?),
        _ => Err(bad_spec(spec, "only a segment shows what others send: write shm or shm:NAME")),
    }
}

/// The ports that this machine offers, and the unavailable kinds with the reason.
pub fn list() -> Vec<PortInfo> {
    let mut ports = vec![PortInfo {
        spec: "shm".into(),
        what: "Ethernet segment between this user's processes, in /dev/shm".into(),
        why_not: shm_unavailable_reason(Path::new("/dev/shm")),
    }];
    let prefix = format!("barewire-{}-", nix::unistd::geteuid());
    let dir = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let mut names: Vec<String> = dir.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort();
    // Lock tables of regions and sockets of switches are no segments.
    let is_other = |name: &str| name.starts_with("locks-") || name.ends_with(".sock");
    let is_listed = |name: &&str| *name != "default" && !is_other(name);
    for name in names.iter().filter_map(|n| n.strip_prefix(&prefix)).filter(is_listed) {
        let what = match name {
            _ if name.starts_with("switch-") => {
                "between a switch and its processes, which open the port that it owns"
            }
            _ if name.starts_with("frames-") => "what a process shows to who records it",
            _ if name.starts_with("node-") => "between processes of a node that share a NIC",
            _ => "segment that exists now",
        };
        let spec = format!("shm:{name}");
        ports.push(PortInfo { spec, what: what.into(), why_not: None });
    }
    ports.extend(wires::list());
    ports.push(memif::kind_info());
    ports.push(ip::kind_info());
    ports.push(vlan::kind_info());
    ports.extend(nics::list());
    for &(kind, what) in MISSING_KINDS {
        let why_not = Some("not part of this build; use shm".into());
        ports.push(PortInfo { spec: kind.into(), what: what.into(), why_not });
    }
    #[cfg(feature = "dpdk")]
    ports.push(PortInfo {
        spec: "dpdk".into(),
        what: format!("a device driven by {}", crate::backend::dpdk::version()),
        why_not: Some("name one, such as dpdk:net_tap0,iface=bw0 or dpdk:0000:05:00.0".into()),
    });
    ports
}

/// Kinds that are not compiled in.
const MISSING_KINDS: &[(&str, &str)] = &[
    #[cfg(not(feature = "dpdk"))]
    ("dpdk", "a NIC driven by DPDK"),
];

fn shm_unavailable_reason(dir: &Path) -> Option<String> {
    use nix::unistd::{AccessFlags, access};
    let at = dir.display();
    if let Err(errno) = access(dir, AccessFlags::W_OK | AccessFlags::X_OK) {
        return Some(format!("{at}: {}; mount -t tmpfs -o mode=1777 tmpfs {at}", errno.desc()));
    }
    let stat = nix::sys::statvfs::statvfs(dir).ok()?;
    let free = stat.blocks_available().saturating_mul(stat.fragment_size());
    // Memory of a segment of default sizes with one active pair.
    let need = 1 << 20;
    let is_short = stat.blocks() > 0 && free < need;
    is_short.then(|| format!("{at} has {free} bytes free; mount -o remount,size=1G {at}"))
}

fn fault_settings(spec: &str, options: &str) -> Result<FaultSettings, OpenError> {
    let mut settings = FaultSettings::default();
    for (key, value) in options.split(',').filter(|part| !part.is_empty()).map(split_option) {
        match key {
            "loss" => settings.loss = probability(spec, value)?,
            "dup" => settings.dup = probability(spec, value)?,
            "reorder" => settings.reorder = probability(spec, value)?,
            "corrupt" => settings.corrupt = probability(spec, value)?,
            "delay_us" => settings.delay_us = parse::<u32>(spec, value)?.into(),
            "mtu" => settings.mtu = Some(parse(spec, value)?),
            "hold" => settings.hold_count = parse::<u16>(spec, value)?.into(),
            "seed" => settings.seed = parse(spec, value)?,
            _ => {
                let known = "loss=, dup=, reorder=, corrupt=, delay_us=, mtu=, hold= and seed=";
                return Err(no_option(spec, key, known));
            }
        }
    }
    Ok(settings)
}

fn probability(spec: &str, value: &str) -> Result<f64, OpenError> {
    let p = parse(spec, value)?;
    if (0.0..=1.0).contains(&p) {
        return Ok(p);
    }
    Err(bad_spec(
        spec,
        format!("{value} is no probability; write 0 to 1, such as 0.01 for one in 100"),
    ))
}

fn unknown_kind(spec: &str, kind: &str) -> OpenError {
    match kind {
        "dpdk" => bad_spec(
            spec,
            "dpdk is not part of this build; build barewire with --features dpdk, or write shm",
        ),
        "loopback" => {
            bad_spec(spec, "loopback joins ports of one program only; write shm or shm:NAME")
        }
        _ if links().iter().any(|link| link.name == spec) => bad_spec(
            spec,
            format!("an interface, and no port; write afpacket:{spec} or udp:{spec}"),
        ),
        _ if spec.split('/').next().is_some_and(|ip| ip.parse::<Ipv4Addr>().is_ok()) => {
            bad_spec(spec, format!("an address, and no port; write udp:{spec}"))
        }
        _ => bad_spec(spec, format!("no such kind of port; write {}", suggest_kinds(kind))),
    }
}

/// How the kinds of this build are written, sorted by similarity to `typed`.
fn suggest_kinds(typed: &str) -> String {
    let mut kinds = [DEVICE_KINDS, OTHER_KINDS].concat();
    if !typed.is_empty() {
        // Stable: equal distances keep the order of the list.
        kinds.sort_by_key(|(kind, _)| edit_distance(typed, kind));
    }
    kinds.iter().map(|(_, written)| *written).collect::<Vec<_>>().join(", ")
}

/// Edit distance (Levenshtein) of the first 32 letters.
fn edit_distance(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.chars().take(32).collect();
    let mut row: Vec<usize> = (0..=a.len()).collect();
    for (i, there) in b.chars().enumerate() {
        let mut corner = std::mem::replace(&mut row[0], i + 1);
        for (j, here) in a.iter().enumerate() {
            let changed = corner + usize::from(*here != there);
            corner = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(corner + 1);
        }
    }
    row[a.len()]
}

fn shm_settings(spec: &str) -> Result<ShmSettings, OpenError> {
    let rest = spec.strip_prefix("shm").unwrap_or(spec);
    let rest = rest.strip_prefix(':').unwrap_or(rest);
    let mut settings = ShmSettings::default();
    let mut parts = rest.split(',');
    let name = parts.next().unwrap_or("");
    if !name.is_empty() {
        settings.name = name.to_owned();
    } else if spec.ends_with(':') {
        return Err(bad_spec(
            spec,
            "a name is missing; write shm for the default segment, or shm:job7",
        ));
    }
    for (key, value) in parts.map(split_option) {
        match key {
            "mac" => settings.station = Some(parse(spec, value)?),
            "mtu" => settings.mtu = Some(parse(spec, value)?),
            "ring" => settings.ring_len = Some(parse(spec, value)?),
            "members" => settings.members = Some(parse(spec, value)?),
            _ => return Err(no_option(spec, key, "mac=, mtu=, ring= and members=")),
        }
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(spec: &str) -> String {
        match open(spec) {
            Ok(port) => panic!("{spec} opened {}", port.caps().name),
            Err(e) => e.to_string(),
        }
    }

    #[test]
    fn specs_open_what_they_say() {
        let name = format!("open-{}", std::process::id());
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.pcapng");
        let spec = format!(
            "fault(loss=0.5,mtu=1500,seed=7):pcap(file={}):\
             shm:{name},mac=02:00:00:00:00:77,ring=65536,members=4",
            file.display()
        );
        let port = open(&spec).unwrap();
        let caps = port.caps();
        assert_eq!((caps.station.mac.to_string().as_str(), caps.mtu), ("02:00:00:00:00:77", 1500));
        assert!(!caps.lossless && caps.name.starts_with("fault(loss=0.5,mtu=1500,seed=7):pcap("));
        assert!(file.exists());
        assert!(is_known(&spec) && is_known("shm") && is_known("afpacket:none"));
        assert!(!is_known("fault():infiniband:x") && !is_known("") && !is_known("rocket:1"));
        let udp = open("udp:127.0.0.1:61007,mtu=1000").unwrap();
        assert_eq!((udp.caps().name.as_str(), udp.caps().mtu), ("udp:127.0.0.1:61007", 1000));
        let other = open(&format!("shm:{name},mtu=9000")).unwrap();
        assert_eq!((other.caps().mtu, other.caps().lossless), (9000, true));
        let locks = format!("/dev/shm/barewire-{}-locks-{name}", nix::unistd::geteuid());
        std::fs::write(&locks, "").unwrap();
        let listed = list();
        std::fs::remove_file(&locks).unwrap();
        assert!(listed.iter().any(|p| p.spec == format!("shm:{name}") && p.why_not.is_none()));
        assert!(!listed.iter().any(|p| p.spec.contains("locks-")), "locks are no segment");
        let near = format!("fault(loss=0.1):udp:127.0.0.1:61008,near=shm:{name},mtu=900");
        let mut near = open(&near).unwrap();
        // What the first member's rings are long enough for.
        assert_eq!((near.caps().mtu, near.caps().near_mtu), (900, 16_306));
        assert!(near.is_near(other.caps().station) && !near.caps().lossless);
        // Its name opens the same.
        let end = format!(",near=shm:{name}");
        let whole = near.caps().name.clone();
        assert!(whole.starts_with("fault(loss=0.1):udp:127.0.0.1:") && whole.ends_with(&end));
        drop(near);
        assert_eq!(open(&whole).unwrap().caps().name, whole);
        let e = why(&format!("fault(mtu=9000):shm:{name},mtu=1500"));
        assert!(e.contains("mtu=1500 or less"), "{e}");
    }

    fn each_says(specs: &[(&str, &str)]) {
        for (spec, says) in specs {
            let e = why(spec);
            assert!(e.contains(says) && !e.contains('\n'), "{spec}: {e}");
        }
    }

    #[test]
    fn wrong_specs_of_xdp_say_what_to_write() {
        each_says(&[
            ("xdp", "write xdp:eth0"),
            ("xdp:", "write xdp:eth0"),
            ("xdp:nothing0", "no such interface; there are "),
            ("xdp:eth0,speed=1", "no option \"speed\""),
            ("xdp:eth0,queue=x", "not a number; write digits"),
            ("xdp:eth0,queue=-1", "not a number; write digits"),
            ("xdp:nothing0,queue=free", "no such interface; there are "),
            ("xdp:eth0,queue=3-1", "queue=0-3 for several, at most 64"),
            ("xdp:eth0,queue=0-64", "queue=0-3 for several, at most 64"),
            ("xdp:eth0,mode=fast", "mode=native or mode=generic"),
            ("xdp:eth0,zerocopy=1", "zerocopy=yes or zerocopy=no"),
            ("xdp:eth0,busypoll", "busypoll=yes or busypoll=no"),
            ("xdp:eth0,qdisc=yes", "afpacket: has qdisc=yes"),
            ("xdp:eth0,ring=100", "a power of two from 64 to 16384"),
            ("xdp:eth0,ring=32768", "a power of two from 64 to 16384"),
        ]);
    }

    #[test]
    fn wrong_specs_of_ipv6_say_what_to_write() {
        each_says(&[
            ("udp:[::1]", "write udp:[2001:db8::a01:107]/96"),
            ("udp:[::1]/64", "is no network; write 10.1.0.0/16, or [2001:db8::]/96"),
            ("udp:::1", "write udp:[2001:db8::a01:107]/96"),
            ("udp:[::1]/96:80", "udp:[::1]/96:50000"),
            ("udp:[::1/96", "write udp:[2001:db8::a01:107]/96"),
            ("udp:[lo]/96", "invalid IPv6 address"),
            ("udp:[2001:db8::1]/96", "no interface of this host has that address"),
            ("udp:[fe80::1]/96", "an address of one link"),
            ("udp:nothing0/96", "neither an IPv6 address nor an interface with one"),
        ]);
    }

    #[test]
    fn an_interface_alone_and_wrong_numbers_say_what_to_write() {
        each_says(&[
            ("lo", "write afpacket:lo or udp:lo"),
            ("10.0.0.1", "write udp:10.0.0.1"),
            ("10.1.0.0/16", "write udp:10.1.0.0/16"),
            ("fault(loss=x):shm", "\"x\" is not a number; write one, as in 0.01"),
            ("shm:x,mtu=99999999999999999999", "is too large"),
            ("shm:x,ring=5", "ring=5: write a power of two from 4096"),
            ("shm:x,members=1", "members=1: write 2 to 1024"),
        ]);
    }

    #[test]
    fn wrong_specs_say_what_to_write() {
        each_says(&[
            ("", "write shm"),
            ("nosuch0", "write shm"),
            ("shmem", "write shm or shm:NAME, "),
            ("afpackt:va", "no such kind of port; write afpacket:INTERFACE, "),
            ("AFPACKET:va", "udp:ADDRESS"),
            ("vifo:0000:05:00.0", "write vfio:PCI-ADDRESS, "),
            ("upd:10.0.0.1", "write udp:ADDRESS, "),
            ("vlna(7):afpacket:va", "write vlan(ID):PORT, "),
            ("falt(loss=0.1):shm", "write fault(loss=0.01):PORT, "),
            ("wifi:x", "pcap(file=FILE):PORT"),
            ("udp:192.0.2.1", "this host has "),
            ("udp", "write udp:10.0.0.1"),
            ("udp:", "write udp:10.0.0.1"),
            ("udp:127.0.0.1:x", "not a number; write digits"),
            ("udp:127.0.0.1:80", "49152 to 65535"),
            ("udp:127.0.0.1,ring=7", "no option \"ring\""),
            ("udp:127.0.0.1,ecn=0", "write ecn=yes or ecn=no"),
            ("udp:127.0.0.1,busypoll", "write busypoll=yes or busypoll=no"),
            ("udp:127.0.0.1,near=maybe", "write near=yes, near=no or near=shm:NAME"),
            ("udp:127.0.0.1,near=shm:a b", "letters, digits"),
            ("shm:x,near=yes", "no option \"near\""),
            ("fault():pcap(file=/dev/null):udp:lo,near=shm:x", "write pcap(file=...):fault(...)"),
            ("memif", "write memif:/run/vpp/memif.sock"),
            ("memif:", "write memif:/run/vpp/memif.sock"),
            ("memif:job7", "memif:@job7"),
            ("memif:@", "memif:@job7"),
            ("memif:@x,role=boss", "role=server or role=client"),
            ("memif:@x,speed=1", "no option \"speed\""),
            ("memif:@x,rsize=3", "4 to 14"),
            ("memif:@x,bsize=100", "270 to 65536"),
            ("memif:@x,bsize=2048,mtu=9000", "mtu=2034 or less"),
            ("memif:@x,rsize=15,bsize=65536", "4 to 14"),
            ("memif:@x,secret=0123456789012345678901234", "1 to 24 bytes"),
            ("memif:@x,mac=01:00:00:00:00:01", "even first byte"),
            ("memif:@x,lossless=perhaps", "lossless=yes"),
            ("memif:/nonexistent/x.sock,role=server", "mkdir -p /nonexistent"),
            ("memif:/nonexistent/x.sock", "no directory /nonexistent"),
            ("afpacket", "write afpacket:eth0"),
            ("afpacket:", "write afpacket:eth0"),
            ("afpacket:eth0,speed=1", "no option \"speed\""),
            ("afpacket:eth0,mtu=x", "not a number; write digits"),
            ("afpacket:nothing0", "no such interface; there are "),
            ("loopback:", "one program"),
            ("vfio", "a NIC's PCI address is missing"),
            ("vfio:eth0", "write vfio:0000:05:00.0"),
            ("vfio:fffe:00:00.0", "there is no PCI device fffe:00:00.0"),
            ("vfio:fffe:00:00.0,speed=1", "no option \"speed\""),
            ("vfio:fffe:00:00.0,mtu=100", "256 to"),
            ("vfio:fffe:00:00.0,rx=3", "8 to 4096"),
            ("vfio:fffe:00:00.0,mac=01:00:00:00:00:01", "even first byte"),
            ("shm:", "a name is missing"),
            ("shm:a b", "letters, digits"),
            ("shm:x,mtu=12k", "not a number; write digits"),
            ("shm:x,mtu=100", "256 to 65522 on this port; write mtu=256 or more"),
            ("shm:x,mac=zz", "02:00:00:00:00:01"),
            ("shm:x,speed=1", "no option \"speed\""),
            ("fault:shm", "fault(OPTION=VALUE,...):PORT"),
            ("fault(loss=0.1)shm", "fault(OPTION=VALUE,...):PORT"),
            ("fault(loss=2):shm", "0 to 1"),
            ("fault(loss=NaN):shm", "0 to 1"),
            ("fault(lost=1):shm", "there are loss="),
            ("pcap():shm", "pcap(file=PATH):PORT"),
            ("pcap(file=/nonexistent/x):shm:open-pcap-x", "/nonexistent/x: No such file"),
        ]);
    }

    /// Goal: whoever asks before he opens hears the same sentence, and asking leaves nothing
    /// behind.
    #[test]
    fn a_check_says_what_opening_would() {
        let name = format!("check-{}", std::process::id());
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.pcapng");
        for spec in [
            format!("shm:{name}"),
            format!("fault(loss=0.5):pcap(file={}):shm:{name},mtu=9000", file.display()),
            "udp:127.0.0.1".to_owned(),
            "udp:lo".to_owned(),
            "memif:@check,role=server".to_owned(),
        ] {
            check(&spec).unwrap_or_else(|e| panic!("{spec}: {e}"));
        }
        assert!(!file.exists() && !shm_settings(&format!("shm:{name}")).unwrap().path().exists());
        for spec in [
            "",
            "afpackt:va",
            "afpacket:nothing0",
            "afpacket:eth0,speed=1",
            "xdp:nothing0,queue=1",
            "xdp:eth0,ring=7",
            "udp:192.0.2.1",
            "udp:127.0.0.1:80",
            "udp:127.0.0.1,mtu=100",
            "memif:job7",
            "memif:/nonexistent/x.sock",
            "memif:/nonexistent/x.sock,role=server",
            "vfio:fffe:00:00.0",
            "shm:a b",
            "shm:x,mtu=100",
            "fault(loss=2):shm",
            "fault(loss=0.1):afpacket:nothing0",
            "pcap():shm",
            "pcap(path=x):shm",
        ] {
            assert_eq!(check(spec).unwrap_err().to_string(), why(spec), "{spec}");
        }
    }

    #[test]
    fn list_names_every_kind_with_a_reason() {
        let ports = list();
        assert_eq!(ports[0].spec, "shm");
        for (kind, _) in MISSING_KINDS {
            assert!(ports.iter().any(|p| p.spec == *kind && p.why_not.is_some()));
        }
        assert!(
            shm_unavailable_reason(Path::new("/nonexistent")).unwrap().contains("mount -t tmpfs")
        );
    }
}
