//! Matching of messages with posted receives, for one endpoint and one kind of message.
//!
//! A receive names a tag, the bits of it to ignore, and a source or any. A message goes to the
//! receive posted first of those it matches; a receive takes the message that arrived first.
//!
//! Receives that ignore no bit stand in a hash table by tag, the others in one list in posting
//! order. Each chain of the table is in posting order too, so a message compares the first match of
//! its chain with the first of the list, by sequence number, and no list runs through all receives.
//! Unexpected messages stand in a table by tag and in one list in order of arrival: a receive with
//! ignored bits walks the list.
//!
//! Untagged messages match with tag 0 and nothing ignored, in a matcher of one bucket.
//!
//! The entries live in pools that all matchers of a node share. An entry stays with the matcher it
//! was given to: passing its index to another one is our own bug.

use std::ops::{Index, IndexMut};

use crate::slab::{Link, Linked, List, NONE, Slab};

/// A sender, as a receive names it and a message carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Src(pub u64);

impl Src {
    /// A receive takes messages from anyone. No message is from here.
    pub const ANY: Self = Self(u64::MAX);

    /// Endpoint `ep` of peer number `peer`.
    #[inline]
    pub const fn of(peer: u32, ep: u16) -> Self {
        Self((peer as u64) << 16 | ep as u64)
    }

    #[inline]
    const fn takes(self, from: Self) -> bool {
        self.0 == from.0 || self.0 == Self::ANY.0
    }
}

/// A posted receive.
#[derive(Debug)]
pub struct Posted<P> {
    /// The tag it waits for.
    pub tag: u64,
    /// Bits of the tag that do not matter.
    pub ignore: u64,
    /// The sender it waits for, or [`Src::ANY`].
    pub src: Src,
    /// Whatever the endpoint keeps with it.
    pub payload: P,
    seq: u64,
    link: Link,
}

/// A message that has arrived before its receive was posted.
#[derive(Debug)]
pub struct Unexpected<U> {
    /// Its tag.
    pub tag: u64,
    /// Its sender.
    pub src: Src,
    /// Whatever the endpoint keeps with it.
    pub payload: U,
    chain: Link,
    arrival: Link,
}

/// The posted receives of a node.
#[derive(Debug)]
pub struct PostedPool<P>(Slab<Posted<P>>);

/// The unexpected messages of a node.
#[derive(Debug)]
pub struct UnexpectedPool<U>(Slab<Unexpected<U>>);

/// Link of a table chain, or of the list of receives that ignore bits.
const CHAIN: usize = 0;
/// Link of the list of unexpected messages in order of arrival.
const ARRIVAL: usize = 1;

/// The posted receives and unexpected messages of one endpoint and kind.
#[derive(Debug)]
pub struct Matcher {
    posted: Table,
    wild: List<CHAIN>,
    posted_len: u32,
    seq: u64,
    unexpected: Table,
    arrivals: List<ARRIVAL>,
}

impl Matcher {
    /// A matcher with tables of `buckets` chains, a power of two: 16 bytes each, touched when a tag
    /// falls on them. A match takes as many probes as receives share a chain, so as many buckets
    /// as receives are usually posted.
    ///
    /// # Panics
    /// If `buckets` is no power of two.
    pub fn new(buckets: usize) -> Self {
        Self {
            posted: Table::new(buckets),
            wild: List::new(),
            posted_len: 0,
            seq: 0,
            unexpected: Table::new(buckets),
            arrivals: List::new(),
        }
    }

    /// Appends a receive and says its index. The caller has looked for an unexpected message first.
    ///
    /// # Errors
    /// `payload`, if the pool is full. Nothing was posted.
    #[inline]
    pub fn post<P>(
        &mut self,
        pool: &mut PostedPool<P>,
        tag: u64,
        ignore: u64,
        src: Src,
        payload: P,
    ) -> Result<u32, P> {
        if pool.0.is_full() {
            return Err(payload);
        }
        let seq = self.seq;
        let posted = Posted { tag, ignore, src, payload, seq, link: Link::default() };
        let Some(idx) = pool.0.alloc(posted) else { unreachable!("the pool had room") };
        if ignore == 0 {
            self.posted.push_back(&mut pool.0, tag, idx);
        } else {
            self.wild.push_back(&mut pool.0, idx);
        }
        self.seq = seq + 1;
        self.posted_len += 1;
        Ok(idx)
    }

