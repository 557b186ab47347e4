//! Adaptive stores of long buffers that another processor reads next: cached, or non-temporal
//! (bypassing the caches).
//!
//! An ordinary copy stores into the nearest cache of its own processor. A reader that shares an
//! outer cache with it fetches the lines from there. A reader that does not has to fetch each line
//! from the writer's cache, and the writer fetches it back for the next lap of the ring: both wait
//! for that. Non-temporal stores bypass the caches and write to memory, so no line moves between
//! caches. On a Zen 4, two processes, messages through `shm` with rings of 1 MiB out of sixteen
//! buffers; ticks of 0.4 ns that storing 1 KiB takes (medians of several runs), and GB/s:
//!
//! | a line takes | message | cached, ticks | past, ticks | cached, GB/s | past, GB/s |
//! |---|---|---|---|---|---|
//! | 105 to 145 ns | 64 KiB | 79 to 85 | 106 to 123 | 20 to 24 | 9.5 to 12.6 |
//! | 105 to 145 ns | 1 MiB | 207, 213 | 197 to 260 | 9.7, 9.9 | 6.4 to 9.7 |
//! | 490 to 550 ns | 64 KiB | 520 to 613 | 118 to 131 | 3.4 to 5.5 | 8.1 to 12.2 |
//! | 490 to 550 ns | 1 MiB | 471, 489 | 193 to 272 | 3.6 to 4.4 | 5.9 to 9.6 |
//!
//! Which processors share a cache changes when the scheduler, or a hypervisor, migrates the two
//! processes, and a virtual machine often reports caches that it does not have. So the sender
//! measures. The time of a store itself says little: a non-temporal store returns early, and the
//! reader then waits for memory. So a lap of the ring is timed, at whose end the sender waits for
//! the reader as well. From time to time a few laps use the other method; if they are faster, the
//! method changes. (A single cached piece among non-temporal ones would say nothing, since the
//! lines of the ring are in no cache then.)

use super::copy_long;

/// Chooses the copy method by measured throughput. One per reader.
#[derive(Debug)]
pub(crate) struct Stores {
    lap: Lap,
    method: CopyMethod,
    /// Remaining pieces of this lap, and bytes copied in it.
    pieces_left: u32,
    bytes: u64,
    /// Start of the lap, ticks.
    lap_start: u64,
    phase: Phase,
    /// Remaining laps of this phase.
    laps_left: u32,
    /// Ticks per 1 KiB of the fastest measured lap in this phase, and before the trial.
    best_ticks: u32,
    steady_ticks: u32,
    /// Consecutive laps that were much slower.
    slow_laps: u32,
    /// Laps between two trials.
    trial_interval: u32,
}

/// Length of a lap: when the ring's memory is reused.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Lap {
    /// After this many pieces.
    Pieces(u32),
    /// After this many bytes.
    Bytes(u32),
}

