//! A cache of packet buffers.
//!
//! Where frames stay in memory a port sends with what it has received: a buffer that goes to and
//! fro between two ports sees neither the pool nor the lists of it that each thread has.
//!
//! The stock is a pile, so that as few buffers go round as possible: of 32 and 32 that took turns
//! the lines and pages did not stay cached, and a ping-pong took 25 ns more. But what was received
//! last goes under the one on top. That one is filled next, and is fetched when a frame has left:
//! the processor that read its lines last may still have them, and to ask for them when the next
//! frame is due would hold that frame up.

use std::ptr::null_mut;

use barewire_dpdk_sys as sys;

use super::Mbuf;
use super::device::Pool;
use crate::mem::{prefetch, prefetch_to_write};

/// Most buffers in stock, and how many are taken from the pool at once.
const STOCK: usize = 64;
const FILL: usize = 32;

/// Bytes before the packet in a buffer.
const HEADROOM: usize = sys::RTE_PKTMBUF_HEADROOM as usize;

/// Flags of a buffer whose memory is not its own.
const NOT_ITS_OWN: u64 = sys::RTE_MBUF_F_EXTERNAL | sys::RTE_MBUF_F_INDIRECT;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Buffers of nobody else, each as a pool gives it: in one piece, with one owner.
pub(super) struct MbufCache {
    bufs: [Mbuf; STOCK],
    count: usize,
    /// Bytes that a buffer has to have.
    buf_len: usize,
    /// Received buffers are kept while there are fewer than this.
    keep_max: usize,
}

impl MbufCache {
    /// Nothing in stock yet, of buffers for frames of `frame_max` bytes. What was received is kept
    /// if `keeps`.
    pub(super) fn new(frame_max: usize, keeps: bool) -> Self {
        let (buf_len, keep_max) = (HEADROOM + frame_max, if keeps { STOCK } else { 0 });
        Self { bufs: [null_mut(); STOCK], count: 0, buf_len, keep_max }
    }

    /// Takes a buffer, to be filled from its usual place on. None if there is none, there and in
    /// the pool.
    #[inline(always)]
    pub(super) fn take(&mut self, pool: Pool) -> Option<Mbuf> {
        if self.count == 0 && !self.fill(pool) {
            return None;
        }
        self.take_cached()
    }

    /// As [`take`](Self::take), without asking the pool.
    #[inline(always)]
    pub(super) fn take_cached(&mut self) -> Option<Mbuf> {
        self.count = self.count.checked_sub(1)?;
        let mbuf = self.bufs[self.count % STOCK];
        // SAFETY: a buffer of ours that nobody else has.
        unsafe {
            (*mbuf).data_off = HEADROOM as u16;
            (*mbuf).ol_flags = 0;
        }
        Some(mbuf)
    }

    /// Puts back what was taken last, after which nothing was kept.
    pub(super) fn put_back(&mut self, mbuf: Mbuf) {
        // In every build: a buffer more than there is room for would take the place of another.
        assert!(self.count < STOCK, "{} buffers in stock", self.count);
        self.bufs[self.count] = mbuf;
        self.count += 1;
    }

    /// Keeps a buffer that serves to send with, if there is room for it, and says so.
    ///
    /// # Safety
    /// It is a packet of the caller's, to which nobody has a reference any more.
    #[inline(always)]
    pub(super) unsafe fn keep(&mut self, mbuf: Mbuf) -> bool {
        // SAFETY: a packet of ours.
        if self.count >= self.keep_max || !unsafe { self.serves(mbuf) } {
            return false;
        }
        let top = self.count.saturating_sub(1) % STOCK;
        self.bufs[self.count % STOCK] = self.bufs[top];
        self.bufs[top] = mbuf;
        self.count += 1;
        true
    }

    /// Whether the buffer is long enough, and as a pool would give it: what a driver puts into
    /// the other fields means nothing without a flag, and those are taken away.
    ///
    /// # Safety
    /// It is a packet of the caller's.
    #[inline(always)]
    unsafe fn serves(&self, mbuf: Mbuf) -> bool {
        // SAFETY: the caller's promise. A packet in one piece has nothing behind it.
        unsafe {
            (*mbuf).refcnt == 1
                && (*mbuf).nb_segs == 1
                && (*mbuf).ol_flags & NOT_ITS_OWN == 0
                && usize::from((*mbuf).buf_len) >= self.buf_len
        }
    }

    /// Whether [`take_cached`](Self::take_cached) has none.
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Takes buffers from the pool for an empty stock, and says whether it had some. They are as
    /// they were given back: with one owner, in one piece, and nothing behind.
    #[cold]
    #[inline(never)]
    pub(super) fn fill(&mut self, pool: Pool) -> bool {
        // SAFETY: the pool lives as long as the device; there is room for as many.
        let code = unsafe {
            sys::rte_mempool_get_bulk(pool.0, self.bufs.as_mut_ptr().cast(), FILL as u32)
        };
        self.count = if code == 0 { FILL } else { 0 };
        code == 0
    }

    /// Fetches what the next short frame will be written to. Called when there is time.
    #[inline(always)]
    pub(super) fn warm(&self) {
        if let Some(top) = self.count.checked_sub(1) {
            let mbuf = self.bufs[top % STOCK];
            prefetch_to_write(mbuf.cast());
            let data = usual_data(mbuf);
            prefetch_to_write(data);
            prefetch_to_write(data.wrapping_add(LINE));
        }
    }

    /// Gives everything back.
    pub(super) fn empty(&mut self) {
        for &mbuf in &self.bufs[..self.count] {
            // SAFETY: a buffer of ours that nobody else has.
            unsafe { sys::rte_pktmbuf_free(mbuf) };
        }
        self.count = 0;
    }
}

