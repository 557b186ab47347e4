//! Real processes on nodes of their own, joined by wires: the ports `afpacket`, `xdp` and `udp`;
//! and `memif`, between processes of one machine.
//!
//! Every test of a wire makes its nodes (`barewire_tests::nodes`) and lets them go; nothing of this
//! machine's own network is touched.

#[path = "../e2e/members.rs"]
mod members;
#[path = "../e2e/rounds.rs"]
mod rounds;
// The suite `e2e` uses the rest of it.
#[allow(dead_code)]
#[path = "../e2e/supervisor.rs"]
mod supervisor;
#[path = "../e2e/worker.rs"]
mod worker;

mod caller;
mod capture;
mod ecmp;
mod ecn;
mod environment;
mod foreign;
mod hosts;
mod ip;
mod ip6;
mod keys;
mod lengths;
mod links;
mod memif;
mod memif_cases;
mod messages;
mod mixed;
mod multicast;
mod near;
mod one_sided;
mod paths;
mod qdisc;
mod queues;
mod raw;
mod segments;
mod shared;
mod soak;
mod stations;
mod stream;
mod switch;
mod upgrade;
mod users;
mod vlan;
mod xdp;

use std::process::Command;

use barewire_tests::nodes::Nodes;
use supervisor::Worker;

/// Not a test but the other process; passes at once when nobody asked for it.
#[test]
fn worker_process() {
    if let Some(role) = std::env::var_os(supervisor::ROLE) {
        match &*role.to_string_lossy() {
            "caller" => caller::run(),
            "sender" => caller::send_on(stream::T_DEAD),
            "patient-sender" => caller::send_on(stream::PATIENT),
            "member" => members::run(),
            "switch" => members::run_switch(),
            "listener" => multicast::run(),
            "noise" => foreign::make_noise(),
            "datagrams" => foreign::send_datagrams(),
            "opener" => environment::try_open(),
            "soak" => soak::process::run(),
            "soak-flood" => soak::flood::run(),
            "powerless" => {
                environment::without_power();
                environment::try_open();
            }
            role => worker::run(role),
        }
        // Without the summary of a test run.
        std::process::exit(0);
    }
}

/// So many kills; by night 200.
fn kills(by_day: u32) -> u32 {
    if std::env::var_os("BAREWIRE_NIGHTLY").is_some() { 200 } else { by_day }
}

/// This program in a node.
fn this_in(nodes: &Nodes, node: usize) -> Command {
    nodes.command(node, std::env::current_exe().unwrap())
}

/// Starts a worker in a node.
fn start(nodes: &Nodes, node: usize, role: &str, port: &str) -> Worker {
    Worker::start_by(this_in(nodes, node), &format!("{role} in node {node}"), role, port)
}
