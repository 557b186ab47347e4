//! Mbufs that point to the application's memory for the length of a call.
//!
//! The memif driver copies what it sends before it returns, so a long payload need not be copied to
//! an mbuf first: an mbuf points to it. The driver releases its reference as of any mbuf, but a
//! second reference is held here, so the mbuf is not freed.

use std::ptr::null_mut;

use barewire_dpdk_sys as sys;

use super::Mbuf;
use super::device::Pool;
use crate::frame::TxFrame;

/// Mbufs of one frame: its head, its body in place, and its tail.
pub(super) struct ExtBuf {
    parts: [Mbuf; 3],
    /// The second mbuf's own buffer, restored after each use.
    own_addr: *mut std::ffi::c_void,
}

impl ExtBuf {
    /// Allocates the mbufs from the pool.
    pub(super) fn new(pool: Pool) -> Option<Self> {
        let mut parts = [null_mut(); 3];
        // SAFETY: the pool lives as long as the device; there is room for three.
        let code = unsafe { sys::rte_pktmbuf_alloc_bulk(pool.0, parts.as_mut_ptr(), 3) };
        if code != 0 {
            return None;
        }
        // SAFETY: a buffer of ours.
        let own_addr = unsafe { (*parts[1]).buf_addr };
        Some(Self { parts, own_addr })
    }

    /// Builds the packet of `frame`, whose body is at `body`. Valid for one burst, in which the
    /// driver may read it and no longer; [`finish`](Self::finish) follows.
    pub(super) fn describe(&mut self, frame: &TxFrame<'_>, body: (*const u8, usize)) -> Mbuf {
        let [head, middle, tail] = self.parts;
        let count = if frame.tail.is_empty() { 2 } else { 3 };
        // SAFETY: buffers that nobody else references, each with room for the longest frame
        // (`Pmd::mbuf_room`), whose length fits the fields (`MTU_MAX`).
        unsafe {
            for part in self.parts {
                // One reference for this, one for the driver.
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

    /// Ends the loan after a burst, which took the packet or not.
    ///
    /// # Panics
    /// If the driver still references the packet: it would read application memory after the call.
    pub(super) fn finish(&mut self, was_taken: bool) {
        // SAFETY: buffers of ours.
        unsafe {
            let is_still_referenced = was_taken && (*self.parts[1]).refcnt != 1;
            assert!(!is_still_referenced, "the driver keeps memory that it was lent for a call");
            (*self.parts[1]).buf_addr = self.own_addr;
        }
    }

    /// Frees the mbufs.
    pub(super) fn free(self) {
        for part in self.parts {
            // SAFETY: a buffer that nobody else references, as it came from the pool.
            unsafe {
                (*part).refcnt = 1;
                ((*part).next, (*part).nb_segs) = (null_mut(), 1);
                sys::rte_pktmbuf_free(part);
            }
        }
    }
}

/// Writes `bytes` to the data of an mbuf.
///
/// # Safety
/// The caller owns the mbuf, and it has room.
unsafe fn write(mbuf: Mbuf, bytes: &[u8]) {
    // SAFETY: the caller's promise; memory of a pool overlaps no slice.
    unsafe {
        let at = (*mbuf).buf_addr.cast::<u8>().add(usize::from((*mbuf).data_off));
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len());
        (*mbuf).data_len = bytes.len() as u16;
    }
}
