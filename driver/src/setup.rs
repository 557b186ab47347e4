//! The name of the script that prepares a machine, for the messages that tell to call it.

use std::path::Path;

/// As packages install it.
const INSTALLED: &str = "barewire-hugepage-setup";

/// Where packages and the tarball install it.
const DIRS: [&str; 2] = ["/usr/sbin", "/usr/local/sbin"];

/// What to call: the installed script, or that of the sources.
pub(crate) fn command() -> &'static str {
    let installed = DIRS.iter().any(|dir| Path::new(dir).join(INSTALLED).exists());
    if installed { INSTALLED } else { "./hugepage-setup.sh" }
}
