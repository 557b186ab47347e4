//! `barewire doctor`: checks of this machine, each with the command that fixes it.

use std::ffi::OsString;
use std::process::ExitCode;

use barewire_driver::frame::ETH_HDR_LEN;
use barewire_driver::open::{Device, device};
use barewire_driver::port::PortCaps;
use serde::Serialize;

use crate::cert_args::CertArgs;
use crate::fail::Fail;
use crate::info::UNREAD;
use crate::stats::since_1970_ns;
use crate::{out, ping};

mod cpu;
mod device;
mod keys;
mod machine;
mod memory;
mod nic;
mod running;
mod wire;

use machine::{CredentialFiles, Machine};

/// Checks this machine, and names the command that fixes each problem
///
/// Each check is `ok`, `warn` (works, but slower or with more jitter) or `missing` (the ports named
/// beside it do not work). Nothing is changed.
#[derive(clap::Args)]
#[command(after_long_help = "\
Exit codes:
  0  the port shm works, or the one given by --port, whatever else is missing
  1  it does not work, or a setting, a key or a certificate that is given cannot be used
  with --peer, if that is well: those of `barewire ping`

Examples:
  barewire doctor          a list for people
  barewire doctor --json   one JSON object per line: check, status, needed_for, found, mend
  barewire doctor --cert n1.pem --cert-key n1.key --roots ca.pem
                           also whether peers would accept this certificate
  barewire doctor --port afpacket:eth0 --peer 52:54:00:12:34:56
                           only that port, and whether the station answers: `barewire ping`
  barewire doctor --port udp:eth0 --key-file job.key
                           that port and that key

Environment:
  BAREWIRE_KEY_FILE, BAREWIRE_CERT_FILE, BAREWIRE_CERT_KEY_FILE, BAREWIRE_ROOTS_FILE,
  BAREWIRE_PEER_IDS  the files if no option names them")]
pub(crate) struct DoctorArgs {
    /// Prints one JSON object per line.
    #[arg(long)]
    json: bool,
    /// Checks this port instead of the machine, by opening it briefly.
    #[arg(long)]
    port: Option<String>,
    /// Pings this station over the port; same form as for `barewire ping`.
    #[arg(long, value_name = "ADDR", requires = "port", value_parser = ping::parse_target)]
    peer: Option<ping::Target>,
    /// File with the pre-shared key, to check it and to use it for --peer; several separated by
    /// colons.
    #[arg(long, value_name = "FILE", env = "BAREWIRE_KEY_FILE", hide_env = true)]
    key_file: Option<OsString>,
    #[command(flatten)]
    certificate: CertArgs,
}

impl DoctorArgs {
    /// The key files and the certificate.
    ///
    /// # Errors
    /// A certificate lacks a file.
    fn credentials(&self) -> Result<CredentialFiles, Fail> {
        let split = |files: &OsString| std::env::split_paths(files).collect();
        Ok(CredentialFiles {
            key_files: self.key_file.as_ref().map_or(Vec::new(), split),
            certificate: self.certificate.files()?,
            port: None,
            now_ns: since_1970_ns(),
        })
    }
}

/// Runs the checks on this machine and prints them.
///
/// # Errors
/// A certificate lacks a file. Unreadable files are results of checks.
pub(crate) fn run(args: &DoctorArgs) -> Result<ExitCode, Fail> {
    if let Some(port) = &args.port {
        return check_port(port, args);
    }
    let mut machine = Machine::local();
    machine.credentials = args.credentials()?;
    let checks = all(&machine);
    show(&checks, args)?;
    Ok(exit_code(&checks))
}

fn show(checks: &[Check], args: &DoctorArgs) -> Result<(), Fail> {
    checks.iter().try_for_each(|check| match args.json {
        true => out::json(check),
        false => out::print(text(check)),
    })
}

/// Checks whether `port` opens, whether the given keys or certificate can be used on it and, if a
/// station is given, whether it answers.
fn check_port(port: &str, args: &DoctorArgs) -> Result<ExitCode, Fail> {
    let mut credentials = args.credentials()?;
    let check = match ping::open(port) {
        Ok(opened) => {
            let caps = opened.caps();
            credentials.port = Some(caps.clone());
            port_check(caps, device(&caps.name))
        }
        Err(why) => {
            let text = why.to_string();
            let (why, mend) = split_mend(&text, "barewire info");
            Check::missing("port", "--port", why, mend)
        }
    };
    let mut checks = vec![check];
    checks.extend(keys::named(&credentials));
    show(&checks, args)?;
    let is_well = checks.iter().all(|check| check.status != Status::Missing);
    match &args.peer {
        Some(peer) if is_well => {
            let keys = (args.key_file.clone(), args.certificate.clone());
            ping::run(&ping::PingArgs::of(peer.clone(), port, keys).json(args.json))
        }
        _ => Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }),
    }
}

