//! A timer wheel: one deadline for each of many ids.
//!
//! 512 slots of 16.384 microseconds, 8.4 ms per revolution. A deadline is rounded up to a slot, so
//! a timer expires at most one slot late and never early. A timer beyond the revolution waits in
//! the farthest slot and is moved when that slot is due. Rearming a timer with a later deadline
//! only stores the deadline, since most timers are postponed many times before they expire: the
//! timer is moved when its old slot is due.
//!
//! Invariant: every occupied slot stands for one tick of `cur..cur + 512`.

use crate::idx::{Idx, NONE};
use crate::types::Instant;

/// A slot's width in nanoseconds, as a power of two.
const TICK_SHIFT: u32 = 14;
/// A slot's width, nanoseconds: the largest delay of an expiry.
const TICK_NS: u64 = 1 << TICK_SHIFT;
/// Slots of the wheel.
const SLOTS: usize = 512;
/// Words of the bitmap of occupied slots.
const WORDS: usize = SLOTS / 64;
/// The list, beyond the slots, of ids whose slot was due before their deadline. Empty outside of
/// one [`Wheel::expire`] call.
const LATER: u16 = SLOTS as u16;
/// The slot of an id that is not armed.
const UNARMED: u16 = u16::MAX;
/// The highest tick: 146 years from the start of time.
const TICK_MAX: u64 = (1 << 48) - 1;

/// A timer wheel for ids below a fixed number.
///
/// Time must not go backwards: a `now` before an earlier one expires nothing early, but a timer
/// armed then may expire late by the difference.
#[derive(Debug)]
pub struct Wheel<K> {
    /// No timer is due before this time, nanoseconds. Never later than the earliest slot.
    due_ns: u64,
    /// The latest `now` of a caller, nanoseconds.
    now_ns: u64,
    /// Every slot before this tick is empty.
    cur: u64,
    len: u32,
    id_max: u32,
    occupied: [u64; WORDS],
    heads: [K; SLOTS + 1],
    timers: Vec<Timer<K>>,
    /// Ids and slots that [`expire`](Self::expire) has visited.
    #[cfg(test)]
    steps: usize,
}

/// The timer of one id, 16 bytes.
#[derive(Clone, Copy, Debug)]
struct Timer<K> {
    prev: K,
    next: K,
    /// Tick of the deadline in the upper bits, current slot in the lower 16.
    key: u64,
}

impl<K: Idx> Timer<K> {
    const IDLE: Self = Self { prev: K::NONE, next: K::NONE, key: UNARMED as u64 };

    fn tick(self) -> u64 {
        self.key >> 16
    }

    fn slot(self) -> u16 {
        self.key as u16
    }
}

impl<K: Idx> Wheel<K> {
    /// A wheel for the ids `0..n`, none of them armed. Reserves 16 bytes per id, touched when the
    /// id is first armed.
    pub fn new(n: usize, now: Instant) -> Self {
        assert!(n < NONE as usize, "wheel: {n} ids do not fit an index");
        Self {
            due_ns: u64::MAX,
            now_ns: now.0,
            cur: now.0 >> TICK_SHIFT,
            len: 0,
            id_max: n as u32,
            occupied: [0; WORDS],
            heads: [K::NONE; SLOTS + 1],
            timers: Vec::with_capacity(n),
            #[cfg(test)]
            steps: 0,
        }
    }

    /// Enlarges the wheel to the ids `0..n`. Armed timers stay armed.
    pub fn enlarge(&mut self, n: usize) {
        assert!(n < NONE as usize, "wheel: {n} ids do not fit an index");
        self.id_max = self.id_max.max(n as u32);
        self.timers.reserve(n.saturating_sub(self.timers.len()));
    }

    /// Arms `id`, or rearms it, to expire at `at`. A deadline in the past expires in the next
    /// [`expire`](Self::expire).
    ///
    /// # Panics
    /// If `id` is not below the wheel's number of ids.
    #[inline]
    pub fn arm(&mut self, id: K, at: Instant) {
        let tick = tick_after(at);
        match self.timers.get_mut(id.get() as usize) {
            Some(timer) if timer.slot() != UNARMED => {
                let slot = timer.slot();
                timer.key = (tick << 16) | u64::from(slot);
                if slot == LATER || tick >= tick_of(self.cur, slot) {
                    return; // moved when the slot it stands in is due
                }
                self.unlink(id);
            }
            Some(_) => {}
            None => self.touch(id),
        }
        if self.len == 0 {
            // No slot is occupied, so the wheel may turn to the present at once.
            self.cur = self.cur.max(self.now_ns >> TICK_SHIFT);
        }
        let slot_tick = self.link(id, tick);
        self.due_ns = self.due_ns.min(slot_tick << TICK_SHIFT);
    }

