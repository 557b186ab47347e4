//! Several nodes of several ranks each, which share their node's one NIC and its one address space:
//! MPI as users start it, with nothing but the port's name. Nodes are network namespaces.

use std::process::Command;

use barewire_tests::nodes::{FABRIC, or_skip};

use super::alive::Network;
use super::mpi::{OPEN_MPI, mpirun};
use super::{Bench, succeed, with};

/// Runs `program` with so many ranks on each of so many nodes.
fn run(bench: &Bench, nodes: usize, per_node: usize, port: &str, args: &[&str]) -> Option<String> {
    let network = or_skip(Network::new(nodes))?;
    let dir = tempfile::tempdir().unwrap();
    let program = bench.compile(dir.path(), &["mpicc"], "mpi.c");
    let launcher: Command = network.nodes.command(network.switch, "mpirun");
    let ranks = nodes * per_node;
    let mut command = mpirun(bench.using(launcher), ranks as u32);
    // In a user namespace everybody is root.
    command.arg("--allow-run-as-root");
    network.let_launch(&mut command);
    command.env("FI_BAREWIRE_PORT", port);
    command.arg(network.script(dir.path(), per_node)).arg(program).args(args);
    let said = succeed(&mut command, 240);
    assert!(said.contains(&format!("all {ranks} ranks agree")), "{port}: {said}");
    Some(said)
}

/// Goal: two ranks on each of two nodes send, receive from anybody, share windows and do what
/// there is of collectives, over one raw Ethernet interface a node and over UDP.
#[test]
fn open_mpi_runs_two_ranks_on_each_of_two_nodes() {
    with(OPEN_MPI, |bench| {
        for port in [format!("afpacket:{FABRIC}"), "udp:ctl0".to_owned()] {
            run(bench, 2, 2, &port, &[]);
        }
    });
}

/// Short traffic of more ranks and nodes.
#[test]
fn open_mpi_runs_many_ranks_on_several_nodes() {
    with(OPEN_MPI, |bench| {
        let port = format!("afpacket:{FABRIC}");
        run(bench, 2, 4, &port, &["short"]);
        run(bench, 4, 2, &port, &["short"]);
    });
}
