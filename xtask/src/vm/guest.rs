//! One virtual machine: its contents, its start, and its results.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::NotHere;
use super::cpio::Archive;
use super::kernel::{Flavour, Kernel};
use super::monitor;
use super::qemu::Emulator;
use crate::target_dir;

/// Kernel modules that every guest loads.
const MODULES: [&str; 3] = ["vfio", "vfio_iommu_type1", "vfio_pci"];

/// Prefix of console lines that are monitor commands.
const ASKS: &str = "VM-ASKS ";

/// Script of the guest's first process.
const INIT: &str = include_str!("init.sh");

/// Which NIC the guest has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Model {
    /// virtio-net, modern, behind the IOMMU.
    Virtio,
    /// Intel 82574L.
    E1000e,
    /// Intel 82540EM.
    E1000,
    /// Intel 82576. QEMU has it from 8.0 on.
    Igb,
    /// VMware vmxnet3.
    Vmxnet3,
}

impl Model {
    /// The device's name for QEMU with the properties that make it usable behind an IOMMU.
    pub(crate) fn device(self) -> &'static str {
        match self {
            Self::Virtio => "virtio-net-pci,disable-legacy=on,iommu_platform=on",
            Self::E1000e => "e1000e",
            Self::E1000 => "e1000",
            Self::Igb => "igb",
            Self::Vmxnet3 => "vmxnet3",
        }
    }
}

/// The other end of a NIC's cable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cable {
    /// The hub of this number, shared by all NICs of the guest with this cable.
    Hub(u16),
    /// Unix datagram sockets: the NIC's own and the one it sends to. One frame per datagram.
    Datagram(PathBuf, PathBuf),
}

/// A NIC of the guest.
#[derive(Clone, Debug)]
pub(crate) struct Nic {
    /// QEMU's `-device` argument, without the harness's properties.
    pub(crate) device: String,
    pub(crate) cable: Cable,
    /// Last two bytes of its address, 52:54:00:00:XX:XX.
    pub(crate) station: u16,
    /// Whether the NIC is a second function in the previous NIC's slot, which puts both in one
    /// IOMMU group.
    pub(crate) shares_slot: bool,
}

impl Nic {
    /// A NIC with its own slot on the first hub.
    pub(crate) fn on_hub(device: &str, station: u16) -> Self {
        Self { device: device.to_owned(), cable: Cable::Hub(0), station, shares_slot: false }
    }
}

/// Description of a guest.
#[derive(Clone, Debug)]
pub(crate) struct Guest {
    /// Distinguishes the files of guests that run at the same time.
    pub(crate) name: String,
    pub(crate) nics: Vec<Nic>,
    pub(crate) cpu_count: usize,
    pub(crate) memory_mib: usize,
    /// 2 MiB pages reserved at boot.
    pub(crate) hugepages: usize,
    /// Width of an IOMMU address, bits.
    pub(crate) iova_bits: u8,
    /// Whether interrupts are remapped; without it VFIO refuses to work.
    pub(crate) intremap: bool,
    /// Whether every NIC is bound to vfio-pci before the command runs.
    pub(crate) bind: bool,
    /// Whether IOMMU faults are expected instead of a failure.
    pub(crate) faults_allowed: bool,
    pub(crate) kernel: Flavour,
    /// Kernel modules besides those of VFIO.
    pub(crate) modules: Vec<&'static str>,
    /// Programs and files of the host, and their paths in the guest. A program's libraries are
    /// added.
    pub(crate) files: Vec<(PathBuf, String)>,
    /// Command of the guest's shell, with NICS, NIC0, NIC1 ... in its environment.
    pub(crate) command: String,
    pub(crate) limit: Duration,
    /// Uses KVM instead of emulation.
    pub(crate) kvm: bool,
    /// Socket of QEMU's monitor, if another guest sends it commands.
    pub(crate) monitor: Option<PathBuf>,
    /// Socket of the monitor for this guest's commands; `None` for its own.
    pub(crate) asks: Option<PathBuf>,
}

