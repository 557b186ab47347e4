//! Name of the hugepage and VFIO setup script, for error messages.

use std::path::Path;

/// Name of the installed script.
const INSTALLED: &str = "barewire-hugepage-setup";

/// Where packages and the tarball install it.
const DIRS: [&str; 2] = ["/usr/sbin", "/usr/local/sbin"];

/// The command to run: the installed script, or the one in the source tree.
pub(crate) fn command() -> &'static str {
    let installed = DIRS.iter().any(|dir| Path::new(dir).join(INSTALLED).exists());
    if installed { INSTALLED } else { "./hugepage-setup.sh" }
}
