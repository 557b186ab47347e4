//! The neighbour cache: MACs by IP address, resolved by request, valid for a while, then requested
//! again.
//!
//! The cache has a fixed number of slots, and each address may be in a few of them. An entry is
//! made for a host that frames are sent to, and, while a slot is free, for a host that requests the
//! port's address; so hosts that send requests under many addresses displace no entry. This file
//! sends no frame and reads no clock: it returns the requests that are due.
//!
//! # Chosen addresses
//! Of 8,192 consecutive addresses each has a first slot of its own, so hosts of one network do not
//! collide. Where such a range begins depends on a secret key of each cache. Without the key an
//! attacker who knows the program could compute addresses of other ranges that share the slots of
//! a peer. With nine of them to which frames are sent, as answers to sessions that the attacker
//! opens, the peer would be displaced again and again, at the cost of a request and the frames
//! until its reply. With the key, any two ranges meet at a slot with a probability of one in
//! 8,192, whatever addresses are chosen: the sum of products is a strongly universal hash. The hash
//! need not be a cipher: no frame of a node reveals which hosts share a slot, since an unknown host
//! is answered whether or not there is a slot for it.

use std::hash::{BuildHasher, Hasher, RandomState};

use crate::port::MacAddr;

/// Entries: more than a node has peers.
const ENTRIES: usize = 8192;
/// Consecutive slots where an address may be.
const PROBE_LEN: usize = 8;
/// Bits of the address within a range, and the factor that spreads neighbours in it: odd, so that
/// each has a first slot of its own.
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
const REVALIDATION_REQUESTS: u8 = 4;
/// Requests without an answer until the log reports it.
const REQUESTS_UNTIL_LOG: u8 = 6;

/// A host of the segment: the bits of its IP address that distinguish hosts, never 0.
pub(super) type Host = u32;

/// A request: the host, and the MAC to send it to; `None`: to all.
pub(super) type Request = (Host, Option<MacAddr>);

/// An event of a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// A request is due.
    Request(Request),
    /// Too many requests went unanswered. Once per resolution.
    Unreachable(Host),
}

#[derive(Clone, Copy, Default)]
struct Entry {
    /// 0 if the slot is free.
    ip: Host,
    mac: MacAddr,
    is_known: bool,
    /// A frame was to be sent to the host since the last request.
    is_used: bool,
    /// Requests since the last reply.
    requests: u8,
    /// When the next request is due: the end of validity, or of the retry interval.
    due_ns: u64,
}

/// See the module's documentation.
pub(super) struct NeighbourCache {
    slots: Box<[Entry]>,
    key: HashKey,
    /// Slots in use.
    used: Vec<u16>,
    request_limit: RateLimiter,
    /// A request was outstanding at the last poll, or has been made since.
    is_resolving: bool,
}

/// A token bucket for requests or replies: a thousand per second, [`RateLimiter::BURST`] at once.
pub(super) struct RateLimiter {
    left: u64,
    since_ns: u64,
}

impl RateLimiter {
    pub(super) const BURST: u64 = 64;

    pub(super) fn new() -> Self {
        Self { left: Self::BURST, since_ns: 0 }
    }

    /// Takes a token. False if none is left.
    pub(super) fn allow(&mut self, now_ns: u64) -> bool {
        let more = now_ns.saturating_sub(self.since_ns) / MS;
        if more > 0 {
            self.left = (self.left + more).min(Self::BURST);
            self.since_ns = now_ns;
        }
        let has_one = self.left > 0;
        self.left -= u64::from(has_one);
        has_one
    }
}

/// The effect of a neighbour message on the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CacheUpdate {
    /// No new MAC.
    Unchanged,
    /// The host's MAC was not known.
    New,
    /// The host had this other MAC before.
    Moved(MacAddr),
}

/// The secret key of the hash: where ranges of addresses begin.
#[derive(Clone, Copy)]
struct HashKey(u64, u64);

impl HashKey {
    fn random() -> Self {
        let half = || RandomState::new().build_hasher().finish();
        Self(half(), half())
    }

    /// The first slot of an address.
    #[inline]
    fn first_slot(self, ip: Host) -> usize {
        let row = u64::from(ip >> ROW_BITS).wrapping_mul(self.0).wrapping_add(self.1);
        let begin = (row >> (u64::BITS - ROW_BITS)) as usize;
        (ip as usize).wrapping_mul(SPREAD).wrapping_add(begin) % ENTRIES
    }
}