/// Which buffer came after which: where the same ones go round between two ports, in one order,
/// the next is known before the ring has been asked for it. A guess, for hints only.
pub(super) struct Order {
    /// By [`slot`](Self::slot) of the one before.
    after: Box<[Mbuf; Self::LEN]>,
    next: Mbuf,
    last: Mbuf,
}

impl Order {
    /// More than two ports have in stock.
    const LEN: usize = 256;

    /// Nothing came yet.
    pub(super) fn new() -> Self {
        Self { after: Box::new([null_mut(); Self::LEN]), next: null_mut(), last: null_mut() }
    }

    /// Where to keep what came after `mbuf`. Buffers of a pool are equally far from each other.
    #[inline(always)]
    fn slot(mbuf: Mbuf) -> usize {
        (mbuf.addr() as u32 / LINE as u32).wrapping_mul(0x9e37_79b1) as usize >> 24
    }

    /// `mbuf` has come.
    #[inline(always)]
    pub(super) fn came(&mut self, mbuf: Mbuf) {
        self.after[Self::slot(self.last)] = mbuf;
        self.last = mbuf;
        self.next = self.after[Self::slot(mbuf)];
    }

    /// Fetches what comes next, most likely.
    #[inline(always)]
    pub(super) fn prefetch(&self) {
        prefetch_received(self.next);
    }
}

/// Fetches what a received short frame most likely lies in: without asking the buffer where, which
/// would be one wait after the other.
#[inline(always)]
pub(super) fn prefetch_received(mbuf: Mbuf) {
    prefetch(mbuf.cast());
    let data = usual_data(mbuf);
    prefetch(data);
    prefetch(data.wrapping_add(LINE));
}

/// Where the packet is in a buffer of a pool as we make them. A guess, for hints only.
#[inline(always)]
fn usual_data(mbuf: Mbuf) -> *const u8 {
    mbuf.cast::<u8>().cast_const().wrapping_add(size_of::<sys::rte_mbuf>() + HEADROOM)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Buffers as a pool gives them.
    fn fresh(count: usize) -> Vec<Mbuf> {
        // SAFETY: zeros are a `rte_mbuf`, which is all numbers and pointers.
        let zeros = || unsafe { std::mem::zeroed::<sys::rte_mbuf>() };
        let mbufs = (0..count).map(|_| {
            let mbuf = Box::leak(Box::new(zeros()));
            (mbuf.refcnt, mbuf.nb_segs, mbuf.buf_len) = (1, 1, u16::MAX);
            std::ptr::from_mut(mbuf)
        });
        mbufs.collect()
    }

    fn keep(mbuf_cache: &mut MbufCache, mbuf: Mbuf) -> bool {
        // SAFETY: one of `fresh`, which nobody else has.
        unsafe { mbuf_cache.keep(mbuf) }
    }

    /// Goal: of all that two ports have in stock few go round between them, and none is lost.
    #[test]
    fn few_buffers_go_round() {
        for (filled, flying) in [(32, 1), (0, 1), (1, 3), (32, 8)] {
            let mut ends = [MbufCache::new(1500, true), MbufCache::new(1500, true)];
            for mbuf_cache in &mut ends {
                assert!(fresh(filled.max(flying)).into_iter().all(|mbuf| keep(mbuf_cache, mbuf)));
            }
            let mut seen = std::collections::HashSet::new();
            for round in 0..1000 {
                let [from, to] = if round % 2 == 0 { [0, 1] } else { [1, 0] };
                let sent: Vec<Mbuf> = (0..flying).map_while(|_| ends[from].take_cached()).collect();
                assert_eq!(sent.len(), flying);
                // Not yet those that come first, which are the spare ones.
                seen.extend(sent.iter().filter(|_| round >= 10).copied());
                assert!(sent.into_iter().all(|mbuf| keep(&mut ends[to], mbuf)));
            }
            assert!(seen.len() <= 3 * flying + 1, "{} of {filled}", seen.len());
            assert_eq!(ends[0].count + ends[1].count, 2 * filled.max(flying));
        }
    }

    /// Goal: a full stock keeps no more, and everything in it comes out once.
    #[test]
    fn a_stock_gives_out_each_buffer_once() {
        let mut mbuf_cache = MbufCache::new(1500, true);
        let all = fresh(STOCK + 1);
        assert!(all[..STOCK].iter().all(|&mbuf| keep(&mut mbuf_cache, mbuf)));
        assert!(!keep(&mut mbuf_cache, all[STOCK]));
        let first = mbuf_cache.take_cached().unwrap();
        mbuf_cache.put_back(first);
        assert_eq!(mbuf_cache.take_cached(), Some(first));
        assert!(keep(&mut mbuf_cache, first));
        let next = mbuf_cache.take_cached().unwrap();
        assert_ne!(next, first, "it was fetched to be read");
        assert!(keep(&mut mbuf_cache, next));
        let mut out: Vec<Mbuf> = std::iter::from_fn(|| mbuf_cache.take_cached()).collect();
        out.sort();
        let mut kept = all[..STOCK].to_vec();
        kept.sort();
        assert_eq!(out, kept);
    }

    /// Goal: the next of buffers that go round is known, and again when another one joins them.
    #[test]
    fn buffers_that_go_round_are_foreseen() {
        let buf = |i: usize| (0x7f00_0000_0000 + i * 2432) as Mbuf;
        let mut order = Order::new();
        for count in [1, 2, 64, 65] {
            let mut wrong = 0;
            for lap in 0..3 {
                for i in 0..count {
                    wrong += usize::from(lap == 2 && order.next != buf(i));
                    order.came(buf(i));
                }
            }
            // Two may share a place.
            assert!(wrong <= count / 4, "{wrong} of {count}");
        }
    }
}
