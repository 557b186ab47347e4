//! `cargo xtask vm`: runs a command in a small virtual machine with an IOMMU and two NICs.
//!
//! QEMU emulates the processor, so neither KVM nor root nor a network is needed. The guest is
//! Debian's kernel for virtual machines and a static busybox, fetched to `target/vm`, and anew when
//! Debian has a later kernel; only QEMU itself is installed. A device that the installed QEMU does
//! not have comes from a later one.

mod cpio;
mod debian;
pub(crate) mod guest;
pub(crate) mod hosts;
mod kernel;
mod monitor;
pub(crate) mod mpi;
mod qemu;
pub(crate) mod suite;
mod wire;

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use crate::packages::{self, Tool};
use crate::{cargo, root, target_dir};
use guest::{Guest, Model};
use kernel::Flavour;

/// The emulator that runs the guest.
pub(crate) const QEMU: Tool = Tool { program: "qemu-system-x86_64", package: "qemu-system-x86" };

/// Why a guest cannot run: an external component is missing.
#[derive(Debug)]
pub(crate) struct NotHere(pub(crate) String);

/// What to run in which machine.
#[derive(clap::Args)]
#[command(after_help = "\
The guest's two NICs are bound to vfio-pci and joined by a hub; NIC0 and NIC1 in the environment of
COMMAND are their PCI addresses. COMMAND is one of our programs (barewire, or a path) with its
arguments, or a single word with spaces for the guest's shell. Exit code: that of COMMAND; 3 if
it succeeded and the IOMMU refused an access; 124 if the guest did not end in time.

Examples:
  cargo xtask vm -- barewire doctor
  cargo xtask vm --nic e1000e -- barewire info
  cargo xtask vm -- 'barewire pingpong --listen --once --port vfio:$NIC0 & barewire ...'
  cargo xtask vm --with ./notes.txt -- cat notes.txt")]
