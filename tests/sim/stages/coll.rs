//! Collectives: every kind on every group, with and without loss; deaths at every step; groups that
//! overlap; members that disagree.

use std::time::Instant;

use barewire_dataplane::error::Error;
use barewire_dataplane::node::{CollKind, JoinModel};
use barewire_driver::board::LONG_MAX;
use barewire_driver::mem::atomic::{AtomicOp, Datatype, reduces};

use super::{for_seeds, nightly};
use crate::coll::{Call, Gang, Pending, Team, check, intact, plan};
use crate::ledger::{Checked, Violation, ensure};
use crate::net::Event;
use crate::plan::LinkPlan;

/// Orders that a set of `n` members can have among as many hosts as it takes.
fn orders(n: usize) -> [(&'static str, Vec<usize>); 4] {
    [
        ("natural", (0..n).collect()),
        ("reversed", (0..n).rev().collect()),
        ("strided", (0..n).map(|i| 2 * i).collect()),
        ("with holes", (0..n).map(|i| i + i / 2 + usize::from(i > n / 2)).collect()),
    ]
}

/// A team for the hosts of `ranks`, which share memory if they have `boards`, and one group of
/// them, with the manner of its making drawn.
fn gang_of(ranks: &[usize], seed: u64, loss: f64, boards: bool) -> Result<(Team, Gang), Violation> {
    let hosts = ranks.iter().max().map_or(1, |&h| h + 1).max(2);
    let mut p = plan(seed, hosts, loss == 0.0);
    if loss > 0.0 {
        (p.link.loss, p.link.jitter_ns) = (loss, 20_000.0);
        p.node.t_dead_ns = 2_000_000_000;
    }
    p.link.boards = boards;
    let mut team = Team::new(p);
    let model =
        if seed & 1 == 0 || boards { JoinModel::Collective(0) } else { JoinModel::Key(seed) };
    let gang = team.join(ranks, model)?;
    Ok((team, gang))
}

/// One group and all kinds of calls on it.
fn matrix(
    ranks: &[usize],
    counts: &[usize],
    (seed, loss, boards): (u64, f64, bool),
) -> Result<u64, Violation> {
    let (mut team, gang) = gang_of(ranks, seed, loss, boards)?;
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
    let shared = team.rig.at(ranks[0]).node.counters().colls_shared;
    ensure!((shared > 0) == (boards && n > 1), "{shared} calls through memory");
    Ok(calls)
}

/// One seed of the collectives of a small group.
#[cfg(feature = "plant")]
pub(crate) fn one(seed: u64) -> Checked {
    let boards = seed % 2 == 1;
    let counts: &[usize] = if boards { &[1, 8, 40_000] } else { &[1, 8, 1000] };
    matrix(&[0, 1, 2], counts, (seed, 0.0, boards)).map(|_| ())
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
        } else if n > 8 && *order != "natural" {
            counts = vec![0, 1, n + 1];
        }
        counts.dedup();
        for boards in [false, true] {
            let calls = matrix(ranks, &counts, (seed, loss, boards));
            sum.ops += calls.map_err(|e| format!("{order}, boards {boards}: {e}"))?;
            sum.runs += 1;
        }
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
/// any number, order and root (CO2 to CO10, CR2 to CR6, CR12; B.7.1).
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

/// A million elements, in frames of any length the segment takes, and through memory.
#[test]
fn long_vectors_are_right() {
    for (seed, boards) in [(2, false), (3, false), (4, true)] {
        let mut p = plan(seed, 4, true);
        p.link.mtu = vec![65_535; 4];
        p.link.boards = boards;
        p.node.pull_window = 1 << 20;
        let mut team = Team::new(p);
        let model = if boards { JoinModel::Collective(0) } else { JoinModel::Key(1) };
        let gang = team.join(&[3, 1, 0, 2], model).unwrap();
        let ty = Some(Datatype::Uint8);
        for kind in [CollKind::Broadcast, CollKind::Allreduce, CollKind::Allgather] {
            team.call(&gang, &Call { ty, ..Call::of(kind, 2, 1_000_000, seed) }).unwrap();
        }
        for kind in [CollKind::Reduce, CollKind::ReduceScatter, CollKind::Alltoall] {
            team.call(&gang, &Call { ty, ..Call::of(kind, 3, 60_001, seed) }).unwrap();
        }
    }
}

/// Goal: calls through memory that take several rounds are right, of lengths around a slice and
/// around a member's share of it, for all kinds, roots and numbers of members, also in place.
#[test]
fn calls_of_several_rounds_are_right() {
    for (seed, n) in (1..).zip([2, 3, 4, 7]) {
        let ranks: Vec<usize> = (0..n).rev().collect();
        let (mut team, gang) = gang_of(&ranks, seed, 0.0, true).unwrap();
        for kind in CollKind::ALL.into_iter().filter(|&kind| kind != CollKind::Barrier) {
            let many =
                matches!(kind, CollKind::Alltoall | CollKind::ReduceScatter | CollKind::Scatter);
            let slice = if many { LONG_MAX / n } else { LONG_MAX } / 64 * 8;
            let counts = [slice - 1, slice, slice + 1, 3 * slice - 9, 8 << 7, (8 << 7) + n];
            for (i, &count) in counts.iter().enumerate() {
                let call = Call::of(kind, (seed as usize + i) % n, count, seed << 8 | i as u64);
                team.call(&gang, &call).unwrap();
                if matches!(kind, CollKind::Allreduce | CollKind::Reduce) {
                    team.call(&gang, &Call { in_place: true, ..call }).unwrap();
                }
            }
        }
        let shared = team.rig.at(0).node.counters().colls_shared;
        assert_eq!(shared > 40, n > 2, "{shared} calls of {n} through memory");
    }
}

/// Goal: results of long vectors are right among members of several nodes, in whatever order they
/// are; and where each node has as many, in a row or by turns, no more of a vector crosses the
/// links than has to.
#[test]
fn a_long_vector_crosses_a_link_once() {
    const COUNT: usize = 16_000;
    for (seed, (nodes, hosts)) in (1..).zip([(2, 4), (2, 6), (3, 6), (4, 16), (2, 5)]) {
        let by_turns: Vec<usize> = (0..hosts).collect();
        let mut in_a_row = by_turns.clone();
        in_a_row.sort_by_key(|host| host % nodes);
        let mut mixed = by_turns.clone();
        mixed.swap(0, 1);
        for (order, ranks) in [(true, by_turns), (true, in_a_row), (false, mixed)] {
            for loss in [0.0, 0.02] {
                let mut p = plan(seed, hosts, false);
                (p.link.nodes, p.link.near_mtu, p.link.loss) = (Some(nodes), 65_536, loss);
                p.node.crc = None;
                p.node.t_dead_ns = 2_000_000_000;
                let mut team = Team::new(p);
                let gang = team.join(&ranks, JoinModel::Collective(0)).unwrap();
                let call = Call::of(CollKind::Allreduce, 0, COUNT, seed);
                // The first opens the sessions.
                team.call(&gang, &Call { count: 1, ..call }).unwrap();
                let before = team.rig.net.stats.far_bytes;
                team.call(&gang, &call).unwrap();
                let crossed = (team.rig.net.stats.far_bytes - before) as f64;
                let least = (2 * (nodes - 1) * COUNT * 8) as f64;
                let once = order && hosts.is_multiple_of(nodes);
                let is_once = crossed / least < 1.2 + 2.0 * loss;
                assert_eq!(is_once, once, "{nodes} of {hosts}, {ranks:?}: {}", crossed / least);
                let ty = Some(Datatype::Double);
                for in_place in [false, true] {
                    team.call(&gang, &Call { ty, in_place, ..call }).unwrap();
                }
            }
        }
    }
}

/// Goal: members whose ports say different things of their links and kernels choose alike, also if
/// some of them reach each other through memory. Method: lengths around those from which another
/// algorithm costs less by one of the ports.
#[test]
fn members_with_different_ports_choose_alike() {
    for (seed, n) in (1..).zip([2, 5, 8]) {
        for (nodes, near_mtu) in [(None, 0), (Some(1), 65_536), (Some(2), 65_536)] {
            for model in [JoinModel::Collective(0), JoinModel::Key(7)] {
                let mut p = plan(seed, n, false);
                (p.link.nodes, p.link.near_mtu) = (nodes, near_mtu);
                p.link.ports_differ = true;
                p.node.crc = None;
                let mut team = Team::new(p);
                let ranks: Vec<usize> = (0..n).collect();
                let gang = team.join(&ranks, model).unwrap();
                for kind in CollKind::ALL {
                    let counts: &[usize] = if kind == CollKind::Barrier { &[0] } else { &COUNTS };
                    for &count in counts {
                        let call = Call::of(kind, n - 1, count, seed << 8 | count as u64);
                        let done = team.call(&gang, &call);
                        assert!(done.is_ok(), "{n} on {nodes:?} by {model:?}: {call:?}: {done:?}");
                    }
                }
            }
        }
    }
}

/// Elements of 8 bytes.
const COUNTS: [usize; 3] = [1, 400, 3000];

/// A crash at one step of one call.
struct Crash {
    n: usize,
    call: Call,
    seed: u64,
    victim: usize,
    /// Events after the calls, before which it happens; `None` if the victim does not even call.
    at: Option<usize>,
}

const T_DEAD_NS: u64 = 200_000_000;

/// A fresh group whose members, save those of `absent`, have called.
fn called(
    (n, call, seed): (usize, &Call, u64),
    absent: Option<usize>,
) -> Result<(Team, Gang, Vec<Pending>), Violation> {
    let mut p = plan(seed, n, seed.is_multiple_of(3));
    p.node.t_dead_ns = T_DEAD_NS;
    // Every other seed has memory that the members share.
    p.link.boards = seed.is_multiple_of(2);
    let mut team = Team::new(p);
    let ranks: Vec<usize> = (0..n).collect();
    let gang = team.join(&ranks, JoinModel::Collective(0))?;
    let mut all = Vec::new();
    for rank in ranks.into_iter().filter(|&rank| Some(rank) != absent) {
        all.push(team.post(&gang, rank, call).map_err(|e| format!("refused with {e}"))?);
    }
    Ok((team, gang, all))
}

/// All that can be told apart of crashes in a call: each member before it calls, after it has, and
/// after each of its turns before the last call ends. In between a process does nothing that
/// anybody could see, so that a crash there is one of these.
fn crashes(n: usize, call: &Call, seed: u64) -> Result<Vec<(usize, Option<usize>)>, Violation> {
    let (mut team, _, mut all) = called((n, call, seed), None)?;
    let mut found: Vec<_> = (0..n).flat_map(|victim| [(victim, None), (victim, Some(0))]).collect();
    for event in 1.. {
        if all.iter().all(|p| p.outcome.is_some()) {
            break;
        }
        let (went, polled) = team.rig.step(u64::MAX);
        ensure!(went, "nothing happens any more");
        if let Some(host) = polled {
            team.reap(host, &mut all)?;
            found.push((host, Some(event)));
        }
    }
    Ok(found)
}

/// Runs a call of a fresh group up to the crash and on to the end.
fn crash_once(c: &Crash) -> Checked {
    let absent = c.at.is_none().then_some(c.victim);
    let (mut team, gang, mut all) = called((c.n, &c.call, c.seed), absent)?;
    for _ in 0..c.at.unwrap_or(0) {
        let (went, polled) = team.rig.step(u64::MAX);
        ensure!(went, "nothing happens any more");
        if let Some(host) = polled {
            team.reap(host, &mut all)?;
        }
    }
    team.rig.kill(c.victim);
    let (killed, now) = (c.victim, team.rig.net.now);
    // T_dead, a tenth of it, and some retransmission timeouts for the word to get around.
    team.run(&mut all, now + T_DEAD_NS / 10 * 11 + 100_000_000)?;
    for p in all.iter().filter(|p| p.host != killed) {
        intact(p)?;
        match &p.outcome {
            Some(Ok(())) => check(p, c.n)?,
            Some(Err(e)) => {
                let known = [Error::HostUnreach, Error::ConnReset];
                ensure!(known.contains(&e.err), "an odd reason: {:?}", e.err);
            }
            None => return Err(format!("no outcome at {}", p.host)),
        }
    }
    after_crash(&mut team, &gang, killed, &mut all)
}

/// Whoever calls again gets one error, at once or later; everything can be closed, and nothing is
/// left behind.
fn after_crash(team: &mut Team, gang: &Gang, killed: usize, all: &mut Vec<Pending>) -> Checked {
    let survivors: Vec<usize> = (0..gang.hosts.len()).filter(|&h| h != killed).collect();
    let again = Call::of(CollKind::Barrier, 0, 0, 1);
    let before = all.len();
    for &rank in &survivors {
        // Refused is an answer as well.
        if let Ok(p) = team.post(gang, rank, &again) {
            all.push(p);
        }
    }
    let until = team.rig.net.now + T_DEAD_NS * 2;
    team.run(all, until)?;
    ensure!(
        all[before..].iter().all(|p| matches!(p.outcome, Some(Err(_)))),
        "a barrier without a dead member ended well"
    );
    for &rank in &survivors {
        let now = team.rig.now();
        let node = &mut team.rig.at(rank).node;
        node.collectives().coll_close(now, gang.ids[rank]).map_err(|e| format!("closing: {e}"))?;
        team.rig.poll_by(rank, now.0);
    }
    let end = team.rig.net.now + T_DEAD_NS * 2;
    team.rig.run_to(end);
    for &rank in &survivors {
        team.reap(rank, all)?;
        let l = team.rig.at(rank).node.statistics().levels();
        let left = (l.tx, l.posted, l.unexpected, l.pulls, l.cq_reserved, l.blocks_lost);
        ensure!(left == (0, 0, 0, 0, 0, 0), "left behind at {rank}: {l:?}");
    }
    Ok(())
}

/// Goal: nobody waits for the dead, and every survivor gets one outcome per call (CR8; row 7 of
/// B.7.1). Method: groups of 2 to 6, every collective, short and long, and every crash that can be
/// told from another; in a plain run some of these, evenly taken.
#[test]
fn a_member_may_die_at_every_step() {
    let start = Instant::now();
    // Of three seeds in a row one has a lossless link.
    let rounds = if nightly() { 3 } else { 1 };
    let sum = for_seeds("a_member_may_die_at_every_step", 2 * 5 * 9 * rounds, |seed, sum| {
        let n = 2 + seed as usize % 5;
        let kind = CollKind::ALL[seed as usize / 5 % 9];
        // Those of several rounds through memory.
        let long = (seed.is_multiple_of(2) && n > 2).then_some(20_000);
        for count in [1, 2000].into_iter().chain(long) {
            if kind == CollKind::Barrier && count > 1 {
                continue;
            }
            let call = Call::of(kind, n / 2, count, seed);
            let all = crashes(n, &call, seed)?;
            let step = if nightly() { 1 } else { (all.len() / 10).max(1) };
            for &(victim, at) in all.iter().skip(seed as usize % step).step_by(step) {
                let done = crash_once(&Crash { n, call, seed, victim, at });
                done.map_err(|e| format!("{call:?} of {n}, {victim} dies at {at:?}: {e}"))?;
                sum.runs += 1;
            }
        }
        Ok(())
    });
    let time = start.elapsed().as_secs_f64();
    println!("a_member_may_die_at_every_step: crashes {} violations 0 time {time:.1} s", sum.runs);
}

/// Goal: all 164 reductions and all 20 types (CO5, CR10, CR11), at members of an odd number.
#[test]
fn every_reduction_and_every_type() {
    for boards in [false, true] {
        every_pair(boards);
    }
}

fn every_pair(boards: bool) {
    let ranks = [1, 4, 0, 2, 3];
    let (mut team, gang) = gang_of(&ranks, 2, 0.0, boards).unwrap();
    let mut pairs = 0;
    for ty in Datatype::ALL {
        for op in AtomicOp::ALL.into_iter().filter(|&op| reduces(op, ty)) {
            pairs += 1;
            for (kind, count) in [
                (CollKind::Allreduce, 1),
                (CollKind::Allreduce, 3),
                (CollKind::Allreduce, 700),
                (CollKind::Reduce, 11),
                (CollKind::ReduceScatter, 2),
            ] {
                let call = Call { ty: Some(ty), op: Some(op), ..Call::of(kind, 3, count, pairs) };
                team.call(&gang, &call).unwrap();
            }
        }
        for kind in CollKind::ALL.into_iter().filter(|k| !k.reduces() && *k != CollKind::Barrier) {
            let call = Call { ty: Some(ty), ..Call::of(kind, 1, 7, 5) };
            team.call(&gang, &call).unwrap();
        }
    }
    assert_eq!(pairs, 164);
}

/// Goal: groups that overlap, each with several calls under way, members at odds about the time,
/// while frames get lost (CR7).
#[test]
fn overlapping_groups_with_several_calls_under_way() {
    let sum = for_seeds("overlapping_groups", 12, |seed, sum| {
        let mut p = plan(seed, 6, false);
        (p.link.loss, p.link.jitter_ns) = (0.02, 10_000.0);
        p.node.t_dead_ns = 2_000_000_000;
        p.link.boards = seed.is_multiple_of(2);
        let mut team = Team::new(p);
        let sets: [&[usize]; 3] = [&[0, 1, 2, 3, 4, 5], &[5, 3, 1], &[2, 3, 0, 4]];
        let mut gangs = Vec::new();
        for (i, set) in sets.iter().enumerate() {
            let model = if i == 1 { JoinModel::Key(7) } else { JoinModel::Collective(0) };
            gangs.push(team.join(set, model)?);
        }
        let mut all: Vec<Pending> = Vec::new();
        for round in 0..12 {
            let kind = CollKind::ALL[(seed as usize + round) % 9];
            for gang in &gangs {
                let n = gang.hosts.len();
                let count = if kind == CollKind::Barrier { 0 } else { 1 + round * 40 };
                let call = Call::of(kind, round % n, count, seed * 100 + round as u64);
                for rank in 0..n {
                    let p = team.post(gang, rank, &call);
                    all.push(p.map_err(|e| format!("{call:?} refused with {e}"))?);
                    if team.rng.chance(0.3) {
                        let later = team.rig.net.now + team.rng.exp(20_000.0);
                        while team.rig.step(later).0 {}
                    }
                }
            }
        }
        let until = team.rig.net.now + 60_000_000_000;
        team.run(&mut all, until)?;
        sum.ops += all.len() as u64;
        let size = |p: &Pending| gangs.iter().find(|g| g.has(p)).map_or(0, |g| g.hosts.len());
        all.iter().try_for_each(|p| check(p, size(p)))
    });
    println!("overlapping_groups: calls {} violations 0", sum.ops);
}

/// Goal: collectives of members on two nodes are right, whatever becomes of the nodes' switches:
/// near ones by memory, with boards and without, far ones by the wire. Method: one of the switches
/// ends before each call, with what it holds of the last one, and the next one starts within 5 ms.
#[test]
fn members_of_nodes_whose_switches_end() {
    let sum = for_seeds("members_of_nodes_whose_switches_end", 20, |seed, sum| {
        let n = 3 + seed as usize % 4;
        let mut p = plan(seed, n, false);
        p.link =
            LinkPlan { boards: seed.is_multiple_of(2), loss: 0.02, ..p.link.of_nodes(2, seed) };
        p.node.crc = None;
        p.node.t_dead_ns = 2_000_000_000;
        let mut team = Team::new(p);
        let gang = team.join(&(0..n).rev().collect::<Vec<_>>(), JoinModel::Key(7))?;
        for (i, kind) in CollKind::ALL.into_iter().enumerate() {
            for count in [1, 700] {
                let count = if kind == CollKind::Barrier { 0 } else { count };
                let node = team.rng.index(2);
                let end = team.rig.net.now + team.rng.below(30_000);
                while team.rig.step(end).0 {}
                team.rig.net.end_switch(node);
                let next = end + team.rng.below(5_000_000);
                team.rig.net.at(next, Event::Switch { node });
                team.call(&gang, &Call::of(kind, i % n, count, seed << 8 | i as u64))?;
                sum.ops += n as u64;
            }
        }
        Ok(())
    });
    println!("members_of_nodes_whose_switches_end: calls {} violations 0", sum.ops);
}

/// Goal (CR1): members make the same calls at their own pace, some of them several calls ahead, and
/// each gets what it should: nothing is overtaken, however few wait for each other in a call.
#[test]
fn members_may_be_calls_apart() {
    let sum = for_seeds("members_may_be_calls_apart", 40, |seed, sum| {
        let n = 2 + seed as usize % 4;
        let ranks: Vec<usize> = (0..n).collect();
        let (mut team, gang) = gang_of(&ranks, seed, 0.0, seed % 4 != 3)?;
        let calls: Vec<Call> = (0..40)
            .map(|i| {
                // Most of those in which somebody waits for nobody.
                let all = [CollKind::ALL, [CollKind::Broadcast; 9], [CollKind::Reduce; 9]].concat();
                let kind = all[team.rng.index(all.len())];
                let count = [0, 1, 5, 40, 700][team.rng.index(5)];
                let count = if kind == CollKind::Barrier { 0 } else { count };
                Call::of(kind, team.rng.index(n), count, seed << 8 | i)
            })
            .collect();
        let (mut made, mut all) = (vec![0; n], Vec::new());
        while made.iter().any(|&made| made < calls.len()) {
            let rank = team.rng.index(n);
            for _ in 0..team.rng.index(6) {
                let Some(call) = calls.get(made[rank]) else { break };
                let p = team.post(&gang, rank, call);
                all.push(p.map_err(|e| format!("{call:?} refused with {e}"))?);
                made[rank] += 1;
            }
            if team.rng.chance(0.7) {
                let later = team.rig.net.now + team.rng.exp(2_000_000.0);
                while team.rig.step(later).0 {}
            }
        }
        let until = team.rig.net.now + 60_000_000_000;
        team.run(&mut all, until)?;
        sum.ops += all.len() as u64;
        all.iter().try_for_each(|p| check(p, n))
    });
    println!("members_may_be_calls_apart: calls {} violations 0", sum.ops);
}

/// Goal: a member that calls something else is an error for all, not a hang or an overrun. Method:
/// two members differ in kind, count, type, operation or root.
#[test]
fn members_that_disagree_are_told() {
    let base = Call::of(CollKind::Allreduce, 0, 8, 1);
    let (ty, op) = (Some(Datatype::Double), Some(AtomicOp::Max));
    let odd = [
        Call { count: 9, ..base },
        Call { count: 0, ..base },
        Call { ty, ..base },
        Call { op, ..base },
        Call::of(CollKind::Allgather, 0, 8, 1),
        Call::of(CollKind::Barrier, 0, 0, 1),
        Call::of(CollKind::Reduce, 1, 8, 1),
        Call::of(CollKind::Alltoall, 0, 8, 1),
    ];
    for (n, boards) in [2, 3, 5].into_iter().flat_map(|n| [(n, false), (n, true)]) {
        for (i, other) in odd.iter().enumerate() {
            let ranks: Vec<_> = (0..n).collect();
            let (mut team, gang) = gang_of(&ranks, i as u64, 0.0, boards).unwrap();
            let mut all: Vec<Pending> = (0..n)
                .map(|rank| team.post(&gang, rank, if rank == n / 2 { other } else { &base }))
                .map(|p| p.unwrap_or_else(|e| panic!("refused with {e}")))
                .collect();
            let until = team.rig.net.now + 1_000_000_000;
            team.run(&mut all, until).unwrap_or_else(|e| panic!("{n} {other:?}: {e}"));
            let failed = |p: &Pending| matches!(&p.outcome, Some(Err(e)) if e.err.fi_errno() == 22);
            assert!(all.iter().all(|p| intact(p).is_ok()));
            assert!(all.iter().filter(|p| failed(p)).count() >= n - 1, "{n} {other:?}");
        }
    }
    // And about the root, where the roots of both opinions send.
    for boards in [false, true] {
        roots_that_disagree(boards);
    }
}

fn roots_that_disagree(boards: bool) {
    let (mut team, gang) = gang_of(&[0, 1, 2], 4, 0.0, boards).unwrap();
    let at = |root| Call::of(CollKind::Broadcast, root, 8, 1);
    let mut all: Vec<Pending> = [(0, 0), (1, 0), (2, 1)]
        .map(|(rank, root)| team.post(&gang, rank, &at(root)).unwrap_or_else(|e| panic!("{e}")))
        .into();
    let until = team.rig.net.now + 1_000_000_000;
    // The root has no need of anybody and may be done.
    let _ = team.run(&mut all, until);
    assert!(matches!(all[2].outcome, Some(Err(_))));
}

/// Goal: a difference that no member could see in its call, since none needed another, is an error
/// of the next call in which one does.
#[test]
fn a_difference_is_told_in_a_later_call() {
    for later in [CollKind::Allreduce, CollKind::Broadcast] {
        let (mut team, gang) = gang_of(&[0, 1, 2], 4, 0.0, true).unwrap();
        // Each takes itself for the root.
        let mut all: Vec<Pending> = (0..3)
            .map(|rank| team.post(&gang, rank, &Call::of(CollKind::Broadcast, rank, 8, 1)))
            .map(|p| p.unwrap_or_else(|e| panic!("{e}")))
            .collect();
        let until = team.rig.net.now + 1_000_000;
        team.run(&mut all, until).unwrap();
        assert!(all.iter().all(|p| matches!(p.outcome, Some(Ok(())))));
        for rank in 0..3 {
            all.push(team.post(&gang, rank, &Call::of(later, 0, 8, 2)).unwrap());
        }
        let until = team.rig.net.now + 1_000_000_000;
        let _ = team.run(&mut all, until);
        let failed = |p: &Pending| matches!(&p.outcome, Some(Err(e)) if e.err.fi_errno() == 22);
        // The root of a broadcast needs nobody and may be done.
        assert!(all[4..].iter().all(failed), "{later:?}");
    }
}

/// Goal: more groups than others have room for, and more calls than a number in a packet can count
/// (row 10 of B.7.1).
#[test]
fn numbers_of_groups_and_calls_are_no_limit() {
    let mut team = Team::new(plan(6, 2, true));
    let gangs: Vec<Gang> =
        (0..400).map(|i| team.join(&[0, 1], JoinModel::Key(i)).unwrap()).collect();
    for gang in &gangs {
        team.call(gang, &Call::of(CollKind::Allreduce, 0, 1, 3)).unwrap();
    }
    let barrier = Call::of(CollKind::Barrier, 0, 0, 1);
    for i in 0..66_000 {
        team.call(&gangs[0], &barrier).unwrap_or_else(|e| panic!("call {i}: {e}"));
    }
    team.call(&gangs[0], &Call::of(CollKind::Allgather, 0, 5, 9)).unwrap();
}

/// Goal: a join in which a member does not come, dies, or has another set, ends with an error at
/// the others.
#[test]
fn a_join_that_cannot_be_ends_with_an_error() {
    let join = |team: &mut Team, host: usize, set: &[usize]| {
        team.join_at(host, set, JoinModel::Collective(0), None).unwrap()
    };
    // One does not come: it lives, so only time can tell.
    let mut team = Team::new(plan(1, 3, false));
    let ids = [0, 1].map(|host| (host, join(&mut team, host, &[0, 1, 2])));
    for (host, id) in ids {
        let ended = team.await_join(host, id).unwrap();
        assert!(ended.unwrap_err().contains("timed out"));
    }
    assert!(team.rig.net.now > 60_000_000_000);
    // What the first attempt left behind is no part of the next one, once its end is known to all.
    let known = team.rig.net.now + 5_000_000;
    team.rig.run_to(known);
    for host in [0, 1] {
        let now = team.rig.now();
        team.rig.at(host).node.collectives().coll_close(now, ids[host].1).unwrap();
    }
    let gang = team.join(&[0, 1, 2], JoinModel::Collective(0)).unwrap();
    team.call(&gang, &Call::of(CollKind::Allreduce, 0, 5, 1)).unwrap();
    // One is dead.
    let mut team = Team::new(plan(2, 3, false));
    team.rig.kill(2);
    let start = team.rig.net.now;
    let ids = [0, 1].map(|host| (host, join(&mut team, host, &[0, 1, 2])));
    for (host, id) in ids {
        assert!(team.await_join(host, id).unwrap().is_err());
    }
    assert!(team.rig.net.now - start < 600_000_000, "within T_dead and a little");
}

/// Goal: joins of the same members that each makes in another order, as threads do, meet by their
/// keys. Method: two members, two joins, crossed; each group's sum is of its own operands.
#[test]
fn joins_in_another_order_meet_by_their_keys() {
    for seed in 0..40 {
        let mut p = plan(seed, 2, seed % 2 == 0);
        p.link.boards = seed % 4 < 2;
        let mut team = Team::new(p);
        let mut ids = [[None; 2]; 2];
        for (host, keys) in [(0, [0, 1]), (1, [1, 0])] {
            for key in keys {
                let model = JoinModel::Collective(key);
                let id = team.join_at(host, &[0, 1], model, None).unwrap();
                ids[key as usize][host] = Some(id);
            }
        }
        for host in [0, 1].repeat(2) {
            team.await_any_join(host).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        }
        for of in ids {
            let gang = Gang { hosts: vec![0, 1], ids: of.into_iter().flatten().collect() };
            let call = Call::of(CollKind::Allreduce, 0, 5, seed);
            team.call(&gang, &call).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        }
    }
}

/// Goal: a member that leaves as soon as it has joined leaves nobody waiting, though the others may
/// not have joined yet.
#[test]
fn a_member_may_leave_at_once() {
    for seed in 0..40 {
        let mut p = plan(seed, 4, seed % 2 == 0);
        p.link.boards = seed % 4 < 2;
        let mut team = Team::new(p);
        let set = [0, 1, 2, 3];
        let ids = set.map(|host| team.join_at(host, &set, JoinModel::Collective(0), None).unwrap());
        let first = seed as usize % 4;
        team.await_join(first, ids[first]).unwrap().unwrap();
        let now = team.rig.now();
        team.rig.at(first).node.collectives().coll_close(now, ids[first]).unwrap();
        team.rig.poll_by(first, now.0);
        let gang = Gang { hosts: set.to_vec(), ids: ids.to_vec() };
        let barrier = Call::of(CollKind::Barrier, 0, 0, 1);
        let mut all = Vec::new();
        for host in (0..4).filter(|&h| h != first) {
            if team.await_join(host, ids[host]).unwrap().is_ok() {
                all.extend(team.post(&gang, host, &barrier));
            }
        }
        let until = team.rig.net.now + 1_000_000_000;
        team.run(&mut all, until).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        assert!(all.iter().all(|p| matches!(p.outcome, Some(Err(_)))));
    }
}

/// Goal: what waits for a member that left is told, what does not need it is not disturbed.
#[test]
fn a_member_may_leave_after_its_last_call() {
    for seed in 0..20 {
        let (mut team, gang) = gang_of(&[0, 1, 2, 3], seed, 0.0, seed % 4 == 0).unwrap();
        let bcast = Call::of(CollKind::Broadcast, 0, 300, seed);
        let first = team.post(&gang, 0, &bcast).unwrap_or_else(|e| panic!("{e}"));
        let mut all = vec![first];
        team.run(&mut all, u64::MAX).unwrap();
        // The root has sent and goes; the others come later.
        let now = team.rig.now();
        team.rig.at(0).node.collectives().coll_close(now, gang.ids[0]).unwrap();
        team.rig.poll_by(0, now.0);
        team.rig.run_to(now.0 + 1_000_000);
        for rank in 1..4 {
            all.push(team.post(&gang, rank, &bcast).unwrap_or_else(|e| panic!("{e}")));
        }
        let until = team.rig.net.now + 1_000_000_000;
        team.run(&mut all, until).unwrap();
        all.iter().try_for_each(|p| check(p, 4)).unwrap();
        // What needs it is refused or fails.
        let barrier = Call::of(CollKind::Barrier, 0, 0, 1);
        let mut late: Vec<Pending> =
            (1..4).filter_map(|rank| team.post(&gang, rank, &barrier).ok()).collect();
        team.run(&mut late, until).unwrap();
        assert!(late.iter().all(|p| matches!(p.outcome, Some(Err(_)))));
    }
}