impl Guest {
    /// A guest with two NICs on a hub and no files.
    pub(crate) fn with_pair(name: &str, device: &str) -> Self {
        Self {
            name: name.to_owned(),
            nics: vec![Nic::on_hub(device, 1), Nic::on_hub(device, 2)],
            cpu_count: 2,
            memory_mib: 768,
            hugepages: 64,
            iova_bits: 48,
            intremap: true,
            bind: true,
            faults_allowed: false,
            kernel: Flavour::Cloud,
            modules: Vec::new(),
            files: Vec::new(),
            command: String::new(),
            limit: Duration::from_secs(120),
            kvm: false,
            monitor: None,
            asks: None,
        }
    }

    /// Socket of the monitor of a guest that runs in `dir`.
    fn monitor_in(&self, dir: &Path) -> PathBuf {
        self.monitor.clone().unwrap_or_else(|| dir.join("monitor"))
    }

    /// Adds a program of the host under its own name.
    pub(crate) fn program(mut self, path: &Path) -> Self {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        self.files.push((path.to_owned(), format!("usr/bin/{}", name.unwrap_or_default())));
        self
    }
}

/// Result of a guest.
#[derive(Debug)]
pub(crate) struct GuestOutput {
    /// The command's exit code; `None` if the guest reported none within its time limit.
    pub(crate) code: Option<i32>,
    /// Accesses that the IOMMU refused.
    pub(crate) faults: u32,
    /// What the command printed.
    pub(crate) output: String,
    /// Problems of the guest itself, in a few lines.
    pub(crate) trouble: String,
}

/// Boots `guest`, passes every output line of its command to `on_line`, and waits for its end.
///
/// # Errors
/// [`NotHere`]: QEMU or the kernel is not available.
pub(crate) fn run(guest: &Guest, on_line: &mut dyn FnMut(&str)) -> Result<GuestOutput, NotHere> {
    let emulator = Emulator::with(guest.nics.iter().map(|nic| nic.device.as_str()))?;
    let kernel = Kernel::provide(guest.kernel)?;
    sweep(&target_dir().join("vm"));
    let dir = target_dir().join("vm").join(format!("run-{}-{}", std::process::id(), guest.name));
    let failed = |why: std::io::Error| NotHere(format!("{}: {why}", dir.display()));
    std::fs::create_dir_all(&dir).map_err(failed)?;
    let initrd = initrd(guest, &kernel)?;
    std::fs::write(dir.join("initrd"), initrd).map_err(failed)?;
    let mut running = Running::start(guest, (&emulator, &kernel), &dir).map_err(failed)?;
    let ended = running.wait(guest, on_line);
    drop(running);
    // The guest's files are no longer needed.
    let _ = std::fs::remove_dir_all(&dir);
    Ok(ended)
}

