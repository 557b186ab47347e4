//! The neighbour table: hardware addresses by IP address, resolved by request, valid for a while,
//! then requested again.
//!
//! The table has a fixed number of places, and each address has a few where it may be. An entry is
//! made for a host that frames are sent to, and, while a place is free, for one that requests our
//! address; so hosts that send requests under many addresses displace no entry. This file sends no
//! frame and reads no clock: it says which requests are due.
//!
//! # Chosen addresses
//! Of 8,192 consecutive addresses each has a first place of its own, so hosts of one network do not
//! collide. Where such a range begins depends on a secret key of each table. Without the key an
//! attacker who knows the program could compute addresses of other ranges that share the places of
//! a peer. With nine of them to which frames are sent, as answers to sessions that the attacker
//! opens, the peer would be displaced again and again, at the cost of a request and the frames
//! until its answer. With the key, any two ranges meet at a place with a probability of one in
//! 8,192, whatever addresses are chosen: the sum of products is a strongly universal hash. It need
//! not be a cipher: nothing that leaves a node reveals which hosts share a place, since an unknown
//! host is answered whether or not there is a place for it.

use std::hash::{BuildHasher, Hasher, RandomState};

use crate::port::MacAddr;

/// Entries: more than a node has peers.
const ENTRIES: usize = 8192;
/// Places where an address may be.
const WINDOW: usize = 8;
/// Bits of the address within a row, and what spreads neighbours in it: odd, so that each has a
/// place of its own.
const ROW_BITS: u32 = ENTRIES.ilog2();
const SPREAD: usize = 0x13c5;

const MS: u64 = 1_000_000;
/// How long an answer is valid without another request: less than a node waits for a peer (T_dead),
/// so that a host with another NIC is found in time.
pub(super) const FRESH_NS: u64 = 3_000 * MS;
/// How much longer an unused entry is kept.
const IDLE_NS: u64 = 60_000 * MS;
/// Time until a request is repeated: doubles from this to at most a second.
const RETRY_NS: u64 = 20 * MS;
const RETRY_MAX_NS: u64 = 1_000 * MS;
/// Requests to a host that had answered before, until it counts as gone.
const ASKS_AGAIN: u8 = 4;
/// Requests without an answer until the log reports it.
const ASKS: u8 = 6;

/// A host of the segment: the bits of its IP address that distinguish hosts, never 0.
pub(super) type Host = u32;

/// A request: the host, and the hardware address to ask, or all.
pub(super) type Question = (Host, Option<MacAddr>);

/// What is to be done for an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// A request is due.
    Ask(Question),
    /// No answer for long.
    Silent(Host),
}

#[derive(Clone, Copy, Default)]
struct Entry {
    /// 0 if the place is free.
    ip: Host,
    mac: MacAddr,
    is_known: bool,
    /// A frame was to be sent there since this was last checked.
    is_used: bool,
    /// Requests without an answer.
    asks: u8,
    /// When something is due next; the end of its validity if it is known and not being requested.
    due_ns: u64,
}

/// See the module's documentation.
pub(super) struct Neighbours {
    slots: Box<[Entry]>,
    key: Key,
    /// Places that are taken.
    taken: Vec<u16>,
    budget: Budget,
    /// Somebody was asked, when this was looked at.
    is_asking: bool,
}

/// Questions or answers that may be sent: a thousand a second, and some at once.
pub(super) struct Budget {
    left: u64,
    since_ns: u64,
}

impl Budget {
    pub(super) const AT_ONCE: u64 = 64;

    pub(super) fn new() -> Self {
        Self { left: Self::AT_ONCE, since_ns: 0 }
    }

    /// Takes one, if one is left.
    pub(super) fn take(&mut self, now_ns: u64) -> bool {
        let more = now_ns.saturating_sub(self.since_ns) / MS;
        if more > 0 {
            self.left = (self.left + more).min(Self::AT_ONCE);
            self.since_ns = now_ns;
        }
        let has_one = self.left > 0;
        self.left -= u64::from(has_one);
        has_one
    }
}

/// What hearing of a neighbour changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Learned {
    /// Nothing.
    Nothing,
    /// His address is known now.
    New,
    /// He has another address than this one.
    Moved(MacAddr),
}

/// Where rows of addresses begin.
#[derive(Clone, Copy)]
struct Key(u64, u64);

