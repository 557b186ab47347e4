//! The component of Open MPI that has barewire's collectives, built for the Open MPI that is here.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Setting of Open MPI with the directories of its components.
pub const PATH_SETTING: &str = "mca_base_component_path";

/// The value of [`PATH_SETTING`] with which Open MPI finds its own components and ours.
pub fn component_path(component: &Path) -> String {
    let dir = component.parent().unwrap_or(component);
    format!("SYS_DEFAULT:{}", dir.display())
}

/// Builds `mpi/coll_barewire.c` of the workspace at `root` and returns where it lies: in `dir`,
/// whole at once.
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
    let mut include = include.split_whitespace().map(Path::new);
    if !include.clone().any(|dir| dir.join("ompi/mca/coll/coll.h").is_file()) {
        return Err(format!("this Open MPI has no headers for components: {mend}"));
    }
    if !Path::new("/usr/include/rdma/fi_collective.h").is_file()
        && !include.any(|dir| dir.join("rdma/fi_collective.h").is_file())
    {
        return Err("no rdma/fi_collective.h: sudo apt-get install libfabric-dev".to_owned());
    }
    std::fs::create_dir_all(dir).map_err(|why| format!("{}: {why}", dir.display()))?;
    let built = dir.join(format!("mca_coll_barewire.so.{}", std::process::id()));
    let mut cc = Command::new("cc");
    // Headers of Open MPI have comparisons of their own.
    cc.args(["-std=gnu11", "-O2", "-Wall", "-fPIC", "-shared", "-Wl,--no-undefined", "-o"]);
    cc.arg(&built).arg(root.join("mpi/coll_barewire.c"));
    for dir in show("incdirs")?.split_whitespace() {
        cc.arg("-isystem").arg(dir);
    }
    cc.args(lib.split_whitespace().map(|dir| format!("-L{dir}")));
    say(cc.args(["-lmpi", "-lopen-pal", "-lfabric"]))?;
    let component = dir.join("mca_coll_barewire.so");
    std::fs::rename(&built, &component).map_err(|why| format!("{}: {why}", built.display()))?;
    Ok(component)
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