impl Lap {
    /// Pieces of `len` bytes; at least one.
    fn pieces(self, len: usize) -> u32 {
        match self {
            Self::Pieces(pieces) => pieces.max(1),
            Self::Bytes(bytes) => bytes / len.max(1) as u32 + 1,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopyMethod {
    Cached,
    NonTemporal,
}

impl CopyMethod {
    fn alternative(self) -> Self {
        match self {
            Self::Cached => Self::NonTemporal,
            Self::NonTemporal => Self::Cached,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// One method is used. The last laps are measured.
    Steady,
    /// The other method is used, but the ring's lines are still where the previous one left them.
    /// Not measured.
    Settling,
    /// The lines are where this method leaves them. All laps are measured.
    Trial,
}

/// Laps measured per phase. The fastest counts, since any may be interrupted or wait for the
/// application.
const LAPS_MEASURED: u32 = 3;
/// Laps before the first trial. Doubled after each failed trial, up to [`TRIAL_INTERVAL_MAX`].
const TRIAL_INTERVAL_MIN: u32 = 8;
/// About a tenth of a second of streaming.
const TRIAL_INTERVAL_MAX: u32 = 1024;

impl Stores {
    /// Shortest piece for which the choice pays, bytes.
    pub(crate) const LONG: usize = 4096;

    /// For a ring whose memory is reused after a `lap`.
    pub(crate) fn new(lap: Lap) -> Self {
        Self {
            lap,
            method: CopyMethod::Cached,
            pieces_left: 0,
            bytes: 0,
            lap_start: 0,
            phase: Phase::Steady,
            laps_left: TRIAL_INTERVAL_MIN,
            best_ticks: u32::MAX,
            steady_ticks: u32::MAX,
            slow_laps: 0,
            trial_interval: TRIAL_INTERVAL_MIN,
        }
    }

    /// Copies like [`ptr::copy_nonoverlapping`](std::ptr::copy_nonoverlapping). A thread that
    /// observes a later Release store of this thread sees all bytes, whichever method was used.
    ///
    /// # Safety
    /// As `copy_nonoverlapping`, and `len` is at least [`LONG`](Self::LONG). Others may write the
    /// source or read the destination meanwhile (D2 in docs/memory.md).
    #[inline(never)]
    pub(crate) unsafe fn copy(&mut self, src: *const u8, dst: *mut u8, len: usize) {
        // SAFETY: the caller's promise, passed on; `supports_nontemporal` was asked first, and the
        // shortest piece is longer than what `copy_nontemporal` needs.
        unsafe {
            if !copy_long::supports_nontemporal() {
                return copy_long::copy_long(src, dst, len);
            }
            match self.next_method(len, copy_long::ticks) {
                CopyMethod::Cached => copy_long::copy_long(src, dst, len),
                CopyMethod::NonTemporal => copy_long::copy_nontemporal(src, dst, len),
            }
        }
    }

    /// Copy method of the next piece of `len` bytes. Reads the clock once per lap.
    #[inline]
    fn next_method(&mut self, len: usize, ticks: impl FnOnce() -> u64) -> CopyMethod {
        if self.pieces_left == 0 {
            self.end_lap(ticks());
            self.pieces_left = self.lap.pieces(len);
        }
        self.pieces_left -= 1;
        self.bytes += len as u64;
        self.method
    }

    /// Ends a lap, unless this is the start of the first.
    #[cold]
    fn end_lap(&mut self, now: u64) {
        let (bytes, took) = (self.bytes, now.saturating_sub(self.lap_start));
        (self.bytes, self.lap_start) = (0, now);
        if let Some(speed) = took.saturating_mul(1024).checked_div(bytes) {
            self.record_lap(u32::try_from(speed).unwrap_or(u32::MAX));
        }
    }

    /// Records `ticks` per 1 KiB of the lap that has just ended.
    fn record_lap(&mut self, ticks: u32) {
        self.laps_left -= 1;
        match self.phase {
            Phase::Steady => {
                self.detect_slowdown(ticks);
                if self.laps_left < LAPS_MEASURED {
                    self.best_ticks = self.best_ticks.min(ticks);
                }
                if self.laps_left == 0 {
                    self.steady_ticks = self.best_ticks;
                    self.enter_phase(self.method.alternative(), Phase::Settling, 1);
                }
            }
            Phase::Settling if self.laps_left == 0 => {
                self.enter_phase(self.method, Phase::Trial, LAPS_MEASURED)
            }
            Phase::Settling => {}
            Phase::Trial => {
                self.best_ticks = self.best_ticks.min(ticks);
                if self.laps_left > 0 {
                    return;
                }
                // Cached is the default; non-temporal has to be faster by a fifth.
                let margin =
                    if self.method == CopyMethod::NonTemporal { self.steady_ticks / 5 } else { 0 };
                if self.best_ticks <= self.steady_ticks - margin {
                    (self.steady_ticks, self.trial_interval) =
                        (self.best_ticks, TRIAL_INTERVAL_MIN);
                    self.enter_phase(self.method, Phase::Steady, self.trial_interval);
                } else {
                    self.trial_interval = (2 * self.trial_interval).min(TRIAL_INTERVAL_MAX);
                    self.enter_phase(self.method.alternative(), Phase::Steady, self.trial_interval);
                }
            }
        }
    }

    fn enter_phase(&mut self, method: CopyMethod, phase: Phase, laps_left: u32) {
        (self.method, self.phase, self.laps_left) = (method, phase, laps_left);
        (self.best_ticks, self.slow_laps) = (u32::MAX, 0);
    }

    /// Starts a trial soon if laps persistently take more than twice as long as before: the
    /// processes may have been migrated. If the application is the cause, the new time becomes the
    /// baseline.
    fn detect_slowdown(&mut self, ticks: u32) {
        self.slow_laps = if ticks / 2 > self.steady_ticks { self.slow_laps + 1 } else { 0 };
        if self.slow_laps > LAPS_MEASURED {
            (self.steady_ticks, self.slow_laps, self.trial_interval) =
                (ticks, 0, TRIAL_INTERVAL_MIN);
            self.laps_left = self.laps_left.min(LAPS_MEASURED);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ticks of 1 KiB of a stream each way, and for what is cached but went past the caches the
    /// last time around, so that its line has to be fetched from memory.
    struct Times {
        cached: u64,
        fetched: u64,
        nontemporal: u64,
    }

    const NEAR: Times = Times { cached: 110, fetched: 300, nontemporal: 230 };
    const NEAR_1MIB: Times = Times { cached: 260, fetched: 400, nontemporal: 290 };
    const APART: Times = Times { cached: 560, fetched: 560, nontemporal: 240 };
    const APART_1MIB: Times = Times { cached: 640, fetched: 640, nontemporal: 310 };

    const LEN: usize = 65_520;

    /// A ring, its sender and their clock.
    struct Ring {
        stores: Stores,
        went: Vec<CopyMethod>,
        sent: usize,
        now: u64,
    }

    impl Ring {
        fn new(lap: Lap) -> Self {
            let went = vec![CopyMethod::Cached; lap.pieces(LEN) as usize];
            Self { stores: Stores::new(lap), went, sent: 0, now: 1 << 40 }
        }

        /// Sends `laps_left`; how many pieces went past the caches.
        fn send(&mut self, laps_left: u32, times: &Times) -> u32 {
            let pieces = laps_left * self.went.len() as u32;
            let mut nontemporal = 0;
            for _ in 0..pieces {
                let method = self.stores.next_method(LEN, || self.now);
                let place = self.sent % self.went.len();
                let before = std::mem::replace(&mut self.went[place], method);
                self.sent += 1;
                let ticks = match (before, method) {
                    (_, CopyMethod::NonTemporal) => times.nontemporal,
                    (CopyMethod::Cached, CopyMethod::Cached) => times.cached,
                    (CopyMethod::NonTemporal, CopyMethod::Cached) => times.fetched,
                };
                // Up to a tenth more or less, and one in 1,009 is interrupted.
                let ticks = ticks * (90 + self.sent as u64 * 7 % 21) / 100;
                self.now += ticks * 64 * if self.sent.is_multiple_of(1009) { 100 } else { 1 };
                nontemporal += u32::from(method == CopyMethod::NonTemporal);
            }
            nontemporal
        }
    }

    /// Goal: pieces are cached where that is fast, and go past the caches where it is not, soon
    /// after the two processors have moved, whatever the first lap of a new ring took. Method:
    /// the times that were measured, messages of 64 KiB and 1 MiB, rings of several lengths.
    #[test]
    fn the_way_follows_the_processors() {
        for (near, apart) in [(NEAR, APART), (NEAR_1MIB, APART_1MIB)] {
            for lap in [Lap::Bytes(1 << 20), Lap::Pieces(32), Lap::Pieces(256)] {
                let mut ring = Ring::new(lap);
                let pieces = lap.pieces(LEN);
                // Pages that are touched for the first time.
                assert_eq!(
                    ring.send(1, &Times { cached: 900, fetched: 900, nontemporal: 1100 }),
                    0
                );
                let tried = ring.send(1000, &near);
                assert!(tried <= 40 * pieces, "{lap:?}: {tried} past the caches at first");
                for _ in 0..3 {
                    let tried = ring.send(2 * TRIAL_INTERVAL_MAX, &near);
                    assert!(tried <= 40 * pieces, "{lap:?}: {tried} past the caches");
                    // Four slow laps, three to compare with, and the first of the trial.
                    let soon = ring.send(16, &apart);
                    assert!(soon >= 4 * pieces, "{lap:?}: {soon} of the first");
                    let nontemporal = ring.send(2 * TRIAL_INTERVAL_MAX, &apart);
                    let least = 2 * TRIAL_INTERVAL_MAX - 60;
                    assert!(
                        nontemporal >= least * pieces,
                        "{lap:?}: {nontemporal} past the caches"
                    );
                    // Back, by a trial.
                    let back = ring.send(TRIAL_INTERVAL_MAX + 8, &near);
                    assert!(back <= TRIAL_INTERVAL_MAX * pieces, "{lap:?}: {back} past the caches");
                    let tried = ring.send(64, &near);
                    assert!(tried <= 16 * pieces, "{lap:?}: {tried} past the caches again");
                }
            }
        }
    }

    /// Goal: an application that pauses in every other lap does not make the way change for long.
    #[test]
    fn pauses_change_nothing() {
        let mut ring = Ring::new(Lap::Pieces(16));
        let mut nontemporal = 0;
        for i in 0..4000_u64 {
            nontemporal += ring.send(1, &NEAR);
            ring.now += (i * 7919 % 13 / 7) * (i * 104_729 % 11) * 500_000;
        }
        assert!(nontemporal <= 4000 * 16 / 8, "{nontemporal} of {}", 4000 * 16);
    }
}