fn retry_ns(requests: u8) -> u64 {
    (RETRY_NS << requests.min(8)).min(RETRY_MAX_NS)
}

impl NeighbourCache {
    pub(super) fn new() -> Self {
        Self::keyed(HashKey::random())
    }

    fn keyed(key: HashKey) -> Self {
        Self {
            key,
            slots: vec![Entry::default(); ENTRIES + PROBE_LEN].into(),
            used: Vec::with_capacity(ENTRIES + PROBE_LEN),
            request_limit: RateLimiter::new(),
            is_resolving: false,
        }
    }

    /// The MAC of `ip`, if known. Marks the entry as used, so that it is revalidated.
    #[inline]
    pub(super) fn find(&mut self, ip: Host) -> Option<MacAddr> {
        let entry = self.candidates(ip).iter_mut().find(|entry| entry.ip == ip)?;
        entry.is_used = true;
        entry.is_known.then_some(entry.mac)
    }

    /// The MAC of `ip`, if known.
    pub(super) fn known(&mut self, ip: Host) -> Option<MacAddr> {
        let mut known = self.candidates(ip).iter().filter(|entry| entry.is_known);
        known.find(|entry| entry.ip == ip).map(|entry| entry.mac)
    }

    #[inline]
    fn candidates(&mut self, ip: Host) -> &mut [Entry] {
        let at = self.key.first_slot(ip);
        &mut self.slots[at..at + PROBE_LEN]
    }

    /// Starts the resolution of `ip`, which [`find`](Self::find) has not found, for a frame to
    /// send. Returns the request to send; `None` if one is outstanding or the rate is limited.
    pub(super) fn resolve(&mut self, ip: Host, now_ns: u64) -> Option<Request> {
        if self.candidates(ip).iter().any(|entry| entry.ip == ip) {
            return None;
        }
        let may_request = self.request_limit.allow(now_ns);
        let entry = self.allocate(ip, true)?;
        let requests = u8::from(may_request);
        let due_ns = now_ns + retry_ns(requests);
        *entry = Entry { ip, is_used: true, requests, due_ns, ..Entry::default() };
        self.is_resolving = true;
        may_request.then_some((ip, None))
    }

    /// A slot for a new entry. `displaces`: that of an idle entry, if none is free.
    fn allocate(&mut self, ip: Host, displaces: bool) -> Option<&mut Entry> {
        let at = self.key.first_slot(ip);
        let candidates = &self.slots[at..at + PROBE_LEN];
        let free = candidates.iter().position(|entry| entry.ip == 0);
        if let Some(free) = free {
            self.used.push((at + free) as u16);
            return self.slots.get_mut(at + free);
        }
        // Among unused entries, first those without a reply, then the oldest.
        let idle = (0..PROBE_LEN).filter(|&i| displaces && !candidates[i].is_used);
        let idle = idle.min_by_key(|&i| (candidates[i].is_known, candidates[i].due_ns))?;
        self.slots.get_mut(at + idle)
    }

    /// Stores the MAC that a message of `ip` states. `may_add`: also if `ip` has no entry.
    pub(super) fn learn(
        &mut self,
        ip: Host,
        mac: MacAddr,
        now_ns: u64,
        may_add: bool,
    ) -> CacheUpdate {
        let at = self.key.first_slot(ip);
        let known = self.slots[at..at + PROBE_LEN].iter().position(|entry| entry.ip == ip);
        let entry = match known {
            Some(known) => &mut self.slots[at + known],
            None if may_add => {
                let Some(entry) = self.allocate(ip, false) else { return CacheUpdate::Unchanged };
                *entry = Entry { ip, ..Entry::default() };
                entry
            }
            None => return CacheUpdate::Unchanged,
        };
        let (was_known, was) = (entry.is_known, entry.mac);
        (entry.mac, entry.is_known, entry.requests) = (mac, true, 0);
        entry.due_ns = now_ns + FRESH_NS;
        match was_known {
            false => CacheUpdate::New,
            true if was != mac => CacheUpdate::Moved(was),
            true => CacheUpdate::Unchanged,
        }
    }