    /// Disarms `id`, if it is armed.
    #[inline]
    pub fn disarm(&mut self, id: K) {
        if self.is_armed(id) {
            self.unlink(id);
        }
    }

    /// Whether `id` is armed.
    #[inline]
    pub fn is_armed(&self, id: K) -> bool {
        self.timers.get(id.get() as usize).is_some_and(|t| t.slot() != UNARMED)
    }

    /// Number of armed ids.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether no id is armed.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Time of the next [`expire`](Self::expire): at most one slot after the earliest deadline, and
    /// before it if that deadline was postponed or is beyond the revolution.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.heads[LATER as usize] != K::NONE {
            return Some(Instant(self.cur << TICK_SHIFT));
        }
        self.first_occupied().map(|tick| Instant(tick << TICK_SHIFT))
    }

    /// Removes and returns one id whose deadline has passed; call it until `None`. Costs a
    /// comparison while nothing is due, and a scan of 512 bits at most however far `now` has
    /// advanced.
    ///
    /// An id that is armed for a time not after `now` during the caller's loop is returned in the
    /// same loop.
    #[inline]
    pub fn expire(&mut self, now: Instant) -> Option<K> {
        self.now_ns = now.0;
        if now.0 < self.due_ns {
            return None;
        }
        self.expire_due(now.0 >> TICK_SHIFT)
    }

    /// Whether no timer is due at `now`. If so, it has the effect of an [`expire`](Self::expire)
    /// that returned `None`.
    #[inline]
    pub fn passes(&mut self, now: Instant) -> bool {
        let passes = now.0 < self.due_ns;
        if passes {
            self.now_ns = now.0;
        }
        passes
    }

    /// Whether no timer is due at `then` or before.
    #[inline]
    pub fn is_idle_until(&self, then: Instant) -> bool {
        then.0 < self.due_ns
    }

    #[cold]
    fn expire_due(&mut self, now_tick: u64) -> Option<K> {
        loop {
            #[cfg(test)]
            {
                self.steps += 1;
            }
            match self.first_occupied() {
                Some(tick) if tick <= now_tick => {
                    self.cur = tick;
                    let id = self.heads[tick as usize % SLOTS];
                    let deadline = self.timers[id.get() as usize].tick();
                    self.unlink(id);
                    if deadline <= now_tick {
                        return Some(id);
                    }
                    // The id's slot may stand for an earlier tick until `cur` has advanced to
                    // `now`.
                    self.link_slot(id, deadline, LATER);
                }
                next => {
                    self.cur = self.cur.max(now_tick);
                    if self.heads[LATER as usize] == K::NONE {
                        self.due_ns = next.map_or(u64::MAX, |tick| tick << TICK_SHIFT);
                        return None;
                    }
                    self.place_later();
                }
            }
        }
    }

    /// Moves the ids of the [`LATER`] list into their slots.
    fn place_later(&mut self) {
        loop {
            let id = self.heads[LATER as usize];
            if id == K::NONE {
                return;
            }
            #[cfg(test)]
            {
                self.steps += 1;
            }
            let deadline = self.timers[id.get() as usize].tick();
            self.unlink(id);
            self.link(id, deadline);
        }
    }

    /// The tick of the earliest occupied slot.
    fn first_occupied(&self) -> Option<u64> {
        if self.len == 0 {
            return None;
        }
        let start = self.cur as usize % SLOTS;
        let (word, bit) = (start / 64, start % 64);
        // The first word is scanned twice: upwards from `start`, and at the end for the bits below.
        let upper = self.occupied[word] & (u64::MAX << bit);
        for i in 0..=WORDS {
            let at = (word + i) % WORDS;
            let bits = if i == 0 { upper } else { self.occupied[at] };
            if bits != 0 {
                let slot = at * 64 + bits.trailing_zeros() as usize;
                return Some(tick_of(self.cur, slot as u16));
            }
        }
        None
    }

    /// Links `id` into the slot of its deadline, and returns the tick of that slot.
    fn link(&mut self, id: K, tick: u64) -> u64 {
        let slot_tick = tick.clamp(self.cur, self.cur + SLOTS as u64 - 1);
        self.link_slot(id, tick, (slot_tick % SLOTS as u64) as u16);
        slot_tick
    }

    fn link_slot(&mut self, id: K, tick: u64, slot: u16) {
        let next = self.heads[slot as usize];
        if next != K::NONE {
            self.timers[next.get() as usize].prev = id;
        }
        self.timers[id.get() as usize] =
            Timer { prev: K::NONE, next, key: (tick << 16) | u64::from(slot) };
        self.heads[slot as usize] = id;
        if slot != LATER {
            self.occupied[slot as usize / 64] |= 1 << (slot % 64);
        }
        self.len += 1;
    }

    fn unlink(&mut self, id: K) {
        let timer = std::mem::replace(&mut self.timers[id.get() as usize], Timer::IDLE);
        let slot = timer.slot();
        if timer.next != K::NONE {
            self.timers[timer.next.get() as usize].prev = timer.prev;
        }
        if timer.prev != K::NONE {
            self.timers[timer.prev.get() as usize].next = timer.next;
        } else {
            self.heads[slot as usize] = timer.next;
            if timer.next == K::NONE && slot != LATER {
                self.occupied[slot as usize / 64] &= !(1 << (slot % 64));
            }
        }
        self.len -= 1;
    }

    #[cold]
    fn touch(&mut self, id: K) {
        assert!(id.get() < self.id_max, "wheel: id {} of {}", id.get(), self.id_max);
        self.timers.resize(id.get() as usize + 1, Timer::IDLE);
    }
}

