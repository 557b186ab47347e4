//! The option `switch=` of ports that one process has to own: whether a switch of this node owns
//! the device, and frames go through that.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::near::{device_at, kind_of, options, with_option, with_options};
use super::spec::{bad, yes_or_no};
use crate::backend::near::node_segment;
use crate::backend::shm::ShmSettings;
use crate::backend::switch::{CLIENTS_MAX, RUN_DIR, ServedUsers, Switch, SwitchedPort, socket_in};
use crate::error::OpenError;
use crate::port::{Port, Station};

/// Kinds of devices that a switch can own.
const KINDS: &[&str] = &["afpacket", "xdp", "vfio", "memif", "dpdk"];
/// Those of them that filter by station, and have the option `stations=`.
const FILTERING: &[&str] = &["afpacket", "xdp"];

/// How long opening waits for a switch that was killed to be started again.
const PATIENCE: Duration = Duration::from_secs(2);

/// Time after which a switch whose socket nobody listens at is not waited for. One that runs
/// touches its socket more often.
const LATELY: Duration = Duration::from_secs(30);

/// What the option says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// The device itself.
    No,
    /// Through the switch that owns it.
    Yes,
    /// Through the switch, if one owns it.
    IfThere,
}

/// Takes the option out of `spec`, which begins with a device. Without it, a switch is used if one
/// is there and `in_node`: the program shares its node with others.
pub(super) fn split(spec: &str, in_node: bool) -> Result<(String, Choice), OpenError> {
    let unasked = if in_node { Choice::IfThere } else { Choice::No };
    if !KINDS.contains(&kind_of(spec)) {
        return Ok((spec.to_owned(), Choice::No));
    }
    let mut choice = unasked;
    let mut left = Vec::new();
    for part in options(spec).1.split(',') {
        match part.split_once('=') {
            Some(("switch", value)) => {
                let asked = yes_or_no(spec, "switch", value)?;
                choice = if asked { Choice::Yes } else { Choice::No };
            }
            _ => left.push(part),
        }
    }
    Ok((with_options(spec, &left.join(",")), choice))
}

/// Where frames of a device go.
pub(super) enum Way {
    /// Through the switch that owns it.
    Switch(Box<dyn Port>),
    /// To the device itself.
    Device,
    /// Likewise, since the switch that owns it does not serve this user.
    Refused(OpenError),
}

/// The port behind the switch that owns the device which `spec` begins with, if `choice` wants
/// that.
pub(super) fn join(spec: &str, choice: Choice) -> Result<Way, OpenError> {
    if choice == Choice::No {
        return Ok(Way::Device);
    }
    let segment = ShmSettings { station: station_of(spec), ..segment(spec)? };
    let is_here = segment.path().exists();
    let waits = !is_here && was_touched_lately(&socket_of(&segment));
    let patience = if waits { PATIENCE } else { Duration::ZERO };
    let mut port = match running(spec, &segment, patience) {
        // It is for others; the device may not be.
        Err(why) if choice == Choice::IfThere && why.errno() == libc::EACCES => {
            return Ok(Way::Refused(why));
        }
        found => found?,
    };
    if port.is_none() && is_here && segment.switch_pid()?.is_none() {
        // One of our user that ran, and may come back.
        port = SwitchedPort::open(&segment, with_option(spec, "switch=yes"))?;
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
            Ok(Way::Switch(Box::new(port)))
        }
        None if choice == Choice::IfThere => Ok(Way::Device),
        None => Err(no_switch(spec)),
    }
}

/// Whether frames are to leave through the queueing discipline, which is the switch's to do.
fn wants_qdisc(spec: &str) -> bool {
    kind_of(spec) == "afpacket" && spec.split(',').any(|part| part == "qdisc=yes")
}

/// The port behind the switch of the device's `segment` that runs: one of our user, or else any
/// other, which has `patience` to begin to.
fn running(
    spec: &str,
    segment: &ShmSettings,
    patience: Duration,
) -> Result<Option<SwitchedPort>, OpenError> {
    let name = with_option(spec, "switch=yes");
    if segment.path().exists()
        && segment.switch_pid()?.is_some()
        && let Some(port) = SwitchedPort::open(segment, name.clone())?
    {
        return Ok(Some(port));
    }
    let asked = SwitchedPort::attach(socket_of(segment), segment, name, patience);
    asked.map_err(|why| of_port(why, spec))
}

