//! Packet buffers at hand.
//!
//! Where frames stay in memory a port sends with what it has received: a buffer that goes to and
//! fro between two ports sees neither the pool nor the lists of it that each thread has. The stock
//! is a queue, and the buffer that is to be filled next is fetched when a frame has left: its lines
//! may be in the cache of the processor that read them last, and to ask for them when the next
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
pub(super) struct Stock {
    bufs: [Mbuf; STOCK],
    first: usize,
    count: usize,
    /// Bytes that a buffer has to have.
    buf_len: usize,
    /// Received buffers are kept while there are fewer than this.
    keep_max: usize,
}

impl Stock {
    /// Nothing in stock yet, of buffers for frames of `frame_max` bytes. What was received is kept
    /// if `keeps`.
    pub(super) fn new(frame_max: usize, keeps: bool) -> Self {
        let (buf_len, keep_max) = (HEADROOM + frame_max, if keeps { STOCK } else { 0 });
        Self { bufs: [null_mut(); STOCK], first: 0, count: 0, buf_len, keep_max }
    }

    /// Takes a buffer, to be filled from its usual place on. None if there is none, there and in
    /// the pool.
    #[inline(always)]
    pub(super) fn take(&mut self, pool: Pool) -> Option<Mbuf> {
        if self.count == 0 && !self.fill(pool) {
            return None;
        }
        self.take_at_hand()
    }

    /// As [`take`](Self::take), without asking the pool.
    #[inline(always)]
    pub(super) fn take_at_hand(&mut self) -> Option<Mbuf> {
        if self.count == 0 {
            return None;
        }
        let mbuf = self.bufs[self.first % STOCK];
        self.first = self.first.wrapping_add(1);
        self.count -= 1;
        // SAFETY: a buffer of ours that nobody else has.
        unsafe {
            (*mbuf).data_off = HEADROOM as u16;
            (*mbuf).ol_flags = 0;
        }
        Some(mbuf)
    }

    /// Puts back what was taken last.
    pub(super) fn put_back(&mut self, mbuf: Mbuf) {
        self.first = self.first.wrapping_sub(1);
        self.bufs[self.first % STOCK] = mbuf;
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
        self.bufs[self.first.wrapping_add(self.count) % STOCK] = mbuf;
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

    /// Whether [`take_at_hand`](Self::take_at_hand) has none.
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Takes buffers from the pool for an empty stock, and says whether it had some. They are as
    /// they were given back: with one owner, in one piece, and nothing behind.
    #[cold]
    #[inline(never)]
    pub(super) fn fill(&mut self, pool: Pool) -> bool {
        self.first = 0;
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
        if self.count > 0 {
            let mbuf = self.bufs[self.first % STOCK];
            prefetch_to_write(mbuf.cast());
            let data = usual_data(mbuf);
            prefetch_to_write(data);
            prefetch_to_write(data.wrapping_add(LINE));
        }
    }

    /// Gives everything back.
    pub(super) fn empty(&mut self) {
        for i in 0..self.count {
            // SAFETY: a buffer of ours that nobody else has.
            unsafe { sys::rte_pktmbuf_free(self.bufs[self.first.wrapping_add(i) % STOCK]) };
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
