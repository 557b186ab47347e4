//! The file tree of every package: the provider, the command, the machine setup script, man pages,
//! documents, systemd units, the Wireshark dissector, the dashboard, the component of Open MPI and
//! the sources of the library for other MPIs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::output_of;
use crate::{cargo, mpi_coll, root};

/// Install folders, relative to the tree's root.
pub(super) struct Layout {
    /// Prefix of programs, documents and data: `usr`, or empty.
    pub(super) prefix: &'static str,
    /// Folder of libraries, libfabric's providers among them.
    pub(super) lib: String,
    /// Installed folder of the command, for the systemd units.
    pub(super) bin: &'static str,
}

/// Folder of the Open MPI component, below [`Layout::lib`].
pub(super) const COMPONENT_DIR: &str = "barewire/openmpi4";

/// Lays out the installed files of a package in `tree`, from the `built` ones. Returns the programs
/// and libraries that need libc only (and DPDK, if built with it).
///
/// # Errors
/// A file cannot be read or written.
pub(super) fn fill(tree: &Path, built: &Path, layout: &Layout) -> Result<Vec<PathBuf>, String> {
    // The tree of the last package; it may not exist.
    let _ = std::fs::remove_dir_all(tree);
    let (usr, lib) = (tree.join(layout.prefix), tree.join(&layout.lib));
    let (library, command) = (lib.join("libfabric/libbarewire-fi.so"), usr.join("bin/barewire"));
    copy(&built.join("libbarewire_fi.so"), &library, 0o644)?;
    copy(&built.join("barewire"), &command, 0o755)?;
    let programs = vec![library, command];
    let mut stripped = programs.clone();
    match mpi_coll::component(&root(), &lib.join(COMPONENT_DIR)) {
        Ok(component) => {
            set_mode(&component, 0o644)?;
            stripped.push(component);
        }
        // Without Open MPI's headers the package lacks the component only.
        Err(why) => eprintln!("SKIPPED: the component of Open MPI: {why}"),
    }
    for name in mpi_coll::LIBRARY_SOURCES {
        copy(&root().join("mpi").join(name), &usr.join("share/barewire/mpi").join(name), 0o644)?;
    }
    for file in &stripped {
        // Symbols are nine tenths of the size; a missing strip is no error.
        let _ = output_of(Command::new("strip").arg("--strip-unneeded").arg(file));
    }
    let dissector = root().join("docs/barewire.lua");
    copy(&dissector, &lib.join("wireshark/plugins/barewire.lua"), 0o644)?;
    let setup = usr.join("sbin/barewire-hugepage-setup");
    copy(&root().join("hugepage-setup.sh"), &setup, 0o755)?;
    for unit in ["barewire-switch@.service", "barewire-exporter.service"] {
        let file = root().join("cli/systemd").join(unit);
        let text = std::fs::read_to_string(&file).map_err(|why| format!("{unit}: {why}"))?;
        let text = text.replace("/usr/bin/barewire", &format!("{}/barewire", layout.bin));
        write(&usr.join("lib/systemd/system").join(unit), text.as_bytes())?;
    }
    let dashboard = usr.join("share/barewire/grafana/barewire.json");
    copy(&root().join("cli/grafana/barewire.json"), &dashboard, 0o644)?;
    man_pages(&usr.join("share/man"), built)?;
    documents(&usr.join("share/doc/barewire"))?;
    Ok(programs)
}

/// Installs the man pages in the sources, and generates that of the command.
fn man_pages(man: &Path, built: &Path) -> Result<(), String> {
    let mut pages = vec![man.join("man1/barewire.1")];
    write(&pages[0], page(&built.join("barewire"))?.as_bytes())?;
    for file in files_in(&root().join("docs/man"))? {
        let name = file.file_name().unwrap_or_default();
        let to = man.join("man7").join(name);
        copy(&file, &to, 0o644)?;
        pages.push(to);
    }
    for page in pages {
        output_of(Command::new("gzip").args(["-9n", "-f"]).arg(page))?;
    }
    Ok(())
}

/// One line for each linked third-party crate: name, version, license.
fn crates() -> Result<String, String> {
    let mut tree = Command::new(cargo());
    tree.args(["tree", "--package=barewire-cli", "--package=barewire-provider", "--edges=normal"])
        .args(["--prefix=none", "--format={p}: {l}"])
        .current_dir(root());
    let output = tree.output().map_err(|why| format!("cargo tree: {why}"))?;
    if !output.status.success() {
        return Err(format!("cargo tree: {}", String::from_utf8_lossy(&output.stderr)));
    }
    let output = String::from_utf8_lossy(&output.stdout);
    // Crates of the workspace have a path behind the version. Proc macros are not linked in.
    let others = |line: &&str| !line.contains("(/") && !line.contains("(proc-macro)");
    let lines = output.lines().map(|line| line.trim_end_matches(" (*)")).filter(others);
    let lines: BTreeSet<&str> = lines.filter(|line| !line.is_empty()).collect();
    Ok(lines.iter().map(|line| format!("{line}\n")).collect())
}