    /// Expires entries, and passes due requests and unreachable hosts to `due`. Visits every entry.
    pub(super) fn poll(&mut self, now_ns: u64, mut due: impl FnMut(Due)) {
        let Self { slots, used, request_limit, is_resolving, .. } = self;
        *is_resolving = false;
        let mut i = 0;
        while i < used.len() {
            let entry = &mut slots[usize::from(used[i])];
            if entry.poll(now_ns, request_limit, &mut due) {
                i += 1;
                *is_resolving |= !entry.is_known || entry.requests > 0;
            } else {
                *entry = Entry::default();
                used.swap_remove(i);
            }
        }
    }

    /// Whether a request was outstanding at the last [`poll`](Self::poll), which is then to be
    /// called every few milliseconds.
    #[inline]
    pub(super) fn is_resolving(&self) -> bool {
        self.is_resolving
    }
}

impl Entry {
    /// Passes what is due to `due`. False if the entry is to be removed.
    fn poll(
        &mut self,
        now_ns: u64,
        request_limit: &mut RateLimiter,
        due: &mut impl FnMut(Due),
    ) -> bool {
        if now_ns < self.due_ns {
            return true;
        }
        let ip = self.ip;
        let is_confirmed = self.is_known && self.requests == 0;
        if is_confirmed && !self.is_used {
            return now_ns - self.due_ns < IDLE_NS;
        }
        if self.is_known && self.requests >= REVALIDATION_REQUESTS {
            self.is_known = false;
        }
        if !self.is_known && self.requests >= REQUESTS_UNTIL_LOG {
            if !self.is_used {
                return false;
            }
            if self.requests == REQUESTS_UNTIL_LOG {
                due(Due::Unreachable(ip));
            }
        }
        if !request_limit.allow(now_ns) {
            self.due_ns = now_ns + RETRY_NS;
            return true;
        }
        due(Due::Request((ip, is_confirmed.then_some(self.mac))));
        self.requests = (self.requests + 1).min(REQUESTS_UNTIL_LOG + 1);
        self.due_ns = now_ns + retry_ns(self.requests);
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

    fn poll(table: &mut NeighbourCache, now_ns: u64) -> Vec<Due> {
        let mut all = Vec::new();
        table.poll(now_ns, |due| all.push(due));
        all
    }

    #[test]
    fn a_reply_is_valid_for_a_while_and_then_requested_again() {
        let mut table = NeighbourCache::new();
        assert_eq!(table.find(ip(1)), None);
        assert_eq!(table.resolve(ip(1), 0), Some((ip(1), None)));
        assert_eq!(table.resolve(ip(1), 1), None);
        assert!(table.is_resolving());
        assert_eq!(table.learn(ip(1), mac(1), MS, false), CacheUpdate::New);
        assert_eq!(table.find(ip(1)), Some(mac(1)));
        assert_eq!(poll(&mut table, FRESH_NS), []);
        assert!(!table.is_resolving());
        // The entry is used: a unicast request, then broadcast ones.
        let now = MS + FRESH_NS;
        assert_eq!(poll(&mut table, now), [Due::Request((ip(1), Some(mac(1))))]);
        assert_eq!(poll(&mut table, now + 39 * MS), []);
        assert_eq!(poll(&mut table, now + 40 * MS), [Due::Request((ip(1), None))]);
        assert_eq!(table.find(ip(1)), Some(mac(1)));
        assert_eq!(table.learn(ip(1), mac(2), now + 41 * MS, false), CacheUpdate::Moved(mac(1)));
        assert_eq!(table.find(ip(1)), Some(mac(2)));
        assert_eq!(table.learn(ip(1), mac(2), now + 42 * MS, false), CacheUpdate::Unchanged);
    }

    #[test]
    fn an_unused_entry_expires_without_a_request() {
        let mut table = NeighbourCache::new();
        assert_eq!(table.learn(ip(1), mac(1), 0, false), CacheUpdate::Unchanged);
        assert_eq!(table.learn(ip(1), mac(1), 0, true), CacheUpdate::New);
        assert_eq!(poll(&mut table, FRESH_NS + IDLE_NS - 1), []);
        assert_eq!(table.used.len(), 1);
        assert_eq!(poll(&mut table, FRESH_NS + IDLE_NS), []);
        assert!(table.used.is_empty() && table.find(ip(1)).is_none());
        // An old entry is revalidated when a frame is sent to the host.
        table.learn(ip(2), mac(2), 0, true);
        assert_eq!(table.find(ip(2)), Some(mac(2)));
        assert_eq!(poll(&mut table, 2 * FRESH_NS), [Due::Request((ip(2), Some(mac(2))))]);
    }

    /// Goal: requests to a host that does not reply back off, it is reported once, and removed when
    /// no frame is sent there; a host that stops to reply becomes unresolved.
    #[test]
    fn a_host_without_replies_becomes_unresolved() {
        let mut table = NeighbourCache::new();
        table.resolve(ip(1), 0);
        let (mut requests, mut silent, mut now) = (1, 0, 0);
        while now < 10_000 * MS {
            now += MS;
            assert_eq!(table.find(ip(1)), None);
            for due in poll(&mut table, now) {
                match due {
                    Due::Request(_) => requests += 1,
                    Due::Unreachable(_) => silent += 1,
                }
            }
            assert!(now < 2_300 * MS || silent == 1, "{now}");
        }
        assert!((12..=16).contains(&requests), "{requests}");
        for _ in 0..3 {
            now += RETRY_MAX_NS;
            poll(&mut table, now);
        }
        assert!(table.used.is_empty());

        table.learn(ip(2), mac(2), now, true);
        let began = now;
        while table.find(ip(2)).is_some() {
            now += MS;
            poll(&mut table, now);
            assert!(now < began + FRESH_NS + 700 * MS);
        }
        assert!(now > began + FRESH_NS + 500 * MS);
    }

    /// Goal: addresses that collide under one key do not under others, and those of one network of
    /// 8,192 never do.
    #[test]
    fn chosen_addresses_do_not_collide_under_another_key() {
        let key = HashKey(0x9e37_79b9_7f4a_7c15, 7);
        let crowd: Vec<_> =
            (1..).filter(|n| key.first_slot(ip(*n)) == key.first_slot(ip(0))).take(9).collect();
        let meets = |key: HashKey| {
            let near =
                |n: &&u32| key.first_slot(ip(**n)).abs_diff(key.first_slot(ip(0))) < PROBE_LEN;
            crowd.iter().filter(near).count()
        };
        assert_eq!(meets(key), 9);
        let met: usize = (0..1000).map(|_| meets(NeighbourCache::new().key)).sum();
        // 9,000 chances of 15 in 8,192.
        assert!(met < 80, "{met}");

        let mut table = NeighbourCache::new();
        for n in 0..ENTRIES as u32 {
            assert_eq!(table.learn(ip(n), mac(n), 0, true), CacheUpdate::New);
        }
        assert!((0..ENTRIES as u32).all(|n| table.find(ip(n)) == Some(mac(n))));
    }

    /// Goal: a flood of requests displaces no entry in use, and memory and requests are bounded.
    #[test]
    fn a_flood_of_requests_displaces_no_entry_in_use() {
        let mut table = NeighbourCache::new();
        for n in 1..=1000 {
            table.resolve(ip(n), u64::from(n) * MS);
            table.learn(ip(n), mac(n), u64::from(n) * MS, false);
            assert_eq!(table.find(ip(n)), Some(mac(n)));
        }
        for n in 0..100_000 {
            table.learn(ip(0x10_0000 + n), mac(7), 1000 * MS, true);
        }
        assert!((1..=1000).all(|n| table.find(ip(n)) == Some(mac(n))));
        assert!(table.used.len() <= ENTRIES + PROBE_LEN);
        // A host that frames are sent to later gets a slot all the same.
        for n in 2000..2100 {
            assert!(table.resolve(ip(n), 2000 * MS + u64::from(n) * MS).is_some(), "{n}");
        }
        let mut asked = 0;
        table.poll(10_000 * MS, |_| asked += 1);
        assert!(asked <= 64, "{asked}");
    }

    /// Goal: the cache agrees with a plain map, as long as there is room.
    #[test]
    fn the_cache_agrees_with_a_map() {
        let (mut table, mut map) = (NeighbourCache::new(), std::collections::HashMap::new());
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
        assert_eq!(table.used.len(), map.len());
    }
}
