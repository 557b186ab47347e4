//! Lends the application's memory to a driver for the length of a call.
//!
//! The driver of memif copies what it sends before it returns, so a long payload need not be copied
//! to a packet buffer first: an external buffer of ours points to it. The driver releases its
//! reference like that of any buffer, but we hold another one, so the buffer stays ours.

use std::ptr::null_mut;

use barewire_dpdk_sys as sys;

use super::Mbuf;
use super::device::Pool;
use crate::frame::TxFrame;

/// Packet buffers that describe one frame: its head, its body where it is, and its tail.
pub(super) struct ExtBuf {
    parts: [Mbuf; 3],
    /// The memory of the second, when it does not point elsewhere.
    own: *mut std::ffi::c_void,
}

impl ExtBuf {
    /// Takes what it needs from the pool.
    pub(super) fn new(pool: Pool) -> Option<Self> {
        let mut parts = [null_mut(); 3];
        // SAFETY: the pool lives as long as the device; there is room for three.
        let code = unsafe { sys::rte_pktmbuf_alloc_bulk(pool.0, parts.as_mut_ptr(), 3) };
        if code != 0 {
            return None;
        }
        // SAFETY: a buffer of ours.
        let own = unsafe { (*parts[1]).buf_addr };
        Some(Self { parts, own })
    }

    /// The packet that is `frame`, whose body lies at `body`. Good for one burst, in which the
    /// driver may read it and no longer; [`end`](Self::end) follows.
    pub(super) fn describe(&mut self, frame: &TxFrame<'_>, body: (*const u8, usize)) -> Mbuf {
        let [head, middle, tail] = self.parts;
        let count = if frame.tail.is_empty() { 2 } else { 3 };
        // SAFETY: buffers of ours that nobody else has, each with room for the longest frame
        // (`Pmd::room`), whose length fits the fields (`MTU_MOST`).
        unsafe {
            for part in self.parts {
                // One for us, one for the driver.
                (*part).refcnt = 2;
                ((*part).next, (*part).nb_segs) = (null_mut(), 1);
            }
            write(head, frame.head);
            ((*middle).buf_addr, (*middle).data_off) = (body.0.cast_mut().cast(), 0);
            (*middle).data_len = body.1 as u16;
            ((*head).next, (*head).nb_segs) = (middle, count);
            if count == 3 {
                write(tail, frame.tail);
                (*middle).next = tail;
            }
            (*head).pkt_len = frame.len() as u32;
        }
        head
    }

    /// Ends the loan after a burst that took the packet, or did not.
    ///
    /// # Panics
    /// If the driver keeps what it was lent: it would read memory that is no longer its to read.
    pub(super) fn end(&mut self, was_taken: bool) {
        // SAFETY: buffers of ours.
        unsafe {
            let is_kept = was_taken && (*self.parts[1]).refcnt != 1;
            assert!(!is_kept, "the driver keeps memory that it was lent for a call");
            (*self.parts[1]).buf_addr = self.own;
        }
    }

    /// Gives the buffers back.
    pub(super) fn free(self) {
        for part in self.parts {
            // SAFETY: a buffer of ours that nobody else has, as it came from the pool.
            unsafe {
                (*part).refcnt = 1;
                ((*part).next, (*part).nb_segs) = (null_mut(), 1);
                sys::rte_pktmbuf_free(part);
            }
        }
    }
}

/// Writes `bytes` to the usual place of a buffer.
///
/// # Safety
/// The buffer is the caller's and has room.
unsafe fn write(mbuf: Mbuf, bytes: &[u8]) {
    // SAFETY: the caller's promise; memory of a pool overlaps no slice.
    unsafe {
        let at = (*mbuf).buf_addr.cast::<u8>().add(usize::from((*mbuf).data_off));
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len());
        (*mbuf).data_len = bytes.len() as u16;
    }
}
