//! What the processes wrote down, read again.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::faults::{Fault, Kind};

/// One life of a process.
#[derive(Clone, Debug)]
pub(crate) struct Life {
    pub(crate) place: usize,
    /// When it was about to be killed, and when it had ended.
    pub(crate) killed_ns: Option<u64>,
    pub(crate) died_ns: Option<u64>,
    pub(crate) ledger: PathBuf,
}

/// An operation that has ended.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    /// 0 for the wire.
    pub(crate) side: usize,
    /// As `process.rs` names it.
    pub(crate) kind: char,
    /// Life of the peer.
    pub(crate) peer: usize,
    pub(crate) posted_ns: u64,
    pub(crate) ended_ns: u64,
    /// Place in [`Ledger::outcomes`]; 0 is success.
    pub(crate) outcome: u8,
    /// Number of a message, or what an addition returned.
    pub(crate) value: u64,
    pub(crate) len: u32,
}

/// A message that came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    pub(crate) side: usize,
    /// In the order in which receives were posted.
    pub(crate) receive: u64,
    pub(crate) from: usize,
    pub(crate) seq: u64,
}

/// All of one life.
#[derive(Default)]
pub(crate) struct Ledger {
    pub(crate) ended: Vec<Ended>,
    pub(crate) received: Vec<Received>,
    /// Receives that ended in an error.
    pub(crate) broken: u64,
    /// Side and time of the errors of injected messages, which do not say which.
    pub(crate) failed: Vec<(usize, u64)>,
    /// Side, peer and time of the calls that told of lost messages.
    pub(crate) told: Vec<(usize, usize, u64)>,
    /// Pauses between polls of 5 ms and more, in order. One that nobody returned from has no end.
    pub(crate) gaps: Vec<[u64; 2]>,
    /// Times in which the process was ready to run and did not, or was stopped, in order.
    pub(crate) delays: Vec<[u64; 2]>,
}

/// Names of outcomes, the same for all lives.
#[derive(Default)]
pub(crate) struct Outcomes {
    names: Vec<String>,
    places: HashMap<String, u8>,
}

impl Outcomes {
    pub(crate) fn new() -> Self {
        let mut outcomes = Self::default();
        outcomes.place("ok");
        outcomes
    }

    pub(crate) fn name(&self, place: u8) -> &str {
        &self.names[usize::from(place)]
    }

    pub(crate) fn len(&self) -> usize {
        self.names.len()
    }

    fn place(&mut self, name: &str) -> u8 {
        if let Some(place) = self.places.get(name) {
            return *place;
        }
        let place = self.names.len() as u8;
        self.names.push(name.to_owned());
        self.places.insert(name.to_owned(), place);
        place
    }
}

impl Ledger {
    pub(crate) fn read(path: &Path, outcomes: &mut Outcomes) -> Self {
        let mut ledger = Self::default();
        // A life that was killed before it began has none, and one that was killed while it wrote
        // has half a line.
        let Ok(text) = fs::read_to_string(path) else { return ledger };
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        let mut resting = None;
        for line in text[..whole].lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let number = |n: usize| -> u64 { words[n].parse().unwrap() };
            // Who writes anything else has returned from its rest.
            resting = resting.filter(|_| words[0] == "S");
            match words[0] {
                "E" => ledger.ended.push(Ended {
                    side: number(1) as usize,
                    kind: words[2].chars().next().unwrap(),
                    peer: number(3) as usize,
                    posted_ns: number(4),
                    ended_ns: number(5),
                    outcome: outcomes.place(words[6]),
                    value: number(7),
                    len: number(8) as u32,
                }),
                "R" => ledger.received.push(Received {
                    side: number(1) as usize,
                    receive: number(2),
                    from: number(3) as usize,
                    seq: number(4),
                }),
                "F" => ledger.failed.push((number(1) as usize, number(3))),
                "X" => ledger.broken += 1,
                "C" => ledger.told.push((number(1) as usize, number(2) as usize, number(3))),
                "S" => resting = Some(number(1)),
                "G" => ledger.gaps.push([number(1), number(2)]),
                "P" => ledger.delays.push([number(1), number(2)]),
                _ => panic!("{}: {line}", path.display()),
            }
        }
        ledger.gaps.extend(resting.map(|since| [since, u64::MAX]));
        ledger
    }

    /// The pauses that reach into a time.
    pub(crate) fn gaps_in(&self, from_ns: u64, to_ns: u64) -> impl Iterator<Item = [u64; 2]> {
        reaching(&self.gaps, from_ns, to_ns)
    }

    /// As [`gaps_in`](Self::gaps_in), of the delays.
    pub(crate) fn delays_in(&self, from_ns: u64, to_ns: u64) -> impl Iterator<Item = [u64; 2]> {
        reaching(&self.delays, from_ns, to_ns)
    }
}

fn reaching(times: &[[u64; 2]], from_ns: u64, to_ns: u64) -> impl Iterator<Item = [u64; 2]> {
    let first = times.partition_point(|time| time[1] <= from_ns);
    times[first..].iter().copied().take_while(move |time| time[0] < to_ns)
}

/// Leaves what happened beside the ledgers, for who looks at a violation.
pub(crate) fn write_faults(dir: &Path, lives: &[Life], faults: &[Fault]) {
    let lives = lives.iter().enumerate().map(|(n, life)| format!("{n} {life:?}\n"));
    let faults = faults.iter().map(|fault| format!("{fault:?}\n"));
    fs::write(dir.join("faults"), lives.chain(faults).collect::<String>()).unwrap();
}

/// What [`write_faults`] left in `dir`.
pub(crate) fn read_faults(dir: &Path) -> (Vec<Life>, Vec<Fault>) {
    let (mut lives, mut faults) = (Vec::new(), Vec::new());
    for line in fs::read_to_string(dir.join("faults")).unwrap().lines() {
        let words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
        let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
        let after = |name: &str| -> Vec<&str> {
            words.iter().copied().skip_while(|word| *word != name).skip(1).collect()
        };
        let numbers = |name: &str| -> Vec<u64> {
            after(name).iter().filter_map(|word| word.parse().ok()).collect()
        };
        let place = numbers("place")[0] as usize;
        if words.contains(&"Life") {
            let time = |name: &str| (after(name)[0] == "Some").then(|| numbers(name)[0]);
            let [killed_ns, died_ns] = ["killed_ns", "died_ns"].map(time);
            let ledger = dir.join(format!("life-{}", lives.len()));
            lives.push(Life { place, killed_ns, died_ns, ledger });
        } else {
            let kind = after("kind")[0];
            let kind = Kind::ALL.into_iter().find(|k| format!("{k:?}") == kind).unwrap();
            let pair = |name: &str| [numbers(name)[0], numbers(name)[1]];
            faults.push(Fault { kind, place, begin_ns: pair("begin_ns"), end_ns: pair("end_ns") });
        }
    }
    (lives, faults)
}
