//! A port's cache of mbufs.
//!
//! Where frames stay in memory, a port sends in the mbufs that it has received: an mbuf that
//! alternates between two ports needs neither the pool nor its per-thread cache.
//!
//! The cache is a stack, so that few mbufs circulate: with 32 mbufs per port in FIFO order their
//! lines and pages did not stay cached, and a ping-pong took 25 ns more. But the mbuf received last
//! is inserted below the top. The top one is written next, and is prefetched after a frame was
//! sent: another processor, which read its lines last, may still have them, and fetching them for
//! the next frame would delay it.

use std::ptr::null_mut;

use barewire_dpdk_sys as sys;

use super::Mbuf;
use super::device::Pool;
use crate::mem::{prefetch, prefetch_to_write};

/// Capacity, and mbufs taken from the pool at once.
const CAPACITY: usize = 64;
const REFILL_COUNT: usize = 32;

/// Bytes before the packet in an mbuf.
const HEADROOM: usize = sys::RTE_PKTMBUF_HEADROOM as usize;

/// Flags of an mbuf whose data is not its own.
const NOT_OWN_MEMORY: u64 = sys::RTE_MBUF_F_EXTERNAL | sys::RTE_MBUF_F_INDIRECT;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Stack of unused mbufs, each as from a pool: one segment, one reference.
pub(super) struct MbufCache {
    bufs: [Mbuf; CAPACITY],
    count: usize,
    /// Minimum buffer length.
    buf_len: usize,
    /// Received mbufs are kept while there are fewer than this.
    keep_max: usize,
}

impl MbufCache {
    /// An empty cache of mbufs for frames of `frame_max` bytes. Received mbufs are kept if `keeps`.
    pub(super) fn new(frame_max: usize, keeps: bool) -> Self {
        let (buf_len, keep_max) = (HEADROOM + frame_max, if keeps { CAPACITY } else { 0 });
        Self { bufs: [null_mut(); CAPACITY], count: 0, buf_len, keep_max }
    }

    /// Takes an mbuf with the default headroom. `None` if cache and pool are empty.
    #[inline(always)]
    pub(super) fn take(&mut self, pool: Pool) -> Option<Mbuf> {
        if self.count == 0 && !self.refill(pool) {
            return None;
        }
        self.take_cached()
    }

    /// As [`take`](Self::take), from the cache only.
    #[inline(always)]
    pub(super) fn take_cached(&mut self) -> Option<Mbuf> {
        self.count = self.count.checked_sub(1)?;
        let mbuf = self.bufs[self.count % CAPACITY];
        // SAFETY: a buffer that nobody else references.
        unsafe {
            (*mbuf).data_off = HEADROOM as u16;
            (*mbuf).ol_flags = 0;
        }
        Some(mbuf)
    }

    /// Returns the mbuf taken last; nothing was kept since.
    pub(super) fn put_back(&mut self, mbuf: Mbuf) {
        // In every build: an overflow would overwrite another mbuf.
        assert!(self.count < CAPACITY, "{} buffers in stock", self.count);
        self.bufs[self.count] = mbuf;
        self.count += 1;
    }

    /// Keeps a received mbuf if it is reusable and there is room; true if it was kept.
    ///
    /// # Safety
    /// The caller owns the packet, and there is no other reference to it.
    #[inline(always)]
    pub(super) unsafe fn keep(&mut self, mbuf: Mbuf) -> bool {
        // SAFETY: a packet of ours.
        if self.count >= self.keep_max || !unsafe { self.is_reusable(mbuf) } {
            return false;
        }
        let top = self.count.saturating_sub(1) % CAPACITY;
        self.bufs[self.count % CAPACITY] = self.bufs[top];
        self.bufs[top] = mbuf;
        self.count += 1;
        true
    }

    /// Whether the mbuf is long enough and as from a pool. Other fields that a driver sets have no
    /// meaning without their flags, which are cleared.
    ///
    /// # Safety
    /// The caller owns the packet.
    #[inline(always)]
    unsafe fn is_reusable(&self, mbuf: Mbuf) -> bool {
        // SAFETY: the caller's promise. A packet in one piece has nothing behind it.
        unsafe {
            (*mbuf).refcnt == 1
                && (*mbuf).nb_segs == 1
                && (*mbuf).ol_flags & NOT_OWN_MEMORY == 0
                && usize::from((*mbuf).buf_len) >= self.buf_len
        }
    }

    /// Whether [`take_cached`](Self::take_cached) would return `None`.
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Refills the empty cache from the pool; false if the pool has too few. Mbufs in a pool have
    /// one reference and one segment.
    #[cold]
    #[inline(never)]
    pub(super) fn refill(&mut self, pool: Pool) -> bool {
        // SAFETY: the pool lives as long as the device; there is room for as many.
        let code = unsafe {
            sys::rte_mempool_get_bulk(pool.0, self.bufs.as_mut_ptr().cast(), REFILL_COUNT as u32)
        };
        self.count = if code == 0 { REFILL_COUNT } else { 0 };
        code == 0
    }

