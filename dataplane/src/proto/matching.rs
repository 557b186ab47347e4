//! Matching of messages with posted receives, for one endpoint and one kind of message.
//!
//! A receive names a tag, the bits of it to ignore, and a source or any source. A message goes to
//! the receive posted first of those it matches; a receive takes the message that arrived first.
//!
//! Receives that ignore no bit are in a hash table by tag, the others in one list in posting order.
//! Each chain of the table is in posting order too, so a message compares the first match of its
//! chain with the first of the list, by sequence number, and no list contains all receives.
//! Unexpected messages are in a table by tag and in one list in order of arrival: a receive with
//! ignored bits searches the list.
//!
//! Untagged messages match with tag 0 and nothing ignored, in a matcher of one bucket.
//!
//! The entries are in pools that all matchers of a node share. An entry stays with the matcher it
//! was given to: passing its index to another matcher is a bug in this library.

use std::marker::PhantomData;

use barewire_driver::hint::cold;

use crate::idx::{Idx, PeerIdx, RecvIdx, UnexpectedIdx};
use crate::plant::{Bug, planted};
use crate::slab::{Link, Linked, List, Slab, Slots, SlotsMut};
use crate::table::{self, Vacant};
use crate::types::Tenant;

/// A sender, as a receive names it and a message carries it.
///
/// | bits | |
/// |---|---|
/// | 0..16 | endpoint |
/// | 16..40 | peer |
/// | 40..48 | tenant |
/// | 62 | set: a receive takes messages of any sender of the tenant |
/// | 63 | set: unknown sender |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Src(pub u64);

impl Src {
    /// As a receive's source: messages from any sender. No message has this source.
    pub const ANY: Self = Self(u64::MAX);

    /// As a message's source: a sender of which the node knows nothing. No receive names it.
    pub const UNKNOWN: Self = Self(1 << 63);

    /// Endpoint `ep` of peer number `peer`.
    #[inline]
    pub const fn of(peer: PeerIdx, ep: u16) -> Self {
        Self((peer.get() as u64) << 16 | ep as u64)
    }

    /// The same sender, as a peer of `tenant`.
    #[inline]
    pub const fn with_tenant(self, tenant: Tenant) -> Self {
        Self(self.0 | (tenant.get() as u64) << Self::TENANT_AT)
    }

    /// As a receive's source: messages from any sender of `tenant`. No message has this source.
    pub const fn any_of(tenant: Tenant) -> Self {
        Self(Self::ANY_OF).with_tenant(tenant)
    }

    const TENANT_AT: u32 = 40;
    const ANY_OF: u64 = 1 << 62;

    #[inline(always)]
    const fn accepts(self, from: Self) -> bool {
        self.0 == from.0 || self.0 == Self::ANY.0 || self.accepts_tenant(from)
    }

    #[inline(always)]
    const fn accepts_tenant(self, from: Self) -> bool {
        self.0 ^ from.0 & 0xff << Self::TENANT_AT == Self::ANY_OF
    }
}

/// A posted receive. In a free slot, [`post_simple`](Matcher::post_simple) finds the fields that
/// are equal in all receives it posts.
#[derive(Debug)]
pub struct Posted<P> {
    /// The tag to match.
    pub tag: u64,
    /// Bits of the tag to ignore.
    pub ignore: u64,
    /// The sender to match, or [`Src::ANY`].
    pub src: Src,
    /// Data of the endpoint.
    pub payload: P,
    seq: u64,
    link: Link<RecvIdx>,
}

impl<P: Vacant> Vacant for Posted<P> {
    fn vacant() -> Self {
        let (payload, link) = (P::vacant(), Link::default());
        Self { tag: 0, ignore: 0, src: Src::ANY, payload, seq: 0, link }
    }
}

/// A message that has arrived before its receive was posted.
#[derive(Debug)]
pub struct Unexpected<U> {
    /// Its tag.
    pub tag: u64,
    /// Its sender.
    pub src: Src,
    /// Data of the endpoint.
    pub payload: U,
    chain: Link<UnexpectedIdx>,
    arrival: Link<UnexpectedIdx>,
}

/// The posted receives of a node: a slot is in use while its receive is posted, and after
/// [`unlink_posted`](Matcher::unlink_posted) until it is freed.
pub type PostedPool<P> = table::Table<Posted<P>, (), RecvIdx>;

/// The unexpected messages of a node, with slots in use as those of [`PostedPool`].
pub type UnexpectedPool<U> = Slab<Unexpected<U>, (), UnexpectedIdx>;

/// The endpoint's data of a receive.
pub trait Receive: Vacant {
    /// Whether a matching message that fits ends the receive, without further checks.
    fn is_simple(&self) -> bool;
}