/// The first tick that begins at or after `at`.
const fn tick_after(at: Instant) -> u64 {
    let tick = at.0.saturating_add(TICK_NS - 1) >> TICK_SHIFT;
    if tick < TICK_MAX { tick } else { TICK_MAX }
}

/// The tick that `slot` stands for while the wheel is at `cur`.
const fn tick_of(cur: u64, slot: u16) -> u64 {
    cur + ((slot as u64).wrapping_sub(cur) % SLOTS as u64)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const IDS: u32 = 24;

    #[derive(Clone, Copy, Debug)]
    enum Op {
        /// Arms an id for a time relative to now, nanoseconds.
        Arm(u32, i64),
        Disarm(u32),
        /// Advances time by nanoseconds and expires at most so many ids.
        Pass(u64, usize),
    }

    /// From less than a slot to hours, with the exact boundaries of slots and of the wheel.
    fn distance() -> impl Strategy<Value = u64> {
        const AROUND: u64 = SLOTS as u64 * TICK_NS;
        prop_oneof![
            0..TICK_NS * 3,
            (0u64..1030).prop_map(|ticks| ticks * TICK_NS),
            0..AROUND + 10,
            (0u64..3).prop_map(|d| AROUND - 1 + d),
            0..AROUND * 40,
            0..36_000_000_000_000u64,
        ]
    }

    fn op() -> impl Strategy<Value = Op> {
        let pass = (distance(), prop_oneof![Just(usize::MAX), 0usize..3]);
        prop_oneof![
            6 => (0..IDS, distance()).prop_map(|(id, d)| Op::Arm(id, d as i64)),
            1 => (0..IDS, distance()).prop_map(|(id, d)| Op::Arm(id, -(d as i64))),
            1 => (0..IDS).prop_map(|id| Op::Arm(id, i64::MAX)),
            2 => (0..IDS).prop_map(Op::Disarm),
            5 => pass.prop_map(|(ns, most)| Op::Pass(ns, most)),
        ]
    }

    /// The latest time at which a deadline must have expired.
    fn bound(at: u64) -> u64 {
        at.saturating_add(TICK_NS - 1)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        /// The wheel compared with a map from id to deadline. No timer expires early, more than a
        /// slot late, or twice; and the next deadline is not later than that.
        #[test]
        fn wheel_is_a_map_of_deadlines(
            start in prop_oneof![0..2 * TICK_NS, 1u64 << 40..1 << 41],
            ops in prop::collection::vec(op(), 1..120),
        ) {
            let mut now = start;
            let mut wheel = Wheel::new(IDS as usize, Instant(now));
            let mut model: BTreeMap<u32, u64> = BTreeMap::new();
            for op in ops {
                match op {
                    Op::Arm(id, d) => {
                        let at = now.saturating_add_signed(d);
                        wheel.arm(id, Instant(at));
                        model.insert(id, at);
                    }
                    Op::Disarm(id) => {
                        wheel.disarm(id);
                        model.remove(&id);
                    }
                    Op::Pass(ns, most) => {
                        now += ns;
                        let mut done = false;
                        for _ in 0..most {
                            let Some(id) = wheel.expire(Instant(now)) else {
                                done = true;
                                break;
                            };
                            let at = model.remove(&id);
                            prop_assert!(at.is_some_and(|at| at <= now), "{id}: {at:?} at {now}");
                        }
                        if done {
                            prop_assert!(model.values().all(|&at| bound(at) > now));
                            let next = wheel.next_deadline();
                            prop_assert!(next.is_none_or(|at| at.0 > now), "the caller spins");
                        }
                    }
                }
                prop_assert_eq!(wheel.len(), model.len());
                prop_assert!((0..IDS).all(|id| wheel.is_armed(id) == model.contains_key(&id)));
                let next = wheel.next_deadline();
                prop_assert_eq!(next.is_some(), !model.is_empty());
                if let (Some(next), Some(&first)) = (next, model.values().min()) {
                    // A timer that was due before expires in the next call, whenever that is.
                    prop_assert!(next.0 <= bound(first.max(now)), "{next:?} for {first} at {now}");
                }
            }
        }
    }

    /// A caller that sleeps until the next deadline each time receives every id in time, also one
    /// hours away.
    #[test]
    fn following_the_next_deadline_finds_every_timer() {
        let mut wheel = Wheel::new(4, Instant(5));
        let at = [1_000, 20_000_000, 3_600_000_000_000, 3_600_000_000_001];
        for (id, at) in at.iter().enumerate() {
            wheel.arm(id as u32, Instant(*at));
        }
        let mut rounds = 0;
        let mut seen = Vec::new();
        while let Some(now) = wheel.next_deadline() {
            rounds += 1;
            while let Some(id) = wheel.expire(now) {
                assert!(at[id as usize] <= now.0 && now.0 <= bound(at[id as usize]));
                seen.push(id);
            }
        }
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2, 3]);
        // One revolution of the wheel per 8.4 ms of the hour.
        assert!(rounds < 3_600_000 / 8 + 10, "{rounds}");
    }

    /// An advance by hours, with every slot occupied and as many deadlines still ahead: each id is
    /// visited a fixed number of times, and an empty slot costs nothing.
    #[test]
    fn a_jump_of_hours_handles_each_id_a_few_times() {
        const HOUR: u64 = 3_600_000_000_000;
        let mut wheel = Wheel::new(4096, Instant(0));
        for id in 0..4096u32 {
            let at = if id % 2 == 0 { u64::from(id) * 4096 } else { 11 * HOUR + u64::from(id) };
            wheel.arm(id, Instant(at));
        }
        let mut due = 0;
        while wheel.expire(Instant(10 * HOUR)).is_some() {
            due += 1;
        }
        assert_eq!((due, wheel.len()), (2048, 2048));
        assert!(wheel.steps < 3 * 4096, "{} steps", wheel.steps);
        assert!(wheel.next_deadline().is_some_and(|at| at.0 > 10 * HOUR));
        while wheel.expire(Instant(12 * HOUR)).is_some() {
            due += 1;
        }
        assert_eq!((due, wheel.len()), (4096, 0));
    }

    /// The usual timer: postponed at every packet, never expired. The list is not touched, and the
    /// wheel visits the timer once per revolution.
    #[test]
    fn pushing_a_timer_on_is_lazy() {
        let mut wheel = Wheel::new(1, Instant(0));
        let mut now = 0;
        for _ in 0..100_000 {
            now += 1_000;
            wheel.arm(0, Instant(now + 1_000_000));
            assert_eq!(wheel.expire(Instant(now)), None);
        }
        // 100 ms in all, a timer of 1 ms: one visit of four steps each millisecond.
        assert!(wheel.steps <= 4 * 102, "{} steps", wheel.steps);
        now += 1_000_000 + TICK_NS;
        assert_eq!(wheel.expire(Instant(now)), Some(0));
    }

    #[test]
    fn an_id_costs_16_bytes() {
        assert_eq!(size_of::<Timer<u32>>(), 16);
    }

    #[test]
    #[should_panic(expected = "id 3 of 3")]
    fn an_id_past_the_end_panics() {
        Wheel::new(3, Instant(0)).arm(3, Instant(1));
    }
}
