//! Every fuzz target on any toolchain: its corpus, random bytes, and mutated seeds.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use barewire_dataplane::wire::{Base, Op, TRAILER_LEN, Ty, crc_of_head};
use barewire_driver::frame::RxFrame;
use barewire_fuzz::{Body, TARGETS};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Cases per target and kind; the environment's `FUZZ_FACTOR` multiplies it.
const CASES: u32 = 5_000;

/// Where the random numbers start: `FUZZ_SEED`, as a failure prints it. Otherwise a plain run
/// always starts at the same place, so that one which fails fails again, and a nightly one
/// somewhere new.
fn seed() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let fresh = if is_nightly() { since.map_or(1, |time| time.as_secs()) } else { 1 };
    number("FUZZ_SEED").unwrap_or(fresh)
}

fn is_nightly() -> bool {
    std::env::var_os("BAREWIRE_NIGHTLY").is_some()
}

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    // Another seed than the one that was asked for would repeat nothing.
    Some(value.parse().unwrap_or_else(|_| panic!("{name}=\"{value}\": expected a number")))
}

fn cases(target: &str) -> u32 {
    let factor = number("FUZZ_FACTOR").unwrap_or(if is_nightly() { 100 } else { 1 });
    let factor = u32::try_from(factor).unwrap_or(u32::MAX);
    // What makes whole nodes takes a millisecond.
    let share = match target {
        "session" | "memif" => 5,
        "handshake" => 10,
        "api_calls" => 20,
        _ => 1,
    };
    CASES.saturating_mul(factor) / share
}

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The seeds of a target by file, in the order of their names.
fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let dir = here().join("corpus").join(target);
    let entries = fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} has no seed", dir.display());
    files.into_iter().map(|file| (file.clone(), fs::read(file).unwrap())).collect()
}

#[test]
fn every_seed_passes() {
    for (name, body) in TARGETS {
        for (file, data) in corpus(name) {
            println!("{}", file.display()); // shown when the body panics
            body(&data);
        }
    }
}

/// A target without libFuzzer's file, or without a body, is noticed.
#[test]
fn every_target_is_whole() {
    let manifest = fs::read_to_string(here().join("fuzz_targets/Cargo.toml")).unwrap();
    for (name, _) in TARGETS {
        assert!(manifest.contains(&format!("path = \"{name}.rs\"")), "{name} in the manifest");
        let file = here().join(format!("fuzz_targets/{name}.rs"));
        let text = fs::read_to_string(file).unwrap();
        assert!(text.contains(&format!("barewire_fuzz::{name}(")), "{name}.rs");
    }
    for entry in fs::read_dir(here().join("corpus")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(TARGETS.iter().any(|(target, _)| *target == name), "corpus of {name}");
    }
}

/// The seeds of the parser hold a good frame of each type, and are still good after a change of the
/// format.
#[test]
fn every_type_has_a_seed() {
    let seeds = corpus("frame_parser");
    for ty in Ty::ALL {
        for name in [ty.name().to_lowercase(), format!("{}-crc", ty.name().to_lowercase())] {
            let found = seeds.iter().find(|(file, _)| file.ends_with(&name));
            let rx = RxFrame::new(&found.expect(&name).1);
            let base = Base::parse(&rx).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(Op::parse(&rx, &base).map(|op| op.ty()), Ok(ty), "{name}");
        }
    }
}

/// Threads that share the cases of a target.
fn thread_count(target: &str) -> u8 {
    // Nearly all of its time a memif waits for the kernel to let go of what wakes its other side.
    if target == "memif" { 16 } else { 1 }
}

/// The targets that are given random bytes: all, or the one that `FUZZ_TARGET` names.
fn targets() -> impl Iterator<Item = &'static (&'static str, Body)> {
    let asked = std::env::var("FUZZ_TARGET").ok();
    let is_known = |asked: &String| TARGETS.iter().any(|(name, _)| name == asked);
    assert!(asked.as_ref().is_none_or(is_known), "FUZZ_TARGET={asked:?} is none of them");
    TARGETS.iter().filter(move |(name, _)| asked.as_ref().is_none_or(|asked| asked == name))
}

fn run(name: &str, strategy: impl Strategy<Value = Vec<u8>> + Sync, body: Body) {
    let (seed, count) = (seed(), thread_count(name));
    let work = |thread: u8| {
        let cases = cases(name).div_ceil(count.into());
        let config = Config { cases, failure_persistence: None, ..Config::default() };
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        bytes[8] = thread;
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let mut runner = TestRunner::new_with_rng(config, rng);
        runner.run(&strategy, |data| {
            body(&data);
            Ok(())
        })
    };
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..count).map(|n| scope.spawn(move || work(n))).collect();
        for thread in threads {
            let result = thread.join().expect("proptest catches what panics");
            result.unwrap_or_else(|e| panic!("{name}, FUZZ_SEED={seed}: {e}"));
        }
    });
}

#[test]
fn random_bytes_pass() {
    for (name, body) in targets() {
        run(name, proptest::collection::vec(any::<u8>(), 0..600), *body);
    }
}

/// One change of an input, as libFuzzer would make it.
#[derive(Clone, Debug)]
enum Change {
    Byte(prop::sample::Index, u8),
    Bit(prop::sample::Index, u8),
    Word(prop::sample::Index, u32),
    Cut(prop::sample::Index),
    Append(Vec<u8>),
    /// The right CRC32C at the end, so that what lies behind the check is reached.
    Checksum,
}

fn a_change() -> impl Strategy<Value = Change> {
    let at = any::<prop::sample::Index>;
    let edge = prop_oneof![Just(0), Just(1), Just(u32::MAX), Just(1 << 31), any::<u32>()];
    prop_oneof![
        4 => (at(), prop_oneof![Just(0), Just(0xff), any::<u8>()])
            .prop_map(|(at, b)| Change::Byte(at, b)),
        4 => (at(), 0..8_u8).prop_map(|(at, bit)| Change::Bit(at, bit)),
        2 => (at(), edge).prop_map(|(at, word)| Change::Word(at, word)),
        1 => at().prop_map(Change::Cut),
        1 => proptest::collection::vec(any::<u8>(), 0..64).prop_map(Change::Append),
        1 => Just(Change::Checksum),
    ]
}

fn apply(data: &mut Vec<u8>, change: &Change) {
    if data.is_empty() {
        return;
    }
    let len = data.len();
    match change {
        Change::Byte(at, b) => data[at.index(len)] = *b,
        Change::Bit(at, bit) => data[at.index(len)] ^= 1 << bit,
        Change::Word(at, word) => {
            let at = at.index(len);
            let n = (len - at).min(4);
            data[at..at + n].copy_from_slice(&word.to_le_bytes()[..n]);
        }
        Change::Cut(at) => data.truncate(at.index(len)),
        Change::Append(more) => data.extend_from_slice(more),
        Change::Checksum if len >= 32 + TRAILER_LEN => {
            let crc = crc_of_head(&data[..len - TRAILER_LEN]);
            data[len - TRAILER_LEN..].copy_from_slice(&crc.to_le_bytes());
        }
        Change::Checksum => {}
    }
}

#[test]
fn mutated_seeds_pass() {
    for (name, body) in targets() {
        let seeds: Vec<_> = corpus(name).into_iter().map(|(_, data)| data).collect();
        let changes = proptest::collection::vec(a_change(), 1..6);
        let mutated = (prop::sample::select(seeds), changes).prop_map(|(mut data, changes)| {
            changes.iter().for_each(|change| apply(&mut data, change));
            data
        });
        run(name, mutated, *body);
    }
}
