//! Two workers that talk, and one of them killed at a random time, again and again.

use std::time::Duration;

use crate::supervisor::{Rng, Worker};
use crate::worker::T_DEAD;

pub(crate) fn introduce(a: &mut Worker, b: &mut Worker) {
    let (to_a, to_b) = (format!("PEER {}", b.addr), format!("PEER {}", a.addr));
    a.say(&to_a);
    b.say(&to_b);
}

/// Milliseconds of its own time until the last send ended, those in which it was starved, sends
/// completed and failed, messages received.
pub(crate) fn drained(worker: &mut Worker) -> [u64; 5] {
    let answer = worker.answer("DRAINED");
    let numbers: Vec<u64> = answer.split_whitespace().map(|n| n.parse().unwrap()).collect();
    numbers.try_into().unwrap()
}

/// Kills either of two workers `rounds` times. `start` makes the one in place 0 or 1, with a name.
pub(crate) fn kill_rounds(
    test: &str,
    start: impl Fn(usize, &str) -> Worker,
    rounds: u64,
    seed: u64,
) {
    println!("{test}: seed {seed}");
    let mut rng = Rng::new(seed);
    let mut pair = [0, 1].map(|n| start(n, &format!("worker {n}")));
    let (mut longest, mut failed) = (0, 0);
    {
        let [a, b] = &mut pair;
        introduce(a, b);
    }
    for round in 0..rounds {
        std::thread::sleep(Duration::from_millis(1 + rng.below(150)));
        let victim = rng.below(2) as usize;
        let [a, b] = pair;
        let (dead, mut alive) = if victim == 0 { (a, b) } else { (b, a) };
        dead.kill();
        alive.say("KILLED");
        let [ms, starved, _, bad, _] = drained(&mut alive);
        (longest, failed) = (longest.max(ms), bad.max(failed));
        // Silence counts while the survivor's loop runs (rule S10). On a busy machine a stretch of
        // starvation costs its own length, and once more by the probe that it delays.
        let bound = T_DEAD.as_millis() as u64 * 11 / 10;
        assert!(ms <= bound + starved, "round {round}: {ms} ms, not {bound}; {starved} ms starved");
        if rng.below(10) < 3 {
            // Nobody comes back for a while; the survivor has nothing to wait for.
            std::thread::sleep(Duration::from_millis(50));
        }
        let mut fresh = start(victim, &format!("worker of round {round}"));
        introduce(&mut alive, &mut fresh);
        pair = if victim == 0 { [fresh, alive] } else { [alive, fresh] };
    }
    std::thread::sleep(Duration::from_millis(200));
    for worker in &mut pair {
        worker.say("QUIET");
    }
    let counts: Vec<[u64; 5]> = pair.iter_mut().map(drained).collect();
    assert!(counts.iter().all(|c| c[4] > 0), "the last two never talked: {counts:?}");
    for worker in &mut pair {
        worker.say("STOP");
    }
    for mut worker in pair {
        let levels = worker.answer("LEVELS");
        assert!(levels.starts_with("0 "), "{}: something did not come back: {levels}", worker.name);
        worker.finish();
    }
    println!("{test}: {rounds} kills, longest wait {longest} ms, {failed} operations failed");
}
