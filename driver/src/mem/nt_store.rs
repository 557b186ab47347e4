//! How to store a long piece of memory that another processor reads next: through the caches, or
//! past them.
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
//! Which processors share a cache changes when the scheduler, or a hypervisor, moves the two
//! processes, and a virtual machine often reports caches that it does not have. So the sender
//! measures. The time of a store itself says little: a non-temporal store returns early, and the
//! reader then waits for memory. So a lap of the ring is timed, at whose end the sender waits for
//! the reader as well. From time to time a few laps use the other method; if they are faster, the
//! method changes. (A single cached piece among non-temporal ones would say nothing, since the
//! lines of the ring are in no cache then.)

use super::copy_long;

/// Chooses how long pieces are stored, by what it saw before. One per reader.
#[derive(Debug)]
pub(crate) struct Stores {
    lap: Lap,
    way: Way,
    /// Pieces that this lap still has, and bytes that it has had.
    left: u32,
    bytes: u64,
    /// When it began, ticks.
    began: u64,
    phase: Phase,
    /// Laps that this phase still has.
    laps: u32,
    /// Ticks that 1 KiB took in the fastest lap that counts of this phase, and before a trial.
    best: u32,
    usual: u32,
    /// Laps in a row that were slower by far.
    slow: u32,
    /// Laps from one trial to the next.
    wait: u32,
}

/// After how many pieces a ring's memory is written again.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Lap {
    /// So many.
    Pieces(u32),
    /// As many as have so many bytes.
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
enum Way {
    Cached,
    Past,
}

