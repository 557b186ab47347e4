//! Messages over devices of DPDK: those that need no hardware, between ports of one process and
//! between processes.
//!
//! The other process is this program again, as in the suite `e2e`, whose parts are used here.

#[path = "../wires/caller.rs"]
mod caller;
#[path = "../wires/lengths.rs"]
mod lengths;
#[path = "../wires/memif_cases.rs"]
mod memif_cases;
#[path = "../wires/one_sided.rs"]
mod one_sided;
#[path = "../e2e/rounds.rs"]
mod rounds;
// The suite `wires` uses the rest of these.
#[allow(dead_code)]
#[path = "../wires/stream.rs"]
mod stream;
#[allow(dead_code)]
#[path = "../e2e/supervisor.rs"]
mod supervisor;
#[path = "../e2e/worker.rs"]
mod worker;

mod memif;
mod nic;
mod nodes;
mod ring;

use barewire_tests::nodes::Nodes;
use supervisor::Worker;

/// Starts a worker in a node.
fn start(nodes: &Nodes, node: usize, role: &str, port: &str) -> Worker {
    let this = nodes.command(node, std::env::current_exe().unwrap());
    Worker::start_by(this, &format!("{role} in node {node}"), role, port)
}

/// Not a test but the other process; passes at once when nobody asked for it.
#[test]
fn worker_process() {
    if let Some(role) = std::env::var_os(supervisor::ROLE) {
        match &*role.to_string_lossy() {
            "caller" => caller::run(),
            "sender" => caller::send_on(stream::T_DEAD),
            role => worker::run(role),
        }
        // Without the summary of a test run.
        std::process::exit(0);
    }
}
