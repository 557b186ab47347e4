//! Nodes of several processes: a segment and a switch each, and a wire between them.

use std::sync::Mutex;
use std::time::Instant;

use super::{Sum, for_seeds, nightly};
use crate::ledger::{Violation, ensure};
use crate::plan::{Fault, Plan};
use crate::world::{Report, run, run_with};

/// Goal: no rule of the ledger broken by what nodes of several processes do besides: switches end
/// and the next ones start, processes are killed and come back, and leave their segment. Method:
/// the driver's own switches between the hosts and the wire; every seed draws the rest as
/// `sim_quick` does. One seed in fifty runs twice and must do the same.
#[test]
fn nodes() {
    let (seeds, ops) = if nightly() { (5_000, 3_000) } else { (120, 500) };
    let start = Instant::now();
    let switched = Mutex::new([0; 4]);
    let sum = for_seeds("nodes", seeds, |seed, sum| {
        let report = one(seed, ops)?;
        if seed.is_multiple_of(50) {
            let again = one(seed, ops)?;
            ensure!(again.trace == report.trace, "the same seed ran differently the second time");
        }
        let mut all = switched.lock().expect("no panic inside");
        all.iter_mut().zip(report.switched).for_each(|(all, n)| *all += n);
        sum.add(&report);
        Ok(())
    });
    sum.print("nodes", start);
    let [to_nic, from_nic, between, dropped] = switched.into_inner().expect("no panic inside");
    println!(
        "nodes: switched to_nic {to_nic} from_nic {from_nic} between {between} dropped {dropped}"
    );
    // Frames without IP cannot be marked, and a switch carries no others.
    let never = sum.never();
    assert!(
        sum.runs < 100 || never == ["matched", "early", "marked"],
        "what never happened: {never:?}"
    );
    assert!(sum.runs < 100 || [to_nic, from_nic, between, dropped].iter().all(|&n| n > 0));
}

/// Goal: whatever the moment, a failure between nodes ends every operation once and leaks nothing.
/// Method: a small scenario between two nodes of two processes each, over and over; after another
/// event every time a process is killed and comes back, or leaves its segment, or a switch ends and
/// the next one starts, soon or late.
#[test]
fn nodes_at_every_step() {
    let (seeds, ops, steps) = if nightly() { (60, 30, 2_000) } else { (6, 12, 40) };
    let start = Instant::now();
    let sum = for_seeds("nodes_at_every_step", seeds, |seed, sum| {
        sum.merge(&at_steps(seed, ops, steps)?);
        Ok(())
    });
    sum.print("nodes_at_every_step", start);
}

/// One seed of `nodes_at_every_step`: `steps` of its events, equally far apart.
fn at_steps(seed: u64, ops: u64, steps: u64) -> Result<Sum, Violation> {
    let mut sum = Sum::default();
    let mut plan = Plan::calm_nodes(seed, ops);
    plan.caller.remote = if seed % 2 == 1 { 0.5 } else { 0.0 };
    plan.caller.len_max = [600, 6000, 30_000][(seed / 2 % 3) as usize];
    plan.caller.any_life = 0.4;
    plan.node.t_dead_ns = 200_000_000;
    let events = run(&plan)?.busy_events;
    for step in 0..steps.min(events) {
        let at = (events * step + seed * events / 7) / steps.min(events) % events;
        let (host, node) = ((seed + step) as usize % plan.hosts, (seed + step) as usize % 2);
        let kinds = [
            Fault::Crash { host, back_ns: None },
            Fault::Crash { host, back_ns: Some(50_000) },
            Fault::Leave { host },
            Fault::SwitchEnd { node, back_ns: 50_000 },
            Fault::SwitchEnd { node, back_ns: 2 * plan.node.t_dead_ns },
        ];
        for fault in kinds {
            let report = run_with(&plan, None, Some((at, fault)));
            sum.add(&report.map_err(|e| format!("{fault:?} after event {at}: {e}"))?);
        }
    }
    Ok(sum)
}

/// One seed of `nodes`.
pub(crate) fn one(seed: u64, ops: u64) -> Result<Report, Violation> {
    run(&Plan::nodes(seed, ops))
}
