//! The memory that the socket's frames lie in: chunks of one length, the first of them to receive
//! into, the others to send from.
//!
//! Each chunk is ours or the kernel's, and this knows which: what a descriptor says is believed
//! only if it names a chunk that the kernel has.

use super::ring::{Broken, Desc};
use crate::mem::Block;

/// Chunks to receive into are 0 to `rx_count` - 1, those to send from follow.
pub(super) struct Umem {
    block: Block,
    chunk_len: usize,
    rx_count: usize,
    /// The kernel has it.
    lent: Box<[bool]>,
    /// Chunks to send from that are ours; the first `free_count` of them are.
    free: Box<[u32]>,
    free_count: usize,
}

/// A received frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Received {
    pub(super) chunk: u32,
    /// Where it starts in the umem.
    pub(super) offset: usize,
    pub(super) len: usize,
}

impl Umem {
    /// Cuts `block` into chunks of `chunk_len` bytes, a power of two, all of them ours.
    pub(super) fn new(block: Block, chunk_len: usize, rx_count: usize) -> Self {
        assert!(chunk_len.is_power_of_two());
        let count = block.len() / chunk_len;
        let free: Box<[u32]> = (rx_count as u32..count as u32).rev().collect();
        let free_count = free.len();
        let lent = vec![false; count].into();
        Self { block, chunk_len, rx_count, lent, free, free_count }
    }

    /// Where it lies, until this is dropped.
    pub(super) fn base(&self) -> *mut u8 {
        self.block.as_mut_ptr()
    }

    pub(super) fn len(&self) -> usize {
        self.block.len()
    }

    /// Gives the kernel a chunk to receive into, which is ours, and says where it starts.
    #[inline]
    pub(super) fn give(&mut self, chunk: u32) -> u64 {
        let is_ours = !std::mem::replace(&mut self.lent[chunk as usize], true);
        assert!(is_ours && (chunk as usize) < self.rx_count, "a chunk that the kernel has");
        u64::from(chunk) * self.chunk_len as u64
    }

    /// Takes back the chunk of a received frame.
    ///
    /// # Errors
    /// [`Broken`]: the kernel had no such chunk, the frame does not lie in it or goes on elsewhere.
    #[inline]
    pub(super) fn received(&mut self, desc: Desc) -> Result<Received, Broken> {
        let chunk = desc.addr / self.chunk_len as u64;
        let (offset, len) = (desc.addr as usize, desc.len as usize);
        if chunk >= self.rx_count as u64 || offset % self.chunk_len + len > self.chunk_len {
            return Err(Broken("the kernel names a frame that is outside of the buffers"));
        }
        if !std::mem::replace(&mut self.lent[chunk as usize], false) {
            return Err(Broken("the kernel returned a buffer that it did not have"));
        }
        if desc.options != 0 {
            return Err(Broken("the kernel says of a frame what was not asked for"));
        }
        Ok(Received { chunk: chunk as u32, offset, len })
    }

    /// A chunk to send from, which the kernel has from now on, and where it starts.
    #[inline]
    pub(super) fn take(&mut self) -> Option<u64> {
        let at = self.free_count.checked_sub(1)?;
        self.free_count = at;
        let chunk = self.free[at];
        self.lent[chunk as usize] = true;
        Some(u64::from(chunk) * self.chunk_len as u64)
    }

    /// The kernel has sent what started at `addr`.
    ///
    /// # Errors
    /// [`Broken`]: it had no such chunk.
    #[inline]
    pub(super) fn sent(&mut self, addr: u64) -> Result<(), Broken> {
        let chunk = addr / self.chunk_len as u64;
        let is_chunk = addr.is_multiple_of(self.chunk_len as u64)
            && chunk >= self.rx_count as u64
            && chunk < self.lent.len() as u64;
        if !is_chunk || !std::mem::replace(&mut self.lent[chunk as usize], false) {
            return Err(Broken("the kernel has sent a buffer that it did not have"));
        }
        self.free[self.free_count] = chunk as u32;
        self.free_count += 1;
        Ok(())
    }

    /// `len` bytes at `offset`.
    ///
    /// # Panics
    /// If they do not lie in one chunk.
    #[inline]
    pub(super) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        let in_chunk = offset & (self.chunk_len - 1);
        assert!(offset < self.block.len() && in_chunk + len <= self.chunk_len, "no such bytes");
        self.block.as_mut_ptr().wrapping_add(offset)
    }
}
