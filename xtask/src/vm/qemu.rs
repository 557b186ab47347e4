//! The emulator: the installed QEMU, or a later one for a device that the installed one lacks.
//!
//! Debian 12 has QEMU 7.2, without the `igb`. Its backports have a later one, which cannot be
//! installed beside it, so it is unpacked. It uses the libraries and the firmware of the installed
//! one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::debian;
use super::{NotHere, QEMU};
use crate::{process, target_dir};

/// Path of the emulator in QEMU's packages.
const PROGRAM: &str = "usr/bin/qemu-system-x86_64";
const FIRMWARE: [&str; 2] = ["usr/share/qemu", "usr/share/seabios"];
const PACKAGES: [&str; 3] = ["qemu-system-x86", "qemu-system-common", "qemu-system-data"];

/// An emulator.
#[derive(Debug)]
pub(super) enum Emulator {
    /// The installed QEMU.
    Installed,
    /// A QEMU that is unpacked in this folder.
    Unpacked(PathBuf),
}

impl Emulator {
    /// An emulator with all `devices`, which may have properties behind a comma.
    ///
    /// # Errors
    /// [`NotHere`]: QEMU is not installed, or the one with the devices is not available.
    pub(super) fn with<'a>(devices: impl Iterator<Item = &'a str>) -> Result<Self, NotHere> {
        if !crate::packages::in_path(QEMU.program) {
            let hint = format!("qemu is not installed: sudo apt-get install -y {}", QEMU.package);
            return Err(NotHere(hint));
        }
        let names = devices.map(|device| device.split(',').next().unwrap_or_default());
        let names: BTreeSet<&str> = names.collect();
        let lacks = |emulator: &Self| names.iter().find(|name| !emulator.has(name)).copied();
        if lacks(&Self::Installed).is_none() {
            return Ok(Self::Installed);
        }
        let dir = target_dir().join("vm/qemu");
        let find = |root: &Path| root.join(PROGRAM).is_file().then(|| root.to_owned());
        let later = Self::Unpacked(debian::unpacked(&dir, find, fetch)?);
        match lacks(&later) {
            None => Ok(later),
            Some(name) => Err(NotHere(format!("no QEMU has a device {name}"))),
        }
    }

    fn has(&self, device: &str) -> bool {
        let mut ask = self.command();
        ask.args(["-device", &format!("{device},help")]).stdin(Stdio::null());
        // It exits with 0 even without the device, with a message on standard error.
        ask.output().is_ok_and(|said| !said.stdout.is_empty())
    }

    /// A command of the emulator that is killed with this process.
    pub(super) fn command(&self) -> Command {
        let Self::Unpacked(root) = self else { return process::tethered(QEMU.program) };
        let mut command = process::tethered(&root.join(PROGRAM).to_string_lossy());
        // The installed one's modules are of another build.
        command.env("QEMU_MODULE_DIR", root.join("usr/lib"));
        for firmware in [root.join(FIRMWARE[0]), Path::new("/").join(FIRMWARE[1])] {
            command.arg("-L").arg(firmware);
        }
        command
    }
}

/// Unpacks QEMU of this system's backports.
fn fetch(root: &Path) -> Result<(), NotHere> {
    let options = debian::lists(root, &format!("{}-backports", debian::codename()))?;
    PACKAGES.iter().try_for_each(|package| debian::fetch(root, package, &options))?;
    debian::forget_lists(root);
    Ok(())
}
