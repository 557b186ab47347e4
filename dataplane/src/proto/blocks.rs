//! Memory for messages without a posted receive.
//!
//! Storage comes in blocks of [`UNIT`] bytes, the unit in which a receiver grants credit: the
//! blocks for everything that a peer may send unrequested are reserved before the credit is
//! granted, so storing can only fail for a peer that exceeds its credit, and its packet is refused.
//! Blocks are touched when they are first used, not before.

use barewire_driver::frame::RxFrame;
use barewire_driver::mem::IoBuf;

use crate::idx::BlockIdx;

/// Bytes of a block, and of one credit.
pub const UNIT: usize = 256;

/// Credits that a message of `len` bytes costs: one for an empty message, as it needs a record. A
/// length that no credit could cover, as only a forged header has it, costs more than any peer
/// holds.
pub const fn units(len: u64) -> u32 {
    let units = len.div_ceil(UNIT as u64);
    if units == 0 {
        1
    } else if units > u32::MAX as u64 {
        u32::MAX
    } else {
        units as u32
    }
}

/// The stored part of a message: blocks in order.
#[derive(Clone, Copy, Debug)]
pub struct Chain {
    head: BlockIdx,
    tail: BlockIdx,
    len: u32,
}

impl Default for Chain {
    fn default() -> Self {
        Self { head: BlockIdx::NONE, tail: BlockIdx::NONE, len: 0 }
    }
}

impl Chain {
    /// Bytes stored.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether nothing is stored.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// All storage blocks of a node.
#[derive(Debug)]
pub struct BlockPool {
    bytes: Vec<[u8; UNIT]>,
    next: Vec<BlockIdx>,
    free: BlockIdx,
    free_count: usize,
    capacity: usize,
}

impl BlockPool {
    /// `capacity` blocks, none of them touched.
    pub fn with_capacity(capacity: usize) -> Self {
        let (bytes, next) = (Vec::with_capacity(capacity), Vec::with_capacity(capacity));
        Self { bytes, next, free: BlockIdx::NONE, free_count: capacity, capacity }
    }

    /// Blocks not in use.
    pub fn free_count(&self) -> usize {
        self.free_count
    }

    /// Appends `len` bytes at `offset` of `frame`. False, and nothing is stored, if there are not
    /// enough blocks.
    pub fn append(
        &mut self,
        chain: &mut Chain,
        frame: &RxFrame<'_>,
        offset: usize,
        len: usize,
    ) -> bool {
        let room = (UNIT - chain.len() % UNIT) % UNIT;
        if len.saturating_sub(room).div_ceil(UNIT) > self.free_count {
            return false;
        }
        let mut done = 0;
        while done < len {
            let at = chain.len() % UNIT;
            if at == 0 {
                self.grow(chain);
            }
            let n = (len - done).min(UNIT - at);
            let block = &mut self.bytes[chain.tail.at()];
            assert!(frame.copy_to(offset + done, &mut block[at..at + n]), "length was checked");
            chain.len += n as u32;
            done += n;
        }
        true
    }

    /// Copies the first `len` bytes of `chain` to `buf_offset` of `buf`.
    pub fn copy_out(&self, chain: &Chain, buf: &IoBuf, buf_offset: usize, len: usize) {
        assert!(len <= chain.len());
        let (mut block, mut done) = (chain.head, 0);
        while done < len {
            let n = (len - done).min(UNIT);
            buf.write_at(buf_offset + done, &self.bytes[block.at()][..n]);
            done += n;
            block = self.next[block.at()];
        }
    }

    /// The address and length of the piece in the first block, for an announcement.
    pub fn first_piece(&self, chain: &Chain) -> (u64, usize) {
        if chain.is_empty() {
            return (0, 0);
        }
        (self.bytes[chain.head.at()].as_ptr() as u64, chain.len().min(UNIT))
    }

    /// Frees the blocks and empties `chain`.
    pub fn release(&mut self, chain: &mut Chain) {
        let mut block = chain.head;
        while block != BlockIdx::NONE {
            let next = self.next[block.at()];
            self.next[block.at()] = self.free;
            self.free = block;
            self.free_count += 1;
            block = next;
        }
        *chain = Chain::default();
    }

    fn grow(&mut self, chain: &mut Chain) {
        let block = if self.free == BlockIdx::NONE {
            assert!(self.bytes.len() < self.capacity, "free_count was checked");
            self.bytes.push([0; UNIT]);
            self.next.push(BlockIdx::NONE);
            BlockIdx::of((self.bytes.len() - 1) as u32)
        } else {
            let block = self.free;
            self.free = self.next[block.at()];
            block
        };
        self.free_count -= 1;
        self.next[block.at()] = BlockIdx::NONE;
        if chain.tail == BlockIdx::NONE {
            chain.head = block;
        } else {
            self.next[chain.tail.at()] = block;
        }
        chain.tail = block;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn chain_gives_back_what_was_stored() {
        let mut pool = BlockPool::with_capacity(8);
        let data: Vec<u8> = (0..1500_usize).map(|i| i as u8).collect();
        let mut out = vec![0_u8; 1500];
        let buf = IoBuf::leaked(&out);
        for pieces in [vec![1500], vec![1, 255, 256, 257, 731], vec![100; 15]] {
            let mut chain = Chain::default();
            let mut at = 0;
            for n in pieces {
                assert!(pool.append(&mut chain, &RxFrame::new(&data), at, n));
                at += n;
            }
            buf.write_at(0, &[0; 1500]);
            pool.copy_out(&chain, &buf, 0, 1500);
            buf.read_at(0, &mut out);
            assert_eq!(out, data);
            assert_eq!(pool.free_count(), 2);
            pool.release(&mut chain);
            assert_eq!(pool.free_count(), 8);
        }
    }

    #[test]
    fn cost_never_wraps() {
        assert_eq!((units(0), units(1), units(256), units(257)), (1, 1, 1, 2));
        assert_eq!((units(256 << 32), units(u64::MAX)), (u32::MAX, u32::MAX));
    }

    #[test]
    fn pool_that_is_too_small_stores_nothing() {
        let mut pool = BlockPool::with_capacity(2);
        let data = [7_u8; 600];
        let mut chain = Chain::default();
        assert!(!pool.append(&mut chain, &RxFrame::new(&data), 0, 513));
        assert_eq!((chain.len(), pool.free_count()), (0, 2));
        assert!(pool.append(&mut chain, &RxFrame::new(&data), 0, 500));
        assert!(!pool.append(&mut chain, &RxFrame::new(&data), 0, 13));
        assert!(pool.append(&mut chain, &RxFrame::new(&data), 0, 12));
    }
}