/// Link of a table chain, or of the list of receives that ignore bits.
const CHAIN: usize = 0;
/// Link of the list of unexpected messages in order of arrival.
const ARRIVAL: usize = 1;

/// Default number of chains of a matcher.
pub const BUCKETS: usize = 256;

/// The posted receives and unexpected messages of one endpoint and kind.
///
/// It has tables of `N` chains, a power of two: 16 bytes each, touched when a tag falls on them. A
/// match takes as many probes as receives share a chain, so `N` should be the usual number of
/// posted receives.
#[derive(Debug)]
pub struct Matcher<const N: usize = BUCKETS> {
    posted: Table<N, RecvIdx>,
    wild: List<CHAIN, u32, RecvIdx>,
    /// Number of receives posted; of these, number taken out by [`take_first`](Self::take_first),
    /// and number of others that are no longer posted. The third wraps.
    seq: u64,
    taken: u64,
    unlinked: u32,
    /// Number of posted receives that are not simple, ignore bits or name a source; plus [`SHUT`].
    /// While this is 0, the first receive of a tag takes the next message with that tag.
    special: u32,
    unexpected: Table<N, UnexpectedIdx>,
    arrivals: List<ARRIVAL, u32, UnexpectedIdx>,
}

/// Flag in [`Matcher::special`]: the fast path takes no messages. No pool has this many receives.
const SHUT: u32 = 1 << 31;

impl<const N: usize> Default for Matcher<N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const N: usize> Matcher<N> {
    /// An empty matcher.
    pub fn new() -> Self {
        Self {
            posted: Table::new(),
            wild: List::new(),
            seq: 0,
            taken: 0,
            unlinked: 0,
            special: 0,
            unexpected: Table::new(),
            arrivals: List::new(),
        }
    }

    /// Appends a receive and returns its index. The caller has checked for an unexpected message
    /// first.
    ///
    /// # Errors
    /// `payload`, if the pool is full. Nothing was posted.
    #[inline]
    pub fn post<P: Receive>(
        &mut self,
        pool: &mut PostedPool<P>,
        tag: u64,
        ignore: u64,
        src: Src,
        payload: P,
    ) -> Result<RecvIdx, P> {
        if pool.is_full() {
            return Err(payload);
        }
        self.special += u32::from(is_special(ignore, src, &payload));
        let idx = if ignore == 0 {
            pool.make_free();
            self.post_exact(pool, tag, src, |there| *there = payload)
        } else {
            let (seq, link) = (self.seq, Link::default());
            let idx = pool.alloc(Posted { tag, ignore, src, payload, seq, link });
            let idx = idx.expect("a free slot was checked");
            self.wild.push_back(pool, idx);
            self.seq = seq + 1;
            Some(idx)
        };
        Ok(idx.expect("a free slot was checked"))
    }

    /// [`post`](Self::post) for a simple receive that ignores no bit and takes messages from any
    /// source. `make` fills the payload of a vacant or simple slot. `None`, and nothing posted, if
    /// the pool is full or has no used slot yet.
    #[inline(always)]
    pub fn post_simple<P: Receive>(
        &mut self,
        pool: &mut PostedPool<P>,
        tag: u64,
        make: impl FnOnce(&mut P),
    ) -> Option<RecvIdx> {
        let make = |payload: &mut P| {
            make(payload);
            debug_assert!(payload.is_simple());
        };
        self.post_exact(pool, tag, Src::ANY, make)
    }

    /// Appends a receive that ignores no bit, and has been counted in `special` if need be.
    #[inline(always)]
    fn post_exact<P: Receive>(
        &mut self,
        pool: &mut PostedPool<P>,
        tag: u64,
        src: Src,
        make: impl FnOnce(&mut P),
    ) -> Option<RecvIdx> {
        let ends = self.posted.ends(tag);
        let (idx, posted) = pool.alloc_again()?;
        // The other fields are equal in all freed slots.
        debug_assert!((posted.ignore, posted.src) == (0, Src::ANY));
        debug_assert!(posted.link == Link::default());
        (posted.tag, posted.seq) = (tag, self.seq);
        make(&mut posted.payload);
        if src != Src::ANY {
            posted.src = src;
        }
        let before: RecvIdx = named_by(std::mem::replace(&mut ends[1], end_of(idx)));
        if before == RecvIdx::NONE {
            ends[0] = end_of(idx);
        } else {
            posted.link.prev = before;
            pool[before].link.next = idx;
        }
        self.seq += 1;
        Some(idx)
    }

    /// The receive for a message from `src` with `tag`: of those that match, the one posted first.
    /// It stays posted.
    #[inline]
    pub fn match_posted<P>(&self, pool: &PostedPool<P>, src: Src, tag: u64) -> Option<RecvIdx> {
        self.scan_posted(pool, src, tag, || {})
    }