    /// The receive for a message from `src` with `tag`: of those that match, the one posted first.
    /// It stays posted.
    #[inline]
    pub fn match_posted<P>(&self, pool: &PostedPool<P>, src: Src, tag: u64) -> Option<u32> {
        self.scan_posted(pool, src, tag, || {})
    }

    /// As `match_posted`, calling `probe` for every receive looked at.
    #[inline]
    fn scan_posted<P>(
        &self,
        pool: &PostedPool<P>,
        src: Src,
        tag: u64,
        mut probe: impl FnMut(),
    ) -> Option<u32> {
        let mut exact = self.posted.head(tag);
        while exact != NONE {
            probe();
            let posted = &pool.0[exact];
            if posted.tag == tag && posted.src.takes(src) {
                break;
            }
            exact = posted.link.next;
        }
        let mut wild = self.wild.head;
        if wild == NONE {
            return some(exact);
        }
        let before = if exact == NONE { u64::MAX } else { pool.0[exact].seq };
        while wild != NONE {
            probe();
            let posted = &pool.0[wild];
            if posted.seq > before {
                break;
            }
            if (posted.tag ^ tag) & !posted.ignore == 0 && posted.src.takes(src) {
                return Some(wild);
            }
            wild = posted.link.next;
        }
        some(exact)
    }

    /// Takes a posted receive out, so that nothing matches it any more. Its slot stays in use until
    /// [`PostedPool::free`].
    #[inline]
    pub fn unlink_posted<P>(&mut self, pool: &mut PostedPool<P>, idx: u32) {
        let Posted { tag, ignore, .. } = pool.0[idx];
        if ignore == 0 {
            self.posted.remove(&mut pool.0, tag, idx);
        } else {
            self.wild.remove(&mut pool.0, idx);
        }
        self.posted_len -= 1;
    }

    /// Receives posted.
    pub fn posted_len(&self) -> usize {
        self.posted_len as usize
    }

    /// The first receive in posting order that `f` says yes to. Looks at all buckets and receives,
    /// in no order: for cancelling.
    pub fn find_posted<P>(
        &self,
        pool: &PostedPool<P>,
        mut f: impl FnMut(&Posted<P>) -> bool,
    ) -> Option<u32> {
        if self.posted_len == 0 {
            return None;
        }
        let exact = self.posted.iter(&pool.0);
        exact
            .chain(self.wild.iter(&pool.0))
            .filter(|&idx| f(&pool.0[idx]))
            .min_by_key(|&idx| pool.0[idx].seq)
    }

    /// The receive posted first. Looks at the head of every bucket: for closing.
    pub fn first_posted<P>(&self, pool: &PostedPool<P>) -> Option<u32> {
        if self.posted_len == 0 {
            return None;
        }
        let heads = self.posted.heads().chain(some(self.wild.head));
        heads.min_by_key(|&idx| pool.0[idx].seq)
    }

