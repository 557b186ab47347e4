//! The guest that a test runs in.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use barewire_driver::open::open;
use barewire_driver::port::Port;

/// PCI address of the guest's NIC `n`; prints why there is none.
pub(crate) fn nic(n: usize) -> Option<String> {
    let nic = std::env::var(format!("NIC{n}")).ok();
    if nic.is_none() {
        println!("SKIPPED: no NIC{n} in the environment, see cargo xtask test vfio");
    }
    nic
}

/// What the host's monitor of a guest is asked for; prints why there is none.
pub(crate) struct Monitor(File);

impl Monitor {
    pub(crate) fn open() -> Option<Self> {
        let Ok(path) = std::env::var("VM_MONITOR") else {
            println!("SKIPPED: no VM_MONITOR in the environment, see cargo xtask test vfio");
            return None;
        };
        Some(Self(File::options().write(true).open(path).unwrap()))
    }

    /// Has the cable of the first NIC pulled.
    pub(crate) fn pull(&mut self) -> ForNow<'_> {
        self.for_now("set_link n0 off", "set_link n0 on")
    }

    /// Has the processors of the guest stopped.
    pub(crate) fn stop(&mut self) -> ForNow<'_> {
        self.for_now("stop", "cont")
    }

    fn for_now(&mut self, command: &str, undo: &'static str) -> ForNow<'_> {
        self.ask(command);
        ForNow { host: self, undo }
    }

    /// Gives a command, which the host carries out soon.
    fn ask(&mut self, command: &str) {
        self.0.write_all(format!("\nVM-ASKS {command}\n").as_bytes()).unwrap();
    }
}

/// What the host did for now. It is undone when this goes, also when a test fails, or whoever comes
/// after it would wait in vain.
pub(crate) struct ForNow<'a> {
    host: &'a mut Monitor,
    undo: &'static str,
}

impl Drop for ForNow<'_> {
    fn drop(&mut self) {
        self.host.ask(self.undo);
    }
}

/// The first two NICs as ports.
pub(crate) fn pair(options: &str) -> Option<[Box<dyn Port>; 2]> {
    let names = [nic(0)?, nic(1)?];
    Some(names.map(|nic| port(&format!("vfio:{nic}{options}"))))
}

/// Opens a port, which has to work.
pub(crate) fn port(spec: &str) -> Box<dyn Port> {
    open(spec).unwrap_or_else(|e| panic!("{e}"))
}

/// The one line that a port says when it does not open.
pub(crate) fn refusal(spec: &str) -> String {
    match open(spec) {
        Ok(_) => panic!("{spec} opened"),
        Err(e) => {
            let line = e.to_string();
            assert!(!line.contains('\n'), "{line}");
            println!("{line}");
            line
        }
    }
}

/// A device's folder in sysfs.
pub(crate) fn sysfs(nic: &str) -> PathBuf {
    Path::new("/sys/bus/pci/devices").join(nic)
}

/// Vendor and number of a NIC.
pub(crate) fn id(nic: &str) -> (u16, u16) {
    let number = |file: &str| {
        let text = std::fs::read_to_string(sysfs(nic).join(file)).unwrap();
        u16::from_str_radix(text.trim().trim_start_matches("0x"), 16).unwrap()
    };
    (number("vendor"), number("device"))
}

/// What QEMU's model of a NIC does with frames for which there is no buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overrun {
    /// They wait.
    Waits,
    /// They are dropped and counted, as by a real one.
    Counted,
    /// They are dropped, and its counters do not say so.
    Untold,
}

/// See [`Overrun`].
pub(crate) fn overrun(nic: &str) -> Overrun {
    match id(nic) {
        (0x8086, 0x100e) | (0x15ad, 0x07b0) => Overrun::Counted,
        (0x8086, 0x10c9 | 0x10ca) => Overrun::Untold,
        _ => Overrun::Waits,
    }
}

/// Whether a NIC is a virtual function of QEMU's 82576. Frames to groups other than broadcast do
/// not reach it there, although the driver of the physical one grants them, and its own broadcasts
/// come back.
pub(crate) fn is_function(nic: &str) -> bool {
    id(nic) == (0x8086, 0x10ca)
}

/// How long QEMU's model of a NIC takes no frames after its start: a second of the 82540.
pub(crate) fn deaf_time(nic: &str) -> Duration {
    let is_8254x = id(nic) == (0x8086, 0x100e);
    Duration::from_millis(if is_8254x { 1100 } else { 0 })
}

/// Runs a line of shell, which has to succeed, and gives what it printed.
pub(crate) fn sh(line: &str) -> String {
    let output = Command::new("sh").args(["-c", line]).output().unwrap();
    let said = [&output.stdout[..], &output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(output.status.success(), "{line}: {}\n{said}", output.status);
    said
}

/// Lets the driver `to`, or none, have a NIC.
pub(crate) fn rebind(nic: &str, to: &str) {
    let dev = sysfs(nic).display().to_string();
    sh(&format!(
        "if [ -e {dev}/driver ]; then echo {nic} > {dev}/driver/unbind; fi; \
         echo {to} > {dev}/driver_override; \
         if [ -n '{to}' ]; then echo {nic} > /sys/bus/pci/drivers_probe; fi"
    ));
}

/// The driver that has a NIC.
pub(crate) fn driver(nic: &str) -> Option<String> {
    let link = std::fs::read_link(sysfs(nic).join("driver")).ok()?;
    Some(link.file_name()?.to_str()?.to_owned())
}
