//! kill -9 of either process at a random time: the other one sees every operation end once and in
//! time, loses nothing of its own, and works on with whoever comes next.

use crate::rounds::kill_rounds;
use crate::supervisor::{Segment, Worker};

#[test]
fn fifty_kills_over_shared_memory() {
    let segment = Segment::new("kills");
    let start = |_place, name: &str| Worker::start(name, "traffic", &segment.port());
    kill_rounds("kills", start, 50, 1);
}

#[test]
fn kills_over_a_bad_link() {
    let segment = Segment::new("kills-bad");
    let port = format!("fault(loss=0.05,seed=9):{}", segment.port());
    kill_rounds("kills-bad", |_place, name| Worker::start(name, "traffic", &port), 12, 2);
}

/// Goal: no worker outlives its test, passed or failed, whatever it waits for: it would keep its
/// port, and the output of the tests open.
#[test]
fn a_worker_goes_with_its_test() {
    let segment = Segment::new("goes");
    let mut worker = Worker::start("a", "echo", &segment.port());
    // Who never comes.
    worker.say(&format!("PEER {}", worker.addr));
    worker.say("SIZE 8");
    let process = format!("/proc/{}", worker.id());
    assert!(std::fs::exists(&process).unwrap());
    drop(worker);
    assert!(!std::fs::exists(&process).unwrap());
}
