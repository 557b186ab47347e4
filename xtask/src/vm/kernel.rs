//! The guest's kernel, its modules and its shell: Debian packages, downloaded and unpacked under
//! `target/vm`, never installed.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::fcntl::{Flock, FlockArg};

use super::NotHere;
use crate::target_dir;

/// Which of Debian's kernels. Both have VFIO as modules and the IOMMU built in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flavour {
    /// The small one for virtual machines.
    Cloud,
    /// The one for everything, with drivers of real NICs: three times the size, and slower to boot.
    Full,
}

impl Flavour {
    fn package(self) -> &'static str {
        match self {
            Self::Cloud => "linux-image-cloud-amd64",
            Self::Full => "linux-image-amd64",
        }
    }

    /// Where it is unpacked.
    fn dir(self) -> PathBuf {
        let vm = target_dir().join("vm");
        match self {
            Self::Cloud => vm,
            Self::Full => vm.join("full"),
        }
    }
}

const SHELL: &str = "busybox-static";

/// What a guest boots from.
pub(crate) struct Kernel {
    /// The compressed image.
    pub(crate) image: PathBuf,
    /// A static busybox.
    pub(crate) shell: PathBuf,
    modules: PathBuf,
}

impl Kernel {
    /// Finds the unpacked packages, or fetches them.
    ///
    /// # Errors
    /// [`NotHere`] if they can be had neither here nor from Debian.
    pub(crate) fn provide(flavour: Flavour) -> Result<Self, NotHere> {
        let kernel = flavour.package();
        Self::provide_in(&flavour.dir(), |root| {
            let image = dependency(kernel, "linux-image-").ok_or_else(|| {
                NotHere(format!("no package {kernel} is known here: sudo apt-get update"))
            })?;
            [image.as_str(), SHELL].iter().try_for_each(|package| fetch(root, package))
        })
    }

    /// Finds what `fill` unpacked to `root` of `dir`, or lets it unpack that once, whoever else
    /// asks meanwhile: guests start side by side, in one process and in several.
    fn provide_in(
        dir: &Path,
        fill: impl FnOnce(&Path) -> Result<(), NotHere>,
    ) -> Result<Self, NotHere> {
        let failed = |why: std::io::Error| NotHere(format!("{}: {why}", dir.display()));
        std::fs::create_dir_all(dir).map_err(failed)?;
        // Free again when it is closed, also by the kernel after a kill.
        let lock = File::create(dir.join("lock")).map_err(failed)?;
        let _lock =
            Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, why)| failed(why.into()))?;
        if let Some(kernel) = Self::find(dir) {
            return Ok(kernel);
        }
        let (fresh, root) = (dir.join("root.new"), dir.join("root"));
        for old in [&fresh, &root] {
            // Left by somebody who was killed, or of another release; that there is none is fine.
            let _ = std::fs::remove_dir_all(old);
        }
        std::fs::create_dir_all(&fresh).map_err(failed)?;
        fill(&fresh)?;
        // Under this name it is whole.
        std::fs::rename(&fresh, &root).map_err(failed)?;
        Self::find(dir).ok_or_else(|| NotHere(format!("{} holds no kernel", root.display())))
    }

    #[cfg(test)]
    pub(crate) fn at(image: PathBuf, shell: PathBuf, modules: PathBuf) -> Self {
        Self { image, shell, modules }
    }

    fn find(dir: &Path) -> Option<Self> {
        let mut image = entries(&dir.join("root/boot")).into_iter();
        let image = image.rfind(|path| name_of(path).starts_with("vmlinuz-"))?;
        let release = name_of(&image).strip_prefix("vmlinuz-")?.to_owned();
        let modules = ["lib/modules", "usr/lib/modules"]
            .map(|lib| dir.join("root").join(lib).join(&release))
            .into_iter()
            .find(|path| path.is_dir())?;
        let shell = ["bin/busybox", "usr/bin/busybox"].map(|path| dir.join("root").join(path));
        let shell = shell.into_iter().find(|path| path.is_file())?;
        Some(Self { image, shell, modules })
    }

    /// The files of `wanted` modules and of those that they need, in the order to load them.
    ///
    /// # Errors
    /// A module is in none of the package's files.
    pub(crate) fn modules(&self, wanted: &[&str]) -> Result<Vec<PathBuf>, NotHere> {
        let mut files = Vec::new();
        collect(&self.modules.join("kernel"), &mut files);
        let builtin = std::fs::read_to_string(self.modules.join("modules.builtin"));
        let builtin = builtin.unwrap_or_default();
        let mut order = Vec::new();
        let mut seen = BTreeSet::new();
        for name in wanted {
            add(name, &files, &builtin, &mut seen, &mut order)?;
        }
        Ok(order)
    }
}

