//! The umem: the memory of a socket's frames, in chunks of one length. The first chunks are for
//! reception, the others for sending.
//!
//! The owner of each chunk, this process or the kernel, is recorded: a descriptor of the kernel is
//! accepted only if it names a chunk that the kernel owns.

use super::ring::{Desc, RingError};
use crate::mem::Block;

/// Receive chunks are 0 to `rx_count` - 1; send chunks follow.
pub(super) struct Umem {
    block: Block,
    chunk_len: usize,
    rx_count: usize,
    /// By chunk: the kernel owns it.
    with_kernel: Box<[bool]>,
    /// Stack of free send chunks, of which the first `free_count` entries are valid.
    free: Box<[u32]>,
    free_count: usize,
}

/// A received frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RxDesc {
    pub(super) chunk: u32,
    /// Offset in the umem, bytes.
    pub(super) offset: usize,
    pub(super) len: usize,
}

impl Umem {
    /// Divides `block` into chunks of `chunk_len` bytes, a power of two, none of them the kernel's.
    pub(super) fn new(block: Block, chunk_len: usize, rx_count: usize) -> Self {
        assert!(chunk_len.is_power_of_two());
        let count = block.len() / chunk_len;
        let free: Box<[u32]> = (rx_count as u32..count as u32).rev().collect();
        let free_count = free.len();
        let with_kernel = vec![false; count].into();
        Self { block, chunk_len, rx_count, with_kernel, free, free_count }
    }

    /// Start of the memory, valid until this is dropped.
    pub(super) fn base(&self) -> *mut u8 {
        self.block.as_mut_ptr()
    }

    pub(super) fn len(&self) -> usize {
        self.block.len()
    }

    /// Hands a receive chunk of ours to the kernel and returns its offset.
    ///
    /// # Panics
    /// If the kernel has the chunk, or it is not for reception.
    #[inline]
    pub(super) fn lend_rx(&mut self, chunk: u32) -> u64 {
        let is_ours = !std::mem::replace(&mut self.with_kernel[chunk as usize], true);
        assert!(is_ours && (chunk as usize) < self.rx_count, "a chunk that the kernel has");
        u64::from(chunk) * self.chunk_len as u64
    }

    /// Takes the chunk of a received frame back from the kernel.
    ///
    /// # Errors
    /// [`RingError`]: the kernel had no such chunk, the frame does not lie in it or goes on
    /// elsewhere.
    #[inline]
    pub(super) fn reclaim_rx(&mut self, desc: Desc) -> Result<RxDesc, RingError> {
        let chunk = desc.addr / self.chunk_len as u64;
        let (offset, len) = (desc.addr as usize, desc.len as usize);
        if chunk >= self.rx_count as u64 || offset % self.chunk_len + len > self.chunk_len {
            return Err(RingError("the kernel names a frame that is outside of the buffers"));
        }
        if !std::mem::replace(&mut self.with_kernel[chunk as usize], false) {
            return Err(RingError("the kernel returned a buffer that it did not have"));
        }
        if desc.options != 0 {
            return Err(RingError("the kernel says of a frame what was not asked for"));
        }
        Ok(RxDesc { chunk: chunk as u32, offset, len })
    }

    /// Allocates a send chunk, accounted to the kernel from now on, and returns its offset.
    #[inline]
    pub(super) fn alloc_tx(&mut self) -> Option<u64> {
        let at = self.free_count.checked_sub(1)?;
        self.free_count = at;
        let chunk = self.free[at];
        self.with_kernel[chunk as usize] = true;
        Some(u64::from(chunk) * self.chunk_len as u64)
    }

    /// Frees the send chunk at offset `addr`, which the kernel has completed.
    ///
    /// # Errors
    /// [`RingError`]: it had no such chunk.
    #[inline]
    pub(super) fn reclaim_tx(&mut self, addr: u64) -> Result<(), RingError> {
        let chunk = addr / self.chunk_len as u64;
        let is_chunk = addr.is_multiple_of(self.chunk_len as u64)
            && chunk >= self.rx_count as u64
            && chunk < self.with_kernel.len() as u64;
        if !is_chunk || !std::mem::replace(&mut self.with_kernel[chunk as usize], false) {
            return Err(RingError("the kernel has sent a buffer that it did not have"));
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
