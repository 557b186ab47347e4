//! The emulator: the installed QEMU, or a later one for a device that this does not have.
//!
//! Debian 12 has QEMU 7.2, without the `igb`. A later one is in its backports and cannot be
//! installed beside it, so it is unpacked. It takes the libraries and the firmware of the
//! installed one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::debian;
use super::{NotHere, QEMU};
use crate::{process, target_dir};

/// Where packages of QEMU have their parts.
const PROGRAM: &str = "usr/bin/qemu-system-x86_64";
const FIRMWARE: [&str; 2] = ["usr/share/qemu", "usr/share/seabios"];
const PACKAGES: [&str; 3] = ["qemu-system-x86", "qemu-system-common", "qemu-system-data"];

/// An emulator.
#[derive(Debug)]
pub(super) enum Emulator {
    /// The installed one.
    Installed,
    /// One that is unpacked there.
    Unpacked(PathBuf),
}

impl Emulator {
    /// One that has all `devices`, which may have properties behind a comma.
    ///
    /// # Errors
    /// [`NotHere`]: it is not installed, and what has the devices cannot be had.
    pub(super) fn with<'a>(devices: impl Iterator<Item = &'a str>) -> Result<Self, NotHere> {
        if !crate::packages::in_path(QEMU.program) {
            let mend = format!("qemu is not installed: sudo apt-get install -y {}", QEMU.package);
            return Err(NotHere(mend));
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
        // It ends well as well if it has no such device, and complains beside.
        ask.output().is_ok_and(|said| !said.stdout.is_empty())
    }

    /// A command that ends with this process.
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

/// Unpacks QEMU of the backports of the system that runs here.
fn fetch(root: &Path) -> Result<(), NotHere> {
    let options = debian::lists(root, &format!("{}-backports", debian::codename()))?;
    PACKAGES.iter().try_for_each(|package| debian::fetch(root, package, &options))?;
    debian::forget_lists(root);
    Ok(())
}