/// Whether a switch was there a moment ago. What has no time yet, or one to come, counts as now.
fn was_touched_lately(socket: &Path) -> bool {
    let touched = std::fs::symlink_metadata(socket).and_then(|is| is.modified());
    touched.is_ok_and(|at| at.elapsed().map_or(true, |ago| ago < LATELY))
}

/// Whether [`join`] would find a switch, as far as can be seen.
pub(super) fn is_there(spec: &str, choice: Choice) -> Result<bool, OpenError> {
    if choice == Choice::No {
        return Ok(false);
    }
    let segment = segment(spec)?;
    let is_there = segment.path().exists() || socket_of(&segment).exists();
    if is_there || choice == Choice::IfThere { Ok(is_there) } else { Err(no_switch(spec)) }
}

/// The socket at which the switch of this segment serves other users.
fn socket_of(segment: &ShmSettings) -> PathBuf {
    socket_in(Path::new(RUN_DIR), &segment.name)
}

fn no_switch(spec: &str) -> OpenError {
    let mend = format!("start one as root: sudo barewire switch --port {}", device(spec));
    OpenError::device(spec, libc::ENODEV, "no switch owns it that serves this user", mend)
}

/// The port behind the switch that owns the device which `spec` names. `None` if no switch does.
///
/// # Errors
/// [`OpenError`]: there is a switch, and it does not serve this user (`EACCES`), or cannot.
pub fn open_through_switch(spec: &str) -> Result<Option<Box<dyn Port>>, OpenError> {
    match is_there(spec, Choice::IfThere) {
        Ok(true) if KINDS.contains(&kind_of(spec)) => {}
        _ => return Ok(None),
    }
    let segment = ShmSettings { station: station_of(spec), ..segment(spec)? };
    let port = running(spec, &segment, Duration::ZERO)?;
    Ok(port.map(|port| Box::new(port) as Box<dyn Port>))
}

/// Name of the file in [`RUN_DIR`] at which processes of other users ask for the switch of the
/// device that `spec` names. `None` if no switch can own that.
pub fn switch_socket(spec: &str) -> Option<String> {
    let segment = segment(spec).ok().filter(|_| KINDS.contains(&kind_of(spec)))?;
    socket_of(&segment).file_name()?.to_str().map(str::to_owned)
}

/// The same error, which says of which port it is and not of which socket.
fn of_port(why: OpenError, spec: &str) -> OpenError {
    match why {
        OpenError::Device { why, mend, errno, .. } => {
            OpenError::Device { port: device(spec), why, mend, errno }
        }
        other => other,
    }
}

/// The users that a switch serves besides its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Serving {
    /// Default: all if the switch is root's, as it then stands in for the network of
    /// the machine, and none otherwise.
    pub served_users: Option<ServedUsers>,
    /// Whether users do not reach each other through the switch. Default: they do, as on a wire.
    pub apart: bool,
    /// Most processes that each user has behind it, so that one leaves places to the others. At
    /// most and by default [`CLIENTS_MAX`].
    pub per_user: Option<usize>,
}

impl Serving {
    /// The users served by a switch of this process.
    pub fn served_users(&self) -> ServedUsers {
        let unasked =
            if nix::unistd::geteuid().is_root() { ServedUsers::All } else { ServedUsers::None };
        self.served_users.clone().unwrap_or(unasked)
    }
}

/// Takes the device that `spec` names for a switch that serves processes of its own user, and those
/// that `serving` says. That root's switch serves all by default is not to stand in its way: if
/// that is not possible the log says why.
///
/// # Errors
/// [`OpenError`]; nothing is left behind.
pub fn open_switch(spec: &str, serving: &Serving) -> Result<Switch, OpenError> {
    let spec = &super::choose(spec)?;
    let at = device_at(spec);
    let inner = &spec[at..];
    let kind = kind_of(inner);
    check_kind(spec, at)?;
    let (inner, _) = split(inner, false)?;
    let segment = segment(&inner)?;
    no_other(&segment)?;
    let inner = match FILTERING.contains(&kind) {
        true => with_option(&inner, "stations=all"),
        false => inner,
    };
    let nic = super::open_device(&format!("{}{inner}", &spec[..at]), false)?;
    let mut switch = Switch::open(&segment, nic)?;
    let per_user = serving.per_user.unwrap_or(CLIENTS_MAX);
    let served =
        switch.serve(&socket_of(&segment), serving.served_users(), serving.apart, per_user);
    match served {
        Err(why) if serving.served_users.is_none() => {
            tracing::warn!("only processes of this user are served: {why}");
        }
        served => served?,
    }
    Ok(switch)
}

