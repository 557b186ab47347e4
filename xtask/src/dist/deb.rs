//! Packages for Debian, with the provider where Debian's libfabric looks for providers.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::tree::{self, Layout};
use super::{Built, DESCRIPTION, HOMEPAGE, SUMMARY, VERSION, dist_dir, output_of};

/// Makes the package, and returns it with its programs.
///
/// # Errors
/// dpkg is not installed, or it fails.
pub(super) fn pack(built: &Built) -> Result<(PathBuf, Vec<PathBuf>), String> {
    let arch = output_of(Command::new("dpkg").arg("--print-architecture"))
        .map_err(|why| format!("{why}; such a package can be made on Debian only"))?;
    let triplet = output_of(Command::new("dpkg-architecture").arg("-qDEB_HOST_MULTIARCH"))?;
    let tree = dist_dir().join(format!("{}-deb", built.name()));
    let layout = Layout { prefix: "usr", lib: format!("usr/lib/{triplet}"), bin: "/usr/bin" };
    let programs = tree::fill(&tree, &built.dir, &layout)?;
    let depends = libraries(&tree, &programs)?;
    let control = control(built, &arch, &depends);
    tree::write(&tree.join("DEBIAN/control"), control.as_bytes())?;
    let file = dist_dir().join(format!("{}_{VERSION}_{arch}.deb", built.name()));
    let mut pack = Command::new("dpkg-deb");
    output_of(pack.args(["--root-owner-group", "--build"]).arg(&tree).arg(&file))?;
    Ok((file, programs))
}

/// The control file that dpkg-shlibdeps requires; its content is not used.
const SOURCE: &str = "Source: barewire\n\nPackage: barewire\nArchitecture: any\n";

/// The packages that contain the programs' libraries, with versions, from the symbols
/// (dpkg-shlibdeps). The component of Open MPI is left out: its users have its dependencies.
fn libraries(tree: &Path, programs: &[PathBuf]) -> Result<String, String> {
    let dir = tree.with_extension("source");
    tree::write(&dir.join("debian/control"), SOURCE.as_bytes())?;
    let mut command = Command::new("dpkg-shlibdeps");
    let output = output_of(command.current_dir(&dir).args(["-O", "-xbarewire"]).args(programs))?;
    let list = output.lines().find_map(|line| line.strip_prefix("shlibs:Depends="));
    list.map(str::to_owned).ok_or_else(|| format!("dpkg-shlibdeps said: {output}"))
}

fn control(built: &Built, arch: &str, depends: &str) -> String {
    let name = built.name();
    // The ring mempool of DPDK is a plugin, and so is each of its drivers.
    let dpdk = if built.dpdk {
        "Recommends: libfabric1, libfabric-bin, librte-meta-mempool, librte-meta-bus, \
         librte-meta-net\nProvides: barewire\nConflicts: barewire\nReplaces: barewire\n"
    } else {
        "Recommends: libfabric1, libfabric-bin\n"
    };
    let with = if built.dpdk { " This one has the ports of DPDK, dpdk:DEVICE, too.\n" } else { "" };
    let description = DESCRIPTION.join("\n ");
    format!(
        "Package: {name}\n\
         Version: {VERSION}\n\
         Architecture: {arch}\n\
         Maintainer: The barewire authors <{HOMEPAGE}>\n\
         Section: net\n\
         Priority: optional\n\
         Depends: {depends}\n\
         {dpdk}\
         Suggests: openmpi-bin, tshark\n\
         Homepage: {HOMEPAGE}\n\
         Description: {SUMMARY}\n {description}\n{with}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_file_has_what_dpkg_asks_for() {
        for dpdk in [false, true] {
            let built = Built { dir: PathBuf::new(), dpdk };
            let text = control(&built, "amd64", "libc6 (>= 2.34)");
            for field in ["Package: ", "Version: ", "Architecture: amd64", "Maintainer: "] {
                assert!(text.lines().any(|line| line.starts_with(field)), "{field}");
            }
            let lines: Vec<_> = text.lines().collect();
            let at = lines.iter().position(|l| l.starts_with("Description: ")).unwrap();
            assert!(lines[at + 1..].iter().all(|l| l.starts_with(' ')), "{text}");
        }
    }
}
