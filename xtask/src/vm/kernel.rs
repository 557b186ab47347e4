//! The guest's kernel, its modules and its shell: Debian packages that are downloaded and unpacked
//! under `target/vm`, but not installed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::NotHere;
use super::debian::{self, entries, name_of, quiet};
use crate::target_dir;

/// Which of Debian's kernels. All have VFIO as modules and the IOMMU built in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Flavour {
    /// The small one for virtual machines.
    Cloud,
    /// The one for everything, with drivers of real NICs: three times the size, and slower to boot.
    Full,
    /// The one for everything of the backports to Debian 13: its `virtio_net` and `igb` have
    /// AF_XDP's zero-copy, which came with Linux 6.13 and 6.14.
    Newest,
}

impl Flavour {
    fn package(self) -> &'static str {
        match self {
            Self::Cloud => "linux-image-cloud-amd64",
            Self::Full | Self::Newest => "linux-image-amd64",
        }
    }

    /// Suite of Debian, unless it is that of this system.
    fn suite(self) -> Option<&'static str> {
        match self {
            Self::Cloud | Self::Full => None,
            Self::Newest => Some(NEWEST),
        }
    }

    /// Options of apt for the suite, with its lists below `root`.
    ///
    /// # Errors
    /// [`NotHere`]: the archive has no such suite, or cannot be reached.
    fn options(self, root: &Path) -> Result<Vec<String>, NotHere> {
        self.suite().map_or(Ok(Vec::new()), |suite| debian::lists(root, suite))
    }

    /// Folder of the unpacked packages.
    fn dir(self) -> PathBuf {
        let vm = target_dir().join("vm");
        match self {
            Self::Cloud => vm,
            Self::Full => vm.join("full"),
            Self::Newest => vm.join("newest"),
        }
    }
}

const SHELL: &str = "busybox-static";

/// Suite of [`Flavour::Newest`].
const NEWEST: &str = "trixie-backports";

/// How long an unpacked kernel is used without asking apt whether it is the current one.
const CHECK_PERIOD: Duration = Duration::from_secs(24 * 3600);

/// The boot files of a guest.
pub(crate) struct Kernel {
    /// The compressed image.
    pub(crate) image: PathBuf,
    /// A static busybox.
    pub(crate) shell: PathBuf,
    modules: PathBuf,
}

impl Kernel {
    /// Finds the unpacked packages, or fetches them. Packages of another kernel than Debian's
    /// current one are replaced; apt is asked once in [`CHECK_PERIOD`].
    ///
    /// # Errors
    /// [`NotHere`] if they are neither here nor available from Debian.
    pub(crate) fn provide(flavour: Flavour) -> Result<Self, NotHere> {
        let dir = flavour.dir();
        let mark = Mark {
            path: dir.join("checked"),
            recipe: format!("{} {}", flavour.package(), flavour.suite().unwrap_or_default()),
        };
        let find = |root: &Path| {
            let found = Self::find(root)?;
            let offered = || {
                let packages = flavour.options(&dir).and_then(|o| parts(flavour.package(), &o));
                debian::forget_lists(&dir);
                packages
            };
            mark.is_current(name_of(&found.modules), offered).then_some(found)
        };
        debian::unpacked(&dir, find, |root| {
            let options = flavour.options(root)?;
            debian::fetch(root, SHELL, &[])?;
            parts(flavour.package(), &options)?
                .iter()
                .try_for_each(|package| debian::fetch(root, package, &options))?;
            debian::forget_lists(root);
            if let Some(fetched) = Self::find(root) {
                mark.set(name_of(&fetched.modules));
            }
            Ok(())
        })
    }

    #[cfg(test)]
    pub(crate) fn at(image: PathBuf, shell: PathBuf, modules: PathBuf) -> Self {
        Self { image, shell, modules }
    }

    fn find(root: &Path) -> Option<Self> {
        let dirs = ["lib/modules", "usr/lib/modules"].map(|lib| entries(&root.join(lib)));
        let modules = dirs.into_iter().flatten().next_back()?;
        let boot = root.join("boot").join(format!("vmlinuz-{}", name_of(&modules)));
        let image = [boot, modules.join("vmlinuz")].into_iter().find(|path| path.is_file())?;
        let shell = ["bin/busybox", "usr/bin/busybox"].map(|path| root.join(path));
        let shell = shell.into_iter().find(|path| path.is_file())?;
        Some(Self { image, shell, modules })
    }

    /// The files of the `wanted` modules and their dependencies, in load order.
    ///
    /// # Errors
    /// A module is not in the package.
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

/// Adds a module behind its dependencies.
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
    let file = decompressed(file)?;
    let bytes = std::fs::read(&file).map_err(|why| NotHere(format!("{file:?}: {why}")))?;
    for needed in depends(&bytes) {
        add(&needed, files, builtin, seen, order)?;
    }
    order.push(file);
    Ok(())
}

/// The `depends=` list in a module's information, separated by commas.
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

/// Adds the modules below `dir`.
fn collect(dir: &Path, files: &mut Vec<PathBuf>) {
    for path in entries(dir) {
        if path.is_dir() {
            collect(&path, files);
        } else if [".ko", ".ko.xz"].iter().any(|end| name_of(&path).ends_with(end)) {
            files.push(path);
        }
    }
}

/// The packages of a kernel that `package` depends on, with `options` of apt: one package with
/// everything, or one each for the image, the modules and their lists.
///
/// # Errors
/// [`NotHere`]: apt knows no such package.
fn parts(package: &str, options: &[String]) -> Result<Vec<String>, NotHere> {
    let mut ask = quiet("apt-cache");
    ask.args(options).args(["depends", "--recurse", "--no-recommends", "--no-suggests"]);
    let output = ask.args(["--no-conflicts", "--no-breaks", "--no-replaces", package]).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let parts = parts_in(&text.unwrap_or_default());
    if parts.is_empty() {
        return Err(NotHere(format!("no package {package} is known here: sudo apt-get update")));
    }
    Ok(parts)
}