    /// Appends a message that no posted receive matches, and says its index.
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
    ) -> Result<u32, U> {
        if pool.0.is_full() {
            return Err(payload);
        }
        let (chain, arrival) = (Link::default(), Link::default());
        let message = Unexpected { tag, src, payload, chain, arrival };
        let Some(idx) = pool.0.alloc(message) else { unreachable!("the pool had room") };
        self.unexpected.push_back(&mut pool.0, tag, idx);
        self.arrivals.push_back(&mut pool.0, idx);
        Ok(idx)
    }

    /// The message for a receive: of those that match, the one that arrived first. It stays.
    #[inline]
    pub fn match_unexpected<U>(
        &self,
        pool: &UnexpectedPool<U>,
        tag: u64,
        ignore: u64,
        src: Src,
    ) -> Option<u32> {
        if self.arrivals.is_empty() {
            return None;
        }
        if ignore == 0 {
            let mut idx = self.unexpected.head(tag);
            while idx != NONE {
                let message = &pool.0[idx];
                if message.tag == tag && src.takes(message.src) {
                    break;
                }
                idx = message.chain.next;
            }
            return some(idx);
        }
        self.find_unexpected(pool, |m| (m.tag ^ tag) & !ignore == 0 && src.takes(m.src))
    }

    /// Takes an unexpected message out, so that no receive matches it any more. Its slot stays in
    /// use until [`UnexpectedPool::free`].
    #[inline]
    pub fn unlink_unexpected<U>(&mut self, pool: &mut UnexpectedPool<U>, idx: u32) {
        let tag = pool.0[idx].tag;
        self.unexpected.remove(&mut pool.0, tag, idx);
        self.arrivals.remove(&mut pool.0, idx);
    }

    /// Unexpected messages there are.
    pub fn unexpected_len(&self) -> usize {
        self.arrivals.len as usize
    }

    /// The first message in order of arrival that `f` says yes to.
    pub fn find_unexpected<U>(
        &self,
        pool: &UnexpectedPool<U>,
        mut f: impl FnMut(&Unexpected<U>) -> bool,
    ) -> Option<u32> {
        self.arrivals.iter(&pool.0).find(|&idx| f(&pool.0[idx]))
    }

    /// The message that arrived first.
    pub fn first_unexpected<U>(&self, _pool: &UnexpectedPool<U>) -> Option<u32> {
        some(self.arrivals.head)
    }
}

impl<P> PostedPool<P> {
    /// Room for `n` posted receives, reserved and not touched.
    pub fn with_capacity(n: usize) -> Self {
        Self(Slab::with_capacity(n))
    }

    /// Gives the slot of an unlinked receive back.
    #[inline]
    pub fn free(&mut self, idx: u32) -> P {
        self.0.free(idx).payload
    }

    /// The receive at `idx`, `None` if the slot is not in use.
    pub fn get(&self, idx: u32) -> Option<&Posted<P>> {
        self.0.get(idx)
    }

    /// Slots in use, posted or unlinked.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no slot is in use.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether [`Matcher::post`] would fail.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.0.is_full()
    }

    /// Slots not in use.
    pub fn free_count(&self) -> usize {
        self.0.free_count()
    }
}

impl<U> UnexpectedPool<U> {
    /// Room for `n` unexpected messages, reserved and not touched.
    pub fn with_capacity(n: usize) -> Self {
        Self(Slab::with_capacity(n))
    }

    /// Gives the slot of an unlinked message back.
    #[inline]
    pub fn free(&mut self, idx: u32) -> U {
        self.0.free(idx).payload
    }

    /// The message at `idx`, `None` if the slot is not in use.
    pub fn get(&self, idx: u32) -> Option<&Unexpected<U>> {
        self.0.get(idx)
    }

    /// Slots in use, waiting or unlinked.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no slot is in use.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether [`Matcher::add_unexpected`] would fail.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.0.is_full()
    }

    /// Slots not in use.
    pub fn free_count(&self) -> usize {
        self.0.free_count()
    }
}

impl<P> Index<u32> for PostedPool<P> {
    type Output = Posted<P>;

    #[inline]
    fn index(&self, idx: u32) -> &Posted<P> {
        &self.0[idx]
    }
}

impl<P> IndexMut<u32> for PostedPool<P> {
    #[inline]
    fn index_mut(&mut self, idx: u32) -> &mut Posted<P> {
        &mut self.0[idx]
    }
}

impl<U> Index<u32> for UnexpectedPool<U> {
    type Output = Unexpected<U>;