    /// [`match_posted`](Self::match_posted), calling `probe` for every receive compared.
    #[inline]
    fn scan_posted<P>(
        &self,
        pool: &PostedPool<P>,
        src: Src,
        tag: u64,
        mut probe: impl FnMut(),
    ) -> Option<RecvIdx> {
        let mut exact = self.posted.head(tag);
        while exact != RecvIdx::NONE {
            probe();
            let posted = &pool[exact];
            if posted.tag == tag && posted.src.accepts(src) {
                break;
            }
            exact = posted.link.next;
        }
        let mut wild = self.wild.head;
        if wild == RecvIdx::NONE {
            return some(exact);
        }
        let before = if exact == RecvIdx::NONE { u64::MAX } else { pool[exact].seq };
        while wild != RecvIdx::NONE {
            probe();
            let posted = &pool[wild];
            if posted.seq > before && !planted(Bug::WildcardOrderIgnored) {
                break;
            }
            if (posted.tag ^ tag) & !posted.ignore == 0 && posted.src.accepts(src) {
                return Some(wild);
            }
            wild = posted.link.next;
        }
        some(exact)
    }

    /// [`match_posted`](Self::match_posted) and, if `last` returns that the receive takes no
    /// further message, [`unlink_posted`](Self::unlink_posted) in one.
    pub fn take_posted<P: Receive>(
        &mut self,
        pool: &mut PostedPool<P>,
        src: Src,
        tag: u64,
        last: impl Fn(&P) -> bool,
    ) -> Option<RecvIdx> {
        let idx = self.match_posted(pool, src, tag)?;
        if last(&pool[idx].payload) {
            self.unlink_posted(pool, idx);
        }
        Some(idx)
    }