/// Adds a module after those that it names in its `depends=`.
fn add(
    name: &str,
    files: &[PathBuf],
    builtin: &str,
    seen: &mut BTreeSet<String>,
    order: &mut Vec<PathBuf>,
) -> Result<(), NotHere> {
    let name = name.replace('-', "_");
    let is_builtin = |line: &str| module_name(Path::new(line)) == name;
    if !seen.insert(name.clone()) || builtin.lines().any(is_builtin) {
        return Ok(());
    }
    let file = files.iter().find(|file| module_name(file) == name);
    let file = file.ok_or_else(|| NotHere(format!("the kernel has no module {name}")))?;
    let bytes = std::fs::read(file).map_err(|why| NotHere(format!("{file:?}: {why}")))?;
    for needed in depends(&bytes) {
        add(&needed, files, builtin, seen, order)?;
    }
    order.push(file.clone());
    Ok(())
}

/// What stands after `depends=` in a module's information: names separated by commas.
fn depends(module: &[u8]) -> Vec<String> {
    let mut fields = module.split(|&b| b == 0);
    let list = fields.find_map(|field| field.strip_prefix(b"depends="));
    let list = String::from_utf8_lossy(list.unwrap_or_default()).into_owned();
    list.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// `vfio_pci` for `.../vfio-pci.ko`.
fn module_name(file: &Path) -> String {
    name_of(file).split('.').next().unwrap_or("").replace('-', "_")
}

fn name_of(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or("")
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect();
    all.sort();
    all
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) {
    for path in entries(dir) {
        if path.is_dir() {
            collect(&path, files);
        } else if name_of(&path).ends_with(".ko") {
            files.push(path);
        }
    }
}

/// The package that `package` depends on and whose name starts with `prefix`.
fn dependency(package: &str, prefix: &str) -> Option<String> {
    let output = quiet("apt-cache").args(["depends", package]).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let names = text.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    names.map(str::to_owned).find(|name| name.starts_with(prefix))
}

/// Downloads a package and unpacks it to `root`.
fn fetch(root: &Path, package: &str) -> Result<(), NotHere> {
    println!("fetching {package} to {}", root.display());
    let failed = |what: &str, output: std::io::Result<std::process::Output>| match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let last = said.lines().next_back().unwrap_or("no reason given").to_owned();
            Err(NotHere(format!("{what} {package}: {last}")))
        }
        Err(why) => Err(NotHere(format!("{what}: {why}"))),
    };
    let mut download = quiet("apt-get");
    download.args(["download", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=3"]);
    failed("apt-get download", download.arg(package).current_dir(root).output())?;
    let deb = entries(root).into_iter().rfind(|path| {
        let name = name_of(path);
        name.starts_with(&format!("{package}_")) && name.ends_with(".deb")
    });
    let deb = deb.ok_or_else(|| NotHere(format!("{package} did not arrive")))?;
    failed("dpkg-deb -x", quiet("dpkg-deb").arg("-x").arg(&deb).arg(root).output())?;
    // Unpacked it is all there.
    let _ = std::fs::remove_file(deb);
    Ok(())
}

fn quiet(program: &str) -> Command {
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).env("LC_ALL", "C");
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_module_needs_comes_before_it() {
        let dir = std::env::temp_dir().join(format!("xtask-modules-{}", std::process::id()));
        let kernel = dir.join("kernel/drivers");
        std::fs::create_dir_all(&kernel).unwrap();
        let module = |name: &str, info: &[u8]| std::fs::write(kernel.join(name), info).unwrap();
        module("vfio-pci.ko", b"\x7fELF\0license=GPL\0depends=vfio-core,irqbypass,vfio\0");
        module("vfio-core.ko", b"depends=vfio\0");
        module("vfio.ko", b"depends=\0");
        std::fs::write(dir.join("modules.builtin"), "kernel/virt/lib/irqbypass.ko\n").unwrap();
        let kernel = Kernel { image: dir.clone(), shell: dir.clone(), modules: dir.clone() };
        let order = kernel.modules(&["vfio_pci", "vfio"]).unwrap_or_else(|e| panic!("{}", e.0));
        let names: Vec<&str> = order.iter().map(|path| name_of(path)).collect();
        assert_eq!(names, ["vfio.ko", "vfio-core.ko", "vfio-pci.ko"]);
        assert!(kernel.modules(&["nvme"]).is_err_and(|e| e.0.contains("nvme")));
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn guests_that_start_together_fetch_their_kernel_once() {
        let dir = std::env::temp_dir().join(format!("xtask-fetch-{}", std::process::id()));
        // Somebody was killed while it unpacked.
        std::fs::create_dir_all(dir.join("root.new/boot")).unwrap();
        std::fs::write(dir.join("root.new/boot/vmlinuz-0"), "").unwrap();
        let fetched = std::sync::atomic::AtomicU32::new(0);
        let provide = || {
            Kernel::provide_in(&dir, |root| {
                fetched.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                for file in ["boot/vmlinuz-6", "lib/modules/6/x", "bin/busybox"] {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                    let file = root.join(file);
                    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
                    std::fs::write(file, "").unwrap();
                }
                Ok(())
            })
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let kernel = provide().unwrap_or_else(|e| panic!("{}", e.0));
                    assert_eq!(kernel.image, dir.join("root/boot/vmlinuz-6"));
                });
            }
        });
        assert_eq!(fetched.into_inner(), 1);
        std::fs::remove_dir_all(dir).unwrap();
    }
}