    #[inline]
    fn index(&self, idx: u32) -> &Unexpected<U> {
        &self.0[idx]
    }
}

impl<U> IndexMut<u32> for UnexpectedPool<U> {
    #[inline]
    fn index_mut(&mut self, idx: u32) -> &mut Unexpected<U> {
        &mut self.0[idx]
    }
}

impl<P> Linked<CHAIN> for Posted<P> {
    #[inline]
    fn link(&mut self) -> &mut Link {
        &mut self.link
    }

    #[inline]
    fn link_ref(&self) -> &Link {
        &self.link
    }
}

impl<U> Linked<CHAIN> for Unexpected<U> {
    #[inline]
    fn link(&mut self) -> &mut Link {
        &mut self.chain
    }

    #[inline]
    fn link_ref(&self) -> &Link {
        &self.chain
    }
}

impl<U> Linked<ARRIVAL> for Unexpected<U> {
    #[inline]
    fn link(&mut self) -> &mut Link {
        &mut self.arrival
    }

    #[inline]
    fn link_ref(&self) -> &Link {
        &self.arrival
    }
}

/// Chains of entries by the hash of their tag, each in the order of insertion.
#[derive(Debug)]
struct Table {
    /// First and last entry of each chain, one above their index: 0 is none, so that a fresh table
    /// is zeros that the kernel gives when they are touched.
    ends: Vec<[u32; 2]>,
    shift: u32,
}

impl Table {
    fn new(buckets: usize) -> Self {
        assert!(buckets.is_power_of_two(), "matching: {buckets} buckets, no power of two");
        // One bucket takes a shift by 64, which two shifts do.
        Self { ends: vec![[0; 2]; buckets], shift: 63 - buckets.trailing_zeros() }
    }

    /// The bucket: the upper bits of the product, since they alone depend on every bit of the tag.
    #[inline]
    fn bucket(&self, tag: u64) -> usize {
        (tag.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 1 >> self.shift) as usize
    }

    /// The first entry of `tag`'s chain, or [`NONE`].
    #[inline]
    fn head(&self, tag: u64) -> u32 {
        self.ends[self.bucket(tag)][0].wrapping_sub(1)
    }

    #[inline]
    fn push_back<T: Linked<CHAIN>>(&mut self, slab: &mut Slab<T>, tag: u64, idx: u32) {
        let bucket = self.bucket(tag);
        let [head, tail] = &mut self.ends[bucket];
        if *tail == 0 {
            *head = idx + 1;
        } else {
            slab[idx].link().prev = *tail - 1;
            slab[*tail - 1].link().next = idx;
        }
        *tail = idx + 1;
    }

    #[inline]
    fn remove<T: Linked<CHAIN>>(&mut self, slab: &mut Slab<T>, tag: u64, idx: u32) {
        let bucket = self.bucket(tag);
        let [head, tail] = &mut self.ends[bucket];
        let Link { prev, next } = *slab[idx].link_ref();
        if prev == NONE {
            assert!(*head == idx + 1, "matching: {idx} is not in this table");
            *head = next.wrapping_add(1);
        } else {
            slab[prev].link().next = next;
        }
        if next == NONE {
            assert!(*tail == idx + 1, "matching: {idx} is not in this table");
            *tail = prev.wrapping_add(1);
        } else {
            slab[next].link().prev = prev;
        }
    }

    /// The first entry of every chain that has one.
    fn heads(&self) -> impl Iterator<Item = u32> {
        self.ends.iter().filter_map(|ends| some(ends[0].wrapping_sub(1)))
    }

    /// Every entry, chain by chain.
    fn iter<'a, T: Linked<CHAIN>>(&'a self, slab: &'a Slab<T>) -> impl Iterator<Item = u32> + 'a {
        let chain =
            |head| std::iter::successors(Some(head), |&idx| some(slab[idx].link_ref().next));
        self.heads().flat_map(chain)
    }
}

#[inline]
fn some(idx: u32) -> Option<u32> {
    (idx != NONE).then_some(idx)
}