/// Splits the text of an error into problem and remedy, which is the last part, or `unsaid`.
fn split_mend<'a>(text: &'a str, unsaid: &'a str) -> (&'a str, &'a str) {
    match text.rsplit_once("; ") {
        Some((found, mend)) if !mend.is_empty() => (found, mend),
        _ => (text, unsaid),
    }
}

/// The check of a port that opens.
fn port_check(caps: &PortCaps, on: Device) -> Check {
    let found = format!("{}: {}, {} B a frame", caps.name, caps.station, caps.mtu + ETH_HDR_LEN);
    if on.is_up == Some(false) {
        let found = format!("{found}; {} is down, so frames are lost", on.name);
        return Check::warn("port", "--port", found, format!("sudo ip link set {} up", on.name));
    }
    if on.has_carrier == Some(false) {
        let found = format!("{found}; {} has no carrier, so frames are lost", on.name);
        let mend = format!("connect its cable, or the other end: sudo ethtool {}", on.name);
        return Check::warn("port", "--port", found, mend);
    }
    Check::ok("port", "--port", found)
}

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Check {
    /// Its name.
    check: &'static str,
    status: Status,
    /// What does not work while the check is `missing`.
    needed_for: &'static str,
    /// What was found, or the problem.
    found: String,
    /// The command that fixes it. `None` for `ok`.
    #[serde(skip_serializing_if = "Option::is_none")]
    mend: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Ok,
    Warn,
    Missing,
}

/// [`Check::needed_for`] of a check without which the first command of a new user fails.
const SHM: &str = "shm";
/// [`Check::needed_for`] of a check that concerns only performance.
const SPEED: &str = "speed";
const AFPACKET: &str = "afpacket";
const XDP: &str = "xdp";
const MEMIF: &str = "memif";
const VFIO: &str = "vfio";
/// [`Check::needed_for`] of a check without which no domain with a key opens.
const KEY: &str = "a key";
const DPDK: &str = "dpdk";

impl Check {
    fn ok(check: &'static str, needed_for: &'static str, found: impl Into<String>) -> Self {
        Self { check, status: Status::Ok, needed_for, found: found.into(), mend: None }
    }

    fn warn(
        check: &'static str,
        needed_for: &'static str,
        found: impl Into<String>,
        mend: impl Into<String>,
    ) -> Self {
        let mend = Some(mend.into());
        Self { check, status: Status::Warn, needed_for, found: found.into(), mend }
    }

    fn missing(
        check: &'static str,
        needed_for: &'static str,
        found: impl Into<String>,
        mend: impl Into<String>,
    ) -> Self {
        Self { status: Status::Missing, ..Self::warn(check, needed_for, found, mend) }
    }
}

fn all(machine: &Machine) -> Vec<Check> {
    let mut checks = vec![
        cpu::kernel(machine),
        memory::shm_space(machine),
        memory::memif(machine),
        memory::memlock(machine),
        memory::huge_2m(machine),
        memory::huge_1g(machine),
        memory::transparent(machine),
        cpu::count(machine),
        cpu::isolation(machine),
        cpu::governor(machine),
        cpu::smt(machine),
        cpu::clocksource(machine),
        keys::aes(machine),
        settings(machine),
        keys::files(&machine.credentials),
        keys::certificate(&machine.credentials),
        keys::memory(machine),
        wire::interfaces(machine),
        wire::raw_socket(machine),
        wire::xdp(machine),
        wire::egress(machine),
        wire::udp_buffers(machine),
        device::iommu(machine),
        device::vfio(machine),
        device::dpdk(machine),
        running::switches(machine),
        running::statistics(machine),
    ];
    checks.extend(nic::nics(machine));
    checks
}

/// Checks the `BAREWIRE_` variables that are set.
fn settings(machine: &Machine) -> Check {
    let name = "settings";
    let Some((variable, why)) = machine.wrong_settings.first() else {
        return Check::ok(name, SHM, "every BAREWIRE_ variable that is set can be used");
    };
    let found = format!("{variable}: {why}");
    match why == UNREAD {
        true => Check::warn(name, SHM, found, "barewire info --settings lists those that are read"),
        false => {
            let variable = variable.split('=').next().unwrap_or_default();
            Check::missing(name, SHM, found, format!("correct it, or: unset {variable}"))
        }
    }
}

