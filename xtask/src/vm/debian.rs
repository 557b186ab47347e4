//! Debian packages that are downloaded and unpacked under `target/vm`, but not installed.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::fcntl::{Flock, FlockArg};

use super::NotHere;

/// Folder of the package lists of another suite.
const LISTS: &str = "apt";

/// The result of `find` in the folder `root` of `dir`, which `fill` unpacks once, although guests
/// start in parallel in one process and in several.
///
/// # Errors
/// [`NotHere`]: `fill` failed, or `find` finds nothing in the unpacked files.
pub(super) fn unpacked<T>(
    dir: &Path,
    find: impl Fn(&Path) -> Option<T>,
    fill: impl FnOnce(&Path) -> Result<(), NotHere>,
) -> Result<T, NotHere> {
    let failed = |why: std::io::Error| NotHere(format!("{}: {why}", dir.display()));
    std::fs::create_dir_all(dir).map_err(failed)?;
    // The lock is released when the file is closed, also by the kernel after a kill.
    let lock = File::create(dir.join("lock")).map_err(failed)?;
    let _lock =
        Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, why)| failed(why.into()))?;
    let (fresh, root) = (dir.join("root.new"), dir.join("root"));
    if let Some(found) = find(&root) {
        return Ok(found);
    }
    // Left by a killed run; it may not exist.
    let _ = std::fs::remove_dir_all(&fresh);
    std::fs::create_dir_all(&fresh).map_err(failed)?;
    fill(&fresh)?;
    // Of another release or outdated; it may not exist.
    let _ = std::fs::remove_dir_all(&root);
    // The final name appears only when the files are complete.
    std::fs::rename(&fresh, &root).map_err(failed)?;
    find(&root).ok_or_else(|| NotHere(format!("{} is not what was wanted", root.display())))
}

/// Downloads a package with `options` of apt and unpacks it to `root`.
///
/// # Errors
/// [`NotHere`], with the output of apt or dpkg.
pub(super) fn fetch(root: &Path, package: &str, options: &[String]) -> Result<(), NotHere> {
    println!("fetching {package} to {}", root.display());
    let mut download = apt(options);
    succeed(download.args(["download", package]).current_dir(root))?;
    let deb = entries(root).into_iter().rfind(|path| {
        let name = name_of(path);
        name.starts_with(&format!("{package}_")) && name.ends_with(".deb")
    });
    let deb = deb.ok_or_else(|| NotHere(format!("{package} did not arrive")))?;
    succeed(quiet("dpkg-deb").arg("-x").arg(&deb).arg(root))?;
    // The unpacked files suffice.
    let _ = std::fs::remove_file(deb);
    Ok(())
}

/// Options with which apt uses `suite` of the archive of this system. Lists and downloads are below
/// `root`, separate from the system's, until [`forget_lists`].
///
/// # Errors
/// [`NotHere`]: the archive has no such suite, or cannot be reached.
pub(super) fn lists(root: &Path, suite: &str) -> Result<Vec<String>, NotHere> {
    let output = quiet("apt-get")
        .args(["indextargets", "--format", "$(REPO_URI) $(CODENAME)", "Created-By: Packages"])
        .output()
        .map_err(|why| NotHere(format!("apt-get indextargets: {why}")))?;
    let codename = codename();
    let archive = archive(&String::from_utf8_lossy(&output.stdout), &codename);
    let archive = archive.ok_or_else(|| NotHere(format!("apt has no archive of {codename}")))?;
    let apt = root.join(LISTS);
    for dir in ["lists/partial", "cache/archives/partial"] {
        let made = std::fs::create_dir_all(apt.join(dir));
        made.map_err(|why| NotHere(format!("{}: {why}", apt.display())))?;
    }
    let list = apt.join("sources.list");
    let keys = "/usr/share/keyrings/debian-archive-keyring.gpg";
    let line = format!("deb [signed-by={keys}] {archive} {suite} main\n");
    std::fs::write(&list, line).map_err(|why| NotHere(format!("{}: {why}", list.display())))?;
    let options: Vec<String> = [
        ("Dir::Etc::sourcelist", list),
        ("Dir::Etc::sourceparts", "/dev/null".into()),
        ("Dir::State::lists", apt.join("lists")),
        ("Dir::Cache", apt.join("cache")),
    ]
    .into_iter()
    .flat_map(|(option, path)| ["-o".to_owned(), format!("{option}={}", path.display())])
    .collect();
    succeed(self::apt(&options).args(["update", "-qq"]))?;
    Ok(options)
}

