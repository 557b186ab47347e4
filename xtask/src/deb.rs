//! `cargo xtask deb`: a package for Debian with the library where Debian's libfabric looks for
//! providers, the command, its man pages, the dissector, and the component of Open MPI.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use crate::{cargo, openmpi, root, target_dir};

/// How to build it.
#[derive(clap::Args)]
#[command(after_help = "\
The package is target/debian/barewire_VERSION_ARCH.deb. To install it:

  sudo apt-get install ./target/debian/barewire_*.deb
  fi_info -p barewire")]
pub(crate) struct DebArgs {
    /// Packs what the tests are built like: quick to build, slow to run.
    #[arg(long)]
    debug: bool,
}

/// Builds the package and says where it lies.
///
/// # Errors
/// Something does not build, or there is no dpkg here.
pub(crate) fn run(args: &DebArgs) -> Result<ExitCode, String> {
    let file = build(if args.debug { "test" } else { "release" })?;
    println!("{}", file.display());
    Ok(ExitCode::SUCCESS)
}

/// Builds the package from a profile of Cargo's.
///
/// # Errors
/// As [`run`].
pub(crate) fn build(profile: &str) -> Result<PathBuf, String> {
    let arch = say(Command::new("dpkg").arg("--print-architecture"))
        .map_err(|why| format!("{why}; a package can be made on Debian only"))?;
    let triplet = say(Command::new("dpkg-architecture").arg("-qDEB_HOST_MULTIARCH"))
        .or_else(|_| say(Command::new("cc").arg("-print-multiarch")))
        .unwrap_or_else(|_| format!("{}-linux-gnu", std::env::consts::ARCH));
    let mut cargo = Command::new(cargo());
    cargo.args(["build", "--quiet", "--profile", profile]).current_dir(root());
    if profile == "release" {
        cargo.args(["-p", "barewire-provider", "-p", "barewire-cli"]);
    } else {
        // As the suites build it, so that nothing is compiled twice.
        cargo.args(["--workspace", "--exclude", "xtask", "--lib", "--bins"]);
    }
    say(&mut cargo)?;
    let built = target_dir().join(if profile == "release" { "release" } else { "debug" });
    let version = env!("CARGO_PKG_VERSION");
    let dir = target_dir().join("debian");
    let tree = dir.join("tree");
    // That of the last package; that there is none is fine.
    let _ = std::fs::remove_dir_all(&tree);
    fill(&tree, &built, &triplet)?;
    write(&tree.join("DEBIAN/control"), control(version, &arch).as_bytes())?;
    let file = dir.join(format!("barewire_{version}_{arch}.deb"));
    let mut pack = Command::new("dpkg-deb");
    say(pack.args(["--root-owner-group", "--build"]).arg(&tree).arg(&file))?;
    Ok(file)
}

/// Lays out what the package installs.
fn fill(tree: &Path, built: &Path, triplet: &str) -> Result<(), String> {
    let lib = tree.join("usr/lib").join(triplet);
    let library = lib.join("libfabric/libbarewire-fi.so");
    copy(&built.join("libbarewire_fi.so"), &library, 0o644)?;
    copy(&built.join("barewire"), &tree.join("usr/bin/barewire"), 0o755)?;
    let mut programs = vec![library, tree.join("usr/bin/barewire")];
    match openmpi::component(&root(), &lib.join("barewire/openmpi4")) {
        Ok(component) => {
            set_mode(&component, 0o644)?;
            programs.push(component);
        }
        // Without Open MPI's headers the package has all else.
        Err(why) => eprintln!("SKIPPED: the component of Open MPI: {why}"),
    }
    for file in &programs {
        // Without symbols it is a tenth as long; that strip is missing is no reason to fail.
        let _ = say(Command::new("strip").arg("--strip-unneeded").arg(file));
    }
    let dissector = root().join("docs/barewire.lua");
    copy(&dissector, &lib.join("wireshark/plugins/barewire.lua"), 0o644)?;
    let setup = root().join("hugepage-setup.sh");
    if setup.is_file() {
        copy(&setup, &tree.join("usr/sbin/barewire-hugepage-setup"), 0o755)?;
    }
    let units = tree.join("usr/lib/systemd/system");
    for unit in ["barewire-switch@.service", "barewire-exporter.service"] {
        copy(&root().join("cli/systemd").join(unit), &units.join(unit), 0o644)?;
    }
    let dashboard = tree.join("usr/share/barewire/grafana/barewire.json");
    copy(&root().join("cli/grafana/barewire.json"), &dashboard, 0o644)?;
    let man = tree.join("usr/share/man");
    copy(&root().join("docs/man/fi_barewire.7"), &man.join("man7/fi_barewire.7"), 0o644)?;
    write(&man.join("man1/barewire.1"), page(&built.join("barewire"))?.as_bytes())?;
    for file in ["man7/fi_barewire.7", "man1/barewire.1"] {
        say(Command::new("gzip").args(["-9n", "-f"]).arg(man.join(file)))?;
    }
    let doc = tree.join("usr/share/doc/barewire");
    let licenses = ["LICENSE-MIT", "LICENSE-APACHE"].map(|name| root().join(name));
    let mut copyright =
        String::from("barewire is offered under the MIT or the Apache-2.0 license.\n");
    for license in licenses {
        let text = std::fs::read_to_string(&license);
        copyright.push_str(&text.map_err(|why| format!("{}: {why}", license.display()))?);
    }
    write(&doc.join("copyright"), copyright.as_bytes())?;
    for name in ["README.md", "CHANGELOG.md"] {
        copy(&root().join(name), &doc.join(name), 0o644)?;
    }
    Ok(())
}