/// Files of the sources' root that the documents link.
const LINKED: [&str; 6] =
    ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "ARCHITECTURE.md", LICENSES[0], LICENSES[1]];
const LICENSES: [&str; 2] = ["LICENSE-MIT", "LICENSE-APACHE"];

/// Installs the README, the pages that it links, the changes and the licenses.
fn documents(doc: &Path) -> Result<(), String> {
    let licenses = LICENSES.map(|name| root().join(name));
    let mut copyright =
        String::from("barewire is offered under the MIT or the Apache-2.0 license.\n");
    for license in licenses {
        let text = std::fs::read_to_string(&license);
        copyright.push_str(&text.map_err(|why| format!("{}: {why}", license.display()))?);
    }
    copyright.push_str("\nThe programs contain these crates, each under its license:\n\n");
    copyright.push_str(&crates()?);
    write(&doc.join("copyright"), copyright.as_bytes())?;
    for name in LINKED {
        copy(&root().join(name), &doc.join(name), 0o644)?;
    }
    let pages = files_in(&root().join("docs"))?;
    for page in pages.iter().filter(|page| page.extension().is_some_and(|ext| ext == "md")) {
        let name = page.file_name().unwrap_or_default();
        copy(page, &doc.join("docs").join(name), 0o644)?;
    }
    for image in files_in(&root().join("docs/img"))? {
        let name = image.file_name().unwrap_or_default();
        copy(&image, &doc.join("docs/img").join(name), 0o644)?;
    }
    Ok(())
}

/// The files of a folder, sorted.
fn files_in(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = std::fs::read_dir(dir).map_err(|why| format!("{}: {why}", dir.display()))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|file| file.is_file());
    files.sort();
    Ok(files)
}

/// The man page of the command, from `--help` of it and of its subcommands.
fn page(command: &Path) -> Result<String, String> {
    let help = output_of(Command::new(command).arg("--help"))?;
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let commands: Vec<&str> = commands
        .take_while(|line| line.starts_with("  "))
        // An item begins with two spaces; a longer indent continues the previous item.
        .filter(|line| !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .collect();
    let mut text = String::from(
        ".TH BAREWIRE 1 \"\" \"barewire\" \"barewire\"\n.SH NAME\n\
         barewire \\- shows, checks and measures barewire's fabric over plain Ethernet\n",
    );
    section(&mut text, "DESCRIPTION", &help);
    for name in commands {
        let help = output_of(Command::new(command).args([name, "--help"]))?;
        section(&mut text, &format!("BAREWIRE {}", name.to_uppercase()), &help);
    }
    text.push_str(".SH SEE ALSO\n.BR barewire_ports (7),\n.BR fi_barewire (7)\n");
    Ok(text)
}

/// Appends preformatted text.
fn section(page: &mut String, title: &str, text: &str) {
    page.push_str(&format!(".SH {title}\n.nf\n"));
    for line in text.lines() {
        let line = line.replace('\\', "\\\\").replace('-', "\\-");
        // A line that begins with one of these characters would be a roff request.
        let guard = if line.starts_with(['.', '\'']) { "\\&" } else { "" };
        page.push_str(&format!("{guard}{line}\n"));
    }
    page.push_str(".fi\n");
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result<(), String> {
    let bytes = std::fs::read(from).map_err(|why| format!("{}: {why}", from.display()))?;
    write(to, &bytes)?;
    set_mode(to, mode)
}

fn set_mode(to: &Path, mode: u32) -> Result<(), String> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(to, std::fs::Permissions::from_mode(mode))
        .map_err(|why| format!("{}: {why}", to.display()))
}

/// Writes a file that everybody can read, in folders that everybody can read, regardless of the
/// umask.
pub(super) fn write(to: &Path, bytes: &[u8]) -> Result<(), String> {
    let folder = to.parent().unwrap_or(to);
    let missing: Vec<&Path> = folder.ancestors().take_while(|dir| !dir.exists()).collect();
    let made = std::fs::create_dir_all(folder);
    made.and_then(|()| std::fs::write(to, bytes))
        .map_err(|why| format!("{}: {why}", to.display()))?;
    for dir in missing {
        set_mode(dir, 0o755)?;
    }
    set_mode(to, 0o644)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: what the README and the pages link is in the packages, but for files of the sources.
    #[test]
    fn a_package_has_what_its_documents_link() {
        let doc = tempfile::tempdir().unwrap();
        documents(doc.path()).unwrap();
        for page in ["README.md", "docs/trouble.md", "docs/install.md", "docs/settings.md"] {
            let page = doc.path().join(page);
            let text = std::fs::read_to_string(&page).unwrap();
            for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
                let file = link.split('#').next().unwrap();
                let is_there = page.parent().unwrap().join(file).exists();
                let elsewhere = file.is_empty() || file.contains("://");
                assert!(elsewhere || is_there, "{}: {link}", page.display());
            }
        }
    }

    #[test]
    fn a_line_of_help_is_no_command_of_the_page() {
        let mut page = String::new();
        section(&mut page, "X", ".port\n'a\n--json");
        assert_eq!(page, ".SH X\n.nf\n\\&.port\n\\&'a\n\\-\\-json\n.fi\n");
    }
}