impl Key {
    fn random() -> Self {
        let half = || RandomState::new().build_hasher().finish();
        Self(half(), half())
    }

    /// The first place of an address.
    #[inline]
    fn home(self, ip: Host) -> usize {
        let row = u64::from(ip >> ROW_BITS).wrapping_mul(self.0).wrapping_add(self.1);
        let begin = (row >> (u64::BITS - ROW_BITS)) as usize;
        (ip as usize).wrapping_mul(SPREAD).wrapping_add(begin) % ENTRIES
    }
}

fn retry_ns(asks: u8) -> u64 {
    (RETRY_NS << asks.min(8)).min(RETRY_MAX_NS)
}

impl Neighbours {
    pub(super) fn new() -> Self {
        Self::keyed(Key::random())
    }

    fn keyed(key: Key) -> Self {
        Self {
            key,
            slots: vec![Entry::default(); ENTRIES + WINDOW].into(),
            taken: Vec::with_capacity(ENTRIES + WINDOW),
            budget: Budget::new(),
            is_asking: false,
        }
    }

    /// The hardware address of `ip`, to send a frame to, if it is known.
    #[inline]
    pub(super) fn find(&mut self, ip: Host) -> Option<MacAddr> {
        let entry = self.window(ip).iter_mut().find(|entry| entry.ip == ip)?;
        entry.is_used = true;
        entry.is_known.then_some(entry.mac)
    }

    /// The hardware address of `ip`, if it is known.
    pub(super) fn known(&mut self, ip: Host) -> Option<MacAddr> {
        let mut known = self.window(ip).iter().filter(|entry| entry.is_known);
        known.find(|entry| entry.ip == ip).map(|entry| entry.mac)
    }

    #[inline]
    fn window(&mut self, ip: Host) -> &mut [Entry] {
        let at = self.key.home(ip);
        &mut self.slots[at..at + WINDOW]
    }

    /// A frame is to be sent to `ip`, which [`find`](Self::find) did not know: what to ask, unless
    /// that was asked.
    pub(super) fn want(&mut self, ip: Host, now_ns: u64) -> Option<Question> {
        if self.window(ip).iter().any(|entry| entry.ip == ip) {
            return None;
        }
        let may_ask = self.budget.take(now_ns);
        let entry = self.place(ip, true)?;
        let asks = u8::from(may_ask);
        let due_ns = now_ns + retry_ns(asks);
        *entry = Entry { ip, is_used: true, asks, due_ns, ..Entry::default() };
        self.is_asking = true;
        may_ask.then_some((ip, None))
    }

    /// A place for a new entry; `displaces`: that of another one, if none is free.
    fn place(&mut self, ip: Host, displaces: bool) -> Option<&mut Entry> {
        let at = self.key.home(ip);
        let window = &self.slots[at..at + WINDOW];
        let free = window.iter().position(|entry| entry.ip == 0);
        if let Some(free) = free {
            self.taken.push((at + free) as u16);
            return self.slots.get_mut(at + free);
        }
        // Those that nobody sends to, and of these who has not answered, and who did long ago.
        let idle = (0..WINDOW).filter(|&i| displaces && !window[i].is_used);
        let idle = idle.min_by_key(|&i| (window[i].is_known, window[i].due_ns))?;
        self.slots.get_mut(at + idle)
    }

    /// `ip` has the hardware address `mac`, it says. `adds`: also if nobody asked.
    pub(super) fn learn(&mut self, ip: Host, mac: MacAddr, now_ns: u64, adds: bool) -> Learned {
        let at = self.key.home(ip);
        let known = self.slots[at..at + WINDOW].iter().position(|entry| entry.ip == ip);
        let entry = match known {
            Some(known) => &mut self.slots[at + known],
            None if adds => {
                let Some(entry) = self.place(ip, false) else { return Learned::Nothing };
                *entry = Entry { ip, ..Entry::default() };
                entry
            }
            None => return Learned::Nothing,
        };
        let (was_known, was) = (entry.is_known, entry.mac);
        (entry.mac, entry.is_known, entry.asks) = (mac, true, 0);
        entry.due_ns = now_ns + FRESH_NS;
        match was_known {
            false => Learned::New,
            true if was != mac => Learned::Moved(was),
            true => Learned::Nothing,
        }
    }