    /// [`match_posted`](Self::match_posted) for the common case: the receive is the first of its
    /// chain and simple, none that ignores bits is posted, and `take` accepts it. Its slot is
    /// freed, but keeps its value until it is reused. `None`, and nothing has changed, otherwise.
    #[inline(always)]
    pub fn take_first<'a, P: Receive, R>(
        &mut self,
        pool: &'a mut PostedPool<P>,
        src: impl FnOnce() -> Src,
        tag: u64,
        take: impl FnOnce(&P) -> Option<R>,
    ) -> Option<(R, &'a Posted<P>)> {
        let ends = self.posted.ends(tag);
        let idx = named_by(ends[0]);
        let posted = pool.at_mut(idx)?;
        if posted.tag != tag {
            return cold(None);
        }
        let Some(taken) = take(&posted.payload) else {
            return cold(None);
        };
        // Otherwise it takes messages from any source, and the source of this one need not be
        // known.
        if self.special != 0 {
            cold(());
            let named = posted.src != Src::ANY;
            if self.special & SHUT != 0
                || self.wild.head != RecvIdx::NONE
                || !posted.payload.is_simple()
                || named && !posted.src.accepts(src())
            {
                return None;
            }
            self.special -= u32::from(named);
            posted.src = Src::ANY;
        }
        if ends[0] == ends[1] {
            let posted = pool.discard(idx);
            *ends = [0; 2];
            self.taken += 1;
            return Some((taken, posted));
        }
        let next = std::mem::replace(&mut posted.link.next, RecvIdx::NONE);
        ends[0] = end_of(next);
        self.taken += 1;
        pool[next].link.prev = RecvIdx::NONE;
        Some((taken, pool.discard(idx)))
    }

    /// Number of receives that [`take_first`](Self::take_first) has taken out.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Disables [`take_first`](Self::take_first), or enables it.
    pub fn shut(&mut self, shut: bool) {
        self.special = self.special & !SHUT | if shut { SHUT } else { 0 };
    }

    /// Whether [`take_first`](Self::take_first) is disabled.
    #[cfg(test)]
    pub(crate) fn is_shut(&self) -> bool {
        self.special & SHUT != 0
    }

    /// Takes a posted receive out of matching. Its slot stays in use until [`Slab::free`].
    #[inline]
    pub fn unlink_posted<P: Receive>(&mut self, pool: &mut PostedPool<P>, idx: RecvIdx) {
        let Posted { tag, ignore, src, ref payload, .. } = pool[idx];
        self.special -= u32::from(is_special(ignore, src, payload));
        if ignore == 0 {
            self.posted.remove(pool, tag, idx);
        } else {
            self.wild.remove(pool, idx);
        }
        self.unlinked = self.unlinked.wrapping_add(1);
    }

    /// Receives posted.
    pub fn posted_len(&self) -> usize {
        (self.seq.wrapping_sub(self.taken) as u32).wrapping_sub(self.unlinked) as usize
    }

    /// The first receive in posting order for which `f` is true. Checks all buckets and receives,
    /// in no order: for cancelling.
    pub fn find_posted<P>(
        &self,
        pool: &PostedPool<P>,
        mut f: impl FnMut(&Posted<P>) -> bool,
    ) -> Option<RecvIdx> {
        if self.posted_len() == 0 {
            return None;
        }
        let exact = self.posted.iter(pool);
        exact
            .chain(self.wild.iter(pool))
            .filter(|&idx| f(&pool[idx]))
            .min_by_key(|&idx| pool[idx].seq)
    }

    /// The receive posted first. Checks the head of every bucket: for closing.
    pub fn first_posted<P>(&self, pool: &PostedPool<P>) -> Option<RecvIdx> {
        if self.posted_len() == 0 {
            return None;
        }
        let heads = self.posted.heads().chain(some(self.wild.head));
        heads.min_by_key(|&idx| pool[idx].seq)
    }

    /// Appends a message that no posted receive matches, and returns its index.
    ///
    /// # Errors
    /// `payload`, if the pool is full. Nothing was added.
    #[inline]
    pub fn add_unexpected<U>(
        &mut self,
        pool: &mut UnexpectedPool<U>,
        src: Src,
        tag: u64,
        payload: U,
    ) -> Result<UnexpectedIdx, U> {
        let Some(idx) = pool.vacant() else { return Err(payload) };
        let ends = self.unexpected.ends(tag);
        let before = named_by(ends[1]);
        let chain = Link { prev: before, next: UnexpectedIdx::NONE };
        pool.fill(Unexpected { tag, src, payload, chain, arrival: Link::default() });
        append(ends, pool, before, idx);
        self.arrivals.push_back(pool, idx);
        Ok(idx)
    }

    /// The message for a receive: of those that match, the one that arrived first. It stays in the
    /// tables.
    #[inline]
    pub fn match_unexpected<U>(
        &self,
        pool: &UnexpectedPool<U>,
        tag: u64,
        ignore: u64,
        src: Src,
    ) -> Option<UnexpectedIdx> {
        if self.arrivals.is_empty() {
            return None;
        }
        if ignore == 0 {
            let mut idx = self.unexpected.head(tag);
            while idx != UnexpectedIdx::NONE {
                let message = &pool[idx];
                if message.tag == tag && src.accepts(message.src) {
                    break;
                }
                idx = message.chain.next;
            }
            return some(idx);
        }
        self.find_unexpected(pool, |m| (m.tag ^ tag) & !ignore == 0 && src.accepts(m.src))
    }

    /// Takes an unexpected message out of matching. Its slot stays in use until [`Slab::free`].
    #[inline]
    pub fn unlink_unexpected<U>(&mut self, pool: &mut UnexpectedPool<U>, idx: UnexpectedIdx) {
        let tag = pool[idx].tag;
        self.unexpected.remove(pool, tag, idx);
        self.arrivals.remove(pool, idx);
    }

    /// Number of unexpected messages.
    pub fn unexpected_len(&self) -> usize {
        self.arrivals.len as usize
    }

    /// The first message in order of arrival for which `f` is true.
    pub fn find_unexpected<U>(
        &self,
        pool: &UnexpectedPool<U>,
        mut f: impl FnMut(&Unexpected<U>) -> bool,
    ) -> Option<UnexpectedIdx> {
        self.arrivals.iter(pool).find(|&idx| f(&pool[idx]))
    }

    /// The message that arrived first.
    pub fn first_unexpected<U>(&self, _pool: &UnexpectedPool<U>) -> Option<UnexpectedIdx> {
        some(self.arrivals.head)
    }
}

/// Whether a receive needs more checks than its tag.
#[inline]
fn is_special(ignore: u64, src: Src, payload: &impl Receive) -> bool {
    ignore != 0 || src != Src::ANY || !payload.is_simple()
}

impl<P> Posted<P> {
    /// The peer whose messages the receive waits for, if it is only one.
    pub fn named(&self) -> Option<PeerIdx> {
        (self.src.0 & Src::ANY_OF == 0).then(|| PeerIdx::of((self.src.0 >> 16 & 0xff_ffff) as u32))
    }

    /// Whether the receive waits for messages of this peer only.
    pub fn names(&self, peer: PeerIdx) -> bool {
        self.named() == Some(peer)
    }
}

impl<P> Linked<CHAIN, RecvIdx> for Posted<P> {
    #[inline]
    fn link(&mut self) -> &mut Link<RecvIdx> {
        &mut self.link
    }

    #[inline]
    fn link_ref(&self) -> &Link<RecvIdx> {
        &self.link
    }
}

impl<U> Linked<CHAIN, UnexpectedIdx> for Unexpected<U> {
    #[inline]
    fn link(&mut self) -> &mut Link<UnexpectedIdx> {
        &mut self.chain
    }

    #[inline]
    fn link_ref(&self) -> &Link<UnexpectedIdx> {
        &self.chain
    }
}

