//! Barewire's collectives under MPI's: the component of Open MPI 4.1 in `mpi/`, on one node and on
//! hosts that are namespaces.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use barewire_tests::cluster::Cluster;
use barewire_tests::mpi_coll;
use barewire_tests::nodes::{FABRIC, or_skip};

use super::mpi::{OPEN_MPI, bare_mpirun, mpirun};
use super::ranks::{nightly, ran, suite_of_mpi4py, with_each};
use super::{Bench, compile, succeed, with};

/// The component, built once, or why it is not.
pub(super) fn component() -> Result<PathBuf, String> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("openmpi4");
    BUILT.get_or_init(|| mpi_coll::component(root, &dir)).clone()
}

/// Has Open MPI find it, for blocks of up to 1 MiB.
fn take(command: &mut Command, component: &Path) {
    let path = mpi_coll::component_path(component);
    command.args(["--mca", mpi_coll::PATH_SETTING, &path]);
    command.args(["--mca", "coll_barewire_max_bytes", "1048576"]);
}

/// Runs `test` with the component and the program that tries it, or says why not.
fn with_component(test: impl Fn(&Bench, &Path, &Path)) {
    with_component_and("colls.c", test);
}

fn with_component_and(source: &str, test: impl Fn(&Bench, &Path, &Path)) {
    with(OPEN_MPI, |bench| match component() {
        Ok(component) => {
            let dir = tempfile::tempdir().unwrap();
            test(bench, &component, &compile(dir.path(), &["mpicc", "-lpthread"], source));
        }
        Err(why) => println!("SKIPPED: {why}"),
    });
}

pub(super) fn agree(said: &str, ranks: usize) {
    assert!(said.contains(&format!("all {ranks} ranks agree")) && !said.contains("BAD"), "{said}");
}

/// Goal: who waits for a join leaves an error of no join, that the port has gone.
#[test]
fn the_loss_of_the_port_ends_no_join_by_itself() {
    with(OPEN_MPI, |_| {
        let dir = tempfile::tempdir().unwrap();
        let program = compile(dir.path(), &["mpicc", "-lpthread"], "lost.c");
        assert_eq!(succeed(&mut Command::new(program), 60), "ok end\n");
    });
}

/// Goal: every collective, whether it blocks or has a request, with every type and operation that
/// is ours and some that are not, on communicators that come and go, is right, is made by whom it
/// should be, and lets a long message go on. One with a request returns at once, however many there
/// are. The same program without the component shows that what it expects is MPI's.
#[test]
fn mpi_calls_are_made_by_the_component() {
    with_component(|bench, component, program| {
        let without = mpirun(bench.program("mpirun"), 2).arg(program).args(["all", "none"]).spawn();
        assert!(without.unwrap().wait().unwrap().success());
        let sizes: &[u32] = if nightly() { &[2, 3, 4, 5, 7, 8] } else { &[2, 3, 4] };
        for (&ranks, what) in sizes.iter().map(|n| (n, "all")).chain([(&2, "threads")]) {
            let mut command = mpirun(bench.program("mpirun"), ranks);
            take(&mut command, component);
            agree(&succeed(command.arg(program).arg(what), 120), ranks as usize);
        }
    });
}

/// Runs the program of requests in every way, with launchers for so many ranks and a kind of
/// progress.
pub(super) fn requests(program: &Path, launch: impl Fn(u32, &str) -> Command) {
    let dir = tempfile::tempdir().unwrap();
    let all = [(2, "manual", "all"), (3, "manual", "all"), (2, "auto", "all")];
    for (ranks, progress, what) in all.into_iter().chain([(2, "manual", "threads")]) {
        let mut command = launch(ranks, progress);
        command.arg(program).arg(what).arg(dir.path().join(progress));
        if progress == "auto" {
            command.arg("auto");
        }
        agree(&succeed(&mut command, 120), ranks as usize);
    }
}

