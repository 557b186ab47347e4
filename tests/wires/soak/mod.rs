//! The soak: six processes work on each other over a bridge and over memory, while they are
//! killed and stopped and their links fail in every way, and all that they posted is audited.
//!
//! Runs for 20 seconds, nightly for 2 hours, or for `SOAK_MINUTES`. A failure prints the seed of
//! what was drawn (`SOAK_SEED`) and leaves the ledgers where it says; with `SOAK_LEDGERS` those are
//! audited once more.

mod audit;
mod faults;
pub(crate) mod flood;
mod ledger;
pub(crate) mod process;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use barewire_tests::nodes::{FABRIC, Nodes, or_skip};

use crate::start;
use crate::supervisor::{Segment, Worker};
use faults::Faults;
use ledger::Life;
use process::now_ns;

/// Processes.
pub(crate) const PLACES: usize = 6;

/// Silence after which a peer is dead.
pub(crate) const T_DEAD: Duration = Duration::from_secs(1);

/// The node with the bridge, whose port to node `n` is `port<n>`, and that of the foreign station.
const SWITCH: usize = PLACES;
const STRANGER: usize = PLACES + 1;

/// Bytes that interfaces and bridge carry.
const MTU: usize = 9000;

/// The processes that live, and the lives of all that ever did.
struct Crew<'a> {
    nodes: &'a Nodes,
    segment: &'a Segment,
    dir: &'a Path,
    seed: u64,
    workers: Vec<Option<Worker>>,
    lives: Vec<Life>,
}

impl Crew<'_> {
    /// Starts the next life of a place and introduces it and the others to each other.
    fn start(&mut self, place: usize) {
        let life = self.lives.len() as u64;
        let ports = format!("afpacket:{FABRIC} {}", self.segment.port());
        let mut worker = start(self.nodes, place, "soak", &ports);
        let ledger = self.dir.join(format!("life-{life}"));
        worker.say(&format!("BEGIN {life} {} {}", self.seed ^ life << 32, ledger.display()));
        for (other, peer) in self.workers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            let known = self.lives.iter().rposition(|life| life.place == other);
            let known = known.expect("it was started");
            worker.say(&format!("PEER {other} {known} {}", peer.addr));
            peer.say(&format!("PEER {place} {life} {}", worker.addr));
        }
        self.workers[place] = Some(worker);
        self.lives.push(Life { place, killed_ns: None, died_ns: None, ledger });
    }

    fn kill(&mut self, place: usize) {
        let worker = self.workers[place].take().expect("it lives");
        let killed_ns = now_ns();
        worker.kill();
        let life = self.lives.iter_mut().rfind(|life| life.place == place);
        let life = life.expect("it was started");
        (life.killed_ns, life.died_ns) = (Some(killed_ns), Some(now_ns()));
    }

    fn living(&mut self) -> impl Iterator<Item = &mut Worker> {
        self.workers.iter_mut().flatten()
    }

    /// Nobody has ended whom nobody killed.
    fn look(&mut self) {
        self.living().for_each(|worker| assert!(!worker.try_answer("nothing")));
    }

    /// Every operation ends, who has lost a message is told, and everything is given back.
    fn finish(mut self) -> Vec<Life> {
        self.living().for_each(|worker| worker.say("QUIET"));
        self.living().for_each(|worker| assert_eq!(worker.answer("DRAINED"), ""));
        self.living().for_each(|worker| worker.say("LAST"));
        self.living().for_each(|worker| assert_eq!(worker.answer("TOLD"), ""));
        std::thread::sleep(Duration::from_secs(1));
        self.living().for_each(|worker| worker.say("STOP"));
        for worker in self.workers.iter_mut().flatten() {
            let levels = worker.answer("LEVELS");
            assert!(levels.starts_with("0 "), "{}: not given back: {levels}", worker.name);
        }
        self.workers.into_iter().flatten().for_each(Worker::finish);
        self.lives
    }
}

/// A bridge that joins everybody.
fn joined() -> Result<Nodes, String> {
    let nodes = Nodes::new(PLACES + 2)?;
    nodes.bridge(SWITCH, "br0", MTU)?;
    for node in (0..PLACES).chain([STRANGER]) {
        let port = format!("port{node}");
        nodes.veth([(node, FABRIC), (SWITCH, &port)], MTU)?;
        nodes.plug(SWITCH, &port, "br0")?;
    }
    // What drops frames by their length.
    nodes.run(0, "nft list ruleset")?;
    Ok(nodes)
}

/// What a wait may be longer than its bound: a second in the daily run, beside which other tests
/// work on the same processors.
fn slack() -> Duration {
    let alone = ["SOAK_MINUTES", "BAREWIRE_NIGHTLY", "SOAK_LEDGERS"];
    let alone = alone.iter().any(|name| std::env::var_os(name).is_some());
    Duration::from_secs(if alone { 0 } else { 1 })
}

fn duration() -> Duration {
    let minutes = std::env::var("SOAK_MINUTES").ok().map(|n| n.parse::<f64>().unwrap());
    let nightly = std::env::var_os("BAREWIRE_NIGHTLY").map(|_| 120.0);
    Duration::from_secs_f64(60.0 * minutes.or(nightly).unwrap_or(20.0 / 60.0))
}

/// Goal: every operation ends once, and within the bound that the documents state, and no message
/// is lost that nobody is told of, whatever happens to processes and to the network. Method: faults
/// drawn from a seed, and an audit of everything that was posted and received (`audit.rs`).
#[test]
fn soak() {
    if let Ok(dir) = std::env::var("SOAK_LEDGERS") {
        let (lives, faults) = ledger::read_faults(Path::new(&dir));
        let wrong = audit::audit(&lives, &faults, slack());
        return assert!(wrong.is_empty(), "{} violations:\n{}", wrong.len(), show(&wrong));
    }
    let Some(nodes) = or_skip(joined()) else { return };
    let seed = std::env::var("SOAK_SEED")
        .map_or(u64::from(std::process::id()), |seed| seed.parse().expect("SOAK_SEED is a number"));
    let time = duration();
    println!("soak: {:.1} minutes, SOAK_SEED={seed}", time.as_secs_f64() / 60.0);
    let segment = Segment::new("soak");
    let dir = tempfile::tempdir().unwrap();
    // Kept, unless all is well.
    let path: PathBuf = dir.keep();
    println!("soak: ledgers in {}", path.display());
    let mut crew = Crew {
        nodes: &nodes,
        segment: &segment,
        dir: &path,
        seed,
        workers: (0..PLACES).map(|_| None).collect(),
        lives: Vec::new(),
    };
    let mut faults = Faults::new(&nodes, seed);
    (0..PLACES).for_each(|place| crew.start(place));
    let start = Instant::now();
    while start.elapsed() < time {
        faults.turn(&mut crew);
        crew.look();
        std::thread::sleep(Duration::from_millis(2));
    }
    let faults = faults.finish(&mut crew);
    let lives = crew.finish();
    ledger::write_faults(&path, &lives, &faults);
    let wrong = audit::audit(&lives, &faults, slack());
    assert!(wrong.is_empty(), "SOAK_SEED={seed}: {} violations:\n{}", wrong.len(), show(&wrong));
    std::fs::remove_dir_all(&path).unwrap();
}

/// The first of many.
fn show(wrong: &[String]) -> String {
    wrong[..wrong.len().min(40)].join("\n")
}
