//! The emulator: the installed QEMU, or a later one for a device that this does not have.
//!
//! Debian 12 has QEMU 7.2, without the `igb`. A later one is in its backports and cannot be
//! installed beside it, so it is unpacked. It takes the libraries and the firmware of the
//! installed one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::debian::{self, quiet};
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

/// Unpacks QEMU of the backports of the system that runs here. Lists and downloads are apart from
/// the system's.
fn fetch(root: &Path) -> Result<(), NotHere> {
    let told = quiet("apt-get")
        .args(["indextargets", "--format", "$(REPO_URI) $(CODENAME)", "Created-By: Packages"])
        .output()
        .map_err(|why| NotHere(format!("apt-get indextargets: {why}")))?;
    let codename = codename(&std::fs::read_to_string("/etc/os-release").unwrap_or_default());
    let archive = archive(&String::from_utf8_lossy(&told.stdout), &codename);
    let archive = archive.ok_or_else(|| NotHere(format!("apt has no archive of {codename}")))?;
    let apt = root.join("apt");
    for dir in ["lists/partial", "cache/archives/partial"] {
        let made = std::fs::create_dir_all(apt.join(dir));
        made.map_err(|why| NotHere(format!("{}: {why}", apt.display())))?;
    }
    let list = apt.join("sources.list");
    let keys = "/usr/share/keyrings/debian-archive-keyring.gpg";
    let line = format!("deb [signed-by={keys}] {archive} {codename}-backports main\n");
    std::fs::write(&list, line).map_err(|why| NotHere(format!("{}: {why}", list.display())))?;
    let options: Vec<String> = [
        ("Dir::Etc::sourcelist", list),
        ("Dir::Etc::sourceparts", "/dev/null".into()),
        ("Dir::State::lists", apt.join("lists")),
        ("Dir::Cache", apt.join("cache")),
    ]
    .into_iter()
    .flat_map(|(option, path)| ["-o".to_owned(), format!("{option}={}", path.display())])
    .collect();
    debian::succeed(debian::apt(&options).args(["update", "-qq"]))?;
    PACKAGES.iter().try_for_each(|package| debian::fetch(root, package, &options))?;
    // Nobody asks it again.
    let _ = std::fs::remove_dir_all(apt);
    Ok(())
}

/// The name of the release in an `os-release` file.
fn codename(os_release: &str) -> String {
    let mut lines = os_release.lines();
    let name = lines.find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    name.unwrap_or_default().trim_matches('"').to_owned()
}

/// The archive that has release `codename` among lines of an address and a release.
fn archive(lines: &str, codename: &str) -> Option<String> {
    let mut words = lines.lines().filter_map(|line| line.split_once(' '));
    words.find(|(_, release)| *release == codename).map(|(archive, _)| archive.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_is_that_of_the_release() {
        let release = codename("ID=debian\nVERSION_CODENAME=bookworm\n");
        let lines = "http://a/ bookworm-updates\nhttp://b/ bookworm\nhttp://c/ bookworm\n";
        assert_eq!(archive(lines, &release).as_deref(), Some("http://b/"));
        assert_eq!(archive(lines, "trixie"), None);
        assert_eq!(codename("ID=other\n"), "");
    }
}