    /// Does what is due and says what that is. Costs a look at every entry.
    pub(super) fn turn(&mut self, now_ns: u64, mut due: impl FnMut(Due)) {
        let Self { slots, taken, budget, is_asking, .. } = self;
        *is_asking = false;
        let mut i = 0;
        while i < taken.len() {
            let entry = &mut slots[usize::from(taken[i])];
            if entry.turn(now_ns, budget, &mut due) {
                i += 1;
                *is_asking |= !entry.is_known || entry.asks > 0;
            } else {
                *entry = Entry::default();
                taken.swap_remove(i);
            }
        }
    }

    /// Whether somebody has been asked and had not answered at the last [`turn`](Self::turn), which
    /// is then to be called every few milliseconds.
    #[inline]
    pub(super) fn is_asking(&self) -> bool {
        self.is_asking
    }
}

impl Entry {
    /// Does what is due. False if it is to be forgotten.
    fn turn(&mut self, now_ns: u64, budget: &mut Budget, due: &mut impl FnMut(Due)) -> bool {
        if now_ns < self.due_ns {
            return true;
        }
        let ip = self.ip;
        let rests = self.is_known && self.asks == 0;
        if rests && !self.is_used {
            return now_ns - self.due_ns < IDLE_NS;
        }
        if self.is_known && self.asks >= ASKS_AGAIN {
            self.is_known = false;
        }
        if !self.is_known && self.asks >= ASKS {
            if !self.is_used {
                return false;
            }
            if self.asks == ASKS {
                due(Due::Silent(ip));
            }
        }
        if !budget.take(now_ns) {
            self.due_ns = now_ns + RETRY_NS;
            return true;
        }
        due(Due::Ask((ip, rests.then_some(self.mac))));
        self.asks = (self.asks + 1).min(ASKS + 1);
        self.due_ns = now_ns + retry_ns(self.asks);
        self.is_used = false;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(n: u32) -> Host {
        0x0a00_0000 + n
    }

    fn mac(n: u32) -> MacAddr {
        let [a, b, c, d] = n.to_be_bytes();
        MacAddr([2, 0, a, b, c, d])
    }

    fn turn(table: &mut Neighbours, now_ns: u64) -> Vec<Due> {
        let mut all = Vec::new();
        table.turn(now_ns, |due| all.push(due));
        all
    }

    #[test]
    fn an_answer_is_believed_for_a_while_and_then_asked_for_again() {
        let mut table = Neighbours::new();
        assert_eq!(table.find(ip(1)), None);
        assert_eq!(table.want(ip(1), 0), Some((ip(1), None)));
        assert_eq!(table.want(ip(1), 1), None);
        assert!(table.is_asking());
        assert_eq!(table.learn(ip(1), mac(1), MS, false), Learned::New);
        assert_eq!(table.find(ip(1)), Some(mac(1)));
        assert_eq!(turn(&mut table, FRESH_NS), []);
        assert!(!table.is_asking());
        // It is used, so he is asked himself, and everybody if he does not answer.
        let now = MS + FRESH_NS;
        assert_eq!(turn(&mut table, now), [Due::Ask((ip(1), Some(mac(1))))]);
        assert_eq!(turn(&mut table, now + 39 * MS), []);
        assert_eq!(turn(&mut table, now + 40 * MS), [Due::Ask((ip(1), None))]);
        assert_eq!(table.find(ip(1)), Some(mac(1)));
        assert_eq!(table.learn(ip(1), mac(2), now + 41 * MS, false), Learned::Moved(mac(1)));
        assert_eq!(table.find(ip(1)), Some(mac(2)));
        assert_eq!(table.learn(ip(1), mac(2), now + 42 * MS, false), Learned::Nothing);
    }

    #[test]
    fn one_who_is_not_sent_to_is_forgotten_unasked() {
        let mut table = Neighbours::new();
        assert_eq!(table.learn(ip(1), mac(1), 0, false), Learned::Nothing);
        assert_eq!(table.learn(ip(1), mac(1), 0, true), Learned::New);
        assert_eq!(turn(&mut table, FRESH_NS + IDLE_NS - 1), []);
        assert_eq!(table.taken.len(), 1);
        assert_eq!(turn(&mut table, FRESH_NS + IDLE_NS), []);
        assert!(table.taken.is_empty() && table.find(ip(1)).is_none());
        // One that is old is asked when it is sent to.
        table.learn(ip(2), mac(2), 0, true);
        assert_eq!(table.find(ip(2)), Some(mac(2)));
        assert_eq!(turn(&mut table, 2 * FRESH_NS), [Due::Ask((ip(2), Some(mac(2))))]);
    }

    /// Goal: who does not answer is asked ever more seldom, told of once, and forgotten when
    /// nobody sends there; who stops to answer is not sent to after a while.
    #[test]
    fn silence_ends_a_belief() {
        let mut table = Neighbours::new();
        table.want(ip(1), 0);
        let (mut asks, mut silent, mut now) = (1, 0, 0);
        while now < 10_000 * MS {
            now += MS;
            assert_eq!(table.find(ip(1)), None);
            for due in turn(&mut table, now) {
                match due {
                    Due::Ask(_) => asks += 1,
                    Due::Silent(_) => silent += 1,
                }
            }
            assert!(now < 2_300 * MS || silent == 1, "{now}");
        }
        assert!((12..=16).contains(&asks), "{asks}");
        for _ in 0..3 {
            now += RETRY_MAX_NS;
            turn(&mut table, now);
        }
        assert!(table.taken.is_empty());

        table.learn(ip(2), mac(2), now, true);
        let began = now;
        while table.find(ip(2)).is_some() {
            now += MS;
            turn(&mut table, now);
            assert!(now < began + FRESH_NS + 700 * MS);
        }
        assert!(now > began + FRESH_NS + 500 * MS);
    }

    /// Goal: addresses that crowd under one key do not under others, and those of one network of
    /// 8,192 never do.
    #[test]
    fn who_chooses_addresses_crowds_nobody() {
        let key = Key(0x9e37_79b9_7f4a_7c15, 7);
        let crowd: Vec<_> = (1..).filter(|n| key.home(ip(*n)) == key.home(ip(0))).take(9).collect();
        let meets = |key: Key| {
            let near = |n: &&u32| key.home(ip(**n)).abs_diff(key.home(ip(0))) < WINDOW;
            crowd.iter().filter(near).count()
        };
        assert_eq!(meets(key), 9);
        let met: usize = (0..1000).map(|_| meets(Neighbours::new().key)).sum();
        // 9,000 chances of 15 in 8,192.
        assert!(met < 80, "{met}");

        let mut table = Neighbours::new();
        for n in 0..ENTRIES as u32 {
            assert_eq!(table.learn(ip(n), mac(n), 0, true), Learned::New);
        }
        assert!((0..ENTRIES as u32).all(|n| table.find(ip(n)) == Some(mac(n))));
    }

    /// Goal: whoever floods displaces nobody who is sent to, and memory and questions are bounded.
    #[test]
    fn a_flood_of_strangers_changes_nothing() {
        let mut table = Neighbours::new();
        for n in 1..=1000 {
            table.want(ip(n), u64::from(n) * MS);
            table.learn(ip(n), mac(n), u64::from(n) * MS, false);
            assert_eq!(table.find(ip(n)), Some(mac(n)));
        }
        for n in 0..100_000 {
            table.learn(ip(0x10_0000 + n), mac(7), 1000 * MS, true);
        }
        assert!((1..=1000).all(|n| table.find(ip(n)) == Some(mac(n))));
        assert!(table.taken.len() <= ENTRIES + WINDOW);
        // Who is sent to later has a place all the same.
        for n in 2000..2100 {
            assert!(table.want(ip(n), 2000 * MS + u64::from(n) * MS).is_some(), "{n}");
        }
        let mut asked = 0;
        table.turn(10_000 * MS, |_| asked += 1);
        assert!(asked <= 64, "{asked}");
    }

    /// Goal: the table says what a plain map does, as long as there is room.
    #[test]
    fn a_table_is_a_map() {
        let (mut table, mut map) = (Neighbours::new(), std::collections::HashMap::new());
        let mut state = 7_u64;
        let mut next = |n: u64| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 33) % n
        };
        for step in 0..100_000 {
            let n = next(500) as u32 + 1;
            match next(3) {
                0 => {
                    let to = mac(next(1 << 20) as u32);
                    table.learn(ip(n), to, step, true);
                    map.insert(n, to);
                }
                _ => assert_eq!(table.find(ip(n)), map.get(&n).copied(), "step {step}"),
            }
        }
        assert_eq!(table.taken.len(), map.len());
    }
}
