//! The packages that `cargo xtask dist` makes: installed on a copy of this machine's root, in a
//! root with nothing but glibc and libfabric, and nightly in roots of Debian's releases.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use barewire_tests::mpi_coll;

use super::{finish, library_dir, need, succeed, text};

/// The package of the name `barewire` and this extension that was made last.
fn package(extension: &str) -> Result<PathBuf, String> {
    named("barewire", extension)
}

/// As [`package`], of another name.
fn named(name: &str, extension: &str) -> Result<PathBuf, String> {
    let dir = library_dir()?.parent().ok_or("no directory")?.join("dist");
    let files = std::fs::read_dir(&dir).into_iter().flatten().flatten().map(|e| e.path());
    let mut files: Vec<_> = files.filter(|file| is_package(file, name, extension)).collect();
    files.sort();
    files.pop().ok_or_else(|| format!("there is no {extension}: cargo xtask dist --debug"))
}

/// Behind the name stands a version.
fn is_package(file: &Path, name: &str, extension: &str) -> bool {
    let file_name = file.file_name().unwrap_or_default().to_string_lossy();
    let rest = file_name.strip_prefix(name).and_then(|rest| rest.strip_prefix(['-', '_']));
    let has_version = rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    file.is_file() && has_version && file_name.ends_with(extension)
}

/// Runs a script as root of a mount namespace of its own, with an empty folder as `$1` and
/// `package` as `$2`; `None` if the test cannot run here, which is said.
fn as_root(script: &str, package: Result<PathBuf, String>, seconds: u64) -> Option<Output> {
    let package = match package {
        Ok(package) => package,
        Err(why) => {
            println!("SKIPPED: {why}");
            return None;
        }
    };
    if !nix::unistd::geteuid().is_root() {
        println!("SKIPPED: not root, and only root installs packages");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-ec", script, "sh"]).arg(dir.path()).arg(&package);
    let output = finish(&mut command, seconds);
    if output.status.code() == Some(77) {
        println!("SKIPPED: {}", text(&output).lines().next_back().unwrap_or_default());
        return None;
    }
    Some(output)
}

/// What [`as_root`] runs around `IN_ROOT`. The root's files are this machine's with a layer above
/// that takes what is written, so that dpkg installs for real and nothing of it stays.
const OVERLAY: &str = r#"
mount -t tmpfs tmpfs "$1"
mkdir "$1/up" "$1/work" "$1/all"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/up,workdir=$1/work" "$1/all" || {
    echo "no overlay of the root here"
    exit 77
}
mount --bind /dev "$1/all/dev"
mount --bind /proc "$1/all/proc"
mkdir -p "$1/all/tmp"
cp "$2" "$1/all/tmp/barewire.deb"
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C chroot "$1/all" sh -ec '
dpkg --install /tmp/barewire.deb
IN_ROOT
'
"#;

/// The package `barewire` in [`OVERLAY`].
const PLAIN: &str = r#"
fi_info -p barewire
fi_info -l | grep -A1 "^barewire"
barewire --version
barewire-hugepage-setup --check || test $? = 1
barewire-hugepage-setup --help
for page in man1/barewire.1 man7/fi_barewire.7 man7/barewire_ports.7; do
    test -s /usr/share/man/$page.gz
