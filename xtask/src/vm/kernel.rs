//! The guest's kernel, its modules and its shell: Debian packages, downloaded and unpacked under
//! `target/vm`, never installed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::NotHere;
use super::debian::{self, entries, name_of, quiet};
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
        debian::unpacked(&flavour.dir(), Self::find, |root| {
            let image = dependency(kernel, "linux-image-").ok_or_else(|| {
                NotHere(format!("no package {kernel} is known here: sudo apt-get update"))
            })?;
            [image.as_str(), SHELL].iter().try_for_each(|package| debian::fetch(root, package, &[]))
        })
    }

    #[cfg(test)]
    pub(crate) fn at(image: PathBuf, shell: PathBuf, modules: PathBuf) -> Self {
        Self { image, shell, modules }
    }

    fn find(root: &Path) -> Option<Self> {
        let mut image = entries(&root.join("boot")).into_iter();
        let image = image.rfind(|path| name_of(path).starts_with("vmlinuz-"))?;
        let release = name_of(&image).strip_prefix("vmlinuz-")?.to_owned();
        let modules = ["lib/modules", "usr/lib/modules"]
            .map(|lib| root.join(lib).join(&release))
            .into_iter()
            .find(|path| path.is_dir())?;
        let shell = ["bin/busybox", "usr/bin/busybox"].map(|path| root.join(path));
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
}
