//! Several nodes of several ranks each, which share their node's one NIC and its one address space:
//! MPI as users start it, with nothing but the port's name. Nodes are network namespaces.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use barewire_driver::open::{Serving, open_switch};
use barewire_tests::nodes::{FABRIC, or_skip};

use super::alive::Network;
use super::mpi::{OPEN_MPI, mpirun};
use super::{Bench, succeed, with};

/// Runs `program` with so many ranks on each of so many nodes.
fn run(bench: &Bench, nodes: usize, per_node: usize, port: &str, args: &[&str]) -> Option<String> {
    let network = or_skip(Network::new(nodes))?;
    run_on(&network, bench, [nodes, per_node], port, args)
}

fn run_on(
    network: &Network,
    bench: &Bench,
    [nodes, per_node]: [usize; 2],
    port: &str,
    args: &[&str],
) -> Option<String> {
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

/// Variable with the port of a switch.
const SWITCH: &str = "BAREWIRE_TEST_SWITCH";

/// Not a test but a switch, until it is killed; passes at once when nobody asked for one.
#[test]
fn switch_process() {
    let Ok(port) = std::env::var(SWITCH) else { return };
    let mut switch = open_switch(&port, &Serving::default()).unwrap();
    println!("@@up");
    let mut idle = 0;
    loop {
        idle = if switch.turn().unwrap() > 0 { 0 } else { idle + 1 };
        if idle >= 100 {
            switch.sleep(Duration::from_millis(10));
        }
    }
}

/// Starts the switch of a node; returns when it forwards.
fn switch_on(network: &Network, node: usize, port: &str) -> Child {
    let mut command = network.nodes.command(node, std::env::current_exe().unwrap());
    command.args(["--exact", "hosts::switch_process", "--nocapture"]).env(SWITCH, port);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.into_iter().any(|line| line.contains("@@up")), "no switch on node {node}");
    child
}

/// Goal: where one process owns a node's NIC, MPI runs as it does elsewhere, with the same setting,
/// also while that process is killed and started again.
#[test]
fn open_mpi_runs_behind_switches() {
    with(OPEN_MPI, |bench| {
        let port = format!("afpacket:{FABRIC}");
        let Some(network) = or_skip(Network::new(2)) else { return };
        let start = |node| switch_on(&network, node, &port);
        let mut switches = [0, 1].map(start);
        run_on(&network, bench, [2, 2], &port, &[]);
        let (done, is_done) = std::sync::mpsc::channel();
        let (switches_of, start) = (&mut switches, &start);
        let kills = std::thread::scope(|scope| {
            let killer = scope.spawn(move || {
                let mut kills = 0;
                while is_done.recv_timeout(Duration::from_millis(200)).is_err() {
                    let node = kills % 2;
                    switches_of[node].kill().unwrap();
                    switches_of[node].wait().unwrap();
                    switches_of[node] = start(node);
                    kills += 1;
                }
                // They end with this thread.
                kills
            });
            run_on(&network, bench, [2, 2], &port, &[]);
            done.send(()).unwrap();
            killer.join().unwrap()
        });
        println!("{kills} switches were killed");
        assert!(kills > 0);
        for mut switch in switches {
            switch.kill().unwrap();
            switch.wait().unwrap();
        }
    });
}
