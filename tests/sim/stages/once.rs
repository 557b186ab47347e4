//! Atomics happen exactly once.

use std::time::Instant;

use super::{for_seeds, nightly};
use crate::ledger::{Violation, ensure};
use crate::plan::{Fault, Plan};
use crate::rng::Rng;
use crate::world::{Report, run};

/// Hosts of two endpoints each that all work on the one word of another host.
const INITIATORS: usize = 4;

/// Goal (AR10): every addition and every swap that matched is executed once, whatever is lost,
/// repeated or reordered, and their old values are the numbers from 0 on, each once, in an order
/// that no caller can contradict. Method: 8 endpoints fetch-and-add one to a word, or swap it for
/// its successor, over links with every fault. In every other run nobody dies, and the word must be
/// the number of successes exactly; in the rest initiators crash and restart and sessions are lost,
/// and it must be between the successes and those with the operations of unknown outcome.
#[test]
fn exactly_once() {
    let seeds = if nightly() { 20_000 } else { 1_000 };
    let start = Instant::now();
    let sum = for_seeds("exactly_once", seeds, |seed, sum| {
        sum.add(&one_word(seed)?);
        Ok(())
    });
    sum.print("exactly_once", start);
}

/// One seed of `exactly_once`.
pub(crate) fn one_word(seed: u64) -> Result<Report, Violation> {
    let mut plan = Plan::swarm(seed, 400);
    plan.hosts = 1 + INITIATORS;
    plan.eps = 2;
    let mtu = plan.link.mtu[0];
    plan.link.mtu = vec![mtu; plan.hosts];
    plan.node.peer_max = 64;
    plan.node.t_dead_ns = 2_000_000_000;
    plan.caller.remote = 1.0;
    plan.caller.one_word = true;
    plan.faults.at.clear();
    // Who is not let in cannot add.
    plan.node.let_all_in();
    let mut r = Rng::new(seed, 7);
    let calm = seed.is_multiple_of(2);
    if !calm {
        for _ in 0..r.range(1, 6) {
            let host = 1 + r.index(INITIATORS);
            let crash = Fault::Crash { host, back_ns: Some(r.exp(2e6)) };
            let lost =
                [Fault::SessionLoss { host, peer: 0 }, Fault::SessionLoss { host: 0, peer: host }];
            let fault = if r.chance(0.5) { crash } else { r.pick(&lost) };
            plan.faults.at.push((r.below(plan.ops), fault));
        }
        plan.faults.at.sort_by_key(|&(k, _)| k);
    }
    let report = run(&plan)?;
    let t = &report.tally;
    let failed = t.remote_failed;
    ensure!(!calm || failed == 0, "{failed} operations failed and nobody died");
    ensure!(!calm || t.remote > 0, "no operation succeeded");
    Ok(report)
}
