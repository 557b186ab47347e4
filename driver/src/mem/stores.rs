//! How a long piece is stored that another processor reads next.
//!
//! Any copy stores into the nearest cache of its own processor. A reader that shares a larger cache
//! with it fetches the lines from there. One that does not takes each line from the other's cache,
//! and the writer takes it back the next time around, which is what both then wait for. Stored past
//! all caches the lines go to memory, and nobody takes anything from anybody. On a Zen 4, two
//! processes, messages through `shm` of 1 MiB rings; ticks of 0.4 ns that 1 KiB takes at the sender
//! (medians of several runs), and GB/s:
//!
//! | a line takes | message | cached, ticks | past, ticks | cached, GB/s | past, GB/s |
//! |---|---|---|---|---|---|
//! | 105 to 145 ns | 64 KiB | 79 to 85 | 106 to 123 | 20 to 24 | 9.5 to 12.6 |
//! | 105 to 145 ns | 1 MiB | 207, 213 | 197 to 260 | 9.7, 9.9 | 6.4 to 9.7 |
//! | 490 to 550 ns | 64 KiB | 520 to 613 | 118 to 131 | 3.4 to 5.5 | 8.1 to 12.2 |
//! | 490 to 550 ns | 1 MiB | 471, 489 | 193 to 272 | 3.6 to 4.4 | 5.9 to 9.6 |
//!
//! Who shares which cache with whom changes as the scheduler, or a hypervisor, moves the two, and a
//! virtual machine is often told of caches that it does not have. So the sender looks at the clock:
//! some of its pieces are timed each way, and the way is changed when the times say so.

use super::long;

/// Chooses how long pieces are stored, by what it saw before. One per reader.
#[derive(Debug, Default)]
pub(crate) struct Stores {
    /// Pieces so far.
    count: u32,
    /// Ticks that 1 KiB past the caches took, a low estimate; 0 before the first piece.
    past: u32,
    /// Votes that caching is slow, up to [`VOTES`]; with [`ENOUGH`] it is believed.
    votes: u8,
}

const VOTES: u8 = 8;
const ENOUGH: u8 = VOTES / 2;

/// One piece in so many is timed while they are cached, which is the usual state.
const TIMED: u32 = 8;
/// One piece in so many is cached while the others are not.
const TRIED_CACHED: u32 = 32;
/// One piece in so many goes past the caches while the others are cached.
const TRIED_PAST: u32 = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Cached,
    Past,
}

impl Stores {
    /// Bytes of the shortest piece that is worth it.
    pub(crate) const LONG: usize = 4096;

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
            if !long::can_copy_past() {
                return long::copy_long(src, dst, len);
            }
            let (way, is_timed) = self.next();
            let copy = match way {
                Way::Cached => long::copy_long,
                Way::Past => long::copy_past,
            };
            if !is_timed {
                return copy(src, dst, len);
            }
            let start = long::ticks();
            copy(src, dst, len);
            let ticks = long::ticks().saturating_sub(start);
            self.note(way, u32::try_from(ticks * 1024 / len as u64).unwrap_or(u32::MAX));
        }
    }

    /// Which way the next piece goes, and whether its time is [noted](Self::note).
    #[inline]
    fn next(&mut self) -> (Way, bool) {
        self.count = self.count.wrapping_add(1);
        let count = self.count;
        if self.votes >= ENOUGH {
            return match count.is_multiple_of(TRIED_CACHED) {
                true => (Way::Cached, true),
                false => (Way::Past, true),
            };
        }
        // Often at first, since what a new ring lies in is touched for the first time then.
        if count.is_multiple_of(TRIED_PAST) || count.is_power_of_two() {
            return (Way::Past, true);
        }
        (Way::Cached, count.is_multiple_of(TIMED))
    }

    /// 1 KiB stored in this `way` took so many `ticks`.
    fn note(&mut self, way: Way, ticks: u32) {
        match way {
            // A piece may be interrupted and last for ever, but none is faster than it can be.
            Way::Past if self.past == 0 => self.past = ticks.max(1),
            Way::Past => self.past = ticks.clamp(1, self.past.saturating_add(self.past / 16 + 1)),
            // What the reader does not wait for, the time at the sender does not show.
            Way::Cached if ticks > self.past.saturating_add(self.past / 2) => {
                self.votes = (self.votes + 1).min(VOTES);
            }
            Way::Cached => self.votes = self.votes.saturating_sub(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends `pieces` where 1 KiB takes so many ticks each way; how many went past the caches.
    fn send(stores: &mut Stores, pieces: u32, cached: u32, past: u32) -> u32 {
        (0..pieces).fold(0, |past_so_far, i| {
            let (way, is_timed) = stores.next();
            let ticks = if way == Way::Past { past } else { cached };
            // Up to a tenth more or less, and each 101st piece is interrupted.
            let ticks = ticks * (90 + i * 7 % 21) / 100;
            if is_timed {
                stores.note(way, if i % 101 == 100 { ticks << 14 } else { ticks });
            }
            past_so_far + u32::from(way == Way::Past)
        })
    }

    /// Goal: pieces are cached where that is fast, and go past the caches where it is not, soon
    /// after the two processors have moved, whatever the first pieces of a new ring took. Method:
    /// the times that were measured, messages of 64 KiB and 1 MiB.
    #[test]
    fn the_way_follows_the_processors() {
        for (near, apart) in [((80, 110), (500, 120)), ((210, 240), (430, 250))] {
            let mut stores = Stores::default();
            // Pages that are touched for the first time, in one lap of the ring.
            let first = send(&mut stores, 31, 900, 1100) + send(&mut stores, 992, near.0, near.1);
            assert!(first <= 10, "{first} of the first 1,023 past the caches");
            for _ in 0..3 {
                let tried = send(&mut stores, 10_240, near.0, near.1);
                assert!(tried <= 12, "{near:?}: {tried} of 10,240 past the caches");
                let soon = send(&mut stores, 10 * TIMED, apart.0, apart.1);
                assert!(soon >= TIMED, "{apart:?}: {soon} of the first {}", 10 * TIMED);
                let past = send(&mut stores, 3200, apart.0, apart.1);
                assert!(past >= 3200 - 3200 / 32 - 4, "{apart:?}: {past} of 3,200");
                // Back, by one piece in 32.
                send(&mut stores, 10 * TRIED_CACHED, near.0, near.1);
            }
        }
    }
}