/// Whether [`open_switch`] would open it, as far as can be seen; changes nothing. Says the segment
/// that processes would join.
///
/// # Errors
/// What [`open_switch`] would say; [`OpenError::HasSwitch`] where one runs.
pub fn check_switch(spec: &str) -> Result<String, OpenError> {
    let spec = &super::choose(spec)?;
    let at = device_at(spec);
    check_kind(spec, at)?;
    let (inner, _) = split(&spec[at..], false)?;
    let segment = segment(&inner)?;
    no_other(&segment)?;
    super::check_device(&format!("{}{inner}", &spec[..at]))?;
    segment.check_here()?;
    Ok(format!("shm:{}", segment.name))
}

/// Sees that no switch runs there. Asked before the device, which would say of itself how to share
/// it: by the switch that there is.
fn no_other(segment: &ShmSettings) -> Result<(), OpenError> {
    let other = segment.switch_pid()?;
    other.map_or(Ok(()), |pid| Err(OpenError::HasSwitch { path: segment.path(), pid }))
}

/// Whether a switch can own the device that begins at `at`.
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
    Err(bad(spec, why))
}

/// The device without options, as `dpdk:0000:05:00.0`.
fn device(spec: &str) -> String {
    match kind_of(spec) {
        "dpdk" => format!("dpdk:{}", options(spec).2.split(',').next().unwrap_or("")),
        _ => spec.split(',').next().unwrap_or("").to_owned(),
    }
}

/// The same for every way to write a device.
pub(super) fn full_device(spec: &str) -> String {
    // In lower case, as the kernel writes a PCI address; a spec of `vfio:` may have either.
    let mut device = device(spec);
    if kind_of(spec) == "vfio" {
        device.make_ascii_lowercase();
    }
    if kind_of(spec) == "vfio" && device.matches(':').count() == 2 {
        device = device.replacen(':', ":0000:", 1);
    }
    device
}

/// The segment between the switch of a device and its stations. Interfaces and sockets of a memif
/// have a name in each network namespace, NICs have one in the machine.
fn segment(spec: &str) -> Result<ShmSettings, OpenError> {
    let device = full_device(spec);
    let of_machine = device.matches(':').count() == 3;
    let node = if of_machine { String::new() } else { format!(".{}", node_segment()?) };
    let is_legal = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let name = format!("switch-{device}{node}").replace(|c| !is_legal(c), ".");
    match name.len() {
        ..=64 => Ok(ShmSettings::named(&name)),
        _ => Err(bad(spec, "its name is too long for a switch; write a shorter path")),
    }
}

/// The address that is asked for.
fn station_of(spec: &str) -> Option<Station> {
    options(spec).1.split(',').find_map(|part| part.strip_prefix("mac=")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_option_is_taken_out() {
        for (spec, left, choice) in [
            ("afpacket:eth0", "afpacket:eth0", Choice::IfThere),
            ("afpacket:eth0,switch=yes,mtu=1500", "afpacket:eth0,mtu=1500", Choice::Yes),
            ("vfio:05:00.0,switch=no", "vfio:05:00.0", Choice::No),
            (
                "dpdk(mtu=9,switch=yes):net_tap0,iface=b",
                "dpdk(mtu=9):net_tap0,iface=b",
                Choice::Yes,
            ),
            ("udp:lo", "udp:lo", Choice::No),
        ] {
            assert_eq!(split(spec, true).unwrap(), (left.to_owned(), choice), "{spec}");
        }
        assert_eq!(split("afpacket:eth0", false).unwrap().1, Choice::No);
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
    fn what_needs_no_switch_says_so() {
        for (spec, says) in [
            ("udp:lo", "they need no switch"),
            ("vlan(100):afpacket:lo", "the kernel's interface of the VLAN"),
            ("fault(loss=0.1):vlan(100):afpacket:lo", "the kernel's interface of the VLAN"),
            ("fault():ip(10.1.1.7/24):afpacket:lo", "give it the port inside ip(...)"),
            ("shm", "its processes need no switch"),
            ("pcap(file=a):shm", "a switch owns a device"),
            ("nonsense", "a switch owns a device"),
        ] {
            let why = open_switch(spec, &Serving::default()).map(drop).unwrap_err().to_string();
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
        assert!(!was_touched_lately(&socket), "there is none");
        let file = std::fs::File::create(&socket).unwrap();
        assert!(was_touched_lately(&socket));
        file.set_modified(std::time::SystemTime::now() - 2 * LATELY).unwrap();
        assert!(!was_touched_lately(&socket));
    }
}
