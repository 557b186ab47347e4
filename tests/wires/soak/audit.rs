//! What the ledgers of all lives say together.
//!
//! **Time.** The state of two processes is cut where something is done to either: it begins, it is
//! over, one of them dies. In each of these times an operation between them waits for at most
//! T_dead, two pauses between polls of its initiator, and 100 ms; over memory, when its target has
//! ended since it was posted, for two pauses and 100 ms; where some frames pass and others do not,
//! 500 ms longer. Time does not count in which the target lives and neither polls
//! nor has a thread that does, if the operation needs it to. As long as nothing is wrong, nor does
//! that in which the initiator itself did not poll. A wait may be longer by the longest time in
//! which the machine kept either process from running; how many were is told.
//!
//! **Messages.** None comes twice, or before one that was posted earlier. None comes that was told
//! of as not executed. All come that were told of as delivered. One that was told of as sent comes,
//! or a later call to that peer tells of a loss, or an error of an injected message does.
//!
//! **Additions.** Each returns as many as were executed before it.

use std::collections::HashMap;
use std::time::Duration;

use super::T_DEAD;
use super::faults::{Fault, Kind};
use super::ledger::{Ended, Ledger, Life, Outcomes};

const MS: u64 = 1_000_000;

/// Shortest pause that excuses a target.
const ABSENT_NS: u64 = 20 * MS;

/// Longest pause that no ledger has.
const UNSEEN_NS: u64 = 5 * MS;

/// More where some frames pass and others do not: the clock of progress begins with the third
/// timeout in a row, and stands still while the peer is not heard.
const THIN_NS: u64 = 500 * MS;

/// Longest message that never needs a receive to be matched: the credit that a session begins with.
/// A longer one is announced where the credit is too short for it, and then its receiver polls.
const EAGER_SURE: u32 = 4 << 10;

struct Audit<'a> {
    lives: &'a [Life],
    ledgers: Vec<Ledger>,
    /// Of each place, in order.
    faults: Vec<Vec<&'a Fault>>,
    outcomes: Outcomes,
    /// What a wait may be longer than its bound.
    slack_ns: u64,
    wrong: Vec<String>,
    /// Waits that were longer than their bound by no more than the machine explains.
    delayed: Vec<String>,
}

/// How long an operation waited, and how much of its bound it took.
struct Waited {
    outcome: u8,
    side: usize,
    ns: u64,
    /// Time that counts since the last change, and what it may be.
    counted_ns: u64,
    limit_ns: u64,
}

/// Prints the tables and returns what is wrong. A wait may be longer than its bound by `slack`,
/// for a machine on which others work as well.
pub(crate) fn audit(lives: &[Life], faults: &[Fault], slack: Duration) -> Vec<String> {
    let mut outcomes = Outcomes::new();
    let mut ledgers: Vec<Ledger> =
        lives.iter().map(|life| Ledger::read(&life.ledger, &mut outcomes)).collect();
    let mut by_place = vec![Vec::new(); super::PLACES];
    for fault in faults {
        by_place[fault.place].push(fault);
    }
    keep_unplanned(lives, &by_place, &mut ledgers);
    let (slack_ns, wrong) = (slack.as_nanos() as u64, Vec::new());
    let delayed = Vec::new();
    let mut audit = Audit { lives, ledgers, faults: by_place, outcomes, slack_ns, wrong, delayed };
    let mut waits = Vec::new();
    for life in 0..lives.len() {
        for n in 0..audit.ledgers[life].ended.len() {
            let waited = audit.wait_of(life, n);
            waits.push(waited);
        }
        audit.additions(life);
    }
    audit.messages();
    audit.print(faults, waits);
    audit.wrong
}

/// Forgets the delays of processes that were stopped on purpose.
fn keep_unplanned(lives: &[Life], faults: &[Vec<&Fault>], ledgers: &mut [Ledger]) {
    for (life, ledger) in lives.iter().zip(ledgers) {
        let stops = faults[life.place].iter().filter(|fault| fault.kind == Kind::Stop);
        let stops: Vec<&&Fault> = stops.collect();
        ledger.delays.retain(|at| !stops.iter().any(|stop| stop.overlaps(at[0], at[1])));
    }
}

