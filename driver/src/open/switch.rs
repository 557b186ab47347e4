//! The option `switch=` of ports on devices that one process owns: whether frames go through the
//! node's switch.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::near::{device_offset, kind_of, options, with_option, with_options};
use super::spec::{bad_spec, yes_or_no};
use crate::backend::near::node_segment;
use crate::backend::shm::ShmSettings;
use crate::backend::switch::{
    CLIENTS_MAX, OwnSocket, RUN_DIR, ServedUsers, Switch, SwitchedPort, listener_pid, socket_in,
};
use crate::error::OpenError;
use crate::port::{Port, Station};

/// Kinds of devices that a switch can own.
const KINDS: &[&str] = &["afpacket", "xdp", "vfio", "memif", "dpdk"];
/// Those of them that filter by station and have the option `stations=`.
const FILTERING: &[&str] = &["afpacket", "xdp"];

/// Longest wait in `open` for a killed switch to be restarted.
const SWITCH_RESTART_TIMEOUT: Duration = Duration::from_secs(2);

/// Age of a socket's file beyond which its switch is not waited for. A running switch touches the
/// file more often.
const SOCKET_MAX_AGE: Duration = Duration::from_secs(30);

/// Value of the option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SwitchOption {
    /// Open the device itself.
    No,
    /// Through the switch that owns it.
    Yes,
    /// Through the switch, if one owns it.
    IfThere,
}

/// Removes the option from `spec`, which begins with a device. The default is `IfThere` if
/// `in_node` (the program shares its node with others), else `No`.
pub(super) fn split(spec: &str, in_node: bool) -> Result<(String, SwitchOption), OpenError> {
    let default = if in_node { SwitchOption::IfThere } else { SwitchOption::No };
    if !KINDS.contains(&kind_of(spec)) {
        return Ok((spec.to_owned(), SwitchOption::No));
    }
    let mut choice = default;
    let mut left = Vec::new();
    for part in options(spec).1.split(',') {
        match part.split_once('=') {
            Some(("switch", value)) => {
                let requested = yes_or_no(spec, "switch", value)?;
                choice = if requested { SwitchOption::Yes } else { SwitchOption::No };
            }
            _ => left.push(part),
        }
    }
    Ok((with_options(spec, &left.join(",")), choice))
}

/// How a device is attached.
pub(super) enum Attachment {
    /// Through the switch that owns it.
    Switch(Box<dyn Port>),
    /// Directly.
    Device,
    /// Directly, since its switch does not serve this user.
    Refused(OpenError),
}

/// Opens a port of the switch that owns the device at the start of `spec`, if `choice` asks for it.
pub(super) fn join(spec: &str, choice: SwitchOption) -> Result<Attachment, OpenError> {
    if choice == SwitchOption::No {
        return Ok(Attachment::Device);
    }
    let segment = ShmSettings { station: station_of(spec), ..segment(spec)? };
    let is_here = segment.path().exists();
    let waits = !is_here && is_socket_recent(&socket_of(&segment));
    let timeout = if waits { SWITCH_RESTART_TIMEOUT } else { Duration::ZERO };
    let mut port = match find_running(spec, &segment, timeout) {
        // The switch serves other users; the device may still be accessible.
        Err(why) if choice == SwitchOption::IfThere && why.errno() == libc::EACCES => {
            return Ok(Attachment::Refused(why));
        }
        found => found?,
    };
    if port.is_none() && is_here && segment.switch_pid()?.is_none() {
        // This user's switch has ended, and may be restarted.
        port = SwitchedPort::open_watched(&segment, with_option(spec, "switch=yes"))?;
    }
    match port {
        Some(port) => {
            if wants_qdisc(spec) {
                tracing::warn!(
                    "{spec}: qdisc=yes has no effect behind a switch, whose port has to say it: \
                     barewire switch --port {},qdisc=yes",
                    device(spec)
                );
            }
            Ok(Attachment::Switch(Box::new(port)))
        }
        None if choice == SwitchOption::IfThere => Ok(Attachment::Device),
        None => Err(no_switch(spec)),
    }
}

/// Whether `qdisc=yes` is set, which applies to the switch's port.
fn wants_qdisc(spec: &str) -> bool {
    kind_of(spec) == "afpacket" && spec.split(',').any(|part| part == "qdisc=yes")
}

