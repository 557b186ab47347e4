//! External programs that tests call, and their installation.

use std::path::Path;
use std::process::{Command, Stdio};

/// A program that a test calls, or a file that it reads, and the Debian package that contains it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tool {
    /// A program in `PATH`, or a file if it starts with `/`.
    pub(crate) program: &'static str,
    pub(crate) package: &'static str,
}

/// Decodes captures of `barewire capture`.
pub(crate) const TSHARK: Tool = Tool { program: "tshark", package: "tshark" };
/// Counts instructions.
pub(crate) const VALGRIND: Tool = Tool { program: "valgrind", package: "valgrind" };
/// Counts system calls.
pub(crate) const STRACE: Tool = Tool { program: "strace", package: "strace" };
/// Compiles the reference of the atomics' arithmetic.
pub(crate) const CC: Tool = Tool { program: "cc", package: "gcc" };
/// The numbers of libfabric's error codes.
pub(crate) const LIBFABRIC: Tool =
    Tool { program: "/usr/include/rdma/fi_errno.h", package: "libfabric-dev" };
/// Creates the links between network namespaces.
pub(crate) const IP: Tool = Tool { program: "ip", package: "iproute2" };
/// Makes the kernel drop frames.
pub(crate) const NFT: Tool = Tool { program: "nft", package: "nftables" };
/// DPDK and its headers.
pub(crate) const DPDK: Tool =
    Tool { program: "/usr/include/dpdk/rte_eal.h", package: "libdpdk-dev" };
/// Parses DPDK's headers for the bindings. (The libclang package has no file with a fixed name.)
pub(crate) const LIBCLANG: Tool =
    Tool { program: "/var/lib/dpkg/info/libclang-dev.list", package: "libclang-dev" };
/// Prints the compiler and linker flags for DPDK.
pub(crate) const PKG_CONFIG: Tool = Tool { program: "pkg-config", package: "pkg-config" };
/// Echoes frames with DPDK's drivers.
pub(crate) const TESTPMD: Tool = Tool { program: "dpdk-testpmd", package: "dpdk-dev" };
/// libfabric's own programs.
pub(crate) const FI_INFO: Tool = Tool { program: "fi_info", package: "libfabric-bin" };
/// An MPI that can use libfabric, and its compiler wrapper.
pub(crate) const MPIRUN: Tool = Tool { program: "mpirun", package: "openmpi-bin" };
/// See [`MPIRUN`].
pub(crate) const MPICC: Tool = Tool { program: "mpicc", package: "libopenmpi-dev" };
/// Creates environments for Python packages.
pub(crate) const VENV: Tool =
    Tool { program: "/var/lib/dpkg/info/python3-venv.list", package: "python3-venv" };
/// Another implementation of the ciphers that seal frames.
pub(crate) const CRYPTOGRAPHY: Tool = Tool {
    program: "/var/lib/dpkg/info/python3-cryptography.list",
    package: "python3-cryptography",
};
/// Verifies signatures of handshakes.
pub(crate) const OPENSSL: Tool = Tool { program: "openssl", package: "openssl" };
/// Finds the library versions that a Debian package needs.
pub(crate) const SHLIBDEPS: Tool = Tool { program: "dpkg-shlibdeps", package: "dpkg-dev" };
/// Makes RPM packages; its package also contains the program that installs them.
pub(crate) const RPMBUILD: Tool = Tool { program: "rpmbuild", package: "rpm" };
/// Reads the symbols of programs.
pub(crate) const BINUTILS: Tool = Tool { program: "objdump", package: "binutils" };
/// Unpacks the modules of a kernel.
pub(crate) const XZ: Tool = Tool { program: "xz", package: "xz-utils" };
/// Lints the shell scripts.
pub(crate) const SHELLCHECK: Tool = Tool { program: "shellcheck", package: "shellcheck" };

