//! The tests, and what they have in common: seeds, threads and the line of figures at the end.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::entries::Entries;
use crate::ledger::{Checked, Violation};
use crate::plan::Fault;
use crate::world::Report;

mod certified;
mod coll;
mod directed;
mod hostile;
mod incast;
#[cfg(target_arch = "x86_64")]
mod matrix;
mod measure;
mod nodes;
mod once;
mod opening;
#[cfg(feature = "plant")]
mod planted;
mod random;
mod sealed;
mod tenants;

/// Sums over the runs of a stage.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sum {
    pub(crate) runs: u64,
    pub(crate) ops: u64,
    pub(crate) refused: u64,
    pub(crate) failed: u64,
    pub(crate) delivered: u64,
    pub(crate) events: u64,
    pub(crate) frames: u64,
    pub(crate) dropped: u64,
    pub(crate) duplicated: u64,
    pub(crate) corrupted: u64,
    pub(crate) crashes: u64,
    pub(crate) deaths: u64,
    /// Operations on remote memory that succeeded, and that were refused as they had to be.
    pub(crate) remote: u64,
    pub(crate) denied: u64,
    /// Sends whose success told that they were matched.
    pub(crate) matched: u64,
    /// Sends whose success told that their buffer may be reused.
    pub(crate) early: u64,
    pub(crate) entries: Entries,
    /// Faults of each kind, as [`Fault::NAMES`] has them, and what else was done to frames, as
    /// [`TRICKS`] has it.
    pub(crate) faults: [u64; Fault::NAMES.len()],
    pub(crate) tricks: [u64; TRICKS.len()],
}

/// What the wire does besides losing, copying and damaging frames.
const TRICKS: [&str; 4] = ["spoofed", "forged", "marked", "full"];

impl Sum {
    pub(crate) fn add(&mut self, r: &Report) {
        self.runs += 1;
        self.ops += r.tally.accepted;
        self.refused += r.tally.refused;
        self.failed += r.tally.failed;
        self.delivered += r.tally.delivered;
        self.events += r.net.events;
        self.frames += r.net.frames;
        self.dropped += r.net.dropped;
        self.duplicated += r.net.duplicated;
        self.corrupted += r.net.corrupted;
        self.crashes += r.crashes;
        self.deaths += r.tally.deaths;
        self.remote += r.tally.remote;
        self.denied += r.tally.denied;
        self.matched += r.tally.matched;
        self.early += r.tally.early;
        self.entries.add(&r.tally.entries);
        self.faults.iter_mut().zip(r.faults).for_each(|(all, n)| *all += n);
        let tricks = [r.net.spoofed, r.net.forged, r.net.marked, r.net.full];
        self.tricks.iter_mut().zip(tricks).for_each(|(all, n)| *all += n);
    }

    pub(crate) fn merge(&mut self, s: &Self) {
        self.runs += s.runs;
        self.ops += s.ops;
        self.refused += s.refused;
        self.failed += s.failed;
        self.delivered += s.delivered;
        self.events += s.events;
        self.frames += s.frames;
        self.dropped += s.dropped;
        self.duplicated += s.duplicated;
        self.corrupted += s.corrupted;
        self.crashes += s.crashes;
        self.deaths += s.deaths;
        self.remote += s.remote;
        self.denied += s.denied;
        self.matched += s.matched;
        self.early += s.early;
        self.entries.add(&s.entries);
        self.faults.iter_mut().zip(s.faults).for_each(|(all, n)| *all += n);
        self.tricks.iter_mut().zip(s.tricks).for_each(|(all, n)| *all += n);
    }

    /// What never happened of all that can happen to hosts and frames: what a stage that draws it
    /// has not tested, whatever its ledger says.
    pub(crate) fn never(&self) -> Vec<&'static str> {
        let named = [
            ("dropped", self.dropped),
            ("duplicated", self.duplicated),
            ("corrupted", self.corrupted),
            ("deaths", self.deaths),
            ("denied", self.denied),
            ("refused", self.refused),
            ("matched", self.matched),
            ("early", self.early),
        ];
        let faults = Fault::NAMES.into_iter().zip(self.faults);
        let tricks = TRICKS.into_iter().zip(self.tricks);
        let all = named.into_iter().chain(faults).chain(tricks);
        all.filter(|(_, count)| *count == 0).map(|(name, _)| name).collect()
    }

    /// The line of a stage.
    pub(crate) fn print(&self, stage: &str, start: Instant) {
        println!(
            "{stage}: runs {} ops {} refused {} failed {} delivered {} events {} frames {} \
             remote {} denied {} matched {} early {} dropped {} duplicated {} corrupted {} \
             crashes {} deaths {} violations 0 time {:.1} s",
            self.runs,
            self.ops,
            self.refused,
            self.failed,
            self.delivered,
            self.events,
            self.frames,
            self.remote,
            self.denied,
            self.matched,
            self.early,
            self.dropped,
            self.duplicated,
            self.corrupted,
            self.crashes,
            self.deaths,
            start.elapsed().as_secs_f64(),
        );
        println!("{stage}: taken by {:?}", self.entries);
        let faults = Fault::NAMES.iter().zip(self.faults);
        let all = faults.chain(TRICKS.iter().zip(self.tricks)).filter(|(_, count)| *count > 0);
        let all: Vec<String> = all.map(|(name, count)| format!("{name} {count}")).collect();
        println!("{stage}: faults {}", all.join(" "));
    }
}

/// Whether the large sizes are asked for.
pub(crate) fn nightly() -> bool {
    let set = |name| std::env::var_os(name).is_some();
    set("SIM_NIGHTLY") || set("BAREWIRE_NIGHTLY")
}

/// The seeds of a stage: those below `count`, or what `SIM_SEED` says, `17` or `1000..2000`.
pub(crate) fn seeds(count: u64) -> std::ops::Range<u64> {
    let Ok(asked) = std::env::var("SIM_SEED") else { return 0..count };
    let number = |s: &str| s.parse().expect("SIM_SEED is a number, or two with .. between them");
    match asked.split_once("..") {
        Some((from, to)) => number(from)..number(to),
        None => number(&asked)..number(&asked) + 1,
    }
}

/// Runs `body` for every seed on two threads and sums up.
///
/// # Panics
/// On the violation with the lowest seed, which it names.
pub(crate) fn for_seeds(
    stage: &str,
    count: u64,
    body: impl Fn(u64, &mut Sum) -> Checked + Sync,
) -> Sum {
    let range = seeds(count);
    let next = AtomicU64::new(range.start);
    let sum = Mutex::new(Vec::new());
    let bad: Mutex<Vec<(u64, Violation)>> = Mutex::new(Vec::new());
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                let mut mine = Sum::default();
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= range.end || bad.lock().expect("no panic inside").len() > 40 {
                        break;
                    }
                    if let Err(e) = body(seed, &mut mine) {
                        eprintln!("{stage}: SIM_SEED={seed} failed");
                        bad.lock().expect("no panic inside").push((seed, e));
                    }
                }
                sum.lock().expect("no panic inside").push(mine);
            });
        }
    });
    let mut bad = bad.into_inner().expect("no panic inside");
    bad.sort();
    for (seed, why) in &bad {
        eprintln!("SIM_SEED={seed} cargo test --test sim {stage}: {why}");
    }
    assert!(bad.is_empty(), "{stage}: {} seeds failed, first SIM_SEED={}", bad.len(), bad[0].0);
    let mut all = Sum::default();
    for s in sum.into_inner().expect("no panic inside") {
        all.merge(&s);
    }
    all
}