/// A port of the running switch of `segment`: this user's switch, or else another user's, which has
/// `timeout` to start.
fn find_running(
    spec: &str,
    segment: &ShmSettings,
    timeout: Duration,
) -> Result<Option<SwitchedPort>, OpenError> {
    let name = with_option(spec, "switch=yes");
    let own = match segment.switch_pid() {
        Ok(Some(_)) => SwitchedPort::open_watched(segment, name.clone())?,
        Ok(None) => None,
        // A switch of a build with another layout may run.
        Err(OpenError::OtherVersion { .. }) => {
            let socket = segment.switch_socket();
            let is_recent = is_socket_recent(&socket);
            let timeout = if is_recent { SWITCH_RESTART_TIMEOUT } else { Duration::ZERO };
            SwitchedPort::attach(socket, segment, name.clone(), timeout)?
        }
        Err(why) => return Err(why),
    };
    if own.is_some() {
        return Ok(own);
    }
    let requested = SwitchedPort::attach(socket_of(segment), segment, name, timeout);
    requested.map_err(|why| relabel(why, spec))
}

/// Whether the socket was touched recently. An unknown or future time counts as now.
fn is_socket_recent(socket: &Path) -> bool {
    let touched = std::fs::symlink_metadata(socket).and_then(|is| is.modified());
    touched.is_ok_and(|at| at.elapsed().map_or(true, |ago| ago < SOCKET_MAX_AGE))
}

/// Whether there seems to be a switch for [`join`].
pub(super) fn exists(spec: &str, choice: SwitchOption) -> Result<bool, OpenError> {
    if choice == SwitchOption::No {
        return Ok(false);
    }
    let segment = segment(spec)?;
    let exists = segment.path().exists() || socket_of(&segment).exists();
    if exists || choice == SwitchOption::IfThere { Ok(exists) } else { Err(no_switch(spec)) }
}

/// Socket at which processes of other users request access to the segment's switch.
fn socket_of(segment: &ShmSettings) -> PathBuf {
    socket_in(Path::new(RUN_DIR), &segment.name)
}

fn no_switch(spec: &str) -> OpenError {
    let mend = format!("start one as root: sudo barewire switch --port {}", device(spec));
    OpenError::device(spec, libc::ENODEV, "no switch owns it that serves this user", mend)
}

/// Opens a port of the switch that owns the device named by `spec`. `None` if no switch does.
///
/// # Errors
/// [`OpenError`]: there is a switch, and it does not serve this user (`EACCES`), or cannot.
pub fn open_through_switch(spec: &str) -> Result<Option<Box<dyn Port>>, OpenError> {
    match exists(spec, SwitchOption::IfThere) {
        Ok(true) if KINDS.contains(&kind_of(spec)) => {}
        _ => return Ok(None),
    }
    let segment = ShmSettings { station: station_of(spec), ..segment(spec)? };
    let port = find_running(spec, &segment, Duration::ZERO)?;
    Ok(port.map(|port| Box::new(port) as Box<dyn Port>))
}

/// Name of the socket file in [`RUN_DIR`] of the switch for the device that `spec` names. `None` if
/// no switch can own it.
pub fn switch_socket(spec: &str) -> Option<String> {
    let segment = segment(spec).ok().filter(|_| KINDS.contains(&kind_of(spec)))?;
    socket_of(&segment).file_name()?.to_str().map(str::to_owned)
}

/// The error with the port's name in place of the socket's.
fn relabel(why: OpenError, spec: &str) -> OpenError {
    match why {
        OpenError::Device { why, mend, errno, .. } => {
            OpenError::Device { port: device(spec), why, mend, errno }
        }
        other => other,
    }
}

/// Users that a switch serves besides its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SwitchAccess {
    /// Which users. Default: all for root's switch, which then replaces the machine's network, and
    /// none otherwise.
    pub served_users: Option<ServedUsers>,
    /// Isolates users from each other. Default: they reach each other, as on a wire.
    pub apart: bool,
    /// Limit on the processes of each user, so that one user cannot take all ports. Maximum and
    /// default [`CLIENTS_MAX`].
    pub per_user: Option<usize>,
}

impl SwitchAccess {
    /// The served users, with the default of this process applied.
    pub fn served_users(&self) -> ServedUsers {
        let default =
            if nix::unistd::geteuid().is_root() { ServedUsers::All } else { ServedUsers::None };
        self.served_users.clone().unwrap_or(default)
    }
}