impl Audit<'_> {
    /// Everything that happened to two lives between two times, and to the link of either if it is
    /// the wire that they talk on.
    fn between(&self, lives: [usize; 2], side: usize, at: [u64; 2]) -> Vec<&Fault> {
        let places = lives.map(|life| self.lives[life].place);
        let faults = places.iter().flat_map(|place| &self.faults[*place]).copied();
        let bears = |fault: &Fault| match fault.kind {
            Kind::Kill => false,
            Kind::Stop => true,
            _ => side == 0,
        };
        faults.filter(|fault| bears(fault) && fault.overlaps(at[0], at[1])).collect()
    }

    /// Checks the time of an operation.
    fn wait_of(&mut self, life: usize, n: usize) -> Waited {
        let op = self.ledgers[life].ended[n].clone();
        let [from, to] = [op.posted_ns, op.ended_ns];
        let faults = self.between([life, op.peer], op.side, [from, to]);
        let Life { killed_ns, died_ns: died, .. } = self.lives[op.peer];
        // One that was not there when it was first asked may not have been started yet.
        let told_by_kernel = op.side == 1 && killed_ns.is_some_and(|at| from < at);
        let mut cuts: Vec<u64> = faults.iter().flat_map(|fault| fault.changes()).collect();
        cuts.extend(died);
        cuts.extend([from, to]);
        cuts.retain(|cut| (from..=to).contains(cut));
        cuts.sort_unstable();
        let mut last = (0, 0);
        let (mut late, mut delayed) = (None, None);
        for pair in cuts.windows(2) {
            let [a, b] = [pair[0], pair[1]];
            let dead = died.is_some_and(|died| a >= died);
            let wrong = faults.iter().any(|fault| fault.overlaps(a, b));
            let stopped = faults.iter().any(|f| f.kind == Kind::Stop && f.overlaps(a, b));
            let counted = self.counted(&op, life, [a, b], dead, wrong, stopped);
            let thin = |f: &&Fault| f.kind.is_partial() && f.overlaps(a, b);
            let thin = if faults.iter().any(thin) { THIN_NS } else { 0 };
            let limit = thin + self.limit(life, [a, b], dead && told_by_kernel);
            if counted > limit + self.slack_ns {
                let delay = self.delay([life, op.peer], [a, b]);
                let excused = counted <= limit + self.slack_ns + delay;
                let to = if excused { &mut delayed } else { &mut late };
                *to = Some(format!(
                    "life {life}: waited {} ms of {} to {b}, the machine {} ms, dead {dead}, \
                     wrong {wrong}: {op:?}, {}",
                    counted / MS,
                    limit / MS,
                    delay / MS,
                    self.outcomes.name(op.outcome)
                ));
            }
            last = (counted, limit);
        }
        self.delayed.extend(delayed.filter(|_| late.is_none()));
        self.wrong.extend(late);
        let [counted_ns, limit_ns] = [last.0, last.1];
        Waited { outcome: op.outcome, side: op.side, ns: to - from, counted_ns, limit_ns }
    }

    /// The time of `at` that counts.
    fn counted(
        &self,
        op: &Ended,
        life: usize,
        at: [u64; 2],
        dead: bool,
        wrong: bool,
        stopped: bool,
    ) -> u64 {
        let long = matches!(op.kind, 's' | 'd') && (op.len > EAGER_SURE || op.kind == 'd');
        let needs_poll = op.side == 1 || long;
        let mut excused = Vec::new();
        if !dead && needs_poll && (op.side == 1 || !stopped) {
            let gaps = self.ledgers[op.peer].gaps_in(at[0], at[1]);
            excused.extend(gaps.filter(|gap| gap[1] - gap[0] >= ABSENT_NS));
        }
        if !dead && !wrong {
            excused.extend(self.ledgers[life].gaps_in(at[0], at[1]));
        }
        at[1] - at[0] - covered(excused, at)
    }

    /// The longest time in which the machine kept either process from running.
    fn delay(&self, lives: [usize; 2], at: [u64; 2]) -> u64 {
        let delays = lives.into_iter().flat_map(|life| self.ledgers[life].delays_in(at[0], at[1]));
        delays.map(|delay| delay[1].min(at[1]) - delay[0].max(at[0])).max().unwrap_or(0)
    }

    /// What the time may be.
    fn limit(&self, life: usize, at: [u64; 2], told_by_kernel: bool) -> u64 {
        let gaps = self.ledgers[life].gaps_in(at[0], at[1]).map(|gap| gap[1] - gap[0]);
        let gap = gaps.max().unwrap_or(0).max(UNSEEN_NS);
        let silence = if told_by_kernel { 0 } else { T_DEAD.as_nanos() as u64 };
        silence + 2 * gap + 100 * MS
    }

    /// Checks what additions returned.
    fn additions(&mut self, life: usize) {
        let mut words: HashMap<(usize, usize), Vec<&Ended>> = HashMap::new();
        for op in self.ledgers[life].ended.iter().filter(|op| op.kind == 'a') {
            words.entry((op.side, op.peer)).or_default().push(op);
        }
        let mut wrong = Vec::new();
        for ((side, peer), mut ops) in words {
            ops.sort_by_key(|op| op.posted_ns);
            let (mut least, mut most) = (0, 0);
            for op in ops {
                match self.outcomes.name(op.outcome) {
                    "ok" if !(least..=most).contains(&op.value) => wrong.push(format!(
                        "life {life}: an addition at life {peer}, side {side}, returned {}, not \
                         {least} to {most}: {op:?}",
                        op.value
                    )),
                    // Those before it were executed before it or never.
                    "ok" => (least, most) = (op.value + 1, op.value + 1),
                    name if name.ends_with("/NotExecuted") => {}
                    _ => most += 1,
                }
            }
        }
        self.wrong.append(&mut wrong);
    }

    /// Checks what became of every message.
    fn messages(&mut self) {
        let mut wrong = Vec::new();
        for (to, ledger) in self.ledgers.iter().enumerate() {
            let mut came: HashMap<(usize, usize), Vec<[u64; 2]>> = HashMap::new();
            for r in &ledger.received {
                came.entry((r.side, r.from)).or_default().push([r.receive, r.seq]);
            }
            for ((side, from), came) in &mut came {
                came.sort_unstable();
                for pair in came.windows(2) {
                    if pair[1][1] <= pair[0][1] {
                        let what = format!("{} and then {}", pair[0][1], pair[1][1]);
                        wrong.push(format!("life {to}: from life {from}, side {side}: {what}"));
                    }
                }
            }
            let came: HashMap<_, std::collections::HashSet<u64>> = came
                .into_iter()
                .map(|(who, came)| (who, came.into_iter().map(|[_, seq]| seq).collect()))
                .collect();
            for (from, sender) in self.ledgers.iter().enumerate() {
                for op in sender.ended.iter().filter(|op| op.peer == to && is_message(op)) {
                    let came = came.get(&(op.side, from)).is_some_and(|c| c.contains(&op.value));
                    if let Some(why) = self.fate(from, op, came) {
                        wrong.push(format!("life {from}: {why}: {op:?}"));
                    }
                }
            }
        }
        self.wrong.append(&mut wrong);
    }

    /// What is wrong with the outcome of a message that came or did not.
    fn fate(&self, from: usize, op: &Ended, came: bool) -> Option<&'static str> {
        let name = self.outcomes.name(op.outcome);
        let lived = self.lives[op.peer].died_ns.is_none();
        match (came, name) {
            (true, _) if name.ends_with("/NotExecuted") => Some("it came, and was not executed"),
            (false, "ok") if lived && op.kind == 'd' => Some("delivered, and did not come"),
            (false, "ok") if lived && self.lives[from].died_ns.is_none() => {
                let told = &self.ledgers[from].told;
                let told = told.iter().any(|&(side, peer, at)| {
                    (side, peer) == (op.side, op.peer) && at > op.posted_ns
                });
                // Injected messages that failed are told without their names.
                let failed = &self.ledgers[from].failed;
                let failed = op.kind == 'i'
                    && failed.iter().any(|&(side, at)| side == op.side && at > op.posted_ns);
                (!told && !failed).then_some("lost, and nobody was told")
            }
            _ => None,
        }
    }

    fn print(&self, faults: &[Fault], mut waits: Vec<Waited>) {
        println!("\n| what happened | times |\n|---|---|");
        for kind in Kind::ALL {
            let times = faults.iter().filter(|fault| fault.kind == kind).count();
            println!("| {kind:?} | {times} |");
        }
        println!("\n| over | ended by | operations | p50 ms | p99 ms | max ms | of its bound |");
        println!("|---|---|---|---|---|---|---|");
        waits.sort_by_key(|waited| waited.ns);
        for side in [0, 1] {
            for outcome in 0..self.outcomes.len() as u8 {
                let of = |w: &&Waited| (w.side, w.outcome) == (side, outcome);
                let of: Vec<&Waited> = waits.iter().filter(of).collect();
                if of.is_empty() {
                    continue;
                }
                let ms = |p: usize| of[(of.len() - 1) * p / 100].ns as f64 / 1e6;
                let most = of.iter().map(|w| w.counted_ns as f64 / w.limit_ns.max(1) as f64);
                let most = 100.0 * most.fold(0.0, f64::max);
                let (over, name) = (["wire", "memory"][side], self.outcomes.name(outcome));
                let [p50, p99, max] = [50, 99, 100].map(ms);
                println!(
                    "| {over} | {name} | {} | {p50:.1} | {p99:.1} | {max:.1} | {most:.0} % |",
                    of.len()
                );
            }
        }
        let received: usize = self.ledgers.iter().map(|ledger| ledger.received.len()).sum();
        let broken: u64 = self.ledgers.iter().map(|ledger| ledger.broken).sum();
        let told: usize = self.ledgers.iter().map(|ledger| ledger.told.len()).sum();
        let failed: usize = self.ledgers.iter().map(|ledger| ledger.failed.len()).sum();
        let lives = self.lives.len();
        println!(
            "\n{lives} lives received {received} messages; {broken} receives ended in an error; \
             {failed} injected messages failed, {told} calls told of lost ones."
        );
        let delays = self.ledgers.iter().flat_map(|ledger| &ledger.delays);
        let mut delays: Vec<u64> = delays.map(|delay| delay[1] - delay[0]).collect();
        delays.sort_unstable();
        let over = |ms: u64| delays.len() - delays.partition_point(|&ns| ns < ms * MS);
        println!(
            "The machine kept a process from running for 10 ms {} times, for 100 ms {} times; {} \
             waits were longer than their bound by no more than that.",
            delays.len(),
            over(100),
            self.delayed.len()
        );
        for delayed in self.delayed.iter().take(10) {
            println!("  {delayed}");
        }
    }
}

