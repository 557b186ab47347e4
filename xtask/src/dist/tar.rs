//! A tarball for machines without a supported package manager, to be unpacked in `/usr/local` or
//! anywhere.

use std::path::PathBuf;
use std::process::Command;

use super::tree::{self, Layout};
use super::{Built, VERSION, dist_dir, output_of};

/// Makes the tarball, and returns it with its programs.
///
/// # Errors
/// tar is not installed, or it fails.
pub(super) fn pack(built: &Built) -> Result<(PathBuf, Vec<PathBuf>), String> {
    let top = format!("{}-{VERSION}-{}-linux-gnu", built.name(), std::env::consts::ARCH);
    let tree = dist_dir().join("tar").join(&top);
    let layout = Layout { prefix: "", lib: "lib".to_owned(), bin: "/usr/local/bin" };
    let programs = tree::fill(&tree, &built.dir, &layout)?;
    let file = dist_dir().join(format!("{top}.tar.gz"));
    let mut pack = Command::new("tar");
    pack.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner"]);
    pack.args(["--mode=u=rwX,go=rX", "-czf"]);
    output_of(pack.arg(&file).arg("-C").arg(dist_dir().join("tar")).arg(&top))?;
    Ok((file, programs))
}
