//! The test of the tests: bugs planted in the dataplane, and which stage finds them.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use barewire_dataplane::plant::{ALL, Bug, with};

use super::{Sum, certified, coll, directed, hostile, nodes, once, opening, random, tenants};
use crate::ledger::{Checked, Violation};
use crate::world::guarded;

/// A stage in small: runs part `i` of it.
type Part = fn(u64) -> Checked;

/// In the order in which they are tried: name, parts at most.
const STAGES: [(&str, u64, Part); 18] = [
    ("sim_quick", 40, |seed| random::one(seed, 500)),
    ("hostile_peer", 12, |seed| guarded(|| hostile::hostile(seed, 2_000))),
    ("forged_frames", 2, |seed| guarded(|| hostile::forged(seed, 5_000))),
    ("crash_at_every_step", 5, |seed| directed::crash_steps(seed, 12).map(|_| ())),
    ("nodes", 40, |seed| nodes::one(seed, 300).map(|_| ())),
    ("forgotten_sessions", 100, |seed| random::forgotten(seed).map(|_| ())),
    ("collectives", 4, |seed| guarded(|| coll::one(seed))),
    ("narrow_paths", 20, |seed| guarded(|| opening::narrow(seed))),
    ("open_floods", 4, |seed| guarded(|| opening::flood(seed))),
    ("blind_opens", 4, |seed| guarded(|| opening::blind(seed))),
    ("exactly_once", 40, |seed| once::one_word(seed).map(|_| ())),
    ("false_death", 20, |seed| random::no_death(seed).map(|_| ())),
    ("other_keys", 60, |seed| random::rolled_out(seed).map(|_| ())),
    ("certificates", 12, |seed| guarded(|| certified::one(seed, &mut Sum::default()))),
    ("tenants", 20, |seed| guarded(|| tenants::one(seed, &mut Sum::default()))),
    ("given_up", 400, |seed| random::withdrawn(seed).map(|_| ())),
    ("drop_dup_swap_each_packet", 1, |seed| directed::each_packet(seed, 12).map(|_| ())),
    ("sim_quick, more", 1000, |seed| random::one(40 + seed, 500)),
];

/// Goal: the stages find what they are for. Method: every bug of `plant` is switched on alone, and
/// the stages run until one reports a violation. `SIM_BUG=StaleGrant` switches on that one only.
#[test]
fn planted_bugs() {
    let start = Instant::now();
    if std::env::var_os("SIM_TRACE").is_none() {
        silence_panics();
    }
    let asked = std::env::var("SIM_BUG").ok();
    let named = |bug: &Bug| asked.as_ref().is_none_or(|name| *name == format!("{bug:?}"));
    let all: Vec<Bug> = ALL.into_iter().filter(named).collect();
    let next = AtomicUsize::new(0);
    let lines = Mutex::new(Vec::new());
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                while let Some(&bug) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let line = (bug as u8, bug, hunt(bug));
                    line.2.print(bug, start);
                    lines.lock().expect("no panic inside").push(line);
                }
            });
        }
    });
    let mut lines = lines.into_inner().expect("no panic inside");
    lines.sort_by_key(|l| l.0);
    println!("| bug | found by | parts run |\n|---|---|---|");
    lines.iter().for_each(|(_, bug, hunt)| hunt.row(*bug));
    let (mut found, mut planted) = (0, 0);
    for (_, _, hunt) in &lines {
        planted += u64::from(hunt.reached);
        found += u64::from(hunt.found.is_some());
    }
    println!(
        "planted_bugs: kinds {} reached {planted} found {found} time {:.1} s",
        all.len(),
        start.elapsed().as_secs_f64()
    );
    if asked.is_some() {
        return;
    }
    assert!(found == all.len() as u64, "{found} of {} planted bugs found", all.len());
}

struct Hunt {
    found: Option<(&'static str, u64, Violation)>,
    reached: bool,
}

impl Hunt {
    /// The line of the table in `docs/testing.md`.
    fn row(&self, bug: Bug) {
        match &self.found {
            Some((stage, part, _)) => println!("| {bug:?} | `{stage}` | {} |", part + 1),
            None if self.reached => println!("| {bug:?} | not found | |"),
            None => println!("| {bug:?} | no place reached | |"),
        }
    }

    fn print(&self, bug: Bug, start: Instant) {
        let at = start.elapsed().as_secs();
        match &self.found {
            Some((stage, part, why)) => {
                println!("planted_bugs: {at} s: {bug:?}: {stage}, part {part}: {why:.120}");
            }
            None if self.reached => println!("planted_bugs: {at} s: {bug:?}: NOT FOUND"),
            None => println!("planted_bugs: {at} s: {bug:?}: no place reached"),
        }
    }
}

fn hunt(bug: Bug) -> Hunt {
    let (found, reached) = with(bug, || {
        for (stage, parts, part) in STAGES {
            for i in 0..parts {
                if let Err(why) = part(i) {
                    return Some((stage, i, why));
                }
            }
        }
        None
    });
    Hunt { found, reached }
}

/// A planted bug may well panic a node, which is a find; its message would only be noise.
fn silence_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().name().is_some() {
            usual(info);
        }
    }));
}