impl<U> Linked<ARRIVAL, UnexpectedIdx> for Unexpected<U> {
    #[inline]
    fn link(&mut self) -> &mut Link<UnexpectedIdx> {
        &mut self.arrival
    }

    #[inline]
    fn link_ref(&self) -> &Link<UnexpectedIdx> {
        &self.arrival
    }
}

/// Chains of entries by the hash of their tag, each in the order of insertion.
#[derive(Debug)]
struct Table<const N: usize, K> {
    /// First and last entry of each chain, as index plus 1: 0 is none, so that a new table is zero
    /// pages that the kernel supplies on first touch. The array has a constant length, so no bounds
    /// check is needed.
    ends: Box<[[u32; 2]; N]>,
    _named_by: PhantomData<fn() -> K>,
}

impl<const N: usize, K: Idx> Table<N, K> {
    /// One bucket needs a shift by 64, which takes two shifts.
    const SHIFT: u32 = {
        assert!(N.is_power_of_two());
        63 - N.trailing_zeros()
    };

    fn new() -> Self {
        let ends: Box<[_]> = vec![[0; 2]; N].into();
        Self { ends: ends.try_into().expect("the lengths are equal"), _named_by: PhantomData }
    }

    /// The bucket: the upper bits of the product, since only these depend on every bit of the tag.
    #[inline(always)]
    fn bucket(tag: u64) -> usize {
        (tag.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 1 >> Self::SHIFT) as usize
    }

    /// The first entry of `tag`'s chain, or [`NONE`](Idx::NONE).
    #[inline]
    fn head(&self, tag: u64) -> K {
        named_by(self.ends[Self::bucket(tag)][0])
    }

    /// The ends of `tag`'s chain.
    #[inline(always)]
    fn ends(&mut self, tag: u64) -> &mut [u32; 2] {
        &mut self.ends[Self::bucket(tag)]
    }

    #[inline]
    fn remove<T: Linked<CHAIN, K>>(&mut self, slab: &mut impl SlotsMut<T, K>, tag: u64, idx: K) {
        let [head, tail] = self.ends(tag);
        let Link { prev, next } = *slab[idx].link_ref();
        if prev == K::NONE {
            assert!(*head == end_of(idx), "matching: {} is not in this table", idx.get());
            *head = end_of(next);
        } else {
            slab[prev].link().next = next;
        }
        if next == K::NONE {
            assert!(*tail == end_of(idx), "matching: {} is not in this table", idx.get());
            *tail = end_of(prev);
        } else {
            slab[next].link().prev = prev;
        }
    }

    /// The first entry of every chain that has one.
    fn heads(&self) -> impl Iterator<Item = K> {
        self.ends.iter().filter_map(|ends| some(named_by(ends[0])))
    }

    /// Every entry, chain by chain.
    fn iter<'a, T: Linked<CHAIN, K> + 'a>(
        &'a self,
        slab: &'a impl Slots<T, K>,
    ) -> impl Iterator<Item = K> + 'a {
        let chain =
            |head| std::iter::successors(Some(head), |&idx| some(slab[idx].link_ref().next));
        self.heads().flat_map(chain)
    }
}

/// Appends `idx`, linked back to `before` already, to the chain with these `ends`.
#[inline(always)]
fn append<T: Linked<CHAIN, K>, K: Idx>(
    ends: &mut [u32; 2],
    slab: &mut impl SlotsMut<T, K>,
    before: K,
    idx: K,
) {
    ends[1] = end_of(idx);
    if before == K::NONE {
        ends[0] = end_of(idx);
    } else {
        slab[before].link().next = idx;
    }
}

/// The word in [`Table::ends`] for `idx`.
#[inline(always)]
fn end_of(idx: impl Idx) -> u32 {
    idx.get().wrapping_add(1)
}

/// The entry for a word in [`Table::ends`].
#[inline(always)]
fn named_by<K: Idx>(end: u32) -> K {
    K::new(end.wrapping_sub(1))
}