pub(crate) struct VmArgs {
    /// Kind of the guest's NICs.
    #[arg(long, value_enum, default_value = "virtio")]
    nic: Model,
    /// Number of NICs.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(0..=8))]
    nics: u16,
    /// Another pair of NICs of this kind, joined by a hub of its own.
    #[arg(long, value_enum, value_name = "NIC")]
    pair: Vec<Model>,
    /// Processors of the guest.
    #[arg(long, default_value_t = 2)]
    cpus: usize,
    /// Reserved hugepages of 2 MiB.
    #[arg(long, default_value_t = 64)]
    hugepages: usize,
    /// Width of an address behind the IOMMU: 39 or 48.
    #[arg(long, default_value_t = 48)]
    iova_bits: u8,
    /// Leaves the NICs without a driver.
    #[arg(long)]
    no_bind: bool,
    /// Takes IOMMU faults for granted.
    #[arg(long)]
    allow_faults: bool,
    /// Uses KVM, which has to work with an emulated IOMMU.
    #[arg(long)]
    kvm: bool,
    /// Another program or file to take along: programs to /usr/bin, others to where COMMAND starts.
    #[arg(long)]
    with: Vec<PathBuf>,
    /// Takes DPDK's drivers of these NICs along, and its testpmd, where they are installed.
    #[arg(long)]
    dpdk: bool,
    /// Neither builds the program `barewire` nor takes it along.
    #[arg(long)]
    no_barewire: bool,
    /// The kernel that boots.
    #[arg(long, value_enum, default_value = "cloud")]
    kernel: Flavour,
    /// A kernel module to load beside those of VFIO.
    #[arg(long)]
    module: Vec<String>,
    /// Joins a NIC to a socket instead of the hub: OWN:OTHER, two paths of Unix datagram sockets,
    /// once per NIC from the first on. One frame is one datagram.
    #[arg(long, value_name = "OWN:OTHER")]
    socket: Vec<String>,
    /// Seconds until the guest is killed.
    #[arg(long, default_value_t = 120)]
    limit: u64,
    /// What to run.
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// Boots the guest and runs the command.
///
/// # Errors
/// No guest is available, or `barewire` does not build.
pub(crate) fn run(args: &VmArgs) -> Result<ExitCode, String> {
    packages::provide(&[QEMU, packages::XZ]);
    let mut guest = Guest::with_pair("vm", args.nic.device());
    let stations = 1..=args.nics;
    guest.nics = stations.map(|n| guest::Nic::on_hub(args.nic.device(), n)).collect();
    for (nic, paths) in guest.nics.iter_mut().zip(&args.socket) {
        let (own, other) = paths.split_once(':').ok_or("--socket takes OWN:OTHER")?;
        nic.cable = guest::Cable::Datagram(own.into(), other.into());
    }
    for (model, hub) in args.pair.iter().zip(1..) {
        for station in guest.nics.len() as u16 + 1..=guest.nics.len() as u16 + 2 {
            let cable = guest::Cable::Hub(hub);
            guest.nics.push(guest::Nic { cable, ..guest::Nic::on_hub(model.device(), station) });
        }
    }
    guest.cpu_count = args.cpus;
    guest.hugepages = args.hugepages;
    guest.iova_bits = args.iova_bits;
    guest.bind = !args.no_bind;
    guest.faults_allowed = args.allow_faults;
    guest.kvm = args.kvm;
    guest.kernel = args.kernel;
    guest.limit = Duration::from_secs(args.limit);
    // Leaked once per run: a module's name lives as long as the guest's.
    guest.modules = args.module.iter().map(|name| &*name.clone().leak()).collect();
    if !args.no_barewire {
        guest = guest.program(&barewire()?);
    }
    guest = with_setup(guest);
    if args.dpdk {
        guest.files.extend(suite::testpmd());
    }
    for file in &args.with {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let dir = if packages::is_executable(file) { "usr/bin" } else { "data" };
        guest.files.push((file.clone(), format!("{dir}/{name}")));
    }
    guest.command = command_line(&args.command);
    let ended = guest::run(&guest, &mut |line| println!("{line}")).map_err(|why| why.0)?;
    eprint!("{}", ended.trouble);
    if ended.faults > 0 {
        eprintln!("the IOMMU refused {} accesses", ended.faults);
    }
    Ok(match ended.code {
        None => ExitCode::from(124),
        Some(0) if ended.faults > 0 && !guest.faults_allowed => ExitCode::from(3),
        Some(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
    })
}

/// Adds the machine setup script to the guest, if it exists.
pub(crate) fn with_setup(mut guest: Guest) -> Guest {
    let script = root().join("hugepage-setup.sh");
    if script.is_file() {
        guest.files.push((script, "usr/bin/hugepage-setup.sh".to_owned()));
    }
    guest
}

/// Builds the command in the suites' profile, and returns its path.
///
/// # Errors
/// The build fails; the compiler has printed the reason.
pub(crate) fn barewire() -> Result<PathBuf, String> {
    let status = Command::new(cargo())
        .args(["build", "--quiet", "--package", "barewire-cli", "--profile", "test"])
        .current_dir(root())
        .stdin(Stdio::null())
        .status()
        .map_err(|why| format!("cargo does not start: {why}"))?;
    if !status.success() {
        return Err("barewire does not build".to_owned());
    }
    Ok(target_dir().join("debug/barewire"))
}

/// One word is a shell command; several are a program and its arguments.
fn command_line(words: &[String]) -> String {
    match words {
        [script] => format!("{script}\n"),
        words => {
            let quoted = words.iter().map(|word| format!("'{}'", word.replace('\'', "'\\''")));
            format!("{}\n", quoted.collect::<Vec<_>>().join(" "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_reach_the_guests_shell_as_they_are() {
        let words = |list: &[&str]| list.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>();
        assert_eq!(command_line(&words(&["a; b $NIC0"])), "a; b $NIC0\n");
        assert_eq!(command_line(&words(&["echo", "it's"])), "'echo' 'it'\\''s'\n");
    }
}
