//! `cargo xtask mpi`: the command line that brings an MPI program onto barewire, said and run.

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use crate::packages::in_path;
use crate::{cargo, root, target_dir};

/// What to run, and under which MPI.
#[derive(clap::Args)]
#[command(after_help = "\
Prints the command line before it runs it: copied to a shell, it does the same without cargo.
PROGRAM has to be compiled with the mpicc that belongs to the launcher in PATH.

Examples:
  cargo xtask mpi -n 4 -- ./program --its-option
  cargo xtask mpi --print -- ./program
  PATH=\"$HOME/venv/bin:$PATH\" cargo xtask mpi --mpi mpich5 -- python3 script.py")]
pub(crate) struct MpiArgs {
    /// Which MPI launches: Open MPI 4 or 5, or MPICH 5.
    #[arg(long, value_enum, default_value_t = Mpi::Openmpi)]
    mpi: Mpi,
    /// Ranks.
    #[arg(short, default_value_t = 2)]
    n: u32,
    /// The port, such as shm:job7.
    #[arg(long, default_value = "shm")]
    port: String,
    /// Only prints the command line.
    #[arg(long)]
    print: bool,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    program: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Mpi {
    Openmpi,
    Mpich5,
}

/// Builds the provider and runs the program over it; the exit code is the launcher's.
///
/// # Errors
/// The provider does not build, or there is no such launcher.
pub(crate) fn run(args: &MpiArgs) -> Result<ExitCode, String> {
    let library = target_dir().join("release");
    let line = line(args, &library, nix::unistd::geteuid().is_root());
    println!("{}", line.shell());
    if args.print {
        return Ok(ExitCode::SUCCESS);
    }
    if !in_path(&line.words[0]) {
        return Err(match args.mpi {
            Mpi::Openmpi => "no mpirun: sudo apt-get install openmpi-bin libopenmpi-dev".to_owned(),
            Mpi::Mpich5 => "no mpiexec: python3 -m venv DIR && DIR/bin/pip install mpich, then \
                            PATH=DIR/bin:$PATH"
                .to_owned(),
        });
    }
    let built = Command::new(cargo())
        .args(["build", "--release", "--quiet", "--package", "barewire-provider"])
        .current_dir(root())
        .stdin(Stdio::null())
        .status()
        .map_err(|why| format!("cargo does not start: {why}"))?;
    if !built.success() {
        return Err("the provider does not build".to_owned());
    }
    let mut command = Command::new(&line.words[0]);
    command.args(&line.words[1..]).envs(line.env);
    let status = command.status().map_err(|why| format!("{}: {why}", line.words[0]))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Ok(ExitCode::from(code))
}

/// An environment and a command.
struct Line {
    env: Vec<(String, String)>,
    words: Vec<String>,
}

impl Line {
    /// As a shell reads it.
    fn shell(&self) -> String {
        let env = self.env.iter().map(|(name, value)| format!("{name}={}", quoted(value)));
        env.chain(self.words.iter().map(|word| quoted(word))).collect::<Vec<_>>().join(" ")
    }
}

/// A word in quotes if a shell would see more in it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

fn line(args: &MpiArgs, library: &Path, root: bool) -> Line {
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let mut env = vec![
        pair("FI_PROVIDER", "barewire"),
        pair("FI_PROVIDER_PATH", &library.display().to_string()),
        pair("FI_BAREWIRE_PORT", &args.port),
    ];
    let mut words: Vec<String> = Vec::new();
    let mut add = |more: &[&str]| words.extend(more.iter().map(|&word| word.to_owned()));
    let ranks = args.n.to_string();
    match args.mpi {
        Mpi::Openmpi => {
            add(&["mpirun", "-n", &ranks, "--oversubscribe"]);
            if root {
                add(&["--allow-run-as-root"]);
            }
            // What matches messages is ours; nothing goes by Open MPI's own shared memory.
            add(&["--mca", "pml", "cm", "--mca", "mtl", "ofi", "--mca", "btl", "self"]);
            add(&["--mca", "mtl_ofi_provider_include", "barewire"]);
            // More ranks than processors must not spin each other out.
            add(&["--mca", "mpi_yield_when_idle", "1"]);
            add(&["-x", "FI_PROVIDER", "-x", "FI_PROVIDER_PATH", "-x", "FI_BAREWIRE_PORT"]);
        }
        Mpi::Mpich5 => {
            env.push(pair("MPIR_CVAR_CH4_NETMOD", "ofi"));
            env.push(pair("MPIR_CVAR_NOLOCAL", "1"));
            add(&["mpiexec", "-n", &ranks]);
        }
    }
    words.extend(args.program.iter().cloned());
    Line { env, words }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(mpi: Mpi) -> MpiArgs {
        let program = vec!["./a b".to_owned(), "it's".to_owned()];
        MpiArgs { mpi, n: 3, port: "shm:job7".to_owned(), print: true, program }
    }

    #[test]
    fn a_command_line_can_be_copied() {
        let said = line(&args(Mpi::Openmpi), Path::new("/x"), false).shell();
        let start =
            "FI_PROVIDER=barewire FI_PROVIDER_PATH=/x FI_BAREWIRE_PORT=shm:job7 mpirun -n 3";
        assert!(said.starts_with(start), "{said}");
        assert!(said.ends_with(r"'./a b' 'it'\''s'"), "{said}");
        assert!(!said.contains("root"), "{said}");
        let said = line(&args(Mpi::Mpich5), Path::new("/x"), true).shell();
        assert!(
            said.contains("MPIR_CVAR_CH4_NETMOD=ofi MPIR_CVAR_NOLOCAL=1 mpiexec -n 3"),
            "{said}"
        );
    }
}