fn is_message(op: &Ended) -> bool {
    matches!(op.kind, 's' | 'd' | 'i')
}

/// How much of a time is in any of the intervals.
fn covered(mut intervals: Vec<[u64; 2]>, at: [u64; 2]) -> u64 {
    intervals.sort_unstable();
    let (mut sum, mut upto) = (0, at[0]);
    for [from, to] in intervals {
        let (from, to) = (from.max(upto), to.min(at[1]));
        if to > from {
            sum += to - from;
            upto = to;
        }
    }
    sum
}

/// What the audit says of two lives with these ledgers, of which the second may have been killed
/// at a time in seconds.
#[cfg(test)]
fn audited(ledgers: [&str; 2], killed: Option<u64>, faults: &[Fault]) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let lives: Vec<Life> = (0..2)
        .map(|place| {
            let ledger = dir.path().join(place.to_string());
            std::fs::write(&ledger, ledgers[place].replace('_', "000000")).unwrap();
            let died_ns = killed.filter(|_| place == 1).map(|at| at * 1000 * MS);
            Life { place, killed_ns: died_ns, died_ns, ledger }
        })
        .collect();
    audit(&lives, faults, Duration::ZERO)
}

/// Goal: the audit finds what it is for. Method: ledgers of two lives that are as they should be,
/// and the same with one thing wrong in each. `_` is a million: times are in milliseconds.
#[test]
fn an_audit_finds_what_is_wrong() {
    let sent = "E 0 s 1 1000_ 1001_ ok 0 100\nE 0 d 1 1002_ 1003_ ok 1 100\n\
                E 0 i 1 1004_ 1004_ ok 2 40\nE 0 a 1 1005_ 1006_ ok 0 8\n\
                E 0 a 1 1006_ 1007_ ok 1 8\nE 0 s 1 1010_ 2100_ HostUnreach/NotExecuted 3 90\n";
    let came = "R 0 0 0 0 1001_\nR 0 1 0 1 1003_\nR 0 2 0 2 1004_\n";
    let good = audited([sent, came], None, &[]);
    assert!(good.is_empty(), "{good:?}");
    for (old, new) in [
        ("2100_", "2300_"),
        ("E 0 a 1 1006_ 1007_ ok 1", "E 0 a 1 1006_ 1007_ ok 2"),
        ("E 0 a 1 1006_ 1007_ ok 1", "E 0 a 1 1006_ 1007_ ok 0"),
    ] {
        assert!(sent.contains(old));
        let wrong = audited([&sent.replace(old, new), came], None, &[]);
        assert_eq!(wrong.len(), 1, "{new}: {wrong:?}");
    }
    for (old, new) in [
        ("R 0 0 0 0 1001_\n", ""),
        ("R 0 1 0 1 1003_\n", ""),
        ("R 0 2 0 2 1004_\n", ""),
        ("R 0 2 0 2 1004_\n", "R 0 2 0 2 1004_\nR 0 3 0 2 1005_\n"),
        ("R 0 2 0 2 1004_\n", "R 0 2 0 2 1004_\nR 0 3 0 3 1015_\n"),
    ] {
        let wrong = audited([sent, &came.replace(old, new)], None, &[]);
        assert_eq!(wrong.len(), 1, "{old} {new}: {wrong:?}");
    }
    // Who is killed may leave half a line.
    assert_eq!(audited([&format!("{sent}E 0 w 1 20"), came], None, &[]), [""; 0]);
    // The third was lost and its sender was told; or its receiver is dead.
    let lost = came.replace("R 0 2 0 2 1004_\n", "");
    let told = format!("{sent}C 0 1 3000_\n");
    assert_eq!(audited([&told, &lost], None, &[]), [""; 0]);
    assert_eq!(audited([sent, &lost], Some(2), &[]), [""; 0]);
}