done
test -s /usr/share/barewire/grafana/barewire.json
test -s /usr/lib/systemd/system/barewire-exporter.service
for dir in /usr/lib/*/barewire/openmpi4; do
    if test -d "$dir" && command -v ompi_info; then
        OMPI_MCA_mca_base_component_path=SYS_DEFAULT:$dir ompi_info | grep "MCA coll: barewire"
    fi
done
if command -v mpicc && test -f /usr/include/rdma/fi_collective.h; then
    cd /usr/share/barewire/mpi
    mpicc -O2 -flto -fPIC -fvisibility=hidden -shared -o /tmp/libbarewire_mpi.so coll.c pmpi.c
    cd /
fi
dpkg --remove barewire
! fi_info -p barewire
"#;

#[test]
fn an_installed_package_is_found_without_a_variable() {
    let programs = need(&[("fi_info", "libfabric-bin"), ("dpkg", "dpkg")]);
    let package = programs.and(package(".deb"));
    let script = OVERLAY.replace("IN_ROOT", PLAIN);
    let Some(output) = as_root(&script, package.clone(), 120) else { return };
    let said = text(&output);
    assert!(output.status.success(), "{}\n{said}", output.status);
    assert!(said.contains("provider: barewire"), "{said}");
    // The script tells to call it by the name that it has there.
    assert!(said.contains("\n  sudo barewire-hugepage-setup --2m 64"), "{said}");
    assert!(!said.contains("hugepage-setup.sh"), "{said}");
    let package = package.unwrap();
    let listed = succeed(Command::new("dpkg-deb").arg("--contents").arg(&package), 30);
    let mut files =
        vec!["libfabric/libbarewire-fi.so", "bin/barewire", "wireshark/plugins/barewire.lua"];
    match super::colls::component() {
        Ok(_) => files.push("barewire/openmpi4/mca_coll_barewire.so"),
        Err(why) => println!("SKIPPED: the component in the package: {why}"),
    }
    let sources = mpi_coll::LIBRARY_SOURCES.iter().map(|name| format!("barewire/mpi/{name}"));
    let files = files.into_iter().map(str::to_owned).chain(sources);
    for file in files {
        assert!(listed.contains(&file), "no {file} in\n{listed}");
    }
    let depends = succeed(Command::new("dpkg-deb").arg("--field").arg(&package).arg("Depends"), 30);
    assert!(depends.contains("libc6 (>= 2.") && depends.contains("libgcc-s1"), "{depends}");
}

/// The package `barewire-dpdk` in [`OVERLAY`]: one port opens, and one wants more memory than there
/// is.
#[cfg(feature = "dpdk")]
const WITH_DPDK: &str = r#"
fi_info -p barewire
FI_PROVIDER=barewire FI_BAREWIRE_PORT=dpdk:net_null0 fi_info -p barewire -v
! barewire pingpong --listen --once --port "dpdk(mbufs=40000000):net_null0"
"#;

#[cfg(feature = "dpdk")]
#[test]
fn a_package_with_dpdk_opens_its_devices() {
    let programs = need(&[("fi_info", "libfabric-bin"), ("dpkg", "dpkg")]);
    let package = programs.and(named("barewire-dpdk", ".deb"));
    let script = OVERLAY.replace("IN_ROOT", WITH_DPDK);
    let Some(output) = as_root(&script, package.clone(), 120) else { return };
    let said = text(&output);
    assert!(output.status.success(), "{}\n{said}", output.status);
    assert!(said.contains("net_null0"), "{said}");
    assert!(said.contains("sudo barewire-hugepage-setup --2m"), "{said}");
    let mut field = Command::new("dpkg-deb");
    let depends = succeed(field.arg("--field").arg(package.unwrap()).arg("Depends"), 30);
    assert!(depends.contains("librte-eal") && depends.contains("libc6 (>= 2."), "{depends}");
}

/// What has the libraries of glibc and of the compiler, `fi_info` with what it needs, and nothing
/// else: no shell, no symbolic link. `INSTALL` puts the package there.
const CLEAN: &str = r#"
mount -t tmpfs tmpfs "$1"
mkdir -p "$1/proc" "$1/dev" "$1/tmp" "$1/usr/local" "$1/run"
needed=$(ldd /usr/bin/fi_info | awk '{ for (i = 1; i <= NF; i++) if ($i ~ "^/") print $i }')
base=$(dpkg -L libc6 libgcc-s1 | grep '/lib.*\.so')
for file in $needed $base; do
    if test -f "$file"; then cp -L --parents "$file" "$1"; fi
done
cp --parents /usr/bin/fi_info "$1"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
INSTALL
path=/usr/local/bin:/usr/bin:/usr/sbin
in_root() { env -i FI_PROVIDER_PATH="$dir" PATH="$path" chroot "$root" "$@"; }
root=$1
in_root fi_info -p barewire
in_root barewire --version
in_root barewire pingpong --spawn --iterations 100 --port "shm:dist-$$"
find "$1/usr" -name 'libbarewire-fi.so' -exec objdump -T {} +
objdump -T "$(find "$1/usr" -name barewire -path '*/bin/*')"
find "$1/usr" -name 'barewire*.service' -exec grep -h ^ExecStart {} +
"#;

/// Installs in [`CLEAN`] and says what came of it, if it can be done here.
fn in_a_clean_root(install: &str, package: Result<PathBuf, String>) -> Option<String> {
    let here = need(&[("fi_info", "libfabric-bin"), ("dpkg", "dpkg"), ("objdump", "binutils")]);
    let script = CLEAN.replace("INSTALL", install);
    let output = as_root(&script, here.and(package), 120)?;
    let said = text(&output);
    assert!(output.status.success(), "{}\n{said}", output.status);
    assert!(said.contains("provider: barewire"), "{said}");
    Some(said)
}

/// The second number of the latest `GLIBC_2.N` that symbols ask for.
fn latest_glibc(symbols: &str) -> u32 {
    let versions = symbols
        .split("GLIBC_2.")
        .skip(1)
        .filter_map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse::<u32>().ok());
    versions.max().unwrap()
}

#[test]
fn a_tarball_runs_with_nothing_but_glibc() {
    let install = r#"
    dir=/usr/local/lib/libfabric
    tar -C "$1/usr/local" --strip-components=1 -xzf "$2""#;
    let Some(said) = in_a_clean_root(install, package(".tar.gz")) else { return };
    assert!(said.contains("ExecStart=/usr/local/bin/barewire switch"), "{said}");
    // A later glibc has later versions of what we call.
    let here = succeed(Command::new("ldd").arg("--version"), 30);
    let here = here.lines().next().and_then(|line| line.rsplit("2.").next()?.parse::<u32>().ok());
    if here.is_some_and(|minor| minor > 36) {
        println!("SKIPPED: built with a glibc later than Debian 12's");
    } else {
        assert!(latest_glibc(&said) <= 34, "needs glibc 2.{}", latest_glibc(&said));
    }
}

#[test]
fn a_package_of_rpm_runs_with_nothing_but_glibc() {
    let package = need(&[("rpm", "rpm")]).and(package(".rpm"));
    // Debian's rpm wants to be told that we mean it. The root's database has no glibc.
    let install = r#"
    dir=/usr/lib64/libfabric
    rpm --root "$1" --force-debian --nodeps --install "$2"
    rpm --root "$1" --query --requires barewire"#;
    let Some(said) = in_a_clean_root(install, package) else { return };
    let asked = format!("libc.so.6(GLIBC_2.{})(64bit)", latest_glibc(&said));
    assert!(said.contains(&asked), "no {asked} in\n{said}");
    assert!(said.contains("ExecStart=/usr/bin/barewire switch"), "{said}");
    // Who has no Open MPI can install it.
    assert!(!said.contains("libmpi.so"), "{said}");
}

/// A root of a release of Debian, and apt in it.
const RELEASE: &str = r#"
mirror=$(awk '/^URIs: .*debian$/ || ($1 == "deb" && $2 ~ "/debian/*$") { print $2; exit }' \
    /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null || true)
mmdebstrap --quiet --variant=apt RELEASE "$1/new" ${mirror:+"$mirror"} || {
    echo "no root of RELEASE can be made here"
    exit 77
}
cp "$2" "$1/new/tmp/barewire.deb"
mount -t proc proc "$1/new/proc"
mount --bind /dev "$1/new/dev"
cp /etc/resolv.conf "$1/new/etc/"
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C DEBIAN_FRONTEND=noninteractive \
    chroot "$1/new" sh -ec '
apt-get update -qq
apt-get install -qq --no-install-recommends libfabric-bin >/dev/null
apt-get install -q --yes --no-install-recommends /tmp/barewire.deb
fi_info -p barewire
barewire pingpong --spawn --iterations 100 --port shm:dist-RELEASE
barewire-hugepage-setup --check || test $? = 1
'
"#;

/// Goal: apt installs the package on Debian 12 and 13, where it runs, and refuses it on Debian 11,
/// whose glibc is too old.
#[test]
fn apt_installs_the_package_on_debian_12_and_later() {
    if std::env::var_os("BAREWIRE_NIGHTLY").is_none() {
        return;
    }
    let package = need(&[("mmdebstrap", "mmdebstrap")]).and(package(".deb"));
    for (release, runs) in [("bookworm", true), ("trixie", true), ("bullseye", false)] {
        let script = RELEASE.replace("RELEASE", release);
        let Some(output) = as_root(&script, package.clone(), 600) else { continue };
        let said = text(&output);
        println!("{release}: {}", said.lines().next_back().unwrap_or_default());
        assert_eq!(output.status.success(), runs, "{release}\n{said}");
        if runs {
            assert!(said.contains("provider: barewire"), "{release}\n{said}");
        } else {
            assert!(said.contains("libc6 (>= 2.34)"), "{release}\n{said}");
        }
    }
}
