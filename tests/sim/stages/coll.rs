//! Collectives: every kind on every group, with and without loss; deaths at every step; groups that
//! overlap; members that disagree.

use std::time::Instant;

use barewire_dataplane::node::{CollKind, JoinModel};

use super::{for_seeds, nightly};
use crate::coll::{Call, Gang, Team, plan};
use crate::ledger::Violation;

/// Orders that a set of `n` members can have among as many hosts as it takes.
fn orders(n: usize) -> [(&'static str, Vec<usize>); 4] {
    [
        ("natural", (0..n).collect()),
        ("reversed", (0..n).rev().collect()),
        ("strided", (0..n).map(|i| 2 * i).collect()),
        ("with holes", (0..n).map(|i| i + i / 2 + usize::from(i > n / 2)).collect()),
    ]
}

/// A team for the hosts of `ranks`, one group of them, with the manner of its making drawn.
fn gang_of(ranks: &[usize], seed: u64, loss: f64) -> Result<(Team, Gang), Violation> {
    let hosts = ranks.iter().max().map_or(1, |&h| h + 1).max(2);
    let mut p = plan(seed, hosts, loss == 0.0);
    if loss > 0.0 {
        (p.link.loss, p.link.jitter_ns) = (loss, 20_000.0);
        p.node.t_dead_ns = 2_000_000_000;
    }
    let mut team = Team::new(p);
    let model = if seed & 1 == 0 { JoinModel::Collective } else { JoinModel::Key(seed) };
    let gang = team.join(ranks, model)?;
    Ok((team, gang))
}

/// One group and all kinds of calls on it.
fn matrix(ranks: &[usize], counts: &[usize], seed: u64, loss: f64) -> Result<u64, Violation> {
    let (mut team, gang) = gang_of(ranks, seed, loss)?;
    let n = ranks.len();
    let mut calls = 0;
    for kind in CollKind::ALL {
        let mut roots = if kind.has_root() { vec![0, n / 2, n - 1] } else { vec![0] };
        roots.dedup();
        let counts = if kind == CollKind::Barrier { &[0][..] } else { counts };
        for &root in &roots {
            for &count in counts {
                calls += 1;
                let call = Call::of(kind, root, count, seed << 8 | calls);
                team.call(&gang, &call)?;
                if matches!(kind, CollKind::Allreduce) {
                    team.call(&gang, &Call { in_place: true, ..call })?;
                }
            }
        }
    }
    Ok(calls)
}

fn run_matrix(stage: &str, sizes: &[usize], loss: f64) {
    let start = Instant::now();
    let sum = for_seeds(stage, 4 * sizes.len() as u64, |seed, sum| {
        let n = sizes[seed as usize / 4];
        let (order, ranks) = &orders(n)[seed as usize % 4];
        if n > 17 && *order != "reversed" {
            return Ok(());
        }
        let mut counts = vec![0, 1, n - 1, n, n + 1, 1000];
        if n > 17 {
            counts = vec![1, n + 1];
        } else if loss > 0.0 {
            counts = vec![0, 1, n + 1, 1000];
        }
        counts.dedup();
        sum.ops += matrix(ranks, &counts, seed, loss).map_err(|e| format!("{order}: {e}"))?;
        sum.runs += 1;
        Ok(())
    });
    println!(
        "{stage}: groups {} calls {} time {:.1} s",
        sum.runs,
        sum.ops,
        start.elapsed().as_secs_f64()
    );
}

/// Goal: every collective gives every member what the definition says and touches nothing else, for
/// any number, order and root (CO2..CO10, CR2..CR6, CR12; B.7.1 rows 1 to 3).
#[test]
fn collectives_are_right_without_loss() {
    let sizes: Vec<usize> = (1..=17).chain([32, 64]).collect();
    run_matrix("collectives_are_right_without_loss", &sizes, 0.0);
}

/// The same where one frame in twenty is lost and the others overtake each other.
#[test]
fn collectives_are_right_under_loss_and_reorder() {
    let sizes: Vec<usize> = if nightly() {
        (1..=17).chain([32, 64]).collect()
    } else {
        vec![2, 3, 4, 5, 8, 13, 17, 32]
    };
    run_matrix("collectives_are_right_under_loss_and_reorder", &sizes, 0.05);
}