/// A file that tells which kernel was the current one, and when apt was asked.
struct Mark {
    path: PathBuf,
    /// Package and suite of the kernel.
    recipe: String,
}

impl Mark {
    /// Whether an unpacked kernel of this `version` is the one that is `offered`, a list of
    /// packages. The answer holds for [`CHECK_PERIOD`]. Without an answer the kernel is current.
    fn is_current(
        &self,
        version: &str,
        offered: impl FnOnce() -> Result<Vec<String>, NotHere>,
    ) -> bool {
        let asked = std::fs::metadata(&self.path).and_then(|file| file.modified()).ok();
        let is_recent = asked.is_some_and(|at| at.elapsed().is_ok_and(|age| age < CHECK_PERIOD));
        let text = std::fs::read_to_string(&self.path);
        if is_recent && text.is_ok_and(|text| text == self.text(version)) {
            return true;
        }
        let packages = offered().unwrap_or_default();
        let is_current = packages.iter().all(|name| name.ends_with(&format!("-{version}")));
        if is_current {
            self.set(version);
        } else {
            println!("the kernel {version} is outdated: {}", packages.join(" "));
        }
        is_current
    }

    fn set(&self, version: &str) {
        // If it cannot be written, apt is asked again.
        let _ = std::fs::write(&self.path, self.text(version));
    }

    fn text(&self, version: &str) -> String {
        format!("{} {version}\n", self.recipe)
    }
}

/// A kernel's packages in the output of `apt-cache depends`.
fn parts_in(listed: &str) -> Vec<String> {
    let names = listed.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    let is_part = |name: &&str| {
        let of = ["linux-image-", "linux-binary-", "linux-modules-", "linux-base-"];
        let rest = of.iter().find_map(|prefix| name.strip_prefix(prefix));
        // Packages with a version: the others depend on them.
        rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    names.filter(is_part).map(str::to_owned).collect::<BTreeSet<_>>().into_iter().collect()
}

/// A module as the guest's shell can load it: newer kernels have compressed ones.
///
/// # Errors
/// [`NotHere`], with the output of `xz`.
fn decompressed(file: &Path) -> Result<PathBuf, NotHere> {
    let Some(plain) = name_of(file).strip_suffix(".xz") else { return Ok(file.to_owned()) };
    let to = file.with_file_name(plain);
    if !to.is_file() {
        // Guests that start together may need the same module.
        let me = (std::process::id(), std::thread::current().id());
        let part = file.with_file_name(format!("{plain}.{me:?}"));
        let failed = |why: std::io::Error| NotHere(format!("{}: {why}", part.display()));
        let output = std::fs::File::create(&part).map_err(failed)?;
        debian::succeed(quiet("xz").args(["-d", "-c"]).arg(file).stdout(output))?;
        std::fs::rename(&part, &to).map_err(failed)?;
    }
    Ok(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_of_a_module_come_before_it() {
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

    /// Goal: a kernel that Debian has replaced is fetched anew, apt is asked once in a while, and a
    /// kernel stays in use without apt.
    #[test]
    fn an_outdated_kernel_is_noticed() {
        let path = std::env::temp_dir().join(format!("xtask-checked-{}", std::process::id()));
        let mark = |recipe: &str| Mark { path: path.clone(), recipe: recipe.to_owned() };
        let (mark, other) = (mark("a"), mark("b"));
        let unasked = || panic!("apt is asked again");
        let offer = |version: &str| {
            let parts = ["base", "image"].map(|part| format!("linux-{part}-{version}"));
            move || Ok(parts.to_vec())
        };
        assert!(!mark.is_current("7.3.4+deb13-amd64", offer("7.3.5+deb13-amd64")));
        assert!(mark.is_current("7.3.4-amd64", || Err(NotHere("offline".to_owned()))));
        assert!(mark.is_current("7.3.5-amd64", offer("7.3.5-amd64")));
        assert!(mark.is_current("7.3.5-amd64", unasked));
        assert!(!other.is_current("7.3.5-amd64", offer("7.3.6-amd64")));
        assert!(!mark.is_current("7.3.4-amd64", offer("7.3.5-amd64")));
        let old = std::time::SystemTime::now() - 2 * CHECK_PERIOD;
        std::fs::File::options().write(true).open(&path).unwrap().set_modified(old).unwrap();
        assert!(!mark.is_current("7.3.5-amd64", offer("7.3.6-amd64")));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn the_parts_of_a_kernel_have_its_version() {
        let one = "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-56-cloud-amd64\n\
                   linux-image-6.1.0-56-cloud-amd64\n  Depends: kmod\n    linux-initramfs-tool\n";
        assert_eq!(parts_in(one), ["linux-image-6.1.0-56-cloud-amd64"]);
        let split = "  Depends: linux-base-cloud-amd64\n\
                     Depends: linux-image-7.3.4+deb13-cloud-amd64\n\
                     linux-image-7.3.4+deb13-cloud-amd64\n\
                     Depends: linux-binary-7.3.4+deb13-cloud-amd64\n\
                     Depends: linux-modules-7.3.4+deb13-cloud-amd64\n\
                     Depends: linux-base-7.3.4+deb13-cloud-amd64\n  Depends: linux-base\n";
        let parts = parts_in(split);
        let named = ["base", "binary", "image", "modules"];
        assert_eq!(parts, named.map(|part| format!("linux-{part}-7.3.4+deb13-cloud-amd64")));
    }
}
