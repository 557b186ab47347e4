//! Placement of a benchmark's two threads, and the distance between their processors.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

use barewire_driver::clock::now_ns;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::Sample;

/// A word with two cache lines of its own, so that no adjacent-line prefetcher shares it.
#[repr(align(128))]
#[derive(Debug, Default)]
pub(crate) struct Line(pub(crate) AtomicU64);

/// The processors of a benchmark: the first two that this process may run on.
#[derive(Clone, Copy, Debug)]
pub struct CpuPair {
    cpus: [usize; 2],
}

impl CpuPair {
    /// Finds the processors.
    ///
    /// # Errors
    /// Why there are not two.
    pub fn find() -> Result<Self, String> {
        // Only once: a pinned thread may run on one processor only.
        static FOUND: OnceLock<Result<CpuPair, String>> = OnceLock::new();
        FOUND.get_or_init(Self::find_allowed).clone()
    }

    fn find_allowed() -> Result<Self, String> {
        let set = sched_getaffinity(Pid::from_raw(0)).map_err(|e| format!("affinity: {e}"))?;
        let mut allowed = (0..CpuSet::count()).filter(|&cpu| set.is_set(cpu).unwrap_or(false));
        match (allowed.next(), allowed.next()) {
            (Some(a), Some(b)) => Ok(Self { cpus: [a, b] }),
            _ => Err("needs two processors, this process may run on one".to_owned()),
        }
    }

    /// The number of the first or second processor.
    pub fn cpu(self, which: usize) -> usize {
        self.cpus[which]
    }

    /// Pins the calling thread to the first or second processor.
    ///
    /// # Errors
    /// The system call's error.
    pub fn pin(self, which: usize) -> Result<(), String> {
        let mut set = CpuSet::new();
        set.set(self.cpus[which]).map_err(|e| format!("cpu {}: {e}", self.cpus[which]))?;
        sched_setaffinity(Pid::from_raw(0), &set).map_err(|e| format!("affinity: {e}"))
    }
}

/// Round trips of a cache line per probe, and per chunk of a probe.
pub(crate) const PROBE: u64 = 20_000;
pub(crate) const CHUNK: u64 = 100;

/// A cache line that bounces between two threads.
#[derive(Debug, Default)]
pub struct BouncedLine {
    ping: Line,
    pong: Line,
}

impl BouncedLine {
    /// The median round trip, nanoseconds, while the other thread [answers](Self::answer).
    pub fn line_ns(&self) -> f64 {
        let start = self.ping.0.load(Acquire);
        let chunks = bounce(&self.ping, &self.pong, start, PROBE, CHUNK);
        chunks.into_iter().collect::<Sample>().median()
    }

    /// The other side of [`line_ns`](Self::line_ns).
    pub fn answer(&self) {
        echo(&self.ping, &self.pong, self.pong.0.load(Acquire), PROBE);
    }
}

/// Bounces a cache line `rounds` times, and returns nanoseconds per round trip for every `chunk` of
/// them.
pub(crate) fn bounce(ping: &Line, pong: &Line, start: u64, rounds: u64, chunk: u64) -> Vec<f64> {
    let mut chunks = Vec::with_capacity((rounds / chunk) as usize);
    let mut at = now_ns();
    for i in 1..=rounds {
        ping.0.store(start + i, Release);
        // Without a pause instruction, which takes longer than the cache line on some processors.
        while pong.0.load(Acquire) != start + i {}
        if i % chunk == 0 {
            let now = now_ns();
            chunks.push((now - at) as f64 / chunk as f64);
            at = now;
        }
    }
    chunks
}

/// The other side of [`bounce`].
pub(crate) fn echo(ping: &Line, pong: &Line, start: u64, rounds: u64) {
    for i in 1..=rounds {
        while ping.0.load(Acquire) != start + i {}
        pong.0.store(start + i, Release);
    }
}