fn control(version: &str, arch: &str) -> String {
    format!(
        "Package: barewire\n\
         Version: {version}\n\
         Architecture: {arch}\n\
         Maintainer: The barewire authors <https://github.com/barewire/barewire>\n\
         Section: net\n\
         Priority: optional\n\
         Depends: libc6, libgcc-s1\n\
         Recommends: libfabric1, libfabric-bin\n\
         Suggests: openmpi-bin, tshark\n\
         Homepage: https://github.com/barewire/barewire\n\
         Description: fabric over plain Ethernet, with a provider for libfabric\n \
         Programs that use libfabric, MPI among them, exchange messages and reach each\n \
         other's memory over plain Ethernet frames: FI_PROVIDER=barewire.\n"
    )
}

/// The man page of the command: what `--help` says, of it and of what it can do.
fn page(command: &Path) -> Result<String, String> {
    let help = say(Command::new(command).arg("--help"))?;
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let commands: Vec<&str> = commands
        .take_while(|line| line.starts_with("  "))
        // A line of its own begins with two spaces; a longer indent goes on with the last.
        .filter(|line| !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .collect();
    let mut text = String::from(
        ".TH BAREWIRE 1 \"\" \"barewire\" \"barewire\"\n.SH NAME\n\
         barewire \\- shows, checks and measures this machine's fabric\n",
    );
    section(&mut text, "DESCRIPTION", &help);
    for name in commands {
        let help = say(Command::new(command).args([name, "--help"]))?;
        section(&mut text, &format!("BAREWIRE {}", name.to_uppercase()), &help);
    }
    text.push_str(".SH SEE ALSO\n.BR fi_barewire (7)\n");
    Ok(text)
}

/// Appends text that stays as it is.
fn section(page: &mut String, title: &str, text: &str) {
    page.push_str(&format!(".SH {title}\n.nf\n"));
    for line in text.lines() {
        let line = line.replace('\\', "\\\\").replace('-', "\\-");
        // A line that begins with one of these would be a command.
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

fn write(to: &Path, bytes: &[u8]) -> Result<(), String> {
    let made = std::fs::create_dir_all(to.parent().unwrap_or(to));
    made.and_then(|()| std::fs::write(to, bytes)).map_err(|why| format!("{}: {why}", to.display()))
}

/// Runs a program and returns what it said on its standard output.
fn say(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().display().to_string();
    let ran = command.stdin(Stdio::null()).output().map_err(|why| format!("{name}: {why}"))?;
    if ran.status.success() {
        Ok(String::from_utf8_lossy(&ran.stdout).trim_end().to_owned())
    } else {
        Err(format!("{name}: {}", String::from_utf8_lossy(&ran.stderr).trim_end()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_help_is_no_command_of_the_page() {
        let mut page = String::new();
        section(&mut page, "X", ".port\n'a\n--json");
        assert_eq!(page, ".SH X\n.nf\n\\&.port\n\\&'a\n\\-\\-json\n.fi\n");
    }

    #[test]
    fn the_control_file_has_what_dpkg_asks_for() {
        let text = control("1.2.3", "amd64");
        for field in ["Package: ", "Version: 1.2.3\n", "Architecture: amd64\n", "Maintainer: "] {
            assert!(text.lines().any(|line| format!("{line}\n").starts_with(field)), "{field}");
        }
        let lines: Vec<_> = text.lines().collect();
        let at = lines.iter().position(|l| l.starts_with("Description: ")).unwrap();
        assert!(lines[at + 1..].iter().all(|l| l.starts_with(' ')), "{text}");
    }
}
