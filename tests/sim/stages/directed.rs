//! One failure at every place of a small scenario.

use std::time::Instant;

use super::{Sum, for_seeds, nightly};
use crate::ledger::Violation;
use crate::net::{Act, Script};
use crate::plan::{Fault, Plan};
use crate::world::{run, run_with};

/// A few operations between two hosts, all kinds over the seeds.
fn scenario(seed: u64, ops: u64) -> Plan {
    let mut p = Plan::calm(seed, ops);
    p.caller.think_ns = [5e3, 50e3, 300e3][(seed % 3) as usize];
    p.caller.rare = if seed % 4 == 3 { 0.2 } else { 0.0 };
    p.caller.len_max = [600, 6000, 30_000][(seed / 3 % 3) as usize];
    p.caller.any_life = 0.4;
    p.caller.remote = if seed % 3 == 1 { 0.5 } else { 0.0 };
    p.link.lossless = seed % 5 == 4;
    p.node.t_dead_ns = 200_000_000;
    p.node.unexpected_bytes = 64 << 10;
    p.node.cq_size = 64;
    p
}

/// Goal: whatever the moment, a failure ends every operation once and leaks nothing. Method: a
/// crash for good, a crash with restart, a lost session and a one-way cut after every single event.
#[test]
fn crash_at_every_step() {
    let (seeds, ops) = if nightly() { (100, 30) } else { (12, 12) };
    let start = Instant::now();
    let sum = for_seeds("crash_at_every_step", seeds, |seed, sum| {
        sum.merge(&crash_steps(seed, ops)?);
        Ok(())
    });
    sum.print("crash_at_every_step", start);
}

/// One seed of `crash_at_every_step`.
pub(crate) fn crash_steps(seed: u64, ops: u64) -> Result<Sum, Violation> {
    let mut sum = Sum::default();
    let plan = scenario(seed, ops);
    let events = run(&plan)?.busy_events;
    for at in 0..events {
        let host = (seed + at) as usize % 2;
        let peer = 1 - host;
        let kinds = [
            Fault::Crash { host, back_ns: None },
            Fault::Crash { host, back_ns: Some(50_000) },
            Fault::SessionLoss { host, peer },
            Fault::CutOneWay { from: host, to: peer },
        ];
        for fault in kinds {
            if plan.link.lossless && matches!(fault, Fault::CutOneWay { .. }) {
                continue;
            }
            let report = run_with(&plan, None, Some((at, fault)));
            sum.add(&report.map_err(|e| format!("{fault:?} after event {at}: {e}"))?);
        }
    }
    Ok(sum)
}

/// Goal: no single packet matters. Method: each packet of a scenario is dropped, doubled or swapped
/// with its successor, and each bit of each header is flipped.
#[test]
fn drop_dup_swap_each_packet() {
    let (seeds, ops) = if nightly() { (40, 40) } else { (6, 20) };
    let start = Instant::now();
    let sum = for_seeds("drop_dup_swap_each_packet", seeds, |seed, sum| {
        sum.merge(&each_packet(seed, ops)?);
        Ok(())
    });
    sum.print("drop_dup_swap_each_packet", start);
}

/// One seed of `drop_dup_swap_each_packet`.
pub(crate) fn each_packet(seed: u64, ops: u64) -> Result<Sum, Violation> {
    let mut sum = Sum::default();
    let mut plan = scenario(seed, ops);
    plan.link.lossless = false;
    let frames = run(&plan)?.net.frames;
    for frame in 0..frames {
        for act in [Act::Drop, Act::Duplicate, Act::Swap] {
            sum.add(&scripted(&plan, Script { frame, act })?);
        }
        for bit in 0..HEADER_BITS {
            // All bits of the common header, every third of what follows.
            if bit < 144 || bit % 3 == frame as usize % 3 {
                sum.add(&scripted(&plan, Script { frame, act: Act::Flip { bit } })?);
            }
        }
    }
    Ok(sum)
}

/// From the prologue to the end of the longest header.
const HEADER_BITS: usize = (2 + 16 + 56) * 8;

fn scripted(plan: &Plan, script: Script) -> Result<crate::world::Report, Violation> {
    run_with(plan, Some(script), None).map_err(|e| format!("{script:?}: {e}"))
}