    /// Prefetches the lines that the next short frame is written to. Called off the critical path.
    #[inline(always)]
    pub(super) fn prefetch_for_tx(&self) {
        if let Some(top) = self.count.checked_sub(1) {
            let mbuf = self.bufs[top % CAPACITY];
            prefetch_to_write(mbuf.cast());
            let data = default_data(mbuf);
            prefetch_to_write(data);
            prefetch_to_write(data.wrapping_add(LINE));
        }
    }

    /// Frees all mbufs.
    pub(super) fn drain(&mut self) {
        for &mbuf in &self.bufs[..self.count] {
            // SAFETY: a buffer that nobody else references.
            unsafe { sys::rte_pktmbuf_free(mbuf) };
        }
        self.count = 0;
    }
}

/// Predicts the next received mbuf: where the same mbufs alternate between two ports in one order,
/// the next is known before the ring is read. Used for prefetch hints only.
pub(super) struct RxOrderPredictor {
    /// Successor of an mbuf, by its [`slot`](Self::slot).
    successor: Box<[Mbuf; Self::LEN]>,
    next: Mbuf,
    last: Mbuf,
}

impl RxOrderPredictor {
    /// More than the capacities of two ports.
    const LEN: usize = 256;

    /// An empty predictor.
    pub(super) fn new() -> Self {
        Self { successor: Box::new([null_mut(); Self::LEN]), next: null_mut(), last: null_mut() }
    }

    /// Hash slot of an mbuf. Mbufs of a pool are equidistant.
    #[inline(always)]
    fn slot(mbuf: Mbuf) -> usize {
        (mbuf.addr() as u32 / LINE as u32).wrapping_mul(0x9e37_79b1) as usize >> 24
    }

    /// Records that `mbuf` was received.
    #[inline(always)]
    pub(super) fn record(&mut self, mbuf: Mbuf) {
        self.successor[Self::slot(self.last)] = mbuf;
        self.last = mbuf;
        self.next = self.successor[Self::slot(mbuf)];
    }

    /// Prefetches the predicted next mbuf.
    #[inline(always)]
    pub(super) fn prefetch(&self) {
        prefetch_received(self.next);
    }
}

/// Prefetches the lines of a received short frame at their default place, without a dependent read
/// of the mbuf.
#[inline(always)]
pub(super) fn prefetch_received(mbuf: Mbuf) {
    prefetch(mbuf.cast());
    let data = default_data(mbuf);
    prefetch(data);
    prefetch(data.wrapping_add(LINE));
}

/// Default data address of an mbuf of this crate's pools. Used for prefetch hints only.
#[inline(always)]
fn default_data(mbuf: Mbuf) -> *const u8 {
    mbuf.cast::<u8>().cast_const().wrapping_add(size_of::<sys::rte_mbuf>() + HEADROOM)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mbufs as from a pool.
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

    /// Goal: few of the mbufs of two ports circulate between them, and none is lost.
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

    /// Goal: a full cache keeps no more mbufs, and returns each once.
    #[test]
    fn a_stock_gives_out_each_buffer_once() {
        let mut mbuf_cache = MbufCache::new(1500, true);
        let all = fresh(CAPACITY + 1);
        assert!(all[..CAPACITY].iter().all(|&mbuf| keep(&mut mbuf_cache, mbuf)));
        assert!(!keep(&mut mbuf_cache, all[CAPACITY]));
        let first = mbuf_cache.take_cached().unwrap();
        mbuf_cache.put_back(first);
        assert_eq!(mbuf_cache.take_cached(), Some(first));
        assert!(keep(&mut mbuf_cache, first));
        let next = mbuf_cache.take_cached().unwrap();
        assert_ne!(next, first, "it was fetched to be read");
        assert!(keep(&mut mbuf_cache, next));
        let mut out: Vec<Mbuf> = std::iter::from_fn(|| mbuf_cache.take_cached()).collect();
        out.sort();
        let mut kept = all[..CAPACITY].to_vec();
        kept.sort();
        assert_eq!(out, kept);
    }

    /// Goal: the next of circulating mbufs is predicted, and again after another one has joined.
    #[test]
    fn buffers_that_go_round_are_foreseen() {
        let buf = |i: usize| (0x7f00_0000_0000 + i * 2432) as Mbuf;
        let mut order = RxOrderPredictor::new();
        for count in [1, 2, 64, 65] {
            let mut wrong = 0;
            for lap in 0..3 {
                for i in 0..count {
                    wrong += usize::from(lap == 2 && order.next != buf(i));
                    order.record(buf(i));
                }
            }
            // Two may share a place.
            assert!(wrong <= count / 4, "{wrong} of {count}");
        }
    }
}
