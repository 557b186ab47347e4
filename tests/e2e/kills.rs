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
