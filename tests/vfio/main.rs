//! Real NICs through VFIO, inside the virtual machine of `cargo xtask test vfio`.
//!
//! `machine` says what the guest is: `NIC0`, `NIC1` ... are the PCI addresses of its NICs. Outside
//! of a guest every test reports itself as skipped.
//!
//! - `frames`: what a port promises, frame by frame, both NICs in one process.
//! - `msg`, `matching`, `rma`: the clauses of fi_msg, fi_tagged, fi_rma and fi_atomic from the
//!   conformance suite, over both NICs.
//! - `processes`: two processes, one NIC each: messages, a bad link, kill -9.
//! - `switch`: several processes behind each NIC.
//! - `wire`: two guests on a cable that loses frames, and one that is stopped.
//! - `cable`: a cable that is pulled while messages go over it; `said`, what ports say of it.
//! - `kernel`: the kernel's own driver at the other end.
//! - `xdp`: the port `xdp` on cards that the kernel keeps; with it the clauses of `msg`.
//! - `functions`: virtual functions of a card whose physical one the kernel drives.
//! - `testpmd`: DPDK's drivers at the other end.
//! - `planted`: a mistake that only the IOMMU notices, and the suite by it.
//! - `refusals`, `trouble`, `setup`: what an operator gets wrong, what happens to a NIC while it is
//!   used, and the script that prepares a machine.

#[path = "../conformance/harness.rs"]
#[allow(dead_code, reason = "not all of it is needed here")]
mod harness;
#[path = "../conformance/matching.rs"]
mod matching;
#[path = "../conformance/msg.rs"]
mod msg;
#[path = "../conformance/rma.rs"]
#[allow(dead_code, unreachable_pub, reason = "others use more of it")]
mod rma;

#[path = "../e2e/members.rs"]
mod members;
#[path = "../e2e/supervisor.rs"]
#[allow(dead_code, reason = "not all of it is needed here")]
mod supervisor;
#[path = "../e2e/worker.rs"]
#[allow(dead_code, reason = "not all of it is needed here")]
mod worker;

mod cable;
mod frames;
mod functions;
mod kernel;
mod machine;
mod planted;
mod processes;
mod refusals;
mod said;
mod setup;
mod switch;
mod testpmd;
mod trouble;
mod wire;
mod xdp;

/// Not a test but the other process; passes at once when nobody asked for it.
#[test]
fn worker_process() {
    if let Some(role) = std::env::var_os(supervisor::ROLE) {
        match &*role.to_string_lossy() {
            "member" => members::run(),
            "switch" => members::run_switch(),
            role => worker::run(role),
        }
        // Without the summary of a test run.
        std::process::exit(0);
    }
}