/// Goal: requests of the component's calls end in every wait and test, among those of Open MPI and
/// in any order, while the program is elsewhere in MPI or computes, and without their communicator.
#[test]
fn requests_are_the_components() {
    with_component_and("requests.c", |bench, component, program| {
        requests(program, |ranks, progress| {
            let mut command = mpirun(bench.program("mpirun"), ranks);
            take(&mut command, component);
            command.env("FI_BAREWIRE_PROGRESS", progress).args(["-x", "FI_BAREWIRE_PROGRESS"]);
            command
        });
    });
}

/// Goal: who has no barewire keeps all from it, and every call is right. Method: two ranks whose
/// messages are Open MPI's own, one of which names a port that there is not.
#[test]
fn a_rank_without_barewire_keeps_all_ranks_from_it() {
    with_component(|bench, component, program| {
        let mut command = bare_mpirun(bench.program("mpirun"), 1);
        take(&mut command, component);
        command.args(["--mca", "pml", "ob1", "--mca", "btl", "self,vader"]);
        command.args(["--mca", "coll_base_verbose", "10"]).arg(program).args(["all", "none"]);
        command.args([":", "-n", "1", "-x", "FI_BAREWIRE_PORT=udp:nowhere0"]);
        let said = succeed(command.arg(program).args(["all", "none"]), 120);
        agree(&said, 2);
        assert!(said.contains("communicator MPI_COMM_WORLD of 2: left to others"), "{said}");
        assert!(!said.contains("a group"), "{said}");
    });
}

/// Goal: the handler of the communicator is told that a member died, and nobody hangs.
#[test]
fn a_dead_rank_is_an_error_of_the_communicator() {
    with_component(|bench, component, program| {
        for what in [&["die"][..], &["die", "request"]] {
            let mut command = mpirun(bench.program("mpirun"), 3);
            take(&mut command, component);
            command.args(["--enable-recovery"]).arg(program).args(what);
            // The launcher fails, since a rank was killed.
            let said = super::text(&super::finish(&mut command, 60));
            assert_eq!(said.matches("got MPI_ERR_OTHER after").count(), 2, "{what:?}: {said}");
        }
    });
}

/// Goal: the same between hosts, where the calls are messages, and by memory where members share
/// it.
#[test]
fn mpi_calls_on_hosts_are_made_by_the_component() {
    let dir = tempfile::tempdir().unwrap();
    let Some(cluster) = or_skip(Cluster::new(2, dir.path())) else { return };
    with_component(|_, component, program| {
        with_each(|mpi, bench| {
            if mpi.name != "debian" {
                return;
            }
            for (per_node, port) in [(1, "udp"), (2, "afpacket")] {
                let mut command = mpi.launch_on(&cluster, bench, per_node);
                take(&mut command, component);
                command.arg(program).arg("all");
                command.env("FI_BAREWIRE_PORT", format!("{port}:{FABRIC}"));
                agree(&succeed(&mut command, 120), 2 * per_node);
            }
        });
    });
}

/// Modules of mpi4py's tests that make collectives or communicators, and that Open MPI 4.1 passes
/// by itself; `test_cco_vec` crashes it.
pub(super) const MODULES: &[&str] = &[
    "test_cco_buf",
    "test_cco_obj",
    "test_cco_nb_buf",
    "test_cco_buf_inter",
    "test_cco_obj_inter",
    "test_comm",
];

#[test]
fn mpi4pys_collectives_pass_with_the_component() {
    let Some(suite) = suite_of_mpi4py() else { return };
    with_component(|_, component, _| {
        with_each(|mpi, bench| {
            if mpi.name != "debian" {
                return;
            }
            let mut command = mpi.launch(bench.program(&mpi.launcher.to_string_lossy()), 3);
            take(&mut command, component);
            ran(mpi, &mut mpi.own_tests(command, &suite, MODULES), 3);
        });
    });
}
