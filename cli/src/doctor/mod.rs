//! `barewire doctor`: what this machine has and lacks, and the command that mends each.

use std::process::ExitCode;

use serde::Serialize;

use crate::cert_args::CertArgs;
use crate::fail::Fail;
use crate::{out, ping};

mod cpu;
mod device;
mod keys;
mod machine;
mod memory;
mod nic;
mod running;
mod wire;

use machine::Machine;

/// Checks this machine, and names the command that fixes each problem
///
/// Each check is `ok`, `warn` (works, but slower or with more jitter) or `missing` (the ports named
/// beside it do not work). Nothing is changed.
#[derive(clap::Args)]
#[command(after_long_help = "\
Exit codes:
  0  the port shm works, whatever else is missing
  1  the port shm, or the one given by --port, does not work
  with --peer: those of `barewire ping`

Examples:
  barewire doctor          a list for people
  barewire doctor --json   one JSON object per line: check, status, needed_for, found, mend
  barewire doctor --cert n1.pem --cert-key n1.key --roots ca.pem
                           also whether peers would accept this certificate
  barewire doctor --port afpacket:eth0 --peer 52:54:00:12:34:56
                           only that port, and whether the station answers: `barewire ping`")]
pub(crate) struct DoctorArgs {
    /// Prints one JSON object per line.
    #[arg(long)]
    json: bool,
    /// Checks this port instead of the machine, by opening it briefly.
    #[arg(long)]
    port: Option<String>,
    /// Pings this station over the port; same form as for `barewire ping`.
    #[arg(long, value_name = "ADDR", requires = "port", value_parser = ping::whom)]
    peer: Option<ping::Whom>,
    #[command(flatten)]
    certificate: CertArgs,
}

/// Runs the checks on this machine and prints them.
///
/// # Errors
/// None: what cannot be read is a check that says so.
pub(crate) fn run(args: &DoctorArgs) -> Result<ExitCode, Fail> {
    if let Some(port) = &args.port {
        return of_port(port, args);
    }
    let mut machine = Machine::this();
    machine.certificate = args.certificate.files()?;
    let checks = all(&machine);
    for check in &checks {
        if args.json {
            out::json(check)?;
        } else {
            out::print(text(check))?;
        }
    }
    Ok(exit_code(&checks))
}

/// Says whether `port` opens and, if a station is named, whether that answers.
fn of_port(port: &str, args: &DoctorArgs) -> Result<ExitCode, Fail> {
    let check = match ping::open(port) {
        Ok(opened) => {
            let caps = opened.caps();
            let bytes = caps.mtu + 14;
            Check::ok(
                "port",
                "--port",
                format!("{}: {}, {bytes} B a frame", caps.name, caps.station),
            )
        }
        Err(why) => {
            let text = why.to_string();
            // What mends it stands last.
            let (why, mend) = text.rsplit_once("; ").unwrap_or((&text, "barewire info"));
            Check::missing("port", "--port", why, mend)
        }
    };
    let opens = check.status == Status::Ok;
    if args.json {
        out::json(&check)?
    } else {
        out::print(text(&check))?
    }
    match args.peer {
        Some(peer) if opens => {
            let certificate = args.certificate.clone();
            ping::run(&ping::PingArgs::of(peer, port, certificate, args.json))
        }
        _ => Ok(if opens { ExitCode::SUCCESS } else { ExitCode::FAILURE }),
    }
}

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Check {
    /// Its name.
    check: &'static str,
    status: Status,
    /// What does not work while it is `missing`.
    needed_for: &'static str,
    /// What is there, or what is wrong with it.
    found: String,
    /// The command that mends it. Never there with `ok`.
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

/// What [`Check::needed_for`] says of a check without which the first command fails.
const SHM: &str = "shm";
/// Of a check that only costs time.
const SPEED: &str = "speed";
const AFPACKET: &str = "afpacket";
const XDP: &str = "xdp";
const MEMIF: &str = "memif";
const VFIO: &str = "vfio";
/// Of a check without which no domain with a key opens.
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
        keys::files(machine),
        keys::certificate(machine),
        wire::interfaces(machine),
        wire::raw_socket(machine),
        wire::xdp(machine),
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

fn exit_code(checks: &[Check]) -> ExitCode {
    let lacking = |c: &Check| c.status == Status::Missing && c.needed_for == SHM;
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
        assert_eq!(exit_code(&[Check::warn("a", SHM, "", "x")]), ExitCode::SUCCESS);
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
    fn what_is_missing_is_printed_with_its_use_and_its_mend() {
        let check = Check::missing("vfio", VFIO, "no /dev/vfio/vfio", "sudo modprobe vfio-pci");
        let lines = text(&check);
        assert!(lines.starts_with("missing  vfio          no /dev/vfio/vfio (needed for vfio)\n"));
        assert!(lines.ends_with("mend: sudo modprobe vfio-pci\n"));
        let json = serde_json::to_value(&check).unwrap();
        assert_eq!(json["status"], "missing");
        assert_eq!(json["mend"], "sudo modprobe vfio-pci");
    }
}
