//! Messages over devices of DPDK: those that need no hardware, between ports of one process and
//! between processes.
//!
//! The other process is this program again, as in the suite `e2e`, whose parts are used here.

#[path = "../wires/caller.rs"]
mod caller;
#[path = "../wires/lengths.rs"]
mod lengths;
#[path = "../e2e/rounds.rs"]
mod rounds;
#[allow(dead_code)]
#[path = "../e2e/supervisor.rs"]
mod supervisor;
#[path = "../e2e/worker.rs"]
mod worker;

mod memif;
mod nodes;
mod ring;

/// Not a test but the other process; passes at once when nobody asked for it.
#[test]
fn worker_process() {
    if let Some(role) = std::env::var_os(supervisor::ROLE) {
        match &*role.to_string_lossy() {
            "caller" => caller::run(),
            "sender" => caller::send_on(),
            role => worker::run(role),
        }
        // Without the summary of a test run.
        std::process::exit(0);
    }
}