impl Way {
    fn other(self) -> Self {
        match self {
            Self::Cached => Self::Past,
            Self::Past => Self::Cached,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// All goes the same way. The last laps count.
    Stay,
    /// It goes the other way, and the ring's lines are still where the way before has left them.
    Settle,
    /// They are where this one leaves them. All laps count.
    Trial,
}

/// Laps that count. The fastest does, as any may be interrupted, or wait for the application.
const COUNTED: u32 = 3;
/// Laps before the first trial. Twice as many before each one after that, up to [`WAIT_MAX`], while
/// the other way is no better.
const WAIT_MIN: u32 = 8;
/// A tenth of a second of a stream.
const WAIT_MAX: u32 = 1024;

impl Stores {
    /// Bytes of the shortest piece that is worth it.
    pub(crate) const LONG: usize = 4096;

    /// For a ring whose memory is written again after a `lap`.
    pub(crate) fn new(lap: Lap) -> Self {
        Self {
            lap,
            way: Way::Cached,
            left: 0,
            bytes: 0,
            began: 0,
            phase: Phase::Stay,
            laps: WAIT_MIN,
            best: u32::MAX,
            usual: u32::MAX,
            slow: 0,
            wait: WAIT_MIN,
        }
    }

    /// Copies like [`ptr::copy_nonoverlapping`](std::ptr::copy_nonoverlapping). All bytes are
    /// visible to whoever sees a later Release store of this thread, whichever way they went.
    ///
    /// # Safety
    /// As `copy_nonoverlapping`, and `len` is at least [`LONG`](Self::LONG). Others may write the
    /// source or read the destination meanwhile (D2 in docs/memory.md).
    #[inline(never)]
    pub(crate) unsafe fn copy(&mut self, src: *const u8, dst: *mut u8, len: usize) {
        // SAFETY: the caller's promise, passed on; `can_copy_past` was asked first, and the
        // shortest piece is longer than what `copy_past` needs.
        unsafe {
            if !copy_long::can_copy_past() {
                return copy_long::copy_long(src, dst, len);
            }
            match self.next(len, copy_long::ticks) {
                Way::Cached => copy_long::copy_long(src, dst, len),
                Way::Past => copy_long::copy_past(src, dst, len),
            }
        }
    }

    /// Which way the next piece goes, of `len` bytes. Looks at the clock once a lap.
    #[inline]
    fn next(&mut self, len: usize, ticks: impl FnOnce() -> u64) -> Way {
        if self.left == 0 {
            self.end_lap(ticks());
            self.left = self.lap.pieces(len);
        }
        self.left -= 1;
        self.bytes += len as u64;
        self.way
    }

    /// A lap has ended, unless this is the beginning of the first.
    #[cold]
    fn end_lap(&mut self, now: u64) {
        let (bytes, took) = (self.bytes, now.saturating_sub(self.began));
        (self.bytes, self.began) = (0, now);
        if let Some(speed) = took.saturating_mul(1024).checked_div(bytes) {
            self.note(u32::try_from(speed).unwrap_or(u32::MAX));
        }
    }

    /// 1 KiB of the lap that has just ended took so many `ticks`.
    fn note(&mut self, ticks: u32) {
        self.laps -= 1;
        match self.phase {
            Phase::Stay => {
                self.look_for_change(ticks);
                if self.laps < COUNTED {
                    self.best = self.best.min(ticks);
                }
                if self.laps == 0 {
                    self.usual = self.best;
                    self.go(self.way.other(), Phase::Settle, 1);
                }
            }
            Phase::Settle if self.laps == 0 => self.go(self.way, Phase::Trial, COUNTED),
            Phase::Settle => {}
            Phase::Trial => {
                self.best = self.best.min(ticks);
                if self.laps > 0 {
                    return;
                }
                // Caching is usual, and past the caches has to be faster by a fifth.
                let margin = if self.way == Way::Past { self.usual / 5 } else { 0 };
                if self.best <= self.usual - margin {
                    (self.usual, self.wait) = (self.best, WAIT_MIN);
                    self.go(self.way, Phase::Stay, self.wait);
                } else {
                    self.wait = (2 * self.wait).min(WAIT_MAX);
                    self.go(self.way.other(), Phase::Stay, self.wait);
                }
            }
        }
    }

    fn go(&mut self, way: Way, phase: Phase, laps: u32) {
        (self.way, self.phase, self.laps) = (way, phase, laps);
        (self.best, self.slow) = (u32::MAX, 0);
    }

    /// Has the trial come soon when laps take more than twice as long as they did, for good: the
    /// processors may have moved. If it is the application, that is what is usual from now on.
    fn look_for_change(&mut self, ticks: u32) {
        self.slow = if ticks / 2 > self.usual { self.slow + 1 } else { 0 };
        if self.slow > COUNTED {
            (self.usual, self.slow, self.wait) = (ticks, 0, WAIT_MIN);
            self.laps = self.laps.min(COUNTED);
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
        past: u64,
    }

    const NEAR: Times = Times { cached: 110, fetched: 300, past: 230 };
    const NEAR_1MIB: Times = Times { cached: 260, fetched: 400, past: 290 };
    const APART: Times = Times { cached: 560, fetched: 560, past: 240 };
    const APART_1MIB: Times = Times { cached: 640, fetched: 640, past: 310 };

    const LEN: usize = 65_520;

    /// A ring, its sender and their clock.
    struct Ring {
        stores: Stores,
        went: Vec<Way>,
        sent: usize,
        now: u64,
    }

    impl Ring {
        fn new(lap: Lap) -> Self {
            let went = vec![Way::Cached; lap.pieces(LEN) as usize];
            Self { stores: Stores::new(lap), went, sent: 0, now: 1 << 40 }
        }

        /// Sends `laps`; how many pieces went past the caches.
        fn send(&mut self, laps: u32, times: &Times) -> u32 {
            let pieces = laps * self.went.len() as u32;
            let mut past = 0;
            for _ in 0..pieces {
                let way = self.stores.next(LEN, || self.now);
                let place = self.sent % self.went.len();
                let before = std::mem::replace(&mut self.went[place], way);
                self.sent += 1;
                let ticks = match (before, way) {
                    (_, Way::Past) => times.past,
                    (Way::Cached, Way::Cached) => times.cached,
                    (Way::Past, Way::Cached) => times.fetched,
                };
                // Up to a tenth more or less, and one in 1,009 is interrupted.
                let ticks = ticks * (90 + self.sent as u64 * 7 % 21) / 100;
                self.now += ticks * 64 * if self.sent.is_multiple_of(1009) { 100 } else { 1 };
                past += u32::from(way == Way::Past);
            }
            past
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
                assert_eq!(ring.send(1, &Times { cached: 900, fetched: 900, past: 1100 }), 0);
                let tried = ring.send(1000, &near);
                assert!(tried <= 40 * pieces, "{lap:?}: {tried} past the caches at first");
                for _ in 0..3 {
                    let tried = ring.send(2 * WAIT_MAX, &near);
                    assert!(tried <= 40 * pieces, "{lap:?}: {tried} past the caches");
                    // Four slow laps, three to compare with, and the first of the trial.
                    let soon = ring.send(16, &apart);
                    assert!(soon >= 4 * pieces, "{lap:?}: {soon} of the first");
                    let past = ring.send(2 * WAIT_MAX, &apart);
                    let least = 2 * WAIT_MAX - 60;
                    assert!(past >= least * pieces, "{lap:?}: {past} past the caches");
                    // Back, by a trial.
                    let back = ring.send(WAIT_MAX + 8, &near);
                    assert!(back <= WAIT_MAX * pieces, "{lap:?}: {back} past the caches");
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
        let mut past = 0;
        for i in 0..4000_u64 {
            past += ring.send(1, &NEAR);
            ring.now += (i * 7919 % 13 / 7) * (i * 104_729 % 11) * 500_000;
        }
        assert!(past <= 4000 * 16 / 8, "{past} of {}", 4000 * 16);
    }
}
