//! What puts barewire's collectives under an MPI, built for the MPI that is here: the component of
//! Open MPI 4.1, and the library for any MPI.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Setting of Open MPI with the directories of its components.
pub const PATH_SETTING: &str = "mca_base_component_path";

/// The sources of the library, in `mpi/` of the workspace.
pub const LIBRARY_SOURCES: &[&str] = &["coll.c", "coll.h", "pmpi.c", "pmpi_calls.h"];

/// Options of the compiler. Each call goes through both files: `-flto` makes them one.
const OPTIONS: &[&str] = &[
    "-std=gnu11",
    "-O2",
    "-flto",
    "-Wall",
    "-fPIC",
    "-fvisibility=hidden",
    "-shared",
    "-Wl,--no-undefined",
];

/// The value of [`PATH_SETTING`] with which Open MPI finds its own components and ours.
pub fn component_path(component: &Path) -> String {
    let dir = component.parent().unwrap_or(component);
    format!("SYS_DEFAULT:{}", dir.display())
}

/// Builds `mpi/ompi4.c` of the workspace at `root` and returns where it lies: in `dir`, whole at
/// once.
///
/// # Errors
/// What is missing, with the command that mends it, or what the compiler says.
pub fn component(root: &Path, dir: &Path) -> Result<PathBuf, String> {
    let mend = "sudo apt-get install libopenmpi-dev";
    let version = show("version").map_err(|why| format!("{why}: {mend}"))?;
    if !version.contains("Open MPI 4.1.") {
        return Err(format!("the component is for Open MPI 4.1, and mpicc is of {version}"));
    }
    let (include, lib) = (show("incdirs")?, show("libdirs")?);
    let include: Vec<_> = include.split_whitespace().map(Path::new).collect();
    if !include.iter().any(|dir| dir.join("ompi/mca/coll/coll.h").is_file()) {
        return Err(format!("this Open MPI has no headers for components: {mend}"));
    }
    let mut more: Vec<String> = lib.split_whitespace().map(|dir| format!("-L{dir}")).collect();
    // Headers of Open MPI have comparisons of their own.
    more.extend(include.iter().map(|dir| format!("-isystem{}", dir.display())));
    more.extend(["-lmpi", "-lopen-pal"].map(str::to_owned));
    compiled("cc", &root.join("mpi"), "ompi4.c", &more, &dir.join("mca_coll_barewire.so"))
}

/// Builds the library, whose sources are in `sources`, for the MPI of the compiler `mpicc`, and
/// returns where it lies: in `dir`, whole at once.
///
/// # Errors
/// As [`component`].
pub fn library(mpicc: &str, sources: &Path, dir: &Path) -> Result<PathBuf, String> {
    compiled(mpicc, sources, "pmpi.c", &[], &dir.join("libbarewire_mpi.so"))
}

/// Compiles `coll.c` and a face of it, which lie in `from`, to `to`.
fn compiled(
    compiler: &str,
    from: &Path,
    face: &str,
    more: &[String],
    to: &Path,
) -> Result<PathBuf, String> {
    let dir = to.parent().unwrap_or(to);
    std::fs::create_dir_all(dir).map_err(|why| format!("{}: {why}", dir.display()))?;
    let built = to.with_extension(format!("so.{}", std::process::id()));
    let mut cc = Command::new(compiler);
    cc.args(OPTIONS).arg("-o").arg(&built).arg(from.join("coll.c")).arg(from.join(face));
    say(cc.args(more)).map_err(|why| match why.contains("rdma/fabric.h: No such file") {
        true => "no rdma/fabric.h: sudo apt-get install libfabric-dev".to_owned(),
        false => why,
    })?;
    std::fs::rename(&built, to).map_err(|why| format!("{}: {why}", built.display()))?;
    Ok(to.to_owned())
}

/// What Open MPI's compiler says of itself.
fn show(what: &str) -> Result<String, String> {
    say(Command::new("mpicc").arg(format!("--showme:{what}")))
}

/// Runs a program and returns what it said on both outputs.
fn say(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().display().to_string();
    let ran = command.output().map_err(|why| format!("{name}: {why}"))?;
    let both = [ran.stdout, ran.stderr].concat();
    let said = String::from_utf8_lossy(&both).trim().to_owned();
    if ran.status.success() { Ok(said) } else { Err(format!("{name}: {said}")) }
}