/// Removes the files of killed runs from `dir`.
fn sweep(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix("run-").and_then(|rest| rest.split('-').next());
        let is_over = |pid: &str| !Path::new("/proc").join(pid).exists();
        if pid.is_some_and(|pid| pid.parse::<u32>().is_ok() && is_over(pid)) {
            // A failure is left to the next run.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// The initial RAM disk: a shell, the modules, the files and the command.
fn initrd(guest: &Guest, kernel: &Kernel) -> Result<Vec<u8>, NotHere> {
    let mut archive = Archive::default();
    for dir in ["dev", "proc", "sys", "data", "run", "etc/security/limits.d", "bin", "sbin"] {
        archive.dir(dir);
    }
    archive.dir_with("tmp", 0o1777);
    archive.file("init", 0o755, INIT.as_bytes());
    archive.copy(&kernel.shell, "bin/busybox").map_err(NotHere)?;
    archive.file(
        "etc/passwd",
        0o644,
        b"root:x:0:0::/tmp:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n",
    );
    archive.file("etc/group", 0o644, b"root:x:0:\nuser:x:1000:\n");
    let wanted: Vec<&str> = MODULES.iter().chain(&guest.modules).copied().collect();
    let mut order = String::new();
    for file in kernel.modules(&wanted)? {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        archive.copy(&file, &format!("mods/{name}")).map_err(NotHere)?;
        order.push_str(&name);
        order.push('\n');
    }
    archive.file("mods/order", 0o644, order.as_bytes());
    let mut libraries = BTreeSet::new();
    for (from, to) in &guest.files {
        libraries.extend(libraries_of(from));
        let stripped = stripped(from);
        archive.copy(stripped.as_deref().unwrap_or(from), to).map_err(NotHere)?;
    }
    for library in libraries {
        archive.copy(&library, &library.to_string_lossy()).map_err(NotHere)?;
    }
    let kvm = if guest.kvm { "export VM_KVM=1\n" } else { "" };
    let env = format!("HUGEPAGES={}\nBIND={}\n{kvm}", guest.hugepages, u8::from(guest.bind));
    archive.file("vm.env", 0o644, env.as_bytes());
    archive.file("vm.cmd", 0o644, guest.command.as_bytes());
    Ok(archive.finish())
}

/// The shared libraries of `program`, and its loader; none for other files.
fn libraries_of(program: &Path) -> Vec<PathBuf> {
    let Ok(output) = Command::new("ldd").arg(program).stdin(Stdio::null()).output() else {
        return Vec::new();
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let words = text.split_whitespace().filter(|word| word.starts_with('/'));
    words.map(PathBuf::from).filter(|path| path.is_file()).collect()
}

/// A copy of `program` without debug information: the guest has little memory, and an emulated
/// processor unpacks every byte.
fn stripped(program: &Path) -> Option<PathBuf> {
    // Guests that start together use the same program: the second one finds the copy.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = target_dir().join("vm/stripped");
    std::fs::create_dir_all(&dir).ok()?;
    let to = dir.join(program.file_name()?);
    let when = |path: &Path| path.metadata().and_then(|meta| meta.modified()).ok();
    if to.is_file() && when(&to) >= when(program) {
        return Some(to);
    }
    let part = dir.join(format!("{}.{}", program.file_name()?.display(), std::process::id()));
    let done = Command::new("strip")
        .arg("-o")
        .args([&part, &program.to_owned()])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !done.is_ok_and(|status| status.success()) {
        return None;
    }
    std::fs::rename(part, &to).ok()?;
    Some(to)
}

/// A running guest. Killed when dropped.
struct Running {
    child: Child,
    dir: PathBuf,
}

impl Running {
    fn start(
        guest: &Guest,
        (emulator, kernel): (&Emulator, &Kernel),
        dir: &Path,
    ) -> std::io::Result<Self> {
        for file in ["console", "output"] {
            File::create(dir.join(file))?;
        }
        let log = File::create(dir.join("qemu"))?;
        let child = emulator
            .command()
            .args(arguments(guest, (emulator, kernel), dir))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        Ok(Self { child, dir: dir.to_owned() })
    }

    fn wait(&mut self, guest: &Guest, on_line: &mut dyn FnMut(&str)) -> GuestOutput {
        let started = Instant::now();
        let mut lines = Lines::open(&self.dir.join("output"));
        let mut asked = Lines::open(&self.dir.join("console"));
        let monitor = guest.asks.clone().unwrap_or_else(|| guest.monitor_in(&self.dir));
        let mut ended =
            GuestOutput { code: None, faults: 0, output: String::new(), trouble: String::new() };
        let mut status = None;
        loop {
            let over = self.child.try_wait().map_or(true, |ended| {
                status = ended;
                ended.is_some()
            });
            for line in lines.take() {
                if let Some(result) = line.strip_prefix("VM-RESULT ") {
                    (ended.code, ended.faults) = result_of(result);
                } else if !line.starts_with("VM-READY") {
                    on_line(&line);
                    ended.output.push_str(&line);
                    ended.output.push('\n');
                }
            }
            for line in asked.take() {
                let command = line.split_once(ASKS).map(|(_, command)| command);
                if let Some(Err(why)) =
                    command.map(|command| monitor::run_command(&monitor, command))
                {
                    // The guest times out waiting for the command's effect, and reports that.
                    ended.trouble.push_str(&format!("{line}: {}: {why}\n", monitor.display()));
                }
            }
            // The guest has finished; its power-off takes another half second.
            if over || ended.code.is_some() {
                break;
            }
            if started.elapsed() > guest.limit {
                ended.trouble = format!("the guest did not end in {} s\n", guest.limit.as_secs());
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        if ended.code.is_none() {
            if let Some(status) = status {
                ended.trouble.push_str(&format!("qemu ended by itself: {status}\n"));
            }
            for file in ["qemu", "console"] {
                let text = std::fs::read(self.dir.join(file)).unwrap_or_default();
                let text = String::from_utf8_lossy(&text).into_owned();
                let lines: Vec<&str> = text.lines().collect();
                for line in &lines[lines.len().saturating_sub(15)..] {
                    ended.trouble.push_str(&format!("{file}: {line}\n"));
                }
            }
        }
        ended
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail if QEMU has exited already. A wedged QEMU ignores weaker signals.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Parses `code=0 faults=0`.
fn result_of(text: &str) -> (Option<i32>, u32) {
    let value = |key: &str| text.split_whitespace().find_map(|word| word.strip_prefix(key));
    let code = value("code=").and_then(|code| code.parse().ok());
    (code, value("faults=").and_then(|faults| faults.parse().ok()).unwrap_or(0))
}

/// A line reader of a file that grows.
struct Lines {
    file: Option<File>,
    rest: Vec<u8>,
    at: u64,
}

impl Lines {
    fn open(path: &Path) -> Self {
        Self { file: File::open(path).ok(), rest: Vec::new(), at: 0 }
    }

    fn take(&mut self) -> Vec<String> {
        let Some(file) = &mut self.file else { return Vec::new() };
        let mut fresh = Vec::new();
        if file.seek(SeekFrom::Start(self.at)).is_ok() {
            self.at += file.read_to_end(&mut fresh).unwrap_or(0) as u64;
        }
        self.rest.extend(fresh);
        let mut lines = Vec::new();
        while let Some(end) = self.rest.iter().position(|&b| b == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            lines.push(String::from_utf8_lossy(&line).trim_end().to_owned());
        }
        lines
    }
}

/// QEMU's command line.
fn arguments(guest: &Guest, (emulator, kernel): (&Emulator, &Kernel), dir: &Path) -> Vec<String> {
    // Emulation uses an Intel processor, because Linux then trusts the time-stamp counters of
    // several processors to be synchronized, as they are here, and reads the clock without a VM
    // exit.
    let cpu = if guest.kvm { "host" } else { "max,vendor=GenuineIntel" };
    let accel = if guest.kvm { "kvm" } else { "tcg,thread=multi" };
    // x2APIC, which emulation has in later QEMUs only: with the APIC's registers in memory QEMU
    // 10.0 at times loses the end of an interrupt, and the guest stands still.
    let remap = match (guest.intremap, emulator) {
        (false, _) => "off",
        (true, Emulator::Unpacked(_)) if !guest.kvm => "on,eim=on",
        (true, _) => "on",
    };
    let append = "console=ttyS0 quiet loglevel=3 panic=-1 no_timer_check intel_iommu=on \
                  mitigations=off";
    let path = |name: &str| dir.join(name).display().to_string();
    let mut args: Vec<String> = [
        "-no-user-config -nodefaults -display none -no-reboot".to_owned(),
        "-machine q35,kernel-irqchip=split".to_owned(),
        format!("-accel {accel} -cpu {cpu} -smp {} -m {}", guest.cpu_count, guest.memory_mib),
        format!("-device intel-iommu,intremap={remap},aw-bits={}", guest.iova_bits),
    ]
    .iter()
    .flat_map(|words| words.split(' ').map(str::to_owned).collect::<Vec<_>>())
    .collect();
    for serial in ["console", "output"] {
        args.extend(["-serial".to_owned(), format!("file:{}", path(serial))]);
    }
    let monitor = guest.monitor_in(dir).display().to_string();
    args.extend(["-monitor".to_owned(), format!("unix:{monitor},server=on,wait=off")]);
    args.extend(["-kernel".to_owned(), kernel.image.display().to_string()]);
    args.extend(["-initrd".to_owned(), path("initrd"), "-append".to_owned(), append.to_owned()]);
    let mut slot = 0;
    for (n, nic) in guest.nics.iter().enumerate() {
        if !nic.shares_slot {
            slot += 1;
            let port = format!(
                "pcie-root-port,id=rp{slot},chassis={slot},slot={slot},addr={:x}.0",
                slot + 3
            );
            args.extend(["-device".to_owned(), port]);
        }
        let shared = guest.nics.get(n + 1).is_some_and(|next| next.shares_slot);
        let function = u8::from(nic.shares_slot);
        let multi = if shared { ",multifunction=on" } else { "" };
        args.extend(["-netdev".to_owned(), netdev(n, &nic.cable)]);
        let [high, low] = nic.station.to_be_bytes();
        args.extend([
            "-device".to_owned(),
            format!(
                "{},netdev=n{n},bus=rp{slot},addr=0.{function}{multi},romfile=,\
                 mac=52:54:00:00:{high:02x}:{low:02x}",
                nic.device
            ),
        ]);
    }
    args
}

fn netdev(n: usize, cable: &Cable) -> String {
    match cable {
        Cable::Hub(hub) => format!("hubport,id=n{n},hubid={hub}"),
        Cable::Datagram(own, other) => format!(
            "dgram,id=n{n},local.type=unix,local.path={},remote.type=unix,remote.path={}",
            own.display(),
            other.display()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_line_is_understood() {
        assert_eq!(result_of("code=7 faults=2"), (Some(7), 2));
        assert_eq!(result_of("code= faults="), (None, 0));
    }

    #[test]
    fn functions_of_one_slot_share_a_port() {
        let mut guest = Guest::with_pair("x", "e1000e");
        guest.nics[1].shares_slot = true;
        let kernel_args = {
            let none = PathBuf::new();
            let kernel = Kernel::at(none.clone(), none.clone(), none.clone());
            arguments(&guest, (&Emulator::Installed, &kernel), &none).join(" ")
        };
        assert!(kernel_args.contains("bus=rp1,addr=0.0,multifunction=on,romfile="));
        assert!(kernel_args.contains("bus=rp1,addr=0.1,romfile=,mac=52:54:00:00:00:02"));
        assert!(!kernel_args.contains("rp2"));
    }

    #[test]
    fn files_of_killed_runs_are_removed() {
        let dir = std::env::temp_dir().join(format!("xtask-sweep-{}", std::process::id()));
        let own = format!("run-{}-a", std::process::id());
        // No process has a number above 2^22.
        for name in ["run-4194305-a", "run-x", "root", &own] {
            std::fs::create_dir_all(dir.join(name)).unwrap();
        }
        sweep(&dir);
        let there = |name: &str| dir.join(name).exists();
        assert!(!there("run-4194305-a") && there("run-x") && there("root") && there(&own));
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_growing_file_gives_whole_lines() {
        let file = std::env::temp_dir().join(format!("xtask-lines-{}", std::process::id()));
        std::fs::write(&file, "one\r\ntw").unwrap();
        let mut lines = Lines::open(&file);
        assert_eq!(lines.take(), ["one"]);
        std::fs::write(&file, "one\r\ntwo\n").unwrap();
        assert_eq!(lines.take(), ["two"]);
        std::fs::remove_file(file).unwrap();
    }
}