fn exit_code(checks: &[Check]) -> ExitCode {
    let lacking = |c: &Check| c.status == Status::Missing && [SHM, KEY].contains(&c.needed_for);
    if checks.iter().any(lacking) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn text(check: &Check) -> String {
    let status = match check.status {
        Status::Ok => "ok",
        Status::Warn => "warn",
        Status::Missing => "missing",
    };
    let need = match check.status {
        Status::Missing => format!(" (needed for {})", check.needed_for),
        Status::Ok | Status::Warn => String::new(),
    };
    let mut text = format!("{status:<8} {:<13} {}{need}\n", check.check, check.found);
    if let Some(mend) = &check.mend {
        text.push_str(&format!("{:<22} mend: {mend}\n", ""));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use machine::fixture::Fixture;

    #[test]
    fn only_what_shm_needs_decides_the_exit_code() {
        let checks = |need| [Check::ok("a", SHM, ""), Check::missing("b", need, "", "x")];
        assert_eq!(exit_code(&checks(VFIO)), ExitCode::SUCCESS);
        assert_eq!(exit_code(&checks(SHM)), ExitCode::FAILURE);
        assert_eq!(exit_code(&checks(KEY)), ExitCode::FAILURE);
        assert_eq!(exit_code(&[Check::warn("a", SHM, "", "x")]), ExitCode::SUCCESS);
    }

    #[test]
    fn a_variable_that_means_nothing_is_told() {
        let mut machine = Fixture::full().machine();
        assert_eq!(settings(&machine).status, Status::Ok);
        machine.wrong_settings = vec![("FI_BAREWIRE_PROT".to_owned(), UNREAD.to_owned())];
        assert_eq!(settings(&machine).status, Status::Warn);
        let wrong = ("BAREWIRE_NEAR=maybe".to_owned(), "expected 0 or 1".to_owned());
        machine.wrong_settings.insert(0, wrong);
        let check = settings(&machine);
        assert_eq!(check.status, Status::Missing);
        assert_eq!(check.found, "BAREWIRE_NEAR=maybe: expected 0 or 1");
        assert_eq!(check.mend.unwrap(), "correct it, or: unset BAREWIRE_NEAR");
    }

    #[test]
    fn there_is_a_mend_whatever_an_error_says() {
        assert_eq!(split_mend("a; b; chmod 600 x", "y"), ("a; b", "chmod 600 x"));
        assert_eq!(split_mend("a", "y"), ("a", "y"));
        assert_eq!(split_mend("a; ", "y"), ("a; ", "y"));
    }

    #[test]
    fn a_port_without_a_carrier_is_told() {
        let caps = barewire_driver::open::open("shm:doctor-carrier").unwrap().caps().clone();
        let name = "eth0".to_owned();
        let on = |is_up| Device { name: name.clone(), is_up, ..Device::default() };
        let with = |is_up, carrier| Device { has_carrier: Some(carrier), ..on(Some(is_up)) };
        assert_eq!(port_check(&caps, on(None)).status, Status::Ok);
        assert_eq!(port_check(&caps, with(true, true)).status, Status::Ok);
        let check = port_check(&caps, with(true, false));
        assert_eq!(check.status, Status::Warn);
        assert!(check.found.contains("eth0 has no carrier"), "{check:?}");
        let check = port_check(&caps, with(false, false));
        assert!(check.found.ends_with("eth0 is down, so frames are lost"), "{check:?}");
        assert_eq!(check.mend.unwrap(), "sudo ip link set eth0 up");
    }

    #[test]
    fn a_machine_with_everything_has_nothing_to_mend() {
        let checks = all(&Fixture::full().machine());
        assert!(checks.iter().all(|c| c.status == Status::Ok && c.mend.is_none()), "{checks:#?}");
    }

    /// Goal: no check panics or stays silent where nothing can be read.
    #[test]
    fn an_empty_machine_is_told_what_it_lacks() {
        let checks = all(&Fixture::empty().machine());
        assert_eq!(exit_code(&checks), ExitCode::FAILURE);
        for check in &checks {
            assert!(!check.found.is_empty(), "{check:?}");
            assert_eq!(check.mend.is_none(), check.status == Status::Ok, "{check:?}");
        }
    }

    #[test]
    fn a_missing_requirement_is_printed_with_its_use_and_remedy() {
        let check = Check::missing("vfio", VFIO, "no /dev/vfio/vfio", "sudo modprobe vfio-pci");
        let lines = text(&check);
        assert!(lines.starts_with("missing  vfio          no /dev/vfio/vfio (needed for vfio)\n"));
        assert!(lines.ends_with("mend: sudo modprobe vfio-pci\n"));
        let json = serde_json::to_value(&check).unwrap();
        assert_eq!(json["status"], "missing");
        assert_eq!(json["mend"], "sudo modprobe vfio-pci");
    }
}