/// Opens the device that `spec` names for a switch that serves processes of its own user, and those
/// of `access`. If root's default of serving all users is not possible, that is logged and no
/// error.
///
/// # Errors
/// [`OpenError`]; nothing is left behind.
pub fn open_switch(spec: &str, access: &SwitchAccess) -> Result<Switch, OpenError> {
    let spec = &super::choose(spec)?;
    let at = device_offset(spec);
    let inner = &spec[at..];
    let kind = kind_of(inner);
    check_kind(spec, at)?;
    let (inner, _) = split(inner, false)?;
    let segment = segment(&inner)?;
    check_no_switch(&segment)?;
    let inner = match FILTERING.contains(&kind) {
        true => with_option(&inner, "stations=all"),
        false => inner,
    };
    let nic = super::open_device(&format!("{}{inner}", &spec[..at]), false)?;
    let own = OwnSocket::bind(&segment)?;
    let mut switch = Switch::open(&segment, nic)?;
    switch.serve_own(own)?;
    let per_user = access.per_user.unwrap_or(CLIENTS_MAX);
    let served = switch.serve(&socket_of(&segment), access.served_users(), access.apart, per_user);
    match served {
        Err(why) if access.served_users.is_none() => {
            tracing::warn!("only processes of this user are served: {why}");
        }
        served => served?,
    }
    Ok(switch)
}

/// Checks whether [`open_switch`] would succeed, as far as possible; changes nothing. Returns the
/// segment that processes would join.
///
/// # Errors
/// As [`open_switch`]; [`OpenError::HasSwitch`] if a switch is running.
pub fn check_switch(spec: &str) -> Result<String, OpenError> {
    let spec = &super::choose(spec)?;
    let at = device_offset(spec);
    check_kind(spec, at)?;
    let (inner, _) = split(&spec[at..], false)?;
    let segment = segment(&inner)?;
    check_no_switch(&segment)?;
    super::check_device(&format!("{}{inner}", &spec[..at]))?;
    segment.check_here()?;
    Ok(format!("shm:{}", segment.name))
}

/// Checks that no switch is running. Done before the device is opened, whose error would suggest to
/// use a switch.
fn check_no_switch(segment: &ShmSettings) -> Result<(), OpenError> {
    let other = match segment.switch_pid() {
        Err(OpenError::OtherVersion { .. }) => listener_pid(&segment.switch_socket()),
        other => other?,
    };
    other.map_or(Ok(()), |pid| Err(OpenError::HasSwitch { path: segment.path(), pid }))
}

/// Checks whether a switch can own the device at offset `at`.
fn check_kind(spec: &str, at: usize) -> Result<(), OpenError> {
    let kind = kind_of(&spec[at..]);
    let has = |name| spec[..at].split("):").any(|wrapper| wrapper.starts_with(name));
    let why = match kind {
        _ if has("vlan(") => {
            "a switch tags no frames; give it the kernel's interface of the VLAN, as in \
             afpacket:eth0.100"
        }
        _ if has("ip(") => {
            "a switch forwards Ethernet frames, not datagrams; give it the port inside ip(...)"
        }
        _ if KINDS.contains(&kind) => return Ok(()),
        "udp" => "processes share an address by UDP port numbers; they need no switch",
        "shm" => "a segment has no NIC; its processes need no switch",
        _ => "a switch owns a device: xdp:, afpacket:, vfio:, dpdk: or memif:",
    };
    Err(bad_spec(spec, why))
}

/// The device without options, such as `dpdk:0000:05:00.0`.
fn device(spec: &str) -> String {
    match kind_of(spec) {
        "dpdk" => format!("dpdk:{}", options(spec).2.split(',').next().unwrap_or("")),
        _ => spec.split(',').next().unwrap_or("").to_owned(),
    }
}

/// The same in normalised form.
pub(super) fn full_device(spec: &str) -> String {
    // sysfs has PCI addresses in lower case; `vfio:` accepts both.
    let mut device = device(spec);
    if kind_of(spec) == "vfio" {
        device.make_ascii_lowercase();
    }
    if kind_of(spec) == "vfio" && device.matches(':').count() == 2 {
        device = device.replacen(':', ":0000:", 1);
    }
    device
}