/// Installs the missing ones of `tools` if this process is root, or prints what is missing.
///
/// Never fails: a test whose tools are missing is skipped.
pub(crate) fn provide(tools: &[Tool]) {
    let mut missing: Vec<Tool> = Vec::new();
    for tool in tools {
        let is_here = match tool.program.strip_prefix('/') {
            Some(_) => Path::new(tool.program).exists(),
            None => in_path(tool.program),
        };
        if !is_here && !missing.contains(tool) {
            missing.push(*tool);
        }
    }
    if missing.is_empty() {
        return;
    }
    let packages: Vec<&str> = missing.iter().map(|tool| tool.package).collect();
    let list = packages.join(" ");
    let root = nix::unistd::geteuid().is_root();
    if !root || !in_path("apt-get") {
        let how = if root { "apt-get is not here either" } else { "not root" };
        println!("missing: {list} ({how}); tests that need them will be skipped");
        println!("         to install them: sudo apt-get install -y {list}");
        return;
    }
    println!("installing: {list}");
    let installed = apt(&["update", "-qq"])
        && apt(&[&["install", "-y", "-qq", "--no-install-recommends"], &packages[..]].concat());
    if !installed {
        println!("missing: {list} could not be installed; tests that need them will be skipped");
    }
}

/// Installs two MPIs with a newer libfabric for the tests: Python environments in `target/mpi`,
/// with `mpi4py`.
///
/// Never fails: a test whose MPI is missing is skipped.
pub(crate) fn provide_mpi(target: &Path) {
    for name in ["mpich", "openmpi"] {
        let dir = target.join("mpi").join(name);
        // Created at the end of the installation.
        if dir.join("barewire.done").exists() {
            continue;
        }
        println!("installing: {name} and mpi4py in {}", dir.display());
        let ran = |program: &Path, args: &[&str]| {
            let mut command = Command::new(program);
            let output = command.args(args).stdin(Stdio::null()).output();
            output.is_ok_and(|output| output.status.success())
        };
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
        let done = ran(Path::new("python3"), &["-m", "venv", &dir.to_string_lossy()])
            && ran(&dir.join("bin/python"), &[&pip[..], &[name, "mpi4py"]].concat())
            && std::fs::write(dir.join("barewire.done"), "").is_ok();
        if !done {
            println!("missing: {name} could not be installed; tests that need it will be skipped");
        }
    }
    provide_mpi4py(&target.join("mpi"));
}

/// Unpacks the sources of the installed `mpi4py`, which contain its test suite, to
/// `target/mpi/mpi4py`. Never fails, as [`provide_mpi`].
fn provide_mpi4py(mpi: &Path) {
    let (python, to) = (mpi.join("openmpi/bin/python"), mpi.join("mpi4py"));
    if to.join("test/main.py").exists() || !python.exists() {
        return;
    }
    println!("installing: the sources of mpi4py in {}", to.display());
    let ran = |args: &[&str]| {
        let output = Command::new(&python).args(args).stdin(Stdio::null()).output();
        output.ok().filter(|output| output.status.success())
    };
    let fetch = || {
        let version = ran(&["-c", "import mpi4py; print(mpi4py.__version__, end='')"])?;
        let name = format!("mpi4py=={}", String::from_utf8(version.stdout).ok()?);
        let dir = mpi.to_string_lossy();
        let pip = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"];
        ran(&[&pip[..], &["--no-binary", "mpi4py", "--dest", &dir, &name]].concat())?;
        let unpacked = mpi.join(name.replace("==", "-"));
        let archive = mpi.join(name.replace("==", "-") + ".tar.gz");
        ran(&["-m", "tarfile", "-e", &archive.to_string_lossy(), &dir])?;
        std::fs::rename(unpacked, &to).ok()
    };
    if fetch().is_none() {
        println!("missing: the sources of mpi4py; its tests will be skipped");
    }
}

/// Whether an executable of this name is in `PATH`.
pub(crate) fn in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| is_executable(&dir.join(program)))
}

/// Whether `file` is a program or script that may be run.
pub(crate) fn is_executable(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// Runs apt-get non-interactively, and prints its output only if it failed.
fn apt(args: &[&str]) -> bool {
    let output = Command::new("apt-get")
        .args(["-o", "DPkg::Lock::Timeout=60", "-o", "Acquire::Retries=2"])
        .args(args)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .output();
    match output {
        Ok(output) if output.status.success() => true,
        Ok(output) => {
            eprint!("{}", String::from_utf8_lossy(&output.stderr));
            false
        }
        Err(why) => {
            eprintln!("apt-get does not start: {why}");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_by_name() {
        assert!(in_path("sh"));
        assert!(!in_path("no-such-program-of-that-name"));
    }
}
