//! Packages for RPM, with the provider where the libfabric of Fedora and RHEL looks for providers.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::tree::{self, COMPONENT_DIR, Layout};
use super::{Built, DESCRIPTION, HOMEPAGE, SUMMARY, VERSION, dist_dir, output_of};

/// Makes the package, and returns it with its programs.
///
/// # Errors
/// rpmbuild is not installed, or it fails.
pub(super) fn pack(built: &Built) -> Result<(PathBuf, Vec<PathBuf>), String> {
    let arch = std::env::consts::ARCH;
    let top = dist_dir().join(format!("{}-rpm", built.name()));
    let tree = top.join("tree");
    let layout = Layout { prefix: "usr", lib: "usr/lib64".to_owned(), bin: "/usr/bin" };
    let programs = tree::fill(&tree, &built.dir, &layout)?;
    let name = format!("{}-{VERSION}-1.{arch}.rpm", built.name());
    let spec = top.join("barewire.spec");
    tree::write(&spec, describe(built, &tree)?.as_bytes())?;
    let mut build = Command::new("rpmbuild");
    build.args(["-bb", "--quiet", "--target", &format!("{arch}-linux")]);
    for (what, value) in [("_topdir", top.join("work")), ("_rpmdir", dist_dir())] {
        build.arg("--define").arg(format!("{what} {}", value.display()));
    }
    build.arg("--define").arg(format!("_rpmfilename {name}"));
    output_of(build.arg(&spec))?;
    Ok((dist_dir().join(name), programs))
}

/// The spec file. rpmbuild finds the library versions that the programs need; the component of Open
/// MPI is left out: its users have its dependencies.
fn describe(built: &Built, tree: &Path) -> Result<String, String> {
    let name = built.name();
    let dpdk = if built.dpdk { "Provides: barewire\nConflicts: barewire\n" } else { "" };
    let description = DESCRIPTION.join("\n");
    let mut text = format!(
        "Name: {name}\n\
         Version: {VERSION}\n\
         Release: 1\n\
         Summary: A {SUMMARY}\n\
         License: MIT OR Apache-2.0\n\
         URL: {HOMEPAGE}\n\
         Recommends: libfabric\n\
         {dpdk}\
         %global debug_package %{{nil}}\n\
         %global __os_install_post %{{nil}}\n\
         %global _build_id_links none\n\
         %global __requires_exclude_from ^.*/{COMPONENT_DIR}/.*$\n\
         %description\n{description}\n\
         %install\n\
         cp -a '{}/.' '%{{buildroot}}'\n\
         %files\n\
         %defattr(-,root,root)\n",
        tree.display()
    );
    let files =
        output_of(Command::new("find").arg(tree).args(["-type", "f", "-printf", "/%P\\n"]))?;
    text.push_str(&files);
    text.push('\n');
    Ok(text)
}