/// The segment of a device's switch. Interfaces and memif sockets are named per network namespace,
/// NICs per machine.
fn segment(spec: &str) -> Result<ShmSettings, OpenError> {
    let device = full_device(spec);
    let of_machine = device.matches(':').count() == 3;
    let node = if of_machine { String::new() } else { format!(".{}", node_segment()?) };
    let is_legal = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let name = format!("switch-{device}{node}").replace(|c| !is_legal(c), ".");
    match name.len() {
        ..=64 => Ok(ShmSettings::named(&name)),
        _ => Err(bad_spec(spec, "its name is too long for a switch; write a shorter path")),
    }
}

/// The value of `mac=`.
fn station_of(spec: &str) -> Option<Station> {
    options(spec).1.split(',').find_map(|part| part.strip_prefix("mac=")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_option_is_taken_out() {
        for (spec, left, choice) in [
            ("afpacket:eth0", "afpacket:eth0", SwitchOption::IfThere),
            ("afpacket:eth0,switch=yes,mtu=1500", "afpacket:eth0,mtu=1500", SwitchOption::Yes),
            ("vfio:05:00.0,switch=no", "vfio:05:00.0", SwitchOption::No),
            (
                "dpdk(mtu=9,switch=yes):net_tap0,iface=b",
                "dpdk(mtu=9):net_tap0,iface=b",
                SwitchOption::Yes,
            ),
            ("udp:lo", "udp:lo", SwitchOption::No),
        ] {
            assert_eq!(split(spec, true).unwrap(), (left.to_owned(), choice), "{spec}");
        }
        assert_eq!(split("afpacket:eth0", false).unwrap().1, SwitchOption::No);
        assert!(split("afpacket:eth0,switch=maybe", true).is_err());
    }

    #[test]
    fn a_discipline_is_asked_for_by_its_option() {
        for (spec, wants) in [
            ("afpacket:eth0,mtu=900,qdisc=yes", true),
            ("afpacket:eth0,qdisc=no", false),
            ("afpacket:eth0", false),
            ("xdp:eth0,qdisc=yes", false),
        ] {
            assert_eq!(wants_qdisc(spec), wants, "{spec}");
        }
    }

    /// Goal: however a process writes a device, it finds the switch of it, and no other.
    #[test]
    fn a_device_has_one_segment() {
        let name = |spec: &str| segment(spec).unwrap().name;
        for (one, another) in [
            ("vfio:05:00.0", "vfio:0000:05:00.0,mtu=9000"),
            ("dpdk:0000:05:00.0,x=1", "dpdk(mtu=9000):0000:05:00.0"),
            ("afpacket:eth0", "afpacket:eth0,mac=02:00:00:00:00:01"),
        ] {
            assert_eq!(name(one), name(another));
            segment(one).unwrap().check_here().unwrap();
        }
        assert_ne!(name("afpacket:eth0"), name("afpacket:eth1"));
        assert_ne!(name("vfio:05:00.0"), name("dpdk:0000:05:00.0"));
        assert!(name("afpacket:eth0").ends_with(&node_segment().unwrap()));
    }

    #[test]
    fn a_port_that_needs_no_switch_is_refused_with_the_reason() {
        for (spec, says) in [
            ("udp:lo", "they need no switch"),
            ("vlan(100):afpacket:lo", "the kernel's interface of the VLAN"),
            ("fault(loss=0.1):vlan(100):afpacket:lo", "the kernel's interface of the VLAN"),
            ("fault():ip(10.1.1.7/24):afpacket:lo", "give it the port inside ip(...)"),
            ("shm", "its processes need no switch"),
            ("pcap(file=a):shm", "a switch owns a device"),
            ("nonsense", "a switch owns a device"),
        ] {
            let why =
                open_switch(spec, &SwitchAccess::default()).map(drop).unwrap_err().to_string();
            assert!(why.contains(says), "{spec}: {why}");
            assert!(check_switch(spec).unwrap_err().to_string().contains(says), "{spec}");
        }
        let spec = "vfio:0000:ff:1f.7,switch=yes";
        let why = crate::open::open(spec).map(drop).unwrap_err().to_string();
        assert!(why.contains("barewire switch --port vfio:0000:ff:1f.7"), "{why}");
    }

    /// Goal: only a switch that may be on its way back is waited for.
    #[test]
    fn a_switch_that_ended_long_ago_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("x.sock");
        assert!(!is_socket_recent(&socket), "there is none");
        let file = std::fs::File::create(&socket).unwrap();
        assert!(is_socket_recent(&socket));
        file.set_modified(std::time::SystemTime::now() - 2 * SOCKET_MAX_AGE).unwrap();
        assert!(!is_socket_recent(&socket));
    }
}
