//! Real processes over a real segment of shared memory.
//!
//! This program starts itself: with `BAREWIRE_E2E_ROLE` set, the test `worker` becomes a process
//! that obeys lines on its standard input and answers on its standard output (`worker.rs`). The
//! tests are the supervisors.

#[path = "../atomics/cases.rs"]
mod cases;
mod coll;
mod environment;
mod forged;
mod kills;
mod matrix;
mod remote;
mod rounds;
mod short;
mod sizes;
mod supervisor;
mod target;
#[path = "../atomics/values.rs"]
mod values;
mod worker;

/// Not a test but the other process; passes at once when nobody asked for it.
#[test]
fn worker_process() {
    if let Some(role) = std::env::var_os(supervisor::ROLE) {
        let role = role.to_string_lossy();
        if !target::run(&role) && !coll::run(&role) {
            worker::run(&role);
        }
        // Without the summary of a test run.
        std::process::exit(0);
    }
}
