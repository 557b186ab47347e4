//! `cargo xtask dist`: packages for Debian and for RPM, and a tarball for everybody else.

mod deb;
mod rpm;
mod tar;
mod tree;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use crate::packages::{self, Tool};
use crate::{cargo, root, target_dir};

/// What to make, and how to build it.
#[derive(clap::Args)]
#[command(after_help = "\
They are in target/dist. To install them:

  sudo apt-get install ./target/dist/barewire_*.deb                  Debian, Ubuntu
  sudo dnf install ./target/dist/barewire-*.rpm                      Fedora, RHEL
  sudo tar -C /usr/local --no-overwrite-dir --strip-components=1 -xzf target/dist/barewire-*.tar.gz

Then: fi_info -p barewire, after the tarball with FI_PROVIDER_PATH=/usr/local/lib/libfabric. A
package needs the glibc of the machine that it is built on, or an older one: at the end of each
line stands from which version on. The tarball of Debian 12 runs on glibc 2.34 and later.")]
pub(crate) struct DistArgs {
    /// Which ones; all of them if none is named.
    #[arg(value_enum)]
    formats: Vec<Format>,
    /// Packs what the tests are built like: quick to build, slow to run.
    #[arg(long)]
    debug: bool,
    /// With the ports of DPDK: the package barewire-dpdk, in place of barewire.
    #[arg(long)]
    dpdk: bool,
}

/// A package format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// For dpkg and apt.
    Deb,
    /// For rpm and dnf.
    Rpm,
    /// For no package manager.
    Tar,
}

impl Format {
    /// In build order.
    pub(crate) const ALL: [Self; 3] = [Self::Deb, Self::Rpm, Self::Tar];

    /// The tool that builds the format.
    pub(crate) fn tool(self) -> Tool {
        match self {
            Self::Deb => packages::SHLIBDEPS,
            Self::Rpm => packages::RPMBUILD,
            Self::Tar => packages::BINUTILS,
        }
    }
}

/// The built programs and libraries.
pub(crate) struct Built {
    /// Cargo's output folder.
    dir: PathBuf,
    dpdk: bool,
}

impl Built {
    /// Name of the package.
    fn name(&self) -> &'static str {
        if self.dpdk { "barewire-dpdk" } else { "barewire" }
    }
}

/// Builds the packages and prints their paths.
///
/// # Errors
/// A build fails, or the tool of a format is missing.
pub(crate) fn run(args: &DistArgs) -> Result<ExitCode, String> {
    let formats = if args.formats.is_empty() { &Format::ALL[..] } else { &args.formats };
    packages::provide(&formats.iter().map(|format| format.tool()).collect::<Vec<_>>());
    let built = build(args.debug, args.dpdk)?;
    for format in formats {
        let (file, glibc) = pack(&built, *format)?;
        println!("{}   glibc {glibc}", file.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Builds the content of the packages: in release, or like the test suites, so that nothing is
/// compiled twice.
///
/// # Errors
/// The build fails.
pub(crate) fn build(debug: bool, dpdk: bool) -> Result<Built, String> {
    let mut cargo = Command::new(cargo());
    cargo.args(["build", "--quiet", "--lib"]).current_dir(root());
    let ours = ["--bin=barewire", "--package=barewire-provider"];
    match (debug, dpdk) {
        (false, false) => cargo.args(ours).args(["--release", "--package=barewire-cli"]),
        (false, true) => {
            cargo.args(ours).args(["--release", "--package=barewire-cli", "--features=dpdk"])
        }
        (true, false) => cargo.args(["--bins", "--profile=test", "--workspace", "--exclude=xtask"]),
        (true, true) => cargo.args(ours).arg("--profile=test").args(crate::test::ALL_WITH_DPDK),
    };
    output_of(&mut cargo)?;
    Ok(Built { dir: target_dir().join(if debug { "debug" } else { "release" }), dpdk })
}

/// Makes a package; returns its path and the version of glibc that it needs.
///
/// # Errors
/// The tool is missing, or fails.
pub(crate) fn pack(built: &Built, format: Format) -> Result<(PathBuf, String), String> {
    let (file, programs) = match format {
        Format::Deb => deb::pack(built)?,
        Format::Rpm => rpm::pack(built)?,
        Format::Tar => tar::pack(built)?,
    };
    let glibc = programs.iter().map(|file| glibc_of(file)).collect::<Result<Vec<_>, _>>()?;
    let most = glibc.into_iter().max().unwrap_or_default();
    Ok((file, format!("{}.{}", most.0, most.1)))
}

/// Folder of the packages.
fn dist_dir() -> PathBuf {
    target_dir().join("dist")
}

/// Version of the workspace and of every package.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Homepage field of every package.
const HOMEPAGE: &str = env!("CARGO_PKG_REPOSITORY");
const SUMMARY: &str = "fabric over plain Ethernet, with a provider for libfabric";
const DESCRIPTION: [&str; 2] = [
    "Programs that use libfabric, MPI among them, exchange messages and reach each",
    "other's memory over plain Ethernet frames: FI_PROVIDER=barewire.",
];

/// The latest glibc version among a program's symbols.
fn glibc_of(program: &Path) -> Result<(u32, u32), String> {
    let symbols = output_of(Command::new("objdump").arg("-T").arg(program))?;
    Ok(latest_glibc(&symbols))
}

/// The latest `GLIBC_X.Y` in a list of symbols.
fn latest_glibc(symbols: &str) -> (u32, u32) {
    let versions = symbols.split("GLIBC_").skip(1).filter_map(|rest| {
        let end = rest.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(rest.len());
        let mut numbers = rest[..end].split('.').map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    });
    versions.max().unwrap_or_default()
}

/// Runs a program and returns its standard output.
fn output_of(command: &mut Command) -> Result<String, String> {
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
    fn the_latest_version_of_glibc_is_found() {
        let symbols = "0000 DF *UND* 0000 (GLIBC_2.4) memcpy\n0 (GLIBC_2.34) a\n\
                       0 (GLIBC_2.2.5) b\n0 (GLIBC_PRIVATE) c\n0 (GCC_4.2.0) d\n";
        assert_eq!(latest_glibc(symbols), (2, 34));
        assert_eq!(latest_glibc(""), (0, 0));
    }
}