#[inline]
fn some<K: Idx>(idx: K) -> Option<K> {
    (idx != K::NONE).then_some(idx)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn src_of(number: u32, ep: u16) -> Src {
        Src::of(PeerIdx::of(number), ep)
    }

    const TAGS: [u64; 5] = [0, 1, 2, 1 << 63, u64::MAX];
    const IGNORES: [u64; 6] = [0, 0, 0, 1, 1 << 63, u64::MAX];

    /// Two of three are simple.
    impl Receive for usize {
        fn is_simple(&self) -> bool {
            !self.is_multiple_of(3)
        }
    }

    impl Vacant for u64 {
        fn vacant() -> Self {
            Self::MAX
        }
    }

    impl Receive for u64 {
        fn is_simple(&self) -> bool {
            true
        }
    }

    impl Vacant for () {
        fn vacant() -> Self {}
    }

    impl Receive for () {
        fn is_simple(&self) -> bool {
            true
        }
    }

    fn src(n: u8) -> Src {
        match n % 4 {
            0 => Src::ANY,
            n => from(n),
        }
    }

    /// A sender: never [`Src::ANY`].
    fn from(n: u8) -> Src {
        [src_of(0, 0), src_of(0, 1), src_of(u32::MAX, u16::MAX)][usize::from(n % 3)]
    }

    #[derive(Clone, Copy, Debug)]
    enum Op {
        /// Posts a receive unless a message waits for it, as an endpoint does.
        Post { tag: usize, ignore: usize, src: u8 },
        /// Gives a message to a posted receive, or keeps it; the fast path first, if that is `fit`.
        Arrive { tag: usize, src: u8, fit: bool },
        /// Shuts the fast path, or opens it.
        Shut(bool),
        /// Cancels the first of the receives from `nth` on whose tag is the same.
        Cancel { nth: usize },
        /// Throws away the nth unexpected message.
        Discard { nth: usize },
        /// Ends the receive that was matched first and holds its slot since then.
        FreeMatched,
    }

    fn op() -> impl Strategy<Value = Op> {
        let (tag, ignore) = (0..TAGS.len(), 0..IGNORES.len());
        prop_oneof![
            8 => (tag.clone(), ignore, any::<u8>())
                .prop_map(|(tag, ignore, src)| Op::Post { tag, ignore, src }),
            8 => (tag, any::<u8>(), any::<bool>())
                .prop_map(|(tag, src, fit)| Op::Arrive { tag, src, fit }),
            1 => any::<bool>().prop_map(Op::Shut),
            1 => any::<usize>().prop_map(|nth| Op::Cancel { nth }),
            1 => any::<usize>().prop_map(|nth| Op::Discard { nth }),
            4 => Just(Op::FreeMatched),
        ]
    }

    /// The content of one matcher, in two vectors in order. A number identifies each receive and
    /// message.
    #[derive(Default)]
    struct Model {
        posted: Vec<(u64, u64, Src, usize)>,
        unexpected: Vec<(u64, Src, usize)>,
    }

    struct World<const N: usize> {
        posted: PostedPool<usize>,
        unexpected: UnexpectedPool<usize>,
        /// Two endpoints with one pool between them.
        eps: [(Matcher<N>, Model); 2],
        shut: [bool; 2],
        /// Unlinked receives whose slot is still in use.
        matched: Vec<(RecvIdx, usize)>,
    }

    impl<const N: usize> World<N> {
        fn new(room: usize) -> Self {
            let ep = || (Matcher::new(), Model::default());
            Self {
                posted: PostedPool::with_capacity(room),
                unexpected: UnexpectedPool::with_capacity(room),
                eps: [ep(), ep()],
                shut: [false; 2],
                matched: Vec::new(),
            }
        }

        fn turn(&mut self, ep: usize, op: Op, id: usize) -> Result<(), TestCaseError> {
            match op {
                Op::Post { tag, ignore, src: n } => {
                    self.post(ep, (TAGS[tag], IGNORES[ignore], src(n)), id)?;
                }
                Op::Arrive { tag, src: n, fit } => {
                    if !self.arrive_short(ep, TAGS[tag], from(n), fit)? {
                        self.arrive(ep, TAGS[tag], from(n), id)?;
                    }
                }
                Op::Shut(shut) => {
                    self.eps[ep].0.shut(shut);
                    self.shut[ep] = shut;
                }
                Op::Cancel { nth } => self.cancel(ep, nth)?,
                Op::Discard { nth } => self.discard(ep, nth)?,
                Op::FreeMatched if !self.matched.is_empty() => {
                    let (idx, id) = self.matched.remove(0);
                    prop_assert_eq!(self.posted.free(idx).payload, id);
                }
                Op::FreeMatched => {}
            }
            self.check()
        }

        fn post(
            &mut self,
            ep: usize,
            (tag, ignore, src): (u64, u64, Src),
            id: usize,
        ) -> Result<(), TestCaseError> {
            let (matcher, model) = &mut self.eps[ep];
            let accepts = |m: &(u64, Src, usize)| {
                (m.0 | ignore) == (tag | ignore) && (src == Src::ANY || src == m.1)
            };
            let want = model.unexpected.iter().position(accepts);
            let got = matcher.match_unexpected(&self.unexpected, tag, ignore, src);
            let got_id = got.map(|idx| self.unexpected[idx].payload);
            prop_assert_eq!(got_id, want.map(|i| model.unexpected[i].2));
            if let (Some(idx), Some(i)) = (got, want) {
                matcher.unlink_unexpected(&mut self.unexpected, idx);
                prop_assert_eq!(self.unexpected.free(idx).payload, model.unexpected.remove(i).2);
                return Ok(());
            }
            let full = self.posted.is_full();
            match matcher.post(&mut self.posted, tag, ignore, src, id) {
                Ok(_) => model.posted.push((tag, ignore, src, id)),
                Err(back) => prop_assert_eq!(back, id),
            }
            prop_assert_eq!(model.posted.iter().any(|r| r.3 == id), !full);
            Ok(())
        }

        /// Whether the message was taken on the fast path: never unless its receive is plain, and
        /// always if all posted receives are plain.
        fn arrive_short(
            &mut self,
            ep: usize,
            tag: u64,
            src: Src,
            fit: bool,
        ) -> Result<bool, TestCaseError> {
            let (matcher, model) = &mut self.eps[ep];
            let accepts = |r: &(u64, u64, Src, usize)| {
                (r.0 | r.1) == (tag | r.1) && (r.2 == Src::ANY || r.2 == src)
            };
            let first = model.posted.iter().position(accepts);
            let is_special = |r: &(u64, u64, Src, usize)| is_special(r.1, r.2, &r.3);
            let special = model.posted.iter().filter(|r| is_special(r)).count() as u32;
            prop_assert_eq!(matcher.special, special | if self.shut[ep] { SHUT } else { 0 });
            let got = matcher.take_first(&mut self.posted, || src, tag, |_| fit.then_some(()));
            let Some(id) = got.map(|(_, posted)| posted.payload) else {
                let sure = fit && matcher.special == 0 && first.is_some();
                let collided = self.posted.count() > 1;
                prop_assert!(!sure || collided, "the only receive was not found");
                return Ok(false);
            };
            prop_assert!(fit && !self.shut[ep] && id.is_simple());
            prop_assert_eq!(Some(id), first.map(|i| model.posted[i].3));
            model.posted.remove(first.unwrap());
            Ok(true)
        }

        fn arrive(
            &mut self,
            ep: usize,
            tag: u64,
            src: Src,
            id: usize,
        ) -> Result<(), TestCaseError> {
            let (matcher, model) = &mut self.eps[ep];
            let accepts = |r: &(u64, u64, Src, usize)| {
                (r.0 | r.1) == (tag | r.1) && (r.2 == Src::ANY || r.2 == src)
            };
            let want = model.posted.iter().position(accepts);
            let got = matcher.match_posted(&self.posted, src, tag);
            let got_id = got.map(|idx| self.posted[idx].payload);
            prop_assert_eq!(got_id, want.map(|i| model.posted[i].3));
            if let (Some(idx), Some(i)) = (got, want) {
                if id.is_multiple_of(2) {
                    matcher.unlink_posted(&mut self.posted, idx);
                } else {
                    prop_assert_eq!(
                        matcher.take_posted(&mut self.posted, src, tag, |_| false),
                        got
                    );
                    prop_assert_eq!(matcher.posted_len(), model.posted.len());
                    prop_assert_eq!(matcher.take_posted(&mut self.posted, src, tag, |_| true), got);
                }
                self.matched.push((idx, model.posted.remove(i).3));
                return Ok(());
            }
            prop_assert_eq!(matcher.take_posted(&mut self.posted, src, tag, |_| true), None);
            let full = self.unexpected.is_full();
            match matcher.add_unexpected(&mut self.unexpected, src, tag, id) {
                Ok(_) => model.unexpected.push((tag, src, id)),
                Err(back) => prop_assert_eq!(back, id),
            }
            prop_assert_eq!(model.unexpected.iter().any(|m| m.2 == id), !full);
            Ok(())
        }

        fn cancel(&mut self, ep: usize, nth: usize) -> Result<(), TestCaseError> {
            let (matcher, model) = &mut self.eps[ep];
            let Some(&(tag, ..)) = model.posted.get(nth % model.posted.len().max(1)) else {
                return Ok(());
            };
            let i = model.posted.iter().position(|r| r.0 == tag).unwrap();
            let got = matcher.find_posted(&self.posted, |r| r.tag == tag);
            prop_assert_eq!(got.map(|idx| self.posted[idx].payload), Some(model.posted[i].3));
            matcher.unlink_posted(&mut self.posted, got.unwrap());
            prop_assert_eq!(self.posted.free(got.unwrap()).payload, model.posted.remove(i).3);
            Ok(())
        }

        fn discard(&mut self, ep: usize, nth: usize) -> Result<(), TestCaseError> {
            let (matcher, model) = &mut self.eps[ep];
            if model.unexpected.is_empty() {
                return Ok(());
            }
            let (.., id) = model.unexpected.remove(nth % model.unexpected.len());
            let got = matcher.find_unexpected(&self.unexpected, |m| m.payload == id);
            matcher.unlink_unexpected(&mut self.unexpected, got.unwrap());
            prop_assert_eq!(self.unexpected.free(got.unwrap()).payload, id);
            Ok(())
        }

        fn check(&self) -> Result<(), TestCaseError> {
            let (mut posted, mut unexpected) = (self.matched.len(), 0);
            for (matcher, model) in &self.eps {
                prop_assert_eq!(matcher.posted_len(), model.posted.len());
                prop_assert_eq!(matcher.unexpected_len(), model.unexpected.len());
                let first = matcher.first_posted(&self.posted).map(|i| self.posted[i].payload);
                prop_assert_eq!(first, model.posted.first().map(|r| r.3));
                let first = matcher.first_unexpected(&self.unexpected);
                let first = first.map(|i| self.unexpected[i].payload);
                prop_assert_eq!(first, model.unexpected.first().map(|m| m.2));
                posted += model.posted.len();
                unexpected += model.unexpected.len();
            }
            prop_assert_eq!((self.posted.count(), self.unexpected.len()), (posted, unexpected));
            Ok(())
        }
    }

    fn play(buckets: u32, room: usize, ops: &[(usize, Op)]) -> Result<(), TestCaseError> {
        match buckets {
            0 => play_in(World::<1>::new(room), ops),
            1 => play_in(World::<2>::new(room), ops),
            2 => play_in(World::<4>::new(room), ops),
            3 => play_in(World::<8>::new(room), ops),
            _ => play_in(World::<BUCKETS>::new(room), ops),
        }
    }

    fn play_in<const N: usize>(
        mut world: World<N>,
        ops: &[(usize, Op)],
    ) -> Result<(), TestCaseError> {
        ops.iter().enumerate().try_for_each(|(id, &(ep, op))| world.turn(ep, op, id))
    }

    fn ops() -> impl Strategy<Value = Vec<(usize, Op)>> {
        prop::collection::vec((0usize..2, op()), 1..250)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        /// Every match, in both directions, against a walk over all receives or messages in order;
        /// with one bucket, few, and many, and with pools that run full.
        #[test]
        fn matching_is_the_first_in_order(buckets in 0u32..5, room in 1usize..40, ops in ops()) {
            play(buckets, room, &ops)?;
        }
    }

    #[cfg(feature = "plant")]
    #[test]
    fn the_model_sees_the_planted_bug() {
        use proptest::test_runner::{Config, TestRunner};
        let config = Config { failure_persistence: None, ..Config::with_cases(1_000) };
        let mut runner = TestRunner::new(config);
        let (found, reached) = crate::plant::with(Bug::WildcardOrderIgnored, || {
            runner.run(&ops(), |ops| play(4, 40, &ops))
        });
        assert!(reached && found.is_err());
    }

    /// Goal: the number of receives that a message is compared with does not grow with 10^4 others.
    #[test]
    fn matching_does_not_walk_the_posted_receives() {
        const DEPTH: u64 = 10_000;
        // Tags as MPI libraries build them: counting up, in the upper bits, and all equal.
        for (tags, tag_of) in [
            ("counting", (|i| i) as fn(u64) -> u64),
            ("upper bits", |i| i << 40),
            ("rank and tag", |i| ((i % 100) << 32) | (i / 100)),
            ("one tag", |_| 7),
        ] {
            let mut pool = PostedPool::with_capacity(DEPTH as usize + 1);
            let mut matcher = Matcher::<{ 1 << 14 }>::new();
            for i in 0..DEPTH {
                matcher.post(&mut pool, tag_of(i), 0, Src::ANY, i).unwrap();
            }
            // A younger wildcard costs one comparison, that of the sequence numbers.
            matcher.post(&mut pool, 0, u64::MAX, Src::ANY, DEPTH).unwrap();
            let (mut sum, mut worst) = (0, 0);
            for i in 0..DEPTH {
                let mut probes = 0u64;
                let got = matcher.scan_posted(&pool, src_of(1, 1), tag_of(i), || probes += 1);
                let want = if tags == "one tag" { 0 } else { i };
                assert_eq!(got.map(|idx| pool[idx].payload), Some(want));
                sum += probes;
                worst = worst.max(probes);
            }
            assert!(sum <= 3 * DEPTH && worst <= 12, "{tags}: {sum} probes, {worst} at worst");
        }
    }

    #[test]
    #[should_panic(expected = "is not in this table")]
    fn unlinking_twice_panics() {
        let mut pool = PostedPool::with_capacity(2);
        let mut matcher = Matcher::<4>::new();
        let idx = matcher.post(&mut pool, 1, 0, Src::ANY, ()).unwrap();
        matcher.unlink_posted(&mut pool, idx);
        matcher.unlink_posted(&mut pool, idx);
    }
}
