//! The package that `cargo xtask deb` makes, installed by dpkg on a copy of this machine's root.

use std::path::PathBuf;
use std::process::Command;

use super::{finish, library_dir, need, succeed, text};

/// The package that was made last.
fn package() -> Result<PathBuf, String> {
    let dir = library_dir()?.parent().ok_or("no directory")?.join("debian");
    let files = std::fs::read_dir(&dir).into_iter().flatten().flatten().map(|e| e.path());
    let mut files: Vec<_> = files.filter(|f| f.extension().is_some_and(|e| e == "deb")).collect();
    files.sort();
    files.pop().ok_or_else(|| "there is no package: cargo xtask deb --debug".to_owned())
}

/// Runs as root of a namespace whose files are this machine's with a layer above that takes what
/// is written, so that dpkg installs for real and nothing of it stays.
const SCRIPT: &str = r#"
set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1/up" "$1/work" "$1/all"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/up,workdir=$1/work" "$1/all" || exit 77
mount --bind /dev "$1/all/dev"
mkdir -p "$1/all/tmp"
cp "$2" "$1/all/tmp/barewire.deb"
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C chroot "$1/all" sh -ec '
dpkg --install /tmp/barewire.deb
fi_info -p barewire
fi_info -l | grep -A1 "^barewire"
barewire --version
test -s /usr/share/man/man1/barewire.1.gz
test -s /usr/share/man/man7/fi_barewire.7.gz
test -s /usr/share/barewire/grafana/barewire.json
test -s /usr/lib/systemd/system/barewire-exporter.service
for dir in /usr/lib/*/barewire/openmpi4; do
    if test -d "$dir" && command -v ompi_info; then
        OMPI_MCA_mca_base_component_path=SYS_DEFAULT:$dir ompi_info | grep "MCA coll: barewire"
    fi
done
dpkg --remove barewire
! fi_info -p barewire
'
"#;

#[test]
fn an_installed_package_is_found_without_a_variable() {
    let package = match need(&[("fi_info", "libfabric-bin"), ("dpkg", "dpkg")]).and(package()) {
        Ok(package) => package,
        Err(why) => {
            println!("SKIPPED: {why}");
            return;
        }
    };
    if !nix::unistd::geteuid().is_root() {
        println!("SKIPPED: not root, and dpkg installs as root only");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", SCRIPT, "sh"]).arg(dir.path()).arg(&package);
    let output = finish(&mut command, 120);
    if output.status.code() == Some(77) {
        println!("SKIPPED: no overlay of the root here: {}", text(&output).trim());
        return;
    }
    let said = text(&output);
    assert!(output.status.success(), "{}\n{said}", output.status);
    assert!(said.contains("provider: barewire"), "{said}");
    let listed = succeed(Command::new("dpkg-deb").arg("--contents").arg(&package), 30);
    let mut files =
        vec!["libfabric/libbarewire-fi.so", "bin/barewire", "wireshark/plugins/barewire.lua"];
    match super::colls::component() {
        Ok(_) => files.push("barewire/openmpi4/mca_coll_barewire.so"),
        Err(why) => println!("SKIPPED: the component in the package: {why}"),
    }
    for file in files {
        assert!(listed.contains(file), "no {file} in\n{listed}");
    }
}