/// As above, of the time that excuses a wait and of that which does not.
#[test]
fn an_audit_knows_what_a_wait_may_be() {
    let waits = |side: u64, to_ms: u64| {
        format!("E {side} d 1 1000_ {to_ms}_ HostUnreach/UnknownOutcome 0 9\n")
    };
    let late = |initiator: &str, target: &str, killed: Option<u64>, faults: &[Fault]| {
        audited([initiator, target], killed, faults).len()
    };
    // A death is told over memory within 100 ms, on a wire T_dead later.
    assert_eq!(late(&waits(1, 5090), "S 1000_\n", Some(5), &[]), 0);
    assert_eq!(late(&waits(1, 5150), "S 1000_\n", Some(5), &[]), 1);
    assert_eq!(late(&waits(0, 6090), "S 1000_\n", Some(5), &[]), 0);
    assert_eq!(late(&waits(0, 6150), "S 1000_\n", Some(5), &[]), 1);
    // A target that lives and does not poll is waited for.
    assert_eq!(late(&waits(1, 9000), "G 1010_ 8900_\n", None, &[]), 0);
    assert_eq!(late(&waits(1, 9000), "G 1010_ 7000_\n", None, &[]), 1);
    // Two pauses of who waits.
    let paused = format!("G 1100_ 1600_\n{}", waits(0, 3050));
    let of_kind = |kind| {
        let (begin_ns, end_ns) = ([900 * MS; 2], [5000 * MS; 2]);
        [Fault { kind, place: 0, begin_ns, end_ns }]
    };
    let (cut, stop) = (of_kind(Kind::Cut), of_kind(Kind::Stop));
    assert_eq!(late(&paused, "", None, &cut), 0);
    assert_eq!(late(&waits(0, 3050), "", None, &cut), 1);
    // The machine had no time for one of the two, and as much as that. A stop is no such time.
    let delayed = format!("P 1100_ 2100_\n{}", waits(0, 3050));
    assert_eq!(late(&delayed, "", None, &cut), 0);
    assert_eq!(late(&waits(0, 3050), "P 1100_ 2100_\n", None, &cut), 0);
    assert_eq!(late(&waits(0, 3050), "P 1100_ 1900_\n", None, &cut), 1);
    assert_eq!(late(&delayed, "", None, &stop), 1);
    // A message that may have been announced waits for its receiver, a shorter one does not.
    let sent = |len: u64| format!("E 0 s 1 1000_ 9000_ ok 0 {len}\n");
    let came = "G 1010_ 8900_\nR 0 0 0 0 8990_\n";
    assert_eq!(late(&sent(4097), came, None, &[]), 0);
    assert_eq!(late(&sent(4096), came, None, &[]), 1);
}