/// Removes the files of [`lists`] below `root`.
pub(super) fn forget_lists(root: &Path) {
    // A failure leaves unused files only.
    let _ = std::fs::remove_dir_all(root.join(LISTS));
}

/// Code name of this system's release.
pub(super) fn codename() -> String {
    codename_in(&std::fs::read_to_string("/etc/os-release").unwrap_or_default())
}

/// Code name of the release in an `os-release` file.
fn codename_in(os_release: &str) -> String {
    let mut lines = os_release.lines();
    let name = lines.find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    name.unwrap_or_default().trim_matches('"').to_owned()
}

/// The archive of release `codename`, in lines of an address and a release each.
fn archive(lines: &str, codename: &str) -> Option<String> {
    let mut words = lines.lines().filter_map(|line| line.split_once(' '));
    words.find(|(_, release)| *release == codename).map(|(archive, _)| archive.to_owned())
}

/// `apt-get` with `options`, as the calling user.
pub(super) fn apt(options: &[String]) -> Command {
    let mut command = quiet("apt-get");
    command.args(["-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=3"]).args(options);
    command
}

/// Runs a command.
///
/// # Errors
/// [`NotHere`], with the last line of its output.
pub(super) fn succeed(command: &mut Command) -> Result<(), NotHere> {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let last = words.map(|word| word.to_string_lossy()).last().unwrap_or_default().into_owned();
    let what = format!("{} {last}", command.get_program().display());
    match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let why = stderr.lines().next_back().unwrap_or("no reason given").to_owned();
            Err(NotHere(format!("{what}: {why}")))
        }
        Err(why) => Err(NotHere(format!("{what}: {why}"))),
    }
}

/// A command without standard input, in the C locale.
pub(super) fn quiet(program: &str) -> Command {
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).env("LC_ALL", "C");
    command
}

/// The name of a file.
pub(super) fn name_of(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or("")
}

/// The entries of a folder, sorted.
pub(super) fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect();
    all.sort();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concurrent_starts_unpack_once() {
        let dir = std::env::temp_dir().join(format!("xtask-fetch-{}", std::process::id()));
        // Somebody was killed while it unpacked.
        std::fs::create_dir_all(dir.join("root.new")).unwrap();
        std::fs::write(dir.join("root.new/one"), "").unwrap();
        let fetched = std::sync::atomic::AtomicU32::new(0);
        let find = |root: &Path| {
            let files = ["one", "two"].map(|file| root.join(file));
            files.iter().all(|file| file.is_file()).then_some(files)
        };
        let fill = |root: &Path| {
            fetched.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            for file in ["one", "two"] {
                std::thread::sleep(std::time::Duration::from_millis(5));
                std::fs::write(root.join(file), "").unwrap();
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let [one, _] = unpacked(&dir, find, fill).unwrap_or_else(|e| panic!("{}", e.0));
                    assert_eq!(one, dir.join("root/one"));
                });
            }
        });
        assert_eq!(fetched.into_inner(), 1);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_failed_command_is_reported_with_its_error() {
        let why = succeed(quiet("dpkg-deb").args(["-x", "/no-such-file", "/tmp"])).unwrap_err().0;
        assert!(why.starts_with("dpkg-deb /tmp: "), "{why}");
        let why = succeed(&mut quiet("no-such-program")).unwrap_err().0;
        assert!(why.starts_with("no-such-program"), "{why}");
    }

    #[test]
    fn the_archive_is_that_of_the_release() {
        let release = codename_in("ID=debian\nVERSION_CODENAME=bookworm\n");
        let lines = "http://a/ bookworm-updates\nhttp://b/ bookworm\nhttp://c/ bookworm\n";
        assert_eq!(archive(lines, &release).as_deref(), Some("http://b/"));
        assert_eq!(archive(lines, "trixie"), None);
        assert_eq!(codename_in("ID=other\n"), "");
    }
}
